/* test_store.c: opening, states, single-key operations of every kind, limits and figures. */
#include "store_util.h"

#include <float.h>
#include <math.h>

#define BYTES(text) (const uint8_t *)(text), sizeof(text) - 1

static void test_geometry_is_checked(void) {
    static const struct {
        uint32_t key_groups, subgroups;
        int expected;
    } cases[] = {{1, 1, SK_OK},
                 {2048, 1, SK_OK},
                 {128, 16, SK_OK},
                 {1 << 20, 1, SK_OK},
                 {1 << 10, 1 << 10, SK_OK},
                 {0, 1, SK_BAD_ARGUMENT},
                 {1, 0, SK_BAD_ARGUMENT},
                 {3, 1, SK_BAD_ARGUMENT},
                 {4, 6, SK_BAD_ARGUMENT},
                 {1 << 20, 2, SK_BAD_ARGUMENT},
                 {1 << 31, 1 << 31, SK_BAD_ARGUMENT},
                 {UINT32_MAX, 1, SK_BAD_ARGUMENT}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        sk_store *store = (sk_store *)1;
        CHECK_EQ(sk_open(cases[i].key_groups, cases[i].subgroups, 0, &store), cases[i].expected);
        CHECK_EQ(store != NULL, cases[i].expected == SK_OK);
        sk_close(store);
    }
}

static void test_states_are_found_again_and_kept_apart(void) {
    sk_store *store = util_open(4, 1);
    uint32_t a = util_state(store, "a", SK_I64, "i"), b = util_state(store, "b", SK_MAP, "(si)"),
             id;
    const char *name, *type;
    int kind, flags;
    CHECK_EQ(util_state(store, "a", SK_I64, "i"), a);
    CHECK_EQ(sk_state_add(store, "a", SK_F64, "i", 0, &id), SK_SCHEMA);
    CHECK_EQ(sk_state_add(store, "a", SK_I64, "s", 0, &id), SK_SCHEMA);
    CHECK(strstr(sk_reason(), "'a'") != NULL);
    CHECK_EQ(sk_state_add(store, "a", SK_I64, "i", SK_TIMED, &id), SK_SCHEMA);
    CHECK_EQ(sk_state_add(store, "c", SK_I64, "i", 2, &id), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_state_add(store, "", SK_I64, "i", 0, &id), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_state_add(store, "c", 0, "i", 0, &id), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_state_add(store, "c", 8, "i", 0, &id), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_state_add(store, "c", SK_I64, "q", 0, &id), SK_BAD_ARGUMENT);
    char longest[SK_NAME_BYTES_MAX + 2];
    memset(longest, 'n', sizeof longest);
    longest[SK_NAME_BYTES_MAX + 1] = 0;
    CHECK_EQ(sk_state_add(store, longest, SK_I64, "i", 0, &id), SK_BAD_ARGUMENT);
    longest[SK_NAME_BYTES_MAX] = 0;
    CHECK_EQ(sk_state_add(store, longest, SK_I64, "(sbisbisbisbisbis)", 0, &id), SK_OK);
    CHECK_EQ(sk_state_count(store), 3);
    CHECK_EQ(sk_state_info(store, b, &name, &kind, &type, &flags), SK_OK);
    CHECK(strcmp(name, "b") == 0 && strcmp(type, "(si)") == 0 && kind == SK_MAP);
    CHECK_EQ(sk_state_info(store, 3, &name, &kind, &type, &flags), SK_BAD_ARGUMENT);
    for (uint32_t i = 3; i < SK_STATES_MAX; i++) {
        char one[16];
        snprintf(one, sizeof one, "%u", i);
        CHECK_EQ(util_state(store, one, SK_BYTES, "b"), i);
    }
    CHECK_EQ(sk_state_add(store, "one more", SK_BYTES, "b", 0, &id), SK_LIMIT);
    CHECK_EQ(util_state(store, "a", SK_I64, "i"), a);
    sk_close(store);
}

