/* State of one layer while it is planned, and the elementary changes of it.
 *
 * Loads are scaled so that a rank of speed 1 that carries its fair part has load 1. A rank's load
 * is the sum of its slots' shares (an expert's load over its number of copies) times its pace,
 * 1 / speed.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { EMPTY = -1 };

typedef struct {
    int experts, ranks, slots, words;
    const int32_t *first;   /* [ranks + 1] first slot of each rank */
    const int32_t *rank_of; /* [slots] */
    const int32_t *node_of; /* [ranks] */
    const double *pace;     /* [ranks] 1 / speed */
    double fastest;         /* smallest pace */
    int loose;              /* exchanges may take copies off their home while one stays there */
    int strict;             /* every copy must lie on the home node, not only one */
    int32_t *home;          /* [experts] node that must hold a copy, or -1 */
    int32_t *spare;         /* [nodes] open slots beyond those for its experts' first copies */
    double *surplus;        /* [nodes] load of its copies beyond its ranks' part */
    uint64_t *lent;         /* [nodes * words] a copy is to lie there, off its home */
    int32_t *away;          /* [experts] how many copies that are */
    uint64_t *fixed;        /* [ranks * words] pinned there; NULL: none */
    double *weight;         /* [experts] scaled load */
    double *share;          /* [experts] weight / copies */
    int32_t *copies;        /* [experts] */
    int32_t *at_home;       /* [experts] copies on the home node */
    int32_t *head;          /* [experts] a slot that holds it, EMPTY if none */
    int32_t *after, *before; /* [slots] the list of an expert's slots */
    int32_t *row;           /* [slots] */
    int32_t *open;          /* [ranks] empty slots */
    double *load;           /* [ranks] */
    uint64_t *holds, *held; /* [ranks * words] bit sets: now, and in the placement in force */
    int32_t *kept;          /* [experts] copies set aside */
    int32_t *order;         /* [max(experts, ranks)] experts by descending weight, or scratch */
    uint16_t *digits;       /* [experts] scratch of the sort */
    int32_t *heap;          /* [max(experts, ranks)] scratch */
    double *key;            /* [max(experts, ranks)] scratch */
    int32_t *part;          /* [ranks] ranks of one part are joined by shared experts */
    uint8_t *seen;          /* [ranks] scratch, zero between uses */
    int32_t *parent;        /* [ranks] scratch of count_parts */
    double *part_load;      /* [3 * ranks] scratch of fullest_part */
    int parts;              /* into which exchanges must not let the ranks fall; 0: any number */
    int32_t *pool;          /* [BEAM, experts] ways to count copies, in small rows */
    int32_t *best_row;      /* [slots] the best of a small row so far */
    int32_t *sorted;        /* [slots] of each rank, its slots that may be exchanged, by share */
    double *sorted_share;   /* [slots] their shares */
    int32_t *movable;       /* [ranks] how many those are */
} Layer;

static int has(const Layer *l, const uint64_t *set, int rank, int expert) {
    return (int)(set[(size_t)rank * l->words + (expert >> 6)] >> (expert & 63) & 1);
}

static int pinned(const Layer *l, int rank, int expert) {
    return l->fixed && has(l, l->fixed, rank, expert);
}

/* May a copy lie on this rank at all? */
static int allowed(const Layer *l, int rank, int expert) {
    return !l->strict || l->node_of[rank] == l->home[expert] || pinned(l, rank, expert);
}

static void put(Layer *l, int slot, int expert) {
    int rank = l->rank_of[slot];
    l->row[slot] = expert;
    l->before[slot] = EMPTY;
    l->after[slot] = l->head[expert];
    if (l->head[expert] != EMPTY) l->before[l->head[expert]] = slot;
    l->head[expert] = slot;
    l->holds[(size_t)rank * l->words + (expert >> 6)] |= 1ull << (expert & 63);
    l->load[rank] += l->share[expert] * l->pace[rank];
    l->open[rank]--;
    if (l->home[expert] == l->node_of[rank]) l->at_home[expert]++;
}

static int take(Layer *l, int slot) {
    int rank = l->rank_of[slot], expert = l->row[slot];
    int a = l->after[slot], b = l->before[slot];
    if (b == EMPTY) l->head[expert] = a; else l->after[b] = a;
    if (a != EMPTY) l->before[a] = b;
    l->row[slot] = EMPTY;
    l->holds[(size_t)rank * l->words + (expert >> 6)] &= ~(1ull << (expert & 63));
    l->load[rank] -= l->share[expert] * l->pace[rank];
    l->open[rank]++;
    if (l->home[expert] == l->node_of[rank]) l->at_home[expert]--;
    return expert;
}

static void set_copies(Layer *l, int expert, int copies) {
    double share = copies > 0 ? l->weight[expert] / copies : l->weight[expert];
    double change = share - l->share[expert];
    for (int s = l->head[expert]; s != EMPTY; s = l->after[s])
        l->load[l->rank_of[s]] += change * l->pace[l->rank_of[s]];
    l->share[expert] = share;
    l->copies[expert] = copies;
}

static void add_copy(Layer *l, int slot, int e) {
    int had = l->head[e] != EMPTY;
    set_copies(l, e, had ? l->copies[e] + 1 : 1);
    put(l, slot, e);
}

static void drop_copy(Layer *l, int slot) {
    int e = take(l, slot);
    set_copies(l, e, l->copies[e] - 1);
}

static int empty_slot(const Layer *l, int rank) {
    for (int s = l->first[rank]; s < l->first[rank + 1]; s++)
        if (l->row[s] == EMPTY) return s;
    return EMPTY;
}

static void clear(Layer *l) {
    memset(l->holds, 0, sizeof(uint64_t) * (size_t)l->ranks * l->words);
    for (int e = 0; e < l->experts; e++) l->head[e] = EMPTY, l->at_home[e] = 0;
    for (int s = 0; s < l->slots; s++) l->row[s] = EMPTY;
    for (int r = 0; r < l->ranks; r++) {
        l->load[r] = 0;
        l->open[r] = l->first[r + 1] - l->first[r];
    }
}

static double share_in(const Layer *l, int slot) {
    return l->row[slot] == EMPTY ? 0 : l->share[l->row[slot]];
}

static int replicated(const Layer *l, int slot) {
    return l->row[slot] != EMPTY && l->copies[l->row[slot]] > 1;
}

static int fullest(const Layer *l) {
    int top = 0;
    for (int r = 1; r < l->ranks; r++)
        if (l->load[r] > l->load[top]) top = r;
    return top;
}

/* May the expert in slot a go to rank `to` (in exchange for another one)? */
static int may_go(const Layer *l, int slot, int to) {
    int e = l->row[slot], from = l->rank_of[slot];
    if (e == EMPTY) return 1;
    if (has(l, l->holds, to, e) || pinned(l, from, e) || !allowed(l, to, e)) return 0;
    return l->home[e] < 0 || l->node_of[from] != l->home[e] || l->node_of[to] == l->home[e] ||
           (l->loose && l->at_home[e] > 1);
}
