/*
 * test_threads_try.c: calls that try a leaf's lock and never wait (SK_TRIES in csrc/entry.h), as
 * the Python binding makes them, beside ordinary calls, snapshots and leaves that come and go. Run
 * it under ThreadSanitizer, too: `make sanitize`. The oracle is how often each thread was told that
 * its addition was made.
 */
#include "entry.h"
#include "store_util.h"

#include <pthread.h>
#include <stdatomic.h>

#define LEAVES 4
#define KEYS 256 /* so many that leaves get a log (csrc/undo.h) */
#define THREADS 3

#if defined(__SANITIZE_THREAD__)
#define ROUNDS 5000
#else
#define ROUNDS 100000
#endif

const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "detect_deadlocks=0"; }

static sk_store *store;
static _Atomic int64_t added[KEYS];
static _Atomic int64_t busy, tried;
static _Atomic int adding;

/* Adds 1 without waiting: SK_OK, SK_BUSY, or what the call answers. */
static int try_add(const util_key *key) {
    sk_at at;
    sk_key routed;
    int64_t sum;
    int status = sk_call_begin(store, 0, SK_ONLY(SK_I64), key->data, key->len, SK_WRITES | SK_TRIES,
                               &at, &routed);
    if (status != SK_OK) return status;
    status = sk_entry_add_i64(&at, &routed, 1, 0, &sum);
    if (status == SK_OK) sk_count_operation(&at);
    sk_call_end(&at);
    return status;
}

/* Reads without waiting. */
static int try_read(const util_key *key, int64_t *value) {
    sk_at at;
    sk_key routed;
    sk_slot *slot;
    int status = sk_call_begin(store, 0, SK_ONLY(SK_I64), key->data, key->len, SK_READS | SK_TRIES,
                               &at, &routed);
    if (status != SK_OK) return status;
    status = sk_entry_find(&at, &routed, &slot);
    if (status == SK_OK) *value = slot->value.i64;
    sk_call_end(&at);
    return status;
}

static void *add(void *arg) {
    for (int i = 0; i < ROUNDS; i++) {
        int k = i % KEYS;
        util_key key = util_int_key(k);
        int64_t value = 0;
        int status = try_add(&key);
        atomic_fetch_add(&tried, 1);
        if (status == SK_BUSY) {
            atomic_fetch_add(&busy, 1);
            status = sk_i64_fold(store, 0, key.data, key.len, SK_ADD, 1, 0, NULL);
        }
        if (status == SK_OK) atomic_fetch_add(&added[k], 1);
        CHECK(status == SK_OK || status == SK_NOT_OWNED);
        status = try_read(&key, &value);
        CHECK(status == SK_OK || status == SK_BUSY || status == SK_MISSING);
    }
    atomic_fetch_sub(&adding, 1);
    return arg;
}

static void *take_snapshots(void *arg) {
    while (atomic_load(&adding) > 0) {
        sk_snapshot *snapshot;
        sk_buf buf = {0};
        uint32_t leaf;
        CHECK_EQ(sk_snapshot_open(store, NULL, 0, &snapshot), SK_OK);
        while (sk_snapshot_next(snapshot, &leaf, &buf) >= 0) buf.len = 0;
        sk_snapshot_close(snapshot);
        sk_buf_free(&buf);
    }
    return arg;
}

static void *move_leaves(void *arg) {
    while (atomic_load(&adding) > 0) {
        sk_leaves *leaves;
        CHECK_EQ(sk_detach(store, 1, 3, &leaves), SK_OK);
        CHECK_EQ(sk_attach(store, leaves), SK_OK);
        CHECK_EQ(sk_leaf_gate(store, 0, 1, SK_GATE_SHUT), SK_OK);
        CHECK_EQ(sk_leaf_gate(store, 0, 1, SK_GATE_OPEN), SK_OK);
    }
    return arg;
}

