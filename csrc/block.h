/*
 * block.h: one state's entries in one leaf, as bytes. The unit of checkpoints,
 * transfers and scans.
 *
 * Little endian. Every column starts at a multiple of 8 (zero padding before it), so
 * a mapped block is readable in place, by Arrow too. Entries are sorted by routing
 * hash and then by key bytes: one key is found by binary search, diff and merge are
 * linear, and equal state gives equal bytes.
 *
 *   at  bytes  field
 *    0    4    magic "SKB1"
 *    4    4    CRC32C of bytes 8 .. size, XOR the caller's seed; 0 until sealed
 *    8    8    size of the block, this header included; a multiple of 8
 *   16    8    n, the number of entries
 *   24    8    key_bytes, the length of the key column
 *   32    8    value_bytes, the length of the value column
 *   40    4    leaf
 *   44    1    leaf_bits: log2 of the number of leaves
 *   45    1    kind (sk_kind)
 *   46    1    flags: 1 = delta (has marks, may hold deletions), 2 = offsets of 8 bytes,
 *              4 = timed (has stamps)
 *   47    1    key width: 8 if the key type is "i", else 0
 *   48    1    format version: 1
 *   49    1    length of the name
 *   50    1    length of the key type
 *   51    5    zero
 *   56    -    name, then key type
 *
 *   column         bytes            present
 *   hashes         8 n              always; ascending
 *   key offsets    4 or 8 (n + 1)   key width 0; the first is 0, the last key_bytes
 *   keys           key_bytes        always
 *   marks          n                delta; 0 = entry, 1 = deletion (then the value is empty or 0)
 *   stamps         8 n              timed; when the entry was last touched, in ms;
 *                                   INT64_MIN = before the first watermark; 0 for a deletion
 *   value offsets  4 or 8 (n + 1)   kinds that are not held in the slot
 *   values         value_bytes      always
 *
 * A block is valid iff
 *  1. magic, version, kind, flags, key width and key type are known, the name is UTF-8, and zero
 *     bytes are zero;
 *  2. size equals what n, key_bytes, value_bytes and the flags add up to;
 *  3. offsets start at 0, never fall, and end at the column's length;
 *  4. (hash, key) rises strictly; hash is the key's routing hash; its prefix is the leaf;
 *  5. each value has at most 1 GiB and fits the kind: 8 bytes, one or more due times in ascending
 *     order, or one well-formed MessagePack value with a root of that kind, at most SK_DEPTH_MAX
 *     deep, with distinct map keys (the kind's `check` in kind.h);
 *  6. kinds that do not expire are not timed, and deletions have neither value nor stamp.
 * Reading checks 1 and 2; decoding checks all of it before it changes anything.
 */
#ifndef SK_BLOCK_H
#define SK_BLOCK_H

#include "undo.h"

#define SK_BLOCK_VERSION_READABLE 1 /* lowest version that can be read */
#define SK_BLOCK_VERSION_LATEST 1   /* what is written */
#define SK_BLOCK_HEADER 56

/* Which entries go into a block. */
typedef enum sk_select {
    SK_SELECT_ALL = 0,   /* live entries; tombstones too if the leaf is not whole */
    SK_SELECT_SINCE = 1, /* entries and tombstones changed after an epoch */
    SK_SELECT_DIRTY = 2, /* entries and tombstones marked SK_MARK_DIRTY */
    SK_SELECT_COLD = 3,  /* of the dirty ones, tombstones and entries not marked SK_MARK_USED */
    SK_SELECT_REST = 4   /* as ALL, and the block is written even if it has no entries: it stands
                          * for a delta that cannot be made */
} sk_select;

/* Names of states travel in blocks and end up in Python, so names that are not UTF-8 are
 * refused. */
bool sk_name_is_utf8(const char *text);

/* Appends a block, or nothing if no entry is selected. Where a delta would hold more than half of
 * the entries of a whole leaf's table, the block is a full one, possibly without entries. past: the
 * block is to be of the table as it was then (with SK_SELECT_ALL, SINCE or REST), else NULL. If a
 * tombstone from then was dropped, a delta becomes a full block, too. */
int sk_block_encode(const sk_table *table, const sk_table_env *env, const char *name, uint32_t leaf,
                    sk_select select, uint32_t since, const sk_past *past, sk_buf *buf);
/* An entry that goes into a block. */
typedef struct sk_picked {
    uint64_t hash;
    const sk_slot *slot; /* of a table; for a missing key, a tombstone made for it */
} sk_picked;

/* Keys whose entries are wanted, of one leaf or many: sorted by hash and key, each once. */
typedef struct sk_wanted {
    sk_picked *items;
    size_t n;
    void *memory; /* the tombstones that stand for keys until they are found */
} sk_wanted;

/* keys: in any order, with or without repetitions; they are copied. On failure there is nothing to
 * free. */
int sk_wanted_make(const sk_key *keys, size_t n, unsigned leaf_bits, sk_wanted *wanted);
void sk_wanted_free(sk_wanted *wanted);
/* Looks up all the keys, each in the table of its leaf. A key that is missing, or whose entry has
 * expired, stays a tombstone. The leaves are locked, and must stay locked until the block is
 * written. */
void sk_wanted_find(sk_wanted *wanted, const sk_table *tables, const sk_table_env *env);
/* Appends one delta block with them, as a block of leaf `leaf` of 2^leaf_bits; nothing if there are
 * none. */
int sk_wanted_encode(const sk_wanted *wanted, const sk_table_env *env, const char *name,
                     uint32_t leaf, uint8_t leaf_bits, sk_buf *buf);
/* Builds a table from a block that sk_block_read accepted. `table` is empty, with a budget; on
 * failure it is empty again. Entries are clean and of epoch 0. seq as in node.h. */
int sk_block_decode(const uint8_t *block, const sk_block_info *info, const sk_table_env *env,
                    uint64_t *seq, sk_table *table);
/* Adds only entry i to a table that has room for it (sk_table_reserve) and does not have its
 * key. */
int sk_block_decode_entry(const uint8_t *block, const sk_block_info *info, uint64_t i,
                          const sk_table_env *env, uint64_t *seq, sk_table *table);
/* Like sk_block_decode, with only entries [from, to); the padding is not checked. */
int sk_block_decode_part(const uint8_t *block, const sk_block_info *info, uint64_t from,
                         uint64_t to, const sk_table_env *env, uint64_t *seq, sk_table *table);

#endif
