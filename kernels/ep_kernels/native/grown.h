/* Some thread's memory for one purpose; it grows, and ends with the process. */
#ifndef MOEMESH_GROWN_H
#define MOEMESH_GROWN_H
#include <stdlib.h>

typedef struct {
    void *at;
    size_t size;
} grown;

static inline void *grow(grown *memory, size_t size) {
    if (size > memory->size) {
        free(memory->at);
        memory->size = (size + 4095) / 4096 * 4096;
        memory->at = aligned_alloc(64, memory->size);
        if (!memory->at) abort(); /* some MiB at most: this machine cannot go on */
    }
    return memory->at;
}

#endif
