// The checks of a payload: everything that can be done with it, on several instruction sets.
#pragma once

#include "fuzz_tensors.hpp"

namespace deltawire {
namespace {

struct Result {
    int error = 0;
    std::string what;
    Resolution::Outcome outcome;
    std::vector<size_t> first;     // of each tensor, in the lists below
    std::vector<int64_t> indices;  // in the tensor
    std::vector<uint8_t> values;

    bool same_sums(const Resolution::Outcome& o) const {
        return outcome.changed == o.changed && outcome.before == o.before && outcome.after == o.after;
    }
    bool operator==(const Result& o) const {
        return error == o.error && what == o.what && same_sums(o.outcome) && first == o.first && indices == o.indices && values == o.values;
    }
};

template <class Use>
void guarded(Result& out, Use use) {
    try {
        use();
    } catch (const Corrupt& e) {
        out.error = 1, out.what = e.what();
    } catch (const WrongType& e) {
        out.error = 2, out.what = e.what();
    } catch (const WrongCount& e) {
        out.error = 3, out.what = e.what();
    }
}

// Resolves without writing: add, extract, and extract_dense if there is no base.
Result read_out(Isa& isa, const Case& c, std::span<const uint8_t> payload, size_t budget) {
    Result out;
    Resolution& resolution = isa.fresh(budget);
    guarded(out, [&] { out.outcome = std::move(resolution.add({c.group(payload, std::vector<uint8_t>(c.bases.size()))})[0]); });
    if (!out.error) {
        const uint8_t width = c.type.bytes;
        const size_t tensors = c.bases.size();
        std::vector<std::vector<int64_t>> indices(tensors);
        std::vector<std::vector<uint8_t>> values(tensors), dense(tensors);
        std::vector<Resolution::Extraction> wanted;
        std::vector<Resolution::DenseExtraction> wanted_dense;
        for (size_t t = 0; t < tensors; ++t) {
            const View& base = c.bases[t].view;
            const auto changed = uint64_t(out.outcome.changed[t]);
            REQUIRE(changed <= c.type.coded(base.count));
            indices[t].assign(changed, -1);
            values[t].resize(changed * width);
            wanted.push_back({t, indices[t].data(), values[t].data()});
            if (base.data || !base.count) continue;
            dense[t].resize(base.count * width);
            wanted_dense.push_back({t, dense[t].data()});
        }
        resolution.extract(wanted);
        resolution.extract_dense(wanted_dense);
        for (size_t t = 0; t < tensors; ++t) {
            const View& base = c.bases[t].view;
            const auto changed = uint64_t(out.outcome.changed[t]), n = wanted[t].count;
            REQUIRE(c.type.width == 4 ? n <= changed && n * c.type.bytes * 2 >= changed : n == changed);
            out.first.push_back(out.indices.size());
            size_t zeros_from = 0;
            const auto all_zero = [&](size_t from, size_t to) {
                for (size_t i = from * width; i < to * width; ++i) REQUIRE(dense[t][i] == 0);
            };
            for (size_t i = 0; i < n; ++i) {
                const int64_t at = indices[t][i];
                REQUIRE(at >= 0 && uint64_t(at) < base.count);
                REQUIRE(!i || at > indices[t][i - 1]);
                const uint8_t* const now = values[t].data() + i * width;
                if (base.data) {
                    REQUIRE(std::memcmp(base.at(uint64_t(at)), now, width) != 0);
                } else {
                    REQUIRE(std::memcmp(dense[t].data() + size_t(at) * width, now, width) == 0);
                    all_zero(zeros_from, size_t(at));
                    zeros_from = size_t(at) + 1;
                }
                out.indices.push_back(at);
                out.values.insert(out.values.end(), now, now + width);
            }
            if (!base.data) all_zero(zeros_from, base.count);
        }
        out.first.push_back(out.indices.size());
    }
    REQUIRE(c.untouched());
    return out;
}

// Resolves with writing: add, then settle, revert or exchange. `expected` is the memory of each tensor after the changes.
void write_in(Isa& isa, const Case& c, std::span<const uint8_t> payload, size_t budget, const Result& reference,
              const std::vector<std::vector<uint8_t>>& expected, unsigned how) {
    static Companion companion;
    const bool along = c.options & 4, before = c.options & 8, settle = how & 1, defer = (how & 6) == 0;
    const std::vector<uint8_t> writes = c.writes(how & 8);
    Result out;
    Resolution& resolution = isa.fresh(budget, defer);
    guarded(out, [&] {
        if (along && before) resolution.add({companion.group()});
        if (along && !before) out.outcome = std::move(resolution.add({companion.group(), c.group(payload, writes)})[1]);
        else out.outcome = std::move(resolution.add({c.group(payload, writes)})[0]);
    });
    REQUIRE(out.error == reference.error && out.what == reference.what);
    const auto written = [&] {
        for (size_t t = 0; t < c.bases.size(); ++t) REQUIRE(writes[t] ? c.bases[t].holds(expected[t]) : c.bases[t].untouched());
        if (along) REQUIRE(companion.tensor.holds(companion.next_bytes));
    };
    const auto untouched = [&] {
        REQUIRE(c.untouched());
        REQUIRE(companion.tensor.untouched());
    };
    if (out.error || (!settle && !defer)) {
        resolution.revert();
        return untouched();
    }
    REQUIRE(reference.same_sums(out.outcome));
    if (defer) {
        untouched();
        resolution.exchange();
        written();
        resolution.exchange();
        return untouched();
    }
    resolution.settle();
    written();
    // The digest that `add` returned is the digest of the memory as it is now.
    if (std::count(writes.begin(), writes.end(), 1) == ptrdiff_t(writes.size())) {
        ResolveGroup now = c.group({}, writes);
        now.changes = false;
        const auto digests = isa.fresh(0).add({std::move(now)});
        REQUIRE(digests[0].before == reference.outcome.after && digests[0].after == reference.outcome.after);
    }
    companion.tensor.restore();
    c.restore();
}

void check_inspect(const Case& c, std::span<const uint8_t> payload, const Result& reference) {
    PayloadFacts facts;
    Result out;
    guarded(out, [&] { facts = inspect(payload, c.type, c.old); });
    if (out.error) {
        REQUIRE(reference.error);
        return;
    }
    if (reference.error) return;
    uint64_t size = 0, changed = 0;
    int64_t found = 0;
    bool raw = false;
    for (const ChunkFacts& chunk : facts.chunks) size += chunk.elements, changed += chunk.changed, raw |= chunk.mode == ChunkMode::raw;
    for (const int64_t n : reference.outcome.changed) found += n;
    if (c.old) REQUIRE(size == c.count());
    REQUIRE(raw ? changed >= uint64_t(found) : changed == uint64_t(found));
}

// Writes one case as driver.cpp documents it. Large cases are left out, because the reference decodes one code at a time.
void write_case(const Case& c, std::span<const uint8_t> payload, const Result& out) {
    if (c.type.coded(c.count()) > 400 || payload.size() > 4096) return;
    const auto put = [](const void* data, size_t size) { REQUIRE(!size || std::fwrite(data, 1, size, fuzz_cases) == size); };
    const auto number = [&](uint64_t x) { put(&x, 8); };
    number(c.type.code), number(c.old), number(c.bases.size()), number(payload.size()), number(uint64_t(out.error)), number(out.indices.size());
    put(out.outcome.before.data(), 16), put(out.outcome.after.data(), 16);
    put(payload.data(), payload.size());
    for (size_t t = 0; t < c.bases.size(); ++t) {
        const View& base = c.bases[t].view;
        std::vector<uint8_t> elements(base.data ? base.count * c.type.bytes : 0);
        if (!elements.empty()) base.gather(0, base.count, elements.data());
        number(base.count), number(base.data != nullptr), number(c.seeds[t]);
        number(out.error ? 0 : uint64_t(out.outcome.changed[t])), number(out.error ? 0 : out.first[t + 1] - out.first[t]);
        put(elements.data(), elements.size());
    }
    put(out.indices.data(), out.indices.size() * 8), put(out.values.data(), out.values.size());
}

// Does everything that can be done with a payload, on several instruction sets.
Result attack(const Case& c, std::span<const uint8_t> bytes) {
    const std::unique_ptr<uint8_t[]> exact(new uint8_t[bytes.size()]);
    if (!bytes.empty()) std::memcpy(exact.get(), bytes.data(), bytes.size());
    const std::span<const uint8_t> payload(exact.get(), bytes.size());
    auto& all = isas();
    const size_t lead = c.hash % all.size();
    const Result reference = read_out(*all[lead], c, payload, c.budget(0));
    if (fuzz_cases) write_case(c, payload, reference);
    // All instruction sets share the code that refuses a payload before a kernel runs, so usually one of them is enough for such payloads.
    static const std::string walked[] = {"a position falls outside its chunk.", "an inverted context has another number of elements than the base."};
    const bool early = reference.error && reference.what != walked[0] && reference.what != walked[1];
    // Most other payloads are tried on two instruction sets, which differ each time.
    const size_t tried = (c.hash >> 8 & 7) ? std::min<size_t>(early ? 1 : 2, all.size()) : all.size();
    std::vector<std::vector<uint8_t>> expected(c.bases.size());
    for (size_t t = 0; t < c.bases.size() && !reference.error; ++t) {
        const Tensor& base = c.bases[t];
        const size_t first = reference.first[t], n = reference.first[t + 1] - first;
        if (!base.view.data) continue;
        write_elements(base.view, reference.indices.data() + first, reference.values.data() + first * c.type.bytes, n);
        expected[t].assign(base.memory.get(), base.memory.get() + base.size);
    }
    c.restore();
    for (size_t i = 0; i < tried; ++i) {
        Isa& isa = *all[(lead + i) % all.size()];
        if (i) REQUIRE(read_out(isa, c, payload, c.budget(i)) == reference);
        write_in(isa, c, payload, c.budget(i + (c.hash >> 12 & 3)), reference, expected, unsigned(c.hash >> (16 + 4 * i)));
    }
    if ((c.hash >> 20 & 63) == 0) check_inspect(c, payload, reference);
    for (auto& isa : all) isa->fresh(0);  // otherwise libFuzzer searches for leaks
    return reference;
}

}  // namespace
}  // namespace deltawire
