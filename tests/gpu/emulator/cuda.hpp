// The parts of CUDA that the kernels of `deltawire.codec.gpu` need, for tests on a CPU. It is slow, but strict:
// - The threads of a block are fibers, which switch only at barriers and at operations of warps. The order is random each time, so a missing
//   barrier changes the results.
// - If lanes wait for others that never arrive, or wait at different operations, the process ends with a message that says where they wait.
// - Asynchronous copies arrive when a thread waits for them, not before. Shared memory initially contains noise.
// Blocks run one after the other.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#define EMULATED
#define EXPORTED extern "C" __attribute__((visibility("default")))
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) {
    using C = std::common_type_t<A, B>;
    return (C)a < (C)b ? (C)a : (C)b;
}
template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) {
    using C = std::common_type_t<A, B>;
    return (C)a < (C)b ? (C)b : (C)a;
}

namespace emulated {

struct Copy {
    unsigned char* to;
    const unsigned char* from;
    unsigned size;
};

// Where a fiber or the scheduler continues. The functions of the compiler are faster than those of the C library.
using Place = void* [5];

struct Fiber {
    unsigned x;
    bool done, started;
    Place state;
    unsigned generation, block_generation;  // number of meetings of its warp and of its block that it has reached
    std::vector<Copy> copies;               // in the order in which they started; groups end at `groups`
    std::vector<size_t> groups;
};

// A point where fibers wait for each other. It keeps the slots of two meetings, because no fiber is more than one meeting ahead.
struct Meeting {
    unsigned alive;
    unsigned generation[2], arrived[2];
    const char* what[2];
    uint64_t values[2][32];
};

struct Dimension { unsigned x; };

inline std::vector<Fiber> fibers;
inline std::vector<Meeting> warps;
inline Meeting block;
inline Fiber* current;
inline Place scheduler;
inline Dimension block_index, grid, size;
inline std::vector<unsigned char> shared_memory;
inline std::unique_ptr<unsigned char[]> stacks;  // never cleared, and never made smaller
inline size_t stack_count;
inline uint64_t random_state = 1;
inline uint64_t steps;  // fibers that have reached a meeting or the end
inline void (*body)(void**);
inline void** arguments;
constexpr size_t STACK = (256 << 10) + 1088;  // not a power of two, so that the stacks do not share the same lines of the caches

inline uint32_t draw() {
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 32);
}

[[noreturn]] inline void fail(const char* text) {
    fprintf(stderr, "emulated GPU: %s (block %u)\n", text, block_index.x);
    for (auto& warp : warps) fprintf(stderr, "  a warp last met at %s\n", warp.what[0] ? warp.what[0] : "nothing");
    abort();
}

[[noreturn]] __attribute__((noinline)) inline void go_to(Place& place) { __builtin_longjmp(place, 1); }

__attribute__((noinline)) inline void yield() {
    if (!__builtin_setjmp(current->state)) go_to(scheduler);
}

inline void run_fiber() {
    body(arguments);
    current->done = true;
    ++steps;
    --block.alive, --warps[current->x / 32].alive;
    go_to(scheduler);
}

// Waits until all running fibers have reached the meeting. Returns the slot, one of two, that the meeting uses.
inline unsigned meet(Meeting& at, unsigned& generation, unsigned slot, uint64_t value, const char* what) {
    const unsigned which = ++generation & 1;
    if (at.generation[which] != generation) at.generation[which] = generation, at.arrived[which] = 0, at.what[which] = what;
    if (at.what[which] != what && strcmp(at.what[which], what)) {
        fprintf(stderr, "emulated GPU: %s meets %s\n", what, at.what[which]);
        fail("threads have parted ways");
    }
    at.values[which][slot] = value;
    ++steps;
    ++at.arrived[which];
    while (at.arrived[which] < at.alive) yield();
    return which;
}

// Returns the values of all lanes of the warp, as an array of 32.
inline const uint64_t* exchange(uint64_t value, const char* what) {
    Meeting& at = warps[current->x / 32];
    return at.values[meet(at, current->generation, current->x % 32, value, what)];
}

