// The kernels, written once for any `Isa`, which compares 64 elements, sorts them into contexts, and counts.
// Only kernels_*.cpp include this file, each compiled for one instruction set. Everything here must have internal linkage there.
#pragma once

#include <cstring>

#include "kernels.hpp"

namespace deltawire {
namespace {

// A piece is read several times while it is in the cache, and meanwhile the next pieces are prefetched. A prefetch may go beyond the end of a
// tensor, but a read never does.
inline constexpr size_t kApart = 3072;  // measured: two streams at the same offset in their pages are 10% slower (presumably because of memory banks)
template <class T>
DELTAWIRE_INLINE void prefetch_group(const T* group) {
    const auto* ahead = reinterpret_cast<const uint8_t*>(group) + 2 * kPieceBytes;
    for (unsigned i = 0; i < kGroup * sizeof(T); i += 64) __builtin_prefetch(ahead + i, 0, 2);
}

struct RiceSums {
    uint64_t sum, escapes;
};

// Shared by instruction sets that count contexts one by one.
struct OneByOne {
    struct Masks {
        uint64_t bits[kContexts] = {};
        void keep(uint64_t valid) {
            for (auto& b : bits) b &= valid;
        }
        void store(uint64_t* out) const { std::memcpy(out, bits, sizeof bits); }
    };

    struct Counts {
        int64_t n[kContexts];
        static Counts zero() { return Counts{}; }
        void store(int64_t* out) const { std::memcpy(out, n, sizeof n); }
        void store16(uint16_t* out) const {
            for (unsigned c = 0; c < kContexts; ++c) out[c] = uint16_t(n[c]);
        }
        void add(const Masks& m) {
            for (unsigned c = 0; c < kContexts; ++c) n[c] += std::popcount(m.bits[c]);
        }
    };

    // Writes the targets below `limit`, minus `seen`, to `out`, and returns how many there are.
    static uint32_t take(const uint32_t* targets, uint32_t seen, uint32_t limit, uint16_t* out) {
        uint32_t n = 0;
        for (; targets[n] < limit; ++n) out[n] = uint16_t(targets[n] - seen);
        return n;
    }
};

template <class Isa>
struct Kernel {
    // The last, partial group of a tensor, padded so that full-width loads stay within bounds.
    template <class T>
    struct Padded {
        alignas(64) T data[kGroup] = {};
        Padded(const T* from, uint32_t count) { std::memcpy(data, from, count * sizeof(T)); }
    };

    // Digests a piece block by block, as part of a loop over its groups: the sums wait for memory while the rest of the loop computes.
    template <class T>
    class DigestAlong {
    public:
        DigestAlong(const T* piece, uint32_t count, const Multipliers* multipliers)
            : piece_(piece), multipliers_(multipliers), whole_(count / kElements), rest_(count % kElements) {}
        void before_group(uint32_t g) {
            constexpr uint32_t groups = kElements / kGroup;
            if (g % groups == 0 && g / groups < whole_) sums_.add(piece_ + g * kGroup, multipliers_[g / groups]);
        }
        void finish(Lanes& lanes) {
            if (rest_) {
                alignas(64) uint8_t padded[kDigestBlock * 2] = {};
                std::memcpy(padded, piece_ + whole_ * kElements, rest_ * sizeof(T));
                sums_.add(padded, multipliers_[whole_]);
            }
            sums_.finish(lanes);
        }

    private:
        static constexpr uint32_t kElements = kDigestBlock * 2 / sizeof(T);
        const T* piece_;
        const Multipliers* multipliers_;
        uint32_t whole_, rest_;
        typename Isa::Digest sums_;
    };

    template <class T>
    static void scan(const T* base, const T* next, uint32_t count, const ContextRule& rule, const Multipliers* multipliers, PieceScan& out,
                     Lanes& lanes) {
        const typename Isa::Sorter sort(rule);
        const bool floating = rule.mask != 0;
        typename Isa::Counts counts = Isa::Counts::zero();
        DigestAlong<T> digest(base, count, multipliers);
        uint16_t* positions = out.positions;
        const auto group = [&](uint32_t g, const T* a, const T* b, uint64_t valid) {
            const uint64_t changed = Isa::differ(a, b);  // comes first, so that `a` is loaded once for both
            if (floating) {
                typename Isa::Masks masks = sort(a);
                if (valid != ~uint64_t(0)) masks.keep(valid);
                masks.store(out.masks[g]);
                counts.store16(out.ranks[g]);
                counts.add(masks);
            }
            positions = Isa::positions(changed, uint16_t(g * kGroup), positions);
        };
        const uint32_t whole = count / kGroup;
        for (uint32_t g = 0; g < whole; ++g) {
            const T *const a = base + g * kGroup, *const b = next + g * kGroup;
            prefetch_group(a);
            prefetch_group(b + kApart / sizeof(T));
            digest.before_group(g);
            group(g, a, b, ~uint64_t(0));
        }
        if (const uint32_t rest = count % kGroup) {
            const Padded<T> a(base + whole * kGroup, rest), b(next + whole * kGroup, rest);
            group(whole, a.data, b.data, (uint64_t(1) << rest) - 1);
        }
        digest.finish(lanes);
        out.changes = uint32_t(positions - out.positions);
        counts.store(out.totals);
    }

