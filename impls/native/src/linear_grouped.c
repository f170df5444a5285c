// y[M,N] = x[M,K] W[N,K]^T + bias in FP32, W = scale q + offset by groups of k, q unsigned of 8, 4, 3 or 2 bits.
// W lies as [N/16][words][16]: a 32-bit lane holds neighbouring k of one channel, 32 / bits of them. A mask leaves one
// field where it stands, so that it converts to q * 2^position, and the power is taken out of x beforehand: no shifts.
// Three bits are a word of two-bit fields for every 16 k and a word of one-bit fields for every 32, by pieces of k.
#include "common.h"

#define ROWS 4          // of a tile that unpacks while it multiplies
#define FUSED_ROWS 8    // from more rows on a piece is widened once for all of them
#define PIECE 128       // k after which sums are scaled, or a group if that is less
#define MAX_ROWS 96     // rows that share a widened piece
#define BLOCK_BYTES (192 << 10)
#define AHEAD 2048      // bytes from a word to the one that is fetched meanwhile
// Independent sums of one output: few rows alone would wait for the latency of their additions.
#define SETS(rows) (8 / ((rows) * NV) > 4 ? 4 : 8 / ((rows) * NV) > 1 ? 8 / ((rows) * NV) : 1)

struct grouped {
    const float *x;         // fused: [m][stride], each row scaled by field, a copy a plane, then its sums by piece
    const uint32_t *w;
    const uint32_t *scale;  // [panels][groups][16]: FP16 scale in the low half, FP16 offset in the high one
    const float *bias;
    float *y;
    int64_t m, n, k, padded, words, group, groups, piece, stride, panels_per_item, panel_items, rows_per_item;
    int bits, zero_point;   // zero_point: W = scale (q - offset)
};

INLINE void scales(const struct grouped *a, int64_t panel, int64_t k, vf scale[NV], vf offset[NV]) {
    const uint32_t *pairs = a->scale + (panel * a->groups + k / a->group) * PANEL;
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
        const vu pair = *(const vu_mem *)(pairs + v * LANES);
        scale[v] = from_half(pair & 0xffffu);
        offset[v] = from_half(pair >> 16);
        if (a->zero_point) offset[v] = -scale[v] * offset[v];
    }
}

INLINE vi half_word(const uint32_t *w, int high) {
    const vu word = *(const vu_mem *)w;
    return (vi)(high ? word >> 16 : word);
}

INLINE vf field(vi word, int bits, int j) { return to_float(word & (((1 << bits) - 1) << (j * bits))); }

// --- few rows: unpacked and multiplied in registers -----------------------------------------------------------------

INLINE void plane(const int rows, const int bits, vf acc[4][ROWS][NV], const uint32_t *w, int64_t words,
                  const float *x, int64_t stride) {
    for (int64_t i = 0; i < words; i++, w += PANEL, x += 32 / bits) {
        __builtin_prefetch((const char *)w + AHEAD, 0, 2);
#pragma GCC unroll 2
        for (int high = 0; high < 2; high++) {
            vi word[NV];
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) word[v] = half_word(w + v * LANES, high);
#pragma GCC unroll 16
            for (int j = 0; j < 16 / bits; j++) {
                const int at = high * (16 / bits) + j;
                vf q[NV];
#pragma GCC unroll 4
                for (int v = 0; v < NV; v++) q[v] = field(word[v], bits, j);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) {
                    const vf value = splat(x[r * stride + at]);
#pragma GCC unroll 4
                    for (int v = 0; v < NV; v++) acc[at % SETS(rows)][r][v] += q[v] * value;
                }
            }
        }
    }
}

INLINE void tile(const int rows, const int bits, const struct grouped *a, int64_t row, int64_t panel) {
    const int main_bits = bits == 3 ? 2 : bits;
    const float *x = a->x + row * a->stride, *sums = x + a->padded * (bits == 3 ? 2 : 1);
    const uint32_t *w = a->w + panel * a->words * PANEL;
    vf total[ROWS][NV] = {{{0}}};
    for (int64_t k = 0; k < a->padded; k += a->piece, sums++) {
        const int64_t count = a->padded - k < a->piece ? a->padded - k : a->piece, words = count * main_bits / 32;
        vf acc[4][ROWS][NV], scale[NV], offset[NV];
#pragma GCC unroll 4
        for (int s = 0; s < SETS(rows); s++)
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int v = 0; v < NV; v++) acc[s][r][v] = (vf){0};
        plane(rows, main_bits, acc, w, words, x + k, a->stride);
        w += words * PANEL;
        if (bits == 3) {
            plane(rows, 1, acc, w, count / 32, x + a->padded + k, a->stride);
            w += count / 32 * PANEL;
        }
        scales(a, panel, k, scale, offset);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) {
#pragma GCC unroll 4
                for (int s = 1; s < SETS(rows); s++) acc[0][r][v] += acc[s][r][v];
                total[r][v] += acc[0][r][v] * scale[v] + offset[v] * splat(sums[r * a->stride]);
            }
    }
    finish_panel(a->y, a->n, (const float *)total, row, rows, panel, a->bias);
}

