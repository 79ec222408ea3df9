/* Tests of csrc/unpack.c: columns of values, and whatever bytes may come instead of them. */
#include "test.h"

#include "statekit.h"

#include <stdbool.h>

#define BYTES(...) ((const uint8_t[]){__VA_ARGS__}), sizeof((const uint8_t[]){__VA_ARGS__})
#define NODES 10

/* {"a": int | nil, "b": [str], "c": {bin: moment}, "d": (bool, float)}; d need not be there. */
static void make(sk_unpack_node *nodes) {
    static const struct {
        uint8_t op, is_optional, is_required;
        uint32_t stop, least, most;
        const char *name;
    } shape[NODES] = {
        {SK_UNPACK_RECORD, 0, 0, 10, 0, 0, ""}, {SK_UNPACK_INT, 1, 1, 2, 0, 0, "a"},
        {SK_UNPACK_LIST, 0, 1, 4, 0, 0, "b"},   {SK_UNPACK_STR, 0, 0, 4, 0, 0, ""},
        {SK_UNPACK_MAP, 0, 1, 7, 0, 0, "c"},    {SK_UNPACK_BIN, 0, 0, 6, 0, 0, ""},
        {SK_UNPACK_MOMENT, 0, 0, 7, 0, 0, ""},  {SK_UNPACK_ARRAY, 0, 0, 10, 2, 2, "d"},
        {SK_UNPACK_BOOL, 0, 0, 9, 0, 0, ""},    {SK_UNPACK_FLOAT, 0, 0, 10, 0, 0, ""},
    };
    static const uint8_t zero[4];
    memset(nodes, 0, NODES * sizeof *nodes);
    for (int i = 0; i < NODES; i++) {
        sk_unpack_node *node = &nodes[i];
        node->op = shape[i].op, node->stop = shape[i].stop;
        node->is_optional = shape[i].is_optional, node->is_required = shape[i].is_required;
        node->least = shape[i].least, node->most = shape[i].most;
        node->name = (const uint8_t *)shape[i].name;
        node->name_len = (uint32_t)strlen(shape[i].name);
        bool has_offsets = node->op == SK_UNPACK_LIST || node->op == SK_UNPACK_MAP ||
                           node->op == SK_UNPACK_STR || node->op == SK_UNPACK_BIN;
        if (has_offsets) CHECK_EQ(sk_buf_put(&node->offsets, zero, 4), SK_OK);
    }
}

static void drop(sk_unpack_node *nodes) {
    for (int i = 0; i < NODES; i++) {
        sk_buf_free(&nodes[i].valid);
        sk_buf_free(&nodes[i].offsets);
        sk_buf_free(&nodes[i].data);
    }
}

/* Unpacks one value, from a copy of exact size so that the sanitizer sees a read beyond its end. */
static int unpack(sk_unpack_node *nodes, const uint8_t *p, size_t len) {
    uint8_t *copy = malloc(len > 0 ? len : 1);
    if (len > 0) memcpy(copy, p, len);
    int32_t offsets[2] = {0, (int32_t)len};
    sk_column values = {SK_COL_VAR32, SK_FORM_MSGPACK, copy, offsets, (int64_t)len};
    int status = sk_unpack(nodes, &values, 0, 1, NULL);
    free(copy);
    return status;
}

static int64_t number(const sk_buf *buf, size_t at) {
    int64_t value;
    memcpy(&value, buf->data + 8 * at, 8);
    return value;
}

static int32_t offset(const sk_buf *buf, size_t at) {
    int32_t value;
    memcpy(&value, buf->data + 4 * at, 4);
    return value;
}

/* The fields in another order, one that is not known, all of them given. */
static const uint8_t full[] = {
    0x85, 0xa1, 'c',  0x81, 0xc4, 1,    9,    0xd6, 0xff, 0, 0, 0, 2, /* {b"\t": 2 s} */
    0xa1, 'x',  0x92, 0x01, 0x81, 0xa1, 'y',  0xc0,                   /* not known */
    0xa1, 'b',  0x92, 0xa1, 'p',  0xa2, 'q',  'r',                    /* ["p", "qr"] */
    0xa1, 'a',  0xd1, 0xff, 0x00,                                     /* -256 */
    0xa1, 'd',  0x92, 0xc3, 0xcb, 0x3f, 0xf8, 0,    0,    0, 0, 0, 0, /* (true, 1.5) */
};

