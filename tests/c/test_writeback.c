/*
 * test_writeback.c: changes on their way home, as blocks and as rows (csrc/writeback.c). The bytes
 * of a row are spelt out here.
 */
#include "rows_util.h"
#include "store.h"

#define LEAVES 8
#define LEAF_BITS 3

/* ---- Blocks ---- */

static void test_dirty_entries_are_written_once_and_changes_meanwhile_again(void) {
    sk_store *store = util_open(4, 2);
    uint32_t id = util_state(store, "n", SK_I64, "i");
    util_key key[4];
    sk_buf buf = {0}, value = {0};
    util_keys_of_leaf(0, LEAF_BITS, key, 4);
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    for (int i = 0; i < 4; i++) CHECK_EQ(sk_i64_put(store, id, key[i].data, 8, i), SK_OK);
    CHECK_EQ(sk_delete(store, id, key[3].data, 8, 0), SK_OK);
    CHECK_EQ(util_stats(store, LEAVES).tombstones, 1);
    CHECK_EQ(util_stats(store, LEAVES).dirty, 4);
    CHECK(sk_dirty_take(store, 0, 0, &buf) > 0);
    sk_block_info info;
    CHECK_EQ(sk_block_read(buf.data, buf.len, &info), SK_OK);
    CHECK_EQ(info.entries, 4);
    CHECK_EQ(info.is_delta, 1);
    CHECK_EQ(sk_block_find(buf.data, buf.len, key[3].data, 8, &value), SK_MISSING);
    CHECK_EQ(value.len, 1);
    CHECK_EQ(sk_dirty_take(store, 0, 0, &buf), -SK_BAD_ARGUMENT); /* one at a time */
    CHECK_EQ(sk_i64_put(store, id, key[0].data, 8, 50), SK_OK);   /* while it is being written */
    CHECK_EQ(sk_dirty_done(store, 0, 1), SK_OK);
    CHECK_EQ(util_stats(store, LEAVES).dirty, 1);
    buf.len = 0;
    CHECK(sk_dirty_take(store, 0, 0, &buf) > 0);
    CHECK_EQ(sk_block_read(buf.data, buf.len, &info), SK_OK);
    CHECK_EQ(info.entries, 1);
    CHECK_EQ(sk_dirty_done(store, 0, 0), SK_OK); /* the write failed */
    CHECK_EQ(util_stats(store, LEAVES).dirty, 1);
    buf.len = 0;
    CHECK(sk_dirty_take(store, 0, 0, &buf) > 0);
    CHECK_EQ(sk_delete(store, id, key[0].data, 8, 0), SK_OK);
    CHECK_EQ(sk_dirty_done(store, 0, 1), SK_OK);
    CHECK_EQ(util_stats(store, LEAVES).dirty, 1); /* the deletion */
    buf.len = 0;
    CHECK(sk_dirty_take(store, 0, 0, &buf) > 0);
    CHECK_EQ(sk_dirty_done(store, 0, 1), SK_OK);
    CHECK_EQ(util_stats(store, LEAVES).dirty, 0);
    buf.len = 0;
    CHECK_EQ(sk_dirty_take(store, 0, 0, &buf), 0);
    CHECK_EQ(sk_dirty_take(store, 0, 0, &buf), 0); /* nothing taken: nothing to wait for */
    CHECK_EQ(sk_dirty_take(store, LEAVES, 0, &buf), -SK_BAD_ARGUMENT);
    CHECK_EQ(sk_dirty_done(store, LEAVES, 1), SK_BAD_ARGUMENT);
    sk_buf_free(&buf);
    sk_buf_free(&value);
    sk_close(store);
}

/* SK_COLD takes deletions, and entries that were not used since the hand of sk_evict passed
 * them. */
static void test_cold_write_back_leaves_what_is_in_use(void) {
    sk_store *store = util_open(1, 1), *home = util_open(1, 1);
    uint32_t id = util_state(store, "n", SK_I64, "i");
    sk_buf buf = {0};
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    for (int64_t k = 0; k < 10; k++)
        CHECK_EQ(sk_i64_put(store, id, util_int_key(k).data, 8, k), SK_OK);
    CHECK_EQ(sk_delete(store, id, util_int_key(9).data, 8, 0), SK_OK);
    CHECK(sk_dirty_take(store, 0, SK_COLD, &buf) > 0); /* the deletion alone */
    CHECK_EQ(sk_leaf_decode(home, 0, buf.data, buf.len, SK_OVER), SK_OK);
    CHECK_EQ(sk_dirty_done(store, 0, 1), SK_OK);
    CHECK_EQ(util_stats(store, 1).dirty, 9);
    CHECK_EQ(sk_evict(store, UINT64_MAX), 0); /* the hand passes, but everything is dirty */
    for (int64_t k = 0; k < 4; k++)
        CHECK_EQ(sk_i64_fold(store, id, util_int_key(k).data, 8, SK_ADD, 1, 0, NULL), SK_OK);
    buf.len = 0;
    CHECK(sk_dirty_take(store, 0, SK_COLD, &buf) > 0);
    CHECK_EQ(sk_leaf_decode(home, 0, buf.data, buf.len, SK_OVER), SK_OK);
    CHECK_EQ(sk_dirty_done(store, 0, 1), SK_OK);
    CHECK_EQ(util_stats(home, 1).entries, 5); /* 4 to 8 */
    CHECK_EQ(util_stats(store, 1).dirty, 4);
    buf.len = 0;
    CHECK(sk_dirty_take(store, 0, 0, &buf) > 0);
    CHECK_EQ(sk_leaf_decode(home, 0, buf.data, buf.len, SK_OVER), SK_OK);
    CHECK_EQ(sk_dirty_done(store, 0, 1), SK_OK);
    CHECK_EQ(util_stats(home, 1).entries, 9);
    CHECK_EQ(util_stats(store, 1).dirty, 0);
    sk_buf_free(&buf);
    sk_close(store);
    sk_close(home);
}

