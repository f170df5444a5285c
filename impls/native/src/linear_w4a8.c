// y[M,N] = x_scale (X W^T) + bias: X INT8, quantised here, a scale a row; W = scale q + offset by groups of k, q of four
// bits in the words of linear_grouped.c. A word's even fields, masked where they stand, are four bytes that meet four of
// a row in one instruction, and its odd ones four more; the sums of a group are exact integers.
#include "common.h"

#define ROWS 4
#define CHUNK 4     // words whose products 16 bits can add up: 2 x 4 x 2 x 15 x 127 < 2^15
#define AHEAD 2048  // bytes from a word to the one that is fetched meanwhile

struct linear {
    const int32_t *x;       // [m][2 words]: k 0 2 4 6, then 1 3 5 7, of every eight
    const float *x_sum;     // [m][groups]
    const float *x_scale;   // [m]
    const uint32_t *w;
    const uint32_t *scale;  // [panels][groups][16]: FP16 scale in the low half, FP16 offset in the high one
    const float *bias;
    float *y;
    int64_t m, n, words, groups, panels_per_item;
};

// add_products: of four unsigned bytes below 16 and four signed ones, in every lane; at most 2 CHUNK of them, until
// added_up gives the lanes' sums.
#if defined(__AVX512VNNI__)
INLINE vi add_products(vi acc, vu w, vi x) { return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x); }
INLINE vi added_up(vi acc) { return acc; }
#elif defined(__AVX512BW__)
INLINE vi add_products(vi acc, vu w, vi x) {
    return (vi)_mm512_add_epi16((__m512i)acc, _mm512_maddubs_epi16((__m512i)w, (__m512i)x));
}
INLINE vi added_up(vi acc) { return (vi)_mm512_madd_epi16((__m512i)acc, _mm512_set1_epi16(1)); }
#elif defined(__AVXVNNI__) && LANES == 8
INLINE vi add_products(vi acc, vu w, vi x) { return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)x); }
INLINE vi added_up(vi acc) { return acc; }
#elif defined(__AVX2__) && LANES == 8
INLINE vi add_products(vi acc, vu w, vi x) {
    return (vi)_mm256_add_epi16((__m256i)acc, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
}
INLINE vi added_up(vi acc) { return (vi)_mm256_madd_epi16((__m256i)acc, _mm256_set1_epi16(1)); }
#else
INLINE vi add_products(vi acc, vu w, vi x) {
    for (int b = 0; b < 32; b += 8) acc += (vi)(w >> b & 0xffu) * (x << (24 - b) >> 24);
    return acc;
}
INLINE vi added_up(vi acc) { return acc; }
#endif

// sums[rows][16] += x[rows][8 count] q[8 count][16]
INLINE void multiply(const int rows, const int64_t count, const uint32_t *w, const int32_t *x, int64_t stride,
                     vi sums[ROWS][NV]) {
    vi acc[ROWS][NV];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) acc[r][v] = (vi){0};
#pragma GCC unroll 4
    for (int64_t i = 0; i < count; i++) {
        __builtin_prefetch((const char *)(w + i * PANEL) + AHEAD, 0, 2);
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            const vu word = *(const vu_mem *)(w + i * PANEL + v * LANES);
            const vu even = word & 0x0f0f0f0fu, odd = word >> 4 & 0x0f0f0f0fu;
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                const int32_t *bytes = x + r * stride + 2 * i;
                acc[r][v] = add_products(acc[r][v], even, bytes[0] - (vi){0});
                acc[r][v] = add_products(acc[r][v], odd, bytes[1] - (vi){0});
                __asm__ volatile("" ::: "memory");  // see linear_bf16.c
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) sums[r][v] += added_up(acc[r][v]);
}

