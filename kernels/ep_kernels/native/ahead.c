/* A decode step of a router on the CPU as one call, from embeddings through all layers: attention,
 * gate, routes, messages to expert workers, the shared expert meanwhile, their answers. Between two
 * of these lies so little that asking for each from Python, which the weights that passed have driven
 * out of the caches, takes as long as a product.
 *
 * It is a try: what is not as it should be ends it, and its results are worth nothing then. The
 * pieces are the other libraries' functions. The caller's face is ep_kernels/ahead.py.
 */
#define _GNU_SOURCE
#include "lane.h"
#include "latent.h"
#include <limits.h>
#include <sched.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Why a step came to nothing. */
enum { WELL, IS_STALE, TIMED_OUT, ABORTED, CORRUPT, UNPLACED, BAD_ROW };
enum { OK = 1, STALE = 2 };

/* What a layer's nanoseconds are spent on. IDLE: of those from the dispatch until its answers were
 * there, in which neither this router nor a worker computed. */
enum { ATTENTION, GATE, ROUTE, COPY, SIGNAL, SHARED, WAIT, COMBINE, IDLE, KINDS };

/* Of a routed message, as route.c writes it. */
enum { TO_RANK, BLOCK, OF_ROWS, OF_PAIRS, FILLED, MESSAGE_INTS };

/* Of rows.so, few.so, half.so, route.so and lane.so; their sources say what each does. */
typedef struct {
    void (*norm)(const float *x, int64_t stride, const float *weight, float epsilon, int32_t rows,
                 int32_t width, float *out);
    void (*gate)(const void *gate, const float *h, int32_t tokens, float *x, int32_t *experts,
                 float *weights);
    int32_t (*route)(void *table, const void *layer, const int32_t *ids, const float *weights,
                     const int32_t *chosen, int32_t n, int32_t top_k, const uint8_t *decode,
                     int32_t *nowhere);
    void (*send)(const ring_slot *at, const float *x, const int32_t *block, int32_t tokens,
                 int32_t pairs, int64_t sequence, int64_t step, int64_t layer, int64_t epoch);
    void (*share)(int32_t on); /* NULL: there is no crew */
} calls;

typedef struct {
    /* What runs the attention, and what it takes; likewise the dense FFN or shared expert, where NULL
     * is no shared expert. */
    int64_t (*attend)(const void *attention, const latent_step *step, const float *h, int64_t rows,
                      int32_t add, float *out);
    const void *attention;
    void (*run)(const void *ffn, const float *x, int64_t rows, float *out);
    const void *ffn;
    const void *gate;      /* few.c's few_gate; NULL: a dense layer */
    const float *norm;     /* [hidden] before a dense FFN; the gate has its own */
    const void *routes;    /* route.c's Layer */
    int64_t number;        /* of the model */
    float epsilon;
} layer;

/* A peer's doorbell: see shm/doorbell.py. */
typedef struct {
    uint32_t *word;
    const int32_t *asleep_on; /* CPU on which its owner went to sleep */
    uint32_t base, count;     /* what this process writes there */
} bell;

enum { COUNT_MASK = (1 << 20) - 1 };

typedef struct {
    const ring_slot *at; /* NULL: there is no lane to this rank */
    bell *bell;
    int64_t sequence; /* of its next message */
} lane;

typedef struct {
    const calls *by;
    const layer *layers;
    void *table; /* route.c's, with what it writes */
    const int32_t *message, *block;
    uint32_t *word; /* the own doorbell, and where its owner notes on which CPU it sleeps */
    int32_t *asleep_on;
    const int64_t *abort; /* not 0: give up */
    int64_t num_layers, num_ranks, hidden, top_k;
    int64_t spin_ns, rest, next_rest; /* waits to come without a spin, and how many after the next */
} router;

enum { LONGEST_REST = 256 };

typedef struct {
    latent_step attend;
    float *const *caches; /* [layers] */
    lane *lanes;          /* [ranks] */
    int64_t rows, step, epoch, limit_ns;
    float *h;        /* [rows, hidden]: embeddings, and at the end final hidden states */
    float *scratch;  /* [2 rows, hidden] and [rows, top_k] */
    int64_t *spans;  /* [ranks + 1][2] scratch */
    int32_t *ids;    /* [MoE layers, rows, top_k] */
    int32_t *sent;   /* [MoE layers, ranks, 2]: tokens and pairs */
    int64_t *spent;  /* [layers, KINDS] */
    int64_t where;   /* the rank at which a fault showed, or the row */
} step;

static inline int64_t lap(int64_t *since) {
    int64_t now = lane_now(), took = now - *since;
    *since = now;
    return took;
}

