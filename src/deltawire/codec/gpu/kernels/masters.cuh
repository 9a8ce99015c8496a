// Master weights in place of new elements: float32 that is rounded to bfloat16, or weights that are quantised as they are read. Weights that are
// quantised may also be in place of the elements of the base, for deltas back to an earlier version.

__device__ __forceinline__ void fetch_masters(u8* to, const u8* from, u32 full, u32 bytes, u32 lane, const u8* any) {
    const u32 pieces = full / 512;
    if (bytes == full) {
#pragma unroll 4
        for (u32 i = 0; i < pieces; ++i) fetch_16(to + 16 * lane + 512 * i, from + 16 * lane + 512 * i);
        return;
    }
#pragma unroll 1
    for (u32 i = 0; i < pieces; ++i) {
        const u32 at = 16 * (32 * i + lane), size = at < bytes ? min(bytes - at, 16u) : 0;
        fetch_16(to + at, size ? from + at : any, size);
    }
}

#if WIDTH == 16
__device__ __forceinline__ u32 master_bytes(const Tensor& x) { return x.is_float32 ? 4 : 0; }

struct Masters {};
struct UnitScales {};
__device__ __forceinline__ Masters masters_of(const Tensor*, u64) { return {}; }
__device__ __forceinline__ UnitScales load_scales(const Masters&, u64, u32, u32) { return {}; }
__device__ __forceinline__ bool makes_base(const Masters&) { return false; }
// Rounds a unit of master weights into a stage. A lane rounds the elements that it fetched itself.
__device__ __forceinline__ void make_elements(u8* stage, const u8*, const u8* masters, const Masters&, const UnitScales&, u64, u32, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < UNIT * 4 / 512; ++i) {
        const u32 piece = 32 * i + lane;
        const uint4 x = *(const uint4*)(masters + 16 * piece);
        u32* const to = (u32*)(stage + piece / 8 * STRIDE + piece % 8 * 8);
        to[0] = rounded(x.x) | rounded(x.y) << 16;
        to[1] = rounded(x.z) | rounded(x.w) << 16;
    }
}
// Returns four bytes of elements, from byte 4i of those that begin at element `offset`.
__device__ __forceinline__ u32 element_word(const Tensor& x, u64 offset, u32 i) {
    const u32* const from = (const u32*)x.next + offset;
    return rounded(from[2 * i]) | rounded(from[2 * i + 1]) << 16;
}
__device__ __forceinline__ u8 element_byte(const Tensor& x, u64 offset, u32 i) { return (u8)(rounded(((const u32*)x.next + offset)[i / 2]) >> (8 * (i % 2))); }
#elif WIDTH <= 8
__device__ __forceinline__ u32 master_bytes(const Tensor& x) {
    if (!x.quantised) return 0;
    return WIDTH == 8 && (x.quantised->flags & MAKES_SCALES) ? 1 : x.quantised->source == quantised::F32 ? 4 : 2;
}

// Where an element is in its weight.
struct Position {
    u64 element, row;
    u32 column;
};
__device__ __forceinline__ Position position_of(const Quantised& q, u64 element) {
    if (element >> 32) return {element, element / q.columns, (u32)(element % q.columns)};
    const u32 row = (u32)element / q.columns;
    return {element, row, (u32)element - row * q.columns};
}

__device__ __forceinline__ const u8* previous_of(const Quantised& q) { return q.fresh && *q.fresh ? nullptr : q.previous; }

// Returns a scale of nvfp4 or mxfp4, one byte, of weights that begin at `weights`. If it is not written, and is not the previous one, it is chosen again.
template <u32 S>
__device__ __noinline__ u32 scale_of_group(const Quantised& q, const u8* weights, u64 group) {
    using namespace quantised;
    constexpr u32 V = S == F32 ? 4 : 8;
    if (q.scales) return q.scales[group];
    const u64 first = group * q.group;
    const u8* const previous = previous_of(q);
    if (!(q.changed[first >> 14] >> (first >> 10 & 15) & 1)) return previous[group];
    u32 stored = 0;
    for (u32 i = 0; i < q.group; i += V) stored = max(stored, largest_stored<S>(((const uint4*)weights)[(first + i) / V]));
    const float maximum = __uint_as_float(float_bits<S>(stored));
    const u8* const old = previous ? previous + group : nullptr;
    return q.kind == NVFP4 ? choose_nvfp4<S>(*q.global_scale, maximum, old) : choose_mxfp4<S>(maximum, old);
}

