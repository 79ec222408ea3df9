/*
 * entry.c: operations on one key that every kind has.
 *
 * Each public call routes the key, locks its leaf, does its work and unlocks (entry.h).
 * The sk_entry_ functions do the work and expect the lock: batches use them too. What only one kind
 * does is in the kind's file: number.c, bytes.c, container.c, timers.c.
 *
 * A call that can fail prepares first (allocates the value) and changes the table
 * last, so that a failure leaves nothing behind.
 */
#include "entry.h"

int sk_call_guard(sk_store *store, uint32_t leaf_no, int access) {
    sk_leaf *leaf = &store->leaves[leaf_no];
    int status = sk_leaf_refuse(leaf, leaf_no);
    if (status == SK_UNKNOWN && access == SK_INSTALLS) return SK_OK;
    sk_leaf_unlock(leaf);
    return status;
}

int sk_call_save(sk_at *at, const sk_key *key, bool tries) {
    int status = sk_undo_save(at->undo, at->state->id, at->table, &at->env, key);
    if (status == SK_OK) return SK_OK;
    at->undo = NULL;
    if (tries) {
        sk_leaf_unlock(at->leaf);
        return SK_BUSY;
    }
    do { /* again if a snapshot was opened meanwhile: the change belongs to an epoch, or to none */
        status = sk_snapshots_serve_now(at->store, at->leaf_no);
        at->env.epoch = atomic_load(&at->store->epoch);
    } while (status == SK_OK && !sk_leaf_is_served(at->leaf, at->env.epoch));
    if (status != SK_OK) sk_leaf_unlock(at->leaf);
    return status;
}

void sk_call_settle(sk_at *at) {
    sk_undo_settle(at->undo, at->state->id, at->table, at->env.leaf_bits);
}

/* ---- Work on a locked leaf ---- */

int sk_entry_find(sk_at *at, const sk_key *key, sk_slot **slot) {
    *slot = sk_table_find(at->table, at->env.leaf_bits, key->hash, key->data, key->len);
    if (*slot == NULL && at->env.is_whole) return SK_MISSING;
    if (*slot == NULL)
        return sk_home_may_have(at->state, at->leaf_no, key->hash) ? SK_UNKNOWN : SK_MISSING;
    if (!((*slot)->marks & SK_MARK_USED)) (*slot)->marks |= SK_MARK_USED;
    if (sk_slot_is_expired(&at->env, *slot)) {
        /* A snapshot still needs the entry, and it was not kept. */
        if (at->undo == NULL && !sk_may_expire(at->store, at->leaf)) {
            *slot = NULL;
            return SK_MISSING;
        }
        *slot = sk_entry_expire(at, *slot);
        if (*slot == NULL) sk_table_trim(at->table, &at->env, false);
        return SK_MISSING;
    }
    return sk_slot_is_live(*slot) ? SK_OK : SK_MISSING;
}

int sk_entry_put(sk_at *at, const sk_key *key, sk_value value) {
    sk_slot *slot;
    if (sk_entry_find(at, key, &slot) == SK_OK) {
        sk_value_free(&at->table->mem, at->env.kind, slot->value);
    } else {
        slot = sk_entry_make_live(at, key, slot);
        if (slot == NULL) return sk_alloc_status();
    }
    slot->value = value;
    sk_entry_changed(at, slot);
    return SK_OK;
}

int sk_value_check_len(size_t len) {
    if (len <= SK_VALUE_BYTES_MAX) return SK_OK;
    return sk_fail(SK_TOO_LARGE, "a value of %zu bytes is above the limit of %d", len,
                   SK_VALUE_BYTES_MAX);
}

int sk_entry_put_made(sk_at *at, const sk_key *key, const uint8_t *data, size_t len) {
    sk_value value;
    int status = sk_value_check_len(len);
    if (status != SK_OK) return status;
    status = sk_kinds[at->env.kind]->make(&at->table->mem, data, len, &at->leaf->seq, &value);
    if (status != SK_OK) return status;
    status = sk_entry_put(at, key, value);
    if (status != SK_OK) sk_value_free(&at->table->mem, at->env.kind, value);
    return status;
}

int sk_slot_encode(int kind, const sk_slot *slot, sk_buf *buf) {
    const sk_kind_ops *ops = sk_kinds[kind];
    if (ops->held == SK_BLOB) return sk_buf_put(buf, slot->value.blob->data, slot->value.blob->len);
    if (ops->held == SK_OWN) return ops->encode(slot->value, buf);
    return sk_buf_put(buf, &slot->value, 8);
}