static void test_what_is_tried_is_done_once_or_not_at_all(void) {
    pthread_t threads[THREADS + 2];
    CHECK_EQ(sk_open(2, LEAVES / 2, 0, &store), SK_OK);
    CHECK_EQ(util_state(store, "n", SK_I64, "i"), 0);
    atomic_store(&adding, THREADS);
    for (int i = 0; i < THREADS; i++) CHECK_EQ(pthread_create(&threads[i], NULL, add, NULL), 0);
    CHECK_EQ(pthread_create(&threads[THREADS], NULL, take_snapshots, NULL), 0);
    CHECK_EQ(pthread_create(&threads[THREADS + 1], NULL, move_leaves, NULL), 0);
    for (int i = 0; i < THREADS + 2; i++) pthread_join(threads[i], NULL);
    for (int k = 0; k < KEYS; k++) {
        util_key key = util_int_key(k);
        int64_t value = 0;
        CHECK_EQ(sk_i64_get(store, 0, key.data, key.len, &value), SK_OK);
        CHECK_EQ(value, added[k]);
    }
    CHECK(busy > 0 && busy < tried);
    sk_close(store);
}

/* A call that would have to wait says so, and leaves no trace. */
static void test_a_call_that_would_wait_is_busy(void) {
    util_key key = util_int_key(7);
    int64_t value = 0;
    sk_stats stats;
    CHECK_EQ(sk_open(1, 1, 0, &store), SK_OK);
    CHECK_EQ(util_state(store, "n", SK_I64, "i"), 0);
    CHECK_EQ(try_add(&key), SK_OK);

    sk_leaf_lock(&store->leaves[0]);
    CHECK_EQ(try_add(&key), SK_BUSY);
    CHECK_EQ(try_read(&key, &value), SK_BUSY);
    sk_leaf_unlock(&store->leaves[0]);

    sk_snapshot *snapshot;
    CHECK_EQ(sk_snapshot_open(store, NULL, 0, &snapshot), SK_OK);
    CHECK_EQ(try_add(&key), SK_BUSY); /* the leaf is to be encoded first */
    CHECK_EQ(try_read(&key, &value), SK_OK);
    CHECK_EQ(value, 1);
    sk_snapshot_close(snapshot);

    CHECK_EQ(sk_leaf_gate(store, 0, 1, SK_GATE_SHUT), SK_OK);
    CHECK_EQ(try_add(&key), SK_BUSY);
    CHECK_EQ(try_read(&key, &value), SK_BUSY);
    CHECK_EQ(sk_leaf_gate(store, 0, 1, SK_GATE_OPEN), SK_OK);

    CHECK_EQ(store->leaves[0].lock.state, 0);
    CHECK_EQ(sk_stats_read(store, 0, 0, 1, &stats), SK_OK);
    CHECK_EQ(stats.operations, 1); /* only what was added */
    sk_close(store);
}

/* While a snapshot needs the leaf, calls open its log and use it, until it is full. */
static void test_a_call_about_a_leaf_with_a_log_is_not_busy(void) {
    sk_snapshot *snapshot;
    sk_buf before = {0}, found = {0};
    uint32_t leaf;
    CHECK_EQ(sk_open(1, 1, 0, &store), SK_OK);
    CHECK_EQ(util_state(store, "n", SK_I64, "i"), 0);
    for (int64_t k = 0; k < 100; k++) {
        util_key key = util_int_key(k);
        CHECK_EQ(try_add(&key), SK_OK);
    }
    util_encode_all(store, 1, &before);
    CHECK_EQ(sk_snapshot_open(store, NULL, 4000, &snapshot), SK_OK);
    util_key first = util_int_key(0);
    CHECK_EQ(try_add(&first), SK_OK);
    CHECK(store->undos[0] != NULL);
    int ok = 0;
    for (int64_t k = 0; k < 100; k++) {
        util_key key = util_int_key(k);
        int status = try_add(&key);
        CHECK(status == SK_OK || status == SK_BUSY);
        ok += status == SK_OK;
    }
    CHECK(ok > 20 && ok < 100); /* in the end there is no room, and it would have to wait */
    CHECK(sk_snapshot_next(snapshot, &leaf, &found) > 0);
    CHECK(util_same(&before, &found));
    CHECK(store->undos[0] == NULL);
    CHECK_EQ(try_add(&first), SK_OK);
    sk_snapshot_close(snapshot);
    sk_buf_free(&before);
    sk_buf_free(&found);
    sk_close(store);
}

int main(void) {
    RUN(test_a_call_that_would_wait_is_busy);
    RUN(test_a_call_about_a_leaf_with_a_log_is_not_busy);
    RUN(test_what_is_tried_is_done_once_or_not_at_all);
    return test_report();
}
