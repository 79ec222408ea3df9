/* bytes.c: the kind bytes: any bytes, up to 1 GiB, as a blob. Other kinds may use its put. */
#include "store.h"

int sk_entry_put_bytes(sk_at *at, const sk_key *key, const uint8_t *data, size_t len) {
    int status = sk_value_check_len(len);
    if (status != SK_OK) return status;
    sk_slot *slot;
    if (sk_entry_find(at, key, &slot) == SK_OK) {
        sk_blob *blob = slot->value.blob;
        if (len <= blob->cap && blob->cap <= 2 * len + 64) { /* the new value fits, and wastes
                                                              * little */
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
    if (status != SK_OK) sk_free(&at->table->mem, value.blob, sizeof(sk_blob) + len);
    return status;
}

const sk_kind_ops sk_bytes_kind = {
    .name = "bytes", .held = SK_BLOB, .may_expire = true, .put = sk_entry_put_bytes};
