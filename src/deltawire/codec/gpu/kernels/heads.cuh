// Reads the headers of coded chunks. The host has found where chunks are. A chunk that breaks a rule gets an error, and nothing is located in it. Only
// `write_patch` and `swap_patch` ever write to a base, and they run only after all checks have passed.

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
    HAS_TABLE,
};

enum Stream { RANKS, INVERTED_RANKS, STEPS, XORS, LARGER };

// The number of codes of a stream that one thread decodes. Fewer codes are done sooner, but each segment needs memory, and there are at most 256 of them.
__device__ __forceinline__ u32 segment_codes(u32 stream) { return stream >= STEPS ? 128 : 256; }
__device__ __forceinline__ u32 segments(u32 codes, u32 stream) { return (codes + segment_codes(stream) - 1) / segment_codes(stream); }

struct ContextHead {
    u32 elements;    // number of elements of this context in the chunk, counted in the base
    u32 signs_at;    // offset in bits, found by `index_streams`
    u16 n, unchanged, larger;
    u16 before;      // number of changes in earlier contexts
    u8 inverted, mode, k, kr, kv, unused[3];
};

// The header of a coded chunk.
struct Head {
    u32 bytes;       // size of the body
    u32 total;       // number of changes; in a raw chunk found by comparison
    u32 error;
    u32 tasks;       // number of segments of its streams
    u32 other_top;   // whether its `top` is not the one that an encoder chooses
    u32 streams_at;  // offset in bits
    u16 symbols;
    u8 ks, unused;
    ContextHead contexts[CONTEXTS];
};

// The cells of a patch: whole elements; or bytes, if two elements share a byte.
constexpr u32 CELLS = WIDTH == 4 ? TILE / 2 : TILE;          // in a tile
constexpr u32 ROW_CELLS = WIDTH == 4 ? RUN / 2 : RUN;        // in the run of a lane
constexpr u32 PATCH_BLOCKS = CELLS / 256, UNIT_BLOCKS = PATCH_BLOCKS / UNITS;  // blocks of 256 cells in a tile, and in a unit

// The facts of a tile, one after the other in the same memory: its number of elements by context; then, after its changes are located, their number in each
// block of 256 cells.
union Tile {
    u16 elements[USED];
    struct {
        u8 counts[PATCH_BLOCKS];
        u32 full[PATCH_BLOCKS / 32];  // the blocks that have 256 changes; their count is stored as 0
    };
};

// Reads single fields anywhere in a body. Beyond its end there are zeros.
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
    // Returns ~0 if the number is out of range.
    __device__ u32 take_count() {
        const u32 length = take(5);
        if (length > 16) return ~0u;
        return length ? 1u << (length - 1) | take(length - 1) : 0;
    }
};

__device__ u32 read_head(FieldReader in, Run& s, Head& h) {
    s.coding.top = in.take(11);
    if (s.coding.top > s.coding.mask) return BAD_TOP;
    h.symbols = 0, h.ks = 0;
    if (in.take(1)) {
        if (WIDTH == 4) return HAS_TABLE;
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
    for (u32 c = 0; c < (s.coding.mask ? CONTEXTS : 1); ++c) {
        ContextHead& p = h.contexts[c];
        const u32 n = in.take_count();
        if (n > MOST - total) return TOO_MANY_CHANGES;
        total += n;
        p.n = (u16)n;
        p.before = (u16)(total - n);
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
            p.kr = (u8)in.take(5);
            if (p.kr > 24) return BAD_RUN_PARAMETER;
        }
        if (p.mode == RUNS || p.mode == DIRECT) {
            p.kv = (u8)in.take(6);
            if (p.kv >= WIDTH) return BAD_VALUE_PARAMETER;
        }
        h.tasks += max(p.inverted ? segments(p.unchanged, INVERTED_RANKS) : segments(p.n, RANKS), 1u);
        if (p.mode != UNIT_MODE) h.tasks += p.mode == RUNS ? segments(p.larger, LARGER) : segments(p.n, STEPS);
    }
    if (in.overrun) return TOO_SHORT;
    if (!total) return NO_CHANGES;
    if (total > s.elements) return BAD_POSITION;
    h.total = total;
    h.streams_at = in.at;
    return FINE;
}

// Reads the headers of chunks, and sets `top` of coded ones. There is one thread per chunk. `blocks` have the tops that an encoder chooses.
extern "C" __global__ void __launch_bounds__(64) read_heads(Run* chunks, u32 nchunks, const Run* blocks, const u8* image, Head* heads) {
    const u32 i = blockIdx.x * 64 + threadIdx.x;
    if (i >= nchunks) return;
    Run s = chunks[i];
    Head h = {};
    h.bytes = s.bytes;
    if (s.mode == CODED) {
        FieldReader in{image + s.body, h.bytes, 0, false};
        h.error = read_head(in, s, h);
        if (h.error) h.total = h.tasks = 0;
        h.other_top = s.block == ALL || s.coding.top != blocks[s.block].coding.top;
        chunks[i].coding.top = s.coding.top;
    }
    heads[i] = h;
}
