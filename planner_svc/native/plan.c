/* Placement of the experts of MoE layers on ranks, for many layers in one call. Plain C11 without
 * global state: the same input gives the same bits.
 *
 *   layer.h                 state of a layer
 *   parts.h    copies.h     joined ranks; numbers of copies
 *   pack.h     groups.h     from nothing; expert groups on nodes
 *   exchange.h fold.h       better, whatever it moves; two slots a rank
 *   small.h                 two slots a rank, few ranks
 *   settle.h                better, for few moves
 */
#include "exchange.h"
#include "fold.h"
#include "groups.h"
#include "pack.h"
#include "settle.h"
#include "small.h"

enum { PLAN_OK = 0, PLAN_MEMORY = -1 };
/* Effort with two slots a rank, per layer; up to SMALL slots the whole row is searched at once. */
enum { FOLD_TRIES = 800, JOIN_TRIES = 120, SMALL = 64, SMALL_TRIES = 4000, ANNEAL_STEPS = 300 };

/* By how much a node's load may exceed its ranks' part before copies are lent to other nodes. */
static const double LENT = 0.004;
/* By how much joined ranks may miss the target before they may come apart. */
static const double UNJOIN = 0.01;

typedef struct {
    int32_t layers, experts, ranks, nodes, groups;
    int32_t rule;  /* of the groups; 0: off, 1: soft, 2: strict */
    int32_t keep;  /* 1: start from the previous rows and move little; 0: plan anew */
    int32_t pins, steps;
    double tolerance; /* excess over the mean load that is good enough */
    double price;     /* least excess removed per fetched expert when `keep` */
    double joined;    /* what the fullest part's load counts in a small mesh, a rank's being 1 */
    const int32_t *first;          /* [ranks + 1] */
    const double *pace;            /* [ranks] */
    const int32_t *node_of;        /* [ranks] */
    const double *loads;           /* [layers, experts], finite, not negative */
    const int64_t *previous;       /* [layers, previous_first[ranks]] or NULL */
    const int32_t *previous_first; /* [ranks + 1] */
    const int32_t *pin;            /* [pins, 3] layer, expert, rank */
    int64_t *rows;                 /* [layers, first[ranks]] out */
} Request;

typedef struct {
    int32_t *rank_of, *node_of_group, *room;
    double *speed, *groups_scratch;
    double total_speed;
    int slots, cap;
    int two; /* two slots on each rank that has any, all equally fast */
} Shared;

static void *carve(char **at, size_t bytes) {
    void *here = *at;
    if (*at) *at += (bytes + 15) & ~(size_t)15;
    return here;
}

/* Points everything into one block; with `at` on 0 the return value is the size of the block. */
static size_t lay_out(Layer *l, Shared *h, const Request *q, char *base) {
    size_t E = q->experts, R = q->ranks, S = l->slots, N = q->nodes, G = q->groups;
    size_t words = (E + 63) / 64, big = E > R ? E : R;
    char *start = base ? base : (char *)16, *at = start;
    l->weight = carve(&at, 8 * E);
    l->share = carve(&at, 8 * E);
    l->key = carve(&at, 8 * big);
    l->load = carve(&at, 8 * R);
    l->sorted_share = carve(&at, 8 * S);
    l->holds = carve(&at, 8 * R * words);
    l->held = carve(&at, 8 * R * words);
    l->fixed = carve(&at, 8 * R * words);
    l->copies = carve(&at, 4 * E);
    l->kept = carve(&at, 4 * E);
    l->digits = carve(&at, 2 * E);
    l->at_home = carve(&at, 4 * E);
    l->home = carve(&at, 4 * E);
    l->head = carve(&at, 4 * E);
    l->after = carve(&at, 4 * S);
    l->before = carve(&at, 4 * S);
    l->row = carve(&at, 4 * S);
    l->sorted = carve(&at, 4 * S);
    l->open = carve(&at, 4 * R);
    l->part = carve(&at, 4 * R);
    l->parent = carve(&at, 4 * R);
    l->movable = carve(&at, 4 * R);
    l->order = carve(&at, 4 * big);
    l->heap = carve(&at, 4 * big);
    l->part_load = carve(&at, 24 * R);
    l->pool = carve(&at, S <= SMALL ? 4 * BEAM * E : 0);
    l->best_row = carve(&at, 4 * S);
    l->seen = carve(&at, R);
    h->rank_of = carve(&at, 4 * S);
    h->node_of_group = carve(&at, 4 * G);
    h->room = carve(&at, 4 * N);
    l->spare = carve(&at, 4 * N);
    l->surplus = carve(&at, 8 * N);
    l->lent = carve(&at, 8 * N * words);
    l->away = carve(&at, 4 * E);
    h->speed = carve(&at, 8 * N);
    h->groups_scratch = carve(&at, 8 * (N + G));
    return (size_t)(at - start);
}

