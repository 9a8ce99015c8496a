// Encodes one coded chunk per thread block: sorts its changes by context, chooses all parameters (docs/format.md §5, rules 3–6) and writes its body.

constexpr u32 PLAN_THREADS = 512, PLAN_WARPS = PLAN_THREADS / 32;
constexpr u32 MOST = 1 << 15;            // the most changes that a chunk can have
constexpr u32 SEGMENT = 1024;            // values that a warp processes at a time
constexpr u32 WINDOW = 4;                // parameters whose costs are computed in one pass
constexpr u32 MOST_MOVE_TASKS = MOST / SEGMENT + CONTEXTS, MOST_TASKS = 6 * MOST_MOVE_TASKS;
constexpr u32 AHEAD = 4;                 // values that a lane fetches before it needs the first of them, because memory is slow
constexpr u32 STAGED_WORDS = 160;        // words of codes that a warp collects before it writes them
constexpr u64 CAP = 1ull << 47;

// The sequences of a context that are coded with LR.
enum Kind { GAPS, INVERTED_GAPS, LARGER_GAPS, MAGNITUDES, LARGER_MAGNITUDES, SYMBOLS_OF, KINDS };
enum ValueMode { UNIT_MODE, RUNS, DIRECT, SYMBOLS };

// Describes how a value changes: its step, and its changed bits.
struct Move {
    T step, flip;
};

// The working memory of a thread block. It is global memory, but stays in the cache.
struct PlanScratch {
    u32 ranks[MOST];       // ranks of the changes in their contexts, sorted by context
    Move moves[MOST];
    union {
        struct {  // used until the changes are sorted
            u32 element_starts[MOST_TILES][USED];  // elements of each context in earlier tiles
            u16 change_starts[MOST_TILES][USED];   // changes of each context in earlier tiles
        };
        struct {
            u16 inverted[MOST];    // ranks of the elements that do not change, if they are the minority (then the context has fewer than 2¹⁶ elements)
            u16 larger[MOST];      // the changes with a magnitude above 1
        };
    };
};

struct Sequence {
    u32 size, k, pending;  // the costs of parameters k, k − 1, … k − WINDOW + 1 are known
    u32 costs[WINDOW];
    u32 chosen, bits;
};

struct ContextPlan {
    u32 n, elements, offset, larger;
    u64 sum, larger_sum;
    u32 inverted, mode, value_bits, symbols_bits, candidate;
    u32 first_move_task;                              // see `PlanSpace::signs`
    u32 positions_at, signs_at, codes_at, larger_at;  // offsets in bits
};

struct PlanSpace {
    u32 part_sums[32][CONTEXTS], change_part_sums[32][CONTEXTS];
    Sequence sequences[KINDS][CONTEXTS];
    ContextPlan contexts[CONTEXTS];
    u32 tasks[MOST_TASKS];
    u32 task_costs[MOST_TASKS][WINDOW];
    u32 ntasks;
    u32 signs[MOST_MOVE_TASKS][32], larger[MOST_MOVE_TASKS][32];  // one bit per change
    u32 staged[PLAN_WARPS][STAGED_WORDS];                         // initially zeros
    u32 cursors[PLAN_WARPS][CONTEXTS];
    u32 frequency[256];
    u8 rank_of[256], table[256];
    u32 symbols, considered, ks, has_table;
    u64 body;
    u32 bytes, mode, chunk;
};

struct Bodies {
    u32* words;     // initially zeros
    u64 capacity;   // in words
    u64* cursor;    // number of words taken; if it exceeds the capacity, the bodies beyond were not written
};

__device__ __forceinline__ void put_bits(u32* out, u32 at, u64 value, u32 length) {
    if (!length) return;
    u32* const word = out + (at >> 5);
    const u32 shift = at & 31;
    const u64 low = value << shift;
    if ((u32)low) atomicOr(word, (u32)low);
    if (shift + length > 32 && (u32)(low >> 32)) atomicOr(word + 1, (u32)(low >> 32));
    if (shift + length > 64) {
        const u32 rest = (u32)(value >> (64 - shift));
        if (rest) atomicOr(word + 2, rest);
    }
}

struct BitCursor {
    u32* out;
    u32 at;
    __device__ void put(u32 value, u32 length) {
        put_bits(out, at, value, length);
        at += length;
    }
    __device__ void put_count(u32 n) {
        const u32 length = 32 - __clz(n);
        put(length, 5);
        if (length > 1) put(n ^ (1u << (length - 1)), length - 1);
    }
};

