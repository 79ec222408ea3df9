/*
 * test_threads.c: the store used by many threads at once, for a bounded number of operations.
 *
 * Each writer adds 1 to its key a and then 1 to its key b in another leaf, over and over. So at
 * every moment a - b is 0 or 1, and so it must be in every snapshot, whatever else goes on: a
 * snapshot must not have an effect (b) without its cause (a). In the end every sum must be exact.
 *
 * It is meant to run under ThreadSanitizer, too. Its deadlock detector follows at most 64 locks of
 * a thread, and a batch holds more. That there is no deadlock is proved instead by the rule that
 * locks are taken in ascending order (store.h).
 */
#include "store_util.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define LEAVES 16
#define LEAF_BITS 4
#define WRITERS 3

#if defined(__SANITIZE_THREAD__)
#define ROUNDS 10000 /* ThreadSanitizer is some 20 times slower */
#else
#define ROUNDS 200000
#endif

const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "detect_deadlocks=0"; }

enum { N, B, L, D, STATES };

typedef struct world {
    sk_store *store;
    _Atomic int writing; /* writers that are not done */
    _Atomic uint64_t snapshots, moves, reads;
    util_key a[WRITERS], b[WRITERS];
} world;

static void declare(sk_store *store) {
    CHECK_EQ(util_state(store, "n", SK_I64, "i"), N);
    CHECK_EQ(util_state(store, "b", SK_BYTES, "b"), B);
    CHECK_EQ(util_state(store, "l", SK_LIST, "b"), L);
    CHECK_EQ(util_state(store, "d", SK_I64, "b"), D);
}

/* Pairs of keys in different leaves, all above `from`. */
static void choose_pairs(world *w) {
    int64_t k = 1000000;
    for (int i = 0; i < WRITERS; i++) {
        w->a[i] = util_int_key(k++);
        do {
            w->b[i] = util_int_key(k++);
        } while (util_leaf_of("i", &w->a[i], LEAF_BITS) == util_leaf_of("i", &w->b[i], LEAF_BITS));
    }
}

/* ---- Threads ---- */

typedef struct job {
    world *w;
    int number;
    pthread_t thread;
} job;

/* Adds 1; if the leaf is away for a moment, tries again. */
static void add_one(sk_store *store, const util_key *key, bool by_batch) {
    int status;
    do {
        if (by_batch) {
            uint8_t record = SK_END;
            sk_batch_args args = {.n = 1,
                                  .keys = {SK_COL_I64, 0, key->data, NULL, 8},
                                  .operand_i64 = 1,
                                  .status = &record};
            status = sk_batch(store, N, SK_B_ADD, &args);
            if (status == SK_OK) status = record;
        } else {
            status = sk_i64_fold(store, N, key->data, 8, SK_ADD, 1, 0, NULL);
        }
        if (status == SK_NOT_OWNED) sched_yield();
    } while (status == SK_NOT_OWNED);
    CHECK_EQ(status, SK_OK);
}

static void *write_pairs(void *arg) {
    job *j = arg;
    for (int i = 0; i < ROUNDS; i++) {
        add_one(j->w->store, &j->w->a[j->number], (i + j->number) % 3 == 0);
        add_one(j->w->store, &j->w->b[j->number], (i + j->number) % 2 == 0);
    }
    j->w->writing--;
    return NULL;
}

#define BATCH 300
#define BATCHES (ROUNDS / 50)

/* BATCHES times, adds 1 to BATCH keys all over the leaves, and then to as many others. So keys k
 * and k + BATCH are pairs again. Records of leaves that are away are tried again. */
