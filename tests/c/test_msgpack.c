/* Tests of csrc/msgpack.c: walking hostile bytes, map keys, writers. */
#include "alloc.h"
#include "msgpack.h"
#include "test.h"

#define BYTES(...) ((const uint8_t[]){__VA_ARGS__}), sizeof((const uint8_t[]){__VA_ARGS__})

/* A copy of exact size on the heap, so that the sanitizer sees a read beyond its end. */
static uint8_t *exact(const uint8_t *p, size_t len) {
    uint8_t *copy = malloc(len > 0 ? len : 1);
    if (len > 0) memcpy(copy, p, len);
    return copy;
}

/* Runs all three walks on an exact copy. Returns the result of skip; check must agree if the keys
 * are good. */
static int64_t skip(const uint8_t *p, size_t len, unsigned depth_max) {
    uint8_t *copy = exact(p, len);
    int64_t n = sk_mp_skip(copy, len, depth_max);
    free(copy);
    return n;
}

static int64_t check(const uint8_t *p, size_t len, unsigned depth_max) {
    uint8_t *copy = exact(p, len);
    int64_t n = sk_mp_check(copy, len, depth_max);
    if (n != -SK_BAD_VALUE) CHECK_EQ(sk_mp_check_small(copy, len, depth_max), n);
    if (n > 0) CHECK(sk_mp_next(copy) == copy + n);
    free(copy);
    return n;
}

/* One value of every format, by hand from the specification. Bodies are zeros. */
static const struct {
    uint8_t head[6];
    uint8_t head_len;
    uint32_t body_len;
} scalars[] = {
    {{0x00}, 1, 0},
    {{0x7f}, 1, 0},
    {{0xa0}, 1, 0},
    {{0xbf}, 1, 31},
    {{0xc0}, 1, 0},
    {{0xc2}, 1, 0},
    {{0xc3}, 1, 0},
    {{0xc4, 5}, 2, 5},
    {{0xc5, 1, 0}, 3, 256},
    {{0xc6, 0, 1, 0, 0}, 5, 65536},
    {{0xc7, 3, 9}, 3, 3},
    {{0xc8, 1, 0, 9}, 4, 256},
    {{0xc9, 0, 1, 0, 0, 9}, 6, 65536},
    {{0xca}, 1, 4},
    {{0xcb}, 1, 8},
    {{0xcc}, 1, 1},
    {{0xcd}, 1, 2},
    {{0xce}, 1, 4},
    {{0xcf}, 1, 8},
    {{0xd0}, 1, 1},
    {{0xd1}, 1, 2},
    {{0xd2}, 1, 4},
    {{0xd3}, 1, 8},
    {{0xd4, 9}, 2, 1},
    {{0xd5, 9}, 2, 2},
    {{0xd6, 9}, 2, 4},
    {{0xd7, 9}, 2, 8},
    {{0xd8, 9}, 2, 16},
    {{0xd9, 40}, 2, 40},
    {{0xda, 1, 0}, 3, 256},
    {{0xdb, 0, 1, 0, 0}, 5, 65536},
    {{0xe0}, 1, 0},
    {{0xff}, 1, 0},
};

static void test_every_scalar_format_has_its_length(void) {
    for (size_t k = 0; k < sizeof scalars / sizeof scalars[0]; k++) {
        size_t len = scalars[k].head_len + scalars[k].body_len;
        uint8_t *p = calloc(1, len + 1);
        memcpy(p, scalars[k].head, scalars[k].head_len);
        CHECK_EQ(skip(p, len, 0), len);
        CHECK_EQ(skip(p, len + 1, 0), len); /* bytes behind the value do not matter */
        CHECK_EQ(check(p, len, 0), len);
        sk_mp_head head;
        CHECK_EQ(sk_mp_read_head(p, len, &head), SK_OK);
        CHECK_EQ(head.type, SK_MP_SCALAR);
        CHECK_EQ(head.head_len, scalars[k].head_len);
        CHECK_EQ(head.body_len, scalars[k].body_len);
        size_t cuts = len < 600 ? len : 600;
        for (size_t cut = 0; cut < cuts; cut++) {
            CHECK_EQ(skip(p, cut, 0), -SK_BAD_VALUE);
            CHECK_EQ(sk_mp_read_head(p, cut, &head), SK_BAD_VALUE);
        }
        CHECK_EQ(skip(p, len - 1, 0), -SK_BAD_VALUE);
        free(p);
    }
}

/* {"a": [1, [], {}], [1, "b"]: -1, 300: "cd"} */
static const uint8_t sample[] = {0x83, 0xa1, 'a',  0x93, 1,    0x90, 0x80, 0x92, 1,
                                 0xa1, 'b',  0xff, 0xcd, 0x01, 0x2c, 0xa2, 'c',  'd'};

