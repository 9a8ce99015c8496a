// Shared by all kernels: element types, the terms of docs/format.md §2 and §4, and the layout of a unit of 1024 elements in a warp.
// NVRTC compiles this at run time, once per element width: WIDTH is 4, 8, 16, 32 or 64. It needs no header of the CUDA toolkit.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;

#if WIDTH <= 8
typedef u8 T;  // 4-bit elements share bytes in memory, but each has a T of its own while it is processed
#elif WIDTH == 16
typedef u16 T;
#elif WIDTH == 32
typedef u32 T;
#else
typedef u64 T;
#endif

constexpr T MASK = (T)(~0ull >> (64 - WIDTH));  // all bits of an element
constexpr u32 CONTEXTS = 16;
constexpr u32 USED = WIDTH == 4 ? 8 : CONTEXTS;  // contexts that elements can have; all others are empty
constexpr u32 COUNTERS = USED / 2;               // words of 16-bit counters, one for each context
constexpr u32 TILE = 1 << 14;
constexpr u32 MOST_TILES = WIDTH == 4 ? 1 << 12 : WIDTH == 8 ? 1 << 11 : 1 << 10;  // of a block
constexpr u32 BLOCK = MOST_TILES * TILE;
constexpr u32 UNIT = 1 << 10;           // elements that a warp processes at a time
constexpr u32 UNITS = TILE / UNIT;
constexpr u32 RUN = 32;                 // consecutive elements of a lane
constexpr u32 ALL = 0xffffffffu;

// In shared memory a lane's run is a row. The 16 bytes between rows avoid bank conflicts for reads of 16 bytes; rows of 16 bytes have none.
constexpr u32 ROW = RUN * WIDTH / 8;
constexpr u32 STRIDE = WIDTH == 4 ? ROW : ROW + 16;
constexpr u32 PIECES = ROW / 16;
constexpr u32 STAGE = 32 * STRIDE;
constexpr u32 UNIT_BYTES = UNIT * WIDTH / 8, TILE_BYTES = TILE * WIDTH / 8;
constexpr u32 DIGEST_BLOCKS = UNIT_BYTES / 512;  // digest blocks (256 words each) in a unit

constexpr u32 SAME = 0, CODED = 1, RAW = 2;

struct Pair {
    T old, now;
};

__device__ __forceinline__ u64 bytes_of(u64 elements) { return elements * WIDTH / 8; }

// Returns an element of an array.
__device__ __forceinline__ T element_of(const u8* array, u64 i) {
#if WIDTH == 4
    return array[i >> 1] >> (4 * (i & 1)) & 15;
#else
    return ((const T*)array)[i];
#endif
}

// Says that elements are the scales, not the codes, and that they are those of the base; then the new elements are in `Tensor::base`.
constexpr u32 MAKES_SCALES = 1, MAKES_BASE = 2;

// Says how the weights of a tensor are quantised. See numbers.cuh.
struct Quantised {
    const u8* scales;         // null: they are not written
    const float* global_scale;
    // If scales are not written:
    const u8* previous;       // the scales of the version before, or null
    const u16* changed;       // for each 16,384 weights, which of the 16 units among them have a scale that is not the previous one
    const u32* fresh;         // whether previous scales do not count; null: they do
    u32 kind, group, columns;
    u32 source;               // the type of the weights
    u32 width;                // blocks in a row of blocks
    u32 flags;                // what the elements are: see above
};

// A tensor. Its tiles, and its elements, are numbered over all tensors of a call.
struct Tensor {
    const u8* base;  // null means zeros
    const u8* next;  // encoding only
    u64 seed;
    u64 count;
    u64 element0;    // number of its first element
    u32 tile0;       // number of its first tile
    u32 is_float32;  // encoding: whether `next` are master weights, which are rounded to bfloat16
    const Quantised* quantised;  // encoding: if it is not null, `next` are weights that are quantised like this
};

