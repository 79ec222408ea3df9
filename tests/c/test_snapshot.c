/*
 * test_snapshot.c: snapshots, deltas and change tracking (csrc/snapshot.c). The oracle copies its
 * arrays when a snapshot is opened; what the snapshot's blocks decode to must equal the copy.
 */
#include "store_util.h"

#define LEAVES 8
#define LEAF_BITS 3
#define KEYS 150

typedef struct content { /* what a store holds: an i64 and a bytes state over one set of keys */
    bool has_n[KEYS], has_b[KEYS];
    int64_t n[KEYS];
    uint8_t b_len[KEYS]; /* key k's bytes are b_len[k] times the byte k */
} content;

static util_key keys[KEYS];
static uint32_t leaf_of[KEYS];

static void make_keys(void) {
    for (uint32_t k = 0; k < KEYS; k++) {
        keys[k] = util_bytes_key(k);
        leaf_of[k] = util_leaf_of("b", &keys[k], LEAF_BITS);
    }
}

static sk_store *open_two_states(void) {
    sk_store *store = util_open(2, 4);
    CHECK_EQ(util_state(store, "n", SK_I64, "b"), 0);
    CHECK_EQ(util_state(store, "b", SK_BYTES, "b"), 1);
    return store;
}

static void put_b(sk_store *store, uint32_t k, size_t len) {
    uint8_t value[256];
    memset(value, (int)k, len);
    CHECK_EQ(sk_put(store, 1, keys[k].data, keys[k].len, value, len), SK_OK);
}

static void check_content(sk_store *store, const content *c) {
    sk_buf buf = {0};
    for (uint32_t k = 0; k < KEYS; k++) {
        int64_t n = 0;
        CHECK_EQ(sk_i64_get(store, 0, keys[k].data, keys[k].len, &n),
                 c->has_n[k] ? SK_OK : SK_MISSING);
        if (c->has_n[k]) CHECK_EQ(n, c->n[k]);
        int64_t len = sk_get(store, 1, keys[k].data, keys[k].len, &buf);
        CHECK_EQ(len, c->has_b[k] ? c->b_len[k] : -SK_MISSING);
        for (int64_t i = 0; i < len; i++) CHECK_EQ(buf.data[i], (uint8_t)k);
    }
    sk_buf_free(&buf);
}

/* One random change to store and content. */
static void change(sk_store *store, content *c, test_rng *rng) {
    uint32_t k = (uint32_t)test_below(rng, KEYS);
    int64_t by = (int64_t)test_below(rng, 100);
    switch (test_below(rng, 6)) {
    case 0:
        CHECK_EQ(sk_i64_put(store, 0, keys[k].data, keys[k].len, by), SK_OK);
        c->n[k] = by;
        c->has_n[k] = true;
        break;
    case 1:
        CHECK_EQ(sk_i64_fold(store, 0, keys[k].data, keys[k].len, SK_ADD, by, 0, NULL), SK_OK);
        c->n[k] = (c->has_n[k] ? c->n[k] : 0) + by;
        c->has_n[k] = true;
        break;
    case 2:
        CHECK_EQ(sk_delete(store, 0, keys[k].data, keys[k].len, 0),
                 c->has_n[k] ? SK_OK : SK_MISSING);
        c->has_n[k] = false;
        break;
    case 3:
        put_b(store, k, (size_t)by);
        c->b_len[k] = (uint8_t)by;
        c->has_b[k] = true;
        break;
    case 4:
        CHECK_EQ(sk_delete(store, 1, keys[k].data, keys[k].len, 0),
                 c->has_b[k] ? SK_OK : SK_MISSING);
        c->has_b[k] = false;
        break;
    default: { /* a batch */
        uint8_t data[8 * UTIL_KEY_BYTES_MAX], status[8];
        int64_t offsets[9] = {0};
        for (int i = 0; i < 8; i++) {
            uint32_t j = (k + (uint32_t)i * 3) % KEYS;
            memcpy(data + offsets[i], keys[j].data, keys[j].len);
            offsets[i + 1] = offsets[i] + (int64_t)keys[j].len;
            c->n[j] = (c->has_n[j] ? c->n[j] : 5) + 1;
            c->has_n[j] = true;
        }
        sk_batch_args args = {.n = 8,
                              .keys = {SK_COL_VAR64, 0, data, offsets, sizeof data},
                              .operand_i64 = 1,
                              .initial_i64 = 5,
                              .status = status};
        CHECK_EQ(sk_batch(store, 0, SK_B_ADD, &args), SK_OK);
    }
    }
}

