/*
 * test_rewrite.c: rewriting blocks and states for another leaf or type (csrc/rewrite.c). Oracle: a
 * second store of the wanted geometry and type, filled with the same entries one by one.
 */
#include "store_util.h"

#define KEYS 400

/* Puts an entry for number k: a key of bytes, and a value that contains k. */
static void put_key(sk_store *store, uint32_t state, int kind, uint32_t k) {
    util_key key = util_bytes_key(k);
    if (kind == SK_I64) CHECK_EQ(sk_i64_put(store, state, key.data, key.len, k * 1000003LL), SK_OK);
    if (kind == SK_F64)
        CHECK_EQ(sk_f64_put(store, state, key.data, key.len, (double)(k * 1000003LL)), SK_OK);
    if (kind == SK_BYTES)
        CHECK_EQ(sk_put(store, state, key.data, key.len, key.data, k % 40), SK_OK);
    if (kind == SK_LIST) {
        uint8_t list[] = {0x92, (uint8_t)(k & 0x7f), 0xc0};
        CHECK_EQ(sk_put(store, state, key.data, key.len, list, sizeof list), SK_OK);
    }
}

static sk_store *filled(uint32_t leaves, int kind, int flags, uint32_t *state) {
    sk_store *store = util_open(leaves, 1);
    CHECK_EQ(sk_state_add(store, "state", kind, "b", flags, state), SK_OK);
    CHECK_EQ(sk_time_set(store, SK_PROCESSING_TIME, 5000), SK_OK);
    for (uint32_t k = 0; k < KEYS; k++) put_key(store, *state, kind, k);
    return store;
}

/* Rewrites every leaf of the source for every leaf of the target for which it has entries. */
static void rewrite_store(sk_store *source, uint32_t leaf_bits, sk_store *target,
                          uint32_t target_bits, int kind, int flags) {
    sk_buf blocks = {0}, buf = {0};
    for (uint32_t leaf = 0; leaf < 1u << leaf_bits; leaf++) {
        blocks.len = 0;
        CHECK(sk_leaf_encode(source, leaf, SK_ALL_STATES, 0, &blocks) >= 0);
        for (uint32_t to = 0; blocks.len > 0 && to < 1u << target_bits; to++) {
            buf.len = 0;
            CHECK_EQ(
                sk_block_rewrite(blocks.data, blocks.len, to, target_bits, kind, flags, 1, &buf),
                SK_OK);
            if (buf.len == 0) continue;
            CHECK_EQ(sk_block_check(buf.data, buf.len), SK_OK);
            CHECK_EQ(sk_leaf_decode(target, to, buf.data, buf.len, SK_OVER), SK_OK);
        }
    }
    sk_buf_free(&blocks);
    sk_buf_free(&buf);
}

static void test_blocks_of_one_geometry_become_those_of_another(void) {
    const int kinds[] = {SK_I64, SK_BYTES, SK_LIST};
    for (unsigned bits = 0; bits <= 6; bits += 3)
        for (unsigned to_bits = 0; to_bits <= 6; to_bits += 2)
            for (size_t k = 0; k < 3; k++) {
                uint32_t state;
                sk_store *source = filled(1u << bits, kinds[k], 0, &state);
                sk_store *expected = filled(1u << to_bits, kinds[k], 0, &state);
                sk_store *target = util_open(1u << to_bits, 1);
                sk_buf a = {0}, b = {0};
                rewrite_store(source, bits, target, to_bits, kinds[k], 0);
                util_encode_all(expected, 1u << to_bits, &a);
                util_encode_all(target, 1u << to_bits, &b);
                CHECK(util_same(&a, &b));
                sk_buf_free(&a);
                sk_buf_free(&b);
                sk_close(source);
                sk_close(expected);
                sk_close(target);
            }
}

static void test_numbers_widen_and_stamps_come_and_go(void) {
    const int flags[][2] = {{0, SK_TIMED}, {SK_TIMED, 0}, {SK_TIMED, SK_TIMED}, {0, 0}};
    for (size_t k = 0; k < 4; k++) {
        uint32_t state;
        sk_store *source = filled(4, SK_I64, flags[k][0], &state);
        sk_store *target = util_open(4, 1);
        sk_buf block = {0};
        rewrite_store(source, 2, target, 2, SK_F64, flags[k][1]);
        for (uint32_t i = 0; i < KEYS; i++) {
            util_key key = util_bytes_key(i);
            double value = 0;
            CHECK_EQ(sk_f64_get(target, 0, key.data, key.len, &value), SK_OK);
            CHECK(value == (double)(i * 1000003LL));
        }
        CHECK(sk_leaf_encode(target, 1, SK_ALL_STATES, 0, &block) > 0);
        sk_block_info info;
        CHECK_EQ(sk_block_read(block.data, block.len, &info), SK_OK);
        CHECK_EQ(info.is_timed, flags[k][1] == SK_TIMED);
        for (uint64_t i = 0; i < info.entries && info.is_timed; i++) {
            int64_t stamp;
            memcpy(&stamp, block.data + info.stamps + 8 * i, 8);
            CHECK_EQ(stamp, flags[k][0] == SK_TIMED ? 5000 : SK_NO_TIME);
        }
        sk_buf_free(&block);
        sk_close(source);
        sk_close(target);
    }
}

