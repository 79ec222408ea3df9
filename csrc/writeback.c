/*
 * writeback.c: changes on their way home, as rows or as blocks.
 *
 * An entry that was taken is marked SK_MARK_WRITING, and is no longer dirty, until the caller says
 * whether the write succeeded. If the entry changes in between, it is dirty again, and stays dirty
 * when the writing ends. If the writing failed, it is dirty again, too. So no change is ever
 * mistaken for one that was written.
 *
 * Rows are what a home keeps (statekit/homes/rows.py says why they look like this):
 *
 *   name    leaf (4 bytes) number of the state (2) key                       big endian
 *   value   [ d7 ad stamp (8) ] value     an int as d3 and 8 bytes, a float as cb and 8 bytes, all
 *                                         else as it is encoded; the stamp in timed states only
 *
 * The caller gets them as one MessagePack array: name, value, name, value, ... Both are bin, except
 * that the value of a deletion is nil. Unpacking the array is one call, and Python has nothing to
 * decide for each row.
 */
#include "failpoint.h"
#include "msgpack.h"
#include "store.h"

/* ---- The end of writing ---- */

void sk_leaf_end_writing(sk_store *store, uint32_t leaf_no, bool written) {
    sk_leaf *leaf = &store->leaves[leaf_no];
    for (uint32_t s = 0; s < store->state_count && leaf->is_writing; s++) {
        sk_table *table = &store->states[s]->tables[leaf_no];
        sk_slot *slot;
        uint32_t left = table->dirty; /* to be seen */
        if (left > 0) sk_table_track(table);
        for (size_t at = 0; left > 0 && (slot = sk_table_next_dirty(table, &at)) != NULL; left--) {
            if (!(slot->marks & SK_MARK_WRITING)) continue;
            slot->marks &= (uint8_t)~SK_MARK_WRITING;
            if (!written) slot->marks |= SK_MARK_DIRTY;
            if (sk_slot_is_dirty(slot)) continue;
            table->dirty--;
            sk_table_set_dirty_bit(table, slot, false);
        }
        assert(left == 0);
    }
    leaf->is_writing = false;
}

/* ---- Blocks ---- */

int64_t sk_dirty_take(sk_store *store, uint32_t leaf_no, int flags, sk_buf *buf) {
    if (leaf_no >= store->leaf_count) return -sk_leaf_range_check(store, leaf_no, leaf_no + 1);
    sk_leaf *leaf = &store->leaves[leaf_no];
    size_t start = buf->len;
    bool is_cold = flags & SK_COLD;
    sk_leaf_lock(leaf);
    sk_filter_drop(store, leaf_no);
    /* Also for a shut leaf: it may still come back, and a flush must not leave out its changes. */
    int status =
        leaf->is_writing
            ? sk_fail(SK_BAD_ARGUMENT, "leaf %u is being written already", leaf_no)
            : sk_leaf_encode_locked(store, leaf_no, SK_ALL_STATES,
                                    is_cold ? SK_SELECT_COLD : SK_SELECT_DIRTY, 0, NULL, NULL, buf);
    for (uint32_t s = 0; status == SK_OK && s < store->state_count; s++) {
        const sk_table *table = &store->states[s]->tables[leaf_no];
        sk_slot *slot;
        for (size_t at = 0; table->dirty > 0 && (slot = sk_table_next(table, &at)) != NULL;)
            if (is_cold ? sk_slot_is_dirty_and_cold(slot) : (slot->marks & SK_MARK_DIRTY) != 0)
                slot->marks = (uint8_t)((slot->marks & ~SK_MARK_DIRTY) | SK_MARK_WRITING);
    }
    if (status == SK_OK) leaf->is_writing = buf->len > start;
    sk_leaf_unlock(leaf);
    return status == SK_OK ? (int64_t)(buf->len - start) : -status;
}

int sk_dirty_done(sk_store *store, uint32_t leaf_no, int written) {
    if (leaf_no >= store->leaf_count) return sk_leaf_range_check(store, leaf_no, leaf_no + 1);
    sk_leaf_lock(&store->leaves[leaf_no]);
    sk_leaf_end_writing(store, leaf_no, written);
    sk_dirty_settle(store, leaf_no);
    sk_leaf_unlock(&store->leaves[leaf_no]);
    return SK_OK;
}

/* ---- Rows ---- */

#define PREFIX 6          /* bytes of a name before the key */
#define STAMP 10          /* bytes of a stamp, with the two bytes before it */
#define NUMBER_MAX 0xffff /* of a state at home */
#define ARRAY_HEAD 5      /* bytes of the head of the array of rows, with a 32-bit length */
#define ROW_BYTES_MAX (2 * SK_MP_HEAD_MAX + PREFIX + STAMP + 9) /* without key, blob and object */

