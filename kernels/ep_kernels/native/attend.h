/* Attention of single tokens over the paged cache: what it is given. */
#ifndef MOEMESH_ATTEND_H
#define MOEMESH_ATTEND_H
#include <stdint.h>

typedef struct {
    int64_t heads, shared; /* key heads, and queries of each */
    int64_t key_dim, value_dim, value_offset;
    int64_t q_row;              /* values from one row's queries to the next one's */
    int64_t stride, block_size; /* values a cache row, rows a block */
    int64_t most_lanes;         /* values that a vector may hold */
} attend_shape;

typedef struct {
    attend_shape shape;
    const float *q;        /* [rows, heads, shared, key_dim], scaled */
    const float *cache;    /* [rows of the cache, stride] */
    const int64_t *blocks; /* of row r from offset[r] on */
    const int64_t *offset, *skip, *keys; /* [rows]; skip: rows of its first block that it does not see */
    float *out;            /* [rows, heads, shared, value_dim] */
    int64_t lanes, parts;  /* values that a vector holds, pieces of a key head: set here */
} attend_work;

/* Does the pieces of some work, in any order and by several threads if that pays. */
typedef void (*crew)(void (*piece)(void *, int64_t), void *work, int64_t pieces);

#endif
