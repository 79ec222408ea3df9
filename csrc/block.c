/* block.c: see block.h. */
#include "block.h"

#include "msgpack.h"

#include <stdlib.h>

#define FLAG_DELTA 1
#define FLAG_WIDE 2
#define FLAG_TIMED 4

/* The one way to call a block bad: the reason names the line that found it. */
#define CORRUPT(...) corrupt(__LINE__, __VA_ARGS__)

static int corrupt(int line, const char *what, uint64_t where) {
    return sk_fail(SK_CORRUPT, "%s %llu (block.c:%d)", what, (unsigned long long)where, line);
}

static uint64_t padded(uint64_t n) { return (n + 7) & ~(uint64_t)7; }

/* Places the columns; every count is known to be below 2^56, so nothing overflows. */
static void lay_out(sk_block_info *info) {
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

/* ---- Encoding ---- */

typedef struct picked {
    uint64_t hash;
    const sk_slot *slot;
} picked;

static int compare_picked(const void *a, const void *b) {
    const picked *x = a, *y = b;
    if (x->hash != y->hash) return x->hash < y->hash ? -1 : 1;
    size_t x_len, y_len;
    const uint8_t *x_key = sk_slot_key(x->slot, &x_len), *y_key = sk_slot_key(y->slot, &y_len);
    return sk_key_compare(x_key, x_len, y_key, y_len);
}

/* A table lies nearly in hash order, so insertion sort has little to do; a flooded one does not,
 * and is found out by the moves it takes. */
static void sort_picked(picked *p, size_t n) {
    size_t moves_left = 16 * n + 64;
    for (size_t i = 1; i < n; i++) {
        picked x = p[i];
        size_t j = i;
        while (j > 0 && (p[j - 1].hash > x.hash ||
                         (p[j - 1].hash == x.hash && compare_picked(&p[j - 1], &x) > 0))) {
            p[j] = p[j - 1];
            j--;
        }
        p[j] = x;
        if (i - j > moves_left) {
            qsort(p, n, sizeof *p, compare_picked);
            return;
        }
        moves_left -= i - j;
    }
}

static bool is_selected(const sk_slot *slot, sk_select select, uint32_t since, bool with_tombs) {
    switch (select) {
    case SK_SELECT_SINCE:
        return slot->epoch > since;
    case SK_SELECT_DIRTY:
        return (slot->marks & SK_MARK_DIRTY) != 0;
    case SK_SELECT_COLD:
        return sk_slot_is_dirty_and_cold(slot);
    default:
        return with_tombs || sk_slot_is_live(slot);
    }
}

static uint64_t value_size(int kind, const sk_slot *slot) {
    if (kind == SK_I64 || kind == SK_F64) return 8;
    if (!sk_slot_is_live(slot)) return 0;
    return sk_kind_is_blob(kind) ? slot->value.blob->len : sk_node_size(slot->value.obj);
}

static size_t pick(const sk_table *table, const sk_table_env *env, sk_select select, uint32_t since,
                   picked *out, sk_block_info *info) {
    size_t n = 0;
    sk_slot *slot;
    for (size_t at = 0; (slot = sk_table_next(table, &at)) != NULL;) {
        if (!is_selected(slot, select, since, info->is_delta)) continue;
        /* deltas are made of tables that were swept: what expires just now has its stamp */
        if (select == SK_SELECT_ALL && sk_slot_is_expired(env, slot)) continue;
        size_t len;
        const uint8_t *key = sk_slot_key(slot, &len);
        out[n++] = (picked){sk_routing_of(env, key, len), slot};
        info->key_bytes += len;
        info->value_bytes += value_size(env->kind, slot);
    }
    return n;
}

static void write_header(uint8_t *p, const sk_block_info *info) {
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

static inline void put_offset(uint8_t *column, unsigned width, size_t i, uint64_t offset) {
    if (width == 4)
        sk_store32(column + 4 * i, (uint32_t)offset);
    else
        sk_store64(column + 8 * i, offset);
}

static void write_keys(uint8_t *block, const sk_block_info *info, const picked *p) {
    uint8_t *keys = block + info->keys;
    uint64_t at = 0;
    for (size_t i = 0; i < info->entries; i++) {
        size_t len;
        const uint8_t *key = sk_slot_key(p[i].slot, &len);
        sk_store64(block + info->hashes + 8 * i, p[i].hash);
        if (info->key_offsets != 0)
            put_offset(block + info->key_offsets, info->offset_width, i, at);
        memcpy(keys + at, key, len);
        at += len;
        if (info->marks != 0) block[info->marks + i] = !sk_slot_is_live(p[i].slot);
    }
    if (info->key_offsets != 0)
        put_offset(block + info->key_offsets, info->offset_width, info->entries, at);
}

static void write_stamps(uint8_t *block, const sk_block_info *info, const sk_timing *timing,
                         const picked *p) {
    for (size_t i = 0; i < info->entries; i++) {
        int64_t stamp = sk_slot_is_live(p[i].slot) ? sk_stamp_of(timing, p[i].slot) : 0;
        sk_store64(block + info->stamps + 8 * i, (uint64_t)stamp);
    }
}

/* Values are the last column and go where buf ends; start is the block's place in buf. */
static int write_values(sk_buf *buf, size_t start, const sk_block_info *info, const picked *p) {
    if (info->value_width == 8) {
        for (size_t i = 0; i < info->entries; i++) {
            sk_value value = sk_slot_is_live(p[i].slot) ? p[i].slot->value : (sk_value){0};
            memcpy(buf->data + buf->len + 8 * i, &value, 8);
        }
        buf->len += 8 * info->entries;
        return SK_OK;
    }
    size_t values = buf->len;
    for (size_t i = 0; i < info->entries; i++) {
        const sk_slot *slot = p[i].slot;
        put_offset(buf->data + start + info->value_offsets, info->offset_width, i,
                   buf->len - values);
        if (!sk_slot_is_live(slot)) continue;
        int status = sk_kind_is_blob(info->kind)
                         ? sk_buf_put(buf, slot->value.blob->data, slot->value.blob->len)
                         : sk_node_encode(slot->value.obj, buf);
        if (status != SK_OK) return status;
    }
    assert(buf->len - values == info->value_bytes);
    put_offset(buf->data + start + info->value_offsets, info->offset_width, info->entries,
               info->value_bytes);
    return SK_OK;
}

static int write_block(sk_buf *buf, const sk_block_info *info, const sk_timing *timing,
                       const picked *p) {
    size_t start = buf->len;
    int status = sk_buf_reserve(buf, info->size);
    if (status != SK_OK) return status;
    uint8_t *block = buf->data + start;
    write_header(block, info);
    /* Zero what padding there may be; each column overwrites its own bytes. */
    if (info->key_offsets != 0) memset(block + info->keys - 8, 0, 8);
    memset(block + info->keys + padded(info->key_bytes) - (info->key_bytes ? 8 : 0), 0,
           info->key_bytes ? 8 : 0);
    if (info->marks != 0) memset(block + info->marks, 0, padded(info->entries));
    if (info->value_offsets != 0) memset(block + info->values - 8, 0, 8);
    write_keys(block, info, p);
    if (info->is_timed) write_stamps(block, info, timing, p);
    buf->len = start + info->values;
    status = write_values(buf, start, info, p);
    if (status != SK_OK) {
        buf->len = start;
        return status;
    }
    memset(buf->data + buf->len, 0, start + info->size - buf->len);
    buf->len = start + info->size;
    return SK_OK;
}

int sk_block_encode(const sk_table *table, const sk_table_env *env, const char *name, uint32_t leaf,
                    sk_select select, uint32_t since, sk_buf *buf) {
    size_t entries_max = (size_t)table->live + table->tombs;
    /* A table that lost entries without a trace since then has no delta: all of it is written, as
     * a full block, even if nothing is left of it. */
    bool is_gone = select == SK_SELECT_SINCE && table->forgot > since;
    if (is_gone) select = SK_SELECT_ALL;
    if (entries_max == 0 && !is_gone) return SK_OK;
    bool is_write_back = select == SK_SELECT_DIRTY || select == SK_SELECT_COLD;
    if (is_write_back && table->dirty == 0) return SK_OK;
    picked *p = sk_raw_alloc((entries_max + 1) * sizeof *p);
    if (p == NULL) return SK_NO_MEMORY;
    sk_block_info info = {.leaf = leaf,
                          .leaf_bits = env->leaf_bits,
                          .kind = env->kind,
                          .is_delta = select != SK_SELECT_ALL || !env->is_whole,
                          .is_timed = env->is_timed,
                          .key_width = strcmp(env->key_type->text, "i") == 0 ? 8 : 0,
                          .value_width = env->kind == SK_I64 || env->kind == SK_F64 ? 8 : 0};
    strcpy(info.name, name);
    strcpy(info.key_type, env->key_type->text);
    info.entries = pick(table, env, select, since, p, &info);
    int status = SK_OK;
    if (info.entries > 0 || is_gone) {
        bool is_wide =
            info.key_bytes > INT32_MAX || (info.value_width == 0 && info.value_bytes > INT32_MAX);
        info.offset_width = is_wide ? 8 : 4;
        lay_out(&info);
        sort_picked(p, info.entries);
        status = write_block(buf, &info, env->timing, p);
    }
    sk_raw_free(p);
    return status;
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
    info->value_width = info->kind == SK_I64 || info->kind == SK_F64 ? 8 : 0;
    if (info->kind < SK_I64 || info->kind > SK_TIMERS) return CORRUPT("unknown kind", info->kind);
    if (block[46] & ~(FLAG_DELTA | FLAG_WIDE | FLAG_TIMED))
        return CORRUPT("unknown flags", block[46]);
    if (info->is_timed && info->kind == SK_TIMERS) return CORRUPT("timed timers:", block[46]);
    if (block[51] | sk_load32(block + 52)) return CORRUPT("reserved bytes are not zero", block[51]);
    if (info->leaf_bits > 20 || info->leaf >> info->leaf_bits)
        return CORRUPT("leaf out of range:", info->leaf);
    if ((size_t)SK_BLOCK_HEADER + block[49] + block[50] > len || block[50] > SK_KEY_PARTS_MAX + 2)
        return CORRUPT("names pass the end of the block:", block[49]);
    int status = read_names(block, info);
    if (status != SK_OK) return status;
    /* Bounding each count by the bytes that are there keeps the sums below from overflowing. */
    if (info->entries > len / 8) return CORRUPT("impossible number of entries", info->entries);
    if (info->key_bytes > len) return CORRUPT("impossible key bytes", info->key_bytes);
    if (info->value_bytes > len) return CORRUPT("impossible value bytes", info->value_bytes);
    if (info->entries == 0 && (info->key_bytes | info->value_bytes) != 0)
        return CORRUPT("bytes without entries:", info->key_bytes | info->value_bytes);
    if (info->key_width != 0 && info->key_bytes != info->entries * info->key_width)
        return CORRUPT("key bytes do not fit the entries:", info->key_bytes);
    if (info->value_width != 0 && info->value_bytes != info->entries * info->value_width)
        return CORRUPT("value bytes do not fit the entries:", info->value_bytes);
    lay_out(info);
    if (info->size != sk_load64(block + 8) || info->size > len)
        return CORRUPT("size does not fit the columns:", sk_load64(block + 8));
    return SK_OK;
}

/* One entry, pointing into the block. */
typedef struct entry {
    uint64_t hash;
    const uint8_t *key, *value;
    size_t key_len, value_len;
    int64_t stamp; /* 0 if the block is not timed */
    bool is_tomb;
} entry;

static inline uint64_t get_offset(const uint8_t *column, unsigned width, uint64_t i) {
    return width == 4 ? sk_load32(column + 4 * i) : sk_load64(column + 8 * i);
}

/* Bytes [from, to) of item i in a column of `bytes` bytes. */
static inline int column_item(const uint8_t *block, const sk_block_info *info, uint64_t offsets,
                              uint64_t bytes, uint64_t i, uint64_t *from, uint64_t *to) {
    *from = get_offset(block + offsets, info->offset_width, i);
    *to = get_offset(block + offsets, info->offset_width, i + 1);
    if (*from > *to || *to > bytes) return CORRUPT("offsets out of order at entry", i);
    if (i == 0 && *from != 0) return CORRUPT("first offset is not 0 but", *from);
    if (i + 1 == info->entries && *to != bytes) return CORRUPT("last offset is", *to);
    return SK_OK;
}

static inline int entry_at(const uint8_t *block, const sk_block_info *info, uint64_t i, entry *e) {
    uint64_t from = 8 * i, to = 8 * i + 8;
    int status;
    e->hash = sk_load64(block + info->hashes + 8 * i);
    if (info->key_width == 0 && (status = column_item(block, info, info->key_offsets,
                                                      info->key_bytes, i, &from, &to)) != SK_OK)
        return status;
    e->key = block + info->keys + from;
    e->key_len = to - from;
    from = 8 * i;
    to = 8 * i + 8;
    if (info->value_width == 0 && (status = column_item(block, info, info->value_offsets,
                                                        info->value_bytes, i, &from, &to)) != SK_OK)
        return status;
    e->value = block + info->values + from;
    e->value_len = to - from;
    e->is_tomb = info->marks != 0 && block[info->marks + i] != 0;
    e->stamp = info->stamps != 0 ? (int64_t)sk_load64(block + info->stamps + 8 * i) : 0;
    return SK_OK;
}

static int check_entry(const uint8_t *block, const sk_block_info *info, const sk_key_type *type,
                       uint64_t i, const entry *e, const entry *previous) {
    uint64_t hash;
    if (sk_key_route(type, e->key, e->key_len, &hash) != SK_OK)
        return CORRUPT("bad key at entry", i);
    if (hash != e->hash) return CORRUPT("hash is not the key's at entry", i);
    if (sk_leaf_of(hash, info->leaf_bits) != info->leaf)
        return CORRUPT("key of another leaf at entry", i);
    if (i > 0 && e->hash <= previous->hash) {
        if (e->hash < previous->hash ||
            sk_key_compare(e->key, e->key_len, previous->key, previous->key_len) <= 0)
            return CORRUPT("keys out of order at entry", i);
    }
    if (info->marks != 0 && block[info->marks + i] > 1) return CORRUPT("unknown mark at entry", i);
    if (e->is_tomb) {
        bool is_empty = info->value_width == 8 ? sk_load64(e->value) == 0 : e->value_len == 0;
        if (e->stamp != 0) return CORRUPT("deletion with a stamp at entry", i);
        return is_empty ? SK_OK : CORRUPT("deletion with a value at entry", i);
    }
    if (e->value_len > SK_VALUE_BYTES_MAX) return CORRUPT("value too large at entry", i);
    if (info->kind == SK_TIMERS && !sk_timers_are_good(e->value, e->value_len))
        return CORRUPT("bad timers at entry", i);
    return SK_OK;
}

/* Padding is zero, or equal state would not be equal bytes. */
static int check_padding(const uint8_t *block, const sk_block_info *info) {
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

static int check_container(const entry *e, int kind, uint64_t i) {
    int64_t len = sk_mp_check(e->value, e->value_len, SK_DEPTH_MAX);
    if (len == -SK_NO_MEMORY) return SK_NO_MEMORY;
    if (len != (int64_t)e->value_len) return CORRUPT("bad MessagePack at entry", i);
    sk_mp_head head;
    sk_mp_read_head(e->value, e->value_len, &head);
    bool fits = kind == SK_NESTED || head.type == (kind == SK_LIST ? SK_MP_ARRAY : SK_MP_MAP);
    return fits ? SK_OK : CORRUPT("value of another kind at entry", i);
}

int sk_block_check(const uint8_t *block, size_t len) {
    sk_block_info info;
    int status = sk_block_read(block, len, &info);
    if (status != SK_OK) return status;
    sk_key_type type;
    sk_key_type_parse(info.key_type, &type);
    entry e, previous = {0};
    for (uint64_t i = 0; i < info.entries; i++, previous = e) {
        if ((status = entry_at(block, &info, i, &e)) != SK_OK) return status;
        if ((status = check_entry(block, &info, &type, i, &e, &previous)) != SK_OK) return status;
        if (sk_kind_is_container(info.kind) && !e.is_tomb &&
            (status = check_container(&e, info.kind, i)) != SK_OK)
            return status;
    }
    return check_padding(block, &info);
}

static int make_value(sk_mem *mem, int kind, const entry *e, uint64_t *seq, sk_value *value) {
    if (kind == SK_I64 || kind == SK_F64) {
        memcpy(value, e->value, 8);
        return SK_OK;
    }
    if (sk_kind_is_container(kind))
        return sk_node_make(mem, kind, e->value, e->value_len, seq, &value->obj);
    value->blob = sk_alloc(mem, sizeof(sk_blob) + e->value_len);
    if (value->blob == NULL) return sk_alloc_status();
    value->blob->len = value->blob->cap = (uint32_t)e->value_len;
    memcpy(value->blob->data, e->value, e->value_len);
    return SK_OK;
}

static int decode_entry(const sk_table_env *env, const entry *e, uint64_t *seq, sk_table *table) {
    sk_value value = {0};
    int status = e->is_tomb ? SK_OK : make_value(&table->mem, env->kind, e, seq, &value);
    if (status != SK_OK) return status;
    sk_slot *slot = sk_table_insert(table, env, e->hash, e->key, e->key_len);
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

int sk_block_decode(const uint8_t *block, const sk_block_info *info, const sk_table_env *env,
                    uint64_t *seq, sk_table *table) {
    /* No leaf has 2^31 entries (SK_GROUPS_MAX), and reserving more would be a waste on the way to
     * finding out. */
    if (info->entries > INT32_MAX) return CORRUPT("impossible number of entries", info->entries);
    int status = sk_table_reserve(table, env, (uint32_t)info->entries);
    entry e, previous = {0};
    for (uint64_t i = 0; status == SK_OK && i < info->entries; i++, previous = e) {
        if ((status = entry_at(block, info, i, &e)) != SK_OK) break;
        if ((status = check_entry(block, info, env->key_type, i, &e, &previous)) != SK_OK) break;
        status = decode_entry(env, &e, seq, table);
        if (status == SK_BAD_VALUE || status == SK_TOO_DEEP || status == SK_TOO_LARGE)
            status = CORRUPT("bad value at entry", i);
    }
    if (status == SK_OK) status = check_padding(block, info);
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
    /* By hash and then by key: crafted keys may all have one hash. */
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
    if (status == SK_OK) sk_store32(block + 4, sk_crc32c(block + 8, info.size - 8, seed));
    return status;
}

int sk_block_verify(const uint8_t *block, size_t len, uint32_t seed) {
    sk_block_info info;
    int status = sk_block_read(block, len, &info);
    if (status != SK_OK) return status;
    uint32_t crc = sk_crc32c(block + 8, info.size - 8, seed);
    return crc == sk_load32(block + 4) ? SK_OK : CORRUPT("checksum does not fit; computed", crc);
}
