/*
 * batch.c: one operation on many keys, taken from columns.
 *
 * A batch is cut into chunks. For each chunk
 *   1. the keys are hashed, in a tight loop that also notes which leaves they fall into;
 *   2. the locks of those leaves are taken, in ascending order;
 *   3. the records run WINDOW at a time: first every record's tags are prefetched, then every
 *      record's slot, then the operations run on memory that is in cache by then. So the cache
 *      misses of a window overlap instead of following each other.
 *
 * Rejected: a lock per record (an atomic exchange costs as much as all the rest and keeps the
 * processor from running ahead; and tags may be read only under the lock, so nothing could be
 * prefetched). Rejected, after measuring: locking leaf after leaf (a chunk has only a handful of
 * records for each leaf, too few for their misses to overlap). The price of locking all leaves
 * together: batches on one store take turns chunk by chunk, and another thread's call may wait for
 * one chunk, some 300 us to 1 ms. Threads that are to run in parallel should have a store each, as
 * workers do.
 *
 * If a record fails, the batch stops there; `status` tells which records have taken effect. For
 * each key these are always the first of its records, so the caller can go on with the rest.
 */
#include "column.h"
#include "msgpack.h"
#include "store.h"

#define CHUNK 16384 /* records; 2048 locks, the default number of leaves, cost 1 ns for each */
#define WINDOW 64   /* records whose misses overlap */
#define SAMPLE 31   /* one record in 31 counts for its leaf; prime: few patterns have that period */
#define SORT_BITS 11          /* buckets of the sort: 2^11 write streams */
#define SORT_BYTES (32 << 20) /* in larger stores, records are processed leaf by leaf */

#define NO_NUMBER 0 /* in place of a kind: every record takes the general way */

/* No sk_status: an entry is too large for a log, so its leaf is to be served as a whole. That may
 * have to wait for a snapshot's reader, so the locks are given back before. */
#define SK_BLOCKED 65

/* What is known about a leaf in the current chunk. */
#define LEAF_TOUCHED 1 /* a record falls into it */
#define LEAF_WHOLE 2   /* a key that is not here does not exist */
#define LEAF_CHANGED 4

typedef struct batch {
    sk_store *store;
    sk_state *state;
    const sk_kind_ops *kind; /* the state's */
    sk_batch_args *args;
    int op;
    /* of the current chunk */
    int64_t first;       /* number of its first record */
    uint32_t epoch;      /* what its changes are stamped with */
    sk_timing timing;    /* if the state is timed: one reading of the clock for all its records */
    uint64_t *hashes;    /* per record */
    uint8_t *touched;    /* per leaf: LEAF_ bits */
    uint32_t *leaves;    /* the touched ones, ascending */
    uint32_t leaf_count; /* how many */
    bool is_guarded;     /* one of them is away, or its gate is not open */
    bool is_logged;      /* changes of one of them are noted in a log (undo.h) */
    uint32_t blocked;    /* SK_BLOCKED: the leaf that must be served first */
    uint32_t *order;     /* the records in the order in which they are processed */
    bool is_sorted;      /* by leaf; else `order` is not made and records keep their order */
    uint64_t live;       /* entries in the touched tables before the chunk */
    uint32_t expected;   /* new entries that the rest of the batch may bring to each leaf */
    sk_buf scratch;      /* elements made from typed columns */
} batch;

/* ---- Columns ---- */

/* The element of a container that a column's value stands for, as MessagePack. */
static int column_element(batch *b, const sk_column *column, int64_t i, bytes *element) {
    uint8_t head[9];
    size_t head_len = 0;
    bytes raw = column_bytes(column, column->type, i);
    if (column_is_var(column) && column->form == SK_FORM_MSGPACK) {
        *element = raw;
        return SK_OK;
    }
    if (raw.len > SK_VALUE_BYTES_MAX)
        return sk_fail(SK_TOO_LARGE, "an element of %zu bytes", raw.len);
    if (column->type == SK_COL_I64)
        head_len = sk_mp_write_int(head, (int64_t)sk_load64(raw.data));
    else if (column->type == SK_COL_F64) {
        double value;
        memcpy(&value, raw.data, 8);
        head_len = sk_mp_write_f64(head, value);
    } else if (column->form == SK_FORM_STR)
        head_len = sk_mp_write_str(head, (uint32_t)raw.len);
    else
        head_len = sk_mp_write_bin(head, (uint32_t)raw.len);
    size_t start = b->scratch.len;
    int status = sk_buf_put(&b->scratch, head, head_len);
    if (status == SK_OK && column_is_var(column))
        status = sk_buf_put(&b->scratch, raw.data, raw.len);
    if (status != SK_OK) return status;
    *element = (bytes){b->scratch.data + start, b->scratch.len - start};
    return SK_OK;
}