static void test_operations_of_another_kind_are_refused(void) {
    sk_store *store = util_open(1, 1);
    int64_t i = 0;
    double d = 0;
    uint64_t cursor = 0, version = 0;
    sk_buf buf = {0};
    for (int kind = SK_I64; kind <= SK_NESTED; kind++) {
        char name[] = {(char)('a' + kind), 0};
        uint32_t id = util_state(store, name, kind, "b");
        bool is_i64 = kind == SK_I64, is_f64 = kind == SK_F64, is_container = kind >= SK_LIST;
        CHECK_EQ(sk_i64_get(store, id, BYTES("k"), &i), is_i64 ? SK_MISSING : SK_BAD_KIND);
        CHECK_EQ(sk_f64_get(store, id, BYTES("k"), &d), is_f64 ? SK_MISSING : SK_BAD_KIND);
        if (!is_i64) {
            CHECK_EQ(sk_i64_put(store, id, BYTES("k"), 1), SK_BAD_KIND);
            CHECK_EQ(sk_i64_fold(store, id, BYTES("k"), SK_ADD, 1, 1, &i), SK_BAD_KIND);
            CHECK_EQ(sk_i64_cas(store, id, BYTES("k"), NULL, 1, &i), SK_BAD_KIND);
        }
        if (!is_f64) {
            CHECK_EQ(sk_f64_put(store, id, BYTES("k"), 1), SK_BAD_KIND);
            CHECK_EQ(sk_f64_fold(store, id, BYTES("k"), SK_ADD, 1, 1, &d), SK_BAD_KIND);
            CHECK_EQ(sk_f64_cas(store, id, BYTES("k"), NULL, 1, &d), SK_BAD_KIND);
        }
        int expected = is_container ? SK_MISSING : SK_BAD_KIND;
        CHECK_EQ(sk_read(store, id, BYTES("k"), SK_R_LEN, NULL, 0, NULL, 0, 0, 0, &buf), -expected);
        CHECK_EQ(sk_write(store, id, BYTES("k"), SK_W_CLEAR, NULL, 0, NULL, NULL, 0, 0, 0, &buf),
                 -expected);
        CHECK_EQ(sk_page(store, id, BYTES("k"), NULL, 0, &cursor, &version, 10, &buf), -expected);
    }
    CHECK_EQ(sk_i64_get(store, 99, BYTES("k"), &i), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_get(store, 99, BYTES("k"), &buf), -SK_BAD_ARGUMENT);
    CHECK_EQ(sk_contains(store, 99, BYTES("k")), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_delete(store, 99, BYTES("k"), 0), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_probe_cost(store, 99, BYTES("k")), -SK_BAD_ARGUMENT);
    CHECK_EQ(util_stats(store, 1).entries, 0);
    sk_buf_free(&buf);
    sk_close(store);
}

static void test_i64_operations(void) {
    sk_store *store = util_open(2, 2);
    uint32_t id = util_state(store, "n", SK_I64, "s");
    int64_t value = -1, expected = 5;
    sk_buf buf = {0};
    CHECK_EQ(sk_i64_get(store, id, BYTES("k"), &value), SK_MISSING);
    CHECK_EQ(value, -1);
    CHECK_EQ(sk_i64_fold(store, id, BYTES("k"), SK_ADD, 3, 10, &value), SK_OK);
    CHECK_EQ(value, 13);
    CHECK_EQ(sk_i64_fold(store, id, BYTES("k"), SK_ADD, -3, 10, NULL), SK_OK);
    CHECK_EQ(sk_i64_fold(store, id, BYTES("k"), SK_MIN, 20, 0, &value), SK_OK);
    CHECK_EQ(value, 10);
    CHECK_EQ(sk_i64_fold(store, id, BYTES("k"), SK_MIN, -4, 0, &value), SK_OK);
    CHECK_EQ(value, -4);
    CHECK_EQ(sk_i64_fold(store, id, BYTES("k"), SK_MAX, 8, 0, &value), SK_OK);
    CHECK_EQ(value, 8);
    CHECK_EQ(sk_i64_fold(store, id, BYTES("new"), SK_MIN, 9, 1, &value), SK_OK);
    CHECK_EQ(value, 9); /* a missing entry counts as the operand */
    CHECK_EQ(sk_i64_fold(store, id, BYTES("k"), 3, 8, 0, &value), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_i64_fold(store, id, BYTES("never"), 3, 8, 0, &value), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_contains(store, id, BYTES("never")), SK_MISSING);
    CHECK_EQ(sk_i64_put(store, id, BYTES("k"), INT64_MAX), SK_OK);
    CHECK_EQ(sk_i64_fold(store, id, BYTES("k"), SK_ADD, 1, 0, &value), SK_OVERFLOW);
    CHECK_EQ(sk_i64_fold(store, id, BYTES("k"), SK_ADD, 0, 0, &value), SK_OK);
    CHECK_EQ(value, INT64_MAX);
    CHECK_EQ(sk_i64_put(store, id, BYTES("k"), INT64_MIN), SK_OK);
    CHECK_EQ(sk_i64_fold(store, id, BYTES("k"), SK_ADD, -1, 0, &value), SK_OVERFLOW);
    CHECK_EQ(sk_i64_fold(store, id, BYTES("over"), SK_ADD, 1, INT64_MAX, &value), SK_OVERFLOW);
    CHECK_EQ(sk_contains(store, id, BYTES("over")), SK_MISSING);
    CHECK_EQ(sk_i64_cas(store, id, BYTES("c"), &expected, 6, &value), SK_MISSING);
    CHECK_EQ(sk_i64_cas(store, id, BYTES("c"), NULL, 5, &value), SK_OK);
    CHECK_EQ(sk_i64_cas(store, id, BYTES("c"), NULL, 6, &value), SK_CHANGED);
    CHECK_EQ(value, 5);
    CHECK_EQ(sk_i64_cas(store, id, BYTES("c"), &expected, 6, &value), SK_OK);
    CHECK_EQ(value, 6);
    CHECK_EQ(sk_i64_cas(store, id, BYTES("c"), &expected, 7, NULL), SK_CHANGED);
    CHECK_EQ(sk_get(store, id, BYTES("c"), &buf), 8);
    CHECK_EQ(buf.data[0], 6);
    CHECK_EQ(sk_put(store, id, BYTES("c"), BYTES("\1\0\0\0\0\0\0\0")), SK_OK);
    CHECK_EQ(sk_put(store, id, BYTES("c"), BYTES("\1\0\0\0\0\0\0")), SK_BAD_VALUE);
    CHECK_EQ(sk_i64_get(store, id, BYTES("c"), &value), SK_OK);
    CHECK_EQ(value, 1);
    CHECK_EQ(sk_delete(store, id, BYTES("c"), 0), SK_OK);
    CHECK_EQ(sk_delete(store, id, BYTES("c"), 0), SK_MISSING);
    CHECK_EQ(sk_get(store, id, BYTES("c"), &buf), -SK_MISSING);
    sk_buf_free(&buf);
    sk_close(store);
}

