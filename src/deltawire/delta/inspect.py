"""What a delta file says without the state it was made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..codec.native import inspect_payload
from ..dtypes import DTYPES
from ..errors import CorruptDelta
from ..format import delta_file
from ..format.delta_file import DeltaBytes
from ..format.digest import Digest

_CHUNK_MODES = ("same", "coded", "raw")
_VALUE_MODES = ("unit", "runs", "direct", "symbols")


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One payload. All elements of a raw chunk count as changed, because it says nothing about its base."""

    name: str
    dtype: str
    elements: int
    changed: int
    bytes: int
    modes: Mapping[str, int]
    """Elements by the mode of their chunk: same, coded, raw."""
    values: Mapping[str, int]
    """Changed elements by how their values are coded: unit, runs, direct, symbols, raw."""
    steps: Sequence[int]
    """Changed elements by the size of their step in ULPs: 1, 2–3, 4–7, …. Elements that are coded as symbols or raw are not counted."""
    density: Sequence[tuple[int, int]]
    """Elements and changed elements, chunk by chunk."""


@dataclass(frozen=True, slots=True)
class DeltaFacts:
    """What a delta file says: its digests, its payloads, and how the set of tensors changes."""

    bytes: int
    before: Digest
    after: Digest
    tensors: Sequence[TensorFacts]
    added: Mapping[str, tuple[str, tuple[int, ...]]]
    removed: Sequence[str]
    aliases: Mapping[str, str]


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
        [_facts(name, file.data[slice(*payload)]) for name, payload in file.payloads.items()],
        {name: (dtype.name, shape) for name, (dtype, shape) in structure.added.items()},
        structure.removed,
        structure.aliases,
    )


def _facts(name: str, payload: memoryview) -> TensorFacts:
    if not len(payload) or payload[0] >= len(DTYPES):
        raise CorruptDelta(f"the payload of {name!r} has an unknown element type.")
    dtype = DTYPES[payload[0]]
    chunks, by_mode, by_length = inspect_payload(payload, dtype)
    modes = {label: sum(elements for mode, elements, _, _ in chunks if mode == code) for code, label in enumerate(_CHUNK_MODES)}
    values = dict(zip(_VALUE_MODES, by_mode, strict=True)) | {"raw": modes["raw"]}
    last = max((length for length, count in enumerate(by_length) if count), default=-1)
    return TensorFacts(
        name,
        dtype.name,
        sum(elements for _, elements, _, _ in chunks),
        sum(changed for _, _, changed, _ in chunks),
        len(payload),
        modes,
        values,
        list(by_length[: last + 1]),
        [(elements, changed) for _, elements, changed, _ in chunks],
    )
