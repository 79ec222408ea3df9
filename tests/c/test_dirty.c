/*
 * test_dirty.c: what is dirty (csrc/dirty.c), and that all of it is written home. The oracle is a
 * plain model: for each state and key it has the value, the home's value, and whether the entry is
 * dirty or being written. Whatever happens, a take must give exactly the rows that the model calls
 * dirty, and once all is written home, the home must have what the model has.
 */
#include "rows_util.h"
#include "store.h"

#define KEYS 240
enum { N, B, X, STATES }; /* i64, bytes, bytes with a time to live */
static const int32_t NUMBERS[STATES] = {5, 0, 777};
#define TTL 50

typedef struct cell {
    bool is_here, is_home; /* an entry exists; the home has one */
    uint8_t value, home;   /* values are made from these numbers */
    int64_t stamp;         /* X: when it was written */
    int64_t home_stamp;
    bool is_dirty, is_writing, is_used;
} cell;

typedef struct world {
    sk_store *store, *other; /* a leaf may be in either */
    uint32_t leaf_count;
    unsigned leaf_bits;
    cell cells[STATES][KEYS];
    uint32_t leaf_of[KEYS];
    int64_t now;
    test_rng rng;
} world;

static bool is_expired(const world *w, int s, const cell *c) {
    return s == X && c->is_here && c->stamp + TTL <= w->now;
}

/* The home has an entry that has not expired there. */
static bool is_at_home(const world *w, int s, const cell *c) {
    return c->is_home && (s != X || c->home_stamp + TTL > w->now);
}

static size_t value_bytes(int s, uint8_t value, uint8_t *out) {
    if (s == N) {
        int64_t n = value * 1000003LL;
        memcpy(out, &n, 8);
        return 8;
    }
    size_t len = value % 90;
    memset(out, value, len);
    return len;
}

static size_t row_bytes(int s, const cell *c, uint8_t *out) {
    if (s == N) {
        out[0] = 0xd3;
        util_put_be(out + 1, (uint64_t)(c->value * 1000003LL), 8);
        return 9;
    }
    if (s == B) return value_bytes(s, c->value, out);
    out[0] = 0xd7;
    out[1] = 0xad;
    util_put_be(out + 2, (uint64_t)c->stamp, 8);
    return 10 + value_bytes(s, c->value, out + 10);
}

static void touch(world *w, int s, uint32_t k) {
    cell *c = &w->cells[s][k];
    c->is_dirty = c->is_used = true;
    c->stamp = w->now;
}

static void step_put(world *w, int s, uint32_t k) {
    cell *c = &w->cells[s][k];
    uint8_t data[128], value = (uint8_t)test_below(&w->rng, 256);
    size_t len = value_bytes(s, value, data);
    CHECK_EQ(sk_put(w->store, (uint32_t)s, util_int_key(k).data, 8, data, len), SK_OK);
    c->is_here = true;
    c->value = value;
    touch(w, s, k);
}

/* Makes the store know the entry, as a fetch would. */
static int resolve(world *w, int s, uint32_t k) {
    cell *c = &w->cells[s][k];
    util_key key = util_int_key(k);
    int status = sk_contains(w->store, (uint32_t)s, key.data, 8);
    if (status == SK_UNKNOWN) {
        uint8_t data[128];
        size_t len = value_bytes(s, c->home, data);
        CHECK(!c->is_dirty && !c->is_writing);
        CHECK_EQ(sk_install(w->store, (uint32_t)s, key.data, 8, c->is_home ? data : NULL, len,
                            c->is_home ? c->home_stamp : SK_NO_TIME),
                 SK_OK);
        status = sk_contains(w->store, (uint32_t)s, key.data, 8);
    }
    CHECK_EQ(status, c->is_here ? SK_OK : SK_MISSING);
    c->is_used = true;
    return status;
}

static void step_delete(world *w, int s, uint32_t k) {
    cell *c = &w->cells[s][k];
    int known = resolve(w, s, k);
    CHECK_EQ(sk_delete(w->store, (uint32_t)s, util_int_key(k).data, 8, 0), known);
    if (known != SK_OK) return;
    c->is_here = false;
    touch(w, s, k);
}