// Says how contexts follow from elements.
struct Coding {
    u32 top;
    u32 shift;       // position of the exponent
    u32 mask;        // mask of the exponent; 0 means a single context
};

// Tiles, of one or more tensors, that share one `top`: a block or a chunk.
struct Run {
    u64 body;        // chunks: offset of the body in the image
    u32 tile0, tiles;
    Coding coding;
    u32 elements;
    u32 start;       // chunks: number of the first change, over all chunks
    u32 mode;        // chunks
    u32 block;       // chunks: number of the block; ALL if it has tiles of two blocks
    u32 bytes;       // chunks: size of the body
};

struct Sums {
    u64 changed;
    u32 before[4], change[4];
};

// §2

constexpr u64 GOLDEN = 0x9E3779B97F4A7C15ull;

__device__ __forceinline__ u64 mix(u64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

__device__ __forceinline__ i32 word_factor(u32 word, u32 lane) {
    return (i32)(short)(u16)((mix(GOLDEN * (256 * lane + word + 1)) >> 48) | 1);
}

__device__ __forceinline__ uint4 block_factors(u64 seed, u64 block) {
    const u64 x = seed + GOLDEN * (2 * block + 1), a = mix(x), b = mix(x + GOLDEN);
    return make_uint4((u32)a | 1, (u32)(a >> 32) | 1, (u32)b | 1, (u32)(b >> 32) | 1);
}

// The factors of the eight words that a lane processes in each digest block. Bytes 0 and 1 are the low bytes of two factors, bytes 2 and 3 the high bytes.
struct WordFactors {
    u32 of[4][4];  // pair of words, digest lane
    __device__ __forceinline__ void load(u32 lane) {
#pragma unroll
        for (u32 q = 0; q < 4; ++q)
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const u32 a = (u32)word_factor(8 * lane + 2 * q, j), b = (u32)word_factor(8 * lane + 2 * q + 1, j);
                of[q][j] = (a & 0xff) | (b & 0xff) << 8 | (a >> 8 & 0xff) << 16 | (b >> 8 & 0xff) << 24;
            }
    }
};

