/*
 * fuzz_block.c: any bytes as a block. Nothing may crash, and what sk_block_check accepts must
 * decode, and encode again to the same bytes. The checksum is not looked at, because it would stop
 * nearly all inputs before they reach the other checks.
 */
#include "block.h"

#include <stdlib.h>

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) abort();                                                                 \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

/* Decodes twice in one mode, so that the second time the leaf has entries of the same state. */
static void decode(const uint8_t *data, size_t len, const sk_block_info *info, int mode,
                   int residency, int expected) {
    sk_store *store = NULL;
    uint32_t id = 0;
    sk_buf was = {0}, is = {0};
    EXPECT(sk_open(1u << info->leaf_bits, 1, 0, &store) == SK_OK);
    /* declare the block's state first; then decode the same block twice, so that entries meet */
    EXPECT(sk_leaf_mark(store, info->leaf, info->leaf + 1, residency) == SK_OK);
    int status = sk_state_add(store, info->name, info->kind, info->key_type,
                              info->is_timed ? SK_TIMED : 0, &id);
    EXPECT(status == SK_OK);
    for (int round = 0; round < 2; round++) {
        was.len = is.len = 0;
        uint64_t bytes = sk_bytes_used(store);
        EXPECT(sk_leaf_encode(store, info->leaf, SK_ALL_STATES, 0, &was) >= 0);
        status = sk_leaf_decode(store, info->leaf, data, len, mode);
        if (expected >= 0 && !(mode == SK_REPLACE && info->is_delta)) EXPECT(status == expected);
        EXPECT(sk_leaf_encode(store, info->leaf, SK_ALL_STATES, 0, &is) >= 0);
        if (status != SK_OK) { /* then nothing has changed */
            EXPECT(bytes == sk_bytes_used(store) && was.len == is.len);
            EXPECT(was.len == 0 || memcmp(was.data, is.data, is.len) == 0);
        }
        if (is.len > 0) EXPECT(sk_block_check(is.data, is.len) == SK_OK);
    }
    sk_buf_free(&was);
    sk_buf_free(&is);
    sk_close(store);
}

/* An accepted block comes out again as it was: a delta from a partial leaf, any other from a whole
 * one. */
static void check_round_trip(const uint8_t *data, const sk_block_info *info) {
    sk_store *store = NULL;
    sk_buf buf = {0};
    EXPECT(sk_open(1u << info->leaf_bits, 1, 0, &store) == SK_OK);
    if (info->is_delta)
        EXPECT(sk_leaf_mark(store, info->leaf, info->leaf + 1, SK_PARTIAL) == SK_OK);
    EXPECT(sk_leaf_decode(store, info->leaf, data, info->size,
                          info->is_delta ? SK_UNDER : SK_REPLACE) == SK_OK);
    EXPECT(sk_leaf_encode(store, info->leaf, SK_ALL_STATES, 0, &buf) >= 0);
    if (info->entries == 0) {
        EXPECT(buf.len == 0);
    } else if (info->offset_width == 4) { /* wide offsets are written only where needed */
        EXPECT(buf.len == info->size);
        EXPECT(memcmp(buf.data + 8, data + 8, buf.len - 8) == 0); /* 4 to 8 is the checksum */
    }
    sk_buf_free(&buf);
    sk_close(store);
}

/* Rewrites the block for half and for double the leaves, for the other type, and as a delta. The
 * result must be a good block, and all of a good block must come out. */
