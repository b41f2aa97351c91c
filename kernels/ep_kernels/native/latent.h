/* A decode step of latent attention: single tokens of any sequences, and the cache of one layer.
 * rows.c and attend.h say more.
 */
#ifndef MOEMESH_LATENT_H
#define MOEMESH_LATENT_H
#include <stdint.h>

typedef struct {
    const float *query_turn, *key_turn; /* [rows, query / 2] and [rows, rotary / 2] complex */
    const int64_t *at;                  /* [rows] of the cache */
    const int64_t *blocks, *offset, *skip, *keys;
    float *cache;
    int64_t stride, cache_rows, block_size;
} latent_step;

#endif
