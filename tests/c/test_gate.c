/* test_gate.c: leaves whose gate is shut or that are expected (csrc/gate.c). */
#include "filled_util.h"

static util_key key_in(uint32_t leaf, uint32_t number) {
    for (uint32_t k = number;; k++) {
        util_key key = util_bytes_key(k);
        if (util_leaf_of("b", &key, 2) == leaf) return key;
    }
}

/* Every call about one key of a leaf gives this answer, also calls that do not ask what is
 * there. */
static void check_answers(sk_store *store, uint32_t leaf, int expected) {
    util_key key = key_in(leaf, 0);
    int64_t value = 5;
    uint64_t cursor = 0, version = 0;
    uint8_t status = 0;
    int32_t offsets[2] = {0, (int32_t)key.len}, one[2] = {0, 1};
    int64_t out_offsets[2] = {-1, -1};
    sk_buf buf = {0};
    CHECK_EQ(sk_i64_get(store, N, key.data, key.len, &value), expected);
    CHECK_EQ(sk_i64_put(store, N, key.data, key.len, 1), expected);
    CHECK_EQ(sk_i64_fold(store, N, key.data, key.len, SK_ADD, 1, 0, NULL), expected);
    CHECK_EQ(sk_i64_fold(store, N, key.data, key.len, SK_MAX, 1, 0, NULL), expected);
    CHECK_EQ(sk_i64_cas(store, N, key.data, key.len, NULL, 1, NULL), expected);
    CHECK_EQ(sk_i64_value(store, N, key.data, key.len), INT64_MIN);
    CHECK_EQ(sk_value_status(), expected);
    CHECK_EQ(sk_contains(store, B, key.data, key.len), expected);
    CHECK_EQ(sk_delete(store, B, key.data, key.len, 0), expected);
    CHECK_EQ(sk_delete(store, B, key.data, key.len, SK_BLIND), expected);
    CHECK_EQ(sk_get(store, B, key.data, key.len, &buf), -expected);
    CHECK_EQ(sk_put(store, B, key.data, key.len, key.data, 3), expected);
    CHECK_EQ(sk_i64_put(store, X, key.data, key.len, 1), expected);
    CHECK_EQ(sk_i64_get(store, X, key.data, key.len, &value), expected);
    CHECK_EQ(sk_read(store, L, key.data, key.len, SK_R_LEN, NULL, 0, NULL, 0, 0, 0, &buf),
             -expected);
    CHECK_EQ(sk_write(store, L, key.data, key.len, SK_W_APPEND, NULL, 0, "l",
                      (const uint8_t *)"\x07", 1, 0, 0, &buf),
             -expected);
    CHECK_EQ(sk_write(store, L, key.data, key.len, SK_W_SET, NULL, 0, "l", (const uint8_t *)"\x90",
                      1, 0, 0, &buf),
             -expected);
    CHECK_EQ(sk_page(store, L, key.data, key.len, NULL, 0, &cursor, &version, 1, &buf), -expected);
    CHECK_EQ(sk_timer_set(store, W, key.data, key.len, 7), expected);
    CHECK_EQ(sk_timer_cancel(store, W, key.data, key.len, 7), expected);
    CHECK_EQ(sk_probe_cost(store, N, key.data, key.len), -expected);
    for (int op = SK_B_GET; op <= SK_B_APPEND; op++)
        for (uint32_t s = N; s < STATES; s++) {
            bool is_number = s == N || s == X;
            if (op == SK_B_ADD && !is_number) continue;
            if (op == SK_B_APPEND && s != L) continue;
            sk_batch_args args = {.n = 1,
                                  .flags = SK_BLIND,
                                  .keys = {SK_COL_VAR32, 0, key.data, offsets, (int64_t)key.len},
                                  .values = {SK_COL_I64, 0, &value, NULL, 8},
                                  .out = &value,
                                  .out_offsets = out_offsets,
                                  .buf = &buf,
                                  .status = &status};
            if (!is_number) args.values = (sk_column){SK_COL_VAR32, 0, "\x90", one, 1};
            int result = sk_batch(store, s, op, &args);
            bool is_answer = expected == SK_UNKNOWN;
            CHECK_EQ(result, is_answer ? SK_OK : expected);
            CHECK_EQ(status, is_answer ? SK_UNKNOWN : SK_END);
            CHECK_EQ(args.unknown, is_answer);
            CHECK_EQ(args.failed, is_answer ? -1 : 0);
            if (is_answer && op == SK_B_GET && !is_number) CHECK_EQ(out_offsets[1], 0);
        }
    sk_buf_free(&buf);
}