static void step_batch(world *w) {
    int64_t keys[40], n = 1 + (int64_t)test_below(&w->rng, 40);
    uint8_t status[40];
    for (int64_t i = 0; i < n; i++) {
        keys[i] = (int64_t)test_below(&w->rng, KEYS);
        resolve(w, N, (uint32_t)keys[i]);
    }
    sk_batch_args args = {.n = n,
                          .keys = {SK_COL_I64, 0, keys, NULL, 8 * n},
                          .operand_i64 = 1000003,
                          .status = status};
    CHECK_EQ(sk_batch(w->store, N, SK_B_ADD, &args), SK_OK);
    for (int64_t i = 0; i < n; i++) {
        cell *c = &w->cells[N][keys[i]];
        if (c->value == 255 && c->is_here) abort(); /* the caller must keep values small */
        c->value = c->is_here ? (uint8_t)(c->value + 1) : 1;
        c->is_here = true;
        touch(w, N, (uint32_t)keys[i]);
    }
}

/* Clearing writes tombstones in leaves that are whole; in others it drops what is here. */
static void step_clear(world *w, int s) {
    uint32_t from = (uint32_t)test_below(&w->rng, w->leaf_count);
    uint32_t to = from + (uint32_t)test_below(&w->rng, w->leaf_count - from) / 8 + 1;
    for (uint32_t k = 0; k < KEYS; k++) {
        cell *c = &w->cells[s][k];
        if (w->leaf_of[k] < from || w->leaf_of[k] >= to) continue;
        bool is_whole = sk_leaf_residency(w->store, w->leaf_of[k]) == SK_WHOLE;
        if (is_whole && (c->is_here || c->is_writing)) {
            if (c->is_here) touch(w, s, k);
        } else if (!is_whole) { /* then the caller must clear the home */
            c->is_home = c->is_dirty = c->is_writing = false;
        }
        c->is_here = false;
    }
    CHECK_EQ(sk_clear(w->store, (uint32_t)s, from, to, SK_BLIND), SK_OK);
}

static void step_evict(world *w) {
    CHECK(sk_evict(w->store, UINT64_MAX) >= 0);
    for (int s = 0; s < STATES; s++)
        for (uint32_t k = 0; k < KEYS; k++) w->cells[s][k].is_used = false;
}

/* Leaves go to another store that writes back, and return. What was being written is dirty
 * again. */
static void step_move(world *w) {
    uint32_t from = (uint32_t)test_below(&w->rng, w->leaf_count);
    uint32_t to = from + 1 + (uint32_t)test_below(&w->rng, w->leaf_count - from) / 4;
    sk_leaves *stuck = NULL;
    if (test_below(&w->rng, 2)) {
        CHECK_EQ(sk_move(w->store, w->other, from, to, &stuck), SK_OK);
        CHECK_EQ(sk_move(w->other, w->store, from, to, &stuck), SK_OK);
    } else {
        CHECK_EQ(sk_detach(w->store, from, to, &stuck), SK_OK);
        CHECK_EQ(sk_attach(w->store, stuck), SK_OK);
    }
    for (int s = 0; s < STATES; s++)
        for (uint32_t k = 0; k < KEYS; k++) {
            cell *c = &w->cells[s][k];
            if (w->leaf_of[k] < from || w->leaf_of[k] >= to) continue;
            c->is_dirty |= c->is_writing;
            c->is_writing = false;
        }
}

/* A leaf is dropped here. From then on its content is what its home has. */
static void step_mark(world *w) {
    uint32_t leaf = (uint32_t)test_below(&w->rng, w->leaf_count);
    CHECK_EQ(sk_leaf_mark(w->store, leaf, leaf + 1, SK_ABSENT), SK_OK);
    for (int s = 0; s < STATES; s++)
        for (uint32_t k = 0; k < KEYS; k++) {
            cell *c = &w->cells[s][k];
            if (w->leaf_of[k] != leaf) continue;
            *c = (cell){.is_here = is_at_home(w, s, c),
                        .is_home = c->is_home,
                        .value = c->home,
                        .home = c->home,
                        .stamp = c->home_stamp,
                        .home_stamp = c->home_stamp};
        }
}

/* Time passes, and expired entries are swept. All entries are brought here first, as the model does
 * not know which ones were evicted. */
static void step_time(world *w) {
    int64_t later = w->now + (int64_t)test_below(&w->rng, TTL);
    for (uint32_t k = 0; k < KEYS; k++)
        if (w->cells[X][k].is_here && w->cells[X][k].stamp + TTL <= later) resolve(w, X, k);
    w->now = later;
    CHECK_EQ(sk_time_set(w->store, SK_PROCESSING_TIME, later), SK_OK);
    CHECK(sk_sweep(w->store, UINT64_MAX) >= 0);
    for (uint32_t k = 0; k < KEYS; k++)
        if (is_expired(w, X, &w->cells[X][k])) {
            w->cells[X][k].is_here = false;
            touch(w, X, k);
        }
}

