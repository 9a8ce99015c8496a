// Decodes the streams of coded chunks. Where a code begins is known only after the one before it is read. So one thread reads each chunk and notes where
// each segment of codes begins, and then many threads decode the segments.

struct Task {
    u32 chunk;       // ALL if there is nothing to do
    u32 at;          // offset of the first code in bits; from bit 24 on, the number of the segment
    u32 more;        // for larger steps: offset of the first code of their magnitudes; from bit 24 on the context, from bit 28 on the stream
    u32 sum;         // sum of the values of all earlier codes
    __device__ __forceinline__ u32 context() const { return more >> 24 & 15; }
    __device__ __forceinline__ u32 stream() const { return more >> 28; }
};

static_assert(MOST / 128 <= 256, "segments are numbered with 8 bits");
constexpr u32 LOW_24 = (1 << 24) - 1;

struct LongCode {
    u64 value, rest;
    u32 end;
};

// Few codes need this function, so it is not inlined: loops that read codes must be short to be fast.
__device__ __noinline__ LongCode read_long_code(const u32* words, u32 at, u32 k, u32 extra) {
    const auto peek = [&](u32 position) { return __funnelshift_r(words[position >> 5], words[(position >> 5) + 1], position & 31); };
    const auto take = [&](u32 length) {
        u64 value = peek(at) & (length < 32 ? (1u << length) - 1 : ALL);
        if (length > 32) value |= (peek(at + 32) & ((1ull << (length - 32)) - 1)) << 32;
        at += length;
        return value;
    };
    const u32 first = peek(at), ones = first & 0xffff;
    u64 q;
    bool fits = true;
    if (ones) {
        q = __ffs(ones) - 1;
        at += (u32)q + 1;
    } else {
        const u32 b = first >> 16 & 63;
        at += 22;
        q = (1ull << b | take(b)) + 15;
        fits = b + k < 63;
    }
    const u64 low = take(k), rest = extra ? take(extra) : 0;
    return {fits && q <= ~0ull >> k ? q << k | low : ~0ull, rest, at};
}

constexpr u32 STAGED = 16;
constexpr u32 NOWHERE = 1u << 31;

// Reads codes one after the other. A corrupt body may lead beyond its end, but by less than the slack after the image: the offset is checked after every
// segment, and no code is longer than 256 bits. Threads of a warp need new words at different times, and the whole warp would wait each time. So threads that
// decode in rounds fetch their next words together, before each round.
struct CodeReader {
    const u32* words;
    u32 skew;        // number of bits before the body in its first word
    u32* stage;      // shared memory of this thread: every 32nd word
    u32 begin;       // number of the first word in the stage
    u32 low, high, ahead;  // three consecutive words
    u32 index;       // number of the third word
    u32 shift;       // offset of the next bit in the first word

