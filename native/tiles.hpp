// The tiles of a group of tensors, one after the other (docs/format.md §3). A tile never crosses two tensors.
#pragma once

#include <algorithm>
#include <span>

#include "types.hpp"

namespace deltawire {

// A range of elements of one tensor: whole tiles, and perhaps its last, shorter one.
struct Segment {
    size_t tensor;      // in the group
    uint64_t first;     // its first element in the tensor
    uint64_t elements;
    uint32_t line;      // the number of elements of the range of tiles that come before it
};

class Tiles {
public:
    // `elements` are the numbers of coded elements of the tensors.
    template <class Elements>
    Tiles(size_t tensors, Elements elements) {
        starts_.reserve(tensors + 1);
        lines_.reserve(tensors + 1);
        starts_.push_back(0);
        lines_.push_back(0);
        for (size_t t = 0; t < tensors; ++t) {
            const uint64_t n = elements(t);
            starts_.push_back(starts_.back() + (n + kTile - 1) / kTile);
            lines_.push_back(lines_.back() + n);
        }
    }

    uint64_t count() const { return starts_.back(); }
    uint64_t first_tile(size_t tensor) const { return starts_[tensor]; }

    // Returns the number of elements of a range of tiles.
    uint64_t elements(uint64_t first, uint64_t n) const { return elements_before(first + n) - elements_before(first); }

    // Calls `use(segment)` for each tensor that has tiles in a range of tiles, in order, until it returns false.
    template <class Use>
    void for_each_segment(uint64_t first, uint64_t n, Use use) const {
        if (!n) return;
        const uint64_t end = first + n;
        uint32_t line = 0;
        for (size_t t = tensor_of(first); first < end; ++t) {
            if (starts_[t + 1] <= first) continue;  // a tensor without elements
            const uint64_t from = (first - starts_[t]) * kTile, size = lines_[t + 1] - lines_[t];
            const uint64_t stop = std::min(size, (end - starts_[t]) * kTile);
            if (!use(Segment{t, from, stop - from, line})) return;
            line += uint32_t(stop - from);
            first = starts_[t + 1];
        }
    }

private:
    // Returns the tensor that a tile belongs to.
    size_t tensor_of(uint64_t tile) const { return size_t(std::upper_bound(starts_.begin(), starts_.end(), tile) - starts_.begin()) - 1; }
    uint64_t elements_before(uint64_t tile) const {
        if (tile >= count()) return lines_.back();
        const size_t t = tensor_of(tile);
        return lines_[t] + (tile - starts_[t]) * kTile;
    }

    std::vector<uint64_t> starts_, lines_;  // the tiles and the elements before each tensor, and those of all
};

}  // namespace deltawire
