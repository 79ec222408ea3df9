/*
 * node_model.h: what csrc/node.c should do, written as plainly as possible.
 *
 * A value is a tree of malloc'd nodes with plain arrays. A write copies the whole tree, changes the
 * copy, and keeps the copy if the change succeeded. The model shares no code with the library: it
 * has its own reader of MessagePack, its own writer of heads, and its own rules for paths.
 */
#ifndef SK_NODE_MODEL_H
#define SK_NODE_MODEL_H

#include "statekit.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

typedef struct bytes {
    uint8_t *p;
    size_t len, cap;
} bytes;

static inline void bytes_add(bytes *b, const void *p, size_t len) {
    if (b->p == NULL || b->len + len > b->cap) {
        b->cap = 2 * (b->len + len) + 16;
        b->p = realloc(b->p, b->cap);
    }
    if (len > 0) memcpy(b->p + b->len, p, len);
    b->len += len;
}

static inline void bytes_add_byte(bytes *b, int byte) {
    uint8_t one = (uint8_t)byte;
    bytes_add(b, &one, 1);
}

static inline void bytes_free(bytes *b) {
    free(b->p);
    *b = (bytes){0};
}

typedef struct model {
    char type;    /* 's', 'l' or 'm' */
    bytes scalar; /* its MessagePack */
    struct model **kids;
    bytes *keys; /* of a map */
    size_t count;
} model;

static inline uint64_t model_be(const uint8_t *p, int width) {
    uint64_t v = 0;
    while (width-- > 0) v = v * 256 + *p++;
    return v;
}

static inline void model_free(model *m) {
    if (m == NULL) return;
    for (size_t k = 0; k < m->count; k++) {
        model_free(m->kids[k]);
        if (m->type == 'm') bytes_free(&m->keys[k]);
    }
    free(m->kids);
    free(m->keys);
    bytes_free(&m->scalar);
    free(m);
}

static inline model *model_new(char type) {
    model *m = calloc(1, sizeof *m);
    m->type = type;
    return m;
}

/* Opens a gap at position k; the caller fills it. */
static inline void model_open(model *m, size_t k, const uint8_t *key, size_t key_len) {
    bool is_full = (m->count & (m->count - 1)) == 0; /* room is the next power of two */
    if (is_full) m->kids = realloc(m->kids, (2 * m->count + 1) * sizeof *m->kids);
    memmove(m->kids + k + 1, m->kids + k, (m->count - k) * sizeof *m->kids);
    m->kids[k] = NULL;
    if (m->type == 'm') {
        if (is_full) m->keys = realloc(m->keys, (2 * m->count + 1) * sizeof *m->keys);
        memmove(m->keys + k + 1, m->keys + k, (m->count - k) * sizeof *m->keys);
        m->keys[k] = (bytes){0};
        bytes_add(&m->keys[k], key, key_len);
    }
    m->count++;
}

static inline void model_close(model *m, size_t k) {
    model_free(m->kids[k]);
    memmove(m->kids + k, m->kids + k + 1, (m->count - k - 1) * sizeof *m->kids);
    if (m->type == 'm') {
        bytes_free(&m->keys[k]);
        memmove(m->keys + k, m->keys + k + 1, (m->count - k - 1) * sizeof *m->keys);
    }
    m->count--;
}

static inline size_t model_find(const model *m, const uint8_t *key, size_t key_len) {
    size_t k = 0;
    for (; k < m->count; k++)
        if (m->keys[k].len == key_len && memcmp(m->keys[k].p, key, key_len) == 0) break;
    return k;
}

/* Reads only good MessagePack: nil, bool, int, f64, str and containers. */
static inline model *model_decode(const uint8_t **at) {
    const uint8_t *p = *at;
    uint8_t b = *p;
    char type = 's';
    size_t n = 0, len = 1;
    if ((b & 0xf0) == 0x90) type = 'l', n = b & 15;
    if ((b & 0xf0) == 0x80) type = 'm', n = b & 15;
    if (b == 0xdc) type = 'l', n = model_be(p + 1, 2), len = 3;
    if (b == 0xdd) type = 'l', n = model_be(p + 1, 4), len = 5;
    if (b == 0xde) type = 'm', n = model_be(p + 1, 2), len = 3;
    if (b == 0xdf) type = 'm', n = model_be(p + 1, 4), len = 5;
    if ((b & 0xe0) == 0xa0) len = 1 + (b & 31);
    if (b == 0xd9) len = 2 + model_be(p + 1, 1);
    if (b == 0xda) len = 3 + model_be(p + 1, 2);
    if (b == 0xdb) len = 5 + model_be(p + 1, 4);
    if (b == 0xcc || b == 0xd0) len = 2;
    if (b == 0xcd || b == 0xd1) len = 3;
    if (b == 0xce || b == 0xd2) len = 5;
    if (b == 0xcf || b == 0xd3 || b == 0xcb) len = 9;
    *at = p + len;
    model *m = model_new(type);
    if (type == 's') bytes_add(&m->scalar, p, len);
    for (size_t k = 0; k < n; k++) {
        const uint8_t *key = *at;
        if (type == 'm') model_free(model_decode(at));
        model_open(m, k, key, (size_t)(*at - key));
        m->kids[k] = model_decode(at);
    }
    return m;
}

