/* test_table.c: csrc/table.c against an array indexed by the key's number. */
#include "store_util.h"
#include "table.h"

#define KEYS 2000

typedef struct model_entry {
    bool is_there, is_tomb, is_dirty;
    int64_t value;
    uint32_t epoch;
} model_entry;

typedef struct fixture {
    sk_budget budget;
    sk_key_type type;
    sk_table table;
    sk_table_env env;
    model_entry model[KEYS];
} fixture;

static void set_up(fixture *f, unsigned leaf_bits) {
    memset(f, 0, sizeof *f);
    CHECK_EQ(sk_key_type_parse("b", &f->type), SK_OK);
    f->table.mem.budget = &f->budget;
    f->env = (sk_table_env){.key_type = &f->type,
                            .kind = SK_I64,
                            .leaf_bits = (uint8_t)leaf_bits,
                            .is_whole = true,
                            .epoch = 1,
                            .keep_after = UINT32_MAX};
}

static void tear_down(fixture *f) {
    sk_table_clear(&f->table, f->env.kind);
    CHECK_EQ(f->budget.used, 0);
    CHECK_EQ(f->table.groups, 0);
}

static sk_slot *find(fixture *f, uint32_t k) {
    util_key key = util_bytes_key(k);
    uint64_t hash = sk_xxh64(key.data, key.len, SK_ROUTE_SEED);
    return sk_table_find(&f->table, f->env.leaf_bits, hash, key.data, key.len);
}

static sk_slot *insert(sk_table *table, const sk_table_env *env, uint32_t k) {
    util_key key = util_bytes_key(k);
    uint64_t hash = sk_xxh64(key.data, key.len, SK_ROUTE_SEED);
    return sk_table_insert(table, env, hash, key.data, key.len);
}

/* Puts (or entombs) key k in table and model. */
static void put(fixture *f, uint32_t k, int64_t value, bool is_tomb) {
    sk_slot *slot = find(f, k);
    CHECK_EQ(slot != NULL, f->model[k].is_there);
    if (slot == NULL) {
        slot = insert(&f->table, &f->env, k);
        CHECK(slot != NULL);
        if (slot == NULL) return;
    } else if (sk_slot_is_live(slot)) {
        f->table.live--;
    } else {
        f->table.tombs--;
        slot->marks &= (uint8_t)~SK_MARK_TOMB;
    }
    f->table.live += !is_tomb;
    f->table.tombs += is_tomb;
    slot->value.i64 = is_tomb ? 0 : value;
    slot->epoch = f->env.epoch;
    sk_slot_mark_dirty(&f->table, slot);
    if (is_tomb) slot->marks |= SK_MARK_TOMB;
    f->model[k] = (model_entry){true, is_tomb, true, is_tomb ? 0 : value, f->env.epoch};
}

static void check_all(fixture *f) {
    uint32_t live = 0, tombs = 0, dirty = 0, taken = 0, seen = 0;
    for (uint32_t k = 0; k < KEYS; k++) {
        const model_entry *m = &f->model[k];
        sk_slot *slot = find(f, k);
        CHECK_EQ(slot != NULL, m->is_there);
        if (!m->is_there || slot == NULL) continue;
        CHECK_EQ(slot->value.i64, m->value);
        CHECK_EQ(sk_slot_is_live(slot), !m->is_tomb);
        CHECK_EQ(slot->epoch, m->epoch);
        live += !m->is_tomb;
        tombs += m->is_tomb;
        dirty += m->is_dirty;
    }
    for (size_t i = 0; i < (size_t)f->table.groups * SK_GROUP; i++)
        taken += f->table.tags[i] != SK_TAG_EMPTY;
    for (size_t at = 0; sk_table_next(&f->table, &at) != NULL;) seen++;
    CHECK_EQ(f->table.live, live);
    CHECK_EQ(f->table.tombs, tombs);
    CHECK_EQ(f->table.dirty, dirty);
    CHECK_EQ(f->table.taken, taken);
    CHECK_EQ(seen, live + tombs);
    CHECK(f->table.taken <= f->table.groups * SK_GROUP_FILL);
    CHECK_EQ(f->table.mem.used, f->budget.used);
    if (!f->table.tracks_dirty) return;
    sk_slot *slot, *last = NULL;
    for (size_t at = 0; (slot = sk_table_next_dirty(&f->table, &at)) != NULL; last = slot) {
        CHECK(last == NULL || slot > last);
        CHECK(f->table.tags[slot - f->table.slots] > SK_TAG_DELETED && sk_slot_is_dirty(slot));
        dirty--;
    }
    CHECK_EQ(dirty, 0); /* each was found, once */
}

