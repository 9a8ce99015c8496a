// The decoder of routed experts, compiled once per instruction set. The file that includes it defines DELTAWIRE_ROUTING_KERNEL.
// It uses no function that the linker could share with files for other instruction sets.
#include <bit>
#include <cstring>

#if defined(__BMI2__)
#include <immintrin.h>
#endif

#include "routing_job.hpp"
#include "routing_sort.hpp"

namespace deltawire {
namespace {

// The bits of one stream. There are enough bytes after the data for all rows between two checks.
struct Stream {
    uint64_t held = uint64_t(1) << 63;  // the next bits, and then a 1 that moves down as they are taken
    const uint8_t* from = nullptr;      // the byte of the first bit that was ever held since the last refill

    DELTAWIRE_INLINE void refill() {
        const unsigned taken = unsigned(std::countl_zero(held));
        from += taken >> 3;
        std::memcpy(&held, from, 8);
        held = (held | uint64_t(1) << 63) >> (taken & 7);
    }
    uint64_t position(const uint8_t* data) const { return uint64_t(from - data) * 8 + unsigned(std::countl_zero(held)); }
};
constexpr unsigned kRowsPerRefill = 55 / kRoutingCodeBits;

// Writes the bytes of `from` that `mask` names, one after the other, and returns their number. It may write up to eight bytes.
DELTAWIRE_INLINE uint64_t keep(uint8_t* to, const uint8_t* from, uint64_t mask) {
#if defined(__BMI2__)
    uint64_t row;
    std::memcpy(&row, from, 8);
    row = _pext_u64(row, _pdep_u64(mask, 0x0101010101010101) * 255);
    std::memcpy(to, &row, 8);
    return unsigned(std::popcount(mask));
#else
    uint64_t kept = 0;
#pragma GCC unroll 8
    for (unsigned i = 0; i < 8; ++i) {
        to[kept] = from[i];
        kept += mask >> i & 1;
    }
    return kept;
#endif
}

// Decodes token by token. A row has the experts kept from its reference, in the reference's order, and then the new ones by rank.
template <class Id, unsigned Fixed>
class Decoder {
    static constexpr bool kIsUsual = is_usual_routing(Fixed, sizeof(Id) == 1 ? 256 : kRoutingMaxExperts);
    static constexpr uint16_t kNothing[1u << kRoutingCodeBits] = {};
    static constexpr uint64_t kLowBits = (uint64_t(1) << kRoutingCodeBits) - 1;

public:
    explicit Decoder(const RoutingJob& job) : job_(job), rows_(static_cast<Id*>(job.rows)), order_(static_cast<const Id*>(job.order)), k_(Fixed ? Fixed : job.top_k) {
        for (unsigned s = 0; s < job.streams; ++s) streams_[s].from = job.data + (s ? job.ends[s - 1] : job.begin);
        if constexpr (kIsUsual)
            for (unsigned kept = 0; kept <= 8; ++kept)
                for (unsigned j = 0; j < 8; ++j) tables_[kept][j] = kept + j < 8 ? job.entries + (size_t((kept ? 9 : 1) + j) << kRoutingCodeBits) : kNothing;
    }

    RoutingFault run() {
        for (size_t first = 0; first < job_.tokens; first += kRoutingTokensPerCheck) {
            const size_t end = std::min(job_.tokens, first + kRoutingTokensPerCheck);
            for (size_t t = first; t < end; ++t) token(t);
            bool bad = bad_;
            for (unsigned s = 0; s < job_.streams; ++s) bad |= streams_[s].position(job_.data) > job_.ends[s] * 8;
            if (bad) return RoutingFault::no_code;
            if (!write(first, end)) return RoutingFault::twice;
        }
        for (unsigned s = 0; s < job_.streams; ++s) {
            const uint64_t at = streams_[s].position(job_.data);
            if (job_.ends[s] * 8 - at > 7 || (at & 7 && job_.data[at >> 3] >> (at & 7))) return RoutingFault::more_bits;
        }
        return RoutingFault::none;
    }

private:
    const uint8_t* recorded(int64_t t) const { return job_.recorded + size_t(t) * job_.all_layers + job_.first_layer; }
    Id* rows(int64_t t) const { return rows_ + size_t(t) * job_.layers * k_; }

