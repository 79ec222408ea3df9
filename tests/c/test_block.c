/*
 * test_block.c: blocks (csrc/block.c): round trips, finding one key without decoding, determinism,
 * and damage: every truncation and every flipped bit is detected or harmless, and never a crash.
 */
#include "block.h"
#include "store_util.h"

#define KEYS 40

static const char *const key_types[] = {"s", "b", "i", "(i)", "(si)", "(bsi)", "(ss)"};
#define KEY_TYPES (sizeof key_types / sizeof key_types[0])

/* Key number k of a type. */
static util_key key_of(const char *type, uint32_t k) {
    if (strcmp(type, "i") == 0) return util_int_key((int64_t)k * 7919 - 50);
    if (type[0] != '(') {
        util_key key = util_bytes_key(k);
        if (k == 0) key.len = 0;
        return key;
    }
    util_key key = {0};
    for (const char *part = type + 1; *part != ')'; part++) {
        if (*part == 'i') {
            int64_t value = (int64_t)k - 3;
            memcpy(key.data + key.len, &value, 8);
            key.len += 8;
        } else {
            uint32_t len = (k + (uint32_t)(part - type)) % 9;
            memcpy(key.data + key.len, &len, 4);
            memset(key.data + key.len + 4, (int)('a' + k % 26), len);
            key.len += 4 + len;
        }
    }
    if (strchr(type, 'i') == NULL) { /* a number makes the keys distinct */
        uint32_t len = 4 + k % 9;
        key.len = 0;
        for (const char *part = type + 1; *part != ')'; part++) {
            memcpy(key.data + key.len, &len, 4);
            memset(key.data + key.len + 4, 'x', len);
            memcpy(key.data + key.len + 4, &k, 4);
            key.len += 4 + len;
        }
    }
    return key;
}

/* Value number v of a kind, in its encoded form; returns its length. */
static size_t value_of(int kind, uint32_t v, uint8_t *out) {
    if (kind == SK_I64 || kind == SK_F64) {
        double f = (double)v * 1.5 - 3;
        int64_t i = (int64_t)v * -1234567;
        memcpy(out, kind == SK_I64 ? (void *)&i : (void *)&f, 8);
        return 8;
    }
    size_t n = v % 12, at = 1;
    if (kind == SK_BYTES) {
        memset(out, (int)v, n);
        return n;
    }
    bool is_map = kind == SK_MAP || (kind == SK_NESTED && v % 2 == 0);
    if (kind == SK_NESTED && v % 5 == 0) { /* a scalar root */
        out[0] = (uint8_t)(v & 0x7f);
        return 1;
    }
    out[0] = (uint8_t)((is_map ? 0x80 : 0x90) | n);
    for (size_t i = 0; i < n; i++) {
        if (is_map) out[at++] = (uint8_t)i;
        if (i % 3 == 0) {
            memcpy(out + at,
                   "\xa3"
                   "abc",
                   4);
            at += 4;
        } else if (i % 3 == 1) {
            memcpy(out + at, "\x92\x01\x81\x02\xc0", 5);
            at += 5;
        } else {
            out[at++] = (uint8_t)(0x40 + i);
        }
    }
    return at;
}

static void put(sk_store *store, uint32_t id, const char *type, int kind, uint32_t k, uint32_t v) {
    uint8_t value[256];
    util_key key = key_of(type, k);
    size_t len = value_of(kind, v, value);
    CHECK_EQ(sk_put(store, id, key.data, key.len, value, len), SK_OK);
}

/* A one-leaf store with KEYS entries; as a partial leaf with deletions if is_delta. */
static sk_store *make(const char *type, int kind, uint32_t n, bool is_delta) {
    sk_store *store = util_open(1, 1);
    uint32_t id = util_state(store, "state", kind, type);
    if (is_delta) CHECK_EQ(sk_leaf_mark(store, 0, 1, SK_PARTIAL), SK_OK);
    for (uint32_t k = 0; k < n; k++) {
        util_key key = key_of(type, k);
        put(store, id, type, kind, k, k);
        if (is_delta && k % 4 == 3) CHECK_EQ(sk_delete(store, id, key.data, key.len, 0), SK_OK);
    }
    return store;
}

