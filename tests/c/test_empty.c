/*
 * test_empty.c: leaves cost nothing until they hold something. A call that goes through all leaves
 * must not write to a table that has no slots (store.h). The tables are write-protected meanwhile,
 * so that any write to one ends the program, even a write of the same bytes.
 */
#define _GNU_SOURCE
#include "rows_util.h"
#include "store.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#define LEAVES 2048
#define LEAF_BITS 11
enum { N, X, T, STATES };

/* With AddressSanitizer arrays come from malloc, so their pages hold other things, too. */
#ifdef __SANITIZE_ADDRESS__
#define IS_MAPPED false
#else
#define IS_MAPPED true
#endif

static void on_fault(int number) {
    static const char text[] = "FAILED: a table without slots was written to\n";
    (void)number;
    _exit(write(STDOUT_FILENO, text, sizeof text - 1) > 0 ? 1 : 2);
}

static void protect(sk_store *store, uint32_t from, uint32_t to, int protection) {
    for (uint32_t s = 0; s < store->state_count && IS_MAPPED; s++) {
        sk_state *state = store->states[s];
        CHECK_EQ(mprotect(state->tables + from, (to - from) * sizeof(sk_table), protection), 0);
        if (state->due_min != NULL)
            CHECK_EQ(mprotect((void *)(state->due_min + from), (to - from) * 8, protection), 0);
    }
}

static sk_store *open_one(void) {
    sk_store *store = util_open(128, 16);
    CHECK_EQ(util_state(store, "n", SK_I64, "i"), N);
    CHECK_EQ(util_timed_state(store, "x", SK_BYTES, "i", 1000, SK_EVENT_TIME, 0), X);
    CHECK_EQ(util_state(store, "t", SK_TIMERS, "i"), T);
    return store;
}

/* Everything that goes through leaves [from, to), none of which has entries. */
static void go_through(sk_store *store, sk_store *other, uint32_t from, uint32_t to) {
    static uint64_t heat[LEAVES];
    static uint8_t changed[LEAVES];
    static const int32_t numbers[STATES] = {0, 1, 2};
    uint64_t counts[STATES];
    sk_buf buf = {0};
    sk_leaves *leaves = NULL;
    sk_snapshot *snapshot = NULL;
    sk_stats stats;
    uint32_t leaf = 0;
    for (int residency = SK_AWAY; residency >= SK_WHOLE; residency--) {
        CHECK_EQ(sk_leaf_mark(store, from, to, residency), SK_OK);
        CHECK_EQ(sk_stats_read(store, SK_ALL_STATES, from, to, &stats), SK_OK);
        CHECK_EQ(stats.leaves[residency], to - from);
        CHECK_EQ(stats.bytes, 0);
        for (uint32_t i = from; i < to; i++)
            CHECK(sk_leaf_encode(store, i, SK_ALL_STATES, 0, &buf) == 0);
        if (residency == SK_AWAY) continue;
        CHECK_EQ(sk_detach(store, from, to, &leaves), SK_OK);
        CHECK_EQ(sk_attach(store, leaves), SK_OK);
        CHECK_EQ(sk_move(store, other, from, to, &leaves), SK_OK);
        CHECK_EQ(sk_move(other, store, from, to, &leaves), SK_OK);
    }
    CHECK_EQ(sk_leaf_mark(store, from, to, SK_ABSENT), SK_OK);
    CHECK_EQ(sk_leaf_gate(store, from, to, SK_GATE_EXPECTED), SK_OK);
    CHECK_EQ(sk_leaf_gate(store, from, to, SK_GATE_SHUT), SK_OK);
    CHECK_EQ(sk_leaf_mark(store, from, to, SK_ABSENT), SK_OK);
    for (uint32_t i = from; i < to; i += 7)
        CHECK_EQ(sk_leaf_decode(store, i, NULL, 0, SK_UNDER_ALL), SK_OK);
    for (uint32_t i = from; i < to; i += 3)
        CHECK_EQ(sk_leaf_decode(store, i, NULL, 0, SK_REPLACE), SK_OK);
    CHECK_EQ(sk_leaf_mark(store, from, to, SK_WHOLE), SK_OK);
    for (uint32_t s = 0; s < STATES; s++) CHECK_EQ(sk_clear(store, s, from, to, 0), SK_OK);
    CHECK_EQ(sk_leaf_heat(store, heat), SK_OK);
    CHECK_EQ(sk_changed_leaves(store, 0, changed), SK_OK);
    CHECK(sk_evict(store, UINT64_MAX) >= 0);
    CHECK(sk_sweep(store, UINT64_MAX) >= 0);
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    CHECK(sk_rows_take(store, &leaf, 0, UINT64_MAX, UINT64_MAX, numbers, counts, STATES, &buf) >=
          0);
    CHECK_EQ(sk_rows_done(store, 0, LEAVES, 0), SK_OK);
    CHECK_EQ(sk_write_back(store, 0), SK_OK);
    CHECK(sk_timers_due(store, T, from, to, INT64_MAX, 0, &buf) >= 0);
    CHECK(sk_timers_next(store, T) > 0);
    CHECK_EQ(sk_snapshot_open(store, NULL, 0, &snapshot), SK_OK);
    CHECK_EQ(sk_leaf_mark(store, from, to, SK_ABSENT), SK_OK); /* which serves the snapshot */
    while (sk_snapshot_next(snapshot, &leaf, &buf) >= 0) continue;
    sk_snapshot_close(snapshot);
    for (uint32_t i = from; i < to; i += 5) CHECK_EQ(sk_leaf_forget(store, i), SK_OK);
    sk_buf_free(&buf);
}

