/*
 * store.h: the internals of the store, shared by the files that work on leaves and on states.
 *
 *   sk_store ── leaves[ ]   lock, epochs, residency and gate            32 bytes each
 *            └─ states[ ] ── tables[ ]   one head per leaf, in a row    64 bytes each
 *                              └─ slots and tags (table.h)
 *
 * Table heads are stored by state, not by leaf: the head of the table that a record needs is found
 * by arithmetic, so a batch can prefetch it. Detaching leaves moves heads, never entries.
 *
 * At first both arrays are untouched zero pages. A leaf or a table that never held anything is all
 * zeroes, so it costs nothing. Therefore code that goes through all leaves must not write to the
 * head of a table that has no slots (groups == 0). What is true of all tables of a leaf is kept in
 * sk_leaf instead.
 *
 * Locking rules
 *  1. A leaf's lock guards the leaf and its table in every state.
 *  2. Several leaf locks are taken in ascending order only.
 *  3. Order: leaf locks, then states_lock or snapshots_lock; clock_lock or rows_lock before all.
 *  4. Code that changes a leaf takes its lock through sk_leaf_lock_write, which first serves the
 *     snapshots that still need the leaf as it is (snapshot.c). Code that only changes entries whose
 *     keys it knows may use sk_leaf_lock_entries, and keep each entry in a log before (undo.h).
 *  5. While holding a leaf's lock, code waits for nothing except other locks.
 */
#ifndef SK_STORE_H
#define SK_STORE_H

#include "block.h"
#include "lock.h"
#include "table.h"

#include <pthread.h>

#define SK_NO_TRACKING UINT32_MAX

/* Values that sk_leaf.residency has, in place of an sk_residency, while the gate is not open. So a
 * call about a key notices by the one test (>= SK_AWAY) that it makes anyway. */
enum { SK_LEAF_SHUT = SK_AWAY + 1, SK_LEAF_EXPECTED = SK_AWAY + 2 };

/* Rejected: giving each leaf a pair of cache lines, so that threads in neighbouring leaves do not
 * disturb each other. Keys are spread over thousands of leaves, so threads hardly meet; but a batch
 * locks and looks at all of these leaves. */
typedef struct sk_leaf {
    uint64_t seq; /* versions of this leaf's containers (node.h) */
    sk_lock lock;
    _Atomic uint32_t served; /* snapshots up to this epoch were served; see snapshot.c */
    uint32_t changed;        /* epoch of the last change to entries; 0 = never */
    uint32_t forgot;         /* of all its tables; see sk_forgot */
    /* Both are written under the lock, and read without it by sk_leaf_residencies. */
    _Atomic uint8_t residency; /* sk_residency, or one of the above; sk_leaf_held, sk_leaf_seen */
    _Atomic uint8_t kept;      /* SK_LEAF_SHUT: what residency is when the gate opens */
    bool is_writing;           /* between sk_dirty_take and sk_dirty_done, or those of rows */
} sk_leaf;
static_assert(sizeof(sk_leaf) == 32, "two leaves a cache line");

typedef struct sk_filter sk_filter;

typedef struct sk_state {
    uint32_t id;
    uint8_t kind;
    uint8_t flags; /* SK_TIMED */
    sk_key_type key_type;
    char name[SK_NAME_BYTES_MAX + 1];
    sk_table *tables;            /* one per leaf */
    _Atomic uint64_t operations; /* records of batches, and counts of heads that wrapped or left */
    /* of timed states (ttl.c); not part of the schema, and not moved with leaves */
    _Atomic int64_t ttl_ms;      /* 0: entries do not expire */
    _Atomic int64_t timed_since; /* processing time when it first got a TTL; SK_NO_TIME: never */
    _Atomic uint8_t clock;       /* sk_clock */
    _Atomic bool on_read;
    sk_filter **_Atomic filters; /* per leaf, what its home has (filter.c); NULL: not known */
    _Atomic int64_t *due_min;    /* timers: per leaf, see sk_due_min; else NULL */
} sk_state;

