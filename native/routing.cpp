// Encodes routed experts, and divides the work of decoding them. A group of layers is decoded in one pass over all tokens, because a row may
// refer to any earlier one of its layer.
#include "routing.hpp"

#include <algorithm>
#include <bit>
#include <memory>

#include "bits.hpp"
#include "parallel.hpp"

namespace deltawire {

unsigned RoutingRows::symbols(unsigned table) const {
    if (table < masks()) return 1u << std::min(8u, top_k - 8 * table);
    return experts;
}

namespace {

// The codes of one table.
struct Codes {
    std::vector<uint16_t> bits;  // of each symbol, the first bit in the lowest place
};

size_t first_length(const RoutingRows& rows, unsigned table) {
    size_t at = 0;
    for (unsigned t = 0; t < table; ++t) at += rows.symbols(t);
    return at;
}

// Canonical codes: shorter ones first, and symbols in order among codes of a length. Throws Corrupt unless they are complete. A single symbol has the code 0.
Codes canonical(std::span<const uint8_t> lengths) {
    uint32_t counts[kRoutingCodeBits + 1] = {}, used = 0;
    for (const uint8_t length : lengths) {
        if (length > kRoutingCodeBits) throw Corrupt("a code of routed experts is too long.");
        ++counts[length];
        used += length != 0;
    }
    uint32_t next[kRoutingCodeBits + 2] = {}, code = 0, filled = 0;
    for (unsigned length = 1; length <= kRoutingCodeBits; ++length) {
        next[length] = code;
        code = (code + counts[length]) << 1;
        filled += counts[length] << (kRoutingCodeBits - length);
    }
    const bool is_single = used == 1 && counts[1] == 1;
    if (used && !is_single && filled != 1u << kRoutingCodeBits) throw Corrupt("the codes of routed experts are not complete.");
    Codes out;
    out.bits.resize(lengths.size());
    for (size_t s = 0; s < lengths.size(); ++s) {
        const unsigned length = lengths[s];
        if (!length) continue;
        uint32_t forward = next[length]++, backward = 0;
        for (unsigned b = 0; b < length; ++b, forward >>= 1) backward = backward << 1 | (forward & 1);
        out.bits[s] = uint16_t(backward);
    }
    return out;
}

struct Tables {
    unsigned bits = 1;  // of an index
    std::vector<uint16_t> entries;

