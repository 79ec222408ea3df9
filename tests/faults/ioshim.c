/* I/O shim: counts, fails, cuts short, kills at and logs the file system calls of a process.
 *
 * Loaded with LD_PRELOAD, so its functions come before libc's. Only calls on paths at or below the
 * watched directory count; all others go straight to the kernel. The process controls it through
 * the shim_* functions at the end (ctypes; see shim.py).
 *
 *     shim_watch("/tmp/x")                        what counts from now on
 *     shim_arm(mask, nth, action, error, delay)   the nth of these calls does not go well
 *     shim_log_start(), shim_mark("done 7")       what happened, and when the program said what
 *
 * The real calls are raw system calls: no dlsym, nothing of libc runs twice, and 64-bit Linux on
 * any processor has them (the *at family only). One lock is held from the decision over the call
 * to the log entry, so the log's order is the order in which things happened. Exceptions are
 * flock, which may block, and the sleep of a delay.
 *
 * A file is known by its inode number, taken when it is opened. The number of a file that is open
 * is not used again, and `created` in the log says when one begins to mean another file.
 *
 * fork: the child starts with counters at 0, an empty log and nothing armed, and the same watch.
 * Not seen: stdio of C (libc calls itself), io_uring, stores through a shared mapping (the mmap is
 * logged, so that a reader of the log can refuse it), descriptors received over sockets.
 *
 * A log entry is struct entry, then path, second path and data, padded to a multiple of 8.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define PUBLIC __attribute__((visibility("default")))
#define FD_MAX 65536 /* descriptors from here on are not seen */
#define RULE_MAX 8
#define LOG_BYTES_MIN 65536

/* A list reads better in lines of words. */
/* clang-format off */
#define CALLS(X)                                                                                   \
    X(open) X(close) X(write) X(pwrite) X(writev) X(pwritev) X(read) X(pread) X(fsync)             \
    X(fdatasync) X(sync_file_range) X(rename) X(link) X(unlink) X(rmdir) X(truncate)               \
    X(fallocate) X(mkdir) X(mmap) X(msync) X(flock) X(copy) X(mark)
/* clang-format on */

enum call {
#define X(name) CALL_##name,
    CALLS(X)
#undef X
        CALL_COUNT
};

static const char *const call_names[] = {
#define X(name) #name,
    CALLS(X)
#undef X
};

enum action {
    ACTION_FAIL = 1,         /* errno at the nth call */
    ACTION_FAIL_FOREVER = 2, /* from the nth call on */
    ACTION_SHORT = 3,        /* half is written; the next such call fails with ENOSPC */
    ACTION_KILL = 4,         /* SIGKILL before the call */
    ACTION_KILL_AFTER = 5,   /* SIGKILL after it */
    ACTION_KILL_HALF = 6,    /* SIGKILL when half is written (other calls: before) */
    ACTION_DELAY = 7,        /* sleep, then go on */
};

enum entry_flag {
    FLAG_CREATED = 1,   /* open made the file */
    FLAG_DIRECTORY = 2, /* it is one */
    FLAG_TRUNCATED = 4, /* open made it empty */
    FLAG_UNNAMED = 8,   /* O_TMPFILE */
    FLAG_INJECTED = 16, /* the shim failed or shortened this */
};

struct entry {
    uint32_t size; /* of the whole entry */
    uint16_t call;
    uint16_t flags;
    int32_t fd;     /* -1: none */
    int32_t error;  /* errno, 0: it worked */
    uint64_t inode; /* of the file; for link and rename of what gets the new name */
    int64_t offset; /* of a write, or -1 */
    uint64_t length;
    int64_t result;
    int64_t argument; /* flags of open, mmap (prot << 32 | flags), mode of fallocate ... */
    uint32_t thread;
    uint32_t path_size;
    uint32_t path2_size;
    uint32_t zero;
    uint64_t data_size;
};

struct rule {
    uint64_t mask; /* of calls, 0: free */
    int64_t nth;
    int64_t seen;
    int64_t delay_us;
    int action;
    int error;
};

