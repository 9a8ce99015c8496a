// The streams of coded chunks. A code's place is known only when the one before it is read, so one thread goes over each chunk, and notes on its way
// where every so many codes begin; from there they are decoded by many.

struct Task {
    u32 chunk;       // ALL: nothing to do
    u32 at;          // the first code, in bits; from bit 24 on the number of the segment
    u32 more;        // of larger steps: the first code of their magnitudes
    u32 sum;         // of what the codes before it say; from bit 25 on the context, from bit 29 on the stream
};

static_assert(MOST / 128 <= 256, "segments are numbered with 8 bits");
constexpr u32 LOW_24 = (1 << 24) - 1, LOW_25 = (1 << 25) - 1;

struct LongCode {
    u64 value, rest;
    u32 end;
};

// Not for the most of codes, and so out of the way: loops that read codes must be short to be fast.
__device__ __noinline__ LongCode read_long_code(const u32* words, u32 at, u32 k, u32 extra) {
    const auto peek = [&](u32 place) { return __funnelshift_r(words[place >> 5], words[(place >> 5) + 1], place & 31); };
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

// Codes one after the other. A broken body may lead beyond its end, by less than there is room for after the image: it is looked at after every
// segment, and no code is longer than 256 bits. Threads of a warp come to new words at different times, and each time all would wait for them: those that
// decode in rounds fetch the next words together, before each.
struct CodeReader {
    const u32* words;
    u32 skew;        // bits before the body in its first words
    u32* stage;      // of this thread: every 32nd word of shared memory
    u32 begin;       // the first word in it
    u32 low, high, ahead;  // three words in a row
    u32 index;       // of the third
    u32 shift;       // the next bit, in the first

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
    __device__ __forceinline__ void skip(u32 length) {  // at most 32
        shift += length;
        if (shift >= 32) {
            shift -= 32;
            low = high, high = ahead;
            const u32 place = ++index - begin;
            ahead = place < STAGED ? stage[32 * place] : words[index];
        }
    }
    __device__ u32 peek(u32 bit) const {
        const u32 place = bit + skew;
        return __funnelshift_r(words[place >> 5], words[(place >> 5) + 1], place & 31);
    }
    // LR(k, v) with `extra` bits after it, if it is a short one: `after` are the bits after the unary part.
    __device__ __forceinline__ bool short_code(u32 k, u32 extra, u32& v, u32& after) {
        const u32 next = bits(), ones = next & 0xffff;
        if (k + extra > 16 || !ones) return false;
        const u32 q = __ffs(ones) - 1;
        after = next >> (q + 1);
        v = q << k | (after & ((1u << k) - 1));
        skip(q + 1 + k + extra);
        return true;
    }
    // The same of any length; ~0 for anything that does not fit.
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
    u32 next;        // task

    // `n` codes; where it matters their values, and `each` more for every one, are summed up, to at most `most`. Makes tasks of them, or is the second
    // place of the tasks from `second` on.
    __device__ u32 index(u32 stream, u32 c, u32 n, u32 k, u32 extra, u32 each, u32 most, Task* second = nullptr) {
        const u32 each_time = segment_codes(stream);
        u32 i = 0, sum = 0;
        bool wild = false;
        do {
            if (second) (second++)->more = in.taken();
            else tasks[next++] = {chunk, in.taken() | i / each_time << 24, 0, (most ? sum : 0) | c << 25 | stream << 29};
            for (const u32 end = min(i + each_time, n); i < end; ++i) {
                u32 v, after;
                if (!in.short_code(k, extra, v, after)) {
                    u64 rest;
                    const u64 value = in.long_code(k, extra, rest);
                    const bool fits = value <= BLOCK && sum <= BLOCK;
                    wild |= !fits;
                    v = fits ? (u32)value : 0;
                }
                sum += v + each;  // no overflow: short codes are below 2²⁰
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
            if (p.mode == SYMBOLS) error = index(XORS, c, p.n, h.ks, WIDTH - 8, 0, 0);
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

// A thread per chunk, few of them in a warp. `ends`: where the tasks of each chunk end.
extern "C" __global__ void __launch_bounds__(32) index_streams(
    const Span* spans, u32 nspans, const u8* image, Head* heads, const u32* ends, Task* tasks) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= nspans || spans[i].mode != CODED) return;
    Head& h = heads[i];
    StreamIndexer indexer{CodeReader(image + (u64)spans[i].next), h, tasks + ends[i] - h.tasks, i, 0};
    const u32 error = indexer.run(spans[i].mask ? CONTEXTS : 1);
    if (!error) return;
    h.error = error;
    for (u32 t = 0; t < h.tasks; ++t) indexer.tasks[t].chunk = ALL;
}

// The changes of a slab of chunks, ready to be located, context after context.
struct Targets {
    u32* ranks;      // in the context, within the chunk
    T* operands;     // steps, or bits to XOR
    u32 first;       // the slab's first change, counted over all spans
};

struct SegmentDecoder {
    CodeReader in, magnitudes;
    const Head& h;
    const ContextHead p;
    const Task t;
    u32* const ranks;
    u32 at, end;     // the next code of the stream, and the first after the segment
    u32 sum;

    __device__ u32 stream() const { return t.sum >> 29; }

    __device__ void start() {
        const u32 codes = stream() == INVERTED_RANKS ? p.unchanged : stream() == LARGER ? p.larger : p.n;
        at = (t.at >> 24) * segment_codes(stream());
        end = min(at + segment_codes(stream()), codes);
        sum = t.sum & LOW_25;
        in.seek(t.at & LOW_24);
        if (stream() == LARGER) magnitudes.seek(t.more);
    }

    // The next ranks or operands, or of larger steps which changes they are and their magnitudes: at most 32, to rows of the warp's memory. Their number is
    // the result.
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
                const u64 r = in.code(h.ks, WIDTH - 8, low);
                if (r >= h.symbols) error = BAD_SYMBOL;
                const u64 y = (u64)(in.peek(23 + 8 * (u32)min(r, 255ull)) & 0xff) << (WIDTH - 8) | low;
                if (!y) error = NO_CHANGE;
                row_of_operands[j] = (T)y;
            }
        }
        return m;
    }

    // Runs of changes before each unchanged element; after the last of these, the changes that are left.
    __device__ void inverted_ranks() {
        u32 change = sum;
        for (; at < end; ++at)
            for (u32 run = (u32)in.code(p.k); run; --run, ++change) ranks[change] = change + at;
        if (end == p.unchanged)
            for (; change < p.n; ++change) ranks[change] = change + p.unchanged;
    }
};

