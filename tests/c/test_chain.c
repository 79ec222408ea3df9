/*
 * test_chain.c: single entries picked from chains of segments (csrc/chain.c). Oracle: the store
 * from which the segments were made.
 */
#include "kinds_util.h"

#define BITS 2
#define LEAVES (1u << BITS)
#define KEYS 200
#define STEPS 3 /* segments of every chain: a full one and two deltas */
#define PACK_OFFSET 64

static sk_store *open_store(void) { return kinds_open(LEAVES); }

static uint32_t leaf_of(uint32_t k) {
    util_key key = util_bytes_key(k);
    return util_leaf_of("b", &key, BITS);
}

/* The segments of all leaves, and the store that they add up to. */
typedef struct chains {
    sk_store *store;
    sk_buf frames[LEAVES][STEPS]; /* newest first */
    sk_segment segments[LEAVES * STEPS];
    uint8_t pack[STEPS][16];
} chains;

static void write_step(chains *c, int step, uint32_t since) {
    memset(c->pack[step], 7 + step, 16);
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++) {
        sk_buf *frames = &c->frames[leaf][step];
        CHECK(sk_leaf_encode(c->store, leaf, SK_ALL_STATES, since, frames) > 0);
        CHECK_EQ(sk_frames_seal(frames->data, frames->len), SK_OK);
        uint64_t offset = PACK_OFFSET + 8 * leaf;
        CHECK_EQ(sk_frames_bind(frames->data, frames->len, c->pack[step], offset), SK_OK);
        c->segments[leaf * STEPS + (uint32_t)step] =
            (sk_segment){leaf, frames->data, frames->len, c->pack[step], offset};
    }
}

static void open_chains(chains *c, test_rng *rng) {
    memset(c, 0, sizeof *c);
    c->store = open_store();
    CHECK_EQ(sk_track(c->store, 0), SK_OK);
    for (uint32_t k = 0; k < KEYS; k++)
        for (uint32_t s = 0; s < STATES; s++) put(c->store, s, k, 1);
    uint32_t epoch = sk_epoch_advance(c->store);
    write_step(c, STEPS - 1, 0);
    for (int step = STEPS - 2; step >= 0; step--) {
        for (uint32_t k = 0; k < KEYS + 20; k++)
            for (uint32_t s = 0; s < STATES; s++) {
                util_key key = util_bytes_key(k);
                uint64_t dice = test_below(rng, 12);
                if (dice == 0) CHECK(sk_delete(c->store, s, key.data, key.len, 0) <= SK_MISSING);
                if (dice == 1) put(c->store, s, k, (uint32_t)(4 - step));
            }
        uint32_t next = sk_epoch_advance(c->store);
        write_step(c, step, epoch);
        epoch = next;
    }
}

static void close_chains(chains *c) {
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++)
        for (int step = 0; step < STEPS; step++) sk_buf_free(&c->frames[leaf][step]);
    sk_close(c->store);
}

static sk_store *open_absent(void) {
    sk_store *store = open_store();
    CHECK_EQ(sk_leaf_mark(store, 0, LEAVES, SK_ABSENT), SK_OK);
    return store;
}

static int pick(sk_store *store, uint32_t s, const asked *a, const chains *c, uint8_t *outcomes) {
    sk_column keys = column_of(a);
    uint8_t found[LEAVES * STEPS] = {0}; /* that of a leaf's first segment is the leaf's */
    int status = sk_chains_pick(store, s, &keys, a->n, c->segments, LEAVES * STEPS, found);
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++) outcomes[leaf] = found[leaf * STEPS];
    return status;
}

/* Both stores give the same answer for a key. */
static void check_same(sk_store *found, sk_store *expected, uint32_t s, uint32_t k) {
    util_key key = util_bytes_key(k);
    sk_buf x = {0}, y = {0};
    int64_t a = sk_get(found, s, key.data, key.len, &x);
    int64_t b = sk_get(expected, s, key.data, key.len, &y);
    CHECK_EQ(a, b);
    if (a >= 0) CHECK(util_same(&x, &y));
    sk_buf_free(&x);
    sk_buf_free(&y);
}

