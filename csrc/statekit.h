/*
 * statekit.h: the contract of the native store.
 *
 * This is the one header that Python sees: the build strips the preprocessor
 * lines and hands the rest to cffi, so nothing here is declared twice. Keep to
 * what cffi parses: plain structs, enums, integer #defines and prototypes.
 *
 * Vocabulary (docs/glossary.md): a key hashes to one LEAF; a leaf holds one
 * TABLE per STATE; a STORE is an array of leaves. A leaf is WHOLE (all its
 * entries are here), ABSENT (none is here), PARTIAL (some are here, and these
 * are newer than what is at the leaf's HOME, the place that has the rest) or
 * AWAY (it does not belong to this store: every call about one of its keys only
 * says so).
 *
 * Rules that hold for every function
 *  - It is thread safe, unless it says otherwise. Only for sk_close and
 *    sk_*_free must the caller know that nobody else still uses the object.
 *  - No pointer into live memory is handed out: results are copied, under the
 *    leaf's lock, into memory that the caller owns (an sk_buf or an array).
 *  - The result is a status; int64_t functions return a length (>= 0) or the
 *    negated status. SK_MISSING and SK_UNKNOWN are answers; from SK_NO_MEMORY on
 *    a status is an error, and then the store is as it was before the call
 *    (sk_batch: as it was after the records that it reports as done).
 *  - sk_reason() explains the last error of the calling thread.
 */
#ifndef STATEKIT_H
#define STATEKIT_H

#include <stddef.h>
#include <stdint.h>

#define SK_LEAVES_MAX 1048576         /* key-groups x sub-groups */
#define SK_STATES_MAX 1024            /* states in one store */
#define SK_NAME_BYTES_MAX 255         /* bytes of a state's name */
#define SK_KEY_PARTS_MAX 16           /* parts of a tuple key */
#define SK_KEY_BYTES_MAX 65536        /* bytes of one encoded key */
#define SK_VALUE_BYTES_MAX 1073741824 /* bytes of one encoded value: 1 GiB */
#define SK_DEPTH_MAX 32               /* containers inside each other */
#define SK_ALL_STATES 4294967295      /* in place of a state id, where allowed */
#define SK_NO_TIME INT64_MIN          /* in place of a time in ms: none, not known yet */

typedef enum sk_status {
    SK_OK = 0,
    SK_MISSING = 1,       /* there is no such key, element or path */
    SK_UNKNOWN = 2,       /* the key is not here, and its leaf is not whole: ask the home */
    SK_CHANGED = 3,       /* compare-and-set lost, or a container changed while it was read */
    SK_END = 4,           /* nothing more to read */
    SK_NO_MEMORY = 5,     /* the allocator has no memory */
    SK_LIMIT = 6,         /* the store's memory limit would be exceeded */
    SK_BAD_KEY = 7,       /* the key does not fit the state's key type, or is too long */
    SK_BAD_VALUE = 8,     /* not one well-formed MessagePack value, or of the wrong shape */
    SK_BAD_PATH = 9,      /* a step of the path does not fit what is there */
    SK_BAD_KIND = 10,     /* the state's kind has no such operation */
    SK_BAD_ARGUMENT = 11, /* out of range: leaf, state, geometry, operation */
    SK_OVERFLOW = 12,     /* the sum leaves 64 bits */
    SK_TOO_LARGE = 13,    /* a value above SK_VALUE_BYTES_MAX */
    SK_TOO_DEEP = 14,     /* containers nested deeper than SK_DEPTH_MAX */
    SK_CORRUPT = 15,      /* a block that cannot be what sk_leaf_encode wrote */
    SK_SCHEMA = 16,       /* the name is in use with another kind, key type or flags */
    SK_OCCUPIED = 17,     /* sk_attach: a leaf of that number has entries here */
    SK_OVERRUN = 18,      /* the snapshot was given up: its reader fell too far behind */
    SK_NOT_OWNED = 19     /* the leaf is away or shut: it belongs, or will belong, to another
                           * store */
} sk_status;

/* What a state holds under each key. The numbers are stored in blocks. */
typedef enum sk_kind {
    SK_I64 = 1,
    SK_F64 = 2,
    SK_BYTES = 3,  /* opaque bytes */
    SK_LIST = 4,   /* MessagePack; the root is an array */
    SK_MAP = 5,    /* MessagePack; the root is a map, in insertion order */
    SK_NESTED = 6, /* MessagePack; the root is an array or a map, or any scalar */
    SK_TIMERS = 7  /* distinct due times, ascending, 8 bytes each; at least one */
} sk_kind;

typedef enum sk_residency { SK_WHOLE = 0, SK_PARTIAL = 1, SK_ABSENT = 2, SK_AWAY = 3 } sk_residency;

/* Memory that the caller owns and the library grows. Zero-initialised is empty. */
typedef struct sk_buf {
    uint8_t *data;
    size_t len;
    size_t cap;
} sk_buf;

void sk_buf_free(sk_buf *buf);
/* SK_OK or SK_NO_MEMORY; on failure the buffer is as it was. */
int sk_buf_reserve(sk_buf *buf, size_t more);
int sk_buf_put(sk_buf *buf, const void *data, size_t n);

const char *sk_status_name(int status);
const char *sk_reason(void);
/* 1 if the library was built with fault injection and internal checks. */
int sk_is_testing_build(void);

/* ---- Keys -------------------------------------------------------------- */
/*
 * A key type is a string of parts: "s" UTF-8, "b" bytes, "i" signed 64-bit. One
 * part is encoded bare (ints as 8 bytes, little endian). A tuple is written
 * "(si)" and encoded part after part, with a u32 little-endian length before
 * each s or b part. The routing hash is XXH64 with seed 42 of the bare part; in
 * a tuple each part's hash is the seed of the next (Spark's xxhash64).
 */
