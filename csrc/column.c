/* column.c: see column.h. */
#include "column.h"

int sk_column_check(const sk_column *column, int64_t n, const char *what) {
    bool is_8_byte = column->type == SK_COL_I64 || column->type == SK_COL_F64;
    if (n > 0 && is_8_byte && (column->data == NULL || column->data_len / 8 < n))
        return sk_fail(SK_BAD_ARGUMENT, "the column of %s is shorter than %lld records", what,
                       (long long)n);
    if (is_8_byte || column->type == SK_COL_NONE || n == 0) return SK_OK;
    if (!column_is_var(column))
        return sk_fail(SK_BAD_ARGUMENT, "%s: no column type %d", what, column->type);
    int64_t at = 0;
    bool is_bad = column->offsets == NULL || (column->data == NULL && column->data_len > 0);
    for (int64_t i = 0; i <= n && !is_bad; i++) {
        int64_t offset = column->type == SK_COL_VAR32 ? ((const int32_t *)column->offsets)[i]
                                                      : ((const int64_t *)column->offsets)[i];
        is_bad = offset < at || offset > column->data_len;
        at = offset;
    }
    if (is_bad)
        return sk_fail(SK_BAD_ARGUMENT, "the offsets of the column of %s are out of order", what);
    return SK_OK;
}
