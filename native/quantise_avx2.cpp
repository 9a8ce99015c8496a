// AVX2, FMA and F16C: every Intel server since 2013, and AMD since Zen.
#include <immintrin.h>

#include "quantise_impl.hpp"

namespace deltawire {
namespace {

struct Avx2Lanes {
    static constexpr unsigned kWidth = 8;
    static constexpr bool kHasFma = true, kStoresFour = false, kReducesMany = false, kLooksUp = false;
    using F = __m256;
    using U = __m256i;

    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static F load_bf16(const uint16_t* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16)); }
    static F load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
    static F splat(float x) { return _mm256_set1_ps(x); }
    static U splat_u(uint32_t x) { return _mm256_set1_epi32(int32_t(x)); }
    static U bits(F a) { return _mm256_castps_si256(a); }
    static F from_bits(U a) { return _mm256_castsi256_ps(a); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F add_f(F a, F b) { return _mm256_add_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
    static F min(F a, F b) { return _mm256_min_ps(a, b); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }
    static F round_f16(F a) { return _mm256_cvtph_ps(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
    static U round_to_integer(F a) { return _mm256_cvtps_epi32(a); }
    static U add(U a, U b) { return _mm256_add_epi32(a, b); }
    static U sub(U a, U b) { return _mm256_sub_epi32(a, b); }
    static U and_(U a, U b) { return _mm256_and_si256(a, b); }
    static U or_(U a, U b) { return _mm256_or_si256(a, b); }
    template <unsigned n>
    static U shift_right(U a) { return _mm256_srli_epi32(a, n); }
    static U min_u(U a, U b) { return _mm256_min_epu32(a, b); }
    static U max_u(U a, U b) { return _mm256_max_epu32(a, b); }
    static uint32_t reduce_max(U a) {
        __m128i b = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
        b = _mm_max_epu32(b, _mm_shuffle_epi32(b, 0x4e));
        b = _mm_max_epu32(b, _mm_shuffle_epi32(b, 0xb1));
        return uint32_t(_mm_cvtsi128_si32(b));
    }
    static __m128i bytes(U codes) {
        const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
        return _mm_packus_epi16(words, words);
    }
    static void store_bytes(uint8_t* out, U codes) { _mm_storel_epi64((__m128i*)out, bytes(codes)); }
    static void store_nibbles(uint8_t* out, U codes) {
        // The code of an odd lane moves to the high half of the byte before it.
        const U pairs = and_(or_(codes, _mm256_srli_epi64(codes, 28)), _mm256_set1_epi64x(0xff));
        const int32_t four = _mm_cvtsi128_si32(_mm_shuffle_epi8(bytes(pairs), _mm_setr_epi8(0, 2, 4, 6, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1)));
        std::memcpy(out, &four, 4);
    }
};

}  // namespace

constinit const QuantiseKernels kAvx2Quantise = Quantise<Avx2Lanes>::table("avx2");

}  // namespace deltawire
