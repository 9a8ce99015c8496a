#include <algorithm>
#include <cstring>

#include "arena.hpp"
#include "codec.hpp"
#include "parallel.hpp"
#include "payload.hpp"
#include "piece.hpp"
#include "progress.hpp"

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

// The changes of one requested tensor that are in one unit.
struct Resolution::Part {
    size_t unit;
    size_t slot;  // in the request
    Segment segment;
    uint64_t start, changes;  // the changes of the tensor in units before this one, and in this one
    uint64_t count = 0;       // of those copied out
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

void Resolution::split(Group& group) {
    const ResolveGroup& given = group.given;
    const Tiles& tiles = group.tiles;
    uint64_t covered = 0, elements = 0;
    const auto unit = [&](const Chunk& chunk) {
        Unit* const last = units_.size() > group.first_unit ? &units_.back() : nullptr;
        const bool same = chunk.mode == ChunkMode::same && last && last->chunk.mode == ChunkMode::same;
        if (same && last->chunk.tiles + chunk.tiles <= kDigestTiles) {  // chunks of two bytes must not take the memory of a unit each
            last->chunk.tiles += chunk.tiles;
            last->chunk.elements += chunk.elements;
        } else {
            units_.push_back({&group, chunk});
        }
        covered += chunk.tiles;
        elements += chunk.elements;
    };
    group.first_unit = units_.size();
    if (given.changes && given.old) {
        for_each_old_chunk(given.payload, given.type, unit);
        if (elements != given.bases[0].count)
            throw WrongCount("the delta is for " + std::to_string(elements) + " elements, the tensor has " + std::to_string(given.bases[0].count) + ".");
    } else if (given.changes) {
        for_each_chunk(given.payload, given.type, tiles, unit);
    }
    while (covered < tiles.count()) {  // tiles that do not change
        const uint32_t n = uint32_t(std::min<uint64_t>(kDigestTiles, tiles.count() - covered));
        unit({covered, n, uint32_t(tiles.elements(covered, n)), ChunkMode::same, {}});
    }
    group.end_unit = units_.size();
}

Resolution::~Resolution() = default;

Resolution::Resolution(unsigned threads, size_t budget, bool defer, const Kernels& kernels) {
    for (unsigned t = 0; t < std::max(1u, threads); ++t)
        workers_.push_back(std::make_unique<Worker>(kernels, kept_, defer ? ~size_t(0) : budget, defer));
}

std::vector<Resolution::Outcome> Resolution::add(std::vector<ResolveGroup> groups) {
    const size_t first_group = groups_.size(), first_unit = units_.size();
    for (ResolveGroup& given : groups) {
        for (auto& worker : workers_) worker->prepare(given);
        first_tensor_.push_back(groups_.empty() ? 0 : first_tensor_.back() + groups_.back()->given.bases.size());
        groups_.push_back(std::make_unique<Group>(std::move(given)));
        split(*groups_.back());
    }
    parallel_for(units_.size() - first_unit, workers_, [&](auto& worker, size_t u) {
        Unit& unit = units_[first_unit + u];
        worker->resolve(unit);
        bytes_done.fetch_add(unit.group->given.type.bytes_of(unit.chunk.elements), std::memory_order_relaxed);
    });
    std::vector<Outcome> out(groups.size());
    for (size_t g = 0; g < out.size(); ++g) {
        const Group& group = *groups_[first_group + g];
        out[g].changed = group.changed;
        for (size_t u = group.first_unit; u < group.end_unit; ++u) {
            add_lanes(out[g].before, units_[u].before);
            add_lanes(out[g].after, units_[u].after);
        }
    }
    return out;
}

// Appends the parts of one tensor.
void Resolution::add_parts(size_t tensor, size_t slot, std::vector<Part>& parts) const {
    const size_t g = size_t(std::upper_bound(first_tensor_.begin(), first_tensor_.end(), tensor) - first_tensor_.begin()) - 1;
    const Group& group = *groups_[g];
    const size_t t = tensor - first_tensor_[g];
    const uint64_t first = group.tiles.first_tile(t), end = group.tiles.first_tile(t + 1);
    const auto begin = units_.begin() + ptrdiff_t(group.first_unit), stop = units_.begin() + ptrdiff_t(group.end_unit);
    auto unit = std::partition_point(begin, stop, [&](const Unit& u) { return u.chunk.first_tile + u.chunk.tiles <= first; });
    uint64_t start = 0;
    for (; unit != stop && unit->chunk.first_tile < end; ++unit) {
        const uint64_t from = unit->chunk.first_tile, to = from + unit->chunk.tiles;
        const bool leads = first <= from, trails = end >= to;
        const uint64_t changes = leads && trails ? unit->changed : leads ? unit->first_changed : trails ? unit->last_changed : uint64_t(group.changed[t]);
        if (!changes) continue;
        const uint64_t tile = std::max(first, from), tiles = std::min(end, to) - tile;
        const Segment segment{t, (tile - first) * kTile, group.tiles.elements(tile, tiles), uint32_t(group.tiles.elements(from, tile - from))};
        parts.push_back({size_t(unit - units_.begin()), slot, segment, start, changes});
        start += changes;
    }
}

// Calls `use(part, positions, values)` with the changes of each part. A unit is decoded again at most once.
template <class Use>
void Resolution::visit(std::vector<Part>& parts, Use use) {
    std::vector<Part*> order(parts.size());
    for (size_t i = 0; i < parts.size(); ++i) order[i] = &parts[i];
    std::stable_sort(order.begin(), order.end(), [](const Part* a, const Part* b) { return a->unit < b->unit; });
    std::vector<size_t> firsts;  // of each unit, in `order`
    for (size_t i = 0; i < order.size(); ++i)
        if (!i || order[i]->unit != order[i - 1]->unit) firsts.push_back(i);
    parallel_for(firsts.size(), workers_, [&](auto& worker, size_t r) {
        const Unit& unit = units_[order[firsts[r]]->unit];
        const size_t end = r + 1 < firsts.size() ? firsts[r + 1] : order.size();
        worker->with_changes(unit, [&](size_t n, const uint32_t* positions, const uint8_t* values) {
            for (size_t i = firsts[r]; i < end; ++i) {
                Part& part = *order[i];
                const uint32_t line = part.segment.line;
                const size_t from = size_t(std::partition_point(positions, positions + n, [&](uint32_t p) { return p < line; }) - positions);
                with_element(unit.group->given.type, [&](auto element) {
                    using E = decltype(element);
                    use(element, part, positions + from, reinterpret_cast<const ValueOf<E>*>(values) + from);
                });
            }
        });
    });
}

void Resolution::extract(std::span<Extraction> tensors) {
    std::vector<Part> parts;
    for (size_t i = 0; i < tensors.size(); ++i) add_parts(tensors[i].tensor, i, parts);
    visit(parts, [&](auto element, Part& part, const uint32_t* positions, const auto* values) {
        using E = decltype(element);
        const Segment& s = part.segment;
        const View& base = units_[part.unit].group->given.bases[s.tensor];
        const size_t width = base.bytes;
        int64_t* indices = tensors[part.slot].indices + part.start;
        uint8_t* out = tensors[part.slot].values + part.start * width;
        ascending<E>(positions, values, part.changes, s.line, [&](uint32_t position, ValueOf<E> value) {
            const uint64_t at = s.first + position;
            if constexpr (Held<E>::width == 4) {
                const int64_t own = int64_t(at / (2 * width));
                if (!part.count || indices[part.count - 1] != own) {
                    indices[part.count] = own;
                    if (base.data) std::memcpy(out + part.count * width, base.at(uint64_t(own)), width);
                    else std::memset(out + part.count * width, 0, width);
                    ++part.count;
                }
                uint8_t& byte = out[(part.count - 1) * width + at / 2 % width];
                byte = uint8_t((byte & (at % 2 ? 0x0f : 0xf0)) | value << 4 * (at % 2));
            } else {
                indices[part.count] = int64_t(at);
                std::memcpy(out + part.count++ * width, &value, sizeof value);
            }
        });
    });
    for (Extraction& tensor : tensors) tensor.count = 0;
    for (const Part& part : parts) {  // several changed codes may be in one element, so parts may be shorter than their places
        Extraction& to = tensors[part.slot];
        const size_t width = units_[part.unit].group->given.type.bytes;
        if (to.count != part.start) {
            std::memmove(to.indices + to.count, to.indices + part.start, part.count * sizeof(int64_t));
            std::memmove(to.values + to.count * width, to.values + part.start * width, part.count * width);
        }
        to.count += part.count;
    }
}

void Resolution::extract_dense(std::span<const DenseExtraction> tensors) {
    std::vector<Part> parts;
    for (size_t i = 0; i < tensors.size(); ++i) add_parts(tensors[i].tensor, i, parts);
    visit(parts, [&](auto element, Part& part, const uint32_t* positions, const auto* values) {
        using E = decltype(element);
        View view = units_[part.unit].group->given.bases[part.segment.tensor];
        view.data = tensors[part.slot].out;
        view.layout.reset();
        const ElementsOf<E> elements(view);
        for (size_t i = 0; i < part.changes; ++i) elements.put(part.segment.first + (positions[i] - part.segment.line), values[i]);
    });
}

void Resolution::settle() {
    parallel_for(units_.size(), workers_, [&](auto& worker, size_t u) {
        const Unit& unit = units_[u];
        const ResolveGroup& group = unit.group->given;
        if (unit.written == unit.changed) return;
        if (unit.chunk.mode == ChunkMode::raw) {
            write_raw(unit);
            return;
        }
        if (std::find(group.write.begin(), group.write.end(), true) == group.write.end()) return;
        worker->with_changes(unit, [&](size_t n, const uint32_t* positions, const uint8_t* values) { put(unit, n, positions, values); });
    });
}

// Writes changes where they are to be written.
void Resolution::put(const Unit& unit, size_t n, const uint32_t* positions, const uint8_t* values) {
    const ResolveGroup& group = unit.group->given;
    with_element(group.type, [&](auto element) {
        using E = decltype(element);
        unit.for_each_run(positions, n, [&](const Segment& s, size_t from, size_t to) {
            if (!group.write[s.tensor]) return;
            const ElementsOf<E> elements(group.bases[s.tensor]);
            for (size_t i = from; i < to; ++i)
                elements.put(s.first + (positions[i] - s.line), reinterpret_cast<const ValueOf<E>*>(values)[i]);
        });
    });
}

void Resolution::write_raw(const Unit& unit) {
    const ResolveGroup& group = unit.group->given;
    unit.group->tiles.for_each_segment(unit.chunk.first_tile, unit.chunk.tiles, [&](const Segment& s) {
        const View& view = group.bases[s.tensor];
        if (!group.write[s.tensor]) return true;
        const uint8_t* from = unit.chunk.body.data() + group.type.bytes_of(s.line);
        const size_t first = group.type.bytes_of(s.first), bytes = group.type.bytes_of(s.elements);
        if (!view.layout) std::memcpy(view.data + first, from, bytes);
        else
            for (size_t i = 0; i < bytes; i += view.bytes) std::memcpy(view.at((first + i) / view.bytes), from + i, view.bytes);
        return true;
    });
}

void Resolution::revert() {
    for (Unit& unit : units_) {
        if (unit.written) put(unit, unit.written, unit.positions, unit.values);
        unit.written = 0;
    }
}

void Resolution::exchange() {
    parallel_for(units_.size(), workers_, [&](auto&, size_t u) {
        Unit& unit = units_[u];
        if (!unit.changed) return;
        const ResolveGroup& group = unit.group->given;
        with_element(group.type, [&](auto element) {
            using E = decltype(element);
            auto* const values = reinterpret_cast<ValueOf<E>*>(unit.values);
            unit.for_each_run(unit.positions, unit.changed, [&](const Segment& s, size_t from, size_t to) {
                if (!group.write[s.tensor]) return;
                const ElementsOf<E> elements(group.bases[s.tensor]);
                for (size_t i = from; i < to; ++i) {
                    const uint64_t at = s.first + (unit.positions[i] - s.line);
                    const ValueOf<E> old = elements.get(at);
                    elements.put(at, values[i]);
                    values[i] = old;
                }
            });
        });
        unit.written = unit.written ? 0 : unit.changed;
    });
}

void Resolution::compact() {
    for (auto& worker : workers_) worker->compact();
    for (Unit& unit : units_) unit.chunk.body = {};
}

void write_elements(const View& view, const int64_t* indices, const uint8_t* values, size_t n) {
    with_bytes(view.bytes, [&](auto element) {
        for (size_t i = 0; i < n; ++i) std::memcpy(view.at(uint64_t(indices[i])), values + i * sizeof element, sizeof element);
    });
}

}  // namespace deltawire
