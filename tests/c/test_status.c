/* test_status.c: names of statuses, and reasons (csrc/status.c). */
#include "store_util.h"

#include <pthread.h>

static void test_statuses_have_names(void) {
    for (int status = SK_OK; status <= SK_OVERRUN; status++) {
        CHECK(strcmp(sk_status_name(status), "no such status") != 0);
        for (int other = 0; other < status; other++)
            CHECK(strcmp(sk_status_name(status), sk_status_name(other)) != 0);
    }
    CHECK_EQ(strcmp(sk_status_name(SK_NOT_OWNED + 1), "no such status"), 0);
    CHECK_EQ(strcmp(sk_status_name(-1), "no such status"), 0);
}

static void *fail_elsewhere(void *store) {
    CHECK_EQ(sk_leaf_residency(store, 77), -SK_BAD_ARGUMENT);
    CHECK(strstr(sk_reason(), "77") != NULL);
    CHECK_EQ(sk_i64_value(store, 5, NULL, 0), INT64_MIN);
    CHECK_EQ(sk_value_status(), SK_BAD_ARGUMENT);
    return NULL;
}

static void test_reason_and_status_are_the_threads_own(void) {
    sk_store *store = util_open(1, 1);
    uint32_t id = util_state(store, "n", SK_I64, "i");
    CHECK_EQ(sk_leaf_residency(store, 33), -SK_BAD_ARGUMENT);
    CHECK_EQ(sk_i64_value(store, id, util_int_key(1).data, 8), INT64_MIN);
    pthread_t thread;
    if (pthread_create(&thread, NULL, fail_elsewhere, store) != 0) abort();
    pthread_join(thread, NULL);
    CHECK(strstr(sk_reason(), "33") != NULL);
    CHECK_EQ(sk_value_status(), SK_MISSING);
    sk_close(store);
}

int main(void) {
    RUN(test_statuses_have_names);
    RUN(test_reason_and_status_are_the_threads_own);
    return test_report();
}
