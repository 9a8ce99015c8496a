// Resolves one unit of a payload: decodes its changes, digests its elements, and keeps or writes the changes. Only resolve.cpp includes it.
#pragma once

#include <algorithm>
#include <cstring>

#include "arena.hpp"
#include "codec.hpp"
#include "payload.hpp"
#include "piece.hpp"

namespace deltawire {
namespace {

constexpr uint32_t kDigestTiles = 1u << 8;  // tiles of unchanged tensors that one thread processes at a time

// The coded elements of a tensor in memory.
template <class E>
class ElementsOf {
    using T = ValueOf<E>;

public:
    explicit ElementsOf(const View& view) : view_(view), contiguous_(!view.layout) {}

    T get(uint64_t index) const {
        T x;
        std::memcpy(&x, at(index), sizeof(T));
        if constexpr (Held<E>::width == 4) x = x >> 4 * (index % 2) & 15;
        return x;
    }
    void put(uint64_t index, T x) const {
        uint8_t* const to = at(index);
        if constexpr (Held<E>::width == 4) x = T((*to & (index % 2 ? 0x0f : 0xf0)) | x << 4 * (index % 2));
        std::memcpy(to, &x, sizeof(T));
    }

private:
    uint8_t* at(uint64_t index) const {
        if (contiguous_) return view_.data + index * Held<E>::width / 8;
        if constexpr (Held<E>::width == 4) return view_.at(index / (2 * view_.bytes)) + index / 2 % view_.bytes;
        else return view_.at(index);
    }

    const View& view_;
    bool contiguous_;
};

// Calls `use(position, value)` in ascending order. Changes are sorted by piece, but not within a piece. `line` is the position of the first element of
// the tensor's segment.
template <class E, class Use>
void ascending(const uint32_t* positions, const ValueOf<E>* values, size_t n, uint32_t line, Use use) {
    std::array<ValueOf<E>, kPiece<E>> at;
    std::array<uint64_t, kPiece<E> / kGroup> hit{};
    for (size_t i = 0; i < n;) {
        const uint32_t first = (positions[i] - line) & ~(kPiece<E> - 1);
        for (; i < n && positions[i] - line - first < kPiece<E>; ++i) {
            const uint32_t p = positions[i] - line - first;
            hit[p / kGroup] |= uint64_t(1) << p % kGroup;
            at[p] = values[i];
        }
        for (uint32_t g = 0; g < hit.size(); ++g) {
            for (uint64_t bits = hit[g]; bits; bits &= bits - 1) {
                const uint32_t p = g * kGroup + unsigned(std::countr_zero(bits));
                use(first + p, at[p]);
            }
            hit[g] = 0;
        }
    }
}

}  // namespace

struct Resolution::Group {
    explicit Group(ResolveGroup&& from)
        : given(std::move(from)),
          tiles(given.bases.size(), [&](size_t t) { return given.type.coded(given.bases[t].count); }),
          changed(given.bases.size()) {}

    ResolveGroup given;
    Tiles tiles;
    std::vector<int64_t> changed;
    size_t first_unit = 0, end_unit = 0;
};

// The unit of work of one thread: a chunk, or tiles that do not change.
struct Resolution::Unit {
    Group* group;
    Chunk chunk;
    uint64_t changed = 0, first_changed = 0, last_changed = 0;  // in all tensors, in the first, and in the last one
    Lanes before{}, after{};
    // Its changes, in a worker's arena: positions on the line of the chunk, and values. They are sorted by piece, but not within a piece. Null if
    // they were not kept.
    uint32_t* positions = nullptr;
    uint8_t* values = nullptr;   // where a tensor was written to: the old values
    uint64_t written = 0;        // how many of its changes, from the first, are written where they are to be written
    std::vector<uint8_t> own{};  // their memory, if an arena has no room for them

