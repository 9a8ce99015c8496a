"""Reads a delta file without the state that it was made from, and lists the tensors of such a state that it changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..codec.native import Facts, inspect_group, inspect_payload
from ..dtypes import DTYPES, PAYLOAD_TYPES, payload_type
from ..errors import CorruptDelta
from ..format import delta_file
from ..format.delta_file import DeltaBytes, GroupedDelta, NamedDelta
from ..format.delta_files.grouped import split_id
from ..format.digest import Digest
from ..tensors.bits import State
from ..tensors.state import codec_for, thread_count
from .plan import resolve_plan
from .resolve import plan_delta

_CHUNK_MODES = ("same", "coded", "raw")
_RAW = _CHUNK_MODES.index("raw")
_VALUE_MODES = ("unit", "runs", "direct", "symbols")
_TILE = 1 << 14

MOST_RANGES = 4096
"""Most ranges of a payload whose changes are counted apart. A hostile file could have a chunk for every few bytes."""


@dataclass(frozen=True, slots=True)
class PayloadFacts:
    """One payload: that of a tensor, or in version 3 that of a group of tensors.

    All elements of a raw chunk count as changed, because it says nothing about its base.
    """

    name: str | None
    """The tensor that the payload is for; None if it is for all tensors of its type that share no memory."""
    dtype: str
    elements: int
    """The elements that the payload covers; for a group the most that there can be, because the file counts them in tiles of 2^14."""
    changed: int
    bytes: int
    modes: Mapping[str, int]
    """Elements by the mode of their chunk: same, coded, raw."""
    values: Mapping[str, int]
    """Changed elements by how their values are coded: unit, runs, direct, symbols, raw."""
    steps: Sequence[int]
    """Changed elements by the size of their step in ULPs: 1, 2–3, 4–7, …. Elements that are coded as symbols or raw are not counted."""
    density: Sequence[tuple[int, int]]
    """Elements and changed elements, chunk by chunk. If there are more than `MOST_RANGES` chunks, each entry is for several neighbours."""

    @property
    def label(self) -> str:
        """The tensors that the payload is for, in words."""
        return f"all {self.dtype} tensors" if self.name is None else self.name


@dataclass(frozen=True, slots=True)
class DeltaFacts:
    """The contents of a delta file: its digests, its payloads, and how the set of tensors changes."""

    bytes: int
    before: Digest
    after: Digest
    payloads: Sequence[PayloadFacts]
    added: Mapping[str, tuple[str, tuple[int, ...]]]
    removed: Sequence[str]
    aliases: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """The changes of a delta to one tensor of its base. `elements` are 4-bit codes if the elements of the tensor hold such codes."""

    name: str
    dtype: str
    elements: int
    changed: int


def list_changes(base: State, delta: DeltaBytes, *, threads: int | None = None) -> list[TensorFacts]:
    """Return the tensors that a delta changes, in the order of names. Raise as `resolve_delta` does if it was not made from `base`.

    Parameters
    ----------
    base
        The state that the delta was made from.
    delta
        The bytes of a delta file.
    threads
        The number of threads to use; by default, as many as there are processors that this process may use.
    """
    plan = plan_delta(base, delta_file.parse(delta))
    codec = codec_for(plan.tensors)
    resolve_plan(plan, codec.resolution(thread_count(threads), 0), codec, thread_count(threads), None)
    changing = ((plan.tensors[number], int(plan.changed[number])) for number in np.flatnonzero(plan.changed[: len(plan.tensors)]).tolist())
    kinds = ((tensor, payload_type(tensor.name, tensor.dtype), changed) for tensor, changed in changing)
    return [TensorFacts(tensor.name, kind.name, tensor.size * kind.per_element, changed) for tensor, kind, changed in kinds]


def inspect_delta(delta: DeltaBytes) -> DeltaFacts:
    """Return what a delta file says without its base. Raise a `DeltaError` if the file is not a valid delta.

    Parameters
    ----------
    delta
        The bytes of a delta file.
    """
    file = delta_file.parse(delta)
    structure = file.structure
    return DeltaFacts(
        memoryview(delta).nbytes,
        file.before,
        file.after,
        _group_facts(file) if isinstance(file, GroupedDelta) else _named_facts(file),
        {name: (dtype.name, shape) for name, (dtype, shape) in structure.added.items()},
        structure.removed,
        structure.aliases,
    )


def _group_facts(file: GroupedDelta) -> list[PayloadFacts]:
    names = [None, *file.targets]
    found = []
    for group, payload in file.groups.items():
        target, code = split_id(group)
        data, kind = file.data[slice(*payload)], PAYLOAD_TYPES[code]
        found.append(_facts(names[target], kind.name, len(data), inspect_group(data, kind), _TILE))
    return found


def _named_facts(file: NamedDelta) -> list[PayloadFacts]:
    found = []
    for name, payload in file.payloads.items():
        data = file.data[slice(*payload)]
        if not len(data) or data[0] >= len(DTYPES):
            raise CorruptDelta(f"the payload of {name!r} has an unknown element type.")
        found.append(_facts(name, DTYPES[data[0]].name, len(data), inspect_payload(data, DTYPES[data[0]]), 1))
    return found


def _facts(name: str | None, dtype: str, size: int, facts: Facts, unit: int) -> PayloadFacts:
    chunks, by_mode, by_length = facts
    mode, sizes, changed, _ = chunks.T
    elements = [unit * int(sizes[mode == code].sum()) for code in range(len(_CHUNK_MODES))]
    values = dict(zip(_VALUE_MODES, by_mode, strict=True)) | {"raw": int(changed[mode == _RAW].sum())}
    last = max((length for length, count in enumerate(by_length) if count), default=-1)
    return PayloadFacts(
        name,
        dtype,
        sum(elements),
        int(changed.sum()),
        size,
        dict(zip(_CHUNK_MODES, elements, strict=True)),
        values,
        list(by_length[: last + 1]),
        [(unit * count, changes) for count, changes in zip(_merged(sizes), _merged(changed), strict=True)],
    )


def _merged(column: NDArray[np.int64]) -> list[int]:
    """Return one number for each chunk, or the sums of neighbours if there are too many chunks."""
    if column.size > MOST_RANGES:
        column = np.add.reduceat(column, np.arange(MOST_RANGES) * column.size // MOST_RANGES)
    found: list[int] = column.tolist()
    return found