    __device__ explicit CodeReader(const u8* body, u32* stage = nullptr) : stage(stage), begin(NOWHERE) {
        words = (const u32*)((u64)body & ~15ull);
        skew = (u32)((u64)body & 15) * 8;
    }
    __device__ void seek(u32 bit) {
        const u32 at = bit + skew;
        shift = at & 31;
        index = (at >> 5) + 2;
        low = words[index - 2], high = words[index - 1], ahead = words[index];
    }
    __device__ __forceinline__ void fetch() {
        begin = index & ~3u;
        uint4 four[STAGED / 4];
#pragma unroll
        for (u32 i = 0; i < STAGED / 4; ++i) four[i] = ((const uint4*)(words + begin))[i];
#pragma unroll
        for (u32 i = 0; i < STAGED / 4; ++i) {
            u32* const to = stage + 128 * i;
            to[0] = four[i].x, to[32] = four[i].y, to[64] = four[i].z, to[96] = four[i].w;
        }
    }
    __device__ u32 taken() const { return 32 * (index - 2) + shift - skew; }
    __device__ __forceinline__ u32 bits() const { return __funnelshift_r(low, high, shift); }
    __device__ __forceinline__ void skip(u32 length) {  // `length` is at most 32
        shift += length;
        if (shift >= 32) {
            shift -= 32;
            low = high, high = ahead;
            const u32 position = ++index - begin;
            ahead = position < STAGED ? stage[32 * position] : words[index];
        }
    }
    __device__ u32 peek(u32 bit) const {
        const u32 position = bit + skew;
        return __funnelshift_r(words[position >> 5], words[(position >> 5) + 1], position & 31);
    }
    // Reads a short LR(k, v) and `extra` bits after it. `after` are the bits after the unary part.
    __device__ __forceinline__ bool short_code(u32 k, u32 extra, u32& v, u32& after) {
        const u32 next = bits(), ones = next & 0xffff;
        if (k + extra > 16 || !ones) return false;
        const u32 q = __ffs(ones) - 1;
        after = next >> (q + 1);
        v = q << k | (after & ((1u << k) - 1));
        skip(q + 1 + k + extra);
        return true;
    }
    // Reads LR(k, v) of any length. Returns ~0 for a value that does not fit.
    __device__ __forceinline__ u64 long_code(u32 k, u32 extra, u64& rest) {
        const LongCode found = read_long_code(words, taken() + skew, k, extra);
        seek(found.end - skew);
        rest = found.rest;
        return found.value;
    }
    __device__ __forceinline__ u64 code(u32 k, u32 extra, u64& rest) {
        u32 v, after;
        if (!short_code(k, extra, v, after)) return long_code(k, extra, rest);
        rest = after >> k & ((1u << extra) - 1);
        return v;
    }
    __device__ __forceinline__ u64 code(u32 k) {
        u64 rest;
        return code(k, 0, rest);
    }
};

struct StreamIndexer {
    CodeReader in;
    Head& h;
    Task* tasks;
    const u32 chunk;
    u32 next;        // number of the next task

    // Reads `n` codes. If `most` is not 0, it sums up their values plus `each` per code, up to `most`. It makes tasks of them; or, if `second` is given, it
    // fills in the second offset of the tasks from `second` on.
    __device__ u32 index(u32 stream, u32 c, u32 n, u32 k, u32 extra, u32 each, u32 most, Task* second = nullptr) {
        const u32 each_time = segment_codes(stream);
        u32 i = 0, sum = 0;
        bool wild = false;
        do {
            if (second) (second++)->more |= in.taken();
            else tasks[next++] = {chunk, in.taken() | i / each_time << 24, c << 24 | stream << 28, most ? sum : 0};
            for (const u32 end = min(i + each_time, n); i < end; ++i) {
                u32 v, after;
                if (!in.short_code(k, extra, v, after)) {
                    u64 rest;
                    const u64 value = in.long_code(k, extra, rest);
                    const bool fits = value <= BLOCK && sum <= BLOCK;
                    wild |= !fits;
                    v = fits ? (u32)value : 0;
                }
                sum += v + each;  // cannot overflow, because short codes are below 2²⁰
            }
            if (in.taken() > 8 * h.bytes) return TOO_SHORT;
            if (most && (wild || sum > most)) return stream == RANKS ? BAD_POSITION : BAD_RUN;
        } while (i < n);
        return FINE;
    }

    __device__ u32 run(u32 contexts) {
        in.seek(h.streams_at);
        for (u32 c = 0; c < contexts; ++c) {
            const ContextHead p = h.contexts[c];
            if (!p.n) continue;
            u32 error = p.inverted ? index(INVERTED_RANKS, c, p.unchanged, p.k, 0, 0, p.n) : index(RANKS, c, p.n, p.k, 0, 1, BLOCK);
            if (error) return error;
            if (p.mode != SYMBOLS) {
                h.contexts[c].signs_at = in.taken();
                if (in.taken() + p.n > 8 * h.bytes) return TOO_SHORT;
                in.seek(in.taken() + p.n);
            }
            if (p.mode == DIRECT) error = index(STEPS, c, p.n, p.kv, 0, 0, 0);
            if (WIDTH >= 8 && p.mode == SYMBOLS) error = index(XORS, c, p.n, h.ks, WIDTH - 8, 0, 0);
            if (p.mode == RUNS) {
                Task* const first = tasks + next;
                error = index(LARGER, c, p.larger, p.kr, 0, 1, p.n);
                if (!error) error = index(LARGER, c, p.larger, p.kv, 0, 0, 0, first);
            }
            if (error) return error;
        }
        const u32 left = 8 * h.bytes - in.taken();
        return left > 7 || (in.bits() & ((1u << left) - 1)) ? TOO_LONG : FINE;
    }
};

