"""The GPU's part in the codec: jobs on CUDA tensors go to the kernels, all others to the codec of the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ...dtypes import DTYPES
from .. import default_codec
from ..base import Bits, Encoded, EncodeJob, Lanes, Outcome, Resolution, ResolveJob
from .device import Gpu, gpu_at
from .device_bits import DeviceBits, MasterBits, is_device
from .digest import digest_tensors
from .encode import encode_tensors
from .patch import DevicePatch
from .resolve import resolve_tensors
from .spans import Facts


class GpuCodec:
    """Works on the device of the tensors, on a stream of its own: other streams go on meanwhile.

    What the calling thread has put on its current stream is waited for, on the device, and when a call returns all its reading is done.
    """

    name = "gpu"
    batch = 1 << 40
    """Bytes of weights per call: slabs bound the memory, so the more at a time the better."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """Where tensors that appear are put."""

    def encode(self, jobs: Sequence[EncodeJob], threads: int) -> list[Encoded]:
        ours, theirs = _split(is_device(job.new) or is_device(job.base) for job in jobs)
        results: dict[int, Encoded] = {}
        if theirs:
            results.update(zip(theirs, default_codec().encode([jobs[i] for i in theirs], threads), strict=True))
        devices = [_device(jobs[i].new, jobs[i].base) for i in ours]
        kinds = [jobs[i].dtype.itemsize + _MASTERS * isinstance(jobs[i].new, MasterBits) for i in ours]
        for (device, kind), group in _groups(ours, devices, kinds).items():
            with _side_stream(device) as stream:
                for part in _parts(group, device, lambda i: (jobs[i].base, jobs[i].new)):
                    flats = [(_flat(jobs[i].base, device), _flat(jobs[i].new, device)) for i in part]
                    facts = [
                        Facts(
                            _address(base),
                            _address(new),
                            jobs[i].new.size,
                            jobs[i].seed,
                            jobs[i].dtype,
                            jobs[i].base is None,
                            kind > _MASTERS,
                        )
                        for i, (base, new) in zip(part, flats, strict=True)
                    ]
                    results.update(zip(part, encode_tensors(facts, gpu_at(device)), strict=True))
                stream.synchronize()
        return [results[i] for i in range(len(jobs))]

    def resolution(self, threads: int, budget: int) -> GpuResolution:
        return GpuResolution(self.device, default_codec().resolution(threads, budget) if _host_codec_works() else None)

    def deferred_resolution(self, threads: int) -> GpuResolution:
        return GpuResolution(self.device, default_codec().deferred_resolution(threads) if _host_codec_works() else None)

    def digest(self, arrays: Sequence[tuple[Bits, int]], threads: int) -> list[Lanes]:
        ours, theirs = _split(is_device(bits) for bits, _ in arrays)
        results: dict[int, Lanes] = {}
        if theirs:
            results.update(zip(theirs, default_codec().digest([arrays[i] for i in theirs], threads), strict=True))
        kinds = [arrays[i][0].itemsize + _MASTERS * isinstance(arrays[i][0], MasterBits) for i in ours]
        for (device, kind), group in _groups(ours, [_device(arrays[i][0]) for i in ours], kinds).items():
            with _side_stream(device):
                # Master weights have to be rounded for it: one tensor at a time.
                parts = ([i] for i in group) if kind > _MASTERS else _parts(group, device, lambda i: (arrays[i][0],))
                for part in parts:
                    flats = [_flat(b.rounded() if isinstance(b, MasterBits) else b, device) for b in (arrays[i][0] for i in part)]
                    numbers = zip(part, flats, strict=True)
                    facts = [Facts(_address(flat), 0, arrays[i][0].size, arrays[i][1], _INTEGERS[kind % _MASTERS]) for i, flat in numbers]
                    results.update(zip(part, digest_tensors(facts, gpu_at(device)), strict=True))
                    del flats, numbers  # before those of the next part are made
        return [results[i] for i in range(len(arrays))]

    def write_elements(self, bits: Bits, indices: NDArray[np.int64], values: Bits) -> None:
        if not is_device(bits):
            default_codec().write_elements(bits, indices, values)
            return
        target: torch.Tensor = cast(Any, bits).tensor
        at = torch.as_tensor(indices, device=target.device)
        if at.numel() and not 0 <= int(at.min()) <= int(at.max()) < target.numel():
            raise IndexError("index")
        new = values if isinstance(values, torch.Tensor) else torch.from_numpy(values.view(f"i{values.itemsize}"))
        new = new.to(target.device).view(target.dtype)
        if target.is_contiguous():
            target.view(-1)[at] = new
        else:
            target[torch.unravel_index(at, target.shape)] = new


def marks(tensors: Iterable[Bits]) -> list[tuple[Gpu, torch.cuda.Event]]:
    """The GPUs that these are on, each with an event that comes when what the current stream was given so far is done."""
    devices = dict.fromkeys(_device(bits) for bits in tensors if is_device(bits))
    return [(gpu_at(device), gpu_at(device).mark()) for device in devices]


@dataclass(slots=True)
class _Group:
    """Tensors that were resolved together."""

    patch: DevicePatch
    jobs: list[ResolveJob]
    flats: list[torch.Tensor | None]


@dataclass(slots=True)
class GpuResolution:
    """See `codec.base.Resolution`. Nothing is written before `settle`."""

    device: torch.device
    host: Resolution | None
    groups: list[_Group] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    """Of each tensor: its group (−1: the host's) and its number there."""
    host_tensors: int = 0

    def add(self, jobs: Sequence[ResolveJob]) -> list[Outcome]:
        ours, theirs = _split(job.base is None or is_device(job.base) for job in jobs)
        results: dict[int, Outcome] = {}
        places: dict[int, tuple[int, int]] = {}
        if theirs:
            if self.host is None:
                default_codec()  # raises, and says why
            assert self.host is not None
            results.update(zip(theirs, self.host.add([jobs[i] for i in theirs]), strict=True))
            places.update({i: (-1, self.host_tensors + n) for n, i in enumerate(theirs)})
            self.host_tensors += len(theirs)
        devices = [self.device if jobs[i].base is None else _device(jobs[i].base) for i in ours]
        for (device, _), group in _groups(ours, devices, [jobs[i].dtype.itemsize for i in ours]).items():
            with _side_stream(device):
                flats = [_flat_or_zeros(jobs[i], device) for i in group]
                facts = [Facts(_address(flat), 0, jobs[i].count, jobs[i].seed, jobs[i].dtype) for i, flat in zip(group, flats, strict=True)]
                patch, outcomes = resolve_tensors(facts, [jobs[i].payload for i in group], gpu_at(device))
            results.update(zip(group, outcomes, strict=True))
            places.update({i: (len(self.groups), n) for n, i in enumerate(group)})
            self.groups.append(_Group(patch, [jobs[i] for i in group], flats))
        self.places += [places[i] for i in range(len(jobs))]
        return [results[i] for i in range(len(jobs))]

    def changes(self, tensor: int) -> tuple[Any, Any]:
        """Like `Resolution.changes`; of a CUDA tensor, tensors on its device."""
        group, place = self.places[tensor]
        if group < 0:
            assert self.host is not None
            return self.host.changes(place)
        patch = self.groups[group].patch
        with patch.gpu.active():
            return patch.indices(place), patch.values_of(place)

    def dense(self, tensor: int) -> Any:
        """All elements of a tensor that appears, flat, as integers on the device."""
        group, place = self.places[tensor]
        found = self.groups[group]
        flat = found.flats[place]
        assert flat is not None
        with found.patch.gpu.active():
            found.patch.write([flat.data_ptr() if i == place else 0 for i in range(len(found.jobs))], swap=False)
            found.patch.gpu.keep(flat, found.patch.gpu.current())
        return flat

    def settle(self) -> None:
        """Write, on the current stream of each device."""
        self._write(swap=False)
        if self.host is not None:
            self.host.settle()

    def exchange(self) -> None:
        """See `codec.base.Resolution`; on the current stream of each device, and waited for: then any stream may read the weights."""
        self._write(swap=True)
        for gpu in {id(group.patch.gpu): group.patch.gpu for group in self.groups}.values():
            gpu.current().synchronize()
        if self.host is not None:
            self.host.exchange()

    def compact(self) -> None:
        """The patch is all there is, but for what the host keeps."""
        if self.host is not None:
            self.host.compact()

    def _write(self, *, swap: bool) -> None:
        for group in self.groups:
            with group.patch.gpu.active():
                writes = [flat if job.write else None for job, flat in zip(group.jobs, group.flats, strict=True)]
                if any(flat is not None for flat in writes):
                    group.patch.write([_address(flat) for flat in writes], swap=swap)
                for job, flat in zip(group.jobs, writes, strict=True):
                    base: Any = job.base
                    if flat is not None and not base.plain:
                        base.tensor.copy_(flat.view(base.shape))
                        group.patch.gpu.keep(flat, group.patch.gpu.current())

    def revert(self) -> None:
        if self.host is not None:
            self.host.revert()


_MASTERS = 16
"""Added to the size of an element, to keep master weights apart."""

_MOST_COPIED = 256 << 20
"""Bytes of tensors that are brought to the device, or into plain memory there, at a time."""

_INTEGERS = {dtype.itemsize: dtype for dtype in DTYPES if dtype.name in ("U8", "U16", "U32", "U64")}


def _split(ours: Any) -> tuple[list[int], list[int]]:
    """The numbers of those that are, and of those that are not."""
    parts: tuple[list[int], list[int]] = ([], [])
    for index, one in enumerate(ours):
        parts[0 if one else 1].append(index)
    return parts


def _groups(items: Sequence[int], devices: Sequence[torch.device], kinds: Sequence[int]) -> dict[tuple[torch.device, int], list[int]]:
    """Items by device and by what else must be the same to work on them together: the size of an element."""
    groups: dict[tuple[torch.device, int], list[int]] = {}
    for item, device, kind in zip(items, devices, kinds, strict=True):
        groups.setdefault((device, kind), []).append(item)
    return groups


def _parts(items: Sequence[int], device: torch.device, tensors: Callable[[int], Sequence[Any]]) -> Iterator[list[int]]:
    """Items such that no part copies more than `_MOST_COPIED` bytes to the device, unless a single one does."""
    part: list[int] = []
    size = 0
    for item in items:
        more = sum(_copied(bits, device) for bits in tensors(item))
        if part and size + more > _MOST_COPIED:
            yield part
            part, size = [], 0
        part.append(item)
        size += more
    if part:
        yield part


def _copied(bits: Any, device: torch.device) -> int:
    """Bytes that `_flat` copies."""
    if bits is None or (isinstance(bits, DeviceBits) and bits.plain and bits.tensor.device == device):
        return 0
    return int(bits.nbytes)


def _device(*bits: Any) -> torch.device:
    device: torch.device = next(b.tensor.device for b in bits if isinstance(b, DeviceBits))
    return device


def _flat(bits: Any, device: torch.device) -> torch.Tensor | None:
    """The elements where kernels can read them. What is on the host, or elsewhere, is copied."""
    if bits is None or not bits.size:
        return None
    if isinstance(bits, DeviceBits):
        return bits.flat() if bits.tensor.device == device else bits.tensor.to(device).contiguous().view(-1)
    flat = np.ascontiguousarray(bits).reshape(-1).view(f"i{bits.itemsize}")
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy()).to(device, non_blocking=True)


def _flat_or_zeros(job: ResolveJob, device: torch.device) -> torch.Tensor | None:
    if job.base is not None:
        return _flat(job.base, device)
    return torch.zeros(max(job.count, 1), dtype=getattr(torch, f"int{job.dtype.width}"), device=device)[: job.count]


def _address(flat: torch.Tensor | None) -> int:
    return 0 if flat is None else flat.data_ptr()


class _side_stream:
    """Work on this thread goes to a stream of ours. Who waits for the caller's stream later, waits for ours too."""

    def __init__(self, device: torch.device) -> None:
        gpu = gpu_at(device)
        self._stream = gpu.stream("codec")
        self._caller = gpu.current()
        self._context = gpu.using(self._stream)

    def __enter__(self) -> torch.cuda.Stream:
        self._stream.wait_stream(self._caller)
        self._context.__enter__()
        return self._stream

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        self._caller.wait_stream(self._stream)


@functools.cache
def _host_codec_works() -> bool:
    from ...errors import CodecUnavailable

    try:
        default_codec()
    except CodecUnavailable:
        return False
    return True