static void *write_batches(void *arg) {
    job *j = arg;
    int64_t keys[BATCH], left[BATCH];
    uint8_t status[BATCH];
    for (int i = 0; i < 2 * BATCHES; i++) {
        int64_t n = BATCH;
        for (int64_t k = 0; k < BATCH; k++) left[k] = k + i % 2 * BATCH;
        while (n > 0) {
            memcpy(keys, left, sizeof keys);
            sk_batch_args args = {.n = n,
                                  .keys = {SK_COL_I64, 0, keys, NULL, sizeof keys},
                                  .operand_i64 = 1,
                                  .status = status};
            int result = sk_batch(j->w->store, N, SK_B_ADD, &args);
            CHECK(result == SK_OK || result == SK_NOT_OWNED);
            int64_t undone = 0;
            for (int64_t r = 0; r < n; r++)
                if (status[r] == SK_END) left[undone++] = keys[r];
            CHECK_EQ(undone > 0, result != SK_OK);
            if (undone > 0) sched_yield();
            n = undone;
        }
    }
    j->w->writing--;
    return NULL;
}

/* Puts, appends and deletes on keys of its own, with values that need memory. */
static void *churn(void *arg) {
    job *j = arg;
    uint8_t value[200];
    sk_buf buf = {0};
    memset(value, 7, sizeof value);
    for (uint32_t i = 0; i < ROUNDS; i++) {
        util_key key = util_bytes_key(i % 97);
        int status;
        if (i % 5 == 4) {
            status = sk_delete(j->w->store, i % 2 ? B : L, key.data, key.len, 0);
            CHECK(status <= SK_MISSING || status == SK_NOT_OWNED);
        } else if (i % 2) {
            status = sk_put(j->w->store, B, key.data, key.len, value, i % sizeof value);
            CHECK(status == SK_OK || status == SK_NOT_OWNED);
            if (status == SK_OK && sk_get(j->w->store, B, key.data, key.len, &buf) > 0)
                CHECK_EQ(buf.data[0], 7);
        } else {
            int64_t result = sk_write(j->w->store, L, key.data, key.len, SK_W_APPEND, NULL, 0, "l",
                                      (const uint8_t *)"\xa5"
                                                       "hello",
                                      6, 0, 0, &buf);
            CHECK(result >= 0 || result == -SK_NOT_OWNED);
        }
    }
    sk_buf_free(&buf);
    j->w->writing--;
    return NULL;
}

static void *read_pairs(void *arg) {
    job *j = arg;
    sk_buf buf = {0};
    int64_t last[WRITERS] = {0};
    while (j->w->writing > 0) {
        for (int i = 0; i < WRITERS; i++) {
            int64_t a = 0, b = 0; /* b is read first, so a can only have grown by then */
            int status = sk_i64_get(j->w->store, N, j->w->b[i].data, 8, &b);
            if (status == SK_OK) status = sk_i64_get(j->w->store, N, j->w->a[i].data, 8, &a);
            if (status != SK_OK) continue;
            CHECK(a >= b && b >= last[i]);
            last[i] = b;
        }
        uint64_t cursor = 0, version = 0, n = j->w->reads++;
        util_key key = util_bytes_key((uint32_t)(n % 97));
        while (sk_page(j->w->store, L, key.data, key.len, NULL, 0, &cursor, &version, 10, &buf) > 0)
            continue;
        sk_stats stats;
        CHECK_EQ(sk_stats_read(j->w->store, SK_ALL_STATES, 0, LEAVES, &stats), SK_OK);
        CHECK_EQ(stats.leaves[SK_WHOLE] + stats.leaves[SK_AWAY], LEAVES);
        uint8_t changed[LEAVES];
        CHECK_EQ(sk_changed_leaves(j->w->store, 1, changed), SK_OK);
        buf.len = 0;
        CHECK(sk_leaf_encode(j->w->store, (uint32_t)(n % LEAVES), N, 0, &buf) >= 0);
        if (buf.len > 0) CHECK_EQ(sk_block_check(buf.data, buf.len), SK_OK);
    }
    sk_buf_free(&buf);
    return NULL;
}