static void test_f64_operations(void) {
    sk_store *store = util_open(2, 2);
    uint32_t id = util_state(store, "f", SK_F64, "s");
    double value = -1, nan = NAN, zero = 0.0, minus_zero = -0.0;
    CHECK_EQ(sk_f64_fold(store, id, BYTES("k"), SK_ADD, 0.5, 10, &value), SK_OK);
    CHECK(value == 10.5);
    CHECK_EQ(sk_f64_fold(store, id, BYTES("k"), SK_MIN, 0.25, 0, &value), SK_OK);
    CHECK(value == 0.25);
    CHECK_EQ(sk_f64_fold(store, id, BYTES("k"), SK_MAX, 7.5, 0, &value), SK_OK);
    CHECK(value == 7.5);
    CHECK_EQ(sk_f64_put(store, id, BYTES("k"), DBL_MAX), SK_OK);
    CHECK_EQ(sk_f64_fold(store, id, BYTES("k"), SK_ADD, DBL_MAX, 0, &value), SK_OK);
    CHECK(isinf(value));
    CHECK_EQ(sk_f64_put(store, id, BYTES("k"), nan), SK_OK);
    CHECK_EQ(sk_f64_cas(store, id, BYTES("k"), &nan, 0.0, &value), SK_OK); /* bit for bit */
    CHECK_EQ(sk_f64_cas(store, id, BYTES("k"), &minus_zero, 1.0, &value), SK_CHANGED);
    CHECK_EQ(sk_f64_cas(store, id, BYTES("k"), &zero, 1.0, &value), SK_OK);
    CHECK_EQ(sk_f64_cas(store, id, BYTES("k"), NULL, 1.0, &value), SK_CHANGED);
    CHECK_EQ(sk_f64_cas(store, id, BYTES("m"), &zero, 1.0, &value), SK_MISSING);
    CHECK_EQ(sk_f64_get(store, id, BYTES("k"), &value), SK_OK);
    CHECK(value == 1.0);
    sk_close(store);
}