static void test_every_truncation_is_bad(void) {
    CHECK_EQ(check(sample, sizeof sample, SK_DEPTH_MAX), sizeof sample);
    for (size_t cut = 0; cut < sizeof sample; cut++) {
        CHECK_EQ(skip(sample, cut, SK_DEPTH_MAX), -SK_BAD_VALUE);
        CHECK_EQ(check(sample, cut, SK_DEPTH_MAX), -SK_BAD_VALUE);
    }
}

static void test_the_reserved_byte_is_bad_everywhere(void) {
    CHECK_EQ(skip(BYTES(0xc1), 1), -SK_BAD_VALUE);
    CHECK_EQ(skip(BYTES(0x92, 0x01, 0xc1), 1), -SK_BAD_VALUE);
    CHECK_EQ(check(BYTES(0x81, 0xc1, 0x01), 1), -SK_BAD_VALUE);
    CHECK_EQ(check(BYTES(0x81, 0x01, 0xc1), 1), -SK_BAD_VALUE);
}

static void test_hostile_counts_are_refused_by_their_head(void) {
    CHECK_EQ(skip(BYTES(0xdd, 0xff, 0xff, 0xff, 0xff), 32), -SK_BAD_VALUE);
    CHECK_EQ(skip(BYTES(0xdf, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0), 32), -SK_BAD_VALUE);
    CHECK_EQ(skip(BYTES(0xdf, 0x80, 0x00, 0x00, 0x00), 32), -SK_BAD_VALUE);
    CHECK_EQ(skip(BYTES(0xdb, 0xff, 0xff, 0xff, 0xff, 'x'), 32), -SK_BAD_VALUE);
    CHECK_EQ(skip(BYTES(0xc6, 0xff, 0xff, 0xff, 0xff), 32), -SK_BAD_VALUE);
    CHECK_EQ(skip(BYTES(0xc9, 0xff, 0xff, 0xff, 0xff, 1), 32), -SK_BAD_VALUE);
    CHECK_EQ(check(BYTES(0x81, 0xdd, 0xff, 0xff, 0xff, 0xff), 32), -SK_BAD_VALUE);
}

static void test_depth_is_bounded_without_recursion(void) {
    size_t len = 1000000;
    uint8_t *p = malloc(len);
    memset(p, 0x91, len);
    CHECK_EQ(skip(p, len, SK_DEPTH_MAX), -SK_TOO_DEEP);
    CHECK_EQ(check(p, len, 1000000), -SK_TOO_DEEP); /* never more than SK_DEPTH_MAX */
    p[SK_DEPTH_MAX] = 0xc0;
    CHECK_EQ(skip(p, len, SK_DEPTH_MAX), SK_DEPTH_MAX + 1);
    CHECK_EQ(skip(p, len, SK_DEPTH_MAX - 1), -SK_TOO_DEEP);
    for (size_t k = 0; k < len; k++) p[k] = k % 2 == 0 ? 0x81 : 0x01;
    CHECK_EQ(check(p, len, SK_DEPTH_MAX), -SK_TOO_DEEP);
    free(p);
    CHECK_EQ(skip(BYTES(0xc0), 0), 1);
    CHECK_EQ(skip(BYTES(0x90), 0), -SK_TOO_DEEP);
    CHECK_EQ(check(BYTES(0x81, 0x91, 1, 1), 1), -SK_TOO_DEEP); /* an array as a key counts */
    CHECK_EQ(check(BYTES(0x81, 0x91, 1, 1), 2), 4);
}

