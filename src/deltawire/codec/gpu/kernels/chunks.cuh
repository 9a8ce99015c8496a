// Turns tiles into chunks, and bodies into the bytes of payloads (docs/format.md §3 and §5, rules 1, 2 and 7).

// Chooses `top` of blocks (§5.2). There is one thread block per block of the format.
extern "C" __global__ void __launch_bounds__(256) choose_tops(const Tensor* tensors, u32 ntensors, Run* blocks) {
    __shared__ u32 histogram[2048];
    Run& s = blocks[blockIdx.x];
    if (!s.coding.mask) {
        if (threadIdx.x == 0) s.coding.top = 0;
        return;
    }
    for (u32 i = threadIdx.x; i < 2048; i += 256) histogram[i] = 0;
    __syncthreads();
    const u32 step = (s.elements + 1023) / 1024, m = (s.elements + step - 1) / step;
    const Tensor& first = tensors[owner_of(tensors, ntensors, s.tile0)];
    const u64 begin = first.element0 + (u64)(s.tile0 - first.tile0) * TILE;
    for (u32 i = threadIdx.x; i < m; i += 256) {
        const u64 element = begin + (u64)i * step;
        u32 low = 0, high = ntensors;
        while (high - low > 1) {
            const u32 middle = (low + high) / 2;
            if (tensors[middle].element0 <= element) low = middle;
            else high = middle;
        }
        const Tensor& x = tensors[low];
        const u64 at = element - x.element0;
        const T value = makes_base(x) ? made_element(x, at) : x.base ? element_of(x.base, at) : (T)0;
        atomicAdd(&histogram[(u32)(value >> s.coding.shift) & s.coding.mask], 1);
    }
    __syncthreads();
    if (threadIdx.x < 32) {  // starts at the largest exponent and goes down, 32 exponents at a time
        const u32 lane = threadIdx.x, above = m / 64;  // number of elements of the sample above the wanted one
        u32 seen = 0;
        for (i32 high = 2047; high >= 0; high -= 32) {
            const u32 upto = seen + inclusive_scan(histogram[high - (i32)lane], lane);
            const u32 found = __ballot_sync(ALL, upto > above);
            if (found) {
                if (lane == 0) s.coding.top = (u32)high - (__ffs(found) - 1);
                break;
            }
            seen = __shfl_sync(ALL, upto, 31);
        }
    }
}

// The number of a chunk is that of its first tile, so all arrays of chunks are as long as those of tiles.
struct Chunk {
    u32 tiles;   // 0 if no chunk starts with this tile
    u32 block;
    u32 mode;
    u32 bytes;   // size of its body
    u64 body;    // offset of its body, in words
};

// Cuts blocks into chunks (§5.1), one thread block per block. `work` lists the chunks in no particular order, `nwork` counts them. Arrays of tiles begin
// with `first_tile`.
extern "C" __global__ void __launch_bounds__(256) cut_chunks(const Run* blocks, u32 first_tile, const u16* counts, Chunk* chunks, u32* work, u32* nwork) {
    __shared__ u32 changes[MOST_TILES], ended[MOST_TILES / 32], ended_before[MOST_TILES / 32], position;
    const u32 thread = threadIdx.x, lane = thread % 32, tiles = blocks[blockIdx.x].tiles, tile0 = blocks[blockIdx.x].tile0 - first_tile;
    for (u32 t = thread; t < tiles; t += 256) {
        const uint4* from = (const uint4*)(counts + (u64)(tile0 + t) * USED);
        u32 sum = 0;
#pragma unroll
        for (u32 i = 0; i < USED / 8; ++i) {
            const uint4 a = from[i];
            const u32 w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
            for (u32 q = 0; q < 4; ++q) sum += (w[q] & 0xffff) + (w[q] >> 16);
        }
        changes[t] = sum;
        chunks[tile0 + t].tiles = 0;
    }
    __syncthreads();
    if (thread < 32) {  // finds the tiles that end a chunk
        u32 start = 0, pending = 0, total = 0;
        for (u32 first = 0; first < tiles; first += 32) {
            const u32 upto = inclusive_scan(first + lane < tiles ? changes[first + lane] : 0, lane);
            u32 done = 0, found_here = 0;  // changes of these tiles in chunks that are complete
            for (;;) {
                const bool ends = first + lane >= start && first + lane < tiles && (pending + upto - done >= TILE || first + lane + 1 == tiles);
                const u32 found = __ballot_sync(ALL, ends);
                if (!found) break;
                const u32 at = __ffs(found) - 1;
                found_here |= 1u << at;
                start = first + at + 1;
                done = __shfl_sync(ALL, upto, at);
                pending = 0;
            }
            pending += __shfl_sync(ALL, upto, 31) - done;
            if (lane == 0) ended[first / 32] = found_here, ended_before[first / 32] = total;
            total += __popc(found_here);
        }
        if (lane == 0) position = atomicAdd(nwork, total);
    }
    __syncthreads();
    for (u32 t = thread; t < tiles; t += 256) {
        if (!(ended[t / 32] >> lane & 1)) continue;
        u32 word = t / 32, earlier = ended[word] & ((1u << lane) - 1);
        const u32 number = ended_before[word] + __popc(earlier);
        while (!earlier && word) earlier = ended[--word];
        const u32 begin = earlier ? 32 * word + 32 - __clz(earlier) : 0;
        Chunk& c = chunks[tile0 + begin];
        c.tiles = t + 1 - begin;
        c.block = blockIdx.x;
        work[position + number] = tile0 + begin;
    }
}

// The tensors of a slab. Arrays of tiles begin with `first_tile`.
struct Slab {
    const Tensor* tensors;
    u32 ntensors, first_tile;
};

