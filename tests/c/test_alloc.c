/*
 * test_alloc.c: every public call is made with its n-th allocation failing, for every n, once with
 * only that allocation failing and once with all later ones failing too. The call must report it,
 * the store must be as it was, nothing may leak (AddressSanitizer), and the same call must succeed
 * afterwards.
 */
#include "store_util.h"

#define LEAVES 4
#define ALLOCATIONS_MAX 2000 /* of one call */

enum { N, F, B, L, M, T, STATES }; /* ids: i64, f64, bytes, list, map, nested */

typedef struct fixture {
    sk_store *store, *other;
    sk_buf buf;            /* results */
    sk_buf blocks[LEAVES]; /* a leaf's blocks to decode */
    sk_leaves *leaves;
    sk_snapshot *snapshot;
    uint8_t status[256];
    int64_t records; /* sk_batch: how many to run; 0: all */
    int64_t reached; /* sk_batch: how many took effect, or -1 */
} fixture;

static util_key key_of(uint32_t k) {
    util_key key = util_bytes_key(k);
    if (k % 2) { /* long enough to need memory of its own */
        key.len = 40;
        memcpy(key.data + 36, &k, 4);
    }
    return key;
}

/* A list of n small strings. */
static size_t list_of(uint32_t n, uint8_t *out) {
    size_t at = 3;
    out[0] = 0xdc;
    out[1] = (uint8_t)(n >> 8);
    out[2] = (uint8_t)n;
    for (uint32_t i = 0; i < n; i++) {
        memcpy(out + at,
               "\xa9"
               "element..",
               10);
        at += 10;
    }
    return at;
}

/* A map of n entries, int to list. */
static size_t map_of(uint32_t n, uint8_t *out) {
    size_t at = 3;
    out[0] = 0xde;
    out[1] = (uint8_t)(n >> 8);
    out[2] = (uint8_t)n;
    for (uint32_t i = 0; i < n; i++) {
        out[at++] = 0xcd;
        out[at++] = (uint8_t)(1 + i / 256);
        out[at++] = (uint8_t)i;
        memcpy(out + at,
               "\x92\xa5"
               "hello\x07",
               8);
        at += 8;
    }
    return at;
}

static void declare(sk_store *store) {
    static const char *const names[] = {"n", "f", "b", "l", "m", "t"};
    for (uint32_t s = 0; s < STATES; s++) CHECK_EQ(util_state(store, names[s], (int)s + 1, "b"), s);
}

static void fill(sk_store *store, uint32_t from, uint32_t to) {
    uint8_t value[4096];
    for (uint32_t k = from; k < to; k++) {
        util_key key = key_of(k);
        double f = k;
        CHECK_EQ(sk_i64_put(store, N, key.data, key.len, k), SK_OK);
        CHECK_EQ(sk_f64_put(store, F, key.data, key.len, f), SK_OK);
        CHECK_EQ(sk_put(store, B, key.data, key.len, value, k % 90), SK_OK);
        size_t len = list_of(k % 3 == 0 ? 200 : 5, value);
        CHECK_EQ(sk_put(store, L, key.data, key.len, value, len), SK_OK);
        len = map_of(k % 3 == 0 ? 200 : 5, value);
        CHECK_EQ(sk_put(store, M, key.data, key.len, value, len), SK_OK);
        CHECK_EQ(sk_put(store, T, key.data, key.len, value, len), SK_OK);
        memset(value, (int)k, sizeof value);
    }
}

static void set_up(fixture *f) {
    *f = (fixture){.store = util_open(2, 2), .other = util_open(2, 2), .reached = -1};
    declare(f->store);
    fill(f->store, 0, 20);
}

static void tear_down(fixture *f) {
    sk_snapshot_close(f->snapshot);
    sk_leaves_free(f->leaves);
    sk_close(f->store);
    sk_close(f->other);
    sk_buf_free(&f->buf);
    for (int i = 0; i < LEAVES; i++) sk_buf_free(&f->blocks[i]);
}

/* ---- The calls. Each is prepared, and then called with failing allocations ---- */

