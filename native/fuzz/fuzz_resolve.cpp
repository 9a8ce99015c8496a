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
#include "../encode.cpp"
#include "../resolve.cpp"

// The file of cases that tests compare with the reference codec. Only driver.cpp sets it.
std::FILE* fuzz_cases = nullptr;

extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() { return "quarantine_size_mb=16:malloc_context_size=2"; }

namespace deltawire {
namespace {

#define REQUIRE(holds)                                                                     \
    do {                                                                                   \
        if (!(holds)) {                                                                    \
            std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #holds); \
            std::abort();                                                                  \
        }                                                                                  \
    } while (false)

constexpr ElementType kTypes[16] = {{0, 1, 0, 0},  {1, 1, 0, 0},  {2, 1, 0, 0},   {3, 1, 2, 5},  {4, 1, 3, 4},  {5, 1, 0, 0},
                                    {6, 2, 0, 0},  {7, 2, 0, 0},  {8, 2, 10, 5},  {9, 2, 7, 8},  {10, 4, 0, 0}, {11, 4, 0, 0},
                                    {12, 4, 23, 8}, {13, 8, 0, 0}, {14, 8, 0, 0}, {15, 8, 52, 11}};
constexpr size_t kMaxElements = 40960;
constexpr size_t kUnlimited = ~size_t(0) / 2;

// The bytes of one execution. After their end there are zeros.
class Input {
public:
    Input(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
    uint8_t byte() { return at_ < end_ ? *at_++ : 0; }
    uint32_t word() {
        const uint32_t low = byte();
        return low | uint32_t(byte()) << 8;
    }
    std::span<const uint8_t> rest() const { return {at_, end_}; }

private:
    const uint8_t *at_, *end_;
};

class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t operator()() { return mix(state_ += kGolden); }
    uint64_t below(uint64_t n) { return n ? (*this)() % n : 0; }

private:
    uint64_t state_;
};

// A tensor in memory that is exactly as large as its layout needs.
struct Tensor {
    std::unique_ptr<uint8_t[]> memory;
    size_t size = 0;
    View view;
    std::vector<uint8_t> original;  // a copy of the memory, including gaps between elements

    enum Layout : unsigned { contiguous, unaligned, transposed, reversed, absent };

    Tensor(Layout layout, uint64_t rows, uint64_t columns, uint8_t bytes, const uint8_t* elements) {
        const uint64_t count = rows * columns;
        const int64_t b = bytes;
        view.count = count;
        view.bytes = bytes;
        if (layout == absent) return;
        size = count * bytes;
        size_t start = 0;
        view.contiguous = layout == contiguous;
        view.shape = {rows, columns};
        view.strides = {int64_t(columns) * b, b};
        if (layout == unaligned) {
            ++size;
            start = 1;
        } else if (layout == transposed) {
            view.strides = {b, int64_t(rows) * b};
        } else if (layout == reversed) {  // every second element, from the end
            if (count) start = (count - 1) * 2 * bytes, size = start + bytes;
            view.strides = {-2 * b * int64_t(columns), -2 * b};
        }
        memory.reset(new uint8_t[size]);
        std::memset(memory.get(), 0x5a, size);
        view.data = memory.get() + start;
        for (uint64_t i = 0; i < count; ++i) std::memcpy(view.at(i), elements + i * bytes, bytes);
        original.assign(memory.get(), memory.get() + size);
    }
    bool holds(const std::vector<uint8_t>& bytes) const { return !size || std::memcmp(memory.get(), bytes.data(), size) == 0; }
    bool untouched() const { return holds(original); }
    void restore() {
        if (size) std::memcpy(memory.get(), original.data(), size);
    }
};

// The working memory of one instruction set, which is reused in all executions.
struct Isa {
    explicit Isa(const Kernels& k) : kernels(k), resolution(1, 0, false, k) {}

    Resolution& fresh(size_t budget) {
        resolution.jobs_.clear();
        resolution.units_.clear();
        resolution.first_unit_.assign(1, 0);
        resolution.kept_ = 0;
        Resolution::Worker& worker = *resolution.workers_[0];
        worker.arena_.clear();
        worker.budget_ = budget;
        if (worker.positions_.size() > kMaxChanges) {  // it has grown for a raw chunk
            worker.positions_ = std::vector<uint32_t>(kMaxChanges);
            worker.values_ = std::vector<uint8_t>(size_t(kMaxChanges) * 8);
        }
        return resolution;
    }

