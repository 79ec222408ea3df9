/*
 * decode.c: blocks into leaves.
 *
 *   1. decode   every block into a table of its own, aside; then every byte has been checked
 *   2. declare  those states of the blocks that are new
 *   3. reserve  room where tables are to be merged
 *   4. commit   the tables, by moves alone: it cannot fail
 *
 * So if a block is bad, or memory is short, the leaf stays as it was. The mode (sk_leaf_decode)
 * says what a table replaces, and which entry wins where both have a key.
 */
#include "failpoint.h"
#include "store.h"

static sk_table *table_of(sk_store *store, uint32_t state_id, uint32_t leaf_no) {
    sk_table *table = &store->states[state_id]->tables[leaf_no];
    table->mem.budget = &store->budget;
    return table;
}

/* ---- Aside ---- */

/* A block turned into a table, not yet in the store. */
typedef struct fresh {
    char name[SK_NAME_BYTES_MAX + 1];
    sk_key_type key_type;
    int kind, flags;
    uint32_t state_id; /* once all blocks are known to be good */
    bool is_delta;
    sk_table table;
} fresh;

typedef struct fresh_list {
    fresh *items;
    size_t count, room;
    sk_budget own;     /* counts their memory if the store has no limit: otherwise threads that
                        * decode leaves in parallel would take turns at the store's counter */
    sk_budget *budget; /* own, or the store's */
    bool is_declared;  /* the states are declared already, and the items have no names */
} fresh_list;

static void free_fresh(fresh_list *list) {
    for (size_t k = 0; k < list->count; k++)
        sk_table_clear(&list->items[k].table, list->items[k].kind);
    sk_raw_free(list->items);
}

static fresh *add_fresh(fresh_list *list) {
    if (list->count == list->room) {
        size_t room = list->room == 0 ? 4 : 2 * list->room;
        fresh *items = sk_raw_alloc(room * sizeof *items);
        if (items == NULL) return NULL;
        if (list->count > 0) memcpy(items, list->items, list->count * sizeof *items);
        sk_raw_free(list->items);
        list->items = items;
        list->room = room;
    }
    fresh *item = &list->items[list->count];
    *item = (fresh){.table.mem.budget = list->budget};
    return item;
}

/* SK_SCHEMA if the store has a state of that name and another type; declares nothing. */
static int check_schema(sk_store *store, const sk_block_info *info) {
    uint32_t id;
    if (sk_state_find(store, info->name) == NULL) return SK_OK;
    return sk_state_add(store, info->name, info->kind, info->key_type,
                        info->is_timed ? SK_TIMED : 0, &id);
}

/* Decodes the block at the start of `blocks`; *size is its length. */
static int decode_one(sk_store *store, uint32_t leaf_no, const uint8_t *blocks, size_t len,
                      fresh_list *list, size_t *size) {
    sk_block_info info;
    int status = SK_FAILPOINT(LEAF_DECODE);
    if (status == SK_OK) status = sk_block_read(blocks, len, &info);
    if (status != SK_OK) return status;
    if (info.leaf != leaf_no || info.leaf_bits != store->leaf_bits)
        return sk_fail(SK_CORRUPT, "block of leaf %u of 2^%u where leaf %u of 2^%u was expected",
                       info.leaf, info.leaf_bits, leaf_no, store->leaf_bits);
    fresh *item = add_fresh(list);
    if (item == NULL) return SK_NO_MEMORY;
    if ((status = check_schema(store, &info)) != SK_OK) return status;
    for (size_t k = 0; k < list->count; k++)
        if (strcmp(list->items[k].name, info.name) == 0)
            return sk_fail(SK_CORRUPT, "two blocks of state '%.80s' for leaf %u", info.name,
                           leaf_no);
    strcpy(item->name, info.name);
    sk_key_type_parse(info.key_type, &item->key_type);
    item->kind = info.kind;
    item->flags = info.is_timed ? SK_TIMED : 0;
    item->is_delta = info.is_delta;
    /* is_whole is false, so that tombstones stay while the table is on its own */
    sk_table_env env = {.key_type = &item->key_type,
                        .kind = info.kind,
                        .is_timed = info.is_timed,
                        .leaf_bits = store->leaf_bits,
                        .keep_after = SK_NO_TRACKING};
    status = sk_block_decode(blocks, &info, &env, &store->leaves[leaf_no].seq, &item->table);
    if (status == SK_OK) list->count++;
    *size = info.size;
    return status;
}