#if WIDTH > 32
typedef u64 V;  // a gap or a magnitude
#else
typedef u32 V;
#endif

__device__ __forceinline__ void put_rice(u32* out, u32 at, u32 k, V v) {
    const V q = v >> k, low = v & (((V)1 << k) - 1);
    if (q < 16 && k <= 47) {
        put_bits(out, at, ((u64)low << 1 | 1) << q, (u32)q + 1 + k);
        return;
    }
    if (q < 16) {
        put_bits(out, at, 1ull << q, (u32)q + 1);
        put_bits(out, at + (u32)q + 1, low, k);
        return;
    }
    const u64 x = q - 15;
    const u32 b = 63 - __clzll(x);
    put_bits(out, at + 16, b, 6);
    put_bits(out, at + 22, x ^ (1ull << b), b);
    put_bits(out, at + 22 + b, low, k);
}

__device__ __forceinline__ Move move_of(Pair p, bool floating) {
    return {(T)((ordered(p.now, floating) - ordered(p.old, floating)) & MASK), (T)(p.old ^ p.now)};
}
// The parts of a change that the symbol tables count. 4-bit elements have no symbols.
__device__ __forceinline__ u32 top_byte(T flip) { return (u32)(flip >> (WIDTH > 8 ? WIDTH - 8 : 0)); }
__device__ __forceinline__ T magnitude_of(T step) { return step >> (WIDTH - 1) ? (T)((0 - step) & MASK) : step; }

struct Planner {
    PlanSpace& at;
    PlanScratch& scratch;
    const Coding s;
    const u32 thread, lane, warp, contexts;
    const bool floating;

    // Fetches value `first + lane` and every 32nd after it. Values beyond `end` are meaningless, but can be read.
    __device__ __forceinline__ void values(u32 kind, u32 c, u32 first, u32 end, V out[AHEAD]) const {
        const u32 offset = at.contexts[c].offset;
        u32 positions[AHEAD];
#pragma unroll
        for (u32 j = 0; j < AHEAD; ++j) positions[j] = min(first + 32 * j + lane, end - 1);
        if (kind == GAPS) {
            const u32* const list = scratch.ranks + offset;
#pragma unroll
            for (u32 j = 0; j < AHEAD; ++j) out[j] = positions[j] ? list[positions[j]] - list[positions[j] - 1] - 1 : list[0];
            return;
        }
        if (kind <= LARGER_GAPS) {
            const u16* const list = (kind == INVERTED_GAPS ? scratch.inverted : scratch.larger) + offset;
#pragma unroll
            for (u32 j = 0; j < AHEAD; ++j) out[j] = positions[j] ? (u32)list[positions[j]] - list[positions[j] - 1] - 1 : list[0];
            return;
        }
        if (kind == LARGER_MAGNITUDES) {
#pragma unroll
            for (u32 j = 0; j < AHEAD; ++j) positions[j] = scratch.larger[offset + positions[j]];
        }
#pragma unroll
        for (u32 j = 0; j < AHEAD; ++j) {
            const Move move = scratch.moves[offset + positions[j]];
            if (kind == SYMBOLS_OF) out[j] = at.rank_of[top_byte(move.flip)];
            else out[j] = (T)(magnitude_of(move.step) - (kind == MAGNITUDES ? 1 : 2));
        }
    }