/* Whether the environment allows dropping this tombstone: the model of purge, and of what a rehash
 * may drop. */
static bool is_stale(const fixture *f, const model_entry *m) {
    return m->is_there && m->is_tomb && f->env.is_whole && !(f->env.writes_back && m->is_dirty) &&
           m->epoch <= f->env.keep_after;
}

/* A rehash may drop stale tombstones at any time; the model is adjusted to what it finds. */
static void follow_drops(fixture *f) {
    for (uint32_t k = 0; k < KEYS; k++)
        if (is_stale(f, &f->model[k]) && find(f, k) == NULL) {
            CHECK(f->table.forgot >= f->model[k].epoch);
            f->model[k] = (model_entry){0};
        }
}

static void test_group_match_finds_exactly_the_equal_bytes(void) {
    test_rng rng = test_rng_new(1);
    _Alignas(16) uint8_t group[SK_GROUP];
    for (int round = 0; round < 20000; round++) {
        for (int i = 0; i < SK_GROUP; i++)
            group[i] = (uint8_t)(test_below(&rng, 2) ? test_below(&rng, 3) : test_random(&rng));
        if (round % 3 == 0) group[test_below(&rng, SK_GROUP)] ^= 0x80;
        for (int t = 0; t < 4; t++) {
            uint8_t tag = t < 3 ? (uint8_t)t : group[test_below(&rng, SK_GROUP)];
            uint32_t expected = 0;
            for (int i = 0; i < SK_GROUP; i++) expected |= (uint32_t)(group[i] == tag) << i;
            CHECK_EQ(sk_group_match(group, tag), expected);
        }
    }
}

static void test_random_operations_match_the_model(void) {
    static fixture f;
    for (unsigned variant = 0; variant < 8; variant++) {
        test_rng rng = test_rng_new(10 + variant);
        set_up(&f, variant % 4 * 5);
        f.env.is_whole = variant % 2 == 0;
        f.env.writes_back = variant >= 4;
        for (int step = 0; step < 12000; step++) {
            /* alternates between filling and emptying */
            bool is_filling = step / 3000 % 2 == 0;
            uint32_t k = (uint32_t)test_below(&rng, KEYS);
            unsigned what = (unsigned)test_below(&rng, 100);
            sk_slot *slot = find(&f, k);
            CHECK_EQ(slot != NULL, f.model[k].is_there);
            if (what < (is_filling ? 70u : 20u)) {
                put(&f, k, (int64_t)test_random(&rng), what % 8 == 0);
                follow_drops(&f);
            } else if (what < 96 && slot != NULL) {
                sk_table_remove(&f.table, &f.env, slot);
                f.model[k] = (model_entry){0};
            } else if (what == 96) {
                sk_table_trim(&f.table, &f.env, step % 2);
                follow_drops(&f);
            } else if (what == 97) {
                CHECK_EQ(sk_table_reserve(&f.table, &f.env, (uint32_t)test_below(&rng, 3000)),
                         SK_OK);
                follow_drops(&f);
            } else if (what == 98) {
                f.env.epoch++;
                if (slot != NULL && sk_slot_is_dirty(slot)) { /* written home */
                    slot->marks &= (uint8_t)~SK_MARK_DIRTY;
                    f.table.dirty--;
                    f.model[k].is_dirty = false;
                }
            } else if (what == 99 && step % 3 == 0) {
                f.env.keep_after = step % 2 ? UINT32_MAX : f.env.epoch / 2;
                sk_table_purge(&f.table, &f.env);
                for (uint32_t i = 0; i < KEYS; i++)
                    if (is_stale(&f, &f.model[i])) {
                        CHECK(find(&f, i) == NULL);
                        CHECK(f.table.forgot >= f.model[i].epoch);
                        f.model[i] = (model_entry){0};
                    }
            }
            if (step % 500 == 0) check_all(&f);
            if (f.env.writes_back && step % 1000 == 700) sk_table_track(&f.table);
        }
        check_all(&f);
        tear_down(&f);
    }
}

