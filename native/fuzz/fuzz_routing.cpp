// Runs the native decoder of routed experts on hostile bytes, and makes round trips through the encoder. docs/fuzzing.md lists the checks.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "../digest.hpp"
#include "../kernels.hpp"
#include "../routing.hpp"
#include "fuzz_input.hpp"

// The file of cases that tests compare with the reference codec. Only driver.cpp sets it.
std::FILE* fuzz_cases = nullptr;
bool fuzz_counts = true;

extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() { return "quarantine_size_mb=16:malloc_context_size=2"; }

namespace deltawire {
namespace {

constexpr size_t kMostCaseIds = 600;  // larger cases would take the reference codec too long

// The facts about the rows of a file, as a reader has checked them.
struct Facts {
    unsigned layers, top_k, experts;
    std::vector<int64_t> copied, reference;
    std::vector<uint8_t> recorded;
    std::vector<uint16_t> order;

    RoutingRows rows() const { return {layers, top_k, experts, copied, reference, recorded, order}; }
    size_t ids() const { return recorded.size() * top_k; }
};

struct Coded {
    std::vector<uint8_t> lengths;
    std::vector<uint64_t> ends;
    std::vector<uint8_t> data;
};

Facts make_facts(Input& in, Random& random) {
    static constexpr struct { unsigned experts, top_k; } shapes[] = {{128, 8}, {256, 8}, {8, 8}, {64, 8}, {1, 1}, {8, 2}, {32, 4}, {384, 8}, {512, 10}, {40, 17}, {1024, 32}, {60, 6}};
    static constexpr unsigned layer_counts[] = {1, 2, 3, 7, 32, 33, 40, 65};
    const uint8_t shape = in.byte(), size = in.byte(), pattern = in.byte();
    Facts f{layer_counts[size & 7], shapes[shape % 12].top_k, shapes[shape % 12].experts, {}, {}, {}, {}};
    const size_t tokens = std::min<size_t>(size >> 3, 4096 / (f.layers * f.top_k) + 1);
    const unsigned missing = pattern & 3, copies = pattern >> 2 & 3, names = 1 + (pattern >> 4 & 7);
    f.recorded.resize(tokens * f.layers);
    std::vector<int64_t> last(names, -1);
    for (size_t t = 0; t < tokens; ++t) {
        f.copied.push_back(t && copies && random.below(4) < copies ? int64_t(random.below(t)) : -1);
        const size_t name = random.below(names);
        f.reference.push_back(last[name]);
        last[name] = int64_t(t);
        const bool absent = missing == 1 && random.below(4) == 0;
        for (unsigned l = 0; l < f.layers; ++l)
            f.recorded[t * f.layers + l] = f.copied[t] >= 0 ? f.recorded[size_t(f.copied[t]) * f.layers + l] : !(absent || (missing > 1 && random.below(missing == 2 ? 8 : 2) == 0));
    }
    for (unsigned l = 0; l < f.layers; ++l) {
        f.order.resize(f.order.size() + f.experts);
        uint16_t* const own = &f.order[size_t(l) * f.experts];
        std::iota(own, own + f.experts, uint16_t(0));
        for (unsigned e = f.experts; (pattern & 128) && e > 1; --e) std::swap(own[e - 1], own[random.below(e)]);
    }
    return f;
}

// Returns the lengths of complete codes of `symbols` symbols: some leaf of a tree is split until there are enough.
std::vector<uint8_t> complete_lengths(unsigned symbols, Random& random) {
    const unsigned used = unsigned(random.below(4) ? 1 + random.below(symbols) : random.below(3));
    std::vector<uint8_t> leaves;
    if (used == 1) leaves = {1};
    if (used > 1) {
        leaves = {0};
        while (leaves.size() < std::min(used, symbols)) {
            const size_t at = random.below(2) ? leaves.size() - 1 : random.below(leaves.size());
            const auto it = leaves[at] < kRoutingCodeBits ? leaves.begin() + ptrdiff_t(at) : std::min_element(leaves.begin(), leaves.end());
            ++*it;
            leaves.push_back(*it);
        }
    }
    leaves.resize(symbols);
    for (size_t i = leaves.size(); i > 1; --i) std::swap(leaves[i - 1], leaves[random.below(i)]);
    return leaves;
}

// Codes that are mostly complete, and streams of any bytes.
Coded made_up(const RoutingRows& rows, Input& in, Random& random, bool complete) {
    Coded c;
    for (unsigned t = 0; t < rows.tables(); ++t) {
        const auto own = complete_lengths(rows.symbols(t), random);
        c.lengths.insert(c.lengths.end(), own.begin(), own.end());
    }
    if (!complete)
        for (auto& length : c.lengths)
            if (random.below(64) == 0) length = uint8_t(random.below(16));
    const auto rest = in.rest();
    c.data.assign(rest.begin(), rest.end());
    for (unsigned s = rows.groups() * rows.streams(); s; --s) c.ends.push_back(random.below(c.data.size() + 1));
    std::sort(c.ends.begin(), c.ends.end());
    if (random.below(16)) c.ends.back() = c.data.size();
    return c;
}

std::vector<int16_t> make_experts(const Facts& f, Random& random, unsigned skew) {
    std::vector<int16_t> ids(f.ids(), -1), all(f.experts);
    for (size_t row = 0; row < f.recorded.size(); ++row) {
        const size_t t = row / f.layers, l = row % f.layers;
        int16_t* const own = ids.data() + row * f.top_k;
        if (f.copied[t] >= 0) {
            std::copy_n(&ids[(size_t(f.copied[t]) * f.layers + l) * f.top_k], f.top_k, own);
            continue;
        }
        if (!f.recorded[row]) continue;
        std::iota(all.begin(), all.end(), int16_t(0));
        for (unsigned j = 0; j < f.top_k; ++j) {
            std::swap(all[j], all[j + random.below(skew ? std::min(f.experts - j, 1 + skew) : f.experts - j)]);
            own[j] = all[j];
        }
    }
    return ids;
}

// Huffman's lengths do not matter here: a used symbol gets a length such that all codes are complete.
std::vector<uint8_t> plain_lengths(const RoutingRows& rows, const std::vector<uint64_t>& counts) {
    std::vector<uint8_t> lengths(counts.size());
    size_t at = 0;
    for (unsigned t = 0; t < rows.tables(); at += rows.symbols(t++)) {
        std::vector<size_t> used;
        for (size_t s = at; s < at + rows.symbols(t); ++s)
            if (counts[s]) used.push_back(s);
        unsigned bits = 1;
        while ((size_t(1) << bits) < used.size()) ++bits;
        const size_t shorter = used.size() < 2 ? 0 : (size_t(1) << bits) - used.size();
        for (size_t i = 0; i < used.size(); ++i) lengths[used[i]] = uint8_t(used.size() == 1 ? 1 : bits - (i < shorter));
    }
    return lengths;
}

Coded encoded(const RoutingRows& rows, const std::vector<int16_t>& ids) {
    const RoutingSymbols symbols = find_routing_symbols(rows, ids);
    Coded c;
    c.lengths = plain_lengths(rows, symbols.counts);
    for (const auto& stream : write_routing(rows, symbols, c.lengths)) {
        c.data.insert(c.data.end(), stream.begin(), stream.end());
        c.ends.push_back(c.data.size());
    }
    return c;
}

// Changes, removes or adds something.
void damage(Coded& c, Random& random) {
    switch (random.below(6)) {
        case 0: if (!c.lengths.empty()) c.lengths[random.below(c.lengths.size())] ^= uint8_t(1u << random.below(4)); break;
        case 1: if (!c.ends.empty()) c.ends[random.below(c.ends.size())] += random.below(2) ? 1 : ~uint64_t(0) >> random.below(2); break;
        case 2: if (!c.data.empty()) c.data.pop_back(), c.ends.back() -= random.below(8) ? 1 : 0; break;
        default: if (!c.data.empty()) c.data[random.below(c.data.size())] ^= uint8_t(1u << random.below(8)); break;
    }
}

struct Result {
    std::string error;  // empty if there is none
    std::vector<int16_t> ids;
    bool operator==(const Result&) const = default;
};

Result decode(const Facts& f, const Coded& c, unsigned threads, bool fast) {
    Result result;
    result.ids.assign(f.ids(), -77);
    try {
        decode_routing(f.rows(), c.lengths, c.ends, c.data, result.ids, threads, fast);
    } catch (const Corrupt& error) {
        result.error = error.what();
        REQUIRE(!result.error.empty());
        result.ids.clear();
    }
    return result;
}

template <class T>
void put(const std::vector<T>& values) {
    if (!values.empty()) std::fwrite(values.data(), sizeof(T), values.size(), fuzz_cases);
}

// Writes a case, little-endian: eight 64-bit integers (layers, experts per token, experts, tokens, lengths, streams, bytes of data, 1 if it is
// refused), then for each token its copy and its reference, the ends of the streams, the orders (16 bits), the ids if it is accepted (16 bits),
// and in bytes which rows are recorded, the lengths and the data.
void write_case(const Facts& f, const Coded& c, const Result& found) {
    if (!fuzz_cases || f.ids() > kMostCaseIds || c.data.size() > 4096) return;
    put(std::vector<uint64_t>{f.layers, f.top_k, f.experts, f.copied.size(), c.lengths.size(), c.ends.size(), c.data.size(), !found.error.empty()});
    put(f.copied), put(f.reference), put(c.ends), put(f.order), put(found.ids), put(f.recorded), put(c.lengths), put(c.data);
}

Result attack(const Facts& f, const Coded& c, uint64_t hash) {
    const Result found = decode(f, c, 1, false);
#if defined(DELTAWIRE_X86)
    static const bool has_fast = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
    if (has_fast) REQUIRE(decode(f, c, 1, true) == found);
#endif
    if (hash % 64 == 0) {
        fuzz_counts = false;
        const Result other = decode(f, c, 2, false);
        fuzz_counts = true;
        REQUIRE(other.error.empty() == found.error.empty() && other.ids == found.ids);
    }
    for (size_t row = 0; found.error.empty() && row < f.recorded.size(); ++row)
        for (unsigned j = 0; j < f.top_k; ++j) {
            const int id = found.ids[row * f.top_k + j], before = j ? found.ids[row * f.top_k + j - 1] : -1;
            if (f.recorded[row]) REQUIRE(id > before && id < int(f.experts));
            else REQUIRE(id == -1);
        }
    write_case(f, c, found);
    return found;
}

void execute(Input in, uint64_t hash) {
    const uint8_t what = in.byte();
    Random random(in.word());
    const Facts f = make_facts(in, random);
    const RoutingRows rows = f.rows();
    if ((what & 3) < 2) {
        attack(f, made_up(rows, in, random, what & 1), hash);
        return;
    }
    std::vector<int16_t> ids = make_experts(f, random, what >> 2 & 7);
    Coded c = encoded(rows, ids);
    const unsigned changes = what >> 5;
    for (unsigned i = 0; i < changes / 2; ++i) damage(c, random);
    const Result found = attack(f, c, hash);
    if (changes / 2) return;
    for (size_t row = 0; row < f.recorded.size(); ++row) std::sort(&ids[row * f.top_k], &ids[row * f.top_k] + f.top_k);
    REQUIRE(found.error.empty() && found.ids == ids);
}

}  // namespace
}  // namespace deltawire

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    deltawire::execute(deltawire::Input(data, size), deltawire::hash_of({data, size}));
    return 0;
}