static void test_bytes_of_every_length_are_kept(void) {
    sk_store *store = util_open(2, 2);
    uint32_t id = util_state(store, "b", SK_BYTES, "s");
    static uint8_t data[1 << 20];
    sk_buf buf = {0};
    test_rng rng = test_rng_new(1);
    for (size_t i = 0; i < sizeof data; i++) data[i] = (uint8_t)test_random(&rng);
    CHECK_EQ(sk_put(store, id, BYTES("k"), NULL, 0), SK_OK);
    CHECK_EQ(sk_get(store, id, BYTES("k"), &buf), 0);
    for (int i = 0; i < 2000; i++) { /* larger, smaller, the same */
        size_t len = test_below(&rng, 1ull << test_below(&rng, 12));
        size_t from = test_below(&rng, 1000);
        CHECK_EQ(sk_put(store, id, BYTES("k"), data + from, len), SK_OK);
        CHECK_EQ(sk_get(store, id, BYTES("k"), &buf), len);
        CHECK(len == 0 || memcmp(buf.data, data + from, len) == 0);
    }
    CHECK_EQ(sk_put(store, id, BYTES("k"), data, sizeof data), SK_OK);
    CHECK(sk_bytes_used(store) > sizeof data);
    CHECK_EQ(sk_get(store, id, BYTES("k"), &buf), sizeof data);
    CHECK_EQ(memcmp(buf.data, data, sizeof data), 0);
    CHECK_EQ(sk_put(store, id, BYTES("k"), data, 1), SK_OK);
    CHECK(sk_bytes_used(store) < 2000); /* a small value does not keep the memory of a large one */
    CHECK_EQ(sk_put(store, id, BYTES("k"), data, (size_t)SK_VALUE_BYTES_MAX + 1), SK_TOO_LARGE);
    CHECK_EQ(sk_get(store, id, BYTES("k"), &buf), 1);
    sk_buf_free(&buf);
    sk_close(store);
}

static void test_keys_of_every_length_are_kept(void) {
    sk_store *store = util_open(4, 4);
    uint32_t id = util_state(store, "n", SK_I64, "b");
    static const size_t lens[] = {0, 1, 2, 7, 8, 17, 18, 19, 31, 32, 33, 255, 256, 65535, 65536};
    uint8_t *data = malloc(SK_KEY_BYTES_MAX + 1);
    int64_t value = 0;
    memset(data, 'k', SK_KEY_BYTES_MAX + 1);
    for (size_t i = 0; i < sizeof lens / sizeof lens[0]; i++)
        CHECK_EQ(sk_i64_put(store, id, data, lens[i], (int64_t)lens[i]), SK_OK);
    for (size_t i = 0; i < sizeof lens / sizeof lens[0]; i++) {
        CHECK_EQ(sk_i64_get(store, id, data, lens[i], &value), SK_OK);
        CHECK_EQ(value, lens[i]);
    }
    CHECK_EQ(sk_i64_get(store, id, NULL, 0, &value), SK_OK);
    CHECK_EQ(sk_i64_put(store, id, data, SK_KEY_BYTES_MAX + 1, 0), SK_BAD_KEY);
    CHECK_EQ(util_stats(store, 16).entries, sizeof lens / sizeof lens[0]);
    for (size_t i = 0; i < sizeof lens / sizeof lens[0]; i++)
        CHECK_EQ(sk_delete(store, id, data, lens[i], 0), SK_OK);
    CHECK_EQ(util_stats(store, 16).entries, 0);
    free(data);
    sk_close(store);
}

/* Containers have their own tests (test_node.c). Here they are used through the store, with
 * keys. */