static void read_previous(Layer *l, const Request *q, int layer) {
    memset(l->held, 0, sizeof(uint64_t) * (size_t)l->ranks * l->words);
    if (!q->previous) return;
    const int64_t *row = q->previous + (size_t)layer * q->previous_first[l->ranks];
    for (int r = 0; r < l->ranks; r++)
        for (int s = q->previous_first[r]; s < q->previous_first[r + 1]; s++)
            if (row[s] >= 0 && row[s] < l->experts)
                l->held[(size_t)r * l->words + (row[s] >> 6)] |= 1ull << (row[s] & 63);
}

/* Puts what each rank holds back on it, as far as its slots go and the rules allow; pinned experts
 * first, should the slots not suffice. */
static void restore(Layer *l) {
    for (int e = 0; e < l->experts; e++) l->share[e] = 0;
    for (int r = 0; r < l->ranks; r++) {
        int s = l->first[r];
        for (int pass = l->fixed ? 1 : 0; pass >= 0; pass--)
            for (int w = 0; w < l->words; w++) {
                uint64_t here = l->held[(size_t)r * l->words + w];
                for (int e = 64 * w; here && s < l->first[r + 1]; here >>= 1, e++) {
                    if (!(here & 1) || !allowed(l, r, e) || pinned(l, r, e) != pass) continue;
                    put(l, s++, e);
                    l->copies[e]++;
                }
            }
    }
    for (int e = 0; e < l->experts; e++)
        if (l->copies[e]) set_copies(l, e, l->copies[e]);
        else l->share[e] = l->weight[e];
}

/* Writes the row; what stays on its rank stays in its slot. Uses up `holds`. */
static void write_row(Layer *l, const Request *q, int layer) {
    int64_t *out = q->rows + (size_t)layer * l->slots;
    const int64_t *old = q->previous;
    if (old) old += (size_t)layer * q->previous_first[l->ranks];
    for (int s = 0; s < l->slots; s++) out[s] = EMPTY;
    for (int r = 0; r < l->ranks; r++) {
        uint64_t *here = l->holds + (size_t)r * l->words;
        int n = l->first[r + 1] - l->first[r], t = l->first[r];
        for (int i = 0; old && i < n && i < q->previous_first[r + 1] - q->previous_first[r]; i++) {
            int64_t e = old[q->previous_first[r] + i];
            if (e < 0 || e >= l->experts || !has(l, l->holds, r, (int)e)) continue;
            out[l->first[r] + i] = e;
            here[e >> 6] &= ~(1ull << (e & 63));
        }
        for (int s = l->first[r]; s < l->first[r + 1]; s++) {
            int e = l->row[s];
            if (e == EMPTY || !has(l, l->holds, r, e)) continue;
            while (out[t] != EMPTY) t++;
            out[t] = e;
        }
    }
}

/* Pinned copies come before any other. No rank has more of them than slots (the caller's word). */
static void put_pins(Layer *l, const Request *q, int layer) {
    for (int i = 0; i < q->pins; i++) {
        const int32_t *pin = q->pin + 3 * i;
        int e = pin[1], r = pin[2];
        if (pin[0] != layer || has(l, l->holds, r, e) || !allowed(l, r, e)) continue;
        int s = empty_slot(l, r);
        for (int t = l->first[r]; t < l->first[r + 1] && s == EMPTY; t++) {
            if (pinned(l, r, l->row[t])) continue;
            drop_copy(l, t);
            s = t;
        }
        if (s == EMPTY) continue;
        if (l->home[e] != l->node_of[r] || l->at_home[e] > 0) l->spare[l->node_of[r]]--;
        add_copy(l, s, e);
    }
}

static void fix_pins(Layer *l, const Request *q, int layer) {
    if (!q->pins) return;
    memset(l->fixed, 0, sizeof(uint64_t) * (size_t)l->ranks * l->words);
    for (int i = 0; i < q->pins; i++) {
        const int32_t *pin = q->pin + 3 * i;
        if (pin[0] == layer)
            l->fixed[(size_t)pin[2] * l->words + (pin[1] >> 6)] |= 1ull << (pin[1] & 63);
    }
}

/* How many copies when all are at home, node by node. The load of the fullest node's ranks, below
 * which no such plan can come. */
static double count_by_node(Layer *l, const Shared *h, const Request *q) {
    double least = 1;
    for (int n = 0; n < q->nodes; n++) {
        int cap = 0;
        double sum = 0;
        for (int r = 0; r < l->ranks; r++)
            cap += l->node_of[r] == n && l->first[r + 1] > l->first[r];
        count_copies(l, h->room[n], cap, n);
        for (int e = 0; e < l->experts; e++) sum += l->home[e] == n ? l->weight[e] : 0;
        if (sum > least * h->speed[n]) least = sum / h->speed[n];
    }
    return least;
}

