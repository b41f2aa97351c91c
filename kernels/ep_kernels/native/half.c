/* Products with 16-bit weights in fp32: y [rows, out] = x [rows, in] times w [out, in] transposed.
 * bf16 weights: see tiles.h. The rest is of fp16.
 *
 * Weights lie in panels of as many outputs as two vectors hold; within one, input by input. So one
 * read of a panel serves up to a block of rows, whose sums stay in registers. Each sum is one chain
 * of fused multiply-adds over the inputs in order: its bits depend on its row and its output alone,
 * not on the other rows, the width of vectors or the number of threads.
 *
 * The caller's face is ep_kernels/half.py.
 */
#include "crew.h"
#include "grown.h"
#include "rows.h"
#include "tiles.h"

/* Weights of a piece of work for one of several threads: some 5 us of reading. */
enum { PIECE_BYTES = 1 << 16 };
/* With many rows: what stays in a core's second cache while they pass. */
enum { GROUP_BYTES = 1 << 18, FEW_ROWS = 12 };

/* With tiles: rows that are split into parts at a time. */
enum { PARTS_ROWS = 128 };

/* Weights, packed; what a panel lacks is zeros. */
typedef struct {
    int64_t outputs, inputs, width;
    int64_t tiles;          /* whether they are bf16 in tiles */
    const uint16_t *packed; /* [panels, inputs, width], or as tiles.h says */
} half_matrix;

/* Where rows lie: each x_row and y_row values after the one before; and within a row, what each of
 * several matrices takes and gives, x_step and y_step after that of the one before. */
typedef struct {
    const float *x;
    int64_t x_row, x_step;
    float *y;
    int64_t y_row, y_step;
    int64_t count;
} half_rows;

#if defined(__x86_64__)
#include "cpu.h"
#include <immintrin.h>

/* Hardware fetches ahead within a page of 4 KiB only; a stream of weights wants more. What few rows
 * pass by is not asked for again soon: it need not drive anything out of the second cache. */
enum { AHEAD = 4096, PASSING_ROWS = 6 };
#define FETCH(ROWS, at)                                                                            \
    _mm_prefetch((const char *)(at), (ROWS) <= PASSING_ROWS ? _MM_HINT_NTA : _MM_HINT_T0)
/* Rows of x that are taken through all panels at a time stay in a core's second cache. */
enum { X_BYTES = 1 << 20 };
enum { WIDEST = 32, MOST_ROWS = 12 };

/* Unrolled, so that an array of sums is an array of registers. */
#define EACH_ROW(ROWS) _Pragma("GCC unroll 12") for (int r = 0; r < ROWS; r++)

/* Rows of x, a panel and where its sums go, each row `x_stride` and `y_stride` values on. */
#define PANEL const float *x, int64_t x_stride, const uint16_t *w, int64_t inputs, float *y, int64_t y_stride

#define OF_AVX512 __attribute__((target("avx512f")))
#define SUMS_AVX512(ROWS)                                                                          \
    OF_AVX512 static void sums_avx512_##ROWS(PANEL) {                                              \
        __m512 low[ROWS], high[ROWS];                                                              \
        EACH_ROW(ROWS) low[r] = high[r] = _mm512_setzero_ps();                                     \
        for (int64_t k = 0; k < inputs; k++, w += 32) {                                            \
            FETCH(ROWS, (const char *)w + AHEAD);                                                  \
            __m512 a = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)w));                    \
            __m512 b = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(w + 16)));             \
            EACH_ROW(ROWS) {                                                                       \
                __m512 value = _mm512_set1_ps(x[r * x_stride + k]);                                \
                low[r] = _mm512_fmadd_ps(value, a, low[r]);                                        \
                high[r] = _mm512_fmadd_ps(value, b, high[r]);                                      \
            }                                                                                      \
        }                                                                                          \
        EACH_ROW(ROWS) {                                                                           \
            _mm512_storeu_ps(y + r * y_stride, low[r]);                                            \
            _mm512_storeu_ps(y + r * y_stride + 16, high[r]);                                      \
        }                                                                                          \
    }

