// Quantises whole weights on a few threads.
#include "quantise.hpp"

#include <algorithm>

#include "exact_arithmetic.hpp"
#include "kernels.hpp"
#include "parallel.hpp"
#include "quantise_numbers.hpp"

namespace deltawire {

const QuantiseKernels& quantise_kernels(const std::string& isa) {
    for (const Kernels* k : available_kernels()) {
        if (isa != k->name) continue;
#if defined(DELTAWIRE_X86)
        const bool has_floats = __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        if (isa == kAvx512Quantise.name && has_floats) return kAvx512Quantise;
        if (isa == kAvx2Quantise.name && has_floats) return kAvx2Quantise;
#endif
        return kScalarQuantise;
    }
    throw std::invalid_argument("no such instruction set on this machine: " + isa);
}

namespace {

inline constexpr size_t kUnitBytes = 1 << 18;        // what a thread takes at a time of one weight
inline constexpr size_t kUnitBytesOfMany = 1 << 20;  // the same if there are many weights

// Returns how many rows of a weight a thread takes at a time.
uint32_t unit_rows(const QuantiseRule& rule, const Rows& all) {
    if (rule.is_block()) return kBlockRows;
    const size_t row_bytes = std::max<size_t>(1, size_t(all.columns) * kSourceBytes[unsigned(all.source)]);
    return uint32_t(std::clamp<size_t>(kUnitBytesOfMany / row_bytes, 1, all.rows ? all.rows : 1));
}

Rows rows_from(const Rows& all, uint32_t first, uint32_t rows) { return {all.data + int64_t(first) * all.stride, all.stride, rows, all.columns, all.source}; }

template <class Work>
void run_units(size_t n, unsigned threads, Work work) {
    std::vector<char> workers(std::max(1u, threads));
    parallel_for(n, workers, [&](char&, size_t i) {
        const ExactArithmetic exact;
        work(i);
    });
}

void raise_to(std::atomic<uint32_t>& largest, uint32_t found) {
    uint32_t before = largest.load(std::memory_order_relaxed);
    while (before < found && !largest.compare_exchange_weak(before, found, std::memory_order_relaxed)) {
    }
}

float read_scale(const uint8_t* at, Source source) {
    uint32_t wide = 0;
    std::memcpy(&wide, at, kSourceBytes[unsigned(source)]);
    return source == Source::f32 ? std::bit_cast<float>(wide) : source == Source::bf16 ? from_bf16(uint16_t(wide)) : from_f16(uint16_t(wide));
}

// Returns the previous scale that is one number, or 0.
float previous_shared(const QuantiseRule& rule, const QuantiseWeight& weight) {
    if (!rule.shares() || !weight.previous) return 0;
    if (rule.kind == RecipeKind::nvfp4) return weight.previous_global ? *weight.previous_global : 0;
    return read_scale(weight.previous, weight.rows.source);
}

void write_shared(const QuantiseRule& rule, const QuantiseWeight& weight, float scale) {
    const Source source = weight.rows.source;
    if (rule.kind == RecipeKind::nvfp4) *weight.global_scale = scale;
    else if (source == Source::f32) std::memcpy(weight.scales, &scale, 4);
    else {
        const uint16_t stored = source == Source::bf16 ? to_bf16(scale) : to_f16(scale);
        std::memcpy(weight.scales, &stored, 2);
    }
}

template <Source S>
SharedScale choose_shared_as(const QuantiseRule& rule, float largest, const float* previous) {
    const bool is_global = rule.kind == RecipeKind::nvfp4;
    const float fresh = is_global ? fresh_global<S>(largest) : fresh_plain<S, Element::e4m3>(largest);
    const bool stays = previous && (is_global ? stays_global<S>(largest, *previous, fresh) : stays_plain<S, Element::e4m3>(largest, *previous, fresh));
    return {stays ? *previous : fresh, stays};
}

}  // namespace

SharedScale choose_shared(const QuantiseRule& rule, Source source, float largest, const float* previous) {
    if (source == Source::f32) return choose_shared_as<Source::f32>(rule, largest, previous);
    return source == Source::bf16 ? choose_shared_as<Source::bf16>(rule, largest, previous) : choose_shared_as<Source::f16>(rule, largest, previous);
}

Quantisation::Quantisation(const QuantiseRule& rule, std::vector<QuantiseWeight> weights, bool keeps_codes, const QuantiseKernels& kernels)
    : rule_(rule),
      weights_(std::move(weights)),
      kernels_(kernels),
      largest_(weights_.size()),
      shared_(weights_.size()),
      keeps_codes_(keeps_codes),
      has_chosen_(!rule.shares()) {
    size_t units = 0;
    for (size_t w = 0; w < weights_.size(); ++w) {
        const QuantiseWeight& weight = weights_[w];
        const uint32_t rows = unit_rows(rule_, weight.rows);
        first_unit_.push_back(units);
        unit_rows_.push_back(rows);
        units += (size_t(weight.rows.rows) + rows - 1) / rows;
        shared_[w] = previous_shared(rule_, weight);
        by_address_.emplace_back(weight.codes, w);
    }
    first_unit_.push_back(units);
    progress_ = std::vector<std::atomic<Progress>>(units);
    std::sort(by_address_.begin(), by_address_.end());
}

size_t Quantisation::find(const uint8_t* address) const {
    const auto at = std::lower_bound(by_address_.begin(), by_address_.end(), std::pair<const uint8_t*, size_t>(address, 0));
    return at != by_address_.end() && at->first == address ? at->second : kNone;
}

uint64_t Quantisation::unit_bytes(size_t number) const {
    const Rows& all = weights_[number].rows;
    return rule_.code_bytes(size_t(std::min(unit_rows_[number], all.rows)) * all.columns);
}

// Memory that begins with a cache line, because loads and stores across lines are slow.
class AlignedBytes {
public:
    // Has at least this many bytes. Their contents are undefined.
    void reserve(size_t bytes) {
        if (bytes <= size_) return;
        bytes_.reset(new (std::align_val_t(64)) uint8_t[bytes]);
        size_ = bytes;
    }
    uint8_t* data() { return bytes_.get(); }

private:
    struct Free {
        void operator()(uint8_t* p) const { ::operator delete[](p, std::align_val_t(64)); }
    };
    std::unique_ptr<uint8_t[], Free> bytes_;
    size_t size_ = 0;
};

// Makes codes in memory of its own, unless they are kept.
class Quantisation::CodeReader final : public Reader {
public:
    explicit CodeReader(Quantisation& of) : of_(of) {}

