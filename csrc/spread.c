/*
 * spread.c: entries of many leaves, from blocks of the whole hash space (sk_pick makes them).
 *
 *   hashes of a block   | 00.. 00.. | 01.. | 10.. 10.. 10.. | 11.. |     leaves are prefixes of the
 *   leaves                leaf 0      1      2                3          hash, so each is a part of
 *                                                                        every column
 *
 *   1. check    every block, to the last entry, before anything changes
 *   2. declare  their states
 *   3. fill     leaf after leaf, from that part of each block that belongs to the leaf
 *
 * Rejected: making a block for each leaf (sk_block_rewrite), and sk_leaf_decode. For each slice,
 * sk_block_rewrite checks all hashes of the block, so the cost is quadratic in the number of
 * leaves.
 */
#include "block_private.h"
#include "store.h"

/* One block, and how far it was read. */
typedef struct source {
    const uint8_t *block;
    sk_block_info info;
    uint32_t state_id;
    uint64_t at; /* first entry that was not handed to a leaf yet */
} source;

typedef struct source_list {
    source *items;
    size_t count;
    sk_part *parts; /* room for `count`: those of the current leaf */
} source_list;

/* ---- Checking ---- */

static int count_blocks(const uint8_t *blocks, size_t len, size_t *count) {
    sk_block_info info;
    *count = 0;
    for (size_t at = 0; at < len; at += info.size, ++*count) {
        int status = sk_block_read(blocks + at, len - at, &info);
        if (status != SK_OK) return status;
        if (info.leaf_bits != 0 || !info.is_delta || info.entries == 0)
            return sk_fail(SK_CORRUPT,
                           "a %s block of leaf %u of 2^%u with %llu entries where single entries "
                           "of any leaf were expected",
                           info.is_delta ? "delta" : "full", info.leaf, info.leaf_bits,
                           (unsigned long long)info.entries);
    }
    return SK_OK;
}

static bool is_same_type(const sk_block_info *a, const sk_block_info *b) {
    return a->kind == b->kind && a->is_timed == b->is_timed &&
           strcmp(a->key_type, b->key_type) == 0;
}

/* SK_SCHEMA if the block does not fit the state of its name, or another block that will declare a
 * state of that name. first: the blocks that will declare a state, *count of them. */
static int check_type(sk_store *store, const sk_block_info *info, const sk_block_info **first,
                      size_t *count) {
    uint32_t id;
    if (sk_state_find(store, info->name) != NULL)
        return sk_state_add(store, info->name, info->kind, info->key_type,
                            info->is_timed ? SK_TIMED : 0, &id);
    for (size_t k = 0; k < *count; k++) {
        if (strcmp(first[k]->name, info->name) != 0) continue;
        if (is_same_type(first[k], info)) return SK_OK;
        return sk_fail(SK_SCHEMA, "two blocks of state '%.80s' are of different types", info->name);
    }
    if (*count == SK_STATES_MAX)
        return sk_fail(SK_BAD_ARGUMENT, "blocks of more than %d states", SK_STATES_MAX);
    first[(*count)++] = info;
    return SK_OK;
}

static int check_all(sk_store *store, const uint8_t *blocks, size_t len, source_list *list) {
    const sk_block_info *first[SK_STATES_MAX];
    size_t first_count = 0;
    size_t at = 0;
    for (size_t k = 0; k < list->count; k++, at += list->items[k - 1].info.size) {
        source *s = &list->items[k];
        *s = (source){.block = blocks + at};
        int status = sk_block_read(s->block, len - at, &s->info);
        if (status == SK_OK) status = sk_block_check(s->block, s->info.size);
        if (status == SK_OK) status = check_type(store, &s->info, first, &first_count);
        if (status != SK_OK) return status;
    }
    return SK_OK;
}

static int declare_states(sk_store *store, source_list *list) {
    int status = SK_OK;
    for (size_t k = 0; k < list->count && status == SK_OK; k++) {
        const sk_block_info *info = &list->items[k].info;
        status = sk_state_add(store, info->name, info->kind, info->key_type,
                              info->is_timed ? SK_TIMED : 0, &list->items[k].state_id);
    }
    return status;
}

/* ---- Filling ---- */

static inline uint32_t leaf_at(const sk_store *store, const source *s, uint64_t i) {
    return sk_leaf_of(sk_load64(s->block + s->info.hashes + 8 * i), store->leaf_bits);
}

/* Finds the next leaf that some block has entries of, and its parts in all blocks. Returns the
 * number of parts; 0: no leaf is left. */
static size_t next_leaf(const sk_store *store, source_list *list, uint32_t *leaf_no) {
    size_t count = 0;
    *leaf_no = UINT32_MAX;
    for (size_t k = 0; k < list->count; k++) {
        const source *s = &list->items[k];
        if (s->at == s->info.entries) continue;
        uint32_t found = leaf_at(store, s, s->at);
        if (found < *leaf_no) *leaf_no = found;
    }
    for (size_t k = 0; k < list->count; k++) {
        source *s = &list->items[k];
        uint64_t from = s->at;
        while (s->at < s->info.entries && leaf_at(store, s, s->at) == *leaf_no) s->at++;
        if (s->at > from)
            list->parts[count++] = (sk_part){s->block, &s->info, s->state_id, from, s->at};
    }
    return count;
}

static int fill_leaf(sk_store *store, uint32_t leaf_no, const sk_part *parts, size_t count,
                     uint8_t *touched) {
    uint32_t epoch;
    int status = sk_leaf_lock_write(store, leaf_no, &epoch);
    if (status != SK_OK) return status;
    sk_leaf *leaf = &store->leaves[leaf_no];
    /* A whole leaf ignores such entries, as in sk_leaf_decode. */
    if (leaf->residency == SK_PARTIAL || leaf->residency == SK_ABSENT ||
        leaf->residency == SK_LEAF_EXPECTED) {
        status = sk_leaf_fill_locked(store, leaf_no, parts, count, epoch);
        if (status == SK_OK) touched[leaf_no] = 1;
    }
    sk_leaf_unlock(leaf);
    return status;
}

int64_t sk_spread(sk_store *store, const uint8_t *blocks, size_t len, uint8_t *touched) {
    source_list list = {0};
    int status = count_blocks(blocks, len, &list.count);
    if (status != SK_OK || list.count == 0) return -status;
    list.items = sk_raw_alloc(list.count * sizeof *list.items);
    list.parts = sk_raw_alloc(list.count * sizeof *list.parts);
    status = list.items == NULL || list.parts == NULL ? SK_NO_MEMORY : SK_OK;
    if (status == SK_OK) status = check_all(store, blocks, len, &list);
    if (status == SK_OK) status = declare_states(store, &list);
    uint32_t leaf_no;
    size_t count;
    while (status == SK_OK && (count = next_leaf(store, &list, &leaf_no)) > 0)
        if (touched[leaf_no] == 0) status = fill_leaf(store, leaf_no, list.parts, count, touched);
    int64_t entries = 0;
    for (size_t k = 0; k < list.count && status == SK_OK; k++)
        entries += (int64_t)list.items[k].info.entries;
    sk_raw_free(list.items);
    sk_raw_free(list.parts);
    return status == SK_OK ? entries : -status;
}
