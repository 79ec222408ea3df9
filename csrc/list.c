/*
 * list.c: the indexed list (picture in node_private.h).
 *
 * Every write to a list is one splice: elements [i, j) are replaced by others. Room is made at the
 * nearer end. If that end has no spare cells left, it takes some from the other end, provided that
 * the array has at least half as many spare cells as elements (so that moving all elements pays for
 * as many cheap steps). Otherwise the array grows by half. So a queue stays in an array of about
 * 1.5 times its length, and a list that shrinks to a quarter of its array gives the rest back.
 */
#include "node_private.h"

#include <string.h>

#define LIST_CAP_MIN 8 /* cells */

int sk_list_index(sk_span step, unsigned step_number, uint32_t len, uint32_t *at) {
    int64_t i;
    if (sk_mp_read_int(step.p, step.len, &i) != SK_OK)
        return sk_fail(SK_BAD_PATH,
                       "step %u: a list of %u elements needs an integer, found byte 0x%02x",
                       step_number, len, *step.p);
    if (i < 0) i += len;
    if (i < 0 || i >= len) return SK_MISSING;
    *at = (uint32_t)i;
    return SK_OK;
}

uint32_t sk_list_clamp(int64_t i, uint32_t len) {
    if (i < 0) i += len;
    return i < 0 ? 0 : i > len ? len : (uint32_t)i;
}

int sk_list_range(const sk_edit *e, uint32_t len, uint32_t *i, uint32_t *j) {
    int status;
    switch (e->op) {
    case SK_W_SET:
    case SK_W_DELETE:
        status = sk_list_index(e->name, e->depth, len, i);
        if (status != SK_OK) return status;
        *j = *i + 1;
        break;
    case SK_W_POP: {
        int64_t at = e->i < 0 ? e->i + len : e->i;
        if (at < 0 || at >= len) return SK_MISSING;
        *i = (uint32_t)at;
        *j = *i + 1;
        break;
    }
    case SK_W_APPEND:
    case SK_W_EXTEND:
        *i = *j = len;
        break;
    case SK_W_INSERT:
        *i = *j = sk_list_clamp(e->i, len);
        break;
    case SK_W_SPLICE:
        *i = sk_list_clamp(e->i, len);
        *j = sk_list_clamp(e->j, len);
        if (*j < *i) *j = *i;
        break;
    case SK_W_CLEAR:
        *i = 0;
        *j = len;
        break;
    default:
        return sk_wrong_container(e, "a list");
    }
    assert(*i <= *j && *j <= len);
    return SK_OK;
}

/* ---- Making and freeing ------------------------------------------------------- */

/* Makes `count` cells from the values at p, either all or none. */
static int cells_make(sk_mem *mem, uint64_t *seq, const uint8_t *p, uint32_t count, sk_cell *cells,
                      uint64_t *size) {
    *size = 0;
    for (uint32_t k = 0; k < count; k++) {
        const uint8_t *next = sk_mp_next(p);
        int status = sk_cell_make(mem, seq, (sk_span){p, (size_t)(next - p)}, &cells[k]);
        if (status != SK_OK) {
            while (k > 0) sk_cell_free(mem, &cells[--k]);
            return status;
        }
        *size += sk_cell_size(&cells[k]);
        p = next;
    }
    return SK_OK;
}

int sk_list_make(sk_mem *mem, uint64_t *seq, sk_span array, sk_obj **obj) {
    sk_mp_head head = sk_mp_head_of(array.p);
    assert(head.type == SK_MP_ARRAY);
    sk_list *list = sk_alloc(mem, sizeof *list);
    if (list == NULL) return sk_alloc_status();
    *list = (sk_list){.obj = {SK_OBJ_LIST}, .version = ++*seq};
    if (head.count > 0) {
        size_t bytes = (size_t)head.count * sizeof(sk_cell);
        int status = SK_OK;
        list->cells = sk_alloc(mem, bytes);
        if (list->cells == NULL)
            status = sk_alloc_status();
        else
            status =
                cells_make(mem, seq, array.p + head.head_len, head.count, list->cells, &list->body);
        if (status != SK_OK) {
            sk_free(mem, list->cells, bytes);
            sk_free(mem, list, sizeof *list);
            return status;
        }
        list->len = list->cap = head.count;
    }
    *obj = &list->obj;
    return SK_OK;
}

static void cells_release(sk_mem *mem, sk_list *list) {
    sk_free(mem, list->cells, list->cap * sizeof(sk_cell));
    list->cells = NULL;
    list->head = list->cap = 0;
}

void sk_list_free(sk_mem *mem, sk_list *list) {
    for (uint32_t k = 0; k < list->len; k++) sk_cell_free(mem, sk_list_at(list, k));
    cells_release(mem, list);
    sk_free(mem, list, sizeof *list);
}

/* ---- Room --------------------------------------------------------------------- */

/* Moves the elements so that the first is at cell `head`. */
static void slide(sk_list *list, uint32_t head) {
    assert(head + list->len <= list->cap);
    memmove(list->cells + head, list->cells + list->head, list->len * sizeof(sk_cell));
    list->head = head;
}