    Tables(const RoutingRows& rows, std::span<const uint8_t> lengths) {
        if (lengths.size() != first_length(rows, rows.tables())) throw Corrupt("the codes of routed experts are not those of their shape.");
        for (const uint8_t length : lengths) bits = std::max<unsigned>(bits, length);
        if (bits > kRoutingCodeBits) throw Corrupt("a code of routed experts is too long.");
        const bool usual = is_usual_routing(rows.top_k, rows.experts);
        if (usual) bits = kRoutingCodeBits;
        const unsigned shift = usual ? kRoutingUsualLengthBits : kRoutingLengthBits;
        entries.assign(size_t(rows.tables()) << bits, uint16_t((usual ? kRoutingUsualNoSymbol : kRoutingNoSymbol) << shift | 1));
        size_t at = 0;
        for (unsigned t = 0; t < rows.tables(); ++t) {
            const auto own = lengths.subspan(at, rows.symbols(t));
            const Codes codes = canonical(own);
            const size_t more = t >= rows.masks() && (t - rows.masks()) % rows.top_k ? 1 : 0;
            uint16_t* table = entries.data() + (size_t(t) << bits);
            for (size_t s = 0; s < own.size(); ++s)
                if (own[s])
                    for (uint32_t i = codes.bits[s]; i < 1u << bits; i += 1u << own[s]) table[i] = uint16_t((s + more) << shift | own[s]);
            at += own.size();
        }
    }
};

template <class Id>
RoutingFault decode_group(const RoutingRows& rows, RoutingJob job, DecodeRouting* kernel) {
    const size_t stride = job.order_stride = is_usual_routing(rows.top_k, rows.experts) ? kRoutingUsualOrder : sizeof(Id) == 1 ? 256 : kRoutingMaxExperts;
    std::vector<Id> order(job.layers * stride);
    for (unsigned l = 0; l < job.layers; ++l)
        for (unsigned r = 0; r < rows.experts; ++r) order[l * stride + r] = Id(rows.order[size_t(job.first_layer + l) * rows.experts + r]);
    const std::unique_ptr<Id[]> memory(new Id[rows.tokens() * job.layers * rows.top_k + kRoutingRowSlack]);  // rows that are not recorded are never read
    job.order = order.data();
    job.rows = memory.get();
    return kernel(job);
}

}  // namespace

void decode_routing(const RoutingRows& rows, std::span<const uint8_t> lengths, std::span<const uint64_t> ends, std::span<const uint8_t> data,
                    std::span<int16_t> out, unsigned threads, bool fast) {
    const unsigned groups = rows.groups(), streams = rows.streams();
    bool is_placed = ends.size() == size_t(groups) * streams && !ends.empty() && ends.back() == data.size();
    for (size_t s = 0; s < ends.size(); ++s) is_placed &= (s ? ends[s - 1] : 0) <= ends[s];
    if (!is_placed) throw Corrupt("the streams of routed experts are not where they should be.");
    const Tables tables(rows, lengths);
    std::vector<uint8_t> padded(data.size() + kRoutingSlack);
    std::copy(data.begin(), data.end(), padded.begin());
    DecodeRouting* kernel = decode_routing_scalar;
#if defined(DELTAWIRE_X86)
    if (fast) kernel = decode_routing_avx2;
#else
    (void)fast;
#endif
    struct Nothing {};
    std::vector<Nothing> workers(std::max(1u, std::min(threads, groups)));
    parallel_for(groups, workers, [&](Nothing&, size_t g) {
        RoutingJob job{};
        job.tokens = rows.tokens();
        job.all_layers = rows.layers, job.first_layer = unsigned(g) * kRoutingGroup, job.layers = std::min(kRoutingGroup, rows.layers - job.first_layer);
        job.top_k = rows.top_k, job.experts = rows.experts, job.streams = streams;
        job.copied = rows.copied.data(), job.reference = rows.reference.data(), job.recorded = rows.recorded.data();
        job.entries = tables.entries.data(), job.bits = tables.bits;
        job.data = padded.data(), job.begin = g ? ends[g * streams - 1] : 0, job.ends = ends.data() + g * streams, job.out = out.data();
        switch (rows.experts <= 256 ? decode_group<uint8_t>(rows, job, kernel) : decode_group<uint16_t>(rows, job, kernel)) {
            case RoutingFault::none: break;
            case RoutingFault::no_code: throw Corrupt("routed experts hold bits that are no code, name an expert that is not there, or are cut short.");
            case RoutingFault::twice: throw Corrupt("routed experts name an expert twice in a row.");
            case RoutingFault::more_bits: throw Corrupt("a stream of routed experts has more bits than its rows.");
        }
    });
}

RoutingSymbols find_routing_symbols(const RoutingRows& rows, std::span<const int16_t> experts) {
    const unsigned k = rows.top_k, layers = rows.layers, masks = rows.masks(), words = (rows.experts + 63) / 64;
    std::vector<uint16_t> rank_of(size_t(layers) * rows.experts);
    for (unsigned l = 0; l < layers; ++l)
        for (unsigned r = 0; r < rows.experts; ++r) rank_of[size_t(l) * rows.experts + rows.order[size_t(l) * rows.experts + r]] = uint16_t(r);
    RoutingSymbols out;
    out.streams.resize(size_t(rows.groups()) * rows.streams());
    out.full.resize(size_t(rows.groups()) * k);
    out.counts.resize(first_length(rows, rows.tables()));
    std::vector<uint64_t*> counts;
    for (unsigned t = 0; t < rows.tables(); ++t) counts.push_back(out.counts.data() + first_length(rows, t));
    std::vector<uint16_t> ranks(rows.tokens() * layers * k);
    uint64_t set[kRoutingMaxExperts / 64];
    for (size_t t = 0; t < rows.tokens(); ++t) {
        const size_t first = t * layers;
        if (rows.copied[t] >= 0) {
            std::copy_n(&ranks[size_t(rows.copied[t]) * layers * k], layers * k, &ranks[first * k]);
            continue;
        }
        for (unsigned l = 0; l < layers; ++l) {
            if (!rows.recorded[first + l]) continue;
            std::fill_n(set, words, 0);
            for (unsigned j = 0; j < k; ++j) {
                const unsigned r = rank_of[size_t(l) * rows.experts + size_t(experts[(first + l) * k + j])];
                set[r >> 6] |= uint64_t(1) << (r & 63);
            }
            auto* const streams = out.streams.data() + size_t(l / kRoutingGroup) * rows.streams();
            auto* const full = out.full.data() + size_t(l / kRoutingGroup) * k;
            uint16_t* to = &ranks[(first + l) * k];
            unsigned kept = 0;
            const int64_t reference = rows.reference[t];
            if (reference >= 0 && rows.recorded[size_t(reference) * layers + l]) {
                const uint16_t* from = &ranks[(size_t(reference) * layers + l) * k];
                for (unsigned m = 0; m < masks; ++m) {
                    uint32_t mask = 0;
                    for (unsigned b = 0; b < 8 && 8 * m + b < k; ++b) {
                        const unsigned r = from[8 * m + b];
                        const uint32_t has = set[r >> 6] >> (r & 63) & 1;
                        mask |= has << b;
                        if (has) to[kept++] = uint16_t(r);
                    }
                    streams[m].push_back(uint16_t(mask));
                    ++counts[m][mask];
                }
                for (unsigned j = 0; j < kept; ++j) set[to[j] >> 6] &= ~(uint64_t(1) << (to[j] & 63));
            }
            uint64_t* const* own = counts.data() + masks + (kept ? k : 0);
            unsigned fresh = 0;
            uint32_t last = ~0u;
            for (unsigned w = 0; w < words; ++w)
                for (uint64_t word = set[w]; word; word &= word - 1, ++fresh) {
                    const uint32_t r = 64 * w + unsigned(std::countr_zero(word)), gap = r - last - 1;
                    to[kept + fresh] = uint16_t(r);
                    streams[masks + fresh].push_back(uint16_t(gap));
                    full[fresh].push_back(!kept);
                    ++own[fresh][gap];
                    last = r;
                }
        }
    }
    return out;
}

std::vector<std::vector<uint8_t>> write_routing(const RoutingRows& rows, const RoutingSymbols& symbols, std::span<const uint8_t> lengths) {
    std::vector<Codes> codes;
    std::vector<const uint8_t*> sizes;
    size_t at = 0;
    for (unsigned t = 0; t < rows.tables(); ++t) {
        codes.push_back(canonical(lengths.subspan(at, rows.symbols(t))));
        sizes.push_back(lengths.data() + at);
        at += rows.symbols(t);
    }
    std::vector<std::vector<uint8_t>> out;
    for (size_t i = 0; i < symbols.streams.size(); ++i) {
        const auto& own = symbols.streams[i];
        const unsigned s = unsigned(i % rows.streams()), group = unsigned(i / rows.streams());
        std::vector<uint8_t> bytes(own.size() * kRoutingCodeBits / 8 + 16);
        BitWriter writer(bytes.data());
        for (size_t n = 0; n < own.size(); ++n) {
            const unsigned t = s < rows.masks() ? s : s + (symbols.full[size_t(group) * rows.top_k + s - rows.masks()][n] ? 0 : rows.top_k);
            writer.put(codes[t].bits[own[n]], sizes[t][own[n]]);
        }
        bytes.resize(size_t(writer.finish() - bytes.data()));
        out.push_back(std::move(bytes));
    }
    return out;
}

}  // namespace deltawire
