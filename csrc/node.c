/*
 * node.c: the functions of node.h, on top of cell.c, list.c, map.c and packed.c.
 *
 * node_private.h draws the objects and says how a write stays all-or-nothing. This file has what
 * all operations share: a path is cut into steps once, the arg is checked once, a read ends at a
 * SPOT (an indexed object, or a span of packed bytes), and a write becomes an sk_edit that sk_apply
 * carries down to the container that changes.
 */
#include "node_private.h"

#include <string.h>

/* The version of a page reader that got a packed container: it has all of it. */
#define VERSION_WHOLE UINT64_MAX

/* ---- Making ---------------------------------------------------------------------- */

static int check_value(sk_span value, unsigned depth_max) {
    if (value.len > SK_VALUE_BYTES_MAX)
        return sk_fail(SK_TOO_LARGE, "a value of %zu bytes; at most %u are allowed", value.len,
                       SK_VALUE_BYTES_MAX);
    int64_t n = sk_mp_check_small(value.p, value.len, depth_max);
    if (n < 0) return (int)-n;
    if ((size_t)n != value.len)
        return sk_fail(SK_BAD_VALUE, "%zu bytes after the value's end at byte %lld",
                       value.len - (size_t)n, (long long)n);
    return SK_OK;
}

static int check_kind(int kind, sk_mp_type root) {
    static const char *const names[] = {"a scalar", "an array", "a map"};
    if (kind == SK_NESTED) return SK_OK;
    if (kind != SK_LIST && kind != SK_MAP)
        return sk_fail(SK_BAD_KIND, "kind %d holds no containers", kind);
    sk_mp_type expected = kind == SK_LIST ? SK_MP_ARRAY : SK_MP_MAP;
    if (root == expected) return SK_OK;
    return sk_fail(SK_BAD_VALUE, "expected %s, found %s", names[expected], names[root]);
}

int sk_node_make(sk_mem *mem, int kind, const uint8_t *msgpack, size_t len, uint64_t *seq,
                 sk_obj **obj) {
    sk_span value = {msgpack, len};
    int status = check_value(value, SK_DEPTH_MAX);
    if (status == SK_OK) status = check_kind(kind, sk_mp_head_of(msgpack).type);
    return status == SK_OK ? sk_obj_make(mem, seq, value, obj) : status;
}

void sk_node_free(sk_mem *mem, sk_obj *obj) {
    if (obj != NULL) sk_obj_free(mem, obj);
}

uint64_t sk_node_size(const sk_obj *obj) { return sk_obj_size(obj); }

int sk_node_encode(const sk_obj *obj, sk_buf *buf) {
    uint64_t size = sk_obj_size(obj);
    int status = sk_buf_reserve(buf, size);
    if (status != SK_OK) return status;
    uint8_t *end = sk_obj_write(obj, buf->data + buf->len);
    assert(end == buf->data + buf->len + size);
    (void)end;
    buf->len += size;
    return SK_OK;
}

/* ---- Paths ----------------------------------------------------------------------- */

static int parse_path(const uint8_t *p, size_t len, sk_path *path) {
    path->steps = 0;
    size_t at = 0;
    while (at < len) {
        if (path->steps == SK_DEPTH_MAX)
            return sk_fail(SK_TOO_DEEP, "a path of more than %d steps", SK_DEPTH_MAX);
        int64_t n = sk_mp_skip(p + at, len - at, 1);
        if (n < 0)
            return sk_fail(SK_BAD_PATH,
                           "step %u (byte %zu of the path): neither an integer nor a map key",
                           path->steps, at);
        path->step[path->steps++] = p + at;
        at += (size_t)n;
    }
    path->step[path->steps] = len > 0 ? p + len : p; /* p may be NULL */
    return SK_OK;
}

/* From an indexed container one step down. */
static int step_down(const sk_obj *obj, sk_span step, unsigned step_number, sk_cell **child) {
    int status;
    if (obj->type == SK_OBJ_LIST) {
        const sk_list *list = (const sk_list *)obj;
        uint32_t at;
        status = sk_list_index(step, step_number, list->len, &at);
        if (status == SK_OK) *child = sk_list_at(list, at);
        return status;
    }
    status = sk_map_key(step, step_number);
    if (status != SK_OK) return status;
    *child = sk_map_find((const sk_map *)obj, step);
    return *child != NULL ? SK_OK : SK_MISSING;
}

