// The basic types of the codec: element types, strided tensors, errors, and the constants of docs/format.md.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

// For small functions in code that is compiled for several instruction sets. They are always inlined, so that the linker cannot choose a copy
// that the machine cannot run.
#define DELTAWIRE_INLINE [[gnu::always_inline]] inline

namespace deltawire {

static_assert(std::endian::native == std::endian::little, "deltawire reads and writes little-endian memory in place");

inline constexpr unsigned kContexts = 16;
inline constexpr unsigned kGroup = 64;              // elements that one mask word describes
inline constexpr uint32_t kTile = 1u << 14;         // chunks start and end at multiples of this
inline constexpr size_t kPieceBytes = 8192;          // processed at a time; with its working memory it fits into the first-level cache
inline constexpr uint32_t kBlock = 1u << 24;        // chunks never cross multiples of this
inline constexpr uint32_t kMaxChanges = 1u << 15;   // per chunk; bounds the memory that a chunk can need
inline constexpr uint32_t kChunkTarget = 1u << 14;  // changes at which an encoder closes a chunk
inline constexpr size_t kChunkHeader = 8;

enum class ChunkMode : uint32_t { same = 0, coded = 1, raw = 2 };
enum class ValueMode : uint32_t { unit = 0, runs = 1, direct = 2, symbols = 3 };

using Lanes = std::array<uint32_t, 4>;

inline void add_lanes(Lanes& a, const Lanes& b) {
    for (unsigned j = 0; j < 4; ++j) a[j] += b[j];
}

// A payload breaks a rule of the format.
struct Corrupt : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// A payload is valid, but for another element type or number of elements.
struct WrongType : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct WrongCount : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct ElementType {
    uint8_t code;
    uint8_t bytes;           // 1, 2, 4 or 8
    uint8_t exponent_shift;
    uint8_t exponent_bits;   // 0 means no exponent, and so a single context

    unsigned width() const { return bytes * 8u; }
    unsigned contexts() const { return exponent_bits ? kContexts : 1; }
    uint32_t exponent_mask() const { return (1u << exponent_bits) - 1; }
};

// A tensor in memory with any strides (in bytes). data == nullptr stands for zeros.
struct View {
    uint8_t* data = nullptr;
    uint64_t count = 0;
    uint8_t bytes = 1;
    bool contiguous = true;
    std::vector<uint64_t> shape;
    std::vector<int64_t> strides;

    uint8_t* at(uint64_t index) const;
    // Copies elements [start, start + n) to `out` in row-major order.
    void gather(uint64_t start, uint64_t n, uint8_t* out) const;
};

// The number of elements of a piece. A tile is a whole number of pieces.
template <class T>
inline constexpr uint32_t kPiece = uint32_t(kPieceBytes / sizeof(T));

// Maps an element's bits to an unsigned integer in a monotone and one-to-one way, and back. `floating` is a property of the tensor. Signs of weights are
// random, so there must be no branch that depends on them.
template <class T>
DELTAWIRE_INLINE constexpr T ordered(T x, bool floating) {
    constexpr unsigned last = sizeof(T) * 8 - 1;
    constexpr T top = T(T(1) << last);
    const T negative = T(T(0) - T(x >> last));
    return floating ? T(x ^ (negative | top)) : x;
}
template <class T>
DELTAWIRE_INLINE constexpr T unordered(T x, bool floating) {
    constexpr unsigned last = sizeof(T) * 8 - 1;
    constexpr T top = T(T(1) << last);
    const T negative = T(T(x >> last) - T(1));
    return floating ? T(x ^ (negative | top)) : x;
}

}  // namespace deltawire
