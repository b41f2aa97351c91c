/* Exchanges of two slots that relieve the fullest rank, however much they move. */
#pragma once
#include "copies.h"
#include "parts.h"

/* Lists the slots of a rank that exchanges may use: those of single experts, or `all`. */
static void list_movable(Layer *l, int r, int all) {
    int32_t *list = l->sorted + l->first[r];
    double *shares = l->sorted_share + l->first[r];
    int n = 0;
    for (int s = l->first[r]; s < l->first[r + 1]; s++) {
        int e = l->row[s];
        if (e != EMPTY && ((!all && l->copies[e] > 1) || pinned(l, r, e))) continue;
        double share = share_in(l, s);
        int j = n++;
        for (; j > 0 && shares[j - 1] > share; j--)
            list[j] = list[j - 1], shares[j] = shares[j - 1];
        list[j] = s, shares[j] = share;
    }
    l->movable[r] = n;
}

static void exchange(Layer *l, int a, int b, int all) {
    int x = l->row[a] == EMPTY ? EMPTY : take(l, a), y = l->row[b] == EMPTY ? EMPTY : take(l, b);
    if (x != EMPTY) put(l, b, x);
    if (y != EMPTY) put(l, a, y);
    list_movable(l, l->rank_of[a], all);
    list_movable(l, l->rank_of[b], all);
}

typedef struct {
    int a, b;
    double top; /* the larger load of the two ranks afterwards */
} Swap;

/* Finds in `best` an exchange between ranks r and q that leaves the larger load below best->top. */
static void best_exchange(const Layer *l, int r, int q, Swap *best) {
    const int32_t *mine = l->sorted + l->first[r], *theirs = l->sorted + l->first[q];
    const double *my_share = l->sorted_share + l->first[r];
    const double *their_share = l->sorted_share + l->first[q];
    double pace_r = l->pace[r], pace_q = l->pace[q], load_r = l->load[r], load_q = l->load[q];
    double ideal = (load_r - load_q) / (pace_r + pace_q);
    int n = l->movable[q], at = 0;
    if (load_r - ideal * pace_r >= best->top) return;
    for (int i = 0; i < l->movable[r]; i++) {
        double share = my_share[i], wanted = share - ideal;
        while (at < n && their_share[at] < wanted) at++;
        for (int j = at; j < n; j++) { /* moves less than is ideal: r stays the fuller one */
            double top = load_r - (share - their_share[j]) * pace_r;
            if (top >= best->top) break;
            if (!may_swap(l, mine[i], theirs[j])) continue;
            best->top = top, best->a = mine[i], best->b = theirs[j];
            break;
        }
        for (int j = at - 1; j >= 0; j--) {
            double top = load_q + (share - their_share[j]) * pace_q;
            if (top >= best->top) break;
            if (!may_swap(l, mine[i], theirs[j])) continue;
            best->top = top, best->a = mine[i], best->b = theirs[j];
            break;
        }
    }
}

/* Moves the rank in place `i` of `order`, by ascending load, to where it belongs. */
static void rerank(const double *load, int32_t *order, int n, int i) {
    int r = order[i];
    for (; i > 0 && load[order[i - 1]] > load[r]; i--) order[i] = order[i - 1];
    for (; i + 1 < n && load[order[i + 1]] < load[r]; i++) order[i] = order[i + 1];
    order[i] = r;
}

/* Exchanges between the fullest rank and another until all loads are at most `target` or no
 * exchange helps, the emptiest ranks first. Copies of replicated experts stay, which keeps the
 * ranks joined, unless `all`. */
static void polish(Layer *l, double target, int steps, int all) {
    int32_t *order = l->heap;
    int n = 0, useful = 0;
    for (int r = 0; r < l->ranks; r++) {
        list_movable(l, r, all);
        if (l->movable[r]) order[n++] = r;
        useful |= l->first[r + 1] - l->first[r] > 1 || l->pace[r] != l->pace[0];
    }
    if (!useful) return; /* one slot a rank: loads would only change places */
    for (int i = n / 2 - 1; i >= 0; i--) sift(order, l->load, n, i);
    for (int i = n - 1; i > 0; i--) { /* the heap's top is the fullest of the rest */
        int32_t r = order[0];
        order[0] = order[i];
        order[i] = r;
        sift(order, l->load, i, 0);
    }
    for (; steps > 0; steps--) {
        int r = fullest(l), at = 0;
        Swap best = {EMPTY, EMPTY, l->load[r] * (1 - 1e-9)};
        if (l->load[r] <= target) return;
        for (int i = 0; i < n && best.top > target; i++) {
            int q = order[i];
            if (l->load[q] >= best.top) break;
            double was = best.top;
            best_exchange(l, r, q, &best);
            if (best.top < was) at = i;
        }
        if (best.a == EMPTY) return;
        exchange(l, best.a, best.b, all);
        rerank(l->load, order, n, at);
        for (at = n - 1; order[at] != r;) at--;
        rerank(l->load, order, n, at);
    }
}