/* A deletion must be remembered while a home or an older checkpoint still has the entry. If only
 * deltas need it, and the table has already forgotten a change of this epoch, it need not be
 * remembered: every delta that could mention it is a full block anyway. */
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
    int status = sk_call_begin(store, state, SK_ANY_KIND, data, len, SK_READS, &at, &key);
    if (status != SK_OK) return status;
    status = sk_entry_find(&at, &key, &slot);
    if (status == SK_OK) sk_entry_read(&at, slot);
    sk_call_end(&at);
    return status;
}

int sk_delete(sk_store *store, uint32_t state, const uint8_t *data, size_t len, int flags) {
    sk_at at;
    sk_key key;
    int status = sk_call_begin(store, state, SK_ANY_KIND, data, len, SK_WRITES, &at, &key);
    if (status != SK_OK) return status;
    status = sk_entry_delete(&at, &key, (flags & SK_BLIND) != 0);
    sk_call_end(&at);
    return status;
}

int64_t sk_get(sk_store *store, uint32_t state, const uint8_t *data, size_t len, sk_buf *buf) {
    sk_at at;
    sk_key key;
    sk_slot *slot;
    int status = sk_call_begin(store, state, SK_ANY_KIND, data, len, SK_READS, &at, &key);
    if (status != SK_OK) return -status;
    status = sk_entry_find(&at, &key, &slot);
    buf->len = 0;
    if (status == SK_OK) status = sk_slot_encode(at.env.kind, slot, buf);
    if (status == SK_OK) sk_entry_read(&at, slot);
    sk_call_end(&at);
    return status == SK_OK ? (int64_t)buf->len : -status;
}

int sk_put(sk_store *store, uint32_t state, const uint8_t *data, size_t len, const uint8_t *value,
           size_t value_len) {
    sk_at at;
    sk_key key;
    int status = sk_call_begin(store, state, SK_ANY_KIND, data, len, SK_WRITES, &at, &key);
    if (status != SK_OK) return status;
    status = sk_entry_put_encoded(&at, &key, value, value_len);
    sk_call_end(&at);
    return status;
}

int sk_install(sk_store *store, uint32_t state, const uint8_t *data, size_t len,
               const uint8_t *value, size_t value_len, int64_t stamp_ms) {
    sk_at at;
    sk_key key;
    sk_slot *slot;
    int status = sk_call_begin(store, state, SK_ANY_KIND, data, len, SK_INSTALLS, &at, &key);
    if (status != SK_OK) return status;
    if (sk_entry_find(&at, &key, &slot) == SK_UNKNOWN) {
        uint32_t changed = at.leaf->changed;
        at.env.writes_back = false; /* the entry ends up clean: the leaf is not noted as dirty */
        if (at.env.timing != NULL && sk_is_expired(at.env.timing, stamp_ms)) value = NULL;
        status = value != NULL ? sk_entry_put_encoded(&at, &key, value, value_len)
                               : sk_entry_delete(&at, &key, true);
        slot =
            status != SK_OK ? NULL : sk_table_find(at.table, at.env.leaf_bits, key.hash, data, len);
        if (slot != NULL && at.env.is_timed && value != NULL && stamp_ms == SK_NO_TIME) {
            /* The entry's time to live starts now, or at the first watermark. The home must be
             * told, or that time would start anew with every fetch. So this is a change, and stays
             * dirty. */
            bool is_by_event = at.state->clock == SK_EVENT_TIME;
            if (is_by_event && at.env.timing != NULL && at.env.timing->first != SK_NO_TIME)
                sk_slot_set_stamp(slot, at.env.timing->first);
        } else if (slot != NULL) {
            /* The entry came from the home: it is neither dirty nor a change. */
            if (at.env.is_timed) sk_slot_set_stamp(slot, stamp_ms);
            slot->marks &= (uint8_t)~SK_MARK_DIRTY;
            slot->epoch = 0;
            at.table->dirty--;
            at.leaf->changed = changed;
        }
        if (store->writes_back && at.table->dirty > 0) sk_leaf_note_dirty(store, at.leaf_no);
    }
    /* The first of what was expected has come: the gate is open. */
    if (status == SK_OK && at.leaf->residency == SK_LEAF_EXPECTED) at.leaf->residency = SK_PARTIAL;
    sk_call_end(&at);
    return status;
}

int64_t sk_probe_cost(sk_store *store, uint32_t state, const uint8_t *data, size_t len) {
    sk_at at = {0};
    sk_key key;
    uint32_t cost = 0;
    int status = sk_call_begin(store, state, SK_ANY_KIND, data, len, SK_READS, &at, &key);
    if (status != SK_OK) return -status;
    sk_table_find_counted(at.table, at.env.leaf_bits, key.hash, data, len, &cost);
    sk_call_end(&at);
    return cost;
}
