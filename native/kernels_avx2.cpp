// AVX2, BMI1/2 and POPCNT: every Intel server since 2013, and AMD since Zen.
#include "kernels_x86.hpp"

namespace deltawire {
namespace {

struct Avx2 : OneByOne, SingleBits {
    using Words = FourWords;

    static __m256i load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
    // Narrows 16-bit lanes of at most 255 to bytes, in order.
    static __m256i pack(__m256i a, __m256i b) { return _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8); }

    // Sorts 64 elements into contexts. The constants of the rule stay in registers.
    class Sorter {
    public:
        explicit Sorter(const ContextRule& rule)
            : shift_(_mm_cvtsi32_si128(rule.shift)),
              mask8_(_mm256_set1_epi8(char(rule.mask))),
              mask16_(_mm256_set1_epi16(int16_t(rule.mask))),
              mask32_(_mm256_set1_epi32(int32_t(rule.mask))),
              top_(_mm256_set1_epi8(char(rule.top))),
              rule_(rule) {}

        template <class T>
        Masks operator()(const T* elements) const {
            const __m256i low = contexts(elements), high = contexts(elements + 32);
            uint64_t plane[4];
            const auto collect = [&](unsigned k, __m256i l, __m256i h) {
                plane[k] = uint32_t(_mm256_movemask_epi8(l)) | uint64_t(uint32_t(_mm256_movemask_epi8(h))) << 32;
            };
            // Bit k of every context moves to the sign bit of its byte.
            collect(0, _mm256_slli_epi16(low, 7), _mm256_slli_epi16(high, 7));
            collect(1, _mm256_slli_epi16(low, 6), _mm256_slli_epi16(high, 6));
            collect(2, _mm256_slli_epi16(low, 5), _mm256_slli_epi16(high, 5));
            collect(3, _mm256_slli_epi16(low, 4), _mm256_slli_epi16(high, 4));
            Masks m;
            uint64_t pair[4], quad[4];
            for (unsigned i = 0; i < 4; ++i) {
                pair[i] = (i & 1 ? plane[0] : ~plane[0]) & (i & 2 ? plane[1] : ~plane[1]);
                quad[i] = (i & 1 ? plane[2] : ~plane[2]) & (i & 2 ? plane[3] : ~plane[3]);
            }
            for (unsigned c = 0; c < kContexts; ++c) m.bits[c] = pair[c & 3] & quad[c >> 2];
            return m;
        }
        template <bool always, class T>
        Masks masks(const T* elements) const { return (*this)(elements); }

    private:
        // Returns the contexts of 32 elements as bytes.
        template <class T>
        __m256i contexts(const T* elements) const {
            if constexpr (sizeof(T) < 8)
                return _mm256_min_epu8(_mm256_subs_epu8(top_, exponents(elements)), _mm256_set1_epi8(kContexts - 1));
            alignas(32) uint8_t context[32];
            for (unsigned i = 0; i < 32; ++i) context[i] = uint8_t(rule_(elements[i]));
            return load(context);
        }
        __m256i exponents(const uint8_t* p) const { return _mm256_and_si256(_mm256_srl_epi16(load(p), shift_), mask8_); }
        __m256i exponents(const uint16_t* p) const {
            return pack(_mm256_and_si256(_mm256_srl_epi16(load(p), shift_), mask16_),
                        _mm256_and_si256(_mm256_srl_epi16(load(p + 16), shift_), mask16_));
        }
        __m256i exponents(const uint32_t* p) const {
            const auto lane = [&](unsigned i) { return _mm256_and_si256(_mm256_srl_epi32(load(p + 8 * i), shift_), mask32_); };
            const auto words = [&](unsigned i) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(lane(i), lane(i + 1)), 0xd8); };
            return pack(words(0), words(2));
        }

