/*
 * snapshot.c: consistent views of the store, taken in O(1) while it is in use.
 *
 * Taking one bumps the store's epoch. Nothing is copied, and a leaf that nobody changes costs
 * nothing until the snapshot's reader (sk_snapshot_next) encodes it. What is changed before the
 * reader comes is kept for it, in one of two ways:
 *
 *   a log          A call that changes entries whose keys it knows (sk_leaf_lock_entries) first
 *                  copies each of them, as it was, into the leaf's log (undo.h), and then changes
 *                  the table in place. The reader encodes the leaf without the entries that are
 *                  newer than the snapshot, and with those of the log.
 *   the queue      Every other change (sk_leaf_lock_write: a leaf is cleared, decoded, evicted,
 *                  swept, detached, marked or gated, timers fire, an entry comes from the home) first
 *                  encodes the whole leaf, as the reader would, into the snapshot's queue: it serves
 *                  the snapshot. So does a call about an entry where there can be no log: a key and
 *                  value of more than SK_UNDO_BYTES_MAX bytes (also for a small change in a
 *                  container of megabytes: copying it would take as long as encoding it), a leaf of
 *                  fewer than SK_UNDO_ENTRIES_MIN entries, no memory. Of several snapshots that need
 *                  a leaf, one gets the log; the others are served. Rejected: one log for several
 *                  snapshots. It would have to keep the heads of the tables once for each.
 *
 *   leaf->served  the epoch up to which every open snapshot has been served for this leaf. If the
 *                 store's epoch is the next one, the leaf may be changed at once, without a log. In
 *                 the steady state that is one comparison.
 *   undo->covers  the same, but for the one snapshot whose log it is.
 *   progress[l]   per snapshot and leaf: WANTED -> QUEUED (encoded by a changer, waiting for
 *                 the reader) -> DONE, or WANTED -> DONE (encoded by the reader). Changes only
 *                 under the leaf's lock or, QUEUED -> DONE, under snapshots_lock. While the leaf
 *                 has a log, it is WANTED.
 *
 * Why it is consistent. A change reads the epoch under its leaf's lock, and is made while that lock
 * is still held.
 *  1. If it reads an epoch later than the snapshot's, then `served` or `covers` was first brought up
 *     to the epoch before. So the leaf was encoded before the change, or it has a log, and will be
 *     encoded as it was (see below): the change is not in the snapshot.
 *  2. If it reads the snapshot's epoch or an earlier one, then before the change the leaf was not
 *     encoded, and had no log (an encoder takes the lock, and a changing call encodes or opens a
 *     log only if it reads a later epoch). So it will be encoded with the change: the change is in
 *     the snapshot.
 *  So a change is in the snapshot iff it read the epoch before the bump. The epoch is one atomic
 *  variable; if change x ended before change y began and y is in the snapshot, then y read the old
 *  epoch, x read it even earlier, and x is in it too. Hence the snapshot is a prefix of every order
 *  in which the calls can have happened: it has all calls that ended before it was taken, none that
 *  began after, and no effect without its cause.
 *
 * Why a leaf with a log is encoded as it was. Let e be the snapshot's epoch, and let the log be
 * opened at some later time, under the leaf's lock.
 *  1. Until then the leaf has not changed since the snapshot was taken, for a change would have
 *     opened the log or served the snapshot. So the heads that the log copies are those of that
 *     moment, and every slot has an epoch of at most e.
 *  2. From then until the leaf is encoded, all changes are about entries that were looked up for the
 *     log before: any other change serves the snapshot first. They read an epoch later than e. A
 *     slot that they have changed has that epoch (sk_entry_changed), and never again one of at
 *     most e.
 *  3. An entry that has not changed is in the table, with an epoch of at most e, and not in the
 *     log: sk_undo_settle takes back what was kept for a call that changed nothing.
 *  4. An entry that has changed or gone is in the log, once: it was kept before the first such
 *     change, when its slot had an epoch of at most e; later slots of the key are newer than e, so
 *     it was not kept again.
 *  5. A key that had no entry has none in the log, and only slots newer than e.
 *  So the slots of at most e and the log are together what the table was. One thing is missing:
 *  rehashing and purging may drop tombstones of other keys. They do so only in whole leaves, whose
 *  full blocks have no tombstones; a delta becomes a full block if fewer tombstones are left than
 *  the head had. (The encoder also asserts that it finds as many entries as the head had.)
 *  What else the encoder looks at is in the log, too (the leaf's `changed`, and for each table
 *  `forgot` and how many entries there were), or it stays as it is: a leaf with entries is whole or
 *  partial, and what changes that, or the leaf's `forgot`, serves the snapshot first.
 *
 * An expired entry must stay where a snapshot may need it (ttl.c). A call that has kept it may
 * remove it.
 *
 * Memory. Blocks encoded by changers (calls that change a leaf) wait in the queue. These and the
 * logs take at most bytes_max, plus, for each changing thread, one leaf or what one chunk of a batch
 * adds to logs. A changer that finds them full releases its leaf's lock and waits for the reader,
 * who then takes what is in the queue, and leaves with logs, before other leaves. If the reader
 * takes nothing for SK_STALL_MS, the snapshot is given up (its reader gets SK_OVERRUN) and the
 * change goes on. Otherwise a changer might wait for ever, for example if reader and changer are one
 * thread. State in use comes before a copy of it.
 *
 * Readers. Several threads may read one snapshot: each leaf goes to one of them, because progress
 * moves to DONE under the leaf's lock or with the item that left the queue. A reader may get SK_END
 * while another one still encodes the last leaf. While a leaf is encoded or copied, no lock of the
 * store is held, only the leaf's own.
 */
