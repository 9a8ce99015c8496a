#include <algorithm>
#include <atomic>
#include <cstring>

#include "codec.hpp"
#include "parallel.hpp"
#include "piece.hpp"
#include "progress.hpp"

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

// The result of scanning a tile: its changes are collected as if the tile were a chunk.
struct TileCounts {
    struct Context {
        uint16_t changes, next_rank, seen;  // as in `Collected`; a tile has 2^14 elements
    };
    std::array<Context, kContexts> contexts;
    uint32_t elements, changes;
    size_t first;  // its first change in `ScannedTiles::changes`, which follow each other context by context
};
// A tile with more changes is scanned again instead of keeping them, so that the memory has a bound. It costs little: coding the changes takes longer.
inline constexpr uint32_t kMostKept = kTile / 16;

template <class E>
struct ScannedTiles {
    std::vector<TileCounts> tiles;
    std::vector<Change<ValueOf<E>>> changes;
    Lanes before{}, after{};
};

// A chunk whose tiles are known.
struct OpenChunk {
    uint64_t first_tile;
    uint32_t tiles = 0, elements = 0, changes = 0;

    void add(uint32_t tile_elements, uint32_t tile_changes) {
        ++tiles;
        elements += tile_elements;
        changes += tile_changes;
    }
    bool is_full() const { return changes >= kChunkTarget; }
};

template <class E>
class BlockEncoder {
    using T = ValueOf<E>;

public:
    explicit BlockEncoder(const Kernels& kernels)
        : kernels_(kernels), chunk_(kernels), scan_(new PieceScan), multipliers_(new PieceMultipliers) {}

    // Encodes a whole block. Adds the numbers of changed elements to `changed`. Other threads may add to the same tensors.
    void encode(const EncodeGroup& group, const Tiles& tiles, Block& block, std::vector<int64_t>& changed) {
        const uint32_t top = top_exponent<E>(group, tiles, block);
        const uint64_t end = block.first_tile + block.tiles;
        chunk_.reset(group.type.contexts());
        OpenChunk open{block.first_tile};
        for_each_tile(group, tiles, block.first_tile, block.tiles, changed, [&](const Segment& tile) {
            const uint32_t changes = collect(group, tile, top, block.before, block.after);
            open.add(uint32_t(tile.elements), changes);
            if (open.is_full() || open.first_tile + open.tiles == end) {
                if (finish_chunk(group, tiles, open, top, block.bytes)) block.last_change = block.bytes.size();
                open = {open.first_tile + open.tiles};
            }
            return changes;
        });
        block.bytes.shrink_to_fit();
    }

    // Scans tiles whose chunks are not known yet. Adds the numbers of changed elements to `changed`.
    ScannedTiles<E> scan(const EncodeGroup& group, const Tiles& tiles, uint64_t first, uint32_t n, uint32_t top, std::vector<int64_t>& changed) {
        ScannedTiles<E> out;
        out.tiles.reserve(n);
        for_each_tile(group, tiles, first, n, changed, [&](const Segment& tile) {
            chunk_.reset(group.type.contexts());
            TileCounts& counts = out.tiles.emplace_back();
            counts.elements = uint32_t(tile.elements);
            counts.changes = collect(group, tile, top, out.before, out.after);
            counts.first = out.changes.size();
            for (unsigned c = 0; c < kContexts; ++c) {
                const auto& context = chunk_.collected().contexts[c];
                counts.contexts[c] = {uint16_t(context.end - context.begin), uint16_t(context.next_rank), uint16_t(context.seen)};
                if (counts.changes <= kMostKept) out.changes.insert(out.changes.end(), context.begin, context.end);
            }
            return counts.changes;
        });
        return out;
    }