/* ---- One record ---- */

static int put_record(batch *b, sk_at *at, const sk_key *key, int64_t record) {
    const sk_column *values = &b->args->values;
    bytes value = column_bytes(values, values->type, record);
    return b->kind->put(at, key, value.data, value.len);
}

static int add_record(batch *b, sk_at *at, const sk_key *key, int64_t record) {
    sk_batch_args *args = b->args;
    bool has_values = args->values.type != SK_COL_NONE;
    if (at->env.kind == SK_F64) {
        double operand =
            has_values ? ((const double *)args->values.data)[record] : args->operand_f64;
        double *out = args->out;
        return sk_entry_add_f64(at, key, operand, args->initial_f64, out ? out + record : NULL);
    }
    int64_t operand = has_values ? ((const int64_t *)args->values.data)[record] : args->operand_i64;
    int64_t *out = args->out;
    return sk_entry_add_i64(at, key, operand, args->initial_i64, out ? out + record : NULL);
}

static inline int get_record(batch *b, sk_at *at, const sk_key *key, int64_t record) {
    sk_slot *slot;
    int status = sk_entry_find(at, key, &slot);
    if (status == SK_OK) sk_entry_read(at, slot);
    if (b->kind->held == SK_IN_SLOT) {
        ((int64_t *)b->args->out)[record] = status == SK_OK ? slot->value.i64 : 0;
        return status;
    }
    if (status == SK_OK) status = sk_slot_encode(at->env.kind, slot, b->args->buf);
    b->args->out_offsets[record + 1] = (int64_t)b->args->buf->len;
    return status;
}

static int append_record(batch *b, sk_at *at, const sk_key *key, int64_t record) {
    bytes element;
    b->scratch.len = 0;
    int status = column_element(b, &b->args->values, record, &element);
    if (status != SK_OK) return status;
    int64_t result =
        sk_entry_write(at, key, SK_W_APPEND, NULL, 0, "l", element.data, element.len, 0, 0, NULL);
    return result < 0 ? (int)-result : SK_OK;
}

static int map_put_record(batch *b, sk_at *at, const sk_key *key, int64_t record) {
    bytes map_key, element;
    b->scratch.len = 0;
    /* Both elements may lie in scratch: room for the two keeps the first from moving. */
    bytes raw_key = column_bytes(&b->args->map_keys, b->args->map_keys.type, record);
    bytes raw = column_bytes(&b->args->values, b->args->values.type, record);
    int status = sk_buf_reserve(&b->scratch, raw_key.len + raw.len + 32);
    if (status == SK_OK) status = column_element(b, &b->args->map_keys, record, &map_key);
    if (status == SK_OK) status = column_element(b, &b->args->values, record, &element);
    if (status != SK_OK) return status;
    /* as a path, no value at all would name the map itself, and two values a place inside a
     * member */
    if (!sk_mp_is_key(map_key.data, map_key.len))
        return sk_fail(SK_BAD_PATH, "a map's key is one scalar, or one array of scalars, in its "
                                    "shortest form");
    int64_t result = sk_entry_write(at, key, SK_W_SET, map_key.data, map_key.len, "m", element.data,
                                    element.len, 0, 0, NULL);
    return result < 0 ? (int)-result : SK_OK;
}

static int run_op(batch *b, sk_at *at, const sk_key *key, int64_t record) {
    sk_slot *slot;
    int status;
    switch (b->op) {
    case SK_B_GET:
        return get_record(b, at, key, record);
    case SK_B_PUT:
        return put_record(b, at, key, record);
    case SK_B_ADD:
        return add_record(b, at, key, record);
    case SK_B_HAS:
        status = sk_entry_find(at, key, &slot);
        if (status == SK_OK) sk_entry_read(at, slot);
        return status;
    case SK_B_DELETE:
        return sk_entry_delete(at, key, (b->args->flags & SK_BLIND) != 0);
    case SK_B_APPEND:
        return append_record(b, at, key, record);
    default:
        return map_put_record(b, at, key, record);
    }
}

