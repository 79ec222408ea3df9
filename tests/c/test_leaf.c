/*
 * test_leaf.c: leaves as units (csrc/leaf.c): residency, clearing, and a store together with its
 * home. The oracle of a partial leaf is the pair (truth, home): whatever happens, if the store does
 * not know a key, the home is asked, and the home's answer must be the truth.
 */
#include "store_util.h"

#define LEAVES 8
#define LEAF_BITS 3
#define KEYS 300

/* ---- Residency, one rule at a time ---- */

static void test_new_leaves_are_whole_and_marks_are_kept(void) {
    sk_store *store = util_open(4, 2);
    CHECK_EQ(sk_leaf_residency(store, 7), SK_WHOLE);
    CHECK_EQ(sk_leaf_residency(store, 8), -SK_BAD_ARGUMENT);
    CHECK_EQ(sk_leaf_mark(store, 2, 4, SK_ABSENT), SK_OK);
    CHECK_EQ(sk_leaf_mark(store, 4, 5, SK_PARTIAL), SK_OK);
    CHECK_EQ(sk_leaf_mark(store, 5, 5, SK_ABSENT), SK_OK); /* none */
    CHECK_EQ(sk_leaf_residency(store, 1), SK_WHOLE);
    CHECK_EQ(sk_leaf_residency(store, 2), SK_ABSENT);
    uint32_t some[4] = {2, 1, 2, 7};
    uint8_t found[4];
    CHECK_EQ(sk_leaf_residencies(store, some, 4, found), SK_OK);
    CHECK(memcmp(found, (uint8_t[]){SK_ABSENT, SK_WHOLE, SK_ABSENT, SK_WHOLE}, 4) == 0);
    some[3] = 8;
    CHECK_EQ(sk_leaf_residencies(store, some, 4, found), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_leaf_residencies(store, some, 0, found), SK_OK);
    CHECK_EQ(sk_leaf_residency(store, 4), SK_PARTIAL);
    CHECK_EQ(sk_leaf_residency(store, 5), SK_WHOLE);
    sk_stats stats = util_stats(store, LEAVES);
    CHECK_EQ(stats.leaves[SK_WHOLE], 5);
    CHECK_EQ(stats.leaves[SK_PARTIAL], 1);
    CHECK_EQ(stats.leaves[SK_ABSENT], 2);
    CHECK_EQ(sk_leaf_mark(store, 0, 9, SK_WHOLE), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_leaf_mark(store, 3, 2, SK_WHOLE), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_leaf_mark(store, 0, 1, 4), SK_BAD_ARGUMENT);
    sk_close(store);
}

