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
__device__ __forceinline__ float rint_f(float x) { return __builtin_rintf(x); }
#else
__device__ __forceinline__ float rint_f(float x) { return rintf(x); }
#endif

constexpr u32 F32 = 0, BF16 = 1, F16 = 2;                      // types of weights
constexpr u32 E4M3 = 0, E2M1 = 1, INT4 = 2;                    // types of codes
constexpr u32 FP8_BLOCK = 0, FP8_BLOCK_UE8M0 = 1, FP8_CHANNEL = 2, FP8_TENSOR = 3, NVFP4 = 4, MXFP4 = 5, INT4_GROUPS = 6;  // recipes

template <u32 E>
struct Coding;
template <>
struct Coding<E4M3> {
    static constexpr u32 DROPPED = 20, SIGN_SHIFT = 24, LARGEST = 0x43e00000, LEAST_NORMAL = 0x3c800000, MAGIC = 0x46800000, SIGN = 0x80;
    static constexpr u32 ROUNDING = 0x7ffffu - ((u32)(120 << 3) << 20);
};
template <>
struct Coding<E2M1> {
    static constexpr u32 DROPPED = 22, SIGN_SHIFT = 28, LARGEST = 0x40c00000, LEAST_NORMAL = 0x3f800000, MAGIC = 0x4a800000, SIGN = 0x8;
    static constexpr u32 ROUNDING = 0x1fffffu - ((u32)(126 << 1) << 22);
};

template <u32 E>
__device__ __forceinline__ u32 magnitude_code(u32 bits) {
    using C = Coding<E>;
    const u32 a = bits < C::LARGEST ? bits : C::LARGEST;
    const u32 normal = (a + C::ROUNDING + (a >> C::DROPPED & 1)) >> C::DROPPED;
    const u32 small = __float_as_uint(__fadd_rn(__uint_as_float(a), __uint_as_float(C::MAGIC))) - C::MAGIC;
    return a < C::LEAST_NORMAL ? small : normal;
}
template <u32 E>
__device__ __forceinline__ u32 code_of(float q) {
    using C = Coding<E>;
    const u32 bits = __float_as_uint(__fadd_rn(q, 0.0f));  // -0.0 becomes 0.0
    return magnitude_code<E>(bits & 0x7fffffff) | (bits >> C::SIGN_SHIFT & C::SIGN);
}
template <>
__device__ __forceinline__ u32 code_of<INT4>(float q) {
    const float clamped = q < -8.0f ? -8.0f : q > 7.0f ? 7.0f : q;
    return (u32)((int)rint_f(clamped) + 8);
}
// Returns two codes of a byte each.
__device__ __forceinline__ u32 two_e4m3(float low, float high) {
#if !defined(EMULATED) && __CUDA_ARCH__ >= 890
    u16 out;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(__fadd_rn(high, 0.0f)), "f"(__fadd_rn(low, 0.0f)));
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

// Divides as the reference does. Within bounds, a corrected product is on the same side of every boundary between codes (native/fuzz/check_quotients.cpp).
struct Divisor {
    float divisor, reciprocal;
    bool fast;
};
// `fits` tells that no weight is much larger than its scale allows.
__device__ __forceinline__ Divisor divisor_of(float divisor, bool fits) {
    const bool fast = fits && divisor >= 0x1p-60f && divisor <= 1.0f;
    return {divisor, fast ? __fdiv_rn(1.0f, divisor) : 0.0f, fast};
}
template <u32 S, bool ROUNDS>
__device__ __forceinline__ float quotient(float x, const Divisor& by) {
    float q;
    if (by.fast) {
        const float product = __fmul_rn(x, by.reciprocal);
        q = __fmaf_rn(__fmaf_rn(-product, by.divisor, x), by.reciprocal, product);
    } else {
        q = __fdiv_rn(x, by.divisor);
    }
    return ROUNDS ? rounded_to<S>(q) : q;
}

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
// Returns the codes of a vector, 4 bits each.
template <u32 S, u32 E, bool ROUNDS>
__device__ __forceinline__ u32 nibbles(const uint4& v, const Divisor& by) {
    constexpr u32 V = S == F32 ? 4 : 8;
    u32 out = 0;
    for (u32 i = 0; i < V; ++i) out |= code_of<E>(quotient<S, ROUNDS>(element<S>(v, i), by)) << (4 * i);
    return out;
}

}  // namespace quantised
