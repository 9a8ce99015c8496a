"""Reads the memory of other workers of the same host, without their help.

A GPU maps the memory of another worker once, by a handle of the CUDA driver, and then reads it as its own. On a CPU server, the kernel
copies from the memory of another process (`process_vm_readv`). Neither needs a collective call, so no worker waits for one that is slow or
has ended.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ....errors import PeerUnreadable
from ..layout.loader_copies import reach
from ..layout.types import Placement

_PROBE_BYTES = 64
_SLACK = 1 << 20


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory of a worker that another worker may read.

    Parameters
    ----------
    handle
        What the other worker needs to find it.
    dtype
        The type of its elements.
    count
        The number of its elements.
    probe
        Its first and last bytes, which show that the other worker reads the right memory.
    """

    handle: Any
    dtype: torch.dtype
    count: int
    probe: bytes


class Reader(Protocol):
    """Reads the memory of workers of one kind."""

    @property
    def identity(self) -> str:
        """Tells other workers which device this one works on."""
        ...

    def why_not(self, identity: str) -> str | None:
        """Return why the memory of a worker with this identity cannot be read, or None."""
        ...

    def offer(self, memory: torch.Tensor) -> SharedMemory:
        """Let one other worker read some memory."""
        ...

    def open(self, shared: SharedMemory) -> RemoteMemory:
        """Prepare to read memory that another worker offers. Raises `PeerUnreadable`."""
        ...


class RemoteMemory(Protocol):
    """Memory of another worker."""

    def placement(self, placement: Placement) -> Placement | None:
        """Return a placement whose memory can be read here. None if far more memory would have to be read than it holds.

        `placement` says where elements are in the memory of the other worker. Its own memory is not used.
        """
        ...

    def read(self, placement: Placement) -> Placement:
        """Return a placement with memory that has the elements now. Raises `PeerUnreadable`."""
        ...


