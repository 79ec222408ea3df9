/*
 * dirty.c: which leaves have changes that their home does not have. writeback.c writes them home.
 *
 * A store that writes back knows its dirty leaves without looking at the clean ones:
 *
 *   dirty         | leaf 0 .. 63 | leaf 64 .. 127 | ...       bit set: look at the leaf
 *   dirty_words   | word 0 .. 63 | word 64 .. 127 | ...       bit set: look at the word
 *
 * Invariant, while write-back is on: if a leaf has a dirty slot (one that is being written counts),
 * its bit is set, and so is its word's. A set bit may be stale.
 *  1. A leaf's bit changes only under the leaf's lock. It is set by the call that makes the first
 *     slot of a table dirty, or that brings a table with dirty slots, before the call unlocks the
 *     leaf. (Deletion, eviction, marking and moving away only remove dirty slots; then the bit is
 *     stale.) It is cleared by a write-back that finds no dirty slot in any table of the leaf.
 *  2. A word's bit is cleared only by sk_dirty_next, under rows_lock: it clears the bit, and then
 *     looks at the word once more. A call that sets a bit in the word looks at dirty_words after
 *     that. So one of the two sees what the other did, and the word's bit is set when both are
 *     done.
 * Turning write-back on sets the bits of all leaves that are dirty at that moment.
 */
#include "store.h"

void sk_leaf_set_dirty(sk_store *store, uint32_t leaf_no) {
    uint32_t word = leaf_no / 64;
    uint64_t bit = (uint64_t)1 << word % 64;
    atomic_fetch_or(&store->dirty[word], (uint64_t)1 << leaf_no % 64);
    if (!(atomic_load(&store->dirty_words[word / 64]) & bit))
        atomic_fetch_or(&store->dirty_words[word / 64], bit);
}

bool sk_leaf_is_dirty(const sk_store *store, uint32_t leaf_no) {
    for (uint32_t s = 0; s < store->state_count; s++)
        if (store->states[s]->tables[leaf_no].dirty > 0) return true;
    return false;
}

void sk_dirty_settle(sk_store *store, uint32_t leaf_no) {
    if (!sk_leaf_is_dirty(store, leaf_no))
        atomic_fetch_and(&store->dirty[leaf_no / 64], ~((uint64_t)1 << leaf_no % 64));
}

/* A word's bit was found set. Returns the word; if that is 0, the bit is cleared. Under
 * rows_lock. */
static uint64_t settle_word(sk_store *store, uint32_t word) {
    uint64_t bits = atomic_load(&store->dirty[word]), bit = (uint64_t)1 << word % 64;
    if (bits != 0) return bits;
    atomic_fetch_and(&store->dirty_words[word / 64], ~bit);
    if ((bits = atomic_load(&store->dirty[word])) != 0)
        atomic_fetch_or(&store->dirty_words[word / 64], bit);
    return bits;
}

uint32_t sk_dirty_next(sk_store *store, uint32_t leaf_no) {
    if (leaf_no >= store->leaf_count) return store->leaf_count;
    uint32_t word = leaf_no / 64, words = (store->leaf_count + 63) / 64;
    uint64_t bits = atomic_load(&store->dirty[word]) & ~(uint64_t)0 << leaf_no % 64;
    if (bits != 0) return word * 64 + (uint32_t)__builtin_ctzll(bits);
    for (word++; word < words; word = (word / 64 + 1) * 64) {
        uint64_t rest = atomic_load(&store->dirty_words[word / 64]) & ~(uint64_t)0 << word % 64;
        for (; rest != 0; rest &= rest - 1) {
            word = word / 64 * 64 + (uint32_t)__builtin_ctzll(rest);
            if ((bits = settle_word(store, word)) != 0)
                return word * 64 + (uint32_t)__builtin_ctzll(bits);
        }
    }
    return store->leaf_count;
}

int sk_write_back(sk_store *store, int on) {
    atomic_store(&store->writes_back, on != 0);
    bool is_empty = sk_bytes_used(store) == 0; /* no table has slots, dirty or not */
    for (uint32_t i = 0; i < store->leaf_count && on && !is_empty; i++) {
        sk_leaf_lock(&store->leaves[i]);
        if (sk_leaf_is_dirty(store, i)) sk_leaf_note_dirty(store, i);
        sk_leaf_unlock(&store->leaves[i]);
    }
    return SK_OK;
}
