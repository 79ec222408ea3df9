/*
 * leaf.c: leaves as units: how much of a leaf is here; clearing it; encoding it.
 *
 *   whole     all its entries are here: a key that is not here does not exist
 *   partial   some are here, and these are newer than what its home has
 *   absent    none is here
 *   away      it does not belong to this store
 *
 * Marking a leaf says which of these holds. A leaf that is marked whole has nothing to ask its home
 * for, so tombstones that were only kept to hide entries of the home are dropped. Marking a leaf
 * absent or away drops what is here, without a trace: so no delta can reach back to before that
 * (sk_leaf_end_deltas).
 *
 * Other files: decode.c (from bytes), evict.c (to make room), transfer.c (to another store), gate.c
 * (to another process), dirty.c and writeback.c (home).
 */
#include "failpoint.h"
#include "store.h"

#include <stdlib.h>

int sk_leaf_forget(sk_store *store, uint32_t leaf_no) {
    uint32_t epoch;
    if (leaf_no >= store->leaf_count) return sk_leaf_range_check(store, leaf_no, leaf_no + 1);
    int status = sk_leaf_lock_write(store, leaf_no, &epoch);
    if (status != SK_OK) return status;
    sk_leaf_end_deltas(&store->leaves[leaf_no], epoch);
    sk_leaf_unlock(&store->leaves[leaf_no]);
    return SK_OK;
}

/* ---- Residency ---- */

int sk_leaf_residency(sk_store *store, uint32_t leaf_no) {
    if (leaf_no >= store->leaf_count) return -sk_leaf_range_check(store, leaf_no, leaf_no + 1);
    sk_leaf_lock(&store->leaves[leaf_no]);
    int residency = sk_leaf_held(&store->leaves[leaf_no]);
    sk_leaf_unlock(&store->leaves[leaf_no]);
    return residency;
}

int sk_leaf_residencies(sk_store *store, const uint32_t *leaves, uint64_t n, uint8_t *out) {
    for (uint64_t i = 0; i < n; i++) {
        if (leaves[i] >= store->leaf_count)
            return sk_leaf_range_check(store, leaves[i], leaves[i] + 1);
        out[i] = (uint8_t)sk_leaf_held(&store->leaves[leaves[i]]);
    }
    return SK_OK;
}

void sk_leaf_set_residency(sk_store *store, uint32_t leaf_no, int residency, uint32_t epoch) {
    bool drops = residency == SK_ABSENT || residency == SK_AWAY;
    sk_leaf *leaf = &store->leaves[leaf_no];
    sk_leaf_hold(leaf, residency);
    for (uint32_t s = 0; s < store->state_count && sk_bytes_used(store) > 0; s++) {
        sk_table *table = &store->states[s]->tables[leaf_no];
        if (table->groups == 0) continue;
        sk_table_env env;
        sk_env_set_held(&env, store, store->states[s], &store->leaves[leaf_no], epoch);
        if (residency == SK_WHOLE) sk_table_purge(table, &env);
        if (drops) sk_table_clear(table, env.kind);
    }
    if (drops) {
        leaf->residency = (uint8_t)residency; /* nothing is left that a gate could shut */
        leaf->is_writing = false;
        sk_filter_drop(store, leaf_no);
        sk_leaf_end_deltas(leaf, epoch);
    }
}

int sk_leaf_mark(sk_store *store, uint32_t from, uint32_t to, int residency) {
    int status = sk_leaf_range_check(store, from, to);
    if (status != SK_OK) return status;
    if (residency < SK_WHOLE || residency > SK_AWAY)
        return sk_fail(SK_BAD_ARGUMENT, "there is no residency %d", residency);
    uint32_t epoch;
    if ((status = sk_leaves_lock_write(store, from, to, &epoch)) != SK_OK) return status;
    for (uint32_t i = from; i < to && (residency == SK_WHOLE || residency == SK_PARTIAL); i++)
        if (store->leaves[i].residency == SK_LEAF_SHUT)
            status = sk_leaf_refuse(&store->leaves[i], i);
    for (uint32_t i = from; i < to && status == SK_OK; i++)
        sk_leaf_set_residency(store, i, residency, epoch);
    sk_leaves_unlock(store, from, to);
    return status;
}

static void entomb_all(sk_table *table, int kind, uint32_t epoch) {
    sk_slot *slot;
    for (size_t at = 0; (slot = sk_table_next(table, &at)) != NULL;) {
        if (!sk_slot_is_live(slot)) continue;
        sk_value_free(&table->mem, kind, slot->value);
        slot->value = (sk_value){0};
        slot->marks |= SK_MARK_TOMB;
        slot->epoch = epoch;
        sk_slot_mark_dirty(table, slot);
    }
    table->tombs += table->live;
    table->live = 0;
}