#define _GNU_SOURCE
#include "failpoint.h"
#include "store.h"

#include <errno.h>
#include <time.h>

#define SK_QUEUE_BYTES_DEFAULT (64ull << 20)
#define SK_STALL_MS 2000

enum { WANTED = 0, QUEUED = 1, DONE = 2 };

/* A leaf's blocks, encoded by a changer. */
typedef struct queued {
    struct queued *next;
    uint32_t leaf_no;
    sk_buf blocks;
} queued;

struct sk_snapshot {
    sk_store *store;
    sk_snapshot *next;  /* in store->snapshots */
    uint32_t epoch;     /* changes of this epoch and before are in it */
    uint32_t *since;    /* per leaf, or NULL */
    int64_t watermark;  /* event time when it was taken; it has what was alive then */
    uint64_t bytes_max; /* of the queue and the logs */
    uint8_t *progress;  /* per leaf */
    uint8_t *residency; /* per leaf: sk_residency when it was encoded */
    /* bytes of the queue and of the logs; read and, by logs that grow, raised without a lock */
    _Atomic uint64_t held;
    /* it has shut leaves too */
    _Atomic bool has_shut;
    /* all below: under snapshots_lock */
    uint32_t cursor; /* leaves before it have been visited by the reader */
    queued *queue;
    sk_undo *undos; /* its logs, the oldest first */
    sk_undo **undos_end;
    uint64_t taken;  /* items that left the queue, and leaves read: proof that the reader lives */
    uint32_t users;  /* changers that hold a pointer to this snapshot */
    bool is_overrun; /* given up */
    bool is_closing;
};

/* ---- Logs. The leaf is locked, and snapshots_lock held. ---- */

/* The snapshot's log of the leaf, or NULL. (For this, the leaf's lock is enough.) */
static sk_undo *undo_of(const sk_snapshot *snapshot, uint32_t leaf_no) {
    sk_undo *undo = snapshot->store->undos[leaf_no];
    return undo != NULL && undo->snapshot == snapshot ? undo : NULL;
}

static void drop_undo(sk_store *store, uint32_t leaf_no) {
    sk_undo *undo = store->undos[leaf_no];
    if (undo == NULL) return;
    sk_snapshot *snapshot = undo->snapshot;
    *undo->link = undo->next;
    *(undo->next != NULL ? &undo->next->link : &snapshot->undos_end) = undo->link;
    store->undos[leaf_no] = NULL;
    sk_undo_free(undo);
}

/* A log for a leaf that has not changed since the snapshot was taken. NULL if the leaf is so small
 * that it should rather be encoded, or memory is short. */
