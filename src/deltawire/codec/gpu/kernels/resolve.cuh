// Payloads against their bases: headers, streams, places of changes, and the changes' way into the weights. Spans are chunks here, coded or raw;
// `Span::next` is the body of a chunk. A chunk that breaks a rule gets an error, and nothing is located in it; nothing is ever written to a
// base but by `write_patch` and `swap_patch`, which run when all is known to be well.

enum Error {
    FINE,
    BAD_TOP,
    REPEATED_SYMBOL,
    TOO_MANY_CHANGES,
    BAD_UNCHANGED,
    BAD_POSITION_PARAMETER,
    NO_TABLE,
    BAD_LARGER,
    BAD_RUN_PARAMETER,
    BAD_VALUE_PARAMETER,
    NO_CHANGES,
    TOO_SHORT,
    BAD_POSITION,
    BAD_RUN,
    BAD_STEP,
    BAD_SYMBOL,
    NO_CHANGE,
    TOO_LONG,
    BAD_ELEMENTS,
};

struct ContextHead {
    u32 elements;    // of this context in the chunk; counted in the base
    u16 n, unchanged, larger;
    u8 inverted, mode, k, kr, kv, unused;
};

// What a coded chunk's header says.
struct Head {
    u32 bytes;       // of the body; set by the host
    u32 total;       // changes; of a raw chunk, found by comparison
    u32 error;
    u32 streams_at;  // in bits
    u32 most_larger; // of all contexts
    u32 wide;        // gaps that are listed apart
    u16 symbols;
    u8 ks, unused;
    ContextHead contexts[CONTEXTS];
};

// Single fields from anywhere in a body. Reads zeros beyond its end.
struct FieldReader {
    const u8* body;
    u32 bytes, at;
    bool overrun;
    __device__ u32 take(u32 length) {
        u32 value = 0;
        for (u32 done = 0; done < length;) {
            const u32 byte = (at + done) >> 3, shift = (at + done) & 7, n = min(8 - shift, length - done);
            if (byte >= bytes) overrun = true;
            else value |= ((u32)body[byte] >> shift & ((1u << n) - 1)) << done;
            done += n;
        }
        at += length;
        return value;
    }
    // ~0 where it is out of range.
    __device__ u32 take_count() {
        const u32 length = take(5);
        if (length > 16) return ~0u;
        return length ? 1u << (length - 1) | take(length - 1) : 0;
    }
};

__device__ u32 read_head(FieldReader in, const Span& s, Head& h) {
    const u32 top = in.take(11);
    if (top > s.mask) return BAD_TOP;
    h.symbols = 0, h.ks = 0;
    if (in.take(1)) {
        h.symbols = (u16)(in.take(8) + 1);
        h.ks = (u8)in.take(3);
        u32 seen[8] = {};
        for (u32 i = 0; i < h.symbols; ++i) {
            const u32 symbol = in.take(8);
#pragma unroll
            for (u32 w = 0; w < 8; ++w)
                if (w == symbol / 32) {
                    if (seen[w] >> (symbol & 31) & 1) return in.overrun ? TOO_SHORT : REPEATED_SYMBOL;
                    seen[w] |= 1u << (symbol & 31);
                }
        }
    }
    u32 total = 0;
    for (u32 c = 0; c < (s.mask ? CONTEXTS : 1); ++c) {
        ContextHead& p = h.contexts[c];
        const u32 n = in.take_count();
        if (n > MOST - total) return TOO_MANY_CHANGES;
        total += n;
        p.n = (u16)n;
        if (!n) continue;
        p.inverted = (u8)in.take(1);
        if (p.inverted) {
            const u32 unchanged = in.take_count();
            if (unchanged > n) return BAD_UNCHANGED;
            p.unchanged = (u16)unchanged;
        }
        p.k = (u8)in.take(5);
        if (p.k > 24) return BAD_POSITION_PARAMETER;
        p.mode = (u8)in.take(2);
        if (p.mode == SYMBOLS && !h.symbols) return NO_TABLE;
        if (p.mode == RUNS) {
            const u32 larger = in.take_count();
            if (larger < 1 || larger > n) return BAD_LARGER;
            p.larger = (u16)larger;
            h.most_larger = max(h.most_larger, larger);
            p.kr = (u8)in.take(5);
            if (p.kr > 24) return BAD_RUN_PARAMETER;
        }
        if (p.mode == RUNS || p.mode == DIRECT) {
            p.kv = (u8)in.take(6);
            if (p.kv >= WIDTH) return BAD_VALUE_PARAMETER;
        }
    }
    if (in.overrun) return TOO_SHORT;
    if (!total) return NO_CHANGES;
    if (total > s.count) return BAD_POSITION;
    h.total = total;
    h.streams_at = in.at;
    return FINE;
}

