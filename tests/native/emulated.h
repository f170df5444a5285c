// AVX512, VNNI and AVX-VNNI on a CPU that has AVX2 alone: test_native_branches.py puts it before each source. An
// instruction of 512 bits is two of 256; dot products are spelt as Intel's manual does. `emulated` counts what is beyond
// AVX2, so that the test knows that the branch which it means was compiled.
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

__attribute__((weak, visibility("default"))) int64_t emulated;

#define HALVES(type, half, name, params, body)              \
    static inline type emulated_##name params {             \
        half h[2];                                          \
        for (int i = 0; i < 2; i++) h[i] = body;            \
        type result;                                        \
        memcpy(&result, h, sizeof result);                  \
        return result;                                      \
    }

typedef union { __m512i all; __m256i half[2]; } two;

HALVES(__m512i, __m256i, add_epi16, (__m512i a, __m512i b), _mm256_add_epi16(((two)a).half[i], ((two)b).half[i]))
HALVES(__m512i, __m256i, add_epi32, (__m512i a, __m512i b), _mm256_add_epi32(((two)a).half[i], ((two)b).half[i]))
HALVES(__m512i, __m256i, madd_epi16, (__m512i a, __m512i b),
       (emulated++, _mm256_madd_epi16(((two)a).half[i], ((two)b).half[i])))
HALVES(__m512i, __m256i, maddubs_epi16, (__m512i a, __m512i b),
       (emulated++, _mm256_maddubs_epi16(((two)a).half[i], ((two)b).half[i])))
HALVES(__m512i, __m256i, cvtepi8_epi16, (__m256i a), _mm256_cvtepi8_epi16(((__m128i *)&a)[i]))
HALVES(__m512i, __m256i, set1_epi16, (short a), _mm256_set1_epi16(a))
HALVES(__m512i, __m256i, set1_epi32, (int a), _mm256_set1_epi32(a))
HALVES(__m512i, __m256i, cvtepi8_epi32, (__m128i a), _mm256_cvtepi8_epi32(_mm_set_epi64x(0, ((long long *)&a)[i])))
HALVES(__m512, __m256, cvtepi32_ps, (__m512i a), _mm256_cvtepi32_ps(((two)a).half[i]))
HALVES(__m512, __m256, cvtph_ps, (__m256i a), (emulated++, _mm256_cvtph_ps(((__m128i *)&a)[i])))

static inline void emulated_storeu_ps(float *to, __m512 x) { memcpy(to, &x, sizeof x); }

// Sums of two products of signed words, added to the lane; wraps.
static inline __m512i emulated_dpwssd_epi32(__m512i sums, __m512i a, __m512i b) {
    int32_t lane[16];
    int16_t x[32], y[32];
    memcpy(lane, &sums, 64), memcpy(x, &a, 64), memcpy(y, &b, 64);
    for (int i = 0; i < 32; i++) lane[i / 2] += x[i] * y[i];
    memcpy(&sums, lane, 64);
    emulated++;
    return sums;
}

// Sums of four products of unsigned bytes of a with signed bytes of b, added to the lane; wraps, does not saturate.
static inline void dot_bytes(int32_t *lane, const uint8_t *a, const int8_t *b, int bytes) {
    for (int i = 0; i < bytes; i++) lane[i / 4] += (int32_t)a[i] * b[i];
    emulated++;
}

static inline __m512i emulated_dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
    dot_bytes((int32_t *)&sums, (const uint8_t *)&a, (const int8_t *)&b, 64);
    return sums;
}

static inline __m256i emulated_dpbusd_avx_epi32(__m256i sums, __m256i a, __m256i b) {
    dot_bytes((int32_t *)&sums, (const uint8_t *)&a, (const int8_t *)&b, 32);
    return sums;
}

#define _mm512_add_epi16 emulated_add_epi16
#define _mm512_add_epi32 emulated_add_epi32
#define _mm512_madd_epi16 emulated_madd_epi16
#define _mm512_maddubs_epi16 emulated_maddubs_epi16
#define _mm512_cvtepi8_epi16 emulated_cvtepi8_epi16
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_set1_epi16 emulated_set1_epi16
#define _mm512_set1_epi32 emulated_set1_epi32
#define _mm512_storeu_ps emulated_storeu_ps
#define _mm512_dpwssd_epi32 emulated_dpwssd_epi32
#define _mm512_dpbusd_epi32 emulated_dpbusd_epi32
#define _mm256_dpbusd_avx_epi32 emulated_dpbusd_avx_epi32

// Only now: the compiler's own header must not take it that these are there.
#if defined(EMULATE_AVX512) || defined(EMULATE_VNNI)
#define __AVX512F__ 1
#define __AVX512BW__ 1
#endif
#if defined(EMULATE_VNNI)
#define __AVX512VNNI__ 1
#endif
#if defined(EMULATE_AVXVNNI)
#define __AVXVNNI__ 1
#endif
