/*
 * test_dirty.c: what is dirty, and its way home as rows (csrc/dirty.c). The oracle is a plain
 * model: for each state and key its value, the home's, and whether it is dirty or being written.
 * Whatever happens, a take gives exactly the rows that the model calls dirty, and once all is
 * written home the home has the truth.
 */
#include "rows_util.h"
#include "store.h"

/* ---- Rows, one rule at a time ---- */

#define TAKE_ALL UINT64_MAX, UINT64_MAX

static void check_row(util_row row, uint32_t leaf, uint32_t number, const util_key *key,
                      const void *value, size_t len) {
    CHECK_EQ(row.leaf, leaf);
    CHECK_EQ(row.number, number);
    CHECK_EQ(row.key_len, key->len);
    CHECK(row.key_len == key->len && memcmp(row.key, key->data, key->len) == 0);
    CHECK_EQ(row.value != NULL, value != NULL);
    CHECK_EQ(row.value_len, len);
    CHECK(row.value_len == len && (len == 0 || memcmp(row.value, value, len) == 0));
}

/* Takes the one row that is dirty and says that it was written. */
static void check_one(sk_store *store, uint32_t state, uint32_t number, const util_key *key,
                      const void *value, size_t len) {
    int32_t numbers[8];
    uint64_t counts[8];
    for (uint32_t s = 0; s < 8; s++) numbers[s] = s == state ? (int32_t)number : -1;
    sk_buf buf = {0};
    CHECK_EQ(sk_buf_put(&buf, "before", 6), SK_OK);
    uint32_t leaf = 0;
    CHECK_EQ(sk_rows_take(store, &leaf, 0, TAKE_ALL, numbers, counts, 8, &buf), 1);
    CHECK_EQ(leaf, sk_leaf_count(store));
    for (uint32_t s = 0; s < 8; s++) CHECK_EQ(counts[s], s == state);
    CHECK(memcmp(buf.data, "before", 6) == 0); /* it appends */
    CHECK_EQ(util_rows_count(&buf, 6), 1);
    const uint8_t *p = buf.data + 11, *end = buf.data + buf.len;
    int64_t at = sk_key_leaf(store, state, key->data, key->len);
    check_row(util_next_row(&p, end), (uint32_t)at, number, key, value, len);
    CHECK(p == end);
    CHECK_EQ(sk_rows_done(store, 0, sk_leaf_count(store), 1), SK_OK);
    CHECK_EQ(util_stats(store, sk_leaf_count(store)).dirty, 0);
    sk_buf_free(&buf);
}

static void test_rows_of_each_kind_are_what_homes_keep(void) {
    sk_store *store = util_open(64, 2);
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    enum { I, F, B, L, T, TIMED_I, TIMED_L };
    CHECK_EQ(util_state(store, "i", SK_I64, "b"), I);
    CHECK_EQ(util_state(store, "f", SK_F64, "b"), F);
    CHECK_EQ(util_state(store, "b", SK_BYTES, "b"), B);
    CHECK_EQ(util_state(store, "l", SK_LIST, "b"), L);
    CHECK_EQ(util_state(store, "t", SK_TIMERS, "b"), T);
    CHECK_EQ(util_timed_state(store, "ti", SK_I64, "b", 1000, SK_PROCESSING_TIME, 0), TIMED_I);
    CHECK_EQ(util_timed_state(store, "tl", SK_LIST, "b", 1000, SK_PROCESSING_TIME, 0), TIMED_L);
    CHECK_EQ(sk_time_set(store, SK_PROCESSING_TIME, 0x0102030405), SK_OK);
    for (uint32_t k = 0; k < 40; k++) {
        util_key key = util_bytes_key(k);
        const uint8_t *data = key.data;
        CHECK_EQ(sk_i64_put(store, I, data, key.len, -2), SK_OK);
        check_one(store, I, 0, &key, "\xd3\xff\xff\xff\xff\xff\xff\xff\xfe", 9);
        CHECK_EQ(sk_f64_put(store, F, data, key.len, 1.5), SK_OK);
        check_one(store, F, 7, &key, "\xcb\x3f\xf8\0\0\0\0\0\0", 9);
        CHECK_EQ(sk_put(store, B, data, key.len, (const uint8_t *)"abc", 3), SK_OK);
        check_one(store, B, 0xffff, &key, "abc", 3);
        CHECK_EQ(sk_put(store, B, data, key.len, NULL, 0), SK_OK); /* empty, and no deletion */
        check_one(store, B, 256, &key, "", 0);
        CHECK_EQ(sk_put(store, L, data, key.len, (const uint8_t *)"\x93\x01\x02\x03", 4), SK_OK);
        check_one(store, L, 3, &key, "\x93\x01\x02\x03", 4);
        CHECK_EQ(sk_timer_set(store, T, data, key.len, 0x0203), SK_OK);
        check_one(store, T, 4, &key, "\x03\x02\0\0\0\0\0\0", 8);
        CHECK_EQ(sk_i64_put(store, TIMED_I, data, key.len, 1), SK_OK);
        check_one(store, TIMED_I, 5, &key,
                  "\xd7\xad\0\0\0\x01\x02\x03\x04\x05\xd3\0\0\0\0\0\0\0\x01", 19);
        CHECK_EQ(sk_put(store, TIMED_L, data, key.len, (const uint8_t *)"\x90", 1), SK_OK);
        check_one(store, TIMED_L, 6, &key, "\xd7\xad\0\0\0\x01\x02\x03\x04\x05\x90", 11);
        CHECK_EQ(sk_delete(store, TIMED_L, data, key.len, 0), SK_OK);
        check_one(store, TIMED_L, 6, &key, NULL, 0);
    }
    sk_close(store);
}