// A thread per span.
extern "C" __global__ void __launch_bounds__(64) read_heads(const Span* spans, u32 nspans, Head* heads) {
    const u32 i = blockIdx.x * 64 + threadIdx.x;
    if (i >= nspans || spans[i].mode != CODED) return;
    Head h = {};
    h.bytes = heads[i].bytes;
    FieldReader in{(const u8*)spans[i].next, h.bytes, 0, false};
    h.error = read_head(in, spans[i], h);
    if (h.error) h.total = 0;
    heads[i] = h;
}

// The streams of a body. A broken one may lead beyond its end, by less than the host leaves room for after the last payload: no code is longer
// than 128 bits, and there are at most 2¹⁵ of each kind. What is read there is not used.
struct StreamReader {
    const u32* words;
    u32 lane;
    u32 skew;   // bits before the body in its first word
    u32 at;     // the next bit, counted from there

    __device__ StreamReader(const u8* body, u32 lane) : lane(lane), at(0) {
        words = (const u32*)((u64)body & ~3ull);
        skew = (u32)((u64)body & 3) * 8;
    }
    __device__ void seek(u32 bit) { at = bit + skew; }
    __device__ u32 taken() const { return at - skew; }
    __device__ __forceinline__ u32 peek(u32 place) const {
        const u32* const word = words + (place >> 5);
        return __funnelshift_r(word[0], word[1], place & 31);
    }
    __device__ u64 take(u32 length) {
        const u64 value = peek(at) | (length > 32 ? (u64)peek(at + 32) << 32 : 0);
        at += length;
        return length < 64 ? value & ((1ull << length) - 1) : value;
    }
    // One code, of any length; ~0 for anything that does not fit.
    __device__ u64 take_rice(u32 k) {
        const u32 ahead = peek(at) & 0xffff;
        u64 q;
        bool fits = true;
        if (ahead) {
            q = __ffs(ahead) - 1;
            at += (u32)q + 1;
        } else {
            at += 16;
            const u32 b = (u32)take(6);
            q = (1ull << b | take(b)) + 15;
            fits = b + k < 63;
        }
        const u64 low = take(k);
        return fits && q <= ~0ull >> k ? q << k | low : ~0ull;
    }

    // `n` codes LR(k, v), each with `extra` bits after it: `use(i, m, v, extra bits)` is called by all lanes, of which the first m have the i-th code and
    // those after it. Every lane reads the code that would start at its own bit; which of them are codes is found by following their lengths, in
    // jumps that double.
    template <class Use>
    __device__ __forceinline__ void codes(u32 n, u32 k, u32 extra, Use use) {
        const u32 shortest = k + extra + 1;
        const u32 rounds = shortest >= 32 ? 1 : 32 - __clz((31 + shortest) / shortest);
        const u32 most = (1u << min(rounds, 5u)) - 1;
        for (u32 done = 0; done < n;) {
            const u32 bits = peek(at + lane), q = __ffs(bits & 0xffff) - 1;
            const bool plain = (bits & 0xffff) && k + extra <= 16;
            const u32 after = bits >> (q + 1 & 31);
            u32 jump = plain ? lane + q + shortest : 64, place = 0;
            for (u32 r = 0; r < min(rounds, 5u); ++r) {
                const u32 further = __shfl_sync(ALL, jump, place & 31), twice = __shfl_sync(ALL, jump, jump & 31);
                if ((lane >> r & 1) && place < 32) place = further;
                if (jump < 32) jump = twice;
            }
            const u32 code = __shfl_sync(ALL, q << k | (after & ((1u << k) - 1)), place & 31);
            const u32 low = extra ? __shfl_sync(ALL, after >> k & ((1u << extra) - 1), place & 31) : 0;
            const u32 usable = __ballot_sync(ALL, plain);
            const u32 first_bad = __ffs(~__ballot_sync(ALL, place < 32 && (usable >> place & 1)));  // 0: none
            const u32 m = min(min(first_bad - 1, most), n - done);
            at += __shfl_sync(ALL, place, m & 31);
            if (m) {
                use(done, m, (u64)code, (u64)low);
                done += m;
            } else {
                const u64 v = take_rice(k), rest = take(extra);
                use(done++, 1u, v, rest);
            }
        }
        __syncwarp();
    }
    __device__ __forceinline__ u32 bit(u32 place) const { return words[place >> 5] >> (place & 31) & 1; }
};

