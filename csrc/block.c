/* block.c: see block.h. */
#include "block_private.h"

#include <stdio.h>

/* ---- Layout ---- */

void sk_block_lay_out(sk_block_info *info) {
    uint64_t n = info->entries;
    uint64_t offsets = padded((n + 1) * info->offset_width);
    uint64_t at = padded(SK_BLOCK_HEADER + strlen(info->name) + strlen(info->key_type));
    info->hashes = at;
    at += 8 * n;
    info->key_offsets = info->key_width == 0 ? at : 0;
    at += info->key_width == 0 ? offsets : 0;
    info->keys = at;
    at += padded(info->key_bytes);
    info->marks = info->is_delta ? at : 0;
    at += info->is_delta ? padded(n) : 0;
    info->stamps = info->is_timed ? at : 0;
    at += info->is_timed ? 8 * n : 0;
    info->value_offsets = info->value_width == 0 ? at : 0;
    at += info->value_width == 0 ? offsets : 0;
    info->values = at;
    info->size = at + padded(info->value_bytes);
}

void sk_block_lay_out_new(sk_block_info *info) {
    bool is_wide =
        info->key_bytes > INT32_MAX || (info->value_width == 0 && info->value_bytes > INT32_MAX);
    info->offset_width = is_wide ? 8 : 4;
    sk_block_lay_out(info);
}

void sk_block_write_header(uint8_t *p, const sk_block_info *info) {
    size_t name_len = strlen(info->name), type_len = strlen(info->key_type);
    memset(p, 0, info->hashes);
    memcpy(p, "SKB1", 4);
    sk_store64(p + 8, info->size);
    sk_store64(p + 16, info->entries);
    sk_store64(p + 24, info->key_bytes);
    sk_store64(p + 32, info->value_bytes);
    sk_store32(p + 40, info->leaf);
    p[44] = info->leaf_bits;
    p[45] = info->kind;
    p[46] = (uint8_t)((info->is_delta ? FLAG_DELTA : 0) | (info->is_timed ? FLAG_TIMED : 0) |
                      (info->offset_width == 8 ? FLAG_WIDE : 0));
    p[47] = info->key_width;
    p[48] = SK_BLOCK_VERSION_LATEST;
    p[49] = (uint8_t)name_len;
    p[50] = (uint8_t)type_len;
    memcpy(p + SK_BLOCK_HEADER, info->name, name_len);
    memcpy(p + SK_BLOCK_HEADER + name_len, info->key_type, type_len);
}

void sk_block_zero_padding(uint8_t *block, const sk_block_info *info) {
    if (info->key_offsets != 0) memset(block + info->keys - 8, 0, 8);
    if (info->key_bytes != 0) memset(block + info->keys + padded(info->key_bytes) - 8, 0, 8);
    if (info->marks != 0) memset(block + info->marks, 0, padded(info->entries));
    if (info->value_offsets != 0) memset(block + info->values - 8, 0, 8);
    if (info->value_bytes != 0) memset(block + info->size - 8, 0, 8);
}

/* ---- Reading ---- */

