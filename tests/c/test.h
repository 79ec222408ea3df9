/*
 * test.h: the harness of the C tests. Each test file is one executable:
 *
 *     static void test_property(void) { CHECK(...); CHECK_EQ(found, expected); }
 *     int main(void) { RUN(test_property); return test_report(); }
 *
 * A failed check prints where it failed, what it found and the seed, and the test goes on, so that
 * one run shows everything that is wrong. The last line is "N passed, M failed", counted in tests.
 */
#ifndef SK_TEST_H
#define SK_TEST_H

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEST_SEED_DEFAULT 20240607
#define TEST_FAILURES_SHOWN 20 /* per test, because a broken invariant may fail at every step */

static int test_passed, test_failed;
static int test_failures; /* in the running test */
static const char *test_name = "";

/* Seeded once per process, from SK_SEED if that is set. */
static inline uint64_t test_seed(void) {
    static uint64_t seed;
    if (seed == 0) {
        const char *text = getenv("SK_SEED");
        seed = text != NULL ? strtoull(text, NULL, 0) : TEST_SEED_DEFAULT;
        if (seed == 0) seed = 1; /* xorshift would stay at 0 */
    }
    return seed;
}

typedef struct test_rng {
    uint64_t state;
} test_rng;

static inline test_rng test_rng_new(uint64_t stream) {
    test_rng rng = {test_seed() * 0x9E3779B97F4A7C15ULL ^ (stream + 1) * 0xD1B54A32D192ED03ULL};
    if (rng.state == 0) rng.state = 1;
    return rng;
}

static inline uint64_t test_random(test_rng *rng) { /* xorshift64* */
    rng->state ^= rng->state >> 12;
    rng->state ^= rng->state << 25;
    rng->state ^= rng->state >> 27;
    return rng->state * 0x2545F4914F6CDD1DULL;
}

/* A random number below n, which is at least 1. */
static inline uint64_t test_below(test_rng *rng, uint64_t n) {
    return (test_random(rng) >> 11) % n;
}

static inline int test_fail(const char *file, int line) {
    if (++test_failures > TEST_FAILURES_SHOWN) return 0;
    printf("%s:%d: %s (SK_SEED=%" PRIu64 "): ", file, line, test_name, test_seed());
    return 1;
}

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition) && test_fail(__FILE__, __LINE__)) printf("not true: %s\n", #condition);   \
    } while (0)

#define CHECK_EQ(found, expected)                                                                  \
    do {                                                                                           \
        long long found_ = (long long)(found), expected_ = (long long)(expected);                  \
        if (found_ != expected_ && test_fail(__FILE__, __LINE__))                                  \
            printf("%s is %lld, expected %s = %lld\n", #found, found_, #expected, expected_);      \
    } while (0)

#define RUN(test)                                                                                  \
    do {                                                                                           \
        test_name = #test;                                                                         \
        test_failures = 0;                                                                         \
        test();                                                                                    \
        if (test_failures > 0) printf("FAILED %s: %d checks\n", #test, test_failures);             \
        *(test_failures > 0 ? &test_failed : &test_passed) += 1;                                   \
        fflush(stdout);                                                                            \
    } while (0)

static inline int test_report(void) {
    printf("%d passed, %d failed\n", test_passed, test_failed);
    return test_failed > 0;
}

#endif
