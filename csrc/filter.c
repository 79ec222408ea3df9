/*
 * filter.c: what the home does not have. A Bloom filter of the keys that a leaf's home has of one
 * state.
 *
 * Stream state meets new keys all the time, and for each of them the home would be asked in vain.
 * If that happens often enough for a leaf, it gets a filter: its owner reads the keys that the home
 * has and tells the store (sk_home_keys). From then on a key that is neither here nor in the filter
 * is missing, and the home is not asked.
 *
 * Invariant: while a leaf has a filter of a state, every key of that state which its home has is in
 * the filter. A filter may have more.
 *  1. Keys get home only through sk_rows_take, which first puts them into the filter. So a caller
 *     that builds a filter must make sure that no rows are taken between reading the home and
 *     sk_home_keys. It is the same caller that makes sk_rows_take calls take turns.
 *  2. Anything else that changes what is at home, or who owns the leaf (marking it absent or away,
 *     moving it, decoding blocks in its place), drops the leaf's filters.
 *  3. Keys whose rows are deleted at home stay in the filter; too many of them make it useless. It
 *     has room for GROWTH times as many further keys as it was built with. With more of them it is
 *     wrong more and more often: the owner then asks in vain, notices it, and tells the keys anew.
 *
 *     a filter   | blocks of 64 bytes ... |      a key sets PROBES bits in one block
 */
#include "store.h"

#define BLOCK_BITS 512
#define BLOCK_WORDS (BLOCK_BITS / 64)
#define PROBES 6
#define BITS_PER_KEY 12 /* with 6 probes in one block, 1 % of other keys seem to be in */
#define GROWTH 3        /* a window that moves on by its length adds as many keys as it has */
#define ROOM_MIN 256    /* keys that may be added to the smallest filter */
#define OVERFILL 8      /* dropped when this many times the room has been added */
#define SHARE 2         /* all filters take at most half of the budget */

struct sk_filter {
    uint32_t blocks;
    uint32_t room; /* keys that may still be added */
    uint64_t words[];
};

static size_t size_of(uint32_t blocks) {
    return sizeof(sk_filter) + (size_t)blocks * BLOCK_BITS / 8;
}

/* Needed because all hashes of a leaf begin with the same bits. The routing hash is public, so
 * crafted keys can make a filter useless; then the home is asked, and nothing else happens. */
static uint64_t mix(uint64_t hash) {
    hash ^= hash >> 32;
    hash *= 0x9e3779b97f4a7c15ULL;
    return hash ^ hash >> 29;
}

static uint64_t *block_of(const sk_filter *filter, uint64_t mixed) {
    uint64_t at = (mixed >> 32) * filter->blocks >> 32;
    return (uint64_t *)filter->words + at * BLOCK_WORDS;
}

static void add(sk_filter *filter, uint64_t hash) {
    uint64_t mixed = mix(hash), *block = block_of(filter, mixed);
    for (int i = 0; i < PROBES; i++, mixed = mixed * 0xd1342543de82ef95ULL + 1) {
        unsigned bit = (unsigned)(mixed >> 55);
        block[bit / 64] |= (uint64_t)1 << bit % 64;
    }
}

static bool may_have(const sk_filter *filter, uint64_t hash) {
    uint64_t mixed = mix(hash);
    const uint64_t *block = block_of(filter, mixed);
    for (int i = 0; i < PROBES; i++, mixed = mixed * 0xd1342543de82ef95ULL + 1) {
        unsigned bit = (unsigned)(mixed >> 55);
        if (!(block[bit / 64] >> bit % 64 & 1)) return false;
    }
    return true;
}

static sk_filter **place_of(const sk_state *state, uint32_t leaf_no) {
    sk_filter **filters = atomic_load(&((sk_state *)state)->filters);
    return filters == NULL ? NULL : &filters[leaf_no];
}

bool sk_home_may_have(const sk_state *state, uint32_t leaf_no, uint64_t hash) {
    sk_filter **place = place_of(state, leaf_no);
    return place == NULL || *place == NULL || may_have(*place, hash);
}

