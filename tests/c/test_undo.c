/*
 * test_undo.c: snapshots while entries change in place (csrc/undo.c). The oracle is a deep copy of
 * every leaf, made by the encoder when the snapshot was opened, without any log: whatever is done
 * afterwards, in whatever order with the steps of the readers, the snapshot's blocks must be those
 * bytes. Only a delta may become a full block, if the table has dropped what it needs. So nothing
 * is said here about what a call does: other tests do that.
 */
#include "entry.h"
#include "store_util.h"

#define LEAVES 4
#define KEYS 400
#define OPEN_MAX 4
#define VALUE_MAX 40000 /* some values are too large for a log */

enum { N, F, B, L, M, T, DUE, E, R, STATES };

static const struct {
    const char *name;
    int kind;
} states[STATES] = {{"n", SK_I64},    {"f", SK_F64},   {"b", SK_BYTES},
                    {"l", SK_LIST},   {"m", SK_MAP},   {"t", SK_NESTED},
                    {"d", SK_TIMERS}, {"e", SK_BYTES}, {"r", SK_I64}};

static util_key keys[KEYS];

typedef struct copy { /* of a leaf, by state */
    int residency;
    bool has_changed; /* since the delta's base */
    sk_buf full[STATES], delta[STATES];
} copy;

typedef struct view {
    sk_snapshot *snapshot; /* NULL: this place is free */
    uint32_t since[LEAVES];
    bool has_since, has_shut;
    uint32_t seen;
    copy leaves[LEAVES];
} view;

typedef struct world {
    sk_store *store;
    test_rng rng;
    bool writes_back, tracks, fails;
    int64_t watermark;
    uint32_t bases[8]; /* epochs that deltas may be since */
    int base_next;
    view open[OPEN_MAX];
    uint64_t logged; /* steps that found a log */
    uint64_t leaves_read, became_full;
    uint8_t value[VALUE_MAX];
    sk_buf buf;
} world;

static uint32_t below(world *w, uint32_t n) { return (uint32_t)test_below(&w->rng, n); }

/* ---- Snapshots ---- */

static void copy_leaf(world *w, view *v, uint32_t leaf) {
    copy *c = &v->leaves[leaf];
    uint8_t changed[LEAVES];
    bool is_shut = sk_leaf_gate_of(w->store, leaf) == SK_GATE_SHUT;
    c->residency = is_shut && !v->has_shut ? SK_AWAY : sk_leaf_residency(w->store, leaf);
    CHECK_EQ(sk_changed_leaves(w->store, v->since[leaf], changed), SK_OK);
    c->has_changed = changed[leaf];
    for (uint32_t s = 0; s < STATES; s++) {
        c->full[s] = c->delta[s] = (sk_buf){0};
        if (c->residency == SK_AWAY) continue;
        CHECK(sk_leaf_encode(w->store, leaf, s, 0, &c->full[s]) >= 0);
        if (v->since[leaf] > 0 && c->has_changed)
            CHECK(sk_leaf_encode(w->store, leaf, s, v->since[leaf], &c->delta[s]) >= 0);
    }
}

static void open_view(world *w, view *v) {
    uint32_t base = w->bases[below(w, 8)];
    v->has_since = base > 0 && below(w, 3) > 0;
    v->has_shut = below(w, 4) == 0;
    v->seen = 0;
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++)
        v->since[leaf] = v->has_since && below(w, 10) > 0 ? base : 0;
    CHECK_EQ(sk_snapshot_open(w->store, v->has_since ? v->since : NULL, 0, &v->snapshot), SK_OK);
    if (v->has_shut) sk_snapshot_add_shut(v->snapshot);
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++) copy_leaf(w, v, leaf);
}

static void free_copies(view *v) {
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++)
        for (uint32_t s = 0; s < STATES; s++) {
            sk_buf_free(&v->leaves[leaf].full[s]);
            sk_buf_free(&v->leaves[leaf].delta[s]);
        }
}

static bool is_same(const uint8_t *p, size_t len, const sk_buf *buf) {
    return len == buf->len && (len == 0 || memcmp(p, buf->data, len) == 0);
}