    const uint8_t* read(size_t number, uint64_t first_byte, uint32_t bytes) override {
        const QuantiseWeight& weight = of_.weights_[number];
        if (of_.is_written_) return weight.codes + first_byte;
        const uint64_t unit = of_.rule_.code_bytes(uint64_t(of_.unit_rows_[number]) * weight.rows.columns);
        const auto from = uint32_t(first_byte / unit), to = uint32_t((first_byte + bytes - 1) / unit);
        const auto weight_number = uint32_t(number);
        if (of_.keeps_codes_) {
            for (uint32_t u = from; u <= to; ++u) of_.make_in_place({weight_number, u});
            return weight.codes + first_byte;
        }
        if (from == to) return codes({weight_number, from}) + first_byte % unit;
        for (uint32_t done = 0; done < bytes;) {  // across units
            const uint64_t at = first_byte + done, left = unit - at % unit;
            const auto n = uint32_t(std::min<uint64_t>(left, bytes - done));
            std::memcpy(piece_.data() + done, codes({weight_number, uint32_t(at / unit)}) + at % unit, n);
            done += n;
        }
        return piece_.data();
    }

private:
    const uint8_t* codes(const Unit& unit) {
        if (unit == unit_) return codes_.data();
        codes_.reserve(of_.unit_bytes(unit.weight) + kSlack);
        // The first thread that quantises the unit writes its scales.
        Progress seen = Progress::none;
        const bool is_first = of_.progress(unit).compare_exchange_strong(seen, Progress::done);
        uint8_t* scales = of_.weights_[unit.weight].scales + of_.scale_offset(unit);
        if (!is_first) {
            scales_.resize(std::max<size_t>(scales_.size(), of_.scale_bytes(unit)));
            scales = scales_.data();
        }
        const ExactArithmetic exact;
        of_.look_at(unit, codes_.data(), scales);
        unit_ = unit;
        return codes_.data();
    }

