// Reads payloads up to their streams: where the chunks are, and the headers of coded chunks. From here on ranges are chunks, and `ElementRange::next` is the
// offset of a chunk's body in the image, in which all payloads follow each other. A chunk that breaks a rule gets an error, and nothing is located in it. Only
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
    SHORT_HEADER,
    SHORT_BODY,
    BAD_COUNT,
    BAD_SIZE,
    LONG_BODY,
    NOT_TILES,
    WRONG_TYPE,
    WRONG_SHAPE,
};

constexpr u32 LONGEST_BODY = 1 << 21;  // of a coded chunk; 2¹⁵ changes with the longest codes take less

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
    u32 streams_at;  // offset in bits
    u16 symbols;
    u8 ks, unused;
    ContextHead contexts[CONTEXTS];
};

// A tensor that has a payload.
struct Source {
    const T* base;
    const u8* payload;  // in host memory
    u64 bytes, offset, count, seed;  // `offset` is that of the payload in the image
    u32 tensor, tile0, shift, mask, code, unused;
};

struct Walk {
    u64 covered;        // number of elements
    u32 chunks, error;
};

__device__ __forceinline__ u32 word_at(const u8* from) { return from[0] | from[1] << 8 | from[2] << 16 | (u32)from[3] << 24; }

// Calls `use(elements before, elements, mode, offset of the body, its length)` for every chunk (docs/format.md §3).
template <class Use>
__device__ Walk walk(const Source& s, Use use) {
    Walk w = {0, 0, FINE};
    const auto wrong = [&](u32 error) {
        w.error = error;
        return w;
    };
    if (s.payload[0] != s.code) return wrong(WRONG_TYPE);
    for (u64 at = 1; at < s.bytes; ++w.chunks) {
        if (s.bytes - at < 8) return wrong(SHORT_HEADER);
        const u32 word = word_at(s.payload + at), length = word_at(s.payload + at + 4), elements = word & 0x3fffffff, mode = word >> 30;
        at += 8;
        if (length > s.bytes - at) return wrong(SHORT_BODY);
        if (!elements || elements > BLOCK) return wrong(BAD_COUNT);
        if (mode == SAME ? length != 0 : mode == CODED ? !length : mode != RAW || length != (u64)elements * BYTES) return wrong(BAD_SIZE);
        if (mode == CODED && length > LONGEST_BODY) return wrong(LONG_BODY);
        if (w.covered % TILE) return wrong(NOT_TILES);
        use(w.covered, elements, mode, at, length);
        w.covered += elements;
        at += length;
    }
    return w.covered == s.count ? w : wrong(WRONG_SHAPE);
}

// The facts of a tile, one after the other in the same memory: the chunk that starts with it, if there is one; then its number of elements by context, or
// its number of changes in a raw chunk; then, after its changes are located, their number in each block of 256 elements.
union Tile {
    struct {
        u64 body;        // its offset in the payload
        u32 chunk_elements, mode, length, top;
    };
    u16 elements[CONTEXTS];
    struct {
        u8 counts[64];   // changes in each block of 256 elements
        u32 full[2];     // the blocks that have 256 changes; their count is stored as 0
    };
};

// Counts and checks the chunks of payloads, and notes where they are. There is one thread per payload.
extern "C" __global__ void __launch_bounds__(32) find_chunks(const Source* sources, u32 n, Tile* tiles, Walk* out) {
    const u32 i = blockIdx.x * 32 + threadIdx.x;
    if (i >= n) return;
    const Source s = sources[i];
    out[i] = walk(s, [&](u64 first, u32 elements, u32 mode, u64 body, u32 length) {
        if (first >= s.count) return;  // there are no such tiles; an error is reported later
        Tile& tile = tiles[s.tile0 + first / TILE];
        tile.body = body, tile.chunk_elements = elements, tile.mode = mode, tile.length = length;
        tile.top = mode == CODED && length > 1 ? (s.payload[body] | s.payload[body + 1] << 8) & 0x7ff : 0;
    });
}

// Lists the chunks that `find_chunks` found. `numbers` are the numbers of each payload's first chunk. `heads` are zeros.
extern "C" __global__ void __launch_bounds__(32) list_chunks(
    const Source* sources, u32 n, const u32* numbers, const Tile* tiles, ElementRange* ranges, Head* heads) {
    const u32 i = blockIdx.x * 32 + threadIdx.x;
    if (i >= n) return;
    const Source s = sources[i];
    u32 chunk = numbers[i];
    for (u64 first = 0; first < s.count; ++chunk) {
        const u32 number = s.tile0 + (u32)(first / TILE);
        const Tile& tile = tiles[number];
        heads[chunk].bytes = tile.length;
        ranges[chunk] = {s.base ? s.base + first : nullptr, (const T*)(s.offset + tile.body), s.seed, first, tile.chunk_elements, number, s.tensor, tile.top,
                        s.shift, s.mask, 0, tile.mode};
        first += tile.chunk_elements;
    }
}

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

__device__ u32 read_head(FieldReader in, const ElementRange& s, Head& h) {
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
    if (total > s.count) return BAD_POSITION;
    h.total = total;
    h.streams_at = in.at;
    return FINE;
}

// Reads the headers of chunks. There is one thread per range.
extern "C" __global__ void __launch_bounds__(64) read_heads(const ElementRange* ranges, u32 nranges, const u8* image, Head* heads) {
    const u32 i = blockIdx.x * 64 + threadIdx.x;
    if (i >= nranges || ranges[i].mode != CODED) return;
    Head h = {};
    h.bytes = heads[i].bytes;
    FieldReader in{image + (u64)ranges[i].next, h.bytes, 0, false};
    h.error = read_head(in, ranges[i], h);
    if (h.error) h.total = h.tasks = 0;
    heads[i] = h;
}
