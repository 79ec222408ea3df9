/*
 * entry.c: operations on one key.
 *
 * Each public call routes the key, locks its leaf, does its work and unlocks.
 * The sk_entry_ functions do the work and expect the lock: batches use them too.
 *
 * A call that can fail prepares first (allocates the value) and changes the table
 * last, so that a failure leaves nothing behind.
 */
#include "store.h"

#include <math.h>

/* ---- Beginning and ending a call ---- */

/* Has the key's tags on their way to the cache while the leaf's lock is being taken, which holds up
 * all later loads. The head is read without the lock: another thread may be changing it, and then
 * the address is wrong and the prefetch useless, but a prefetch is all it is used for. */
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
__attribute__((no_sanitize("thread")))
#endif
#elif defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize_thread))
#endif
static void
prefetch_tags(const sk_table *table, uint64_t hash, unsigned leaf_bits) {
    const uint8_t *tags = __atomic_load_n(&table->tags, __ATOMIC_RELAXED);
    uint32_t groups = __atomic_load_n(&table->groups, __ATOMIC_RELAXED);
    __builtin_prefetch((const void *)((uintptr_t)tags +
                                      (uintptr_t)sk_group_of(hash, leaf_bits, groups) * SK_GROUP));
}

/* What a call is about to do. */
enum { READS, WRITES, INSTALLS };

/* Lets in what opens the gate; for all else the locked leaf is unlocked, and the answer given. */
static __attribute__((cold, noinline)) int guard(sk_store *store, uint32_t leaf_no, int access) {
    sk_leaf *leaf = &store->leaves[leaf_no];
    int status = sk_leaf_refuse(leaf, leaf_no);
    if (status == SK_UNKNOWN && access == INSTALLS) return SK_OK;
    sk_leaf_unlock(leaf);
    return status;
}

static int begin(sk_store *store, uint32_t state_id, unsigned kinds, const uint8_t *data,
                 size_t len, int access, sk_at *at, sk_key *key) {
    sk_state *state = sk_state_at(store, state_id);
    if (state == NULL) return SK_BAD_ARGUMENT;
    if (!(kinds >> state->kind & 1))
        return sk_fail(SK_BAD_KIND, "state '%.80s' is of kind %s, which has no such operation",
                       state->name, sk_kind_name(state->kind));
    *key = (sk_key){data, len, 0};
    int status = sk_key_route(&state->key_type, data, len, &key->hash);
    if (status != SK_OK) return status;
    uint32_t leaf_no = sk_leaf_of(key->hash, store->leaf_bits), epoch = 0;
    bool is_timed = state->flags & SK_TIMED, touches = is_timed && state->on_read;
    __builtin_prefetch(&store->leaves[leaf_no], 1);
    prefetch_tags(&state->tables[leaf_no], key->hash, store->leaf_bits);
    if (access != READS || touches)
        status = sk_leaf_lock_write(store, leaf_no, &epoch);
    else
        sk_leaf_lock(&store->leaves[leaf_no]);
    if (status != SK_OK) return status;
    if (__builtin_expect(store->leaves[leaf_no].residency >= SK_AWAY, 0) &&
        (status = guard(store, leaf_no, access)) != SK_OK)
        return status;
    /* A read may find an expired entry, and a tombstone for it is stamped like any change. */
    if (is_timed && epoch == 0) epoch = atomic_load(&store->epoch);
    sk_at_set(at, store, state, leaf_no, epoch);
    sk_count_operation(at);
    if (is_timed) {
        at->timing = sk_timing_of(store, state);
        at->timing.on_read = touches; /* as the lock was taken */
        at->env.timing = &at->timing;
    }
    return SK_OK;
}

int sk_entry_begin(sk_store *store, uint32_t state_id, int kind, const uint8_t *data, size_t len,
                   sk_at *at, sk_key *key) {
    return begin(store, state_id, 1u << kind, data, len, WRITES, at, key);
}