    // Counts the elements and changes of each context before every tile of the chunk, and in the whole chunk.
    __device__ void sum_tiles(u32 first_tile, u32 tiles, const u16* elements, const u16* counts) {
        for (u32 i = thread; i < tiles * USED; i += PLAN_THREADS) {
            scratch.element_starts[i / USED][i % USED] = elements[(u64)first_tile * USED + i];
            scratch.change_starts[i / USED][i % USED] = counts[(u64)first_tile * USED + i];
        }
        __syncthreads();
        const u32 c = thread % CONTEXTS, part = thread / CONTEXTS, size = (tiles + 31) / 32;
        const u32 begin = min(part * size, tiles), end = c < USED ? min(begin + size, tiles) : begin;
        u32 e = 0, n = 0;
        for (u32 t = begin; t < end; ++t) e += scratch.element_starts[t][c], n += scratch.change_starts[t][c];
        at.part_sums[part][c] = e;
        at.change_part_sums[part][c] = n;
        __syncthreads();
        if (warp < CONTEXTS) {
            const u32 e0 = at.part_sums[lane][warp], n0 = at.change_part_sums[lane][warp];
            const u32 e1 = inclusive_scan(e0, lane), n1 = inclusive_scan(n0, lane);
            at.part_sums[lane][warp] = e1 - e0;
            at.change_part_sums[lane][warp] = n1 - n0;
            if (lane == 31) {
                at.contexts[warp].elements = e1;
                at.contexts[warp].n = n1;
            }
        }
        __syncthreads();
        e = at.part_sums[part][c], n = at.change_part_sums[part][c];
        for (u32 t = begin; t < end; ++t) {
            const u32 e1 = scratch.element_starts[t][c], n1 = scratch.change_starts[t][c];
            scratch.element_starts[t][c] = e;
            scratch.change_starts[t][c] = (u16)n;
            e += e1, n += n1;
        }
        if (thread == 0) {
            u32 offset = 0;
            for (u32 k = 0; k < CONTEXTS; ++k) {
                at.contexts[k].offset = offset;
                offset += at.contexts[k].n;
            }
        }
        __syncthreads();
    }

    // Sorts the changes by context, and within a context by element.
    __device__ void sort_changes(u32 first_tile, u32 tiles, const Changes& from) {
        u32* const cursors = at.cursors[warp];
        for (u32 t = warp; t < tiles; t += PLAN_WARPS) {
            if (lane < USED) cursors[lane] = at.contexts[lane].offset + scratch.change_starts[t][lane];
            const u64 unit0 = (u64)(first_tile + t) * UNITS;
            const u32 size = lane < UNITS ? from.sizes[unit0 + lane] : 0, slot = size ? from.slots[unit0 + lane] : 0;
            const u32 upto = inclusive_scan(size, lane), before_unit = upto - size, n = __shfl_sync(ALL, upto, 31);
            __syncwarp();
            for (u32 first = 0; first < n; first += 32 * AHEAD) {
                Pair pairs[AHEAD];
                u32 ranks[AHEAD];
#pragma unroll
                for (u32 j = 0; j < AHEAD; ++j) {
                    const u32 i = min(first + 32 * j + lane, n - 1);
                    u32 unit = 0;  // the last unit that does not begin after it
#pragma unroll
                    for (u32 d = UNITS / 2; d; d /= 2)
                        if (__shfl_sync(ALL, before_unit, unit + d) <= i) unit += d;
                    const u32 from_slot = __shfl_sync(ALL, slot, unit) + i - __shfl_sync(ALL, before_unit, unit);
                    pairs[j] = from.pairs[from_slot];
                    ranks[j] = from.ranks[from_slot];
                }
#pragma unroll
                for (u32 j = 0; j < AHEAD; ++j) {
                    if (first + 32 * j >= n) break;
                    const bool active = first + 32 * j + lane < n;
                    const u32 c = active ? context_of(pairs[j].old, s) : CONTEXTS;
                    const u32 same = __match_any_sync(ALL, c), before = __popc(same & ((1u << lane) - 1));
                    if (active) {
                        const u32 to = cursors[c] + before;
                        scratch.ranks[to] = scratch.element_starts[t][c] + ranks[j];
                        scratch.moves[to] = move_of(pairs[j], floating);
                    }
                    __syncwarp();
                    if (active && !before) cursors[c] += __popc(same);
                    __syncwarp();
                }
            }
        }
        __syncthreads();
    }