static void test_container_operations_reach_the_value(void) {
    sk_store *store = util_open(2, 2);
    uint32_t l = util_state(store, "l", SK_LIST, "s"), m = util_state(store, "m", SK_MAP, "s");
    uint32_t t = util_state(store, "t", SK_NESTED, "s");
    sk_buf buf = {0};
    CHECK_EQ(sk_write(store, l, BYTES("k"), SK_W_APPEND, NULL, 0, NULL, BYTES("\1"), 0, 0, &buf),
             -SK_MISSING);
    CHECK_EQ(util_stats(store, 4).entries, 0);
    for (int i = 0; i < 1000; i++)
        CHECK(sk_write(store, l, BYTES("k"), SK_W_APPEND, NULL, 0, "l",
                       BYTES("\xa3"
                             "abc"),
                       0, 0, &buf) >= 0);
    CHECK_EQ(sk_read(store, l, BYTES("k"), SK_R_LEN, NULL, 0, NULL, 0, 0, 0, &buf), 1000);
    CHECK(sk_read(store, l, BYTES("k"), SK_R_GET, BYTES("\xff"), NULL, 0, 0, 0, &buf) == 4);
    CHECK_EQ(memcmp(buf.data,
                    "\xa3"
                    "abc",
                    4),
             0);
    uint64_t cursor = 0, version = 0, pages = 0;
    while (sk_page(store, l, BYTES("k"), NULL, 0, &cursor, &version, 100, &buf) > 0) pages++;
    CHECK_EQ(pages, 10);
    CHECK_EQ(sk_page(store, l, BYTES("k"), NULL, 0, &cursor, &version, 100, &buf), -SK_END);
    CHECK_EQ(sk_page(store, l, BYTES("k"), NULL, 0, &cursor, &version, 0, &buf), -SK_BAD_ARGUMENT);
    cursor = version = 0;
    CHECK(sk_page(store, l, BYTES("k"), NULL, 0, &cursor, &version, 100, &buf) > 0);
    CHECK(sk_write(store, l, BYTES("k"), SK_W_POP, NULL, 0, NULL, NULL, 0, -1, 0, &buf) >= 0);
    CHECK_EQ(memcmp(buf.data,
                    "\xa3"
                    "abc",
                    4),
             0);
    CHECK_EQ(sk_page(store, l, BYTES("k"), NULL, 0, &cursor, &version, 100, &buf), -SK_CHANGED);
    CHECK_EQ(sk_write(store, l, BYTES("k"), SK_W_DELETE, NULL, 0, NULL, NULL, 0, 0, 0, &buf),
             SK_OK);
    CHECK_EQ(sk_page(store, l, BYTES("k"), NULL, 0, &cursor, &version, 100, &buf), -SK_CHANGED);
    CHECK_EQ(sk_contains(store, l, BYTES("k")), SK_MISSING);
    CHECK_EQ(sk_write(store, l, BYTES("k"), SK_W_DELETE, NULL, 0, NULL, NULL, 0, 0, 0, &buf),
             -SK_MISSING);
    CHECK(sk_write(store, m, BYTES("k"), SK_W_SET, BYTES("\xa1x"), "m", BYTES("\7"), 0, 0, &buf) >=
          0);
    CHECK_EQ(sk_read(store, m, BYTES("k"), SK_R_HAS, NULL, 0, BYTES("\xa1x"), 0, 0, &buf), SK_OK);
    CHECK_EQ(sk_read(store, m, BYTES("k"), SK_R_HAS, NULL, 0, BYTES("\xa1y"), 0, 0, &buf),
             -SK_MISSING);
    CHECK_EQ(sk_put(store, m, BYTES("k"), BYTES("\x90")), SK_BAD_VALUE);
    CHECK_EQ(sk_put(store, l, BYTES("k"), BYTES("\x80")), SK_BAD_VALUE);
    CHECK_EQ(sk_put(store, t, BYTES("k"), BYTES("")), SK_BAD_VALUE);
    CHECK_EQ(sk_put(store, t, BYTES("k"), BYTES("\x90\x90")), SK_BAD_VALUE);
    CHECK_EQ(sk_put(store, t, BYTES("k"), BYTES("\xc0")), SK_OK);
    CHECK(sk_write(store, t, BYTES("n"), SK_W_SET, BYTES("\1\2"), "mm", BYTES("\3"), 0, 0, &buf) >=
          0);
    CHECK_EQ(sk_get(store, t, BYTES("n"), &buf), 5);
    CHECK_EQ(memcmp(buf.data, "\x81\1\x81\2\3", 5), 0);
    CHECK_EQ(util_stats(store, 4).entries, 3);
    sk_buf_free(&buf);
    sk_close(store);
}

