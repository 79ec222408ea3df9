/*
 * node_private.h: what the files behind node.h share.
 *
 *   node.c    the public functions: paths, reads, pages, writes
 *   cell.c which representation a value gets; its size, its bytes, freeing it list.c the indexed
 *   list map.c the indexed map packed.c steps and edits inside packed bytes
 *
 * The objects
 *
 *   CELL, 16 bytes             0                              8              15
 *     inline value             | MessagePack, 1 to 15 bytes ...             |len|
 *     object                   | sk_obj *                     |  unused     |255|
 *     nothing (a dead entry)   |                                            | 0 |
 *
 *   PACKED   | type | len | cap | bytes ... |       a small container, or a scalar of any size
 *
 *   LIST     | type | head | len | cap | version | body | cells |
 *                                                          |
 *              cells:  | spare ... | cell 0 | cell 1 | ... | cell len-1 | spare ... |
 *                      0           head                                            cap
 *     Both ends have room, so both ends grow and shrink in O(1) amortised; a change in
 *     the middle moves the shorter side.
 *
 *   MAP      | type | bits | live | used | cap | version | body | entries | index |
 *                                                                   |         |
 *              entries: | key, value | dead | key, value | ...      |         |
 *                       0            in insertion order         used  cap     |
 *              index:   2^bits slots of 32 bits, probed linearly from the hash's low bits:
 *                       | upper 32-bits bits of the hash | position in entries + 1 |
 *     A deleted entry stays in both arrays as a dead one (its slot still points at it, which is the
 *     tombstone that linear probing needs) until more than half are dead. Then the dead entries are
 *     squeezed out and the index is made anew. The hash bits in a slot avoid nearly all comparisons
 *     with other keys: in a map of 500 entries there are 22 of these bits.
 *
 * `body` is the encoded size of all elements, kept up to date along the path of every
 * write. It makes the size of a value O(1), so that encoding reserves once and the limit
 * SK_VALUE_BYTES_MAX holds for values that grow step by step, too.
 *
 * How a write stays all-or-nothing: sk_apply walks down to the container that changes.
 * There, first everything that can fail is prepared aside (new cells, new arrays, the copy of a
 * removed element for the caller). Then the change is made by moves alone, and on the way back up
 * only the `body` of each ancestor is corrected. A packed container that would outgrow its limits
 * is first copied into a new indexed one. The write is applied to that copy, and if it succeeds,
 * the copy replaces the packed container.
 */
#ifndef SK_NODE_PRIVATE_H
#define SK_NODE_PRIVATE_H

#include "msgpack.h"
#include "node.h"

#include <assert.h>

#define SK_CELL_INLINE_MAX 15
#define SK_CELL_NONE 0
#define SK_CELL_OBJECT 255

typedef enum sk_obj_type { SK_OBJ_PACKED = 1, SK_OBJ_LIST = 2, SK_OBJ_MAP = 3 } sk_obj_type;

struct sk_obj {
    uint8_t type; /* sk_obj_type; the first field of each object below */
};

typedef union sk_cell {
    struct {
        sk_obj *obj; /* owned, if tag is SK_CELL_OBJECT */
        uint8_t unused[7];
        uint8_t tag; /* bytes of the inline value, SK_CELL_OBJECT or SK_CELL_NONE */
    };
    uint8_t bytes[SK_CELL_INLINE_MAX + 1];
} sk_cell;

static_assert(sizeof(sk_cell) == 16, "a cell is two words");
static_assert(SK_MP_SMALL_PAIRS >= SK_PACKED_ELEMENTS_MAX,
              "equal keys in maps that stay packed must be found by sk_mp_check_small");

typedef struct sk_packed {
    sk_obj obj;
    uint32_t len; /* bytes of the one value */
    uint32_t cap; /* bytes allocated behind this header */
    uint8_t bytes[];
} sk_packed;