/* Reads all of a snapshot into a store: full blocks replace, deltas go over what is there. */
static int64_t read_one(sk_snapshot *snapshot, sk_store *into, bool is_delta) {
    sk_buf buf = {0};
    uint32_t leaf = UINT32_MAX;
    int64_t len = sk_snapshot_next(snapshot, &leaf, &buf);
    if (len >= 0) {
        CHECK_EQ(len, buf.len);
        CHECK(len > 0 && leaf < LEAVES);
        CHECK_EQ(sk_leaf_decode(into, leaf, buf.data, buf.len, is_delta ? SK_OVER : SK_REPLACE),
                 SK_OK);
    }
    sk_buf_free(&buf);
    return len;
}

static void test_snapshot_is_the_store_when_it_was_opened(void) {
    sk_store *store = open_two_states(), *copy = open_two_states();
    static content now, then;
    test_rng rng = test_rng_new(1);
    now = (content){0};
    for (int i = 0; i < 500; i++) change(store, &now, &rng);
    then = now;
    sk_snapshot *snapshot = NULL;
    uint32_t epoch = sk_epoch(store);
    CHECK_EQ(sk_snapshot_open(store, NULL, 0, &snapshot), SK_OK);
    CHECK_EQ(sk_snapshot_epoch(snapshot), epoch);
    CHECK_EQ(sk_epoch(store), epoch + 1);
    for (int i = 0; i < 500; i++) change(store, &now, &rng);
    int leaves = 0;
    while (read_one(snapshot, copy, false) >= 0) leaves++;
    CHECK_EQ(leaves, LEAVES);
    CHECK_EQ(read_one(snapshot, copy, false), -SK_END);
    CHECK_EQ(read_one(snapshot, copy, false), -SK_END);
    sk_snapshot_close(snapshot);
    check_content(copy, &then);
    check_content(store, &now);
    sk_close(store);
    sk_close(copy);
}

static void test_snapshot_of_an_empty_store_ends_at_once(void) {
    sk_store *store = open_two_states();
    sk_snapshot *snapshot = NULL;
    uint32_t leaf;
    sk_buf buf = {0};
    CHECK_EQ(sk_snapshot_open(store, NULL, 0, &snapshot), SK_OK);
    put_b(store, 1, 5); /* later, so it is not in the snapshot */
    CHECK_EQ(sk_snapshot_next(snapshot, &leaf, &buf), -SK_END);
    sk_snapshot_close(snapshot);
    sk_snapshot_close(NULL);
    sk_buf_free(&buf);
    sk_close(store);
}

/* ---- Many snapshots, full and incremental, while all kinds of things happen ---- */

#define OPEN_MAX 4
#define DONE_MAX 6

typedef struct view {
    sk_snapshot *snapshot; /* NULL: this place is free, or the snapshot was read to its end */
    sk_store *copy;        /* what was read so far, over the base's content */
    uint32_t epoch;
    bool is_delta;
    content content;
} view;

typedef struct world {
    sk_store *store;
    content now;
    view open[OPEN_MAX];
    view done[DONE_MAX]; /* the latest snapshots that were read completely */
    int done_next;
} world;

static void open_view(world *w, view *v, test_rng *rng) {
    uint32_t since[LEAVES];
    const view *base = &w->done[test_below(rng, DONE_MAX)];
    v->is_delta = base->copy != NULL && test_below(rng, 4) > 0;
    v->copy = open_two_states();
    sk_buf buf = {0};
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++) {
        /* since 0 asks for a whole leaf in the same snapshot */
        since[leaf] = v->is_delta && test_below(rng, 10) > 0 ? base->epoch : 0;
        if (since[leaf] == 0) continue;
        buf.len = 0;
        CHECK(sk_leaf_encode(base->copy, leaf, SK_ALL_STATES, 0, &buf) >= 0);
        CHECK_EQ(sk_leaf_decode(v->copy, leaf, buf.data, buf.len, SK_REPLACE), SK_OK);
    }
    sk_buf_free(&buf);
    CHECK_EQ(sk_snapshot_open(w->store, v->is_delta ? since : NULL, 0, &v->snapshot), SK_OK);
    v->epoch = sk_snapshot_epoch(v->snapshot);
    v->content = w->now;
}

static void read_view(world *w, view *v) {
    int64_t len = read_one(v->snapshot, v->copy, v->is_delta);
    if (len >= 0) return;
    CHECK_EQ(len, -SK_END);
    check_content(v->copy, &v->content);
    sk_snapshot_close(v->snapshot);
    v->snapshot = NULL;
    view *place = &w->done[w->done_next++ % DONE_MAX];
    if (place->copy != NULL) sk_close(place->copy);
    *place = *v;
}

