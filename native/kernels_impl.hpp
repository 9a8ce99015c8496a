// The kernels, written once over an `Isa`: how to compare 64 elements, how to sort them into contexts, how to count.
// Included only by kernels_*.cpp, each compiled for its own instruction set; everything here must have internal linkage there.
#pragma once

#include <cstring>

#include "kernels.hpp"

namespace deltawire {
namespace {

template <class Isa>
struct Kernel {
    // The last, partial group of a tensor, padded so that full-width loads stay in bounds.
    template <class T>
    struct Padded {
        alignas(64) T data[kGroup] = {};
        Padded(const T* from, uint32_t count) { std::memcpy(data, from, count * sizeof(T)); }
    };

    template <class T>
    static void scan(const T* base, const T* next, uint32_t count, const ContextRule& rule, TileScan& out) {
        uint16_t* positions = out.positions;
        if (!rule.mask) {
            const uint32_t whole = count / kGroup;
            for (uint32_t g = 0; g < whole; ++g)
                positions = Isa::positions(Isa::differ(base + g * kGroup, next + g * kGroup), uint16_t(g * kGroup), positions);
            if (const uint32_t rest = count % kGroup) {
                const Padded<T> a(base + whole * kGroup, rest), b(next + whole * kGroup, rest);
                positions = Isa::positions(Isa::differ(a.data, b.data), uint16_t(whole * kGroup), positions);
            }
            out.changes = uint32_t(positions - out.positions);
            return;
        }
        typename Isa::Counts counts = Isa::Counts::zero();
        const auto group = [&](uint32_t g, const T* a, const T* b, uint64_t valid) {
            typename Isa::Masks masks = Isa::masks(a, rule);
            if (valid != ~uint64_t(0)) masks.keep(valid);
            masks.store(out.masks[g]);
            counts.store16(out.ranks[g]);
            counts.add(masks);
            positions = Isa::positions(Isa::differ(a, b), uint16_t(g * kGroup), positions);
        };
        const uint32_t whole = count / kGroup;
        for (uint32_t g = 0; g < whole; ++g) group(g, base + g * kGroup, next + g * kGroup, ~uint64_t(0));
        if (const uint32_t rest = count % kGroup) {
            const Padded<T> a(base + whole * kGroup, rest), b(next + whole * kGroup, rest);
            group(whole, a.data, b.data, (uint64_t(1) << rest) - 1);
        }
        out.changes = uint32_t(positions - out.positions);
        alignas(64) int64_t totals[kContexts];
        counts.store(totals);
        for (unsigned c = 0; c < kContexts; ++c) out.totals[c] = uint32_t(totals[c]);
    }

    template <class T>
    static void collect(const T* base, const T* next, uint32_t count, const ContextRule& rule, const TileScan& scan, const Multipliers* multipliers,
                        Collected<T>& out, Lanes& lanes) {
        const bool floating = rule.mask != 0;
        uint32_t sums[4] = {};
        for (uint32_t i = 0; i < scan.changes; ++i) {
            const uint32_t at = scan.positions[i], g = at / kGroup;
            const T old = base[at], now = next[at];
            const unsigned c = rule(old);
            const uint64_t before = (uint64_t(1) << at % kGroup) - 1;
            const uint32_t rank = out.seen[c] + (floating ? scan.ranks[g][c] + uint32_t(std::popcount(scan.masks[g][c] & before)) : at);
            const uint32_t n = out.count[c]++;
            out.gaps[c][n] = rank - out.next_rank[c];
            out.next_rank[c] = rank + 1;
            out.steps[c][n] = T(ordered<T>(now, floating) - ordered<T>(old, floating));
            out.differing[c][n] = T(now ^ old);
            digest_change<T>(at, old, now, multipliers, sums);
        }
        for (unsigned j = 0; j < 4; ++j) lanes[j] += sums[j];
        if (floating)
            for (unsigned c = 0; c < kContexts; ++c) out.seen[c] += scan.totals[c];
        else
            out.seen[0] += count;
    }