/* Where a read ends. */
typedef struct spot {
    const sk_obj *obj; /* an indexed object; if NULL, */
    sk_span span;      /* these are the value's bytes */
    sk_mp_type type;
    uint32_t count;
} spot;

static void spot_indexed(const sk_obj *obj, spot *spot) {
    bool is_list = obj->type == SK_OBJ_LIST;
    spot->obj = obj;
    spot->type = is_list ? SK_MP_ARRAY : SK_MP_MAP;
    spot->count = is_list ? ((const sk_list *)obj)->len : ((const sk_map *)obj)->live;
}

static int walk(const sk_obj *root, const uint8_t *p, size_t len, spot *spot) {
    sk_path path;
    int status = parse_path(p, len, &path);
    if (status != SK_OK) return status;
    sk_cell top = {.obj = (sk_obj *)root}, *cell = &top; /* read only */
    top.tag = SK_CELL_OBJECT;
    unsigned k = 0;
    for (; sk_cell_is_indexed(cell); k++) {
        if (k == path.steps) {
            spot_indexed(cell->obj, spot);
            return SK_OK;
        }
        status = step_down(cell->obj, sk_path_step(&path, k), k, &cell);
        if (status != SK_OK) return status;
    }
    sk_span span = sk_cell_span(cell);
    const uint8_t *at = span.p;
    for (; k < path.steps; k++) {
        status = sk_packed_step(at, sk_path_step(&path, k), k, &at);
        if (status != SK_OK) return status;
    }
    sk_mp_head head = sk_mp_head_of(at);
    const uint8_t *end = at == span.p ? span.p + span.len : sk_mp_next(at);
    spot->obj = NULL;
    spot->span = (sk_span){at, (size_t)(end - at)};
    spot->type = head.type;
    spot->count = head.count;
    return SK_OK;
}

/* ---- Reads ----------------------------------------------------------------------- */

/* Room for an array of `count` elements of `size` bytes; writes its head. NULL: no memory. */
static uint8_t *array_start(sk_buf *buf, uint32_t count, uint64_t size) {
    if (sk_buf_reserve(buf, sk_mp_head_len(count) + size) != SK_OK) return NULL;
    uint8_t *out = buf->data + buf->len;
    return out + sk_mp_write_array(out, count);
}

static int64_t array_end(sk_buf *buf, const uint8_t *end) {
    size_t n = (size_t)(end - (buf->data + buf->len));
    buf->len += n;
    assert(buf->len <= buf->cap);
    return (int64_t)n;
}

static int64_t array_of_span(sk_buf *buf, uint32_t count, const uint8_t *from, const uint8_t *to) {
    size_t size = (size_t)(to - from);
    uint8_t *out = array_start(buf, count, size);
    if (out == NULL) return -SK_NO_MEMORY;
    memcpy(out, from, size);
    return array_end(buf, out + size);
}

static int64_t array_of_cells(const sk_list *list, uint32_t i, uint32_t j, sk_buf *buf) {
    uint64_t size = 0;
    for (uint32_t k = i; k < j; k++) size += sk_cell_size(sk_list_at(list, k));
    uint8_t *out = array_start(buf, j - i, size);
    if (out == NULL) return -SK_NO_MEMORY;
    for (uint32_t k = i; k < j; k++) out = sk_cell_write(sk_list_at(list, k), out);
    return array_end(buf, out);
}

static int64_t read_slice(const spot *spot, int64_t i, int64_t j, sk_buf *buf) {
    uint32_t from = sk_list_clamp(i, spot->count), to = sk_list_clamp(j, spot->count);
    if (to < from) to = from;
    if (spot->obj != NULL) return array_of_cells((const sk_list *)spot->obj, from, to, buf);
    const uint8_t *first = spot->span.p + sk_mp_head_of(spot->span.p).head_len;
    const uint8_t *start = sk_mp_next_n(first, from);
    return array_of_span(buf, to - from, start, sk_mp_next_n(start, to - from));
}

static int64_t read_has(const spot *spot, sk_span key) {
    if (!sk_mp_is_key(key.p, key.len))
        return -sk_fail(SK_BAD_VALUE, "the key must be a scalar or an array of scalars, in its "
                                      "shortest form");
    bool has = spot->obj != NULL ? sk_map_find((const sk_map *)spot->obj, key) != NULL
                                 : sk_packed_find(spot->span.p, key) != NULL;
    return has ? SK_OK : -SK_MISSING;
}

