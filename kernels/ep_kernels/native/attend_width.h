/* Attention of one row's queries of one key head, for one width of vectors. Included with NAME(x),
 * TARGET, V, WIDTH, LOAD, STORE, SET1, FMA, MUL, ZERO, SUM and FETCH defined, and with ACROSS: times
 * four queries, as many sums as registers hold.
 *
 * While some keys are worked on those that come next are fetched: they lie in other blocks, which
 * hardware does not foresee. Where there are none, or they have been, "next" are the keys themselves.
 */

/* score [queries][KEYS_AT_ONCE] of `queries` by `keys`, both constants. */
INLINED TARGET void NAME(dots)(const attend_shape *is, const float *q, const float *key,
                               const float *next, int64_t stride, const int queries,
                               const int keys, float *score) {
    V sum[4][ACROSS];
    UNROLLED for (int a = 0; a < queries; a++)
        UNROLLED for (int b = 0; b < keys; b++) sum[a][b] = ZERO();
    int64_t d = 0, width = is->key_dim;
    for (; d + WIDTH <= width; d += WIDTH) {
        V k[ACROSS];
        UNROLLED for (int b = 0; b < keys; b++) {
            k[b] = LOAD(key + b * stride + d);
            FETCH(next + b * stride + d);
        }
        UNROLLED for (int a = 0; a < queries; a++) {
            V value = LOAD(q + a * width + d);
            UNROLLED for (int b = 0; b < keys; b++) sum[a][b] = FMA(value, k[b], sum[a][b]);
        }
    }
    UNROLLED for (int a = 0; a < queries; a++)
        UNROLLED for (int b = 0; b < keys; b++) {
            float more = 0.0f;
            for (int64_t i = d; i < width; i++) more += q[a * width + i] * key[b * stride + i];
            score[a * KEYS_AT_ONCE + b] = SUM(sum[a][b]) + more;
        }
}

/* out [queries, value_dim] becomes itself times `keep` plus share [queries][KEYS_AT_ONCE] times
 * value [keys, value_dim]. `queries` is a constant. */
INLINED TARGET void NAME(add)(const attend_shape *is, const float *share, const float *keep,
                              const float *value, const float *next, int64_t stride, int64_t keys,
                              const int queries, float *out) {
    int64_t d = 0, width = is->value_dim;
    for (; d + ACROSS * WIDTH <= width; d += ACROSS * WIDTH) {
        V sum[4][ACROSS];
        UNROLLED for (int a = 0; a < queries; a++)
            UNROLLED for (int j = 0; j < ACROSS; j++)
                sum[a][j] = MUL(SET1(keep[a]), LOAD(out + a * width + d + j * WIDTH));
        for (int64_t k = 0; k < keys; k++) {
            V v[ACROSS];
            UNROLLED for (int j = 0; j < ACROSS; j++) {
                v[j] = LOAD(value + k * stride + d + j * WIDTH);
                FETCH(next + k * stride + d + j * WIDTH);
            }
            UNROLLED for (int a = 0; a < queries; a++) {
                V weight = SET1(share[a * KEYS_AT_ONCE + k]);
                UNROLLED for (int j = 0; j < ACROSS; j++) sum[a][j] = FMA(weight, v[j], sum[a][j]);
            }
        }
        UNROLLED for (int a = 0; a < queries; a++)
            UNROLLED for (int j = 0; j < ACROSS; j++) STORE(out + a * width + d + j * WIDTH, sum[a][j]);
    }
    for (int a = 0; a < queries; a++)
        for (int64_t i = d; i < width; i++) {
            float sum = keep[a] * out[a * width + i];
            for (int64_t k = 0; k < keys; k++)
                sum += share[a * KEYS_AT_ONCE + k] * value[k * stride + i];
            out[a * width + i] = sum;
        }
}

