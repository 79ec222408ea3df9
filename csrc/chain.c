/*
 * chain.c: single entries of leaves that are in a checkpoint, without the rest of these leaves.
 *
 * A leaf in a checkpoint is a chain of segments, here the newest first. A segment is the frames
 * that a pack has of the leaf (frames.c). A segment has at most one block of a state, and a delta
 * has only what is newer than in the older segments.
 *
 *   segment 3   | delta of "n" |                              key k of "n" is found in 3, or else
 *   segment 2   | "m" | "n"    |   full: "n" ends here        in 2, which is full. If it is in
 *   segment 1   | "m" | "n"    |   not looked at              neither, it is missing
 *
 *   1. want     the keys are routed and sorted by hash, repeated ones are dropped (pick.c)
 *   2. verify   leaf by leaf, the checksums of those segments that are needed
 *   3. find     each key by binary search, from the newest block of the state to a full one
 *   4. fill     the answers in under what the leaf has (decode.c): entries, and tombstones for keys
 *               that have none
 *
 * What is wrong with a leaf is not reported here. The leaf stays as it was and is SK_UNFIT: the
 * code that then loads it as a whole looks at all of it again, and knows the names of the files. A
 * leaf that needs more than this file can do is SK_UNFIT, too: with compressed frames, or a state
 * that had another type. A leaf most of whose entries are wanted is SK_TO_LOAD: finding one entry
 * and putting it in costs, by estimate, about as much as decoding WORTH entries of a whole leaf.
 *
 * Checksums are verified each time that bytes are read, before they are trusted. So nothing is
 * remembered about a segment, and damage that comes later is seen as soon as it is read. Rejected
 * without being built or measured: mapping packs and verifying them once. At most that would save
 * the reading, 11 to 14 ms of about 75 (10 k of 1 M entries of 64 bytes), and the share of
 * verifying in the 20 ms that are spent in here. And if somebody truncated the file, it would kill
 * the process.
 */
#include "block_private.h"
#include "store.h"

#define WORTH 4      /* entries decoded in the time that one takes here: estimated, not measured */
#define STEPS_MAX 32 /* blocks of a state in a chain; a longer one is loaded as a whole */

/* A block of the state, and how far it was searched. */
typedef struct step {
    const uint8_t *block;
    sk_block_info info;
    uint64_t at; /* entries before this one are less than all keys still to be found */
} step;

/* The blocks of one state in one leaf, newest first. */
typedef struct step_list {
    step items[STEPS_MAX];
    size_t count;
    uint64_t entries; /* of all states, in the segments looked at */
    bool is_full;     /* the last block is full: older segments say nothing about the state */
} step_list;

static bool is_of(const sk_block_info *info, const sk_state *state) {
    return info->kind == state->kind && info->is_timed == ((state->flags & SK_TIMED) != 0) &&
           strcmp(info->key_type, state->key_type.text) == 0;
}

/* Adds the state's block in a segment, if there is one. False: this leaf cannot be picked from. */
static bool add_step(const sk_store *store, const sk_state *state, const sk_segment *segment,
                     step_list *list) {
    uint64_t bad;
    size_t before = list->count;
    if (sk_frames_verify(segment->frames, segment->len, segment->pack, segment->offset, &bad) !=
        SK_OK)
        return false;
    for (size_t at = 0; at < segment->len;) {
        const uint8_t *block = segment->frames + at;
        sk_block_info info;
        if (sk_block_read(block, segment->len - at, &info) != SK_OK) return false;
        if (info.leaf != segment->leaf || info.leaf_bits != store->leaf_bits) return false;
        at += info.size;
        list->entries += info.entries;
        if (strcmp(info.name, state->name) != 0) continue;
        if (list->count > before || list->count == STEPS_MAX || !is_of(&info, state)) return false;
        list->items[list->count++] = (step){block, info, 0};
        list->is_full = !info.is_delta;
    }
    return true;
}

/* Looks up a key in a block. SK_MISSING: the block says nothing about it. Keys come in ascending
 * order. */
static int find_in(step *s, uint64_t hash, const uint8_t *key, size_t len, uint64_t *found) {
    uint64_t low = s->at, high = s->info.entries;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        uint64_t middle_hash = sk_load64(s->block + s->info.hashes + 8 * middle);
        int order = middle_hash < hash ? -1 : middle_hash > hash;
        if (order == 0) {
            entry e;
            int status = entry_at(s->block, &s->info, middle, &e);
            if (status != SK_OK) return status;
            order = sk_key_compare(e.key, e.key_len, key, len);
        }
        if (order == 0) {
            s->at = *found = middle;
            return SK_OK;
        }
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    s->at = low;
    return SK_MISSING;
}

/* Finds what a chain has for each key. */
static int find_all(step_list *list, const sk_picked *items, size_t n, sk_found *found) {
    for (size_t i = 0; i < n; i++) {
        size_t len;
        const uint8_t *key = sk_slot_key(items[i].slot, &len);
        found[i] = (sk_found){.hash = items[i].hash, .key = key, .key_len = len};
        for (size_t k = 0; k < list->count; k++) {
            step *s = &list->items[k];
            int status = find_in(s, items[i].hash, key, len, &found[i].at);
            if (status == SK_MISSING) continue;
            if (status != SK_OK) return status;
            found[i].block = s->block;
            found[i].info = &s->info;
            break;
        }
    }
    return SK_OK;
}

