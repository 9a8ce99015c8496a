// Runs the native decoder on hostile payloads, and makes round trips through the encoder. docs/fuzzing.md lists the checks.
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>

// Replaces the arena. Every array is a separate allocation, so that the sanitizer knows its bounds. Each counts with its own size, so that
// a budget can run out between two chunks of a small tensor.
#define Arena PlainArena
#include "../arena.hpp"
#undef Arena
namespace deltawire {
class Arena {
public:
    template <class Reserve>
    uint8_t* take(size_t bytes, Reserve reserve) {
        if (!reserve(bytes)) return nullptr;
        pieces_.emplace_back(new (std::align_val_t(64)) uint8_t[bytes]);
        return pieces_.back().get();
    }
    void clear() { pieces_.clear(); }

private:
    struct Free {
        void operator()(uint8_t* p) const { ::operator delete[](p, std::align_val_t(64)); }
    };
    std::vector<std::unique_ptr<uint8_t[], Free>> pieces_;
};
}  // namespace deltawire

#include "../bits.hpp"
#include "../payload.hpp"
#include "../encode.cpp"
#include "../resolve.cpp"

// The file of cases that tests compare with the reference codec. Only driver.cpp sets it.
std::FILE* fuzz_cases = nullptr;
bool fuzz_counts = true;

extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() { return "quarantine_size_mb=16:malloc_context_size=2"; }

#include "fuzz_checks.hpp"
#include "fuzz_payloads.hpp"

namespace deltawire {
namespace {

// Encodes what the input describes. For a check, it uses several instruction sets and resolves the result again.
std::vector<uint8_t> round_trip(const Case& c, const std::vector<Tensor>& nexts, const std::vector<uint8_t>& elements, bool check) {
    EncodeGroup group{c.type, c.views(), {}, c.seeds};
    for (const Tensor& next : nexts) group.nexts.push_back(next.view);
    auto& all = isas();
    const size_t lead = c.hash % all.size(), tried = (c.hash >> 8 & 7) ? std::min<size_t>(2, all.size()) : all.size();
    const Encoding first = encode_with(*all[lead], group, c.old, (c.hash >> 24 & 255) == 0);
    if (!check) return first.payload;
    for (size_t i = 1; i < tried; ++i) REQUIRE(encode_with(*all[(lead + i) % all.size()], group, c.old, false) == first);
    const Result found = attack(c, first.payload);
    REQUIRE(!found.error);
    REQUIRE(found.outcome.changed == first.changed && found.outcome.before == first.before && found.outcome.after == first.after);
    std::vector<uint8_t> result(elements.size());
    uint8_t* to = result.data();
    for (size_t t = 0; t < c.bases.size(); ++t) {
        const View& base = c.bases[t].view;
        if (base.count) base.gather(0, base.count, to);
        for (size_t i = found.first[t]; i < found.first[t + 1]; ++i)
            std::memcpy(to + size_t(found.indices[i]) * c.type.bytes, found.values.data() + i * c.type.bytes, c.type.bytes);
        to += base.count * c.type.bytes;
    }
    REQUIRE(result == elements);
    return first.payload;
}

void execute(Input in, uint64_t hash) {
    const uint8_t what = in.byte(), kinds = in.byte(), options = in.byte(), count_kind = in.byte();
    uint64_t count = element_count(count_kind, in.word(), hash >> 40);
    const uint8_t layouts = in.byte(), changes = in.byte();
    Random random(in.word());
    const bool old = (kinds & 3) == 0;
    const ElementType& type = kTypes[(kinds >> 2) % (old ? 16 : 18)];
    count /= type.coded(1);
    const uint64_t columns = 1 + (layouts & 31);
    std::vector<uint64_t> rows{count / columns};
    if (!old)  // cut into tensors, some of them empty
        for (unsigned cuts = unsigned(random.below(6)); cuts; --cuts) {
            const uint64_t from = rows.back(), first = random.below(4) ? random.below(from + 1) : from;
            rows.back() = first;
            rows.push_back(from - first);
        }
    count = 0;
    std::vector<uint64_t> seeds;
    std::vector<Tensor::Kind> kinds_of_base, kinds_of_next;
    for (const uint64_t r : rows) {
        count += r * columns;
        seeds.push_back(random());
        const unsigned kind = unsigned(random.below(8));
        kinds_of_base.push_back(Tensor::Kind(kind < 5 ? kind : 0));
        kinds_of_next.push_back(Tensor::Kind(kind < 4 ? (layouts >> 5) % 4 : 0));
    }
    const unsigned mode = what & 3, flips = what >> 2 & 7, base_kind = what >> 5 & 3;
    auto elements = make_elements(type, count, base_kind, in.rest(), random);
    for (size_t t = 0, at = 0; t < rows.size(); ++t) {
        const size_t size = rows[t] * columns * type.bytes;
        if (kinds_of_base[t] == Tensor::absent && size) std::memset(elements.data() + at, 0, size);
        at += size;
    }
    auto bases = tensors_of(type, rows, columns, kinds_of_base, elements);
    const Case c{type, bases, seeds, old, options, hash};
    std::vector<uint8_t> payload;
    if (mode == 0) {
        attack(c, fuzzed_payload(c, in.rest(), flips));
    } else if (mode == 1) {
        payload = grow(c, elements, in, random);
        flip(payload, flips & 3, in);
        attack(c, payload);
    } else {
        with_element(type, [&](auto element) { change_as<decltype(element)>(elements, type, changes & 7, (changes >> 3 & 7) % 5, random); });
        if (mode == 3) {  // the new elements are fuzzed bytes
            const auto rest = in.rest();
            const size_t skip = std::min<size_t>(rest.size(), flips < 4 ? 0 : size_t(flips - 3) * 3), n = std::min(rest.size() - skip, elements.size());
            if (n) std::memcpy(elements.data(), rest.data() + skip, n);
        }
        payload = round_trip(c, tensors_of(type, rows, columns, kinds_of_next, elements), elements, flips < 4);
        if (flips < 4) return;
        flip(payload, flips - 3, in);
        attack(c, payload);
    }
}

}  // namespace
}  // namespace deltawire

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    deltawire::execute(deltawire::Input(data, size), deltawire::hash_of({data, size}));
    return 0;
}
