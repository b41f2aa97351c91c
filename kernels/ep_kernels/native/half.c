/* Rows times a matrix of fp16 weights, in fp32; the caller's face is ep_kernels/half.py.
 *
 * A weight is read and widened once for up to MOST rows. A row's sums run over its values in one
 * order, whatever the number of rows, so its bits depend on nothing else.
 */
#include <stdint.h>
#include <string.h>

enum { NONE, AVX2, AVX512 };

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define INLINED static inline __attribute__((always_inline))
#define ON_AVX2 __attribute__((target("avx2,fma,f16c")))
#define ON_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma,f16c")))

enum { TALL = 4 };               /* weights' rows a tile */
enum { BLOCK_BYTES = 256 << 10 }; /* of weights that all rows go over while they are in cache */

typedef struct {
    const uint16_t *w; /* [out, in] */
    const float *x;    /* [rows, in] */
    float *y;          /* [rows, out] */
    int32_t in, out, rows;
} product;

/* Four sums of 8 or 16 partial ones, side by side. */
INLINED ON_AVX2 __m128 sums_8(__m256 a, __m256 b, __m256 c, __m256 d) {
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

INLINED ON_AVX512 __m256 fold_16(__m512 a) {
    __m512d high = _mm512_castps_pd(a);
    return _mm256_add_ps(_mm512_castps512_ps256(a),
                         _mm256_castpd_ps(_mm512_extractf64x4_pd(high, 1)));
}

INLINED ON_AVX512 __m128 sums_16(__m512 a, __m512 b, __m512 c, __m512 d) {
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(fold_16(a), fold_16(b)),
                              _mm256_hadd_ps(fold_16(c), fold_16(d)));
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

/* y [rows, high] for `high` of the weights' rows (up to TALL) and `rows` of x, both constants. What
 * is left of a row at its end is padded with zeros. */
#define TILE(NAME, ON, WIDE, VECTOR, ZERO, LOAD, WIDEN, FMA, SUMS)                                  \
    INLINED ON void NAME(const product *p, const uint16_t *w, const float *x, float *y,            \
                         const int high, const int rows) {                                         \
        const int64_t in = p->in;                                                                  \
        VECTOR sum[TALL][6], at[6];                                                                \
        for (int r = 0; r < TALL; r++)                                                             \
            for (int j = 0; j < rows; j++) sum[r][j] = ZERO();                                     \
        int64_t k = 0;                                                                             \
        for (; k + WIDE <= in; k += WIDE) {                                                        \
            for (int j = 0; j < rows; j++) at[j] = LOAD(x + j * in + k);                           \
            for (int r = 0; r < high; r++) {                                                       \
                VECTOR wide = WIDEN(w + r * in + k);                                               \
                for (int j = 0; j < rows; j++) sum[r][j] = FMA(wide, at[j], sum[r][j]);            \
            }                                                                                      \
        }                                                                                          \
        if (k < in) {                                                                              \
            float last[WIDE];                                                                      \
            uint16_t weight[WIDE];                                                                 \
            size_t left = (size_t)(in - k);                                                        \
            for (int j = 0; j < rows; j++) {                                                       \
                memset(last, 0, sizeof last);                                                      \
                memcpy(last, x + j * in + k, left * sizeof(float));                                \
                at[j] = LOAD(last);                                                                \
            }                                                                                      \
            for (int r = 0; r < high; r++) {                                                       \
                memset(weight, 0, sizeof weight);                                                  \
                memcpy(weight, w + r * in + k, left * sizeof(uint16_t));                           \
                VECTOR wide = WIDEN(weight);                                                       \
                for (int j = 0; j < rows; j++) sum[r][j] = FMA(wide, at[j], sum[r][j]);            \
            }                                                                                      \
        }                                                                                          \
        for (int j = 0; j < rows; j++) {                                                           \
            float four[4];                                                                         \
            _mm_storeu_ps(four, SUMS(sum[0][j], sum[1][j], sum[2][j], sum[3][j]));                 \
            memcpy(y + (int64_t)j * p->out, four, (size_t)high * sizeof(float));                   \
        }                                                                                          \
    }

#define WIDEN_8(w) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(w)))
#define WIDEN_16(w) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(w)))

TILE(tile_8, ON_AVX2, 8, __m256, _mm256_setzero_ps, _mm256_loadu_ps, WIDEN_8, _mm256_fmadd_ps, sums_8)
TILE(tile_16, ON_AVX512, 16, __m512, _mm512_setzero_ps, _mm512_loadu_ps, WIDEN_16, _mm512_fmadd_ps,
     sums_16)

/* Some rows of x over some of the weights: `rows` is a constant. */
#define STRIP(NAME, ON, TILE_OF)                                                                    \
    INLINED ON void NAME(const product *p, int32_t first, int32_t end, int32_t row,                \
                         const int rows) {                                                         \
        const float *x = p->x + (int64_t)row * p->in;                                              \
        float *y = p->y + (int64_t)row * p->out;                                                   \
        int32_t o = first;                                                                         \
        for (; o + TALL <= end; o += TALL)                                                         \
            TILE_OF(p, p->w + (int64_t)o * p->in, x, y + o, TALL, rows);                           \
        for (; o < end; o++) TILE_OF(p, p->w + (int64_t)o * p->in, x, y + o, 1, rows);             \
    }

STRIP(strip_8, ON_AVX2, tile_8)
STRIP(strip_16, ON_AVX512, tile_16)

/* All of it, a block of weights after the other; MOST rows of x at a time, evenly. */
#define WHOLE(NAME, ON, STRIP_OF, MOST, CASES)                                                      \
    ON static void NAME(const product *p, int32_t first, int32_t end) {                            \
        int32_t high = (int32_t)(BLOCK_BYTES / (2 * (int64_t)p->in + 1)) / TALL * TALL;            \
        if (high < TALL) high = TALL;                                                              \
        int32_t strips = (p->rows + MOST - 1) / MOST;                                              \
        for (int32_t o = first; o < end; o += high) {                                              \
            int32_t to = end - o < high ? end : o + high;                                          \
            for (int32_t s = 0; s < strips; s++) {                                                 \
                int32_t row = (int32_t)((int64_t)p->rows * s / strips);                            \
                int32_t next = (int32_t)((int64_t)p->rows * (s + 1) / strips);                     \
                switch (next - row) { CASES(STRIP_OF) }                                            \
            }                                                                                      \
        }                                                                                          \
    }

#define CASE(STRIP_OF, ROWS) \
    case ROWS: STRIP_OF(p, o, to, row, ROWS); break;
#define CASES_3(S) CASE(S, 1) CASE(S, 2) CASE(S, 3)
#define CASES_6(S) CASES_3(S) CASE(S, 4) CASE(S, 5) CASE(S, 6)

WHOLE(whole_8, ON_AVX2, strip_8, 3, CASES_3)
WHOLE(whole_16, ON_AVX512, strip_16, 6, CASES_6)

/* The widest kernel that this CPU has. */
int32_t moemesh_half_kernel(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c"))
        return NONE;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl")
               ? AVX512
               : AVX2;
}

/* x [rows, in] times w [out, in] of fp16, its rows `first` to `end` -> these columns of y [rows,
 * out]. `kernel` is one that this CPU has. */
void moemesh_half_linear(int32_t kernel, const uint16_t *w, const float *x, int32_t rows, int32_t in,
                         int32_t out, int32_t first, int32_t end, float *y) {
    const product p = {w, x, y, in, out, rows};
    if (kernel == AVX512)
        whole_16(&p, first, end);
    else
        whole_8(&p, first, end);
}

#else

int32_t moemesh_half_kernel(void) { return NONE; }

#endif