static sk_undo *open_undo(sk_snapshot *snapshot, uint32_t leaf_no) {
    sk_store *store = snapshot->store;
    const sk_leaf *leaf = &store->leaves[leaf_no];
    uint64_t entries = 0;
    uint32_t count = store->state_count;
    for (uint32_t s = 0; s < count && entries < SK_UNDO_ENTRIES_MIN; s++)
        entries += (uint64_t)store->states[s]->tables[leaf_no].live +
                   store->states[s]->tables[leaf_no].tombs;
    if (entries < SK_UNDO_ENTRIES_MIN) return NULL;
    sk_undo *undo = sk_undo_new(count, &snapshot->held, snapshot->bytes_max);
    if (undo == NULL) return NULL;
    assert(leaf->changed <= snapshot->epoch);
    undo->snapshot = snapshot;
    undo->leaf_no = leaf_no;
    undo->epoch = snapshot->epoch;
    undo->changed = leaf->changed;
    for (uint32_t s = 0; s < count; s++) {
        const sk_table *table = &store->states[s]->tables[leaf_no];
        undo->tables[s] = (sk_past){.epoch = snapshot->epoch,
                                    .live = table->live,
                                    .tombs = table->tombs,
                                    .forgot = table->forgot};
    }
    undo->link = snapshot->undos_end;
    *undo->link = undo;
    snapshot->undos_end = &undo->next;
    store->undos[leaf_no] = undo;
    return undo;
}

/* Lets changes go on with a log, for the only snapshot that needs the leaf. False if that cannot
 * be. */
static bool log_for(sk_snapshot *snapshot, uint32_t leaf_no) {
    sk_undo *undo = undo_of(snapshot, leaf_no);
    if (undo == NULL) {
        drop_undo(snapshot->store, leaf_no); /* of a snapshot that was given up */
        undo = open_undo(snapshot, leaf_no);
    }
    if (undo == NULL) return false;
    undo->covers = snapshot->store->epoch - 1;
    return true;
}

/* ---- Opening and closing ---- */

static void free_snapshot(sk_snapshot *snapshot) {
    while (snapshot->queue != NULL) {
        queued *item = snapshot->queue;
        snapshot->queue = item->next;
        sk_buf_free(&item->blocks);
        sk_raw_free(item);
    }
    sk_raw_free(snapshot->since);
    sk_raw_free(snapshot->progress);
    sk_raw_free(snapshot->residency);
    sk_raw_free(snapshot);
}

int sk_snapshot_open(sk_store *store, const uint32_t *since, uint64_t bytes_max,
                     sk_snapshot **out) {
    *out = NULL;
    int status = SK_FAILPOINT(SNAPSHOT_OPEN);
    if (status != SK_OK) return status;
    for (uint32_t i = 0; since != NULL && i < store->leaf_count; i++)
        if (since[i] > store->epoch) return sk_since_fail(store, since[i]);
    sk_snapshot *snapshot = sk_raw_zalloc(sizeof *snapshot);
    if (snapshot == NULL) return SK_NO_MEMORY;
    size_t since_bytes = (size_t)store->leaf_count * sizeof *since;
    snapshot->store = store;
    snapshot->undos_end = &snapshot->undos;
    snapshot->bytes_max = bytes_max != 0 ? bytes_max : SK_QUEUE_BYTES_DEFAULT;
    snapshot->progress = sk_raw_zalloc(store->leaf_count);
    snapshot->residency = sk_raw_zalloc(store->leaf_count);
    if (since != NULL) snapshot->since = sk_raw_alloc(since_bytes);
    if (snapshot->progress == NULL || snapshot->residency == NULL ||
        (since != NULL && snapshot->since == NULL)) {
        free_snapshot(snapshot);
        return SK_NO_MEMORY;
    }
    if (since != NULL) memcpy(snapshot->since, since, since_bytes);
    pthread_mutex_lock(&store->snapshots_lock);
    snapshot->next = store->snapshots;
    store->snapshots = snapshot;
    /* The list first, then the epoch: a call that sees the new epoch finds the snapshot. */
    snapshot->epoch = atomic_fetch_add(&store->epoch, 1);
    snapshot->watermark = atomic_load(&store->watermark);
    pthread_mutex_unlock(&store->snapshots_lock);
    sk_store_hold(store);
    *out = snapshot;
    return SK_OK;
}

