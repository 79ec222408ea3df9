/*
 * rewrite.c: rewrites a block for another leaf or another type, and a state's tables for another
 * type.
 *
 * A checkpoint can be restored into a store with another number of leaves, and into a program that
 * has widened a state's type meanwhile. In both cases blocks are rewritten, column by column:
 * entries are sorted by hash, so those of one leaf are a range of every column, and nothing is
 * decoded.
 */
#include "block_private.h"
#include "failpoint.h"
#include "store.h"

/* ---- Blocks ---- */

static int check_types(const char *name, int kind, bool is_timed, int new_kind, int new_flags) {
    if (!sk_kind_is_known(new_kind) || (new_flags & ~SK_TIMED))
        return sk_fail(SK_BAD_ARGUMENT, "there is no kind %d with flags %d", new_kind, new_flags);
    bool fits = kind == new_kind || sk_kinds[kind]->wider == new_kind;
    if (!fits || (new_flags != 0 && !sk_kinds[new_kind]->may_expire))
        return sk_fail(SK_SCHEMA, "state '%.80s' is of kind %s%s and cannot become %s%s", name,
                       sk_kinds[kind]->name, is_timed ? ", timed," : "", sk_kinds[new_kind]->name,
                       new_flags & SK_TIMED ? ", timed" : "");
    return SK_OK;
}

/* The first entry whose hash is not below `hash`. */
static uint64_t lower_bound(const uint8_t *block, const sk_block_info *info, uint64_t hash) {
    uint64_t low = 0, high = info->entries;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (sk_load64(block + info->hashes + 8 * middle) < hash)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Entries [*from, *to) are those of the leaf. It checks that all hashes are in order and of the
 * block's leaf; otherwise entries could be lost between two slices without an error. */
static int find_slice(const uint8_t *block, const sk_block_info *info, uint32_t leaf,
                      uint32_t leaf_bits, uint64_t *from, uint64_t *to) {
    uint64_t previous = 0, n = info->entries;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t hash = sk_load64(block + info->hashes + 8 * i);
        if (hash < previous) return CORRUPT("hashes out of order at entry", i);
        bool is_end = i == 0 || i + 1 == n; /* hashes between these two are of the leaf too */
        if (is_end && sk_leaf_of(hash, info->leaf_bits) != info->leaf)
            return CORRUPT("key of another leaf at entry", i);
        previous = hash;
    }
    unsigned shift = 64 - leaf_bits;
    *from = leaf == 0 ? 0 : lower_bound(block, info, (uint64_t)leaf << shift);
    bool is_last = leaf + 1 == 1u << leaf_bits;
    *to = is_last ? info->entries : lower_bound(block, info, (uint64_t)(leaf + 1) << shift);
    return SK_OK;
}

static int check_slice(const uint8_t *block, const sk_block_info *info, uint64_t from,
                       uint64_t to) {
    sk_key_type type;
    sk_key_type_parse(info->key_type, &type);
    const sk_kind_ops *kind = sk_kinds[info->kind];
    entry e, previous = {0};
    int status = SK_OK;
    /* from the entry before: the first one is compared with it */
    for (uint64_t i = from > 0 ? from - 1 : 0; i < to; i++, previous = e) {
        if ((status = entry_at(block, info, i, &e)) != SK_OK) return status;
        if (i < from) continue;
        if ((status = check_entry(block, info, &type, i, &e, &previous)) != SK_OK) return status;
        if ((status = check_value(kind, &e, i)) != SK_OK) return status;
    }
    return sk_block_check_padding(block, info);
}

/* Bytes of a column that items [from, to) take, and where they begin. */
static uint64_t slice_bytes(const uint8_t *block, const sk_block_info *info, uint64_t offsets,
                            uint64_t from, uint64_t to, uint64_t *start) {
    *start = 0;
    if (from == to) return 0;
    if (offsets == 0) {
        *start = 8 * from;
        return 8 * (to - from);
    }
    *start = get_offset(block + offsets, info->offset_width, from);
    return get_offset(block + offsets, info->offset_width, to) - *start;
}

static void copy_offsets(uint8_t *out, const sk_block_info *new_info, uint64_t new_offsets,
                         const uint8_t *block, const sk_block_info *info, uint64_t offsets,
                         uint64_t from, uint64_t start) {
    if (new_offsets == 0) return;
    for (uint64_t i = 0; i <= new_info->entries; i++) {
        uint64_t offset =
            new_info->entries == 0 ? 0 : get_offset(block + offsets, info->offset_width, from + i);
        put_offset(out + new_offsets, new_info->offset_width, i, offset - start);
    }
}

