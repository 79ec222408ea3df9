/* table.c: see table.h. */
#include "table.h"

static size_t bytes_of(uint32_t groups) {
    return (size_t)groups * (SK_GROUP * (sizeof(sk_slot) + 1) + sizeof(uint16_t));
}

/* The smallest number of groups that has room for n slots: 1, 2, 4, 8, then in finer steps 12, 16,
 * 24, 32, ... With finer steps small tables would rehash too often; with coarser ones large tables
 * would waste too much memory. */
static uint64_t groups_for(uint64_t n) {
    uint64_t groups = 1;
    while (groups * SK_GROUP_FILL < n) {
        bool is_power = (groups & (groups - 1)) == 0;
        groups += groups < 8 ? groups : is_power ? groups / 2 : groups / 3;
    }
    return groups;
}

static bool must_stay(const sk_slot *slot, const sk_table_env *env) {
    if (sk_slot_is_live(slot) || !env->is_whole) return true;
    if (env->writes_back && sk_slot_is_dirty(slot)) return true;
    return slot->epoch > env->keep_after;
}

static void free_key(sk_table *table, sk_slot *slot) {
    if (slot->key_len != SK_KEY_HEAP) return;
    sk_long_key *key = sk_slot_long_key(slot);
    sk_free(&table->mem, key, sizeof *key + key->len);
}

/* What an insertion meets on its way to a free slot; a lookup will meet it again. */
typedef struct way {
    uint32_t groups;
    uint32_t hits; /* slots with the key's tag, all of them other keys */
} way;

static bool is_too_long(way w) {
    return w.groups > SK_WAY_GROUPS_MAX || w.hits > SK_WAY_HITS_MAX(w.groups);
}

/* Takes the first free slot of the key's probe chain: it is tagged and counted as taken. */
static sk_slot *take_slot(sk_table *table, unsigned leaf_bits, uint64_t hash, way *w) {
    uint32_t group = sk_group_of(hash, leaf_bits, table->groups);
    uint32_t free_bits;
    for (;; group = group + 1 == table->groups ? 0 : group + 1) {
        const uint8_t *tags = table->tags + (size_t)group * SK_GROUP;
        w->groups++;
        for (uint32_t hits = sk_group_match(tags, sk_tag_of(hash)); hits != 0; hits &= hits - 1)
            w->hits++;
        free_bits = sk_group_match(tags, SK_TAG_EMPTY) | sk_group_match(tags, SK_TAG_DELETED);
        if (free_bits != 0) break;
    }
    size_t i = (size_t)group * SK_GROUP + (unsigned)__builtin_ctz(free_bits);
    table->taken += table->tags[i] == SK_TAG_EMPTY;
    table->tags[i] = sk_tag_of(hash);
    return table->slots + i;
}

/* The same for rehashing: in a table without deleted slots, and without counting. */
static inline sk_slot *take_fresh_slot(sk_table *table, unsigned leaf_bits, uint64_t hash) {
    uint32_t group = sk_group_of(hash, leaf_bits, table->groups), empty;
    while ((empty = sk_group_match(table->tags + (size_t)group * SK_GROUP, SK_TAG_EMPTY)) == 0)
        group = group + 1 == table->groups ? 0 : group + 1;
    size_t i = (size_t)group * SK_GROUP + (unsigned)__builtin_ctz(empty);
    table->tags[i] = sk_tag_of(hash);
    return table->slots + i;
}

static void drop_tombstone(sk_table *table, sk_slot *slot) {
    table->tombs--;
    table->dirty -= sk_slot_is_dirty(slot);
    if (slot->epoch > table->forgot) table->forgot = slot->epoch;
    free_key(table, slot);
}