static void nothing(fixture *f) { (void)f; }

#define KEY(k) key_of(k).data, key_of(k).len

static int64_t call_open(fixture *f) {
    sk_store *store = NULL;
    int status = sk_open(8, 8, 0, &store);
    CHECK_EQ(store != NULL, status == SK_OK);
    sk_close(store);
    (void)f;
    return -status;
}

static int64_t call_state_add(fixture *f) {
    uint32_t id;
    return -sk_state_add(f->store, "one more", SK_MAP, "(si)", 0, &id);
}

static int64_t call_get(fixture *f) { return sk_get(f->store, M, KEY(3), &f->buf); }
static int64_t call_put_i64(fixture *f) { return -sk_i64_put(f->store, N, KEY(101), 1); }
static int64_t call_put_f64(fixture *f) { return -sk_f64_put(f->store, F, KEY(101), 1); }

static int64_t call_put_bytes(fixture *f) {
    uint8_t value[500] = {0};
    return -sk_put(f->store, B, KEY(101), value, sizeof value);
}

static int64_t call_replace_bytes(fixture *f) {
    uint8_t value[500] = {0};
    return -sk_put(f->store, B, KEY(1), value, sizeof value);
}

static int64_t call_put_list(fixture *f) {
    uint8_t value[4096];
    return -sk_put(f->store, L, KEY(101), value, list_of(300, value));
}

static int64_t call_put_map(fixture *f) {
    uint8_t value[4096];
    return -sk_put(f->store, M, KEY(101), value, map_of(300, value));
}

static int64_t call_replace_map(fixture *f) {
    uint8_t value[4096];
    return -sk_put(f->store, M, KEY(3), value, map_of(100, value));
}

static int64_t call_fold_i64(fixture *f) {
    int64_t result;
    return -sk_i64_fold(f->store, N, KEY(101), SK_ADD, 1, 2, &result);
}

static int64_t call_fold_f64(fixture *f) {
    double result;
    return -sk_f64_fold(f->store, F, KEY(101), SK_MAX, 1, 2, &result);
}

static int64_t call_cas_i64(fixture *f) {
    return -sk_i64_cas(f->store, N, KEY(101), NULL, 3, NULL);
}

static int64_t call_cas_f64(fixture *f) {
    return -sk_f64_cas(f->store, F, KEY(101), NULL, 3, NULL);
}

static void partial(fixture *f) { CHECK_EQ(sk_leaf_mark(f->store, 0, LEAVES, SK_PARTIAL), SK_OK); }

/* Large tables, some of which grow in call_many_puts. */
static void many(fixture *f) {
    uint8_t value[64];
    for (uint32_t k = 200; k < 500; k++) {
        util_key key = key_of(k);
        CHECK_EQ(sk_i64_put(f->store, N, key.data, key.len, 1), SK_OK);
        CHECK_EQ(sk_put(f->store, L, key.data, key.len, value, list_of(1, value)), SK_OK);
    }
}

static int64_t call_many_puts(fixture *f) { /* each put either happens or does not */
    int status = SK_OK;
    uint32_t k = 1200;
    while (k < 1300 && (status = sk_i64_put(f->store, N, KEY(k), 1)) == SK_OK) k++;
    CHECK(status == SK_OK || sk_contains(f->store, N, KEY(k)) == SK_MISSING);
    for (; status != SK_OK && k > 1200; k--) CHECK_EQ(sk_delete(f->store, N, KEY(k - 1), 0), SK_OK);
    return -status;
}

static int64_t call_delete(fixture *f) { return -sk_delete(f->store, M, KEY(3), 0); }

static int64_t call_blind_delete(fixture *f) { return -sk_delete(f->store, M, KEY(101), SK_BLIND); }

static int64_t call_install(fixture *f) {
    uint8_t value[4096];
    return -sk_install(f->store, M, KEY(101), value, map_of(100, value), SK_NO_TIME);
}

static int64_t call_install_missing(fixture *f) {
    return -sk_install(f->store, M, KEY(101), NULL, 0, SK_NO_TIME);
}

