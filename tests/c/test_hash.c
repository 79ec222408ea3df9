/* test_hash.c: hashes and key types against answers computed by others (PyPI xxhash 4.1.0; RFC
 * 3720).
 */
#include "hash.h"
#include "store_util.h"

/* The portable CRC, in addition to the one that the library was built with. */
#define SK_PORTABLE
#define sk_crc32c crc32c_portable
uint32_t crc32c_portable(const uint8_t *data, size_t len, uint32_t seed);
#include "../../csrc/crc32c.c"
#undef sk_crc32c
#undef SK_PORTABLE

/* Byte i of the input is (i * 131 + 7) mod 256. */
static const struct {
    size_t len;
    uint64_t seed, hash;
} xxh64_answers[] = {
    {0, 0x0u, 0xef46db3751d8e999},
    {0, 0x2au, 0x98b1582b0977e704},
    {0, 0xffffffffffffffffu, 0x298f4c84b24f5380},
    {1, 0x2au, 0xda6da76043d2a83e},
    {3, 0x2au, 0x68adf3d78e6987c3},
    {4, 0x2au, 0xfb3ece73292eb1ed},
    {5, 0x2au, 0x74de1e0efae136a4},
    {7, 0x2au, 0x3755095d6e4d66da},
    {8, 0x0u, 0x994b676b71ce94dd},
    {8, 0x2au, 0x51901a87d2f93e8e},
    {8, 0xffffffffffffffffu, 0x23470c129cfb3dc4},
    {9, 0x2au, 0x5ed0f8228d8ed06f},
    {12, 0x2au, 0xfb91eb6f3cb2eaa7},
    {15, 0x2au, 0x33031ea005a25bbd},
    {16, 0x2au, 0x9f7e35638c442c07},
    {18, 0x2au, 0x4f09f0e7f858bc69},
    {19, 0x2au, 0x90137cb149446369},
    {23, 0x2au, 0x40299fb27a2e7380},
    {24, 0x2au, 0x0c147cdd2ce3ecf6},
    {31, 0x0u, 0x6711d55e306b5d8f},
    {31, 0x2au, 0x731846295f5bba81},
    {31, 0xffffffffffffffffu, 0x0559625f4e0afe08},
    {32, 0x0u, 0x07f7b8e3bc5d6e25},
    {32, 0x2au, 0xf3351b2160d55903},
    {32, 0xffffffffffffffffu, 0xd5db58b1a19eefb2},
    {33, 0x2au, 0x70e78138c9f35ca7},
    {39, 0x2au, 0x01703a27ff61a76b},
    {40, 0x2au, 0x585417e304b36dbf},
    {47, 0x2au, 0x41ea502c3f800425},
    {63, 0x2au, 0x7244b19db698f5cd},
    {64, 0x2au, 0x404d28e762d4a07f},
    {65, 0x2au, 0x91691afabb1ae406},
    {100, 0x0u, 0x9ddada11d3dc2d8f},
    {100, 0x2au, 0x42c8b9ebf60e6ba4},
    {100, 0xffffffffffffffffu, 0x8b8b9e7c59f840e0},
    {255, 0x2au, 0xe6a6d46cf4c83b31},
    {256, 0x2au, 0x2030d62a7496386e},
    {1000, 0x2au, 0x07c85880fc74f7ff},
};

static void test_xxh64_gives_the_known_answers(void) {
    uint8_t data[1024];
    for (size_t i = 0; i < sizeof data; i++) data[i] = (uint8_t)(i * 131 + 7);
    for (size_t i = 0; i < sizeof xxh64_answers / sizeof xxh64_answers[0]; i++) {
        size_t len = xxh64_answers[i].len;
        uint64_t seed = xxh64_answers[i].seed;
        CHECK_EQ(sk_xxh64(data, len, seed), xxh64_answers[i].hash);
        if (len < 32) CHECK_EQ(sk_xxh64_short(data, len, seed), xxh64_answers[i].hash);
        if (len == 8) CHECK_EQ(sk_xxh64_int((int64_t)sk_load64(data), seed), xxh64_answers[i].hash);
    }
}