static void check_pair(sk_store *copy, const util_key *first, const util_key *second) {
    int64_t a = 0, b = 0;
    int has_a = sk_i64_get(copy, N, first->data, 8, &a);
    int has_b = sk_i64_get(copy, N, second->data, 8, &b);
    if (has_a == SK_OK && has_b == SK_OK) CHECK(a - b == 0 || a - b == 1);
}

static void check_pairs(const world *w, sk_store *copy) {
    for (int i = 0; i < WRITERS; i++) check_pair(copy, &w->a[i], &w->b[i]);
    for (int64_t k = 0; k < BATCH; k++) {
        util_key a = util_int_key(k), b = util_int_key(k + BATCH);
        check_pair(copy, &a, &b);
    }
}

enum { UNBOUNDED, SMALL_QUEUE, FULL_ONLY };

/* Takes full snapshots, then deltas over the last one, and checks each when it has been read.
 * FULL_ONLY: no deltas, because a leaf that is away when a delta is taken is not in it, and the
 * copy would keep its older content. */
static void *read_snapshots(void *arg) {
    job *j = arg;
    sk_buf buf = {0};
    sk_store *copy = util_open(LEAVES, 1);
    declare(copy);
    uint32_t since[LEAVES] = {0};
    for (int round = 0; j->w->writing > 0 || round < 3; round++) {
        sk_snapshot *snapshot = NULL;
        bool is_delta = round % 4 != 0 && j->number != FULL_ONLY;
        CHECK_EQ(sk_snapshot_open(j->w->store, is_delta ? since : NULL,
                                  j->number == SMALL_QUEUE ? 20000 : 0, &snapshot),
                 SK_OK);
        uint32_t leaf, epoch = sk_snapshot_epoch(snapshot);
        int64_t len;
        if (!is_delta) CHECK_EQ(sk_leaf_mark(copy, 0, LEAVES, SK_ABSENT), SK_OK);
        if (!is_delta) CHECK_EQ(sk_leaf_mark(copy, 0, LEAVES, SK_WHOLE), SK_OK);
        while ((len = sk_snapshot_next(snapshot, &leaf, &buf)) > 0) {
            CHECK_EQ(sk_leaf_decode(copy, leaf, buf.data, buf.len, SK_OVER), SK_OK);
            buf.len = 0;
        }
        CHECK_EQ(len, -SK_END);
        sk_snapshot_close(snapshot);
        check_pairs(j->w, copy);
        for (int i = 0; i < LEAVES; i++) since[i] = epoch;
        CHECK_EQ(sk_track(j->w->store, epoch), SK_OK);
        j->w->snapshots++;
        if (round % 7 == 6) { /* given up before its end */
            CHECK_EQ(sk_snapshot_open(j->w->store, NULL, 0, &snapshot), SK_OK);
            len = sk_snapshot_next(snapshot, &leaf, &buf);
            CHECK(len > 0 || len == -SK_END); /* the writers may not have begun */
            buf.len = 0;
            sk_snapshot_close(snapshot);
        }
    }
    sk_close(copy);
    sk_buf_free(&buf);
    return NULL;
}

/* Takes leaves out and puts them back, every other time through another store. */
static void *move_leaves(void *arg) {
    job *j = arg;
    sk_store *other = util_open(LEAVES, 1);
    test_rng rng = test_rng_new(55);
    while (j->w->writing > 0 || j->w->moves < 20) {
        uint32_t from = (uint32_t)test_below(&rng, LEAVES);
        uint32_t to = from + 1 + (uint32_t)test_below(&rng, LEAVES - from);
        sk_leaves *leaves = NULL;
        CHECK_EQ(sk_detach(j->w->store, from, to, &leaves), SK_OK);
        if (j->w->moves % 2) {
            CHECK_EQ(sk_attach(other, leaves), SK_OK);
            CHECK_EQ(sk_detach(other, from, to, &leaves), SK_OK);
        }
        CHECK_EQ(sk_attach(j->w->store, leaves), SK_OK);
        j->w->moves++;
        sched_yield();
    }
    sk_close(other);
    return NULL;
}

