/*
 * fuzz_ops.c: the input drives a sequence of public calls on a small store. An i64 and a bytes
 * state are compared with arrays at every step. Containers, a timed state and timers are there to
 * find crashes and leaks.
 *
 * Input: one byte names the call, the next bytes are its arguments; missing bytes count as 0.
 */
#include "statekit.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) abort();                                                                 \
    } while (0)

#define LEAVES 4
#define KEYS 32
#define STEPS_MAX 400
#define VALUE_MAX 40

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

enum { N, B, L, M, T, X, W, STATES }; /* X: timed, W: timers */

/* What the store must answer for each key of N and B. For leaves that are away, it is what the home
 * has. */
typedef struct entry {
    bool is_there;
    size_t len; /* N: 8 */
    uint8_t data[VALUE_MAX];
} entry;

typedef struct world {
    const uint8_t *at, *end;
    sk_store *store;
    entry model[2][KEYS];
    uint8_t key[KEYS][24];
    size_t key_len[KEYS];
    uint32_t leaf[KEYS];
    sk_buf buf;
    sk_buf blocks; /* of blocks_leaf, with the model at that time */
    uint32_t blocks_leaf;
    entry blocks_model[2][KEYS];
    bool has_blocks;
    sk_leaves *leaves; /* detached, [from, to) */
    uint32_t from, to;
    bool is_shut[LEAVES];
    sk_snapshot *snapshot;
    entry snapshot_model[2][KEYS];
    sk_store *copy; /* what was read from the snapshot */
} world;

static uint8_t next(world *w) { return w->at < w->end ? *w->at++ : 0; }

static bool is_detached(const world *w, uint32_t leaf) {
    return w->leaves != NULL && leaf >= w->from && leaf < w->to;
}

/* Calls about its keys are refused. */
static bool is_away(const world *w, uint32_t leaf) {
    return is_detached(w, leaf) || w->is_shut[leaf];
}

static bool is_one_away(const world *w) {
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++)
        if (is_away(w, leaf)) return true;
    return false;
}

static sk_store *open_store(void) {
    static const char *const names[] = {"n", "b", "l", "m", "t", "x", "w"};
    static const int kinds[] = {SK_I64, SK_BYTES, SK_LIST, SK_MAP, SK_NESTED, SK_I64, SK_TIMERS};
    sk_store *store = NULL;
    EXPECT(sk_open(2, 2, 0, &store) == SK_OK);
    for (uint32_t s = 0; s < STATES; s++) {
        uint32_t id;
        int flags = s == X ? SK_TIMED : 0;
        EXPECT(sk_state_add(store, names[s], kinds[s], "b", flags, &id) == SK_OK && id == s);
    }
    return store;
}

static void check_key(world *w, sk_store *store, entry model[2][KEYS], uint32_t s, uint32_t k) {
    const entry *e = &model[s][k];
    int64_t found = sk_get(store, s, w->key[k], w->key_len[k], &w->buf);
    EXPECT(found == (e->is_there ? (int64_t)e->len : -SK_MISSING));
    EXPECT(!e->is_there || e->len == 0 || memcmp(w->buf.data, e->data, e->len) == 0);
}

static void check_all(world *w) {
    for (uint32_t s = 0; s < 2; s++)
        for (uint32_t k = 0; k < KEYS; k++)
            if (!is_away(w, w->leaf[k])) check_key(w, w->store, w->model, s, k);
    sk_stats stats;
    EXPECT(sk_stats_read(w->store, SK_ALL_STATES, 0, LEAVES, &stats) == SK_OK);
    EXPECT(stats.bytes == sk_bytes_used(w->store));
}

static void set(entry *e, const void *data, size_t len) {
    e->is_there = true;
    e->len = len;
    if (len > 0) memcpy(e->data, data, len);
}