static inline uint8_t *put_be(uint8_t *p, uint64_t value, unsigned bytes) {
    for (unsigned i = 0; i < bytes; i++) p[i] = (uint8_t)(value >> 8 * (bytes - 1 - i));
    return p + bytes;
}

/* What the rows of one table have in common. */
typedef struct row_form {
    const sk_state *state;
    const sk_kind_ops *kind;
    uint32_t leaf_no;
    uint32_t number;
    sk_timing timing; /* of timed states */
} row_form;

static uint8_t *put_stamp(uint8_t *p, const row_form *form, const sk_slot *slot) {
    if (!(form->state->flags & SK_TIMED)) return p;
    *p++ = 0xd7;
    *p++ = 0xad;
    return put_be(p, (uint64_t)sk_stamp_of(&form->timing, slot), 8);
}

/* The value of a row whose length is not known before it is written. */
static int put_own(const row_form *form, const sk_slot *slot, uint8_t *p, sk_buf *buf) {
    size_t head = (size_t)(p - buf->data);
    *p = 0xc6; /* bin, 32 bits of length */
    buf->len = (size_t)(put_stamp(p + 5, form, slot) - buf->data);
    int status = form->kind->encode(slot->value, buf);
    if (status != SK_OK) return status;
    size_t len = buf->len - head - 5;
    if (len > UINT32_MAX)
        return sk_fail(SK_TOO_LARGE,
                       "a value of state '%.80s' in leaf %u has %zu bytes: too many "
                       "for a row",
                       form->state->name, form->leaf_no, len);
    put_be(buf->data + head + 1, len, 4);
    return SK_OK;
}

static int put_row(const row_form *form, const sk_slot *slot, sk_buf *buf) {
    size_t key_len;
    const uint8_t *key = sk_slot_key(slot, &key_len);
    const sk_kind_ops *kind = form->kind;
    bool is_live = sk_slot_is_live(slot);
    const sk_blob *blob = is_live && kind->held == SK_BLOB ? slot->value.blob : NULL;
    size_t more = ROW_BYTES_MAX + key_len + (blob != NULL ? blob->len : 0);
    int status = sk_buf_reserve(buf, more);
    if (status != SK_OK) return status;
    uint8_t *p = buf->data + buf->len;
    p += sk_mp_write_bin(p, (uint32_t)(PREFIX + key_len));
    p = put_be(p, form->leaf_no, 4);
    p = put_be(p, form->number, 2);
    if (key_len > 0) memcpy(p, key, key_len);
    p += key_len;
    if (is_live && kind->held == SK_OWN) return put_own(form, slot, p, buf);
    size_t stamp_len = form->state->flags & SK_TIMED ? STAMP : 0;
    if (!is_live) {
        *p++ = 0xc0; /* nil */
    } else if (blob != NULL) {
        p += sk_mp_write_bin(p, (uint32_t)(stamp_len + blob->len));
        p = put_stamp(p, form, slot);
        if (blob->len > 0) memcpy(p, blob->data, blob->len);
        p += blob->len;
    } else {
        p += sk_mp_write_bin(p, (uint32_t)(stamp_len + 9));
        p = put_stamp(p, form, slot);
        *p++ = kind->row_tag;
        p = put_be(p, (uint64_t)slot->value.i64, 8);
    }
    buf->len = (size_t)(p - buf->data);
    return SK_OK;
}

/* One sk_rows_take. */
typedef struct taking {
    sk_store *store;
    bool is_cold;
    const int32_t *numbers;
    uint64_t *counts;
    uint32_t states;
    uint64_t rows;
    sk_buf *buf;
} taking;

static int number_of(const taking *t, const sk_state *state, uint32_t leaf_no, uint32_t *number) {
    int32_t found = state->id < t->states ? t->numbers[state->id] : -1;
    *number = (uint32_t)found;
    if (found >= 0 && found <= NUMBER_MAX) return SK_OK;
    return sk_fail(SK_BAD_ARGUMENT,
                   "state '%.80s' has changes in leaf %u to be written home, where its number is "
                   "%d: not 0 to %d",
                   state->name, leaf_no, found, NUMBER_MAX);
}

/* Keys must be in the filter before they are at home. False if there is no filter. */
static bool add_to_filter(const taking *t, const sk_state *state, uint32_t leaf_no,
                          const sk_slot *slot) {
    size_t len;
    const uint8_t *key = sk_slot_key(slot, &len);
    return !sk_slot_is_live(slot) || sk_filter_add(t->store, state, leaf_no, key, len);
}

/* Appends the rows of a locked leaf's table and marks their slots as being written. If it fails,
 * some slots stay marked; sk_leaf_end_writing undoes that. */
