/*
 * test_timers.c: due times under keys. The oracle has one bit per key and due time. Due times are
 * drawn from a small set, which includes the smallest and largest 64-bit numbers.
 */
#include "store_util.h"

#define LEAVES 8
#define LEAF_BITS 3
#define KEYS 40
#define DUES 24

static const int64_t ends[] = {INT64_MIN, INT64_MIN + 1, -1, 0, 1, INT64_MAX - 1, INT64_MAX};

/* The d-th due time, in ascending order. */
static int64_t due_of(int d) {
    if (d < 3) return ends[d];
    if (d < DUES - 2) return 100 * (d - 3);
    return ends[d - (DUES - 7)];
}

typedef struct world {
    sk_store *store;
    uint32_t id;
    bool is_set[KEYS][DUES];
    util_key key[KEYS];
    uint32_t leaf[KEYS];
} world;

static world open_world(void) {
    world w = {.store = util_open(LEAVES, 1)};
    util_state(w.store, "other", SK_I64, "i");
    w.id = util_state(w.store, "t", SK_TIMERS, "b");
    for (uint32_t k = 0; k < KEYS; k++) {
        w.key[k] = util_bytes_key(k);
        w.leaf[k] = util_leaf_of("b", &w.key[k], LEAF_BITS);
    }
    return w;
}

static int count_of(const world *w, uint32_t k) {
    int n = 0;
    for (int d = 0; d < DUES; d++) n += w->is_set[k][d];
    return n;
}

static void check_key(const world *w, sk_store *store, uint32_t k) {
    sk_buf buf = {0};
    int n = count_of(w, k), i = 0;
    CHECK_EQ(sk_get(store, w->id, w->key[k].data, w->key[k].len, &buf),
             n == 0 ? -SK_MISSING : 8 * n);
    for (int d = 0; d < DUES && buf.len == 8 * (size_t)n; d++) {
        int64_t due;
        if (!w->is_set[k][d]) continue;
        memcpy(&due, buf.data + 8 * i++, 8);
        CHECK_EQ(due, due_of(d));
    }
    sk_buf_free(&buf);
}

static int compare_keys(const util_key *a, const util_key *b) {
    int order = memcmp(a->data, b->data, a->len < b->len ? a->len : b->len);
    return order != 0 ? order : (a->len > b->len) - (a->len < b->len);
}

/* The records must be those that the model has in leaves [from, to) up to the watermark, in
 * order. */
static void check_records(world *w, const sk_buf *buf, int64_t found, uint32_t from, uint32_t to,
                          int64_t watermark, bool takes) {
    int64_t expected = 0, due, last_due = INT64_MIN;
    const util_key *last = NULL;
    size_t at = 0;
    for (uint32_t k = 0; k < KEYS; k++)
        for (int d = 0; d < DUES; d++)
            expected +=
                w->leaf[k] >= from && w->leaf[k] < to && w->is_set[k][d] && due_of(d) <= watermark;
    CHECK_EQ(found, expected);
    for (int64_t r = 0; r < found; r++) {
        uint32_t len, k = 0;
        int d = 0;
        memcpy(&due, buf->data + at, 8);
        memcpy(&len, buf->data + at + 8, 4);
        while (k < KEYS &&
               (w->key[k].len != len || memcmp(w->key[k].data, buf->data + at + 12, len)))
            k++;
        while (d < DUES && due_of(d) != due) d++;
        at += 12 + len;
        CHECK(k < KEYS && d < DUES);
        if (k == KEYS || d == DUES) return;
        CHECK(w->is_set[k][d] && due <= watermark && w->leaf[k] >= from && w->leaf[k] < to);
        CHECK(last == NULL || due > last_due ||
              (due == last_due && compare_keys(last, &w->key[k]) < 0));
        if (takes) w->is_set[k][d] = false;
        last_due = due;
        last = &w->key[k];
    }
    CHECK_EQ(at, buf->len);
}

static void step_due(world *w, test_rng *rng) {
    uint32_t from = (uint32_t)test_below(rng, LEAVES + 1);
    uint32_t to = from + (uint32_t)test_below(rng, LEAVES + 1 - from);
    if (test_below(rng, 2)) from = 0, to = LEAVES;
    int64_t watermark = due_of((int)test_below(rng, DUES));
    int flags = test_below(rng, 3) == 0 ? SK_PEEK : 0;
    sk_buf buf = {0};
    int64_t found = sk_timers_due(w->store, w->id, from, to, watermark, flags, &buf);
    check_records(w, &buf, found, from, to, watermark, flags == 0);
    sk_buf_free(&buf);
}