int sk_clear(sk_store *store, uint32_t state_id, uint32_t from, uint32_t to, int flags) {
    int status = sk_leaf_range_check(store, from, to);
    if (status != SK_OK) return status;
    sk_state *state = sk_state_at(store, state_id);
    if (state == NULL) return SK_BAD_ARGUMENT;
    uint32_t epoch;
    if ((status = sk_leaves_lock_write(store, from, to, &epoch)) != SK_OK) return status;
    for (uint32_t i = from; i < to; i++) {
        int residency = store->leaves[i].residency;
        bool is_part = residency == SK_PARTIAL || residency == SK_ABSENT;
        if (residency == SK_LEAF_EXPECTED || (is_part && !(flags & SK_BLIND))) status = SK_UNKNOWN;
    }
    for (uint32_t i = from; i < to && status == SK_OK; i++) {
        sk_table *table = &state->tables[i];
        /* A table of a leaf that is not whole may be empty here although the home has, or had,
         * entries of it. So it counts as changed even if it is empty, or the next delta would not
         * mention it. */
        int residency = store->leaves[i].residency;
        bool is_empty = table->live + table->tombs == 0;
        if (residency >= SK_AWAY || (residency == SK_WHOLE && is_empty)) continue;
        if (store->writes_back && residency == SK_WHOLE) {
            entomb_all(table, state->kind, epoch); /* the home still has them, and must be told */
            sk_leaf_note_dirty(store, i);
        } else {
            sk_table_clear(table, state->kind);
        }
        table->forgot = epoch;
        store->leaves[i].changed = epoch;
    }
    sk_leaves_unlock(store, from, to);
    return status;
}

/* ---- Encoding ---- */

static int compare_names(const void *a, const void *b) {
    sk_state *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

/* All states by name, whatever the order in which they were declared, so that equal state gives
 * equal bytes. Returns how many there are. */
static uint32_t states_by_name(sk_store *store, sk_state **states) {
    uint32_t count = store->state_count;
    for (uint32_t s = 0; s < count; s++) states[s] = store->states[s];
    if (count > 1) qsort(states, count, sizeof *states, compare_names);
    return count;
}

int sk_leaf_encode_locked(sk_store *store, uint32_t leaf_no, uint32_t state_id, sk_select select,
                          uint32_t since, const int64_t *watermark, const sk_undo *undo,
                          sk_buf *buf) {
    size_t start = buf->len;
    const sk_leaf *leaf = &store->leaves[leaf_no];
    /* It has no entries here, but it is not empty either, which is what a delta would say. */
    if (leaf->residency == SK_AWAY) return SK_OK;
    /* A home must be told what has expired. A delta keeps expired entries with their stamps, which
     * is just as good. It must not remove them, because other snapshots may need them. */
    if (select == SK_SELECT_DIRTY || select == SK_SELECT_COLD) sk_leaf_expire(store, leaf_no);
    sk_state *states[SK_STATES_MAX];
    uint32_t count = 1;
    if (state_id == SK_ALL_STATES)
        count = states_by_name(store, states);
    else
        states[0] = store->states[state_id];
    int status = SK_OK;
    for (uint32_t s = 0; s < count && status == SK_OK; s++) {
        sk_table_env env;
        sk_env_set_held(&env, store, states[s], leaf, 0);
        sk_timing timing;
        if (env.is_timed) {
            timing = sk_timing_of(store, states[s]);
            if (watermark != NULL && states[s]->clock == SK_EVENT_TIME) timing.now = *watermark;
            env.timing = &timing;
        }
        const sk_table *table = &states[s]->tables[leaf_no];
        const sk_past *past = NULL;
        if (undo != NULL && states[s]->id >= undo->table_count) continue; /* it is newer */
        if (undo != NULL) past = &undo->tables[states[s]->id];
        /* If a table has lost entries without a trace since then, there is no delta of it: all of
         * it is written, as a full block, even if nothing is left. */
        uint32_t forgot = past != NULL ? past->forgot : table->forgot;
        bool has_delta = select != SK_SELECT_SINCE || (forgot <= since && leaf->forgot <= since);
        status = SK_FAILPOINT(LEAF_ENCODE);
        if (status == SK_OK)
            status = sk_block_encode(table, &env, states[s]->name, leaf_no,
                                     has_delta ? select : SK_SELECT_REST, since, past, buf);
    }
    if (status != SK_OK) buf->len = start;
    return status;
}

int64_t sk_leaf_encode(sk_store *store, uint32_t leaf_no, uint32_t state_id, uint32_t since,
                       sk_buf *buf) {
    if (leaf_no >= store->leaf_count) return -sk_leaf_range_check(store, leaf_no, leaf_no + 1);
    if (state_id != SK_ALL_STATES && sk_state_at(store, state_id) == NULL) return -SK_BAD_ARGUMENT;
    if (since > store->epoch) return -sk_since_fail(store, since);
    size_t start = buf->len;
    sk_leaf_lock(&store->leaves[leaf_no]);
    int status =
        sk_leaf_encode_locked(store, leaf_no, state_id, since > 0 ? SK_SELECT_SINCE : SK_SELECT_ALL,
                              since, NULL, NULL, buf);
    sk_leaf_unlock(&store->leaves[leaf_no]);
    return status == SK_OK ? (int64_t)(buf->len - start) : -status;
}
