/*
 * ttl.c: entries that expire: the store's clocks, stamps, and what happens to an expired entry.
 *
 * An expired entry is removed by whatever finds it first: a call about its key, a write-back, or
 * sk_sweep. Full blocks leave it out; deltas have it, with its stamp. If a home may have a copy
 * (the leaf is not whole, or changes are written back), the entry becomes a dirty tombstone, so
 * that the home forgets it too.
 *
 * Otherwise the entry is removed without a trace: there is no tombstone, and deltas can still reach
 * back to before the removal. Such a delta does not mention the entry, although an older checkpoint
 * has it. When both are restored, the entry is there again. That does no harm, because it is
 * expired there too:
 *  1. Every older copy of an entry carries the stamp that the entry had then.
 *  2. The stamp of an entry never falls while it lives, so the copy's stamp is not later.
 *  3. The clock does not go back, so whoever reads the copy, at the time of the removal or later,
 *     finds it expired.
 * 1 has one exception: copies made before the first watermark, whose stamp is SK_NO_TIME. A store
 * that reads such a copy takes it to be as old as its own first watermark, which is later.
 * Therefore
 *  - the first watermark stamps all entries that have no stamp, which is a change like any other
 *    and so reaches deltas and homes;
 *  - such an entry is marked SK_MARK_UNSTAMPED, and deleted with a trace when it expires.
 * Entries that come without a stamp later (in blocks, in leaves) count as stamped at the first
 * watermark, and that is what blocks made here say. No delta reaches back to before they came.
 *
 * Removing an entry is a change, and a snapshot must not lose an entry that was alive when the
 * snapshot was taken, because a restore goes on from the watermark of that moment. So an expired
 * entry is removed only where all open snapshots have been served (sk_may_expire). A call that only
 * reads does not serve them: it answers that there is no such entry, and leaves the removal to a
 * later call.
 */
#define _GNU_SOURCE
#include "store.h"

#include <time.h>

static void set_timed(sk_at *at, sk_store *store, sk_state *state, uint32_t leaf_no,
                      uint32_t epoch) {
    sk_at_set(at, store, state, leaf_no, epoch);
    at->timing = sk_timing_of(store, state);
    at->env.timing = &at->timing;
}

/* ---- Clocks ---- */

/* The system's time, but never earlier than what was returned before: clocks are sometimes set
 * back. */
static int64_t system_now(sk_store *store) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    int64_t ms = (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
    int64_t last = atomic_load_explicit(&store->last_now, memory_order_relaxed);
    while (ms > last && !atomic_compare_exchange_weak(&store->last_now, &last, ms)) continue;
    return ms > last ? ms : last;
}

int64_t sk_time(sk_store *store, int clock) {
    if (clock == SK_EVENT_TIME) return atomic_load(&store->watermark);
    int64_t fixed = atomic_load(&store->fixed_now);
    return fixed != SK_NO_TIME ? fixed : system_now(store);
}

static int check_clock(int clock) {
    if (clock == SK_PROCESSING_TIME || clock == SK_EVENT_TIME) return SK_OK;
    return sk_fail(SK_BAD_ARGUMENT, "there is no clock %d", clock);
}

static bool is_by_event(const sk_state *state) {
    return (state->flags & SK_TIMED) != 0 && state->clock == SK_EVENT_TIME;
}

static void stamp_table(sk_at *at) {
    sk_slot *slot;
    for (size_t i = 0; (slot = sk_table_next(at->table, &i)) != NULL;)
        if (sk_slot_is_live(slot) && sk_slot_stamp(slot) == SK_NO_TIME) sk_entry_changed(at, slot);
}

/* Under all locks at once: a write comes before this, and is stamped here, or after it, and then
 * the time is known. */
