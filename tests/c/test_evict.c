/* test_evict.c: what is dropped to make room, and what stays (csrc/evict.c). */
#include "store_util.h"

#define LEAVES 8

static void test_eviction_takes_cold_clean_entries_in_clock_order(void) {
    sk_store *store = util_open(1, 1);
    uint32_t id = util_state(store, "b", SK_BYTES, "i");
    uint8_t value[1000] = {0};
    sk_buf buf = {0};
    for (int64_t k = 0; k < 100; k++)
        CHECK_EQ(sk_put(store, id, util_int_key(k).data, 8, value, sizeof value), SK_OK);
    CHECK_EQ(sk_evict(store, 1 << 20), 0); /* all dirty */
    CHECK_EQ(sk_leaf_residency(store, 0), SK_WHOLE);
    CHECK(sk_dirty_take(store, 0, 0, &buf) > 0);
    CHECK_EQ(sk_evict(store, 1 << 20), 0); /* all being written */
    CHECK_EQ(sk_dirty_done(store, 0, 1), SK_OK);
    CHECK(sk_evict(store, 1) >= 1000); /* clears all marks, then drops one */
    CHECK_EQ(util_stats(store, 1).entries, 99);
    CHECK_EQ(sk_leaf_residency(store, 0), SK_PARTIAL);
    /* Entries that are used now stay when half of the rest is dropped. */
    int hot = 0;
    for (int64_t k = 0; k < 100; k += 2)
        hot += sk_contains(store, id, util_int_key(k).data, 8) == SK_OK;
    CHECK(sk_evict(store, 25 * 1000) >= 25 * 1000);
    int kept = 0, cold = 0;
    sk_stats stats = util_stats(store, 1);
    CHECK(stats.entries >= 70 && stats.entries <= 75);
    for (int64_t k = 0; k < 100; k++) {
        bool is_here = sk_contains(store, id, util_int_key(k).data, 8) == SK_OK;
        *(k % 2 == 0 ? &kept : &cold) += is_here;
    }
    CHECK_EQ(kept, hot);
    CHECK(cold < 30);
    CHECK(sk_evict(store, UINT64_MAX) > 0); /* two rounds empty it */
    CHECK_EQ(util_stats(store, 1).entries, 0);
    CHECK(sk_bytes_used(store) < 4096);
    CHECK_EQ(sk_evict(store, UINT64_MAX), 0);
    CHECK_EQ(sk_evict(store, 0), 0);
    sk_buf_free(&buf);
    sk_close(store);
}

/* Evicting numbers gives memory back only by making their array smaller. There must be memory for
 * that smaller array even at the limit, because that is when entries are evicted. */
static void test_eviction_makes_room_at_the_memory_limit(void) {
    sk_store *store = util_open(1, 1);
    uint32_t id = util_state(store, "n", SK_I64, "i"),
             other = util_state(store, "b", SK_BYTES, "i");
    sk_buf buf = {0};
    for (int64_t k = 0; k < 5000; k++)
        CHECK_EQ(sk_i64_put(store, id, util_int_key(k).data, 8, k), SK_OK);
    CHECK(sk_dirty_take(store, 0, 0, &buf) > 0);
    CHECK_EQ(sk_dirty_done(store, 0, 1), SK_OK);
    CHECK_EQ(sk_bytes_limit(store, sk_bytes_used(store) + 100), SK_OK);
    uint8_t value[5000] = {0};
    CHECK_EQ(sk_put(store, other, util_int_key(1).data, 8, value, sizeof value), SK_LIMIT);
    CHECK(sk_evict(store, 10000) >= 10000);
    CHECK_EQ(sk_put(store, other, util_int_key(1).data, 8, value, sizeof value), SK_OK);
    sk_buf_free(&buf);
    sk_close(store);
}

int main(void) {
    RUN(test_eviction_takes_cold_clean_entries_in_clock_order);
    RUN(test_eviction_makes_room_at_the_memory_limit);
    return test_report();
}
