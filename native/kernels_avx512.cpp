// AVX-512 with VBMI, VBMI2, VNNI, VPOPCNTDQ and GFNI: Ice Lake, Zen 4 and later.
#include "kernels_x86.hpp"

namespace deltawire {
namespace {

// Index vectors that gather one byte of every 8 (or of 64 elements) and reverse the order within each 8, as the bit-matrix product requires.
struct alignas(64) Bytes {
    uint8_t at[64];
};
template <class F>
constexpr Bytes make_bytes(F f) {
    Bytes b{};
    for (unsigned i = 0; i < 64; ++i) b.at[i] = uint8_t(f(i));
    return b;
}
constexpr unsigned reversed(unsigned i) { return (i & ~7u) | (7 - (i & 7)); }
constexpr Bytes kReverse8 = make_bytes([](unsigned i) { return reversed(i); });
constexpr Bytes kEvenBytes = make_bytes([](unsigned i) { return 2 * reversed(i); });
constexpr Bytes kFourthBytes = make_bytes([](unsigned i) { return 4 * reversed(i & 31); });
constexpr Bytes kWords = make_bytes([](unsigned i) { return i % 2 ? 0 : 4 * (i / 2 % 8) + 32 * (i / 16 % 2); });
// For each of eight contexts c: bit k of all contexts if bit k of c is set, else its complement.
constexpr Bytes plane_of(unsigned k) {
    return make_bytes([k](unsigned i) { return 8 * (i & 7) + (k == 3 || (i >> 3) >> k & 1 ? k : 4 + k); });
}
constexpr Bytes kPlane[4] = {plane_of(0), plane_of(1), plane_of(2), plane_of(3)};

inline __m512i load(const void* p) { return _mm512_loadu_si512(p); }
inline __m512i load(const Bytes& b) { return _mm512_load_si512(b.at); }

struct Avx512 : SingleBits {
    using Words = EightWords;

    struct Masks {
        __m512i low, high;  // contexts 0–7 and 8–15, a 64-bit mask each
        void keep(uint64_t valid) {
            const __m512i v = _mm512_set1_epi64(int64_t(valid));
            low = _mm512_and_si512(low, v);
            high = _mm512_and_si512(high, v);
        }
        void store(uint64_t* out) const {
            _mm512_storeu_si512(out, low);
            _mm512_storeu_si512(out + 8, high);
        }
    };

    // Masks whose bits are in reverse order within each byte. They can be counted as they are.
    struct ReversedMasks {
        Masks of;
        Masks ordered() const {
            const __m512i reverse = _mm512_set1_epi64(int64_t(0x8040201008040201u));
            return {_mm512_gf2p8affine_epi64_epi8(of.low, reverse, 0), _mm512_gf2p8affine_epi64_epi8(of.high, reverse, 0)};
        }
        void keep(uint64_t valid) {
            of = ordered();
            of.keep(valid);
            of = ordered();
        }
        void store(uint64_t* out) const { ordered().store(out); }
    };

    struct Counts {
        __m256i n;  // a piece holds fewer than 2^16 elements
        static Counts zero() { return {_mm256_setzero_si256()}; }
        void store(int64_t* out) const {
            _mm512_storeu_si512(out, _mm512_cvtepu16_epi64(_mm256_castsi256_si128(n)));
            _mm512_storeu_si512(out + 8, _mm512_cvtepu16_epi64(_mm256_extracti128_si256(n, 1)));
        }
        void store16(uint16_t* out) const { _mm256_storeu_si256((__m256i*)out, n); }
        void add(const Masks& m) {
            const __m512i both = _mm512_permutex2var_epi16(_mm512_popcnt_epi64(m.low), load(kWords), _mm512_popcnt_epi64(m.high));
            n = _mm256_add_epi16(n, _mm512_castsi512_si256(both));
        }
    };

    // Counts that are rarely stored.
    struct WideCounts {
        __m512i low, high;  // contexts 0–7 and 8–15
        static WideCounts zero() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
        void store(int64_t* out) const {
            _mm512_storeu_si512(out, low);
            _mm512_storeu_si512(out + 8, high);
        }
        void store16(uint16_t* out) const {
            _mm_storeu_si128((__m128i*)out, _mm512_cvtepi64_epi16(low));
            _mm_storeu_si128((__m128i*)(out + 8), _mm512_cvtepi64_epi16(high));
        }
        void add(const ReversedMasks& m) {
            low = _mm512_add_epi64(low, _mm512_popcnt_epi64(m.of.low));
            high = _mm512_add_epi64(high, _mm512_popcnt_epi64(m.of.high));
        }
    };
    // Those of masks that are stored for every group, or only for a few.
    template <bool always>
    using CountsOf = std::conditional_t<always, Counts, WideCounts>;

