/*
 * test_leaf.c: leaves as units (csrc/leaf.c): residency, decode modes, write-back, eviction,
 * detaching. The oracle of a partial leaf is the pair (truth, home): whatever happens, a key that
 * the store does not know is asked for at the home, and the answer must be the truth.
 */
#include "store_util.h"

#define LEAVES 8
#define LEAF_BITS 3
#define KEYS 300

/* ---- Residency, one rule at a time ---- */

/* The first `count` int keys of a leaf. */
static void keys_of_leaf(uint32_t leaf, util_key *keys, int count) {
    for (int64_t k = 0, n = 0; n < count; k++) {
        util_key key = util_int_key(k);
        if (util_leaf_of("i", &key, LEAF_BITS) == leaf) keys[n++] = key;
    }
}

static void test_new_leaves_are_whole_and_marks_are_kept(void) {
    sk_store *store = util_open(4, 2);
    CHECK_EQ(sk_leaf_residency(store, 7), SK_WHOLE);
    CHECK_EQ(sk_leaf_residency(store, 8), -SK_BAD_ARGUMENT);
    CHECK_EQ(sk_leaf_mark(store, 2, 4, SK_ABSENT), SK_OK);
    CHECK_EQ(sk_leaf_mark(store, 4, 5, SK_PARTIAL), SK_OK);
    CHECK_EQ(sk_leaf_mark(store, 5, 5, SK_ABSENT), SK_OK); /* none */
    CHECK_EQ(sk_leaf_residency(store, 1), SK_WHOLE);
    CHECK_EQ(sk_leaf_residency(store, 2), SK_ABSENT);
    uint32_t some[4] = {2, 1, 2, 7};
    uint8_t found[4];
    CHECK_EQ(sk_leaf_residencies(store, some, 4, found), SK_OK);
    CHECK(memcmp(found, (uint8_t[]){SK_ABSENT, SK_WHOLE, SK_ABSENT, SK_WHOLE}, 4) == 0);
    some[3] = 8;
    CHECK_EQ(sk_leaf_residencies(store, some, 4, found), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_leaf_residencies(store, some, 0, found), SK_OK);
    CHECK_EQ(sk_leaf_residency(store, 4), SK_PARTIAL);
    CHECK_EQ(sk_leaf_residency(store, 5), SK_WHOLE);
    sk_stats stats = util_stats(store, LEAVES);
    CHECK_EQ(stats.leaves[SK_WHOLE], 5);
    CHECK_EQ(stats.leaves[SK_PARTIAL], 1);
    CHECK_EQ(stats.leaves[SK_ABSENT], 2);
    CHECK_EQ(sk_leaf_mark(store, 0, 9, SK_WHOLE), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_leaf_mark(store, 3, 2, SK_WHOLE), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_leaf_mark(store, 0, 1, 4), SK_BAD_ARGUMENT);
    sk_close(store);
}

static void test_absent_leaf_answers_unknown_until_written_or_told(void) {
    sk_store *store = util_open(4, 2);
    uint32_t id = util_state(store, "n", SK_I64, "i");
    util_key key[3];
    int64_t value = 0, expected = 1;
    sk_buf buf = {0};
    keys_of_leaf(3, key, 3);
    CHECK_EQ(sk_leaf_mark(store, 3, 4, SK_ABSENT), SK_OK);
    CHECK_EQ(sk_i64_get(store, id, key[0].data, 8, &value), SK_UNKNOWN);
    CHECK_EQ(sk_contains(store, id, key[0].data, 8), SK_UNKNOWN);
    CHECK_EQ(sk_get(store, id, key[0].data, 8, &buf), -SK_UNKNOWN);
    CHECK_EQ(sk_i64_fold(store, id, key[0].data, 8, SK_ADD, 1, 0, &value), SK_UNKNOWN);
    CHECK_EQ(sk_i64_cas(store, id, key[0].data, 8, &expected, 2, &value), SK_UNKNOWN);
    CHECK_EQ(sk_i64_cas(store, id, key[0].data, 8, NULL, 2, &value), SK_UNKNOWN);
    CHECK_EQ(sk_delete(store, id, key[0].data, 8, 0), SK_UNKNOWN);
    CHECK_EQ(sk_clear(store, id, 0, LEAVES, 0), SK_UNKNOWN);
    CHECK_EQ(sk_leaf_residency(store, 3), SK_ABSENT); /* asking changes nothing */
    CHECK_EQ(sk_i64_put(store, id, key[0].data, 8, 5), SK_OK);
    CHECK_EQ(sk_leaf_residency(store, 3), SK_PARTIAL);
    CHECK_EQ(sk_i64_get(store, id, key[0].data, 8, &value), SK_OK);
    CHECK_EQ(sk_i64_get(store, id, key[1].data, 8, &value), SK_UNKNOWN);
    CHECK_EQ(sk_delete(store, id, key[1].data, 8, SK_BLIND), SK_OK);
    CHECK_EQ(sk_i64_get(store, id, key[1].data, 8, &value), SK_MISSING);
    CHECK_EQ(sk_delete(store, id, key[1].data, 8, 0), SK_MISSING);
    CHECK_EQ(sk_install(store, id, key[2].data, 8, NULL, 0, SK_NO_TIME), SK_OK);
    CHECK_EQ(sk_contains(store, id, key[2].data, 8), SK_MISSING);
    sk_stats stats = util_stats(store, LEAVES);
    CHECK_EQ(stats.entries, 1);
    CHECK_EQ(stats.tombstones, 2);
    CHECK_EQ(stats.dirty, 2); /* the put and the blind deletion, not what was installed */
    sk_buf_free(&buf);
    sk_close(store);
}

static void test_install_never_overwrites_what_is_here(void) {
    sk_store *store = util_open(4, 2);
    uint32_t id = util_state(store, "n", SK_I64, "i");
    util_key key[3];
    int64_t value = 0, other = 77;
    keys_of_leaf(3, key, 3);
    CHECK_EQ(sk_leaf_mark(store, 3, 4, SK_ABSENT), SK_OK);
    CHECK_EQ(sk_i64_put(store, id, key[0].data, 8, 1), SK_OK);
    CHECK_EQ(sk_delete(store, id, key[1].data, 8, SK_BLIND), SK_OK);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(sk_install(store, id, key[i].data, 8, (uint8_t *)&other, 8, SK_NO_TIME), SK_OK);
    CHECK_EQ(sk_i64_get(store, id, key[0].data, 8, &value), SK_OK);
    CHECK_EQ(value, 1);
    CHECK_EQ(sk_i64_get(store, id, key[1].data, 8, &value), SK_MISSING);
    CHECK_EQ(sk_i64_get(store, id, key[2].data, 8, &value), SK_OK);
    CHECK_EQ(value, 77);
    CHECK_EQ(sk_install(store, id, key[0].data, 8, NULL, 0, SK_NO_TIME), SK_OK);
    CHECK_EQ(sk_contains(store, id, key[0].data, 8), SK_OK);
    CHECK_EQ(util_stats(store, LEAVES).dirty, 2);
    /* a whole leaf knows: a late answer must not bring back what was deleted */
    CHECK_EQ(sk_leaf_mark(store, 3, 4, SK_WHOLE), SK_OK);
    CHECK_EQ(sk_delete(store, id, key[2].data, 8, 0), SK_OK);
    CHECK_EQ(sk_install(store, id, key[2].data, 8, (uint8_t *)&other, 8, SK_NO_TIME), SK_OK);
    CHECK_EQ(sk_contains(store, id, key[2].data, 8), SK_MISSING);
    sk_close(store);
}