static void ring(bell *it) {
    __atomic_store_n(it->word, it->base | (++it->count & COUNT_MASK), __ATOMIC_RELEASE);
#if defined(__linux__)
    syscall(SYS_futex, it->word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
#endif
}

/* Ring for each message, last for those whose owner could take this thread's CPU. */
static void ring_all(const lane *lanes, const int32_t *message, int32_t count) {
    int own = count > 1 ? sched_getcpu() : -1;
    for (int late = 0; late < 2; late++)
        for (int32_t i = 0; i < count; i++) {
            bell *of = lanes[message[i * MESSAGE_INTS + TO_RANK]].bell;
            if ((own >= 0 && __atomic_load_n(of->asleep_on, __ATOMIC_RELAXED) == own) == late)
                ring(of);
        }
}

static void sleep_while(router *is, uint32_t seen, int64_t most_ns) {
    const struct timespec most = {most_ns / INT64_C(1000000000), most_ns % INT64_C(1000000000)};
#if defined(__linux__)
    __atomic_store_n(is->asleep_on, sched_getcpu(), __ATOMIC_RELAXED);
    syscall(SYS_futex, is->word, FUTEX_WAIT, seen, &most, NULL, 0);
#else
    (void)is, (void)seen;
    const struct timespec brief = {0, 50000};
    nanosleep(most.tv_sec || most.tv_nsec > brief.tv_nsec ? &brief : &most, NULL);
#endif
}

/* Look at the word for a while, unless that did not pay lately. Where it took much longer than it
 * should have, somebody else wanted this core. */
static int spin(router *is, uint32_t seen) {
    if (!is->spin_ns) return 0;
    if (is->rest > 0) {
        is->rest--;
        return 0;
    }
    int64_t began = lane_now(), took = 0;
    while (__atomic_load_n(is->word, __ATOMIC_ACQUIRE) == seen && took < is->spin_ns)
        took = lane_now() - began;
    int came = __atomic_load_n(is->word, __ATOMIC_ACQUIRE) != seen;
    if (came && took < is->spin_ns) {
        is->next_rest = 1;
    } else {
        is->rest = is->next_rest;
        is->next_rest = 2 * is->next_rest < LONGEST_REST ? 2 * is->next_rest : LONGEST_REST;
    }
    return came;
}

static int answered(const lane *to) {
    return lane_flag(to->at->answer_flag) == to->sequence - 1;
}

/* Until every message is answered. */
static int32_t await(router *is, step *of, int32_t count) {
    const int64_t end = lane_now() + of->limit_ns;
    for (int32_t i = 0;;) {
        uint32_t seen = __atomic_load_n(is->word, __ATOMIC_ACQUIRE);
        while (i < count && answered(of->lanes + is->message[i * MESSAGE_INTS + TO_RANK])) i++;
        if (i == count) return WELL;
        of->where = is->message[i * MESSAGE_INTS + TO_RANK];
        if (__atomic_load_n(is->abort, __ATOMIC_ACQUIRE)) return ABORTED;
        int64_t left = end - lane_now();
        if (left <= 0) return TIMED_OUT;
        if (!spin(is, seen)) sleep_while(is, seen, left);
    }
}

/* Route x, and write and signal its messages; returns a fault, and their number. */
static int32_t dispatch(router *is, step *of, const layer *at, const float *x, const int32_t *ids,
                        const float *weights, int32_t *sent, int64_t *spent, int64_t *since,
                        int32_t *count) {
    const calls *by = is->by;
    int32_t nowhere = 0, pairs = (int32_t)(of->rows * is->top_k);
    *count = by->route(is->table, at->routes, ids, weights, NULL, pairs, (int32_t)is->top_k, NULL,
                       &nowhere);
    if (*count < 0 || nowhere) return UNPLACED;
    spent[ROUTE] += lap(since);
    memset(sent, 0, 2 * (size_t)is->num_ranks * sizeof *sent);
    for (int32_t i = 0; i < *count; i++) {
        const int32_t *m = is->message + i * MESSAGE_INTS;
        lane *to = of->lanes + m[TO_RANK];
        if (!to->at || sent[2 * m[TO_RANK]]) { /* a second message would need another slot */
            of->where = m[TO_RANK];
            return UNPLACED;
        }
        sent[2 * m[TO_RANK]] = m[OF_ROWS];
        sent[2 * m[TO_RANK] + 1] = m[OF_PAIRS];
    }
    for (int32_t i = 0; i < *count; i++) {
        const int32_t *m = is->message + i * MESSAGE_INTS;
        lane *to = of->lanes + m[TO_RANK];
        by->send(to->at, x, is->block + m[BLOCK], m[OF_ROWS], m[OF_PAIRS], to->sequence++, of->step,
                 at->number, of->epoch);
    }
    spent[COPY] += lap(since);
    ring_all(of->lanes, is->message, *count);
    spent[SIGNAL] += lap(since);
    return WELL;
}

/* h [rows, hidden] += the answers' rows; sums is scratch as large. */
static int32_t combine(const router *is, step *of, int32_t count, float *h, float *sums) {
    int64_t hidden = is->hidden;
    for (int32_t i = 0; i < count; i++) {
        const int32_t *m = is->message + i * MESSAGE_INTS;
        const lane *to = of->lanes + m[TO_RANK];
        const int64_t *answer = to->at->answer;
        of->where = m[TO_RANK];
        if (answer[0] != to->sequence - 1 || answer[4] != m[OF_ROWS]) return CORRUPT;
        if (answer[1] == STALE) return IS_STALE;
        if (answer[1] != OK) return CORRUPT;
    }
    memset(sums, 0, (size_t)(of->rows * hidden) * sizeof *sums);
    for (int32_t i = 0; i < count; i++) {
        const int32_t *m = is->message + i * MESSAGE_INTS, *token = is->block + m[BLOCK];
        const float *from = of->lanes[m[TO_RANK]].at->out;
        for (int32_t r = 0; r < m[OF_ROWS]; r++, from += hidden) {
            float *to = sums + token[r] * hidden;
            for (int64_t j = 0; j < hidden; j++) to[j] += from[j];
        }
    }
    for (int64_t j = 0; j < of->rows * hidden; j++) h[j] += sums[j];
    return WELL;
}

/* Nanoseconds of from .. to that neither own_from .. own_to nor a worker's computing covers; what no
 * worker can have taken is left out. */
static int64_t uncovered(const router *is, const step *of, int32_t count, int64_t from, int64_t to,
                         int64_t own_from, int64_t own_to) {
    int64_t(*span)[2] = (int64_t(*)[2])of->spans, at = from, left = 0;
    span[0][0] = own_from;
    span[0][1] = own_to;
    for (int32_t i = 0; i < count; i++) {
        const int64_t *answer = of->lanes[is->message[i * MESSAGE_INTS + TO_RANK]].at->answer;
        int64_t low = answer[2], took = answer[3];
        int sound = low >= 0 && low <= to && took >= 0 && took <= to - from;
        int64_t high = sound ? low + took : 0;
        low = sound ? low : 0;
        int32_t put = i + 1;
        for (; put > 0 && span[put - 1][0] > low; put--) {
            span[put][0] = span[put - 1][0];
            span[put][1] = span[put - 1][1];
        }
        span[put][0] = low;
        span[put][1] = high;
    }
    for (int32_t i = 0; i <= count && span[i][0] < to; i++) {
        if (span[i][0] > at) left += span[i][0] - at;
        if (span[i][1] > at) at = span[i][1];
    }
    return left + (to > at ? to - at : 0);
}

/* Run all layers. Returns WELL, or why it came to nothing; lanes' sequences say what was sent. */
int32_t moemesh_ahead(router *is, step *of) {
    const calls *by = is->by;
    int64_t rows = of->rows, hidden = is->hidden, all = rows * hidden;
    float *h = of->h, *next = of->scratch, *x = next + all, *weights = x + all;
    int32_t *ids = of->ids, *sent = of->sent;
    int64_t since = lane_now();
    for (int64_t l = 0; l < is->num_layers; l++) {
        const layer *at = is->layers + l;
        int64_t *spent = of->spent + l * KINDS;
        memset(spent, 0, KINDS * sizeof *spent);
        if (by->share) by->share(1);
        of->attend.cache = of->caches[l];
        of->where = at->attend(at->attention, &of->attend, h, rows, 1, next);
        if (of->where >= 0) return BAD_ROW;
        spent[ATTENTION] += lap(&since);
        if (!at->gate) {
            by->norm(next, hidden, at->norm, at->epsilon, (int32_t)rows, (int32_t)hidden, x);
            at->run(at->ffn, x, rows, h);
            for (int64_t j = 0; j < all; j++) h[j] += next[j];
            spent[SHARED] += lap(&since);
            continue;
        }
        by->gate(at->gate, next, (int32_t)rows, x, ids, weights);
        spent[GATE] += lap(&since);
        if (by->share) by->share(0); /* workers of this host are about to need their cores */
        int64_t began = since;
        int32_t count, fault = dispatch(is, of, at, x, ids, weights, sent, spent, &since, &count);
        if (fault) return fault;
        int64_t own = since;
        if (at->ffn) {
            at->run(at->ffn, x, rows, h);
            for (int64_t j = 0; j < all; j++) h[j] += next[j];
        } else {
            memcpy(h, next, (size_t)all * sizeof *h);
        }
        spent[SHARED] += lap(&since);
        int64_t own_to = since;
        if ((fault = await(is, of, count))) return fault;
        spent[WAIT] += lap(&since);
        int64_t back = since;
        if ((fault = combine(is, of, count, h, next))) return fault;
        spent[IDLE] = uncovered(is, of, count, began, back, own, own_to);
        spent[COMBINE] += lap(&since);
        ids += rows * is->top_k;
        sent += 2 * is->num_ranks;
    }
    if (by->share) by->share(1); /* for what follows */
    return WELL;
}