struct file {
    char *path; /* NULL: not watched */
    uint64_t inode;
    int is_directory;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char watched[PATH_MAX];
static size_t watched_size; /* 0: nothing is watched */
static struct file files[FD_MAX];
static int64_t counts[CALL_COUNT];
static struct rule rules[RULE_MAX];
static int is_logging;
static uint8_t *log_bytes;
static size_t log_size, log_capacity;

/* ---- paths ---------------------------------------------------------------------------------- */

/* Absolute, without empty, "." and ".." parts; links in it are not followed. */
static int resolve(int dirfd, const char *path, char *out) {
    char whole[2 * PATH_MAX];
    int length;
    if (path[0] == '/') {
        length = snprintf(whole, sizeof whole, "%s", path);
    } else {
        char base[PATH_MAX];
        ssize_t got;
        if (dirfd == AT_FDCWD) {
            got = syscall(SYS_getcwd, base, sizeof base) < 0 ? -1 : (ssize_t)strlen(base);
        } else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd);
            got = syscall(SYS_readlinkat, AT_FDCWD, link, base, sizeof base - 1);
        }
        if (got < 0) return 0;
        base[got] = 0;
        length = snprintf(whole, sizeof whole, "%s/%s", base, path);
    }
    if (length < 0 || (size_t)length >= sizeof whole) return 0;
    size_t at = 0;
    for (const char *part = whole; *part;) {
        while (*part == '/') part++;
        size_t size = strcspn(part, "/");
        if (size == 2 && part[0] == '.' && part[1] == '.') {
            while (at > 0 && out[--at] != '/') {
            }
        } else if (size > 0 && !(size == 1 && part[0] == '.')) {
            if (at + size + 2 > PATH_MAX) return 0;
            out[at++] = '/';
            memcpy(out + at, part, size);
            at += size;
        }
        part += size;
    }
    if (at == 0) out[at++] = '/';
    out[at] = 0;
    return 1;
}

static int is_below(const char *path) {
    return watched_size > 0 && strncmp(path, watched, watched_size) == 0 &&
           (path[watched_size] == '/' || path[watched_size] == 0);
}

/* Whether calls on this path count; out is its absolute form. */
static int is_watched(int dirfd, const char *path, char *out) {
    out[0] = 0;
    return watched_size > 0 && path && resolve(dirfd, path, out) && is_below(out);
}

static struct file *file_of(int fd) {
    return fd >= 0 && fd < FD_MAX && files[fd].path ? &files[fd] : NULL;
}

static void forget(int fd) {
    if (!file_of(fd)) return;
    free(files[fd].path);
    files[fd] = (struct file){0};
}

/* ---- decisions ------------------------------------------------------------------------------ */

enum verdict { GO, GO_KILL, FAIL, HALF, HALF_KILL };

static void die(void) {
    syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    for (;;) pause();
}

static int is_write(int call) {
    return call == CALL_write || call == CALL_pwrite || call == CALL_writev ||
           call == CALL_pwritev || call == CALL_copy;
}

/* Counts a call and says what becomes of it. The lock is held. errno is set for FAIL. */
static enum verdict decide(int call) {
    enum verdict verdict = GO;
    counts[call]++;
    for (int at = 0; at < RULE_MAX; at++) {
        struct rule *rule = &rules[at];
        if (!(rule->mask >> call & 1)) continue;
        rule->seen++;
        if (rule->seen < rule->nth) continue;
        if (rule->seen > rule->nth && rule->action != ACTION_FAIL_FOREVER) continue;
        switch (rule->action) {
        case ACTION_FAIL:
        case ACTION_FAIL_FOREVER:
            errno = rule->error;
            return FAIL;
        case ACTION_SHORT:
            /* Half now; the same rule fails the next one. */
            rule->action = ACTION_FAIL;
            rule->error = ENOSPC;
            rule->nth++;
            if (is_write(call)) {
                verdict = HALF;
            } else {
                rule->nth--; /* nothing to halve: this is the one that fails */
                errno = ENOSPC;
                return FAIL;
            }
            break;
        case ACTION_KILL:
            die();
            break;
        case ACTION_KILL_AFTER:
            verdict = GO_KILL;
            break;
        case ACTION_KILL_HALF:
            if (!is_write(call)) die();
            verdict = HALF_KILL;
            break;
        case ACTION_DELAY: {
            struct timespec span = {rule->delay_us / 1000000, rule->delay_us % 1000000 * 1000};
            pthread_mutex_unlock(&lock);
            nanosleep(&span, NULL);
            pthread_mutex_lock(&lock);
            break;
        }
        }
    }
    return verdict;
}

static void finish(enum verdict verdict) {
    if (verdict == GO_KILL || verdict == HALF_KILL) die();
}

/* ---- the log -------------------------------------------------------------------------------- */

static uint8_t *log_room(size_t size) {
    if (log_size + size > log_capacity) {
        size_t capacity = log_capacity ? log_capacity : LOG_BYTES_MIN;
        while (capacity < log_size + size) capacity *= 2;
        uint8_t *bytes = realloc(log_bytes, capacity);
        if (!bytes) abort(); /* a log with gaps would prove wrong things */
        log_bytes = bytes;
        log_capacity = capacity;
    }
    uint8_t *room = log_bytes + log_size;
    log_size += size;
    return room;
}

