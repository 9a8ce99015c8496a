// The pass over every weight. When encoding, it finds the changes of each tile and ranks them in their contexts. When resolving, it only counts
// contexts. A warp works on one tile at a time, unit by unit. It fetches the next unit while it works on this one.

constexpr u32 SCAN_WARPS = 4;
constexpr u32 GRANT = 1024;              // entries that a warp takes from the list at a time; at least as many as a unit has elements
constexpr u32 LISTED = 256;              // changes of a unit that are processed at a time
constexpr u32 RANK_WORDS = COUNTERS + 1; // per lane; the last one is not used, and avoids bank conflicts in columns

template <bool COMPARE>
struct ScanSpace {
    alignas(16) u8 stages[2][COMPARE ? 2 : 1][STAGE];
    alignas(16) uint4 multipliers[32];
    alignas(16) uint4 planes[COMPARE ? 32 : 1];
    u32 ranks[COMPARE ? 32 * RANK_WORDS : 1];  // per lane: elements of each context that the tile has before the lane's run
    u16 list[COMPARE ? LISTED : 1];
    u32 changes[CONTEXTS];
};

// Master weights become elements before the comparison (masters.cuh). Their units are fetched to `masters`, and their elements go into a stage. There is room
// for two units of 2-byte master weights, or for one unit of 4-byte ones, whose successor is fetched when its elements are made: more thread blocks fit then.
struct MasterSpace : ScanSpace<true> {
    alignas(16) u8 masters[UNIT * 4];
};
template <bool COMPARE, bool MASTERS>
struct SpaceOf {
    typedef ScanSpace<COMPARE> type;
};
template <>
struct SpaceOf<true, true> {
    typedef MasterSpace type;
};

// Turns the counts of lanes (see `count_contexts`) into sums over all earlier lanes, plus `seen`, and leaves them in `ranks`. `seen` and the result
// belong to counter `lane % COUNTERS`. The result includes this unit.
__device__ __forceinline__ u32 rank_lanes(u32* ranks, const u32 counts[COUNTERS], u32 seen, u32 lane, bool keep) {
#pragma unroll
    for (u32 i = 0; i < COUNTERS; ++i) ranks[lane * RANK_WORDS + i] = counts[i];
    __syncwarp();
    u32* const column = ranks + lane / COUNTERS * COUNTERS * RANK_WORDS + lane % COUNTERS;  // of as many lanes as there are counters
    u32 mine[COUNTERS], total = 0;
#pragma unroll
    for (u32 t = 0; t < COUNTERS; ++t) total += mine[t] = column[t * RANK_WORDS];
    u32 upto = total;
#pragma unroll
    for (u32 d = COUNTERS; d < 32; d *= 2) {
        const u32 earlier = __shfl_up_sync(ALL, upto, d);
        if (lane >= d) upto += earlier;
    }
    if (keep) {
        u32 at = seen + upto - total;
#pragma unroll
        for (u32 t = 0; t < COUNTERS; ++t) {
            column[t * RANK_WORDS] = at;
            at += mine[t];
        }
    }
    return seen + __shfl_sync(ALL, upto, 32 - COUNTERS + lane % COUNTERS);
}

struct Changes {
    u32* slots;      // [tiles][UNITS]: index of the first change of a unit in the list
    u16* sizes;      // [tiles][UNITS]: number of changes of a unit
    u16* counts;     // [tiles][USED]: changes by context
    u16* ranks;      // rank of each change in its context, counted from the start of its tile
    Pair* pairs;
    u32 capacity;
    u32* cursor;     // number of entries taken; if it exceeds the capacity, the changes beyond were not written
};

// All tiles of a call, the tensors that they belong to, and the blocks or chunks that they belong to.
struct Tiles {
    const Tensor* tensors;
    const Run* runs;
    u32 ntensors, nruns, first, end;
};

