#include "varint.h"

#include <pthread.h>

#define CRC_POLYNOMIAL UINT32_C(0xEDB88320)

/* table[k][b]: the effect of byte b seen k bytes before the end of an 8-byte group. */
static uint32_t crc_table[8][256];
static pthread_once_t crc_once = PTHREAD_ONCE_INIT;

static void
crc_fill(void) {
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t c = b;
        for (int bit = 0; bit < 8; bit++) {
            c = (c >> 1) ^ ((c & 1) != 0 ? CRC_POLYNOMIAL : 0);
        }
        crc_table[0][b] = c;
    }
    for (uint32_t b = 0; b < 256; b++) {
        for (int k = 1; k < 8; k++) {
            uint32_t c = crc_table[k - 1][b];
            crc_table[k][b] = (c >> 8) ^ crc_table[0][c & 0xFF];
        }
    }
}

uint32_t
varint_crc32(uint32_t crc, const uint8_t *at, size_t n) {
    pthread_once(&crc_once, crc_fill);
    crc = ~crc;
    for (; n >= 8; n -= 8, at += 8) {
        uint32_t low = crc ^ ((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 |
                              (uint32_t)at[3] << 24);
        crc = crc_table[7][low & 0xFF] ^ crc_table[6][low >> 8 & 0xFF] ^
              crc_table[5][low >> 16 & 0xFF] ^ crc_table[4][low >> 24] ^ crc_table[3][at[4]] ^
              crc_table[2][at[5]] ^ crc_table[1][at[6]] ^ crc_table[0][at[7]];
    }
    for (; n > 0; n--, at++) {
        crc = (crc >> 8) ^ crc_table[0][(crc ^ *at) & 0xFF];
    }
    return ~crc;
}
