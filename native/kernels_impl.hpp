// The kernels, written once for any `Isa`, which compares 64 elements, sorts them into contexts, and counts.
// Only kernels_*.cpp include this file, each compiled for one instruction set. Everything here must have internal linkage there.
#pragma once

#include <cstring>
#include <optional>

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

// Words that are processed together. Compilers split them where the machine has only shorter vectors.
typedef uint64_t FourWords __attribute__((vector_size(32)));
typedef uint64_t EightWords __attribute__((vector_size(64)));
#if defined(__clang__)
#define DELTAWIRE_SHUFFLE(Words, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define DELTAWIRE_SHUFFLE(Words, a, b, ...) __builtin_shuffle(a, b, Words{__VA_ARGS__})
#endif

// Adds up the words of each of eight vectors. The eight sums are in one vector or two.
DELTAWIRE_INLINE void sum_words(const EightWords (&v)[8], EightWords (&out)[1]) {
    EightWords pairs[4], quads[2];
    for (unsigned i = 0; i < 4; ++i)
        pairs[i] = DELTAWIRE_SHUFFLE(EightWords, v[2 * i], v[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
                   DELTAWIRE_SHUFFLE(EightWords, v[2 * i], v[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    for (unsigned i = 0; i < 2; ++i)
        quads[i] = DELTAWIRE_SHUFFLE(EightWords, pairs[2 * i], pairs[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                   DELTAWIRE_SHUFFLE(EightWords, pairs[2 * i], pairs[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    out[0] = DELTAWIRE_SHUFFLE(EightWords, quads[0], quads[1], 0, 1, 2, 3, 8, 9, 10, 11) +
             DELTAWIRE_SHUFFLE(EightWords, quads[0], quads[1], 4, 5, 6, 7, 12, 13, 14, 15);
}
DELTAWIRE_INLINE void sum_words(const FourWords (&v)[8], FourWords (&out)[2]) {
    FourWords pairs[4];
    for (unsigned i = 0; i < 4; ++i)
        pairs[i] = DELTAWIRE_SHUFFLE(FourWords, v[2 * i], v[2 * i + 1], 0, 4, 2, 6) + DELTAWIRE_SHUFFLE(FourWords, v[2 * i], v[2 * i + 1], 1, 5, 3, 7);
    for (unsigned i = 0; i < 2; ++i)
        out[i] = DELTAWIRE_SHUFFLE(FourWords, pairs[2 * i], pairs[2 * i + 1], 0, 1, 4, 5) +
                 DELTAWIRE_SHUFFLE(FourWords, pairs[2 * i], pairs[2 * i + 1], 2, 3, 6, 7);
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

    template <bool always>
    using CountsOf = Counts;

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
            if (g % (2 * groups) != 0) return;
            const T* const at = piece_ + g * kGroup;
            const uint32_t block = g / groups;
            if (block + 1 < whole_) sums_.add_two(at, multipliers_ + block);
            else if (block < whole_) sums_.add(at, multipliers_[block]);
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
        DigestAlong<T> digest(base, count, multipliers);
        uint16_t* positions = out.positions;
        // Few groups of one-byte floats have changes, because such floats are coarse. A branch costs less than always noting what only changes need.
        constexpr bool always = sizeof(T) > 1;
        auto counts = Isa::template CountsOf<always>::zero();
        const auto group = [&](uint32_t g, const T* a, const T* b, uint64_t valid) {
            const uint64_t changed = Isa::differ(a, b);  // comes first, so that `a` is loaded once for both
            if (floating) {
                auto masks = sort.template masks<always>(a);
                if (valid != ~uint64_t(0)) masks.keep(valid);
                if (always || changed) {
                    masks.store(out.masks[g]);
                    counts.store16(out.ranks[g]);
                }
                counts.add(masks);
            }
            if (always || changed) positions = Isa::positions(changed, uint16_t(g * kGroup), positions);
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
    static uint32_t collect(const T* base, const T* next, uint32_t count, const ContextRule& rule, const PieceScan& scan, const Multipliers* multipliers,
                            Collected<T>& out, Lanes& lanes) {
        if (rule.mask)
            collect_as<T, true>(base, next, rule, scan, multipliers, out, lanes);
        else
            collect_as<T, false>(base, next, rule, scan, multipliers, out, lanes);
        for (unsigned c = 0; c < kContexts; ++c) out.contexts[c].seen += rule.mask ? uint32_t(scan.totals[c]) : count;
        return scan.changes;
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
            *context.end++ = {rank - context.next_rank, step_between<T>(old, now, floating), T(now ^ old)};
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
            return is_xor ? T(old ^ operand) : stepped<T>(old, operand, floating);
        };
        const uint32_t n = out.count;
        if (!floating) {
            digest_bytes(reinterpret_cast<const uint8_t*>(base), count * sizeof(T), multipliers, lanes);
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

    // 4-bit codes. A piece is a whole tile, so most pieces of a usual update have no change, or one. Contexts are counted for blocks of 512 bytes;
    // only in a block with a change are they counted word by word. The context of a float is that of its magnitude, its low 3 bits.

    static constexpr uint64_t kLowBits = 0x1111111111111111u;  // the lowest bit of each of the 16 codes in a word
    static constexpr uint32_t kCountBlock = 512;               // bytes
    static constexpr uint32_t kBlockWords = kCountBlock / 8;
    static constexpr unsigned kMagnitudes = 8;

    // Finds the codes of a word that have a context: those whose magnitudes are in a range.
    class Members {
    public:
        unsigned least = kMagnitudes, after = 0;

        Members(const ContextRule& rule, unsigned context) {
            for (unsigned m = kMagnitudes; m-- > 0;)
                if (rule(m) == context) {
                    if (!after) after = m + 1;
                    least = m;
                }
        }
        // Returns the lowest bits of these codes.
        DELTAWIRE_INLINE uint64_t operator()(uint64_t word) const {
            const uint64_t above = (word & 7 * kLowBits) | 8 * kLowBits;  // a difference has bit 3 of a code if the magnitude is at least that
            return ((above - least * kLowBits) & ~(above - after * kLowBits)) >> 3 & kLowBits;
        }
    };

    DELTAWIRE_INLINE static uint64_t word_at(const uint8_t* piece, uint32_t bytes, uint32_t word) {
        uint64_t x = 0;
        if (8 * word + 8 <= bytes) [[likely]] std::memcpy(&x, piece + 8 * word, 8);
        else std::memcpy(&x, piece + 8 * word, bytes - 8 * word);
        return x;
    }
    DELTAWIRE_INLINE static uint8_t nibble_at(const uint8_t* piece, uint32_t at) { return piece[at / 2] >> 4 * (at % 2) & 15; }

    // Counts the codes of a piece by magnitude. A row of `masks` is for a block: for each set of bits (0–7), how many codes before it have all
    // of them. `of_magnitudes` makes numbers of codes by magnitude of a row.
    class NibbleCounts {
    public:
        explicit NibbleCounts(PieceScan& out) : out_(out) {}
        // `block` has kCountBlock bytes, of which `bytes` count. The others must be zero.
        DELTAWIRE_INLINE void add(const uint8_t* block, uint32_t bytes) {
            Words counters[kMagnitudes] = {};
#pragma GCC unroll 2
            for (uint32_t part = 0; part < kCountBlock; part += 8 * sizeof(Words)) count_products(block + part, counters);
            Words sums[kParts];
            sum_words(counters, sums);
            std::memcpy(out_.masks[rows_++], totals_, sizeof totals_);
            for (unsigned p = 0; p < kParts; ++p) {  // no byte of a sum exceeds 128
                Words n = (sums[p] & 0x00ff00ff00ff00ffu) + (sums[p] >> 8 & 0x00ff00ff00ff00ffu);
                n += n >> 32;
                n += n >> 16;
                totals_[p] += n & 0xffff;
            }
            totals_[0][0] += 2 * bytes;
        }
        void finish(const ContextRule& rule) {
            uint64_t of[kMagnitudes];
            std::memcpy(of, totals_, sizeof of);
            of_magnitudes(of);
            std::memset(out_.totals, 0, sizeof out_.totals);
            for (unsigned m = 0; m < kMagnitudes; ++m) out_.totals[rule(m)] += int64_t(of[m]);
        }
        DELTAWIRE_INLINE static void of_magnitudes(uint64_t (&of)[kMagnitudes]) {
            for (unsigned m = 0; m < 4; ++m) of[m] -= of[m + 4];
            for (unsigned m = 0; m < 6; m += m == 1 ? 3 : 1) of[m] -= of[m + 2];
            for (unsigned m = 0; m < 8; m += 2) of[m] -= of[m + 1];
        }

    private:
        using Words = typename Isa::Words;
        static constexpr unsigned kParts = kMagnitudes * 8 / sizeof(Words);

        // Counts in eight vectors the products of the bits of each code. The counters hold a number in each byte, and add at most 16 to it.
        DELTAWIRE_INLINE static void count_products(const uint8_t* from, Words (&counters)[kMagnitudes]) {
            Words n[kMagnitudes] = {};  // 16 numbers of 4 bits in each word, and none exceeds 8
#pragma GCC unroll 8
            for (unsigned v = 0; v < 8; ++v) {
                Words x;
                std::memcpy(&x, from + v * sizeof x, sizeof x);
                const Words a = x & kLowBits, b = x >> 1 & kLowBits, c = x >> 2 & kLowBits, bc = b & c;
                n[1] += a;
                n[2] += b;
                n[3] += a & b;
                n[4] += c;
                n[5] += a & c;
                n[6] += bc;
                n[7] += a & bc;
            }
            constexpr uint64_t low = 0x0f0f0f0f0f0f0f0fu;
            for (unsigned m = 1; m < kMagnitudes; ++m) counters[m] += (n[m] & low) + (n[m] >> 4 & low);
        }

        PieceScan& out_;
        uint32_t rows_ = 0;
        Words totals_[kParts] = {};
    };

    // Ranks the codes of one context, or finds those with given ranks, in ascending order.
    class NibbleWalk {
    public:
        NibbleWalk(const ContextRule& rule, unsigned context, const uint8_t* piece, uint32_t bytes, const PieceScan& scan)
            : members_(rule, context), piece_(piece), bytes_(bytes), scan_(scan) {}
        uint32_t rank_of(uint32_t at) {
            const uint32_t target = at / 16;
            if (target / kBlockWords != word_ / kBlockWords) enter(target / kBlockWords);
            for (; word_ < target; ++word_) before_ += uint32_t(std::popcount(members()));
            return before_ + uint32_t(std::popcount(members() & ((uint64_t(1) << 4 * (at % 16)) - 1)));
        }
        uint32_t position_of(uint32_t rank) {
            const uint32_t blocks = (bytes_ + kCountBlock - 1) / kCountBlock;
            uint32_t block = word_ / kBlockWords;
            while (block + 1 < blocks && before_block(block + 1) <= rank) ++block;
            if (block != word_ / kBlockWords) enter(block);
            for (;; ++word_) {
                const uint64_t mask = members();
                const uint32_t n = uint32_t(std::popcount(mask));
                if (rank < before_ + n) return word_ * 16 + Isa::select(mask, rank - before_) / 4;
                before_ += n;
            }
        }

    private:
        uint64_t members() const { return members_(word_at(piece_, bytes_, word_)) & valid(); }
        // The last word of a tensor may be cut short.
        uint64_t valid() const {
            const uint32_t left = bytes_ - 8 * word_;
            return left >= 8 ? ~uint64_t(0) : (uint64_t(1) << 8 * left) - 1;
        }
        void enter(uint32_t block) {
            word_ = block * kBlockWords;
            before_ = before_block(block);
        }
        uint32_t before_block(uint32_t block) const {
            uint64_t of[kMagnitudes], n = 0;
            std::memcpy(of, scan_.masks[block], sizeof of);
            NibbleCounts::of_magnitudes(of);
            for (unsigned m = members_.least; m < members_.after; ++m) n += of[m];
            return uint32_t(n);
        }

        Members members_;
        const uint8_t* piece_;
        uint32_t bytes_;
        const PieceScan& scan_;
        uint32_t word_ = 0, before_ = 0;
    };

    static void scan_nibbles(const uint8_t* base, const uint8_t* next, uint32_t count, const ContextRule& rule, const Multipliers* multipliers,
                             PieceScan& out, Lanes& lanes) {
        const uint32_t bytes = count / 2, whole = bytes / kGroup;
        DigestAlong<uint8_t> digest(base, bytes, multipliers);
        NibbleCounts counts(out);
        uint16_t* positions = out.positions;
        for (uint32_t g = 0; g < whole; ++g) {
            const uint8_t *const a = base + g * kGroup, *const b = next + g * kGroup;
            prefetch_group(a);
            prefetch_group(b + kApart);
            digest.before_group(g);
            if (rule.mask && g % (kCountBlock / kGroup) == 0 && g * kGroup + kCountBlock <= bytes) counts.add(a, kCountBlock);
            const uint64_t changed = Isa::differ(a, b);
            if (changed) positions = Isa::positions(changed, uint16_t(g * kGroup), positions);
        }
        if (const uint32_t rest = bytes % kGroup) {
            const Padded<uint8_t> a(base + whole * kGroup, rest), b(next + whole * kGroup, rest);
            positions = Isa::positions(Isa::differ(a.data, b.data), uint16_t(whole * kGroup), positions);
        }
        if (rule.mask) finish_counts(base, bytes, rule, counts);
        digest.finish(lanes);
        out.changes = uint32_t(positions - out.positions);
    }
    static void finish_counts(const uint8_t* base, uint32_t bytes, const ContextRule& rule, NibbleCounts& counts) {
        if (const uint32_t rest = bytes % kCountBlock) {
            alignas(64) uint8_t padded[kCountBlock] = {};
            std::memcpy(padded, base + bytes - rest, rest);
            counts.add(padded, rest);
        }
        counts.finish(rule);
    }

    static uint32_t collect_nibbles(const uint8_t* base, const uint8_t* next, uint32_t count, const ContextRule& rule, const PieceScan& scan,
                                    const Multipliers* multipliers, Collected<uint8_t>& out, Lanes& lanes) {
        uint32_t found = 0;
        if (scan.changes) {
            uint32_t sums[4] = {};
            const auto collect_with = [&](auto rank_of) {
                for (uint32_t i = 0; i < scan.changes; ++i)
                    for (uint32_t at = 2 * scan.positions[i], end = at + 2; at < end; ++at) {
                        const uint8_t old = nibble_at(base, at), now = nibble_at(next, at);
                        if (old == now) continue;
                        const unsigned c = rule(old);
                        auto& context = out.contexts[c];
                        const uint32_t rank = context.seen + rank_of(c, at);
                        *context.end++ = {rank - context.next_rank, step_between<Nibble>(old, now, rule.mask != 0), uint8_t(now ^ old)};
                        context.next_rank = rank + 1;
                        digest_change<Nibble>(at, old, now, multipliers, sums);
                        ++found;
                    }
            };
            if (rule.mask) {
                const uint32_t bytes = count / 2;
                std::array<std::optional<NibbleWalk>, kMagnitudes> walks;
                collect_with([&](unsigned c, uint32_t at) {
                    if (!walks[c]) walks[c].emplace(rule, c, base, bytes, scan);
                    return walks[c]->rank_of(at);
                });
            } else {
                collect_with([](unsigned, uint32_t at) { return at; });
            }
            for (unsigned j = 0; j < 4; ++j) lanes[j] += sums[j];
        }
        for (unsigned c = 0; c < kContexts; ++c) out.contexts[c].seen += rule.mask ? uint32_t(scan.totals[c]) : count;
        return found;
    }

    static void locate_nibbles(const uint8_t* base, uint32_t count, uint32_t first, const ContextRule& rule, const Multipliers* multipliers,
                               const ChunkChanges<uint8_t>& changes, Cursor& cursor, LocateSpace& space, Located<uint8_t>& out, Lanes& lanes) {
        const uint32_t bytes = count / 2;
        const bool floating = rule.mask != 0;
        if (floating) {
            DigestAlong<uint8_t> digest(base, bytes, multipliers);
            NibbleCounts counts(space.scan);
            for (uint32_t g = 0; g < bytes / kGroup; ++g) {
                prefetch_group(base + g * kGroup);
                digest.before_group(g);
                if (g % (kCountBlock / kGroup) == 0 && g * kGroup + kCountBlock <= bytes) counts.add(base + g * kGroup, kCountBlock);
            }
            finish_counts(base, bytes, rule, counts);
            digest.finish(lanes);
        } else {
            digest_bytes(base, bytes, multipliers, lanes);
        }
        for (unsigned c = 0; c < (floating ? kMagnitudes : 1); ++c) {
            const auto& context = changes.contexts[c];
            const uint32_t seen = cursor.seen[c], limit = seen + (floating ? uint32_t(space.scan.totals[c]) : count);
            cursor.seen[c] = limit;
            uint32_t i = cursor.next[c];
            if (!context.changes || context.targets[i] >= limit) continue;
            NibbleWalk walk(rule, c, base, bytes, space.scan);
            for (; context.targets[i] < limit; ++i) {
                const uint32_t rank = context.targets[i] - seen, at = floating ? walk.position_of(rank) : rank;
                out.positions[out.count] = first + at;
                out.values[out.count++] = stepped<Nibble>(nibble_at(base, at), context.operands[i], floating);
            }
            cursor.next[c] = i;
        }
    }

    static void digest_changed_nibbles(const uint8_t* base, uint32_t first, const uint32_t* positions, const uint8_t* values, size_t n,
                                       const Multipliers* multipliers, Lanes& lanes) {
        uint32_t sums[4] = {};
        for (size_t i = 0; i < n; ++i)
            digest_change<Nibble>(positions[i] - first, nibble_at(base, positions[i] - first), values[i], multipliers, sums);
        for (unsigned j = 0; j < 4; ++j) lanes[j] += sums[j];
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

    static void digest_bytes(const uint8_t* data, size_t bytes, const Multipliers* multipliers, Lanes& lanes) {
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
        return {name,
                multipliers,
                digest_bytes,
                rice_cost,
                {scan_nibbles, collect_nibbles, locate_nibbles, digest_changed_nibbles},
                kernels_for<uint8_t>(),
                kernels_for<uint16_t>(),
                kernels_for<uint32_t>(),
                kernels_for<uint64_t>()};
    }
};

}  // namespace
}  // namespace deltawire
