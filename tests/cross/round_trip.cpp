// Encodes the difference of two files of elements, resolves it, and writes the payload, which is then compared across machines.
// round_trip BASE NEW PAYLOAD CODE BYTES WIDTH EXPONENT_SHIFT EXPONENT_BITS
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "codec.hpp"

using namespace deltawire;

static std::vector<uint8_t> read(const char* path) {
    std::FILE* file = std::fopen(path, "rb");
    if (!file) std::exit(2);
    std::vector<uint8_t> bytes;
    for (int c; (c = std::fgetc(file)) != EOF;) bytes.push_back(uint8_t(c));
    std::fclose(file);
    return bytes;
}

int main(int, char** arguments) {
    auto base = read(arguments[1]);
    auto next = read(arguments[2]);
    const auto number = [&](int i) { return uint8_t(std::atoi(arguments[i])); };
    const ElementType type{number(4), number(5), number(6), number(7), number(8)};
    View old, now;
    old.data = base.data();
    old.bytes = type.bytes;
    old.count = base.size() / type.bytes;
    now = old;
    now.data = next.data();
    const Kernels& kernels = *available_kernels().front();
    const EncodeGroup group{type, {old}, {now}, {1}};
    const auto encoded = encode(std::span(&group, 1), 2, kernels);
    std::vector<uint8_t> payload;
    for (const auto& block : encoded[0].blocks) payload.insert(payload.end(), block.begin(), block.end());

    Resolution resolution(2, size_t(1) << 30, false, kernels);
    const auto found = resolution.add({{type, {old}, {1}, {true}, payload, true, false}});
    resolution.settle();
    if (base != next || found[0].before != encoded[0].before || found[0].after != encoded[0].after) return 1;
    std::FILE* out = std::fopen(arguments[3], "wb");
    std::fwrite(payload.data(), 1, payload.size(), out);
    std::fclose(out);
    std::printf("%s\n", kernels.name);
}
