/*
 * Tests of csrc/node.c and the files behind it.
 *
 * Values are compared by their whole encoding after every step, against node_model.h.
 * write() first performs each write with a failing allocator: the 1st, 2nd, ... allocation fails,
 * until a run has fewer allocations than that. Each time the value and the memory in use must be as
 * they were.
 */
#include "node.h"
#include "node_model.h"
#include "test.h"

/* A value under test and its twin. */
typedef struct twin {
    sk_budget budget;
    sk_mem mem;
    sk_obj *obj;
    model *model;
    uint64_t seq;
    int kind;
} twin;

static void twin_open(twin *t, int kind) {
    *t = (twin){.kind = kind};
    t->mem.budget = &t->budget;
}

static void twin_close(twin *t) {
    sk_node_free(&t->mem, t->obj);
    model_free(t->model);
    CHECK_EQ(t->mem.used, 0);
    CHECK_EQ(t->budget.used, 0);
}

/* ---- Building MessagePack ------------------------------------------------------------ */

#define NO_BYTES ((bytes){0})

static void put_int(bytes *b, int64_t v) {
    if (v >= -32 && v < 128) {
        bytes_add_byte(b, (int)v);
    } else if (v >= 0 && v < 65536) {
        bytes_add_byte(b, v < 256 ? 0xcc : 0xcd);
        if (v >= 256) bytes_add_byte(b, (int)(v >> 8));
        bytes_add_byte(b, (int)v);
    } else {
        bool fits = v >= INT32_MIN && v < 0;
        bytes_add_byte(b, v > UINT32_MAX ? 0xcf : v >= 0 ? 0xce : fits ? 0xd2 : 0xd3);
        if (fits && v >= INT16_MIN) b->p[b->len - 1] = v >= INT8_MIN ? 0xd0 : 0xd1;
        int width = b->p[b->len - 1] == 0xd0   ? 1
                    : b->p[b->len - 1] == 0xd1 ? 2
                    : fits || v <= UINT32_MAX  ? 4
                                               : 8;
        if (b->p[b->len - 1] == 0xd3) width = 8;
        for (int k = width - 1; k >= 0; k--) bytes_add_byte(b, (int)((uint64_t)v >> 8 * k));
    }
}

static void put_str(bytes *b, size_t len, int fill) {
    if (len < 32) {
        bytes_add_byte(b, 0xa0 | (int)len);
    } else {
        bytes_add_byte(b, len < 256 ? 0xd9 : len < 65536 ? 0xda : 0xdb);
        for (int k = len < 256 ? 0 : len < 65536 ? 1 : 3; k >= 0; k--)
            bytes_add_byte(b, (int)(len >> 8 * k));
    }
    for (size_t k = 0; k < len; k++) bytes_add_byte(b, fill);
}

static bytes one_int(int64_t v) {
    bytes b = NO_BYTES;
    put_int(&b, v);
    return b;
}

static bytes one_str(size_t len) {
    bytes b = NO_BYTES;
    put_str(&b, len, 'x');
    return b;
}

/* [first, first + 1, ...] or {first: 0, first + 1: 0, ...} */
static bytes range(char type, size_t n, int64_t first) {
    bytes b = NO_BYTES;
    model_encode_head(type, n, &b);
    for (size_t k = 0; k < n; k++) {
        put_int(&b, first + (int64_t)k);
        if (type == 'm') bytes_add_byte(&b, 0);
    }
    return b;
}

/* ---- Comparing ------------------------------------------------------------------------ */

static bool encodes_as(const sk_obj *obj, const bytes *expected) {
    if (obj == NULL) return expected->len == 0;
    sk_buf buf = {0};
    int status = sk_node_encode(obj, &buf);
    bool same = status == SK_OK && buf.len == expected->len && sk_node_size(obj) == buf.len &&
                memcmp(buf.data, expected->p, buf.len) == 0;
    sk_buf_free(&buf);
    return same;
}

static bytes encoding(const twin *t) {
    bytes b = NO_BYTES;
    if (t->model != NULL) model_encode(t->model, &b);
    return b;
}

static void check_same(const twin *t) {
    bytes b = encoding(t);
    CHECK(encodes_as(t->obj, &b));
    bytes_free(&b);
}

/* Performs the write with its n-th allocation failing, for n = 1, 2, ... until there are fewer. */
static int64_t write_failing(twin *t, int op, bytes path, const char *shape, bytes arg, int64_t i,
                             int64_t j, sk_buf *buf) {
    bytes before = encoding(t);
    int64_t result;
    for (int64_t n = 1;; n++) {
        uint64_t used = t->mem.used;
        size_t len = buf->len;
        sk_fail_alloc(n, 0);
        result = sk_node_write(&t->mem, t->kind, &t->obj, op, path.p, path.len, shape, arg.p,
                               arg.len, i, j, &t->seq, buf);
        sk_fail_alloc(0, 0);
        if (result >= 0) break;
        CHECK_EQ(t->mem.used, used);
        CHECK_EQ(t->budget.used, used);
        CHECK_EQ(buf->len, len);
        if (result != -SK_NO_MEMORY) break;
        CHECK(encodes_as(t->obj, &before));
    }
    bytes_free(&before);
    return result;
}

/* Writes to both twins; compares the results, removed elements and whole values. */
static int64_t write(twin *t, int op, bytes path, const char *shape, bytes arg, int64_t i,
                     int64_t j) {
    sk_buf buf = {0};
    bytes out = NO_BYTES;
    int64_t found = write_failing(t, op, path, shape, arg, i, j, &buf);
    int status = model_write(&t->model, op, path.p, path.len, shape, arg.p, arg.len, i, j, &out);
    CHECK_EQ(found, status == SK_OK ? (int64_t)out.len : -status);
    CHECK(buf.len == out.len && (out.len == 0 || memcmp(buf.data, out.p, out.len) == 0));
    check_same(t);
    sk_buf_free(&buf);
    bytes_free(&out);
    return found;
}

/* write() that owns and frees its path and arg. */
static int64_t write_own(twin *t, int op, bytes path, const char *shape, bytes arg, int64_t i,
                         int64_t j) {
    int64_t result = write(t, op, path, shape, arg, i, j);
    bytes_free(&path);
    bytes_free(&arg);
    return result;
}

static int64_t read_op(const twin *t, int op, bytes path, bytes arg, int64_t i, int64_t j,
                       sk_buf *buf) {
    buf->len = 0;
    return sk_node_read(t->obj, op, path.p, path.len, arg.p, arg.len, i, j, buf);
}

/* A write without the model: for bad input, and where the model would be slow. */
static int64_t raw_write(twin *t, int op, const void *path, size_t path_len, const char *shape,
                         const void *arg, size_t arg_len) {
    sk_buf buf = {0};
    uint64_t used = t->mem.used;
    int64_t result = sk_node_write(&t->mem, t->kind, &t->obj, op, path, path_len, shape, arg,
                                   arg_len, 0, 0, &t->seq, &buf);
    if (result < 0) CHECK_EQ(t->mem.used, used);
    if (t->model != NULL && result < 0) check_same(t);
    sk_buf_free(&buf);
    return result;
}

static bool is_range(const sk_buf *buf, int64_t first, size_t n) {
    bytes expected = range('l', n, first);
    bool same = buf->len == expected.len && memcmp(buf->data, expected.p, buf->len) == 0;
    bytes_free(&expected);
    return same;
}

/* Sizes on both sides of every limit: heads, packed elements, packed bytes. */
static const size_t sizes[] = {0, 1, 2, 14, 15, 16, 17, 63, 64, 65, 66, 130, 255, 256, 257, 300};
#define SIZES (sizeof sizes / sizeof sizes[0])

static void twin_of_range(twin *t, char type, size_t n) {
    twin_open(t, type == 'l' ? SK_LIST : SK_MAP);
    bytes b = range(type, n, 0);
    CHECK_EQ(sk_node_make(&t->mem, t->kind, b.p, b.len, &t->seq, &t->obj), SK_OK);
    t->model = model_of(b.p);
    bytes_free(&b);
    check_same(t);
}