/* Changes to whole leaves. */
static void disturb(world *w, test_rng *rng) {
    uint32_t leaf = (uint32_t)test_below(rng, LEAVES), state = (uint32_t)test_below(rng, 2);
    sk_buf buf = {0};
    sk_leaves *leaves = NULL;
    const view *old = &w->done[test_below(rng, DONE_MAX)];
    switch (test_below(rng, 5)) {
    case 0: /* out and in again */
        CHECK_EQ(sk_detach(w->store, leaf / 2, leaf, &leaves), SK_OK);
        CHECK_EQ(sk_attach(w->store, leaves), SK_OK);
        break;
    case 1: /* back to what an older snapshot had */
        if (old->copy == NULL) break;
        CHECK(sk_leaf_encode(old->copy, leaf, SK_ALL_STATES, 0, &buf) >= 0);
        CHECK_EQ(sk_leaf_decode(w->store, leaf, buf.data, buf.len, SK_REPLACE), SK_OK);
        for (uint32_t k = 0; k < KEYS; k++) {
            if (leaf_of[k] != leaf) continue;
            w->now.has_n[k] = old->content.has_n[k];
            w->now.n[k] = old->content.n[k];
            w->now.has_b[k] = old->content.has_b[k];
            w->now.b_len[k] = old->content.b_len[k];
        }
        break;
    case 2:
        CHECK_EQ(sk_clear(w->store, state, leaf, leaf + 1, 0), SK_OK);
        for (uint32_t k = 0; k < KEYS; k++)
            if (leaf_of[k] == leaf) *(state == 0 ? &w->now.has_n[k] : &w->now.has_b[k]) = false;
        break;
    case 3: /* through a store with a later epoch and back */
        if (leaf > 0) break;
        sk_store *other = util_open(8, 1);
        for (int i = 0; i < 5; i++) sk_epoch_advance(other);
        CHECK_EQ(sk_detach(w->store, 3, 6, &leaves), SK_OK);
        CHECK_EQ(sk_attach(other, leaves), SK_OK);
        CHECK_EQ(sk_detach(other, 3, 6, &leaves), SK_OK);
        CHECK_EQ(sk_attach(w->store, leaves), SK_OK);
        sk_close(other);
        break;
    default:
        sk_epoch_advance(w->store);
    }
    sk_buf_free(&buf);
}

static void run_world(uint64_t stream, bool tracks, bool writes_back) {
    static world w;
    test_rng rng = test_rng_new(stream);
    w = (world){.store = open_two_states()};
    CHECK_EQ(sk_write_back(w.store, writes_back), SK_OK);
    for (int step = 0; step < 4000; step++) {
        view *v = &w.open[test_below(&rng, OPEN_MAX)];
        unsigned what = (unsigned)test_below(&rng, 100);
        if (what < 60)
            change(w.store, &w.now, &rng);
        else if (what < 94 && v->snapshot != NULL)
            read_view(&w, v);
        else if (what < 94 && what >= 85)
            open_view(&w, v, &rng);
        else if (what == 94)
            disturb(&w, &rng);
        else if (what == 95 && tracks && w.done_next > 0) {
            uint32_t oldest = UINT32_MAX;
            for (int i = 0; i < DONE_MAX; i++)
                if (w.done[i].copy != NULL && w.done[i].epoch < oldest) oldest = w.done[i].epoch;
            CHECK_EQ(sk_track(w.store, oldest), SK_OK);
        } else if (what == 96 && v->snapshot != NULL) { /* given up */
            sk_snapshot_close(v->snapshot);
            sk_close(v->copy);
            *v = (view){0};
        } else if (what == 97 && writes_back) {
            sk_buf buf = {0};
            uint32_t leaf = (uint32_t)test_below(&rng, LEAVES);
            if (sk_dirty_take(w.store, leaf, 0, &buf) >= 0)
                CHECK_EQ(sk_dirty_done(w.store, leaf, 1), SK_OK);
            sk_buf_free(&buf);
        }
    }
    check_content(w.store, &w.now);
    for (int i = 0; i < OPEN_MAX; i++)
        while (w.open[i].snapshot != NULL) read_view(&w, &w.open[i]);
    for (int i = 0; i < DONE_MAX; i++)
        if (w.done[i].copy != NULL) sk_close(w.done[i].copy);
    sk_close(w.store);
}

static void test_snapshots_and_deltas_restore_to_the_moment_they_were_opened(void) {
    for (uint64_t stream = 0; stream < 24; stream++)
        run_world(100 + stream, stream % 2 == 1, stream % 4 >= 2);
}

/* ---- Deltas and tracking, one rule at a time ---- */

static uint64_t delta_entries(sk_store *store, uint32_t leaf, uint32_t since, bool *is_delta) {
    sk_buf buf = {0};
    sk_block_info info = {0};
    int64_t len = sk_leaf_encode(store, leaf, 0, since, &buf);
    CHECK(len >= 0);
    if (len > 0) CHECK_EQ(sk_block_read(buf.data, buf.len, &info), SK_OK);
    if (len > 0) CHECK_EQ(sk_block_check(buf.data, buf.len), SK_OK);
    sk_buf_free(&buf);
    *is_delta = info.is_delta;
    return len == 0 ? UINT64_MAX : info.entries;
}

