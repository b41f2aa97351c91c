/* Work on rows, each of which depends on itself alone. The caller's face is ep_kernels/rows.py.
 */
#include <math.h>
#include <stdint.h>

enum { LANES = 16 }; /* partial sums, so that they become vector code */

/* x [rows, width], rows `stride` values apart, times weight [width] over its root mean square ->
 * out [rows, width]. */
void moemesh_rms_norm(const float *x, int64_t stride, const float *weight, float epsilon,
                      int32_t rows, int32_t width, float *out) {
    for (int32_t row = 0; row < rows; row++, x += stride, out += width) {
        float lane[LANES] = {0}, sum = 0.0f;
        int32_t i = 0;
        for (; i + LANES <= width; i += LANES)
            for (int32_t j = 0; j < LANES; j++) lane[j] += x[i + j] * x[i + j];
        for (; i < width; i++) sum += x[i] * x[i];
        for (int32_t j = 0; j < LANES; j++) sum += lane[j];
        float scale = 1.0f / sqrtf(sum / (float)width + epsilon);
        for (i = 0; i < width; i++) out[i] = x[i] * scale * weight[i];
    }
}

/* Complex numbers x [pairs], each times that of `by` -> out, which may be x. */
static void turn(const float *x, const float *by, int32_t pairs, float *out) {
    for (int32_t i = 0; i < 2 * pairs; i += 2) {
        float re = x[i], im = x[i + 1];
        out[i] = re * by[i] - im * by[i + 1];
        out[i + 1] = re * by[i + 1] + im * by[i];
    }
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
            moemesh_rms_norm(x, 0, is->query_weight, is->epsilon, 1, is->query, query);
        else
            for (int32_t i = 0; i < is->query; i += head)
                turn(x + i, query_turn + (int64_t)row * head, head / 2, query + i);
        const float *latent = x + is->query;
        float *out = cache + at[row] * stride;
        moemesh_rms_norm(latent, 0, is->latent_weight, is->epsilon, 1, is->latent, out);
        turn(latent + is->latent, key_turn + (int64_t)row * is->rotary, is->rotary / 2,
             out + is->latent);
    }
    return -1;
}