static void op_number(world *w, uint32_t k) {
    int64_t by = (int8_t)next(w), value = 0;
    if (next(w) % 2) by = (int64_t)((uint64_t)by * 0x123456789abcdefULL); /* near the ends */
    entry *e = &w->model[N][k];
    int64_t now = 5, sum;
    if (e->is_there) memcpy(&now, e->data, 8);
    bool overflows = __builtin_add_overflow(now, by, &sum);
    int status = sk_i64_fold(w->store, N, w->key[k], w->key_len[k], SK_ADD, by, 5, &value);
    EXPECT(status == (overflows ? SK_OVERFLOW : SK_OK));
    if (status == SK_OK) set(e, &sum, 8);
    EXPECT(status != SK_OK || value == sum);
}

static void op_bytes(world *w, uint32_t k) {
    uint8_t value[VALUE_MAX];
    size_t len = next(w) % VALUE_MAX;
    memset(value, next(w), len);
    EXPECT(sk_put(w->store, B, w->key[k], w->key_len[k], value, len) == SK_OK);
    set(&w->model[B][k], value, len);
}

static void op_delete(world *w, uint32_t k) {
    uint32_t s = next(w) % STATES;
    int status = sk_delete(w->store, s, w->key[k], w->key_len[k], next(w) % 2);
    if (s < 2) EXPECT(status == (w->model[s][k].is_there ? SK_OK : SK_MISSING));
    if (s < 2) w->model[s][k].is_there = false;
}

/* Up to 9 records of N: add, put, get or delete. */
static void op_batch(world *w, uint32_t k) {
    uint8_t keys[9 * 24], status[9];
    int32_t at[10] = {0};
    int64_t values[9], out[9], n = 1 + next(w) % 9;
    int op = (int[]){SK_B_ADD, SK_B_PUT, SK_B_GET, SK_B_DELETE}[next(w) % 4];
    uint32_t step = next(w) % 4;
    for (int64_t r = 0; r < n; r++) {
        uint32_t j = (k + (uint32_t)r * step) % KEYS;
        memcpy(keys + at[r], w->key[j], w->key_len[j]);
        at[r + 1] = at[r] + (int32_t)w->key_len[j];
        values[r] = next(w);
    }
    sk_batch_args args = {
        .n = n, .keys = {SK_COL_VAR32, 0, keys, at, sizeof keys}, .out = out, .status = status};
    if (op == SK_B_ADD || op == SK_B_PUT)
        args.values = (sk_column){SK_COL_I64, 0, values, NULL, sizeof values};
    int result = sk_batch(w->store, N, op, &args);
    EXPECT(result == SK_OK || result == SK_OVERFLOW || result == SK_NOT_OWNED);
    EXPECT(result != SK_NOT_OWNED || is_one_away(w));
    for (int64_t r = 0; r < n; r++) {
        uint32_t j = (k + (uint32_t)r * step) % KEYS;
        entry *e = &w->model[N][j];
        if (status[r] == SK_END) {
            EXPECT(result != SK_OK);
            continue;
        }
        EXPECT(!is_away(w, w->leaf[j]));
        int64_t now = 0;
        if (e->is_there) memcpy(&now, e->data, 8);
        if (op == SK_B_GET || op == SK_B_DELETE)
            EXPECT(status[r] == (e->is_there ? SK_OK : SK_MISSING));
        if (op == SK_B_GET && e->is_there) EXPECT(out[r] == now);
        if (op == SK_B_DELETE) e->is_there = false;
        if (op == SK_B_PUT) now = values[r];
        if (op == SK_B_ADD) now += values[r];
        if (op == SK_B_ADD) EXPECT(out[r] == now);
        if (op == SK_B_ADD || op == SK_B_PUT) set(e, &now, 8);
    }
}

