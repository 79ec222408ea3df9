/*
 * test_batch.c: sk_batch (csrc/batch.c) against the single-key calls. One store gets batches, its
 * twin gets one call for each record. Answers, content and figures must be the same.
 */
#include "store_util.h"

#define RECORDS_MAX 40000

typedef struct twins {
    sk_store *batch, *single;
    uint32_t id, leaf_count;
    int kind, key_col; /* SK_COL_ type of the keys */
    const char *key_type;
} twins;

/* Columns of a batch, built record by record. */
typedef struct column {
    int type, form;
    uint8_t *data;
    size_t len;
    int64_t n;
    int32_t at32[RECORDS_MAX + 1];
    int64_t at64[RECORDS_MAX + 1];
} column;

static column keys, values, map_keys;

static void column_start(column *c, int type, int form) {
    if (c->data == NULL) c->data = malloc(RECORDS_MAX * 128);
    c->type = type;
    c->form = form;
    c->len = 0;
    c->n = 0;
}

static void column_add(column *c, const void *data, size_t len) {
    memcpy(c->data + c->len, data, len);
    c->at32[c->n] = (int32_t)c->len;
    c->at64[c->n++] = (int64_t)c->len;
    c->len += len;
    c->at32[c->n] = (int32_t)c->len;
    c->at64[c->n] = (int64_t)c->len;
}

static sk_column column_of(const column *c) {
    return (sk_column){c->type, c->form, c->data,
                       c->type == SK_COL_VAR32   ? (const void *)c->at32
                       : c->type == SK_COL_VAR64 ? (const void *)c->at64
                                                 : NULL,
                       (int64_t)c->len};
}

static const uint8_t *column_at(const column *c, int64_t r, size_t *len) {
    *len = (size_t)(c->at64[r + 1] - c->at64[r]);
    return c->data + c->at64[r];
}

/* ---- Elements as MessagePack, written here from its specification ---- */

static size_t be(uint8_t *p, uint64_t v, int bytes) {
    for (int i = 0; i < bytes; i++) p[i] = (uint8_t)(v >> (8 * (bytes - 1 - i)));
    return (size_t)bytes;
}

static size_t pack_int(uint8_t *p, int64_t v) {
    if (v >= -32 && v < 128) return be(p, (uint64_t)v & 0xff, 1);
    if (v >= 0) {
        int size = v < 256 ? 0 : v < 65536 ? 1 : v <= UINT32_MAX ? 2 : 3;
        p[0] = (uint8_t)(0xcc + size);
        return 1 + be(p + 1, (uint64_t)v, 1 << size);
    }
    int size = v >= INT8_MIN ? 0 : v >= INT16_MIN ? 1 : v >= INT32_MIN ? 2 : 3;
    p[0] = (uint8_t)(0xd0 + size);
    return 1 + be(p + 1, (uint64_t)v, 1 << size);
}

static size_t pack_bytes(uint8_t *p, const uint8_t *data, size_t len, bool is_str) {
    size_t head = 1;
    if (is_str && len < 32) {
        p[0] = (uint8_t)(0xa0 + len);
    } else if (len < 256) {
        p[0] = is_str ? 0xd9 : 0xc4;
        p[1] = (uint8_t)len;
        head = 2;
    } else {
        p[0] = is_str ? 0xda : 0xc5;
        head = 1 + be(p + 1, len, 2);
    }
    memcpy(p + head, data, len);
    return head + len;
}

static size_t pack_element(uint8_t *p, const column *c, int64_t r) {
    size_t len;
    const uint8_t *data = column_at(c, r, &len);
    int64_t i;
    memcpy(&i, data, 8 <= len ? 8 : 0);
    if (c->type == SK_COL_I64) return pack_int(p, i);
    if (c->type == SK_COL_F64) {
        p[0] = 0xcb;
        return 1 + be(p + 1, (uint64_t)i, 8);
    }
    if (c->form != SK_FORM_MSGPACK) return pack_bytes(p, data, len, c->form == SK_FORM_STR);
    memcpy(p, data, len);
    return len;
}

