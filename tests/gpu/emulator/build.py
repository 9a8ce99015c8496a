"""Build the kernels of `deltawire.codec.gpu` for a CPU: the host's compiler compiles the same sources with `cuda.hpp` instead of CUDA."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from deltawire.codec.gpu.sources import kernel_source

_SHIM = Path(__file__).with_name("cuda.hpp")
_BUILT = Path(__file__).resolve().parents[3] / "build"
"""The folder of libraries. It stays from run to run, unlike folders for temporary files."""
_DYNAMIC = "extern __shared__ __align__(16) u8 shared[];"
_EMULATED_DYNAMIC = "u8* const shared = (u8*)(((u64)emulated::shared_memory.data() + 15) & ~15ull);"
_CONSTANTS = 'extern "C" __device__ const'
_OPTIONS = ["-O1", "-std=c++17", "-fPIC", "-shared", "-w", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing", "-fwrapv", "-fvisibility=hidden"]
"""Symbols are hidden so that libraries share no variables. g++ gives a visible static variable of a template only one address in a process
(STB_GNU_UNIQUE). The kernels for 4-bit and 8-bit elements have such a variable with the same name but different sizes. If the library for
4-bit elements were loaded first, the kernels for 8-bit elements would use its smaller variable and write past the end."""


def compiler() -> str | None:
    return next((found for name in (os.environ.get("CXX", "c++"), "clang++", "g++") if (found := shutil.which(name))), None)


@functools.cache
def library(width: int) -> Any:
    """Return the compiled kernels. They are compiled into the temporary folder once per source, which takes seconds."""
    source = kernel_source()
    assert _DYNAMIC in source
    without = "_of_masters" if width > 16 else None  # wider elements have no master weights
    return _compiled(f"#define WIDTH {width}", source, without)


@functools.cache
def other_library(source: str) -> Any:
    """Return compiled kernels that are not part of the codec."""
    return _compiled("", source, None)


def _compiled(define: str, source: str, without: str | None) -> Any:
    names = re.findall(r'extern "C" __global__ void (?:__launch_bounds__\(.*?\) )?(\w+)\(', source)
    if without is not None:
        names = [name for name in names if not name.endswith(without)]
    text = "\n".join(
        [
            define,
            _SHIM.read_text(),
            source.replace(_DYNAMIC, _EMULATED_DYNAMIC).replace(_CONSTANTS, "EXPORTED const"),
            "EXPORTED int emulated_launch(const char* name, u32 blocks, u32 threads, u32 shared, void** arguments, u64 seed) {",
            *(
                f'    if (!strcmp(name, "{name}")) return emulated::launch([](void** a) {{ emulated::call({name}, a); }}, '
                "blocks, threads, shared, arguments, seed), 0;"
                for name in names
            ),
            "    return 1;\n}",
        ]
    )
    found = compiler()
    assert found is not None
    key = hashlib.sha256("\n".join([found, *_OPTIONS, text]).encode()).hexdigest()[:24]
    path = _BUILT / f"emulated-{key}.so"
    if not path.exists():
        _BUILT.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            unit = Path(folder) / "kernels.cpp"
            unit.write_text(text)
            subprocess.run([found, *_OPTIONS, str(unit), "-o", f"{folder}/kernels.so"], check=True)
            part = path.with_suffix(f".{os.getpid()}")
            shutil.copyfile(f"{folder}/kernels.so", part)
            part.rename(path)
    return ctypes.CDLL(str(path))