/* Deltas of a state of its own, decoded into the store that others write. */
static void *decode_deltas(void *arg) {
    job *j = arg;
    sk_store *source = util_open(LEAVES, 1);
    CHECK_EQ(sk_leaf_mark(source, 0, LEAVES, SK_PARTIAL), SK_OK); /* its blocks are deltas */
    uint32_t id = util_state(source, "d", SK_I64, "b");
    sk_buf buf = {0};
    for (int64_t i = 0; j->w->writing > 0; i++) {
        util_key key = util_bytes_key((uint32_t)(i % 50));
        uint32_t leaf = util_leaf_of("b", &key, LEAF_BITS);
        CHECK_EQ(sk_i64_put(source, id, key.data, key.len, i), SK_OK);
        buf.len = 0;
        CHECK(sk_leaf_encode(source, leaf, id, 0, &buf) > 0);
        if (j->number == 0 || sk_leaf_residency(j->w->store, leaf) == SK_WHOLE) {
            int64_t value = 0;
            CHECK_EQ(sk_leaf_decode(j->w->store, leaf, buf.data, buf.len, SK_OVER), SK_OK);
            CHECK_EQ(sk_i64_get(j->w->store, D, key.data, key.len, &value), SK_OK);
            CHECK_EQ(value, i);
        }
        sched_yield();
    }
    sk_buf_free(&buf);
    sk_close(source);
    return NULL;
}

static void *declare_states(void *arg) {
    job *j = arg;
    char name[32];
    for (int i = 0; i < 100; i++) {
        uint32_t id, again;
        const char *found, *key_type;
        int kind, flags;
        snprintf(name, sizeof name, "state %d", i);
        CHECK_EQ(sk_state_add(j->w->store, name, SK_I64, "i", 0, &id), SK_OK);
        CHECK_EQ(sk_state_add(j->w->store, name, SK_I64, "i", 0, &again), SK_OK);
        CHECK_EQ(id, again);
        CHECK_EQ(sk_state_info(j->w->store, id, &found, &kind, &key_type, &flags), SK_OK);
        CHECK(strcmp(found, name) == 0);
        sched_yield();
    }
    return NULL;
}

/* ---- Scenes ---- */

typedef struct part {
    void *(*run)(void *);
    int number;
} part;

static void run_scene(world *w, const part *parts, int count) {
    job jobs[16];
    for (int i = 0; i < count; i++) {
        jobs[i] = (job){.w = w, .number = parts[i].number};
        CHECK_EQ(pthread_create(&jobs[i].thread, NULL, parts[i].run, &jobs[i]), 0);
    }
    for (int i = 0; i < count; i++) CHECK_EQ(pthread_join(jobs[i].thread, NULL), 0);
}

static void check_sums(world *w) {
    for (int i = 0; i < WRITERS; i++) {
        int64_t a = 0, b = 0;
        CHECK_EQ(sk_i64_get(w->store, N, w->a[i].data, 8, &a), SK_OK);
        CHECK_EQ(sk_i64_get(w->store, N, w->b[i].data, 8, &b), SK_OK);
        CHECK_EQ(a, ROUNDS);
        CHECK_EQ(b, ROUNDS);
    }
    for (int64_t k = 0; k < 2 * BATCH; k++) {
        int64_t n = 0;
        CHECK_EQ(sk_i64_get(w->store, N, util_int_key(k).data, 8, &n), SK_OK);
        CHECK_EQ(n, BATCHES);
    }
    sk_stats stats = util_stats(w->store, LEAVES);
    CHECK_EQ(stats.bytes, sk_bytes_used(w->store));
}