/* Any operation, the general way. */
static int run_record(batch *b, int64_t record, const sk_key *key) {
    sk_at at;
    int status;
    uint32_t leaf_no = sk_leaf_of(key->hash, b->store->leaf_bits);
    /* Only the general way checks this: if a touched leaf is away or its gate is not open, no
     * record of the chunk takes the short way. */
    const sk_leaf *leaf = &b->store->leaves[leaf_no];
    if (leaf->residency >= SK_AWAY) {
        status = sk_leaf_refuse(leaf, leaf_no);
        /* a get finds out by itself that the key is unknown, and writes that it has no result */
        if (status != SK_UNKNOWN || b->op != SK_B_GET) return status;
    }
    sk_at_set(&at, b->store, b->state, leaf_no, b->epoch);
    at.env.expected = b->expected;
    if (at.env.is_timed) at.env.timing = &b->timing;
    if (b->is_logged && !sk_leaf_is_served(leaf, b->epoch)) {
        at.undo = b->store->undos[leaf_no];
        b->blocked = leaf_no;
        if (sk_undo_save(at.undo, b->state->id, at.table, &at.env, key) != SK_OK) return SK_BLOCKED;
    }
    status = run_op(b, &at, key, record);
    if (at.undo != NULL) sk_undo_settle(at.undo, b->state->id, at.table, at.env.leaf_bits);
    return status;
}

/* The short way: for a number whose live slot is known. False: take the general way. */
static inline bool run_number(batch *b, int op, int kind, sk_table *table, sk_slot *slot,
                              int64_t record) {
    const sk_batch_args *args = b->args;
    const void *values = args->values.type != SK_COL_NONE ? args->values.data : NULL;
    if (op == SK_B_GET) {
        ((int64_t *)args->out)[record] = slot->value.i64;
        slot->marks |= SK_MARK_USED;
        return true;
    }
    sk_value value;
    if (op == SK_B_PUT)
        memcpy(&value, (const int64_t *)values + record, 8);
    else if (kind == SK_F64)
        value.f64 =
            slot->value.f64 + (values ? ((const double *)values)[record] : args->operand_f64);
    else if (__builtin_add_overflow(slot->value.i64,
                                    values ? ((const int64_t *)values)[record] : args->operand_i64,
                                    &value.i64))
        return false;
    slot->value = value;
    slot->epoch = b->epoch;
    sk_slot_mark_dirty(table, slot);
    if (op == SK_B_ADD && args->out != NULL) ((int64_t *)args->out)[record] = value.i64;
    return true;
}

/* The short way to a new entry, for the usual case: the key is short, the table has room, and the
 * key's first group has an empty slot and no slot with its tag, which proves that the key is
 * missing. The new entry gets the value that a missing entry counts as; run_number does the rest.
 * NULL: take the general way. */
static inline sk_slot *insert_number(batch *b, int op, int kind, sk_table *table,
                                     const sk_key *key) {
    const sk_batch_args *args = b->args;
    if (key->len > SK_KEY_INLINE || table->is_flooded ||
        table->taken >= table->groups * SK_GROUP_FILL)
        return NULL;
    /* An entry that is inserted here is not removed again, so the addition must not overflow. */
    if (op == SK_B_ADD && kind == SK_I64 && args->initial_i64 != 0) return NULL;
    size_t first = (size_t)sk_group_of(key->hash, b->store->leaf_bits, table->groups) * SK_GROUP;
    uint8_t tag = sk_tag_of(key->hash);
    uint32_t empty = sk_group_match(table->tags + first, SK_TAG_EMPTY);
    if (empty == 0 || sk_group_match(table->tags + first, tag) != 0) return NULL;
    size_t i = first + (unsigned)__builtin_ctz(empty);
    sk_slot *slot = &table->slots[i];
    table->tags[i] = tag;
    table->taken++;
    table->live++;
    *slot = (sk_slot){.key_len = (uint8_t)key->len};
    if (kind == SK_F64)
        slot->value.f64 = args->initial_f64;
    else
        slot->value.i64 = args->initial_i64;
    if (key->len > 0) memcpy(slot->key, key->data, key->len); /* else data may be NULL */
    return slot;
}

/* ---- One window ---- */

