/* Few changes to a placement in force, each against the number of experts that it fetches. */
#pragma once
#include "parts.h"

typedef struct {
    double target;  /* load above it is excess, which the search removes */
    double price;   /* least excess removed per expert fetched */
} Search;

typedef struct {
    int a, b;     /* exchange of two slots, or, with b EMPTY: slot a takes a copy of `expert` */
    int expert;
    double worth; /* excess removed per fetch */
} Change;

static double excess(double load, double target) {
    return load > target ? load - target : 0;
}

static int fetches(const Layer *l, int rank, int expert) {
    return expert != EMPTY && !has(l, l->held, rank, expert);
}

/* A copy off its home sends tokens to a node more: as good a reason to spare it as a fetch. */
static int strays(const Layer *l, int rank, int expert) {
    return expert != EMPTY && l->home[expert] >= 0 && l->home[expert] != l->node_of[rank];
}

/* What it costs that a rank's copy of one expert makes way for one of another. */
static int cost_of(const Layer *l, int rank, int gone, int come) {
    return fetches(l, rank, come) - fetches(l, rank, gone) + strays(l, rank, come) -
           strays(l, rank, gone);
}

/* Excess that one more copy of the expert takes off the ranks that hold one. */
static double relief(const Layer *l, const Search *s, int expert) {
    double less = l->share[expert] - l->weight[expert] / (l->copies[expert] + 1), sum = 0;
    for (int i = l->head[expert]; i != EMPTY; i = l->after[i]) {
        double load = l->load[l->rank_of[i]];
        if (load > s->target)
            sum += load - s->target - excess(load - less * l->pace[l->rank_of[i]], s->target);
    }
    return sum;
}

/* Excess removed when slot a gives up its copy for one of `expert`, or -1 when a load would reach
 * `top`. `most` is the relief of one more of the expert, `gained` what dropping slot a's costs. */
static double replacing(const Layer *l, const Search *s, int a, int expert, double most,
                        double gained, double top) {
    int e = l->row[a], q = l->rank_of[a];
    double share = l->weight[expert] / (l->copies[expert] + 1), less = l->share[expert] - share;
    double after = l->load[q] + (share - share_in(l, a)) * l->pace[q];
    double removed = most - gained + excess(l->load[q], s->target) - excess(after, s->target);
    if (after >= top) return -1;
    /* Where both experts lie, relief and gain partly cancel. */
    double more = e == EMPTY ? 0 : l->weight[e] / (l->copies[e] - 1) - l->share[e];
    for (int i = l->head[expert]; i != EMPTY; i = l->after[i]) {
        int r = l->rank_of[i];
        if (e == EMPTY || !has(l, l->holds, r, e)) continue;
        double was = l->load[r], up = more * l->pace[r], down = less * l->pace[r];
        removed += excess(was - down, s->target) + excess(was + up, s->target) -
                   excess(was, s->target) - excess(was + up - down, s->target);
    }
    return removed;
}

/* Excess that the other ranks gain when slot a gives up its copy; INFINITY if it may not, or a
 * load would reach `top`. */
static double dropping(const Layer *l, const Search *s, int a, double top) {
    int e = l->row[a], here = l->rank_of[a];
    if (e == EMPTY) return 0;
    if (l->copies[e] < 2 || pinned(l, here, e)) return INFINITY;
    if (l->home[e] == l->node_of[here] && l->at_home[e] < 2) return INFINITY;
    double more = l->weight[e] / (l->copies[e] - 1) - l->share[e], gained = 0;
    for (int i = l->head[e]; i != EMPTY; i = l->after[i]) {
        int r = l->rank_of[i];
        double now = l->load[r] + more * l->pace[r];
        if (i == a) continue;
        if (now >= top) return INFINITY;
        if (now > s->target) gained += now - s->target - excess(l->load[r], s->target);
    }
    return gained;
}

/* Takes the change as the best so far if it is worth more, and the ranks stay joined. */
static void consider(const Layer *l, const Search *s, Change *best, Change c, double removed,
                     int cost) {
    c.worth = removed / (cost > 0 ? cost : 0.5);
    if (c.worth <= best->worth * (1 + 1e-9) || removed < s->price * cost || removed < 1e-9) return;
    int joins = c.b == EMPTY || replicated(l, c.a) || replicated(l, c.b);
    if (joins && count_parts(l, c.a, c.b, c.expert) > l->parts) return;
    *best = c;
}

/* One fetch: slot a's copy makes way for one of expert f. */
static void replace(const Layer *l, const Search *s, Change *best, int a, int f, double most,
                    double gained, double top) {
    if (has(l, l->holds, l->rank_of[a], f) || !allowed(l, l->rank_of[a], f)) return;
    int cost = fetches(l, l->rank_of[a], f) + strays(l, l->rank_of[a], f);
    cost -= strays(l, l->rank_of[a], l->row[a]);
    double removed = replacing(l, s, a, f, most, gained, top);
    consider(l, s, best, (Change){a, EMPTY, f, 0}, removed, cost);
}