static void end(sk_at *at) { sk_leaf_unlock(at->leaf); }

#define ANY_KIND (~0u)
#define KIND(k) (1u << (k))
#define CONTAINERS (KIND(SK_LIST) | KIND(SK_MAP) | KIND(SK_NESTED))

/* ---- Work on a locked leaf ---- */

int sk_entry_find(sk_at *at, const sk_key *key, sk_slot **slot) {
    *slot = sk_table_find(at->table, at->env.leaf_bits, key->hash, key->data, key->len);
    if (*slot == NULL && at->env.is_whole) return SK_MISSING;
    if (*slot == NULL)
        return sk_home_may_have(at->state, at->leaf_no, key->hash) ? SK_UNKNOWN : SK_MISSING;
    if (!((*slot)->marks & SK_MARK_USED)) (*slot)->marks |= SK_MARK_USED;
    if (sk_slot_is_expired(&at->env, *slot)) {
        if (!sk_may_expire(at->store, at->leaf)) { /* so this call does not change anything */
            *slot = NULL;
            return SK_MISSING;
        }
        *slot = sk_entry_expire(at, *slot);
        if (*slot == NULL) sk_table_trim(at->table, &at->env, false);
        return SK_MISSING;
    }
    return sk_slot_is_live(*slot) ? SK_OK : SK_MISSING;
}

/* A live slot for the key, made or revived; its value is not set yet. */
static sk_slot *make_live(sk_at *at, const sk_key *key, sk_slot *tomb) {
    sk_slot *slot = tomb;
    if (slot == NULL) {
        slot = sk_table_insert(at->table, &at->env, key->hash, key->data, key->len);
        if (slot == NULL) return NULL;
    } else {
        slot->marks &= (uint8_t)~SK_MARK_TOMB;
        at->table->tombs--;
    }
    at->table->live++;
    if (at->env.timing != NULL) sk_slot_set_stamp(slot, at->env.timing->now);
    return slot;
}

int sk_entry_put(sk_at *at, const sk_key *key, sk_value value) {
    sk_slot *slot;
    if (sk_entry_find(at, key, &slot) == SK_OK) {
        sk_value_free(&at->table->mem, at->env.kind, slot->value);
    } else {
        slot = make_live(at, key, slot);
        if (slot == NULL) return sk_alloc_status();
    }
    slot->value = value;
    sk_entry_changed(at, slot);
    return SK_OK;
}

static int check_value_len(size_t len) {
    if (len <= SK_VALUE_BYTES_MAX) return SK_OK;
    return sk_fail(SK_TOO_LARGE, "a value of %zu bytes is above the limit of %d", len,
                   SK_VALUE_BYTES_MAX);
}

int sk_entry_put_bytes(sk_at *at, const sk_key *key, const uint8_t *data, size_t len) {
    int status = check_value_len(len);
    if (status != SK_OK) return status;
    sk_slot *slot;
    if (sk_entry_find(at, key, &slot) == SK_OK) {
        sk_blob *blob = slot->value.blob;
        if (len <= blob->cap && blob->cap <= 2 * len + 64) { /* fits, and wastes little */
            if (len > 0) memcpy(blob->data, data, len);
            blob->len = (uint32_t)len;
            sk_entry_changed(at, slot);
            return SK_OK;
        }
    }
    sk_value value = {.blob = sk_alloc(&at->table->mem, sizeof(sk_blob) + len)};
    if (value.blob == NULL) return sk_alloc_status();
    value.blob->len = value.blob->cap = (uint32_t)len;
    if (len > 0) memcpy(value.blob->data, data, len);
    status = sk_entry_put(at, key, value);
    if (status != SK_OK) sk_value_free(&at->table->mem, SK_BYTES, value);
    return status;
}

