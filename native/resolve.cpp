#include <algorithm>
#include <cstring>

#include "arena.hpp"
#include "codec.hpp"
#include "parallel.hpp"
#include "payload.hpp"
#include "piece.hpp"

namespace deltawire {
namespace {

constexpr uint32_t kDigestUnit = 1u << 22;  // elements of an unchanged tensor that one thread processes at a time

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

// Like `put`, but leaves the old values in `values`. `piece` holds the elements from position `from` on.
template <class T>
void replace(const View& view, uint64_t first, const T* piece, uint32_t from, size_t n, const uint32_t* positions, T* values) {
    for (size_t i = 0; i < n; ++i) {
        const T old = piece[positions[i] - from];
        put_as(view, first, 1, positions + i, values + i);
        values[i] = old;
    }
}

template <class T>
void swap_values(const View& view, uint64_t first, size_t n, const uint32_t* positions, T* values) {
    if (view.contiguous) {
        T* const at = reinterpret_cast<T*>(view.data) + first;
        for (size_t i = 0; i < n; ++i) std::swap(at[positions[i]], values[i]);
    } else {
        for (size_t i = 0; i < n; ++i) {
            T old;
            uint8_t* const at = view.at(first + positions[i]);
            std::memcpy(&old, at, sizeof(T));
            std::memcpy(at, values + i, sizeof(T));
            values[i] = old;
        }
    }
}

}  // namespace

// The working memory of one resolving thread, and the changes that it keeps.
class Resolution::Worker {
public:
    Worker(const Kernels& kernels, std::atomic<size_t>& kept, size_t budget, bool defer)
        : kernels_(kernels),
          kept_(kept),
          budget_(budget),
          defer_(defer),
          multipliers_(new PieceMultipliers),
          space_(new LocateSpace),
          positions_(kMaxChanges),
          values_(size_t(kMaxChanges) * 8) {}

    // Allocates all memory that it needs for this job, except for raw chunks with more than kMaxChanges changes.
    void prepare(const ResolveJob& job) {
        if (job.changes) with_element(job.type.bytes, [&](auto element) { decoders_.get<decltype(element)>(); });
        if (!job.base.contiguous || !job.base.data) piece_.prepare();
    }

    // Decodes and digests a unit, and keeps its changes if the budget allows it.
    void resolve(const ResolveJob& job, Unit& unit) {
        with_element(job.type.bytes, [&](auto element) {
            resolve_as<decltype(element)>(job, unit, true);
            if (defer_ && unit.changed && !unit.positions) keep_own(unit, sizeof element);
        });
    }

    // Frees the memory that only resolving needs.
    void compact() {
        decoders_ = {};
        multipliers_.reset();
        space_.reset();
        piece_ = {};
        positions_ = {};
        values_ = {};
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
        if (unit.mode == ChunkMode::same && !job.base.data) return;  // zeros that do not change add nothing to the digest
        for (uint32_t at = 0; at < unit.elements; at += kPiece<T>) {
            const uint32_t n = std::min(kPiece<T>, unit.elements - at), from = located.count;
            const uint64_t first = unit.first + at;
            const T* base = reinterpret_cast<const T*>(piece_.read(job.base, first, n));
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
            if (keep && job.write && unit.positions && !defer_) {
                replace(job.base, unit.first, base, at, located.count - from, located.positions + from, located.values + from);
                unit.written = located.count;
            }
        }
        unit.changed = located.count;
        add_lanes(unit.after, unit.before);
        if (decoder) decoder->check_end(cursor);
    }

    // Copies the changes that were just decoded. A raw chunk may have too many for an arena.
    void keep_own(Unit& unit, size_t width) {
        const size_t n = unit.changed, at = (n * sizeof(uint32_t) + 63) / 64 * 64;
        unit.own.resize(at + n * width);
        std::memcpy(unit.own.data(), positions_.data(), n * sizeof(uint32_t));
        std::memcpy(unit.own.data() + at, values_.data(), n * width);
        unit.positions = reinterpret_cast<uint32_t*>(unit.own.data());
        unit.values = unit.own.data() + at;
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
        if (positions_.size() < size_t(located.count) + n) {  // a raw chunk is limited by its own bytes, not by kMaxChanges
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
    bool defer_;
    Arena arena_;
    PerWidth<ChunkDecoder> decoders_;
    std::unique_ptr<PieceMultipliers> multipliers_;
    std::unique_ptr<LocateSpace> space_;
    PieceReader piece_;
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

Resolution::Resolution(unsigned threads, size_t budget, bool defer, const Kernels& kernels) : defer_(defer) {
    for (unsigned t = 0; t < std::max(1u, threads); ++t)
        workers_.push_back(std::make_unique<Worker>(kernels, kept_, defer ? ~size_t(0) : budget, defer));
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
// Calls `use(position, value)` in ascending order. Changes are sorted by piece, but not within a piece.
template <class T, class Use>
void ascending(const uint32_t* positions, const T* values, size_t n, Use use) {
    std::array<T, kPiece<T>> at;
    std::array<uint64_t, kPiece<T> / kGroup> hit{};
    for (size_t i = 0; i < n;) {
        const uint32_t first = positions[i] & ~(kPiece<T> - 1);
        for (; i < n && positions[i] - first < kPiece<T>; ++i) {
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
    const size_t first = first_unit_[tensor], units = first_unit_[tensor + 1] - first;
    std::vector<uint64_t> start(units);  // the start of each unit's changes in the output
    for (size_t u = 1; u < units; ++u) start[u] = start[u - 1] + units_[first + u - 1].changed;
    parallel_for(units, workers_, [&](auto& worker, size_t u) {
        const Unit& unit = units_[first + u];
        int64_t* to = indices + start[u];
        uint8_t* out = values + start[u] * width;
        worker->with_changes(jobs_[tensor], unit, [&](size_t n, const uint32_t* positions, const uint8_t* from) {
            with_element(width, [&](auto element) {
                using T = decltype(element);
                ascending(positions, reinterpret_cast<const T*>(from), n, [&](uint32_t position, T value) {
                    *to++ = int64_t(unit.first + position);
                    std::memcpy(out, &value, sizeof(T));
                    out += sizeof(T);
                });
            });
        });
    });
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
        if (!unit.written) continue;  // in this case there may be no base
        put(jobs_[unit.job].base, unit.first, unit.written, unit.positions, unit.values);
        unit.written = 0;
    }
}

void Resolution::exchange() {
    parallel_for(units_.size(), workers_, [&](auto&, size_t u) {
        Unit& unit = units_[u];
        const ResolveJob& job = jobs_[unit.job];
        if (!job.write || !unit.changed) return;
        with_element(job.base.bytes, [&](auto element) {
            using T = decltype(element);
            swap_values(job.base, unit.first, unit.changed, unit.positions, reinterpret_cast<T*>(unit.values));
        });
        unit.written = unit.written ? 0 : unit.changed;
    });
}

void Resolution::compact() {
    for (auto& worker : workers_) worker->compact();
    for (Unit& unit : units_) unit.body = {};
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
    for (const auto& tensor : Resolution(threads, 0, false, kernels).add(std::move(resolve))) out.push_back(tensor.before);
    return out;
}

}  // namespace deltawire
