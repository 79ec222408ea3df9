/*
 * squeeze.c: a block without what can be computed again, in an order that compresses well.
 *
 * Compressors see bytes. To them the hashes are noise (8 bytes an entry, though the keys say them),
 * offsets always differ (though lengths seldom do), and of numbers only the low bytes change. So
 * a block is squeezed before it is compressed, and restored after it was decompressed:
 *
 *   column of the block           squeezed
 *   header, name, key type        as they are, with their padding
 *   hashes                        left out
 *   key offsets                   the lengths, 4 bytes each, in planes
 *   keys                          as they are; in planes if they are ints
 *   marks                         as they are
 *   stamps                        in planes
 *   value offsets                 the lengths, 4 bytes each, in planes
 *   values                        as they are; in planes if they are numbers
 *
 * n items of w bytes in planes: all their first bytes, then all their second bytes, and so on. There
 * is no padding between columns.
 *
 * A block is squeezed only if restoring it gives the same bytes again: its hashes are those of its
 * keys, its offsets rise and end where their columns do, and its padding is zero. Of others the
 * caller compresses the block as it is. Restoring trusts nothing: the header is read as that of any
 * block, every length is checked against the bytes that are there. What else a block must be is
 * checked when it is decoded.
 */
#include "block_private.h"
#include "store.h"

#define LENGTH_WIDTH 4

static void to_planes(const uint8_t *items, uint64_t n, unsigned width, uint8_t *planes) {
    for (unsigned k = 0; k < width; k++)
        for (uint64_t i = 0; i < n; i++) planes[k * n + i] = items[i * width + k];
}

static void from_planes(const uint8_t *planes, uint64_t n, unsigned width, uint8_t *items) {
    for (unsigned k = 0; k < width; k++)
        for (uint64_t i = 0; i < n; i++) items[i * width + k] = planes[k * n + i];
}

/* How many bytes a squeezed block has. Below 2^59: sk_block_read() bounds every count. */
static uint64_t squeezed_size(const sk_block_info *info) {
    uint64_t n = info->entries, size = info->hashes + info->key_bytes + info->value_bytes;
    if (info->key_width == 0) size += LENGTH_WIDTH * n;
    if (info->value_width == 0) size += LENGTH_WIDTH * n;
    if (info->marks != 0) size += n;
    if (info->stamps != 0) size += 8 * n;
    return size;
}

/* ---- Squeezing ---- */

static bool squeeze_lengths(const uint8_t *offsets, unsigned width, uint64_t n, uint8_t *planes) {
    for (uint64_t i = 0; i < n; i++) {
        uint64_t length = get_offset(offsets, width, i + 1) - get_offset(offsets, width, i);
        if (length > UINT32_MAX) return false;
        for (unsigned k = 0; k < LENGTH_WIDTH; k++) planes[k * n + i] = (uint8_t)(length >> 8 * k);
    }
    return true;
}

static uint8_t *squeeze_column(const uint8_t *column, uint64_t n, unsigned width, uint64_t bytes,
                               uint8_t *out) {
    if (width == 8)
        to_planes(column, n, 8, out);
    else if (bytes > 0)
        memcpy(out, column, bytes);
    return out + bytes;
}

/* Whether the columns that are left out, and the padding, follow from the others. */
static bool is_plain(const uint8_t *block, const sk_block_info *info) {
    sk_key_type type;
    if (sk_key_type_parse(info->key_type, &type) != SK_OK) return false;
    for (uint64_t i = 0; i < info->entries; i++) {
        entry e;
        uint64_t hash;
        if (entry_at(block, info, i, &e) != SK_OK) return false;
        if (sk_key_route(&type, e.key, e.key_len, &hash) != SK_OK || hash != e.hash) return false;
    }
    return sk_block_check_padding(block, info) == SK_OK;
}

