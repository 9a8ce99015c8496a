// AVX-512, as for the codec.
#include <immintrin.h>

#include "quantise_impl.hpp"

namespace deltawire {
namespace {

struct Avx512Lanes {
    static constexpr unsigned kWidth = 16;
    static constexpr bool kHasFma = true;
    using F = __m512;
    using U = __m512i;

    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static F load_bf16(const uint16_t* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16)); }
    static F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
    static F splat(float x) { return _mm512_set1_ps(x); }
    static U splat_u(uint32_t x) { return _mm512_set1_epi32(int32_t(x)); }
    static U bits(F a) { return _mm512_castps_si512(a); }
    static F from_bits(U a) { return _mm512_castsi512_ps(a); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F add_f(F a, F b) { return _mm512_add_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
    static F min(F a, F b) { return _mm512_min_ps(a, b); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static F round_f16(F a) { return _mm512_cvtph_ps(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
    static U round_to_integer(F a) { return _mm512_cvtps_epi32(a); }
    static U add(U a, U b) { return _mm512_add_epi32(a, b); }
    static U sub(U a, U b) { return _mm512_sub_epi32(a, b); }
    static U and_(U a, U b) { return _mm512_and_si512(a, b); }
    static U or_(U a, U b) { return _mm512_or_si512(a, b); }
    template <unsigned n>
    static U shift_right(U a) { return _mm512_srli_epi32(a, n); }
    static U min_u(U a, U b) { return _mm512_min_epu32(a, b); }
    static U max_u(U a, U b) { return _mm512_max_epu32(a, b); }
    static U select_below(U a, U limit, U below, U other) { return _mm512_mask_mov_epi32(other, _mm512_cmplt_epu32_mask(a, limit), below); }
    static uint32_t reduce_max(U a) { return _mm512_reduce_max_epu32(a); }
    static void store_bytes(uint8_t* out, U codes) { _mm_storeu_si128((__m128i*)out, _mm512_cvtepi32_epi8(codes)); }
    // The code of an odd lane moves to the high half of the byte before it.
    static void store_nibbles(uint8_t* out, U codes) { _mm_storel_epi64((__m128i*)out, _mm512_cvtepi64_epi8(or_(codes, _mm512_srli_epi64(codes, 28)))); }
};

}  // namespace

constinit const QuantiseKernels kAvx512Quantise = Quantise<Avx512Lanes>::table("avx512");

}  // namespace deltawire
