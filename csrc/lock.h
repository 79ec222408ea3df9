/*
 * lock.h: the lock of a leaf: 4 bytes, and zero is a free one.
 *
 * A store has thousands of leaves, most of them idle. A pthread mutex has 40 bytes and must be
 * initialised, so the leaves of an empty store would cost more than all else in it. This lock lies
 * in an untouched zero page until it is first taken. It is also inlined. So when nobody else holds
 * the lock, which is nearly always, taking it needs half the time of a call.
 *
 *     0 free        1 held        2 held, and somebody may be asleep waiting for it
 *
 * (U. Drepper, "Futexes are tricky", the second mutex there.) A thread that releases a lock in
 * state 2 wakes one sleeper. The sleeper takes the lock as 2, because it cannot know whether others
 * still sleep. Like a pthread mutex, the lock is neither fair nor recursive.
 */
#ifndef SK_LOCK_H
#define SK_LOCK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct sk_lock {
    _Atomic uint32_t state;
} sk_lock;

void sk_lock_wait(sk_lock *lock); /* takes a lock that was not free just now */
void sk_lock_wake(sk_lock *lock); /* wakes one of the threads that wait */

static inline void sk_lock_take(sk_lock *lock) {
    uint32_t none = 0;
    if (__builtin_expect(!atomic_compare_exchange_strong_explicit(
                             &lock->state, &none, 1, memory_order_acquire, memory_order_relaxed),
                         0))
        sk_lock_wait(lock);
}

/* Takes the lock if it is free now; false if it is not. Never waits. */
static inline bool sk_lock_try(sk_lock *lock) {
    uint32_t none = 0;
    return atomic_compare_exchange_strong_explicit(&lock->state, &none, 1, memory_order_acquire,
                                                   memory_order_relaxed);
}

static inline void sk_lock_give(sk_lock *lock) {
    if (__builtin_expect(atomic_exchange_explicit(&lock->state, 0, memory_order_release) == 2, 0))
        sk_lock_wake(lock);
}

#endif