static sk_stats leaf_stats(sk_store *store, uint32_t leaf) {
    sk_stats stats;
    CHECK_EQ(sk_stats_read(store, SK_ALL_STATES, leaf, leaf + 1, &stats), SK_OK);
    return stats;
}

static void check_encodes(sk_store *store, uint32_t leaf, uint32_t since, const sk_buf *expected) {
    sk_buf buf = {0};
    CHECK_EQ(sk_leaf_encode(store, leaf, SK_ALL_STATES, since, &buf), (int64_t)expected->len);
    CHECK(util_same(&buf, expected));
    sk_buf_free(&buf);
}

/* ---- Shut ---- */

static void test_shut_leaf_stays_as_it_is_whatever_is_tried(void) {
    sk_store *store = open_filled(), *other = util_open(2, 2);
    sk_buf all = {0}, delta = {0}, buf = {0};
    sk_leaves *leaves = NULL;
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    uint32_t since = sk_epoch_advance(store);
    CHECK_EQ(sk_track(store, since), SK_OK);
    util_key changed = key_in(1, 0), deleted = key_in(1, 50);
    CHECK_EQ(sk_i64_put(store, N, changed.data, changed.len, -1), SK_OK);
    CHECK_EQ(sk_delete(store, N, deleted.data, deleted.len, 0), SK_OK);
    CHECK(sk_leaf_encode(store, 1, SK_ALL_STATES, 0, &all) > 0);
    CHECK(sk_leaf_encode(store, 1, SK_ALL_STATES, since, &delta) > 0);
    sk_stats was = leaf_stats(store, 1);
    int64_t next = sk_timers_next(store, W);
    uint64_t operations = util_stats(store, LEAVES).operations;
    CHECK_EQ(sk_leaf_gate_of(store, 1), SK_GATE_OPEN);
    CHECK_EQ(sk_leaf_gate(store, 1, 2, SK_GATE_SHUT), SK_OK);
    CHECK_EQ(sk_leaf_gate(store, 1, 2, SK_GATE_SHUT), SK_OK);
    CHECK_EQ(sk_leaf_gate_of(store, 1), SK_GATE_SHUT);
    CHECK_EQ(sk_leaf_residency(store, 1), SK_WHOLE);
    CHECK(next >= 0 && sk_timers_next(store, W) >= next);

    check_answers(store, 1, SK_NOT_OWNED);
    CHECK(strstr(sk_reason(), "route the key to its new owner") != NULL);
    util_key key = key_in(1, 0);
    CHECK_EQ(sk_install(store, N, key.data, key.len, key.data, 8, SK_NO_TIME), SK_NOT_OWNED);
    CHECK_EQ(sk_install(store, N, key.data, key.len, NULL, 0, SK_NO_TIME), SK_NOT_OWNED);
    CHECK_EQ(sk_detach(store, 0, 2, &leaves), SK_NOT_OWNED);
    CHECK_EQ(sk_move(store, other, 0, 2, &leaves), SK_NOT_OWNED);
    CHECK_EQ(sk_leaf_residency(store, 0), SK_WHOLE);
    CHECK_EQ(sk_detach(other, 1, 2, &leaves), SK_OK);
    CHECK_EQ(sk_attach(store, leaves), SK_NOT_OWNED);
    sk_leaves_free(leaves);
    CHECK_EQ(sk_leaf_mark(store, 0, 2, SK_WHOLE), SK_NOT_OWNED);
    CHECK_EQ(sk_leaf_mark(store, 0, 2, SK_PARTIAL), SK_NOT_OWNED);
    CHECK_EQ(sk_leaf_residency(store, 0), SK_WHOLE);
    CHECK_EQ(sk_leaf_decode(store, 1, all.data, all.len, SK_REPLACE), SK_NOT_OWNED);
    CHECK_EQ(sk_leaf_decode(store, 1, all.data, all.len, SK_OVER), SK_NOT_OWNED);
    CHECK_EQ(sk_leaf_decode(store, 1, all.data, all.len, SK_UNDER), SK_OK); /* it has all of it */
    /* It is written home like any leaf: it may come back, and a flush must write all changes. */
    CHECK(sk_dirty_take(store, 1, 0, &buf) > 0);
    CHECK_EQ(sk_dirty_done(store, 1, 0), SK_OK);
    for (uint32_t s = 0; s < STATES; s++) CHECK_EQ(sk_clear(store, s, 1, 2, s % 2), SK_OK);
    CHECK(sk_evict(store, 1 << 20) >= 0);
    CHECK_EQ(sk_timers_due(store, W, 1, 2, INT64_MAX, 0, &buf), 0);
    CHECK_EQ(sk_timers_due(store, W, 1, 2, INT64_MAX, SK_PEEK, &buf), 0);

    check_encodes(store, 1, 0, &all);
    check_encodes(store, 1, since, &delta);
    sk_stats is = leaf_stats(store, 1);
    CHECK_EQ(is.leaves[SK_AWAY], 1);
    CHECK_EQ(is.leaves[SK_WHOLE], 0);
    CHECK_EQ(is.bytes, was.bytes);
    CHECK_EQ(is.entries, was.entries);
    CHECK_EQ(is.dirty, was.dirty);

    CHECK_EQ(sk_leaf_gate(store, 0, LEAVES, SK_GATE_OPEN), SK_OK);
    CHECK_EQ(sk_leaf_gate_of(store, 1), SK_GATE_OPEN);
    check_encodes(store, 1, 0, &all);
    check_encodes(store, 1, since, &delta);
    CHECK_EQ(sk_timers_next(store, W), next);
    CHECK_EQ(leaf_stats(store, 1).leaves[SK_WHOLE], 1);
    CHECK(sk_timers_due(store, W, 1, 2, INT64_MAX, 0, &buf) > 0);
    CHECK(sk_dirty_take(store, 1, 0, &buf) > 0);
    CHECK(util_stats(store, LEAVES).operations >= operations);
    sk_buf_free(&all);
    sk_buf_free(&delta);
    sk_buf_free(&buf);
    sk_close(store);
    sk_close(other);
}

