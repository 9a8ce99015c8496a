#include "codec.hpp"

#include <algorithm>
#include <cstring>
#include <tuple>

#if defined(DELTAWIRE_X86)
#include <cpuid.h>
#endif

#include "arena.hpp"
#include "parallel.hpp"

namespace deltawire {
namespace {

constexpr uint32_t kDigestUnit = 1u << 22;  // elements of an unchanged tensor that one thread takes at a time

// Calls `use(T{})` with the unsigned integer type of an element.
template <class Use>
decltype(auto) with_element(uint8_t bytes, Use use) {
    switch (bytes) {
        case 1: return use(uint8_t{});
        case 2: return use(uint16_t{});
        case 4: return use(uint32_t{});
        default: return use(uint64_t{});
    }
}

ContextRule context_rule(const ElementType& type, uint32_t top) {
    return {type.exponent_shift, type.exponent_bits ? type.exponent_mask() : 0, int32_t(top)};
}

// Contiguous elements of a tensor, one span at a time: in place where the tensor is contiguous, else copied.
class SpanReader {
public:
    const uint8_t* read(const View& view, uint64_t first, uint32_t count) {
        if (view.data && view.contiguous) return view.data + first * view.bytes;
        prepare();
        if (view.data) {
            view.gather(first, count, buffer_.get());
            zero_ = false;
        } else if (!zero_) {
            std::memset(buffer_.get(), 0, kBytes);
            zero_ = true;
        }
        return buffer_.get();
    }
    void prepare() {
        if (!buffer_) buffer_.reset(new (std::align_val_t(64)) uint8_t[kBytes]());
    }

private:
    static constexpr size_t kBytes = kSpanBytes;
    struct Free {
        void operator()(uint8_t* p) const { ::operator delete[](p, std::align_val_t(64)); }
    };
    std::unique_ptr<uint8_t[], Free> buffer_;
    bool zero_ = true;
};

// The multipliers of one span's words.
struct SpanMultipliers {
    std::array<Multipliers, kSpanBytes / 2 / kDigestBlock> of;

    void fill(const Kernels& kernels, uint64_t seed, uint64_t first_element, uint32_t count, uint8_t bytes) {
        const size_t blocks = (size_t(count) * bytes + 2 * kDigestBlock - 1) / (2 * kDigestBlock);
        kernels.multipliers(seed, first_element * bytes / (2 * kDigestBlock), blocks, of.data());
    }
};

void append_chunk_header(std::vector<uint8_t>& out, ChunkMode mode, uint32_t elements, uint32_t bytes) {
    const uint32_t header[2] = {elements | uint32_t(mode) << 30, bytes};
    const auto* raw = reinterpret_cast<const uint8_t*>(header);
    out.insert(out.end(), raw, raw + kChunkHeader);
}

// The exponent from which contexts are counted down (§5 rule 2).
uint32_t top_exponent(const View& base, uint64_t first, uint32_t count, const ElementType& type) {
    if (!type.exponent_bits || !base.data) return 0;
    const uint32_t stride = (count + 1023) / 1024;
    std::array<uint16_t, 1024> sample;
    uint32_t m = 0;
    for (uint32_t i = 0; i < count; i += stride) {
        uint64_t x = 0;
        std::memcpy(&x, base.at(first + i), type.bytes);
        sample[m++] = uint16_t(x >> type.exponent_shift & type.exponent_mask());
    }
    const uint32_t at = m - 1 - m / 64;
    std::nth_element(sample.begin(), sample.begin() + at, sample.begin() + m);
    return sample[at];
}

template <class T>
class BlockEncoder {
public:
    explicit BlockEncoder(const Kernels& kernels)
        : kernels_(kernels), chunk_(kernels), scan_(new SpanScan), multipliers_(new SpanMultipliers) {}

    struct Block {
        std::vector<uint8_t> bytes;
        uint64_t changed = 0;
        Lanes before{}, after{};
    };

