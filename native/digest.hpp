// The factors of the state digest (docs/format.md §2). The sums are computed by the kernels (kernels.hpp).
#pragma once

#include "types.hpp"

namespace deltawire {

inline constexpr unsigned kDigestBlock = 256;  // words that share a multiplier
inline constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

DELTAWIRE_INLINE constexpr uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

// The factors T(i, j), sorted by lane for scans, and by word for single changes.
struct DigestTable {
    alignas(64) int16_t by_lane[4][kDigestBlock];
    alignas(64) int32_t by_word[kDigestBlock][4];
};

constexpr DigestTable make_digest_table() {
    DigestTable t{};
    for (unsigned j = 0; j < 4; ++j)
        for (unsigned i = 0; i < kDigestBlock; ++i) {
            const int16_t key = int16_t(uint16_t(mix(kGolden * (256 * j + i + 1)) >> 48 | 1));
            t.by_lane[j][i] = key;
            t.by_word[i][j] = key;
        }
    return t;
}
inline constexpr DigestTable kDigestTable = make_digest_table();

// The multipliers M(block, ·): an odd number for each lane and block of words.
struct alignas(16) Multipliers {
    uint32_t lane[4];
};

DELTAWIRE_INLINE void fill_multipliers(uint64_t seed, uint64_t first_block, size_t n, Multipliers* out) {
    for (size_t b = 0; b < n; ++b) {
        const uint64_t x = seed + kGolden * (2 * (first_block + b) + 1), lo = mix(x), hi = mix(x + kGolden);
        out[b] = {{uint32_t(lo) | 1, uint32_t(lo >> 32) | 1, uint32_t(hi) | 1, uint32_t(hi >> 32) | 1}};
    }
}

// Adds the difference to `lanes` when the element at `index` (counted from the first of `multipliers`) changes from `old` to `now`.
template <class E>
DELTAWIRE_INLINE void digest_change(uint32_t index, ValueOf<E> old, ValueOf<E> now, const Multipliers* multipliers, uint32_t lanes[4]) {
    const auto word = [&](uint32_t w, int32_t difference) {
        const Multipliers& m = multipliers[w / kDigestBlock];
        const int32_t* t = kDigestTable.by_word[w % kDigestBlock];
        for (unsigned j = 0; j < 4; ++j) lanes[j] += m.lane[j] * uint32_t(t[j]) * uint32_t(difference);
    };
    using T = ValueOf<E>;
    if constexpr (Held<E>::width == 4) {
        const unsigned place = index % 4;  // the top 4 bits of a word carry its sign
        const int32_t difference = place == 3 ? (now ^ 8) - (old ^ 8) : now - old;
        word(index / 4, difference * (1 << 4 * place));
    } else if constexpr (sizeof(T) == 1) {
        word(index / 2, index % 2 ? (int8_t(now) - int8_t(old)) * 256 : now - old);
    } else {
        for (unsigned i = 0; i < sizeof(T) / 2; ++i)
            word(index * (sizeof(T) / 2) + i, int16_t(uint16_t(now >> 8 * (2 * i))) - int16_t(uint16_t(old >> 8 * (2 * i))));
    }
}

}  // namespace deltawire