def host_identity() -> str:
    """Return a name of this host and of the processes that it can see, which differs from that of every other host."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def probe_of(memory: torch.Tensor) -> bytes:
    """Return the first and the last bytes of some flat memory."""
    raw = memory.view(torch.int8)
    return bytes(torch.cat([raw[:_PROBE_BYTES], raw[-_PROBE_BYTES:]]).cpu().numpy())


class ProcessReader:
    """Reads the memory of other processes."""

    identity = "cpu"

    def __init__(self) -> None:
        _allow_siblings()

    def why_not(self, identity: str) -> str | None:
        return None if identity == self.identity else "it works on another kind of device"

    def offer(self, memory: torch.Tensor) -> SharedMemory:
        return SharedMemory((os.getpid(), memory.data_ptr()), memory.dtype, memory.numel(), probe_of(memory))

    def open(self, shared: SharedMemory) -> RemoteMemory:
        process, address = shared.handle
        opened = ProcessMemory(process, address, shared.dtype, shared.count)
        size = shared.count * shared.dtype.itemsize
        ends = [(0, min(_PROBE_BYTES, size)), (max(0, size - _PROBE_BYTES), size)]
        if b"".join(bytes(opened.read_bytes(*each).numpy()) for each in ends) != shared.probe:
            raise PeerUnreadable(f"the memory of process {process} has other contents than it says.")
        return opened


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of another process.

    Parameters
    ----------
    process
        The number of the process.
    address
        The address of its first byte there.
    dtype
        The type of its elements.
    count
        The number of its elements.
    """

    process: int
    address: int
    dtype: torch.dtype
    count: int

    def placement(self, placement: Placement) -> Placement | None:
        start, stop = _window(placement)
        units = placement.nests[-1].numel * placement.unit_bits // 8
        return placement if (stop - start) * self.dtype.itemsize <= 2 * units + _SLACK else None

    def read(self, placement: Placement) -> Placement:
        start, stop = _window(placement)
        size = self.dtype.itemsize
        memory = self.read_bytes(start * size, stop * size).view(self.dtype)
        last = placement.nests[-1]
        shift = start * (2 if placement.unit_bits == 4 else 1)
        return replace(placement, nests=(*placement.nests[:-1], replace(last, target_start=last.target_start - shift)), memory=memory)

    def read_bytes(self, start: int, stop: int) -> torch.Tensor:
        """Return a range of its bytes, as signed integers. Raises `PeerUnreadable`."""
        found = torch.empty(stop - start, dtype=torch.int8)
        done = 0
        while done < stop - start:
            here = _Range(found.data_ptr() + done, stop - start - done)
            there = _Range(self.address + start + done, stop - start - done)
            copied = _process_vm_readv()(self.process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if copied <= 0:
                reason = os.strerror(ctypes.get_errno())
                raise PeerUnreadable(f"the memory of process {self.process}, another worker of the server, cannot be read: {reason}.")
            done += copied
        return found


class GpuReader:
    """Reads the memory of other workers on the same host's GPUs.

    Parameters
    ----------
    device
        The GPU of this worker.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device.index if device.index is not None else torch.cuda.current_device()
        self.identity = _uuid(self._device)

    def why_not(self, identity: str) -> str | None:
        known = {_uuid(number): number for number in range(torch.cuda.device_count())}
        if identity not in known:
            return f"GPU {identity} is not visible to this process"
        other = known[identity]
        if other != self._device and not torch.cuda.can_device_access_peer(self._device, other):
            return f"GPU {self._device} has no access to the memory of GPU {other}"
        return None

    def offer(self, memory: torch.Tensor) -> SharedMemory:
        storage = memory.untyped_storage()
        start = memory.data_ptr() - storage.data_ptr()
        _, *handle = storage._share_cuda_()
        return SharedMemory((start, handle), memory.dtype, memory.numel(), probe_of(memory))

    def open(self, shared: SharedMemory) -> RemoteMemory:
        start, handle = shared.handle
        try:
            # With the number of the own GPU, its own context maps the memory. The other GPU's number would make a second context there.
            storage = torch.UntypedStorage._new_shared_cuda(self._device, *handle)
            memory = torch.empty(0, dtype=shared.dtype, device=f"cuda:{self._device}")
            memory.set_(storage, start // shared.dtype.itemsize, (shared.count,))
            is_same = probe_of(memory) == shared.probe
        except RuntimeError as error:
            raise PeerUnreadable(f"the memory of another GPU's worker cannot be mapped: {error}") from error
        if not is_same:
            raise PeerUnreadable("the memory of another GPU's worker has other contents than it says.")
        return GpuMemory(memory)


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of another worker that this worker's GPU reads as its own.

    Parameters
    ----------
    memory
        The mapped memory.
    """

    memory: torch.Tensor

    def placement(self, placement: Placement) -> Placement | None:
        return replace(placement, memory=self.memory)

    def read(self, placement: Placement) -> Placement:
        return placement


def gpu_reason() -> str | None:
    """Return why GPU memory of this process cannot be shared, or None."""
    settings = f"{os.environ.get('PYTORCH_CUDA_ALLOC_CONF', '')},{os.environ.get('PYTORCH_ALLOC_CONF', '')}".lower()
    return "PYTORCH_ALLOC_CONF has expandable_segments" if "expandable_segments:true" in settings.replace(" ", "") else None


def _window(placement: Placement) -> tuple[int, int]:
    """Return the range of elements of the memory that a placement refers to."""
    last = placement.nests[-1]
    first, end = last.target_start, last.target_start + reach(last)
    return (first // 2, end // 2 + 1) if placement.unit_bits == 4 else (first, end + 1)


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


class _Range(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]


def _process_vm_readv() -> Any:
    """Return the function of the C library. Raises `PeerUnreadable` if it has none."""
    if not sys.platform.startswith("linux"):
        raise PeerUnreadable("only Linux lets processes read the memory of others.")
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    function.restype = ctypes.c_ssize_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    return function


def _allow_siblings() -> None:
    """Let the other processes of this process's parent read its memory. Some kernels allow that only after this call (Yama)."""
    set_ptracer = 0x59616D61
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(set_ptracer, ctypes.c_ulong(os.getppid()), 0, 0, 0)
