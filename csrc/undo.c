/* undo.c: see undo.h. */
#include "undo.h"

#define FIRST_ROOM 960 /* of a new log; with its head, about 1 KiB */
#define CHUNK_MIN 4072
#define CHUNK_MAX 65512
#define PADDED(n) (((n) + 7) & ~(size_t)7)

sk_undo *sk_undo_new(uint32_t table_count, _Atomic uint64_t *held, uint64_t held_max) {
    size_t head = sizeof(sk_undo) + table_count * sizeof(sk_past);
    sk_undo *undo = sk_raw_alloc(head + FIRST_ROOM);
    if (undo == NULL) return NULL;
    memset(undo, 0, head);
    undo->at = (uint8_t *)undo + head;
    undo->end = undo->at + FIRST_ROOM;
    undo->table_count = table_count;
    undo->bytes = head + FIRST_ROOM;
    undo->held = held;
    undo->held_max = held_max;
    atomic_fetch_add(held, undo->bytes);
    return undo;
}

void sk_undo_free(sk_undo *undo) {
    atomic_fetch_sub(undo->held, undo->bytes);
    while (undo->chunks != NULL) {
        sk_undo_chunk *chunk = undo->chunks;
        undo->chunks = chunk->next;
        sk_raw_free(chunk);
    }
    sk_raw_free(undo);
}

/* n bytes of the pool, n a multiple of 8; or NULL. What is left of the last chunk is wasted. */
static void *push(sk_undo *undo, size_t n) {
    if ((size_t)(undo->end - undo->at) < n) {
        size_t room = undo->bytes / 2; /* not many chunks, and not much unused */
        if (room > CHUNK_MAX) room = CHUNK_MAX;
        if (room < CHUNK_MIN) room = CHUNK_MIN;
        if (room < n) room = n;
        sk_undo_chunk *chunk = sk_raw_alloc(sizeof *chunk + room);
        if (chunk == NULL) return NULL;
        chunk->next = undo->chunks;
        undo->chunks = chunk;
        undo->at = chunk->room;
        undo->end = chunk->room + room;
        undo->bytes += sizeof *chunk + room;
        atomic_fetch_add_explicit(undo->held, sizeof *chunk + room, memory_order_relaxed);
    }
    void *p = undo->at;
    undo->at += n;
    return p;
}

/* Copies the encoded value of a live slot into a blob that has room for its `len` bytes. */
static int copy_value(const sk_kind_ops *kind, const sk_slot *slot, sk_blob *blob, size_t len) {
    blob->len = blob->cap = (uint32_t)len;
    if (kind->held == SK_BLOB) {
        memcpy(blob->data, slot->value.blob->data, len);
        return SK_OK;
    }
    sk_buf buf = {.data = blob->data, .cap = len}; /* large enough: it does not move */
    int status = kind->encode(slot->value, &buf);
    assert(status != SK_OK || (buf.data == blob->data && buf.len == len));
    return status;
}

int sk_undo_save(sk_undo *undo, uint32_t state_id, const sk_table *table, const sk_table_env *env,
                 const sk_key *key) {
    const sk_kind_ops *kind = sk_kinds[env->kind];
    const sk_slot *slot = sk_table_find(table, env->leaf_bits, key->hash, key->data, key->len);
    assert(undo->pending == NULL);
    if (slot == NULL || slot->epoch > undo->epoch) return SK_OK;
    assert(state_id < undo->table_count); /* later states only have later entries */
    bool has_value = sk_slot_is_live(slot) && kind->held != SK_IN_SLOT;
    size_t value_len = !has_value              ? 0
                       : kind->held == SK_BLOB ? slot->value.blob->len
                                               : kind->size(slot->value);
    if (key->len + value_len > SK_UNDO_BYTES_MAX) return SK_TOO_LARGE;
    size_t key_room = slot->key_len == SK_KEY_HEAP ? PADDED(sizeof(sk_long_key) + key->len) : 0;
    size_t value_room = has_value ? PADDED(sizeof(sk_blob) + value_len) : 0;
    sk_saved *saved = push(undo, PADDED(sizeof *saved) + key_room + value_room);
    if (saved == NULL) return SK_NO_MEMORY;
    uint8_t *more = (uint8_t *)saved + PADDED(sizeof *saved);
    saved->slot = *slot;
    saved->slot.marks |= SK_MARK_SAVED;
    if (key_room > 0) {
        const sk_long_key *held = sk_slot_long_key(slot);
        memcpy(more, held, sizeof *held + held->len);
        memcpy(saved->slot.key + 2, &more, sizeof more);
    }
    if (has_value) {
        saved->slot.value.blob = (sk_blob *)(more + key_room);
        int status = copy_value(kind, slot, saved->slot.value.blob, value_len);
        if (status != SK_OK) {
            undo->at = (uint8_t *)saved;
            return status;
        }
    }
    sk_past *past = &undo->tables[state_id];
    saved->next = past->saved;
    past->saved = saved;
    past->saved_count++;
    undo->pending = saved;
    undo->pending_hash = key->hash;
    return SK_OK;
}

void sk_undo_settle(sk_undo *undo, uint32_t state_id, const sk_table *table, unsigned leaf_bits) {
    sk_saved *saved = undo->pending;
    if (saved == NULL) return;
    undo->pending = NULL;
    size_t len;
    const uint8_t *key = sk_slot_key(&saved->slot, &len);
    const sk_slot *slot = sk_table_find(table, leaf_bits, undo->pending_hash, key, len);
    if (slot == NULL || slot->epoch > undo->epoch) return;
    sk_past *past = &undo->tables[state_id]; /* nothing has changed: take it back */
    assert(past->saved == saved);
    past->saved = saved->next;
    past->saved_count--;
    undo->at = (uint8_t *)saved;
}