/* Checks what the snapshot has of a leaf: its blocks, one for each state or none. */
static void check_leaf(world *w, const view *v, uint32_t leaf, const uint8_t *p, size_t len) {
    const copy *c = &v->leaves[leaf];
    bool found[STATES] = {false};
    CHECK_EQ(sk_snapshot_residency(v->snapshot, leaf), c->residency);
    while (len > 0) {
        sk_block_info info;
        CHECK_EQ(sk_block_read(p, len, &info), SK_OK);
        CHECK_EQ(sk_block_check(p, info.size), SK_OK);
        uint32_t s = 0;
        while (s < STATES && strcmp(states[s].name, info.name) != 0) s++;
        CHECK(s < STATES);
        if (s == STATES) return;
        found[s] = true;
        bool is_delta = v->since[leaf] > 0;
        const sk_buf *expected = is_delta ? &c->delta[s] : &c->full[s];
        bool is_right = is_same(p, info.size, expected);
        if (!is_right && is_delta && !info.is_delta) { /* it may have become full */
            is_right = info.entries == 0 ? c->full[s].len == 0 || c->residency != SK_WHOLE
                                         : is_same(p, info.size, &c->full[s]);
            w->became_full++;
        }
        CHECK(is_right);
        p += info.size;
        len -= info.size;
    }
    for (uint32_t s = 0; s < STATES; s++)
        if (!found[s]) CHECK_EQ((v->since[leaf] > 0 ? c->delta[s] : c->full[s]).len, 0);
}

static void close_view(view *v) {
    sk_snapshot_close(v->snapshot);
    v->snapshot = NULL;
    free_copies(v);
}

static void read_view(world *w, view *v) {
    uint32_t leaf = LEAVES;
    sk_buf buf = {0};
    int64_t len = sk_snapshot_next(v->snapshot, &leaf, &buf);
    sk_fail_alloc(0, 0);
    if (len >= 0) {
        CHECK(leaf < LEAVES && !(v->seen >> leaf & 1));
        v->seen |= 1u << leaf;
        check_leaf(w, v, leaf, buf.data, buf.len);
        w->leaves_read++;
    } else if (len == -SK_END) {
        uint8_t residencies[LEAVES];
        CHECK_EQ(sk_snapshot_residencies(v->snapshot, residencies), SK_OK);
        for (uint32_t i = 0; i < LEAVES; i++) {
            CHECK_EQ(residencies[i], v->leaves[i].residency);
            if (!(v->seen >> i & 1)) check_leaf(w, v, i, NULL, 0);
        }
        w->bases[w->base_next++ % 8] = sk_snapshot_epoch(v->snapshot);
        close_view(v);
    } else {
        CHECK_EQ(len, -SK_NO_MEMORY); /* and it is tried again */
        CHECK(w->fails);
    }
    sk_buf_free(&buf);
}

/* ---- Values ---- */

/* A list of n items in value, or a map of n entries. */
static size_t make_container(world *w, bool is_map, uint32_t n) {
    uint8_t *p = w->value;
    *p++ = is_map ? 0xde : 0xdc;
    *p++ = (uint8_t)(n >> 8);
    *p++ = (uint8_t)n;
    for (uint32_t i = 0; i < n; i++) {
        if (is_map) {
            *p++ = 0xcd;
            *p++ = (uint8_t)(1 + i / 256);
            *p++ = (uint8_t)i;
        }
        memcpy(p,
               "\xa7"
               "element",
               8);
        p += 8;
    }
    return (size_t)(p - w->value);
}

/* The encoded value of a state. */
static size_t make_value(world *w, uint32_t state) {
    uint32_t n = below(w, 4) > 0 ? below(w, 10) : below(w, 60) > 0 ? below(w, 300) : 3000;
    switch (states[state].kind) {
    case SK_I64:
    case SK_F64:
        sk_store64(w->value, test_random(&w->rng) >> 12);
        return 8;
    case SK_BYTES:
        memset(w->value, (int)n, 10 * n);
        return 10 * n;
    case SK_TIMERS:
        n = n % 5 + 1;
        for (uint32_t i = 0; i < n; i++) sk_store64(w->value + 8 * i, w->watermark + 100 * i);
        return 8 * n;
    default:
        return make_container(w, state == M, n);
    }
}

