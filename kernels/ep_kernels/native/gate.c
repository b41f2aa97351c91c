/* From a gate's logits to each token's experts and weights; the caller's face, with a plain torch
 * reference, is ep_kernels/gating.py.
 */
#include "gate.h"

/* logits [rows, stride] -> experts and weights [rows, top_k]. */
void moemesh_gate(const Gate *g, const float *logits, int32_t rows, int32_t stride,
                  int32_t *experts, float *weights) {
    for (int32_t row = 0; row < rows; row++) {
        gate_row(g, logits, experts, weights);
        logits += stride;
        experts += g->top_k;
        weights += g->top_k;
    }
}