static int64_t read_keys(const spot *spot, sk_buf *buf) {
    if (spot->obj == NULL) {
        const uint8_t *p = spot->span.p + sk_mp_head_of(spot->span.p).head_len;
        uint8_t *out = array_start(buf, spot->count, spot->span.len);
        if (out == NULL) return -SK_NO_MEMORY;
        for (uint32_t k = 0; k < spot->count; k++) {
            const uint8_t *value = sk_mp_next(p);
            memcpy(out, p, (size_t)(value - p));
            out += value - p;
            p = sk_mp_next(value);
        }
        return array_end(buf, out);
    }
    const sk_map *map = (const sk_map *)spot->obj;
    uint64_t size = 0;
    for (uint32_t k = 0; k < map->used; k++) size += sk_cell_size(&map->entries[k].key);
    uint8_t *out = array_start(buf, map->live, size);
    if (out == NULL) return -SK_NO_MEMORY;
    for (uint32_t k = 0; k < map->used; k++) out = sk_cell_write(&map->entries[k].key, out);
    return array_end(buf, out);
}

static int64_t read_get(const spot *spot, sk_buf *buf) {
    uint64_t size = spot->obj != NULL ? sk_obj_size(spot->obj) : spot->span.len;
    int status = spot->obj != NULL ? sk_node_encode(spot->obj, buf)
                                   : sk_buf_put(buf, spot->span.p, spot->span.len);
    return status == SK_OK ? (int64_t)size : -status;
}

static int64_t expected(const char *what, const spot *spot) {
    static const char *const names[] = {"a scalar", "a list", "a map"};
    return -sk_fail(SK_BAD_PATH, "expected %s at the path's end, found %s", what,
                    names[spot->type]);
}

int64_t sk_node_read(const sk_obj *obj, int op, const uint8_t *path, size_t path_len,
                     const uint8_t *arg, size_t arg_len, int64_t i, int64_t j, sk_buf *buf) {
    if (obj == NULL) return -SK_MISSING;
    spot spot;
    int status = walk(obj, path, path_len, &spot);
    if (status != SK_OK) return -status;
    bool is_list = spot.type == SK_MP_ARRAY, is_map = spot.type == SK_MP_MAP;
    switch (op) {
    case SK_R_GET:
        return read_get(&spot, buf);
    case SK_R_LEN:
        return is_list || is_map ? spot.count : expected("a list or a map", &spot);
    case SK_R_TYPE:
        return is_list ? 'l' : is_map ? 'm' : 's';
    case SK_R_SLICE:
        return is_list ? read_slice(&spot, i, j, buf) : expected("a list", &spot);
    case SK_R_HAS:
        return is_map ? read_has(&spot, (sk_span){arg, arg_len}) : expected("a map", &spot);
    case SK_R_KEYS:
        return is_map ? read_keys(&spot, buf) : expected("a map", &spot);
    default:
        return -sk_fail(SK_BAD_ARGUMENT, "no such read operation: %d", op);
    }
}

/* ---- Pages ----------------------------------------------------------------------- */

static int64_t page_of_packed(const spot *spot, uint64_t *cursor, uint64_t *version, sk_buf *buf) {
    if (spot->count == 0) return -SK_END;
    const uint8_t *p = spot->span.p;
    uint32_t values = spot->type == SK_MP_MAP ? 2 * spot->count : spot->count;
    int64_t n = array_of_span(buf, values, p + sk_mp_head_of(p).head_len, p + spot->span.len);
    if (n < 0) return n;
    *cursor = spot->count;
    *version = VERSION_WHOLE;
    return n;
}

static int64_t page_of_list(const sk_list *list, uint64_t *cursor, uint32_t elements_max,
                            sk_buf *buf) {
    if (*cursor >= list->len) return -SK_END;
    uint32_t from = (uint32_t)*cursor, left = list->len - from;
    uint32_t to = from + (left < elements_max ? left : elements_max);
    int64_t n = array_of_cells(list, from, to, buf);
    if (n >= 0) *cursor = to;
    return n;
}

/* The cursor is a position among all entries, including dead ones: entries move only when the
 * version changes. */