static void test_what_is_picked_is_what_the_chain_adds_up_to(void) {
    test_rng rng = test_rng_new(21);
    static chains c;
    static asked a;
    for (int round = 0; round < 40; round++) {
        open_chains(&c, &rng);
        sk_store *store = open_absent();
        bool is_asked[STATES][KEYS + 40] = {{false}};
        uint32_t mine = (uint32_t)test_below(&rng, KEYS), s_mine = (uint32_t)round % W;
        put(store, s_mine, mine, 9); /* this was written here first, and must stay */
        uint8_t outcomes[LEAVES], expected[LEAVES];
        for (uint32_t s = 0; s < STATES; s++) {
            a.n = 0;
            memset(expected, 0, sizeof expected);
            for (int i = 0; i < 30; i++) {
                uint32_t k = (uint32_t)test_below(&rng, KEYS + 40); /* some never existed */
                ask(&a, k);
                is_asked[s][k] = true;
                expected[leaf_of(k)] = SK_PICKED;
            }
            CHECK_EQ(pick(store, s, &a, &c, outcomes), SK_OK);
            CHECK(memcmp(outcomes, expected, sizeof outcomes) == 0);
        }
        for (uint32_t s = 0; s < STATES; s++)
            for (uint32_t k = 0; k < KEYS + 40; k++) {
                util_key key = util_bytes_key(k);
                if (s == s_mine && k == mine) {
                    sk_store *alone = open_store();
                    put(alone, s, k, 9);
                    check_same(store, alone, s, k);
                    sk_close(alone);
                } else if (is_asked[s][k]) {
                    check_same(store, c.store, s, k);
                } else {
                    CHECK_EQ(sk_contains(store, s, key.data, key.len), SK_UNKNOWN);
                }
            }
        sk_stats stats = util_stats(store, LEAVES);
        CHECK_EQ(stats.dirty, 1);
        CHECK_EQ(stats.bytes, sk_bytes_used(store));
        CHECK_EQ(stats.leaves[SK_WHOLE], 0);
        sk_close(store);
        close_chains(&c);
    }
}

static void test_a_picked_leaf_is_completed_by_loading_it(void) {
    test_rng rng = test_rng_new(22);
    static chains c;
    static asked a;
    open_chains(&c, &rng);
    sk_store *store = open_absent();
    uint8_t outcomes[LEAVES];
    sk_buf x = {0}, y = {0};
    a.n = 0;
    for (uint32_t k = 0; k < KEYS + 40; k += 7) ask(&a, k);
    for (uint32_t s = 0; s < STATES; s++) CHECK_EQ(pick(store, s, &a, &c, outcomes), SK_OK);
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++)
        for (int step = 0; step < STEPS; step++) {
            const sk_buf *frames = &c.frames[leaf][step];
            int mode = step == STEPS - 1 ? SK_UNDER_ALL : SK_UNDER;
            CHECK_EQ(sk_leaf_decode(store, leaf, frames->data, frames->len, mode), SK_OK);
        }
    util_encode_all(store, LEAVES, &x);
    util_encode_all(c.store, LEAVES, &y);
    CHECK(util_same(&x, &y));
    sk_buf_free(&x);
    sk_buf_free(&y);
    sk_close(store);
    close_chains(&c);
}

static void check_left(sk_store *store, const asked *a, const chains *c, uint32_t s, int expected) {
    const uint32_t leaf = 0;
    uint8_t outcomes[LEAVES];
    CHECK_EQ(pick(store, s, a, c, outcomes), SK_OK);
    CHECK_EQ(outcomes[leaf], expected);
    CHECK_EQ(sk_leaf_residency(store, leaf), SK_ABSENT);
    sk_stats stats;
    CHECK_EQ(sk_stats_read(store, SK_ALL_STATES, leaf, leaf + 1, &stats), SK_OK);
    CHECK_EQ(stats.entries + stats.tombstones, 0);
}

/* Some keys of leaf 0. */
static void ask_some(asked *a, int count) {
    a->n = 0;
    for (uint32_t k = 0; a->n < count; k++)
        if (leaf_of(k) == 0) ask(a, k);
}

