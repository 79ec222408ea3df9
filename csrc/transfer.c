/*
 * transfer.c: leaves taken out of one store and put into another, in one process.
 *
 * Only the heads of their tables move, never their entries (store.h). So it costs the same for a
 * leaf of ten entries and for one of ten million. States are matched by name: the other store may
 * number them differently, or not know them yet. The memory that the entries take moves from one
 * budget to the other.
 *
 * A leaf that was detached is away, so that no write lands where nobody will look for it. sk_move
 * puts it back if the other store refuses it.
 */
#include "store.h"

typedef struct detached_leaf {
    uint64_t seq;
    uint8_t residency; /* SK_LEAF_EXPECTED too */
} detached_leaf;

struct sk_leaves {
    uint32_t from, count;
    uint8_t leaf_bits;
    uint32_t epoch; /* of the store they came from: no entry in them is newer */
    uint32_t state_count;
    sk_budget budget;      /* the memory that they hold */
    sk_state *states;      /* schemas; tables[count] each */
    detached_leaf *leaves; /* [count] */
};

#define TABLES_BYTES(leaves) ((size_t)(leaves)->count * sizeof(sk_table))
#define LEAVES_BYTES(leaves) ((size_t)(leaves)->count * sizeof(detached_leaf))

/* Frees everything but the contents of the tables, which were never filled, or have moved on. */
static void free_shell(sk_leaves *leaves) {
    for (uint32_t s = 0; s < leaves->state_count; s++)
        sk_raw_free_pages(leaves->states[s].tables, TABLES_BYTES(leaves));
    sk_raw_free(leaves->states);
    sk_raw_free_pages(leaves->leaves, LEAVES_BYTES(leaves));
    sk_raw_free(leaves);
}

void sk_leaves_free(sk_leaves *leaves) {
    if (leaves == NULL) return;
    for (uint32_t s = 0; s < leaves->state_count; s++)
        for (uint32_t i = 0; i < leaves->count && leaves->budget.used > 0; i++)
            sk_table_clear(&leaves->states[s].tables[i], leaves->states[s].kind);
    free_shell(leaves);
}

static void copy_schema(sk_state *to, const sk_state *from) {
    to->kind = from->kind;
    to->flags = from->flags;
    to->key_type = from->key_type;
    strcpy(to->name, from->name);
}

static sk_leaves *new_leaves(sk_store *store, uint32_t from, uint32_t count) {
    uint32_t state_count = store->state_count; /* once: another thread may declare states */
    sk_leaves *leaves = sk_raw_zalloc(sizeof *leaves);
    if (leaves == NULL) return NULL;
    leaves->from = from;
    leaves->count = count;
    leaves->leaf_bits = store->leaf_bits;
    leaves->leaves = sk_raw_zalloc_pages(LEAVES_BYTES(leaves));
    leaves->states = sk_raw_zalloc((size_t)state_count * sizeof(sk_state) + 1);
    bool is_made = leaves->leaves != NULL && leaves->states != NULL;
    for (uint32_t s = 0; is_made && s < state_count; s++) {
        copy_schema(&leaves->states[s], store->states[s]);
        leaves->states[s].tables = sk_raw_zalloc_pages(TABLES_BYTES(leaves));
        is_made = leaves->states[s].tables != NULL;
        leaves->state_count = s + 1;
    }
    if (is_made) return leaves;
    free_shell(leaves);
    return NULL;
}

/* Moves the heads of those of `count` tables that have something in them, and returns the bytes
 * that they hold. The caller makes sure that no delta of either side reaches back to before
 * this. */
static uint64_t move_tables(sk_table *to, sk_table *from, uint32_t count, sk_budget *budget) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (from[i].groups == 0) continue;
        uint32_t operations = to[i].operations;
        to[i] = from[i];
        to[i].mem.budget = budget;
        to[i].operations = operations;
        bytes += to[i].mem.used;
        from[i] = (sk_table){0};
    }
    return bytes;
}