// Returns the divisor of the block of an element. All elements of a vector have the same.
template <u32 S>
__device__ __forceinline__ quantised::Divisor divisor_at(const Quantised& q, const u8* weights, const Position& at) {
    using namespace quantised;
    constexpr u32 BYTES = S == F32 ? 4 : 2;
    float scale;
    if (q.kind <= FP8_BLOCK_UE8M0) scale = ((const float*)q.scales)[(at.row / 128) * q.width + at.column / 128];
    else if (q.kind == FP8_CHANNEL) scale = read_scale<S>(q.scales + at.row * BYTES);
    else if (q.kind == FP8_TENSOR) scale = read_scale<S>(q.scales);
    else if (q.kind == INT4_GROUPS) scale = read_scale<S>(q.scales + at.element / q.group * BYTES);
    else if (q.kind == NVFP4) scale = __fdiv_rn(from_e4m3(scale_of_group<S>(q, weights, at.element / q.group)), *q.global_scale);
    else scale = power_of(scale_of_group<S>(q, weights, at.element / q.group));
    return divisor_of(scale, true);
}
// Returns the codes of a vector: 4 or 8 of them, in one or two words; half as many words for 4-bit codes.
template <u32 S>
__device__ __forceinline__ uint2 codes_of(const Quantised& q, const u8* weights, const uint4& v, const Position& at) {
    using namespace quantised;
    const Divisor by = divisor_at<S>(q, weights, at);
#if WIDTH == 8
    const bool rounds = q.kind >= FP8_CHANNEL;
    const u32 low = rounds ? four_e4m3<S, true>(v, 0, by) : four_e4m3<S, false>(v, 0, by);
    const u32 high = S == F32 ? 0 : rounds ? four_e4m3<S, true>(v, S == F32 ? 0 : 4, by) : four_e4m3<S, false>(v, S == F32 ? 0 : 4, by);
    return make_uint2(low, high);
#else
    return make_uint2(q.kind == INT4_GROUPS ? nibbles<S, INT4, true>(v, by) : q.kind == NVFP4 ? nibbles<S, E2M1, false>(v, by) : nibbles<S, E2M1, true>(v, by), 0);
#endif
}

// The values that all units of a tile share.
struct Masters {
    Quantised how;
    const Tensor* tensor;
    const u8* scales;  // if they are not written, the previous ones
    float global;
    u32 changed;       // which units have other scales than the previous ones, if scales are not written
};
__device__ __forceinline__ Masters masters_of(const Tensor* x, u64 offset) {
    if (!x->quantised) return {};
    const Quantised q = *x->quantised;
    Masters m = {q, x, q.scales, 1.0f, 0};
    if (WIDTH == 4 && q.kind == quantised::NVFP4) m.global = *q.global_scale;
    if (!q.scales) m.scales = previous_of(q);
    if (WIDTH == 4 && !q.scales) m.changed = q.changed[offset / TILE];
    return m;
}
// The values that the warp prepares for a unit while the unit is fetched. A range is as many consecutive elements as certainly share a scale: lane i has the scales of
// ranges i and i + 32, as they are stored. If the number of elements in a range is 0, ranges are not regular, and every vector looks for its own scale.
struct UnitScales {
    u32 range;
    u32 stored[WIDTH == 4 ? 2 : 1];
};
__device__ __forceinline__ UnitScales load_scales(const Masters& m, u64 first, u32 count, u32 lane) {
    using namespace quantised;
    const Quantised& q = m.how;
    UnitScales out = {};
#if WIDTH == 8
    if (q.columns % 128 || q.flags & MAKES_SCALES) return out;
    out.range = 128;
    const u32 at = min(lane % 8 * 128, (count - 1) / 128 * 128);
    if (q.kind == FP8_TENSOR) {
        out.stored[0] = q.source == F32 ? *(const u32*)q.scales : *(const u16*)q.scales;
        return out;
    }
    const Position p = position_of(q, first + at);
    if (q.kind == FP8_CHANNEL) out.stored[0] = q.source == F32 ? ((const u32*)q.scales)[p.row] : ((const u16*)q.scales)[p.row];
    else out.stored[0] = ((const u32*)q.scales)[p.row / 128 * q.width + p.column / 128];
#else
    out.range = q.group;
    if (!m.scales) return out;  // all scales are chosen again
    const u32 last = (count - 1) / q.group;
    const u64 group = first / q.group;
#pragma unroll
    for (u32 k = 0; k < 2; ++k) {
        const u64 at = group + min(lane + 32 * k, last);
        if (q.kind != INT4_GROUPS) out.stored[k] = m.scales[at];
        else out.stored[k] = q.source == F32 ? ((const u32*)q.scales)[at] : ((const u16*)q.scales)[at];
        if (q.group > 16) break;
    }
#endif
    return out;
}
// Returns the divisor for a stored scale.
template <u32 S>
__device__ __forceinline__ quantised::Divisor stored_divisor(const Quantised& q, u32 stored, float global) {
    using namespace quantised;
#if WIDTH == 8
    return divisor_of(q.kind <= FP8_BLOCK_UE8M0 ? __uint_as_float(stored) : from_stored<S>(stored), true);
#else
    return divisor_of(q.kind == INT4_GROUPS ? from_stored<S>(stored) : q.kind == NVFP4 ? __fdiv_rn(from_e4m3(stored), global) : power_of(stored), true);
#endif
}