static void test_a_record_becomes_columns(void) {
    sk_unpack_node nodes[NODES];
    make(nodes);
    CHECK_EQ(unpack(nodes, full, sizeof full), SK_OK);
    CHECK_EQ(unpack(nodes, BYTES(0x83, 0xa1, 'a', 0xc0, 0xa1, 'b', 0x90, 0xa1, 'c', 0x80)), SK_OK);
    const uint64_t rows[NODES] = {2, 2, 2, 2, 2, 1, 1, 2, 2, 2};
    const uint64_t nulls[NODES] = {0, 1, 0, 0, 0, 0, 0, 1, 1, 1};
    for (int i = 0; i < NODES; i++) {
        CHECK_EQ(nodes[i].rows, rows[i]);
        CHECK_EQ(nodes[i].nulls, nulls[i]);
        CHECK_EQ(nodes[i].valid.len, rows[i]);
    }
    CHECK_EQ(number(&nodes[1].data, 0), -256);
    CHECK(nodes[1].valid.data[0] == 1 && nodes[1].valid.data[1] == 0);
    CHECK(offset(&nodes[2].offsets, 1) == 2 && offset(&nodes[2].offsets, 2) == 2);
    CHECK(nodes[3].data.len == 3 && memcmp(nodes[3].data.data, "pqr", 3) == 0);
    CHECK(offset(&nodes[3].offsets, 1) == 1 && offset(&nodes[3].offsets, 2) == 3);
    CHECK_EQ(number(&nodes[6].data, 0), 2000000);
    CHECK_EQ(nodes[8].data.data[0], 1);
    double real;
    memcpy(&real, nodes[9].data.data, 8);
    CHECK(real == 1.5);
    drop(nodes);
}

static void test_values_of_another_type_are_refused(void) {
    static const struct {
        uint8_t bytes[16];
        uint8_t len;
    } bad[] = {
        {{0xc0}, 1}, /* no record */
        {{0x80}, 1}, /* a is missing */
        {{0x84, 0xa1, 'a', 1, 0xa1, 'a', 1, 0xa1, 'b', 0x90, 0xa1, 'c', 0x80}, 13}, /* a twice */
        {{0x83, 0xa1, 'a', 0xa0, 0xa1, 'b', 0x90, 0xa1, 'c', 0x80}, 10},            /* a is text */
        {{0x83, 0xa1, 'a', 1, 0xa1, 'b', 0x80, 0xa1, 'c', 0x80}, 10},               /* b is a map */
        {{0x83, 0xa1, 'a', 1, 0xa1, 'b', 0x91, 0xc0, 0xa1, 'c', 0x80}, 11}, /* a null text */
        {{0x84, 0xa1, 'a', 1, 0xa1, 'b', 0x90, 0xa1, 'c', 0x80, 0xa1, 'd', 0x91, 0xc3}, 14},
        {{0x83, 0x01, 1, 0xa1, 'b', 0x90, 0xa1, 'c', 0x80}, 9},             /* a name that is 1 */
        {{0x83, 0xa1, 'a', 1, 0xa1, 'b', 0x90, 0xa1, 'c', 0x80, 0x01}, 11}, /* two values */
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        sk_unpack_node nodes[NODES];
        make(nodes);
        CHECK_EQ(unpack(nodes, bad[i].bytes, bad[i].len), SK_BAD_VALUE);
        drop(nodes);
    }
}