static void step_key(world *w, test_rng *rng) {
    uint32_t k = (uint32_t)test_below(rng, KEYS);
    int d = (int)test_below(rng, DUES);
    const util_key *key = &w->key[k];
    int64_t value[DUES];
    int n = 0;
    switch (test_below(rng, 8)) {
    case 0:
        CHECK_EQ(sk_timer_cancel(w->store, w->id, key->data, key->len, due_of(d)),
                 w->is_set[k][d] ? SK_OK : SK_MISSING);
        w->is_set[k][d] = false;
        break;
    case 1:
        CHECK_EQ(sk_delete(w->store, w->id, key->data, key->len, 0),
                 count_of(w, k) > 0 ? SK_OK : SK_MISSING);
        memset(w->is_set[k], 0, sizeof w->is_set[k]);
        break;
    case 2:
        for (d = 0; d < DUES; d++)
            if ((w->is_set[k][d] = test_below(rng, 2))) value[n++] = due_of(d);
        w->is_set[k][7] |= n == 0;
        if (n == 0) value[n++] = due_of(7);
        CHECK_EQ(sk_put(w->store, w->id, key->data, key->len, (uint8_t *)value, 8 * (size_t)n),
                 SK_OK);
        break;
    case 3:
        check_key(w, w->store, k);
        break;
    default:
        CHECK_EQ(sk_timer_set(w->store, w->id, key->data, key->len, due_of(d)), SK_OK);
        w->is_set[k][d] = true;
    }
}

static void check_next(const world *w) {
    int64_t next = INT64_MAX;
    for (uint32_t k = 0; k < KEYS; k++)
        for (int d = DUES - 1; d >= 0; d--)
            if (w->is_set[k][d] && due_of(d) < next) next = due_of(d);
    CHECK_EQ(sk_timers_next(w->store, w->id), next);
    CHECK_EQ(sk_value_status(), SK_OK);
    int64_t least = INT64_MAX;
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++) {
        int64_t due = sk_timers_next_of(w->store, w->id, leaf, leaf + 1);
        if (due < least) least = due;
    }
    CHECK_EQ(least, next);
    /* Nobody is told a time that is too late. With the calls above, none is too early either. */
    int64_t dues[LEAVES];
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++) dues[leaf] = INT64_MAX;
    CHECK_EQ(sk_timers_dues(w->store, w->id, 0, LEAVES, dues), SK_OK);
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++) {
        least = INT64_MAX;
        for (uint32_t k = 0; k < KEYS; k++)
            for (int d = 0; d < DUES; d++)
                if (w->leaf[k] == leaf && w->is_set[k][d] && due_of(d) < least) least = due_of(d);
        CHECK(dues[leaf] <= least);
        CHECK_EQ(sk_timers_next_of(w->store, w->id, leaf, leaf + 1), least);
        dues[leaf] = INT64_MAX;
        CHECK_EQ(sk_timers_dues(w->store, w->id, leaf, leaf + 1, dues + leaf), SK_OK);
        CHECK_EQ(dues[leaf], least);
    }
    CHECK_EQ(sk_timers_dues(w->store, w->id, 0, LEAVES + 1, dues), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_timers_next_of(w->store, w->id, 1, 1), INT64_MAX);
    CHECK_EQ(sk_timers_next_of(w->store, w->id, 0, LEAVES + 1), INT64_MIN);
    CHECK(sk_value_status() != SK_OK);
}

/* Leaves leave and come back: as blocks, as a snapshot, or moved as they are. */
static void step_leaves(world *w, test_rng *rng) {
    uint32_t leaf = (uint32_t)test_below(rng, LEAVES);
    sk_buf buf = {0};
    sk_leaves *leaves = NULL;
    sk_snapshot *snapshot = NULL;
    switch (test_below(rng, 5)) {
    case 0:
        CHECK_EQ(sk_detach(w->store, leaf, LEAVES, &leaves), SK_OK);
        CHECK_EQ(sk_timers_due(w->store, w->id, leaf, LEAVES, INT64_MAX, 0, &buf), 0);
        CHECK_EQ(sk_timer_set(w->store, w->id, w->key[0].data, w->key[0].len, 5),
                 w->leaf[0] >= leaf ? SK_NOT_OWNED : SK_OK);
        if (w->leaf[0] < leaf)
            CHECK_EQ(sk_timer_cancel(w->store, w->id, w->key[0].data, w->key[0].len, 5), SK_OK);
        CHECK_EQ(sk_attach(w->store, leaves), SK_OK);
        break;
    case 1:
        CHECK(sk_leaf_encode(w->store, leaf, SK_ALL_STATES, 0, &buf) >= 0);
        if (buf.len > 0) CHECK_EQ(sk_block_check(buf.data, buf.len), SK_OK);
        CHECK_EQ(sk_leaf_decode(w->store, leaf, buf.data, buf.len, SK_REPLACE), SK_OK);
        break;
    case 2: /* another store, filled from a snapshot, has the same timers */
        CHECK_EQ(sk_snapshot_open(w->store, NULL, 0, &snapshot), SK_OK);
        sk_store *copy = util_open(LEAVES, 1);
        util_state(copy, "other", SK_I64, "i");
        CHECK_EQ(util_state(copy, "t", SK_TIMERS, "b"), w->id);
        for (; sk_snapshot_next(snapshot, &leaf, &buf) > 0; buf.len = 0)
            CHECK_EQ(sk_leaf_decode(copy, leaf, buf.data, buf.len, SK_REPLACE), SK_OK);
        sk_snapshot_close(snapshot);
        for (uint32_t k = 0; k < KEYS; k++) check_key(w, copy, k);
        CHECK_EQ(sk_timers_next(copy, w->id), sk_timers_next(w->store, w->id));
        sk_close(copy);
        break;
    case 3: /* written home: then tombstones may be evicted, but no timers */
        CHECK(sk_dirty_take(w->store, leaf, 0, &buf) >= 0);
        CHECK_EQ(sk_dirty_done(w->store, leaf, 1), SK_OK);
        CHECK(sk_evict(w->store, UINT64_MAX) >= 0);
        CHECK_EQ(sk_leaf_mark(w->store, 0, LEAVES, SK_WHOLE), SK_OK);
        for (uint32_t k = 0; k < KEYS; k++) check_key(w, w->store, k);
        break;
    default:
        check_next(w);
    }
    sk_buf_free(&buf);
}