int sk_block_squeeze(const uint8_t *block, size_t len, sk_buf *buf) {
    sk_block_info info;
    int status = sk_block_read(block, len, &info);
    if (status != SK_OK) return status;
    if (info.size != len || !is_plain(block, &info)) return SK_MISSING;
    uint64_t n = info.entries, size = squeezed_size(&info);
    if ((status = sk_buf_reserve(buf, size)) != SK_OK) return status;
    uint8_t *out = buf->data + buf->len;
    memcpy(out, block, info.hashes);
    out += info.hashes;
    if (info.key_width == 0) {
        if (n > 0 && !squeeze_lengths(block + info.key_offsets, info.offset_width, n, out))
            return SK_MISSING;
        out += LENGTH_WIDTH * n;
    }
    out = squeeze_column(block + info.keys, n, info.key_width, info.key_bytes, out);
    if (info.marks != 0) out = squeeze_column(block + info.marks, n, 1, n, out);
    if (info.stamps != 0) out = squeeze_column(block + info.stamps, n, 8, 8 * n, out);
    if (info.value_width == 0) {
        if (n > 0 && !squeeze_lengths(block + info.value_offsets, info.offset_width, n, out))
            return SK_MISSING;
        out += LENGTH_WIDTH * n;
    }
    squeeze_column(block + info.values, n, info.value_width, info.value_bytes, out);
    buf->len += size;
    return SK_OK;
}

/* ---- Restoring ---- */

static int restore_lengths(const uint8_t *planes, unsigned width, uint64_t n, uint64_t bytes,
                           uint8_t *offsets) {
    uint64_t at = 0;
    if (n == 0) return SK_OK;
    put_offset(offsets, width, 0, 0);
    for (uint64_t i = 0; i < n; i++) {
        for (unsigned k = 0; k < LENGTH_WIDTH; k++) at += (uint64_t)planes[k * n + i] << 8 * k;
        if (at > bytes) return CORRUPT("squeezed lengths pass their column at entry", i);
        put_offset(offsets, width, i + 1, at);
    }
    return at == bytes ? SK_OK : CORRUPT("squeezed lengths end at", at);
}

static const uint8_t *restore_column(const uint8_t *in, uint64_t n, unsigned width, uint64_t bytes,
                                     uint8_t *column) {
    if (width == 8)
        from_planes(in, n, 8, column);
    else if (bytes > 0)
        memcpy(column, in, bytes);
    return in + bytes;
}

static int restore_hashes(uint8_t *block, const sk_block_info *info) {
    sk_key_type type;
    int status = sk_key_type_parse(info->key_type, &type);
    if (status != SK_OK) return status;
    for (uint64_t i = 0; i < info->entries; i++) {
        uint64_t from = 8 * i, to = 8 * i + 8, hash;
        if (info->key_width == 0 && (status = column_item(block, info, info->key_offsets,
                                                          info->key_bytes, i, &from, &to)) != SK_OK)
            return status;
        if (sk_key_route(&type, block + info->keys + from, to - from, &hash) != SK_OK)
            return CORRUPT("bad key at entry", i);
        sk_store64(block + info->hashes + 8 * i, hash);
    }
    return SK_OK;
}

static int restore_columns(const uint8_t *in, uint8_t *block, const sk_block_info *info) {
    uint64_t n = info->entries;
    int status;
    if (info->key_width == 0) {
        status =
            restore_lengths(in, info->offset_width, n, info->key_bytes, block + info->key_offsets);
        if (status != SK_OK) return status;
        in += LENGTH_WIDTH * n;
    }
    in = restore_column(in, n, info->key_width, info->key_bytes, block + info->keys);
    if (info->marks != 0) in = restore_column(in, n, 1, n, block + info->marks);
    if (info->stamps != 0) in = restore_column(in, n, 8, 8 * n, block + info->stamps);
    if (info->value_width == 0) {
        status = restore_lengths(in, info->offset_width, n, info->value_bytes,
                                 block + info->value_offsets);
        if (status != SK_OK) return status;
        in += LENGTH_WIDTH * n;
    }
    restore_column(in, n, info->value_width, info->value_bytes, block + info->values);
    return restore_hashes(block, info);
}

int sk_block_restore(const uint8_t *squeezed, size_t len, uint8_t *block, size_t size) {
    sk_block_info info;
    if (len < SK_BLOCK_HEADER) return CORRUPT("truncated squeezed block: bytes", len);
    uint64_t head = padded((uint64_t)SK_BLOCK_HEADER + squeezed[49] + squeezed[50]);
    if (head > len || head > size) return CORRUPT("names pass the end of a squeezed block:", head);
    memset(block, 0, size);
    memcpy(block, squeezed, head);
    int status = sk_block_read(block, size, &info);
    if (status != SK_OK) return status;
    if (info.hashes != head) return CORRUPT("columns of a squeezed block begin at", info.hashes);
    if (info.size != size) return CORRUPT("a squeezed block is of another size:", info.size);
    if (squeezed_size(&info) != len) return CORRUPT("a squeezed block has bytes", len);
    return restore_columns(squeezed + head, block, &info);
}
