/*
 * hash.h: the two hashes.
 *
 * Routing uses XXH64 (public, the same in every process and in Spark). Its value
 * also places an entry inside its table, so a lookup hashes once. Because anyone
 * can compute it, anyone can craft keys that collide: a table whose probes grow
 * too long therefore rehashes itself with SipHash-1-3 under a secret drawn once
 * per process. Map nodes, whose keys are not routed, use SipHash always.
 */
#ifndef SK_HASH_H
#define SK_HASH_H

#include "statekit.h"

#include <string.h>

#define SK_ROUTE_SEED 42

#define SK_XXH_P1 0x9E3779B185EBCA87ULL
#define SK_XXH_P2 0xC2B2AE3D27D4EB4FULL
#define SK_XXH_P3 0x165667B19E3779F9ULL
#define SK_XXH_P4 0x85EBCA77C2B2AE63ULL
#define SK_XXH_P5 0x27D4EB2F165667C5ULL

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error                                                                                             \
    "statekit's native formats are little endian; add byte swaps to hash.h, block.c and msgpack.c"
#endif

static inline uint64_t sk_load64(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

static inline uint32_t sk_load32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

static inline void sk_store64(uint8_t *p, uint64_t v) { memcpy(p, &v, 8); }
static inline void sk_store32(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }

static inline uint64_t sk_rotl64(uint64_t v, int n) { return (v << n) | (v >> (64 - n)); }

static inline uint64_t sk_xxh64_round(uint64_t acc, uint64_t lane) {
    return sk_rotl64(acc + lane * SK_XXH_P2, 31) * SK_XXH_P1;
}

static inline uint64_t sk_xxh64_mix(uint64_t h) {
    h = (h ^ (h >> 33)) * SK_XXH_P2;
    h = (h ^ (h >> 29)) * SK_XXH_P3;
    return h ^ (h >> 32);
}

/* The last 0 to 31 bytes, and the final mix. Inline: most keys are no longer than this. */
static inline uint64_t sk_xxh64_tail(uint64_t h, const uint8_t *p, size_t len) {
    for (; len >= 8; p += 8, len -= 8)
        h = sk_rotl64(h ^ sk_xxh64_round(0, sk_load64(p)), 27) * SK_XXH_P1 + SK_XXH_P4;
    if (len >= 4) {
        h = sk_rotl64(h ^ (sk_load32(p) * SK_XXH_P1), 23) * SK_XXH_P2 + SK_XXH_P3;
        p += 4;
        len -= 4;
    }
    for (; len > 0; p++, len--) h = sk_rotl64(h ^ (*p * SK_XXH_P5), 11) * SK_XXH_P1;
    return sk_xxh64_mix(h);
}

/* XXH64 of a key of fewer than 32 bytes. */
static inline uint64_t sk_xxh64_short(const uint8_t *p, size_t len, uint64_t seed) {
    return sk_xxh64_tail(seed + SK_XXH_P5 + len, p, len);
}

/* XXH64 of one 64-bit integer, as its 8 bytes. */
static inline uint64_t sk_xxh64_int(int64_t value, uint64_t seed) {
    uint64_t h = seed + SK_XXH_P5 + 8;
    h = sk_rotl64(h ^ sk_xxh64_round(0, (uint64_t)value), 27) * SK_XXH_P1 + SK_XXH_P4;
    return sk_xxh64_mix(h);
}

/* SipHash-1-3 under this process's secret. */
uint64_t sk_secret_hash(const uint8_t *data, size_t len);

/* A parsed key type: what sk_key_hash needs, found once per state. */
typedef struct sk_key_type {
    uint8_t parts;                   /* 1 .. SK_KEY_PARTS_MAX */
    uint8_t is_tuple;                /* parts carry length prefixes */
    char part[SK_KEY_PARTS_MAX];     /* 's', 'b' or 'i' */
    char text[SK_KEY_PARTS_MAX + 3]; /* as declared, 0-terminated */
} sk_key_type;

int sk_key_type_parse(const char *text, sk_key_type *type);
/* SK_OK and the routing hash, or SK_BAD_KEY. */
int sk_key_route(const sk_key_type *type, const uint8_t *key, size_t len, uint64_t *hash);

#endif
