/*
 * kinds_util.h: stores with a state of every kind, and columns of their keys, for tests that take
 * entries out of one place and put them into another.
 */
#ifndef SK_KINDS_UTIL_H
#define SK_KINDS_UTIL_H

#include "store_util.h"

#define ASKED_MAX 512

enum { N, F, B, L, M, T, W, X, STATES }; /* ids: one of each kind, and a timed i64 */
static const char *const names[STATES] = {"n", "f", "b", "l", "m", "t", "w", "x"};

static inline sk_store *kinds_open(uint32_t leaves) {
    sk_store *store = util_open(leaves, 1);
    for (uint32_t s = N; s <= W; s++) CHECK_EQ(util_state(store, names[s], (int)s + 1, "b"), s);
    CHECK_EQ(util_timed_state(store, names[X], SK_I64, "b", 100, SK_EVENT_TIME, 0), X);
    CHECK_EQ(sk_time_set(store, SK_EVENT_TIME, 1000), SK_OK);
    return store;
}

/* Puts a value of the state's kind that contains the key's number and the version. */
static inline void put(sk_store *store, uint32_t s, uint32_t k, uint32_t version) {
    util_key key = util_bytes_key(k);
    uint8_t value[16] = {0};
    memcpy(value, &k, 4);
    memcpy(value + 4, &version, 4);
    size_t len = s == B ? 4 + k % 12 : 8;
    if (s == L || s == M || s == T) { /* [k, version] or {k: version} */
        value[0] = s == L ? 0x92 : 0x81;
        value[1] = (uint8_t)(k % 100);
        value[2] = (uint8_t)version;
        len = 3;
    }
    CHECK_EQ(sk_put(store, s, key.data, key.len, value, len), SK_OK);
}

/* A column of keys. */
typedef struct asked {
    uint8_t data[ASKED_MAX * UTIL_KEY_BYTES_MAX];
    int64_t at[ASKED_MAX + 1];
    int64_t n;
} asked;

static inline void ask(asked *a, uint32_t k) {
    util_key key = util_bytes_key(k);
    CHECK(a->n < ASKED_MAX);
    memcpy(a->data + a->at[a->n], key.data, key.len);
    a->at[a->n + 1] = a->at[a->n] + (int64_t)key.len;
    a->n++;
}

static inline sk_column column_of(const asked *a) {
    return (sk_column){SK_COL_VAR64, 0, a->data, a->at, (int64_t)sizeof a->data};
}

#endif