static int take_table(taking *t, sk_state *state, uint32_t leaf_no) {
    sk_table *table = &state->tables[leaf_no];
    row_form form = {.state = state, .kind = sk_kinds[state->kind], .leaf_no = leaf_no};
    int status = SK_FAILPOINT(LEAF_ENCODE);
    if (status == SK_OK) status = number_of(t, state, leaf_no, &form.number);
    if (status == SK_OK && state->flags & SK_TIMED) form.timing = sk_timing_of(t->store, state);
    sk_slot *slot;
    bool has_filter = true;
    uint32_t left = table->dirty; /* to be seen */
    sk_table_track(table);
    for (size_t at = 0;
         left > 0 && status == SK_OK && (slot = sk_table_next_dirty(table, &at)) != NULL; left--) {
        if (t->is_cold && !sk_slot_is_dirty_and_cold(slot)) continue;
        if ((status = put_row(&form, slot, t->buf)) != SK_OK) break;
        has_filter = has_filter && add_to_filter(t, state, leaf_no, slot);
        slot->marks = (uint8_t)((slot->marks & ~SK_MARK_DIRTY) | SK_MARK_WRITING);
        t->store->leaves[leaf_no].is_writing = true;
        t->counts[state->id]++;
        t->rows++;
    }
    return status;
}

static int take_leaf_locked(taking *t, uint32_t leaf_no) {
    sk_store *store = t->store;
    int status = SK_OK;
    /* If a caller that took the leaf before was interrupted, nobody knows how much was written. */
    sk_leaf_end_writing(store, leaf_no, false);
    /* A home must be told what has expired. Changes of a shut leaf are written too: it may come
     * back. */
    sk_leaf_expire(store, leaf_no);
    for (uint32_t s = 0; s < store->state_count && status == SK_OK; s++)
        if (store->states[s]->tables[leaf_no].dirty > 0)
            status = take_table(t, store->states[s], leaf_no);
    if (status == SK_OK && 2 * t->rows > UINT32_MAX)
        status = sk_fail(SK_TOO_LARGE, "leaf %u has too many changes for one array", leaf_no);
    sk_dirty_settle(store, leaf_no);
    return status;
}

static int take_leaf(taking *t, uint32_t leaf_no) {
    sk_leaf_lock(&t->store->leaves[leaf_no]);
    int status = take_leaf_locked(t, leaf_no);
    sk_leaf_unlock(&t->store->leaves[leaf_no]);
    return status;
}

/* Ends the writing of leaves [from, to). Under rows_lock. */
static void end_rows(sk_store *store, uint32_t from, uint32_t to, bool written) {
    for (uint32_t i = sk_dirty_next(store, from); i < to; i = sk_dirty_next(store, i + 1)) {
        sk_leaf_lock(&store->leaves[i]);
        sk_leaf_end_writing(store, i, written);
        sk_dirty_settle(store, i);
        sk_leaf_unlock(&store->leaves[i]);
    }
}

/* Writes the head of the array, now that the number of rows is known. */
static void end_array(taking *t, size_t start) {
    t->buf->data[start] = 0xdd; /* array, 32 bits of length */
    put_be(t->buf->data + start + 1, 2 * t->rows, 4);
}

static int take_leaves(taking *t, uint32_t *leaf, uint64_t rows_max, uint64_t bytes_max) {
    size_t start = t->buf->len;
    uint32_t from = *leaf, at = sk_dirty_next(t->store, from);
    int status = sk_buf_reserve(t->buf, ARRAY_HEAD);
    if (status != SK_OK) return status;
    t->buf->len += ARRAY_HEAD;
    while (at < t->store->leaf_count && status == SK_OK &&
           (t->rows == 0 || (t->rows < rows_max && t->buf->len - start < bytes_max))) {
        status = take_leaf(t, at);
        at = sk_dirty_next(t->store, at + 1);
    }
    if (status != SK_OK) {
        end_rows(t->store, from, at, false);
        t->buf->len = start;
        return status;
    }
    end_array(t, start);
    *leaf = at;
    return SK_OK;
}

/* ---- All at one moment ---- */

#define MOMENT_ROUNDS_MAX 16 /* after so many, all leaves are locked, dirty or not */

typedef struct leaf_list {
    uint32_t *leaves; /* ascending */
    uint32_t count;
} leaf_list;

