/*
 * number.c: the kinds i64 and f64: a number in its slot.
 *
 * batch.c knows these two kinds, and has a shorter way for their batches.
 */
#include "entry.h"

#include <math.h>

/* ---- The kinds ---- */

static int put_number(sk_at *at, const sk_key *key, const uint8_t *data, size_t len) {
    sk_value value;
    if (len != 8) return sk_fail(SK_BAD_VALUE, "a number has 8 bytes, not %zu", len);
    memcpy(&value, data, 8);
    return sk_entry_put(at, key, value);
}

/* Beyond 2^53 the number is rounded to the nearest float, as Python's float() does. */
static sk_value widen_i64(sk_value value) { return (sk_value){.f64 = (double)value.i64}; }

const sk_kind_ops sk_i64_kind = {.name = "i64",
                                 .held = SK_IN_SLOT,
                                 .may_expire = true,
                                 .batch = 1 << SK_B_ADD,
                                 .column = SK_COL_I64,
                                 .row_tag = 0xd3,
                                 .wider = SK_F64,
                                 .widen = widen_i64,
                                 .put = put_number};

const sk_kind_ops sk_f64_kind = {.name = "f64",
                                 .held = SK_IN_SLOT,
                                 .may_expire = true,
                                 .batch = 1 << SK_B_ADD,
                                 .column = SK_COL_F64,
                                 .row_tag = 0xcb,
                                 .put = put_number};

/* ---- Calls ---- */

/*
 * The i64 and f64 operations differ only in their type and in how they add, so one macro makes
 * both. ADD(a, b, sum): computes *sum, true on overflow.
 */
#define ADD_I64(a, b, sum) __builtin_add_overflow(a, b, sum)
#define ADD_F64(a, b, sum) (*(sum) = (a) + (b), false)

#define NUMBER_OPERATIONS(NAME, TYPE, KIND_OF, ADD)                                                \
    static int fold_##NAME(TYPE now, int fold, TYPE operand, TYPE *result) {                       \
        switch (fold) {                                                                            \
        case SK_ADD:                                                                               \
            if (ADD(now, operand, result))                                                         \
                return sk_fail(SK_OVERFLOW, "the sum does not fit into 64 bits");                  \
            return SK_OK;                                                                          \
        case SK_MIN:                                                                               \
            *result = operand < now ? operand : now;                                               \
            return SK_OK;                                                                          \
        case SK_MAX:                                                                               \
            *result = operand > now ? operand : now;                                               \
            return SK_OK;                                                                          \
        default:                                                                                   \
            return sk_fail(SK_BAD_ARGUMENT, "there is no fold %d", fold);                          \
        }                                                                                          \
    }                                                                                              \
    static int entry_fold_##NAME(sk_at *at, const sk_key *key, int fold, TYPE operand,             \
                                 TYPE initial, TYPE *result) {                                     \
        sk_slot *slot;                                                                             \
        TYPE value = 0;                                                                            \
        int status = sk_entry_find(at, key, &slot);                                                \
        if (status == SK_UNKNOWN) return status;                                                   \
        TYPE now = status == SK_OK ? slot->value.NAME : fold == SK_ADD ? initial : operand;        \
        int folded = fold_##NAME(now, fold, operand, &value);                                      \
        if (folded != SK_OK) return folded;                                                        \
        if (status != SK_OK) {                                                                     \
            slot = sk_entry_make_live(at, key, slot);                                              \
            if (slot == NULL) return sk_alloc_status();                                            \
        }                                                                                          \
        slot->value.NAME = value;                                                                  \
        sk_entry_changed(at, slot);                                                                \
        if (result != NULL) *result = value;                                                       \
        return SK_OK;                                                                              \
    }                                                                                              \
    int sk_entry_add_##NAME(sk_at *at, const sk_key *key, TYPE operand, TYPE initial,              \
                            TYPE *result) {                                                        \
        return entry_fold_##NAME(at, key, SK_ADD, operand, initial, result);                       \
    }                                                                                              \
    int sk_##NAME##_get(sk_store *store, uint32_t state, const uint8_t *data, size_t len,          \
                        TYPE *value) {                                                             \
        sk_at at;                                                                                  \
        sk_key key;                                                                                \
        sk_slot *slot;                                                                             \
        int status =                                                                               \
            sk_call_begin(store, state, SK_ONLY(KIND_OF), data, len, SK_READS, &at, &key);         \
        if (status != SK_OK) return status;                                                        \
        status = sk_entry_find(&at, &key, &slot);                                                  \
        if (status == SK_OK) {                                                                     \
            *value = slot->value.NAME;                                                             \
            sk_entry_read(&at, slot);                                                              \
        }                                                                                          \
        sk_call_end(&at);                                                                          \
        return status;                                                                             \
    }                                                                                              \
    int sk_##NAME##_put(sk_store *store, uint32_t state, const uint8_t *data, size_t len,          \
                        TYPE value) {                                                              \
        sk_at at;                                                                                  \
        sk_key key;                                                                                \
        int status =                                                                               \
            sk_call_begin(store, state, SK_ONLY(KIND_OF), data, len, SK_WRITES, &at, &key);        \
        if (status != SK_OK) return status;                                                        \
        status = sk_entry_put(&at, &key, (sk_value){.NAME = value});                               \
        sk_call_end(&at);                                                                          \
        return status;                                                                             \
    }                                                                                              \
    int sk_##NAME##_fold(sk_store *store, uint32_t state, const uint8_t *data, size_t len,         \
                         int fold, TYPE operand, TYPE initial, TYPE *result) {                     \
        sk_at at;                                                                                  \
        sk_key key;                                                                                \
        int status =                                                                               \
            sk_call_begin(store, state, SK_ONLY(KIND_OF), data, len, SK_WRITES, &at, &key);        \
        if (status != SK_OK) return status;                                                        \
        status = entry_fold_##NAME(&at, &key, fold, operand, initial, result);                     \
        sk_call_end(&at);                                                                          \
        return status;                                                                             \
    }                                                                                              \
    int sk_##NAME##_cas(sk_store *store, uint32_t state, const uint8_t *data, size_t len,          \
                        const TYPE *expected, TYPE desired, TYPE *result) {                        \
        sk_at at;                                                                                  \
        sk_key key;                                                                                \
        sk_slot *slot;                                                                             \
        int status =                                                                               \
            sk_call_begin(store, state, SK_ONLY(KIND_OF), data, len, SK_WRITES, &at, &key);        \
        if (status != SK_OK) return status;                                                        \
        status = sk_entry_find(&at, &key, &slot);                                                  \
        bool is_there = status == SK_OK;                                                           \
        /* bit for bit, so that a NaN equals itself and 0.0 is not -0.0 */                         \
        bool is_equal = is_there == (expected != NULL) &&                                          \
                        (!is_there || memcmp(&slot->value, expected, 8) == 0);                     \
        if (result != NULL && is_there) *result = slot->value.NAME;                                \
        if (status != SK_UNKNOWN && is_equal) {                                                    \
            status = sk_entry_put(&at, &key, (sk_value){.NAME = desired});                         \
            if (result != NULL && status == SK_OK) *result = desired;                              \
        } else if (is_there) {                                                                     \
            status = SK_CHANGED;                                                                   \
        }                                                                                          \
        sk_call_end(&at);                                                                          \
        return status;                                                                             \
    }

