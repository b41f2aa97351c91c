/* From one row of a gate's logits to its token's experts and weights. A row depends on its own logits
 * alone, and on no machine's library: exp is computed here.
 */
#ifndef MOEMESH_GATE_H
#define MOEMESH_GATE_H
#include "rows.h"

typedef struct {
    int32_t num_experts, num_groups, topk_groups, top_k;
    int32_t softmax;    /* else sigmoid */
    int32_t normalise;  /* weights are divided by their sum */
    float epsilon, scale;
    const float *bias;  /* [experts] added for the choice alone, or NULL */
    float *score;       /* [experts] scratch */
    float *choice;      /* [experts] scratch */
    float *best;        /* [max(top_k, topk_groups)] scratch */
    int32_t *group;     /* [2 groups] scratch: whether each is chosen, and which are */
} Gate;

static inline void score_row(const Gate *g, const float *logits) {
    int32_t n = g->num_experts;
    float *score = g->score;
    if (!g->softmax) {
        for (int32_t e = 0; e < n; e++) score[e] = 1.0f / (1.0f + exp_of(-logits[e]));
        return;
    }
    float highest = logits[0], total = 0.0f;
    for (int32_t e = 1; e < n; e++) highest = logits[e] > highest ? logits[e] : highest;
    for (int32_t e = 0; e < n; e++) score[e] = exp_of(logits[e] - highest);
    for (int32_t e = 0; e < n; e++) total += score[e];
    for (int32_t e = 0; e < n; e++) score[e] /= total;
}

/* Keep the `k` highest of the values offered so far in falling order; of equal ones the earlier. */
static inline int32_t offer(float *best, int32_t *which, int32_t kept, int32_t k, float value,
                            int32_t index) {
    if (kept == k && !(value > best[k - 1])) return kept;
    int32_t i = kept < k ? kept : k - 1;
    for (; i > 0 && value > best[i - 1]; i--) {
        best[i] = best[i - 1];
        which[i] = which[i - 1];
    }
    best[i] = value;
    which[i] = index;
    return kept < k ? kept + 1 : k;
}

/* group[g] becomes whether experts of group g may be chosen: those of the groups whose two best
 * experts have the highest sum. */
static inline void choose_groups(const Gate *g) {
    int32_t size = g->num_experts / g->num_groups, kept = 0;
    int32_t *chosen = g->group + g->num_groups;
    for (int32_t i = 0; i < g->num_groups; i++) {
        const float *choice = g->choice + i * size;
        float first = choice[0], second = -INFINITY;
        for (int32_t e = 1; e < size; e++) {
            if (choice[e] > first) {
                second = first;
                first = choice[e];
            } else if (choice[e] > second) {
                second = choice[e];
            }
        }
        kept = offer(g->best, chosen, kept, g->topk_groups, size > 1 ? first + second : first, i);
    }
    memset(g->group, 0, sizeof(int32_t) * (size_t)g->num_groups);
    for (int32_t i = 0; i < kept; i++) g->group[chosen[i]] = 1;
}

/* One row's logits, of which the first num_experts count -> experts and weights [top_k], best first. */
static inline void gate_row(const Gate *g, const float *logits, int32_t *experts, float *weights) {
    int32_t size = g->num_experts / g->num_groups, limited = g->topk_groups < g->num_groups;
    score_row(g, logits);
    for (int32_t e = 0; e < g->num_experts; e++) {
        float value = g->bias ? g->score[e] + g->bias[e] : g->score[e];
        g->choice[e] = value != value ? INFINITY : value; /* a NaN must show in the weights */
    }
    if (limited) choose_groups(g);
    int32_t kept = 0;
    for (int32_t i = 0; i < g->num_groups; i++) {
        if (limited && !g->group[i]) continue;
        for (int32_t e = i * size; e < (i + 1) * size; e++)
            kept = offer(g->best, experts, kept, g->top_k, g->choice[e], e);
    }
    float total = g->epsilon;
    for (int32_t k = 0; k < kept; k++) total += weights[k] = g->score[experts[k]];
    for (int32_t k = 0; k < kept; k++)
        weights[k] = (g->normalise ? weights[k] / total : weights[k]) * g->scale;
}

#endif
