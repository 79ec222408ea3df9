/*
 * test_ttl.c: entries that expire. The oracle is an array of (value, stamp) and the rule stamp +
 * ttl <= now, computed with 128 bits. The test sets the store's clock.
 */
#include "store_util.h"

#define LEAVES 4
#define LEAF_BITS 2
#define KEYS 60
#define TTL 100

typedef struct item {
    bool is_there;
    int64_t value, stamp;
} item;

typedef struct world {
    sk_store *store;
    uint32_t id;
    int clock, on_read;
    int64_t now; /* SK_NO_TIME: no watermark yet */
    int64_t first;
    item model[KEYS];
    util_key key[KEYS];
    uint32_t leaf[KEYS];
} world;

static bool is_live(const world *w, const item *e) {
    int64_t stamp = e->stamp == SK_NO_TIME ? w->first : e->stamp;
    if (!e->is_there || w->now == SK_NO_TIME || stamp == SK_NO_TIME) return e->is_there;
    return (__int128)stamp + TTL > w->now;
}

static void set_now(world *w, int64_t now) {
    CHECK_EQ(sk_time_set(w->store, w->clock, now), SK_OK);
    if (w->first == SK_NO_TIME) w->first = now;
    w->now = now;
    CHECK_EQ(sk_time(w->store, w->clock), now);
}

static world open_world(int clock, int on_read) {
    world w = {.store = util_open(LEAVES, 1), .clock = clock, .on_read = on_read};
    w.id = util_timed_state(w.store, "n", SK_I64, "b", TTL, clock, on_read);
    w.now = w.first = SK_NO_TIME;
    for (uint32_t k = 0; k < KEYS; k++) {
        w.key[k] = util_bytes_key(k);
        w.leaf[k] = util_leaf_of("b", &w.key[k], LEAF_BITS);
    }
    return w;
}

/* ---- One entry ---- */