static void test_lengths_that_need_wider_heads_come_through(void) {
    static const size_t lengths[] = {0, 1, 255, 256, 65535, 65536, 70000};
    static uint8_t key[SK_KEY_BYTES_MAX], value[70000];
    sk_store *store = util_open(4, 2);
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    uint32_t b = util_state(store, "b", SK_BYTES, "b"), leaf;
    uint32_t n = util_state(store, "n", SK_NESTED, "b");
    const int32_t numbers[2] = {1, 2};
    uint64_t counts[2];
    sk_buf buf = {0}, nested = {0};
    for (size_t i = 0; i < sizeof value; i++) value[i] = (uint8_t)(i * 7);
    for (size_t i = 0; i < sizeof key; i++) key[i] = (uint8_t)(i * 3);
    for (size_t k = 0; k < sizeof lengths / sizeof lengths[0]; k++) {
        size_t key_len = lengths[k] < sizeof key ? lengths[k] : sizeof key;
        nested.len = buf.len = 0;
        uint8_t head[5] = {0xc6};
        util_put_be(head + 1, lengths[k], 4);
        CHECK_EQ(sk_buf_put(&nested, head, 5), SK_OK);
        CHECK_EQ(sk_buf_put(&nested, value, lengths[k]), SK_OK);
        CHECK_EQ(sk_put(store, b, key, key_len, value, lengths[k]), SK_OK);
        CHECK_EQ(sk_put(store, n, key, key_len, nested.data, nested.len), SK_OK);
        leaf = 0;
        CHECK_EQ(sk_rows_take(store, &leaf, 0, TAKE_ALL, numbers, counts, 2, &buf), 2);
        const uint8_t *p = buf.data + 5, *end = buf.data + buf.len;
        for (uint32_t number = 1; number <= 2; number++) {
            util_row row = util_next_row(&p, end);
            CHECK_EQ(row.number, number);
            CHECK(row.key_len == key_len && memcmp(row.key, key, key_len) == 0);
            const sk_buf expected =
                number == 1 ? (sk_buf){.data = value, .len = lengths[k]} : nested;
            CHECK(row.value != NULL && row.value_len == expected.len);
            CHECK(memcmp(row.value, expected.data, expected.len) == 0);
        }
        CHECK(p == end);
        CHECK_EQ(sk_rows_done(store, 0, 8, 1), SK_OK);
    }
    sk_buf_free(&buf);
    sk_buf_free(&nested);
    sk_close(store);
}

static void test_an_abandoned_take_leaves_no_trace(void) {
    sk_store *store = util_open(64, 2);
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    uint32_t id = util_state(store, "n", SK_I64, "i"), leaf = 0;
    const int32_t number = 0;
    uint64_t count;
    sk_buf first = {0}, again = {0};
    for (int64_t k = 0; k < 300; k++)
        CHECK_EQ(sk_i64_put(store, id, util_int_key(k).data, 8, k), SK_OK);
    sk_stats was = util_stats(store, 128);
    CHECK_EQ(sk_rows_take(store, &leaf, 0, TAKE_ALL, &number, &count, 1, &first), 300);
    /* interrupted; some of it changes to what it was meanwhile */
    CHECK_EQ(sk_i64_put(store, id, util_int_key(7).data, 8, 7), SK_OK);
    CHECK_EQ(util_stats(store, 128).dirty, was.dirty);
    leaf = 0;
    CHECK_EQ(sk_rows_take(store, &leaf, 0, TAKE_ALL, &number, &count, 1, &again), 300);
    CHECK(util_same(&first, &again));
    /* a done for other leaves does not speak for these */
    CHECK_EQ(sk_rows_done(store, 128, 128, 1), SK_OK);
    CHECK_EQ(sk_rows_done(store, 0, 0, 1), SK_OK);
    CHECK_EQ(util_stats(store, 128).dirty, 300);
    CHECK_EQ(sk_rows_done(store, 0, 64, 0), SK_OK);
    CHECK_EQ(util_stats(store, 128).dirty, 300);
    CHECK_EQ(sk_rows_done(store, 64, 128, 1), SK_OK);
    sk_stats upper;
    CHECK_EQ(sk_stats_read(store, SK_ALL_STATES, 64, 128, &upper), SK_OK);
    CHECK_EQ(upper.dirty, 0);
    leaf = 0;
    again.len = 0;
    int64_t rest = sk_rows_take(store, &leaf, 0, TAKE_ALL, &number, &count, 1, &again);
    CHECK_EQ(rest, util_stats(store, 128).dirty);
    CHECK(rest > 0 && rest < 300);
    CHECK_EQ(sk_rows_done(store, 0, 128, 1), SK_OK);
    CHECK_EQ(sk_rows_done(store, 0, 128, 1), SK_OK); /* twice does no harm */
    CHECK_EQ(util_stats(store, 128).dirty, 0);
    CHECK_EQ(sk_rows_done(store, 3, 2, 1), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_rows_done(store, 0, 129, 1), SK_BAD_ARGUMENT);
    sk_buf_free(&first);
    sk_buf_free(&again);
    sk_close(store);
}

