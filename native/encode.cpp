#include <algorithm>
#include <cstring>

#include "codec.hpp"
#include "parallel.hpp"
#include "piece.hpp"

namespace deltawire {
namespace {

void append_chunk_header(std::vector<uint8_t>& out, ChunkMode mode, uint32_t elements, uint32_t bytes) {
    const uint32_t header[2] = {elements | uint32_t(mode) << 30, bytes};
    const auto* raw = reinterpret_cast<const uint8_t*>(header);
    out.insert(out.end(), raw, raw + kChunkHeader);
}

// Returns `top`, the exponent from which contexts are counted down (§5 rule 2).
uint32_t top_exponent(const View& base, uint64_t first, uint32_t count, const ElementType& type) {
    if (!type.exponent_bits || !base.data) return 0;
    const uint32_t stride = (count + 1023) / 1024;
    std::array<uint16_t, 1024> sample;
    uint32_t m = 0;
    for (uint32_t i = 0; i < count; i += stride) {
        uint64_t x = 0;
        std::memcpy(&x, base.at(first + i), type.bytes);
        sample[m++] = uint16_t(x >> type.exponent_shift & type.exponent_mask());
    }
    const uint32_t at = m - 1 - m / 64;
    std::nth_element(sample.begin(), sample.begin() + at, sample.begin() + m);
    return sample[at];
}

template <class T>
class BlockEncoder {
public:
    explicit BlockEncoder(const Kernels& kernels)
        : kernels_(kernels), chunk_(kernels), scan_(new PieceScan), multipliers_(new PieceMultipliers) {}

    struct Block {
        std::vector<uint8_t> bytes;
        uint64_t changed = 0;
        Lanes before{}, after{};
    };

    Block encode(const EncodeJob& job, uint64_t first, uint32_t count) {
        Block out;
        const uint32_t top = top_exponent(job.base, first, count, job.type);
        const ContextRule rule = context_rule(job.type, top);
        const auto& kernels = kernels_.of<T>();
        chunk_.reset(job.type.contexts());
        uint32_t chunk_start = 0;
        for (uint32_t at = 0; at < count; at += kPiece<T>) {
            const uint32_t n = std::min(kPiece<T>, count - at);
            const T* base = reinterpret_cast<const T*>(base_piece_.read(job.base, first + at, n));
            const T* next = reinterpret_cast<const T*>(next_piece_.read(job.next, first + at, n));
            multipliers_->fill(kernels_, job.seed, first + at, n, sizeof(T));
            Lanes before{};
            kernels.scan(base, next, n, rule, multipliers_->of.data(), *scan_, before);
            add_lanes(out.before, before);
            add_lanes(out.after, before);
            kernels.collect(base, next, n, rule, *scan_, multipliers_->of.data(), chunk_.collected(), out.after);
            const bool tile_ends = (at + n) % kTile == 0 || at + n == count;
            if (tile_ends && (chunk_.changes() >= kChunkTarget || at + n == count)) {
                finish_chunk(job, first + chunk_start, at + n - chunk_start, top, out);
                chunk_start = at + n;
            }
        }
        out.bytes.shrink_to_fit();
        return out;
    }

private:
    void finish_chunk(const EncodeJob& job, uint64_t first, uint32_t elements, uint32_t top, Block& out) {
        const uint32_t changes = chunk_.changes();
        out.changed += changes;
        if (!changes) {
            append_chunk_header(out.bytes, ChunkMode::same, elements, 0);
            return;
        }
        const size_t coded = chunk_.plan(top), raw = size_t(elements) * sizeof(T);
        append_chunk_header(out.bytes, coded < raw ? ChunkMode::coded : ChunkMode::raw, elements, uint32_t(std::min(coded, raw)));
        const size_t at = out.bytes.size();
        if (coded < raw) {
            out.bytes.resize(at + coded + 8);
            chunk_.write(out.bytes.data() + at);
            out.bytes.resize(at + coded);
        } else {
            out.bytes.resize(at + raw);
            job.next.gather(first, elements, out.bytes.data() + at);
        }
        chunk_.reset(job.type.contexts());
    }

    const Kernels& kernels_;
    ChunkEncoder<T> chunk_;
    std::unique_ptr<PieceScan> scan_;
    std::unique_ptr<PieceMultipliers> multipliers_;
    PieceReader base_piece_, next_piece_;
};

}  // namespace

std::vector<Encoded> encode(std::span<const EncodeJob> jobs, unsigned threads, const Kernels& kernels) {
    std::vector<Encoded> out(jobs.size());
    struct Unit {
        size_t job;
        uint64_t block;
        uint64_t changed = 0;
        Lanes before{}, after{};
    };
    std::vector<Unit> units;
    for (size_t j = 0; j < jobs.size(); ++j) {
        const uint64_t blocks = (jobs[j].next.count + kBlock - 1) / kBlock;
        out[j].blocks.resize(blocks);
        for (uint64_t b = 0; b < blocks; ++b) units.push_back({.job = j, .block = b});
    }
    std::vector<PerWidth<BlockEncoder>> workers(std::max(1u, threads));
    parallel_for(units.size(), workers, [&](auto& encoders, size_t u) {
        Unit& unit = units[u];
        const EncodeJob& job = jobs[unit.job];
        const uint64_t first = unit.block * kBlock;
        const uint32_t count = uint32_t(std::min<uint64_t>(kBlock, job.next.count - first));
        with_element(job.type.bytes, [&](auto element) {
            auto block = encoders.template get<decltype(element)>(kernels).encode(job, first, count);
            out[unit.job].blocks[unit.block] = std::move(block.bytes);
            unit.changed = block.changed;
            unit.before = block.before;
            unit.after = block.after;
        });
    });
    for (const Unit& unit : units) {
        Encoded& e = out[unit.job];
        e.changed += unit.changed;
        add_lanes(e.before, unit.before);
        add_lanes(e.after, unit.after);
    }
    return out;
}

}  // namespace deltawire