/* Lists the leaves whose bits are set, or all leaves. Under rows_lock. */
static int list_dirty(sk_store *store, bool is_all, leaf_list *list) {
    uint32_t room = 0;
    for (uint32_t i = sk_dirty_next(store, 0); i < store->leaf_count;
         i = sk_dirty_next(store, i + 1))
        room++;
    if (is_all) room = store->leaf_count;
    *list = (leaf_list){sk_raw_alloc((size_t)room * sizeof(uint32_t) + 1), 0};
    if (list->leaves == NULL) return SK_NO_MEMORY;
    if (is_all)
        for (; list->count < room; list->count++) list->leaves[list->count] = list->count;
    uint32_t i = is_all ? store->leaf_count : sk_dirty_next(store, 0);
    for (; i < store->leaf_count && list->count < room; i = sk_dirty_next(store, i + 1))
        list->leaves[list->count++] = i;
    return SK_OK;
}

static bool has_all_dirty(sk_store *store, const leaf_list *list) {
    uint32_t k = 0;
    for (uint32_t i = sk_dirty_next(store, 0); i < store->leaf_count;
         i = sk_dirty_next(store, i + 1)) {
        while (k < list->count && list->leaves[k] < i) k++;
        if (k == list->count || list->leaves[k] != i) return false;
    }
    return true;
}

/*
 * Locks all dirty leaves, so that what is dirty in them is what was dirty in the store at one
 * moment. That moment is when the last look at the bits (has_all_dirty) began. A call that ended
 * before that moment has set its leaf's bit, so its leaf is locked, or that look would have found
 * it. And every call that changed a leaf which is locked now ended before that moment. So if a call
 * is included, so is every call that ended before it began. Leaves must be locked in ascending
 * order; so if one is missing, all are unlocked and locked again.
 */
static int lock_moment(sk_store *store, leaf_list *list) {
    for (int round = 0;; round++) {
        int status = list_dirty(store, round == MOMENT_ROUNDS_MAX, list);
        if (status != SK_OK) return status;
        for (uint32_t k = 0; k < list->count; k++) sk_leaf_lock(&store->leaves[list->leaves[k]]);
        if (has_all_dirty(store, list)) return SK_OK;
        sk_leaf_list_unlock(store, list->leaves, list->count);
        sk_raw_free(list->leaves);
    }
}

/* Takes all that is dirty. If that is more than bytes_max, nothing is taken and *leaf stays as it
 * is. */
static int take_moment(taking *t, uint32_t *leaf, uint64_t bytes_max) {
    sk_store *store = t->store;
    size_t start = t->buf->len;
    leaf_list list;
    int status = sk_buf_reserve(t->buf, ARRAY_HEAD);
    if (status == SK_OK) status = lock_moment(store, &list);
    if (status != SK_OK) return status;
    t->buf->len += ARRAY_HEAD;
    bool fits = true;
    for (uint32_t k = 0; k < list.count && status == SK_OK && fits; k++) {
        status = take_leaf_locked(t, list.leaves[k]);
        fits = t->buf->len - start <= bytes_max;
    }
    for (uint32_t k = 0; k < list.count && !(status == SK_OK && fits); k++)
        sk_leaf_end_writing(store, list.leaves[k], false);
    sk_leaf_list_unlock(store, list.leaves, list.count);
    sk_raw_free(list.leaves);
    if (status == SK_OK && fits) {
        end_array(t, start);
        *leaf = store->leaf_count;
        return SK_OK;
    }
    t->rows = 0;
    t->buf->len = start;
    return status;
}

int64_t sk_rows_take(sk_store *store, uint32_t *leaf, int flags, uint64_t rows_max,
                     uint64_t bytes_max, const int32_t *numbers, uint64_t *counts, uint32_t states,
                     sk_buf *buf) {
    for (uint32_t s = 0; s < states; s++) counts[s] = 0;
    int status = sk_leaf_range_check(store, *leaf, store->leaf_count);
    if (status == SK_OK && !store->writes_back)
        status = sk_fail(SK_BAD_ARGUMENT, "nothing is noted as dirty: write-back is off");
    if (status != SK_OK) return -status;
    taking t = {.store = store,
                .is_cold = flags & SK_COLD,
                .numbers = numbers,
                .counts = counts,
                .states = states,
                .buf = buf};
    pthread_mutex_lock(&store->rows_lock);
    status = flags & SK_MOMENT ? take_moment(&t, leaf, bytes_max)
                               : take_leaves(&t, leaf, rows_max, bytes_max);
    pthread_mutex_unlock(&store->rows_lock);
    for (uint32_t s = 0; s < states && status != SK_OK; s++) counts[s] = 0;
    return status == SK_OK ? (int64_t)t.rows : -status;
}

int sk_rows_done(sk_store *store, uint32_t from, uint32_t to, int written) {
    int status = sk_leaf_range_check(store, from, to);
    if (status != SK_OK) return status;
    pthread_mutex_lock(&store->rows_lock);
    end_rows(store, from, to, written);
    pthread_mutex_unlock(&store->rows_lock);
    return SK_OK;
}
