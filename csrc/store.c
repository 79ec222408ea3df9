/* store.c: opening and closing, states, figures. See store.h. */
#define _GNU_SOURCE
#include "store.h"

#include <time.h>

/* Bytes of an array with one item for each leaf. */
#define LEAVES_BYTES(store, item) ((size_t)(store)->leaf_count * sizeof(item))

static void free_arrays(sk_store *store) {
    sk_raw_free_pages(store->leaves, LEAVES_BYTES(store, sk_leaf));
    sk_raw_free_pages(store->undos, LEAVES_BYTES(store, sk_undo *));
    sk_raw_free_pages(store->records, LEAVES_BYTES(store, uint64_t));
    sk_raw_free((void *)store->dirty);
}

static bool is_power_of_two(uint32_t n) { return n != 0 && (n & (n - 1)) == 0; }

static int init_locks(sk_store *store) {
    pthread_condattr_t attr;
    if (pthread_condattr_init(&attr) != 0) return SK_NO_MEMORY;
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    int failed = pthread_cond_init(&store->snapshots_moved, &attr);
    pthread_condattr_destroy(&attr);
    if (failed) return SK_NO_MEMORY;
    pthread_mutex_init(&store->states_lock, NULL);
    pthread_mutex_init(&store->snapshots_lock, NULL);
    pthread_mutex_init(&store->clock_lock, NULL);
    pthread_mutex_init(&store->rows_lock, NULL);
    return SK_OK;
}

int sk_open(uint32_t key_groups, uint32_t subgroups, uint64_t bytes_max, sk_store **out) {
    *out = NULL;
    if (!is_power_of_two(key_groups) || !is_power_of_two(subgroups) ||
        (uint64_t)key_groups * subgroups > SK_LEAVES_MAX)
        return sk_fail(SK_BAD_ARGUMENT,
                       "%u key-groups of %u sub-groups: both must be powers of two, together at "
                       "most %d leaves",
                       key_groups, subgroups, SK_LEAVES_MAX);
    sk_store *store = sk_raw_zalloc(sizeof *store);
    if (store == NULL) return SK_NO_MEMORY;
    store->key_groups = key_groups;
    store->subgroups = subgroups;
    store->leaf_count = key_groups * subgroups;
    store->leaf_bits = (uint8_t)__builtin_ctz(store->leaf_count);
    store->leaves = sk_raw_zalloc_pages(LEAVES_BYTES(store, sk_leaf));
    store->undos = sk_raw_zalloc_pages(LEAVES_BYTES(store, sk_undo *));
    store->records = sk_raw_zalloc_pages(LEAVES_BYTES(store, uint64_t));
    size_t words = (store->leaf_count + 63) / 64;
    store->dirty = sk_raw_zalloc((words + (words + 63) / 64) * sizeof *store->dirty);
    store->dirty_words = store->dirty + words;
    store->budget.max = bytes_max;
    store->epoch = 1;
    store->users = 1;
    store->keep_after = SK_NO_TRACKING;
    store->fixed_now = store->last_now = SK_NO_TIME;
    store->watermark = store->first_watermark = SK_NO_TIME;
    if (store->leaves == NULL || store->undos == NULL || store->records == NULL ||
        store->dirty == NULL || init_locks(store) != SK_OK) {
        free_arrays(store);
        sk_raw_free(store);
        return sk_fail(SK_NO_MEMORY, "could not allocate %u leaves", key_groups * subgroups);
    }
    *out = store;
    return SK_OK;
}

void sk_close(sk_store *store) {
    if (store != NULL) sk_store_release(store);
}

/* The state's tables are empty. */
static void free_state(sk_store *store, sk_state *state) {
    sk_raw_free_pages(state->tables, LEAVES_BYTES(store, sk_table));
    sk_raw_free_pages((void *)state->due_min, LEAVES_BYTES(store, int64_t));
    sk_raw_free(state);
}

void sk_store_release(sk_store *store) {
    if (atomic_fetch_sub(&store->users, 1) > 1) return;
    assert(store->snapshots == NULL);
    for (uint32_t s = 0; s < store->state_count; s++) {
        sk_state *state = store->states[s];
        for (uint32_t i = 0; i < store->leaf_count && sk_bytes_used(store) > 0; i++)
            sk_table_clear(&state->tables[i], state->kind);
        sk_filters_free(store, state);
        free_state(store, state);
    }
    pthread_mutex_destroy(&store->states_lock);
    pthread_mutex_destroy(&store->snapshots_lock);
    pthread_mutex_destroy(&store->clock_lock);
    pthread_mutex_destroy(&store->rows_lock);
    pthread_cond_destroy(&store->snapshots_moved);
    free_arrays(store);
    sk_raw_free(store);
}

