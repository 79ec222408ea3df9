/*
 * statekit.h: the contract of the native store.
 *
 * This is the one header that Python sees: the build strips the preprocessor
 * lines and hands the rest to cffi, so nothing here is declared twice. Keep to
 * what cffi parses: plain structs, enums, integer #defines and prototypes.
 *
 * Vocabulary (docs/glossary.md): a key hashes to one LEAF; a leaf holds one
 * TABLE per STATE; a STORE is an array of leaves. A leaf is WHOLE (all its
 * entries are here), ABSENT (none is), PARTIAL (some are, and those are newer
 * than what is at the leaf's HOME, the place that has the rest) or AWAY (it is
 * not this store's: no call about a key of it does anything but say so).
 *
 * Rules that hold for every function
 *  - Thread safe, unless it says otherwise. Only sk_close and sk_*_free need
 *    the caller to know that nobody else still uses the object.
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
    SK_UNKNOWN = 2,       /* not here, and the leaf is not whole: ask its home */
    SK_CHANGED = 3,       /* compare-and-set lost, or a container changed under its reader */
    SK_END = 4,           /* nothing more to read */
    SK_NO_MEMORY = 5,     /* the allocator said no */
    SK_LIMIT = 6,         /* the store's memory limit would be passed */
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
    SK_NOT_OWNED = 19     /* the leaf is away or shut: it is, or will be, another store's */
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
 * i64 to f64, and timed or not. Every table is converted; entries that become timed have the stamp
 * SK_NO_TIME. No delta reaches back over it. SK_SCHEMA if the types do not fit. */
int sk_state_retype(sk_store *store, const char *name, int kind, int flags);

typedef struct sk_stats {
    uint64_t entries;    /* live entries that are here; expired ones until they are found */
    uint64_t tombstones; /* deletions still remembered */
    uint64_t dirty;      /* entries and tombstones not yet written home */
    uint64_t bytes;      /* native memory: slots, keys, values, containers */
    uint64_t leaves[4];  /* leaves whole, partial, absent, away; a shut one counts as away, though
                          * its entries and bytes count, an expected one as absent */
    uint64_t flooded;    /* tables that went over to the secret hash */
    uint64_t operations; /* calls about one key and records of batches, since the store was made */
} sk_stats;

/* Sums over leaves [from, to) and one state or SK_ALL_STATES. Operations are counted by state, not
 * by leaf: they are 0 in a sum over part of the leaves. */
int sk_stats_read(sk_store *store, uint32_t state, uint32_t from, uint32_t to, sk_stats *stats);
uint64_t sk_bytes_used(sk_store *store);
int sk_bytes_limit(sk_store *store, uint64_t bytes_max);
/* Groups of slots visited plus keys compared to find this key: the price of one lookup. */
int64_t sk_probe_cost(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len);

/* ---- Time to live (csrc/ttl.c) -------------------------------------------- */
/*
 * An entry of a timed state is stamped with the time when it is written (and, if asked, read). It
 * has expired once stamp + ttl <= now: from then on no call returns it, counts it in or encodes
 * it, and whoever comes across it removes it. Times are in ms. Processing time is the system's
 * clock, kept from going back; event time is the watermark that sk_time_set was told last, and
 * unknown before the first one: then nothing expires, and what is written counts as written at
 * the first watermark. A store that is filled from blocks should be told the watermark they
 * belong to before it is read.
 */
typedef enum sk_clock { SK_PROCESSING_TIME = 0, SK_EVENT_TIME = 1 } sk_clock;

/* ttl_ms 0: entries do not expire, which is how a timed state starts, one that came with blocks
 * too. on_read: reading an entry is as good as writing it. Raising the time to live may bring
 * back what older copies still have. */
int sk_state_ttl(sk_store *store, uint32_t state, int64_t ttl_ms, int clock, int on_read);
/* Event time never goes back: an older watermark is ignored. Processing time stands still at
 * now_ms, for tests, until it is set to SK_NO_TIME: back to the system's clock. */
