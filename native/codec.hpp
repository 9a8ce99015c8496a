// Whole tensors: encodes pairs of them, resolves payloads against them, digests them. Threads work on blocks and chunks.
#pragma once

#include <atomic>
#include <memory>
#include <span>

#include "chunk.hpp"
#include "kernels.hpp"
#include "preparation.hpp"
#include "tiles.hpp"

namespace deltawire {

// Tensors whose elements are coded as one type (docs/format.md §3). All have the same size of elements.
struct EncodeGroup {
    ElementType type;
    std::vector<View> bases;  // zeros for a tensor that is added
    std::vector<View> nexts;
    std::vector<uint64_t> seeds;
    Preparation* preparation = nullptr;  // makes elements of `nexts`, whose memory is not read then; null if all are there
    std::vector<size_t> prepared{};      // by tensor: its number in `preparation`, or `kNone`

    bool is_prepared(size_t tensor) const { return preparation && prepared[tensor] != Preparation::kNone; }
};

struct EncodedGroup {
    std::vector<std::vector<uint8_t>> blocks;  // the chunks of each block, in order, up to the last one that changes something
    std::vector<int64_t> changed;              // by tensor
    Lanes before{}, after{};
};

std::vector<EncodedGroup> encode(std::span<const EncodeGroup> groups, unsigned threads, const Kernels&);

// Encodes groups some of whose tensors are made by a preparation. Groups with such tensors are encoded first, because the preparation may write tensors
// of the other groups meanwhile.
std::vector<EncodedGroup> encode_prepared(std::vector<EncodeGroup> groups, Preparation&, unsigned threads, const Kernels&);

struct ResolveGroup {
    ElementType type;
    std::vector<View> bases;  // zeros for a tensor that is added
    std::vector<uint64_t> seeds;
    std::vector<uint8_t> write;  // by tensor: write the changes to the base at once, while it is in the cache
    std::span<const uint8_t> payload;
    bool changes;  // false if there is no payload, so that the tensors are only digested
    bool old;      // the payload is one of version 1 or 2, and there is one tensor
};

// Payloads that are decoded against their bases, ready to be written or read. It refers to the memory of its jobs, which must outlive it.
class Resolution {
public:
    // Keeps at most `budget` bytes of decoded changes, and decodes the others again when they are needed. With `defer` it keeps all changes and
    // writes none before `exchange`.
    Resolution(unsigned threads, size_t budget, bool defer, const Kernels&);
    ~Resolution();

    struct Outcome {
        std::vector<int64_t> changed;  // coded elements, by tensor
        Lanes before{}, after{};
    };
    // Decodes and digests. Throws Corrupt, WrongType or WrongCount; after that only `revert` may be called. A base that is written to must not share
    // memory with any other tensor of this call or a later one.
    std::vector<Outcome> add(std::vector<ResolveGroup> groups);
    // Makes all writes final, and writes the changes that did not fit into the budget. It allocates nothing, so it cannot fail half-way.
    void settle();
    // Restores the old values, as if nothing had been written.
    void revert();
    // With `defer`: swaps the changes with the values that they replace. The first call writes the new values, the second restores the old ones, and so on.
    // It allocates nothing, so it cannot fail half-way.
    void exchange();
    // With `defer`: frees all memory except that of the changes. Nothing can be added afterwards.
    void compact();

    // Where `extract` puts the changes of a tensor that was not written to. There must be room for as many as `add` counted. 4-bit codes
    // are put there as the tensor's own elements, of which there may be fewer.
    struct Extraction {
        size_t tensor;  // numbered over all calls of `add`
        int64_t* indices;
        uint8_t* values;
        uint64_t count = 0;  // set by `extract`
    };
    // Copies out changes in ascending order. It must be called before `settle`.
    void extract(std::span<Extraction> tensors);

    struct DenseExtraction {
        size_t tensor;
        uint8_t* out;
    };
    // Copies out all elements of tensors that are added. It must be called before `settle`.
    void extract_dense(std::span<const DenseExtraction> tensors);

private:
    struct Group;
    struct Unit;
    class Worker;
    struct Part;

    void split(Group&);
    void add_parts(size_t tensor, size_t slot, std::vector<Part>&) const;
    template <class Use>
    void visit(std::vector<Part>&, Use);
    static void put(const Unit&, size_t n, const uint32_t* positions, const uint8_t* values);
    static void write_raw(const Unit&);

    std::vector<std::unique_ptr<Group>> groups_;
    std::vector<size_t> first_tensor_;  // by group: the number of its first tensor
    std::vector<Unit> units_;
    std::vector<std::unique_ptr<Worker>> workers_;
    std::atomic<size_t> kept_{0};
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
// `chunks` counts the elements of a group in tiles, because it does not know the tensors.
PayloadFacts inspect(std::span<const uint8_t> payload, const ElementType& type, bool old);

}  // namespace deltawire