static void test_sweeping_passes_a_shut_leaf_over_and_ends(void) {
    sk_store *store = open_filled();
    sk_stats was = leaf_stats(store, 2);
    CHECK_EQ(sk_time_set(store, SK_EVENT_TIME, 2000), SK_OK); /* all of X has expired */
    CHECK(sk_sweep(store, 3) >= 0);                           /* the hand is inside a leaf */
    CHECK_EQ(sk_leaf_gate(store, 0, 3, SK_GATE_SHUT), SK_OK);
    for (int i = 0; i < 10; i++) CHECK(sk_sweep(store, 1000) >= 0);
    CHECK_EQ(leaf_stats(store, 2).entries, was.entries);
    CHECK_EQ(sk_leaf_gate(store, 0, 3, SK_GATE_OPEN), SK_OK);
    CHECK(sk_sweep(store, UINT64_MAX) > 0);
    CHECK_EQ(leaf_stats(store, 2).entries, was.entries / 5 * 4); /* four other states */
    sk_close(store);
}

static void test_shutting_takes_all_leaves_of_a_range_or_none(void) {
    sk_store *store = open_filled();
    CHECK_EQ(sk_leaf_mark(store, 2, 3, SK_AWAY), SK_OK);
    CHECK_EQ(sk_leaf_gate(store, 0, LEAVES, SK_GATE_SHUT), SK_NOT_OWNED);
    for (uint32_t i = 0; i < LEAVES; i++) CHECK_EQ(sk_leaf_gate_of(store, i), SK_GATE_OPEN);
    CHECK_EQ(sk_leaf_gate(store, 0, LEAVES, SK_GATE_OPEN), SK_OK);
    CHECK_EQ(sk_leaf_residency(store, 2), SK_AWAY);
    CHECK_EQ(sk_leaf_gate(store, 0, LEAVES, 3), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_leaf_gate(store, 0, LEAVES, -1), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_leaf_gate(store, 0, LEAVES + 1, SK_GATE_OPEN), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_leaf_gate_of(store, LEAVES), -SK_BAD_ARGUMENT);
    CHECK_EQ(sk_leaf_gate(store, 1, 1, SK_GATE_SHUT), SK_OK); /* no leaf at all */
    CHECK_EQ(sk_leaf_gate_of(store, 1), SK_GATE_OPEN);
    sk_close(store);
}