/* Where a walk over all slots goes on. */
typedef struct sk_hand {
    uint32_t leaf, state;
    size_t slot;
} sk_hand;

struct sk_store {
    _Atomic uint32_t users; /* its owner and its open snapshots: the last one frees it */
    uint32_t key_groups, subgroups;
    uint32_t leaf_count;
    uint8_t leaf_bits; /* log2 leaf_count */
    sk_leaf *leaves;
    sk_undo **undos;   /* per leaf, under its lock: what a snapshot needs (undo.h), or NULL */
    uint64_t *records; /* per leaf, under its lock: operations that the heads of its tables do not
                        * count: about those of batches, and those of heads that wrapped or left.
                        * Not in sk_leaf, because a batch counts in many leaves */
    sk_budget budget;
    _Atomic uint64_t filter_bytes; /* of the budget: what filters take (filter.c) */
    _Atomic uint32_t epoch;        /* starts at 1; entries of epoch 0 never changed here */
    _Atomic uint32_t keep_after;   /* deletions after this epoch are remembered; SK_NO_TRACKING */
    _Atomic bool writes_back;      /* deletions are remembered until written home */

    pthread_mutex_t rows_lock;     /* one sk_rows_take or sk_rows_done at a time */
    _Atomic uint64_t *dirty;       /* a bit for each leaf that may have dirty entries (dirty.c) */
    _Atomic uint64_t *dirty_words; /* a bit for each word of `dirty` that may not be 0 */

    pthread_mutex_t states_lock; /* for adding; readers need none */
    _Atomic uint32_t state_count;
    sk_state *_Atomic states[SK_STATES_MAX];

    pthread_mutex_t snapshots_lock; /* guards the list and every snapshot's queue */
    pthread_cond_t snapshots_moved; /* a queue shrank, a snapshot failed, closed or lost a user */
    sk_snapshot *snapshots;         /* the open ones */

    pthread_mutex_t clock_lock; /* one eviction or sweep at a time; guards the hands */
    sk_hand evict_hand, sweep_hand;

    /* time (ttl.c) */
    _Atomic int64_t fixed_now;       /* processing time, for tests; SK_NO_TIME: the system's */
    _Atomic int64_t last_now;        /* the system's, as last read: it never goes back */
    _Atomic int64_t watermark;       /* event time; SK_NO_TIME until there is one */
    _Atomic int64_t first_watermark; /* the first one */
};

/* ---- Access to one leaf ---- */

/* One operation's view of one leaf and state, with the leaf's lock held. */
typedef struct sk_at {
    sk_store *store;
    sk_state *state;
    sk_leaf *leaf;
    sk_table *table;
    uint32_t leaf_no;
    sk_undo *undo; /* what a change is noted in; NULL: nowhere */
    sk_table_env env;
    sk_timing timing; /* what env.timing points to, if the state is timed */
} sk_at;

/* A snapshot keeps its store alive; the last user to release the store frees it. */
static inline void sk_store_hold(sk_store *store) { atomic_fetch_add(&store->users, 1); }
void sk_store_release(sk_store *store);

/* NULL, with the reason set, if there is no such state. */
sk_state *sk_state_at(sk_store *store, uint32_t id);
sk_state *sk_state_find(sk_store *store, const char *name); /* NULL if there is none */
/* The error for an epoch that this store has not reached yet: epochs start again with each process,
 * so such an epoch comes from another store. */
int sk_since_fail(sk_store *store, uint32_t since);
int sk_leaf_range_check(sk_store *store, uint32_t from, uint32_t to);
/* What a call about a key of a leaf with residency >= SK_AWAY answers: SK_NOT_OWNED, with the
 * reason set, or SK_UNKNOWN if the leaf is expected (gate.c). */
int sk_leaf_refuse(const sk_leaf *leaf, uint32_t leaf_no);

