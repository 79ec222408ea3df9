/*
 * node.h: list, map and nested values.
 *
 * A value is a tree. A small container is kept PACKED: its MessagePack bytes,
 * scanned on access. A container whose bytes pass SK_PACKED_BYTES_MAX (or whose
 * elements pass SK_PACKED_ELEMENTS_MAX) becomes an indexed LIST or MAP whose
 * elements are 16-byte cells: up to 15 bytes of MessagePack inline, or a pointer
 * to another object. So append, index, map get and map put cost O(1) on large
 * containers, operations on small ones cost time in proportion to their bytes,
 * and an update deep in a value touches only the objects on its path.
 *
 * Invariants
 *  - An object holds exactly one well-formed MessagePack value, no deeper than
 *    SK_DEPTH_MAX containers counted from the value's root.
 *  - Map keys are scalars (or arrays of scalars) in shortest form, and distinct:
 *    so equal keys are equal bytes.
 *  - A packed container is within both limits; an indexed one may be of any size
 *    (it does not pack itself again when it shrinks).
 *  - Every change of an object's number of elements gives it a new version from
 *    *seq, so that a reader of pages notices, even if the object was replaced.
 *
 * All functions expect the leaf's lock. A function that fails leaves the tree as
 * it was. Memory is charged to `mem`.
 */
#ifndef SK_NODE_H
#define SK_NODE_H

#include "alloc.h"

#define SK_PACKED_BYTES_MAX 256
#define SK_PACKED_ELEMENTS_MAX 64

typedef struct sk_obj sk_obj; /* defined in node_private.h */

/* Builds a value from MessagePack. kind: SK_LIST, SK_MAP or SK_NESTED, which the root must fit. */
int sk_node_make(sk_mem *mem, int kind, const uint8_t *msgpack, size_t len, uint64_t *seq,
                 sk_obj **obj);
void sk_node_free(sk_mem *mem, sk_obj *obj); /* obj may be NULL */

/* Appends the value's MessagePack. */
int sk_node_encode(const sk_obj *obj, sk_buf *buf);
/* Bytes that sk_node_encode will append. O(1). */
uint64_t sk_node_size(const sk_obj *obj);

/* The operations of sk_read and sk_page (statekit.h) on a value. buf is appended to. A length
 * or a negated status. */
int64_t sk_node_read(const sk_obj *obj, int op, const uint8_t *path, size_t path_len,
                     const uint8_t *arg, size_t arg_len, int64_t i, int64_t j, sk_buf *buf);
int64_t sk_node_page(const sk_obj *obj, const uint8_t *path, size_t path_len, uint64_t *cursor,
                     uint64_t *version, uint32_t elements_max, sk_buf *buf);

/* The operations of sk_write. *obj is NULL if there is no value yet: then shape decides. On
 * success *obj may be another object (the old one is freed). *obj never becomes NULL here:
 * SK_W_DELETE with an empty path is the caller's business (SK_BAD_ARGUMENT). kind as in make. */
int64_t sk_node_write(sk_mem *mem, int kind, sk_obj **obj, int op, const uint8_t *path,
                      size_t path_len, const char *shape, const uint8_t *arg, size_t arg_len,
                      int64_t i, int64_t j, uint64_t *seq, sk_buf *buf);

#endif