/* Containers: path and argument come from the input as they are. */
static void op_container(world *w, uint32_t k) {
    uint32_t s = L + next(w) % 3;
    int op = next(w) % 12 - 1;
    static const char *const shapes[] = {NULL, "l", "m", "ml", "lm", "mmm"};
    const char *shape = shapes[next(w) % 6];
    int64_t i = (int8_t)next(w), j = (int8_t)next(w);
    size_t left = (size_t)(w->end - w->at);
    size_t path_len = next(w) % 8, arg_len = next(w) % 64;
    left = (size_t)(w->end - w->at);
    if (path_len > left) path_len = left;
    const uint8_t *path = w->at, *arg = path + path_len;
    left -= path_len;
    if (arg_len > left) arg_len = left;
    w->at = arg + arg_len;
    uint64_t cursor = 0, version = 0;
    switch (next(w) % 4) {
    case 0:
        sk_put(w->store, s, w->key[k], w->key_len[k], arg, arg_len);
        break;
    case 1:
        sk_read(w->store, s, w->key[k], w->key_len[k], op, path, path_len, arg, arg_len, i, j,
                &w->buf);
        break;
    case 2:
        for (int page = 0; page < 5; page++)
            if (sk_page(w->store, s, w->key[k], w->key_len[k], path, path_len, &cursor, &version,
                        1 + next(w) % 4, &w->buf) < 0)
                break;
        break;
    default:
        sk_write(w->store, s, w->key[k], w->key_len[k], op, path, path_len, shape, arg, arg_len, i,
                 j, &w->buf);
    }
}

static void copy_leaf(const world *w, entry to[2][KEYS], entry from[2][KEYS], uint32_t leaf) {
    for (uint32_t s = 0; s < 2; s++)
        for (uint32_t k = 0; k < KEYS; k++)
            if (w->leaf[k] == leaf) to[s][k] = from[s][k];
}

static void op_encode(world *w, uint32_t leaf) {
    if (is_detached(w, leaf) || sk_leaf_residency(w->store, leaf) != SK_WHOLE) return;
    w->blocks.len = 0;
    EXPECT(sk_leaf_encode(w->store, leaf, SK_ALL_STATES, 0, &w->blocks) >= 0);
    for (size_t at = 0; at < w->blocks.len;) {
        sk_block_info info;
        EXPECT(sk_block_read(w->blocks.data + at, w->blocks.len - at, &info) == SK_OK);
        EXPECT(sk_block_check(w->blocks.data + at, w->blocks.len - at) == SK_OK);
        at += info.size;
    }
    w->blocks_leaf = leaf;
    w->has_blocks = true;
    memcpy(w->blocks_model, w->model, sizeof w->model);
}

static void op_decode(world *w) {
    if (!w->has_blocks || is_away(w, w->blocks_leaf)) return;
    EXPECT(sk_leaf_decode(w->store, w->blocks_leaf, w->blocks.data, w->blocks.len, SK_REPLACE) ==
           SK_OK);
    copy_leaf(w, w->model, w->blocks_model, w->blocks_leaf);
}

static void op_move(world *w) {
    if (w->leaves != NULL) {
        EXPECT(sk_attach(w->store, w->leaves) == SK_OK);
        w->leaves = NULL;
        return;
    }
    w->from = next(w) % LEAVES;
    w->to = w->from + next(w) % (LEAVES + 1 - w->from);
    int expected = SK_OK;
    for (uint32_t leaf = w->from; leaf < w->to; leaf++)
        if (w->is_shut[leaf]) expected = SK_NOT_OWNED;
    EXPECT(sk_detach(w->store, w->from, w->to, &w->leaves) == expected);
}

static void set_gate(world *w, uint32_t leaf, bool is_shut) {
    int gate = is_shut ? SK_GATE_SHUT : SK_GATE_OPEN;
    bool is_refused = is_shut && is_detached(w, leaf);
    EXPECT(sk_leaf_gate(w->store, leaf, leaf + 1, gate) == (is_refused ? SK_NOT_OWNED : SK_OK));
    if (!is_refused) w->is_shut[leaf] = is_shut;
    EXPECT(sk_leaf_gate_of(w->store, leaf) == (w->is_shut[leaf] ? SK_GATE_SHUT : SK_GATE_OPEN));
}