int sk_key_hash(const char *key_type, const uint8_t *key, size_t key_len, uint64_t *hash);
uint64_t sk_xxh64(const uint8_t *data, size_t len, uint64_t seed);
uint32_t sk_crc32c(const uint8_t *data, size_t len, uint32_t seed);

/* ---- Store and states --------------------------------------------------- */

typedef struct sk_store sk_store;

/* key_groups and subgroups: powers of two. bytes_max 0: no limit. */
int sk_open(uint32_t key_groups, uint32_t subgroups, uint64_t bytes_max, sk_store **store);
void sk_close(sk_store *store); /* open snapshots can still be read, and must be closed */

/* Entries carry the time of their last change, and can expire. Not for SK_TIMERS. */
#define SK_TIMED 1

/* Declares a state, or finds it: the same name, kind, key type and flags give the same id. */
int sk_state_add(sk_store *store, const char *name, int kind, const char *key_type, int flags,
                 uint32_t *id);
uint32_t sk_leaf_count(sk_store *store);
uint32_t sk_state_count(sk_store *store);
/* name and key_type point to memory that lives as long as the store. */
int sk_state_info(sk_store *store, uint32_t id, const char **name, int *kind, const char **key_type,
                  int *flags);
/* Changes the type of a state that nobody uses yet (its id must not be in use in another thread):
 * from i64 to f64, and to timed or not timed. Every table is converted; entries that become timed
 * get the stamp SK_NO_TIME. No delta can reach back to before this call. SK_SCHEMA if the types do
 * not fit. */
int sk_state_retype(sk_store *store, const char *name, int kind, int flags);

typedef struct sk_stats {
    uint64_t entries;    /* live entries that are here; expired ones count until they are removed */
    uint64_t tombstones; /* deletions still remembered */
    uint64_t dirty;      /* entries and tombstones not yet written home */
    uint64_t bytes;      /* native memory: slots, keys, values, containers */
    uint64_t leaves[4];  /* how many are whole, partial, absent, away. A shut leaf counts as away,
                          * though its entries and bytes count; an expected leaf counts as absent */
    uint64_t flooded;    /* tables that changed to the secret hash */
    uint64_t operations; /* calls about one key and records of batches, since the store was made */
} sk_stats;

/* Sums over leaves [from, to) and one state or SK_ALL_STATES. Operations are counted by state, not
 * by leaf: in a sum over only some of the leaves they are 0. */
int sk_stats_read(sk_store *store, uint32_t state, uint32_t from, uint32_t to, sk_stats *stats);
uint64_t sk_bytes_used(sk_store *store);
int sk_bytes_limit(sk_store *store, uint64_t bytes_max);
/* Groups of slots visited plus keys compared to find this key: the price of one lookup. */
int64_t sk_probe_cost(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len);

/* ---- Time to live (csrc/ttl.c) -------------------------------------------- */
/*
 * An entry of a timed state is stamped with the time when it is written (and, if asked, read). It
 * has expired once stamp + ttl <= now: from then on no call returns it, and a call that comes
 * across it removes it. (sk_stats_read counts it until then, and a delta may still have it, with
 * its stamp.) Times are in ms. Processing time is the system's clock, kept from going back. Event
 * time is the latest watermark that was given to sk_time_set. Before the first watermark event time
 * is unknown: then nothing expires, and what is written counts as written at the first watermark. A
 * store that is filled from blocks should be given the watermark that belongs to these blocks
 * before it is read.
 */
typedef enum sk_clock { SK_PROCESSING_TIME = 0, SK_EVENT_TIME = 1 } sk_clock;

/* ttl_ms 0: entries do not expire. A timed state starts like this, also if it came with blocks.
 * on_read: reading an entry refreshes its stamp, as writing does. Raising the time to live may
 * bring back entries that older copies still have. */
int sk_state_ttl(sk_store *store, uint32_t state, int64_t ttl_ms, int clock, int on_read);
/* Event time never goes back: an older watermark is ignored. Processing time stands still at now_ms
 * (for tests) until it is set to SK_NO_TIME, which returns to the system's clock. */
int sk_time_set(sk_store *store, int clock, int64_t now_ms);
int64_t sk_time(sk_store *store, int clock);
/* Removes expired entries. Looks at about slots_max slots, starting where the last sweep stopped,
 * and at each slot at most once. Returns how many entries it removed. */
int64_t sk_sweep(sk_store *store, uint64_t slots_max);
/* 1 if an entry with this stamp, wherever the entry is, has expired; 0 if not; or a negated
 * status. */
int sk_stamp_expired(sk_store *store, uint32_t state, int64_t stamp_ms);

/* ---- One key ------------------------------------------------------------ */

/* The leaf of a key, or a negated status. */
int64_t sk_key_leaf(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len);
int sk_contains(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len);
#define SK_BLIND 1 /* do it without asking whether the entry exists: never SK_UNKNOWN */
int sk_delete(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len, int flags);

/* For any kind, in its encoded form: 8 bytes little endian (for timers: 8 bytes for each due time),
 * the bytes, or MessagePack. sk_get replaces what buf holds. */
int64_t sk_get(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len, sk_buf *buf);
int sk_put(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len,
           const uint8_t *value, size_t value_len);

typedef enum sk_fold { SK_ADD = 0, SK_MIN = 1, SK_MAX = 2 } sk_fold;

/* fold: a missing entry counts as initial for SK_ADD and as operand for MIN and MAX.
 * cas: expected NULL means that the key must be missing. On SK_CHANGED *result is the value found;
 * on SK_MISSING there is none. result may be NULL. */
int sk_i64_get(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len, int64_t *value);
int sk_i64_put(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len, int64_t value);
int sk_i64_fold(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len, int fold,
                int64_t operand, int64_t initial, int64_t *result);
