/*
 * fuzz_chain.c: entries are picked from any bytes as a segment of a chain, with checksums that fit.
 * Nothing may crash, and what is picked from a good block must be what decoding all of it gives.
 */
#include "block.h"

#include <stdlib.h>

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) abort();                                                                 \
    } while (0)
#define KEYS 4
#define LEAF_BITS_MAX 6

static const uint8_t pack[16] = "fuzz";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

static sk_store *open_store(const sk_block_info *info, uint32_t *id) {
    sk_store *store = NULL;
    EXPECT(sk_open(1u << info->leaf_bits, 1, 0, &store) == SK_OK);
    EXPECT(sk_state_add(store, info->name, info->kind, info->key_type,
                        info->is_timed ? SK_TIMED : 0, id) == SK_OK);
    EXPECT(sk_leaf_mark(store, 0, 1u << info->leaf_bits, SK_ABSENT) == SK_OK);
    return store;
}

/* Key i of a block whose header alone was checked; false if the key's place is impossible. */
static bool key_at(const uint8_t *block, const sk_block_info *info, uint64_t i, int64_t at[2]) {
    uint64_t from = 8 * i, to = 8 * i + 8;
    const uint8_t *offsets = block + info->key_offsets;
    if (info->key_width == 0 && info->offset_width == 4) {
        from = sk_load32(offsets + 4 * i);
        to = sk_load32(offsets + 4 * i + 4);
    } else if (info->key_width == 0) {
        from = sk_load64(offsets + 8 * i);
        to = sk_load64(offsets + 8 * i + 8);
    }
    at[0] = (int64_t)from;
    at[1] = (int64_t)to;
    return from <= to && to <= info->key_bytes;
}

static void check_same(sk_store *picked, sk_store *whole, uint32_t id, const uint8_t *key,
                       size_t len) {
    sk_buf x = {0}, y = {0};
    int64_t a = sk_get(picked, id, key, len, &x), b = sk_get(whole, id, key, len, &y);
    EXPECT(a == b);
    EXPECT(a <= 0 || memcmp(x.data, y.data, (size_t)a) == 0);
    sk_buf_free(&x);
    sk_buf_free(&y);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    sk_block_info info;
    if (sk_block_read(data, len, &info) != SK_OK || info.leaf_bits > LEAF_BITS_MAX) return 0;
    len = info.size; /* one block; fuzz_block.c tests what follows it */
    uint8_t *frames = malloc(len);
    memcpy(frames, data, len);
    memset(frames + 4, 0, 4);
    EXPECT(sk_frames_seal(frames, len) == SK_OK);
    EXPECT(sk_frames_bind(frames, len, pack, 64) == SK_OK);

    uint32_t id = 0;
    sk_store *store = open_store(&info, &id), *whole = open_store(&info, &id);
    bool is_good = sk_leaf_decode(whole, info.leaf, data, len, SK_UNDER_ALL) == SK_OK;
    for (uint64_t i = 0; i < KEYS && i < info.entries; i++) {
        int64_t at[2], one[2] = {0};
        uint64_t entry = i * 7919 % info.entries;
        if (!key_at(data, &info, entry, at)) continue;
        const uint8_t *key = data + info.keys + at[0];
        size_t key_len = (size_t)(at[1] - at[0]);
        one[1] = (int64_t)key_len;
        sk_column column = {SK_COL_VAR64, 0, key, one, (int64_t)key_len};
        sk_segment segment = {info.leaf, frames, len, pack, 64};
        uint8_t outcome = 0;
        int status = sk_chains_pick(store, id, &column, 1, &segment, 1, &outcome);
        EXPECT(status == SK_OK || status == SK_BAD_KEY);
        if (is_good) EXPECT(status == SK_OK);
        if (is_good && outcome == SK_PICKED) check_same(store, whole, id, key, key_len);
    }
    sk_close(store);
    sk_close(whole);
    free(frames);
    return 0;
}