static void test_absent_leaf_answers_unknown_until_written_or_told(void) {
    sk_store *store = util_open(4, 2);
    uint32_t id = util_state(store, "n", SK_I64, "i");
    util_key key[3];
    int64_t value = 0, expected = 1;
    sk_buf buf = {0};
    util_keys_of_leaf(3, LEAF_BITS, key, 3);
    CHECK_EQ(sk_leaf_mark(store, 3, 4, SK_ABSENT), SK_OK);
    CHECK_EQ(sk_i64_get(store, id, key[0].data, 8, &value), SK_UNKNOWN);
    CHECK_EQ(sk_contains(store, id, key[0].data, 8), SK_UNKNOWN);
    CHECK_EQ(sk_get(store, id, key[0].data, 8, &buf), -SK_UNKNOWN);
    CHECK_EQ(sk_i64_fold(store, id, key[0].data, 8, SK_ADD, 1, 0, &value), SK_UNKNOWN);
    CHECK_EQ(sk_i64_cas(store, id, key[0].data, 8, &expected, 2, &value), SK_UNKNOWN);
    CHECK_EQ(sk_i64_cas(store, id, key[0].data, 8, NULL, 2, &value), SK_UNKNOWN);
    CHECK_EQ(sk_delete(store, id, key[0].data, 8, 0), SK_UNKNOWN);
    CHECK_EQ(sk_clear(store, id, 0, LEAVES, 0), SK_UNKNOWN);
    CHECK_EQ(sk_leaf_residency(store, 3), SK_ABSENT); /* asking changes nothing */
    CHECK_EQ(sk_i64_put(store, id, key[0].data, 8, 5), SK_OK);
    CHECK_EQ(sk_leaf_residency(store, 3), SK_PARTIAL);
    CHECK_EQ(sk_i64_get(store, id, key[0].data, 8, &value), SK_OK);
    CHECK_EQ(sk_i64_get(store, id, key[1].data, 8, &value), SK_UNKNOWN);
    CHECK_EQ(sk_delete(store, id, key[1].data, 8, SK_BLIND), SK_OK);
    CHECK_EQ(sk_i64_get(store, id, key[1].data, 8, &value), SK_MISSING);
    CHECK_EQ(sk_delete(store, id, key[1].data, 8, 0), SK_MISSING);
    CHECK_EQ(sk_install(store, id, key[2].data, 8, NULL, 0, SK_NO_TIME), SK_OK);
    CHECK_EQ(sk_contains(store, id, key[2].data, 8), SK_MISSING);
    sk_stats stats = util_stats(store, LEAVES);
    CHECK_EQ(stats.entries, 1);
    CHECK_EQ(stats.tombstones, 2);
    CHECK_EQ(stats.dirty, 2); /* the put and the blind deletion, but not what was installed */
    sk_buf_free(&buf);
    sk_close(store);
}

static void test_install_never_overwrites_what_is_here(void) {
    sk_store *store = util_open(4, 2);
    uint32_t id = util_state(store, "n", SK_I64, "i");
    util_key key[3];
    int64_t value = 0, other = 77;
    util_keys_of_leaf(3, LEAF_BITS, key, 3);
    CHECK_EQ(sk_leaf_mark(store, 3, 4, SK_ABSENT), SK_OK);
    CHECK_EQ(sk_i64_put(store, id, key[0].data, 8, 1), SK_OK);
    CHECK_EQ(sk_delete(store, id, key[1].data, 8, SK_BLIND), SK_OK);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(sk_install(store, id, key[i].data, 8, (uint8_t *)&other, 8, SK_NO_TIME), SK_OK);
    CHECK_EQ(sk_i64_get(store, id, key[0].data, 8, &value), SK_OK);
    CHECK_EQ(value, 1);
    CHECK_EQ(sk_i64_get(store, id, key[1].data, 8, &value), SK_MISSING);
    CHECK_EQ(sk_i64_get(store, id, key[2].data, 8, &value), SK_OK);
    CHECK_EQ(value, 77);
    CHECK_EQ(sk_install(store, id, key[0].data, 8, NULL, 0, SK_NO_TIME), SK_OK);
    CHECK_EQ(sk_contains(store, id, key[0].data, 8), SK_OK);
    CHECK_EQ(util_stats(store, LEAVES).dirty, 2);
    /* a whole leaf knows all keys: a late answer must not bring back what was deleted */
    CHECK_EQ(sk_leaf_mark(store, 3, 4, SK_WHOLE), SK_OK);
    CHECK_EQ(sk_delete(store, id, key[2].data, 8, 0), SK_OK);
    CHECK_EQ(sk_install(store, id, key[2].data, 8, (uint8_t *)&other, 8, SK_NO_TIME), SK_OK);
    CHECK_EQ(sk_contains(store, id, key[2].data, 8), SK_MISSING);
    sk_close(store);
}

