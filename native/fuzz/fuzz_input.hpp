// The input of one execution of the fuzz target, and the limits of what it makes. A target includes the codec first.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace deltawire {
namespace {

#define REQUIRE(holds)                                                                     \
    do {                                                                                   \
        if (!(holds)) {                                                                    \
            std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #holds); \
            std::abort();                                                                  \
        }                                                                                  \
    } while (false)

constexpr ElementType kTypes[18] = {{0, 1, 8, 0, 0},    {1, 1, 8, 0, 0},    {2, 1, 8, 0, 0},  {3, 1, 8, 2, 5},  {4, 1, 8, 3, 4},   {5, 1, 8, 0, 0},
                                    {6, 2, 16, 0, 0},   {7, 2, 16, 0, 0},   {8, 2, 16, 10, 5}, {9, 2, 16, 7, 8}, {10, 4, 32, 0, 0}, {11, 4, 32, 0, 0},
                                    {12, 4, 32, 23, 8}, {13, 8, 64, 0, 0}, {14, 8, 64, 0, 0}, {15, 8, 64, 52, 11}, {16, 1, 4, 0, 3},  {17, 4, 4, 0, 0}};
constexpr size_t kMaxElements = 40960;
constexpr size_t kUnlimited = ~size_t(0) / 2;

// The bytes of one execution. After their end there are zeros.
class Input {
public:
    Input(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
    uint8_t byte() { return at_ < end_ ? *at_++ : 0; }
    uint32_t word() {
        const uint32_t low = byte();
        return low | uint32_t(byte()) << 8;
    }
    std::span<const uint8_t> rest() const { return {at_, end_}; }

private:
    const uint8_t *at_, *end_;
};

// A number that chooses what is checked in an execution.
uint64_t hash_of(std::span<const uint8_t> data) {
    uint64_t hash = data.size();
    for (const uint8_t byte : data) hash = (hash ^ byte) * 0x100000001b3u;
    return mix(hash);
}

class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t operator()() { return mix(state_ += kGolden); }
    uint64_t below(uint64_t n) { return n ? (*this)() % n : 0; }

private:
    uint64_t state_;
};

}  // namespace
}  // namespace deltawire
