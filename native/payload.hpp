// Reads the chunks of a payload (docs/format.md §3) without decoding their bodies.
#pragma once

#include <cstring>
#include <span>

#include "tiles.hpp"

namespace deltawire {

// A chunk as a payload describes it: `tiles` tiles from `first_tile` on.
struct Chunk {
    uint64_t first_tile;
    uint32_t tiles, elements;
    ChunkMode mode;
    std::span<const uint8_t> body;
};

inline bool size_fits_mode(uint32_t mode, uint64_t bytes, uint64_t raw_bytes) {
    return mode == 0 ? bytes == 0 : mode == 1 ? bytes > 0 : mode == 2 && bytes == raw_bytes;
}

// Calls `use(chunk)` for each chunk of a payload of version 1 or 2, which is about one tensor. First it checks all that can be checked without
// decoding.
template <class Use>
void for_each_old_chunk(std::span<const uint8_t> payload, const ElementType& type, Use use) {
    if (payload.empty()) throw Corrupt("a payload is empty.");
    if (payload[0] != type.code) throw WrongType("");
    bool last = false;
    uint64_t tile = 0;
    for (size_t at = 1; at < payload.size();) {
        if (payload.size() - at < kOldChunkHeader) throw Corrupt("a chunk's header is cut short.");
        uint32_t header[2];
        std::memcpy(header, payload.data() + at, kOldChunkHeader);
        at += kOldChunkHeader;
        const uint32_t n = header[0] & 0x3fffffff, mode = header[0] >> 30, bytes = header[1], tiles = (n + kTile - 1) / kTile;
        if (last) throw Corrupt("a chunk before the last is not a multiple of 16384 elements.");
        if (n < 1 || n > kOldBlock) throw Corrupt("a chunk has an impossible number of elements.");
        if (bytes > payload.size() - at) throw Corrupt("a chunk's body is cut short.");
        if (!size_fits_mode(mode, bytes, type.bytes_of(n))) throw Corrupt("a chunk's size does not fit its mode.");
        use(Chunk{tile, tiles, n, ChunkMode(mode), payload.subspan(at, bytes)});
        last = n % kTile != 0;
        tile += tiles;
        at += bytes;
    }
}

// Reads an integer of at most 32 bits in LEB128, in its shortest form.
inline uint32_t get_varint(std::span<const uint8_t> payload, size_t& at) {
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 35; shift += 7) {
        if (at >= payload.size()) throw Corrupt("a chunk's header is cut short.");
        const uint8_t byte = payload[at++];
        value |= uint64_t(byte & 0x7f) << shift;
        if (byte & 0x80) continue;
        if ((!byte && shift) || value > ~uint32_t(0)) break;
        return uint32_t(value);
    }
    throw Corrupt("a chunk's header has a number that is too long.");
}

// Calls `use(first_tile, tiles, mode, body)` for each chunk of a group's payload. First it checks all that can be checked without the tensors.
template <class Use>
void for_each_group_chunk(std::span<const uint8_t> payload, const ElementType& type, Use use) {
    const uint32_t block = type.block_tiles();
    uint64_t tile = 0;
    for (size_t at = 0; at < payload.size();) {
        const uint32_t header = get_varint(payload, at), bytes = get_varint(payload, at), tiles = header >> 2, mode = header & 3;
        if (tiles < 1 || tile % block + tiles > block) throw Corrupt("a chunk has an impossible number of tiles.");
        if (bytes > payload.size() - at) throw Corrupt("a chunk's body is cut short.");
        if (mode > 2 || (mode == 0) != (bytes == 0)) throw Corrupt("a chunk's size does not fit its mode.");
        use(tile, tiles, ChunkMode(mode), payload.subspan(at, bytes));
        tile += tiles;
        at += bytes;
    }
}

// The same for a group whose tensors are known. The chunks may end before the tiles do.
template <class Use>
void for_each_chunk(std::span<const uint8_t> payload, const ElementType& type, const Tiles& tiles, Use use) {
    for_each_group_chunk(payload, type, [&](uint64_t first, uint32_t n, ChunkMode mode, std::span<const uint8_t> body) {
        if (first + n > tiles.count()) throw Corrupt("a group has more tiles than its tensors.");
        const uint64_t elements = tiles.elements(first, n);
        if (!size_fits_mode(uint32_t(mode), body.size(), type.bytes_of(elements))) throw Corrupt("a chunk's size does not fit its mode.");
        use(Chunk{first, n, uint32_t(elements), mode, body});
    });
}

}  // namespace deltawire
