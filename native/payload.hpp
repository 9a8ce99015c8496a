// Reads the chunks of a payload (docs/format.md §3) without decoding their bodies.
#pragma once

#include <cstring>
#include <span>

#include "types.hpp"

namespace deltawire {

// Calls `use(mode, elements, body)` for each chunk of a payload. First it checks all that can be checked without decoding.
template <class Use>
void for_each_chunk(std::span<const uint8_t> payload, const ElementType& type, Use use) {
    if (payload.empty()) throw Corrupt("a payload is empty.");
    if (payload[0] != type.code) throw WrongType("");
    bool last = false;
    for (size_t at = 1; at < payload.size();) {
        if (payload.size() - at < kChunkHeader) throw Corrupt("a chunk's header is cut short.");
        uint32_t header[2];
        std::memcpy(header, payload.data() + at, kChunkHeader);
        at += kChunkHeader;
        const uint32_t n = header[0] & 0x3fffffff, mode = header[0] >> 30, bytes = header[1];
        if (last) throw Corrupt("a chunk before the last is not a multiple of 16384 elements.");
        if (n < 1 || n > kBlock) throw Corrupt("a chunk has an impossible number of elements.");
        if (bytes > payload.size() - at) throw Corrupt("a chunk's body is cut short.");
        const bool fits = mode == 0 ? bytes == 0 : mode == 1 ? bytes > 0 : mode == 2 && bytes == uint64_t(n) * type.bytes;
        if (!fits) throw Corrupt("a chunk's size does not fit its mode.");
        use(ChunkMode(mode), n, payload.subspan(at, bytes));
        last = n % kTile != 0;
        at += bytes;
    }
}

}  // namespace deltawire
