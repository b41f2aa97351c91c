/* What is done to one row. */
#ifndef MOEMESH_ROWS_H
#define MOEMESH_ROWS_H
#include <math.h>
#include <stdint.h>

enum { LANES = 16 }; /* partial sums, so that they become vector code */

/* x [width] times weight [width] over its root mean square -> out [width], which may be x. */
static inline __attribute__((always_inline)) void rms_norm_row(const float *x, const float *weight, float epsilon, int32_t width,
                                float *out) {
    float lane[LANES] = {0}, sum = 0.0f;
    int32_t i = 0;
    for (; i + LANES <= width; i += LANES)
        for (int32_t j = 0; j < LANES; j++) lane[j] += x[i + j] * x[i + j];
    for (; i < width; i++) sum += x[i] * x[i];
    for (int32_t j = 0; j < LANES; j++) sum += lane[j];
    float scale = 1.0f / sqrtf(sum / (float)width + epsilon);
    for (i = 0; i < width; i++) out[i] = x[i] * scale * weight[i];
}

/* Complex numbers x [pairs], each times that of `by` -> out, which may be x. */
static inline __attribute__((always_inline)) void turn(const float *x, const float *by, int32_t pairs, float *out) {
    for (int32_t i = 0; i < 2 * pairs; i += 2) {
        float re = x[i], im = x[i + 1];
        out[i] = re * by[i] - im * by[i + 1];
        out[i + 1] = re * by[i + 1] + im * by[i];
    }
}

#endif
