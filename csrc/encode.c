/*
 * encode.c: tables as blocks. See block.h.
 *
 * Most of the time goes into waiting for memory, because a leaf's values lie all over the heap. So
 * each value is touched only once, when it is copied, and prefetched AHEAD entries before that. Its
 * length is not needed earlier: values are the last column, and the header is written last.
 * Measured on 4 M entries with values of 100 bytes, in ns of processor time per entry, checksum
 * included: 118 with a first pass that adds up lengths and no prefetch, 67 this way.
 *
 *   1. pick     the slots that go into the block, with their hashes, in the order of the table; of a
 *               table as it was, also those that a log has (undo.h), and not those that are newer
 *   2. sort     by hash; a table is nearly in this order (table.h)
 *   3. write    keys, marks and stamps, then values, then the header
 *
 * Or the keys are given and looked up; keys that are missing go into the block as deletions.
 */
#include "block_private.h"

#include <stdlib.h>

#define AHEAD 16                /* entries whose values are prefetched; 8 to 32 are equally fast */
#define AHEAD_GROUPS 2          /* groups whose long keys are being prefetched */
#define VALUE_GUESS 32          /* bytes to reserve for a value if nothing better is known */
#ifndef SK_NARROW_MAX           /* a test defines it smaller */
#define SK_NARROW_MAX INT32_MAX /* largest offset of 4 bytes: Arrow's are signed */
#endif

/* ---- Picking ---- */

typedef sk_picked picked;

static inline bool is_selected(const sk_slot *slot, sk_select select, uint32_t since,
                               bool with_tombs) {
    switch (select) {
    case SK_SELECT_SINCE:
        return slot->epoch > since;
    case SK_SELECT_DIRTY:
        return (slot->marks & SK_MARK_DIRTY) != 0;
    case SK_SELECT_COLD:
        return sk_slot_is_dirty_and_cold(slot);
    default:
        return with_tombs || sk_slot_is_live(slot);
    }
}

/* Bit k is set if slot k of the group is taken. */
static inline uint32_t taken_slots(const sk_table *table, size_t group) {
    const uint8_t *tags = table->tags + group * SK_GROUP;
    return 0xffff & ~(sk_group_match(tags, SK_TAG_EMPTY) | sk_group_match(tags, SK_TAG_DELETED));
}

static inline void prefetch_long_keys(const sk_table *table, size_t group) {
    for (uint32_t bits = taken_slots(table, group); bits != 0; bits &= bits - 1) {
        const sk_slot *slot = table->slots + group * SK_GROUP + (unsigned)__builtin_ctz(bits);
        if (slot->key_len == SK_KEY_HEAP) __builtin_prefetch(sk_slot_long_key(slot));
    }
}

/* What is selected. */
typedef struct selection {
    sk_select select;
    uint32_t since;
    const sk_past *past;  /* or NULL */
    uint32_t as_of;       /* its epoch; slots that changed later are not looked at */
    uint32_t live, tombs; /* how many of each there are, selected or not; only with past */
} selection;

/* Adds the slot to out[] if it is selected; returns how many it added. */
static inline size_t pick_slot(const sk_slot *slot, const sk_table_env *env,
                               const selection *selected, picked *out, sk_block_info *info) {
    if (!is_selected(slot, selected->select, selected->since, info->is_delta)) return 0;
    /* Deltas may have entries that have expired: their stamps say so. */
    if (selected->select == SK_SELECT_ALL && sk_slot_is_expired(env, slot)) return 0;
    size_t len = 8;
    if (info->key_width == 8) {
        out->hash = sk_xxh64_int((int64_t)sk_load64(slot->key), SK_ROUTE_SEED);
    } else {
        const uint8_t *key = sk_slot_key(slot, &len);
        out->hash = sk_routing_of(env, key, len);
    }
    out->slot = slot;
    info->key_bytes += len;
    return 1;
}

static void count_slot(selection *selected, const sk_slot *slot) {
    selected->live += sk_slot_is_live(slot);
    selected->tombs += !sk_slot_is_live(slot);
}

/* The entries that the log has. */
static size_t pick_saved(const sk_table_env *env, selection *selected, picked *out,
                         sk_block_info *info) {
    size_t n = 0;
    for (const sk_saved *saved = selected->past->saved; saved != NULL; saved = saved->next) {
        n += pick_slot(&saved->slot, env, selected, out + n, info);
        count_slot(selected, &saved->slot);
    }
    return n;
}

