/*
 * test_threads_time.c: timers and timed states under concurrent calls. Run it under
 * ThreadSanitizer, too: `make sanitize`.
 */
#include "store_util.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define LEAVES 8
#define KEYS 50
#define TIMERS 4000 /* per setter; due times are all different */
#define SETTERS 2

typedef struct world {
    sk_store *store;
    uint32_t id;
    _Atomic int working;                     /* setters and writers that have not ended */
    _Atomic uint8_t given[SETTERS * TIMERS]; /* per due time: how often it was given out */
} world;

typedef struct job {
    world *w;
    int number;
} job;

static void run_all(void *(*const work[])(void *), const int numbers[], int count, world *w) {
    pthread_t threads[8];
    job jobs[8];
    for (int i = 0; i < count; i++) {
        jobs[i] = (job){w, numbers[i]};
        CHECK_EQ(pthread_create(&threads[i], NULL, work[i], &jobs[i]), 0);
    }
    for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
}

/* ---- Timers ---- */

static void *set_timers(void *arg) {
    job *j = arg;
    for (int i = 0; i < TIMERS; i++) {
        int64_t due = j->number * TIMERS + i;
        util_key key = util_bytes_key((uint32_t)(due % KEYS));
        int status;
        while ((status = sk_timer_set(j->w->store, j->w->id, key.data, key.len, due)) ==
               SK_NOT_OWNED)
            sched_yield();
        CHECK_EQ(status, SK_OK);
    }
    j->w->working--;
    return NULL;
}

static void *cancel_timers(void *arg) {
    job *j = arg;
    while (j->w->working > 0)
        for (int64_t due = 0; due < SETTERS * TIMERS; due += 13) {
            util_key key = util_bytes_key((uint32_t)(due % KEYS));
            int status = sk_timer_cancel(j->w->store, j->w->id, key.data, key.len, due);
            CHECK(status <= SK_MISSING || status == SK_NOT_OWNED);
            if (status == SK_OK) j->w->given[due]++;
        }
    return NULL;
}

static int64_t take(world *w, int64_t watermark, sk_buf *buf) {
    buf->len = 0;
    int64_t n = sk_timers_due(w->store, w->id, 0, LEAVES, watermark, 0, buf);
    CHECK(n >= 0);
    size_t at = 0;
    for (int64_t r = 0, last = INT64_MIN; r < n; r++) {
        int64_t due;
        uint32_t len;
        memcpy(&due, buf->data + at, 8);
        memcpy(&len, buf->data + at + 8, 4);
        CHECK(due >= last && due <= watermark);
        w->given[due]++;
        last = due;
        at += 12 + len;
    }
    return n;
}

static void *take_timers(void *arg) {
    job *j = arg;
    sk_buf buf = {0};
    for (int64_t watermark = 0; j->w->working > 0; watermark = (watermark + 97) % 10000) {
        take(j->w, watermark, &buf);
        if (j->number == 0) sk_timers_next(j->w->store, j->w->id);
        sched_yield();
    }
    sk_buf_free(&buf);
    return NULL;
}

static void *move_leaves(void *arg) {
    job *j = arg;
    while (j->w->working > 0) {
        sk_leaves *leaves = NULL;
        CHECK_EQ(sk_detach(j->w->store, 2, 6, &leaves), SK_OK);
        sched_yield();
        CHECK_EQ(sk_attach(j->w->store, leaves), SK_OK);
        sched_yield();
    }
    return NULL;
}

static void *read_snapshots(void *arg) {
    job *j = arg;
    sk_buf buf = {0};
    while (j->w->working > 0) {
        sk_snapshot *snapshot = NULL;
        uint32_t leaf;
        CHECK_EQ(sk_snapshot_open(j->w->store, NULL, 0, &snapshot), SK_OK);
        for (buf.len = 0; sk_snapshot_next(snapshot, &leaf, &buf) > 0; buf.len = 0)
            CHECK_EQ(sk_block_check(buf.data, buf.len), SK_OK);
        sk_snapshot_close(snapshot);
        sched_yield();
    }
    sk_buf_free(&buf);
    return NULL;
}

