// Finds the elements that decoded changes belong to: first the number of elements of each context before every tile, then the elements.

__device__ __forceinline__ T unaligned(const u8* from) {
    u64 x = 0;
#pragma unroll
    for (u32 b = 0; b < BYTES; ++b) x |= (u64)from[b] << (8 * b);
    return (T)x;
}

// Counts the elements of each tile of raw chunks that change, and stores the number where other chunks have the elements of the first context. There is one
// warp per tile.
extern "C" __global__ void __launch_bounds__(128) count_raw(
    const ElementRange* ranges, u32 nranges, u32 ntiles, const u8* image, Head* heads, Tile* tiles) {
    const u32 tile = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (tile >= ntiles) return;
    const u32 range = range_of(ranges, nranges, tile);
    const ElementRange s = ranges[range];
    if (s.mode != RAW) return;
    const u32 offset = (tile - s.tile0) * TILE, n = min(TILE, s.count - offset);
    u32 changed = 0;
    for (u32 i = lane; i < n; i += 32)
        changed += unaligned(image + (u64)s.next + (u64)(offset + i) * BYTES) != (s.base ? s.base[offset + i] : (T)0);
    changed = warp_sum(changed);
    if (lane == 0) {
        tiles[tile].elements[0] = (u16)changed;
        atomicAdd(&heads[range].total, changed);
    }
}

// Turns the elements of each tile (or its changes, in raw chunks) into the number of those before the tile in its chunk, for a slab of chunks. There is one
// thread block per chunk. `starts` are those of the slab's tiles. Checks the numbers of elements that inverted contexts state. In contexts where most steps
// have magnitude 1, it sets all of them to 1; `decode_segments` overwrites the larger ones.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) start_tiles(
    const ElementRange* ranges, u32 first_range, u32 first_tile, const u8* image, Head* heads, const Tile* all_tiles, u32* starts, Targets out) {
    __shared__ u32 parts[32][CONTEXTS];
    const ElementRange& s = ranges[first_range + blockIdx.x];
    Head& h = heads[first_range + blockIdx.x];
    const u32 tiles = (s.count + TILE - 1) / TILE, c = threadIdx.x % CONTEXTS, part = threadIdx.x / CONTEXTS, size = (tiles + 31) / 32;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, begin = min(part * size, tiles), end = min(begin + size, tiles);
    const u64 to = (u64)(s.tile0 - first_tile) * CONTEXTS + c;
    const bool raw = s.mode == RAW;
    if (s.mode == SAME) return;
    const auto count = [&](u32 t) { return raw && c ? 0u : (u32)all_tiles[s.tile0 + t].elements[c]; };
    u32 sum = 0;
    for (u32 t = begin; t < end; ++t) sum += count(t);
    parts[part][c] = sum;
    __syncthreads();
    const u32 mine = parts[lane][warp], upto = inclusive_scan(mine, lane);
    __syncwarp();
    parts[lane][warp] = upto - mine;
    if (lane == 31 && !raw && !h.error) {
        ContextHead& p = h.contexts[warp];
        p.elements = upto;
        if (p.n && (p.inverted ? p.n + p.unchanged != upto : p.n > upto)) atomicExch(&h.error, (u32)BAD_ELEMENTS);
    }
    __syncthreads();
    u32 at = parts[part][c];
    for (u32 t = begin; t < end; ++t) {
        starts[to + (u64)t * CONTEXTS] = at;
        at += count(t);
    }
    if (raw || h.error) return;
    const CodeReader in(image + (u64)s.next);
    for (u32 k = 0; k < (s.mask ? CONTEXTS : 1); ++k) {
        const ContextHead p = h.contexts[k];
        if (p.mode != UNIT_MODE && p.mode != RUNS) continue;
        T* const operands = out.operands + (s.start - out.first + p.before);
        for (u32 i = threadIdx.x; i < p.n; i += PLAN_THREADS) operands[i] = in.peek(p.signs_at + i) & 1 ? (T)~(T)0 : (T)1;
    }
}

