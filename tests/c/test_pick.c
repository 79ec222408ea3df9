/* test_pick.c: blocks of single entries (csrc/pick.c). */
#include "filled_util.h"

typedef struct asked {
    uint8_t data[4 * KEYS * UTIL_KEY_BYTES_MAX];
    int64_t at[4 * KEYS + 1];
    int64_t n;
    bool is_asked[2 * KEYS]; /* per key number */
} asked;

static void ask(asked *a, uint32_t k) {
    util_key key = util_bytes_key(k);
    memcpy(a->data + a->at[a->n], key.data, key.len);
    a->at[a->n + 1] = a->at[a->n] + (int64_t)key.len;
    a->n++;
    a->is_asked[k] = true;
}

static int64_t pick(sk_store *store, uint32_t leaf, uint32_t state, const asked *a, sk_buf *buf) {
    sk_column keys = {SK_COL_VAR64, 0, a->data, a->at, (int64_t)sizeof a->data};
    return sk_leaf_pick(store, leaf, state, &keys, a->n, buf);
}

static void test_picked_entries_are_known_elsewhere_and_only_they(void) {
    test_rng rng = test_rng_new(2);
    static asked a;
    for (int round = 0; round < 60; round++) {
        sk_store *store = open_filled(), *target = open_filled();
        uint32_t s = (uint32_t)round % STATES, leaf = (uint32_t)test_below(&rng, LEAVES);
        sk_buf buf = {0}, was = {0}, is = {0};
        bool is_gone[2 * KEYS] = {false};
        for (uint32_t k = 0; k < KEYS; k++) { /* deleted, or (of X) expired */
            util_key key = util_bytes_key(k);
            is_gone[k] = test_below(&rng, 4) == 0;
            if (is_gone[k]) CHECK_EQ(sk_delete(store, s, key.data, key.len, 0), SK_OK);
        }
        if (s == X) {
            CHECK_EQ(sk_time_set(store, SK_EVENT_TIME, 1050), SK_OK);
            for (uint32_t k = 0; k < KEYS; k += 2) {
                util_key key = util_bytes_key(k);
                if (!is_gone[k]) CHECK_EQ(sk_i64_put(store, X, key.data, key.len, k), SK_OK);
            }
            CHECK_EQ(sk_time_set(store, SK_EVENT_TIME, 1120), SK_OK);
            CHECK_EQ(sk_time_set(target, SK_EVENT_TIME, 1120), SK_OK);
            for (uint32_t k = 1; k < KEYS; k += 2) is_gone[k] = true;
        }
        for (uint32_t k = KEYS; k < 2 * KEYS; k++) is_gone[k] = true; /* never existed */
        a = (asked){0};
        for (int64_t i = (int64_t)test_below(&rng, 3 * KEYS); i >= 0; i--) {
            uint32_t k = (uint32_t)test_below(&rng, 2 * KEYS);
            util_key key = util_bytes_key(k);
            if (util_leaf_of("b", &key, 2) == leaf) ask(&a, k);
        }
        if (round % 2) CHECK_EQ(sk_leaf_gate(store, leaf, leaf + 1, SK_GATE_SHUT), SK_OK);
        CHECK(sk_leaf_encode(store, leaf, SK_ALL_STATES, 0, &was) > 0);
        CHECK_EQ(sk_buf_put(&buf, "before", 6), SK_OK);
        int64_t len = pick(store, leaf, s, &a, &buf);
        CHECK_EQ(len, (int64_t)buf.len - 6);
        CHECK(memcmp(buf.data, "before", 6) == 0);
        CHECK(sk_leaf_encode(store, leaf, SK_ALL_STATES, 0, &is) > 0);
        CHECK(util_same(&was, &is)); /* looking changes nothing */
        CHECK_EQ(len == 0, a.n == 0);
        if (len > 0) {
            sk_block_info info;
            CHECK_EQ(sk_block_read(buf.data + 6, (size_t)len, &info), SK_OK);
            CHECK_EQ(info.size, (uint64_t)len);
            CHECK(info.is_delta);
            CHECK_EQ(sk_block_check(buf.data + 6, (size_t)len), SK_OK);
            for (uint32_t k = 0; k < 2 * KEYS; k++) {
                util_key key = util_bytes_key(k);
                int found = sk_block_find(buf.data + 6, (size_t)len, key.data, key.len, &is);
                CHECK_EQ(found, a.is_asked[k] && !is_gone[k] ? SK_OK : SK_MISSING);
                if (found == SK_MISSING) CHECK_EQ(is.len, a.is_asked[k]); /* 1: as a deletion */
            }
        }
        CHECK_EQ(sk_leaf_mark(target, leaf, leaf + 1, SK_ABSENT), SK_OK);
        CHECK_EQ(sk_leaf_gate(target, leaf, leaf + 1, SK_GATE_EXPECTED), SK_OK);
        CHECK_EQ(sk_leaf_decode(target, leaf, buf.data + 6, (size_t)len, SK_UNDER), SK_OK);
        CHECK_EQ(sk_leaf_gate(store, leaf, leaf + 1, SK_GATE_OPEN), SK_OK);
        for (int is_whole = 0; is_whole < 2; is_whole++) {
            for (uint32_t k = 0; k < 2 * KEYS; k++) {
                util_key key = util_bytes_key(k);
                if (util_leaf_of("b", &key, 2) != leaf) continue;
                bool is_known = a.is_asked[k] || is_whole;
                int64_t found = sk_get(target, s, key.data, key.len, &is);
                if (!is_known) CHECK_EQ(found, -SK_UNKNOWN);
                if (is_known && is_gone[k]) CHECK_EQ(found, -SK_MISSING);
                if (is_known && !is_gone[k]) {
                    CHECK_EQ(found, sk_get(store, s, key.data, key.len, &was));
                    CHECK(found >= 0 && util_same(&was, &is));
                }
            }
            was.len = 0; /* then the rest of the leaf follows */
            CHECK(sk_leaf_encode(store, leaf, s, 0, &was) > 0);
            CHECK_EQ(sk_leaf_decode(target, leaf, was.data, was.len, SK_UNDER_ALL), SK_OK);
        }
        sk_buf_free(&buf);
        sk_buf_free(&was);
        sk_buf_free(&is);
        sk_close(store);
        sk_close(target);
    }
}