static void test_snapshots_see_no_effect_without_its_cause(void) {
    world w = {.store = util_open(LEAVES, 1), .writing = WRITERS + 2};
    declare(w.store);
    choose_pairs(&w);
    const part parts[] = {{write_pairs, 0},
                          {write_pairs, 1},
                          {write_pairs, 2},
                          {write_batches, 0},
                          {churn, 0},
                          {read_snapshots, UNBOUNDED},
                          {read_snapshots, SMALL_QUEUE},
                          {read_pairs, 0},
                          {decode_deltas, 0},
                          {declare_states, 0}};
    run_scene(&w, parts, sizeof parts / sizeof parts[0]);
    check_sums(&w);
    CHECK(w.snapshots > 5);
    sk_close(w.store);
}

/* Few threads, so that snapshots are opened at every moment of a batch. */
static void test_snapshots_see_no_batch_without_the_one_before(void) {
    for (int round = 0; round < 4; round++) {
        world w = {.store = util_open(LEAVES, 1), .writing = 1};
        declare(w.store);
        choose_pairs(&w);
        const part parts[] = {{write_batches, 0}, {read_snapshots, UNBOUNDED}};
        run_scene(&w, parts, sizeof parts / sizeof parts[0]);
        for (int64_t k = 0; k < 2 * BATCH; k++) {
            int64_t n = 0;
            CHECK_EQ(sk_i64_get(w.store, N, util_int_key(k).data, 8, &n), SK_OK);
            CHECK_EQ(n, BATCHES);
        }
        sk_close(w.store);
    }
}

static void test_leaves_move_under_writers_and_readers(void) {
    world w = {.store = util_open(LEAVES, 1), .writing = WRITERS + 1};
    declare(w.store);
    choose_pairs(&w);
    const part parts[] = {{write_pairs, 0},
                          {write_pairs, 1},
                          {write_pairs, 2},
                          {write_batches, 0},
                          {read_snapshots, FULL_ONLY},
                          {read_pairs, 0},
                          {move_leaves, 0},
                          {declare_states, 0}};
    run_scene(&w, parts, sizeof parts / sizeof parts[0]);
    check_sums(&w);
    CHECK(w.moves > 5);
    sk_close(w.store);
}

/* ---- A store that is smaller than its content ---- */

typedef struct homed {
    sk_store *store, *home;
    _Atomic int writing;
    _Atomic uint64_t evicted;
} homed;

#define HOMED_KEYS 200
#define HOMED_WRITERS 2

typedef struct homed_job {
    homed *h;
    int number;
    pthread_t thread;
} homed_job;

/* Adds 1 to each of its keys in turn. If the store does not know a key, the home is asked. */
static void *write_homed(void *arg) {
    homed_job *j = arg;
    for (int i = 0; i < ROUNDS; i++) {
        util_key key = util_int_key(i % HOMED_KEYS * HOMED_WRITERS + j->number);
        while (sk_i64_fold(j->h->store, N, key.data, 8, SK_ADD, 1, 0, NULL) == SK_UNKNOWN) {
            int64_t value = 0;
            int status = sk_i64_get(j->h->home, N, key.data, 8, &value);
            CHECK(status == SK_OK || status == SK_MISSING);
            CHECK_EQ(sk_install(j->h->store, N, key.data, 8,
                                status == SK_OK ? (uint8_t *)&value : NULL, 8, SK_NO_TIME),
                     SK_OK);
        }
    }
    j->h->writing--;
    return NULL;
}

static void write_home(homed *h, uint32_t leaf, bool is_written, sk_buf *buf) {
    buf->len = 0;
    int64_t len = sk_dirty_take(h->store, leaf, 0, buf);
    CHECK(len >= 0);
    if (len <= 0) return;
    CHECK_EQ(sk_leaf_decode(h->home, leaf, buf->data, buf->len, SK_OVER), SK_OK);
    CHECK_EQ(sk_dirty_done(h->store, leaf, is_written), SK_OK);
}