// A thread per task, and three blocks for each 64 tasks: one for ranks, one for operands, one for larger steps and inverted contexts, so that no warp waits
// for another kind of stream than its own. What they decode goes through shared memory: threads write far apart, a warp in a row.
extern "C" __global__ void __launch_bounds__(64) decode_segments(
    const Span* spans, const u8* image, Head* heads, const Task* tasks, u32 ntasks, Targets out) {
    __shared__ u32 stages[2][2][32 * STAGED];
    __shared__ u32 all_ranks[2][32][33];
    __shared__ T all_operands[2][32][33];
    const u32 i = blockIdx.x / 3 * 64 + threadIdx.x, group = blockIdx.x % 3, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto& ranks = all_ranks[warp];
    auto& operands = all_operands[warp];
    const Task t = i < ntasks ? tasks[i] : Task{ALL, 0, 0, 0};
    const u32 stream = t.sum >> 29;
    const bool active = t.chunk != ALL && group == (stream == RANKS ? 0 : stream == STEPS || stream == XORS ? 1 : 2) && !heads[t.chunk].error;
    if (!__any_sync(ALL, active)) return;
    const u32 chunk = active ? t.chunk : 0;
    Head& h = heads[chunk];
    const Span& s = spans[chunk];
    const ContextHead p = h.contexts[t.sum >> 25 & 15];
    const u32 to = s.start - out.first + p.before;
    const u8* const body = image + (u64)s.next;
    SegmentDecoder d{CodeReader(body, stages[warp][0] + lane), CodeReader(body, stages[warp][1] + lane), h, p, t, out.ranks + to};
    const u64 signs = 8 * (u64)d.in.words + d.in.skew + p.signs_at;  // the address of a bit
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
                const u32 size = __shfl_sync(ALL, m, row), place = __shfl_sync(ALL, first, row) + lane;
                if (lane < size && group == 0) out.ranks[place] = ranks[row][lane];
                if (lane < size && group == 1) out.operands[place] = operands[row][lane];
            }
        } else {  // these take the place of ones; signs are asked for before the first of them is needed
            constexpr u32 EACH = 16;
#pragma unroll 1
            for (u32 row0 = 0; row0 < 32; row0 += EACH) {
                u32 to_line[EACH], sign[EACH];
#pragma unroll
                for (u32 r = 0; r < EACH; ++r) {
                    const u32 size = __shfl_sync(ALL, m, row0 + r), place = __shfl_sync(ALL, first, row0 + r);
                    const u64 sign_bits = __shfl_sync(ALL, signs, row0 + r);
                    to_line[r] = ALL;
                    if (lane < size) {
                        const u32 line = ranks[row0 + r][lane];
                        const u64 bit = sign_bits + line;
                        to_line[r] = place + line;
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
