// Quantising, written once for any `Isa`, which has vectors of floats and of unsigned integers with `kWidth` lanes.
// Only quantise_*.cpp include this file, each compiled for one instruction set. Everything here must have internal linkage there.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "quantise_numbers.hpp"

namespace deltawire {
namespace {

template <class Isa>
struct Quantise {
    using F = typename Isa::F;
    using U = typename Isa::U;
    static constexpr unsigned kWidth = Isa::kWidth;

    template <Source S>
    using Stored = std::conditional_t<S == Source::f32, float, uint16_t>;

    template <Source S>
    DELTAWIRE_INLINE static F load(const Stored<S>* p) {
        if constexpr (S == Source::f32) return Isa::load(p);
        else if constexpr (S == Source::bf16) return Isa::load_bf16(p);
        else return Isa::load_f16(p);
    }

    // A divisor, and its reciprocal as the sum of two numbers.
    struct Divisor {
        F divisor, reciprocal, low;
        Divisor(float divisor, float reciprocal) : Divisor(divisor, reciprocal, low_of(divisor, reciprocal)) {}
        Divisor(float divisor, float reciprocal, float low) : divisor(Isa::splat(divisor)), reciprocal(Isa::splat(reciprocal)), low(Isa::splat(low)) {}
    };
    DELTAWIRE_INLINE static float low_of(float divisor, float reciprocal) { return Isa::kHasFma ? __builtin_fmaf(-divisor, reciprocal, 1.0f) * reciprocal : 0.0f; }
    // Within these bounds, and with any mantissa but one, a product is on the same side of all boundaries between codes as the quotient, and it is 0 only if
    // the weight is. native/fuzz/check_quotients.cpp tries all divisors.
    static constexpr float kLeastFast = 0x1p-60f, kMostFast = 1.0f;
    DELTAWIRE_INLINE static bool is_fast(float divisor) {
        return Isa::kHasFma & (divisor >= kLeastFast) & (divisor <= kMostFast) & ((std::bit_cast<uint32_t>(divisor) & 0x7fffff) != 0x7fffff);
    }

    // The codes of kWidth elements, one per lane: magnitudes plus `Coding<E>::kOffset`, and numbers that have the signs. Integers are whole codes.
    struct Codes {
        U values, signs;
    };
    template <Source S, Element E, bool kRounds, bool kFast>
    DELTAWIRE_INLINE static Codes code(F x, const Divisor& by) {
        F q;
        if constexpr (kFast && E == Element::int4) {
            F product = Isa::mul(x, by.reciprocal);
            product = Isa::min(Isa::max(product, Isa::splat(-16.0f)), Isa::splat(16.0f));  // never infinite
            q = Isa::fma(Isa::fnma(product, by.divisor, x), by.reciprocal, product);
        } else if constexpr (kFast) {
            q = Isa::fma(x, by.reciprocal, Isa::mul(x, by.low));
        } else {
            q = Isa::div(x, by.divisor);
        }
        if constexpr (kRounds && S == Source::bf16) {
            const U b = Isa::bits(q);
            const U up = Isa::add(Isa::splat_u(0x7fff), Isa::and_(Isa::template shift_right<16>(b), Isa::splat_u(1)));
            q = Isa::from_bits(Isa::and_(Isa::add(b, up), Isa::splat_u(0xffff0000)));
        }
        if constexpr (kRounds && S == Source::f16) q = Isa::round_f16(q);
        if constexpr (E == Element::int4) {
            q = Isa::min(Isa::max(q, Isa::splat(-8.0f)), Isa::splat(7.0f));
            return {Isa::add(Isa::round_to_integer(q), Isa::splat_u(8)), Isa::splat_u(0)};
        } else {
            using C = Coding<E>;
            // The sign of -0.0 is dropped. If the product overflowed, only the weight knows the sign.
            const U signs = Isa::bits(Isa::add_f(kFast ? x : q, Isa::splat(0.0f)));
            return {magnitudes<E>(Isa::min_u(Isa::and_(Isa::bits(q), Isa::splat_u(0x7fffffff)), Isa::splat_u(C::kLargest))), signs};
        }
    }
    // Returns the codes of magnitudes, plus the offset. Up to 464, those of e4m3 need not be clamped to 448.
    template <Element E>
    DELTAWIRE_INLINE static U magnitudes(U a) {
        using C = Coding<E>;
        const U exponent = Isa::and_(Isa::max_u(a, Isa::splat_u(C::kLeastNormal)), Isa::splat_u(0x7f800000));
        const U above = Isa::add(exponent, Isa::splat_u(C::kDropped << 23));
        const U sum = Isa::bits(Isa::add_f(Isa::from_bits(a), Isa::from_bits(above)));
        return Isa::add(Isa::sub(sum, above), Isa::template shift_right<C::kDropped>(exponent));
    }