static int fill(sk_store *store, uint32_t leaf_no, uint32_t state_id, const sk_found *found,
                size_t n, uint8_t *outcome) {
    uint32_t epoch;
    int status = sk_leaf_lock_write(store, leaf_no, &epoch);
    if (status != SK_OK) return status;
    sk_leaf *leaf = &store->leaves[leaf_no];
    if (leaf->residency == SK_PARTIAL || leaf->residency == SK_ABSENT) {
        status = sk_leaf_fill_found_locked(store, leaf_no, state_id, found, n, epoch);
        if (status == SK_OK) *outcome = SK_PICKED;
        if (status == SK_CORRUPT) {
            *outcome = SK_UNFIT;
            status = SK_OK;
        }
    }
    sk_leaf_unlock(leaf);
    return status;
}

/* items: the n keys of the leaf. segments: all of its chain. */
static int pick_leaf(sk_store *store, uint32_t state_id, const sk_picked *items, size_t n,
                     const sk_segment *segments, size_t count, step_list *list, sk_found *found,
                     uint8_t *outcome) {
    uint32_t leaf_no = segments[0].leaf;
    list->count = list->entries = 0;
    list->is_full = false;
    bool is_good = true;
    for (size_t k = 0; k < count && is_good && !list->is_full; k++)
        is_good = add_step(store, store->states[state_id], &segments[k], list);
    *outcome = SK_UNFIT;
    if (!is_good) return SK_OK;
    *outcome = SK_TO_LOAD;
    if (n * WORTH >= list->entries) return SK_OK;
    *outcome = find_all(list, items, n, found) == SK_OK ? 0 : SK_UNFIT;
    if (*outcome != 0) return SK_OK;
    return fill(store, leaf_no, state_id, found, n, outcome);
}

/* How many items from `from` on are of the same leaf. */
static size_t run_of(const sk_store *store, const sk_wanted *wanted, size_t from,
                     uint32_t leaf_no) {
    size_t to = from;
    while (to < wanted->n && sk_leaf_of(wanted->items[to].hash, store->leaf_bits) == leaf_no) to++;
    return to - from;
}

static int check_segments(const sk_store *store, const sk_segment *segments, size_t count) {
    for (size_t k = 0; k < count; k++)
        if (segments[k].leaf >= store->leaf_count ||
            (k > 0 && segments[k].leaf < segments[k - 1].leaf))
            return sk_fail(SK_BAD_ARGUMENT, "segment %zu is of leaf %u, which is out of order", k,
                           segments[k].leaf);
    return SK_OK;
}

static bool has_leaf(const sk_segment *segments, size_t count, uint32_t leaf_no) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (segments[middle].leaf < leaf_no)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && segments[low].leaf == leaf_no;
}

/* The keys of a column whose leaves have segments, sorted. There may be a million leaves, and a
 * segment of only one of them, so nothing here goes through all leaves. */
static int want(const sk_store *store, const sk_state *state, const sk_column *column, int64_t n,
                const sk_segment *segments, size_t count, sk_wanted *wanted) {
    sk_key *keys;
    int status = sk_keys_route(state, column, n, &keys);
    if (status != SK_OK) return status;
    size_t kept = 0;
    for (int64_t k = 0; k < n; k++)
        if (has_leaf(segments, count, sk_leaf_of(keys[k].hash, store->leaf_bits)))
            keys[kept++] = keys[k];
    status = sk_wanted_make(keys, kept, 0, wanted);
    sk_raw_free(keys);
    return status;
}

static int pick_leaves(sk_store *store, uint32_t state_id, const sk_wanted *wanted,
                       const sk_segment *segments, size_t count, uint8_t *outcomes) {
    step_list *list = sk_raw_alloc(sizeof *list);
    sk_found *found = sk_raw_alloc(wanted->n * sizeof *found + 1);
    int status = list == NULL || found == NULL ? SK_NO_MEMORY : SK_OK;
    size_t from = 0; /* in the wanted keys, which are sorted; their leaves all have segments */
    for (size_t k = 0, chain; status == SK_OK && k < count; k += chain) {
        uint32_t leaf_no = segments[k].leaf;
        for (chain = 1; k + chain < count && segments[k + chain].leaf == leaf_no;) chain++;
        size_t n = run_of(store, wanted, from, leaf_no);
        if (n > 0)
            status = pick_leaf(store, state_id, wanted->items + from, n, segments + k, chain, list,
                               found, &outcomes[k]);
        from += n;
    }
    sk_raw_free(found);
    sk_raw_free(list);
    return status;
}

int sk_chains_pick(sk_store *store, uint32_t state_id, const sk_column *column, int64_t n,
                   const sk_segment *segments, size_t count, uint8_t *outcomes) {
    sk_state *state = sk_state_at(store, state_id);
    if (state == NULL) return SK_BAD_ARGUMENT;
    sk_wanted wanted = {0};
    int status = check_segments(store, segments, count);
    if (status == SK_OK) status = want(store, state, column, n, segments, count, &wanted);
    if (status != SK_OK) return status;
    status = pick_leaves(store, state_id, &wanted, segments, count, outcomes);
    sk_wanted_free(&wanted);
    return status;
}
