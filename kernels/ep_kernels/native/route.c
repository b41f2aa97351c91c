/* Routing of one MoE layer: which rank and slot each (token, expert) pair goes to, and the messages
 * that carry them. The caller's face, with a plain reference of the same arithmetic, is
 * ep_kernels/routing.py; what is computed is described there.
 *
 * Plain C11 without threads or global state. All arithmetic is integer or IEEE double in a fixed
 * order, so the same history gives the same choice on every machine.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { WATER_FILL, EVEN, LEAST_LOADED };
enum { BAD_EXPERT = -1 };
enum { MAX_ROUNDS = 64 };

static const double TIGHT = 2e-4;  /* the fullest rank is within this of the least possible */
static const int64_t FORGET_AFTER = 4096;

/* Scratch and state of one placement. Arrays are the caller's; the caller makes it anew when the
 * placement changes, or larger when more pairs come. */
typedef struct {
    int32_t num_ranks, num_experts, capacity_tokens, choice;
    int64_t since_forgetting;  /* pairs since recent was halved */
    double *recent;            /* [ranks] pairs lately sent, older ones counting less */
    double *load;              /* [ranks] scratch */
    double *share;             /* [places] scratch: of the expert's pairs, by water-filling */
    int32_t *left;             /* [places] scratch: pairs that the place is still to get */
    int32_t *count;            /* [experts] scratch */
    int32_t *order;            /* [experts] scratch */
    int32_t *stamp;            /* [ranks] scratch: newest token that goes to the rank */
    int32_t *rows, *pairs;     /* [ranks] scratch: what it gets */
    int32_t *first_message;    /* [ranks] scratch */
    int32_t *pair_token, *pair_place, *pair_row; /* [pairs] scratch */
    int32_t *later;            /* [pairs] scratch: a token's pairs of replicated experts */
    int32_t *message;          /* [messages][RANK .. FILLED] */
    int32_t *block;            /* 6 ints a pair, more than enough for all blocks */
    int32_t *nowhere;          /* [pairs] */
} Table;

/* One message: its rank, where its block begins, rows and pairs in it; then scratch. */
enum { RANK, BLOCK, ROWS, PAIRS, FILLED, MESSAGE_INTS };

/* Where one layer's experts are. Places of expert e: first[e] .. first[e + 1], by rank, at most one
 * a rank. */
typedef struct {
    const int32_t *first, *rank, *slot;
    int64_t *tokens;         /* [experts] counted when asked to */
    int64_t *decode_tokens;  /* [experts] those of them that belong to decodes */
} Layer;

static int is_less(const Table *t, const double *load, int32_t a, int32_t b) {
    if (load[a] != load[b]) return load[a] < load[b];
    if (t->recent[a] != t->recent[b]) return t->recent[a] < t->recent[b];
    return a < b;
}

/* Give `count` pairs to places so that the highest load is least; loads must not hold them. */
static void fill(const int32_t *rank, int32_t places, double count, double *load, double *share) {
    double sum = count;
    int32_t used = 0;
    /* Ranks enter from the lowest up while the water reaches them. */
    for (int32_t i = 0; i < places; i++) share[i] = -1.0;
    double level = 0.0;
    while (used < places) {
        int32_t lowest = -1;
        for (int32_t i = 0; i < places; i++)
            if (share[i] < 0.0 && (lowest < 0 || load[rank[i]] < load[rank[lowest]])) lowest = i;
        if (used > 0 && level <= load[rank[lowest]]) break;
        share[lowest] = 0.0;
        sum += load[rank[lowest]];
        used++;
        level = sum / used;
    }
    for (int32_t i = 0; i < places; i++) {
        share[i] = share[i] < 0.0 ? 0.0 : level - load[rank[i]];
        load[rank[i]] += share[i];
    }
}

/* Whether no split can make the fullest rank emptier than now but for TIGHT: the pairs that cannot
 * go anywhere but to the fullest ranks fill these as much. */