// Arrays of tiles begin with tile `tiles.first`. `stride` is the number of words between the `elements` of two tiles. Without `sums` nothing is digested.
template <bool COMPARE, bool MASTERS>
__device__ __forceinline__ void scan_tiles(const Tiles& tiles, u16* elements, u32 stride, Changes out, Sums* sums) {
    extern __shared__ __align__(16) u8 shared[];
    int4* const factors = (int4*)shared;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    typedef typename SpaceOf<COMPARE, MASTERS>::type Space;
    Space& space = ((Space*)(shared + 4096))[warp];
    if (COMPARE)
        for (u32 i = threadIdx.x; i < 256; i += blockDim.x)
            factors[i] = make_int4(word_factor(i, 0), word_factor(i, 1), word_factor(i, 2), word_factor(i, 3));
    WordFactors t;
    t.load(lane);
    __syncthreads();

    u32 before[4] = {}, change[4] = {}, tensor = ALL, next_slot = 0, left = 0;
    u64 changed = 0;
    for (u32 tile = tiles.first + blockIdx.x * SCAN_WARPS + warp; tile < tiles.end; tile += gridDim.x * SCAN_WARPS) {
        const u32 owner = owner_of(tiles.tensors, tiles.ntensors, tile), at = tile - tiles.first;
        const Tensor x = tiles.tensors[owner];
        const Coding s = tiles.runs[owner_of(tiles.runs, tiles.nruns, tile)].coding;
        if (owner != tensor) {
            if (tensor != ALL && sums) flush_sums(sums + tensor, lane, before, change, changed);
            tensor = owner;
            changed = 0;
        }
        const u64 offset = (u64)(tile - x.tile0) * TILE;
        const u32 n = elements_in(x, tile), units = (n + UNIT - 1) / UNIT;
        const u32 master = MASTERS ? master_bytes(x) : 0;  // bytes of a master weight; 0 if `next` are elements, 1 if elements are scales
        const u32 master_unit = master == 2 ? 2 * UNIT : 0;  // bytes from one unit of master weights to the next one
        const u8* const base = x.base ? x.base + bytes_of(offset) : nullptr;
        const u8* const next = master ? x.next + master * offset : COMPARE ? x.next + bytes_of(offset) : base;
        const auto fetch = [&](u32 u) {
            const u32 count = min(UNIT, n - u * UNIT), bytes = (u32)bytes_of(count);
            fetch_unit(space.stages[u & 1][0], base ? base + u * UNIT_BYTES : nullptr, bytes, lane, (const u8*)tiles.tensors);
            if constexpr (MASTERS)
                if (master > 1) fetch_masters(space.masters + master_unit * (u & 1), next + u * UNIT * master, UNIT * master, master * count, lane, (const u8*)tiles.tensors);
            if (COMPARE && !master) fetch_unit(space.stages[u & 1][COMPARE ? 1 : 0], next + u * UNIT_BYTES, bytes, lane, (const u8*)tiles.tensors);
            fetch_commit();
        };
        fetch(0);
        Masters masters = {};
        UnitScales scales = {};
        if constexpr (MASTERS)
            if (master) masters = masters_of(tiles.tensors + owner, offset), scales = load_scales(masters, offset, min(UNIT, n), lane);
        if (COMPARE && lane < CONTEXTS) space.changes[lane] = 0;
        const u64 digest_block = bytes_of(offset) / 512;
        // Elements by context, as in `count_contexts`: those of the lane that are not yet in `seen`, and counter `lane % COUNTERS` of the whole warp.
        u32 own[COUNTERS] = {}, seen = 0;
        u32 unit_size = 0, unit_slot = 0;  // of unit `lane`
        bool has_own = false;
        for (u32 u = 0; u < units; ++u) {
            if (u % (32 / DIGEST_BLOCKS) == 0) {
                __syncwarp();
                space.multipliers[lane] = block_factors(x.seed, digest_block + u * DIGEST_BLOCKS + lane);
            }
            const bool early = master != 4;  // whether the next unit is fetched before the elements of this one are made
            if (early && u + 1 < units) {
                fetch(u + 1);
                fetch_wait<1>();
            } else {
                fetch_wait<0>();
            }
            u8* const made = space.stages[master ? 0 : u & 1][COMPARE ? 1 : 0];
            if constexpr (MASTERS)
                if (master) {
                    const UnitScales own = scales;
                    const u64 first = offset + u * UNIT;
                    if (u + 1 < units) scales = load_scales(masters, first + UNIT, min(UNIT, n - (u + 1) * UNIT), lane);
                    make_elements(made, space.stages[u & 1][0], space.masters + master_unit * (u & 1), masters, own, first, min(UNIT, n - u * UNIT), lane);
                    if (!early && u + 1 < units) fetch(u + 1);
                }
            __syncwarp();
            const u8* const fetched = space.stages[u & 1][0];
            const bool swapped = MASTERS && makes_base(masters);  // whether master weights became the elements of the base
            const u8* const stage = swapped ? made : fetched;
            const u8* const next_stage = swapped ? fetched : made;
            const uint4* const multipliers = space.multipliers + u % (32 / DIGEST_BLOCKS) * DIGEST_BLOCKS;
#pragma unroll
            for (u32 b = 0; b < DIGEST_BLOCKS; ++b) {
                const u32 g = 32 * b + lane;
                digest_words(*(const uint4*)(stage + g / PIECES * STRIDE + g % PIECES * 16), t, multipliers[b], before);
            }
            const u8* const row = stage + lane * STRIDE;
            const u8* const next_row = next_stage + lane * STRIDE;
            const Planes planes = planes_of<COMPARE>(row, next_row, s);
            const u32 run = min(max((i32)(n - u * UNIT) - (i32)(lane * RUN), 0), (i32)RUN);
            const u32 valid = run == RUN ? ALL : below(run);
            u32 counts[COUNTERS];
            count_contexts(planes, valid, counts);
            if (!COMPARE || !__any_sync(ALL, planes.changed != 0)) {
#pragma unroll
                for (u32 i = 0; i < COUNTERS; ++i) own[i] += counts[i];
                has_own = true;
                __syncwarp();
                continue;
            }
            if (has_own) {
                seen = rank_lanes(space.ranks, own, seen, lane, false);
#pragma unroll
                for (u32 i = 0; i < COUNTERS; ++i) own[i] = 0;
                has_own = false;
                __syncwarp();
            }
            const u32 mine = __popc(planes.changed), upto = inclusive_scan(mine, lane), total = __shfl_sync(ALL, upto, 31);
            seen = rank_lanes(space.ranks, counts, seen, lane, true);
            space.planes[lane] = make_uint4(planes.bit[0], planes.bit[1], planes.bit[2], planes.bit[3]);
            if (left < total) {
                if (lane == 0) next_slot = atomicAdd(out.cursor, GRANT);
                next_slot = __shfl_sync(ALL, next_slot, 0);
                left = GRANT;
            }
            if (lane == u) unit_size = total, unit_slot = next_slot;
            u32 pending = in_order(planes.changed), position = upto - mine;
            for (u32 first = 0; first < total; first += LISTED) {
                const u32 size = min(total - first, LISTED);
                for (; pending && position < first + size; pending &= pending - 1) space.list[position++ - first] = (u16)(lane * RUN + __ffs(pending) - 1);
                __syncwarp();
                for (u32 i = lane; i < size; i += 32) {
                    const u32 id = space.list[i], owner = id / RUN, e = id % RUN;
                    const T old = element_of(stage + owner * STRIDE, e), now = element_of(next_stage + owner * STRIDE, e);
                    const u32 c = context_of(old, s);
                    const uint4 b = space.planes[owner];
                    const Planes theirs = {{b.x, b.y, b.z, b.w}, 0};
                    const u32 rank = ((const u16*)(space.ranks + owner * RANK_WORDS))[c] + __popc(theirs.of_context(c) & below(e));
                    const u32 slot = next_slot + first + i;
                    if (slot < out.capacity) {
                        out.ranks[slot] = (u16)rank;
                        out.pairs[slot] = {old, now};
                    }
                    atomicAdd(&space.changes[c], 1);
                    digest_change(id, old, now, multipliers, factors, change);
                }
                __syncwarp();
            }
            next_slot += total;
            left -= total;
            changed += total;
        }
        if (COMPARE) {
            if (has_own) seen = rank_lanes(space.ranks, own, seen, lane, false);
            if (lane < COUNTERS) ((u32*)elements)[(u64)at * stride + lane] = seen;
            if (lane < UNITS) out.sizes[at * UNITS + lane] = (u16)unit_size, out.slots[at * UNITS + lane] = unit_slot;
            if (lane < USED) out.counts[at * USED + lane] = (u16)space.changes[lane];
        } else {
#pragma unroll
            for (u32 i = 0; i < COUNTERS; ++i) {
                const u32 all = warp_sum(own[i]);
                if (lane == i) ((u32*)elements)[(u64)at * stride + i] = all;
            }
        }
        __syncwarp();
    }
    if (tensor != ALL && sums) flush_sums(sums + tensor, lane, before, change, changed);
}