constexpr u32 MOST_WIDE = 1 << 8;  // gaps of 2¹⁶ − 1 or more: all gaps of a chunk together are less than 2²⁴
constexpr u32 WIDE_GAP = 0xffff;

// Decoded changes, before they are located: where the patch will be, context after context.
struct Decoded {
    u16* gaps;       // in the line of the context; WIDE_GAP: see `wide`
    T* operands;     // steps, or bits to XOR
    uint2* wide;     // [spans][MOST_WIDE]: which change of the chunk, and its gap
    u16* larger;     // scratch
    const u32* larger_at;  // [spans]: where a chunk's scratch ends
};

struct StreamDecoder {
    StreamReader in;
    Head& h;
    uint2* wide;
    const u32 lane;

    __device__ u32 positions(const ContextHead& p, u16* gaps, u32 before) {
        in.codes(p.n, p.k, 0, [&](u32 i, u32 m, u64 gap, u64) {
            if (lane >= m) return;
            gaps[i + lane] = (u16)min(gap, (u64)WIDE_GAP);
            if (gap < WIDE_GAP) return;
            const u32 slot = atomicAdd(&h.wide, 1);
            if (slot < MOST_WIDE) wide[slot] = make_uint2(before + i + lane, (u32)min(gap, (u64)ALL));
        });
        return *(volatile u32*)&h.wide > MOST_WIDE ? BAD_POSITION : FINE;
    }

    // From runs of changes before each unchanged element to unchanged elements before each change.
    __device__ u32 inverted_positions(const ContextHead& p, u16* gaps) {
        for (u32 i = lane; i < p.n; i += 32) gaps[i] = 0;
        __syncwarp();
        u64 done = 0;
        in.codes(p.unchanged, p.k, 0, [&](u32, u32 m, u64 run, u64) {
            const u32 mine = lane < m ? (u32)min(run, (u64)MOST + 1) : 0;
            const u64 change = done + inclusive_scan(mine, lane), earlier = __shfl_up_sync(ALL, change, 1);
            const u32 heads = __ballot_sync(ALL, lane < m && (lane == 0 || earlier != change));
            const u32 rest = lane == 31 ? 0 : heads >> (lane + 1), size = (rest ? lane + __ffs(rest) : m) - lane;
            if (heads >> lane & 1 && change < p.n) gaps[change] += (u16)size;
            done = __shfl_sync(ALL, change, 31);
            __syncwarp();
        });
        return done > p.n ? BAD_RUN : FINE;
    }