int sk_time_set(sk_store *store, int clock, int64_t now_ms);
int64_t sk_time(sk_store *store, int clock);
/* Removes expired entries, looking at about slots_max slots from where the last sweep stopped, at
 * most once around. Returns how many it removed. */
int64_t sk_sweep(sk_store *store, uint64_t slots_max);
/* 1 if an entry with this stamp, wherever it is, has expired; 0 if not; or a negated status. */
int sk_stamp_expired(sk_store *store, uint32_t state, int64_t stamp_ms);

/* ---- One key ------------------------------------------------------------ */

/* The leaf of a key, or a negated status. */
int64_t sk_key_leaf(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len);
int sk_contains(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len);
#define SK_BLIND 1 /* do not ask whether the entry exists: never SK_UNKNOWN */
int sk_delete(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len, int flags);

/* Any kind, in its encoded form: 8 bytes little endian (timers: for each due time), the bytes, or
 * MessagePack.
 * sk_get replaces what buf holds. */
int64_t sk_get(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len, sk_buf *buf);
int sk_put(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len,
           const uint8_t *value, size_t value_len);

typedef enum sk_fold { SK_ADD = 0, SK_MIN = 1, SK_MAX = 2 } sk_fold;

/* fold: a missing entry counts as initial for SK_ADD and as operand for MIN and MAX.
 * cas: expected NULL asks that the key be missing; on SK_CHANGED *result is the value
 * found, on SK_MISSING there is none. result may be NULL. */
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
 * get and fold once more, with the value as the result: to a caller through a binding, a place for
 * the value costs more than the call itself. Where there is no value they return INT64_MIN or a
 * NaN, and sk_value_status() says what the matter is; SK_OK if that is the value. value_or: a key
 * that is missing has that value.
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
 * Containers (list, map, nested). A path is MessagePack values one after the
 * other: an integer where the container on the way is a list (negative counts
 * from the end), a key where it is a map; empty is the root. `i` and `j` are
 * list positions with Python's meaning, `arg` is MessagePack.
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
 * `shape` says what to create where a write finds nothing: one letter per level
 * from the root, 'l' or 'm'; "ml" makes the root a map and its members lists.
 * NULL or too short: what is missing stays missing and the call says SK_MISSING.
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

int64_t sk_read(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len, int op,
                const uint8_t *path, size_t path_len, const uint8_t *arg, size_t arg_len, int64_t i,
                int64_t j, sk_buf *buf);
int64_t sk_write(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len, int op,
                 const uint8_t *path, size_t path_len, const char *shape, const uint8_t *arg,
                 size_t arg_len, int64_t i, int64_t j, sk_buf *buf);
/*
 * Reads a list or map a page at a time: an array of elements, or of keys and
 * values alternating. *cursor and *version start as 0 and are handed back
 * unchanged; SK_CHANGED if the container gained or lost elements in between,
 * SK_END after the last page.
 */
int64_t sk_page(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len,
                const uint8_t *path, size_t path_len, uint64_t *cursor, uint64_t *version,
                uint32_t elements_max, sk_buf *buf);

/* ---- Timers (csrc/timers.c) ------------------------------------------------ */

/* Setting a timer that is set already changes nothing. Like other entries, a key's timers are
 * unknown where they are not here and the leaf is not whole. */
int sk_timer_set(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len, int64_t due);
/* SK_MISSING if there is no such timer. */
int sk_timer_cancel(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len,
                    int64_t due);

#define SK_PEEK 1 /* leave them in place */

/*
 * Takes out every timer of leaves [from, to) that is here and due at the watermark (due <=
 * watermark), and appends a record for each, {int64 due, uint32 length of the key, the key}, in
 * the order of due times and then of key bytes. Returns how many. Each timer is taken by one
 * caller, once; if the call fails, none is.
 */
int64_t sk_timers_due(sk_store *store, uint32_t state, uint32_t from, uint32_t to,
                      int64_t watermark, int flags, sk_buf *buf);
