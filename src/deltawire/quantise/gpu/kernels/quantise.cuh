// Quantising on a GPU: scales from the largest values of blocks, and packed codes. It gives the bytes of quantise/reference.py and scales.py.
// NVRTC compiles this at run time, after codec/gpu/kernels/numbers.cuh.

using namespace quantised;

constexpr u32 SIDE = 128;                                      // rows and columns of a block
constexpr u32 THREADS = 256;
constexpr u32 UNIT = 1 << 14;                                  // elements of a unit of groups
constexpr u32 ALL = 0xffffffffu;

struct Weight {
    const u8* data;
    i64 stride;                    // bytes from one row to the next
    u8* codes;
    u8* scales;
    float* global_scale;           // for nvfp4
    const u8* previous;            // scales of the version before, or null
    const float* previous_global;
    float* maxima;                 // where the largest value of each block goes, or null
    u16* changed;                  // null, or: scales are not written, only which units of 1,024 weights have other scales than before
    u64 unit0;                     // the number of the weight's first unit of work
    u32 rows, columns;
    u32 source;
    u32 group;                     // weights with equal numbers share a scale
    u32 first_row;                 // of the weight, in the first row of blocks
    u32 aligned;                   // whether rows can be read, and codes written, a vector at a time
};

struct Job {
    const Weight* weights;
    u32 count;
    u32 kind;
    u32 group;                     // elements that share a scale
    u32 mode;                      // what to do: see below
    u32* bad;                      // the smallest number of a weight that is not finite
    float* shared;                 // for each weight, the scale that is one number
    u32* fresh;                    // for each weight, whether that scale is fresh
    u32* largest;                  // the largest value of each group, as bits
    u32* disagree;                 // for each group, whether its weights had different scales
};
// The modes of the kernels: choose scales and write codes; only find largest values; write codes with the scales that are given; only choose scales; choose scales as if the
// scales that weights share stay, and find the largest values that decide whether they do.
constexpr u32 QUANTISE = 0, MAXIMA = 1, CODES = 2, SCALES = 3, TRY_SCALES = 4;

__device__ __forceinline__ u32 vector_size(u32 source) { return source == F32 ? 4 : 8; }
__device__ __forceinline__ u32 bytes_of(u32 source) { return source == F32 ? 4 : 2; }

// ---- scales, as in quantise/scales.py

__device__ __forceinline__ bool is_power_of_two(float value) {
    const u32 b = __float_as_uint(value), fraction = b & 0x7fffff;
    return b >> 23 ? fraction == 0 : (fraction & (fraction - 1)) == 0;
}

__device__ __forceinline__ float choose_block(bool power, float maximum, const float* previous) {
    float chosen = __fdiv_rn(maximum, 448.0f);
    if (chosen == 0) chosen = 1.0f;
    else if (power) {
        const u32 up = (__float_as_uint(chosen) + 0x7fffff) & 0x7f800000;
        chosen = __uint_as_float(up < 0x00800000 ? 0x00800000 : up);
    }
    if (!previous) return chosen;
    const float old = *previous;
    if (!is_scale(old) || (power && !is_power_of_two(old))) return chosen;
    return maximum == 0 || old == chosen || (__fdiv_rn(maximum, old) <= FITS_E4M3 && 2 * chosen >= old) ? old : chosen;
}
template <u32 S, u32 E>
__device__ __forceinline__ float fresh_plain(float maximum) {
    const float scale = rounded_to<S>(__fdiv_rn(maximum, E == INT4 ? 7.5f : 448.0f));
    return scale == 0 ? (S == F32 ? 0x1p-23f : S == BF16 ? 0x1p-7f : 0x1p-10f) : scale;
}
template <u32 S, u32 E>
__device__ __forceinline__ bool stays_plain(float maximum, float old, float fresh) {
    if (!is_scale(old)) return false;
    return maximum == 0 || old == fresh || (rounded_to<S>(__fdiv_rn(maximum, old)) <= (E == INT4 ? FITS_INT4 : FITS_E4M3) && 2 * fresh >= old);
}
template <u32 S, u32 E>
__device__ __forceinline__ float choose_plain(float maximum, const u8* previous) {
    const float fresh = fresh_plain<S, E>(maximum);
    if (!previous) return fresh;
    const float old = read_scale<S>(previous);
    return stays_plain<S, E>(maximum, old, fresh) ? old : fresh;
}
template <u32 S>
__device__ __forceinline__ float fresh_global(float largest) {
    const float least = S == F16 ? 0x1p-14f : 0x1p-126f;
    const float found = rounded_to<S>(__fmul_rn(rounded_to<S>(__fdiv_rn(1.0f, largest > least ? largest : least)), 2688.0f));
    return __float_as_uint(found) < NOT_FINITE ? found : 1.0f;
}
#define LEAST_GLOBAL 0x1p-117f  // every fresh global scale is larger
template <u32 S>
__device__ __forceinline__ bool stays_global(float largest, float old, float fresh) {
    if (!is_scale(old) || old < LEAST_GLOBAL) return false;
    return largest == 0 || old == fresh || (__fmul_rn(old, rounded_to<S>(__fdiv_rn(largest, 6.0f))) <= FITS_E4M3 && (double)fresh <= 2 * (double)old);
}

