/*
 * alloc.h: memory that is counted, can be limited, and can be made to fail.
 *
 * Every allocation of the library goes through here, for three reasons: a leaf
 * knows how much memory it holds (so a leaf that moves to another store takes
 * its bytes with it), a store can refuse to exceed its limit, and a testing
 * build can fail the n-th allocation to prove that each call survives it.
 *
 * Freeing takes the size: the callers know it, so no header is needed per block.
 */
#ifndef SK_ALLOC_H
#define SK_ALLOC_H

#include "status.h"

#include <stdatomic.h>
#include <stdbool.h>

/* One per store: the memory that all its leaves hold together. */
typedef struct sk_budget {
    _Atomic uint64_t used; /* bytes, as charged by sk_charge */
    _Atomic uint64_t max;  /* bytes; 0 = no limit */
    bool is_private;       /* used by one thread, without a limit: counting is not atomic */
} sk_budget;

/* One per leaf, guarded by the leaf's lock. */
typedef struct sk_mem {
    sk_budget *budget; /* never NULL */
    uint64_t used;     /* this leaf's share of budget->used */
} sk_mem;

/* Counted memory. NULL on failure, and then sk_alloc_status() says why. n > 0. */
void *sk_alloc(sk_mem *mem, size_t n);
void *sk_alloc_lines(sk_mem *mem, size_t n);        /* aligned to a cache line (64) */
void *sk_alloc_lines_anyway(sk_mem *mem, size_t n); /* ignores the limit: more is freed right
                                                     * after */
void *sk_realloc(sk_mem *mem, void *p, size_t old_n, size_t new_n);
void sk_free(sk_mem *mem, void *p, size_t n);       /* p may be NULL */
void sk_free_lines(sk_mem *mem, void *p, size_t n); /* p may be NULL */
uint64_t sk_lines_charge(size_t n);                 /* what sk_alloc_lines(n) counts as */
int sk_alloc_status(void);                          /* SK_NO_MEMORY or SK_LIMIT */
/* To be called before each of many sk_alloc in a row: makes the heap grow in large steps. *left is
 * 0 at first. */
void sk_alloc_ahead(int64_t *left, size_t n);
/* Adds what a private budget has to the shared one, even beyond its limit. */
void sk_budget_join(sk_budget *shared, sk_budget *own);

/* Uncounted memory, for what belongs to no leaf. */
void *sk_raw_alloc(size_t n);
void *sk_raw_zalloc(size_t n);
void sk_raw_free(void *p);
/* Zeroes, aligned to two cache lines (128). Pages of a large array take memory only when they are
 * first written to. To be freed with the size. */
void *sk_raw_zalloc_pages(size_t n);
void sk_raw_free_pages(void *p, size_t n); /* p may be NULL */

/* Gives back the memory that a buffer has beyond its bytes. */
void sk_buf_trim(sk_buf *buf);

#endif
