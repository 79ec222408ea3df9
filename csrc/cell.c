/*
 * cell.c: which representation a value gets, and what all of them can do.
 *
 *   value                                           in a cell        at the root
 *   up to 15 bytes                                  inline           PACKED
 *   scalar                                          PACKED           PACKED
 *   container within both limits of node.h,         PACKED           PACKED
 *     and every container inside it within the
 *     limit of elements
 *   container                                       LIST or MAP      LIST or MAP
 *
 * The limits bound the cost of an operation on packed bytes: at most a scan of
 * SK_PACKED_BYTES_MAX bytes. A map key is always contiguous, whatever its size.
 */
#include "node_private.h"

#include <string.h>

/* ---- Packed objects -------------------------------------------------------- */

/* Rounded up to what malloc hands out anyway, so that the slack is ours. */
static size_t packed_cap(size_t len) {
    size_t whole = (sizeof(sk_packed) + len + 8 + 15) & ~(size_t)15;
    return whole - 8 - sizeof(sk_packed);
}

static sk_packed *packed_alloc(sk_mem *mem, size_t cap) {
    sk_packed *packed = sk_alloc(mem, sizeof *packed + cap);
    if (packed == NULL) return NULL;
    packed->obj.type = SK_OBJ_PACKED;
    packed->len = 0;
    packed->cap = (uint32_t)cap;
    return packed;
}

static int packed_make(sk_mem *mem, sk_span value, sk_obj **obj) {
    assert(value.len > 0 && value.len <= SK_VALUE_BYTES_MAX);
    sk_packed *packed = packed_alloc(mem, packed_cap(value.len));
    if (packed == NULL) return sk_alloc_status();
    memcpy(packed->bytes, value.p, value.len);
    packed->len = (uint32_t)value.len;
    *obj = &packed->obj;
    return SK_OK;
}

static sk_packed *packed_resize(sk_mem *mem, sk_packed *packed, size_t cap) {
    assert(cap >= packed->len);
    sk_packed *moved = sk_realloc(mem, packed, sizeof *packed + packed->cap, sizeof *packed + cap);
    if (moved != NULL) moved->cap = (uint32_t)cap;
    return moved;
}

uint8_t *sk_cell_reserve(sk_mem *mem, sk_cell *cell, size_t len) {
    assert(!sk_cell_is_indexed(cell) && len <= SK_PACKED_BYTES_MAX);
    if (cell->tag != SK_CELL_OBJECT) {
        if (len <= SK_CELL_INLINE_MAX) return cell->bytes;
        sk_packed *packed = packed_alloc(mem, packed_cap(len));
        if (packed == NULL) return NULL;
        memcpy(packed->bytes, cell->bytes, cell->tag);
        packed->len = cell->tag;
        cell->obj = &packed->obj;
        cell->tag = SK_CELL_OBJECT;
        return packed->bytes;
    }
    sk_packed *packed = (sk_packed *)cell->obj;
    if (len <= packed->cap) return packed->bytes;
    /* What grew once will grow again: reserve a quarter more, up to the limit for packed bytes. */
    size_t wish = len + len / 4;
    if (wish > SK_PACKED_BYTES_MAX) wish = SK_PACKED_BYTES_MAX;
    packed = packed_resize(mem, packed, packed_cap(wish));
    if (packed == NULL) return NULL;
    cell->obj = &packed->obj;
    return packed->bytes;
}

void sk_cell_settle(sk_mem *mem, sk_cell *cell, size_t len, bool may_inline) {
    if (cell->tag != SK_CELL_OBJECT) {
        assert(len > 0 && len <= SK_CELL_INLINE_MAX);
        cell->tag = (uint8_t)len;
        return;
    }
    sk_packed *packed = (sk_packed *)cell->obj;
    assert(len > 0 && len <= packed->cap);
    packed->len = (uint32_t)len;
    /* Half of what fits inline, so that a value whose size varies around the limit does not
     * allocate and free at each step. */
    if (may_inline && len <= SK_CELL_INLINE_MAX / 2) {
        memcpy(cell->bytes, packed->bytes, len);
        cell->tag = (uint8_t)len;
        sk_obj_free(mem, &packed->obj);
    } else if (packed->cap > 2 * packed_cap(len)) {
        sk_packed *smaller = packed_resize(mem, packed, packed_cap(len));
        if (smaller != NULL) cell->obj = &smaller->obj; /* else it stays large: no harm done */
    }
}

/* ---- Making ----------------------------------------------------------------- */

