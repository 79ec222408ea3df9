/*
 * test_batch_guess.c: the place that a batch looked up ahead (csrc/batch.c) is good only while the
 * slot is in use. Compiles batch.c into itself, to ask is_good_guess directly: whether an array
 * comes to lie over an older one is the allocator's choice, and no test can force it.
 */
#define sk_batch inner_batch
#define sk_pack_keys inner_pack_keys
#include "../../csrc/batch.c"
#undef sk_batch
#undef sk_pack_keys

#include "store_util.h"

static void test_stale_slot_with_the_same_key_is_no_good_guess(void) {
    sk_store *store = util_open(1, 1);
    uint32_t id = util_state(store, "n", SK_I64, "i");
    util_key bytes = util_int_key(5);
    sk_key key = {bytes.data, bytes.len, sk_xxh64(bytes.data, bytes.len, SK_ROUTE_SEED)};
    CHECK_EQ(sk_i64_put(store, id, bytes.data, bytes.len, 1), SK_OK);
    sk_table *table = &sk_state_at(store, id)->tables[0];
    sk_slot *slot = sk_table_find(table, 0, key.hash, key.data, key.len);
    CHECK(is_good_guess(table, slot, &key));
    CHECK(!is_good_guess(table, NULL, &key));
    CHECK(!is_good_guess(table, table->slots - 1, &key));
    CHECK(!is_good_guess(table, table->slots + SK_GROUP, &key));
    uint8_t *tag = &table->tags[slot - table->slots], was = *tag;
    *tag = SK_TAG_EMPTY; /* memory of an older array: the key is there, the entry is not */
    CHECK(!is_good_guess(table, slot, &key));
    *tag = SK_TAG_DELETED;
    CHECK(!is_good_guess(table, slot, &key));
    *tag = was;
    sk_close(store);
}

int main(void) {
    RUN(test_stale_slot_with_the_same_key_is_no_good_guess);
    return test_report();
}
