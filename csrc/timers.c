/*
 * timers.c: states of kind SK_TIMERS: under each key a set of due times.
 *
 * The value is a blob of 8 bytes for each due time, in ascending order. Timers are entries like
 * others: they are encoded, moved, written home and deleted like any value. When the last timer of
 * a key is removed, so is the entry.
 *
 * To find what is due without looking at everything, a state has one time per leaf, due_min: no
 * timer of the leaf is due before it. It is set under the leaf's lock and read without the lock: a
 * call that reads it while a timer is being set may miss that timer, as if the call had come
 * earlier. due_min is lowered when an earlier timer is set, and becomes INT64_MIN when entries come
 * in blocks or attached leaves. It stays as it is when timers are removed, so it may be too low but
 * never too high. A call that looks through a leaf makes it exact.
 *
 * Each timer is delivered once: all leaves that may have due timers are locked together. The due
 * timers are gathered, sorted and written to the caller's buffer. Only then, when nothing can fail
 * any more, are they taken out.
 */
#include "entry.h"

#include <stdlib.h>

static bool are_good(const uint8_t *data, size_t len) {
    if (len == 0 || len % 8 != 0) return false;
    for (size_t at = 8; at < len; at += 8)
        if ((int64_t)sk_load64(data + at - 8) >= (int64_t)sk_load64(data + at)) return false;
    return true;
}

static int64_t due_at(const sk_blob *blob, size_t i) {
    return (int64_t)sk_load64(blob->data + 8 * i);
}