static void test_away_leaf_refuses_every_call_until_it_comes_back(void) {
    sk_store *store = util_open(1, 1), *other = util_open(1, 1);
    uint32_t n = util_state(store, "n", SK_I64, "i"), l = util_state(store, "l", SK_LIST, "i");
    util_key key = util_int_key(7);
    int64_t value = 5;
    uint64_t cursor = 0, version = 0;
    uint8_t status = 0;
    sk_buf buf = {0}, blocks = {0};
    sk_leaves *leaves = NULL;
    sk_snapshot *snapshot = NULL;
    CHECK_EQ(sk_i64_put(store, n, key.data, 8, 5), SK_OK);
    uint32_t since = sk_epoch_advance(store);
    CHECK(sk_leaf_encode(store, 0, SK_ALL_STATES, 0, &blocks) > 0);
    CHECK_EQ(sk_detach(store, 0, 1, &leaves), SK_OK);
    CHECK_EQ(sk_i64_get(store, n, key.data, 8, &value), SK_NOT_OWNED);
    CHECK_EQ(sk_i64_put(store, n, key.data, 8, 1), SK_NOT_OWNED);
    CHECK_EQ(sk_i64_fold(store, n, key.data, 8, SK_ADD, 1, 0, NULL), SK_NOT_OWNED);
    CHECK_EQ(sk_i64_cas(store, n, key.data, 8, NULL, 1, NULL), SK_NOT_OWNED);
    CHECK_EQ(sk_contains(store, n, key.data, 8), SK_NOT_OWNED);
    CHECK_EQ(sk_delete(store, n, key.data, 8, SK_BLIND), SK_NOT_OWNED);
    CHECK_EQ(sk_get(store, n, key.data, 8, &buf), -SK_NOT_OWNED);
    CHECK_EQ(sk_put(store, n, key.data, 8, (uint8_t *)&value, 8), SK_NOT_OWNED);
    CHECK_EQ(sk_install(store, n, key.data, 8, (uint8_t *)&value, 8, SK_NO_TIME), SK_NOT_OWNED);
    CHECK_EQ(sk_install(store, n, key.data, 8, NULL, 0, SK_NO_TIME), SK_NOT_OWNED);
    CHECK_EQ(sk_read(store, l, key.data, 8, SK_R_LEN, NULL, 0, NULL, 0, 0, 0, &buf), -SK_NOT_OWNED);
    CHECK_EQ(sk_write(store, l, key.data, 8, SK_W_APPEND, NULL, 0, "l", key.data, 1, 0, 0, &buf),
             -SK_NOT_OWNED);
    CHECK_EQ(sk_page(store, l, key.data, 8, NULL, 0, &cursor, &version, 1, &buf), -SK_NOT_OWNED);
    for (int op = SK_B_GET; op <= SK_B_DELETE; op++) {
        sk_batch_args args = {.n = 1,
                              .flags = SK_BLIND,
                              .keys = {SK_COL_I64, 0, key.data, NULL, 8},
                              .values = {SK_COL_I64, 0, &value, NULL, 8},
                              .out = &value,
                              .status = &status};
        CHECK_EQ(sk_batch(store, n, op, &args), SK_NOT_OWNED);
        CHECK_EQ(args.failed, 0);
        CHECK_EQ(status, SK_END);
    }
    for (int mode = SK_UNDER; mode <= SK_OVER; mode++)
        CHECK_EQ(sk_leaf_decode(store, 0, blocks.data, blocks.len, mode), SK_NOT_OWNED);
    CHECK_EQ(sk_clear(store, n, 0, 1, 0), SK_OK); /* nothing of the leaf is here */
    CHECK_EQ(sk_evict(store, UINT64_MAX), 0);
    CHECK_EQ(sk_leaf_encode(store, 0, SK_ALL_STATES, 0, &buf), 0);
    CHECK_EQ(sk_leaf_encode(store, 0, SK_ALL_STATES, since, &buf), 0); /* not "all was deleted" */
    CHECK_EQ(sk_dirty_take(store, 0, 0, &buf), 0);
    CHECK_EQ(sk_snapshot_open(store, &since, 0, &snapshot), SK_OK);
    CHECK_EQ(sk_snapshot_residency(snapshot, 0), SK_AWAY);
    CHECK_EQ(sk_leaf_residency(store, 0), SK_AWAY);
    CHECK_EQ(sk_attach(store, leaves), SK_OK);
    CHECK_EQ(sk_snapshot_residency(snapshot, 0), SK_AWAY);
    CHECK_EQ(sk_snapshot_next(snapshot, &since, &buf), -SK_END);
    sk_snapshot_close(snapshot);
    CHECK_EQ(sk_i64_get(store, n, key.data, 8, &value), SK_OK);
    CHECK_EQ(value, 5);
    CHECK_EQ(sk_leaf_mark(other, 0, 1, SK_AWAY), SK_OK);
    CHECK_EQ(sk_leaf_decode(other, 0, blocks.data, blocks.len, SK_REPLACE), SK_OK);
    CHECK_EQ(sk_leaf_residency(other, 0), SK_WHOLE);
    CHECK_EQ(sk_i64_get(other, 0, key.data, 8, &value), SK_OK);
    CHECK_EQ(sk_leaf_mark(other, 0, 1, SK_AWAY), SK_OK); /* drops what is there */
    CHECK_EQ(sk_bytes_used(other), 0);
    sk_buf_free(&buf);
    sk_buf_free(&blocks);
    sk_close(store);
    sk_close(other);
}