    // Returns the e4m3 codes of magnitudes up to 464. Those of larger ones are undefined.
    DELTAWIRE_INLINE static U fitting_magnitudes(U a) {
        using C = Coding<Element::e4m3>;
        if constexpr (Isa::kLooksUp) {
            const U exponent = Isa::template shift_right<23>(Isa::max_u(a, Isa::splat_u(C::kLeastNormal)));
            const U sum = Isa::bits(Isa::add_f(Isa::from_bits(a), Isa::from_bits(Isa::look_up(kRounding.above, exponent))));
            return Isa::sub(sum, Isa::look_up(kRounding.less, exponent));
        } else {
            return Isa::sub(magnitudes<Element::e4m3>(a), Isa::splat_u(C::kOffset));
        }
    }
    // The numbers that round a magnitude, by the low 4 bits of its exponent: the 16 exponents from that of the least normal number on.
    struct Rounding {
        alignas(64) uint32_t above[16], less[16];
    };
    static constexpr Rounding kRounding = [] {
        using C = Coding<Element::e4m3>;
        Rounding found{};
        for (uint32_t e = C::kLeastNormal >> 23; e < (C::kLeastNormal >> 23) + 16; ++e) {
            found.above[e % 16] = (e + C::kDropped) << 23;
            found.less[e % 16] = found.above[e % 16] - (e << (23 - C::kDropped)) + C::kOffset;
        }
        return found;
    }();

    template <Element E>
    DELTAWIRE_INLINE static void store(uint8_t* out, const Codes& codes) {
        if constexpr (E == Element::int4) {
            Isa::store_nibbles(out, codes.values);
        } else {
            using C = Coding<E>;
            const U sign = Isa::and_(Isa::template shift_right<C::kSignShift>(codes.signs), Isa::splat_u(C::kSign));
            const U all = Isa::or_(Isa::sub(codes.values, Isa::splat_u(C::kOffset)), sign);
            if constexpr (E == Element::e4m3) Isa::store_bytes(out, all);
            else Isa::store_nibbles(out, all);
        }
    }
    // Stores the codes of four vectors.
    template <Element E>
    DELTAWIRE_INLINE static void store4(uint8_t* out, const Codes codes[4]) {
        if constexpr (Isa::kStoresFour) {
            const U values[4] = {codes[0].values, codes[1].values, codes[2].values, codes[3].values};
            const U signs[4] = {codes[0].signs, codes[1].signs, codes[2].signs, codes[3].signs};
            if constexpr (E == Element::e4m3) Isa::store_four_bytes(out, values, signs, Coding<E>::kOffset);
            else if constexpr (E == Element::e2m1) Isa::store_four_nibbles(out, values, signs, Coding<E>::kOffset);
            else Isa::store_four_nibbles(out, values);
        } else {
            constexpr unsigned per_byte = E == Element::e4m3 ? 1 : 2;
            for (unsigned k = 0; k < 4; ++k) store<E>(out + k * kWidth / per_byte, codes[k]);
        }
    }