/* The earliest due time of all timers that are here, INT64_MAX if there is none; or INT64_MIN,
 * which may be the earliest too, if there is no such state of timers (sk_value_status says which).
 */
int64_t sk_timers_next(sk_store *store, uint32_t state);

/* ---- Batches ------------------------------------------------------------ */

typedef enum sk_column_type {
    SK_COL_NONE = 0,
    SK_COL_I64 = 1,   /* data: int64_t[n] */
    SK_COL_F64 = 2,   /* data: double[n] */
    SK_COL_VAR32 = 3, /* data: bytes, offsets: int32_t[n + 1] */
    SK_COL_VAR64 = 4  /* data: bytes, offsets: int64_t[n + 1] */
} sk_column_type;

/* What the bytes of a SK_COL_VAR column stand for where an element of a container is wanted. */
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
 * is filled. */
int sk_pack_keys(const char *key_type, const sk_column *parts, int64_t n, int64_t *offsets,
                 sk_buf *buf);

/* The leaves of keys in a store of so many leaves: out[n]. Tuple keys come packed. */
int sk_route_keys(const char *key_type, const sk_column *keys, int64_t n, uint32_t leaves,
                  uint32_t *out);

/* ---- Leaves ------------------------------------------------------------- */

/* How much of it is here, whatever its gate: an sk_residency, or a negated status. */
int sk_leaf_residency(sk_store *store, uint32_t leaf);
/* The same of many leaves into out. It waits for no lock, so that whoever decodes a leaf holds
 * nobody up: one that is being marked just now is what it was before or what it is after. */
int sk_leaf_residencies(sk_store *store, const uint32_t *leaves, uint64_t n, uint8_t *out);
/* Marks leaves [from, to), and opens their gates. SK_ABSENT and SK_AWAY drop their entries,
 * SK_WHOLE forgets tombstones that neither sk_track nor (while they are dirty) sk_write_back still
 * asks for. SK_NOT_OWNED, with nothing marked, if a shut leaf is to be whole or partial: open it
 * instead. */
int sk_leaf_mark(sk_store *store, uint32_t from, uint32_t to, int residency);

/*
 * Gates: leaves that one process hands over to another (csrc/gate.c).
 *
 * SHUT: the leaf is being handed over. It stays as it is, to be read out: sk_leaf_encode,
 * sk_leaf_pick, sk_pick, sk_leaf_residency, sk_stats_read (which counts it among leaves that are
 * away) and sk_leaf_heat do as ever. Else it is as if it were away: calls about a key, sk_install,
 * sk_detach, sk_move and sk_attach answer SK_NOT_OWNED; sk_clear, sk_sweep, sk_evict,
 * sk_timers_due, sk_timers_next and sk_spread pass it over (sk_dirty_take does not: it may come
 * back, and must be home when all is); a snapshot that is taken meanwhile does not have it, unless
 * sk_snapshot_add_shut asks for it. It can be completed by sk_leaf_decode with SK_UNDER and
 * SK_UNDER_ALL, and stays shut. The one other thing that touches its entries is the first watermark
 * (csrc/ttl.c).
 *
 * EXPECTED: the leaf is absent and its entries are on their way. Every call about a key answers
 * SK_UNKNOWN, those too that do not ask what is there; so does sk_clear, blind or not. The first
 * sk_leaf_decode, sk_spread (of its entries) or sk_install that succeeds opens the gate, even if it
 * brings nothing. Snapshots see an absent leaf. Detached, it is expected where it is attached.
 */
typedef enum sk_gate { SK_GATE_OPEN = 0, SK_GATE_SHUT = 1, SK_GATE_EXPECTED = 2 } sk_gate;

/* Sets the gates of leaves [from, to), all or (on failure) none. When it returns, no call that
 * began before can still change a shut leaf. SK_NOT_OWNED if one is away and to be shut,
 * SK_BAD_ARGUMENT if one is to be expected and has entries. An away leaf that is to be expected is
 * this store's from then on, with no moment in which it would take a write. Opening a shut leaf
 * takes it back as it was, and deltas reach back over all of this. (If it was expected, and nothing
 * has come, it is expected again.) */
