// Bit streams, filled from the least significant bit of each byte upwards.
#pragma once

#include <cstring>

#include "types.hpp"

namespace deltawire {

constexpr uint64_t low_bits(uint64_t x, unsigned n) { return n >= 64 ? x : x & ((uint64_t(1) << n) - 1); }

// Writes to memory that the caller allocates: the encoder knows the length of a body before it writes it. The memory needs 8 bytes of slack.
class BitWriter {
public:
    explicit BitWriter(uint8_t* out) : out_(out) {}

    void put(uint64_t value, unsigned n) {  // n <= 56
        held_ |= value << fill_;
        fill_ += n;
        std::memcpy(out_, &held_, 8);
        const unsigned whole = fill_ & ~7u;
        out_ += whole >> 3;
        held_ >>= whole;
        fill_ &= 7;
    }
    void put_long(uint64_t value, unsigned n) {  // n <= 64
        if (n > 32) {
            put(value & 0xffffffffu, 32);
            value >>= 32;
            n -= 32;
        }
        put(value, n);
    }
    // Pads the last byte with zeros.
    uint8_t* finish() { return out_ + (fill_ ? 1 : 0); }

private:
    uint8_t* out_;
    uint64_t held_ = 0;
    unsigned fill_ = 0;
};

// Never reads outside the buffer. After its end there are zeros, and `overrun` reports it.
class BitReader {
public:
    BitReader(const uint8_t* data, size_t bytes) : data_(data), bytes_(bytes) {}