static void test_away_leaf_refuses_every_call_until_it_comes_back(void) {
    sk_store *store = util_open(1, 1), *other = util_open(1, 1);
    uint32_t n = util_state(store, "n", SK_I64, "i"), l = util_state(store, "l", SK_LIST, "i");
    util_key key = util_int_key(7);
    int64_t value = 5;
    uint64_t cursor = 0, version = 0;
    uint8_t status = 0;
    sk_buf buf = {0}, blocks = {0};
    sk_leaves *leaves = NULL;
    sk_snapshot *snapshot = NULL;
    CHECK_EQ(sk_i64_put(store, n, key.data, 8, 5), SK_OK);
    uint32_t since = sk_epoch_advance(store);
    CHECK(sk_leaf_encode(store, 0, SK_ALL_STATES, 0, &blocks) > 0);
    CHECK_EQ(sk_detach(store, 0, 1, &leaves), SK_OK);
    CHECK_EQ(sk_i64_get(store, n, key.data, 8, &value), SK_NOT_OWNED);
    CHECK_EQ(sk_i64_put(store, n, key.data, 8, 1), SK_NOT_OWNED);
    CHECK_EQ(sk_i64_fold(store, n, key.data, 8, SK_ADD, 1, 0, NULL), SK_NOT_OWNED);
    CHECK_EQ(sk_i64_cas(store, n, key.data, 8, NULL, 1, NULL), SK_NOT_OWNED);
    CHECK_EQ(sk_contains(store, n, key.data, 8), SK_NOT_OWNED);
    CHECK_EQ(sk_delete(store, n, key.data, 8, SK_BLIND), SK_NOT_OWNED);
    CHECK_EQ(sk_get(store, n, key.data, 8, &buf), -SK_NOT_OWNED);
    CHECK_EQ(sk_put(store, n, key.data, 8, (uint8_t *)&value, 8), SK_NOT_OWNED);
    CHECK_EQ(sk_install(store, n, key.data, 8, (uint8_t *)&value, 8, SK_NO_TIME), SK_NOT_OWNED);
    CHECK_EQ(sk_install(store, n, key.data, 8, NULL, 0, SK_NO_TIME), SK_NOT_OWNED);
    CHECK_EQ(sk_read(store, l, key.data, 8, SK_R_LEN, NULL, 0, NULL, 0, 0, 0, &buf), -SK_NOT_OWNED);
    CHECK_EQ(sk_write(store, l, key.data, 8, SK_W_APPEND, NULL, 0, "l", key.data, 1, 0, 0, &buf),
             -SK_NOT_OWNED);
    CHECK_EQ(sk_page(store, l, key.data, 8, NULL, 0, &cursor, &version, 1, &buf), -SK_NOT_OWNED);
    for (int op = SK_B_GET; op <= SK_B_DELETE; op++) {
        sk_batch_args args = {.n = 1,
                              .flags = SK_BLIND,
                              .keys = {SK_COL_I64, 0, key.data, NULL, 8},
                              .values = {SK_COL_I64, 0, &value, NULL, 8},
                              .out = &value,
                              .status = &status};
        CHECK_EQ(sk_batch(store, n, op, &args), SK_NOT_OWNED);
        CHECK_EQ(args.failed, 0);
        CHECK_EQ(status, SK_END);
    }
    for (int mode = SK_UNDER; mode <= SK_OVER; mode++)
        CHECK_EQ(sk_leaf_decode(store, 0, blocks.data, blocks.len, mode), SK_NOT_OWNED);
    CHECK_EQ(sk_clear(store, n, 0, 1, 0), SK_OK); /* nothing of it is here */
    CHECK_EQ(sk_evict(store, UINT64_MAX), 0);
    CHECK_EQ(sk_leaf_encode(store, 0, SK_ALL_STATES, 0, &buf), 0);
    CHECK_EQ(sk_leaf_encode(store, 0, SK_ALL_STATES, since, &buf), 0); /* nor "all was deleted" */
    CHECK_EQ(sk_dirty_take(store, 0, 0, &buf), 0);
    CHECK_EQ(sk_snapshot_open(store, &since, 0, &snapshot), SK_OK);
    CHECK_EQ(sk_snapshot_residency(snapshot, 0), SK_AWAY);
    CHECK_EQ(sk_leaf_residency(store, 0), SK_AWAY);
    CHECK_EQ(sk_attach(store, leaves), SK_OK);
    CHECK_EQ(sk_snapshot_residency(snapshot, 0), SK_AWAY);
    CHECK_EQ(sk_snapshot_next(snapshot, &since, &buf), -SK_END);
    sk_snapshot_close(snapshot);
    CHECK_EQ(sk_i64_get(store, n, key.data, 8, &value), SK_OK);
    CHECK_EQ(value, 5);
    CHECK_EQ(sk_leaf_mark(other, 0, 1, SK_AWAY), SK_OK);
    CHECK_EQ(sk_leaf_decode(other, 0, blocks.data, blocks.len, SK_REPLACE), SK_OK);
    CHECK_EQ(sk_leaf_residency(other, 0), SK_WHOLE);
    CHECK_EQ(sk_i64_get(other, 0, key.data, 8, &value), SK_OK);
    CHECK_EQ(sk_leaf_mark(other, 0, 1, SK_AWAY), SK_OK); /* drops what is there */
    CHECK_EQ(sk_bytes_used(other), 0);
    sk_buf_free(&buf);
    sk_buf_free(&blocks);
    sk_close(store);
    sk_close(other);
}

