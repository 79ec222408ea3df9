/*
 * entry.h: how a call about one key begins and ends, for entry.c and the files of the kinds.
 *
 * It is inline, because it is most of the work of such a call: each call has its own copy, in which
 * `access`, what it is about to do, is a constant.
 */
#ifndef SK_ENTRY_H
#define SK_ENTRY_H

#include "store.h"

/* Sets of kinds, as bits: which ones a call is for. */
#define SK_ANY_KIND (~0u)
#define SK_ONLY(kind) (1u << (kind))

/* What a call is about to do. SK_TRIES is added to one of them by a caller that must not wait, since
 * it holds something that others need (py.h): sk_call_begin then answers SK_BUSY where it would
 * have to wait, encode a leaf for a snapshot or look at a gate. Nothing has happened then, and nothing was
 * counted: the same call without SK_TRIES is to follow. A call that did not get SK_BUSY is counted
 * by its caller, once it has an answer. */
enum { SK_READS = 0, SK_WRITES = 1, SK_INSTALLS = 2, SK_TRIES = 4 };
#define SK_BUSY 64 /* no sk_status: it never leaves the library */

/* Decides about a call on a leaf that is away or whose gate is not open. A call that opens the gate
 * is let in. For any other, the locked leaf is unlocked, and the result is the call's answer. */
int sk_call_guard(sk_store *store, uint32_t leaf_no, int access) __attribute__((cold, noinline));

/* Keeps the key's entry in the log at->undo, before the call changes it. Where that cannot be, the
 * whole leaf is encoded, or with `tries` the leaf is unlocked and the answer is SK_BUSY. On failure
 * the leaf is unlocked. */
int sk_call_save(sk_at *at, const sk_key *key, bool tries) __attribute__((noinline));
void sk_call_settle(sk_at *at) __attribute__((noinline));

/* Starts loading the key's tags into the cache while the leaf's lock is being taken, because taking
 * it holds up all later loads. The head is read without the lock: another thread may be changing
 * it, and then the address is wrong and the prefetch useless. But the address is used for nothing
 * else. */
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
__attribute__((no_sanitize("thread")))
#endif
#elif defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize_thread))
#endif
static inline void
sk_prefetch_tags(const sk_table *table, uint64_t hash, unsigned leaf_bits) {
    const uint8_t *tags = __atomic_load_n(&table->tags, __ATOMIC_RELAXED);
    uint32_t groups = __atomic_load_n(&table->groups, __ATOMIC_RELAXED);
    __builtin_prefetch((const void *)((uintptr_t)tags +
                                      (uintptr_t)sk_group_of(hash, leaf_bits, groups) * SK_GROUP));
}

/* Locks a leaf without waiting: SK_OK or SK_BUSY. */
static inline int sk_leaf_lock_try(sk_store *store, uint32_t leaf_no, bool writes, uint32_t *epoch,
                                   sk_undo **undo) {
    sk_leaf *leaf = &store->leaves[leaf_no];
    if (!sk_lock_try(&leaf->lock)) return SK_BUSY;
    *epoch = writes ? atomic_load(&store->epoch) : 0; /* under the lock, as snapshot.c demands */
    if (__builtin_expect(leaf->residency >= SK_AWAY || (writes && !sk_leaf_is_served(leaf, *epoch)),
                         0)) {
        if (leaf->residency < SK_AWAY && sk_leaf_try_entries(store, leaf_no, epoch, undo))
            return SK_OK;
        sk_leaf_unlock(leaf);
        return SK_BUSY;
    }
    return SK_OK;
}

/* Routes the key and locks its leaf; sk_call_end follows. On failure nothing is locked. */
static inline int sk_call_begin(sk_store *store, uint32_t state_id, unsigned kinds,
                                const uint8_t *data, size_t len, int access, sk_at *at,
                                sk_key *key) {
    sk_state *state = sk_state_at(store, state_id);
    if (state == NULL) return SK_BAD_ARGUMENT;
    if (!(kinds >> state->kind & 1))
        return sk_fail(SK_BAD_KIND, "state '%.80s' is of kind %s, which has no such operation",
                       state->name, sk_kinds[state->kind]->name);
    *key = (sk_key){data, len, 0};
    int status = sk_key_route(&state->key_type, data, len, &key->hash);
    if (status != SK_OK) return status;
    sk_undo *undo = NULL;
    uint32_t leaf_no = sk_leaf_of(key->hash, store->leaf_bits), epoch = 0;
    bool is_timed = state->flags & SK_TIMED, touches = is_timed && state->on_read;
    __builtin_prefetch(&store->leaves[leaf_no], 1);
    sk_prefetch_tags(&state->tables[leaf_no], key->hash, store->leaf_bits);
    bool tries = access & SK_TRIES, writes = (access & ~SK_TRIES) != SK_READS || touches;
    if (tries)
        status = sk_leaf_lock_try(store, leaf_no, writes, &epoch, &undo);
    else if (access == SK_INSTALLS) /* an entry from the home must not look as if it was here */
        status = sk_leaf_lock_write(store, leaf_no, &epoch);
    else if (writes)
        status = sk_leaf_lock_entries(store, leaf_no, &epoch, &undo);
    else
        sk_leaf_lock(&store->leaves[leaf_no]);
    if (status != SK_OK) return status;
    if (!tries && __builtin_expect(store->leaves[leaf_no].residency >= SK_AWAY, 0) &&
        (status = sk_call_guard(store, leaf_no, access)) != SK_OK)
        return status;
    /* A read may find an expired entry, and the tombstone for it gets an epoch like any change. */
    if (is_timed && epoch == 0) epoch = atomic_load(&store->epoch);
    sk_at_set(at, store, state, leaf_no, epoch);
    if (!tries) sk_count_operation(at);
    if (is_timed) {
        at->timing = sk_timing_of(store, state);
        at->timing.on_read = touches; /* as the lock was taken */
        at->env.timing = &at->timing;
    }
    at->undo = undo;
    return __builtin_expect(undo == NULL, 1) ? SK_OK : sk_call_save(at, key, tries);
}

static inline void sk_call_end(sk_at *at) {
    if (__builtin_expect(at->undo != NULL, 0)) sk_call_settle(at);
    sk_leaf_unlock(at->leaf);
}

/* A live slot for the key, made or revived; its value is not set yet. */
static inline sk_slot *sk_entry_make_live(sk_at *at, const sk_key *key, sk_slot *tomb) {
    sk_slot *slot = tomb;
    if (slot == NULL) {
        slot = sk_table_insert(at->table, &at->env, key->hash, key->data, key->len);
        if (slot == NULL) return NULL;
    } else {
        slot->marks &= (uint8_t)~SK_MARK_TOMB;
        at->table->tombs--;
    }
    at->table->live++;
    if (at->env.timing != NULL) sk_slot_set_stamp(slot, at->env.timing->now);
    return slot;
}

#endif