/* How much of the leaf is here, whatever its gate: an sk_residency. */
static inline int sk_leaf_held(const sk_leaf *leaf) {
    int residency = leaf->residency;
    if (residency == SK_LEAF_SHUT) residency = leaf->kept;
    return residency == SK_LEAF_EXPECTED ? SK_ABSENT : residency;
}

/* What the leaf is to snapshots and sums: an sk_residency. */
static inline int sk_leaf_seen(const sk_leaf *leaf) {
    if (leaf->residency == SK_LEAF_SHUT) return SK_AWAY;
    return leaf->residency == SK_LEAF_EXPECTED ? SK_ABSENT : leaf->residency;
}

/* Content came or went: a shut leaf stays shut, an expected one is open from now on. */
static inline void sk_leaf_hold(sk_leaf *leaf, int residency) {
    *(leaf->residency == SK_LEAF_SHUT ? &leaf->kept : &leaf->residency) = (uint8_t)residency;
}

/* Takes the lock for changing the leaf (rule 4). On failure the lock is not held. *epoch is what
 * the changes are to be stamped with. */
int sk_leaf_lock_write(sk_store *store, uint32_t leaf_no, uint32_t *epoch);
/* The same for changes of entries whose keys the caller knows. If *undo is not NULL then, a
 * snapshot needs the leaf as it is, and the caller keeps each entry there before it changes it. */
int sk_leaf_lock_entries(sk_store *store, uint32_t leaf_no, uint32_t *epoch, sk_undo **undo);
/* The same for a leaf that the caller has locked, if nothing must be waited for or encoded. */
bool sk_leaf_try_entries(sk_store *store, uint32_t leaf_no, uint32_t *epoch, sk_undo **undo);
/* The same as sk_leaf_lock_write for leaves [from, to), all at once. */
int sk_leaves_lock_write(sk_store *store, uint32_t from, uint32_t to, uint32_t *epoch);
void sk_leaves_unlock(sk_store *store, uint32_t from, uint32_t to);
/* What leaves of a list are locked for: reading, as by sk_leaf_lock_write, or as by
 * sk_leaf_lock_entries. */
typedef enum sk_lock_for { SK_FOR_READING, SK_FOR_WRITING, SK_FOR_ENTRIES } sk_lock_for;
/* Locks the leaves of a list in ascending order. */
int sk_leaf_list_lock(sk_store *store, const uint32_t *leaves, uint32_t count, sk_lock_for what,
                      uint32_t *epoch);
void sk_leaf_list_unlock(sk_store *store, const uint32_t *leaves, uint32_t count);

static inline void sk_leaf_lock(sk_leaf *leaf) { sk_lock_take(&leaf->lock); }
static inline void sk_leaf_unlock(sk_leaf *leaf) { sk_lock_give(&leaf->lock); }

/* True if no open snapshot needs the leaf as it is. */
static inline bool sk_leaf_is_served(const sk_leaf *leaf, uint32_t epoch) {
    return atomic_load_explicit(&leaf->served, memory_order_relaxed) + 1 == epoch;
}

/* The log of a locked leaf, if changes of this epoch may be noted in it; else NULL. */
static inline sk_undo *sk_leaf_undo(const sk_store *store, uint32_t leaf_no, uint32_t epoch) {
    sk_undo *undo = store->undos[leaf_no];
    return undo != NULL && undo->covers + 1 == epoch ? undo : NULL;
}

/* The newest epoch of a change to a table of the leaf that left no trace. Deltas can reach back to
 * this epoch, but no further. */
static inline uint32_t sk_forgot(const sk_leaf *leaf, const sk_table *table) {
    return leaf->forgot > table->forgot ? leaf->forgot : table->forgot;
}

/* Every table of the leaf counts as changed without a trace: deltas must not reach back. */
static inline void sk_leaf_end_deltas(sk_leaf *leaf, uint32_t epoch) {
    leaf->forgot = leaf->changed = epoch;
}