static void test_tracked_deltas_hold_just_what_changed(void) {
    sk_store *store = util_open(1, 1);
    util_state(store, "n", SK_I64, "b");
    bool is_delta;
    for (uint32_t k = 0; k < 100; k++)
        CHECK_EQ(sk_i64_put(store, 0, keys[k].data, keys[k].len, k), SK_OK);
    CHECK_EQ(sk_track(store, sk_epoch(store)), SK_BAD_ARGUMENT); /* has not ended */
    uint32_t epoch = sk_epoch_advance(store);
    CHECK_EQ(sk_track(store, epoch), SK_OK);
    CHECK_EQ(delta_entries(store, 0, epoch, &is_delta), UINT64_MAX); /* nothing changed: no block */
    CHECK_EQ(sk_i64_put(store, 0, keys[1].data, keys[1].len, 5), SK_OK);
    CHECK_EQ(sk_delete(store, 0, keys[2].data, keys[2].len, 0), SK_OK);
    CHECK_EQ(sk_delete(store, 0, keys[3].data, keys[3].len, 0), SK_OK);
    CHECK_EQ(sk_i64_put(store, 0, keys[3].data, keys[3].len, 6), SK_OK);
    CHECK_EQ(delta_entries(store, 0, epoch, &is_delta), 3);
    CHECK(is_delta);
    uint32_t later = sk_epoch_advance(store);
    CHECK_EQ(sk_delete(store, 0, keys[4].data, keys[4].len, 0), SK_OK);
    CHECK_EQ(delta_entries(store, 0, later, &is_delta), 1);
    CHECK_EQ(delta_entries(store, 0, epoch, &is_delta), 4);
    CHECK_EQ(util_stats(store, 1).tombstones, 2);
    CHECK_EQ(util_stats(store, 1).entries, 98);
    /* once the older base is given up, deletions since it may be forgotten, and then there is no
     * delta since that base */
    CHECK_EQ(sk_track(store, later), SK_OK);
    CHECK_EQ(sk_leaf_mark(store, 0, 1, SK_WHOLE), SK_OK);
    CHECK_EQ(util_stats(store, 1).tombstones, 1);
    CHECK_EQ(delta_entries(store, 0, later, &is_delta), 1);
    CHECK(is_delta);
    CHECK_EQ(delta_entries(store, 0, epoch, &is_delta), 98);
    CHECK(!is_delta);
    sk_close(store);
}

static void test_untracked_deletions_make_the_delta_a_full_block(void) {
    sk_store *store = util_open(1, 1);
    util_state(store, "n", SK_I64, "b");
    bool is_delta = true;
    CHECK_EQ(sk_i64_put(store, 0, keys[1].data, keys[1].len, 1), SK_OK);
    uint32_t epoch = sk_epoch_advance(store);
    CHECK_EQ(sk_delete(store, 0, keys[1].data, keys[1].len, 0), SK_OK);
    CHECK_EQ(delta_entries(store, 0, epoch, &is_delta), 0); /* a full block of no entries */
    CHECK(!is_delta);
    uint32_t later = sk_epoch_advance(store);
    CHECK_EQ(delta_entries(store, 0, later, &is_delta), UINT64_MAX);
    sk_close(store);
}

static void test_what_came_from_the_home_is_no_change(void) {
    sk_store *store = util_open(1, 1);
    util_state(store, "n", SK_I64, "b");
    bool is_delta;
    int64_t value = 7;
    CHECK_EQ(sk_leaf_mark(store, 0, 1, SK_PARTIAL), SK_OK);
    uint32_t epoch = sk_epoch_advance(store);
    CHECK_EQ(sk_install(store, 0, keys[1].data, keys[1].len, (uint8_t *)&value, 8, SK_NO_TIME),
             SK_OK);
    CHECK_EQ(sk_install(store, 0, keys[2].data, keys[2].len, NULL, 0, SK_NO_TIME), SK_OK);
    CHECK_EQ(delta_entries(store, 0, epoch, &is_delta), UINT64_MAX);
    CHECK_EQ(sk_i64_put(store, 0, keys[2].data, keys[2].len, 1), SK_OK);
    CHECK_EQ(delta_entries(store, 0, epoch, &is_delta), 1);
    sk_close(store);
}

/* An entry is written home, evicted, and fetched again. It comes back as an entry that never
 * changed here, but a copy of the older state still needs it. */