static void test_a_damaged_leaf_is_left_as_it_was(void) {
    test_rng rng = test_rng_new(23);
    static chains c;
    static asked a;
    open_chains(&c, &rng);
    ask_some(&a, 3);
    for (int step = 0; step < STEPS; step++)
        for (int round = 0; round < 200; round++) {
            sk_buf *frames = &c.frames[0][step];
            size_t at = (size_t)test_below(&rng, frames->len);
            uint8_t was = frames->data[at];
            frames->data[at] ^= (uint8_t)(1u << test_below(&rng, 8));
            sk_store *store = open_absent();
            check_left(store, &a, &c, (uint32_t)round % STATES, SK_UNFIT);
            sk_close(store);
            frames->data[at] = was;
        }
    /* Also if the checksum fits the damage, because then the other checks must find it. */
    int left = 0;
    for (int round = 0; round < 2000; round++) {
        int step = (int)test_below(&rng, STEPS);
        sk_buf *frames = &c.frames[0][step];
        uint8_t *copy = malloc(frames->len);
        memcpy(copy, frames->data, frames->len);
        CHECK_EQ(sk_frames_bind(frames->data, frames->len, c.pack[step], PACK_OFFSET), SK_OK);
        size_t at = 0; /* the start of a frame, whose size must not change */
        for (uint64_t skip = test_below(&rng, STATES); skip > 0; skip--) {
            uint64_t size;
            memcpy(&size, frames->data + at + 8, 8);
            if (at + size < frames->len) at += size;
        }
        uint64_t size;
        memcpy(&size, frames->data + at + 8, 8);
        size_t byte = at + 16 + (size_t)test_below(&rng, size - 16);
        frames->data[byte] ^= (uint8_t)(1u << test_below(&rng, 8));
        memset(frames->data + at + 4, 0, 4);
        CHECK_EQ(sk_frames_seal(frames->data, frames->len), SK_OK);
        CHECK_EQ(sk_frames_bind(frames->data, frames->len, c.pack[step], PACK_OFFSET), SK_OK);
        sk_store *store = open_absent();
        uint8_t outcomes[LEAVES];
        CHECK_EQ(pick(store, (uint32_t)test_below(&rng, STATES), &a, &c, outcomes), SK_OK);
        CHECK(outcomes[0] == SK_PICKED || outcomes[0] == SK_UNFIT);
        left += outcomes[0] == SK_UNFIT;
        CHECK_EQ(util_stats(store, LEAVES).bytes, sk_bytes_used(store));
        sk_close(store);
        memcpy(frames->data, copy, frames->len);
        free(copy);
    }
    CHECK(left > 100);
    close_chains(&c);
}

static void test_what_needs_the_whole_leaf_is_left(void) {
    test_rng rng = test_rng_new(24);
    static chains c;
    static asked a;
    uint8_t outcomes[LEAVES];
    open_chains(&c, &rng);
    /* so many keys that loading the leaf is less work */
    ask_some(&a, 2 * KEYS);
    sk_store *store = open_absent();
    check_left(store, &a, &c, N, SK_TO_LOAD);
    sk_close(store);
    /* another type than the block's */
    ask_some(&a, 3);
    store = util_open(LEAVES, 1);
    uint32_t id = util_state(store, "n", SK_F64, "b");
    CHECK_EQ(sk_leaf_mark(store, 0, LEAVES, SK_ABSENT), SK_OK);
    check_left(store, &a, &c, id, SK_UNFIT);
    id = util_state(store, "x", SK_I64, "b");
    check_left(store, &a, &c, id, SK_UNFIT);
    sk_close(store);
    /* a state that the chain does not have: then its keys are known to be missing */
    store = util_open(LEAVES, 1);
    id = util_state(store, "new", SK_I64, "b");
    CHECK_EQ(sk_leaf_mark(store, 0, LEAVES, SK_ABSENT), SK_OK);
    CHECK_EQ(pick(store, id, &a, &c, outcomes), SK_OK);
    CHECK_EQ(outcomes[0], SK_PICKED);
    for (uint32_t k = 0, seen = 0; seen < 3; k++) {
        util_key key = util_bytes_key(k);
        if (leaf_of(k) != 0) continue;
        seen++;
        CHECK_EQ(sk_contains(store, id, key.data, key.len), SK_MISSING);
    }
    sk_close(store);
    /* a store of another number of leaves */
    store = util_open(2 * LEAVES, 1);
    CHECK_EQ(util_state(store, "n", SK_I64, "b"), 0);
    CHECK_EQ(sk_leaf_mark(store, 0, 2 * LEAVES, SK_ABSENT), SK_OK);
    sk_column keys = column_of(&a);
    uint8_t more[LEAVES * STEPS] = {0};
    CHECK_EQ(sk_chains_pick(store, 0, &keys, a.n, c.segments, LEAVES * STEPS, more), SK_OK);
    for (uint32_t k = 0; k < LEAVES * STEPS; k++) CHECK(more[k] != SK_PICKED);
    sk_close(store);
    close_chains(&c);
}