/* If a leaf has a dirty slot, its bit is set, and so is the bit of its word. */
static void check_bits(world *w, bool is_exact) {
    for (uint32_t i = 0; i < w->leaf_count; i++) {
        bool bit = w->store->dirty[i / 64] >> i % 64 & 1;
        bool word = w->store->dirty_words[i / 4096] >> i / 64 % 64 & 1;
        bool is_dirty = sk_leaf_is_dirty(w->store, i);
        if (is_dirty) CHECK(bit && word);
        if (is_exact && !is_dirty) CHECK(!bit);
    }
}

/* Checks that the rows of leaves [from, to) are those that the model calls dirty, and notes them as
 * being written. */
static void check_taken(world *w, const sk_buf *buf, uint32_t from, uint32_t to, bool is_cold,
                        int64_t rows) {
    bool is_taken[STATES][KEYS] = {0};
    uint32_t last = from;
    const uint8_t *p = buf->data + 5, *end = buf->data + buf->len;
    CHECK_EQ(util_rows_count(buf, 0), rows);
    for (int64_t r = 0; r < rows; r++) {
        util_row row = util_next_row(&p, end);
        int s = 0;
        while (s < STATES && NUMBERS[s] != (int32_t)row.number) s++;
        CHECK(s < STATES && row.key_len == 8);
        uint64_t k;
        memcpy(&k, row.key, 8);
        CHECK(k < KEYS);
        if (s == STATES || k >= KEYS) return;
        cell *c = &w->cells[s][k];
        CHECK_EQ(row.leaf, w->leaf_of[k]);
        CHECK(row.leaf >= last && row.leaf < to);
        last = row.leaf;
        CHECK(!is_taken[s][k]);
        is_taken[s][k] = true;
        CHECK_EQ(row.value != NULL, c->is_here);
        uint8_t expected[128];
        if (row.value != NULL && c->is_here) {
            size_t len = row_bytes(s, c, expected);
            CHECK(row.value_len == len && memcmp(row.value, expected, len) == 0);
        }
    }
    CHECK(p == end);
    for (int s = 0; s < STATES; s++)
        for (uint32_t k = 0; k < KEYS; k++) {
            cell *c = &w->cells[s][k];
            bool is_wanted = w->leaf_of[k] >= from && w->leaf_of[k] < to && c->is_dirty &&
                             (!is_cold || !c->is_used || !c->is_here);
            CHECK_EQ(is_taken[s][k], is_wanted);
            if (!is_taken[s][k]) continue;
            c->is_writing = true;
            c->is_dirty = false;
        }
}

/* What a take does first: entries that an interrupted caller left as being written are dirty
 * again. */
static void expect_take(world *w, uint32_t from, uint32_t to) {
    for (int s = 0; s < STATES; s++)
        for (uint32_t k = 0; k < KEYS; k++) {
            cell *c = &w->cells[s][k];
            if (w->leaf_of[k] < from || w->leaf_of[k] >= to) continue;
            c->is_dirty |= c->is_writing;
            c->is_writing = false;
        }
}

static void step_take(world *w, bool is_whole, bool is_sure) {
    uint32_t from = is_whole ? 0 : (uint32_t)test_below(&w->rng, w->leaf_count), leaf = from;
    bool is_cold = !is_sure && test_below(&w->rng, 2);
    uint64_t rows_max = is_whole ? UINT64_MAX : 1 + test_below(&w->rng, 60);
    uint64_t bytes_max = is_whole ? UINT64_MAX : 1 + test_below(&w->rng, 4000);
    uint64_t counts[STATES], sum = 0;
    sk_buf buf = {0};
    int64_t rows = sk_rows_take(w->store, &leaf, is_cold ? SK_COLD : 0, rows_max, bytes_max,
                                NUMBERS, counts, STATES, &buf);
    CHECK(rows >= 0);
    for (int s = 0; s < STATES; s++) sum += counts[s];
    CHECK_EQ(sum, rows);
    if (is_whole) CHECK_EQ(leaf, w->leaf_count);
    expect_take(w, from, leaf);
    check_taken(w, &buf, from, leaf, is_cold, rows);
    sk_buf_free(&buf);
    if (!is_sure && test_below(&w->rng, 3) == 0) return; /* interrupted */
    for (int i = 0; !is_sure && i < 3; i++)              /* changes while it is written */
        step_put(w, (int)test_below(&w->rng, 2), (uint32_t)test_below(&w->rng, KEYS));
    bool is_written = is_sure || test_below(&w->rng, 3) > 0;
    CHECK_EQ(sk_rows_done(w->store, from, leaf, is_written), SK_OK);
    for (int s = 0; s < STATES; s++)
        for (uint32_t k = 0; k < KEYS; k++) {
            cell *c = &w->cells[s][k];
            if (!c->is_writing || w->leaf_of[k] < from || w->leaf_of[k] >= leaf) continue;
            c->is_writing = false;
            if (!is_written) c->is_dirty = true;
            /* An entry that changed meanwhile will be written next time. The home has its older
             * value, but is never asked for it while the entry is dirty here. */
            if (!is_written || c->is_dirty) continue;
            c->is_home = c->is_here;
            c->home = c->value;
            c->home_stamp = c->stamp;
        }
}

