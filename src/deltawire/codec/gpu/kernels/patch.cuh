// Writes located changes to the weights.

// Where the changes of each block of 256 cells start. The whole warp must call these functions.
struct BlockStarts {
    u16 of[PATCH_BLOCKS];

    // Returns the number of changes of the tile.
    __device__ u32 load(const Tile& tile, u32 lane) {
        constexpr u32 EACH = PATCH_BLOCKS / 32;
        u32 counts[EACH], sum = 0;
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            const u32 block = EACH * lane + i;
            sum += counts[i] = tile.counts[block] + (tile.full[block / 32] >> (block % 32) & 1) * 256;
        }
        const u32 upto = inclusive_scan(sum, lane);
        u32 start = upto - sum;
        __syncwarp();
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            of[EACH * lane + i] = (u16)start;
            start += counts[i];
        }
        __syncwarp();
        return __shfl_sync(ALL, upto, 31);
    }
    // Returns the first cell of the block that has the i-th change of the tile. It is one of `BLOCKS` blocks, from `block` on.
    template <u32 BLOCKS = PATCH_BLOCKS>
    __device__ __forceinline__ u32 cell(u32 i, u32 block = 0) const {
#pragma unroll
        for (u32 d = BLOCKS / 2; d; d /= 2)
            if (of[block + d] <= i) block += d;
        return block * 256;
    }
};