/* Reads a snapshot and closes it. `blocks` gets what the snapshot has of one leaf. */
static void read_snapshot(sk_snapshot *snapshot, uint32_t leaf, sk_buf *blocks, int residency) {
    uint32_t found;
    CHECK_EQ(sk_snapshot_residency(snapshot, leaf), residency);
    sk_buf buf = {0};
    blocks->len = 0;
    while (sk_snapshot_next(snapshot, &found, &buf) >= 0) {
        if (found == leaf) CHECK_EQ(sk_buf_put(blocks, buf.data, buf.len), SK_OK);
        buf.len = 0;
    }
    CHECK_EQ(sk_snapshot_residency(snapshot, leaf), residency);
    sk_buf_free(&buf);
    sk_snapshot_close(snapshot);
}

static void test_snapshot_has_a_leaf_iff_it_was_taken_before_the_leaf_was_shut(void) {
    for (int reopens = 0; reopens < 2; reopens++) {
        sk_store *store = open_filled();
        sk_buf all = {0}, found = {0};
        sk_snapshot *before = NULL, *during = NULL, *after = NULL;
        CHECK(sk_leaf_encode(store, 1, SK_ALL_STATES, 0, &all) > 0);
        CHECK_EQ(sk_snapshot_open(store, NULL, 0, &before), SK_OK);
        CHECK_EQ(sk_leaf_gate(store, 1, 2, SK_GATE_SHUT), SK_OK);
        CHECK_EQ(sk_snapshot_open(store, NULL, 0, &during), SK_OK);
        if (reopens) {
            CHECK_EQ(sk_leaf_gate(store, 1, 2, SK_GATE_OPEN), SK_OK);
        } else { /* the leaf leaves */
            CHECK_EQ(sk_leaf_mark(store, 1, 2, SK_AWAY), SK_OK);
            CHECK_EQ(sk_leaf_gate_of(store, 1), SK_GATE_OPEN);
            CHECK_EQ(leaf_stats(store, 1).bytes, 0);
        }
        CHECK_EQ(sk_snapshot_open(store, NULL, 0, &after), SK_OK);
        read_snapshot(before, 1, &found, SK_WHOLE);
        CHECK(util_same(&found, &all));
        read_snapshot(during, 1, &found, SK_AWAY);
        CHECK_EQ(found.len, 0);
        read_snapshot(after, 1, &found, reopens ? SK_WHOLE : SK_AWAY);
        CHECK(reopens ? util_same(&found, &all) : found.len == 0);
        sk_buf_free(&all);
        sk_buf_free(&found);
        sk_close(store);
    }
}

static void test_snapshot_that_is_asked_to_has_shut_leaves_as_they_were(void) {
    for (int reads_late = 0; reads_late < 2; reads_late++) {
        sk_store *store = open_filled();
        sk_buf all = {0}, found = {0};
        sk_snapshot *with = NULL, *without = NULL;
        CHECK(sk_leaf_encode(store, 1, SK_ALL_STATES, 0, &all) > 0);
        CHECK_EQ(sk_leaf_gate(store, 1, 2, SK_GATE_SHUT), SK_OK);
        CHECK_EQ(sk_snapshot_open(store, NULL, 0, &without), SK_OK);
        CHECK_EQ(sk_snapshot_open(store, NULL, 0, &with), SK_OK);
        sk_snapshot_add_shut(with);
        if (reads_late) { /* after the leaf was opened, and changed */
            CHECK_EQ(sk_leaf_gate(store, 1, 2, SK_GATE_OPEN), SK_OK);
            for (uint32_t s = 0; s < 2; s++) CHECK_EQ(sk_clear(store, s, 1, 2, SK_BLIND), SK_OK);
        }
        read_snapshot(with, 1, &found, SK_WHOLE);
        CHECK(util_same(&found, &all));
        read_snapshot(without, 1, &found, SK_AWAY);
        CHECK_EQ(found.len, 0);
        sk_buf_free(&all);
        sk_buf_free(&found);
        sk_close(store);
    }
}