static void test_what_changes_while_it_is_written_is_dirty_afterwards(void) {
    sk_store *store = util_open(4, 2);
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    uint32_t id = util_state(store, "n", SK_I64, "i"), leaf = 0;
    const int32_t number = 0;
    uint64_t count;
    sk_buf buf = {0};
    util_key a = util_int_key(1), b = util_int_key(2);
    CHECK_EQ(sk_i64_put(store, id, a.data, 8, 1), SK_OK);
    CHECK_EQ(sk_i64_put(store, id, b.data, 8, 1), SK_OK);
    CHECK_EQ(sk_rows_take(store, &leaf, 0, TAKE_ALL, &number, &count, 1, &buf), 2);
    CHECK_EQ(sk_delete(store, id, a.data, 8, 0), SK_OK);
    CHECK_EQ(sk_rows_done(store, 0, 8, 1), SK_OK);
    check_one(store, id, 0, &a, NULL, 0);
    sk_buf_free(&buf);
    sk_close(store);
}

static void test_a_state_without_a_number_is_named_and_nothing_is_taken(void) {
    sk_store *store = util_open(64, 2);
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    uint32_t one = util_state(store, "one", SK_I64, "i");
    uint32_t late = util_state(store, "late comer", SK_I64, "i");
    uint64_t counts[2] = {9, 9};
    sk_buf buf = {0};
    for (int64_t k = 0; k < 100; k++)
        CHECK_EQ(sk_i64_put(store, one, util_int_key(k).data, 8, k), SK_OK);
    CHECK_EQ(sk_i64_put(store, late, util_int_key(7).data, 8, 1), SK_OK);
    static const int32_t bad[] = {-1, INT32_MIN, 65536, INT32_MAX};
    for (uint32_t i = 0; i <= 4; i++) { /* the last: its id is unknown to the caller */
        const int32_t numbers[2] = {0, bad[i % 4]};
        uint32_t leaf = 0;
        CHECK_EQ(sk_rows_take(store, &leaf, 0, TAKE_ALL, numbers, counts, i < 4 ? 2 : 1, &buf),
                 -SK_BAD_ARGUMENT);
        CHECK(strstr(sk_reason(), "late comer") != NULL);
        CHECK_EQ(leaf, 0);
        CHECK_EQ(buf.len, 0);
        CHECK_EQ(counts[0], 0);
        CHECK_EQ(util_stats(store, 128).dirty, 101);
        /* nothing is being written: who says that it was is not believed */
        CHECK_EQ(sk_rows_done(store, 0, 128, 1), SK_OK);
        CHECK_EQ(util_stats(store, 128).dirty, 101);
    }
    uint32_t leaf = 0;
    CHECK_EQ(sk_rows_take(store, &leaf, 0, TAKE_ALL, (const int32_t[]){0, 1}, counts, 2, &buf),
             101);
    CHECK_EQ(counts[0], 100);
    CHECK_EQ(counts[1], 1);
    sk_buf_free(&buf);
    sk_close(store);
}

static void test_a_take_ends_at_its_limits_and_goes_on_where_it_ended(void) {
    sk_store *store = util_open(64, 2);
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    uint32_t id = util_state(store, "b", SK_BYTES, "i"), leaf = 0, takes = 0;
    const int32_t number = 0;
    uint64_t count, total = 0, leaves_dirty = 0;
    bool is_dirty[128] = {0};
    uint8_t value[100] = {0};
    sk_buf buf = {0};
    for (int64_t k = 0; k < 90; k++) {
        util_key key = util_int_key(k);
        CHECK_EQ(sk_put(store, id, key.data, 8, value, sizeof value), SK_OK);
        is_dirty[util_leaf_of("i", &key, 7)] = true;
    }
    for (int i = 0; i < 128; i++) leaves_dirty += is_dirty[i];
    for (int by_bytes = 0; by_bytes < 2; by_bytes++) {
        for (leaf = 0, takes = 0, total = 0; leaf < 128; takes++) {
            uint32_t from = leaf;
            buf.len = 0;
            int64_t rows = sk_rows_take(store, &leaf, 0, by_bytes ? UINT64_MAX : 1,
                                        by_bytes ? 1 : UINT64_MAX, &number, &count, 1, &buf);
            CHECK(rows > 0); /* *leaf says exactly whether there is more */
            CHECK_EQ(rows, count);
            total += (uint64_t)rows;
            const uint8_t *p = buf.data + 5;
            for (int64_t r = 0; r < rows; r++) {
                util_row row = util_next_row(&p, buf.data + buf.len);
                CHECK(row.leaf >= from && row.leaf < leaf);
            }
            CHECK_EQ(sk_rows_done(store, from, leaf, by_bytes), SK_OK);
        }
        CHECK_EQ(total, 90);
        CHECK_EQ(takes, leaves_dirty); /* one leaf at a time */
    }
    leaf = 0;
    CHECK_EQ(sk_rows_take(store, &leaf, 0, TAKE_ALL, &number, &count, 1, &buf), 0);
    CHECK_EQ(leaf, 128);
    CHECK_EQ(sk_rows_take(store, &leaf, 0, TAKE_ALL, &number, &count, 1, &buf), 0);
    leaf = 129;
    CHECK_EQ(sk_rows_take(store, &leaf, 0, TAKE_ALL, &number, &count, 1, &buf), -SK_BAD_ARGUMENT);
    sk_buf_free(&buf);
    sk_close(store);
}