static void begin_list(sk_store *store, fresh_list *list) {
    list->own.is_private = true;
    list->budget = atomic_load(&store->budget.max) == 0 ? &list->own : &store->budget;
}

/* From now on the memory of the tables is counted as the store's. */
static void end_list(sk_store *store, fresh_list *list) {
    if (list->budget == &list->own) sk_budget_join(&store->budget, &list->own);
    for (size_t k = 0; k < list->count; k++) list->items[k].table.mem.budget = &store->budget;
}

static int decode_all(sk_store *store, uint32_t leaf_no, const uint8_t *blocks, size_t len,
                      fresh_list *list) {
    begin_list(store, list);
    for (size_t at = 0, size = 0; at < len; at += size) {
        int status = decode_one(store, leaf_no, blocks + at, len - at, list, &size);
        if (status != SK_OK) return status;
    }
    end_list(store, list);
    return SK_OK;
}

/* ---- Into the leaf ---- */

static void swap_in(sk_store *store, uint32_t leaf_no, fresh *item) {
    sk_table *table = table_of(store, item->state_id, leaf_no);
    sk_table_clear(table, store->states[item->state_id]->kind);
    item->table.forgot = table->forgot;
    item->table.operations = table->operations;
    *table = item->table;
    item->table = (sk_table){.mem.budget = &store->budget};
}

/* Room for what is to be merged, so that committing cannot fail. */
static int reserve_all(sk_store *store, uint32_t leaf_no, fresh_list *list) {
    for (size_t k = 0; k < list->count; k++) {
        fresh *item = &list->items[k];
        sk_table *table = table_of(store, item->state_id, leaf_no);
        if (table->live + table->tombs == 0) continue; /* will be swapped */
        sk_table_env env;
        sk_env_set_held(&env, store, store->states[item->state_id], &store->leaves[leaf_no], 0);
        int status = sk_table_reserve(table, &env, item->table.live + item->table.tombs);
        if (status != SK_OK) return status;
    }
    return SK_OK;
}

static void commit_replace(sk_store *store, uint32_t leaf_no, fresh_list *list, uint32_t epoch) {
    sk_leaf *leaf = &store->leaves[leaf_no];
    for (uint32_t s = 0; s < store->state_count; s++)
        sk_table_clear(&store->states[s]->tables[leaf_no], store->states[s]->kind);
    for (size_t k = 0; k < list->count; k++) swap_in(store, leaf_no, &list->items[k]);
    leaf->residency = SK_WHOLE;
    leaf->is_writing = false;
    sk_filter_drop(store, leaf_no);
    sk_leaf_end_deltas(leaf, epoch);
}

static void commit_merge(sk_store *store, uint32_t leaf_no, fresh_list *list, bool over) {
    for (size_t k = 0; k < list->count; k++) {
        fresh *item = &list->items[k];
        sk_table *table = table_of(store, item->state_id, leaf_no);
        sk_table_env env;
        sk_env_set_held(&env, store, store->states[item->state_id], &store->leaves[leaf_no], 0);
        if (table->live + table->tombs == 0 || (over && !item->is_delta))
            swap_in(store, leaf_no, item);
        else
            sk_table_merge(table, &item->table, &env, over);
        sk_table_purge(table, &env);
    }
}

/* Declares the states of blocks that are all good. If memory is short, the first ones may stay
 * declared. */
static int declare_all(sk_store *store, fresh_list *list) {
    int status = SK_OK;
    for (size_t k = 0; k < list->count && status == SK_OK; k++) {
        fresh *item = &list->items[k];
        status = sk_state_add(store, item->name, item->kind, item->key_type.text, item->flags,
                              &item->state_id);
    }
    return status;
}

