// Causal attention straight over a block table: nothing is gathered, no slot past a sequence's length is read.
// One item is a KV head of a tile of queries: the query heads that share the KV head are rows beside each other, so its
// keys and values are widened once for all of them. Softmax is online, in FP32, base 2. Keys and values of 8 bits are
// never multiplied by their scales: those of the keys go to the scores, those of the values to the weights.
#include "common.h"
#include <alloca.h>

#define KEYS 64        // keys and values widened at a time
#define ROWS 48        // query rows (tokens x heads of the group) of an item, at least one token
#define LEAST_SPLIT 256  // keys below which cutting a sequence costs more than it balances

enum type { FP32, BF16, INT8, FP8 };  // FP8: E4M3, never NaN

struct attention {
    const void *q, *k, *v;
    void *out;
    const int32_t *query_start, *seq_lens, *block_table;
    const uint16_t *k_scale, *v_scale;  // BF16, of keys and values of 8 bits
    int64_t num_seqs, num_tokens, num_blocks, heads, kv_heads, dim, block_size, table_width;
    int64_t q_stride[2], k_stride[3], v_stride[3];  // in elements: (token, head) and (block, slot, head)
    int64_t k_scale_stride[3], v_scale_stride[3];
    float scale;
    int32_t q_type, kv_type, threads;
    // Derived from the rest, in the kernel's own copy.
    int64_t group, wide, tile_tokens, splits, tiles;
    int64_t *tiles_before;
    float *partial;
};

INLINE int64_t bytes_of(enum type type) { return type == FP32 ? 4 : type == BF16 ? 2 : 1; }

INLINE const void *at(const void *base, int64_t element, enum type type) {
    return (const char *)base + element * bytes_of(type);
}

// FP8 as 1/256 of its value: that is what its bits mean in FP16, moved to where FP16 has its sign, exponent and mantissa.
#define FP8_UNIT 256.0f

INLINE float element(const void *p, int64_t i, enum type type) {
    if (type == FP32) return ((const float *)p)[i];
    if (type == BF16) return widen(((const uint16_t *)p)[i]);
    if (type == INT8) return ((const int8_t *)p)[i];
    const uint32_t bits = ((const uint8_t *)p)[i], low = bits & 0x7f;
    const uint32_t normal = (low << 20) + (112u << 23), sign = (bits & 0x80) << 24;
    float x = (float)low * 0x1p-17f;
    uint32_t subnormal;
    memcpy(&subnormal, &x, 4);
    const uint32_t found = (low < 8 ? subnormal : normal) | sign;
    memcpy(&x, &found, 4);
    return x;
}

#if defined(__AVX2__) && defined(__F16C__)
INLINE __m256 load8(const void *row, int64_t d, enum type type) {
    if (type == FP32) return _mm256_loadu_ps((const float *)row + d);
    if (type == BF16) {
        const __m128i bits = _mm_loadu_si128((const __m128i *)((const uint16_t *)row + d));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)((const char *)row + d));
    if (type == INT8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    const __m128i moved = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);  // the sign is in bit 14 as well as in 15
    return _mm256_cvtph_ps(_mm_and_si128(moved, _mm_set1_epi16((int16_t)0xbfff)));
}
#endif

#if defined(__AVX512BW__)
INLINE __m512 load16(const void *row, int64_t d, enum type type) {  // of 8 bits each
    const __m128i bytes = _mm_loadu_si128((const __m128i *)((const char *)row + d));
    if (type == INT8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16((int16_t)0xbfff)));
}
#endif

INLINE void widen_row(float *to, const void *from, int64_t count, enum type type) {
    if (type == FP32) {
        memcpy(to, from, (size_t)count * 4);
        return;
    }
    int64_t i = 0;
#if defined(__AVX512BW__)
    if (type >= INT8)
        for (; i + 16 <= count; i += 16) _mm512_storeu_ps(to + i, load16(from, i, type));
#elif defined(__AVX2__) && defined(__F16C__)
    if (type >= INT8)
        for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, load8(from, i, type));
#endif
    for (; i < count; i++) to[i] = element(from, i, type);
}