static void copy_stamps(uint8_t *out, const sk_block_info *new_info, const uint8_t *block,
                        const sk_block_info *info, uint64_t from) {
    for (uint64_t i = 0; i < new_info->entries && new_info->stamps != 0; i++) {
        bool is_tomb = info->marks != 0 && block[info->marks + from + i] != 0;
        uint64_t stamp = is_tomb             ? 0
                         : info->stamps != 0 ? sk_load64(block + info->stamps + 8 * (from + i))
                                             : (uint64_t)SK_NO_TIME;
        sk_store64(out + new_info->stamps + 8 * i, stamp);
    }
}

static void copy_values(uint8_t *out, const sk_block_info *new_info, const uint8_t *block,
                        const sk_block_info *info, uint64_t start) {
    const uint8_t *values = block + info->values + start;
    const sk_kind_ops *kind = sk_kinds[info->kind];
    if (new_info->kind == info->kind) {
        memcpy(out + new_info->values, values, new_info->value_bytes);
        return;
    }
    for (uint64_t i = 0; i < new_info->entries; i++) {
        sk_value value;
        memcpy(&value, values + 8 * i, 8);
        value = kind->widen(value);
        memcpy(out + new_info->values + 8 * i, &value, 8);
    }
}

static int write_slice(const uint8_t *block, const sk_block_info *info, uint64_t from,
                       sk_block_info *new_info, sk_buf *buf) {
    uint64_t n = new_info->entries, key_start, value_start;
    new_info->key_bytes = slice_bytes(block, info, info->key_offsets, from, from + n, &key_start);
    new_info->value_bytes =
        slice_bytes(block, info, info->value_offsets, from, from + n, &value_start);
    sk_block_lay_out_new(new_info);
    int status = sk_buf_reserve(buf, new_info->size);
    if (status != SK_OK) return status;
    uint8_t *out = buf->data + buf->len;
    sk_block_write_header(out, new_info);
    sk_block_zero_padding(out, new_info);
    memcpy(out + new_info->hashes, block + info->hashes + 8 * from, 8 * n);
    copy_offsets(out, new_info, new_info->key_offsets, block, info, info->key_offsets, from,
                 key_start);
    memcpy(out + new_info->keys, block + info->keys + key_start, new_info->key_bytes);
    if (info->marks != 0) memcpy(out + new_info->marks, block + info->marks + from, n);
    copy_stamps(out, new_info, block, info, from);
    copy_offsets(out, new_info, new_info->value_offsets, block, info, info->value_offsets, from,
                 value_start);
    copy_values(out, new_info, block, info, value_start);
    buf->len += new_info->size;
    return SK_OK;
}

int sk_block_rewrite(const uint8_t *block, size_t len, uint32_t leaf, uint32_t leaf_bits, int kind,
                     int flags, int as_delta, sk_buf *buf) {
    sk_block_info info;
    int status = SK_FAILPOINT(BLOCK_REWRITE);
    if (status == SK_OK) status = sk_block_read(block, len, &info);
    if (status != SK_OK) return status;
    if (leaf_bits > 20 || leaf >> leaf_bits)
        return sk_fail(SK_BAD_ARGUMENT, "there is no leaf %u of 2^%u", leaf, leaf_bits);
    if ((status = check_types(info.name, info.kind, info.is_timed, kind, flags)) != SK_OK)
        return status;
    uint64_t from = 0, to = 0;
    if ((status = find_slice(block, &info, leaf, leaf_bits, &from, &to)) != SK_OK) return status;
    if ((status = check_slice(block, &info, from, to)) != SK_OK) return status;
    sk_block_info new_info = {.entries = to - from,
                              .leaf = leaf,
                              .leaf_bits = (uint8_t)leaf_bits,
                              .kind = (uint8_t)kind,
                              .is_delta = info.is_delta || as_delta,
                              .is_timed = (flags & SK_TIMED) != 0,
                              .key_width = info.key_width,
                              .value_width = info.value_width};
    strcpy(new_info.name, info.name);
    strcpy(new_info.key_type, info.key_type);
    /* A full block without entries says that there are none; a delta without entries says
     * nothing. */
    if (new_info.entries == 0 && new_info.is_delta) return SK_OK;
    return write_slice(block, &info, from, &new_info, buf);
}

/* ---- States ---- */

/* A slot of a timed table has less room for its key. Keys that only fit a slot which is not timed
 * need memory of their own when the table becomes timed, and give it back otherwise. That memory is
 * allocated first, because this can fail and the rest must not. */
typedef struct key_list {
    sk_long_key **keys; /* in the order of the slots that need one */
    size_t count, room;
} key_list;

static bool wants_long_key(const sk_slot *slot) {
    return slot->key_len != SK_KEY_HEAP && slot->key_len > SK_KEY_INLINE_TIMED;
}