static int64_t page_of_map(const sk_map *map, uint64_t *cursor, uint32_t elements_max,
                           sk_buf *buf) {
    uint64_t size = 0, from = *cursor, to = from;
    uint32_t pairs = 0;
    for (; to < map->used && pairs < elements_max; to++) {
        if (map->entries[to].key.tag == SK_CELL_NONE) continue;
        size += sk_cell_size(&map->entries[to].key) + sk_cell_size(&map->entries[to].value);
        pairs++;
    }
    if (pairs == 0) return -SK_END;
    uint8_t *out = array_start(buf, 2 * pairs, size);
    if (out == NULL) return -SK_NO_MEMORY;
    for (uint64_t k = from; k < to; k++) {
        out = sk_cell_write(&map->entries[k].key, out);
        out = sk_cell_write(&map->entries[k].value, out);
    }
    *cursor = to;
    return array_end(buf, out);
}

static int64_t page_changed(void) {
    return -sk_fail(SK_CHANGED, "the container changed while it was read page by page");
}

int64_t sk_node_page(const sk_obj *obj, const uint8_t *path, size_t path_len, uint64_t *cursor,
                     uint64_t *version, uint32_t elements_max, sk_buf *buf) {
    if (*version == VERSION_WHOLE) return -SK_END;
    bool is_first = *version == 0 && *cursor == 0;
    spot spot;
    int status = obj != NULL ? walk(obj, path, path_len, &spot) : SK_MISSING;
    if (status != SK_OK) return is_first ? -status : page_changed();
    if (spot.type == SK_MP_SCALAR)
        return is_first ? expected("a list or a map", &spot) : page_changed();
    if (elements_max == 0) return -sk_fail(SK_BAD_ARGUMENT, "a page of no elements");
    if (spot.obj == NULL)
        return is_first ? page_of_packed(&spot, cursor, version, buf) : page_changed();
    bool is_list = spot.type == SK_MP_ARRAY;
    uint64_t is =
        is_list ? ((const sk_list *)spot.obj)->version : ((const sk_map *)spot.obj)->version;
    if (!is_first && *version != is) return page_changed();
    int64_t n = is_list ? page_of_list((const sk_list *)spot.obj, cursor, elements_max, buf)
                        : page_of_map((const sk_map *)spot.obj, cursor, elements_max, buf);
    if (n >= 0) *version = is;
    return n;
}

/* ---- Writes ---------------------------------------------------------------------- */

static const char *write_name(int op) {
    static const char *const names[] = {"set", "delete", "append", "extend", "insert",
                                        "pop", "splice", "update", "take",   "clear"};
    return names[op];
}

int sk_wrong_container(const sk_edit *e, const char *found) {
    return sk_fail(SK_BAD_PATH, "%s: the path's %u steps lead to %s", write_name(e->op), e->depth,
                   found);
}

int sk_edit_grow(const sk_edit *e, int64_t delta) {
    if (delta <= 0 || (uint64_t)delta <= e->room) return SK_OK;
    return sk_fail(SK_TOO_LARGE, "%lld bytes more would make a value of more than %u bytes",
                   (long long)delta, SK_VALUE_BYTES_MAX);
}

/* The bytes before the arg in the innermost of the containers that an edit creates. */
static int chain_leaf(const sk_edit *e, char shape, uint8_t *head, size_t *head_len) {
    bool is_list = shape == 'l', for_list = e->op != SK_W_SET && e->op != SK_W_UPDATE;
    *head_len = 1;
    if (e->op == SK_W_CLEAR)
        *head = is_list ? 0x90 : 0x80;
    else if (for_list != is_list)
        return sk_wrong_container(e, is_list ? "a list to be created" : "a map to be created");
    else if (e->op == SK_W_SET)
        *head = 0x81; /* then its key, e->name */
    else if (e->op == SK_W_APPEND || e->op == SK_W_INSERT)
        *head = 0x91;
    else
        *head_len = 0; /* the arg is the container */
    return SK_OK;
}

/* Whether a step can lead into a new container: a new list has no element to name. */
static int chain_step(char shape, sk_span step, unsigned step_number) {
    uint32_t none;
    return shape == 'm' ? sk_map_key(step, step_number)
                        : sk_list_index(step, step_number, 0, &none);
}