static void test_leaf_detached_while_written_is_dirty_where_it_goes(void) {
    sk_store *store = util_open(4, 2), *other = util_open(4, 2);
    uint32_t id = util_state(store, "n", SK_I64, "i");
    util_key key[2];
    sk_buf buf = {0};
    sk_leaves *leaves = NULL;
    util_keys_of_leaf(0, LEAF_BITS, key, 2);
    CHECK_EQ(sk_i64_put(store, id, key[0].data, 8, 1), SK_OK);
    CHECK(sk_dirty_take(store, 0, 0, &buf) > 0);
    CHECK_EQ(sk_detach(store, 0, 1, &leaves), SK_OK);
    CHECK_EQ(sk_dirty_done(store, 0, 0), SK_OK); /* too late, and the write failed */
    CHECK_EQ(sk_attach(other, leaves), SK_OK);
    CHECK_EQ(util_stats(other, LEAVES).dirty, 1);
    buf.len = 0;
    CHECK(sk_dirty_take(other, 0, 0, &buf) > 0);
    CHECK_EQ(sk_dirty_done(other, 0, 1), SK_OK);
    CHECK_EQ(util_stats(other, LEAVES).dirty, 0);
    sk_buf_free(&buf);
    sk_close(store);
    sk_close(other);
}

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
        CHECK_EQ(sk_put(store, B, data, key.len, NULL, 0), SK_OK); /* empty, but no deletion */
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
    /* interrupted; meanwhile an entry is changed, to the value that it had */
    CHECK_EQ(sk_i64_put(store, id, util_int_key(7).data, 8, 7), SK_OK);
    CHECK_EQ(util_stats(store, 128).dirty, was.dirty);
    leaf = 0;
    CHECK_EQ(sk_rows_take(store, &leaf, 0, TAKE_ALL, &number, &count, 1, &again), 300);
    CHECK(util_same(&first, &again));
    /* sk_rows_done for other leaves has no effect on these */
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
    CHECK_EQ(sk_rows_done(store, 0, 128, 1), SK_OK); /* calling it twice does no harm */
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
    for (uint32_t i = 0; i <= 4; i++) { /* 4: the caller does not know the state's id */
        const int32_t numbers[2] = {0, bad[i % 4]};
        uint32_t leaf = 0;
        CHECK_EQ(sk_rows_take(store, &leaf, 0, TAKE_ALL, numbers, counts, i < 4 ? 2 : 1, &buf),
                 -SK_BAD_ARGUMENT);
        CHECK(strstr(sk_reason(), "late comer") != NULL);
        CHECK_EQ(leaf, 0);
        CHECK_EQ(buf.len, 0);
        CHECK_EQ(counts[0], 0);
        CHECK_EQ(util_stats(store, 128).dirty, 101);
        /* nothing is being written, so sk_rows_done has no effect */
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
    for (int64_t k = 0; k < 100; k++) /* in a store without write-back */
        CHECK_EQ(sk_i64_put(from, id, util_int_key(k).data, 8, k), SK_OK);
    CHECK_EQ(sk_detach(from, 0, 128, &leaves), SK_OK);
    CHECK_EQ(sk_attach(to, leaves), SK_OK);
    CHECK_EQ(sk_rows_take(to, &leaf, 0, TAKE_ALL, &number, &count, 1, &buf), 100);
    CHECK_EQ(sk_leaf_mark(to, 0, 128, SK_ABSENT), SK_OK);
    leaf = 0;
    CHECK_EQ(sk_rows_take(to, &leaf, 0, TAKE_ALL, &number, &count, 1, &buf), 0);
    for (uint32_t i = 0; i < 2; i++) CHECK_EQ(to->dirty[i], 0); /* no bit is set: clean */
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
    for (uint32_t i = 0; i < 2; i++) CHECK_EQ(store->dirty[i], 0); /* no bit was set at all */
    CHECK_EQ(sk_leaf_mark(store, 0, 128, SK_ABSENT), SK_OK);
    CHECK_EQ(sk_install(store, id, key.data, 8, one, 8, SK_NO_TIME), SK_OK);
    check_one(store, id, 0, &key, "\xd7\xad\0\0\0\0\0\0\0\x64\xd3\0\0\0\0\0\0\0\x01", 19);
    sk_buf_free(&buf);
    sk_close(store);
}

int main(void) {
    RUN(test_dirty_entries_are_written_once_and_changes_meanwhile_again);
    RUN(test_cold_write_back_leaves_what_is_in_use);
    RUN(test_leaf_detached_while_written_is_dirty_where_it_goes);
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
    return test_report();
}
