// Writes located changes to the weights.

// Where the changes of each block of a tile start. The whole warp must call these functions.
struct BlockStarts {
    u16 of[64];

    __device__ void load(const Tile& tile, u32 lane) {
        const u32 two = ((const u16*)tile.counts)[lane], full = tile.full[lane / 16] >> (lane % 16 * 2);
        const u32 a = (two & 0xff) + (full & 1) * 256, b = (two >> 8) + (full >> 1 & 1) * 256;
        const u32 start = inclusive_scan(a + b, lane) - a - b;
        __syncwarp();
        of[2 * lane] = (u16)start;
        of[2 * lane + 1] = (u16)(start + a);
        __syncwarp();
    }
    // Returns the first element of the block that has the i-th change of the tile.
    __device__ __forceinline__ u32 element(u32 i) const {
        u32 block = 0;
#pragma unroll
        for (u32 d = 32; d; d /= 2)
            if (of[block + d] <= i) block += d;
        return block * 256;
    }
};

// Writes the values of a patch to tensors that start at `bases`; a tensor with a null base is skipped. When swapping, the patch gets the replaced values, so
// that a second call restores them. There is one warp per tile.
template <bool SWAP>
__device__ __forceinline__ void write_tiles(const ElementRange* ranges, u32 nranges, u32 ntiles, Patch patch, T* const* bases) {
    constexpr u32 EACH = 8;
    __shared__ BlockStarts all_starts[8];
    const u32 lane = threadIdx.x % 32;
    BlockStarts& starts = all_starts[threadIdx.x / 32];
    for (u32 tile = blockIdx.x * 8 + threadIdx.x / 32; tile < ntiles; tile += gridDim.x * 8) {
        const u32 first = patch.firsts[tile], end = patch.firsts[tile + 1];
        if (first == end) continue;
        starts.load(patch.tiles[tile], lane);
        T* base = nullptr;
        for (u32 i0 = first; i0 < end; i0 += 32 * EACH) {
            u32 position[EACH];
            T now[EACH], old[EACH];
#pragma unroll
            for (u32 j = 0; j < EACH; ++j) {
                const u32 i = min(i0 + 32 * j + lane, end - 1);
                position[j] = starts.element(i - first) + patch.positions[i], now[j] = patch.values[i];
            }
            if (i0 == first) {
                const ElementRange& s = ranges[range_of(ranges, nranges, tile)];
                base = bases[s.tensor];
                if (!base) break;
                base += s.first + (u64)(tile - s.tile0) * TILE;
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

extern "C" __global__ void __launch_bounds__(256) write_patch(const ElementRange* ranges, u32 nranges, u32 ntiles, Patch patch, T* const* bases) {
    write_tiles<false>(ranges, nranges, ntiles, patch, bases);
}

extern "C" __global__ void __launch_bounds__(256) swap_patch(const ElementRange* ranges, u32 nranges, u32 ntiles, Patch patch, T* const* bases) {
    write_tiles<true>(ranges, nranges, ntiles, patch, bases);
}

// Computes the flat indices, within their tensors, of the changes in tiles first … end.
extern "C" __global__ void __launch_bounds__(256) flat_indices(
    const ElementRange* ranges, u32 nranges, u32 first_tile, u32 end_tile, Patch patch, u64* out) {
    __shared__ BlockStarts all_starts[8];
    const u32 tile = first_tile + blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    BlockStarts& starts = all_starts[threadIdx.x / 32];
    if (tile >= end_tile || patch.firsts[tile] == patch.firsts[tile + 1]) return;
    starts.load(patch.tiles[tile], lane);
    const ElementRange& s = ranges[range_of(ranges, nranges, tile)];
    const u64 before = s.first + (u64)(tile - s.tile0) * TILE;
    const u32 origin = patch.firsts[first_tile], first = patch.firsts[tile];
    for (u32 i = first + lane; i < patch.firsts[tile + 1]; i += 32) out[i - origin] = before + starts.element(i - first) + patch.positions[i];
}

extern "C" __device__ const u32 resolve_sizes[] = {
    4096 + SCAN_WARPS * sizeof(ScanSpace<false>), 4096 + LOCATE_WARPS * sizeof(LocateSpace), sizeof(Head), sizeof(Task), sizeof(Tile)};