int sk_leaf_gate(sk_store *store, uint32_t from, uint32_t to, int gate);
int sk_leaf_gate_of(sk_store *store, uint32_t leaf); /* an sk_gate, or a negated status */
/* out[leaf] = about how many operations on it there were since the store was made, of all states:
 * calls about one key, each of them, and records of batches, by a sample of one in 31. */
int sk_leaf_heat(sk_store *store, uint64_t *out);
/* entries[leaf], bytes[leaf]: how many it has of a state, or of all; either may be NULL. */
int sk_leaf_sizes(sk_store *store, uint32_t state, uint64_t *entries, uint64_t *bytes);

/* Drops all entries of a state in [from, to), leaves that are away or shut aside. A leaf that is
 * not whole answers SK_UNKNOWN (its home has more) unless flags say SK_BLIND: then only what is
 * here goes. */
int sk_clear(sk_store *store, uint32_t state, uint32_t from, uint32_t to, int flags);

/* Appends one block per state that has entries (or the one state asked for). since > 0:
 * only what changed after that epoch, with deletions, as delta blocks; where that is more than half
 * of a state's entries, or not known, all of them as a full block. An away leaf has none. */
int64_t sk_leaf_encode(sk_store *store, uint32_t leaf, uint32_t state, uint32_t since, sk_buf *buf);
/* Appends one delta block with the entries of some keys, for SK_UNDER elsewhere: a key without an
 * entry is in it as a deletion, so that it is known to be missing there. keys: n encoded keys, in
 * any order, as often as they come (SK_COL_I64 will do for int keys); no keys, no block.
 * SK_BAD_ARGUMENT if one is of another leaf, SK_UNKNOWN if the leaf is not whole. */
int64_t sk_leaf_pick(sk_store *store, uint32_t leaf, uint32_t state, const sk_column *keys,
                     int64_t n, sk_buf *buf);

/* The same for keys of any leaves: appends one delta block of leaf 0 of 1 (all hashes), for
 * sk_spread elsewhere. Keys of leaves that are not whole, or away, are left out; no entries, no
 * block. only: a byte for each leaf, 0 to leave its keys out too; or NULL. The leaves of all keys
 * are locked together while it is made, so the caller should not ask for everything at once. */
int64_t sk_pick(sk_store *store, uint32_t state, const sk_column *keys, int64_t n,
                const uint8_t *only, sk_buf *buf);

typedef enum sk_decode_mode {
    SK_REPLACE = 0,   /* the leaf becomes what the blocks say, and whole */
    SK_UNDER = 1,     /* from the home: fills in only what is not here; leaf stays as marked */
    SK_UNDER_ALL = 2, /* as SK_UNDER, and the blocks are all the home has: the leaf is whole */
    SK_OVER = 3       /* a later delta: replaces, and deletes what it calls deleted */
} sk_decode_mode;

/* blocks: any number of blocks of this leaf, one after the other. States that are not
 * declared yet are declared from the block. An away leaf takes SK_REPLACE only, a shut one SK_UNDER
 * and SK_UNDER_ALL. */
int sk_leaf_decode(sk_store *store, uint32_t leaf, const uint8_t *blocks, size_t len, int mode);

/* blocks: any number of blocks as sk_pick makes them, of any states, also several of one (then the
 * first to have a key is right). Each leaf that is open and not whole, or expected, takes its
 * entries in as sk_leaf_decode with SK_UNDER would, all of them at once; other leaves are passed
 * over. touched[leaf] = 1 for each leaf that took entries in, even if it knew them all; the caller
 * brings sk_leaf_count bytes: 0, or something else for a leaf that is to be passed over. States
 * that are not declared yet are declared. Returns how many entries the blocks have. All blocks are
 * checked first: on SK_CORRUPT and SK_SCHEMA nothing was taken in. If memory is short on the way
 * (or a snapshot cannot be served), the leaves before, which are those touched, have all of theirs,
 * the others nothing; states may have been declared. Trying again is safe. */