static void run_world(uint64_t stream, bool tracks, bool writes_back) {
    world w = open_world();
    test_rng rng = test_rng_new(stream);
    CHECK_EQ(sk_write_back(w.store, writes_back), SK_OK);
    if (tracks) CHECK_EQ(sk_track(w.store, 0), SK_OK);
    for (int step = 0; step < 4000; step++) {
        uint64_t what = test_below(&rng, 40);
        if (what == 0)
            step_due(&w, &rng);
        else if (what < 3)
            step_leaves(&w, &rng);
        else
            step_key(&w, &rng);
    }
    for (uint32_t k = 0; k < KEYS; k++) check_key(&w, w.store, k);
    sk_buf buf = {0};
    int64_t found = sk_timers_due(w.store, w.id, 0, LEAVES, INT64_MAX, 0, &buf);
    check_records(&w, &buf, found, 0, LEAVES, INT64_MAX, true);
    CHECK_EQ(util_stats(w.store, LEAVES).entries, 0);
    CHECK_EQ(util_stats(w.store, LEAVES).bytes, sk_bytes_used(w.store));
    check_next(&w);
    sk_buf_free(&buf);
    sk_close(w.store);
}

static void test_timers_are_sets_of_times(void) {
    for (uint64_t stream = 0; stream < 12; stream++) run_world(stream, stream % 2, stream % 3 == 0);
}

static void test_taken_timers_are_deletions_in_deltas(void) {
    sk_store *store = util_open(1, 1), *copy = util_open(1, 1);
    uint32_t id = util_state(store, "t", SK_TIMERS, "i");
    util_key key[2] = {util_int_key(1), util_int_key(2)};
    sk_buf buf = {0}, out = {0};
    CHECK_EQ(sk_timer_set(store, id, key[0].data, 8, 10), SK_OK);
    CHECK_EQ(sk_timer_set(store, id, key[1].data, 8, 10), SK_OK);
    CHECK_EQ(sk_timer_set(store, id, key[1].data, 8, 20), SK_OK);
    CHECK(sk_leaf_encode(store, 0, id, 0, &buf) > 0);
    CHECK_EQ(sk_leaf_decode(copy, 0, buf.data, buf.len, SK_OVER), SK_OK);
    uint32_t since = sk_epoch_advance(store);
    CHECK_EQ(sk_track(store, since), SK_OK);
    CHECK_EQ(sk_timers_due(store, id, 0, 1, 10, 0, &out), 2);
    buf.len = 0;
    CHECK(sk_leaf_encode(store, 0, id, since, &buf) > 0);
    CHECK_EQ(sk_leaf_decode(copy, 0, buf.data, buf.len, SK_OVER), SK_OK);
    CHECK_EQ(sk_contains(copy, 0, key[0].data, 8), SK_MISSING);
    CHECK_EQ(sk_timers_next(copy, 0), 20);
    CHECK_EQ(util_stats(store, 1).dirty, 2);
    sk_buf_free(&buf);
    sk_buf_free(&out);
    sk_close(store);
    sk_close(copy);
}

