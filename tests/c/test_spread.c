/*
 * test_spread.c: single entries of many leaves in one block: made by sk_pick (csrc/pick.c), taken
 * in by sk_spread (csrc/spread.c). Oracle: sk_leaf_pick and sk_leaf_decode, leaf by leaf.
 */
#include "kinds_util.h"

#define BITS 4
#define LEAVES (1u << BITS)
#define KEYS 120

static sk_store *open_store(void) { return kinds_open(LEAVES); }

static uint32_t leaf_of(uint32_t k) {
    util_key key = util_bytes_key(k);
    return util_leaf_of("b", &key, BITS);
}

static int64_t pick(sk_store *store, uint32_t s, const asked *a, sk_buf *buf) {
    sk_column keys = column_of(a);
    return sk_pick(store, s, &keys, a->n, NULL, buf);
}

/* A store with entries, some of them deleted, some (of X) expired, and leaves of every residency
 * and gate. */
static sk_store *open_source(test_rng *rng) {
    sk_store *store = open_store();
    for (uint32_t k = 0; k < KEYS; k++)
        for (uint32_t s = 0; s < STATES; s++) put(store, s, k, 1);
    CHECK_EQ(sk_time_set(store, SK_EVENT_TIME, 1050), SK_OK);
    for (uint32_t k = 0; k < KEYS; k++)
        for (uint32_t s = 0; s < STATES; s++) {
            util_key key = util_bytes_key(k);
            uint64_t dice = test_below(rng, 4);
            if (dice == 0) CHECK_EQ(sk_delete(store, s, key.data, key.len, 0), SK_OK);
            if (dice == 1) put(store, s, k, 2);
        }
    CHECK_EQ(sk_time_set(store, SK_EVENT_TIME, 1120), SK_OK);
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++) {
        uint64_t dice = test_below(rng, 6);
        if (dice == 0) CHECK_EQ(sk_leaf_mark(store, leaf, leaf + 1, SK_AWAY), SK_OK);
        if (dice == 1) CHECK_EQ(sk_leaf_mark(store, leaf, leaf + 1, SK_PARTIAL), SK_OK);
        if (dice == 1 || dice == 2)
            CHECK_EQ(sk_leaf_gate(store, leaf, leaf + 1, SK_GATE_SHUT), SK_OK);
    }
    return store;
}

/* A store that is to be filled, with leaves of every residency and gate. The same rng gives the
 * same store. */
static sk_store *open_target(test_rng rng) {
    sk_store *store = open_store();
    CHECK_EQ(sk_time_set(store, SK_EVENT_TIME, 1120), SK_OK);
    bool takes[LEAVES];
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++) {
        takes[leaf] = test_below(&rng, 2);
        if (takes[leaf] || test_below(&rng, 4) > 0)
            CHECK_EQ(sk_leaf_mark(store, leaf, leaf + 1, SK_ABSENT), SK_OK);
    }
    for (uint32_t k = 0; k < 2 * KEYS; k++) { /* this was written here first, and must stay */
        util_key key = util_bytes_key(k);
        uint32_t s = (uint32_t)test_below(&rng, STATES);
        uint64_t dice = test_below(&rng, 4);
        if (!takes[leaf_of(k)]) continue;
        if (dice == 0) put(store, s, k, 3);
        if (dice == 1) CHECK(sk_delete(store, s, key.data, key.len, SK_BLIND) <= SK_UNKNOWN);
    }
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++) {
        uint64_t dice = test_below(&rng, 6);
        if (dice == 0) CHECK_EQ(sk_leaf_mark(store, leaf, leaf + 1, SK_AWAY), SK_OK);
        if (dice == 1) CHECK_EQ(sk_leaf_gate(store, leaf, leaf + 1, SK_GATE_SHUT), SK_OK);
        if (sk_leaf_residency(store, leaf) == SK_ABSENT && dice >= 3)
            CHECK_EQ(sk_leaf_gate(store, leaf, leaf + 1, SK_GATE_EXPECTED), SK_OK);
    }
    return store;
}