static void test_each_timer_is_given_out_once(void) {
    static world w;
    sk_buf buf = {0};
    w = (world){.store = util_open(LEAVES, 1), .working = SETTERS};
    w.id = util_state(w.store, "t", SK_TIMERS, "b");
    void *(*const work[])(void *) = {set_timers,  set_timers,  cancel_timers, take_timers,
                                     take_timers, move_leaves, read_snapshots};
    run_all(work, (int[]){0, 1, 0, 0, 1, 0, 0}, 7, &w);
    take(&w, INT64_MAX, &buf);
    int wrong = 0;
    for (int due = 0; due < SETTERS * TIMERS; due++) wrong += w.given[due] != 1;
    CHECK_EQ(wrong, 0);
    CHECK_EQ(util_stats(w.store, LEAVES).entries, 0);
    sk_buf_free(&buf);
    sk_close(w.store);
}

/* ---- Timed states ---- */

#define TTL 50

/* Counts its own keys up. A value is never lower than before, unless it starts anew. */
static void *count_up(void *arg) {
    job *j = arg;
    int64_t last[KEYS] = {0};
    for (int i = 0; i < 6000; i++) {
        uint32_t k = (uint32_t)i * 7 % KEYS;
        util_key key = util_bytes_key(k + (uint32_t)j->number * KEYS);
        int64_t value = 0;
        int status = sk_i64_fold(j->w->store, j->w->id, key.data, key.len, SK_ADD, 1, 0, &value);
        CHECK_EQ(status, SK_OK);
        CHECK(value == 1 || value == last[k] + 1);
        last[k] = value;
    }
    j->w->working--;
    return NULL;
}

static void *read_all(void *arg) {
    job *j = arg;
    while (j->w->working > 0)
        for (uint32_t k = 0; k < 2 * KEYS; k++) {
            util_key key = util_bytes_key(k);
            int64_t value = 0;
            int status = sk_i64_get(j->w->store, j->w->id, key.data, key.len, &value);
            CHECK(status <= SK_MISSING);
            CHECK(status != SK_OK || value > 0);
        }
    return NULL;
}

static void *pass_time(void *arg) {
    job *j = arg;
    for (int64_t now = 1; j->w->working > 0; now += 3) {
        CHECK_EQ(sk_time_set(j->w->store, SK_EVENT_TIME, now), SK_OK);
        CHECK(sk_sweep(j->w->store, 20) >= 0);
        CHECK_EQ(sk_state_ttl(j->w->store, j->w->id, TTL, SK_EVENT_TIME, now % 2), SK_OK);
        sched_yield();
    }
    return NULL;
}

static void *write_home(void *arg) {
    job *j = arg;
    sk_buf buf = {0};
    for (uint32_t leaf = 0; j->w->working > 0; leaf = (leaf + 1) % LEAVES) {
        buf.len = 0;
        CHECK(sk_dirty_take(j->w->store, leaf, leaf % 2 ? SK_COLD : 0, &buf) >= 0);
        CHECK_EQ(sk_dirty_done(j->w->store, leaf, 1), SK_OK);
        sched_yield();
    }
    sk_buf_free(&buf);
    return NULL;
}

static void test_entries_expire_while_others_use_them(void) {
    for (int writes_back = 0; writes_back < 2; writes_back++) {
        static world w;
        w = (world){.store = util_open(LEAVES, 1), .working = 2};
        w.id = util_timed_state(w.store, "n", SK_I64, "b", TTL, SK_EVENT_TIME, 1);
        CHECK_EQ(sk_write_back(w.store, writes_back), SK_OK);
        void *(*const work[])(void *) = {count_up,  count_up,       read_all,
                                         pass_time, read_snapshots, write_home};
        run_all(work, (int[]){0, 1, 0, 0, 0, 0}, 6, &w);
        CHECK_EQ(sk_time_set(w.store, SK_EVENT_TIME, INT64_MAX), SK_OK);
        CHECK(sk_sweep(w.store, UINT64_MAX) >= 0);
        CHECK_EQ(util_stats(w.store, LEAVES).entries, 0);
        CHECK_EQ(util_stats(w.store, LEAVES).bytes, sk_bytes_used(w.store));
        sk_close(w.store);
    }
}

int main(void) {
    RUN(test_each_timer_is_given_out_once);
    RUN(test_entries_expire_while_others_use_them);
    return test_report();
}