static void test_memory_limit_refuses_and_leaves_all_as_it_was(void) {
    sk_store *store = NULL;
    CHECK_EQ(sk_open(2, 2, 100000, &store), SK_OK);
    uint32_t n = util_state(store, "n", SK_I64, "b"), b = util_state(store, "b", SK_BYTES, "b");
    uint32_t l = util_state(store, "l", SK_LIST, "b");
    uint8_t value[2000] = {0};
    sk_buf buf = {0}, was = {0}, is = {0};
    uint32_t k = 0;
    int status = SK_OK;
    for (; status == SK_OK; k++) {
        util_key key = util_bytes_key(k);
        status = k % 3 == 0   ? sk_i64_put(store, n, key.data, key.len, k)
                 : k % 3 == 1 ? sk_put(store, b, key.data, key.len, value, k % 900)
                              : (int)-sk_write(store, l, BYTES("list"), SK_W_APPEND, NULL, 0, "l",
                                               BYTES("\xc4\x0a"
                                                     "0123456789"),
                                               0, 0, &buf);
        CHECK(sk_bytes_used(store) <= 100000);
    }
    CHECK_EQ(status, SK_LIMIT);
    CHECK(strstr(sk_reason(), "limit") != NULL);
    CHECK(k > 100);
    util_encode_all(store, 4, &was);
    uint64_t bytes = sk_bytes_used(store);
    util_key key = util_bytes_key(1);
    CHECK_EQ(sk_bytes_limit(store, bytes + 1000), SK_OK);
    CHECK_EQ(sk_put(store, b, BYTES("large"), value, sizeof value), SK_LIMIT);
    CHECK_EQ(sk_put(store, b, key.data, key.len, value, sizeof value), SK_LIMIT);
    util_encode_all(store, 4, &is);
    CHECK(util_same(&was, &is));
    CHECK_EQ(sk_bytes_used(store), bytes);
    /* deleting works at the limit, and makes room */
    for (uint32_t i = 1; i < k; i += 3) {
        key = util_bytes_key(i);
        CHECK(sk_delete(store, b, key.data, key.len, 0) <= SK_MISSING);
    }
    CHECK_EQ(sk_put(store, b, BYTES("large"), value, sizeof value), SK_OK);
    CHECK_EQ(sk_bytes_limit(store, 1), SK_OK); /* below what is used: nothing fits, all stays */
    CHECK_EQ(sk_put(store, b, BYTES("larger"), value, sizeof value), SK_LIMIT);
    CHECK_EQ(sk_contains(store, b, BYTES("large")), SK_OK);
    CHECK_EQ(sk_bytes_limit(store, 0), SK_OK);
    CHECK_EQ(sk_put(store, b, BYTES("larger"), value, sizeof value), SK_OK);
    sk_buf_free(&buf);
    sk_buf_free(&was);
    sk_buf_free(&is);
    sk_close(store);
}

static void test_figures_add_up_by_leaf_and_by_state(void) {
    sk_store *store = util_open(4, 4);
    uint32_t a = util_state(store, "a", SK_I64, "b"), b = util_state(store, "b", SK_BYTES, "b");
    for (uint32_t k = 0; k < 500; k++) {
        util_key key = util_bytes_key(k);
        CHECK_EQ(sk_i64_put(store, a, key.data, key.len, k), SK_OK);
        if (k % 2) CHECK_EQ(sk_put(store, b, key.data, key.len, key.data, key.len), SK_OK);
    }
    sk_stats all = util_stats(store, 16), sum = {0}, one;
    CHECK_EQ(all.entries, 750);
    CHECK_EQ(all.dirty, 750);
    CHECK_EQ(all.bytes, sk_bytes_used(store));
    for (uint32_t leaf = 0; leaf < 16; leaf++)
        for (uint32_t state = 0; state < 2; state++) {
            CHECK_EQ(sk_stats_read(store, state, leaf, leaf + 1, &one), SK_OK);
            sum.entries += one.entries;
            sum.bytes += one.bytes;
        }
    CHECK_EQ(sum.entries, 750);
    CHECK_EQ(sum.bytes, all.bytes);
    CHECK_EQ(sk_stats_read(store, a, 0, 16, &one), SK_OK);
    CHECK_EQ(one.entries, 500);
    CHECK_EQ(sk_stats_read(store, a, 3, 3, &one), SK_OK);
    CHECK_EQ(one.entries, 0);
    CHECK_EQ(sk_stats_read(store, 2, 0, 16, &one), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_stats_read(store, a, 0, 17, &one), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_stats_read(store, a, 5, 4, &one), SK_BAD_ARGUMENT);
    for (uint32_t k = 0; k < 500; k++) {
        util_key key = util_bytes_key(k);
        CHECK_EQ(sk_delete(store, a, key.data, key.len, 0), SK_OK);
        if (k % 2) CHECK_EQ(sk_delete(store, b, key.data, key.len, 0), SK_OK);
    }
    all = util_stats(store, 16);
    CHECK_EQ(all.entries + all.dirty + all.tombstones, 0);
    CHECK(all.bytes < 16 * 2 * 6 * 1024); /* arrays only */
    sk_close(store);
}

static void test_memory_per_entry_is_what_is_promised(void) {
    sk_store *store = util_open(256, 1);
    uint32_t id = util_state(store, "n", SK_I64, "s");
    char key[24];
    for (int k = 0; k < 200000; k++) {
        snprintf(key, sizeof key, "user-%07d", k);
        CHECK_EQ(sk_i64_put(store, id, (uint8_t *)key, 12, k), SK_OK);
    }
    CHECK(sk_bytes_used(store) <= 200000ull * 64);
    CHECK_EQ(util_stats(store, 256).flooded, 0);
    sk_close(store);
}