static bool takes_in(sk_store *store, uint32_t leaf) {
    int residency = sk_leaf_residency(store, leaf);
    return sk_leaf_gate_of(store, leaf) != SK_GATE_SHUT &&
           (residency == SK_PARTIAL || residency == SK_ABSENT);
}

static void check_same_stores(sk_store *a, sk_store *b) {
    sk_buf x = {0}, y = {0};
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++) {
        CHECK_EQ(sk_leaf_residency(a, leaf), sk_leaf_residency(b, leaf));
        CHECK_EQ(sk_leaf_gate_of(a, leaf), sk_leaf_gate_of(b, leaf));
    }
    util_encode_all(a, LEAVES, &x);
    util_encode_all(b, LEAVES, &y);
    CHECK(util_same(&x, &y));
    sk_stats p = util_stats(a, LEAVES), q = util_stats(b, LEAVES);
    CHECK_EQ(p.entries, q.entries);
    CHECK_EQ(p.tombstones, q.tombstones);
    CHECK_EQ(p.dirty, q.dirty);
    CHECK_EQ(p.bytes, sk_bytes_used(a));
    CHECK_EQ(q.bytes, sk_bytes_used(b));
    sk_buf_free(&x);
    sk_buf_free(&y);
}

static void read_snapshot(sk_snapshot *snapshot, sk_buf *buf) {
    uint32_t leaf;
    while (sk_snapshot_next(snapshot, &leaf, buf) >= 0) CHECK_EQ(sk_buf_put(buf, &leaf, 4), SK_OK);
    sk_snapshot_close(snapshot);
}

static void test_spreading_is_picking_and_decoding_leaf_by_leaf(void) {
    test_rng rng = test_rng_new(11);
    static asked all[STATES], some;
    for (int round = 0; round < 60; round++) {
        sk_store *source = open_source(&rng);
        test_rng seed = test_rng_new(test_random(&rng));
        sk_store *spread = open_target(seed), *single = open_target(seed);
        sk_buf blocks = {0}, part = {0}, seen[2] = {{0}, {0}};
        sk_snapshot *snapshots[2];
        uint8_t touched[LEAVES] = {0}, expected[LEAVES] = {0};
        CHECK_EQ(sk_snapshot_open(spread, NULL, 0, &snapshots[0]), SK_OK);
        CHECK_EQ(sk_snapshot_open(single, NULL, 0, &snapshots[1]), SK_OK);
        for (uint32_t s = 0; s < STATES; s++) {
            all[s].n = 0;
            uint64_t count = s == (uint32_t)round % STATES ? 0 : test_below(&rng, 3 * KEYS);
            for (uint64_t i = 0; i < count; i++) ask(&all[s], (uint32_t)test_below(&rng, 2 * KEYS));
            size_t start = blocks.len;
            int64_t len = pick(source, s, &all[s], &blocks);
            CHECK_EQ(len, (int64_t)(blocks.len - start));
            if (len == 0) continue;
            sk_block_info info;
            CHECK_EQ(sk_block_read(blocks.data + start, (size_t)len, &info), SK_OK);
            CHECK(info.size == (uint64_t)len && info.is_delta);
            CHECK_EQ(info.leaf_bits, 0);
            CHECK_EQ(sk_block_check(blocks.data + start, (size_t)len), SK_OK);
        }
        int64_t entries = 0;
        for (uint32_t leaf = 0; leaf < LEAVES; leaf++) {
            part.len = 0;
            for (uint32_t s = 0; s < STATES; s++) {
                some.n = 0;
                for (int64_t i = 0; i < all[s].n; i++) {
                    uint32_t k;
                    memcpy(&k, all[s].data + all[s].at[i], 4);
                    if (leaf_of(k) == leaf) ask(&some, k);
                }
                sk_column keys = column_of(&some);
                size_t start = part.len;
                int64_t len = sk_leaf_pick(source, leaf, s, &keys, some.n, &part);
                CHECK(len >= 0 || sk_leaf_residency(source, leaf) != SK_WHOLE);
                if (len > 0) {
                    sk_block_info info;
                    CHECK_EQ(sk_block_read(part.data + start, (size_t)len, &info), SK_OK);
                    entries += (int64_t)info.entries;
                }
            }
            if (part.len == 0 || !takes_in(single, leaf)) continue;
            expected[leaf] = 1;
            CHECK_EQ(sk_leaf_decode(single, leaf, part.data, part.len, SK_UNDER), SK_OK);
        }
        CHECK_EQ(sk_spread(spread, blocks.data, blocks.len, touched), entries);
        CHECK(memcmp(touched, expected, sizeof touched) == 0);
        check_same_stores(spread, single);
        for (int i = 0; i < 2; i++) read_snapshot(snapshots[i], &seen[i]);
        CHECK(util_same(&seen[0], &seen[1]));
        /* doing it again changes nothing, and touches the same leaves */
        memset(touched, 0, sizeof touched);
        CHECK_EQ(sk_spread(spread, blocks.data, blocks.len, touched), entries);
        CHECK(memcmp(touched, expected, sizeof touched) == 0);
        check_same_stores(spread, single);
        sk_buf_free(&blocks);
        sk_buf_free(&part);
        for (int i = 0; i < 2; i++) sk_buf_free(&seen[i]);
        sk_close(source);
        sk_close(spread);
        sk_close(single);
    }
}

