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

constexpr ElementType kTypes[18] = {{0, 1, 8, 0, 0},    {1, 1, 8, 0, 0},    {2, 1, 8, 0, 0},  {3, 1, 8, 2, 5},  {4, 1, 8, 3, 4},   {5, 1, 8, 0, 0},
                                    {6, 2, 16, 0, 0},   {7, 2, 16, 0, 0},   {8, 2, 16, 10, 5}, {9, 2, 16, 7, 8}, {10, 4, 32, 0, 0}, {11, 4, 32, 0, 0},
                                    {12, 4, 32, 23, 8}, {13, 8, 64, 0, 0}, {14, 8, 64, 0, 0}, {15, 8, 64, 52, 11}, {16, 1, 4, 0, 3},  {17, 4, 4, 0, 0}};
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

    enum Kind : unsigned { contiguous, unaligned, transposed, reversed, absent };

    Tensor(Kind kind, uint64_t rows, uint64_t columns, uint8_t bytes, const uint8_t* elements) {
        const uint64_t count = rows * columns;
        const int64_t b = bytes;
        view.count = count;
        view.bytes = bytes;
        if (kind == absent) return;
        size = count * bytes;
        size_t start = 0;
        Layout layout{{rows, columns}, {int64_t(columns) * b, b}};
        if (kind == unaligned) {
            ++size;
            start = 1;
        } else if (kind == transposed) {
            layout.strides = {b, int64_t(rows) * b};
        } else if (kind == reversed) {  // every second element, from the end
            if (count) start = (count - 1) * 2 * bytes, size = start + bytes;
            layout.strides = {-2 * b * int64_t(columns), -2 * b};
        }
        if (kind != contiguous) view.layout = std::make_shared<const Layout>(layout);
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

    Resolution& fresh(size_t budget, bool defer = false) {
        resolution.units_.clear();
        resolution.groups_.clear();
        resolution.first_tensor_.clear();
        resolution.kept_ = 0;
        Resolution::Worker& worker = *resolution.workers_[0];
        worker.arena_.clear();
        worker.budget_ = defer ? kUnlimited : budget;
        worker.defer_ = defer;
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
    std::vector<int64_t> changed;
    Lanes before{}, after{};
    bool operator==(const Encoding&) const = default;
};

void append_old_chunk_header(std::vector<uint8_t>& out, ChunkMode mode, uint32_t elements, size_t bytes) {
    const uint32_t header[2] = {elements | uint32_t(mode) << 30, uint32_t(bytes)};
    const auto* raw = reinterpret_cast<const uint8_t*>(header);
    out.insert(out.end(), raw, raw + kOldChunkHeader);
}

// Writes the payload of a group of one tensor as one of versions 1 and 2. The bodies of chunks are the same.
std::vector<uint8_t> as_old(const std::vector<uint8_t>& payload, const ElementType& type, const Tiles& tiles) {
    std::vector<uint8_t> out{type.code};
    uint64_t covered = 0;
    for_each_chunk(payload, type, tiles, [&](const Chunk& chunk) {
        append_old_chunk_header(out, chunk.mode, chunk.elements, chunk.body.size());
        out.insert(out.end(), chunk.body.begin(), chunk.body.end());
        covered += chunk.elements;
    });
    const uint64_t all = tiles.elements(0, tiles.count());
    if (covered < all) append_old_chunk_header(out, ChunkMode::same, uint32_t(all - covered), 0);
    return out;
}

Encoding encode_with(Isa& isa, const EncodeGroup& group, bool old, bool whole_api) {
    Encoding out;
    const Tiles tiles(group.nexts.size(), [&](size_t t) { return group.type.coded(group.nexts[t].count); });
    const auto append = [&](const std::vector<uint8_t>& bytes) { out.payload.insert(out.payload.end(), bytes.begin(), bytes.end()); };
    if (whole_api) {
        const auto encoded = encode(std::span(&group, 1), 1, isa.kernels);
        for (const auto& block : encoded[0].blocks) append(block);
        out.changed = encoded[0].changed, out.before = encoded[0].before, out.after = encoded[0].after;
    } else {
        const uint32_t size = group.type.block_tiles();
        out.changed.resize(group.nexts.size());
        size_t end = 0;
        for (uint64_t at = 0; at < tiles.count(); at += size) {
            Block block{0, at, uint32_t(std::min<uint64_t>(size, tiles.count() - at))};
            with_element(group.type, [&](auto element) {
                isa.encoders.get<decltype(element)>(isa.kernels).encode(group, tiles, block, out.changed);
            });
            if (block.last_change) end = out.payload.size() + block.last_change;
            append(block.bytes);
            add_lanes(out.before, block.before);
            add_lanes(out.after, block.after);
        }
        out.payload.resize(end);
    }
    if (old) out.payload = as_old(out.payload, group.type, tiles);
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
        encoding = encode_with(*isas().back(), {kTypes[9], {tensor.view}, {to.view}, {7}}, true, false);
    }
    static std::vector<uint8_t> make() {
        std::vector<uint8_t> out(200);
        Random random(1);
        for (auto& b : out) b = uint8_t(random());
        return out;
    }
    ResolveGroup group() const { return {kTypes[9], {tensor.view}, {7}, {true}, encoding.payload, true, true}; }

    std::vector<uint8_t> bytes, next_bytes;
    Tensor tensor;
    Encoding encoding;
};

