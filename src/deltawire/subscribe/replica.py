"""What a subscriber keeps up to date: a copy of the model at some version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from ..format.records.chain_records import Commit
from .sync_context import SyncContext


class Replica(Protocol):
    """A copy of the model. Whatever fails, it is at a whole version, or at none yet."""

    @property
    def commit(self) -> Commit | None:
        """The commit that made the version at hand; never a fence."""
        ...

    @property
    def state(self) -> Mapping[str, NDArray[Any]]:
        """The weights, read-only; empty while there are none."""
        ...

    def move(self, target: Commit, context: SyncContext) -> None:
        """Get to the version of `target`."""
        ...

    def close(self) -> None: ...
