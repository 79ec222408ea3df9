/*
 * unpack.c: encoded values as columns, in one pass and without an object per value.
 *
 * A type is a tree of nodes in preorder: a node, then all that is below it, until `stop`. Every
 * node gathers one column in the buffers that Arrow wants: for each of its rows a byte that says
 * whether it is null, and by its op
 *
 *   op                 MessagePack                      offsets      data
 *   SK_UNPACK_NIL      nil                              -            -
 *   SK_UNPACK_BOOL     bool                             -            a byte per row
 *   SK_UNPACK_INT      integers                         -            int64_t per row
 *   SK_UNPACK_FLOAT    floats, and integers             -            double per row
 *   SK_UNPACK_STR      str                              int32_t      the bytes
 *   SK_UNPACK_BIN      bin                              int32_t      the bytes
 *   SK_UNPACK_MOMENT   timestamp (ext -1)               -            int64_t per row, in us
 *   SK_UNPACK_RAW      anything                         int32_t      its MessagePack
 *   SK_UNPACK_LIST     array; below: the element        int32_t      -
 *   SK_UNPACK_MAP      map; below: key, then value      int32_t      -
 *   SK_UNPACK_ARRAY    array; below: its items          -            -
 *   SK_UNPACK_RECORD   map; below: its named fields     -            -
 *
 * The columns below a list have as many rows as all its lists have elements; those below an array
 * or a record have a row for each of its rows, null where it is null. That is how Arrow nests.
 *
 * Whatever is not of its type is SK_BAD_VALUE, and the buffers are then of no use: the caller reads
 * these values in another way, which can say what is wrong. Nothing here trusts its input: offsets
 * and lengths are checked, and the depth of the recursion is that of the type, not of the value.
 */
#include "alloc.h"
#include "msgpack.h"

#include <string.h>

typedef struct span {
    const uint8_t *at, *end;
} span;

static int put(sk_buf *buf, const void *data, size_t n) {
    if (n > buf->cap - buf->len && sk_buf_reserve(buf, n) != SK_OK) return SK_NO_MEMORY;
    if (n > 0) memcpy(buf->data + buf->len, data, n);
    buf->len += n;
    return SK_OK;
}

/* Notes one more row; the caller has put, or will put, what belongs to it. */
static int add_row(sk_unpack_node *node, bool is_valid) {
    uint8_t byte = is_valid;
    node->rows++;
    node->nulls += !is_valid;
    return put(&node->valid, &byte, 1);
}

static int put_offset(sk_unpack_node *node, uint64_t offset) {
    if (offset > INT32_MAX) return sk_fail(SK_TOO_LARGE, "a column has more than 2^31 bytes");
    int32_t narrow = (int32_t)offset;
    return put(&node->offsets, &narrow, sizeof narrow);
}

static int put_bytes(sk_unpack_node *node, const uint8_t *data, size_t n) {
    int status = put(&node->data, data, n);
    return status == SK_OK ? put_offset(node, node->data.len) : status;
}

static int bad(const sk_unpack_node *node, const span *in) {
    return sk_fail(SK_BAD_VALUE, "MessagePack byte 0x%02x where op %d was expected",
                   in->at < in->end ? *in->at : 0xc1, node->op);
}

static int put_null(sk_unpack_node *nodes, uint32_t at) {
    static const uint8_t zeros[8];
    sk_unpack_node *node = &nodes[at];
    int status = add_row(node, false);
    if (status != SK_OK) return status;
    switch (node->op) {
    case SK_UNPACK_BOOL:
        return put(&node->data, zeros, 1);
    case SK_UNPACK_INT:
    case SK_UNPACK_FLOAT:
    case SK_UNPACK_MOMENT:
        return put(&node->data, zeros, 8);
    case SK_UNPACK_STR:
    case SK_UNPACK_BIN:
    case SK_UNPACK_RAW:
        return put_offset(node, node->data.len);
    case SK_UNPACK_LIST:
    case SK_UNPACK_MAP:
        return put_offset(node, nodes[at + 1].rows);
    case SK_UNPACK_ARRAY:
    case SK_UNPACK_RECORD:
        for (uint32_t below = at + 1; below < node->stop; below = nodes[below].stop) {
            status = put_null(nodes, below);
            if (status != SK_OK) return status;
        }
        return SK_OK;
    default:
        return SK_OK;
    }
}