    __device__ u32 steps(const ContextHead& p, T* operands, u16* larger) {
        const u32 signs = in.at, n = p.n;
        const auto negative = [&](u32 i) { return in.bit(signs + i) != 0; };
        constexpr u64 limit = 1ull << (WIDTH - 1);
        in.at += n;
        bool wild = false;
        if (p.mode == DIRECT) {
            in.codes(n, p.kv, 0, [&](u32 i, u32 m, u64 less_one, u64) {
                if (lane >= m) return;
                wild |= less_one >= limit;
                const T magnitude = (T)(less_one + 1);
                operands[i + lane] = negative(i + lane) ? (T)(0 - magnitude) : magnitude;
            });
            return __any_sync(ALL, wild) ? BAD_STEP : FINE;
        }
        for (u32 i = lane; i < n; i += 32) operands[i] = negative(i) ? (T)~(T)0 : (T)1;
        if (p.mode == UNIT_MODE) return FINE;
        in.codes(p.larger, p.kr, 0, [&](u32 i, u32 m, u64 run, u64) {
            if (lane >= m) return;
            wild |= run >= n;
            larger[i + lane] = (u16)run;
        });
        if (__any_sync(ALL, wild)) return BAD_RUN;
        u32 line = 0;
        for (u32 i = lane; i - lane < p.larger; i += 32) {
            const u32 upto = inclusive_scan(i < p.larger ? larger[i] + 1u : 0, lane);
            if (i < p.larger) larger[i] = (u16)(line + upto - 1);
            line += __shfl_sync(ALL, upto, 31);
            if (line > n) return BAD_RUN;
        }
        __syncwarp();
        in.codes(p.larger, p.kv, 0, [&](u32 i, u32 m, u64 less_two, u64) {
            if (lane >= m) return;
            wild |= less_two >= limit - 1;
            const T magnitude = (T)(less_two + 2);
            T& operand = operands[larger[i + lane]];
            operand = operand == 1 ? magnitude : (T)(0 - magnitude);
        });
        return __any_sync(ALL, wild) ? BAD_STEP : FINE;
    }

    __device__ u32 xors(const ContextHead& p, T* operands) {
        bool unknown = false, none = false;
        const u32 table = in.skew + 23;
        in.codes(p.n, h.ks, WIDTH - 8, [&](u32 i, u32 m, u64 r, u64 low) {
            if (lane >= m) return;
            unknown |= r >= h.symbols;
            const u64 y = (u64)(in.peek(table + 8 * (u32)min(r, 255ull)) & 0xff) << (WIDTH - 8) | low;
            none |= y == 0;
            operands[i + lane] = (T)y;
        });
        return __any_sync(ALL, unknown) ? BAD_SYMBOL : __any_sync(ALL, none) ? NO_CHANGE : FINE;
    }

    __device__ u32 decode(u32 contexts, u16* gaps, T* operands, u16* larger) {
        in.seek(h.streams_at);
        u32 before = 0;
        for (u32 c = 0; c < contexts; ++c) {
            const ContextHead p = h.contexts[c];
            if (!p.n) continue;
            u32 error = p.inverted ? inverted_positions(p, gaps + before) : positions(p, gaps + before, before);
            if (!error) error = p.mode == SYMBOLS ? xors(p, operands + before) : steps(p, operands + before, larger);
            __syncwarp();
            if (in.taken() > 8 * h.bytes) return TOO_SHORT;
            if (error) return error;
            before += p.n;
        }
        const u32 left = 8 * h.bytes - in.taken();
        return left > 7 || (in.peek(in.at) & ((1u << left) - 1)) ? TOO_LONG : FINE;
    }
};

// A warp per chunk.
extern "C" __global__ void __launch_bounds__(64) decode_streams(const Span* spans, u32 nspans, Head* heads, Decoded out) {
    const u32 lane = threadIdx.x % 32;
    for (u32 i = blockIdx.x * 2 + threadIdx.x / 32; i < nspans; i += gridDim.x * 2) {
        if (spans[i].mode != CODED || heads[i].error) continue;
        const Span s = spans[i];
        StreamDecoder decoder{StreamReader((const u8*)s.next, lane), heads[i], out.wide + (u64)i * MOST_WIDE, lane};
        u16* const larger = out.larger + out.larger_at[i] - heads[i].most_larger;
        const u32 error = decoder.decode(s.mask ? CONTEXTS : 1, out.gaps + s.start, out.operands + s.start, larger);
        __syncwarp();
        if (lane == 0 && error) heads[i].error = error;
    }
}

// A slab of chunks ready to be located, context after context.
struct Targets {
    u32* ranks;      // in the context, within the chunk
    T* operands;
    u32 first;       // the slab's first change, counted over all spans
};

