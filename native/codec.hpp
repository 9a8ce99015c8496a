// Whole tensors: encodes pairs of them, resolves payloads against them, digests them. Threads work on blocks and chunks.
#pragma once

#include <atomic>
#include <memory>
#include <span>

#include "chunk.hpp"
#include "kernels.hpp"

namespace deltawire {

struct EncodeJob {
    View base;  // zeros for a tensor that is added
    View next;
    ElementType type;
    uint64_t seed;
};

struct Encoded {
    std::vector<std::vector<uint8_t>> blocks;  // the chunks of each block, in order, without the type byte
    uint64_t changed = 0;
    Lanes before{}, after{};
};

std::vector<Encoded> encode(std::span<const EncodeJob> jobs, unsigned threads, const Kernels&);

struct ResolveJob {
    View base;  // zeros for a tensor that is added
    std::span<const uint8_t> payload;
    bool changes;  // false if there is no payload, so that the tensor is only digested
    ElementType type;
    uint64_t seed;
    bool write;  // write the changes to the base at once, while it is in the cache
};

// Payloads that are decoded against their bases, ready to be written or read. It refers to the memory of its jobs, which must outlive it.
class Resolution {
public:
    // Keeps at most `budget` bytes of decoded changes, and decodes the others again when they are needed. With `defer` it keeps all changes and
    // writes none before `exchange`.
    Resolution(unsigned threads, size_t budget, bool defer, const Kernels&);
    ~Resolution();

    struct Tensor {
        uint64_t changed = 0;
        Lanes before{}, after{};
    };
    // Decodes and digests. Throws Corrupt, WrongType or WrongCount; after that only `revert` may be called. A base that is written to must not share
    // memory with any other job of this call or a later one.
    std::vector<Tensor> add(std::vector<ResolveJob> jobs);
    // Makes all writes final, and writes the changes that did not fit into the budget. It allocates nothing, so it cannot fail half-way.
    void settle();
    // Restores the old values, as if nothing had been written.
    void revert();
    // With `defer`: swaps the changes with the values that they replace. The first call writes the new values, the second restores the old ones, and so on.
    // It allocates nothing, so it cannot fail half-way.
    void exchange();
    // With `defer`: frees all memory except that of the changes. Nothing can be added afterwards.
    void compact();
    // Copies out the changes of one tensor that was not written to, ascending. Tensors are numbered over all calls of `add`. `values` has elements of the
    // tensor's width.
    void extract(size_t tensor, int64_t* indices, uint8_t* values);
    // Copies out all elements of one tensor that is added.
    void extract_dense(size_t tensor, uint8_t* out);

private:
    struct Unit {
        size_t job;
        uint64_t first;
        uint32_t elements;
        ChunkMode mode;
        std::span<const uint8_t> body;
        uint64_t changed = 0;
        Lanes before{}, after{};
        // Its changes, in a worker's arena. They are sorted by piece, but not within a piece. Null if they were not kept.
        uint32_t* positions = nullptr;
        uint8_t* values = nullptr;  // the old values, once written
        uint64_t written = 0;       // how many of its changes are written to the base
        std::vector<uint8_t> own{};  // their memory, if an arena has no room for them
    };
    class Worker;

    void split(size_t job);

    std::vector<ResolveJob> jobs_;
    std::vector<Unit> units_;
    std::vector<size_t> first_unit_{0};
    std::vector<std::unique_ptr<Worker>> workers_;
    std::atomic<size_t> kept_{0};
    bool defer_;
};

// Writes elements at flat indices, which the caller must check.
void write_elements(const View&, const int64_t* indices, const uint8_t* values, size_t n);

struct DigestJob {
    View view;
    uint64_t seed;
};
std::vector<Lanes> digest(std::span<const DigestJob> jobs, unsigned threads, const Kernels&);

// The facts of a payload that are known without its base.
struct ChunkFacts {
    uint64_t elements, changed, bytes;
    ChunkMode mode;
};
struct PayloadFacts {
    std::vector<ChunkFacts> chunks;
    BodyFacts bodies;
};
PayloadFacts inspect(std::span<const uint8_t> payload, const ElementType& type);

}  // namespace deltawire
