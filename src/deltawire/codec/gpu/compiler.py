"""Kernels from source to launch. NVRTC, which comes with torch, compiles them, and the driver runs them. No CUDA toolkit is needed."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import CodecUnavailable
from .sources import kernel_source

_SHARED_MEMORY_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MEMORY_TYPE, _HOST_MEMORY = 2, 1  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_HOST
OLDEST_ARCHITECTURE = (8, 0)


class Kernels:
    """Compiled kernels on one device.

    Parameters
    ----------
    source
        CUDA C++ that needs no header.
    defines
        Macros for the compiler, such as "WIDTH=16".
    device
        The number of the device.
    """

    def __init__(self, source: str, defines: Sequence[str], device: int) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < OLDEST_ARCHITECTURE:
            raise CodecUnavailable(f"{torch.cuda.get_device_name(device)} is older than the GPU codec supports (compute capability 8.0).")
        cubin = _cubin(source, defines, f"sm_{major}{minor}")
        self.device = device
        self._driver = _driver()
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._constants: dict[str, tuple[int, ...]] = {}
        self._resident: dict[str, int] = {}
        self._module = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes sure that the device has a context
            _check(self._driver.cuModuleLoadData(ctypes.byref(self._module), cubin))

    def constants(self, name: str, count: int) -> tuple[int, ...]:
        """Return numbers that only the compiler knows, such as the sizes of structures."""
        if name in self._constants:  # read once, because the copy waits for all work of the default stream
            return self._constants[name]
        address, size = ctypes.c_void_p(), ctypes.c_size_t()
        _check(self._driver.cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), self._module, name.encode()))
        values = (ctypes.c_uint32 * count)()
        _check(self._driver.cuMemcpyDtoH_v2(values, address, ctypes.sizeof(values)))
        return self._constants.setdefault(name, tuple(values))

    def launch(self, name: str, blocks: int, threads: int, arguments: Sequence[Any], shared: int = 0) -> None:
        """Start a kernel on the current stream. Arguments are ctypes values, or tensors, which are passed as addresses."""
        if not blocks:
            return
        values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        function = self._function(name, shared)
        _check(self._driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared, stream, pointers, None))

    def resident_blocks(self, name: str, threads: int, shared: int) -> int:
        """Return how many thread blocks of a kernel one processor runs at the same time."""
        if name not in self._resident:
            found = ctypes.c_int()
            query = self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
            with torch.cuda.device(self.device):
                _check(query(ctypes.byref(found), self._function(name, shared), threads, ctypes.c_size_t(shared)))
            self._resident[name] = max(found.value, 1)
        return self._resident[name]

    def _function(self, name: str, shared: int) -> ctypes.c_void_p:
        found = self._functions.get(name)
        if found is None:
            found = ctypes.c_void_p()
            _check(self._driver.cuModuleGetFunction(ctypes.byref(found), self._module, name.encode()))
            if shared > 48 << 10:
                _check(self._driver.cuFuncSetAttribute(found, _SHARED_MEMORY_ATTRIBUTE, shared))
            self._functions[name] = found
        return found


@functools.cache
def kernels(width: int, device: int) -> Kernels:
    """Return the kernels for one width. The first call compiles them, in seconds, or in milliseconds if they are in the disk cache."""
    return Kernels(kernel_source(), [f"WIDTH={width}"], device)


@functools.cache
def other_kernels(source: str, device: int) -> Kernels:
    """Return kernels that are not part of the codec. The first call compiles them."""
    return Kernels(source, [], device)


def is_pinned(address: int) -> bool:
    """Tell whether the device can read this host memory by itself."""
    kind = ctypes.c_uint()
    return not _driver().cuPointerGetAttribute(ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(address)) and kind.value == _HOST_MEMORY


def copy_to_device(to: int, pinned: int, size: int, stream: torch.cuda.Stream) -> None:
    _check(
        _driver().cuMemcpyHtoDAsync_v2(
            ctypes.c_uint64(to), ctypes.c_void_p(pinned), ctypes.c_size_t(size), ctypes.c_void_p(stream.cuda_stream)
        )
    )


def _cubin(source: str, defines: Sequence[str], architecture: str) -> bytes:
    nvrtc = _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    options = [f"--gpu-architecture={architecture}", *(f"-D{define}" for define in defines), "-std=c++17", "-lineinfo"]
    key = hashlib.sha256("\0".join([source, *options, f"{major.value}.{minor.value}"]).encode()).hexdigest()[:32]
    folder = _cache_folder()
    if folder is None:
        return _compile(nvrtc, source, options)
    kept = folder / f"{key}.cubin"
    if kept.is_file():
        return kept.read_bytes()
    cubin = _compile(nvrtc, source, options)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as out:
            out.write(cubin)
        os.replace(out.name, kept)
    except OSError:
        pass  # without a cache the next process compiles again
    return cubin


def _cache_folder() -> Path | None:
    """Return the folder of the disk cache; None if the user has no home, as in some containers. Then every process compiles."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deltawire"
    except RuntimeError:
        return None


def _compile(nvrtc: Any, source: str, options: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"deltawire.cu", 0, None, None):
        raise CodecUnavailable("NVRTC could not start.")
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options)))
    if failed:
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CodecUnavailable(f"the GPU codec does not compile here:\n{log.value.decode()}")
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


@functools.lru_cache(maxsize=1)
def _nvrtc() -> Any:
    """Return the NVRTC library that torch's CUDA build depends on, or else that of the system."""
    major = (torch.version.cuda or "").partition(".")[0]
    names = [f"libnvrtc.so.{major}", "libnvrtc.so"]
    folders = [Path(entry) / "nvidia" for entry in sys.path if entry]
    found = [str(path) for folder in folders for name in names[:1] for path in folder.glob(f"*/lib/{name}")]
    for name in [*found, *names]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CodecUnavailable("the library NVRTC was not found; it comes with the CUDA build of torch.")


@functools.lru_cache(maxsize=1)
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver: {(text.value or b'unknown error').decode()} ({result})")