bool sk_name_is_utf8(const char *text) {
    const uint8_t *p = (const uint8_t *)text;
    while (*p != 0) {
        unsigned more = *p < 0x80   ? 0
                        : *p < 0xc2 ? 4
                        : *p < 0xe0 ? 1
                        : *p < 0xf0 ? 2
                        : *p < 0xf5 ? 3
                                    : 4;
        if (more == 4) return false;
        uint32_t code = more == 0 ? *p : *p & (0x3fu >> more);
        for (unsigned i = 1; i <= more; i++) {
            if ((p[i] & 0xc0) != 0x80) return false;
            code = code << 6 | (p[i] & 0x3f);
        }
        bool is_too_long = (more == 2 && code < 0x800) || (more == 3 && code < 0x10000);
        if (is_too_long || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return false;
        p += more + 1;
    }
    return true;
}

static int read_names(const uint8_t *block, sk_block_info *info) {
    size_t name_len = block[49], type_len = block[50];
    memcpy(info->name, block + SK_BLOCK_HEADER, name_len);
    memcpy(info->key_type, block + SK_BLOCK_HEADER + name_len, type_len);
    if (strlen(info->name) != name_len || name_len == 0 || !sk_name_is_utf8(info->name))
        return CORRUPT("bad state name of length", name_len);
    sk_key_type type;
    if (strlen(info->key_type) != type_len || sk_key_type_parse(info->key_type, &type) != SK_OK)
        return CORRUPT("bad key type of length", type_len);
    if (info->key_width != (strcmp(info->key_type, "i") == 0 ? 8 : 0))
        return CORRUPT("key width does not fit the key type:", info->key_width);
    return SK_OK;
}

static int timed(const sk_block_info *info, uint8_t flags) {
    char what[64];
    snprintf(what, sizeof what, "timed %s:", sk_kinds[info->kind]->name);
    return CORRUPT(what, flags);
}

int sk_block_read(const uint8_t *block, size_t len, sk_block_info *info) {
    *info = (sk_block_info){0};
    if (len < SK_BLOCK_HEADER) return CORRUPT("truncated header: bytes", len);
    if (memcmp(block, "SKB1", 4) != 0) return CORRUPT("bad magic", sk_load32(block));
    if (block[48] < SK_BLOCK_VERSION_READABLE || block[48] > SK_BLOCK_VERSION_LATEST)
        return CORRUPT("unknown block version", block[48]);
    info->entries = sk_load64(block + 16);
    info->key_bytes = sk_load64(block + 24);
    info->value_bytes = sk_load64(block + 32);
    info->leaf = sk_load32(block + 40);
    info->leaf_bits = block[44];
    info->kind = block[45];
    info->is_delta = block[46] & FLAG_DELTA;
    info->is_timed = (block[46] & FLAG_TIMED) != 0;
    info->offset_width = block[46] & FLAG_WIDE ? 8 : 4;
    info->key_width = block[47];
    if (!sk_kind_is_known(info->kind)) return CORRUPT("unknown kind", info->kind);
    info->value_width = sk_kind_width(info->kind);
    if (block[46] & ~(FLAG_DELTA | FLAG_WIDE | FLAG_TIMED))
        return CORRUPT("unknown flags", block[46]);
    if (info->is_timed && !sk_kinds[info->kind]->may_expire) return timed(info, block[46]);
    if (block[51] | sk_load32(block + 52)) return CORRUPT("reserved bytes are not zero", block[51]);
    if (info->leaf_bits > 20 || info->leaf >> info->leaf_bits)
        return CORRUPT("leaf out of range:", info->leaf);
    if ((size_t)SK_BLOCK_HEADER + block[49] + block[50] > len || block[50] > SK_KEY_PARTS_MAX + 2)
        return CORRUPT("names pass the end of the block:", block[49]);
    int status = read_names(block, info);
    if (status != SK_OK) return status;
    /* Each count is limited by the bytes that are there, so that the sums below cannot overflow. */
    if (info->entries > len / 8) return CORRUPT("impossible number of entries", info->entries);
    if (info->key_bytes > len) return CORRUPT("impossible key bytes", info->key_bytes);
    if (info->value_bytes > len) return CORRUPT("impossible value bytes", info->value_bytes);
    if (info->entries == 0 && (info->key_bytes | info->value_bytes) != 0)
        return CORRUPT("bytes without entries:", info->key_bytes | info->value_bytes);
    if (info->key_width != 0 && info->key_bytes != info->entries * info->key_width)
        return CORRUPT("key bytes do not fit the entries:", info->key_bytes);
    if (info->value_width != 0 && info->value_bytes != info->entries * info->value_width)
        return CORRUPT("value bytes do not fit the entries:", info->value_bytes);
    sk_block_lay_out(info);
    if (info->size != sk_load64(block + 8) || info->size > len)
        return CORRUPT("size does not fit the columns:", sk_load64(block + 8));
    return SK_OK;
}

int sk_block_check_padding(const uint8_t *block, const sk_block_info *info) {
    uint64_t n = info->entries, offsets = n == 0 ? 0 : (n + 1) * info->offset_width;
    const uint64_t ends[][2] = {
        {SK_BLOCK_HEADER + strlen(info->name) + strlen(info->key_type), info->hashes},
        {info->key_offsets ? info->key_offsets + offsets : info->keys, info->keys},
        {info->keys + info->key_bytes, info->keys + padded(info->key_bytes)},
        {info->marks ? info->marks + n : 0, info->marks ? info->marks + padded(n) : 0},
        {info->value_offsets ? info->value_offsets + offsets : info->values, info->values},
        {info->values + info->value_bytes, info->size}};
    for (size_t k = 0; k < sizeof ends / sizeof ends[0]; k++)
        for (uint64_t at = ends[k][0]; at < ends[k][1]; at++)
            if (block[at] != 0) return CORRUPT("padding is not zero at byte", at);
    return SK_OK;
}

int sk_block_check(const uint8_t *block, size_t len) {
    sk_block_info info;
    int status = sk_block_read(block, len, &info);
    if (status != SK_OK) return status;
    sk_key_type type;
    sk_key_type_parse(info.key_type, &type);
    const sk_kind_ops *kind = sk_kinds[info.kind];
    entry e, previous = {0};
    for (uint64_t i = 0; i < info.entries; i++, previous = e) {
        if ((status = entry_at(block, &info, i, &e)) != SK_OK) return status;
        if ((status = check_entry(block, &info, &type, i, &e, &previous)) != SK_OK) return status;
        if ((status = check_value(kind, &e, i)) != SK_OK) return status;
    }
    return sk_block_check_padding(block, &info);
}

static int make_value(sk_mem *mem, const sk_kind_ops *kind, const entry *e, uint64_t *seq,
                      sk_value *value) {
    if (kind->held == SK_IN_SLOT) {
        memcpy(value, e->value, 8);
        return SK_OK;
    }
    if (kind->held == SK_OWN) return kind->make(mem, e->value, e->value_len, seq, value);
    value->blob = sk_alloc(mem, sizeof(sk_blob) + e->value_len);
    if (value->blob == NULL) return sk_alloc_status();
    value->blob->len = value->blob->cap = (uint32_t)e->value_len;
    memcpy(value->blob->data, e->value, e->value_len);
    return SK_OK;
}

static int decode_entry(const sk_table_env *env, const sk_kind_ops *kind, const entry *e,
                        uint64_t *seq, sk_table *table) {
    sk_value value = {0};
    int status = e->is_tomb ? SK_OK : make_value(&table->mem, kind, e, seq, &value);
    if (status != SK_OK) return status;
    sk_slot *slot = sk_table_insert_reserved(table, env, e->hash, e->key, e->key_len);
    if (slot == NULL) {
        status = sk_alloc_status();
        if (!e->is_tomb) sk_value_free(&table->mem, env->kind, value);
        return status;
    }
    slot->value = value;
    slot->marks = e->is_tomb ? SK_MARK_TOMB : 0;
    if (env->is_timed) sk_slot_set_stamp(slot, e->stamp);
    table->live += !e->is_tomb;
    table->tombs += e->is_tomb;
    return SK_OK;
}

/* Checks entry i and adds it. left: what sk_alloc_ahead keeps from entry to entry. */
static inline int decode_at(const uint8_t *block, const sk_block_info *info, uint64_t i,
                            const entry *previous, const sk_table_env *env, uint64_t *seq,
                            sk_table *table, int64_t *left, entry *e) {
    const sk_kind_ops *kind = sk_kinds[env->kind];
    bool is_checked = kind->check != NULL && kind->held != SK_OWN; /* else make checks the value */
    int status = entry_at(block, info, i, e);
    if (status == SK_OK) status = check_entry(block, info, env->key_type, i, e, previous);
    if (status == SK_OK && is_checked) status = check_value(kind, e, i);
    if (status != SK_OK) return status;
    if (info->value_width == 0) sk_alloc_ahead(left, e->value_len);
    status = decode_entry(env, kind, e, seq, table);
    if (status == SK_BAD_VALUE || status == SK_TOO_DEEP || status == SK_TOO_LARGE)
        status = CORRUPT("bad value at entry", i);
    return status;
}

int sk_block_decode_part(const uint8_t *block, const sk_block_info *info, uint64_t from,
                         uint64_t to, const sk_table_env *env, uint64_t *seq, sk_table *table) {
    /* No leaf has 2^31 entries (SK_GROUPS_MAX), so do not reserve memory for more. */
    if (to - from > INT32_MAX) return CORRUPT("impossible number of entries", to - from);
    int status = sk_table_reserve(table, env, (uint32_t)(to - from));
    entry e, previous = {0};
    int64_t left = 0;
    for (uint64_t i = from; status == SK_OK && i < to; i++, previous = e)
        status = decode_at(block, info, i, &previous, env, seq, table, &left, &e);
    if (status != SK_OK) sk_table_clear(table, env->kind);
    return status;
}

int sk_block_decode_entry(const uint8_t *block, const sk_block_info *info, uint64_t i,
                          const sk_table_env *env, uint64_t *seq, sk_table *table) {
    const entry none = {0}; /* no entry before it: only this one is looked at */
    entry e;
    int64_t left = 0;
    return decode_at(block, info, i, &none, env, seq, table, &left, &e);
}

int sk_block_decode(const uint8_t *block, const sk_block_info *info, const sk_table_env *env,
                    uint64_t *seq, sk_table *table) {
    int status = sk_block_decode_part(block, info, 0, info->entries, env, seq, table);
    if (status == SK_OK) status = sk_block_check_padding(block, info);
    if (status != SK_OK) sk_table_clear(table, env->kind);
    return status;
}

int sk_block_find(const uint8_t *block, size_t len, const uint8_t *key, size_t key_len,
                  sk_buf *buf) {
    sk_block_info info;
    sk_key_type type;
    uint64_t hash;
    buf->len = 0;
    int status = sk_block_read(block, len, &info);
    if (status != SK_OK) return status;
    sk_key_type_parse(info.key_type, &type);
    if ((status = sk_key_route(&type, key, key_len, &hash)) != SK_OK) return status;
    /* By hash and then by key: crafted keys may all have the same hash. */
    for (uint64_t low = 0, high = info.entries; low < high;) {
        uint64_t middle = low + (high - low) / 2;
        uint64_t middle_hash = sk_load64(block + info.hashes + 8 * middle);
        int order = middle_hash < hash ? -1 : middle_hash > hash;
        entry e = {0};
        if (order == 0) {
            if ((status = entry_at(block, &info, middle, &e)) != SK_OK) return status;
            order = sk_key_compare(e.key, e.key_len, key, key_len);
        }
        if (order < 0) {
            low = middle + 1;
        } else if (order > 0) {
            high = middle;
        } else if (e.is_tomb) {
            status = sk_buf_put(buf, "", 1);
            return status != SK_OK ? status : SK_MISSING;
        } else {
            return sk_buf_put(buf, e.value, e.value_len);
        }
    }
    return SK_MISSING;
}

int sk_block_seal(uint8_t *block, size_t len, uint32_t seed) {
    sk_block_info info;
    int status = sk_block_read(block, len, &info);
    if (status == SK_OK) sk_store32(block + 4, sk_crc32c(block + 8, info.size - 8, 0) ^ seed);
    return status;
}

int sk_block_verify(const uint8_t *block, size_t len, uint32_t seed) {
    sk_block_info info;
    int status = sk_block_read(block, len, &info);
    if (status != SK_OK) return status;
    uint32_t crc = sk_crc32c(block + 8, info.size - 8, 0) ^ seed;
    return crc == sk_load32(block + 4) ? SK_OK : CORRUPT("checksum does not fit; computed", crc);
}