#define OF_AVX2 __attribute__((target("avx2,fma,f16c")))
#define SUMS_AVX2(ROWS)                                                                            \
    OF_AVX2 static void sums_avx2_##ROWS(PANEL) {                                                  \
        __m256 low[ROWS], high[ROWS];                                                              \
        EACH_ROW(ROWS) low[r] = high[r] = _mm256_setzero_ps();                                     \
        for (int64_t k = 0; k < inputs; k++, w += 16) {                                            \
            FETCH(ROWS, (const char *)w + AHEAD);                                                  \
            __m256 a = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)w));                       \
            __m256 b = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(w + 8)));                 \
            EACH_ROW(ROWS) {                                                                       \
                __m256 value = _mm256_set1_ps(x[r * x_stride + k]);                                \
                low[r] = _mm256_fmadd_ps(value, a, low[r]);                                        \
                high[r] = _mm256_fmadd_ps(value, b, high[r]);                                      \
            }                                                                                      \
        }                                                                                          \
        EACH_ROW(ROWS) {                                                                           \
            _mm256_storeu_ps(y + r * y_stride, low[r]);                                            \
            _mm256_storeu_ps(y + r * y_stride + 8, high[r]);                                       \
        }                                                                                          \
    }

/* Of two panels, one behind the other: twice as many chains of sums, which with few rows wait for
 * their own last addition. Each input of both is half a line; what is fetched ahead of their ends is
 * the next two's. */
#define TWO_INPUT(ROWS, k)                                                                         \
    _Pragma("GCC unroll 4") for (int v = 0; v < 4; v++) {                                          \
        const uint16_t *at = w + v / 2 * panel + 16 * (k) + v % 2 * 8;                             \
        __m256 part = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));                       \
        EACH_ROW(ROWS)                                                                             \
        sum[r][v] = _mm256_fmadd_ps(_mm256_set1_ps(x[r * x_stride + (k)]), part, sum[r][v]);       \
    }
#define TWO_SUMS_AVX2(ROWS)                                                                        \
    OF_AVX2 static void two_sums_avx2_##ROWS(PANEL) {                                              \
        __m256 sum[ROWS][4];                                                                       \
        EACH_ROW(ROWS) sum[r][0] = sum[r][1] = sum[r][2] = sum[r][3] = _mm256_setzero_ps();        \
        const int64_t panel = 16 * inputs, turn = inputs - AHEAD / 32;                             \
        int64_t k = 0;                                                                             \
        for (; k + 1 < inputs; k += 2) {                                                           \
            const uint16_t *ahead = w + 16 * k + AHEAD / 2 + (k < turn ? 0 : panel);               \
            FETCH(ROWS, ahead);                                                                    \
            FETCH(ROWS, ahead + panel);                                                            \
            TWO_INPUT(ROWS, k)                                                                     \
            TWO_INPUT(ROWS, k + 1)                                                                 \
        }                                                                                          \
        if (k < inputs) TWO_INPUT(ROWS, k)                                                         \
        EACH_ROW(ROWS) _Pragma("GCC unroll 4") for (int v = 0; v < 4; v++)                         \
            _mm256_storeu_ps(y + r * y_stride + v * 8, sum[r][v]);                                 \
    }

#define UP_TO_6(SUMS) SUMS(1) SUMS(2) SUMS(3) SUMS(4) SUMS(5) SUMS(6)
UP_TO_6(SUMS_AVX2)
TWO_SUMS_AVX2(1)
TWO_SUMS_AVX2(2)
TWO_SUMS_AVX2(3)
UP_TO_6(SUMS_AVX512)
SUMS_AVX512(7)
SUMS_AVX512(8)
SUMS_AVX512(9)
SUMS_AVX512(10)
SUMS_AVX512(11)
SUMS_AVX512(12)

typedef void (*sums)(PANEL);

static const struct kernel {
    int64_t width, most_rows;
    sums of[MOST_ROWS + 1], two[MOST_ROWS + 1]; /* of a panel, and of two at once */
} avx512 = {32, 12, {0, sums_avx512_1, sums_avx512_2, sums_avx512_3, sums_avx512_4, sums_avx512_5,
                     sums_avx512_6, sums_avx512_7, sums_avx512_8, sums_avx512_9, sums_avx512_10,
                     sums_avx512_11, sums_avx512_12}, {0}},
  avx2 = {16, 6, {0, sums_avx2_1, sums_avx2_2, sums_avx2_3, sums_avx2_4, sums_avx2_5, sums_avx2_6},
          {0, two_sums_avx2_1, two_sums_avx2_2, two_sums_avx2_3}};

