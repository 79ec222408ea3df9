/*
 * container.c: the kinds list, map and nested. Their values are trees (node.h) of MessagePack; they
 * differ only in what the root may be.
 */
#include "entry.h"
#include "msgpack.h"

/* ---- The kinds ---- */

static int check(int kind, const uint8_t *data, size_t value_len, uint64_t i) {
    int64_t len = sk_mp_check(data, value_len, SK_DEPTH_MAX);
    if (len == -SK_NO_MEMORY) return SK_NO_MEMORY;
    if (len != (int64_t)value_len) return CORRUPT("bad MessagePack at entry", i);
    sk_mp_head head;
    sk_mp_read_head(data, value_len, &head);
    bool fits = kind == SK_NESTED || head.type == (kind == SK_LIST ? SK_MP_ARRAY : SK_MP_MAP);
    return fits ? SK_OK : CORRUPT("value of another kind at entry", i);
}

static int encode(sk_value value, sk_buf *buf) { return sk_node_encode(value.obj, buf); }

static uint64_t size_of(sk_value value) { return sk_node_size(value.obj); }
static void free_value(sk_mem *mem, sk_value value) { sk_node_free(mem, value.obj); }

#define CONTAINER(NAME, KIND, BATCH)                                                               \
    static int check_##NAME(const uint8_t *data, size_t len, uint64_t i) {                         \
        return check(KIND, data, len, i);                                                          \
    }                                                                                              \
    static int make_##NAME(sk_mem *mem, const uint8_t *data, size_t len, uint64_t *seq,            \
                           sk_value *value) {                                                      \
        return sk_node_make(mem, KIND, data, len, seq, &value->obj);                               \
    }                                                                                              \
    const sk_kind_ops sk_##NAME##_kind = {.name = #NAME,                                           \
                                          .held = SK_OWN,                                          \
                                          .may_expire = true,                                      \
                                          .batch = BATCH,                                          \
                                          .put = sk_entry_put_made,                                \
                                          .check = check_##NAME,                                   \
                                          .make = make_##NAME,                                     \
                                          .encode = encode,                                        \
                                          .size = size_of,                                         \
                                          .free = free_value};

CONTAINER(list, SK_LIST, 1 << SK_B_APPEND)
CONTAINER(map, SK_MAP, 1 << SK_B_MAP_PUT)
CONTAINER(nested, SK_NESTED, 0)

/* ---- Calls ---- */

#define CONTAINERS (SK_ONLY(SK_LIST) | SK_ONLY(SK_MAP) | SK_ONLY(SK_NESTED))

/* Whether an entry was read. It also was if it has no such element: the entry gave that answer. */
static bool was_looked_at(int status, int64_t result) {
    return status == SK_OK && (result >= 0 || result == -SK_MISSING);
}

/* Whoever asks a home for what is unknown needs its leaf, and the key was routed already. */
static int64_t not_read(int status, const sk_store *store, const sk_key *key, sk_buf *buf) {
    if (status == SK_UNKNOWN) buf->len = sk_leaf_of(key->hash, store->leaf_bits);
    return -status;
}

int64_t sk_read(sk_store *store, uint32_t state, const uint8_t *data, size_t len, int op,
                const uint8_t *path, size_t path_len, const uint8_t *arg, size_t arg_len, int64_t i,
                int64_t j, sk_buf *buf) {
    sk_at at;
    sk_key key;
    sk_slot *slot;
    int status = sk_call_begin(store, state, CONTAINERS, data, len, SK_READS, &at, &key);
    if (status != SK_OK) return not_read(status, store, &key, buf);
    buf->len = 0;
    status = sk_entry_find(&at, &key, &slot);
    int64_t result = status != SK_OK ? not_read(status, store, &key, buf)
                                     : sk_node_read(slot->value.obj, op, path, path_len, arg,
                                                    arg_len, i, j, buf);
    if (was_looked_at(status, result)) sk_entry_read(&at, slot);
    sk_call_end(&at);
    return result;
}

int64_t sk_page(sk_store *store, uint32_t state, const uint8_t *data, size_t len,
                const uint8_t *path, size_t path_len, uint64_t *cursor, uint64_t *version,
                uint32_t elements_max, sk_buf *buf) {
    sk_at at;
    sk_key key;
    sk_slot *slot;
    if (elements_max == 0) return -sk_fail(SK_BAD_ARGUMENT, "a page has at least one element");
    int status = sk_call_begin(store, state, CONTAINERS, data, len, SK_READS, &at, &key);
    if (status != SK_OK) return -status;
    buf->len = 0;
    status = sk_entry_find(&at, &key, &slot);
    /* A value that was deleted while its pages were read has changed; one that never was is
     * missing. */
    if (status == SK_MISSING && *cursor != 0)
        status = sk_fail(SK_CHANGED, "the value was deleted while it was being read");
    int64_t result = status != SK_OK ? -status
                                     : sk_node_page(slot->value.obj, path, path_len, cursor,
                                                    version, elements_max, buf);
    if (was_looked_at(status, result)) sk_entry_read(&at, slot);
    sk_call_end(&at);
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
        slot = sk_entry_make_live(at, key, slot);
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
    int status = sk_call_begin(store, state, CONTAINERS, data, len, SK_WRITES, &at, &key);
    if (status != SK_OK) return -status;
    buf->len = 0;
    int64_t result = sk_entry_write(&at, &key, op, path, path_len, shape, arg, arg_len, i, j, buf);
    sk_call_end(&at);
    return result;
}