static void test_shut_leaf_can_be_completed_and_stays_shut(void) {
    sk_store *store = open_filled(), *target = open_filled();
    sk_buf all = {0};
    CHECK(sk_leaf_encode(store, 1, SK_ALL_STATES, 0, &all) > 0);
    for (int begin = SK_PARTIAL; begin <= SK_ABSENT; begin++)
        for (int mode = SK_UNDER; mode <= SK_UNDER_ALL; mode++) {
            CHECK_EQ(sk_leaf_mark(target, 1, 2, SK_ABSENT), SK_OK);
            if (begin == SK_PARTIAL) {
                util_key key = key_in(1, 0);
                CHECK_EQ(sk_i64_put(target, N, key.data, key.len, 77), SK_OK);
                key = key_in(1, 50);
                CHECK_EQ(sk_delete(target, N, key.data, key.len, SK_BLIND), SK_OK);
            }
            CHECK_EQ(sk_leaf_gate(target, 1, 2, SK_GATE_SHUT), SK_OK);
            CHECK_EQ(sk_leaf_residency(target, 1), begin);
            CHECK_EQ(sk_leaf_decode(target, 1, all.data, all.len, SK_REPLACE), SK_NOT_OWNED);
            CHECK_EQ(sk_leaf_decode(target, 1, all.data, all.len, SK_OVER), SK_NOT_OWNED);
            CHECK_EQ(sk_leaf_residency(target, 1), begin);
            CHECK_EQ(sk_leaf_decode(target, 1, NULL, 0, SK_UNDER), SK_OK);
            CHECK_EQ(sk_leaf_residency(target, 1), begin);
            CHECK_EQ(sk_leaf_decode(target, 1, all.data, all.len, mode), SK_OK);
            CHECK_EQ(sk_leaf_gate_of(target, 1), SK_GATE_SHUT);
            CHECK_EQ(sk_leaf_residency(target, 1), mode == SK_UNDER ? SK_PARTIAL : SK_WHOLE);
            if (mode == SK_UNDER_ALL && begin == SK_ABSENT) check_encodes(target, 1, 0, &all);
            if (mode == SK_UNDER_ALL) CHECK_EQ(leaf_stats(target, 1).tombstones, 0);
            check_answers(target, 1, SK_NOT_OWNED);
            CHECK_EQ(sk_leaf_gate(target, 1, 2, SK_GATE_OPEN), SK_OK);
            CHECK_EQ(sk_leaf_residency(target, 1), mode == SK_UNDER ? SK_PARTIAL : SK_WHOLE);
            int64_t value;
            util_key key = key_in(1, 0);
            CHECK_EQ(sk_i64_get(target, N, key.data, key.len, &value), SK_OK);
            if (begin == SK_PARTIAL) CHECK_EQ(value, 77); /* it is newer than what came */
        }
    CHECK_EQ(sk_leaf_gate(target, 1, 2, SK_GATE_SHUT), SK_OK);
    CHECK_EQ(sk_leaf_mark(target, 1, 2, SK_ABSENT), SK_OK); /* drops, and opens */
    CHECK_EQ(sk_leaf_gate_of(target, 1), SK_GATE_OPEN);
    CHECK_EQ(sk_leaf_residency(target, 1), SK_ABSENT);
    CHECK_EQ(leaf_stats(target, 1).bytes, 0);
    sk_buf_free(&all);
    sk_close(store);
    sk_close(target);
}