int sk_entry_put_encoded(sk_at *at, const sk_key *key, const uint8_t *data, size_t len) {
    sk_value value;
    int status;
    if (at->env.kind == SK_BYTES) return sk_entry_put_bytes(at, key, data, len);
    if (at->env.kind == SK_TIMERS) return sk_entry_put_timers(at, key, data, len);
    if (at->env.kind == SK_I64 || at->env.kind == SK_F64) {
        if (len != 8) return sk_fail(SK_BAD_VALUE, "a number has 8 bytes, not %zu", len);
        memcpy(&value, data, 8);
        return sk_entry_put(at, key, value);
    }
    if ((status = check_value_len(len)) != SK_OK) return status;
    status = sk_node_make(&at->table->mem, at->env.kind, data, len, &at->leaf->seq, &value.obj);
    if (status != SK_OK) return status;
    status = sk_entry_put(at, key, value);
    if (status != SK_OK) sk_value_free(&at->table->mem, at->env.kind, value);
    return status;
}

int sk_slot_encode(int kind, const sk_slot *slot, sk_buf *buf) {
    if (sk_kind_is_blob(kind))
        return sk_buf_put(buf, slot->value.blob->data, slot->value.blob->len);
    if (sk_kind_is_container(kind)) return sk_node_encode(slot->value.obj, buf);
    return sk_buf_put(buf, &slot->value, 8);
}

/* A deletion must be remembered while a home or an older checkpoint still has the entry. Not for
 * deltas alone if the table has forgotten one of this epoch: every delta that could tell of it is a
 * full block. */
static bool must_remember(const sk_at *at) {
    if (!at->env.is_whole || at->env.writes_back) return true;
    return at->env.keep_after != SK_NO_TRACKING && sk_forgot(at->leaf, at->table) < at->env.epoch;
}

static void entomb(sk_at *at, sk_slot *slot) {
    sk_value_free(&at->table->mem, at->env.kind, slot->value);
    slot->value = (sk_value){0};
    slot->marks |= SK_MARK_TOMB;
    at->table->live--;
    at->table->tombs++;
    sk_entry_changed(at, slot);
}

sk_slot *sk_entry_drop(sk_at *at, sk_slot *slot) {
    if (must_remember(at)) {
        entomb(at, slot);
        if (!sk_table_tombs_pass(at->table, &at->env)) return slot;
        bool stays = at->env.writes_back; /* it is dirty */
        sk_table_purge(at->table, &at->env);
        return stays ? slot : NULL;
    }
    sk_table_remove(at->table, &at->env, slot);
    at->table->forgot = at->env.epoch;
    at->leaf->changed = at->env.epoch;
    return NULL;
}

int sk_entry_delete(sk_at *at, const sk_key *key, bool blind) {
    sk_slot *slot;
    int status = sk_entry_find(at, key, &slot);
    if (status == SK_OK) {
        if (sk_entry_drop(at, slot) == NULL) sk_table_trim(at->table, &at->env, false);
        return SK_OK;
    }
    if (status == SK_UNKNOWN && blind) {
        slot = sk_table_insert(at->table, &at->env, key->hash, key->data, key->len);
        if (slot == NULL) return sk_alloc_status();
        slot->marks = SK_MARK_TOMB;
        at->table->tombs++;
        sk_entry_changed(at, slot);
        return SK_OK;
    }
    return status;
}

/* ---- Any kind ---- */

int64_t sk_key_leaf(sk_store *store, uint32_t state_id, const uint8_t *data, size_t len) {
    const sk_state *state = sk_state_at(store, state_id);
    if (state == NULL) return -SK_BAD_ARGUMENT;
    uint64_t hash = 0;
    int status = sk_key_route(&state->key_type, data, len, &hash);
    return status == SK_OK ? (int64_t)sk_leaf_of(hash, store->leaf_bits) : -status;
}

int sk_contains(sk_store *store, uint32_t state, const uint8_t *data, size_t len) {
    sk_at at;
    sk_key key;
    sk_slot *slot;
    int status = begin(store, state, ANY_KIND, data, len, READS, &at, &key);
    if (status != SK_OK) return status;
    status = sk_entry_find(&at, &key, &slot);
    if (status == SK_OK) sk_entry_read(&at, slot);
    end(&at);
    return status;
}

