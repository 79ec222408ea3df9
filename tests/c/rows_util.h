/*
 * rows_util.h: reads what sk_rows_take wrote, using only the description of MessagePack.
 */
#ifndef SK_ROWS_UTIL_H
#define SK_ROWS_UTIL_H

#include "store_util.h"

/* One row: the parts of its name, and its value; value NULL: a deletion. */
typedef struct util_row {
    uint32_t leaf, number;
    const uint8_t *key, *value;
    size_t key_len, value_len;
} util_row;

static inline uint64_t util_be(const uint8_t *p, unsigned bytes) {
    uint64_t value = 0;
    for (unsigned i = 0; i < bytes; i++) value = value << 8 | p[i];
    return value;
}

static inline void util_put_be(uint8_t *p, uint64_t value, unsigned bytes) {
    for (unsigned i = 0; i < bytes; i++) p[i] = (uint8_t)(value >> 8 * (bytes - 1 - i));
}

/* Reads the bin at *p, and moves *p behind it. */
static inline const uint8_t *util_bin(const uint8_t **p, const uint8_t *end, size_t *len) {
    unsigned width = **p == 0xc4 ? 1 : **p == 0xc5 ? 2 : **p == 0xc6 ? 4 : 0;
    if (width == 0 || (size_t)(end - *p) < 1 + width) abort();
    *len = (size_t)util_be(*p + 1, width);
    const uint8_t *data = *p + 1 + width;
    if ((size_t)(end - data) < *len) abort();
    *p = data + *len;
    return data;
}

/* How many rows the array at `at` says it has. */
static inline uint64_t util_rows_count(const sk_buf *buf, size_t at) {
    if (buf->len - at < 5 || buf->data[at] != 0xdd) abort();
    uint64_t items = util_be(buf->data + at + 1, 4);
    CHECK_EQ(items % 2, 0);
    return items / 2;
}

/* Reads the row at *p, and moves *p behind it. The first row is 5 bytes behind the array's
 * start. */
static inline util_row util_next_row(const uint8_t **p, const uint8_t *end) {
    util_row row = {0};
    size_t len;
    const uint8_t *name = util_bin(p, end, &len);
    if (len < 6 || *p == end) abort();
    row.leaf = (uint32_t)util_be(name, 4);
    row.number = (uint32_t)util_be(name + 4, 2);
    row.key = name + 6;
    row.key_len = len - 6;
    if (**p == 0xc0)
        ++*p;
    else
        row.value = util_bin(p, end, &row.value_len);
    return row;
}

#endif