static int commit_decode(sk_store *store, uint32_t leaf_no, fresh_list *list, int mode,
                         uint32_t epoch) {
    sk_leaf *leaf = &store->leaves[leaf_no];
    for (size_t k = 0; k < list->count && mode == SK_REPLACE; k++)
        if (list->items[k].is_delta)
            return sk_fail(SK_BAD_ARGUMENT, "a delta block cannot replace leaf %u", leaf_no);
    int status = SK_FAILPOINT(LEAF_COMMIT);
    if (status == SK_OK && !list->is_declared) status = declare_all(store, list);
    if (status != SK_OK) return status;
    for (size_t k = 0; k < list->count; k++)
        sk_timers_came(store->states[list->items[k].state_id], leaf_no);
    if (mode == SK_REPLACE) {
        commit_replace(store, leaf_no, list, epoch);
        return SK_OK;
    }
    if ((status = reserve_all(store, leaf_no, list)) != SK_OK) return status;
    int held = sk_leaf_held(leaf);
    sk_leaf_hold(leaf, held == SK_ABSENT && list->count > 0 ? SK_PARTIAL : held);
    commit_merge(store, leaf_no, list, mode == SK_OVER);
    if (mode == SK_OVER) sk_leaf_end_deltas(leaf, epoch);
    if (mode == SK_UNDER_ALL) sk_leaf_set_residency(store, leaf_no, SK_WHOLE, epoch);
    return SK_OK;
}

int sk_leaf_decode(sk_store *store, uint32_t leaf_no, const uint8_t *blocks, size_t len, int mode) {
    if (leaf_no >= store->leaf_count) return sk_leaf_range_check(store, leaf_no, leaf_no + 1);
    if (mode < SK_REPLACE || mode > SK_OVER)
        return sk_fail(SK_BAD_ARGUMENT, "there is no decode mode %d", mode);
    uint32_t epoch;
    fresh_list list = {0};
    int status = sk_leaf_lock_write(store, leaf_no, &epoch);
    if (status != SK_OK) return status;
    /* A shut leaf may be completed, so that all of it can be handed over; nothing else may change
     * it. */
    const sk_leaf *leaf = &store->leaves[leaf_no];
    bool is_under = mode == SK_UNDER || mode == SK_UNDER_ALL;
    if ((mode != SK_REPLACE && leaf->residency == SK_AWAY) ||
        (!is_under && leaf->residency == SK_LEAF_SHUT))
        status = sk_leaf_refuse(leaf, leaf_no);
    else
        status = decode_all(store, leaf_no, blocks, len, &list);
    /* A whole leaf has nothing to learn from its home: a late or repeated answer must not bring
     * back what was deleted here in the meantime. */
    bool is_late = is_under && sk_leaf_held(leaf) == SK_WHOLE;
    if (status == SK_OK && !is_late) status = commit_decode(store, leaf_no, &list, mode, epoch);
    free_fresh(&list);
    sk_leaf_unlock(&store->leaves[leaf_no]);
    return status;
}

/* ---- Many leaves, as they lie in a pack ---- */

int sk_frames_load(sk_store *store, const uint8_t *data, size_t len, const uint8_t *id,
                   uint64_t offset, const uint64_t *places, size_t count, uint64_t *done) {
    for (*done = 0; *done < count; ++*done) {
        const uint64_t *place = places + *done * 3;
        uint64_t leaf = place[0], at = place[1], size = place[2], bad;
        if (leaf > UINT32_MAX || at > len || size > len - at)
            return sk_fail(SK_BAD_ARGUMENT, "place %llu is outside of the bytes",
                           (unsigned long long)*done);
        int status = sk_frames_verify(data + at, size, id, offset + at, &bad);
        if (status == SK_OK)
            status = sk_leaf_decode(store, (uint32_t)leaf, data + at, size, SK_UNDER_ALL);
        if (status != SK_OK) return status;
    }
    return SK_OK;
}

/* ---- Parts of blocks that hold many leaves ---- */

/* Adds a table for some entries of a state, and sets the env with which entries are added to it.
 * NULL if memory is short. */