bool sk_counts_fit(sk_span values) {
    /* A container has at least one byte per element, so most values need not be scanned. */
    if (values.len <= SK_PACKED_ELEMENTS_MAX) return true;
    if (values.len > SK_PACKED_BYTES_MAX) return false;
    const uint8_t *p = values.p, *end = values.p + values.len;
    while (p < end) { /* heads only: elements follow their container's head */
        sk_mp_head head = sk_mp_head_of(p);
        if (head.count > SK_PACKED_ELEMENTS_MAX) return false;
        p += head.head_len + head.body_len;
    }
    assert(p == end);
    return true;
}

int sk_obj_index(sk_mem *mem, uint64_t *seq, sk_span container, sk_obj **obj) {
    sk_mp_type type = sk_mp_head_of(container.p).type;
    assert(type != SK_MP_SCALAR);
    return type == SK_MP_ARRAY ? sk_list_make(mem, seq, container, obj)
                               : sk_map_make(mem, seq, container, obj);
}

int sk_obj_make(sk_mem *mem, uint64_t *seq, sk_span value, sk_obj **obj) {
    bool is_scalar = sk_mp_head_of(value.p).type == SK_MP_SCALAR;
    if (is_scalar || sk_counts_fit(value)) return packed_make(mem, value, obj);
    return sk_obj_index(mem, seq, value, obj);
}

static void cell_set_inline(sk_cell *cell, sk_span value) {
    memset(cell->bytes, 0, sizeof cell->bytes);
    memcpy(cell->bytes, value.p, value.len);
    cell->tag = (uint8_t)value.len;
}

int sk_cell_make(sk_mem *mem, uint64_t *seq, sk_span value, sk_cell *cell) {
    assert(value.len > 0);
    if (value.len <= SK_CELL_INLINE_MAX) {
        cell_set_inline(cell, value);
        return SK_OK;
    }
    cell->tag = SK_CELL_OBJECT;
    return sk_obj_make(mem, seq, value, &cell->obj);
}

int sk_cell_make_key(sk_mem *mem, sk_span key, sk_cell *cell) {
    if (key.len <= SK_CELL_INLINE_MAX) {
        cell_set_inline(cell, key);
        return SK_OK;
    }
    cell->tag = SK_CELL_OBJECT;
    return packed_make(mem, key, &cell->obj);
}

/* ---- Size, bytes, end --------------------------------------------------------- */

uint64_t sk_obj_size(const sk_obj *obj) {
    if (obj->type == SK_OBJ_PACKED) return ((const sk_packed *)obj)->len;
    if (obj->type == SK_OBJ_LIST) {
        const sk_list *list = (const sk_list *)obj;
        return sk_mp_head_len(list->len) + list->body;
    }
    const sk_map *map = (const sk_map *)obj;
    return sk_mp_head_len(map->live) + map->body;
}

uint8_t *sk_cell_write(const sk_cell *cell, uint8_t *out) {
    if (cell->tag == SK_CELL_OBJECT) return sk_obj_write(cell->obj, out);
    memcpy(out, cell->bytes, cell->tag);
    return out + cell->tag;
}

/* Recursive: no deeper than SK_DEPTH_MAX. */
uint8_t *sk_obj_write(const sk_obj *obj, uint8_t *out) {
    if (obj->type == SK_OBJ_PACKED) {
        const sk_packed *packed = (const sk_packed *)obj;
        memcpy(out, packed->bytes, packed->len);
        return out + packed->len;
    }
    if (obj->type == SK_OBJ_LIST) {
        const sk_list *list = (const sk_list *)obj;
        out += sk_mp_write_array(out, list->len);
        for (uint32_t k = 0; k < list->len; k++) out = sk_cell_write(sk_list_at(list, k), out);
        return out;
    }
    const sk_map *map = (const sk_map *)obj;
    out += sk_mp_write_map(out, map->live);
    for (uint32_t k = 0; k < map->used; k++) {
        if (map->entries[k].key.tag == SK_CELL_NONE) continue;
        out = sk_cell_write(&map->entries[k].key, out);
        out = sk_cell_write(&map->entries[k].value, out);
    }
    return out;
}

int sk_cell_copy_out(sk_edit *e, const sk_cell *cell) {
    uint64_t size = sk_cell_size(cell);
    int status = sk_buf_reserve(e->buf, size);
    if (status != SK_OK) return status;
    sk_cell_write(cell, e->buf->data + e->buf->len);
    e->buf->len += size;
    e->written = (int64_t)size;
    return SK_OK;
}

void sk_obj_free(sk_mem *mem, sk_obj *obj) {
    if (obj->type == SK_OBJ_LIST) {
        sk_list_free(mem, (sk_list *)obj);
    } else if (obj->type == SK_OBJ_MAP) {
        sk_map_free(mem, (sk_map *)obj);
    } else {
        assert(obj->type == SK_OBJ_PACKED);
        sk_free(mem, obj, sizeof(sk_packed) + ((sk_packed *)obj)->cap);
    }
}
