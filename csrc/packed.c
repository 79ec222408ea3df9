/*
 * packed.c: steps and edits inside packed bytes.
 *
 * MessagePack containers carry a count of elements, not of bytes. So whatever changes inside, only
 * one head changes: that of the container which gains or loses elements. An edit is therefore a
 * PATCH of two places:
 *
 *      | ... | head | elements before | from ... to | elements after | ... |
 *               |                            |
 *          new head (may be wider        new bytes, in two pieces
 *          or narrower: 15 -> 16)        (a key and its value)
 *
 * It is made in place if the result is within the limits of a packed container. If not, the
 * outermost container of these bytes becomes an indexed object, whose elements are cells, and the
 * edit goes on from there. The container that it leads to may still be packed.
 */
#include "node_private.h"

#include <string.h>

typedef struct patch {
    size_t head;     /* where the container's head is */
    size_t head_len; /* as it is */
    uint8_t new_head[SK_MP_HEAD_MAX];
    size_t new_head_len;
    uint32_t count; /* elements or pairs after the edit */
    size_t from, to;
    sk_span piece[2];
    uint8_t merged[SK_PACKED_BYTES_MAX]; /* SK_W_UPDATE builds its piece here */
} patch;

/* ---- Steps ----------------------------------------------------------------------- */

/* Finds the pair with this key: returns where the key is, or NULL. *end is where the search ended:
 * the pair's value, or the end of the pairs. */
static const uint8_t *find_pair(const uint8_t *p, uint32_t pairs, sk_span key,
                                const uint8_t **end) {
    for (; pairs > 0; pairs--) {
        const uint8_t *value = sk_mp_next(p);
        if ((size_t)(value - p) == key.len && memcmp(p, key.p, key.len) == 0) {
            *end = value;
            return p;
        }
        p = sk_mp_next(value);
    }
    *end = p;
    return NULL;
}

const uint8_t *sk_packed_find(const uint8_t *map, sk_span key) {
    sk_mp_head head = sk_mp_head_of(map);
    assert(head.type == SK_MP_MAP);
    const uint8_t *value;
    return find_pair(map + head.head_len, head.count, key, &value) != NULL ? value : NULL;
}

int sk_packed_step(const uint8_t *p, sk_span step, unsigned step_number, const uint8_t **child) {
    sk_mp_head head = sk_mp_head_of(p);
    if (head.type == SK_MP_ARRAY) {
        uint32_t at;
        int status = sk_list_index(step, step_number, head.count, &at);
        if (status == SK_OK) *child = sk_mp_next_n(p + head.head_len, at);
        return status;
    }
    if (head.type == SK_MP_SCALAR)
        return sk_fail(SK_BAD_PATH,
                       "step %u: leads into a scalar (byte 0x%02x), expected a list or a map",
                       step_number, *p);
    int status = sk_map_key(step, step_number);
    if (status != SK_OK) return status;
    *child = sk_packed_find(p, step);
    return *child != NULL ? SK_OK : SK_MISSING;
}

/* ---- Planning -------------------------------------------------------------------- */

static int copy_out(sk_edit *e, const uint8_t *from, const uint8_t *to) {
    int status = sk_buf_put(e->buf, from, (size_t)(to - from));
    if (status == SK_OK) e->written = to - from;
    return status;
}

static int plan_list(sk_edit *e, sk_span all, const uint8_t *p, patch *patch) {
    sk_mp_head head = sk_mp_head_of(p);
    uint32_t i = 0, j = 0;
    int status = sk_list_range(e, head.count, &i, &j);
    if (status != SK_OK) return status;
    /* The outermost container ends where the bytes end, so appending to it needs no walk. */
    bool at_end = i == head.count && p == all.p;
    const uint8_t *from = at_end ? all.p + all.len : sk_mp_next_n(p + head.head_len, i);
    const uint8_t *to = sk_mp_next_n(from, j - i);
    if (e->op == SK_W_POP) {
        status = copy_out(e, from, to);
        if (status != SK_OK) return status;
    }
    patch->from = (size_t)(from - all.p);
    patch->to = (size_t)(to - all.p);
    patch->count = head.count - (j - i) + e->fresh_count;
    patch->piece[0] = e->fresh;
    return SK_OK;
}

static void plan_put(sk_span all, const uint8_t *p, sk_span key, sk_span value, patch *patch) {
    sk_mp_head head = sk_mp_head_of(p);
    const uint8_t *from;
    bool found = find_pair(p + head.head_len, head.count, key, &from) != NULL;
    const uint8_t *to = found ? sk_mp_next(from) : from;
    patch->from = (size_t)(from - all.p);
    patch->to = (size_t)(to - all.p);
    patch->count = head.count + !found;
    if (!found) patch->piece[0] = key;
    patch->piece[!found] = value;
}