#define PATH(text) (const uint8_t *)(text), sizeof(text) - 1

static int64_t call_read_keys(fixture *f) {
    return sk_read(f->store, M, KEY(3), SK_R_KEYS, NULL, 0, NULL, 0, 0, 0, &f->buf);
}

static int64_t call_read_slice(fixture *f) {
    return sk_read(f->store, L, KEY(3), SK_R_SLICE, NULL, 0, NULL, 0, 5, 100, &f->buf);
}

static int64_t call_page(fixture *f) {
    uint64_t cursor = 0, version = 0;
    return sk_page(f->store, M, KEY(3), NULL, 0, &cursor, &version, 50, &f->buf);
}

static int64_t call_append(fixture *f) {
    return sk_write(f->store, L, KEY(1), SK_W_APPEND, NULL, 0, "l",
                    PATH("\xa5"
                         "hello"),
                    0, 0, &f->buf);
}

static int64_t call_append_new(fixture *f) {
    return sk_write(f->store, L, KEY(101), SK_W_APPEND, NULL, 0, "l",
                    PATH("\xa5"
                         "hello"),
                    0, 0, &f->buf);
}

static int64_t call_extend(fixture *f) { /* a packed list becomes an indexed one */
    uint8_t value[4096];
    size_t len = list_of(100, value);
    return sk_write(f->store, L, KEY(1), SK_W_EXTEND, NULL, 0, "l", value, len, 0, 0, &f->buf);
}

static int64_t call_extend_large(fixture *f) {
    uint8_t value[4096];
    size_t len = list_of(300, value);
    return sk_write(f->store, L, KEY(3), SK_W_EXTEND, NULL, 0, "l", value, len, 0, 0, &f->buf);
}

static int64_t call_insert(fixture *f) {
    uint8_t value[4096];
    size_t len = list_of(100, value);
    return sk_write(f->store, L, KEY(3), SK_W_INSERT, NULL, 0, "l", value, len, 5, 0, &f->buf);
}

static int64_t call_splice(fixture *f) {
    uint8_t value[4096];
    size_t len = list_of(300, value);
    return sk_write(f->store, L, KEY(3), SK_W_SPLICE, NULL, 0, "l", value, len, 5, 15, &f->buf);
}

static int64_t call_pop(fixture *f) {
    return sk_write(f->store, L, KEY(3), SK_W_POP, NULL, 0, NULL, NULL, 0, 0, 0, &f->buf);
}

static int64_t call_take(fixture *f) {
    return sk_write(f->store, M, KEY(3), SK_W_TAKE, NULL, 0, NULL, PATH("\xcd\x01\x05"), 0, 0,
                    &f->buf);
}

static int64_t call_update(fixture *f) {
    uint8_t value[4096];
    size_t len = map_of(300, value);
    return sk_write(f->store, M, KEY(1), SK_W_UPDATE, NULL, 0, "m", value, len, 0, 0, &f->buf);
}

static int64_t call_update_large(fixture *f) {
    uint8_t value[4096];
    size_t len = map_of(300, value);
    return sk_write(f->store, M, KEY(3), SK_W_UPDATE, NULL, 0, "m", value, len, 0, 0, &f->buf);
}

static int64_t call_set_deep(fixture *f) {
    return sk_write(f->store, T, KEY(3), SK_W_SET, PATH("\xcd\x01\x05\x00"), NULL,
                    PATH("\xb4"
                         "a rather long string"),
                    0, 0, &f->buf);
}

static int64_t call_set_new(fixture *f) {
    return sk_write(f->store, T, KEY(101), SK_W_SET, PATH("\x01\x02\x03"), "mmm",
                    PATH("\x93\x01\x02\x03"), 0, 0, &f->buf);
}

static int64_t call_delete_deep(fixture *f) {
    return sk_write(f->store, T, KEY(3), SK_W_DELETE, PATH("\xcd\x01\x05\x00"), NULL, NULL, 0, 0, 0,
                    &f->buf);
}