/* data may be NULL: then data_size bytes are left for the caller, who gets their place. */
static uint8_t *record(struct entry entry, const char *path, const char *path2, const void *data,
                       size_t data_size) {
    if (!is_logging) return NULL;
    int error = errno;
    entry.thread = (uint32_t)syscall(SYS_gettid);
    entry.path_size = path ? (uint32_t)strlen(path) : 0;
    entry.path2_size = path2 ? (uint32_t)strlen(path2) : 0;
    entry.data_size = data_size;
    size_t size = sizeof entry + entry.path_size + entry.path2_size + data_size;
    size_t padded = (size + 7) & ~(size_t)7;
    if (padded > UINT32_MAX) abort();
    entry.size = (uint32_t)padded;
    uint8_t *at = log_room(padded);
    memset(at + size, 0, padded - size);
    memcpy(at, &entry, sizeof entry);
    at += sizeof entry;
    if (entry.path_size) memcpy(at, path, entry.path_size);
    at += entry.path_size;
    if (entry.path2_size) memcpy(at, path2, entry.path2_size);
    at += entry.path2_size;
    if (data && data_size) memcpy(at, data, data_size);
    errno = error;
    return at;
}

static struct entry entry_of(int call, int fd, enum verdict verdict, int64_t result) {
    struct entry entry = {.call = (uint16_t)call, .fd = fd, .offset = -1, .result = result};
    entry.error = result < 0 ? errno : 0;
    if (verdict == FAIL || verdict == HALF || verdict == HALF_KILL) entry.flags = FLAG_INJECTED;
    struct file *file = file_of(fd);
    if (file) {
        entry.inode = file->inode;
        if (file->is_directory) entry.flags |= FLAG_DIRECTORY;
    }
    return entry;
}

/* A call without data on an open file: CODE makes it. The descriptor is checked without the lock:
 * who closes a file that another thread uses has a bug that no shim can make better. */