/* Blocks of some states of a whole store, and a store that expects them. */
static sk_store *open_expecting(sk_buf *blocks, const uint32_t *states, size_t count) {
    static asked a;
    sk_store *source = open_store(), *target = util_open(LEAVES, 1);
    a.n = 0;
    for (uint32_t k = 0; k < 40; k++) {
        for (uint32_t s = 0; s < STATES && k < 30; s++) put(source, s, k, 1);
        ask(&a, k);
    }
    for (size_t i = 0; i < count; i++) CHECK(pick(source, states[i], &a, blocks) > 0);
    sk_close(source);
    CHECK_EQ(sk_leaf_mark(target, 0, LEAVES, SK_ABSENT), SK_OK);
    CHECK_EQ(sk_leaf_gate(target, 0, LEAVES, SK_GATE_EXPECTED), SK_OK);
    return target;
}

static void check_untouched(sk_store *store, const uint8_t *touched) {
    sk_stats stats = util_stats(store, LEAVES);
    CHECK_EQ(stats.entries + stats.tombstones + stats.bytes, 0);
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++) {
        CHECK_EQ(touched[leaf], 0);
        CHECK_EQ(sk_leaf_gate_of(store, leaf), SK_GATE_EXPECTED);
    }
}

static void test_states_are_declared_and_the_first_block_of_a_key_is_right(void) {
    static const uint32_t states[] = {N, X};
    sk_buf blocks = {0}, more = {0};
    uint8_t touched[LEAVES] = {0};
    sk_store *target = open_expecting(&blocks, states, 2), *source = open_store();
    static asked a;
    for (uint32_t from = 20; from < 420; from += 200) { /* more than fits into a small table */
        a.n = 0;
        for (uint32_t k = from; k < from + 200; k++) {
            put(source, N, k, 9);
            ask(&a, k);
        }
        CHECK(pick(source, N, &a, &more) > 0);
    }
    CHECK_EQ(sk_buf_put(&blocks, more.data, more.len), SK_OK);
    CHECK_EQ(sk_spread(target, blocks.data, blocks.len, touched), 40 + 40 + 400);
    CHECK_EQ(sk_state_count(target), 2);
    for (uint32_t k = 0; k < 420; k++) {
        util_key key = util_bytes_key(k);
        int64_t value = 0;
        int expected = k >= 30 && k < 40 ? SK_MISSING : SK_OK;
        CHECK_EQ(sk_i64_get(target, 0, key.data, key.len, &value), expected);
        if (expected == SK_OK) CHECK_EQ(value, (int64_t)(k < 40 ? 1 : 9) << 32 | k);
    }
    sk_stats stats = util_stats(target, LEAVES);
    CHECK_EQ(stats.bytes, sk_bytes_used(target));
    CHECK_EQ(sk_spread(target, NULL, 0, touched), 0);
    sk_buf_free(&blocks);
    sk_buf_free(&more);
    sk_close(source);
    sk_close(target);
}

