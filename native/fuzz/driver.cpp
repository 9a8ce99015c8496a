// Runs the fuzz target without libFuzzer, which GCC does not have. The same seed gives the same inputs on every machine.
//
//     fuzz_resolve|fuzz_routing [-runs=N] [-seed=N] [-cases=FILE] [-artifact_prefix=PATH] [file …]
//
// Inputs are random, or mutations of earlier ones. An input is kept for mutation if it reaches new code, or repeats code more often than
// all inputs before it. Files after the options are such earlier inputs; with -runs=0 only they are executed. Other options of libFuzzer
// are ignored.
//
// -cases writes the results of small inputs, for a comparison with the reference codec. fuzz_routing.cpp says what its cases are. A case of
// fuzz_resolve is, little-endian: six 64-bit integers
// (type code; 1 for a payload of versions 1 and 2; tensors; bytes of payload; error: 0 none, 1 Corrupt, 2 WrongType, 3 WrongCount; changed
// elements), four 32-bit lanes of the digest before and after, the payload, and for each tensor five 64-bit integers (elements, 1 if there
// is a base, digest seed, changed coded elements, changed elements) and the base's elements; then the positions of all changed elements
// within their tensors (64 bits each), and then their values.
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" void __sanitizer_set_death_callback(void (*callback)());
extern std::FILE* fuzz_cases;
extern bool fuzz_counts;  // false while several threads run: what each of them passes differs from run to run

namespace {

constexpr size_t kMaxInput = 4096, kHeader = 12, kPool = 4000;
constexpr unsigned kStuckSeconds = 300;  // far more than any execution takes, even on a busy machine

using Input = std::vector<uint8_t>;

// How often each edge of the code was passed in this execution; and which counts, in powers of two, were seen in any execution.
uint8_t passed[1 << 16];
uint8_t seen[1 << 16];

thread_local bool is_main = false;  // threads that come late run on after the call that started them

Input current;
uint64_t execution = 0, seed = 1;
std::string artifacts = "./";

// Saves the input. A sanitizer, or this file, calls it before the process ends.
void save_current() {
    const std::string path = artifacts + "crash-" + std::to_string(seed) + "-" + std::to_string(execution);
    std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(current.data()), std::streamsize(current.size()));
    std::fprintf(stderr, "fuzz: the input of execution %llu of seed %llu is in %s\n", (unsigned long long)execution, (unsigned long long)seed, path.c_str());
}

void on_signal(int number) {
    std::fprintf(stderr, "fuzz: %s\n", number == SIGALRM ? "an execution does not end" : "aborted");
    save_current();
    _exit(77);
}

class Random {
public:
    explicit Random(uint64_t state) : state_(state) {}
    uint64_t operator()() {
        uint64_t z = state_ += 0x9E3779B97F4A7C15;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
        z = (z ^ z >> 27) * 0x94D049BB133111EB;
        return z ^ z >> 31;
    }
    size_t below(size_t n) { return n ? size_t((*this)() % n) : 0; }
    // Usually few, sometimes many.
    size_t few(size_t most) { return below(1 + below(most)); }

private:
    uint64_t state_;
};

bool reaches_more() {
    bool more = false;
    for (size_t i = 0; i < sizeof(passed); ++i) {
        if (!passed[i]) continue;
        const uint8_t bucket = uint8_t(1u << std::min(7, 31 - __builtin_clz(passed[i])));
        more |= !(seen[i] & bucket);
        seen[i] |= bucket;
    }
    return more;
}

Input draw(Random& random) {
    Input made(kHeader + random.few(random.below(8) ? 256 : 2048));
    const unsigned kind = unsigned(random.below(4));
    for (auto& byte : made) byte = uint8_t(kind == 0 ? random() : kind == 1 ? random() & random() : kind == 2 ? random() | random() : random.below(4));
    for (size_t i = 0; i < kHeader; ++i) made[i] = uint8_t(random());  // so that every type, layout and source of payloads occurs
    return made;
}