static void plan_anew(Layer *l, const Shared *h, const Request *q, int ruled) {
    double target = 1;
    sort_by_weight(l);
    for (int e = 0; e < l->experts; e++)
        if (l->copies[e] < 1 || (l->home[e] >= 0 && !l->at_home[e])) l->copies[e]++;
    if (l->strict) {
        target = count_by_node(l, h, q);
    } else if (ruled) {
        count_by_node(l, h, q);
        lend_copies(l, q->nodes, h->speed, h->cap, LENT);
    } else {
        count_copies(l, h->slots, h->cap, -1);
    }
    for (int e = 0; e < l->experts; e++) set_copies(l, e, l->copies[e]);
    target *= 1 + q->tolerance;
    if (h->two && !ruled && !q->pins) {
        if (l->slots <= SMALL) {
            plan_small(l, h->cap, q->joined, SMALL_TRIES, ANNEAL_STEPS);
            return;
        }
        Fold f = best_copies(l, h->slots, h->cap, target, FOLD_TRIES);
        put_folded(l, l->order);
        complete(l);
        if (h->slots - l->experts >= h->cap - 1)
            join_parts(l, f.top * (1 + 1e-9), JOIN_TRIES);
        return;
    }
    pack(l);
    complete(l);
    /* From the search that costs nothing to the one that gives up joined ranks. */
    polish(l, target, q->steps, 0);
    if (l->load[fullest(l)] <= target) return;
    l->parts = count_parts(l, EMPTY, EMPTY, EMPTY);
    polish(l, target, q->steps, 1);
    if (l->load[fullest(l)] <= target + UNJOIN) return;
    l->parts = 0;
    polish(l, target, q->steps, 1);
}

/* 1 if the group rule had to be left out. */
static int plan_layer(Layer *l, Shared *h, const Request *q, int layer) {
    const double *loads = q->loads + (size_t)layer * l->experts;
    double total = 0;
    int ruled = 0;
    for (int e = 0; e < l->experts; e++) total += loads[e];
    for (int e = 0; e < l->experts; e++) {
        /* A trace of load for all: whatever is idle still shares out evenly. */
        l->weight[e] = (total > 0 ? loads[e] / total + 1e-12 : 1.0 / l->experts) * h->total_speed;
        l->share[e] = l->weight[e];
        l->copies[e] = 0;
        l->home[e] = EMPTY;
    }
    read_previous(l, q, layer);
    fix_pins(l, q, layer);
    if (q->rule) {
        ruled = (q->keep && inherit_groups(l, q->groups, q->nodes, h->room, h->node_of_group)) ||
                assign_groups(l, q->groups, q->nodes, h->room, h->speed, h->node_of_group,
                              h->groups_scratch);
        for (int e = 0; ruled && e < l->experts; e++)
            l->home[e] = h->node_of_group[e / (l->experts / q->groups)];
    }
    l->strict = ruled && q->rule == 2;
    l->loose = l->parts = 0;
    clear(l);
    for (int n = 0; n < q->nodes; n++) l->spare[n] = h->room[n], l->surplus[n] = -h->speed[n];
    for (int e = 0; e < l->experts; e++)
        if (l->home[e] >= 0) l->spare[l->home[e]]--, l->surplus[l->home[e]] += l->weight[e];
    int keep = q->keep && q->previous;
    if (keep) restore(l);
    put_pins(l, q, layer);
    if (keep) {
        Search search = {1 + q->tolerance, q->price};
        complete(l);
        l->loose = 1;
        settle(l, &search, q->steps);
    } else {
        plan_anew(l, h, q, ruled);
    }
    write_row(l, q, layer);
    return q->rule && !ruled;
}

/* Plans every layer. Returns PLAN_OK, PLAN_MEMORY, or the number of layers in which the group rule
 * could not be met and was left out. */
int plan_layers(const Request *q) {
    Layer layer = {0}, *l = &layer;
    Shared shared = {0}, *h = &shared;
    l->experts = q->experts, l->ranks = q->ranks, l->slots = q->first[q->ranks];
    l->words = (q->experts + 63) / 64;
    l->first = q->first, l->pace = q->pace, l->node_of = q->node_of;
    l->fastest = INFINITY;
    for (int r = 0; r < q->ranks; r++) l->fastest = fmin(l->fastest, q->pace[r]);
    size_t size = lay_out(l, h, q, NULL);
    char *block = malloc(size);
    if (!block) return PLAN_MEMORY;
    lay_out(l, h, q, block);
    memset(block, 0, size);
    l->rank_of = h->rank_of;
    if (!q->pins) l->fixed = NULL;
    for (int r = 0; r < q->ranks; r++) {
        int slots = q->first[r + 1] - q->first[r], useful = slots < q->experts ? slots : q->experts;
        for (int s = q->first[r]; s < q->first[r + 1]; s++) h->rank_of[s] = r;
        if (!slots) continue;
        h->slots += useful, h->room[q->node_of[r]] += useful, h->cap++;
        h->speed[q->node_of[r]] += 1 / q->pace[r];
        h->total_speed += 1 / q->pace[r];
    }
    h->two = q->experts > 2 && h->cap > 1;
    for (int r = 0; r < q->ranks; r++) {
        int slots = q->first[r + 1] - q->first[r];
        h->two &= !slots || (slots == 2 && q->pace[r] * h->total_speed == h->cap);
    }
    int relaxed = 0;
    for (int i = 0; i < q->layers; i++) relaxed += plan_layer(l, h, q, i);
    free(block);
    return relaxed;
}
