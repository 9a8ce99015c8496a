// Numbers of quantised weights, as in native/quantise_numbers.hpp: codes, types of weights, and division. The kernels of `quantise/gpu` use them, too.
// It must not be compiled with fast math.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

namespace quantised {

#if defined(EMULATED)
__device__ __forceinline__ float __uint_as_float(u32 x) { float out; memcpy(&out, &x, 4); return out; }
__device__ __forceinline__ u32 __float_as_uint(float x) { u32 out; memcpy(&out, &x, 4); return out; }
__device__ __forceinline__ float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
__device__ __forceinline__ float __fmul_rn(float a, float b) { return a * b; }
__device__ __forceinline__ float __fadd_rn(float a, float b) { return a + b; }
__device__ __forceinline__ float __fdiv_rn(float a, float b) { return a / b; }
__device__ __forceinline__ float __frcp_rn(float a) { return 1.0f / a; }
__device__ __forceinline__ float fminf(float a, float b) { return a < b ? a : b; }
__device__ __forceinline__ float fmaxf(float a, float b) { return a < b ? b : a; }
__device__ __forceinline__ float fabsf(float a) { return a < 0 ? -a : a; }
#endif

constexpr u32 F32 = 0, BF16 = 1, F16 = 2;                      // types of weights
constexpr u32 E4M3 = 0, E2M1 = 1, INT4 = 2;                    // types of codes
constexpr u32 FP8_BLOCK = 0, FP8_BLOCK_UE8M0 = 1, FP8_CHANNEL = 2, FP8_TENSOR = 3, NVFP4 = 4, MXFP4 = 5, INT4_GROUPS = 6;  // recipes

// Numbers of a code: which bits of a float32 it drops, the largest and the least normal magnitude, and what `biased_code` adds.
template <u32 E>
struct Coding;
template <>
struct Coding<E4M3> {
    static constexpr u32 DROPPED = 20, LARGEST = 0x43e00000, LEAST_NORMAL = 0x3c800000, BIAS = 121 << 3, SIGN = 7;
};
template <>
struct Coding<E2M1> {
    static constexpr u32 DROPPED = 22, LARGEST = 0x40c00000, LEAST_NORMAL = 0x3f800000, BIAS = 127 << 1, SIGN = 3;
};

// Returns the code of a magnitude, plus `BIAS`. The sum has as many bits after the point as the code, so the addition rounds: to nearest, ties to even.
template <u32 E>
__device__ __forceinline__ u32 biased_code(float magnitude) {
    using C = Coding<E>;
    const float a = fminf(magnitude, __uint_as_float(C::LARGEST));
    const u32 exponent = max(__float_as_uint(a), C::LEAST_NORMAL) & 0x7f800000, above = exponent + (C::DROPPED << 23);
    return __float_as_uint(__fadd_rn(a, __uint_as_float(above))) - above + (exponent >> C::DROPPED);
}
template <u32 E>
__device__ __forceinline__ u32 magnitude_code(float magnitude) { return biased_code<E>(magnitude) - Coding<E>::BIAS; }
// Returns a number whose lowest bits are a code, plus `bias_of<E>()`. A quotient is never -0.0.
template <u32 E>
__device__ __forceinline__ u32 biased_code_of(float q) { return biased_code<E>(fabsf(q)) + (__float_as_uint(q) >> 31 << Coding<E>::SIGN); }
template <>
__device__ __forceinline__ u32 biased_code_of<INT4>(float q) {
    // The sum is so large that it has no bits after the point.
    return __float_as_uint(__fadd_rn(fminf(fmaxf(q, -8.0f), 7.0f), 0x1.8p23f + 8.0f));
}
template <u32 E>
__device__ __forceinline__ constexpr u32 bias_of() { return Coding<E == INT4 ? E4M3 : E>::BIAS; }
template <>
__device__ __forceinline__ constexpr u32 bias_of<INT4>() { return 0x4b400000; }
template <u32 E>
__device__ __forceinline__ u32 code_of(float q) { return biased_code_of<E>(q) - bias_of<E>(); }
// Returns two codes of a byte each.
__device__ __forceinline__ u32 two_e4m3(float low, float high) {
#if !defined(EMULATED) && __CUDA_ARCH__ >= 890
    u16 out;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
    return out;
#else
    return code_of<E4M3>(low) | code_of<E4M3>(high) << 8;
#endif
}

__device__ __forceinline__ float from_e4m3(u32 code) {
    return code < 8 ? __fmul_rn((float)(int)code, 0x1p-9f) : __uint_as_float((code + (120 << 3)) << 20);
}
__device__ __forceinline__ float from_f16(u32 half) {
    const u32 magnitude = half & 0x7fff, sign = (half & 0x8000) << 16;
    const u32 normal = (magnitude << 13) + (112u << 23), special = magnitude << 13 | 0x7f800000;
    const u32 small = __float_as_uint(__fmul_rn((float)(int)magnitude, 0x1p-24f));
    return __uint_as_float((magnitude >= 0x7c00 ? special : magnitude < 0x400 ? small : normal) | sign);
}
__device__ __forceinline__ u32 to_f16(float value) {
    const u32 b = __float_as_uint(value), a = b & 0x7fffffff;
    const u32 normal = (a + 0xfff + (a >> 13 & 1) - (112u << 23)) >> 13;
    const u32 small = __float_as_uint(__fadd_rn(__uint_as_float(a), 0.5f)) - 0x3f000000;
    const u32 rounded = a < 0x38800000 ? small : normal < 0x7c00 ? normal : 0x7c00;
    return (a > 0x7f800000 ? 0x7e00 : rounded) | (b >> 16 & 0x8000);
}
__device__ __forceinline__ u32 to_bf16(float value) {
    const u32 b = __float_as_uint(value);
    return (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
template <u32 S>
__device__ __forceinline__ float from_stored(u32 stored) {
    return S == F32 ? __uint_as_float(stored) : S == BF16 ? __uint_as_float(stored << 16) : from_f16(stored);
}
template <u32 S>
__device__ __forceinline__ u32 to_stored(float value) {
    return S == F32 ? __float_as_uint(value) : S == BF16 ? to_bf16(value) : to_f16(value);
}
template <u32 S>
__device__ __forceinline__ float rounded_to(float value) {
#ifndef EMULATED
    if (S == BF16) {
        u16 out;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
        return __uint_as_float((u32)out << 16);
    }
#endif
    return S == F32 ? value : from_stored<S>(to_stored<S>(value));
}
template <u32 S>
__device__ __forceinline__ float read_scale(const u8* at) {
    return from_stored<S>(S == F32 ? *(const u32*)at : *(const u16*)at);
}
template <u32 S>
__device__ __forceinline__ void write_scale(u8* at, float scale) {
    if (S == F32) *(float*)at = scale;
    else *(u16*)at = (u16)to_stored<S>(scale);
}

// Returns 2 to the power of an exponent byte minus 127. For 255 it is infinite.
__device__ __forceinline__ float power_of(u32 exponent) { return __uint_as_float(exponent ? exponent << 23 : 0x00400000); }

// Divides as the reference does. Within bounds, and with any mantissa but one, the sum of two products is on the same side of every boundary between codes
// as the quotient (native/fuzz/check_quotients.cpp).
struct Divisor {
    float divisor, reciprocal, low;  // `low` is what the reciprocal lacks
    bool fast;
};
// `fits` tells that no weight is much larger than its scale allows.
__device__ __forceinline__ Divisor divisor_of(float divisor, bool fits) {
    const bool fast = fits && divisor >= 0x1p-60f && divisor <= 1.0f && (__float_as_uint(divisor) & 0x7fffff) != 0x7fffff;
    const float reciprocal = __frcp_rn(fast ? divisor : 1.0f);
    return {divisor, reciprocal, __fmul_rn(__fmaf_rn(-divisor, reciprocal, 1.0f), reciprocal), fast};
}
// A quotient is never -0.0, neither that of -0.0 nor one that becomes 0 when it is rounded to float16. Fast quotients are not too small for bfloat16.
__device__ __forceinline__ float fast_quotient(float x, float reciprocal, float low) { return __fmaf_rn(x, reciprocal, __fmaf_rn(x, low, 0.0f)); }
template <u32 S, bool ROUNDS>
__device__ __forceinline__ float quotient(float x, const Divisor& by) {
    const float exact = by.fast ? fast_quotient(x, by.reciprocal, by.low) : __fdiv_rn(x, by.divisor), q = ROUNDS ? rounded_to<S>(exact) : exact;
    return by.fast && !(ROUNDS && S == F16) ? q : __fadd_rn(q, 0.0f);
}

// Scales of groups, as in quantise/scales.py.

constexpr u32 NOT_FINITE = 0x7f800000;
// Tells whether a scale is a positive number.
__device__ __forceinline__ bool is_scale(float value) { return __float_as_uint(value) - 1 < NOT_FINITE - 1; }
constexpr float FITS_E4M3 = 464.0f, FITS_E2M1 = 7.0f, FITS_INT4 = 8.0f;

template <u32 S>
__device__ __forceinline__ u32 choose_mxfp4(float maximum, const u8* previous) {
    const int power = (int)((__float_as_uint(maximum) + 0x200000) >> 23) - 127;
    u32 chosen = power < (S == F16 ? -14 : -126) ? (S == F16 ? 127 : 0) : power < -125 ? 0 : (u32)(power + 125);
    if (!previous) return chosen;
    const u32 old = *previous;
    if (old == 255) return chosen;
    return maximum == 0 || old == chosen || (rounded_to<S>(__fdiv_rn(maximum, power_of(old))) <= FITS_E2M1 && chosen + 1 >= old) ? old : chosen;
}
template <u32 S>
__device__ __forceinline__ u32 choose_nvfp4(float global, float maximum, const u8* previous) {
    u32 chosen = magnitude_code<E4M3>(__fmul_rn(global, rounded_to<S>(__fdiv_rn(maximum, 6.0f))));
    if (!chosen) chosen = 0x20;  // 0.125
    if (!previous) return chosen;
    const u32 old = *previous;
    if (old == 0 || old >= 0x7f) return chosen;
    const float before = from_e4m3(old), now = from_e4m3(chosen);
    return maximum == 0 || before == now || (__fdiv_rn(maximum, __fdiv_rn(before, global)) <= FITS_E2M1 && 2 * now >= before) ? old : chosen;
}

// The largest magnitude of a vector, as stored bits.
template <u32 S>
__device__ __forceinline__ u32 largest_stored(const uint4& v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    u32 out = 0;
    for (u32 i = 0; i < 4; ++i) {
        if (S == F32) out = max(out, words[i] & 0x7fffffff);
        else out = max(out, max(words[i] & 0x7fff, words[i] >> 16 & 0x7fff));
    }
    return out;
}
template <u32 S>
__device__ __forceinline__ u32 float_bits(u32 stored) { return __float_as_uint(from_stored<S>(stored)); }

// Elements of a vector of 16 bytes.
template <u32 S>
__device__ __forceinline__ float element(const uint4& v, u32 i) {
    const u32 w = (S == F32 ? i : i / 2) == 0 ? v.x : (S == F32 ? i : i / 2) == 1 ? v.y : (S == F32 ? i : i / 2) == 2 ? v.z : v.w;
    return from_stored<S>(S == F32 ? w : i & 1 ? w >> 16 : w & 0xffff);
}

template <u32 S, bool ROUNDS>
__device__ __forceinline__ u32 four_e4m3(const uint4& v, u32 first, const Divisor& by) {
    const u32 low = two_e4m3(quotient<S, ROUNDS>(element<S>(v, first), by), quotient<S, ROUNDS>(element<S>(v, first + 1), by));
    const u32 high = two_e4m3(quotient<S, ROUNDS>(element<S>(v, first + 2), by), quotient<S, ROUNDS>(element<S>(v, first + 3), by));
    return low | high << 16;
}
// Returns the codes of a vector, 4 bits each. Biases add up, and are subtracted at the end.
template <u32 S, u32 E, bool ROUNDS>
__device__ __forceinline__ u32 nibbles(const uint4& v, const Divisor& by) {
    constexpr u32 V = S == F32 ? 4 : 8;
    u32 out = 0;
#pragma unroll
    for (u32 i = 0; i < V; ++i) out += biased_code_of<E>(quotient<S, ROUNDS>(element<S>(v, i), by)) << (4 * i);
    return out - bias_of<E>() * (V == 4 ? 0x1111u : 0x11111111u);
}

}  // namespace quantised