// 16 bytes of a row: 4 or 8 elements.
template <u32 S>
__device__ __forceinline__ uint4 load_vector(const u8* row, u32 column, u32 columns, u32 aligned) {
    constexpr u32 V = S == F32 ? 4 : 8;
    if (aligned) return column < columns ? *(const uint4*)(row + (u64)column * (16 / V)) : make_uint4(0, 0, 0, 0);
    u32 words[4] = {0, 0, 0, 0};
    for (u32 i = 0; i < V; ++i)
        if (column + i < columns) {
            if (S == F32) words[i % 4] = ((const u32*)row)[column + i];
            else words[i / 2] |= (u32)((const u16*)row)[column + i] << (16 * (i & 1));
        }
    return make_uint4(words[0], words[1], words[2], words[3]);
}
template <u32 S, bool ROUNDS>
__device__ __forceinline__ void store_e4m3(u8* row, u32 column, u32 columns, u32 aligned, const uint4& v, const Divisor& by) {
    constexpr u32 V = S == F32 ? 4 : 8;
    if (column >= columns) return;
    u32 words[2];
    for (u32 k = 0; k < V / 4; ++k) words[k] = four_e4m3<S, ROUNDS>(v, 4 * k, by);
    if (aligned) {
        if (V == 4) *(u32*)(row + column) = words[0];
        else *(uint2*)(row + column) = make_uint2(words[0], words[1]);
    } else {
        for (u32 i = 0; i < V; ++i)
            if (column + i < columns) row[column + i] = (u8)(words[i / 4] >> (8 * (i & 3)));
    }
}

__device__ __forceinline__ u32 warp_max(u32 x, u32 lanes) {
    for (u32 d = lanes / 2; d; d /= 2) x = max(x, __shfl_xor_sync(ALL, x, d));
    return x;
}
// Returns the largest value of all threads, for all threads.
__device__ __forceinline__ u32 block_max(u32 x) {
    __shared__ u32 found[THREADS / 32];
    x = warp_max(x, 32);
    __syncthreads();  // `found` may still be read
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = x;
    __syncthreads();
    for (u32 i = 0; i < THREADS / 32; ++i) x = max(x, found[i]);
    return x;
}

// Returns the number of the weight that a unit belongs to.
__device__ __forceinline__ u32 weight_of(const Job& job, u64 unit) {
    u32 low = 0, high = job.count - 1;
    while (low < high) {
        const u32 middle = (low + high + 1) / 2;
        if (job.weights[middle].unit0 <= unit) low = middle;
        else high = middle - 1;
    }
    return low;
}

__device__ __forceinline__ void note_bad(const Job& job, u32 weight, u32 largest) {
    if (largest >= NOT_FINITE) atomicMin(job.bad, weight);
}