    const Kernels& kernels;
    Resolution resolution;
    PerWidth<BlockEncoder> encoders;
};

std::vector<std::unique_ptr<Isa>>& isas() {
    static auto* const all = [] {
        auto* list = new std::vector<std::unique_ptr<Isa>>;
        for (const Kernels* k : available_kernels()) list->push_back(std::make_unique<Isa>(*k));
        return list;
    }();
    return *all;
}

struct Encoding {
    std::vector<uint8_t> payload;
    uint64_t changed = 0;
    Lanes before{}, after{};
    bool operator==(const Encoding&) const = default;
};

Encoding encode_with(Isa& isa, const EncodeJob& job, bool whole_api) {
    Encoding out;
    out.payload.push_back(job.type.code);
    if (whole_api) {
        const auto encoded = encode(std::span(&job, 1), 1, isa.kernels);
        for (const auto& block : encoded[0].blocks) out.payload.insert(out.payload.end(), block.begin(), block.end());
        out.changed = encoded[0].changed, out.before = encoded[0].before, out.after = encoded[0].after;
    } else if (job.next.count) {
        with_element(job.type.bytes, [&](auto element) {
            const auto block = isa.encoders.get<decltype(element)>(isa.kernels).encode(job, 0, uint32_t(job.next.count));
            out.payload.insert(out.payload.end(), block.bytes.begin(), block.bytes.end());
            out.changed = block.changed, out.before = block.before, out.after = block.after;
        });
    }
    out.payload.shrink_to_fit();
    return out;
}

// A small tensor with a valid payload, which is resolved together with the hostile one.
struct Companion {
    Companion() : bytes(make()), tensor(Tensor::contiguous, 10, 10, 2, bytes.data()) {
        std::vector<uint8_t> next = bytes;
        for (size_t i = 0; i < next.size(); i += 6) next[i] ^= 1;
        next_bytes = next;
        const Tensor to(Tensor::contiguous, 10, 10, 2, next.data());
        encoding = encode_with(*isas().back(), {tensor.view, to.view, kTypes[9], 7}, false);
    }
    static std::vector<uint8_t> make() {
        std::vector<uint8_t> out(200);
        Random random(1);
        for (auto& b : out) b = uint8_t(random());
        return out;
    }
    ResolveJob job() const { return {tensor.view, encoding.payload, true, kTypes[9], 7, true}; }

    std::vector<uint8_t> bytes, next_bytes;
    Tensor tensor;
    Encoding encoding;
};

struct Case {
    ElementType type;
    Tensor& base;
    uint64_t seed;
    uint8_t options;
    uint64_t hash;

    // Instruction sets get different budgets, because decoding again must not change the result.
    size_t budget(size_t i) const {
        const size_t budgets[4] = {0, kUnlimited, size_t(64) + (options & 0xf0) * 16, size_t(16384) * 4 + 4096};
        return budgets[((options & 3) + i) % 4];
    }
};

struct Outcome {
    int error = 0;
    std::string what;
    Resolution::Tensor tensor;
    std::vector<int64_t> indices;
    std::vector<uint8_t> values;