/* ---- Calls. What they answer is nobody's business here. ---- */

static void try_put(world *w, const util_key *key, int64_t number) {
    sk_at at;
    sk_key routed;
    int status = sk_call_begin(w->store, N, SK_ONLY(SK_I64), key->data, key->len,
                               SK_WRITES | SK_TRIES, &at, &routed);
    if (status != SK_OK) return;
    sk_entry_put(&at, &routed, (sk_value){.i64 = number});
    sk_call_end(&at);
}

static void write_container(world *w, const util_key *key) {
    static const uint8_t item[] = {0xa3, 'n', 'e', 'w'}, one[] = {0x91, 0x07};
    uint32_t state = L + below(w, 3);
    uint8_t step[3] = {0xcd, (uint8_t)(1 + below(w, 2)), (uint8_t)below(w, 256)};
    uint8_t index[1] = {(uint8_t)below(w, 20)};
    const char *shape = state == L ? "l" : state == M ? "m" : "ml";
    bool is_list = state == L;
    const uint8_t *path = is_list ? index : step;
    size_t path_len = is_list ? 1 : 3;
    switch (below(w, 6)) {
    case 0: /* in a map of lists, a list may be made on the way */
        sk_write(w->store, state, key->data, key->len, SK_W_APPEND, path, is_list ? 0 : path_len,
                 shape, item, 4, 0, 0, &w->buf);
        break;
    case 1:
        sk_write(w->store, state, key->data, key->len, SK_W_SET, path, path_len, shape, item, 4, 0,
                 0, &w->buf);
        break;
    case 2: /* often there is no such place: nothing changes */
        sk_write(w->store, state, key->data, key->len, SK_W_DELETE, path, path_len, shape, NULL, 0,
                 0, 0, &w->buf);
        break;
    case 3:
        sk_write(w->store, state, key->data, key->len, SK_W_CLEAR, NULL, 0, shape, NULL, 0, 0, 0,
                 &w->buf);
        break;
    case 4:
        sk_write(w->store, state, key->data, key->len, SK_W_EXTEND, NULL, 0, shape, one, 2, 0, 0,
                 &w->buf);
        break;
    default:
        sk_write(w->store, state, key->data, key->len, SK_W_POP, NULL, 0, shape, NULL, 0, -1, 0,
                 &w->buf);
    }
}

#define BATCH 40

static void run_batch(world *w) {
    static const int ops[][2] = {
        {SK_B_ADD, N},    {SK_B_PUT, N}, {SK_B_GET, N}, {SK_B_ADD, F},    {SK_B_DELETE, N},
        {SK_B_DELETE, B}, {SK_B_PUT, B}, {SK_B_GET, E}, {SK_B_APPEND, L}, {SK_B_MAP_PUT, M},
        {SK_B_PUT, E},    {SK_B_GET, R}, {SK_B_HAS, R}, {SK_B_ADD, R},    {SK_B_DELETE, L}};
    static uint8_t data[BATCH * UTIL_KEY_BYTES_MAX];
    uint8_t status[BATCH];
    int64_t offsets[BATCH + 1] = {0}, numbers[BATCH], out[BATCH], out_offsets[BATCH + 1];
    int64_t ends[BATCH + 1];
    const int *what = ops[below(w, sizeof ops / sizeof ops[0])];
    for (int i = 0; i < BATCH; i++) {
        const util_key *key = &keys[below(w, KEYS)];
        memcpy(data + offsets[i], key->data, key->len);
        offsets[i + 1] = offsets[i] + (int64_t)key->len;
        numbers[i] = i;
        ends[i] = 7 * i;
    }
    ends[BATCH] = 7 * BATCH;
    memset(w->value, 'v', 7 * BATCH);
    sk_batch_args args = {.n = BATCH,
                          .flags = SK_BLIND,
                          .keys = {SK_COL_VAR64, 0, data, offsets, sizeof data},
                          .operand_i64 = 1,
                          .operand_f64 = 1,
                          .out = out,
                          .out_offsets = out_offsets,
                          .buf = &w->buf,
                          .status = status};
    bool is_bytes = what[1] == B || what[1] == E;
    if (what[0] == SK_B_PUT && is_bytes)
        args.values = (sk_column){SK_COL_VAR64, 0, w->value, ends, 7 * BATCH};
    else if (what[0] == SK_B_PUT || what[0] == SK_B_APPEND || what[0] == SK_B_MAP_PUT)
        args.values = (sk_column){SK_COL_I64, 0, numbers, NULL, sizeof numbers};
    if (what[0] == SK_B_MAP_PUT) args.map_keys = args.values;
    sk_batch(w->store, (uint32_t)what[1], what[0], &args);
}

