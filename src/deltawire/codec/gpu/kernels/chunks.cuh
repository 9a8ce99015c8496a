// Turns tiles into chunks, and bodies into the bytes of payloads (docs/format.md §3 and §5, rules 1, 2 and 7).

// Chooses `top` (§5.2). There is one thread block per range, which is a block of the format.
extern "C" __global__ void __launch_bounds__(256) choose_tops(ElementRange* ranges) {
    __shared__ u32 histogram[2048];
    ElementRange& s = ranges[blockIdx.x];
    if (!s.mask || !s.base) {
        if (threadIdx.x == 0) s.top = 0;
        return;
    }
    for (u32 i = threadIdx.x; i < 2048; i += 256) histogram[i] = 0;
    __syncthreads();
    const u32 step = (s.count + 1023) / 1024, m = (s.count + step - 1) / step;
    for (u32 i = threadIdx.x; i < m; i += 256) atomicAdd(&histogram[(u32)(s.base[(u64)i * step] >> s.shift) & s.mask], 1);
    __syncthreads();
    if (threadIdx.x < 32) {  // starts at the largest exponent and goes down, 32 exponents at a time
        const u32 lane = threadIdx.x, above = m / 64;  // number of elements of the sample above the wanted one
        u32 seen = 0;
        for (i32 high = 2047; high >= 0; high -= 32) {
            const u32 upto = seen + inclusive_scan(histogram[high - (i32)lane], lane);
            const u32 found = __ballot_sync(ALL, upto > above);
            if (found) {
                if (lane == 0) s.top = (u32)high - (__ffs(found) - 1);
                break;
            }
            seen = __shfl_sync(ALL, upto, 31);
        }
    }
}

// The number of a chunk is that of its first tile, so all arrays of chunks are as long as those of tiles.
struct Chunk {
    u32 tiles;   // 0 if no chunk starts with this tile
    u32 range;
    u32 mode;
    u32 bytes;   // size of its body
    u64 body;    // offset of its body, in words
};

// Cuts ranges into chunks (§5.1), one thread block per range. `work` lists the chunks in no particular order, `nwork` counts them.
extern "C" __global__ void __launch_bounds__(256) cut_chunks(const ElementRange* ranges, const u16* counts, Chunk* chunks, u32* work, u32* nwork) {
    __shared__ u32 changes[BLOCK / TILE], ended[BLOCK / TILE / 32], ended_before[BLOCK / TILE / 32], position;
    const ElementRange s = ranges[blockIdx.x];
    const u32 thread = threadIdx.x, lane = thread % 32, tiles = (s.count + TILE - 1) / TILE;
    for (u32 t = thread; t < tiles; t += 256) {
        const uint4* from = (const uint4*)(counts + (u64)(s.tile0 + t) * CONTEXTS);
        const uint4 a = from[0], b = from[1];
        const u32 w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        u32 sum = 0;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) sum += (w[i] & 0xffff) + (w[i] >> 16);
        changes[t] = sum;
        chunks[s.tile0 + t].tiles = 0;
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
        Chunk& c = chunks[s.tile0 + begin];
        c.tiles = t + 1 - begin;
        c.range = blockIdx.x;
        work[position + number] = s.tile0 + begin;
    }
}

// Finds where the bytes of each chunk end within those of its range, and the total of each range. There is one thread block per range.
extern "C" __global__ void __launch_bounds__(256) measure_chunks(const ElementRange* ranges, const Chunk* chunks, u32* ends, u64* totals, Changes changes) {
    __shared__ u32 sums[8];
    if (*changes.cursor > changes.capacity) return;  // in that case no chunk was encoded
    const ElementRange& s = ranges[blockIdx.x];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, tiles = (s.count + TILE - 1) / TILE, each = (tiles + 255) / 256;
    const u32 begin = min(threadIdx.x * each, tiles), end = min(begin + each, tiles);
    const auto size_of = [&](u32 t) {
        const Chunk& c = chunks[s.tile0 + t];
        return c.tiles ? 8 + c.bytes + (s.first == 0 && t == 0) : 0;  // the element type comes before a tensor's first chunk
    };
    u32 sum = 0;
    for (u32 t = begin; t < end; ++t) sum += size_of(t);
    u32 upto = inclusive_scan(sum, lane);
    if (lane == 31) sums[warp] = upto;
    __syncthreads();
    for (u32 w = 0; w < warp; ++w) upto += sums[w];
    u32 at = upto - sum;
    for (u32 t = begin; t < end; ++t) ends[s.tile0 + t] = at += size_of(t);
    if (threadIdx.x == 255) totals[blockIdx.x] = upto;
}

// Writes the chunks in order, with their headers. `ends` are those of `measure_chunks`, and `range_ends` the running sums of its totals. `codes` are the
// element types of the tensors. `masters` says that the new elements are float32 and must be rounded.
extern "C" __global__ void __launch_bounds__(128) join_chunks(
    const ElementRange* ranges, const Chunk* chunks, const u32* work, const u32* nwork, const u32* ends, const u64* range_ends, const u32* bodies, const u8* codes,
    u32 masters, u8* out) {
    for (u32 w = blockIdx.x; w < *nwork; w += gridDim.x) {
        const u32 tile = work[w];
        const Chunk c = chunks[tile];
        const ElementRange& s = ranges[c.range];
        const u64 end = (c.range ? range_ends[c.range - 1] : 0) + ends[tile], begin = end - c.bytes;
        const u32 offset = (tile - s.tile0) * TILE, elements = min(c.tiles * TILE, s.count - offset);
        if (threadIdx.x < 8) out[begin - 8 + threadIdx.x] = (u8)((threadIdx.x < 4 ? elements | c.mode << 30 : c.bytes) >> (8 * (threadIdx.x & 3)));
        if (threadIdx.x == 8 && s.first == 0 && s.tile0 == tile) out[begin - 9] = codes[s.tensor];
        const u32* const from = c.mode == RAW ? (const u32*)(s.next + offset) : bodies + c.body;  // 16-byte aligned
        const bool rounds = masters && c.mode == RAW;
        const u32* const floats = (const u32*)s.next + offset;
        const auto byte = [&](u32 i) { return rounds ? (u8)(rounded(floats[i / 2]) >> (8 * (i % 2))) : ((const u8*)from)[i]; };
        const auto word = [&](u32 i) {
            u32 x = 0;
            if (4 * i + 4 > c.bytes)  // never reads beyond the end of a tensor
                for (u32 b = 4 * i; b < c.bytes; ++b) x |= (u32)byte(b) << (8 * (b % 4));
            else x = rounds ? rounded(floats[2 * i]) | rounded(floats[2 * i + 1]) << 16 : from[i];
            return x;
        };
        const u32 lead = min((u32)(-(u64)(out + begin)) & 3, c.bytes), words = (c.bytes - lead) / 4, tail = lead + 4 * words;
        if (threadIdx.x < lead) out[begin + threadIdx.x] = byte(threadIdx.x);
        if (threadIdx.x < c.bytes - tail) out[begin + tail + threadIdx.x] = byte(tail + threadIdx.x);
        u32* const to = (u32*)(out + begin + lead);
        for (u32 i = threadIdx.x; i < words; i += 128) {
            const u32 a = word(i);
            to[i] = lead ? __funnelshift_r(a, 4 * (i + 1) < c.bytes ? word(i + 1) : 0, 8 * lead) : a;
        }
    }
}