#define ALL_BITS(CASE) CASE(8) CASE(4) CASE(3) CASE(2)

static void fused_body(void *context, int64_t item) {
    const struct grouped *a = context;
    const int64_t panels = (a->n + PANEL - 1) / PANEL, begin = item * a->panels_per_item;
    const int64_t stop = begin + a->panels_per_item, height = even_rows(a->m, ROWS);
    for (int64_t p = begin; p < (stop < panels ? stop : panels); p++)
        for (int64_t row = 0; row < a->m; row += height)
            switch (a->bits * 8 + (a->m - row < height ? a->m - row : height)) {
#define CASE(BITS) \
                case BITS * 8 + 1: tile(1, BITS, a, row, p); break; \
                case BITS * 8 + 2: tile(2, BITS, a, row, p); break; \
                case BITS * 8 + 3: tile(3, BITS, a, row, p); break; \
                case BITS * 8 + 4: tile(4, BITS, a, row, p); break;
                ALL_BITS(CASE)
#undef CASE
            }
}

// --- many rows: a piece is widened once and stays in L1 -------------------------------------------------------------

INLINE void widen_plane(const int bits, const int add, const float unit, const uint32_t *w, int64_t words,
                        const vf scale[NV], const vf offset[NV], float *to) {
    vf by[16][NV];
#pragma GCC unroll 16
    for (int j = 0; j < 16 / bits; j++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) by[j][v] = scale[v] * (unit / (float)(1 << (j * bits)));
    for (int64_t i = 0; i < words; i++, w += PANEL)
#pragma GCC unroll 2
        for (int high = 0; high < 2; high++)
#pragma GCC unroll 16
            for (int j = 0; j < 16 / bits; j++, to += PANEL)
#pragma GCC unroll 4
                for (int v = 0; v < NV; v++) {
                    const vf base = add ? load(to + v * LANES) : offset[v];
                    store(to + v * LANES, field(half_word(w + v * LANES, high), bits, j) * by[j][v] + base);
                }
}

static void widen_piece(const struct grouped *a, const uint32_t *w, int64_t panel, int64_t k, int64_t count, float *to) {
    vf scale[NV], offset[NV];
    scales(a, panel, k, scale, offset);
    switch (a->bits) {
    case 8: widen_plane(8, 0, 1.0f, w, count / 4, scale, offset, to); break;
    case 4: widen_plane(4, 0, 1.0f, w, count / 8, scale, offset, to); break;
    case 2: widen_plane(2, 0, 1.0f, w, count / 16, scale, offset, to); break;
    case 3:
        widen_plane(2, 0, 1.0f, w, count / 16, scale, offset, to);
        widen_plane(1, 1, 4.0f, w + count / 16 * PANEL, count / 32, scale, offset, to);
    }
}

// sums[rows][16] += x[rows][count] wide[count][16]
INLINE void multiply(const int rows, const float *x, int64_t stride, const float *wide, int64_t count, float *sums) {
    vf acc[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) acc[r][v] = load(sums + r * PANEL + v * LANES);
    for (int64_t i = 0; i < count; i++) {
        vf weight[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) weight[v] = load(wide + i * PANEL + v * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const vf value = splat(x[r * stride + i]);
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) acc[r][v] += weight[v] * value;
            __asm__ volatile("" ::: "memory");  // see linear_bf16.c
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) store(sums + r * PANEL + v * LANES, acc[r][v]);
}

