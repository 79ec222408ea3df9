/*
 * leaf.c: leaves as units: encoded and decoded, marked, cleared, evicted, taken out of one store
 * and put into another.
 */
#include "failpoint.h"
#include "store.h"

#include <stdlib.h>

static sk_table *table_of(sk_store *store, uint32_t state_id, uint32_t leaf_no) {
    sk_table *table = &store->states[state_id]->tables[leaf_no];
    table->mem.budget = &store->budget;
    return table;
}

static sk_table_env env_at(sk_store *store, uint32_t state_id, uint32_t leaf_no, uint32_t epoch) {
    sk_table_env env;
    sk_env_set(&env, store, store->states[state_id], &store->leaves[leaf_no], epoch);
    env.is_whole = sk_leaf_held(&store->leaves[leaf_no]) == SK_WHOLE; /* shut or not */
    return env;
}

/* Every table of the leaf counts as changed without a trace: deltas must not reach back. */
static void forget_leaf(sk_leaf *leaf, uint32_t epoch) { leaf->forgot = leaf->changed = epoch; }

int sk_leaf_forget(sk_store *store, uint32_t leaf_no) {
    uint32_t epoch;
    if (leaf_no >= store->leaf_count) return sk_leaf_range_check(store, leaf_no, leaf_no + 1);
    int status = sk_leaf_lock_write(store, leaf_no, &epoch);
    if (status != SK_OK) return status;
    forget_leaf(&store->leaves[leaf_no], epoch);
    sk_leaf_unlock(&store->leaves[leaf_no]);
    return SK_OK;
}

/* ---- Residency ---- */

int sk_leaf_residency(sk_store *store, uint32_t leaf_no) {
    if (leaf_no >= store->leaf_count) return -sk_leaf_range_check(store, leaf_no, leaf_no + 1);
    sk_leaf_lock(&store->leaves[leaf_no]);
    int residency = sk_leaf_held(&store->leaves[leaf_no]);
    sk_leaf_unlock(&store->leaves[leaf_no]);
    return residency;
}

int sk_leaf_residencies(sk_store *store, const uint32_t *leaves, uint64_t n, uint8_t *out) {
    for (uint64_t i = 0; i < n; i++) {
        if (leaves[i] >= store->leaf_count)
            return sk_leaf_range_check(store, leaves[i], leaves[i] + 1);
        out[i] = (uint8_t)sk_leaf_held(&store->leaves[leaves[i]]);
    }
    return SK_OK;
}

static void set_residency(sk_store *store, uint32_t leaf_no, int residency, uint32_t epoch) {
    bool drops = residency == SK_ABSENT || residency == SK_AWAY;
    sk_leaf *leaf = &store->leaves[leaf_no];
    sk_leaf_hold(leaf, residency);
    for (uint32_t s = 0; s < store->state_count && sk_bytes_used(store) > 0; s++) {
        sk_table *table = &store->states[s]->tables[leaf_no];
        if (table->groups == 0) continue;
        sk_table_env env = env_at(store, s, leaf_no, epoch);
        if (residency == SK_WHOLE) sk_table_purge(table, &env);
        if (drops) sk_table_clear(table, env.kind);
    }
    if (drops) {
        leaf->residency = (uint8_t)residency; /* nothing is left to shut in */
        leaf->is_writing = false;
        sk_filter_drop(store, leaf_no);
        forget_leaf(leaf, epoch);
    }
}

int sk_leaf_mark(sk_store *store, uint32_t from, uint32_t to, int residency) {
    int status = sk_leaf_range_check(store, from, to);
    if (status != SK_OK) return status;
    if (residency < SK_WHOLE || residency > SK_AWAY)
        return sk_fail(SK_BAD_ARGUMENT, "there is no residency %d", residency);
    uint32_t epoch;
    if ((status = sk_leaves_lock_write(store, from, to, &epoch)) != SK_OK) return status;
    for (uint32_t i = from; i < to && (residency == SK_WHOLE || residency == SK_PARTIAL); i++)
        if (store->leaves[i].residency == SK_LEAF_SHUT)
            status = sk_leaf_refuse(&store->leaves[i], i);
    for (uint32_t i = from; i < to && status == SK_OK; i++)
        set_residency(store, i, residency, epoch);
    sk_leaves_unlock(store, from, to);
    return status;
}

