"""Brings the workers of a server to a version that no single update leads to: from a full checkpoint, or over several updates.

A full checkpoint comes from a mirror if one was named and holds the version. Otherwise it streams from the store, shard by shard, so the
host needs no copy of the model, and deltas lead from there to the version. The server must be paused, because the weights are a mix of
versions meanwhile. Afterwards the digest of the weights must be that of the version. Only a server whose layout could not be learnt has to
rely on vLLM's own loading: its weights cannot be read back.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ....chain.routes.restore import Hop
from ....errors import SpoolError
from ....format.checkpoints.checkpoint import Checkpoint
from ....format.records.record_parts import CommitRef
from ....subscribe import Mirror
from ....subscribe.mirror.mirror import HeldSlot
from ....subscribe.spool.delta_spool import DeltaSpool
from ....subscribe.spool.fetching_spool import KEPT_HOPS, FetchingSpool
from ....subscribe.sync_context import SyncContext
from ....subscribe.tensor_table import TensorSpec, TensorTable, read_tensor_table, write_table
from ...weights.live_tensors import as_bits
from ..loading import Tensors, fetch_tensors, module_order, stream_anchor, whole_tensors
from ..ranks import failed_ranks, share
from .direct_tensors import tied_tensors
from .kept_bases import KeptBases
from .live_updates import LiveUpdates
from .update_types import SwapOutcome

logger = logging.getLogger("vllm.deltawire")

_Read = Callable[[Collection[str]], Mapping[str, torch.Tensor]]
"""Returns tensors of a checkpoint by name."""


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
        The spool. A `FetchingSpool` can also load versions from the store.
    bases
        Keeps the tensors that workers cannot read from their own memory.
    load
        Loads all tensors of a checkpoint into the model.
    mirror
        The directory of a mirror. None if there is none.
    threads
        Number of threads for digests of a mirror. None means one per core.
    """

    def __init__(
        self,
        updates: LiveUpdates,
        spool: DeltaSpool,
        bases: KeptBases,
        load: Callable[[Tensors], None],
        *,
        mirror: Path | None = None,
        threads: int | None = None,
    ) -> None:
        self._updates = updates
        self._spool = spool
        self._bases = bases
        self._load = load
        self._mirror = None if mirror is None else Mirror(mirror, threads=threads)

    def bring(self, seq: int, *, anew: bool) -> SwapOutcome:
        """Bring the weights to a version, together with all other workers. Never raises.

        Everything except a full checkpoint in the store is fetched first. A failure up to then changes nothing. After a failure that comes
        later, the weights are in an unknown state.

        Parameters
        ----------
        seq
            The number of the version's commit.
        anew
            True to begin with a full checkpoint, even if the version of the weights is known.
        """
        errors: list[str] = []
        held = self._open_mirror(seq, errors)
        try:
            if not failed_ranks(held is None):
                assert held is not None
                return self._load_mirror(held)
        finally:
            if held is not None:
                held.release()
        if not isinstance(self._spool, FetchingSpool):
            reasons = [f"the spool has no update to commit {seq} from the version of the weights", *errors]
            return SwapOutcome("refused", f"{', '.join(reasons)}, and no URL was given to load it from.")
        return self._load_from_store(self._spool, seq, anew)

    def _open_mirror(self, seq: int, errors: list[str]) -> HeldSlot | None:
        """Return the version in the mirror, if it is the one that is wanted."""
        if self._mirror is None:
            return None
        try:
            held = self._mirror.open_current()
        except Exception as error:
            _note(error, errors)
            return None
        if held is not None and held.record.seq == seq:
            return held
        errors.append(f"{self._mirror.path} holds {'no sound version' if held is None else f'commit {held.record.seq}'}")
        if held is not None:
            held.release()
        return None

    def _load_mirror(self, held: HeldSlot) -> SwapOutcome:
        times: dict[str, float] = {}
        errors: list[str] = []
        weights, table = None, None
        try:
            weights = Checkpoint(held.slot.path)
            entries = {name: weights.entry(name) for name in sorted(weights)}
            table = {name: TensorSpec(entry.dtype, entry.shape) for name, entry in entries.items()}
        except Exception as error:
            _note(error, errors)
        if failed := failed_ranks(table is None):
            return SwapOutcome("refused", "; ".join(errors) or f"workers {failed} cannot read the mirror.")
        assert weights is not None
        assert table is not None
        if refusal := self._learn(table, lambda names: dict(whole_tensors(weights, names))):
            return refusal
        found = self._load_checkpoint(whole_tensors(weights, module_order(table)), held.record.ref, times)
        return SwapOutcome(found.outcome, found.error, times)

    def _load_from_store(self, spool: FetchingSpool, seq: int, anew: bool) -> SwapOutcome:
        errors: list[str] = []
        route = self._find(spool, seq, anew, errors)
        found, _ = share(None if route is None else [hop.name for hop in route.hops])
        if route is None or any(other != found[0] for other in found):
            return SwapOutcome("refused", "; ".join(errors) or "the workers have not found the same route.")
        if route.table is not None:
            read = functools.partial(fetch_tensors, route.hops[0], route.context, spool=spool)
            if refusal := self._learn(route.table, read):
                return refusal
        if self._updates.why_not is not None and any(hop.base is not None for hop in route.hops):
            return SwapOutcome(
                "refused", f"deltas cannot be applied to these weights, so only a mirror has the version: {self._updates.why_not}"
            )
        times = {"loaded_anew": 0.0}
        for hop in route.hops:
            if hop.base is None:
                tensors = stream_anchor(hop, route.context, module_order(route.table or ()), spool=spool)
                outcome = self._load_checkpoint(tensors, route.context.log.ref(hop.target), times)
            else:
                outcome = self._updates.swap(hop.target.seq)
            if outcome.outcome != "made":  # after the first hop, the weights are not those that the server says it has
                is_changed = hop is not route.hops[0] or outcome.outcome == "quarantined"
                return SwapOutcome("quarantined" if is_changed else "refused", outcome.error, times)
        with contextlib.suppress(SpoolError):
            spool.keep_only(KEPT_HOPS)
        return SwapOutcome("made", times=times)

    def _misfit(self) -> SwapOutcome | None:
        """Return a refusal if the model of any worker cannot load the tensors that were learnt last. None if all can."""
        reason = self._updates.misfit
        failed = failed_ranks(reason is not None)
        if not failed:
            return None
        return SwapOutcome("refused", f"the chain does not fit the model: {reason or f'workers {failed} cannot load its tensors'}.")

    def _learn(self, table: TensorTable, read: _Read) -> SwapOutcome | None:
        """Learn the layout of a checkpoint's tensors. Returns a refusal if the model cannot hold the checkpoint. None if it can."""
        weights = self._updates.weights
        before, version = weights.table, weights.version
        self._updates.learn_table(table)
        if misfit := self._misfit():
            return misfit
        untied = self._untied(table, read)
        if untied and before is not None:
            self._updates.learn_table(before)
            if version is not None:  # the weights are the same
                weights.label(version)
        return untied

    def _untied(self, table: TensorTable, read: _Read) -> SwapOutcome | None:
        """Return a refusal if a checkpoint has two values for one tensor of the model: the last one would win. None if it fits."""
        layout = self._updates.weights.layout
        pairs = {} if layout is None or layout.tensors.keys() != table.keys() else tied_tensors(layout.tensors)
        pairs = {name: first for name, first in pairs.items() if table[name] == table[first]}
        errors: list[str] = []
        try:
            found = read(sorted({*pairs, *pairs.values()})) if pairs else {}
            for name, first in pairs.items():
                if not torch.equal(as_bits(found[name]), as_bits(found[first])):
                    errors.append(f"{name!r} and {first!r} are tied in the model, but differ in the chain.")
        except Exception as error:
            _note(error, errors)
        failed = failed_ranks(bool(errors))
        return SwapOutcome("refused", errors[0] if errors else f"workers {failed} cannot hold the checkpoint.") if failed else None

    def _find(self, spool: FetchingSpool, seq: int, anew: bool, errors: list[str]) -> _Route | None:
        """Find a route, and fetch what is not the checkpoint itself. Returns None after a failure."""
        version = None if anew or not self._updates.is_ready else self._updates.weights.version
        try:
            hops, context = spool.route(None if version is None else version.ref, seq)
            table = None
            if hops and hops[0].base is None:
                table = read_tensor_table(context, hops[0])
                write_table(spool.table_path, table)
            for hop in hops:
                if hop.base is not None:
                    spool.put(hop, context)
            return _Route(hops, context, table)
        except Exception as error:
            _note(error, errors)
            return None

    def _load_checkpoint(self, tensors: Tensors, ref: CommitRef, times: dict[str, float]) -> SwapOutcome:
        """Load all tensors, and compare the digest of the weights with that of the version."""
        self._updates.forget()
        errors: list[str] = []
        began = time.perf_counter()
        try:
            self._load(self._bases.watch(tensors))
        except Exception as error:
            _note(error, errors)
        loaded = time.perf_counter()
        if failed := failed_ranks(bool(errors)):
            return SwapOutcome("quarantined", "; ".join(errors) or f"workers {failed} have not loaded the checkpoint.")
        self._updates.adopt_loaded(ref)
        times |= {"write_ms": (loaded - began) * 1e3, "confirm_ms": (time.perf_counter() - loaded) * 1e3, "loaded_anew": 1.0}
        if self._updates.weights.version is None:
            return SwapOutcome("quarantined", f"after loading, the weights do not have the digest of commit {ref.seq}.")
        return SwapOutcome("made")


def _note(error: Exception, errors: list[str]) -> None:
    logger.exception("deltawire: a version cannot be loaded")
    errors.append(f"{type(error).__name__}: {error}")