    template <Source S, Element E, bool kRounds, bool kFast>
    DELTAWIRE_INLINE static void run_codes(const Stored<S>* x, size_t n, const Divisor& by, uint8_t* out) {
        constexpr unsigned per_byte = E == Element::e4m3 ? 1 : 2;
        size_t i = 0;
        for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
            Codes codes[4];
            for (unsigned k = 0; k < 4; ++k) codes[k] = code<S, E, kRounds, kFast>(load<S>(x + i + k * kWidth), by);
            store4<E>(out + i / per_byte, codes);
        }
        for (; i + kWidth <= n; i += kWidth) store<E>(out + i / per_byte, code<S, E, kRounds, kFast>(load<S>(x + i), by));
        if (i < n) {
            Stored<S> padded[kWidth] = {};
            uint8_t codes[kWidth];
            std::memcpy(padded, x + i, (n - i) * sizeof(Stored<S>));
            store<E>(codes, code<S, E, kRounds, kFast>(load<S>(padded), by));
            std::memcpy(out + i / per_byte, codes, (n - i) / per_byte);
        }
    }

    template <Source S, Element E, bool kRounds>
    DELTAWIRE_INLINE static void run(const Stored<S>* x, size_t n, float divisor, uint8_t* out) {
        const Divisor by(divisor, 1.0f / divisor);
        if (is_fast(divisor)) run_codes<S, E, kRounds, true>(x, n, by, out);
        else run_codes<S, E, kRounds, false>(x, n, by, out);
    }

    template <Source S, Element E, bool kRounds>
    DELTAWIRE_INLINE static void run_groups(const Stored<S>* x, size_t n, uint32_t group, const float* divisors, uint8_t* out) {
        constexpr unsigned per_byte = E == Element::e4m3 ? 1 : 2;
        for (size_t at = 0; at < n; at += kBatch) {
            const size_t count = n - at < kBatch ? n - at : kBatch;
            float reciprocals[kBatch], lows[kBatch];
            uint32_t fast = Isa::kHasFma;
            for (size_t i = 0; i < count; ++i) {  // the compiler makes vectors of it
                reciprocals[i] = 1.0f / divisors[at + i];
                lows[i] = low_of(divisors[at + i], reciprocals[i]);
                fast &= uint32_t(is_fast(divisors[at + i]));
            }
            const auto by = [&](size_t i) { return Divisor(divisors[at + i], reciprocals[i], lows[i]); };
            const auto each = [&]<bool kFast>() {
                size_t i = 0;
                if (group < 4 * kWidth && group % kWidth == 0) {  // four vectors that belong to two or four groups
                    const size_t vectors = group / kWidth;
                    for (; i + 4 / vectors <= count; i += 4 / vectors) {
                        Codes codes[4];
                        for (unsigned k = 0; k < 4; ++k)
                            codes[k] = code<S, E, kRounds, kFast>(load<S>(x + (at + i) * group + k * kWidth), by(i + k / vectors));
                        store4<E>(out + (at + i) * group / per_byte, codes);
                    }
                }
                for (; i < count; ++i) run_codes<S, E, kRounds, kFast>(x + (at + i) * group, group, by(i), out + (at + i) * group / per_byte);
            };
            if (fast) each.template operator()<true>();
            else each.template operator()<false>();
        }
    }

    // Calls `f` with the types of a rule.
    template <class Function>
    DELTAWIRE_INLINE static void with_types(const QuantiseRule& rule, Source source, Function f) {
        const auto with_source = [&]<Source S>() {
            if (rule.element() == Element::int4) f.template operator()<S, Element::int4, true>();
            else if (rule.element() == Element::e2m1) rule.rounds() ? f.template operator()<S, Element::e2m1, true>() : f.template operator()<S, Element::e2m1, false>();
            else rule.rounds() ? f.template operator()<S, Element::e4m3, true>() : f.template operator()<S, Element::e4m3, false>();
        };
        if (source == Source::f32) with_source.template operator()<Source::f32>();
        else if (source == Source::bf16) with_source.template operator()<Source::bf16>();
        else with_source.template operator()<Source::f16>();
    }