// Writes the codes of a vector, the first of which is element `e`, into a stage.
template <u32 V>
__device__ __forceinline__ void store_codes(u8* stage, u32 e, uint2 codes) {
    u8* const to = stage + e / RUN * STRIDE + (u32)bytes_of(e % RUN);
    if (V * WIDTH == 16) *(u16*)to = (u16)codes.x;
    else if (V * WIDTH == 32) *(u32*)to = codes.x;
    else *(uint2*)to = codes;
}
// Quantises a unit whose ranges are regular, with divisors that are all fast.
template <u32 S, u32 E, bool ROUNDS>
__device__ __forceinline__ void quantise_ranges(u8* stage, const u8* masters, const quantised::Divisor by[2], u32 range, u32 count, u32 lane) {
    using namespace quantised;
    constexpr u32 V = S == F32 ? 4 : 8;
    const u32 shift = 31 - __clz(range);
#pragma unroll 4
    for (u32 i = 0; i < UNIT / V / 32; ++i) {
        const u32 piece = 32 * i + lane, e = piece * V, number = e >> shift;
        Divisor mine = {1.0f, __shfl_sync(ALL, by[0].reciprocal, number), __shfl_sync(ALL, by[0].low, number), true};
        if (WIDTH == 4 && range == 16 && i >= UNIT / V / 64) {  // ranges 32 … 63
            mine.reciprocal = __shfl_sync(ALL, by[1].reciprocal, number);
            mine.low = __shfl_sync(ALL, by[1].low, number);
        }
        const uint4 v = *(const uint4*)(masters + 16 * piece);
        uint2 codes;
#if WIDTH == 8
        codes = make_uint2(four_e4m3<S, ROUNDS>(v, 0, mine), S == F32 ? 0 : four_e4m3<S, ROUNDS>(v, S == F32 ? 0 : 4, mine));
#else
        codes = make_uint2(nibbles<S, E, ROUNDS>(v, mine), 0);
#endif
        if (e >= count) codes = make_uint2(0, 0);
        store_codes<V>(stage, e, codes);
    }
}

