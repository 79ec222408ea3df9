/*
 * msgpack.c: see msgpack.h.
 *
 * A `lead` holds everything that a lead byte says: what the value is, how wide a length or count
 * follows, and how long the head is. For the bytes 0xc0 to 0xdf it comes from a table; the others
 * carry their size in their low bits.
 *
 *   0x00..0x7f  positive fixint     0xc0  nil       0xca 0xcb  float 32, 64
 *   0x80..0x8f  map, count          0xc1  reserved  0xcc..0xcf uint 8..64
 *   0x90..0x9f  array, count        0xc2  false     0xd0..0xd3 int 8..64
 *   0xa0..0xbf  str, bytes          0xc3  true      0xd4..0xd8 ext of 1, 2, 4, 8, 16 bytes
 *   0xe0..0xff  negative fixint     0xc4..6 bin     0xd9..0xdb str  8, 16, 32
 *                                   0xc7..9 ext     0xdc 0xdd array 16, 32; 0xde 0xdf map 16, 32
 */
#include "msgpack.h"

#include "alloc.h"
#include "hash.h"

#include <assert.h>
#include <string.h>

#define TYPE_RESERVED 3

typedef struct lead {
    uint8_t type;  /* sk_mp_type or TYPE_RESERVED */
    uint8_t width; /* bytes of the length or count after the lead byte */
    uint8_t head;  /* bytes of the head; an ext's type byte belongs to it */
    uint8_t size;  /* width 0: body bytes, or elements */
} lead;

static const lead leads[32] = {
    {SK_MP_SCALAR, 0, 1, 0},  {TYPE_RESERVED, 0, 1, 0}, {SK_MP_SCALAR, 0, 1, 0},
    {SK_MP_SCALAR, 0, 1, 0},  {SK_MP_SCALAR, 1, 2, 0},  {SK_MP_SCALAR, 2, 3, 0},
    {SK_MP_SCALAR, 4, 5, 0},  {SK_MP_SCALAR, 1, 3, 0},  {SK_MP_SCALAR, 2, 4, 0},
    {SK_MP_SCALAR, 4, 6, 0},  {SK_MP_SCALAR, 0, 1, 4},  {SK_MP_SCALAR, 0, 1, 8},
    {SK_MP_SCALAR, 0, 1, 1},  {SK_MP_SCALAR, 0, 1, 2},  {SK_MP_SCALAR, 0, 1, 4},
    {SK_MP_SCALAR, 0, 1, 8},  {SK_MP_SCALAR, 0, 1, 1},  {SK_MP_SCALAR, 0, 1, 2},
    {SK_MP_SCALAR, 0, 1, 4},  {SK_MP_SCALAR, 0, 1, 8},  {SK_MP_SCALAR, 0, 2, 1},
    {SK_MP_SCALAR, 0, 2, 2},  {SK_MP_SCALAR, 0, 2, 4},  {SK_MP_SCALAR, 0, 2, 8},
    {SK_MP_SCALAR, 0, 2, 16}, {SK_MP_SCALAR, 1, 2, 0},  {SK_MP_SCALAR, 2, 3, 0},
    {SK_MP_SCALAR, 4, 5, 0},  {SK_MP_ARRAY, 2, 3, 0},   {SK_MP_ARRAY, 4, 5, 0},
    {SK_MP_MAP, 2, 3, 0},     {SK_MP_MAP, 4, 5, 0},
};

static inline lead lead_of(uint8_t b) {
    if (b < 0x80 || b >= 0xe0) return (lead){SK_MP_SCALAR, 0, 1, 0};
    if (b >= 0xc0) return leads[b - 0xc0];
    if (b >= 0xa0) return (lead){SK_MP_SCALAR, 0, 1, b & 31};
    if (b >= 0x90) return (lead){SK_MP_ARRAY, 0, 1, b & 15};
    return (lead){SK_MP_MAP, 0, 1, b & 15};
}

static inline uint64_t load_be(const uint8_t *p, unsigned width) {
    uint64_t v = 0;
    for (unsigned k = 0; k < width; k++) v = v << 8 | p[k];
    return v;
}

static inline void store_be(uint8_t *p, uint64_t v, unsigned width) {
    for (unsigned k = 0; k < width; k++) p[k] = (uint8_t)(v >> 8 * (width - 1 - k));
}

/* ---- Heads --------------------------------------------------------------- */

static inline sk_mp_head head_from(lead l, const uint8_t *p) {
    uint64_t size = l.width == 0 ? l.size : load_be(p + 1, l.width);
    sk_mp_head head = {.type = (sk_mp_type)l.type, .head_len = l.head};
    if (l.type == SK_MP_SCALAR)
        head.body_len = size;
    else
        head.count = (uint32_t)size;
    return head;
}

sk_mp_head sk_mp_head_of(const uint8_t *p) { return head_from(lead_of(*p), p); }