    Block encode(const EncodeJob& job, uint64_t first, uint32_t count) {
        Block out;
        const uint32_t top = top_exponent(job.base, first, count, job.type);
        const ContextRule rule = context_rule(job.type, top);
        const auto& kernels = kernels_.of<T>();
        chunk_.reset(job.type.contexts());
        uint32_t chunk_start = 0;
        for (uint32_t at = 0; at < count; at += kSpan<T>) {
            const uint32_t n = std::min(kSpan<T>, count - at);
            const T* base = reinterpret_cast<const T*>(base_span_.read(job.base, first + at, n));
            const T* next = reinterpret_cast<const T*>(next_span_.read(job.next, first + at, n));
            multipliers_->fill(kernels_, job.seed, first + at, n, sizeof(T));
            Lanes before{};
            kernels.scan(base, next, n, rule, multipliers_->of.data(), *scan_, before);
            add_lanes(out.before, before);
            add_lanes(out.after, before);
            kernels.collect(base, next, n, rule, *scan_, multipliers_->of.data(), chunk_.collected(), out.after);
            const bool tile_ends = (at + n) % kTile == 0 || at + n == count;
            if (tile_ends && (chunk_.changes() >= kChunkTarget || at + n == count)) {
                finish_chunk(job, first + chunk_start, at + n - chunk_start, top, out);
                chunk_start = at + n;
            }
        }
        out.bytes.shrink_to_fit();
        return out;
    }

private:
    void finish_chunk(const EncodeJob& job, uint64_t first, uint32_t elements, uint32_t top, Block& out) {
        const uint32_t changes = chunk_.changes();
        out.changed += changes;
        if (!changes) {
            append_chunk_header(out.bytes, ChunkMode::same, elements, 0);
            return;
        }
        const size_t coded = chunk_.plan(top), raw = size_t(elements) * sizeof(T);
        append_chunk_header(out.bytes, coded < raw ? ChunkMode::coded : ChunkMode::raw, elements, uint32_t(std::min(coded, raw)));
        const size_t at = out.bytes.size();
        if (coded < raw) {
            out.bytes.resize(at + coded + 8);
            chunk_.write(out.bytes.data() + at);
            out.bytes.resize(at + coded);
        } else {
            out.bytes.resize(at + raw);
            job.next.gather(first, elements, out.bytes.data() + at);
        }
        chunk_.reset(job.type.contexts());
    }

