/*
 * test_kind.c: the table of kinds (csrc/kind.c). Rows are complete, and all ways into a store agree
 * on what is a valid value of a kind. The tests go through all kinds that there are.
 */
#include "kind.h"
#include "store_util.h"

static_assert(sizeof sk_kinds / sizeof sk_kinds[0] == SK_KINDS_MAX, "a place for each number");
static_assert(SK_KINDS_MAX <= 8 * sizeof(unsigned), "sets of kinds are bits of a word");

static void test_every_row_has_what_the_way_it_is_held_asks_for(void) {
    int count = 0;
    for (int k = 0; k < SK_KINDS_MAX; k++) {
        const sk_kind_ops *kind = sk_kinds[k];
        CHECK_EQ(sk_kind_is_known(k), kind != NULL);
        if (kind == NULL) continue;
        count++;
        CHECK(kind->name != NULL && kind->name[0] != 0);
        for (int other = 0; other < k; other++)
            CHECK(sk_kinds[other] == NULL || strcmp(sk_kinds[other]->name, kind->name) != 0);
        CHECK(kind->held >= SK_IN_SLOT && kind->held <= SK_OWN);
        CHECK_EQ(sk_kind_width(k), kind->held == SK_IN_SLOT ? 8 : 0);
        CHECK(kind->put != NULL);
        bool is_own = kind->held == SK_OWN, is_in_slot = kind->held == SK_IN_SLOT;
        CHECK_EQ(kind->make != NULL, is_own);
        CHECK_EQ(kind->encode != NULL, is_own);
        CHECK_EQ(kind->free != NULL, is_own);
        CHECK_EQ(kind->column != SK_COL_NONE, is_in_slot);
        CHECK_EQ(kind->row_tag != 0, is_in_slot);
        CHECK_EQ(kind->widen != NULL, kind->wider != 0);
        if (kind->wider == 0) continue;
        CHECK(is_in_slot && sk_kind_is_known(kind->wider));
        CHECK_EQ(sk_kinds[kind->wider]->held, SK_IN_SLOT);
    }
    CHECK(count >= SK_TIMERS);
    CHECK(!sk_kind_is_known(-1) && !sk_kind_is_known(SK_KINDS_MAX));
}

static void test_a_state_may_be_timed_iff_its_kind_expires(void) {
    sk_store *store = util_open(1, 1);
    for (int k = 1; k < SK_KINDS_MAX; k++) {
        uint32_t id;
        char name[16];
        snprintf(name, sizeof name, "s%d", k);
        int expected = !sk_kind_is_known(k) || !sk_kinds[k]->may_expire ? SK_BAD_ARGUMENT : SK_OK;
        CHECK_EQ(sk_state_add(store, name, k, "b", SK_TIMED, &id), expected);
    }
    sk_close(store);
}

/* Puts a value and compares it with what comes back, from the state and from its block. */
static int put_and_compare(int kind, const sk_buf *value) {
    sk_store *store = util_open(1, 1), *other = util_open(1, 1);
    uint32_t id = util_state(store, "s", kind, "b");
    sk_buf found = {0}, block = {0};
    int status = sk_put(store, id, (const uint8_t *)"k", 1, value->data, value->len);
    if (status == SK_OK) {
        CHECK_EQ(sk_get(store, id, (const uint8_t *)"k", 1, &found), (int64_t)value->len);
        CHECK(util_same(&found, value));
        CHECK(sk_leaf_encode(store, 0, id, 0, &block) > 0);
        CHECK_EQ(sk_block_check(block.data, block.len), SK_OK);
        CHECK_EQ(sk_leaf_decode(other, 0, block.data, block.len, SK_REPLACE), SK_OK);
        CHECK_EQ(sk_get(other, 0, (const uint8_t *)"k", 1, &found), (int64_t)value->len);
        CHECK(util_same(&found, value));
    }
    sk_buf_free(&found);
    sk_buf_free(&block);
    sk_close(store);
    sk_close(other);
    return status;
}

/* A block of kind bytes whose header says that it is of another kind. Its columns are the same if
 * values of that kind are not held in the slot. */
static void check_forged(int kind, const sk_buf *value, bool is_good) {
    sk_store *store = util_open(1, 1), *other = util_open(1, 1);
    uint32_t id = util_state(store, "s", SK_BYTES, "b");
    sk_buf block = {0}, rewritten = {0};
    CHECK_EQ(sk_put(store, id, (const uint8_t *)"k", 1, value->data, value->len), SK_OK);
    CHECK(sk_leaf_encode(store, 0, id, 0, &block) > 0);
    block.data[45] = (uint8_t)kind;
    int expected = is_good ? SK_OK : SK_CORRUPT;
    CHECK_EQ(sk_block_check(block.data, block.len), expected);
    CHECK_EQ(sk_block_rewrite(block.data, block.len, 0, 0, kind, 0, 0, &rewritten), expected);
    CHECK_EQ(sk_leaf_decode(other, 0, block.data, block.len, SK_REPLACE), expected);
    sk_buf_free(&block);
    sk_buf_free(&rewritten);
    sk_close(store);
    sk_close(other);
}

static void check_value(const void *data, size_t len) {
    sk_buf value = {0};
    CHECK_EQ(sk_buf_put(&value, data, len), SK_OK);
    for (int kind = 1; kind < SK_KINDS_MAX; kind++) {
        if (!sk_kind_is_known(kind)) continue;
        int status = put_and_compare(kind, &value);
        CHECK(status == SK_OK || status == SK_BAD_VALUE || status == SK_TOO_DEEP);
        if (sk_kinds[kind]->held != SK_IN_SLOT) check_forged(kind, &value, status == SK_OK);
    }
    sk_buf_free(&value);
}

static void test_put_and_blocks_agree_on_what_is_a_value(void) {
    static const char rising[17] = "\1\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0";
    static const char falling[17] = "\2\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0";
    check_value("", 0);
    check_value(rising, 16);
    check_value(falling, 16);
    check_value(rising, 15);
    check_value("\x90", 1);
    check_value("\x80", 1);
    check_value("\xc0", 1);
    check_value("\x92\x01\x91\x02", 4);
    check_value("\x92\x01", 2);
    check_value("\x81\xa1k\x01", 4);
    check_value("\x82\xa1k\x01\xa1k\x02", 7); /* the same key twice */
    test_rng rng = test_rng_new(0);
    for (int round = 0; round < 400; round++) {
        uint8_t data[24];
        size_t len = (size_t)test_below(&rng, sizeof data);
        for (size_t i = 0; i < len; i++) data[i] = (uint8_t)test_below(&rng, 256);
        if (len > 0 && round % 2 == 0)
            data[0] = (uint8_t)(0x80 + test_below(&rng, 32)); /* short containers */
        check_value(data, len);
    }
}

int main(void) {
    RUN(test_every_row_has_what_the_way_it_is_held_asks_for);
    RUN(test_a_state_may_be_timed_iff_its_kind_expires);
    RUN(test_put_and_blocks_agree_on_what_is_a_value);
    return test_report();
}
