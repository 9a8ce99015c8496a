#include <algorithm>
#include <atomic>
#include <cstring>

#include "codec.hpp"
#include "parallel.hpp"
#include "piece.hpp"

namespace deltawire {
namespace {

void append_varint(std::vector<uint8_t>& out, uint64_t value) {
    for (; value >= 0x80; value >>= 7) out.push_back(uint8_t(value | 0x80));
    out.push_back(uint8_t(value));
}

void append_chunk_header(std::vector<uint8_t>& out, ChunkMode mode, uint32_t tiles, size_t bytes) {
    append_varint(out, uint64_t(tiles) << 2 | uint64_t(mode));
    append_varint(out, bytes);
}

// A block of a group: the tiles that one thread encodes.
struct Block {
    size_t group;
    uint64_t first_tile;
    uint32_t tiles;
    Lanes before{}, after{};
    std::vector<uint8_t> bytes{};
    size_t last_change = 0;  // the size of `bytes` after the last chunk that changes something
};

// Returns `top`, the exponent from which contexts are counted down (§5 rule 2).
template <class E>
uint32_t top_exponent(const EncodeGroup& group, const Tiles& tiles, const Block& block) {
    const ElementType& type = group.type;
    if (!type.exponent_bits) return 0;
    const uint64_t stride = (tiles.elements(block.first_tile, block.tiles) + 1023) / 1024;
    std::array<uint16_t, 1024> sample;
    uint32_t m = 0;
    uint64_t next = 0;  // on the line of the block
    tiles.for_each_segment(block.first_tile, block.tiles, [&](const Segment& s) {
        const View& base = group.bases[s.tensor];
        for (; next < s.line + s.elements; next += stride) {
            const uint64_t at = s.first + (next - s.line);
            uint64_t x = 0;
            if (base.data) {
                if constexpr (Held<E>::width == 4) x = base.at(at / (2 * type.bytes))[at / 2 % type.bytes] >> 4 * (at % 2) & 15;
                else std::memcpy(&x, base.at(at), type.bytes);
            }
            sample[m++] = uint16_t(x >> type.exponent_shift & type.exponent_mask());
        }
        return true;
    });
    const uint32_t at = m - 1 - m / 64;
    std::nth_element(sample.begin(), sample.begin() + at, sample.begin() + m);
    return sample[at];
}

template <class E>
class BlockEncoder {
    using T = ValueOf<E>;

public:
    explicit BlockEncoder(const Kernels& kernels)
        : kernels_(kernels), chunk_(kernels), scan_(new PieceScan), multipliers_(new PieceMultipliers) {}

    // Adds the numbers of changed elements to `changed`. Other threads may add to the same tensors.
    void encode(const EncodeGroup& group, const Tiles& tiles, Block& block, std::vector<int64_t>& changed) {
        const uint32_t top = top_exponent<E>(group, tiles, block);
        const ContextRule rule = context_rule(group.type, top);
        const auto& kernels = kernels_.of<E>();
        const uint64_t end = block.first_tile + block.tiles;
        chunk_.reset(group.type.contexts());
        OpenChunk open{block.first_tile};
        tiles.for_each_segment(block.first_tile, block.tiles, [&](const Segment& s) {
            const View &base_view = group.bases[s.tensor], &next_view = group.nexts[s.tensor];
            const uint64_t seed = group.seeds[s.tensor];
            uint64_t changes = 0;
            for (uint64_t at = 0; at < s.elements; at += kPiece<E>) {
                const uint32_t n = uint32_t(std::min<uint64_t>(kPiece<E>, s.elements - at)), bytes = uint32_t(group.type.bytes_of(n));
                const uint64_t first_byte = group.type.bytes_of(s.first + at);
                const T* base = reinterpret_cast<const T*>(base_piece_.read(base_view, first_byte, bytes));
                const T* next = reinterpret_cast<const T*>(next_piece_.read(next_view, first_byte, bytes));
                multipliers_->fill(kernels_, seed, first_byte, bytes);
                Lanes before{};
                kernels.scan(base, next, n, rule, multipliers_->of.data(), *scan_, before);
                add_lanes(block.before, before);
                add_lanes(block.after, before);
                const uint32_t found = kernels.collect(base, next, n, rule, *scan_, multipliers_->of.data(), chunk_.collected(), block.after);
                open.changes += found;
                open.elements += n;
                changes += found;
                if ((at + n) % kTile && at + n != s.elements) continue;
                ++open.tiles;
                if (open.changes >= kChunkTarget || open.first_tile + open.tiles == end) {
                    finish_chunk(group, tiles, open, top, block);
                    open = {open.first_tile + open.tiles};
                }
            }
            if (changes) std::atomic_ref(changed[s.tensor]).fetch_add(int64_t(changes), std::memory_order_relaxed);
            return true;
        });
        block.bytes.shrink_to_fit();
    }

private:
    struct OpenChunk {
        uint64_t first_tile;
        uint32_t tiles = 0, elements = 0, changes = 0;
    };