        __m128i shift_;
        __m256i mask8_, mask16_, mask32_, top_;
        ContextRule rule_;
    };

    static uint32_t equal32(const uint8_t* a, const uint8_t* b) {
        return uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(load(a), load(b))));
    }
    static uint32_t equal32(const uint16_t* a, const uint16_t* b) {
        const __m256i x = _mm256_cmpeq_epi16(load(a), load(b)), y = _mm256_cmpeq_epi16(load(a + 16), load(b + 16));
        return uint32_t(_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(x, y), 0xd8)));
    }
    static uint32_t equal32(const uint32_t* a, const uint32_t* b) {
        uint32_t m = 0;
        for (unsigned i = 0; i < 4; ++i)
            m |= uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(load(a + 8 * i), load(b + 8 * i))))) << 8 * i;
        return m;
    }
    static uint32_t equal32(const uint64_t* a, const uint64_t* b) {
        uint32_t m = 0;
        for (unsigned i = 0; i < 8; ++i)
            m |= uint32_t(_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(load(a + 4 * i), load(b + 4 * i))))) << 4 * i;
        return m;
    }
    template <class T>
    static uint64_t differ(const T* a, const T* b) {
        return ~(equal32(a, b) | uint64_t(equal32(a + 32, b + 32)) << 32);
    }

    static RiceSums rice_sums(const uint32_t* values, size_t n, unsigned k) {
        const __m256i limit = _mm256_set1_epi32(16);
        const __m128i shift = _mm_cvtsi32_si128(int(k));
        __m256i sums = _mm256_setzero_si256(), counts = sums;  // no lane overflows, because there are at most 2^15 values of at most 16
        size_t i = 0;
        for (; i + 8 <= n; i += 8) {
            const __m256i q = _mm256_min_epu32(_mm256_srl_epi32(load(values + i), shift), limit);
            sums = _mm256_add_epi32(sums, q);
            counts = _mm256_sub_epi32(counts, _mm256_cmpeq_epi32(q, limit));
        }
        alignas(32) uint32_t s[8], e[8];
        _mm256_store_si256((__m256i*)s, sums);
        _mm256_store_si256((__m256i*)e, counts);
        RiceSums out{0, 0};
        for (unsigned l = 0; l < 8; ++l) out.sum += s[l], out.escapes += e[l];
        for (; i < n; ++i) {
            const uint32_t q = values[i] >> k;
            out.sum += q < 16 ? q : 16;
            out.escapes += q >= 16;
        }
        return out;
    }

    class Digest {
    public:
        void add(const void* block, const Multipliers& multipliers) {
            __m256i sum[4] = {};
            for (unsigned v = 0; v < kDigestBlock / 16; ++v) {
                const __m256i x = load(static_cast<const uint8_t*>(block) + 32 * v);
                for (unsigned j = 0; j < 4; ++j)
                    sum[j] = _mm256_add_epi32(sum[j], _mm256_madd_epi16(x, load(&kDigestTable.by_lane[j][16 * v])));
            }
            for (unsigned j = 0; j < 4; ++j)
                total_[j] = _mm256_add_epi32(total_[j], _mm256_mullo_epi32(sum[j], _mm256_set1_epi32(int32_t(multipliers.lane[j]))));
        }
        void add_two(const void* blocks, const Multipliers* multipliers) {
            for (unsigned b = 0; b < 2; ++b) add(static_cast<const uint8_t*>(blocks) + 2 * kDigestBlock * b, multipliers[b]);
        }
        void finish(Lanes& lanes) const {
            for (unsigned j = 0; j < 4; ++j) {
                alignas(32) uint32_t parts[8];
                _mm256_store_si256((__m256i*)parts, total_[j]);
                for (const uint32_t part : parts) lanes[j] += part;
            }
        }

    private:
        __m256i total_[4] = {};
    };
};

}  // namespace

constinit const Kernels kAvx2Kernels = Kernel<Avx2>::table("avx2");

}  // namespace deltawire
