/*
 * msgpack.h: as much MessagePack as the store needs: walk, check and write headers.
 *
 * Nothing here trusts its input, except the functions that say so: every length is checked against
 * the bytes that remain. Nothing allocates, except sk_mp_check for a map of more than
 * SK_MP_SMALL_PAIRS pairs: to find equal keys among many it needs a table for a moment.
 */
#ifndef SK_MSGPACK_H
#define SK_MSGPACK_H

#include "statekit.h"

#include <stdbool.h>

typedef enum sk_mp_type {
    SK_MP_SCALAR = 0, /* nil, bool, int, float, str, bin, ext */
    SK_MP_ARRAY = 1,
    SK_MP_MAP = 2
} sk_mp_type;

/* One value's head. */
typedef struct sk_mp_head {
    sk_mp_type type;
    uint8_t head_len;  /* bytes before a container's first element; for a scalar, before its body */
    uint32_t count;    /* elements of an array, pairs of a map */
    uint64_t body_len; /* bytes of a scalar's body (0 for nil, bool, fixint) */
} sk_mp_head;

#define SK_MP_HEAD_MAX 5

/* Maps of up to this many pairs are searched for equal keys without scratch memory. */
#define SK_MP_SMALL_PAIRS 64

/* Reads the head at p; SK_OK or SK_BAD_VALUE (truncated, or the reserved byte 0xc1). Truncated
 * means that fewer bytes remain than the value must have: a scalar's body, a byte per element. */
int sk_mp_read_head(const uint8_t *p, size_t len, sk_mp_head *head);
/* Bytes of the one value at p, with all that it contains; depth_max limits how deep its containers
 * may be nested. Negative: a status (SK_BAD_VALUE, SK_TOO_DEEP, SK_TOO_LARGE). Iterative, so
 * hostile depth cannot exhaust the stack. */
int64_t sk_mp_skip(const uint8_t *p, size_t len, unsigned depth_max);
/* Like skip, and also checks that map keys are allowed, shortest-form and distinct. Besides
 * skip's statuses: SK_NO_MEMORY. */
int64_t sk_mp_check(const uint8_t *p, size_t len, unsigned depth_max);
/* Like check, but does not look for equal keys in maps of more than SK_MP_SMALL_PAIRS pairs: for a
 * caller who is about to index those maps and then finds equal keys for free. Never
 * SK_NO_MEMORY. */
int64_t sk_mp_check_small(const uint8_t *p, size_t len, unsigned depth_max);
/* The byte after the n values at p, which MUST have been checked before: no bounds are known. */
const uint8_t *sk_mp_next_n(const uint8_t *p, uint64_t n);
static inline const uint8_t *sk_mp_next(const uint8_t *p) { return sk_mp_next_n(p, 1); }
/* The head of a value that has been checked before. */
sk_mp_head sk_mp_head_of(const uint8_t *p);
/* True if p holds exactly one value that may be a map key, in shortest form: a scalar or an array
 * of scalars. For a float only the 64-bit form counts, which is what Python writes. */
bool sk_mp_is_key(const uint8_t *p, size_t len);
/* Reads an integer of any width; SK_BAD_PATH if it is not an integer or does not fit. */
int sk_mp_read_int(const uint8_t *p, size_t len, int64_t *value);

/* Bytes of the shortest head of a container. */
static inline size_t sk_mp_head_len(uint64_t count) {
    return count < 16 ? 1 : count < 65536 ? 3 : 5;
}

/* Writers: return the bytes written (at most 9, or SK_MP_HEAD_MAX for heads). */
size_t sk_mp_write_array(uint8_t *p, uint32_t count);
size_t sk_mp_write_map(uint8_t *p, uint32_t count);
size_t sk_mp_write_str(uint8_t *p, uint32_t len);
size_t sk_mp_write_bin(uint8_t *p, uint32_t len);
size_t sk_mp_write_int(uint8_t *p, int64_t value);
size_t sk_mp_write_f64(uint8_t *p, double value);

#endif
