/* Products with bf16 weights for fp32 rows, on CPUs with Intel's matrix unit (AMX).
 *
 * A value of a row is the sum of three bf16 numbers, which hold all of its 24 bits, and the unit
 * multiplies each by itself. Products of bf16 numbers are exact in fp32, and so the result is as near
 * as fp32 arithmetic comes. For few rows it gains nothing: there vectors multiply the same weights.
 *
 * A panel is 32 outputs as two tiles side by side: for each 32 inputs, first the one's [16 pairs of
 * inputs, 16 outputs, 2], then the other's.
 */
#ifndef MOEMESH_TILES_H
#define MOEMESH_TILES_H
#include <stdint.h>
#include <string.h>

enum { TILE_WIDTH = 32, TILE_INPUTS = 32, TILE_ROWS = 16, TILE_PARTS = 3 };
/* Up to so many rows vectors are as fast. */
enum { VECTOR_ROWS = 8 };

#if defined(__x86_64__) && defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#include "cpu.h"
#include <immintrin.h>
#include <sys/syscall.h>

long syscall(long number, ...);

#define OF_TILES __attribute__((target("amx-tile,amx-bf16,avx512f")))

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

/* Whether this CPU has tiles of bf16 and the kernel lets this process use them: it must ask. */
static int tiles_run(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    static int known; /* 1: no, 2: yes; written with the same value by whoever asks first */
    if (!__atomic_load_n(&known, __ATOMIC_RELAXED)) {
        int yes = cpu_has_tiles() && !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
        __atomic_store_n(&known, 1 + yes, __ATOMIC_RELAXED);
    }
    return known == 2;
}

/* The nearest bf16 to each value, as fp32. */
OF_TILES static inline __m512i nearest_bf16(__m512 x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_and_si512(bits, _mm512_set1_epi32((int)0xffff0000));
}

/* x [rows, inputs], rows `stride` values apart -> parts [TILE_PARTS][rows][padded], the rest 0. */
OF_TILES static void tile_rows(const float *x, int64_t stride, int64_t rows, int64_t inputs,
                               int64_t padded, uint16_t *parts) {
    for (int64_t r = 0; r < rows; r++, x += stride)
        for (int64_t k = 0; k < padded; k += 16) {
            int64_t there = inputs - k;
            __mmask16 mask = there >= 16 ? 0xffff : there <= 0 ? 0 : (__mmask16)((1 << there) - 1);
            __m512 left = _mm512_maskz_loadu_ps(mask, x + k);
            for (int64_t part = 0; part < TILE_PARTS; part++) {
                __m512i near = nearest_bf16(left);
                _mm256_storeu_si256((__m256i *)(parts + (part * rows + r) * padded + k),
                                    _mm512_cvtepi32_epi16(_mm512_srli_epi32(near, 16)));
                left = _mm512_sub_ps(left, _mm512_castsi512_ps(near));
            }
        }
}

/* Panels `from` to `to` of w times `rows` rows in parts -> y, rows y_row values apart. */
OF_TILES static void tile_panels(const uint16_t *w, int64_t outputs, int64_t padded, int64_t from,
                                 int64_t to, const uint16_t *parts, int64_t rows, float *y,
                                 int64_t y_row) {
    _Alignas(64) float edge[TILE_ROWS * TILE_WIDTH];
    for (int64_t low = 0; low < rows; low += TILE_ROWS) {
        int64_t n = rows - low < TILE_ROWS ? rows - low : TILE_ROWS;
        tile_config shape = {.palette = 1};
        for (int i = 0; i < 5; i++) shape.row_bytes[i] = 64, shape.rows[i] = (uint8_t)n;
        shape.rows[2] = shape.rows[3] = TILE_INPUTS / 2; /* weights; 0 and 1 are sums, 4 is rows */
        _tile_loadconfig(&shape);
        for (int64_t panel = from; panel < to; panel++) {
            const uint16_t *weights = w + panel * padded * TILE_WIDTH;
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t k = 0; k < padded; k += TILE_INPUTS, weights += TILE_INPUTS * TILE_WIDTH) {
                for (int64_t line = 0; line < TILE_INPUTS; line++)
                    _mm_prefetch((const char *)weights + 4096 + 64 * line, _MM_HINT_T0);
                _tile_loadd(2, weights, 64);
                _tile_loadd(3, weights + TILE_INPUTS * TILE_WIDTH / 2, 64);
                for (int64_t part = 0; part < TILE_PARTS; part++) {
                    _tile_loadd(4, parts + (part * rows + low) * padded + k, (int)(2 * padded));
                    _tile_dpbf16ps(0, 4, 2);
                    _tile_dpbf16ps(1, 4, 3);
                }
            }
            int64_t first = panel * TILE_WIDTH, there = outputs - first;
            float *into = y + low * y_row + first;
            if (there >= TILE_WIDTH) {
                _tile_stored(0, into, (int)(4 * y_row));
                _tile_stored(1, into + 16, (int)(4 * y_row));
                continue;
            }
            _tile_stored(0, edge, 4 * TILE_WIDTH);
            _tile_stored(1, edge + 16, 4 * TILE_WIDTH);
            for (int64_t r = 0; r < n; r++)
                memcpy(into + r * y_row, edge + r * TILE_WIDTH, (size_t)there * sizeof *edge);
        }
    }
    _tile_release();
}