    // Encodes a chunk of scanned tiles. `scanned(i)` returns the scan that has tile i of the chunk, and the number of the tile there.
    template <class Scanned>
    void encode_chunk(const EncodeGroup& group, const Tiles& tiles, const OpenChunk& open, uint32_t top, Scanned scanned, std::vector<uint8_t>& out) {
        chunk_.reset(group.type.contexts());
        for (uint32_t i = 0; open.changes && i < open.tiles; ++i) {
            const auto [of, number] = scanned(i);
            const TileCounts& counts = of->tiles[number];
            if (counts.changes <= kMostKept) append(counts, of->changes.data() + counts.first);
            else tiles.for_each_segment(open.first_tile + i, 1, [&](const Segment& tile) {
                Lanes known{};
                collect(group, tile, top, known, known);
                return true;
            });
        }
        finish_chunk(group, tiles, open, top, out);
    }

private:
    // Calls `use(tile)`, which returns the number of changes, for each of `n` tiles.
    template <class Use>
    void for_each_tile(const EncodeGroup& group, const Tiles& tiles, uint64_t first, uint32_t n, std::vector<int64_t>& changed, Use use) {
        tiles.for_each_segment(first, n, [&](const Segment& s) {
            uint64_t changes = 0;
            for (uint64_t at = 0; at < s.elements; at += kTile)
                changes += use(Segment{s.tensor, s.first + at, std::min<uint64_t>(kTile, s.elements - at), s.line + uint32_t(at)});
            if (changes) std::atomic_ref(changed[s.tensor]).fetch_add(int64_t(changes), std::memory_order_relaxed);
            bytes_done.fetch_add(group.type.bytes_of(s.elements), std::memory_order_relaxed);
            return true;
        });
    }

    // Appends the changes of a tile to those of the chunk, and returns how many there are.
    uint32_t collect(const EncodeGroup& group, const Segment& tile, uint32_t top, Lanes& before, Lanes& after) {
        const View& base_view = group.bases[tile.tensor];
        const ContextRule rule = context_rule(group.type, top);
        const auto& kernels = kernels_.of<E>();
        uint32_t changes = 0;
        for (uint64_t at = 0; at < tile.elements; at += kPiece<E>) {
            const uint32_t n = uint32_t(std::min<uint64_t>(kPiece<E>, tile.elements - at)), bytes = uint32_t(group.type.bytes_of(n));
            const uint64_t first_byte = group.type.bytes_of(tile.first + at);
            const T* base = reinterpret_cast<const T*>(base_piece_.read(base_view, first_byte, bytes));
            const T* next = reinterpret_cast<const T*>(read_next(group, tile.tensor, first_byte, bytes));
            multipliers_->fill(kernels_, group.seeds[tile.tensor], first_byte, bytes);
            Lanes sums{};
            kernels.scan(base, next, n, rule, multipliers_->of.data(), *scan_, sums);
            add_lanes(before, sums);
            add_lanes(after, sums);
            changes += kernels.collect(base, next, n, rule, *scan_, multipliers_->of.data(), chunk_.collected(), after);
        }
        return changes;
    }
    const uint8_t* read_next(const EncodeGroup& group, size_t tensor, uint64_t first_byte, uint32_t bytes) {
        if (!group.is_prepared(tensor)) return next_piece_.read(group.nexts[tensor], first_byte, bytes);
        if (!prepared_) prepared_ = group.preparation->reader();
        return prepared_->read(group.prepared[tensor], first_byte, bytes);
    }
    void append(const TileCounts& counts, const Change<T>* from) {
        for (unsigned c = 0; c < kContexts; ++c) {
            const TileCounts::Context& tile = counts.contexts[c];
            auto& context = chunk_.collected().contexts[c];
            if (tile.changes) {
                Change<T>* const first = context.end;
                context.end = std::copy_n(from, tile.changes, first);
                first->gap += context.seen - context.next_rank;
                from += tile.changes;
                context.next_rank = context.seen + tile.next_rank;
            }
            context.seen += tile.seen;
        }
    }

    // Writes the collected changes as a chunk. Returns whether there are any.
    bool finish_chunk(const EncodeGroup& group, const Tiles& tiles, const OpenChunk& open, uint32_t top, std::vector<uint8_t>& out) {
        if (!open.changes) {
            append_chunk_header(out, ChunkMode::same, open.tiles, 0);
            return false;
        }
        const size_t coded = chunk_.plan(top), raw = size_t(group.type.bytes_of(open.elements));
        append_chunk_header(out, coded < raw ? ChunkMode::coded : ChunkMode::raw, open.tiles, std::min(coded, raw));
        const size_t at = out.size();
        if (coded < raw) {
            out.resize(at + coded + 8);
            chunk_.write(out.data() + at);
            out.resize(at + coded);
        } else {
            out.resize(at + raw);
            uint8_t* to = out.data() + at;
            tiles.for_each_segment(open.first_tile, open.tiles, [&](const Segment& s) {
                const size_t bytes = group.type.bytes_of(s.elements);
                const uint64_t first_byte = group.type.bytes_of(s.first);
                for (size_t at = 0; at < bytes; at += kPieceBytes) {
                    const uint32_t n = uint32_t(std::min(kPieceBytes, bytes - at));
                    std::memcpy(to, read_next(group, s.tensor, first_byte + at, n), n);
                    to += n;
                }
                return true;
            });
        }
        chunk_.reset(group.type.contexts());
        return true;
    }

