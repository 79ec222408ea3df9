/*
 * test_batch_inner.c: events inside a batch (csrc/batch.c) that cannot be forced from outside: a
 * new array that lies at the address of an older one, a snapshot opened between two steps of
 * locking. This file compiles batch.c and lock.c into itself, with a hook where a leaf's lock is
 * taken.
 */
#define _GNU_SOURCE /* lock.c */
#include "store.h"
#include "store_util.h"

static sk_snapshot **open_at_lock; /* if not NULL, a lock opens a snapshot here, */
static int locks_before;           /* after so many others */

static void hooked_lock(sk_store *store, sk_leaf *leaf) {
    if (open_at_lock != NULL && locks_before-- == 0) {
        CHECK_EQ(sk_snapshot_open(store, NULL, 0, open_at_lock), SK_OK);
        open_at_lock = NULL;
    }
    sk_leaf_lock(leaf);
}

#define sk_leaf_lock(leaf) hooked_lock(store, leaf)
#define sk_lock_wait inner_lock_wait
#define sk_lock_wake inner_lock_wake
#define sk_batch inner_batch
#define sk_pack_keys inner_pack_keys
#define sk_route_keys inner_route_keys
#define sk_leaf_lock_write inner_leaf_lock_write
#define sk_leaf_lock_entries inner_leaf_lock_entries
#define sk_leaf_try_entries inner_leaf_try_entries
#define sk_leaves_lock_write inner_leaves_lock_write
#define sk_leaves_unlock inner_leaves_unlock
#define sk_leaf_list_lock inner_leaf_list_lock
#define sk_leaf_list_unlock inner_leaf_list_unlock
int sk_leaf_lock_write(sk_store *store, uint32_t leaf_no, uint32_t *epoch);
int sk_leaf_lock_entries(sk_store *store, uint32_t leaf_no, uint32_t *epoch, sk_undo **undo);
int sk_leaf_list_lock(sk_store *store, const uint32_t *leaves, uint32_t count, sk_lock_for what,
                      uint32_t *epoch);
#include "../../csrc/batch.c"
#include "../../csrc/lock.c"
#undef sk_leaf_lock
#undef sk_batch
#undef sk_pack_keys
#undef sk_route_keys

static void test_stale_slot_with_the_same_key_is_no_good_guess(void) {
    sk_store *store = util_open(1, 1);
    uint32_t id = util_state(store, "n", SK_I64, "i");
    util_key bytes = util_int_key(5);
    sk_key key = {bytes.data, bytes.len, sk_xxh64(bytes.data, bytes.len, SK_ROUTE_SEED)};
    CHECK_EQ(sk_i64_put(store, id, bytes.data, bytes.len, 1), SK_OK);
    sk_table *table = &sk_state_at(store, id)->tables[0];
    sk_slot *slot = sk_table_find(table, 0, key.hash, key.data, key.len);
    CHECK(is_good_guess(table, slot, &key));
    CHECK(!is_good_guess(table, NULL, &key));
    CHECK(!is_good_guess(table, table->slots - 1, &key));
    CHECK(!is_good_guess(table, table->slots + SK_GROUP, &key));
    uint8_t *tag = &table->tags[slot - table->slots], was = *tag;
    *tag = SK_TAG_EMPTY; /* memory of an older array: it has the key, but the entry is gone */
    CHECK(!is_good_guess(table, slot, &key));
    *tag = SK_TAG_DELETED;
    CHECK(!is_good_guess(table, slot, &key));
    *tag = was;
    sk_close(store);
}

static void test_operations_beyond_32_bits_are_counted(void) {
    sk_store *store = util_open(1, 1);
    uint32_t id = util_state(store, "n", SK_I64, "i");
    sk_state_at(store, id)->tables[0].operations = UINT32_MAX - 1;
    for (int64_t k = 0; k < 5; k++)
        CHECK_EQ(sk_i64_put(store, id, util_int_key(k).data, 8, k), SK_OK);
    CHECK_EQ(util_stats(store, 1).operations, (uint64_t)UINT32_MAX + 4);
    sk_close(store);
}

#define NUMBERS 100

/* Reads and closes a snapshot in which all numbers are 1. */
static void check_ones(sk_snapshot *snapshot) {
    sk_store *copy = util_open(4, 1);
    sk_buf buf = {0};
    uint32_t leaf;
    int64_t n;
    while (sk_snapshot_next(snapshot, &leaf, &buf) > 0) {
        CHECK_EQ(sk_leaf_decode(copy, leaf, buf.data, buf.len, SK_REPLACE), SK_OK);
        buf.len = 0;
    }
    sk_snapshot_close(snapshot);
    for (int64_t k = 0; k < NUMBERS; k++) {
        CHECK_EQ(sk_i64_get(copy, 0, util_int_key(k).data, 8, &n), SK_OK);
        CHECK_EQ(n, 1);
    }
    sk_buf_free(&buf);
    sk_close(copy);
}

/* The batch has served all snapshots, then a new one is opened, then the batch locks the leaves. It
 * must look for snapshots again, or the new one would not see the leaves as they were. An older
 * snapshot may be open too, for which the leaves have logs; the logs are not for the new one. */
static void check_opened_at_lock(int nth, bool is_older_open) {
    sk_store *store = util_open(4, 1);
    uint32_t id = util_state(store, "n", SK_I64, "i");
    int64_t numbers[NUMBERS], n;
    uint8_t status[NUMBERS];
    for (int64_t k = 0; k < NUMBERS; k++) {
        numbers[k] = k;
        CHECK_EQ(sk_i64_put(store, id, util_int_key(k).data, 8, 1), SK_OK);
    }
    sk_snapshot *older = NULL, *snapshot = NULL;
    if (is_older_open) CHECK_EQ(sk_snapshot_open(store, NULL, 0, &older), SK_OK);
    sk_batch_args args = {.n = NUMBERS,
                          .keys = {SK_COL_I64, 0, numbers, NULL, sizeof numbers},
                          .operand_i64 = 1,
                          .status = status};
    open_at_lock = &snapshot;
    locks_before = nth;
    CHECK_EQ(inner_batch(store, id, SK_B_ADD, &args), SK_OK);
    CHECK(snapshot != NULL);
    if (snapshot == NULL) abort();
    for (int64_t k = 0; k < NUMBERS; k++) {
        CHECK_EQ(sk_i64_get(store, id, util_int_key(k).data, 8, &n), SK_OK);
        CHECK_EQ(n, 2);
    }
    check_ones(snapshot);
    if (is_older_open) check_ones(older);
    sk_close(store);
}

static void test_snapshot_opened_while_a_batch_locks_does_not_see_it(void) {
    for (int nth = 0; nth < 4; nth++) check_opened_at_lock(nth, false);
    /* once to open a log for each leaf, and once all together */
    for (int nth = 0; nth < 8; nth++) check_opened_at_lock(nth, true);
}

int main(void) {
    RUN(test_snapshot_opened_while_a_batch_locks_does_not_see_it);
    RUN(test_operations_beyond_32_bits_are_counted);
    RUN(test_stale_slot_with_the_same_key_is_no_good_guess);
    return test_report();
}