typedef struct window {
    size_t first, n;             /* places in the chunk's order */
    uint32_t record[WINDOW];     /* which record of the chunk */
    uint32_t leaf[WINDOW];       /* per record */
    const uint8_t *tags[WINDOW]; /* per record: the group where its probe begins */
    sk_slot *guess[WINDOW];      /* per record: a slot with its tag, or NULL */
} window;

static inline __attribute__((always_inline)) void prefetch_window(const batch *b, window *w,
                                                                  bool is_sorted) {
    const unsigned leaf_bits = b->store->leaf_bits;
    const sk_table *tables = b->state->tables;
    for (size_t i = 0; i < w->n; i++) {
        w->record[i] = is_sorted ? b->order[w->first + i] : (uint32_t)(w->first + i);
        uint64_t hash = b->hashes[w->record[i]];
        w->leaf[i] = sk_leaf_of(hash, leaf_bits);
        const sk_table *table = &tables[w->leaf[i]];
        w->tags[i] = NULL;
        if (table->groups == 0 || table->is_flooded) continue;
        w->tags[i] = table->tags + (size_t)sk_group_of(hash, leaf_bits, table->groups) * SK_GROUP;
        __builtin_prefetch(w->tags[i]);
    }
    for (size_t i = 0; i < w->n; i++) {
        w->guess[i] = NULL;
        if (w->tags[i] == NULL) continue;
        const sk_table *table = &tables[w->leaf[i]];
        uint32_t hits = sk_group_match(w->tags[i], sk_tag_of(b->hashes[w->record[i]]));
        sk_slot *group = table->slots + (w->tags[i] - table->tags);
        if (hits != 0)
            w->guess[i] = group + (unsigned)__builtin_ctz(hits);
        else /* no such tag: a new key will get the first empty slot */
            hits = sk_group_match(w->tags[i], SK_TAG_EMPTY) | 1u << (SK_GROUP - 1);
        __builtin_prefetch(group + (unsigned)__builtin_ctz(hits), 1);
    }
    if (b->kind->held == SK_BLOB)
        for (size_t i = 0; i < w->n; i++)
            if (w->guess[i] != NULL) __builtin_prefetch(w->guess[i]->value.blob, 1);
}

/* True if the guess is the key's live slot. The table may have been rehashed since the guess was
 * made, even twice: then its array may lie where the old one was, and empty slots still hold old
 * contents. The tag decides: a slot with a tag is in use, for the key that it holds. */
static inline bool is_good_guess(const sk_table *table, const sk_slot *guess, const sk_key *key) {
    size_t at = ((uintptr_t)guess - (uintptr_t)table->slots) / sizeof(sk_slot);
    return guess != NULL && at < (size_t)table->groups * SK_GROUP &&
           table->tags[at] == sk_tag_of(key->hash) &&
           sk_slot_has_key(guess, key->hash, key->data, key->len) && sk_slot_is_live(guess);
}

/* Runs a window's records in order; returns how many took effect. */
static inline __attribute__((always_inline)) size_t
run_window(batch *b, int op, int kind, int key_type, window *w, int *status) {
    const bool is_number = kind == SK_I64 || kind == SK_F64;
    const bool writes = op != SK_B_GET && op != SK_B_HAS;
    if (b->is_sorted)
        prefetch_window(b, w, true);
    else
        prefetch_window(b, w, false);
    for (size_t i = 0; i < w->n; i++) {
        int64_t record = b->first + w->record[i];
        bytes data = column_bytes(&b->args->keys, key_type, record);
        sk_key key = {data.data, key_type == SK_COL_I64 ? 8 : data.len, b->hashes[w->record[i]]};
        sk_table *table = &b->state->tables[w->leaf[i]];
        sk_slot *slot = w->guess[i];
        if (is_number && !is_good_guess(table, slot, &key)) {
            bool may_insert = writes && b->touched[w->leaf[i]] & LEAF_WHOLE;
            slot = may_insert ? insert_number(b, op, kind, table, &key) : NULL;
        }
        if (is_number && slot != NULL && run_number(b, op, kind, table, slot, record)) {
            if (writes) b->touched[w->leaf[i]] |= LEAF_CHANGED;
            continue;
        }
        *status = run_record(b, record, &key);
        if (*status == SK_OK) continue;
        if (*status == SK_BLOCKED) return i;
        b->args->status[record] = (uint8_t)*status;
        b->args->unknown += *status == SK_UNKNOWN;
        if (*status > SK_UNKNOWN) {
            b->args->failed = record;
            return i;
        }
        *status = SK_OK;
    }
    return w->n;
}