/* Microseconds since 1970 of a timestamp's body: 4 bytes (seconds), 8 (30 bits of nanoseconds, 34
 * of seconds) or 12 (4 of nanoseconds, 8 of seconds). */
static bool moment_of(const uint8_t *p, uint64_t len, int64_t *us) {
    uint64_t words[2] = {0};
    int64_t seconds, nanoseconds;
    for (uint64_t i = 0; i < len && len <= 12; i++) {
        uint64_t *word = &words[len == 12 && i >= 4];
        *word = *word << 8 | p[i];
    }
    if (len == 4) {
        seconds = (int64_t)words[0], nanoseconds = 0;
    } else if (len == 8) {
        seconds = (int64_t)(words[0] & ((1ull << 34) - 1)), nanoseconds = (int64_t)(words[0] >> 34);
    } else if (len == 12) {
        seconds = (int64_t)words[1], nanoseconds = (int64_t)words[0];
    } else {
        return false;
    }
    return nanoseconds < 1000000000 && !__builtin_mul_overflow(seconds, 1000000, us) &&
           !__builtin_add_overflow(*us, nanoseconds / 1000, us);
}

static int take(sk_unpack_node *nodes, uint32_t at, span *in);

static int take_scalar(sk_unpack_node *node, span *in, const sk_mp_head *head) {
    const uint8_t lead = *in->at, *body = in->at + head->head_len;
    size_t len = head->head_len + head->body_len;
    int64_t number = 0;
    double real = 0;
    uint8_t truth = lead == 0xc3;
    int status = SK_OK;
    switch (node->op) {
    case SK_UNPACK_NIL:
        if (lead != 0xc0) return bad(node, in);
        break;
    case SK_UNPACK_BOOL:
        if (lead != 0xc2 && lead != 0xc3) return bad(node, in);
        status = put(&node->data, &truth, 1);
        break;
    case SK_UNPACK_INT:
        if (sk_mp_read_int(in->at, len, &number) != SK_OK) return bad(node, in);
        status = put(&node->data, &number, 8);
        break;
    case SK_UNPACK_FLOAT:
        if (lead == 0xcb) {
            uint64_t bits = 0;
            for (unsigned i = 0; i < 8; i++) bits = bits << 8 | body[i];
            memcpy(&real, &bits, 8);
        } else if (sk_mp_read_int(in->at, len, &number) == SK_OK) {
            real = (double)number; /* it was stored before the type became float */
        } else {
            return bad(node, in); /* 32-bit floats too: the library writes none */
        }
        status = put(&node->data, &real, 8);
        break;
    case SK_UNPACK_MOMENT:
        if (lead < 0xc7 || (lead > 0xc9 && lead < 0xd4) || lead > 0xd8 || body[-1] != 0xff ||
            !moment_of(body, head->body_len, &number))
            return bad(node, in);
        status = put(&node->data, &number, 8);
        break;
    case SK_UNPACK_STR:
        if ((lead & 0xe0) != 0xa0 && (lead < 0xd9 || lead > 0xdb)) return bad(node, in);
        status = put_bytes(node, body, head->body_len);
        break;
    case SK_UNPACK_BIN:
        if (lead < 0xc4 || lead > 0xc6) return bad(node, in);
        status = put_bytes(node, body, head->body_len);
        break;
    default:
        return bad(node, in);
    }
    in->at += len;
    return status == SK_OK ? add_row(node, node->op != SK_UNPACK_NIL) : status;
}