/* Many keys of a state come or go, so that tables grow, shrink and drop tombstones. */
static void flood(world *w) {
    uint32_t state = below(w, STATES), first = below(w, KEYS), count = below(w, KEYS);
    bool comes = below(w, 2);
    for (uint32_t i = 0; i < count; i++) {
        const util_key *key = &keys[(first + i) % KEYS];
        if (!comes)
            sk_delete(w->store, state, key->data, key->len, 0);
        else if (state == N || state == R)
            sk_i64_fold(w->store, state, key->data, key->len, SK_ADD, 1, 0, NULL);
        else if (state == DUE)
            sk_timer_set(w->store, state, key->data, key->len, w->watermark + 500);
        else
            sk_put(w->store, state, key->data, key->len, (const uint8_t *)"\x90......", 8);
    }
}

/* A call about one key. */
static void call(world *w) {
    const util_key *key = &keys[below(w, KEYS)];
    uint32_t state = below(w, STATES);
    int64_t number = (int64_t)below(w, 1000), old = 0;
    size_t len;
    if (below(w, 100) == 0) flood(w);
    switch (below(w, 16)) {
    case 0:
    case 1:
    case 2:
        len = make_value(w, state);
        sk_put(w->store, state, key->data, key->len, w->value, len);
        break;
    case 3:
    case 4:
        sk_delete(w->store, state, key->data, key->len, below(w, 2) ? SK_BLIND : 0);
        break;
    case 5:
        sk_i64_fold(w->store, below(w, 3) ? N : R, key->data, key->len, SK_ADD, number, 0, NULL);
        break;
    case 6: /* an overflow changes nothing */
        sk_i64_fold(w->store, N, key->data, key->len, SK_ADD, INT64_MAX, 5, NULL);
        break;
    case 7:
        sk_i64_cas(w->store, N, key->data, key->len, below(w, 2) ? &number : NULL, number, &old);
        break;
    case 8:
        try_put(w, key, number);
        break;
    case 9:
    case 10:
        write_container(w, key);
        break;
    case 11:
        sk_timer_set(w->store, DUE, key->data, key->len, w->watermark + number - 100);
        break;
    case 12:
        sk_timer_cancel(w->store, DUE, key->data, key->len, w->watermark + 100 * below(w, 5));
        break;
    case 13: /* reading; touches, and meets what has expired */
        sk_get(w->store, below(w, 2) ? E : R, key->data, key->len, &w->buf);
        break;
    case 14:
        sk_f64_put(w->store, F, key->data, key->len, (double)number);
        break;
    default:
        run_batch(w);
    }
}

