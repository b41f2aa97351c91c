/* Messages into and out of lanes; the caller's face is ep_kernels/shm/lane.py.
 */
#define _POSIX_C_SOURCE 199309L
#include "lane.h"

/* What was read before this, flag or doorbell, was read before what is read after it. */
void moemesh_lane_acquire(void) { __atomic_thread_fence(__ATOMIC_ACQUIRE); }

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
    const int64_t header[] = {sequence, step, layer, epoch, tokens, pairs, lane_now()};
    memcpy(at->request, header, sizeof header);
    lane_publish(at->request_flag, sequence);
}

int32_t moemesh_lane_request(const ring_slot *at, int64_t flag, int64_t *header) {
    return lane_request(at, flag, header);
}

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
            int64_t flag = lane_flag(end->slots[slot]->request_flag);
            if (flag == end->seen[slot]) continue;
            end->seen[slot] = flag;
            found[LANE] = lane;
            found[SLOT] = slot;
            found[FAULT] = lane_request(end->slots[slot], flag, found + HEADER);
            found[FLAG] = flag;
            found += ARRIVAL_INTS;
            parts++;
        }
    }
    return parts;
}

static inline void spin_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

enum { LEAST_PAUSE_NS = 50000, MOST_PAUSE_NS = 1000000 };

/* Wait while a router's device sends parts by itself, which rings no doorbell: until one has come, the
 * doorbell's word is not `seen` any more, or after limit_ns (1), or until no lane is marked busy (0).
 * After give_up_ns of it the marks are given up, and 0 returned. At first, for spin_ns, without
 * sleeping. */
int32_t moemesh_lane_attend(const lane_end *lanes, int32_t count, const uint32_t *bell, uint32_t seen,
                            int64_t spin_ns, int64_t limit_ns, int64_t give_up_ns) {
    const int64_t began = lane_now();
    long pause = LEAST_PAUSE_NS;
    for (;;) {
        int busy = 0;
        for (int32_t lane = 0; lane < count; lane++) {
            const lane_end *end = lanes + lane;
            const int64_t mark = lane_flag(end->busy);
            if (!mark || mark == *end->given_up) continue;
            busy = 1;
            for (int64_t slot = 0; slot < end->count; slot++)
                if (lane_flag(end->slots[slot]->request_flag) != end->seen[slot]) return 1;
        }
        if (!busy) return 0;
        if (__atomic_load_n(bell, __ATOMIC_ACQUIRE) != seen) return 1;
        const int64_t waited = lane_now() - began;
        if (waited >= give_up_ns) break;
        if (waited >= limit_ns) return 1;
        if (waited < spin_ns) {
            spin_pause();
            continue;
        }
        const struct timespec rest = {0, pause};
        nanosleep(&rest, NULL);
        pause = 2 * pause < MOST_PAUSE_NS ? 2 * pause : MOST_PAUSE_NS;
    }
    for (int32_t lane = 0; lane < count; lane++)
        *lanes[lane].given_up = lane_flag(lanes[lane].busy);
    return 0;
}

void moemesh_lane_answer(const ring_slot *at, int64_t sequence, int64_t status, int64_t began_ns,
                         int64_t compute_ns, int64_t rows) {
    lane_answer(at, sequence, status, began_ns, compute_ns, rows);
}
