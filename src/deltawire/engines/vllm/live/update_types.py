"""The types that live updates of a worker's weights share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from ....format.digest import Digest
from ....format.records.record_parts import CommitRef

if TYPE_CHECKING:
    from .layout_update import LayoutUpdate
    from .live_weights import DeltaHop


@dataclass(frozen=True, slots=True)
class LiveVersion:
    """The version that a worker's weights have.

    Parameters
    ----------
    ref
        The commit of the version.
    digest
        The digest of the whole state, of which this worker may hold only a part.
    """

    ref: CommitRef
    digest: Digest


@dataclass(frozen=True, slots=True)
class Digests:
    """The digests of a worker's weights, in the layout of the checkpoint. The digests `owned` by all workers add up to that of the state.

    Parameters
    ----------
    owned
        The digest of the elements that this worker owns. Each element has one owner: the lowest rank that holds it.
    replicated
        The digests of the elements that several workers hold, by the ranks that hold them. It is equal on all of these ranks.
    """

    owned: Digest
    replicated: Mapping[tuple[int, ...], Digest] = field(default_factory=dict)


@dataclass(slots=True)
class StagedUpdate:
    """A hop that is decoded against a worker's weights.

    Parameters
    ----------
    hop
        The hop.
    update
        The changes. None if the hop has no files, and only the version changes.
    before
        The digest of the whole state that it was decoded against.
    target
        The version that it leads to. All workers find the same digest.
    nbytes
        The memory that the changes occupy.
    unchecked
        Digests before and after of parts that not all workers decode. The sums over all workers must be zero.
    is_back
        True if the update was written before, and its old values are written now (`LiveUndo`).
    """

    hop: DeltaHop
    update: LayoutUpdate | None
    before: Digest
    target: LiveVersion
    nbytes: int
    unchecked: tuple[Digest, Digest]
    is_back: bool = False

    @property
    def claim(self) -> Claim:
        """The digests that the workers compare before they write."""
        return Claim(self.target.digest, *self.unchecked)


@dataclass(frozen=True, slots=True)
class Claim:
    """The digests that workers compare before they write an update.

    Parameters
    ----------
    after
        The digest of the whole state that the update leads to. It must be the same in all workers.
    before_parts, after_parts
        The digests of what only some workers decode, less what the files say. The sums over all workers must be zero.
    """

    after: Digest
    before_parts: Digest
    after_parts: Digest


Outcome: TypeAlias = Literal["made", "refused", "quarantined"]
"""The outcome of a swap. "refused": the old weights are complete. "quarantined": the weights are in an unknown state."""


@dataclass(frozen=True, slots=True)
class SwapOutcome:
    """The outcome of a swap in one worker. All workers of a server have the same outcome.

    Parameters
    ----------
    outcome
        What became of it.
    error
        What failed in this worker, or None. Another worker may have failed.
    times
        How long each part of the swap took, in milliseconds.
    """

    outcome: Outcome
    error: str | None = None
    times: Mapping[str, float] = field(default_factory=dict)


Agree: TypeAlias = Callable[[bool, Claim | None], Sequence[int]]
"""Tells all workers whether this one has failed, and waits for what they tell. Returns the ranks that have failed.

With a claim, it also compares the claims of all workers. If they do not fit together, it raises an error in all of them.
"""