int sk_i64_cas(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len,
               const int64_t *expected, int64_t desired, int64_t *result);
int sk_f64_get(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len, double *value);
int sk_f64_put(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len, double value);
int sk_f64_fold(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len, int fold,
                double operand, double initial, double *result);
int sk_f64_cas(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len,
               const double *expected, double desired, double *result);

/*
 * get and fold once more, with the value as the result: for a caller through a binding, an
 * out-parameter costs more than the call itself. Where there is no value they return INT64_MIN or a
 * NaN, and sk_value_status() says why; it is SK_OK if INT64_MIN or the NaN is the value itself.
 * value_or: for a missing key the result is `missing`.
 */
int64_t sk_i64_value(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len);
int64_t sk_i64_value_or(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len,
                        int64_t missing);
int64_t sk_i64_folded(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len, int fold,
                      int64_t operand, int64_t initial);
double sk_f64_value(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len);
double sk_f64_value_or(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len,
                       double missing);
double sk_f64_folded(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len, int fold,
                     double operand, double initial);
int sk_value_status(void);

/*
 * Containers (list, map, nested). A path is a row of MessagePack values, one for each container on
 * the way: an integer if that container is a list (negative counts from the end), a key if it is a
 * map. The empty path is the root. `i` and `j` are list positions with Python's meaning, `arg` is
 * MessagePack.
 *
 *   read        at the path                                  buf holds
 *   SK_R_GET    any value                                    its MessagePack
 *   SK_R_LEN    list or map; returns the length              nothing
 *   SK_R_TYPE   any; returns 'l', 'm' or 's' (scalar)        nothing
 *   SK_R_SLICE  list, elements i <= k < j (Python's clamping) an array
 *   SK_R_HAS    map; arg is the key; SK_OK or SK_MISSING     nothing
 *   SK_R_KEYS   map                                          an array of its keys
 *
 *   write        at the path
 *   SK_W_SET     any: puts arg there; the last step may be a new map key
 *   SK_W_DELETE  element or map entry the last step names; with an empty path the key itself
 *   SK_W_APPEND  list: arg at the end
 *   SK_W_EXTEND  list: the elements of the array arg
 *   SK_W_INSERT  list: arg before position i, clamped as list.insert does
 *   SK_W_POP     list: removes element i; buf gets it
 *   SK_W_SPLICE  list: replaces elements i <= k < j by those of the array arg
 *   SK_W_UPDATE  map: puts every entry of the map arg
 *   SK_W_TAKE    map: removes the entry with key arg; buf gets its value
 *   SK_W_CLEAR   list or map: removes all elements
 *
 * Both replace what buf holds. sk_write returns how many bytes it put there.
 *
 * `shape` says what to create where a write finds nothing: one letter per level from the root, 'l'
 * or 'm'; "ml" makes the root a map and its members lists. If it is NULL or too short, nothing is
 * created and the call answers SK_MISSING.
 */
typedef enum sk_read_op {
    SK_R_GET = 0,
    SK_R_LEN = 1,
    SK_R_TYPE = 2,
    SK_R_SLICE = 3,
    SK_R_HAS = 4,
    SK_R_KEYS = 5
} sk_read_op;

typedef enum sk_write_op {
    SK_W_SET = 0,
    SK_W_DELETE = 1,
    SK_W_APPEND = 2,
    SK_W_EXTEND = 3,
    SK_W_INSERT = 4,
    SK_W_POP = 5,
    SK_W_SPLICE = 6,
    SK_W_UPDATE = 7,
    SK_W_TAKE = 8,
    SK_W_CLEAR = 9
} sk_write_op;

/* On SK_UNKNOWN, sk_read leaves the key's leaf in buf->len. */
int64_t sk_read(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len, int op,
                const uint8_t *path, size_t path_len, const uint8_t *arg, size_t arg_len, int64_t i,
                int64_t j, sk_buf *buf);
int64_t sk_write(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len, int op,
                 const uint8_t *path, size_t path_len, const char *shape, const uint8_t *arg,
                 size_t arg_len, int64_t i, int64_t j, sk_buf *buf);
/*
 * Reads a list or map a page at a time: an array of elements, or of alternating
 * keys and values. *cursor and *version start as 0; pass to each call what the
 * call before left in them. SK_CHANGED if the container gained or lost elements
 * in between, SK_END after the last page.
 */
int64_t sk_page(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len,
                const uint8_t *path, size_t path_len, uint64_t *cursor, uint64_t *version,
                uint32_t elements_max, sk_buf *buf);

/* ---- Timers (csrc/timers.c) ------------------------------------------------ */

/* Setting a timer that is already set changes nothing. Like other entries, a key's timers are
 * unknown if they are not here and the leaf is not whole. */
int sk_timer_set(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len, int64_t due);
/* SK_MISSING if there is no such timer. */
int sk_timer_cancel(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len,
                    int64_t due);

#define SK_PEEK 1 /* leave them in place */

/*
 * Takes out every timer of leaves [from, to) that is here and due at the watermark (due <=
 * watermark), and appends a record for each, {int64 due, uint32 length of the key, the key}, in the
 * order of due times and then of key bytes. Returns how many there are. Each timer is taken by one
 * caller, once; if the call fails, none is taken.
 */
int64_t sk_timers_due(sk_store *store, uint32_t state, uint32_t from, uint32_t to,
                      int64_t watermark, int flags, sk_buf *buf);
/* The earliest due time of all timers that are here; INT64_MAX if there is none; INT64_MIN if there
 * is no such state of timers. INT64_MIN may also be a due time: sk_value_status says which it
 * is. */