/* ---- Random records ---- */

static util_key key_number(const twins *t, uint32_t k) {
    if (t->key_col == SK_COL_I64) return util_int_key((int64_t)k * 1234577 - 1000);
    util_key key = util_bytes_key(k);
    if (t->key_type[0] != '(') return key;
    key.len = 4 + k % 20 + 8; /* (si) */
    uint32_t len = k % 20;
    memset(key.data, 'a', sizeof key.data);
    memcpy(key.data, &len, 4);
    memcpy(key.data + 4 + len, &(int64_t){k}, 8);
    return key;
}

static void add_element(column *c, test_rng *rng) {
    uint8_t text[64], packed[80];
    int64_t i = (int64_t)(test_random(rng) >> test_below(rng, 64));
    double d = (double)i / 3;
    size_t len = test_below(rng, 40);
    if (test_below(rng, 2)) i = -i;
    memset(text, 'a' + (int)test_below(rng, 26), sizeof text);
    if (c->type == SK_COL_I64)
        column_add(c, &i, 8);
    else if (c->type == SK_COL_F64)
        column_add(c, &d, 8);
    else if (c->form != SK_FORM_MSGPACK)
        column_add(c, text, len);
    else
        column_add(c, packed,
                   test_below(rng, 2) ? pack_int(packed, i) : pack_bytes(packed, text, len, true));
}

/* A whole value of the kind. */
static void add_value(const twins *t, column *c, test_rng *rng) {
    uint8_t packed[128];
    size_t n = test_below(rng, 6), len = 1;
    int64_t i = (int64_t)test_below(rng, 100000) - 50000;
    double d = (double)i / 7;
    bool is_map = t->kind == SK_MAP || (t->kind == SK_NESTED && test_below(rng, 2));
    if (t->kind == SK_I64) {
        column_add(c, &i, 8);
    } else if (t->kind == SK_F64) {
        column_add(c, &d, 8);
    } else if (t->kind == SK_BYTES) {
        memset(packed, (int)i, sizeof packed);
        column_add(c, packed, test_below(rng, 100));
    } else {
        packed[0] = (uint8_t)((is_map ? 0x80 : 0x90) + n);
        for (size_t k = 0; k < n; k++) {
            if (is_map) packed[len++] = (uint8_t)k;
            len += pack_int(packed + len, i + (int64_t)k);
        }
        column_add(c, packed, len);
    }
}

/* ---- One batch on both stores ---- */

static int single_call(const twins *t, int op, const sk_batch_args *args, int64_t r,
                       int64_t *number, sk_buf *got) {
    size_t len, value_len = 0;
    const uint8_t *key = column_at(&keys, r, &len), *value = NULL;
    uint8_t element[200], map_key[200];
    bool has_values = args->values.type != SK_COL_NONE;
    sk_buf scratch = {0};
    int status;
    if (has_values) value = column_at(&values, r, &value_len);
    *number = 0;
    got->len = 0;
    switch (op) {
    case SK_B_GET: {
        int64_t result = sk_get(t->single, t->id, key, len, got);
        if (result < 0) return (int)-result;
        if (t->kind == SK_I64 || t->kind == SK_F64) memcpy(number, got->data, 8);
        return SK_OK;
    }
    case SK_B_PUT:
        return sk_put(t->single, t->id, key, len, value, value_len);
    case SK_B_ADD:
        if (t->kind == SK_I64) {
            int64_t operand = args->operand_i64;
            if (has_values) memcpy(&operand, value, 8);
            return sk_i64_fold(t->single, t->id, key, len, SK_ADD, operand, args->initial_i64,
                               number);
        } else {
            double operand = args->operand_f64, result = 0;
            if (has_values) memcpy(&operand, value, 8);
            status = sk_f64_fold(t->single, t->id, key, len, SK_ADD, operand, args->initial_f64,
                                 &result);
            memcpy(number, &result, 8);
            return status;
        }
    case SK_B_HAS:
        return sk_contains(t->single, t->id, key, len);
    case SK_B_DELETE:
        return sk_delete(t->single, t->id, key, len, 0);
    default: {
        size_t element_len = pack_element(element, &values, r), map_key_len = 0;
        if (op == SK_B_MAP_PUT) map_key_len = pack_element(map_key, &map_keys, r);
        int64_t result = sk_write(
            t->single, t->id, key, len, op == SK_B_APPEND ? SK_W_APPEND : SK_W_SET, map_key,
            map_key_len, op == SK_B_APPEND ? "l" : "m", element, element_len, 0, 0, &scratch);
        sk_buf_free(&scratch);
        return result < 0 ? (int)-result : SK_OK;
    }
    }
}

