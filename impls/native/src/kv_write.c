// Keys and values of new tokens to their slots in 8 bits: each head's vector with a BF16 scale of its own. Bit for bit
// what impls/kv_cache/quantized.py says.
#include "common.h"

#define TOKENS 16  // of an item

struct write {
    const void *from[2];  // keys, values: [tokens, heads, dim]
    uint8_t *values[2];   // [slots, heads, dim]
    uint16_t *scales[2];  // [slots, heads]
    const int64_t *slot;  // -1: stores nothing
    int64_t stride[2][2];  // of `from`, in elements: token, head
    int64_t num_tokens, num_slots, heads, dim;
    int32_t bf16, fp8, threads;
};

// |x| <= 448, rounded half to even: a subnormal by the adder, which has its last bit where E4M3 has its own.
INLINE vu to_e4m3(vf x) {
    const vu sign = (vu)x & 0x80000000u, bits = (vu)x ^ sign;
    const vf anchor = splat(16384.0f);
    const vu subnormal = (vu)((vf)bits + anchor) - (vu)anchor;
    const vu normal = (bits - (120u << 23) + 0x7ffff + ((bits >> 20) & 1)) >> 20;
    const vu is_subnormal = (vu)(bits < 121u << 23);
    return (subnormal & is_subnormal) | (normal & ~is_subnormal) | sign >> 24;
}

INLINE vu to_int8(vf x) {
    return (vu)(x + 12582912.0f);  // 1.5 * 2^23: the integer part in the low bits, half to even
}

INLINE void store_vector(const struct write *a, int which, const void *from, int64_t place, const int fp8) {
    const float largest = fp8 ? 448.0f : 127.0f, reciprocal = fp8 ? (float)(1 / 448.0) : (float)(1 / 127.0);
    const int64_t wide = (a->dim + LANES - 1) / LANES * LANES;
    float row[wide];
    if (a->bf16)
        for (int64_t d = 0; d < a->dim; d++) row[d] = widen(((const uint16_t *)from)[d]);
    else
        memcpy(row, from, (size_t)a->dim * 4);
    for (int64_t d = a->dim; d < wide; d++) row[d] = 0;
    vf most = {0};
    for (int64_t d = 0; d < wide; d += LANES) most = max_f(most, (vf)((vu)load(row + d) & 0x7fffffffu));
    float peak = most[0];
    for (int i = 1; i < LANES; i++) peak = most[i] > peak ? most[i] : peak;
    const float wanted = peak * reciprocal, smallest = 0x1p-100f;
    const uint16_t scale = to_bf16(wanted > smallest ? wanted : smallest);
    a->scales[which][place] = scale;
    const vf factor = splat(1.0f / widen(scale)), high = splat(largest);
    uint8_t *to = a->values[which] + place * a->dim;
    for (int64_t d = 0; d < wide; d += LANES) {
        vf x = load(row + d) * factor;
        x = select_f(x > high, high, x);
        x = select_f(x < -high, -high, x);  // what is clamped is rounded already: no fused multiply-add may skip that
        const vu kept = fp8 ? to_e4m3(x) : to_int8(x);
        const int64_t count = a->dim - d < LANES ? a->dim - d : LANES;
        for (int64_t i = 0; i < count; i++) to[d + i] = (uint8_t)kept[i];
    }
}

INLINE void write_tokens(const struct write *a, int64_t item, const int fp8) {
    const int64_t begin = item * TOKENS, end = begin + TOKENS < a->num_tokens ? begin + TOKENS : a->num_tokens;
    for (int64_t token = begin; token < end; token++) {
        if (a->slot[token] < 0) continue;
        for (int which = 0; which < 2; which++)
            for (int64_t head = 0; head < a->heads; head++) {
                const int64_t first = token * a->stride[which][0] + head * a->stride[which][1];
                const char *from = (const char *)a->from[which] + first * (a->bf16 ? 2 : 4);
                store_vector(a, which, from, a->slot[token] * a->heads + head, fp8);
            }
    }
}

static void write_int8(void *a, int64_t item) { write_tokens(a, item, 0); }
static void write_fp8(void *a, int64_t item) { write_tokens(a, item, 1); }

// 0; 1 if a slot lies outside, and then nothing is stored.
EXPORT int write_quantized(struct write *a) {
    for (int64_t token = 0; token < a->num_tokens; token++)
        if (a->slot[token] < -1 || a->slot[token] >= a->num_slots) return 1;
    parallel_for((a->num_tokens + TOKENS - 1) / TOKENS, a->threads, a->fp8 ? write_fp8 : write_int8, a);
    return 0;
}