static size_t pick(const sk_table *table, const sk_table_env *env, selection *selected, picked *out,
                   sk_block_info *info) {
    size_t n = 0;
    info->key_bytes = 0;
    selected->live = selected->tombs = 0;
    for (size_t group = 0; group < table->groups; group++) {
        if (info->key_width == 0 && group + AHEAD_GROUPS < table->groups)
            prefetch_long_keys(table, group + AHEAD_GROUPS);
        for (uint32_t bits = taken_slots(table, group); bits != 0; bits &= bits - 1) {
            const sk_slot *slot = table->slots + group * SK_GROUP + (unsigned)__builtin_ctz(bits);
            if (slot->epoch > selected->as_of) continue;
            n += pick_slot(slot, env, selected, out + n, info);
            if (selected->past != NULL) count_slot(selected, slot);
        }
    }
    return selected->past == NULL ? n : n + pick_saved(env, selected, out + n, info);
}

/* ---- Sorting ---- */

static int compare_picked(const void *a, const void *b) {
    const picked *x = a, *y = b;
    if (x->hash != y->hash) return x->hash < y->hash ? -1 : 1;
    size_t x_len, y_len;
    const uint8_t *x_key = sk_slot_key(x->slot, &x_len), *y_key = sk_slot_key(y->slot, &y_len);
    return sk_key_compare(x_key, x_len, y_key, y_len);
}

/* For items that are nearly sorted. Hashes that were crafted to be alike need too many moves; then
 * it changes to qsort. */
static void insertion_sort(picked *p, size_t n) {
    size_t moves_left = 16 * n + 64;
    for (size_t i = 1; i < n; i++) {
        picked x = p[i];
        size_t j = i;
        while (j > 0 && (p[j - 1].hash > x.hash ||
                         (p[j - 1].hash == x.hash && compare_picked(&p[j - 1], &x) > 0))) {
            p[j] = p[j - 1];
            j--;
        }
        p[j] = x;
        if (i - j > moves_left) {
            qsort(p, n, sizeof *p, compare_picked);
            return;
        }
        moves_left -= i - j;
    }
}

/* Distributes the items by the hash bits after the leaf's prefix, into about as many places as
 * there are items, and then sorts what is still out of order. A group of the table holds 14 entries
 * in no order, so insertion sort alone would move each by 3 or 4 places and mispredict branches: 5
 * ns more for each entry. Returns the sorted items, or NULL. */
static picked *sort_picked(picked *p, size_t n, unsigned leaf_bits, void **scratch) {
    *scratch = NULL;
    unsigned bits = 1;
    while (bits < 31 && (size_t)1 << bits < n) bits++;
    size_t places = (size_t)1 << bits;
    picked *sorted = sk_raw_alloc((n + 1) * sizeof *sorted + (places + 1) * sizeof(uint32_t));
    if (sorted == NULL) return NULL;
    uint32_t *starts = (uint32_t *)(sorted + n + 1);
    memset(starts, 0, (places + 1) * sizeof *starts);
    for (size_t i = 0; i < n; i++) starts[((p[i].hash << leaf_bits) >> (64 - bits)) + 1]++;
    for (size_t k = 1; k < places; k++) starts[k] += starts[k - 1];
    for (size_t i = 0; i < n; i++) sorted[starts[(p[i].hash << leaf_bits) >> (64 - bits)]++] = p[i];
    insertion_sort(sorted, n);
    *scratch = sorted;
    return sorted;
}

/* ---- Writing ---- */

static void write_keys(uint8_t *block, const sk_block_info *info, const picked *p) {
    uint8_t *keys = block + info->keys;
    uint64_t at = 0;
    for (size_t i = 0; i < info->entries; i++) {
        size_t len;
        const uint8_t *key = sk_slot_key(p[i].slot, &len);
        sk_store64(block + info->hashes + 8 * i, p[i].hash);
        if (info->key_offsets != 0)
            put_offset(block + info->key_offsets, info->offset_width, i, at);
        memcpy(keys + at, key, len);
        at += len;
        if (info->marks != 0) block[info->marks + i] = !sk_slot_is_live(p[i].slot);
    }
    if (info->key_offsets != 0)
        put_offset(block + info->key_offsets, info->offset_width, info->entries, at);
}

static void write_int_keys(uint8_t *block, const sk_block_info *info, const picked *p) {
    for (size_t i = 0; i < info->entries; i++) {
        sk_store64(block + info->hashes + 8 * i, p[i].hash);
        memcpy(block + info->keys + 8 * i, p[i].slot->key, 8);
        if (info->marks != 0) block[info->marks + i] = !sk_slot_is_live(p[i].slot);
    }
}