int64_t sk_timers_next(sk_store *store, uint32_t state);
/* The same of leaves [from, to); INT64_MIN and a status if there are no such leaves, too. */
int64_t sk_timers_next_of(sk_store *store, uint32_t state, uint32_t from, uint32_t to);
/*
 * For each leaf of [from, to), lowers dues[leaf - from] to the earliest due time that the state has
 * there; what has none stays as it is. Unlike the calls above, it looks into leaves that are shut:
 * whom they are handed over to is to know when their timers are due. It may say a time that is too
 * early (timers that were due then were removed since), and never one that is too late.
 */
int sk_timers_dues(sk_store *store, uint32_t state, uint32_t from, uint32_t to, int64_t *dues);

/* ---- Batches ------------------------------------------------------------ */

typedef enum sk_column_type {
    SK_COL_NONE = 0,
    SK_COL_I64 = 1,   /* data: int64_t[n] */
    SK_COL_F64 = 2,   /* data: double[n] */
    SK_COL_VAR32 = 3, /* data: bytes, offsets: int32_t[n + 1] */
    SK_COL_VAR64 = 4  /* data: bytes, offsets: int64_t[n + 1] */
} sk_column_type;

/* What the bytes of a SK_COL_VAR column stand for when they become elements of a container. */
typedef enum sk_column_form {
    SK_FORM_MSGPACK = 0,
    SK_FORM_STR = 1,
    SK_FORM_BIN = 2
} sk_column_form;

typedef struct sk_column {
    int type;
    int form;
    const void *data;
    const void *offsets; /* NULL for the 8-byte types */
    int64_t data_len;    /* bytes in data: offsets are checked against it */
} sk_column;

/*
 *   op           kinds          values                  results
 *   SK_B_GET     any            -                       numbers: `out`; else `buf` and `out_offsets`
 *   SK_B_PUT     any            one per key             -
 *   SK_B_ADD     i64, f64       one per key or operand  `out` (may be NULL): the new values
 *   SK_B_HAS     any            -                       `status` only
 *   SK_B_DELETE  any            -                       `status` only
 *   SK_B_APPEND  list           one per key             -
 *   SK_B_MAP_PUT map            one per key, map_keys   -
 *
 * Records of one key take effect in their order; different keys in any order.
 * status[r] (one byte a record, required) is SK_OK, SK_MISSING, SK_UNKNOWN or, for
 * a record that was not reached after an error, SK_END. If the call fails, *failed
 * is the record it failed at. Not atomic: a snapshot may see part of a batch.
 */
typedef enum sk_batch_op {
    SK_B_GET = 0,
    SK_B_PUT = 1,
    SK_B_ADD = 2,
    SK_B_HAS = 3,
    SK_B_DELETE = 4,
    SK_B_APPEND = 5,
    SK_B_MAP_PUT = 6
} sk_batch_op;

typedef struct sk_batch_args {
    int64_t n;
    int flags; /* SK_B_DELETE: SK_BLIND */
    sk_column keys;
    sk_column map_keys;
    sk_column values;    /* type SK_COL_NONE: operand for every key */
    int64_t operand_i64; /* SK_B_ADD without values */
    double operand_f64;
    int64_t initial_i64; /* SK_B_ADD: what a missing entry counts as */
    double initial_f64;
    void *out;            /* int64_t[n] or double[n] */
    int64_t *out_offsets; /* int64_t[n + 1] */
    sk_buf *buf;
    uint8_t *status; /* uint8_t[n] */
    int64_t failed;
    int64_t unknown; /* how many records are SK_UNKNOWN */
} sk_batch_args;

int sk_batch(sk_store *store, uint32_t state, int op, sk_batch_args *args);
/* Encodes columns as one column of tuple keys: the bytes replace what buf holds, and offsets[n + 1]
 * are written. */
int sk_pack_keys(const char *key_type, const sk_column *parts, int64_t n, int64_t *offsets,
                 sk_buf *buf);

/* out[n]: the leaves that the keys have in a store of `leaves` leaves. Tuple keys come packed. */
int sk_route_keys(const char *key_type, const sk_column *keys, int64_t n, uint32_t leaves,
                  uint32_t *out);

/* ---- Values as columns (csrc/unpack.c) ------------------------------------ */

typedef enum sk_unpack_op {
    SK_UNPACK_NIL = 0,
    SK_UNPACK_BOOL = 1,
    SK_UNPACK_INT = 2,
    SK_UNPACK_FLOAT = 3,
    SK_UNPACK_STR = 4,
    SK_UNPACK_BIN = 5,
    SK_UNPACK_MOMENT = 6,
    SK_UNPACK_RAW = 7,
    SK_UNPACK_LIST = 8,
    SK_UNPACK_MAP = 9,
    SK_UNPACK_ARRAY = 10,
    SK_UNPACK_RECORD = 11
} sk_unpack_op;

/* One column that is gathered: a node of a type. unpack.c says what each op has in its buffers.
 * `offsets` must begin with one int32_t 0 where the op has offsets. */
typedef struct sk_unpack_node {
    uint8_t op;          /* an sk_unpack_op */
    uint8_t is_optional; /* nil is a null; otherwise it is a bad value */
    uint8_t is_required; /* of a field: a record without it is a bad value */
    uint32_t stop;       /* index of the first node that is not below this one */
    uint32_t least;      /* SK_UNPACK_ARRAY: how many items it has at least, ... */
    uint32_t most;       /* ... and at most; those that no node stands for are passed over */
    uint32_t name_len;   /* of a field */
    const uint8_t *name; /* the caller's */
    uint64_t rows;
    uint64_t nulls;
    sk_buf valid; /* a byte per row: 0 for a null */
    sk_buf offsets;
    sk_buf data;
} sk_unpack_node;

