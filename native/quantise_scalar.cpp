// Without special instructions: for any processor.
#include <cmath>

#include "quantise_impl.hpp"

namespace deltawire {
namespace {

struct ScalarLanes {
    static constexpr unsigned kWidth = 8;
    static constexpr bool kHasFma = false, kStoresFour = false, kReducesMany = false, kLooksUp = false;
    struct F {
        float v[kWidth];
    };
    struct U {
        uint32_t v[kWidth];
    };

    template <class To, class Function>
    DELTAWIRE_INLINE static To each(Function f) {
        To out;
        for (unsigned i = 0; i < kWidth; ++i) out.v[i] = f(i);
        return out;
    }

    static F load(const float* p) { return each<F>([&](unsigned i) { return p[i]; }); }
    static F load_bf16(const uint16_t* p) { return each<F>([&](unsigned i) { return from_bf16(p[i]); }); }
    static F load_f16(const uint16_t* p) { return each<F>([&](unsigned i) { return from_f16(p[i]); }); }
    static F splat(float x) { return each<F>([&](unsigned) { return x; }); }
    static U splat_u(uint32_t x) { return each<U>([&](unsigned) { return x; }); }
    static U bits(F a) { return std::bit_cast<U>(a); }
    static F from_bits(U a) { return std::bit_cast<F>(a); }
    static F mul(F a, F b) { return each<F>([&](unsigned i) { return a.v[i] * b.v[i]; }); }
    static F div(F a, F b) { return each<F>([&](unsigned i) { return a.v[i] / b.v[i]; }); }
    static F add_f(F a, F b) { return each<F>([&](unsigned i) { return a.v[i] + b.v[i]; }); }
    static F fma(F a, F, F) { return a; }
    static F fnma(F a, F, F) { return a; }
    static F min(F a, F b) { return each<F>([&](unsigned i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
    static F max(F a, F b) { return each<F>([&](unsigned i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
    static F round_f16(F a) { return each<F>([&](unsigned i) { return rounded_to<Source::f16>(a.v[i]); }); }
    static U round_to_integer(F a) { return each<U>([&](unsigned i) { return uint32_t(int32_t(std::nearbyint(a.v[i]))); }); }
    static U add(U a, U b) { return each<U>([&](unsigned i) { return a.v[i] + b.v[i]; }); }
    static U sub(U a, U b) { return each<U>([&](unsigned i) { return a.v[i] - b.v[i]; }); }
    static U and_(U a, U b) { return each<U>([&](unsigned i) { return a.v[i] & b.v[i]; }); }
    static U or_(U a, U b) { return each<U>([&](unsigned i) { return a.v[i] | b.v[i]; }); }
    template <unsigned n>
    static U shift_right(U a) { return each<U>([&](unsigned i) { return a.v[i] >> n; }); }
    static U min_u(U a, U b) { return each<U>([&](unsigned i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
    static U max_u(U a, U b) { return each<U>([&](unsigned i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
    static uint32_t reduce_max(U a) {
        uint32_t out = 0;
        for (const uint32_t x : a.v) out = x > out ? x : out;
        return out;
    }
    static void store_bytes(uint8_t* out, U codes) {
        for (unsigned i = 0; i < kWidth; ++i) out[i] = uint8_t(codes.v[i]);
    }
    static void store_nibbles(uint8_t* out, U codes) {
        for (unsigned i = 0; i < kWidth / 2; ++i) out[i] = uint8_t(codes.v[2 * i] | codes.v[2 * i + 1] << 4);
    }
};

}  // namespace

constinit const QuantiseKernels kScalarQuantise = Quantise<ScalarLanes>::table("scalar");

}  // namespace deltawire
