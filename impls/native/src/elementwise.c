// What lies between the matrix products of a decoder layer, on FP32 rows: each is one pass over rows that fit in L1.
#include "common.h"

#define REGION (1 << 17)  // floats (some 25 us of work) from which on a parallel region, 5-10 us, is worth it
#define ITEM (1 << 13)    // floats that a thread takes at a time

struct row_loop {
    loop_body body;
    void *context;
    int64_t rows, each;
};

static void run_rows(void *context, int64_t item) {
    const struct row_loop *loop = context;
    const int64_t stop = (item + 1) * loop->each, end = stop < loop->rows ? stop : loop->rows;
    for (int64_t row = item * loop->each; row < end; row++) loop->body(loop->context, row);
}

static void for_rows(int64_t rows, int64_t floats, int threads, loop_body body, void *context) {
    struct row_loop loop = {body, context, rows, floats < ITEM ? ITEM / (floats + 1) : 1};
    parallel_for((rows + loop.each - 1) / loop.each, rows * floats < REGION ? 1 : threads, run_rows, &loop);
}

struct rms_norm {
    float *x;
    const float *add, *weight;
    float *y;
    int64_t k, x_stride, add_stride;
    float eps;
};

static float sum_of_squares(const float *x, int64_t k) {
    vf lanes[4] = {{0}};  // four sums: one alone would wait for its own latency
    int64_t i = 0;
    for (; i + 4 * LANES <= k; i += 4 * LANES)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) lanes[v] += load(x + i + v * LANES) * load(x + i + v * LANES);
    const vf all = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
    float sum = 0;
    for (int c = 0; c < LANES; c++) sum += all[c];
    for (; i < k; i++) sum += x[i] * x[i];
    return sum;
}

static void rms_norm_row(void *context, int64_t row) {
    const struct rms_norm *a = context;
    float *x = a->x + row * a->x_stride;
    const float *restrict add = a->add + row * a->add_stride, *restrict weight = a->weight;
    float *restrict y = a->y + row * a->k;
    if (a->add)
        for (int64_t i = 0; i < a->k; i++) x[i] += add[i];
    const float scale = 1.0f / sqrtf(sum_of_squares(x, a->k) / (float)a->k + a->eps);
    for (int64_t i = 0; i < a->k; i++) y[i] = x[i] * scale * weight[i];
}

// y = x / sqrt(mean(x^2) + eps) * weight; with `add`, x += add comes first and stays in x.
EXPORT void rms_norm(float *x, const float *add, const float *weight, float *y, int64_t rows, int64_t k,
                     int64_t x_stride, int64_t add_stride, float eps, int threads) {
    struct rms_norm a = {x, add, weight, y, k, x_stride, add_stride, eps};
    for_rows(rows, k, threads, rms_norm_row, &a);
}

struct silu_and_mul {
    const float *gate_up;
    float *y;
    int64_t k, stride;
};

// x / (1 + e^-x), from e^-|x|, which cannot overflow; an infinity or NaN comes through the product with x.
INLINE vf silu(vf x) {
    const vf e = exp2_vector((vf)((vi)x | (vi)splat(-0.0f)) * 1.44269504f);
    return x * select_f(x < 0.0f, e, splat(1.0f)) / (e + 1.0f);
}

static void silu_and_mul_row(void *context, int64_t row) {
    const struct silu_and_mul *a = context;
    const float *gate = a->gate_up + row * a->stride, *up = gate + a->k;
    float *y = a->y + row * a->k;
    int64_t i = 0;
    for (; i + LANES <= a->k; i += LANES) store(y + i, silu(load(gate + i)) * load(up + i));
    if (i == a->k) return;
    float rest[LANES] = {0};
    memcpy(rest, gate + i, (size_t)(a->k - i) * 4);
    store(rest, silu(load(rest)));
    for (int c = 0; i < a->k; i++, c++) y[i] = rest[c] * up[i];
}

// y[rows][k] = silu(gate) * up, of rows that hold k gates and then k ups.
EXPORT void silu_and_mul(const float *gate_up, float *y, int64_t rows, int64_t k, int64_t stride, int threads) {
    struct silu_and_mul a = {gate_up, y, k, stride};
    for_rows(rows, 4 * k, threads, silu_and_mul_row, &a);  // an exponential and a division take as long as 4 floats
}

struct rotate {
    const float *x, *cos, *sin;
    float *y;
    int64_t heads, dim, row_stride, head_stride;
};

static void rotate_row(void *context, int64_t row) {
    const struct rotate *a = context;
    const int64_t half = a->dim / 2;
    const float *cos = a->cos + row * a->dim, *sin = a->sin + row * a->dim;
    for (int64_t h = 0; h < a->heads; h++) {
        const float *x = a->x + row * a->row_stride + h * a->head_stride;
        float *restrict low = a->y + (row * a->heads + h) * a->dim, *restrict high = low + half;
        for (int64_t d = 0; d < half; d++) low[d] = x[d] * cos[d] + x[half + d] * sin[d];
        for (int64_t d = 0; d < half; d++) high[d] = x[half + d] * cos[half + d] + x[d] * sin[half + d];
    }
}

// y[rows][heads][dim] = x cos + swap_halves(x) sin; cos and sin [rows][dim], the first half of sin negated.
EXPORT void rotate(const float *x, const float *cos, const float *sin, float *y, int64_t rows, int64_t heads,
                   int64_t dim, int64_t row_stride, int64_t head_stride, int threads) {
    struct rotate a = {x, cos, sin, y, heads, dim, row_stride, head_stride};
    for_rows(rows, heads * dim, threads, rotate_row, &a);
}
