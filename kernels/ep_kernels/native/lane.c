/* Messages into and out of lanes; the caller's face is ep_kernels/shm/lane.py.
 *
 * A flag is written last and read first, with release and acquire, so that whoever sees it sees the
 * message; and it is written before and read after the doorbell. What a peer wrote is checked before
 * it is used.
 */
#define _POSIX_C_SOURCE 199309L
#include <string.h>
#include <time.h>

#include "lane.h"

enum { SEQUENCE, STEP, LAYER, EPOCH, TOKENS, PAIRS, SENT, REQUEST_INTS };

/* What was read before this, flag or doorbell, was read before what is read after it. */
void moemesh_lane_acquire(void) { __atomic_thread_fence(__ATOMIC_ACQUIRE); }

/* The doorbell is rung after this. */
static void publish(int64_t *flag, int64_t sequence) {
    __atomic_store_n(flag, sequence, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_RELEASE);
}

/* Put a part into a slot: rows of x [.., hidden] fp32 (NULL: they are there already) and pairs.
 * block: rows [tokens], then each pair's token, slot, expert and weight [pairs]. */
void moemesh_lane_send(const ring_slot *at, const float *x, const int32_t *block, int32_t tokens,
                       int32_t pairs, int64_t sequence, int64_t step, int64_t layer,
                       int64_t epoch) {
    size_t row = (size_t)at->hidden, ints = (size_t)pairs;
    if (x)
        for (int32_t i = 0; i < tokens; i++)
            memcpy((float *)at->x + i * row, x + block[i] * row, row * sizeof(float));
    const int32_t *pair = block + tokens;
    if (pairs) {
        memcpy(at->pair_token, pair, ints * sizeof(int32_t));
        memcpy(at->pair_slot, pair + ints, ints * sizeof(int32_t));
        memcpy(at->pair_expert, pair + 2 * ints, ints * sizeof(int32_t));
        memcpy(at->pair_weight, pair + 3 * ints, ints * sizeof(float));
    }
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const int64_t header[REQUEST_INTS] = {
        sequence, step, layer, epoch, tokens, pairs, now.tv_sec * INT64_C(1000000000) + now.tv_nsec,
    };
    memcpy(at->request, header, sizeof header);
    publish(at->request_flag, sequence);
}

/* Why a part is refused. */
enum { SOUND, BAD_SEQUENCE, BAD_TOKENS, BAD_PAIRS, BAD_PAIR_TOKEN };

/* Read the part under `flag` into header and say what is wrong with it; for BAD_PAIR_TOKEN
 * header[SENT] becomes the token. */
int32_t moemesh_lane_request(const ring_slot *at, int64_t flag, int64_t *header) {
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

/* The expert worker's end of one lane: its slots, and the newest flag read from each. */
typedef struct {
    const ring_slot *const *slots;
    int64_t *seen;
    int64_t count;
} lane_end;

/* An arrival: lane, slot, fault, flag, then the header. */
enum { LANE, SLOT, FAULT, FLAG, HEADER, ARRIVAL_INTS = HEADER + REQUEST_INTS };

/* Parts whose flag has changed since it was last seen -> found [parts][ARRIVAL_INTS], which has room
 * for every slot; returns their number. */
int32_t moemesh_lane_arrivals(const lane_end *lanes, int32_t count, int64_t *found) {
    int32_t parts = 0;
    moemesh_lane_acquire();
    for (int32_t lane = 0; lane < count; lane++) {
        const lane_end *end = lanes + lane;
        for (int64_t slot = 0; slot < end->count; slot++) {
            int64_t flag = __atomic_load_n(end->slots[slot]->request_flag, __ATOMIC_ACQUIRE);
            if (flag == end->seen[slot]) continue;
            end->seen[slot] = flag;
            found[LANE] = lane;
            found[SLOT] = slot;
            found[FAULT] = moemesh_lane_request(end->slots[slot], flag, found + HEADER);
            found[FLAG] = flag;
            found += ARRIVAL_INTS;
            parts++;
        }
    }
    return parts;
}

/* Publish the answer that lies in a slot. */
void moemesh_lane_answer(const ring_slot *at, int64_t sequence, int64_t status, int64_t began_ns,
                         int64_t compute_ns, int64_t rows) {
    const int64_t header[] = {sequence, status, began_ns, compute_ns, rows};
    memcpy(at->answer, header, sizeof header);
    publish(at->answer_flag, sequence);
}
