/* filled_util.h: a store of four leaves with states of five kinds, all filled. */
#ifndef SK_FILLED_UTIL_H
#define SK_FILLED_UTIL_H

#include "store_util.h"

#define LEAVES 4
#define KEYS 200

enum { N, B, L, X, W, STATES }; /* ids: i64, bytes, list, timed i64, timers */

static inline sk_store *open_filled(void) {
    sk_store *store = util_open(2, 2);
    CHECK_EQ(util_state(store, "n", SK_I64, "b"), N);
    CHECK_EQ(util_state(store, "b", SK_BYTES, "b"), B);
    CHECK_EQ(util_state(store, "l", SK_LIST, "b"), L);
    CHECK_EQ(util_timed_state(store, "x", SK_I64, "b", 100, SK_EVENT_TIME, 0), X);
    CHECK_EQ(util_state(store, "w", SK_TIMERS, "b"), W);
    CHECK_EQ(sk_time_set(store, SK_EVENT_TIME, 1000), SK_OK);
    sk_buf buf = {0};
    for (uint32_t k = 0; k < KEYS; k++) {
        util_key key = util_bytes_key(k);
        CHECK_EQ(sk_i64_put(store, N, key.data, key.len, k), SK_OK);
        CHECK_EQ(sk_put(store, B, key.data, key.len, key.data, k % 20), SK_OK);
        CHECK(sk_write(store, L, key.data, key.len, SK_W_APPEND, NULL, 0, "l",
                       (const uint8_t *)"\x07", 1, 0, 0, &buf) >= 0);
        CHECK_EQ(sk_i64_put(store, X, key.data, key.len, k), SK_OK);
        CHECK_EQ(sk_timer_set(store, W, key.data, key.len, k), SK_OK);
    }
    sk_buf_free(&buf);
    return store;
}

#endif