/* Filling and emptying the same few keys must not let deleted tags pile up. */
static void test_churn_at_constant_size_stays_small(void) {
    static fixture f;
    set_up(&f, 0);
    for (uint32_t i = 0; i < 100000; i++) {
        uint32_t k = i % KEYS;
        sk_slot *slot = insert(&f.table, &f.env, k);
        CHECK(slot != NULL);
        if (slot == NULL) return;
        f.table.live++;
        if (i >= 100) {
            util_key old = util_bytes_key((i - 100) % KEYS);
            uint64_t hash = sk_xxh64(old.data, old.len, SK_ROUTE_SEED);
            slot = sk_table_find(&f.table, 0, hash, old.data, old.len);
            CHECK(slot != NULL);
            if (slot == NULL) return;
            sk_table_remove(&f.table, &f.env, slot);
        }
    }
    CHECK_EQ(f.table.live, 100);
    CHECK(f.table.groups <= 16);
    tear_down(&f);
}

static void test_removing_nearly_all_gives_memory_back(void) {
    static fixture f;
    set_up(&f, 0);
    for (uint32_t k = 0; k < KEYS; k++) put(&f, k, k, false);
    uint64_t full = f.budget.used;
    for (uint32_t k = 5; k < KEYS; k++) {
        sk_table_remove(&f.table, &f.env, find(&f, k));
        f.model[k] = (model_entry){0};
        sk_table_trim(&f.table, &f.env, false);
    }
    CHECK(f.budget.used * 10 < full);
    check_all(&f);
    for (uint32_t k = 0; k < 5; k++) {
        sk_table_remove(&f.table, &f.env, find(&f, k));
        f.model[k] = (model_entry){0};
    }
    sk_table_trim(&f.table, &f.env, true);
    CHECK(f.table.groups <= 4);
    check_all(&f);
    tear_down(&f);
}

static void test_keys_of_every_length_around_the_inline_limit(void) {
    static fixture f;
    set_up(&f, 3);
    uint8_t data[2][300];
    memset(data[0], 'x', sizeof data[0]);
    memset(data[1], 'x', sizeof data[1]);
    for (size_t len = 0; len < 300; len++) {
        uint64_t hash = sk_xxh64(data[0], len, SK_ROUTE_SEED);
        CHECK(sk_table_find(&f.table, 3, hash, data[0], len) == NULL);
        sk_slot *slot = sk_table_insert(&f.table, &f.env, hash, data[0], len);
        f.table.live++;
        slot->value.i64 = (int64_t)len;
        CHECK_EQ(slot->key_len == SK_KEY_HEAP, len > SK_KEY_INLINE);
    }
    for (size_t len = 0; len < 300; len++) {
        uint64_t hash = sk_xxh64(data[0], len, SK_ROUTE_SEED);
        sk_slot *slot = sk_table_find(&f.table, 3, hash, data[0], len);
        CHECK(slot != NULL && slot->value.i64 == (int64_t)len);
        size_t found_len;
        const uint8_t *found = sk_slot_key(slot, &found_len);
        CHECK(found_len == len && memcmp(found, data[0], len) == 0);
        for (size_t i = 0; i < len && i < 40; i++) { /* one byte differs, the hash does not */
            data[1][i] ^= 1;
            CHECK(sk_table_find(&f.table, 3, hash, data[1], len) == NULL);
            data[1][i] ^= 1;
        }
    }
    tear_down(&f);
}