/* One instance of the loop for each case that matters, so that the case is not decided for each
 * record. */
static size_t run_window_as(batch *b, window *w, int *status) {
#define INSTANCE(OP, KIND, KEY_TYPE)                                                               \
    if (b->op == (OP) && b->state->kind == (KIND) && b->args->keys.type == (KEY_TYPE))             \
        return run_window(b, OP, KIND, KEY_TYPE, w, status);
#define INSTANCES(OP, KIND)                                                                        \
    INSTANCE(OP, KIND, SK_COL_I64)                                                                 \
    INSTANCE(OP, KIND, SK_COL_VAR32)                                                               \
    INSTANCE(OP, KIND, SK_COL_VAR64)
    /* Timed states, and leaves that are away or gated or have a log, need checks that the short way
     * does not make. */
    if (b->state->flags & SK_TIMED || b->is_guarded || b->is_logged)
        return run_window(b, b->op, NO_NUMBER, b->args->keys.type, w, status);
    INSTANCES(SK_B_ADD, SK_I64)
    INSTANCES(SK_B_ADD, SK_F64)
    INSTANCES(SK_B_GET, SK_I64)
    INSTANCES(SK_B_GET, SK_F64)
    INSTANCES(SK_B_PUT, SK_I64)
    INSTANCES(SK_B_PUT, SK_F64)
    return run_window(b, b->op, NO_NUMBER, b->args->keys.type, w, status);
#undef INSTANCES
#undef INSTANCE
}

/* ---- One chunk ---- */

/* Hashes the chunk's keys and notes their leaves. */
static int hash_chunk(batch *b, int64_t n) {
    const sk_column *keys = &b->args->keys;
    const sk_key_type *type = &b->state->key_type;
    const unsigned leaf_bits = b->store->leaf_bits;
    memset(b->touched, 0, b->store->leaf_count);
    if (keys->type == SK_COL_I64) {
        const int64_t *data = (const int64_t *)keys->data + b->first;
        for (int64_t i = 0; i < n; i++) {
            b->hashes[i] = sk_xxh64_int(data[i], SK_ROUTE_SEED);
            b->touched[sk_leaf_of(b->hashes[i], leaf_bits)] = LEAF_TOUCHED;
        }
        return SK_OK;
    }
    for (int64_t i = 0; i < n; i++) {
        bytes key = column_bytes(keys, keys->type, b->first + i);
        if (!type->is_tuple && key.len < 32) {
            b->hashes[i] = sk_xxh64_short(key.data, key.len, SK_ROUTE_SEED);
        } else {
            int status = sk_key_route(type, key.data, key.len, &b->hashes[i]);
            if (status != SK_OK) {
                b->args->failed = b->first + i;
                return status;
            }
        }
        b->touched[sk_leaf_of(b->hashes[i], leaf_bits)] = LEAF_TOUCHED;
    }
    return SK_OK;
}

/* In a large store every record would touch its own pages, and misses of the page tables cost more
 * than those of the cache. When records are processed leaf by leaf, they share these misses. The
 * sort is a stable counting sort, so that records of one key keep their order. In a small store it
 * costs more than it saves. */
static void sort_chunk(batch *b, int64_t n) {
    uint32_t counts[1 << SORT_BITS] = {0}, sum = 0;
    unsigned bits = b->store->leaf_bits < SORT_BITS ? b->store->leaf_bits : SORT_BITS;
    /* values of varying length are appended to the result in the order of the records */
    bool keeps_order = b->op == SK_B_GET && b->kind->held != SK_IN_SLOT;
    b->is_sorted = !keeps_order && sk_bytes_used(b->store) > SORT_BYTES;
    if (!b->is_sorted) return;
    for (int64_t i = 0; i < n; i++) counts[sk_leaf_of(b->hashes[i], bits)]++;
    for (size_t k = 0; k < sizeof counts / sizeof counts[0]; k++) {
        uint32_t count = counts[k];
        counts[k] = sum;
        sum += count;
    }
    for (int64_t i = 0; i < n; i++)
        b->order[counts[sk_leaf_of(b->hashes[i], bits)]++] = (uint32_t)i;
}