static void test_leaves_that_take_nothing_in_are_passed_over(void) {
    test_rng rng = test_rng_new(25);
    static chains c;
    static asked a;
    uint8_t outcomes[LEAVES];
    open_chains(&c, &rng);
    a.n = 0;
    for (uint32_t k = 0; k < 24; k++) ask(&a, k);
    sk_store *store = open_absent();
    CHECK_EQ(sk_leaf_mark(store, 0, 1, SK_WHOLE), SK_OK);
    CHECK_EQ(sk_leaf_mark(store, 1, 2, SK_AWAY), SK_OK);
    CHECK_EQ(sk_leaf_gate(store, 2, 3, SK_GATE_SHUT), SK_OK);
    CHECK_EQ(sk_leaf_gate(store, 3, 4, SK_GATE_EXPECTED), SK_OK);
    CHECK_EQ(pick(store, N, &a, &c, outcomes), SK_OK);
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++) CHECK_EQ(outcomes[leaf], 0);
    CHECK_EQ(util_stats(store, LEAVES).entries, 0);
    sk_close(store);
    close_chains(&c);
}

static void test_bad_arguments_are_refused(void) {
    test_rng rng = test_rng_new(26);
    static chains c;
    static asked a;
    uint8_t outcomes[LEAVES];
    open_chains(&c, &rng);
    ask_some(&a, 3);
    sk_store *store = open_absent();
    CHECK_EQ(pick(store, STATES, &a, &c, outcomes), SK_BAD_ARGUMENT);
    sk_segment first = c.segments[0];
    c.segments[0].leaf = 1;
    CHECK_EQ(pick(store, N, &a, &c, outcomes), SK_BAD_ARGUMENT);
    c.segments[0] = first;
    c.segments[LEAVES * STEPS - 1].leaf = LEAVES;
    CHECK_EQ(pick(store, N, &a, &c, outcomes), SK_BAD_ARGUMENT);
    CHECK_EQ(util_stats(store, LEAVES).entries, 0);
    sk_close(store);
    close_chains(&c);
}

static void test_failing_allocations_leave_no_leaf_half_filled(void) {
    test_rng rng = test_rng_new(27);
    static chains c;
    static asked a;
    uint8_t outcomes[LEAVES];
    open_chains(&c, &rng);
    a.n = 0;
    for (uint32_t k = 0; k < 40; k++) ask(&a, k);
    int failed = 0;
    for (int64_t nth = 1, is_done = 0; !is_done; nth++) {
        sk_store *store = open_absent();
        sk_fail_alloc(nth, nth % 2);
        int status = pick(store, L, &a, &c, outcomes);
        is_done = sk_alloc_count() < nth;
        sk_fail_alloc(0, 0);
        CHECK(status == SK_OK || status == SK_NO_MEMORY);
        if (is_done) CHECK_EQ(status, SK_OK);
        failed += status != SK_OK;
        for (uint32_t k = 0; k < 40; k++) {
            util_key key = util_bytes_key(k);
            if (outcomes[leaf_of(k)] == SK_PICKED)
                check_same(store, c.store, L, k);
            else
                CHECK_EQ(sk_contains(store, L, key.data, key.len), SK_UNKNOWN);
        }
        CHECK_EQ(util_stats(store, LEAVES).bytes, sk_bytes_used(store));
        CHECK_EQ(pick(store, L, &a, &c, outcomes), SK_OK); /* trying again is safe */
        for (uint32_t k = 0; k < 40; k++) check_same(store, c.store, L, k);
        sk_close(store);
    }
    CHECK(failed > 10);
    close_chains(&c);
}

int main(void) {
    RUN(test_what_is_picked_is_what_the_chain_adds_up_to);
    RUN(test_a_picked_leaf_is_completed_by_loading_it);
    RUN(test_a_damaged_leaf_is_left_as_it_was);
    RUN(test_what_needs_the_whole_leaf_is_left);
    RUN(test_leaves_that_take_nothing_in_are_passed_over);
    RUN(test_bad_arguments_are_refused);
    RUN(test_failing_allocations_leave_no_leaf_half_filled);
    return test_report();
}