static void test_merge_under_and_over_match_the_model(void) {
    static fixture f, g;
    for (unsigned variant = 0; variant < 16; variant++) {
        test_rng rng = test_rng_new(100 + variant);
        set_up(&f, 2);
        set_up(&g, 2);
        g.table.mem.budget = &f.budget; /* both belong to one store */
        bool over = variant & 1;
        f.env.is_whole = variant & 2;
        uint32_t range = variant & 4 ? KEYS : 50;
        for (int step = 0; step < 1500; step++) {
            /* tombstones live in partial leaves only */
            put(&f, (uint32_t)test_below(&rng, range), step, !f.env.is_whole && step % 5 == 0);
            if (variant & 8 ? step < 20 : step % 2) {
                g.env.is_whole = false;
                uint32_t k = (uint32_t)test_below(&rng, range);
                sk_slot *slot = find(&g, k);
                if (slot != NULL) continue;
                slot = insert(&g.table, &g.env, k);
                bool is_tomb = step % 3 == 0;
                slot->marks = is_tomb ? SK_MARK_TOMB : 0;
                slot->value.i64 = is_tomb ? 0 : -step;
                g.table.live += !is_tomb;
                g.table.tombs += is_tomb;
                g.model[k] = (model_entry){true, is_tomb, false, slot->value.i64, 0};
            }
        }
        CHECK_EQ(sk_table_reserve(&f.table, &f.env, g.table.live + g.table.tombs), SK_OK);
        sk_table_merge(&f.table, &g.table, &f.env, over);
        CHECK_EQ(g.table.mem.used, 0);
        CHECK_EQ(g.table.groups, 0);
        for (uint32_t k = 0; k < KEYS; k++) {
            model_entry *m = &f.model[k], *n = &g.model[k];
            if (!n->is_there || (m->is_there && !over)) continue;
            *m = n->is_tomb && f.env.is_whole ? (model_entry){0} : *n;
        }
        check_all(&f);
        tear_down(&f);
    }
}

static void test_failed_growth_leaves_the_table_as_it_was(void) {
    static fixture f;
    set_up(&f, 0);
    f.budget.max = 60000;
    uint32_t k = 0;
    while (k < KEYS && f.table.groups < 64) {
        sk_slot *slot = insert(&f.table, &f.env, k);
        if (slot == NULL) break;
        slot->value.i64 = k;
        f.table.live++;
        f.model[k] = (model_entry){.is_there = true, .value = k};
        k++;
    }
    CHECK(k > 100 && k < KEYS);
    uint64_t used = f.budget.used;
    CHECK(insert(&f.table, &f.env, k) == NULL);
    CHECK_EQ(sk_alloc_status(), SK_LIMIT);
    CHECK_EQ(f.budget.used, used);
    check_all(&f);
    f.budget.max = 0;
    put(&f, k, 1, false);
    tear_down(&f);
}

/* ---- Flooding: keys that anyone can craft, because XXH64 can be inverted ---- */

#define CRAFTED 20000

/* Crafted key i, with key_len 8 or 24: hash bits [63..32] and the tag are the same for all keys.
 * With is_equal all 64 bits are the same. That needs 24 bytes, because different keys of 8 bytes
 * have different hashes. */
static void craft(uint8_t *key, size_t key_len, uint32_t i, bool is_equal) {
    for (size_t at = 0; at + 8 < key_len; at++) key[at] = (uint8_t)(i >> (at % 4 * 8));
    uint64_t hash = 0x123456789abcde77ULL;
    if (!is_equal) hash = (hash & 0xffffffff000000ffULL) | (uint64_t)i << 8;
    util_solve_key(key, key_len, hash);
    CHECK_EQ(sk_xxh64(key, key_len, 42), hash);
}