static void write_stamps(uint8_t *block, const sk_block_info *info, const sk_timing *timing,
                         const picked *p) {
    for (size_t i = 0; i < info->entries; i++) {
        int64_t stamp = sk_slot_is_live(p[i].slot) ? sk_stamp_of(timing, p[i].slot) : 0;
        sk_store64(block + info->stamps + 8 * i, (uint64_t)stamp);
    }
}

static void write_numbers(uint8_t *values, const sk_block_info *info, const picked *p) {
    for (size_t i = 0; i < info->entries; i++) {
        const sk_slot *slot = p[i].slot;
        int64_t bits = sk_slot_is_live(slot) ? slot->value.i64 : 0;
        memcpy(values + 8 * i, &bits, 8);
    }
}

static inline void prefetch_value(const picked *p) {
    if (!sk_slot_is_live(p->slot)) return;
    const char *value = p->slot->value.own; /* or a blob */
    __builtin_prefetch(value);
    __builtin_prefetch(value + 64);
}

static inline int append_blob(sk_buf *buf, const sk_blob *blob) {
    if (__builtin_expect(buf->cap - buf->len < blob->len, 0)) {
        int status = sk_buf_reserve(buf, blob->len);
        if (status != SK_OK) return status;
    }
    memcpy(buf->data + buf->len, blob->data, blob->len);
    buf->len += blob->len;
    return SK_OK;
}

/* Appends the values at the end of buf; start is the block's place in buf, whose memory may move.
 * SK_TOO_LARGE if the values need wider offsets. */
static int write_values(sk_buf *buf, size_t start, sk_block_info *info, const picked *p) {
    size_t values = buf->len, n = info->entries;
    const sk_kind_ops *kind = sk_kinds[info->kind];
    bool is_blob = kind->held == SK_BLOB, is_narrow = info->offset_width == 4;
    for (size_t i = 0; i < n && i < AHEAD; i++) prefetch_value(&p[i]);
    for (size_t i = 0; i < n; i++) {
        if (i + AHEAD < n) prefetch_value(&p[i + AHEAD]);
        put_offset(buf->data + start + info->value_offsets, info->offset_width, i,
                   buf->len - values);
        const sk_slot *slot = p[i].slot;
        if (!sk_slot_is_live(slot)) continue;
        int status = is_blob || slot->marks & SK_MARK_SAVED ? append_blob(buf, slot->value.blob)
                                                            : kind->encode(slot->value, buf);
        if (status != SK_OK) return status;
        if (is_narrow && buf->len - values > SK_NARROW_MAX) return SK_TOO_LARGE;
    }
    info->value_bytes = buf->len - values;
    put_offset(buf->data + start + info->value_offsets, info->offset_width, n, info->value_bytes);
    return SK_OK;
}

/* Reserves room for all columns, and an estimate for the values. With blobs, the table's memory is
 * more than all values together, and reserving that much avoids growing (nearly always, if it is of
 * the table as it was). table: NULL if the entries are from several tables. */
static int reserve_block(sk_buf *buf, const sk_table *table, const sk_block_info *info) {
    uint64_t guess = info->entries * VALUE_GUESS;
    bool is_most = table != NULL && 2 * info->entries > (uint64_t)table->live + table->tombs;
    if (sk_kinds[info->kind]->held == SK_BLOB && is_most) guess = table->mem.used;
    return sk_buf_reserve(buf, info->size + guess + 8);
}

static int write_columns(sk_buf *buf, const sk_table *table, sk_block_info *info,
                         const sk_timing *timing, const picked *p) {
    size_t start = buf->len;
    int status = reserve_block(buf, table, info);
    if (status != SK_OK) return status;
    sk_block_zero_padding(buf->data + start, info);
    (info->key_width == 8 ? write_int_keys : write_keys)(buf->data + start, info, p);
    if (info->is_timed) write_stamps(buf->data + start, info, timing, p);
    buf->len = start + info->values;
    if (info->value_width == 8)
        write_numbers(buf->data + buf->len, info, p);
    else if ((status = write_values(buf, start, info, p)) == SK_OK)
        status = sk_buf_reserve(buf, 8);
    if (status != SK_OK) {
        buf->len = start;
        return status;
    }
    sk_block_lay_out(info); /* once more, now that value_bytes is known */
    if (info->value_width == 0) memset(buf->data + buf->len, 0, start + info->size - buf->len);
    sk_block_write_header(buf->data + start, info);
    buf->len = start + info->size;
    return SK_OK;
}

