/* A lone part from lane to answer by one call: read, checked, computed and published. What stands
 * between a worker's waking and its first product is then some microseconds, and not Python, which
 * the weights that passed have driven out of the caches. The caller's face is ep_kernels/serve.py.
 */
#define _POSIX_C_SOURCE 199309L
#include "lane.h"
#include <stdlib.h>

/* The experts of one layer: which is in each slot, and what runs them. `run` computes x [tokens,
 * hidden] of pairs whose slots are there -> out [tokens, hidden], each token's weighted sum, and
 * returns the first pair that it has no expert for, -1 if none. */
typedef struct {
    int64_t (*run)(const void *of, const float *x, int64_t tokens, const int32_t *token,
                   const int32_t *slot, const float *weight, int64_t pairs, float *out);
    const void *of;
    const int32_t *holds; /* [slots] */
    int64_t slots, most_pairs;
} served_bank;

/* What was served: lane, slot, sequence, layer, tokens, pairs, begin and duration. */
enum { IN_LANE, IN_SLOT, NUMBER, OF_LAYER, OF_TOKENS, OF_PAIRS, BEGAN, TOOK };
enum { NOTHING, SERVED, OTHERS };
enum { OK = 1 };

/* A part's pairs, where no peer can write any more: token, slot and weight. It grows, and ends with
 * the process. */
static int32_t *pairs_memory(int64_t pairs) {
    static _Thread_local int32_t *memory;
    static _Thread_local int64_t size;
    if (pairs > size || !memory) {
        free(memory);
        size = 2 * pairs + 64;
        memory = malloc(3 * (size_t)size * sizeof *memory);
        if (!memory) abort(); /* some KiB: this machine cannot go on */
    }
    return memory;
}

/* Serve the part that has come, if it is the only one. banks [layers]: NULL where a layer has none.
 * Returns SERVED and fills `told`, or NOTHING has come, or it is OTHERS that have, of which none was
 * touched. */
int32_t moemesh_serve(const lane_end *lanes, int64_t count, const served_bank *const *banks,
                      int64_t layers, int64_t *told) {
    const ring_slot *at = NULL;
    const lane_end *end = NULL;
    int64_t flag = 0, slot = 0, header[REQUEST_INTS];
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    for (int64_t lane = 0; lane < count; lane++)
        for (int64_t i = 0; i < lanes[lane].count; i++) {
            int64_t found = lane_flag(lanes[lane].slots[i]->request_flag);
            if (found == lanes[lane].seen[i]) continue;
            if (at) return OTHERS;
            end = lanes + lane;
            at = end->slots[i];
            flag = found;
            slot = i;
        }
    if (!at) return NOTHING;
    if (!end->sums_in_slot || end->seen[slot] != end->answered[slot] ||
        lane_request(at, flag, header) != SOUND || header[LAYER] < 0 || header[LAYER] >= layers)
        return OTHERS;
    const served_bank *bank = banks[header[LAYER]];
    int64_t tokens = header[TOKENS], pairs = header[PAIRS];
    if (!bank || pairs > bank->most_pairs) return OTHERS;

    int32_t *pair_token = pairs_memory(pairs), *pair_slot = pair_token + pairs;
    float *pair_weight = (float *)(pair_slot + pairs);
    memcpy(pair_weight, at->pair_weight, (size_t)pairs * sizeof *pair_weight);
    for (int64_t p = 0; p < pairs; p++) {
        int32_t in = pair_slot[p] = at->pair_slot[p], token = pair_token[p] = at->pair_token[p];
        if (in < 0 || in >= bank->slots || bank->holds[in] < 0 ||
            bank->holds[in] != at->pair_expert[p] || token < 0 || token >= tokens)
            return OTHERS;
    }
    int64_t began = lane_now();
    if (bank->run(bank->of, at->x, tokens, pair_token, pair_slot, pair_weight, pairs, at->out) >= 0)
        return OTHERS;
    int64_t took = lane_now() - began;
    end->seen[slot] = end->answered[slot] = flag;
    lane_answer(at, flag, OK, began, took, tokens);
    told[IN_LANE] = end - lanes;
    told[IN_SLOT] = slot;
    told[NUMBER] = flag;
    told[OF_LAYER] = header[LAYER];
    told[OF_TOKENS] = tokens;
    told[OF_PAIRS] = pairs;
    told[BEGAN] = began;
    told[TOOK] = took;
    return SERVED;
}