static int is_tight(const Table *t, const Layer *at, const int32_t *order, int32_t num, double all) {
    double highest = 0.0;
    for (int32_t r = 0; r < t->num_ranks; r++)
        if (t->load[r] > highest) highest = t->load[r];
    if (highest * t->num_ranks <= all * (1.0 + TIGHT)) return 1;
    double least_full = highest * (1.0 - TIGHT), bound = 0.0;
    int32_t full = 0;
    for (int32_t r = 0; r < t->num_ranks; r++)
        if (t->load[r] >= least_full) {
            bound += t->load[r];
            full++;
        }
    for (int32_t i = 0; i < num; i++) {  /* take away what may go elsewhere */
        double inside = 0.0;
        int outside = 0;
        for (int32_t p = at->first[order[i]]; p < at->first[order[i] + 1]; p++) {
            if (t->load[at->rank[p]] >= least_full) inside += t->share[p];
            else outside = 1;
        }
        if (outside) bound -= inside;
    }
    return highest * full <= bound * (1.0 + 2.0 * TIGHT);
}

/* Whole pairs for each place: the shares rounded down, and what is left over one by one to the
 * expert's rank with least. */
static void round_shares(Table *t, const Layer *at, const int32_t *order, int32_t num) {
    for (int32_t i = 0; i < num; i++)
        for (int32_t p = at->first[order[i]]; p < at->first[order[i] + 1]; p++) {
            /* A share that is whole but for rounding errors is taken as whole. */
            t->left[p] = (int32_t)(t->share[p] + 1e-6);
            t->load[at->rank[p]] += t->left[p] - t->share[p];
        }
    /* They are whole again; without the rounding errors equal ones are seen to be equal. */
    for (int32_t r = 0; r < t->num_ranks; r++) t->load[r] = (double)(int64_t)(t->load[r] + 0.5);
    for (int32_t i = 0; i < num; i++) {
        int32_t first = at->first[order[i]], end = at->first[order[i] + 1];
        int32_t over = t->count[order[i]];
        for (int32_t p = first; p < end; p++) over -= t->left[p];
        for (; over > 0; over--) {
            int32_t best = first;
            for (int32_t p = first + 1; p < end; p++)
                if (is_less(t, t->load, at->rank[p], at->rank[best])) best = p;
            t->left[best]++;
            t->load[at->rank[best]] += 1.0;
        }
    }
}

/* Take one pair off `start` through a chain of replicated experts, to a rank below `goal`. Returns 0
 * when there is no such chain. The ranks' scratch is free at this time. */
static int lower(Table *t, const Layer *at, const int32_t *order, int32_t num, int32_t start,
                 double goal) {
    int32_t *queue = t->rows, *leaves = t->pairs, *enters = t->first_message, waiting = 0;
    memset(t->stamp, 0, sizeof(int32_t) * (size_t)t->num_ranks);
    queue[waiting++] = start;
    t->stamp[start] = 1;
    for (int32_t next = 0; next < waiting; next++)
        for (int32_t i = 0; i < num; i++) {
            int32_t first = at->first[order[i]], end = at->first[order[i] + 1], from = first;
            while (from < end && at->rank[from] != queue[next]) from++;
            if (from == end || t->left[from] == 0) continue;
            for (int32_t p = first; p < end; p++) {
                int32_t rank = at->rank[p];
                if (t->stamp[rank]) continue;
                t->stamp[rank] = 1;
                leaves[rank] = from;
                enters[rank] = p;
                queue[waiting++] = rank;
                if (t->load[rank] + 1.0 > goal) continue;
                t->load[rank] += 1.0;
                t->load[start] -= 1.0;
                for (; rank != start; rank = at->rank[leaves[rank]]) {
                    t->left[enters[rank]]++;
                    t->left[leaves[rank]]--;
                }
                return 1;
            }
        }
    return 0;
}

static void water_fill(Table *t, const Layer *at, const int32_t *order, int32_t num, double all) {
    for (int32_t round = 0; round < MAX_ROUNDS; round++) {
        for (int32_t j = 0; j < num; j++) {
            int32_t e = order[round % 2 ? num - 1 - j : j];  /* there and back */
            int32_t first = at->first[e], places = at->first[e + 1] - first;
            if (round > 0)
                for (int32_t p = first; p < first + places; p++)
                    t->load[at->rank[p]] -= t->share[p];
            fill(at->rank + first, places, t->count[e], t->load, t->share + first);
        }
        if (num < 2 || is_tight(t, at, order, num, all)) break;
    }
    double goal = 0.0;
    for (int32_t r = 0; r < t->num_ranks; r++)
        if (t->load[r] > goal) goal = t->load[r];
    goal = ceil(goal * (1.0 - TIGHT) - 1e-6);
    round_shares(t, at, order, num);
    /* Rounding can have put a pair too many on a rank. */
    for (int32_t r = 0; r < t->num_ranks; r++)
        while (t->load[r] > goal && lower(t, at, order, num, r, goal)) continue;
}