int sk_detach(sk_store *store, uint32_t from, uint32_t to, sk_leaves **out) {
    *out = NULL;
    int status = sk_leaf_range_check(store, from, to);
    if (status != SK_OK) return status;
    sk_leaves *leaves = new_leaves(store, from, to - from);
    if (leaves == NULL) return SK_NO_MEMORY;
    if ((status = sk_leaves_lock_write(store, from, to, &leaves->epoch)) != SK_OK) {
        free_shell(leaves);
        return status;
    }
    for (uint32_t i = from; i < to && status == SK_OK; i++)
        if (store->leaves[i].residency == SK_AWAY || store->leaves[i].residency == SK_LEAF_SHUT)
            status = sk_leaf_refuse(&store->leaves[i], i);
    if (status != SK_OK) {
        sk_leaves_unlock(store, from, to);
        free_shell(leaves);
        return status;
    }
    /* A state may have been declared, and filled, between new_leaves and the locking. Then start
     * again. A state that is declared later has no entries in these leaves, which are locked. */
    if (store->state_count != leaves->state_count) {
        sk_leaves_unlock(store, from, to);
        free_shell(leaves);
        return sk_detach(store, from, to, out); /* at most SK_STATES_MAX times */
    }
    /* If a write-back is under way, nobody will tell these leaves whether it succeeded, so all of
     * it counts as dirty. */
    for (uint32_t i = from; i < to; i++) sk_leaf_end_writing(store, i, false);
    for (uint32_t s = 0; s < leaves->state_count; s++) {
        sk_table *tables = store->states[s]->tables;
        uint64_t operations = 0;
        for (uint32_t i = from; i < to; i++) {
            if (tables[i].operations == 0) continue;
            operations += tables[i].operations;
            store->records[i] += tables[i].operations;
            tables[i].operations = 0;
        }
        store->states[s]->operations += operations;
        leaves->budget.used +=
            move_tables(leaves->states[s].tables, tables + from, to - from, &leaves->budget);
    }
    for (uint32_t i = from; i < to; i++) {
        sk_leaf *leaf = &store->leaves[i];
        leaves->leaves[i - from] = (detached_leaf){leaf->seq, leaf->residency};
        leaf->residency = SK_AWAY;
        sk_filter_drop(store, i);
        sk_leaf_end_deltas(leaf, leaves->epoch);
    }
    sk_leaves_unlock(store, from, to);
    atomic_fetch_sub(&store->budget.used, leaves->budget.used);
    *out = leaves;
    return SK_OK;
}

/* Finds the ids that the detached states have in this store. States that are new are declared, but
 * none of them if a known one does not fit. */
static int match_states(sk_store *store, const sk_leaves *leaves, uint32_t *ids) {
    int status = SK_OK;
    for (uint32_t s = 0; s < leaves->state_count && status == SK_OK; s++) {
        const sk_state *state = &leaves->states[s];
        bool is_known = sk_state_find(store, state->name) != NULL;
        if (is_known)
            status = sk_state_add(store, state->name, state->kind, state->key_type.text,
                                  state->flags, &ids[s]);
    }
    for (uint32_t s = 0; s < leaves->state_count && status == SK_OK; s++) {
        const sk_state *state = &leaves->states[s];
        status = sk_state_add(store, state->name, state->kind, state->key_type.text, state->flags,
                              &ids[s]);
    }
    return status;
}

static int check_unoccupied(sk_store *store, uint32_t from, uint32_t to) {
    for (uint32_t i = from; i < to; i++)
        if (store->leaves[i].residency == SK_LEAF_SHUT) return sk_leaf_refuse(&store->leaves[i], i);
    for (uint32_t s = 0; s < store->state_count; s++)
        for (uint32_t i = from; i < to; i++) {
            const sk_table *table = &store->states[s]->tables[i];
            if (table->live + table->tombs > 0)
                return sk_fail(SK_OCCUPIED, "leaf %u already has entries of state '%.80s'", i,
                               store->states[s]->name);
        }
    return SK_OK;
}