void mutate(Input& input, const std::vector<Input>& pool, Random& random) {
    static constexpr uint8_t edges[] = {0, 1, 2, 7, 8, 15, 16, 31, 63, 64, 127, 128, 254, 255};
    for (size_t left = 1 + random.few(8); left; --left) {
        if (input.empty()) input.push_back(uint8_t(random()));
        // The first bytes determine the kind of input, so half of all mutations go there.
        const size_t at = random.below(random.below(2) ? input.size() : std::min(input.size(), kHeader));
        switch (random.below(8)) {
            case 0: input[at] ^= uint8_t(1u << random.below(8)); break;
            case 1: input[at] = uint8_t(random()); break;
            case 2: input[at] = edges[random.below(sizeof(edges))]; break;
            case 3: input[at] = uint8_t(input[at] + random.below(9) - 4); break;
            case 4: input.insert(input.begin() + ptrdiff_t(at), 1 + random.few(32), uint8_t(random())); break;
            case 5: input.erase(input.begin() + ptrdiff_t(at), input.begin() + ptrdiff_t(std::min(input.size(), at + 1 + random.few(32)))); break;
            case 6: {  // copy a range of its own bytes to another position
                const size_t from = random.below(input.size()), count = std::min({random.few(64), input.size() - from, input.size() - at});
                std::memmove(input.data() + at, input.data() + from, count);
                break;
            }
            default: {  // continue with the rest of another input
                const Input& other = pool[random.below(pool.size())];
                if (other.size() > at) input.resize(at), input.insert(input.end(), other.begin() + ptrdiff_t(at), other.end());
            }
        }
    }
    if (input.size() > kMaxInput) input.resize(kMaxInput);
}

void execute(std::vector<Input>& pool) {
    std::memset(passed, 0, sizeof(passed));
    if (execution % 256 == 0) alarm(kStuckSeconds);
    LLVMFuzzerTestOneInput(current.data(), current.size());
    if (reaches_more() && pool.size() < kPool) pool.push_back(current);
}

const char* value_of(const char* argument, const char* option) {
    const size_t length = std::strlen(option);
    return std::strncmp(argument, option, length) == 0 ? argument + length : nullptr;
}

}  // namespace

// The compiler inserts calls of this into all files except this one.
extern "C" void __sanitizer_cov_trace_pc() {
    if (!fuzz_counts || !is_main) return;
    const uintptr_t edge = uintptr_t(__builtin_return_address(0)) - uintptr_t(&LLVMFuzzerTestOneInput);  // independent of the load address
    uint8_t& count = passed[(edge ^ edge >> 16) & 0xffff];
    if (count != 255) ++count;
}

// The runtimes are shared libraries, which must find these symbols.
extern "C" __attribute__((visibility("default"))) const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }

int main(int argc, char** argv) {
    is_main = true;
    uint64_t runs = 100000;
    std::vector<Input> pool;
    for (int i = 1; i < argc; ++i) {
        if (const char* runs_given = value_of(argv[i], "-runs=")) runs = std::strtoull(runs_given, nullptr, 10);
        else if (const char* seed_given = value_of(argv[i], "-seed=")) seed = std::strtoull(seed_given, nullptr, 10);
        else if (const char* prefix = value_of(argv[i], "-artifact_prefix=")) artifacts = prefix;
        else if (const char* cases = value_of(argv[i], "-cases=")) {
            if (!(fuzz_cases = std::fopen(cases, "wb"))) return std::perror(cases), 2;
        } else if (argv[i][0] != '-') {
            std::ifstream file(argv[i], std::ios::binary);
            if (!file) return std::perror(argv[i]), 2;
            pool.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
        }
    }
    __sanitizer_set_death_callback(save_current);
    signal(SIGABRT, on_signal);
    signal(SIGALRM, on_signal);
    const std::vector<Input> given = pool;
    if (pool.empty()) pool.emplace_back();
    for (const Input& input : given) current = input, execute(pool);
    for (execution = 1; execution <= runs; ++execution) {
        Random random(seed << 32 ^ execution);
        if (random.below(8) == 0) current = draw(random);
        else current = pool[random.below(2) ? random.below(pool.size()) : pool.size() - 1 - random.few(std::min<size_t>(pool.size(), 64))], mutate(current, pool, random);
        execute(pool);
    }
    if (fuzz_cases) std::fclose(fuzz_cases);
    rusage used{};
    getrusage(RUSAGE_SELF, &used);
    std::printf("fuzz: %llu executions of seed %llu, no finding; %zu inputs that reach new code; %.1f s of processor time\n", (unsigned long long)(runs + given.size()),
                (unsigned long long)seed, pool.size(), double(used.ru_utime.tv_sec) + double(used.ru_utime.tv_usec) * 1e-6);
}
