/*
 * table.h: one state's entries in one leaf.
 *
 * An open-addressing table of 16-slot groups. Beside the slots lies one tag byte
 * per slot; a probe compares 16 tags at once and then, nearly always, one key.
 *
 *     slots   |  0 |  1 | ... | 15 | 16 | ...        32 bytes each, two a cache line
 *     tags    | t0 | t1 | ... |t15 |t16 | ...        0 empty, 1 deleted, else 8 hash bits
 *              \------ group 0 ---/ \- group 1 ...
 *     dirty   |  16 bits | 16 bits | ...             set: the slot may be dirty; see sk_table_track
 *
 *     a slot     0        8      12    13     14                      32
 *                | value  | epoch|marks|keylen| key, up to 18 bytes    |   short key
 *                | value  | epoch|marks| 0xff |..| pointer |            |   longer key
 *                | value  | epoch|marks| .... | key, up to 10 | stamp   |   in a timed table
 *
 * So an int or float with a key of up to 18 bytes takes one cache line plus its tag. A timed table
 * keeps the time when an entry was last touched in the last 8 bytes of the slot's key field. So its
 * entries take no more memory, unless their keys have 11 to 18 bytes.
 *
 * Placement is monotone in the hash: group = (32 hash bits after the leaf's
 * prefix) * groups / 2^32. So the table lies nearly in hash order (encoding a
 * block, which is sorted by hash, needs next to no sorting, and decoding one
 * writes memory front to back) and the number of groups need not be a power of
 * two: it grows by a half or a third, which keeps 58 to 87 % of the slots filled.
 *
 * The hash is the public routing hash until an insertion has to go too far (SK_WAY_GROUPS_MAX
 * groups, or too many slots with its tag); then the table rehashes itself with a secret hash and
 * keeps that hash ("flooded"). Honest keys practically never cause this; crafted ones gain nothing.
 *
 * All functions expect the leaf's lock. Failures leave the table as it was.
 */
#ifndef SK_TABLE_H
#define SK_TABLE_H

#include "hash.h"
#include "kind.h"

#include <assert.h>

#if defined(__SSE2__) && !defined(SK_PORTABLE)
#include <emmintrin.h>
#endif

#define SK_GROUP 16      /* slots in a group */
#define SK_GROUP_FILL 14 /* slots of a group that may be taken, on average */
#define SK_KEY_INLINE 18 /* longest key kept in its slot */
#define SK_KEY_INLINE_TIMED 10
#define SK_KEY_HEAP 0xff /* key_len of a longer key: key[2..10) points to an sk_long_key */
/* How far an insertion may go. With 14 of 16 slots taken, a run of L full groups has a probability
 * of about exp(-L / 7): runs of 32 happen in honest tables of 10,000 entries, runs of 128 in none.
 * An honest key meets its tag on another key once in 18 groups. */
#define SK_WAY_GROUPS_MAX 128
#define SK_WAY_HITS_MAX(groups) (12 + (groups) / 8)
#define SK_GROUPS_MAX (1u << 27) /* 2^31 slots */

#define SK_TAG_EMPTY 0
#define SK_TAG_DELETED 1

/* Marks of an entry. */
#define SK_MARK_DIRTY 1      /* changed since it was last written home */
#define SK_MARK_WRITING 2    /* taken by sk_dirty_take, not yet confirmed */
#define SK_MARK_USED 4       /* touched since the clock's hand last passed */
#define SK_MARK_TOMB 8       /* a remembered deletion; the slot has a key and no value */
#define SK_MARK_UNSTAMPED 16 /* written before the first watermark, once: see ttl.c */
#define SK_MARK_SAVED 32     /* in a log, never in a table; the value is a blob: see undo.h */

typedef struct sk_slot {
    sk_value value;
    uint32_t epoch; /* store epoch of the last change; 0 = as it came from the home */
    uint8_t marks;
    uint8_t key_len; /* 0 .. SK_KEY_INLINE, or SK_KEY_HEAP */
    uint8_t key[SK_KEY_INLINE];
} sk_slot;
static_assert(sizeof(sk_slot) == 32, "two slots a cache line");

