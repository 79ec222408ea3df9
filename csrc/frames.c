/*
 * frames.c: the frames of a pack; what is inside them does not matter here.
 *
 * A pack (statekit/format/pack.py) is a header of 64 bytes and then frames, one after the
 * other, until the end of the file. All frames start alike:
 *
 *   at  bytes  field
 *    0    4    magic: "SKB1", a block (block.h), or "SKZ1", a compressed one
 *    4    4    checksum
 *    8    8    size of the frame, these 16 bytes included; a multiple of 8
 *
 *   SKZ1 goes on with
 *   16    8    size of the block inside; its own checksum is 0
 *   24    8    length of the payload
 *   32    1    codec: 1 = zstd, 2 = lz4
 *   33    7    zero
 *   40    -    payload, then zeroes up to a multiple of 8
 *
 * plain checksum = CRC32C of bytes 8 .. size. It is what a frame has in memory; 0 means that it is
 *                  not computed yet.
 * bound checksum = plain checksum XOR mix(id of the pack, offset of the frame in the file). It is
 *                  what a frame has in a file. So a frame that is intact, but belongs to another
 *                  pack or another place, has a wrong checksum.
 * It is XOR, and not a CRC that starts from the mix, so that a frame can be moved to another pack
 * by changing only its header: binding it a second time gives the plain checksum back.
 *
 * Frames are walked by their magic and size; nothing in them is trusted. A row of frames is good
 * iff each frame has a known magic, at least the bytes that its magic requires, and a size that is
 * a multiple of 8, and the last frame ends where the row ends.
 */
#include "block.h"
#include "failpoint.h"

#define FRAME_HEAD 16
#define FRAME_SKZ1_MIN 40
#define ID_BYTES 16

/* Low 32 bits of XXH64(id, offset): what binds a checksum to its place. */
static uint32_t mix(const uint8_t *id, uint64_t offset) {
    uint8_t place[ID_BYTES + 8];
    memcpy(place, id, ID_BYTES);
    sk_store64(place + ID_BYTES, offset);
    return (uint32_t)sk_xxh64_short(place, sizeof place, 0);
}

static int bad_frame(const char *what, size_t at) {
    return sk_fail(SK_CORRUPT, "%s in the frame at byte %zu", what, at);
}

/* The size of the frame at `at`, which is before the end; 0 if there is no good frame. */
static uint64_t frame_size(const uint8_t *frames, size_t len, size_t at) {
    uint64_t left = len - at, size;
    if (left < FRAME_HEAD) return 0;
    bool is_block = memcmp(frames + at, "SKB1", 4) == 0;
    if (!is_block && memcmp(frames + at, "SKZ1", 4) != 0) return 0;
    size = sk_load64(frames + at + 8);
    if (size % 8 != 0 || size > left || size < (is_block ? SK_BLOCK_HEADER : FRAME_SKZ1_MIN))
        return 0;
    return size;
}

/* Checks all frames before the first is changed, so that a bad row stays as it was. */
static int check_row(const uint8_t *frames, size_t len) {
    for (size_t at = 0; at < len;) {
        uint64_t size = frame_size(frames, len, at);
        if (size == 0) return bad_frame("bad magic or size", at);
        at += size;
    }
    return SK_OK;
}

static uint32_t plain_checksum(const uint8_t *frame, uint64_t size) {
    return sk_crc32c(frame + 8, size - 8, 0);
}

int sk_frames_bind(uint8_t *frames, size_t len, const uint8_t *id, uint64_t offset) {
    int status = SK_FAILPOINT(FRAMES_BIND);
    if (status == SK_OK) status = check_row(frames, len);
    if (status != SK_OK) return status;
    for (size_t at = 0; at < len; at += sk_load64(frames + at + 8))
        sk_store32(frames + at + 4, sk_load32(frames + at + 4) ^ mix(id, offset + at));
    return SK_OK;
}

int sk_frames_verify(const uint8_t *frames, size_t len, const uint8_t *id, uint64_t offset,
                     uint64_t *bad) {
    *bad = 0;
    int status = SK_FAILPOINT(FRAMES_VERIFY);
    if (status != SK_OK) return status;
    for (size_t at = 0; at < len;) {
        uint64_t size = frame_size(frames, len, at);
        *bad = at;
        if (size == 0) return bad_frame("bad magic or size", at);
        uint32_t checksum = plain_checksum(frames + at, size) ^ mix(id, offset + at);
        if (checksum != sk_load32(frames + at + 4))
            return bad_frame("checksum that does not fit", at);
        at += size;
    }
    *bad = len;
    return SK_OK;
}

int64_t sk_frames_digest(const uint8_t *frames, size_t len, sk_buf *buf) {
    size_t start = buf->len;
    int status = SK_FAILPOINT(FRAMES_DIGEST);
    if (status == SK_OK) status = check_row(frames, len);
    for (size_t at = 0; at < len && status == SK_OK; at += sk_load64(frames + at + 8)) {
        uint8_t item[12];
        memcpy(item, frames + at + 8, 8);
        memcpy(item + 8, frames + at + 4, 4);
        status = sk_buf_put(buf, item, sizeof item);
    }
    if (status == SK_OK) return (int64_t)(buf->len - start);
    buf->len = start;
    return -status;
}

int sk_frames_seal(uint8_t *frames, size_t len) {
    int status = SK_FAILPOINT(FRAMES_SEAL);
    if (status == SK_OK) status = check_row(frames, len);
    if (status != SK_OK) return status;
    for (size_t at = 0; at < len;) {
        uint64_t size = sk_load64(frames + at + 8);
        if (sk_load32(frames + at + 4) == 0)
            sk_store32(frames + at + 4, plain_checksum(frames + at, size));
        at += size;
    }
    return SK_OK;
}
