"""Where the parts that a process publishes come from. Quantised parts are made when they are needed, some tensors at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ...tensors.bits import TensorPart, tensor_bits
from ..snapshots import SnapshotDevice, copy_tensors, new_array
from ..upload.segments import Segment
from .division import Division, Parts


class PartsSource(Protocol):
    """Gives the parts that one process publishes. It may be asked for the same parts several times."""

    @property
    def whole(self) -> Parts | None:
        """All parts, if they exist already. None: they are made by `make`."""
        ...

    @property
    def located(self) -> Mapping[str, Any]:
        """Published names with tensors that are on the devices where the parts are."""
        ...

    def make(self, names: Iterable[str], *, may_be_unwritten: bool = False) -> Parts:
        """Return the parts of some tensors. Raises `NonFiniteWeights` if the source refuses such weights.

        With `may_be_unwritten`, the parts are only encoded, so that codes of weights on a GPU need no memory (`UnwrittenTensor`).
        """
        ...

    def written_bytes(self, name: str) -> int:
        """Return the bytes of new memory that the part of a tensor takes if it may be unwritten."""
        ...


@dataclass(frozen=True, slots=True)
class WholeParts:
    """Parts that exist already."""

    whole: Parts

    @property
    def located(self) -> Mapping[str, Any]:
        return {name: part.elements for name, part in self.whole.items()}

    def make(self, names: Iterable[str], *, may_be_unwritten: bool = False) -> Parts:
        return {name: self.whole[name] for name in names}

    def written_bytes(self, name: str) -> int:
        return 0


def copied_parts(parts: Parts, located: Mapping[str, Any], device: SnapshotDevice) -> Parts:
    """Return a copy of parts in memory of their own, where copies of tensors that are on the devices of `located` are kept."""
    copies: Parts = {}
    for name, part in parts.items():
        bits = tensor_bits(name, part.elements)
        memory = new_array(bits.dtype, (bits.size,), tensor_bits(name, located[name]).bits, device)
        copies[name] = TensorPart(memory, part.shape, part.start)
    copy_tensors(parts, copies)
    return copies


def copy_from(source: PartsSource, division: Division, segments: Iterable[Segment], device: SnapshotDevice) -> Parts:
    """Return a copy of all parts of a source in memory of their own, where copies of such parts are kept. They are made by segments."""
    copies: Parts = {}
    for segment in segments:
        copies |= copied_parts(source.make(division.table.names_of(segment)), source.located, device)
    return copies