    static void codes(const QuantiseRule& rule, const void* elements, size_t n, Source source, float divisor, uint8_t* out) {
        with_types(rule, source, [&]<Source S, Element E, bool kRounds>() { run<S, E, kRounds>(static_cast<const Stored<S>*>(elements), n, divisor, out); });
    }
    static void group_codes(const QuantiseRule& rule, const void* elements, size_t n, Source source, const float* divisors, uint8_t* out) {
        with_types(rule, source, [&]<Source S, Element E, bool kRounds>() {
            if constexpr (E != Element::e4m3) run_groups<S, E, kRounds>(static_cast<const Stored<S>*>(elements), n, rule.group, divisors, out);
        });
    }

    // The largest magnitude of elements, as stored bits without the sign.
    DELTAWIRE_INLINE static uint32_t largest_stored(const float* x, size_t n) {
        const auto* bits = reinterpret_cast<const float*>(x);
        size_t i = 0;
        U found = Isa::splat_u(0);
        const U mask = Isa::splat_u(0x7fffffff);
        if (n >= 4 * kWidth) {
            U more[4] = {found, found, found, found};
            for (; i + 4 * kWidth <= n; i += 4 * kWidth)
                for (unsigned k = 0; k < 4; ++k) more[k] = Isa::max_u(more[k], Isa::and_(Isa::bits(Isa::load(bits + i + k * kWidth)), mask));
            found = Isa::max_u(Isa::max_u(more[0], more[1]), Isa::max_u(more[2], more[3]));
        }
        for (; i + kWidth <= n; i += kWidth) found = Isa::max_u(found, Isa::and_(Isa::bits(Isa::load(bits + i)), mask));
        uint32_t out = Isa::reduce_max(found);
        for (; i < n; ++i) {
            const uint32_t b = std::bit_cast<uint32_t>(x[i]) & 0x7fffffff;
            out = b > out ? b : out;
        }
        return out;
    }
    DELTAWIRE_INLINE static uint32_t largest_stored(const uint16_t* x, size_t n) {
        uint16_t out = 0;
        for (size_t i = 0; i < n; ++i) {  // the compiler makes vectors of it
            const uint16_t b = x[i] & 0x7fff;
            out = b > out ? b : out;
        }
        return out;
    }
    template <Source S>
    DELTAWIRE_INLINE static uint32_t largest_of(const Stored<S>* x, size_t n) {
        const uint32_t found = largest_stored(x, n);
        if constexpr (S == Source::f32) return found;
        else if constexpr (S == Source::bf16) return found << 16;
        else return std::bit_cast<uint32_t>(from_f16(uint16_t(found)));
    }
    static uint32_t largest(const void* elements, size_t n, Source source) {
        if (source == Source::f32) return largest_of<Source::f32>(static_cast<const float*>(elements), n);
        const auto* x = static_cast<const uint16_t*>(elements);
        return source == Source::bf16 ? largest_of<Source::bf16>(x, n) : largest_of<Source::f16>(x, n);
    }
    template <Source S>
    DELTAWIRE_INLINE static void run_group_largest(const Stored<S>* x, size_t n, uint32_t group, float* out) {
        size_t i = 0;
        if constexpr (Isa::kReducesMany) {
            const U mask = Isa::splat_u(0x7fffffff);
            for (; i + kWidth <= n; i += kWidth) {  // as many groups as there are lanes
                U each[kWidth];
                for (unsigned g = 0; g < kWidth; ++g) {
                    const Stored<S>* const first = x + (i + g) * group;
                    each[g] = Isa::and_(Isa::bits(load<S>(first)), mask);
                    for (uint32_t k = kWidth; k < group; k += kWidth) each[g] = Isa::max_u(each[g], Isa::and_(Isa::bits(load<S>(first + k)), mask));
                }
                Isa::store(out + i, Isa::from_bits(Isa::reduce_max_each(each)));
            }
        }
        for (; i < n; ++i) out[i] = std::bit_cast<float>(largest_of<S>(x + i * group, group));
    }
    static void group_largest(const void* elements, size_t n, uint32_t group, Source source, float* out) {
        if (source == Source::f32) return run_group_largest<Source::f32>(static_cast<const float*>(elements), n, group, out);
        const auto* x = static_cast<const uint16_t*>(elements);
        source == Source::bf16 ? run_group_largest<Source::bf16>(x, n, group, out) : run_group_largest<Source::f16>(x, n, group, out);
    }

