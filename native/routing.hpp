// The coding of routed experts (docs/format.md §8): which experts processed which token in which layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "routing_job.hpp"

namespace deltawire {

// The rows of one file. A row is what one token does in one layer: `top_k` experts. All spans have one entry per token, or per row.
struct RoutingRows {
    unsigned layers, top_k, experts;
    std::span<const int64_t> copied;     // per token: an earlier token whose rows it has, or -1
    std::span<const int64_t> reference;  // per token: the last earlier token with the same id, or -1
    std::span<const uint8_t> recorded;   // per row: 1 if there is one. Rows of copied tokens have the value of the earlier token
    std::span<const uint16_t> order;     // per layer: all experts by rank

    size_t tokens() const { return copied.size(); }
    unsigned masks() const { return (top_k + 7) / 8; }
    unsigned streams() const { return masks() + top_k; }  // of a group of layers
    unsigned groups() const { return (layers + kRoutingGroup - 1) / kRoutingGroup; }
    // Tables of masks, then of gaps in rows with nothing kept, then of gaps in other rows.
    unsigned tables() const { return masks() + 2 * top_k; }
    unsigned symbols(unsigned table) const;  // size of the alphabet of a table
};

// Writes all rows as expert ids, ascending within a row; -1 where nothing is recorded. Throws Corrupt. `fast` needs AVX2 and BMI2.
void decode_routing(const RoutingRows&, std::span<const uint8_t> lengths, std::span<const uint64_t> ends, std::span<const uint8_t> data,
                    std::span<int16_t> out, unsigned threads, bool fast);

// The symbols of rows, before their codes are chosen.
struct RoutingSymbols {
    std::vector<std::vector<uint16_t>> streams;  // the symbols of each stream, group by group
    std::vector<std::vector<uint8_t>> full;      // for each stream of gaps: 1 if its row has nothing kept
    std::vector<uint64_t> counts;                // how often each symbol of each table occurs, table by table
};

// Finds the symbols of rows of distinct ids. Rows that are copied or not recorded are not read.
RoutingSymbols find_routing_symbols(const RoutingRows&, std::span<const int16_t> experts);
// Returns the bytes of each stream.
std::vector<std::vector<uint8_t>> write_routing(const RoutingRows&, const RoutingSymbols&, std::span<const uint8_t> lengths);

}  // namespace deltawire