static void test_sizes_are_what_sums_over_single_leaves_are(void) {
    enum { LEAVES = 4 };
    sk_store *store = util_open(2, 2);
    for (uint32_t state = 0; state < 2; state++)
        util_fill_bytes(store, util_state(store, state ? "a" : "b", SK_BYTES, "b"), 0, 200);
    uint64_t entries[LEAVES], bytes[LEAVES];
    CHECK_EQ(sk_leaf_gate(store, 1, 2, SK_GATE_SHUT), SK_OK);
    CHECK_EQ(sk_leaf_mark(store, 2, 3, SK_AWAY), SK_OK);
    for (uint32_t state = 0; state < 2; state++) {
        CHECK_EQ(sk_leaf_sizes(store, state, entries, bytes), SK_OK);
        for (uint32_t i = 0; i < LEAVES; i++) {
            sk_stats stats;
            CHECK_EQ(sk_stats_read(store, state, i, i + 1, &stats), SK_OK);
            CHECK_EQ(entries[i], stats.entries);
            CHECK_EQ(bytes[i], stats.bytes);
        }
    }
    CHECK_EQ(sk_leaf_sizes(store, SK_ALL_STATES, NULL, bytes), SK_OK);
    CHECK_EQ(sk_leaf_sizes(store, SK_ALL_STATES, entries, NULL), SK_OK);
    for (uint32_t i = 0; i < LEAVES; i++) {
        sk_stats stats;
        CHECK_EQ(sk_stats_read(store, SK_ALL_STATES, i, i + 1, &stats), SK_OK);
        CHECK_EQ(bytes[i], stats.bytes);
        CHECK_EQ(entries[i], stats.entries);
    }
    CHECK(bytes[1] > 0);
    CHECK_EQ(bytes[2], 0);
    CHECK_EQ(sk_leaf_sizes(store, 77, entries, bytes), SK_BAD_ARGUMENT);
    sk_close(store);
}

static void test_heat_counts_calls_exactly_and_records_about(void) {
    enum { LEAVES = 4, RECORDS = 40000 };
    sk_store *store = util_open(2, 2);
    uint32_t a = util_state(store, "a", SK_I64, "i"), b = util_state(store, "b", SK_I64, "i");
    uint64_t heat[LEAVES], counted[LEAVES] = {0};
    for (int64_t k = 0; k < 1000; k++) {
        util_key key = util_int_key(k * k);
        CHECK_EQ(sk_i64_put(store, k % 2 ? a : b, key.data, key.len, 1), SK_OK);
        counted[util_leaf_of("i", &key, 2)]++;
    }
    CHECK_EQ(sk_leaf_heat(store, heat), SK_OK);
    for (int i = 0; i < LEAVES; i++) CHECK_EQ(heat[i], counted[i]);
    /* keys of one leaf get 8 times as many records, in many small batches and one large one */
    int64_t *keys = malloc(RECORDS * sizeof *keys);
    uint8_t *status = malloc(RECORDS);
    if (keys == NULL || status == NULL) abort();
    test_rng rng = test_rng_new(1);
    for (int64_t n = 0; n < RECORDS;) {
        int64_t k = (int64_t)test_below(&rng, 1000);
        util_key key = util_int_key(k);
        uint32_t leaf = util_leaf_of("i", &key, 2);
        if (leaf != 2 && test_below(&rng, 8) != 0) continue;
        keys[n++] = k;
        counted[leaf] += 2;
    }
    sk_batch_args large = {.n = RECORDS, .operand_i64 = 1, .status = status};
    large.keys = (sk_column){SK_COL_I64, 0, keys, NULL, 8 * RECORDS};
    CHECK_EQ(sk_batch(store, a, SK_B_ADD, &large), SK_OK);
    for (int64_t at = 0; at < RECORDS; at += 7) {
        sk_batch_args args = {
            .n = RECORDS - at < 7 ? RECORDS - at : 7, .operand_i64 = 1, .status = status};
        args.keys = (sk_column){SK_COL_I64, 0, keys + at, NULL, 8 * args.n};
        CHECK_EQ(sk_batch(store, b, SK_B_ADD, &args), SK_OK);
    }
    CHECK_EQ(sk_leaf_heat(store, heat), SK_OK);
    for (int i = 0; i < LEAVES; i++) {
        CHECK(heat[i] > counted[i] * 8 / 10);
        CHECK(heat[i] < counted[i] * 12 / 10);
    }
    CHECK(heat[2] > 6 * heat[1]);
    CHECK_EQ(util_stats(store, LEAVES).operations, 1000 + 2 * RECORDS);
    /* leaves that were moved away and back keep their heat */
    sk_leaves *leaves = NULL;
    uint64_t later[LEAVES];
    CHECK_EQ(sk_detach(store, 1, 3, &leaves), SK_OK);
    CHECK_EQ(sk_leaf_heat(store, later), SK_OK);
    CHECK(memcmp(heat, later, sizeof heat) == 0);
    CHECK_EQ(sk_attach(store, leaves), SK_OK);
    CHECK_EQ(sk_leaf_heat(store, later), SK_OK);
    CHECK(memcmp(heat, later, sizeof heat) == 0);
    CHECK_EQ(util_stats(store, LEAVES).operations, 1000 + 2 * RECORDS);
    free(keys);
    free(status);
    sk_close(store);
}