    bool operator==(const Outcome& o) const {
        return error == o.error && what == o.what && tensor.changed == o.tensor.changed && tensor.before == o.tensor.before &&
               tensor.after == o.tensor.after && indices == o.indices && values == o.values;
    }
};

template <class Use>
void guarded(Outcome& out, Use use) {
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
Outcome read_out(Isa& isa, const Case& c, std::span<const uint8_t> payload, size_t budget) {
    Outcome out;
    const View& base = c.base.view;
    Resolution& resolution = isa.fresh(budget);
    guarded(out, [&] { out.tensor = resolution.add({{base, payload, true, c.type, c.seed, false}})[0]; });
    if (!out.error) {
        const uint8_t width = c.type.bytes;
        REQUIRE(out.tensor.changed <= base.count);
        out.indices = std::vector<int64_t>(out.tensor.changed, -1);
        out.values = std::vector<uint8_t>(out.tensor.changed * width);
        resolution.extract(0, out.indices.data(), out.values.data());
        std::vector<uint8_t> dense;
        if (!base.data) {
            dense = std::vector<uint8_t>(base.count * width, 0xee);
            if (base.count) resolution.extract_dense(0, dense.data());
        }
        size_t zeros_from = 0;
        const auto all_zero = [&](size_t from, size_t to) {
            for (size_t i = from * width; i < to * width; ++i) REQUIRE(dense[i] == 0);
        };
        for (size_t i = 0; i < out.indices.size(); ++i) {
            const int64_t at = out.indices[i];
            REQUIRE(at >= 0 && uint64_t(at) < base.count);
            REQUIRE(!i || at > out.indices[i - 1]);
            const uint8_t* const now = out.values.data() + i * width;
            if (base.data) {
                REQUIRE(std::memcmp(base.at(uint64_t(at)), now, width) != 0);
            } else {
                REQUIRE(std::memcmp(dense.data() + size_t(at) * width, now, width) == 0);
                all_zero(zeros_from, size_t(at));
                zeros_from = size_t(at) + 1;
            }
        }
        if (!base.data) all_zero(zeros_from, base.count);
    }
    REQUIRE(c.base.untouched());
    return out;
}

// Resolves with writing: add, then settle or revert. `expected` is the memory after the changes.
void write_in(Isa& isa, const Case& c, std::span<const uint8_t> payload, size_t budget, const Outcome& reference, const std::vector<uint8_t>& expected,
              bool settle) {
    static Companion companion;
    const bool along = c.options & 4, before = c.options & 8;
    Outcome out;
    Resolution& resolution = isa.fresh(budget);
    guarded(out, [&] {
        const ResolveJob job{c.base.view, payload, true, c.type, c.seed, true};
        if (along && before) resolution.add({companion.job()});
        if (along && !before) out.tensor = resolution.add({companion.job(), job})[1];
        else out.tensor = resolution.add({job})[0];
    });
    REQUIRE(out.error == reference.error && out.what == reference.what);
    if (out.error || !settle) {
        resolution.revert();
        REQUIRE(c.base.untouched());
        REQUIRE(companion.tensor.untouched());
        return;
    }
    REQUIRE(out.tensor.changed == reference.tensor.changed && out.tensor.before == reference.tensor.before && out.tensor.after == reference.tensor.after);
    resolution.settle();
    REQUIRE(c.base.holds(expected));
    if (along) REQUIRE(companion.tensor.holds(companion.next_bytes));
    // The digest that `add` returned is the digest of the memory as it is now.
    const auto digests = isa.fresh(0).add({{c.base.view, {}, false, c.type, c.seed, false}});
    REQUIRE(digests[0].before == reference.tensor.after && digests[0].after == reference.tensor.after && !digests[0].changed);
    companion.tensor.restore();
    c.base.restore();
}

void check_inspect(const Case& c, std::span<const uint8_t> payload, const Outcome& reference) {
    PayloadFacts facts;
    Outcome out;
    guarded(out, [&] { facts = inspect(payload, c.type); });
    if (out.error) {
        REQUIRE(reference.error);
        return;
    }
    if (reference.error) return;
    uint64_t elements = 0, changed = 0;
    bool raw = false;
    for (const ChunkFacts& chunk : facts.chunks) elements += chunk.elements, changed += chunk.changed, raw |= chunk.mode == ChunkMode::raw;
    REQUIRE(elements == c.base.view.count);
    REQUIRE(raw ? changed >= reference.tensor.changed : changed == reference.tensor.changed);
}

// Writes one case as driver.cpp documents it. Large cases are left out, because the reference decodes one code at a time.
void write_case(const Case& c, std::span<const uint8_t> payload, const Outcome& out) {
    if (c.base.view.count > 400 || payload.size() > 4096) return;
    const auto put = [](const void* data, size_t size) { REQUIRE(!size || std::fwrite(data, 1, size, fuzz_cases) == size); };
    const auto number = [&](uint64_t x) { put(&x, 8); };
    std::vector<uint8_t> elements(c.base.view.data ? c.base.view.count * c.type.bytes : 0);
    if (!elements.empty()) c.base.view.gather(0, c.base.view.count, elements.data());
    number(c.type.code), number(c.base.view.count), number(c.base.view.data != nullptr), number(c.seed), number(payload.size());
    number(uint64_t(out.error)), number(out.tensor.changed);
    put(out.tensor.before.data(), 16), put(out.tensor.after.data(), 16);
    put(elements.data(), elements.size()), put(payload.data(), payload.size());
    put(out.indices.data(), out.indices.size() * 8), put(out.values.data(), out.values.size());
}

// Does everything that can be done with a payload, on several instruction sets.
Outcome attack(const Case& c, std::span<const uint8_t> bytes) {
    const std::unique_ptr<uint8_t[]> exact(new uint8_t[bytes.size()]);
    if (!bytes.empty()) std::memcpy(exact.get(), bytes.data(), bytes.size());
    const std::span<const uint8_t> payload(exact.get(), bytes.size());
    auto& all = isas();
    const size_t lead = c.hash % all.size();
    const Outcome reference = read_out(*all[lead], c, payload, c.budget(0));
    if (fuzz_cases) write_case(c, payload, reference);
    // All instruction sets share the code that refuses a payload before a kernel runs, so usually one of them is enough for such payloads.
    static const std::string walked[] = {"a position falls outside its chunk.", "an inverted context has another number of elements than the base."};
    const bool early = reference.error && reference.what != walked[0] && reference.what != walked[1];
    // Most other payloads are tried on two instruction sets, which differ each time.
    const size_t tried = (c.hash >> 8 & 7) ? std::min<size_t>(early ? 1 : 2, all.size()) : all.size();
    std::vector<uint8_t> expected;
    if (!reference.error && c.base.view.data) {
        write_elements(c.base.view, reference.indices.data(), reference.values.data(), reference.indices.size());
        expected.assign(c.base.memory.get(), c.base.memory.get() + c.base.size);
        c.base.restore();
    }
    for (size_t i = 0; i < tried; ++i) {
        Isa& isa = *all[(lead + i) % all.size()];
        if (i) REQUIRE(read_out(isa, c, payload, c.budget(i)) == reference);
        if (c.base.view.data) write_in(isa, c, payload, c.budget(i + (c.hash >> 12 & 3)), reference, expected, c.hash >> (16 + i) & 1);
        else isa.resolution.revert();  // does nothing, because nothing is written
    }
    if ((c.hash >> 20 & 63) == 0) check_inspect(c, payload, reference);
    for (auto& isa : all) isa->fresh(0);  // otherwise libFuzzer searches for leaks
    return reference;
}

// Makes elements that are like weights, small integers, fuzzed bytes or noise.
std::vector<uint8_t> make_elements(const ElementType& type, uint64_t count, unsigned kind, std::span<const uint8_t> pattern, Random& random) {
    std::vector<uint8_t> out(count * type.bytes);
    if (kind == 0) return out;
    if (kind == 1) {
        for (size_t i = 0; i < out.size() && !pattern.empty(); ++i) out[i] = pattern[i % pattern.size()];
        return out;
    }
    const uint64_t middle = type.exponent_mask() * 3 / 4;
    for (uint64_t i = 0; i < count; ++i) {
        uint64_t x = random();
        if (kind == 3) {
            const unsigned zeros = unsigned(std::countr_zero(x | uint64_t(1) << 40));
            if (type.exponent_bits) {
                const uint64_t sign = x >> 63, exponent = middle - std::min<uint64_t>(middle, zeros), low = low_bits(x >> 8, type.exponent_shift);
                x = sign << (type.width() - 1) | exponent << type.exponent_shift | low;
            } else {
                x = zeros;
            }
        }
        std::memcpy(out.data() + i * type.bytes, &x, type.bytes);
    }
    return out;
}

template <class T>
void change_as(std::vector<uint8_t>& elements, const ElementType& type, unsigned density, unsigned kind, Random& random) {
    static constexpr uint32_t per_65536[8] = {0, 64, 700, 6000, 20000, 40000, 60000, 65536};
    for (size_t i = 0; i < elements.size(); i += sizeof(T)) {
        const uint64_t r = random();
        if ((r & 0xffff) >= per_65536[density]) continue;
        T x;
        std::memcpy(&x, elements.data() + i, sizeof(T));
        const bool floating = type.exponent_bits;
        const T sign = T(r >> 16 & 1 ? T(1) : T(T(0) - T(1)));
        const uint64_t small = uint64_t(std::countr_zero(r >> 20 | uint64_t(1) << 30)) + 1;
        switch (kind == 4 ? unsigned(r >> 17 & 3) : kind) {
            case 0: x = unordered<T>(T(ordered<T>(x, floating) + sign), floating); break;
            case 1: x = unordered<T>(T(ordered<T>(x, floating) + T(uint64_t(sign) * small)), floating); break;
            case 2: x = T(x ^ T(T(0x80 >> (small & 7)) | T(1)) << (sizeof(T) * 8 - 8)); break;
            default: x = T(random()); break;
        }
        std::memcpy(elements.data() + i, &x, sizeof(T));
    }
}

// Encodes what the input describes. For a check, it uses several instruction sets and resolves the result again.
std::vector<uint8_t> round_trip(const Case& c, Tensor::Layout layout, uint64_t rows, uint64_t columns, const std::vector<uint8_t>& elements,
                                bool check) {
    const Tensor next(layout, rows, columns, c.type.bytes, elements.data());
    const EncodeJob job{c.base.view, next.view, c.type, c.seed};
    auto& all = isas();
    const size_t lead = c.hash % all.size(), tried = (c.hash >> 8 & 7) ? std::min<size_t>(2, all.size()) : all.size();
    const Encoding first = encode_with(*all[lead], job, (c.hash >> 24 & 255) == 0);
    if (!check) return first.payload;
    for (size_t i = 1; i < tried; ++i) REQUIRE(encode_with(*all[(lead + i) % all.size()], job, false) == first);
    const Outcome outcome = attack(c, first.payload);
    REQUIRE(!outcome.error);
    REQUIRE(outcome.tensor.changed == first.changed && outcome.tensor.before == first.before && outcome.tensor.after == first.after);
    std::vector<uint8_t> result(elements.size());
    if (!result.empty()) c.base.view.gather(0, c.base.view.count, result.data());
    for (size_t i = 0; i < outcome.indices.size(); ++i)
        std::memcpy(result.data() + size_t(outcome.indices[i]) * c.type.bytes, outcome.values.data() + i * c.type.bytes, c.type.bytes);
    REQUIRE(result == elements);
    return first.payload;
}

// Makes a body that follows the grammar of §4, with numbers that need not fit the base.
void write_body(std::vector<uint8_t>& payload, const ElementType& type, const uint8_t* base, uint32_t elements, Input& in, Random& random) {
    static auto* const space = new std::vector<uint8_t>(size_t(4) << 20);
    BitWriter out(space->data());
    const uint8_t shape = in.byte();
    uint32_t top = type.exponent_mask();
    if (type.exponent_bits) top = shape & 1 ? in.byte() * (top + 1) / 256 : top * 3 / 4;
    if ((shape & 0xf0) == 0xf0) top = in.word();
    out.put(top & 2047, 11);
    const ContextRule rule = context_rule(type, top);
    std::array<uint32_t, kContexts> members{};
    for (uint32_t i = 0; i < elements; ++i) {
        uint64_t x = 0;
        std::memcpy(&x, base + size_t(i) * type.bytes, type.bytes);
        ++members[rule(x)];
    }
    const bool table = shape & 2;
    const unsigned symbols = table ? 1 + in.byte() : 0, ks = shape >> 2 & 7, first_symbol = uint8_t(random());
    out.put(table, 1);
    if (table) {
        out.put(symbols - 1, 8);
        out.put(ks, 3);
        for (unsigned i = 0; i < symbols; ++i) out.put(uint8_t(first_symbol + i * 37), 8);
    }
    struct Plan {
        uint32_t n = 0, u = 0, larger = 0, gap = 0;
        unsigned k = 0, mode = 0, kr = 0, kv = 0;
        bool inverted = false;
    };
    std::array<Plan, kContexts> plans;
    uint32_t left = 36000;
    for (unsigned c = 0; c < type.contexts(); ++c) {
        Plan& p = plans[c];
        const uint8_t a = in.byte(), b = in.byte();
        const uint32_t m = members[c];
        p.inverted = a & 4;
        switch (a & 3) {  // the number of changes
            case 0: p.n = b & 0x80 ? 0 : b & 7; break;
            case 1: p.n = uint32_t(uint64_t(m) * b / 255); break;
            case 2: p.n = m - std::min<uint32_t>(m, b & 15); break;
            default: p.n = a & 8 ? in.word() : b; break;
        }
        p.n = std::min({p.n, left, 65535u});
        left -= p.n;
        put_count(out, p.n);
        if (!p.n) continue;
        out.put(p.inverted, 1);
        p.u = a & 0x10 ? in.byte() : m - std::min(m, p.n);
        p.u = std::min(p.u, 65535u);
        if (p.inverted) put_count(out, p.u);
        const uint8_t d = in.byte(), e = in.byte();
        p.gap = p.n < m ? (m - p.n) / p.n : 0;
        if (a & 0x20) p.gap += d >> 5;
        p.k = d & 31;
        if (p.k > 24 && !(a & 0x40)) p.k -= 24;
        out.put(p.k, 5);
        p.mode = e & 3;
        if (p.mode == 3 && !table && !(a & 0x80)) p.mode = 2;
        out.put(p.mode, 2);
        if (p.mode == 1) {
            p.larger = std::min<uint32_t>(p.n, 1 + (e >> 2));
            put_count(out, p.larger);
            out.put(p.kr = (d ^ e) % 25, 5);
        }
        if (p.mode == 1 || p.mode == 2) out.put(p.kv = a & 0x40 ? e & 63 : (e >> 2) % type.width(), 6);
    }
    const unsigned width = type.width();
    for (unsigned c = 0; c < type.contexts(); ++c) {
        const Plan& p = plans[c];
        if (!p.n) continue;
        if (p.inverted) {
            uint32_t changes = p.n;
            for (uint32_t i = 0; i < p.u; ++i) {
                const uint32_t run = uint32_t(random.below(std::min(changes, 2 * (p.n / p.u)) + 1));
                put_rice(out, p.k, run);
                changes -= run;
            }
        } else {
            for (uint32_t i = 0; i < p.n; ++i) put_rice(out, p.k, random.below(p.gap + 1));
        }
        if (p.mode == 3) {
            for (uint32_t i = 0; i < p.n; ++i) {
                put_rice(out, ks, random.below(symbols));
                out.put_long(low_bits(random() | 1, width - 8), width - 8);
            }
            continue;
        }
        for (uint32_t i = 0; i < p.n; ++i) out.put(random() & 1, 1);
        const auto magnitude = [&] { return random() >> (65 - width) >> (random() & 63) % width; };
        if (p.mode == 2)
            for (uint32_t i = 0; i < p.n; ++i) put_rice(out, p.kv, magnitude());
        if (p.mode == 1) {
            for (uint32_t i = 0; i < p.larger; ++i) put_rice(out, p.kr, random.below((p.n - p.larger) / p.larger + 1));
            for (uint32_t i = 0; i < p.larger; ++i) put_rice(out, p.kv, magnitude() >> 1);
        }
    }
    const size_t size = size_t(out.finish() - space->data());
    append_chunk_header(payload, ChunkMode::coded, elements, uint32_t(size));
    payload.insert(payload.end(), space->data(), space->data() + size);
}

// Makes chunks of all modes, cut as no encoder would cut them.
std::vector<uint8_t> grow(const ElementType& type, const std::vector<uint8_t>& base, uint64_t count, Input& in, Random& random) {
    std::vector<uint8_t> payload{type.code};
    for (uint64_t at = 0; at < count;) {
        const uint8_t how = in.byte();
        uint64_t n = count - at;
        if (n > kTile && how & 4) n = kTile * (1 + random.below(n / kTile));
        n = std::min(n, count - at);
        const uint8_t* const from = base.data() + at * type.bytes;
        if ((how & 3) == 0 && (how & 0x80)) {
            append_chunk_header(payload, ChunkMode::same, uint32_t(n), 0);
        } else if ((how & 3) == 1 && (how & 0x80)) {
            append_chunk_header(payload, ChunkMode::raw, uint32_t(n), uint32_t(n * type.bytes));
            const size_t start = payload.size();
            payload.insert(payload.end(), from, from + n * type.bytes);
            for (size_t i = start; i < payload.size(); i += 1 + random.below(1 + (how & 0x7c))) payload[i] = uint8_t(random());
        } else {
            write_body(payload, type, from, uint32_t(n), in, random);
        }
        at += n;
    }
    return payload;
}

// Returns a number of elements, usually a small one, because large ones allow few executions. Mutation favours inputs that do much, so large numbers are
// reduced at random.
uint64_t element_count(uint8_t kind, uint32_t x, uint64_t hash) {
    if (kind < 128 || hash & 7) return x & 63;
    if (kind < 192 || hash & 8) return x & 255;
    if (kind < 240 || hash & 0x30) return x & 1023;
    if (kind < 252 || hash & 0xc0) return x & 8191;
    return kind & 1 ? x % (kMaxElements + 1) : std::min<uint64_t>(kMaxElements, kTile * (1 + (x & 1)) + (x >> 8) % 130 - 65 * (x >> 1 & 1));
}

void flip(std::vector<uint8_t>& payload, unsigned n, Input& in) {
    for (unsigned i = 0; i < n; ++i) {
        const uint32_t at = in.word();
        const uint8_t by = in.byte();
        if (payload.empty()) return;
        if (by == 0xff) payload.resize(std::min<size_t>(at, payload.size()));
        else if (by == 0) payload.push_back(uint8_t(at));
        else payload[at % payload.size()] ^= by;
    }
}

void execute(Input in, uint64_t hash) {
    const uint8_t what = in.byte(), kinds = in.byte(), options = in.byte(), count_kind = in.byte();
    uint64_t count = element_count(count_kind, in.word(), hash >> 40);
    const uint8_t layouts = in.byte(), changes = in.byte();
    const ElementType& type = kTypes[kinds & 15];
    const auto layout = Tensor::Layout((kinds >> 4 & 7) % 5);
    const uint64_t columns = 1 + (layouts & 31), rows = count / columns;
    count = rows * columns;
    Random random(in.word());
    const unsigned mode = what & 3, flips = what >> 2 & 7, base_kind = what >> 5 & 3;
    auto elements = make_elements(type, count, layout == Tensor::absent ? 0 : base_kind, in.rest(), random);
    Tensor base(layout, rows, columns, type.bytes, elements.data());
    const Case c{type, base, random(), options, hash};
    std::vector<uint8_t> payload;
    if (mode == 0) {
        const auto rest = in.rest();
        payload.assign(rest.begin(), rest.end());
        if (!payload.empty() && flips) payload[0] = type.code;
        if (payload.size() >= 9 && flips & 1 && count) {  // then the first chunk covers the tensor
            const uint32_t header[2] = {uint32_t(count) | 1u << 30, uint32_t(payload.size() - 9)};
            std::memcpy(payload.data() + 1, header, 8);
        }
        attack(c, payload);
    } else if (mode == 1) {
        payload = grow(type, elements, count, in, random);
        flip(payload, flips & 3, in);
        attack(c, payload);
    } else {
        with_element(type.bytes, [&](auto element) { change_as<decltype(element)>(elements, type, changes & 7, (changes >> 3 & 7) % 5, random); });
        if (mode == 3) {  // the new elements are fuzzed bytes
            const auto rest = in.rest();
            const size_t skip = std::min<size_t>(rest.size(), flips < 4 ? 0 : size_t(flips - 3) * 3), n = std::min(rest.size() - skip, elements.size());
            if (n) std::memcpy(elements.data(), rest.data() + skip, n);
        }
        const auto next_layout = Tensor::Layout((layouts >> 5) % 4);
        payload = round_trip(c, next_layout, rows, columns, elements, flips < 4);
        if (flips < 4) return;
        flip(payload, flips - 3, in);
        attack(c, payload);
    }
}

}  // namespace
}  // namespace deltawire

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    uint64_t hash = size;
    for (size_t i = 0; i < size; ++i) hash = (hash ^ data[i]) * 0x100000001b3u;
    deltawire::execute(deltawire::Input(data, size), deltawire::mix(hash));
    return 0;
}
