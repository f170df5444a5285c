// y[M,N] = (sx sw) (X W^T) + bias with X, W INT8 and exact INT32 sums, W as [N/16][K/2][16][2]: two neighbouring k of a
// channel meet two of a row in one 16-bit multiply-add. Activations are quantised once, one scale a row.
#include "common.h"

struct linear {
    const int32_t *x;  // [m][pairs]: two INT16 each
    const int8_t *w;
    const float *x_scale, *w_scale, *bias;  // x_scale NULL: raw sums
    void *y;
    int64_t m, n, pairs, panels_per_item;
};

#if defined(__AVX512BW__)
typedef __m512i sums;
INLINE sums weights(const int8_t *p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p)); }
INLINE sums both(int32_t pair) { return _mm512_set1_epi32(pair); }
#if defined(__AVX512VNNI__)
INLINE sums add_products(sums acc, sums w, sums x) { return _mm512_dpwssd_epi32(acc, w, x); }
#else
INLINE sums add_products(sums acc, sums w, sums x) { return _mm512_add_epi32(acc, _mm512_madd_epi16(w, x)); }
#endif
#elif defined(__AVX2__) && LANES == 8
typedef __m256i sums;
INLINE sums weights(const int8_t *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)); }
INLINE sums both(int32_t pair) { return _mm256_set1_epi32(pair); }
INLINE sums add_products(sums acc, sums w, sums x) { return _mm256_add_epi32(acc, _mm256_madd_epi16(w, x)); }
#else
typedef vi sums;
struct wide_weights { vi even, odd; };
INLINE struct wide_weights weights(const int8_t *p) {
    struct wide_weights w;
    for (int c = 0; c < LANES; c++) w.even[c] = p[2 * c], w.odd[c] = p[2 * c + 1];
    return w;
}
INLINE int32_t both(int32_t pair) { return pair; }
INLINE sums add_products(sums acc, struct wide_weights w, int32_t pair) {
    return acc + w.even * (int32_t)(int16_t)pair + w.odd * (pair >> 16);
}
#endif

INLINE void tile(const int rows, const struct linear *a, int64_t row, int64_t panel, int64_t fetch, int64_t each,
                 int32_t products[MR][PANEL]) {
    const int64_t pairs = a->pairs;  // a local: the barrier below would have it read again for every row
    const int8_t *w = a->w + panel * pairs * PANEL * 2;
    const char *ahead = (const char *)w + fetch;
    const int32_t *x = a->x + row * pairs;
    sums acc[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) acc[r][v] = (sums){0};
    for (int64_t i = 0; i < pairs; i++) {
        __builtin_prefetch(ahead, 0, 2);
        ahead += each;
        __typeof__(weights(w)) weight[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) weight[v] = weights(w + (i * PANEL + v * LANES) * 2);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const __typeof__(both(0)) pair = both(x[r * pairs + i]);
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) acc[r][v] = add_products(acc[r][v], weight[v], pair);
            __asm__ volatile("" ::: "memory");  // see linear_bf16.c
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) memcpy(products[r], acc[r], sizeof products[r]);
}

static __attribute__((noinline)) void rescale(const struct linear *a, int64_t row, int64_t rows, int64_t panel,
                                              int32_t products[MR][PANEL]) {
    const int64_t first = panel * PANEL, count = a->n - first < PANEL ? a->n - first : PANEL;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = (row + r) * a->n + first;
        if (!a->x_scale) {
            memcpy((int32_t *)a->y + at, products[r], (size_t)count * 4);
            continue;
        }
        float *y = (float *)a->y + at;
        for (int64_t c = 0; c < count; c++)
            y[c] = (float)products[r][c] * a->x_scale[row + r] * a->w_scale[first + c];
        if (a->bias)
            for (int64_t c = 0; c < count; c++) y[c] += a->bias[first + c];
    }
}

static void body(void *context, int64_t item) {
    const struct linear *a = context;
    const int64_t panels = (a->n + PANEL - 1) / PANEL, bytes = a->pairs * PANEL * 2;
    const int64_t begin = item * a->panels_per_item, stop = begin + a->panels_per_item;
    const int64_t height = even_rows(a->m, MR), tiles = (a->m + height - 1) / height;
    for (int64_t p = begin; p < (stop < panels ? stop : panels); p++)
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t row = t * height, rows = a->m - row < height ? a->m - row : height;
            const int64_t fetch = bytes + t * bytes / tiles, each = PANEL * 2 / tiles;
            int32_t products[MR][PANEL];
            switch (rows) {
#define CASE(R) case R: tile(R, a, row, p, fetch, each, products); break;
                EACH_HEIGHT(CASE)
#undef CASE
            }
            rescale(a, row, rows, p, products);
        }
}

struct quantize {
    const float *x;
    int8_t *values;
    float *scale;
    int64_t k;
};

static void quantize_body(void *context, int64_t row) {
    const struct quantize *a = context;
    a->scale[row] = quantize_row(a->x + row * a->k, a->k, a->values + row * a->k);
}

EXPORT void quantize_int8(const float *x, int8_t *values, float *scale, int64_t m, int64_t k, int threads) {
    struct quantize a = {x, values, scale, k};
    each_row(m, k, threads, quantize_body, &a);
}

struct pairs {
    const float *x;         // quantised here, or
    const int8_t *values;   // already quantised
    float *scale;
    int32_t *to;
    int64_t k, pairs;
};

static void pairs_body(void *context, int64_t row) {
    const struct pairs *a = context;
    int8_t own[a->k];
    const int8_t *values = a->values + row * a->k;
    if (a->x) {
        a->scale[row] = quantize_row(a->x + row * a->k, a->k, own);
        values = own;
    }
    int16_t *to = (int16_t *)(a->to + row * a->pairs);
    for (int64_t i = 0; i < a->k; i++) to[i] = values[i];
    if (a->k % 2) to[a->k] = 0;
}

static __thread struct scratch scratch;

static int multiply(const float *x, const int8_t *values, const int8_t *w, const float *w_scale, const float *bias,
                    void *y, int64_t m, int64_t n, int64_t k, int threads) {
    const int64_t pairs = (k + 1) / 2;
    int32_t *rows = grown(&scratch, (m * pairs + m) * 4);
    if (!rows) return 1;
    float *x_scale = (float *)(rows + m * pairs);
    struct pairs extend = {x, values, x_scale, rows, k, pairs};
    each_row(m, k, threads, pairs_body, &extend);
    struct linear a = {rows, w, x ? x_scale : NULL, w_scale, bias, y, m, n, pairs, 0};
    const int64_t panels = (n + PANEL - 1) / PANEL, share = panels / (threads * 4);
    a.panels_per_item = share < 2 ? 2 : share;
    parallel_for((panels + a.panels_per_item - 1) / a.panels_per_item, threads, body, &a);
    return 0;
}

// 0; 1 if memory ran out.
EXPORT int linear_int8(const float *x, const int8_t *w, const float *w_scale, const float *bias, float *y, int64_t m,
                       int64_t n, int64_t k, int threads) {
    return multiply(x, NULL, w, w_scale, bias, y, m, n, k, threads);
}

EXPORT int matmul_int8(const int8_t *values, const int8_t *w, int32_t *y, int64_t m, int64_t n, int64_t k, int threads) {
    return multiply(NULL, values, w, NULL, NULL, y, m, n, k, threads);
}