// Makes the tasks of all chunks. There is one thread per chunk, and few of them in a warp. `ends` says where the tasks of each chunk end.
extern "C" __global__ void __launch_bounds__(32) index_streams(
    const Run* chunks, u32 nchunks, const u8* image, Head* heads, const u32* ends, Task* tasks) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= nchunks || chunks[i].mode != CODED) return;
    Head& h = heads[i];
    StreamIndexer indexer{CodeReader(image + chunks[i].body), h, tasks + ends[i] - h.tasks, i, 0};
    const u32 error = indexer.run(chunks[i].coding.mask ? CONTEXTS : 1);
    if (!error) return;
    h.error = error;
    for (u32 t = 0; t < h.tasks; ++t) indexer.tasks[t].chunk = ALL;
}

// The changes of a slab of chunks, ready to be located, sorted by context.
struct Targets {
    u32* ranks;      // rank in its context, within the chunk
    T* operands;     // a step, or bits to XOR
    u32 first;       // number of the slab's first change, over all chunks
};

struct SegmentDecoder {
    CodeReader in, magnitudes;
    const Head& h;
    const ContextHead p;
    const Task t;
    u32* const ranks;
    u32 at, end;     // number of the next code of the stream, and of the first one after the segment
    u32 sum;

    __device__ u32 stream() const { return t.stream(); }

    __device__ void start() {
        const u32 codes = stream() == INVERTED_RANKS ? p.unchanged : stream() == LARGER ? p.larger : p.n;
        at = (t.at >> 24) * segment_codes(stream());
        end = min(at + segment_codes(stream()), codes);
        sum = t.sum;
        in.seek(t.at & LOW_24);
        if (stream() == LARGER) magnitudes.seek(t.more & LOW_24);
    }

    // Decodes the next ranks or operands, at most 32, into rows of the warp's memory. For larger steps these are the numbers of the changes and their
    // magnitudes. Returns how many there are.
    __device__ u32 next(u32* row_of_ranks, T* row_of_operands, u32& error) {
        const u32 m = min(end - at, 32u);
        in.fetch();
        if (stream() == LARGER) magnitudes.fetch();
        if (stream() == RANKS) {
            for (u32 j = 0; j < m; ++j, ++sum) row_of_ranks[j] = sum += (u32)in.code(p.k);
            if (sum > p.elements) error = BAD_POSITION;
        } else if (stream() == STEPS) {
            const u32 signs = in.peek(p.signs_at + at);
            for (u32 j = 0; j < m; ++j) {
                const u64 less_one = in.code(p.kv);
                if (less_one >= 1ull << (WIDTH - 1)) error = BAD_STEP;
                const T magnitude = (T)(less_one + 1);
                row_of_operands[j] = signs >> j & 1 ? (T)(0 - magnitude) : magnitude;
            }
        } else if (stream() == LARGER) {
            for (u32 j = 0; j < m; ++j, ++sum) {
                row_of_ranks[j] = sum += (u32)in.code(p.kr);
                const u64 less_two = magnitudes.code(p.kv);
                if (less_two >= (1ull << (WIDTH - 1)) - 1) error = BAD_STEP;
                row_of_operands[j] = (T)(less_two + 2);
            }
        } else {
            for (u32 j = 0; j < m; ++j) {
                u64 low;
                const u64 r = in.code(h.ks, WIDTH > 8 ? WIDTH - 8 : 0, low);
                if (r >= h.symbols) error = BAD_SYMBOL;
                const u64 y = (u64)(in.peek(23 + 8 * (u32)min(r, 255ull)) & 0xff) << (WIDTH > 8 ? WIDTH - 8 : 0) | low;
                if (!y) error = NO_CHANGE;
                row_of_operands[j] = (T)y;
            }
        }
        return m;
    }

