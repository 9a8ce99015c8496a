#include "codec.hpp"
#include "payload.hpp"
#include "piece.hpp"

namespace deltawire {

PayloadFacts inspect(std::span<const uint8_t> payload, const ElementType& type, bool old) {
    PayloadFacts facts;
    with_element(type, [&](auto element) {
        ChunkDecoder<decltype(element)> decoder;
        const auto note = [&](ChunkMode mode, uint32_t elements, uint64_t size, std::span<const uint8_t> body, size_t header) {
            uint64_t changed = mode == ChunkMode::raw ? body.size() * 8 / type.width : 0;
            if (mode == ChunkMode::coded) {
                decoder.parse(body, type, elements);
                decoder.add_facts(facts.bodies);
                changed = decoder.total();
            }
            facts.chunks.push_back({size, changed, body.size() + header, mode});
        };
        const uint8_t* end = payload.data();  // of the last chunk
        if (old)
            for_each_old_chunk(payload, type, [&](const Chunk& c) { note(c.mode, c.elements, c.elements, c.body, kOldChunkHeader); });
        else
            for_each_group_chunk(payload, type, [&](uint64_t, uint32_t tiles, ChunkMode mode, std::span<const uint8_t> body) {
                note(mode, tiles * kTile, tiles, body, size_t(body.data() - end));
                end = body.data() + body.size();
            });
    });
    return facts;
}

}  // namespace deltawire
