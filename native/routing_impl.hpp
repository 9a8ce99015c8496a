// The decoder of routed experts, compiled once per instruction set. The file that includes it defines DELTAWIRE_ROUTING_KERNEL.
// It uses no function that the linker could share with files for other instruction sets.
#include <bit>
#include <cstring>

#if defined(__BMI2__)
#include <immintrin.h>
#endif

#include "routing_job.hpp"

namespace deltawire {
namespace {

// The bits of one stream. There are enough bytes after the data for all rows between two checks.
struct Stream {
    uint64_t held = uint64_t(1) << 63;  // the next bits, and then a 1 that moves down as they are taken
    uint64_t at = 0;                    // position of the first bit that was held after the last refill

    DELTAWIRE_INLINE void refill(const uint8_t* data) {
        uint64_t word;
        at += unsigned(std::countl_zero(held));
        std::memcpy(&word, data + (at >> 3), 8);
        held = word >> (at & 7) | uint64_t(1) << 63;
    }
    DELTAWIRE_INLINE uint64_t position() const { return at + unsigned(std::countl_zero(held)); }
};
constexpr unsigned kRowsPerRefill = 55 / kRoutingCodeBits;

using Row8 = short __attribute__((vector_size(16)));

DELTAWIRE_INLINE void order_pair(Row8& a, Row8& b) {
    const Row8 low = a < b ? a : b, high = a < b ? b : a;
    a = low, b = high;
}

DELTAWIRE_INLINE void interleave(Row8& a, Row8& b) {
#if defined(__clang__)  // GCC has this function only since version 12
    const Row8 low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11), high = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    const Row8 low = __builtin_shuffle(a, b, Row8{0, 8, 1, 9, 2, 10, 3, 11}), high = __builtin_shuffle(a, b, Row8{4, 12, 5, 13, 6, 14, 7, 15});
#endif
    a = low, b = high;
}

DELTAWIRE_INLINE void transpose(Row8 (&r)[8]) {
#pragma GCC unroll 3
    for (int step = 0; step < 3; ++step) {
        interleave(r[0], r[4]), interleave(r[1], r[5]), interleave(r[2], r[6]), interleave(r[3], r[7]);
        const Row8 t1 = r[4], t2 = r[1], t3 = r[5], t4 = r[2], t5 = r[6], t6 = r[3];
        r[1] = t1, r[2] = t2, r[3] = t3, r[4] = t4, r[5] = t5, r[6] = t6;
    }
}

// Sorts eight rows of eight numbers. Returns false if a row has a number twice.
DELTAWIRE_INLINE bool sort_rows(int16_t* rows) {
    Row8 r[8];
    std::memcpy(r, rows, sizeof r);
    transpose(r);
    order_pair(r[0], r[2]), order_pair(r[1], r[3]), order_pair(r[4], r[6]), order_pair(r[5], r[7]);
    order_pair(r[0], r[4]), order_pair(r[1], r[5]), order_pair(r[2], r[6]), order_pair(r[3], r[7]);
    order_pair(r[0], r[1]), order_pair(r[2], r[3]), order_pair(r[4], r[5]), order_pair(r[6], r[7]);
    order_pair(r[2], r[4]), order_pair(r[3], r[5]);
    order_pair(r[1], r[4]), order_pair(r[3], r[6]);
    order_pair(r[1], r[2]), order_pair(r[3], r[4]), order_pair(r[5], r[6]);
    const Row8 equal = (r[0] == r[1]) | (r[1] == r[2]) | (r[2] == r[3]) | (r[3] == r[4]) | (r[4] == r[5]) | (r[5] == r[6]) | (r[6] == r[7]);
    transpose(r);
    std::memcpy(rows, r, sizeof r);
    uint64_t two[2];
    std::memcpy(two, &equal, 16);
    return !(two[0] | two[1]);
}

DELTAWIRE_INLINE bool sort_one(int16_t* row, unsigned k) {
    bool distinct = true;
    for (unsigned i = 1; i < k; ++i) {
        const int16_t moved = row[i];
        unsigned at = i;
        for (; at && row[at - 1] > moved; --at) row[at] = row[at - 1];
        distinct &= !at || row[at - 1] != moved;
        row[at] = moved;
    }
    return distinct;
}

// Returns the bytes of `from` that `mask` names, one after the other.
DELTAWIRE_INLINE uint64_t compress(uint64_t from, uint32_t mask) {
#if defined(__BMI2__)
    return _pext_u64(from, _pdep_u64(mask, 0x0101010101010101) * 255);
#else
    uint64_t out = 0;
    for (unsigned at = 0; mask; mask &= mask - 1, at += 8) out |= (from >> (8 * std::countr_zero(mask)) & 255) << at;
    return out;
#endif
}

// Decodes token by token. A row has the experts kept from its reference, in the reference's order, and then the new ones by rank.
template <class Id, unsigned Fixed>
class Decoder {
public:
    explicit Decoder(const RoutingJob& job) : job_(job), rows_(static_cast<Id*>(job.rows)), order_(static_cast<const Id*>(job.order)), k_(Fixed ? Fixed : job.top_k) {
        for (unsigned s = 0; s < job.streams; ++s) streams_[s].at = (s ? job.ends[s - 1] : job.begin) * 8;
    }