static void test_marking_absent_drops_and_marking_whole_forgets_tombstones(void) {
    sk_store *store = util_open(4, 2);
    uint32_t id = util_state(store, "b", SK_BYTES, "i");
    util_key key[4];
    keys_of_leaf(5, key, 4);
    CHECK_EQ(sk_leaf_mark(store, 5, 6, SK_PARTIAL), SK_OK);
    for (int i = 0; i < 4; i++) CHECK_EQ(sk_put(store, id, key[i].data, 8, key[i].data, 8), SK_OK);
    CHECK_EQ(sk_delete(store, id, key[0].data, 8, 0), SK_OK);
    CHECK_EQ(util_stats(store, LEAVES).tombstones, 1);
    CHECK_EQ(sk_leaf_mark(store, 5, 6, SK_WHOLE), SK_OK);
    CHECK_EQ(util_stats(store, LEAVES).tombstones, 0);
    CHECK_EQ(util_stats(store, LEAVES).entries, 3);
    CHECK_EQ(sk_leaf_mark(store, 5, 6, SK_ABSENT), SK_OK);
    sk_stats stats = util_stats(store, LEAVES);
    CHECK_EQ(stats.entries, 0);
    CHECK_EQ(stats.dirty, 0);
    CHECK_EQ(stats.bytes, 0);
    CHECK_EQ(sk_bytes_used(store), 0);
    CHECK_EQ(sk_contains(store, id, key[1].data, 8), SK_UNKNOWN);
    sk_close(store);
}

/* ---- Decode modes: a table of what each makes of (here, block) ---- */

/* Key k of the table: here: 0 nothing, 1 entry, 2 deleted; block: the same. */
static void decode_case(int residency, int mode, bool is_delta) {
    sk_store *store = util_open(4, 2), *source = util_open(4, 2);
    uint32_t id = util_state(store, "n", SK_I64, "i");
    uint32_t source_id = util_state(source, "n", SK_I64, "i");
    util_key key[9];
    sk_buf buf = {0};
    keys_of_leaf(6, key, 9);
    if (is_delta) CHECK_EQ(sk_leaf_mark(source, 6, 7, SK_PARTIAL), SK_OK);
    for (int i = 0; i < 9; i++) {
        int block = i % 3;
        if (block == 1) CHECK_EQ(sk_i64_put(source, source_id, key[i].data, 8, 200 + i), SK_OK);
        if (block == 2 && is_delta)
            CHECK_EQ(sk_delete(source, source_id, key[i].data, 8, SK_BLIND), SK_OK);
    }
    CHECK(sk_leaf_encode(source, 6, source_id, 0, &buf) > 0);
    CHECK_EQ(sk_leaf_mark(store, 6, 7, residency), SK_OK);
    for (int i = 0; i < 9 && residency != SK_ABSENT; i++) {
        int here = i / 3;
        if (here == 1) CHECK_EQ(sk_i64_put(store, id, key[i].data, 8, 100 + i), SK_OK);
        if (here == 2) CHECK(sk_delete(store, id, key[i].data, 8, SK_BLIND) <= SK_MISSING);
    }
    int status = sk_leaf_decode(store, 6, buf.data, buf.len, mode);
    if (mode == SK_REPLACE && is_delta) {
        CHECK_EQ(status, SK_BAD_ARGUMENT);
        CHECK_EQ(sk_leaf_residency(store, 6), residency);
    } else {
        CHECK_EQ(status, SK_OK);
        bool is_now_whole = residency == SK_WHOLE || mode == SK_REPLACE || mode == SK_UNDER_ALL;
        CHECK_EQ(sk_leaf_residency(store, 6), is_now_whole ? SK_WHOLE : SK_PARTIAL);
        for (int i = 0; i < 9; i++) {
            int here = residency == SK_ABSENT ? 0 : i / 3;
            int block = i % 3 == 2 && !is_delta ? 0 : i % 3;
            int unknown = is_now_whole ? SK_MISSING : SK_UNKNOWN;
            bool is_late = residency == SK_WHOLE && (mode == SK_UNDER || mode == SK_UNDER_ALL);
            bool takes_block = mode == SK_REPLACE || (mode == SK_OVER && !is_delta) ||
                               (mode == SK_OVER && block != 0) ||
                               (mode != SK_OVER && here == 0 && !is_late);
            int from = takes_block ? block : here;
            int expected = from == 1 ? SK_OK : from == 2 ? SK_MISSING : unknown;
            int64_t value = 0;
            CHECK_EQ(sk_i64_get(store, id, key[i].data, 8, &value), expected);
            if (expected == SK_OK) CHECK_EQ(value, (takes_block ? 200 : 100) + i);
        }
        if (is_now_whole) CHECK_EQ(util_stats(store, LEAVES).tombstones, 0);
    }
    sk_buf_free(&buf);
    sk_close(store);
    sk_close(source);
}

static void test_each_decode_mode_does_what_it_says(void) {
    for (int residency = SK_WHOLE; residency <= SK_ABSENT; residency++)
        for (int mode = SK_REPLACE; mode <= SK_OVER; mode++)
            for (int is_delta = 0; is_delta < 2; is_delta++) decode_case(residency, mode, is_delta);
}

static void test_decode_refuses_what_does_not_belong(void) {
    sk_store *store = util_open(4, 2), *other = util_open(4, 4);
    uint32_t id = util_state(store, "n", SK_I64, "i"),
             other_id = util_state(other, "n", SK_I64, "i");
    util_key key = util_int_key(1);
    uint32_t leaf = util_leaf_of("i", &key, LEAF_BITS), other_leaf = util_leaf_of("i", &key, 4);
    sk_buf buf = {0}, twice = {0};
    CHECK_EQ(sk_i64_put(store, id, key.data, 8, 1), SK_OK);
    CHECK_EQ(sk_i64_put(other, other_id, key.data, 8, 2), SK_OK);
    CHECK(sk_leaf_encode(other, other_leaf, SK_ALL_STATES, 0, &buf) > 0);
    CHECK_EQ(sk_leaf_decode(store, other_leaf, buf.data, buf.len, SK_REPLACE),
             other_leaf < LEAVES ? SK_CORRUPT : SK_BAD_ARGUMENT);
    buf.len = 0;
    CHECK(sk_leaf_encode(store, leaf, SK_ALL_STATES, 0, &buf) > 0);
    CHECK_EQ(sk_leaf_decode(store, (leaf + 1) % LEAVES, buf.data, buf.len, SK_REPLACE), SK_CORRUPT);
    CHECK_EQ(sk_leaf_decode(store, LEAVES, buf.data, buf.len, SK_REPLACE), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_leaf_decode(store, leaf, buf.data, buf.len, 4), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_leaf_decode(store, leaf, buf.data, buf.len - 8, SK_REPLACE), SK_CORRUPT);
    CHECK(sk_leaf_encode(store, leaf, SK_ALL_STATES, 0, &twice) > 0);
    CHECK(sk_leaf_encode(store, leaf, SK_ALL_STATES, 0, &twice) > 0);
    CHECK_EQ(sk_leaf_decode(store, leaf, twice.data, twice.len, SK_REPLACE), SK_CORRUPT);
    sk_store *clash = util_open(4, 2);
    util_state(clash, "n", SK_F64, "i");
    CHECK_EQ(sk_leaf_decode(clash, leaf, buf.data, buf.len, SK_REPLACE), SK_SCHEMA);
    CHECK_EQ(util_stats(store, LEAVES).entries, 1);
    sk_store *empty = util_open(4, 2);
    CHECK_EQ(sk_leaf_decode(empty, leaf, buf.data, buf.len, SK_REPLACE), SK_OK);
    CHECK_EQ(sk_state_count(empty), 1); /* declared from the block */
    CHECK_EQ(util_stats(empty, LEAVES).entries, 1);
    CHECK_EQ(sk_leaf_decode(empty, leaf, NULL, 0, SK_REPLACE), SK_OK); /* no blocks: emptied */
    CHECK_EQ(util_stats(empty, LEAVES).entries, 0);
    sk_buf_free(&buf);
    sk_buf_free(&twice);
    sk_close(store);
    sk_close(other);
    sk_close(clash);
    sk_close(empty);
}

