/*
 * pick.c: single entries, by their keys, as one delta block. A process that takes leaves over asks
 * for such entries ahead of the leaves themselves. spread.c takes such blocks in.
 *
 *   1. want     the keys are routed and sorted by hash, repeated ones are dropped
 *   2. lock     their leaves, all at once, so that slots stay where they are
 *   3. find     each key; one that is missing goes in as a deletion, which is an answer too
 *   4. encode   (encode.c), as a block of one leaf, or of the whole hash space
 *
 * Only a whole leaf can say that a key is missing. So keys of other leaves are left out, or
 * refused.
 */
#include "column.h"
#include "store.h"

int sk_keys_route(const sk_state *state, const sk_column *column, int64_t n, sk_key **routed) {
    *routed = NULL;
    if (n < 0 || n > INT32_MAX)
        return sk_fail(SK_BAD_ARGUMENT, "a column of %lld keys", (long long)n);
    if (column->type == SK_COL_NONE || column->type == SK_COL_F64)
        return sk_fail(SK_BAD_KEY, "keys cannot come in a column of type %d", column->type);
    int status = sk_column_check(column, n, "keys");
    if (status != SK_OK) return status;
    sk_key *keys = sk_raw_alloc((size_t)n * sizeof *keys + 1);
    if (keys == NULL) return SK_NO_MEMORY;
    for (int64_t k = 0; k < n && status == SK_OK; k++) {
        bytes data = column_bytes(column, column->type, k);
        keys[k] = (sk_key){data.data, data.len, 0};
        status = sk_key_route(&state->key_type, data.data, data.len, &keys[k].hash);
    }
    if (status == SK_OK)
        *routed = keys;
    else
        sk_raw_free(keys);
    return status;
}

/* The keys of a column, sorted. leaf_no: all keys must be of that leaf; store->leaf_count: they may
 * be of any leaf. */
static int want(sk_store *store, const sk_state *state, uint32_t leaf_no, const sk_column *column,
                int64_t n, sk_wanted *wanted) {
    sk_key *keys;
    int status = sk_keys_route(state, column, n, &keys);
    if (status != SK_OK) return status;
    bool is_one_leaf = leaf_no < store->leaf_count;
    for (int64_t k = 0; k < n && is_one_leaf && status == SK_OK; k++) {
        uint32_t found = sk_leaf_of(keys[k].hash, store->leaf_bits);
        if (found != leaf_no)
            status = sk_fail(SK_BAD_ARGUMENT, "key %lld is of leaf %u, not of leaf %u",
                             (long long)k, found, leaf_no);
    }
    if (status == SK_OK)
        status = sk_wanted_make(keys, (size_t)n, is_one_leaf ? store->leaf_bits : 0, wanted);
    sk_raw_free(keys);
    return status;
}

/* Called with the leaves locked. The block is one of leaf `leaf_no` of 2^leaf_bits. */
static int pick(sk_store *store, sk_state *state, sk_wanted *wanted, uint32_t leaf_no,
                uint8_t leaf_bits, sk_buf *buf) {
    if (wanted->n == 0) return SK_OK;
    sk_table_env env;
    sk_timing timing;
    uint32_t first = sk_leaf_of(wanted->items[0].hash, store->leaf_bits); /* any will do */
    sk_env_set(&env, store, state, &store->leaves[first], 0);
    if (env.is_timed) {
        timing = sk_timing_of(store, state);
        env.timing = &timing;
    }
    sk_wanted_find(wanted, state->tables, &env);
    return sk_wanted_encode(wanted, &env, state->name, leaf_no, leaf_bits, buf);
}

int64_t sk_leaf_pick(sk_store *store, uint32_t leaf_no, uint32_t state_id, const sk_column *column,
                     int64_t n, sk_buf *buf) {
    if (leaf_no >= store->leaf_count) return -sk_leaf_range_check(store, leaf_no, leaf_no + 1);
    sk_state *state = sk_state_at(store, state_id);
    if (state == NULL) return -SK_BAD_ARGUMENT;
    sk_wanted wanted = {0};
    size_t start = buf->len;
    int status = want(store, state, leaf_no, column, n, &wanted);
    if (status != SK_OK) return -status;
    sk_leaf *leaf = &store->leaves[leaf_no];
    sk_leaf_lock(leaf);
    if (leaf->residency == SK_AWAY)
        status = sk_leaf_refuse(leaf, leaf_no);
    else if (sk_leaf_held(leaf) != SK_WHOLE)
        status = SK_UNKNOWN;
    else
        status = pick(store, state, &wanted, leaf_no, store->leaf_bits, buf);
    sk_leaf_unlock(leaf);
    sk_wanted_free(&wanted);
    return status == SK_OK ? (int64_t)(buf->len - start) : -status;
}

/* Drops keys of leaves that are not marked. */
static void keep_marked(const sk_store *store, const uint8_t *marks, sk_wanted *wanted) {
    size_t kept = 0;
    for (size_t i = 0; i < wanted->n; i++)
        if (marks[sk_leaf_of(wanted->items[i].hash, store->leaf_bits)])
            wanted->items[kept++] = wanted->items[i];
    wanted->n = kept;
}

/* The leaves of sorted keys, ascending. Returns how many. */
static uint32_t leaves_of(const sk_store *store, const sk_wanted *wanted, uint32_t *leaves) {
    uint32_t count = 0;
    for (size_t i = 0; i < wanted->n; i++) {
        uint32_t leaf_no = sk_leaf_of(wanted->items[i].hash, store->leaf_bits);
        if (count == 0 || leaves[count - 1] != leaf_no) leaves[count++] = leaf_no;
    }
    return count;
}

/* Drops keys of locked leaves that are not whole. */
static void keep_whole(const sk_store *store, sk_wanted *wanted) {
    size_t kept = 0;
    for (size_t i = 0; i < wanted->n; i++) {
        uint32_t leaf_no = sk_leaf_of(wanted->items[i].hash, store->leaf_bits);
        if (sk_leaf_held(&store->leaves[leaf_no]) == SK_WHOLE)
            wanted->items[kept++] = wanted->items[i];
    }
    wanted->n = kept;
}

int64_t sk_pick(sk_store *store, uint32_t state_id, const sk_column *column, int64_t n,
                const uint8_t *only, sk_buf *buf) {
    sk_state *state = sk_state_at(store, state_id);
    if (state == NULL) return -SK_BAD_ARGUMENT;
    sk_wanted wanted = {0};
    size_t start = buf->len;
    int status = want(store, state, store->leaf_count, column, n, &wanted);
    if (status != SK_OK) return -status;
    if (only != NULL) keep_marked(store, only, &wanted);
    size_t leaves_max = wanted.n < store->leaf_count ? wanted.n : store->leaf_count;
    uint32_t *leaves = sk_raw_alloc(leaves_max * sizeof *leaves + 1);
    status = SK_NO_MEMORY;
    if (leaves != NULL) {
        uint32_t epoch, count = leaves_of(store, &wanted, leaves);
        /* All at once, so that slots stay where they are until they are copied into the block. */
        status = sk_leaf_list_lock(store, leaves, count, SK_FOR_READING, &epoch);
        assert(status == SK_OK); /* it cannot fail without `writes` */
        keep_whole(store, &wanted);
        status = pick(store, state, &wanted, 0, 0, buf);
        sk_leaf_list_unlock(store, leaves, count);
    }
    sk_raw_free(leaves);
    sk_wanted_free(&wanted);
    return status == SK_OK ? (int64_t)(buf->len - start) : -status;
}