/* One key of N and B, taken out as a block and found in it. */
static void op_pick(world *w, uint32_t k) {
    int64_t at[2] = {0, (int64_t)w->key_len[k]};
    sk_column keys = {SK_COL_VAR64, 0, w->key[k], at, at[1]};
    if (is_detached(w, w->leaf[k])) return;
    for (uint32_t s = 0; s < 2; s++) {
        const entry *e = &w->model[s][k];
        sk_buf block = {0};
        EXPECT(sk_leaf_pick(w->store, w->leaf[k], s, &keys, 1, &block) == (int64_t)block.len);
        EXPECT(sk_block_check(block.data, block.len) == SK_OK);
        int found = sk_block_find(block.data, block.len, w->key[k], w->key_len[k], &w->buf);
        EXPECT(found == (e->is_there ? SK_OK : SK_MISSING));
        EXPECT(e->is_there ? w->buf.len == e->len : w->buf.len == 1);
        EXPECT(!e->is_there || e->len == 0 || memcmp(w->buf.data, e->data, e->len) == 0);
        sk_buf_free(&block);
    }
}

static void op_clear(world *w, uint32_t leaf) {
    uint32_t s = next(w) % STATES;
    if (is_away(w, leaf)) return;
    EXPECT(sk_clear(w->store, s, leaf, leaf + 1, 0) == SK_OK);
    for (uint32_t k = 0; k < KEYS && s < 2; k++)
        if (w->leaf[k] == leaf) w->model[s][k].is_there = false;
}

static void end_snapshot(world *w) {
    sk_snapshot_close(w->snapshot);
    if (w->copy != NULL) sk_close(w->copy);
    w->snapshot = NULL;
    w->copy = NULL;
}

/* Opens a snapshot, or reads one more leaf of it, or compares it when it is read to its end. */
static void op_snapshot(world *w) {
    uint32_t leaf = LEAVES;
    if (w->snapshot == NULL) {
        if (is_one_away(w)) return; /* leaves that are away are not in it */
        EXPECT(sk_snapshot_open(w->store, NULL, 0, &w->snapshot) == SK_OK);
        memcpy(w->snapshot_model, w->model, sizeof w->model);
        w->copy = open_store();
        return;
    }
    w->buf.len = 0;
    int64_t len = sk_snapshot_next(w->snapshot, &leaf, &w->buf);
    if (len >= 0) {
        EXPECT(leaf < LEAVES);
        EXPECT(sk_leaf_decode(w->copy, leaf, w->buf.data, w->buf.len, SK_REPLACE) == SK_OK);
        return;
    }
    EXPECT(len == -SK_END);
    for (uint32_t s = 0; s < 2; s++)
        for (uint32_t k = 0; k < KEYS; k++) check_key(w, w->copy, w->snapshot_model, s, k);
    end_snapshot(w);
}

static void op_delta(world *w, uint32_t leaf) {
    uint32_t since = next(w);
    w->buf.len = 0;
    int64_t len = sk_leaf_encode(w->store, leaf, SK_ALL_STATES, since, &w->buf);
    EXPECT(since > sk_epoch(w->store) ? len == -SK_BAD_ARGUMENT : len >= 0);
}

static void op_other(world *w, uint32_t leaf) {
    switch (next(w) % 5) {
    case 0:
        sk_epoch_advance(w->store);
        break;
    case 1:
        EXPECT(sk_track(w->store, sk_epoch(w->store) - 1) == SK_OK);
        break;
    case 2:
        EXPECT(sk_write_back(w->store, next(w) % 2) == SK_OK);
        break;
    case 3:
        w->buf.len = 0;
        if (sk_dirty_take(w->store, leaf, 0, &w->buf) > 0)
            EXPECT(sk_dirty_done(w->store, leaf, next(w) % 2) == SK_OK);
        break;
    default:
        op_delta(w, leaf);
    }
}

