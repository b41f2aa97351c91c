/* RMS norm of rows, each of which depends on itself alone. The caller's face is ep_kernels/rows.py.
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
