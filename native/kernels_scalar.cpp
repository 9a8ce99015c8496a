// Portable C++ for machines without AVX2, such as aarch64.
#include "kernels_impl.hpp"

namespace deltawire {
namespace {

struct Scalar : OneByOne {
    using Words = FourWords;

    struct Sorter {
        ContextRule rule;
        explicit Sorter(const ContextRule& r) : rule(r) {}

        template <class T>
        Masks operator()(const T* elements) const {
            uint8_t context[kGroup];
            for (unsigned i = 0; i < kGroup; ++i) context[i] = uint8_t(rule(elements[i]));
            Masks m;
            for (unsigned i = 0; i < kGroup; ++i) m.bits[context[i]] |= uint64_t(1) << i;
            return m;
        }
        template <bool always, class T>
        Masks masks(const T* elements) const { return (*this)(elements); }
    };

    template <class T>
    static uint64_t differ(const T* a, const T* b) {
        if (std::memcmp(a, b, kGroup * sizeof(T)) == 0) return 0;
        uint64_t mask = 0;
        for (unsigned i = 0; i < kGroup; ++i) mask |= uint64_t(a[i] != b[i]) << i;
        return mask;
    }

    static uint16_t* positions(uint64_t mask, uint16_t first, uint16_t* out) {
        for (; mask; mask &= mask - 1) *out++ = uint16_t(first + std::countr_zero(mask));
        return out;
    }

    // Returns the index of the n-th set bit.
    static unsigned select(uint64_t mask, unsigned n) {
        for (; n; --n) mask &= mask - 1;
        return unsigned(std::countr_zero(mask));
    }

    static RiceSums rice_sums(const uint32_t* values, size_t n, unsigned k) {
        uint64_t sum = 0, escapes = 0;
        for (size_t i = 0; i < n; ++i) {
            const uint32_t q = values[i] >> k;
            sum += q < 16 ? q : 16;
            escapes += q >= 16;
        }
        return {sum, escapes};
    }

    class Digest {
    public:
        void add(const void* block, const Multipliers& multipliers) {
            int16_t words[kDigestBlock];
            std::memcpy(words, block, sizeof words);
            for (unsigned j = 0; j < 4; ++j) {
                uint32_t sum = 0;
                for (unsigned i = 0; i < kDigestBlock; ++i) sum += uint32_t(int32_t(words[i]) * kDigestTable.by_lane[j][i]);
                total_[j] += multipliers.lane[j] * sum;
            }
        }
        void add_two(const void* blocks, const Multipliers* multipliers) {
            for (unsigned b = 0; b < 2; ++b) add(static_cast<const uint8_t*>(blocks) + 2 * kDigestBlock * b, multipliers[b]);
        }
        void finish(Lanes& lanes) const {
            for (unsigned j = 0; j < 4; ++j) lanes[j] += total_[j];
        }

    private:
        uint32_t total_[4] = {};
    };
};

}  // namespace

constinit const Kernels kScalarKernels = Kernel<Scalar>::table("scalar");

}  // namespace deltawire