static int plan_remove(sk_edit *e, sk_span all, const uint8_t *p, patch *patch) {
    sk_mp_head head = sk_mp_head_of(p);
    const uint8_t *value;
    const uint8_t *key = find_pair(p + head.head_len, head.count, e->name, &value);
    if (key == NULL) return SK_MISSING;
    const uint8_t *to = sk_mp_next(value);
    if (e->op == SK_W_TAKE) {
        int status = copy_out(e, value, to);
        if (status != SK_OK) return status;
    }
    patch->from = (size_t)(key - all.p);
    patch->to = (size_t)(to - all.p);
    patch->count = head.count - 1;
    return SK_OK;
}

static bool merged_put(patch *patch, const uint8_t *from, const uint8_t *to) {
    size_t len = (size_t)(to - from), at = patch->piece[0].len;
    if (len > sizeof patch->merged - at) return false;
    memcpy(patch->merged + at, from, len);
    patch->piece[0].len += len;
    return true;
}

/* Builds the pairs of the map at p, updated with those of the map arg. False: too long. */
static bool plan_merge(sk_edit *e, sk_span all, const uint8_t *p, patch *patch) {
    sk_mp_head head = sk_mp_head_of(p), more = sk_mp_head_of(e->arg.p);
    if (more.count > SK_PACKED_ELEMENTS_MAX) return false;
    const uint8_t *first = p + head.head_len, *at = first;
    patch->piece[0].p = patch->merged;
    patch->count = head.count;
    for (uint32_t k = 0; k < head.count; k++) { /* in the map's order, with new values */
        const uint8_t *value = sk_mp_next(at), *next = sk_mp_next(value);
        const uint8_t *other = sk_packed_find(e->arg.p, (sk_span){at, (size_t)(value - at)});
        if (!merged_put(patch, at, value)) return false;
        if (other == NULL && !merged_put(patch, value, next)) return false;
        if (other != NULL && !merged_put(patch, other, sk_mp_next(other))) return false;
        at = next;
    }
    patch->from = (size_t)(first - all.p);
    patch->to = (size_t)(at - all.p);
    const uint8_t *key = e->arg.p + more.head_len;
    for (uint32_t k = 0; k < more.count; k++) { /* then the new ones, in arg's order */
        const uint8_t *value = sk_mp_next(key), *next = sk_mp_next(value);
        if (sk_packed_find(p, (sk_span){key, (size_t)(value - key)}) == NULL) {
            if (!merged_put(patch, key, next)) return false;
            patch->count++;
        }
        key = next;
    }
    return true;
}

static void plan_clear(sk_span all, const uint8_t *p, patch *patch) {
    patch->from = (size_t)(p - all.p) + sk_mp_head_of(p).head_len;
    patch->to = p == all.p ? all.len : (size_t)(sk_mp_next(p) - all.p);
    patch->count = 0;
}

static int plan_map(sk_edit *e, sk_span all, const uint8_t *p, patch *patch, bool *fits) {
    int status = SK_OK;
    switch (e->op) {
    case SK_W_SET:
    case SK_W_DELETE:
        status = sk_map_key(e->name, e->depth);
        if (status != SK_OK) return status;
        if (e->op == SK_W_DELETE) return plan_remove(e, all, p, patch);
        plan_put(all, p, e->name, e->arg, patch);
        return SK_OK;
    case SK_W_TAKE:
        return plan_remove(e, all, p, patch);
    case SK_W_UPDATE:
        *fits = plan_merge(e, all, p, patch);
        return SK_OK;
    case SK_W_CLEAR:
        plan_clear(all, p, patch);
        return SK_OK;
    default:
        return sk_wrong_container(e, "a map");
    }
}

