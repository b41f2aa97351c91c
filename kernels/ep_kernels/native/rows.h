/* What is done to one row. */
#ifndef MOEMESH_ROWS_H
#define MOEMESH_ROWS_H
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINED static inline __attribute__((always_inline))

/* One version for each width of vectors, chosen as the library is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__)
#define EACH_WIDTH __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EACH_WIDTH
#endif

enum { LANES = 16 }; /* partial sums, so that they become vector code */

INLINED float sum_of(float lane[LANES]) {
    for (int32_t width = LANES / 2; width > 0; width /= 2)
        for (int32_t j = 0; j < width; j++) lane[j] += lane[j + width];
    return lane[0];
}

/* e^x to within 2 ulp: x = n ln 2 + r, |r| <= ln 2 / 2, and Taylor's series in r. Beyond +-87 it
 * stays where it is there; NaN stays NaN. No branch, so that loops of it become vector code. */
INLINED float exp_of(float x) {
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer below */
    x = x > 87.0f ? 87.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float shifted = x * 1.44269504f + round, n = shifted - round, power;
    float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + 0x3f800000u; /* 2^n */
    memcpy(&power, &bits, sizeof bits);
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    return power * (p * r * r + r + 1.0f);
}

/* x [width] times weight [width] over its root mean square -> out [width], which may be x. */
INLINED void rms_norm_row(const float *x, const float *weight, float epsilon, int32_t width,
                          float *out) {
    float lane[LANES] = {0}, sum = 0.0f;
    int32_t i = 0;
    for (; i + LANES <= width; i += LANES)
        for (int32_t j = 0; j < LANES; j++) lane[j] += x[i + j] * x[i + j];
    for (; i < width; i++) sum += x[i] * x[i];
    sum += sum_of(lane);
    float scale = 1.0f / sqrtf(sum / (float)width + epsilon);
    for (i = 0; i < width; i++) out[i] = x[i] * scale * weight[i];
}

/* Complex numbers x [pairs], each times that of `by` -> out, which may be x. */
INLINED void turn(const float *x, const float *by, int32_t pairs, float *out) {
    for (int32_t i = 0; i < 2 * pairs; i += 2) {
        float re = x[i], im = x[i + 1];
        out[i] = re * by[i] - im * by[i + 1];
        out[i + 1] = re * by[i + 1] + im * by[i];
    }
}

#endif