static void list_touched(batch *b) {
    b->leaf_count = 0;
    for (uint32_t i = 0; i < b->store->leaf_count; i++)
        if (b->touched[i]) b->leaves[b->leaf_count++] = i;
}

static uint64_t count_live(const batch *b) {
    uint64_t live = 0;
    for (uint32_t k = 0; k < b->leaf_count; k++) live += b->state->tables[b->leaves[k]].live;
    return live;
}

/* A bulk load should not rehash a table ten times on its way to its final size. If nearly all
 * records of the last chunk were new keys, the remaining ones probably are, too, and the hash
 * spreads them evenly. The square keeps a stream with many repeated keys from counting much. */
static void expect_more(batch *b, int64_t n) {
    uint64_t left = (uint64_t)(b->args->n - b->first - n), live = count_live(b);
    double share = live > b->live ? (double)(live - b->live) / (double)n : 0;
    b->expected = (uint32_t)(share * share * (double)left / b->store->leaf_count * 1.05);
}

static void unlock_chunk(batch *b) {
    bool writes_back = b->store->writes_back;
    for (uint32_t k = 0; k < b->leaf_count; k++) {
        sk_leaf *leaf = &b->store->leaves[b->leaves[k]];
        if (b->touched[b->leaves[k]] & LEAF_CHANGED) {
            b->touched[b->leaves[k]] &= (uint8_t)~LEAF_CHANGED;
            leaf->changed = b->epoch;
            if (writes_back) sk_leaf_note_dirty(b->store, b->leaves[k]);
        }
        sk_leaf_unlock(leaf);
    }
}

/* Locks the touched leaves together. For writing, all snapshots are served first (store.h, rules 4
 * and 5). */
static int lock_chunk(batch *b, bool writes) {
    sk_store *store = b->store;
    int status = sk_leaf_list_lock(store, b->leaves, b->leaf_count,
                                   writes ? SK_FOR_ENTRIES : SK_FOR_READING, &b->epoch);
    if (status != SK_OK) return status;
    bool is_guarded = false, is_logged = false;
    for (uint32_t k = 0; k < b->leaf_count; k++) {
        const sk_leaf *leaf = &store->leaves[b->leaves[k]];
        uint8_t residency = leaf->residency;
        if (writes && !sk_leaf_is_served(leaf, b->epoch)) is_logged = true;
        b->touched[b->leaves[k]] = residency == SK_WHOLE ? LEAF_TOUCHED | LEAF_WHOLE : LEAF_TOUCHED;
        if (residency >= SK_AWAY) is_guarded = true;
    }
    b->is_guarded = is_guarded;
    b->is_logged = is_logged;
    return SK_OK;
}

/* Serves the leaf that a record was blocked by, with no lock held before or meanwhile, and locks
 * the chunk again. On failure the chunk is not locked. */
static int unblock_chunk(batch *b) {
    uint32_t epoch;
    unlock_chunk(b);
    int status = sk_leaf_lock_write(b->store, b->blocked, &epoch);
    if (status != SK_OK) return status;
    sk_leaf_unlock(&b->store->leaves[b->blocked]);
    return lock_chunk(b, true);
}

/* Notes how much the leaves are used (sk_leaf_heat), with their locks held. Only every SAMPLE-th
 * record of the state is counted, as SAMPLE records: counting each one costs 3 to 5 % of a batch on
 * a small store. */
static void count_heat(batch *b, int64_t n) {
    uint64_t before = atomic_load_explicit(&b->state->operations, memory_order_relaxed);
    for (int64_t i = (int64_t)(SAMPLE - 1 - before % SAMPLE); i < n; i += SAMPLE)
        b->store->records[sk_leaf_of(b->hashes[i], b->store->leaf_bits)] += SAMPLE;
}

/* Marks the records after the first `done` as not reached. */
static void mark_rest(batch *b, size_t done, size_t n) {
    for (size_t i = done; i < n; i++)
        b->args->status[b->first + (b->is_sorted ? b->order[i] : (uint32_t)i)] = SK_END;
}

