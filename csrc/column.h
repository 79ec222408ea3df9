/* column.h: items of the columns that the caller brings (sk_column). */
#ifndef SK_COLUMN_H
#define SK_COLUMN_H

#include "alloc.h"

typedef struct bytes {
    const uint8_t *data;
    size_t len;
} bytes;

static inline bytes column_bytes(const sk_column *column, int type, int64_t i) {
    if (type == SK_COL_VAR32) {
        const int32_t *offsets = column->offsets;
        return (bytes){(const uint8_t *)column->data + offsets[i],
                       (size_t)(offsets[i + 1] - offsets[i])};
    }
    if (type == SK_COL_VAR64) {
        const int64_t *offsets = column->offsets;
        return (bytes){(const uint8_t *)column->data + offsets[i],
                       (size_t)(offsets[i + 1] - offsets[i])};
    }
    return (bytes){(const uint8_t *)column->data + 8 * i, 8};
}

static inline bool column_is_var(const sk_column *column) {
    return column->type == SK_COL_VAR32 || column->type == SK_COL_VAR64;
}

/* Offsets must rise and stay within the data, or a bad column would read foreign memory. */
int sk_column_check(const sk_column *column, int64_t n, const char *what);

#endif