/* ---- Lists ------------------------------------------------------------------------------ */

static void test_list_reads_at_every_size(void) {
    sk_buf buf = {0};
    for (size_t k = 0; k < SIZES; k++) {
        int64_t n = (int64_t)sizes[k];
        twin t;
        twin_of_range(&t, 'l', sizes[k]);
        CHECK_EQ(read_op(&t, SK_R_LEN, NO_BYTES, NO_BYTES, 0, 0, &buf), n);
        CHECK_EQ(read_op(&t, SK_R_TYPE, NO_BYTES, NO_BYTES, 0, 0, &buf), 'l');
        CHECK_EQ(read_op(&t, SK_R_HAS, NO_BYTES, NO_BYTES, 0, 0, &buf), -SK_BAD_PATH);
        CHECK_EQ(read_op(&t, SK_R_KEYS, NO_BYTES, NO_BYTES, 0, 0, &buf), -SK_BAD_PATH);
        for (int64_t i = -n - 1; i <= n; i++) {
            bytes path = one_int(i), expected = one_int(i < 0 ? i + n : i);
            int64_t found = read_op(&t, SK_R_GET, path, NO_BYTES, 0, 0, &buf);
            bool inside = i >= -n && i < n;
            CHECK_EQ(found, inside ? (int64_t)expected.len : -SK_MISSING);
            if (inside) CHECK(memcmp(buf.data, expected.p, expected.len) == 0);
            bytes_free(&path);
            bytes_free(&expected);
        }
        for (int64_t i = -n - 2; i <= n + 2; i += 1 + n / 7)
            for (int64_t j = -n - 2; j <= n + 2; j += 1 + n / 5) {
                int64_t from = i < 0 ? (i + n < 0 ? 0 : i + n) : i > n ? n : i;
                int64_t to = j < 0 ? (j + n < 0 ? 0 : j + n) : j > n ? n : j;
                CHECK(read_op(&t, SK_R_SLICE, NO_BYTES, NO_BYTES, i, j, &buf) > 0);
                CHECK(is_range(&buf, from, to > from ? (size_t)(to - from) : 0));
            }
        CHECK(read_op(&t, SK_R_SLICE, NO_BYTES, NO_BYTES, INT64_MIN, INT64_MAX, &buf) > 0);
        CHECK(is_range(&buf, 0, sizes[k]));
        twin_close(&t);
    }
    sk_buf_free(&buf);
}

static void test_list_writes_at_every_size(void) {
    for (size_t k = 0; k < SIZES; k++) {
        int64_t n = (int64_t)sizes[k];
        const int64_t spots[] = {0, 1, -1, n / 2, n - 1, n, n + 5, -n, -n - 5};
        for (size_t s = 0; s < sizeof spots / sizeof spots[0]; s++) {
            int64_t i = spots[s];
            twin t;
            twin_of_range(&t, 'l', sizes[k]);
            write_own(&t, SK_W_APPEND, NO_BYTES, NULL, one_int(1000), 0, 0);
            write_own(&t, SK_W_INSERT, NO_BYTES, NULL, one_str(20), i, 0);
            write_own(&t, SK_W_POP, NO_BYTES, NULL, NO_BYTES, i, 0);
            write_own(&t, SK_W_SET, one_int(i), NULL, one_str(300), 0, 0);
            write_own(&t, SK_W_SET, one_int(i), NULL, range('l', 3, 0), 0, 0);
            write_own(&t, SK_W_DELETE, one_int(i), NULL, NO_BYTES, 0, 0);
            write_own(&t, SK_W_SPLICE, NO_BYTES, NULL, range('l', 5, 7), i, i + 3);
            write_own(&t, SK_W_SPLICE, NO_BYTES, NULL, range('l', 0, 0), i, n);
            write_own(&t, SK_W_SPLICE, NO_BYTES, NULL, range('l', 2, 0), i, i - 1);
            write_own(&t, SK_W_EXTEND, NO_BYTES, NULL, range('l', 70, 0), 0, 0);
            write_own(&t, SK_W_EXTEND, NO_BYTES, NULL, range('l', 0, 0), 0, 0);
            CHECK_EQ(write_own(&t, SK_W_CLEAR, NO_BYTES, NULL, NO_BYTES, 0, 0), 0);
            write_own(&t, SK_W_APPEND, NO_BYTES, NULL, one_int(5), 0, 0);
            twin_close(&t);
        }
    }
}

static void test_list_grows_one_by_one_at_both_ends(void) {
    for (int front = 0; front < 2; front++) {
        twin t;
        twin_open(&t, SK_LIST);
        for (int k = 0; k < 300; k++)
            write_own(&t, front ? SK_W_INSERT : SK_W_APPEND, NO_BYTES, "l", one_int(k), 0, 0);
        for (int k = 0; k < 300; k++)
            CHECK(write_own(&t, SK_W_POP, NO_BYTES, NULL, NO_BYTES, front ? 0 : -1, 0) > 0);
        CHECK_EQ(write_own(&t, SK_W_POP, NO_BYTES, NULL, NO_BYTES, -1, 0), -SK_MISSING);
        CHECK(t.mem.used < 512);
        twin_close(&t);
    }
}

static void test_heads_widen_at_65536_elements(void) {
    for (int type = 0; type < 2; type++) {
        twin t;
        twin_of_range(&t, type == 0 ? 'l' : 'm', 65535);
        bytes nested = NO_BYTES, key = one_int(70000), value = one_int(1);
        bytes_add_byte(&nested, 0x91); /* the same inside a list, to check the sizes of ancestors */
        bytes inner = encoding(&t);
        bytes_add(&nested, inner.p, inner.len);
        twin outer;
        twin_open(&outer, SK_NESTED);
        CHECK_EQ(sk_node_make(&outer.mem, SK_NESTED, nested.p, nested.len, &outer.seq, &outer.obj),
                 SK_OK);
        outer.model = model_of(nested.p);
        bytes zero = one_int(0), deep = NO_BYTES;
        bytes_add(&deep, zero.p, 1);
        bytes_add(&deep, key.p, key.len);
        for (int round = 0; round < 2; round++) {
            write(&t, type == 0 ? SK_W_APPEND : SK_W_SET, type == 0 ? NO_BYTES : key, NULL, value,
                  0, 0);
            write(&outer, type == 0 ? SK_W_APPEND : SK_W_SET, type == 0 ? zero : deep, NULL, value,
                  0, 0);
            if (type == 0) {
                write(&t, SK_W_POP, NO_BYTES, NULL, NO_BYTES, 0, 0);
                write(&outer, SK_W_POP, zero, NULL, NO_BYTES, 0, 0);
            } else {
                write(&t, SK_W_TAKE, NO_BYTES, NULL, key, 0, 0);
                write(&outer, SK_W_DELETE, deep, NULL, NO_BYTES, 0, 0);
            }
        }
        bytes_free(&nested), bytes_free(&key), bytes_free(&value), bytes_free(&inner);
        bytes_free(&zero), bytes_free(&deep);
        twin_close(&t);
        twin_close(&outer);
    }
}

/* ---- Maps ------------------------------------------------------------------------------- */

