// Quantising weights (src/deltawire/quantise/reference.py defines it): scales from the largest values of blocks, and packed codes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "preparation.hpp"
#include "types.hpp"

namespace deltawire {

enum class Source : uint8_t { f32 = 0, bf16 = 1, f16 = 2 };
enum class Element : uint8_t { e4m3 = 0, e2m1 = 1, int4 = 2 };

inline constexpr unsigned kSourceBytes[] = {4, 2, 2};

// The part of a recipe that decides the bytes of codes and scales.
enum class RecipeKind : uint8_t { fp8_block = 0, fp8_block_ue8m0 = 1, fp8_channel = 2, fp8_tensor = 3, nvfp4 = 4, mxfp4 = 5, int4 = 6 };

struct QuantiseRule {
    RecipeKind kind;
    uint32_t group;  // the number of elements of a row that share a scale, for nvfp4, mxfp4 and int4; 0 for the others

    Element element() const {
        if (kind == RecipeKind::int4) return Element::int4;
        return kind == RecipeKind::nvfp4 || kind == RecipeKind::mxfp4 ? Element::e2m1 : Element::e4m3;
    }
    // Whether a quotient is rounded to the type of the weight before it becomes a code.
    bool rounds() const { return kind == RecipeKind::fp8_channel || kind == RecipeKind::fp8_tensor || kind == RecipeKind::mxfp4 || kind == RecipeKind::int4; }
    bool is_block() const { return kind == RecipeKind::fp8_block || kind == RecipeKind::fp8_block_ue8m0; }
    // Whether several weights share a scale that is one number.
    bool shares() const { return kind == RecipeKind::fp8_tensor || kind == RecipeKind::nvfp4; }
    // The number of scales in a row of the grid.
    uint32_t scales_in_row(uint32_t columns) const { return group ? columns / group : is_block() ? (columns + 127) / 128 : 1; }
    // The bytes of one published scale.
    unsigned scale_bytes(Source source) const {
        if (is_block()) return 4;
        return kind == RecipeKind::nvfp4 || kind == RecipeKind::mxfp4 ? 1 : kSourceBytes[unsigned(source)];
    }
    size_t code_bytes(size_t elements) const { return element() == Element::e4m3 ? elements : elements / 2; }
};

inline constexpr uint32_t kBlockRows = 128, kBlockColumns = 128;

// Rows of a weight. The elements of a row follow each other.
struct Rows {
    const uint8_t* data;
    int64_t stride;  // in bytes
    uint32_t rows, columns;
    Source source;
};

// Some rows of a weight, and where their scales and codes go.
struct QuantiseRows {
    Rows rows;
    uint8_t* codes;
    uint8_t* scales;          // of the first row, or the first row of blocks
    const uint8_t* previous;  // the scales of the version before; null for fresh ones
    float shared;             // the scale that is one number, for fp8-tensor and nvfp4
};

// One instruction set's functions. A largest value is the bits of a float32 without its sign; at least `kNotFinite` if it is infinite or NaN.
inline constexpr uint32_t kNotFinite = 0x7f800000;
struct QuantiseKernels {
    const char* name;
    // Chooses the scales of rows, writes scales and codes, and returns the largest value. It writes no codes of a block that is not finite.
    // For blocks, `rows` begins with a block.
    uint32_t (*quantise)(const QuantiseRule&, const QuantiseRows&);
    // Returns the largest value of `n` elements.
    uint32_t (*largest)(const void* elements, size_t n, Source);
    // Writes the largest value of each of `n` groups.
    void (*group_largest)(const void* elements, size_t n, uint32_t group, Source, float* out);
    // Writes the codes of `n` elements with one divisor.
    void (*codes)(const QuantiseRule&, const void* elements, size_t n, Source, float divisor, uint8_t* out);
    // Writes the codes of `n` groups.
    void (*group_codes)(const QuantiseRule&, const void* elements, size_t n, Source, const float* divisors, uint8_t* out);
};
extern const QuantiseKernels kScalarQuantise;
#if defined(DELTAWIRE_X86)
extern const QuantiseKernels kAvx2Quantise, kAvx512Quantise;
#endif
// Returns the functions for an instruction set of `available_kernels`.
const QuantiseKernels& quantise_kernels(const std::string& isa);

// A whole weight.
struct QuantiseWeight {
    Rows rows;
    uint8_t* codes;
    uint8_t* scales;
    float* global_scale;             // for nvfp4
    const uint8_t* previous;         // null for fresh scales; for fp8-tensor and nvfp4 only if all weights of the group have the same shared scale
    const float* previous_global;    // for nvfp4
    uint32_t group;                  // weights with equal numbers share a scale, if the recipe says so; below the number of weights
};

inline constexpr size_t kAllFinite = ~size_t(0);

// Quantises many weights: all of them at once by `finish`, or right before their codes are encoded. Encoding writes all scales; it writes codes only if
// they are kept. Afterwards `first_nonfinite` returns the number of a weight that has an element that is not finite, or `kAllFinite`. If there is one,
// codes and scales are undefined.
class Quantisation final : public Preparation {
public:
    Quantisation(const QuantiseRule&, std::vector<QuantiseWeight>, bool keeps_codes, const QuantiseKernels&);

