#include <algorithm>
#include <cstring>

#include "piece.hpp"

namespace deltawire {

uint8_t* View::at(uint64_t index) const {
    if (!layout) return data + index * bytes;
    uint8_t* p = data;
    for (size_t d = layout->shape.size(); d-- > 0;) {
        p += int64_t(index % layout->shape[d]) * layout->strides[d];
        index /= layout->shape[d];
    }
    return p;
}

void View::gather(uint64_t start, uint64_t n, uint8_t* out) const {
    if (!data) {
        std::memset(out, 0, n * bytes);
        return;
    }
    if (!layout) {
        std::memcpy(out, data + start * bytes, n * bytes);
        return;
    }
    const uint64_t row = layout->shape.back();
    const int64_t stride = layout->strides.back();
    while (n) {
        const uint64_t run = std::min(n, row - start % row);
        const uint8_t* p = at(start);
        with_bytes(bytes, [&](auto element) {
            for (uint64_t i = 0; i < run; ++i, p += stride, out += sizeof element) std::memcpy(out, p, sizeof element);
        });
        start += run;
        n -= run;
    }
}

}  // namespace deltawire