/* Runs the columns on both stores and compares their answers, record by record. */
static void run_both(const twins *t, int op, bool has_values, bool wants_out) {
    static int64_t out[RECORDS_MAX], out_at[RECORDS_MAX + 1];
    static uint8_t status[RECORDS_MAX];
    sk_buf buf = {0}, got = {0};
    int64_t n = keys.n, unknown = 0;
    bool is_number = t->kind == SK_I64 || t->kind == SK_F64;
    sk_batch_args args = {.n = n,
                          .keys = column_of(&keys),
                          .values = has_values ? column_of(&values) : (sk_column){0},
                          .map_keys = op == SK_B_MAP_PUT ? column_of(&map_keys) : (sk_column){0},
                          .operand_i64 = 3,
                          .operand_f64 = 0.5,
                          .initial_i64 = 10,
                          .initial_f64 = -1,
                          .out = is_number && wants_out ? out : NULL,
                          .out_offsets = is_number ? NULL : out_at,
                          .buf = is_number ? NULL : &buf,
                          .status = status};
    int result = sk_batch(t->batch, t->id, op, &args);
    int64_t left = 0, number;
    for (int64_t r = 0; r < n; r++) {
        if (status[r] == SK_END && ++left > 0) continue;
        int expected = single_call(t, op, &args, r, &number, &got);
        CHECK_EQ(status[r], expected);
        unknown += expected == SK_UNKNOWN;
        if (is_number && wants_out && expected == SK_OK && (op == SK_B_GET || op == SK_B_ADD))
            CHECK_EQ(out[r], number);
        if (!is_number && op == SK_B_GET) {
            CHECK_EQ(out_at[r + 1] - out_at[r], expected == SK_OK ? (int64_t)got.len : 0);
            if (expected == SK_OK && got.len > 0)
                CHECK_EQ(memcmp(buf.data + out_at[r], got.data, got.len), 0);
        }
    }
    CHECK_EQ(args.unknown, unknown);
    CHECK_EQ(result == SK_OK, left == 0);
    CHECK_EQ(args.failed >= 0, result != SK_OK);
    if (result != SK_OK) { /* the record that failed fails alone, too, and changes nothing */
        CHECK(args.failed < n && status[args.failed] == SK_END);
        CHECK_EQ(single_call(t, op, &args, args.failed, &number, &got), result);
    }
    sk_buf_free(&buf);
    sk_buf_free(&got);
}

static void check_twins(const twins *t) {
    sk_buf a = {0}, b = {0};
    sk_stats x, y;
    for (uint32_t leaf = 0; leaf < t->leaf_count; leaf++) {
        CHECK(sk_leaf_encode(t->batch, leaf, t->id, 0, &a) >= 0);
        CHECK(sk_leaf_encode(t->single, leaf, t->id, 0, &b) >= 0);
    }
    CHECK(util_same(&a, &b));
    CHECK_EQ(sk_stats_read(t->batch, t->id, 0, t->leaf_count, &x), SK_OK);
    CHECK_EQ(sk_stats_read(t->single, t->id, 0, t->leaf_count, &y), SK_OK);
    CHECK_EQ(x.entries, y.entries);
    CHECK_EQ(x.dirty, y.dirty);
    CHECK_EQ(x.tombstones, y.tombstones);
    CHECK_EQ(util_stats(t->batch, t->leaf_count).bytes, sk_bytes_used(t->batch));
    CHECK_EQ(memcmp(x.leaves, y.leaves, sizeof x.leaves), 0);
    uint8_t *p = malloc(t->leaf_count), *q = malloc(t->leaf_count);
    CHECK_EQ(sk_changed_leaves(t->batch, 0, p), SK_OK);
    CHECK_EQ(sk_changed_leaves(t->single, 0, q), SK_OK);
    CHECK_EQ(memcmp(p, q, t->leaf_count), 0);
    free(p);
    free(q);
    sk_buf_free(&a);
    sk_buf_free(&b);
}

