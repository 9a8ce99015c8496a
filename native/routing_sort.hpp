// Sorts the ids of rows of routed experts. It is compiled once per instruction set, with routing_impl.hpp.
#pragma once

#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "types.hpp"

namespace deltawire {
namespace {

// Vectors of bytes. `low` and `high` interleave the lower and the upper halves of each 16 bytes of two vectors.
#if defined(__AVX2__)
using Bytes = __m256i;
DELTAWIRE_INLINE Bytes low(Bytes a, Bytes b) { return _mm256_unpacklo_epi8(a, b); }
DELTAWIRE_INLINE Bytes high(Bytes a, Bytes b) { return _mm256_unpackhi_epi8(a, b); }
DELTAWIRE_INLINE Bytes smaller(Bytes a, Bytes b) { return _mm256_min_epu8(a, b); }
DELTAWIRE_INLINE Bytes larger(Bytes a, Bytes b) { return _mm256_max_epu8(a, b); }
DELTAWIRE_INLINE Bytes equal(Bytes a, Bytes b) { return _mm256_cmpeq_epi8(a, b); }
#else
using Bytes = unsigned char __attribute__((vector_size(16)));
#if defined(__clang__)  // GCC has this function only since version 12
DELTAWIRE_INLINE Bytes low(Bytes a, Bytes b) { return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
DELTAWIRE_INLINE Bytes high(Bytes a, Bytes b) { return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31); }
#else
DELTAWIRE_INLINE Bytes low(Bytes a, Bytes b) { return __builtin_shuffle(a, b, Bytes{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}); }
DELTAWIRE_INLINE Bytes high(Bytes a, Bytes b) { return __builtin_shuffle(a, b, Bytes{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31}); }
#endif
DELTAWIRE_INLINE Bytes smaller(Bytes a, Bytes b) { return a < b ? a : b; }
DELTAWIRE_INLINE Bytes larger(Bytes a, Bytes b) { return a < b ? b : a; }
DELTAWIRE_INLINE Bytes equal(Bytes a, Bytes b) { return Bytes(a == b); }
#endif

DELTAWIRE_INLINE void order_pair(Bytes& a, Bytes& b) {
    const Bytes first = smaller(a, b), second = larger(a, b);
    a = first, b = second;
}

// Moves byte i of the 128 bytes that eight vectors hold in one of their 16 bytes to place 2i, modulo 127. Seven times of it change nothing.
DELTAWIRE_INLINE void spread(Bytes (&r)[8]) {
    const Bytes next[8] = {low(r[0], r[4]), high(r[0], r[4]), low(r[1], r[5]), high(r[1], r[5]), low(r[2], r[6]), high(r[2], r[6]), low(r[3], r[7]), high(r[3], r[7])};
    for (unsigned i = 0; i < 8; ++i) r[i] = next[i];
}

constexpr size_t kRowsOfVectors = sizeof(Bytes);  // rows of eight bytes that eight vectors hold

// Sorts rows of eight bytes. Returns whether no row has a byte twice.
DELTAWIRE_INLINE bool sort_vectors(const uint8_t* from, uint8_t* to) {
    Bytes r[8];
    std::memcpy(r, from, sizeof r);
    spread(r), spread(r), spread(r), spread(r);  // now vector i has byte i of all rows
    order_pair(r[0], r[2]), order_pair(r[1], r[3]), order_pair(r[4], r[6]), order_pair(r[5], r[7]);
    order_pair(r[0], r[4]), order_pair(r[1], r[5]), order_pair(r[2], r[6]), order_pair(r[3], r[7]);
    order_pair(r[0], r[1]), order_pair(r[2], r[3]), order_pair(r[4], r[5]), order_pair(r[6], r[7]);
    order_pair(r[2], r[4]), order_pair(r[3], r[5]);
    order_pair(r[1], r[4]), order_pair(r[3], r[6]);
    order_pair(r[1], r[2]), order_pair(r[3], r[4]), order_pair(r[5], r[6]);
    Bytes twice = equal(r[0], r[1]);
    for (unsigned i = 1; i < 7; ++i) twice |= equal(r[i], r[i + 1]);
    spread(r), spread(r), spread(r);
    std::memcpy(to, r, sizeof r);
    uint64_t words[sizeof(Bytes) / 8], any = 0;
    std::memcpy(words, &twice, sizeof twice);
    for (const uint64_t word : words) any |= word;
    return !any;
}

// Sorts any number of rows of eight bytes. Returns whether no row has a byte twice.
DELTAWIRE_INLINE bool sort_rows_of_bytes(const uint8_t* from, uint8_t* to, size_t rows) {
    bool distinct = true;
    size_t row = 0;
    for (; row + kRowsOfVectors <= rows; row += kRowsOfVectors) distinct &= sort_vectors(from + row * 8, to + row * 8);
    if (row < rows) {
        uint8_t rest[kRowsOfVectors * 8];
        for (size_t i = 0; i < sizeof rest; ++i) rest[i] = uint8_t(i & 7);  // distinct numbers
        std::memcpy(rest, from + row * 8, (rows - row) * 8);
        distinct &= sort_vectors(rest, rest);
        std::memcpy(to + row * 8, rest, (rows - row) * 8);
    }
    return distinct;
}

// Sorts one row of any length. Returns whether it has no number twice.
DELTAWIRE_INLINE bool sort_one(int16_t* row, unsigned k) {
    bool distinct = true;
    for (unsigned i = 1; i < k; ++i) {
        const int16_t moved = row[i];
        unsigned at = i;
        for (; at && row[at - 1] > moved; --at) row[at] = row[at - 1];
        distinct &= !at || row[at - 1] != moved;
        row[at] = moved;
    }
    return distinct;
}

}  // namespace
}  // namespace deltawire