static void test_change_that_was_evicted_and_came_back_is_in_the_delta(void) {
    sk_store *store = util_open(1, 1), *home = util_open(1, 1);
    util_state(store, "n", SK_I64, "b");
    bool is_delta;
    sk_buf buf = {0};
    CHECK_EQ(sk_i64_put(store, 0, keys[2].data, keys[2].len, 1), SK_OK);
    uint32_t epoch = sk_epoch_advance(store);
    CHECK_EQ(sk_track(store, epoch), SK_OK);
    CHECK_EQ(sk_i64_put(store, 0, keys[1].data, keys[1].len, 5), SK_OK);
    CHECK(sk_dirty_take(store, 0, 0, &buf) > 0);
    CHECK_EQ(sk_leaf_decode(home, 0, buf.data, buf.len, SK_OVER), SK_OK);
    CHECK_EQ(sk_dirty_done(store, 0, 1), SK_OK);
    CHECK(sk_evict(store, UINT64_MAX) >= 0);
    CHECK_EQ(sk_contains(store, 0, keys[1].data, keys[1].len), SK_UNKNOWN);
    buf.len = 0;
    CHECK(sk_leaf_encode(home, 0, SK_ALL_STATES, 0, &buf) > 0);
    CHECK_EQ(sk_leaf_decode(store, 0, buf.data, buf.len, SK_UNDER_ALL), SK_OK);
    CHECK_EQ(delta_entries(store, 0, epoch, &is_delta), 2);
    CHECK(!is_delta); /* all of it, because which entries changed is not known any more */
    sk_buf_free(&buf);
    sk_close(store);
    sk_close(home);
}

static void test_changed_leaves_are_those_that_changed(void) {
    sk_store *store = open_two_states();
    uint8_t changed[LEAVES];
    sk_buf buf = {0};
    test_rng rng = test_rng_new(9);
    for (uint32_t k = 0; k < KEYS; k++) put_b(store, k, 3);
    for (int round = 0; round < 200; round++) {
        uint32_t epoch = sk_epoch_advance(store), k = (uint32_t)test_below(&rng, KEYS);
        int64_t n;
        CHECK_EQ(sk_changed_leaves(store, epoch, changed), SK_OK);
        for (uint32_t i = 0; i < LEAVES; i++) CHECK_EQ(changed[i], 0);
        sk_i64_get(store, 0, keys[k].data, keys[k].len, &n); /* reading is no change */
        sk_delete(store, 0, keys[k].data, keys[k].len, 0);   /* nor is a deletion of nothing */
        CHECK(sk_dirty_take(store, leaf_of[k], 0, &buf) >= 0);
        CHECK_EQ(sk_dirty_done(store, leaf_of[k], 1), SK_OK);
        CHECK_EQ(sk_changed_leaves(store, epoch, changed), SK_OK);
        for (uint32_t i = 0; i < LEAVES; i++) CHECK_EQ(changed[i], 0);
        if (round % 3 == 0)
            put_b(store, k, (size_t)round);
        else if (round % 3 == 1)
            CHECK_EQ(sk_delete(store, 1, keys[k].data, keys[k].len, 0), SK_OK);
        else
            CHECK_EQ(sk_clear(store, 1, leaf_of[k], leaf_of[k] + 1, 0), SK_OK);
        CHECK_EQ(sk_changed_leaves(store, epoch, changed), SK_OK);
        for (uint32_t i = 0; i < LEAVES; i++) CHECK_EQ(changed[i], i == leaf_of[k]);
        for (uint32_t i = 0; i < KEYS; i++)
            if (leaf_of[i] == leaf_of[k]) put_b(store, i, 3);
    }
    sk_buf_free(&buf);
    sk_close(store);
}

static void test_delta_of_more_than_half_is_a_full_block_if_the_leaf_is_whole(void) {
    for (int residency = SK_WHOLE; residency <= SK_PARTIAL; residency++) {
        sk_store *store = util_open(1, 1);
        util_state(store, "n", SK_I64, "b");
        bool is_delta = false;
        for (uint32_t k = 0; k < 100; k++)
            CHECK_EQ(sk_i64_put(store, 0, keys[k].data, keys[k].len, k), SK_OK);
        uint32_t epoch = sk_epoch_advance(store);
        CHECK_EQ(sk_track(store, epoch), SK_OK);
        CHECK_EQ(sk_leaf_mark(store, 0, 1, residency), SK_OK);
        for (uint32_t k = 0; k < 50; k++)
            CHECK_EQ(sk_i64_put(store, 0, keys[k].data, keys[k].len, k), SK_OK);
        CHECK_EQ(delta_entries(store, 0, epoch, &is_delta), 50);
        CHECK(is_delta);
        CHECK_EQ(sk_delete(store, 0, keys[99].data, keys[99].len, 0), SK_OK);
        CHECK_EQ(delta_entries(store, 0, epoch, &is_delta), residency == SK_WHOLE ? 99 : 51);
        CHECK_EQ(is_delta, residency != SK_WHOLE);
        sk_close(store);
    }
}