static void test_blocks_of_another_type_are_refused_and_nothing_is_declared(void) {
    static const uint32_t states[] = {B, N};
    sk_buf blocks = {0}, more = {0};
    uint8_t touched[LEAVES] = {0};
    sk_store *target = open_expecting(&blocks, states, 2), *other = util_open(LEAVES, 1);
    uint32_t id = util_state(other, "n", SK_F64, "i");
    int64_t number = 7;
    CHECK(sk_pick(other, id, &(sk_column){SK_COL_I64, 0, &number, NULL, 8}, 1, NULL, &more) > 0);
    CHECK_EQ(sk_buf_put(&blocks, more.data, more.len), SK_OK);
    CHECK_EQ(sk_spread(target, blocks.data, blocks.len, touched), -SK_SCHEMA);
    CHECK_EQ(sk_state_count(target), 0);
    check_untouched(target, touched);
    util_state(target, "n", SK_F64, "i"); /* now they do not fit the store's own state */
    CHECK_EQ(sk_spread(target, blocks.data, blocks.len, touched), -SK_SCHEMA);
    CHECK_EQ(sk_state_count(target), 1);
    check_untouched(target, touched);
    sk_buf_free(&blocks);
    sk_buf_free(&more);
    sk_close(other);
    sk_close(target);
}

static void test_only_blocks_of_single_entries_are_taken(void) {
    static const uint32_t states[] = {N};
    sk_buf blocks = {0}, others[5] = {{0}, {0}, {0}, {0}, {0}};
    uint8_t touched[LEAVES] = {0};
    sk_store *target = open_expecting(&blocks, states, 1), *source = open_store();
    sk_store *one = util_open(1, 1);
    util_state(one, "n", SK_I64, "b");
    for (uint32_t k = 0; k < 40; k++) {
        put(source, N, k, 1);
        put(one, 0, k, 1);
    }
    CHECK(sk_leaf_encode(source, leaf_of(1), N, 0, &others[0]) > 0); /* of a leaf */
    CHECK(sk_leaf_encode(one, 0, 0, 0, &others[1]) > 0);             /* all, but a full block */
    CHECK_EQ(sk_buf_put(&others[2], "SKB1", 4), SK_OK);              /* no block */
    static asked a;
    a.n = 0;
    ask(&a, 1);
    sk_column keys = column_of(&a);
    CHECK(sk_leaf_pick(source, leaf_of(1), N, &keys, 1, &others[3]) > 0); /* single, of a leaf */
    sk_block_info info;
    CHECK(pick(source, N, &a, &others[4]) > 0); /* single, but without the entry */
    CHECK_EQ(sk_block_read(others[4].data, others[4].len, &info), SK_OK);
    uint64_t size = info.hashes + 8; /* what is left: the offset of no keys */
    memset(others[4].data + info.hashes, 0, 8);
    memset(others[4].data + 16, 0, 24); /* n, key_bytes, value_bytes */
    memcpy(others[4].data + 8, &size, 8);
    others[4].len = size;
    CHECK_EQ(sk_block_check(others[4].data, others[4].len), SK_OK);
    for (int i = 0; i < 5; i++)
        for (int is_last = 0; is_last < 2; is_last++) {
            sk_buf both = {0};
            if (is_last) CHECK_EQ(sk_buf_put(&both, blocks.data, blocks.len), SK_OK);
            CHECK_EQ(sk_buf_put(&both, others[i].data, others[i].len), SK_OK);
            CHECK_EQ(sk_spread(target, both.data, both.len, touched), -SK_CORRUPT);
            CHECK_EQ(sk_state_count(target), 0);
            check_untouched(target, touched);
            sk_buf_free(&both);
        }
    /* sk_leaf_decode refuses them, too, unless the store has only one leaf */
    for (int mode = SK_UNDER; mode <= SK_OVER; mode++)
        CHECK_EQ(sk_leaf_decode(target, 0, blocks.data, blocks.len, mode), SK_CORRUPT);
    check_untouched(target, touched);
    CHECK_EQ(sk_leaf_mark(one, 0, 1, SK_ABSENT), SK_OK);
    CHECK_EQ(sk_leaf_decode(one, 0, blocks.data, blocks.len, SK_UNDER), SK_OK);
    for (int i = 0; i < 5; i++) sk_buf_free(&others[i]);
    sk_buf_free(&blocks);
    sk_close(one);
    sk_close(source);
    sk_close(target);
}