static int set_first_watermark(sk_store *store, int64_t now_ms) {
    uint32_t epoch;
    int status = sk_leaves_lock_write(store, 0, store->leaf_count, &epoch);
    if (status != SK_OK) return status;
    if (store->watermark == SK_NO_TIME) store->first_watermark = now_ms;
    if (store->watermark < now_ms) store->watermark = now_ms;
    for (uint32_t s = 0; s < store->state_count; s++) {
        sk_state *state = store->states[s];
        for (uint32_t i = 0; i < store->leaf_count && is_by_event(state); i++) {
            if (state->tables[i].live == 0) continue;
            sk_at at;
            set_timed(&at, store, state, i, epoch);
            stamp_table(&at);
        }
    }
    sk_leaves_unlock(store, 0, store->leaf_count);
    return SK_OK;
}

int sk_time_set(sk_store *store, int clock, int64_t now_ms) {
    int status = check_clock(clock);
    if (status != SK_OK) return status;
    if (clock == SK_PROCESSING_TIME) {
        atomic_store(&store->fixed_now, now_ms);
        return SK_OK;
    }
    if (sk_time(store, SK_EVENT_TIME) == SK_NO_TIME && now_ms != SK_NO_TIME)
        return set_first_watermark(store, now_ms);
    int64_t last = atomic_load(&store->watermark);
    while (now_ms > last && !atomic_compare_exchange_weak(&store->watermark, &last, now_ms))
        continue;
    return SK_OK;
}

int sk_state_ttl(sk_store *store, uint32_t state_id, int64_t ttl_ms, int clock, int on_read) {
    sk_state *state = sk_state_at(store, state_id);
    int status = state == NULL ? SK_BAD_ARGUMENT : check_clock(clock);
    if (status != SK_OK) return status;
    if (!(state->flags & SK_TIMED))
        return sk_fail(SK_BAD_ARGUMENT, "state '%.80s' is not timed", state->name);
    if (ttl_ms < 0) return sk_fail(SK_BAD_ARGUMENT, "a time to live of %lld ms", (long long)ttl_ms);
    int64_t none = SK_NO_TIME;
    atomic_compare_exchange_strong(&state->timed_since, &none, sk_time(store, SK_PROCESSING_TIME));
    atomic_store(&state->clock, (uint8_t)clock);
    atomic_store(&state->on_read, on_read != 0);
    atomic_store(&state->ttl_ms, ttl_ms);
    return SK_OK;
}

int sk_stamp_expired(sk_store *store, uint32_t state_id, int64_t stamp_ms) {
    sk_state *state = sk_state_at(store, state_id);
    if (state == NULL) return -SK_BAD_ARGUMENT;
    sk_timing timing = sk_timing_of(store, state);
    return sk_is_expired(&timing, stamp_ms == SK_NO_TIME ? timing.first : stamp_ms);
}

sk_timing sk_timing_of(sk_store *store, const sk_state *state) {
    int clock = atomic_load_explicit(&state->clock, memory_order_relaxed);
    sk_timing timing = {.now = sk_time(store, clock)};
    timing.ttl_ms = atomic_load_explicit(&state->ttl_ms, memory_order_relaxed);
    timing.on_read = atomic_load_explicit(&state->on_read, memory_order_relaxed);
    /* In processing time, only entries that were stored without a time to live have no stamp. They
     * count as written when the state was given its time to live. */
    timing.first = clock == SK_EVENT_TIME ? atomic_load(&store->first_watermark)
                                          : atomic_load(&state->timed_since);
    return timing;
}

/* ---- Entries ---- */

void sk_entry_stamp(sk_at *at, sk_slot *slot) {
    int64_t was = sk_slot_stamp(slot), now = at->env.timing->now;
    if (now <= was) return; /* the entry comes from a store whose clock is ahead */
    if (was == SK_NO_TIME) slot->marks |= SK_MARK_UNSTAMPED;
    sk_slot_set_stamp(slot, now);
}