static void split_evenly(Table *t, const Layer *at, const int32_t *order, int32_t num) {
    for (int32_t i = 0; i < num; i++) {
        int32_t e = order[i], places = at->first[e + 1] - at->first[e];
        for (int32_t p = at->first[e]; p < at->first[e + 1]; p++) {
            t->share[p] = t->count[e] / places;
            t->load[at->rank[p]] += t->share[p];
        }
    }
    round_shares(t, at, order, num);
}

static void least_loaded(Table *t, const Layer *at, const int32_t *order, int32_t num) {
    for (int32_t r = 0; r < t->num_ranks; r++) t->load[r] += t->recent[r];
    for (int32_t i = 0; i < num; i++) {
        int32_t e = order[i], best = at->first[e];
        for (int32_t p = at->first[e]; p < at->first[e + 1]; p++) {
            t->left[p] = 0;
            if (is_less(t, t->load, at->rank[p], at->rank[best])) best = p;
        }
        t->left[best] = t->count[e];
        t->load[at->rank[best]] += t->count[e];
    }
    for (int32_t r = 0; r < t->num_ranks; r++) t->load[r] -= t->recent[r];
}

/* How many of each expert's pairs each of its places gets: `left`, for replicated experts. */
static void divide(Table *t, const Layer *at, int64_t all) {
    int32_t num = 0;
    double served = 0.0;
    for (int32_t r = 0; r < t->num_ranks; r++) t->load[r] = 0.0;
    for (int32_t e = 0; e < t->num_experts; e++) {
        int32_t count = t->count[e], places = at->first[e + 1] - at->first[e];
        if (count == 0 || places == 0) continue;
        served += count;
        if (places == 1) {
            t->load[at->rank[at->first[e]]] += count;
            continue;
        }
        int32_t i = num++;  /* the largest first, ties by id */
        for (; i > 0 && t->count[t->order[i - 1]] < count; i--) t->order[i] = t->order[i - 1];
        t->order[i] = e;
    }
    if (num > 0) {
        if (t->choice == WATER_FILL) water_fill(t, at, t->order, num, served);
        else if (t->choice == EVEN) split_evenly(t, at, t->order, num);
        else least_loaded(t, at, t->order, num);
    }
    for (int32_t r = 0; r < t->num_ranks; r++) t->recent[r] += t->load[r];
    t->since_forgetting += all;
    if (t->since_forgetting >= FORGET_AFTER) {
        t->since_forgetting = 0;
        for (int32_t r = 0; r < t->num_ranks; r++) t->recent[r] *= 0.5;
    }
}

static inline void put_pair(Table *t, const Layer *at, int32_t pair, int32_t place, int32_t token) {
    int32_t rank = at->rank[place];
    t->rows[rank] += t->stamp[rank] != token;
    t->stamp[rank] = token;
    t->pairs[rank]++;
    t->pair_place[pair] = place;
    t->pair_row[pair] = t->rows[rank] - 1;
}

/* Where the message of a pair that goes somewhere stands in `message`. */
static inline int32_t message_of(const Table *t, const Layer *at, int32_t pair) {
    int32_t row = t->pair_row[pair], number = t->first_message[at->rank[t->pair_place[pair]]];
    for (; row >= t->capacity_tokens; row -= t->capacity_tokens) number++;
    return MESSAGE_INTS * number;
}

/* Rank of each pair and its token's row there. A token goes to few ranks: to one where it has an
 * expert anyway if that place is still to get pairs, else to where most are to go. */
static int32_t place_pairs(Table *t, const Layer *at, const int32_t *ids, const int32_t *chosen,
                           int32_t n) {
    int32_t nowhere = 0;
    memset(t->stamp, 0xff, sizeof(int32_t) * (size_t)t->num_ranks);
    memset(t->rows, 0, sizeof(int32_t) * (size_t)t->num_ranks);
    memset(t->pairs, 0, sizeof(int32_t) * (size_t)t->num_ranks);
    for (int32_t begin = 0, end; begin < n; begin = end) {
        int32_t token = t->pair_token[begin], replicated = 0;
        for (end = begin; end < n && t->pair_token[end] == token; end++) {
            int32_t e = ids[chosen ? chosen[end] : end];
            int32_t place = at->first[e], places = at->first[e + 1] - place;
            if (places == 1) {
                put_pair(t, at, end, place, token);
            } else if (places == 0) {
                t->pair_place[end] = -1;
                t->nowhere[nowhere++] = chosen ? chosen[end] : end;
            } else {
                t->later[replicated++] = end;
            }
        }
        for (int32_t i = 0; i < replicated; i++) {
            int32_t pair = t->later[i], e = ids[chosen ? chosen[pair] : pair], best = -1;
            for (int32_t p = at->first[e]; p < at->first[e + 1]; p++) {
                if (t->left[p] == 0) continue;
                if (t->stamp[at->rank[p]] == token) {
                    best = p;
                    break;
                }
                if (best < 0 || t->left[p] > t->left[best]) best = p;
            }
            t->left[best]--;
            put_pair(t, at, pair, best, token);
        }
    }
    return nowhere;
}