int sk_delete(sk_store *store, uint32_t state, const uint8_t *data, size_t len, int flags) {
    sk_at at;
    sk_key key;
    int status = begin(store, state, ANY_KIND, data, len, WRITES, &at, &key);
    if (status != SK_OK) return status;
    status = sk_entry_delete(&at, &key, (flags & SK_BLIND) != 0);
    end(&at);
    return status;
}

int64_t sk_get(sk_store *store, uint32_t state, const uint8_t *data, size_t len, sk_buf *buf) {
    sk_at at;
    sk_key key;
    sk_slot *slot;
    int status = begin(store, state, ANY_KIND, data, len, READS, &at, &key);
    if (status != SK_OK) return -status;
    status = sk_entry_find(&at, &key, &slot);
    buf->len = 0;
    if (status == SK_OK) status = sk_slot_encode(at.env.kind, slot, buf);
    if (status == SK_OK) sk_entry_read(&at, slot);
    end(&at);
    return status == SK_OK ? (int64_t)buf->len : -status;
}

int sk_put(sk_store *store, uint32_t state, const uint8_t *data, size_t len, const uint8_t *value,
           size_t value_len) {
    sk_at at;
    sk_key key;
    int status = begin(store, state, ANY_KIND, data, len, WRITES, &at, &key);
    if (status != SK_OK) return status;
    status = sk_entry_put_encoded(&at, &key, value, value_len);
    end(&at);
    return status;
}

int sk_install(sk_store *store, uint32_t state, const uint8_t *data, size_t len,
               const uint8_t *value, size_t value_len, int64_t stamp_ms) {
    sk_at at;
    sk_key key;
    sk_slot *slot;
    int status = begin(store, state, ANY_KIND, data, len, INSTALLS, &at, &key);
    if (status != SK_OK) return status;
    if (sk_entry_find(&at, &key, &slot) == SK_UNKNOWN) {
        uint32_t changed = at.leaf->changed;
        at.env.writes_back = false; /* what is clean in the end is not noted as dirty */
        if (at.env.timing != NULL && sk_is_expired(at.env.timing, stamp_ms)) value = NULL;
        status = value != NULL ? sk_entry_put_encoded(&at, &key, value, value_len)
                               : sk_entry_delete(&at, &key, true);
        slot =
            status != SK_OK ? NULL : sk_table_find(at.table, at.env.leaf_bits, key.hash, data, len);
        if (slot != NULL && at.env.is_timed && value != NULL && stamp_ms == SK_NO_TIME) {
            /* Its time starts now, or at the first watermark; the home must be told, or it would
             * start anew with every fetch. So this is a change, and stays dirty. */
            bool is_by_event = at.state->clock == SK_EVENT_TIME;
            if (is_by_event && at.env.timing != NULL && at.env.timing->first != SK_NO_TIME)
                sk_slot_set_stamp(slot, at.env.timing->first);
        } else if (slot != NULL) {
            /* It came from the home: it is neither dirty nor a change. */
            if (at.env.is_timed) sk_slot_set_stamp(slot, stamp_ms);
            slot->marks &= (uint8_t)~SK_MARK_DIRTY;
            slot->epoch = 0;
            at.table->dirty--;
            at.leaf->changed = changed;
        }
        if (store->writes_back && at.table->dirty > 0) sk_leaf_note_dirty(store, at.leaf_no);
    }
    /* What was expected begins to come. */
    if (status == SK_OK && at.leaf->residency == SK_LEAF_EXPECTED) at.leaf->residency = SK_PARTIAL;
    end(&at);
    return status;
}

