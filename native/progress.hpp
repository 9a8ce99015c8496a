// Counts the work of the codec, so that other threads can show it.
#pragma once

#include <atomic>
#include <cstdint>

namespace deltawire {

// The bytes of weights that calls of this process have encoded or decoded so far.
inline std::atomic<uint64_t> bytes_done{0};

}  // namespace deltawire
