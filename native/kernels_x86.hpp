// Shared by the AVX2 and AVX-512 kernels: work on single bits with BMI1, BMI2 and POPCNT.
#pragma once

#include <immintrin.h>

#include "kernels_impl.hpp"

namespace deltawire {
namespace {

struct SingleBits {
    // Uses the scalar units, because the vector units are busy. Does two at a time without a branch, because few groups hold more at usual densities.
    static uint16_t* positions(uint64_t mask, uint16_t first, uint16_t* out) {
        uint16_t* const end = out + _mm_popcnt_u64(mask);
        do {
            out[0] = uint16_t(first + _tzcnt_u64(mask));
            mask = _blsr_u64(mask);
            out[1] = uint16_t(first + _tzcnt_u64(mask));
            mask = _blsr_u64(mask);
            out += 2;
        } while (mask);
        return end;
    }

    // Returns the index of the n-th set bit.
    static unsigned select(uint64_t mask, unsigned n) { return unsigned(_tzcnt_u64(_pdep_u64(uint64_t(1) << n, mask))); }
};

}  // namespace
}  // namespace deltawire