static int chain_check(const sk_edit *e, unsigned level) {
    size_t known = e->shape != NULL ? strlen(e->shape) : 0;
    bool removes = e->op == SK_W_DELETE || e->op == SK_W_POP || e->op == SK_W_TAKE;
    if (known <= e->depth || removes) return SK_MISSING;
    for (unsigned k = level; k <= e->depth; k++) {
        char c = e->shape[k];
        if (c != 'l' && c != 'm')
            return sk_fail(SK_BAD_ARGUMENT, "shape \"%.40s\": expected 'l' or 'm' at %u, found %c",
                           e->shape, k, c);
        if (k == e->depth) break;
        int status = chain_step(c, sk_path_step(e->path, k), k);
        if (status != SK_OK) return status;
    }
    return e->op == SK_W_SET ? chain_step(e->shape[e->depth], e->name, e->depth) : SK_OK;
}

static uint8_t *put_span(uint8_t *out, sk_span span) {
    if (span.len > 0) memcpy(out, span.p, span.len);
    return out + span.len;
}

int sk_chain(sk_edit *e, unsigned level, sk_span *value) {
    if (e->chain.len == 0) {
        uint8_t head[1] = {0};
        size_t head_len = 0;
        int status = chain_check(e, level);
        if (status == SK_OK) status = chain_leaf(e, e->shape[e->depth], head, &head_len);
        if (status != SK_OK) return status;
        sk_span name = e->op == SK_W_SET ? e->name : (sk_span){NULL, 0};
        const sk_path *path = e->path;
        size_t len = e->depth - level + (size_t)(path->step[e->depth] - path->step[level]) +
                     head_len + name.len + e->arg.len;
        uint8_t *out = e->chain_small;
        if (len > SK_CHAIN_SMALL) out = e->chain_heap = sk_raw_alloc(len);
        if (out == NULL) return SK_NO_MEMORY;
        e->chain = (sk_span){out, len};
        for (unsigned k = level; k < e->depth; k++) {
            *out++ = 0x81; /* a map of one entry: this step's key, and what follows */
            out = put_span(out, sk_path_step(path, k));
        }
        out = put_span(out, (sk_span){head, head_len});
        out = put_span(out, name);
        out = put_span(out, e->arg);
        assert(out == e->chain.p + len);
    }
    *value = e->chain;
    return SK_OK;
}

int sk_apply(sk_edit *e, sk_cell *cell, unsigned step) {
    if (!sk_cell_is_indexed(cell)) return sk_packed_apply(e, cell, step);
    sk_obj *obj = cell->obj;
    bool is_list = obj->type == SK_OBJ_LIST;
    if (step == e->depth)
        return is_list ? sk_list_apply(e, (sk_list *)obj) : sk_map_apply(e, (sk_map *)obj);
    sk_cell *child;
    sk_span name = sk_path_step(e->path, step);
    int status = step_down(obj, name, step, &child);
    if (status == SK_MISSING && !is_list) {
        sk_span value;
        status = sk_chain(e, step + 1, &value);
        return status == SK_OK ? sk_map_put(e, (sk_map *)obj, name, value) : status;
    }
    if (status == SK_OK) status = sk_apply(e, child, step + 1);
    if (status != SK_OK) return status;
    uint64_t *body = is_list ? &((sk_list *)obj)->body : &((sk_map *)obj)->body;
    *body = (uint64_t)((int64_t)*body + e->delta);
    return SK_OK;
}

/* Checks the arg, and sets e->fresh to the elements that the operation puts into a list. */
static int check_arg(sk_edit *e) {
    bool is_element = e->op == SK_W_APPEND || e->op == SK_W_INSERT;
    unsigned above = e->path->steps + is_element; /* containers around the arg */
    if (e->op == SK_W_TAKE) {
        if (sk_mp_is_key(e->arg.p, e->arg.len)) return SK_OK;
        return sk_fail(SK_BAD_VALUE, "take: the key must be a scalar or an array of scalars, in "
                                     "its shortest form");
    }
    if (e->op != SK_W_SET && e->path->steps >= SK_DEPTH_MAX)
        return sk_fail(SK_TOO_DEEP, "no container can be %u steps deep", e->path->steps);
    int status = check_value(e->arg, SK_DEPTH_MAX - above);
    if (status != SK_OK) return status;
    sk_mp_head head = sk_mp_head_of(e->arg.p);
    if (e->op == SK_W_UPDATE && head.type != SK_MP_MAP)
        return sk_fail(SK_BAD_VALUE, "update: expected a map, found byte 0x%02x", *e->arg.p);
    if (e->op == SK_W_EXTEND || e->op == SK_W_SPLICE) {
        if (head.type != SK_MP_ARRAY)
            return sk_fail(SK_BAD_VALUE, "%s: expected an array, found byte 0x%02x",
                           write_name(e->op), *e->arg.p);
        e->fresh = (sk_span){e->arg.p + head.head_len, e->arg.len - head.head_len};
        e->fresh_count = head.count;
    } else {
        e->fresh = e->arg;
        e->fresh_count = 1;
    }
    return SK_OK;
}