    template <class T>
    static void collect(const T* base, const T* next, uint32_t count, const ContextRule& rule, const PieceScan& scan, const Multipliers* multipliers,
                        Collected<T>& out, Lanes& lanes) {
        if (rule.mask)
            collect_as<T, true>(base, next, rule, scan, multipliers, out, lanes);
        else
            collect_as<T, false>(base, next, rule, scan, multipliers, out, lanes);
        for (unsigned c = 0; c < kContexts; ++c) out.contexts[c].seen += rule.mask ? uint32_t(scan.totals[c]) : count;
    }
    template <class T, bool floating>
    static void collect_as(const T* base, const T* next, const ContextRule rule, const PieceScan& scan, const Multipliers* multipliers,
                           Collected<T>& out, Lanes& lanes) {
        uint32_t sums[4] = {};
        const uint32_t changes = scan.changes;
        for (uint32_t i = 0; i < changes; ++i) {
            const uint32_t at = scan.positions[i], g = at / kGroup;
            const T old = base[at], now = next[at];
            const unsigned c = floating ? rule(old) : 0;
            const uint64_t before = (uint64_t(1) << at % kGroup) - 1;
            auto& context = out.contexts[c];
            const uint32_t rank = context.seen + (floating ? scan.ranks[g][c] + uint32_t(std::popcount(scan.masks[g][c] & before)) : at);
            *context.end++ = {rank - context.next_rank, T(ordered<T>(now, floating) - ordered<T>(old, floating)), T(now ^ old)};
            context.next_rank = rank + 1;
            digest_change<T>(at, old, now, multipliers, sums);
        }
        for (unsigned j = 0; j < 4; ++j) lanes[j] += sums[j];
    }

    template <class T>
    static void digest_changes(const T* base, uint32_t first, const uint32_t* positions, const T* values, size_t n, const Multipliers* multipliers,
                               Lanes& lanes) {
        uint32_t sums[4] = {};
        for (size_t i = 0; i < n; ++i) digest_change<T>(positions[i] - first, base[positions[i] - first], values[i], multipliers, sums);
        for (unsigned j = 0; j < 4; ++j) lanes[j] += sums[j];
    }

    // Notes the elements of each group by context, and how many came before. Rows after the last group count as never reached.
    template <class T>
    static void rank(const T* base, uint32_t count, const ContextRule& rule, const Multipliers* multipliers, PieceScan& out, Lanes& lanes) {
        const typename Isa::Sorter sort(rule);
        DigestAlong<T> digest(base, count, multipliers);
        typename Isa::Counts counts = Isa::Counts::zero();
        const uint32_t whole = count / kGroup;
        uint32_t g = 0;
        const auto group = [&](typename Isa::Masks masks) {
            masks.store(out.masks[g]);
            counts.store16(out.ranks[g]);
            counts.add(masks);
            ++g;
        };
        while (g < whole) {
            prefetch_group(base + g * kGroup);
            digest.before_group(g);
            group(sort(base + g * kGroup));
        }
        if (const uint32_t rest = count % kGroup) {
            const Padded<T> a(base + whole * kGroup, rest);
            typename Isa::Masks masks = sort(a.data);
            masks.keep((uint64_t(1) << rest) - 1);
            group(masks);
        }
        digest.finish(lanes);
        counts.store(out.totals);
        std::memset(out.ranks[g], 0xff, (kPiece<T> / kGroup - g) * sizeof out.ranks[0]);
    }

    // Returns the last group that starts at or before the target: a four-way search without a branch instruction. `column` is that of the
    // context in the rows.
    template <uint32_t groups>
    static uint32_t last_group(const uint16_t* column, uint16_t target) {
        if constexpr (groups == 1) {
            return 0;
        } else {
            constexpr uint32_t ways = groups % 4 ? 2 : 4, step = groups / ways;
            uint32_t way = 0;
            for (uint32_t k = 1; k < ways; ++k) way += column[k * step * kContexts] <= target;
            return way * step + last_group<step>(column + way * step * kContexts, target);
        }
    }