/* Something that is not about an entry whose key is known. */
static void disturb(world *w) {
    uint32_t leaf = below(w, LEAVES), state = below(w, STATES);
    const util_key *key = &keys[below(w, KEYS)];
    sk_leaves *leaves = NULL;
    size_t len;
    w->buf.len = 0;
    switch (below(w, 16)) {
    case 0:
        if (sk_detach(w->store, leaf / 2, leaf, &leaves) != SK_OK) break;
        while (sk_attach(w->store, leaves) != SK_OK) CHECK(w->fails);
        break;
    case 1:
        sk_clear(w->store, state, leaf, leaf + 1, SK_BLIND);
        break;
    case 2:
        if (!w->writes_back) break;
        if (sk_dirty_take(w->store, leaf, below(w, 2) ? SK_COLD : 0, &w->buf) >= 0)
            CHECK_EQ(sk_dirty_done(w->store, leaf, below(w, 3) > 0), SK_OK);
        break;
    case 3:
        if (w->writes_back) sk_evict(w->store, 1000 + below(w, 5000));
        break;
    case 4:
        len = make_value(w, state);
        sk_install(w->store, state, key->data, key->len, below(w, 3) ? w->value : NULL, len,
                   SK_NO_TIME);
        break;
    case 5:
        sk_sweep(w->store, below(w, 500));
        break;
    case 6:
        w->buf.len = 0;
        sk_timers_due(w->store, DUE, 0, LEAVES, w->watermark - 50, 0, &w->buf);
        break;
    case 7:
        if (sk_leaf_encode(w->store, leaf, SK_ALL_STATES, 0, &w->buf) > 0)
            sk_leaf_decode(w->store, leaf, w->buf.data, w->buf.len, (int)below(w, 4));
        break;
    case 8:
        if (below(w, 3) == 0) sk_leaf_mark(w->store, leaf, leaf + 1, SK_PARTIAL);
        break;
    case 9:
        sk_leaf_mark(w->store, leaf, leaf + 1, SK_WHOLE);
        break;
    case 10:
        sk_leaf_gate(w->store, leaf, leaf + 1, SK_GATE_SHUT);
        break;
    case 11:
        sk_leaf_gate(w->store, 0, LEAVES, SK_GATE_OPEN);
        break;
    case 12:
        w->watermark += below(w, 300);
        sk_time_set(w->store, SK_EVENT_TIME, w->watermark);
        sk_time_set(w->store, SK_PROCESSING_TIME, w->watermark);
        break;
    case 13:
        if (w->tracks) sk_track(w->store, w->bases[below(w, 8)]);
        break;
    case 14:
        sk_leaf_forget(w->store, leaf);
        break;
    default:
        sk_epoch_advance(w->store);
    }
}

static sk_store *open_store(void) {
    sk_store *store = util_open(2, 2);
    for (uint32_t s = 0; s < E; s++)
        CHECK_EQ(util_state(store, states[s].name, states[s].kind, "b"), s);
    CHECK_EQ(util_timed_state(store, "e", SK_BYTES, "b", 1000, SK_EVENT_TIME, 0), E);
    CHECK_EQ(util_timed_state(store, "r", SK_I64, "b", 1 << 30, SK_PROCESSING_TIME, 1), R);
    return store;
}

static void run_world(uint64_t stream, int steps) {
    static world w;
    w = (world){.store = open_store(),
                .rng = test_rng_new(stream),
                .writes_back = stream & 1,
                .tracks = stream & 2,
                .fails = stream & 4};
    CHECK_EQ(sk_write_back(w.store, w.writes_back), SK_OK);
    CHECK_EQ(sk_time_set(w.store, SK_PROCESSING_TIME, 0), SK_OK);
    if (w.tracks) CHECK_EQ(sk_track(w.store, sk_epoch_advance(w.store)), SK_OK);
    unsigned quiet = stream & 8 ? 3 : 30; /* of 1000 steps, how many disturb */
    for (int step = 0; step < steps; step++) {
        view *v = &w.open[below(&w, 1 + (stream >> 4) % OPEN_MAX)];
        unsigned what = below(&w, 1000);
        bool fails = w.fails && below(&w, 10) == 0;
        if (fails && what < 960) sk_fail_alloc(1 + below(&w, 6), (int)below(&w, 2));
        if (what < 900)
            call(&w);
        else if (what < 900 + quiet)
            disturb(&w);
        else if (what < 960 && v->snapshot != NULL)
            read_view(&w, v);
        else if (what >= 960 && what < 985 && v->snapshot == NULL)
            open_view(&w, v);
        else if (what == 999 && v->snapshot != NULL)
            close_view(v);
        sk_fail_alloc(0, 0);
        for (uint32_t leaf = 0; leaf < LEAVES; leaf++) w.logged += w.store->undos[leaf] != NULL;
    }
    w.fails = false;
    for (int i = 0; i < OPEN_MAX; i++)
        while (w.open[i].snapshot != NULL) read_view(&w, &w.open[i]);
    CHECK(w.logged > (uint64_t)steps / 10);
    CHECK(w.leaves_read > 20);
    CHECK(w.became_full <= w.leaves_read / 2);
    sk_buf_free(&w.buf);
    sk_close(w.store);
}