static void test_what_goes_through_an_empty_store_touches_no_table(void) {
    sk_store *store = open_one(), *other = open_one();
    CHECK_EQ(sk_leaf_mark(other, 0, LEAVES, SK_AWAY), SK_OK);
    protect(store, 0, LEAVES, PROT_READ);
    protect(other, 0, LEAVES, PROT_READ);
    go_through(store, other, 0, LEAVES);
    CHECK_EQ(sk_time_set(store, SK_EVENT_TIME, 5), SK_OK); /* the first watermark */
    CHECK_EQ(sk_state_retype(store, "n", SK_F64, SK_TIMED), SK_OK);
    sk_close(store);
    sk_close(other);
}

/* The same with entries in one leaf, so that no call can rely on the store being completely
 * empty. */
static void test_what_goes_through_empty_leaves_touches_no_table_of_theirs(void) {
    sk_store *store = open_one(), *other = open_one();
    uint32_t page = (uint32_t)(4096 / sizeof(sk_table)), from = 512; /* of due_min, too */
    CHECK_EQ(sk_leaf_mark(other, 0, LEAVES, SK_AWAY), SK_OK);
    CHECK_EQ(from % page, 0);
    uint32_t filled = 0;
    for (int64_t k = 0; k < 4000 || filled == 0; k++) {
        util_key key = util_int_key(k);
        if (util_leaf_of("i", &key, LEAF_BITS) >= from) continue;
        CHECK_EQ(sk_i64_put(store, N, key.data, 8, k), SK_OK);
        CHECK_EQ(sk_put(store, X, key.data, 8, key.data, 8), SK_OK);
        CHECK_EQ(sk_timer_set(store, T, key.data, 8, k + 1), SK_OK);
        filled++;
    }
    protect(store, from, LEAVES, PROT_READ);
    protect(other, from, LEAVES, PROT_READ);
    go_through(store, other, from, LEAVES);
    CHECK_EQ(sk_time_set(store, SK_EVENT_TIME, 5), SK_OK);
    CHECK_EQ(sk_state_retype(store, "n", SK_F64, SK_TIMED), SK_OK);
    sk_stats stats;
    CHECK_EQ(sk_stats_read(store, SK_ALL_STATES, 0, from, &stats), SK_OK);
    CHECK_EQ(stats.entries, 3 * filled);
    sk_close(store);
    sk_close(other);
}

int main(void) {
    signal(SIGSEGV, on_fault);
    RUN(test_what_goes_through_an_empty_store_touches_no_table);
    RUN(test_what_goes_through_empty_leaves_touches_no_table_of_theirs);
    return test_report();
}