static void test_map_at_every_size(void) {
    sk_buf buf = {0};
    for (size_t k = 0; k < SIZES; k++) {
        int64_t n = (int64_t)sizes[k];
        twin t;
        twin_of_range(&t, 'm', sizes[k]);
        CHECK_EQ(read_op(&t, SK_R_LEN, NO_BYTES, NO_BYTES, 0, 0, &buf), n);
        CHECK_EQ(read_op(&t, SK_R_TYPE, NO_BYTES, NO_BYTES, 0, 0, &buf), 'm');
        CHECK_EQ(read_op(&t, SK_R_SLICE, NO_BYTES, NO_BYTES, 0, 1, &buf), -SK_BAD_PATH);
        CHECK(read_op(&t, SK_R_KEYS, NO_BYTES, NO_BYTES, 0, 0, &buf) > 0);
        CHECK(is_range(&buf, 0, sizes[k]));
        for (int64_t i = -1; i <= n; i++) {
            bytes key = one_int(i);
            bool inside = i >= 0 && i < n;
            CHECK_EQ(read_op(&t, SK_R_HAS, NO_BYTES, key, 0, 0, &buf), inside ? 0 : -SK_MISSING);
            CHECK_EQ(read_op(&t, SK_R_GET, key, NO_BYTES, 0, 0, &buf), inside ? 1 : -SK_MISSING);
            bytes_free(&key);
        }
        for (int64_t i = 0; i <= n; i += 1 + n / 4) {
            write_own(&t, SK_W_SET, one_int(i), NULL, one_str(17), 0, 0);
            write_own(&t, SK_W_SET, one_int(i), NULL, one_int(5), 0, 0);
            write_own(&t, SK_W_SET, one_int(n + i), NULL, one_int(5), 0, 0);
            write_own(&t, SK_W_TAKE, NO_BYTES, NULL, one_int(i / 2), 0, 0);
            write_own(&t, SK_W_DELETE, one_int(i + 1), NULL, NO_BYTES, 0, 0);
            write_own(&t, SK_W_UPDATE, NO_BYTES, NULL, range('m', 7, n - 3), 0, 0);
        }
        write_own(&t, SK_W_UPDATE, NO_BYTES, NULL, range('m', 100, n / 2), 0, 0);
        write_own(&t, SK_W_UPDATE, NO_BYTES, NULL, range('m', 0, 0), 0, 0);
        CHECK_EQ(write_own(&t, SK_W_CLEAR, NO_BYTES, NULL, NO_BYTES, 0, 0), 0);
        write_own(&t, SK_W_SET, one_str(40), NULL, one_int(5), 0, 0);
        twin_close(&t);
    }
    sk_buf_free(&buf);
}

static void test_map_keys_of_all_forms(void) {
    twin t;
    twin_open(&t, SK_MAP);
    for (int round = 0; round < 3; round++)
        for (int64_t k = 0; k < 80; k++) {
            bytes key = NO_BYTES;
            if (k % 4 == 0) put_int(&key, k * 1000);
            if (k % 4 == 1) put_str(&key, (size_t)k, 'k');
            if (k % 4 == 2) key = range('l', (size_t)k, 5); /* a tuple, also a long one */
            if (k % 4 == 3) bytes_add(&key, (uint8_t[]){0xcb, 1, 2, 3, 4, 5, 6, 7, (uint8_t)k}, 9);
            write_own(&t, round == 1 ? SK_W_DELETE : SK_W_SET, key, "m",
                      round == 1 ? NO_BYTES : one_int(k), 0, 0);
        }
    twin_close(&t);
}

static void test_equal_keys_are_refused_at_any_size(void) {
    twin t;
    twin_open(&t, SK_MAP);
    const size_t pairs[] = {2, 15, 16, 63, 64, 65, 100, 200, 1000, 5000};
    for (size_t k = 0; k < sizeof pairs / sizeof pairs[0]; k++) {
        size_t n = pairs[k];
        bytes b = range('m', n, 0), wrapped = NO_BYTES;
        b.p[n < 16 ? 1 : 3] = 1; /* the first key, 0, becomes 1 like the second */
        CHECK_EQ(sk_node_make(&t.mem, SK_MAP, b.p, b.len, &t.seq, &t.obj), SK_BAD_VALUE);
        CHECK_EQ(t.mem.used, 0);
        /* as a member, as an update of an existing value, and as a value that is created */
        bytes_add_byte(&wrapped, 0x81);
        bytes_add_byte(&wrapped, 0xc0);
        bytes_add(&wrapped, b.p, b.len);
        CHECK_EQ(sk_node_make(&t.mem, SK_MAP, wrapped.p, wrapped.len, &t.seq, &t.obj),
                 SK_BAD_VALUE);
        CHECK_EQ(sk_node_write(&t.mem, SK_MAP, &t.obj, SK_W_UPDATE, NULL, 0, "m", b.p, b.len, 0, 0,
                               &t.seq, NULL),
                 -SK_BAD_VALUE);
        CHECK(t.obj == NULL && t.mem.used == 0);
        twin other;
        twin_of_range(&other, 'm', n);
        CHECK_EQ(sk_node_write(&other.mem, SK_MAP, &other.obj, SK_W_UPDATE, NULL, 0, "m", b.p,
                               b.len, 0, 0, &other.seq, NULL),
                 -SK_BAD_VALUE);
        check_same(&other);
        twin_close(&other);
        /* as an element of a small list, where its bytes would fit but must not go */
        twin list;
        twin_of_range(&list, 'l', 3);
        CHECK_EQ(raw_write(&list, SK_W_APPEND, "", 0, NULL, b.p, b.len), -SK_BAD_VALUE);
        CHECK_EQ(raw_write(&list, SK_W_SET, "\x01", 1, NULL, b.p, b.len), -SK_BAD_VALUE);
        wrapped.p[1] = 0x91; /* [the map] in place of {nil: the map} */
        CHECK_EQ(raw_write(&list, SK_W_EXTEND, "", 0, NULL, wrapped.p + 1, wrapped.len - 1),
                 -SK_BAD_VALUE);
        twin_close(&list);
        bytes_free(&b);
        bytes_free(&wrapped);
    }
    twin_close(&t);
}

/* ---- Paths, shapes, refusals ------------------------------------------------------------- */

static bytes path_of(const char *text) { /* one letter or digit a step: "a0" is "a", 0 */
    bytes b = NO_BYTES;
    for (; *text != 0; text++)
        if (*text >= '0' && *text <= '9')
            put_int(&b, *text - '0');
        else
            put_str(&b, 1, *text);
    return b;
}

static void test_shape_decides_what_is_created(void) {
    const struct {
        int op;
        const char *path, *shape;
        int64_t status;
    } cases[] = {
        {SK_W_APPEND, "", "l", 0},
        {SK_W_APPEND, "", NULL, -SK_MISSING},
        {SK_W_APPEND, "", "", -SK_MISSING},
        {SK_W_APPEND, "", "m", -SK_BAD_PATH},
        {SK_W_APPEND, "a", "ml", 0},
        {SK_W_APPEND, "a", "mm", -SK_BAD_PATH},
        {SK_W_APPEND, "a", "m", -SK_MISSING},
        {SK_W_APPEND, "abc", "mmml", 0},
        {SK_W_APPEND, "0", "ll", -SK_MISSING},
        {SK_W_INSERT, "a", "ml", 0},
        {SK_W_EXTEND, "a", "ml", 0},
        {SK_W_SPLICE, "a", "mlxx", 0},
        {SK_W_UPDATE, "a", "mm", 0},
        {SK_W_UPDATE, "a", "ml", -SK_BAD_PATH},
        {SK_W_CLEAR, "a", "ml", 0},
        {SK_W_CLEAR, "a", "mm", 0},
        {SK_W_CLEAR, "", "l", 0},
        {SK_W_CLEAR, "", NULL, -SK_MISSING},
        {SK_W_SET, "", NULL, 0},
        {SK_W_SET, "a", "m", 0},
        {SK_W_SET, "a", NULL, -SK_MISSING},
        {SK_W_SET, "ab", "mm", 0},
        {SK_W_SET, "ab", "m", -SK_MISSING},
        {SK_W_SET, "0", "l", -SK_MISSING},
        {SK_W_POP, "a", "ml", -SK_MISSING},
        {SK_W_TAKE, "a", "mm", -SK_MISSING},
        {SK_W_DELETE, "a", "m", -SK_MISSING},
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++)
        for (int64_t n = -1; n < 100; n += n < 0 ? 1 : 33) { /* no root, or one with n entries */
            twin t;
            twin_open(&t, SK_NESTED);
            char shape[8] = "m";
            bytes path = NO_BYTES, sub = path_of(cases[k].path), arg = one_int(7);
            if (n >= 0) { /* the same below a member of a packed or an indexed map */
                bytes b = range('m', (size_t)n, 0);
                write_own(&t, SK_W_SET, NO_BYTES, NULL, b, 0, 0);
                put_str(&path, 1, 'z');
                if (cases[k].shape != NULL) strcat(shape, cases[k].shape);
            }
            bytes_add(&path, sub.p, sub.len);
            int op = cases[k].op;
            if (op == SK_W_EXTEND || op == SK_W_SPLICE) bytes_free(&arg), arg = range('l', 3, 0);
            if (op == SK_W_UPDATE) bytes_free(&arg), arg = range('m', 3, 0);
            if (op == SK_W_DELETE || op == SK_W_POP || op == SK_W_CLEAR) bytes_free(&arg);
            const char *used = n < 0 || cases[k].shape == NULL ? cases[k].shape : shape;
            CHECK_EQ(write(&t, op, path, used, arg, 0, 0), cases[k].status);
            if (cases[k].status == 0) write(&t, op, path, used, arg, 0, 0); /* and now it exists */
            bytes_free(&path), bytes_free(&sub), bytes_free(&arg);
            twin_close(&t);
        }
}