    template <class T>
    static void locate(const T* base, uint32_t count, uint32_t first, const ContextRule& rule, const Multipliers* multipliers,
                       const ChunkChanges<T>& changes, Cursor& cursor, LocateSpace& space, Located<T>& out, Lanes& lanes) {
        const bool floating = rule.mask != 0;
        const auto changed = [&](T old, T operand, bool is_xor) {
            return is_xor ? T(old ^ operand) : unordered<T>(T(ordered<T>(old, floating) + operand), floating);
        };
        const uint32_t n = out.count;
        if (!floating) {
            digest(reinterpret_cast<const uint8_t*>(base), count * sizeof(T), multipliers, lanes);
            const auto& context = changes.contexts[0];
            uint32_t i = cursor.next[0], to = n;
            const uint32_t seen = cursor.seen[0], limit = seen + count;
            if (context.changes)
                for (; context.targets[i] < limit; ++i, ++to) {
                    const uint32_t at = context.targets[i] - seen;
                    out.positions[to] = first + at;
                    out.values[to] = changed(base[at], context.operands[i], context.is_xor);
                }
            cursor.next[0] = i;
            cursor.seen[0] = limit;
            out.count = to;
            return;
        }

        rank(base, count, rule, multipliers, space.scan, lanes);
        T* const operands = reinterpret_cast<T*>(space.operands);
        uint32_t due = 0, xors = 0;
        for (unsigned c = 0; c < kContexts; ++c) {
            const auto& context = changes.contexts[c];
            const uint32_t seen = cursor.seen[c];
            cursor.seen[c] = seen + space.scan.totals[c];
            if (!context.changes) continue;
            xors |= uint32_t(context.is_xor) << c;
            const uint32_t from = cursor.next[c],
                           taken = Isa::take(context.targets + from, seen, cursor.seen[c], space.ranks + due);
            cursor.next[c] = from + taken;
            for (uint32_t i = 0; i < taken; i += kListSlack) {
                std::memset(space.contexts + due + i, int(c), kListSlack);
                std::memcpy(operands + due + i, context.operands + from + i, kListSlack * sizeof(T));
            }
            due += taken;
        }
        const auto place = [&]<bool may_xor>(uint32_t i) {
            const unsigned c = space.contexts[i];
            const uint16_t target = space.ranks[i];
            const uint32_t g = last_group<kPiece<T> / kGroup>(space.scan.ranks[0] + c, target);
            const unsigned bit = Isa::select(space.scan.masks[g][c], unsigned(target - space.scan.ranks[g][c]));
            const uint32_t at = g * kGroup + bit;
            out.positions[n + i] = first + at;
            out.values[n + i] = changed(base[at], operands[i], may_xor && xors >> c & 1);
        };
        if (xors)
            for (uint32_t i = 0; i < due; ++i) place.template operator()<true>(i);
        else
            for (uint32_t i = 0; i < due; ++i) place.template operator()<false>(i);
        out.count = n + due;
    }

    static uint64_t rice_cost(const uint32_t* values, size_t n, unsigned k, uint64_t limit) {
        const auto [sum, escapes] = Isa::rice_sums(values, n, k);
        uint64_t cost = n * (1 + k) + sum;
        if (!escapes || cost + 5 * escapes >= limit) return cost + 5 * escapes;
        for (size_t i = 0; i < n; ++i) {
            const uint32_t q = values[i] >> k;
            if (q >= 16) cost += 5 + (31u - unsigned(std::countl_zero(q - 15)));
        }
        return cost;
    }

    static void multipliers(uint64_t seed, uint64_t first_block, size_t n, Multipliers* out) { fill_multipliers(seed, first_block, n, out); }

    static void digest(const uint8_t* data, size_t bytes, const Multipliers* multipliers, Lanes& lanes) {
        DigestAlong<uint8_t> sums(data, uint32_t(bytes), multipliers);
        for (uint32_t g = 0; g < bytes / kGroup; ++g) {
            prefetch_group(data + g * kGroup);
            sums.before_group(g);
        }
        sums.finish(lanes);
    }

    template <class T>
    static constexpr KernelsFor<T> kernels_for() {
        return {scan<T>, collect<T>, locate<T>, digest_changes<T>};
    }
    static constexpr Kernels table(const char* name) {
        return {name, multipliers, digest, rice_cost, kernels_for<uint8_t>(), kernels_for<uint16_t>(), kernels_for<uint32_t>(), kernels_for<uint64_t>()};
    }
};

}  // namespace
}  // namespace deltawire