    // Calls `use(segment, from, to)` for each tensor that has some of the first n changes: those from `from` to `to`.
    template <class Use>
    void for_each_run(const uint32_t* at, size_t n, Use use) const {
        size_t from = 0;
        group->tiles.for_each_segment(chunk.first_tile, chunk.tiles, [&](const Segment& s) {
            const uint64_t end = s.line + s.elements;
            size_t to = from;
            if (end == chunk.elements) to = n;  // the last one
            while (to < n && at[to] < end) ++to;
            if (from < to) use(s, from, to);
            from = to;
            return to < n;
        });
    }
};

// The working memory of one resolving thread, and the changes that it keeps.
class Resolution::Worker {
public:
    Worker(const Kernels& kernels, std::atomic<size_t>& kept, size_t budget, bool defer)
        : kernels_(kernels),
          kept_(kept),
          budget_(budget),
          defer_(defer),
          multipliers_(new PieceMultipliers),
          space_(new LocateSpace),
          positions_(kMaxChanges),
          values_(size_t(kMaxChanges) * 8) {}

    // Allocates all memory that it needs for this group, except for raw chunks with more than kMaxChanges changes.
    void prepare(const ResolveGroup& group) {
        if (group.changes) with_element(group.type, [&](auto element) { decoders_.get<decltype(element)>(); });
        piece_.prepare();
    }

    // Decodes and digests a unit, and keeps its changes if the budget allows it.
    void resolve(Unit& unit) {
        with_element(unit.group->given.type, [&](auto element) {
            resolve_as<decltype(element)>(unit, true);
            if (defer_ && unit.changed && !unit.positions) keep_own(unit, sizeof(ValueOf<decltype(element)>));
        });
    }

    // Frees the memory that only resolving needs.
    void compact() {
        decoders_ = {};
        multipliers_.reset();
        space_.reset();
        piece_ = {};
        positions_ = {};
        values_ = {};
    }

    // Calls `use(count, positions, values)`, decoding the unit again if its changes were not kept.
    template <class Use>
    void with_changes(const Unit& unit, Use use) {
        if (unit.positions) return use(unit.changed, unit.positions, unit.values);
        Unit again{unit.group, unit.chunk};
        with_element(unit.group->given.type, [&](auto element) { resolve_as<decltype(element)>(again, false); });
        use(again.changed, positions_.data(), values_.data());
    }

private:
    template <class E>
    void resolve_as(Unit& unit, bool first_time) {
        using T = ValueOf<E>;
        const auto& kernels = kernels_.of<E>();
        const ResolveGroup& group = unit.group->given;
        const Chunk& chunk = unit.chunk;
        ChunkDecoder<E>* decoder = nullptr;
        ContextRule rule{};
        Cursor cursor;
        unit.before = unit.after = {};
        Located<T> located{0, positions_.data(), reinterpret_cast<T*>(values_.data())};
        if (chunk.mode == ChunkMode::coded) {
            decoder = &decoders_.get<E>();
            decoder->parse(chunk.body, group.type, chunk.elements);
            rule = context_rule(group.type, decoder->top());
            if (first_time && take(unit, decoder->total(), sizeof(T))) located = {0, unit.positions, reinterpret_cast<T*>(unit.values)};
        }
        unit.group->tiles.for_each_segment(chunk.first_tile, chunk.tiles, [&](const Segment& s) {
            const View& view = group.bases[s.tensor];
            if (chunk.mode == ChunkMode::same && !view.data) return true;  // zeros that do not change add nothing to the digest
            const uint32_t before = located.count;
            for (uint64_t at = 0; at < s.elements; at += kPiece<E>) {
                const uint32_t n = uint32_t(std::min<uint64_t>(kPiece<E>, s.elements - at)), bytes = uint32_t(group.type.bytes_of(n));
                const uint32_t from = located.count, line = uint32_t(s.line + at);
                const uint64_t first_byte = group.type.bytes_of(s.first + at);
                const T* base = reinterpret_cast<const T*>(piece_.read(view, first_byte, bytes));
                multipliers_->fill(kernels_, group.seeds[s.tensor], first_byte, bytes);
                if (chunk.mode == ChunkMode::coded) {
                    kernels.locate(base, n, line, rule, multipliers_->of.data(), decoder->changes(), cursor, *space_, located, unit.before);
                } else {
                    kernels_.digest(reinterpret_cast<const uint8_t*>(base), bytes, multipliers_->of.data(), unit.before);
                    if (chunk.mode == ChunkMode::same) continue;
                    compare_raw<E>(base, chunk.body.data() + group.type.bytes_of(line), line, n, located);
                }
                kernels.digest_changes(base, line, located.positions + from, located.values + from, located.count - from, multipliers_->of.data(),
                                       unit.after);
                if (!first_time || defer_ || !unit.positions) continue;
                if (group.write[s.tensor]) replace<E>(view, s, base, uint32_t(at), located.count - from, located.positions + from, located.values + from);
                unit.written = located.count;
            }
            unit.last_changed = located.count - before;
            if (!s.line) unit.first_changed = unit.last_changed;
            if (first_time && unit.last_changed)
                std::atomic_ref(unit.group->changed[s.tensor]).fetch_add(int64_t(unit.last_changed), std::memory_order_relaxed);
            return true;
        });
        unit.changed = located.count;
        add_lanes(unit.after, unit.before);
        if (decoder) decoder->check_end(cursor);
    }