/* Finds the container at the end of the path and plans the edit of it. */
static int plan(sk_edit *e, sk_span all, unsigned step, patch *patch, bool *fits) {
    const uint8_t *p = all.p, *child = NULL;
    int status = SK_OK;
    bool creates = false;
    for (; step < e->depth && !creates; step++, p = child) {
        sk_span name = sk_path_step(e->path, step);
        status = sk_packed_step(p, name, step, &child);
        if (status == SK_MISSING && sk_mp_head_of(p).type == SK_MP_MAP) {
            sk_span value;
            status = sk_chain(e, step + 1, &value);
            if (status != SK_OK) return status;
            plan_put(all, p, name, value, patch);
            creates = true;
            child = p; /* the container that changes is this one */
        }
        if (status != SK_OK) return status;
    }
    sk_mp_head head = sk_mp_head_of(p);
    if (!creates) {
        if (head.type == SK_MP_SCALAR) return sk_wrong_container(e, "a scalar");
        status = head.type == SK_MP_ARRAY ? plan_list(e, all, p, patch)
                                          : plan_map(e, all, p, patch, fits);
        if (status != SK_OK) return status;
    }
    patch->head = (size_t)(p - all.p);
    patch->head_len = head.head_len;
    if (*fits)
        patch->new_head_len = head.type == SK_MP_ARRAY
                                  ? sk_mp_write_array(patch->new_head, patch->count)
                                  : sk_mp_write_map(patch->new_head, patch->count);
    return SK_OK;
}

/* ---- Doing ----------------------------------------------------------------------- */

static size_t patched_len(const patch *patch, size_t len) {
    return len - patch->head_len + patch->new_head_len - (patch->to - patch->from) +
           patch->piece[0].len + patch->piece[1].len;
}

/* Applies the patch to `len` bytes; there is room for the result. The order of the moves matters:
 * the bytes before `from` and those behind `to` must not overwrite each other. If the head gets
 * wider, the bytes before `from` move towards those behind `to`, so the latter are moved first; if
 * it gets narrower, it is the other way round. */
static void splice(uint8_t *bytes, size_t len, const patch *patch) {
    uint8_t *middle = bytes + patch->head + patch->head_len;
    uint8_t *new_middle = bytes + patch->head + patch->new_head_len;
    size_t middle_len = patch->from - patch->head - patch->head_len;
    uint8_t *pieces = new_middle + middle_len;
    uint8_t *new_tail = pieces + patch->piece[0].len + patch->piece[1].len;
    if (new_middle < middle) memmove(new_middle, middle, middle_len);
    memmove(new_tail, bytes + patch->to, len - patch->to);
    if (new_middle > middle) memmove(new_middle, middle, middle_len);
    memcpy(bytes + patch->head, patch->new_head, patch->new_head_len);
    for (int k = 0; k < 2; k++) {
        if (patch->piece[k].len == 0) continue;
        memcpy(pieces, patch->piece[k].p, patch->piece[k].len);
        pieces += patch->piece[k].len;
    }
}

static int apply_in_place(sk_edit *e, sk_cell *cell, const patch *patch) {
    size_t was = sk_cell_span(cell).len, is = patched_len(patch, was);
    int64_t delta = (int64_t)is - (int64_t)was;
    int status = sk_edit_grow(e, delta);
    if (status != SK_OK) return status;
    uint8_t *bytes = sk_cell_reserve(e->mem, cell, is > was ? is : was);
    if (bytes == NULL) return sk_alloc_status();
    splice(bytes, was, patch);
    sk_cell_settle(e->mem, cell, is, cell != e->root);
    e->delta = delta;
    return SK_OK;
}

static int apply_indexed(sk_edit *e, sk_cell *cell, sk_span all, unsigned step) {
    sk_cell indexed = {.tag = SK_CELL_OBJECT};
    int status = sk_obj_index(e->mem, e->seq, all, &indexed.obj);
    if (status != SK_OK) return status;
    status = sk_apply(e, &indexed, step);
    if (status != SK_OK) {
        sk_obj_free(e->mem, indexed.obj);
        return status;
    }
    /* The size may change by more than the edit: heads that were wider than necessary are
     * shorter. */
    e->delta = (int64_t)sk_cell_size(&indexed) - (int64_t)all.len;
    sk_cell_free(e->mem, cell);
    *cell = indexed;
    return SK_OK;
}

int sk_packed_apply(sk_edit *e, sk_cell *cell, unsigned step) {
    sk_span all = sk_cell_span(cell);
    patch patch;
    patch.piece[0] = patch.piece[1] = (sk_span){NULL, 0};
    bool fits = true;
    int status = plan(e, all, step, &patch, &fits);
    if (status != SK_OK) return status;
    fits = fits && patched_len(&patch, all.len) <= SK_PACKED_BYTES_MAX &&
           patch.count <= SK_PACKED_ELEMENTS_MAX && sk_counts_fit(patch.piece[0]) &&
           sk_counts_fit(patch.piece[1]);
    return fits ? apply_in_place(e, cell, &patch) : apply_indexed(e, cell, all, step);
}