static twins open_twins(uint32_t key_groups, uint32_t subgroups, int kind, const char *key_type,
                        int key_col) {
    twins t = {util_open(key_groups, subgroups),
               util_open(key_groups, subgroups),
               0,
               key_groups * subgroups,
               kind,
               key_col,
               key_type};
    t.id = util_state(t.batch, "state", kind, key_type);
    CHECK_EQ(util_state(t.single, "state", kind, key_type), t.id);
    return t;
}

static void close_twins(twins *t) {
    check_twins(t);
    sk_close(t->batch);
    sk_close(t->single);
}

static bool has_op(int op, int kind) {
    return op == SK_B_ADD       ? kind <= SK_F64
           : op == SK_B_APPEND  ? kind == SK_LIST
           : op == SK_B_MAP_PUT ? kind == SK_MAP
                                : true;
}

/* Fills the columns for one operation: n records over `range` keys. */
static void make_columns(const twins *t, int op, int64_t n, uint32_t range, test_rng *rng) {
    static const int types[] = {SK_COL_I64, SK_COL_F64, SK_COL_VAR32, SK_COL_VAR64};
    bool is_element = op == SK_B_APPEND || op == SK_B_MAP_PUT;
    int var = test_below(rng, 2) ? SK_COL_VAR32 : SK_COL_VAR64;
    int type = is_element          ? types[test_below(rng, 4)]
               : t->kind == SK_I64 ? SK_COL_I64
               : t->kind == SK_F64 ? SK_COL_F64
                                   : var;
    column_start(&keys, t->key_col, 0);
    column_start(&values, type, (int)test_below(rng, 3));
    column_start(&map_keys, types[test_below(rng, 4)], (int)test_below(rng, 3));
    for (int64_t r = 0; r < n; r++) {
        util_key key = key_number(t, (uint32_t)test_below(rng, range));
        column_add(&keys, key.data, key.len);
        if (is_element)
            add_element(&values, rng);
        else
            add_value(t, &values, rng);
        add_element(&map_keys, rng);
    }
}

static void run_random(twins *t, int rounds, uint64_t stream) {
    test_rng rng = test_rng_new(stream);
    for (int round = 0; round < rounds; round++) {
        int op = (int)test_below(&rng, 7);
        if (!has_op(op, t->kind)) continue;
        uint32_t range = test_below(&rng, 3) ? 500 : 7; /* few keys give many duplicates */
        make_columns(t, op, (int64_t)test_below(&rng, 300), range, &rng);
        bool has_values = op == SK_B_PUT || op == SK_B_APPEND || op == SK_B_MAP_PUT ||
                          (op == SK_B_ADD && test_below(&rng, 2));
        run_both(t, op, has_values, op != SK_B_ADD || test_below(&rng, 2));
    }
}

static void test_batches_do_what_single_calls_do(void) {
    static const struct {
        const char *key_type;
        int key_col;
    } shapes[] = {{"i", SK_COL_I64},
                  {"b", SK_COL_VAR32},
                  {"s", SK_COL_VAR64},
                  {"(si)", SK_COL_VAR32},
                  {"(si)", SK_COL_VAR64}};
    uint64_t stream = 0;
    for (int kind = SK_I64; kind <= SK_NESTED; kind++)
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
            for (int geometry = 0; geometry < 2; geometry++) {
                twins t = open_twins(geometry ? 4 : 1, geometry ? 8 : 1, kind, shapes[s].key_type,
                                     shapes[s].key_col);
                run_random(&t, 60, stream++);
                close_twins(&t);
            }
}

