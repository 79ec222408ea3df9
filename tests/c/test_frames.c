/*
 * test_frames.c: frames of a pack (csrc/frames.c). Oracle: the rules at the top of that file,
 * applied here by hand to each frame.
 */
#include "store_util.h"

#define PACK_OFFSET 64

static const uint8_t id[16] = "a pack's own id";
static const uint8_t other_id[16] = "another pack's";

static void put64(uint8_t *p, uint64_t v) { memcpy(p, &v, 8); }

static uint64_t get64(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

static uint32_t get32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

/* The blocks of a small store, with a compressed frame after each. */
static sk_buf make_frames(void) {
    sk_store *store = util_open(4, 1);
    uint32_t state = util_state(store, "s", SK_BYTES, "b");
    sk_buf frames = {0}, block = {0};
    for (uint32_t k = 0; k < 20; k++) {
        util_key key = util_bytes_key(k);
        CHECK_EQ(sk_put(store, state, key.data, key.len, key.data, k), SK_OK);
    }
    for (uint32_t leaf = 0; leaf < 4; leaf++) {
        block.len = 0;
        CHECK(sk_leaf_encode(store, leaf, SK_ALL_STATES, 0, &block) >= 0);
        uint8_t envelope[56] = "SKZ1";
        put64(envelope + 8, sizeof envelope);
        put64(envelope + 16, block.len);
        put64(envelope + 24, 9);
        envelope[32] = 1;
        memcpy(envelope + 40, "compressed", 9);
        CHECK_EQ(sk_buf_put(&frames, block.data, block.len), SK_OK);
        CHECK_EQ(sk_buf_put(&frames, envelope, sizeof envelope), SK_OK);
    }
    sk_buf_free(&block);
    sk_close(store);
    return frames;
}

static uint32_t place(const uint8_t *pack, uint64_t offset) {
    uint8_t bytes[24];
    memcpy(bytes, pack, 16);
    put64(bytes + 16, offset);
    return (uint32_t)sk_xxh64(bytes, 24, 0);
}

static void test_sealed_frames_have_their_crc_and_bound_ones_that_of_their_place(void) {
    sk_buf frames = make_frames(), digest = {0};
    uint64_t bad;
    CHECK_EQ(sk_frames_seal(frames.data, frames.len), SK_OK);
    int64_t digest_len = sk_frames_digest(frames.data, frames.len, &digest);
    size_t count = 0;
    for (size_t at = 0; at < frames.len; at += get64(frames.data + at + 8), count++) {
        uint64_t size = get64(frames.data + at + 8);
        uint32_t crc = sk_crc32c(frames.data + at + 8, size - 8, 0);
        CHECK_EQ(get32(frames.data + at + 4), crc);
        CHECK_EQ(get64(digest.data + 12 * count), size);
        CHECK_EQ(get32(digest.data + 12 * count + 8), crc);
    }
    CHECK_EQ(digest_len, 12 * count);
    CHECK(count >= 8);
    uint8_t *plain = malloc(frames.len);
    memcpy(plain, frames.data, frames.len);
    CHECK_EQ(sk_frames_bind(frames.data, frames.len, id, PACK_OFFSET), SK_OK);
    for (size_t at = 0; at < frames.len; at += get64(frames.data + at + 8))
        CHECK_EQ(get32(frames.data + at + 4), get32(plain + at + 4) ^ place(id, PACK_OFFSET + at));
    CHECK_EQ(sk_frames_verify(frames.data, frames.len, id, PACK_OFFSET, &bad), SK_OK);
    CHECK_EQ(sk_frames_verify(frames.data, frames.len, id, PACK_OFFSET + 8, &bad), SK_CORRUPT);
    CHECK_EQ(bad, 0);
    CHECK_EQ(sk_frames_verify(frames.data, frames.len, other_id, PACK_OFFSET, &bad), SK_CORRUPT);
    CHECK_EQ(sk_frames_bind(frames.data, frames.len, id, PACK_OFFSET), SK_OK);
    CHECK(memcmp(plain, frames.data, frames.len) == 0); /* binding twice changes nothing */
    free(plain);
    sk_buf_free(&frames);
    sk_buf_free(&digest);
}

static void test_frames_that_have_a_checksum_keep_it(void) {
    sk_buf frames = make_frames();
    memcpy(frames.data + 4, "abcd", 4);
    CHECK_EQ(sk_frames_seal(frames.data, frames.len), SK_OK);
    CHECK(memcmp(frames.data + 4, "abcd", 4) == 0);
    sk_buf_free(&frames);
}

static void test_every_flipped_bit_and_every_cut_is_found_in_its_frame(void) {
    sk_buf frames = make_frames();
    uint64_t bad;
    CHECK_EQ(sk_frames_seal(frames.data, frames.len), SK_OK);
    CHECK_EQ(sk_frames_bind(frames.data, frames.len, id, PACK_OFFSET), SK_OK);
    uint64_t frame_at = 0;
    for (size_t at = 0; at < frames.len; at++) {
        if (at == frame_at + get64(frames.data + frame_at + 8)) frame_at = at;
        for (int bit = 0; bit < 8; bit++) {
            frames.data[at] ^= (uint8_t)(1 << bit);
            CHECK_EQ(sk_frames_verify(frames.data, frames.len, id, PACK_OFFSET, &bad), SK_CORRUPT);
            CHECK_EQ(bad, frame_at);
            frames.data[at] ^= (uint8_t)(1 << bit);
        }
        bool is_boundary = at == frame_at;
        CHECK_EQ(sk_frames_verify(frames.data, at, id, PACK_OFFSET, &bad),
                 is_boundary ? SK_OK : SK_CORRUPT);
        CHECK_EQ(bad, frame_at);
    }
    sk_buf_free(&frames);
}

/* Wrong sizes, in memory of exact size, so that the sanitizers see a read beyond the end. */
static void test_a_row_with_a_bad_frame_is_left_as_it_was(void) {
    const uint64_t sizes[] = {
        0, 8, 16, 40, 48, 55, 57, 72, 1u << 20, UINT64_MAX, UINT64_MAX - 7, 1ull << 63};
    sk_buf frames = make_frames(), buf = {0};
    CHECK_EQ(sk_frames_seal(frames.data, frames.len), SK_OK);
    uint64_t first = get64(frames.data + 8), bad;
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        size_t len = first + 64;
        uint8_t *copy = malloc(len), *was = malloc(len);
        memcpy(copy, frames.data, first);
        memset(copy + first, 0, 64);
        memcpy(copy + first, "SKB1", 4);
        put64(copy + first + 8, sizes[k]);
        memcpy(was, copy, len);
        CHECK_EQ(sk_frames_bind(copy, len, id, 0), SK_CORRUPT);
        CHECK_EQ(sk_frames_seal(copy, len), SK_CORRUPT);
        CHECK_EQ(sk_frames_digest(copy, len, &buf), -SK_CORRUPT);
        CHECK_EQ(buf.len, 0);
        CHECK_EQ(sk_frames_verify(copy + first, 64, id, 0, &bad), SK_CORRUPT);
        CHECK(memcmp(copy, was, len) == 0);
        free(copy);
        free(was);
    }
    CHECK_EQ(sk_frames_bind(NULL, 0, id, 0), SK_OK); /* no frames at all are fine */
    CHECK_EQ(sk_frames_digest(NULL, 0, &buf), 0);
    sk_buf_free(&frames);
    sk_buf_free(&buf);
}

