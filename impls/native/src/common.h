// Vectors, threads and number formats for the kernels: GCC/Clang vector extensions, no headers but the C library's.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// A panel is 16 output channels: NV vectors of LANES floats. MR rows of it fill the register file.
#define PANEL 16
#if defined(__AVX512F__)
#define LANES 16
#define MR 12
#elif defined(__AVX2__)
#define LANES 8
#define MR 6
#else
#define LANES 4
#define MR 4
#endif
#define NV (PANEL / LANES)

// CASE(1) to CASE(MR), for code that is made for each number of rows apart.
#if MR == 12
#define EACH_HEIGHT(CASE) \
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#elif MR == 6
#define EACH_HEIGHT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#else
#define EACH_HEIGHT(CASE) CASE(1) CASE(2) CASE(3) CASE(4)
#endif

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
// The same, but allowed anywhere in memory.
typedef float vf_mem __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t vu_mem __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

INLINE vf load(const float *p) { return *(const vf_mem *)p; }
INLINE void store(float *p, vf x) { *(vf_mem *)p = x; }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf select_f(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
INLINE vf max_f(vf a, vf b) { return select_f(a > b, a, b); }
INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }

// 2^x to a relative error of 2e-7 for x <= 0; 0 below -126, -inf included.
INLINE vf exp2_vector(vf x) {
    const vi tiny = x < -126.0f;
    x = select_f(tiny, splat(-126.0f), x);
    const vf rounder = splat(12582912.0f), shifted = x + rounder;  // 1.5 * 2^23: the integer part in the low bits
    const vf f = x - (shifted - rounder);
    vf p = splat(1.5403530e-4f);
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    return select_f(tiny, (vf){0}, (vf)((vi)p + (((vi)shifted - (vi)rounder) << 23)));
}

INLINE float widen(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
}

// FP16 in the low half of each lane to FP32; infinities and NaN stay what they are.
INLINE vf from_half(vu h) {
    const vu magnitude = (h & 0x7fffu) << 13;
    const vf value = (vf)magnitude * 5192296858534827628530496329220096.0f;  // 2^112: FP16's bias to FP32's
    const vf special = (vf)(magnitude | 0x7f800000u);
    return (vf)((vu)select_f(magnitude >= 0x0f800000u, special, value) | (h & 0x8000u) << 16);
}

// Round to nearest even, as torch does; inputs are finite.
INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// A row as x / scale, rounded to even, and its scale = largest magnitude / 127 (at least 1e-12).
static inline float quantize_row(const float *x, int64_t k, int8_t *to) {
    vf best = {0};
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) best = max_f(best, (vf)((vi)load(x + i) & 0x7fffffff));
    float peak = 0;
    for (int c = 0; c < LANES; c++) peak = best[c] > peak ? best[c] : peak;
    for (; i < k; i++) peak = fabsf(x[i]) > peak ? fabsf(x[i]) : peak;
    const float scale = peak / 127.0f > 1e-12f ? peak / 127.0f : 1e-12f;
    for (i = 0; i < k; i++) {
        const float value = rintf(x[i] / scale);
        to[i] = (int8_t)(value > 127.0f ? 127.0f : value < -127.0f ? -127.0f : value);
    }
    return scale;
}

// Kept by the calling thread from call to call: fresh memory would cost its page faults every time.
struct scratch {
    void *memory;
    int64_t bytes;
};

// At least so many bytes, whatever they hold; NULL if there are none left.
static inline void *grown(struct scratch *scratch, int64_t bytes) {
    if (bytes > scratch->bytes) {
        free(scratch->memory);
        scratch->memory = malloc((size_t)bytes);
        scratch->bytes = scratch->memory ? bytes : 0;
    }
    return scratch->memory;
}

// Equal parts of at most `most` rows: 8 rows as 4 + 4, not 6 + 2.
INLINE int64_t even_rows(int64_t rows, int64_t most) {
    int64_t parts = (rows + most - 1) / most;
    return (rows + parts - 1) / parts;
}

// y[rows][columns], rows n apart, = from[rows][columns], rows `stride` apart, + bias: what exists of a tile's outputs.
static inline __attribute__((noinline)) void finish(float *y, int64_t n, const float *from, int64_t stride, int64_t rows,
                                                    int64_t columns, const float *bias) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) y[r * n + c] = from[r * stride + c] + (bias ? bias[c] : 0.0f);
}

// `finish` of rows of one panel.
INLINE void finish_panel(float *y, int64_t n, const float *sums, int64_t row, int64_t rows, int64_t panel,
                         const float *bias) {
    const int64_t first = panel * PANEL, count = n - first < PANEL ? n - first : PANEL;
    finish(y + row * n + first, n, sums, PANEL, rows, count, bias ? bias + first : NULL);
}

// torch has already loaded its OpenMP runtime for everyone; linking a second one would double the threads. GNU's,
// Intel's and LLVM's runtimes all export this entry point. Without any, the loop runs on the calling thread.
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));

typedef void (*loop_body)(void *context, int64_t item);
struct loop {
    loop_body body;
    void *context;
    int64_t count, next;
};

static void run_items(void *p) {
    struct loop *loop = p;
    for (;;) {
        int64_t item = __atomic_fetch_add(&loop->next, 1, __ATOMIC_RELAXED);
        if (item >= loop->count) return;
        loop->body(loop->context, item);
    }
}

static inline void parallel_for(int64_t count, int threads, loop_body body, void *context) {
    struct loop loop = {body, context, count, 0};
    if (threads > count) threads = (int)count;
    if (threads > 1 && GOMP_parallel)
        GOMP_parallel(run_items, &loop, (unsigned)threads, 0);
    else
        run_items(&loop);
}

// Each of m rows of k numbers; a few of them are not worth waking other threads.
static inline void each_row(int64_t m, int64_t k, int threads, loop_body body, void *context) {
    parallel_for(m, m * k < 1 << 14 ? 1 : threads, body, context);
}
