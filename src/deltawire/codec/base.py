"""What a codec is: three operations on flat bits, the same bytes from every implementation (docs/format.md §2–5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..dtypes import DType

Bits: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""A tensor as unsigned integers of its element width, any shape and strides."""

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8]
Lanes: TypeAlias = tuple[int, int, int, int]
"""The four 32-bit lanes of a digest."""


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """One tensor to encode; `base` is None for a tensor that appears (it is coded against zeros)."""

    base: Bits | None
    new: Bits
    dtype: DType
    seed: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """A payload in pieces (none at all where nothing changes), and the word sums (digest less the tag) of both sides.

    `before` is all zeros where the job had no base.
    """

    payload: Sequence[Buffer]
    changed: int
    before: Lanes
    after: Lanes


@dataclass(frozen=True, slots=True)
class ResolveJob:
    """One tensor to resolve. `payload` None means that the tensor does not change and is only digested; `base` None that it appears."""

    base: Bits | None
    count: int
    payload: Buffer | None
    dtype: DType
    seed: int


@dataclass(frozen=True, slots=True)
class Resolved:
    """The changed elements of a tensor: ascending flat indices and their new bits, and the word sums of both sides."""

    indices: NDArray[np.int64]
    values: Bits
    before: Lanes
    after: Lanes


class Codec(Protocol):
    """An implementation of the codec. Raises `CorruptDelta` for a payload that breaks a rule; never reads outside it, never writes to a base."""

    name: str

    def encode(self, jobs: Sequence[EncodeJob], threads: int) -> list[Encoded]: ...

    def resolve(self, jobs: Sequence[ResolveJob], threads: int) -> list[Resolved]: ...

    def digest(self, arrays: Sequence[tuple[Bits, int]], threads: int) -> list[Lanes]:
        """The word sums of (bits, seed) pairs."""
        ...