    const Kernels& kernels_;
    ChunkEncoder<E> chunk_;
    std::unique_ptr<PieceScan> scan_;
    std::unique_ptr<PieceMultipliers> multipliers_;
    PieceReader base_piece_, next_piece_;
    std::unique_ptr<Preparation::Reader> prepared_;
};

using Encoders = PerWidth<BlockEncoder>;  // of one thread

inline constexpr size_t kBlocksOfThread = 4;
inline constexpr uint32_t kRunTiles = kBlockTiles < 16 ? kBlockTiles : 16;  // the tiles that a thread scans at a time, or more

// Returns how many tiles a thread scans at a time. Elements that are made together are in one run, or two, so that they are seldom made twice.
uint32_t run_tiles(const EncodeGroup& group, const Tiles& tiles, const Block& block) {
    uint64_t bytes = 0;
    if (group.preparation)
        tiles.for_each_segment(block.first_tile, block.tiles, [&](const Segment& s) {
            if (group.is_prepared(s.tensor)) bytes = std::max(bytes, group.preparation->unit_bytes(group.prepared[s.tensor]));
            return true;
        });
    const uint64_t tile = group.type.bytes_of(kTile);
    return uint32_t(std::clamp<uint64_t>((bytes + tile - 1) / tile, kRunTiles, std::max(kRunTiles, block.tiles)));
}

// A block that several threads encode together: they scan its tiles; the numbers of changes then decide where its chunks end; they encode the chunks.
class SharedBlock {
public:
    virtual ~SharedBlock() = default;
    virtual size_t runs() const = 0;
    virtual void scan(Encoders&, size_t run) = 0;
    // Cuts the block into chunks, and returns how many there are.
    virtual size_t cut() = 0;
    virtual void encode(Encoders&, size_t chunk) = 0;
    virtual void finish() = 0;
};

template <class E>
class SharedBlockOf final : public SharedBlock {
public:
    SharedBlockOf(const EncodeGroup& group, const Tiles& tiles, Block& block, std::vector<int64_t>& changed, const Kernels& kernels)
        : group_(group),
          tiles_(tiles),
          block_(block),
          changed_(changed),
          kernels_(kernels),
          top_(top_exponent<E>(group, tiles, block)),
          run_tiles_(run_tiles(group, tiles, block)),
          runs_((block.tiles + run_tiles_ - 1) / run_tiles_) {}

    size_t runs() const override { return runs_.size(); }
    void scan(Encoders& encoders, size_t i) override {
        const uint32_t first = uint32_t(i) * run_tiles_, n = std::min(run_tiles_, block_.tiles - first);
        runs_[i] = encoders.get<E>(kernels_).scan(group_, tiles_, block_.first_tile + first, n, top_, changed_);
    }
    size_t cut() override {
        OpenChunk open{block_.first_tile};
        for (const ScannedTiles<E>& run : runs_) {
            add_lanes(block_.before, run.before);
            add_lanes(block_.after, run.after);
            for (const TileCounts& counts : run.tiles) {
                open.add(counts.elements, counts.changes);
                if (!open.is_full() && open.first_tile + open.tiles < block_.first_tile + block_.tiles) continue;
                chunks_.push_back({open});
                open = {open.first_tile + open.tiles};
            }
        }
        return chunks_.size();
    }
    void encode(Encoders& encoders, size_t i) override {
        const OpenChunk& chunk = chunks_[i].open;
        const uint64_t first = chunk.first_tile - block_.first_tile;
        const auto scanned = [&](uint32_t tile) { return std::pair{&runs_[(first + tile) / run_tiles_], (first + tile) % run_tiles_}; };
        std::vector<uint8_t> bytes;
        encoders.get<E>(kernels_).encode_chunk(group_, tiles_, chunk, top_, scanned, bytes);
        chunks_[i].bytes = std::move(bytes);
    }
    void finish() override {
        for (const Chunk& chunk : chunks_) {
            block_.bytes.insert(block_.bytes.end(), chunk.bytes.begin(), chunk.bytes.end());
            if (chunk.open.changes) block_.last_change = block_.bytes.size();
        }
    }

private:
    struct Chunk {
        OpenChunk open;
        std::vector<uint8_t> bytes{};
    };