static int make_long_keys(sk_table *table, key_list *list) {
    sk_slot *slot;
    for (size_t at = 0; (slot = sk_table_next(table, &at)) != NULL;) {
        if (!wants_long_key(slot)) continue;
        if (list->count == list->room) {
            size_t room = list->room == 0 ? 64 : 2 * list->room;
            sk_long_key **keys = sk_raw_alloc(room * sizeof *keys);
            if (keys == NULL) return SK_NO_MEMORY;
            if (list->count > 0) memcpy(keys, list->keys, list->count * sizeof *keys);
            sk_raw_free(list->keys);
            list->keys = keys;
            list->room = room;
        }
        sk_long_key *key = sk_alloc(&table->mem, sizeof *key + slot->key_len);
        if (key == NULL) return sk_alloc_status();
        key->len = slot->key_len;
        memcpy(key->data, slot->key, key->len);
        list->keys[list->count++] = key;
    }
    return SK_OK;
}

static void free_long_keys(sk_state *state, uint32_t leaf_count, key_list *list) {
    size_t k = 0;
    for (uint32_t i = 0; i < leaf_count && k < list->count; i++) {
        sk_table *table = &state->tables[i];
        sk_slot *slot;
        for (size_t at = 0; k < list->count && (slot = sk_table_next(table, &at)) != NULL;)
            if (wants_long_key(slot)) {
                sk_free(&table->mem, list->keys[k], sizeof(sk_long_key) + slot->key_len);
                k++;
            }
    }
}

static void make_timed(sk_table *table, const sk_table_env *env, sk_slot *slot,
                       sk_long_key ***next) {
    if (wants_long_key(slot)) {
        sk_long_key *key = *(*next)++;
        uint64_t routing = sk_routing_of(env, key->data, key->len);
        key->check = (uint32_t)(sk_table_hash(table, routing, key->data, key->len) >> 8);
        slot->key_len = SK_KEY_HEAP;
        memcpy(slot->key + 2, &key, sizeof key);
    }
    sk_slot_set_stamp(slot, sk_slot_is_live(slot) ? SK_NO_TIME : 0);
}

static void make_untimed(sk_table *table, sk_slot *slot) {
    slot->marks &= (uint8_t)~SK_MARK_UNSTAMPED;
    if (slot->key_len != SK_KEY_HEAP) return;
    sk_long_key *key = sk_slot_long_key(slot);
    if (key->len > SK_KEY_INLINE) return;
    slot->key_len = (uint8_t)key->len;
    memcpy(slot->key, key->data, key->len);
    sk_free(&table->mem, key, sizeof *key + slot->key_len);
}

static void convert_table(sk_table *table, const sk_table_env *env, int kind, bool is_timed,
                          sk_long_key ***next) {
    sk_slot *slot;
    for (size_t at = 0; (slot = sk_table_next(table, &at)) != NULL;) {
        if (kind != env->kind && sk_slot_is_live(slot))
            slot->value = sk_kinds[env->kind]->widen(slot->value);
        if (is_timed && !env->is_timed) make_timed(table, env, slot, next);
        if (!is_timed && env->is_timed) make_untimed(table, slot);
    }
}

int sk_state_retype(sk_store *store, const char *name, int kind, int flags) {
    sk_state *state = sk_state_find(store, name);
    if (state == NULL) return sk_fail(SK_BAD_ARGUMENT, "there is no state '%.80s'", name);
    bool was_timed = state->flags & SK_TIMED, is_timed = flags & SK_TIMED;
    int status = check_types(name, state->kind, was_timed, kind, flags);
    if (status == SK_OK) status = SK_FAILPOINT(STATE_RETYPE);
    if (status != SK_OK || (state->kind == kind && state->flags == flags)) return status;
    uint32_t epoch;
    if ((status = sk_leaves_lock_write(store, 0, store->leaf_count, &epoch)) != SK_OK)
        return status;
    key_list list = {0};
    for (uint32_t i = 0; i < store->leaf_count && is_timed && !was_timed && status == SK_OK; i++)
        status = make_long_keys(&state->tables[i], &list);
    if (status != SK_OK) free_long_keys(state, store->leaf_count, &list);
    sk_long_key **next = list.keys;
    for (uint32_t i = 0; i < store->leaf_count && status == SK_OK; i++) {
        sk_table *table = &state->tables[i];
        sk_table_env env;
        if (table->groups == 0 && table->forgot == 0) continue; /* the table never held anything */
        sk_env_set(&env, store, state, &store->leaves[i], epoch);
        convert_table(table, &env, kind, is_timed, &next);
        /* No delta may reach back to before this: it would be put over blocks of the other type. */
        table->forgot = epoch;
        if (table->live + table->tombs > 0) store->leaves[i].changed = epoch;
    }
    if (status == SK_OK) {
        state->kind = (uint8_t)kind;
        state->flags = (uint8_t)flags;
    }
    sk_leaves_unlock(store, 0, store->leaf_count);
    sk_raw_free(list.keys);
    return status;
}
