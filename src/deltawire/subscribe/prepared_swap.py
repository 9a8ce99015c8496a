"""A change of a replica's weights that is ready to be made, and the one collaborator that makes it.

A replica prepares each change while the old version stays in use: it fetches, decodes and checks. Then it hands the prepared change to its
`Swap`, which makes it exactly once. A plain subscriber uses `apply_directly`. For an engine the swap is `SwapController.swap`, which
pauses the engine around the change, confirms it, and reverts it if a step fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..chain.version import Version


class PreparedSwap(Protocol):
    """A change of weights that is ready to be made: everything that can be fetched, decoded and checked beforehand has been.

    Nothing else may write to the weights between preparing and `apply`.
    """

    def apply(self) -> None:
        """Write the new weights. An engine is paused meanwhile. It may fail half-way."""
        ...

    def confirm(self, *, full: bool) -> None:
        """Raise a `DeltawireError` unless the weights are those of the new version.

        Parameters
        ----------
        full
            True to read every weight. If False, it is enough to check what was written.
        """
        ...

    def revert(self) -> None:
        """Write the old weights back and confirm them, even if `apply` failed half-way. Raises if that is not possible."""
        ...


Swap = Callable[[PreparedSwap, Version], None]
"""Makes a prepared change, which leads to this version. Returns when the change is made and confirmed.

If it raises, the weights are the old ones. The exception is `EngineQuarantined`: then the weights are unknown, and the replica must start
from a full checkpoint at its next move.
"""


def apply_directly(prepared: PreparedSwap, version: Version) -> None:
    """Make a change of weights that no engine uses. Decoding has checked the new values, so nothing is confirmed."""
    prepared.apply()
