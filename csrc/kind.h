/*
 * kind.h: the kinds of values, and what each of them is and does: one table, sk_kinds.
 *
 * A value is held in one of three ways, and most of the library need not know more about a kind:
 *
 *   SK_IN_SLOT   its 8 bytes are in the slot, and are the encoded form          i64, f64
 *   SK_BLOB      an sk_blob, whose bytes are the encoded form                   bytes, timers
 *   SK_OWN       an object that only the kind's make, encode and free know      list, map, nested
 *
 * What depends on the kind, and not on how a value is held, is in the kind's row (sk_kind_ops). The
 * row is in the kind's own file, beside the operations that it names; kind.c has the table, with a
 * line for each kind. Code that goes through many values looks the row up once. Only two other
 * files ask which kind a value is of: batch.c has loops that are compiled for numbers alone, where
 * the kind is a constant, and node.c is told by its three kinds which root a value must have.
 * tests/test_kinds.py checks that. Rejected: whole rows in kind.c. They would show all kinds at a
 * glance, but then each kind would need a header for its operations, or one common header would
 * have to declare the operations of all kinds.
 *
 * To add a kind, touch these, and write its operations where "own" says so:
 *
 *   csrc/statekit.h        its number, which is stored in blocks for ever; its own calls, if any
 *   csrc/kind.c            its line
 *   csrc/<kind>.c          own: the row, its operations, its calls (timers.c is an example)
 *   statekit/kinds.py      its name, and which type of a value state is of that kind
 *   tests/test_<kind>.py   own: what it promises. tests/c/test_kind.c and tests/test_kinds.py go
 *                          through all kinds, this one too
 *   docs/glossary.md       its name, in the line "kind"
 *
 * A kind whose encoded form is MessagePack needs nothing else. A kind with methods of its own, such
 * as timers, also needs a handle (statekit/native/), a state (statekit/state/) and a way to declare
 * it.
 */
#ifndef SK_KIND_H
#define SK_KIND_H

#include "alloc.h"
#include "node.h"

#include <assert.h>

/* Bytes of a value that is held as a blob. */
typedef struct sk_blob {
    uint32_t len; /* bytes in use */
    uint32_t cap; /* bytes allocated for data */
    uint8_t data[];
} sk_blob;

typedef union sk_value {
    int64_t i64;
    double f64;
    /* pointers are never NULL in a live entry */
    sk_blob *blob; /* SK_BLOB */
    sk_obj *obj;   /* containers */
    void *own;     /* whatever else is SK_OWN */
} sk_value;
static_assert(sizeof(sk_value) == 8, "a value is a word of its slot");

typedef enum sk_held { SK_IN_SLOT = 1, SK_BLOB = 2, SK_OWN = 3 } sk_held;

struct sk_at;
struct sk_key;

/* One kind. */
typedef struct sk_kind_ops {
    const char *name;
    uint8_t held;    /* sk_held */
    bool may_expire; /* a state of it may be SK_TIMED */
    bool has_due;    /* a value has due times: a state of it keeps a lower bound of them for each
                      * leaf (sk_due_min). Only timers in memory can fire, so entries are not
                      * evicted */
    uint8_t batch;   /* batch operations beside those that all kinds have: bits 1 << sk_batch_op */
    uint8_t column;  /* SK_IN_SLOT: which column values come in (sk_column) */
    uint8_t row_tag; /* SK_IN_SLOT: the MessagePack byte before the value in a row (writeback.c) */
    uint8_t wider;   /* the kind that a state of it may become, or 0 (rewrite.c) */
    sk_value (*widen)(sk_value value); /* if there is one; both are SK_IN_SLOT */

    /* Puts a value from its encoded form, which it checks: SK_BAD_VALUE, SK_TOO_LARGE. The leaf is
     * locked. If a kind keeps something beside its values, it is updated here. */
    int (*put)(struct sk_at *at, const struct sk_key *key, const uint8_t *data, size_t len);
    /* Checks the encoded value of entry i of a block: SK_OK, SK_CORRUPT or SK_NO_MEMORY. NULL: any
     * bytes are valid. Decoding does not call it for SK_OWN, because make checks the value. */
    int (*check)(const uint8_t *data, size_t len, uint64_t i);

    /* For SK_OWN only. make gets bytes that nobody has checked: SK_BAD_VALUE, SK_TOO_LARGE,
     * SK_TOO_DEEP; on failure there is nothing to free. seq as in node.h. encode appends the `size`
     * bytes of the encoded form. */
    int (*make)(sk_mem *mem, const uint8_t *data, size_t len, uint64_t *seq, sk_value *value);
    int (*encode)(sk_value value, sk_buf *buf);
    uint64_t (*size)(sk_value value); /* O(1) */
    void (*free)(sk_mem *mem, sk_value value);
} sk_kind_ops;

#define SK_KINDS_MAX 32 /* numbers of kinds are below it: sets of kinds are the bits of a word */

/* By sk_kind; NULL where there is no such kind. */
extern const sk_kind_ops *const sk_kinds[SK_KINDS_MAX];

static inline bool sk_kind_is_known(int kind) {
    return kind > 0 && kind < SK_KINDS_MAX && sk_kinds[kind] != NULL;
}

/* Bytes of every value in a block's column; 0: they vary, and there are offsets. */
static inline uint8_t sk_kind_width(int kind) { return sk_kinds[kind]->held == SK_IN_SLOT ? 8 : 0; }

#endif
