/* Softmax attention of single tokens of many sequences over the paged cache, read where it lies. Each
 * piece of a block is read once for all queries of a key head: scores, then values, with the softmax
 * put right as larger scores come (arXiv 1805.02867). A row depends on itself alone.
 *
 * The caller's face is ep_kernels/attend.py.
 */
#include "rows.h"

typedef struct {
    int64_t heads, shared; /* key heads, and queries of each */
    int64_t key_dim, value_dim, value_offset;
    int64_t q_row;              /* values from one row's queries to the next one's */
    int64_t stride, block_size; /* values a cache row, rows a block */
    int64_t most_lanes;         /* values that a vector may hold */
} attend_shape;

typedef struct {
    attend_shape shape;
    const float *q;        /* [rows, heads, shared, key_dim], scaled */
    const float *cache;    /* [rows of the cache, stride] */
    const int64_t *blocks; /* of row r from offset[r] on */
    const int64_t *offset, *skip, *keys; /* [rows]; skip: rows of its first block that it does not see */
    float *out;            /* [rows, heads, shared, value_dim] */
    int64_t lanes;         /* values that a vector holds: set here */
} attend_work;

enum { KEYS_AT_ONCE = 16, MOST_QUERIES = 256 };

#define UNROLLED _Pragma("GCC unroll 4")

#define NAME(x) x##_plain
#define TARGET
#define V float
#define WIDTH 1
#define ACROSS 2
#define LOAD(at) (*(at))
#define STORE(at, v) (*(at) = (v))
#define SET1(x) (x)
#define FMA(a, b, c) ((a) * (b) + (c))
#define MUL(a, b) ((a) * (b))
#define ZERO() 0.0f
#define SUM(v) (v)
#include "attend_width.h"

#if defined(__x86_64__)
#include "cpu.h"
#include <immintrin.h>

#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx512f")))
#define V __m512
#define WIDTH 16
#define ACROSS 4
#define LOAD(at) _mm512_loadu_ps(at)
#define STORE(at, v) _mm512_storeu_ps(at, v)
#define SET1(x) _mm512_set1_ps(x)
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define MUL(a, b) _mm512_mul_ps(a, b)
#define ZERO() _mm512_setzero_ps()
#define SUM(v) _mm512_reduce_add_ps(v)
#include "attend_width.h"

__attribute__((target("avx2,fma"))) static inline float sum_avx2(__m256 v) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}

#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define V __m256
#define WIDTH 8
#define ACROSS 2
#define LOAD(at) _mm256_loadu_ps(at)
#define STORE(at, v) _mm256_storeu_ps(at, v)
#define SET1(x) _mm256_set1_ps(x)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define MUL(a, b) _mm256_mul_ps(a, b)
#define ZERO() _mm256_setzero_ps()
#define SUM(v) sum_avx2(v)
#include "attend_width.h"
#endif

static void do_head(void *work, int64_t piece) {
    const attend_work *is = work;
    int64_t row = piece / is->shape.heads, head = piece % is->shape.heads;
#if defined(__x86_64__)
    int64_t lanes = is->lanes;
    if (lanes == 16) return head_avx512(is, row, head);
    if (lanes == 8) return head_avx2(is, row, head);
#endif
    head_plain(is, row, head);
}

/* Values that this CPU's vectors hold. Asked for once: in a virtual machine that takes 50 us. */
static int64_t widest_lanes(void) {
    static int64_t known; /* written with the same value by whoever asks first */
    int64_t lanes = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!lanes) {
        lanes = 1;
#if defined(__x86_64__)
        lanes = cpu_has_avx512() ? 16 : cpu_has_avx2() ? 8 : 1;
#endif
        __atomic_store_n(&known, lanes, __ATOMIC_RELAXED);
    }
    return lanes;
}

typedef void (*crew)(void (*piece)(void *, int64_t), void *work, int64_t pieces);

/* All rows; `share` has a crew do the pieces. */
void moemesh_attend(crew share, attend_work *work, int64_t rows) {
    int64_t most = work->shape.most_lanes, widest = widest_lanes();
    work->lanes = most < widest ? most : widest;
    share(do_head, work, rows * work->shape.heads);
}
