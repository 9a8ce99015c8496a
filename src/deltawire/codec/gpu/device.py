"""One GPU: its memory, its streams, its kernels. All calls of the codec to CUDA go through this module."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from . import compiler

Purpose: TypeAlias = Literal["codec", "copies", "decode", "background"]
_PRIORITIES = {"decode": -1}
"""Streams whose thread blocks must run between those of other streams. All others have torch's default priority."""


def let_others_go_first() -> None:
    """Give no stream priority over those of other code. Call it in processes that serve a model, before the codec is used."""
    _PRIORITIES.clear()


class KernelSet(Protocol):
    """Compiled kernels: those for elements of one width, or others."""

    def constants(self, name: str, count: int) -> tuple[int, ...]: ...

    def launch(self, name: str, blocks: int, threads: int, arguments: Sequence[Any], shared: int = 0) -> None: ...

    def resident_blocks(self, name: str, threads: int, shared: int) -> int: ...


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor. They are copied if they are not in one piece."""
    whole = tensor.contiguous()  # a tensor of one element counts as contiguous, whatever its stride is
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


class Gpu:
    """A device and the operations on it. Work goes to the calling thread's current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[str, torch.cuda.Stream] = {}
        self.processors: int = torch.cuda.get_device_properties(device).multi_processor_count

    def kernels(self, width: int) -> KernelSet:
        return compiler.kernels(width, self.device.index)

    def other_kernels(self, source: str) -> KernelSet:
        """Return kernels that are not part of the codec, from their source."""
        return compiler.other_kernels(source, self.device.index)

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self.device)

    def zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self.device)

    def pinned(self, size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return host memory that the device can read by itself. Its content is undefined."""
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def upload(self, array: NDArray[Any]) -> torch.Tensor:
        """Return the bytes of a small array on the device. They go through pinned memory, so nothing waits for the copy."""
        pinned = self.pinned(max(array.nbytes, 1))
        pinned.numpy()[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return pinned.to(self.device, non_blocking=True)

    def download(self, *tensors: torch.Tensor) -> list[NDArray[np.uint8]]:
        """Return the bytes of tensors, once the current stream has computed them.

        Meanwhile other threads can use the device: a copy to memory that is not pinned would keep them waiting.
        """
        flat = [flat_bytes(tensor) for tensor in tensors]
        copies = [self.pinned(bytes_.numel()) for bytes_ in flat]
        for copy, bytes_ in zip(copies, flat, strict=True):
            copy.copy_(bytes_, non_blocking=True)
        done = torch.cuda.Event(blocking=True)  # the thread sleeps until it is set
        done.record(self.current())
        done.synchronize()
        return [copy.numpy() for copy in copies]

    def stream(self, purpose: Purpose) -> torch.cuda.Stream:
        """Return the stream for a purpose. It is always the same: memory of one stream is not reused by another."""
        found = self._streams.get(purpose)
        if found is None:  # threads that get here at the same time all get the stream that was stored first
            found = self._streams.setdefault(purpose, torch.cuda.Stream(self.device, priority=_PRIORITIES.get(purpose, 0)))
        return found

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def using(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Return a context in which the calling thread's work goes to this stream."""
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def active(self) -> AbstractContextManager[Any]:
        """Return a context in which this is the calling thread's current device."""
        context: AbstractContextManager[Any] = torch.cuda.device(self.device)
        return context

    def mark(self) -> torch.cuda.Event:
        """Return an event that is set when all work that the current stream has so far is done."""
        event = torch.cuda.Event()
        event.record(self.current())
        return event

    def synchronize(self) -> None:
        """Wait until all work of the device is done, on every stream."""
        torch.cuda.synchronize(self.device)

    def keep(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Keep this memory from being reused before all work that `stream` has so far is done."""
        tensor.record_stream(stream)

    def is_pinned(self, address: int) -> bool:
        return compiler.is_pinned(address)

    def copy_in(self, to: int, pinned: int, size: int, stream: torch.cuda.Stream) -> None:
        """Start to copy pinned memory to an address on the device. Any thread may call this."""
        compiler.copy_to_device(to, pinned, size, stream)


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Tell whether the codec can work on a device: on an NVIDIA GPU that is not too old."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= compiler.OLDEST_ARCHITECTURE


def compile_kernels(device: torch.device, widths: Iterable[int]) -> None:
    """Compile the kernels for elements of these widths in bits, unless the disk has them. Otherwise their first use takes seconds.

    Does nothing on a device on which the codec cannot work.
    """
    if has_kernels(device):
        for width in sorted(set(widths)):
            gpu_at(device).kernels(width)


@functools.cache
def gpu_at(device: torch.device) -> Gpu:
    """Return the one `Gpu` object for a device."""
    return Gpu(device)