/* A copy elsewhere makes way for one more of an expert on rank r. */
static void relieve(const Layer *l, const Search *s, int r, Change *best) {
    double top = l->load[r], largest = 0;
    int32_t *slots = l->sorted;
    double *gained = l->sorted_share;
    int n = 0;
    for (int b = l->first[r]; b < l->first[r + 1]; b++) {
        double most = l->row[b] == EMPTY ? 0 : relief(l, s, l->row[b]);
        largest = most > largest ? most : largest;
    }
    for (int a = 0; a < l->slots; a++) {
        if (l->rank_of[a] == r || (l->row[a] != EMPTY && l->copies[l->row[a]] < 2)) continue;
        double g = dropping(l, s, a, top) - excess(l->load[l->rank_of[a]], s->target);
        if (g >= largest) continue;
        slots[n] = a, gained[n++] = g + excess(l->load[l->rank_of[a]], s->target);
    }
    for (int b = l->first[r]; n && b < l->first[r + 1]; b++) {
        int f = l->row[b];
        if (f == EMPTY) continue;
        double most = relief(l, s, f), share = l->weight[f] / (l->copies[f] + 1);
        if (most <= best->worth * (1 + 1e-9)) continue;
        for (int i = 0; i < n; i++) {
            int q = l->rank_of[slots[i]];
            double now = l->load[q] + (share - share_in(l, slots[i])) * l->pace[q];
            double removed = most - gained[i];
            removed += excess(l->load[q], s->target) - excess(now, s->target);
            if (now < top && removed > best->worth * (1 + 1e-9))
                replace(l, s, best, slots[i], f, most, gained[i], top);
        }
    }
}

/* A copy on rank r makes way for one of a colder expert. */
static void cool(const Layer *l, const Search *s, int r, Change *best) {
    double top = l->load[r], over = excess(top, s->target);
    for (int a = l->first[r]; a < l->first[r + 1]; a++) {
        if (l->row[a] != EMPTY && l->copies[l->row[a]] < 2) continue;
        double mine = share_in(l, a), gained = dropping(l, s, a, top);
        if (over - gained <= best->worth) continue;
        for (int f = 0; f < l->experts; f++) {
            double share = l->weight[f] / (l->copies[f] + 1);
            double removed = over - excess(top + (share - mine) * l->pace[r], s->target) - gained;
            if (share >= mine || removed <= best->worth) continue;
            replace(l, s, best, a, f, relief(l, s, f), gained, top);
        }
    }
}

/* Two fetches: experts of rank r and another are exchanged. */
static void trade(const Layer *l, const Search *s, int r, Change *best) {
    double top = l->load[r], over = excess(top, s->target), pace_r = l->pace[r];
    double *share = l->sorted_share; /* scratch, by slot */
    for (int a = 0; a < l->slots; a++) share[a] = share_in(l, a);
    for (int q = 0; q < l->ranks; q++) {
        if (l->load[q] >= top || q == r) continue;
        double theirs = excess(l->load[q], s->target), pace_q = l->pace[q];
        double room = theirs > 0 ? 0 : s->target - l->load[q];
        /* No exchange removes more than fits below the target there, unless r is the slower. */
        if (pace_r <= pace_q && room * pace_r <= best->worth * pace_q) continue;
        for (int a = l->first[r]; a < l->first[r + 1]; a++) {
            int e = l->row[a];
            if (e == EMPTY) continue;
            /* Between these, what is removed may exceed the best. */
            double most = share[a] - best->worth / pace_r;
            double least = share[a] - (over + room - best->worth) / pace_q;
            for (int b = l->first[q]; b < l->first[q + 1]; b++) {
                if (share[b] > most || share[b] < least) continue;
                double d = share[a] - share[b];
                double x = top - d * pace_r, y = l->load[q] + d * pace_q;
                if (d <= 0 || y >= top) continue;
                double removed = over + theirs - excess(x, s->target) - excess(y, s->target);
                if (removed <= best->worth || !may_go(l, a, q) || !may_go(l, b, r)) continue;
                int cost = cost_of(l, r, e, l->row[b]) + cost_of(l, q, l->row[b], e);
                consider(l, s, best, (Change){a, b, EMPTY, 0}, removed, cost);
            }
        }
        if (best->worth >= over / 2) return; /* as good as two fetches can be */
    }
}

static Change best_change(const Layer *l, const Search *s, int r) {
    Change best = {EMPTY, EMPTY, EMPTY, 0};
    double over = excess(l->load[r], s->target);
    relieve(l, s, r, &best);
    if (best.worth < over) cool(l, s, r, &best);
    if (best.worth < over / 2) trade(l, s, r, &best);
    return best;
}

/* Removes what exceeds the target by changes that are worth their fetches, fullest rank first. */
static void settle(Layer *l, const Search *s, int steps) {
    l->parts = count_parts(l, EMPTY, EMPTY, EMPTY);
    for (; steps > 0; steps--) {
        int r = EMPTY;
        for (int q = 0; q < l->ranks; q++)
            if (!l->seen[q] && (r == EMPTY || l->load[q] > l->load[r])) r = q;
        if (r == EMPTY || l->load[r] - s->target < s->price) break;
        Change c = best_change(l, s, r);
        if (c.worth <= 0) {
            l->seen[r] = 1;
        } else if (c.b != EMPTY) {
            int x = take(l, c.a), y = l->row[c.b] == EMPTY ? EMPTY : take(l, c.b);
            put(l, c.b, x);
            if (y != EMPTY) put(l, c.a, y);
        } else {
            if (l->row[c.a] != EMPTY) drop_copy(l, c.a);
            add_copy(l, c.a, c.expert);
        }
    }
    memset(l->seen, 0, l->ranks);
}
