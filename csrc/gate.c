/*
 * gate.c: leaves on their way to another process: gates, how much a leaf is used, and single
 * entries of it.
 *
 *              sk_leaf.residency   a call about a key   what is here
 *   open       sk_residency        does its work        residency tells
 *   shut       SK_LEAF_SHUT        SK_NOT_OWNED         kept tells; it is read out, and completed
 *   expected   SK_LEAF_EXPECTED    SK_UNKNOWN           nothing
 *
 * A gate moves under the leaf's lock, taken for writing. So when sk_leaf_gate returns, every call
 * that began before has ended or will find the gate as it is now; and a snapshot that was opened
 * before has the leaf as it was, one that is opened later sees what the gate makes of it.
 */
#include "column.h"
#include "store.h"

/* ---- Gates ---- */

int sk_leaf_refuse(const sk_leaf *leaf, uint32_t leaf_no) {
    assert(leaf->residency >= SK_AWAY);
    if (leaf->residency == SK_LEAF_EXPECTED) return SK_UNKNOWN;
    if (leaf->residency == SK_AWAY) return sk_fail(SK_NOT_OWNED, "leaf %u is away", leaf_no);
    return sk_fail(SK_NOT_OWNED,
                   "leaf %u is being handed over to another process: route the key to its new "
                   "owner",
                   leaf_no);
}

static int gate_of(const sk_leaf *leaf) {
    return leaf->residency == SK_LEAF_SHUT       ? SK_GATE_SHUT
           : leaf->residency == SK_LEAF_EXPECTED ? SK_GATE_EXPECTED
                                                 : SK_GATE_OPEN;
}

/* SK_OK if the gate of a locked leaf may be set so. */
static int check_gate(const sk_leaf *leaf, uint32_t leaf_no, int gate) {
    if (gate == SK_GATE_SHUT && leaf->residency == SK_AWAY) return sk_leaf_refuse(leaf, leaf_no);
    if (gate == SK_GATE_EXPECTED && leaf->residency != SK_AWAY && sk_leaf_held(leaf) != SK_ABSENT)
        return sk_fail(SK_BAD_ARGUMENT,
                       "leaf %u cannot be expected: it is here, or part of it; mark it absent "
                       "first",
                       leaf_no);
    return SK_OK;
}

static void set_gate(sk_leaf *leaf, int gate) {
    if (gate == gate_of(leaf)) return;
    if (gate == SK_GATE_SHUT) {
        leaf->kept = leaf->residency;
        leaf->residency = SK_LEAF_SHUT;
    } else if (gate == SK_GATE_EXPECTED) {
        leaf->residency = SK_LEAF_EXPECTED;
    } else if (leaf->residency == SK_LEAF_SHUT) {
        leaf->residency = leaf->kept; /* expected again, if it was and nothing has come */
    } else {
        leaf->residency = SK_ABSENT;
    }
}

int sk_leaf_gate(sk_store *store, uint32_t from, uint32_t to, int gate) {
    int status = sk_leaf_range_check(store, from, to);
    if (status != SK_OK) return status;
    if (gate < SK_GATE_OPEN || gate > SK_GATE_EXPECTED)
        return sk_fail(SK_BAD_ARGUMENT, "there is no gate %d", gate);
    uint32_t epoch;
    if ((status = sk_leaves_lock_write(store, from, to, &epoch)) != SK_OK) return status;
    for (uint32_t i = from; i < to && status == SK_OK; i++)
        status = check_gate(&store->leaves[i], i, gate);
    for (uint32_t i = from; i < to && status == SK_OK; i++) set_gate(&store->leaves[i], gate);
    sk_leaves_unlock(store, from, to);
    return status;
}

int sk_leaf_gate_of(sk_store *store, uint32_t leaf_no) {
    if (leaf_no >= store->leaf_count) return -sk_leaf_range_check(store, leaf_no, leaf_no + 1);
    sk_leaf_lock(&store->leaves[leaf_no]);
    int gate = gate_of(&store->leaves[leaf_no]);
    sk_leaf_unlock(&store->leaves[leaf_no]);
    return gate;
}

/* ---- Heat ---- */

int sk_leaf_heat(sk_store *store, uint64_t *out) {
    for (uint32_t i = 0; i < store->leaf_count; i++) {
        sk_leaf *leaf = &store->leaves[i];
        sk_leaf_lock(leaf);
        out[i] = leaf->past + store->records[i];
        for (uint32_t s = 0; s < store->state_count; s++)
            out[i] += store->states[s]->tables[i].operations;
        sk_leaf_unlock(leaf);
    }
    return SK_OK;
}

/* ---- Single entries ---- */

static int route_keys(sk_store *store, const sk_state *state, uint32_t leaf_no,
                      const sk_column *column, int64_t n, sk_key *keys) {
    for (int64_t k = 0; k < n; k++) {
        bytes data = column_bytes(column, column->type, k);
        keys[k] = (sk_key){data.data, data.len, 0};
        int status = sk_key_route(&state->key_type, data.data, data.len, &keys[k].hash);
        if (status != SK_OK) return status;
        uint32_t found = sk_leaf_of(keys[k].hash, store->leaf_bits);
        if (found != leaf_no)
            return sk_fail(SK_BAD_ARGUMENT, "key %lld is of leaf %u, not of leaf %u", (long long)k,
                           found, leaf_no);
    }
    return SK_OK;
}

/* With the leaf locked. */
static int pick(sk_store *store, sk_state *state, uint32_t leaf_no, const sk_key *keys, size_t n,
                sk_buf *buf) {
    const sk_leaf *leaf = &store->leaves[leaf_no];
    if (leaf->residency == SK_AWAY) return sk_leaf_refuse(leaf, leaf_no);
    if (sk_leaf_held(leaf) != SK_WHOLE) return SK_UNKNOWN;
    sk_table_env env;
    sk_timing timing;
    sk_env_set(&env, store, state, leaf, 0);
    if (env.is_timed) {
        timing = sk_timing_of(store, state);
        env.timing = &timing;
    }
    return sk_block_encode_keys(&state->tables[leaf_no], &env, state->name, leaf_no, keys, n, buf);
}

int64_t sk_leaf_pick(sk_store *store, uint32_t leaf_no, uint32_t state_id, const sk_column *column,
                     int64_t n, sk_buf *buf) {
    if (leaf_no >= store->leaf_count) return -sk_leaf_range_check(store, leaf_no, leaf_no + 1);
    sk_state *state = sk_state_at(store, state_id);
    if (state == NULL) return -SK_BAD_ARGUMENT;
    if (n < 0 || n > INT32_MAX)
        return -sk_fail(SK_BAD_ARGUMENT, "a column of %lld keys", (long long)n);
    if (column->type == SK_COL_NONE || column->type == SK_COL_F64)
        return -sk_fail(SK_BAD_KEY, "keys cannot come in a column of type %d", column->type);
    int status = sk_column_check(column, n, "keys");
    if (status != SK_OK) return -status;
    sk_key *keys = sk_raw_alloc((size_t)n * sizeof *keys + 1);
    if (keys == NULL) return -SK_NO_MEMORY;
    size_t start = buf->len;
    status = route_keys(store, state, leaf_no, column, n, keys);
    if (status == SK_OK) {
        sk_leaf_lock(&store->leaves[leaf_no]);
        status = pick(store, state, leaf_no, keys, (size_t)n, buf);
        sk_leaf_unlock(&store->leaves[leaf_no]);
    }
    sk_raw_free(keys);
    return status == SK_OK ? (int64_t)(buf->len - start) : -status;
}