// Multiply two signed words by the two low bytes of `factors` (unsigned) or by the two high bytes (signed), and add the products to `sum`.
#ifndef EMULATED
__device__ __forceinline__ i32 dot_low(u32 words, u32 factors, i32 sum) {
    i32 out;
    asm("dp2a.lo.s32.u32 %0, %1, %2, %3;" : "=r"(out) : "r"(words), "r"(factors), "r"(sum));
    return out;
}
__device__ __forceinline__ i32 dot_high(u32 words, u32 factors, i32 sum) {
    i32 out;
    asm("dp2a.hi.s32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(words), "r"(factors), "r"(sum));
    return out;
}
#endif

// Adds eight words of a digest block to `sums`.
__device__ __forceinline__ void digest_words(uint4 words, const WordFactors& t, uint4 m, u32 sums[4]) {
    const u32 w[4] = {words.x, words.y, words.z, words.w}, multiplier[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
        i32 low = 0, high = 0;
#pragma unroll
        for (u32 q = 0; q < 4; ++q) {
            low = dot_low(w[q], t.of[q][j], low);
            high = dot_high(w[q], t.of[q][j], high);
        }
        sums[j] += multiplier[j] * ((u32)low + ((u32)high << 8));
    }
}

// Adds the difference to the digest when one element of a unit changes from `old` to `now`.
__device__ __forceinline__ void digest_change(u32 element, T old, T now, const uint4* multipliers, const int4* factors, u32 sums[4]) {
    const auto word = [&](u32 at, u32 difference) {
        const uint4 m = multipliers[at >> 8];
        const int4 t = factors[at & 255];
        sums[0] += m.x * (u32)t.x * difference;
        sums[1] += m.y * (u32)t.y * difference;
        sums[2] += m.z * (u32)t.z * difference;
        sums[3] += m.w * (u32)t.w * difference;
    };
#if WIDTH == 4
    const u32 nibble = element & 3;  // the highest one of a word has the sign
    word(element >> 2, nibble == 3 ? (u32)(((i32)(now ^ 8) - (i32)(old ^ 8))) << 12 : (u32)((i32)now - (i32)old) << (4 * nibble));
#elif WIDTH == 8
    word(element >> 1, element & 1 ? (u32)((i32)(signed char)now - (i32)(signed char)old) << 8 : (u32)((i32)now - (i32)old));
#else
#pragma unroll
    for (u32 i = 0; i < WIDTH / 16; ++i)
        word(element * (WIDTH / 16) + i, (u32)((i32)(short)(u16)((u64)now >> (16 * i)) - (i32)(short)(u16)((u64)old >> (16 * i))));
#endif
}

// §4

__device__ __forceinline__ u32 context_of(T x, const Coding& s) {
    const i32 d = (i32)s.top - (i32)((u32)(x >> s.shift) & s.mask);
    return (u32)min(max(d, 0), (i32)CONTEXTS - 1);
}

__device__ __forceinline__ T ordered(T x, bool floating) {
    constexpr T top = (T)((T)1 << (WIDTH - 1));
    return floating ? (T)(x ^ (x & top ? MASK : top)) : x;
}
__device__ __forceinline__ T unordered(T x, bool floating) {
    constexpr T top = (T)((T)1 << (WIDTH - 1));
    return floating ? (T)(x ^ (x & top ? top : MASK)) : x;
}

// Rounds a float32 to bfloat16: to nearest, ties to even. All NaNs become the same bits.
__device__ __forceinline__ u32 rounded(u32 x) { return (x & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (x + 0x7fff + (x >> 16 & 1)) >> 16; }

__device__ __forceinline__ u32 bit_length(u64 x) { return 64 - __clzll(x); }
__device__ __forceinline__ u32 count_bits(u32 n) { return 5 + (n ? 31 - __clz(n) : 0); }

// The number of bits of LR(k, v).
__device__ __forceinline__ u32 rice_bits(u64 v, u32 k) {
    const u64 q = v >> k;
    return q < 16 ? (u32)q + 1 + k : 22 + k + 63 - __clzll(q - 15);
}
__device__ __forceinline__ u32 rice_bits(u32 v, u32 k) {
    const u32 q = v >> k;
    return q < 16 ? q + 1 + k : 22 + k + 31 - __clz(q - 15);
}

// The contexts of a lane's run as four bit planes, and which of its elements change. The order of bits is that of the arithmetic, not of
// the elements: `below`, `element_at` and `in_order` translate.
struct Planes {
    u32 bit[4];
    u32 changed;

    // The elements of the run that have this context.
    __device__ __forceinline__ u32 of_context(u32 c) const {
        return ~((bit[0] ^ (0 - (c & 1))) | (bit[1] ^ (0 - (c >> 1 & 1))) | (bit[2] ^ (0 - (c >> 2 & 1))) | (bit[3] ^ (0 - (c >> 3 & 1))));
    }
};

#if WIDTH == 4
// Element 8q + i is bit 4i + q.
__device__ __forceinline__ u32 below(u32 e) {
    const u32 q = e >> 3;
    return ((1u << q) - 1) * 0x11111111u | (0x11111111u << q & ((1u << (4 * (e & 7))) - 1));
}
__device__ __forceinline__ u32 element_at(u32 bit) { return (bit & 3) << 3 | bit >> 2; }
__device__ __forceinline__ u32 in_order(u32 x) {
    const auto swap = [](u32 x, u32 by, u32 which) {
        const u32 t = ((x >> by) ^ x) & which;
        return x ^ t ^ t << by;
    };
    return swap(swap(swap(swap(x, 14, 0x0000cccc), 7, 0x00aa00aa), 2, 0x0c0c0c0c), 1, 0x22222222);
}
#elif WIDTH == 16
// Element 2i + h is bit 16h + i.
__device__ __forceinline__ u32 below(u32 e) {
    const u32 m = (1u << (e >> 1)) - 1;
    return m | m << 16 | (e & 1) << (e >> 1);
}
__device__ __forceinline__ u32 element_at(u32 bit) { return (bit & 15) << 1 | bit >> 4; }
__device__ __forceinline__ u32 in_order(u32 x) {
    x = (x & 0xff0000ff) | (x >> 8 & 0x0000ff00) | (x << 8 & 0x00ff0000);
    x = (x & 0xf00ff00f) | (x >> 4 & 0x00f000f0) | (x << 4 & 0x0f000f00);
    x = (x & 0xc3c3c3c3) | (x >> 2 & 0x0c0c0c0c) | (x << 2 & 0x30303030);
    return (x & 0x99999999) | (x >> 1 & 0x22222222) | (x << 1 & 0x44444444);
}
#elif WIDTH == 8
// Element 4i + 2h + r is bit 16h + 2i + r.
__device__ __forceinline__ u32 below(u32 e) {
    const u32 at = e >> 2 << 1, m = (1u << at) - 1;
    return m | m << 16 | (e & 2 ? 3u << at : 0) | (e & 1 ? 1u << (at + (e & 2 ? 16 : 0)) : 0);
}
__device__ __forceinline__ u32 element_at(u32 bit) { return (bit & 14) << 1 | bit >> 4 << 1 | (bit & 1); }
__device__ __forceinline__ u32 in_order(u32 x) {
    x = (x & 0xff0000ff) | (x >> 8 & 0x0000ff00) | (x << 8 & 0x00ff0000);
    x = (x & 0xf00ff00f) | (x >> 4 & 0x00f000f0) | (x << 4 & 0x0f000f00);
    return (x & 0xc3c3c3c3) | (x >> 2 & 0x0c0c0c0c) | (x << 2 & 0x30303030);
}
#else
__device__ __forceinline__ u32 below(u32 e) { return (1u << e) - 1; }
__device__ __forceinline__ u32 element_at(u32 bit) { return bit; }
__device__ __forceinline__ u32 in_order(u32 x) { return x; }
#endif

// Computes two contexts at a time, from two exponents in the halves of a word.
__device__ __forceinline__ u32 two_contexts(u32 exponents, u32 top_and_one) {
    return __viaddmin_s16x2_relu(~exponents, top_and_one, 0x000f000f);
}

template <bool COMPARE>
__device__ __forceinline__ Planes planes_of(const u8* base, const u8* next, const Coding& s) {
#if WIDTH == 4
    // The exponents of all elements, one plane for each of their three bits.
    const uint4 b = *(const uint4*)base;
    const u32 words[4] = {b.x, b.y, b.z, b.w};
    u32 exponent[3] = {}, differ = 0;
#pragma unroll
    for (u32 q = 0; q < 4; ++q)
#pragma unroll
        for (u32 i = 0; i < 3; ++i) exponent[i] |= (words[q] >> (s.shift + i) & 0x11111111u) << q;
    if (COMPARE) {
        const uint4 n = *(const uint4*)next;
        const u32 news[4] = {n.x, n.y, n.z, n.w};
#pragma unroll
        for (u32 q = 0; q < 4; ++q) {
            u32 x = words[q] ^ news[q];
            x |= x >> 2;
            differ |= ((x | x >> 1) & 0x11111111u) << q;
        }
    }
    // Subtracts all exponents from `top`, bit by bit. Where the result is negative, it becomes 0.
    u32 context[3], borrow = 0;
#pragma unroll
    for (u32 i = 0; i < 3; ++i) {
        const u32 t = 0 - (s.top >> i & 1), e = exponent[i] & (0 - (s.mask >> i & 1));
        context[i] = t ^ e ^ borrow;
        borrow = (~t & (e | borrow)) | (e & borrow);
    }
    return {{context[0] & ~borrow, context[1] & ~borrow, context[2] & ~borrow, 0}, differ};
#else
    const u32 top_and_one = (s.top + 1) * 0x10001u, mask = s.mask * 0x10001u;
    u32 w[4] = {}, changed = 0;
#if WIDTH == 16
#pragma unroll
    for (u32 v = 0; v < 4; ++v) {
        const uint4 b = *(const uint4*)(base + 16 * v);
        const u32 words[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (u32 q = 0; q < 4; ++q) w[q] |= two_contexts(words[q] >> s.shift & mask, top_and_one) << (4 * v);
        if (COMPARE) {
            const uint4 n = *(const uint4*)(next + 16 * v);
            const u32 news[4] = {n.x, n.y, n.z, n.w};
#pragma unroll
            for (u32 q = 0; q < 4; ++q) changed |= __vminu2(words[q] ^ news[q], 0x00010001) << (4 * v + q);
        }
    }
#elif WIDTH == 8
#pragma unroll
    for (u32 v = 0; v < 2; ++v) {
        const uint4 b = *(const uint4*)(base + 16 * v);
        const u32 words[4] = {b.x, b.y, b.z, b.w};
        u32 news[4] = {};
        if (COMPARE) {
            const uint4 n = *(const uint4*)(next + 16 * v);
            news[0] = n.x, news[1] = n.y, news[2] = n.z, news[3] = n.w;
        }
#pragma unroll
        for (u32 q = 0; q < 4; ++q)
#pragma unroll
            for (u32 r = 0; r < 2; ++r) {
                const u32 p = 8 * v + 2 * q + r;
                w[p & 3] |= two_contexts(words[q] >> (s.shift + 8 * r) & mask, top_and_one) << (p & ~3u);
                if (COMPARE) changed |= __vminu2((words[q] ^ news[q]) >> (8 * r) & 0x00ff00ff, 0x00010001) << p;
            }
    }
#else
#pragma unroll
    for (u32 p = 0; p < 16; ++p) {
        const T a = ((const T*)base)[p], b = ((const T*)base)[p + 16];
        const i32 ca = min(max((i32)s.top - (i32)((u32)(a >> s.shift) & s.mask), 0), 15);
        const i32 cb = min(max((i32)s.top - (i32)((u32)(b >> s.shift) & s.mask), 0), 15);
        w[p & 3] |= (u32)(ca | cb << 16) << (p & ~3u);
        if (COMPARE) changed |= (u32)(a != ((const T*)next)[p]) << p | (u32)(b != ((const T*)next)[p + 16]) << (p + 16);
    }
#endif
    // A 4 × 4 transposition of bits: bit b of nibble m of word k becomes bit 4m + k of plane b.
    const auto swap = [](u32& a, u32& b, u32 by, u32 which) {
        const u32 t = ((a >> by) ^ b) & which;
        b ^= t;
        a ^= t << by;
    };
    swap(w[0], w[1], 1, 0x55555555);
    swap(w[2], w[3], 1, 0x55555555);
    swap(w[0], w[2], 2, 0x33333333);
    swap(w[1], w[3], 2, 0x33333333);
    return {{w[0], w[1], w[2], w[3]}, changed};
#endif
}

// Counts the `valid` elements of a run by context. The halves of word i are the counts of contexts 2i and 2i + 1.
__device__ __forceinline__ void count_contexts(const Planes& p, u32 valid, u32 counts[COUNTERS]) {
    const u32 a[4] = {~p.bit[0] & ~p.bit[1] & valid, p.bit[0] & ~p.bit[1] & valid, ~p.bit[0] & p.bit[1] & valid, p.bit[0] & p.bit[1] & valid};
    const u32 b[4] = {~p.bit[2] & ~p.bit[3], p.bit[2] & ~p.bit[3], ~p.bit[2] & p.bit[3], p.bit[2] & p.bit[3]};
#pragma unroll
    for (u32 i = 0; i < COUNTERS; ++i) counts[i] = __popc(a[2 * i & 3] & b[i >> 1]) + (__popc(a[(2 * i & 3) + 1] & b[i >> 1]) << 16);
}

#ifndef EMULATED
// Starts to copy `size` bytes to shared memory, and fills up to 16 bytes with zeros.
__device__ __forceinline__ void fetch_16(u8* to, const u8* from, u32 size) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(size));
}
__device__ __forceinline__ void fetch_16(u8* to, const u8* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from));
}
__device__ __forceinline__ void fetch_commit() { asm volatile("cp.async.commit_group;"); }
template <u32 LEFT>
__device__ __forceinline__ void fetch_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT));
}
#endif