static void entomb_all(sk_table *table, int kind, uint32_t epoch) {
    sk_slot *slot;
    for (size_t at = 0; (slot = sk_table_next(table, &at)) != NULL;) {
        if (!sk_slot_is_live(slot)) continue;
        sk_value_free(&table->mem, kind, slot->value);
        slot->value = (sk_value){0};
        slot->marks |= SK_MARK_TOMB;
        slot->epoch = epoch;
        sk_slot_mark_dirty(table, slot);
    }
    table->tombs += table->live;
    table->live = 0;
}

int sk_clear(sk_store *store, uint32_t state_id, uint32_t from, uint32_t to, int flags) {
    int status = sk_leaf_range_check(store, from, to);
    if (status != SK_OK) return status;
    sk_state *state = sk_state_at(store, state_id);
    if (state == NULL) return SK_BAD_ARGUMENT;
    uint32_t epoch;
    if ((status = sk_leaves_lock_write(store, from, to, &epoch)) != SK_OK) return status;
    for (uint32_t i = from; i < to; i++) {
        int residency = store->leaves[i].residency;
        bool is_part = residency == SK_PARTIAL || residency == SK_ABSENT;
        if (residency == SK_LEAF_EXPECTED || (is_part && !(flags & SK_BLIND))) status = SK_UNKNOWN;
    }
    for (uint32_t i = from; i < to && status == SK_OK; i++) {
        sk_table *table = &state->tables[i];
        /* A table of a leaf that is not whole may be empty here and full at home, or have been: it
         * counts as changed all the same, or the next delta would not mention it. */
        int residency = store->leaves[i].residency;
        bool is_empty = table->live + table->tombs == 0;
        if (residency >= SK_AWAY || (residency == SK_WHOLE && is_empty)) continue;
        if (store->writes_back && residency == SK_WHOLE) {
            entomb_all(table, state->kind, epoch); /* the home has them still, and must be told */
            sk_leaf_note_dirty(store, i);
        } else {
            sk_table_clear(table, state->kind);
        }
        table->forgot = epoch;
        store->leaves[i].changed = epoch;
    }
    sk_leaves_unlock(store, from, to);
    return status;
}

/* ---- Encoding and decoding ---- */

static int compare_names(const void *a, const void *b) {
    sk_state *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

/* All states by name, whatever the order in which they were declared: equal state gives equal
 * bytes. Returns how many there are. */
static uint32_t states_by_name(sk_store *store, sk_state **states) {
    uint32_t count = store->state_count;
    for (uint32_t s = 0; s < count; s++) states[s] = store->states[s];
    if (count > 1) qsort(states, count, sizeof *states, compare_names);
    return count;
}

int sk_leaf_encode_locked(sk_store *store, uint32_t leaf_no, uint32_t state_id, sk_select select,
                          uint32_t since, const int64_t *watermark, sk_buf *buf) {
    size_t start = buf->len;
    const sk_leaf *leaf = &store->leaves[leaf_no];
    /* It has no entries; nor is it empty, which a delta would say. */
    if (leaf->residency == SK_AWAY) return SK_OK;
    /* A home is told what has expired. A delta has such entries with their stamps, which do as
     * well, and must not touch them: other snapshots may need them. */
    if (select == SK_SELECT_DIRTY || select == SK_SELECT_COLD) sk_leaf_expire(store, leaf_no);
    sk_state *states[SK_STATES_MAX];
    uint32_t count = 1;
    if (state_id == SK_ALL_STATES)
        count = states_by_name(store, states);
    else
        states[0] = store->states[state_id];
    int status = SK_OK;
    for (uint32_t s = 0; s < count && status == SK_OK; s++) {
        sk_table_env env;
        sk_env_set(&env, store, states[s], leaf, 0);
        env.is_whole = sk_leaf_held(leaf) == SK_WHOLE; /* shut or not */
        sk_timing timing;
        if (env.is_timed) {
            timing = sk_timing_of(store, states[s]);
            if (watermark != NULL && states[s]->clock == SK_EVENT_TIME) timing.now = *watermark;
            env.timing = &timing;
        }
        const sk_table *table = &states[s]->tables[leaf_no];
        /* A table that lost entries without a trace since then has no delta: all of it is written,
         * as a full block, even if nothing is left of it. */
        bool has_delta = select != SK_SELECT_SINCE || sk_forgot(leaf, table) <= since;
        status = SK_FAILPOINT(LEAF_ENCODE);
        if (status == SK_OK)
            status = sk_block_encode(table, &env, states[s]->name, leaf_no,
                                     has_delta ? select : SK_SELECT_REST, since, buf);
    }
    if (status != SK_OK) buf->len = start;
    return status;
}

int64_t sk_leaf_encode(sk_store *store, uint32_t leaf_no, uint32_t state_id, uint32_t since,
                       sk_buf *buf) {
    if (leaf_no >= store->leaf_count) return -sk_leaf_range_check(store, leaf_no, leaf_no + 1);
    if (state_id != SK_ALL_STATES && sk_state_at(store, state_id) == NULL) return -SK_BAD_ARGUMENT;
    if (since > store->epoch) return -sk_since_fail(store, since);
    size_t start = buf->len;
    sk_leaf_lock(&store->leaves[leaf_no]);
    int status = sk_leaf_encode_locked(
        store, leaf_no, state_id, since > 0 ? SK_SELECT_SINCE : SK_SELECT_ALL, since, NULL, buf);
    sk_leaf_unlock(&store->leaves[leaf_no]);
    return status == SK_OK ? (int64_t)(buf->len - start) : -status;
}

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
    sk_budget own;     /* counts their memory where there is no limit to watch: threads that decode
                        * leaves side by side would take turns at the store's counter */
    sk_budget *budget; /* own, or the store's */
    bool is_declared;  /* their states are, and the items have no names */
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

/* Decodes the block at the head of `blocks`; *size is how long it is. */
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
    /* not whole: tombstones stay while the table is on its own */
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

/* From now on their memory is the store's. */
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
        sk_table_env env = env_at(store, item->state_id, leaf_no, 0);
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
    forget_leaf(leaf, epoch);
}

