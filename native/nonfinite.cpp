// Compiled for speed: the bindings are compiled for size, and their loops are not vectors.
#include "nonfinite.hpp"

#include <algorithm>

namespace deltawire {

namespace {

// Signed numbers are compared, because more processors have vectors of those.
template <class T>
bool any_reaches(const T* elements, size_t count, T mask, T limit) {
    constexpr size_t step = 1 << 14;
    for (size_t start = 0; start < count; start += step) {
        T largest = 0;
        for (size_t i = start, end = std::min(count, start + step); i < end; ++i) largest = std::max(largest, T(elements[i] & mask));
        if (largest >= limit) return true;
    }
    return false;
}

}  // namespace

bool reaches(const void* data, size_t count, uint8_t bytes, uint64_t mask, uint64_t limit) {
    switch (bytes) {
        case 1: return any_reaches(static_cast<const uint8_t*>(data), count, uint8_t(mask), uint8_t(limit));
        case 2: return any_reaches(static_cast<const int16_t*>(data), count, int16_t(mask), int16_t(limit));
        case 4: return any_reaches(static_cast<const int32_t*>(data), count, int32_t(mask), int32_t(limit));
        default: return any_reaches(static_cast<const int64_t*>(data), count, int64_t(mask), int64_t(limit));
    }
}

}  // namespace deltawire