/* Moves everything that must stay into a new array of `groups` groups. */
static int rehash(sk_table *table, const sk_table_env *env, uint64_t groups, bool flooded) {
    if (groups > SK_GROUPS_MAX) return sk_fail(SK_LIMIT, "a leaf has too many entries");
    /* Getting a smaller array must work even at the memory limit, because that is when entries are
     * evicted. */
    sk_slot *slots = groups < table->groups
                         ? sk_alloc_lines_anyway(&table->mem, bytes_of((uint32_t)groups))
                         : sk_alloc_lines(&table->mem, bytes_of((uint32_t)groups));
    if (slots == NULL) return sk_alloc_status();
    sk_table old = *table;
    table->slots = slots;
    table->tags = (uint8_t *)(slots + groups * SK_GROUP);
    table->groups = (uint32_t)groups;
    table->taken = 0;
    table->is_flooded = flooded;
    memset(table->tags, SK_TAG_EMPTY, groups * SK_GROUP);
    if (table->tracks_dirty) memset(sk_table_dirty_bits(table), 0, groups * sizeof(uint16_t));
    sk_slot *slot;
    for (size_t at = 0; (slot = sk_table_next(&old, &at)) != NULL;) {
        if (!must_stay(slot, env)) {
            drop_tombstone(table, slot);
            continue;
        }
        size_t len;
        const uint8_t *key = sk_slot_key(slot, &len);
        uint64_t hash = flooded ? sk_secret_hash(key, len) : sk_routing_of(env, key, len);
        sk_slot *to = take_fresh_slot(table, env->leaf_bits, hash);
        *to = *slot;
        table->taken++;
        if (table->tracks_dirty && sk_slot_is_dirty(to)) sk_table_set_dirty_bit(table, to, true);
        if (to->key_len == SK_KEY_HEAP) sk_slot_long_key(to)->check = (uint32_t)(hash >> 8);
    }
    sk_free_lines(&table->mem, old.slots, bytes_of(old.groups));
    return SK_OK;
}

/* Places entries by the secret hash from now on. False if memory is short: then entries stay where
 * they are. That is correct but slow, and the next costly insertion tries again. */
static bool go_secret(sk_table *table, const sk_table_env *env) {
    return !table->is_flooded && rehash(table, env, table->groups, true) == SK_OK;
}

int sk_table_reserve(sk_table *table, const sk_table_env *env, uint32_t more) {
    if ((uint64_t)table->taken + more <= (uint64_t)table->groups * SK_GROUP_FILL) return SK_OK;
    uint64_t need = (uint64_t)table->live + table->tombs + more;
    /* If deleted tags or stale tombstones fill the table, the same size may be enough. A quarter of
     * headroom keeps the next rehash from following at once. */
    uint64_t modest = groups_for(more == 1 ? need + need / 4 : need);
    uint64_t likely = env->expected == 0 ? 0 : groups_for(need + env->expected);
    if (likely > 4 * modest) likely = 4 * modest; /* the expectation may be wrong */
    if (likely > modest && rehash(table, env, likely, table->is_flooded) == SK_OK) return SK_OK;
    return rehash(table, env, modest, table->is_flooded);
}

static inline sk_slot *insert_key(sk_table *table, const sk_table_env *env, uint64_t routing,
                                  const uint8_t *key, size_t len, bool is_reserved) {
    sk_long_key *held = NULL;
    if (len > (env->is_timed ? SK_KEY_INLINE_TIMED : SK_KEY_INLINE)) {
        held = sk_alloc(&table->mem, sizeof *held + len);
        if (held == NULL) return NULL;
        held->len = (uint32_t)len;
        memcpy(held->data, key, len);
    }
    /* The last step that can fail: a table that has grown would not be as it was. */
    if (!is_reserved && sk_table_reserve(table, env, 1) != SK_OK) {
        sk_free(&table->mem, held, sizeof *held + len);
        return NULL;
    }
    uint64_t hash = sk_table_hash(table, routing, key, len);
    way w = {0};
    sk_slot *slot = take_slot(table, env->leaf_bits, hash, &w);
    *slot = (sk_slot){.key_len = (uint8_t)(held ? SK_KEY_HEAP : len)};
    if (held != NULL) {
        held->check = (uint32_t)(hash >> 8);
        memcpy(slot->key + 2, &held, sizeof held);
    } else if (len == 8) { /* an int: no call */
        memcpy(slot->key, key, 8);
    } else if (len > 0) { /* an empty key may come as NULL */
        memcpy(slot->key, key, len);
    }
    if (is_too_long(w) && go_secret(table, env))
        slot = sk_table_find(table, env->leaf_bits, routing, key, len);
    return slot;
}