// From gaps to ranks, and out of the way of the patch. A thread block per chunk, a warp per context.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) sum_gaps(const Span* spans, u32 first, Head* heads, Decoded from, Targets to) {
    const u32 i = first + blockIdx.x, lane = threadIdx.x % 32, c = threadIdx.x / 32;
    Head& h = heads[i];
    if (spans[i].mode != CODED || h.error) return;
    const u32 n = h.contexts[c].n, elements = h.contexts[c].elements, start = spans[i].start, wide = h.wide;
    const uint2* const wides = from.wide + (u64)i * MOST_WIDE;
    u32 before = lane < c ? h.contexts[lane].n : 0;
    before = warp_sum(before);
    u64 line = 0;
    for (u32 j = 4 * lane; j - 4 * lane < n; j += 128) {
        u32 gaps[4], sum = 0;
        bool wild = false;
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
            gaps[k] = 0;
            if (j + k >= n) continue;
            const u32 at = before + j + k;
            u32 gap = from.gaps[start + at];
            if (gap == WIDE_GAP)
                for (u32 w = 0; w < wide; ++w)
                    if (wides[w].x == at) gap = wides[w].y;
            wild |= gap >= elements;
            gaps[k] = min(gap, elements) + 1;
            to.operands[start - to.first + at] = from.operands[start + at];
        }
#pragma unroll
        for (u32 k = 0; k < 4; ++k) sum += gaps[k];
        const u32 upto = inclusive_scan(sum, lane);  // at most 128 · 2²⁴
        u32 rank = (u32)line + upto - sum;
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
            rank += gaps[k];
            if (j + k < n) to.ranks[start - to.first + before + j + k] = rank - 1;
        }
        line += __shfl_sync(ALL, upto, 31);
        if (__any_sync(ALL, wild) || line > elements) {
            if (lane == 0) atomicExch(&h.error, (u32)BAD_POSITION);
            return;
        }
    }
}

__device__ __forceinline__ T unaligned(const u8* from) {
    u64 x = 0;
#pragma unroll
    for (u32 b = 0; b < BYTES; ++b) x |= (u64)from[b] << (8 * b);
    return (T)x;
}

// Raw chunks: how many elements of each tile change, in place of elements of the first context. A warp per tile.
extern "C" __global__ void __launch_bounds__(128) count_raw(const Span* spans, u32 nspans, u32 ntiles, Head* heads, u16* elements) {
    const u32 tile = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (tile >= ntiles) return;
    const u32 span = span_of(spans, nspans, tile);
    const Span s = spans[span];
    if (s.mode != RAW) return;
    const u32 offset = (tile - s.tile0) * TILE, n = min(TILE, s.count - offset);
    u32 changed = 0;
    for (u32 i = lane; i < n; i += 32)
        changed += unaligned((const u8*)s.next + (u64)(offset + i) * BYTES) != (s.base ? s.base[offset + i] : (T)0);
    changed = warp_sum(changed);
    if (lane == 0) {
        elements[(u64)tile * CONTEXTS] = (u16)changed;
        atomicAdd(&heads[span].total, changed);
    }
}

// From elements (or changes, of raw chunks) in each tile to those before it in the chunk, for a slab of chunks; a thread block per chunk. `starts` are
// those of the slab's tiles. Checks that the elements are as many as inverted contexts say.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) start_tiles(
    const Span* spans, u32 first_span, u32 first_tile, Head* heads, const u16* elements, u32* starts) {
    __shared__ u32 parts[32][CONTEXTS];
    const Span& s = spans[first_span + blockIdx.x];
    Head& h = heads[first_span + blockIdx.x];
    const u32 tiles = (s.count + TILE - 1) / TILE, c = threadIdx.x % CONTEXTS, part = threadIdx.x / CONTEXTS, size = (tiles + 31) / 32;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, begin = min(part * size, tiles), end = min(begin + size, tiles);
    const u64 first = (u64)s.tile0 * CONTEXTS + c, to = (u64)(s.tile0 - first_tile) * CONTEXTS + c;
    const bool raw = s.mode == RAW;
    const auto count = [&](u32 t) { return raw && c ? 0u : (u32)elements[first + (u64)t * CONTEXTS]; };
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
}

