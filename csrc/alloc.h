/*
 * alloc.h: memory that is counted, can be limited, and can be made to fail.
 *
 * Every allocation of the library goes through here, for three reasons: a leaf
 * knows how much memory it holds (so it can be moved between stores and its
 * bytes with it), a store can refuse to pass its limit, and a testing build can
 * fail the n-th allocation to prove that each call survives it.
 *
 * Freeing takes the size: the callers know it, so no header is needed per block.
 */
#ifndef SK_ALLOC_H
#define SK_ALLOC_H

#include "status.h"

#include <stdatomic.h>
#include <stdbool.h>

/* One per store: what all its leaves hold together. */
typedef struct sk_budget {
    _Atomic uint64_t used; /* bytes, as charged by sk_charge */
    _Atomic uint64_t max;  /* bytes; 0 = no limit */
    bool is_private;       /* one thread's, without a limit: counting needs no atomic operation */
} sk_budget;

/* One per leaf, guarded by the leaf's lock. */
typedef struct sk_mem {
    sk_budget *budget; /* never NULL */
    uint64_t used;     /* this leaf's share of budget->used */
} sk_mem;

/* Counted memory. NULL on failure, and then sk_alloc_status() says why. n > 0. */
void *sk_alloc(sk_mem *mem, size_t n);
void *sk_alloc_lines(sk_mem *mem, size_t n);        /* aligned to a cache line (64) */
void *sk_alloc_lines_anyway(sk_mem *mem, size_t n); /* limit or not: more is freed right after */
void *sk_realloc(sk_mem *mem, void *p, size_t old_n, size_t new_n);
void sk_free(sk_mem *mem, void *p, size_t n);       /* p may be NULL */
void sk_free_lines(sk_mem *mem, void *p, size_t n); /* p may be NULL */
uint64_t sk_lines_charge(size_t n);                 /* what sk_alloc_lines(n) counts as */
int sk_alloc_status(void);                          /* SK_NO_MEMORY or SK_LIMIT */
/* To be called before each sk_alloc of a long row: has the heap grow in large steps. *left is 0 at
 * first. */
void sk_alloc_ahead(int64_t *left, size_t n);
/* Counts what a private budget had as the shared one's, limit or not. */
void sk_budget_join(sk_budget *shared, sk_budget *own);

/* Uncounted memory, for what belongs to no leaf. */
void *sk_raw_alloc(size_t n);
void *sk_raw_zalloc(size_t n);
void sk_raw_free(void *p);
/* Zeroes, aligned to two cache lines (128); of a large array, pages take memory when they are first
 * written to. To be freed with its size. */
void *sk_raw_zalloc_pages(size_t n);
void sk_raw_free_pages(void *p, size_t n); /* p may be NULL */

/* Gives back what a buffer has beyond its bytes. */
void sk_buf_trim(sk_buf *buf);

#endif