static void test_fail_points_fail_once_at_their_visit_and_are_all_listed(void) {
    sk_buf frames = make_frames(), list = {0};
    CHECK_EQ(sk_failpoint_set("native.frames.bind", 2, 1, 0), SK_OK);
    CHECK_EQ(sk_frames_bind(frames.data, frames.len, id, 0), SK_OK);
    CHECK_EQ(sk_frames_bind(frames.data, frames.len, id, 0), SK_NO_MEMORY);
    CHECK(strstr(sk_reason(), "native.frames.bind") != NULL);
    CHECK_EQ(sk_frames_bind(frames.data, frames.len, id, 0), SK_OK);
    CHECK_EQ(sk_failpoint_set("native.frames.bind", 1, 1, 0), SK_OK);
    CHECK_EQ(sk_failpoint_set("native.frames.bind", 0, 0, 0), SK_OK);
    CHECK_EQ(sk_frames_bind(frames.data, frames.len, id, 0), SK_OK);
    CHECK_EQ(sk_failpoint_set("native.frames.bind", 1, 3, 1), SK_OK); /* a millisecond */
    CHECK_EQ(sk_frames_bind(frames.data, frames.len, id, 0), SK_OK);
    CHECK_EQ(sk_failpoint_set("no.such.point", 1, 1, 0), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_failpoint_set("native.frames.bind", 0, 1, 0), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_failpoint_set("native.frames.bind", 1, 5, 0), SK_BAD_ARGUMENT);
    CHECK(sk_failpoint_list(&list) > 0);
    CHECK_EQ(sk_buf_put(&list, "", 1), SK_OK);
    CHECK(strstr((char *)list.data, "native.leaf.encode ") != NULL);
    CHECK(strstr((char *)list.data, "native.state.retype 0\n") != NULL);
    sk_buf_free(&frames);
    sk_buf_free(&list);
}

int main(void) {
    RUN(test_sealed_frames_have_their_crc_and_bound_ones_that_of_their_place);
    RUN(test_frames_that_have_a_checksum_keep_it);
    RUN(test_every_flipped_bit_and_every_cut_is_found_in_its_frame);
    RUN(test_a_row_with_a_bad_frame_is_left_as_it_was);
    RUN(test_fail_points_fail_once_at_their_visit_and_are_all_listed);
    return test_report();
}