    RoutingFault run() {
        for (size_t t = 0; t < job_.tokens; ++t) {
            token(t);
            if (!write(t)) return RoutingFault::twice;
            if ((t + 1) % kRoutingTokensPerCheck && t + 1 < job_.tokens) continue;
            bool bad = bad_;
            for (unsigned s = 0; s < job_.streams; ++s) bad |= streams_[s].position() > job_.ends[s] * 8;
            if (bad) return RoutingFault::no_code;
        }
        for (unsigned s = 0; s < job_.streams; ++s) {
            const uint64_t at = streams_[s].position();
            if (job_.ends[s] * 8 - at > 7 || (at & 7 && job_.data[at >> 3] >> (at & 7))) return RoutingFault::more_bits;
        }
        return RoutingFault::none;
    }

private:
    const uint8_t* recorded(int64_t t) const { return job_.recorded + size_t(t) * job_.all_layers + job_.first_layer; }
    Id* rows(int64_t t) const { return rows_ + size_t(t) * job_.layers * k_; }
    static constexpr unsigned stride() { return sizeof(Id) == 1 ? 256 : kRoutingMaxExperts; }

    void token(size_t t) {
        const int64_t from = job_.copied[t], reference = job_.reference[t];
        const uint8_t* referred = reference < 0 ? nullptr : recorded(reference);
        if (from >= 0) std::memcpy(rows(int64_t(t)), rows(from), job_.layers * k_ * sizeof(Id));
        else if constexpr (Fixed == 8 && sizeof(Id) == 1) rows_of_eight(rows(int64_t(t)), recorded(int64_t(t)), referred, rows(reference < 0 ? 0 : reference));
        else
            for (unsigned l = 0; l < job_.layers; ++l)
                if (recorded(int64_t(t))[l])
                    row(rows(int64_t(t)) + l * k_, order_ + size_t(l) * stride(), referred && referred[l] ? rows(reference) + l * k_ : nullptr);
    }

    DELTAWIRE_INLINE uint32_t take(unsigned stream, unsigned table) {
        uint64_t& held = streams_[stream].held;
        const uint32_t entry = job_.entries[(size_t(table) << job_.bits) + (held & ((uint64_t(1) << job_.bits) - 1))];
        held >>= entry & 15;
        return entry >> 4;
    }

    void row(Id* to, const Id* order, const Id* reference) {
        if (left_-- == 0) {
            for (unsigned s = 0; s < job_.streams; ++s) streams_[s].refill(job_.data);
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
            to[kept + j] = order[sum & (stride() - 1)];
        }
        bad_ |= sum >= job_.experts;
    }

    // Takes the first `fresh` of up to `Most` new experts of a row. Those after them are of no use, and are not taken from their streams.
    template <unsigned Most>
    DELTAWIRE_INLINE static uint64_t take_new(uint64_t (&held)[9], const uint16_t* table, unsigned bits, const uint8_t* order, unsigned fresh, uint32_t& sum) {
        uint64_t row = 0;
        const uint64_t low = (uint64_t(1) << bits) - 1;
#pragma GCC unroll 8
        for (unsigned j = 0; j < Most; ++j) {
            const uint32_t entry = table[(size_t(j) << bits) + (held[j + 1] & low)] & (j < fresh ? ~0u : 0u);
            held[j + 1] >>= entry & 15;
            sum += entry >> 4;
            row |= uint64_t(order[sum & 255]) << (8 * j);
        }
        return row;
    }

