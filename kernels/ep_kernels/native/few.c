/* A few tokens against matrices that fit a core's cache: there the calls cost the time, so that a
 * whole part of a layer is one. The caller's face is ep_kernels/few.py.
 */
#include "gate.h"
#include "grown.h"
#include "latent.h"
#include "rows.h"

/* y [n] += x [rows] times w [rows, n]. */
INLINED void add_rows(const float *x, const float *w, int32_t rows, int32_t n, float *restrict y) {
    int32_t i = 0;
    for (; i + 4 <= rows; i += 4, w += 4 * (int64_t)n) {
        float a = x[i], b = x[i + 1], c = x[i + 2], d = x[i + 3];
        const float *wa = w, *wb = wa + n, *wc = wb + n, *wd = wc + n;
        for (int32_t j = 0; j < n; j++) y[j] += a * wa[j] + b * wb[j] + (c * wc[j] + d * wd[j]);
    }
    for (; i < rows; i++, w += n)
        for (int32_t j = 0; j < n; j++) y[j] += x[i] * w[j];
}

INLINED float dot(const float *x, const float *w, int32_t n) {
    float lane[LANES] = {0}, sum = 0.0f;
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int32_t j = 0; j < LANES; j++) lane[j] += x[i + j] * w[i + j];
    for (; i < n; i++) sum += x[i] * w[i];
    return sum + sum_of(lane);
}

/* y [rows] = w [rows, n] times x [n]. */
INLINED void dots(const float *x, const float *w, int32_t rows, int32_t n, float *y) {
    for (int32_t i = 0; i < rows; i++, w += n) y[i] = dot(x, w, n);
}

/* Experts in slots: of each gate and up [hidden, 2 inner], and down [inner, hidden]; NULL where a
 * slot is empty. */
typedef struct {
    int32_t hidden, inner;
    float *scratch;             /* [2 inner] */
    const float *const *expert; /* [slots][2] */
    int64_t slots;
} few_ffn;

/* out [hidden] += the SwiGLU FFN of x [hidden] by one expert, weighted. */
INLINED void add_ffn(const few_ffn *is, const float *const *expert, const float *x, float weight,
                     float *out) {
    int32_t hidden = is->hidden, inner = is->inner;
    float *gate = is->scratch, *up = gate + inner;
    for (int32_t j = 0; j < 2 * inner; j++) gate[j] = 0.0f;
    add_rows(x, expert[0], hidden, 2 * inner, gate);
    for (int32_t j = 0; j < inner; j++) gate[j] *= weight * up[j] / (1.0f + exp_of(-gate[j]));
    add_rows(gate, expert[1], inner, hidden, out);
}

/* The FFN of x [tokens, hidden], weighted and added up by token -> out [tokens, hidden]. Returns the
 * first pair whose slot is empty or out of range, -1 if none. */
EACH_WIDTH int64_t moemesh_few_ffn(const few_ffn *is, const float *x, int64_t tokens,
                        const int32_t *pair_token, const int32_t *pair_slot,
                        const float *pair_weight, int64_t pairs, float *out) {
    int64_t hidden = is->hidden;
    for (int64_t i = 0; i < tokens * hidden; i++) out[i] = 0.0f;
    for (int64_t p = 0; p < pairs; p++) {
        int32_t slot = pair_slot[p];
        if (slot < 0 || slot >= is->slots || !is->expert[2 * slot]) return p;
        add_ffn(is, is->expert + 2 * slot, x + pair_token[p] * hidden, pair_weight[p],
                out + pair_token[p] * hidden);
    }
    return -1;
}

/* The FFN of x [tokens, hidden] by the expert in the first slot -> out [tokens, hidden]. */
EACH_WIDTH void moemesh_few_dense(const few_ffn *is, const float *x, int64_t tokens, float *out) {
    int64_t hidden = is->hidden;
    for (int64_t i = 0; i < tokens * hidden; i++) out[i] = 0.0f;
    for (int64_t t = 0; t < tokens; t++)
        add_ffn(is, is->expert, x + t * hidden, 1.0f, out + t * hidden);
}

typedef struct {
    const float *norm;   /* [hidden] */
    const float *weight; /* [experts, hidden] */
    const Gate *gate;
    float *logits; /* [experts] scratch */
    float epsilon;
    int32_t hidden;
} few_gate;

/* h [tokens, hidden] -> x [tokens, hidden], h normed, and the gate's experts and weights [tokens,
 * top_k] for it. */