/* Appends the values [from, to) of a column of MessagePack values to the nodes of their type. skip:
 * NULL, or a byte for each value of the column: where it is not 0, the value is left out. After
 * anything but SK_OK the buffers are of no use. SK_BAD_VALUE, SK_TOO_DEEP: a value is not of the
 * type; SK_TOO_LARGE: a column would have more than 2^31 bytes or elements. */
int sk_unpack(sk_unpack_node *nodes, const sk_column *values, int64_t from, int64_t to,
              const uint8_t *skip);
/* The same for encoded keys: parts are `count` nodes of the ops INT, STR and BIN. A key that is no
 * tuple has one part; int keys, which have no offsets, need no unpacking. */
int sk_unpack_keys(sk_unpack_node *parts, uint32_t count, int is_tuple, const sk_column *keys,
                   int64_t from, int64_t to, const uint8_t *skip);

/* ---- Leaves ------------------------------------------------------------- */

/* How much of the leaf is here, whatever its gate: an sk_residency, or a negated status. */
int sk_leaf_residency(sk_store *store, uint32_t leaf);
/* The same for many leaves, written to out. It waits for no lock, so that it is not held up by a
 * call that decodes a leaf. For a leaf that is just being marked, it gives the residency before or
 * after. */
int sk_leaf_residencies(sk_store *store, const uint32_t *leaves, uint64_t n, uint8_t *out);
/* Marks leaves [from, to), and opens their gates. SK_ABSENT and SK_AWAY drop their entries.
 * SK_WHOLE forgets tombstones that neither sk_track nor (while they are dirty) sk_write_back still
 * needs. SK_NOT_OWNED, with nothing marked, if a shut leaf is to become whole or partial: open it
 * instead. */
int sk_leaf_mark(sk_store *store, uint32_t from, uint32_t to, int residency);

/*
 * Gates: leaves that one process hands over to another (csrc/gate.c).
 *
 * SHUT: the leaf is being handed over. It does not change any more and can be read out:
 * sk_leaf_encode, sk_leaf_pick, sk_pick, sk_leaf_residency, sk_stats_read (which counts it among
 * leaves that are away) and sk_leaf_heat work as always. In all other respects it is as if it were
 * away: calls about a key, sk_install, sk_detach, sk_move and sk_attach answer SK_NOT_OWNED;
 * sk_clear, sk_sweep, sk_evict, sk_timers_due, sk_timers_next and sk_spread pass over it.
 * (sk_dirty_take does not: the leaf may come back, and its changes must be written home with all
 * others.) A snapshot that is taken meanwhile does not have it, unless sk_snapshot_add_shut asks
 * for it. The leaf can be completed by sk_leaf_decode with SK_UNDER and SK_UNDER_ALL, and stays
 * shut. The only other thing that touches its entries is the first watermark (csrc/ttl.c).
 *
 * EXPECTED: the leaf is absent and its entries are on their way. Every call about a key answers
 * SK_UNKNOWN, also calls that do not ask what is there; so does sk_clear, blind or not. The first
 * sk_leaf_decode, sk_spread (of its entries) or sk_install that succeeds opens the gate, even if it
 * brings nothing. Snapshots see an absent leaf. If the leaf is detached, it is expected in the
 * store to which it is attached.
 */
typedef enum sk_gate { SK_GATE_OPEN = 0, SK_GATE_SHUT = 1, SK_GATE_EXPECTED = 2 } sk_gate;

/* Sets the gates of leaves [from, to), all or (on failure) none. When it returns, no call that
 * began before can still change a shut leaf. SK_NOT_OWNED if a leaf that is to be shut is away,
 * SK_BAD_ARGUMENT if a leaf that is to be expected has entries. An away leaf that becomes expected
 * belongs to this store from then on; there is no moment in which it would accept a write. Opening
 * a shut leaf takes it back as it was, and deltas can reach back to before it was shut. (If the
 * leaf was expected when it was shut, and nothing has come, it is expected again.) */
int sk_leaf_gate(sk_store *store, uint32_t from, uint32_t to, int gate);
int sk_leaf_gate_of(sk_store *store, uint32_t leaf); /* an sk_gate, or a negated status */
/* out[leaf] = roughly how many operations on the leaf there were since the store was made, in all
 * states: every call about one key counts, records of batches by a sample of one in 31. */
int sk_leaf_heat(sk_store *store, uint64_t *out);
/* entries[leaf], bytes[leaf]: how many the leaf has of one state, or of all; either may be NULL. */
int sk_leaf_sizes(sk_store *store, uint32_t state, uint64_t *entries, uint64_t *bytes);

/* Drops all entries of a state in leaves [from, to), except in leaves that are away or shut. If a
 * leaf is not whole, the answer is SK_UNKNOWN (its home has more), unless flags say SK_BLIND: then
 * only what is here is dropped. */
int sk_clear(sk_store *store, uint32_t state, uint32_t from, uint32_t to, int flags);

/* Appends one block per state that has entries (or the one state asked for). since > 0: only what
 * changed after that epoch, with deletions, as delta blocks. Where that is more than half of a
 * state's entries, or is not known, all its entries are written as a full block. An away leaf has
 * no blocks. */
int64_t sk_leaf_encode(sk_store *store, uint32_t leaf, uint32_t state, uint32_t since, sk_buf *buf);
/* Appends one delta block with the entries of some keys, to be decoded elsewhere with SK_UNDER. A
 * key without an entry is in the block as a deletion, so that the key is known to be missing there.
 * keys: n encoded keys, in any order, with or without repetitions (SK_COL_I64 will do for int
 * keys); without keys there is no block. SK_BAD_ARGUMENT if a key is of another leaf, SK_UNKNOWN if
 * the leaf is not whole. */
int64_t sk_leaf_pick(sk_store *store, uint32_t leaf, uint32_t state, const sk_column *keys,
                     int64_t n, sk_buf *buf);