/* A queue: keys come and go. Remembered deletions must not pile up, and deltas must still be
 * right. */
static void test_remembered_deletions_are_bounded_by_the_entries(void) {
    sk_store *store = util_open(1, 1), *copy = util_open(1, 1);
    util_state(store, "n", SK_I64, "i");
    bool is_delta = true;
    uint32_t epoch = sk_epoch_advance(store);
    CHECK_EQ(sk_track(store, epoch), SK_OK);
    uint64_t bytes = 0;
    sk_buf buf = {0}, a = {0}, b = {0};
    for (int64_t k = 0; k < 20000; k++) {
        util_key in = util_int_key(k), out = util_int_key(k - 100);
        CHECK_EQ(sk_i64_put(store, 0, in.data, 8, k), SK_OK);
        if (k >= 100) CHECK_EQ(sk_delete(store, 0, out.data, 8, 0), SK_OK);
        sk_stats stats = util_stats(store, 1);
        CHECK(stats.tombstones <= stats.entries + 64);
        if (k == 500) bytes = sk_bytes_used(store);
        if (k % 97 != 0) continue;
        /* the deltas add up to what the store has */
        buf.len = a.len = b.len = 0;
        CHECK(sk_leaf_encode(store, 0, 0, epoch, &buf) > 0);
        CHECK_EQ(sk_leaf_decode(copy, 0, buf.data, buf.len, SK_OVER), SK_OK);
        util_encode_all(store, 1, &a);
        util_encode_all(copy, 1, &b);
        CHECK(util_same(&a, &b));
        epoch = sk_epoch_advance(store);
    }
    CHECK(sk_bytes_used(store) <= 2 * bytes);
    CHECK(delta_entries(store, 0, epoch - 20, &is_delta) <= 100);
    CHECK(!is_delta);
    sk_buf_free(&buf);
    sk_buf_free(&a);
    sk_buf_free(&b);
    sk_close(store);
    sk_close(copy);
}

/* Deletions that the home has not been told yet stay, tracked or not. */
static void test_deletions_that_the_home_must_hear_of_are_not_forgotten(void) {
    sk_store *store = util_open(1, 1);
    util_state(store, "n", SK_I64, "i");
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    CHECK_EQ(sk_track(store, sk_epoch_advance(store)), SK_OK);
    for (int64_t k = 0; k < 1000; k++)
        CHECK_EQ(sk_i64_put(store, 0, util_int_key(k).data, 8, k), SK_OK);
    for (int64_t k = 0; k < 1000; k++)
        CHECK_EQ(sk_delete(store, 0, util_int_key(k).data, 8, 0), SK_OK);
    CHECK_EQ(util_stats(store, 1).tombstones, 1000);
    sk_buf buf = {0};
    sk_block_info info;
    CHECK(sk_dirty_take(store, 0, 0, &buf) > 0);
    CHECK_EQ(sk_block_read(buf.data, buf.len, &info), SK_OK);
    CHECK_EQ(info.entries, 1000);
    CHECK_EQ(sk_dirty_done(store, 0, 1), SK_OK);
    for (int64_t k = 0; k < 2; k++) { /* the next deletion notices that they may be forgotten */
        CHECK_EQ(sk_i64_put(store, 0, util_int_key(k + 2000).data, 8, k), SK_OK);
        CHECK_EQ(sk_delete(store, 0, util_int_key(k + 2000).data, 8, 0), SK_OK);
    }
    CHECK_EQ(util_stats(store, 1).tombstones, 2);
    sk_buf_free(&buf);
    sk_close(store);
}

/* ---- Filling ---- */

/* Two snapshots of one moment: sk_snapshot_fill must append what sk_snapshot_next gives, leaf by
 * leaf, and sealed. */
