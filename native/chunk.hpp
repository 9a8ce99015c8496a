// One coded chunk (docs/format.md §4): from collected changes to a body, and back. It does not depend on tensors or memory layout.
// Steps of 4-bit codes are held as signed bytes.
#pragma once

#include <memory>
#include <span>

#include "kernels.hpp"

namespace deltawire {

// Collects the changes of a chunk and writes its body. Its memory is of fixed size, and each thread has one.
template <class E>
class ChunkEncoder {
    using T = ValueOf<E>;

public:
    explicit ChunkEncoder(const Kernels& kernels);

    Collected<T>& collected() { return collected_; }
    // Starts a chunk of elements with this number of contexts.
    void reset(unsigned contexts);
    // Chooses all parameters (§5, rules 3–6) and returns the size of the body in bytes.
    size_t plan(uint32_t top);
    // Writes the planned body. `out` needs 8 bytes of slack.
    void write(uint8_t* out);

private:
    // The type of magnitudes in the cost functions.
    using Value = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
    struct Rice {
        unsigned k = 0;
        uint64_t bits = 0;
    };
    struct Plan {
        uint32_t n = 0, unchanged = 0, larger = 0;
        const uint32_t* gaps = nullptr;
        const T *steps = nullptr, *differing = nullptr;
        bool inverted = false;
        ValueMode mode = ValueMode::unit;
        unsigned k = 0, kr = 0, kv = 0;
        uint64_t position_bits = 0, value_bits = 0;  // including the parameters
    };

    Rice choose(const uint32_t* values, size_t n, unsigned largest) const;
    Rice choose(const uint64_t* values, size_t n, unsigned largest) const;
    void plan_positions(unsigned c, uint32_t total);
    void plan_values(unsigned c);
    uint64_t plan_symbols();
    uint32_t* fill_runs(unsigned c);
    size_t fill_larger(unsigned c, uint32_t* runs, Value* values) const;
    static T magnitude(T step) {
        const T negative = T(T(0) - T(step >> (sizeof(T) * 8 - 1)));
        return T((step ^ negative) - negative);
    }

    const Kernels& kernels_;
    unsigned contexts_ = 1;
    Collected<T> collected_;
    std::unique_ptr<Change<T>[]> changes_;
    std::unique_ptr<uint32_t[]> gaps_, runs_;  // gaps of all contexts, one after the other; runs of one context
    std::unique_ptr<T[]> steps_, differing_;
    std::unique_ptr<Value[]> values_;
    std::array<Plan, kContexts> plan_;
    std::array<uint8_t, 256> rank_of_symbol_;
    std::vector<uint8_t> table_;
    unsigned ks_ = 0;
    uint32_t top_ = 0;
};

// The facts of a body that `inspect` reports.
struct BodyFacts {
    std::array<uint64_t, 4> changes_by_mode{};
    std::array<uint64_t, 64> steps_by_length{};  // index: bit length of the magnitude, minus one
};

// Reads the streams of a body. Its memory is of fixed size, and each thread has one.
template <class E>
class ChunkDecoder {
    using T = ValueOf<E>;

public:
    ChunkDecoder();

    // Throws Corrupt if the body breaks a rule that can be checked without the base.
    void parse(std::span<const uint8_t> body, const ElementType& type, uint32_t elements);
    const ChunkChanges<T>& changes() const { return changes_; }
    uint32_t top() const { return top_; }
    uint32_t total() const { return total_; }
    // Throws Corrupt unless the walk over the whole chunk found every change that the body lists.
    void check_end(const Cursor&) const;
    void add_facts(BodyFacts&) const;

private:
    ChunkChanges<T> changes_;
    std::array<ValueMode, kContexts> modes_;
    uint32_t top_ = 0, total_ = 0;
    std::unique_ptr<uint32_t[]> targets_, scratch_;
    std::unique_ptr<T[]> operands_;
};

}  // namespace deltawire
