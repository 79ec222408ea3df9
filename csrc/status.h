/*
 * status.h: what a call answers when it cannot do its work.
 *
 * A status is a number that callers compare; the reason is a sentence for people, about the last
 * error of the calling thread. Both are the thread's own: no lock is needed, and no call of another
 * thread gets in between.
 */
#ifndef SK_STATUS_H
#define SK_STATUS_H

#include "statekit.h"

/* Sets the thread's reason (printf style) and returns status. */
int sk_fail(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The one way to call a block bad: the reason names the line that found it. */
#define CORRUPT(...) sk_corrupt(__FILE__, __LINE__, __VA_ARGS__)
int sk_corrupt(const char *file, int line, const char *what, uint64_t where);
/* Sets what sk_value_status says next. Called only where the result of a call does not say it. */
void sk_value_status_set(int status);

#endif