    // Decodes the runs of changes before each unchanged element, and after the last of these the remaining changes.
    __device__ void inverted_ranks() {
        u32 change = sum;
        for (; at < end; ++at)
            for (u32 run = (u32)in.code(p.k); run; --run, ++change) ranks[change] = change + at;
        if (end == p.unchanged)
            for (; change < p.n; ++change) ranks[change] = change + p.unchanged;
    }
};

// Decodes all tasks, one thread per task. There are three thread blocks for each 64 tasks: one for ranks, one for operands, one for larger steps and inverted
// contexts, so that no warp waits for another kind of stream. The results go through shared memory: the targets of the threads are far apart, but a warp
// writes consecutive elements.
extern "C" __global__ void __launch_bounds__(64) decode_segments(
    const Run* chunks, const u8* image, Head* heads, const Task* tasks, u32 ntasks, Targets out) {
    __shared__ u32 stages[2][2][32 * STAGED];
    __shared__ u32 all_ranks[2][32][33];
    __shared__ T all_operands[2][32][33];
    const u32 i = blockIdx.x / 3 * 64 + threadIdx.x, group = blockIdx.x % 3, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto& ranks = all_ranks[warp];
    auto& operands = all_operands[warp];
    const Task t = i < ntasks ? tasks[i] : Task{ALL, 0, 0, 0};
    const u32 stream = t.stream();
    const bool active = t.chunk != ALL && group == (stream == RANKS ? 0 : stream == STEPS || stream == XORS ? 1 : 2) && !heads[t.chunk].error;
    if (!__any_sync(ALL, active)) return;
    const u32 chunk = active ? t.chunk : 0;
    Head& h = heads[chunk];
    const Run& s = chunks[chunk];
    const ContextHead p = h.contexts[t.context()];
    const u32 to = s.start - out.first + p.before;
    const u8* const body = image + s.body;
    SegmentDecoder d{CodeReader(body, stages[warp][0] + lane), CodeReader(body, stages[warp][1] + lane), h, p, t, out.ranks + to};
    const u64 signs = 8 * (u64)d.in.words + d.in.skew + p.signs_at;  // the address of the first sign bit
    u32 error = FINE, left = 0;
    if (active) {
        d.start();
        if (stream == INVERTED_RANKS) d.inverted_ranks();
        else left = d.end - d.at;
    }
    while (__any_sync(ALL, left)) {
        const u32 m = left ? d.next(ranks[lane], operands[lane], error) : 0, first = group == 2 ? to : to + d.at;
        left -= m;
        d.at += m;
        __syncwarp();
        if (group < 2) {
#pragma unroll 8
            for (u32 row = 0; row < 32; ++row) {
                const u32 size = __shfl_sync(ALL, m, row), position = __shfl_sync(ALL, first, row) + lane;
                if (lane < size && group == 0) out.ranks[position] = ranks[row][lane];
                if (lane < size && group == 1) out.operands[position] = operands[row][lane];
            }
        } else {  // larger steps replace steps of one; their signs are fetched before the first of them is needed
            constexpr u32 EACH = 16;
#pragma unroll 1
            for (u32 row0 = 0; row0 < 32; row0 += EACH) {
                u32 to_line[EACH], sign[EACH];
#pragma unroll
                for (u32 r = 0; r < EACH; ++r) {
                    const u32 size = __shfl_sync(ALL, m, row0 + r), position = __shfl_sync(ALL, first, row0 + r);
                    const u64 sign_bits = __shfl_sync(ALL, signs, row0 + r);
                    to_line[r] = ALL;
                    if (lane < size) {
                        const u32 line = ranks[row0 + r][lane];
                        const u64 bit = sign_bits + line;
                        to_line[r] = position + line;
                        sign[r] = *(const u32*)((bit >> 5) * 4) >> (bit & 31);
                    }
                }
#pragma unroll
                for (u32 r = 0; r < EACH; ++r)
                    if (to_line[r] != ALL) {
                        const T magnitude = operands[row0 + r][lane];
                        out.operands[to_line[r]] = sign[r] & 1 ? (T)(0 - magnitude) : magnitude;
                    }
            }
        }
        __syncwarp();
    }
    if (error) atomicExch(&h.error, error);
}