/* A key that does not fit its slot. */
typedef struct sk_long_key {
    uint32_t len;
    uint32_t check; /* 32 bits of the hash that places it: tells most other keys apart */
    uint8_t data[];
} sk_long_key;

typedef struct sk_table {
    sk_slot *slots;      /* groups * 16 slots, then as many tags and dirty bits: one allocation */
    uint8_t *tags;       /* slots + groups * 16 */
    sk_mem mem;          /* all memory of this table */
    uint32_t groups;     /* 0: nothing allocated */
    uint32_t taken;      /* slots whose tag is not SK_TAG_EMPTY */
    uint32_t live;       /* entries */
    uint32_t tombs;      /* tombstones */
    uint32_t dirty;      /* entries and tombstones marked SK_MARK_DIRTY or SK_MARK_WRITING */
    uint32_t forgot;     /* newest epoch of a change that left no trace here; see sk_forgot */
    uint32_t operations; /* calls about its keys; when it wraps, the state's total gets 2^32 */
    bool is_flooded;     /* placed by the secret hash */
    bool tracks_dirty;   /* the dirty bits are kept */
} sk_table;
static_assert(sizeof(sk_table) <= 64, "a table's head is one cache line");

/* The time, as one operation on a timed table sees it (ttl.c). All in ms. */
typedef struct sk_timing {
    int64_t now;    /* what touched entries are stamped with; SK_NO_TIME: not known yet */
    int64_t first;  /* what a stamp of SK_NO_TIME stands for; SK_NO_TIME: not known yet */
    int64_t ttl_ms; /* 0: entries do not expire */
    bool on_read;   /* reading touches */
} sk_timing;

typedef struct sk_key {
    const uint8_t *data;
    size_t len;
    uint64_t hash; /* routing hash */
} sk_key;

/* What a table needs to know about its leaf, state and store. */
typedef struct sk_table_env {
    const sk_key_type *key_type;
    const sk_timing *timing; /* NULL: the table is not timed, or nothing expires right now */
    bool is_timed;           /* slots have stamps */
    uint8_t kind;            /* sk_kind */
    uint8_t leaf_bits;       /* hash bits that chose the leaf */
    bool is_whole;           /* the leaf is whole: a missing key is missing */
    bool writes_back;        /* dirty tombstones must stay until written home */
    uint32_t epoch;          /* what changes are stamped with */
    uint32_t keep_after; /* tombstones of a later epoch must stay for deltas; UINT32_MAX: none */
    uint32_t expected;   /* entries that are likely to follow the one being inserted */
} sk_table_env;

/* ---- Probing (inline: this is the hot path) ---- */

/* Bit k is set if byte k of the group equals tag. */
static inline uint32_t sk_group_match(const uint8_t *group, uint8_t tag) {
#if defined(__SSE2__) && !defined(SK_PORTABLE)
    __m128i tags = _mm_load_si128((const __m128i *)group);
    return (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(tags, _mm_set1_epi8((char)tag)));
#else
    uint32_t bits = 0;
    for (int half = 0; half < 2; half++) {
        /* A byte of x is zero where the tag matches; y has the top bit of exactly those. */
        uint64_t x = sk_load64(group + 8 * half) ^ (0x0101010101010101ULL * tag);
        uint64_t y =
            ~(((x & 0x7f7f7f7f7f7f7f7fULL) + 0x7f7f7f7f7f7f7f7fULL) | x | 0x7f7f7f7f7f7f7f7fULL);
        bits |= (uint32_t)(((y >> 7) * 0x0102040810204080ULL) >> 56) << (8 * half);
    }
    return bits;
#endif
}

static inline uint8_t sk_tag_of(uint64_t hash) {
    uint8_t tag = (uint8_t)hash;
    return tag < 2 ? tag + 2 : tag;
}

static inline uint32_t sk_group_of(uint64_t hash, unsigned leaf_bits, uint32_t groups) {
    return (uint32_t)((((hash << leaf_bits) >> 32) * groups) >> 32);
}