/* ---- Write-back ---- */

static void test_dirty_entries_are_written_once_and_changes_meanwhile_again(void) {
    sk_store *store = util_open(4, 2);
    uint32_t id = util_state(store, "n", SK_I64, "i");
    util_key key[4];
    sk_buf buf = {0}, value = {0};
    keys_of_leaf(0, key, 4);
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
    CHECK_EQ(sk_i64_put(store, id, key[0].data, 8, 50), SK_OK);   /* while it is written */
    CHECK_EQ(sk_dirty_done(store, 0, 1), SK_OK);
    CHECK_EQ(util_stats(store, LEAVES).dirty, 1);
    buf.len = 0;
    CHECK(sk_dirty_take(store, 0, 0, &buf) > 0);
    CHECK_EQ(sk_block_read(buf.data, buf.len, &info), SK_OK);
    CHECK_EQ(info.entries, 1);
    CHECK_EQ(sk_dirty_done(store, 0, 0), SK_OK); /* it failed */
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

/* What was being written when a leaf moved is still to be written where it went. */
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
    CHECK_EQ(sk_evict(store, UINT64_MAX), 0); /* the hand passes: all of it is dirty */
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

static void test_operations_are_counted_where_they_happened(void) {
    sk_store *store = util_open(4, 1), *other = util_open(4, 1);
    uint32_t n = util_state(store, "n", SK_I64, "i"), m = util_state(store, "m", SK_I64, "i");
    int64_t keys[100], out[100];
    uint8_t status[100];
    sk_leaves *leaves = NULL;
    sk_stats stats;
    for (int64_t k = 0; k < 100; k++) {
        keys[k] = k;
        CHECK_EQ(sk_i64_put(store, n, util_int_key(k).data, 8, k), SK_OK);
    }
    CHECK_EQ(sk_contains(store, m, util_int_key(1).data, 8), SK_MISSING);
    sk_batch_args args = {
        .n = 100, .keys = {SK_COL_I64, 0, keys, NULL, sizeof keys}, .out = out, .status = status};
    CHECK_EQ(sk_batch(store, n, SK_B_GET, &args), SK_OK);
    CHECK_EQ(sk_stats_read(store, n, 0, 4, &stats), SK_OK);
    CHECK_EQ(stats.operations, 200);
    CHECK_EQ(util_stats(store, 4).operations, 201);
    CHECK_EQ(sk_clear(store, n, 0, 1, 0), SK_OK);
    CHECK_EQ(sk_detach(store, 0, 2, &leaves), SK_OK);
    CHECK_EQ(sk_attach(other, leaves), SK_OK);
    CHECK_EQ(util_stats(store, 4).operations, 201);
    CHECK_EQ(util_stats(other, 4).operations, 0);
    sk_buf buf = {0};
    CHECK(sk_leaf_encode(store, 3, SK_ALL_STATES, 0, &buf) > 0);
    CHECK_EQ(sk_leaf_decode(store, 3, buf.data, buf.len, SK_REPLACE), SK_OK);
    CHECK_EQ(util_stats(store, 4).operations, 201);
    sk_buf_free(&buf);
    sk_close(store);
    sk_close(other);
}

static void test_leaf_detached_while_written_is_dirty_where_it_goes(void) {
    sk_store *store = util_open(4, 2), *other = util_open(4, 2);
    uint32_t id = util_state(store, "n", SK_I64, "i");
    util_key key[2];
    sk_buf buf = {0};
    sk_leaves *leaves = NULL;
    keys_of_leaf(0, key, 2);
    CHECK_EQ(sk_i64_put(store, id, key[0].data, 8, 1), SK_OK);
    CHECK(sk_dirty_take(store, 0, 0, &buf) > 0);
    CHECK_EQ(sk_detach(store, 0, 1, &leaves), SK_OK);
    CHECK_EQ(sk_dirty_done(store, 0, 0), SK_OK); /* too late, and it failed */
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

/* With write-back on, clearing is a deletion as any other: the home must learn of it. */
static void test_clear_is_remembered_for_the_home(void) {
    sk_store *store = util_open(4, 2), *home = util_open(4, 2);
    uint32_t id = util_state(store, "n", SK_I64, "i"), home_id = util_state(home, "n", SK_I64, "i");
    util_key key[2];
    sk_buf buf = {0};
    keys_of_leaf(0, key, 2);
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    CHECK_EQ(sk_i64_put(store, id, key[0].data, 8, 1), SK_OK);
    for (int round = 0; round < 2; round++) {
        buf.len = 0;
        CHECK(sk_dirty_take(store, 0, 0, &buf) > 0);
        CHECK_EQ(sk_leaf_decode(home, 0, buf.data, buf.len, SK_OVER), SK_OK);
        CHECK_EQ(sk_dirty_done(store, 0, 1), SK_OK);
        CHECK_EQ(sk_contains(home, home_id, key[0].data, 8), round == 0 ? SK_OK : SK_MISSING);
        if (round == 0) CHECK_EQ(sk_clear(store, id, 0, LEAVES, 0), SK_OK);
        CHECK_EQ(util_stats(store, LEAVES).entries, 0);
    }
    sk_buf_free(&buf);
    sk_close(store);
    sk_close(home);
}

/* ---- Eviction ---- */

static void test_eviction_takes_cold_clean_entries_in_clock_order(void) {
    sk_store *store = util_open(1, 1);
    uint32_t id = util_state(store, "b", SK_BYTES, "i");
    uint8_t value[1000] = {0};
    sk_buf buf = {0};
    for (int64_t k = 0; k < 100; k++)
        CHECK_EQ(sk_put(store, id, util_int_key(k).data, 8, value, sizeof value), SK_OK);
    CHECK_EQ(sk_evict(store, 1 << 20), 0); /* all dirty */
    CHECK_EQ(sk_leaf_residency(store, 0), SK_WHOLE);
    CHECK(sk_dirty_take(store, 0, 0, &buf) > 0);
    CHECK_EQ(sk_evict(store, 1 << 20), 0); /* all being written */
    CHECK_EQ(sk_dirty_done(store, 0, 1), SK_OK);
    CHECK(sk_evict(store, 1) >= 1000); /* clears all marks, then takes one */
    CHECK_EQ(util_stats(store, 1).entries, 99);
    CHECK_EQ(sk_leaf_residency(store, 0), SK_PARTIAL);
    /* What is used now stays when half of the rest goes. */
    int hot = 0;
    for (int64_t k = 0; k < 100; k += 2)
        hot += sk_contains(store, id, util_int_key(k).data, 8) == SK_OK;
    CHECK(sk_evict(store, 25 * 1000) >= 25 * 1000);
    int kept = 0, cold = 0;
    sk_stats stats = util_stats(store, 1);
    CHECK(stats.entries >= 70 && stats.entries <= 75);
    for (int64_t k = 0; k < 100; k++) {
        bool is_here = sk_contains(store, id, util_int_key(k).data, 8) == SK_OK;
        *(k % 2 == 0 ? &kept : &cold) += is_here;
    }
    CHECK_EQ(kept, hot);
    CHECK(cold < 30);
    CHECK(sk_evict(store, UINT64_MAX) > 0); /* two rounds empty it */
    CHECK_EQ(util_stats(store, 1).entries, 0);
    CHECK(sk_bytes_used(store) < 4096);
    CHECK_EQ(sk_evict(store, UINT64_MAX), 0);
    CHECK_EQ(sk_evict(store, 0), 0);
    sk_buf_free(&buf);
    sk_close(store);
}

/* Evicting numbers gives memory back only by making their array smaller, for which there must be
 * room even when the limit is reached: that is when one evicts. */
static void test_eviction_makes_room_at_the_memory_limit(void) {
    sk_store *store = util_open(1, 1);
    uint32_t id = util_state(store, "n", SK_I64, "i"),
             other = util_state(store, "b", SK_BYTES, "i");
    sk_buf buf = {0};
    for (int64_t k = 0; k < 5000; k++)
        CHECK_EQ(sk_i64_put(store, id, util_int_key(k).data, 8, k), SK_OK);
    CHECK(sk_dirty_take(store, 0, 0, &buf) > 0);
    CHECK_EQ(sk_dirty_done(store, 0, 1), SK_OK);
    CHECK_EQ(sk_bytes_limit(store, sk_bytes_used(store) + 100), SK_OK);
    uint8_t value[5000] = {0};
    CHECK_EQ(sk_put(store, other, util_int_key(1).data, 8, value, sizeof value), SK_LIMIT);
    CHECK(sk_evict(store, 10000) >= 10000);
    CHECK_EQ(sk_put(store, other, util_int_key(1).data, 8, value, sizeof value), SK_OK);
    sk_buf_free(&buf);
    sk_close(store);
}

/* ---- A store with a home, against the truth ---- */

typedef struct homed {
    sk_store *store, *home;
    uint32_t id, home_id;
    bool is_there[KEYS]; /* the truth */
    int64_t value[KEYS];
    util_key key[KEYS];
    uint32_t leaf[KEYS];
    bool is_writing[LEAVES];
    sk_buf taken[LEAVES];  /* what the write-back under way carries */
    sk_buf answer[LEAVES]; /* a whole leaf the home sent, not yet arrived */
    bool has_answer[LEAVES];
} homed;

/* The home answers for one key. */
static void resolve(homed *h, uint32_t k) {
    int64_t value = 0;
    int status = sk_i64_get(h->home, h->home_id, h->key[k].data, h->key[k].len, &value);
    CHECK(status == SK_OK || status == SK_MISSING);
    CHECK_EQ(sk_install(h->store, h->id, h->key[k].data, h->key[k].len,
                        status == SK_OK ? (uint8_t *)&value : NULL, 8, SK_NO_TIME),
             SK_OK);
}

static void check_key(homed *h, uint32_t k) {
    int64_t value = 0;
    int status = sk_i64_get(h->store, h->id, h->key[k].data, h->key[k].len, &value);
    if (status == SK_UNKNOWN) {
        CHECK(sk_leaf_residency(h->store, h->leaf[k]) != SK_WHOLE);
        resolve(h, k);
        status = sk_i64_get(h->store, h->id, h->key[k].data, h->key[k].len, &value);
    }
    CHECK_EQ(status, h->is_there[k] ? SK_OK : SK_MISSING);
    if (status == SK_OK) CHECK_EQ(value, h->value[k]);
}

static void step_write_back(homed *h, uint32_t leaf, test_rng *rng) {
    if (!h->is_writing[leaf]) {
        h->taken[leaf].len = 0;
        int64_t len = sk_dirty_take(h->store, leaf, 0, &h->taken[leaf]);
        CHECK(len >= 0);
        h->is_writing[leaf] = len > 0;
        return;
    }
    int fate = (int)test_below(rng, 3); /* 0: lost on the way there, 1: on the way back, 2: fine */
    if (fate > 0)
        CHECK_EQ(sk_leaf_decode(h->home, leaf, h->taken[leaf].data, h->taken[leaf].len, SK_OVER),
                 SK_OK);
    CHECK_EQ(sk_dirty_done(h->store, leaf, fate == 2), SK_OK);
    h->is_writing[leaf] = false;
}

static void step_answer(homed *h, uint32_t leaf, bool is_all) {
    if (!h->has_answer[leaf]) {
        h->answer[leaf].len = 0;
        CHECK(sk_leaf_encode(h->home, leaf, SK_ALL_STATES, 0, &h->answer[leaf]) >= 0);
        h->has_answer[leaf] = true;
        return;
    }
    CHECK_EQ(sk_leaf_decode(h->store, leaf, h->answer[leaf].data, h->answer[leaf].len,
                            is_all ? SK_UNDER_ALL : SK_UNDER),
             SK_OK);
    h->has_answer[leaf] = false;
}

static void step_change(homed *h, uint32_t k, test_rng *rng) {
    const util_key *key = &h->key[k];
    int64_t value = (int64_t)test_below(rng, 1000), result = 0;
    int what = (int)test_below(rng, 4), status = SK_OK;
    if (what == 0) {
        CHECK_EQ(sk_i64_put(h->store, h->id, key->data, key->len, value), SK_OK);
        h->is_there[k] = true;
        h->value[k] = value;
    } else if (what == 1) {
        status = sk_delete(h->store, h->id, key->data, key->len, 0);
        if (status == SK_UNKNOWN) {
            CHECK_EQ(sk_delete(h->store, h->id, key->data, key->len, SK_BLIND), SK_OK);
        } else {
            CHECK_EQ(status, h->is_there[k] ? SK_OK : SK_MISSING);
        }
        h->is_there[k] = false;
    } else {
        status = sk_i64_fold(h->store, h->id, key->data, key->len, SK_ADD, value, 7, &result);
        if (status == SK_UNKNOWN) {
            resolve(h, k);
            status = sk_i64_fold(h->store, h->id, key->data, key->len, SK_ADD, value, 7, &result);
        }
        CHECK_EQ(status, SK_OK);
        h->value[k] = (h->is_there[k] ? h->value[k] : 7) + value;
        h->is_there[k] = true;
        CHECK_EQ(result, h->value[k]);
    }
}

/* Takes a leaf out and puts it back: nothing may change but what was being written. */
static void step_move(homed *h, uint32_t leaf) {
    sk_leaves *leaves = NULL;
    CHECK_EQ(sk_detach(h->store, leaf, leaf + 1, &leaves), SK_OK);
    CHECK_EQ(sk_leaf_residency(h->store, leaf), SK_AWAY);
    CHECK_EQ(sk_attach(h->store, leaves), SK_OK);
    h->is_writing[leaf] = false;
}

static void run_homed(uint64_t stream, bool evicts) {
    static homed h;
    test_rng rng = test_rng_new(stream);
    h = (homed){.store = util_open(4, 2), .home = util_open(4, 2)};
    h.id = util_state(h.store, "n", SK_I64, "b");
    h.home_id = util_state(h.home, "n", SK_I64, "b");
    CHECK_EQ(sk_write_back(h.store, 1), SK_OK);
    CHECK_EQ(sk_leaf_mark(h.store, 0, LEAVES, SK_ABSENT), SK_OK);
    for (uint32_t k = 0; k < KEYS; k++) {
        h.key[k] = util_bytes_key(k);
        h.leaf[k] = util_leaf_of("b", &h.key[k], LEAF_BITS);
        h.is_there[k] = k % 3 == 0;
        h.value[k] = k;
        if (h.is_there[k])
            CHECK_EQ(sk_i64_put(h.home, h.home_id, h.key[k].data, h.key[k].len, k), SK_OK);
    }
    for (int step = 0; step < 20000; step++) {
        uint32_t k = (uint32_t)test_below(&rng, KEYS), leaf = (uint32_t)test_below(&rng, LEAVES);
        unsigned what = (unsigned)test_below(&rng, 1000);
        if (what < 500)
            step_change(&h, k, &rng);
        else if (what < 850)
            check_key(&h, k);
        else if (what < 920)
            step_write_back(&h, leaf, &rng);
        else if (what < 970)
            step_answer(&h, leaf, test_below(&rng, 4) == 0);
        else if (what < 975)
            step_move(&h, leaf);
        else if (what < 990 && evicts) {
            CHECK(sk_evict(h.store, 1 + test_below(&rng, 3000)) >= 0);
            /* an answer from before may be older than what was evicted: whoever asks anew waits */
            memset(h.has_answer, 0, sizeof h.has_answer);
        } else if (what == 999 && !h.is_writing[leaf]) {
            /* hand the leaf home and start again from nothing */
            h.taken[leaf].len = 0;
            if (sk_dirty_take(h.store, leaf, 0, &h.taken[leaf]) > 0) {
                CHECK_EQ(
                    sk_leaf_decode(h.home, leaf, h.taken[leaf].data, h.taken[leaf].len, SK_OVER),
                    SK_OK);
                CHECK_EQ(sk_dirty_done(h.store, leaf, 1), SK_OK);
            }
            CHECK_EQ(sk_leaf_mark(h.store, leaf, leaf + 1, SK_ABSENT), SK_OK);
            h.has_answer[leaf] = false;
        }
    }
    for (uint32_t k = 0; k < KEYS; k++) check_key(&h, k);
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++) { /* flush: the home must end with the truth */
        if (h.is_writing[leaf]) CHECK_EQ(sk_dirty_done(h.store, leaf, 0), SK_OK);
        h.taken[leaf].len = 0;
        CHECK(sk_dirty_take(h.store, leaf, 0, &h.taken[leaf]) >= 0);
        CHECK_EQ(sk_leaf_decode(h.home, leaf, h.taken[leaf].data, h.taken[leaf].len, SK_OVER),
                 SK_OK);
        CHECK_EQ(sk_dirty_done(h.store, leaf, 1), SK_OK);
        sk_buf_free(&h.taken[leaf]);
        sk_buf_free(&h.answer[leaf]);
    }
    for (uint32_t k = 0; k < KEYS; k++)
        CHECK_EQ(sk_contains(h.home, h.home_id, h.key[k].data, h.key[k].len),
                 h.is_there[k] ? SK_OK : SK_MISSING);
    CHECK_EQ(util_stats(h.store, LEAVES).dirty, 0);
    CHECK(sk_evict(h.store, UINT64_MAX) >= 0);
    CHECK_EQ(util_stats(h.store, LEAVES).entries, 0);
    for (uint32_t k = 0; k < KEYS; k++) check_key(&h, k);
    sk_close(h.store);
    sk_close(h.home);
}

static void test_store_and_home_together_always_know_the_truth(void) {
    for (uint64_t stream = 0; stream < 12; stream++) run_homed(stream, stream % 3 != 0);
}

/* ---- Detaching and attaching ---- */

static void fill(sk_store *store, uint32_t id, uint32_t from, uint32_t to) {
    for (uint32_t k = from; k < to; k++) {
        util_key key = util_bytes_key(k);
        CHECK_EQ(sk_put(store, id, key.data, key.len, key.data, key.len), SK_OK);
    }
}

static void test_detached_leaves_move_with_their_bytes(void) {
    sk_store *store = util_open(4, 2), *other = util_open(8, 1);
    uint32_t id = util_state(store, "b", SK_BYTES, "b");
    util_state(other, "first", SK_I64, "i"); /* ids differ between stores */
    sk_buf before = {0}, after = {0};
    sk_leaves *leaves = NULL;
    fill(store, id, 0, KEYS);
    util_encode_all(store, LEAVES, &before);
    uint64_t bytes = sk_bytes_used(store);
    CHECK_EQ(sk_detach(store, 2, 6, &leaves), SK_OK);
    CHECK_EQ(util_stats(store, LEAVES).leaves[SK_AWAY], 4);
    uint64_t left = sk_bytes_used(store);
    CHECK(left < bytes);
    CHECK_EQ(sk_attach(other, leaves), SK_OK);
    CHECK_EQ(sk_bytes_used(other), bytes - left);
    CHECK_EQ(sk_detach(store, 0, 8, &leaves), SK_NOT_OWNED); /* 2 to 6 went before */
    CHECK(leaves == NULL);
    CHECK_EQ(sk_bytes_used(store), left);
    CHECK_EQ(sk_leaf_mark(store, 2, 6, SK_ABSENT), SK_OK);
    CHECK_EQ(sk_detach(store, 0, 8, &leaves), SK_OK);
    CHECK_EQ(sk_bytes_used(store), 0);
    CHECK_EQ(sk_attach(other, leaves), SK_OCCUPIED); /* 2 to 6 are there already */
    sk_leaves_free(leaves);
    util_encode_all(other, LEAVES, &after);
    CHECK(after.len > 0 && after.len < before.len);
    CHECK_EQ(sk_leaf_residency(other, 3), SK_WHOLE);
    CHECK_EQ(sk_detach(other, 2, 9, &leaves), SK_BAD_ARGUMENT);
    CHECK(leaves == NULL);
    CHECK_EQ(sk_detach(other, 2, 2, &leaves), SK_OK); /* none */
    CHECK_EQ(sk_attach(store, leaves), SK_OK);
    sk_leaves_free(NULL);
    sk_buf_free(&before);
    sk_buf_free(&after);
    sk_close(store);
    sk_close(other);
}

/* Attaching to a store that must refuse: its figures, states and content stay, and so do the
 * leaves, which can go elsewhere. */
static void refuse(sk_store *target, sk_store *source, uint32_t leaf_count, int expected) {
    sk_buf before = {0}, after = {0}, whole = {0}, again = {0};
    sk_leaves *leaves = NULL;
    util_encode_all(source, LEAVES, &whole);
    CHECK_EQ(sk_detach(source, 0, LEAVES, &leaves), SK_OK);
    util_encode_all(target, leaf_count, &before);
    uint64_t bytes = sk_bytes_used(target);
    uint32_t states = sk_state_count(target);
    CHECK_EQ(sk_attach(target, leaves), expected);
    util_encode_all(target, leaf_count, &after);
    CHECK(util_same(&before, &after));
    CHECK_EQ(sk_bytes_used(target), bytes);
    CHECK_EQ(sk_state_count(target), states);
    CHECK_EQ(sk_attach(source, leaves), SK_OK);
    util_encode_all(source, LEAVES, &again);
    CHECK(util_same(&whole, &again));
    sk_buf_free(&before);
    sk_buf_free(&after);
    sk_buf_free(&whole);
    sk_buf_free(&again);
}

static void test_refused_attach_changes_nothing(void) {
    sk_store *source = util_open(4, 2);
    fill(source, util_state(source, "new", SK_BYTES, "b"), 0, 50);
    fill(source, util_state(source, "b", SK_BYTES, "b"), 0, KEYS);
    sk_store *occupied = util_open(4, 2);
    fill(occupied, util_state(occupied, "c", SK_BYTES, "b"), 0, 1);
    refuse(occupied, source, LEAVES, SK_OCCUPIED);
    sk_store *clash = util_open(4, 2);
    util_state(clash, "b", SK_LIST, "b");
    refuse(clash, source, LEAVES, SK_SCHEMA);
    sk_store *small = util_open(4, 2);
    CHECK_EQ(sk_bytes_limit(small, 10000), SK_OK);
    refuse(small, source, LEAVES, SK_LIMIT);
    sk_store *other = util_open(4, 4);
    refuse(other, source, 16, SK_BAD_ARGUMENT);
    sk_close(source);
    sk_close(occupied);
    sk_close(clash);
    sk_close(small);
    sk_close(other);
}

static void test_a_thousand_splits_and_merges_lose_nothing(void) {
    sk_store *store[3];
    uint32_t owner[LEAVES] = {0};
    test_rng rng = test_rng_new(77);
    sk_buf whole = {0}, now = {0};
    for (int s = 0; s < 3; s++) {
        store[s] = util_open(4, 2);
        if (s > 0) CHECK_EQ(sk_leaf_mark(store[s], 0, LEAVES, SK_ABSENT), SK_OK);
    }
    fill(store[0], util_state(store[0], "b", SK_BYTES, "b"), 0, KEYS);
    util_encode_all(store[0], LEAVES, &whole);
    for (int step = 0; step < 1000; step++) {
        uint32_t from = (uint32_t)test_below(&rng, LEAVES), to = from + 1;
        uint32_t s = owner[from], t = (uint32_t)test_below(&rng, 3);
        while (to < LEAVES && owner[to] == s && test_below(&rng, 3) > 0) to++;
        sk_leaves *leaves = NULL;
        CHECK_EQ(sk_detach(store[s], from, to, &leaves), SK_OK);
        CHECK_EQ(sk_attach(store[t], leaves), SK_OK);
        for (uint32_t i = from; i < to; i++) owner[i] = t;
    }
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++)
        CHECK(sk_leaf_encode(store[owner[leaf]], leaf, SK_ALL_STATES, 0, &now) > 0);
    CHECK(util_same(&whole, &now));
    sk_buf_free(&whole);
    sk_buf_free(&now);
    for (int s = 0; s < 3; s++) sk_close(store[s]);
}

