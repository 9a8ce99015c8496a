// The tensors of one execution, in any layout, and valid payloads for them.
#pragma once

#include "fuzz_input.hpp"

namespace deltawire {
namespace {

// A tensor in memory that is exactly as large as its layout needs.
struct Tensor {
    std::unique_ptr<uint8_t[]> memory;
    size_t size = 0;
    View view;
    std::vector<uint8_t> original;  // a copy of the memory, including gaps between elements

    enum Kind : unsigned { contiguous, unaligned, transposed, reversed, absent };

    Tensor(Kind kind, uint64_t rows, uint64_t columns, uint8_t bytes, const uint8_t* elements) {
        const uint64_t count = rows * columns;
        const int64_t b = bytes;
        view.count = count;
        view.bytes = bytes;
        if (kind == absent) return;
        size = count * bytes;
        size_t start = 0;
        Layout layout{{rows, columns}, {int64_t(columns) * b, b}};
        if (kind == unaligned) {
            ++size;
            start = 1;
        } else if (kind == transposed) {
            layout.strides = {b, int64_t(rows) * b};
        } else if (kind == reversed) {  // every second element, from the end
            if (count) start = (count - 1) * 2 * bytes, size = start + bytes;
            layout.strides = {-2 * b * int64_t(columns), -2 * b};
        }
        if (kind != contiguous) view.layout = std::make_shared<const Layout>(layout);
        memory.reset(new uint8_t[size]);
        std::memset(memory.get(), 0x5a, size);
        view.data = memory.get() + start;
        for (uint64_t i = 0; i < count; ++i) std::memcpy(view.at(i), elements + i * bytes, bytes);
        original.assign(memory.get(), memory.get() + size);
    }
    bool holds(const std::vector<uint8_t>& bytes) const { return !size || std::memcmp(memory.get(), bytes.data(), size) == 0; }
    bool untouched() const { return holds(original); }
    void restore() {
        if (size) std::memcpy(memory.get(), original.data(), size);
    }
};

// The working memory of one instruction set, which is reused in all executions.
struct Isa {
    explicit Isa(const Kernels& k) : kernels(k), resolution(1, 0, false, k) {}

    Resolution& fresh(size_t budget, bool defer = false) {
        resolution.units_.clear();
        resolution.groups_.clear();
        resolution.first_tensor_.clear();
        resolution.kept_ = 0;
        Resolution::Worker& worker = *resolution.workers_[0];
        worker.arena_.clear();
        worker.budget_ = defer ? kUnlimited : budget;
        worker.defer_ = defer;
        if (worker.positions_.size() > kMaxChanges) {  // it has grown for a raw chunk
            worker.positions_ = std::vector<uint32_t>(kMaxChanges);
            worker.values_ = std::vector<uint8_t>(size_t(kMaxChanges) * 8);
        }
        return resolution;
    }