static void widened_body(void *context, int64_t item) {
    const struct grouped *a = context;
    float wide[PIECE * PANEL], sums[MAX_ROWS * PANEL];
    const int64_t panels = (a->n + PANEL - 1) / PANEL, begin = item % a->panel_items * a->panels_per_item;
    const int64_t stop = begin + a->panels_per_item, top = item / a->panel_items * a->rows_per_item;
    const int64_t m = a->m - top < a->rows_per_item ? a->m - top : a->rows_per_item, height = even_rows(m, MR);
    for (int64_t p = begin; p < (stop < panels ? stop : panels); p++) {
        const uint32_t *w = a->w + p * a->words * PANEL;
        memset(sums, 0, (size_t)m * PANEL * 4);
        for (int64_t k = 0; k < a->padded; k += a->piece) {
            const int64_t count = a->padded - k < a->piece ? a->padded - k : a->piece;
            const int64_t real = a->k - k < count ? a->k - k : count;
            widen_piece(a, w, p, k, count, wide);
            w += count * a->bits / 32 * PANEL;
            for (int64_t row = 0; row < m; row += height) {
                const float *x = a->x + (top + row) * a->k + k;
                float *to = sums + row * PANEL;
                switch (m - row < height ? m - row : height) {
#define CASE(R) case R: multiply(R, x, a->k, wide, real, to); break;
                    EACH_HEIGHT(CASE)
#undef CASE
                }
            }
        }
        finish_panel(a->y, a->n, sums, top, m, p, a->bias);
    }
}

// --- both -----------------------------------------------------------------------------------------------------------

struct spread {
    const float *x;
    float *to;
    int64_t k, padded, piece, stride;
    int bits;
};

// A row as the fields want it: a copy for each plane, then the sums of its pieces.
static void spread_row(void *context, int64_t row) {
    const struct spread *a = context;
    const float *x = a->x + row * a->k;
    float *to = a->to + row * a->stride, *sums = to + a->padded * (a->bits == 3 ? 2 : 1);
    const int64_t main_bits = a->bits == 3 ? 2 : a->bits, per_half = 16 / main_bits;
    float by[16], by_bit[16];
    for (int j = 0; j < 16; j++) {
        by[j] = 1.0f / (float)(1 << (j % per_half * main_bits));
        by_bit[j] = 4.0f / (float)(1 << j);
    }
    for (int64_t i = 0; i < a->padded; i++) to[i] = i < a->k ? x[i] * by[i % 16] : 0.0f;
    if (a->bits == 3)
        for (int64_t i = 0; i < a->padded; i++) to[a->padded + i] = i < a->k ? x[i] * by_bit[i % 16] : 0.0f;
    for (int64_t k = 0; k < a->padded; k += a->piece) {
        float sum = 0;
        for (int64_t i = k; i < a->k && i < k + a->piece; i++) sum += x[i];
        *sums++ = sum;
    }
}

static __thread struct scratch scratch;

// group: k that share a scale, a divisor of k, and a multiple of 32 where it is less than k. 0; 1 if memory ran out.
EXPORT int linear_grouped(const float *x, const void *w, const void *scale, const float *bias, float *y, int64_t m,
                          int64_t n, int64_t k, int64_t group, int bits, int zero_point, int threads) {
    const int64_t unit = bits == 3 ? 32 : 32 / bits, padded = (k + unit - 1) / unit * unit;
    const int64_t piece = group < k && group < PIECE ? group : PIECE, pieces = (padded + piece - 1) / piece;
    struct grouped a = {x, w, scale, bias, y, m, n, k, padded, padded * bits / 32, group, k / group, piece,
                        padded * (bits == 3 ? 2 : 1) + pieces, 0, 1, m, bits, zero_point};
    const int64_t panels = (n + PANEL - 1) / PANEL;
    if (m > FUSED_ROWS) {
        const int64_t cached = BLOCK_BYTES / (k * 4) / MR * MR, least = 4 * MR;
        a.rows_per_item = even_rows(m, cached < least ? least : cached < MAX_ROWS ? cached : MAX_ROWS);
    } else {
        float *rows = grown(&scratch, m * a.stride * 4);
        if (!rows) return 1;
        struct spread spread = {x, rows, k, padded, piece, a.stride, bits};
        each_row(m, k, threads, spread_row, &spread);
        a.x = rows;
    }
    const int64_t row_items = (m + a.rows_per_item - 1) / a.rows_per_item, share = panels * row_items / (threads * 4);
    a.panels_per_item = share < 2 ? 2 : share > panels ? panels : share;
    a.panel_items = (panels + a.panels_per_item - 1) / a.panels_per_item;
    parallel_for(a.panel_items * row_items, threads, m > FUSED_ROWS ? widened_body : fused_body, &a);
    return 0;
}