static void test_no_bytes_are_read_outside(void) {
    test_rng rng = test_rng_new(1);
    for (int round = 0; round < 20000; round++) {
        uint8_t bytes[sizeof full];
        size_t len = test_below(&rng, sizeof full + 1);
        memcpy(bytes, full, sizeof full);
        for (uint64_t n = test_below(&rng, 4); n > 0; n--)
            bytes[test_below(&rng, sizeof full)] = (uint8_t)test_random(&rng);
        sk_unpack_node nodes[NODES];
        make(nodes);
        int status = unpack(nodes, bytes, len);
        CHECK(status == SK_OK || status == SK_BAD_VALUE || status == SK_TOO_DEEP ||
              status == SK_TOO_LARGE);
        if (status == SK_OK) {
            CHECK_EQ(nodes[0].rows, 1);
            for (int i = 1; i < NODES; i = (int)nodes[i].stop) CHECK_EQ(nodes[i].rows, 1);
        }
        drop(nodes);
    }
}

static void test_offsets_are_not_trusted(void) {
    const uint8_t data[] = {1, 2, 3};
    const int32_t bad[][2] = {{2, 1}, {0, 4}, {-1, 1}, {3, INT32_MIN}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        sk_unpack_node nodes[NODES];
        make(nodes);
        sk_column column = {SK_COL_VAR32, SK_FORM_MSGPACK, data, bad[i], sizeof data};
        CHECK_EQ(sk_unpack(nodes, &column, 0, 1, NULL), SK_CORRUPT);
        CHECK_EQ(sk_unpack_keys(&nodes[1], 1, 0, &column, 0, 1, NULL), SK_CORRUPT);
        drop(nodes);
    }
}

static void test_keys_must_have_the_length_that_they_say(void) {
    static const uint8_t key[] = {1, 0, 0, 0, 'a', 7, 0, 0, 0, 0, 0, 0, 0};
    for (size_t len = 0; len <= sizeof key + 1; len++) {
        sk_unpack_node nodes[NODES];
        make(nodes);
        sk_unpack_node parts[2] = {nodes[3], nodes[1]}; /* (si) */
        uint8_t *copy = calloc(1, len > 0 ? len : 1);
        memcpy(copy, key, len < sizeof key ? len : sizeof key);
        int64_t offsets[2] = {0, (int64_t)len};
        sk_column keys = {SK_COL_VAR64, SK_FORM_MSGPACK, copy, offsets, (int64_t)len};
        int status = sk_unpack_keys(parts, 2, 1, &keys, 0, 1, NULL);
        CHECK_EQ(status, len == sizeof key ? SK_OK : SK_CORRUPT);
        if (status == SK_OK) CHECK_EQ(number(&parts[1].data, 0), 7);
        free(copy);
        nodes[3] = parts[0], nodes[1] = parts[1];
        drop(nodes);
    }
}

static void test_rows_that_are_skipped_leave_nothing(void) {
    sk_unpack_node nodes[NODES];
    make(nodes);
    const int32_t offsets[4] = {0, 1, 2, 3};
    const uint8_t data[] = {5, 0xc1, 7}, skip[] = {0, 1, 0};
    sk_column column = {SK_COL_VAR32, SK_FORM_MSGPACK, data, offsets, sizeof data};
    sk_unpack_node one = nodes[1];
    one.stop = 1;
    CHECK_EQ(sk_unpack(&one, &column, 0, 3, skip), SK_OK);
    CHECK_EQ(one.rows, 2);
    CHECK(number(&one.data, 0) == 5 && number(&one.data, 1) == 7);
    nodes[1] = one;
    drop(nodes);
}

static void test_a_failed_allocation_is_told_and_loses_nothing(void) {
    int status = SK_NO_MEMORY;
    for (int64_t nth = 1; status != SK_OK; nth++) {
        sk_unpack_node nodes[NODES];
        make(nodes);
        sk_fail_alloc(nth, 1);
        status = unpack(nodes, full, sizeof full);
        sk_fail_alloc(0, 0);
        CHECK(status == SK_OK || status == SK_NO_MEMORY);
        CHECK(nth < 1000);
        drop(nodes);
    }
}

int main(void) {
    RUN(test_a_record_becomes_columns);
    RUN(test_values_of_another_type_are_refused);
    RUN(test_no_bytes_are_read_outside);
    RUN(test_offsets_are_not_trusted);
    RUN(test_keys_must_have_the_length_that_they_say);
    RUN(test_rows_that_are_skipped_leave_nothing);
    RUN(test_a_failed_allocation_is_told_and_loses_nothing);
    return test_report();
}
