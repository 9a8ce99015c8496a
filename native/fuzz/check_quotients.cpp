// Proves what quantise_impl.hpp relies on, by trying everything. With the reciprocal r of a divisor s, and l = (1 - r·s)·r,
//     x·r + x·l         and, for integers,         x·r + (x - x·r·s)·r
// compare with each boundary between two codes exactly as the quotient x / s does. Only the mantissa of all ones is excepted, for the first of them.
// The result does not depend on exponents, so it is enough to try every mantissa of the divisor, every mantissa of a boundary, and the weights
// next to their product. It takes seconds:
//     g++ -O3 -march=native -ffp-contract=off -std=c++20 native/fuzz/check_quotients.cpp -o check_quotients && ./check_quotients
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>

static float sum_of_products(float x, float s, float r) { return __builtin_fmaf(x, r, x * (__builtin_fmaf(-s, r, 1.0f) * r)); }
static float corrected_product(float x, float s, float r) {
    const float product = x * r;
    return __builtin_fmaf(__builtin_fmaf(-product, s, x), r, product);
}

int main() {
    long wrong = 0;
    for (uint32_t mantissa = 1u << 23; mantissa < 1u << 24; ++mantissa) {
        const float s = std::ldexp(float(mantissa), -24), r = 1.0f / s;
        for (int sixteenths = 16; sixteenths < 32; ++sixteenths) {  // boundaries of e4m3, e2m1 and int4 have at most 5 significant bits
            const float boundary = float(sixteenths) / 16;
            const uint32_t near = std::bit_cast<uint32_t>(boundary * s);
            for (uint32_t bits = near - 5; bits != near + 5; ++bits) {
                const float x = std::bit_cast<float>(bits), exact = x / s;
                const auto differs = [&](float q) { return (q < boundary) != (exact < boundary) || (q > boundary) != (exact > boundary); };
                wrong += differs(corrected_product(x, s, r)) || (mantissa != 0xffffff && differs(sum_of_products(x, s, r)));
            }
        }
    }
    // Quotients of two bfloat16 or float16 numbers are rounded once more to that type, so they must be right everywhere.
    for (uint32_t a = 1u << 10; a < 1u << 11; ++a)
        for (uint32_t b = 1u << 10; b < 1u << 11; ++b) {
            const float x = float(a), s = float(b) / 2048, r = 1.0f / s;
            wrong += corrected_product(x, s, r) != x / s || sum_of_products(x, s, r) != x / s;
        }
    std::printf("%ld products are on another side of a boundary than their quotients\n", wrong);
    return wrong != 0;
}
