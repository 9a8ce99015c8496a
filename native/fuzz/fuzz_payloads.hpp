// Makes elements, and hostile payloads that follow the grammar of docs/format.md far enough to reach the decoder.
#pragma once

#include "fuzz_tensors.hpp"

namespace deltawire {
namespace {

// The coded elements of a tensor's bytes.
uint64_t coded_at(const ElementType& type, const std::vector<uint8_t>& bytes, uint64_t i) {
    if (type.width == 4) return bytes[i / 2] >> 4 * (i % 2) & 15;
    uint64_t x = 0;
    std::memcpy(&x, bytes.data() + i * type.bytes, type.bytes);
    return x;
}
void put_coded(const ElementType& type, std::vector<uint8_t>& bytes, uint64_t i, uint64_t x) {
    if (type.width == 4) bytes[i / 2] = uint8_t((bytes[i / 2] & (i % 2 ? 0x0f : 0xf0)) | (x & 15) << 4 * (i % 2));
    else std::memcpy(bytes.data() + i * type.bytes, &x, type.bytes);
}

// Makes elements that are like weights, small integers, fuzzed bytes or noise.
std::vector<uint8_t> make_elements(const ElementType& type, uint64_t count, unsigned kind, std::span<const uint8_t> pattern, Random& random) {
    std::vector<uint8_t> out(count * type.bytes);
    if (kind == 0) return out;
    if (kind == 1) {
        for (size_t i = 0; i < out.size() && !pattern.empty(); ++i) out[i] = pattern[i % pattern.size()];
        return out;
    }
    const uint64_t middle = type.exponent_mask() * 3 / 4;
    for (uint64_t i = 0; i < type.coded(count); ++i) {
        uint64_t x = random();
        if (kind == 3) {
            const unsigned zeros = unsigned(std::countr_zero(x | uint64_t(1) << 40));
            if (type.exponent_bits) {
                const uint64_t sign = x >> 63, exponent = middle - std::min<uint64_t>(middle, zeros), low = low_bits(x >> 8, type.exponent_shift);
                x = sign << (type.width - 1) | exponent << type.exponent_shift | low;
            } else {
                x = zeros;
            }
        }
        put_coded(type, out, i, x);
    }
    return out;
}

template <class E>
void change_as(std::vector<uint8_t>& elements, const ElementType& type, unsigned density, unsigned kind, Random& random) {
    using T = ValueOf<E>;
    constexpr unsigned width = Held<E>::width;
    static constexpr uint32_t per_65536[8] = {0, 64, 700, 6000, 20000, 40000, 60000, 65536};
    for (uint64_t i = 0; i < type.coded(elements.size() / type.bytes); ++i) {
        const uint64_t r = random();
        if ((r & 0xffff) >= per_65536[density]) continue;
        T x = T(coded_at(type, elements, i));
        const bool floating = type.exponent_bits;
        const T sign = T(r >> 16 & 1 ? T(1) : T(T(0) - T(1)));
        const uint64_t small = uint64_t(std::countr_zero(r >> 20 | uint64_t(1) << 30)) + 1;
        switch (kind == 4 ? unsigned(r >> 17 & 3) : kind) {
            case 0: x = stepped<E>(x, sign, floating); break;
            case 1: x = stepped<E>(x, T(uint64_t(sign) * small), floating); break;
            case 2: x = T(x ^ T(T(0x80 >> (small & 7)) | T(1)) << (width < 8 ? 0 : width - 8)); break;
            default: x = T(random()); break;
        }
        put_coded(type, elements, i, x);
    }
}

// Cuts elements into tensors, each with its own layout. `layouts` chooses them.
std::vector<Tensor> tensors_of(const ElementType& type, const std::vector<uint64_t>& rows, uint64_t columns, const std::vector<Tensor::Kind>& kinds,
                               const std::vector<uint8_t>& elements) {
    std::vector<Tensor> out;
    size_t at = 0;
    for (size_t t = 0; t < rows.size(); ++t) {
        out.emplace_back(kinds[t], rows[t], columns, type.bytes, elements.data() + at);
        at += rows[t] * columns * type.bytes;
    }
    return out;
}

// Makes a body that follows the grammar of §4, with numbers that need not fit the base. `first` is the first of its coded elements.
std::vector<uint8_t> make_body(const ElementType& type, const std::vector<uint8_t>& base, uint64_t first, uint32_t elements, Input& in, Random& random) {
    static auto* const space = new std::vector<uint8_t>(size_t(4) << 20);
    BitWriter out(space->data());
    const uint8_t shape = in.byte();
    uint32_t top = type.exponent_mask();
    if (type.exponent_bits) top = shape & 1 ? in.byte() * (top + 1) / 256 : top * 3 / 4;
    if ((shape & 0xf0) == 0xf0) top = in.word();
    out.put(top & 2047, 11);
    const ContextRule rule = context_rule(type, top);
    std::array<uint32_t, kContexts> members{};
    for (uint32_t i = 0; i < elements; ++i) ++members[rule(coded_at(type, base, first + i))];
    const bool table = shape & 2 && (type.width > 4 || (shape & 0xf0) == 0xe0);
    const unsigned symbols = table ? 1 + in.byte() : 0, ks = shape >> 2 & 7, first_symbol = uint8_t(random());
    out.put(table, 1);
    if (table) {
        out.put(symbols - 1, 8);
        out.put(ks, 3);
        for (unsigned i = 0; i < symbols; ++i) out.put(uint8_t(first_symbol + i * 37), 8);
    }
    struct Plan {
        uint32_t n = 0, u = 0, larger = 0, gap = 0;
        unsigned k = 0, mode = 0, kr = 0, kv = 0;
        bool inverted = false;
    };
    std::array<Plan, kContexts> plans;
    uint32_t left = 36000;
    for (unsigned c = 0; c < type.contexts(); ++c) {
        Plan& p = plans[c];
        const uint8_t a = in.byte(), b = in.byte();
        const uint32_t m = members[c];
        p.inverted = a & 4;
        switch (a & 3) {  // the number of changes
            case 0: p.n = b & 0x80 ? 0 : b & 7; break;
            case 1: p.n = uint32_t(uint64_t(m) * b / 255); break;
            case 2: p.n = m - std::min<uint32_t>(m, b & 15); break;
            default: p.n = a & 8 ? in.word() : b; break;
        }
        p.n = std::min({p.n, left, 65535u});
        left -= p.n;
        put_count(out, p.n);
        if (!p.n) continue;
        out.put(p.inverted, 1);
        p.u = a & 0x10 ? in.byte() : m - std::min(m, p.n);
        p.u = std::min(p.u, 65535u);
        if (p.inverted) put_count(out, p.u);
        const uint8_t d = in.byte(), e = in.byte();
        p.gap = p.n < m ? (m - p.n) / p.n : 0;
        if (a & 0x20) p.gap += d >> 5;
        p.k = d & 31;
        if (p.k > 24 && !(a & 0x40)) p.k -= 24;
        out.put(p.k, 5);
        p.mode = e & 3;
        if (p.mode == 3 && !table && !(a & 0x80)) p.mode = 2;
        out.put(p.mode, 2);
        if (p.mode == 1) {
            p.larger = std::min<uint32_t>(p.n, 1 + (e >> 2));
            put_count(out, p.larger);
            out.put(p.kr = (d ^ e) % 25, 5);
        }
        if (p.mode == 1 || p.mode == 2) out.put(p.kv = a & 0x40 ? e & 63 : (e >> 2) % type.width, 6);
    }
    const unsigned width = type.width, low = width < 8 ? 0 : width - 8;
    for (unsigned c = 0; c < type.contexts(); ++c) {
        const Plan& p = plans[c];
        if (!p.n) continue;
        if (p.inverted) {
            uint32_t changes = p.n;
            for (uint32_t i = 0; i < p.u; ++i) {
                const uint32_t run = uint32_t(random.below(std::min(changes, 2 * (p.n / p.u)) + 1));
                put_rice(out, p.k, run);
                changes -= run;
            }
        } else {
            for (uint32_t i = 0; i < p.n; ++i) put_rice(out, p.k, random.below(p.gap + 1));
        }
        if (p.mode == 3) {
            for (uint32_t i = 0; i < p.n; ++i) {
                put_rice(out, ks, random.below(symbols));
                out.put_long(low_bits(random() | 1, low), low);
            }
            continue;
        }
        for (uint32_t i = 0; i < p.n; ++i) out.put(random() & 1, 1);
        const auto magnitude = [&] { return random() >> (65 - width) >> (random() & 63) % width; };
        if (p.mode == 2)
            for (uint32_t i = 0; i < p.n; ++i) put_rice(out, p.kv, magnitude());
        if (p.mode == 1) {
            for (uint32_t i = 0; i < p.larger; ++i) put_rice(out, p.kr, random.below((p.n - p.larger) / p.larger + 1));
            for (uint32_t i = 0; i < p.larger; ++i) put_rice(out, p.kv, magnitude() >> 1);
        }
    }
    return {space->data(), out.finish()};
}

// Makes chunks of all modes, cut as no encoder would cut them.
std::vector<uint8_t> grow(const Case& c, const std::vector<uint8_t>& base, Input& in, Random& random) {
    const ElementType& type = c.type;
    const Tiles tiles(c.bases.size(), [&](size_t t) { return type.coded(c.bases[t].view.count); });
    std::vector<uint8_t> payload;
    if (c.old) payload.push_back(type.code);
    uint64_t first = 0;  // element
    for (uint64_t tile = 0; tile < tiles.count();) {
        const uint8_t how = in.byte();
        uint64_t n = tiles.count() - tile;
        if (!c.old) n = std::min<uint64_t>(n, type.block_tiles() - tile % type.block_tiles());
        if (how & 4) n = 1 + random.below(n);
        if (how == 0xff) ++n;
        const auto elements = uint32_t(tiles.elements(tile, n));
        const auto append = [&](ChunkMode mode, const std::vector<uint8_t>& body) {
            if (c.old) append_old_chunk_header(payload, mode, elements, body.size());
            else append_chunk_header(payload, mode, uint32_t(n), body.size());
            payload.insert(payload.end(), body.begin(), body.end());
        };
        if ((how & 3) == 0 && (how & 0x80)) {
            append(ChunkMode::same, {});
        } else if ((how & 3) == 1 && (how & 0x80)) {
            const auto from = base.begin() + ptrdiff_t(type.bytes_of(first));
            std::vector<uint8_t> raw(from, from + ptrdiff_t(type.bytes_of(elements)));
            for (size_t i = 0; i < raw.size(); i += 1 + random.below(1 + (how & 0x7c))) raw[i] = uint8_t(random());
            append(ChunkMode::raw, raw);
        } else {
            append(ChunkMode::coded, make_body(type, base, first, elements, in, random));
        }
        tile += n;
        first += elements;
    }
    return payload;
}

// Returns a number of elements, usually a small one, because large ones allow few executions. Mutation favours inputs that do much, so large numbers are
// reduced at random.
uint64_t element_count(uint8_t kind, uint32_t x, uint64_t hash) {
    if (kind < 128 || hash & 7) return x & 63;
    if (kind < 192 || hash & 8) return x & 255;
    if (kind < 240 || hash & 0x30) return x & 1023;
    if (kind < 252 || hash & 0xc0) return x & 8191;
    return kind & 1 ? x % (kMaxElements + 1) : std::min<uint64_t>(kMaxElements, kTile * (1 + (x & 1)) + (x >> 8) % 130 - 65 * (x >> 1 & 1));
}

void flip(std::vector<uint8_t>& payload, unsigned n, Input& in) {
    for (unsigned i = 0; i < n; ++i) {
        const uint32_t at = in.word();
        const uint8_t by = in.byte();
        if (payload.empty()) return;
        if (by == 0xff) payload.resize(std::min<size_t>(at, payload.size()));
        else if (by == 0) payload.push_back(uint8_t(at));
        else payload[at % payload.size()] ^= by;
    }
}

// Bytes of the input as a payload, perhaps with a first header that covers all elements.
std::vector<uint8_t> fuzzed_payload(const Case& c, std::span<const uint8_t> bytes, unsigned flips) {
    std::vector<uint8_t> payload(bytes.begin(), bytes.end());
    const uint64_t count = c.count();
    if (c.old) {
        if (!payload.empty() && flips) payload[0] = c.type.code;
        if (payload.size() < 9 || !(flips & 1) || !count) return payload;
        const uint32_t header[2] = {uint32_t(count) | 1u << 30, uint32_t(payload.size() - 9)};
        std::memcpy(payload.data() + 1, header, 8);
        return payload;
    }
    if (!(flips & 1)) return payload;
    std::vector<uint8_t> out;
    append_chunk_header(out, ChunkMode::coded, uint32_t(1 + flips / 2), payload.size());
    out.insert(out.end(), payload.begin(), payload.end());
    return out;
}

}  // namespace
}  // namespace deltawire
