/* kind.c: the table of kinds. See kind.h. */
#include "kind.h"

#define KINDS(ROW)                                                                                 \
    ROW(SK_I64, sk_i64_kind)       /* number.c */                                                  \
    ROW(SK_F64, sk_f64_kind)       /* number.c */                                                  \
    ROW(SK_BYTES, sk_bytes_kind)   /* bytes.c */                                                   \
    ROW(SK_LIST, sk_list_kind)     /* container.c */                                               \
    ROW(SK_MAP, sk_map_kind)       /* container.c */                                               \
    ROW(SK_NESTED, sk_nested_kind) /* container.c */                                               \
    ROW(SK_TIMERS, sk_timers_kind) /* timers.c */

#define DECLARE(number, row) extern const sk_kind_ops row;
#define POINT(number, row) [number] = &(row),

KINDS(DECLARE)

const sk_kind_ops *const sk_kinds[SK_KINDS_MAX] = {KINDS(POINT)};