    const Kernels& kernels_;
    ChunkEncoder<T> chunk_;
    std::unique_ptr<SpanScan> scan_;
    std::unique_ptr<SpanMultipliers> multipliers_;
    SpanReader base_span_, next_span_;
};

// One object per element width, made when first needed: the working memory of a thread.
template <template <class> class Of>
class PerWidth {
public:
    template <class T, class... Args>
    Of<T>& get(Args&&... args) {
        auto& slot = std::get<std::unique_ptr<Of<T>>>(slots_);
        if (!slot) slot = std::make_unique<Of<T>>(std::forward<Args>(args)...);
        return *slot;
    }

private:
    std::tuple<std::unique_ptr<Of<uint8_t>>, std::unique_ptr<Of<uint16_t>>, std::unique_ptr<Of<uint32_t>>, std::unique_ptr<Of<uint64_t>>> slots_;
};

// Calls `use(mode, elements, body)` for each chunk of a payload, after checking what can be checked without decoding it.
template <class Use>
void for_each_chunk(std::span<const uint8_t> payload, const ElementType& type, Use use) {
    if (payload.empty()) throw Corrupt("a payload is empty.");
    if (payload[0] != type.code) throw WrongType("");
    bool last = false;
    for (size_t at = 1; at < payload.size();) {
        if (payload.size() - at < kChunkHeader) throw Corrupt("a chunk's header is cut short.");
        uint32_t header[2];
        std::memcpy(header, payload.data() + at, kChunkHeader);
        at += kChunkHeader;
        const uint32_t n = header[0] & 0x3fffffff, mode = header[0] >> 30, bytes = header[1];
        if (last) throw Corrupt("a chunk before the last is not a multiple of 16384 elements.");
        if (n < 1 || n > kBlock) throw Corrupt("a chunk has an impossible number of elements.");
        if (bytes > payload.size() - at) throw Corrupt("a chunk's body is cut short.");
        const bool fits = mode == 0 ? bytes == 0 : mode == 1 ? bytes > 0 : mode == 2 && bytes == uint64_t(n) * type.bytes;
        if (!fits) throw Corrupt("a chunk's size does not fit its mode.");
        use(ChunkMode(mode), n, payload.subspan(at, bytes));
        last = n % kTile != 0;
        at += bytes;
    }
}

}  // namespace

uint8_t* View::at(uint64_t index) const {
    if (contiguous) return data + index * bytes;
    uint8_t* p = data;
    for (size_t d = shape.size(); d-- > 0;) {
        p += int64_t(index % shape[d]) * strides[d];
        index /= shape[d];
    }
    return p;
}

void View::gather(uint64_t start, uint64_t n, uint8_t* out) const {
    if (!data) {
        std::memset(out, 0, n * bytes);
        return;
    }
    if (contiguous) {
        std::memcpy(out, data + start * bytes, n * bytes);
        return;
    }
    const uint64_t row = shape.back();
    const int64_t stride = strides.back();
    while (n) {
        const uint64_t run = std::min(n, row - start % row);
        const uint8_t* p = at(start);
        with_element(bytes, [&](auto element) {
            for (uint64_t i = 0; i < run; ++i, p += stride, out += sizeof element) std::memcpy(out, p, sizeof element);
        });
        start += run;
        n -= run;
    }
}

std::vector<Encoded> encode(std::span<const EncodeJob> jobs, unsigned threads, const Kernels& kernels) {
    std::vector<Encoded> out(jobs.size());
    struct Unit {
        size_t job;
        uint64_t block;
        uint64_t changed = 0;
        Lanes before{}, after{};
    };
    std::vector<Unit> units;
    for (size_t j = 0; j < jobs.size(); ++j) {
        const uint64_t blocks = (jobs[j].next.count + kBlock - 1) / kBlock;
        out[j].blocks.resize(blocks);
        for (uint64_t b = 0; b < blocks; ++b) units.push_back({.job = j, .block = b});
    }
    std::vector<PerWidth<BlockEncoder>> workers(std::max(1u, threads));
    parallel_for(units.size(), workers, [&](auto& encoders, size_t u) {
        Unit& unit = units[u];
        const EncodeJob& job = jobs[unit.job];
        const uint64_t first = unit.block * kBlock;
        const uint32_t count = uint32_t(std::min<uint64_t>(kBlock, job.next.count - first));
        with_element(job.type.bytes, [&](auto element) {
            auto block = encoders.template get<decltype(element)>(kernels).encode(job, first, count);
            out[unit.job].blocks[unit.block] = std::move(block.bytes);
            unit.changed = block.changed;
            unit.before = block.before;
            unit.after = block.after;
        });
    });
    for (const Unit& unit : units) {
        Encoded& e = out[unit.job];
        e.changed += unit.changed;
        add_lanes(e.before, unit.before);
        add_lanes(e.after, unit.after);
    }
    return out;
}

namespace {

template <class T>
void put_as(const View& view, uint64_t first, size_t n, const uint32_t* positions, const T* values) {
    if (view.contiguous) {
        T* to = reinterpret_cast<T*>(view.data) + first;
        for (size_t i = 0; i < n; ++i) to[positions[i]] = values[i];
    } else {
        for (size_t i = 0; i < n; ++i) std::memcpy(view.at(first + positions[i]), values + i, sizeof(T));
    }
}

void put(const View& view, uint64_t first, size_t n, const uint32_t* positions, const uint8_t* values) {
    with_element(view.bytes, [&](auto element) { put_as(view, first, n, positions, reinterpret_cast<const decltype(element)*>(values)); });
}

// Like `put`, but leaves the old values in `values`. `span` holds the elements from position `from` on.
template <class T>
void exchange(const View& view, uint64_t first, const T* span, uint32_t from, size_t n, const uint32_t* positions, T* values) {
    for (size_t i = 0; i < n; ++i) {
        const T old = span[positions[i] - from];
        put_as(view, first, 1, positions + i, values + i);
        values[i] = old;
    }
}

}  // namespace

// The working memory of one thread that resolves, and what it keeps.
class Resolution::Worker {
public:
    Worker(const Kernels& kernels, std::atomic<size_t>& kept, size_t budget)
        : kernels_(kernels),
          kept_(kept),
          budget_(budget),
          multipliers_(new SpanMultipliers),
          space_(new LocateSpace),
          positions_(kMaxChanges),
          values_(size_t(kMaxChanges) * 8) {}