static void test_turning_write_back_on_finds_what_is_dirty_already(void) {
    sk_store *store = util_open(64, 2);
    uint32_t id = util_state(store, "n", SK_I64, "i"), leaf = 0;
    const int32_t number = 0;
    uint64_t count;
    sk_buf buf = {0};
    for (int64_t k = 0; k < 50; k++)
        CHECK_EQ(sk_i64_put(store, id, util_int_key(k).data, 8, k), SK_OK);
    CHECK_EQ(sk_rows_take(store, &leaf, 0, TAKE_ALL, &number, &count, 1, &buf), -SK_BAD_ARGUMENT);
    CHECK(strstr(sk_reason(), "off") != NULL);
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    CHECK_EQ(sk_rows_take(store, &leaf, 0, TAKE_ALL, &number, &count, 1, &buf), 50);
    CHECK_EQ(sk_rows_done(store, 0, 128, 1), SK_OK);
    CHECK_EQ(sk_write_back(store, 0), SK_OK);
    CHECK_EQ(sk_i64_put(store, id, util_int_key(3).data, 8, 0), SK_OK);
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    util_key key = util_int_key(3);
    check_one(store, id, 0, &key, "\xd3\0\0\0\0\0\0\0\0", 9);
    sk_buf_free(&buf);
    sk_close(store);
}

static void test_a_dirty_entry_that_went_without_a_trace_has_no_row(void) {
    sk_store *store = util_open(1, 1);
    uint32_t id = util_state(store, "n", SK_I64, "i"), leaf = 0;
    util_key gone = util_int_key(1), kept = util_int_key(2);
    const int32_t number = 0;
    uint64_t count;
    sk_buf buf = {0};
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    CHECK_EQ(sk_i64_put(store, id, gone.data, 8, 1), SK_OK);
    CHECK_EQ(sk_i64_put(store, id, kept.data, 8, 1), SK_OK);
    CHECK_EQ(sk_rows_take(store, &leaf, 0, TAKE_ALL, &number, &count, 1, &buf), 2);
    CHECK_EQ(sk_rows_done(store, 0, 1, 1), SK_OK);
    CHECK_EQ(sk_i64_put(store, id, gone.data, 8, 2), SK_OK);
    CHECK_EQ(sk_write_back(store, 0), SK_OK);
    CHECK_EQ(sk_delete(store, id, gone.data, 8, 0), SK_OK); /* no tombstone */
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    CHECK_EQ(sk_i64_put(store, id, kept.data, 8, 2), SK_OK);
    check_one(store, id, 0, &kept, "\xd3\0\0\0\0\0\0\0\x02", 9);
    sk_buf_free(&buf);
    sk_close(store);
}

static void test_what_comes_with_leaves_is_noted_and_what_goes_with_them_is_not_missed(void) {
    sk_store *from = util_open(64, 2), *to = util_open(64, 2);
    uint32_t id = util_state(from, "n", SK_I64, "i"), leaf = 0;
    const int32_t number = 0;
    uint64_t count;
    sk_leaves *leaves = NULL;
    sk_buf buf = {0};
    CHECK_EQ(sk_write_back(to, 1), SK_OK);
    CHECK_EQ(sk_leaf_mark(to, 0, 128, SK_AWAY), SK_OK);
    for (int64_t k = 0; k < 100; k++) /* in a store that writes nothing home */
        CHECK_EQ(sk_i64_put(from, id, util_int_key(k).data, 8, k), SK_OK);
    CHECK_EQ(sk_detach(from, 0, 128, &leaves), SK_OK);
    CHECK_EQ(sk_attach(to, leaves), SK_OK);
    CHECK_EQ(sk_rows_take(to, &leaf, 0, TAKE_ALL, &number, &count, 1, &buf), 100);
    CHECK_EQ(sk_leaf_mark(to, 0, 128, SK_ABSENT), SK_OK);
    leaf = 0;
    CHECK_EQ(sk_rows_take(to, &leaf, 0, TAKE_ALL, &number, &count, 1, &buf), 0);
    for (uint32_t i = 0; i < 2; i++) CHECK_EQ(to->dirty[i], 0); /* and nobody looks again */
    sk_buf_free(&buf);
    sk_close(from);
    sk_close(to);
}