static void test_deltas_stay_deltas_and_keep_their_deletions(void) {
    uint32_t state;
    sk_store *store = filled(1, SK_I64, 0, &state);
    sk_buf block = {0}, buf = {0};
    uint32_t since = sk_epoch_advance(store);
    CHECK_EQ(sk_track(store, since), SK_OK);
    for (uint32_t k = 0; k < 50; k++) {
        util_key key = util_bytes_key(k);
        CHECK_EQ(sk_delete(store, state, key.data, key.len, 0), SK_OK);
    }
    CHECK(sk_leaf_encode(store, 0, state, since, &block) > 0);
    uint64_t tombs = 0, entries = 0;
    for (uint32_t leaf = 0; leaf < 4; leaf++) {
        sk_block_info info;
        buf.len = 0;
        CHECK_EQ(sk_block_rewrite(block.data, block.len, leaf, 2, SK_F64, SK_TIMED, 0, &buf),
                 SK_OK);
        CHECK_EQ(sk_block_check(buf.data, buf.len), SK_OK);
        CHECK_EQ(sk_block_read(buf.data, buf.len, &info), SK_OK);
        CHECK(info.is_delta);
        entries += info.entries;
        for (uint64_t i = 0; i < info.entries; i++) tombs += buf.data[info.marks + i];
    }
    CHECK_EQ(entries, 50);
    CHECK_EQ(tombs, 50);
    sk_buf_free(&block);
    sk_buf_free(&buf);
    sk_close(store);
}

static void test_an_empty_slice_is_nothing_of_a_delta_and_an_empty_block_of_a_full_one(void) {
    sk_store *store = util_open(1, 1);
    uint32_t state = util_state(store, "state", SK_BYTES, "b");
    sk_buf block = {0}, buf = {0};
    util_key key = util_bytes_key(1);
    CHECK_EQ(sk_put(store, state, key.data, key.len, key.data, 3), SK_OK);
    CHECK(sk_leaf_encode(store, 0, state, 0, &block) > 0);
    uint32_t other = 1 - util_leaf_of("b", &key, 1);
    CHECK_EQ(sk_block_rewrite(block.data, block.len, other, 1, SK_BYTES, 0, 1, &buf), SK_OK);
    CHECK_EQ(buf.len, 0);
    CHECK_EQ(sk_block_rewrite(block.data, block.len, other, 1, SK_BYTES, 0, 0, &buf), SK_OK);
    sk_block_info info;
    CHECK_EQ(sk_block_check(buf.data, buf.len), SK_OK);
    CHECK_EQ(sk_block_read(buf.data, buf.len, &info), SK_OK);
    CHECK_EQ(info.entries, 0);
    CHECK(!info.is_delta);
    CHECK_EQ(info.size, buf.len);
    sk_buf_free(&block);
    sk_buf_free(&buf);
    sk_close(store);
}

static void test_what_does_not_fit_is_refused_and_nothing_is_appended(void) {
    uint32_t state;
    sk_store *store = filled(1, SK_F64, 0, &state);
    sk_buf block = {0}, buf = {0};
    CHECK(sk_leaf_encode(store, 0, state, 0, &block) > 0);
    CHECK_EQ(sk_block_rewrite(block.data, block.len, 0, 0, SK_I64, 0, 0, &buf), SK_SCHEMA);
    CHECK_EQ(sk_block_rewrite(block.data, block.len, 0, 0, SK_TIMERS, 0, 0, &buf), SK_SCHEMA);
    CHECK_EQ(sk_block_rewrite(block.data, block.len, 2, 1, SK_F64, 0, 0, &buf), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_block_rewrite(block.data, block.len, 0, 21, SK_F64, 0, 0, &buf), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_block_rewrite(block.data, block.len, 0, 0, 9, 0, 0, &buf), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_block_rewrite(block.data, block.len, 0, 0, SK_F64, 4, 0, &buf), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_block_rewrite(block.data, block.len - 1, 0, 0, SK_F64, 0, 0, &buf), SK_CORRUPT);
    CHECK_EQ(buf.len, 0);
    CHECK_EQ(sk_block_rewrite(block.data, block.len, 0, 0, SK_F64, 0, 0, &buf), SK_OK);
    CHECK(util_same(&block, &buf));
    sk_buf_free(&block);
    sk_buf_free(&buf);
    sk_close(store);
}

/* Damage may lie in one slice and not in another. All slices together must find what a check of the
 * whole block finds. */
