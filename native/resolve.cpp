#include <algorithm>
#include <cstring>

#include "parallel.hpp"
#include "progress.hpp"
#include "resolve_worker.hpp"

namespace deltawire {

// The changes of one requested tensor that are in one unit.
struct Resolution::Part {
    size_t unit;
    size_t slot;  // in the request
    Segment segment;
    uint64_t start, changes;  // the changes of the tensor in units before this one, and in this one
    uint64_t count = 0;       // of those copied out
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