static sk_buf encode(sk_store *store) {
    sk_buf buf = {0};
    CHECK(sk_leaf_encode(store, 0, SK_ALL_STATES, 0, &buf) >= 0);
    return buf;
}

static void check_round_trip(const char *type, int kind, uint32_t n, bool is_delta) {
    sk_store *store = make(type, kind, n, is_delta), *copy = util_open(1, 1);
    sk_buf buf = encode(store), value = {0};
    sk_block_info info;
    if (n == 0) {
        CHECK_EQ(buf.len, 0);
    } else {
        CHECK_EQ(sk_block_read(buf.data, buf.len, &info), SK_OK);
        CHECK_EQ(sk_block_check(buf.data, buf.len), SK_OK);
        CHECK_EQ(info.size, buf.len);
        CHECK_EQ(info.entries, n);
        CHECK_EQ(info.kind, kind);
        CHECK_EQ(info.is_delta, is_delta);
        CHECK_EQ(info.offset_width, 4);
        CHECK_EQ(info.leaf_bits, 0);
        CHECK_EQ(strcmp(info.name, "state"), 0);
        CHECK_EQ(strcmp(info.key_type, type), 0);
        CHECK_EQ(info.size % 8 + info.hashes % 8 + info.keys % 8 + info.values % 8 +
                     info.key_offsets % 8 + info.value_offsets % 8 + info.marks % 8,
                 0);
    }
    for (uint32_t k = 0; k < n + 5 && n > 0; k++) { /* found without decoding */
        util_key key = key_of(type, k);
        uint8_t expected[256];
        bool is_tomb = is_delta && k % 4 == 3 && k < n, is_there = k < n && !is_tomb;
        size_t len = value_of(kind, k, expected);
        CHECK_EQ(sk_block_find(buf.data, buf.len, key.data, key.len, &value),
                 is_there ? SK_OK : SK_MISSING);
        CHECK_EQ(value.len, is_there ? len : is_tomb);
        if (is_there && len > 0) CHECK_EQ(memcmp(value.data, expected, len), 0);
    }
    CHECK_EQ(sk_leaf_mark(copy, 0, 1, is_delta ? SK_PARTIAL : SK_WHOLE), SK_OK);
    CHECK_EQ(sk_leaf_decode(copy, 0, buf.data, buf.len, is_delta ? SK_UNDER : SK_REPLACE), SK_OK);
    CHECK_EQ(util_stats(copy, 1).dirty, 0);
    sk_buf again = encode(copy);
    CHECK(util_same(&buf, &again));
    sk_buf_free(&buf);
    sk_buf_free(&again);
    sk_buf_free(&value);
    sk_close(store);
    sk_close(copy);
}

static void test_every_kind_and_key_type_comes_back_as_it_was(void) {
    for (size_t t = 0; t < KEY_TYPES; t++)
        for (int kind = SK_I64; kind <= SK_NESTED; kind++)
            for (uint32_t n = 0; n <= KEYS; n = n < 3 ? n + 1 : n + 12)
                for (int is_delta = 0; is_delta < 2; is_delta++)
                    check_round_trip(key_types[t], kind, n, is_delta);
}

