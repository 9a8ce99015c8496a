// One group of layers whose routed experts are to be decoded. It has only plain members, because it goes to code for several instruction sets.
#pragma once

#include "types.hpp"

namespace deltawire {

inline constexpr unsigned kRoutingMaxExperts = 1024, kRoutingMaxTopK = 32, kRoutingMaxLayers = 1024;
inline constexpr unsigned kRoutingCodeBits = 11;  // the longest code
inline constexpr unsigned kRoutingGroup = 32;     // layers that have streams of their own
inline constexpr unsigned kRoutingTokensPerCheck = 8;
inline constexpr unsigned kRoutingSlack = kRoutingTokensPerCheck * kRoutingGroup * kRoutingCodeBits / 8 + 64;  // bytes after the data that may be read

inline constexpr unsigned kRoutingRowSlack = 16;  // ids after the rows that may be written

// The usual shape, rows of eight ids that fit in bytes, has code of its own. Its tables have 2^kRoutingCodeBits entries, and their lengths six bits.
constexpr bool is_usual_routing(unsigned top_k, unsigned experts) { return top_k == 8 && experts <= 256; }
inline constexpr unsigned kRoutingLengthBits = 4, kRoutingUsualLengthBits = 6;
inline constexpr unsigned kRoutingNoSymbol = 0xfff, kRoutingUsualNoSymbol = 256;  // the symbol of bits that are not a code; their length is 1
inline constexpr unsigned kRoutingUsualOrder = 8 * kRoutingUsualNoSymbol + 8;     // a sum of eight symbols is an index into an order of so many

enum class RoutingFault { none, no_code, twice, more_bits };

struct RoutingJob {
    size_t tokens;
    unsigned all_layers, first_layer, layers, top_k, experts, streams;
    const int64_t *copied, *reference;  // per token
    const uint8_t* recorded;            // per token and layer, of all layers
    const void* order;                  // the experts by layer and rank, in the type of `rows`, and then zeros
    unsigned order_stride;              // of a layer
    const uint16_t* entries;            // of the tables: symbol << bits of lengths | length. In tables of gaps after the first one, the symbol is the gap plus 1
    unsigned bits;                      // of an index into a table
    const uint8_t* data;                // `kRoutingSlack` bytes follow its end
    uint64_t begin;                     // of the first stream
    const uint64_t* ends;               // of each stream
    void* rows;                         // memory for all rows of the group, and kRoutingRowSlack: bytes if there are at most 256 experts
    int16_t* out;                       // of all layers
};

using DecodeRouting = RoutingFault(const RoutingJob&);
DecodeRouting decode_routing_scalar, decode_routing_avx2;

}  // namespace deltawire