    // Lists the changes with a magnitude above 1, and sums up the magnitudes. It does one context after the other; the whole block works on a large one.
    __device__ void list_larger() {
        if (thread < CONTEXTS) {
            at.contexts[thread].larger = 0;
            at.contexts[thread].sum = at.contexts[thread].larger_sum = 0;
        }
        make_tasks(1u << MAGNITUDES);
        for (u32 task = warp; task < at.ntasks; task += PLAN_WARPS) {
            const u32 c = at.tasks[task] & 15, first = (at.tasks[task] >> 8) * SEGMENT;
            const u32 n = at.contexts[c].n, end = min(first + SEGMENT, n), offset = at.contexts[c].offset;
            if (!first && !lane) at.contexts[c].first_move_task = task;
            u64 sum = 0, larger_sum = 0;
            u32 larger_bits = 0, sign_bits = 0;  // one word per lane
            for (u32 i0 = first; i0 < end; i0 += 32 * AHEAD) {
                T steps[AHEAD];
#pragma unroll
                for (u32 j = 0; j < AHEAD; ++j) steps[j] = scratch.moves[offset + min(i0 + 32 * j + lane, end - 1)].step;
#pragma unroll
                for (u32 j = 0; j < AHEAD; ++j) {
                    const bool active = i0 + 32 * j + lane < end;
                    const T m = active ? magnitude_of(steps[j]) : (T)1;
                    const u32 larger = __ballot_sync(ALL, m > 1), signs = __ballot_sync(ALL, active && steps[j] >> (WIDTH - 1));
                    if (lane == (i0 - first) / 32 + j) larger_bits = larger, sign_bits = signs;
                    sum += min((u64)m - 1, CAP);
                    if (WIDTH > 32 && m > 1) larger_sum += min((u64)m - 2, CAP);  // the cap may apply to one sum and not to the other
                }
            }
            const u32 larger = warp_sum(__popc(larger_bits));
#pragma unroll
            for (u32 d = 16; d; d /= 2) {
                sum += __shfl_down_sync(ALL, sum, d);
                if (WIDTH > 32) larger_sum += __shfl_down_sync(ALL, larger_sum, d);
            }
            at.signs[task][lane] = sign_bits;
            at.larger[task][lane] = larger_bits;
            if (lane == 0) {
                at.task_costs[task][0] = larger;
                atomicAdd(&at.contexts[c].larger, larger);
                atomicAdd(&at.contexts[c].sum, sum);
                atomicAdd(&at.contexts[c].larger_sum, WIDTH > 32 ? larger_sum : sum - larger);
            }
        }
        __syncthreads();
        for (u32 task = warp; task < at.ntasks; task += PLAN_WARPS) {
            const u32 c = at.tasks[task] & 15, segment = at.tasks[task] >> 8;
            if (!at.task_costs[task][0]) continue;
            u32 bits = at.larger[task][lane], to = at.contexts[c].offset + inclusive_scan(__popc(bits), lane) - __popc(bits);
            for (u32 before = 0; before < segment; ++before) to += at.task_costs[task - segment + before][0];
            for (; bits; bits &= bits - 1) scratch.larger[to++] = (u16)(segment * SEGMENT + 32 * lane + __ffs(bits) - 1);
        }
        __syncthreads();
    }

    // Lists the elements that do not change, in contexts where they are the minority.
    __device__ void list_unchanged() {
        for (u32 c = 0; c < contexts; ++c) {
            const u32 n = at.contexts[c].n, all = at.contexts[c].elements, offset = at.contexts[c].offset;
            if (2 * n <= all) continue;
            const u32* const ranks = scratch.ranks + offset;
            u16* const to = scratch.inverted + offset;
            for (u32 i = thread; i <= n; i += PLAN_THREADS) {
                const u32 from = i ? ranks[i - 1] + 1 : 0, upto = i < n ? ranks[i] : all;
                for (u32 r = from; r < upto; ++r) to[r - i] = (u16)r;
            }
        }
        __syncthreads();
    }

    // Makes tasks for all sequences of these kinds, in addition to existing tasks if there are any.
    __device__ void make_tasks(u32 kinds, bool more = false) {
        if (thread == 0 && !more) at.ntasks = 0;
        __syncthreads();
        if (thread < KINDS * CONTEXTS) {
            const u32 kind = thread / CONTEXTS, c = thread % CONTEXTS;
            Sequence& q = at.sequences[kind][c];
            const ContextPlan& p = at.contexts[c];
            if (kinds >> kind & 1) {
                u32 size = 0;
                if (kind == GAPS || kind == MAGNITUDES) size = p.n;
                else if (kind == INVERTED_GAPS) size = 2 * p.n > p.elements ? p.elements - p.n : 0;
                else if (kind == LARGER_GAPS || kind == LARGER_MAGNITUDES) size = p.larger;
                else size = p.candidate ? p.n : 0;
                if (kind == MAGNITUDES && (kinds >> GAPS & 1) && !p.larger) size = 0;  // all magnitudes are 1
                const u32 segments = (size + SEGMENT - 1) / SEGMENT, first = segments ? atomicAdd(&at.ntasks, segments) : 0;
                for (u32 i = 0; i < segments; ++i) at.tasks[first + i] = kind << 4 | c | i << 8;
                q.size = size;
            }
        }
        __syncthreads();
    }