    void finish_chunk(const EncodeGroup& group, const Tiles& tiles, const OpenChunk& open, uint32_t top, Block& out) {
        if (!open.changes) return append_chunk_header(out.bytes, ChunkMode::same, open.tiles, 0);
        const size_t coded = chunk_.plan(top), raw = size_t(group.type.bytes_of(open.elements));
        append_chunk_header(out.bytes, coded < raw ? ChunkMode::coded : ChunkMode::raw, open.tiles, std::min(coded, raw));
        const size_t at = out.bytes.size();
        if (coded < raw) {
            out.bytes.resize(at + coded + 8);
            chunk_.write(out.bytes.data() + at);
            out.bytes.resize(at + coded);
        } else {
            out.bytes.resize(at + raw);
            uint8_t* to = out.bytes.data() + at;
            tiles.for_each_segment(open.first_tile, open.tiles, [&](const Segment& s) {
                const size_t bytes = group.type.bytes_of(s.elements);
                group.nexts[s.tensor].gather(group.type.bytes_of(s.first) / group.type.bytes, bytes / group.type.bytes, to);
                to += bytes;
                return true;
            });
        }
        out.last_change = out.bytes.size();
        chunk_.reset(group.type.contexts());
    }

    const Kernels& kernels_;
    ChunkEncoder<E> chunk_;
    std::unique_ptr<PieceScan> scan_;
    std::unique_ptr<PieceMultipliers> multipliers_;
    PieceReader base_piece_, next_piece_;
};

}  // namespace

std::vector<EncodedGroup> encode(std::span<const EncodeGroup> groups, unsigned threads, const Kernels& kernels) {
    std::vector<EncodedGroup> out(groups.size());
    std::vector<Tiles> tiles;
    std::vector<Block> blocks;
    for (size_t g = 0; g < groups.size(); ++g) {
        const EncodeGroup& group = groups[g];
        tiles.emplace_back(group.nexts.size(), [&](size_t t) { return group.type.coded(group.nexts[t].count); });
        out[g].changed.resize(group.nexts.size());
        const uint32_t size = group.type.block_tiles();
        for (uint64_t at = 0; at < tiles[g].count(); at += size)
            blocks.push_back({g, at, uint32_t(std::min<uint64_t>(size, tiles[g].count() - at))});
    }
    std::vector<PerWidth<BlockEncoder>> workers(std::max(1u, threads));
    parallel_for(blocks.size(), workers, [&](auto& encoders, size_t b) {
        Block& block = blocks[b];
        with_element(groups[block.group].type, [&](auto element) {
            auto& encoder = encoders.template get<decltype(element)>(kernels);
            encoder.encode(groups[block.group], tiles[block.group], block, out[block.group].changed);
        });
    });
    // Chunks after the last change are left out.
    std::vector<size_t> kept(groups.size()), last_change(groups.size());
    for (Block& block : blocks) {
        EncodedGroup& to = out[block.group];
        add_lanes(to.before, block.before);
        add_lanes(to.after, block.after);
        to.blocks.push_back(std::move(block.bytes));
        if (!block.last_change) continue;
        kept[block.group] = to.blocks.size();
        last_change[block.group] = block.last_change;
    }
    for (size_t g = 0; g < groups.size(); ++g) {
        out[g].blocks.resize(kept[g]);
        if (kept[g]) out[g].blocks.back().resize(last_change[g]);
    }
    return out;
}

}  // namespace deltawire