// ---- blocks of 128 x 128

template <u32 S>
__device__ __forceinline__ void do_block(const Job& job, u32 index, const Weight& w, u64 unit) {
    constexpr u32 V = S == F32 ? 4 : 8, LANES = SIDE / V, ROWS = THREADS / LANES, PASSES = SIDE / ROWS;
    const u32 width = (w.columns + SIDE - 1) / SIDE;
    const u32 block_row = (u32)(unit / width), block_column = (u32)(unit % width);
    const u32 column = block_column * SIDE + threadIdx.x % LANES * V;
    // The first row of blocks may be cut by a shard.
    const i64 first = (i64)block_row * SIDE - w.first_row;
    uint4 values[PASSES];
    u32 stored = 0;
#pragma unroll
    for (u32 p = 0; p < PASSES; ++p) {
        const i64 row = first + p * ROWS + threadIdx.x / LANES;
        const bool there = row >= 0 && row < w.rows;
        values[p] = there ? load_vector<S>(w.data + row * w.stride, column, w.columns, w.aligned) : make_uint4(0, 0, 0, 0);
        stored = max(stored, largest_stored<S>(values[p]));
    }
    __shared__ float chosen;
    if (job.mode == CODES) {
        if (threadIdx.x == 0) chosen = ((const float*)w.scales)[unit];
    } else {
        const u32 bits = block_max(float_bits<S>(stored));
        if (threadIdx.x == 0) {
            note_bad(job, index, bits);
            const float maximum = __uint_as_float(bits);
            if (w.maxima) w.maxima[unit] = maximum;
            if (job.mode != MAXIMA) {
                chosen = choose_block(job.kind == FP8_BLOCK_UE8M0, maximum, w.previous ? (const float*)w.previous + unit : nullptr);
                ((float*)w.scales)[unit] = chosen;
            }
        }
        if (job.mode != QUANTISE) return;
    }
    __syncthreads();
    const Divisor by = divisor_of(chosen, job.mode != CODES);
#pragma unroll
    for (u32 p = 0; p < PASSES; ++p) {
        const i64 row = first + p * ROWS + threadIdx.x / LANES;
        if (row >= 0 && row < w.rows) store_e4m3<S, false>(w.codes + (u64)row * w.columns, column, w.columns, w.aligned, values[p], by);
    }
}
extern "C" __global__ void __launch_bounds__(256) quantise_blocks(Job job) {
    const u32 index = weight_of(job, blockIdx.x);
    const Weight w = job.weights[index];
    const u64 unit = blockIdx.x - w.unit0;
    if (w.source == F32) do_block<F32>(job, index, w, unit);
    else if (w.source == BF16) do_block<BF16>(job, index, w, unit);
    else do_block<F16>(job, index, w, unit);
}

