#include "codec.hpp"
#include "payload.hpp"
#include "piece.hpp"

namespace deltawire {

PayloadFacts inspect(std::span<const uint8_t> payload, const ElementType& type) {
    PayloadFacts facts;
    with_element(type.bytes, [&](auto element) {
        ChunkDecoder<decltype(element)> decoder;
        for_each_chunk(payload, type, [&](ChunkMode mode, uint32_t n, std::span<const uint8_t> body) {
            uint64_t changed = mode == ChunkMode::raw ? n : 0;
            if (mode == ChunkMode::coded) {
                decoder.parse(body, type, n);
                decoder.add_facts(facts.bodies);
                changed = decoder.total();
            }
            facts.chunks.push_back({n, changed, body.size() + kChunkHeader, mode});
        });
    });
    return facts;
}

}  // namespace deltawire