static int64_t call_clear_container(fixture *f) {
    return sk_write(f->store, M, KEY(3), SK_W_CLEAR, NULL, 0, NULL, NULL, 0, 0, 0, &f->buf);
}

/* Batches of 60 records, half of them on keys that are there. */
#define RECORDS 60

static int64_t batch(fixture *f, uint32_t state, int op) {
    static uint8_t keys[RECORDS * 64], values[RECORDS * 4096];
    static int32_t key_at[RECORDS + 1], value_at[RECORDS + 1];
    static int64_t numbers[RECORDS], out[RECORDS], out_at[RECORDS + 1];
    for (uint32_t r = 0; r < RECORDS; r++) {
        util_key key = key_of(r % 2 ? r / 3 : 100 + r / 2);
        memcpy(keys + key_at[r], key.data, key.len);
        key_at[r + 1] = key_at[r] + (int32_t)key.len;
        numbers[r] = r;
        uint8_t *value = values + value_at[r];
        size_t len = state == M ? map_of(r % 4 ? 3 : 80, value) : list_of(r % 4 ? 3 : 80, value);
        value_at[r + 1] = value_at[r] + (int32_t)len;
    }
    bool is_number = state == N || state == F;
    sk_batch_args args = {
        .n = f->records > 0 ? f->records : RECORDS,
        .keys = {SK_COL_VAR32, 0, keys, key_at, sizeof keys},
        .map_keys = {SK_COL_I64, 0, numbers, NULL, sizeof numbers},
        .values = {is_number ? (state == N ? SK_COL_I64 : SK_COL_F64) : SK_COL_VAR32, 0,
                   is_number ? (void *)numbers : (void *)values, value_at, sizeof values},
        .out = out,
        .out_offsets = out_at,
        .buf = &f->buf,
        .status = f->status};
    int status = sk_batch(f->store, state, op, &args);
    f->reached = 0;
    while (f->reached < args.n && f->status[f->reached] != SK_END) f->reached++;
    for (int64_t r = f->reached; r < args.n; r++) CHECK_EQ(f->status[r], SK_END);
    CHECK_EQ(f->reached == args.n, status == SK_OK);
    if (status != SK_OK && args.failed >= 0) CHECK_EQ(args.failed, f->reached);
    return -status;
}

static int64_t call_batch_get(fixture *f) { return batch(f, M, SK_B_GET); }
static int64_t call_batch_has(fixture *f) { return batch(f, M, SK_B_HAS); }
static int64_t call_batch_put_i64(fixture *f) { return batch(f, N, SK_B_PUT); }
static int64_t call_batch_put_bytes(fixture *f) { return batch(f, B, SK_B_PUT); }
static int64_t call_batch_put_list(fixture *f) { return batch(f, L, SK_B_PUT); }
static int64_t call_batch_add_i64(fixture *f) { return batch(f, N, SK_B_ADD); }
static int64_t call_batch_add_f64(fixture *f) { return batch(f, F, SK_B_ADD); }
static int64_t call_batch_delete(fixture *f) { return batch(f, M, SK_B_DELETE); }
static int64_t call_batch_append(fixture *f) { return batch(f, L, SK_B_APPEND); }
static int64_t call_batch_map_put(fixture *f) { return batch(f, M, SK_B_MAP_PUT); }

static int64_t call_pack_keys(fixture *f) {
    static int64_t numbers[RECORDS], offsets[RECORDS + 1];
    static int32_t at[RECORDS + 1];
    for (int r = 0; r < RECORDS; r++) at[r + 1] = r;
    uint8_t text[RECORDS] = {0};
    sk_column parts[2] = {{SK_COL_VAR32, 0, text, at, sizeof text},
                          {SK_COL_I64, 0, numbers, NULL, sizeof numbers}};
    return -sk_pack_keys("(si)", parts, RECORDS, offsets, &f->buf);
}

static int64_t call_encode(fixture *f) {
    return sk_leaf_encode(f->store, 1, SK_ALL_STATES, 0, &f->buf);
}