static void test_xxh64_reads_just_its_bytes(void) {
    for (size_t len = 0; len < 100; len++) {
        uint8_t *data = malloc(len + 1);
        memset(data, 7, len + 1);
        uint64_t hash = sk_xxh64(data, len, 42);
        data[len] = 8;
        CHECK_EQ(sk_xxh64(data, len, 42), hash);
        uint8_t *exact = malloc(len > 0 ? len : 1);
        memcpy(exact, data, len);
        CHECK_EQ(sk_xxh64(exact, len, 42), hash); /* AddressSanitizer sees a read too far */
        free(data);
        free(exact);
    }
}

static void test_secret_hash_is_stable_and_uses_every_byte(void) {
    uint8_t data[40] = {0};
    for (size_t len = 0; len <= sizeof data; len++) {
        uint64_t hash = sk_secret_hash(data, len);
        CHECK_EQ(sk_secret_hash(data, len), hash);
        if (len > 0) CHECK(sk_secret_hash(data, len - 1) != hash); /* the length counts */
        for (size_t i = 0; i < len; i++) {
            data[i] = 1;
            CHECK(sk_secret_hash(data, len) != hash);
            data[i] = 0;
        }
    }
    CHECK(sk_secret_hash(data, 8) != sk_xxh64(data, 8, 42));
}

/* Even few and similar inputs give hashes that are spread over all bits. */
static void test_secret_hash_is_even(void) {
    int ones[64] = {0};
    for (int64_t k = 0; k < 10000; k++) {
        util_key key = util_int_key(k);
        uint64_t hash = sk_secret_hash(key.data, key.len);
        for (int bit = 0; bit < 64; bit++) ones[bit] += hash >> bit & 1;
    }
    for (int bit = 0; bit < 64; bit++) CHECK(ones[bit] > 4700 && ones[bit] < 5300);
}

static void test_crc32c_gives_the_known_answers_portable_and_native(void) {
    const uint8_t *digits = (const uint8_t *)"123456789";
    uint8_t data[300];
    CHECK_EQ(sk_crc32c(digits, 9, 0), 0xe3069283);
    CHECK_EQ(sk_crc32c(digits, 0, 0), 0);
    memset(data, 0, 32);
    CHECK_EQ(sk_crc32c(data, 32, 0), 0x8a9136aa);
    memset(data, 0xff, 32);
    CHECK_EQ(sk_crc32c(data, 32, 0), 0x62a8ab43);
    for (size_t i = 0; i < 32; i++) data[i] = (uint8_t)i;
    CHECK_EQ(sk_crc32c(data, 32, 0), 0x46dd794e);
    for (size_t i = 0; i < sizeof data; i++) data[i] = (uint8_t)(i * 131 + 7);
    for (size_t len = 0; len < 250; len++)
        for (size_t at = 0; at < 9; at++) {
            uint32_t crc = sk_crc32c(data + at, len, (uint32_t)len * 77);
            CHECK_EQ(crc32c_portable(data + at, len, (uint32_t)len * 77), crc);
            /* in two pieces: the checksum of the first is the seed of the second */
            size_t cut = len / 3;
            uint32_t head = sk_crc32c(data + at, cut, (uint32_t)len * 77);
            CHECK_EQ(sk_crc32c(data + at + cut, len - cut, head), crc);
        }
}