static void test_what_are_no_timers_is_refused(void) {
    sk_store *store = util_open(1, 1);
    uint32_t id = util_state(store, "t", SK_TIMERS, "i"), n = util_state(store, "n", SK_I64, "i"),
             x;
    util_key key = util_int_key(1);
    int64_t bad[3] = {5, 5, 3};
    sk_buf buf = {0};
    CHECK_EQ(sk_put(store, id, key.data, 8, (uint8_t *)bad, 0), SK_BAD_VALUE);
    CHECK_EQ(sk_put(store, id, key.data, 8, (uint8_t *)bad, 7), SK_BAD_VALUE);
    CHECK_EQ(sk_put(store, id, key.data, 8, (uint8_t *)bad, 16), SK_BAD_VALUE); /* not distinct */
    CHECK_EQ(sk_put(store, id, key.data, 8, (uint8_t *)(bad + 1), 16), SK_BAD_VALUE);
    CHECK_EQ(sk_timer_set(store, n, key.data, 8, 1), SK_BAD_KIND);
    CHECK_EQ(sk_timers_due(store, n, 0, 1, 1, 0, &buf), -SK_BAD_KIND);
    CHECK_EQ(sk_timers_due(store, 9, 0, 1, 1, 0, &buf), -SK_BAD_ARGUMENT);
    CHECK_EQ(sk_timers_due(store, id, 0, 2, 1, 0, &buf), -SK_BAD_ARGUMENT);
    CHECK_EQ(sk_timers_dues(store, n, 0, 1, bad), SK_BAD_KIND);
    CHECK_EQ(sk_timers_dues(store, 9, 0, 1, bad), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_timers_next(store, n), INT64_MIN);
    CHECK_EQ(sk_value_status(), SK_BAD_KIND);
    CHECK_EQ(sk_state_add(store, "u", SK_TIMERS, "i", SK_TIMED, &x), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_timer_set(store, id, key.data, 8, 1), SK_OK);
    CHECK_EQ(sk_timer_set(store, id, key.data, 8, 2), SK_OK);
    CHECK(sk_leaf_encode(store, 0, id, 0, &buf) > 0);
    sk_block_info info;
    CHECK_EQ(sk_block_read(buf.data, buf.len, &info), SK_OK);
    buf.data[info.values + 8] = 1; /* 1, 1 */
    CHECK_EQ(sk_block_check(buf.data, buf.len), SK_CORRUPT);
    CHECK_EQ(sk_leaf_decode(store, 0, buf.data, buf.len, SK_REPLACE), SK_CORRUPT);
    CHECK_EQ(sk_leaf_mark(store, 0, 1, SK_ABSENT), SK_OK);
    CHECK_EQ(sk_timer_set(store, id, key.data, 8, 1), SK_UNKNOWN);
    CHECK_EQ(sk_timer_cancel(store, id, key.data, 8, 1), SK_UNKNOWN);
    sk_buf_free(&buf);
    sk_close(store);
}

/* Whatever allocation fails, each timer is either delivered or still there. */
static void test_failing_allocations_lose_no_timer(void) {
    for (int call = 0; call < 4; call++)
        for (int64_t nth = 1; nth < 60; nth++) {
            world w = open_world();
            test_rng rng = test_rng_new(3);
            sk_buf buf = {0};
            sk_snapshot *snapshot = NULL;
            for (int step = 0; step < 300; step++) step_key(&w, &rng);
            if (call % 2) CHECK_EQ(sk_snapshot_open(w.store, NULL, 0, &snapshot), SK_OK);
            uint64_t bytes = sk_bytes_used(w.store);
            sk_fail_alloc(nth, 0);
            int64_t result = call < 2
                                 ? sk_timers_due(w.store, w.id, 0, LEAVES, 900, 0, &buf)
                                 : -sk_timer_set(w.store, w.id, w.key[7].data, w.key[7].len, 5);
            bool is_reached = sk_alloc_count() >= nth;
            sk_fail_alloc(0, 0);
            if (result < 0) {
                CHECK_EQ(result, -SK_NO_MEMORY);
                CHECK_EQ(buf.len, 0);
                CHECK_EQ(sk_bytes_used(w.store), bytes);
            } else if (call < 2) {
                check_records(&w, &buf, result, 0, LEAVES, 900, true);
            } else {
                CHECK_EQ(sk_timer_cancel(w.store, w.id, w.key[7].data, w.key[7].len, 5), SK_OK);
            }
            for (uint32_t k = 0; k < KEYS; k++) check_key(&w, w.store, k);
            sk_snapshot_close(snapshot);
            sk_buf_free(&buf);
            sk_close(w.store);
            if (!is_reached) break;
            CHECK(nth < 59);
        }
}

int main(void) {
    RUN(test_timers_are_sets_of_times);
    RUN(test_taken_timers_are_deletions_in_deltas);
    RUN(test_what_are_no_timers_is_refused);
    RUN(test_failing_allocations_lose_no_timer);
    return test_report();
}