static void test_all_slices_together_check_what_a_check_checks(void) {
    uint32_t state;
    sk_store *store = filled(1, SK_BYTES, SK_TIMED, &state);
    sk_buf block = {0}, buf = {0};
    test_rng rng = test_rng_new(7);
    CHECK(sk_leaf_encode(store, 0, state, 0, &block) > 0);
    for (int round = 0; round < 4000; round++) {
        size_t at = 8 + test_below(&rng, block.len - 8);
        uint8_t by = (uint8_t)(1 << test_below(&rng, 8));
        block.data[at] ^= by;
        int check = sk_block_check(block.data, block.len), sliced = SK_OK;
        for (uint32_t leaf = 0; leaf < 8 && sliced == SK_OK; leaf++) {
            buf.len = 0;
            sliced = sk_block_rewrite(block.data, block.len, leaf, 3, SK_BYTES, 0, 0, &buf);
        }
        CHECK_EQ(sliced, check);
        block.data[at] ^= by;
    }
    sk_buf_free(&block);
    sk_buf_free(&buf);
    sk_close(store);
}

static void test_a_state_that_is_retyped_is_as_one_declared_and_filled_so(void) {
    const int flags[][2] = {{0, SK_TIMED}, {SK_TIMED, 0}, {0, 0}};
    for (size_t k = 0; k < 3; k++)
        for (int to = SK_I64; to <= SK_F64; to++) {
            uint32_t state, leaves = 4;
            sk_store *store = filled(leaves, SK_I64, flags[k][0], &state);
            sk_store *expected = filled(leaves, to, flags[k][1], &state);
            uint32_t since = sk_epoch_advance(store);
            CHECK_EQ(sk_track(store, since), SK_OK);
            CHECK_EQ(sk_state_retype(store, "state", to, flags[k][1]), SK_OK);
            CHECK_EQ(sk_bytes_used(store), sk_bytes_used(expected));
            for (uint32_t i = 0; i < KEYS; i++) {
                util_key key = util_bytes_key(i);
                int64_t n = 0;
                double f = 0;
                CHECK_EQ(to == SK_I64 ? sk_i64_get(store, state, key.data, key.len, &n)
                                      : sk_f64_get(store, state, key.data, key.len, &f),
                         SK_OK);
                CHECK(to == SK_I64 ? n == i * 1000003LL : f == (double)(i * 1000003LL));
            }
            sk_buf a = {0}, b = {0};
            if (flags[k][1] == 0) { /* else stamps differ */
                util_encode_all(store, leaves, &a);
                util_encode_all(expected, leaves, &b);
                CHECK(util_same(&a, &b));
            }
            /* no delta reaches back to before the retype, unless the retype changed nothing */
            sk_block_info info;
            a.len = 0;
            CHECK(sk_leaf_encode(store, 0, state, since, &a) >= 0);
            bool is_same = to == SK_I64 && flags[k][0] == flags[k][1];
            CHECK_EQ(a.len == 0, is_same);
            if (!is_same) CHECK_EQ(sk_block_read(a.data, a.len, &info), SK_OK);
            if (!is_same) CHECK(!info.is_delta);
            /* the table is still good: all entries can be deleted */
            for (uint32_t i = 0; i < KEYS; i++) {
                util_key key = util_bytes_key(i);
                CHECK_EQ(sk_delete(store, state, key.data, key.len, 0), SK_OK);
            }
            CHECK_EQ(util_stats(store, leaves).entries, 0);
            sk_buf_free(&a);
            sk_buf_free(&b);
            sk_close(store);
            sk_close(expected);
        }
}

static void test_a_retype_that_fails_leaves_the_state_as_it_was(void) {
    uint32_t state;
    sk_store *store = filled(4, SK_I64, 0, &state);
    sk_buf was = {0}, is = {0};
    util_encode_all(store, 4, &was);
    uint64_t bytes = sk_bytes_used(store);
    CHECK_EQ(sk_state_retype(store, "state", SK_BYTES, 0), SK_SCHEMA);
    CHECK_EQ(sk_state_retype(store, "state", SK_TIMERS, SK_TIMED), SK_SCHEMA);
    CHECK_EQ(sk_state_retype(store, "no such state", SK_I64, 0), SK_BAD_ARGUMENT);
    int status = SK_NO_MEMORY;
    for (int64_t nth = 1; status == SK_NO_MEMORY; nth++) {
        sk_fail_alloc(nth, 0);
        status = sk_state_retype(store, "state", SK_F64, SK_TIMED);
        sk_fail_alloc(0, 0);
        if (status == SK_OK) break;
        util_encode_all(store, 4, &is);
        CHECK(util_same(&was, &is));
        CHECK_EQ(sk_bytes_used(store), bytes);
    }
    CHECK_EQ(status, SK_OK);
    sk_buf_free(&was);
    sk_buf_free(&is);
    sk_close(store);
}

int main(void) {
    RUN(test_blocks_of_one_geometry_become_those_of_another);
    RUN(test_numbers_widen_and_stamps_come_and_go);
    RUN(test_deltas_stay_deltas_and_keep_their_deletions);
    RUN(test_an_empty_slice_is_nothing_of_a_delta_and_an_empty_block_of_a_full_one);
    RUN(test_what_does_not_fit_is_refused_and_nothing_is_appended);
    RUN(test_all_slices_together_check_what_a_check_checks);
    RUN(test_a_state_that_is_retyped_is_as_one_declared_and_filled_so);
    RUN(test_a_retype_that_fails_leaves_the_state_as_it_was);
    return test_report();
}