/* Keys that are there and keys that are not: those of one leaf, or (LEAVES) of all leaves. */
static int64_t pick(fixture *f, uint32_t leaf) {
    static uint8_t keys[40 * UTIL_KEY_BYTES_MAX];
    static int32_t at[41];
    int64_t n = 0;
    for (uint32_t k = 0; k < 40; k++) {
        util_key key = key_of(k);
        if (leaf < LEAVES && util_leaf_of("b", &key, 2) != leaf) continue;
        memcpy(keys + at[n], key.data, key.len);
        at[n + 1] = at[n] + (int32_t)key.len;
        n++;
    }
    sk_column column = {SK_COL_VAR32, 0, keys, at, sizeof keys};
    if (leaf == LEAVES) return sk_pick(f->store, M, &column, n, NULL, &f->buf);
    return sk_leaf_pick(f->store, leaf, M, &column, n, &f->buf);
}

static int64_t call_leaf_pick(fixture *f) { return pick(f, 1); }
static int64_t call_pick(fixture *f) { return pick(f, LEAVES); }

static int64_t call_shut(fixture *f) { return -sk_leaf_gate(f->store, 0, LEAVES, SK_GATE_SHUT); }

static int64_t call_heat(fixture *f) {
    uint64_t heat[LEAVES];
    return -sk_leaf_heat(f->store, heat);
}

static int64_t call_mark(fixture *f) { return -sk_leaf_mark(f->store, 0, LEAVES, SK_PARTIAL); }
static int64_t call_clear(fixture *f) { return -sk_clear(f->store, M, 0, LEAVES, 0); }

static void write_back(fixture *f) { CHECK_EQ(sk_write_back(f->store, 1), SK_OK); }

/* Blocks of other content: some keys in both, some new. */
static void other_blocks(fixture *f) {
    declare(f->other);
    fill(f->other, 10, 40);
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++)
        CHECK(sk_leaf_encode(f->other, leaf, SK_ALL_STATES, 0, &f->blocks[leaf]) > 0);
}

static void other_blocks_partial(fixture *f) {
    other_blocks(f);
    partial(f);
}

static void other_blocks_shut(fixture *f) {
    other_blocks_partial(f);
    CHECK_EQ(sk_leaf_gate(f->store, 0, LEAVES, SK_GATE_SHUT), SK_OK);
}

static void expected(fixture *f) {
    CHECK_EQ(sk_leaf_mark(f->store, 0, LEAVES, SK_ABSENT), SK_OK);
    CHECK_EQ(sk_leaf_gate(f->store, 0, LEAVES, SK_GATE_EXPECTED), SK_OK);
}

static void other_blocks_expected(fixture *f) {
    other_blocks(f);
    expected(f);
}

static int64_t decode(fixture *f, int mode) {
    return -sk_leaf_decode(f->store, 2, f->blocks[2].data, f->blocks[2].len, mode);
}

static int64_t call_replace(fixture *f) { return decode(f, SK_REPLACE); }
static int64_t call_under(fixture *f) { return decode(f, SK_UNDER); }
static int64_t call_under_all(fixture *f) { return decode(f, SK_UNDER_ALL); }
static int64_t call_over(fixture *f) { return decode(f, SK_OVER); }

static int64_t call_block_check(fixture *f) {
    sk_block_info info;
    const uint8_t *block = f->blocks[1].data, *end = block + f->blocks[1].len;
    while (sk_block_read(block, (size_t)(end - block), &info) == SK_OK && info.kind != SK_MAP)
        block += info.size; /* checking large maps needs memory */
    return -sk_block_check(block, (size_t)(end - block));
}

static int64_t call_block_find(fixture *f) {
    util_key key = key_of(30);
    uint32_t leaf = util_leaf_of("b", &key, 2);
    sk_block_info info;
    const uint8_t *block = f->blocks[leaf].data;
    CHECK_EQ(sk_block_read(block, f->blocks[leaf].len, &info), SK_OK);
    return -sk_block_find(block, info.size, key.data, key.len, &f->buf);
}

static int64_t call_dirty_take(fixture *f) { return sk_dirty_take(f->store, 1, 0, &f->buf); }

