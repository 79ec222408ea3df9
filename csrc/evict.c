/*
 * evict.c: clean entries that were not used lately are dropped, to make room.
 *
 * A hand goes around all slots, like the hand of a clock. If a slot is marked as used, the hand
 * takes the mark away. If it is not, and the home has the entry as it is, the entry is dropped. So
 * an entry that is used once a round stays. The hand goes around at most twice: in the first round
 * it may only take marks away.
 *
 * The leaf of a dropped entry is partial from then on. No delta could mention the entry any more,
 * so its table notes in `forgot` the epoch in which the entry last changed.
 */
#include "store.h"

/* Moves the hand through one table until enough is free; *slot_at is where it will go on. */
static uint64_t evict_table(sk_at *at, size_t *slot_at, uint64_t bytes_wanted) {
    sk_table *table = at->table;
    uint64_t was = table->mem.used, slots_freed = 0;
    sk_slot *slot;
    bool has_due = sk_kinds[at->env.kind]->has_due;
    while ((slot = sk_table_next(table, slot_at)) != NULL) {
        bool stays = slot->marks & (SK_MARK_DIRTY | SK_MARK_WRITING | SK_MARK_USED);
        /* a timer must stay in memory to fire; a tombstone need not */
        if (has_due && sk_slot_is_live(slot)) stays = true;
        slot->marks &= (uint8_t)~SK_MARK_USED; /* of dirty ones too: SK_COLD asks for it */
        if (stays) continue;
        if (slot->epoch > table->forgot) table->forgot = slot->epoch;
        sk_table_remove(table, &at->env, slot);
        at->leaf->residency = SK_PARTIAL;
        at->env.is_whole = false;
        slots_freed++;
        if (was - table->mem.used + slots_freed * sizeof(sk_slot) >= bytes_wanted) break;
    }
    if (slot == NULL) *slot_at = 0;
    /* Numbers live in their slots: only a smaller array gives their memory back. */
    if (slots_freed > 0) sk_table_trim(table, &at->env, true);
    return was - table->mem.used;
}

int64_t sk_evict(sk_store *store, uint64_t bytes_wanted) {
    pthread_mutex_lock(&store->clock_lock);
    uint64_t freed = 0;
    int status = SK_OK;
    /* Two rounds: the first may only clear marks. */
    sk_hand *hand = &store->evict_hand;
    for (uint64_t step = 0; step < 2 * (uint64_t)store->leaf_count + 1 && status == SK_OK; step++) {
        uint32_t leaf_no = hand->leaf, epoch;
        if ((status = sk_leaf_lock_write(store, leaf_no, &epoch)) != SK_OK) break;
        bool is_shut = store->leaves[leaf_no].residency == SK_LEAF_SHUT;
        while (!is_shut && hand->state < store->state_count && freed < bytes_wanted) {
            sk_state *state = store->states[hand->state];
            sk_at at;
            if (state->tables[leaf_no].groups > 0) {
                sk_at_set(&at, store, state, leaf_no, epoch);
                freed += evict_table(&at, &hand->slot, bytes_wanted - freed);
            } else {
                hand->slot = 0;
            }
            if (hand->slot == 0) hand->state++;
        }
        sk_leaf_unlock(&store->leaves[leaf_no]);
        if (freed >= bytes_wanted) break;
        hand->state = 0;
        hand->slot = 0;
        hand->leaf = leaf_no + 1 == store->leaf_count ? 0 : leaf_no + 1;
    }
    pthread_mutex_unlock(&store->clock_lock);
    return status == SK_OK ? (int64_t)freed : -status;
}