static void test_keys_must_be_shortest(void) {
    const struct {
        uint8_t bytes[40];
        uint8_t len;
        bool is_key;
    } cases[] = {
        {{0xc0}, 1, true},
        {{0xc3}, 1, true},
        {{0xcc, 0x80}, 2, true},
        {{0xcc, 0x7f}, 2, false},
        {{0xcd, 0x01, 0x00}, 3, true},
        {{0xcd, 0x00, 0xff}, 3, false},
        {{0xce, 0, 1, 0, 0}, 5, true},
        {{0xce, 0, 0, 0xff, 0xff}, 5, false},
        {{0xcf, 0, 0, 0, 1, 0, 0, 0, 0}, 9, true},
        {{0xcf, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff}, 9, false},
        {{0xd0, 0xdf}, 2, true},
        {{0xd0, 0xe0}, 2, false},
        {{0xd0, 0x01}, 2, false},
        {{0xd1, 0xff, 0x7f}, 3, true},
        {{0xd1, 0xff, 0x80}, 3, false},
        {{0xd1, 0x01, 0x00}, 3, false},
        {{0xd2, 0xff, 0xff, 0x7f, 0xff}, 5, true},
        {{0xd2, 0xff, 0xff, 0x80, 0x00}, 5, false},
        {{0xd3, 0xff, 0xff, 0xff, 0xff, 0x7f, 0xff, 0xff, 0xff}, 9, true},
        {{0xd3, 0xff, 0xff, 0xff, 0xff, 0x80, 0x00, 0x00, 0x00}, 9, false},
        {{0xca, 0, 0, 0, 0}, 5, false},
        {{0xcb, 0, 0, 0, 0, 0, 0, 0, 0}, 9, true},
        {{0xa0}, 1, true},
        {{0xd9, 32}, 34, true},
        {{0xd9, 31}, 33, false},
        {{0xda, 0, 3}, 6, false},
        {{0xdb, 0, 0, 0, 3}, 8, false},
        {{0xc4, 0}, 2, true},
        {{0xc5, 0, 1}, 4, false},
        {{0xc6, 0, 0, 0, 1}, 6, false},
        {{0xd4, 9, 1}, 3, true},
        {{0xc7, 1, 9, 1}, 4, false},
        {{0xc7, 3, 9}, 6, true},
        {{0xc7, 0, 9}, 3, true},
        {{0xc8, 0, 3, 9}, 7, false},
        {{0x90}, 1, true},
        {{0x92, 1, 0xa1, 'x'}, 4, true},
        {{0x91, 0x90}, 2, false},
        {{0x91, 0x80}, 2, false},
        {{0x91, 0xcc, 1}, 3, false},
        {{0xdc, 0, 1, 1}, 4, false},
        {{0xdd, 0, 0, 0, 1, 1}, 6, false},
        {{0x80}, 1, false},
        {{0xc1}, 1, false},
        {{1, 2}, 2, false}, /* two values */
        {{0x92, 1}, 2, false},
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        uint8_t *key = exact(cases[k].bytes, cases[k].len);
        if (sk_mp_is_key(key, cases[k].len) != cases[k].is_key) printf("case %zu\n", k);
        CHECK_EQ(sk_mp_is_key(key, cases[k].len), cases[k].is_key);
        free(key);
    }
    CHECK(!sk_mp_is_key(sample, 0));
    CHECK_EQ(check(BYTES(0x81, 0xcc, 0x01, 0x01), 2), -SK_BAD_VALUE);
    CHECK_EQ(check(BYTES(0x91, 0xcc, 0x01), 2), 3); /* values may be of any width */
    CHECK_EQ(check(BYTES(0x81, 0x80, 0x01), 2), -SK_BAD_VALUE);
}

/* Checks a map of n integer keys; key number `twice` (if below n) repeats the first. */
static int64_t check_map_of(uint32_t n, uint32_t twice, bool small) {
    uint8_t *p = malloc(5 + (size_t)n * 10);
    size_t len = sk_mp_write_map(p, n);
    for (uint32_t k = 0; k < n; k++) {
        len += sk_mp_write_int(p + len, k == twice ? 0 : k);
        p[len++] = 0xc0;
    }
    int64_t found = small ? sk_mp_check_small(p, len, 1) : sk_mp_check(p, len, 1);
    if (found >= 0) CHECK_EQ(found, len);
    free(p);
    return found;
}

static void test_equal_keys_are_found_in_small_and_large_maps(void) {
    const uint32_t sizes[] = {2, 3, 15, 16, 63, 64, 65, 66, 1000, 65535, 65536, 70000};
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        uint32_t n = sizes[k];
        CHECK(check_map_of(n, n, false) > 0);
        CHECK_EQ(check_map_of(n, n - 1, false), -SK_BAD_VALUE);
        CHECK_EQ(check_map_of(n, n / 2, false), -SK_BAD_VALUE);
        CHECK_EQ(check_map_of(n, 1, false), -SK_BAD_VALUE);
        CHECK_EQ(check_map_of(n, 1, true) < 0, n <= SK_MP_SMALL_PAIRS);
    }
    /* repeated deep inside; and a key whose bytes begin those of another */
    CHECK_EQ(check(BYTES(0x91, 0x81, 0x01, 0x82, 0x05, 0x01, 0x05, 0x02), 8), -SK_BAD_VALUE);
    CHECK_EQ(check(BYTES(0x82, 0xa1, 'a', 0x01, 0xa2, 'a', 0x01, 0x02), 8), 8);
    sk_fail_alloc(1, 0);
    CHECK_EQ(check_map_of(1000, 1000, false), -SK_NO_MEMORY);
    sk_fail_alloc(0, 0);
}