    static constexpr size_t kBatch = 64;         // groups that are processed at a time, in the first-level cache
    static constexpr uint32_t kTileBlocks = 4;   // blocks beside each other whose second pass reads from the second-level cache

    // Bytes of weights that are prefetched, for one use: otherwise they would drive the codes out of the caches, which are encoded next.
    static constexpr size_t kAhead = 4096;

    // Whole blocks whose scales probably stay: their codes are made with the previous scales in the same pass that finds their largest values, so that
    // the weights are read from memory once, in the order of their addresses. Blocks whose scales do not stay are made again.
    template <Source S, bool kPower>
    DELTAWIRE_INLINE static uint32_t quantise_sticky_blocks(const QuantiseRows& job, uint32_t blocks) {
        const Rows& rows = job.rows;
        const auto row = [&](uint32_t r) { return reinterpret_cast<const Stored<S>*>(rows.data + int64_t(r) * rows.stride); };
        uint32_t all = 0;
        for (uint32_t begin = 0; begin < blocks; begin += kBatch) {
            const uint32_t count = std::min<uint32_t>(kBatch, blocks - begin);
            float tried[kBatch], reciprocals[kBatch];
            U found[kBatch];
            const uint8_t* const previous = job.previous + 4 * begin;
            std::memcpy(tried, previous, 4 * count);
            bool usable[kBatch];
            for (uint32_t b = 0; b < count; ++b) {
                usable[b] = is_fast(tried[b]) && (!kPower || is_power_of_two(tried[b]));
                if (!usable[b]) tried[b] = 1.0f;
                reciprocals[b] = 1.0f / tried[b];
                found[b] = Isa::splat_u(0);
            }
            for (uint32_t r = 0; r < rows.rows; ++r) {
                const Stored<S>* x = row(r) + begin * kBlockColumns;
                uint8_t* out = job.codes + size_t(r) * rows.columns + begin * kBlockColumns;
                for (uint32_t b = 0; b < count; ++b, x += kBlockColumns, out += kBlockColumns) {
                    const Divisor by(tried[b], reciprocals[b]);
                    U most = found[b];
                    for (uint32_t i = 0; i < kBlockColumns; i += 4 * kWidth) {
                        for (unsigned at = 0; at < 4 * kWidth * sizeof(Stored<S>); at += 64)
                            __builtin_prefetch(reinterpret_cast<const uint8_t*>(x + i) + kAhead + at, 0, 0);
                        U values[4], signs[4];
                        for (unsigned k = 0; k < 4; ++k) {
                            const F value = load<S>(x + i + k * kWidth);
                            // Adding 0.0 drops the sign of -0.0. Other quotients have the sign of the weight, or are not finite.
                            const F q = Isa::fma(value, by.reciprocal, Isa::fma(value, by.low, Isa::splat(0.0f)));
                            const U a = Isa::and_(Isa::bits(q), Isa::splat_u(0x7fffffff));
                            most = Isa::max_u(most, a);
                            values[k] = fitting_magnitudes(a);
                            signs[k] = Isa::bits(q);
                        }
                        if constexpr (Isa::kStoresFour) {
                            Isa::store_four_bytes(out + i, values, signs, 0);
                        } else {
                            for (unsigned k = 0; k < 4; ++k) {
                                const U sign = Isa::and_(Isa::template shift_right<24>(signs[k]), Isa::splat_u(0x80));
                                Isa::store_bytes(out + i + k * kWidth, Isa::or_(values[k], sign));
                            }
                        }
                    }
                    found[b] = most;
                }
            }
            for (uint32_t b = 0; b < count; ++b) {
                // The largest quotient decides nearly always whether the scale stays: it does if it is up to 464, and so far above 224 that rounding does not
                // matter, or if all weights are 0.
                const uint32_t most = Isa::reduce_max(found[b]);
                const float quotient = std::bit_cast<float>(most);
                const size_t scale = 4 * (begin + b);
                if (usable[b] && most < kNotFinite && (most == 0 || (quotient <= kFitsUpTo<Element::e4m3> && quotient >= 224.01f))) {
                    std::memcpy(job.scales + scale, &tried[b], 4);
                    continue;
                }
                QuantiseRows again = job;
                again.rows.data += size_t(begin + b) * kBlockColumns * sizeof(Stored<S>);
                again.codes += size_t(begin + b) * kBlockColumns;
                again.scales += scale, again.previous += scale;
                again.rows.columns = kBlockColumns;
                all = std::max(all, quantise_tile<S, kPower>(again, 0, kBlockColumns, rows.columns));
                if (all >= kNotFinite) return all;
            }
        }
        return all;
    }