static int take_elements(sk_unpack_node *nodes, uint32_t at, span *in, uint32_t count) {
    sk_unpack_node *node = &nodes[at];
    uint32_t value = nodes[at + 1].stop; /* of a map: the node after its key's */
    for (uint32_t i = 0; i < count; i++) {
        int status = take(nodes, at + 1, in);
        if (status == SK_OK && node->op == SK_UNPACK_MAP) status = take(nodes, value, in);
        if (status != SK_OK) return status;
    }
    int status = put_offset(node, nodes[at + 1].rows);
    return status == SK_OK ? add_row(node, true) : status;
}

static int skip_one(span *in) {
    int64_t size = sk_mp_skip(in->at, (size_t)(in->end - in->at), SK_DEPTH_MAX);
    if (size < 0) return (int)-size;
    in->at += size;
    return SK_OK;
}

static int take_items(sk_unpack_node *nodes, uint32_t at, span *in, uint32_t count) {
    sk_unpack_node *node = &nodes[at];
    uint32_t below = at + 1, i = 0;
    if (count < node->least || count > node->most) return bad(node, in);
    for (; below < node->stop; below = nodes[below].stop, i++) {
        int status = i < count ? take(nodes, below, in) : put_null(nodes, below);
        if (status != SK_OK) return status;
    }
    for (; i < count; i++) { /* fields that the type does not have any more */
        int status = skip_one(in);
        if (status != SK_OK) return status;
    }
    return add_row(node, true);
}

static int take_fields(sk_unpack_node *nodes, uint32_t at, span *in, uint32_t count) {
    sk_unpack_node *node = &nodes[at];
    uint64_t rows = node->rows; /* a field with more rows has been given its value */
    uint32_t next = at + 1;
    for (uint32_t i = 0; i < count; i++) {
        sk_mp_head head;
        int status = sk_mp_read_head(in->at, (size_t)(in->end - in->at), &head);
        if (status != SK_OK) return status;
        if ((*in->at & 0xe0) != 0xa0 && (*in->at < 0xd9 || *in->at > 0xdb)) return bad(node, in);
        const uint8_t *name = in->at + head.head_len;
        in->at = name + head.body_len;
        /* Fields come in the order of the type, unless the type has changed. So the search begins
         * where the last one ended, and goes round. */
        uint32_t field = next < node->stop ? next : at + 1, first = field;
        bool is_known = false;
        do {
            is_known = field < node->stop && nodes[field].name_len == head.body_len &&
                       memcmp(nodes[field].name, name, head.body_len) == 0;
            if (is_known) break;
            field = field < node->stop ? nodes[field].stop : at + 1;
            if (field >= node->stop) field = at + 1;
        } while (field != first);
        if (!is_known) {
            status = skip_one(in);
        } else {
            if (nodes[field].rows != rows) return bad(node, in); /* twice */
            status = take(nodes, field, in);
            next = nodes[field].stop;
        }
        if (status != SK_OK) return status;
    }
    for (uint32_t field = at + 1; field < node->stop; field = nodes[field].stop) {
        if (nodes[field].rows != rows) continue;
        if (nodes[field].is_required) return bad(node, in);
        int status = put_null(nodes, field);
        if (status != SK_OK) return status;
    }
    return add_row(node, true);
}

