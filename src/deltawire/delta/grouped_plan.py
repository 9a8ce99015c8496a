"""The plan of a delta of version 3, which codes the tensors of a payload type together and does not name them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..codec.base import Buffer, Codec, Resolution, ResolveGroup
from ..codec.bits import Bits, DeviceBits, Indices, on_gpu
from ..dtypes import PAYLOAD_TYPES, PayloadType, payload_type
from ..errors import BaseMismatch, CorruptDelta, StateNotWritable
from ..format.delta_file import ByteRange, GroupedDelta
from ..format.delta_files.grouped import group_id, split_id
from ..format.digest import Digest, TensorKeys
from ..tensors.bits import State, TensorBits, keys_of, named_bits
from ..tensors.columns import Columns
from ..tensors.names import check_names
from ..tensors.state import Progress, digest_tensors
from .overlaps import are_separate, check_overlap
from .patch import check_writable
from .plan import AddedTensor, check_added, check_structure, cut_parts, resolve_plan
from .progress import reporting


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that one payload is for, by their numbers in the plan."""

    type: PayloadType
    members: NDArray[np.int64]
    payload: ByteRange | None
    """The payload in the file's data; None if nothing changes."""


class GroupedPlan:
    """The groups of one delta, with the numbers of `Plan`.

    Parameters
    ----------
    state
        The state that the delta was made from.
    file
        The delta. Construction raises a `DeltaError` or `StateError` if it does not fit the state.
    """

    def __init__(self, state: State, file: GroupedDelta) -> None:
        self.file = file
        structure = file.structure
        columns = Columns.of(state) if file.file_parts is None else None
        if columns is None:
            check_names(state)
        check_structure(state, structure, structure.aliases.values())
        self._removed = set(structure.removed)
        tensors = len(state) - len(self._removed) + len(structure.added)
        if tensors != file.tensors:
            raise BaseMismatch(f"the delta leads to a state of {file.tensors:,} tensors, but from this state it would lead to {tensors:,}.")
        self.tensors: Sequence[TensorBits] = columns or [named_bits(name, state[name]) for name in sorted(state)]
        self._columns = columns or None
        if file.file_parts is not None:
            parts = file.file_parts.of([tensor.name for tensor in self.tensors], {tensor.name: tensor.dtype for tensor in self.tensors})
            self.tensors = cut_parts([tensor for tensor in self.tensors if tensor.name in parts], parts)
        self.added: Sequence[AddedTensor] = [(name, dtype, shape) for name, (dtype, shape) in sorted(structure.added.items())]
        keys = columns.layout.keys if columns else keys_of(self.tensors)
        self.keys = keys.followed_by(TensorKeys.of(self.added)) if self.added else keys
        if self.added:
            check_added(self.added, len(file.data))
        self.writes: NDArray[np.bool_] = np.zeros(len(self.tensors), np.bool_)
        self.changed: NDArray[np.int64] = np.zeros(len(self.tensors) + len(self.added), np.int64)
        self.numbers: NDArray[np.int64] = np.zeros_like(self.changed)
        self._copied: set[int] = set()
        """Tensors that are decoded from a copy, because they share memory with others that are written first."""
        self._unwritable: dict[int, StateNotWritable] = {}
        """Tensors that cannot be written. Whether they change is known once the delta is resolved."""
        self._groups = self._find_groups()
        self._aliases = self._find_aliases()

    def _find_groups(self) -> list[Group]:
        """Return the groups of the file, with all tensors of the new state except aliases."""
        targets = self.file.targets
        if self._columns is not None and not (self.file.structure.aliases or self._removed or self.added):
            return self._add_payloads({kind.code: members for kind, members in self._columns.layout.groups})
        apart = self._removed | self.file.structure.aliases.keys() | set(targets)
        found: dict[int, list[int]] = {}
        order = [(tensor.name, number, tensor.dtype) for number, tensor in enumerate(self.tensors) if tensor.name not in apart]
        if self.added:
            held = len(self.tensors)
            order = sorted(order + [(name, held + number, dtype) for number, (name, dtype, _) in enumerate(self.added)])
        for name, number, dtype in order:
            found.setdefault(payload_type(name, dtype).code, []).append(number)
        members = {code: np.array(numbers, np.int64) for code, numbers in found.items()}
        at = {tensor.name: number for number, tensor in enumerate(self.tensors)} if targets else {}
        for index, name in enumerate(targets, 1):
            if name not in at:
                raise CorruptDelta(f"the delta ties a tensor to {name!r}, which it does not cover.")
            kind = payload_type(name, self.tensors[at[name]].dtype)
            members[group_id(kind.code, index)] = np.array([at[name]], np.int64)
        return self._add_payloads(members)

    def _add_payloads(self, members: Mapping[int, NDArray[np.int64]]) -> list[Group]:
        """Return groups with their payloads; `members` are the tensors by id of their group."""
        payloads = self.file.groups
        ids = sorted(members.keys() | {group for group in payloads if not split_id(group)[0]})
        none = np.zeros(0, np.int64)
        groups = [Group(PAYLOAD_TYPES[split_id(group)[1]], members.get(group, none), payloads.get(group)) for group in ids]
        if len(payloads) != sum(group.payload is not None for group in groups):
            raise BaseMismatch("the delta ties tensors of other types than this state has.")
        return groups

    def _find_aliases(self) -> list[tuple[Group, int]]:
        """Return the aliases as groups of one tensor, each with the number of the tensor whose changes it has."""
        aliases = self.file.structure.aliases
        if not aliases:
            return []
        at = {tensor.name: number for number, tensor in enumerate(self.tensors)}
        of_target = {int(group.members[0]): group for group in self._groups[-len(self.file.targets) :]}
        found = []
        for name, target in sorted(aliases.items()):
            if name not in at:
                raise CorruptDelta(f"the delta ties {name!r}, which it does not cover.")
            tensor, tied = self.tensors[at[name]], self.tensors[at[target]]
            if tensor.dtype != tied.dtype or tensor.size != tied.size:
                raise CorruptDelta(f"the delta ties {name!r} to {target!r}, which has another type or size.")
            group = of_target[at[target]]
            found.append((Group(group.type, np.array([at[name]], np.int64), group.payload), at[target]))
        return found

    def mark_writes(self, codec: Codec, threads: int, *, deferred: bool) -> None:
        """See `Plan`."""
        same = {int(group.members[0]) for group, target in self._aliases if self._same_memory(int(group.members[0]), target)}
        is_plain = self._columns is not None and self._columns.are_separate  # then all tensors are contiguous
        if not is_plain and not are_separate([tensor for number, tensor in enumerate(self.tensors) if number not in same]):
            self._mark_tied_writes(codec, threads, deferred)
            return
        for group in [*self._groups, *(alias for alias, _ in self._aliases)]:
            if group.payload is None:
                continue
            held = group.members[group.members < len(self.tensors)]
            if is_plain and self._columns is not None:
                writable = self._columns.are_writable[held]
                self.writes[held[writable]] = True
                held = held[~writable]
            for number in held.tolist():
                if number not in same:
                    self._mark_write(number)

    def _mark_write(self, number: int) -> None:
        try:
            check_writable(self.tensors[number])
            self.writes[number] = True
        except StateNotWritable as error:
            self._unwritable[number] = error

    def check_writes(self) -> None:
        """See `Plan`."""
        for number, error in self._unwritable.items():
            if self.changed[number]:
                raise error

    def _same_memory(self, one: int, other: int) -> bool:
        return self.tensors[one].memory == self.tensors[other].memory

    def _mark_tied_writes(self, codec: Codec, threads: int, deferred: bool) -> None:
        """Decide what is written if tensors overlap. The delta is decoded first, only to find out what changes."""
        resolution = codec.resolution(threads, 0)
        resolve_plan(self, resolution, codec, threads, None)
        changing = np.flatnonzero(self.changed[: len(self.tensors)]).tolist()
        by_memory: dict[object, list[int]] = {}
        for number in changing:
            check_writable(self.tensors[number])
            by_memory.setdefault(self.tensors[number].memory, []).append(number)
        together: set[int] = set()
        for first, *rest in by_memory.values():
            self.writes[first] = True
            if not rest:
                continue
            changes = resolution.changes(self.numbers[[first, *rest]].tolist())
            together.add(first)
            together |= {number for number, found in zip(rest, changes[1:], strict=True) if is_same_change(found, changes[0])}
        check_overlap(
            [self.tensors[first] for first, *_ in by_memory.values()],
            [tensor for number, tensor in enumerate(self.tensors) if number not in together and not self.writes[number]],
            {self.tensors[number].name for number in changing},
        )
        if not deferred:
            self._copied = {number for first, *rest in by_memory.values() for number in rest}

    def resolve(self, resolution: Resolution, codec: Codec, threads: int, progress: Progress | None) -> tuple[Digest, Digest]:
        """See `Plan`."""
        with reporting(progress, 0 if progress is None else self._nbytes()):
            return resolve_together([self], resolution, codec, threads)[0]

    def digests_of_rest(self, codec: Codec, threads: int) -> tuple[Digest, Digest]:
        """Return the parts of the digests before and after that do not depend on elements of groups."""
        if not (self._removed or self.added):
            tag = self.keys.tag() if self._columns is None else self._columns.layout.tag
            return tag, tag
        removed = [tensor for tensor in self.tensors if tensor.name in self._removed]
        before = digest_tensors(removed, threads, codec)
        stays = np.ones(len(self.changed), np.bool_)
        stays[len(self.tensors) :] = False
        stays[[number for number, tensor in enumerate(self.tensors) if tensor.name in self._removed]] = False
        before += self.keys.tag(stays)
        stays[len(self.tensors) :] = True
        return before, self.keys.tag(stays)

    def rounds(self) -> tuple[Sequence[Group], Sequence[Group]]:
        """Return the groups that are decoded first, and all others.

        Aliases that are not written may have the memory of their targets. So they are decoded first.
        """
        if not self._aliases:
            return (), self._groups
        first = [group for group, _ in self._aliases if not self.writes[group.members[0]]]
        return first, [*self._groups, *(group for group, _ in self._aliases if self.writes[group.members[0]])]

    def _nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors) if self._columns is None else int(self._columns.layout.nbytes.sum())

    def resolve_group(self, group: Group, start: int) -> ResolveGroup:
        """Return the work on a group. The data that payloads are ranges of have those of this delta from byte `start` on."""
        bases: Sequence[Bits | None]
        if self._columns is not None and not self.added and not self._copied:
            bases, counts, seeds = self._columns.group(group.type.code, group.members)
            writes = self.writes[group.members]
        else:
            held, seeds = len(self.tensors), self.keys.seeds[group.members]
            numbers = group.members.tolist()
            bases = [self._base(number) if number < held else None for number in numbers]
            sizes = [self.tensors[number].size if number < held else math.prod(self.added[number - held][2]) for number in numbers]
            counts = np.array(sizes, np.int64)
            writes = np.append(self.writes, np.zeros(len(self.added), np.bool_))[group.members]
        is_uniform = bool(writes.all() or not writes.any())
        payload = None if group.payload is None else (start + group.payload[0], start + group.payload[1])
        return ResolveGroup(group.type, bases, counts, seeds, payload, bool(writes.any()) if is_uniform else writes.tolist())

    def _base(self, number: int) -> Bits:
        bits = self.tensors[number].bits
        if number not in self._copied:
            return bits
        return DeviceBits(bits.tensor.clone()) if on_gpu(bits) else bits.copy()


