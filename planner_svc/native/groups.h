/* Which node each group of experts belongs to. */
#pragma once
#include "layer.h"

/* Gives each group a node that has slots for all its experts: heaviest group first, to the node
 * least loaded for its speed; then exchanges. 0 if they do not fit. */
static int assign_groups(const Layer *l, int groups, int nodes, const int32_t *room,
                         const double *speed, int32_t *node_of_group, double *scratch) {
    int size = l->experts / groups;
    double *load = scratch, *weight = scratch + nodes;
    int32_t *left = l->order; /* [nodes] <= ranks; order is free here */
    for (int g = 0; g < groups; g++) {
        weight[g] = 0;
        node_of_group[g] = -1;
        for (int i = 0; i < size; i++) weight[g] += l->weight[g * size + i];
    }
    for (int n = 0; n < nodes; n++) load[n] = 0, left[n] = room[n];
    for (int i = 0; i < groups; i++) {
        int g = -1, best = -1;
        for (int j = 0; j < groups; j++)
            if (node_of_group[j] < 0 && (g < 0 || weight[j] > weight[g])) g = j;
        for (int n = 0; n < nodes; n++)
            if (left[n] >= size && (best < 0 || (load[n] + weight[g]) * speed[best] <
                                                       (load[best] + weight[g]) * speed[n]))
                best = n;
        if (best < 0) return 0;
        node_of_group[g] = best;
        load[best] += weight[g];
        left[best] -= size;
    }
    for (int improved = 1; improved;) {
        improved = 0;
        for (int a = 0; a < groups; a++)
            for (int b = 0; b < groups; b++) {
                int m = node_of_group[a], n = node_of_group[b];
                double d = weight[a] - weight[b];
                if (m == n || d <= 0) continue;
                double was = fmax(load[m] / speed[m], load[n] / speed[n]);
                double x = (load[m] - d) / speed[m], y = (load[n] + d) / speed[n];
                if ((x > y ? x : y) >= was * (1 - 1e-9)) continue;
                node_of_group[a] = n, node_of_group[b] = m;
                load[m] -= d, load[n] += d;
                improved = 1;
            }
    }
    return 1;
}

/* Keeps each group on the node that holds most of it now; 0 if some node lacks the slots. */
static int inherit_groups(const Layer *l, int groups, int nodes, const int32_t *room,
                          int32_t *node_of_group) {
    int size = l->experts / groups;
    int32_t *left = l->order, *count = l->heap;
    for (int n = 0; n < nodes; n++) left[n] = room[n];
    for (int g = 0; g < groups; g++) {
        int best = 0;
        for (int n = 0; n < nodes; n++) count[n] = 0;
        for (int r = 0; r < l->ranks; r++) {
            if (l->first[r + 1] == l->first[r]) continue;
            for (int e = g * size; e < (g + 1) * size; e++)
                count[l->node_of[r]] += has(l, l->held, r, e);
        }
        for (int n = 1; n < nodes; n++)
            if (count[n] > count[best]) best = n;
        if ((left[best] -= size) < 0) return 0;
        node_of_group[g] = best;
    }
    return 1;
}

/* Whether all copies of an expert are to lie on this node, and none of them is pinned. */
static int only_on(const Layer *l, int e, int node) {
    return l->home[e] == node && !l->away[e] && l->head[e] == EMPTY;
}

/* Of the experts that are only on this node, the one that is best given one copy more (the largest
 * share) or one fewer (the smallest share then); EMPTY if there is none. */
static int more_copies(const Layer *l, int node, int cap) {
    int best = EMPTY;
    for (int e = 0; e < l->experts; e++) {
        if (!only_on(l, e, node) || l->copies[e] >= cap) continue;
        if (best == EMPTY || l->weight[e] / l->copies[e] > l->weight[best] / l->copies[best])
            best = e;
    }
    return best;
}

static int fewer_copies(const Layer *l, int node) {
    int best = EMPTY;
    double least = INFINITY;
    for (int e = 0; e < l->experts; e++) {
        if (!only_on(l, e, node) || l->copies[e] < 2) continue;
        double share = l->weight[e] / (l->copies[e] - 1);
        if (share < least) least = share, best = e;
    }
    return best;
}

/* Soft rule: decides which copies lie off their home, as few as it takes for no node to have more
 * than its part by over `tolerance`. Each takes the slot of another copy there; the slot that it
 * leaves goes to another copy at home. Starts from copies that are all at home. */
static void lend_copies(Layer *l, int nodes, const double *speed, int cap, double tolerance) {
    memset(l->lent, 0, sizeof(uint64_t) * (size_t)nodes * l->words);
    memset(l->away, 0, sizeof(int32_t) * l->experts);
    for (int steps = l->slots; steps > 0; steps--) {
        int n = EMPTY, best = EMPTY, to = EMPTY;
        for (int m = 0; m < nodes; m++)
            if (speed[m] > 0 &&
                (n == EMPTY || l->surplus[m] * speed[n] > l->surplus[n] * speed[m]))
                n = m;
        double top = l->surplus[n] / speed[n], moved = 0;
        if (top <= tolerance) return;
        for (int m = 0; m < nodes; m++) {
            if (l->surplus[m] >= 0 || fewer_copies(l, m) == EMPTY) continue;
            for (int e = 0; e < l->experts; e++) {
                if (!only_on(l, e, n)) continue;
                double share = l->weight[e] / (l->copies[e] < 2 ? 2 : l->copies[e]);
                double here = (l->surplus[n] - share) / speed[n];
                double there = (l->surplus[m] + share) / speed[m];
                double after = here > there ? here : there;
                if (after < top) top = after, best = e, to = m, moved = share;
            }
        }
        if (best == EMPTY) return;
        l->copies[fewer_copies(l, to)]--;
        l->away[best] = 1;
        l->lent[(size_t)to * l->words + (best >> 6)] |= 1ull << (best & 63);
        l->surplus[n] -= moved, l->surplus[to] += moved;
        int more = l->copies[best] < 2 ? best : more_copies(l, n, cap);
        if (more != EMPTY) l->copies[more]++;
    }
}