    size_t find(const uint8_t* address) const override;  // of codes
    uint64_t unit_bytes(size_t number) const override;
    std::unique_ptr<Reader> reader() override;
    bool settle(unsigned threads) override;
    // Writes all codes and scales that are not written yet.
    void finish(unsigned threads);
    size_t first_nonfinite() const;

private:
    // Some rows of a weight, which are quantised together.
    struct Unit {
        uint32_t weight, number;
        bool operator==(const Unit&) const = default;
    };
    enum class Progress : uint8_t { none, begun, done };  // done: the scales of a unit are written, and its codes if they are kept
    class CodeReader;

    // Chooses the scales that are one number, and returns the units that are not quantised with the right one.
    std::vector<Unit> choose_shared_scales();
    std::vector<Unit> units_that(bool are_done) const;
    // Quantises rows; or only finds their largest value if that must be known before.
    void look_at(const Unit&, uint8_t* codes, uint8_t* scales);
    void quantise(const Unit&, uint8_t* codes, uint8_t* scales);
    void write(const std::vector<Unit>&, unsigned threads);
    // Calls `look_at` for memory of the tensors, unless that was done. Waits for another thread that does it.
    void make_in_place(const Unit&);
    uint8_t* codes_of(const Unit&) const;
    size_t scale_offset(const Unit&) const;  // in bytes
    size_t scale_bytes(const Unit&) const;
    Rows rows_of(const Unit&) const;
    std::atomic<Progress>& progress(const Unit& unit) { return progress_[first_unit_[unit.weight] + unit.number]; }

    QuantiseRule rule_;
    std::vector<QuantiseWeight> weights_;
    const QuantiseKernels& kernels_;
    std::vector<std::atomic<uint32_t>> largest_;
    std::vector<float> shared_;  // the scale that is one number: the previous one until `finish` has chosen
    std::vector<char> fresh_;    // whether a weight's shared scale is fresh; empty until it is chosen
    std::vector<uint32_t> unit_rows_;
    std::vector<size_t> first_unit_;
    std::vector<std::atomic<Progress>> progress_;  // by unit
    std::vector<std::pair<const uint8_t*, size_t>> by_address_;
    bool keeps_codes_, has_chosen_ = false, is_written_ = false;
    std::mutex mutex_;
    std::condition_variable done_;
};

// Writes the largest magnitude of every block of rows that begin at row `first_row` of a weight.
void block_maxima(const QuantiseRule&, const Rows&, uint32_t first_row, float* out, unsigned threads, const QuantiseKernels&);

// Writes the codes of rows that begin at row `first_row` of a weight. `divisors` has a row for each row of blocks that the rows are in.
void encode_codes(const QuantiseRule&, const Rows&, uint32_t first_row, const float* divisors, uint8_t* codes, unsigned threads, const QuantiseKernels&);

// How the scale that weights share is chosen.
struct SharedScale {
    float scale;    // what weights use: the scale of fp8-tensor, the global scale of nvfp4
    bool is_sticky; // whether it is the previous one
};
SharedScale choose_shared(const QuantiseRule&, Source, float largest, const float* previous);

}  // namespace deltawire