static void drop(sk_store *store, sk_filter **place) {
    if (place == NULL || *place == NULL) return;
    atomic_fetch_sub(&store->budget.used, size_of((*place)->blocks));
    atomic_fetch_sub(&store->filter_bytes, size_of((*place)->blocks));
    sk_raw_free(*place);
    *place = NULL;
}

void sk_filter_drop(sk_store *store, uint32_t leaf_no) {
    for (uint32_t s = 0; s < store->state_count; s++)
        drop(store, place_of(store->states[s], leaf_no));
}

bool sk_filter_add(sk_store *store, const sk_state *state, uint32_t leaf_no, const uint8_t *key,
                   size_t len) {
    sk_filter **place = place_of(state, leaf_no);
    if (place == NULL || *place == NULL) return false;
    uint64_t hash;
    if ((*place)->room == 0 || sk_key_route(&state->key_type, key, len, &hash) != SK_OK) {
        drop(store, place);
        return false;
    }
    (*place)->room--;
    add(*place, hash);
    return true;
}

void sk_filters_free(sk_store *store, sk_state *state) {
    sk_filter **filters = atomic_load(&state->filters);
    for (uint32_t i = 0; filters != NULL && i < store->leaf_count; i++) drop(store, &filters[i]);
    sk_raw_free(filters);
}

/* The array of a state's filters; it is made with the first filter. */
static sk_filter **filters_of(sk_store *store, sk_state *state) {
    sk_filter **filters = atomic_load(&state->filters), **none = NULL;
    if (filters != NULL) return filters;
    filters = sk_raw_zalloc((size_t)store->leaf_count * sizeof *filters);
    if (filters == NULL) return NULL;
    if (!atomic_compare_exchange_strong(&state->filters, &none, filters)) {
        sk_raw_free(filters);
        return none;
    }
    return filters;
}

int sk_home_keys(sk_store *store, uint32_t state_id, uint32_t leaf_no, const uint8_t *keys,
                 const int64_t *offsets, uint32_t n) {
    if (leaf_no >= store->leaf_count) return sk_leaf_range_check(store, leaf_no, leaf_no + 1);
    sk_state *state = sk_state_at(store, state_id);
    if (state == NULL) return SK_BAD_ARGUMENT;
    uint64_t room = n > ROOM_MIN / GROWTH ? (uint64_t)n * GROWTH : ROOM_MIN;
    uint64_t blocks = ((n + room) * BITS_PER_KEY + BLOCK_BITS - 1) / BLOCK_BITS;
    if (blocks > UINT32_MAX || room > UINT32_MAX) return SK_OK; /* then there is no filter */
    uint64_t max = atomic_load(&store->budget.max);
    uint64_t bytes = atomic_load(&store->filter_bytes) + size_of((uint32_t)blocks);
    if (max != 0 && bytes > max / SHARE) return SK_OK; /* nothing evicts a filter */
    sk_filter **filters = filters_of(store, state);
    sk_filter *filter = sk_raw_zalloc(size_of((uint32_t)blocks));
    if (filters == NULL || filter == NULL) {
        sk_raw_free(filter);
        return SK_NO_MEMORY;
    }
    filter->blocks = (uint32_t)blocks;
    filter->room = (uint32_t)(room < UINT32_MAX / OVERFILL ? room * OVERFILL : UINT32_MAX);
    int status = SK_OK;
    for (uint32_t i = 0; i < n && status == SK_OK; i++) {
        uint64_t hash;
        size_t len = (size_t)(offsets[i + 1] - offsets[i]);
        status = sk_key_route(&state->key_type, keys + offsets[i], len, &hash);
        if (status == SK_OK) add(filter, hash);
    }
    if (status != SK_OK) {
        sk_raw_free(filter);
        return status;
    }
    sk_leaf_lock(&store->leaves[leaf_no]);
    drop(store, &filters[leaf_no]);
    filters[leaf_no] = filter;
    atomic_fetch_add(&store->budget.used, size_of(filter->blocks));
    atomic_fetch_add(&store->filter_bytes, size_of(filter->blocks));
    sk_leaf_unlock(&store->leaves[leaf_no]);
    return SK_OK;
}