void sk_snapshot_close(sk_snapshot *snapshot) {
    if (snapshot == NULL) return;
    sk_store *store = snapshot->store;
    pthread_mutex_lock(&store->snapshots_lock);
    sk_snapshot **link = &store->snapshots;
    while (*link != snapshot) link = &(*link)->next;
    *link = snapshot->next;
    snapshot->is_closing = true;
    pthread_cond_broadcast(&store->snapshots_moved);
    while (snapshot->users > 0) pthread_cond_wait(&store->snapshots_moved, &store->snapshots_lock);
    while (snapshot->undos != NULL) { /* nobody opens another one */
        uint32_t leaf_no = snapshot->undos->leaf_no;
        pthread_mutex_unlock(&store->snapshots_lock);
        sk_leaf_lock(&store->leaves[leaf_no]);
        pthread_mutex_lock(&store->snapshots_lock);
        if (undo_of(snapshot, leaf_no) != NULL) drop_undo(store, leaf_no);
        sk_leaf_unlock(&store->leaves[leaf_no]);
    }
    pthread_mutex_unlock(&store->snapshots_lock);
    free_snapshot(snapshot);
    sk_store_release(store);
}

void sk_snapshot_add_shut(sk_snapshot *snapshot) { snapshot->has_shut = true; }

uint32_t sk_snapshot_epoch(sk_snapshot *snapshot) { return snapshot->epoch; }

int64_t sk_snapshot_watermark(sk_snapshot *snapshot) { return snapshot->watermark; }

uint32_t sk_epoch_advance(sk_store *store) {
    pthread_mutex_lock(&store->snapshots_lock);
    uint32_t ended = atomic_fetch_add(&store->epoch, 1);
    pthread_mutex_unlock(&store->snapshots_lock);
    return ended;
}

void sk_epoch_at_least(sk_store *store, uint32_t epoch) {
    pthread_mutex_lock(&store->snapshots_lock);
    if (store->epoch < epoch) store->epoch = epoch;
    pthread_mutex_unlock(&store->snapshots_lock);
}

/* ---- Encoding a leaf for a snapshot ---- */

/* What a leaf whose lock is held is to the snapshot: an sk_residency. */
static uint8_t seen_by(sk_snapshot *snapshot, uint32_t leaf_no) {
    const sk_leaf *leaf = &snapshot->store->leaves[leaf_no];
    return (uint8_t)(snapshot->has_shut ? sk_leaf_held(leaf) : sk_leaf_seen(leaf));
}

/* Encodes the leaf as the snapshot must see it. Its lock is held, and since the snapshot was taken
 * it has not changed, or the snapshot has a log of it. */
static int encode_for(sk_snapshot *snapshot, uint32_t leaf_no, sk_buf *buf) {
    sk_store *store = snapshot->store;
    uint32_t since = snapshot->since != NULL ? snapshot->since[leaf_no] : 0;
    snapshot->residency[leaf_no] = seen_by(snapshot, leaf_no);
    if (snapshot->residency[leaf_no] == SK_AWAY) return SK_OK; /* or shut */
    const sk_undo *undo = undo_of(snapshot, leaf_no);
    uint32_t changed = undo != NULL ? undo->changed : store->leaves[leaf_no].changed;
    if (since > 0 && changed <= since) return SK_OK;
    return sk_leaf_encode_locked(store, leaf_no, SK_ALL_STATES,
                                 since > 0 ? SK_SELECT_SINCE : SK_SELECT_ALL, since,
                                 &snapshot->watermark, undo, buf);
}

/* The first snapshot of the list that still needs the leaf; or NULL. */
static sk_snapshot *first_wanting(sk_snapshot *snapshot, uint32_t leaf_no) {
    while (snapshot != NULL && (snapshot->is_overrun || snapshot->progress[leaf_no] != WANTED))
        snapshot = snapshot->next;
    return snapshot;
}

static struct timespec stall_deadline(void) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += SK_STALL_MS / 1000;
    return until;
}

/* Releases the leaf's lock and waits until there is room, the snapshot is closed, or its
 * reader has stalled for too long. Under snapshots_lock. */