/* NULL, or what is wrong. No reason is set: only the caller knows the offset. */
static inline const char *head_read(const uint8_t *p, size_t len, sk_mp_head *head) {
    if (len == 0) return "a value is missing";
    lead l = lead_of(*p);
    if (l.type == TYPE_RESERVED) return "0xc1 is no MessagePack";
    if (len < l.head) return "the head is cut short";
    *head = head_from(l, p);
    uint64_t rest = len - l.head; /* each element has at least one byte */
    uint64_t least = head->body_len + ((uint64_t)head->count << (head->type == SK_MP_MAP));
    return least <= rest ? NULL : "fewer bytes are left than it announces";
}

int sk_mp_read_head(const uint8_t *p, size_t len, sk_mp_head *head) {
    const char *wrong = head_read(p, len, head);
    if (wrong == NULL) return SK_OK;
    return sk_fail(SK_BAD_VALUE, "MessagePack head: %s (%zu bytes left)", wrong, len);
}

const uint8_t *sk_mp_next_n(const uint8_t *p, uint64_t n) {
    for (; n > 0; n--) {
        uint8_t b = *p;
        if (b < 0x80 || b >= 0xe0) {
            p++;
            continue;
        }
        sk_mp_head head = head_from(lead_of(b), p);
        p += head.head_len + head.body_len;
        n += (uint64_t)head.count << (head.type == SK_MP_MAP);
    }
    return p;
}

/* ---- Map keys ------------------------------------------------------------ */

static bool scalar_is_shortest(const uint8_t *p, const sk_mp_head *head) {
    uint64_t size = head->body_len;
    uint64_t v = size <= 8 ? load_be(p + head->head_len, (unsigned)size) : 0; /* of an int */
    switch (*p) {
    case 0xc5: /* bin, ext, str with a length that a narrower field could not hold */
    case 0xc8:
    case 0xda:
        return size > 0xff;
    case 0xc6:
    case 0xc9:
    case 0xdb:
        return size > 0xffff;
    case 0xc7:
        return size != 1 && size != 2 && size != 4 && size != 8 && size != 16;
    case 0xd9:
        return size > 31;
    case 0xca:
        return false; /* floats have 64 bits, so that each number has one form */
    case 0xcc:
        return v > 0x7f;
    case 0xcd:
        return v > 0xff;
    case 0xce:
        return v > 0xffff;
    case 0xcf:
        return v > 0xffffffff;
    case 0xd0:
        return (int8_t)v < -32;
    case 0xd1:
        return (int16_t)v < INT8_MIN;
    case 0xd2:
        return (int32_t)v < INT16_MIN;
    case 0xd3:
        return (int64_t)v < INT32_MIN;
    default:
        return true;
    }
}

/* Bytes of the key at p, or 0 if there is none in shortest form. */
static size_t key_len(const uint8_t *p, size_t len) {
    sk_mp_head head;
    if (head_read(p, len, &head) != NULL || head.type == SK_MP_MAP) return 0;
    if (head.type == SK_MP_SCALAR)
        return scalar_is_shortest(p, &head) ? head.head_len + (size_t)head.body_len : 0;
    if (head.head_len != sk_mp_head_len(head.count)) return 0;
    size_t at = head.head_len;
    for (uint32_t left = head.count; left > 0; left--) {
        sk_mp_head part;
        if (head_read(p + at, len - at, &part) != NULL) return 0;
        if (part.type != SK_MP_SCALAR || !scalar_is_shortest(p + at, &part)) return 0;
        at += part.head_len + (size_t)part.body_len;
    }
    return at;
}

bool sk_mp_is_key(const uint8_t *p, size_t len) { return len > 0 && key_len(p, len) == len; }

/* For few pairs: a table of 8-bit numbers on the stack. Its hash needs no secret, since the worst
 * that crafted keys can cause is SK_MP_SMALL_PAIRS^2 comparisons. */
static bool small_map_repeats(const uint8_t *p, uint32_t pairs, const uint8_t *end) {
    struct {
        const uint8_t *p;
        size_t len;
    } keys[SK_MP_SMALL_PAIRS];
    uint8_t table[2 * SK_MP_SMALL_PAIRS] = {0};
    const unsigned mask = 2 * SK_MP_SMALL_PAIRS - 1;
    for (uint32_t k = 0; k < pairs; k++) {
        const uint8_t *value = sk_mp_next(p);
        size_t len = (size_t)(value - p);
        unsigned at = (unsigned)sk_xxh64(p, len, 0) & mask;
        for (; table[at] != 0; at = (at + 1) & mask) {
            unsigned other = table[at] - 1u;
            if (keys[other].len == len && memcmp(keys[other].p, p, len) == 0) return true;
        }
        table[at] = (uint8_t)(k + 1);
        keys[k].p = p;
        keys[k].len = len;
        p = sk_mp_next(value);
    }
    assert(p == end);
    (void)end;
    return false;
}

