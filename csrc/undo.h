/*
 * undo.h: what entries of a leaf were when a snapshot was taken, so that they may change before the
 * snapshot's reader comes. snapshot.c says when a leaf has a log, and why the result is right.
 *
 * A log belongs to one leaf and one snapshot. It has the heads of the leaf's tables as they were
 * when it was opened, and the entries that have changed since, each as it was before:
 *
 *     sk_undo   what the leaf was | table 0: live, tombs, ..., saved | table 1: ... | room
 *                                                               |
 *     chunks    | slot, long key, value | slot, value | ... <---+     a bump pool, never sorted
 *
 * The log is guarded by the leaf's lock. Calls about single entries use it like this:
 *
 *     sk_undo_save      before anything is done: keeps the entry, unless that was done before
 *     ... the call ...
 *     sk_undo_settle    forgets what was kept if the entry is still as it was
 *
 * So the log has an entry once, and only if the table does not have it as it was any more.
 *
 * Values are kept in their encoded form. One of more than SK_UNDO_BYTES_MAX is not kept, because a
 * call should not wait until it is copied; then the leaf is encoded as a whole. Rejected: keeping
 * the old blob itself instead of a copy. A put of the same length would have to allocate, and the
 * memory would count for the table, so that a store at its limit would refuse the put.
 */
#ifndef SK_UNDO_H
#define SK_UNDO_H

#include "table.h"

#define SK_UNDO_BYTES_MAX 16384 /* of a key and a value that are kept */
#define SK_UNDO_ENTRIES_MIN 16  /* leaves with fewer entries are encoded: that takes no longer */
static_assert(SK_UNDO_ENTRIES_MIN > 0, "a leaf with a log is not absent: see snapshot.c");

/* An entry as it was. */
typedef struct sk_saved {
    struct sk_saved *next;
    sk_slot slot; /* SK_MARK_SAVED; what its pointers point to follows here in the log */
} sk_saved;

/* A table as it was. */
typedef struct sk_past {
    uint32_t epoch; /* of the snapshot: slots that changed later are not as they were */
    uint32_t live, tombs, forgot;
    uint32_t saved_count;
    sk_saved *saved; /* the latest first */
} sk_past;

typedef struct sk_undo_chunk {
    struct sk_undo_chunk *next;
    uint8_t room[];
} sk_undo_chunk;

typedef struct sk_undo {
    struct sk_snapshot *snapshot;
    struct sk_undo *next, **link; /* the snapshot's logs; under snapshots_lock */
    uint32_t leaf_no;
    uint32_t epoch;   /* the snapshot's */
    uint32_t covers;  /* open snapshots up to this epoch: this one, or they need the leaf no more */
    uint32_t changed; /* what the leaf's was */

    uint8_t *at, *end; /* free room of the newest chunk */
    sk_undo_chunk *chunks;
    uint64_t bytes;         /* of all this */
    _Atomic uint64_t *held; /* the snapshot's bytes, which these are part of */
    uint64_t held_max;

    sk_saved *pending; /* kept by the call that is under way; NULL: nothing */
    uint64_t pending_hash;

    uint32_t table_count; /* states that there were */
    sk_past tables[];     /* by state */
} sk_undo;

/* An empty log with room for the tables, which the caller fills in. NULL if memory is short. */
sk_undo *sk_undo_new(uint32_t table_count, _Atomic uint64_t *held, uint64_t held_max);
void sk_undo_free(sk_undo *undo);

static inline bool sk_undo_is_full(const sk_undo *undo) {
    return atomic_load_explicit(undo->held, memory_order_relaxed) >= undo->held_max;
}

/* Keeps a key's entry, if there is one and it is as the snapshot must see it. SK_OK, SK_TOO_LARGE
 * or SK_NO_MEMORY, without a reason. */
int sk_undo_save(sk_undo *undo, uint32_t state_id, const sk_table *table, const sk_table_env *env,
                 const sk_key *key);
void sk_undo_settle(sk_undo *undo, uint32_t state_id, const sk_table *table, unsigned leaf_bits);

#endif