static void test_snapshot_has_what_was_there_whatever_happens_later(void) {
    for (uint64_t stream = 0; stream < 64; stream++) run_world(1000 + stream, 6000);
}

/* ---- One rule at a time ---- */

static void add_keys(sk_store *store, int64_t from, int64_t to) {
    for (int64_t k = from; k < to; k++)
        CHECK_EQ(sk_i64_fold(store, 0, util_int_key(k).data, 8, SK_ADD, 1, 0, NULL), SK_OK);
}

/* A store of one leaf, with keys 0 to 199. */
static sk_store *open_numbers(void) {
    sk_store *store = util_open(1, 1);
    util_state(store, "n", SK_I64, "i");
    add_keys(store, 0, 200);
    return store;
}

/* While a snapshot is open, deletions before it are forgotten, since nobody else needs them. */
static void test_delta_whose_tombstones_were_dropped_is_a_full_block(void) {
    for (int drops = 0; drops < 2; drops++) {
        sk_store *store = open_numbers();
        uint32_t since = sk_epoch_advance(store), leaf;
        CHECK_EQ(sk_track(store, since), SK_OK);
        for (int64_t k = 0; k < 20; k++)
            CHECK_EQ(sk_delete(store, 0, util_int_key(k).data, 8, 0), SK_OK);
        sk_buf full = {0}, delta = {0}, found = {0};
        CHECK(sk_leaf_encode(store, 0, 0, 0, &full) > 0);
        CHECK(sk_leaf_encode(store, 0, 0, since, &delta) > 0);
        sk_snapshot *snapshot;
        CHECK_EQ(sk_snapshot_open(store, &since, 0, &snapshot), SK_OK);
        if (drops) CHECK_EQ(sk_track(store, sk_snapshot_epoch(snapshot)), SK_OK);
        add_keys(store, 150, 1000); /* the table grows */
        CHECK(store->undos[0] != NULL);
        CHECK_EQ(util_stats(store, 1).tombstones, drops ? 0 : 20);
        CHECK(sk_snapshot_next(snapshot, &leaf, &found) > 0);
        CHECK(util_same(&found, drops ? &full : &delta));
        CHECK(store->undos[0] == NULL);
        sk_snapshot_close(snapshot);
        sk_buf_free(&full);
        sk_buf_free(&delta);
        sk_buf_free(&found);
        sk_close(store);
    }
}

/* What happens after a snapshot was taken does not make its delta larger: deletions that leave no
 * trace, and states that are new. */
static void test_delta_stays_a_delta(void) {
    sk_store *store = open_numbers();
    uint32_t since = sk_epoch_advance(store), leaf;
    add_keys(store, 0, 1);
    sk_buf delta = {0}, found = {0};
    CHECK(sk_leaf_encode(store, 0, 0, since, &delta) > 0);
    sk_snapshot *snapshot;
    CHECK_EQ(sk_snapshot_open(store, &since, 0, &snapshot), SK_OK);
    for (int64_t k = 0; k < 20; k++)
        CHECK_EQ(sk_delete(store, 0, util_int_key(k).data, 8, 0), SK_OK);
    uint32_t later = util_state(store, "later", SK_BYTES, "i");
    for (int64_t k = 0; k < 100; k++)
        for (int round = 0; round < 2; round++)
            CHECK_EQ(sk_put(store, later, util_int_key(k).data, 8, (const uint8_t *)"12", 2),
                     SK_OK);
    CHECK(store->undos[0] != NULL);
    CHECK(sk_snapshot_next(snapshot, &leaf, &found) > 0);
    CHECK(util_same(&found, &delta));
    sk_snapshot_close(snapshot);
    sk_buf_free(&delta);
    sk_buf_free(&found);
    sk_close(store);
}

