#include <algorithm>

#include "codec.hpp"
#include "parallel.hpp"
#include "piece.hpp"

namespace deltawire {

std::vector<Lanes> digest(std::span<const DigestJob> jobs, unsigned threads, const Kernels& kernels) {
    constexpr uint64_t kUnitBytes = uint64_t(1) << 23;  // what one thread processes at a time
    struct Unit {
        size_t first, end;      // tensors
        uint64_t from, to;      // bytes, if it is a part of one tensor
        Lanes lanes{};
    };
    std::vector<Lanes> out(jobs.size());
    std::vector<Unit> units;
    uint64_t held = kUnitBytes;  // bytes of the last unit
    for (size_t j = 0; j < jobs.size(); ++j) {
        const uint64_t bytes = jobs[j].view.count * jobs[j].view.bytes;
        if (!units.empty() && bytes + held <= kUnitBytes) {  // small tensors share a unit
            units.back().end = j + 1;
            held += bytes;
            continue;
        }
        for (uint64_t at = 0; at < bytes; at += kUnitBytes) units.push_back({j, j + 1, at, std::min(bytes, at + kUnitBytes)});
        held = bytes < kUnitBytes && bytes ? bytes : kUnitBytes;
    }
    struct Worker {
        PieceReader piece;
        PieceMultipliers multipliers;
    };
    std::vector<Worker> workers(std::max(1u, threads));
    parallel_for(units.size(), workers, [&](Worker& worker, size_t u) {
        Unit& unit = units[u];
        for (size_t j = unit.first; j < unit.end; ++j) {
            const View& view = jobs[j].view;
            const bool part = j == unit.first;
            Lanes lanes{};
            for (uint64_t at = part ? unit.from : 0, to = part ? unit.to : view.count * view.bytes; at < to; at += kPieceBytes) {
                const uint32_t bytes = uint32_t(std::min<uint64_t>(kPieceBytes, to - at));
                const uint8_t* data = worker.piece.read(view, at, bytes);
                worker.multipliers.fill(kernels, jobs[j].seed, at, bytes);
                kernels.digest(data, bytes, worker.multipliers.of.data(), lanes);
            }
            if (part) unit.lanes = lanes;
            else out[j] = lanes;
        }
    });
    for (const Unit& unit : units) add_lanes(out[unit.first], unit.lanes);
    return out;
}

}  // namespace deltawire