#define ON_FILE(NAME, FD, LENGTH, ARGUMENT, CODE)                                                  \
    do {                                                                                           \
        if (!file_of(FD)) return CODE;                                                             \
        pthread_mutex_lock(&lock);                                                                 \
        enum verdict verdict = decide(CALL_##NAME);                                                \
        long result = verdict == FAIL ? -1 : CODE;                                                 \
        int error = errno;                                                                         \
        struct entry entry = entry_of(CALL_##NAME, FD, verdict, result);                           \
        entry.length = (uint64_t)(LENGTH);                                                         \
        entry.argument = (int64_t)(ARGUMENT);                                                      \
        record(entry, file_of(FD) ? file_of(FD)->path : NULL, NULL, NULL, 0);                      \
        finish(verdict);                                                                           \
        pthread_mutex_unlock(&lock);                                                               \
        errno = error;                                                                             \
        return result;                                                                             \
    } while (0)

/* ---- open and close ------------------------------------------------------------------------- */

static int open_file(int dirfd, const char *path, int flags, mode_t mode) {
    char whole[PATH_MAX];
    if (!is_watched(dirfd, path, whole)) return (int)syscall(SYS_openat, dirfd, path, flags, mode);
    pthread_mutex_lock(&lock);
    enum verdict verdict = decide(CALL_open);
    int is_unnamed = (flags & O_TMPFILE) == O_TMPFILE;
    int error = errno;
    int was_there = syscall(SYS_faccessat, AT_FDCWD, whole, F_OK, 0) == 0;
    errno = error;
    int fd = verdict == FAIL ? -1 : (int)syscall(SYS_openat, dirfd, path, flags, mode);
    error = errno;
    struct stat status = {0};
    if (fd >= 0 && fd < FD_MAX && fstat(fd, &status) == 0) {
        forget(fd);
        files[fd] = (struct file){strdup(whole), status.st_ino, S_ISDIR(status.st_mode)};
    }
    errno = error;
    struct entry entry = entry_of(CALL_open, fd, verdict, fd);
    entry.argument = flags;
    if (fd >= 0) {
        if (is_unnamed)
            entry.flags |= FLAG_CREATED | FLAG_UNNAMED;
        else if ((flags & O_CREAT) && !was_there)
            entry.flags |= FLAG_CREATED;
        else if (flags & O_TRUNC)
            entry.flags |= FLAG_TRUNCATED;
    }
    record(entry, whole, NULL, NULL, 0);
    finish(verdict);
    pthread_mutex_unlock(&lock);
    errno = error;
    return fd;
}

#define MODE_OF(FLAGS, MODE)                                                                       \
    mode_t MODE = 0;                                                                               \
    if ((FLAGS) & (O_CREAT | __O_TMPFILE)) {                                                       \
        va_list arguments;                                                                         \
        va_start(arguments, FLAGS);                                                                \
        MODE = va_arg(arguments, mode_t);                                                          \
        va_end(arguments);                                                                         \
    }

PUBLIC int open(const char *path, int flags, ...) {
    MODE_OF(flags, mode);
    return open_file(AT_FDCWD, path, flags, mode);
}

PUBLIC int open64(const char *path, int flags, ...) {
    MODE_OF(flags, mode);
    return open_file(AT_FDCWD, path, flags, mode);
}

PUBLIC int openat(int dirfd, const char *path, int flags, ...) {
    MODE_OF(flags, mode);
    return open_file(dirfd, path, flags, mode);
}

PUBLIC int openat64(int dirfd, const char *path, int flags, ...) {
    MODE_OF(flags, mode);
    return open_file(dirfd, path, flags, mode);
}

PUBLIC int creat(const char *path, mode_t mode) {
    return open_file(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}

PUBLIC int creat64(const char *path, mode_t mode) { return creat(path, mode); }

/* What a compiler with _FORTIFY_SOURCE calls instead. */
PUBLIC int __open_2(const char *path, int flags) { return open_file(AT_FDCWD, path, flags, 0); }
PUBLIC int __open64_2(const char *path, int flags) { return open_file(AT_FDCWD, path, flags, 0); }
PUBLIC int __openat_2(int at, const char *path, int flags) { return open_file(at, path, flags, 0); }
PUBLIC int __openat64_2(int at, const char *path, int flags) {
    return open_file(at, path, flags, 0);
}

PUBLIC int close(int fd) {
    if (!file_of(fd)) return (int)syscall(SYS_close, fd);
    pthread_mutex_lock(&lock);
    enum verdict verdict = decide(CALL_close);
    /* Linux closes the descriptor even if close reports an error, so a failed one is closed too. */
    int error = errno;
    struct entry entry = entry_of(CALL_close, fd, verdict, 0);
    int result = (int)syscall(SYS_close, fd);
    if (verdict == FAIL)
        result = -1;
    else
        error = errno;
    entry.result = result;
    entry.error = result < 0 ? error : 0;
    record(entry, files[fd].path, NULL, NULL, 0);
    forget(fd);
    finish(verdict);
    pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

static int copied(int from, int to) {
    if (to >= 0 && to < FD_MAX && to != from) {
        pthread_mutex_lock(&lock);
        int error = errno;
        forget(to);
        struct file *file = file_of(from);
        if (file) {
            files[to] = *file;
            files[to].path = strdup(file->path);
        }
        errno = error;
        pthread_mutex_unlock(&lock);
    }
    return to;
}

PUBLIC int dup(int fd) { return copied(fd, (int)syscall(SYS_dup, fd)); }
PUBLIC int dup2(int fd, int to) {
    if (fd == to) return (int)syscall(SYS_fcntl, fd, F_GETFD) < 0 ? -1 : fd;
    return copied(fd, (int)syscall(SYS_dup3, fd, to, 0));
}
PUBLIC int dup3(int fd, int to, int flags) {
    return copied(fd, (int)syscall(SYS_dup3, fd, to, flags));
}

static int control(int fd, int command, void *argument) {
    int result = (int)syscall(SYS_fcntl, fd, command, argument);
    return command == F_DUPFD || command == F_DUPFD_CLOEXEC ? copied(fd, result) : result;
}

PUBLIC int fcntl(int fd, int command, ...) {
    va_list arguments;
    va_start(arguments, command);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    return control(fd, command, argument);
}

PUBLIC int fcntl64(int fd, int command, ...) {
    va_list arguments;
    va_start(arguments, command);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    return control(fd, command, argument);
}

/* ---- writing -------------------------------------------------------------------------------- */

static size_t total(const struct iovec *parts, int count) {
    size_t size = 0;
    for (int at = 0; at < count; at++) size += parts[at].iov_len;
    return size;
}

static ssize_t write_raw(int fd, const struct iovec *parts, int count, int64_t offset) {
    if (offset < 0) return syscall(SYS_writev, fd, parts, count);
    return syscall(SYS_pwritev, fd, parts, (long)count, (long)offset, 0L);
}

/* All forms of write. offset -1: where the file stands. */
static ssize_t write_file(int call, int fd, const struct iovec *parts, int count, int64_t offset) {
    if (!file_of(fd)) return write_raw(fd, parts, count, offset);
    pthread_mutex_lock(&lock);
    enum verdict verdict = decide(call);
    int error = errno;
    size_t wanted = total(parts, count);
    int64_t place = offset;
    if (syscall(SYS_fcntl, fd, F_GETFL) & O_APPEND) {
        struct stat status = {0};
        fstat(fd, &status);
        place = status.st_size;
    } else if (offset < 0) {
        place = syscall(SYS_lseek, fd, 0L, SEEK_CUR);
    }
    ssize_t result = -1;
    if (verdict == GO || verdict == GO_KILL) {
        result = write_raw(fd, parts, count, offset);
        error = errno;
    } else if (verdict == HALF || verdict == HALF_KILL) {
        size_t left = wanted / 2, at = 0;
        struct iovec *half = calloc((size_t)count + 1, sizeof *half);
        for (; at < (size_t)count && left > 0; at++) {
            half[at] = parts[at];
            if (half[at].iov_len > left) half[at].iov_len = left;
            left -= half[at].iov_len;
        }
        result = wanted < 2 ? 0 : write_raw(fd, half, (int)at, offset);
        error = errno;
        free(half);
        if (wanted < 2 && verdict == HALF) {
            result = -1;
            error = ENOSPC;
        }
    }
    errno = error;
    struct entry entry = entry_of(call, fd, verdict, result);
    entry.offset = place;
    entry.length = wanted;
    uint8_t *data = record(entry, files[fd].path, NULL, NULL, result > 0 ? (size_t)result : 0);
    size_t left = result > 0 ? (size_t)result : 0;
    for (int at = 0; data && left > 0; at++) {
        size_t size = parts[at].iov_len < left ? parts[at].iov_len : left;
        memcpy(data, parts[at].iov_base, size);
        data += size;
        left -= size;
    }
    finish(verdict);
    pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

PUBLIC ssize_t write(int fd, const void *bytes, size_t size) {
    if (!file_of(fd)) return syscall(SYS_write, fd, bytes, size);
    struct iovec part = {(void *)bytes, size};
    return write_file(CALL_write, fd, &part, 1, -1);
}

PUBLIC ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t offset) {
    struct iovec part = {(void *)bytes, size};
    return write_file(CALL_pwrite, fd, &part, 1, offset);
}

PUBLIC ssize_t pwrite(int fd, const void *bytes, size_t size, off_t offset) {
    return pwrite64(fd, bytes, size, offset);
}

PUBLIC ssize_t writev(int fd, const struct iovec *parts, int count) {
    return write_file(CALL_writev, fd, parts, count, -1);
}

PUBLIC ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) {
    return write_file(CALL_pwritev, fd, parts, count, offset);
}

PUBLIC ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
    return pwritev64(fd, parts, count, offset);
}

PUBLIC ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t offset,
                           int flags) {
    (void)flags; /* hints, and RWF_APPEND, which nothing here uses */
    return write_file(CALL_pwritev, fd, parts, count, offset);
}

PUBLIC ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    return pwritev64v2(fd, parts, count, offset, flags);
}

