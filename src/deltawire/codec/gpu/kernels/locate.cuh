// Finds the elements that decoded changes belong to: first the number of elements of each context before every tile, then the elements.

// Returns an element of a raw body, which begins at any address.
__device__ __forceinline__ T raw_element(const u8* body, u64 i) {
#if WIDTH == 4
    return element_of(body, i);
#else
    u64 x = 0;
#pragma unroll
    for (u32 b = 0; b < WIDTH / 8; ++b) x |= (u64)body[i * (WIDTH / 8) + b] << (8 * b);
    return (T)x;
#endif
}

// Changes an element of a row in shared memory. Other lanes may change other elements of the row.
__device__ __forceinline__ void set_element(u8* row, u32 e, T old, T now) {
#if WIDTH == 4
    atomicXor((u32*)row + e / 8, (u32)(old ^ now) << (4 * (e % 8)));
#else
    ((T*)row)[e] = now;
#endif
}

// Returns where the elements of a tile begin in the body of its raw chunk.
__device__ __forceinline__ const u8* raw_tile(const Tensor* tensors, u32 ntensors, const u8* image, const Run& s, const Tensor& x, u32 tile) {
    const Tensor& first = tensors[owner_of(tensors, ntensors, s.tile0)];
    return image + s.body + bytes_of(x.element0 + (u64)(tile - x.tile0) * TILE - first.element0 - (u64)(s.tile0 - first.tile0) * TILE);
}

// Counts the elements of each tile of raw chunks that change. There is one warp per tile. The chunks have the tiles first … end.
extern "C" __global__ void __launch_bounds__(128) count_raw(Tiles tiles, const u8* image, Head* heads, u16* raw_changes) {
    const u32 tile = tiles.first + blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (tile >= tiles.end) return;
    const u32 chunk = owner_of(tiles.runs, tiles.nruns, tile);
    const Run s = tiles.runs[chunk];
    if (s.mode != RAW) return;
    const Tensor x = tiles.tensors[owner_of(tiles.tensors, tiles.ntensors, tile)];
    const u64 offset = (u64)(tile - x.tile0) * TILE;
    const u8* const body = raw_tile(tiles.tensors, tiles.ntensors, image, s, x, tile);
    u32 changed = 0;
    for (u32 i = lane; i < elements_in(x, tile); i += 32) changed += raw_element(body, i) != (x.base ? element_of(x.base, offset + i) : (T)0);
    changed = warp_sum(changed);
    if (lane == 0) {
        raw_changes[tile] = (u16)changed;
        atomicAdd(&heads[chunk].total, changed);
    }
}

// Turns the elements of each tile (or its changes, in raw chunks) into the number of those before the tile in its chunk, for a slab of chunks. There is one
// thread block per chunk. `starts` are those of the slab's tiles. Checks the numbers of elements that inverted contexts state. In contexts where most steps
// have magnitude 1, it sets all of them to 1; `decode_segments` overwrites the larger ones.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) start_tiles(
    const Run* chunks, u32 first_chunk, u32 first_tile, const u8* image, Head* heads, const Tile* all_tiles, const u16* raw_changes, u32* starts, Targets out) {
    __shared__ u32 parts[32][CONTEXTS];
    const Run& s = chunks[first_chunk + blockIdx.x];
    Head& h = heads[first_chunk + blockIdx.x];
    const u32 tiles = s.tiles, c = threadIdx.x % CONTEXTS, part = threadIdx.x / CONTEXTS, size = (tiles + 31) / 32;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, begin = min(part * size, tiles), end = min(begin + size, tiles);
    const u64 to = (u64)(s.tile0 - first_tile) * CONTEXTS + c;
    const bool raw = s.mode == RAW;
    if (s.mode == SAME) return;
    const auto count = [&](u32 t) { return raw ? c ? 0u : (u32)raw_changes[s.tile0 + t] : c < USED ? (u32)all_tiles[s.tile0 + t].elements[c] : 0u; };
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
    const CodeReader in(image + s.body);
    for (u32 k = 0; k < (s.coding.mask ? CONTEXTS : 1); ++k) {
        const ContextHead p = h.contexts[k];
        if (p.mode != UNIT_MODE && p.mode != RUNS) continue;
        T* const operands = out.operands + (s.start - out.first + p.before);
        for (u32 i = threadIdx.x; i < p.n; i += PLAN_THREADS) operands[i] = in.peek(p.signs_at + i) & 1 ? MASK : (T)1;
    }
}