    const Kernels& kernels;
    Resolution resolution;
    PerWidth<BlockEncoder> encoders;
};

std::vector<std::unique_ptr<Isa>>& isas() {
    static auto* const all = [] {
        auto* list = new std::vector<std::unique_ptr<Isa>>;
        for (const Kernels* k : available_kernels()) list->push_back(std::make_unique<Isa>(*k));
        return list;
    }();
    return *all;
}

struct Encoding {
    std::vector<uint8_t> payload;
    std::vector<int64_t> changed;
    Lanes before{}, after{};
    bool operator==(const Encoding&) const = default;
};

void append_old_chunk_header(std::vector<uint8_t>& out, ChunkMode mode, uint32_t elements, size_t bytes) {
    const uint32_t header[2] = {elements | uint32_t(mode) << 30, uint32_t(bytes)};
    const auto* raw = reinterpret_cast<const uint8_t*>(header);
    out.insert(out.end(), raw, raw + kOldChunkHeader);
}

// Writes the payload of a group of one tensor as one of versions 1 and 2. The bodies of chunks are the same.
std::vector<uint8_t> as_old(const std::vector<uint8_t>& payload, const ElementType& type, const Tiles& tiles) {
    std::vector<uint8_t> out{type.code};
    uint64_t covered = 0;
    for_each_chunk(payload, type, tiles, [&](const Chunk& chunk) {
        append_old_chunk_header(out, chunk.mode, chunk.elements, chunk.body.size());
        out.insert(out.end(), chunk.body.begin(), chunk.body.end());
        covered += chunk.elements;
    });
    const uint64_t all = tiles.elements(0, tiles.count());
    if (covered < all) append_old_chunk_header(out, ChunkMode::same, uint32_t(all - covered), 0);
    return out;
}

Encoding encode_with(Isa& isa, const EncodeGroup& group, bool old, bool whole_api) {
    Encoding out;
    const Tiles tiles(group.nexts.size(), [&](size_t t) { return group.type.coded(group.nexts[t].count); });
    const auto append = [&](const std::vector<uint8_t>& bytes) { out.payload.insert(out.payload.end(), bytes.begin(), bytes.end()); };
    if (whole_api) {
        const auto encoded = encode(std::span(&group, 1), 1, isa.kernels);
        for (const auto& block : encoded[0].blocks) append(block);
        out.changed = encoded[0].changed, out.before = encoded[0].before, out.after = encoded[0].after;
    } else {
        const uint32_t size = group.type.block_tiles();
        out.changed.resize(group.nexts.size());
        size_t end = 0;
        for (uint64_t at = 0; at < tiles.count(); at += size) {
            Block block{0, at, uint32_t(std::min<uint64_t>(size, tiles.count() - at))};
            with_element(group.type, [&](auto element) {
                isa.encoders.get<decltype(element)>(isa.kernels).encode(group, tiles, block, out.changed);
            });
            if (block.last_change) end = out.payload.size() + block.last_change;
            append(block.bytes);
            add_lanes(out.before, block.before);
            add_lanes(out.after, block.after);
        }
        out.payload.resize(end);
    }
    if (old) out.payload = as_old(out.payload, group.type, tiles);
    out.payload.shrink_to_fit();
    return out;
}

// A small tensor with a valid payload, which is resolved together with the hostile one.
struct Companion {
    Companion() : bytes(make()), tensor(Tensor::contiguous, 10, 10, 2, bytes.data()) {
        std::vector<uint8_t> next = bytes;
        for (size_t i = 0; i < next.size(); i += 6) next[i] ^= 1;
        next_bytes = next;
        const Tensor to(Tensor::contiguous, 10, 10, 2, next.data());
        encoding = encode_with(*isas().back(), {kTypes[9], {tensor.view}, {to.view}, {7}}, true, false);
    }
    static std::vector<uint8_t> make() {
        std::vector<uint8_t> out(200);
        Random random(1);
        for (auto& b : out) b = uint8_t(random());
        return out;
    }
    ResolveGroup group() const { return {kTypes[9], {tensor.view}, {7}, {true}, encoding.payload, true, true}; }

    std::vector<uint8_t> bytes, next_bytes;
    Tensor tensor;
    Encoding encoding;
};

// The tensors of a group, or one tensor of an old payload.
struct Case {
    ElementType type;
    std::vector<Tensor>& bases;
    std::vector<uint64_t> seeds;
    bool old;
    uint8_t options;
    uint64_t hash;

    // Instruction sets get different budgets, because decoding again must not change the result.
    size_t budget(size_t i) const {
        const size_t budgets[4] = {0, kUnlimited, size_t(64) + (options & 0xf0) * 16, size_t(16384) * 4 + 4096};
        return budgets[((options & 3) + i) % 4];
    }
    std::vector<View> views() const {
        std::vector<View> out;
        for (const Tensor& base : bases) out.push_back(base.view);
        return out;
    }
    uint64_t count() const {
        uint64_t n = 0;
        for (const Tensor& base : bases) n += base.view.count;
        return n;
    }
    // All tensors are written to, or all but some.
    std::vector<uint8_t> writes(bool all) const {
        std::vector<uint8_t> out;
        for (size_t t = 0; t < bases.size(); ++t) out.push_back(bases[t].view.data && (all || hash >> (32 + t) & 1));
        return out;
    }
    ResolveGroup group(std::span<const uint8_t> payload, std::vector<uint8_t> write) const {
        return {type, views(), seeds, std::move(write), payload, true, old};
    }
    bool untouched() const {
        return std::all_of(bases.begin(), bases.end(), [](const Tensor& base) { return base.untouched(); });
    }
    void restore() const {
        for (Tensor& base : bases) base.restore();
    }
};

}  // namespace
}  // namespace deltawire