#if WIDTH == 4
// Chooses the scales of a unit that has other scales than the previous ones.
template <u32 S>
__device__ __forceinline__ void choose_scales(u32 stored[2], const u8* masters, const Masters& m, u64 first, u32 count, u32 lane) {
    using namespace quantised;
    constexpr u32 V = S == F32 ? 4 : 8;
    const u32 lanes = m.how.group / V, groups = 32 / lanes, last = (count - 1) / m.how.group;
    u32 largest[2] = {};
#pragma unroll 1
    for (u32 i = 0; i < UNIT / V / 32; ++i) {
        u32 mine = largest_stored<S>(*(const uint4*)(masters + 16 * (32 * i + lane)));
        for (u32 d = lanes / 2; d; d /= 2) mine = max(mine, __shfl_xor_sync(ALL, mine, d));
#pragma unroll
        for (u32 k = 0; k < 2; ++k) {
            const u32 group = min(lane + 32 * k, last), found = __shfl_sync(ALL, mine, group % groups * lanes);
            if (group / groups == i) largest[k] = found;
        }
    }
#pragma unroll
    for (u32 k = 0; k < 2; ++k) {
        const u8* const old = m.scales ? m.scales + first / m.how.group + min(lane + 32 * k, last) : nullptr;
        const float maximum = __uint_as_float(float_bits<S>(largest[k]));
        stored[k] = m.how.kind == NVFP4 ? choose_nvfp4<S>(m.global, maximum, old) : choose_mxfp4<S>(maximum, old);
    }
}
#else
// Makes a unit of scales, which are one byte each and are not written. `base` is the same unit of the base.
template <u32 S>
__device__ __forceinline__ void make_scales(u8* stage, const u8* base, const Masters& m, u64 first, u32 count, u32 lane) {
    const Quantised& q = m.how;
    const Tensor& x = *m.tensor;
    const bool known = m.scales && m.scales == x.base;
#pragma unroll
    for (u32 i = 0; i < PIECES; ++i) {
        const u32 at = lane / PIECES * STRIDE + lane % PIECES * 16 + 32 / PIECES * STRIDE * i;  // a piece that the lane fetched itself
        *(uint4*)(stage + at) = known ? *(const uint4*)(base + at) : make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
    // Each bit tells about 1,024 weights.
    const u64 tile = first * q.group / TILE;
    u32 changed = ALL;
    if (known) {
        changed = q.changed[tile];
        if (count * q.group > TILE) changed |= (u32)q.changed[tile + 1] << 16;
    }
    const u32 scales = UNIT / q.group;  // of 1,024 weights
    for (; changed; changed &= changed - 1) {
        const u32 begin = (__ffs(changed) - 1) * scales;
        if (begin >= count) break;
        for (u32 i = begin + lane; i < min(begin + scales, count); i += 32) stage[i / RUN * STRIDE + i % RUN] = (u8)scale_of_group<S>(*x.quantised, x.next, first + i);
    }
}
#endif

// Quantises a unit of master weights, whose first element is `first`, into a stage. A lane quantises the elements that it fetched itself. The number of
// elements is a multiple of 8. After the last one there are zeros, as in the other stage.
template <u32 S>
__device__ __forceinline__ void quantise_unit(u8* stage, const u8* masters, const Masters& m, UnitScales scales, u64 first, u32 count, u32 lane) {
    using namespace quantised;
    constexpr u32 V = S == F32 ? 4 : 8;
    const Quantised& q = m.how;
    if (scales.range) {
#if WIDTH == 4
        if (m.changed >> (first / UNIT % UNITS) & 1) choose_scales<S>(scales.stored, masters, m, first, count, lane);
#endif
        Divisor by[2] = {stored_divisor<S>(q, scales.stored[0], m.global), {}};
        bool fast = by[0].fast;
        if (WIDTH == 4 && scales.range == 16) by[1] = stored_divisor<S>(q, scales.stored[WIDTH == 4], m.global), fast &= by[1].fast;
        if (!__any_sync(ALL, !fast)) {
#if WIDTH == 8
            if (S != F32 && q.kind >= FP8_CHANNEL) quantise_ranges<S, E4M3, true>(stage, masters, by, scales.range, count, lane);
            else quantise_ranges<S, E4M3, false>(stage, masters, by, scales.range, count, lane);
#else
            if (q.kind == INT4_GROUPS) quantise_ranges<S, INT4, true>(stage, masters, by, scales.range, count, lane);
            else if (q.kind == NVFP4) quantise_ranges<S, E2M1, false>(stage, masters, by, scales.range, count, lane);
            else quantise_ranges<S, E2M1, true>(stage, masters, by, scales.range, count, lane);
#endif
            return;
        }
    }
#pragma unroll 1
    for (u32 piece = lane; piece < UNIT / V; piece += 32) {
        const u32 e = piece * V;
        store_codes<V>(stage, e, e < count ? codes_of<S>(*m.tensor->quantised, m.tensor->next, *(const uint4*)(masters + 16 * piece), position_of(q, first + e)) : make_uint2(0, 0));
    }
}
__device__ __forceinline__ void make_elements(u8* stage, const u8* base, const u8* masters, const Masters& m, const UnitScales& scales, u64 first, u32 count,
                                              u32 lane) {
#if WIDTH == 8
    if (m.how.flags & MAKES_SCALES) {
        if (m.how.source == quantised::F32) make_scales<quantised::F32>(stage, base, m, first, count, lane);
        else if (m.how.source == quantised::BF16) make_scales<quantised::BF16>(stage, base, m, first, count, lane);
        else make_scales<quantised::F16>(stage, base, m, first, count, lane);
        return;
    }
#endif
    if (m.how.source == quantised::F32) quantise_unit<quantised::F32>(stage, masters, m, scales, first, count, lane);
    else if (m.how.source == quantised::BF16) quantise_unit<quantised::BF16>(stage, masters, m, scales, first, count, lane);
    else quantise_unit<quantised::F16>(stage, masters, m, scales, first, count, lane);
}
// Returns four bytes of codes, from byte 4i of those that begin at element `offset`, which is a multiple of 8.
__device__ __forceinline__ u32 element_word(const Tensor& x, u64 offset, u32 i) {
    const Quantised& q = *x.quantised;
    constexpr u32 EACH = 32 / WIDTH;  // codes in a word
    if (WIDTH == 8 && (q.flags & MAKES_SCALES)) {
        u32 word = 0;
        for (u32 k = 0; k < 4; ++k) {
            const u64 group = offset + 4 * i + k;
            if (group >= x.count) break;
            word |= (q.source == quantised::F32    ? scale_of_group<quantised::F32>(q, x.next, group)
                     : q.source == quantised::BF16 ? scale_of_group<quantised::BF16>(q, x.next, group)
                                                   : scale_of_group<quantised::F16>(q, x.next, group))
                    << (8 * k);
        }
        return word;
    }
    const u64 element = offset + (u64)i * EACH, vector = q.source == quantised::F32 ? element / 4 : element / 8;
    const auto load = [&](u64 v) { return ((const uint4*)x.next)[v]; };
    if (q.source == quantised::F32) {
        u32 word = codes_of<quantised::F32>(q, x.next, load(vector), position_of(q, element)).x;
        if (EACH == 8) word |= codes_of<quantised::F32>(q, x.next, load(vector + 1), position_of(q, element + 4)).x << 16;
        return word;
    }
    const u64 first = vector * 8;
    const uint2 codes = q.source == quantised::BF16 ? codes_of<quantised::BF16>(q, x.next, load(vector), position_of(q, first)) : codes_of<quantised::F16>(q, x.next, load(vector), position_of(q, first));
    return element == first ? codes.x : codes.y;
}
__device__ __forceinline__ u8 element_byte(const Tensor& x, u64 offset, u32 i) { return (u8)(element_word(x, offset, i / 4) >> (8 * (i % 4))); }
__device__ __forceinline__ bool makes_base(const Tensor& x) { return x.quantised && (x.quantised->flags & MAKES_BASE); }
__device__ __forceinline__ bool makes_base(const Masters& m) { return m.how.flags & MAKES_BASE; }
// Returns one element that weights are quantised to.
__device__ __noinline__ T made_element(const Tensor& x, u64 element) {
    const u32 bits = WIDTH * (u32)(element % 8);
    return (T)(element_word(x, element - element % 8, bits / 32) >> bits % 32 & ((1u << WIDTH) - 1));
}
#else
__device__ __forceinline__ u32 master_bytes(const Tensor&) { return 0; }
struct Masters {};
struct UnitScales {};
__device__ __forceinline__ Masters masters_of(const Tensor*, u64) { return {}; }
__device__ __forceinline__ UnitScales load_scales(const Masters&, u64, u32, u32) { return {}; }
__device__ __forceinline__ bool makes_base(const Masters&) { return false; }
__device__ __forceinline__ void make_elements(u8*, const u8*, const u8*, const Masters&, const UnitScales&, u64, u32, u32) {}
__device__ __forceinline__ u32 element_word(const Tensor&, u64, u32) { return 0; }
__device__ __forceinline__ u8 element_byte(const Tensor&, u64, u32) { return 0; }
#endif
#if WIDTH > 8
__device__ __forceinline__ bool makes_base(const Tensor&) { return false; }
__device__ __forceinline__ T made_element(const Tensor&, u64) { return 0; }
#endif
