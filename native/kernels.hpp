// The loops that touch every weight, compiled once per instruction set and chosen at run time.
#pragma once

#include "digest.hpp"
#include "types.hpp"

namespace deltawire {

// How the elements of a tensor map to contexts.
struct ContextRule {
    uint8_t shift;
    uint32_t mask;   // 0 means a single context
    int32_t top;

    DELTAWIRE_INLINE unsigned operator()(uint64_t bits) const {
        if (!mask) return 0;
        const int32_t d = top - int32_t(bits >> shift & mask);
        return unsigned(d < 0 ? 0 : d > int32_t(kContexts) - 1 ? int32_t(kContexts) - 1 : d);
    }
};

// The result of scanning one piece: which elements change, and the data to rank any element in its context. For 4-bit codes `positions` are
// those of changed bytes, and a row of `masks` counts the codes before 512 bytes of the piece (kernels_impl.hpp).
struct PieceScan {
    uint32_t changes = 0;  // the number of positions
    alignas(64) uint16_t positions[kPieceBytes + kGroup];
    alignas(64) uint64_t masks[kPieceBytes / kGroup][kContexts];   // the elements of a group that have a context
    alignas(64) uint16_t ranks[kPieceBytes / kGroup][kContexts];   // number of elements of a context in the piece before a group
    int64_t totals[kContexts];                               // number of elements of a context in the whole piece
};

// A change as the encoder finds it: the gap on the line of its context, the step, and the differing bits.
template <class T>
struct Change {
    uint32_t gap;
    T step;
    T differing;
};

// The changes of one chunk by context.
template <class T>
struct Collected {
    struct Context {
        Change<T>* begin;
        Change<T>* end;
        uint32_t next_rank;  // rank of the element after the last change
        uint32_t seen;       // number of elements in earlier pieces
    };
    std::array<Context, kContexts> contexts;
};

// The changed elements of one chunk by context, decoded from its streams. An operand is a step, or bits to XOR.
template <class T>
struct ChunkChanges {
    struct Context {
        uint32_t changes = 0;
        bool is_xor = false;
        bool inverted = false;
        uint32_t unchanged = 0;             // for inverted contexts only
        const uint32_t* targets = nullptr;  // ranks among the context's elements in the chunk, ascending, and then kNoTarget
        const T* operands = nullptr;
    };
    std::array<Context, kContexts> contexts;
};
inline constexpr uint32_t kNoTarget = ~uint32_t(0);
inline constexpr uint32_t kListSlack = 16;  // entries after each list that may be read but are not used

// The state of a walk over a chunk's elements: the elements seen and the changes found in each context.
struct Cursor {
    uint32_t seen[kContexts] = {};
    uint32_t next[kContexts] = {};
};

// The working memory of `locate` for one piece.
struct LocateSpace {
    PieceScan scan;
    // The changes that fall into the piece, context by context.
    alignas(64) uint16_t ranks[kPieceBytes + kListSlack];
    alignas(64) uint8_t contexts[kPieceBytes + kListSlack];
    alignas(64) uint8_t operands[kPieceBytes + 8 * kListSlack];
};

// Receives changes.
template <class T>
struct Located {
    uint32_t count = 0;
    uint32_t* positions;
    T* values;
};

template <class E>
struct KernelsFor {
    using T = ValueOf<E>;
    // Finds the changes in a piece of `count` elements, and adds its base to the digest.
    void (*scan)(const T* base, const T* next, uint32_t count, const ContextRule&, const Multipliers*, PieceScan&, Lanes&);
    // Appends the changes of a scanned piece to those of its chunk, adds their difference to the digest, and returns how many there are.
    uint32_t (*collect)(const T* base, const T* next, uint32_t count, const ContextRule&, const PieceScan&, const Multipliers*, Collected<T>&, Lanes&);
    // Walks one piece (`first` is its position in the chunk), emits the changes that fall into it in any order, and adds the base to the digest.
    void (*locate)(const T* base, uint32_t count, uint32_t first, const ContextRule&, const Multipliers*, const ChunkChanges<T>&, Cursor&,
                   LocateSpace&, Located<T>&, Lanes&);
    // Adds the difference of `n` located changes of one piece to the digest.
    void (*digest_changes)(const T* base, uint32_t first, const uint32_t* positions, const T* values, size_t n, const Multipliers*, Lanes&);
};

struct Kernels {
    const char* name;
    void (*multipliers)(uint64_t seed, uint64_t first_block, size_t n, Multipliers* out);
    // Adds the word sums of `bytes` bytes to `lanes`.
    void (*digest)(const uint8_t* data, size_t bytes, const Multipliers*, Lanes& lanes);
    // Returns the number of bits of LR(k, ·) for all values; or any number >= `limit` if the result is not below `limit`.
    uint64_t (*rice_cost)(const uint32_t* values, size_t n, unsigned k, uint64_t limit);
    KernelsFor<Nibble> u4;
    KernelsFor<uint8_t> u8;
    KernelsFor<uint16_t> u16;
    KernelsFor<uint32_t> u32;
    KernelsFor<uint64_t> u64;

    template <class E>
    const KernelsFor<E>& of() const {
        constexpr unsigned width = Held<E>::width;
        if constexpr (width == 4) return u4;
        else if constexpr (width == 8) return u8;
        else if constexpr (width == 16) return u16;
        else if constexpr (width == 32) return u32;
        else return u64;
    }
};

extern const Kernels kScalarKernels;
#if defined(DELTAWIRE_X86)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

// Returns the instruction sets that this machine runs, best first. The last is always "scalar".
std::vector<const Kernels*> available_kernels();

}  // namespace deltawire