/* The same for keys of any leaves: appends one delta block of leaf 0 of 1 (all hashes), for
 * sk_spread elsewhere. Keys of leaves that are not whole, or away, are left out; without entries
 * there is no block. only: NULL, or a byte for each leaf, which is 0 if its keys are to be left out
 * too. The leaves of all keys are locked together while the block is made, so the caller should not
 * ask for everything at once. */
int64_t sk_pick(sk_store *store, uint32_t state, const sk_column *keys, int64_t n,
                const uint8_t *only, sk_buf *buf);

typedef enum sk_decode_mode {
    SK_REPLACE = 0,   /* the leaf becomes what the blocks say, and whole */
    SK_UNDER = 1,     /* from the home: fills in only what is not here; the leaf stays as marked */
    SK_UNDER_ALL = 2, /* as SK_UNDER, and the blocks are all that the home has: the leaf becomes
                       * whole */
    SK_OVER = 3       /* a later delta: replaces, and deletes what it calls deleted */
} sk_decode_mode;

/* blocks: any number of blocks of this leaf, one after the other. States that are not
 * declared yet are declared from the block. An away leaf takes SK_REPLACE only, a shut one SK_UNDER
 * and SK_UNDER_ALL. */
int sk_leaf_decode(sk_store *store, uint32_t leaf, const uint8_t *blocks, size_t len, int mode);
/*
 * Takes in leaves, each with all that its home has, from bytes of a pack that begin at `offset`
 * there: sk_frames_verify and sk_leaf_decode with SK_UNDER_ALL of one leaf after the other. places
 * has three numbers for each of `count` leaves: the leaf; where its frames begin, from the start of
 * data; their size (0: the leaf is empty). It ends at the first leaf that cannot be taken in so;
 * *done of them were.
 */
int sk_frames_load(sk_store *store, const uint8_t *data, size_t len, const uint8_t *id,
                   uint64_t offset, const uint64_t *places, size_t count, uint64_t *done);

/* blocks: any number of blocks as sk_pick makes them, of any states, also several of one state (if
 * several have a key, the first of them counts). Each leaf that is open and not whole, or expected,
 * takes its entries in as sk_leaf_decode with SK_UNDER would, all of them at once; other leaves are
 * passed over. touched: sk_leaf_count bytes that the caller brings, 0, or something else for a leaf
 * that is to be passed over. touched[leaf] becomes 1 for each leaf that took entries in, even if it
 * knew them all. States that are not declared yet are declared. Returns how many entries the blocks
 * have. All blocks are checked first: on SK_CORRUPT and SK_SCHEMA nothing was taken in. If memory
 * is short on the way (or a snapshot cannot be served), the leaves marked as touched have all of
 * their entries, and the others have none; states may have been declared. Trying again is safe. */
int64_t sk_spread(sk_store *store, const uint8_t *blocks, size_t len, uint8_t *touched);

/* What a pack has of a leaf: the frames of one segment of its chain, as they are stored
 * (frames.c). */
typedef struct sk_segment {
    uint32_t leaf;
    const uint8_t *frames;
    size_t len;
    const uint8_t *pack; /* its id, 16 bytes */
    uint64_t offset;     /* of the frames in the pack */
} sk_segment;

typedef enum sk_pick_outcome {
    SK_PICKED = 1,  /* now it is known for each key of that leaf what it has, or that it is
                     * missing */
    SK_TO_LOAD = 2, /* nothing was taken in: loading the whole leaf is less work */
    SK_UNFIT = 3    /* nothing was taken in: load the leaf; that will tell what is wrong */
} sk_pick_outcome;

/* Fills in the entries of some keys of a state from a checkpoint, as sk_leaf_decode with SK_UNDER
 * would, but without the rest of their leaves (chain.c). segments: ordered by leaf; all segments of
 * a leaf, newest first. outcomes: a byte for each segment, an sk_pick_outcome; only the byte of a
 * leaf's first segment is written, and only if some of the keys are in the leaf, and the leaf is
 * open and neither whole nor away. If memory is short on the way (or a snapshot cannot be served),
 * what was picked stays; trying again is safe. */
int sk_chains_pick(sk_store *store, uint32_t state, const sk_column *keys, int64_t n,
                   const sk_segment *segments, size_t count, uint8_t *outcomes);

/* Takes in what the home answered for one key: a clean entry, or that there is none (value NULL, or
 * expired by its stamp). stamp_ms is for timed states; SK_NO_TIME: as if written now. Does nothing
 * if the key is already here, because what is here is newer. If the key was written home and
 * evicted after the home was asked, the caller must drop the answer: it may be old, and nothing
 * here could tell. The same holds for SK_UNDER. */
int sk_install(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len,
               const uint8_t *value, size_t value_len, int64_t stamp_ms);

/* on: deletions stay remembered, even in whole leaves, until they are written home, and dirty
 * leaves are noted as such. To be called while no other thread uses the store. */
int sk_write_back(sk_store *store, int on);

/* Only tombstones, and entries that were not used since the hand of sk_evict last passed them, so
 * that what is changed all the time is not written all the time. */
#define SK_COLD 1
/* For sk_rows_take: all that is dirty in the store at one moment, even while other threads go on.
 * If that is more than bytes_max, nothing is taken and *leaf stays as it is. */