static void test_equal_content_gives_equal_bytes_whatever_the_history(void) {
    test_rng rng = test_rng_new(3);
    for (int kind = SK_I64; kind <= SK_NESTED; kind++)
        for (int round = 0; round < 6; round++) {
            const char *type = round % 2 ? "b" : "i";
            uint32_t n = 1 + (uint32_t)test_below(&rng, 300);
            sk_store *one = util_open(1, 1), *two = util_open(1, 1);
            uint32_t a = util_state(one, "state", kind, type);
            util_state(two, "other", SK_I64, "i"); /* another id */
            uint32_t b = util_state(two, "state", kind, type);
            if (round % 3 == 2) CHECK_EQ(sk_track(two, 0), SK_OK); /* leaves tombstones */
            for (uint32_t k = 0; k < n; k++) put(one, a, type, kind, k, k * 3);
            for (uint32_t i = 0; i < 1000; i++) {
                uint32_t k = (uint32_t)test_below(&rng, 500);
                util_key key = key_of(type, k);
                if (test_below(&rng, 2))
                    put(two, b, type, kind, k, (uint32_t)test_below(&rng, 100));
                else
                    CHECK(sk_delete(two, b, key.data, key.len, 0) <= SK_MISSING);
            }
            for (uint32_t k = n; k < 500; k++) {
                util_key key = key_of(type, k);
                CHECK(sk_delete(two, b, key.data, key.len, 0) <= SK_MISSING);
            }
            for (uint32_t k = n; k-- > 0;) put(two, b, type, kind, k, k * 3);
            sk_buf x = encode(one), y = encode(two);
            CHECK(util_same(&x, &y));
            sk_buf_free(&x);
            sk_buf_free(&y);
            sk_close(one);
            sk_close(two);
        }
}

static void test_flooded_table_gives_the_same_bytes_sorted_by_hash_then_key(void) {
    sk_store *one = util_open(1, 1), *two = util_open(1, 1);
    uint32_t a = util_state(one, "state", SK_I64, "b"), b = util_state(two, "state", SK_I64, "b");
    uint8_t key[24];
    for (uint32_t i = 0; i < 1000; i++)
        for (int s = 0; s < 2; s++) {
            uint32_t number = s == 0 ? i : 999 - i;
            memset(key, 0, sizeof key);
            memcpy(key + 4, &number, 4);
            util_solve_key(key, 24, 0x5555555555555555ULL + (number & 1));
            CHECK_EQ(sk_i64_put(s ? two : one, s ? b : a, key, 24, number), SK_OK);
        }
    CHECK_EQ(util_stats(one, 1).flooded, 1);
    sk_buf x = encode(one), y = encode(two), value = {0};
    CHECK(util_same(&x, &y));
    CHECK_EQ(sk_block_check(x.data, x.len), SK_OK);
    for (uint32_t number = 0; number < 1001; number++) {
        memset(key, 0, sizeof key);
        memcpy(key + 4, &number, 4);
        util_solve_key(key, 24, 0x5555555555555555ULL + (number & 1));
        CHECK_EQ(sk_block_find(x.data, x.len, key, 24, &value), number < 1000 ? SK_OK : SK_MISSING);
        if (number < 1000) CHECK_EQ(memcmp(value.data, &number, 4), 0);
    }
    sk_buf_free(&x);
    sk_buf_free(&y);
    sk_buf_free(&value);
    sk_close(one);
    sk_close(two);
}

static void test_seal_binds_a_block_to_its_bytes_and_its_seed(void) {
    sk_store *store = make("s", SK_MAP, 20, false);
    sk_buf buf = encode(store);
    CHECK_EQ(sk_block_verify(buf.data, buf.len, 1), SK_CORRUPT); /* not sealed */
    CHECK_EQ(sk_block_seal(buf.data, buf.len, 1), SK_OK);
    CHECK_EQ(sk_block_verify(buf.data, buf.len, 1), SK_OK);
    CHECK_EQ(sk_block_verify(buf.data, buf.len, 2), SK_CORRUPT);
    CHECK_EQ(sk_block_verify(buf.data, buf.len - 1, 1), SK_CORRUPT);
    CHECK_EQ(sk_block_verify(buf.data, 0, 1), SK_CORRUPT);
    CHECK_EQ(sk_block_check(buf.data, buf.len), SK_OK);
    CHECK_EQ(sk_leaf_decode(store, 0, buf.data, buf.len, SK_REPLACE), SK_OK);
    sk_buf_free(&buf);
    sk_close(store);
}

/* ---- Damage ---- */

