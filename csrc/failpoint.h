/*
 * failpoint.h: named places where a testing build can be made to fail, wait or die.
 *
 *     int status = SK_FAILPOINT(LEAF_ENCODE);
 *     if (status != SK_OK) return status;
 *
 * In other builds SK_FAILPOINT is SK_OK and costs nothing. The list below has all fail points, so a
 * test can go through every one, also those that no call has visited yet.
 */
#ifndef SK_FAILPOINT_H
#define SK_FAILPOINT_H

#include "alloc.h"

/* Sorted by name. */
#define SK_FAILPOINTS(POINT)                                                                       \
    POINT(BLOCK_REWRITE, "native.block.rewrite")                                                   \
    POINT(FRAMES_BIND, "native.frames.bind")                                                       \
    POINT(FRAMES_DIGEST, "native.frames.digest")                                                   \
    POINT(FRAMES_SEAL, "native.frames.seal")                                                       \
    POINT(FRAMES_VERIFY, "native.frames.verify")                                                   \
    POINT(LEAF_COMMIT, "native.leaf.commit")     /* blocks are good, nothing has changed yet */    \
    POINT(LEAF_DECODE, "native.leaf.decode")     /* before each block */                           \
    POINT(LEAF_ENCODE, "native.leaf.encode")     /* before each state's block */                   \
    POINT(SNAPSHOT_FILL, "native.snapshot.fill") /* before each leaf */                            \
    POINT(SNAPSHOT_OPEN, "native.snapshot.open")                                                   \
    POINT(SNAPSHOT_SERVE, "native.snapshot.serve") /* a change encodes a leaf for a snapshot */    \
    POINT(STATE_RETYPE, "native.state.retype")

#define SK_FAILPOINT_ENUM(id, name) SK_FAILPOINT_##id,
typedef enum sk_failpoint { SK_FAILPOINTS(SK_FAILPOINT_ENUM) SK_FAILPOINT_COUNT } sk_failpoint;

#ifdef SK_TESTING
/* Counts the visit. SK_OK, or SK_NO_MEMORY with the reason set if the point is to fail now. */
int sk_failpoint_visit(sk_failpoint point);
#define SK_FAILPOINT(id) sk_failpoint_visit(SK_FAILPOINT_##id)
#else
#define SK_FAILPOINT(id) SK_OK
#endif

#endif