#define SK_MOMENT 2
/*
 * Write-back: takes what is dirty in leaves from *leaf on, whole leaves at a time, until it has
 * rows_max rows or bytes_max bytes or more; clean leaves cost nothing. Appends an array to buf: for
 * each entry or tombstone the name of its row and the row, as csrc/writeback.c describes them.
 * Afterwards *leaf is where to go on; it is sk_leaf_count if nothing is left. Returns the number of
 * rows.
 *
 * numbers[states]: the number that each state has at home, by id. SK_BAD_ARGUMENT if a state with
 * changes has none (the number is negative, or its id is not below `states`). counts[states] is set
 * to the number of rows of each state.
 *
 * The entries are marked as being written until sk_rows_done says whether the write succeeded.
 * Entries that change meanwhile are dirty again in either case. Callers must take turns: between a
 * sk_rows_take and its sk_rows_done nobody else may call sk_rows_take for the same leaves. If a
 * caller is interrupted, the entries that it left as being written are dirty again for the next
 * sk_rows_take that reaches them, and nothing else remains of it. The same holds for leaves that
 * are marked, replaced or moved while they are being written.
 */
int64_t sk_rows_take(sk_store *store, uint32_t *leaf, int flags, uint64_t rows_max,
                     uint64_t bytes_max, const int32_t *numbers, uint64_t *counts, uint32_t states,
                     sk_buf *buf);
/* Ends what sk_rows_take began in leaves [from, to): its rows are at home, or (written 0) its
 * entries are dirty again. */
int sk_rows_done(sk_store *store, uint32_t from, uint32_t to, int written);
/*
 * Tells the store all keys that the home has of a leaf and a state, n of them: key i is
 * keys[offsets[i] .. offsets[i + 1]). From then on a key is missing, and not unknown, if it is
 * neither here nor among these keys and was not taken by sk_rows_take since (csrc/filter.c says
 * how, and when that ends). No row may be taken between reading the home and this call.
 */
int sk_home_keys(sk_store *store, uint32_t state, uint32_t leaf, const uint8_t *keys,
                 const int64_t *offsets, uint32_t n);

/* Write-back of one leaf, as blocks: appends the dirty entries and tombstones of a leaf as delta
 * blocks and marks them as being written, until sk_dirty_done says whether the write succeeded. A
 * leaf has one write-back at a time: if a leaf is marked, replaced or moved in between, wait for
 * its sk_dirty_done before the next sk_dirty_take. */
int64_t sk_dirty_take(sk_store *store, uint32_t leaf, int flags, sk_buf *buf);
int sk_dirty_done(sk_store *store, uint32_t leaf, int written);
/* Drops clean entries (but no timers) that were not used since the clock's hand last passed them,
 * until bytes_wanted are free or the hand has gone around twice. Leaves that lose entries become
 * partial. Returns the bytes freed. */
int64_t sk_evict(sk_store *store, uint64_t bytes_wanted);

typedef struct sk_leaves sk_leaves;
/* Takes leaves [from, to) out of the store. They are away there from then on, so that a write on
 * its way is refused and does not land in a leaf that is gone. SK_NOT_OWNED if a leaf is already
 * away: of two callers that want a leaf, one gets it. */
int sk_detach(sk_store *store, uint32_t from, uint32_t to, sk_leaves **leaves);
/* Puts them into a store with as many leaves. On success *leaves is freed; else untouched. */
int sk_attach(sk_store *store, sk_leaves *leaves);
void sk_leaves_free(sk_leaves *leaves);
/* sk_detach and sk_attach at once, so that nothing can come between. If it fails, the leaves are
 * back in the source. Only if there is no memory even for that, *stuck has them (else it is
 * NULL). */
int sk_move(sk_store *source, sk_store *target, uint32_t from, uint32_t to, sk_leaves **stuck);

/* ---- Blocks (layout: csrc/block.h) --------------------------------------- */

typedef struct sk_block_info {
    uint64_t size; /* bytes of the block, header included */
    uint64_t entries;
    uint32_t leaf;
    uint8_t leaf_bits; /* log2 of the number of leaves */
    uint8_t kind;
    uint8_t is_delta;
    uint8_t is_timed;
    uint8_t key_width;    /* bytes of every key, or 0: see key_offsets */
    uint8_t value_width;  /* 8 for numbers, else 0: see value_offsets */
    uint8_t offset_width; /* 4 or 8 */
    char name[256];
    char key_type[24];
    /* where each column starts, from the start of the block; 0 = there is none */
    uint64_t hashes, key_offsets, keys, value_offsets, values, marks, stamps;
    uint64_t key_bytes, value_bytes;
} sk_block_info;

/* Reads the header and checks that the columns lie inside the block. */
int sk_block_read(const uint8_t *block, size_t len, sk_block_info *info);
/* Checks every entry: order, offsets, hashes, leaf, values. */
int sk_block_check(const uint8_t *block, size_t len);
/* SK_OK with the encoded value in buf, or SK_MISSING. If a delta says that the key is deleted, that
 * is SK_MISSING too, with buf->len 1. */
int sk_block_find(const uint8_t *block, size_t len, const uint8_t *key, size_t key_len,
                  sk_buf *buf);
/* The checksum is CRC32C of the block XOR seed (which binds it to a file and offset). */
int sk_block_seal(uint8_t *block, size_t len, uint32_t seed);
int sk_block_verify(const uint8_t *block, size_t len, uint32_t seed);
/* Writes a block again, for another leaf or type: only the entries of leaf `leaf` of 2^leaf_bits,
 * with i64 turned into f64, stamps added (SK_NO_TIME) or dropped, and as a delta if as_delta.
 * Appends a block without a checksum to buf, which must not hold the block that is read; appends
 * nothing if no entry is left and it is a delta. SK_SCHEMA if the types do not fit. The entries
 * that are written are checked as when decoding; so rewriting a block for all its leaves checks all
 * of its entries. */
int sk_block_rewrite(const uint8_t *block, size_t len, uint32_t leaf, uint32_t leaf_bits, int kind,
                     int flags, int as_delta, sk_buf *buf);

/* Appends the block in a form that compresses better (csrc/squeeze.c). SK_MISSING if it has none:
 * then nothing was appended that counts. */