int64_t sk_spread(sk_store *store, const uint8_t *blocks, size_t len, uint8_t *touched);

/* What a pack has of a leaf: the frames of one step of its chain, as they are stored (frames.c). */
typedef struct sk_segment {
    uint32_t leaf;
    const uint8_t *frames;
    size_t len;
    const uint8_t *pack; /* its id, 16 bytes */
    uint64_t offset;     /* of the frames in the pack */
} sk_segment;

typedef enum sk_pick_outcome {
    SK_PICKED = 1,  /* it is known now what each key of that leaf has, or that it has nothing */
    SK_TO_LOAD = 2, /* nothing was taken in: to load the leaf as a whole is less work */
    SK_UNFIT = 3    /* nothing was taken in: it needs loading, which will tell what is wrong */
} sk_pick_outcome;

/* Fills in the entries of some keys of a state out of a checkpoint, as sk_leaf_decode with SK_UNDER
 * would, without the rest of their leaves (chain.c). segments: by ascending leaf, those of a leaf
 * newest first and all of them. outcomes: a byte for each segment; written for the first one of a
 * leaf, if the leaf has keys here, and is open and neither whole nor away. If memory is short on
 * the way (or a snapshot cannot be served), what was picked stays; trying again is safe. */
int sk_chains_pick(sk_store *store, uint32_t state, const sk_column *keys, int64_t n,
                   const sk_segment *segments, size_t count, uint8_t *outcomes);

/* What the home answered for one key: a clean entry, or (value NULL, or expired by its stamp) that
 * there is none. stamp_ms is for timed states; SK_NO_TIME: as if written now.
 * Does nothing if the key is here already, because what is here is newer. The caller must drop an
 * answer that was asked for before a write-back and an eviction of the key: it may be old, and
 * nothing here could tell. The same holds for SK_UNDER. */
int sk_install(sk_store *store, uint32_t state, const uint8_t *key, size_t key_len,
               const uint8_t *value, size_t value_len, int64_t stamp_ms);

/* on: deletions stay remembered, even in whole leaves, until they are written home, and dirty
 * leaves are noted as such. To be called while no other thread uses the store. */
int sk_write_back(sk_store *store, int on);

/* Only entries not used since the hand of sk_evict last passed, and tombstones, so that what is
 * changed all the time is not written all the time. */
#define SK_COLD 1
/* For sk_rows_take: all that is dirty in the store at one moment, though other threads go on. If
 * that is more than bytes_max, nothing is taken and *leaf stays as it is. */
#define SK_MOMENT 2
/*
 * Write-back: takes what is dirty in leaves from *leaf on, whole leaves at a time, until it has
 * rows_max rows or bytes_max bytes or more; clean leaves cost nothing. Appends an array to buf: for
 * each entry or tombstone the name of its row and the row, as csrc/writeback.c describes them.
 * *leaf is where to go on then, sk_leaf_count if nothing is left. Returns how many rows there are.
 *
 * numbers[states]: what each state is called at home, by id. SK_BAD_ARGUMENT if a state with
 * changes has none (it is negative, or its id not below `states`). counts[states] is set to the
 * rows of each.
 *
 * The entries are held as being written until sk_rows_done says how that went. If they change
 * meanwhile they are dirty again, written or not. Callers serialize themselves: between a take and
 * its sk_rows_done there is no sk_rows_take of the same leaves by another. What an interrupted
 * caller left as being written is dirty again for the next one who comes by, with no other trace.
 * The same holds for leaves that are marked, replaced or moved while they are being written.
 */
int64_t sk_rows_take(sk_store *store, uint32_t *leaf, int flags, uint64_t rows_max,
                     uint64_t bytes_max, const int32_t *numbers, uint64_t *counts, uint32_t states,
                     sk_buf *buf);
