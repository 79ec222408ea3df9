/*
 * test_threads_dirty.c: a home is kept up to date while other threads write, delete, clear, evict
 * and move leaves. When all other threads have ended and everything is written once more, the home
 * must have what the store has. Run it under ThreadSanitizer, too: `make sanitize`.
 */
#include "rows_util.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define LEAVES 128  /* two words of bits */
#define TOGETHER 32 /* leaves locked at once: ThreadSanitizer follows 64 locks of a thread */
#define KEYS 96
#define ROUNDS 300 /* of write-back; the other threads go on until these are done */

typedef struct world {
    sk_store *store, *other;
    uint32_t id;
    _Atomic bool is_done;       /* the rounds are done: writers and movers end */
    _Atomic int working;        /* writers and movers that have not ended */
    int64_t home[KEYS];         /* 0: none. Only the committer uses it */
    _Atomic int64_t last[KEYS]; /* what the key's only writer wrote; 0: deleted */
} world;

static void *write_single(void *arg) {
    world *w = arg;
    for (int64_t r = 1; !w->is_done; r++)
        for (int64_t k = 0; k < KEYS / 2; k++) {
            bool deletes = (r + k) % 5 == 0;
            int status = deletes ? sk_delete(w->store, w->id, util_int_key(k).data, 8, SK_BLIND)
                                 : sk_i64_put(w->store, w->id, util_int_key(k).data, 8, r);
            CHECK(status == SK_OK || status == SK_NOT_OWNED || (deletes && status == SK_MISSING));
            if (status == SK_OK) w->last[k] = deletes ? 0 : r;
        }
    w->working--;
    return NULL;
}

static void *write_batches(void *arg) {
    world *w = arg;
    int64_t keys[KEYS / 2], values[KEYS / 2];
    uint8_t status[KEYS / 2];
    for (int64_t r = 1; !w->is_done; r++) {
        for (int64_t i = 0; i < KEYS / 2; i++) {
            keys[i] = KEYS / 2 + i;
            values[i] = r;
        }
        sk_batch_args args = {.n = KEYS / 2,
                              .keys = {SK_COL_I64, 0, keys, NULL, sizeof keys},
                              .values = {SK_COL_I64, 0, values, NULL, sizeof values},
                              .status = status};
        int result = sk_batch(w->store, w->id, SK_B_PUT, &args);
        CHECK(result == SK_OK || result == SK_NOT_OWNED);
        for (int64_t i = 0; i < KEYS / 2; i++)
            if (status[i] == SK_OK) w->last[keys[i]] = r;
    }
    w->working--;
    return NULL;
}

/* Leaves move back and forth between two stores, and are away for a moment. */
static void *move(void *arg) {
    world *w = arg;
    for (uint32_t i = 0; !w->is_done; i++) {
        sk_leaves *stuck = NULL;
        uint32_t from = i * 37 % LEAVES, to = from + 1 + i % TOGETHER;
        if (to > LEAVES) to = LEAVES;
        CHECK_EQ(sk_move(w->store, w->other, from, to, &stuck), SK_OK);
        CHECK_EQ(sk_move(w->other, w->store, from, to, &stuck), SK_OK);
        sched_yield();
    }
    w->working--;
    return NULL;
}

static void write_home(world *w, const sk_buf *rows, int64_t n) {
    const uint8_t *p = rows->data + 5;
    for (int64_t r = 0; r < n; r++) {
        util_row row = util_next_row(&p, rows->data + rows->len);
        int64_t k;
        memcpy(&k, row.key, 8);
        w->home[k] = row.value == NULL ? 0 : (int64_t)util_be(row.value + 1, 8);
    }
}

/* One round over all leaves; some takes are abandoned, some writes fail. */
static int64_t commit(world *w, int round, sk_buf *buf) {
    const int32_t number = 0;
    uint64_t count;
    int64_t total = 0;
    for (uint32_t leaf = 0, step = 0; leaf < LEAVES; step++) {
        uint32_t from = leaf;
        buf->len = 0;
        int64_t rows = sk_rows_take(w->store, &leaf, round % 3 == 1 ? SK_COLD : 0, 16, 1 << 20,
                                    &number, &count, 1, buf);
        CHECK(rows >= 0);
        total += rows;
        if (round >= 0 && (round + (int)step) % 4 == 2) continue; /* interrupted */
        bool is_written = round < 0 || (round + step) % 4 != 3;
        if (is_written) write_home(w, buf, rows);
        CHECK_EQ(sk_rows_done(w->store, from, leaf, is_written), SK_OK);
    }
    return total;
}

/* Writes home while the other threads work. It also does the eviction, so that no entry is read
 * back that is older than what was written. */
static void *write_home_all_along(void *arg) {
    world *w = arg;
    sk_buf buf = {0};
    for (int round = 0; round < ROUNDS; round++) {
        commit(w, round, &buf);
        if (round % 8 == 7) CHECK(sk_evict(w->store, 1 << 12) >= 0);
        sched_yield();
    }
    w->is_done = true;
    while (w->working > 0) sched_yield();
    commit(w, -1, &buf);
    CHECK_EQ(commit(w, -1, &buf), 0); /* one round after all ended gets everything */
    sk_buf_free(&buf);
    return NULL;
}

static sk_store *open_one(uint32_t *id) {
    sk_store *store = util_open(LEAVES, 1);
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    *id = util_state(store, "n", SK_I64, "i");
    return store;
}

static void test_the_home_has_everything_in_the_end(void) {
    static world w;
    w.store = open_one(&w.id);
    w.other = open_one(&w.id);
    for (uint32_t i = 0; i < LEAVES; i += TOGETHER)
        CHECK_EQ(sk_leaf_mark(w.other, i, i + TOGETHER, SK_AWAY), SK_OK);
    void *(*const jobs[])(void *) = {write_single, write_batches, move, write_home_all_along};
    pthread_t threads[4];
    w.working = 3;
    for (int i = 0; i < 4; i++) CHECK_EQ(pthread_create(&threads[i], NULL, jobs[i], &w), 0);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    CHECK_EQ(util_stats(w.store, LEAVES).dirty, 0);
    for (int64_t k = 0; k < KEYS; k++) CHECK_EQ(w.home[k], w.last[k]);
    sk_close(w.store);
    sk_close(w.other);
}

int main(void) {
    RUN(test_the_home_has_everything_in_the_end);
    return test_report();
}