/* The kernel copies; what arrived is read back for the log. */
static void record_copy(int fd, int64_t place, ssize_t result, uint64_t wanted,
                        enum verdict verdict) {
    int error = errno;
    struct entry entry = entry_of(CALL_copy, fd, verdict, result);
    entry.offset = place;
    entry.length = wanted;
    size_t size = result > 0 ? (size_t)result : 0;
    uint8_t *data = record(entry, files[fd].path, NULL, NULL, size);
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int again = data ? (int)syscall(SYS_openat, AT_FDCWD, link, O_RDONLY | O_CLOEXEC, 0) : -1;
    for (size_t at = 0; data && at < size;) {
        ssize_t got =
            syscall(SYS_pread64, again, data + at, size - at, (long)(place + (int64_t)at));
        if (got <= 0) abort();
        at += (size_t)got;
    }
    if (again >= 0) syscall(SYS_close, again);
    errno = error;
}

PUBLIC ssize_t sendfile64(int out, int in, off64_t *offset, size_t size) {
    if (!file_of(out)) return syscall(SYS_sendfile, out, in, offset, size);
    pthread_mutex_lock(&lock);
    enum verdict verdict = decide(CALL_copy);
    int error = errno;
    int64_t place = syscall(SYS_lseek, out, 0L, SEEK_CUR);
    errno = error;
    size_t wanted = verdict == HALF || verdict == HALF_KILL ? size / 2 : size;
    ssize_t result = verdict == FAIL ? -1 : syscall(SYS_sendfile, out, in, offset, wanted);
    record_copy(out, place, result, size, verdict);
    finish(verdict);
    pthread_mutex_unlock(&lock);
    return result;
}

PUBLIC ssize_t sendfile(int out, int in, off_t *offset, size_t size) {
    return sendfile64(out, in, offset, size);
}