/* How many timers are due before `due`. */
static size_t rank_of(const sk_blob *blob, int64_t due) {
    size_t low = 0, high = blob->len / 8;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (due_at(blob, middle) < due)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* How many timers are due at the watermark: due <= watermark. */
static size_t due_count(const sk_blob *blob, int64_t watermark) {
    return watermark == INT64_MAX ? blob->len / 8 : rank_of(blob, watermark + 1);
}

static void lower(sk_at *at, int64_t due) {
    if (due < sk_due_min(at->state, at->leaf_no)) sk_set_due_min(at->state, at->leaf_no, due);
}

/* ---- One key ---- */

static int put_timers(sk_at *at, const sk_key *key, const uint8_t *data, size_t len) {
    if (!are_good(data, len))
        return sk_fail(SK_BAD_VALUE, "timers are one or more times of 8 bytes, rising");
    int status = sk_entry_put_bytes(at, key, data, len);
    if (status == SK_OK) lower(at, (int64_t)sk_load64(data));
    return status;
}

static int check_timers(const uint8_t *data, size_t len, uint64_t i) {
    return are_good(data, len) ? SK_OK : CORRUPT("bad timers at entry", i);
}

const sk_kind_ops sk_timers_kind = {
    .name = "timers", .held = SK_BLOB, .has_due = true, .put = put_timers, .check = check_timers};

/* Inserts a time at position i; afterwards the slot may have another blob. */
static int insert_due(sk_at *at, sk_slot *slot, size_t i, int64_t due) {
    sk_blob *old = slot->value.blob, *blob = old;
    size_t len = old->len + 8;
    if (len > SK_VALUE_BYTES_MAX)
        return sk_fail(SK_TOO_LARGE, "a key with %zu timers cannot have more", len / 8 - 1);
    if (len > old->cap) {
        size_t cap = len + len / 16 * 8; /* half as much again */
        blob = sk_alloc(&at->table->mem, sizeof *blob + cap);
        if (blob == NULL) return sk_alloc_status();
        blob->cap = (uint32_t)cap;
        memcpy(blob->data, old->data, 8 * i);
    }
    memmove(blob->data + 8 * i + 8, old->data + 8 * i, old->len - 8 * i);
    sk_store64(blob->data + 8 * i, (uint64_t)due);
    blob->len = (uint32_t)len;
    if (blob != old) sk_free(&at->table->mem, old, sizeof *old + old->cap);
    slot->value.blob = blob;
    return SK_OK;
}

static int set_timer(sk_at *at, const sk_key *key, int64_t due) {
    sk_slot *slot;
    int status = sk_entry_find(at, key, &slot);
    if (status == SK_UNKNOWN) return status;
    if (status == SK_MISSING) return put_timers(at, key, (const uint8_t *)&due, 8);
    const sk_blob *blob = slot->value.blob;
    size_t i = rank_of(blob, due);
    if (i < blob->len / 8 && due_at(blob, i) == due) return SK_OK;
    if ((status = insert_due(at, slot, i, due)) != SK_OK) return status;
    sk_entry_changed(at, slot);
    lower(at, due);
    return SK_OK;
}

int sk_timer_set(sk_store *store, uint32_t state, const uint8_t *data, size_t len, int64_t due) {
    sk_at at;
    sk_key key;
    int status = sk_call_begin(store, state, SK_ONLY(SK_TIMERS), data, len, SK_WRITES, &at, &key);
    if (status != SK_OK) return status;
    status = set_timer(&at, &key, due);
    sk_call_end(&at);
    return status;
}

/* Removes `count` times from position i on. True if the entry stays. The caller trims the table. */
static bool remove_due(sk_at *at, sk_slot *slot, size_t i, size_t count) {
    sk_blob *blob = slot->value.blob;
    if (8 * count == blob->len) {
        sk_entry_drop(at, slot);
        return false;
    }
    size_t rest = blob->len - 8 * (i + count);
    memmove(blob->data + 8 * i, blob->data + 8 * (i + count), rest);
    blob->len -= (uint32_t)(8 * count);
    sk_entry_changed(at, slot);
    return true;
}

static int cancel_timer(sk_at *at, const sk_key *key, int64_t due) {
    sk_slot *slot;
    int status = sk_entry_find(at, key, &slot);
    if (status != SK_OK) return status;
    const sk_blob *blob = slot->value.blob;
    size_t i = rank_of(blob, due);
    if (i == blob->len / 8 || due_at(blob, i) != due) return SK_MISSING;
    if (!remove_due(at, slot, i, 1)) sk_table_trim(at->table, &at->env, false);
    return SK_OK;
}

int sk_timer_cancel(sk_store *store, uint32_t state, const uint8_t *data, size_t len, int64_t due) {
    sk_at at;
    sk_key key;
    int status = sk_call_begin(store, state, SK_ONLY(SK_TIMERS), data, len, SK_WRITES, &at, &key);
    if (status != SK_OK) return status;
    status = cancel_timer(&at, &key, due);
    sk_call_end(&at);
    return status;
}

/* ---- All that is due ---- */

typedef struct due_timer {
    int64_t due;
    const uint8_t *key; /* in the table: valid while the leaf is locked and nothing is removed */
    size_t key_len;
} due_timer;

typedef struct due_list {
    due_timer *items;
    size_t count, room;
    size_t bytes; /* of the records */
} due_list;

#define RECORD_HEAD 12 /* due time and length of the key */

static int compare_due(const void *a, const void *b) {
    const due_timer *x = a, *y = b;
    if (x->due != y->due) return x->due < y->due ? -1 : 1;
    return sk_key_compare(x->key, x->key_len, y->key, y->key_len);
}

static int make_room(due_list *list, size_t more) {
    if (list->count + more <= list->room) return SK_OK;
    size_t room = 2 * list->room + more;
    due_timer *items = sk_raw_alloc(room * sizeof *items);
    if (items == NULL) return SK_NO_MEMORY;
    if (list->count > 0) memcpy(items, list->items, list->count * sizeof *items);
    sk_raw_free(list->items);
    list->items = items;
    list->room = room;
    return SK_OK;
}

/* Lists what is due in a locked leaf. */
static int gather(const sk_table *table, int64_t watermark, due_list *list) {
    sk_slot *slot;
    for (size_t at = 0; table->live > 0 && (slot = sk_table_next(table, &at)) != NULL;) {
        if (!sk_slot_is_live(slot)) continue;
        size_t n = due_count(slot->value.blob, watermark);
        if (n == 0) continue;
        if (make_room(list, n) != SK_OK) return SK_NO_MEMORY;
        size_t len;
        const uint8_t *key = sk_slot_key(slot, &len);
        for (size_t i = 0; i < n; i++)
            list->items[list->count++] = (due_timer){due_at(slot->value.blob, i), key, len};
        list->bytes += n * (RECORD_HEAD + len);
    }
    return SK_OK;
}

static int write_records(due_list *list, sk_buf *buf) {
    int status = sk_buf_reserve(buf, list->bytes);
    if (status != SK_OK) return status;
    if (list->count > 1) qsort(list->items, list->count, sizeof *list->items, compare_due);
    for (size_t i = 0; i < list->count; i++) {
        const due_timer *timer = &list->items[i];
        uint8_t *p = buf->data + buf->len;
        sk_store64(p, (uint64_t)timer->due);
        sk_store32(p + 8, (uint32_t)timer->key_len);
        if (timer->key_len > 0) memcpy(p + RECORD_HEAD, timer->key, timer->key_len);
        buf->len += RECORD_HEAD + timer->key_len;
    }
    return SK_OK;
}

/* Takes the due timers out of a locked leaf (only if `takes`), and makes due_min exact. */
static void take_due(sk_store *store, sk_state *state, uint32_t leaf_no, uint32_t epoch,
                     int64_t watermark, bool takes) {
    int64_t next = INT64_MAX;
    sk_slot *slot;
    sk_at at;
    bool is_empty = state->tables[leaf_no].live == 0;
    if (!is_empty) sk_at_set(&at, store, state, leaf_no, epoch);
    for (size_t i = 0;
         !is_empty && at.table->live > 0 && (slot = sk_table_next(at.table, &i)) != NULL;) {
        if (!sk_slot_is_live(slot)) continue;
        size_t n = takes ? due_count(slot->value.blob, watermark) : 0;
        if (n > 0 && !remove_due(&at, slot, 0, n)) continue;
        int64_t first = due_at(slot->value.blob, 0);
        if (first < next) next = first;
    }
    if (!is_empty && takes) sk_table_trim(at.table, &at.env, false);
    if (sk_due_min(state, leaf_no) != next) sk_set_due_min(state, leaf_no, next);
}

/* Called with the listed leaves locked. */
static int64_t deliver(sk_store *store, sk_state *state, const uint32_t *leaves, uint32_t count,
                       uint32_t epoch, int64_t watermark, bool takes, sk_buf *buf) {
    due_list list = {0};
    int status = SK_OK;
    for (uint32_t k = 0; k < count && status == SK_OK; k++)
        if (store->leaves[leaves[k]].residency != SK_LEAF_SHUT)
            status = gather(&state->tables[leaves[k]], watermark, &list);
    if (status == SK_OK) status = write_records(&list, buf);
    for (uint32_t k = 0; k < count && status == SK_OK; k++) {
        if (store->leaves[leaves[k]].residency == SK_LEAF_SHUT) continue;
        take_due(store, state, leaves[k], epoch, watermark, takes);
    }
    int64_t delivered = (int64_t)list.count;
    sk_raw_free(list.items);
    return status == SK_OK ? delivered : -status;
}

static sk_state *timers_at(sk_store *store, uint32_t state_id) {
    sk_state *state = sk_state_at(store, state_id);
    if (state == NULL || state->kind == SK_TIMERS) return state;
    sk_fail(SK_BAD_KIND, "state '%.80s' is of kind %s, which has no timers", state->name,
            sk_kinds[state->kind]->name);
    return NULL;
}

int64_t sk_timers_due(sk_store *store, uint32_t state_id, uint32_t from, uint32_t to,
                      int64_t watermark, int flags, sk_buf *buf) {
    int status = sk_leaf_range_check(store, from, to);
    if (status != SK_OK) return -status;
    sk_state *state = timers_at(store, state_id);
    if (state == NULL) return state_id < store->state_count ? -SK_BAD_KIND : -SK_BAD_ARGUMENT;
    uint32_t *leaves = sk_raw_alloc((size_t)(to - from) * sizeof *leaves + 1), count = 0, epoch;
    if (leaves == NULL) return -SK_NO_MEMORY;
    for (uint32_t i = from; i < to; i++)
        if (sk_due_min(state, i) <= watermark) leaves[count++] = i;
    bool takes = !(flags & SK_PEEK);
    int64_t result =
        -sk_leaf_list_lock(store, leaves, count, takes ? SK_FOR_WRITING : SK_FOR_READING, &epoch);
    if (result == 0) {
        result = deliver(store, state, leaves, count, epoch, watermark, takes, buf);
        sk_leaf_list_unlock(store, leaves, count);
    }
    sk_raw_free(leaves);
    return result;
}

int64_t sk_timers_next_of(sk_store *store, uint32_t state_id, uint32_t from, uint32_t to) {
    sk_state *state = timers_at(store, state_id);
    int status = state_id >= store->state_count ? SK_BAD_ARGUMENT
                 : state == NULL                ? SK_BAD_KIND
                                                : sk_leaf_range_check(store, from, to);
    sk_value_status_set(status);
    if (status != SK_OK) return INT64_MIN;
    int64_t next = INT64_MAX;
    for (uint32_t i = from; i < to; i++) {
        if (sk_due_min(state, i) >= next) continue;
        int64_t due = INT64_MAX;
        sk_leaf_lock(&store->leaves[i]);
        if (store->leaves[i].residency != SK_LEAF_SHUT) { /* another process fires its timers */
            take_due(store, state, i, 0, INT64_MIN, false);
            due = sk_due_min(state, i);
        }
        sk_leaf_unlock(&store->leaves[i]);
        if (due < next) next = due;
    }
    return next;
}

int64_t sk_timers_next(sk_store *store, uint32_t state_id) {
    return sk_timers_next_of(store, state_id, 0, store->leaf_count);
}

int sk_timers_dues(sk_store *store, uint32_t state_id, uint32_t from, uint32_t to, int64_t *dues) {
    int status = sk_leaf_range_check(store, from, to);
    if (status != SK_OK) return status;
    sk_state *state = timers_at(store, state_id);
    if (state == NULL) return state_id < store->state_count ? SK_BAD_KIND : SK_BAD_ARGUMENT;
    for (uint32_t i = from; i < to; i++) {
        sk_leaf_lock(&store->leaves[i]);
        /* Unknown since entries came in blocks: then the leaf is looked through, once. */
        if (sk_due_min(state, i) == INT64_MIN) take_due(store, state, i, 0, INT64_MIN, false);
        int64_t due = sk_due_min(state, i);
        sk_leaf_unlock(&store->leaves[i]);
        if (due < dues[i - from]) dues[i - from] = due;
    }
    return SK_OK;
}