    template <class T>
    static void digest_changes(const T* base, uint32_t first, const uint32_t* positions, const T* values, size_t n, const Multipliers* multipliers,
                               Lanes& lanes) {
        uint32_t sums[4] = {};
        for (size_t i = 0; i < n; ++i) digest_change<T>(positions[i] - first, base[positions[i] - first], values[i], multipliers, sums);
        for (unsigned j = 0; j < 4; ++j) lanes[j] += sums[j];
    }

    template <class T>
    static void locate(const T* base, uint32_t count, uint32_t first, const ContextRule& rule, bool floating, const ChunkChanges<T>& changes,
                       Cursor& cursor, Located<T>& out) {
        const auto changed = [&](T old, T operand, bool is_xor) {
            return is_xor ? T(old ^ operand) : unordered<T>(T(ordered<T>(old, floating) + operand), floating);
        };
        if (!rule.mask) {
            const auto& context = changes.contexts[0];
            int64_t& remaining = cursor.remaining[0];
            while (remaining < int64_t(count)) {
                const uint32_t at = uint32_t(remaining), i = cursor.next[0]++;
                out.positions[out.count] = first + at;
                out.values[out.count++] = changed(base[at], context.operands[i], context.is_xor);
                remaining = i + 1 < context.changes ? remaining + 1 + context.gaps[i + 1] : kExhausted + at + 1;
            }
            remaining -= count;
            return;
        }
        typename Isa::Counts counts = Isa::Counts::load(cursor.remaining);
        const auto group = [&](uint32_t g, const T* elements, uint64_t valid) {
            typename Isa::Masks masks = Isa::masks(elements, rule);
            if (valid != ~uint64_t(0)) masks.keep(valid);
            uint32_t due = counts.subtract(masks);
            if (!due) return;
            alignas(64) uint64_t bits[kContexts];
            alignas(64) int64_t remaining[kContexts];
            masks.store(bits);
            counts.store(remaining);
            T values[kGroup];
            uint64_t hit = 0;
            for (; due; due &= due - 1) {
                const unsigned c = unsigned(std::countr_zero(due));
                const auto& context = changes.contexts[c];
                const int64_t size = std::popcount(bits[c]);
                int64_t rank = remaining[c] + size;
                uint32_t i = cursor.next[c];
                do {
                    const unsigned at = Isa::select(bits[c], unsigned(rank));
                    values[at] = changed(elements[at], context.operands[i], context.is_xor);
                    hit |= uint64_t(1) << at;
                    ++i;
                    rank = i < context.changes ? rank + 1 + context.gaps[i] : kExhausted + rank + 1;
                } while (rank < size);
                cursor.next[c] = i;
                remaining[c] = rank - size;
            }
            counts = Isa::Counts::load(remaining);
            uint32_t n = out.count;
            for (; hit; hit &= hit - 1) {
                const unsigned at = unsigned(std::countr_zero(hit));
                out.positions[n] = first + g * kGroup + at;
                out.values[n++] = values[at];
            }
            out.count = n;
        };
        const uint32_t whole = count / kGroup;
        for (uint32_t g = 0; g < whole; ++g) group(g, base + g * kGroup, ~uint64_t(0));
        if (const uint32_t rest = count % kGroup) {
            const Padded<T> a(base + whole * kGroup, rest);
            group(whole, a.data, (uint64_t(1) << rest) - 1);
        }
        counts.store(cursor.remaining);
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
        constexpr size_t kBlockBytes = kDigestBlock * 2;
        const size_t whole = bytes / kBlockBytes;
        Isa::digest_blocks(data, whole, multipliers, lanes);
        if (const size_t rest = bytes % kBlockBytes) {
            alignas(64) uint8_t padded[kBlockBytes] = {};
            std::memcpy(padded, data + whole * kBlockBytes, rest);
            Isa::digest_blocks(padded, 1, multipliers + whole, lanes);
        }
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