static uint64_t held(sk_store *store) {
    return store->undos[0] != NULL ? store->undos[0]->bytes : 0;
}

/* An entry is kept once, however often it changes, and not if nothing changes. */
static void test_a_log_grows_with_what_has_changed(void) {
    sk_store *store = open_numbers();
    sk_snapshot *snapshot;
    CHECK_EQ(sk_snapshot_open(store, NULL, 0, &snapshot), SK_OK);
    CHECK_EQ(held(store), 0);
    add_keys(store, 0, 1);
    uint64_t first = held(store);
    CHECK(first > 0);
    for (int i = 0; i < 1000; i++) {
        add_keys(store, 0, 3);
        for (int64_t k = 100; k < 200; k++) /* no such sum: nothing happens */
            CHECK_EQ(sk_i64_fold(store, 0, util_int_key(k).data, 8, SK_ADD, INT64_MAX, 0, NULL),
                     SK_OVERFLOW);
        add_keys(store, 1000 + i, 1001 + i); /* new keys need not be kept */
    }
    CHECK_EQ(held(store), first);
    CHECK_EQ(store->undos[0]->tables[0].saved_count, 3);
    sk_snapshot_close(snapshot); /* unread */
    CHECK_EQ(held(store), 0);
    add_keys(store, 0, 1);
    CHECK_EQ(held(store), 0);
    sk_close(store);
}

/* Logs count for the limit of a snapshot: calls about other leaves, and about the same one, wait for
 * its reader. Here nobody reads, so the snapshot is given up, and the calls go on. */
static void test_logs_are_bounded(void) {
    sk_store *store = open_numbers();
    sk_snapshot *snapshot;
    uint32_t leaf;
    sk_buf buf = {0};
    CHECK_EQ(sk_snapshot_open(store, NULL, 3000, &snapshot), SK_OK);
    add_keys(store, 0, 1);
    CHECK(held(store) > 0);
    add_keys(store, 1, 200); /* waits once, for some 2 s */
    CHECK_EQ(held(store), 0);
    CHECK_EQ(sk_snapshot_next(snapshot, &leaf, &buf), -SK_OVERRUN);
    sk_snapshot_close(snapshot);
    sk_buf_free(&buf);
    sk_close(store);
}

/* The reader first reads what takes memory. */
static void test_a_reader_that_keeps_up_is_not_overrun_by_logs(void) {
    sk_store *store = util_open(1, 8);
    util_state(store, "n", SK_I64, "i");
    add_keys(store, 0, 1000);
    sk_snapshot *snapshot;
    sk_buf buf = {0}, whole[8] = {{0}};
    uint32_t leaf;
    for (uint32_t i = 0; i < 8; i++) CHECK(sk_leaf_encode(store, i, 0, 0, &whole[i]) > 0);
    CHECK_EQ(sk_snapshot_open(store, NULL, 1, &snapshot), SK_OK);
    for (int64_t k = 0; k < 100; k++) { /* each opens one log at most, and there is room for none */
        add_keys(store, k, k + 1);
        buf.len = 0;
        int64_t len = sk_snapshot_next(snapshot, &leaf, &buf);
        CHECK(len > 0 || len == -SK_END);
        if (len > 0) CHECK(util_same(&buf, &whole[leaf]));
    }
    sk_snapshot_close(snapshot);
    for (uint32_t i = 0; i < 8; i++) sk_buf_free(&whole[i]);
    sk_buf_free(&buf);
    sk_close(store);
}

int main(void) {
    for (uint32_t k = 0; k < KEYS; k++) keys[k] = util_bytes_key(k);
    RUN(test_snapshot_has_what_was_there_whatever_happens_later);
    RUN(test_delta_whose_tombstones_were_dropped_is_a_full_block);
    RUN(test_delta_stays_a_delta);
    RUN(test_a_log_grows_with_what_has_changed);
    RUN(test_logs_are_bounded);
    RUN(test_a_reader_that_keeps_up_is_not_overrun_by_logs);
    return test_report();
}
