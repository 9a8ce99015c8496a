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
    // Returns the first cell of the block that has the i-th change of the tile.
    __device__ __forceinline__ u32 cell(u32 i) const {
        u32 block = 0;
#pragma unroll
        for (u32 d = PATCH_BLOCKS / 2; d; d /= 2)
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
