"""The interface of engines. An engine generates with weights, and takes new ones between two forward passes.

A swap has five steps. `SwapController` runs them in this order:

1. prepare: fetch, decode and check the update, while the engine serves the old version
2. pause
3. apply: write the new weights
4. confirm: check that the engine has them
5. resume

If a step before `apply` fails, the engine continues to serve the old version. If `apply` or `confirm` fails, the change is reverted and the
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
    """Says what happens to keys and values that the old weights computed, when weights are swapped during a generation."""

    KEEP = "keep"
    """Generation continues with them. This is fastest. A completion may be made by several versions, which `HotSwap.generation` names."""
    DROP = "drop"
    """The new weights use nothing that the old weights computed."""
    MARK = "mark"
    """Generations that run continue with them, as with `KEEP`. New ones use nothing that older weights computed, if the engine can tell
    the two apart. vLLM can, if it swaps in one call, and otherwise for the requests of a `VllmGenerator`. SGLang cannot, and drops them."""


class Engine(abc.ABC):
    """An adapter to one engine. `deltawire.testing.EngineConformance` tests what it must guarantee."""

    name: str
    """The name of the engine in messages and events."""

    @abc.abstractmethod
    def replica(self, swap: Swap) -> Replica:
        """Return the engine's weights as a replica, which a subscriber keeps up to date.

        The replica's `commit` is the version that the engine serves, or None if it is unknown.

        Parameters
        ----------
        swap
            The replica hands every prepared change to it, and nothing else changes the engine's weights.
        """

    @abc.abstractmethod
    def pause(self, kv_cache: KvCache) -> None:
        """Return when no forward pass runs, and start none until `resume`. Does nothing if the engine is paused.

        Parameters
        ----------
        kv_cache
            What happens to keys and values that the current weights have computed.
        """

    @abc.abstractmethod
    def resume(self) -> None:
        """Continue to generate. Does nothing if the engine is not paused. Requests that waited or were interrupted are not lost."""

    def generation(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for one generation, if the engine does not manage KV caches itself.

        With `KvCache.DROP`, `pause` waits until the context ends.
        """
        return contextlib.nullcontext()

    def close(self) -> None:  # noqa: B027 - most adapters hold nothing
        """Release what the adapter holds. The engine keeps its weights."""