sk_slot *sk_table_insert(sk_table *table, const sk_table_env *env, uint64_t routing,
                         const uint8_t *key, size_t len) {
    return insert_key(table, env, routing, key, len, false);
}

sk_slot *sk_table_insert_reserved(sk_table *table, const sk_table_env *env, uint64_t routing,
                                  const uint8_t *key, size_t len) {
    assert(table->taken < (uint64_t)table->groups * SK_GROUP_FILL);
    return insert_key(table, env, routing, key, len, true);
}

static void make_free(sk_table *table, sk_slot *slot) {
    size_t i = (size_t)(slot - table->slots);
    uint8_t *group = table->tags + i / SK_GROUP * SK_GROUP;
    /* A probe only goes past a group that has no empty slot. If this group has one, no probe ever
     * went past it, so one more empty slot cuts no chain. */
    bool is_passed = sk_group_match(group, SK_TAG_EMPTY) == 0;
    table->tags[i] = is_passed ? SK_TAG_DELETED : SK_TAG_EMPTY;
    table->taken -= !is_passed;
}

void sk_value_free(sk_mem *mem, int kind, sk_value value) {
    const sk_kind_ops *ops = sk_kinds[kind];
    if (ops->held == SK_BLOB)
        sk_free(mem, value.blob, sizeof(sk_blob) + value.blob->cap);
    else if (ops->held == SK_OWN)
        ops->free(mem, value);
}

void sk_table_remove(sk_table *table, const sk_table_env *env, sk_slot *slot) {
    if (sk_slot_is_live(slot)) {
        sk_value_free(&table->mem, env->kind, slot->value);
        table->live--;
    } else {
        table->tombs--;
    }
    table->dirty -= sk_slot_is_dirty(slot);
    free_key(table, slot);
    make_free(table, slot);
}

void sk_table_trim(sk_table *table, const sk_table_env *env, bool eager) {
    uint64_t n = (uint64_t)table->live + table->tombs;
    if (eager && n == 0) {
        /* An array of one group takes little memory, but a provider has thousands of tables. */
        sk_table_clear(table, env->kind);
        return;
    }
    uint64_t groups = groups_for(n + n / 4 + 1);
    bool is_sparse = table->groups > 4 && n < (uint64_t)table->groups * SK_GROUP / 8;
    if (is_sparse || (eager && groups < table->groups))
        rehash(table, env, groups, table->is_flooded);
}

void sk_table_purge(sk_table *table, const sk_table_env *env) {
    sk_table_env hard = *env;
    hard.keep_after = UINT32_MAX;
    for (int round = 0; round < 2 && table->tombs > 0; round++) {
        sk_slot *slot;
        for (size_t at = 0; (slot = sk_table_next(table, &at)) != NULL;)
            if (!must_stay(slot, env)) {
                drop_tombstone(table, slot);
                make_free(table, slot);
            }
        if (!sk_table_tombs_pass(table, env)) return;
        env = &hard;
    }
}