sk_slot *sk_entry_expire(sk_at *at, sk_slot *slot) {
    bool may_lie_unstamped =
        sk_slot_stamp(slot) == SK_NO_TIME || (slot->marks & SK_MARK_UNSTAMPED) != 0;
    if (!at->env.is_whole || at->env.writes_back || may_lie_unstamped)
        return sk_entry_drop(at, slot);
    sk_table_remove(at->table, &at->env, slot);
    return NULL;
}

/* ---- Sweeping ---- */

/* Removes expired entries among the next taken slots, of which it looks at *slots_left at most.
 * *slot_at is where it will go on, 0 at the end of the table. Returns how many it removed. */
static uint32_t sweep_table(sk_at *at, size_t *slot_at, uint64_t *slots_left) {
    uint32_t removed = 0;
    sk_slot *slot = NULL;
    while (*slots_left > 0 && (slot = sk_table_next(at->table, slot_at)) != NULL) {
        --*slots_left;
        if (!sk_slot_is_expired(&at->env, slot)) continue;
        sk_entry_expire(at, slot);
        removed++;
    }
    if (*slots_left > 0) { /* the end of the table: nothing points into it any more */
        *slot_at = 0;
        sk_table_trim(at->table, &at->env, false);
    }
    return removed;
}

void sk_leaf_expire(sk_store *store, uint32_t leaf_no) {
    if (!sk_may_expire(store, &store->leaves[leaf_no])) return;
    for (uint32_t s = 0; s < store->state_count; s++) {
        sk_state *state = store->states[s];
        if (!(state->flags & SK_TIMED) || state->tables[leaf_no].live == 0) continue;
        sk_at at;
        size_t slot_at = 0;
        uint64_t slots_left = UINT64_MAX;
        set_timed(&at, store, state, leaf_no, atomic_load(&store->epoch));
        sweep_table(&at, &slot_at, &slots_left);
    }
}

static bool can_expire(const sk_state *state) {
    return (state->flags & SK_TIMED) != 0 && state->ttl_ms > 0;
}

/* Sweeps the leaf under the hand, or as much of it as slots_left allows. */
static uint32_t sweep_leaf(sk_store *store, sk_hand *hand, uint32_t epoch, uint64_t *slots_left) {
    uint32_t removed = 0;
    /* a shut leaf must not change */
    if (store->leaves[hand->leaf].residency == SK_LEAF_SHUT) hand->state = store->state_count;
    for (; hand->state < store->state_count; hand->state++) {
        sk_state *state = store->states[hand->state];
        if (!can_expire(state) || state->tables[hand->leaf].groups == 0) {
            hand->slot = 0;
            continue;
        }
        sk_at at;
        set_timed(&at, store, state, hand->leaf, epoch);
        removed += sweep_table(&at, &hand->slot, slots_left);
        if (*slots_left == 0) return removed;
    }
    hand->state = 0;
    hand->slot = 0;
    hand->leaf = hand->leaf + 1 == store->leaf_count ? 0 : hand->leaf + 1;
    --*slots_left; /* so that a sweep over empty leaves ends too */
    return removed;
}

int64_t sk_sweep(sk_store *store, uint64_t slots_max) {
    bool has_work = false;
    for (uint32_t s = 0; s < store->state_count; s++) has_work |= can_expire(store->states[s]);
    if (!has_work) return 0;
    int64_t removed = 0;
    int status = SK_OK;
    uint64_t slots_left = slots_max;
    pthread_mutex_lock(&store->clock_lock);
    for (uint32_t step = 0; step <= store->leaf_count && slots_left > 0; step++) {
        uint32_t leaf_no = store->sweep_hand.leaf, epoch;
        if ((status = sk_leaf_lock_write(store, leaf_no, &epoch)) != SK_OK) break;
        removed += sweep_leaf(store, &store->sweep_hand, epoch, &slots_left);
        sk_leaf_unlock(&store->leaves[leaf_no]);
    }
    pthread_mutex_unlock(&store->clock_lock);
    return status == SK_OK ? removed : -status;
}