// Starts to copy `bytes` bytes to a stage, and fills the rest with zeros. If `from` is null, all are zeros.
__device__ __forceinline__ void fetch_unit(u8* stage, const u8* from, u32 bytes, u32 lane, const u8* any) {
    u8* const to = stage + lane / PIECES * STRIDE + lane % PIECES * 16;
    constexpr u32 STEP = 32 / PIECES * STRIDE;  // distance between two pieces of a lane
    if (from && bytes == UNIT_BYTES) {  // true for all units except the last of a tensor
#pragma unroll
        for (u32 i = 0; i < PIECES; ++i) fetch_16(to + STEP * i, from + 16 * lane + 512 * i);
        return;
    }
#pragma unroll 1
    for (u32 i = 0; i < PIECES; ++i) {
        const u32 at = 16 * (32 * i + lane), size = from && at < bytes ? min(bytes - at, 16u) : 0;
        fetch_16(to + STEP * i, size ? from + at : any, size);
    }
}

// Returns the number of the tensor, or of the block or chunk, that has a tile. Tensors without elements have none.
template <class Entry>
__device__ __forceinline__ u32 owner_of(const Entry* table, u32 n, u32 tile) {
    u32 low = 0, high = n;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (table[middle].tile0 <= tile) low = middle;
        else high = middle;
    }
    return low;
}