static int run_chunk(batch *b, int64_t n) {
    bool is_timed = b->state->flags & SK_TIMED, touches = is_timed && b->state->on_read;
    bool writes = (b->op != SK_B_GET && b->op != SK_B_HAS) || touches;
    window w = {0};
    b->is_sorted = false;
    int status = hash_chunk(b, n);
    if (status == SK_OK) {
        list_touched(b);
        sort_chunk(b, n);
        status = lock_chunk(b, writes);
        if (status != SK_OK) b->args->failed = b->first;
    }
    if (status == SK_OK) {
        b->live = count_live(b);
        count_heat(b, n);
        if (is_timed) b->timing = sk_timing_of(b->store, b->state);
        b->timing.on_read = touches; /* as the locks were taken */
        bool is_locked = true;
        while (w.first < (size_t)n && status == SK_OK) {
            w.n = (size_t)n - w.first < WINDOW ? (size_t)n - w.first : WINDOW;
            w.first += run_window_as(b, &w, &status);
            if (__builtin_expect(status == SK_BLOCKED, 0)) {
                status = unblock_chunk(b);
                is_locked = status == SK_OK;
                if (!is_locked)
                    b->args->failed =
                        b->first + (b->is_sorted ? b->order[w.first] : (int64_t)w.first);
            }
        }
        if (is_locked) expect_more(b, n);
        if (is_locked) unlock_chunk(b);
        /* for all records at once: counting each in its table costs a tenth of the record's time */
        atomic_fetch_add(&b->state->operations, w.first);
    }
    mark_rest(b, w.first, (size_t)n);
    return status;
}

static int run_batch(batch *b) {
    int64_t n = b->args->n, room = n < CHUNK ? n : CHUNK;
    size_t leaf_count = b->store->leaf_count;
    size_t per_record = sizeof *b->hashes + sizeof *b->order, per_leaf = sizeof *b->leaves + 1;
    uint8_t *memory = sk_raw_alloc((size_t)room * per_record + leaf_count * per_leaf);
    int status = memory == NULL ? SK_NO_MEMORY : SK_OK;
    b->hashes = (uint64_t *)memory;
    b->order = (uint32_t *)(b->hashes + room);
    b->leaves = b->order + room;
    b->touched = (uint8_t *)(b->leaves + leaf_count);
    int64_t done = 0;
    for (; done < n && status == SK_OK; done += room) {
        b->first = done;
        status = run_chunk(b, n - done < room ? n - done : room);
    }
    if (done < n) memset(b->args->status + done, SK_END, (size_t)(n - done));
    sk_raw_free(memory);
    return status;
}

/* ---- The call ---- */

static int check_keys(const sk_state *state, const sk_column *keys, int64_t n) {
    bool wants_int = !state->key_type.is_tuple && state->key_type.part[0] == 'i';
    if (n < 0) return sk_fail(SK_BAD_ARGUMENT, "a batch of %lld records", (long long)n);
    if (wants_int ? keys->type != SK_COL_I64 : !column_is_var(keys))
        return sk_fail(SK_BAD_KEY,
                       "state '%.80s' has key type %s; the column of keys is of type %d",
                       state->name, state->key_type.text, keys->type);
    return sk_column_check(keys, n, "keys");
}

/* What every kind can do; the rest is in the kind's row. */
#define EVERY_KIND (1u << SK_B_GET | 1u << SK_B_PUT | 1u << SK_B_HAS | 1u << SK_B_DELETE)

/* Checks that the kind has the operation, and that the values are what the operation needs. */
static int check_values(const sk_state *state, int op, const sk_batch_args *args) {
    const sk_kind_ops *kind = sk_kinds[state->kind];
    bool is_number = kind->held == SK_IN_SLOT;
    if (op < SK_B_GET || op > SK_B_MAP_PUT || !((EVERY_KIND | kind->batch) >> op & 1))
        return sk_fail(SK_BAD_KIND,
                       "state '%.80s' is of kind %s, which has no such batch operation",
                       state->name, kind->name);
    const sk_column *values = &args->values;
    bool has_values = values->type != SK_COL_NONE;
    if (op == SK_B_GET && (is_number ? args->out == NULL : !args->buf || !args->out_offsets))
        return sk_fail(SK_BAD_ARGUMENT, "results of this kind need %s",
                       is_number ? "out" : "buf and out_offsets");
    if (op == SK_B_PUT || op == SK_B_APPEND || op == SK_B_MAP_PUT ||
        (op == SK_B_ADD && has_values)) {
        bool is_any = op == SK_B_APPEND || op == SK_B_MAP_PUT;
        if (!has_values ||
            (!is_any && (is_number ? values->type != kind->column : !column_is_var(values))))
            return sk_fail(SK_BAD_VALUE,
                           "state '%.80s' is of kind %s; the column of values is of type %d",
                           state->name, kind->name, values->type);
    }
    if (op == SK_B_MAP_PUT && args->map_keys.type == SK_COL_NONE)
        return sk_fail(SK_BAD_ARGUMENT, "there is no column of map keys");
    int status = sk_column_check(values, args->n, "values");
    return status != SK_OK ? status : sk_column_check(&args->map_keys, args->n, "map keys");
}