/* ---- States ---- */

sk_state *sk_state_at(sk_store *store, uint32_t id) {
    if (__builtin_expect(id >= atomic_load_explicit(&store->state_count, memory_order_acquire),
                         0)) {
        sk_fail(SK_BAD_ARGUMENT, "there is no state with id %u", id);
        return NULL;
    }
    return atomic_load_explicit(&store->states[id], memory_order_relaxed);
}

static int new_state(sk_store *store, const char *name, int kind, const sk_key_type *type,
                     int flags, uint32_t *id) {
    uint32_t count = store->state_count;
    if (count == SK_STATES_MAX)
        return sk_fail(SK_LIMIT, "a store holds at most %d states", SK_STATES_MAX);
    sk_state *state = sk_raw_zalloc(sizeof *state);
    if (state == NULL) return SK_NO_MEMORY;
    state->tables = sk_raw_zalloc_pages(LEAVES_BYTES(store, sk_table));
    bool has_due = sk_kinds[kind]->has_due;
    if (has_due) state->due_min = sk_raw_zalloc_pages(LEAVES_BYTES(store, int64_t));
    if (state->tables == NULL || (has_due && state->due_min == NULL)) {
        free_state(store, state);
        return SK_NO_MEMORY;
    }
    state->id = count;
    state->kind = (uint8_t)kind;
    state->flags = (uint8_t)flags;
    state->timed_since = SK_NO_TIME;
    state->key_type = *type;
    strcpy(state->name, name);
    atomic_store_explicit(&store->states[count], state, memory_order_relaxed);
    atomic_store_explicit(&store->state_count, count + 1, memory_order_release);
    *id = count;
    return SK_OK;
}

sk_state *sk_state_find(sk_store *store, const char *name) {
    uint32_t count = atomic_load_explicit(&store->state_count, memory_order_acquire);
    for (uint32_t s = 0; s < count; s++)
        if (strcmp(store->states[s]->name, name) == 0) return store->states[s];
    return NULL;
}

int sk_state_add(sk_store *store, const char *name, int kind, const char *key_type, int flags,
                 uint32_t *id) {
    sk_key_type type;
    size_t name_len = strlen(name);
    if (name_len == 0 || name_len > SK_NAME_BYTES_MAX || !sk_name_is_utf8(name))
        return sk_fail(SK_BAD_ARGUMENT, "a state's name is 1 to %d bytes of UTF-8",
                       SK_NAME_BYTES_MAX);
    if (!sk_kind_is_known(kind)) return sk_fail(SK_BAD_ARGUMENT, "there is no kind %d", kind);
    if (flags & ~SK_TIMED) return sk_fail(SK_BAD_ARGUMENT, "there are no flags %d", flags);
    if (flags != 0 && !sk_kinds[kind]->may_expire)
        return sk_fail(SK_BAD_ARGUMENT, "%s do not expire", sk_kinds[kind]->name);
    int status = sk_key_type_parse(key_type, &type);
    if (status != SK_OK) return status;
    pthread_mutex_lock(&store->states_lock);
    sk_state *state = sk_state_find(store, name);
    if (state == NULL) {
        status = new_state(store, name, kind, &type, flags, id);
    } else if (state->kind == kind && state->flags == flags &&
               strcmp(state->key_type.text, type.text) == 0) {
        *id = state->id;
    } else {
        status =
            sk_fail(SK_SCHEMA,
                    "state '%.80s' exists with kind %s%s and key type %s; asked for were kind %s%s "
                    "and key type %s",
                    name, sk_kinds[state->kind]->name, state->flags & SK_TIMED ? ", timed," : "",
                    state->key_type.text, sk_kinds[kind]->name, flags & SK_TIMED ? ", timed," : "",
                    type.text);
    }
    pthread_mutex_unlock(&store->states_lock);
    return status;
}

uint32_t sk_leaf_count(sk_store *store) { return store->leaf_count; }

uint32_t sk_state_count(sk_store *store) { return store->state_count; }

int sk_state_info(sk_store *store, uint32_t id, const char **name, int *kind, const char **key_type,
                  int *flags) {
    sk_state *state = sk_state_at(store, id);
    if (state == NULL) return SK_BAD_ARGUMENT;
    *name = state->name;
    *kind = state->kind;
    *key_type = state->key_type.text;
    *flags = state->flags;
    return SK_OK;
}

/* ---- Figures ---- */

int sk_since_fail(sk_store *store, uint32_t since) {
    return sk_fail(SK_BAD_ARGUMENT, "epoch %u is yet to come (it is %u now)", since,
                   sk_epoch(store));
}

