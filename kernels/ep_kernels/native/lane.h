/* One message slot of a lane, as addresses in this process, and what both ends do with it; the layout
 * is ep_kernels/shm/layout.py's.
 *
 * A flag is written last and read first, with release and acquire, so that whoever sees it sees the
 * message; and it is written before and read after the doorbell. What a peer wrote is checked before
 * it is used.
 */
#ifndef MOEMESH_LANE_H
#define MOEMESH_LANE_H
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef struct {
    int64_t *request, *answer; /* headers */
    int64_t *request_flag, *answer_flag;
    int32_t *pair_token, *pair_slot, *pair_expert;
    float *pair_weight;
    void *x;
    float *out;
    int32_t hidden, capacity_tokens, capacity_pairs, index;
} ring_slot;

/* A request's header. */
enum { SEQUENCE, STEP, LAYER, EPOCH, TOKENS, PAIRS, SENT, REQUEST_INTS };

/* The expert worker's end of one lane: of each slot the newest flag read and the newest answered. */
typedef struct {
    const ring_slot *const *slots;
    int64_t *seen, *answered;
    int64_t count;
    int64_t sums_in_slot; /* parts are fp32, and answers are sums that lie in the slot */
    const int64_t *busy;  /* the router's mark: not 0 while parts may come that ring no doorbell */
    int64_t *given_up;    /* a mark under which nothing came for too long */
} lane_end;

static inline int64_t lane_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* The doorbell is rung after this. */
static inline void lane_publish(int64_t *flag, int64_t sequence) {
    __atomic_store_n(flag, sequence, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_RELEASE);
}

static inline int64_t lane_flag(const int64_t *flag) {
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}

/* Why a part is refused. */
enum { SOUND, BAD_SEQUENCE, BAD_TOKENS, BAD_PAIRS, BAD_PAIR_TOKEN };

/* Read the part under `flag` into header and say what is wrong with it; for BAD_PAIR_TOKEN
 * header[SENT] becomes the token. */
static inline int32_t lane_request(const ring_slot *at, int64_t flag, int64_t *header) {
    memcpy(header, at->request, REQUEST_INTS * sizeof *header);
    if (header[SEQUENCE] != flag) return BAD_SEQUENCE;
    if (header[TOKENS] < 0 || header[TOKENS] > at->capacity_tokens) return BAD_TOKENS;
    if (header[PAIRS] < 0 || header[PAIRS] > at->capacity_pairs) return BAD_PAIRS;
    for (int64_t i = 0; i < header[PAIRS]; i++) {
        int32_t token = at->pair_token[i];
        if (token < 0 || token >= header[TOKENS]) {
            header[SENT] = token;
            return BAD_PAIR_TOKEN;
        }
    }
    return SOUND;
}

/* Publish the answer that lies in a slot. */
static inline void lane_answer(const ring_slot *at, int64_t sequence, int64_t status,
                               int64_t began_ns, int64_t compute_ns, int64_t rows) {
    const int64_t header[] = {sequence, status, began_ns, compute_ns, rows};
    memcpy(at->answer, header, sizeof header);
    lane_publish(at->answer_flag, sequence);
}

#endif
