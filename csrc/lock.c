/* lock.c: the locks of leaves (lock.h): one, a range, or a list of them. See store.h. */
#define _GNU_SOURCE
#include "store.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

void sk_lock_wait(sk_lock *lock) {
    while (atomic_exchange_explicit(&lock->state, 2, memory_order_acquire) != 0)
        syscall(SYS_futex, &lock->state, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0);
}

void sk_lock_wake(sk_lock *lock) {
    syscall(SYS_futex, &lock->state, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* undo NULL: the leaf is to be served, without a log. */
static inline int lock_for_changes(sk_store *store, uint32_t leaf_no, uint32_t *epoch,
                                   sk_undo **undo) {
    sk_leaf *leaf = &store->leaves[leaf_no];
    bool may_be_full = false; /* there was room a moment ago, and the lock has been held since */
    sk_leaf_lock(leaf);
    for (;;) {
        /* Read under the leaf's lock: the argument in snapshot.c relies on that. */
        uint32_t now = atomic_load(&store->epoch);
        if (__builtin_expect(sk_leaf_is_served(leaf, now), 1)) {
            *epoch = now;
            return SK_OK;
        }
        sk_undo *found = undo != NULL ? sk_leaf_undo(store, leaf_no, now) : NULL;
        if (found != NULL && (may_be_full || !sk_undo_is_full(found))) {
            *undo = found;
            *epoch = now;
            return SK_OK;
        }
        int status = sk_snapshots_serve(store, leaf_no, undo != NULL);
        may_be_full = status == SK_OK;
        if (status == SK_OK || status == SK_CHANGED) continue;
        sk_leaf_unlock(leaf);
        return status;
    }
}

int sk_leaf_lock_write(sk_store *store, uint32_t leaf_no, uint32_t *epoch) {
    return lock_for_changes(store, leaf_no, epoch, NULL);
}

int sk_leaf_lock_entries(sk_store *store, uint32_t leaf_no, uint32_t *epoch, sk_undo **undo) {
    *undo = NULL;
    return lock_for_changes(store, leaf_no, epoch, undo);
}

bool sk_leaf_try_entries(sk_store *store, uint32_t leaf_no, uint32_t *epoch, sk_undo **undo) {
    *undo = NULL;
    for (bool is_first = true;; is_first = false) {
        *epoch = atomic_load(&store->epoch);
        if (sk_leaf_is_served(&store->leaves[leaf_no], *epoch)) return true;
        *undo = sk_leaf_undo(store, leaf_no, *epoch);
        if (*undo != NULL && !(is_first && sk_undo_is_full(*undo))) return true;
        *undo = NULL;
        /* not for ever, if other threads open snapshot after snapshot */
        if (!is_first || !sk_snapshots_serve_try(store, leaf_no)) return false;
    }
}

void sk_leaves_unlock(sk_store *store, uint32_t from, uint32_t to) {
    for (uint32_t i = from; i < to; i++) sk_leaf_unlock(&store->leaves[i]);
}

int sk_leaves_lock_write(sk_store *store, uint32_t from, uint32_t to, uint32_t *epoch) {
    for (;;) {
        for (uint32_t i = from; i < to; i++) {
            /* an atomic operation waits for its cache line: prefetch the next ones */
            if (i + 16 < to) __builtin_prefetch(&store->leaves[i + 16], 1);
            sk_leaf_lock(&store->leaves[i]);
        }
        *epoch = atomic_load(&store->epoch);
        uint32_t i = from;
        while (i < to && sk_leaf_is_served(&store->leaves[i], *epoch)) i++;
        if (i == to) return SK_OK;
        sk_leaves_unlock(store, from, to);
        /* Snapshots are served leaf by leaf, so that no call waits for more than one encoding. */
        for (; i < to; i++) {
            int status = sk_leaf_lock_write(store, i, epoch);
            if (status != SK_OK) return status;
            sk_leaf_unlock(&store->leaves[i]);
        }
    }
}

void sk_leaf_list_unlock(sk_store *store, const uint32_t *leaves, uint32_t count) {
    for (uint32_t k = 0; k < count; k++) sk_leaf_unlock(&store->leaves[leaves[k]]);
}

/* Whether a locked leaf may be changed now, in the way that the caller wants. */
static bool is_ready(const sk_store *store, uint32_t leaf_no, sk_lock_for what, uint32_t epoch) {
    return what == SK_FOR_READING || sk_leaf_is_served(&store->leaves[leaf_no], epoch) ||
           (what == SK_FOR_ENTRIES && sk_leaf_undo(store, leaf_no, epoch) != NULL);
}

int sk_leaf_list_lock(sk_store *store, const uint32_t *leaves, uint32_t count, sk_lock_for what,
                      uint32_t *epoch) {
    sk_undo *undo;
    for (;;) {
        for (uint32_t k = 0; k < count && what != SK_FOR_READING; k++) {
            sk_leaf *leaf = &store->leaves[leaves[k]];
            if (sk_leaf_is_served(leaf, atomic_load(&store->epoch))) continue;
            int status = what == SK_FOR_ENTRIES
                             ? sk_leaf_lock_entries(store, leaves[k], epoch, &undo)
                             : sk_leaf_lock_write(store, leaves[k], epoch);
            if (status != SK_OK) return status;
            sk_leaf_unlock(leaf);
        }
        for (uint32_t k = 0; k < count; k++) sk_leaf_lock(&store->leaves[leaves[k]]);
        *epoch = atomic_load(&store->epoch);
        uint32_t k = 0;
        while (k < count && is_ready(store, leaves[k], what, *epoch)) k++;
        if (k == count) return SK_OK;
        sk_leaf_list_unlock(store, leaves, count); /* a snapshot was opened in between */
    }
}