NUMBER_OPERATIONS(i64, int64_t, SK_I64, ADD_I64)
NUMBER_OPERATIONS(f64, double, SK_F64, ADD_F64)

#define VALUE_OPERATIONS(NAME, TYPE, NONE, IS_NONE)                                                \
    static TYPE value_or_none_##NAME(int status, TYPE value) {                                     \
        if (status == SK_OK && !IS_NONE(value)) return value;                                      \
        sk_value_status_set(status);                                                               \
        return status == SK_OK ? value : NONE;                                                     \
    }                                                                                              \
    TYPE sk_##NAME##_value(sk_store *store, uint32_t state, const uint8_t *data, size_t len) {     \
        TYPE value = 0;                                                                            \
        int status = sk_##NAME##_get(store, state, data, len, &value);                             \
        return value_or_none_##NAME(status, value);                                                \
    }                                                                                              \
    TYPE sk_##NAME##_value_or(sk_store *store, uint32_t state, const uint8_t *data, size_t len,    \
                              TYPE missing) {                                                      \
        TYPE value = 0;                                                                            \
        int status = sk_##NAME##_get(store, state, data, len, &value);                             \
        /* A value that looks like "no value" needs its status. */                                 \
        if (status == SK_MISSING && !IS_NONE(missing)) return missing;                             \
        return value_or_none_##NAME(status, value);                                                \
    }                                                                                              \
    TYPE sk_##NAME##_folded(sk_store *store, uint32_t state, const uint8_t *data, size_t len,      \
                            int fold, TYPE operand, TYPE initial) {                                \
        TYPE value = 0;                                                                            \
        int status = sk_##NAME##_fold(store, state, data, len, fold, operand, initial, &value);    \
        return value_or_none_##NAME(status, value);                                                \
    }

#define IS_MIN(value) ((value) == INT64_MIN)
/* -2^63 too: a binding that compares with INT64_MIN finds it equal */
#define IS_NAN(value) ((value) != (value) || (value) == -9223372036854775808.0)

VALUE_OPERATIONS(i64, int64_t, INT64_MIN, IS_MIN)
VALUE_OPERATIONS(f64, double, (double)NAN, IS_NAN)