    void token(size_t t) {
        const int64_t from = job_.copied[t], reference = job_.reference[t];
        const uint8_t* referred = reference < 0 ? nullptr : recorded(reference);
        if (from >= 0) std::memcpy(rows(int64_t(t)), rows(from), job_.layers * k_ * sizeof(Id));
        else if constexpr (kIsUsual) {
            const bool all = !misses_any(recorded(int64_t(t))) && !(referred && misses_any(referred));
            const auto decode = all ? &Decoder::usual_rows<true> : &Decoder::usual_rows<false>;
            (this->*decode)(rows(int64_t(t)), recorded(int64_t(t)), referred, rows(reference < 0 ? 0 : reference));
        }
        else
            for (unsigned l = 0; l < job_.layers; ++l)
                if (recorded(int64_t(t))[l])
                    row(rows(int64_t(t)) + l * k_, order_ + size_t(l) * job_.order_stride, referred && referred[l] ? rows(reference) + l * k_ : nullptr);
    }

    DELTAWIRE_INLINE uint32_t take(unsigned stream, unsigned table) {
        uint64_t& held = streams_[stream].held;
        const uint32_t entry = job_.entries[(size_t(table) << job_.bits) + (held & ((uint64_t(1) << job_.bits) - 1))];
        held >>= entry & ((1u << kRoutingLengthBits) - 1);
        return entry >> kRoutingLengthBits;
    }

    void row(Id* to, const Id* order, const Id* reference) {
        if (left_-- == 0) {
            for (unsigned s = 0; s < job_.streams; ++s) streams_[s].refill();
            left_ = kRowsPerRefill - 1;
        }
        const unsigned masks = job_.streams - k_;
        unsigned kept = 0;
        for (unsigned m = 0; reference && m < masks; ++m) {
            uint32_t mask = take(m, m);
            if (mask > 255) bad_ = true, mask = 0;
            for (; mask; mask &= mask - 1) to[kept++] = reference[8 * m + unsigned(std::countr_zero(mask))];
        }
        const unsigned table = masks + (kept ? k_ : 0);
        uint32_t sum = 0;
        for (unsigned j = 0; kept + j < k_; ++j) {
            sum += take(masks + j, table + j);
            to[kept + j] = order[sum & (job_.order_stride - 1)];
        }
        bad_ |= sum >= job_.experts;
    }

    // Takes one code of a table, and returns its symbol.
    DELTAWIRE_INLINE static uint64_t take_usual(uint64_t& held, const uint16_t* table) {
        const uint64_t entry = table[held & kLowBits];
        held >>= entry & 63;
        return entry >> kRoutingUsualLengthBits;
    }

    // Decodes a row as `row` does, with few branches on what the streams hold. Returns the sum of its gaps. Tables without bits are
    // those of gaps that the row does not have. Their values go after the row. `held` are the bits of the first five streams.
    template <bool Refers>
    DELTAWIRE_INLINE uint64_t usual_row(uint64_t (&held)[5], uint8_t* to, const uint8_t* order, const uint8_t* reference) {
        uint64_t kept = 0;
        if constexpr (Refers) {
            const uint64_t mask = take_usual(held[0], job_.entries);
            masks_ |= mask;
            kept = keep(to, reference, mask & 255);
            to += kept;
        }
        const uint16_t* const* tables = tables_[kept];
#if defined(__GNUC__)
        asm("" : "+r"(to));  // otherwise GCC computes the address of each place by itself
#endif
        uint64_t sum = 0;
#pragma GCC unroll 4
        for (unsigned j = 0; j < 4; ++j) to[j] = order[sum += take_usual(held[j + 1], tables[j])];
        if (kept >= 4) return sum;
        if (left_of_last_-- == 0) {
            for (unsigned s = 5; s < 9; ++s) streams_[s].refill();
            left_of_last_ = kRowsPerRefill - 1;
        }
#pragma GCC unroll 4
        for (unsigned j = 4; j < 8; ++j) to[j] = order[sum += take_usual(streams_[j + 1].held, tables[j])];
        return sum;
    }