static void test_marking_absent_drops_and_marking_whole_forgets_tombstones(void) {
    sk_store *store = util_open(4, 2);
    uint32_t id = util_state(store, "b", SK_BYTES, "i");
    util_key key[4];
    util_keys_of_leaf(5, LEAF_BITS, key, 4);
    CHECK_EQ(sk_leaf_mark(store, 5, 6, SK_PARTIAL), SK_OK);
    for (int i = 0; i < 4; i++) CHECK_EQ(sk_put(store, id, key[i].data, 8, key[i].data, 8), SK_OK);
    CHECK_EQ(sk_delete(store, id, key[0].data, 8, 0), SK_OK);
    CHECK_EQ(util_stats(store, LEAVES).tombstones, 1);
    CHECK_EQ(sk_leaf_mark(store, 5, 6, SK_WHOLE), SK_OK);
    CHECK_EQ(util_stats(store, LEAVES).tombstones, 0);
    CHECK_EQ(util_stats(store, LEAVES).entries, 3);
    CHECK_EQ(sk_leaf_mark(store, 5, 6, SK_ABSENT), SK_OK);
    sk_stats stats = util_stats(store, LEAVES);
    CHECK_EQ(stats.entries, 0);
    CHECK_EQ(stats.dirty, 0);
    CHECK_EQ(stats.bytes, 0);
    CHECK_EQ(sk_bytes_used(store), 0);
    CHECK_EQ(sk_contains(store, id, key[1].data, 8), SK_UNKNOWN);
    sk_close(store);
}

static void test_clear_empties_one_state_in_a_range(void) {
    sk_store *store = util_open(4, 2);
    uint32_t a = util_state(store, "a", SK_BYTES, "b"), b = util_state(store, "b", SK_BYTES, "b");
    util_fill_bytes(store, a, 0, KEYS);
    util_fill_bytes(store, b, 0, KEYS);
    CHECK_EQ(sk_clear(store, a, 2, 5, 0), SK_OK);
    for (uint32_t k = 0; k < KEYS; k++) {
        util_key key = util_bytes_key(k);
        uint32_t leaf = util_leaf_of("b", &key, LEAF_BITS);
        CHECK_EQ(sk_contains(store, a, key.data, key.len),
                 leaf >= 2 && leaf < 5 ? SK_MISSING : SK_OK);
        CHECK_EQ(sk_contains(store, b, key.data, key.len), SK_OK);
    }
    CHECK_EQ(sk_clear(store, a, 0, 9, 0), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_clear(store, 2, 0, 8, 0), SK_BAD_ARGUMENT);
    CHECK_EQ(sk_leaf_mark(store, 0, 1, SK_PARTIAL), SK_OK);
    uint64_t entries = util_stats(store, LEAVES).entries;
    CHECK_EQ(sk_clear(store, b, 0, LEAVES, 0), SK_UNKNOWN);
    CHECK_EQ(util_stats(store, LEAVES).entries, entries);
    CHECK_EQ(sk_clear(store, b, 0, LEAVES, SK_BLIND), SK_OK);
    CHECK_EQ(sk_clear(store, a, 0, LEAVES, SK_BLIND), SK_OK);
    CHECK_EQ(util_stats(store, LEAVES).entries, 0);
    CHECK_EQ(sk_bytes_used(store), 0);
    sk_close(store);
}

