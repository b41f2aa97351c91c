/* Which ranks are joined by experts that they share. A router can shift load between two ranks of
 * one part by how it splits tokens over copies; between parts it cannot.
 */
#pragma once
#include "layer.h"

/* What part of an expert's load its load in a batch is expected to differ by. */
#define SWING 0.2

static void join(Layer *l, int expert) {
    int32_t *part = l->part;
    int ranks = l->ranks, to = part[l->rank_of[l->head[expert]]];
    for (int s = l->after[l->head[expert]]; s != EMPTY; s = l->after[s]) {
        int from = part[l->rank_of[s]];
        if (from == to) continue;
        for (int r = 0; r < ranks; r++) part[r] = part[r] == from ? to : part[r];
    }
}

static int root(int32_t *parent, int r) {
    while (parent[r] != r) r = parent[r] = parent[parent[r]];
    return r;
}

/* Into how many parts the ranks would fall if slots a and b exchanged what they hold or, with b
 * EMPTY, slot a took a copy of `expert`. With both EMPTY: as they are. */
static int count_parts(const Layer *l, int a, int b, int expert) {
    int parts = l->ranks;
    for (int r = 0; r < l->ranks; r++) l->parent[r] = r;
    for (int e = 0; e < l->experts; e++) {
        if (l->copies[e] < 2 && e != expert) continue;
        int first = e == expert ? root(l->parent, l->rank_of[a]) : EMPTY;
        for (int s = l->head[e]; s != EMPTY; s = l->after[s]) {
            if (s == a && b == EMPTY) continue;
            int r = root(l->parent, l->rank_of[s == a ? b : s == b ? a : s]);
            if (first == EMPTY) first = r;
            if (r == first) continue;
            l->parent[r] = first;
            parts--;
        }
    }
    return parts;
}

/* Load per rank of the part that would be fullest if its experts' loads swung to it, each by
 * itself, the total as it is. All ranks in one part: 1. */
static double fullest_part(const Layer *l) {
    double *load = l->part_load, *squares = load + l->ranks, *speed = squares + l->ranks;
    double whole = 0, whole_squares = 0, most = 0;
    count_parts(l, EMPTY, EMPTY, EMPTY);
    memset(load, 0, 3 * sizeof(double) * l->ranks);
    for (int e = 0; e < l->experts; e++) {
        if (l->head[e] == EMPTY) continue;
        int p = root(l->parent, l->rank_of[l->head[e]]);
        double w = l->weight[e];
        load[p] += w, squares[p] += w * w;
        whole += w, whole_squares += w * w;
    }
    for (int r = 0; r < l->ranks; r++)
        if (l->first[r + 1] > l->first[r]) speed[root(l->parent, r)] += 1 / l->pace[r];
    for (int p = 0; p < l->ranks; p++) {
        if (!speed[p]) continue;
        double f = load[p] / whole, variance = squares[p] * (1 - 2 * f) + f * f * whole_squares;
        double full = (load[p] + SWING * sqrt(variance > 0 ? variance : 0)) / speed[p];
        if (full > most) most = full;
    }
    return most;
}

static int may_swap(const Layer *l, int a, int b) {
    if (!may_go(l, a, l->rank_of[b]) || !may_go(l, b, l->rank_of[a])) return 0;
    return !l->parts || !(replicated(l, a) || replicated(l, b)) ||
           count_parts(l, a, b, EMPTY) <= l->parts;
}