    // Decodes the rows of a token. The streams of the last four places are refilled by themselves, because few rows may need them.
    template <bool AllRecorded>
    void usual_rows(uint8_t* to, const uint8_t* recorded, const uint8_t* referred, const uint8_t* reference) {
        const uint8_t* order = order_;
        uint64_t worst = worst_, held[5];
        for (unsigned s = 0; s < 5; ++s) held[s] = streams_[s].held;
        for (unsigned l = 0; l < job_.layers; ++l, order += kRoutingUsualOrder, to += 8, reference += 8) {
            if (!AllRecorded && !recorded[l]) continue;
            if (left_-- == 0) {
                for (unsigned s = 0; s < 5; ++s) {
                    streams_[s].held = held[s];
                    streams_[s].refill();
                    held[s] = streams_[s].held;
                }
                left_ = kRowsPerRefill - 1;
            }
            const uint64_t sum = referred && (AllRecorded || referred[l]) ? usual_row<true>(held, to, order, reference) : usual_row<false>(held, to, order, nullptr);
            worst = sum > worst ? sum : worst;
        }
        for (unsigned s = 0; s < 5; ++s) streams_[s].held = held[s];
        worst_ = worst;
        bad_ |= worst >= job_.experts || masks_ > 255;
    }

    // Writes the rows of tokens as ascending ids. Returns false if a row has an id twice.
    bool write(size_t first, size_t end) {
        const unsigned k = k_, layers = job_.layers, ids = layers * k;
        bool distinct = true;
        Id sorted[kRoutingTokensPerCheck * kRoutingGroup * 8];
        if constexpr (kIsUsual) {
            for (size_t t = first; t < end; ++t) {
                const uint8_t* has = recorded(int64_t(t));
                for (unsigned l = 0; misses_any(has) && l < layers; ++l)
                    if (!has[l]) std::memcpy(rows(int64_t(t)) + l * 8, "\0\1\2\3\4\5\6\7", 8);  // distinct numbers
            }
            distinct = sort_rows_of_bytes(rows(int64_t(first)), sorted, (end - first) * layers);
        }
        for (size_t t = first; t < end; ++t) {
            const uint8_t* has = recorded(int64_t(t));
            int16_t* to = job_.out + (t * job_.all_layers + job_.first_layer) * k;
            const Id* from = kIsUsual ? sorted + (t - first) * ids : rows(int64_t(t));
            for (unsigned i = 0; i < ids; ++i) to[i] = int16_t(from[i]);
            if (!kIsUsual)
                for (unsigned l = 0; l < layers; ++l) distinct &= !has[l] || sort_one(to + l * k, k);
            for (unsigned l = 0; misses_any(has) && l < layers; ++l)
                for (unsigned j = 0; !has[l] && j < k; ++j) to[l * k + j] = -1;
        }
        return distinct;
    }

    bool misses_any(const uint8_t* has) const { return std::memchr(has, 0, job_.layers) != nullptr; }

    const RoutingJob& job_;
    Id* rows_;
    const Id* order_;  // the experts by layer and rank
    unsigned k_;
    Stream streams_[kRoutingMaxTopK + kRoutingMaxTopK / 8];
    unsigned left_ = 0;  // rows until the streams are refilled
    bool bad_ = false;
    // Only for the usual shape:
    const uint16_t* tables_[9][8];  // by experts kept, and place
    unsigned left_of_last_ = 0;       // as `left_`, for the streams of the last four places
    uint64_t worst_ = 0, masks_ = 0;  // the largest sum of gaps, and the bits of all masks
};

}  // namespace

RoutingFault DELTAWIRE_ROUTING_KERNEL(const RoutingJob& job) {
    if (job.experts <= 256) return job.top_k == 8 ? Decoder<uint8_t, 8>(job).run() : Decoder<uint8_t, 0>(job).run();
    return job.top_k == 8 ? Decoder<uint16_t, 8>(job).run() : Decoder<uint16_t, 0>(job).run();
}

}  // namespace deltawire