static fresh *add_fresh_of(sk_store *store, uint32_t state_id, fresh_list *list,
                           sk_table_env *env) {
    const sk_state *state = store->states[state_id];
    *env = (sk_table_env){.key_type = &state->key_type,
                          .kind = state->kind,
                          .is_timed = state->flags & SK_TIMED,
                          .leaf_bits = store->leaf_bits,
                          .keep_after = SK_NO_TRACKING};
    fresh *item = add_fresh(list);
    if (item == NULL) return NULL;
    item->kind = state->kind;
    item->is_delta = true;
    item->state_id = state_id;
    return item;
}

/* Decodes a part into a table. If the list already has a table of that state, the new entries go
 * under those of that table. */
static int decode_part(sk_store *store, uint32_t leaf_no, const sk_part *part, fresh_list *list) {
    sk_table_env env;
    int status = SK_FAILPOINT(LEAF_DECODE);
    if (status != SK_OK) return status;
    fresh *item = add_fresh_of(store, part->state_id, list, &env);
    if (item == NULL) return SK_NO_MEMORY;
    status = sk_block_decode_part(part->block, part->info, part->from, part->to, &env,
                                  &store->leaves[leaf_no].seq, &item->table);
    if (status != SK_OK) return status;
    for (size_t k = 0; k < list->count; k++) {
        fresh *other = &list->items[k];
        if (other->state_id != part->state_id) continue;
        status = sk_table_reserve(&other->table, &env, item->table.live + item->table.tombs);
        if (status == SK_OK)
            sk_table_merge(&other->table, &item->table, &env, false);
        else
            sk_table_clear(&item->table, item->kind);
        return status;
    }
    list->count++;
    return SK_OK;
}

int sk_leaf_fill_locked(sk_store *store, uint32_t leaf_no, const sk_part *parts, size_t count,
                        uint32_t epoch) {
    fresh_list list = {.is_declared = true};
    int status = SK_OK;
    begin_list(store, &list);
    for (size_t k = 0; k < count && status == SK_OK; k++)
        status = decode_part(store, leaf_no, &parts[k], &list);
    if (status == SK_OK) {
        end_list(store, &list);
        status = commit_decode(store, leaf_no, &list, SK_UNDER, epoch);
    }
    free_fresh(&list);
    return status;
}

/* ---- Single entries ---- */

/* Adds a tombstone: it is known now that the key has no entry. */
static int add_missing(const sk_found *found, const sk_table_env *env, sk_table *table) {
    sk_slot *slot = sk_table_insert_reserved(table, env, found->hash, found->key, found->key_len);
    if (slot == NULL) return sk_alloc_status();
    slot->marks = SK_MARK_TOMB;
    if (env->is_timed) sk_slot_set_stamp(slot, 0);
    table->tombs++;
    return SK_OK;
}

static int decode_found(sk_store *store, uint32_t leaf_no, uint32_t state_id, const sk_found *found,
                        size_t count, fresh_list *list) {
    sk_table_env env;
    int status = SK_FAILPOINT(LEAF_DECODE);
    if (status != SK_OK) return status;
    fresh *item = add_fresh_of(store, state_id, list, &env);
    if (item == NULL) return SK_NO_MEMORY;
    list->count++; /* counted at once, so that it is freed with the list, whatever happens */
    uint64_t *seq = &store->leaves[leaf_no].seq;
    status = sk_table_reserve(&item->table, &env, (uint32_t)count);
    for (size_t k = 0; k < count && status == SK_OK; k++) {
        const sk_found *one = &found[k];
        status = one->block == NULL ? add_missing(one, &env, &item->table)
                                    : sk_block_decode_entry(one->block, one->info, one->at, &env,
                                                            seq, &item->table);
    }
    return status;
}

int sk_leaf_fill_found_locked(sk_store *store, uint32_t leaf_no, uint32_t state_id,
                              const sk_found *found, size_t count, uint32_t epoch) {
    fresh_list list = {.is_declared = true};
    begin_list(store, &list);
    int status = decode_found(store, leaf_no, state_id, found, count, &list);
    if (status == SK_OK) {
        end_list(store, &list);
        status = commit_decode(store, leaf_no, &list, SK_UNDER, epoch);
    }
    free_fresh(&list);
    return status;
}
