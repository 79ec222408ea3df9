/*
 * store_util.h: what the tests of the store share: keys made from numbers, and comparing stores by
 * their content.
 *
 * A test draws keys from a small universe of numbers. The oracle is then a plain array indexed by
 * that number, which has nothing in common with the store's tables.
 */
#ifndef SK_STORE_UTIL_H
#define SK_STORE_UTIL_H

#include "statekit.h"
#include "test.h"

#include <stdbool.h>

#define UTIL_KEY_BYTES_MAX 64

typedef struct util_key {
    uint8_t data[UTIL_KEY_BYTES_MAX];
    size_t len;
} util_key;

/* Key number k as bytes: 4 to 40 of them, so that some are kept in their slot and some are not. */
static inline util_key util_bytes_key(uint32_t k) {
    util_key key = {.len = 4 + k * 7 % 37};
    for (size_t i = 0; i < key.len; i++) key.data[i] = (uint8_t)(k * 31 + i);
    memcpy(key.data, &k, 4);
    return key;
}

static inline util_key util_int_key(int64_t k) {
    util_key key = {.len = 8};
    memcpy(key.data, &k, 8);
    return key;
}

static inline uint32_t util_leaf_of(const char *key_type, const util_key *key, unsigned leaf_bits) {
    uint64_t hash = 0;
    CHECK_EQ(sk_key_hash(key_type, key->data, key->len, &hash), SK_OK);
    return leaf_bits == 0 ? 0 : (uint32_t)(hash >> (64 - leaf_bits));
}

static inline sk_store *util_open(uint32_t key_groups, uint32_t subgroups) {
    sk_store *store = NULL;
    CHECK_EQ(sk_open(key_groups, subgroups, 0, &store), SK_OK);
    if (store == NULL) abort();
    return store;
}

static inline uint32_t util_state(sk_store *store, const char *name, int kind,
                                  const char *key_type) {
    uint32_t id = UINT32_MAX;
    CHECK_EQ(sk_state_add(store, name, kind, key_type, 0, &id), SK_OK);
    return id;
}

static inline uint32_t util_timed_state(sk_store *store, const char *name, int kind,
                                        const char *key_type, int64_t ttl_ms, int clock,
                                        int on_read) {
    uint32_t id = UINT32_MAX;
    CHECK_EQ(sk_state_add(store, name, kind, key_type, SK_TIMED, &id), SK_OK);
    CHECK_EQ(sk_state_ttl(store, id, ttl_ms, clock, on_read), SK_OK);
    return id;
}

static inline sk_stats util_stats(sk_store *store, uint32_t leaf_count) {
    sk_stats stats;
    CHECK_EQ(sk_stats_read(store, SK_ALL_STATES, 0, leaf_count, &stats), SK_OK);
    return stats;
}

/* Everything that can be seen of a store's entries: the full blocks of every leaf, one after the
 * other. */
static inline void util_encode_all(sk_store *store, uint32_t leaf_count, sk_buf *buf) {
    buf->len = 0;
    for (uint32_t leaf = 0; leaf < leaf_count; leaf++)
        CHECK(sk_leaf_encode(store, leaf, SK_ALL_STATES, 0, buf) >= 0);
}

static inline bool util_same(const sk_buf *a, const sk_buf *b) {
    return a->len == b->len && (a->len == 0 || memcmp(a->data, b->data, a->len) == 0);
}

/* ---- Inverting XXH64, to craft keys that collide ---- */

#define UTIL_P1 0x9E3779B185EBCA87ULL
#define UTIL_P2 0xC2B2AE3D27D4EB4FULL
#define UTIL_P3 0x165667B19E3779F9ULL
#define UTIL_P4 0x85EBCA77C2B2AE63ULL
#define UTIL_P5 0x27D4EB2F165667C5ULL

static inline uint64_t util_inverse(uint64_t odd) { /* modulo 2^64, by Newton's iteration */
    uint64_t x = odd;
    for (int i = 0; i < 6; i++) x *= 2 - odd * x;
    return x;
}

static inline uint64_t util_rotl(uint64_t v, int n) { return v << n | v >> (64 - n); }

static inline uint64_t util_round(uint64_t lane) { return util_rotl(lane * UTIL_P2, 31) * UTIL_P1; }

/* Sets the last 8 bytes of a key of len bytes (8, 16 or 24) so that it has this hash; the bytes
 * before are already set. */
static inline void util_solve_key(uint8_t *key, size_t len, uint64_t hash) {
    uint64_t h = 42 + UTIL_P5 + len, lane;
    for (size_t at = 0; at + 8 < len; at += 8) {
        memcpy(&lane, key + at, 8);
        h = util_rotl(h ^ util_round(lane), 27) * UTIL_P1 + UTIL_P4;
    }
    uint64_t want = hash ^ hash >> 32;
    want *= util_inverse(UTIL_P3);
    want ^= want >> 29 ^ want >> 58;
    want *= util_inverse(UTIL_P2);
    want ^= want >> 33;
    uint64_t round = util_rotl((want - UTIL_P4) * util_inverse(UTIL_P1), 64 - 27) ^ h;
    lane = util_rotl(round * util_inverse(UTIL_P1), 64 - 31) * util_inverse(UTIL_P2);
    memcpy(key + len - 8, &lane, 8);
}

/* The first `count` int keys of a leaf. */
static inline void util_keys_of_leaf(uint32_t leaf, unsigned leaf_bits, util_key *keys, int count) {
    for (int64_t k = 0, n = 0; n < count; k++) {
        util_key key = util_int_key(k);
        if (util_leaf_of("i", &key, leaf_bits) == leaf) keys[n++] = key;
    }
}

/* An entry of bytes under each of the keys [from, to). */
static inline void util_fill_bytes(sk_store *store, uint32_t id, uint32_t from, uint32_t to) {
    for (uint32_t k = from; k < to; k++) {
        util_key key = util_bytes_key(k);
        CHECK_EQ(sk_put(store, id, key.data, key.len, key.data, key.len), SK_OK);
    }
}

#endif
