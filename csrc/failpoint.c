/*
 * failpoint.c: see failpoint.h.
 *
 * A point acts at one visit, the nth after it was set, and is then off again: a program that tries
 * again gets through. The environment variable STATEKIT_C_FAILPOINTS sets points before the first
 * visit: "name=action[@n];...", where action is error, kill, delay:MS or short. Nothing in C writes
 * files, so short does the same as error.
 */
#define _GNU_SOURCE
#include "failpoint.h"

#ifdef SK_TESTING

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { OFF = 0, ERROR = 1, KILL = 2, DELAY = 3, SHORT = 4 };

typedef struct point {
    const char *name;
    int action;
    int64_t visits_left; /* the action happens at the visit that finds 1 here */
    int64_t arg;         /* delay: ms */
    int64_t visits;      /* since the process began */
} point;

#define POINT_OF(id, text) {.name = text},
static point points[] = {SK_FAILPOINTS(POINT_OF)};
static pthread_mutex_t points_lock = PTHREAD_MUTEX_INITIALIZER; /* guards all of them */
static pthread_once_t environment_once = PTHREAD_ONCE_INIT;

static point *find(const char *name, size_t len) {
    for (int i = 0; i < SK_FAILPOINT_COUNT; i++)
        if (strlen(points[i].name) == len && memcmp(points[i].name, name, len) == 0)
            return &points[i];
    return NULL;
}

static int action_of(const char *text, int64_t *arg) {
    if (strncmp(text, "delay:", 6) == 0) {
        *arg = strtoll(text + 6, NULL, 10);
        return DELAY;
    }
    return strncmp(text, "error", 5) == 0   ? ERROR
           : strncmp(text, "kill", 4) == 0  ? KILL
           : strncmp(text, "short", 5) == 0 ? SHORT
                                            : OFF;
}

static void read_environment(void) {
    const char *text = getenv("STATEKIT_C_FAILPOINTS");
    while (text != NULL && *text != 0) {
        size_t len = strcspn(text, ";"), name_len = strcspn(text, "=;");
        point *p = find(text, name_len);
        if (p == NULL || name_len == len) {
            fprintf(stderr, "STATEKIT_C_FAILPOINTS: no such fail point or no action: %.*s\n",
                    (int)len, text);
            abort();
        }
        const char *nth = memchr(text, '@', len);
        p->action = action_of(text + name_len + 1, &p->arg);
        p->visits_left = nth != NULL ? strtoll(nth + 1, NULL, 10) : 1;
        text += len + (text[len] == ';');
    }
}

int sk_failpoint_set(const char *name, int64_t nth, int action, int64_t arg) {
    pthread_once(&environment_once, read_environment);
    point *p = find(name, strlen(name));
    if (p == NULL) return sk_fail(SK_BAD_ARGUMENT, "there is no fail point '%.80s'", name);
    if (action < OFF || action > SHORT || arg < 0 || (action != OFF && nth < 1))
        return sk_fail(SK_BAD_ARGUMENT, "fail point '%.80s': no action %d at visit %lld", name,
                       action, (long long)nth);
    pthread_mutex_lock(&points_lock);
    p->action = action;
    p->visits_left = nth;
    p->arg = arg;
    pthread_mutex_unlock(&points_lock);
    return SK_OK;
}

int sk_failpoint_visit(sk_failpoint id) {
    point *p = &points[id];
    int action = OFF;
    pthread_once(&environment_once, read_environment);
    pthread_mutex_lock(&points_lock);
    p->visits++;
    if (p->action != OFF && p->visits_left-- == 1) {
        action = p->action;
        p->action = OFF;
    }
    struct timespec delay = {p->arg / 1000, p->arg % 1000 * 1000000};
    pthread_mutex_unlock(&points_lock);
    if (action == KILL) raise(SIGKILL);
    if (action == DELAY) nanosleep(&delay, NULL);
    if (action == ERROR || action == SHORT) return sk_fail(SK_NO_MEMORY, "fail point %s", p->name);
    return SK_OK;
}

int64_t sk_failpoint_list(sk_buf *buf) {
    size_t start = buf->len;
    int status = SK_OK;
    pthread_once(&environment_once, read_environment);
    for (int i = 0; i < SK_FAILPOINT_COUNT && status == SK_OK; i++) {
        char line[96];
        pthread_mutex_lock(&points_lock);
        int len =
            snprintf(line, sizeof line, "%s %lld\n", points[i].name, (long long)points[i].visits);
        pthread_mutex_unlock(&points_lock);
        status = sk_buf_put(buf, line, (size_t)len);
    }
    if (status == SK_OK) return (int64_t)(buf->len - start);
    buf->len = start;
    return -status;
}

#else

int sk_failpoint_set(const char *name, int64_t nth, int action, int64_t arg) {
    (void)name, (void)nth, (void)action, (void)arg;
    return SK_OK;
}

int64_t sk_failpoint_list(sk_buf *buf) {
    (void)buf;
    return 0;
}

#endif