    // Takes all memory that it will need for this job, but for raw chunks beyond kMaxChanges.
    void prepare(const ResolveJob& job) {
        if (job.changes) with_element(job.type.bytes, [&](auto element) { decoders_.get<decltype(element)>(); });
        if (!job.base.contiguous || !job.base.data) span_.prepare();
    }

    // Decodes and digests a unit and keeps its changes, as far as the budget goes.
    void resolve(const ResolveJob& job, Unit& unit) {
        with_element(job.type.bytes, [&](auto element) { resolve_as<decltype(element)>(job, unit, true); });
    }

    // Calls `use(count, positions, values)`, decoding the unit again if its changes were not kept.
    template <class Use>
    void with_changes(const ResolveJob& job, const Unit& unit, Use use) {
        if (unit.positions) return use(unit.changed, unit.positions, unit.values);
        Unit again = unit;
        with_element(job.type.bytes, [&](auto element) { resolve_as<decltype(element)>(job, again, false); });
        use(again.changed, positions_.data(), values_.data());
    }

private:
    template <class T>
    void resolve_as(const ResolveJob& job, Unit& unit, bool keep) {
        const auto& kernels = kernels_.of<T>();
        ChunkDecoder<T>* decoder = nullptr;
        ContextRule rule{};
        Cursor cursor;
        unit.before = unit.after = {};
        Located<T> located{0, positions_.data(), reinterpret_cast<T*>(values_.data())};
        if (unit.mode == ChunkMode::coded) {
            decoder = &decoders_.get<T>();
            decoder->parse(unit.body, job.type, unit.elements);
            rule = context_rule(job.type, decoder->top());
            if (keep && take(unit, decoder->total(), sizeof(T))) located = {0, unit.positions, reinterpret_cast<T*>(unit.values)};
        }
        for (uint32_t at = 0; at < unit.elements; at += kSpan<T>) {
            const uint32_t n = std::min(kSpan<T>, unit.elements - at), from = located.count;
            const uint64_t first = unit.first + at;
            const T* base = reinterpret_cast<const T*>(span_.read(job.base, first, n));
            multipliers_->fill(kernels_, job.seed, first, n, sizeof(T));
            if (unit.mode == ChunkMode::coded) {
                kernels.locate(base, n, at, rule, multipliers_->of.data(), decoder->changes(), cursor, *space_, located, unit.before);
            } else {
                kernels_.digest(reinterpret_cast<const uint8_t*>(base), size_t(n) * sizeof(T), multipliers_->of.data(), unit.before);
                if (unit.mode == ChunkMode::same) continue;
                compare_raw(base, unit.body.data() + size_t(at) * sizeof(T), at, n, located);
            }
            kernels.digest_changes(base, at, located.positions + from, located.values + from, located.count - from, multipliers_->of.data(),
                                   unit.after);
            if (keep && job.write && unit.positions) {
                exchange(job.base, unit.first, base, at, located.count - from, located.positions + from, located.values + from);
                unit.written = located.count;
            }
        }
        unit.changed = located.count;
        add_lanes(unit.after, unit.before);
        if (decoder) decoder->check_end(cursor);
    }

    bool take(Unit& unit, size_t n, size_t width) {
        const auto reserve = [&](size_t bytes) { return kept_.fetch_add(bytes, std::memory_order_relaxed) + bytes <= budget_; };
        uint8_t* const memory = arena_.take(n * (sizeof(uint32_t) + width) + 64, reserve);
        if (!memory) return false;
        unit.positions = reinterpret_cast<uint32_t*>(memory);
        unit.values = memory + (n * sizeof(uint32_t) + 63) / 64 * 64;
        return true;
    }