/* Messages in order of rank, each with at most capacity_tokens rows, and where their blocks begin.
 * Returns their number. */
static int32_t plan_messages(Table *t, const Layer *at, int32_t n) {
    int32_t messages = 0, split = 0;
    for (int32_t rank = 0; rank < t->num_ranks; rank++) {
        int32_t rows = t->rows[rank];
        t->first_message[rank] = messages;
        for (; rows > 0; rows -= t->capacity_tokens, messages++) {
            int32_t *m = t->message + MESSAGE_INTS * messages;
            split |= rows > t->capacity_tokens;
            m[RANK] = rank;
            m[ROWS] = rows < t->capacity_tokens ? rows : t->capacity_tokens;
            m[PAIRS] = t->pairs[rank];  /* right unless the rank has several messages */
            m[FILLED] = 0;
        }
    }
    if (split) {
        for (int32_t i = 0; i < messages; i++) t->message[MESSAGE_INTS * i + PAIRS] = 0;
        for (int32_t i = 0; i < n; i++)
            if (t->pair_place[i] >= 0) t->message[message_of(t, at, i) + PAIRS]++;
    }
    int32_t offset = 0;
    for (int32_t i = 0; i < messages; i++) {
        int32_t *m = t->message + MESSAGE_INTS * i;
        m[BLOCK] = offset;
        offset += m[ROWS] + 5 * m[PAIRS];
    }
    return messages;
}

/* Route `n` pairs: all of a micro-batch (`chosen` NULL), or those numbered `chosen`, ascending.
 * Pair i is choice i % top_k of token i / top_k. `decode` [tokens], unless NULL, says which tokens
 * are decodes, and all are counted. Writes the messages, and the pairs that nobody serves.
 * Returns the number of messages, or BAD_EXPERT; `num_nowhere` gets that of the latter. */
int32_t moemesh_route(Table *t, const Layer *at, const int32_t *ids, const float *weights,
                      const int32_t *chosen, int32_t n, int32_t top_k, const uint8_t *decode,
                      int32_t *num_nowhere) {
    memset(t->count, 0, sizeof(int32_t) * (size_t)t->num_experts);
    for (int32_t i = 0; i < n; i++) {
        int32_t e = ids[chosen ? chosen[i] : i];
        if (e < 0 || e >= t->num_experts) return BAD_EXPERT;
        t->count[e]++;
    }
    if (chosen) {
        for (int32_t i = 0; i < n; i++) t->pair_token[i] = chosen[i] / top_k;
    } else {
        for (int32_t i = 0, token = 0; i < n; token++)
            for (int32_t k = 0; k < top_k; k++, i++) t->pair_token[i] = token;
    }
    if (decode) {
        for (int32_t i = 0; i < n; i++) at->decode_tokens[ids[i]] += decode[t->pair_token[i]];
        for (int32_t e = 0; e < t->num_experts; e++) at->tokens[e] += t->count[e];
    }
    divide(t, at, n);
    *num_nowhere = place_pairs(t, at, ids, chosen, n);
    int32_t messages = plan_messages(t, at, n);
    for (int32_t i = 0; i < n; i++) {
        if (t->pair_place[i] < 0) continue;
        int32_t *m = t->message + message_of(t, at, i), *block = t->block + m[BLOCK];
        int32_t row = t->pair_row[i] % t->capacity_tokens;
        int32_t pair = chosen ? chosen[i] : i;
        block[row] = t->pair_token[i];
        block += m[ROWS] + m[FILLED]++;
        block[0] = row;
        block[m[PAIRS]] = at->slot[t->pair_place[i]];
        block[2 * m[PAIRS]] = ids[pair];
        memcpy(block + 3 * m[PAIRS], weights + pair, sizeof(float));
        block[4 * m[PAIRS]] = pair;
    }
    return messages;
}