static void *write_back(void *arg) {
    homed_job *j = arg;
    sk_buf buf = {0};
    for (uint32_t i = 0; j->h->writing > 0; i++) write_home(j->h, i % LEAVES, i % 5 != 0, &buf);
    sk_buf_free(&buf);
    return NULL;
}

static void *evict(void *arg) {
    homed_job *j = arg;
    while (j->h->writing > 0) {
        int64_t bytes = sk_evict(j->h->store, 1 << 20);
        CHECK(bytes >= 0);
        j->h->evicted += (uint64_t)bytes;
        sched_yield();
    }
    return NULL;
}

static void test_write_back_and_eviction_lose_no_update(void) {
    homed h = {
        .store = util_open(LEAVES, 1), .home = util_open(LEAVES, 1), .writing = HOMED_WRITERS};
    declare(h.store);
    declare(h.home);
    CHECK_EQ(sk_write_back(h.store, 1), SK_OK);
    CHECK_EQ(sk_leaf_mark(h.store, 0, LEAVES, SK_ABSENT), SK_OK);
    homed_job jobs[] = {{&h, 0, 0}, {&h, 1, 0}, {&h, 0, 0}, {&h, 0, 0}, {&h, 1, 0}};
    void *(*const run[])(void *) = {write_homed, write_homed, write_back, evict, evict};
    for (int i = 0; i < 5; i++)
        CHECK_EQ(pthread_create(&jobs[i].thread, NULL, run[i], &jobs[i]), 0);
    for (int i = 0; i < 5; i++) CHECK_EQ(pthread_join(jobs[i].thread, NULL), 0);
    sk_buf buf = {0};
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++) write_home(&h, leaf, true, &buf);
    int64_t sum = 0;
    for (int64_t k = 0; k < HOMED_KEYS * HOMED_WRITERS; k++) {
        int64_t n = 0;
        CHECK_EQ(sk_i64_get(h.home, N, util_int_key(k).data, 8, &n), SK_OK);
        CHECK_EQ(n, ROUNDS / HOMED_KEYS + (k / HOMED_WRITERS < ROUNDS % HOMED_KEYS));
        sum += n;
    }
    CHECK_EQ(sum, (int64_t)HOMED_WRITERS * ROUNDS);
    CHECK_EQ(util_stats(h.store, LEAVES).dirty, 0);
    CHECK(sk_evict(h.store, UINT64_MAX) >= 0); /* all of it is clean now */
    CHECK_EQ(util_stats(h.store, LEAVES).entries, 0);
    sk_buf_free(&buf);
    sk_close(h.store);
    sk_close(h.home);
}

/* Several readers read one snapshot while writers change the store. Together they must get the
 * store as it was at one moment, and no leaf twice. */
typedef struct filler {
    sk_snapshot *snapshot;
    sk_store *copy;
    _Atomic uint32_t *times; /* per leaf: how often it came */
    pthread_t thread;
} filler;

static void *fill_leaves(void *arg) {
    filler *f = arg;
    sk_buf buf = {0};
    sk_filled records[LEAVES];
    int64_t count;
    while ((count = sk_snapshot_fill(f->snapshot, 3000, records, LEAVES, &buf)) > 0) {
        for (int64_t i = 0; i < count; i++) {
            f->times[records[i].leaf]++;
            CHECK_EQ(sk_leaf_decode(f->copy, records[i].leaf, buf.data + records[i].offset,
                                    records[i].length, SK_REPLACE),
                     SK_OK);
        }
        buf.len = 0;
    }
    CHECK_EQ(count, -SK_END);
    sk_buf_free(&buf);
    return NULL;
}