/* For many pairs: a table of offsets on the heap, with the secret hash. 1: a key repeats, 0: none
 * does. */
static int large_map_repeats(const uint8_t *first, uint32_t pairs) {
    size_t slots = 256;
    while (slots < 2 * (size_t)pairs) slots *= 2;
    uint64_t *table = sk_raw_zalloc(slots * sizeof *table);
    if (table == NULL) return -SK_NO_MEMORY;
    int repeats = 0;
    const uint8_t *p = first;
    for (uint32_t k = 0; k < pairs && !repeats; k++) {
        const uint8_t *value = sk_mp_next(p);
        size_t len = (size_t)(value - p);
        size_t at = (size_t)sk_secret_hash(p, len) & (slots - 1);
        for (; table[at] != 0 && !repeats; at = (at + 1) & (slots - 1)) {
            /* No MessagePack value is a prefix of another, so the other key's length need not be
             * known: if it starts with this key, it is this key. Both keys have at least len bytes
             * before the end of the value, so memcmp stays inside. */
            repeats = memcmp(first + (table[at] - 1), p, len) == 0;
        }
        if (!repeats) table[at] = (uint64_t)(p - first) + 1;
        p = sk_mp_next(value);
    }
    sk_raw_free(table);
    return repeats;
}

static int map_repeats(const uint8_t *map, const uint8_t *end, bool with_large) {
    sk_mp_head head = sk_mp_head_of(map);
    const uint8_t *first = map + head.head_len;
    if (head.count < 2) return 0;
    if (head.count <= SK_MP_SMALL_PAIRS) return small_map_repeats(first, head.count, end);
    return with_large ? large_map_repeats(first, head.count) : 0;
}

/* ---- Walking whole values ------------------------------------------------- */

typedef enum walk_mode { WALK_SKIP, WALK_CHECK_SMALL, WALK_CHECK } walk_mode;

/* A container that the walk is in. */
typedef struct frame {
    uint64_t left;  /* values still to come; in a map, if this is even, a key is next */
    uint32_t start; /* its offset; values are at most SK_VALUE_BYTES_MAX long */
    bool is_map;
} frame;

static int64_t walk_key(const uint8_t *p, size_t len, size_t at, unsigned depth,
                        unsigned depth_max) {
    size_t n = key_len(p + at, len - at);
    if (n == 0)
        return -sk_fail(SK_BAD_VALUE,
                        "byte %zu: a map key must be a scalar or an array of scalars, in its "
                        "shortest form; found 0x%02x",
                        at, at < len ? p[at] : 0);
    bool is_array = lead_of(p[at]).type == SK_MP_ARRAY;
    if (is_array && depth >= depth_max)
        return -sk_fail(SK_TOO_DEEP, "byte %zu: nested more than %u deep", at, depth_max);
    return (int64_t)n;
}

/* Leaves the containers that are finished. A negated status if one of them is a bad map. */
static int64_t walk_out(const uint8_t *p, size_t at, frame *frames, unsigned *depth,
                        walk_mode mode) {
    while (*depth > 0 && frames[*depth - 1].left == 0) {
        frame *f = &frames[--*depth];
        if (!f->is_map || mode == WALK_SKIP) continue;
        int repeats = map_repeats(p + f->start, p + at, mode == WALK_CHECK);
        if (repeats < 0) return repeats;
        if (repeats > 0)
            return -sk_fail(SK_BAD_VALUE, "the map at byte %u has the same key twice", f->start);
    }
    return SK_OK;
}

static int64_t walk(const uint8_t *p, size_t len, unsigned depth_max, walk_mode mode) {
    frame frames[SK_DEPTH_MAX];
    unsigned depth = 0;
    size_t at = 0;
    if (len == 0) return -sk_fail(SK_BAD_VALUE, "no bytes where a value should be"); /* p NULL? */
    if (depth_max > SK_DEPTH_MAX) depth_max = SK_DEPTH_MAX;
    do {
        frame *f = depth > 0 ? &frames[depth - 1] : NULL;
        if (mode != WALK_SKIP && f != NULL && f->is_map && f->left % 2 == 0) {
            int64_t n = walk_key(p, len, at, depth, depth_max);
            if (n < 0) return n;
            at += (size_t)n;
            f->left--; /* never the last: the value is still to come */
            continue;
        }
        sk_mp_head head;
        const char *wrong = head_read(p + at, len - at, &head);
        if (wrong != NULL) return -sk_fail(SK_BAD_VALUE, "MessagePack byte %zu: %s", at, wrong);
        if (f != NULL) f->left--;
        if (head.type != SK_MP_SCALAR) {
            if (depth >= depth_max)
                return -sk_fail(SK_TOO_DEEP, "byte %zu: nested more than %u deep", at, depth_max);
            bool is_map = head.type == SK_MP_MAP;
            frames[depth++] = (frame){(uint64_t)head.count << is_map, (uint32_t)at, is_map};
        }
        at += head.head_len + (size_t)head.body_len;
        if (at > SK_VALUE_BYTES_MAX)
            return -sk_fail(SK_TOO_LARGE, "a value of more than %u bytes", SK_VALUE_BYTES_MAX);
        int64_t status = walk_out(p, at, frames, &depth, mode);
        if (status < 0) return status;
    } while (depth > 0);
    return (int64_t)at;
}

