"""The interface of all codecs: operations on bits that give the same bytes in every implementation (docs/format.md §2–5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..dtypes import DType, PayloadType
from .bits import Bits, Indices

if TYPE_CHECKING:
    from .._native import Preparation

Buffer: TypeAlias = bytes | bytearray | memoryview
Lanes: TypeAlias = tuple[int, int, int, int]
"""The four 32-bit lanes of a digest."""


Pace: TypeAlias = Callable[[float], None]
"""Called by a GPU codec after each part of its work, with the number of elements that the part amounts to. It may wait."""

Sums: TypeAlias = NDArray[np.uint32]
"""Word sums of tensors (their digests without the tags): one row of four lanes for each tensor."""

# Models have ten thousand tensors and more. So codecs take and return columns instead of one object per tensor.


@dataclass(slots=True)
class ResolveJob:
    """One tensor to resolve.

    `payload` is the range of the tensor's payload in the data that comes with the jobs; None means that the tensor does not change and is
    only digested. `base` is None for a tensor that is added. With `write`, the changes go into the base at once. Then
    `Resolution.settle` makes them final and `Resolution.revert` undoes them.
    """

    base: Bits | None
    count: int
    payload: tuple[int, int] | None
    dtype: DType
    seed: int
    write: bool = False


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The result of resolving several tensors: the number of changed elements, and the word sums before and after."""

    changed: NDArray[np.int64]
    before: Sums
    after: Sums


@dataclass(slots=True)
class EncodeGroup:
    """Tensors of one payload type to encode together, in columns (docs/format.md §3).

    `bases` and `news` are the bits of whole elements, also where the payload type is packed. A base is None for a tensor that is added; it
    is coded against zeros. Codecs read a `BitsColumn` by its addresses and sizes, and look at the items of any other sequence one by one.
    On a GPU one of the two tensors of a pair may be `QuantisedBits`.
    Only codecs with `prepares` take a `preparation`, which makes some of `news`; it is the same one in all groups of a call.
    """

    type: PayloadType
    bases: Sequence[Bits | None]
    news: Sequence[Bits]
    seeds: NDArray[np.uint64]
    preparation: Preparation | None = None


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    """The payload of a group in pieces, and what the pass over its tensors found.

    There are no pieces if nothing changes. `changed` are the changed elements of the payload type, by tensor. `before` and `after` are
    word sums over all tensors of the group; tensors that are added count nothing in `before`.
    """

    pieces: Sequence[Buffer]
    changed: NDArray[np.int64]
    before: Lanes
    after: Lanes


GroupSink: TypeAlias = Callable[[int, EncodedGroup], None]
"""Takes groups as soon as they are encoded, in any order, by their numbers."""


@dataclass(slots=True)
class ResolveGroup:
    """Tensors of one payload type to resolve together, in columns.

    `bases` are the bits of whole elements, None for tensors that are added. `counts` are the numbers of their own elements, also where the
    payload type is packed. `payload` is the range of the group's payload in the data that comes with the groups; None means that nothing
    changes, so that the tensors are only digested. `writes` says for each tensor, or for all, whether the changes go into the base, as
    `ResolveJob.write` does.
    """

    type: PayloadType
    bases: Sequence[Bits | None]
    counts: NDArray[np.int64]
    seeds: NDArray[np.uint64]
    payload: tuple[int, int] | None
    writes: Sequence[bool] | bool = False


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """The result of resolving a group: the changed elements of the payload type by tensor, and word sums over the whole group."""

    changed: NDArray[np.int64]
    before: Lanes
    after: Lanes


def sums(lanes: Sequence[Lanes]) -> Sums:
    """Return rows of lanes as an array."""
    return np.array(lanes, np.uint32).reshape(-1, 4)