// The number of elements of a tile.
__device__ __forceinline__ u32 elements_in(const Tensor& x, u32 tile) { return (u32)min((u64)TILE, x.count - (u64)(tile - x.tile0) * TILE); }

// Returns the number of elements in all tiles from `first` to `last`.
__device__ __forceinline__ u32 elements_from(const Tensor* tensors, u32 n, u32 first, u32 last) {
    const Tensor &a = tensors[owner_of(tensors, n, first)], &b = tensors[owner_of(tensors, n, last)];
    const u64 begin = a.element0 + (u64)(first - a.tile0) * TILE, end = b.element0 + (u64)(last - b.tile0) * TILE + elements_in(b, last);
    return (u32)(end - begin);
}

__device__ __forceinline__ u32 warp_sum(u32 x) { return __reduce_add_sync(ALL, x); }

__device__ __forceinline__ u32 inclusive_scan(u32 x, u32 lane) {
#pragma unroll
    for (u32 d = 1; d < 32; d *= 2) {
        const u32 y = __shfl_up_sync(ALL, x, d);
        if (lane >= d) x += y;
    }
    return x;
}

// Adds the sums of a warp's lanes to the sums of a tensor.
__device__ __forceinline__ void flush_sums(Sums* to, u32 lane, u32 before[4], u32 change[4], u64 changed) {
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
        const u32 b = warp_sum(before[j]), c = warp_sum(change[j]);
        if (lane == 0 && b) atomicAdd(&to->before[j], b);
        if (lane == 0 && c) atomicAdd(&to->change[j], c);
        before[j] = change[j] = 0;
    }
    if (lane == 0 && changed) atomicAdd(&to->changed, changed);
}