/* Ways in which a leaf comes to hold what `other` has, or is told to: entry by entry, none of it is
 * a change. */
enum { REPLACED, LAID_OVER, MOVED_IN, CAME_BACK, FETCHED_AGAIN, WAS_AWAY, WAS_DETACHED, WAYS };

static void come(sk_store *store, sk_store *other, int way, const sk_buf *blocks) {
    sk_leaves *leaves = NULL;
    switch (way) {
    case REPLACED:
        CHECK_EQ(sk_leaf_decode(store, 0, blocks->data, blocks->len, SK_REPLACE), SK_OK);
        return;
    case LAID_OVER:
        CHECK_EQ(sk_leaf_decode(store, 0, blocks->data, blocks->len, SK_OVER), SK_OK);
        return;
    case MOVED_IN: /* to where it was away */
        CHECK_EQ(sk_move(other, store, 0, 1, &leaves), SK_OK);
        return;
    case CAME_BACK: /* and has changed in between */
        CHECK_EQ(sk_move(store, other, 0, 1, &leaves), SK_OCCUPIED);
        CHECK_EQ(sk_leaf_mark(other, 0, 1, SK_AWAY), SK_OK);
        CHECK_EQ(sk_move(store, other, 0, 1, &leaves), SK_OK);
        CHECK_EQ(sk_i64_put(other, 0, util_int_key(1).data, 8, 5), SK_OK);
        CHECK_EQ(sk_move(other, store, 0, 1, &leaves), SK_OK);
        return;
    case FETCHED_AGAIN:
        CHECK_EQ(sk_leaf_mark(store, 0, 1, SK_ABSENT), SK_OK);
        break;
    case WAS_AWAY:
        CHECK_EQ(sk_leaf_mark(store, 0, 1, SK_AWAY), SK_OK);
        CHECK_EQ(sk_leaf_gate(store, 0, 1, SK_GATE_EXPECTED), SK_OK);
        break;
    default:
        CHECK_EQ(sk_detach(store, 0, 1, &leaves), SK_OK);
        sk_leaves_free(leaves);
        CHECK_EQ(sk_leaf_gate(store, 0, 1, SK_GATE_EXPECTED), SK_OK);
    }
    CHECK_EQ(sk_leaf_decode(store, 0, blocks->data, blocks->len, SK_UNDER_ALL), SK_OK);
}