__device__ __forceinline__ u32 varint_bytes(u32 x) { return x < 1u << 7 ? 1 : x < 1u << 14 ? 2 : x < 1u << 21 ? 3 : x < 1u << 28 ? 4 : 5; }

// The number of bytes before the body of a chunk.
__device__ __forceinline__ u32 header_bytes(const Chunk& c) { return varint_bytes(c.tiles << 2 | c.mode) + varint_bytes(c.bytes); }

// Finds where the bytes of each chunk end within those of its block, the total of each block, and how much of it is a chunk at its end that changes nothing.
// There is one thread block per block.
extern "C" __global__ void __launch_bounds__(256) measure_chunks(
    const Run* blocks, u32 first_tile, const Chunk* chunks, u32* ends, u64* totals, u64* unchanged, Changes changes) {
    __shared__ u32 sums[8];
    if (*changes.cursor > changes.capacity) return;  // in that case no chunk was encoded
    const u32 tiles = blocks[blockIdx.x].tiles, tile0 = blocks[blockIdx.x].tile0 - first_tile;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, each = (tiles + 255) / 256;
    const u32 begin = min(threadIdx.x * each, tiles), end = min(begin + each, tiles);
    const auto size_of = [&](u32 t) {
        const Chunk& c = chunks[tile0 + t];
        return c.tiles ? header_bytes(c) + c.bytes : 0;
    };
    u32 sum = 0;
    for (u32 t = begin; t < end; ++t) {
        sum += size_of(t);
        const Chunk& c = chunks[tile0 + t];
        if (c.tiles && c.mode == SAME) unchanged[blockIdx.x] = size_of(t);  // all chunks before the last change something
    }
    u32 upto = inclusive_scan(sum, lane);
    if (lane == 31) sums[warp] = upto;
    __syncthreads();
    for (u32 w = 0; w < warp; ++w) upto += sums[w];
    u32 at = upto - sum;
    for (u32 t = begin; t < end; ++t) ends[tile0 + t] = at += size_of(t);
    if (threadIdx.x == 255) totals[blockIdx.x] = upto;
}

// Copies bytes to any address. `word(i)` are four bytes from byte 4i on, `byte(i)` is one; words are read only within the bytes. `thread` is one of `threads`.
template <class Word, class Byte>
__device__ __forceinline__ void copy_bytes(u8* to, u32 bytes, u32 thread, u32 threads, Word word, Byte byte) {
    const auto any_word = [&](u32 i) {
        u32 x = 0;
        if (4 * i + 4 <= bytes) return (u32)word(i);
        for (u32 b = 4 * i; b < bytes; ++b) x |= (u32)byte(b) << (8 * (b % 4));
        return x;
    };
    const u32 lead = min((u32)(-(u64)to) & 3, bytes), words = (bytes - lead) / 4, tail = lead + 4 * words;
    if (thread < lead) to[thread] = byte(thread);
    if (thread < bytes - tail) to[tail + thread] = byte(tail + thread);
    u32* const aligned = (u32*)(to + lead);
    for (u32 i = thread; i < words; i += threads) {
        const u32 a = any_word(i);
        aligned[i] = lead ? __funnelshift_r(a, 4 * (i + 1) < bytes ? any_word(i + 1) : 0, 8 * lead) : a;
    }
}

__device__ __forceinline__ u8* put_varint(u8* to, u32 x) {
    for (; x >= 128; x >>= 7) *to++ = (u8)(x | 128);
    *to++ = (u8)x;
    return to;
}

// Writes the chunks in order, with their headers. `ends` are those of `measure_chunks`, and `block_ends` the running sums of its totals.
extern "C" __global__ void __launch_bounds__(128) join_chunks(
    Slab slab, const Chunk* chunks, const u32* work, const u32* nwork, const u32* ends, const u64* block_ends, const u32* bodies, u8* out) {
    const Tensor* const tensors = slab.tensors;
    for (u32 w = blockIdx.x; w < *nwork; w += gridDim.x) {
        const u32 tile = work[w], first = slab.first_tile + tile;
        const Chunk c = chunks[tile];
        u8* const to = out + (c.block ? block_ends[c.block - 1] : 0) + ends[tile] - c.bytes;
        if (threadIdx.x == 0) put_varint(put_varint(to - header_bytes(c), c.tiles << 2 | c.mode), c.bytes);
        if (c.mode != RAW) {
            const u32* const body = bodies + c.body;
            copy_bytes(to, c.bytes, threadIdx.x, 128, [&](u32 i) { return body[i]; }, [&](u32 i) { return ((const u8*)body)[i]; });
            continue;
        }
        // The elements of all tiles one after the other. A warp copies one tile at a time.
        const Tensor& owner = tensors[owner_of(tensors, slab.ntensors, first)];
        const u64 begin = owner.element0 + (u64)(first - owner.tile0) * TILE;
        for (u32 t = first + threadIdx.x / 32; t < first + c.tiles; t += 4) {
            const Tensor x = tensors[owner_of(tensors, slab.ntensors, t)];
            const u64 offset = (u64)(t - x.tile0) * TILE;
            u8* const at = to + bytes_of(x.element0 + offset - begin);
            const u32 bytes = (u32)bytes_of(elements_in(x, t));
            if (master_bytes(x) && !makes_base(x)) {
                copy_bytes(at, bytes, threadIdx.x % 32, 32, [&](u32 i) { return element_word(x, offset, i); }, [&](u32 i) { return element_byte(x, offset, i); });
            } else {
                const u8* const from = (makes_base(x) ? x.base : x.next) + bytes_of(offset);
                copy_bytes(at, bytes, threadIdx.x % 32, 32, [&](u32 i) { return ((const u32*)from)[i]; }, [&](u32 i) { return from[i]; });
            }
        }
    }
}