int sk_leaf_range_check(sk_store *store, uint32_t from, uint32_t to) {
    if (from <= to && to <= store->leaf_count) return SK_OK;
    return sk_fail(SK_BAD_ARGUMENT, "leaves %u to %u are not within 0 to %u", from, to,
                   store->leaf_count);
}

int sk_stats_read(sk_store *store, uint32_t state_id, uint32_t from, uint32_t to, sk_stats *stats) {
    *stats = (sk_stats){0};
    int status = sk_leaf_range_check(store, from, to);
    if (status != SK_OK) return status;
    if (state_id != SK_ALL_STATES && sk_state_at(store, state_id) == NULL) return SK_BAD_ARGUMENT;
    uint32_t first = state_id == SK_ALL_STATES ? 0 : state_id;
    bool is_all = to - from == store->leaf_count;
    for (uint32_t i = from; i < to; i++) {
        sk_leaf *leaf = &store->leaves[i];
        sk_leaf_lock(leaf);
        uint32_t last = state_id == SK_ALL_STATES ? store->state_count : state_id + 1;
        for (uint32_t s = first; s < last; s++) {
            const sk_table *table = &store->states[s]->tables[i];
            stats->entries += table->live;
            stats->tombstones += table->tombs;
            stats->dirty += table->dirty;
            stats->bytes += table->mem.used;
            stats->flooded += table->is_flooded;
            if (is_all) stats->operations += table->operations;
        }
        stats->leaves[sk_leaf_seen(leaf)]++;
        sk_leaf_unlock(leaf);
    }
    uint32_t last = state_id == SK_ALL_STATES ? store->state_count : state_id + 1;
    for (uint32_t s = first; s < last && is_all; s++)
        stats->operations += store->states[s]->operations;
    return SK_OK;
}

int sk_leaf_heat(sk_store *store, uint64_t *out) {
    for (uint32_t i = 0; i < store->leaf_count; i++) {
        sk_leaf *leaf = &store->leaves[i];
        sk_leaf_lock(leaf);
        out[i] = store->records[i];
        for (uint32_t s = 0; s < store->state_count; s++)
            out[i] += store->states[s]->tables[i].operations;
        sk_leaf_unlock(leaf);
    }
    return SK_OK;
}

int sk_leaf_sizes(sk_store *store, uint32_t state_id, uint64_t *entries, uint64_t *bytes) {
    if (state_id != SK_ALL_STATES && sk_state_at(store, state_id) == NULL) return SK_BAD_ARGUMENT;
    uint32_t first = state_id == SK_ALL_STATES ? 0 : state_id;
    for (uint32_t i = 0; i < store->leaf_count; i++) {
        uint64_t live = 0, used = 0;
        sk_leaf_lock(&store->leaves[i]);
        uint32_t last = state_id == SK_ALL_STATES ? store->state_count : state_id + 1;
        for (uint32_t s = first; s < last; s++) {
            live += store->states[s]->tables[i].live;
            used += store->states[s]->tables[i].mem.used;
        }
        sk_leaf_unlock(&store->leaves[i]);
        if (entries != NULL) entries[i] = live;
        if (bytes != NULL) bytes[i] = used;
    }
    return SK_OK;
}

uint64_t sk_bytes_used(sk_store *store) {
    return atomic_load_explicit(&store->budget.used, memory_order_relaxed);
}

int sk_bytes_limit(sk_store *store, uint64_t bytes_max) {
    atomic_store_explicit(&store->budget.max, bytes_max, memory_order_relaxed);
    return SK_OK;
}

uint32_t sk_epoch(sk_store *store) { return atomic_load(&store->epoch); }

int sk_track(sk_store *store, uint32_t epoch) {
    pthread_mutex_lock(&store->snapshots_lock);
    uint32_t now = store->keep_after;
    int status = SK_OK;
    if (epoch == SK_NO_TRACKING)
        store->keep_after = epoch;
    else if (epoch >= store->epoch)
        status = sk_fail(SK_BAD_ARGUMENT, "epoch %u has not ended yet (it is %u now)", epoch,
                         store->epoch);
    else if (now == SK_NO_TRACKING || epoch > now)
        store->keep_after = epoch;
    pthread_mutex_unlock(&store->snapshots_lock);
    return status;
}

int sk_changed_leaves(sk_store *store, uint32_t since, uint8_t *changed) {
    if (since > store->epoch) return sk_since_fail(store, since);
    for (uint32_t i = 0; i < store->leaf_count; i++) {
        sk_leaf_lock(&store->leaves[i]);
        changed[i] = store->leaves[i].changed > since;
        sk_leaf_unlock(&store->leaves[i]);
    }
    return SK_OK;
}