static int write_block(sk_buf *buf, const sk_table *table, sk_block_info *info,
                       const sk_timing *timing, const picked *p) {
    info->value_bytes = info->value_width * info->entries;
    info->offset_width = info->key_bytes > SK_NARROW_MAX ? 8 : 4;
    sk_block_lay_out(info);
    int status = write_columns(buf, table, info, timing, p);
    if (status != SK_TOO_LARGE || info->offset_width == 8) return status;
    info->offset_width = 8; /* 2 GiB of values in one leaf: write it again */
    sk_block_lay_out(info);
    return write_columns(buf, table, info, timing, p);
}

static sk_block_info info_of(const sk_table_env *env, const char *name, uint32_t leaf,
                             bool is_delta) {
    sk_block_info info = {.leaf = leaf,
                          .leaf_bits = env->leaf_bits,
                          .kind = env->kind,
                          .is_delta = is_delta,
                          .is_timed = env->is_timed,
                          .key_width = strcmp(env->key_type->text, "i") == 0 ? 8 : 0,
                          .value_width = sk_kind_width(env->kind)};
    strcpy(info.name, name);
    strcpy(info.key_type, env->key_type->text);
    return info;
}

int sk_block_encode(const sk_table *table, const sk_table_env *env, const char *name, uint32_t leaf,
                    sk_select select, uint32_t since, const sk_past *past, sk_buf *buf) {
    size_t entries_max = (size_t)table->live + table->tombs, live = table->live;
    if (past != NULL) {
        live = past->live;
        entries_max = live + past->tombs == 0 ? 0 : entries_max + past->saved_count;
    }
    bool is_full_delta = select == SK_SELECT_REST;
    if (is_full_delta) select = SK_SELECT_ALL;
    if (entries_max == 0 && !is_full_delta) return SK_OK;
    bool is_write_back = select == SK_SELECT_DIRTY || select == SK_SELECT_COLD;
    if (is_write_back && table->dirty == 0) return SK_OK;
    picked *p = sk_raw_alloc((entries_max + 1) * sizeof *p);
    if (p == NULL) return SK_NO_MEMORY;
    sk_block_info info = info_of(env, name, leaf, select != SK_SELECT_ALL || !env->is_whole);
    selection selected = {.select = select,
                          .since = since,
                          .past = past,
                          .as_of = past != NULL ? past->epoch : UINT32_MAX};
    info.entries = pick(table, env, &selected, p, &info);
    /* Only tombstones that nobody but deltas may need are dropped from a table (table.h). */
    assert(past == NULL || selected.live == past->live);
    bool is_lost = past != NULL && selected.tombs != past->tombs;
    assert(!is_lost || (selected.tombs < past->tombs && env->is_whole));
    /* A delta this large costs its reader more than a full block: the reader would also read the
     * older segments, and then replace what they have. */
    bool is_large = 2 * info.entries > live && info.entries > 0;
    if (select == SK_SELECT_SINCE && env->is_whole && (is_large || is_lost)) {
        is_full_delta = true;
        info.is_delta = false;
        selected.select = SK_SELECT_ALL;
        info.entries = pick(table, env, &selected, p, &info);
    }
    int status = SK_OK;
    if (info.entries > 0 || is_full_delta) {
        void *scratch;
        const picked *sorted = sort_picked(p, info.entries, env->leaf_bits, &scratch);
        status =
            sorted == NULL ? SK_NO_MEMORY : write_block(buf, table, &info, env->timing, sorted);
        sk_raw_free(scratch);
    }
    sk_raw_free(p);
    return status;
}

/* ---- Keys that were asked for ---- */

/* A tombstone for a key that is not in the table; a long key is copied to *room, which moves on. */
static void make_tombstone(sk_slot *slot, const sk_key *key, uint8_t **room) {
    *slot = (sk_slot){.marks = SK_MARK_TOMB, .key_len = (uint8_t)key->len};
    if (key->len <= SK_KEY_INLINE_TIMED) {
        if (key->len > 0) memcpy(slot->key, key->data, key->len);
        return;
    }
    sk_long_key *held = (sk_long_key *)*room;
    held->len = (uint32_t)key->len;
    memcpy(held->data, key->data, key->len);
    slot->key_len = SK_KEY_HEAP;
    memcpy(slot->key + 2, &held, sizeof held);
    *room += padded(sizeof *held + key->len);
}