static void commit_merge(sk_store *store, uint32_t leaf_no, fresh_list *list, bool over) {
    for (size_t k = 0; k < list->count; k++) {
        fresh *item = &list->items[k];
        sk_table *table = table_of(store, item->state_id, leaf_no);
        sk_table_env env = env_at(store, item->state_id, leaf_no, 0);
        if (table->live + table->tombs == 0 || (over && !item->is_delta))
            swap_in(store, leaf_no, item);
        else
            sk_table_merge(table, &item->table, &env, over);
        sk_table_purge(table, &env);
    }
}

/* Declares the states of blocks that are all good; without memory for it the first may stay. */
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
    if (mode == SK_OVER) forget_leaf(leaf, epoch);
    if (mode == SK_UNDER_ALL) set_residency(store, leaf_no, SK_WHOLE, epoch);
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
    /* A shut leaf may be completed, so that all of it can go; nothing else may change it. */
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

/* ---- Parts of blocks that hold many leaves ---- */

/* Decodes a part into a table; one more of a state that the list has goes under what that one has.
 */
static int decode_part(sk_store *store, uint32_t leaf_no, const sk_part *part, fresh_list *list) {
    const sk_state *state = store->states[part->state_id];
    sk_table_env env = {.key_type = &state->key_type,
                        .kind = state->kind,
                        .is_timed = state->flags & SK_TIMED,
                        .leaf_bits = store->leaf_bits,
                        .keep_after = SK_NO_TRACKING};
    int status = SK_FAILPOINT(LEAF_DECODE);
    if (status != SK_OK) return status;
    fresh *item = add_fresh(list);
    if (item == NULL) return SK_NO_MEMORY;
    item->kind = state->kind;
    item->is_delta = true;
    item->state_id = part->state_id;
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

/* ---- Eviction ---- */

/* Moves the hand through one table until enough is free; *slot_at is where it goes on. */
static uint64_t evict_table(sk_at *at, size_t *slot_at, uint64_t bytes_wanted) {
    sk_table *table = at->table;
    uint64_t was = table->mem.used, slots_freed = 0;
    sk_slot *slot;
    while ((slot = sk_table_next(table, slot_at)) != NULL) {
        bool stays = slot->marks & (SK_MARK_DIRTY | SK_MARK_WRITING | SK_MARK_USED);
        /* a timer that is to fire must be in sight; that there is none need not be */
        if (at->env.kind == SK_TIMERS && sk_slot_is_live(slot)) stays = true;
        slot->marks &= (uint8_t)~SK_MARK_USED; /* of dirty ones too: SK_COLD asks */
        if (stays) continue;
        if (slot->epoch > table->forgot) table->forgot = slot->epoch;
        sk_table_remove(table, &at->env, slot);
        at->leaf->residency = SK_PARTIAL;
        at->env.is_whole = false;
        slots_freed++;
        if (was - table->mem.used + slots_freed * sizeof(sk_slot) >= bytes_wanted) break;
    }
    if (slot == NULL) *slot_at = 0;
    /* Numbers live in their slots: only a smaller array gives their memory back. */
    if (slots_freed > 0) sk_table_trim(table, &at->env, true);
    return was - table->mem.used;
}

int64_t sk_evict(sk_store *store, uint64_t bytes_wanted) {
    pthread_mutex_lock(&store->clock_lock);
    uint64_t freed = 0;
    int status = SK_OK;
    /* Two rounds: the first may only clear marks. */
    sk_hand *hand = &store->evict_hand;
    for (uint64_t step = 0; step < 2 * (uint64_t)store->leaf_count + 1 && status == SK_OK; step++) {
        uint32_t leaf_no = hand->leaf, epoch;
        if ((status = sk_leaf_lock_write(store, leaf_no, &epoch)) != SK_OK) break;
        bool is_shut = store->leaves[leaf_no].residency == SK_LEAF_SHUT;
        while (!is_shut && hand->state < store->state_count && freed < bytes_wanted) {
            sk_state *state = store->states[hand->state];
            sk_at at;
            if (state->tables[leaf_no].groups > 0) {
                sk_at_set(&at, store, state, leaf_no, epoch);
                freed += evict_table(&at, &hand->slot, bytes_wanted - freed);
            } else {
                hand->slot = 0;
            }
            if (hand->slot == 0) hand->state++;
        }
        sk_leaf_unlock(&store->leaves[leaf_no]);
        if (freed >= bytes_wanted) break;
        hand->state = 0;
        hand->slot = 0;
        hand->leaf = leaf_no + 1 == store->leaf_count ? 0 : leaf_no + 1;
    }
    pthread_mutex_unlock(&store->clock_lock);
    return status == SK_OK ? (int64_t)freed : -status;
}

/* ---- Detaching and attaching ---- */

typedef struct detached_leaf {
    uint64_t seq;
    uint8_t residency; /* SK_LEAF_EXPECTED too */
} detached_leaf;

struct sk_leaves {
    uint32_t from, count;
    uint8_t leaf_bits;
    uint32_t epoch; /* of the store they came from: no entry in them is newer */
    uint32_t state_count;
    sk_budget budget;      /* what they hold */
    sk_state *states;      /* schemas; tables[count] each */
    detached_leaf *leaves; /* [count] */
};

#define TABLES_BYTES(leaves) ((size_t)(leaves)->count * sizeof(sk_table))
#define LEAVES_BYTES(leaves) ((size_t)(leaves)->count * sizeof(detached_leaf))

/* Everything but what the tables hold: they were never filled, or moved on. */
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

/* Moves the heads of `count` tables, where there is something in them, and returns the bytes they
 * hold. The caller sees to it that no delta of either side reaches back over this. */
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
    /* A state declared since new_leaves has no entries in leaves that were locked before it
     * could; one declared and filled in between is caught here. */
    if (store->state_count != leaves->state_count) {
        sk_leaves_unlock(store, from, to);
        free_shell(leaves);
        return sk_detach(store, from, to, out); /* at most SK_STATES_MAX times */
    }
    /* Nobody will tell the leaves how a write-back under way went: all of it is to be written. */
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
        forget_leaf(leaf, leaves->epoch);
    }
    sk_leaves_unlock(store, from, to);
    atomic_fetch_sub(&store->budget.used, leaves->budget.used);
    *out = leaves;
    return SK_OK;
}

/* The ids that the detached states have in this store; declares those that are new, but none if
 * one does not fit. */
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
    /* Last, because it declares states, and a refusal must leave none behind. */
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
        /* states that the leaves do not have, too: no delta of theirs reaches back over this */
        forget_leaf(leaf, epoch);
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
    /* Entries carry epochs of the other store; ours must not lie behind, or a delta taken later
     * would list them as changed again and again. */
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
    /* Back again if it must be: they were there, so no limit is in the way. */
    if (status == SK_OK || attach(source, *stuck, false) == SK_OK) *stuck = NULL;
    return status;
}