    // Sorts 64 elements into contexts. The constants of the rule stay in registers.
    class Sorter {
    public:
        explicit Sorter(const ContextRule& rule)
            : shift_(_mm_cvtsi32_si128(rule.shift)),
              mask_(_mm512_set1_epi8(char(rule.mask))),
              top_(_mm512_set1_epi8(char(rule.top))),
              least_(_mm512_set1_epi8(char(rule.top < int32_t(kContexts) ? 0 : rule.top - int32_t(kContexts - 1)))),
              marked_top_(_mm512_set1_epi8(char(rule.top + kMark))),
              rule_(rule) {}

        template <class T>
        Masks operator()(const T* elements) const { return sort(contexts(elements)); }
        // Returns masks that are stored for every group, or only for a few.
        template <bool always, class T>
        auto masks(const T* elements) const {
            if constexpr (always) return (*this)(elements);
            else return ReversedMasks{sort(contexts_of(_mm512_srl_epi16(load(elements), shift_)))};
        }

    private:
        static constexpr int kMark = 16;  // bit 4 of a context, which is set in all of them

        // Sorts marked contexts, with each 8 of them in reverse order.
        static Masks sort(__m512i marked) {
            // Transposes each 8×8 bits: byte k < 4 of a quadword then holds bit k of its 8 contexts, in order, and byte 4 + k its complement.
            const __m512i planes = _mm512_gf2p8affine_epi64_epi8(_mm512_set1_epi64(int64_t(0x1814121108040201u)), marked, 0);
            const auto plane = [&](unsigned k) { return _mm512_permutexvar_epi8(load(kPlane[k]), planes); };
            const __m512i x = _mm512_ternarylogic_epi64(plane(0), plane(1), plane(2), 0x80);  // and
            const __m512i top = plane(3);
            return {_mm512_andnot_si512(top, x), _mm512_and_si512(top, x)};
        }
        __m512i contexts_of(__m512i exponents) const {
            return _mm512_sub_epi8(marked_top_, _mm512_max_epu8(_mm512_min_epu8(_mm512_and_si512(exponents, mask_), top_), least_));
        }
        // Returns the marked contexts of 64 elements as bytes, with each 8 of them in reverse order.
        template <class T>
        __m512i contexts(const T* elements) const {
            if constexpr (sizeof(T) < 8) return contexts_of(exponents(elements));
            alignas(64) uint8_t bytes[kGroup];
            const __m512i mask = _mm512_set1_epi64(rule_.mask), top = _mm512_set1_epi64(rule_.top);
            for (unsigned i = 0; i < kGroup; i += 8) {
                const __m512i e = _mm512_and_si512(_mm512_srl_epi64(load(elements + i), shift_), mask);
                const __m512i d = _mm512_max_epi64(_mm512_sub_epi64(top, e), _mm512_setzero_si512());
                _mm_storel_epi64((__m128i*)(bytes + i), _mm512_cvtepi64_epi8(_mm512_min_epi64(d, _mm512_set1_epi64(kContexts - 1))));
            }
            return _mm512_permutexvar_epi8(load(kReverse8), _mm512_or_si512(load(bytes), _mm512_set1_epi8(kMark)));
        }
        // Returns the low bytes of the shifted elements.
        __m512i exponents(const uint8_t* p) const { return _mm512_permutexvar_epi8(load(kReverse8), _mm512_srl_epi16(load(p), shift_)); }
        __m512i exponents(const uint16_t* p) const {
            return _mm512_permutex2var_epi8(_mm512_srl_epi16(load(p), shift_), load(kEvenBytes), _mm512_srl_epi16(load(p + 32), shift_));
        }
        __m512i exponents(const uint32_t* p) const {
            const auto half = [&](const uint32_t* q) {
                return _mm512_castsi512_si256(_mm512_permutex2var_epi8(_mm512_srl_epi32(load(q), shift_), load(kFourthBytes),
                                                                       _mm512_srl_epi32(load(q + 16), shift_)));
            };
            return _mm512_inserti64x4(_mm512_castsi256_si512(half(p)), half(p + 32), 1);
        }

        __m128i shift_;
        __m512i mask_, top_, least_, marked_top_;
        ContextRule rule_;
    };

    static uint64_t differ(const uint8_t* a, const uint8_t* b) { return _mm512_cmpneq_epu8_mask(load(a), load(b)); }
    static uint64_t differ(const uint16_t* a, const uint16_t* b) {
        return _mm512_cmpneq_epu16_mask(load(a), load(b)) | uint64_t(_mm512_cmpneq_epu16_mask(load(a + 32), load(b + 32))) << 32;
    }
    static uint64_t differ(const uint32_t* a, const uint32_t* b) {
        uint64_t m = 0;
        for (unsigned i = 0; i < 4; ++i) m |= uint64_t(_mm512_cmpneq_epu32_mask(load(a + 16 * i), load(b + 16 * i))) << 16 * i;
        return m;
    }
    static uint64_t differ(const uint64_t* a, const uint64_t* b) {
        uint64_t m = 0;
        for (unsigned i = 0; i < 8; ++i) m |= uint64_t(_mm512_cmpneq_epu64_mask(load(a + 8 * i), load(b + 8 * i))) << 8 * i;
        return m;
    }