static void test_an_entry_expires_when_its_time_to_live_has_passed(void) {
    const struct {
        int64_t stamp, ttl, now;
        bool is_expired;
    } cases[] = {
        {0, 1, 0, false},
        {0, 1, 1, true},
        {1000, 100, 1099, false},
        {1000, 100, 1100, true},
        {-50, 20, -31, false},
        {-50, 20, -30, true},
        {1000, 0, INT64_MAX, false}, /* 0: never */
        {INT64_MAX - 10, 100, INT64_MAX - 1, false},
        {INT64_MAX - 10, 100, INT64_MAX, true}, /* the sum counts as INT64_MAX */
        {INT64_MAX, INT64_MAX, INT64_MAX, true},
        {INT64_MIN + 1, INT64_MAX, -1, false},
        {INT64_MIN + 1, INT64_MAX, 0, true},
        {INT64_MIN + 1, 1, INT64_MAX, true},
        {5, INT64_MAX, INT64_MAX - 1, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int clock = SK_PROCESSING_TIME; clock <= SK_EVENT_TIME; clock++) {
            sk_store *store = util_open(1, 1);
            uint32_t id = util_timed_state(store, "n", SK_I64, "i", cases[i].ttl, clock, 0);
            util_key key = util_int_key(1);
            int64_t value = 0;
            CHECK_EQ(sk_time_set(store, clock, cases[i].stamp), SK_OK);
            CHECK_EQ(sk_i64_put(store, id, key.data, 8, 7), SK_OK);
            CHECK_EQ(sk_time_set(store, clock, cases[i].now), SK_OK);
            CHECK_EQ(sk_i64_get(store, id, key.data, 8, &value),
                     cases[i].is_expired ? SK_MISSING : SK_OK);
            CHECK_EQ(util_stats(store, 1).entries, !cases[i].is_expired);
            sk_close(store);
        }
}

static void test_clocks_go_forward_only(void) {
    sk_store *store = util_open(1, 1);
    CHECK_EQ(sk_time(store, SK_EVENT_TIME), SK_NO_TIME);
    int64_t last = sk_time(store, SK_PROCESSING_TIME);
    CHECK(last > 1600000000000);
    for (int i = 0; i < 1000; i++) {
        int64_t now = sk_time(store, SK_PROCESSING_TIME);
        CHECK(now >= last && now < last + 60000);
        last = now;
    }
    CHECK_EQ(sk_time_set(store, SK_EVENT_TIME, 50), SK_OK);
    CHECK_EQ(sk_time_set(store, SK_EVENT_TIME, 40), SK_OK);
    CHECK_EQ(sk_time_set(store, SK_EVENT_TIME, SK_NO_TIME), SK_OK);
    CHECK_EQ(sk_time(store, SK_EVENT_TIME), 50);
    CHECK_EQ(sk_time_set(store, SK_PROCESSING_TIME, 3), SK_OK);
    CHECK_EQ(sk_time(store, SK_PROCESSING_TIME), 3);
    CHECK_EQ(sk_time_set(store, SK_PROCESSING_TIME, SK_NO_TIME), SK_OK);
    CHECK(sk_time(store, SK_PROCESSING_TIME) >= last);
    CHECK_EQ(sk_time_set(store, 2, 1), SK_BAD_ARGUMENT);
    uint32_t plain = util_state(store, "plain", SK_I64, "i");
    uint32_t timed = util_timed_state(store, "timed", SK_I64, "i", 5, SK_EVENT_TIME, 0);
    CHECK_EQ(sk_state_ttl(store, plain, 5, 0, 0), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_state_ttl(store, timed, -1, 0, 0), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_state_ttl(store, timed, 5, 2, 0), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_state_ttl(store, 9, 5, 0, 0), SK_BAD_ARGUMENT);
    sk_close(store);
}

/* Every call on an expired entry behaves as if the entry had never existed. */
static void test_no_call_returns_what_has_expired(void) {
    for (int call = 0; call < 10; call++)
        for (int home = 0; home < 3; home++) {
            sk_store *store = util_open(1, 1);
            uint32_t n = util_timed_state(store, "n", SK_I64, "i", TTL, SK_PROCESSING_TIME, 0);
            uint32_t l = util_timed_state(store, "l", SK_LIST, "i", TTL, SK_PROCESSING_TIME, 0);
            util_key key = util_int_key(1);
            int64_t value = 0, five = 5;
            uint64_t cursor = 0, version = 0;
            uint8_t status = 0;
            sk_buf buf = {0};
            CHECK_EQ(sk_write_back(store, home == 1), SK_OK);
            if (home == 2) CHECK_EQ(sk_leaf_mark(store, 0, 1, SK_PARTIAL), SK_OK);
            CHECK_EQ(sk_time_set(store, SK_PROCESSING_TIME, 1000), SK_OK);
            CHECK_EQ(sk_i64_put(store, n, key.data, 8, 5), SK_OK);
            CHECK_EQ(sk_put(store, l, key.data, 8, (const uint8_t *)"\x91\x01", 2), SK_OK);
            CHECK_EQ(sk_time_set(store, SK_PROCESSING_TIME, 1000 + TTL), SK_OK);
            sk_batch_args args = {.n = 1,
                                  .keys = {SK_COL_I64, 0, key.data, NULL, 8},
                                  .operand_i64 = 2,
                                  .out = &value,
                                  .status = &status};
            switch (call) {
            case 0:
                CHECK_EQ(sk_i64_fold(store, n, key.data, 8, SK_ADD, 2, 10, &value), SK_OK);
                CHECK_EQ(value, 12);
                break;
            case 1:
                CHECK_EQ(sk_i64_cas(store, n, key.data, 8, &five, 6, &value), SK_MISSING);
                CHECK_EQ(sk_i64_cas(store, n, key.data, 8, NULL, 6, &value), SK_OK);
                break;
            case 2:
                CHECK_EQ(sk_contains(store, n, key.data, 8), SK_MISSING);
                CHECK_EQ(sk_get(store, n, key.data, 8, &buf), -SK_MISSING);
                break;
            case 3:
                CHECK_EQ(sk_delete(store, n, key.data, 8, SK_BLIND), SK_MISSING);
                break;
            case 4:
                CHECK_EQ(sk_write(store, l, key.data, 8, SK_W_APPEND, NULL, 0, "l", key.data, 1, 0,
                                  0, &buf),
                         0);
                CHECK_EQ(sk_read(store, l, key.data, 8, SK_R_LEN, NULL, 0, NULL, 0, 0, 0, &buf), 1);
                break;
            case 5:
                CHECK_EQ(sk_read(store, l, key.data, 8, SK_R_GET, NULL, 0, NULL, 0, 0, 0, &buf),
                         -SK_MISSING);
                CHECK_EQ(sk_page(store, l, key.data, 8, NULL, 0, &cursor, &version, 5, &buf),
                         -SK_MISSING);
                break;
            case 6:
                CHECK_EQ(sk_batch(store, n, SK_B_GET, &args), SK_OK);
                CHECK_EQ(status, SK_MISSING);
                break;
            case 7:
                CHECK_EQ(sk_batch(store, n, SK_B_ADD, &args), SK_OK);
                CHECK_EQ(value, 2);
                break;
            case 8:
                CHECK(sk_leaf_encode(store, 0, SK_ALL_STATES, 0, &buf) == 0);
                CHECK_EQ(sk_sweep(store, 100), 2);
                break;
            default: /* the home's answer has expired too, whatever is here */
                CHECK_EQ(sk_install(store, n, key.data, 8, (uint8_t *)&five, 8, 999), SK_OK);
                CHECK_EQ(sk_contains(store, n, key.data, 8), SK_MISSING);
            }
            CHECK_EQ(util_stats(store, 1).bytes, sk_bytes_used(store));
            sk_buf_free(&buf);
            sk_close(store);
        }
}

static void test_reading_touches_where_asked(void) {
    for (int batch = 0; batch < 2; batch++) {
        sk_store *store = util_open(1, 1);
        uint32_t n = util_timed_state(store, "n", SK_I64, "i", TTL, SK_PROCESSING_TIME, 1);
        util_key key = util_int_key(1);
        int64_t value = 0;
        uint8_t status = 0, changed = 0;
        sk_batch_args args = {
            .n = 1, .keys = {SK_COL_I64, 0, key.data, NULL, 8}, .out = &value, .status = &status};
        CHECK_EQ(sk_time_set(store, SK_PROCESSING_TIME, 0), SK_OK);
        CHECK_EQ(sk_i64_put(store, n, key.data, 8, 5), SK_OK);
        for (int64_t now = 60; now < 600; now += 60) {
            uint32_t since = sk_epoch_advance(store);
            CHECK_EQ(sk_time_set(store, SK_PROCESSING_TIME, now), SK_OK);
            CHECK_EQ(batch ? sk_batch(store, n, SK_B_GET, &args)
                           : sk_i64_get(store, n, key.data, 8, &value),
                     SK_OK);
            CHECK_EQ(value, 5);
            CHECK_EQ(sk_changed_leaves(store, since, &changed), SK_OK);
            CHECK_EQ(changed, 1); /* a delta must carry the new stamp */
        }
        CHECK_EQ(sk_time_set(store, SK_PROCESSING_TIME, 600 + TTL), SK_OK);
        CHECK_EQ(sk_contains(store, n, key.data, 8), SK_MISSING);
        sk_close(store);
    }
}

/* ---- Many entries, any order of calls ---- */

static void check_key(const world *w, sk_store *store, uint32_t k) {
    int64_t value = 0;
    const item *e = &w->model[k];
    int status = sk_i64_get(store, w->id, w->key[k].data, w->key[k].len, &value);
    CHECK_EQ(status, is_live(w, e) ? SK_OK : SK_MISSING);
    if (status == SK_OK) CHECK_EQ(value, e->value);
}

static void step_write(world *w, test_rng *rng, uint32_t k) {
    item *e = &w->model[k];
    int64_t by = (int64_t)test_below(rng, 1000), value = 0;
    util_key *key = &w->key[k];
    switch (test_below(rng, 3)) {
    case 0:
        CHECK_EQ(sk_i64_put(w->store, w->id, key->data, key->len, by), SK_OK);
        *e = (item){true, by, w->now};
        break;
    case 1:
        CHECK_EQ(sk_i64_fold(w->store, w->id, key->data, key->len, SK_ADD, by, 7, &value), SK_OK);
        *e = (item){true, (is_live(w, e) ? e->value : 7) + by, w->now};
        CHECK_EQ(value, e->value);
        break;
    default:
        CHECK_EQ(sk_delete(w->store, w->id, key->data, key->len, 0),
                 is_live(w, e) ? SK_OK : SK_MISSING);
        e->is_there = false;
    }
}

static void step_batch(world *w, test_rng *rng) {
    uint8_t keys[8 * UTIL_KEY_BYTES_MAX], status[8];
    int32_t at[9] = {0};
    int64_t out[8];
    uint32_t k[8];
    int op = test_below(rng, 2) ? SK_B_ADD : SK_B_GET;
    for (int r = 0; r < 8; r++) {
        k[r] = (uint32_t)test_below(rng, KEYS);
        memcpy(keys + at[r], w->key[k[r]].data, w->key[k[r]].len);
        at[r + 1] = at[r] + (int32_t)w->key[k[r]].len;
    }
    sk_batch_args args = {.n = 8,
                          .keys = {SK_COL_VAR32, 0, keys, at, sizeof keys},
                          .operand_i64 = 3,
                          .out = out,
                          .status = status};
    CHECK_EQ(sk_batch(w->store, w->id, op, &args), SK_OK);
    for (int r = 0; r < 8; r++) {
        item *e = &w->model[k[r]];
        bool was = is_live(w, e);
        if (op == SK_B_ADD) *e = (item){true, (was ? e->value : 0) + 3, w->now};
        if (op == SK_B_GET && was && w->on_read) e->stamp = w->now;
        CHECK_EQ(status[r], op == SK_B_ADD || was ? SK_OK : SK_MISSING);
        if (status[r] == SK_OK) CHECK_EQ(out[r], e->value);
    }
}

/* The entries of all leaves, read from blocks, are the live ones of the model. */
static void check_blocks(const world *w, sk_buf *blocks) {
    size_t live = 0, found = 0;
    for (uint32_t k = 0; k < KEYS; k++) live += is_live(w, &w->model[k]);
    for (size_t at = 0; at < blocks->len;) {
        sk_block_info info;
        uint8_t *block = blocks->data + at;
        CHECK_EQ(sk_block_read(block, blocks->len - at, &info), SK_OK);
        CHECK_EQ(sk_block_check(block, blocks->len - at), SK_OK);
        CHECK(info.is_timed && info.stamps != 0);
        found += info.entries;
        at += info.size;
    }
    CHECK_EQ(found, live);
}

static void step_leaves(world *w, test_rng *rng) {
    uint32_t leaf = (uint32_t)test_below(rng, LEAVES);
    sk_buf buf = {0}, again = {0};
    sk_leaves *leaves = NULL;
    switch (test_below(rng, 5)) {
    case 0:
        CHECK_EQ(sk_detach(w->store, leaf, LEAVES, &leaves), SK_OK);
        CHECK_EQ(sk_attach(w->store, leaves), SK_OK);
        break;
    case 1: /* decoding gives what was encoded, byte for byte */
        CHECK(sk_leaf_encode(w->store, leaf, w->id, 0, &buf) >= 0);
        CHECK_EQ(sk_leaf_decode(w->store, leaf, buf.data, buf.len, SK_REPLACE), SK_OK);
        CHECK(sk_leaf_encode(w->store, leaf, w->id, 0, &again) >= 0);
        CHECK(util_same(&buf, &again));
        for (uint32_t k = 0; k < KEYS; k++) /* blocks have the stamp that counts */
            if (w->leaf[k] == leaf && w->model[k].stamp == SK_NO_TIME) w->model[k].stamp = w->first;
        break;
    case 2:
        CHECK(sk_sweep(w->store, test_below(rng, 30)) >= 0);
        break;
    case 3:
        sk_epoch_advance(w->store);
        break;
    default:
        util_encode_all(w->store, LEAVES, &buf);
        check_blocks(w, &buf);
    }
    sk_buf_free(&buf);
    sk_buf_free(&again);
}

static void run_world(uint64_t stream, int clock, int on_read, bool tracks, bool writes_back) {
    world w = open_world(clock, on_read);
    test_rng rng = test_rng_new(stream);
    CHECK_EQ(sk_write_back(w.store, writes_back), SK_OK);
    if (tracks) CHECK_EQ(sk_track(w.store, 0), SK_OK);
    int64_t time = -200;
    if (clock == SK_PROCESSING_TIME) set_now(&w, time);
    for (int step = 0; step < 3000; step++) {
        uint32_t k = (uint32_t)test_below(&rng, KEYS);
        switch (test_below(&rng, 12)) {
        case 0:
            time += (int64_t)test_below(&rng, 40);
            if (step > 100) set_now(&w, time);
            break;
        case 1:
            step_leaves(&w, &rng);
            break;
        case 2:
            step_batch(&w, &rng);
            break;
        case 3:
        case 4:
        case 5:
            check_key(&w, w.store, k);
            if (on_read && is_live(&w, &w.model[k])) w.model[k].stamp = w.now;
            break;
        default:
            step_write(&w, &rng, k);
        }
    }
    CHECK(sk_sweep(w.store, UINT64_MAX) >= 0);
    sk_stats stats = util_stats(w.store, LEAVES);
    size_t live = 0;
    for (uint32_t k = 0; k < KEYS; k++) live += is_live(&w, &w.model[k]);
    CHECK_EQ(stats.entries, live);
    CHECK_EQ(stats.bytes, sk_bytes_used(w.store));
    for (uint32_t k = 0; k < KEYS; k++) check_key(&w, w.store, k);
    set_now(&w, INT64_MAX);
    CHECK_EQ(sk_sweep(w.store, UINT64_MAX), (int64_t)live);
    CHECK_EQ(util_stats(w.store, LEAVES).entries, 0);
    sk_close(w.store);
}

static void test_a_store_is_an_array_of_values_with_stamps(void) {
    for (uint64_t stream = 0; stream < 16; stream++)
        run_world(stream, stream & 1, stream >> 1 & 1, stream >> 2 & 1, stream >> 3 & 1);
}

/* ---- Copies elsewhere ---- */

/* When a base and its deltas are put together at any later time, they never show expired entries,
 * although expired entries leave no tombstones. The store starts without a watermark, so that the
 * base has entries without stamps. */
static void run_deltas(uint64_t stream, bool tracks) {
    world w = open_world(SK_EVENT_TIME, 0);
    test_rng rng = test_rng_new(100 + stream);
    sk_store *copy = util_open(LEAVES, 1);
    CHECK_EQ(util_timed_state(copy, "n", SK_I64, "b", TTL, SK_EVENT_TIME, 0), w.id);
    uint32_t since[LEAVES] = {0};
    sk_buf buf = {0};
    int64_t time = 1000;
    for (int round = 0; round < 12; round++) {
        for (int step = 0; step < 30; step++) {
            uint32_t k = (uint32_t)test_below(&rng, KEYS);
            if (test_below(&rng, 3) > 0)
                step_write(&w, &rng, k);
            else
                check_key(&w, w.store, k);
        }
        sk_snapshot *snapshot = NULL;
        uint32_t leaf;
        CHECK_EQ(sk_snapshot_open(w.store, round == 0 ? NULL : since, 0, &snapshot), SK_OK);
        for (buf.len = 0; sk_snapshot_next(snapshot, &leaf, &buf) > 0; buf.len = 0)
            CHECK_EQ(sk_leaf_decode(copy, leaf, buf.data, buf.len, SK_OVER), SK_OK);
        for (uint32_t i = 0; i < LEAVES; i++) since[i] = sk_snapshot_epoch(snapshot);
        if (tracks) CHECK_EQ(sk_track(w.store, since[0]), SK_OK);
        sk_snapshot_close(snapshot);
        if (round < 2) continue;
        time += (int64_t)test_below(&rng, 60);
        set_now(&w, time);
        if (round % 3 == 0) CHECK(sk_sweep(w.store, 40) >= 0);
        /* restored now: entries that have not expired are those of the store */
        if (round != 11) continue;
        CHECK_EQ(sk_time_set(copy, SK_EVENT_TIME, time), SK_OK);
        CHECK_EQ(sk_snapshot_open(w.store, since, 0, &snapshot), SK_OK);
        for (buf.len = 0; sk_snapshot_next(snapshot, &leaf, &buf) > 0; buf.len = 0)
            CHECK_EQ(sk_leaf_decode(copy, leaf, buf.data, buf.len, SK_OVER), SK_OK);
        sk_snapshot_close(snapshot);
        for (uint32_t k = 0; k < KEYS; k++) check_key(&w, copy, k);
    }
    sk_buf_free(&buf);
    sk_close(copy);
    sk_close(w.store);
}

static void test_checkpoints_of_entries_that_went_without_a_trace_are_right(void) {
    for (uint64_t stream = 0; stream < 40; stream++) run_deltas(stream, stream % 2);
}

/* Reads what changed after `since` into the copy. Returns the epoch in which that was taken. */
static uint32_t copy_changes(sk_store *store, sk_store *copy, uint32_t since) {
    sk_snapshot *snapshot = NULL;
    sk_buf buf = {0};
    uint32_t leaf, epochs[1] = {since};
    CHECK_EQ(sk_snapshot_open(store, epochs, 0, &snapshot), SK_OK);
    for (; sk_snapshot_next(snapshot, &leaf, &buf) > 0; buf.len = 0)
        CHECK_EQ(sk_leaf_decode(copy, leaf, buf.data, buf.len, SK_OVER), SK_OK);
    uint32_t epoch = sk_snapshot_epoch(snapshot);
    sk_snapshot_close(snapshot);
    sk_buf_free(&buf);
    return epoch;
}

/* The copy has an entry without a stamp, which it takes to be as old as its own first watermark.
 * That must not bring the entry back to life, whether a delta still had it alive or it was found
 * expired before. */
static void test_copies_from_before_the_first_watermark_do_not_come_back(void) {
    for (int found = 0; found < 2; found++)
        for (int tracks = 0; tracks < 2; tracks++) {
            sk_store *store = util_open(1, 1), *copy = util_open(1, 1);
            uint32_t id = util_timed_state(store, "n", SK_I64, "i", TTL, SK_EVENT_TIME, 0);
            util_timed_state(copy, "n", SK_I64, "i", TTL, SK_EVENT_TIME, 0);
            util_key key = util_int_key(1);
            int64_t value = 0;
            CHECK_EQ(sk_i64_put(store, id, key.data, 8, 5), SK_OK);
            uint32_t since = copy_changes(store, copy, 0);
            if (tracks) CHECK_EQ(sk_track(store, since), SK_OK);
            CHECK_EQ(sk_time_set(store, SK_EVENT_TIME, 1000), SK_OK);
            if (!found) since = copy_changes(store, copy, since);
            CHECK_EQ(sk_i64_get(store, id, key.data, 8, &value), SK_OK);
            CHECK_EQ(sk_time_set(store, SK_EVENT_TIME, 1000 + TTL), SK_OK);
            if (found) CHECK_EQ(sk_contains(store, id, key.data, 8), SK_MISSING);
            copy_changes(store, copy, since);
            CHECK_EQ(sk_time_set(copy, SK_EVENT_TIME, 1000 + TTL), SK_OK);
            CHECK_EQ(sk_contains(copy, id, key.data, 8), SK_MISSING);
            sk_close(store);
            sk_close(copy);
        }
}

static void test_stamps_do_not_fall_where_the_clock_is_behind(void) {
    sk_store *ahead = util_open(1, 1), *behind = util_open(1, 1);
    sk_leaves *leaves = NULL;
    util_key key = util_int_key(1);
    uint32_t id = util_timed_state(ahead, "n", SK_I64, "i", TTL, SK_EVENT_TIME, 0);
    util_timed_state(behind, "n", SK_I64, "i", TTL, SK_EVENT_TIME, 0);
    CHECK_EQ(sk_time_set(ahead, SK_EVENT_TIME, 1000), SK_OK);
    CHECK_EQ(sk_time_set(behind, SK_EVENT_TIME, 900), SK_OK);
    CHECK_EQ(sk_i64_put(ahead, id, key.data, 8, 5), SK_OK);
    CHECK_EQ(sk_detach(ahead, 0, 1, &leaves), SK_OK);
    CHECK_EQ(sk_attach(behind, leaves), SK_OK);
    CHECK_EQ(sk_i64_fold(behind, id, key.data, 8, SK_ADD, 1, 0, NULL), SK_OK);
    CHECK_EQ(sk_time_set(behind, SK_EVENT_TIME, 1000 + TTL - 1), SK_OK);
    CHECK_EQ(sk_contains(behind, id, key.data, 8), SK_OK);
    CHECK_EQ(sk_time_set(behind, SK_EVENT_TIME, 1000 + TTL), SK_OK);
    CHECK_EQ(sk_contains(behind, id, key.data, 8), SK_MISSING);
    sk_close(ahead);
    sk_close(behind);
}

static void test_a_home_forgets_what_has_expired(void) {
    for (int partial = 0; partial < 2; partial++) {
        sk_store *store = util_open(1, 1), *home = util_open(1, 1);
        uint32_t id = util_timed_state(store, "n", SK_I64, "i", TTL, SK_PROCESSING_TIME, 0);
        sk_buf buf = {0};
        CHECK_EQ(sk_write_back(store, !partial), SK_OK);
        if (partial) CHECK_EQ(sk_leaf_mark(store, 0, 1, SK_ABSENT), SK_OK);
        CHECK_EQ(sk_time_set(store, SK_PROCESSING_TIME, 0), SK_OK);
        for (int64_t k = 0; k < 10; k++) {
            util_key key = util_int_key(k);
            CHECK_EQ(sk_i64_put(store, id, key.data, 8, k), SK_OK);
        }
        CHECK(sk_dirty_take(store, 0, 0, &buf) > 0);
        CHECK_EQ(sk_leaf_decode(home, 0, buf.data, buf.len, SK_OVER), SK_OK);
        util_key kept = util_int_key(3);
        CHECK_EQ(sk_time_set(store, SK_PROCESSING_TIME, TTL - 1), SK_OK);
        CHECK_EQ(sk_i64_put(store, id, kept.data, 8, 33), SK_OK); /* while it is being written */
        CHECK_EQ(sk_time_set(store, SK_PROCESSING_TIME, TTL), SK_OK);
        util_key gone = util_int_key(4);
        CHECK_EQ(sk_contains(store, id, gone.data, 8), SK_MISSING); /* this one has expired */
        CHECK_EQ(sk_dirty_done(store, 0, 1), SK_OK);
        CHECK_EQ(util_stats(store, 1).dirty, 2);
        buf.len = 0;
        CHECK(sk_dirty_take(store, 0, 0, &buf) > 0); /* finds the other eight */
        CHECK_EQ(sk_leaf_decode(home, 0, buf.data, buf.len, SK_OVER), SK_OK);
        CHECK_EQ(sk_dirty_done(store, 0, 1), SK_OK);
        CHECK_EQ(util_stats(home, 1).entries, 1);
        CHECK_EQ(util_stats(store, 1).dirty, 0);
        CHECK_EQ(sk_leaf_mark(store, 0, 1, SK_WHOLE), SK_OK);
        CHECK_EQ(util_stats(store, 1).tombstones, 0);
        sk_buf_free(&buf);
        sk_close(store);
        sk_close(home);
    }
}

/* ---- Sweeps ---- */

static void test_sweeps_share_the_work_and_skip_what_cannot_expire(void) {
    sk_store *store = util_open(8, 1);
    uint32_t plain = util_state(store, "plain", SK_I64, "i");
    CHECK_EQ(sk_sweep(store, 1000), 0);
    uint32_t id = util_timed_state(store, "n", SK_I64, "i", TTL, SK_PROCESSING_TIME, 0);
    uint32_t other = util_timed_state(store, "m", SK_I64, "i", 0, SK_PROCESSING_TIME, 0);
    CHECK_EQ(sk_time_set(store, SK_PROCESSING_TIME, 0), SK_OK);
    for (int64_t k = 0; k < 1000; k++) {
        util_key key = util_int_key(k);
        CHECK_EQ(sk_i64_put(store, id, key.data, 8, k), SK_OK);
        CHECK_EQ(sk_i64_put(store, plain, key.data, 8, k), SK_OK);
        CHECK_EQ(sk_i64_put(store, other, key.data, 8, k), SK_OK);
    }
    CHECK_EQ(sk_sweep(store, UINT64_MAX), 0);
    CHECK_EQ(sk_time_set(store, SK_PROCESSING_TIME, TTL), SK_OK);
    uint64_t bytes = sk_bytes_used(store);
    int64_t removed = 0;
    for (int sweep = 0; sweep < 15; sweep++) {
        int64_t now = sk_sweep(store, 80);
        CHECK(now >= 0 && now <= 80);
        removed += now;
    }
    CHECK_EQ(removed, 1000);
    CHECK_EQ(util_stats(store, 8).entries, 2000);
    CHECK(sk_bytes_used(store) < bytes * 4 / 5); /* arrays shrink, too */
    CHECK_EQ(sk_sweep(store, 0), 0);
    sk_close(store);
}

/* ---- Blocks ---- */

static void test_blocks_carry_stamps(void) {
    sk_store *store = util_open(1, 1), *other = util_open(1, 1), *clash = util_open(1, 1);
    uint32_t id = util_timed_state(store, "n", SK_I64, "i", 0, SK_PROCESSING_TIME, 0);
    util_key key[2] = {util_int_key(1), util_int_key(2)};
    sk_buf buf = {0};
    sk_block_info info;
    const char *name, *type;
    int kind, flags = 0;
    CHECK_EQ(sk_leaf_mark(store, 0, 1, SK_PARTIAL), SK_OK);
    CHECK_EQ(sk_time_set(store, SK_PROCESSING_TIME, 77), SK_OK);
    CHECK_EQ(sk_i64_put(store, id, key[0].data, 8, 5), SK_OK);
    CHECK_EQ(sk_delete(store, id, key[1].data, 8, SK_BLIND), SK_OK);
    CHECK(sk_leaf_encode(store, 0, id, 0, &buf) > 0);
    CHECK_EQ(sk_block_read(buf.data, buf.len, &info), SK_OK);
    CHECK_EQ(info.is_timed, 1);
    CHECK_EQ(info.stamps % 8, 0);
    for (uint64_t i = 0; i < 2; i++) {
        int64_t stamp;
        memcpy(&stamp, buf.data + info.stamps + 8 * i, 8);
        CHECK_EQ(stamp, buf.data[info.marks + i] ? 0 : 77);
        if (!buf.data[info.marks + i]) continue;
        buf.data[info.stamps + 8 * i] = 1; /* a deletion must have no stamp */
        CHECK_EQ(sk_block_check(buf.data, buf.len), SK_CORRUPT);
        buf.data[info.stamps + 8 * i] = 0;
    }
    CHECK_EQ(sk_leaf_decode(other, 0, buf.data, buf.len, SK_OVER), SK_OK); /* declares the state */
    CHECK_EQ(sk_state_info(other, 0, &name, &kind, &type, &flags), SK_OK);
    CHECK_EQ(flags, SK_TIMED);
    CHECK_EQ(sk_state_ttl(other, 0, 10, SK_PROCESSING_TIME, 0), SK_OK);
    CHECK_EQ(sk_time_set(other, SK_PROCESSING_TIME, 86), SK_OK);
    CHECK_EQ(sk_contains(other, 0, key[0].data, 8), SK_OK);
    CHECK_EQ(sk_time_set(other, SK_PROCESSING_TIME, 87), SK_OK);
    CHECK_EQ(sk_contains(other, 0, key[0].data, 8), SK_MISSING);
    util_state(clash, "n", SK_I64, "i");
    CHECK_EQ(sk_leaf_decode(clash, 0, buf.data, buf.len, SK_OVER), SK_SCHEMA);
    sk_buf_free(&buf);
    sk_close(store);
    sk_close(other);
    sk_close(clash);
}

/* ---- Memory ---- */

/* Calls that find expired entries while the nth allocation fails. Entries that have not expired
 * must be as before, and the call must work the next time. */
static void test_failing_allocations_lose_nothing(void) {
    for (int call = 0; call < 6; call++)
        for (int64_t nth = 1; nth < 40; nth++) {
            world w = open_world(SK_PROCESSING_TIME, 1);
            test_rng rng = test_rng_new(7);
            sk_buf buf = {0}, blocks = {0};
            uint8_t status[1];
            int64_t out[1];
            util_key *key = &w.key[30];
            set_now(&w, 0);
            for (uint32_t k = 0; k < KEYS; k++) {
                if (k == KEYS / 2) set_now(&w, 50);
                step_write(&w, &rng, k);
            }
            CHECK(sk_leaf_encode(w.store, w.leaf[30], w.id, 0, &blocks) > 0);
            sk_snapshot *snapshot = NULL;
            if (call % 2) CHECK_EQ(sk_snapshot_open(w.store, NULL, 0, &snapshot), SK_OK);
            set_now(&w, TTL);
            sk_batch_args args = {.n = 1,
                                  .keys = {SK_COL_VAR32, 0, key->data,
                                           (int32_t[]){0, (int32_t)key->len}, (int64_t)key->len},
                                  .out = out,
                                  .status = status};
            sk_fail_alloc(nth, 0);
            int64_t result =
                call < 2   ? -sk_contains(w.store, w.id, key->data, key->len)
                : call < 3 ? sk_leaf_encode(w.store, w.leaf[30], w.id, 0, &buf)
                : call < 4 ? -sk_batch(w.store, w.id, SK_B_GET, &args)
                : call < 5 ? sk_dirty_take(w.store, w.leaf[30], 0, &buf)
                           : -sk_leaf_decode(w.store, w.leaf[30], blocks.data, blocks.len, SK_OVER);
            bool is_reached = sk_alloc_count() >= nth;
            sk_fail_alloc(0, 0);
            CHECK(result >= 0 || result == -SK_MISSING || is_reached);
            CHECK(result >= 0 || result == -SK_MISSING || result == -SK_NO_MEMORY);
            sk_snapshot_close(snapshot);
            if (call < 5 || result < 0)
                for (uint32_t k = 0; k < KEYS; k++) check_key(&w, w.store, k);
            CHECK_EQ(util_stats(w.store, LEAVES).bytes, sk_bytes_used(w.store));
            sk_buf_free(&buf);
            sk_buf_free(&blocks);
            sk_close(w.store);
            if (!is_reached) break;
        }
}

int main(void) {
    RUN(test_an_entry_expires_when_its_time_to_live_has_passed);
    RUN(test_clocks_go_forward_only);
    RUN(test_no_call_returns_what_has_expired);
    RUN(test_reading_touches_where_asked);
    RUN(test_a_store_is_an_array_of_values_with_stamps);
    RUN(test_checkpoints_of_entries_that_went_without_a_trace_are_right);
    RUN(test_copies_from_before_the_first_watermark_do_not_come_back);
    RUN(test_stamps_do_not_fall_where_the_clock_is_behind);
    RUN(test_a_home_forgets_what_has_expired);
    RUN(test_sweeps_share_the_work_and_skip_what_cannot_expire);
    RUN(test_blocks_carry_stamps);
    RUN(test_failing_allocations_lose_nothing);
    return test_report();
}