/* With write-back on, clearing is a deletion like any other: the home must be told. */
static void test_clear_is_remembered_for_the_home(void) {
    sk_store *store = util_open(4, 2), *home = util_open(4, 2);
    uint32_t id = util_state(store, "n", SK_I64, "i"), home_id = util_state(home, "n", SK_I64, "i");
    util_key key[2];
    sk_buf buf = {0};
    util_keys_of_leaf(0, LEAF_BITS, key, 2);
    CHECK_EQ(sk_write_back(store, 1), SK_OK);
    CHECK_EQ(sk_i64_put(store, id, key[0].data, 8, 1), SK_OK);
    for (int round = 0; round < 2; round++) {
        buf.len = 0;
        CHECK(sk_dirty_take(store, 0, 0, &buf) > 0);
        CHECK_EQ(sk_leaf_decode(home, 0, buf.data, buf.len, SK_OVER), SK_OK);
        CHECK_EQ(sk_dirty_done(store, 0, 1), SK_OK);
        CHECK_EQ(sk_contains(home, home_id, key[0].data, 8), round == 0 ? SK_OK : SK_MISSING);
        if (round == 0) CHECK_EQ(sk_clear(store, id, 0, LEAVES, 0), SK_OK);
        CHECK_EQ(util_stats(store, LEAVES).entries, 0);
    }
    sk_buf_free(&buf);
    sk_close(store);
    sk_close(home);
}

/* ---- A store with a home, against the truth ---- */

typedef struct homed {
    sk_store *store, *home;
    uint32_t id, home_id;
    bool is_there[KEYS]; /* the truth */
    int64_t value[KEYS];
    util_key key[KEYS];
    uint32_t leaf[KEYS];
    bool is_writing[LEAVES];
    sk_buf taken[LEAVES];  /* what the current write-back writes */
    sk_buf answer[LEAVES]; /* a whole leaf that the home sent and that has not arrived */
    bool has_answer[LEAVES];
} homed;

/* The home answers for one key. */
static void resolve(homed *h, uint32_t k) {
    int64_t value = 0;
    int status = sk_i64_get(h->home, h->home_id, h->key[k].data, h->key[k].len, &value);
    CHECK(status == SK_OK || status == SK_MISSING);
    CHECK_EQ(sk_install(h->store, h->id, h->key[k].data, h->key[k].len,
                        status == SK_OK ? (uint8_t *)&value : NULL, 8, SK_NO_TIME),
             SK_OK);
}

static void check_key(homed *h, uint32_t k) {
    int64_t value = 0;
    int status = sk_i64_get(h->store, h->id, h->key[k].data, h->key[k].len, &value);
    if (status == SK_UNKNOWN) {
        CHECK(sk_leaf_residency(h->store, h->leaf[k]) != SK_WHOLE);
        resolve(h, k);
        status = sk_i64_get(h->store, h->id, h->key[k].data, h->key[k].len, &value);
    }
    CHECK_EQ(status, h->is_there[k] ? SK_OK : SK_MISSING);
    if (status == SK_OK) CHECK_EQ(value, h->value[k]);
}

