/* What this x86 CPU has, and its kernel saves. Asked for here, since `__builtin_cpu_supports` finds
 * nothing in libraries that Zig's compiler builds. In a virtual machine each question takes long.
 */
#ifndef MOEMESH_CPU_H
#define MOEMESH_CPU_H
#include <cpuid.h>
#include <stdint.h>

/* Bit `bit` of register `word` (0 to 3: a, b, c, d) of a leaf. */
static inline int cpu_bit(unsigned leaf, int word, int bit) {
    unsigned words[4];
    if (!__get_cpuid_count(leaf, 0, words, words + 1, words + 2, words + 3)) return 0;
    return words[word] >> bit & 1;
}

/* Whether registers of these kinds survive a change of processes. */
static inline int cpu_saves(unsigned kinds) {
    unsigned low, high;
    if (!cpu_bit(1, 2, 27)) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & kinds) == kinds;
}

enum { CPU_AVX = 0x06, CPU_AVX512 = 0xe6 };

/* AVX2 with fused multiply-add and fp16 conversion. */
static inline int cpu_has_avx2(void) {
    return cpu_saves(CPU_AVX) && cpu_bit(7, 1, 5) && cpu_bit(1, 2, 12) && cpu_bit(1, 2, 29);
}

static inline int cpu_has_avx512(void) { return cpu_saves(CPU_AVX512) && cpu_bit(7, 1, 16); }

/* Tiles of bf16; the kernel must still be asked for them. */
static inline int cpu_has_tiles(void) {
    return cpu_has_avx512() && cpu_bit(7, 3, 22) && cpu_bit(7, 3, 24);
}

#endif