/* 16 outputs by two inputs, at `line`: even inputs in the lower halves. */
#define PAIR(ROWS, line, sums)                                                                     \
    do {                                                                                           \
        __m512i both = _mm512_loadu_si512(line);                                                   \
        __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));                            \
        __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(both, high));                            \
        _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++) {                                   \
            sums[r] = _mm512_fmadd_ps(_mm512_set1_ps(x[r * x_row + k]), even, sums[r]);            \
            float next = k + 1 < inputs ? x[r * x_row + k + 1] : 0.0f;                             \
            sums[r] = _mm512_fmadd_ps(_mm512_set1_ps(next), odd, sums[r]);                         \
        }                                                                                          \
    } while (0)

/* One panel by a constant number of rows. */
#define VECTOR_SUMS(ROWS)                                                                          \
    OF_TILES static void vector_sums_##ROWS(const uint16_t *w, int64_t inputs, const float *x,     \
                                            int64_t x_row, float *y, int64_t y_row) {              \
        const __m512i high = _mm512_set1_epi32((int)0xffff0000);                                   \
        __m512 left[ROWS], right[ROWS];                                                            \
        _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++) left[r] = right[r] =                \
            _mm512_setzero_ps();                                                                   \
        for (int64_t first = 0; first < inputs; first += TILE_INPUTS) {                            \
            int64_t end = first + TILE_INPUTS < inputs ? first + TILE_INPUTS : inputs;             \
            for (int64_t k = first; k < end; k += 2, w += 32) {                                    \
                _mm_prefetch((const char *)w + 4096, _MM_HINT_T0);                                 \
                _mm_prefetch((const char *)w + 4096 + TILE_INPUTS * TILE_WIDTH, _MM_HINT_T0);      \
                PAIR(ROWS, w, left);                                                               \
                PAIR(ROWS, w + TILE_INPUTS * TILE_WIDTH / 2, right);                               \
            }                                                                                      \
            w += TILE_INPUTS * TILE_WIDTH / 2;                                                     \
        }                                                                                          \
        for (int r = 0; r < ROWS; r++) {                                                           \
            _mm512_storeu_ps(y + r * y_row, left[r]);                                              \
            _mm512_storeu_ps(y + r * y_row + 16, right[r]);                                        \
        }                                                                                          \
    }

VECTOR_SUMS(1)
VECTOR_SUMS(2)
VECTOR_SUMS(3)
VECTOR_SUMS(4)
VECTOR_SUMS(5)
VECTOR_SUMS(6)
VECTOR_SUMS(7)
VECTOR_SUMS(8)

/* The same as `tile_panels` for up to VECTOR_ROWS rows as they are. */
static void vector_panels(const uint16_t *w, int64_t outputs, int64_t inputs, int64_t padded,
                          int64_t from, int64_t to, const float *x, int64_t x_row, int64_t rows,
                          float *y, int64_t y_row) {
    static void (*const of[VECTOR_ROWS + 1])(const uint16_t *, int64_t, const float *, int64_t,
                                             float *, int64_t) = {
        0, vector_sums_1, vector_sums_2, vector_sums_3, vector_sums_4,
        vector_sums_5, vector_sums_6, vector_sums_7, vector_sums_8};
    float edge[VECTOR_ROWS * TILE_WIDTH];
    for (int64_t panel = from; panel < to; panel++) {
        const uint16_t *weights = w + panel * padded * TILE_WIDTH;
        int64_t first = panel * TILE_WIDTH, there = outputs - first;
        if (there >= TILE_WIDTH) {
            of[rows](weights, inputs, x, x_row, y + first, y_row);
            continue;
        }
        of[rows](weights, inputs, x, x_row, edge, TILE_WIDTH);
        for (int64_t r = 0; r < rows; r++)
            memcpy(y + first + r * y_row, edge + r * TILE_WIDTH, (size_t)there * sizeof *edge);
    }
}

#else

static int tiles_run(void) { return 0; }

static void tile_rows(const float *x, int64_t stride, int64_t rows, int64_t inputs, int64_t padded,
                      uint16_t *parts) {
    (void)x, (void)stride, (void)rows, (void)inputs, (void)padded, (void)parts;
}

static void tile_panels(const uint16_t *w, int64_t outputs, int64_t padded, int64_t from,
                        int64_t to, const uint16_t *parts, int64_t rows, float *y, int64_t y_row) {
    (void)w, (void)outputs, (void)padded, (void)from, (void)to, (void)parts, (void)rows;
    (void)y, (void)y_row;
}

static void vector_panels(const uint16_t *w, int64_t outputs, int64_t inputs, int64_t padded,
                          int64_t from, int64_t to, const float *x, int64_t x_row, int64_t rows,
                          float *y, int64_t y_row) {
    (void)w, (void)outputs, (void)inputs, (void)padded, (void)from, (void)to, (void)x, (void)x_row;
    (void)rows, (void)y, (void)y_row;
}

#endif

/* Where a weight lies in its panel. */
static inline int64_t tile_place(int64_t output, int64_t input) {
    return input / TILE_INPUTS * TILE_INPUTS * TILE_WIDTH + output / 16 * TILE_INPUTS * 16 +
           input % TILE_INPUTS / 2 * 32 + output % 16 * 2 + input % 2;
}

#endif