/* Some queries, a constant number, and up to KEYS_AT_ONCE keys, with what is known of those before. */
INLINED TARGET void NAME(some)(const attend_shape *is, const float *q, const float *key,
                               const float *value, int64_t ahead, int64_t stride, int64_t keys,
                               const int queries, float *most, float *total, float *out) {
    float score[4 * KEYS_AT_ONCE], keep[4];
    int64_t k = 0;
    for (; k + ACROSS <= keys; k += ACROSS)
        NAME(dots)(is, q, key + k * stride, key + ahead + k * stride, stride, queries, ACROSS, score + k);
    for (; k < keys; k++)
        NAME(dots)(is, q, key + k * stride, key + ahead + k * stride, stride, queries, 1, score + k);
    for (int a = 0; a < queries; a++) {
        float *of = score + a * KEYS_AT_ONCE, high = most[a], sum = 0.0f;
        for (k = keys; k < KEYS_AT_ONCE; k++) of[k] = -INFINITY;
        for (k = 0; k < keys; k++) high = of[k] > high ? of[k] : high;
        /* exp_of ends at e^-87: what has no key yet keeps nothing. */
        keep[a] = total[a] > 0.0f ? exp_of(most[a] - high) : 0.0f;
        for (k = 0; k < KEYS_AT_ONCE; k++) of[k] = exp_of(of[k] - high);
        for (k = 0; k < keys; k++) sum += of[k];
        most[a] = high;
        total[a] = total[a] * keep[a] + sum;
    }
    NAME(add)(is, score, keep, value, value + ahead, stride, keys, queries, out);
}

/* Queries `from` to `to` of a row's key head. */
TARGET static void NAME(head)(const attend_work *of, int64_t row, int64_t head, int64_t from,
                              int64_t to) {
    const attend_shape *is = &of->shape;
    int64_t stride = is->stride;
    const float *q = of->q + row * is->q_row + head * is->shared * is->key_dim;
    float *out = of->out + (row * is->heads + head) * is->shared * is->value_dim;
    float most[MOST_QUERIES], total[MOST_QUERIES];
    for (int64_t i = from * is->value_dim; i < to * is->value_dim; i++) out[i] = 0.0f;
    for (int64_t begin = from; begin < to; begin += MOST_QUERIES) {
        int64_t queries = to - begin < MOST_QUERIES ? to - begin : MOST_QUERIES;
        for (int64_t a = 0; a < queries; a++) most[a] = -INFINITY, total[a] = 0.0f;
        const int64_t *block = of->blocks + of->offset[row];
        int64_t at = of->skip[row], left = of->keys[row];
        while (left > 0) {
            int64_t keys = is->block_size - at;
            keys = keys < left ? keys : left;
            keys = keys < KEYS_AT_ONCE ? keys : KEYS_AT_ONCE;
            const float *first = of->cache + (*block * is->block_size + at) * stride;
            const float *key = first + head * is->key_dim;
            const float *value = first + is->value_offset + head * is->value_dim;
            left -= keys;
            at += keys;
            if (at == is->block_size) at = 0, block++;
            int64_t ahead = left ? of->cache + (*block * is->block_size + at) * stride - first : 0;
            int64_t a = 0;
            for (; a + 4 <= queries; a += 4, ahead = 0)
                NAME(some)(is, q + (begin + a) * is->key_dim, key, value, ahead, stride, keys, 4,
                           most + a, total + a, out + (begin + a) * is->value_dim);
            for (; a < queries; a++, ahead = 0)
                NAME(some)(is, q + (begin + a) * is->key_dim, key, value, ahead, stride, keys, 1,
                           most + a, total + a, out + (begin + a) * is->value_dim);
        }
        for (int64_t a = 0; a < queries; a++)
            for (int64_t i = 0; i < is->value_dim; i++)
                out[(begin + a) * is->value_dim + i] /= total[a];
    }
}

#undef NAME
#undef TARGET
#undef V
#undef WIDTH
#undef ACROSS
#undef LOAD
#undef STORE
#undef SET1
#undef FMA
#undef MUL
#undef ZERO
#undef SUM
#undef FETCH