    // One or a few blocks beside each other: finds their largest values, chooses their scales and writes their codes. Rows of codes have `width` bytes.
    template <Source S, bool kPower>
    DELTAWIRE_INLINE static uint32_t quantise_tile(const QuantiseRows& job, uint32_t begin, uint32_t end, uint32_t width) {
        const Rows& rows = job.rows;
        const auto row = [&](uint32_t r) { return reinterpret_cast<const Stored<S>*>(rows.data + int64_t(r) * rows.stride); };
        const uint32_t count = (end - begin + kBlockColumns - 1) / kBlockColumns;
        uint32_t all = 0, found[kTileBlocks] = {};
        for (uint32_t r = 0; r < rows.rows; ++r)
            for (uint32_t b = 0; b < count; ++b) {
                const uint32_t first = begin + b * kBlockColumns;
                found[b] = std::max(found[b], largest_of<S>(row(r) + first, std::min(kBlockColumns, end - first)));
            }
        float maxima[kTileBlocks], divisors[kTileBlocks];
        for (uint32_t b = 0; b < count; ++b) all = std::max(all, found[b]), maxima[b] = std::bit_cast<float>(found[b]);
        if (all >= kNotFinite) return all;
        const uint32_t first_scale = begin / kBlockColumns;
        choose_block<kPower>(maxima, job.previous ? job.previous + 4 * first_scale : nullptr, count, job.scales + 4 * first_scale, divisors);
        const uint32_t next_end = std::min(rows.columns, end + kTileBlocks * kBlockColumns);
        for (uint32_t r = 0; r < rows.rows; ++r) {
            for (uint32_t at = end; at < next_end; at += 64 / sizeof(Stored<S>)) __builtin_prefetch(row(r) + at, 0, 2);
            for (uint32_t b = 0; b < count; ++b) {
                const uint32_t first = begin + b * kBlockColumns;
                run<S, Element::e4m3, false>(row(r) + first, std::min(kBlockColumns, end - first), divisors[b], job.codes + size_t(r) * width + first);
            }
        }
        return all;
    }

    // 128 rows at most: one row of blocks. While the codes of some blocks are computed, the next blocks are prefetched.
    template <Source S, bool kPower>
    DELTAWIRE_INLINE static uint32_t quantise_blocks(const QuantiseRows& job) {
        const Rows& rows = job.rows;
        const uint32_t sticky = Isa::kHasFma && job.previous ? rows.columns / kBlockColumns : 0;
        uint32_t all = sticky ? quantise_sticky_blocks<S, kPower>(job, sticky) : 0;
        if (all >= kNotFinite) return all;
        for (uint32_t begin = sticky * kBlockColumns; begin < rows.columns; begin += kTileBlocks * kBlockColumns) {
            all = std::max(all, quantise_tile<S, kPower>(job, begin, std::min(rows.columns, begin + kTileBlocks * kBlockColumns), rows.columns));
            if (all >= kNotFinite) return all;
        }
        return all;
    }