static void test_what_does_not_fit_is_refused(void) {
    const size_t counts[] = {3, 100};
    for (size_t k = 0; k < 2; k++) {
        twin l, m;
        twin_of_range(&l, 'l', counts[k]);
        twin_of_range(&m, 'm', counts[k]);
        CHECK_EQ(raw_write(&l, SK_W_UPDATE, "", 0, NULL, "\x80", 1), -SK_BAD_PATH);
        CHECK_EQ(raw_write(&l, SK_W_TAKE, "", 0, NULL, "\x01", 1), -SK_BAD_PATH);
        CHECK_EQ(raw_write(&l, SK_W_SET, "\xa1x", 2, NULL, "\x01", 1), -SK_BAD_PATH);
        CHECK_EQ(raw_write(&l, SK_W_SET, "\x01\x01", 2, NULL, "\x01", 1), -SK_BAD_PATH);
        CHECK_EQ(raw_write(&l, SK_W_APPEND, "\x01", 1, NULL, "\x01", 1), -SK_BAD_PATH);
        CHECK_EQ(raw_write(&l, SK_W_EXTEND, "", 0, NULL, "\x01", 1), -SK_BAD_VALUE);
        CHECK_EQ(raw_write(&l, SK_W_SPLICE, "", 0, NULL, "\x80", 1), -SK_BAD_VALUE);
        CHECK_EQ(raw_write(&l, SK_W_SET, "", 0, NULL, "\x80", 1), -SK_BAD_VALUE); /* kind */
        CHECK_EQ(raw_write(&l, SK_W_SET, "", 0, NULL, "\x01", 1), -SK_BAD_VALUE);
        CHECK_EQ(raw_write(&l, SK_W_APPEND, "", 0, NULL, "\x01\x02", 2), -SK_BAD_VALUE);
        CHECK_EQ(raw_write(&l, SK_W_APPEND, "", 0, NULL, "\xc1", 1), -SK_BAD_VALUE);
        CHECK_EQ(raw_write(&l, SK_W_APPEND, "", 0, NULL, "", 0), -SK_BAD_VALUE);
        CHECK_EQ(raw_write(&l, SK_W_APPEND, "", 0, NULL, "\x92\x01", 2), -SK_BAD_VALUE);
        CHECK_EQ(raw_write(&l, SK_W_APPEND, "", 0, NULL, "\x81\xcc\x01\x01", 4), -SK_BAD_VALUE);
        CHECK_EQ(raw_write(&l, SK_W_DELETE, "", 0, NULL, NULL, 0), -SK_BAD_ARGUMENT);
        CHECK_EQ(raw_write(&l, 10, "", 0, NULL, "\x01", 1), -SK_BAD_ARGUMENT);
        CHECK_EQ(raw_write(&l, -1, "", 0, NULL, "\x01", 1), -SK_BAD_ARGUMENT);
        CHECK_EQ(raw_write(&l, SK_W_SET, "\xcd\x01", 2, NULL, "\x01", 1), -SK_BAD_PATH);
        CHECK_EQ(raw_write(&l, SK_W_SET, "\xc1", 1, NULL, "\x01", 1), -SK_BAD_PATH);
        CHECK_EQ(raw_write(&m, SK_W_APPEND, "", 0, "m", "\x01", 1), -SK_BAD_PATH);
        CHECK_EQ(raw_write(&m, SK_W_POP, "", 0, "m", NULL, 0), -SK_BAD_PATH);
        CHECK_EQ(raw_write(&m, SK_W_UPDATE, "", 0, "m", "\x90", 1), -SK_BAD_VALUE);
        CHECK_EQ(raw_write(&m, SK_W_TAKE, "", 0, "m", "\x80", 1), -SK_BAD_VALUE);
        CHECK_EQ(raw_write(&m, SK_W_SET, "\xcc\x01", 2, NULL, "\x01", 1), -SK_BAD_PATH);
        CHECK_EQ(raw_write(&m, SK_W_SET, "\x80", 1, NULL, "\x01", 1), -SK_BAD_PATH);
        CHECK_EQ(raw_write(&m, SK_W_APPEND, "\x70", 1, "mx", "\x01", 1), -SK_BAD_ARGUMENT);
        sk_buf buf = {0};
        bytes one = one_int(1);
        CHECK_EQ(read_op(&l, 99, NO_BYTES, NO_BYTES, 0, 0, &buf), -SK_BAD_ARGUMENT);
        CHECK_EQ(read_op(&l, SK_R_LEN, one, NO_BYTES, 0, 0, &buf), -SK_BAD_PATH);
        CHECK_EQ(read_op(&l, SK_R_TYPE, one, NO_BYTES, 0, 0, &buf), 's');
        CHECK_EQ(sk_node_read(m.obj, SK_R_HAS, NULL, 0, (uint8_t *)"\x80", 1, 0, 0, &buf),
                 -SK_BAD_VALUE);
        CHECK_EQ(sk_node_read(NULL, SK_R_GET, NULL, 0, NULL, 0, 0, 0, &buf), -SK_MISSING);
        CHECK_EQ(buf.len, 0);
        bytes_free(&one);
        twin_close(&l);
        twin_close(&m);
    }
    twin t;
    twin_open(&t, SK_LIST);
    CHECK_EQ(raw_write(&t, SK_W_SET, "\xa1k", 2, "m", "\x01", 1), -SK_BAD_VALUE);
    CHECK_EQ(raw_write(&t, SK_W_CLEAR, "", 0, "m", NULL, 0), -SK_BAD_VALUE);
    CHECK_EQ(sk_node_make(&t.mem, SK_BYTES, (uint8_t *)"\x90", 1, &t.seq, &t.obj), SK_BAD_KIND);
    CHECK_EQ(sk_node_make(&t.mem, SK_LIST, (uint8_t *)"\x80", 1, &t.seq, &t.obj), SK_BAD_VALUE);
    CHECK_EQ(sk_node_make(&t.mem, SK_MAP, (uint8_t *)"\x01", 1, &t.seq, &t.obj), SK_BAD_VALUE);
    CHECK_EQ(sk_node_make(&t.mem, SK_NESTED, (uint8_t *)"\x90\x90", 2, &t.seq, &t.obj),
             SK_BAD_VALUE);
    CHECK_EQ(sk_node_make(&t.mem, SK_NESTED, NULL, 0, &t.seq, &t.obj), SK_BAD_VALUE);
    twin_close(&t);
}