    // Writes new values and keeps the old ones in their place. `piece` holds the elements of the segment from `at` on, as they were.
    template <class E>
    static void replace(const View& view, const Segment& s, const ValueOf<E>* piece, uint32_t at, size_t n, const uint32_t* positions,
                        ValueOf<E>* values) {
        const ElementsOf<E> elements(view);
        for (size_t i = 0; i < n; ++i) {
            const uint32_t position = positions[i] - s.line;
            const ValueOf<E> old = piece_element<E>(piece, position - at);
            elements.put(s.first + position, values[i]);
            values[i] = old;
        }
    }

    template <class E>
    static ValueOf<E> piece_element(const ValueOf<E>* piece, uint32_t i) {
        if constexpr (Held<E>::width == 4) return piece[i / 2] >> 4 * (i % 2) & 15;
        else return piece[i];
    }

    // Copies the changes that were just decoded. A raw chunk may have too many for an arena.
    void keep_own(Unit& unit, size_t width) {
        const size_t n = unit.changed, at = (n * sizeof(uint32_t) + 63) / 64 * 64;
        unit.own.resize(at + n * width);
        std::memcpy(unit.own.data(), positions_.data(), n * sizeof(uint32_t));
        std::memcpy(unit.own.data() + at, values_.data(), n * width);
        unit.positions = reinterpret_cast<uint32_t*>(unit.own.data());
        unit.values = unit.own.data() + at;
    }

    bool take(Unit& unit, size_t n, size_t width) {
        const auto reserve = [&](size_t bytes) { return kept_.fetch_add(bytes, std::memory_order_relaxed) + bytes <= budget_; };
        uint8_t* const memory = arena_.take(n * (sizeof(uint32_t) + width) + 64, reserve);
        if (!memory) return false;
        unit.positions = reinterpret_cast<uint32_t*>(memory);
        unit.values = memory + (n * sizeof(uint32_t) + 63) / 64 * 64;
        return true;
    }

    template <class E>
    void compare_raw(const ValueOf<E>* base, const uint8_t* raw, uint32_t line, uint32_t n, Located<ValueOf<E>>& located) {
        using T = ValueOf<E>;
        if (positions_.size() < size_t(located.count) + n) {  // a raw chunk is limited by its own bytes, not by kMaxChanges
            positions_.resize(size_t(located.count) + n);
            values_.resize((size_t(located.count) + n) * sizeof(T));
            located.positions = positions_.data();
            located.values = reinterpret_cast<T*>(values_.data());
        }
        for (uint32_t i = 0; i < n; ++i) {
            T now;
            if constexpr (Held<E>::width == 4) now = piece_element<E>(raw, i);
            else std::memcpy(&now, raw + size_t(i) * sizeof(T), sizeof(T));
            if (now == piece_element<E>(base, i)) continue;
            located.positions[located.count] = line + i;
            located.values[located.count++] = now;
        }
    }

    const Kernels& kernels_;
    std::atomic<size_t>& kept_;
    size_t budget_;
    bool defer_;
    Arena arena_;
    PerWidth<ChunkDecoder> decoders_;
    std::unique_ptr<PieceMultipliers> multipliers_;
    std::unique_ptr<LocateSpace> space_;
    PieceReader piece_;
    std::vector<uint32_t> positions_;
    std::vector<uint8_t> values_;
};

}  // namespace deltawire