static void take(fixture *f) { CHECK(sk_dirty_take(f->store, 1, 0, &f->blocks[1]) > 0); }
static int64_t call_dirty_done(fixture *f) { return -sk_dirty_done(f->store, 1, 1); }

static int64_t call_rows_take(fixture *f) {
    static const int32_t numbers[STATES] = {0, 1, 2, 3, 4, 5};
    uint64_t counts[STATES];
    uint32_t leaf = 0;
    size_t len = f->buf.len;
    int64_t rows =
        sk_rows_take(f->store, &leaf, 0, UINT64_MAX, UINT64_MAX, numbers, counts, STATES, &f->buf);
    CHECK_EQ(leaf, rows < 0 ? 0 : LEAVES);
    if (rows >= 0) CHECK_EQ(rows, STATES * 20);
    if (rows < 0) CHECK_EQ(f->buf.len, len);
    return rows;
}

static void take_rows(fixture *f) {
    write_back(f);
    CHECK(call_rows_take(f) > 0);
}

static int64_t call_rows_done(fixture *f) { return -sk_rows_done(f->store, 0, LEAVES, 1); }

static void clean(fixture *f) {
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++) {
        CHECK(sk_dirty_take(f->store, leaf, 0, &f->blocks[leaf]) > 0);
        CHECK_EQ(sk_dirty_done(f->store, leaf, 1), SK_OK);
    }
}

static void many_clean(fixture *f) {
    many(f);
    clean(f);
}

static int64_t call_evict(fixture *f) { return sk_evict(f->store, UINT64_MAX); }

static int64_t call_detach(fixture *f) {
    CHECK(f->leaves == NULL);
    return -sk_detach(f->store, 1, 3, &f->leaves);
}

static void detached(fixture *f) {
    sk_leaves *leaves = NULL;
    CHECK_EQ(sk_detach(f->store, 0, 2, &leaves), SK_OK);
    sk_leaves_free(leaves);
    declare(f->other);
    fill(f->other, 0, 50);
    CHECK_EQ(sk_detach(f->other, 0, 2, &f->leaves), SK_OK);
}

static int64_t call_attach(fixture *f) {
    int status = sk_attach(f->store, f->leaves);
    if (status == SK_OK) f->leaves = NULL;
    return -status;
}

static int64_t call_snapshot_open(fixture *f) {
    uint32_t since[LEAVES] = {0, 1, 0, 1};
    int status = sk_snapshot_open(f->store, since, 0, &f->snapshot);
    CHECK_EQ(f->snapshot != NULL, status == SK_OK);
    return -status;
}

static void snapshot(fixture *f) {
    CHECK_EQ(sk_snapshot_open(f->store, NULL, 0, &f->snapshot), SK_OK);
}

static int64_t call_snapshot_next(fixture *f) {
    uint32_t leaf;
    int64_t len = sk_snapshot_next(f->snapshot, &leaf, &f->buf);
    if (len > 0) CHECK_EQ(leaf, 0); /* the calls that failed skipped nothing */
    return len;
}

static void snapshot_queued(fixture *f) { /* as above, but every leaf is in the queue */
    snapshot(f);
    for (uint32_t k = 0; k < 20; k++) CHECK_EQ(sk_i64_put(f->store, N, KEY(k), k), SK_OK);
}

static int64_t call_snapshot_next_queued(fixture *f) {
    uint32_t leaf;
    return sk_snapshot_next(f->snapshot, &leaf, &f->buf);
}

typedef struct call {
    const char *name;
    void (*prepare)(fixture *);
    int64_t (*run)(fixture *);
    bool never_fails; /* uses memory if there is some, and works without */
    bool may_grow;    /* content stays, but tables keep room that they made */
} call;