// The changes of all spans, ascending; those of one tile are from `firsts[tile]` to `firsts[tile + 1]`.
struct Patch {
    u32* firsts;
    u16* places;     // within the tile
    T* values;       // the new ones; once swapped, the old ones
};

struct LocateSpace {
    alignas(16) u8 stages[2][STAGE];
    alignas(16) uint4 multipliers[32];
    alignas(16) uint4 planes[32];
    u32 ranks[32 * RANK_WORDS];
    u32 marks[32];
};

constexpr u32 LOCATE_WARPS = 4;

// The place of the i-th set bit.
__device__ __forceinline__ u32 select_bit(u32 bits, u32 i) {
    u32 at = 0;
#pragma unroll
    for (u32 half = 16; half; half /= 2) {
        const u32 n = __popc(bits >> at & ((1u << half) - 1));
        if (i >= n) i -= n, at += half;
    }
    return at;
}

// Finds the elements that decoded changes belong to. Tiles first … end are those of the slab's chunks; a warp takes `row` of them in a row.
extern "C" __global__ void __launch_bounds__(32 * LOCATE_WARPS, 6) locate(
    const Span* spans, u32 nspans, u32 first_tile, u32 end_tile, u32 row, const Head* heads, const u32* starts, Targets decoded, Patch patch, Sums* sums) {
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
        u32 span = ALL, at = 0, base_at = 0, n_c = 0;  // of this lane's context: the next change, the first, and how many there are
        bool is_xor = false, ready = false;
        Span s;
        for (u32 tile = group_first; tile < group_end; ++tile) {
            if (span == ALL || (span + 1 < nspans && spans[span + 1].tile0 <= tile)) {
                span = span == ALL ? span_of(spans, nspans, tile) : span + 1;
                s = spans[span];
                ready = false;
                if (s.tensor != tensor) {
                    if (tensor != ALL) flush_sums(sums + tensor, lane, none, change, 0);
                    tensor = s.tensor;
                }
            }
            const bool raw = s.mode == RAW;
            if (heads[span].error) {
                if (lane == 0) patch.firsts[tile] = s.start;
                continue;
            }
            const u32 start = starts[(u64)(tile - first_tile) * CONTEXTS + c];
            if (!raw && !ready) {
                const ContextHead& p = heads[span].contexts[c];
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
                fetch_unit(space.stages[u & 1], base ? base + u * UNIT * BYTES : nullptr, min(UNIT, n - u * UNIT) * BYTES, lane, (const u8*)spans);
                fetch_commit();
            };
            fetch(0);
            const u64 digest_block = (s.first + offset) * BYTES / 512;
            u32 seen = 0;
            u32 target = !raw && at + lane / CONTEXTS < n_c ? decoded.ranks[base_at + at + lane / CONTEXTS] : ALL;
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
                    const u8* const body = (const u8*)s.next + (u64)(offset + u * UNIT + lane * RUN) * BYTES;
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
                    const auto place = [&](u32 context, u32 rank, T operand, bool by_xor) {
                        u32 owner = 0;  // the last lane with no more elements of this context before its run
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
                    // First two changes of every context at once; what is left then, context by context.
                    if (__any_sync(ALL, target < end)) {
                        const bool active = target < end;
                        if (active) place(c, target - start, decoded.operands[base_at + at + lane / CONTEXTS], is_xor);
                        at += active + __shfl_xor_sync(ALL, (u32)active, CONTEXTS);
                        target = at + lane / CONTEXTS < n_c ? decoded.ranks[base_at + at + lane / CONTEXTS] : ALL;
                    }
                    for (u32 left = __ballot_sync(ALL, target < end) & 0xffff; left; left &= left - 1) {
                        const u32 context = __ffs(left) - 1, n = __shfl_sync(ALL, n_c, context), from = __shfl_sync(ALL, base_at, context);
                        const u32 upto = __shfl_sync(ALL, end, context), first = __shfl_sync(ALL, start, context);
                        const bool by_xor = __shfl_sync(ALL, (u32)is_xor, context);
                        u32 i = __shfl_sync(ALL, at, context), found;
                        do {
                            const u32 mine = i + lane < n ? decoded.ranks[from + i + lane] : ALL;
                            if (mine < upto) place(context, mine - first, decoded.operands[from + i + lane], by_xor);
                            found = __popc(__ballot_sync(ALL, mine < upto));
                            i += found;
                        } while (found == 32);
                        if (c == context) {
                            at = i;
                            target = at + lane / CONTEXTS < n_c ? decoded.ranks[base_at + at + lane / CONTEXTS] : ALL;
                        }
                    }
                }
                __syncwarp();
                const u32 marks = space.marks[lane], upto = inclusive_scan(__popc(marks), lane);
                u32 to = slot + upto - __popc(marks);
                for (u32 pending = marks; pending; pending &= pending - 1) {
                    const u32 e = __ffs(pending) - 1;
                    patch.places[to] = (u16)(u * UNIT + lane * RUN + e);
                    patch.values[to++] = *(const T*)(stage + lane * STRIDE + e * BYTES);
                }
                slot += __shfl_sync(ALL, upto, 31);
                __syncwarp();
            }
        }
    }
    if (tensor != ALL) flush_sums(sums + tensor, lane, none, change, 0);
}