int64_t sk_probe_cost(sk_store *store, uint32_t state, const uint8_t *data, size_t len) {
    sk_at at = {0};
    sk_key key;
    uint32_t cost = 0;
    int status = begin(store, state, ANY_KIND, data, len, READS, &at, &key);
    if (status != SK_OK) return -status;
    sk_table_find_counted(at.table, at.env.leaf_bits, key.hash, data, len, &cost);
    end(&at);
    return cost;
}

/* ---- Numbers ---- */

/*
 * The i64 and f64 operations differ in their type and in how they add, so one text serves both.
 * ADD(a, b, sum): computes *sum, true on overflow.
 */
#define ADD_I64(a, b, sum) __builtin_add_overflow(a, b, sum)
#define ADD_F64(a, b, sum) (*(sum) = (a) + (b), false)

#define NUMBER_OPERATIONS(NAME, TYPE, KIND_OF, ADD)                                                \
    static int fold_##NAME(TYPE now, int fold, TYPE operand, TYPE *result) {                       \
        switch (fold) {                                                                            \
        case SK_ADD:                                                                               \
            if (ADD(now, operand, result))                                                         \
                return sk_fail(SK_OVERFLOW, "the sum does not fit into 64 bits");                  \
            return SK_OK;                                                                          \
        case SK_MIN:                                                                               \
            *result = operand < now ? operand : now;                                               \
            return SK_OK;                                                                          \
        case SK_MAX:                                                                               \
            *result = operand > now ? operand : now;                                               \
            return SK_OK;                                                                          \
        default:                                                                                   \
            return sk_fail(SK_BAD_ARGUMENT, "there is no fold %d", fold);                          \
        }                                                                                          \
    }                                                                                              \
    static int entry_fold_##NAME(sk_at *at, const sk_key *key, int fold, TYPE operand,             \
                                 TYPE initial, TYPE *result) {                                     \
        sk_slot *slot;                                                                             \
        TYPE value = 0;                                                                            \
        int status = sk_entry_find(at, key, &slot);                                                \
        if (status == SK_UNKNOWN) return status;                                                   \
        TYPE now = status == SK_OK ? slot->value.NAME : fold == SK_ADD ? initial : operand;        \
        int folded = fold_##NAME(now, fold, operand, &value);                                      \
        if (folded != SK_OK) return folded;                                                        \
        if (status != SK_OK) {                                                                     \
            slot = make_live(at, key, slot);                                                       \
            if (slot == NULL) return sk_alloc_status();                                            \
        }                                                                                          \
        slot->value.NAME = value;                                                                  \
        sk_entry_changed(at, slot);                                                                \
        if (result != NULL) *result = value;                                                       \
        return SK_OK;                                                                              \
    }                                                                                              \
    int sk_entry_add_##NAME(sk_at *at, const sk_key *key, TYPE operand, TYPE initial,              \
                            TYPE *result) {                                                        \
        return entry_fold_##NAME(at, key, SK_ADD, operand, initial, result);                       \
    }                                                                                              \
    int sk_##NAME##_get(sk_store *store, uint32_t state, const uint8_t *data, size_t len,          \
                        TYPE *value) {                                                             \
        sk_at at;                                                                                  \
        sk_key key;                                                                                \
        sk_slot *slot;                                                                             \
        int status = begin(store, state, KIND(KIND_OF), data, len, READS, &at, &key);              \
        if (status != SK_OK) return status;                                                        \
        status = sk_entry_find(&at, &key, &slot);                                                  \
        if (status == SK_OK) {                                                                     \
            *value = slot->value.NAME;                                                             \
            sk_entry_read(&at, slot);                                                              \
        }                                                                                          \
        end(&at);                                                                                  \
        return status;                                                                             \
    }                                                                                              \
    int sk_##NAME##_put(sk_store *store, uint32_t state, const uint8_t *data, size_t len,          \
                        TYPE value) {                                                              \
        sk_at at;                                                                                  \
        sk_key key;                                                                                \
        int status = begin(store, state, KIND(KIND_OF), data, len, WRITES, &at, &key);             \
        if (status != SK_OK) return status;                                                        \
        status = sk_entry_put(&at, &key, (sk_value){.NAME = value});                               \
        end(&at);                                                                                  \
        return status;                                                                             \
    }                                                                                              \
    int sk_##NAME##_fold(sk_store *store, uint32_t state, const uint8_t *data, size_t len,         \
                         int fold, TYPE operand, TYPE initial, TYPE *result) {                     \
        sk_at at;                                                                                  \
        sk_key key;                                                                                \
        int status = begin(store, state, KIND(KIND_OF), data, len, WRITES, &at, &key);             \
        if (status != SK_OK) return status;                                                        \
        status = entry_fold_##NAME(&at, &key, fold, operand, initial, result);                     \
        end(&at);                                                                                  \
        return status;                                                                             \
    }                                                                                              \
    int sk_##NAME##_cas(sk_store *store, uint32_t state, const uint8_t *data, size_t len,          \
                        const TYPE *expected, TYPE desired, TYPE *result) {                        \
        sk_at at;                                                                                  \
        sk_key key;                                                                                \
        sk_slot *slot;                                                                             \
        int status = begin(store, state, KIND(KIND_OF), data, len, WRITES, &at, &key);             \
        if (status != SK_OK) return status;                                                        \
        status = sk_entry_find(&at, &key, &slot);                                                  \
        bool is_there = status == SK_OK;                                                           \
        /* bit for bit, so that a NaN equals itself and 0.0 is not -0.0 */                         \
        bool is_equal = is_there == (expected != NULL) &&                                          \
                        (!is_there || memcmp(&slot->value, expected, 8) == 0);                     \
        if (result != NULL && is_there) *result = slot->value.NAME;                                \
        if (status != SK_UNKNOWN && is_equal) {                                                    \
            status = sk_entry_put(&at, &key, (sk_value){.NAME = desired});                         \
            if (result != NULL && status == SK_OK) *result = desired;                              \
        } else if (is_there) {                                                                     \
            status = SK_CHANGED;                                                                   \
        }                                                                                          \
        end(&at);                                                                                  \
        return status;                                                                             \
    }