static void test_blocks_are_sealed_bound_and_cut_like_others(void) {
    static const uint32_t states[] = {N, B, L, X, W};
    static const uint8_t id[16] = "spread";
    sk_buf blocks = {0}, slices = {0};
    uint8_t touched[LEAVES] = {0}, again[LEAVES] = {0};
    uint64_t bad = 0;
    sk_store *target = open_expecting(&blocks, states, 5);
    sk_buf none = {0};
    sk_store *cut = open_expecting(&none, states, 0);
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++) { /* slices are what each leaf would have had */
        sk_block_info info;
        slices.len = 0;
        for (size_t at = 0; at < blocks.len; at += info.size) {
            CHECK_EQ(sk_block_read(blocks.data + at, blocks.len - at, &info), SK_OK);
            CHECK_EQ(sk_block_rewrite(blocks.data + at, blocks.len - at, leaf, BITS, info.kind,
                                      info.is_timed ? SK_TIMED : 0, 1, &slices),
                     SK_OK);
        }
        if (slices.len > 0)
            CHECK_EQ(sk_leaf_decode(cut, leaf, slices.data, slices.len, SK_UNDER), SK_OK);
        again[leaf] = slices.len > 0;
    }
    CHECK_EQ(sk_frames_seal(blocks.data, blocks.len), SK_OK);
    CHECK_EQ(sk_frames_bind(blocks.data, blocks.len, id, 64), SK_OK);
    CHECK_EQ(sk_frames_verify(blocks.data, blocks.len, id, 64, &bad), SK_OK);
    CHECK_EQ(sk_frames_verify(blocks.data, blocks.len, id, 65, &bad), SK_CORRUPT);
    CHECK_EQ(sk_frames_bind(blocks.data, blocks.len, id, 64), SK_OK);
    CHECK_EQ(sk_block_verify(blocks.data, blocks.len, 0), SK_OK);
    CHECK_EQ(sk_spread(target, blocks.data, blocks.len, touched), 5 * 40);
    CHECK(memcmp(touched, again, sizeof touched) == 0);
    check_same_stores(target, cut);
    sk_buf_free(&blocks);
    sk_buf_free(&slices);
    sk_close(target);
    sk_close(cut);
}

/* A damaged block is refused with nothing taken in, unless the damage makes it another good
 * block. */
