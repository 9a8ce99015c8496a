"""What deltawire expects of an engine: it generates with weights, and takes new ones between two forward passes.

A swap has five steps. `SwapController` runs them in this order:

1. prepare: fetch, decode and check the update, while the engine serves the old version
2. pause
3. apply: write the new weights
4. confirm: check that the engine has them
5. resume

If a step before `apply` fails, the engine goes on serving the old version. If `apply` or `confirm` fails, the change is reverted and the
engine serves the old version again. If the revert fails too, the engine stays paused (`EngineQuarantined`) until a full checkpoint has
repaired it. A forward pass therefore never runs on a mix of two versions.

An engine provides a `Replica` (deltawire/subscribe/replica.py). The replica prepares each change when a `Subscriber` moves it, and hands
the prepared change to `swap`. One move may take several swaps, through complete versions in between.
"""

from __future__ import annotations

import abc
import contextlib
import enum

from ..subscribe.prepared_swap import Swap
from ..subscribe.replica import Replica


class KvCache(enum.Enum):
    """What becomes of keys and values that the old weights made, when a swap happens while something is being generated."""

    KEEP = "keep"
    """Generation goes on with them: fastest, and a completion may be a mix (`HotSwap.generation` says of which versions)."""
    DROP = "drop"
    """Nothing that the old weights made is used with the new ones."""


class Engine(abc.ABC):
    """An adapter to one engine. `deltawire.testing.EngineConformance` holds its promises as tests."""

    name: str
    """For messages and events."""

    @abc.abstractmethod
    def replica(self, swap: Swap) -> Replica:
        """The live weights as what a subscriber keeps up to date. `commit` is the version that the engine serves; None if unknown."""

    @abc.abstractmethod
    def pause(self, kv_cache: KvCache) -> None:
        """Return when no forward pass runs, and let none begin until `resume`. Does nothing if it is paused."""

    @abc.abstractmethod
    def resume(self) -> None:
        """Go on. Does nothing if it is not paused. Requests that waited, or were interrupted, are not lost."""

    def generation(self) -> contextlib.AbstractContextManager[None]:
        """Around what uses one KV cache, where the engine does not manage caches itself: with `KvCache.DROP`, `pause` waits for its end."""
        return contextlib.nullcontext()

    def close(self) -> None:  # noqa: B027 - nothing to let go of is the common case
        """Let go of what the adapter itself holds. The engine goes on with the weights that it has."""
