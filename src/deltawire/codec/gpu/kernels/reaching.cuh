// Finds tensors that have an element whose magnitude reaches a limit, in one pass over all of them. NVRTC compiles this at run time, on its own.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 THREADS = 256;
constexpr u32 VECTORS = 16;                          // that a thread reads of a unit, 16 bytes each
constexpr u32 UNIT = 16 * THREADS * VECTORS;         // bytes of a unit of work

// A tensor that begins at a multiple of 16 bytes. A word of 32 bits has one element, two or four, or the upper half of one.
struct Tensor {
    const u8* data;
    u64 bytes;
    u64 unit0;                                       // the number of its first unit of work
    u32 low;                                         // the bits of all elements of a word except the uppermost bit of each
    u32 add;                                         // added to these bits, it sets the uppermost bit of each element that reaches the limit
    u32 high;                                        // the uppermost bits
    u32 is_unsigned;                                 // whether only elements whose uppermost bit is set can reach the limit
    u32 is_wide;                                     // whether an element has two words, of which the upper one decides
    u32 unused;
};

__device__ __forceinline__ u32 reaches(const Tensor& x, u32 word) {
    const u32 sum = (word & x.low) + x.add;
    return x.is_unsigned ? sum & word : sum;
}

// Sets `found` of each tensor that has such an element.
extern "C" __global__ void __launch_bounds__(THREADS) find_reaching(const Tensor* tensors, u32 count, u64 units, u32* found) {
    for (u64 unit = blockIdx.x; unit < units; unit += gridDim.x) {
        u32 low = 0, high = count;
        while (high - low > 1) {
            const u32 middle = (low + high) / 2;
            if (tensors[middle].unit0 <= unit) low = middle;
            else high = middle;
        }
        const Tensor x = tensors[low];
        const u64 begin = (unit - x.unit0) * UNIT;
        u32 hits = 0;
#pragma unroll 8
        for (u32 i = 0; i < VECTORS; ++i) {
            const u64 at = begin + 16 * (i * THREADS + threadIdx.x);
            uint4 v = make_uint4(0, 0, 0, 0);
            if (at + 16 <= x.bytes) {
                v = *(const uint4*)(x.data + at);
            } else if (at < x.bytes) {
                u32 words[4] = {};
                for (u32 k = 0; k < x.bytes - at; ++k) words[k / 4] |= (u32)x.data[at + k] << (8 * (k % 4));
                v = make_uint4(words[0], words[1], words[2], words[3]);
            }
            hits |= reaches(x, v.y) | reaches(x, v.w);
            if (!x.is_wide) hits |= reaches(x, v.x) | reaches(x, v.z);
        }
        if (hits & x.high) found[low] = 1;
    }
}
