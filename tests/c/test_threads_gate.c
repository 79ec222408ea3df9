/*
 * test_threads_gate.c: leaves are shut, read out and opened again under concurrent calls. Run it
 * under ThreadSanitizer, too: `make sanitize`.
 */
#include "store_util.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define LEAVES 4
#define KEYS 64
#define WRITERS 3
#define ROUNDS 1200 /* of each writer */
#define BATCH 16

typedef struct world {
    sk_store *store;
    uint32_t id;
    uint32_t leaf[KEYS];
    int64_t keys[KEYS];          /* all of them, as a column */
    _Atomic int working;         /* writers that have not ended */
    _Atomic int64_t acked[KEYS]; /* writes that were answered with SK_OK */
    _Atomic int64_t shut;        /* how often a leaf was shut */
} world;

typedef struct job {
    world *w;
    int number;
} job;

/* Adds 1 to one key after the other; a refused write is simply not counted. */
static void *write_single(void *arg) {
    job *j = arg;
    for (int r = 0; r < ROUNDS; r++)
        for (int64_t k = 0; k < KEYS; k++) {
            int status =
                sk_i64_fold(j->w->store, j->w->id, util_int_key(k).data, 8, SK_ADD, 1, 0, NULL);
            CHECK(status == SK_OK || status == SK_NOT_OWNED);
            if (status == SK_OK) j->w->acked[k]++;
        }
    j->w->working--;
    return NULL;
}

static void *write_batches(void *arg) {
    job *j = arg;
    int64_t keys[BATCH];
    uint8_t status[BATCH];
    for (int r = 0; r < ROUNDS; r++)
        for (int64_t from = 0; from < KEYS; from += BATCH) {
            for (int64_t i = 0; i < BATCH; i++) keys[i] = from + i;
            sk_batch_args args = {.n = BATCH,
                                  .keys = {SK_COL_I64, 0, keys, NULL, sizeof keys},
                                  .operand_i64 = 1,
                                  .status = status};
            int result = sk_batch(j->w->store, j->w->id, SK_B_ADD, &args);
            CHECK(result == SK_OK || result == SK_NOT_OWNED);
            for (int64_t i = 0; i < BATCH; i++)
                if (status[i] == SK_OK) j->w->acked[keys[i]]++;
        }
    j->w->working--;
    return NULL;
}

static int64_t value_in(const sk_buf *blocks, int64_t k, sk_buf *buf) {
    if (blocks->len == 0) return 0;
    int status = sk_block_find(blocks->data, blocks->len, util_int_key(k).data, 8, buf);
    CHECK(status == SK_OK || status == SK_MISSING);
    int64_t value = 0;
    if (status == SK_OK) memcpy(&value, buf->data, 8);
    return value;
}

/* A leaf that is shut has every write that was answered by then, and does not change. */
static void *shut_and_read(void *arg) {
    job *j = arg;
    world *w = j->w;
    sk_buf first = {0}, again = {0}, picked = {0}, buf = {0};
    for (uint32_t leaf = (uint32_t)j->number; w->working > 0; leaf = (leaf + 2) % LEAVES) {
        int64_t acked[KEYS];
        first.len = 0;
        CHECK_EQ(sk_leaf_gate(w->store, leaf, leaf + 1, SK_GATE_SHUT), SK_OK);
        for (int64_t k = 0; k < KEYS; k++) acked[k] = w->acked[k];
        CHECK(sk_leaf_encode(w->store, leaf, SK_ALL_STATES, 0, &first) >= 0);
        for (int i = 0; i < 5; i++) {
            sched_yield();
            again.len = 0;
            CHECK(sk_leaf_encode(w->store, leaf, SK_ALL_STATES, 0, &again) >= 0);
            CHECK(util_same(&first, &again));
        }
        for (int64_t k = 0; k < KEYS; k++) {
            if (w->leaf[k] != leaf) continue;
            int64_t value = value_in(&first, k, &buf);
            CHECK(value >= acked[k]);
            CHECK(w->acked[k] <= value); /* no write was answered since */
            picked.len = 0;
            CHECK(sk_leaf_pick(w->store, leaf, w->id, &(sk_column){SK_COL_I64, 0, &k, NULL, 8}, 1,
                               &picked) > 0);
            CHECK_EQ(value_in(&picked, k, &buf), value);
        }
        picked.len = 0; /* keys of all leaves at once; this leaf's are as they were */
        CHECK(sk_pick(w->store, w->id, &(sk_column){SK_COL_I64, 0, w->keys, NULL, 8 * KEYS}, KEYS,
                      NULL, &picked) > 0);
        for (int64_t k = 0; k < KEYS; k++) {
            int64_t value = value_in(&picked, k, &buf);
            if (w->leaf[k] == leaf) CHECK_EQ(value, value_in(&first, k, &buf));
            CHECK(value >= acked[k]);
        }
        CHECK_EQ(sk_leaf_gate(w->store, leaf, leaf + 1, SK_GATE_OPEN), SK_OK);
        w->shut++;
        sched_yield();
    }
    sk_buf_free(&first);
    sk_buf_free(&again);
    sk_buf_free(&picked);
    sk_buf_free(&buf);
    return NULL;
}

/* A snapshot has all of a leaf, or nothing of it and says "away". */
static void *read_snapshots(void *arg) {
    job *j = arg;
    sk_buf buf = {0};
    uint64_t heat[LEAVES];
    while (j->w->working > 0) {
        sk_snapshot *snapshot = NULL;
        uint32_t leaf;
        CHECK_EQ(sk_snapshot_open(j->w->store, NULL, 0, &snapshot), SK_OK);
        buf.len = 0;
        while (sk_snapshot_next(snapshot, &leaf, &buf) >= 0) {
            CHECK_EQ(sk_snapshot_residency(snapshot, leaf), SK_WHOLE);
            CHECK_EQ(sk_block_check(buf.data, buf.len), SK_OK);
            buf.len = 0;
        }
        sk_snapshot_close(snapshot);
        CHECK_EQ(sk_leaf_heat(j->w->store, heat), SK_OK);
        sched_yield();
    }
    sk_buf_free(&buf);
    return NULL;
}

