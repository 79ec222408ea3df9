/*
 * test_transfer.c: leaves taken out of one store and put into another (csrc/transfer.c): they keep
 * their bytes and entries, a refusal changes nothing, and no delta reaches back to before.
 */
#include "store_util.h"

#define LEAVES 8
#define LEAF_BITS 3
#define KEYS 300

static void test_detached_leaves_move_with_their_bytes(void) {
    sk_store *store = util_open(4, 2), *other = util_open(8, 1);
    uint32_t id = util_state(store, "b", SK_BYTES, "b");
    util_state(other, "first", SK_I64, "i"); /* ids differ between stores */
    sk_buf before = {0}, after = {0};
    sk_leaves *leaves = NULL;
    util_fill_bytes(store, id, 0, KEYS);
    util_encode_all(store, LEAVES, &before);
    uint64_t bytes = sk_bytes_used(store);
    CHECK_EQ(sk_detach(store, 2, 6, &leaves), SK_OK);
    CHECK_EQ(util_stats(store, LEAVES).leaves[SK_AWAY], 4);
    uint64_t left = sk_bytes_used(store);
    CHECK(left < bytes);
    CHECK_EQ(sk_attach(other, leaves), SK_OK);
    CHECK_EQ(sk_bytes_used(other), bytes - left);
    CHECK_EQ(sk_detach(store, 0, 8, &leaves), SK_NOT_OWNED); /* 2 to 6 are already away */
    CHECK(leaves == NULL);
    CHECK_EQ(sk_bytes_used(store), left);
    CHECK_EQ(sk_leaf_mark(store, 2, 6, SK_ABSENT), SK_OK);
    CHECK_EQ(sk_detach(store, 0, 8, &leaves), SK_OK);
    CHECK_EQ(sk_bytes_used(store), 0);
    CHECK_EQ(sk_attach(other, leaves), SK_OCCUPIED); /* 2 to 6 are already there */
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

/* Attaches to a store that must refuse. Its figures, states and content stay as they are, and so do
 * the detached leaves, which can be attached elsewhere. */
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
    util_fill_bytes(source, util_state(source, "new", SK_BYTES, "b"), 0, 50);
    util_fill_bytes(source, util_state(source, "b", SK_BYTES, "b"), 0, KEYS);
    sk_store *occupied = util_open(4, 2);
    util_fill_bytes(occupied, util_state(occupied, "c", SK_BYTES, "b"), 0, 1);
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
    util_fill_bytes(store[0], util_state(store[0], "b", SK_BYTES, "b"), 0, KEYS);
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

/* Ways in which a leaf gets the content of `other`, or is marked as having it, without a change to
 * any single entry. */
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
    case MOVED_IN: /* into a store where it was away */
        CHECK_EQ(sk_move(other, store, 0, 1, &leaves), SK_OK);
        return;
    case CAME_BACK: /* and it changed in between */
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

int main(void) {
    RUN(test_detached_leaves_move_with_their_bytes);
    RUN(test_refused_attach_changes_nothing);
    RUN(test_a_thousand_splits_and_merges_lose_nothing);
    RUN(test_no_delta_reaches_back_over_what_came_in_another_way);
    RUN(test_operations_are_counted_where_they_happened);
    return test_report();
}