static inline model *model_of(const uint8_t *p) { return model_decode(&p); }

static inline void model_encode_head(char type, size_t n, bytes *out) {
    int fix = type == 'l' ? 0x90 : 0x80, wide = type == 'l' ? 0xdc : 0xde;
    if (n < 16) {
        bytes_add_byte(out, fix | (int)n);
        return;
    }
    bytes_add_byte(out, wide + (n > 65535));
    for (int shift = n > 65535 ? 24 : 8; shift >= 0; shift -= 8)
        bytes_add_byte(out, n >> shift & 255);
}

static inline void model_encode(const model *m, bytes *out) {
    if (m->type == 's') {
        bytes_add(out, m->scalar.p, m->scalar.len);
        return;
    }
    model_encode_head(m->type, m->count, out);
    for (size_t k = 0; k < m->count; k++) {
        if (m->type == 'm') bytes_add(out, m->keys[k].p, m->keys[k].len);
        model_encode(m->kids[k], out);
    }
}

static inline model *model_copy(const model *m) {
    if (m == NULL) return NULL;
    bytes encoded = {0};
    model_encode(m, &encoded);
    model *copy = model_of(encoded.p);
    bytes_free(&encoded);
    return copy;
}

/* ---- Paths and operations ------------------------------------------------------- */

static inline bool model_int(const uint8_t *p, int64_t *value) {
    uint8_t b = *p;
    if (b < 0x80 || b >= 0xe0) return *value = (int8_t)b, true;
    if (b >= 0xcc && b <= 0xcf) return *value = (int64_t)model_be(p + 1, 1 << (b - 0xcc)), true;
    if (b == 0xd0) return *value = (int8_t)model_be(p + 1, 1), true;
    if (b == 0xd1) return *value = (int16_t)model_be(p + 1, 2), true;
    if (b == 0xd2) return *value = (int32_t)model_be(p + 1, 4), true;
    if (b == 0xd3) return *value = (int64_t)model_be(p + 1, 8), true;
    return false;
}

/* The position that a step names in a container; the count if a map does not have the key. */
static inline int model_step(const model *m, const uint8_t *step, size_t len, size_t *k) {
    int64_t i;
    if (m->type == 's') return SK_BAD_PATH;
    if (m->type == 'm') {
        *k = model_find(m, step, len);
        return *k < m->count ? SK_OK : SK_MISSING;
    }
    if (!model_int(step, &i)) return SK_BAD_PATH;
    if (i < 0) i += (int64_t)m->count;
    if (i < 0 || i >= (int64_t)m->count) return SK_MISSING;
    *k = (size_t)i;
    return SK_OK;
}

static inline size_t model_clamp(int64_t i, size_t count) {
    if (i < 0) i += (int64_t)count;
    return i < 0 ? 0 : i > (int64_t)count ? count : (size_t)i;
}

static inline int model_list_op(model *m, int op, model *arg, int64_t i, int64_t j, bytes *out) {
    size_t from = m->count, to = m->count;
    if (op == SK_W_POP) {
        if (i < 0) i += (int64_t)m->count;
        if (i < 0 || i >= (int64_t)m->count) return SK_MISSING;
        from = (size_t)i, to = from + 1;
        model_encode(m->kids[from], out);
    }
    if (op == SK_W_CLEAR) from = 0;
    if (op == SK_W_INSERT) from = to = model_clamp(i, m->count);
    if (op == SK_W_SPLICE) {
        from = model_clamp(i, m->count), to = model_clamp(j, m->count);
        if (to < from) to = from;
    }
    while (to > from) model_close(m, --to);
    if (op == SK_W_APPEND || op == SK_W_INSERT) {
        model_open(m, from, NULL, 0);
        m->kids[from] = model_copy(arg);
    }
    if (op == SK_W_EXTEND || op == SK_W_SPLICE)
        for (size_t k = 0; k < arg->count; k++) {
            model_open(m, from + k, NULL, 0);
            m->kids[from + k] = model_copy(arg->kids[k]);
        }
    return SK_OK;
}

