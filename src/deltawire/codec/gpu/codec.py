"""The GPU's part in the codec: jobs on CUDA tensors go to the kernels, all others to the codec of the host."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ...dtypes import DTYPES
from .. import default_codec
from ..base import Bits, Buffer, EncodeJob, Encodings, Outcomes, Resolution, ResolveJob, Sums
from .device import gpu_at
from .device_bits import MasterBits, is_device
from .digest import digest_tensors
from .encode import encode_tensors
from .patch import DevicePatch
from .reach import copied, in_place, within_reach
from .resolve import resolve_tensors
from .spans import Table


class GpuCodec:
    """Works on the device of the tensors, on a stream of its own: other streams go on meanwhile.

    What the calling thread has put on its current stream is waited for, on the device, and when a call returns all its reading is done.
    """

    name = "gpu"
    takes_all = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """Where tensors that appear are put."""

    def encode(self, jobs: Sequence[EncodeJob], threads: int) -> Encodings:
        found: list[tuple[Sequence[int], Encodings]] = []
        groups = _groups(
            (job.new if is_device(job.new) else job.base, job.dtype.itemsize + _MASTERS * isinstance(job.new, MasterBits)) for job in jobs
        )
        for (device, kind), group in groups.items():
            mine = jobs if len(group) == len(jobs) else [jobs[i] for i in group]
            if device is None:
                found.append((group, default_codec().encode(mine, threads)))
                continue
            with _side_stream(device) as stream:
                for rows, (bases, news) in within_reach([[job.base for job in mine], [job.new for job in mine]], device):
                    part = mine[rows]
                    facts = [job.new.size for job in part], [job.seed for job in part], [job.dtype.code for job in part]
                    table = Table.of(bases, *facts, news, [job.base is None for job in part], masters=kind > _MASTERS)
                    found.append((group[rows], encode_tensors(table, gpu_at(device))))
                stream.synchronize()
        if len(found) == 1:
            return found[0][1]
        by_job = {i: encoded for numbers, encodings in found for i, encoded in zip(numbers, encodings, strict=True)}
        return Encodings.of([by_job[i] for i in range(len(jobs))])

    def resolution(self, threads: int, budget: int) -> GpuResolution:
        return GpuResolution(self.device, default_codec().resolution(threads, budget) if _host_codec_works() else None)

    def deferred_resolution(self, threads: int) -> GpuResolution:
        return GpuResolution(self.device, default_codec().deferred_resolution(threads) if _host_codec_works() else None)

    def digest(self, arrays: Sequence[tuple[Bits, int]], threads: int) -> Sums:
        found = np.zeros((len(arrays), 4), np.uint32)
        groups = _groups((bits, bits.itemsize + _MASTERS * isinstance(bits, MasterBits)) for bits, _ in arrays)
        for (device, kind), group in groups.items():
            if device is None:
                found[group] = default_codec().digest([arrays[i] for i in group], threads)
                continue
            code = _INTEGERS[kind % _MASTERS]
            with _side_stream(device):
                # Master weights have to be rounded for it: one tensor at a time.
                for part in ([i] for i in group) if kind > _MASTERS else [group]:
                    column = [bits.rounded() if isinstance(bits, MasterBits) else bits for bits in (arrays[i][0] for i in part)]
                    for rows, (bases,) in within_reach([column], device):
                        count = [bits.size for bits in column[rows]]
                        table = Table.of(bases, count, [arrays[i][1] for i in part[rows]], [code] * len(bases))
                        found[part[rows]] = digest_tensors(table, gpu_at(device))
                    del column  # before that of the next part is made
        return found

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


@dataclass(slots=True)
class _Group:
    """Tensors that were resolved together."""

    patch: DevicePatch
    jobs: Sequence[ResolveJob]
    bases: NDArray[np.uint64]
    """Addresses."""
    copies: dict[int, torch.Tensor]
    """Elements of those that the kernels cannot work on in place, or that appear."""

    def targets(self, which: Sequence[bool]) -> torch.Tensor | None:
        """Where the changes of some of the tensors go: into their copies, where they have such."""
        chosen = np.array(which, np.bool_)
        return self.patch.targets(np.where(chosen, self.bases, np.uint64(0))) if chosen.any() else None

    def write(self, targets: torch.Tensor | None, *, swap: bool) -> None:
        """Write to some of the tensors, on the current stream."""
        if targets is not None:
            self.patch.write(targets, swap=swap)
        for flat in self.copies.values():
            self.patch.gpu.keep(flat, self.patch.gpu.current())


@dataclass(slots=True)
class GpuResolution:
    """See `codec.base.Resolution`. Nothing is written before `settle`."""

    device: torch.device
    host: Resolution | None
    groups: list[_Group] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    """Of each tensor: its group (−1: the host's) and its number there."""
    host_tensors: int = 0
    targets: list[torch.Tensor | None] = field(default_factory=list)
    """Of each group, once nothing more is to be added."""

    def add(self, jobs: Sequence[ResolveJob], data: Buffer) -> Outcomes:
        found = Outcomes(np.zeros(len(jobs), np.int64), np.zeros((len(jobs), 4), np.uint32), np.zeros((len(jobs), 4), np.uint32))
        groups = _groups(((job.base, job.dtype.itemsize) for job in jobs), self.device)
        places: dict[int, tuple[int, int]] = {}
        for (device, _), group in groups.items():
            mine = jobs if len(group) == len(jobs) else [jobs[i] for i in group]
            if device is None:
                outcomes = self._add_on_host(mine, data)
                places.update({i: (-1, self.host_tensors + n) for n, i in enumerate(group)})
                self.host_tensors += len(group)
            else:
                outcomes = self._add_on_device(mine, data, device)
                places.update({i: (len(self.groups) - 1, n) for n, i in enumerate(group)})
            found.changed[group], found.before[group], found.after[group] = outcomes.changed, outcomes.before, outcomes.after
        self.places += [places[i] for i in range(len(jobs))]
        return found

    def _add_on_host(self, jobs: Sequence[ResolveJob], data: Buffer) -> Outcomes:
        if self.host is None:
            default_codec()  # raises, and says why
        assert self.host is not None
        return self.host.add(jobs, data)

    def _add_on_device(self, jobs: Sequence[ResolveJob], data: Buffer, device: torch.device) -> Outcomes:
        with _side_stream(device):
            bases = [None if job.base is None else in_place(job.base, device) for job in jobs]
            copies = {n: _elements(jobs[n], device) for n, base in enumerate(bases) if base is None}
            addresses = [copies[n].data_ptr() if base is None else base for n, base in enumerate(bases)]
            facts = [job.count for job in jobs], [job.seed for job in jobs], [job.dtype.code for job in jobs]
            table = Table.of(addresses, *facts)
            patch, outcomes = resolve_tensors(table, [job.payload for job in jobs], data, gpu_at(device))
        self.groups.append(_Group(patch, jobs, table.base, copies))
        return outcomes

    def changes(self, tensors: Sequence[int]) -> Sequence[tuple[Any, Any]]:
        """Like `Resolution.changes`; of CUDA tensors, tensors on their device."""
        found: dict[tuple[int, int], tuple[Any, Any]] = {}
        wanted = [self.places[tensor] for tensor in tensors]
        for number in {group for group, _ in wanted}:
            places = [place for group, place in wanted if group == number]
            if number < 0:
                assert self.host is not None
                found.update(zip([(-1, place) for place in places], self.host.changes(places), strict=True))
            else:
                patch = self.groups[number].patch
                with patch.gpu.active():
                    changes = patch.changes()
                found.update({(number, place): changes[place] for place in places})
        return [found[place] for place in wanted]

    def dense(self, tensors: Sequence[int]) -> Sequence[Any]:
        """All elements of tensors that appear, flat, as integers on the device."""
        wanted = [self.places[tensor] for tensor in tensors]
        for number in {group for group, _ in wanted}:
            group = self.groups[number]
            with group.patch.gpu.active():
                group.write(group.targets([job.base is None for job in group.jobs]), swap=False)
        return [self.groups[number].copies[place] for number, place in wanted]

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
        """The patch is all there is, but for what the host keeps. What `exchange` needs beside it is made now, so that it cannot fail."""
        self.targets = self._targets()
        if self.host is not None:
            self.host.compact()

    def _write(self, *, swap: bool) -> None:
        for group, targets in zip(self.groups, self.targets or self._targets(), strict=True):
            with group.patch.gpu.active():
                group.write(targets, swap=swap)
                for place, flat in group.copies.items():
                    if group.jobs[place].write:
                        base: Any = group.jobs[place].base
                        base.tensor.copy_(flat.view(base.shape))

    def _targets(self) -> list[torch.Tensor | None]:
        """Where the changes of each group go."""
        found = []
        for group in self.groups:
            with group.patch.gpu.active():
                found.append(group.targets([job.write for job in group.jobs]))
        return found

    def revert(self) -> None:
        if self.host is not None:
            self.host.revert()


_MASTERS = 16
"""Added to the size of an element, to keep master weights apart."""

_INTEGERS = {dtype.itemsize: dtype.code for dtype in DTYPES if dtype.name in ("U8", "U16", "U32", "U64")}


def _groups(tensors: Iterable[tuple[Any, int]], default: torch.device | None = None) -> dict[tuple[torch.device | None, int], list[int]]:
    """The numbers of tensors by device and by what else must be the same to work on them together: the size of an element.

    What is on the host is one group, at None; where there is no tensor, it counts as one on the device `default`.
    """
    groups: dict[tuple[torch.device | None, int], list[int]] = {}
    for number, (bits, kind) in enumerate(tensors):
        device = bits.tensor.device if is_device(bits) else default if bits is None else None
        groups.setdefault((device, kind if device else 0), []).append(number)
    return groups


def _elements(job: ResolveJob, device: torch.device) -> torch.Tensor:
    """Those of the base in memory of their own; zeros if there is none."""
    if job.base is not None:
        return copied(job.base, device)
    return torch.zeros(max(job.count, 1), dtype=getattr(torch, f"int{job.dtype.width}"), device=device)[: job.count]


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
