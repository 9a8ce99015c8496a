"""The GPU codec: jobs on CUDA tensors go to the kernels, all others to the codec of the host."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...dtypes import DTYPES
from ...errors import CodecUnavailable
from .. import default_codec
from ..base import Buffer, EncodeJob, Encodings, Outcomes, Resolution, ResolveJob, Sums
from ..bits import Bits, DeviceBits, Indices, MasterWeightBits, on_gpu
from .device import gpu_at
from .digest import digest_tensors
from .encode import encode_tensors
from .kernel_addresses import address_in_place, flat_on, readable_rows
from .kernel_table import KernelTable
from .patch import DevicePatch
from .resolve import resolve_tensors


class GpuCodec:
    """A codec that works on the device of the tensors, on its own stream, while other streams go on.

    A call starts after the work that the calling thread has put on its current stream. When a call returns, it has read all that it reads.

    Parameters
    ----------
    device
        The device for tensors that are added.
    """

    name = "gpu"
    prefers_whole_state = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def encode(self, jobs: Sequence[EncodeJob], threads: int) -> Encodings:
        found: list[tuple[Sequence[int], Encodings]] = []
        groups = _groups((job.new if on_gpu(job.new) else job.base, _kind(job.new, job.dtype.itemsize)) for job in jobs)
        for (device, kind), group in groups.items():
            mine = jobs if len(group) == len(jobs) else [jobs[i] for i in group]
            if device is None:
                found.append((group, default_codec().encode(mine, threads)))
                continue
            with _codec_stream(device) as stream:
                for rows, (bases, news) in readable_rows([[job.base for job in mine], [job.new for job in mine]], device):
                    part = mine[rows]
                    facts = [job.new.size for job in part], [job.seed for job in part], [job.dtype.code for job in part]
                    table = KernelTable.of(bases, *facts, news, [job.base is None for job in part], next_is_float32=kind > _MASTERS)
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
        groups = _groups((bits, _kind(bits, bits.itemsize)) for bits, _ in arrays)
        for (device, kind), group in groups.items():
            if device is None:
                found[group] = default_codec().digest([arrays[i] for i in group], threads)
                continue
            code = _INTEGERS[kind % _MASTERS]
            with _codec_stream(device):
                # Master weights are rounded into copies, so they are digested one tensor at a time.
                for part in ([i] for i in group) if kind > _MASTERS else [group]:
                    column = [bits.rounded() if isinstance(bits, MasterWeightBits) else bits for bits in (arrays[i][0] for i in part)]
                    for rows, (bases,) in readable_rows([column], device):
                        count = [bits.size for bits in column[rows]]
                        table = KernelTable.of(bases, count, [arrays[i][1] for i in part[rows]], [code] * len(bases))
                        found[part[rows]] = digest_tensors(table, gpu_at(device))
                    del column  # it must be freed before the next copies are made
        return found

    def write_elements(self, bits: Bits, indices: Indices, values: Bits) -> None:
        if not on_gpu(bits):
            default_codec().write_elements(bits, indices, values)
            return
        target = bits.tensor
        at = torch.as_tensor(indices, device=target.device)
        if at.numel() and not 0 <= int(at.min()) <= int(at.max()) < target.numel():
            raise IndexError("index")
        new = values.tensor if on_gpu(values) else torch.from_numpy(values.view(f"i{values.itemsize}"))
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
    """The addresses of their elements."""
    copies: dict[int, torch.Tensor]
    """The elements of tensors that are added, or that the kernels cannot work on in place, by number in the group."""

    def targets(self, which: Sequence[bool]) -> torch.Tensor | None:
        """Return the addresses to which the changes of some of the tensors go. Changes of a tensor with a copy go to the copy."""
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
    """A `codec.base.Resolution` on GPUs. Nothing is written before `settle`."""

    device: torch.device
    host: Resolution | None
    groups: list[_Group] = field(default_factory=list)
    members: list[tuple[int, int]] = field(default_factory=list)
    """For each tensor, its group (−1 is that of the host) and its number in the group."""
    host_tensors: int = 0
    targets: list[torch.Tensor | None] = field(default_factory=list)
    """The targets of each group, once nothing more will be added."""

    def add(self, jobs: Sequence[ResolveJob], data: Buffer) -> Outcomes:
        found = Outcomes(np.zeros(len(jobs), np.int64), np.zeros((len(jobs), 4), np.uint32), np.zeros((len(jobs), 4), np.uint32))
        groups = _groups(((job.base, job.dtype.itemsize) for job in jobs), self.device)
        members: dict[int, tuple[int, int]] = {}
        for (device, _), group in groups.items():
            mine = jobs if len(group) == len(jobs) else [jobs[i] for i in group]
            if device is None:
                outcomes = self._add_on_host(mine, data)
                members.update({i: (-1, self.host_tensors + n) for n, i in enumerate(group)})
                self.host_tensors += len(group)
            else:
                outcomes = self._add_on_device(mine, data, device)
                members.update({i: (len(self.groups) - 1, n) for n, i in enumerate(group)})
            found.changed[group], found.before[group], found.after[group] = outcomes.changed, outcomes.before, outcomes.after
        self.members += [members[i] for i in range(len(jobs))]
        return found

    def _add_on_host(self, jobs: Sequence[ResolveJob], data: Buffer) -> Outcomes:
        if self.host is None:
            default_codec()  # raises `CodecUnavailable` with the reason
        assert self.host is not None
        return self.host.add(jobs, data)

    def _add_on_device(self, jobs: Sequence[ResolveJob], data: Buffer, device: torch.device) -> Outcomes:
        with _codec_stream(device):
            bases = [None if job.base is None else address_in_place(job.base, device) for job in jobs]
            copies = {n: _elements(jobs[n], device) for n, base in enumerate(bases) if base is None}
            addresses = [copies[n].data_ptr() if base is None else base for n, base in enumerate(bases)]
            facts = [job.count for job in jobs], [job.seed for job in jobs], [job.dtype.code for job in jobs]
            table = KernelTable.of(addresses, *facts)
            patch, outcomes = resolve_tensors(table, [job.payload for job in jobs], data, gpu_at(device))
        self.groups.append(_Group(patch, jobs, table.base, copies))
        return outcomes

    def changes(self, tensors: Sequence[int]) -> Sequence[tuple[Indices, Bits]]:
        found: dict[tuple[int, int], tuple[Indices, Bits]] = {}
        wanted = [self.members[tensor] for tensor in tensors]
        for group in {group for group, _ in wanted}:
            numbers = [number for other, number in wanted if other == group]
            if group < 0:
                assert self.host is not None
                found.update(zip([(-1, number) for number in numbers], self.host.changes(numbers), strict=True))
            else:
                patch = self.groups[group].patch
                with patch.gpu.active():
                    changes = patch.changes()
                found.update({(group, number): (changes[number][0], DeviceBits(changes[number][1])) for number in numbers})
        return [found[member] for member in wanted]

    def dense(self, tensors: Sequence[int]) -> Sequence[Bits]:
        wanted = [self.members[tensor] for tensor in tensors]
        for number in {group for group, _ in wanted}:
            group = self.groups[number]
            with group.patch.gpu.active():
                group.write(group.targets([job.base is None for job in group.jobs]), swap=False)
        return [DeviceBits(self.groups[group].copies[number]) for group, number in wanted]

    def settle(self) -> None:
        """Write, on the current stream of each device."""
        self._write(swap=False)
        if self.host is not None:
            self.host.settle()

    def exchange(self) -> None:
        """See `codec.base.Resolution`. Work goes to the current stream of each device. It is done when this returns, for any stream."""
        self._write(swap=True)
        for gpu in {id(group.patch.gpu): group.patch.gpu for group in self.groups}.values():
            gpu.current().synchronize()
        if self.host is not None:
            self.host.exchange()

    def compact(self) -> None:
        """Make the targets that `exchange` needs, so that it cannot fail. On a GPU only the patch is kept, which cannot be smaller."""
        self.targets = self._targets()
        if self.host is not None:
            self.host.compact()

    def _write(self, *, swap: bool) -> None:
        for group, targets in zip(self.groups, self.targets or self._targets(), strict=True):
            with group.patch.gpu.active():
                group.write(targets, swap=swap)
                for number, flat in group.copies.items():
                    base = group.jobs[number].base
                    if group.jobs[number].write and on_gpu(base):
                        base.tensor.copy_(flat.view(base.shape))

    def _targets(self) -> list[torch.Tensor | None]:
        """Return the addresses to which the changes of each group go."""
        found = []
        for group in self.groups:
            with group.patch.gpu.active():
                found.append(group.targets([job.write for job in group.jobs]))
        return found

    def revert(self) -> None:
        if self.host is not None:
            self.host.revert()


_MASTERS = 16
"""Added to the size of an element to put master weights into separate groups."""

_INTEGERS = {dtype.itemsize: dtype.code for dtype in DTYPES if dtype.name in ("U8", "U16", "U32", "U64")}


def _kind(bits: Bits, itemsize: int) -> int:
    """Return a number that is the same for tensors that kernels can work on together, if they are on one device."""
    return itemsize + _MASTERS * isinstance(bits, MasterWeightBits)


def _groups(
    tensors: Iterable[tuple[Bits | None, int]], default: torch.device | None = None
) -> dict[tuple[torch.device | None, int], list[int]]:
    """Return the numbers of tensors, grouped by device and kind.

    All tensors on the host are one group with the device None. A tensor without bits counts as a tensor on the device `default`.
    """
    groups: dict[tuple[torch.device | None, int], list[int]] = {}
    for number, (bits, kind) in enumerate(tensors):
        device = bits.device if on_gpu(bits) else default if bits is None else None
        groups.setdefault((device, kind if device else 0), []).append(number)
    return groups


def _elements(job: ResolveJob, device: torch.device) -> torch.Tensor:
    """Return a copy of the base's elements; zeros if there is no base."""
    if job.base is not None:
        return flat_on(device, job.base)
    return torch.zeros(max(job.count, 1), dtype=getattr(torch, f"int{job.dtype.width}"), device=device)[: job.count]


class _codec_stream:
    """A context in which the calling thread's work goes to the codec's stream.

    That work starts after earlier work of the caller's stream, and later work of the caller's stream starts after it.
    """

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
    try:
        default_codec()
    except CodecUnavailable:
        return False
    return True