// The tensors of a group, or one tensor of an old payload.
struct Case {
    ElementType type;
    std::vector<Tensor>& bases;
    std::vector<uint64_t> seeds;
    bool old;
    uint8_t options;
    uint64_t hash;

    // Instruction sets get different budgets, because decoding again must not change the result.
    size_t budget(size_t i) const {
        const size_t budgets[4] = {0, kUnlimited, size_t(64) + (options & 0xf0) * 16, size_t(16384) * 4 + 4096};
        return budgets[((options & 3) + i) % 4];
    }
    std::vector<View> views() const {
        std::vector<View> out;
        for (const Tensor& base : bases) out.push_back(base.view);
        return out;
    }
    uint64_t count() const {
        uint64_t n = 0;
        for (const Tensor& base : bases) n += base.view.count;
        return n;
    }
    // All tensors are written to, or all but some.
    std::vector<uint8_t> writes(bool all) const {
        std::vector<uint8_t> out;
        for (size_t t = 0; t < bases.size(); ++t) out.push_back(bases[t].view.data && (all || hash >> (32 + t) & 1));
        return out;
    }
    ResolveGroup group(std::span<const uint8_t> payload, std::vector<uint8_t> write) const {
        return {type, views(), seeds, std::move(write), payload, true, old};
    }
    bool untouched() const {
        return std::all_of(bases.begin(), bases.end(), [](const Tensor& base) { return base.untouched(); });
    }
    void restore() const {
        for (Tensor& base : bases) base.restore();
    }
};

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

// The coded elements of a tensor's bytes.
uint64_t coded_at(const ElementType& type, const std::vector<uint8_t>& bytes, uint64_t i) {
    if (type.width == 4) return bytes[i / 2] >> 4 * (i % 2) & 15;
    uint64_t x = 0;
    std::memcpy(&x, bytes.data() + i * type.bytes, type.bytes);
    return x;
}
void put_coded(const ElementType& type, std::vector<uint8_t>& bytes, uint64_t i, uint64_t x) {
    if (type.width == 4) bytes[i / 2] = uint8_t((bytes[i / 2] & (i % 2 ? 0x0f : 0xf0)) | (x & 15) << 4 * (i % 2));
    else std::memcpy(bytes.data() + i * type.bytes, &x, type.bytes);
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
    for (uint64_t i = 0; i < type.coded(count); ++i) {
        uint64_t x = random();
        if (kind == 3) {
            const unsigned zeros = unsigned(std::countr_zero(x | uint64_t(1) << 40));
            if (type.exponent_bits) {
                const uint64_t sign = x >> 63, exponent = middle - std::min<uint64_t>(middle, zeros), low = low_bits(x >> 8, type.exponent_shift);
                x = sign << (type.width - 1) | exponent << type.exponent_shift | low;
            } else {
                x = zeros;
            }
        }
        put_coded(type, out, i, x);
    }
    return out;
}

template <class E>
void change_as(std::vector<uint8_t>& elements, const ElementType& type, unsigned density, unsigned kind, Random& random) {
    using T = ValueOf<E>;
    constexpr unsigned width = Held<E>::width;
    static constexpr uint32_t per_65536[8] = {0, 64, 700, 6000, 20000, 40000, 60000, 65536};
    for (uint64_t i = 0; i < type.coded(elements.size() / type.bytes); ++i) {
        const uint64_t r = random();
        if ((r & 0xffff) >= per_65536[density]) continue;
        T x = T(coded_at(type, elements, i));
        const bool floating = type.exponent_bits;
        const T sign = T(r >> 16 & 1 ? T(1) : T(T(0) - T(1)));
        const uint64_t small = uint64_t(std::countr_zero(r >> 20 | uint64_t(1) << 30)) + 1;
        switch (kind == 4 ? unsigned(r >> 17 & 3) : kind) {
            case 0: x = stepped<E>(x, sign, floating); break;
            case 1: x = stepped<E>(x, T(uint64_t(sign) * small), floating); break;
            case 2: x = T(x ^ T(T(0x80 >> (small & 7)) | T(1)) << (width < 8 ? 0 : width - 8)); break;
            default: x = T(random()); break;
        }
        put_coded(type, elements, i, x);
    }
}