static void test_the_home_is_told_what_has_expired_where_it_is_told_anything(void) {
    sk_store *store = util_open(1, 1);
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    uint32_t id = util_timed_state(store, "x", SK_I64, "i", 10, SK_PROCESSING_TIME, 0), leaf = 0;
    util_key old = util_int_key(1), young = util_int_key(2);
    const int32_t number = 0;
    uint64_t count;
    sk_buf buf = {0};
    CHECK_EQ(sk_time_set(store, SK_PROCESSING_TIME, 100), SK_OK);
    CHECK_EQ(sk_i64_put(store, id, old.data, 8, 1), SK_OK);
    CHECK_EQ(sk_rows_take(store, &leaf, 0, TAKE_ALL, &number, &count, 1, &buf), 1);
    CHECK_EQ(sk_rows_done(store, 0, 1, 1), SK_OK);
    CHECK_EQ(sk_time_set(store, SK_PROCESSING_TIME, 110), SK_OK);
    CHECK_EQ(sk_i64_put(store, id, young.data, 8, 1), SK_OK);
    leaf = 0;
    buf.len = 0;
    CHECK_EQ(sk_rows_take(store, &leaf, 0, TAKE_ALL, &number, &count, 1, &buf), 2);
    const uint8_t *p = buf.data + 5;
    for (int i = 0; i < 2; i++) {
        util_row row = util_next_row(&p, buf.data + buf.len);
        CHECK_EQ(row.value == NULL, memcmp(row.key, old.data, 8) == 0);
    }
    sk_buf_free(&buf);
    sk_close(store);
}

static void test_an_entry_that_came_without_a_stamp_is_to_be_written(void) {
    sk_store *store = util_open(64, 2);
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    uint32_t id = util_timed_state(store, "x", SK_I64, "i", 10, SK_PROCESSING_TIME, 0), leaf = 0;
    util_key key = util_int_key(1), other = util_int_key(2);
    const uint8_t one[8] = {1};
    const int32_t number = 0;
    uint64_t count;
    sk_buf buf = {0};
    CHECK_EQ(sk_time_set(store, SK_PROCESSING_TIME, 100), SK_OK);
    CHECK_EQ(sk_leaf_mark(store, 0, 128, SK_ABSENT), SK_OK);
    CHECK_EQ(sk_install(store, id, key.data, 8, one, 8, 95), SK_OK);
    CHECK_EQ(sk_install(store, id, other.data, 8, NULL, 0, SK_NO_TIME), SK_OK);
    CHECK_EQ(sk_rows_take(store, &leaf, 0, TAKE_ALL, &number, &count, 1, &buf), 0);
    for (uint32_t i = 0; i < 2; i++) CHECK_EQ(store->dirty[i], 0); /* it was not even noted */
    CHECK_EQ(sk_leaf_mark(store, 0, 128, SK_ABSENT), SK_OK);
    CHECK_EQ(sk_install(store, id, key.data, 8, one, 8, SK_NO_TIME), SK_OK);
    check_one(store, id, 0, &key, "\xd7\xad\0\0\0\0\0\0\0\x64\xd3\0\0\0\0\0\0\0\x01", 19);
    sk_buf_free(&buf);
    sk_close(store);
}

/* ---- All together, against a model ---- */

#define KEYS 240
enum { N, B, X, STATES }; /* i64, bytes, bytes with a time to live */
static const int32_t NUMBERS[STATES] = {5, 0, 777};
#define TTL 50

typedef struct cell {
    bool is_here, is_home; /* an entry exists, and at home */
    uint8_t value, home;   /* what a value is made of */
    int64_t stamp;         /* X: when it was written */
    int64_t home_stamp;
    bool is_dirty, is_writing, is_used;
} cell;

typedef struct world {
    sk_store *store, *other; /* leaves may be with either */
    uint32_t leaf_count;
    unsigned leaf_bits;
    cell cells[STATES][KEYS];
    uint32_t leaf_of[KEYS];
    int64_t now;
    test_rng rng;
} world;

static bool is_expired(const world *w, int s, const cell *c) {
    return s == X && c->is_here && c->stamp + TTL <= w->now;
}

/* The home has an entry that has not expired there. */
static bool is_at_home(const world *w, int s, const cell *c) {
    return c->is_home && (s != X || c->home_stamp + TTL > w->now);
}

static size_t value_bytes(int s, uint8_t value, uint8_t *out) {
    if (s == N) {
        int64_t n = value * 1000003LL;
        memcpy(out, &n, 8);
        return 8;
    }
    size_t len = value % 90;
    memset(out, value, len);
    return len;
}

static size_t row_bytes(int s, const cell *c, uint8_t *out) {
    if (s == N) {
        out[0] = 0xd3;
        util_put_be(out + 1, (uint64_t)(c->value * 1000003LL), 8);
        return 9;
    }
    if (s == B) return value_bytes(s, c->value, out);
    out[0] = 0xd7;
    out[1] = 0xad;
    util_put_be(out + 2, (uint64_t)c->stamp, 8);
    return 10 + value_bytes(s, c->value, out + 10);
}

static void touch(world *w, int s, uint32_t k) {
    cell *c = &w->cells[s][k];
    c->is_dirty = c->is_used = true;
    c->stamp = w->now;
}

static void step_put(world *w, int s, uint32_t k) {
    cell *c = &w->cells[s][k];
    uint8_t data[128], value = (uint8_t)test_below(&w->rng, 256);
    size_t len = value_bytes(s, value, data);
    CHECK_EQ(sk_put(w->store, (uint32_t)s, util_int_key(k).data, 8, data, len), SK_OK);
    c->is_here = true;
    c->value = value;
    touch(w, s, k);
}

