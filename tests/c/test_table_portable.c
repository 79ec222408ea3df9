/* test_table_portable.c: test_table.c again, on a table compiled without vector instructions.
 */
#define SK_PORTABLE
#define sk_table_insert portable_table_insert
#define sk_table_insert_reserved portable_table_insert_reserved
#define sk_table_reserve portable_table_reserve
#define sk_table_remove portable_table_remove
#define sk_table_trim portable_table_trim
#define sk_table_purge portable_table_purge
#define sk_table_clear portable_table_clear
#define sk_table_merge portable_table_merge
#define sk_table_track portable_table_track
#define sk_value_free portable_value_free

#include "../../csrc/table.c"

#include "test_table.c"