static void test_no_delta_reaches_back_over_what_came_in_another_way(void) {
    for (int way = 0; way < WAYS; way++) {
        sk_store *store = util_open(1, 1), *other = util_open(1, 1), *copy = util_open(1, 1);
        uint32_t a = util_state(store, "a", SK_I64, "i"), b = util_state(store, "b", SK_I64, "i");
        CHECK_EQ(util_state(other, "a", SK_I64, "i"), a);
        sk_buf blocks = {0}, base = {0}, delta = {0}, is = {0}, restored = {0};
        for (int64_t k = 0; k < 20; k++) {
            CHECK_EQ(sk_i64_put(store, a, util_int_key(k).data, 8, k), SK_OK);
            CHECK_EQ(sk_i64_put(store, b, util_int_key(k).data, 8, k), SK_OK);
            CHECK_EQ(sk_i64_put(other, a, util_int_key(k + 10).data, 8, -k), SK_OK);
        }
        CHECK(sk_leaf_encode(other, 0, SK_ALL_STATES, 0, &blocks) > 0);
        if (way == MOVED_IN) CHECK_EQ(sk_leaf_mark(store, 0, 1, SK_AWAY), SK_OK);
        util_encode_all(store, 1, &base);
        uint32_t since = sk_epoch_advance(store);
        come(store, other, way, &blocks);
        CHECK_EQ(sk_leaf_residency(store, 0), SK_WHOLE);
        CHECK(sk_leaf_encode(store, 0, SK_ALL_STATES, since, &delta) > 0);
        CHECK_EQ(sk_leaf_decode(copy, 0, base.data, base.len, SK_REPLACE), SK_OK);
        CHECK_EQ(sk_leaf_decode(copy, 0, delta.data, delta.len, SK_OVER), SK_OK);
        util_encode_all(store, 1, &is);
        util_encode_all(copy, 1, &restored);
        CHECK(util_same(&is, &restored));
        if (!util_same(&is, &restored)) printf("way %d\n", way);
        uint8_t changed;
        CHECK_EQ(sk_changed_leaves(store, since, &changed), SK_OK);
        CHECK_EQ(changed, 1);
        sk_close(store);
        sk_close(other);
        sk_close(copy);
        sk_buf *const buffers[] = {&blocks, &base, &delta, &is, &restored};
        for (int i = 0; i < 5; i++) sk_buf_free(buffers[i]);
    }
}