class Resolution(Protocol):
    """Payloads that are decoded against their bases. Tensors are numbered over all calls of `add` and `add_groups`."""

    def add(self, jobs: Sequence[ResolveJob], data: Buffer) -> Outcomes:
        """Decode and digest tensors of a delta of version 1 or 2.

        Raises `CorruptDelta`, `DtypeMismatch` or `ShapeMismatch`. After an error only `revert` may be called.

        `data` holds the payloads and must not change while the resolution is in use. A base that is written to must not share memory with
        any other job, in this call or a later one.
        """
        ...

    def add_groups(self, groups: Sequence[ResolveGroup], data: Buffer) -> Sequence[GroupOutcome]:
        """Decode and digest groups of tensors. Their tensors are numbered after all earlier ones, group by group.

        Raises `CorruptDelta`. The rules of `add` apply. `changes` returns whole elements, also where the payload type is packed.
        """
        ...

    def changes(self, tensors: Sequence[int]) -> Sequence[tuple[Indices, Bits]]:
        """Return the changes of tensors that were not written to: ascending flat indices, and the new bits at these indices.

        The changes of a tensor on a GPU are on that GPU.
        """
        ...

    def dense(self, tensors: Sequence[int]) -> Sequence[Bits]:
        """Return all elements of tensors that are added, as flat bits."""
        ...

    def settle(self) -> None:
        """Make all writes final. This cannot fail half-way."""
        ...

    def revert(self) -> None:
        """Restore the old values, as if nothing had been written."""
        ...

    def exchange(self, *, wait: bool = True) -> None:
        """Swap the changes with the values that they replace, if writes are deferred. This cannot fail half-way.

        The first call writes the new values, the second restores the old ones, and so on. Without `wait`, a GPU may still be at work when
        this returns, on the calling thread's current stream.
        """
        ...

    def compact(self) -> DigestingExchange | None:
        """Free all memory that `exchange` does not need, if writes are deferred. Afterwards nothing can be added.

        Returns an exchange that also digests. None if the codec does not have one.
        """
        ...


class DigestingExchange(Protocol):
    """An exchange that digests what it writes in the same pass, so that the weights are read from memory only once."""

    @property
    def digested(self) -> NDArray[np.bool_]:
        """True for each tensor of the resolution that is digested."""
        ...

    def exchange_and_digest(self) -> Callable[[], Sums]:
        """Do as `Resolution.exchange`, and compute the word sums of what the tensors have then.

        Returns a function that waits until both is done, and returns the word sums of all tensors: zeros for those that are not digested.
        Call it in the same thread. The sums are those of the values that are written. They are not read back from memory.
        """
        ...


class Codec(Protocol):
    """An implementation of the codec. It never reads outside a payload, and writes to a base only if a job says so."""

    name: str
    prefers_whole_state: bool
    """Whether one call with all tensors is faster than batches. Memory is bounded in both cases."""
    prepares: bool
    """True if it takes groups with a `preparation`."""

    def encode_groups(self, groups: Sequence[EncodeGroup], threads: int, encoded: GroupSink | None = None) -> Sequence[EncodedGroup]:
        """Encode groups of tensors. The bytes do not depend on the number of threads, or on the other groups.

        `encoded` gets the number of each group and what was found, on the calling thread. A GPU encodes later groups meanwhile. It must
        not use the GPU.
        """
        ...

    def resolution(self, threads: int, budget: int) -> Resolution:
        """Return an empty resolution that keeps at most `budget` bytes of decoded changes. It may decode the others a second time."""
        ...

    def deferred_resolution(self, threads: int, pace: Pace | None = None) -> Resolution:
        """Return an empty resolution that keeps all changes and writes nothing before `exchange`. It uses neither `settle` nor `revert`.

        Only a GPU follows the `pace`.
        """
        ...

    def join(self, pieces: Sequence[Buffer], threads: int) -> Buffer:
        """Return buffers one after the other, in memory from which the codec reads payloads fast."""
        ...

    def digest(self, tensors: Sequence[Bits], seeds: NDArray[np.uint64], threads: int) -> Sums:
        """Return the word sums of tensors."""
        ...

    def write_elements(self, bits: Bits, indices: Indices, values: Bits) -> None:
        """Set `bits.flat[indices] = values`. Raise `IndexError`, before anything is written, if an index is outside the array."""
        ...
