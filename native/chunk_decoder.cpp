#include <algorithm>

#include "bits.hpp"
#include "chunk.hpp"

namespace deltawire {

template <class E>
ChunkDecoder<E>::ChunkDecoder()
    : targets_(new uint32_t[kMaxChanges + kContexts + kListSlack]()),
      scratch_(new uint32_t[kMaxChanges]),
      operands_(new T[kMaxChanges + kListSlack]()) {}

template <class E>
void ChunkDecoder<E>::parse(std::span<const uint8_t> body, const ElementType& type, uint32_t elements) {
    constexpr unsigned width = Held<E>::width;
    struct Parameters {
        uint32_t larger = 0;
        unsigned k = 0, kr = 0, kv = 0;
    };
    std::array<Parameters, kContexts> parameters{};
    const unsigned contexts = type.contexts();
    BitReader in(body.data(), body.size());
    const auto expect = [](bool holds, const char* otherwise) {
        if (!holds) throw Corrupt(otherwise);
    };

    top_ = uint32_t(in.get(11));
    expect(top_ <= type.exponent_mask(), "a chunk's top exponent is out of range.");
    std::array<uint8_t, 256> table;
    unsigned symbols = 0, ks = 0;
    if (in.get(1)) {
        expect(width >= 8, "4-bit codes have a symbol table.");
        symbols = unsigned(in.get(8)) + 1;
        ks = unsigned(in.get(3));
        std::array<bool, 256> seen{};
        for (unsigned i = 0; i < symbols; ++i) {
            table[i] = uint8_t(in.get(8));
            expect(!seen[table[i]], "a symbol table repeats a symbol.");
            seen[table[i]] = true;
        }
    }
    total_ = 0;
    changes_ = {};
    for (unsigned c = 0; c < contexts; ++c) {
        auto& context = changes_.contexts[c];
        Parameters& p = parameters[c];
        context.changes = get_count(in);
        if (!context.changes) continue;
        expect(context.changes <= kMaxChanges - total_, "a chunk lists more than 32768 changes.");
        total_ += context.changes;
        context.inverted = in.get(1);
        if (context.inverted) {
            context.unchanged = get_count(in);
            expect(context.unchanged <= context.changes, "an inverted context has more unchanged elements than changes.");
        }
        p.k = unsigned(in.get(5));
        expect(p.k <= 24, "a position parameter is out of range.");
        modes_[c] = ValueMode(in.get(2));
        context.is_xor = modes_[c] == ValueMode::symbols;
        expect(!context.is_xor || symbols, "a context refers to a symbol table that is not there.");
        if (modes_[c] == ValueMode::runs) {
            p.larger = get_count(in);
            expect(p.larger >= 1 && p.larger <= context.changes, "a context has an impossible number of larger steps.");
            p.kr = unsigned(in.get(5));
            expect(p.kr <= 24, "a run parameter is out of range.");
        }
        if (modes_[c] == ValueMode::runs || modes_[c] == ValueMode::direct) {
            p.kv = unsigned(in.get(6));
            expect(p.kv < width, "a value parameter is out of range.");
        }
    }
    expect(total_ >= 1, "a coded chunk lists no change.");
    expect(total_ <= elements, "a chunk lists more changes than it has elements.");
    expect(!in.overrun(), "a chunk's body is too short.");

    uint32_t* targets = targets_.get();
    T* operands = operands_.get();
    for (unsigned c = 0; c < contexts; ++c) {
        auto& context = changes_.contexts[c];
        const Parameters& p = parameters[c];
        const uint32_t n = context.changes;
        if (!n) continue;
        context.targets = targets;
        context.operands = operands;
        if (context.inverted) {
            uint32_t i = 0, target = 0;
            get_rices(in, p.k, context.unchanged, [&](uint64_t run) {
                expect(run <= n - i, "the runs of a context exceed its changes.");
                for (const uint32_t end = i + uint32_t(run); i < end; ++i) targets[i] = target++;
                ++target;
            });
            for (; i < n; ++i) targets[i] = target++;
        } else {
            uint64_t target = 0;
            uint32_t* to = targets;
            get_rices(in, p.k, n, [&](uint64_t gap) {
                expect(gap < elements && (target += gap) < elements, "a position falls outside its chunk.");
                *to++ = uint32_t(target++);
            });
        }
        targets[n] = kNoTarget;
        if (width >= 8 && modes_[c] == ValueMode::symbols) {
            constexpr unsigned low = width < 8 ? 0 : width - 8;  // bits below the symbol
            for (uint32_t i = 0; i < n; ++i) {
                const uint64_t rank = get_rice(in, ks);
                expect(rank < symbols, "a symbol is not in the table.");
                operands[i] = T(uint64_t(table[rank]) << low | in.get_long(low));
                expect(operands[i] != 0, "a listed element does not change.");
            }
        } else {
            for (uint32_t i = 0; i < n;) {
                const uint32_t end = std::min(i + 56, n);
                uint64_t signs = in.get(end - i);
                for (; i < end; ++i, signs >>= 1) operands[i] = T(1 - 2 * int(signs & 1));
            }
        }
        const auto scale = [&](uint32_t i, uint64_t less_one) {
            expect(less_one < uint64_t(1) << (width - 1), "a step is out of range.");
            const T magnitude = T(less_one + 1);
            operands[i] = T(operands[i] * magnitude);
        };
        if (modes_[c] == ValueMode::direct) {
            uint32_t i = 0;
            get_rices(in, p.kv, n, [&](uint64_t less_one) { scale(i++, less_one); });
        } else if (modes_[c] == ValueMode::runs) {
            uint64_t at = 0;
            for (uint32_t x = 0; x < p.larger; ++x) {
                const uint64_t run = get_rice(in, p.kr);
                expect(run < n - at, "the runs of a context exceed its changes.");
                at += run;
                scratch_[x] = uint32_t(at++);
                expect(at < n || x + 1 == p.larger, "the runs of a context exceed its changes.");
            }
            for (uint32_t x = 0; x < p.larger; ++x) {
                const uint64_t less_two = get_rice(in, p.kv);
                expect(less_two < ~uint64_t(0), "a step is out of range.");
                scale(scratch_[x], less_two + 1);
            }
        }
        expect(!in.overrun(), "a chunk's body is too short.");
        targets += n + 1;
        operands += n;
    }
    expect(in.at_end(), "a chunk's body is longer than its streams.");
}

template <class E>
void ChunkDecoder<E>::check_end(const Cursor& cursor) const {
    for (unsigned c = 0; c < kContexts; ++c) {
        const auto& context = changes_.contexts[c];
        if (cursor.next[c] != context.changes) throw Corrupt("a position falls outside its chunk.");
        if (context.inverted && cursor.seen[c] != context.changes + context.unchanged)
            throw Corrupt("an inverted context has another number of elements than the base.");
    }
}

template <class E>
void ChunkDecoder<E>::add_facts(BodyFacts& facts) const {
    for (unsigned c = 0; c < kContexts; ++c) {
        const auto& context = changes_.contexts[c];
        if (!context.changes) continue;
        facts.changes_by_mode[unsigned(modes_[c])] += context.changes;
        if (context.is_xor) continue;
        for (uint32_t i = 0; i < context.changes; ++i) {
            const T step = context.operands[i];
            const T magnitude = step >> (sizeof(T) * 8 - 1) ? T(-step) : step;
            ++facts.steps_by_length[floor_log2(magnitude)];
        }
    }
}

template class ChunkDecoder<Nibble>;
template class ChunkDecoder<uint8_t>;
template class ChunkDecoder<uint16_t>;
template class ChunkDecoder<uint32_t>;
template class ChunkDecoder<uint64_t>;

}  // namespace deltawire
