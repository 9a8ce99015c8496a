"""The changes of direct tensors that a codec swaps with the values in memory, and the digest of these tensors afterwards.

A GPU digests tensors while it writes to them, so that it reads the weights only once. Such a digest is that of the values that the GPU
writes, not of values that are read back: it shows wrong changes, and weights that other code has changed. If the memory has lost a value,
the next update that changes the tensor fails while it is staged, because it is decoded against what the memory has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ....codec.base import DigestingExchange, Resolution, Sums
from ....delta.plan import Plan, sizes_of
from ....format.digest import Digest
from ....tensors.bits import State
from ....tensors.state import state_digest
from .direct_tensors import DirectTensors


class DirectPatches:
    """The changes of one update. `complete` must be called when all of them are added.

    Parameters
    ----------
    tensors
        All direct tensors.
    threads
        Number of threads for digests on the host.
    """

    def __init__(self, tensors: DirectTensors, *, threads: int) -> None:
        self._tensors = tensors
        self._threads = threads
        self._patches: list[tuple[Resolution, DigestingExchange | None]] = []
        self._swapped = 0
        """The number of patches that hold old values."""
        self._parts: list[tuple[int, NDArray[np.int64], NDArray[np.int64]]] = []
        """For each patch that digests tensors, or parts of tensors: its number, their numbers, and their numbers in the patch."""
        self._covered = np.zeros_like(tensors.sizes)
        """The number of elements of each tensor that patches digest."""
        self._rows: list[tuple[int, NDArray[np.int64]]] = []
        """The parts whose word sums count: those of tensors that patches digest as a whole."""
        self._tag = Digest()
        self._rest: State = {}
        """All other direct tensors. They are read again for their digest."""
        self._sums: dict[int, Callable[[], Sums]] | None = None
        """The word sums of what each patch has written. None if the last exchange did not digest it."""

    def add(self, resolution: Resolution, plans: Sequence[Plan] = ()) -> None:
        """Add changes.

        Parameters
        ----------
        resolution
            The changes. Nothing can be added to it afterwards.
        plans
            The results of decoding into it, with one call. Tensors of other plans are not digested while they are written.
        """
        exchange = resolution.compact()
        if exchange is not None and plans:
            rows = np.concatenate([plan.numbers[: len(plan.tensors)] for plan in plans])
            which = np.flatnonzero(exchange.digested[rows])
            numbers = np.concatenate([self._tensors.numbers(plan.tensors) for plan in plans])[which]
            sizes = np.concatenate([sizes_of(plan.tensors) for plan in plans])[which]
            np.add.at(self._covered, numbers, sizes)  # a plan may have several parts of a tensor
            self._parts.append((len(self._patches), numbers, rows[which]))
        self._patches.append((resolution, exchange))

    def complete(self) -> None:
        """Find out which tensors must be read for their digest after an exchange."""
        whole = self._covered == self._tensors.sizes
        for patch, numbers, rows in self._parts:
            self._rows.append((patch, rows[whole[numbers]]))
        self._rest = self._tensors.chosen(~whole)
        self._tag = self._tensors.tag(whole)
        self._parts.clear()

    def apply(self, *, digest: bool) -> None:
        """Write the new values. A GPU may still be at work when this returns.

        Parameters
        ----------
        digest
            True to digest in the same pass what is written, if the codec can do so.
        """
        self._sums = {} if digest else None
        wanted = {number for number, rows in self._rows if rows.size}
        for number, (patch, exchange) in enumerate(self._patches[self._swapped :], self._swapped):
            self._swapped += 1
            if exchange is not None and self._sums is not None and number in wanted:
                self._sums[number] = exchange.exchange_and_digest()
            else:
                patch.exchange(wait=False)

    def revert(self) -> None:
        """Write the old values back, even if only some of the new ones were written. A GPU may still be at work when this returns."""
        self._sums = None
        for patch, _ in reversed(self._patches[: self._swapped]):
            self._swapped -= 1
            patch.exchange(wait=False)

    def turn(self) -> None:
        """Let `apply` write the values that the patches hold now, which must be all old ones or all new ones."""
        self._swapped = len(self._patches) - self._swapped

    def digest(self) -> Digest:
        """Return the digest of all direct tensors. Tensors that `apply` has digested are not read again. Call both in the same thread."""
        if self._sums is None:
            return state_digest(self._tensors.state, threads=self._threads)
        sums = {number: found() for number, found in self._sums.items()}
        total = self._tag + state_digest(self._rest, threads=self._threads)
        for number, rows in self._rows:
            if rows.size:
                total += Digest.sum(sums[number][rows])
        return total
