"""Emulate a GPU: `cuda.hpp` runs the kernels on the CPU, new memory contains noise, and streams do all work immediately."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from deltawire.codec.gpu.device import flat_bytes

from .build import library, other_library

_ONE_AT_A_TIME = threading.Lock()


class Kernels:
    def __init__(self, library: Any, seed: int) -> None:
        self._library = library
        self._seed = seed

    def constants(self, name: str, count: int) -> tuple[int, ...]:
        return tuple((ctypes.c_uint32 * count).in_dll(self._library, name))

    def launch(self, name: str, blocks: int, threads: int, arguments: Sequence[Any], shared: int = 0) -> None:
        if not blocks:
            return
        self._seed += 1
        values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        with _ONE_AT_A_TIME:
            failed = self._library.emulated_launch(name.encode(), blocks, threads, shared, pointers, ctypes.c_uint64(self._seed))
        assert not failed, f"there is no kernel {name}"

    def resident_blocks(self, name: str, threads: int, shared: int) -> int:
        return 4


class Stream:
    """A stream whose work is done as soon as it is submitted."""

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def synchronize(self) -> None: ...


class Event:
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class EmulatedGpu:
    """A replacement for `deltawire.codec.gpu.device.Gpu`. `seed` decides the order of threads."""

    device = torch.device("cpu")
    processors = 2

    def __init__(self, seed: int = 1) -> None:
        self._seed = seed
        self._noise = torch.Generator().manual_seed(seed)
        self._stream = Stream()
        self._pinned: list[tuple[int, int]] = []

    def kernels(self, width: int) -> Kernels:
        return Kernels(library(width), self._seed)

    def other_kernels(self, source: str) -> Kernels:
        return Kernels(other_library(source), self._seed)

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = size * dtype.itemsize
        return torch.randint(0, 256, (nbytes + 15 & ~15,), dtype=torch.uint8, generator=self._noise)[:nbytes].view(dtype)

    def zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    def pinned(self, size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        found = self.empty(size, dtype)
        self._pinned.append((found.data_ptr(), found.data_ptr() + found.nbytes))
        return found

    def upload(self, array: Any) -> torch.Tensor:
        raw = torch.frombuffer(bytearray(array.tobytes() or b"\0"), dtype=torch.uint8)
        return raw.clone()

    def download(self, *tensors: torch.Tensor) -> list[Any]:
        return [flat_bytes(tensor).clone().numpy() for tensor in tensors]

    def stream(self, purpose: str) -> Stream:
        return Stream()

    def current(self) -> Stream:
        return self._stream

    def using(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def active(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def mark(self) -> Event:
        return Event()

    def synchronize(self) -> None: ...

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None: ...

    def is_pinned(self, address: int) -> bool:
        return any(begin <= address < end for begin, end in self._pinned[-64:])

    def copy_in(self, to: int, pinned: int, size: int, stream: Stream) -> None:
        ctypes.memmove(to, pinned, size)


@contextlib.contextmanager
def emulated(gpu: EmulatedGpu) -> Iterator[EmulatedGpu]:
    """Treat all torch tensors of the host as tensors on this GPU within the context, and let GPU codecs use it."""
    import pytest

    from deltawire.codec.gpu import device
    from deltawire.tensors import torch_types

    with pytest.MonkeyPatch.context() as patch:
        for module in (device,):
            patch.setattr(module, "gpu_at", lambda device: gpu)
        patch.setattr(torch_types, "gpu_of", lambda tensor: gpu.device)
        yield gpu