static void test_depth_counts_from_the_root(void) {
    uint8_t zeros[40] = {0}, nest[64];
    for (size_t wide = 0; wide < 2; wide++) { /* packed, or with a long string inside */
        twin t;
        twin_open(&t, SK_NESTED);
        bytes value = NO_BYTES;
        for (int k = 0; k < 29; k++) bytes_add_byte(&value, wide ? 0x92 : 0x91);
        bytes_add_byte(&value, 0x91);
        bytes_add_byte(&value, 0x05);
        for (int k = 0; k < 29 && wide; k++) put_str(&value, 40, 'w');
        CHECK_EQ(sk_node_make(&t.mem, SK_NESTED, value.p, value.len, &t.seq, &t.obj), SK_OK);
        t.model = model_of(value.p);
        check_same(&t);
        memset(nest, 0x91, sizeof nest);
        nest[2] = 0x05;
        CHECK_EQ(raw_write(&t, SK_W_SET, zeros, 30, NULL, nest + 1, 2), 0);
        CHECK_EQ(raw_write(&t, SK_W_SET, zeros, 30, NULL, nest, 3), 0);
        model_free(t.model);
        t.model = NULL;
        CHECK_EQ(raw_write(&t, SK_W_SET, zeros, 30, NULL, "\x91\x91\x91\x05", 4), -SK_TOO_DEEP);
        CHECK_EQ(raw_write(&t, SK_W_SET, zeros, 30, NULL, "\x91\x91\x90", 3), -SK_TOO_DEEP);
        CHECK_EQ(raw_write(&t, SK_W_APPEND, zeros, 31, NULL, "\x90", 1), -SK_TOO_DEEP);
        CHECK_EQ(raw_write(&t, SK_W_APPEND, zeros, 31, NULL, "\x07", 1), 0);
        CHECK_EQ(raw_write(&t, SK_W_EXTEND, zeros, 31, NULL, "\x91\x90", 2), -SK_TOO_DEEP);
        CHECK_EQ(raw_write(&t, SK_W_EXTEND, zeros, 31, NULL, "\x91\x01", 2), 0);
        CHECK_EQ(raw_write(&t, SK_W_APPEND, zeros, 32, NULL, "\x07", 1), -SK_TOO_DEEP);
        CHECK_EQ(raw_write(&t, SK_W_CLEAR, zeros, 32, NULL, NULL, 0), -SK_TOO_DEEP);
        CHECK_EQ(raw_write(&t, SK_W_SET, zeros, 32, NULL, "\x07", 1), 0);
        CHECK_EQ(raw_write(&t, SK_W_SET, zeros, 32, NULL, "\x90", 1), -SK_TOO_DEEP);
        CHECK_EQ(raw_write(&t, SK_W_SET, zeros, 33, NULL, "\x07", 1), -SK_TOO_DEEP);
        CHECK_EQ(raw_write(&t, SK_W_CLEAR, zeros, 31, NULL, NULL, 0), 0);
        bytes_free(&value);
        twin_close(&t);
        twin_open(&t, SK_NESTED);
        char shape[34];
        memset(shape, 'm', 33);
        shape[33] = 0;
        memset(zeros, 0, sizeof zeros);
        CHECK_EQ(raw_write(&t, SK_W_CLEAR, zeros, 32, shape, NULL, 0), -SK_TOO_DEEP);
        CHECK_EQ(raw_write(&t, SK_W_SET,
                           "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
                           "\0\x90",
                           32, shape, "\x01", 1),
                 -SK_TOO_DEEP);
        CHECK_EQ(raw_write(&t, SK_W_SET, zeros, 32, shape, "\x01", 1), 0);
        sk_buf buf = {0};
        CHECK_EQ(sk_node_read(t.obj, SK_R_GET, zeros, 32, NULL, 0, 0, 0, &buf), 1);
        CHECK_EQ(sk_node_encode(t.obj, &buf), SK_OK);
        sk_obj *again = NULL;
        CHECK_EQ(sk_node_make(&t.mem, SK_NESTED, buf.data + 1, buf.len - 1, &t.seq, &again), SK_OK);
        sk_node_free(&t.mem, again);
        sk_buf_free(&buf);
        twin_close(&t);
    }
    twin t;
    twin_open(&t, SK_NESTED);
    uint8_t *deep = malloc(1000000);
    memset(deep, 0x91, 1000000);
    CHECK_EQ(sk_node_make(&t.mem, SK_NESTED, deep, 1000000, &t.seq, &t.obj), SK_TOO_DEEP);
    CHECK_EQ(raw_write(&t, SK_W_SET, "", 0, NULL, deep, 1000000), -SK_TOO_DEEP);
    CHECK_EQ(raw_write(&t, SK_W_APPEND, deep, 1000000, "l", "\x01", 1), -SK_BAD_PATH);
    free(deep);
    twin_close(&t);
}

static void test_hostile_values_are_refused_whole(void) {
    bytes value = NO_BYTES; /* a list of maps of lists, indexed at the top two levels */
    model_encode_head('l', 80, &value);
    for (int k = 0; k < 80; k++) {
        bytes_add_byte(&value, 0x82);
        put_int(&value, k);
        put_str(&value, 5, 'v');
        put_str(&value, 1, 'l');
        bytes_add(&value, "\x93\x01\xcd\x01\x02\xc0", 6);
    }
    twin t;
    twin_open(&t, SK_NESTED);
    for (size_t cut = 0; cut < value.len; cut++) {
        uint8_t *copy = malloc(cut + 1);
        memcpy(copy, value.p, cut);
        CHECK_EQ(sk_node_make(&t.mem, SK_NESTED, copy, cut, &t.seq, &t.obj), SK_BAD_VALUE);
        CHECK_EQ(t.mem.used, 0);
        free(copy);
    }
    const uint8_t huge[] = {0xdd, 0xff, 0xff, 0xff, 0xff, 1};
    CHECK_EQ(sk_node_make(&t.mem, SK_NESTED, huge, sizeof huge, &t.seq, &t.obj), SK_BAD_VALUE);
    CHECK_EQ(
        sk_node_make(&t.mem, SK_NESTED, value.p, (size_t)SK_VALUE_BYTES_MAX + 1, &t.seq, &t.obj),
        SK_TOO_LARGE); /* refused by the given length alone */
    /* with each allocation of making it failing in turn */
    for (int64_t n = 1;; n++) {
        sk_fail_alloc(n, 0);
        int status = sk_node_make(&t.mem, SK_NESTED, value.p, value.len, &t.seq, &t.obj);
        sk_fail_alloc(0, 0);
        if (status == SK_OK) break;
        CHECK_EQ(status, SK_NO_MEMORY);
        CHECK_EQ(t.mem.used, 0);
    }
    t.model = model_of(value.p);
    check_same(&t);
    bytes_free(&value);
    twin_close(&t);
}

/* Heads that are wider than necessary are kept in packed bytes, and shortened when these become
 * indexed. The sizes that ancestors keep must follow. */
static void test_wide_heads_keep_sizes_exact(void) {
    bytes value = NO_BYTES;
    model_encode_head('l', 70, &value);
    for (int k = 0; k < 70; k++) bytes_add(&value, "\xdd\0\0\0\x02\xdc\0\x01\x05\xdf\0\0\0\0", 14);
    twin t;
    twin_open(&t, SK_LIST);
    CHECK_EQ(sk_node_make(&t.mem, SK_LIST, value.p, value.len, &t.seq, &t.obj), SK_OK);
    uint8_t path[2] = {3, 0};
    for (int k = 0; k < 300; k++) {
        CHECK_EQ(raw_write(&t, SK_W_APPEND, path, 2, NULL, "\xcd\x01\x01", 3), 0);
        sk_buf buf = {0};
        CHECK_EQ(sk_node_encode(t.obj, &buf), SK_OK);
        CHECK_EQ(buf.len, sk_node_size(t.obj));
        sk_obj *again = NULL;
        CHECK_EQ(sk_node_make(&t.mem, SK_LIST, buf.data, buf.len, &t.seq, &again), SK_OK);
        sk_node_free(&t.mem, again);
        sk_buf_free(&buf);
    }
    bytes_free(&value);
    twin_close(&t);
}

