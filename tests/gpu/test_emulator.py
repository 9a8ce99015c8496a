"""Test the emulated GPU itself."""

from __future__ import annotations

import pytest
from emulator.build import compiler

torch = pytest.importorskip("torch", reason="the emulated GPU works on torch tensors")
if compiler() is None:
    pytest.skip("needs a C++ compiler to emulate a GPU", allow_module_level=True)

from emulator.gpu import EmulatedGpu  # noqa: E402

SOURCE = """
using u32 = unsigned;
using u64 = unsigned long long;
template <class T>
__device__ T* room() {
    __shared__ T all[SIZE];
    return all;
}
extern "C" __global__ void where(u64* out) {
    if (threadIdx.x == 0) out[0] = (u64)room<u32>(), out[1] = sizeof(u32) * SIZE;
}
"""


def test_kernels_of_two_libraries_have_their_own_shared_memory():
    """Shared memory has the same name in both libraries, but another size. The library with the smaller one is loaded first."""
    gpu, places = EmulatedGpu(), []
    for size in (8, 4096):
        found = gpu.zeros(2, torch.int64)
        gpu.other_kernels(SOURCE.replace("SIZE", str(size))).launch("where", 1, 32, [found])
        places.append(found.tolist())
    (small, small_bytes), (large, large_bytes) = places
    assert (small_bytes, large_bytes) == (32, 16384)
    assert small + small_bytes <= large or large + large_bytes <= small