static int take(sk_unpack_node *nodes, uint32_t at, span *in) {
    sk_unpack_node *node = &nodes[at];
    size_t left = (size_t)(in->end - in->at);
    if (node->op == SK_UNPACK_RAW) {
        int64_t size = sk_mp_skip(in->at, left, SK_DEPTH_MAX);
        if (size < 0) return (int)-size;
        int status = put_bytes(node, in->at, (size_t)size);
        in->at += size;
        return status == SK_OK ? add_row(node, true) : status;
    }
    sk_mp_head head;
    int status = sk_mp_read_head(in->at, left, &head);
    if (status != SK_OK) return status;
    if (*in->at == 0xc0 && node->is_optional) {
        in->at++;
        return put_null(nodes, at);
    }
    sk_mp_type wanted = SK_MP_SCALAR;
    if (node->op == SK_UNPACK_LIST || node->op == SK_UNPACK_ARRAY) wanted = SK_MP_ARRAY;
    if (node->op == SK_UNPACK_MAP || node->op == SK_UNPACK_RECORD) wanted = SK_MP_MAP;
    if (head.type != wanted) return bad(node, in);
    if (wanted == SK_MP_SCALAR) return take_scalar(node, in, &head);
    in->at += head.head_len;
    switch (node->op) {
    case SK_UNPACK_ARRAY:
        return take_items(nodes, at, in, head.count);
    case SK_UNPACK_RECORD:
        return take_fields(nodes, at, in, head.count);
    default:
        return take_elements(nodes, at, in, head.count);
    }
}

/* ---- Rows ---- */

static uint64_t offset_at(const sk_column *column, int64_t r) {
    uint64_t wide;
    uint32_t narrow;
    const uint8_t *offsets = column->offsets;
    if (column->type == SK_COL_VAR32) {
        memcpy(&narrow, offsets + 4 * r, 4);
        return narrow;
    }
    memcpy(&wide, offsets + 8 * r, 8);
    return wide;
}

/* Item r of a column with offsets; false if they are not valid. */
static bool item(const sk_column *column, int64_t r, span *in) {
    uint64_t from = offset_at(column, r), to = offset_at(column, r + 1);
    if (from > to || to > (uint64_t)column->data_len) return false;
    in->at = (const uint8_t *)column->data + from;
    in->end = (const uint8_t *)column->data + to;
    return true;
}

int sk_unpack(sk_unpack_node *nodes, const sk_column *values, int64_t from, int64_t to,
              const uint8_t *skip) {
    for (int64_t r = from; r < to; r++) {
        span in;
        if (skip != NULL && skip[r]) continue;
        if (!item(values, r, &in)) return CORRUPT("value offsets fall at", (uint64_t)r);
        int status = take(nodes, 0, &in);
        if (status != SK_OK) return status;
        if (in.at != in.end) return sk_fail(SK_BAD_VALUE, "bytes after a value");
    }
    return SK_OK;
}

static int take_part(sk_unpack_node *node, span *in, bool is_bare) {
    size_t left = (size_t)(in->end - in->at), len = left;
    if (node->op == SK_UNPACK_INT) {
        len = 8;
    } else if (!is_bare) {
        if (left < 4) return CORRUPT("a key is too short: bytes", left);
        const uint8_t *p = in->at;
        len = (size_t)p[0] | (size_t)p[1] << 8 | (size_t)p[2] << 16 | (size_t)p[3] << 24;
        in->at += 4, left -= 4;
    }
    if (len > left) return CORRUPT("a key is too short: bytes", left);
    int status =
        node->op == SK_UNPACK_INT ? put(&node->data, in->at, 8) : put_bytes(node, in->at, len);
    in->at += len;
    return status == SK_OK ? add_row(node, true) : status;
}

int sk_unpack_keys(sk_unpack_node *parts, uint32_t count, int is_tuple, const sk_column *keys,
                   int64_t from, int64_t to, const uint8_t *skip) {
    for (int64_t r = from; r < to; r++) {
        span in;
        if (skip != NULL && skip[r]) continue;
        if (!item(keys, r, &in)) return CORRUPT("key offsets fall at", (uint64_t)r);
        for (uint32_t i = 0; i < count; i++) {
            int status = take_part(&parts[i], &in, !is_tuple);
            if (status != SK_OK) return status;
        }
        if (in.at != in.end) return CORRUPT("a key is too long: bytes", (uint64_t)(in.end - in.at));
    }
    return SK_OK;
}