/* Makes the store know the entry, as a fetch would. */
static int resolve(world *w, int s, uint32_t k) {
    cell *c = &w->cells[s][k];
    util_key key = util_int_key(k);
    int status = sk_contains(w->store, (uint32_t)s, key.data, 8);
    if (status == SK_UNKNOWN) {
        uint8_t data[128];
        size_t len = value_bytes(s, c->home, data);
        CHECK(!c->is_dirty && !c->is_writing);
        CHECK_EQ(sk_install(w->store, (uint32_t)s, key.data, 8, c->is_home ? data : NULL, len,
                            c->is_home ? c->home_stamp : SK_NO_TIME),
                 SK_OK);
        status = sk_contains(w->store, (uint32_t)s, key.data, 8);
    }
    CHECK_EQ(status, c->is_here ? SK_OK : SK_MISSING);
    c->is_used = true;
    return status;
}

static void step_delete(world *w, int s, uint32_t k) {
    cell *c = &w->cells[s][k];
    int known = resolve(w, s, k);
    CHECK_EQ(sk_delete(w->store, (uint32_t)s, util_int_key(k).data, 8, 0), known);
    if (known != SK_OK) return;
    c->is_here = false;
    touch(w, s, k);
}

static void step_batch(world *w) {
    int64_t keys[40], n = 1 + (int64_t)test_below(&w->rng, 40);
    uint8_t status[40];
    for (int64_t i = 0; i < n; i++) {
        keys[i] = (int64_t)test_below(&w->rng, KEYS);
        resolve(w, N, (uint32_t)keys[i]);
    }
    sk_batch_args args = {.n = n,
                          .keys = {SK_COL_I64, 0, keys, NULL, 8 * n},
                          .operand_i64 = 1000003,
                          .status = status};
    CHECK_EQ(sk_batch(w->store, N, SK_B_ADD, &args), SK_OK);
    for (int64_t i = 0; i < n; i++) {
        cell *c = &w->cells[N][keys[i]];
        if (c->value == 255 && c->is_here) abort(); /* the caller keeps values small */
        c->value = c->is_here ? (uint8_t)(c->value + 1) : 1;
        c->is_here = true;
        touch(w, N, (uint32_t)keys[i]);
    }
}

/* Clearing writes tombstones where leaves are whole, else drops what is here. */
static void step_clear(world *w, int s) {
    uint32_t from = (uint32_t)test_below(&w->rng, w->leaf_count);
    uint32_t to = from + (uint32_t)test_below(&w->rng, w->leaf_count - from) / 8 + 1;
    for (uint32_t k = 0; k < KEYS; k++) {
        cell *c = &w->cells[s][k];
        if (w->leaf_of[k] < from || w->leaf_of[k] >= to) continue;
        bool is_whole = sk_leaf_residency(w->store, w->leaf_of[k]) == SK_WHOLE;
        if (is_whole && (c->is_here || c->is_writing)) {
            if (c->is_here) touch(w, s, k);
        } else if (!is_whole) { /* the caller clears the home himself */
            c->is_home = c->is_dirty = c->is_writing = false;
        }
        c->is_here = false;
    }
    CHECK_EQ(sk_clear(w->store, (uint32_t)s, from, to, SK_BLIND), SK_OK);
}

static void step_evict(world *w) {
    CHECK(sk_evict(w->store, UINT64_MAX) >= 0);
    for (int s = 0; s < STATES; s++)
        for (uint32_t k = 0; k < KEYS; k++) w->cells[s][k].is_used = false;
}

/* Leaves go to another store that writes back, and come back; what was being written is dirty. */
static void step_move(world *w) {
    uint32_t from = (uint32_t)test_below(&w->rng, w->leaf_count);
    uint32_t to = from + 1 + (uint32_t)test_below(&w->rng, w->leaf_count - from) / 4;
    sk_leaves *stuck = NULL;
    if (test_below(&w->rng, 2)) {
        CHECK_EQ(sk_move(w->store, w->other, from, to, &stuck), SK_OK);
        CHECK_EQ(sk_move(w->other, w->store, from, to, &stuck), SK_OK);
    } else {
        CHECK_EQ(sk_detach(w->store, from, to, &stuck), SK_OK);
        CHECK_EQ(sk_attach(w->store, stuck), SK_OK);
    }
    for (int s = 0; s < STATES; s++)
        for (uint32_t k = 0; k < KEYS; k++) {
            cell *c = &w->cells[s][k];
            if (w->leaf_of[k] < from || w->leaf_of[k] >= to) continue;
            c->is_dirty |= c->is_writing;
            c->is_writing = false;
        }
}

/* A leaf is dropped here, and is what its home says from then on. */
static void step_mark(world *w) {
    uint32_t leaf = (uint32_t)test_below(&w->rng, w->leaf_count);
    CHECK_EQ(sk_leaf_mark(w->store, leaf, leaf + 1, SK_ABSENT), SK_OK);
    for (int s = 0; s < STATES; s++)
        for (uint32_t k = 0; k < KEYS; k++) {
            cell *c = &w->cells[s][k];
            if (w->leaf_of[k] != leaf) continue;
            *c = (cell){.is_here = is_at_home(w, s, c),
                        .is_home = c->is_home,
                        .value = c->home,
                        .home = c->home,
                        .stamp = c->home_stamp,
                        .home_stamp = c->home_stamp};
        }
}

/* Time passes, and what has expired is swept. It is brought here first, as the model does not know
 * what was evicted. */