static void test_pick_refuses_what_it_cannot_answer(void) {
    sk_store *store = open_filled();
    uint32_t ints = util_state(store, "ints", SK_I64, "i");
    static asked a;
    sk_buf buf = {0};
    a = (asked){0};
    CHECK_EQ(pick(store, 1, N, &a, &buf), 0);
    for (uint32_t k = 0; a.n < 3; k++) {
        util_key key = util_bytes_key(k);
        if (util_leaf_of("b", &key, 2) == 1) ask(&a, k);
    }
    CHECK(pick(store, 1, N, &a, &buf) > 0);
    buf.len = 0;
    CHECK_EQ(pick(store, 2, N, &a, &buf), -SK_BAD_ARGUMENT); /* of another leaf */
    CHECK_EQ(pick(store, LEAVES, N, &a, &buf), -SK_BAD_ARGUMENT);
    CHECK_EQ(pick(store, 1, 99, &a, &buf), -SK_BAD_ARGUMENT);
    CHECK_EQ(pick(store, 1, ints, &a, &buf), -SK_BAD_KEY);
    sk_column keys = {SK_COL_VAR64, 0, a.data, a.at, (int64_t)sizeof a.data};
    CHECK_EQ(sk_leaf_pick(store, 1, N, &keys, -1, &buf), -SK_BAD_ARGUMENT);
    keys.type = SK_COL_NONE;
    CHECK_EQ(sk_leaf_pick(store, 1, N, &keys, 3, &buf), -SK_BAD_KEY);
    keys.type = SK_COL_F64;
    CHECK_EQ(sk_leaf_pick(store, 1, N, &keys, 3, &buf), -SK_BAD_KEY);
    keys.type = SK_COL_VAR64;
    keys.data_len = 1;
    CHECK_EQ(sk_leaf_pick(store, 1, N, &keys, 3, &buf), -SK_BAD_ARGUMENT);
    int64_t number = 0;
    for (util_key key = util_int_key(0); util_leaf_of("i", &key, 2) != 1; number++)
        key = util_int_key(number + 1);
    keys = (sk_column){SK_COL_I64, 0, &number, NULL, 8};
    CHECK(sk_leaf_pick(store, 1, ints, &keys, 1, &buf) > 0);
    CHECK_EQ(sk_block_check(buf.data, buf.len), SK_OK);
    CHECK_EQ(sk_leaf_mark(store, 1, 2, SK_PARTIAL), SK_OK);
    CHECK_EQ(pick(store, 1, N, &a, &buf), -SK_UNKNOWN);
    CHECK_EQ(sk_leaf_gate(store, 1, 2, SK_GATE_SHUT), SK_OK);
    CHECK_EQ(pick(store, 1, N, &a, &buf), -SK_UNKNOWN);
    CHECK_EQ(sk_leaf_mark(store, 1, 2, SK_AWAY), SK_OK);
    CHECK_EQ(pick(store, 1, N, &a, &buf), -SK_NOT_OWNED);
    sk_buf_free(&buf);
    sk_close(store);
}

int main(void) {
    RUN(test_picked_entries_are_known_elsewhere_and_only_they);
    RUN(test_pick_refuses_what_it_cannot_answer);
    return test_report();
}
