/* Work on rows, each of which depends on itself alone. The caller's face is ep_kernels/rows.py.
 */
#include "rows.h"

/* x [rows, width], rows `stride` values apart, times weight [width] over its root mean square ->
 * out [rows, width]. */
void moemesh_rms_norm(const float *x, int64_t stride, const float *weight, float epsilon,
                      int32_t rows, int32_t width, float *out) {
    for (int32_t row = 0; row < rows; row++, x += stride, out += width)
        rms_norm_row(x, weight, epsilon, width, out);
}

/* x [rows, heads, pairs] complex numbers, in place times by [rows, pairs]. */
void moemesh_turn(float *x, const float *by, int32_t rows, int32_t heads, int32_t pairs) {
    for (int32_t row = 0; row < rows; row++, by += 2 * pairs)
        for (int32_t head = 0; head < heads; head++, x += 2 * pairs) turn(x, by, pairs, x);
}

typedef struct {
    const float *query_weight, *latent_weight; /* the first is NULL where queries have no latent */
    float epsilon;
    int32_t query, heads, latent, rotary; /* widths of a row's parts; heads of the first */
} latent_rows;

/* x [rows, query + latent + rotary] -> query [rows, query], normed or else each head turned by
 * query_turn [rows, query / heads / 2]; and into rows `at` of cache [cache_rows], `stride` values
 * apart, the normed latent and the rotary key turned by key_turn [rows, rotary / 2]. Returns the
 * first row that has no place in the cache, -1 if all have. */
int32_t moemesh_latent_rows(const latent_rows *is, const float *x, int32_t rows,
                            const float *query_turn, const float *key_turn, const int64_t *at,
                            float *cache, int64_t stride, int64_t cache_rows, float *query) {
    int32_t width = is->query + is->latent + is->rotary, head = is->query / is->heads;
    for (int32_t row = 0; row < rows; row++, x += width, query += is->query) {
        if (at[row] < 0 || at[row] >= cache_rows) return row;
        if (is->query_weight)
            rms_norm_row(x, is->query_weight, is->epsilon, is->query, query);
        else
            for (int32_t i = 0; i < is->query; i += head)
                turn(x + i, query_turn + (int64_t)row * head, head / 2, query + i);
        const float *latent = x + is->query;
        float *out = cache + at[row] * stride;
        rms_norm_row(latent, is->latent_weight, is->epsilon, is->latent, out);
        turn(latent + is->latent, key_turn + (int64_t)row * is->rotary, is->rotary / 2,
             out + is->latent);
    }
    return -1;
}
