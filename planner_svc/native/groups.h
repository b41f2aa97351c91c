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