/* Passes the bytes to every function that reads a block. If they are accepted, they must encode to
 * the same bytes again. Returns whether they were accepted. */
static bool try_all(const uint8_t *bytes, size_t len, const util_key *key) {
    sk_block_info info;
    sk_buf value = {0};
    uint8_t *exact = malloc(len + 1); /* so that AddressSanitizer sees any read beyond the end */
    memcpy(exact, bytes, len);
    exact = realloc(exact, len > 0 ? len : 1);
    int read = sk_block_read(exact, len, &info), check = sk_block_check(exact, len);
    CHECK(read == SK_OK || read == SK_CORRUPT);
    CHECK(check == SK_OK || check == SK_CORRUPT);
    CHECK(read == SK_OK || check != SK_OK);
    int find = sk_block_find(exact, len, key->data, key->len, &value);
    CHECK(find == SK_OK || find == SK_MISSING || find == SK_CORRUPT || find == SK_BAD_KEY);
    sk_store *store = NULL;
    CHECK_EQ(sk_open(1, 1, 0, &store), SK_OK);
    CHECK_EQ(sk_leaf_mark(store, 0, 1, SK_PARTIAL), SK_OK);
    int decode = sk_leaf_decode(store, 0, exact, len, SK_UNDER);
    bool is_here = read == SK_OK && info.leaf_bits == 0 && info.size == len;
    CHECK(decode == SK_OK || decode == SK_CORRUPT || decode == SK_BAD_ARGUMENT);
    if (is_here) CHECK_EQ(decode, check);
    if (is_here && check == SK_OK && info.is_delta && info.offset_width == 4) {
        sk_buf again = encode(store);
        CHECK_EQ(again.len, info.entries > 0 ? len : 0);
        if (again.len == len) CHECK_EQ(memcmp(again.data + 8, exact + 8, len - 8), 0);
        sk_buf_free(&again);
    }
    sk_close(store);
    sk_buf_free(&value);
    free(exact);
    return decode == SK_OK && is_here;
}