static void test_a_value_cannot_grow_past_its_limit(void) {
    twin t;
    twin_open(&t, SK_LIST);
    size_t len = 400u << 20;
    uint8_t *big = calloc(1, len + 5);
    bytes head = NO_BYTES;
    bytes_add(&head, (uint8_t[]){0xc6, (uint8_t)(len >> 24), (uint8_t)(len >> 16), 0, 0}, 5);
    memcpy(big, head.p, 5);
    CHECK_EQ(raw_write(&t, SK_W_APPEND, "", 0, "l", big, len + 5), 0);
    CHECK_EQ(raw_write(&t, SK_W_APPEND, "", 0, "l", big, len + 5), 0);
    CHECK_EQ(raw_write(&t, SK_W_APPEND, "", 0, "l", big, len + 5), -SK_TOO_LARGE);
    CHECK_EQ(raw_write(&t, SK_W_SET, "\x01", 1, "l", big, len + 5), 0); /* in place of another */
    CHECK_EQ(raw_write(&t, SK_W_POP, "", 0, NULL, NULL, 0), (int64_t)len + 5);
    CHECK_EQ(raw_write(&t, SK_W_APPEND, "", 0, "l", big, len + 5), 0);
    twin_close(&t);
    twin_open(&t, SK_MAP); /* indexed, since its values are long */
    CHECK_EQ(raw_write(&t, SK_W_SET, "\x01", 1, "m", big, len + 5), 0);
    CHECK_EQ(raw_write(&t, SK_W_SET, "\x02", 1, "m", big, len + 5), 0);
    CHECK_EQ(raw_write(&t, SK_W_SET, "\x03", 1, "m", "\x01", 1), 0);
    CHECK_EQ(raw_write(&t, SK_W_SET, "\x03", 1, "m", big, len + 5), -SK_TOO_LARGE);
    CHECK_EQ(raw_write(&t, SK_W_SET, "\x04", 1, "m", big, len + 5), -SK_TOO_LARGE);
    CHECK_EQ(raw_write(&t, SK_W_APPEND, "\x04", 1, "ml", big, len + 5), -SK_TOO_LARGE);
    CHECK_EQ(sk_node_read(t.obj, SK_R_LEN, NULL, 0, NULL, 0, 0, 0, NULL), 3);
    free(big);
    bytes_free(&head);
    twin_close(&t);
}

static void test_the_memory_limit_is_an_error_and_changes_nothing(void) {
    const size_t counts[] = {10, 64, 100};
    for (size_t k = 0; k < 3; k++) {
        twin t;
        twin_of_range(&t, 'm', counts[k]);
        uint64_t used = t.mem.used;
        bytes arg = range('m', 500, 50), path = one_int(3), str = one_str(400);
        for (uint64_t more = 1; more < 400000; more += 97) {
            t.budget.max = used + more;
            int64_t result = sk_node_write(&t.mem, SK_MAP, &t.obj, SK_W_UPDATE, NULL, 0, NULL,
                                           arg.p, arg.len, 0, 0, &t.seq, NULL);
            if (result == 0) break;
            CHECK_EQ(result, -SK_LIMIT);
            CHECK_EQ(t.mem.used, used);
            check_same(&t);
            if (more > 300) continue;
            CHECK_EQ(raw_write(&t, SK_W_SET, path.p, path.len, NULL, str.p, str.len), -SK_LIMIT);
        }
        t.budget.max = 0;
        CHECK_EQ(sk_node_read(t.obj, SK_R_LEN, NULL, 0, NULL, 0, 0, 0, NULL),
                 counts[k] < 50 ? (int64_t)counts[k] + 500 : 550);
        bytes_free(&arg), bytes_free(&path), bytes_free(&str);
        twin_close(&t);
    }
}

/* ---- Costs, by counting ------------------------------------------------------------------- */

static void test_appends_allocate_seldom(void) {
    twin t;
    twin_open(&t, SK_LIST);
    sk_fail_alloc(0, 0);
    for (int k = 0; k < 100000; k++) raw_write(&t, SK_W_APPEND, "", 0, "l", "\x05", 1);
    CHECK(sk_alloc_count() < 40);
    CHECK(t.mem.used < 100000 * 16 * 3 / 2 + 1000);
    sk_fail_alloc(0, 0);
    for (int k = 0; k < 100000; k++) /* prepending is not more expensive */
        sk_node_write(&t.mem, SK_LIST, &t.obj, SK_W_INSERT, NULL, 0, NULL, (uint8_t *)"\x06", 1, 0,
                      0, &t.seq, NULL);
    CHECK(sk_alloc_count() < 40);
    twin_close(&t);
}

static void test_a_queue_stays_small(void) {
    twin t;
    twin_of_range(&t, 'l', 1000);
    sk_buf buf = {0};
    sk_fail_alloc(0, 0);
    for (int k = 0; k < 200000; k++) {
        sk_node_write(&t.mem, SK_LIST, &t.obj, SK_W_APPEND, NULL, 0, NULL, (uint8_t *)"\x06", 1, 0,
                      0, &t.seq, &buf);
        buf.len = 0;
        sk_node_write(&t.mem, SK_LIST, &t.obj, SK_W_POP, NULL, 0, NULL, NULL, 0, 0, 0, &t.seq,
                      &buf);
    }
    CHECK(sk_alloc_count() < 10);
    CHECK(t.mem.used < 1000 * 16 * 2);
    sk_buf_free(&buf);
    model_free(t.model);
    t.model = NULL;
    twin_close(&t);
}

static void test_what_shrinks_gives_memory_back(void) {
    for (int type = 0; type < 2; type++) {
        twin t;
        twin_of_range(&t, type == 0 ? 'l' : 'm', 10000);
        uint64_t most = t.mem.used;
        uint8_t path[3] = {0xcd};
        model_free(t.model);
        t.model = NULL;
        for (int k = 9999; k >= 300; k--) {
            path[1] = (uint8_t)(k >> 8), path[2] = (uint8_t)k;
            CHECK_EQ(raw_write(&t, SK_W_DELETE, path, 3, NULL, NULL, 0), 0);
            if (k == 1000) CHECK(t.mem.used < most / 2);
        }
        CHECK(t.mem.used < most / 8);
        sk_buf buf = {0};
        CHECK(sk_node_read(t.obj, type == 0 ? SK_R_GET : SK_R_KEYS, NULL, 0, NULL, 0, 0, 0, &buf));
        CHECK(is_range(&buf, 0, 300));
        sk_buf_free(&buf);
        twin_close(&t);
    }
    /* a queue that is emptied: what is left lies at the end of the array */
    twin queue;
    twin_of_range(&queue, 'l', 10000);
    model_free(queue.model);
    queue.model = NULL;
    for (int k = 0; k < 9900; k++) CHECK(raw_write(&queue, SK_W_POP, "", 0, NULL, NULL, 0) > 0);
    sk_buf rest = {0};
    CHECK_EQ(sk_node_encode(queue.obj, &rest), SK_OK);
    CHECK(is_range(&rest, 9900, 100));
    CHECK(queue.mem.used < 100 * 16 * 5);
    sk_buf_free(&rest);
    twin_close(&queue);
    /* a packed root keeps no more than about twice what it needs */
    twin packed;
    twin_of_range(&packed, 'l', 64);
    CHECK_EQ(raw_write(&packed, SK_W_SPLICE, "", 0, NULL, "\x90", 1), 0); /* i = j = 0: none */
    uint64_t full = packed.mem.used;
    model_free(packed.model);
    packed.model = NULL;
    for (int k = 0; k < 60; k++) CHECK_EQ(raw_write(&packed, SK_W_POP, "", 0, NULL, NULL, 0), 1);
    CHECK(packed.mem.used <= full / 2);
    twin_close(&packed);
    /* a packed value inside a list goes back inline */
    twin t;
    twin_of_range(&t, 'l', 100);
    uint64_t used = t.mem.used;
    bytes path = one_int(50);
    write_own(&t, SK_W_SET, one_int(50), NULL, range('l', 60, 0), 0, 0);
    CHECK(t.mem.used > used);
    write(&t, SK_W_SPLICE, path, NULL, (bytes){(uint8_t *)"\x90", 1, 0}, 5, 60);
    CHECK_EQ(t.mem.used, used);
    bytes_free(&path);
    twin_close(&t);
}