static void test_batches_on_partial_leaves_report_what_is_unknown(void) {
    for (int kind = SK_I64; kind <= SK_NESTED; kind++) {
        twins t = open_twins(4, 4, kind, "b", SK_COL_VAR32);
        run_random(&t, 10, 1000);
        for (int s = 0; s < 2; s++) {
            sk_store *store = s ? t.batch : t.single;
            CHECK_EQ(sk_leaf_mark(store, 2, 7, SK_ABSENT), SK_OK);
            CHECK_EQ(sk_leaf_mark(store, 7, 12, SK_PARTIAL), SK_OK);
        }
        run_random(&t, 60, 1001 + (uint64_t)kind);
        for (int s = 0; s < 2; s++) /* then batches stop at leaves that are away */
            CHECK_EQ(sk_leaf_mark(s ? t.batch : t.single, 3, 5, SK_AWAY), SK_OK);
        run_random(&t, 30, 1101 + (uint64_t)kind);
        close_twins(&t);
    }
}

/* If a table grows again and again inside one window of records, records whose places were looked
 * up before must not be misled. */
static void test_tables_that_grow_within_a_batch_lose_nothing(void) {
    for (uint64_t stream = 0; stream < 300; stream++) {
        test_rng rng = test_rng_new(2000 + stream);
        int kind = stream % 2 ? SK_I64 : SK_F64;
        twins t =
            open_twins(1, 1, kind, stream % 3 ? "i" : "b", stream % 3 ? SK_COL_I64 : SK_COL_VAR32);
        for (int64_t n = 10; n < 700; n += 1 + (int64_t)test_below(&rng, 200)) {
            int op = test_below(&rng, 2) ? SK_B_ADD : SK_B_PUT;
            make_columns(&t, op, n, (uint32_t)n, &rng);
            run_both(&t, op, true, true);
        }
        close_twins(&t);
    }
}

/* In a store that uses much memory, batches go leaf by leaf. Here one large value makes it such a
 * store. */
static void test_batches_on_a_large_store_do_the_same(void) {
    static const int64_t len = 33 << 20;
    uint8_t *ballast = calloc(1, (size_t)len);
    for (int kind = SK_I64; kind <= SK_NESTED; kind++) {
        twins t =
            open_twins(4, 8, kind, kind % 2 ? "b" : "i", kind % 2 ? SK_COL_VAR32 : SK_COL_I64);
        for (int s = 0; s < 2; s++) {
            sk_store *store = s ? t.batch : t.single;
            uint32_t id = util_state(store, "ballast", SK_BYTES, "i");
            CHECK_EQ(
                sk_put(store, id, (const uint8_t *)"12345678", 8, ballast, s ? (size_t)len : 1),
                SK_OK);
        }
        CHECK(sk_bytes_used(t.batch) > 32 << 20);
        run_random(&t, 60, 5000 + (uint64_t)kind);
        test_rng rng = test_rng_new(6000 + (uint64_t)kind);
        make_columns(&t, SK_B_PUT, 300, 100, &rng);
        if (kind >= SK_LIST) values.data[values.at64[150]] = 0xc1; /* an error on the way */
        run_both(&t, SK_B_PUT, true, false);
        close_twins(&t);
    }
    free(ballast);
}

static void test_batches_of_many_chunks(void) {
    for (int geometry = 0; geometry < 2; geometry++) {
        test_rng rng = test_rng_new(3000);
        twins t = open_twins(geometry ? 64 : 1, 1, SK_I64, "i", SK_COL_I64);
        make_columns(&t, SK_B_ADD, RECORDS_MAX, 30000, &rng);
        run_both(&t, SK_B_ADD, true, true);
        run_both(&t, SK_B_GET, false, true);
        run_both(&t, SK_B_DELETE, false, true);
        close_twins(&t);
    }
}