static inline sk_long_key *sk_slot_long_key(const sk_slot *slot) {
    sk_long_key *p;
    memcpy(&p, slot->key + 2, sizeof p);
    return p;
}

static inline const uint8_t *sk_slot_key(const sk_slot *slot, size_t *len) {
    if (slot->key_len != SK_KEY_HEAP) {
        *len = slot->key_len;
        return slot->key;
    }
    const sk_long_key *key = sk_slot_long_key(slot);
    *len = key->len;
    return key->data;
}

/* The stamp of a slot in a timed table. */
static inline int64_t sk_slot_stamp(const sk_slot *slot) {
    return (int64_t)sk_load64(slot->key + SK_KEY_INLINE_TIMED);
}

static inline void sk_slot_set_stamp(sk_slot *slot, int64_t stamp) {
    sk_store64(slot->key + SK_KEY_INLINE_TIMED, (uint64_t)stamp);
}

/* The stamp that counts: an entry from before the first watermark is as old as that watermark. */
static inline int64_t sk_stamp_of(const sk_timing *timing, const sk_slot *slot) {
    int64_t stamp = sk_slot_stamp(slot);
    return stamp == SK_NO_TIME ? timing->first : stamp;
}

/* Expired: stamp + ttl <= now. A sum beyond 64 bits counts as INT64_MAX. */
static inline bool sk_is_expired(const sk_timing *timing, int64_t stamp) {
    int64_t end;
    if (timing->ttl_ms == 0 || timing->now == SK_NO_TIME || stamp == SK_NO_TIME) return false;
    if (__builtin_add_overflow(stamp, timing->ttl_ms, &end)) end = INT64_MAX;
    return end <= timing->now;
}

static inline bool sk_slot_is_live(const sk_slot *slot) { return !(slot->marks & SK_MARK_TOMB); }

static inline bool sk_slot_is_expired(const sk_table_env *env, const sk_slot *slot) {
    return env->timing != NULL && sk_slot_is_live(slot) &&
           sk_is_expired(env->timing, sk_stamp_of(env->timing, slot));
}

/* Overlapping loads instead of memcmp: keys are short, and a call would cost more than these
 * loads. */
static inline bool sk_short_equal(const uint8_t *a, const uint8_t *b, size_t len) {
    if (len >= 8) {
        uint64_t diff =
            (sk_load64(a) ^ sk_load64(b)) | (sk_load64(a + len - 8) ^ sk_load64(b + len - 8));
        if (len > 16) diff |= sk_load64(a + 8) ^ sk_load64(b + 8);
        return diff == 0;
    }
    if (len >= 4)
        return ((sk_load32(a) ^ sk_load32(b)) |
                (sk_load32(a + len - 4) ^ sk_load32(b + len - 4))) == 0;
    for (size_t i = 0; i < len; i++)
        if (a[i] != b[i]) return false;
    return true;
}

static inline int sk_key_compare(const uint8_t *a, size_t a_len, const uint8_t *b, size_t b_len) {
    size_t shorter = a_len < b_len ? a_len : b_len;
    int order = shorter == 0 ? 0 : memcmp(a, b, shorter);
    return order != 0 ? order : (a_len > b_len) - (a_len < b_len);
}

static inline bool sk_slot_has_key(const sk_slot *slot, uint64_t hash, const uint8_t *key,
                                   size_t len) {
    if (__builtin_expect(slot->key_len != SK_KEY_HEAP, 1))
        return slot->key_len == len && sk_short_equal(slot->key, key, len);
    const sk_long_key *held = sk_slot_long_key(slot);
    return held->check == (uint32_t)(hash >> 8) && held->len == len &&
           memcmp(held->data, key, len) == 0;
}

/* The routing hash of a key that was routed when it came in. */
static inline uint64_t sk_routing_of(const sk_table_env *env, const uint8_t *key, size_t len) {
    if (len < 32 && !env->key_type->is_tuple) return sk_xxh64_short(key, len, SK_ROUTE_SEED);
    uint64_t routing = 0;
    int status = sk_key_route(env->key_type, key, len, &routing);
    assert(status == SK_OK);
    (void)status;
    return routing;
}