static void test_write_back_under_way_ends_while_the_leaf_is_shut(void) {
    sk_store *store = open_filled();
    sk_buf buf = {0};
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    CHECK(sk_dirty_take(store, 1, 0, &buf) > 0);
    CHECK_EQ(sk_leaf_gate(store, 1, 2, SK_GATE_SHUT), SK_OK);
    CHECK_EQ(sk_dirty_done(store, 1, 1), SK_OK);
    CHECK_EQ(sk_dirty_take(store, 1, 0, &buf), 0);
    CHECK_EQ(leaf_stats(store, 1).dirty, 0);
    uint64_t bytes = leaf_stats(store, 1).bytes;
    CHECK(sk_evict(store, 1 << 20) >= 0); /* it is clean, but stays */
    CHECK(sk_evict(store, 1 << 20) >= 0);
    CHECK_EQ(leaf_stats(store, 1).bytes, bytes);
    CHECK_EQ(sk_leaf_gate(store, 1, 2, SK_GATE_OPEN), SK_OK);
    CHECK(sk_evict(store, 1 << 20) > 0);
    CHECK_EQ(sk_leaf_residency(store, 1), SK_PARTIAL);
    sk_buf_free(&buf);
    sk_close(store);
}

/* ---- Expected ---- */

static void test_expected_leaf_answers_unknown_to_every_call(void) {
    sk_store *store = open_filled();
    sk_buf buf = {0};
    sk_snapshot *snapshot = NULL;
    CHECK_EQ(sk_leaf_mark(store, 1, 3, SK_ABSENT), SK_OK);
    CHECK_EQ(sk_leaf_gate(store, 0, 2, SK_GATE_EXPECTED), SK_BAD_ARGUMENT); /* 0 is whole */
    CHECK_EQ(sk_leaf_gate_of(store, 1), SK_GATE_OPEN);
    CHECK_EQ(sk_leaf_gate(store, 1, 3, SK_GATE_EXPECTED), SK_OK);
    CHECK_EQ(sk_leaf_gate(store, 1, 3, SK_GATE_EXPECTED), SK_OK);
    CHECK_EQ(sk_leaf_gate_of(store, 1), SK_GATE_EXPECTED);
    CHECK_EQ(sk_leaf_residency(store, 1), SK_ABSENT);
    check_answers(store, 1, SK_UNKNOWN);
    CHECK_EQ(sk_clear(store, N, 0, LEAVES, 0), SK_UNKNOWN);
    CHECK_EQ(sk_clear(store, N, 0, LEAVES, SK_BLIND), SK_UNKNOWN);
    CHECK_EQ(sk_clear(store, N, 0, 1, 0), SK_OK);
    CHECK(sk_timers_due(store, W, 0, LEAVES, INT64_MAX, 0, &buf) > 0); /* of the others */
    CHECK(sk_sweep(store, UINT64_MAX) >= 0);
    CHECK(sk_evict(store, 100) >= 0);
    CHECK_EQ(sk_leaf_pick(store, 1, N, &(sk_column){SK_COL_VAR32, 0, "", "\0\0\0\0", 0}, 0, &buf),
             -SK_UNKNOWN);
    CHECK_EQ(sk_snapshot_open(store, NULL, 0, &snapshot), SK_OK);
    CHECK_EQ(sk_snapshot_residency(snapshot, 1), SK_ABSENT);
    sk_snapshot_close(snapshot);
    sk_stats stats = leaf_stats(store, 1);
    CHECK_EQ(stats.leaves[SK_ABSENT], 1);
    CHECK_EQ(stats.entries + stats.tombstones + stats.bytes, 0);
    CHECK_EQ(sk_leaf_gate_of(store, 1), SK_GATE_EXPECTED);
    /* An away leaf becomes expected in one step: there is no moment in which it accepts a write. */
    CHECK_EQ(sk_leaf_mark(store, 3, 4, SK_AWAY), SK_OK);
    CHECK_EQ(sk_leaf_gate(store, 3, 4, SK_GATE_EXPECTED), SK_OK);
    CHECK_EQ(sk_leaf_residency(store, 3), SK_ABSENT);
    check_answers(store, 3, SK_UNKNOWN);
    sk_buf_free(&buf);
    sk_close(store);
}