static void check_fill(uint64_t bytes_max, uint64_t records_max, bool is_delta, bool is_changing) {
    sk_store *store = open_two_states();
    static content now;
    test_rng rng = test_rng_new(11 + bytes_max);
    now = (content){0};
    for (int i = 0; i < 300; i++) change(store, &now, &rng);
    CHECK_EQ(sk_clear(store, 0, 2, 3, 0), SK_OK); /* a leaf without entries */
    CHECK_EQ(sk_clear(store, 1, 2, 3, 0), SK_OK);
    CHECK_EQ(sk_leaf_mark(store, 5, 6, SK_PARTIAL), SK_OK);
    CHECK_EQ(sk_leaf_mark(store, 6, 7, SK_AWAY), SK_OK);
    uint32_t since[LEAVES] = {0};
    for (int i = 0; i < LEAVES; i++) since[i] = i % 2 && is_delta ? sk_epoch(store) : 0;
    sk_epoch_advance(store);
    for (uint32_t k = 0; k < KEYS; k += 5)
        if (leaf_of[k] != 6 && leaf_of[k] != 2) put_b(store, k, 9);
    sk_snapshot *by_leaf = NULL, *by_fill = NULL;
    CHECK_EQ(sk_snapshot_open(store, since, 0, &by_leaf), SK_OK);
    CHECK_EQ(sk_snapshot_open(store, since, 0, &by_fill), SK_OK);
    sk_buf expected[LEAVES] = {{0}}, buf = {0};
    sk_filled records[LEAVES];
    uint32_t leaf, seen = 0;
    uint8_t residencies[LEAVES];
    for (sk_buf one = {0}; sk_snapshot_next(by_leaf, &leaf, &one) > 0; one = (sk_buf){0})
        expected[leaf] = one;
    CHECK_EQ(sk_buf_put(&buf, "the header of a pack, 64 bytes..", 32), SK_OK);
    for (;;) {
        uint32_t k = (uint32_t)test_below(&rng, KEYS);
        if (is_changing && leaf_of[k] != 6) put_b(store, k, 1);
        size_t start = buf.len;
        int64_t count = sk_snapshot_fill(by_fill, bytes_max, records, records_max, &buf);
        if (count == -SK_END) break;
        CHECK(count > 0 && (uint64_t)count <= records_max);
        if (count <= 0) break;
        /* no more leaves than needed */
        CHECK(count == 1 || records[count - 1].offset < bytes_max);
        for (int64_t i = 0; i < count; i++) {
            sk_filled r = records[i];
            seen |= 1u << r.leaf;
            CHECK_EQ(r.offset, start);
            start += r.length;
            CHECK_EQ(r.residency, r.leaf == 5 ? SK_PARTIAL : SK_WHOLE);
            CHECK_EQ(r.is_delta, since[r.leaf] > 0 || r.leaf == 5);
            CHECK_EQ(r.length, expected[r.leaf].len);
            for (size_t at = 0; at < r.length;) {
                sk_block_info info;
                uint8_t *block = buf.data + r.offset + at;
                CHECK_EQ(sk_block_verify(block, r.length - at, 0), SK_OK);
                memset(block + 4, 0, 4); /* next does not seal */
                CHECK_EQ(sk_block_read(block, r.length - at, &info), SK_OK);
                at += info.size;
            }
            CHECK(memcmp(buf.data + r.offset, expected[r.leaf].data, r.length) == 0);
        }
        CHECK_EQ(start, buf.len);
    }
    for (uint32_t i = 0; i < LEAVES; i++) CHECK_EQ(seen >> i & 1, expected[i].len > 0);
    CHECK_EQ(sk_snapshot_residencies(by_fill, residencies), SK_OK);
    for (uint32_t i = 0; i < LEAVES; i++) {
        CHECK_EQ(residencies[i], sk_snapshot_residency(by_fill, i));
        CHECK_EQ(residencies[i], i == 5 ? SK_PARTIAL : i == 6 ? SK_AWAY : SK_WHOLE);
        sk_buf_free(&expected[i]);
    }
    sk_snapshot_close(by_leaf);
    sk_snapshot_close(by_fill);
    sk_buf_free(&buf);
    sk_close(store);
}

static void test_filling_is_reading_leaf_after_leaf_and_sealing(void) {
    const uint64_t bytes[] = {0, 1, 1000, 3000, 1 << 20};
    for (size_t k = 0; k < 5; k++)
        for (int mode = 0; mode < 4; mode++) {
            check_fill(bytes[k], LEAVES, mode & 1, mode & 2);
            check_fill(bytes[k], 2, mode & 1, mode & 2);
        }
    sk_store *store = open_two_states();
    sk_snapshot *snapshot = NULL;
    sk_filled record;
    sk_buf buf = {0};
    CHECK_EQ(sk_snapshot_open(store, NULL, 0, &snapshot), SK_OK);
    CHECK_EQ(sk_snapshot_fill(snapshot, 100, &record, 0, &buf), -SK_BAD_ARGUMENT);
    CHECK_EQ(sk_snapshot_fill(snapshot, 100, &record, 1, &buf), -SK_END);
    sk_snapshot_close(snapshot);
    sk_close(store);
}

