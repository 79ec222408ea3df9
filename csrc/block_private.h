/*
 * block_private.h: what the files that write, read and rewrite blocks share: where the columns are,
 * and one entry as it lies in them. block.h describes the layout.
 */
#ifndef SK_BLOCK_PRIVATE_H
#define SK_BLOCK_PRIVATE_H

#include "block.h"

#define FLAG_DELTA 1
#define FLAG_WIDE 2
#define FLAG_TIMED 4

static inline uint64_t padded(uint64_t n) { return (n + 7) & ~(uint64_t)7; }

/* Places the columns; every count is known to be below 2^56, so nothing overflows. */
void sk_block_lay_out(sk_block_info *info);
/* Chooses offsets of 4 bytes if these suffice, and then places the columns. */
void sk_block_lay_out_new(sk_block_info *info);
/* Writes the header and the names, with zeroes up to the first column. */
void sk_block_write_header(uint8_t *block, const sk_block_info *info);
/* Zeroes the bytes where there may be padding; the columns, written later, overwrite their own
 * bytes. */
void sk_block_zero_padding(uint8_t *block, const sk_block_info *info);

static inline void put_offset(uint8_t *column, unsigned width, size_t i, uint64_t offset) {
    if (width == 4)
        sk_store32(column + 4 * i, (uint32_t)offset);
    else
        sk_store64(column + 8 * i, offset);
}

static inline uint64_t get_offset(const uint8_t *column, unsigned width, uint64_t i) {
    return width == 4 ? sk_load32(column + 4 * i) : sk_load64(column + 8 * i);
}

/* One entry, pointing into the block. */
typedef struct entry {
    uint64_t hash;
    const uint8_t *key, *value;
    size_t key_len, value_len;
    int64_t stamp; /* 0 if the block is not timed */
    bool is_tomb;
} entry;

/* Bytes [from, to) of item i in a column of `bytes` bytes. */
static inline int column_item(const uint8_t *block, const sk_block_info *info, uint64_t offsets,
                              uint64_t bytes, uint64_t i, uint64_t *from, uint64_t *to) {
    *from = get_offset(block + offsets, info->offset_width, i);
    *to = get_offset(block + offsets, info->offset_width, i + 1);
    if (*from > *to || *to > bytes) return CORRUPT("offsets out of order at entry", i);
    if (i == 0 && *from != 0) return CORRUPT("first offset is not 0 but", *from);
    if (i + 1 == info->entries && *to != bytes) return CORRUPT("last offset is", *to);
    return SK_OK;
}

static inline int entry_at(const uint8_t *block, const sk_block_info *info, uint64_t i, entry *e) {
    uint64_t from = 8 * i, to = 8 * i + 8;
    int status;
    e->hash = sk_load64(block + info->hashes + 8 * i);
    if (info->key_width == 0 && (status = column_item(block, info, info->key_offsets,
                                                      info->key_bytes, i, &from, &to)) != SK_OK)
        return status;
    e->key = block + info->keys + from;
    e->key_len = to - from;
    from = 8 * i;
    to = 8 * i + 8;
    if (info->value_width == 0 && (status = column_item(block, info, info->value_offsets,
                                                        info->value_bytes, i, &from, &to)) != SK_OK)
        return status;
    e->value = block + info->values + from;
    e->value_len = to - from;
    e->is_tomb = info->marks != 0 && block[info->marks + i] != 0;
    e->stamp = info->stamps != 0 ? (int64_t)sk_load64(block + info->stamps + 8 * i) : 0;
    return SK_OK;
}

/* Checks entry i on its own and against the one before it. Its value is checked by check_value, or
 * by the code that decodes it. */
static inline int check_entry(const uint8_t *block, const sk_block_info *info,
                              const sk_key_type *type, uint64_t i, const entry *e,
                              const entry *previous) {
    uint64_t hash;
    if (info->key_width == 8)
        hash = sk_xxh64_int((int64_t)sk_load64(e->key), SK_ROUTE_SEED);
    else if (sk_key_route(type, e->key, e->key_len, &hash) != SK_OK)
        return CORRUPT("bad key at entry", i);
    if (hash != e->hash) return CORRUPT("hash is not the key's at entry", i);
    if (sk_leaf_of(hash, info->leaf_bits) != info->leaf)
        return CORRUPT("key of another leaf at entry", i);
    if (i > 0 && e->hash <= previous->hash) {
        if (e->hash < previous->hash ||
            sk_key_compare(e->key, e->key_len, previous->key, previous->key_len) <= 0)
            return CORRUPT("keys out of order at entry", i);
    }
    if (info->marks != 0 && block[info->marks + i] > 1) return CORRUPT("unknown mark at entry", i);
    if (e->is_tomb) {
        bool is_empty = info->value_width == 8 ? sk_load64(e->value) == 0 : e->value_len == 0;
        if (e->stamp != 0) return CORRUPT("deletion with a stamp at entry", i);
        return is_empty ? SK_OK : CORRUPT("deletion with a value at entry", i);
    }
    if (e->value_len > SK_VALUE_BYTES_MAX) return CORRUPT("value too large at entry", i);
    return SK_OK;
}

/* Checks the value of entry i. */
static inline int check_value(const sk_kind_ops *kind, const entry *e, uint64_t i) {
    if (kind->check == NULL || e->is_tomb) return SK_OK;
    return kind->check(e->value, e->value_len, i);
}

/* Padding must be zero, or equal state would not give equal bytes. */
int sk_block_check_padding(const uint8_t *block, const sk_block_info *info);

#endif