static void test_a_map_that_comes_and_goes_stays_small(void) {
    twin t;
    twin_of_range(&t, 'm', 500);
    sk_fail_alloc(0, 0);
    uint64_t peak = 0;
    model_free(t.model);
    t.model = NULL;
    for (int64_t k = 500; k < 100000; k++) {
        bytes old = one_int(k - 500), new = one_int(k);
        CHECK_EQ(raw_write(&t, SK_W_SET, new.p, new.len, NULL, "\x01", 1), 0);
        CHECK_EQ(raw_write(&t, SK_W_DELETE, old.p, old.len, NULL, NULL, 0), 0);
        bytes_free(&old), bytes_free(&new);
        if (t.mem.used > peak) peak = t.mem.used;
    }
    CHECK(peak < 500 * 100);
    CHECK(sk_alloc_count() < 50);
    for (int64_t k = 100000 - 500; k < 100000; k++) {
        bytes old = one_int(k);
        CHECK_EQ(raw_write(&t, SK_W_DELETE, old.p, old.len, NULL, NULL, 0), 0);
        bytes_free(&old);
    }
    CHECK(t.mem.used < 1024);
    twin_close(&t);
}

/* ---- Pages ---------------------------------------------------------------------------------- */

/* Reads all pages at the path. Gives the elements, and returns the result of the last call. */
static int64_t read_pages(const twin *t, bytes path, uint32_t elements_max, bytes *elements,
                          size_t *count) {
    uint64_t cursor = 0, version = 0;
    for (;;) {
        sk_buf buf = {0};
        int64_t n = sk_node_page(t->obj, path.p, path.len, &cursor, &version, elements_max, &buf);
        if (n < 0) {
            sk_buf_free(&buf);
            return n;
        }
        CHECK_EQ(n, buf.len);
        model *page = model_of(buf.data);
        CHECK_EQ(page->type, 'l');
        CHECK(page->count > 0);
        for (size_t k = 0; k < page->count; k++) model_encode(page->kids[k], elements);
        *count += page->count;
        model_free(page);
        sk_buf_free(&buf);
    }
}

static void check_pages(const twin *t, uint32_t elements_max) {
    bytes elements = NO_BYTES, expected = NO_BYTES;
    size_t count = 0;
    CHECK_EQ(read_pages(t, NO_BYTES, elements_max, &elements, &count), -SK_END);
    for (size_t k = 0; k < t->model->count; k++) {
        if (t->model->type == 'm') bytes_add(&expected, t->model->keys[k].p, t->model->keys[k].len);
        model_encode(t->model->kids[k], &expected);
    }
    CHECK_EQ(count, t->model->count << (t->model->type == 'm'));
    CHECK_EQ(elements.len, expected.len);
    CHECK(elements.len == 0 || memcmp(elements.p, expected.p, expected.len) == 0);
    bytes_free(&elements);
    bytes_free(&expected);
}

static void test_pages_give_every_element_once(void) {
    for (int type = 0; type < 2; type++)
        for (size_t k = 0; k < SIZES; k++) {
            twin t;
            twin_of_range(&t, type == 0 ? 'l' : 'm', sizes[k]);
            const uint32_t pages[] = {1, 2, 7, 64, 1000, UINT32_MAX};
            for (size_t p = 0; p < sizeof pages / sizeof pages[0]; p++) check_pages(&t, pages[p]);
            for (int64_t d = 0; d < (int64_t)sizes[k]; d += 3) /* dead entries are skipped */
                write_own(&t, SK_W_DELETE, one_int(type == 0 ? 0 : d), NULL, NO_BYTES, 0, 0);
            check_pages(&t, 5);
            twin_close(&t);
        }
}

static void test_pages_notice_changes_of_length(void) {
    for (int type = 0; type < 2; type++) {
        twin t;
        twin_of_range(&t, type == 0 ? 'l' : 'm', 100);
        sk_buf buf = {0};
        for (int change = 0; change < 4; change++) {
            uint64_t cursor = 0, version = 0;
            CHECK(sk_node_page(t.obj, NULL, 0, &cursor, &version, 10, &buf) > 0);
            bytes key = one_int(type == 0 ? 5 : 70 + change), fresh = one_int(1000 + change);
            if (change == 0) write(&t, SK_W_SET, key, NULL, fresh, 0, 0);
            if (change == 1 && type == 0) write(&t, SK_W_APPEND, NO_BYTES, NULL, fresh, 0, 0);
            if (change == 1 && type == 1) write(&t, SK_W_SET, fresh, NULL, key, 0, 0);
            if (change == 2) write(&t, SK_W_DELETE, key, NULL, NO_BYTES, 0, 0);
            if (change == 3) { /* replaced by an equal value */
                bytes same = encoding(&t);
                write(&t, SK_W_SET, NO_BYTES, NULL, same, 0, 0);
                bytes_free(&same);
            }
            int64_t next = sk_node_page(t.obj, NULL, 0, &cursor, &version, 10, &buf);
            if (change == 0)
                CHECK(next > 0); /* one element replaced, the number is the same */
            else
                CHECK_EQ(next, -SK_CHANGED);
            bytes_free(&key), bytes_free(&fresh);
        }
        uint64_t cursor = 0, version = 0;
        bytes one = one_int(1);
        CHECK_EQ(sk_node_page(t.obj, one.p, one.len, &cursor, &version, 1, &buf), -SK_BAD_PATH);
        CHECK_EQ(sk_node_page(t.obj, NULL, 0, &cursor, &version, 0, &buf), -SK_BAD_ARGUMENT);
        CHECK_EQ(sk_node_page(NULL, NULL, 0, &cursor, &version, 1, &buf), -SK_MISSING);
        CHECK(sk_node_page(t.obj, NULL, 0, &cursor, &version, 1, &buf) > 0);
        write(&t, SK_W_CLEAR, NO_BYTES, NULL, NO_BYTES, 0, 0);
        CHECK_EQ(sk_node_page(t.obj, NULL, 0, &cursor, &version, 1, &buf), -SK_CHANGED);
        CHECK_EQ(sk_node_page(NULL, NULL, 0, &cursor, &version, 1, &buf), -SK_CHANGED);
        cursor = version = 0;
        CHECK_EQ(sk_node_page(t.obj, NULL, 0, &cursor, &version, 1, &buf), -SK_END);
        bytes_free(&one);
        sk_buf_free(&buf);
        twin_close(&t);
    }
}

/* ---- Random operations ------------------------------------------------------------------------
 */

static bytes random_key(test_rng *rng) {
    bytes b = NO_BYTES;
    uint64_t pick = test_below(rng, 10);
    if (pick < 6) put_int(&b, (int64_t)test_below(rng, 40) - 5);
    if (pick == 6) put_int(&b, (int64_t)test_below(rng, 400) * 1000 - 200000);
    if (pick == 7 || pick == 8) put_str(&b, test_below(rng, 24), 'a' + (int)test_below(rng, 3));
    if (pick == 9) {
        bytes_add_byte(&b, 0x92);
        put_int(&b, (int64_t)test_below(rng, 3));
        put_str(&b, test_below(rng, 20), 't');
    }
    return b;
}

static void random_value(test_rng *rng, int depth, char type, bytes *out);

static void random_container(test_rng *rng, int depth, char type, bytes *out) {
    size_t n = test_below(rng, 5);
    if (test_below(rng, 12) == 0) n = 10 + test_below(rng, 70);
    model *m = model_new(type); /* the model drops equal keys */
    for (size_t k = 0; k < n; k++) {
        bytes value = NO_BYTES, key = random_key(rng);
        random_value(rng, n > 10 ? 0 : depth - 1, 0, &value);
        model *kid = model_of(value.p);
        if (type == 'm') {
            model_put(m, key.p, key.len, kid);
            model_free(kid);
        } else {
            model_open(m, k, NULL, 0);
            m->kids[k] = kid;
        }
        bytes_free(&value), bytes_free(&key);
    }
    model_encode(m, out);
    model_free(m);
}

