/*
 * test_encode_wide.c: blocks whose offsets need 8 bytes. The encoder is compiled with a limit of
 * 1000 bytes, where the real one has 2 GiB. Oracle: the real encoder. Rewriting a block gives it
 * the narrowest offsets that suffice, so the result must be what the real encoder writes.
 */
#define SK_NARROW_MAX 1000
#define sk_block_encode wide_block_encode
#define sk_wanted_make wide_wanted_make
#define sk_wanted_free wide_wanted_free
#define sk_wanted_find wide_wanted_find
#define sk_wanted_encode wide_wanted_encode

#include "../../csrc/encode.c"

#undef sk_block_encode
#undef sk_wanted_make
#undef sk_wanted_free
#undef sk_wanted_find
#undef sk_wanted_encode

#include "store.h"
#include "store_util.h"

int sk_block_encode(const sk_table *table, const sk_table_env *env, const char *name, uint32_t leaf,
                    sk_select select, uint32_t since, const sk_past *past, sk_buf *buf);

static void check_both(int kind, uint32_t entries, size_t value_len, int width) {
    sk_store *store = util_open(1, 1);
    uint32_t id = util_state(store, "s", kind, "b");
    for (uint32_t k = 0; k < entries; k++) {
        util_key key = util_bytes_key(k);
        uint8_t value[256] = {0xc4, (uint8_t)(value_len - 2)}; /* MessagePack: bytes */
        memset(value + 2, (int)k, sizeof value - 2);
        CHECK_EQ(sk_put(store, id, key.data, key.len, value, value_len), SK_OK);
    }
    sk_table_env env;
    sk_env_set(&env, store, store->states[id], &store->leaves[0], 0);
    const sk_table *table = &store->states[id]->tables[0];
    sk_buf narrow = {0}, wide = {0}, again = {0};
    sk_block_info info;
    CHECK_EQ(sk_buf_put(&wide, "before..", 8), SK_OK);
    CHECK_EQ(sk_block_encode(table, &env, "s", 0, SK_SELECT_ALL, 0, NULL, &narrow), SK_OK);
    CHECK_EQ(wide_block_encode(table, &env, "s", 0, SK_SELECT_ALL, 0, NULL, &wide), SK_OK);
    CHECK(memcmp(wide.data, "before..", 8) == 0);
    CHECK_EQ(sk_block_check(wide.data + 8, wide.len - 8), SK_OK);
    CHECK_EQ(sk_block_read(wide.data + 8, wide.len - 8, &info), SK_OK);
    CHECK_EQ(info.offset_width, width);
    CHECK_EQ(info.size, wide.len - 8);
    CHECK_EQ(sk_block_rewrite(wide.data + 8, wide.len - 8, 0, 0, kind, 0, 0, &again), SK_OK);
    CHECK(util_same(&narrow, &again));
    sk_buf_free(&narrow);
    sk_buf_free(&wide);
    sk_buf_free(&again);
    sk_close(store);
}

static void test_values_beyond_the_limit_get_wide_offsets(void) {
    const int kinds[] = {SK_BYTES, SK_NESTED};
    for (int k = 0; k < 2; k++) {
        check_both(kinds[k], 10, 100, 4); /* 1000 bytes */
        check_both(kinds[k], 10, 101, 8);
        check_both(kinds[k], 20, 200, 8);
        check_both(kinds[k], 100, 3, 8); /* keys of more than 1000 bytes */
    }
}

int main(void) {
    RUN(test_values_beyond_the_limit_get_wide_offsets);
    return test_report();
}