static void test_batches_over_the_most_leaves(void) {
    test_rng rng = test_rng_new(4000);
    sk_store *store = util_open(1 << 16, 16);
    uint32_t id = util_state(store, "n", SK_I64, "i");
    int64_t numbers[1000], out[1000], sum = 0;
    uint8_t status[1000];
    for (int i = 0; i < 1000; i++) numbers[i] = (int64_t)test_below(&rng, 600);
    sk_batch_args args = {.n = 1000,
                          .keys = {SK_COL_I64, 0, numbers, NULL, sizeof numbers},
                          .operand_i64 = 1,
                          .out = out,
                          .status = status};
    CHECK_EQ(sk_batch(store, id, SK_B_ADD, &args), SK_OK);
    for (int64_t k = 0; k < 600; k++) {
        int64_t n = 0, expected = 0;
        for (int i = 0; i < 1000; i++) expected += numbers[i] == k;
        int found = sk_i64_get(store, id, util_int_key(k).data, 8, &n);
        CHECK_EQ(found, expected > 0 ? SK_OK : SK_MISSING);
        CHECK_EQ(n, expected);
        sum += n;
    }
    CHECK_EQ(sum, 1000);
    sk_close(store);
}

/* ---- Errors ---- */

static void test_error_in_the_middle_stops_there(void) {
    twins t = open_twins(2, 2, SK_I64, "i", SK_COL_I64);
    for (int at = 0; at < 150; at += 7) { /* the sum of record `at` overflows */
        column_start(&keys, SK_COL_I64, 0);
        column_start(&values, SK_COL_I64, 0);
        for (int64_t r = 0; r < 150; r++) {
            int64_t value = r == at ? INT64_MAX : 1;
            util_key key = util_int_key(r % 50);
            column_add(&keys, key.data, 8);
            column_add(&values, &value, 8);
        }
        run_both(&t, SK_B_ADD, true, true);
    }
    close_twins(&t);
    t = open_twins(2, 2, SK_LIST, "b", SK_COL_VAR32);
    for (int at = 0; at < 100; at += 9) { /* record `at` is not a value, or not a list */
        column_start(&keys, SK_COL_VAR32, 0);
        column_start(&values, SK_COL_VAR64, SK_FORM_MSGPACK);
        for (int r = 0; r < 100; r++) {
            util_key key = util_bytes_key((uint32_t)r % 30);
            column_add(&keys, key.data, key.len);
            column_add(&values, r == at ? "\xc1" : "\x91\x05", r == at ? (size_t)(at % 2) : 2);
        }
        run_both(&t, SK_B_PUT, true, false);
        run_both(&t, SK_B_APPEND, true, false);
    }
    close_twins(&t);
    t = open_twins(2, 2, SK_I64, "(si)", SK_COL_VAR32);
    for (int at = 0; at < 100; at += 9) { /* record `at` has no such key */
        column_start(&keys, SK_COL_VAR32, 0);
        for (int r = 0; r < 100; r++) {
            util_key key = key_number(&t, (uint32_t)r % 30);
            column_add(&keys, key.data, r == at ? key.len - 1 : key.len);
        }
        run_both(&t, SK_B_ADD, false, true);
    }
    close_twins(&t);
}

/* A map's key is exactly one value: no value would mean the map itself, two a path into it. */
static void test_map_keys_are_exactly_one_value(void) {
    static const struct {
        const char *key;
        size_t len;
    } bad[] = {{"", 0},         {"\x01\x02", 2},     {"\xc1", 1},
               {"\xcc\x01", 2}, {"\x81\x01\x02", 3}, {"\xa2x", 2}};
    sk_store *store = util_open(1, 1);
    uint32_t id = util_state(store, "m", SK_MAP, "i");
    util_key key = util_int_key(1);
    sk_buf was = {0}, is = {0};
    CHECK_EQ(sk_put(store, id, key.data, 8, (const uint8_t *)"\x81\x01\x81\x02\x03", 5), SK_OK);
    util_encode_all(store, 1, &was);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        int32_t key_at[2] = {0, (int32_t)bad[i].len}, value_at[2] = {0, 1};
        uint8_t status = SK_OK;
        sk_batch_args args = {.n = 1,
                              .keys = {SK_COL_I64, 0, key.data, NULL, 8},
                              .map_keys = {SK_COL_VAR32, 0, bad[i].key, key_at, key_at[1]},
                              .values = {SK_COL_VAR32, 0, "\x80", value_at, 1},
                              .status = &status};
        CHECK(sk_batch(store, id, SK_B_MAP_PUT, &args) > SK_UNKNOWN);
        CHECK_EQ(status, SK_END);
        util_encode_all(store, 1, &is);
        CHECK(util_same(&was, &is));
    }
    sk_buf_free(&was);
    sk_buf_free(&is);
    sk_close(store);
}