static int attach_locked(sk_store *store, sk_leaves *leaves, uint32_t *ids, uint32_t epoch,
                         bool is_limited) {
    uint32_t from = leaves->from, count = leaves->count;
    int status = check_unoccupied(store, from, from + count);
    uint64_t used = atomic_fetch_add(&store->budget.used, leaves->budget.used);
    uint64_t max = atomic_load(&store->budget.max);
    if (status == SK_OK && is_limited && max != 0 && used + leaves->budget.used > max)
        status = sk_fail(SK_LIMIT, "attaching %llu bytes would pass the memory limit of %llu bytes",
                         (unsigned long long)leaves->budget.used, (unsigned long long)max);
    /* Last, because it declares states, and an attach that is refused must not leave any behind. */
    if (status == SK_OK) status = match_states(store, leaves, ids);
    if (status != SK_OK) {
        atomic_fetch_sub(&store->budget.used, leaves->budget.used);
        return status;
    }
    for (uint32_t s = 0; s < leaves->state_count; s++) {
        sk_table *tables = store->states[ids[s]]->tables + from;
        /* a table without entries may still hold its array */
        for (uint32_t i = 0; i < count; i++) {
            if (tables[i].groups > 0) sk_table_clear(&tables[i], leaves->states[s].kind);
            if (leaves->states[s].tables[i].live > 0)
                sk_timers_came(store->states[ids[s]], from + i);
        }
        move_tables(tables, leaves->states[s].tables, count, &store->budget);
    }
    for (uint32_t i = 0; i < count; i++) {
        sk_leaf *leaf = &store->leaves[from + i];
        if (leaves->leaves[i].seq > leaf->seq) leaf->seq = leaves->leaves[i].seq;
        leaf->residency = leaves->leaves[i].residency;
        sk_filter_drop(store, from + i);
        /* For all states, also those that the detached leaves do not have: no delta may reach back
         * to before this. */
        sk_leaf_end_deltas(leaf, epoch);
        if (store->writes_back && sk_leaf_is_dirty(store, from + i))
            sk_leaf_note_dirty(store, from + i);
    }
    return SK_OK;
}

static int attach(sk_store *store, sk_leaves *leaves, bool is_limited) {
    if (leaves->leaf_bits != store->leaf_bits)
        return sk_fail(SK_BAD_ARGUMENT,
                       "leaves of a store with 2^%u leaves do not fit one with 2^%u",
                       leaves->leaf_bits, store->leaf_bits);
    uint32_t from = leaves->from, to = from + leaves->count, epoch;
    uint32_t *ids = sk_raw_zalloc((size_t)leaves->state_count * sizeof *ids + 1);
    if (ids == NULL) return SK_NO_MEMORY;
    /* Entries carry epochs of the other store. Our epoch must not be lower, or later deltas would
     * list these entries as changed again and again. */
    sk_epoch_at_least(store, leaves->epoch);
    int status = sk_leaves_lock_write(store, from, to, &epoch);
    if (status == SK_OK) {
        status = attach_locked(store, leaves, ids, epoch, is_limited);
        sk_leaves_unlock(store, from, to);
    }
    sk_raw_free(ids);
    if (status == SK_OK) free_shell(leaves);
    return status;
}

int sk_attach(sk_store *store, sk_leaves *leaves) { return attach(store, leaves, true); }

int sk_move(sk_store *source, sk_store *target, uint32_t from, uint32_t to, sk_leaves **stuck) {
    int status = sk_detach(source, from, to, stuck);
    if (status != SK_OK) return status;
    status = attach(target, *stuck, true);
    /* If that failed, put them back. They were there before, so the limit is ignored. */
    if (status == SK_OK || attach(source, *stuck, false) == SK_OK) *stuck = NULL;
    return status;
}