/* Sets field by field. A struct that is made elsewhere and then copied is stored in small pieces
 * and loaded in large ones; waiting for that takes the processor longer than all the rest of
 * this. */
static inline void sk_env_set(sk_table_env *env, sk_store *store, const sk_state *state,
                              const sk_leaf *leaf, uint32_t epoch) {
    env->key_type = &state->key_type;
    env->timing = NULL;
    env->is_timed = state->flags & SK_TIMED;
    env->kind = state->kind;
    env->leaf_bits = store->leaf_bits;
    env->is_whole = leaf->residency == SK_WHOLE;
    env->writes_back = atomic_load_explicit(&store->writes_back, memory_order_relaxed);
    env->epoch = epoch;
    env->keep_after = atomic_load_explicit(&store->keep_after, memory_order_relaxed);
    env->expected = 0;
}

/* The same for code that reads the leaf out or completes it, whether its gate is shut or not. */
static inline void sk_env_set_held(sk_table_env *env, sk_store *store, const sk_state *state,
                                   const sk_leaf *leaf, uint32_t epoch) {
    sk_env_set(env, store, state, leaf, epoch);
    env->is_whole = sk_leaf_held(leaf) == SK_WHOLE;
}

/* Counts a call about one key; the table's head is in the cache by then. */
static inline void sk_count_operation(sk_at *at) {
    if (__builtin_expect(++at->table->operations == 0, 0)) {
        atomic_fetch_add(&at->state->operations, (uint64_t)1 << 32);
        at->store->records[at->leaf_no] += (uint64_t)1 << 32;
    }
}

/* True if expired entries of the locked leaf may be removed: no open snapshot needs them. */
static inline bool sk_may_expire(sk_store *store, const sk_leaf *leaf) {
    return sk_leaf_is_served(leaf, atomic_load(&store->epoch));
}

/* The time for a call about a timed state (ttl.c). */
sk_timing sk_timing_of(sk_store *store, const sk_state *state);

/* Fills in `at` for a state in a leaf whose lock is held. The caller sets env.timing. */
static inline void sk_at_set(sk_at *at, sk_store *store, sk_state *state, uint32_t leaf_no,
                             uint32_t epoch) {
    at->store = store;
    at->state = state;
    at->leaf = &store->leaves[leaf_no];
    at->table = &state->tables[leaf_no];
    at->table->mem.budget = &store->budget; /* heads start as zeroes */
    at->leaf_no = leaf_no;
    at->undo = NULL;
    sk_env_set(&at->env, store, state, at->leaf, epoch);
}

/* ---- Entries of a locked leaf (entry.c and the files of the kinds; also used by batches) ---- */

/* SK_OK with the live slot, SK_MISSING, or SK_UNKNOWN. Marks the entry as used; removes it if it
 * has expired. */
int sk_entry_find(sk_at *at, const sk_key *key, sk_slot **slot);
/* Finds the key's slot, or makes or revives one; `value` becomes its value (the old one is freed).
 * On failure the caller still owns value. */
int sk_entry_put(sk_at *at, const sk_key *key, sk_value value);
/* The same from the encoded form: the kind's put. */
static inline int sk_entry_put_encoded(sk_at *at, const sk_key *key, const uint8_t *data,
                                       size_t len) {
    return sk_kinds[at->env.kind]->put(at, key, data, len);
}
/* The kind's put for kinds that are SK_OWN, and for kinds that keep any bytes as a blob. */
int sk_entry_put_made(sk_at *at, const sk_key *key, const uint8_t *data, size_t len);
int sk_entry_put_bytes(sk_at *at, const sk_key *key, const uint8_t *data, size_t len);
/* SK_OK, or SK_TOO_LARGE. */
int sk_value_check_len(size_t len);
int sk_entry_add_i64(sk_at *at, const sk_key *key, int64_t operand, int64_t initial,
                     int64_t *result);
