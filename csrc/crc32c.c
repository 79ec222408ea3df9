/*
 * crc32c.c: CRC-32C (Castagnoli), with the processor's instruction if it has
 * one, else eight bytes at a time with tables that are made on first use.
 */
#include "hash.h"

#include <pthread.h>

#define CRC32C_POLY 0x82f63b78u /* reflected */

static uint32_t table[8][256];
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

static void make_table(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ ((crc & 1) ? CRC32C_POLY : 0);
        table[0][byte] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (int byte = 0; byte < 256; byte++)
            table[k][byte] = (table[k - 1][byte] >> 8) ^ table[0][table[k - 1][byte] & 0xff];
}

static uint32_t crc_portable(uint32_t crc, const uint8_t *p, size_t len) {
    pthread_once(&table_once, make_table);
    for (; len >= 8; p += 8, len -= 8) {
        uint64_t word = sk_load64(p) ^ crc;
        crc = 0;
        for (int k = 0; k < 8; k++) crc ^= table[7 - k][(word >> (8 * k)) & 0xff];
    }
    for (; len > 0; p++, len--) crc = (crc >> 8) ^ table[0][(crc ^ *p) & 0xff];
    return crc;
}

#if defined(__x86_64__) && !defined(SK_PORTABLE)
#include <nmmintrin.h>

__attribute__((target("sse4.2"))) static uint32_t crc_native(uint32_t crc, const uint8_t *p,
                                                             size_t len) {
    uint64_t wide = crc;
    for (; len >= 8; p += 8, len -= 8) wide = _mm_crc32_u64(wide, sk_load64(p));
    crc = (uint32_t)wide;
    for (; len > 0; p++, len--) crc = _mm_crc32_u8(crc, *p);
    return crc;
}

static int has_native(void) { return __builtin_cpu_supports("sse4.2"); }
#else
static uint32_t crc_native(uint32_t crc, const uint8_t *p, size_t len) {
    return crc_portable(crc, p, len);
}
static int has_native(void) { return 0; }
#endif

uint32_t sk_crc32c(const uint8_t *data, size_t len, uint32_t seed) {
    return ~(has_native() ? crc_native(~seed, data, len) : crc_portable(~seed, data, len));
}