extern "C" __global__ void __launch_bounds__(32 * SCAN_WARPS) find_changes(Tiles tiles, u16* elements, Changes out, Sums* sums) {
    scan_tiles<true, false>(tiles, elements, COUNTERS, out, sums);
}

#if WIDTH <= 16
extern "C" __global__ void __launch_bounds__(32 * SCAN_WARPS, 4) find_changes_of_masters(Tiles tiles, u16* elements, Changes out, Sums* sums) {
    scan_tiles<true, true>(tiles, elements, COUNTERS, out, sums);
}
#endif

extern "C" __global__ void __launch_bounds__(32 * SCAN_WARPS) count_elements(Tiles tiles, u32 stride, u16* elements, Sums* sums) {
    scan_tiles<false, false>(tiles, elements, stride, Changes{}, sums);
}

constexpr u32 READ_BLOCKS = 8;  // digest blocks that a warp reads at a time

// Reads the bytes from `at` on of a tile that has `bytes` bytes: the 16 bytes of this lane in each digest block of a window. Zeros follow the last byte.
template <bool CONSTANT>  // true if the kernel does not write to the tile
__device__ __forceinline__ void read_window(const u8* from, u32 at, u32 bytes, uint4 words[READ_BLOCKS]) {
#pragma unroll
    for (u32 b = 0; b < READ_BLOCKS; ++b, at += 512) {
        words[b] = make_uint4(0, 0, 0, 0);
        if (at + 16 <= bytes) {
            words[b] = CONSTANT ? __ldg((const uint4*)(from + at)) : *(const uint4*)(from + at);
        } else if (at < bytes) {
            u32 w[4] = {};
            for (u32 i = 0; i < bytes - at; ++i) w[i / 4] |= (u32)from[at + i] << (8 * (i % 4));
            words[b] = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}

// Only the digest (§2): a warp reads directly from global memory, and adds to `before` of each tensor's sums.
extern "C" __global__ void __launch_bounds__(256) digest(const Tensor* tensors, u32 ntensors, u32 ntiles, Sums* sums) {
    const u32 lane = threadIdx.x % 32;
    WordFactors t;
    t.load(lane);
    u32 before[4] = {}, none[4] = {}, tensor = ALL;
    for (u32 tile = blockIdx.x * 8 + threadIdx.x / 32; tile < ntiles; tile += gridDim.x * 8) {
        const u32 owner = owner_of(tensors, ntensors, tile);
        const Tensor x = tensors[owner];
        if (owner != tensor) {
            if (tensor != ALL) flush_sums(sums + tensor, lane, before, none, 0);
            tensor = owner;
        }
        const u64 offset = bytes_of((u64)(tile - x.tile0) * TILE), first = offset / 512;
        const u32 bytes = (u32)bytes_of(elements_in(x, tile));
        for (u32 group = 0; group * 512 < bytes; group += 32) {
            const uint4 factors = block_factors(x.seed, first + group + lane);
#pragma unroll 1
            for (u32 b = 0; b < 32; b += READ_BLOCKS) {
                uint4 words[READ_BLOCKS];
                read_window<true>(x.base + offset, (group + b) * 512 + lane * 16, bytes, words);
#pragma unroll
                for (u32 i = 0; i < READ_BLOCKS; ++i) {
                    const uint4 m = make_uint4(__shfl_sync(ALL, factors.x, b + i), __shfl_sync(ALL, factors.y, b + i),
                                               __shfl_sync(ALL, factors.z, b + i), __shfl_sync(ALL, factors.w, b + i));
                    digest_words(words[i], t, m, before);
                }
            }
        }
    }
    if (tensor != ALL) flush_sums(sums + tensor, lane, before, none, 0);
}