/* Drops repeated keys of a sorted list; returns how many are left. */
static size_t drop_repeated(picked *p, size_t n) {
    size_t kept = 0;
    for (size_t i = 0; i < n; i++) {
        bool is_new = kept == 0 || p[kept - 1].hash != p[i].hash;
        if (is_new || compare_picked(&p[kept - 1], &p[i]) != 0) p[kept++] = p[i];
    }
    return kept;
}

int sk_wanted_make(const sk_key *keys, size_t n, unsigned leaf_bits, sk_wanted *wanted) {
    size_t long_bytes = 0;
    for (size_t i = 0; i < n; i++)
        if (keys[i].len > SK_KEY_INLINE_TIMED)
            long_bytes += padded(sizeof(sk_long_key) + keys[i].len);
    *wanted = (sk_wanted){0};
    /* one allocation: the items to sort, a tombstone for each, and their long keys */
    picked *p = sk_raw_alloc(n * (sizeof *p + sizeof(sk_slot)) + long_bytes + 1);
    if (p == NULL) return SK_NO_MEMORY;
    sk_slot *tombstones = (sk_slot *)(p + n);
    uint8_t *room = (uint8_t *)(tombstones + n);
    for (size_t i = 0; i < n; i++) {
        make_tombstone(&tombstones[i], &keys[i], &room);
        p[i] = (picked){keys[i].hash, &tombstones[i]};
    }
    void *scratch;
    wanted->items = sort_picked(p, n, leaf_bits, &scratch);
    if (wanted->items == NULL) {
        sk_raw_free(p);
        return SK_NO_MEMORY;
    }
    assert(wanted->items == scratch);
    wanted->memory = p;
    wanted->n = drop_repeated(wanted->items, n);
    return SK_OK;
}

void sk_wanted_free(sk_wanted *wanted) {
    sk_raw_free(wanted->items);
    sk_raw_free(wanted->memory);
    *wanted = (sk_wanted){0};
}

/* A lookup waits for memory three times, one after the other: for the table's head, the tags and
 * the slot. */
static inline void prefetch_wanted(const sk_wanted *wanted, size_t i, const sk_table *tables,
                                   unsigned leaf_bits) {
    const picked *p = wanted->items + i;
    if (i + 3 * AHEAD < wanted->n)
        __builtin_prefetch(&tables[sk_leaf_of(p[3 * AHEAD].hash, leaf_bits)]);
    for (unsigned step = 2; step >= 1; step--) {
        if (i + step * AHEAD >= wanted->n) continue;
        uint64_t hash = p[step * AHEAD].hash;
        const sk_table *table = &tables[sk_leaf_of(hash, leaf_bits)];
        if (table->groups == 0 || table->is_flooded) continue;
        size_t group = (size_t)sk_group_of(hash, leaf_bits, table->groups) * SK_GROUP;
        if (step == 2) {
            __builtin_prefetch(table->tags + group);
            continue;
        }
        uint32_t hits = sk_group_match(table->tags + group, sk_tag_of(hash));
        if (hits != 0) __builtin_prefetch(table->slots + group + (unsigned)__builtin_ctz(hits));
        __builtin_prefetch(p[step * AHEAD].slot); /* the key to look for */
    }
}

void sk_wanted_find(sk_wanted *wanted, const sk_table *tables, const sk_table_env *env) {
    for (size_t i = 0; i < wanted->n; i++) {
        prefetch_wanted(wanted, i, tables, env->leaf_bits);
        picked *p = &wanted->items[i];
        size_t len;
        const uint8_t *key = sk_slot_key(p->slot, &len);
        const sk_slot *slot = sk_table_find(&tables[sk_leaf_of(p->hash, env->leaf_bits)],
                                            env->leaf_bits, p->hash, key, len);
        if (slot != NULL && sk_slot_is_live(slot) && !sk_slot_is_expired(env, slot)) p->slot = slot;
    }
}

int sk_wanted_encode(const sk_wanted *wanted, const sk_table_env *env, const char *name,
                     uint32_t leaf, uint8_t leaf_bits, sk_buf *buf) {
    if (wanted->n == 0) return SK_OK;
    sk_block_info info = info_of(env, name, leaf, true);
    info.leaf_bits = leaf_bits;
    info.entries = wanted->n;
    for (size_t i = 0; i < wanted->n; i++) {
        size_t len;
        sk_slot_key(wanted->items[i].slot, &len);
        info.key_bytes += len;
    }
    return write_block(buf, NULL, &info, env->timing, wanted->items);
}
