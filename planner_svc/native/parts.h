/* Which ranks are joined by experts that they share. A router can shift load between two ranks of
 * one part by how it splits tokens over copies; between parts it cannot.
 */
#pragma once
#include "layer.h"

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

static int may_swap(const Layer *l, int a, int b) {
    if (!may_go(l, a, l->rank_of[b]) || !may_go(l, b, l->rank_of[a])) return 0;
    return !l->parts || !(replicated(l, a) || replicated(l, b)) ||
           count_parts(l, a, b, EMPTY) <= l->parts;
}