static void step_time(world *w) {
    int64_t later = w->now + (int64_t)test_below(&w->rng, TTL);
    for (uint32_t k = 0; k < KEYS; k++)
        if (w->cells[X][k].is_here && w->cells[X][k].stamp + TTL <= later) resolve(w, X, k);
    w->now = later;
    CHECK_EQ(sk_time_set(w->store, SK_PROCESSING_TIME, later), SK_OK);
    CHECK(sk_sweep(w->store, UINT64_MAX) >= 0);
    for (uint32_t k = 0; k < KEYS; k++)
        if (is_expired(w, X, &w->cells[X][k])) {
            w->cells[X][k].is_here = false;
            touch(w, X, k);
        }
}

/* If a leaf has a dirty slot its bit is set, and its word's. */
static void check_bits(world *w, bool is_exact) {
    for (uint32_t i = 0; i < w->leaf_count; i++) {
        bool bit = w->store->dirty[i / 64] >> i % 64 & 1;
        bool word = w->store->dirty_words[i / 4096] >> i / 64 % 64 & 1;
        bool is_dirty = sk_leaf_is_dirty(w->store, i);
        if (is_dirty) CHECK(bit && word);
        if (is_exact && !is_dirty) CHECK(!bit);
    }
}

/* Expects the rows of leaves [from, to) to be those that the model calls dirty, and takes them for
 * being written. */
static void check_taken(world *w, const sk_buf *buf, uint32_t from, uint32_t to, bool is_cold,
                        int64_t rows) {
    bool is_taken[STATES][KEYS] = {0};
    uint32_t last = from;
    const uint8_t *p = buf->data + 5, *end = buf->data + buf->len;
    CHECK_EQ(util_rows_count(buf, 0), rows);
    for (int64_t r = 0; r < rows; r++) {
        util_row row = util_next_row(&p, end);
        int s = 0;
        while (s < STATES && NUMBERS[s] != (int32_t)row.number) s++;
        CHECK(s < STATES && row.key_len == 8);
        uint64_t k;
        memcpy(&k, row.key, 8);
        CHECK(k < KEYS);
        if (s == STATES || k >= KEYS) return;
        cell *c = &w->cells[s][k];
        CHECK_EQ(row.leaf, w->leaf_of[k]);
        CHECK(row.leaf >= last && row.leaf < to);
        last = row.leaf;
        CHECK(!is_taken[s][k]);
        is_taken[s][k] = true;
        CHECK_EQ(row.value != NULL, c->is_here);
        uint8_t expected[128];
        if (row.value != NULL && c->is_here) {
            size_t len = row_bytes(s, c, expected);
            CHECK(row.value_len == len && memcmp(row.value, expected, len) == 0);
        }
    }
    CHECK(p == end);
    for (int s = 0; s < STATES; s++)
        for (uint32_t k = 0; k < KEYS; k++) {
            cell *c = &w->cells[s][k];
            bool is_wanted = w->leaf_of[k] >= from && w->leaf_of[k] < to && c->is_dirty &&
                             (!is_cold || !c->is_used || !c->is_here);
            CHECK_EQ(is_taken[s][k], is_wanted);
            if (!is_taken[s][k]) continue;
            c->is_writing = true;
            c->is_dirty = false;
        }
}

/* What a take does before it looks: what somebody left is dirty again. */
static void expect_take(world *w, uint32_t from, uint32_t to) {
    for (int s = 0; s < STATES; s++)
        for (uint32_t k = 0; k < KEYS; k++) {
            cell *c = &w->cells[s][k];
            if (w->leaf_of[k] < from || w->leaf_of[k] >= to) continue;
            c->is_dirty |= c->is_writing;
            c->is_writing = false;
        }
}

static void step_take(world *w, bool is_whole, bool is_sure) {
    uint32_t from = is_whole ? 0 : (uint32_t)test_below(&w->rng, w->leaf_count), leaf = from;
    bool is_cold = !is_sure && test_below(&w->rng, 2);
    uint64_t rows_max = is_whole ? UINT64_MAX : 1 + test_below(&w->rng, 60);
    uint64_t bytes_max = is_whole ? UINT64_MAX : 1 + test_below(&w->rng, 4000);
    uint64_t counts[STATES], sum = 0;
    sk_buf buf = {0};
    int64_t rows = sk_rows_take(w->store, &leaf, is_cold ? SK_COLD : 0, rows_max, bytes_max,
                                NUMBERS, counts, STATES, &buf);
    CHECK(rows >= 0);
    for (int s = 0; s < STATES; s++) sum += counts[s];
    CHECK_EQ(sum, rows);
    if (is_whole) CHECK_EQ(leaf, w->leaf_count);
    expect_take(w, from, leaf);
    check_taken(w, &buf, from, leaf, is_cold, rows);
    sk_buf_free(&buf);
    if (!is_sure && test_below(&w->rng, 3) == 0) return; /* interrupted */
    for (int i = 0; !is_sure && i < 3; i++)              /* it takes its time */
        step_put(w, (int)test_below(&w->rng, 2), (uint32_t)test_below(&w->rng, KEYS));
    bool is_written = is_sure || test_below(&w->rng, 3) > 0;
    CHECK_EQ(sk_rows_done(w->store, from, leaf, is_written), SK_OK);
    for (int s = 0; s < STATES; s++)
        for (uint32_t k = 0; k < KEYS; k++) {
            cell *c = &w->cells[s][k];
            if (!c->is_writing || w->leaf_of[k] < from || w->leaf_of[k] >= leaf) continue;
            c->is_writing = false;
            if (!is_written) c->is_dirty = true;
            /* what changed since is written next time; the home has what it was, which is never
             * asked for while it is dirty here */
            if (!is_written || c->is_dirty) continue;
            c->is_home = c->is_here;
            c->home = c->value;
            c->home_stamp = c->stamp;
        }
}