    uint64_t peek() const {  // at least 57 valid bits
        const size_t at = pos_ >> 3;
        uint64_t word = 0;
        if (at + 8 <= bytes_) [[likely]]
            std::memcpy(&word, data_ + at, 8);
        else if (at < bytes_)
            std::memcpy(&word, data_ + at, bytes_ - at);
        return word >> (pos_ & 7);
    }
    void skip(unsigned n) { pos_ += n; }
    uint64_t get(unsigned n) {  // n <= 57
        const uint64_t value = low_bits(peek(), n);
        pos_ += n;
        return value;
    }
    uint64_t get_long(unsigned n) {  // n <= 64
        if (n <= 32) return get(n);
        const uint64_t low = get(32);
        return low | get(n - 32) << 32;
    }
    bool overrun() const { return pos_ > bytes_ * 8; }
    // Tells whether only the zero padding of the last byte is left.
    bool at_end() const {
        if (overrun() || bytes_ * 8 - pos_ > 7) return false;
        return (pos_ & 7) == 0 || (data_[pos_ >> 3] >> (pos_ & 7)) == 0;
    }

private:
    const uint8_t* data_;
    size_t bytes_;
    size_t pos_ = 0;
};

// The limited Rice code LR(k, v) and the count code of docs/format.md §4.
inline constexpr unsigned kUnaryLimit = 16;

inline unsigned floor_log2(uint64_t x) { return 63u - unsigned(std::countl_zero(x)); }

inline unsigned count_bits(uint32_t n) { return n ? 5 + floor_log2(n) : 5; }

inline void put_count(BitWriter& out, uint32_t n) {
    const unsigned length = n ? floor_log2(n) + 1 : 0;
    out.put(length, 5);
    if (length > 1) out.put(low_bits(n, length - 1), length - 1);
}

inline uint32_t get_count(BitReader& in) {
    const unsigned length = unsigned(in.get(5));
    if (length > 16) throw Corrupt("a count is longer than 16 bits.");
    return length ? uint32_t(1) << (length - 1) | uint32_t(in.get(length - 1)) : 0;
}

inline void put_rice(BitWriter& out, unsigned k, uint64_t v) {
    const uint64_t q = v >> k;
    if (q < kUnaryLimit) [[likely]] {
        if (k <= 32) [[likely]] {
            out.put((low_bits(v, k) << 1 | 1) << q, unsigned(q) + 1 + k);
        } else {
            out.put(uint64_t(1) << q, unsigned(q) + 1);
            out.put_long(low_bits(v, k), k);
        }
        return;
    }
    const uint64_t x = q - (kUnaryLimit - 1);
    const unsigned b = floor_log2(x);
    out.put(uint64_t(b) << kUnaryLimit, kUnaryLimit + 6);
    out.put_long(low_bits(x, b), b);
    out.put_long(low_bits(v, k), k);
}

// Writes all codes, two at a time if two short codes fit into one write.
template <class Value>
inline void put_rices(BitWriter& out, unsigned k, const Value* values, size_t n) {
    size_t i = 0;
    if (k <= 12)
        for (; i + 2 <= n; i += 2) {
            const uint64_t a = values[i], b = values[i + 1], qa = a >> k, qb = b >> k;
            if ((qa | qb) >= kUnaryLimit) [[unlikely]] {
                put_rice(out, k, a);
                put_rice(out, k, b);
                continue;
            }
            const uint64_t first = (low_bits(a, k) << 1 | 1) << qa, second = (low_bits(b, k) << 1 | 1) << qb;
            const unsigned length = unsigned(qa) + 1 + k;
            out.put(first | second << length, length + unsigned(qb) + 1 + k);
        }
    for (; i < n; ++i) put_rice(out, k, values[i]);
}

inline uint64_t get_rice(BitReader& in, unsigned k) {
    const uint64_t window = in.peek();
    const unsigned q = unsigned(std::countr_zero(window | uint64_t(1) << kUnaryLimit));
    if (q < kUnaryLimit) [[likely]] {
        if (k <= 40) [[likely]] {
            in.skip(q + 1 + k);
            return uint64_t(q) << k | low_bits(window >> (q + 1), k);
        }
        in.skip(q + 1);
        const uint64_t low = in.get_long(k);
        if (k > 60 && q >> (64 - k)) throw Corrupt("a value is longer than 64 bits.");
        return uint64_t(q) << k | low;
    }
    in.skip(kUnaryLimit);
    const unsigned b = unsigned(in.get(6));
    const uint64_t x = uint64_t(1) << b | in.get_long(b);
    if (x > ~uint64_t(0) - kUnaryLimit) throw Corrupt("a value is longer than 64 bits.");
    const uint64_t quotient = x + (kUnaryLimit - 1);
    if (k && quotient >> (64 - k)) throw Corrupt("a value is longer than 64 bits.");
    return quotient << k | in.get_long(k);
}

// Reads n codes and passes each to `use`. Reads as many as surely fit from one window, because the next window depends on the length of the last code.
template <class Use>
inline void get_rices(BitReader& from, unsigned k, uint32_t n, Use use) {
    BitReader in = from;  // a copy, so that the compiler keeps it in registers
    const auto several = [&]<unsigned count>(uint32_t i) {
        for (; i + count <= n; i += count) {
            const uint64_t window = in.peek();
            unsigned used = 0;
            uint64_t values[count];
            bool all_short = true;
#pragma GCC unroll 3
            for (unsigned c = 0; c < count; ++c) {
                const uint64_t rest = window >> used;
                const unsigned q = unsigned(std::countr_zero(rest | uint64_t(1) << kUnaryLimit));
                all_short &= q < kUnaryLimit;
                values[c] = uint64_t(q) << k | low_bits(rest >> (q + 1), k);
                used += q + 1 + k;
            }
            if (!all_short) [[unlikely]] {
                for (unsigned c = 0; c < count; ++c) use(get_rice(in, k));
                continue;
            }
            in.skip(used);
#pragma GCC unroll 3
            for (unsigned c = 0; c < count; ++c) use(values[c]);
        }
        return i;
    };
    uint32_t i = 0;
    if (k <= 3) i = several.template operator()<3>(i);       // 3 × (16 + 3) = 57 bits
    else if (k <= 12) i = several.template operator()<2>(i);  // 2 × (16 + 12) = 56 bits
    for (; i < n; ++i) use(get_rice(in, k));
    from = in;
}

}  // namespace deltawire