static void test_whatever_comes_opens_an_expected_leaf(void) {
    sk_store *store = open_filled(), *target = open_filled();
    sk_buf all = {0};
    CHECK(sk_leaf_encode(store, 1, SK_ALL_STATES, 0, &all) > 0);
    util_key key = key_in(1, 0);
    int64_t value = 9;
    for (int mode = SK_REPLACE; mode <= SK_OVER; mode++)
        for (int is_empty = 0; is_empty < 2; is_empty++) {
            CHECK_EQ(sk_leaf_mark(target, 1, 2, SK_ABSENT), SK_OK);
            CHECK_EQ(sk_leaf_gate(target, 1, 2, SK_GATE_EXPECTED), SK_OK);
            CHECK_EQ(sk_leaf_decode(target, 1, all.data, all.len - 8, mode), SK_CORRUPT);
            CHECK_EQ(sk_leaf_gate_of(target, 1), SK_GATE_EXPECTED);
            CHECK_EQ(sk_leaf_decode(target, 1, all.data, is_empty ? 0 : all.len, mode), SK_OK);
            CHECK_EQ(sk_leaf_gate_of(target, 1), SK_GATE_OPEN);
            bool is_all = mode == SK_REPLACE || mode == SK_UNDER_ALL;
            CHECK_EQ(sk_leaf_residency(target, 1), is_all     ? SK_WHOLE
                                                   : is_empty ? SK_ABSENT
                                                              : SK_PARTIAL);
            if (!is_empty && is_all) check_encodes(target, 1, 0, &all);
            CHECK_EQ(sk_i64_put(target, N, key.data, key.len, 1), SK_OK);
        }
    for (int is_there = 0; is_there < 2; is_there++) {
        CHECK_EQ(sk_leaf_mark(target, 1, 2, SK_ABSENT), SK_OK);
        CHECK_EQ(sk_leaf_gate(target, 1, 2, SK_GATE_EXPECTED), SK_OK);
        CHECK_EQ(sk_install(target, N, key.data, key.len, key.data, 7, SK_NO_TIME), SK_BAD_VALUE);
        CHECK_EQ(sk_leaf_gate_of(target, 1), SK_GATE_EXPECTED);
        CHECK_EQ(sk_install(target, N, key.data, key.len, is_there ? (uint8_t *)&value : NULL, 8,
                            SK_NO_TIME),
                 SK_OK);
        CHECK_EQ(sk_leaf_gate_of(target, 1), SK_GATE_OPEN);
        CHECK_EQ(sk_leaf_residency(target, 1), SK_PARTIAL);
        CHECK_EQ(sk_contains(target, N, key.data, key.len), is_there ? SK_OK : SK_MISSING);
        CHECK_EQ(leaf_stats(target, 1).dirty, 0);
    }
    for (int residency = SK_WHOLE; residency <= SK_AWAY; residency++) {
        CHECK_EQ(sk_leaf_mark(target, 1, 2, SK_ABSENT), SK_OK);
        CHECK_EQ(sk_leaf_gate(target, 1, 2, SK_GATE_EXPECTED), SK_OK);
        CHECK_EQ(sk_leaf_mark(target, 1, 2, residency), SK_OK);
        CHECK_EQ(sk_leaf_gate_of(target, 1), SK_GATE_OPEN);
        CHECK_EQ(sk_leaf_residency(target, 1), residency);
    }
    sk_buf_free(&all);
    sk_close(store);
    sk_close(target);
}

static void test_expected_leaf_stays_so_where_it_is_shut_or_moved(void) {
    sk_store *store = open_filled(), *other = util_open(2, 2);
    sk_leaves *leaves = NULL;
    CHECK_EQ(sk_leaf_mark(store, 1, 2, SK_ABSENT), SK_OK);
    CHECK_EQ(sk_leaf_gate(store, 1, 2, SK_GATE_EXPECTED), SK_OK);
    CHECK_EQ(sk_leaf_gate(store, 1, 2, SK_GATE_SHUT), SK_OK);
    CHECK_EQ(sk_leaf_residency(store, 1), SK_ABSENT);
    CHECK_EQ(sk_leaf_gate(store, 1, 2, SK_GATE_OPEN), SK_OK);
    CHECK_EQ(sk_leaf_gate_of(store, 1), SK_GATE_EXPECTED);
    CHECK_EQ(sk_leaf_gate(store, 1, 2, SK_GATE_SHUT), SK_OK);
    CHECK_EQ(sk_leaf_decode(store, 1, NULL, 0, SK_UNDER), SK_OK); /* counts as having come */
    CHECK_EQ(sk_leaf_gate(store, 1, 2, SK_GATE_OPEN), SK_OK);
    CHECK_EQ(sk_leaf_gate_of(store, 1), SK_GATE_OPEN);
    CHECK_EQ(sk_leaf_gate(store, 1, 2, SK_GATE_SHUT), SK_OK);
    CHECK_EQ(sk_leaf_gate(store, 1, 2, SK_GATE_EXPECTED), SK_OK); /* in one step */
    CHECK_EQ(sk_leaf_gate_of(store, 1), SK_GATE_EXPECTED);
    CHECK_EQ(sk_move(store, other, 1, 2, &leaves), SK_OK);
    CHECK_EQ(sk_leaf_residency(store, 1), SK_AWAY);
    CHECK_EQ(sk_leaf_gate_of(other, 1), SK_GATE_EXPECTED);
    check_answers(other, 1, SK_UNKNOWN);
    CHECK_EQ(sk_leaf_gate(other, 1, 2, SK_GATE_OPEN), SK_OK);
    CHECK_EQ(sk_leaf_gate_of(other, 1), SK_GATE_OPEN);
    sk_close(store);
    sk_close(other);
}

