/* Two slots on each rank. The best packing of given copies is known then: largest with smallest,
 * and so on inwards ("fold"). What is left to search is how many copies each expert gets. The
 * smallest largest share is not the best: a cold expert wants a partner that is large.
 */
#pragma once
#include "copies.h"
#include "exchange.h"

typedef struct {
    double top;     /* largest load of a rank */
    double squares; /* sum of the squared excess over the mean */
    int small, big; /* experts on the fullest rank */
} Fold;

/* Folds `copies` of experts in `order` of ascending share. Gives up once a rank passes `limit`. */
static Fold fold(const Layer *l, const int32_t *order, double limit) {
    Fold f = {0, 0, EMPTY, EMPTY};
    int i = 0, j = l->experts - 1, low = l->copies[order[0]], high = l->copies[order[j]];
    while (i < j) {
        double load = l->share[order[i]] + l->share[order[j]];
        int n = low < high ? low : high;
        if (load > f.top) {
            if (load > limit) return (Fold){INFINITY, INFINITY, EMPTY, EMPTY};
            f.top = load, f.small = order[i], f.big = order[j];
        }
        if (load > 1) f.squares += n * (load - 1) * (load - 1);
        if (!(low -= n) && ++i < j) low = l->copies[order[i]];
        if (!(high -= n) && --j > i) high = l->copies[order[j]];
    }
    if (i == j && 2 * l->share[order[i]] > f.top)
        f.top = 2 * l->share[order[i]], f.small = f.big = order[i];
    if (f.top > limit) f.top = f.squares = INFINITY;
    return f;
}

static void sort_by_share(const Layer *l, int32_t *order) {
    for (int i = 0; i < l->experts; i++) {
        int e = order[i] = i, j = i;
        for (; j > 0 && l->share[order[j - 1]] > l->share[e]; j--) order[j] = order[j - 1];
        order[j] = e;
    }
}

/* Moves an expert to its place in `order` after its share has changed. */
static void reorder(const Layer *l, int32_t *order, int expert) {
    int i = 0, n = l->experts;
    while (order[i] != expert) i++;
    for (; i > 0 && l->share[order[i - 1]] > l->share[expert]; i--) order[i] = order[i - 1];
    for (; i + 1 < n && l->share[order[i + 1]] < l->share[expert]; i++) order[i] = order[i + 1];
    order[i] = expert;
}

static void set_share(Layer *l, int expert, int copies) {
    l->copies[expert] = copies;
    l->share[expert] = l->weight[expert] / copies;
}

/* One expert gets a copy more, another one fewer: the fold afterwards; undone again. */
static Fold try_fold(Layer *l, const int32_t *order, int32_t *trial, int up, int down,
                     double limit) {
    memcpy(trial, order, sizeof(int32_t) * l->experts);
    set_share(l, up, l->copies[up] + 1);
    set_share(l, down, l->copies[down] - 1);
    reorder(l, trial, up);
    reorder(l, trial, down);
    Fold f = fold(l, trial, limit);
    set_share(l, up, l->copies[up] - 1);
    set_share(l, down, l->copies[down] + 1);
    return f;
}

/* Shifts copies between experts until the fold's fullest rank has at most `target` or no shift to
 * or from its two experts helps, for at most `tries` trials. Leaves the experts in `order`. */
