// y[M,N] = x[M,K] W[N,K]^T + bias in FP32, W in BF16 as [N/16][K/2][16][2]: one 32-bit lane holds two neighbouring k
// of one channel, so that a shift and a mask make two FP32 vectors, and no lane is ever summed across.
#include "common.h"

#define BLOCK_BYTES (192 << 10)

struct linear {
    const float *x;
    const uint32_t *w;
    const float *bias;
    float *y;
    int64_t m, n, k, panels_per_item, panel_items, rows_per_item;
};

// One k of every row and channel: the even or the odd half of the weight pairs at w.
INLINE void step(const int rows, const int panels, vf acc[MR][2 * NV], const uint32_t *w, int64_t panel_stride,
                 const float *x, int64_t x_stride, const int odd) {
    vf weight[2 * NV];
#pragma GCC unroll 8
    for (int v = 0; v < panels * NV; v++) {
        const vu pair = *(const vu_mem *)(w + (v / NV) * panel_stride + (v % NV) * LANES);
        weight[v] = odd ? (vf)(pair & 0xffff0000u) : (vf)(pair << 16);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        const vf value = splat(x[r * x_stride]);
#pragma GCC unroll 8
        for (int v = 0; v < panels * NV; v++) acc[r][v] += weight[v] * value;
        // Keeps the compiler from loading the next rows early: accumulators and weights already fill the registers.
        __asm__ volatile("" ::: "memory");
    }
}

// `rows` x (`panels` * 16) outputs. Meanwhile the next panel is fetched, a part of it by each tile of rows.
INLINE void tile(const int rows, const int panels, const struct linear *a, int64_t row, int64_t panel, int64_t fetch,
                 int64_t fetch_step) {
    const int64_t k = a->k, pairs = (k + 1) / 2;
    const uint32_t *w = a->w + panel * pairs * PANEL;
    const char *ahead = (const char *)w + fetch;
    const float *x = a->x + row * k;
    vf acc[MR][2 * NV];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < panels * NV; v++) acc[r][v] = (vf){0};
    for (int64_t i = 0; i < k / 2; i++) {
        __builtin_prefetch(ahead, 0, 2);
        ahead += fetch_step;
        step(rows, panels, acc, w + i * PANEL, pairs * PANEL, x + 2 * i, k, 0);
        step(rows, panels, acc, w + i * PANEL, pairs * PANEL, x + 2 * i + 1, k, 1);
    }
    if (k % 2) step(rows, panels, acc, w + (pairs - 1) * PANEL, pairs * PANEL, x + k - 1, k, 0);
    const int64_t first = panel * PANEL, left = a->n - first;
    float *y = a->y + row * a->n + first, edge[MR][2 * PANEL];
    const int full = left >= panels * PANEL;
    float *to = full ? y : edge[0];
    const int64_t stride = full ? a->n : 2 * PANEL;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < panels * NV; v++) store(to + r * stride + v * LANES, acc[r][v]);
    if (!full || a->bias)
        finish(y, a->n, to, stride, rows, full ? panels * PANEL : left, a->bias ? a->bias + first : NULL);
}

static void body(void *context, int64_t item) {
    const struct linear *a = context;
    const int64_t panels = (a->n + PANEL - 1) / PANEL, bytes = (a->k + 1) / 2 * PANEL * 4;
    const int64_t begin = item % a->panel_items * a->panels_per_item, stop = begin + a->panels_per_item;
    const int64_t end = stop < panels ? stop : panels;
    const int64_t top = item / a->panel_items * a->rows_per_item, left = a->m - top;
    const int64_t m = left < a->rows_per_item ? left : a->rows_per_item;
    const int64_t height = even_rows(m, MR), tiles = (m + height - 1) / height;
    for (int64_t p = begin; p < end;) {
        // Two panels at a time hide the FMA latency that one or two rows alone would leave exposed.
        const int both = m <= 2 && p + 1 < end;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t done = t * height, rows = m - done < height ? m - done : height;
            const int64_t fetch = (both ? 2 : 1) * bytes + t * bytes / tiles, each = PANEL * 4 / tiles;
            switch (both ? -rows : rows) {
#define CASE(R) case R: tile(R, 1, a, top + done, p, fetch, each); break;
                case -1: tile(1, 2, a, top, p, fetch, each); break;
                case -2: tile(2, 2, a, top, p, fetch, each); break;
                EACH_HEIGHT(CASE)
#undef CASE
            }
        }
        p += both ? 2 : 1;
    }
}

EXPORT void linear_bf16(const float *x, const void *w, const float *bias, float *y, int64_t m, int64_t n, int64_t k,
                        int threads) {
    struct linear a = {x, w, bias, y, m, n, k, 0, 0, 0};
    // An item is a block of rows that stays in the L2 cache times a run of panels: long enough for the prefetchers to
    // stream, short enough that no thread idles at the end.
    const int64_t cached = BLOCK_BYTES / (k * 4), least = 4 * MR;
    a.rows_per_item = even_rows(m, cached > least ? cached / MR * MR : least);
    const int64_t row_items = (m + a.rows_per_item - 1) / a.rows_per_item;
    const int64_t panels = (n + PANEL - 1) / PANEL, share = panels * row_items / (threads * 4);
    a.panels_per_item = share < 2 ? 2 : share > panels ? panels : share & ~1LL;
    a.panel_items = (panels + a.panels_per_item - 1) / a.panels_per_item;
    parallel_for(a.panel_items * row_items, threads, body, &a);
}

struct lookup {
    const uint32_t *w;
    const int64_t *ids;
    float *y;
    int64_t k;
};

static void lookup_body(void *context, int64_t row) {
    const struct lookup *a = context;
    const int64_t panel = a->ids[row] / PANEL, channel = a->ids[row] % PANEL, k = a->k;
    const uint32_t *from = a->w + panel * ((k + 1) / 2) * PANEL + channel;
    float *y = a->y + row * k;
    for (int64_t i = 0; i < k / 2; i++) {
        y[2 * i] = widen((uint16_t)from[i * PANEL]);
        y[2 * i + 1] = widen((uint16_t)(from[i * PANEL] >> 16));
    }
    if (k % 2) y[k - 1] = widen((uint16_t)from[k / 2 * PANEL]);
}

// y[M,K] = rows ids[M] of W. 0; 1 if an id is not one of its N rows.
EXPORT int rows_bf16(const void *w, const int64_t *ids, float *y, int64_t m, int64_t n, int64_t k, int threads) {
    for (int64_t row = 0; row < m; row++)
        if (ids[row] < 0 || ids[row] >= n) return 1;
    struct lookup a = {w, ids, y, k};
    each_row(m, k, threads, lookup_body, &a);
    return 0;
}