static void test_damaged_blocks_are_refused_with_nothing_taken_in(void) {
    test_rng rng = test_rng_new(12);
    uint64_t refused = 0;
    for (uint32_t s = 0; s < STATES; s++) {
        const uint32_t states[] = {s, (s + 1) % STATES};
        sk_buf blocks = {0};
        sk_store *target = open_expecting(&blocks, states, 2);
        for (int round = 0; round < 1500; round++) {
            uint8_t touched[LEAVES] = {0};
            size_t len = blocks.len;
            uint8_t *copy = malloc(len); /* of exact size: AddressSanitizer sees the end */
            memcpy(copy, blocks.data, len);
            for (uint64_t n = 1 + test_below(&rng, 3); n > 0; n--)
                copy[test_below(&rng, len)] ^= (uint8_t)(1u << test_below(&rng, 8));
            if (test_below(&rng, 8) == 0) len = test_below(&rng, len);
            int64_t result = sk_spread(target, copy, len, touched);
            refused += result < 0;
            if (result < 0) {
                CHECK(result == -SK_CORRUPT || result == -SK_SCHEMA);
                check_untouched(target, touched);
            } else { /* a value, a stamp, a name or a checksum, or the end of the first block */
                sk_stats stats = util_stats(target, LEAVES);
                CHECK_EQ((int64_t)(stats.entries + stats.tombstones), result);
                sk_close(target);
                sk_buf none = {0};
                target = open_expecting(&none, states, 0);
            }
            free(copy);
        }
        sk_buf_free(&blocks);
        sk_close(target);
    }
    CHECK(refused > 1000);
}

/* Leaves that were touched have all of their entries; the others are as they were. */
static void test_failing_allocations_leave_no_leaf_half_filled(void) {
    static const uint32_t states[] = {N, B, M, X, N};
    for (int is_partial = 0; is_partial < 2; is_partial++)
        for (int64_t nth = 1, is_done = 0; !is_done; nth += 1 + nth / 40) {
            sk_buf blocks = {0}, x = {0}, y = {0};
            sk_store *stores[3]; /* one where memory fails, one as before, one filled */
            uint8_t touched[LEAVES] = {0}, all[LEAVES] = {0};
            for (int i = 0; i < 3; i++) {
                blocks.len = 0;
                stores[i] = open_expecting(&blocks, states, 5);
                if (!is_partial) continue;
                CHECK_EQ(sk_leaf_gate(stores[i], 0, LEAVES, SK_GATE_OPEN), SK_OK);
                uint32_t id = util_state(stores[i], "b", SK_BYTES, "b");
                for (uint32_t k = 0; k < 80; k += 3) {
                    util_key key = util_bytes_key(k);
                    CHECK_EQ(sk_put(stores[i], id, key.data, key.len, key.data, 4), SK_OK);
                }
            }
            CHECK(sk_spread(stores[2], blocks.data, blocks.len, all) > 0);
            sk_fail_alloc(nth, nth % 2);
            int64_t result = sk_spread(stores[0], blocks.data, blocks.len, touched);
            is_done = sk_alloc_count() < nth;
            sk_fail_alloc(0, 0);
            if (result < 0) CHECK_EQ(result, -SK_NO_MEMORY);
            if (is_done) CHECK_EQ(result, 5 * 40);
            for (uint32_t leaf = 0; leaf < LEAVES; leaf++) {
                sk_store *like = stores[touched[leaf] ? 2 : 1];
                x.len = y.len = 0;
                CHECK(sk_leaf_encode(stores[0], leaf, SK_ALL_STATES, 0, &x) >= 0);
                CHECK(sk_leaf_encode(like, leaf, SK_ALL_STATES, 0, &y) >= 0);
                CHECK(util_same(&x, &y));
                CHECK_EQ(sk_leaf_gate_of(stores[0], leaf), sk_leaf_gate_of(like, leaf));
                CHECK_EQ(sk_leaf_residency(stores[0], leaf), sk_leaf_residency(like, leaf));
            }
            CHECK_EQ(util_stats(stores[0], LEAVES).bytes, sk_bytes_used(stores[0]));
            CHECK_EQ(sk_spread(stores[0], blocks.data, blocks.len, touched), 5 * 40);
            CHECK(memcmp(touched, all, sizeof all) == 0);
            check_same_stores(stores[0], stores[2]);
            for (int i = 0; i < 3; i++) sk_close(stores[i]);
            sk_buf_free(&blocks);
            sk_buf_free(&x);
            sk_buf_free(&y);
        }
}