NUMBER_OPERATIONS(i64, int64_t, SK_I64, ADD_I64)
NUMBER_OPERATIONS(f64, double, SK_F64, ADD_F64)

#define VALUE_OPERATIONS(NAME, TYPE, NONE, IS_NONE)                                                \
    static TYPE value_or_none_##NAME(int status, TYPE value) {                                     \
        if (status == SK_OK && !IS_NONE(value)) return value;                                      \
        sk_value_status_set(status);                                                               \
        return status == SK_OK ? value : NONE;                                                     \
    }                                                                                              \
    TYPE sk_##NAME##_value(sk_store *store, uint32_t state, const uint8_t *data, size_t len) {     \
        TYPE value = 0;                                                                            \
        int status = sk_##NAME##_get(store, state, data, len, &value);                             \
        return value_or_none_##NAME(status, value);                                                \
    }                                                                                              \
    TYPE sk_##NAME##_folded(sk_store *store, uint32_t state, const uint8_t *data, size_t len,      \
                            int fold, TYPE operand, TYPE initial) {                                \
        TYPE value = 0;                                                                            \
        int status = sk_##NAME##_fold(store, state, data, len, fold, operand, initial, &value);    \
        return value_or_none_##NAME(status, value);                                                \
    }

#define IS_MIN(value) ((value) == INT64_MIN)
/* -2^63 too: a binding that compares with INT64_MIN sees an equal number */
#define IS_NAN(value) ((value) != (value) || (value) == -9223372036854775808.0)

VALUE_OPERATIONS(i64, int64_t, INT64_MIN, IS_MIN)
VALUE_OPERATIONS(f64, double, (double)NAN, IS_NAN)

/* ---- Containers ---- */

/* Whether an entry was read. If it has no such element, it was: that answer came from it. */
static bool was_looked_at(int status, int64_t result) {
    return status == SK_OK && (result >= 0 || result == -SK_MISSING);
}