    static constexpr size_t kSlack = 1 << 15;  // the encoder prefetches beyond what it reads, which would be slow if there were no memory

    Quantisation& of_;
    Unit unit_{~uint32_t(0), 0};  // whose codes are in `codes_`
    AlignedBytes codes_;
    std::vector<uint8_t> scales_;
    std::array<uint8_t, kPieceBytes> piece_;
};

std::unique_ptr<Preparation::Reader> Quantisation::reader() { return std::make_unique<CodeReader>(*this); }

bool Quantisation::settle(unsigned threads) {
    if (is_written_ || first_nonfinite() != kAllFinite) return false;
    const bool is_first = !has_chosen_;
    if (!units_that(false).empty()) {  // the readers did not come across them
        finish(threads);
        return is_first;
    }
    if (!has_chosen_) {
        const std::vector<Unit> again = choose_shared_scales();
        if (keeps_codes_) write(again, threads);
        else for (const Unit& unit : again) progress(unit).store(Progress::none);
        if (!again.empty()) {
            is_written_ = keeps_codes_;
            return true;
        }
    }
    is_written_ = keeps_codes_;
    return false;
}

void Quantisation::finish(unsigned threads) {
    if (is_written_) return;
    std::vector<Unit> left = units_that(false);
    if (!keeps_codes_) {
        const std::vector<Unit> done = units_that(true);
        left.insert(left.end(), done.begin(), done.end());
    }
    write(left, threads);
    if (first_nonfinite() != kAllFinite) return;
    if (!has_chosen_) write(choose_shared_scales(), threads);
    is_written_ = true;
}

size_t Quantisation::first_nonfinite() const {
    for (size_t w = 0; w < weights_.size(); ++w)
        if (largest_[w].load() >= kNotFinite) return w;
    return kAllFinite;
}

// Most shared scales stay, so codes are made with the previous ones in the same pass that finds the largest values. The others are made again.
std::vector<Quantisation::Unit> Quantisation::choose_shared_scales() {
    const ExactArithmetic exact;
    std::vector<uint32_t> of_group(weights_.size());
    for (size_t w = 0; w < weights_.size(); ++w) of_group[weights_[w].group] = std::max(of_group[weights_[w].group], largest_[w].load());
    std::vector<Unit> again;
    fresh_.resize(weights_.size());
    for (uint32_t w = 0; w < weights_.size(); ++w) {
        const QuantiseWeight& weight = weights_[w];
        const bool was_tried = is_scale(shared_[w]);
        const float* previous = weight.previous ? &shared_[w] : nullptr;
        const SharedScale found = choose_shared(rule_, weight.rows.source, std::bit_cast<float>(of_group[weight.group]), previous);
        fresh_[w] = !found.is_sticky;
        shared_[w] = found.scale;
        write_shared(rule_, weight, found.scale);
        if (found.is_sticky && was_tried) continue;
        for (uint32_t u = 0; u < first_unit_[w + 1] - first_unit_[w]; ++u) again.push_back({w, u});
    }
    has_chosen_ = true;
    return again;
}

std::vector<Quantisation::Unit> Quantisation::units_that(bool are_done) const {
    std::vector<Unit> found;
    for (uint32_t w = 0; w < weights_.size(); ++w)
        for (size_t u = first_unit_[w]; u < first_unit_[w + 1]; ++u)
            if ((progress_[u].load() == Progress::done) == are_done) found.push_back({w, uint32_t(u - first_unit_[w])});
    return found;
}

void Quantisation::look_at(const Unit& unit, uint8_t* codes, uint8_t* scales) {
    if (has_chosen_ || is_scale(shared_[unit.weight])) return quantise(unit, codes, scales);
    const Rows rows = rows_of(unit);
    uint32_t found = 0;
    for (uint32_t r = 0; r < rows.rows; ++r) found = std::max(found, kernels_.largest(rows.data + int64_t(r) * rows.stride, rows.columns, rows.source));
    raise_to(largest_[unit.weight], found);
}

void Quantisation::quantise(const Unit& unit, uint8_t* codes, uint8_t* scales) {
    const QuantiseWeight& weight = weights_[unit.weight];
    QuantiseRows job{rows_of(unit), codes, scales, nullptr, shared_[unit.weight]};
    // Scales of blocks are relative to the global scale: if that is fresh, so are they.
    if (rule_.kind != RecipeKind::fp8_tensor && weight.previous && (fresh_.empty() || !fresh_[unit.weight])) job.previous = weight.previous + scale_offset(unit);
    raise_to(largest_[unit.weight], kernels_.quantise(rule_, job));
}

void Quantisation::write(const std::vector<Unit>& units, unsigned threads) {
    run_units(units.size(), threads, [&](size_t i) {
        const Unit& unit = units[i];
        look_at(unit, codes_of(unit), weights_[unit.weight].scales + scale_offset(unit));
        progress(unit).store(Progress::done);
    });
}

void Quantisation::make_in_place(const Unit& unit) {
    std::atomic<Progress>& now = progress(unit);
    Progress seen = now.load(std::memory_order_acquire);
    if (seen == Progress::done) return;
    if (seen == Progress::none && now.compare_exchange_strong(seen, Progress::begun)) {
        const ExactArithmetic exact;
        look_at(unit, codes_of(unit), weights_[unit.weight].scales + scale_offset(unit));
        {
            const std::scoped_lock lock(mutex_);
            now.store(Progress::done, std::memory_order_release);
        }
        done_.notify_all();
    } else {
        std::unique_lock lock(mutex_);
        done_.wait(lock, [&] { return now.load(std::memory_order_acquire) == Progress::done; });
    }
}

uint8_t* Quantisation::codes_of(const Unit& unit) const {
    const QuantiseWeight& weight = weights_[unit.weight];
    return weight.codes + rule_.code_bytes(size_t(unit.number) * unit_rows_[unit.weight] * weight.rows.columns);
}

size_t Quantisation::scale_offset(const Unit& unit) const {
    const Rows& all = weights_[unit.weight].rows;
    if (rule_.kind == RecipeKind::fp8_tensor) return 0;
    const size_t grid_row = size_t(unit.number) * (rule_.is_block() ? 1 : unit_rows_[unit.weight]);
    return grid_row * rule_.scales_in_row(all.columns) * rule_.scale_bytes(all.source);
}

size_t Quantisation::scale_bytes(const Unit& unit) const {
    const Rows rows = rows_of(unit);
    return size_t(rule_.is_block() ? 1 : rows.rows) * rule_.scales_in_row(rows.columns) * rule_.scale_bytes(rows.source);
}

Rows Quantisation::rows_of(const Unit& unit) const {
    const Rows& all = weights_[unit.weight].rows;
    const uint32_t first = unit.number * unit_rows_[unit.weight];
    return rows_from(all, first, std::min(unit_rows_[unit.weight], all.rows - first));
}

void block_maxima(const QuantiseRule& rule, const Rows& all, uint32_t first_row, float* out, unsigned threads, const QuantiseKernels& kernels) {
    const uint32_t width = rule.scales_in_row(all.columns);
    if (rule.is_block()) {
        const uint32_t offset = first_row % kBlockRows, strips = all.rows ? (offset + all.rows + kBlockRows - 1) / kBlockRows : 0;
        run_units(strips, threads, [&](size_t strip) {
            const uint32_t from = strip ? uint32_t(strip) * kBlockRows - offset : 0, to = std::min<uint32_t>(all.rows, uint32_t(strip + 1) * kBlockRows - offset);
            float* maxima = out + strip * width;
            std::fill(maxima, maxima + width, 0.0f);
            for (uint32_t r = from; r < to; ++r)
                for (uint32_t b = 0; b < width; ++b) {
                    const uint32_t first = b * kBlockColumns;
                    const uint32_t found = kernels.largest(all.data + int64_t(r) * all.stride + size_t(first) * kSourceBytes[unsigned(all.source)],
                                                           std::min(kBlockColumns, all.columns - first), all.source);
                    maxima[b] = std::bit_cast<float>(std::max(std::bit_cast<uint32_t>(maxima[b]), found));
                }
        });
        return;
    }
    const size_t row_bytes = std::max<size_t>(1, size_t(all.columns) * kSourceBytes[unsigned(all.source)]);
    const uint32_t rows = uint32_t(std::max<size_t>(1, kUnitBytes / row_bytes)), units = (all.rows + rows - 1) / rows;
    std::atomic<uint32_t> largest{0};
    run_units(units, threads, [&](size_t unit) {
        for (uint32_t r = uint32_t(unit) * rows; r < std::min<size_t>(all.rows, (unit + 1) * rows); ++r) {
            const uint8_t* row = all.data + int64_t(r) * all.stride;
            if (rule.group) kernels.group_largest(row, width, rule.group, all.source, out + size_t(r) * width);
            else if (rule.kind == RecipeKind::fp8_channel) out[r] = std::bit_cast<float>(kernels.largest(row, all.columns, all.source));
            else raise_to(largest, kernels.largest(row, all.columns, all.source));
        }
    });
    if (rule.kind == RecipeKind::fp8_tensor) out[0] = std::bit_cast<float>(largest.load());
}

void encode_codes(const QuantiseRule& rule, const Rows& all, uint32_t first_row, const float* divisors, uint8_t* codes, unsigned threads,
                  const QuantiseKernels& kernels) {
    const uint32_t width = rule.scales_in_row(all.columns), offset = rule.is_block() ? first_row % kBlockRows : 0;
    const size_t bytes = kSourceBytes[unsigned(all.source)], row_bytes = std::max<size_t>(1, size_t(all.columns) * bytes);
    const uint32_t rows = uint32_t(std::max<size_t>(1, kUnitBytes / row_bytes)), units = (all.rows + rows - 1) / rows;
    run_units(units, threads, [&](size_t unit) {
        for (uint32_t r = uint32_t(unit) * rows; r < std::min<size_t>(all.rows, (unit + 1) * rows); ++r) {
            const uint8_t* row = all.data + int64_t(r) * all.stride;
            uint8_t* out = codes + rule.code_bytes(size_t(r) * all.columns);
            if (rule.group) kernels.group_codes(rule, row, width, all.source, divisors + size_t(r) * width, out);
            else if (rule.is_block())
                for (uint32_t b = 0; b < width; ++b) {
                    const uint32_t first = b * kBlockColumns;
                    kernels.codes(rule, row + first * bytes, std::min(kBlockColumns, all.columns - first), all.source,
                                  divisors[size_t(offset + r) / kBlockRows * width + b], out + first);
                }
            else kernels.codes(rule, row, all.columns, all.source, divisors[rule.kind == RecipeKind::fp8_tensor ? 0 : r], out);
        }
    });
}

}  // namespace deltawire