INLINE void tile(const int rows, const struct linear *a, int64_t row, int64_t panel) {
    const int64_t stride = 2 * a->words, of_group = a->words / a->groups;
    const uint32_t *w = a->w + panel * a->words * PANEL, *pairs = a->scale + panel * a->groups * PANEL;
    const int32_t *x = a->x + row * stride;
    const float *x_sum = a->x_sum + row * a->groups;
    vf total[ROWS][NV] = {{{0}}};
    for (int64_t g = 0; g < a->groups; g++, pairs += PANEL) {
        vi sums[ROWS][NV] = {{{0}}};
        int64_t left = of_group;
        for (; left >= CHUNK; left -= CHUNK, w += CHUNK * PANEL, x += 2 * CHUNK)
            multiply(rows, CHUNK, w, x, stride, sums);
        for (; left > 0; left--, w += PANEL, x += 2) multiply(rows, 1, w, x, stride, sums);
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            const vu pair = *(const vu_mem *)(pairs + v * LANES);
            const vf scale = from_half(pair & 0xffffu), offset = from_half(pair >> 16);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                total[r][v] += to_float(sums[r][v]) * scale + offset * splat(x_sum[r * a->groups + g]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) total[r][v] *= a->x_scale[row + r];
    finish_panel(a->y, a->n, (const float *)total, row, rows, panel, a->bias);
}

static void body(void *context, int64_t item) {
    const struct linear *a = context;
    const int64_t panels = (a->n + PANEL - 1) / PANEL, begin = item * a->panels_per_item;
    const int64_t stop = begin + a->panels_per_item, height = even_rows(a->m, ROWS);
    for (int64_t p = begin; p < (stop < panels ? stop : panels); p++)
        for (int64_t row = 0; row < a->m; row += height)
            switch (a->m - row < height ? a->m - row : height) {
            case 1: tile(1, a, row, p); break;
            case 2: tile(2, a, row, p); break;
            case 3: tile(3, a, row, p); break;
            case 4: tile(4, a, row, p); break;
            }
}

struct quantize {
    const float *x;
    int8_t *to;
    float *sum, *scale;
    int64_t k, words, groups;
};

static void quantize_body(void *context, int64_t row) {
    const struct quantize *a = context;
    const int64_t padded = a->words * 8, of_group = padded / a->groups;
    int8_t values[padded], *to = a->to + row * padded;
    a->scale[row] = quantize_row(a->x + row * a->k, a->k, values);
    memset(values + a->k, 0, (size_t)(padded - a->k));
    for (int64_t i = 0; i < padded; i++) to[(i & ~7LL) + i % 2 * 4 + i % 8 / 2] = values[i];
    for (int64_t g = 0; g < a->groups; g++) {
        int32_t sum = 0;
        for (int64_t i = g * of_group; i < (g + 1) * of_group; i++) sum += values[i];
        a->sum[row * a->groups + g] = (float)sum;
    }
}

static __thread struct scratch scratch;

// group: k that share a scale, k itself or a multiple of 32 that divides it. 0; 1 if memory ran out.
EXPORT int linear_w4a8(const float *x, const void *w, const void *scale, const float *bias, float *y, int64_t m,
                       int64_t n, int64_t k, int64_t group, int threads) {
    const int64_t words = (k + 7) / 8, groups = k / group;
    int32_t *rows = grown(&scratch, m * (2 * words + groups + 1) * 4);
    if (!rows) return 1;
    float *x_sum = (float *)(rows + m * 2 * words), *x_scale = x_sum + m * groups;
    struct quantize quantize = {x, (int8_t *)rows, x_sum, x_scale, k, words, groups};
    each_row(m, k, threads, quantize_body, &quantize);
    struct linear a = {rows, x_sum, x_scale, w, scale, bias, y, m, n, words, groups, 0};
    const int64_t panels = (n + PANEL - 1) / PANEL, share = panels / (threads * 4);
    a.panels_per_item = share < 2 ? 2 : share;
    parallel_for((panels + a.panels_per_item - 1) / a.panels_per_item, threads, body, &a);
    return 0;
}
