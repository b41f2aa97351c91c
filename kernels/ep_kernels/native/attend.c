/* Softmax attention of single tokens of many sequences over the paged cache, read where it lies. Each
 * piece of a block is read once for some or all queries of a key head: scores, then values, with the softmax
 * put right as larger scores come (arXiv 1805.02867). A row depends on itself alone.
 *
 * The caller's face is ep_kernels/attend.py.
 */
#include "attend.h"
#include "rows.h"

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
#define FETCH(at) ((void)(at))
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
#define FETCH(at) _mm_prefetch((const char *)(at), _MM_HINT_T1)
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
#define FETCH(at) _mm_prefetch((const char *)(at), _MM_HINT_T1)
#include "attend_width.h"
#endif

/* Queries that are worked on together. */
enum { QUERIES_AT_ONCE = 4 };
/* As many pieces as a crew finds worth having. */
enum { MANY_PIECES = 16 };

static void do_queries(void *work, int64_t piece) {
    const attend_work *is = work;
    int64_t part = piece % is->parts, row = piece / is->parts / is->shape.heads;
    int64_t head = piece / is->parts % is->shape.heads;
    int64_t groups = (is->shape.shared + QUERIES_AT_ONCE - 1) / QUERIES_AT_ONCE;
    int64_t from = groups * part / is->parts * QUERIES_AT_ONCE;
    int64_t to = groups * (part + 1) / is->parts * QUERIES_AT_ONCE;
    if (to > is->shape.shared) to = is->shape.shared;
#if defined(__x86_64__)
    int64_t lanes = is->lanes;
    if (lanes == 16) return head_avx512(is, row, head, from, to);
    if (lanes == 8) return head_avx2(is, row, head, from, to);
#endif
    head_plain(is, row, head, from, to);
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

/* All rows; `share` has a crew do the pieces. */
void moemesh_attend(crew share, attend_work *work, int64_t rows) {
    const attend_shape *is = &work->shape;
    int64_t most = is->most_lanes, widest = widest_lanes(), heads = rows * is->heads;
    work->lanes = most < widest ? most : widest;
    int64_t groups = (is->shared + QUERIES_AT_ONCE - 1) / QUERIES_AT_ONCE;
    work->parts = heads ? (MANY_PIECES + heads - 1) / heads : 1;
    if (work->parts > groups) work->parts = groups;
    share(do_queries, work, heads * work->parts);
}
