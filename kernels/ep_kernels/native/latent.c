/* Multi-head latent attention of decoding sequences as one call: between its products there is so
 * little to do that asking for each step of it costs more than the step. The steps are the other
 * libraries' functions; this one says in which order they follow.
 *
 * The caller's face is ep_kernels/latent.py.
 */
#include "attend.h"
#include "grown.h"
#include "latent.h"
#include <string.h>

/* Rows that go through together: bounds what lies between the steps. */
enum { MOST_ROWS = 64 };

/* Of half.so, rows.so and attend.so; their sources say what each does. */
typedef struct {
    void (*linear)(const void *matrices, int64_t count, int64_t rows, const float *x, int64_t x_row,
                   int64_t x_step, float *y, int64_t y_row, int64_t y_step);
    void (*norm)(const float *x, int64_t stride, const float *weight, float epsilon, int32_t rows,
                 int32_t width, float *out);
    int32_t (*rows)(const void *latent, const float *x, int32_t rows, const float *query_turn,
                    const float *key_turn, const int64_t *at, float *cache, int64_t stride,
                    int64_t cache_rows, float *query);
    void (*turn)(float *x, const float *by, int32_t rows, int32_t heads, int32_t pairs);
    void (*attend)(crew share, attend_work *work, int64_t rows);
    crew share;
} steps;

typedef struct {
    const steps *by;
    const float *norm; /* [hidden] */
    const void *rows;  /* rows.c's latent_rows */
    /* half.c's: [source + latent + rotary, hidden]; [heads * query, source] or NULL, where source
     * are the queries; for each head [latent, nope] and [value, latent]; [hidden, heads * value]. */
    const void *first, *query, *key_up, *value_up, *out;
    float epsilon;
    int32_t hidden, source, heads, nope, latent, rotary, value;
} latent_layer;

/* For what lies between the steps. */
static float *memory_of(int64_t values) {
    static _Thread_local grown memory;
    return grow(&memory, (size_t)values * sizeof(float));
}

/* h [rows, hidden] -> out [rows, hidden]: attention on the norm of h, and h itself with `add`.
 * Returns the first row that has no place in the cache, -1 if all have. */
int64_t moemesh_latent(const latent_layer *is, const latent_step *step, const float *h,
                       int64_t rows, int32_t add, float *out) {
    const steps *by = is->by;
    int64_t hidden = is->hidden, query = is->nope + is->rotary, key = is->latent + is->rotary;
    int64_t first = is->source + key, queries = is->heads * query, keys = is->heads * key;
    int64_t latents = (int64_t)is->heads * is->latent, values = (int64_t)is->heads * is->value;
    int64_t most = rows < MOST_ROWS ? rows : MOST_ROWS;
    float *x = memory_of(most * (hidden + first + is->source + queries + keys + latents + values));
    float *made = x + most * hidden, *source = made + most * first;
    float *q = source + most * is->source, *absorbed = q + most * queries;
    float *seen = absorbed + most * keys, *expanded = seen + most * latents;
    for (int64_t begin = 0; begin < rows; begin += most, h += most * hidden, out += most * hidden) {
        int64_t n = rows - begin < most ? rows - begin : most;
        const float *query_turn = step->query_turn + begin * query;
        by->norm(h, hidden, is->norm, is->epsilon, (int32_t)n, is->hidden, x);
        by->linear(is->first, 1, n, x, hidden, 0, made, first, 0);
        int32_t bad = by->rows(is->rows, made, (int32_t)n, query_turn,
                               step->key_turn + begin * is->rotary, step->at + begin, step->cache,
                               step->stride, step->cache_rows, source);
        if (bad >= 0) return begin + bad;
        const float *heads = source;
        if (is->query) {
            by->linear(is->query, 1, n, source, is->source, 0, q, queries, 0);
            by->turn(q, query_turn, (int32_t)n, is->heads, (int32_t)(query / 2));
            heads = q;
        }
        by->linear(is->key_up, is->heads, n, heads, queries, query, absorbed, keys, key);
        for (int64_t head = 0; head < n * is->heads; head++)
            memcpy(absorbed + head * key + is->latent, heads + head * query + is->nope,
                   (size_t)is->rotary * sizeof *heads);
        attend_work work = {
            .shape = {.heads = 1, .shared = is->heads, .key_dim = key, .value_dim = is->latent,
                      .value_offset = 0, .q_row = keys, .stride = step->stride,
                      .block_size = step->block_size, .most_lanes = INT64_MAX},
            .q = absorbed, .cache = step->cache, .blocks = step->blocks,
            .offset = step->offset + begin, .skip = step->skip + begin, .keys = step->keys + begin,
            .out = seen};
        by->attend(by->share, &work, n);
        by->linear(is->value_up, is->heads, n, seen, latents, is->latent, expanded, values,
                   is->value);
        by->linear(is->out, 1, n, expanded, values, 0, out, hidden, 0);
        if (add)
            for (int64_t i = 0; i < n * hidden; i++) out[i] += h[i];
    }
    return -1;
}