    // Computes the costs of all pending sequences, for the parameters in their windows.
    __device__ void find_costs() {
        for (u32 task = warp; task < at.ntasks; task += PLAN_WARPS) {
            const u32 c = at.tasks[task] & 15, kind = at.tasks[task] >> 4 & 15, first = (at.tasks[task] >> 8) * SEGMENT;
            Sequence& q = at.sequences[kind][c];
            if (!q.pending) continue;
            const u32 end = min(first + SEGMENT, q.size), k = q.k;
            u32 costs[WINDOW] = {};
            for (u32 i0 = first; i0 < end; i0 += 32 * AHEAD) {
                V v[AHEAD];
                values(kind, c, i0, end, v);
#pragma unroll
                for (u32 j = 0; j < AHEAD; ++j)
#pragma unroll
                    for (u32 w = 0; w < WINDOW; ++w)
                        if (k >= w && i0 + 32 * j + lane < end) costs[w] += rice_bits(v[j], k - w);
            }
#pragma unroll
            for (u32 w = 0; w < WINDOW; ++w) {
                costs[w] = warp_sum(costs[w]);
                if (lane == 0) {
                    at.task_costs[task][w] = costs[w];
                    atomicAdd(&q.costs[w], costs[w]);
                }
            }
        }
        __syncthreads();
    }

    // Chooses the parameters of all sequences that have tasks (§5.3).
    __device__ void choose_parameters(u32 kinds) {
        const u32 kind = thread / CONTEXTS, c = thread % CONTEXTS;
        const bool mine = thread < KINDS * CONTEXTS && (kinds >> kind & 1);
        Sequence* const q = mine ? &at.sequences[kind][c] : nullptr;
        if (mine) {
            const ContextPlan& p = at.contexts[c];
            u64 sum = 0;
            u32 largest = 24;
            if (q->size) {
                if (kind == GAPS) sum = scratch.ranks[p.offset + q->size - 1] - (q->size - 1);
                else if (kind == INVERTED_GAPS) sum = scratch.inverted[p.offset + q->size - 1] - (q->size - 1);
                else if (kind == LARGER_GAPS) sum = scratch.larger[p.offset + q->size - 1] - (q->size - 1);
                else sum = kind == MAGNITUDES ? p.sum : p.larger_sum, largest = WIDTH - 1;
            }
            q->k = q->size ? min(largest, bit_length(sum / q->size)) : 0;
            if (kind == SYMBOLS_OF) q->k = at.ks;
            q->pending = q->size != 0;
            q->chosen = kind == SYMBOLS_OF ? at.ks : 0;
            q->bits = 0;
            for (u32 w = 0; w < WINDOW; ++w) q->costs[w] = 0;
        }
        __syncthreads();
        for (;;) {
            find_costs();
            bool again = false;
            if (mine && q->pending) {
                q->pending = 0;
                u32 w = 0;
                if (kind != SYMBOLS_OF)
                    while (w + 1 < WINDOW && q->k > w && q->costs[w + 1] < q->costs[w]) ++w;
                q->chosen = q->k - w;
                q->bits = q->costs[w];
                if (w + 1 == WINDOW && q->k > w) {  // a smaller parameter may be better: continue from here
                    q->k -= w;
                    q->pending = again = true;
                    for (u32 i = 0; i < WINDOW; ++i) q->costs[i] = 0;
                }
            }
            if (!__syncthreads_or(again)) break;
        }
    }

    // Chooses how positions and values are coded (§5.4 and §5.5).
    __device__ void choose_modes() {
        if (thread < CONTEXTS) {
            ContextPlan& p = at.contexts[thread];
            const Sequence &gaps = at.sequences[GAPS][thread], &inverted = at.sequences[INVERTED_GAPS][thread];
            p.inverted = 2 * p.n > p.elements && inverted.bits + count_bits(p.elements - p.n) < gaps.bits;
            p.mode = UNIT_MODE;
            p.value_bits = p.n;
            p.candidate = 0;
            if (p.larger) {
                const u32 direct = p.n + 6 + at.sequences[MAGNITUDES][thread].bits;
                const u32 runs = p.n + count_bits(p.larger) + 5 + 6 + at.sequences[LARGER_GAPS][thread].bits + at.sequences[LARGER_MAGNITUDES][thread].bits;
                p.mode = runs < direct ? RUNS : DIRECT;
                p.value_bits = min(runs, direct);
            }
            p.candidate = WIDTH > 4 && p.n && p.value_bits > p.n * (WIDTH - 7);
        }
    }

