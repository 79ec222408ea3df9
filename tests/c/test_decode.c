/*
 * test_decode.c: decoding blocks into leaves (csrc/decode.c). A table says for each mode what comes
 * of what is here and what the block has.
 */
#include "store_util.h"

#define LEAVES 8
#define LEAF_BITS 3

/* All combinations of what is here (0 nothing, 1 an entry, 2 deleted) and what the block has (the
 * same three); each has its own key. */
static void decode_case(int residency, int mode, bool is_delta) {
    sk_store *store = util_open(4, 2), *source = util_open(4, 2);
    uint32_t id = util_state(store, "n", SK_I64, "i");
    uint32_t source_id = util_state(source, "n", SK_I64, "i");
    util_key key[9];
    sk_buf buf = {0};
    util_keys_of_leaf(6, LEAF_BITS, key, 9);
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

int main(void) {
    RUN(test_each_decode_mode_does_what_it_says);
    RUN(test_decode_refuses_what_does_not_belong);
    return test_report();
}