static void test_clear_empties_one_state_in_a_range(void) {
    sk_store *store = util_open(4, 2);
    uint32_t a = util_state(store, "a", SK_BYTES, "b"), b = util_state(store, "b", SK_BYTES, "b");
    fill(store, a, 0, KEYS);
    fill(store, b, 0, KEYS);
    CHECK_EQ(sk_clear(store, a, 2, 5, 0), SK_OK);
    for (uint32_t k = 0; k < KEYS; k++) {
        util_key key = util_bytes_key(k);
        uint32_t leaf = util_leaf_of("b", &key, LEAF_BITS);
        CHECK_EQ(sk_contains(store, a, key.data, key.len),
                 leaf >= 2 && leaf < 5 ? SK_MISSING : SK_OK);
        CHECK_EQ(sk_contains(store, b, key.data, key.len), SK_OK);
    }
    CHECK_EQ(sk_clear(store, a, 0, 9, 0), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_clear(store, 2, 0, 8, 0), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_leaf_mark(store, 0, 1, SK_PARTIAL), SK_OK);
    uint64_t entries = util_stats(store, LEAVES).entries;
    CHECK_EQ(sk_clear(store, b, 0, LEAVES, 0), SK_UNKNOWN);
    CHECK_EQ(util_stats(store, LEAVES).entries, entries);
    CHECK_EQ(sk_clear(store, b, 0, LEAVES, SK_BLIND), SK_OK);
    CHECK_EQ(sk_clear(store, a, 0, LEAVES, SK_BLIND), SK_OK);
    CHECK_EQ(util_stats(store, LEAVES).entries, 0);
    CHECK_EQ(sk_bytes_used(store), 0);
    sk_close(store);
}