    // Chooses the contexts that use symbols (§5.6).
    __device__ void choose_symbols() {
        const u32 any = __syncthreads_or(thread < CONTEXTS && at.contexts[thread].candidate);
        if (thread == 0) at.has_table = 0;
        if (!any) {
            __syncthreads();
            return;
        }
        for (u32 i = thread; i < 256; i += PLAN_THREADS) at.frequency[i] = 0;
        if (thread == 0) at.symbols = at.considered = 0;
        __syncthreads();
        for (u32 c = 0; c < contexts; ++c) {
            if (!at.contexts[c].candidate) continue;
            if (thread == 0) at.considered += at.contexts[c].n;
            for (u32 i = thread; i < at.contexts[c].n; i += PLAN_THREADS) {
                atomicAdd(&at.frequency[top_byte(scratch.moves[at.contexts[c].offset + i].flip)], 1);
            }
        }
        __syncthreads();
        if (thread < 256 && at.frequency[thread]) {
            const u32 mine = at.frequency[thread];
            u32 rank = 0;
            for (u32 i = 0; i < 256; ++i) rank += at.frequency[i] > mine || (at.frequency[i] == mine && i < thread);
            at.rank_of[thread] = (u8)rank;
            at.table[rank] = (u8)thread;
            atomicAdd(&at.symbols, 1);
        }
        __syncthreads();
        if (warp == 0) {
            u32 sum = 0, costs[8] = {};
            for (u32 r = lane; r < at.symbols; r += 32) {
                const u32 f = at.frequency[at.table[r]];
                sum += f * r;
#pragma unroll
                for (u32 k = 0; k < 8; ++k) costs[k] += f * rice_bits(r, k);
            }
            sum = warp_sum(sum);
            u32 k = min(7u, bit_length(sum / at.considered)), ks = k;
            u32 best = 0;
#pragma unroll
            for (i32 i = 7; i >= 0; --i) {
                const u32 cost = warp_sum(costs[i]);
                if ((u32)i == k) best = cost;
                else if ((u32)i + 1 == ks && (u32)i < k && cost < best) ks = i, best = cost;
            }
            if (lane == 0) at.ks = ks;
        }
        make_tasks(1u << SYMBOLS_OF, true);
        choose_parameters(1u << SYMBOLS_OF);
        if (warp == 0) {
            ContextPlan& p = at.contexts[lane % CONTEXTS];
            u32 saved = 0;
            if (lane < contexts && p.candidate) {
                p.symbols_bits = at.sequences[SYMBOLS_OF][lane].bits + p.n * (u32)(WIDTH - 8);
                if (p.symbols_bits < p.value_bits) saved = p.value_bits - p.symbols_bits;
            }
            const bool table = warp_sum(saved) > 11 + 8 * at.symbols;
            if (lane == 0) at.has_table = table;
            if (table && saved) {
                p.mode = SYMBOLS;
                p.value_bits = p.symbols_bits;
            }
        }
        __syncthreads();
    }

    // Computes the offsets of all streams in the body, and its size.
    __device__ void lay_out_streams(u32 elements) {
        if (warp == 0) {
            ContextPlan& p = at.contexts[lane % CONTEXTS];
            u32 head = 0, positions = 0, signs = 0, codes = 0, rest = 0;
            if (lane < contexts) head = count_bits(p.n);
            if (lane < contexts && p.n) {
                head += 8 + (p.inverted ? count_bits(p.elements - p.n) : 0) + (p.mode == RUNS ? count_bits(p.larger) + 11 : p.mode == DIRECT ? 6 : 0);
                positions = at.sequences[p.inverted ? INVERTED_GAPS : GAPS][lane].bits;
                signs = p.mode == SYMBOLS ? 0 : p.n;
                codes = p.mode == RUNS ? at.sequences[LARGER_GAPS][lane].bits : 0;
                if (p.mode == RUNS) rest = at.sequences[LARGER_MAGNITUDES][lane].bits;
                if (p.mode == DIRECT) rest = at.sequences[MAGNITUDES][lane].bits;
                if (p.mode == SYMBOLS) rest = p.symbols_bits;
            }
            const u32 heads = 12 + (at.has_table ? 11 + 8 * at.symbols : 0) + warp_sum(head), size = positions + signs + codes + rest;
            const u32 upto = heads + inclusive_scan(size, lane);
            if (lane < contexts) {
                p.positions_at = upto - size;
                p.signs_at = p.positions_at + positions;
                p.codes_at = p.signs_at + signs;
                p.larger_at = p.codes_at + codes;
            }
            if (lane == 31) {
                const u32 bytes = (upto + 7) / 8, raw = (u32)bytes_of(elements);
                at.mode = bytes < raw ? CODED : RAW;
                at.bytes = min(bytes, raw);
            }
        }
        __syncthreads();
    }