/* ---- Random operations of every kind against an array of encoded values ---- */

#define KEYS 120

static void test_random_operations_match_the_model(void) {
    typedef struct {
        bool is_there;
        uint8_t data[64];
        size_t len;
    } model;
    for (int kind = SK_I64; kind <= SK_NESTED; kind++) {
        static model m[KEYS];
        memset(m, 0, sizeof m);
        test_rng rng = test_rng_new(100 + (uint64_t)kind);
        sk_store *store = util_open(2, 4);
        uint32_t id = util_state(store, "state", kind, "b");
        sk_buf buf = {0};
        for (int step = 0; step < 20000; step++) {
            uint32_t k = (uint32_t)test_below(&rng, KEYS);
            util_key key = util_bytes_key(k);
            unsigned what = (unsigned)test_below(&rng, 10);
            if (what < 4) {
                size_t len = kind <= SK_F64 ? 8 : test_below(&rng, 15);
                for (size_t i = 0; i < 64; i++) m[k].data[i] = (uint8_t)test_below(&rng, 100);
                if (kind >= SK_LIST) { /* a container of len small ints */
                    bool is_map = kind == SK_MAP || (kind == SK_NESTED && step % 2);
                    m[k].data[0] = (uint8_t)((is_map ? 0x80 : 0x90) + len);
                    for (size_t i = 0; is_map && i < len; i++) m[k].data[1 + 2 * i] = (uint8_t)i;
                    len = 1 + (is_map ? 2 * len : len);
                }
                m[k].len = len;
                m[k].is_there = true;
                CHECK_EQ(sk_put(store, id, key.data, key.len, m[k].data, len), SK_OK);
            } else if (what < 6) {
                CHECK_EQ(sk_delete(store, id, key.data, key.len, (int)test_below(&rng, 2)),
                         m[k].is_there ? SK_OK : SK_MISSING);
                m[k].is_there = false;
            } else if (what < 9) {
                int64_t len = sk_get(store, id, key.data, key.len, &buf);
                CHECK_EQ(len, m[k].is_there ? (int64_t)m[k].len : -SK_MISSING);
                if (len > 0) CHECK_EQ(memcmp(buf.data, m[k].data, m[k].len), 0);
            } else {
                CHECK_EQ(sk_contains(store, id, key.data, key.len),
                         m[k].is_there ? SK_OK : SK_MISSING);
            }
        }
        uint64_t entries = 0;
        for (uint32_t k = 0; k < KEYS; k++) entries += m[k].is_there;
        CHECK_EQ(util_stats(store, 8).entries, entries);
        sk_buf_free(&buf);
        sk_close(store);
    }
}

int main(void) {
    RUN(test_geometry_is_checked);
    RUN(test_states_are_found_again_and_kept_apart);
    RUN(test_operations_of_another_kind_are_refused);
    RUN(test_i64_operations);
    RUN(test_f64_operations);
    RUN(test_bytes_of_every_length_are_kept);
    RUN(test_keys_of_every_length_are_kept);
    RUN(test_container_operations_reach_the_value);
    RUN(test_memory_limit_refuses_and_leaves_all_as_it_was);
    RUN(test_figures_add_up_by_leaf_and_by_state);
    RUN(test_memory_per_entry_is_what_is_promised);
    RUN(test_sizes_are_what_sums_over_single_leaves_are);
    RUN(test_heat_counts_calls_exactly_and_records_about);
    RUN(test_random_operations_match_the_model);
    return test_report();
}