// Chooses scales only. It keeps no weights, so that more thread blocks run at the same time.
template <u32 S>
__device__ __forceinline__ void choose_block_scale(const Job& job, u32 index, const Weight& w, u64 unit) {
    constexpr u32 V = S == F32 ? 4 : 8, LANES = SIDE / V, ROWS = THREADS / LANES, AHEAD = 8;
    const u32 width = (w.columns + SIDE - 1) / SIDE;
    const u32 block_row = (u32)(unit / width), block_column = (u32)(unit % width);
    const u32 column = block_column * SIDE + threadIdx.x % LANES * V, row0 = block_row * SIDE + threadIdx.x / LANES;
    u32 stored = 0;
#pragma unroll 1
    for (u32 p0 = 0; p0 < SIDE / ROWS; p0 += AHEAD) {
        uint4 values[AHEAD];
#pragma unroll
        for (u32 p = 0; p < AHEAD; ++p) {
            const u32 row = row0 + (p0 + p) * ROWS;
            values[p] = row < w.rows ? load_vector<S>(w.data + (i64)row * w.stride, column, w.columns, w.aligned) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (u32 p = 0; p < AHEAD; ++p) stored = max(stored, largest_stored<S>(values[p]));
    }
    const u32 bits = block_max(float_bits<S>(stored));
    if (threadIdx.x) return;
    note_bad(job, index, bits);
    ((float*)w.scales)[unit] = choose_block(job.kind == FP8_BLOCK_UE8M0, __uint_as_float(bits), w.previous ? (const float*)w.previous + unit : nullptr);
}
extern "C" __global__ void __launch_bounds__(256) choose_block_scales(Job job) {
    const u32 index = weight_of(job, blockIdx.x);
    const Weight w = job.weights[index];
    const u64 unit = blockIdx.x - w.unit0;
    if (w.source == F32) choose_block_scale<F32>(job, index, w, unit);
    else if (w.source == BF16) choose_block_scale<BF16>(job, index, w, unit);
    else choose_block_scale<F16>(job, index, w, unit);
}

// ---- rows, for fp8-channel and fp8-tensor

template <u32 S>
__device__ __forceinline__ void do_row(const Job& job, u32 index, const Weight& w, u32 row) {
    constexpr u32 V = S == F32 ? 4 : 8, BYTES = S == F32 ? 4 : 2;
    const u8* const from = w.data + (i64)row * w.stride;
    float scale;
    if (job.mode == CODES) {
        scale = read_scale<S>(w.scales + (job.kind == FP8_TENSOR ? 0 : (u64)row * BYTES));
    } else if (job.kind == FP8_TENSOR && job.mode == QUANTISE) {
        scale = job.shared[index];
    } else {
        u32 stored = 0;
        for (u32 column = threadIdx.x * V; column < w.columns; column += THREADS * V)
            stored = max(stored, largest_stored<S>(load_vector<S>(from, column, w.columns, w.aligned)));
        const u32 bits = block_max(float_bits<S>(stored));
        const float maximum = __uint_as_float(bits);
        if (threadIdx.x == 0) note_bad(job, index, bits);
        if (job.mode == MAXIMA) {
            if (threadIdx.x == 0) {
                if (w.maxima && job.kind == FP8_CHANNEL) w.maxima[row] = maximum;
                else if (w.maxima) atomicMax((u32*)w.maxima, bits);
            }
            return;
        }
        scale = choose_plain<S, E4M3>(maximum, w.previous ? w.previous + (u64)row * BYTES : nullptr);
        __syncthreads();  // all threads have read the previous scale, which may be in the same memory
        if (threadIdx.x == 0) write_scale<S>(w.scales + (u64)row * BYTES, scale);
        if (job.mode == SCALES) return;
    }
    const Divisor by = divisor_of(scale, job.mode != CODES);
    for (u32 column = threadIdx.x * V; column < w.columns; column += THREADS * V)
        store_e4m3<S, true>(w.codes + (u64)row * w.columns, column, w.columns, w.aligned, load_vector<S>(from, column, w.columns, w.aligned), by);
}
extern "C" __global__ void __launch_bounds__(256) quantise_rows(Job job) {
    const u32 index = weight_of(job, blockIdx.x);
    const Weight w = job.weights[index];
    const u32 row = (u32)(blockIdx.x - w.unit0);
    if (w.source == F32) do_row<F32>(job, index, w, row);
    else if (w.source == BF16) do_row<BF16>(job, index, w, row);
    else do_row<F16>(job, index, w, row);
}

// ---- groups of 16, 32 or 128 elements of a row

// Finds where vector `i` of a weight is, counted through its rows.
__device__ __forceinline__ const u8* vector_at(const Weight& w, u64 element, u32 bytes) {
    if (w.stride == (i64)w.columns * bytes) return w.data + element * bytes;
    return w.data + (i64)(element / w.columns) * w.stride + element % w.columns * bytes;
}
template <u32 S>
__device__ __forceinline__ uint4 load_here(const u8* at, u32 aligned) { return load_vector<S>(at, 0, S == F32 ? 4 : 8, aligned); }

template <u32 S>
__device__ __forceinline__ void do_groups(const Job& job, u32 index, const Weight& w, u64 unit) {
    constexpr u32 V = S == F32 ? 4 : 8, BYTES = S == F32 ? 4 : 2;
    const u32 lanes = job.group / V;  // that share a scale
    const u64 end = (u64)w.rows * w.columns;
    const bool is_first = threadIdx.x % lanes == 0;
    float global = 1.0f;
    bool fresh = false;
    if (job.kind == NVFP4 && (job.mode == QUANTISE || job.mode == SCALES)) global = job.shared[index], fresh = job.fresh[index];
    if (job.kind == NVFP4 && job.mode == CODES) global = *w.global_scale;
    u32 all = 0;
    for (u32 step = 0; step < UNIT / (THREADS * V); ++step) {
        const u64 i = unit * UNIT + (step * THREADS + threadIdx.x) * V, at = i / job.group;
        const bool there = i < end;  // for all lanes of a group, or for none
        const uint4 v = there ? load_here<S>(vector_at(w, i, BYTES), w.aligned) : make_uint4(0, 0, 0, 0);
        float divisor = 1.0f;
        u32 chosen = 0;
        if (job.mode == CODES) {
            if (there) {
                if (job.kind == INT4_GROUPS) divisor = read_scale<S>(w.scales + at * BYTES);
                else divisor = job.kind == NVFP4 ? __fdiv_rn(from_e4m3(w.scales[at]), global) : power_of(w.scales[at]);
            }
        } else {
            const u32 bits = float_bits<S>(warp_max(largest_stored<S>(v), lanes));
            const float maximum = __uint_as_float(bits);
            all = max(all, bits);
            if (w.maxima && there && is_first) w.maxima[at] = maximum;
            if (job.mode == MAXIMA) continue;
            const u8* const previous = w.previous && there && !fresh ? w.previous + at * (job.kind == INT4_GROUPS ? BYTES : 1) : nullptr;
            if (job.kind == INT4_GROUPS) divisor = choose_plain<S, INT4>(maximum, previous);
            else if (job.kind == NVFP4) chosen = choose_nvfp4<S>(global, maximum, previous), divisor = __fdiv_rn(from_e4m3(chosen), global);
            else chosen = choose_mxfp4<S>(maximum, previous), divisor = power_of(chosen);
            __syncwarp();  // all lanes have read the previous scale, which may be in the same memory
            if (there && is_first) {
                if (job.kind == INT4_GROUPS) write_scale<S>(w.scales + at * BYTES, divisor);
                else w.scales[at] = (u8)chosen;
            }
        }
        if (!there || job.mode == SCALES) continue;
        const Divisor by = divisor_of(divisor, job.mode != CODES);
        const u32 codes = job.kind == INT4_GROUPS ? nibbles<S, INT4, true>(v, by) : job.kind == NVFP4 ? nibbles<S, E2M1, false>(v, by) : nibbles<S, E2M1, true>(v, by);
        if (V == 4) {
            if (w.aligned) *(u16*)(w.codes + i / 2) = (u16)codes;
            else w.codes[i / 2] = (u8)codes, w.codes[i / 2 + 1] = (u8)(codes >> 8);
        } else {
            if (w.aligned) *(u32*)(w.codes + i / 2) = codes;
            else
                for (u32 k = 0; k < 4; ++k) w.codes[i / 2 + k] = (u8)(codes >> (8 * k));
        }
    }
    note_bad(job, index, all);
}
extern "C" __global__ void __launch_bounds__(256) quantise_groups(Job job) {
    const u32 index = weight_of(job, blockIdx.x);
    const Weight w = job.weights[index];
    const u64 unit = blockIdx.x - w.unit0;
    if (w.source == F32) do_groups<F32>(job, index, w, unit);
    else if (w.source == BF16) do_groups<BF16>(job, index, w, unit);
    else do_groups<F16>(job, index, w, unit);
}

// Chooses scales only: first all largest values of a unit, then all scales.
template <u32 S>
__device__ __forceinline__ void choose_unit_scales(const Job& job, u32 index, const Weight& w, u64 unit, u32* maxima, u32* changed) {
    constexpr u32 V = S == F32 ? 4 : 8, BYTES = S == F32 ? 4 : 2, AHEAD = 8;
    const bool tries = job.mode == TRY_SCALES;
    float global = 1.0f;
    bool fresh = false, chooses = true;
    if (tries) {
        chooses = !job.disagree[w.group];
        if (chooses) global = *w.previous_global, chooses = is_scale(global);
    } else if (job.kind == NVFP4) {
        global = job.shared[index], fresh = job.fresh[index];
        if (!fresh) return;  // its scales were tried, and are right
        if (w.changed) {
            if (threadIdx.x == 0) w.changed[unit] = 0xffff;
            return;
        }
    }
    if (threadIdx.x == 0) *changed = 0;
    const u32 lanes = job.group / V;  // that share a scale
    const u64 end = (u64)w.rows * w.columns;
    u32 all = 0;
#pragma unroll 1
    for (u32 step = 0; step < UNIT / (THREADS * V); step += AHEAD) {
        uint4 values[AHEAD];
#pragma unroll
        for (u32 k = 0; k < AHEAD; ++k) {
            const u64 i = unit * UNIT + ((step + k) * THREADS + threadIdx.x) * V;
            values[k] = i < end ? load_here<S>(vector_at(w, i, BYTES), w.aligned) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (u32 k = 0; k < AHEAD; ++k) {
            const u32 bits = float_bits<S>(warp_max(largest_stored<S>(values[k]), lanes));
            all = max(all, bits);
            if (threadIdx.x % lanes == 0) maxima[((step + k) * THREADS + threadIdx.x) / lanes] = bits;
        }
    }
    if (tries) {
        const u32 found = block_max(all);
        if (threadIdx.x == 0) atomicMax(job.largest + w.group, found);
    }
    note_bad(job, index, all);
    if (!chooses) return;
    __syncthreads();
    const u64 first = unit * (UNIT / job.group), count = end / job.group;
    for (u32 i = threadIdx.x; i < UNIT / job.group && first + i < count; i += THREADS) {
        const u64 at = first + i;
        const float maximum = __uint_as_float(maxima[i]);
        const u8* const previous = w.previous && !fresh ? w.previous + at * (job.kind == INT4_GROUPS ? BYTES : 1) : nullptr;
        if (job.kind == INT4_GROUPS) {
            write_scale<S>(w.scales + at * BYTES, choose_plain<S, INT4>(maximum, previous));
            continue;
        }
        const u32 chosen = job.kind == NVFP4 ? choose_nvfp4<S>(global, maximum, previous) : choose_mxfp4<S>(maximum, previous);
        if (!w.changed) w.scales[at] = (u8)chosen;
        else if (!previous || chosen != *previous) atomicOr(changed, 1u << (i * job.group >> 10));
    }
    if (!w.changed) return;
    __syncthreads();
    if (threadIdx.x == 0) w.changed[unit] = (u16)*changed;
}
extern "C" __global__ void __launch_bounds__(256) choose_group_scales(Job job) {
    const u32 index = weight_of(job, blockIdx.x);
    const Weight w = job.weights[index];
    const u64 unit = blockIdx.x - w.unit0;
    __shared__ u32 maxima[UNIT / 16], changed;  // the smallest groups have 16 elements
    if (w.source == F32) choose_unit_scales<F32>(job, index, w, unit, maxima, &changed);
    else if (w.source == BF16) choose_unit_scales<BF16>(job, index, w, unit, maxima, &changed);
    else choose_unit_scales<F16>(job, index, w, unit, maxima, &changed);
}

// ---- scales that weights share

// Finds the largest value of each group of weights. A unit is a few rows: `UNIT` elements, or one row.
template <u32 S>
__device__ __forceinline__ u32 largest_of_rows(const Weight& w, u64 unit, u32 rows) {
    constexpr u32 V = S == F32 ? 4 : 8;
    const u32 vectors = (w.columns + V - 1) / V;
    u32 stored = 0;
    const u64 first = unit * rows, end = min((u64)w.rows, first + rows);
    for (u64 row = first; row < end; ++row)
        for (u32 k = threadIdx.x; k < vectors; k += THREADS) stored = max(stored, largest_stored<S>(load_vector<S>(w.data + (i64)row * w.stride, k * V, w.columns, w.aligned)));
    return float_bits<S>(stored);
}
__device__ __forceinline__ u32 rows_of_unit(u32 columns) { return columns >= UNIT ? 1 : UNIT / columns; }
extern "C" __global__ void __launch_bounds__(256) find_largest(Job job) {
    const u32 index = weight_of(job, blockIdx.x);
    const Weight w = job.weights[index];
    const u64 unit = blockIdx.x - w.unit0;
    const u32 rows = rows_of_unit(w.columns);
    const u32 mine = w.source == F32 ? largest_of_rows<F32>(w, unit, rows) : w.source == BF16 ? largest_of_rows<BF16>(w, unit, rows) : largest_of_rows<F16>(w, unit, rows);
    const u32 found = block_max(mine);
    if (threadIdx.x == 0) {
        note_bad(job, index, found);
        atomicMax(job.largest + w.group, found);
    }
}

__device__ __forceinline__ float read_scale_as(u32 source, const u8* at) {
    return source == F32 ? read_scale<F32>(at) : source == BF16 ? read_scale<BF16>(at) : read_scale<F16>(at);
}
__device__ __forceinline__ float shared_previous(const Job& job, const Weight& w) {
    return job.kind == NVFP4 ? *w.previous_global : read_scale_as(w.source, w.previous);
}
template <u32 S>
__device__ __forceinline__ float choose_shared(const Job& job, float largest, bool has_previous, float old, u32& fresh) {
    const float found = job.kind == NVFP4 ? fresh_global<S>(largest) : fresh_plain<S, E4M3>(largest);
    const bool stays = has_previous && (job.kind == NVFP4 ? stays_global<S>(largest, old, found) : stays_plain<S, E4M3>(largest, old, found));
    fresh = !stays;
    return stays ? old : found;
}
// One thread for each weight. Weights of a group must all have had the same scale, or their scales are fresh: `compare_shared` finds out.
extern "C" __global__ void __launch_bounds__(256) compare_shared(Job job, const u32* first_of_group) {
    const u32 index = blockIdx.x * THREADS + threadIdx.x;
    if (index >= job.count) return;
    const Weight& w = job.weights[index];
    const Weight& first = job.weights[first_of_group[w.group]];
    const bool has_scales = w.previous && first.previous && (job.kind != NVFP4 || (w.previous_global && first.previous_global));
    if (!has_scales || w.source != first.source || __float_as_uint(shared_previous(job, w)) != __float_as_uint(shared_previous(job, first)))
        atomicOr(job.disagree + w.group, 1u);
}
extern "C" __global__ void __launch_bounds__(256) choose_shared_scales(Job job) {
    const u32 index = blockIdx.x * THREADS + threadIdx.x;
    if (index >= job.count) return;
    const Weight& w = job.weights[index];
    const float largest = __uint_as_float(job.largest[w.group]);
    const bool agreed = !job.disagree[w.group];
    const float old = agreed ? shared_previous(job, w) : 0.0f;
    u32 fresh;
    const float scale = w.source == F32    ? choose_shared<F32>(job, largest, agreed, old, fresh)
                        : w.source == BF16 ? choose_shared<BF16>(job, largest, agreed, old, fresh)
                                           : choose_shared<F16>(job, largest, agreed, old, fresh);
    job.shared[index] = scale;
    job.fresh[index] = fresh;
    if (job.kind == NVFP4) *w.global_scale = scale;
    else if (w.source == F32) write_scale<F32>(w.scales, scale);
    else if (w.source == BF16) write_scale<BF16>(w.scales, scale);
    else write_scale<F16>(w.scales, scale);
}
