/* Rows of few slots, two on each rank: all of a plan is searched at once. */
#pragma once
#include "fold.h"
#include "pack.h"

enum { BEAM = 32 }; /* ways to count copies that are looked at */

/* The best ways so far to count copies, by ascending top of their folds. */
typedef struct {
    int n;
    double top[BEAM];
    uint8_t seen[BEAM]; /* its neighbours were looked at */
    int32_t *copies;    /* [BEAM, experts] */
} Pool;

static void use_copies(Layer *l, const int32_t *copies) {
    for (int e = 0; e < l->experts; e++) set_share(l, e, copies[e]);
    sort_by_share(l, l->order);
}

/* Puts l->copies into the pool unless it is there or BEAM better ones are. Where; BEAM: nowhere. */
static int pool_copies(const Layer *l, Pool *p, double top) {
    int at = 0, last = p->n < BEAM ? p->n : BEAM - 1;
    size_t E = l->experts, size = sizeof(int32_t) * E;
    while (at < p->n && p->top[at] < top) at++;
    for (int i = at; i < p->n && p->top[i] == top; i++)
        if (!memcmp(p->copies + i * E, l->copies, size)) return BEAM;
    if (at > last) return BEAM;
    memmove(p->top + at + 1, p->top + at, sizeof(double) * (last - at));
    memmove(p->seen + at + 1, p->seen + at, last - at);
    memmove(p->copies + (at + 1) * E, p->copies + at * E, size * (last - at));
    memcpy(p->copies + at * E, l->copies, size);
    p->top[at] = top, p->seen[at] = 0, p->n = last + 1;
    return at;
}

/* Fills the pool from l->copies on, the best of it first, by shifts of one copy. */
static void search_copies(Layer *l, Pool *p, int cap, int tries) {
    sort_by_share(l, l->order);
    pool_copies(l, p, fold(l, l->order, INFINITY).top);
    for (int at = 0; at < p->n && tries > 0;) {
        if (p->seen[at]) {
            at++;
            continue;
        }
        p->seen[at] = 1;
        use_copies(l, p->copies + (size_t)at * l->experts);
        for (int down = 0; down < l->experts; down++)
            for (int up = 0; up < l->experts && l->copies[down] > 1 && tries > 0; up++) {
                if (up == down || l->copies[up] >= cap) continue;
                double limit = p->n < BEAM ? INFINITY : p->top[BEAM - 1];
                double top = try_fold(l, l->order, l->heap, up, down, limit).top;
                tries--;
                if (top >= limit) continue;
                l->copies[up]++, l->copies[down]--;
                int i = pool_copies(l, p, top);
                l->copies[up]--, l->copies[down]++;
                if (i < at) at = i;
            }
    }
}

/* What is made small: the largest load of a rank, and `joined` times that of the fullest part's
 * ranks. INFINITY where it would pass `limit`. */
static double energy(const Layer *l, double joined, double limit) {
    double top = l->load[fullest(l)];
    return top + joined > limit ? INFINITY : top + joined * fullest_part(l);
}

static void swap_slots(Layer *l, int a, int b) {
    int e = take(l, a), f = take(l, b);
    put(l, a, f);
    put(l, b, e);
}

/* Simulated annealing over exchanges; the dice are seeded, so that the same input gives the same
 * row. Writes rows with less energy than `best` to l->best_row; the least energy. */
static double anneal(Layer *l, double joined, double best, int steps) {
    uint64_t dice = 1;
    double least = l->load[fullest(l)] + joined, now = energy(l, joined, INFINITY), heat = 0.06;
    for (int i = 0; i <= steps; i++, heat *= 1 - 4.0 / steps) {
        if (now < best - 1e-9) {
            best = now;
            memcpy(l->best_row, l->row, sizeof(int32_t) * l->slots);
        }
        if (best <= least + 1e-9) break;
        int a = roll(&dice, l->slots), b = roll(&dice, l->slots);
        double limit = now + heat * (roll(&dice, 1000) / 1000.0) * (roll(&dice, 1000) / 1000.0);
        int r = l->rank_of[a], q = l->rank_of[b];
        if (r == q || l->row[a] == EMPTY || l->row[b] == EMPTY) continue;
        if (!may_go(l, a, q) || !may_go(l, b, r)) continue;
        swap_slots(l, a, b);
        double then = energy(l, joined, limit);
        if (then <= limit) now = then;
        else swap_slots(l, a, b);
    }
    return best;
}

/* From l->copies on: of the best ways to count copies, the row with least energy. */
static void plan_small(Layer *l, int cap, double joined, int tries, int steps) {
    Pool pool = {0, {0}, {0}, l->pool};
    double best = INFINITY;
    search_copies(l, &pool, cap, tries);
    for (int i = 0; i < pool.n && pool.top[i] + joined < best; i++) {
        use_copies(l, pool.copies + (size_t)i * l->experts);
        clear(l);
        put_folded(l, l->order);
        complete(l);
        best = anneal(l, joined, best, steps);
    }
    for (int s = 0; s < l->slots; s++)
        if (l->row[s] != EMPTY) drop_copy(l, s);
    for (int s = 0; s < l->slots; s++)
        if (l->best_row[s] != EMPTY) add_copy(l, s, l->best_row[s]);
}