/* type: 'l', 'm', 's', or 0 for any type. */
static void random_value(test_rng *rng, int depth, char type, bytes *out) {
    uint64_t pick = test_below(rng, 12);
    if (type == 0) type = depth <= 0 || pick < 8 ? 's' : pick % 2 == 0 ? 'l' : 'm';
    if (type != 's') {
        random_container(rng, depth, type, out);
        return;
    }
    pick = test_below(rng, 40);
    if (pick < 20)
        put_int(out, (int64_t)test_below(rng, 300) - 50);
    else if (pick < 25)
        put_int(out, (int64_t)test_random(rng));
    else if (pick < 37)
        put_str(out, test_below(rng, 30), 's');
    else if (pick < 39)
        put_str(out, 200 + test_below(rng, 150), 'L');
    else
        bytes_add_byte(out, 0xc0);
}

/* A path that mostly exists in the model, and sometimes leads nowhere. It has at most `depth`
 * steps. */
static bytes random_path(test_rng *rng, const model *m, int depth) {
    bytes path = NO_BYTES;
    while (depth-- > 0 && test_below(rng, 4) != 0) {
        if (m != NULL && m->type != 's' && m->count > 0 && test_below(rng, 5) != 0) {
            size_t k = test_below(rng, m->count);
            if (m->type == 'm')
                bytes_add(&path, m->keys[k].p, m->keys[k].len);
            else
                put_int(&path, (int64_t)k - (test_below(rng, 3) == 0 ? (int64_t)m->count : 0));
            m = m->kids[k];
        } else {
            if (m != NULL && m->type == 's' && test_below(rng, 3) != 0) break;
            bytes key = random_key(rng);
            bytes_add(&path, key.p, key.len);
            bytes_free(&key);
            m = NULL;
        }
    }
    return path;
}

static bytes random_arg(test_rng *rng, int op, const model *target) {
    bytes arg = NO_BYTES;
    if (op == SK_W_EXTEND || op == SK_W_SPLICE) random_value(rng, 2, 'l', &arg);
    if (op == SK_W_UPDATE) random_value(rng, 2, 'm', &arg);
    if (op == SK_W_SET || op == SK_W_APPEND || op == SK_W_INSERT) random_value(rng, 2, 0, &arg);
    if (op == SK_W_TAKE) {
        arg = random_key(rng);
        if (target != NULL && target->type == 'm' && target->count > 0) {
            size_t k = test_below(rng, target->count);
            arg.len = 0;
            bytes_add(&arg, target->keys[k].p, target->keys[k].len);
        }
    }
    return arg;
}

static const model *model_at(const model *m, bytes path) {
    const uint8_t *at = path.p;
    const uint8_t *end = path.len > 0 ? path.p + path.len : path.p;
    while (m != NULL && at < end) {
        const uint8_t *step = at;
        size_t k;
        model_free(model_decode(&at));
        if (model_step(m, step, (size_t)(at - step), &k) != SK_OK) return NULL;
        m = m->kids[k];
    }
    return m;
}

static void random_write(twin *t, test_rng *rng, bool shrinking) {
    static const char *const shapes[] = {NULL, "l", "m", "ml", "mm", "mml", "mmm", "lm", "mlm"};
    bytes path = random_path(rng, t->model, 4);
    const model *target = model_at(t->model, path);
    int op = (int)test_below(rng, 10);
    if (target != NULL && test_below(rng, 3) != 0) { /* mostly an operation that fits */
        const int list_ops[] = {SK_W_SET,    SK_W_APPEND, SK_W_EXTEND, SK_W_INSERT, SK_W_POP,
                                SK_W_SPLICE, SK_W_APPEND, SK_W_POP,    SK_W_SPLICE, SK_W_DELETE};
        const int map_ops[] = {SK_W_SET, SK_W_DELETE, SK_W_UPDATE, SK_W_TAKE,
                               SK_W_SET, SK_W_DELETE, SK_W_UPDATE, SK_W_TAKE};
        if (target->type == 'l') op = list_ops[test_below(rng, 10)];
        if (target->type == 'm') op = map_ops[test_below(rng, 8)];
    }
    if (op == SK_W_CLEAR && test_below(rng, 4) != 0) op = SK_W_SPLICE;
    if (shrinking && target != NULL && test_below(rng, 2) == 0) {
        if (target->type == 'l') op = SK_W_POP;
        if (target->type == 'm') op = SK_W_TAKE;
    }
    if ((op == SK_W_DELETE || op == SK_W_SET) && path.len == 0) op = SK_W_CLEAR;
    if (op == SK_W_CLEAR && path.len == 0 && test_below(rng, 8) != 0) op = SK_W_EXTEND;
    bytes arg = random_arg(rng, op, target);
    const char *shape = shapes[test_below(rng, sizeof shapes / sizeof shapes[0])];
    if (t->kind != SK_NESTED && t->model == NULL) shape = t->kind == SK_LIST ? "ll" : "mml";
    int64_t n = target != NULL ? (int64_t)target->count : 4;
    int64_t i = (int64_t)test_below(rng, (uint64_t)(2 * n + 3)) - n - 1;
    int64_t j = (int64_t)test_below(rng, (uint64_t)(2 * n + 3)) - n - 1;
    if (test_below(rng, 2) == 0) j = i + (int64_t)test_below(rng, 4); /* mostly short ranges */
    write(t, op, path, shape, arg, i, j);
    bytes_free(&path);
    bytes_free(&arg);
}

static void random_reads(const twin *t, test_rng *rng) {
    bytes path = random_path(rng, t->model, 4), expected = NO_BYTES;
    const model *target = model_at(t->model, path);
    sk_buf buf = {0};
    int64_t n = read_op(t, SK_R_GET, path, NO_BYTES, 0, 0, &buf);
    if (target != NULL) {
        model_encode(target, &expected);
        CHECK_EQ(n, expected.len);
        CHECK(n < 0 || memcmp(buf.data, expected.p, expected.len) == 0);
        CHECK_EQ(read_op(t, SK_R_TYPE, path, NO_BYTES, 0, 0, &buf), target->type);
        n = read_op(t, SK_R_LEN, path, NO_BYTES, 0, 0, &buf);
        CHECK_EQ(n, target->type == 's' ? -SK_BAD_PATH : (int64_t)target->count);
    } else {
        CHECK(n == -SK_MISSING || n == -SK_BAD_PATH);
    }
    if (t->model != NULL && t->model->type != 's') check_pages(t, 1 + (uint32_t)test_below(rng, 9));
    sk_buf_free(&buf);
    bytes_free(&path);
    bytes_free(&expected);
}

static void test_random_operations_match_the_model(void) {
    test_rng rng = test_rng_new(3);
    const int kinds[] = {SK_LIST, SK_MAP, SK_NESTED};
    for (int episode = 0; episode < 90; episode++) {
        twin t;
        twin_open(&t, kinds[episode % 3]);
        for (int step = 0; step < 150; step++) {
            bool large = t.obj != NULL && sk_node_size(t.obj) > 6000;
            random_write(&t, &rng, large || step % 50 > 35);
            if (step % 8 == 0) random_reads(&t, &rng);
        }
        twin_close(&t);
        if (test_failures > TEST_FAILURES_SHOWN) break;
    }
}

int main(void) {
    RUN(test_list_reads_at_every_size);
    RUN(test_list_writes_at_every_size);
    RUN(test_list_grows_one_by_one_at_both_ends);
    RUN(test_heads_widen_at_65536_elements);
    RUN(test_map_at_every_size);
    RUN(test_map_keys_of_all_forms);
    RUN(test_equal_keys_are_refused_at_any_size);
    RUN(test_shape_decides_what_is_created);
    RUN(test_what_does_not_fit_is_refused);
    RUN(test_depth_counts_from_the_root);
    RUN(test_hostile_values_are_refused_whole);
    RUN(test_wide_heads_keep_sizes_exact);
    RUN(test_a_value_cannot_grow_past_its_limit);
    RUN(test_the_memory_limit_is_an_error_and_changes_nothing);
    RUN(test_appends_allocate_seldom);
    RUN(test_a_queue_stays_small);
    RUN(test_what_shrinks_gives_memory_back);
    RUN(test_a_map_that_comes_and_goes_stays_small);
    RUN(test_pages_give_every_element_once);
    RUN(test_pages_notice_changes_of_length);
    RUN(test_random_operations_match_the_model);
    return test_report();
}