static void wait_for_reader(sk_store *store, sk_snapshot *snapshot, sk_leaf *leaf) {
    snapshot->users++;
    sk_leaf_unlock(leaf);
    /* Other snapshots wake this wait up, too. Only this snapshot's reader moves the deadline. */
    struct timespec until = stall_deadline();
    uint64_t taken = snapshot->taken;
    while (!snapshot->is_closing && !snapshot->is_overrun &&
           snapshot->held >= snapshot->bytes_max) {
        int waited =
            pthread_cond_timedwait(&store->snapshots_moved, &store->snapshots_lock, &until);
        if (snapshot->taken != taken) {
            taken = snapshot->taken;
            until = stall_deadline();
        } else if (waited == ETIMEDOUT) {
            snapshot->is_overrun = true;
        }
    }
    snapshot->users--;
    pthread_cond_broadcast(&store->snapshots_moved);
}

/* Encodes the locked leaf into the snapshot's queue; then it needs no log. Under snapshots_lock,
 * which it releases while it encodes: the leaf's lock keeps progress[leaf_no] from changing. */
static int enqueue(sk_store *store, sk_snapshot *snapshot, uint32_t leaf_no) {
    snapshot->users++;
    pthread_mutex_unlock(&store->snapshots_lock);
    int status = SK_FAILPOINT(SNAPSHOT_SERVE);
    queued *item = status == SK_OK ? sk_raw_zalloc(sizeof *item) : NULL;
    if (status == SK_OK)
        status = item == NULL ? SK_NO_MEMORY : encode_for(snapshot, leaf_no, &item->blocks);
    if (status == SK_OK) sk_buf_trim(&item->blocks); /* it may wait for a long time */
    pthread_mutex_lock(&store->snapshots_lock);
    snapshot->users--;
    pthread_cond_broadcast(&store->snapshots_moved);
    bool is_empty = item == NULL || item->blocks.len == 0;
    if (status == SK_OK) {
        snapshot->progress[leaf_no] = is_empty ? DONE : QUEUED;
        if (undo_of(snapshot, leaf_no) != NULL) drop_undo(store, leaf_no);
    }
    if (status != SK_OK || is_empty) {
        if (item != NULL) sk_buf_free(&item->blocks);
        sk_raw_free(item);
        return status;
    }
    item->leaf_no = leaf_no;
    item->next = snapshot->queue;
    snapshot->queue = item;
    snapshot->held += item->blocks.cap;
    return SK_OK;
}

/* No open snapshot needs the locked leaf. Under snapshots_lock. */
static void set_served(sk_store *store, uint32_t leaf_no) {
    drop_undo(store, leaf_no); /* of a snapshot that was given up */
    store->leaves[leaf_no].served = store->epoch - 1;
}

static int serve(sk_store *store, uint32_t leaf_no, bool may_wait, bool may_log) {
    sk_leaf *leaf = &store->leaves[leaf_no];
    sk_snapshot *snapshot;
    int status = SK_OK;
    pthread_mutex_lock(&store->snapshots_lock);
    while (status == SK_OK && (snapshot = first_wanting(store->snapshots, leaf_no)) != NULL) {
        if (may_wait && snapshot->held >= snapshot->bytes_max) {
            wait_for_reader(store, snapshot, leaf);
            pthread_mutex_unlock(&store->snapshots_lock);
            sk_leaf_lock(leaf);
            return SK_CHANGED;
        }
        bool is_only_one = first_wanting(snapshot->next, leaf_no) == NULL;
        if (may_log && is_only_one && log_for(snapshot, leaf_no)) {
            pthread_mutex_unlock(&store->snapshots_lock);
            return SK_OK;
        }
        status = enqueue(store, snapshot, leaf_no);
    }
    if (status == SK_OK) set_served(store, leaf_no);
    pthread_mutex_unlock(&store->snapshots_lock);
    return status;
}

int sk_snapshots_serve(sk_store *store, uint32_t leaf_no, bool may_log) {
    return serve(store, leaf_no, true, may_log);
}

int sk_snapshots_serve_now(sk_store *store, uint32_t leaf_no) {
    return serve(store, leaf_no, false, false);
}