static void damage(const char *type, int kind, uint32_t n, bool is_delta) {
    sk_store *store = make(type, kind, n, is_delta);
    sk_buf buf = encode(store);
    util_key key = key_of(type, 1);
    uint32_t seed = 77;
    CHECK_EQ(sk_block_seal(buf.data, buf.len, seed), SK_OK);
    CHECK(try_all(buf.data, buf.len, &key));
    for (size_t len = 0; len < buf.len; len++) {
        CHECK_EQ(sk_block_verify(buf.data, len, seed), SK_CORRUPT);
        CHECK_EQ(sk_block_check(buf.data, len), SK_CORRUPT);
        if (len % 8 == 0 || len < 64) CHECK(!try_all(buf.data, len, &key) || len == 0);
    }
    for (size_t bit = 0; bit < 8 * buf.len; bit++) {
        buf.data[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK_EQ(sk_block_verify(buf.data, buf.len, seed), SK_CORRUPT);
        try_all(buf.data, buf.len, &key); /* without the checksum's help */
        buf.data[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    sk_buf_free(&buf);
    sk_close(store);
}

static void test_every_truncation_and_every_flipped_bit_is_survived(void) {
    for (int kind = SK_I64; kind <= SK_NESTED; kind++) {
        damage("i", kind, 4, false);
        damage("s", kind, 5, true);
        damage("(si)", kind, 4, kind % 2);
    }
}

static void test_random_damage_is_survived(void) {
    test_rng rng = test_rng_new(8);
    for (int round = 0; round < 60; round++) {
        const char *type = key_types[test_below(&rng, KEY_TYPES)];
        sk_store *store = make(type, 1 + (int)test_below(&rng, 6), KEYS, test_below(&rng, 2));
        sk_buf buf = encode(store);
        util_key key = key_of(type, 1);
        for (int i = 0; i < 50; i++) {
            uint8_t was[8], *p = buf.data + test_below(&rng, buf.len / 8) * 8;
            uint64_t word = test_below(&rng, 2) ? test_random(&rng) : test_below(&rng, 300);
            memcpy(was, p, 8);
            memcpy(p, &word, test_below(&rng, 2) ? 8 : 4);
            try_all(buf.data, buf.len, &key);
            memcpy(p, was, 8);
        }
        sk_buf_free(&buf);
        sk_close(store);
    }
}

/* A block made by hand: a header, then the given columns. For blocks that the encoder never
 * writes. */
typedef struct forged {
    _Alignas(8) uint8_t bytes[4096];
    size_t len;
} forged;

static void forge(forged *f, const char *name, const char *type, int kind, int flags, uint64_t n,
                  uint64_t key_bytes, uint64_t value_bytes) {
    memset(f, 0, sizeof *f);
    memcpy(f->bytes, "SKB1", 4);
    memcpy(f->bytes + 16, &n, 8);
    memcpy(f->bytes + 24, &key_bytes, 8);
    memcpy(f->bytes + 32, &value_bytes, 8);
    f->bytes[45] = (uint8_t)kind;
    f->bytes[46] = (uint8_t)flags;
    f->bytes[47] = strcmp(type, "i") == 0 ? 8 : 0;
    f->bytes[48] = 1;
    f->bytes[49] = (uint8_t)strlen(name);
    f->bytes[50] = (uint8_t)strlen(type);
    f->len = 56;
    memcpy(f->bytes + f->len, name, strlen(name));
    memcpy(f->bytes + f->len + strlen(name), type, strlen(type));
    f->len = (f->len + strlen(name) + strlen(type) + 7) / 8 * 8;
}

static void forge_column(forged *f, const void *data, size_t len) {
    if (len > 0) memcpy(f->bytes + f->len, data, len);
    f->len = (f->len + len + 7) / 8 * 8;
    uint64_t size = f->len;
    memcpy(f->bytes + 8, &size, 8);
}

/* Two keys "a" and "b", values "xy" and "z", offsets of width 4 or 8. */
static void forge_two(forged *f, int width, int flags, const uint64_t *key_at,
                      const uint64_t *value_at) {
    uint64_t hash[2] = {sk_xxh64((const uint8_t *)"a", 1, 42),
                        sk_xxh64((const uint8_t *)"b", 1, 42)};
    bool swap = hash[0] > hash[1];
    uint64_t sorted[2] = {hash[swap], hash[!swap]};
    uint32_t narrow[3];
    forge(f, "t", "s", SK_BYTES, flags, 2, 2, 3);
    forge_column(f, sorted, 16);
    for (int i = 0; i < 3; i++) narrow[i] = (uint32_t)key_at[i];
    forge_column(f, width == 8 ? (void *)key_at : (void *)narrow, 3 * (size_t)width);
    forge_column(f, swap ? "ba" : "ab", 2);
    if (flags & 1) forge_column(f, "\0\0", 2);
    for (int i = 0; i < 3; i++) narrow[i] = (uint32_t)value_at[i];
    forge_column(f, width == 8 ? (void *)value_at : (void *)narrow, 3 * (size_t)width);
    forge_column(f, "xyz", 3);
}

static void test_wide_offsets_are_read_as_narrow_ones(void) {
    const uint64_t key_at[3] = {0, 1, 2}, value_at[3] = {0, 2, 3};
    forged f;
    sk_buf value = {0};
    for (int flags = 0; flags < 4; flags++) {
        forge_two(&f, flags & 2 ? 8 : 4, flags, key_at, value_at);
        CHECK_EQ(sk_block_check(f.bytes, f.len), SK_OK);
        CHECK_EQ(sk_block_find(f.bytes, f.len, (const uint8_t *)"b", 1, &value), SK_OK);
        CHECK(value.len == 1 || value.len == 2);
        CHECK_EQ(sk_block_find(f.bytes, f.len, (const uint8_t *)"c", 1, &value), SK_MISSING);
        sk_store *store = util_open(1, 1);
        CHECK_EQ(sk_leaf_decode(store, 0, f.bytes, f.len, SK_OVER), SK_OK);
        CHECK_EQ(sk_get(store, 0, (const uint8_t *)"a", 1, &value) +
                     sk_get(store, 0, (const uint8_t *)"b", 1, &value),
                 3);
        sk_close(store);
    }
    sk_buf_free(&value);
}

static void test_offsets_out_of_order_are_refused(void) {
    const uint64_t good_key[3] = {0, 1, 2}, good_value[3] = {0, 2, 3};
    const uint64_t bad[][3] = {{1, 1, 2},          {0, 2, 1},          {0, 1, 1},
                               {0, 3, 2},          {0, 1, 3},          {0, 0, 0},
                               {0, UINT32_MAX, 2}, {0, UINT64_MAX, 2}, {0, 1ull << 63, 2}};
    forged f;
    sk_buf value = {0};
    for (int flags = 0; flags < 4; flags++)
        for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
            for (int column = 0; column < 2; column++) {
                uint64_t values[3] = {bad[i][0], bad[i][1], bad[i][2]};
                if (!(flags & 2) && values[1] > UINT32_MAX) continue; /* does not fit */
                if (column == 1 && values[2] == 2) values[2] = 3;     /* else as above */
                if (column == 1 && values[0] == 0 && values[1] <= values[2] && values[2] == 3)
                    continue;
                forge_two(&f, flags & 2 ? 8 : 4, flags, column ? good_key : values,
                          column ? values : good_value);
                CHECK_EQ(sk_block_check(f.bytes, f.len), SK_CORRUPT);
                sk_block_find(f.bytes, f.len, (const uint8_t *)"a", 1, &value);
                sk_block_find(f.bytes, f.len, (const uint8_t *)"b", 1, &value);
            }
    sk_buf_free(&value);
}

static void test_impossible_headers_are_refused(void) {
    forged f;
    const uint64_t huge[] = {UINT64_MAX, UINT64_MAX / 8, UINT64_MAX / 8 + 1, 1ull << 61, 1ull << 60,
                             1ull << 32, UINT32_MAX,     UINT64_MAX - 7,     1ull << 63, 513};
    for (size_t i = 0; i < sizeof huge / sizeof huge[0]; i++)
        for (int field = 8; field <= 32; field += 8)
            for (int kind = SK_I64; kind <= SK_BYTES; kind += 2)
                for (int flags = 0; flags < 4; flags++) {
                    forge(&f, "t", kind == SK_I64 ? "i" : "s", kind, flags, 0, 0, 0);
                    forge_column(&f, NULL, 0);
                    f.len = sizeof f.bytes;
                    memcpy(f.bytes + field, &huge[i], 8);
                    sk_block_info info;
                    CHECK_EQ(sk_block_read(f.bytes, f.len, &info), SK_CORRUPT);
                }
    /* no entries, but bytes in the columns */
    for (int field = 0; field < 2; field++) {
        uint64_t zero = 0;
        forge(&f, "t", "s", SK_BYTES, 0, 0, field == 0 ? 8 : 0, field == 1 ? 8 : 0);
        forge_column(&f, &zero, 4);
        if (field == 0) forge_column(&f, "12345678", 8);
        forge_column(&f, &zero, 4);
        if (field == 1) forge_column(&f, "12345678", 8);
        CHECK_EQ(sk_block_check(f.bytes, f.len), SK_CORRUPT);
        sk_store *store = util_open(1, 1);
        CHECK_EQ(sk_leaf_decode(store, 0, f.bytes, f.len, SK_REPLACE), SK_CORRUPT);
        sk_close(store);
    }
}

static void test_values_that_no_leaf_can_hold_are_refused(void) {
    static const struct {
        int kind;
        const char *value;
        size_t len;
    } bad[] = {{SK_LIST, "\x80", 1},
               {SK_MAP, "\x90", 1},
               {SK_MAP, "\x82\x01\x02\x01\x03", 5}, /* the same key twice */
               {SK_NESTED, "\x91\x82\x01\x02\x01\x03", 6},
               {SK_MAP, "\x81\xcc\x01\x02", 4}, /* a key not in its shortest form */
               {SK_LIST, "\x91", 1},
               {SK_LIST, "\x90\x90", 2},
               {SK_LIST, "\xc1", 1},
               {SK_NESTED, "", 0},
               {SK_LIST, "\xdd\xff\xff\xff\xff", 5},
               {SK_NESTED, "\xdb\xff\xff\xff\xff", 5}};
    forged f;
    uint64_t hash = sk_xxh64((const uint8_t *)"a", 1, 42);
    for (size_t i = 0; i <= sizeof bad / sizeof bad[0]; i++) {
        bool is_deep = i == sizeof bad / sizeof bad[0];
        char deep[SK_DEPTH_MAX + 2];
        memset(deep, '\x91', sizeof deep);
        size_t len = is_deep ? sizeof deep : bad[i].len;
        uint32_t key_at[2] = {0, 1}, value_at[2] = {0, (uint32_t)len};
        forge(&f, "t", "s", is_deep ? SK_LIST : bad[i].kind, 0, 1, 1, len);
        forge_column(&f, &hash, 8);
        forge_column(&f, key_at, 8);
        forge_column(&f, "a", 1);
        forge_column(&f, value_at, 8);
        forge_column(&f, is_deep ? deep : bad[i].value, len);
        CHECK_EQ(sk_block_check(f.bytes, f.len), SK_CORRUPT);
        sk_store *store = util_open(1, 1);
        CHECK_EQ(sk_leaf_decode(store, 0, f.bytes, f.len, SK_REPLACE), SK_CORRUPT);
        CHECK_EQ(sk_bytes_used(store), 0);
        sk_close(store);
    }
}

static void test_key_in_the_wrong_leaf_or_with_the_wrong_hash_is_refused(void) {
    sk_store *store = util_open(8, 1);
    uint32_t id = util_state(store, "state", SK_I64, "i");
    sk_buf buf = {0};
    util_key key = util_int_key(5);
    uint32_t leaf = util_leaf_of("i", &key, 3), other = leaf ^ 1;
    CHECK_EQ(sk_i64_put(store, id, key.data, 8, 1), SK_OK);
    CHECK(sk_leaf_encode(store, leaf, id, 0, &buf) > 0);
    sk_block_info info;
    CHECK_EQ(sk_block_read(buf.data, buf.len, &info), SK_OK);
    memcpy(buf.data + 40, &other, 4);
    CHECK_EQ(sk_block_check(buf.data, buf.len), SK_CORRUPT);
    CHECK_EQ(sk_leaf_decode(store, other, buf.data, buf.len, SK_REPLACE), SK_CORRUPT);
    buf.data[info.hashes + 7] ^= 0x20; /* and the hash fits the other leaf, too */
    CHECK_EQ(sk_block_check(buf.data, buf.len), SK_CORRUPT);
    memcpy(buf.data + 40, &leaf, 4);
    CHECK_EQ(sk_block_check(buf.data, buf.len), SK_CORRUPT);
    sk_buf_free(&buf);
    sk_close(store);
}

int main(void) {
    RUN(test_every_kind_and_key_type_comes_back_as_it_was);
    RUN(test_equal_content_gives_equal_bytes_whatever_the_history);
    RUN(test_flooded_table_gives_the_same_bytes_sorted_by_hash_then_key);
    RUN(test_seal_binds_a_block_to_its_bytes_and_its_seed);
    RUN(test_every_truncation_and_every_flipped_bit_is_survived);
    RUN(test_random_damage_is_survived);
    RUN(test_wide_offsets_are_read_as_narrow_ones);
    RUN(test_offsets_out_of_order_are_refused);
    RUN(test_impossible_headers_are_refused);
    RUN(test_values_that_no_leaf_can_hold_are_refused);
    RUN(test_key_in_the_wrong_leaf_or_with_the_wrong_hash_is_refused);
    return test_report();
}