static void test_integers_round_trip_in_shortest_form(void) {
    test_rng rng = test_rng_new(1);
    for (int k = 0; k < 20000; k++) {
        int64_t value = (int64_t)(test_random(&rng) >> test_below(&rng, 64));
        if (test_below(&rng, 2) == 0) value = -value;
        if (k < 600) value = k - 300;
        if (k == 600) value = INT64_MIN;
        if (k == 601) value = INT64_MAX;
        uint8_t p[9];
        size_t len = sk_mp_write_int(p, value);
        int64_t found = 0;
        CHECK_EQ(sk_mp_read_int(p, len, &found), SK_OK);
        CHECK_EQ(found, value);
        CHECK(sk_mp_is_key(p, len));
        CHECK_EQ(skip(p, len, 0), len);
    }
    int64_t value;
    CHECK_EQ(sk_mp_read_int(BYTES(0xcf, 0x80, 0, 0, 0, 0, 0, 0, 0), &value), SK_BAD_PATH);
    CHECK_EQ(sk_mp_read_int(BYTES(0xcb, 0, 0, 0, 0, 0, 0, 0, 0), &value), SK_BAD_PATH);
    CHECK_EQ(sk_mp_read_int(BYTES(0xc0), &value), SK_BAD_PATH);
    CHECK_EQ(sk_mp_read_int(BYTES(0xcd, 0), &value), SK_BAD_PATH);
    CHECK_EQ(sk_mp_read_int(BYTES(0x90), &value), SK_BAD_PATH);
    CHECK_EQ(sk_mp_read_int(BYTES(0xd3, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe), &value),
             SK_OK); /* any width will do */
    CHECK_EQ(value, -2);
}

static void test_heads_change_width_at_their_limits(void) {
    const struct {
        uint32_t n;
        size_t array, str, bin;
    } cases[] = {{0, 1, 1, 2},     {15, 1, 1, 2},        {16, 3, 1, 2},  {31, 3, 1, 2},
                 {32, 3, 2, 2},    {255, 3, 2, 2},       {256, 3, 3, 3}, {65535, 3, 3, 3},
                 {65536, 5, 5, 5}, {UINT32_MAX, 5, 5, 5}};
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        uint8_t p[SK_MP_HEAD_MAX];
        uint32_t n = cases[k].n;
        CHECK_EQ(sk_mp_write_array(p, n), cases[k].array);
        CHECK_EQ(sk_mp_head_of(p).count, n);
        CHECK_EQ(sk_mp_head_of(p).type, SK_MP_ARRAY);
        CHECK_EQ(sk_mp_head_len(n), cases[k].array);
        CHECK_EQ(sk_mp_write_map(p, n), cases[k].array);
        CHECK_EQ(sk_mp_head_of(p).count, n);
        CHECK_EQ(sk_mp_head_of(p).type, SK_MP_MAP);
        CHECK_EQ(sk_mp_write_str(p, n), cases[k].str);
        CHECK_EQ(sk_mp_head_of(p).body_len, n);
        CHECK_EQ(sk_mp_write_bin(p, n), cases[k].bin);
        CHECK_EQ(sk_mp_head_of(p).body_len, n);
    }
    uint8_t p[9];
    CHECK_EQ(sk_mp_write_f64(p, -1.5), 9);
    CHECK(memcmp(p, (uint8_t[]){0xcb, 0xbf, 0xf8, 0, 0, 0, 0, 0, 0}, 9) == 0);
}

/* Whatever the bytes, the walks end, stay inside, and agree with each other. */
static void test_random_bytes_never_read_outside(void) {
    test_rng rng = test_rng_new(2);
    const uint8_t likely[] = {0x81, 0x82, 0x91, 0x93, 0xa1, 0xdc, 0xde, 0xd9, 0xc4, 0xc7, 0xdd, 0};
    for (int round = 0; round < 40000; round++) {
        uint8_t bytes[48];
        size_t len = test_below(&rng, sizeof bytes);
        for (size_t k = 0; k < len; k++) {
            bool pick = test_below(&rng, 2) == 0;
            bytes[k] = pick ? likely[test_below(&rng, sizeof likely)] : (uint8_t)test_random(&rng);
        }
        int64_t skipped = skip(bytes, len, 8), checked = check(bytes, len, 8);
        if (checked >= 0) CHECK_EQ(skipped, checked);
        CHECK(skipped <= (int64_t)len);
        if (skipped > 0) CHECK_EQ(skip(bytes, (size_t)skipped - 1, 8), -SK_BAD_VALUE);
    }
}

int main(void) {
    RUN(test_every_scalar_format_has_its_length);
    RUN(test_every_truncation_is_bad);
    RUN(test_the_reserved_byte_is_bad_everywhere);
    RUN(test_hostile_counts_are_refused_by_their_head);
    RUN(test_depth_is_bounded_without_recursion);
    RUN(test_keys_must_be_shortest);
    RUN(test_equal_keys_are_found_in_small_and_large_maps);
    RUN(test_integers_round_trip_in_shortest_form);
    RUN(test_heads_change_width_at_their_limits);
    RUN(test_random_bytes_never_read_outside);
    return test_report();
}