EACH_WIDTH void moemesh_few_gate(const few_gate *is, const float *h, int32_t tokens, float *x,
                        int32_t *experts, float *weights) {
    for (int32_t t = 0; t < tokens; t++) {
        rms_norm_row(h, is->norm, is->epsilon, is->hidden, x);
        dots(x, is->weight, is->gate->num_experts, is->hidden, is->logits);
        gate_row(is->gate, is->logits, experts, weights);
        h += is->hidden;
        x += is->hidden;
        experts += is->gate->top_k;
        weights += is->gate->top_k;
    }
}

typedef struct {
    const float *norm;        /* [hidden] */
    const float *first;       /* [source + latent + rotary, hidden] */
    const float *source_norm; /* [source]; NULL: queries come straight from the hidden state */
    const float *query;       /* [heads * (latent + rotary), source]; NULL likewise */
    const float *latent_norm; /* [latent] */
    const float *out;         /* [hidden, heads * latent] */
    float epsilon, latent_epsilon;
    int32_t hidden, source, heads, latent, rotary;
} few_latent;

/* For what lies between a token's steps: values, then the rows that it sees. */
static float *memory_of(int64_t values, int64_t keys) {
    static _Thread_local grown memory;
    values = (values + 15) / 16 * 16;
    return grow(&memory, (size_t)values * sizeof(float) + (size_t)keys * sizeof(float *));
}

/* Where the rows that token i sees lie. */
static void find_rows(const latent_step *step, int64_t i, const float **row) {
    const int64_t *block = step->blocks + step->offset[i];
    int64_t size = step->block_size, within = step->skip[i];
    for (int64_t t = 0; t < step->keys[i]; block++, within = 0)
        for (; within < size && t < step->keys[i]; within++, t++)
            row[t] = step->cache + (*block * size + within) * step->stride;
}

/* Latent attention of one token, h [hidden] -> out [hidden]; its row of the cache is written to
 * `own`, which is one of those that it sees. */
INLINED void attend_one(const few_latent *is, const latent_step *step, int64_t i, const float *h,
                        float *own, float *out) {
    int32_t heads = is->heads, latent = is->latent, width = latent + is->rotary;
    int64_t keys = step->keys[i], query_width = is->source_norm ? (int64_t)heads * width : 0;
    int64_t values = is->hidden + is->source + width + query_width + (int64_t)heads * latent + keys;
    float *x = memory_of(values, keys), *first = x + is->hidden, *query = first + is->source + width;
    float *found = query + query_width, *score = found + heads * latent;
    const float **row = (const float **)(x + (values + 15) / 16 * 16);
    const float *query_turn = step->query_turn + i * width;
    const float *key_turn = step->key_turn + i * is->rotary;
    rms_norm_row(h, is->norm, is->epsilon, is->hidden, x);
    dots(x, is->first, is->source + width, is->hidden, first);
    if (is->source_norm) {
        rms_norm_row(first, is->source_norm, is->latent_epsilon, is->source, first);
        dots(first, is->query, heads * width, is->source, query);
    } else {
        query = first; /* source = heads * width */
    }
    for (int32_t head = 0; head < heads; head++)
        turn(query + head * width, query_turn, width / 2, query + head * width);
    const float *new = first + is->source;
    rms_norm_row(new, is->latent_norm, is->latent_epsilon, latent, own);
    turn(new + latent, key_turn, is->rotary / 2, own + latent);

    find_rows(step, i, row);
    for (int32_t head = 0; head < heads; head++) {
        float most = -INFINITY, sum = 0.0f;
        for (int64_t t = 0; t < keys; t++) {
            score[t] = dot(query + head * width, row[t], width);
            most = score[t] > most ? score[t] : most;
        }
        for (int64_t t = 0; t < keys; t++) score[t] = exp_of(score[t] - most);
        for (int64_t t = 0; t < keys; t++) sum += score[t];
        float *value = found + head * latent;
        for (int32_t j = 0; j < latent; j++) value[j] = 0.0f;
        for (int64_t t = 0; t < keys; t++) {
            float share = score[t] / sum;
            for (int32_t j = 0; j < latent; j++) value[j] += share * row[t][j];
        }
    }
    dots(found, is->out, is->hidden, heads * latent, out);
}

/* h [rows, hidden] -> out [rows, hidden]: attention on the norm of h, and h itself with `add`.
 * Returns the first row that has no place in the cache, -1 if all have. */
EACH_WIDTH int64_t moemesh_few_latent(const few_latent *is, const latent_step *step, const float *h,
                                      int64_t rows, int32_t add, float *out) {
    int64_t hidden = is->hidden;
    for (int64_t i = 0; i < rows; i++, h += hidden, out += hidden) {
        if (step->at[i] < 0 || step->at[i] >= step->cache_rows) return i;
        attend_one(is, step, i, h, step->cache + step->at[i] * step->stride, out);
        if (add)
            for (int64_t j = 0; j < hidden; j++) out[j] += h[j];
    }
    return -1;
}