/* Ends what sk_rows_take began in leaves [from, to): its rows are home, or (written 0) dirty again.
 */
int sk_rows_done(sk_store *store, uint32_t from, uint32_t to, int written);
/*
 * Tells all keys that the home has of a leaf and a state: keys[offsets[i] .. offsets[i + 1]), n of
 * them. From then on a key that is neither here nor among them, nor was taken by sk_rows_take
 * since, is missing and not unknown (csrc/filter.c says how, and when that ends). No row may be
 * taken between reading the home and this call.
 */
int sk_home_keys(sk_store *store, uint32_t state, uint32_t leaf, const uint8_t *keys,
                 const int64_t *offsets, uint32_t n);

/* One leaf's write-back, as blocks: appends the dirty entries and tombstones of a leaf as delta
 * blocks and holds them as being written; sk_dirty_done says how that went. One write-back a leaf
 * at a time: after marking, replacing or moving a leaf in between, wait for its sk_dirty_done
 * before the next sk_dirty_take. */
int64_t sk_dirty_take(sk_store *store, uint32_t leaf, int flags, sk_buf *buf);
int sk_dirty_done(sk_store *store, uint32_t leaf, int written);
/* Drops clean entries (timers aside) not used since the clock's hand last passed, until
 * bytes_wanted are free or two rounds are done; leaves that lose entries become partial. Returns
 * bytes freed. */
int64_t sk_evict(sk_store *store, uint64_t bytes_wanted);

typedef struct sk_leaves sk_leaves;
/* Takes leaves [from, to) out of the store; they are away there from then on, so that a write on
 * its way finds out rather than land in a leaf that is gone. SK_NOT_OWNED if one is away already:
 * of two that want a leaf, one gets it. */
int sk_detach(sk_store *store, uint32_t from, uint32_t to, sk_leaves **leaves);
/* Puts them into a store with as many leaves. On success *leaves is freed; else untouched. */
int sk_attach(sk_store *store, sk_leaves *leaves);
void sk_leaves_free(sk_leaves *leaves);
/* Both at once, so that nothing can come between. If it fails the leaves are back in the source;
 * only if there is no memory even for that, *stuck has them (else it is NULL). */
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
/* SK_OK with the encoded value in buf, SK_MISSING (a delta's deletion too: then buf->len is 1). */
int sk_block_find(const uint8_t *block, size_t len, const uint8_t *key, size_t key_len,
                  sk_buf *buf);
/* The checksum is CRC32C of the block XOR seed (which binds it to a file and offset). */
int sk_block_seal(uint8_t *block, size_t len, uint32_t seed);
int sk_block_verify(const uint8_t *block, size_t len, uint32_t seed);
/* One block once more, for another place or type: only the entries of leaf `leaf` of 2^leaf_bits,
 * i64 turned into f64, stamps added (SK_NO_TIME) or dropped, and as a delta if as_delta. Appends a
 * block without a checksum to buf, which must not hold the one that is read; nothing if no entry
 * is left and it is a delta. SK_SCHEMA if the types do not fit. Entries of the leaf are checked as
 * decoding does; slices of all leaves together check all of them. */
int sk_block_rewrite(const uint8_t *block, size_t len, uint32_t leaf, uint32_t leaf_bits, int kind,
                     int flags, int as_delta, sk_buf *buf);

/* ---- Frames of a pack (csrc/frames.c) ------------------------------------- */
/*
 * frames: any number of blocks and compressed blocks, one after the other. id is 16 bytes, offset
 * is where the first one is in the file. SK_CORRUPT if a frame's magic or size cannot be right;
 * then nothing was written.
 */
/* Writes the plain checksum into frames that have none (0). */
int sk_frames_seal(uint8_t *frames, size_t len);
/* Appends size (8 bytes) and checksum (4) of each, which identify a pack; returns how many bytes.
 * Before binding. */