    template <class T>
    void compare_raw(const T* base, const uint8_t* raw, uint32_t at, uint32_t n, Located<T>& located) {
        if (positions_.size() < size_t(located.count) + n) {  // raw chunks are bounded by their own bytes, not by kMaxChanges
            positions_.resize(size_t(located.count) + n);
            values_.resize((size_t(located.count) + n) * 8);
            located.positions = positions_.data();
            located.values = reinterpret_cast<T*>(values_.data());
        }
        for (uint32_t i = 0; i < n; ++i) {
            T now;
            std::memcpy(&now, raw + size_t(i) * sizeof(T), sizeof(T));
            if (now == base[i]) continue;
            located.positions[located.count] = at + i;
            located.values[located.count++] = now;
        }
    }

    const Kernels& kernels_;
    std::atomic<size_t>& kept_;
    size_t budget_;
    Arena arena_;
    PerWidth<ChunkDecoder> decoders_;
    std::unique_ptr<SpanMultipliers> multipliers_;
    std::unique_ptr<LocateSpace> space_;
    SpanReader span_;
    std::vector<uint32_t> positions_;
    std::vector<uint8_t> values_;
};

void Resolution::split(size_t j) {
    const ResolveJob& job = jobs_[j];
    if (!job.changes) {
        for (uint64_t at = 0; at < job.base.count; at += kDigestUnit)
            units_.push_back({j, at, uint32_t(std::min<uint64_t>(kDigestUnit, job.base.count - at)), ChunkMode::same, {}});
        return;
    }
    uint64_t elements = 0;
    for_each_chunk(job.payload, job.type, [&](ChunkMode mode, uint32_t n, std::span<const uint8_t> body) {
        units_.push_back({j, elements, n, mode, body});
        elements += n;
    });
    if (elements != job.base.count)
        throw WrongCount("the delta is for " + std::to_string(elements) + " elements, the tensor has " + std::to_string(job.base.count) + ".");
}

Resolution::~Resolution() = default;

Resolution::Resolution(unsigned threads, size_t budget, const Kernels& kernels) {
    for (unsigned t = 0; t < std::max(1u, threads); ++t) workers_.push_back(std::make_unique<Worker>(kernels, kept_, budget));
}

std::vector<Resolution::Tensor> Resolution::add(std::vector<ResolveJob> jobs) {
    const size_t first_job = jobs_.size(), first_unit = units_.size();
    for (ResolveJob& job : jobs) {
        for (auto& worker : workers_) worker->prepare(job);
        jobs_.push_back(std::move(job));
        split(jobs_.size() - 1);
        first_unit_.push_back(units_.size());
    }
    parallel_for(units_.size() - first_unit, workers_, [&](auto& worker, size_t u) {
        Unit& unit = units_[first_unit + u];
        worker->resolve(jobs_[unit.job], unit);
    });
    std::vector<Tensor> out(jobs.size());
    for (size_t u = first_unit; u < units_.size(); ++u) {
        Tensor& t = out[units_[u].job - first_job];
        t.changed += units_[u].changed;
        add_lanes(t.before, units_[u].before);
        add_lanes(t.after, units_[u].after);
    }
    return out;
}

namespace {
// Calls `use(position, value)` in ascending order. Changes come span after span; only within a span they are in disorder.
template <class T, class Use>
void ascending(const uint32_t* positions, const T* values, size_t n, Use use) {
    std::array<T, kSpan<T>> at;
    std::array<uint64_t, kSpan<T> / kGroup> hit{};
    for (size_t i = 0; i < n;) {
        const uint32_t first = positions[i] & ~(kSpan<T> - 1);
        for (; i < n && positions[i] - first < kSpan<T>; ++i) {
            const uint32_t p = positions[i] - first;
            hit[p / kGroup] |= uint64_t(1) << p % kGroup;
            at[p] = values[i];
        }
        for (uint32_t g = 0; g < hit.size(); ++g) {
            for (uint64_t bits = hit[g]; bits; bits &= bits - 1) {
                const uint32_t p = g * kGroup + unsigned(std::countr_zero(bits));
                use(first + p, at[p]);
            }
            hit[g] = 0;
        }
    }
}
}  // namespace

void Resolution::extract(size_t tensor, int64_t* indices, uint8_t* values) {
    const uint8_t width = jobs_[tensor].type.bytes;
    for (size_t u = first_unit_[tensor]; u < first_unit_[tensor + 1]; ++u) {
        const Unit& unit = units_[u];
        workers_[0]->with_changes(jobs_[tensor], unit, [&](size_t n, const uint32_t* positions, const uint8_t* from) {
            with_element(width, [&](auto element) {
                using T = decltype(element);
                ascending(positions, reinterpret_cast<const T*>(from), n, [&](uint32_t position, T value) {
                    *indices++ = int64_t(unit.first + position);
                    std::memcpy(values, &value, sizeof(T));
                    values += sizeof(T);
                });
            });
        });
    }
}

void Resolution::extract_dense(size_t tensor, uint8_t* out) {
    View view = jobs_[tensor].base;
    view.data = out;
    view.contiguous = true;
    std::memset(out, 0, view.count * view.bytes);
    for (size_t u = first_unit_[tensor]; u < first_unit_[tensor + 1]; ++u)
        workers_[0]->with_changes(jobs_[tensor], units_[u], [&](size_t n, const uint32_t* positions, const uint8_t* values) {
            put(view, units_[u].first, n, positions, values);
        });
}

void Resolution::settle() {
    parallel_for(units_.size(), workers_, [&](auto& worker, size_t u) {
        const Unit& unit = units_[u];
        const View& base = jobs_[unit.job].base;
        if (!jobs_[unit.job].write || unit.written == unit.changed) return;
        if (unit.mode == ChunkMode::raw && base.contiguous) {
            std::memcpy(base.data + unit.first * base.bytes, unit.body.data(), unit.body.size());
            return;
        }
        worker->with_changes(jobs_[unit.job], unit, [&](size_t n, const uint32_t* positions, const uint8_t* values) {
            put(base, unit.first, n, positions, values);
        });
    });
}

void Resolution::revert() {
    for (Unit& unit : units_) {
        if (!unit.written) continue;  // there may be no base either
        put(jobs_[unit.job].base, unit.first, unit.written, unit.positions, unit.values);
        unit.written = 0;
    }
}

void write_elements(const View& view, const int64_t* indices, const uint8_t* values, size_t n) {
    with_element(view.bytes, [&](auto element) {
        for (size_t i = 0; i < n; ++i) std::memcpy(view.at(uint64_t(indices[i])), values + i * sizeof element, sizeof element);
    });
}

std::vector<Lanes> digest(std::span<const DigestJob> jobs, unsigned threads, const Kernels& kernels) {
    std::vector<ResolveJob> resolve;
    for (const DigestJob& job : jobs) resolve.push_back({job.view, {}, false, {0, job.view.bytes, 0, 0}, job.seed, false});
    std::vector<Lanes> out;
    for (const auto& tensor : Resolution(threads, 0, kernels).add(std::move(resolve))) out.push_back(tensor.before);
    return out;
}

PayloadFacts inspect(std::span<const uint8_t> payload, const ElementType& type) {
    PayloadFacts facts;
    with_element(type.bytes, [&](auto element) {
        ChunkDecoder<decltype(element)> decoder;
        for_each_chunk(payload, type, [&](ChunkMode mode, uint32_t n, std::span<const uint8_t> body) {
            uint64_t changed = mode == ChunkMode::raw ? n : 0;
            if (mode == ChunkMode::coded) {
                decoder.parse(body, type, n);
                decoder.add_facts(facts.bodies);
                changed = decoder.total();
            }
            facts.chunks.push_back({n, changed, body.size() + kChunkHeader, mode});
        });
    });
    return facts;
}

#if defined(DELTAWIRE_X86)
// __builtin_cpu_supports of clang 14 does not know "lzcnt".
static bool has_lzcnt() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(0x80000001, &a, &b, &c, &d) && (c >> 5 & 1);
}
#endif

std::vector<const Kernels*> available_kernels() {
    std::vector<const Kernels*> out;
#if defined(DELTAWIRE_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
        __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("avx512bitalg") &&
        __builtin_cpu_supports("gfni") && __builtin_cpu_supports("bmi2"))
        out.push_back(&kAvx512Kernels);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt") &&
        has_lzcnt())
        out.push_back(&kAvx2Kernels);
#endif
    out.push_back(&kScalarKernels);
    return out;
}

}  // namespace deltawire