static void check_all(world *w) {
    for (int s = 0; s < STATES; s++) {
        uint64_t dirty = 0;
        sk_stats stats;
        for (uint32_t k = 0; k < KEYS; k++)
            dirty += w->cells[s][k].is_dirty || w->cells[s][k].is_writing;
        CHECK_EQ(sk_stats_read(w->store, (uint32_t)s, 0, w->leaf_count, &stats), SK_OK);
        CHECK_EQ(stats.dirty, dirty);
    }
    check_bits(w, false);
}

static sk_store *open_one(const world *w, uint32_t groups) {
    sk_store *store = util_open(groups, w->leaf_count / groups);
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    CHECK_EQ(util_state(store, "n", SK_I64, "i"), N);
    CHECK_EQ(util_state(store, "b", SK_BYTES, "i"), B);
    CHECK_EQ(util_timed_state(store, "x", SK_BYTES, "i", TTL, SK_PROCESSING_TIME, 0), X);
    return store;
}

static void run_world(uint64_t stream, unsigned leaf_bits, int steps) {
    static world w;
    w = (world){.leaf_bits = leaf_bits, .leaf_count = 1u << leaf_bits};
    w.rng = test_rng_new(stream);
    w.store = open_one(&w, w.leaf_count < 128 ? w.leaf_count : 128);
    w.other = open_one(&w, w.leaf_count < 128 ? w.leaf_count : 128);
    CHECK_EQ(sk_leaf_mark(w.other, 0, w.leaf_count, SK_AWAY), SK_OK);
    CHECK_EQ(sk_time_set(w.store, SK_PROCESSING_TIME, w.now), SK_OK);
    for (uint32_t k = 0; k < KEYS; k++) {
        util_key key = util_int_key(k);
        w.leaf_of[k] = util_leaf_of("i", &key, leaf_bits);
    }
    for (int step = 0; step < steps && test_failures == 0; step++) {
        uint64_t what = test_below(&w.rng, 100);
        int s = (int)test_below(&w.rng, STATES);
        uint32_t k = (uint32_t)test_below(&w.rng, KEYS);
        if (what < 30)
            step_put(&w, s, k);
        else if (what < 40)
            resolve(&w, s, k);
        else if (what < 55)
            step_delete(&w, s, k);
        else if (what < 65)
            step_batch(&w);
        else if (what < 67)
            step_clear(&w, s);
        else if (what < 72)
            step_evict(&w);
        else if (what < 77)
            step_move(&w);
        else if (what < 79)
            step_mark(&w);
        else if (what < 83)
            step_time(&w);
        else
            step_take(&w, what < 85, false);
        /* values are counted up, and must not pass what a byte holds */
        for (uint32_t i = 0; i < KEYS; i++)
            if (w.cells[N][i].is_here && w.cells[N][i].value > 120) {
                uint8_t zero[8] = {0};
                CHECK_EQ(sk_put(w.store, N, util_int_key(i).data, 8, zero, 8), SK_OK);
                w.cells[N][i].value = 0;
                touch(&w, N, i);
            }
        check_all(&w);
    }
    step_take(&w, true, true);
    CHECK_EQ(util_stats(w.store, w.leaf_count).dirty, 0);
    check_bits(&w, true); /* those that are stale are cleared by who comes by */
    for (int s = 0; s < STATES; s++)
        for (uint32_t k = 0; k < KEYS; k++) {
            const cell *c = &w.cells[s][k];
            CHECK_EQ(is_at_home(&w, s, c), c->is_here);
            if (c->is_here) CHECK_EQ(c->home, c->value);
        }
    sk_close(w.store);
    sk_close(w.other);
}

static void test_a_take_gives_exactly_what_is_dirty(void) {
    for (uint64_t stream = 0; stream < 12; stream++) run_world(stream, 7, 1500);
    for (uint64_t stream = 0; stream < 4; stream++) run_world(100 + stream, 0, 600);
    run_world(200, 13, 400); /* more than one word of words */
}

int main(void) {
    RUN(test_rows_of_each_kind_are_what_homes_keep);
    RUN(test_lengths_that_need_wider_heads_come_through);
    RUN(test_an_abandoned_take_leaves_no_trace);
    RUN(test_what_changes_while_it_is_written_is_dirty_afterwards);
    RUN(test_a_state_without_a_number_is_named_and_nothing_is_taken);
    RUN(test_a_take_ends_at_its_limits_and_goes_on_where_it_ended);
    RUN(test_turning_write_back_on_finds_what_is_dirty_already);
    RUN(test_a_dirty_entry_that_went_without_a_trace_has_no_row);
    RUN(test_what_comes_with_leaves_is_noted_and_what_goes_with_them_is_not_missed);
    RUN(test_the_home_is_told_what_has_expired_where_it_is_told_anything);
    RUN(test_an_entry_that_came_without_a_stamp_is_to_be_written);
    RUN(test_a_take_gives_exactly_what_is_dirty);
    return test_report();
}