int64_t sk_frames_digest(const uint8_t *frames, size_t len, sk_buf *buf);
/* Binds plain checksums to their place, or bound ones back to plain ones. */
int sk_frames_bind(uint8_t *frames, size_t len, const uint8_t *id, uint64_t offset);
/* Checks bound checksums. On SK_CORRUPT *bad is where in frames the first bad one begins. */
int sk_frames_verify(const uint8_t *frames, size_t len, const uint8_t *id, uint64_t offset,
                     uint64_t *bad);

/* ---- Snapshots and changes ---------------------------------------------- */

typedef struct sk_snapshot sk_snapshot;

/* since: NULL for everything, or one epoch a leaf (0: the whole leaf). bytes_max bounds the
 * blocks that writers encode ahead of the reader; 0 means 64 MiB. */
int sk_snapshot_open(sk_store *store, const uint32_t *since, uint64_t bytes_max,
                     sk_snapshot **snapshot);
/* Leaves that are shut are in it too, as they are: to be called before anything is read from it
 * and before the gates are opened. For one who opens them next, and must have them as they were. */
void sk_snapshot_add_shut(sk_snapshot *snapshot);
uint32_t sk_snapshot_epoch(sk_snapshot *snapshot);
/* Event time when it was taken, SK_NO_TIME if there was none: no entry that was alive then is
 * missing in it, even if it expires before it is read. */
int64_t sk_snapshot_watermark(sk_snapshot *snapshot);
/* Appends the blocks of one more leaf; -SK_END after the last one. */
int64_t sk_snapshot_next(sk_snapshot *snapshot, uint32_t *leaf, sk_buf *buf);
/* What the leaf was when the snapshot was taken (or a negated status). A leaf that was not whole
 * is in the snapshot only as far as it was here, and the rest must come from its home, never from
 * an older snapshot: what was written home and evicted has left no trace in a delta. */
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
 * more or records is full; one leaf at least. One record for each leaf that has blocks. Returns
 * how many records, -SK_END if no leaf was left. Leaves that are in buf have left the snapshot, so
 * an error that comes after the first of them is kept for the next call. Several threads may fill
 * buffers from one snapshot at the same time, and each goes on until -SK_END. */
int64_t sk_snapshot_fill(sk_snapshot *snapshot, uint64_t bytes_max, sk_filled *records,
                         uint64_t records_max, sk_buf *buf);
void sk_snapshot_close(sk_snapshot *snapshot);

uint32_t sk_epoch(sk_store *store);
/* Starts a new epoch and returns the one that ended: later changes are "after" it. */
uint32_t sk_epoch_advance(sk_store *store);
/* From now on remember deletions, so that deltas since `epoch` and later can be made. A table does
 * not remember many more than it has entries: beyond that it forgets them, and its next delta is a
 * full block, which is smaller by then. */
int sk_track(sk_store *store, uint32_t epoch);
/* The leaf counts as changed in a way that no delta can tell: the next one of it is a full block.
 */
int sk_leaf_forget(sk_store *store, uint32_t leaf);
/* changed[leaf] = 1 if the leaf changed after that epoch; one byte per leaf. */
int sk_changed_leaves(sk_store *store, uint32_t since, uint8_t *changed);

/* ---- Fault injection (testing builds only; elsewhere they do nothing) ----- */

/* The nth allocation from now fails (1 is the next), and all later ones if `forever`; 0: none. */
void sk_fail_alloc(int64_t nth, int forever);
/* Allocations since the last sk_fail_alloc. */
int64_t sk_alloc_count(void);
/* Fail points, by name (csrc/failpoint.h): the nth visit from now (1 is the next) does something,
 * once. action: 0 nothing, 1 fail with SK_NO_MEMORY, 2 SIGKILL, 3 wait for arg ms, 4 as 1. */
int sk_failpoint_set(const char *name, int64_t nth, int action, int64_t arg);
/* Appends "name visits\n" for every fail point there is. */
int64_t sk_failpoint_list(sk_buf *buf);

#endif
