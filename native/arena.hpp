// Memory for many small arrays that are freed together.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace deltawire {

// Allocates from large blocks. Each block is counted against a budget before it is allocated. Blocks use huge pages if the system has them,
// because the first access to every 4 KiB page would cost more than writing the page.
class Arena {
public:
    static constexpr size_t kBlockBytes = size_t(2) << 20;

    // Returns null if `reserve(bytes)` refuses another block, or if the size is larger than a block.
    template <class Reserve>
    uint8_t* take(size_t bytes, Reserve reserve) {
        bytes = (bytes + 63) / 64 * 64;
        if (bytes > kBlockBytes) return nullptr;
        if (bytes > left_) {
            if (!reserve(kBlockBytes)) return nullptr;
            auto* block = static_cast<uint8_t*>(std::aligned_alloc(kBlockBytes, kBlockBytes));
            if (!block) return nullptr;
            blocks_.emplace_back(block);
#if defined(__linux__)
            madvise(block, kBlockBytes, MADV_HUGEPAGE);
#endif
            at_ = block;
            left_ = kBlockBytes;
        }
        uint8_t* const taken = at_;
        at_ += bytes;
        left_ -= bytes;
        return taken;
    }

private:
    struct Free {
        void operator()(uint8_t* block) const { std::free(block); }
    };
    std::vector<std::unique_ptr<uint8_t, Free>> blocks_;
    uint8_t* at_ = nullptr;
    size_t left_ = 0;
};

}  // namespace deltawire