static void step_write_back(homed *h, uint32_t leaf, test_rng *rng) {
    if (!h->is_writing[leaf]) {
        h->taken[leaf].len = 0;
        int64_t len = sk_dirty_take(h->store, leaf, 0, &h->taken[leaf]);
        CHECK(len >= 0);
        h->is_writing[leaf] = len > 0;
        return;
    }
    int fate = (int)test_below(rng, 3); /* 0: lost on the way there, 1: on the way back, 2: fine */
    if (fate > 0)
        CHECK_EQ(sk_leaf_decode(h->home, leaf, h->taken[leaf].data, h->taken[leaf].len, SK_OVER),
                 SK_OK);
    CHECK_EQ(sk_dirty_done(h->store, leaf, fate == 2), SK_OK);
    h->is_writing[leaf] = false;
}

static void step_answer(homed *h, uint32_t leaf, bool is_all) {
    if (!h->has_answer[leaf]) {
        h->answer[leaf].len = 0;
        CHECK(sk_leaf_encode(h->home, leaf, SK_ALL_STATES, 0, &h->answer[leaf]) >= 0);
        h->has_answer[leaf] = true;
        return;
    }
    CHECK_EQ(sk_leaf_decode(h->store, leaf, h->answer[leaf].data, h->answer[leaf].len,
                            is_all ? SK_UNDER_ALL : SK_UNDER),
             SK_OK);
    h->has_answer[leaf] = false;
}

static void step_change(homed *h, uint32_t k, test_rng *rng) {
    const util_key *key = &h->key[k];
    int64_t value = (int64_t)test_below(rng, 1000), result = 0;
    int what = (int)test_below(rng, 4), status = SK_OK;
    if (what == 0) {
        CHECK_EQ(sk_i64_put(h->store, h->id, key->data, key->len, value), SK_OK);
        h->is_there[k] = true;
        h->value[k] = value;
    } else if (what == 1) {
        status = sk_delete(h->store, h->id, key->data, key->len, 0);
        if (status == SK_UNKNOWN) {
            CHECK_EQ(sk_delete(h->store, h->id, key->data, key->len, SK_BLIND), SK_OK);
        } else {
            CHECK_EQ(status, h->is_there[k] ? SK_OK : SK_MISSING);
        }
        h->is_there[k] = false;
    } else {
        status = sk_i64_fold(h->store, h->id, key->data, key->len, SK_ADD, value, 7, &result);
        if (status == SK_UNKNOWN) {
            resolve(h, k);
            status = sk_i64_fold(h->store, h->id, key->data, key->len, SK_ADD, value, 7, &result);
        }
        CHECK_EQ(status, SK_OK);
        h->value[k] = (h->is_there[k] ? h->value[k] : 7) + value;
        h->is_there[k] = true;
        CHECK_EQ(result, h->value[k]);
    }
}

/* Takes a leaf out and puts it back: nothing may change, except that entries that were being
 * written are dirty again. */
static void step_move(homed *h, uint32_t leaf) {
    sk_leaves *leaves = NULL;
    CHECK_EQ(sk_detach(h->store, leaf, leaf + 1, &leaves), SK_OK);
    CHECK_EQ(sk_leaf_residency(h->store, leaf), SK_AWAY);
    CHECK_EQ(sk_attach(h->store, leaves), SK_OK);
    h->is_writing[leaf] = false;
}

