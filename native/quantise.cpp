// Quantises whole weights on a few threads.
#include "quantise.hpp"

#include <algorithm>
#include <cfenv>

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

// Rounds to nearest and keeps subnormal numbers, whatever the program has set, such as torch.set_flush_denormal.
class ExactArithmetic {
public:
    ExactArithmetic() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~ExactArithmetic() { std::fesetenv(&before_); }
    ExactArithmetic(const ExactArithmetic&) = delete;
    ExactArithmetic& operator=(const ExactArithmetic&) = delete;

private:
    std::fenv_t before_;
};

inline constexpr size_t kUnitBytes = 1 << 18;  // what a thread takes at a time

// Some rows of a weight.
struct Unit {
    uint32_t weight, first, rows;
};

std::vector<Unit> cut(const QuantiseRule& rule, std::span<const QuantiseWeight> weights, const std::vector<uint32_t>& chosen) {
    std::vector<Unit> units;
    for (const uint32_t w : chosen) {
        const Rows& all = weights[w].rows;
        const size_t row_bytes = std::max<size_t>(1, size_t(all.columns) * kSourceBytes[unsigned(all.source)]);
        const uint32_t rows = rule.is_block() ? kBlockRows : uint32_t(std::clamp<size_t>(kUnitBytes / row_bytes, 1, all.rows ? all.rows : 1));
        for (uint32_t first = 0; first < all.rows; first += rows) units.push_back({w, first, std::min(rows, all.rows - first)});
    }
    return units;
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

class Run {
public:
    Run(const QuantiseRule& rule, std::span<const QuantiseWeight> weights, unsigned threads, const QuantiseKernels& kernels)
        : rule_(rule), weights_(weights), threads_(threads), kernels_(kernels), largest_(weights.size()) {}

    size_t run() {
        std::vector<uint32_t> all(weights_.size());
        for (uint32_t w = 0; w < all.size(); ++w) all[w] = w;
        if (!rule_.shares()) {
            quantise(all, std::vector<float>(weights_.size()));
            return not_finite();
        }
        // Most shared scales stay, so codes are made with the previous ones in the same pass that finds the largest values. The others are made again.
        std::vector<float> previous(weights_.size());
        std::vector<uint32_t> tried, untried, again;
        const ExactArithmetic exact;
        for (const uint32_t w : all) {
            previous[w] = previous_of(weights_[w]);
            (is_scale(previous[w]) ? tried : untried).push_back(w);
        }
        quantise(tried, previous);
        find_largest(untried);
        if (const size_t w = not_finite(); w != kAllFinite) return w;
        std::vector<uint32_t> of_group(weights_.size());
        for (const uint32_t w : all) of_group[weights_[w].group] = std::max(of_group[weights_[w].group], largest_[w].load());
        std::vector<float> chosen(weights_.size());
        for (const uint32_t w : all) {
            const QuantiseWeight& weight = weights_[w];
            const float* old = weight.previous ? &previous[w] : nullptr;
            const SharedScale found = choose_shared(rule_, weight.rows.source, std::bit_cast<float>(of_group[weight.group]), old);
            chosen[w] = found.scale;
            if (!found.is_sticky || !is_scale(previous[w])) {
                again.push_back(w);
                fresh_.resize(weights_.size());
                fresh_[w] = !found.is_sticky;
            }
            write_shared(weight, found.scale);
        }
        quantise(again, chosen);
        return kAllFinite;
    }

private:
    float previous_of(const QuantiseWeight& weight) const {
        if (!weight.previous) return 0;
        if (rule_.kind == RecipeKind::nvfp4) return weight.previous_global ? *weight.previous_global : 0;
        return read_scale(weight.previous, weight.rows.source);
    }
    static float read_scale(const uint8_t* at, Source source) {
        uint32_t wide = 0;
        std::memcpy(&wide, at, kSourceBytes[unsigned(source)]);
        return source == Source::f32 ? std::bit_cast<float>(wide) : source == Source::bf16 ? from_bf16(uint16_t(wide)) : from_f16(uint16_t(wide));
    }
    void write_shared(const QuantiseWeight& weight, float scale) const {
        const Source source = weight.rows.source;
        if (rule_.kind == RecipeKind::nvfp4) *weight.global_scale = scale;
        else if (source == Source::f32) std::memcpy(weight.scales, &scale, 4);
        else {
            const uint16_t stored = source == Source::bf16 ? to_bf16(scale) : to_f16(scale);
            std::memcpy(weight.scales, &stored, 2);
        }
    }

    void quantise(const std::vector<uint32_t>& chosen, const std::vector<float>& shared) {
        const std::vector<Unit> units = cut(rule_, weights_, chosen);
        run_units(units.size(), threads_, [&](size_t i) {
            const Unit& unit = units[i];
            const QuantiseWeight& weight = weights_[unit.weight];
            const Rows& all = weight.rows;
            QuantiseRows job{rows_from(all, unit.first, unit.rows), weight.codes + rule_.code_bytes(size_t(unit.first) * all.columns), weight.scales, nullptr,
                             shared[unit.weight]};
            if (rule_.kind != RecipeKind::fp8_tensor) {
                const size_t grid_row = rule_.is_block() ? unit.first / kBlockRows : unit.first;
                const size_t offset = grid_row * rule_.scales_in_row(all.columns) * rule_.scale_bytes(all.source);
                job.scales += offset;
                // Scales of blocks are relative to the global scale: if that is fresh, so are they.
                if (weight.previous && (fresh_.empty() || !fresh_[unit.weight])) job.previous = weight.previous + offset;
            }
            raise_to(largest_[unit.weight], kernels_.quantise(rule_, job));
        });
    }

    void find_largest(const std::vector<uint32_t>& chosen) {
        const std::vector<Unit> units = cut(rule_, weights_, chosen);
        run_units(units.size(), threads_, [&](size_t i) {
            const Unit& unit = units[i];
            const Rows rows = rows_from(weights_[unit.weight].rows, unit.first, unit.rows);
            uint32_t found = 0;
            for (uint32_t r = 0; r < rows.rows; ++r) found = std::max(found, kernels_.largest(rows.data + int64_t(r) * rows.stride, rows.columns, rows.source));
            raise_to(largest_[unit.weight], found);
        });
    }

    size_t not_finite() const {
        for (size_t w = 0; w < weights_.size(); ++w)
            if (largest_[w].load() >= kNotFinite) return w;
        return kAllFinite;
    }

    const QuantiseRule& rule_;
    std::span<const QuantiseWeight> weights_;
    unsigned threads_;
    const QuantiseKernels& kernels_;
    std::vector<std::atomic<uint32_t>> largest_;
    std::vector<char> fresh_;  // whether a weight's shared scale is fresh; empty if all are sticky
};

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

size_t quantise_weights(const QuantiseRule& rule, std::span<const QuantiseWeight> weights, unsigned threads, const QuantiseKernels& kernels) {
    return Run(rule, weights, threads, kernels).run();
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