/* Fills in what the operation needs and checks it. */
static int edit_prepare(sk_edit *e) {
    const sk_path *path = e->path;
    bool names_last = e->op == SK_W_SET || e->op == SK_W_DELETE;
    if (e->op < SK_W_SET || e->op > SK_W_CLEAR)
        return sk_fail(SK_BAD_ARGUMENT, "no such write operation: %d", e->op);
    if (e->op == SK_W_DELETE && path->steps == 0)
        return sk_fail(SK_BAD_ARGUMENT, "delete needs a path; the key itself has sk_delete");
    e->depth = path->steps - (names_last && path->steps > 0);
    if (e->op == SK_W_DELETE || e->op == SK_W_POP || e->op == SK_W_CLEAR) {
        e->arg = (sk_span){NULL, 0};
        if (e->op == SK_W_CLEAR && path->steps >= SK_DEPTH_MAX)
            return sk_fail(SK_TOO_DEEP, "no container can be %u steps deep", path->steps);
    } else {
        int status = check_arg(e);
        if (status != SK_OK) return status;
    }
    if (names_last && path->steps > 0) e->name = sk_path_step(path, e->depth);
    if (e->op == SK_W_TAKE) e->name = e->arg;
    /* The key may be an array, which is a container too. */
    if (e->op == SK_W_SET && path->steps == SK_DEPTH_MAX &&
        sk_mp_head_of(e->name.p).type == SK_MP_ARRAY)
        return sk_fail(SK_TOO_DEEP, "an array as a key %u steps deep", path->steps);
    return SK_OK;
}

/* Puts another value at the root; there may be none yet. */
static int replace_root(sk_edit *e, sk_obj **obj, sk_span value) {
    int status = check_kind(e->kind, sk_mp_head_of(value.p).type);
    if (status != SK_OK) return status;
    if (value.len > SK_VALUE_BYTES_MAX)
        return sk_fail(SK_TOO_LARGE, "a value of more than %u bytes", SK_VALUE_BYTES_MAX);
    sk_obj *fresh;
    status = sk_obj_make(e->mem, e->seq, value, &fresh);
    if (status != SK_OK) return status;
    sk_node_free(e->mem, *obj);
    *obj = fresh;
    return SK_OK;
}

static int write_root(sk_edit *e, sk_obj **obj) {
    if (e->op == SK_W_SET && e->path->steps == 0) return replace_root(e, obj, e->arg);
    if (*obj == NULL) {
        sk_span value;
        int status = sk_chain(e, 0, &value);
        return status == SK_OK ? replace_root(e, obj, value) : status;
    }
    sk_cell root = {.obj = *obj};
    root.tag = SK_CELL_OBJECT;
    uint64_t size = sk_obj_size(*obj);
    e->root = &root;
    e->room = size < SK_VALUE_BYTES_MAX ? SK_VALUE_BYTES_MAX - size : 0;
    int status = sk_apply(e, &root, 0);
    assert(root.tag == SK_CELL_OBJECT);
    *obj = root.obj;
    return status;
}

int64_t sk_node_write(sk_mem *mem, int kind, sk_obj **obj, int op, const uint8_t *path,
                      size_t path_len, const char *shape, const uint8_t *arg, size_t arg_len,
                      int64_t i, int64_t j, uint64_t *seq, sk_buf *buf) {
    sk_path steps;
    int status = parse_path(path, path_len, &steps);
    if (status != SK_OK) return -status;
    uint8_t chain_small[SK_CHAIN_SMALL];
    sk_edit e = {.mem = mem,
                 .seq = seq,
                 .op = op,
                 .kind = kind,
                 .path = &steps,
                 .shape = shape,
                 .arg = {arg, arg_len},
                 .i = i,
                 .j = j,
                 .buf = buf,
                 .chain_small = chain_small};
    status = edit_prepare(&e);
    if (status == SK_OK) status = write_root(&e, obj);
    if (e.chain_heap != NULL) sk_raw_free(e.chain_heap);
    return status == SK_OK ? e.written : -status;
}