void sk_table_clear(sk_table *table, int kind) {
    if (table->groups == 0) return; /* it must not even be written to: see store.h */
    sk_slot *slot;
    if (table->mem.used > sk_lines_charge(bytes_of(table->groups))) /* else: only the array */
        for (size_t at = 0; (slot = sk_table_next(table, &at)) != NULL;) {
            if (sk_slot_is_live(slot)) sk_value_free(&table->mem, kind, slot->value);
            free_key(table, slot);
        }
    sk_free_lines(&table->mem, table->slots, bytes_of(table->groups));
    assert(table->mem.used == 0);
    *table =
        (sk_table){.mem = table->mem, .forgot = table->forgot, .operations = table->operations};
}

void sk_table_track(sk_table *table) {
    if (table->tracks_dirty || table->groups == 0) return;
    sk_slot *slot;
    memset(sk_table_dirty_bits(table), 0, table->groups * sizeof(uint16_t));
    for (size_t at = 0; (slot = sk_table_next(table, &at)) != NULL;)
        if (sk_slot_is_dirty(slot)) sk_table_set_dirty_bit(table, slot, true);
    table->tracks_dirty = true;
}

static void drop_entry(sk_table *table, int kind, sk_slot *slot) {
    if (sk_slot_is_live(slot)) sk_value_free(&table->mem, kind, slot->value);
    free_key(table, slot);
}

static void move_entry(sk_table *into, const sk_table_env *env, uint64_t routing,
                       const sk_slot *from) {
    size_t len;
    const uint8_t *key = sk_slot_key(from, &len);
    uint64_t hash = sk_table_hash(into, routing, key, len);
    way w = {0};
    sk_slot *slot = take_slot(into, env->leaf_bits, hash, &w);
    *slot = *from;
    if (slot->key_len == SK_KEY_HEAP) sk_slot_long_key(slot)->check = (uint32_t)(hash >> 8);
    into->live += sk_slot_is_live(slot);
    into->tombs += !sk_slot_is_live(slot);
    into->dirty += sk_slot_is_dirty(slot);
    if (into->tracks_dirty && sk_slot_is_dirty(slot)) sk_table_set_dirty_bit(into, slot, true);
    if (is_too_long(w)) go_secret(into, env);
}

/* Puts an entry of a later delta over the one that is here. */
static void replace_entry(sk_table *into, sk_table *from, const sk_table_env *env, sk_slot *old,
                          sk_slot *slot) {
    free_key(from, slot);
    if (!sk_slot_is_live(slot) && env->is_whole) {
        sk_table_remove(into, env, old);
        return;
    }
    if (sk_slot_is_live(old)) sk_value_free(&into->mem, env->kind, old->value);
    into->live += (uint32_t)sk_slot_is_live(slot) - (uint32_t)sk_slot_is_live(old);
    into->tombs -= (uint32_t)sk_slot_is_live(slot) - (uint32_t)sk_slot_is_live(old);
    into->dirty -= sk_slot_is_dirty(old);
    old->value = slot->value;
    old->marks = slot->marks;
    old->epoch = slot->epoch;
    if (env->is_timed) sk_slot_set_stamp(old, sk_slot_stamp(slot));
}

void sk_table_merge(sk_table *into, sk_table *from, const sk_table_env *env, bool over) {
    sk_slot *slot;
    for (size_t at = 0; (slot = sk_table_next(from, &at)) != NULL;) {
        size_t len;
        const uint8_t *key = sk_slot_key(slot, &len);
        uint64_t routing = sk_routing_of(env, key, len);
        sk_slot *old = sk_table_find(into, env->leaf_bits, routing, key, len);
        if (old != NULL && over)
            replace_entry(into, from, env, old, slot);
        else if (old != NULL || (!sk_slot_is_live(slot) && env->is_whole))
            drop_entry(from, env->kind, slot);
        else
            move_entry(into, env, routing, slot);
    }
    sk_free_lines(&from->mem, from->slots, bytes_of(from->groups));
    /* The memory that `from` still counts is that of what moved. Both have the same budget. */
    into->mem.used += from->mem.used;
    *from = (sk_table){.mem.budget = from->mem.budget};
}