typedef struct sk_list {
    sk_obj obj;
    uint32_t head;    /* cells of spare room before the first element */
    uint32_t len;     /* elements */
    uint32_t cap;     /* cells allocated; 0: cells is NULL */
    uint64_t version; /* renewed from the leaf's sequence when len changes */
    uint64_t body;    /* encoded bytes of all elements */
    sk_cell *cells;
} sk_list;

typedef struct sk_entry {
    sk_cell key; /* never an indexed object: equal keys must be equal bytes. NONE: dead */
    sk_cell value;
} sk_entry;

typedef struct sk_map {
    sk_obj obj;
    uint8_t bits;     /* log2 of the index's slots; 0: index is NULL */
    uint32_t live;    /* entries */
    uint32_t used;    /* entries and dead ones */
    uint32_t cap;     /* entries allocated; 0: entries is NULL */
    uint64_t version; /* as in a list */
    uint64_t body;
    sk_entry *entries;
    uint32_t *index;
} sk_map;

/* Bytes that belong to somebody else. */
typedef struct sk_span {
    const uint8_t *p;
    size_t len;
} sk_span;

typedef struct sk_path {
    const uint8_t *step[SK_DEPTH_MAX + 1]; /* step k is [step[k], step[k + 1]) */
    unsigned steps;
} sk_path;

static inline sk_span sk_path_step(const sk_path *path, unsigned k) {
    assert(k < path->steps);
    return (sk_span){path->step[k], (size_t)(path->step[k + 1] - path->step[k])};
}

/* One write on its way through the tree. */
typedef struct sk_edit {
    sk_mem *mem;
    uint64_t *seq;
    int op; /* sk_write_op */
    int kind;
    const sk_path *path;
    unsigned depth;    /* steps to the container that changes; SET, DELETE: all but the last */
    const char *shape; /* or NULL */
    sk_span arg;       /* checked */
    sk_span fresh;     /* elements that a list gains, one after the other */
    uint32_t fresh_count;
    sk_span name; /* the key or index that SET, DELETE and TAKE name: the last step, or arg */
    int64_t i, j;
    sk_buf *buf;
    const sk_cell *root;  /* the value's root, which is never inline */
    uint64_t room;        /* bytes by which the encoded value may grow */
    sk_span chain;        /* what sk_chain made */
    uint8_t *chain_heap;  /* its memory, to free, if it did not fit chain_small */
    uint8_t *chain_small; /* SK_CHAIN_SMALL bytes */
    /* results */
    int64_t delta;   /* bytes by which the encoded value grew */
    int64_t written; /* bytes appended to buf */
} sk_edit;

#define SK_CHAIN_SMALL 512

/* ---- cell.c --------------------------------------------------------------- */

static inline bool sk_cell_is_indexed(const sk_cell *cell) {
    return cell->tag == SK_CELL_OBJECT && cell->obj->type != SK_OBJ_PACKED;
}

/* The bytes of a cell that is not indexed. They move when the cell does. */
static inline sk_span sk_cell_span(const sk_cell *cell) {
    assert(!sk_cell_is_indexed(cell));
    if (cell->tag != SK_CELL_OBJECT) return (sk_span){cell->bytes, cell->tag};
    const sk_packed *packed = (const sk_packed *)cell->obj;
    return (sk_span){packed->bytes, packed->len};
}

/* The length of the encoded value. sk_obj_write writes the value to out and returns its end. */
uint64_t sk_obj_size(const sk_obj *obj);
uint8_t *sk_obj_write(const sk_obj *obj, uint8_t *out);
void sk_obj_free(sk_mem *mem, sk_obj *obj);

static inline uint64_t sk_cell_size(const sk_cell *cell) {
    return cell->tag != SK_CELL_OBJECT ? cell->tag : sk_obj_size(cell->obj);
}
uint8_t *sk_cell_write(const sk_cell *cell, uint8_t *out);
/* Appends a value that is about to be removed to e->buf, for the caller. */
int sk_cell_copy_out(sk_edit *e, const sk_cell *cell);

