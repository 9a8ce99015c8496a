#include <algorithm>
#include <cassert>

#include "bits.hpp"
#include "chunk.hpp"

namespace deltawire {
namespace {

constexpr unsigned kLargestPositionK = 24;
constexpr unsigned kLargestSymbolK = 7;
constexpr unsigned kTopBits = 11, kPositionKBits = 5, kRunKBits = 5, kValueKBits = 6, kValueModeBits = 2;
constexpr uint64_t kMeanCap = uint64_t(1) << 47;

unsigned rice_bits(uint64_t v, unsigned k) {
    const uint64_t q = v >> k;
    return q < kUnaryLimit ? unsigned(q) + 1 + k : kUnaryLimit + 6 + k + floor_log2(q - (kUnaryLimit - 1));
}

// The encoder appends to the lists of 16 contexts at the same time. Their distance is not a multiple of a large power of two, because then they would
// all share a few lines of the cache.
constexpr size_t kListStride = kMaxChanges + 40;

// Chooses a parameter by §5 rule 3, given its cost.
template <class Value, class Cost>
auto descend(const Value* values, size_t n, unsigned largest, Cost cost) {
    uint64_t sum = 0;
    for (size_t i = 0; i < n; ++i) {
        if constexpr (sizeof(Value) == 8) sum += std::min<uint64_t>(values[i], kMeanCap);
        else sum += values[i];
    }
    unsigned k = std::min(largest, unsigned(std::bit_width(sum / n)));
    uint64_t bits = cost(k, ~uint64_t(0));
    while (k > 0) {
        const uint64_t fewer = cost(k - 1, bits);
        if (fewer >= bits) break;
        bits = fewer;
        --k;
    }
    return std::pair{k, bits};
}

}  // namespace

template <class E>
ChunkEncoder<E>::ChunkEncoder(const Kernels& kernels)
    : kernels_(kernels),
      changes_(new Change<T>[kContexts * kListStride]),  // memory that is never touched costs nothing
      gaps_(new uint32_t[kMaxChanges]),
      runs_(new uint32_t[kMaxChanges]),
      steps_(new T[kMaxChanges]),
      differing_(new T[kMaxChanges]),
      values_(new Value[kMaxChanges]) {
    reset(1);
}

template <class E>
void ChunkEncoder<E>::reset(unsigned contexts) {
    contexts_ = contexts;
    for (unsigned c = 0; c < kContexts; ++c) {
        Change<T>* const list = changes_.get() + c * kListStride;
        collected_.contexts[c] = {list, list, 0, 0};
    }
}

template <class E>
auto ChunkEncoder<E>::choose(const uint32_t* values, size_t n, unsigned largest) const -> Rice {
    if (!n) return {};
    const auto [k, bits] = descend(values, n, largest, [&](unsigned at, uint64_t limit) { return kernels_.rice_cost(values, n, at, limit); });
    return {k, bits};
}

template <class E>
auto ChunkEncoder<E>::choose(const uint64_t* values, size_t n, unsigned largest) const -> Rice {
    if (!n) return {};
    const auto [k, bits] = descend(values, n, largest, [&](unsigned at, uint64_t) {
        uint64_t cost = 0;
        for (size_t i = 0; i < n; ++i) cost += rice_bits(values[i], at);
        return cost;
    });
    return {k, bits};
}

// Lists the runs of changing elements before each unchanged one, for a context in which most elements change.
template <class E>
uint32_t* ChunkEncoder<E>::fill_runs(unsigned c) {
    const uint32_t* gaps = plan_[c].gaps;
    uint32_t* out = runs_.get();
    uint32_t run = 0;
    for (uint32_t i = 0; i < plan_[c].n; ++i) {
        if (gaps[i]) {
            *out++ = run;
            out = std::fill_n(out, gaps[i] - 1, 0u);
            run = 0;
        }
        ++run;
    }
    uint32_t* const end = runs_.get() + plan_[c].unchanged;
    if (out < end) {
        *out++ = run;
        std::fill(out, end, 0u);
    }
    return runs_.get();
}

template <class E>
void ChunkEncoder<E>::plan_positions(unsigned c, uint32_t total) {
    Plan& p = plan_[c];
    const Rice straight = choose(p.gaps, p.n, kLargestPositionK);
    p.inverted = false;
    p.k = straight.k;
    p.position_bits = straight.bits;
    p.unchanged = total - p.n;
    if (p.n <= p.unchanged) return;
    const Rice inverted = choose(fill_runs(c), p.unchanged, kLargestPositionK);
    const uint64_t bits = inverted.bits + count_bits(p.unchanged);
    if (bits < p.position_bits) {
        p.inverted = true;
        p.k = inverted.k;
        p.position_bits = bits;
    }
}

// Lists the magnitudes above 1, minus 2, and the runs of ones before each.
template <class E>
size_t ChunkEncoder<E>::fill_larger(unsigned c, uint32_t* runs, Value* values) const {
    const T* const steps = plan_[c].steps;
    const uint32_t n = plan_[c].n;
    size_t larger = 0;
    uint32_t start = 0;  // of the current run
    for (uint32_t i = 0; i < n; ++i) {  // without a branch, because which steps are larger is unpredictable
        const T m = magnitude(steps[i]);
        runs[larger] = i - start;
        values[larger] = Value(T(m - 2));
        larger += m != 1;
        start = m != 1 ? i + 1 : start;
    }
    return larger;
}

template <class E>
void ChunkEncoder<E>::plan_values(unsigned c) {
    Plan& p = plan_[c];
    const T* steps = plan_[c].steps;
    p.mode = ValueMode::unit;
    p.value_bits = p.n;
    bool all_one = true;
    const uint32_t n = p.n;
    for (uint32_t i = 0; i < n; ++i) all_one &= T(steps[i] + 1) <= 2;  // a step is never 0
    if (all_one) return;

    constexpr unsigned largest = Held<E>::width - 1;
    Value* const values = values_.get();
    for (uint32_t i = 0; i < n; ++i) values[i] = Value(magnitude(steps[i]) - 1);
    const Rice direct = choose(values_.get(), p.n, largest);
    p.mode = ValueMode::direct;
    p.kv = direct.k;
    p.value_bits = p.n + kValueKBits + direct.bits;

    p.larger = uint32_t(fill_larger(c, runs_.get(), values_.get()));
    const Rice runs = choose(runs_.get(), p.larger, kLargestPositionK), larger = choose(values_.get(), p.larger, largest);
    const uint64_t bits = p.n + count_bits(p.larger) + kRunKBits + kValueKBits + runs.bits + larger.bits;
    if (bits < p.value_bits) {
        p.mode = ValueMode::runs;
        p.kr = runs.k;
        p.kv = larger.k;
        p.value_bits = bits;
    }
}

// Chooses the contexts that use symbols (§5 rule 6). Returns the number of bits of the table, 0 if there is none.
template <class E>
uint64_t ChunkEncoder<E>::plan_symbols() {
    constexpr unsigned width = sizeof(T) * 8;
    table_.clear();
    if (Held<E>::width < 8) return 0;  // 4-bit codes have no symbols
    std::array<uint32_t, 256> frequency{};
    uint32_t considered = 0;
    std::array<bool, kContexts> candidate{};
    for (unsigned c = 0; c < contexts_; ++c) {
        const Plan& p = plan_[c];
        candidate[c] = p.n && p.value_bits > uint64_t(p.n) * (width - 7);
        if (!candidate[c]) continue;
        considered += p.n;
        for (uint32_t i = 0; i < p.n; ++i) ++frequency[p.differing[i] >> (width - 8)];
    }
    if (!considered) return 0;

    for (unsigned s = 0; s < 256; ++s)
        if (frequency[s]) table_.push_back(uint8_t(s));
    std::stable_sort(table_.begin(), table_.end(), [&](uint8_t a, uint8_t b) { return frequency[a] > frequency[b]; });
    for (size_t r = 0; r < table_.size(); ++r) rank_of_symbol_[table_[r]] = uint8_t(r);

    // Applies rule 3 to the histogram instead of the values.
    const auto cost = [&](unsigned k) {
        uint64_t bits = 0;
        for (size_t r = 0; r < table_.size(); ++r) bits += uint64_t(frequency[table_[r]]) * rice_bits(r, k);
        return bits;
    };
    uint64_t sum = 0;
    for (size_t r = 0; r < table_.size(); ++r) sum += uint64_t(frequency[table_[r]]) * r;
    ks_ = std::min(kLargestSymbolK, unsigned(std::bit_width(sum / considered)));
    while (ks_ > 0 && cost(ks_ - 1) < cost(ks_)) --ks_;

    std::array<uint64_t, kContexts> symbol_bits{};
    uint64_t saved = 0;
    for (unsigned c = 0; c < contexts_; ++c) {
        if (!candidate[c]) continue;
        const Plan& p = plan_[c];
        uint64_t bits = uint64_t(p.n) * (width - 8);
        for (uint32_t i = 0; i < p.n; ++i) bits += rice_bits(rank_of_symbol_[p.differing[i] >> (width - 8)], ks_);
        symbol_bits[c] = bits;
        if (bits < p.value_bits) saved += p.value_bits - bits;
        else candidate[c] = false;
    }
    const uint64_t table_bits = 11 + 8 * table_.size();
    if (saved <= table_bits) {
        table_.clear();
        return 0;
    }
    for (unsigned c = 0; c < contexts_; ++c)
        if (candidate[c]) {
            plan_[c].mode = ValueMode::symbols;
            plan_[c].value_bits = symbol_bits[c];
        }
    return table_bits;
}

template <class E>
size_t ChunkEncoder<E>::plan(uint32_t top) {
    top_ = top;
    size_t at = 0;
    for (unsigned c = 0; c < contexts_; ++c) {
        const auto& context = collected_.contexts[c];
        Plan& p = plan_[c] = Plan{};
        p.n = uint32_t(context.end - context.begin);
        if (!p.n) continue;
        uint32_t* const gaps = gaps_.get() + at;
        T *const steps = steps_.get() + at, *const differing = differing_.get() + at;
        const Change<T>* const changes = context.begin;
        for (uint32_t i = 0, n = p.n; i < n; ++i) {
            gaps[i] = changes[i].gap;
            steps[i] = changes[i].step;
            differing[i] = changes[i].differing;
        }
        p.gaps = gaps;
        p.steps = steps;
        p.differing = differing;
        at += p.n;
        plan_positions(c, context.seen);
        plan_values(c);
    }
    uint64_t bits = kTopBits + 1 + plan_symbols();
    for (unsigned c = 0; c < contexts_; ++c) {
        const Plan& p = plan_[c];
        bits += count_bits(p.n);
        if (p.n) bits += 1 + kPositionKBits + kValueModeBits + p.position_bits + p.value_bits;
    }
    return size_t((bits + 7) / 8);
}

template <class E>
void ChunkEncoder<E>::write(uint8_t* to) {
    constexpr unsigned width = sizeof(T) * 8;
    BitWriter out(to);
    out.put(top_, kTopBits);
    out.put(!table_.empty(), 1);
    if (!table_.empty()) {
        out.put(table_.size() - 1, 8);
        out.put(ks_, 3);
        for (const uint8_t symbol : table_) out.put(symbol, 8);
    }
    for (unsigned c = 0; c < contexts_; ++c) {
        const Plan& p = plan_[c];
        put_count(out, p.n);
        if (!p.n) continue;
        out.put(p.inverted, 1);
        if (p.inverted) put_count(out, p.unchanged);
        out.put(p.k, kPositionKBits);
        out.put(unsigned(p.mode), kValueModeBits);
        if (p.mode == ValueMode::runs) {
            put_count(out, p.larger);
            out.put(p.kr, kRunKBits);
        }
        if (p.mode == ValueMode::runs || p.mode == ValueMode::direct) out.put(p.kv, kValueKBits);
    }
    for (unsigned c = 0; c < contexts_; ++c) {
        const Plan& p = plan_[c];
        if (!p.n) continue;
        if (p.inverted) {
            const uint32_t* runs = fill_runs(c);
            put_rices(out, p.k, runs, p.unchanged);
        } else {
            put_rices(out, p.k, p.gaps, p.n);
        }
        if (p.mode == ValueMode::symbols) {
            for (uint32_t i = 0; i < p.n; ++i) {
                const T y = p.differing[i];
                put_rice(out, ks_, rank_of_symbol_[y >> (width - 8)]);
                out.put_long(low_bits(y, width - 8), width - 8);
            }
            continue;
        }
        const T* steps = plan_[c].steps;
        for (uint32_t i = 0; i < p.n;) {
            const uint32_t end = std::min(i + 56, p.n), start = i;
            uint64_t signs = 0;
            for (; i < end; ++i) signs |= uint64_t(steps[i] >> (width - 1)) << (i - start);
            out.put(signs, end - start);
        }
        if (p.mode == ValueMode::direct) {
            for (uint32_t i = 0; i < p.n; ++i) put_rice(out, p.kv, magnitude(steps[i]) - 1);
        } else if (p.mode == ValueMode::runs) {
            fill_larger(c, runs_.get(), values_.get());
            put_rices(out, p.kr, runs_.get(), p.larger);
            put_rices(out, p.kv, values_.get(), p.larger);
        }
    }
    out.finish();
}

template class ChunkEncoder<Nibble>;
template class ChunkEncoder<uint8_t>;
template class ChunkEncoder<uint16_t>;
template class ChunkEncoder<uint32_t>;
template class ChunkEncoder<uint64_t>;

}  // namespace deltawire