int64_t sk_read(sk_store *store, uint32_t state, const uint8_t *data, size_t len, int op,
                const uint8_t *path, size_t path_len, const uint8_t *arg, size_t arg_len, int64_t i,
                int64_t j, sk_buf *buf) {
    sk_at at;
    sk_key key;
    sk_slot *slot;
    int status = begin(store, state, CONTAINERS, data, len, READS, &at, &key);
    if (status != SK_OK) return -status;
    buf->len = 0;
    status = sk_entry_find(&at, &key, &slot);
    int64_t result = status != SK_OK ? -status
                                     : sk_node_read(slot->value.obj, op, path, path_len, arg,
                                                    arg_len, i, j, buf);
    if (was_looked_at(status, result)) sk_entry_read(&at, slot);
    end(&at);
    return result;
}

int64_t sk_page(sk_store *store, uint32_t state, const uint8_t *data, size_t len,
                const uint8_t *path, size_t path_len, uint64_t *cursor, uint64_t *version,
                uint32_t elements_max, sk_buf *buf) {
    sk_at at;
    sk_key key;
    sk_slot *slot;
    if (elements_max == 0) return -sk_fail(SK_BAD_ARGUMENT, "a page has at least one element");
    int status = begin(store, state, CONTAINERS, data, len, READS, &at, &key);
    if (status != SK_OK) return -status;
    buf->len = 0;
    status = sk_entry_find(&at, &key, &slot);
    /* A value that went away while it was read has changed; one that never was is missing. */
    if (status == SK_MISSING && *cursor != 0)
        status = sk_fail(SK_CHANGED, "the value was deleted while it was being read");
    int64_t result = status != SK_OK ? -status
                                     : sk_node_page(slot->value.obj, path, path_len, cursor,
                                                    version, elements_max, buf);
    if (was_looked_at(status, result)) sk_entry_read(&at, slot);
    end(&at);
    return result;
}

int64_t sk_entry_write(sk_at *at, const sk_key *key, int op, const uint8_t *path, size_t path_len,
                       const char *shape, const uint8_t *arg, size_t arg_len, int64_t i, int64_t j,
                       sk_buf *buf) {
    sk_slot *slot;
    int status = sk_entry_find(at, key, &slot);
    bool is_whole_value = path_len == 0 && (op == SK_W_SET || op == SK_W_DELETE);
    if (is_whole_value && op == SK_W_DELETE) return -sk_entry_delete(at, key, false);
    if (is_whole_value) return -sk_entry_put_encoded(at, key, arg, arg_len);
    if (status == SK_UNKNOWN) return -status;
    sk_obj *obj = status == SK_OK ? slot->value.obj : NULL;
    int64_t result = sk_node_write(&at->table->mem, at->env.kind, &obj, op, path, path_len, shape,
                                   arg, arg_len, i, j, &at->leaf->seq, buf);
    if (result < 0 && was_looked_at(status, result)) sk_entry_read(at, slot);
    if (result < 0) return result;
    if (status != SK_OK) {
        slot = make_live(at, key, slot);
        if (slot == NULL) {
            status = sk_alloc_status();
            sk_node_free(&at->table->mem, obj);
            return -status;
        }
    }
    slot->value.obj = obj;
    sk_entry_changed(at, slot);
    return result;
}

int64_t sk_write(sk_store *store, uint32_t state, const uint8_t *data, size_t len, int op,
                 const uint8_t *path, size_t path_len, const char *shape, const uint8_t *arg,
                 size_t arg_len, int64_t i, int64_t j, sk_buf *buf) {
    sk_at at;
    sk_key key;
    int status = begin(store, state, CONTAINERS, data, len, WRITES, &at, &key);
    if (status != SK_OK) return -status;
    buf->len = 0;
    int64_t result = sk_entry_write(&at, &key, op, path, path_len, shape, arg, arg_len, i, j, buf);
    end(&at);
    return result;
}
