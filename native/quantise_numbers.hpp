// Number formats of quantised weights, and the choice of scales (src/deltawire/quantise/scales.py defines it). No branch depends on values, so that
// compilers can make vectors of the loops. Compile this with -ffp-contract=off: a product and a sum must be rounded one by one.
#pragma once

#include <bit>
#include <cstring>
#include <type_traits>

#include "quantise.hpp"

namespace deltawire {
namespace {

template <Element>
struct Coding;
// Constants for rounding a magnitude to a code. A code is the exponent and the first bits of a float32, less an offset. The power of two that is
// `kDropped` powers above a number's own has a last bit that is worth as much as that of the code, so adding it rounds. Numbers below the least
// normal one have its exponent.
template <>
struct Coding<Element::e4m3> {
    static constexpr unsigned kDropped = 20, kSignShift = 24;
    static constexpr uint32_t kLargest = 0x43e00000;      // 448
    static constexpr uint32_t kLeastNormal = 0x3c800000;  // 2^-6
    static constexpr uint32_t kOffset = kLeastNormal >> kDropped;
    static constexpr uint32_t kSign = 0x80;
};
template <>
struct Coding<Element::e2m1> {
    static constexpr unsigned kDropped = 22, kSignShift = 28;
    static constexpr uint32_t kLargest = 0x40c00000;      // 6
    static constexpr uint32_t kLeastNormal = 0x3f800000;  // 1
    static constexpr uint32_t kOffset = kLeastNormal >> kDropped;
    static constexpr uint32_t kSign = 0x8;
};

inline constexpr float kInfinity = __builtin_inff();

// Returns the code of a number that is not negative.
template <Element E>
DELTAWIRE_INLINE uint32_t magnitude_code(float value) {
    using C = Coding<E>;
    const uint32_t b = std::bit_cast<uint32_t>(value), a = b < C::kLargest ? b : C::kLargest;
    const uint32_t exponent = (a > C::kLeastNormal ? a : C::kLeastNormal) & 0x7f800000, above = exponent + (C::kDropped << 23);
    const uint32_t sum = std::bit_cast<uint32_t>(std::bit_cast<float>(a) + std::bit_cast<float>(above));
    return sum - above + (exponent >> C::kDropped) - C::kOffset;
}
// Returns the value of an e4m3 code of 0 to 126.
DELTAWIRE_INLINE float from_e4m3(uint32_t code) {
    const float normal = std::bit_cast<float>((code + (120 << 3)) << 20), small = float(int32_t(code)) * 0x1p-9f;
    return code < 8 ? small : normal;
}

DELTAWIRE_INLINE float from_f16(uint16_t half) {
    const uint32_t magnitude = half & 0x7fff, sign = uint32_t(half & 0x8000) << 16;
    const float normal = std::bit_cast<float>((magnitude << 13) + (112u << 23)), small = float(int32_t(magnitude)) * 0x1p-24f;
    const uint32_t special = magnitude << 13 | 0x7f800000;
    const uint32_t bits = magnitude >= 0x7c00 ? special : magnitude < 0x400 ? std::bit_cast<uint32_t>(small) : std::bit_cast<uint32_t>(normal);
    return std::bit_cast<float>(bits | sign);
}
DELTAWIRE_INLINE uint16_t to_f16(float value) {
    const uint32_t b = std::bit_cast<uint32_t>(value), a = b & 0x7fffffff;
    const uint32_t normal = (a + 0xfff + (a >> 13 & 1) - (112u << 23)) >> 13;
    const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(a) + 0.5f) - 0x3f000000;
    const uint32_t rounded = a < 0x38800000 ? small : normal < 0x7c00 ? normal : 0x7c00;
    return uint16_t((a > 0x7f800000 ? 0x7e00 : rounded) | (b >> 16 & 0x8000));
}
DELTAWIRE_INLINE uint16_t to_bf16(float value) {
    const uint32_t b = std::bit_cast<uint32_t>(value);
    return uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
DELTAWIRE_INLINE float from_bf16(uint16_t value) { return std::bit_cast<float>(uint32_t(value) << 16); }

template <Source S>
DELTAWIRE_INLINE float rounded_to(float value) {
    if constexpr (S == Source::bf16) return from_bf16(to_bf16(value));
    else if constexpr (S == Source::f16) return from_f16(to_f16(value));
    else return value;
}
template <Source S>
inline constexpr float kEpsilon = S == Source::f32 ? 0x1p-23f : S == Source::bf16 ? 0x1p-7f : 0x1p-10f;
template <Source S>
inline constexpr int kLeastExponent = S == Source::f16 ? -14 : -126;

// The largest quotient with which a scale may stay.
template <Element E>
inline constexpr float kFitsUpTo = E == Element::e4m3 ? 464.0f : E == Element::e2m1 ? 7.0f : 8.0f;

DELTAWIRE_INLINE bool is_scale(float value) { return (value > 0) & (value < kInfinity); }

// Returns the smallest normal power of two that is not below a scale; 1 for 0.
DELTAWIRE_INLINE float power_of_two_above(float scale) {
    const uint32_t b = std::bit_cast<uint32_t>(scale), up = (b + 0x7fffff) & 0x7f800000;
    const uint32_t found = up < 0x00800000 ? 0x00800000 : up;
    return std::bit_cast<float>(b == 0 ? 0x3f800000 : found);
}

// Also true for 0.
DELTAWIRE_INLINE bool is_power_of_two(float value) {
    const uint32_t b = std::bit_cast<uint32_t>(value), fraction = b & 0x7fffff;
    return b >> 23 ? fraction == 0 : (fraction & (fraction - 1)) == 0;
}

template <bool kPower>
DELTAWIRE_INLINE void choose_block(const float* maxima, const uint8_t* previous, size_t n, uint8_t* scales, float* divisors) {
    for (size_t i = 0; i < n; ++i) {
        const float exact = maxima[i] / 448.0f;
        float chosen = exact == 0 ? 1.0f : kPower ? power_of_two_above(exact) : exact;
        if (previous) {
            float old;
            std::memcpy(&old, previous + 4 * i, 4);
            const bool form = !kPower | is_power_of_two(old);
            const bool fits = (maxima[i] == 0) | (old == chosen) | ((maxima[i] / old <= kFitsUpTo<Element::e4m3>) & (2 * chosen >= old));
            chosen = is_scale(old) & form & fits ? old : chosen;
        }
        divisors[i] = chosen;
        std::memcpy(scales + 4 * i, &chosen, 4);
    }
}

// The scales of fp8-channel, fp8-tensor and int4, in the type of the weight.
template <Source S, Element E>
DELTAWIRE_INLINE float fresh_plain(float maximum) {
    const float scale = rounded_to<S>(maximum / (E == Element::int4 ? 7.5f : 448.0f));
    return scale == 0 ? kEpsilon<S> : scale;
}
template <Source S, Element E>
DELTAWIRE_INLINE bool stays_plain(float maximum, float old, float fresh) {
    return is_scale(old) & ((maximum == 0) | (old == fresh) | ((rounded_to<S>(maximum / old) <= kFitsUpTo<E>) & (2 * fresh >= old)));
}
template <Source S, Element E>
DELTAWIRE_INLINE void choose_plain(const float* maxima, const uint8_t* previous, size_t n, uint8_t* scales, float* divisors) {
    using Stored = std::conditional_t<S == Source::f32, uint32_t, uint16_t>;
    const auto number = [](Stored stored) {
        if constexpr (S == Source::f32) return std::bit_cast<float>(stored);
        else if constexpr (S == Source::bf16) return from_bf16(stored);
        else return from_f16(stored);
    };
    for (size_t i = 0; i < n; ++i) {
        float chosen = fresh_plain<S, E>(maxima[i]);
        if (previous) {
            Stored stored;
            std::memcpy(&stored, previous + sizeof stored * i, sizeof stored);
            chosen = stays_plain<S, E>(maxima[i], number(stored), chosen) ? number(stored) : chosen;
        }
        divisors[i] = chosen;
        Stored stored;
        if constexpr (S == Source::f32) stored = std::bit_cast<uint32_t>(chosen);
        else if constexpr (S == Source::bf16) stored = to_bf16(chosen);
        else stored = to_f16(chosen);
        std::memcpy(scales + sizeof stored * i, &stored, sizeof stored);
    }
}

// Returns 2 to the power of an exponent byte minus 127. For 255 it is infinite.
DELTAWIRE_INLINE float power_of(uint32_t exponent) { return std::bit_cast<float>(exponent ? exponent << 23 : 0x00400000); }

template <Source S>
DELTAWIRE_INLINE void choose_mxfp4(const float* maxima, const uint8_t* previous, size_t n, uint8_t* scales, float* divisors) {
    for (size_t i = 0; i < n; ++i) {
        const uint32_t b = std::bit_cast<uint32_t>(maxima[i]);
        // A fraction of at least 1.75 counts as the next power. Subnormal numbers are below the least exponent, unless they round up to it.
        const int32_t power = int32_t((b + 0x200000) >> 23) - 127;
        const int32_t exponent = power - 2 + 127 < 0 ? 0 : power - 2 + 127;
        uint32_t chosen = power < kLeastExponent<S> ? (S == Source::f16 ? 127 : 0) : uint32_t(exponent);
        if (previous) {
            const uint32_t old = previous[i];
            const bool fits = (maxima[i] == 0) | (old == chosen) | ((rounded_to<S>(maxima[i] / power_of(old)) <= kFitsUpTo<Element::e2m1>) & (chosen + 1 >= old));
            chosen = (old != 255) & fits ? old : chosen;
        }
        divisors[i] = power_of(chosen);
        scales[i] = uint8_t(chosen);
    }
}

template <Source S>
DELTAWIRE_INLINE float fresh_global(float largest) {
    const float least = S == Source::f16 ? 0x1p-14f : 0x1p-126f, at_least = largest > least ? largest : least;
    const float found = rounded_to<S>(rounded_to<S>(1.0f / at_least) * 2688.0f);
    return found < kInfinity ? found : 1.0f;
}
// Every fresh global scale is larger. With a smaller one, the quotient of a block's scale and the global scale could be infinite.
inline constexpr float kLeastGlobal = 0x1p-117f;
template <Source S>
DELTAWIRE_INLINE bool stays_global(float largest, float old, float fresh) {
    const bool fits = (old * rounded_to<S>(largest / 6.0f) <= kFitsUpTo<Element::e4m3>) & (double(fresh) <= 2 * double(old));
    return is_scale(old) & (old >= kLeastGlobal) & ((largest == 0) | (old == fresh) | fits);
}
template <Source S, bool kSticky>
DELTAWIRE_INLINE void choose_nvfp4_as(float global, const float* __restrict maxima, const uint8_t* previous, size_t n, uint8_t* scales, float* __restrict divisors) {
    for (size_t i = 0; i < n; ++i) {
        uint32_t chosen = magnitude_code<Element::e4m3>(global * rounded_to<S>(maxima[i] / 6.0f));
        chosen = chosen ? chosen : 0x20;  // 0.125
        float number = from_e4m3(chosen);
        if constexpr (kSticky) {
            const uint32_t old = previous[i];
            const float before = from_e4m3(old & 0x7f);
            const bool fits = (maxima[i] == 0) | (before == number) | ((maxima[i] / (before / global) <= kFitsUpTo<Element::e2m1>) & (2 * number >= before));
            const bool stays = (old > 0) & (old < 0x7f) & fits;
            chosen = stays ? old : chosen;
            number = stays ? before : number;
        }
        divisors[i] = number / global;
        scales[i] = uint8_t(chosen);
    }
}
template <Source S>
DELTAWIRE_INLINE void choose_nvfp4(float global, const float* maxima, const uint8_t* previous, size_t n, uint8_t* scales, float* divisors) {
    if (previous) choose_nvfp4_as<S, true>(global, maxima, previous, n, scales, divisors);
    else choose_nvfp4_as<S, false>(global, maxima, previous, n, scales, divisors);
}

}  // namespace
}  // namespace deltawire
