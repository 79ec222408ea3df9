/*
 * fuzz_block.c: any bytes as a block. Nothing may crash, and what sk_block_check accepts must
 * decode, and encode again to the same bytes. The checksum is not looked at: behind it is where
 * the faults are.
 */
#include "block.h"

#include <stdlib.h>

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) abort();                                                                 \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

/* Decodes in one mode into a store that has, if asked, entries of the same state in the leaf. */
static void decode(const uint8_t *data, size_t len, const sk_block_info *info, int mode,
                   int residency, int expected) {
    sk_store *store = NULL;
    uint32_t id = 0;
    sk_buf was = {0}, is = {0};
    EXPECT(sk_open(1u << info->leaf_bits, 1, 0, &store) == SK_OK);
    /* what the block says first, so that entries meet, and then the same once more */
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

/* What was accepted comes out again as it was: as a delta from a partial leaf, else from a whole.
 */
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

static void run(const uint8_t *data, size_t len) {
    sk_block_info info;
    sk_buf value = {0};
    int read = sk_block_read(data, len, &info);
    int check = sk_block_check(data, len);
    EXPECT(check == SK_OK || check == SK_CORRUPT);
    EXPECT(read == SK_OK || check != SK_OK);
    sk_block_verify(data, len, 0);
    sk_block_find(data, len, data, len < 8 ? len : 8, &value);
    if (read == SK_OK && info.entries > 0) { /* keys that are there, if it is what it says */
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
    sk_buf_free(&value);
}

/* Makes every hash that of its key, which a fuzzer would hardly hit upon. */
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