def resolve_together(plans: Sequence[GroupedPlan], resolution: Resolution, codec: Codec, threads: int) -> list[tuple[Digest, Digest]]:
    """Decode the deltas of several plans with one call of the codec. Return the digests before and after for each.

    The plans must not share memory that is written, and the resolution must be empty. Raises as `Plan.resolve` does.
    """
    data: Buffer = plans[0].file.data if len(plans) == 1 else codec.join([plan.file.data for plan in plans], threads)
    starts = itertools.accumulate((len(plan.file.data) for plan in plans[:-1]), initial=0)
    placed = list(zip(plans, starts, strict=True))
    digests = [plan.digests_of_rest(codec, threads) for plan in plans]
    rounds = [plan.rounds() for plan in plans]
    done = 0
    for turn in range(2):
        work = [(number, group) for number, groups in enumerate(rounds) for group in groups[turn]]
        if not work:
            continue
        outcomes = resolution.add_groups([placed[number][0].resolve_group(group, placed[number][1]) for number, group in work], data)
        for (number, group), outcome in zip(work, outcomes, strict=True):
            plan, (before, after) = plans[number], digests[number]
            plan.changed[group.members] = outcome.changed
            plan.numbers[group.members] = np.arange(done, done + group.members.size)
            done += group.members.size
            digests[number] = before + Digest(outcome.before), after + Digest(outcome.after)
    return digests


def is_same_change(one: tuple[Indices, Bits], other: tuple[Indices, Bits]) -> bool:
    """Tell whether two tensors have the same changes."""
    return all(_are_equal(a, b) for a, b in zip(one, other, strict=True))


def _are_equal(one: Indices | Bits, other: Indices | Bits) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    a, b = (side.tensor if on_gpu(side) else side for side in (one, other))
    return bool(a.shape == b.shape and (a == b).all())