// Write the values of a patch to tensors that start at `bases` (null: not to this one). Swapping, the patch gets the values that stood there: done
// again, it takes itself back. A warp per tile.
template <bool SWAP>
__device__ __forceinline__ void write_tiles(const Span* spans, u32 nspans, u32 ntiles, Patch patch, T* const* bases) {
    constexpr u32 EACH = 8;
    const u32 lane = threadIdx.x % 32;
    for (u32 tile = blockIdx.x * 8 + threadIdx.x / 32; tile < ntiles; tile += gridDim.x * 8) {
        const u32 first = patch.firsts[tile], end = patch.firsts[tile + 1];
        if (first == end) continue;
        T* base = nullptr;
        for (u32 i0 = first; i0 < end; i0 += 32 * EACH) {
            u32 place[EACH];
            T now[EACH], old[EACH];
#pragma unroll
            for (u32 j = 0; j < EACH; ++j) {
                const u32 i = min(i0 + 32 * j + lane, end - 1);
                place[j] = patch.places[i], now[j] = patch.values[i];
            }
            if (i0 == first) {
                const Span& s = spans[span_of(spans, nspans, tile)];
                base = bases[s.tensor];
                if (!base) break;
                base += s.first + (u64)(tile - s.tile0) * TILE;
            }
            if (SWAP) {
#pragma unroll
                for (u32 j = 0; j < EACH; ++j)
                    if (i0 + 32 * j + lane < end) old[j] = base[place[j]];
            }
#pragma unroll
            for (u32 j = 0; j < EACH; ++j)
                if (i0 + 32 * j + lane < end) {
                    base[place[j]] = now[j];
                    if (SWAP) patch.values[i0 + 32 * j + lane] = old[j];
                }
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) write_patch(const Span* spans, u32 nspans, u32 ntiles, Patch patch, T* const* bases) {
    write_tiles<false>(spans, nspans, ntiles, patch, bases);
}

extern "C" __global__ void __launch_bounds__(256) swap_patch(const Span* spans, u32 nspans, u32 ntiles, Patch patch, T* const* bases) {
    write_tiles<true>(spans, nspans, ntiles, patch, bases);
}

// Flat indices of the changes in tiles first … end, counted within their tensor.
extern "C" __global__ void __launch_bounds__(256) flat_indices(
    const Span* spans, u32 nspans, u32 first_tile, u32 end_tile, Patch patch, u64* out) {
    const u32 tile = first_tile + blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (tile >= end_tile) return;
    const Span& s = spans[span_of(spans, nspans, tile)];
    const u64 before = s.first + (u64)(tile - s.tile0) * TILE;
    const u32 origin = patch.firsts[first_tile];
    for (u32 i = patch.firsts[tile] + lane; i < patch.firsts[tile + 1]; i += 32) out[i - origin] = before + patch.places[i];
}

extern "C" __device__ const u32 resolve_sizes[] = {
    4096 + SCAN_WARPS * sizeof(ScanSpace<false>), 4096 + LOCATE_WARPS * sizeof(LocateSpace), sizeof(Head)};