static void rewrite(const uint8_t *data, size_t len, const sk_block_info *info, int check) {
    sk_buf out = {0};
    for (int mode = 0; mode < 12; mode++) {
        int bits = (int)info->leaf_bits + mode % 3 - 1, as_delta = mode / 3 % 2;
        if (bits < 0 || bits > 20) continue;
        int kind = mode < 6 && info->kind == SK_I64 ? SK_F64 : info->kind;
        int flags = mode >= 6 && info->kind != SK_TIMERS && !info->is_timed ? SK_TIMED : 0;
        uint32_t first = mode % 3 == 0   ? info->leaf >> 1
                         : mode % 3 == 1 ? info->leaf
                                         : info->leaf << 1;
        uint64_t entries = 0;
        int worst = SK_OK;
        for (uint32_t leaf = first; leaf <= first + (mode % 3 == 2); leaf++) {
            sk_block_info slice = {0};
            out.len = 0;
            int status =
                sk_block_rewrite(data, len, leaf, (uint32_t)bits, kind, flags, as_delta, &out);
            EXPECT(status == SK_OK || status == SK_CORRUPT);
            if (status != SK_OK) worst = status;
            if (status != SK_OK || out.len == 0) continue;
            EXPECT(sk_block_check(out.data, out.len) == SK_OK);
            EXPECT(sk_block_read(out.data, out.len, &slice) == SK_OK && slice.size == out.len);
            EXPECT(slice.is_delta == (info->is_delta || as_delta));
            entries += slice.entries;
        }
        EXPECT(worst == check);
        if (check == SK_OK) EXPECT(entries == info->entries);
    }
    /* as it is: the same bytes */
    out.len = 0;
    int status = sk_block_rewrite(data, len, info->leaf, info->leaf_bits, info->kind,
                                  info->is_timed ? SK_TIMED : 0, 0, &out);
    EXPECT(status == check);
    if (status == SK_OK && info->offset_width == 4 && out.len > 0)
        EXPECT(out.len == info->size && memcmp(out.data + 8, data + 8, out.len - 8) == 0);
    sk_buf_free(&out);
}

/* The same bytes as single entries of any leaf: refused with nothing taken in, or all taken in. */
static void spread(const uint8_t *data, size_t len, const sk_block_info *info, int check) {
    sk_store *store = NULL;
    uint8_t touched[8] = {0}, none[8] = {0};
    EXPECT(sk_open(8, 1, 0, &store) == SK_OK);
    EXPECT(sk_leaf_mark(store, 0, 8, SK_ABSENT) == SK_OK);
    EXPECT(sk_leaf_gate(store, 0, 4, SK_GATE_EXPECTED) == SK_OK);
    int64_t result = sk_spread(store, data, len, touched);
    sk_stats stats;
    EXPECT(sk_stats_read(store, SK_ALL_STATES, 0, 8, &stats) == SK_OK);
    bool is_good = info->leaf_bits == 0 && info->is_delta && info->entries > 0 && check == SK_OK;
    if (info->size == len) EXPECT(result == (is_good ? (int64_t)info->entries : -SK_CORRUPT));
    if (info->size == len && is_good) EXPECT(stats.entries + stats.tombstones == info->entries);
    if (result < 0) EXPECT(stats.bytes == 0 && memcmp(touched, none, 8) == 0);
    EXPECT(stats.bytes == sk_bytes_used(store));
    sk_close(store);
}

/* Any bytes as frames: when sealed and bound they verify, and when bound twice they are as
 * before. */
static void frames(const uint8_t *data, size_t len) {
    static const uint8_t id[16] = "fuzz";
    uint8_t *copy = malloc(len > 0 ? len : 1);
    uint64_t bad = 0;
    sk_buf digest = {0};
    if (len > 0) memcpy(copy, data, len);
    sk_frames_verify(copy, len, id, 64, &bad);
    EXPECT(bad <= len);
    int status = sk_frames_seal(copy, len);
    EXPECT(status == SK_OK || status == SK_CORRUPT);
    EXPECT(sk_frames_digest(copy, len, &digest) ==
           (status == SK_OK ? (int64_t)digest.len : -status));
    for (size_t at = 0; status == SK_OK && at < len; at += sk_load64(copy + at + 8))
        memset(copy + at + 4, 0, 4);
    EXPECT(sk_frames_seal(copy, len) == status);
    EXPECT(sk_frames_bind(copy, len, id, 64) == status);
    EXPECT(sk_frames_verify(copy, len, id, 64, &bad) == status);
    if (status == SK_OK) EXPECT(bad == len);
    EXPECT(sk_frames_bind(copy, len, id, 64) == status);
    for (size_t at = 0; status == SK_OK && at < len; at += sk_load64(copy + at + 8))
        memcpy(copy + at + 4, data + at + 4, 4);
    EXPECT(len == 0 || memcmp(copy, data, len) == 0);
    sk_buf_free(&digest);
    free(copy);
}