/* If one leaf of a chunk is not open, no record of the chunk may take the short way. */
static void test_batch_over_open_and_guarded_leaves_tells_them_apart(void) {
    for (int gate = SK_GATE_SHUT; gate <= SK_GATE_EXPECTED; gate++) {
        sk_store *store = open_filled();
        uint8_t keys[KEYS * UTIL_KEY_BYTES_MAX], status[KEYS];
        int32_t at[KEYS + 1] = {0};
        int64_t out[KEYS];
        uint32_t leaf[KEYS];
        sk_buf all = {0};
        for (uint32_t k = 0; k < KEYS; k++) {
            util_key key = util_bytes_key(k);
            memcpy(keys + at[k], key.data, key.len);
            at[k + 1] = at[k] + (int32_t)key.len;
            leaf[k] = util_leaf_of("b", &key, 2);
        }
        if (gate == SK_GATE_EXPECTED) CHECK_EQ(sk_leaf_mark(store, 1, 2, SK_ABSENT), SK_OK);
        CHECK_EQ(sk_leaf_gate(store, 1, 2, gate), SK_OK);
        CHECK(sk_leaf_encode(store, 1, SK_ALL_STATES, 0, &all) >= 0);
        sk_batch_args args = {.n = KEYS,
                              .keys = {SK_COL_VAR32, 0, keys, at, sizeof keys},
                              .operand_i64 = 1000,
                              .out = out,
                              .status = status};
        int result = sk_batch(store, N, SK_B_ADD, &args);
        CHECK_EQ(result, gate == SK_GATE_SHUT ? SK_NOT_OWNED : SK_OK);
        for (uint32_t k = 0; k < KEYS; k++) {
            bool is_reached = gate == SK_GATE_EXPECTED || k < args.failed;
            int answer = leaf[k] == 1 ? SK_UNKNOWN : SK_OK;
            CHECK_EQ(status[k], is_reached ? answer : SK_END);
            if (is_reached && answer == SK_OK) CHECK_EQ(out[k], k + 1000);
        }
        if (gate == SK_GATE_SHUT) CHECK_EQ(leaf[args.failed], 1);
        check_encodes(store, 1, 0, &all);
        sk_buf_free(&all);
        sk_close(store);
    }
}

int main(void) {
    RUN(test_shut_leaf_stays_as_it_is_whatever_is_tried);
    RUN(test_sweeping_passes_a_shut_leaf_over_and_ends);
    RUN(test_shutting_takes_all_leaves_of_a_range_or_none);
    RUN(test_snapshot_has_a_leaf_iff_it_was_taken_before_the_leaf_was_shut);
    RUN(test_snapshot_that_is_asked_to_has_shut_leaves_as_they_were);
    RUN(test_shut_leaf_can_be_completed_and_stays_shut);
    RUN(test_write_back_under_way_ends_while_the_leaf_is_shut);
    RUN(test_expected_leaf_answers_unknown_to_every_call);
    RUN(test_whatever_comes_opens_an_expected_leaf);
    RUN(test_expected_leaf_stays_so_where_it_is_shut_or_moved);
    RUN(test_batch_over_open_and_guarded_leaves_tells_them_apart);
    return test_report();
}
