/*
 * test_threads_lock.c: the lock of a leaf (csrc/lock.h) keeps other threads out and wakes those
 * that wait. Run it under ThreadSanitizer, too: `make sanitize`. The oracle is plain variables,
 * which lose counts if two threads hold the lock at once.
 */
#include "lock.h"
#include "test.h"

#include <pthread.h>
#include <sched.h>

#define THREADS 6
#define ROUNDS 20000

static struct {
    sk_lock lock;
    int64_t count;  /* under the lock */
    int inside;     /* under the lock: threads that hold it */
    int64_t slept;  /* under the lock: how often somebody was (nearly) asleep */
    int64_t failed; /* under the lock */
} shared;

static void *count_up(void *arg) {
    for (int i = 0; i < ROUNDS; i++) {
        sk_lock_take(&shared.lock);
        shared.failed += shared.inside++ != 0;
        shared.count++;
        if (i % 64 == 0) sched_yield(); /* with the lock held, so that others wait */
        shared.slept += shared.lock.state == 2;
        shared.inside--;
        sk_lock_give(&shared.lock);
    }
    return arg;
}

static void test_one_thread_is_in_at_a_time_and_nobody_sleeps_for_ever(void) {
    pthread_t threads[THREADS];
    for (int round = 0; round < 5 || (shared.slept == 0 && round < 1000); round++) {
        int64_t before = shared.count;
        for (int i = 0; i < THREADS; i++)
            CHECK_EQ(pthread_create(&threads[i], NULL, count_up, NULL), 0);
        for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
        CHECK_EQ(shared.count, before + (int64_t)THREADS * ROUNDS);
    }
    CHECK_EQ(shared.failed, 0);
    CHECK_EQ(shared.lock.state, 0); /* free again */
    CHECK(shared.slept > 0);
}

int main(void) {
    RUN(test_one_thread_is_in_at_a_time_and_nobody_sleeps_for_ever);
    return test_report();
}