static void run_homed(uint64_t stream, bool evicts) {
    static homed h;
    test_rng rng = test_rng_new(stream);
    h = (homed){.store = util_open(4, 2), .home = util_open(4, 2)};
    h.id = util_state(h.store, "n", SK_I64, "b");
    h.home_id = util_state(h.home, "n", SK_I64, "b");
    CHECK_EQ(sk_write_back(h.store, 1), SK_OK);
    CHECK_EQ(sk_leaf_mark(h.store, 0, LEAVES, SK_ABSENT), SK_OK);
    for (uint32_t k = 0; k < KEYS; k++) {
        h.key[k] = util_bytes_key(k);
        h.leaf[k] = util_leaf_of("b", &h.key[k], LEAF_BITS);
        h.is_there[k] = k % 3 == 0;
        h.value[k] = k;
        if (h.is_there[k])
            CHECK_EQ(sk_i64_put(h.home, h.home_id, h.key[k].data, h.key[k].len, k), SK_OK);
    }
    for (int step = 0; step < 20000; step++) {
        uint32_t k = (uint32_t)test_below(&rng, KEYS), leaf = (uint32_t)test_below(&rng, LEAVES);
        unsigned what = (unsigned)test_below(&rng, 1000);
        if (what < 500)
            step_change(&h, k, &rng);
        else if (what < 850)
            check_key(&h, k);
        else if (what < 920)
            step_write_back(&h, leaf, &rng);
        else if (what < 970)
            step_answer(&h, leaf, test_below(&rng, 4) == 0);
        else if (what < 975)
            step_move(&h, leaf);
        else if (what < 990 && evicts) {
            CHECK(sk_evict(h.store, 1 + test_below(&rng, 3000)) >= 0);
            /* older answers may be older than what was evicted, so they are dropped and asked for
             * again */
            memset(h.has_answer, 0, sizeof h.has_answer);
        } else if (what == 999 && !h.is_writing[leaf]) {
            /* write the leaf home and start again with nothing here */
            h.taken[leaf].len = 0;
            if (sk_dirty_take(h.store, leaf, 0, &h.taken[leaf]) > 0) {
                CHECK_EQ(
                    sk_leaf_decode(h.home, leaf, h.taken[leaf].data, h.taken[leaf].len, SK_OVER),
                    SK_OK);
                CHECK_EQ(sk_dirty_done(h.store, leaf, 1), SK_OK);
            }
            CHECK_EQ(sk_leaf_mark(h.store, leaf, leaf + 1, SK_ABSENT), SK_OK);
            h.has_answer[leaf] = false;
        }
    }
    for (uint32_t k = 0; k < KEYS; k++) check_key(&h, k);
    for (uint32_t leaf = 0; leaf < LEAVES; leaf++) { /* flush: the home must end with the truth */
        if (h.is_writing[leaf]) CHECK_EQ(sk_dirty_done(h.store, leaf, 0), SK_OK);
        h.taken[leaf].len = 0;
        CHECK(sk_dirty_take(h.store, leaf, 0, &h.taken[leaf]) >= 0);
        CHECK_EQ(sk_leaf_decode(h.home, leaf, h.taken[leaf].data, h.taken[leaf].len, SK_OVER),
                 SK_OK);
        CHECK_EQ(sk_dirty_done(h.store, leaf, 1), SK_OK);
        sk_buf_free(&h.taken[leaf]);
        sk_buf_free(&h.answer[leaf]);
    }
    for (uint32_t k = 0; k < KEYS; k++)
        CHECK_EQ(sk_contains(h.home, h.home_id, h.key[k].data, h.key[k].len),
                 h.is_there[k] ? SK_OK : SK_MISSING);
    CHECK_EQ(util_stats(h.store, LEAVES).dirty, 0);
    CHECK(sk_evict(h.store, UINT64_MAX) >= 0);
    CHECK_EQ(util_stats(h.store, LEAVES).entries, 0);
    for (uint32_t k = 0; k < KEYS; k++) check_key(&h, k);
    sk_close(h.store);
    sk_close(h.home);
}

static void test_store_and_home_together_always_know_the_truth(void) {
    for (uint64_t stream = 0; stream < 12; stream++) run_homed(stream, stream % 3 != 0);
}

int main(void) {
    RUN(test_new_leaves_are_whole_and_marks_are_kept);
    RUN(test_absent_leaf_answers_unknown_until_written_or_told);
    RUN(test_install_never_overwrites_what_is_here);
    RUN(test_away_leaf_refuses_every_call_until_it_comes_back);
    RUN(test_marking_absent_drops_and_marking_whole_forgets_tombstones);
    RUN(test_clear_empties_one_state_in_a_range);
    RUN(test_clear_is_remembered_for_the_home);
    RUN(test_store_and_home_together_always_know_the_truth);
    return test_report();
}