/* Makes `more` spare cells behind the last element, or (at_front) before the first. */
static int reserve(sk_mem *mem, sk_list *list, uint32_t more, bool at_front) {
    uint32_t spare = list->cap - list->len;
    uint32_t here = at_front ? list->head : spare - list->head;
    if (here >= more) return SK_OK;
    if (spare >= more + list->len / 2) {
        uint32_t share = more + (spare - more) / 2;
        slide(list, at_front ? share : spare - share);
        return SK_OK;
    }
    uint32_t gain = more + list->len / 2 - (at_front ? 0 : here);
    if (list->cap + gain < LIST_CAP_MIN) gain = LIST_CAP_MIN - list->cap;
    size_t old_bytes = list->cap * sizeof(sk_cell);
    size_t new_bytes = ((size_t)list->cap + gain) * sizeof(sk_cell);
    sk_cell *cells = sk_realloc(mem, list->cells, old_bytes, new_bytes);
    if (cells == NULL) return sk_alloc_status();
    list->cells = cells;
    list->cap += gain;
    if (at_front) slide(list, list->head + gain);
    return SK_OK;
}

/* Gives back memory that a list which shrank does not need. Cannot fail: it may keep the memory. */
static void trim(sk_mem *mem, sk_list *list) {
    if (list->cap <= 2 * LIST_CAP_MIN || list->len > list->cap / 4) return;
    if (list->len == 0) {
        cells_release(mem, list);
        return;
    }
    slide(list, 0);
    uint32_t cap = 2 * list->len;
    sk_cell *cells =
        sk_realloc(mem, list->cells, list->cap * sizeof(sk_cell), cap * sizeof(sk_cell));
    if (cells == NULL) return;
    list->cells = cells;
    list->cap = cap;
}

/* ---- Splice -------------------------------------------------------------------- */

/* Turns the hole [i, j) into a hole of `count` cells by moving the shorter side. If it grows, room
 * was reserved on that side. */
static void reshape(sk_list *list, uint32_t i, uint32_t j, uint32_t count, bool at_front) {
    uint32_t hole = j - i;
    sk_cell *first = list->cells + list->head;
    if (at_front) {
        memmove(first + hole - count, first, i * sizeof(sk_cell));
        list->head = list->head + hole - count;
    } else {
        memmove(first + i + count, first + j, (list->len - j) * sizeof(sk_cell));
    }
    list->len = list->len - hole + count;
}

/* Replaces elements [i, j) by the cells in `fresh`, whose encoded size is given. */
static int splice(sk_edit *e, sk_list *list, uint32_t i, uint32_t j, const sk_cell *fresh,
                  uint64_t fresh_size) {
    uint32_t hole = j - i, count = e->fresh_count, len = list->len - hole + count;
    uint64_t gone = 0;
    for (uint32_t k = i; k < j; k++) gone += sk_cell_size(sk_list_at(list, k));
    int64_t grown = (int64_t)fresh_size - (int64_t)gone;
    int64_t delta = grown + (int64_t)sk_mp_head_len(len) - (int64_t)sk_mp_head_len(list->len);
    bool at_front = i < list->len - j;
    int status = sk_edit_grow(e, delta);
    if (status == SK_OK && count > hole) status = reserve(e->mem, list, count - hole, at_front);
    if (status != SK_OK) return status;
    /* Nothing fails from here on. */
    for (uint32_t k = i; k < j; k++) sk_cell_free(e->mem, sk_list_at(list, k));
    if (count != hole) {
        reshape(list, i, j, count, at_front);
        list->version = ++*e->seq;
    }
    if (count > 0) memcpy(list->cells + list->head + i, fresh, count * sizeof(sk_cell));
    list->body = (uint64_t)((int64_t)list->body + grown);
    e->delta = delta;
    if (count < hole) trim(e->mem, list);
    return SK_OK;
}

int sk_list_apply(sk_edit *e, sk_list *list) {
    uint32_t i = 0, j = 0;
    int status = sk_list_range(e, list->len, &i, &j);
    if (status != SK_OK) return status;
    if (e->op == SK_W_POP) {
        status = sk_cell_copy_out(e, sk_list_at(list, i));
        if (status != SK_OK) return status;
    }
    sk_cell one, *fresh = &one;
    if (e->fresh_count > 1) {
        fresh = sk_raw_alloc(e->fresh_count * sizeof *fresh);
        if (fresh == NULL) return SK_NO_MEMORY;
    }
    uint64_t size;
    status = cells_make(e->mem, e->seq, e->fresh.p, e->fresh_count, fresh, &size);
    if (status == SK_OK) {
        status = splice(e, list, i, j, fresh, size);
        if (status != SK_OK)
            for (uint32_t k = 0; k < e->fresh_count; k++) sk_cell_free(e->mem, &fresh[k]);
    }
    if (fresh != &one) sk_raw_free(fresh);
    return status;
}
