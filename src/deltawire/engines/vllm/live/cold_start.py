"""Brings the workers of a server to a version with nothing but the store: from a full checkpoint, or over several updates.

It is for servers that neither a sidecar nor a mirror serves. A full checkpoint streams shard by shard, so the host needs no copy of the
model. The server must be paused, because the weights are a mix of versions meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....chain.restore import Hop
from ....errors import SpoolError
from ....subscribe.fetching_spool import KEPT_HOPS, FetchingSpool
from ....subscribe.sync_context import SyncContext
from ....subscribe.tensor_table import TensorTable, read_tensor_table, write_table
from ..loading import Tensors, module_order, stream_anchor
from ..ranks import failed_ranks, share
from .kept_bases import KeptBases
from .live_updates import LiveUpdates
from .update_types import SwapOutcome

logger = logging.getLogger("vllm.deltawire")


@dataclass(frozen=True, slots=True)
class _Route:
    """A route to a version. `table` has the tensors of the checkpoint that it begins with, if it does."""

    hops: Sequence[Hop]
    context: SyncContext
    table: TensorTable | None


class ColdStart:
    """Loads versions into one worker.

    Parameters
    ----------
    updates
        The updates of the worker's weights.
    spool
        Fetches deltas and shards.
    bases
        Keeps the tensors that workers cannot read from their own memory.
    load
        Loads all tensors of a checkpoint into the model.
    """

    def __init__(self, updates: LiveUpdates, spool: FetchingSpool, bases: KeptBases, load: Callable[[Tensors], None]) -> None:
        self._updates = updates
        self._spool = spool
        self._bases = bases
        self._load = load

    def bring(self, seq: int, *, anew: bool) -> SwapOutcome:
        """Bring the weights to a version, together with all other workers. Never raises.

        All deltas of the route are fetched first. A failure up to then changes nothing. After a failure that comes later, the workers are
        quarantined.

        Parameters
        ----------
        seq
            The number of the version's commit.
        anew
            True to begin with a full checkpoint, even if the version of the weights is known.
        """
        errors: list[str] = []
        route = self._find(seq, anew, errors)
        found, _ = share(None if route is None else [hop.name for hop in route.hops])
        if route is None or any(other != found[0] for other in found):
            return SwapOutcome("refused", "; ".join(errors) or "the workers have not found the same route.")
        times = {"loaded_anew": 0.0}
        for hop in route.hops:
            outcome = self._load_checkpoint(hop, route, times) if hop.base is None else self._updates.swap(hop.target.seq)
            if outcome.outcome != "made":  # after the first hop, the weights are not those that the server says it has
                is_changed = hop is not route.hops[0] or outcome.outcome == "quarantined"
                return SwapOutcome("quarantined" if is_changed else "refused", outcome.error, times)
        with contextlib.suppress(SpoolError):
            self._spool.keep_only(KEPT_HOPS)
        return SwapOutcome("made", times=times)

    def close(self) -> None:
        """Release the store. The weights stay as they are."""
        self._spool.close()

    def _find(self, seq: int, anew: bool, errors: list[str]) -> _Route | None:
        """Find a route, and fetch what is not the checkpoint itself. Returns None after a failure."""
        version = None if anew else self._updates.weights.version
        try:
            hops, context = self._spool.route(None if version is None else version.ref, seq)
            table = None
            if hops and hops[0].base is None:
                table = read_tensor_table(context, hops[0])
                write_table(self._spool.table_path, table)
            for hop in hops:
                if hop.base is not None:
                    self._spool.put(hop, context)
            return _Route(hops, context, table)
        except Exception as error:
            _note(error, errors)
            return None

    def _load_checkpoint(self, hop: Hop, route: _Route, times: dict[str, float]) -> SwapOutcome:
        self._updates.learn(self._spool.table_path)
        if self._updates.why_not is not None:
            return SwapOutcome("refused", f"the weights cannot be updated where they are: {self._updates.why_not}")
        self._updates.forget()
        errors: list[str] = []
        began = time.perf_counter()
        try:
            order = module_order(route.table or ())
            self._load(self._bases.watch(stream_anchor(hop, route.context, order, spool=self._spool)))
        except Exception as error:
            _note(error, errors)
        loaded = time.perf_counter()
        if failed := failed_ranks(bool(errors)):
            return SwapOutcome("quarantined", "; ".join(errors) or f"workers {failed} have not loaded the checkpoint.")
        self._updates.adopt(route.context.log.ref(hop.target))
        times |= {"write_ms": (loaded - began) * 1e3, "confirm_ms": (time.perf_counter() - loaded) * 1e3, "loaded_anew": 1.0}
        if self._updates.weights.version is None:
            return SwapOutcome("quarantined", f"after loading, the weights do not have the digest of {hop.target.describe()}.")
        return SwapOutcome("made")


def _note(error: Exception, errors: list[str]) -> None:
    logger.exception("deltawire: a version cannot be loaded from the store")
    errors.append(f"{type(error).__name__}: {error}")