    // Writes the targets below `limit`, minus `seen`, to `out`, and returns how many there are.
    static uint32_t take(const uint32_t* targets, uint32_t seen, uint32_t limit, uint16_t* out) {
        for (uint32_t n = 0;; n += 16) {
            const __m512i t = load(targets + n);
            const __mmask16 below = _mm512_cmplt_epu32_mask(t, _mm512_set1_epi32(int32_t(limit)));
            _mm256_storeu_si256((__m256i*)(out + n), _mm512_cvtepi32_epi16(_mm512_sub_epi32(t, _mm512_set1_epi32(int32_t(seen)))));
            if (below != 0xffff) return n + unsigned(std::countr_one(uint32_t(below)));  // entries after kNoTarget belong to another list
        }
    }

    static RiceSums rice_sums(const uint32_t* values, size_t n, unsigned k) {
        const __m512i limit = _mm512_set1_epi32(16);
        const __m128i shift = _mm_cvtsi32_si128(int(k));
        __m512i sums = _mm512_setzero_si512();  // no lane overflows, because there are at most 2^15 values of at most 16
        uint64_t escapes = 0;
        for (size_t i = 0; i < n; i += 16) {
            const __mmask16 lanes = n - i >= 16 ? __mmask16(0xffff) : __mmask16((1u << (n - i)) - 1);
            const __m512i q = _mm512_min_epu32(_mm512_srl_epi32(_mm512_maskz_loadu_epi32(lanes, values + i), shift), limit);
            sums = _mm512_add_epi32(sums, q);
            escapes += unsigned(_mm_popcnt_u32(_mm512_cmpeq_epi32_mask(q, limit)));
        }
        return {uint64_t(uint32_t(_mm512_reduce_add_epi32(sums))), escapes};
    }

    class Digest {
    public:
        void add(const void* block, const Multipliers& multipliers) {
            const auto* const table = factors();
            __m512i sum[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
#pragma GCC unroll 8
            for (unsigned v = 0; v < kDigestBlock / 32; ++v) {
                const __m512i x = load(static_cast<const uint8_t*>(block) + 64 * v);
                for (unsigned j = 0; j < 4; ++j) sum[j] = _mm512_dpwssd_epi32(sum[j], x, _mm512_load_si512(&table[j][32 * v]));
            }
            add_sums(sum, multipliers);
        }
        // Adds two blocks, and loads the table once.
        void add_two(const void* blocks, const Multipliers* multipliers) {
            const auto* const table = factors();
            const __m512i zero = _mm512_setzero_si512();
            __m512i sum[2][4] = {{zero, zero, zero, zero}, {zero, zero, zero, zero}};
#pragma GCC unroll 8
            for (unsigned v = 0; v < kDigestBlock / 32; ++v) {
                const auto* const at = static_cast<const uint8_t*>(blocks) + 64 * v;
                const __m512i x = load(at), y = load(at + 2 * kDigestBlock);
                for (unsigned j = 0; j < 4; ++j) {
                    const __m512i lane = _mm512_load_si512(&table[j][32 * v]);
                    sum[0][j] = _mm512_dpwssd_epi32(sum[0][j], x, lane);
                    sum[1][j] = _mm512_dpwssd_epi32(sum[1][j], y, lane);
                }
            }
            for (unsigned b = 0; b < 2; ++b) add_sums(sum[b], multipliers[b]);
        }
        void finish(Lanes& lanes) const {
            for (unsigned j = 0; j < 4; ++j) lanes[j] += uint32_t(_mm512_reduce_add_epi32(total_[j]));
        }

    private:
        // Returns the table in a way that hides it from the compiler, which would otherwise keep a part of it in the registers that `Sorter` needs.
        static const int16_t (*factors())[kDigestBlock] {
            const int16_t(*table)[kDigestBlock] = kDigestTable.by_lane;
            asm("" : "+r"(table));
            return table;
        }
        void add_sums(const __m512i (&sum)[4], const Multipliers& multipliers) {
            for (unsigned j = 0; j < 4; ++j)
                total_[j] = _mm512_add_epi32(total_[j], _mm512_mullo_epi32(sum[j], _mm512_set1_epi32(int32_t(multipliers.lane[j]))));
        }

        __m512i total_[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    };
};

}  // namespace

constinit const Kernels kAvx512Kernels = Kernel<Avx512>::table("avx512");

}  // namespace deltawire
