/* hash.c: see hash.h. */
#define _GNU_SOURCE /* getentropy, clock_gettime */
#include "hash.h"

#include "alloc.h"

#include <pthread.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

uint64_t sk_xxh64(const uint8_t *p, size_t len, uint64_t seed) {
    if (len < 32) return sk_xxh64_short(p, len, seed);
    uint64_t a = seed + SK_XXH_P1 + SK_XXH_P2, b = seed + SK_XXH_P2, c = seed, d = seed - SK_XXH_P1;
    size_t left = len;
    for (; left >= 32; p += 32, left -= 32) {
        a = sk_xxh64_round(a, sk_load64(p));
        b = sk_xxh64_round(b, sk_load64(p + 8));
        c = sk_xxh64_round(c, sk_load64(p + 16));
        d = sk_xxh64_round(d, sk_load64(p + 24));
    }
    uint64_t h = sk_rotl64(a, 1) + sk_rotl64(b, 7) + sk_rotl64(c, 12) + sk_rotl64(d, 18);
    h = (h ^ sk_xxh64_round(0, a)) * SK_XXH_P1 + SK_XXH_P4;
    h = (h ^ sk_xxh64_round(0, b)) * SK_XXH_P1 + SK_XXH_P4;
    h = (h ^ sk_xxh64_round(0, c)) * SK_XXH_P1 + SK_XXH_P4;
    h = (h ^ sk_xxh64_round(0, d)) * SK_XXH_P1 + SK_XXH_P4;
    return sk_xxh64_tail(h + len, p, left);
}

/* ---- SipHash-1-3 ---- */

static uint64_t secret[2];
static pthread_once_t secret_once = PTHREAD_ONCE_INIT;

static void draw_secret(void) {
    if (getentropy(secret, sizeof secret) == 0) return;
    /* No kernel randomness (very early boot, or a system call filter). Addresses and the clock
     * still differ from process to process, and a remote attacker does not know them. */
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    secret[0] = sk_xxh64_int((int64_t)(uintptr_t)&now, (uint64_t)now.tv_nsec);
    secret[1] = sk_xxh64_int((int64_t)(uintptr_t)&secret, secret[0]);
}

typedef struct sip {
    uint64_t a, b, c, d;
} sip;

static inline void sip_round(sip *s) {
    s->a += s->b;
    s->b = sk_rotl64(s->b, 13) ^ s->a;
    s->a = sk_rotl64(s->a, 32);
    s->c += s->d;
    s->d = sk_rotl64(s->d, 16) ^ s->c;
    s->a += s->d;
    s->d = sk_rotl64(s->d, 21) ^ s->a;
    s->c += s->b;
    s->b = sk_rotl64(s->b, 17) ^ s->c;
    s->c = sk_rotl64(s->c, 32);
}

uint64_t sk_secret_hash(const uint8_t *p, size_t len) {
    pthread_once(&secret_once, draw_secret);
    sip s = {secret[0] ^ 0x736f6d6570736575ULL, secret[1] ^ 0x646f72616e646f6dULL,
             secret[0] ^ 0x6c7967656e657261ULL, secret[1] ^ 0x7465646279746573ULL};
    size_t left = len;
    for (; left >= 8; p += 8, left -= 8) {
        uint64_t word = sk_load64(p);
        s.d ^= word;
        sip_round(&s);
        s.a ^= word;
    }
    uint64_t last = (uint64_t)len << 56;
    for (size_t i = 0; i < left; i++) last |= (uint64_t)p[i] << (8 * i);
    s.d ^= last;
    sip_round(&s);
    s.a ^= last;
    s.c ^= 0xff;
    sip_round(&s);
    sip_round(&s);
    sip_round(&s);
    return s.a ^ s.b ^ s.c ^ s.d;
}

/* ---- Keys ---- */

int sk_key_type_parse(const char *text, sk_key_type *type) {
    size_t len = strlen(text);
    *type = (sk_key_type){0};
    type->is_tuple = len >= 2 && text[0] == '(' && text[len - 1] == ')';
    const char *part = type->is_tuple ? text + 1 : text;
    size_t parts = type->is_tuple ? len - 2 : len;
    bool counts = type->is_tuple ? parts >= 1 && parts <= SK_KEY_PARTS_MAX : parts == 1;
    for (size_t i = 0; counts && i < parts; i++) counts = strchr("sbi", part[i]) != NULL;
    if (!counts)
        return sk_fail(SK_BAD_ARGUMENT,
                       "key type '%.40s' is none of s, b, i or a tuple (…) of 1 to %d of these",
                       text, SK_KEY_PARTS_MAX);
    type->parts = (uint8_t)parts;
    memcpy(type->part, part, parts);
    memcpy(type->text, text, len + 1);
    return SK_OK;
}

static int route_tuple(const sk_key_type *type, const uint8_t *key, size_t len, uint64_t *hash) {
    uint64_t h = SK_ROUTE_SEED;
    size_t at = 0;
    for (int i = 0; i < type->parts; i++) {
        size_t part_len = 8;
        if (type->part[i] != 'i') {
            if (len - at < 4) return sk_fail(SK_BAD_KEY, "tuple key ends before part %d", i);
            part_len = sk_load32(key + at);
            at += 4;
        }
        if (len - at < part_len) return sk_fail(SK_BAD_KEY, "tuple key ends inside part %d", i);
        h = sk_xxh64(key + at, part_len, h);
        at += part_len;
    }
    if (at != len)
        return sk_fail(SK_BAD_KEY, "tuple key has %zu bytes after its last part", len - at);
    *hash = h;
    return SK_OK;
}

int sk_key_route(const sk_key_type *type, const uint8_t *key, size_t len, uint64_t *hash) {
    if (len > SK_KEY_BYTES_MAX)
        return sk_fail(SK_BAD_KEY, "a key of %zu bytes is above the limit of %d", len,
                       SK_KEY_BYTES_MAX);
    if (type->is_tuple) return route_tuple(type, key, len, hash);
    if (type->part[0] == 'i' && len != 8)
        return sk_fail(SK_BAD_KEY, "an int key has 8 bytes, not %zu", len);
    *hash = sk_xxh64(key, len, SK_ROUTE_SEED);
    return SK_OK;
}

int sk_key_hash(const char *key_type, const uint8_t *key, size_t key_len, uint64_t *hash) {
    sk_key_type type;
    int status = sk_key_type_parse(key_type, &type);
    return status != SK_OK ? status : sk_key_route(&type, key, key_len, hash);
}
