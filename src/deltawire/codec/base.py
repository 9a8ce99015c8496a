"""What a codec is: operations on bits, with the same bytes from every implementation (docs/format.md §2–5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


Sums: TypeAlias = NDArray[np.uint32]
"""Word sums of tensors (their digests less the tags): a row of four lanes for each."""

# Models have ten thousand tensors and more. So there is a job for each, not frozen, as that takes three times as long to make; but what
# codecs find is in columns.


@dataclass(slots=True)
class EncodeJob:
    """One tensor to encode; `base` is None for a tensor that appears (it is coded against zeros)."""

    base: Bits | None
    new: Bits
    dtype: DType
    seed: int


class Encoded(NamedTuple):
    """One tensor of `Encodings`: its payload in pieces (none at all where nothing changes), and the word sums of both sides."""

    payload: Sequence[Buffer]
    changed: int
    before: Lanes
    after: Lanes


@dataclass(frozen=True, slots=True)
class Encodings:
    """What tensors were encoded to. `before` is all zeros where a job had no base.

    `pieces` are all payloads in a row, in the order of tensors; where one ends is said by `sizes`, 0 where nothing changes.
    """

    pieces: Sequence[Buffer]
    sizes: NDArray[np.int64]
    changed: NDArray[np.int64]
    before: Sums
    after: Sums

    @classmethod
    def of(cls, tensors: Sequence[Encoded]) -> Encodings:
        sizes = [sum(map(len, tensor.payload)) for tensor in tensors]
        before, after = sums([tensor.before for tensor in tensors]), sums([tensor.after for tensor in tensors])
        changed = np.array([tensor.changed for tensor in tensors], np.int64)
        return cls([piece for tensor in tensors for piece in tensor.payload], np.array(sizes, np.int64), changed, before, after)

    def __iter__(self) -> Iterator[Encoded]:
        pieces, rest = (memoryview(piece) for piece in self.pieces), memoryview(b"")
        for size, changed, before, after in zip(
            *(column.tolist() for column in (self.sizes, self.changed, self.before, self.after)), strict=True
        ):
            payload = []
            while size:
                rest = rest or next(pieces)
                payload.append(rest[:size])
                size, rest = size - len(payload[-1]), rest[size:]
            yield Encoded(payload, changed, tuple(before), tuple(after))


@dataclass(slots=True)
class ResolveJob:
    """One tensor to resolve. `payload` None means that the tensor does not change and is only digested; `base` None that it appears.

    A payload is a part of the data that comes with the jobs: where it begins and ends there.
    With `write`, changes go into the base at once, to be kept by `Resolution.settle` or taken back by `Resolution.revert`.
    """

    base: Bits | None
    count: int
    payload: tuple[int, int] | None
    dtype: DType
    seed: int
    write: bool = False


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What resolving tensors found: how many elements change, and the word sums before and after."""

    changed: NDArray[np.int64]
    before: Sums
    after: Sums


def sums(lanes: Sequence[Lanes]) -> Sums:
    return np.array(lanes, np.uint32).reshape(-1, 4)


class Resolution(Protocol):
    """Payloads decoded against their bases. Tensors are counted over all calls of `add`."""

    def add(self, jobs: Sequence[ResolveJob], data: Buffer) -> Outcomes:
        """Decode and digest. Raises `CorruptDelta`, `DtypeMismatch` or `ShapeMismatch`; then only `revert` is of use.

        `data`, which payloads are parts of, must stay as it is until the resolution has done its work.

        Bases that are written to must share no memory with any other job of this call or a later one.
        """
        ...

    def changes(self, tensors: Sequence[int]) -> Sequence[tuple[NDArray[np.int64], Bits]]:
        """The changed elements of tensors that were not written to: ascending flat indices and their new bits."""
        ...

    def dense(self, tensors: Sequence[int]) -> Sequence[Bits]:
        """All elements of tensors that appear, flat."""
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
    takes_all: bool
    """Whether the more tensors it is given at a time the better; its memory is bounded all the same."""

    def encode(self, jobs: Sequence[EncodeJob], threads: int) -> Encodings: ...

    def resolution(self, threads: int, budget: int) -> Resolution:
        """An empty resolution that keeps at most `budget` bytes of decoded changes; the rest it may decode again."""
        ...

    def deferred_resolution(self, threads: int) -> Resolution:
        """An empty resolution that keeps all changes and writes none until `exchange`: neither `settle` nor `revert` is of use."""
        ...

    def digest(self, arrays: Sequence[tuple[Bits, int]], threads: int) -> Sums:
        """The word sums of (bits, seed) pairs."""
        ...

    def write_elements(self, bits: Bits, indices: NDArray[np.int64], values: Bits) -> None:
        """Set `bits.flat[indices] = values`; indices outside the array raise before anything is written."""
        ...