/* A block that is squeezed is restored to the same bytes; a good one is squeezed; and any bytes as
 * a squeezed block are refused, or restored to a block with a good header. */
static void squeeze(const uint8_t *data, size_t len, int check) {
    sk_buf buf = {0};
    sk_block_info info;
    int status = sk_block_squeeze(data, len, &buf);
    EXPECT(status == SK_OK || status == SK_MISSING || status == SK_CORRUPT);
    if (check == SK_OK && sk_load64(data + 8) == len) EXPECT(status == SK_OK);
    uint8_t *block = malloc(len + 4096);
    if (status == SK_OK) {
        EXPECT(sk_block_restore(buf.data, buf.len, block, len) == SK_OK);
        EXPECT(memcmp(block, data, len) == 0);
    }
    for (size_t size = 56; size < len + 4096; size += 8)
        if (size % 512 == 0 || size < 256 || size / 8 == len / 4)
            if (sk_block_restore(data, len, block, size) == SK_OK)
                EXPECT(sk_block_read(block, size, &info) == SK_OK);
    free(block);
    sk_buf_free(&buf);
}

static void run(const uint8_t *data, size_t len) {
    sk_block_info info;
    sk_buf value = {0};
    int read = sk_block_read(data, len, &info);
    int check = sk_block_check(data, len);
    EXPECT(check == SK_OK || check == SK_CORRUPT);
    EXPECT(read == SK_OK || check != SK_OK);
    squeeze(data, len, check);
    sk_block_verify(data, len, 0);
    sk_block_find(data, len, data, len < 8 ? len : 8, &value);
    if (read == SK_OK && info.entries > 0) { /* keys that are there, if the block is good */
        const uint8_t *keys = data + info.keys;
        size_t width = info.key_width != 0 ? info.key_width : (size_t)info.key_bytes;
        if (width <= info.key_bytes) sk_block_find(data, len, keys, width, &value);
        if (info.key_width == 0 && info.offset_width == 4) {
            uint32_t end = sk_load32(data + info.key_offsets + 4);
            if (end <= info.key_bytes) {
                int found = sk_block_find(data, len, keys, end, &value);
                EXPECT(check != SK_OK || found == SK_OK || found == SK_MISSING);
            }
        }
    }
    if (read == SK_OK && info.leaf_bits <= 6) {
        bool is_alone = info.size == len;
        for (int mode = SK_REPLACE; mode <= SK_OVER; mode++)
            for (int residency = SK_WHOLE; residency <= SK_ABSENT; residency++)
                decode(data, len, &info, mode, residency, is_alone ? check : -1);
        if (check == SK_OK) check_round_trip(data, &info);
    }
    if (read == SK_OK) spread(data, len, &info, check);
    if (read == SK_OK) rewrite(data, info.size, &info, sk_block_check(data, info.size));
    frames(data, len);
    sk_buf_free(&value);
}

/* Makes every hash that of its key, which a fuzzer would hardly ever find. */
static void repair(uint8_t *data, size_t len) {
    sk_block_info info;
    if (sk_block_read(data, len, &info) != SK_OK || info.offset_width != 4) return;
    for (uint64_t i = 0; i < info.entries; i++) {
        uint64_t from = 8 * i, to = 8 * i + 8, hash;
        if (info.key_width == 0) {
            from = sk_load32(data + info.key_offsets + 4 * i);
            to = sk_load32(data + info.key_offsets + 4 * i + 4);
        }
        if (from > to || to > info.key_bytes) return;
        if (sk_key_hash(info.key_type, data + info.keys + from, to - from, &hash) == SK_OK)
            sk_store64(data + info.hashes + 8 * i, hash);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    run(data, len);
    uint8_t *copy = malloc(len > 0 ? len : 1);
    if (len > 0) memcpy(copy, data, len);
    repair(copy, len);
    run(copy, len);
    free(copy);
    return 0;
}