static void test_columns_that_do_not_fit_are_refused(void) {
    sk_store *store = util_open(2, 2);
    uint32_t n = util_state(store, "n", SK_I64, "i"), b = util_state(store, "b", SK_BYTES, "b");
    int64_t numbers[4] = {1, 2, 3, 4}, out[4], out_at[5];
    int32_t at[5] = {0, 1, 2, 3, 4}, bad[5] = {0, 2, 1, 3, 4}, low[5] = {-1, 0, 1, 2, 3};
    uint8_t status[4];
    sk_buf buf = {0};
    sk_column ints = {SK_COL_I64, 0, numbers, NULL, sizeof numbers};
    sk_column vars = {SK_COL_VAR32, 0, "abcd", at, 4}, wrong = {SK_COL_VAR32, 0, "abcd", bad, 4};
    sk_column below = {SK_COL_VAR32, 0, "abcd", low, 4}, cut = {SK_COL_VAR32, 0, "abcd", at, 3};
    sk_column floats = {SK_COL_F64, 0, numbers, NULL, sizeof numbers};
    const struct {
        uint32_t state;
        int op;
        sk_batch_args args;
        int expected;
    } cases[] = {
        {99, SK_B_HAS, {.n = 4, .keys = ints, .status = status}, SK_BAD_ARGUMENT},
        {n, SK_B_HAS, {.n = -1, .keys = ints, .status = status}, SK_BAD_ARGUMENT},
        {n, SK_B_HAS, {.n = 4, .keys = vars, .status = status}, SK_BAD_KEY},
        {n, SK_B_HAS, {.n = 4, .keys = floats, .status = status}, SK_BAD_KEY},
        {n, SK_B_HAS, {.n = 5, .keys = ints, .status = status}, SK_BAD_ARGUMENT},
        {n, SK_B_HAS, {.n = 4, .keys = ints}, SK_BAD_ARGUMENT},
        {n, SK_B_GET, {.n = 4, .keys = ints, .status = status}, SK_BAD_ARGUMENT},
        {n, SK_B_PUT, {.n = 4, .keys = ints, .status = status}, SK_BAD_VALUE},
        {n, SK_B_PUT, {.n = 4, .keys = ints, .values = floats, .status = status}, SK_BAD_VALUE},
        {n, SK_B_ADD, {.n = 4, .keys = ints, .values = vars, .status = status}, SK_BAD_VALUE},
        {n, SK_B_APPEND, {.n = 4, .keys = ints, .values = ints, .status = status}, SK_BAD_KIND},
        {n, SK_B_MAP_PUT, {.n = 4, .keys = ints, .values = ints, .status = status}, SK_BAD_KIND},
        {n, 7, {.n = 4, .keys = ints, .status = status}, SK_BAD_KIND},
        {n, -1, {.n = 4, .keys = ints, .status = status}, SK_BAD_KIND},
        {b, SK_B_HAS, {.n = 4, .keys = ints, .status = status}, SK_BAD_KEY},
        {b, SK_B_HAS, {.n = 4, .keys = wrong, .status = status}, SK_BAD_ARGUMENT},
        {b, SK_B_HAS, {.n = 4, .keys = below, .status = status}, SK_BAD_ARGUMENT},
        {b, SK_B_HAS, {.n = 4, .keys = cut, .status = status}, SK_BAD_ARGUMENT},
        {b, SK_B_ADD, {.n = 4, .keys = vars, .status = status}, SK_BAD_KIND},
        {b, SK_B_PUT, {.n = 4, .keys = vars, .values = ints, .status = status}, SK_BAD_VALUE},
        {b, SK_B_PUT, {.n = 4, .keys = vars, .values = wrong, .status = status}, SK_BAD_ARGUMENT},
        {b, SK_B_GET, {.n = 4, .keys = vars, .buf = &buf, .status = status}, SK_BAD_ARGUMENT},
        {b,
         SK_B_GET,
         {.n = 4, .keys = vars, .out_offsets = out_at, .status = status},
         SK_BAD_ARGUMENT},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        sk_batch_args args = cases[i].args;
        int found = sk_batch(store, cases[i].state, cases[i].op, &args);
        if (found != cases[i].expected) printf("case %zu: ", i);
        CHECK_EQ(found, cases[i].expected);
    }
    sk_batch_args none = {.n = 0, .keys = ints, .out = out};
    CHECK_EQ(sk_batch(store, n, SK_B_ADD, &none), SK_OK);
    CHECK_EQ(sk_bytes_used(store), 0);
    /* no bytes at all: keys and values of length 0 */
    int32_t zeros[5] = {0};
    sk_column empty = {SK_COL_VAR32, 0, NULL, zeros, 0};
    sk_batch_args puts = {.n = 4, .keys = empty, .values = empty, .status = status};
    CHECK_EQ(sk_batch(store, b, SK_B_PUT, &puts), SK_OK);
    CHECK_EQ(sk_get(store, b, NULL, 0, &buf), 0);
    sk_buf_free(&buf);
    sk_close(store);
}