// Cuts elements into tensors, each with its own layout. `layouts` chooses them.
std::vector<Tensor> tensors_of(const ElementType& type, const std::vector<uint64_t>& rows, uint64_t columns, const std::vector<Tensor::Kind>& kinds,
                               const std::vector<uint8_t>& elements) {
    std::vector<Tensor> out;
    size_t at = 0;
    for (size_t t = 0; t < rows.size(); ++t) {
        out.emplace_back(kinds[t], rows[t], columns, type.bytes, elements.data() + at);
        at += rows[t] * columns * type.bytes;
    }
    return out;
}

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

// Makes a body that follows the grammar of §4, with numbers that need not fit the base. `first` is the first of its coded elements.
std::vector<uint8_t> make_body(const ElementType& type, const std::vector<uint8_t>& base, uint64_t first, uint32_t elements, Input& in, Random& random) {
    static auto* const space = new std::vector<uint8_t>(size_t(4) << 20);
    BitWriter out(space->data());
    const uint8_t shape = in.byte();
    uint32_t top = type.exponent_mask();
    if (type.exponent_bits) top = shape & 1 ? in.byte() * (top + 1) / 256 : top * 3 / 4;
    if ((shape & 0xf0) == 0xf0) top = in.word();
    out.put(top & 2047, 11);
    const ContextRule rule = context_rule(type, top);
    std::array<uint32_t, kContexts> members{};
    for (uint32_t i = 0; i < elements; ++i) ++members[rule(coded_at(type, base, first + i))];
    const bool table = shape & 2 && (type.width > 4 || (shape & 0xf0) == 0xe0);
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
        if (p.mode == 1 || p.mode == 2) out.put(p.kv = a & 0x40 ? e & 63 : (e >> 2) % type.width, 6);
    }
    const unsigned width = type.width, low = width < 8 ? 0 : width - 8;
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
                out.put_long(low_bits(random() | 1, low), low);
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
    return {space->data(), out.finish()};
}

// Makes chunks of all modes, cut as no encoder would cut them.
std::vector<uint8_t> grow(const Case& c, const std::vector<uint8_t>& base, Input& in, Random& random) {
    const ElementType& type = c.type;
    const Tiles tiles(c.bases.size(), [&](size_t t) { return type.coded(c.bases[t].view.count); });
    std::vector<uint8_t> payload;
    if (c.old) payload.push_back(type.code);
    uint64_t first = 0;  // element
    for (uint64_t tile = 0; tile < tiles.count();) {
        const uint8_t how = in.byte();
        uint64_t n = tiles.count() - tile;
        if (!c.old) n = std::min<uint64_t>(n, type.block_tiles() - tile % type.block_tiles());
        if (how & 4) n = 1 + random.below(n);
        if (how == 0xff) ++n;
        const auto elements = uint32_t(tiles.elements(tile, n));
        const auto append = [&](ChunkMode mode, const std::vector<uint8_t>& body) {
            if (c.old) append_old_chunk_header(payload, mode, elements, body.size());
            else append_chunk_header(payload, mode, uint32_t(n), body.size());
            payload.insert(payload.end(), body.begin(), body.end());
        };
        if ((how & 3) == 0 && (how & 0x80)) {
            append(ChunkMode::same, {});
        } else if ((how & 3) == 1 && (how & 0x80)) {
            const auto from = base.begin() + ptrdiff_t(type.bytes_of(first));
            std::vector<uint8_t> raw(from, from + ptrdiff_t(type.bytes_of(elements)));
            for (size_t i = 0; i < raw.size(); i += 1 + random.below(1 + (how & 0x7c))) raw[i] = uint8_t(random());
            append(ChunkMode::raw, raw);
        } else {
            append(ChunkMode::coded, make_body(type, base, first, elements, in, random));
        }
        tile += n;
        first += elements;
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

// Bytes of the input as a payload, perhaps with a first header that covers all elements.
std::vector<uint8_t> fuzzed_payload(const Case& c, std::span<const uint8_t> bytes, unsigned flips) {
    std::vector<uint8_t> payload(bytes.begin(), bytes.end());
    const uint64_t count = c.count();
    if (c.old) {
        if (!payload.empty() && flips) payload[0] = c.type.code;
        if (payload.size() < 9 || !(flips & 1) || !count) return payload;
        const uint32_t header[2] = {uint32_t(count) | 1u << 30, uint32_t(payload.size() - 9)};
        std::memcpy(payload.data() + 1, header, 8);
        return payload;
    }
    if (!(flips & 1)) return payload;
    std::vector<uint8_t> out;
    append_chunk_header(out, ChunkMode::coded, uint32_t(1 + flips / 2), payload.size());
    out.insert(out.end(), payload.begin(), payload.end());
    return out;
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
    uint64_t hash = size;
    for (size_t i = 0; i < size; ++i) hash = (hash ^ data[i]) * 0x100000001b3u;
    deltawire::execute(deltawire::Input(data, size), deltawire::mix(hash));
    return 0;
}