/* Times are small, so that things expire and fall due. */
static void op_time(world *w, uint32_t k) {
    bool is_gone = is_away(w, w->leaf[k]);
    int64_t at = next(w);
    int status = SK_OK;
    w->buf.len = 0;
    switch (next(w) % 7) {
    case 0:
        EXPECT(sk_time_set(w->store, SK_EVENT_TIME, at) == SK_OK);
        break;
    case 1:
        EXPECT(sk_state_ttl(w->store, X, at, SK_EVENT_TIME, next(w) % 2) == SK_OK);
        break;
    case 2:
        status = sk_i64_fold(w->store, X, w->key[k], w->key_len[k], SK_ADD, 1, 0, NULL);
        break;
    case 3:
        status = sk_timer_set(w->store, W, w->key[k], w->key_len[k], at);
        break;
    case 4:
        status = sk_timer_cancel(w->store, W, w->key[k], w->key_len[k], at);
        break;
    case 5:
        EXPECT(sk_timers_due(w->store, W, 0, LEAVES, at, next(w) % 2, &w->buf) >= 0);
        sk_timers_next(w->store, W);
        break;
    default:
        EXPECT(sk_sweep(w->store, (uint64_t)at) >= 0);
    }
    EXPECT(status <= SK_MISSING || (is_gone && status == SK_NOT_OWNED));
}

static void step(world *w) {
    uint8_t what = next(w), where = next(w);
    uint32_t k = where % KEYS, leaf = where % LEAVES;
    if (what >= 248) { /* the rarest bytes in inputs that are older than gates */
        if (what % 2)
            set_gate(w, leaf, next(w) % 2);
        else
            op_pick(w, k);
        return;
    }
    if (what % 13 < 6 && what % 13 != 3 && is_away(w, w->leaf[k])) {

        EXPECT(sk_contains(w->store, N, w->key[k], w->key_len[k]) == SK_NOT_OWNED);
        EXPECT(sk_i64_put(w->store, N, w->key[k], w->key_len[k], 1) == SK_NOT_OWNED);
        return;
    }
    switch (what % 13) {
    case 0:
        op_number(w, k);
        break;
    case 1:
        op_bytes(w, k);
        break;
    case 2:
        op_delete(w, k);
        break;
    case 3:
        op_batch(w, k);
        break;
    case 4:
    case 5:
        op_container(w, k);
        break;
    case 6:
        op_encode(w, leaf);
        break;
    case 7:
        op_decode(w);
        break;
    case 8:
        op_move(w);
        break;
    case 9:
        op_clear(w, leaf);
        break;
    case 10:
        op_snapshot(w);
        break;
    case 11:
        op_time(w, k);
        break;
    default:
        op_other(w, leaf);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    static world w;
    w = (world){.at = data, .end = data + len, .store = open_store()};
    for (uint32_t k = 0; k < KEYS; k++) {
        w.key_len[k] = k == 0 ? 0 : 1 + k % 23; /* one is empty, some do not fit a slot */
        memset(w.key[k], (int)k, sizeof w.key[k]);
        uint64_t hash = 0;
        EXPECT(sk_key_hash("b", w.key[k], w.key_len[k], &hash) == SK_OK);
        w.leaf[k] = (uint32_t)(hash >> 62);
    }
    for (int i = 0; i < STEPS_MAX && w.at < w.end; i++) step(&w);
    check_all(&w);
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++)
        if (w.is_shut[leaf]) set_gate(&w, leaf, false);
    if (w.leaves != NULL) op_move(&w);
    check_all(&w);
    end_snapshot(&w);
    sk_buf_free(&w.buf);
    sk_buf_free(&w.blocks);
    sk_close(w.store);
    return 0;
}