    template <Source S, RecipeKind K>
    DELTAWIRE_INLINE static uint32_t quantise_groups(const QuantiseRule& rule, const QuantiseRows& job) {
        const Rows& rows = job.rows;
        const uint32_t group = K == RecipeKind::nvfp4 ? 16 : K == RecipeKind::mxfp4 ? 32 : rule.group, per_row = rows.columns / group;
        constexpr unsigned scale_bytes = K == RecipeKind::int4 ? sizeof(Stored<S>) : 1;
        constexpr Element element = K == RecipeKind::int4 ? Element::int4 : Element::e2m1;
        uint32_t all = 0;
        for (uint32_t r = 0; r < rows.rows; ++r) {
            const auto* x = reinterpret_cast<const Stored<S>*>(rows.data + int64_t(r) * rows.stride);
            for (uint32_t at = 0; at < per_row; at += kBatch) {
                const uint32_t count = std::min<uint32_t>(kBatch, per_row - at);
                float maxima[kBatch], divisors[kBatch];
                run_group_largest<S>(x + size_t(at) * group, count, group, maxima);
                uint32_t found = 0;
                for (uint32_t i = 0; i < count; ++i) found = std::max(found, std::bit_cast<uint32_t>(maxima[i]));
                all = std::max(all, found);
                if (all >= kNotFinite) return all;
                const size_t first = size_t(r) * per_row + at;
                const uint8_t* previous = job.previous ? job.previous + first * scale_bytes : nullptr;
                uint8_t* scales = job.scales + first * scale_bytes;
                if constexpr (K == RecipeKind::nvfp4) choose_nvfp4<S>(job.shared, maxima, previous, count, scales, divisors);
                else if constexpr (K == RecipeKind::mxfp4) choose_mxfp4<S>(maxima, previous, count, scales, divisors);
                else choose_plain<S, Element::int4>(maxima, previous, count, scales, divisors);
                run_groups<S, element, K != RecipeKind::nvfp4>(x + size_t(at) * group, count, group, divisors, job.codes + first * group / 2);
            }
        }
        return all;
    }

    template <Source S>
    DELTAWIRE_INLINE static uint32_t quantise_rows(const QuantiseRule& rule, const QuantiseRows& job) {
        const Rows& rows = job.rows;
        uint32_t all = 0;
        for (uint32_t r = 0; r < rows.rows; ++r) {
            const auto* x = reinterpret_cast<const Stored<S>*>(rows.data + int64_t(r) * rows.stride);
            const uint32_t found = largest_of<S>(x, rows.columns);
            all = std::max(all, found);
            if (all >= kNotFinite) return all;
            float divisor = job.shared;
            if (rule.kind == RecipeKind::fp8_channel) {
                const float maximum = std::bit_cast<float>(found);
                constexpr unsigned bytes = sizeof(Stored<S>);
                choose_plain<S, Element::e4m3>(&maximum, job.previous ? job.previous + size_t(r) * bytes : nullptr, 1, job.scales + size_t(r) * bytes, &divisor);
            }
            run<S, Element::e4m3, true>(x, rows.columns, divisor, job.codes + size_t(r) * rows.columns);
        }
        return all;
    }

    static uint32_t quantise(const QuantiseRule& rule, const QuantiseRows& job) {
        uint32_t found = 0;
        const auto with_source = [&]<Source S>() {
            switch (rule.kind) {
                case RecipeKind::fp8_block: found = quantise_blocks<S, false>(job); break;
                case RecipeKind::fp8_block_ue8m0: found = quantise_blocks<S, true>(job); break;
                case RecipeKind::nvfp4: found = quantise_groups<S, RecipeKind::nvfp4>(rule, job); break;
                case RecipeKind::mxfp4: found = quantise_groups<S, RecipeKind::mxfp4>(rule, job); break;
                case RecipeKind::int4: found = quantise_groups<S, RecipeKind::int4>(rule, job); break;
                default: found = quantise_rows<S>(rule, job);
            }
        };
        if (job.rows.source == Source::f32) with_source.template operator()<Source::f32>();
        else if (job.rows.source == Source::bf16) with_source.template operator()<Source::bf16>();
        else with_source.template operator()<Source::f16>();
        return found;
    }

    static constexpr QuantiseKernels table(const char* name) { return {name, &quantise, &largest, &group_largest, &codes, &group_codes}; }
};

}  // namespace
}  // namespace deltawire
