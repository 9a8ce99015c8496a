"""What a codec is: operations on bits, with the same bytes from every implementation (docs/format.md §2–5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..dtypes import DType

Bits: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""A tensor as unsigned integers of its element width, any shape and strides."""

Buffer: TypeAlias = bytes | bytearray | memoryview
Lanes: TypeAlias = tuple[int, int, int, int]
"""The four 32-bit lanes of a digest."""


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """One tensor to encode; `base` is None for a tensor that appears (it is coded against zeros)."""

    base: Bits | None
    new: Bits
    dtype: DType
    seed: int


class Encoded(NamedTuple):
    """A payload in pieces (none at all where nothing changes), and the word sums (digest less the tag) of both sides.

    `before` is all zeros where the job had no base.
    """

    payload: Sequence[Buffer]
    changed: int
    before: Lanes
    after: Lanes


@dataclass(frozen=True, slots=True)
class ResolveJob:
    """One tensor to resolve. `payload` None means that the tensor does not change and is only digested; `base` None that it appears.

    With `write`, changes go into the base at once, to be kept by `Resolution.settle` or taken back by `Resolution.revert`.
    """

    base: Bits | None
    count: int
    payload: Buffer | None
    dtype: DType
    seed: int
    write: bool = False

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


class Outcome(NamedTuple):
    """What resolving one tensor found: how many elements change, and the word sums before and after."""

    changed: int
    before: Lanes
    after: Lanes


class Resolution(Protocol):
    """Payloads decoded against their bases. Tensors are counted over all calls of `add`."""

    def add(self, jobs: Sequence[ResolveJob]) -> list[Outcome]:
        """Decode and digest. Raises `CorruptDelta`, `DtypeMismatch` or `ShapeMismatch`; then only `revert` is of use.

        Bases that are written to must share no memory with any other job of this call or a later one.
        """
        ...

    def changes(self, tensor: int) -> tuple[NDArray[np.int64], Bits]:
        """The changed elements of a tensor that was not written to: ascending flat indices and their new bits."""
        ...

    def dense(self, tensor: int) -> Bits:
        """All elements of a tensor that appears, flat."""
        ...

    def settle(self) -> None:
        """Make all writes final. Cannot fail half-way."""
        ...

    def revert(self) -> None:
        """Put the old values back, as if nothing had been written."""
        ...

    def exchange(self) -> None:
        """If writes are deferred: swap the changes and what they change. Cannot fail half-way.

        Once writes the new values, twice puts the old ones back, and so on.
        """
        ...

    def compact(self) -> None:
        """If writes are deferred, and nothing more is to be added: give back all memory but what `exchange` needs."""
        ...


class Codec(Protocol):
    """An implementation of the codec. Never reads outside a payload, never writes to a base unasked."""

    name: str

    def encode(self, jobs: Sequence[EncodeJob], threads: int) -> list[Encoded]: ...

    def resolution(self, threads: int, budget: int) -> Resolution:
        """An empty resolution that keeps at most `budget` bytes of decoded changes; the rest it may decode again."""
        ...

    def deferred_resolution(self, threads: int) -> Resolution:
        """An empty resolution that keeps all changes and writes none until `exchange`: neither `settle` nor `revert` is of use."""
        ...

    def digest(self, arrays: Sequence[tuple[Bits, int]], threads: int) -> list[Lanes]:
        """The word sums of (bits, seed) pairs."""
        ...

    def write_elements(self, bits: Bits, indices: NDArray[np.int64], values: Bits) -> None:
        """Set `bits.flat[indices] = values`; indices outside the array raise before anything is written."""
        ...