int main(void) {
    RUN(test_new_leaves_are_whole_and_marks_are_kept);
    RUN(test_absent_leaf_answers_unknown_until_written_or_told);
    RUN(test_install_never_overwrites_what_is_here);
    RUN(test_away_leaf_refuses_every_call_until_it_comes_back);
    RUN(test_marking_absent_drops_and_marking_whole_forgets_tombstones);
    RUN(test_each_decode_mode_does_what_it_says);
    RUN(test_decode_refuses_what_does_not_belong);
    RUN(test_dirty_entries_are_written_once_and_changes_meanwhile_again);
    RUN(test_cold_write_back_leaves_what_is_in_use);
    RUN(test_operations_are_counted_where_they_happened);
    RUN(test_leaf_detached_while_written_is_dirty_where_it_goes);
    RUN(test_clear_is_remembered_for_the_home);
    RUN(test_eviction_takes_cold_clean_entries_in_clock_order);
    RUN(test_eviction_makes_room_at_the_memory_limit);
    RUN(test_store_and_home_together_always_know_the_truth);
    RUN(test_detached_leaves_move_with_their_bytes);
    RUN(test_refused_attach_changes_nothing);
    RUN(test_a_thousand_splits_and_merges_lose_nothing);
    RUN(test_no_delta_reaches_back_over_what_came_in_another_way);
    RUN(test_clear_empties_one_state_in_a_range);
    return test_report();
}
