// Finds weights that are NaN or infinite: they have the largest magnitudes of all bit patterns.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deltawire {

// Whether one of `count` elements of `bytes` bytes reaches `limit` under the mask.
bool reaches(const void* data, size_t count, uint8_t bytes, uint64_t mask, uint64_t limit);

}  // namespace deltawire