bool sk_snapshots_serve_try(sk_store *store, uint32_t leaf_no) {
    if (pthread_mutex_trylock(&store->snapshots_lock) != 0) return false;
    sk_snapshot *snapshot = first_wanting(store->snapshots, leaf_no);
    bool is_ready = snapshot == NULL ||
                    (snapshot->held < snapshot->bytes_max &&
                     first_wanting(snapshot->next, leaf_no) == NULL && log_for(snapshot, leaf_no));
    if (snapshot == NULL) set_served(store, leaf_no);
    pthread_mutex_unlock(&store->snapshots_lock);
    return is_ready;
}

/* ---- Reading ---- */

/* Takes a leaf from the queue; -SK_MISSING if there is none. The copy is made without
 * snapshots_lock, so that other readers and changers can go on meanwhile. */
static int64_t take_queued(sk_snapshot *snapshot, uint32_t *leaf_no, sk_buf *buf) {
    sk_store *store = snapshot->store;
    pthread_mutex_lock(&store->snapshots_lock);
    queued *item = snapshot->queue;
    if (item != NULL) snapshot->queue = item->next;
    pthread_mutex_unlock(&store->snapshots_lock);
    if (item == NULL) return -SK_MISSING;
    int status = sk_buf_put(buf, item->blocks.data, item->blocks.len);
    pthread_mutex_lock(&store->snapshots_lock);
    if (status == SK_OK) {
        snapshot->held -= item->blocks.cap;
        snapshot->taken++;
        snapshot->progress[item->leaf_no] = DONE;
    } else { /* try again */
        item->next = snapshot->queue;
        snapshot->queue = item;
    }
    pthread_cond_broadcast(&store->snapshots_moved);
    pthread_mutex_unlock(&store->snapshots_lock);
    if (status != SK_OK) return -status;
    int64_t len = (int64_t)item->blocks.len;
    *leaf_no = item->leaf_no;
    sk_buf_free(&item->blocks);
    sk_raw_free(item);
    return len;
}

/* Encodes leaf_no unless somebody already did. Returns the length; 0 if there is nothing to
 * read. */
static int64_t read_leaf(sk_snapshot *snapshot, uint32_t leaf_no, sk_buf *buf) {
    sk_store *store = snapshot->store;
    size_t start = buf->len;
    int status = SK_OK;
    sk_leaf_lock(&store->leaves[leaf_no]);
    pthread_mutex_lock(&store->snapshots_lock);
    bool is_wanted = snapshot->progress[leaf_no] == WANTED && !snapshot->is_overrun;
    pthread_mutex_unlock(&store->snapshots_lock);
    if (is_wanted) status = encode_for(snapshot, leaf_no, buf);
    pthread_mutex_lock(&store->snapshots_lock);
    if (is_wanted && status == SK_OK) {
        snapshot->progress[leaf_no] = DONE;
        if (undo_of(snapshot, leaf_no) != NULL) drop_undo(store, leaf_no);
        snapshot->taken++;
        pthread_cond_broadcast(&store->snapshots_moved);
        if (first_wanting(store->snapshots, leaf_no) == NULL) set_served(store, leaf_no);
    }
    if (status != SK_OK && snapshot->cursor > leaf_no) snapshot->cursor = leaf_no; /* try again */
    pthread_mutex_unlock(&store->snapshots_lock);
    sk_leaf_unlock(&store->leaves[leaf_no]);
    return status == SK_OK ? (int64_t)(buf->len - start) : -status;
}

/* What the leaf was. Its lock is held, so nobody is encoding it now; progress says whether it was
 * encoded. */
static uint8_t residency_of(sk_snapshot *snapshot, uint32_t leaf_no) {
    sk_store *store = snapshot->store;
    pthread_mutex_lock(&store->snapshots_lock);
    bool is_encoded = snapshot->progress[leaf_no] != WANTED;
    pthread_mutex_unlock(&store->snapshots_lock);
    if (is_encoded) return snapshot->residency[leaf_no];
    return seen_by(snapshot, leaf_no);
}

int sk_snapshot_residency(sk_snapshot *snapshot, uint32_t leaf_no) {
    sk_store *store = snapshot->store;
    if (leaf_no >= store->leaf_count) return -sk_leaf_range_check(store, leaf_no, leaf_no + 1);
    sk_leaf_lock(&store->leaves[leaf_no]);
    int residency = residency_of(snapshot, leaf_no);
    sk_leaf_unlock(&store->leaves[leaf_no]);
    return residency;
}