inline bool any_of_block(bool mine, const char* what) {
    const unsigned which = (current->block_generation + 1) & 1;
    // Slot 1 combines the values of all lanes. The first lane to arrive clears it.
    if (block.generation[which] != current->block_generation + 1) block.values[which][1] = 0;
    block.values[which][1] |= mine;
    meet(block, current->block_generation, 0, 0, what);
    return block.values[which][1];
}

template <class T>
inline uint64_t pack(T x) {
    uint64_t out = 0;
    memcpy(&out, &x, sizeof x);
    return out;
}
template <class T>
inline T unpack(uint64_t x) {
    T out;
    memcpy(&out, &x, sizeof out);
    return out;
}

template <class... A, size_t... I>
inline void call(void (*kernel)(A...), void** values, std::index_sequence<I...>) {
    kernel(*(std::remove_const_t<A>*)values[I]...);
}
template <class... A>
inline void call(void (*kernel)(A...), void** values) {
    call(kernel, values, std::index_sequence_for<A...>());
}

__attribute__((noinline)) inline void run_until_yield(unsigned i) {
    if (__builtin_setjmp(scheduler)) return;
    if (current->started) go_to(current->state);
    current->started = true;
    static ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = stacks.get() + i * STACK;
    start.uc_stack.ss_size = STACK;
    makecontext(&start, run_fiber, 0);
    setcontext(&start);
}

inline void launch(void (*kernel)(void**), unsigned blocks, unsigned threads, unsigned shared, void** values, uint64_t seed) {
    random_state = seed * 0x9E3779B97F4A7C15ull | 1;
    body = kernel, arguments = values;
    grid.x = blocks, size.x = threads;
    if (stack_count < threads) stacks.reset(new unsigned char[threads * STACK]), stack_count = threads;
    for (block_index.x = 0; block_index.x < blocks; ++block_index.x) {
        shared_memory.assign(shared + 16, 0);
        for (auto& byte : shared_memory) byte = (unsigned char)draw();
        fibers.assign(threads, {});
        warps.assign((threads + 31) / 32, {});
        block = {};
        block.alive = threads;
        for (unsigned i = 0; i < threads; ++i) ++warps[i / 32].alive;
        std::vector<unsigned> order(threads);
        for (unsigned i = 0; i < threads; ++i) order[i] = fibers[i].x = i;
        for (unsigned idle = 0; block.alive;) {
            for (unsigned i = threads; i > 1; --i) std::swap(order[i - 1], order[(uint64_t)draw() * i >> 32]);
            const uint64_t before = steps;
            for (unsigned i : order) {
                if (fibers[i].done) continue;
                current = &fibers[i];
                run_until_yield(i);
            }
            idle = before == steps ? idle + 1 : 0;
            if (idle > 3) fail("threads wait for others that never come");
        }
    }
}

}  // namespace emulated

#define threadIdx (emulated::Dimension{emulated::current->x})
#define blockIdx emulated::block_index
#define blockDim emulated::size
#define gridDim emulated::grid

inline void __syncthreads() { emulated::any_of_block(false, "__syncthreads"); }
inline int __syncthreads_or(int x) { return emulated::any_of_block(x != 0, "__syncthreads_or"); }
inline void __syncwarp() { emulated::exchange(0, "__syncwarp"); }