// Writes the values of a patch to tensors that start at `bases`; a tensor with a null base is skipped. When swapping, the patch gets the replaced values, so
// that a second call restores them. There is one warp per tile.
template <bool SWAP>
__device__ __forceinline__ void write_tiles(const Tensor* tensors, u32 ntensors, u32 ntiles, Patch patch, T* const* bases) {
    constexpr u32 EACH = 8;
    __shared__ BlockStarts all_starts[8];
    const u32 lane = threadIdx.x % 32;
    BlockStarts& starts = all_starts[threadIdx.x / 32];
    for (u32 tile = blockIdx.x * 8 + threadIdx.x / 32; tile < ntiles; tile += gridDim.x * 8) {
        const u32 first = patch.firsts[tile];
        if (first == patch.firsts[tile + 1]) continue;
        const u32 end = first + starts.load(patch.tiles[tile], lane);
        T* base = nullptr;
        for (u32 i0 = first; i0 < end; i0 += 32 * EACH) {
            u32 position[EACH];
            T now[EACH], old[EACH];
#pragma unroll
            for (u32 j = 0; j < EACH; ++j) {
                const u32 i = min(i0 + 32 * j + lane, end - 1);
                position[j] = starts.cell(i - first) + patch.positions[i], now[j] = patch.values[i];
            }
            if (i0 == first) {
                const u32 owner = owner_of(tensors, ntensors, tile);
                base = bases[owner];
                if (!base) break;
                base += (u64)(tile - tensors[owner].tile0) * CELLS;
            }
            if (SWAP) {
#pragma unroll
                for (u32 j = 0; j < EACH; ++j)
                    if (i0 + 32 * j + lane < end) old[j] = base[position[j]];
            }
#pragma unroll
            for (u32 j = 0; j < EACH; ++j)
                if (i0 + 32 * j + lane < end) {
                    base[position[j]] = now[j];
                    if (SWAP) patch.values[i0 + 32 * j + lane] = old[j];
                }
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) write_patch(const Tensor* tensors, u32 ntensors, u32 ntiles, Patch patch, T* const* bases) {
    write_tiles<false>(tensors, ntensors, ntiles, patch, bases);
}

extern "C" __global__ void __launch_bounds__(256) swap_patch(const Tensor* tensors, u32 ntensors, u32 ntiles, Patch patch, T* const* bases) {
    write_tiles<true>(tensors, ntensors, ntiles, patch, bases);
}

// Adds the difference to the digest when one cell changes. `multipliers` are those of the digest block that has cell 0, and of those after it.
__device__ __forceinline__ void digest_cell(u32 cell, T old, T now, const uint4* multipliers, const int4* factors, u32 sums[4]) {
#if WIDTH == 4
    digest_change(2 * cell, old & 15, now & 15, multipliers, factors, sums);
    digest_change(2 * cell + 1, old >> 4, now >> 4, multipliers, factors, sums);
#else
    digest_change(cell, old, now, multipliers, factors, sums);
#endif
}

struct ExchangeSpace {
    alignas(16) uint4 multipliers[32];
    BlockStarts starts;
};

// Does what `swap_patch` does, and adds the digest (§2) of the new contents of each tensor to `before` of its sums, even for tiles that do not change. Weights
// come from memory once: a warp reads a window, digests it, and then exchanges the changed cells of the window, which are still in the cache, and adds the
// difference that they make. So the digest is that of the values that are stored, not of values that are read back.
extern "C" __global__ void __launch_bounds__(256, 3) exchange_patch(
    const Tensor* tensors, u32 ntensors, u32 ntiles, Patch patch, T* const* bases, Sums* sums) {
    constexpr u32 EACH = 512 * READ_BLOCKS / sizeof(T) / 256;  // blocks of 256 cells in a window
    __shared__ __align__(16) int4 word_factors[256];
    __shared__ __align__(16) ExchangeSpace all_spaces[8];
    const u32 lane = threadIdx.x % 32;
    ExchangeSpace& space = all_spaces[threadIdx.x / 32];
    word_factors[threadIdx.x] =
        make_int4(word_factor(threadIdx.x, 0), word_factor(threadIdx.x, 1), word_factor(threadIdx.x, 2), word_factor(threadIdx.x, 3));
    __syncthreads();
    WordFactors t;
    t.load(lane);
    u32 after[4] = {}, none[4] = {}, tensor = ALL;
    for (u32 tile = blockIdx.x * 8 + threadIdx.x / 32; tile < ntiles; tile += gridDim.x * 8) {
        const u32 owner = owner_of(tensors, ntensors, tile);
        const Tensor x = tensors[owner];
        if (!bases[owner]) continue;
        if (owner != tensor) {
            if (tensor != ALL) flush_sums(sums + tensor, lane, after, none, 0);
            tensor = owner;
        }
        const u64 offset = bytes_of((u64)(tile - x.tile0) * TILE), digest_block = offset / 512;
        const u32 bytes = (u32)bytes_of(elements_in(x, tile)), first = patch.firsts[tile];
        const u32 changes = first == patch.firsts[tile + 1] ? 0 : space.starts.load(patch.tiles[tile], lane);
        T* const base = (T*)((u8*)bases[owner] + offset);
        for (u32 group = 0; group * 512 < bytes; group += 32) {
            __syncwarp();
            space.multipliers[lane] = block_factors(x.seed, digest_block + group + lane);
            __syncwarp();
#pragma unroll 1
            for (u32 b = 0; b < 32 && (group + b) * 512 < bytes; b += READ_BLOCKS) {
                uint4 words[READ_BLOCKS];
                read_window<false>((const u8*)base, (group + b) * 512 + lane * 16, bytes, words);
                const u32 cell0 = (group + b) * (512 / sizeof(T)), block = cell0 / 256;
                u32 i = 0, end = 0, cell = 0;
                T now = 0, old = 0;
                const auto fetch = [&] {
                    if (i >= end) return;
                    cell = space.starts.cell<EACH>(i, block) + patch.positions[first + i];
                    now = patch.values[first + i], old = base[cell];
                };
                if (changes) {
                    i = space.starts.of[block] + lane;
                    end = block + EACH < PATCH_BLOCKS ? space.starts.of[block + EACH] : changes;
                    fetch();
                }
#pragma unroll
                for (u32 k = 0; k < READ_BLOCKS; ++k) digest_words(words[k], t, space.multipliers[b + k], after);
                __syncwarp();  // every lane has read its words
                while (i < end) {
                    base[cell] = now, patch.values[first + i] = old;
                    digest_cell(cell - cell0, old, now, space.multipliers + b, word_factors, after);
                    i += 32;
                    fetch();
                }
            }
        }
    }
    if (tensor != ALL) flush_sums(sums + tensor, lane, after, none, 0);
}

// Counts the changed cells of all tiles.
extern "C" __global__ void __launch_bounds__(256) count_cells(u32 ntiles, Patch patch, u32* out) {
    __shared__ BlockStarts all_starts[8];
    const u32 tile = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (tile >= ntiles) return;
    const bool any = patch.firsts[tile] != patch.firsts[tile + 1];
    const u32 n = any ? all_starts[threadIdx.x / 32].load(patch.tiles[tile], lane) : 0;
    if (lane == 0) out[tile] = n;
}

// Computes the flat indices, within their tensors, of all changed cells, and lists their values. `starts` says where the cells of each tile go.
extern "C" __global__ void __launch_bounds__(256) list_cells(
    const Tensor* tensors, u32 ntensors, u32 ntiles, Patch patch, const u32* starts_of_tiles, u64* indices, T* values) {
    __shared__ BlockStarts all_starts[8];
    const u32 tile = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    BlockStarts& starts = all_starts[threadIdx.x / 32];
    if (tile >= ntiles || patch.firsts[tile] == patch.firsts[tile + 1]) return;
    const u32 n = starts.load(patch.tiles[tile], lane), first = patch.firsts[tile], to = starts_of_tiles[tile];
    const Tensor& x = tensors[owner_of(tensors, ntensors, tile)];
    const u64 before = (u64)(tile - x.tile0) * CELLS;
    for (u32 i = lane; i < n; i += 32) {
        indices[to + i] = before + starts.cell(i) + patch.positions[first + i];
        if (values) values[to + i] = patch.values[first + i];
    }
}

extern "C" __device__ const u32 resolve_sizes[] = {
    4096 + SCAN_WARPS * sizeof(ScanSpace<false>), 4096 + LOCATE_WARPS * sizeof(LocateSpace), sizeof(Head), sizeof(Task), sizeof(Tile)};