int sk_batch(sk_store *store, uint32_t state_id, int op, sk_batch_args *args) {
    sk_state *state = sk_state_at(store, state_id);
    if (state == NULL) return SK_BAD_ARGUMENT;
    args->failed = -1;
    args->unknown = 0;
    int status = check_keys(state, &args->keys, args->n);
    if (status == SK_OK) status = check_values(state, op, args);
    if (status == SK_OK && args->status == NULL && args->n > 0)
        status = sk_fail(SK_BAD_ARGUMENT, "status is required");
    if (status == SK_OK && args->out_offsets != NULL) args->out_offsets[0] = 0;
    if (status == SK_OK && args->buf != NULL) args->buf->len = 0;
    if (status != SK_OK || args->n == 0) return status;
    memset(args->status, SK_OK, (size_t)args->n);
    batch b = {.store = store, .state = state, .args = args, .op = op};
    b.kind = sk_kinds[state->kind];
    status = run_batch(&b);
    sk_buf_free(&b.scratch);
    return status;
}

int sk_pack_keys(const char *key_type, const sk_column *parts, int64_t n, int64_t *offsets,
                 sk_buf *buf) {
    sk_key_type type;
    int status = sk_key_type_parse(key_type, &type);
    if (status == SK_OK && (!type.is_tuple || n < 0))
        status = sk_fail(SK_BAD_ARGUMENT, "key type %s is not a tuple", type.text);
    for (int p = 0; p < type.parts && status == SK_OK; p++) {
        bool fits = type.part[p] == 'i' ? parts[p].type == SK_COL_I64 : column_is_var(&parts[p]);
        status =
            fits ? sk_column_check(&parts[p], n, "a key part")
                 : sk_fail(SK_BAD_KEY, "part %d of key type %s does not take a column of type %d",
                           p, type.text, parts[p].type);
    }
    buf->len = 0;
    for (int64_t r = 0; r < n && status == SK_OK; r++) {
        offsets[r] = (int64_t)buf->len;
        for (int p = 0; p < type.parts && status == SK_OK; p++) {
            bytes part = column_bytes(&parts[p], parts[p].type, r);
            uint32_t len = (uint32_t)part.len;
            if (part.len > SK_KEY_BYTES_MAX)
                status = sk_fail(SK_BAD_KEY, "key part of %zu bytes", part.len);
            if (status == SK_OK && type.part[p] != 'i') status = sk_buf_put(buf, &len, 4);
            if (status == SK_OK) status = sk_buf_put(buf, part.data, part.len);
        }
    }
    if (status == SK_OK) offsets[n] = (int64_t)buf->len;
    return status;
}

int sk_route_keys(const char *key_type, const sk_column *keys, int64_t n, uint32_t leaves,
                  uint32_t *out) {
    sk_key_type type;
    int status = sk_key_type_parse(key_type, &type);
    if (status != SK_OK) return status;
    if (n < 0 || leaves == 0 || leaves > SK_LEAVES_MAX || (leaves & (leaves - 1)) != 0)
        return sk_fail(SK_BAD_ARGUMENT, "there is no store of %u leaves", leaves);
    bool fits = strcmp(type.text, "i") == 0 ? keys->type == SK_COL_I64 : column_is_var(keys);
    if (!fits)
        return sk_fail(SK_BAD_KEY, "keys of type %s cannot come in a column of type %d", type.text,
                       keys->type);
    if ((status = sk_column_check(keys, n, "keys")) != SK_OK) return status;
    unsigned leaf_bits = (unsigned)__builtin_ctz(leaves);
    for (int64_t r = 0; r < n && status == SK_OK; r++) {
        bytes key = column_bytes(keys, keys->type, r);
        uint64_t hash = 0;
        status = sk_key_route(&type, key.data, key.len, &hash);
        out[r] = sk_leaf_of(hash, leaf_bits);
    }
    return status;
}
