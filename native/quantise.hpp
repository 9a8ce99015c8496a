// Quantising weights (src/deltawire/quantise/reference.py defines it): scales from the largest values of blocks, and packed codes.
#pragma once

#include <span>

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

// Quantises many weights. Returns the number of a weight that has an element that is not finite, or `kAllFinite`; then codes and scales are undefined.
size_t quantise_weights(const QuantiseRule&, std::span<const QuantiseWeight>, unsigned threads, const QuantiseKernels&);

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