// The changes of all ranges, ascending. Those of a tile are from `firsts[tile]` to `firsts[tile + 1]`.
struct Patch {
    u32* firsts;
    Tile* tiles;
    u8* positions;   // within a block of 256 elements
    T* values;       // the new values; after a swap, the old ones
};

struct LocateSpace {
    alignas(16) u8 stages[2][STAGE];
    alignas(16) uint4 multipliers[32];
    alignas(16) uint4 planes[32];
    u32 ranks[32 * RANK_WORDS];
    u32 marks[32];
};

constexpr u32 LOCATE_WARPS = 4;

// Returns the position of the i-th set bit.
__device__ __forceinline__ u32 select_bit(u32 bits, u32 i) {
    u32 at = 0;
#pragma unroll
    for (u32 half = 16; half; half /= 2) {
        const u32 n = __popc(bits >> at & ((1u << half) - 1));
        if (i >= n) i -= n, at += half;
    }
    return at;
}

// Finds the elements that decoded changes belong to. The slab's chunks have the tiles first … end. A warp takes `row` consecutive tiles.
extern "C" __global__ void __launch_bounds__(32 * LOCATE_WARPS, 6) locate(
    const ElementRange* ranges, u32 nranges, u32 first_tile, u32 end_tile, u32 row, const u8* image, const Head* heads, const u32* starts, Targets decoded,
    Patch patch, Sums* sums) {
    extern __shared__ __align__(16) u8 shared[];
    int4* const factors = (int4*)shared;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = lane % CONTEXTS;
    LocateSpace& space = ((LocateSpace*)(shared + 4096))[warp];
    for (u32 i = threadIdx.x; i < 256; i += blockDim.x)
        factors[i] = make_int4(word_factor(i, 0), word_factor(i, 1), word_factor(i, 2), word_factor(i, 3));
    __syncthreads();
    u32 none[4] = {}, change[4] = {}, tensor = ALL;
    const u32 groups = (end_tile - first_tile + row - 1) / row;
    for (u32 group = blockIdx.x * LOCATE_WARPS + warp; group < groups; group += gridDim.x * LOCATE_WARPS) {
        const u32 group_first = first_tile + group * row, group_end = min(group_first + row, end_tile);
        u32 range = ALL, at = 0, base_at = 0, n_c = 0;  // in this lane's context: the next change, the first one, and their number
        bool is_xor = false, ready = false;
        ElementRange s;
        for (u32 tile = group_first; tile < group_end; ++tile) {
            if (range == ALL || (range + 1 < nranges && ranges[range + 1].tile0 <= tile)) {
                range = range == ALL ? range_of(ranges, nranges, tile) : range + 1;
                s = ranges[range];
                ready = false;
                if (s.tensor != tensor) {
                    if (tensor != ALL) flush_sums(sums + tensor, lane, none, change, 0);
                    tensor = s.tensor;
                }
            }
            const bool raw = s.mode == RAW;
            if (s.mode == SAME || heads[range].error) {
                if (lane == 0) patch.firsts[tile] = s.start;
                continue;
            }
            const u32 start = starts[(u64)(tile - first_tile) * CONTEXTS + c];
            if (!raw && !ready) {
                const ContextHead& p = heads[range].contexts[c];
                n_c = p.n;
                is_xor = p.mode == SYMBOLS;
                const u32 upto = inclusive_scan(lane < CONTEXTS ? n_c : 0, lane);
                base_at = s.start - decoded.first + __shfl_sync(ALL, upto, c) - n_c;
                u32 low = 0, high = n_c;  // the first change that is not before this tile
                while (low < high) {
                    const u32 middle = (low + high) / 2;
                    if (decoded.ranks[base_at + middle] < start) low = middle + 1;
                    else high = middle;
                }
                at = low;
                ready = true;
            }
            u32 slot = s.start + (raw ? __shfl_sync(ALL, start, 0) : warp_sum(lane < CONTEXTS ? at : 0));
            if (lane == 0) patch.firsts[tile] = slot;
            const u32 offset = (tile - s.tile0) * TILE, n = min(TILE, s.count - offset), units = (n + UNIT - 1) / UNIT;
            const u8* const base = s.base ? (const u8*)(s.base + offset) : nullptr;
            const auto fetch = [&](u32 u) {
                fetch_unit(space.stages[u & 1], base ? base + u * UNIT * BYTES : nullptr, min(UNIT, n - u * UNIT) * BYTES, lane, (const u8*)ranges);
                fetch_commit();
            };
            fetch(0);
            const u64 digest_block = (s.first + offset) * BYTES / 512;
            u32 seen = 0, counts_of_unit = 0;
            u64 full = 0;
            // While the warp works on a unit, it fetches two changes of every context, one for each of the context's lanes.
            u32 target = ALL;
            T operand = 0;
            const auto look_ahead = [&] {
                const u32 i = at + lane / CONTEXTS;
                target = i < n_c ? decoded.ranks[base_at + i] : ALL;
                operand = i < n_c ? decoded.operands[base_at + i] : (T)0;
            };
            if (!raw) look_ahead();
            for (u32 u = 0; u < units; ++u) {
                if (u % (32 / DIGEST_BLOCKS) == 0) {
                    __syncwarp();
                    space.multipliers[lane] = block_factors(s.seed, digest_block + u * DIGEST_BLOCKS + lane);
                }
                if (u + 1 < units) {
                    fetch(u + 1);
                    fetch_wait<1>();
                } else {
                    fetch_wait<0>();
                }
                space.marks[lane] = 0;
                __syncwarp();
                u8* const stage = space.stages[u & 1];
                const uint4* const multipliers = space.multipliers + u % (32 / DIGEST_BLOCKS) * DIGEST_BLOCKS;
                const u32 run = min(max((i32)(n - u * UNIT) - (i32)(lane * RUN), 0), (i32)RUN);
                if (raw) {
                    u32 marks = 0;
                    const u8* const body = image + (u64)s.next + (u64)(offset + u * UNIT + lane * RUN) * BYTES;
                    for (u32 e = 0; e < run; ++e) {
                        T& element = *(T*)(stage + lane * STRIDE + e * BYTES);
                        const T now = unaligned(body + e * BYTES);
                        if (now == element) continue;
                        digest_change(lane * RUN + e, element, now, multipliers, factors, change);
                        element = now;
                        marks |= 1u << e;
                    }
                    space.marks[lane] = marks;
                } else {
                    const Planes planes = planes_of<false>(stage + lane * STRIDE, nullptr, s);
                    u32 counts[8];
                    count_contexts(planes, run == RUN ? ALL : below(run), counts);
                    seen = rank_lanes(space.ranks, counts, seen, lane, true);
                    const u32 end = start + (__shfl_sync(ALL, seen, c / 2) >> (c % 2 * 16) & 0xffff);
                    space.planes[lane] = make_uint4(planes.bit[0], planes.bit[1], planes.bit[2], planes.bit[3]);
                    __syncwarp();
                    const auto emit = [&](u32 context, u32 rank, T operand, bool by_xor) {
                        u32 owner = 0;  // the last lane that does not have more elements of this context before its run
#pragma unroll
                        for (u32 d = 16; d; d /= 2)
                            if (((const u16*)(space.ranks + (owner + d) * RANK_WORDS))[context] <= rank) owner += d;
                        const uint4 b = space.planes[owner];
                        const Planes theirs = {{b.x, b.y, b.z, b.w}, 0};
                        const u32 within = rank - ((const u16*)(space.ranks + owner * RANK_WORDS))[context];
                        const u32 e = select_bit(in_order(theirs.of_context(context)), within) & (RUN - 1);
                        T& element = *(T*)(stage + owner * STRIDE + e * BYTES);
                        const T old = element;
                        const T now = by_xor ? (T)(old ^ operand) : unordered((T)(ordered(old, s.mask != 0) + operand), s.mask != 0);
                        digest_change(owner * RUN + e, old, now, multipliers, factors, change);
                        element = now;
                        atomicOr(&space.marks[owner], 1u << e);
                    };
                    // The first two changes of every context are done at once, the others context by context.
                    if (__any_sync(ALL, target < end)) {
                        const bool active = target < end;
                        const u32 both = __ballot_sync(ALL, active);
                        at += (both >> c & 1) + (both >> (c + CONTEXTS) & 1);
                        const u32 rank = target - start;
                        const T by = operand;
                        look_ahead();
                        if (active) emit(c, rank, by, is_xor);
                    }
                    u32 left = __ballot_sync(ALL, target < end) & 0xffff;
                    if (left) {  // each half of the warp takes one context at a time, and fetches its next changes before it emits these
                        u32 context = CONTEXTS, i = 0, count = 0, from = 0, upto = 0, first = 0, mine = ALL;
                        bool by_xor = false, is_free = true;
                        T by = 0;
                        const auto go_on = [&] {
                            const u32 free_lanes = __ballot_sync(ALL, is_free);
                            if (free_lanes) {
                                const u32 rest = left & (left - 1), a = left ? __ffs(left) - 1 : CONTEXTS, b = rest ? __ffs(rest) - 1 : CONTEXTS;
                                const u32 next = is_free ? free_lanes == ALL && lane >= CONTEXTS ? b : a : context, source = next % CONTEXTS;
                                left = free_lanes == ALL ? rest & (rest - 1) : rest;
                                const u32 next_i = __shfl_sync(ALL, at, source), next_count = __shfl_sync(ALL, n_c, source);
                                from = __shfl_sync(ALL, base_at, source), upto = __shfl_sync(ALL, end, source), first = __shfl_sync(ALL, start, source);
                                by_xor = __shfl_sync(ALL, (u32)is_xor, source);
                                context = next;
                                if (is_free) i = next_i;
                                count = context < CONTEXTS ? next_count : 0;
                            }
                            const bool there = i + c < count;
                            mine = there ? decoded.ranks[from + i + c] : ALL;
                            by = there ? decoded.operands[from + i + c] : (T)0;
                        };
                        for (go_on(); __any_sync(ALL, context < CONTEXTS);) {
                            const bool active = mine < upto, xors = by_xor;
                            const u32 found = __popc(__ballot_sync(ALL, active) >> (lane & CONTEXTS) & 0xffff), rank = mine - first, here = context;
                            const T operand_here = by;
                            i += found;
                            is_free = found < CONTEXTS;
#pragma unroll
                            for (u32 half = 0; half < 32; half += CONTEXTS) {
                                const u32 ended = __shfl_sync(ALL, is_free ? context : CONTEXTS, half), upto_here = __shfl_sync(ALL, i, half);
                                if (c == ended) at = upto_here;
                            }
                            go_on();
                            if (active) emit(here, rank, operand_here, xors);
                        }
                        look_ahead();
                    }
                }
                __syncwarp();
                const u32 marks = space.marks[lane], upto = inclusive_scan(__popc(marks), lane);
                u32 to = slot + upto - __popc(marks);
                for (u32 pending = marks; pending; pending &= pending - 1) {
                    const u32 e = __ffs(pending) - 1;
                    patch.positions[to] = (u8)(lane * RUN + e);
                    patch.values[to++] = *(const T*)(stage + lane * STRIDE + e * BYTES);
                }
                // A unit has four blocks; each of four lanes counts one.
                const u32 end = __shfl_sync(ALL, upto, (8 * lane + 7) % 32), before = __shfl_up_sync(ALL, end, 1), count = end - (lane ? before : 0);
                const u32 four = warp_sum(lane < 4 ? (count & 0xff) << (8 * lane) : 0), whole = __ballot_sync(ALL, lane < 4 && count == 256);
                if (lane == u) counts_of_unit = four;
                full |= (u64)whole << (4 * u);
                slot += __shfl_sync(ALL, upto, 31);
                __syncwarp();
            }
            if (lane < UNITS) ((u32*)patch.tiles[tile].counts)[lane] = counts_of_unit;
            if (lane < 2) patch.tiles[tile].full[lane] = (u32)(full >> (32 * lane));
        }
    }
    if (tensor != ALL) flush_sums(sums + tensor, lane, none, change, 0);
}