static Fold fold_copies(Layer *l, int32_t *order, int32_t *trial, int cap, double target, int all,
                        int *tries) {
    sort_by_share(l, order);
    Fold now = fold(l, order, INFINITY);
    while (now.top > target && *tries > 0) {
        Fold best = now;
        int best_up = EMPTY, best_down = EMPTY;
        for (int way = 0; way < 4 && (all || best_up == EMPTY); way++) {
            int e = way & 1 ? now.small : now.big, gains = way < 2;
            if ((way & 1) && now.small == now.big) continue;
            if (gains ? l->copies[e] >= cap : l->copies[e] < 2) continue;
            for (int h = 0; h < l->experts && *tries > 0; h++) {
                if (h == e || (gains ? l->copies[h] < 2 : l->copies[h] >= cap)) continue;
                int up = gains ? e : h, down = gains ? h : e;
                double least = l->share[order[0]], more = l->weight[up] / (l->copies[up] + 1);
                least = more < least ? more : least;
                if (l->weight[down] / (l->copies[down] - 1) + least > best.top) continue;
                Fold f = try_fold(l, order, trial, up, down, best.top);
                (*tries)--;
                if (f.top > best.top || (f.top == best.top && f.squares >= best.squares)) continue;
                best = f, best_up = up, best_down = down;
            }
        }
        if (best_up == EMPTY) break;
        set_share(l, best_up, l->copies[best_up] + 1);
        set_share(l, best_down, l->copies[best_down] - 1);
        reorder(l, order, best_up);
        reorder(l, order, best_down);
        now = best;
    }
    return now;
}

/* The better of two searches: the first takes any shift that relieves the fullest rank, the second,
 * if tries are left, compares all. */
static Fold best_copies(Layer *l, int slots, int cap, double target, int tries) {
    Fold first = fold_copies(l, l->order, l->heap, cap, target, 0, &tries);
    if (first.top <= target || tries <= 0) return first;
    memcpy(l->kept, l->copies, sizeof(int32_t) * l->experts);
    sort_by_weight(l);
    for (int e = 0; e < l->experts; e++) l->copies[e] = 1;
    count_copies(l, slots, cap, -1);
    for (int e = 0; e < l->experts; e++) set_share(l, e, l->copies[e]);
    Fold second = fold_copies(l, l->order, l->heap, cap, target, 1, &tries);
    if (second.top < first.top) return second;
    for (int e = 0; e < l->experts; e++) set_share(l, e, l->kept[e]);
    tries = 0;
    return fold_copies(l, l->order, l->heap, cap, target, 0, &tries);
}

/* Puts the folded copies on the ranks, two on each; two copies of one expert never meet: the
 * second is exchanged with the nearest earlier rank's. 0 if that fails somewhere. */
static int put_folded(Layer *l, const int32_t *order) {
    int n = 0, slots = 0;
    int32_t *list = l->sorted;
    for (int i = 0; i < l->experts; i++)
        for (int c = 0; c < l->copies[order[i]]; c++) list[n++] = order[i];
    for (int r = 0; r < l->ranks; r++) {
        if (l->first[r + 1] - l->first[r] != 2) continue;
        int small = list[slots], big = list[n - 1 - slots];
        slots++;
        put(l, l->first[r], small);
        if (small != big) {
            put(l, l->first[r] + 1, big);
            continue;
        }
        int q = r - 1;
        for (; q >= 0; q--) {
            if (l->open[q] || l->first[q + 1] - l->first[q] != 2) continue;
            if (has(l, l->holds, q, big)) continue;
            int other = take(l, l->first[q] + 1);
            put(l, l->first[q] + 1, big);
            put(l, l->first[r] + 1, other);
            break;
        }
        if (q < 0) return 0;
    }
    return 1;
}

static uint32_t roll(uint64_t *dice, int n) {
    *dice = *dice * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)((*dice >> 33) % (uint64_t)n);
}

/* Random exchanges that let no load pass `top` and never leave more parts than before, for at most
 * `tries`. */
static void join_parts(Layer *l, double top, int tries) {
    uint64_t dice = 1;
    int parts = count_parts(l, EMPTY, EMPTY, EMPTY);
    for (int rolls = 40 * tries; rolls > 0 && tries > 0 && parts > 1; rolls--) {
        int a = roll(&dice, l->slots), b = roll(&dice, l->slots);
        int r = l->rank_of[a], q = l->rank_of[b];
        double d = share_in(l, a) - share_in(l, b);
        if (q == r || l->load[r] - d * l->pace[r] > top) continue;
        if (l->load[q] + d * l->pace[q] > top) continue;
        if (!may_swap(l, a, b)) continue;
        int now = count_parts(l, a, b, EMPTY);
        tries--;
        if (now > parts) continue;
        exchange(l, a, b, 1);
        parts = now;
    }
}
