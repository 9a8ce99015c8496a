// Shared by encoding and resolving: reading a tensor piece by piece, and working memory by element width. A piece has kPieceBytes bytes.
#pragma once

#include <cstring>
#include <memory>
#include <tuple>

#include "kernels.hpp"

namespace deltawire {

// Calls `use(T{})` with the unsigned integer type of this many bytes.
template <class Use>
decltype(auto) with_bytes(uint8_t bytes, Use use) {
    switch (bytes) {
        case 1: return use(uint8_t{});
        case 2: return use(uint16_t{});
        case 4: return use(uint32_t{});
        default: return use(uint64_t{});
    }
}

// Calls `use(E{})` with the type of a coded element: an unsigned integer, or `Nibble`.
template <class Use>
decltype(auto) with_element(const ElementType& type, Use use) {
    if (type.width == 4) return use(Nibble{});
    return with_bytes(type.bytes, use);
}

inline ContextRule context_rule(const ElementType& type, uint32_t top) {
    return {type.exponent_shift, type.exponent_bits ? type.exponent_mask() : 0, int32_t(top)};
}

// Returns contiguous elements of a tensor, one piece at a time: in place if the tensor is contiguous, else as a copy.
class PieceReader {
public:
    const uint8_t* read(const View& view, uint64_t first_byte, uint32_t bytes) {
        if (view.data && !view.layout) return view.data + first_byte;
        prepare();
        if (view.data) {
            view.gather(first_byte / view.bytes, bytes / view.bytes, buffer_.get());
            zero_ = false;
        } else if (!zero_) {
            std::memset(buffer_.get(), 0, kBytes);
            zero_ = true;
        }
        return buffer_.get();
    }
    void prepare() {
        if (!buffer_) buffer_.reset(new (std::align_val_t(64)) uint8_t[kBytes]());
    }

private:
    static constexpr size_t kBytes = kPieceBytes;
    struct Free {
        void operator()(uint8_t* p) const { ::operator delete[](p, std::align_val_t(64)); }
    };
    std::unique_ptr<uint8_t[], Free> buffer_;
    bool zero_ = true;
};

// The multipliers of one piece's words.
struct PieceMultipliers {
    std::array<Multipliers, kPieceBytes / 2 / kDigestBlock> of;

    void fill(const Kernels& kernels, uint64_t seed, uint64_t first_byte, uint32_t bytes) {
        const size_t blocks = (bytes + 2 * kDigestBlock - 1) / (2 * kDigestBlock);
        kernels.multipliers(seed, first_byte / (2 * kDigestBlock), blocks, of.data());
    }
};

// The working memory of a thread: one object per element width, made when it is first needed.
template <template <class> class Of>
class PerWidth {
public:
    template <class T, class... Args>
    Of<T>& get(Args&&... args) {
        auto& slot = std::get<std::unique_ptr<Of<T>>>(slots_);
        if (!slot) slot = std::make_unique<Of<T>>(std::forward<Args>(args)...);
        return *slot;
    }

private:
    std::tuple<std::unique_ptr<Of<Nibble>>, std::unique_ptr<Of<uint8_t>>, std::unique_ptr<Of<uint16_t>>, std::unique_ptr<Of<uint32_t>>,
               std::unique_ptr<Of<uint64_t>>>
        slots_;
};

}  // namespace deltawire
