/* How many copies each expert gets. */
#pragma once
#include "layer.h"

static void sift(int32_t *heap, const double *key, int n, int i) {
    for (;;) {
        int child = 2 * i + 1;
        if (child >= n) return;
        if (child + 1 < n && key[heap[child + 1]] > key[heap[child]]) child++;
        if (key[heap[child]] <= key[heap[i]]) return;
        int32_t t = heap[i];
        heap[i] = heap[child];
        heap[child] = t;
        i = child;
    }
}

/* All experts by descending weight, into `order`: by buckets of about 0.4 %, then exactly. */
static void sort_by_weight(Layer *l) {
    int32_t *from = l->order, *to = l->heap;
    int n = l->experts, start[256];
    for (int e = 0; e < n; e++) {
        float rough = (float)l->weight[e];
        uint32_t bits;
        memcpy(&bits, &rough, sizeof bits);
        l->digits[e] = (uint16_t)~(bits >> 15);
        from[e] = e;
    }
    for (int shift = 0; shift < 16; shift += 8) {
        memset(start, 0, sizeof start);
        for (int i = 0; i < n; i++) start[l->digits[i] >> shift & 255]++;
        for (int i = 0, sum = 0; i < 256; i++) {
            int count = start[i];
            start[i] = sum;
            sum += count;
        }
        for (int i = 0; i < n; i++) to[start[l->digits[from[i]] >> shift & 255]++] = from[i];
        int32_t *t = from;
        from = to;
        to = t;
    }
    for (int i = 1; i < n; i++) {
        int32_t e = l->order[i];
        int j = i;
        for (; j > 0 && l->weight[l->order[j - 1]] < l->weight[e]; j--)
            l->order[j] = l->order[j - 1];
        l->order[j] = e;
    }
}

/* Copies that minimise the largest share: one more for the largest, again and again. That is
 * exact for this objective. Starts from `copies` (at least one each); at most `cap` (ranks) of
 * each, `slots` in all. Of the experts whose home is `node`, or of all (-1). Needs `order`. */
static void count_copies(Layer *l, int slots, int cap, int node) {
    int size = 0, next = 0, n = l->experts;
    for (int e = 0; e < n; e++) {
        if (node >= 0 && l->home[e] != node) continue;
        slots -= l->copies[e];
        if (l->copies[e] < 2 || l->copies[e] >= cap) continue;
        l->key[e] = l->weight[e] / l->copies[e];
        l->heap[size++] = e;
    }
    for (int i = size / 2 - 1; i >= 0; i--) sift(l->heap, l->key, size, i);
    while (slots > 0 && cap > 1) {
        while (next < n && (l->copies[l->order[next]] > 1 ||
                            (node >= 0 && l->home[l->order[next]] != node)))
            next++;
        int fresh = next < n ? l->order[next] : EMPTY, e;
        if (fresh != EMPTY && (!size || l->weight[fresh] >= l->key[l->heap[0]])) {
            e = fresh;
            if (cap > 2) {
                int i = size++; /* its key is the largest: it rises to the top */
                for (; i > 0; i = (i - 1) / 2) l->heap[i] = l->heap[(i - 1) / 2];
                l->heap[0] = e;
            }
        } else if (size) {
            e = l->heap[0];
        } else {
            return;
        }
        slots--;
        l->key[e] = l->weight[e] / ++l->copies[e];
        if (cap > 2 && l->copies[e] >= cap) l->heap[0] = l->heap[--size];
        if (size) sift(l->heap, l->key, size, 0);
    }
}