    const EncodeGroup& group_;
    const Tiles& tiles_;
    Block& block_;
    std::vector<int64_t>& changed_;
    const Kernels& kernels_;
    uint32_t top_, run_tiles_;
    std::vector<ScannedTiles<E>> runs_;
    std::vector<Chunk> chunks_;
};

// Calls `work(worker, block, i)` for all i below the sizes of all blocks.
template <class Work>
void for_all_parts(const std::vector<std::unique_ptr<SharedBlock>>& blocks, const std::vector<size_t>& sizes, std::vector<Encoders>& workers, Work work) {
    std::vector<std::pair<SharedBlock*, size_t>> parts;
    for (size_t b = 0; b < blocks.size(); ++b)
        for (size_t i = 0; i < sizes[b]; ++i) parts.emplace_back(blocks[b].get(), i);
    parallel_for(parts.size(), workers, [&](Encoders& encoders, size_t p) { work(encoders, *parts[p].first, parts[p].second); });
}

void encode_together(const std::vector<std::unique_ptr<SharedBlock>>& blocks, std::vector<Encoders>& workers) {
    std::vector<size_t> sizes;
    for (const auto& block : blocks) sizes.push_back(block->runs());
    for_all_parts(blocks, sizes, workers, [](Encoders& encoders, SharedBlock& block, size_t i) { block.scan(encoders, i); });
    for (size_t b = 0; b < blocks.size(); ++b) sizes[b] = blocks[b]->cut();
    for_all_parts(blocks, sizes, workers, [](Encoders& encoders, SharedBlock& block, size_t i) { block.encode(encoders, i); });
    for (const auto& block : blocks) block->finish();
}

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
    std::vector<Encoders> workers(std::max(1u, threads));
    // Threads take whole blocks, and keep nothing but their bytes, as long as there are several blocks for each thread. They share the others, as many
    // at a time as there are threads.
    const size_t whole = workers.size() == 1 ? blocks.size() : blocks.size() / (kBlocksOfThread * workers.size()) * (kBlocksOfThread * workers.size());
    parallel_for(whole, workers, [&](Encoders& encoders, size_t b) {
        Block& block = blocks[b];
        with_element(groups[block.group].type, [&](auto element) {
            auto& encoder = encoders.get<decltype(element)>(kernels);
            encoder.encode(groups[block.group], tiles[block.group], block, out[block.group].changed);
        });
    });
    for (size_t at = whole; at < blocks.size(); at += workers.size()) {
        std::vector<std::unique_ptr<SharedBlock>> shared;
        for (size_t b = at; b < std::min(at + workers.size(), blocks.size()); ++b) {
            Block& block = blocks[b];
            with_element(groups[block.group].type, [&](auto element) {
                using Shared = SharedBlockOf<decltype(element)>;
                shared.push_back(std::make_unique<Shared>(groups[block.group], tiles[block.group], block, out[block.group].changed, kernels));
            });
        }
        encode_together(shared, workers);
    }
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

std::vector<EncodedGroup> encode_prepared(std::vector<EncodeGroup> groups, Preparation& preparation, unsigned threads, const Kernels& kernels) {
    std::vector<EncodeGroup> first, then;
    std::vector<char> is_first;
    for (EncodeGroup& group : groups) {
        bool any = false;
        for (const View& next : group.nexts) {
            group.prepared.push_back(next.layout || !next.count ? Preparation::kNone : preparation.find(next.data));
            any |= group.prepared.back() != Preparation::kNone;
        }
        if (any) group.preparation = &preparation;
        is_first.push_back(any);
        (any ? first : then).push_back(std::move(group));
    }
    std::vector<EncodedGroup> made = encode(first, threads, kernels);
    while (preparation.settle(threads)) made = encode(first, threads, kernels);
    std::vector<EncodedGroup> others = encode(then, threads, kernels), out;
    size_t m = 0, o = 0;
    for (const char is : is_first) out.push_back(std::move(is ? made[m++] : others[o++]));
    return out;
}

}  // namespace deltawire