int sk_block_squeeze(const uint8_t *block, size_t len, sk_buf *buf);
/* Writes the `size` bytes of the block that was squeezed. SK_CORRUPT if there is no such block; it
 * is to be checked like any other that is read. */
int sk_block_restore(const uint8_t *squeezed, size_t len, uint8_t *block, size_t size);

/* ---- Frames of a pack (csrc/frames.c) ------------------------------------- */
/*
 * frames: any number of blocks and compressed blocks, one after the other. id is 16 bytes, offset
 * is where the first one is in the file. SK_CORRUPT if a frame's magic or size cannot be right;
 * then nothing was written.
 */
/* Writes the plain checksum into frames that have none (0). */
int sk_frames_seal(uint8_t *frames, size_t len);
/* Appends the size (8 bytes) and checksum (4 bytes) of each frame, which identify a pack; returns
 * how many bytes. To be called before the frames are bound. */
int64_t sk_frames_digest(const uint8_t *frames, size_t len, sk_buf *buf);
/* Turns plain checksums into ones bound to their place, or bound checksums back into plain ones. */
int sk_frames_bind(uint8_t *frames, size_t len, const uint8_t *id, uint64_t offset);
/* Checks bound checksums. On SK_CORRUPT *bad is where the first bad frame begins in frames. */
int sk_frames_verify(const uint8_t *frames, size_t len, const uint8_t *id, uint64_t offset,
                     uint64_t *bad);

/* ---- Snapshots and changes ---------------------------------------------- */

typedef struct sk_snapshot sk_snapshot;

/* since: NULL for everything, or one epoch for each leaf (0: the whole leaf). bytes_max limits what
 * changing calls keep for the reader: logs, and encoded blocks; 0 means 64 MiB. */
int sk_snapshot_open(sk_store *store, const uint32_t *since, uint64_t bytes_max,
                     sk_snapshot **snapshot);
/* The snapshot then has shut leaves too, as they are. To be called before anything is read from the
 * snapshot and before the gates are opened: for a caller who is about to open the gates and must
 * have the leaves as they were. */
void sk_snapshot_add_shut(sk_snapshot *snapshot);
uint32_t sk_snapshot_epoch(sk_snapshot *snapshot);
/* Event time when the snapshot was taken, SK_NO_TIME if there was none. The snapshot has every
 * entry that was alive then, even if the entry expires before it is read. */
int64_t sk_snapshot_watermark(sk_snapshot *snapshot);
/* Appends the blocks of one more leaf; -SK_END after the last one. */
int64_t sk_snapshot_next(sk_snapshot *snapshot, uint32_t *leaf, sk_buf *buf);
/* What the leaf was when the snapshot was taken (or a negated status). Of a leaf that was not
 * whole, the snapshot has only what was here. The rest must come from its home, never from an older
 * snapshot: entries that were written home and evicted leave no trace in a delta. */
int sk_snapshot_residency(sk_snapshot *snapshot, uint32_t leaf);
/* The same for all leaves, one byte each. */
int sk_snapshot_residencies(sk_snapshot *snapshot, uint8_t *out);

typedef struct sk_filled {
    uint32_t leaf;
    uint32_t residency; /* sk_residency, as sk_snapshot_residency */
    uint64_t offset;    /* of its first block in the buffer */
    uint64_t length;    /* bytes of its blocks */
    uint32_t is_delta;  /* a delta was asked for, or the leaf was not whole */
    uint32_t zero;
} sk_filled;

/* Appends the blocks of leaf after leaf, with their plain checksums, until buf holds bytes_max or
 * more or records is full; at least one leaf. There is one record for each leaf that has blocks.
 * Returns the number of records, or -SK_END if no leaf was left. Leaves whose blocks are in buf are
 * no longer in the snapshot. So an error that comes after the first of them only ends the call
 * early; the next call meets the error again, if it persists. Several threads may fill buffers from
 * one snapshot at the same time, and each goes on until -SK_END. */
int64_t sk_snapshot_fill(sk_snapshot *snapshot, uint64_t bytes_max, sk_filled *records,
                         uint64_t records_max, sk_buf *buf);
void sk_snapshot_close(sk_snapshot *snapshot);

uint32_t sk_epoch(sk_store *store);
/* Starts a new epoch and returns the one that ended: later changes are "after" it. */
uint32_t sk_epoch_advance(sk_store *store);
/* From now on deletions are remembered, so that deltas since `epoch` or later can be made. A table
 * does not remember many more deletions than it has entries: beyond that it forgets them, and its
 * next delta is a full block, which is smaller then. UINT32_MAX: nobody needs deltas any more. */
int sk_track(sk_store *store, uint32_t epoch);
/* The leaf counts as changed in a way that no delta can express: its next delta has full blocks. */
int sk_leaf_forget(sk_store *store, uint32_t leaf);
/* changed[leaf] = 1 if the leaf changed after that epoch; one byte per leaf. */
int sk_changed_leaves(sk_store *store, uint32_t since, uint8_t *changed);

/* ---- Fault injection (testing builds only; elsewhere they do nothing) ----- */

/* The nth allocation from now on fails (1 is the next), and all later ones if `forever`; 0: none
 * fails. */
void sk_fail_alloc(int64_t nth, int forever);
/* Allocations since the last sk_fail_alloc. */
int64_t sk_alloc_count(void);
/* Fail points, by name (csrc/failpoint.h): at the nth visit from now on (1 is the next) the action
 * happens, once. action: 0 nothing, 1 fail with SK_NO_MEMORY, 2 SIGKILL, 3 wait for arg ms, 4 as
 * 1. */
int sk_failpoint_set(const char *name, int64_t nth, int action, int64_t arg);
/* Appends "name visits\n" for every fail point there is. */
int64_t sk_failpoint_list(sk_buf *buf);

#endif
