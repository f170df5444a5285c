// y[M,N] = x[M,K] W[N,K]^T + bias in FP32, W in BF16 as [N/16][K/2][16][2]: one 32-bit lane holds two neighbouring k
// of one channel, so that a shift and a mask make two FP32 vectors, and no lane is ever summed across.
#include "common.h"

struct linear {
    const float *x;
    const uint32_t *w;
    const float *bias;
    float *y;
    int64_t m, n, k, panels_per_item;
};

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
#pragma GCC unroll 8
        for (int v = 0; v < panels * NV; v++) {
            const vu pair = *(const vu_mem *)(w + (v / NV) * pairs * PANEL + i * PANEL + (v % NV) * LANES);
            const vf even = (vf)(pair << 16), odd = (vf)(pair & 0xffff0000u);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                acc[r][v] += even * x[r * k + 2 * i];
                acc[r][v] += odd * x[r * k + 2 * i + 1];
            }
        }
    }
    if (k % 2)
        for (int v = 0; v < panels * NV; v++) {
            const vu pair = *(const vu_mem *)(w + (v / NV) * pairs * PANEL + (pairs - 1) * PANEL + (v % NV) * LANES);
            for (int r = 0; r < rows; r++) acc[r][v] += (vf)(pair << 16) * x[r * k + k - 1];
        }
    const int64_t first = panel * PANEL;
    const int full = first + panels * PANEL <= a->n;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        float *y = a->y + (row + r) * a->n + first;
        float edge[2 * PANEL];
#pragma GCC unroll 8
        for (int v = 0; v < panels * NV; v++) store((full ? y : edge) + v * LANES, acc[r][v]);
        if (!full) memcpy(y, edge, (size_t)(a->n - first) * 4);
        if (a->bias)
            for (int64_t c = 0; c < panels * PANEL && first + c < a->n; c++) y[c] += a->bias[first + c];
    }
}

static void panels_body(void *context, int64_t item) {
    const struct linear *a = context;
    const int64_t panels = (a->n + PANEL - 1) / PANEL, bytes = (a->k + 1) / 2 * PANEL * 4;
    const int64_t begin = item * a->panels_per_item;
    const int64_t end = begin + a->panels_per_item < panels ? begin + a->panels_per_item : panels;
    const int64_t step = even_rows(a->m, MR), tiles = (a->m + step - 1) / step;
    for (int64_t p = begin; p < end;) {
        // Two panels at a time hide the FMA latency that one or two rows alone would leave exposed.
        const int both = a->m <= 2 && p + 1 < end;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t row = t * step, rows = a->m - row < step ? a->m - row : step;
            const int64_t fetch = both ? 2 * bytes : bytes + t * bytes / tiles, each = PANEL * 4 / tiles;
            if (both) {
                if (rows == 1) tile(1, 2, a, row, p, fetch, PANEL * 4);
                else tile(2, 2, a, row, p, fetch, PANEL * 4);
                continue;
            }
            switch (rows) {
#define CASE(R) case R: tile(R, 1, a, row, p, fetch, each); break;
                CASE(1) CASE(2) CASE(3) CASE(4)
#if MR >= 6
                CASE(5) CASE(6)
#endif
#if MR >= 12
                CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
            }
        }
        p += both ? 2 : 1;
    }
}

EXPORT void linear_bf16(const float *x, const void *w, const float *bias, float *y, int64_t m, int64_t n, int64_t k,
                        int threads) {
    struct linear a = {x, w, bias, y, m, n, k, 0};
    // Items of at least 4 panels stream long enough for the prefetchers; few items leave threads idle at the end.
    const int64_t panels = (n + PANEL - 1) / PANEL, share = panels / (threads * 4);
    a.panels_per_item = share < 2 ? 2 : share & ~1LL;
    parallel_for((panels + a.panels_per_item - 1) / a.panels_per_item, threads, panels_body, &a);
}