// C[rows][16] = or += A[rows][k] B[k][16].
INLINE void tile(const int rows, const int add, const float *a, int64_t a_stride, const float *b, int64_t b_stride,
                 int64_t k, float *c, int64_t c_stride) {
    vf acc[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) acc[r][v] = add ? load(c + r * c_stride + v * LANES) : (vf){0};
    for (int64_t i = 0; i < k; i++) {
        vf row[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) row[v] = load(b + i * b_stride + v * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const vf value = splat(a[r * a_stride + i]);
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) acc[r][v] += row[v] * value;
            __asm__ volatile("" ::: "memory");  // see linear_bf16.c
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) store(c + r * c_stride + v * LANES, acc[r][v]);
}

INLINE void multiply(const int add, int64_t rows, const float *a, int64_t a_stride, const float *b, int64_t b_stride,
                     int64_t k, float *c, int64_t c_stride) {
    const int64_t height = even_rows(rows, MR);
    for (int64_t r = 0; r < rows; r += height) {
        switch (rows - r < height ? rows - r : height) {
#define CASE(R) \
    case R: tile(R, add, a + r * a_stride, a_stride, b, b_stride, k, c + r * c_stride, c_stride); break;
            CASE(1) CASE(2) CASE(3) CASE(4)
#if MR >= 6
            CASE(5) CASE(6)
#endif
#if MR >= 12
            CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
        }
    }
}

// Two compiled copies, not one a call: the tiles are long.
static __attribute__((noinline)) void product(int64_t rows, const float *a, int64_t a_stride, const float *b,
                                              int64_t b_stride, int64_t k, float *c, int64_t c_stride) {
    multiply(0, rows, a, a_stride, b, b_stride, k, c, c_stride);
}

static __attribute__((noinline)) void add_product(int64_t rows, const float *a, int64_t a_stride, const float *b,
                                                  int64_t b_stride, int64_t k, float *c, int64_t c_stride) {
    multiply(1, rows, a, a_stride, b, b_stride, k, c, c_stride);
}