#define CALL(prepare, run)                                                                         \
    { #run " after " #prepare, prepare, run, false, false }
#define CALL_SURE(prepare, run)                                                                    \
    { #run " after " #prepare, prepare, run, true, false }
#define CALL_GROWS(prepare, run)                                                                   \
    { #run " after " #prepare, prepare, run, false, true }

static const call calls[] = {
    CALL(nothing, call_open),
    CALL(nothing, call_state_add),
    CALL(nothing, call_get),
    CALL(nothing, call_put_i64),
    CALL(nothing, call_put_f64),
    CALL(nothing, call_put_bytes),
    CALL(nothing, call_replace_bytes),
    CALL(nothing, call_put_list),
    CALL(nothing, call_put_map),
    CALL(nothing, call_replace_map),
    CALL(nothing, call_fold_i64),
    CALL(nothing, call_fold_f64),
    CALL(nothing, call_cas_i64),
    CALL(nothing, call_cas_f64),
    CALL(snapshot, call_put_i64),
    CALL(snapshot, call_append),
    CALL(many, call_put_i64),
    CALL(many, call_append_new),
    CALL_GROWS(many, call_many_puts),
    CALL_SURE(nothing, call_delete),
    CALL(snapshot, call_delete),
    CALL_SURE(write_back, call_delete),
    CALL(partial, call_blind_delete),
    CALL(partial, call_install),
    CALL(partial, call_install_missing),
    CALL(nothing, call_read_keys),
    CALL(nothing, call_read_slice),
    CALL(nothing, call_page),
    CALL(nothing, call_append),
    CALL(nothing, call_append_new),
    CALL(nothing, call_extend),
    CALL(nothing, call_extend_large),
    CALL(nothing, call_insert),
    CALL(nothing, call_splice),
    CALL(nothing, call_pop),
    CALL(nothing, call_take),
    CALL(nothing, call_update),
    CALL(nothing, call_update_large),
    CALL(nothing, call_set_deep),
    CALL(nothing, call_set_new),
    CALL(nothing, call_delete_deep),
    CALL(nothing, call_clear_container),
    CALL(nothing, call_batch_get),
    CALL(nothing, call_batch_has),
    CALL(nothing, call_batch_put_i64),
    CALL(nothing, call_batch_put_bytes),
    CALL(nothing, call_batch_put_list),
    CALL(nothing, call_batch_add_i64),
    CALL(nothing, call_batch_add_f64),
    CALL(nothing, call_batch_delete),
    CALL(nothing, call_batch_append),
    CALL(nothing, call_batch_map_put),
    CALL(snapshot, call_batch_add_i64),
    CALL(snapshot, call_batch_map_put),
    CALL(nothing, call_pack_keys),
    CALL(nothing, call_encode),
    CALL(nothing, call_leaf_pick),
    CALL(nothing, call_pick),
    CALL_SURE(nothing, call_shut),
    CALL(snapshot, call_shut),
    CALL_SURE(nothing, call_heat),
    CALL_SURE(nothing, call_mark),
    CALL(snapshot, call_mark),
    CALL_SURE(nothing, call_clear),
    CALL_SURE(write_back, call_clear),
    CALL(snapshot, call_clear),
    CALL(other_blocks, call_replace),
    CALL_GROWS(other_blocks, call_over),
    CALL_GROWS(other_blocks_partial, call_under),
    CALL_GROWS(other_blocks_partial, call_under_all),
    CALL_GROWS(other_blocks_partial, call_over),
    CALL_GROWS(other_blocks_shut, call_under),
    CALL_GROWS(other_blocks_shut, call_under_all),
    CALL_GROWS(other_blocks_expected, call_under),
    CALL_GROWS(other_blocks_expected, call_over),
    CALL(expected, call_install),
    CALL(expected, call_install_missing),
    CALL(other_blocks, call_block_check),
    CALL(other_blocks, call_block_find),
    CALL(nothing, call_dirty_take),
    CALL_SURE(take, call_dirty_done),
    CALL(write_back, call_rows_take),
    CALL(take_rows, call_rows_take), /* after a take that was abandoned */
    CALL_SURE(take_rows, call_rows_done),
    CALL_SURE(clean, call_evict),
    CALL_SURE(many_clean, call_evict),
    CALL(snapshot, call_evict),
    CALL(nothing, call_detach),
    CALL(snapshot, call_detach),
    CALL(detached, call_attach),
    CALL(nothing, call_snapshot_open),
    CALL(snapshot, call_snapshot_next),
    CALL(snapshot_queued, call_snapshot_next_queued),
};

typedef struct figures {
    sk_buf content;
    uint64_t bytes;
    sk_stats stats;
    uint32_t states;
    int gate; /* of the leaves, one digit each */
} figures;

static figures figures_of(sk_store *store) {
    figures now = {.bytes = sk_bytes_used(store),
                   .stats = util_stats(store, LEAVES),
                   .states = sk_state_count(store)};
    util_encode_all(store, LEAVES, &now.content);
    for (uint32_t i = 0; i < LEAVES; i++) now.gate = 10 * now.gate + sk_leaf_gate_of(store, i);
    return now;
}

static void check_same(const call *c, const figures *was, figures *is) {
    bool is_same = util_same(&was->content, &is->content) && was->states == is->states &&
                   was->stats.entries == is->stats.entries && was->stats.dirty == is->stats.dirty &&
                   was->stats.tombstones == is->stats.tombstones && was->gate == is->gate &&
                   memcmp(was->stats.leaves, is->stats.leaves, sizeof is->stats.leaves) == 0;
    bool is_small = c->may_grow ? is->bytes >= was->bytes : is->bytes == was->bytes;
    if (!is_same || !is_small)
        printf("%s: bytes %llu -> %llu, entries %llu -> %llu, states %u -> %u, content %s\n",
               c->name, (unsigned long long)was->bytes, (unsigned long long)is->bytes,
               (unsigned long long)was->stats.entries, (unsigned long long)is->stats.entries,
               was->states, is->states,
               util_same(&was->content, &is->content) ? "the same" : "changed");
    CHECK(is_same);
    CHECK(is_small);
    CHECK_EQ(is->stats.bytes, is->bytes);
}

/* One call with its nth allocation failing. True if it succeeded. */
static bool run_failing(const call *c, int64_t nth, int forever) {
    static fixture f, g;
    set_up(&f);
    c->prepare(&f);
    figures was = figures_of(f.store);
    sk_fail_alloc(nth, forever);
    int64_t result = c->run(&f);
    bool is_reached = sk_alloc_count() >= nth;
    sk_fail_alloc(0, 0);
    bool is_done = result >= 0;
    if (c->never_fails) CHECK(is_done);
    if (!is_done) {
        figures is = figures_of(f.store);
        if (!(result == -SK_NO_MEMORY || (result == -SK_LIMIT)))
            printf("%s: status %s at allocation %lld\n", c->name, sk_status_name((int)-result),
                   (long long)nth);
        CHECK_EQ(result, -SK_NO_MEMORY);
        CHECK(strlen(sk_reason()) > 0);
        if (f.reached <= 0) check_same(c, &was, &is);
        if (f.reached > 0) { /* the records reported as done, and no others, took effect */
            set_up(&g);
            c->prepare(&g);
            g.records = f.reached;
            CHECK_EQ(c->run(&g), 0);
            figures part = figures_of(g.store);
            CHECK(util_same(&part.content, &is.content));
            CHECK_EQ(part.stats.dirty, is.stats.dirty);
            tear_down(&g);
            sk_buf_free(&part.content);
            CHECK_EQ(is.stats.bytes, is.bytes);
        }
        CHECK(c->run(&f) >= 0); /* no allocation fails any more */
        sk_buf_free(&is.content);
    }
    sk_buf_free(&was.content);
    tear_down(&f);
    return is_done && !is_reached;
}

static void test_every_call_survives_every_failing_allocation(void) {
    CHECK(sk_is_testing_build());
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
        for (int forever = 0; forever < 2; forever++) {
            int64_t n = 1;
            while (n < ALLOCATIONS_MAX && !run_failing(&calls[i], n, forever)) n++;
            CHECK(n < ALLOCATIONS_MAX);
            if (getenv("SK_VERBOSE")) printf("%-60s %lld\n", calls[i].name, (long long)n);
        }
}

int main(void) {
    RUN(test_every_call_survives_every_failing_allocation);
    return test_report();
}