int sk_entry_add_f64(sk_at *at, const sk_key *key, double operand, double initial, double *result);
int sk_entry_delete(sk_at *at, const sk_key *key, bool blind);
int64_t sk_entry_write(sk_at *at, const sk_key *key, int op, const uint8_t *path, size_t path_len,
                       const char *shape, const uint8_t *arg, size_t arg_len, int64_t i, int64_t j,
                       sk_buf *buf);
/* Removes an expired entry. Returns NULL, or the slot if a tombstone must stay (ttl.c). The caller
 * trims the table. */
sk_slot *sk_entry_expire(sk_at *at, sk_slot *slot);
/* Deletes a live entry. Returns NULL, or the slot if a tombstone must stay. The caller trims the
 * table. */
sk_slot *sk_entry_drop(sk_at *at, sk_slot *slot);
/* Removes all expired entries of a locked leaf. To be called before its changes are taken to be
 * written home, so that there are tombstones for those entries that need one. */
void sk_leaf_expire(sk_store *store, uint32_t leaf_no);
/* Appends the encoded value of a live slot. */
int sk_slot_encode(int kind, const sk_slot *slot, sk_buf *buf);

/* Sets the time of a changed entry (ttl.c). */
void sk_entry_stamp(sk_at *at, sk_slot *slot);

/* ---- What is dirty (dirty.c) ---- */

/* Sets the bit of a locked leaf that has dirty entries. */
void sk_leaf_set_dirty(sk_store *store, uint32_t leaf_no);
static inline void sk_leaf_note_dirty(sk_store *store, uint32_t leaf_no) {
    uint64_t word = atomic_load_explicit(&store->dirty[leaf_no / 64], memory_order_relaxed);
    if (!(word >> leaf_no % 64 & 1)) sk_leaf_set_dirty(store, leaf_no);
}
/* True if the locked leaf has entries that are dirty or being written. */
bool sk_leaf_is_dirty(const sk_store *store, uint32_t leaf_no);
/* Clears the bit of a locked leaf if nothing in the leaf is dirty any more. */
void sk_dirty_settle(sk_store *store, uint32_t leaf_no);
/* The first leaf from leaf_no on whose bit is set; leaf_count if there is none. Under rows_lock. */
uint32_t sk_dirty_next(sk_store *store, uint32_t leaf_no);
/* Entries of a locked leaf that were being written become clean, or dirty again (writeback.c). */
void sk_leaf_end_writing(sk_store *store, uint32_t leaf_no, bool written);

/* Stamps a changed entry. */
static inline void sk_entry_changed(sk_at *at, sk_slot *slot) {
    slot->epoch = at->env.epoch;
    if (sk_slot_mark_dirty(at->table, slot) && at->env.writes_back)
        sk_leaf_note_dirty(at->store, at->leaf_no);
    at->leaf->changed = at->env.epoch;
    if (at->leaf->residency == SK_ABSENT) at->leaf->residency = SK_PARTIAL;
    if (at->env.timing != NULL) sk_entry_stamp(at, slot);
}

/* Called after a successful read: in a state where reading touches, the entry is changed as if it
 * was written. Once a millisecond is enough. */
static inline void sk_entry_read(sk_at *at, sk_slot *slot) {
    const sk_timing *timing = at->env.timing;
    if (timing != NULL && timing->on_read && sk_slot_stamp(slot) < timing->now)
        sk_entry_changed(at, slot);
}

/* A lower bound: no timer of the leaf is due before this time (timers.c); INT64_MAX if it has no
 * timer. It is stored XOR INT64_MAX, so that a zero page says that there is no timer. */
static inline int64_t sk_due_min(const sk_state *state, uint32_t leaf_no) {
    return atomic_load(&state->due_min[leaf_no]) ^ INT64_MAX;
}

static inline void sk_set_due_min(sk_state *state, uint32_t leaf_no, int64_t due) {
    atomic_store(&state->due_min[leaf_no], due ^ INT64_MAX);
}