static void check_all(world *w) {
    for (int s = 0; s < STATES; s++) {
        uint64_t dirty = 0;
        sk_stats stats;
        for (uint32_t k = 0; k < KEYS; k++)
            dirty += w->cells[s][k].is_dirty || w->cells[s][k].is_writing;
        CHECK_EQ(sk_stats_read(w->store, (uint32_t)s, 0, w->leaf_count, &stats), SK_OK);
        CHECK_EQ(stats.dirty, dirty);
    }
    check_bits(w, false);
}

static sk_store *open_one(const world *w, uint32_t groups) {
    sk_store *store = util_open(groups, w->leaf_count / groups);
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    CHECK_EQ(util_state(store, "n", SK_I64, "i"), N);
    CHECK_EQ(util_state(store, "b", SK_BYTES, "i"), B);
    CHECK_EQ(util_timed_state(store, "x", SK_BYTES, "i", TTL, SK_PROCESSING_TIME, 0), X);
    return store;
}

static void run_world(uint64_t stream, unsigned leaf_bits, int steps) {
    static world w;
    w = (world){.leaf_bits = leaf_bits, .leaf_count = 1u << leaf_bits};
    w.rng = test_rng_new(stream);
    w.store = open_one(&w, w.leaf_count < 128 ? w.leaf_count : 128);
    w.other = open_one(&w, w.leaf_count < 128 ? w.leaf_count : 128);
    CHECK_EQ(sk_leaf_mark(w.other, 0, w.leaf_count, SK_AWAY), SK_OK);
    CHECK_EQ(sk_time_set(w.store, SK_PROCESSING_TIME, w.now), SK_OK);
    for (uint32_t k = 0; k < KEYS; k++) {
        util_key key = util_int_key(k);
        w.leaf_of[k] = util_leaf_of("i", &key, leaf_bits);
    }
    for (int step = 0; step < steps && test_failures == 0; step++) {
        uint64_t what = test_below(&w.rng, 100);
        int s = (int)test_below(&w.rng, STATES);
        uint32_t k = (uint32_t)test_below(&w.rng, KEYS);
        if (what < 30)
            step_put(&w, s, k);
        else if (what < 40)
            resolve(&w, s, k);
        else if (what < 55)
            step_delete(&w, s, k);
        else if (what < 65)
            step_batch(&w);
        else if (what < 67)
            step_clear(&w, s);
        else if (what < 72)
            step_evict(&w);
        else if (what < 77)
            step_move(&w);
        else if (what < 79)
            step_mark(&w);
        else if (what < 83)
            step_time(&w);
        else
            step_take(&w, what < 85, false);
        /* values are counted up, and must still fit into a byte */
        for (uint32_t i = 0; i < KEYS; i++)
            if (w.cells[N][i].is_here && w.cells[N][i].value > 120) {
                uint8_t zero[8] = {0};
                CHECK_EQ(sk_put(w.store, N, util_int_key(i).data, 8, zero, 8), SK_OK);
                w.cells[N][i].value = 0;
                touch(&w, N, i);
            }
        check_all(&w);
    }
    step_take(&w, true, true);
    CHECK_EQ(util_stats(w.store, w.leaf_count).dirty, 0);
    check_bits(&w, true); /* the takes have cleared stale bits */
    for (int s = 0; s < STATES; s++)
        for (uint32_t k = 0; k < KEYS; k++) {
            const cell *c = &w.cells[s][k];
            CHECK_EQ(is_at_home(&w, s, c), c->is_here);
            if (c->is_here) CHECK_EQ(c->home, c->value);
        }
    sk_close(w.store);
    sk_close(w.other);
}

static void test_a_take_gives_exactly_what_is_dirty(void) {
    for (uint64_t stream = 0; stream < 12; stream++) run_world(stream, 7, 1500);
    for (uint64_t stream = 0; stream < 4; stream++) run_world(100 + stream, 0, 600);
    run_world(200, 13, 400); /* dirty_words has more than one word */
}

int main(void) {
    RUN(test_a_take_gives_exactly_what_is_dirty);
    return test_report();
}