static void test_shut_leaf_has_every_answered_write_and_never_changes(void) {
    static world w;
    w = (world){.store = util_open(LEAVES, 1), .working = WRITERS};
    w.id = util_state(w.store, "n", SK_I64, "i");
    for (int64_t k = 0; k < KEYS; k++) {
        util_key key = util_int_key(k);
        w.leaf[k] = util_leaf_of("i", &key, 2);
        w.keys[k] = k;
        CHECK_EQ(sk_i64_put(w.store, w.id, key.data, 8, 0), SK_OK);
    }
    void *(*const work[])(void *) = {write_single,  write_batches, write_batches,
                                     shut_and_read, shut_and_read, read_snapshots};
    const int numbers[] = {0, 1, 2, 0, 1, 0};
    pthread_t threads[6];
    job jobs[6];
    for (int i = 0; i < 6; i++) {
        jobs[i] = (job){&w, numbers[i]};
        CHECK_EQ(pthread_create(&threads[i], NULL, work[i], &jobs[i]), 0);
    }
    for (int i = 0; i < 6; i++) pthread_join(threads[i], NULL);
    CHECK(w.shut > 0);
    for (int64_t k = 0; k < KEYS; k++) {
        int64_t value = -1;
        CHECK_EQ(sk_i64_get(w.store, w.id, util_int_key(k).data, 8, &value), SK_OK);
        CHECK_EQ(value, w.acked[k]);
    }
    sk_close(w.store);
}

/* ---- Entries that come while leaves are dropped and others come ---- */

typedef struct arrivals {
    sk_store *store;
    sk_buf blocks;
    _Atomic int spreading;
} arrivals;

static void *spread(void *arg) {
    arrivals *w = arg;
    for (int i = 0; i < 300; i++) {
        uint8_t touched[LEAVES] = {0};
        CHECK_EQ(sk_spread(w->store, w->blocks.data, w->blocks.len, touched), KEYS);
        sched_yield();
    }
    w->spreading--;
    return NULL;
}

/* Drops leaves, so that there is something to bring. Entries that are there must be right,
 * whichever thread brought them. */
static void *drop_and_read(void *arg) {
    arrivals *w = arg;
    for (uint32_t leaf = 0; w->spreading > 0; leaf = (leaf + 1) % LEAVES) {
        CHECK_EQ(sk_leaf_mark(w->store, leaf, leaf + 1, SK_ABSENT), SK_OK);
        CHECK_EQ(sk_leaf_gate(w->store, leaf, leaf + 1, SK_GATE_OPEN), SK_OK);
        for (int64_t k = 0; k < KEYS; k++) {
            int64_t value = 0;
            int status = sk_i64_get(w->store, 0, util_int_key(k).data, 8, &value);
            CHECK(status == SK_UNKNOWN || (status == SK_OK && value == k + 1));
        }
        sched_yield();
    }
    return NULL;
}

static void *take_snapshots(void *arg) {
    arrivals *w = arg;
    sk_buf buf = {0};
    while (w->spreading > 0) {
        sk_snapshot *snapshot = NULL;
        uint32_t leaf;
        CHECK_EQ(sk_snapshot_open(w->store, NULL, 0, &snapshot), SK_OK);
        while (buf.len = 0, sk_snapshot_next(snapshot, &leaf, &buf) >= 0)
            CHECK_EQ(sk_block_check(buf.data, buf.len), SK_OK);
        sk_snapshot_close(snapshot);
        sched_yield();
    }
    sk_buf_free(&buf);
    return NULL;
}

static void test_entries_can_be_spread_by_several_while_leaves_are_read_and_dropped(void) {
    sk_store *source = util_open(LEAVES, 1);
    arrivals w = {.store = util_open(LEAVES, 1), .spreading = 2};
    uint32_t id = util_state(source, "n", SK_I64, "i");
    CHECK_EQ(util_state(w.store, "n", SK_I64, "i"), 0);
    int64_t keys[KEYS];
    for (int64_t k = 0; k < KEYS; k++) {
        keys[k] = k;
        CHECK_EQ(sk_i64_put(source, id, util_int_key(k).data, 8, k + 1), SK_OK);
    }
    CHECK(sk_pick(source, id, &(sk_column){SK_COL_I64, 0, keys, NULL, sizeof keys}, KEYS, NULL,
                  &w.blocks) > 0);
    CHECK_EQ(sk_leaf_mark(w.store, 0, LEAVES, SK_ABSENT), SK_OK);
    void *(*const work[])(void *) = {spread, spread, drop_and_read, take_snapshots};
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) CHECK_EQ(pthread_create(&threads[i], NULL, work[i], &w), 0);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    w.spreading = 1;
    spread(&w);
    for (int64_t k = 0; k < KEYS; k++) {
        int64_t value = 0;
        CHECK_EQ(sk_i64_get(w.store, 0, util_int_key(k).data, 8, &value), SK_OK);
        CHECK_EQ(value, k + 1);
    }
    sk_buf_free(&w.blocks);
    sk_close(source);
    sk_close(w.store);
}

int main(void) {
    RUN(test_entries_can_be_spread_by_several_while_leaves_are_read_and_dropped);
    RUN(test_shut_leaf_has_every_answered_write_and_never_changes);
    return test_report();
}
