/* encode.c: tables as blocks. See block.h. */
#include "block_private.h"

#include <stdlib.h>

typedef struct picked {
    uint64_t hash;
    const sk_slot *slot;
} picked;

static int compare_picked(const void *a, const void *b) {
    const picked *x = a, *y = b;
    if (x->hash != y->hash) return x->hash < y->hash ? -1 : 1;
    size_t x_len, y_len;
    const uint8_t *x_key = sk_slot_key(x->slot, &x_len), *y_key = sk_slot_key(y->slot, &y_len);
    return sk_key_compare(x_key, x_len, y_key, y_len);
}

/* A table lies nearly in hash order, so insertion sort has little to do; a flooded one does not,
 * and is found out by the moves it takes. */
static void sort_picked(picked *p, size_t n) {
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

static bool is_selected(const sk_slot *slot, sk_select select, uint32_t since, bool with_tombs) {
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

static uint64_t value_size(int kind, const sk_slot *slot) {
    if (kind == SK_I64 || kind == SK_F64) return 8;
    if (!sk_slot_is_live(slot)) return 0;
    return sk_kind_is_blob(kind) ? slot->value.blob->len : sk_node_size(slot->value.obj);
}

static size_t pick(const sk_table *table, const sk_table_env *env, sk_select select, uint32_t since,
                   picked *out, sk_block_info *info) {
    size_t n = 0;
    sk_slot *slot;
    for (size_t at = 0; (slot = sk_table_next(table, &at)) != NULL;) {
        if (!is_selected(slot, select, since, info->is_delta)) continue;
        /* deltas are made of tables that were swept: what expires just now has its stamp */
        if (select == SK_SELECT_ALL && sk_slot_is_expired(env, slot)) continue;
        size_t len;
        const uint8_t *key = sk_slot_key(slot, &len);
        out[n++] = (picked){sk_routing_of(env, key, len), slot};
        info->key_bytes += len;
        info->value_bytes += value_size(env->kind, slot);
    }
    return n;
}

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

static void write_stamps(uint8_t *block, const sk_block_info *info, const sk_timing *timing,
                         const picked *p) {
    for (size_t i = 0; i < info->entries; i++) {
        int64_t stamp = sk_slot_is_live(p[i].slot) ? sk_stamp_of(timing, p[i].slot) : 0;
        sk_store64(block + info->stamps + 8 * i, (uint64_t)stamp);
    }
}

/* Values are the last column and go where buf ends; start is the block's place in buf. */
static int write_values(sk_buf *buf, size_t start, const sk_block_info *info, const picked *p) {
    if (info->value_width == 8) {
        for (size_t i = 0; i < info->entries; i++) {
            sk_value value = sk_slot_is_live(p[i].slot) ? p[i].slot->value : (sk_value){0};
            memcpy(buf->data + buf->len + 8 * i, &value, 8);
        }
        buf->len += 8 * info->entries;
        return SK_OK;
    }
    size_t values = buf->len;
    for (size_t i = 0; i < info->entries; i++) {
        const sk_slot *slot = p[i].slot;
        put_offset(buf->data + start + info->value_offsets, info->offset_width, i,
                   buf->len - values);
        if (!sk_slot_is_live(slot)) continue;
        int status = sk_kind_is_blob(info->kind)
                         ? sk_buf_put(buf, slot->value.blob->data, slot->value.blob->len)
                         : sk_node_encode(slot->value.obj, buf);
        if (status != SK_OK) return status;
    }
    assert(buf->len - values == info->value_bytes);
    put_offset(buf->data + start + info->value_offsets, info->offset_width, info->entries,
               info->value_bytes);
    return SK_OK;
}

static int write_block(sk_buf *buf, const sk_block_info *info, const sk_timing *timing,
                       const picked *p) {
    size_t start = buf->len;
    int status = sk_buf_reserve(buf, info->size);
    if (status != SK_OK) return status;
    uint8_t *block = buf->data + start;
    sk_block_write_header(block, info);
    sk_block_zero_padding(block, info);
    write_keys(block, info, p);
    if (info->is_timed) write_stamps(block, info, timing, p);
    buf->len = start + info->values;
    status = write_values(buf, start, info, p);
    if (status != SK_OK) {
        buf->len = start;
        return status;
    }
    buf->len = start + info->size; /* behind the values is padding, which is zero */
    return SK_OK;
}

int sk_block_encode(const sk_table *table, const sk_table_env *env, const char *name, uint32_t leaf,
                    sk_select select, uint32_t since, sk_buf *buf) {
    size_t entries_max = (size_t)table->live + table->tombs;
    /* A table that lost entries without a trace since then has no delta: all of it is written, as
     * a full block, even if nothing is left of it. */
    bool is_full_delta = select == SK_SELECT_SINCE && table->forgot > since;
    if (is_full_delta) select = SK_SELECT_ALL;
    if (entries_max == 0 && !is_full_delta) return SK_OK;
    bool is_write_back = select == SK_SELECT_DIRTY || select == SK_SELECT_COLD;
    if (is_write_back && table->dirty == 0) return SK_OK;
    picked *p = sk_raw_alloc((entries_max + 1) * sizeof *p);
    if (p == NULL) return SK_NO_MEMORY;
    sk_block_info info = {.leaf = leaf,
                          .leaf_bits = env->leaf_bits,
                          .kind = env->kind,
                          .is_delta = select != SK_SELECT_ALL || !env->is_whole,
                          .is_timed = env->is_timed,
                          .key_width = strcmp(env->key_type->text, "i") == 0 ? 8 : 0,
                          .value_width = (uint8_t)value_width_of(env->kind)};
    strcpy(info.name, name);
    strcpy(info.key_type, env->key_type->text);
    info.entries = pick(table, env, select, since, p, &info);
    /* So large a delta costs its reader more than all entries would: they, too, would be read, from
     * older segments, and then replaced. */
    if (select == SK_SELECT_SINCE && env->is_whole && 2 * info.entries > table->live &&
        info.entries > 0) {
        is_full_delta = true;
        info.is_delta = false;
        info.key_bytes = info.value_bytes = 0;
        info.entries = pick(table, env, SK_SELECT_ALL, 0, p, &info);
    }
    int status = SK_OK;
    if (info.entries > 0 || is_full_delta) {
        sk_block_lay_out_new(&info);
        sort_picked(p, info.entries);
        status = write_block(buf, &info, env->timing, p);
    }
    sk_raw_free(p);
    return status;
}