static void test_readers_of_one_snapshot_get_each_leaf_once(void) {
    world w = {.store = util_open(LEAVES, 1), .writing = WRITERS};
    declare(w.store);
    choose_pairs(&w);
    job jobs[WRITERS];
    for (int64_t k = 0; k < 5000; k++)
        CHECK_EQ(sk_i64_put(w.store, D, util_int_key(k).data, 8, k), SK_OK);
    for (int i = 0; i < WRITERS; i++) {
        jobs[i] = (job){.w = &w, .number = i};
        CHECK_EQ(pthread_create(&jobs[i].thread, NULL, write_pairs, &jobs[i]), 0);
    }
    for (int round = 0; w.writing > 0 || round < 3; round++) {
        sk_snapshot *snapshot = NULL;
        sk_store *copy = util_open(LEAVES, 1);
        _Atomic uint32_t times[LEAVES] = {0};
        declare(copy);
        CHECK_EQ(sk_snapshot_open(w.store, NULL, round % 2 ? 20000 : 0, &snapshot), SK_OK);
        filler fillers[3];
        for (int i = 0; i < 3; i++) {
            fillers[i] = (filler){.snapshot = snapshot, .copy = copy, .times = times};
            CHECK_EQ(pthread_create(&fillers[i].thread, NULL, fill_leaves, &fillers[i]), 0);
        }
        for (int i = 0; i < 3; i++) CHECK_EQ(pthread_join(fillers[i].thread, NULL), 0);
        sk_snapshot_close(snapshot);
        for (int i = 0; i < LEAVES; i++) CHECK_EQ(times[i], 1); /* each has some of the keys */
        CHECK(util_stats(copy, LEAVES).entries >= 5000);
        check_pairs(&w, copy);
        sk_close(copy);
    }
    for (int i = 0; i < WRITERS; i++) CHECK_EQ(pthread_join(jobs[i].thread, NULL), 0);
    sk_close(w.store);
}

/* Closing a snapshot lets writers go on that wait for its reader. */
static void *write_some(void *arg) {
    job *j = arg;
    for (int64_t k = 0; k < 400; k++) {
        util_key key = util_int_key(k);
        add_one(j->w->store, &key, k % 2);
    }
    j->w->writing--;
    return NULL;
}

static void test_closing_a_snapshot_frees_those_who_wait_for_its_reader(void) {
    for (int round = 0; round < 20; round++) {
        world w = {.store = util_open(LEAVES, 1), .writing = 2};
        declare(w.store);
        for (int64_t k = 0; k < 400; k++)
            CHECK_EQ(sk_i64_put(w.store, N, util_int_key(k).data, 8, 0), SK_OK);
        sk_snapshot *snapshot = NULL;
        CHECK_EQ(sk_snapshot_open(w.store, NULL, 1, &snapshot), SK_OK);
        job jobs[2] = {{.w = &w}, {.w = &w}};
        for (int i = 0; i < 2; i++)
            CHECK_EQ(pthread_create(&jobs[i].thread, NULL, write_some, &jobs[i]), 0);
        uint32_t leaf;
        sk_buf buf = {0};
        for (int i = 0; i < round % 5; i++) CHECK(sk_snapshot_next(snapshot, &leaf, &buf) > 0);
        sk_snapshot_close(snapshot);
        for (int i = 0; i < 2; i++) CHECK_EQ(pthread_join(jobs[i].thread, NULL), 0);
        for (int64_t k = 0; k < 400; k++) {
            int64_t n = 0;
            CHECK_EQ(sk_i64_get(w.store, N, util_int_key(k).data, 8, &n), SK_OK);
            CHECK_EQ(n, 2);
        }
        sk_buf_free(&buf);
        sk_close(w.store);
    }
}

int main(void) {
    test_seed(); /* before there are threads */
    RUN(test_snapshots_see_no_effect_without_its_cause);
    RUN(test_snapshots_see_no_batch_without_the_one_before);
    RUN(test_leaves_move_under_writers_and_readers);
    RUN(test_write_back_and_eviction_lose_no_update);
    RUN(test_readers_of_one_snapshot_get_each_leaf_once);
    RUN(test_closing_a_snapshot_frees_those_who_wait_for_its_reader);
    return test_report();
}