static void test_failure_after_the_first_leaf_is_told_by_the_next_call_and_loses_nothing(void) {
    sk_store *store = open_two_states(), *copy = open_two_states();
    static content now;
    test_rng rng = test_rng_new(12);
    now = (content){0};
    for (int i = 0; i < 500; i++) change(store, &now, &rng);
    const char *const points[] = {"native.leaf.encode", "native.snapshot.fill"};
    for (int64_t nth = 1; nth <= 2 * LEAVES; nth++) {
        sk_snapshot *snapshot = NULL;
        sk_filled records[LEAVES];
        sk_buf buf = {0};
        int failures = 0;
        CHECK_EQ(sk_snapshot_open(store, NULL, 0, &snapshot), SK_OK);
        CHECK_EQ(sk_leaf_mark(copy, 0, LEAVES, SK_ABSENT), SK_OK);
        CHECK_EQ(sk_leaf_mark(copy, 0, LEAVES, SK_WHOLE), SK_OK);
        CHECK_EQ(sk_failpoint_set(points[nth % 2], nth, 1, 0), SK_OK);
        for (int64_t count;
             (count = sk_snapshot_fill(snapshot, UINT64_MAX, records, LEAVES, &buf)) != -SK_END;) {
            failures += count < 0;
            if (count < 0) CHECK_EQ(count, -SK_NO_MEMORY);
            for (int64_t i = 0; i < count; i++)
                CHECK_EQ(sk_leaf_decode(copy, records[i].leaf, buf.data + records[i].offset,
                                        records[i].length, SK_REPLACE),
                         SK_OK);
        }
        /* If the failure comes after some leaves, that call reports no error, and the next one
         * succeeds because the point is off by then. */
        CHECK(failures <= 1);
        CHECK_EQ(sk_failpoint_set(points[nth % 2], 0, 0, 0), SK_OK);
        check_content(copy, &now);
        sk_snapshot_close(snapshot);
        sk_buf_free(&buf);
    }
    sk_close(store);
    sk_close(copy);
}

/* ---- The limit of the queue ---- */

static void test_reader_that_never_reads_is_overrun_and_writers_go_on(void) {
    sk_store *store = open_two_states(), *copy = open_two_states();
    static content now, then;
    test_rng rng = test_rng_new(5);
    now = (content){0};
    for (int i = 0; i < 500; i++) change(store, &now, &rng);
    then = now;
    sk_snapshot *stuck = NULL, *fine = NULL;
    CHECK_EQ(sk_snapshot_open(store, NULL, 1, &stuck), SK_OK);
    CHECK_EQ(sk_snapshot_open(store, NULL, 1 << 20, &fine), SK_OK);
    for (int i = 0; i < 500; i++) change(store, &now, &rng); /* waits once, for some 2 s */
    check_content(store, &now);
    CHECK_EQ(read_one(stuck, copy, false), -SK_OVERRUN);
    CHECK_EQ(read_one(stuck, copy, false), -SK_OVERRUN);
    CHECK(strstr(sk_reason(), "given up") != NULL);
    while (read_one(fine, copy, false) >= 0) continue;
    check_content(copy, &then); /* the other snapshot is not affected */
    sk_snapshot_close(stuck);
    sk_snapshot_close(fine);
    sk_close(store);
    sk_close(copy);
}

static void test_small_queue_is_no_trouble_if_the_reader_keeps_up(void) {
    sk_store *store = open_two_states(), *copy = open_two_states();
    static content now, then;
    test_rng rng = test_rng_new(6);
    now = (content){0};
    for (int i = 0; i < 500; i++) change(store, &now, &rng);
    then = now;
    sk_snapshot *snapshot = NULL;
    CHECK_EQ(sk_snapshot_open(store, NULL, 1, &snapshot), SK_OK);
    for (uint32_t k = 0; k < KEYS; k++) { /* each change queues at most one leaf */
        put_b(store, k, 1);
        now.has_b[k] = true;
        now.b_len[k] = 1;
        read_one(snapshot, copy, false);
    }
    CHECK_EQ(read_one(snapshot, copy, false), -SK_END);
    check_content(copy, &then);
    check_content(store, &now);
    sk_snapshot_close(snapshot);
    sk_close(store);
    sk_close(copy);
}

int main(void) {
    make_keys();
    RUN(test_snapshot_is_the_store_when_it_was_opened);
    RUN(test_snapshot_of_an_empty_store_ends_at_once);
    RUN(test_snapshots_and_deltas_restore_to_the_moment_they_were_opened);
    RUN(test_tracked_deltas_hold_just_what_changed);
    RUN(test_untracked_deletions_make_the_delta_a_full_block);
    RUN(test_what_came_from_the_home_is_no_change);
    RUN(test_change_that_was_evicted_and_came_back_is_in_the_delta);
    RUN(test_changed_leaves_are_those_that_changed);
    RUN(test_delta_of_more_than_half_is_a_full_block_if_the_leaf_is_whole);
    RUN(test_remembered_deletions_are_bounded_by_the_entries);
    RUN(test_deletions_that_the_home_must_hear_of_are_not_forgotten);
    RUN(test_filling_is_reading_leaf_after_leaf_and_sealing);
    RUN(test_failure_after_the_first_leaf_is_told_by_the_next_call_and_loses_nothing);
    RUN(test_reader_that_never_reads_is_overrun_and_writers_go_on);
    RUN(test_small_queue_is_no_trouble_if_the_reader_keeps_up);
    return test_report();
}