static int runs(const struct kernel *is) {
    return is == &avx512 ? cpu_has_avx512() : cpu_has_avx2();
}

/* Panels `from` to `to` of one matrix, which fit a core's second cache if there are many rows. */
static void multiply(const half_matrix *is, int64_t from, int64_t to, const half_rows *rows,
                     int64_t place) {
    const struct kernel *with = is->width == avx512.width ? &avx512 : &avx2;
    int64_t width = is->width, inputs = is->inputs, most = with->most_rows;
    int64_t chunk = X_BYTES / (4 * (inputs + 1));
    if (chunk < most) chunk = most;
    float edge[MOST_ROWS * WIDEST];
    for (int64_t begin = 0; begin < rows->count; begin += chunk) {
        int64_t count = rows->count - begin < chunk ? rows->count - begin : chunk;
        int64_t blocks = (count + most - 1) / most;
        for (int64_t block = 0; block < blocks; block++) {
            /* Blocks as even as can be. */
            int64_t low = begin + count * block / blocks;
            int64_t n = begin + count * (block + 1) / blocks - low;
            const float *x = rows->x + low * rows->x_row + place * rows->x_step;
            float *y = rows->y + low * rows->y_row + place * rows->y_step;
            for (int64_t panel = from; panel < to; panel++) {
                const uint16_t *w = is->packed + panel * inputs * width;
                int64_t first = panel * width, there = is->outputs - first;
                if (with->two[n] && panel + 1 < to && there >= 2 * width) {
                    with->two[n](x, rows->x_row, w, inputs, y + first, rows->y_row);
                    panel++;
                    continue;
                }
                if (there >= width) {
                    with->of[n](x, rows->x_row, w, inputs, y + first, rows->y_row);
                    continue;
                }
                with->of[n](x, rows->x_row, w, inputs, edge, width);
                for (int64_t r = 0; r < n; r++)
                    memcpy(y + first + r * rows->y_row, edge + r * width,
                           (size_t)there * sizeof *edge);
            }
        }
    }
}

int64_t moemesh_half_width(int64_t most) {
    if (most >= avx512.width && runs(&avx512)) return avx512.width;
    return most >= avx2.width && runs(&avx2) ? avx2.width : 0;
}

#else

static void multiply(const half_matrix *is, int64_t from, int64_t to, const half_rows *rows,
                     int64_t place) {
    (void)is, (void)from, (void)to, (void)rows, (void)place;
}

/* Outputs of the widest panel, up to `most`, that this CPU has a kernel for; 0 if none. */
int64_t moemesh_half_width(int64_t most) {
    (void)most;
    return 0;
}

#endif

int64_t moemesh_tiles_run(void) { return tiles_run(); }