int sk_snapshot_residencies(sk_snapshot *snapshot, uint8_t *out) {
    sk_store *store = snapshot->store;
    for (uint32_t i = 0; i < store->leaf_count; i++) {
        sk_leaf_lock(&store->leaves[i]);
        out[i] = residency_of(snapshot, i);
        sk_leaf_unlock(&store->leaves[i]);
    }
    return SK_OK;
}

/* The next leaf that the reader has not visited; false if there is none. */
static bool next_leaf(sk_snapshot *snapshot, uint32_t *leaf_no) {
    pthread_mutex_lock(&snapshot->store->snapshots_lock);
    *leaf_no = snapshot->cursor;
    bool is_left = *leaf_no < snapshot->store->leaf_count;
    if (is_left) snapshot->cursor++;
    pthread_mutex_unlock(&snapshot->store->snapshots_lock);
    return is_left;
}

int64_t sk_snapshot_next(sk_snapshot *snapshot, uint32_t *leaf_no, sk_buf *buf) {
    sk_store *store = snapshot->store;
    for (;;) {
        pthread_mutex_lock(&store->snapshots_lock);
        bool is_overrun = snapshot->is_overrun;
        bool is_left = snapshot->cursor < store->leaf_count;
        bool is_half_full = snapshot->held >= snapshot->bytes_max / 2;
        uint32_t logged = snapshot->undos != NULL ? snapshot->undos->leaf_no : store->leaf_count;
        pthread_mutex_unlock(&store->snapshots_lock);
        if (is_overrun)
            return -sk_fail(SK_OVERRUN,
                            "the snapshot's reader took nothing for %d ms while %llu bytes waited; "
                            "it was given up so that changes could go on",
                            SK_STALL_MS, (unsigned long long)snapshot->bytes_max);
        int64_t len = -SK_MISSING;
        /* First read leaves that nobody has encoded: if the reader gets to a leaf before a changer
         * does, no changer has to wait for it, and no log is needed. Blocks from changers, and
         * leaves with a log, can wait while there is room. */
        if (!is_left || is_half_full) len = take_queued(snapshot, leaf_no, buf);
        if (len != -SK_MISSING) return len;
        if (!is_left) return -SK_END;
        uint32_t next = logged;
        if ((!is_half_full || logged == store->leaf_count) && !next_leaf(snapshot, &next)) continue;
        len = read_leaf(snapshot, next, buf);
        if (len == 0) continue;
        if (len > 0) *leaf_no = next;
        return len;
    }
}

/* Called right after encoding, while the bytes are still in the cache, and with no lock held. */
static void seal_blocks(uint8_t *blocks, size_t len) {
    for (size_t at = 0; at < len;) {
        uint64_t size = sk_load64(blocks + at + 8);
        sk_store32(blocks + at + 4, sk_crc32c(blocks + at + 8, size - 8, 0));
        at += size;
    }
}

int64_t sk_snapshot_fill(sk_snapshot *snapshot, uint64_t bytes_max, sk_filled *records,
                         uint64_t records_max, sk_buf *buf) {
    if (records_max == 0) return -sk_fail(SK_BAD_ARGUMENT, "there is no room for a record");
    uint64_t count = 0;
    while (count < records_max && (count == 0 || buf->len < bytes_max)) {
        uint32_t leaf_no = 0;
        size_t start = buf->len;
        int64_t len = -SK_FAILPOINT(SNAPSHOT_FILL);
        if (len == 0) len = sk_snapshot_next(snapshot, &leaf_no, buf);
        if (len < 0 && count == 0) return len;
        if (len < 0) break; /* buf has leaves that left the snapshot: the next call retries */
        seal_blocks(buf->data + start, (size_t)len);
        uint8_t residency = snapshot->residency[leaf_no];
        bool is_delta = snapshot->since != NULL && snapshot->since[leaf_no] > 0;
        records[count++] = (sk_filled){.leaf = leaf_no,
                                       .residency = residency,
                                       .offset = start,
                                       .length = (uint64_t)len,
                                       .is_delta = is_delta || residency != SK_WHOLE};
    }
    return (int64_t)count;
}