/* Entries came into a leaf in another way than by sk_timer_set: their due times are not known. */
static inline void sk_timers_came(sk_state *state, uint32_t leaf_no) {
    if (state->due_min != NULL) sk_set_due_min(state, leaf_no, INT64_MIN);
}

/* ---- Leaves (leaf.c, decode.c) and snapshots (snapshot.c) ---- */

/* Sets how much of a locked leaf is here, and drops what must not be here (sk_leaf_mark). */
void sk_leaf_set_residency(sk_store *store, uint32_t leaf_no, int residency, uint32_t epoch);

/* Appends the leaf's blocks; the lock is held. watermark: event time to use for this; NULL: the
 * current one. undo: the blocks are to be of the leaf as it was when this log was opened; or
 * NULL. */
int sk_leaf_encode_locked(sk_store *store, uint32_t leaf_no, uint32_t state_id, sk_select select,
                          uint32_t since, const int64_t *watermark, const sk_undo *undo,
                          sk_buf *buf);

/* Entries [from, to) of a delta block that was checked; all of them are of one leaf. */
typedef struct sk_part {
    const uint8_t *block;
    const sk_block_info *info;
    uint32_t state_id; /* of the block's type */
    uint64_t from, to;
} sk_part;

/* Does what sk_leaf_decode with SK_UNDER does, with parts of blocks. The leaf is locked for
 * writing, and is neither shut nor whole nor away. On failure it is as it was. */
int sk_leaf_fill_locked(sk_store *store, uint32_t leaf_no, const sk_part *parts, size_t count,
                        uint32_t epoch);

/* What a block has for a key: entry `at`. block NULL: no block has the key. */
typedef struct sk_found {
    uint64_t hash;
    const uint8_t *key;
    size_t key_len;
    const uint8_t *block;
    const sk_block_info *info;
    uint64_t at;
} sk_found;

/* The same with single entries from blocks of a state; the blocks' headers were read, but their
 * entries were not checked. Each key is there once. SK_CORRUPT if an entry is not well-formed. */
int sk_leaf_fill_found_locked(sk_store *store, uint32_t leaf_no, uint32_t state_id,
                              const sk_found *found, size_t count, uint32_t epoch);

/* The keys of a column with their hashes (pick.c), n of them, to be freed with sk_raw_free. */
int sk_keys_route(const sk_state *state, const sk_column *column, int64_t n, sk_key **keys);

/* Serves open snapshots that need the locked leaf as it is. SK_OK: sk_leaf_is_served is true now,
 * or (only with may_log) it has a log, unless a snapshot was opened just now: look again.
 * SK_CHANGED: the lock was released to wait for a reader; look at the leaf again. Any other status
 * is a failure, and the lock is held. */
int sk_snapshots_serve(sk_store *store, uint32_t leaf_no, bool may_log);
/* The same without waiting for a reader and without a log, even if the queue is full. */
int sk_snapshots_serve_now(sk_store *store, uint32_t leaf_no);
/* The same with may_log, if nothing must be waited for or encoded; else false. */
bool sk_snapshots_serve_try(sk_store *store, uint32_t leaf_no);
/* Raises the store's epoch to `epoch` if it is lower. */
void sk_epoch_at_least(sk_store *store, uint32_t epoch);

/* ---- What the home does not have (filter.c). The leaf is locked. ---- */

/* False: the home has no such key. */
bool sk_home_may_have(const sk_state *state, uint32_t leaf_no, uint64_t hash);
/* Notes that a key is about to be written home. False if there is no filter, or it was given up. */
bool sk_filter_add(sk_store *store, const sk_state *state, uint32_t leaf_no, const uint8_t *key,
                   size_t len);
/* From now on it is not known what the leaf's home has. */
void sk_filter_drop(sk_store *store, uint32_t leaf_no);
void sk_filters_free(sk_store *store, sk_state *state);

#endif