PUBLIC ssize_t copy_file_range(int in, off64_t *in_at, int out, off64_t *out_at, size_t size,
                               unsigned flags) {
    if (!file_of(out)) return syscall(SYS_copy_file_range, in, in_at, out, out_at, size, flags);
    pthread_mutex_lock(&lock);
    enum verdict verdict = decide(CALL_copy);
    int error = errno;
    int64_t place = out_at ? *out_at : syscall(SYS_lseek, out, 0L, SEEK_CUR);
    errno = error;
    size_t wanted = verdict == HALF || verdict == HALF_KILL ? size / 2 : size;
    ssize_t result =
        verdict == FAIL ? -1 : syscall(SYS_copy_file_range, in, in_at, out, out_at, wanted, flags);
    record_copy(out, place, result, size, verdict);
    finish(verdict);
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- reading -------------------------------------------------------------------------------- */

PUBLIC ssize_t read(int fd, void *bytes, size_t size) {
    ON_FILE(read, fd, size, 0, syscall(SYS_read, fd, bytes, size));
}

PUBLIC ssize_t __read_chk(int fd, void *bytes, size_t size, size_t room) {
    if (size > room) abort();
    return read(fd, bytes, size);
}

PUBLIC ssize_t pread64(int fd, void *bytes, size_t size, off64_t offset) {
    ON_FILE(pread, fd, size, offset, syscall(SYS_pread64, fd, bytes, size, offset));
}

PUBLIC ssize_t pread(int fd, void *bytes, size_t size, off_t offset) {
    return pread64(fd, bytes, size, offset);
}

PUBLIC ssize_t __pread64_chk(int fd, void *bytes, size_t size, off64_t offset, size_t room) {
    if (size > room) abort();
    return pread64(fd, bytes, size, offset);
}

PUBLIC ssize_t readv(int fd, const struct iovec *parts, int count) {
    ON_FILE(read, fd, total(parts, count), 0, syscall(SYS_readv, fd, parts, count));
}

PUBLIC ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t offset) {
    ON_FILE(pread, fd, total(parts, count), offset,
            syscall(SYS_preadv, fd, parts, (long)count, (long)offset, 0L));
}

PUBLIC ssize_t preadv(int fd, const struct iovec *parts, int count, off_t offset) {
    return preadv64(fd, parts, count, offset);
}

/* ---- syncing, sizes, mappings, locks -------------------------------------------------------- */

PUBLIC int fsync(int fd) { ON_FILE(fsync, fd, 0, 0, syscall(SYS_fsync, fd)); }
PUBLIC int fdatasync(int fd) { ON_FILE(fdatasync, fd, 0, 0, syscall(SYS_fdatasync, fd)); }

PUBLIC int sync_file_range(int fd, off64_t offset, off64_t size, unsigned flags) {
    ON_FILE(sync_file_range, fd, size, flags,
            syscall(SYS_sync_file_range, fd, offset, size, flags));
}

PUBLIC int ftruncate64(int fd, off64_t size) {
    ON_FILE(truncate, fd, size, 0, syscall(SYS_ftruncate, fd, size));
}

PUBLIC int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

PUBLIC int fallocate64(int fd, int mode, off64_t offset, off64_t size) {
    ON_FILE(fallocate, fd, offset + size, mode, syscall(SYS_fallocate, fd, mode, offset, size));
}

PUBLIC int fallocate(int fd, int mode, off_t offset, off_t size) {
    return fallocate64(fd, mode, offset, size);
}

PUBLIC int posix_fallocate64(int fd, off64_t offset, off64_t size) {
    int before = errno;
    int error = fallocate64(fd, 0, offset, size) < 0 ? errno : 0;
    errno = before;
    return error;
}

PUBLIC int posix_fallocate(int fd, off_t offset, off_t size) {
    return posix_fallocate64(fd, offset, size);
}

static void *map_raw(void *at, size_t size, int prot, int flags, int fd, off64_t offset) {
    return (void *)syscall(SYS_mmap, at, size, prot, flags, fd, offset);
}

