// Whole tensors: encode pairs of them, resolve payloads against them, digest them. Threads work on blocks and chunks.
#pragma once

#include <atomic>
#include <memory>
#include <span>

#include "chunk.hpp"
#include "kernels.hpp"

namespace deltawire {

struct EncodeJob {
    View base;  // zeros for a tensor that appears
    View next;
    ElementType type;
    uint64_t seed;
};

struct Encoded {
    std::vector<std::vector<uint8_t>> blocks;  // their chunks, in order; the type byte is not among them
    uint64_t changed = 0;
    Lanes before{}, after{};
};

std::vector<Encoded> encode(std::span<const EncodeJob> jobs, unsigned threads, const Kernels&);

struct ResolveJob {
    View base;  // zeros for a tensor that appears
    std::span<const uint8_t> payload;
    bool changes;  // false: no payload, the tensor is only digested
    ElementType type;
    uint64_t seed;
    bool write;  // put the changes into the base at once, while it is in cache
};

// Payloads decoded against their bases, ready to be written or read out. Refers to the memory of its jobs, which must outlive it.
class Resolution {
public:
    // Keeps decoded changes up to `budget` bytes: what is beyond is decoded again when it is needed. With `defer` it keeps all of them and
    // writes none, until `exchange`.
    Resolution(unsigned threads, size_t budget, bool defer, const Kernels&);
    ~Resolution();

    struct Tensor {
        uint64_t changed = 0;
        Lanes before{}, after{};
    };
    // Decodes and digests. Throws Corrupt, WrongType or WrongCount, after which only `revert` is of use. Bases that are written to must share no
    // memory with any other job of this call or a later one.
    std::vector<Tensor> add(std::vector<ResolveJob> jobs);
    // What is written remains: writes the changes that were put off for want of budget. Takes no memory, so it cannot fail half-way.
    void settle();
    // Puts the old values back, as if nothing had been written.
    void revert();
    // With `defer`: swaps the changes and what they change. Once writes the new values, twice puts the old ones back, and so on. Takes no memory,
    // so it cannot fail half-way.
    void exchange();
    // With `defer`, when nothing more is to be added: gives back all memory but that of the changes.
    void compact();
    // The changes of one tensor that was not written to (counted over all calls of `add`), ascending. `values` takes elements of the tensor's width.
    void extract(size_t tensor, int64_t* indices, uint8_t* values);
    // All elements of one tensor that appears.
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
        // Its changes, in a worker's arena, span after span but in no order within a span; null if they were not kept.
        uint32_t* positions = nullptr;
        uint8_t* values = nullptr;  // the old ones, once written
        uint64_t written = 0;       // so many of its changes are in the base
        std::vector<uint8_t> own{};  // their memory where an arena has no room for them
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

// Writes elements at flat indices that the caller has checked.
void write_elements(const View&, const int64_t* indices, const uint8_t* values, size_t n);

struct DigestJob {
    View view;
    uint64_t seed;
};
std::vector<Lanes> digest(std::span<const DigestJob> jobs, unsigned threads, const Kernels&);

// What a payload says of itself, without its base.
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
