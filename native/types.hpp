// The basic types of the codec: element types, strided tensors, errors, and the constants of docs/format.md.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
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
inline constexpr uint32_t kOldBlock = 1u << 24;     // the most elements of a chunk in versions 1 and 2
inline constexpr uint32_t kMaxChanges = 1u << 15;   // per chunk; bounds the memory that a chunk can need
inline constexpr uint32_t kChunkTarget = 1u << 14;  // changes at which an encoder closes a chunk
inline constexpr size_t kOldChunkHeader = 8;        // bytes, in versions 1 and 2

#if defined(DELTAWIRE_BLOCK_TILES)
inline constexpr uint32_t kBlockTiles = DELTAWIRE_BLOCK_TILES;  // the fuzz target has small blocks
#else
inline constexpr uint32_t kBlockTiles = 1u << 10;
#endif

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
    uint8_t bytes;           // 1, 2, 4 or 8: the size of the tensor's own elements
    uint8_t width;           // bits of a coded element: 4, or 8 * bytes
    uint8_t exponent_shift;
    uint8_t exponent_bits;   // 0 means no exponent, and so a single context

    unsigned contexts() const { return exponent_bits ? kContexts : 1; }
    uint32_t exponent_mask() const { return (1u << exponent_bits) - 1; }
    // The number of coded elements in this many of the tensor's own elements.
    uint64_t coded(uint64_t own) const { return own * bytes * 8 / width; }
    // The number of bytes of this many coded elements.
    uint64_t bytes_of(uint64_t elements) const { return elements * width / 8; }
    // The number of tiles that a chunk of a group never crosses a multiple of.
    uint32_t block_tiles() const { return kBlockTiles << (width >= 16 ? 0 : width == 8 ? 1 : 2); }
};

// The shape and the strides (in bytes) of a tensor that is not contiguous.
struct Layout {
    std::vector<uint64_t> shape;
    std::vector<int64_t> strides;
};

// A tensor in memory. data == nullptr means that all elements are zero.
struct View {
    uint8_t* data = nullptr;
    uint64_t count = 0;
    uint8_t bytes = 1;
    std::shared_ptr<const Layout> layout{};  // none if the tensor is contiguous and aligned

    uint8_t* at(uint64_t index) const;
    // Copies elements [start, start + n) to `out` in row-major order.
    void gather(uint64_t start, uint64_t n, uint8_t* out) const;
};

// The coded elements of a tensor of 4-bit codes: two in each byte, the first in the low bits. A pointer to such elements points to bytes.
struct Nibble {};

// How a coded element is held in a variable, and its width in memory.
template <class E>
struct Held {
    using Value = E;
    static constexpr unsigned width = sizeof(E) * 8;
};
template <>
struct Held<Nibble> {
    using Value = uint8_t;
    static constexpr unsigned width = 4;
};
template <class E>
using ValueOf = typename Held<E>::Value;

// The number of elements of a piece. A tile is a whole number of pieces.
template <class E>
inline constexpr uint32_t kPiece = uint32_t(kPieceBytes * 8 / Held<E>::width);

// Maps an element's bits to an unsigned integer in a monotone and one-to-one way, and back. `floating` is a property of the tensor. Signs of weights are
// random, so there must be no branch that depends on them.
template <class E>
DELTAWIRE_INLINE constexpr ValueOf<E> ordered(ValueOf<E> x, bool floating) {
    using T = ValueOf<E>;
    constexpr unsigned last = Held<E>::width - 1;
    constexpr T top = T(T(1) << last), all = T(top | T(top - 1));
    const T negative = T(T(T(0) - T(x >> last)) & all);
    return floating ? T(x ^ (negative | top)) : x;
}
template <class E>
DELTAWIRE_INLINE constexpr ValueOf<E> unordered(ValueOf<E> x, bool floating) {
    using T = ValueOf<E>;
    constexpr unsigned last = Held<E>::width - 1;
    constexpr T top = T(T(1) << last), all = T(top | T(top - 1));
    const T negative = T(T(T(x >> last) - T(1)) & all);
    return floating ? T(x ^ (negative | top)) : x;
}

// Returns the step from one element to another. Steps of 4-bit codes are held as signed bytes.
template <class E>
DELTAWIRE_INLINE constexpr ValueOf<E> step_between(ValueOf<E> old, ValueOf<E> now, bool floating) {
    using T = ValueOf<E>;
    const T step = T(ordered<E>(now, floating) - ordered<E>(old, floating));
    if constexpr (Held<E>::width == 4) return T(int8_t(uint8_t(step << 4)) >> 4);
    else return step;
}
template <class E>
DELTAWIRE_INLINE constexpr ValueOf<E> stepped(ValueOf<E> old, ValueOf<E> step, bool floating) {
    using T = ValueOf<E>;
    T x = T(ordered<E>(old, floating) + step);
    if constexpr (Held<E>::width == 4) x &= 15;
    return unordered<E>(x, floating);
}

}  // namespace deltawire