static void test_packed_keys_route_as_tuples(void) {
    int64_t numbers[3] = {-1, 0, 77}, offsets[4];
    int32_t at[5] = {0, 0, 3, 5, 5};
    sk_buf buf = {0};
    sk_column parts[2] = {{SK_COL_VAR32, 0, "abcde", at, 5},
                          {SK_COL_I64, 0, numbers, NULL, sizeof numbers}};
    CHECK_EQ(sk_pack_keys("(si)", parts, 3, offsets, &buf), SK_OK);
    CHECK_EQ(offsets[0], 0);
    CHECK_EQ(offsets[3], 3 * 12 + 5);
    for (int r = 0; r < 3; r++) {
        uint64_t hash = 0, chain = sk_xxh64((const uint8_t *)"abcde" + at[r],
                                            (size_t)(at[r + 1] - at[r]), 42);
        chain = sk_xxh64((const uint8_t *)&numbers[r], 8, chain);
        CHECK_EQ(sk_key_hash("(si)", buf.data + offsets[r], (size_t)(offsets[r + 1] - offsets[r]),
                             &hash),
                 SK_OK);
        CHECK_EQ(hash, chain);
    }
    CHECK_EQ(sk_pack_keys("s", parts, 3, offsets, &buf), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_pack_keys("(is)", parts, 3, offsets, &buf), SK_BAD_KEY);
    CHECK_EQ(sk_pack_keys("(si)", parts, 4, offsets, &buf), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_pack_keys("(si)", parts, -1, offsets, &buf), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_pack_keys("(si)", parts, 0, offsets, &buf), SK_OK);
    CHECK_EQ(offsets[0], 0);
    sk_buf_free(&buf);
}

int main(void) {
    RUN(test_batches_do_what_single_calls_do);
    RUN(test_batches_on_partial_leaves_report_what_is_unknown);
    RUN(test_tables_that_grow_within_a_batch_lose_nothing);
    RUN(test_batches_on_a_large_store_do_the_same);
    RUN(test_batches_of_many_chunks);
    RUN(test_batches_over_the_most_leaves);
    RUN(test_error_in_the_middle_stops_there);
    RUN(test_map_keys_are_exactly_one_value);
    RUN(test_columns_that_do_not_fit_are_refused);
    RUN(test_packed_keys_route_as_tuples);
    free(keys.data);
    free(values.data);
    free(map_keys.data);
    return test_report();
}