#if defined(__AVX2__) && defined(__F16C__)
// Eight rows of eight values, turned: to[d * 16 + row].
INLINE void transpose8(float *to, const void *const *rows, int64_t d, enum type type) {
    __m256 x[8], y[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) x[i] = load8(rows[i], d, type);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        x[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
        x[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xee);
        x[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
        x[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * PANEL, _mm256_permute2f128_ps(x[i], x[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * PANEL, _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
    }
}
#endif

// Sixteen keys as a panel [wide][16], so that a lane is a key. Missing keys (NULL) and dimensions are zeros.
INLINE void key_panel(float *to, const void *const *rows, int count, int64_t dim, int64_t wide, enum type type) {
    static const float zeros[512];
    const void *keys[PANEL];
    for (int j = 0; j < PANEL; j++) keys[j] = j < count ? rows[j] : zeros;
    int64_t d = 0;
#if defined(__AVX2__) && defined(__F16C__)
    for (; d + 8 <= dim; d += 8)
        for (int j = 0; j < PANEL; j += 8) transpose8(to + d * PANEL + j, keys + j, d, type);
#endif
    for (; d < dim; d++)
        for (int j = 0; j < PANEL; j++) to[d * PANEL + j] = element(keys[j], d, type);
    memset(to + dim * PANEL, 0, (size_t)((wide - dim) * PANEL) * 4);
}

struct item {
    int64_t seq, kv_head, first, tokens, rows;  // query tokens first.. of the sequence
    int64_t first_position, last_key;           // keys 0..last_key - 1 are seen by some row
};

static struct item find_item(const struct attention *a, int64_t index) {
    // The last tiles see the most keys: begun first, they leave no thread waiting at the end.
    const int64_t wanted = a->tiles - 1 - index / a->kv_heads;
    int64_t low = 0, high = a->num_seqs;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (a->tiles_before[middle] <= wanted) low = middle;
        else high = middle;
    }
    const int64_t query_len = a->query_start[low + 1] - a->query_start[low];
    struct item item = {low, index % a->kv_heads, (wanted - a->tiles_before[low]) * a->tile_tokens, 0, 0, 0, 0};
    item.tokens = query_len - item.first < a->tile_tokens ? query_len - item.first : a->tile_tokens;
    item.rows = item.tokens * a->group;
    item.first_position = a->seq_lens[low] - query_len + item.first;
    item.last_key = item.first_position + item.tokens;
    return item;
}

struct rows {
    int64_t count;
    const void *keys[KEYS], *values[KEYS];
    const uint16_t *k_scale[KEYS], *v_scale[KEYS];
};

INLINE int64_t offset(const int64_t *stride, int64_t block, int64_t slot, int64_t head) {
    return block * stride[0] + slot * stride[1] + head * stride[2];
}

// Where the next keys and values lie, from `key` on; fetches them, for they are strided and no hardware guesses them.
INLINE void find_rows(const struct attention *a, const struct item *item, int64_t key, int64_t end, enum type type,
                      struct rows *rows) {
    rows->count = end - key < KEYS ? end - key : KEYS;
    if (rows->count <= 0) return;
    const int32_t *block = a->block_table + item->seq * a->table_width + key / a->block_size;
    const int64_t bytes = a->dim * bytes_of(type), head = item->kv_head;
    int64_t slot = key % a->block_size;
    for (int64_t j = 0; j < rows->count; j++) {
        rows->keys[j] = at(a->k, offset(a->k_stride, *block, slot, head), type);
        rows->values[j] = at(a->v, offset(a->v_stride, *block, slot, head), type);
        for (int64_t line = 0; line < bytes; line += 64) {
            __builtin_prefetch((const char *)rows->keys[j] + line);
            __builtin_prefetch((const char *)rows->values[j] + line);
        }
        if (type >= INT8) {
            rows->k_scale[j] = a->k_scale + offset(a->k_scale_stride, *block, slot, head);
            rows->v_scale[j] = a->v_scale + offset(a->v_scale_stride, *block, slot, head);
            __builtin_prefetch(rows->k_scale[j]);
            __builtin_prefetch(rows->v_scale[j]);
        }
        if (++slot == a->block_size) {
            slot = 0;
            block++;
        }
    }
}

// The scales of `count` keys or values in FP32, zeros up to the end of their panel.
INLINE void read_scales(float *to, const uint16_t *const *scales, int64_t count, enum type type) {
    for (int64_t j = 0; j < count; j++) to[j] = widen(*scales[j]) * (type == FP8 ? FP8_UNIT : 1.0f);
    for (int64_t j = count; j % PANEL; j++) to[j] = 0;
}

// One step of the online softmax: scores of `count` keys from `key` on become weights in place. k_scale multiplies the
// scores and v_scale the weights that meet the values; NULL: nothing does.
INLINE void weigh(const struct attention *a, const struct item *item, int64_t key, int64_t count, const float *k_scale,
                  const float *v_scale, float *scores, float *acc, float *top, float *sum) {
    const int64_t padded = (count + PANEL - 1) / PANEL * PANEL;
    for (int64_t r = 0; r < item->rows; r++) {
        float *s = scores + r * KEYS;
        int64_t seen = item->first_position + r / a->group + 1 - key;
        if (seen <= 0) {
            memset(s, 0, (size_t)padded * 4);
            continue;
        }
        if (seen > count) seen = count;
        if (k_scale)
            for (int64_t c = 0; c < padded; c += LANES) store(s + c, load(s + c) * load(k_scale + c));
        for (int64_t c = seen; c < padded; c++) s[c] = -INFINITY;
        vf best = splat(top[r]);
        for (int64_t c = 0; c < padded; c += LANES) best = max_f(best, load(s + c));
        float peak = best[0];
        for (int i = 1; i < LANES; i++) peak = best[i] > peak ? best[i] : peak;
        vf total = {0};
        for (int64_t c = 0; c < padded; c += LANES) {
            const vf p = exp2_vector(load(s + c) - peak);
            store(s + c, v_scale ? p * load(v_scale + c) : p);
            total += p;
        }
        const float shrink = exp2f(top[r] - peak);
        float added = 0;
        for (int i = 0; i < LANES; i++) added += total[i];
        sum[r] = sum[r] * shrink + added;
        if (shrink != 1.0f)
            for (int64_t d = 0; d < a->wide; d += LANES)
                store(acc + r * a->wide + d, load(acc + r * a->wide + d) * shrink);
        top[r] = peak;
    }
}

INLINE void write_row(const struct attention *a, const struct item *item, int64_t r, const float *acc, float sum) {
    const int64_t token = a->query_start[item->seq] + item->first + r / a->group;
    const int64_t head = item->kv_head * a->group + r % a->group, place = (token * a->heads + head) * a->dim;
    const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
    if (a->q_type == BF16)
        for (int64_t d = 0; d < a->dim; d++) ((uint16_t *)a->out)[place + d] = to_bf16(acc[d] * inverse);
    else
        for (int64_t d = 0; d < a->dim; d++) ((float *)a->out)[place + d] = acc[d] * inverse;
}

INLINE void attend(const struct attention *a, int64_t index, const enum type type) {
    const struct item item = find_item(a, index / a->splits);
    const int64_t rows = item.rows, wide = a->wide, dim = a->dim;
    float *q = alloca((size_t)(rows * (2 * wide + KEYS + 2) + 2 * KEYS * wide) * 4);
    float *acc = q + rows * wide, *scores = acc + rows * wide, *top = scores + rows * KEYS, *sum = top + rows;
    float *keys = sum + rows, *values = keys + KEYS * wide;
    float k_scale[KEYS], v_scale[KEYS];
    const int scaled = type >= INT8;

    for (int64_t r = 0; r < rows; r++) {
        const int64_t token = a->query_start[item.seq] + item.first + r / a->group;
        const int64_t head = item.kv_head * a->group + r % a->group;
        widen_row(q + r * wide, at(a->q, token * a->q_stride[0] + head * a->q_stride[1], a->q_type), dim, a->q_type);
        for (int64_t d = 0; d < dim; d++) q[r * wide + d] *= a->scale * 1.44269504f;  // log2(e)
        for (int64_t d = dim; d < wide; d++) q[r * wide + d] = 0;
        top[r] = -INFINITY;
        sum[r] = 0;
    }
    memset(acc, 0, (size_t)(rows * wide) * 4);

    const int64_t share = ((item.last_key + a->splits - 1) / a->splits + KEYS - 1) / KEYS * KEYS;
    const int64_t begin = index % a->splits * share;
    const int64_t end = begin + share < item.last_key ? begin + share : item.last_key;
    struct rows turns[2], *here = turns, *ahead = turns + 1;
    find_rows(a, &item, begin, end, type, ahead);
    for (int64_t key = begin; key < end; key += KEYS) {
        struct rows *const turn = here;
        here = ahead, ahead = turn;
        const int64_t count = here->count;
        find_rows(a, &item, key + KEYS, end, type, ahead);
        for (int64_t j = 0; j < count; j++) {
            widen_row(values + j * wide, here->values[j], dim, type);
            for (int64_t d = dim; d < wide; d++) values[j * wide + d] = 0;
        }
        if (scaled) {
            read_scales(k_scale, here->k_scale, count, type);
            read_scales(v_scale, here->v_scale, count, type);
        }
        for (int64_t j = 0; j < count; j += PANEL) {
            const int lanes = count - j < PANEL ? (int)(count - j) : PANEL;
            key_panel(keys + j * wide, here->keys + j, lanes, dim, wide, type);
            product(rows, q, wide, keys + j * wide, PANEL, wide, scores + j, KEYS);
        }
        weigh(a, &item, key, count, scaled ? k_scale : NULL, scaled ? v_scale : NULL, scores, acc, top, sum);
        for (int64_t d = 0; d < wide; d += PANEL)
            add_product(rows, scores, KEYS, values + d, wide, count, acc + d, wide);
    }

    for (int64_t r = 0; r < rows; r++) {
        if (a->splits == 1) {
            write_row(a, &item, r, acc + r * wide, sum[r]);
            continue;
        }
        float *to = a->partial + (index * a->tile_tokens * a->group + r) * (wide + 2);
        memcpy(to, acc + r * wide, (size_t)wide * 4);
        to[wide] = top[r];
        to[wide + 1] = sum[r];
    }
}

static void attend_fp32(void *a, int64_t index) { attend(a, index, FP32); }
static void attend_bf16(void *a, int64_t index) { attend(a, index, BF16); }
static void attend_int8(void *a, int64_t index) { attend(a, index, INT8); }
static void attend_fp8(void *a, int64_t index) { attend(a, index, FP8); }
static const loop_body attend_each[] = {attend_fp32, attend_bf16, attend_int8, attend_fp8};  // by type

static void merge(void *context, int64_t index) {
    const struct attention *a = context;
    const struct item item = find_item(a, index);
    const int64_t wide = a->wide, stride = a->tile_tokens * a->group * (wide + 2);
    float acc[wide];
    for (int64_t r = 0; r < item.rows; r++) {
        const float *part = a->partial + index * a->splits * stride + r * (wide + 2);
        float peak = -INFINITY, sum = 0;
        for (int64_t s = 0; s < a->splits; s++) peak = fmaxf(peak, part[s * stride + wide]);
        memset(acc, 0, sizeof acc);
        for (int64_t s = 0; s < a->splits; s++) {
            const float *from = part + s * stride, factor = exp2f(from[wide] - peak);
            for (int64_t d = 0; d < wide; d++) acc[d] += factor * from[d];
            sum += factor * from[wide + 1];
        }
        write_row(a, &item, r, acc, sum);
    }
}

// What the tables say must lie inside the tensors: a wrong index is an error here, not a crash.
static int inside(const struct attention *a) {
    if (a->query_start[0] != 0 || a->query_start[a->num_seqs] > a->num_tokens) return 0;
    for (int64_t s = 0; s < a->num_seqs; s++) {
        const int64_t query_len = a->query_start[s + 1] - a->query_start[s], length = a->seq_lens[s];
        if (query_len < 0 || length < query_len || length > a->table_width * a->block_size) return 0;
        for (int64_t b = 0; b * a->block_size < length; b++) {
            const int32_t block = a->block_table[s * a->table_width + b];
            if (block < 0 || block >= a->num_blocks) return 0;
        }
    }
    return 1;
}

// 0; 1 if a table points outside its tensor; 2 if memory ran out.
EXPORT int paged_attention(const struct attention *given) {
    if (!inside(given)) return 1;
    struct attention call = *given, *a = &call;
    a->group = a->heads / a->kv_heads;
    a->wide = (a->dim + PANEL - 1) / PANEL * PANEL;
    a->tile_tokens = a->group < ROWS ? ROWS / a->group : 1;
    a->tiles_before = malloc((size_t)(a->num_seqs + 1) * sizeof *a->tiles_before);
    if (!a->tiles_before) return 2;
    int64_t longest = 0, widest = 0;
    a->tiles = 0;
    a->partial = NULL;
    for (int64_t s = 0; s < a->num_seqs; s++) {
        const int64_t query_len = a->query_start[s + 1] - a->query_start[s];
        a->tiles_before[s] = a->tiles;
        a->tiles += (query_len + a->tile_tokens - 1) / a->tile_tokens;
        if (query_len > widest) widest = query_len;
        if (query_len && a->seq_lens[s] > longest) longest = a->seq_lens[s];
    }
    a->tiles_before[a->num_seqs] = a->tiles;
    if (widest < a->tile_tokens) a->tile_tokens = widest > 0 ? widest : 1;
    // Too few items for the threads: cut the keys of each as well, and merge the parts.
    const int64_t items = a->tiles * a->kv_heads, enough = 3 * a->threads;
    a->splits = items && a->threads > 1 && items < enough ? (enough + items - 1) / items : 1;
    if (a->splits > longest / LEAST_SPLIT) a->splits = longest / LEAST_SPLIT > 1 ? longest / LEAST_SPLIT : 1;
    if (a->splits > 1) {
        const int64_t floats = items * a->splits * a->tile_tokens * a->group * (a->wide + 2);
        if (!(a->partial = malloc((size_t)floats * 4))) a->splits = 1;
    }
    parallel_for(items * a->splits, a->threads, attend_each[a->kv_type], a);
    if (a->splits > 1) parallel_for(items, a->threads, merge, a);
    const int64_t written = a->query_start[a->num_seqs], row = a->heads * a->dim * bytes_of(a->q_type);
    memset((char *)a->out + written * row, 0, (size_t)((a->num_tokens - written) * row));
    free(a->partial);
    free(a->tiles_before);
    return 0;
}