static inline uint32_t sk_leaf_of(uint64_t hash, unsigned leaf_bits) {
    return leaf_bits == 0 ? 0 : (uint32_t)(hash >> (64 - leaf_bits));
}

/* The hash that places a key in this table: the routing hash, or the secret one. */
static inline uint64_t sk_table_hash(const sk_table *table, uint64_t routing, const uint8_t *key,
                                     size_t len) {
    return __builtin_expect(table->is_flooded, 0) ? sk_secret_hash(key, len) : routing;
}

/* The key's slot (live or tombstone), or NULL. *cost, if not NULL, counts groups and comparisons.
 */
static inline sk_slot *sk_table_find_counted(const sk_table *table, unsigned leaf_bits,
                                             uint64_t routing, const uint8_t *key, size_t len,
                                             uint32_t *cost) {
    if (table->groups == 0) return NULL;
    uint64_t hash = sk_table_hash(table, routing, key, len);
    uint32_t group = sk_group_of(hash, leaf_bits, table->groups);
    uint8_t tag = sk_tag_of(hash);
    /* Ends at a group with an empty slot: at most 14/16 of all slots are ever taken. */
    for (;;) {
        const uint8_t *tags = table->tags + (size_t)group * SK_GROUP;
        if (cost != NULL) ++*cost;
        for (uint32_t hits = sk_group_match(tags, tag); hits != 0; hits &= hits - 1) {
            sk_slot *slot = table->slots + (size_t)group * SK_GROUP + (unsigned)__builtin_ctz(hits);
            if (cost != NULL) ++*cost;
            if (sk_slot_has_key(slot, hash, key, len)) return slot;
        }
        if (sk_group_match(tags, SK_TAG_EMPTY) != 0) return NULL;
        if (++group == table->groups) group = 0;
    }
}

static inline sk_slot *sk_table_find(const sk_table *table, unsigned leaf_bits, uint64_t routing,
                                     const uint8_t *key, size_t len) {
    return sk_table_find_counted(table, leaf_bits, routing, key, len, NULL);
}

/* ---- Entries ---- */

/* Adds a slot for a key that is not there: no value, no marks, no stamp. It is counted neither as
 * live nor as a tombstone; the caller does that. NULL if memory is short (sk_alloc_status). */
sk_slot *sk_table_insert(sk_table *table, const sk_table_env *env, uint64_t routing,
                         const uint8_t *key, size_t len);
/* The same where sk_table_reserve made room for it: only memory for its key can be short. */
sk_slot *sk_table_insert_reserved(sk_table *table, const sk_table_env *env, uint64_t routing,
                                  const uint8_t *key, size_t len);
/* Makes room for `more` insertions, so that they can only fail for lack of memory for their
 * keys. */
int sk_table_reserve(sk_table *table, const sk_table_env *env, uint32_t more);
/* Removes a slot with its key and its value, and lowers the counts. */
void sk_table_remove(sk_table *table, const sk_table_env *env, sk_slot *slot);
/* Gives memory back after many removals: when only an eighth of it is in use, or (eager) when a
 * smaller array would do. Never fails: it may do nothing. Slots move. */
void sk_table_trim(sk_table *table, const sk_table_env *env, bool eager);
/* Drops tombstones that env says need not stay. If there are too many (sk_table_tombs_pass), it
 * also drops those that only deltas would need. */
void sk_table_purge(sk_table *table, const sk_table_env *env);
/* Frees everything; only `forgot` and `operations` stay. */
void sk_table_clear(sk_table *table, int kind);
/* Frees what the value holds (numbers: nothing). */
void sk_value_free(sk_mem *mem, int kind, sk_value value);

/* Moves every entry of `from` into `into`, which has room (sk_table_reserve): where both have the
 * key, `from` wins if `over`, else `into`. With `over`, tombstones of `from` delete. Cannot fail.
 * `from` ends empty. */