static void flood(size_t key_len, bool is_equal, bool by_batch) {
    sk_store *store = util_open(16, 1);
    uint32_t id = util_state(store, "n", SK_I64, "b");
    uint8_t *keys = malloc(CRAFTED * key_len), *status = malloc(CRAFTED);
    int64_t *offsets = malloc((CRAFTED + 1) * sizeof *offsets);
    for (uint32_t i = 0; i <= CRAFTED; i++) offsets[i] = (int64_t)(i * key_len);
    for (uint32_t i = 0; i < CRAFTED; i++) craft(keys + i * key_len, key_len, i, is_equal);
    if (by_batch) {
        sk_batch_args args = {.n = CRAFTED,
                              .keys = {.type = SK_COL_VAR64,
                                       .data = keys,
                                       .offsets = offsets,
                                       .data_len = CRAFTED * (int64_t)key_len},
                              .operand_i64 = 1,
                              .status = status};
        CHECK_EQ(sk_batch(store, id, SK_B_ADD, &args), SK_OK);
        CHECK_EQ(sk_batch(store, id, SK_B_ADD, &args), SK_OK);
    }
    int64_t cost_max = 0;
    for (uint32_t i = 0; i < CRAFTED; i++) {
        const uint8_t *key = keys + i * key_len;
        int64_t value = 0;
        if (!by_batch) CHECK_EQ(sk_i64_put(store, id, key, key_len, 2), SK_OK);
        CHECK_EQ(sk_i64_get(store, id, key, key_len, &value), SK_OK);
        CHECK_EQ(value, 2);
    }
    int64_t cost_sum = 0;
    for (uint32_t i = 0; i < CRAFTED; i++) {
        int64_t cost = sk_probe_cost(store, id, keys + i * key_len, key_len);
        cost_sum += cost;
        cost_max = cost > cost_max ? cost : cost_max;
    }
    CHECK(cost_max <= SK_WAY_GROUPS_MAX);
    CHECK(cost_sum < 4 * CRAFTED);
    sk_stats stats = util_stats(store, 16);
    CHECK_EQ(stats.flooded, 1);
    CHECK_EQ(stats.entries, CRAFTED);
    for (uint32_t i = 0; i < CRAFTED; i += 2)
        CHECK_EQ(sk_delete(store, id, keys + i * key_len, key_len, 0), SK_OK);
    for (uint32_t i = 0; i < CRAFTED; i++)
        CHECK_EQ(sk_contains(store, id, keys + i * key_len, key_len), i % 2 ? SK_OK : SK_MISSING);
    /* The block of a flooded table is like any other. Decoding it changes to the secret hash
     * again. */
    sk_buf buf = {0}, value = {0};
    CHECK(sk_leaf_encode(store, 1, SK_ALL_STATES, 0, &buf) > 0);
    CHECK_EQ(sk_block_check(buf.data, buf.len), SK_OK);
    CHECK_EQ(sk_leaf_decode(store, 1, buf.data, buf.len, SK_REPLACE), SK_OK);
    CHECK_EQ(util_stats(store, 16).flooded, 1);
    for (uint32_t i = 0; i < CRAFTED; i += 97) {
        const uint8_t *key = keys + i * key_len;
        CHECK_EQ(sk_block_find(buf.data, buf.len, key, key_len, &value),
                 i % 2 ? SK_OK : SK_MISSING);
        CHECK_EQ(sk_contains(store, id, key, key_len), i % 2 ? SK_OK : SK_MISSING);
    }
    sk_buf_free(&buf);
    sk_buf_free(&value);
    free(keys);
    free(status);
    free(offsets);
    sk_close(store);
}

static void test_keys_of_equal_place_and_tag_stay_cheap(void) {
    flood(8, false, false);
    flood(8, false, true);
    flood(24, false, false);
    flood(24, false, true);
}

static void test_keys_of_equal_hash_stay_cheap(void) {
    flood(24, true, false);
    flood(24, true, true);
}

static void test_honest_keys_never_flood(void) {
    sk_store *store = util_open(1, 1);
    uint32_t id = util_state(store, "n", SK_I64, "i");
    int64_t cost = 0;
    for (int64_t k = 0; k < 100000; k++) {
        util_key key = util_int_key(k * 1000003);
        CHECK_EQ(sk_i64_put(store, id, key.data, key.len, k), SK_OK);
    }
    for (int64_t k = 0; k < 100000; k++) {
        util_key key = util_int_key(k * 1000003);
        cost += sk_probe_cost(store, id, key.data, key.len);
    }
    CHECK_EQ(util_stats(store, 1).flooded, 0);
    CHECK(cost < 3 * 100000);
    sk_close(store);
}

int main(void) {
    RUN(test_group_match_finds_exactly_the_equal_bytes);
    RUN(test_random_operations_match_the_model);
    RUN(test_churn_at_constant_size_stays_small);
    RUN(test_removing_nearly_all_gives_memory_back);
    RUN(test_keys_of_every_length_around_the_inline_limit);
    RUN(test_merge_under_and_over_match_the_model);
    RUN(test_failed_growth_leaves_the_table_as_it_was);
    RUN(test_keys_of_equal_place_and_tag_stay_cheap);
    RUN(test_keys_of_equal_hash_stay_cheap);
    RUN(test_honest_keys_never_flood);
    return test_report();
}
