/* Which rank each copy goes to, from nothing or from a placement with holes. */
#pragma once
#include "copies.h"
#include "parts.h"

/* Whether the next copy of an expert is meant for this node: the first for its home, others as
 * lend_copies says. */
static int suits(const Layer *l, int e, int node) {
    int home = l->home[e];
    if (home < 0) return 1;
    if (l->at_home[e] == 0 || l->strict) return node == home;
    if (l->spare[node] < 1) return 0;
    return node == home ? l->at_home[e] < l->copies[e] - l->away[e] : has(l, l->lent, node, e);
}

/* The rank for one more copy: on a node that suits, in a part of the mesh that holds none of the
 * expert yet, least loaded after it, in this order of importance. EMPTY if none of the `n` ranks
 * may take it. */
static int rank_for_copy(Layer *l, int e, const int32_t *ranks, int n) {
    int must = l->home[e] >= 0 && (l->at_home[e] == 0 || l->strict), best = EMPTY;
    const double *loads = l->load, *pace = l->pace;
    const int32_t *part = l->part;
    const uint8_t *seen = l->seen;
    double least = INFINITY, share = l->share[e];
    for (int s = l->head[e]; s != EMPTY; s = l->after[s]) l->seen[l->part[l->rank_of[s]]] = 1;
    for (int try = l->home[e] < 0 ? 2 : 0; try < 4 && best == EMPTY; try++) {
        int joined = try & 1;
        for (int i = 0; i < n; i++) {
            int r = ranks[i];
            double load = loads[r] + share * pace[r];
            if (load >= least || seen[part[r]] != joined || l->open[r] < 1) continue;
            if (l->home[e] >= 0) {
                int node = l->node_of[r];
                if (try < 2 ? !suits(l, e, node) : must ? node != l->home[e] : l->spare[node] < 1)
                    continue;
            }
            if (!allowed(l, r, e) || (joined && has(l, l->holds, r, e))) continue;
            best = r, least = load;
            if (load <= share * l->fastest) break; /* an empty rank: none can be better */
        }
    }
    for (int s = l->head[e]; s != EMPTY; s = l->after[s]) l->seen[l->part[l->rank_of[s]]] = 0;
    return best;
}

/* Packs what is not placed yet. Copies of replicated experts first, each where they join parts of
 * the mesh that no chain of shared experts joins so far: a router can then shift load between any
 * two ranks by how it splits tokens over copies. Smallest shares first, so that the largest join
 * the largest parts, between which most load has to flow. Then single experts, largest first, each
 * on the rank with least load. Needs `order`. */
static void pack(Layer *l) {
    int n = l->experts, many = 0, size = 0;
    int32_t *list = l->kept; /* replicated experts by ascending share */
    for (int r = 0; r < l->ranks; r++) l->part[r] = r;
    for (int i = 0; i < n; i++) {
        int e = l->order[i], j;
        if (l->head[e] != EMPTY) join(l, e);
        if (l->copies[e] < 2) continue;
        for (j = many++; j > 0 && l->share[e] < l->share[list[j - 1]]; j--) list[j] = list[j - 1];
        list[j] = e;
    }
    for (int r = 0; r < l->ranks; r++) l->heap[r] = r;
    size = l->ranks;
    for (int i = 0; i < many; i++) {
        int e = list[i], placed = 0, open = 0;
        for (int j = 0; j < size; j++)
            if (l->open[l->heap[j]] > 0) l->heap[open++] = l->heap[j];
        size = open;
        for (int s = l->head[e]; s != EMPTY; s = l->after[s]) placed++;
        while (placed < l->copies[e]) {
            int must = l->home[e] >= 0 && l->at_home[e] == 0, home = l->home[e];
            int r = rank_for_copy(l, e, l->heap, size);
            if (r == EMPTY) break;
            int node = l->node_of[r];
            if (home >= 0 && !must) l->spare[node]--;
            if (home >= 0) l->lent[(size_t)node * l->words + (e >> 6)] &= ~(1ull << (e & 63));
            put(l, empty_slot(l, r), e);
            placed++;
        }
        if (placed < l->copies[e]) set_copies(l, e, placed);
        if (placed) join(l, e);
    }
    size = 0;
    for (int r = 0; r < l->ranks; r++) {
        l->key[r] = -l->load[r];
        if (l->open[r] > 0) l->heap[size++] = r;
    }
    for (int j = size / 2 - 1; j >= 0; j--) sift(l->heap, l->key, size, j);
    for (int i = 0; i < n; i++) {
        int e = l->order[i], r = EMPTY;
        if (l->head[e] != EMPTY) continue;
        if (l->home[e] < 0) {
            if (size) r = l->heap[0];
        } else {
            for (int q = 0; q < l->ranks; q++)
                if (l->node_of[q] == l->home[e] && l->open[q] > 0 &&
                    (r == EMPTY || l->load[q] < l->load[r]))
                    r = q;
        }
        if (r == EMPTY) continue;
        put(l, empty_slot(l, r), e);
        if (l->home[e] >= 0) continue;
        l->key[r] = -l->load[r];
        if (l->open[r] < 1) l->heap[0] = l->heap[--size];
        sift(l->heap, l->key, size, 0);
    }
}