static inline void model_put(model *m, const uint8_t *key, size_t len, const model *value) {
    size_t k = model_find(m, key, len);
    if (k == m->count) model_open(m, k, key, len);
    model_free(m->kids[k]);
    m->kids[k] = model_copy(value);
}

static inline int model_op(model *m, int op, const uint8_t *name, size_t name_len, model *arg,
                           const uint8_t *key, size_t key_len, int64_t i, int64_t j, bytes *out) {
    size_t k;
    bool for_list = op >= SK_W_APPEND && op <= SK_W_SPLICE;
    if (m->type == 's') return SK_BAD_PATH;
    if (op == SK_W_SET || op == SK_W_DELETE) {
        int status = model_step(m, name, name_len, &k);
        if (op == SK_W_SET && status == SK_MISSING && m->type == 'm') {
            model_put(m, name, name_len, arg);
            return SK_OK;
        }
        if (status != SK_OK) return status;
        if (op == SK_W_DELETE) return model_close(m, k), SK_OK;
        model_free(m->kids[k]);
        m->kids[k] = model_copy(arg);
        return SK_OK;
    }
    if (op == SK_W_CLEAR) {
        while (m->count > 0) model_close(m, m->count - 1);
        return SK_OK;
    }
    if (for_list != (m->type == 'l')) return SK_BAD_PATH;
    if (for_list) return model_list_op(m, op, arg, i, j, out);
    if (op == SK_W_UPDATE) {
        for (k = 0; k < arg->count; k++)
            model_put(m, arg->keys[k].p, arg->keys[k].len, arg->kids[k]);
        return SK_OK;
    }
    k = model_find(m, key, key_len);
    if (k == m->count) return SK_MISSING;
    model_encode(m->kids[k], out);
    model_close(m, k);
    return SK_OK;
}

/* Walks (creating what shape says) and applies the operation to *m in place. */
static inline int model_edit(model **m, int op, const uint8_t *path, size_t len, const char *shape,
                             model *arg, const uint8_t *key, size_t key_len, int64_t i, int64_t j,
                             bytes *out) {
    const uint8_t *step[64], *at = path;
    size_t steps = 0, depth;
    for (const uint8_t *end = len > 0 ? path + len : path; at < end; steps++) {
        step[steps] = at;
        model_free(model_decode(&at));
    }
    step[steps] = at;
    bool named = op == SK_W_SET || op == SK_W_DELETE;
    depth = steps - named;
    bool creates = op != SK_W_DELETE && op != SK_W_POP && op != SK_W_TAKE && shape != NULL &&
                   strlen(shape) > depth;
    for (size_t level = 0;; level++) {
        if (*m == NULL && !creates) return SK_MISSING;
        if (*m == NULL) *m = model_new(shape[level]);
        if (level == depth) break;
        size_t k, step_len = (size_t)(step[level + 1] - step[level]);
        int status = model_step(*m, step[level], step_len, &k);
        if (status == SK_MISSING && (*m)->type == 'm' && creates)
            model_open(*m, k, step[level], step_len);
        else if (status != SK_OK)
            return status;
        m = &(*m)->kids[k];
    }
    const uint8_t *name = named ? step[depth] : NULL;
    return model_op(*m, op, name, named ? (size_t)(step[steps] - name) : 0, arg, key, key_len, i, j,
                    out);
}

/* All of sk_node_write, for good args and values that are not too deep. */
static inline int model_write(model **root, int op, const uint8_t *path, size_t len,
                              const char *shape, const uint8_t *arg, size_t arg_len, int64_t i,
                              int64_t j, bytes *out) {
    model *value = arg_len > 0 ? model_of(arg) : NULL;
    if (op == SK_W_SET && len == 0) {
        model_free(*root);
        *root = value;
        return SK_OK;
    }
    model *copy = model_copy(*root);
    int status = model_edit(&copy, op, path, len, shape, value, arg, arg_len, i, j, out);
    model_free(value);
    model_free(status == SK_OK ? *root : copy);
    if (status == SK_OK) *root = copy;
    return status;
}

#endif
