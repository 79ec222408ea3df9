/* status.c: see status.h. */
#include "status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char reason[256];
static _Thread_local int value_status;

int sk_value_status(void) { return value_status; }
void sk_value_status_set(int status) { value_status = status; }

int sk_fail(int status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(reason, sizeof reason, format, args);
    va_end(args);
    return status;
}

int sk_corrupt(const char *file, int line, const char *what, uint64_t where) {
    const char *slash = strrchr(file, '/');
    return sk_fail(SK_CORRUPT, "%s %llu (%s:%d)", what, (unsigned long long)where,
                   slash != NULL ? slash + 1 : file, line);
}

const char *sk_reason(void) { return reason; }

const char *sk_status_name(int status) {
    static const char *const names[] = {
        "ok",       "missing",   "unknown",  "changed",  "end",          "no memory", "limit",
        "bad key",  "bad value", "bad path", "bad kind", "bad argument", "overflow",  "too large",
        "too deep", "corrupt",   "schema",   "occupied", "overrun",      "not owned"};
    int count = (int)(sizeof names / sizeof names[0]);
    return status >= 0 && status < count ? names[status] : "no such status";
}
