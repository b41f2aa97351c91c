/* One message slot of a lane, as addresses in this process; the layout is ep_kernels/shm/layout.py's.
 */
#ifndef MOEMESH_LANE_H
#define MOEMESH_LANE_H
#include <stdint.h>

typedef struct {
    int64_t *request, *answer; /* headers */
    int64_t *request_flag, *answer_flag;
    int32_t *pair_token, *pair_slot, *pair_expert;
    float *pair_weight;
    void *x;
    float *out;
    int32_t hidden, capacity_tokens, capacity_pairs, index;
} ring_slot;

#endif
