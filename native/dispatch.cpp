// Finds the kernels that this machine can run.
#include "kernels.hpp"

#if defined(DELTAWIRE_X86)
#include <cpuid.h>
#endif

namespace deltawire {

#if defined(DELTAWIRE_X86)
// clang 14's __builtin_cpu_supports does not know "lzcnt".
static bool has_lzcnt() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(0x80000001, &a, &b, &c, &d) && (c >> 5 & 1);
}
#endif

std::vector<const Kernels*> available_kernels() {
    std::vector<const Kernels*> out;
#if defined(DELTAWIRE_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
        __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("avx512bitalg") &&
        __builtin_cpu_supports("gfni") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt") &&
        has_lzcnt())
        out.push_back(&kAvx512Kernels);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt") &&
        has_lzcnt())
        out.push_back(&kAvx2Kernels);
#endif
    out.push_back(&kScalarKernels);
    return out;
}

}  // namespace deltawire