static inline void sk_cell_free(sk_mem *mem, sk_cell *cell) {
    if (cell->tag == SK_CELL_OBJECT) sk_obj_free(mem, cell->obj);
}

/* All makers take one value that was checked. Only one error can still be found: equal keys in a
 * map that gets indexed (SK_BAD_VALUE). */
int sk_cell_make(sk_mem *mem, uint64_t *seq, sk_span value, sk_cell *cell);
int sk_cell_make_key(sk_mem *mem, sk_span key, sk_cell *cell);
/* An object for the value, of the form that the limits ask for. */
int sk_obj_make(sk_mem *mem, uint64_t *seq, sk_span value, sk_obj **obj);
/* An indexed object for the container, however small. */
int sk_obj_index(sk_mem *mem, uint64_t *seq, sk_span container, sk_obj **obj);
/* False if a container in these values has more elements than a packed one may. */
bool sk_counts_fit(sk_span values);
/* Makes room for `len` bytes in a packed or inline cell, and keeps what it holds. NULL: no
 * memory. sk_cell_settle then says how many bytes are in use; it cannot fail. */
uint8_t *sk_cell_reserve(sk_mem *mem, sk_cell *cell, size_t len);
void sk_cell_settle(sk_mem *mem, sk_cell *cell, size_t len, bool may_inline);

/* ---- list.c --------------------------------------------------------------- */

static inline sk_cell *sk_list_at(const sk_list *list, uint32_t k) {
    assert(k < list->len);
    return &list->cells[list->head + k];
}

int sk_list_make(sk_mem *mem, uint64_t *seq, sk_span array, sk_obj **obj);
void sk_list_free(sk_mem *mem, sk_list *list);
int sk_list_apply(sk_edit *e, sk_list *list);
/* Which elements [*i, *j) of a list of len elements the edit replaces by e->fresh. */
int sk_list_range(const sk_edit *e, uint32_t len, uint32_t *i, uint32_t *j);
/* The element that a step names: SK_OK, SK_MISSING or SK_BAD_PATH. */
int sk_list_index(sk_span step, unsigned step_number, uint32_t len, uint32_t *at);
/* Python's meaning of a slice bound: negative counts from the end, then clamped to [0, len]. */
uint32_t sk_list_clamp(int64_t i, uint32_t len);

/* ---- map.c ---------------------------------------------------------------- */

int sk_map_make(sk_mem *mem, uint64_t *seq, sk_span pairs, sk_obj **obj);
void sk_map_free(sk_mem *mem, sk_map *map);
int sk_map_apply(sk_edit *e, sk_map *map);
int sk_map_put(sk_edit *e, sk_map *map, sk_span key, sk_span value);
/* NULL if there is no such key. */
sk_cell *sk_map_find(const sk_map *map, sk_span key);
/* SK_OK, or SK_BAD_PATH if a step cannot be a key. */
int sk_map_key(sk_span step, unsigned step_number);

/* ---- packed.c ------------------------------------------------------------- */

/* From the value at p to the one that the step names: SK_OK, SK_MISSING or SK_BAD_PATH. */
int sk_packed_step(const uint8_t *p, sk_span step, unsigned step_number, const uint8_t **child);
/* The value of a key in a map, or NULL. */
const uint8_t *sk_packed_find(const uint8_t *map, sk_span key);
int sk_packed_apply(sk_edit *e, sk_cell *cell, unsigned step);

/* ---- node.c --------------------------------------------------------------- */

/* Applies the edit below the container in `cell`, which `step` steps lead to. */
int sk_apply(sk_edit *e, sk_cell *cell, unsigned step);
/* What the edit creates if there is nothing after `level` steps: the containers that shape names,
 * one inside the other, with the edit's arg in the innermost; or SK_MISSING. */
int sk_chain(sk_edit *e, unsigned level, sk_span *value);
/* SK_OK, or SK_TOO_LARGE if the value may not grow by delta. */
int sk_edit_grow(const sk_edit *e, int64_t delta);
int sk_wrong_container(const sk_edit *e, const char *found);

#endif