    __device__ void write_header(u32* out) const {
        BitCursor to{out, 0};
        to.put(s.top, 11);
        to.put(at.has_table, 1);
        if (at.has_table) {
            to.put(at.symbols - 1, 8);
            to.put(at.ks, 3);
            for (u32 i = 0; i < at.symbols; ++i) to.put(at.table[i], 8);
        }
        for (u32 c = 0; c < contexts; ++c) {
            const ContextPlan& p = at.contexts[c];
            to.put_count(p.n);
            if (!p.n) continue;
            to.put(p.inverted, 1);
            if (p.inverted) to.put_count(p.elements - p.n);
            to.put(at.sequences[p.inverted ? INVERTED_GAPS : GAPS][c].chosen, 5);
            to.put(p.mode, 2);
            if (p.mode == RUNS) {
                to.put_count(p.larger);
                to.put(at.sequences[LARGER_GAPS][c].chosen, 5);
            }
            if (p.mode == RUNS) to.put(at.sequences[LARGER_MAGNITUDES][c].chosen, 6);
            if (p.mode == DIRECT) to.put(at.sequences[MAGNITUDES][c].chosen, 6);
        }
    }

    // Codes go to the warp's own memory first: in the body, many lanes would wait for the same words.
    __device__ void write_streams(u32* out) const {
        u32* const staged = at.staged[warp];
        for (u32 task = warp; task < at.ntasks; task += PLAN_WARPS) {
            const u32 c = at.tasks[task] & 15, kind = at.tasks[task] >> 4 & 15, segment = at.tasks[task] >> 8, first = segment * SEGMENT;
            const Sequence& q = at.sequences[kind][c];
            const ContextPlan& p = at.contexts[c];
            const bool wanted = kind == GAPS                ? !p.inverted
                                : kind == INVERTED_GAPS     ? p.inverted != 0
                                : kind == LARGER_GAPS       ? p.mode == RUNS
                                : kind == MAGNITUDES        ? p.mode == DIRECT
                                : kind == LARGER_MAGNITUDES ? p.mode == RUNS
                                                            : p.mode == SYMBOLS;
            const u32 end = min(first + SEGMENT, q.size), k = q.chosen;
            // The task of the gaps also writes the signs, because there is one such task for every 1024 changes.
            if (kind == GAPS && p.mode != SYMBOLS && first + 32 * lane < end)
                put_bits(out, p.signs_at + first + 32 * lane, at.signs[p.first_move_task + segment][lane], min(32u, end - first - 32 * lane));
            if (!wanted) continue;
            u32 to = kind <= INVERTED_GAPS ? p.positions_at : kind == LARGER_MAGNITUDES ? p.larger_at : p.codes_at;
            const u32 extra = WIDTH > 8 && kind == SYMBOLS_OF ? WIDTH - 8 : 0;
            to += warp_sum(lane < segment ? at.task_costs[task - segment + lane][q.k - k] + extra * SEGMENT : 0);
            for (u32 i0 = first; i0 < end; i0 += 32 * AHEAD) {
                V v[AHEAD];
                u32 begin[AHEAD], total = 0;
                values(kind, c, i0, end, v);
#pragma unroll
                for (u32 j = 0; j < AHEAD; ++j) {
                    const u32 length = i0 + 32 * j + lane < end ? rice_bits(v[j], k) + extra : 0, upto = inclusive_scan(length, lane);
                    begin[j] = total + upto - length;
                    total += __shfl_sync(ALL, upto, 31);
                }
                const u32 skew = to & 31, words = (skew + total + 31) / 32;
                u32* const body = out + (to >> 5);
                const auto put = [&](u32* target) {
#pragma unroll
                    for (u32 j = 0; j < AHEAD; ++j) {
                        const u32 i = i0 + 32 * j + lane;
                        if (i >= end) continue;
                        put_rice(target, skew + begin[j], k, v[j]);
                        if (WIDTH > 8 && kind == SYMBOLS_OF) {
                            constexpr u64 low = WIDTH > 8 ? (1ull << (WIDTH - 8)) - 1 : 0;
                            put_bits(target, skew + begin[j] + rice_bits(v[j], k), (u64)scratch.moves[p.offset + i].flip & low, extra);
                        }
                    }
                };
                if (words <= STAGED_WORDS) {
                    put(staged);
                    __syncwarp();
                    for (u32 w = lane; w < words; w += 32) {
                        const u32 x = staged[w];
                        staged[w] = 0;
                        if (w && w + 1 < words) body[w] = x;
                        else if (x) atomicOr(body + w, x);  // other warps write to these words, too
                    }
                    __syncwarp();
                } else {
                    put(body);
                }
                to += total;
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) encode_chunks(
    Slab slab, const Run* blocks, Chunk* chunks, const u32* work, const u32* nwork, u32* taken, const u16* elements, Changes changes,
    PlanScratch* scratches, Bodies bodies) {
    extern __shared__ __align__(16) u8 shared[];
    PlanSpace& at = *(PlanSpace*)shared;
    if (*changes.cursor > changes.capacity) return;
    for (u32 i = threadIdx.x; i < PLAN_WARPS * STAGED_WORDS; i += PLAN_THREADS) at.staged[i / STAGED_WORDS][i % STAGED_WORDS] = 0;
    for (;;) {
        __syncthreads();
        if (threadIdx.x == 0) at.chunk = atomicAdd(taken, 1);
        __syncthreads();
        if (at.chunk >= *nwork) return;
        const u32 first_tile = work[at.chunk];
        Chunk& chunk = chunks[first_tile];
        const u32 tiles = chunk.tiles;
        Planner p{at,
                  scratches[blockIdx.x],
                  blocks[chunk.block].coding,
                  threadIdx.x,
                  threadIdx.x % 32,
                  threadIdx.x / 32,
                  blocks[chunk.block].coding.mask ? CONTEXTS : 1,
                  blocks[chunk.block].coding.mask != 0};
        p.sum_tiles(first_tile, tiles, elements, changes.counts);
        const u32 total = at.contexts[CONTEXTS - 1].offset + at.contexts[CONTEXTS - 1].n;
        if (!total) {
            if (threadIdx.x == 0) chunk.mode = SAME, chunk.bytes = 0, chunk.body = 0;
            continue;
        }
        p.sort_changes(first_tile, tiles, changes);
        p.list_larger();
        p.list_unchanged();
        constexpr u32 plain = 1u << GAPS | 1u << INVERTED_GAPS | 1u << LARGER_GAPS | 1u << MAGNITUDES | 1u << LARGER_MAGNITUDES;
        p.make_tasks(plain);
        p.choose_parameters(plain);
        p.choose_modes();
        p.choose_symbols();
        const u32 first = slab.first_tile + first_tile;
        p.lay_out_streams(elements_from(slab.tensors, slab.ntensors, first, first + tiles - 1));
        if (threadIdx.x == 0) {
            at.body = ~0ull;
            if (at.mode == CODED) {
                const u64 words = (at.bytes + 15) / 16 * 4, to = atomicAdd(bodies.cursor, words);
                if (to + words <= bodies.capacity) at.body = to;
            }
            chunk.mode = at.mode, chunk.bytes = at.bytes, chunk.body = at.body;
        }
        __syncthreads();
        if (at.body == ~0ull) continue;
        u32* const out = bodies.words + at.body;
        if (p.warp == PLAN_WARPS - 1 && p.lane == 0) p.write_header(out);
        p.write_streams(out);
    }
}

extern "C" __device__ const u32 encode_sizes[] = {4096 + SCAN_WARPS * sizeof(ScanSpace<true>), sizeof(PlanSpace), sizeof(PlanScratch),
                                                   4096 + SCAN_WARPS * sizeof(MasterSpace), USED};