static void test_key_types_are_parsed_or_refused(void) {
    static const char *const good[] = {"s", "b", "i", "(s)", "(i)", "(si)", "(sbisbisbisbisbis)"};
    static const char *const bad[] = {
        "",     "x",    "si",   "()",  "(",    ")", "(s",
        "s)",   "((s)", "(s))", "(x)", "(s )", "S", "(sbisbisbisbisbisb)",
        "(s)i", " s"};
    sk_key_type type;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        CHECK_EQ(sk_key_type_parse(good[i], &type), SK_OK);
        CHECK_EQ(strcmp(type.text, good[i]), 0);
        CHECK_EQ(type.is_tuple, good[i][0] == '(');
        CHECK_EQ(type.parts, type.is_tuple ? strlen(good[i]) - 2 : 1);
    }
    uint64_t hash;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        CHECK_EQ(sk_key_hash(bad[i], (const uint8_t *)"12345678", 8, &hash), SK_BAD_ARGUMENT);
}

static void test_routing_is_xxh64_of_the_part_or_the_chain_of_parts(void) {
    uint64_t hash = 0;
    const uint8_t *alice = (const uint8_t *)"alice";
    CHECK_EQ(sk_key_hash("s", alice, 5, &hash), SK_OK);
    CHECK_EQ(hash, 0x1fa8c90ada963493); /* tests/vectors/routing.json */
    CHECK_EQ(sk_key_hash("b", alice, 5, &hash), SK_OK);
    CHECK_EQ(hash, 0x1fa8c90ada963493);
    CHECK_EQ(sk_key_hash("s", NULL, 0, &hash), SK_OK);
    CHECK_EQ(hash, 0x98b1582b0977e704);
    const uint8_t tuple[] = "\5\0\0\0alice\7\0\0\0\0\0\0\0\0\0\0\0";
    CHECK_EQ(sk_key_hash("(sis)", tuple, 4 + 5 + 8 + 4, &hash), SK_OK);
    uint64_t chain = sk_xxh64(alice, 5, 42);
    chain = sk_xxh64((const uint8_t *)"\7\0\0\0\0\0\0\0", 8, chain);
    CHECK_EQ(hash, sk_xxh64(NULL, 0, chain));
}

static void test_keys_that_do_not_fit_their_type_are_refused(void) {
    static uint8_t large[SK_KEY_BYTES_MAX + 1];
    uint64_t hash;
    CHECK_EQ(sk_key_hash("i", large, 7, &hash), SK_BAD_KEY);
    CHECK_EQ(sk_key_hash("i", large, 9, &hash), SK_BAD_KEY);
    CHECK_EQ(sk_key_hash("i", large, 0, &hash), SK_BAD_KEY);
    CHECK_EQ(sk_key_hash("b", large, SK_KEY_BYTES_MAX, &hash), SK_OK);
    CHECK_EQ(sk_key_hash("b", large, SK_KEY_BYTES_MAX + 1, &hash), SK_BAD_KEY);
    const uint8_t tuple[] = "\3\0\0\0abc\1\2\3\4\5\6\7\x08";
    for (size_t len = 0; len < 20; len++) {
        uint8_t *exact = malloc(len + 1);
        memset(exact, 0, len + 1);
        memcpy(exact, tuple, len < 15 ? len : 15);
        exact = realloc(exact, len > 0 ? len : 1);
        CHECK_EQ(sk_key_hash("(si)", exact, len, &hash), len == 15 ? SK_OK : SK_BAD_KEY);
        free(exact);
    }
    memset(large, 0xff, 8); /* a part of 4 GiB */
    CHECK_EQ(sk_key_hash("(s)", large, 8, &hash), SK_BAD_KEY);
    CHECK_EQ(sk_key_hash("(ss)", large, SK_KEY_BYTES_MAX, &hash), SK_BAD_KEY);
}

int main(void) {
    RUN(test_xxh64_gives_the_known_answers);
    RUN(test_xxh64_reads_just_its_bytes);
    RUN(test_secret_hash_is_stable_and_uses_every_byte);
    RUN(test_secret_hash_is_even);
    RUN(test_crc32c_gives_the_known_answers_portable_and_native);
    RUN(test_key_types_are_parsed_or_refused);
    RUN(test_routing_is_xxh64_of_the_part_or_the_chain_of_parts);
    RUN(test_keys_that_do_not_fit_their_type_are_refused);
    return test_report();
}
