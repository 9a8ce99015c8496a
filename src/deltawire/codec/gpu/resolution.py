"""Resolutions on GPUs: groups with CUDA tensors go to the kernels, all others to the codec of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from .. import default_codec
from ..base import Buffer, GroupOutcome, Lanes, Outcomes, Pace, Resolution, ResolveGroup, ResolveJob, Sums
from ..bits import Bits, BitsColumn, DeviceBits, Indices, on_gpu
from . import device as devices
from .codec_stream import codec_stream
from .kernel_addresses import Column, joined
from .kernel_table import SUMS, KernelTable, Numbers
from .patch import DevicePatch
from .resolve import Resolved, resolve_table

_ON_HOST = -1
"""The number of the group of all tensors that the codec of the host resolves."""


@dataclass(slots=True)
class _Group:
    """Tensors that were resolved together."""

    patch: DevicePatch
    bases: Sequence[Bits | None]
    writes: NDArray[np.bool_]
    """Which changes are written to the bases."""
    addresses: NDArray[np.uint64]
    """The addresses of their elements."""
    copies: dict[int, torch.Tensor]
    """The elements of tensors that are added, or that the kernels cannot work on in place, by number in the group."""

    def targets(self, chosen: NDArray[np.bool_]) -> torch.Tensor | None:
        """Return the addresses to which the changes of some of the tensors go. Changes of a tensor with a copy go to the copy."""
        return self.patch.targets(np.where(chosen, self.addresses, np.uint64(0))) if chosen.any() else None

    def write(self, targets: torch.Tensor | None, *, swap: bool, sums: torch.Tensor | None = None) -> None:
        """Write to some of the tensors, on the current stream. A swap with `sums` also digests them."""
        if targets is not None and sums is not None:
            self.patch.exchange(targets, sums)
        elif targets is not None:
            self.patch.write(targets, swap=swap)
        for flat in self.copies.values():
            self.patch.gpu.keep(flat, self.patch.gpu.current())

    def compact(self) -> None:
        """Free the memory of tensors that are not written. Afterwards, changes cannot be listed."""
        self.copies = {number: flat for number, flat in self.copies.items() if self.writes[number]}
        if not self.writes.all():  # otherwise the bases, which may be columns, stay as they are
            self.bases = [self.bases[number] if write else None for number, write in enumerate(self.writes.tolist())]

    @property
    def digested(self) -> NDArray[np.bool_]:
        """The tensors that a swap digests: those that it writes where they are, in groups that change."""
        found = self.writes & (np.diff(self.patch.tile_starts) > 0)
        found[list(self.copies)] = False
        return found

    def changes(self, numbers: Sequence[int]) -> list[tuple[Indices, Bits]]:
        found: list[tuple[Indices, Bits]] = []
        for number, (indices, values) in zip(numbers, self.patch.changes(numbers), strict=True):
            base = self.bases[number]
            if self.patch.width < 8 and self._itemsize(number) > 1:
                indices, values = self._whole_elements(number, indices, values)
            if base is None or on_gpu(base):
                found.append((indices, DeviceBits(values)))
            else:  # a tensor of the host that is in a group with tensors of a GPU
                found.append((indices.cpu().numpy(), values.cpu().numpy().view(base.dtype)))
        return found

    def _itemsize(self, number: int) -> int:
        base = self.bases[number]
        return self.copies[number].element_size() if base is None else base.itemsize

    def _whole_elements(self, number: int, indices: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn changed bytes into changed elements of the tensor, which have several bytes."""
        base, itemsize = self.bases[number], self._itemsize(number)
        flat = self.copies.get(number)
        if flat is None:
            assert on_gpu(base)
            flat = base.flat()
        elements, inverse = torch.unique_consecutive(indices // itemsize, return_inverse=True)
        found = flat[elements]
        found.view(torch.int8)[inverse * itemsize + indices % itemsize] = values
        return elements, found


@dataclass(frozen=True, slots=True)
class _GroupSums:
    """The word sums of a group's tensors, which a swap computes."""

    memory: torch.Tensor
    tensors: Numbers
    """The numbers, in the resolution, of the tensors that are digested."""
    members: Numbers
    """Their numbers in the group."""


@dataclass(slots=True)
class GpuResolution:
    """A `codec.base.Resolution` on GPUs. Nothing is written before `settle`."""

    device: torch.device
    host: Resolution | None
    groups: list[_Group] = field(default_factory=list)
    members: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """For each tensor, its group and its number in the group."""
    host_tensors: int = 0
    targets: list[torch.Tensor | None] = field(default_factory=list)
    """The targets of each group, once nothing more will be added."""
    digested: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """See `codec.base.DigestingExchange`. It is known once nothing more will be added."""
    sums: list[_GroupSums] = field(default_factory=list)
    """The word sums of each group, once nothing more will be added."""
    pace: Pace | None = None
    """Waits between parts of the work. None if nothing waits."""

    def add(self, jobs: Sequence[ResolveJob], data: Buffer) -> Outcomes:
        found = Outcomes(np.zeros(len(jobs), np.int64), np.zeros((len(jobs), 4), np.uint32), np.zeros((len(jobs), 4), np.uint32))
        members = np.zeros((len(jobs), 2), np.int64)
        for (device, _), numbers in group_by_device(((job.base, job.dtype.itemsize) for job in jobs), self.device).items():
            mine = jobs if len(numbers) == len(jobs) else [jobs[i] for i in numbers]
            outcomes: Outcomes | Resolved
            if device is None:
                outcomes = self._on_host().add(mine, data)
                members[numbers] = self._host_members(len(mine))
            else:
                members[numbers] = self._device_members(len(mine))
                outcomes = self._add_jobs(mine, data, device)
            found.changed[numbers], found.before[numbers], found.after[numbers] = outcomes.changed, outcomes.before, outcomes.after
        self.members = np.concatenate([self.members, members])
        return found

    def add_groups(self, groups: Sequence[ResolveGroup], data: Buffer) -> Sequence[GroupOutcome]:
        """See `codec.base.Resolution`. A group with tensors on a GPU is resolved there; tensors of the host are copied to it."""
        found: dict[int, GroupOutcome] = {}
        members: dict[int, NDArray[np.int64]] = {}
        sets: dict[tuple[torch.device | None, int], list[int]] = {}
        for number, group in enumerate(groups):
            device = _device_of(group, self.device)
            sets.setdefault((device, 0 if device is None else group.type.width), []).append(number)
        for (device, _), numbers in sets.items():
            mine = [groups[number] for number in numbers]
            each = [group.counts.size for group in mine]
            if device is None:
                outcomes = self._on_host().add_groups(mine, data)
                rows = self._host_members(sum(each))
            else:
                rows = self._device_members(sum(each))
                outcomes = self._add_groups(mine, data, device)
            if len(sets) == 1:
                self.members = np.concatenate([self.members, rows])
                return outcomes
            found.update(zip(numbers, outcomes, strict=True))
            members.update(zip(numbers, np.split(rows, np.cumsum(each)[:-1]), strict=True))
        self.members = np.concatenate([self.members, *(members[number] for number in range(len(groups)))])
        return [found[number] for number in range(len(groups))]

    def _on_host(self) -> Resolution:
        if self.host is None:
            default_codec()  # raises `CodecUnavailable` with the reason
        assert self.host is not None
        return self.host

    def _host_members(self, count: int) -> NDArray[np.int64]:
        self.host_tensors += count
        return np.stack([np.full(count, _ON_HOST), np.arange(self.host_tensors - count, self.host_tensors)], axis=1)

    def _device_members(self, count: int) -> NDArray[np.int64]:
        return np.stack([np.full(count, len(self.groups)), np.arange(count)], axis=1)

    def _add_jobs(self, jobs: Sequence[ResolveJob], data: Buffer, device: torch.device) -> Resolved:
        counts, seeds = np.array([job.count for job in jobs], np.int64), np.array([job.seed for job in jobs], np.uint64)
        codes, writes = np.array([job.dtype.code for job in jobs], np.uint8), np.array([job.write for job in jobs], np.bool_)
        width = jobs[0].dtype.width
        with codec_stream(device):
            bases = [job.base for job in jobs]
            addresses, copies = _elements(bases, counts, np.full(counts.size, width), device)
            table = KernelTable.of_tensors(width, codes, addresses, counts, seeds)
            payloads = [job.payload for job in jobs]
            patch, resolved = resolve_table(table, payloads, data, devices.gpu_at(device), groups=False, pace=self.pace)
        self.groups.append(_Group(patch, bases, writes, addresses, copies))
        return resolved

    def _add_groups(self, groups: Sequence[ResolveGroup], data: Buffer, device: torch.device) -> list[GroupOutcome]:
        """Resolve groups of one width."""
        each = [group.counts.size for group in groups]
        counts, seeds = np.concatenate([group.counts for group in groups]), np.concatenate([group.seeds for group in groups])
        types = [group.type for group in groups]
        widths, factors = np.repeat([(kind.dtype.width, kind.per_element) for kind in types], each, axis=0).T
        uniform = [group.writes for group in groups if isinstance(group.writes, bool)]
        if len(uniform) == len(groups):
            writes = np.repeat(np.array(uniform, np.bool_), each)
        else:
            writes = np.concatenate([np.full(size, group.writes, np.bool_) for size, group in zip(each, groups, strict=True)])
        kinds = [(size, kind.code) for size, kind in zip(each, types, strict=True)]
        with codec_stream(device):
            bases = joined([group.bases for group in groups])
            addresses, copies = _elements(bases, counts, widths, device)
            table = KernelTable.of_groups(groups[0].type.width, kinds, addresses, counts * factors, seeds)
            payloads = [group.payload for group in groups]
            patch, resolved = resolve_table(table, payloads, data, devices.gpu_at(device), groups=True, pace=self.pace)
        self.groups.append(_Group(patch, bases, writes, addresses, copies))
        starts, ends = table.group_starts, table.group_ends
        totals = _totals(resolved.before, starts, ends), _totals(resolved.after, starts, ends)
        facts = zip(starts.tolist(), ends.tolist(), *totals, strict=True)
        return [GroupOutcome(resolved.changed[first:end], before, after) for first, end, before, after in facts]

    def changes(self, tensors: Sequence[int]) -> Sequence[tuple[Indices, Bits]]:
        wanted = self.members[np.array(tensors, np.int64)]
        found: dict[int, tuple[Indices, Bits]] = {}
        for group in np.unique(wanted[:, 0]).tolist():
            rows = np.flatnonzero(wanted[:, 0] == group)
            numbers = wanted[rows, 1].tolist()
            if group == _ON_HOST:
                found.update(zip(rows.tolist(), self._on_host().changes(numbers), strict=True))
            else:
                with self.groups[group].patch.gpu.active():
                    found.update(zip(rows.tolist(), self.groups[group].changes(numbers), strict=True))
        return [found[row] for row in range(len(tensors))]

    def dense(self, tensors: Sequence[int]) -> Sequence[Bits]:
        wanted = self.members[np.array(tensors, np.int64)].tolist()
        found: list[Bits] = []
        for number in {group for group, _ in wanted if group != _ON_HOST}:
            group = self.groups[number]
            with group.patch.gpu.active():
                group.write(group.targets(np.array([base is None for base in group.bases], np.bool_)), swap=False)
        for member, number in wanted:
            if member == _ON_HOST:
                found += self._on_host().dense([number])
            else:
                found.append(DeviceBits(self.groups[member].copies[number]))
        return found

    def settle(self) -> None:
        """Write, on the current stream of each device."""
        self._write(swap=False)
        if self.host is not None:
            self.host.settle()

    def exchange(self, *, wait: bool = True) -> None:
        """See `codec.base.Resolution`. Work goes to the current stream of each device. With `wait`, it is done when this returns."""
        self._exchange(digest=False)
        if wait:
            self._wait()

    def exchange_and_digest(self) -> Callable[[], Sums]:
        """See `codec.base.DigestingExchange`. Work goes to the current stream of each device."""
        self._exchange(digest=True)

        def wait() -> Sums:
            found = np.zeros((self.digested.size, 4), np.uint32)
            for sums in self.sums:
                found[sums.tensors] = sums.memory.cpu().numpy().view(SUMS)["before"][sums.members]
            self._wait()
            return found

        return wait

    def _exchange(self, *, digest: bool) -> None:
        self._write(swap=True, digest=digest)
        if self.host is not None:
            self.host.exchange()

    def _wait(self) -> None:
        for gpu in {id(group.patch.gpu): group.patch.gpu for group in self.groups}.values():
            gpu.current().synchronize()

    def compact(self) -> GpuResolution:
        """Make the targets that `exchange` needs, so that it cannot fail. Keep only patches, and the tensors that they change."""
        numbers = [number for number, group in enumerate(self.groups) if group.writes.any()]
        groups = [self.groups[number] for number in numbers]
        digested, found = np.zeros(len(self.members), np.bool_), []
        for number, group in zip(numbers, groups, strict=True):
            group.compact()
            rows = np.flatnonzero(self.members[:, 0] == number)
            rows = rows[group.digested[self.members[rows, 1]]]
            with group.patch.gpu.active():
                found.append(_GroupSums(group.patch.new_sums(), rows, self.members[rows, 1]))
            digested[rows] = True
        targets = _targets(groups)
        # Nothing has changed so far, so that this can be called again if there was no memory for the targets.
        self.groups, self.targets, self.sums, self.digested, self.members = groups, targets, found, digested, self.members[:0]
        if self.host is not None:
            self.host.compact()
        return self

    def _write(self, *, swap: bool, digest: bool = False) -> None:
        rooms = [sums.memory if digest else None for sums in self.sums] or [None] * len(self.groups)
        for group, targets, sums in zip(self.groups, self.targets or _targets(self.groups), rooms, strict=True):
            with group.patch.gpu.active():
                group.write(targets, swap=swap, sums=sums)
                for number, flat in group.copies.items():
                    base = group.bases[number]
                    if base is None or not group.writes[number]:
                        continue
                    if on_gpu(base):
                        base.tensor.copy_(flat.view(base.shape))
                    else:
                        base[...] = flat.cpu().numpy().view(base.dtype).reshape(base.shape)

    def revert(self) -> None:
        if self.host is not None:
            self.host.revert()


def _targets(groups: Sequence[_Group]) -> list[torch.Tensor | None]:
    """Return the addresses to which the changes of each group go."""
    found = []
    for group in groups:
        with group.patch.gpu.active():
            found.append(group.targets(group.writes))
    return found


def group_by_device(
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


def _device_of(group: ResolveGroup, default: torch.device) -> torch.device | None:
    """Return the device on which a group is resolved: that of its first tensor on a GPU; None is the host."""
    if isinstance(group.bases, BitsColumn):
        return group.bases.device
    for base in group.bases:
        if on_gpu(base):
            return base.device
    return default if all(base is None for base in group.bases) else None


def _elements(
    bases: Sequence[Bits | None], counts: Numbers, widths: NDArray[np.int64], device: torch.device
) -> tuple[NDArray[np.uint64], dict[int, torch.Tensor]]:
    """Return addresses at which kernels can read tensors, and the copies among them. A tensor that is added begins with zeros."""
    column = Column.of(bases, device)
    addresses, made = column.copied(column.missing, device)
    copies = dict(zip(column.missing.tolist(), made, strict=True))
    added = [] if isinstance(bases, BitsColumn) else [number for number, base in enumerate(bases) if base is None]
    for number in added:
        count = int(counts[number])
        copies[number] = torch.zeros(max(count, 1), dtype=getattr(torch, f"int{widths[number]}"), device=device)[:count]
        addresses[number] = copies[number].data_ptr()
    return addresses, copies


def _totals(sums: Sums, starts: Numbers, ends: Numbers) -> list[Lanes]:
    """Return the sums over rows `starts` … `ends`, for each of these ranges."""
    upto = np.concatenate([np.zeros((1, 4), np.uint32), sums.cumsum(axis=0, dtype=np.uint32)])
    return list(map(tuple, (upto[ends] - upto[starts]).tolist()))