// The changes of all tiles, ascending. Those of a tile begin at `firsts[tile]`. They end before `firsts[tile + 1]`: at it if cells are elements, and earlier
// if several changed elements share a cell.
struct Patch {
    u32* firsts;
    Tile* tiles;
    u8* positions;   // within a block of 256 cells
    T* values;       // the new cells; after a swap, the old ones
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
    Tiles tiles, u32 row, const u8* image, const Head* heads, const u32* starts, Targets decoded, Patch patch, Sums* sums) {
    extern __shared__ __align__(16) u8 shared[];
    int4* const factors = (int4*)shared;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = lane % CONTEXTS;
    LocateSpace& space = ((LocateSpace*)(shared + 4096))[warp];
    for (u32 i = threadIdx.x; i < 256; i += blockDim.x)
        factors[i] = make_int4(word_factor(i, 0), word_factor(i, 1), word_factor(i, 2), word_factor(i, 3));
    __syncthreads();
    u32 none[4] = {}, change[4] = {}, tensor = ALL;
    const u32 groups = (tiles.end - tiles.first + row - 1) / row;
    for (u32 group = blockIdx.x * LOCATE_WARPS + warp; group < groups; group += gridDim.x * LOCATE_WARPS) {
        const u32 group_first = tiles.first + group * row, group_end = min(group_first + row, tiles.end);
        u32 chunk = ALL, at = 0, base_at = 0, n_c = 0;  // in this lane's context: the next change, the first one, and their number
        u32 owner = owner_of(tiles.tensors, tiles.ntensors, group_first);
        bool is_xor = false, ready = false;
        Run s;
        Tensor x = tiles.tensors[owner];
        for (u32 tile = group_first; tile < group_end; ++tile) {
            if (chunk == ALL || (chunk + 1 < tiles.nruns && tiles.runs[chunk + 1].tile0 <= tile)) {
                chunk = chunk == ALL ? owner_of(tiles.runs, tiles.nruns, tile) : chunk + 1;
                s = tiles.runs[chunk];
                ready = false;
            }
            if (owner + 1 < tiles.ntensors && tiles.tensors[owner + 1].tile0 <= tile) {
                while (owner + 1 < tiles.ntensors && tiles.tensors[owner + 1].tile0 <= tile) ++owner;
                x = tiles.tensors[owner];
            }
            if (owner != tensor) {
                if (tensor != ALL) flush_sums(sums + tensor, lane, none, change, 0);
                tensor = owner;
            }
            const bool raw = s.mode == RAW;
            if (s.mode == SAME || heads[chunk].error) {
                if (lane == 0) patch.firsts[tile] = s.start;
                continue;
            }
            const u32 start = starts[(u64)(tile - tiles.first) * CONTEXTS + c];
            if (!raw && !ready) {
                const ContextHead& p = heads[chunk].contexts[c];
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
            const u32 n = elements_in(x, tile), units = (n + UNIT - 1) / UNIT;
            const u64 offset = bytes_of((u64)(tile - x.tile0) * TILE);
            const u8* const base = x.base ? x.base + offset : nullptr;
            const auto fetch = [&](u32 u) {
                const u32 bytes = (u32)bytes_of(min(UNIT, n - u * UNIT));
                fetch_unit(space.stages[u & 1], base ? base + u * UNIT_BYTES : nullptr, bytes, lane, (const u8*)tiles.tensors);
                fetch_commit();
            };
            fetch(0);
            const u64 digest_block = offset / 512;
            const u8* const body = raw ? raw_tile(tiles.tensors, tiles.ntensors, image, s, x, tile) : nullptr;
            u32 seen = 0, counts_of_unit = 0;
            u64 full = 0;
            // The number of elements of this lane's context up to the end of the tile.
            const u32 tile_end = tile + 1 < s.tile0 + s.tiles ? starts[(u64)(tile + 1 - tiles.first) * CONTEXTS + c] : heads[chunk].contexts[c].elements;
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
                if (!raw && !__any_sync(ALL, target < tile_end)) break;  // no change is left in this tile
                if (u % (32 / DIGEST_BLOCKS) == 0) {
                    __syncwarp();
                    space.multipliers[lane] = block_factors(x.seed, digest_block + u * DIGEST_BLOCKS + lane);
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
                    for (u32 e = 0; e < run; ++e) {
                        const T old = element_of(stage + lane * STRIDE, e), now = raw_element(body, u * UNIT + lane * RUN + e);
                        if (now == old) continue;
                        digest_change(lane * RUN + e, old, now, multipliers, factors, change);
                        set_element(stage + lane * STRIDE, e, old, now);
                        marks |= 1u << e;
                    }
                    space.marks[lane] = marks;
                } else {
                    const Planes planes = planes_of<false>(stage + lane * STRIDE, nullptr, s.coding);
                    u32 counts[COUNTERS];
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
                        const bool floating = s.coding.mask != 0;
                        const T old = element_of(stage + owner * STRIDE, e);
                        const T now = by_xor ? (T)(old ^ operand) : unordered((T)((ordered(old, floating) + operand) & MASK), floating);
                        digest_change(owner * RUN + e, old, now, multipliers, factors, change);
                        set_element(stage + owner * STRIDE, e, old, now);
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
                u32 marks = space.marks[lane];
#if WIDTH == 4  // two elements share a cell
                marks = (marks | marks >> 1) & 0x55555555;
                marks = (marks | marks >> 1) & 0x33333333;
                marks = (marks | marks >> 2) & 0x0f0f0f0f;
                marks = (marks | marks >> 4) & 0x00ff00ff;
                marks = (marks | marks >> 8) & 0x0000ffff;
#endif
                const u32 upto = inclusive_scan(__popc(marks), lane);
                u32 to = slot + upto - __popc(marks);
                for (u32 pending = marks; pending; pending &= pending - 1) {
                    const u32 e = __ffs(pending) - 1;
                    patch.positions[to] = (u8)(lane * ROW_CELLS + e);
                    patch.values[to++] = ((const T*)(stage + lane * STRIDE))[e];
                }
                // A unit has several blocks of 256 cells; each is counted by one lane.
                constexpr u32 LANES = 32 / UNIT_BLOCKS;
                const u32 end = __shfl_sync(ALL, upto, (LANES * lane + LANES - 1) % 32), before = __shfl_up_sync(ALL, end, 1), count = end - (lane ? before : 0);
                const u32 counts = warp_sum(lane < UNIT_BLOCKS ? (count & 0xff) << (8 * lane) : 0);
                const u32 whole = __ballot_sync(ALL, lane < UNIT_BLOCKS && count == 256);
                if (lane == u) counts_of_unit = counts;
                full |= (u64)whole << (UNIT_BLOCKS * u);
                slot += __shfl_sync(ALL, upto, 31);
                __syncwarp();
            }
            fetch_wait<0>();
            __syncwarp();
            for (u32 i = 0; i < UNIT_BLOCKS; ++i)
                if (lane < UNITS) patch.tiles[tile].counts[lane * UNIT_BLOCKS + i] = (u8)(counts_of_unit >> (8 * i));
            if (lane < PATCH_BLOCKS / 32) patch.tiles[tile].full[lane] = (u32)(full >> (32 * lane));
        }
    }
    if (tensor != ALL) flush_sums(sums + tensor, lane, none, change, 0);
}