/* The least loaded rank with an open slot that lacks the expert (on its home node if it must). */
static int open_rank(const Layer *l, int e, int must) {
    int best = EMPTY;
    for (int r = 0; r < l->ranks; r++) {
        if (l->open[r] < 1 || has(l, l->holds, r, e) || !allowed(l, r, e)) continue;
        if (must && l->node_of[r] != l->home[e]) continue;
        if (best == EMPTY || l->load[r] < l->load[best]) best = r;
    }
    return best;
}

/* The slot of a replicated expert that is missed least, where `expert` may lie; EMPTY: none. */
static int spare_copy(const Layer *l, int expert, int must) {
    int best = EMPTY;
    double least = INFINITY;
    for (int s = 0; s < l->slots; s++) {
        int e = l->row[s], r = l->rank_of[s];
        if (e == EMPTY || l->copies[e] < 2 || pinned(l, r, e)) continue;
        if (has(l, l->holds, r, expert)) continue;
        if (!allowed(l, r, expert) || (must && l->node_of[r] != l->home[expert])) continue;
        if (l->home[e] == l->node_of[r] && l->at_home[e] < 2) continue;
        double without = l->weight[e] / (l->copies[e] - 1);
        if (without < least) least = without, best = s;
    }
    return best;
}

/* A copy of the expert wherever there is room for it or a copy to spare. */
static void add_somewhere(Layer *l, int e, int must) {
    int r = open_rank(l, e, must), s = EMPTY;
    if (r != EMPTY) s = empty_slot(l, r);
    else if ((s = spare_copy(l, e, must)) != EMPTY) drop_copy(l, s);
    if (s != EMPTY) add_copy(l, s, e);
}

/* Gives every expert a copy (on its home node if it has one), then fills what is empty with
 * copies of the experts with the largest shares. */
static void complete(Layer *l) {
    for (int e = 0; e < l->experts; e++) {
        if (l->home[e] >= 0 && !l->at_home[e]) add_somewhere(l, e, 1);
        if (l->head[e] == EMPTY) add_somewhere(l, e, 0);
    }
    for (int e = 0; e < l->experts; e++) {
        if (l->head[e] != EMPTY) continue;
        /* Pins took the slots that the rule would need: better off its node than lost. */
        l->strict = 0;
        for (int i = 0; i < l->experts; i++) l->home[i] = EMPTY;
        add_somewhere(l, e, 0);
    }
    for (int s = 0; s < l->slots; s++) {
        if (l->row[s] != EMPTY) continue;
        int best = EMPTY, r = l->rank_of[s];
        for (int e = 0; e < l->experts; e++)
            if (!has(l, l->holds, r, e) && allowed(l, r, e) &&
                (best == EMPTY || l->share[e] > l->share[best]))
                best = e;
        if (best != EMPTY) add_copy(l, s, best);
    }
}