int64_t sk_mp_skip(const uint8_t *p, size_t len, unsigned depth_max) {
    return walk(p, len, depth_max, WALK_SKIP);
}

int64_t sk_mp_check(const uint8_t *p, size_t len, unsigned depth_max) {
    return walk(p, len, depth_max, WALK_CHECK);
}

int64_t sk_mp_check_small(const uint8_t *p, size_t len, unsigned depth_max) {
    return walk(p, len, depth_max, WALK_CHECK_SMALL);
}

/* ---- Integers and writers -------------------------------------------------- */

int sk_mp_read_int(const uint8_t *p, size_t len, int64_t *value) {
    sk_mp_head head;
    if (head_read(p, len, &head) != NULL)
        return sk_fail(SK_BAD_PATH, "expected an integer, found broken MessagePack");
    uint8_t b = *p;
    uint64_t v = head.body_len <= 8 ? load_be(p + head.head_len, (unsigned)head.body_len) : 0;
    if (b < 0x80 || b >= 0xe0)
        *value = (int8_t)b;
    else if (b == 0xcf && v > INT64_MAX)
        return sk_fail(SK_BAD_PATH, "%llu does not fit 64 bits signed", (unsigned long long)v);
    else if (b >= 0xcc && b <= 0xcf)
        *value = (int64_t)v;
    else if (b == 0xd0)
        *value = (int8_t)v;
    else if (b == 0xd1)
        *value = (int16_t)v;
    else if (b == 0xd2)
        *value = (int32_t)v;
    else if (b == 0xd3)
        *value = (int64_t)v;
    else
        return sk_fail(SK_BAD_PATH, "expected an integer, found MessagePack byte 0x%02x", b);
    return SK_OK;
}

static size_t write_sized(uint8_t *p, uint8_t lead_byte, uint64_t size, unsigned width) {
    *p = lead_byte;
    store_be(p + 1, size, width);
    return 1 + width;
}

size_t sk_mp_write_array(uint8_t *p, uint32_t count) {
    if (count < 16) return write_sized(p, (uint8_t)(0x90 | count), 0, 0);
    return count < 65536 ? write_sized(p, 0xdc, count, 2) : write_sized(p, 0xdd, count, 4);
}

size_t sk_mp_write_map(uint8_t *p, uint32_t count) {
    if (count < 16) return write_sized(p, (uint8_t)(0x80 | count), 0, 0);
    return count < 65536 ? write_sized(p, 0xde, count, 2) : write_sized(p, 0xdf, count, 4);
}

size_t sk_mp_write_str(uint8_t *p, uint32_t len) {
    if (len < 32) return write_sized(p, (uint8_t)(0xa0 | len), 0, 0);
    if (len < 256) return write_sized(p, 0xd9, len, 1);
    return len < 65536 ? write_sized(p, 0xda, len, 2) : write_sized(p, 0xdb, len, 4);
}

size_t sk_mp_write_bin(uint8_t *p, uint32_t len) {
    if (len < 256) return write_sized(p, 0xc4, len, 1);
    return len < 65536 ? write_sized(p, 0xc5, len, 2) : write_sized(p, 0xc6, len, 4);
}

size_t sk_mp_write_int(uint8_t *p, int64_t value) {
    uint64_t v = (uint64_t)value;
    if (value >= -32 && value < 128) return write_sized(p, (uint8_t)v, 0, 0);
    if (value >= 0) {
        if (v <= UINT8_MAX) return write_sized(p, 0xcc, v, 1);
        if (v <= UINT16_MAX) return write_sized(p, 0xcd, v, 2);
        return v <= UINT32_MAX ? write_sized(p, 0xce, v, 4) : write_sized(p, 0xcf, v, 8);
    }
    if (value >= INT8_MIN) return write_sized(p, 0xd0, v, 1);
    if (value >= INT16_MIN) return write_sized(p, 0xd1, v, 2);
    return value >= INT32_MIN ? write_sized(p, 0xd2, v, 4) : write_sized(p, 0xd3, v, 8);
}

size_t sk_mp_write_f64(uint8_t *p, double value) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    return write_sized(p, 0xcb, bits, 8);
}
