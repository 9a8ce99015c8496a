// AVX-512, as for the codec.
#include <immintrin.h>

#include "quantise_impl.hpp"

namespace deltawire {
namespace {

struct Avx512Lanes {
    static constexpr unsigned kWidth = 16;
    static constexpr bool kHasFma = true, kStoresFour = true, kReducesMany = true, kLooksUp = true;
    using F = __m512;
    using U = __m512i;

    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static F load_bf16(const uint16_t* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16)); }
    static F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
    static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
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
    static U look_up(const uint32_t (&table)[16], U index) { return _mm512_permutexvar_epi32(index, _mm512_load_si512(table)); }  // by the low 4 bits
    static uint32_t reduce_max(U a) { return _mm512_reduce_max_epu32(a); }
    static void store_bytes(uint8_t* out, U codes) { _mm_storeu_si128((__m128i*)out, _mm512_cvtepi32_epi8(codes)); }
    // The code of an odd lane moves to the high half of the byte before it.
    static void store_nibbles(uint8_t* out, U codes) { _mm_storel_epi64((__m128i*)out, _mm512_cvtepi64_epi8(or_(codes, _mm512_srli_epi64(codes, 28)))); }

    // Packs the values of four vectors, less an offset, into bytes. Each group of 16 bytes has 4 codes of each vector.
    static U pack_four(const U values[4], uint32_t offset) {
        const U less = _mm512_set1_epi16(int16_t(offset));
        const U low = _mm512_sub_epi16(_mm512_packus_epi32(values[0], values[1]), less), high = _mm512_sub_epi16(_mm512_packus_epi32(values[2], values[3]), less);
        return _mm512_packus_epi16(low, high);
    }
    static U pack_signs(const U signs[4]) { return _mm512_packs_epi16(_mm512_packs_epi32(signs[0], signs[1]), _mm512_packs_epi32(signs[2], signs[3])); }
    static U in_order(U packed) {
        return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), packed);
    }
    static void store_four_bytes(uint8_t* out, const U values[4], const U signs[4], uint32_t offset) {
        // values | signs & 0x80
        _mm512_storeu_si512(out, in_order(_mm512_ternarylogic_epi32(pack_four(values, offset), pack_signs(signs), _mm512_set1_epi8(char(0x80)), 0xf8)));
    }
    static void store_pairs(uint8_t* out, U bytes) {  // two bytes of 4 bits become one
        _mm256_storeu_si256((__m256i*)out, _mm512_cvtepi16_epi8(_mm512_maddubs_epi16(bytes, _mm512_set1_epi16(0x1001))));
    }
    static void store_four_nibbles(uint8_t* out, const U values[4], const U signs[4], uint32_t offset) {
        const U sign = _mm512_and_si512(_mm512_srli_epi16(pack_signs(signs), 4), _mm512_set1_epi8(0x08));
        store_pairs(out, in_order(_mm512_or_si512(pack_four(values, offset), sign)));
    }
    static void store_four_nibbles(uint8_t* out, const U values[4]) { store_pairs(out, in_order(pack_four(values, 0))); }

    // Returns the largest lane of each of 16 vectors. All lanes are below 2^31.
    static U reduce_max_each(const U v[16]) {
        U pairs[8], quads[4], halves[2];
        for (unsigned i = 0; i < 8; ++i) pairs[i] = max_u(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
        for (unsigned i = 0; i < 4; ++i)
            quads[i] = max_u(_mm512_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]), _mm512_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
        for (unsigned i = 0; i < 2; ++i)
            halves[i] = max_u(_mm512_shuffle_i32x4(quads[2 * i], quads[2 * i + 1], 0x44), _mm512_shuffle_i32x4(quads[2 * i], quads[2 * i + 1], 0xee));
        return max_u(_mm512_shuffle_i32x4(halves[0], halves[1], 0x88), _mm512_shuffle_i32x4(halves[0], halves[1], 0xdd));
    }
};

}  // namespace

constinit const QuantiseKernels kAvx512Quantise = Quantise<Avx512Lanes>::table("avx512");

}  // namespace deltawire