template <class T>
inline T __shfl_sync(unsigned, T x, unsigned lane) { return emulated::unpack<T>(emulated::exchange(emulated::pack(x), "__shfl_sync")[lane & 31]); }
template <class T>
inline T __shfl_up_sync(unsigned, T x, unsigned d) {
    const unsigned lane = emulated::current->x % 32;
    return emulated::unpack<T>(emulated::exchange(emulated::pack(x), "__shfl_up_sync")[lane >= d ? lane - d : lane]);
}
template <class T>
inline T __shfl_down_sync(unsigned, T x, unsigned d) {
    const unsigned lane = emulated::current->x % 32;
    return emulated::unpack<T>(emulated::exchange(emulated::pack(x), "__shfl_down_sync")[lane + d < 32 ? lane + d : lane]);
}
template <class T>
inline T __shfl_xor_sync(unsigned, T x, unsigned d) {
    return emulated::unpack<T>(emulated::exchange(emulated::pack(x), "__shfl_xor_sync")[emulated::current->x % 32 ^ d]);
}
inline unsigned __ballot_sync(unsigned, bool x) {
    const uint64_t* all = emulated::exchange(x, "__ballot_sync");
    unsigned out = 0;
    for (unsigned i = 0; i < 32; ++i) out |= (unsigned)all[i] << i;
    return out;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline unsigned __reduce_add_sync(unsigned, unsigned x) {
    const uint64_t* all = emulated::exchange(x, "__reduce_add_sync");
    unsigned out = 0;
    for (unsigned i = 0; i < 32; ++i) out += (unsigned)all[i];
    return out;
}
inline unsigned __match_any_sync(unsigned, unsigned x) {
    const uint64_t* all = emulated::exchange(x, "__match_any_sync");
    unsigned out = 0;
    for (unsigned i = 0; i < 32; ++i) out |= (unsigned)(all[i] == x) << i;
    return out;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(unsigned long long x) { return x ? __builtin_clzll(x) : 64; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) { return (unsigned)(((uint64_t)high << 32 | low) >> (by & 31)); }
template <class T>
inline T __ldg(const T* from) { return *from; }
inline unsigned __vminu2(unsigned a, unsigned b) { return min(a & 0xffff, b & 0xffff) | min(a >> 16, b >> 16) << 16; }
inline unsigned __viaddmin_s16x2_relu(unsigned a, unsigned b, unsigned c) {
    unsigned out = 0;
    for (unsigned h = 0; h < 32; h += 16) {
        const short sum = (short)(unsigned short)((a >> h) + (b >> h));
        out |= (unsigned)(unsigned short)max((int)min(sum, (short)(c >> h)), 0) << h;
    }
    return out;
}

template <class T, class V>
inline T atomicAdd(T* at, V x) { return std::exchange(*at, (T)(*at + (T)x)); }
template <class T, class V>
inline T atomicOr(T* at, V x) { return std::exchange(*at, (T)(*at | (T)x)); }
template <class T, class V>
inline T atomicXor(T* at, V x) { return std::exchange(*at, (T)(*at ^ (T)x)); }
template <class T, class V>
inline T atomicMax(T* at, V x) { return std::exchange(*at, max(*at, (T)x)); }
template <class T, class V>
inline T atomicMin(T* at, V x) { return std::exchange(*at, min(*at, (T)x)); }
template <class T, class V>
inline T atomicExch(T* at, V x) { return std::exchange(*at, (T)x); }

inline int dot_low(unsigned words, unsigned factors, int sum) {
    return (int)((unsigned)sum + (unsigned)((short)words * (int)(factors & 0xff)) + (unsigned)((short)(words >> 16) * (int)(factors >> 8 & 0xff)));
}
inline int dot_high(unsigned words, unsigned factors, int sum) {
    return (int)((unsigned)sum + (unsigned)((short)words * (int)(signed char)(factors >> 16)) + (unsigned)((short)(words >> 16) * (int)(signed char)(factors >> 24)));
}

inline void fetch_16(unsigned char* to, const unsigned char* from, unsigned size) { emulated::current->copies.push_back({to, from, size}); }
inline void fetch_16(unsigned char* to, const unsigned char* from) { fetch_16(to, from, 16); }
inline void fetch_commit() { emulated::current->groups.push_back(emulated::current->copies.size()); }
template <unsigned LEFT>
inline void fetch_wait() {
    auto& fiber = *emulated::current;
    if (fiber.groups.size() <= LEFT) return;
    const size_t done = fiber.groups[fiber.groups.size() - 1 - LEFT];
    for (size_t i = 0; i < done; ++i) {
        const emulated::Copy& copy = fiber.copies[i];
        memset(copy.to, 0, 16);
        memcpy(copy.to, copy.from, copy.size);
    }
    fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + done);
    fiber.groups.erase(fiber.groups.begin(), fiber.groups.end() - LEFT);
    for (auto& end : fiber.groups) end -= done;
}