void sk_table_merge(sk_table *into, sk_table *from, const sk_table_env *env, bool over);

/* How many tombstones more than entries a table may keep for deltas. A delta with more of them
 * costs more than a full block, and with a queue, whose keys come and go, they would pile up
 * without end. */
#define SK_TOMBS_SPARE 64

/* True if there are too many tombstones that only deltas may need. Dirty entries are counted as if
 * all of them were tombstones that must stay for the home, so purging frees at least the excess. */
static inline bool sk_table_tombs_pass(const sk_table *table, const sk_table_env *env) {
    uint64_t kept = (uint64_t)table->live + SK_TOMBS_SPARE;
    if (env->writes_back) kept += table->dirty;
    return env->is_whole && table->tombs > kept;
}

/* Worth writing home now: it is not likely to change again soon. */
static inline bool sk_slot_is_dirty_and_cold(const sk_slot *slot) {
    return (slot->marks & SK_MARK_DIRTY) &&
           (!(slot->marks & SK_MARK_USED) || !sk_slot_is_live(slot));
}

/* A bit for each slot, 16 a group: 0 if the slot is neither dirty nor being written. */
static inline uint16_t *sk_table_dirty_bits(const sk_table *table) {
    return (uint16_t *)(table->tags + (size_t)table->groups * SK_GROUP);
}

static inline bool sk_slot_is_dirty(const sk_slot *slot) {
    return (slot->marks & (SK_MARK_DIRTY | SK_MARK_WRITING)) != 0;
}

static inline void sk_table_set_dirty_bit(sk_table *table, const sk_slot *slot, bool on) {
    size_t at = (size_t)(slot - table->slots);
    uint16_t *bits = &sk_table_dirty_bits(table)[at / SK_GROUP],
             bit = (uint16_t)(1u << at % SK_GROUP);
    *bits = (uint16_t)(on ? *bits | bit : *bits & ~bit);
}

/* True if nothing else in the table was dirty: from now on write-back must look at this table. */
static inline bool sk_slot_mark_dirty(sk_table *table, sk_slot *slot) {
    bool is_first = false;
    if (!sk_slot_is_dirty(slot)) {
        is_first = table->dirty++ == 0;
        if (__builtin_expect(table->tracks_dirty, 0)) sk_table_set_dirty_bit(table, slot, true);
    }
    slot->marks |= SK_MARK_DIRTY | SK_MARK_USED;
    return is_first;
}

/* From now on the dirty bits are kept, so that dirty slots are found without looking at the others.
 * For tables that are written home; others never pay for it. */
void sk_table_track(sk_table *table);

/* Iterates over slots that are dirty or being written, in a table that tracks dirty slots. */
static inline sk_slot *sk_table_next_dirty(sk_table *table, size_t *at) {
    uint16_t *bits = sk_table_dirty_bits(table);
    for (size_t group; (group = *at / SK_GROUP) < table->groups; *at = (group + 1) * SK_GROUP) {
        if (group + 4 <= table->groups && sk_load64((const uint8_t *)(bits + group)) == 0) {
            group += 3; /* four at a time */
            continue;
        }
        uint32_t rest = bits[group] & 0xffffu << *at % SK_GROUP;
        for (; rest != 0; rest &= rest - 1) {
            size_t i = group * SK_GROUP + (unsigned)__builtin_ctz(rest);
            sk_slot *slot = table->slots + i;
            if (table->tags[i] > SK_TAG_DELETED && sk_slot_is_dirty(slot)) {
                *at = i + 1;
                return slot;
            }
            sk_table_set_dirty_bit(table, slot, false); /* it is stale */
        }
    }
    return NULL;
}

/* Iterates over taken slots: for (size_t at = 0; (slot = sk_table_next(t, &at)) != NULL;). */
static inline sk_slot *sk_table_next(const sk_table *table, size_t *at) {
    size_t end = (size_t)table->groups * SK_GROUP;
    while (*at < end) {
        size_t i = (*at)++;
        if (table->tags[i] > SK_TAG_DELETED) return table->slots + i;
    }
    return NULL;
}

#endif