static void test_pick_says_what_it_cannot_do(void) {
    sk_store *store = open_store();
    sk_buf buf = {0};
    static asked a;
    int64_t number = 7;
    sk_column keys = column_of(&a), one = {SK_COL_I64, 0, &number, NULL, 8};
    a.n = 0;
    CHECK_EQ(pick(store, N, &a, &buf), 0);
    ask(&a, 1);
    CHECK_EQ(pick(store, 99, &a, &buf), -SK_BAD_ARGUMENT);
    CHECK_EQ(sk_pick(store, N, &keys, -1, NULL, &buf), -SK_BAD_ARGUMENT);
    keys.data_len = 1;
    CHECK_EQ(sk_pick(store, N, &keys, 1, NULL, &buf), -SK_BAD_ARGUMENT);
    keys.type = SK_COL_F64;
    CHECK_EQ(sk_pick(store, N, &keys, 1, NULL, &buf), -SK_BAD_KEY);
    uint32_t ints = util_state(store, "ints", SK_I64, "i");
    CHECK_EQ(pick(store, ints, &a, &buf), -SK_BAD_KEY);
    CHECK_EQ(buf.len, 0);
    CHECK(sk_pick(store, ints, &one, 1, NULL, &buf) > 0);
    CHECK_EQ(sk_block_check(buf.data, buf.len), SK_OK);
    CHECK_EQ(sk_leaf_mark(store, 0, LEAVES, SK_AWAY), SK_OK);
    CHECK_EQ(pick(store, N, &a, &buf), 0); /* none of them is here */
    sk_buf_free(&buf);
    sk_close(store);
}

static void test_keys_of_leaves_that_are_not_marked_are_not_picked(void) {
    sk_store *store = open_store();
    static asked all, some;
    sk_buf found = {0}, expected = {0};
    uint8_t only[LEAVES] = {0};
    all.n = some.n = 0;
    for (uint32_t leaf = 1; leaf < LEAVES; leaf += 2) only[leaf] = 1;
    for (uint32_t k = 0; k < 50; k++) {
        util_key key = util_bytes_key(k);
        CHECK_EQ(sk_i64_put(store, N, key.data, key.len, k), SK_OK);
        ask(&all, k);
        if (only[leaf_of(k)]) ask(&some, k);
    }
    CHECK(some.n > 0 && some.n < all.n);
    sk_column keys = column_of(&all);
    CHECK(sk_pick(store, N, &keys, all.n, only, &found) > 0);
    CHECK(pick(store, N, &some, &expected) > 0);
    CHECK(util_same(&found, &expected));
    found.len = 0;
    memset(only, 0, sizeof only);
    CHECK_EQ(sk_pick(store, N, &keys, all.n, only, &found), 0);
    sk_buf_free(&found);
    sk_buf_free(&expected);
    sk_close(store);
}

int main(void) {
    RUN(test_keys_of_leaves_that_are_not_marked_are_not_picked);
    RUN(test_spreading_is_picking_and_decoding_leaf_by_leaf);
    RUN(test_states_are_declared_and_the_first_block_of_a_key_is_right);
    RUN(test_blocks_of_another_type_are_refused_and_nothing_is_declared);
    RUN(test_only_blocks_of_single_entries_are_taken);
    RUN(test_blocks_are_sealed_bound_and_cut_like_others);
    RUN(test_damaged_blocks_are_refused_with_nothing_taken_in);
    RUN(test_failing_allocations_leave_no_leaf_half_filled);
    RUN(test_pick_says_what_it_cannot_do);
    return test_report();
}