    // Does what `row` does for the rows of a token with eight experts each, with few branches on what the streams hold.
    void rows_of_eight(Id* to, const uint8_t* recorded, const uint8_t* referred, const Id* reference) {
        uint64_t held[9];
        for (unsigned s = 0; s < 9; ++s) held[s] = streams_[s].held;
        const unsigned bits = job_.bits;
        const uint16_t* const entries = job_.entries;
        const uint8_t* order = reinterpret_cast<const uint8_t*>(order_);
        unsigned left = left_;
        bool bad = false;
        for (unsigned l = 0; l < job_.layers; ++l, order += 256) {
            if (!recorded[l]) continue;
            if (left-- == 0) {
                for (unsigned s = 0; s < 9; ++s) {
                    streams_[s].held = held[s];
                    streams_[s].refill(job_.data);
                    held[s] = streams_[s].held;
                }
                left = kRowsPerRefill - 1;
            }
            uint64_t before = 0;
            uint32_t mask = 0, sum = 0;
            if (referred && referred[l]) {
                std::memcpy(&before, reference + size_t(l) * 8, 8);
                const uint32_t entry = entries[held[0] & ((uint64_t(1) << bits) - 1)];
                held[0] >>= entry & 15;
                mask = entry >> 4;
                bad |= mask > 255;
                mask &= 255;
            }
            const unsigned kept = unsigned(std::popcount(mask)), fresh = 8 - kept;
            const uint16_t* table = entries + (size_t(kept ? 9 : 1) << bits);
            const uint64_t added = fresh > 4 ? take_new<8>(held, table, bits, order, fresh, sum) : take_new<4>(held, table, bits, order, fresh, sum);
            bad |= sum >= job_.experts;
            const uint64_t row = compress(before, mask) | (added << (4 * kept) << (4 * kept));
            std::memcpy(to + size_t(l) * 8, &row, 8);
        }
        for (unsigned s = 0; s < 9; ++s) streams_[s].held = held[s];
        left_ = left;
        bad_ |= bad;
    }

    // Writes the rows of a token as ascending ids. Returns false if a row has an id twice.
    bool write(size_t t) {
        const unsigned k = k_, layers = job_.layers;
        const Id* from = rows(int64_t(t));
        const uint8_t* has = recorded(int64_t(t));
        int16_t* to = job_.out + (t * job_.all_layers + job_.first_layer) * k;
        for (unsigned i = 0; i < layers * k; ++i) to[i] = int16_t(from[i]);
        unsigned missing = 0;
        for (unsigned l = 0; l < layers; ++l) missing += !has[l];
        if (missing)
            for (unsigned l = 0; l < layers; ++l)
                for (unsigned j = 0; !has[l] && j < k; ++j) to[l * k + j] = int16_t(~j);  // distinct numbers
        unsigned l = 0;
        bool distinct = true;
        if constexpr (Fixed == 8)
            for (; l + 8 <= layers; l += 8) distinct &= sort_rows(to + l * 8);
        for (; l < layers; ++l) distinct &= sort_one(to + l * k, k);
        if (missing)
            for (l = 0; l < layers; ++l)
                for (unsigned j = 0; !has[l] && j < k; ++j) to[l * k + j] = -1;
        return distinct;
    }

    const RoutingJob& job_;
    Id* rows_;
    const Id* order_;  // the experts by layer and rank. Any sum of gaps, taken modulo `stride()`, is an index
    unsigned k_;
    Stream streams_[kRoutingMaxTopK + kRoutingMaxTopK / 8];
    unsigned left_ = 0;  // rows until the streams are refilled
    bool bad_ = false;
};

}  // namespace

RoutingFault DELTAWIRE_ROUTING_KERNEL(const RoutingJob& job) {
    if (job.experts <= 256) return job.top_k == 8 ? Decoder<uint8_t, 8>(job).run() : Decoder<uint8_t, 0>(job).run();
    return job.top_k == 8 ? Decoder<uint16_t, 8>(job).run() : Decoder<uint16_t, 0>(job).run();
}

}  // namespace deltawire