/* Inputs of a panel. */
static int64_t depth(const half_matrix *is) {
    if (!is->tiles) return is->inputs;
    return (is->inputs + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS;
}

static int64_t place(const half_matrix *is, int64_t output, int64_t input) {
    int64_t panel = output / is->width * depth(is) * is->width;
    output %= is->width;
    return panel + (is->tiles ? tile_place(output, input) : input * is->width + output);
}

/* Weights of all panels. */
int64_t moemesh_half_size(const half_matrix *is) {
    return (is->outputs + is->width - 1) / is->width * is->width * depth(is);
}

/* values [outputs, inputs] -> is->packed, which is zeros. */
void moemesh_half_pack(const half_matrix *is, const uint16_t *values, uint16_t *packed) {
    for (int64_t out = 0; out < is->outputs; out++)
        for (int64_t in = 0; in < is->inputs; in++) packed[place(is, out, in)] = *values++;
}

/* And back. */
void moemesh_half_unpack(const half_matrix *is, uint16_t *values) {
    for (int64_t out = 0; out < is->outputs; out++)
        for (int64_t in = 0; in < is->inputs; in++) *values++ = is->packed[place(is, out, in)];
}

/* Pieces of the products of several matrices of one shape: as many panels as are worth handing to
 * another thread. */
typedef struct {
    const half_matrix *matrices;
    const half_rows *rows;
    const uint16_t *parts; /* of the rows, for tiles: [matrices][TILE_PARTS][rows][depth] */
    int64_t panels, at_once, pieces_each;
} half_work;

static void do_piece(void *of, int64_t piece) {
    const half_work *is = of;
    const half_rows *rows = is->rows;
    int64_t which = piece / is->pieces_each, from = piece % is->pieces_each * is->at_once;
    int64_t to = from + is->at_once < is->panels ? from + is->at_once : is->panels;
    const half_matrix *by = is->matrices + which;
    if (!by->tiles) {
        multiply(by, from, to, rows, which);
        return;
    }
    if (!rows->count) return;
    if (!is->parts) {
        vector_panels(by->packed, by->outputs, by->inputs, depth(by), from, to,
                      rows->x + which * rows->x_step, rows->x_row, rows->count,
                      rows->y + which * rows->y_step, rows->y_row);
        return;
    }
    const uint16_t *parts = is->parts + which * TILE_PARTS * rows->count * depth(by);
    tile_panels(by->packed, by->outputs, depth(by), from, to, parts, rows->count,
                rows->y + which * rows->y_step, rows->y_row);
}

/* For the parts of rows. */
static uint16_t *parts_memory(int64_t values) {
    static _Thread_local grown memory;
    return grow(&memory, (size_t)values * sizeof(uint16_t));
}

/* For an FFN's rows and order. */
static float *scratch_memory(int64_t values) {
    static _Thread_local grown memory;
    return grow(&memory, (size_t)values * sizeof(float));
}

/* What each of `count` matrices of one shape makes of its part of every row. */
static void products(const half_matrix *matrices, int64_t count, int64_t rows, const float *x,
                     int64_t x_row, int64_t x_step, float *y, int64_t y_row, int64_t y_step) {
    half_rows at = {x, x_row, x_step, y, y_row, y_step, rows};
    half_work work = {.matrices = matrices, .rows = &at};
    int64_t bytes = rows > FEW_ROWS ? GROUP_BYTES : PIECE_BYTES, inputs = depth(matrices);
    work.panels = (matrices->outputs + matrices->width - 1) / matrices->width;
    work.at_once = (bytes / (2 * matrices->width * (inputs + 1)) / 2 + 1) * 2; /* panels in pairs */
    work.pieces_each = (work.panels + work.at_once - 1) / work.at_once;
    if (!matrices->tiles || rows <= VECTOR_ROWS) {
        crew_do(do_piece, &work, count * work.pieces_each);
        return;
    }
    for (int64_t begin = 0; begin < rows; begin += PARTS_ROWS) {
        at.count = rows - begin < PARTS_ROWS ? rows - begin : PARTS_ROWS;
        at.y = y + begin * y_row;
        int64_t each = TILE_PARTS * at.count * inputs;
        uint16_t *parts = parts_memory(count * each);
        for (int64_t i = 0; i < count; i++)
            tile_rows(x + begin * x_row + i * x_step, x_row, at.count, matrices->inputs, inputs,
                      parts + i * each);
        work.parts = parts;
        crew_do(do_piece, &work, count * work.pieces_each);
    }
}

void moemesh_half_linear(const half_matrix *matrices, int64_t count, int64_t rows, const float *x,
                         int64_t x_row, int64_t x_step, float *y, int64_t y_row, int64_t y_step) {
    products(matrices, count, rows, x, x_row, x_step, y, y_row, y_step);
}

/* For work of other libraries. */
void moemesh_crew_do(crew_piece piece, void *work, int64_t pieces) { crew_do(piece, work, pieces); }

/* A SwiGLU FFN: gate_up [2 inner, hidden], gate first, and down [hidden, inner]. NULL: none. */
typedef struct {
    const half_matrix *gate_up, *down;
} half_expert;

/* x [rows, 2 inner]: the first halves become silu of themselves times the second. */
EACH_WIDTH static void activate(float *x, int64_t rows, int64_t inner) {
    for (int64_t r = 0; r < rows; r++, x += 2 * inner)
        for (int64_t j = 0; j < inner; j++) x[j] *= x[inner + j] / (1.0f + exp_of(-x[j]));
}

/* x [rows, hidden] -> out [rows, hidden]. Scratch: [rows, 2 inner]. */
static void run_expert(const half_expert *is, const float *x, int64_t rows, float *scratch,
                       float *out) {
    int64_t hidden = is->gate_up->inputs, inner = is->down->inputs;
    products(is->gate_up, 1, rows, x, hidden, 0, scratch, 2 * inner, 0);
    activate(scratch, rows, inner);
    products(is->down, 1, rows, scratch, 2 * inner, 0, out, hidden, 0);
}

/* Rows that pass through an expert together: beyond it they gain nothing, and take memory. */
enum { MOST_PASSING = 128 };

/* One expert for x [rows, hidden] -> out [rows, hidden]. */
void moemesh_half_expert(const half_expert *is, const float *x, int64_t rows, float *out) {
    int64_t hidden = is->gate_up->inputs, most = rows < MOST_PASSING ? rows : MOST_PASSING;
    float *scratch = scratch_memory(most * 2 * is->down->inputs);
    for (int64_t at = 0; at < rows; at += most)
        run_expert(is, x + at * hidden, rows - at < most ? rows - at : most, scratch,
                   out + at * hidden);
}

EACH_WIDTH static void add_weighted(const float *row, float weight, int64_t width, float *out) {
    for (int64_t i = 0; i < width; i++) out[i] += weight * row[i];
}

/* Experts in slots, of one size. */
typedef struct {
    const half_expert *experts;
    int64_t slots, hidden, inner;
} half_bank;

/* The FFN of each pair's token x [tokens, hidden] by the expert in its slot. With weights: their
 * weighted sum by token -> out [tokens, hidden], added up in the order of slots; without: each
 * pair's own row -> out [pairs, hidden]. Returns the first pair whose slot is empty or not there, -1
 * if none. */
int64_t moemesh_half_ffn(const half_bank *is, const float *x, int64_t tokens, const int32_t *token,
                         const int32_t *slot, const float *weight, int64_t pairs, float *out) {
    int64_t hidden = is->hidden, slots = is->slots;
    int64_t most_rows = pairs < MOST_PASSING ? pairs : MOST_PASSING;
    float *given = scratch_memory(most_rows * 2 * (hidden + is->inner) + slots + pairs);
    float *made = given + most_rows * hidden, *within = made + most_rows * hidden;
    int32_t *order = (int32_t *)(within + most_rows * 2 * is->inner);
    int32_t *end = order + pairs; /* [slots] */
    memset(end, 0, (size_t)slots * sizeof *end);
    for (int64_t p = 0; p < pairs; p++) {
        if (slot[p] < 0 || slot[p] >= slots || !is->experts[slot[p]].gate_up) return p;
        end[slot[p]]++;
    }
    for (int64_t s = 1; s < slots; s++) end[s] += end[s - 1];
    for (int64_t p = pairs; p-- > 0;) order[--end[slot[p]]] = (int32_t)p;
    if (weight) memset(out, 0, (size_t)(tokens * hidden) * sizeof *out);

    for (int64_t at = 0, rows; at < pairs; at += rows) {
        int32_t in = slot[order[at]];
        for (rows = 1; rows < most_rows && at + rows < pairs && slot[order[at + rows]] == in;) rows++;
        const float *from = x + token[order[at]] * hidden;
        if (rows > 1) {
            for (int64_t r = 0; r < rows; r++)
                memcpy(given + r * hidden, x + token[order[at + r]] * hidden,
                       (size_t)hidden * sizeof *x);
            from = given;
        }
        run_expert(is->experts + in, from, rows, within, made);
        for (int64_t r = 0; r < rows; r++) {
            int32_t p = order[at + r];
            if (weight)
                add_weighted(made + r * hidden, weight[p], hidden, out + token[p] * hidden);
            else
                memcpy(out + p * hidden, made + r * hidden, (size_t)hidden * sizeof *out);
        }
    }
    return -1;
}