/* Counted and logged if file-backed. Stores through it are invisible; see the top. */
PUBLIC void *mmap64(void *at, size_t size, int prot, int flags, int fd, off64_t offset) {
    if ((flags & MAP_ANONYMOUS) || !file_of(fd)) return map_raw(at, size, prot, flags, fd, offset);
    pthread_mutex_lock(&lock);
    enum verdict verdict = decide(CALL_mmap);
    void *result = verdict == FAIL ? MAP_FAILED : map_raw(at, size, prot, flags, fd, offset);
    int error = errno;
    struct entry entry = entry_of(CALL_mmap, fd, verdict, result == MAP_FAILED ? -1 : 0);
    entry.length = size;
    entry.argument = (int64_t)prot << 32 | flags;
    record(entry, files[fd].path, NULL, NULL, 0);
    finish(verdict);
    pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

PUBLIC void *mmap(void *at, size_t size, int prot, int flags, int fd, off_t offset) {
    return mmap64(at, size, prot, flags, fd, offset);
}

/* Which file an address belongs to is not known, so every msync counts while something is watched.
 */
PUBLIC int msync(void *at, size_t size, int flags) {
    if (watched_size == 0) return (int)syscall(SYS_msync, at, size, flags);
    pthread_mutex_lock(&lock);
    enum verdict verdict = decide(CALL_msync);
    int result = verdict == FAIL ? -1 : (int)syscall(SYS_msync, at, size, flags);
    int error = errno;
    struct entry entry = entry_of(CALL_msync, -1, verdict, result);
    entry.length = size;
    record(entry, NULL, NULL, NULL, 0);
    finish(verdict);
    pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

PUBLIC int flock(int fd, int operation) {
    if (!file_of(fd)) return (int)syscall(SYS_flock, fd, operation);
    pthread_mutex_lock(&lock);
    enum verdict verdict = decide(CALL_flock);
    int error = errno;
    pthread_mutex_unlock(&lock);
    int result = -1;
    if (verdict != FAIL) {
        result =
            (int)syscall(SYS_flock, fd, operation); /* may wait for another process or thread */
        error = errno;
    }
    pthread_mutex_lock(&lock);
    errno = error;
    struct entry entry = entry_of(CALL_flock, fd, verdict, result);
    entry.argument = operation;
    record(entry, file_of(fd) ? files[fd].path : NULL, NULL, NULL, 0);
    finish(verdict);
    pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

/* ---- names ---------------------------------------------------------------------------------- */

/* A call on one or two names: CODE makes it. INODE: of the file that gets the second name. */
#define ON_NAMES(NAME, PATH, PATH2, INODE, ARGUMENT, CODE)                                         \
    do {                                                                                           \
        pthread_mutex_lock(&lock);                                                                 \
        enum verdict verdict = decide(CALL_##NAME);                                                \
        int error = errno;                                                                         \
        uint64_t inode = (INODE);                                                                  \
        errno = error;                                                                             \
        int result = verdict == FAIL ? -1 : (int)(CODE);                                           \
        error = errno;                                                                             \
        struct entry entry = entry_of(CALL_##NAME, -1, verdict, result);                           \
        entry.inode = inode;                                                                       \
        entry.argument = (int64_t)(ARGUMENT);                                                      \
        record(entry, PATH, PATH2, NULL, 0);                                                       \
        finish(verdict);                                                                           \
        pthread_mutex_unlock(&lock);                                                               \
        errno = error;                                                                             \
        return result;                                                                             \
    } while (0)

static uint64_t inode_of(int dirfd, const char *path, int flags) {
    struct stat status;
    return fstatat(dirfd, path, &status, flags) == 0 ? status.st_ino : 0;
}

static int rename_file(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
    char path[PATH_MAX], path2[PATH_MAX];
    int is_first = is_watched(from_at, from, path);
    if (!is_watched(to_at, to, path2) && !is_first) {
        return (int)syscall(SYS_renameat2, from_at, from, to_at, to, flags);
    }
    ON_NAMES(rename, path, path2, inode_of(from_at, from, AT_SYMLINK_NOFOLLOW), flags,
             syscall(SYS_renameat2, from_at, from, to_at, to, flags));
}

PUBLIC int rename(const char *from, const char *to) {
    return rename_file(AT_FDCWD, from, AT_FDCWD, to, 0);
}

PUBLIC int renameat(int from_at, const char *from, int to_at, const char *to) {
    return rename_file(from_at, from, to_at, to, 0);
}

PUBLIC int renameat2(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
    return rename_file(from_at, from, to_at, to, flags);
}

PUBLIC int linkat(int from_at, const char *from, int to_at, const char *to, int flags) {
    char path[PATH_MAX], path2[PATH_MAX];
    int is_first = is_watched(from_at, from, path);
    if (!is_watched(to_at, to, path2) && !is_first) {
        return (int)syscall(SYS_linkat, from_at, from, to_at, to, flags);
    }
    int how = (flags & AT_EMPTY_PATH) | (flags & AT_SYMLINK_FOLLOW ? 0 : AT_SYMLINK_NOFOLLOW);
    ON_NAMES(link, path, path2, inode_of(from_at, from, how), flags,
             syscall(SYS_linkat, from_at, from, to_at, to, flags));
}

PUBLIC int link(const char *from, const char *to) {
    return linkat(AT_FDCWD, from, AT_FDCWD, to, 0);
}

PUBLIC int unlinkat(int dirfd, const char *path, int flags) {
    char whole[PATH_MAX];
    if (!is_watched(dirfd, path, whole)) return (int)syscall(SYS_unlinkat, dirfd, path, flags);
    if (flags & AT_REMOVEDIR) {
        ON_NAMES(rmdir, whole, NULL, 0, flags, syscall(SYS_unlinkat, dirfd, path, flags));
    }
    ON_NAMES(unlink, whole, NULL, 0, flags, syscall(SYS_unlinkat, dirfd, path, flags));
}

PUBLIC int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
PUBLIC int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

PUBLIC int remove(const char *path) {
    struct stat status;
    int is_directory = lstat(path, &status) == 0 && S_ISDIR(status.st_mode);
    return unlinkat(AT_FDCWD, path, is_directory ? AT_REMOVEDIR : 0);
}

PUBLIC int mkdirat(int dirfd, const char *path, mode_t mode) {
    char whole[PATH_MAX];
    if (!is_watched(dirfd, path, whole)) return (int)syscall(SYS_mkdirat, dirfd, path, mode);
    ON_NAMES(mkdir, whole, NULL, 0, mode, syscall(SYS_mkdirat, dirfd, path, mode));
}

PUBLIC int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

PUBLIC int truncate64(const char *path, off64_t size) {
    char whole[PATH_MAX];
    if (!is_watched(AT_FDCWD, path, whole)) return (int)syscall(SYS_truncate, path, size);
    pthread_mutex_lock(&lock);
    enum verdict verdict = decide(CALL_truncate);
    int result = verdict == FAIL ? -1 : (int)syscall(SYS_truncate, path, size);
    int error = errno;
    struct entry entry = entry_of(CALL_truncate, -1, verdict, result);
    entry.inode = inode_of(AT_FDCWD, path, 0);
    entry.length = (uint64_t)size;
    record(entry, whole, NULL, NULL, 0);
    finish(verdict);
    pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

PUBLIC int truncate(const char *path, off_t size) { return truncate64(path, size); }

/* ---- control -------------------------------------------------------------------------------- */

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }

static void start_over(void) {
    memset(counts, 0, sizeof counts);
    memset(rules, 0, sizeof rules);
    is_logging = 0;
    log_size = 0;
}

static void after_fork_in_child(void) {
    start_over();
    pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void prepare(void) {
    _Static_assert(sizeof(struct entry) == 80, "shim.py reads entries of this size");
    _Static_assert(CALL_COUNT <= 64, "a mask has a bit for every call");
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
}

/* Name of call `at`, NULL from the number of calls on. */
PUBLIC const char *shim_call_name(int at) {
    return at >= 0 && at < CALL_COUNT ? call_names[at] : NULL;
}

/* An absolute path without symbolic links; "" watches nothing. Open files stay as they are. */
PUBLIC void shim_watch(const char *directory) {
    pthread_mutex_lock(&lock);
    snprintf(watched, sizeof watched, "%s", directory);
    watched_size = strlen(watched);
    pthread_mutex_unlock(&lock);
}

/* Counters to 0, nothing armed, the log empty and off. */
PUBLIC void shim_reset(void) {
    pthread_mutex_lock(&lock);
    start_over();
    pthread_mutex_unlock(&lock);
}

/* The nth call (from 1) from now on of those in mask. -1 if too many rules are armed. */
PUBLIC int shim_arm(uint64_t mask, int64_t nth, int action, int error, int64_t delay_us) {
    int result = -1;
    pthread_mutex_lock(&lock);
    for (int at = 0; at < RULE_MAX && result < 0; at++) {
        if (rules[at].mask) continue;
        rules[at] = (struct rule){mask, nth, 0, delay_us, action, error};
        result = at;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

PUBLIC void shim_disarm(void) {
    pthread_mutex_lock(&lock);
    memset(rules, 0, sizeof rules);
    pthread_mutex_unlock(&lock);
}

/* Calls so far of those in mask. */
PUBLIC int64_t shim_count(uint64_t mask) {
    int64_t sum = 0;
    pthread_mutex_lock(&lock);
    for (int at = 0; at < CALL_COUNT; at++) {
        if (mask >> at & 1) sum += counts[at];
    }
    pthread_mutex_unlock(&lock);
    return sum;
}

PUBLIC void shim_log_start(void) {
    pthread_mutex_lock(&lock);
    is_logging = 1;
    pthread_mutex_unlock(&lock);
}

/* An entry of the program's own: what it promised so far. */
PUBLIC void shim_mark(const char *text) {
    pthread_mutex_lock(&lock);
    record((struct entry){.call = CALL_mark, .fd = -1, .offset = -1}, NULL, NULL, text,
           strlen(text));
    pthread_mutex_unlock(&lock);
}

/* The log so far; the place is good until the next watched call. */
PUBLIC uint64_t shim_log(const uint8_t **at) {
    pthread_mutex_lock(&lock);
    *at = log_bytes;
    uint64_t size = log_size;
    pthread_mutex_unlock(&lock);
    return size;
}
