"""Updates of a worker's live memory, as the backend offers them: learn the layout, adopt a version, prepare an update, swap.

Deltas come from a spool (subscribe/spool/delta_spool.py). A server whose layout cannot be updated this way says why (`why_not`). Each of
its updates then loads everything (cold_start.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....errors import BaseMismatch, DeltawireError, EngineModelDiffers
from ....format.digest import Digest
from ....format.records.record_parts import CommitRef
from ....subscribe.spool.delta_spool import DeltaSpool
from ....subscribe.tensor_table import TensorTable, load_table
from ..ranks import agree, failed_ranks, share, sum_of
from .interfaces import Layout
from .live_staging import LiveStaging
from .live_weights import LiveWeights
from .ownership import Blocks, replicas_agree
from .peers import PeerBases
from .update_types import LiveVersion, SwapOutcome

logger = logging.getLogger("vllm.deltawire")

NOT_LEARNT = "the layout of the weights was not learnt"
_MOST_NAMED = 20
"""The status names at most this many modules."""


class LiveUpdates:
    """The updates of one worker.

    Parameters
    ----------
    weights
        The worker's weights. They may have learnt their layout already.
    spool
        The spool, where deltas are found.
    peers
        Reads tensors from the memory of other workers. None if there is no such source.
    why_not
        Why updates cannot be written to live memory. None if the layout was learnt before, with another spool.
    """

    def __init__(
        self, weights: LiveWeights, spool: DeltaSpool, peers: PeerBases | None = None, *, why_not: str | None = NOT_LEARNT
    ) -> None:
        self.weights = weights
        self._peers = peers
        self._spool = spool
        self._staging = LiveStaging(weights, self._spool)
        self.why_not = why_not
        """The reason why updates cannot be written to live memory. None if they can. It is None in all workers or in none."""
        self.misfit: str | None = None
        """The reason why the model cannot load the tensors of the chain at all. None if it can, as far as this worker knows."""
        self._digest: Digest | None = None
        """The digest of what this worker owns. None if it is not known."""
        self._replicated: Mapping[tuple[int, ...], Digest] = {}
        self._kinds: Counter[str] = Counter()
        """The number of tensors of each kind in the layout `_counted`."""
        self._counted: Layout | None = None
        self._unstaged: str | None = None
        """The reason why the last call of `prepare` staged nothing."""

    @property
    def is_ready(self) -> bool:
        """True if the next update is decoded against live memory."""
        return self.why_not is None and self.weights.version is not None

    def learn(self, path: Path) -> None:
        """Learn the layout of a table in a file, as `learn_table` does, and digest the weights. Never raises; `why_not` has the reason.

        Parameters
        ----------
        path
            The file of the table (`DeltaSpool.table_path`).
        """
        self._digest = None  # other code may have written to the weights since then
        try:
            self.learn_table(load_table(path))
        except DeltawireError as error:
            self.learn_table(None, str(error))
        if self.why_not is None and self._digest is None:
            reason = self._find_digest()
            if failed := failed_ranks(reason is not None):
                self.why_not = reason or f"the weights of workers {failed} cannot be digested"

    def learn_table(self, table: TensorTable | None, reason: str | None = None) -> None:
        """Learn where the model keeps the tensors of a chain, together with all other workers. Never raises; `why_not` has the reason.

        A table that is known already changes nothing.

        Parameters
        ----------
        table
            The tensors of the chain. None if this worker could not read them.
        reason
            Why this worker could not read them.
        """
        self._staging.forget()
        self.misfit = None
        version = self.weights.version
        if failed_ranks(table is None or table != self.weights.table or self.weights.why_not is not None):
            reason = self._learn(table) if table is not None else reason
            failed = failed_ranks(reason is not None)
            if not failed:
                layout = self.weights.layout
                assert layout is not None
                if self._peers is not None:
                    self._peers.connect(layout)
                reason = self._own(*share(layout.blocks()), share(self.weights.needed)[0]) or self._find_digest()
                failed = failed_ranks(reason is not None)
            reason = reason or (f"the layout of workers {failed} cannot be updated" if failed else None)
        self.why_not = reason
        if reason is not None:
            logger.info("deltawire: updates are not written to live memory: %s", reason)
            if version is not None and self.weights.version is None:  # learning has forgotten it, but the weights are the same
                self.weights.label(version)

    def adopt(self, ref: CommitRef) -> None:
        """Take the weights for those of a version if their digest is that of the version. All workers do this together. Never raises.

        Parameters
        ----------
        ref
            The commit of the version.
        """
        self._staging.forget()
        if self.why_not is not None or ref.digest is None:
            return
        reason = self._find_digest() if self._digest is None else None
        if failed_ranks(reason is not None) or not replicas_agree(share(self._replicated)[0]):
            return
        if sum_of(self._digest or Digest()) == ref.digest:
            self.weights.label(LiveVersion(ref, ref.digest))

    def adopt_loaded(self, ref: CommitRef) -> None:
        """Take the weights for those of a version that was just loaded in full. Weights that cannot be read back are not checked.

        Parameters
        ----------
        ref
            The commit of the version.
        """
        if self.why_not is None:
            self.adopt(ref)
        elif ref.digest is not None:
            self.weights.label(LiveVersion(ref, ref.digest))

    def offers(self, seq: int) -> bool:
        """Return whether the update to a commit is staged, or is in the spool.

        Parameters
        ----------
        seq
            The number of the commit.
        """
        version = self.weights.version
        if self.staged == seq or version is None:
            return version is not None
        if self.weights.undo.back_to(seq) is not None:
            return True
        try:
            return self._spool.hop(version.ref, seq) is not None
        except Exception:  # all workers ask each other next, so none of them may raise
            logger.exception("deltawire: the spool has no update to commit %d", seq)
            return False

    def prepare(self, seq: int) -> None:
        """Begin to stage the update to a commit. An update that loads everything cannot be staged; then `staging_error` says why.

        Parameters
        ----------
        seq
            The number of the commit.
        """
        unknown = None if self.weights.version is not None else "the version of the weights is unknown"
        reason = self.why_not or unknown
        self._unstaged = None if reason is None else f"the update to commit {seq} loads everything: {reason}"
        if reason is None:
            self._staging.prepare(seq)

    def swap(self, seq: int) -> SwapOutcome:
        """Write the staged update, together with all other workers. An update that is not staged yet is staged first. Never raises.

        Parameters
        ----------
        seq
            The number of the commit.
        """
        try:
            staged = [self._staging.take(seq)]
        except Exception as error:
            agree(True, None)
            return SwapOutcome("refused", f"{type(error).__name__}: {error}")
        outcome = self.weights.swap(staged[0], agree)
        self._staging.run_later(staged.clear)  # not here: the server waits, and it takes time to free the memory of many changes
        self._staging.run_later(self.weights.undo.free)
        self._digest = None
        if self.weights.is_unconfirmed:
            self._staging.run_later(self._confirm)
        return outcome

    def wait(self) -> None:
        """Return when all workers have stopped reading weights, so that other code may write to them. All workers do this together."""
        self.stop_staging()
        failed_ranks(False)  # other workers may still have read this one's memory

    def stop_staging(self) -> None:
        """Drop the staged update, and return when this worker has stopped reading its weights."""
        self._staging.forget()
        self._staging.wait()

    def forget(self) -> None:
        """Forget the version, because other code writes to the weights. They are then not quarantined."""
        self.stop_staging()
        self.weights.forget()
        self.weights.is_quarantined = False
        self._digest = None

    def quarantine(self) -> None:
        """Note that the weights are in an unknown state."""
        self.forget()
        self.weights.is_quarantined = True

    def status(self) -> dict[str, Any]:
        """Return the state of the updates, in JSON's types."""
        staged, version, layout = self._staging.staged, self.weights.version, self.weights.layout
        if layout is not self._counted:  # generation waits for each status
            self._counted = layout
            self._kinds = Counter() if layout is None else Counter(tensor.kind for tensor in layout.tensors.values())
        return {
            "live": self.why_not is None,
            "why_not": self.why_not,
            "misfit": self.misfit,
            "commit": None if version is None else version.ref.commit,
            "digest": None if self._digest is None else self._digest.hex(),
            "tensors": dict(self._kinds),
            "modules": modules_of(layout),
            "staged_bytes": 0 if staged is None or staged.is_back else staged.nbytes,
            "undo": [{"seq": version.ref.seq, "commit": version.ref.commit} for version in self.weights.undo.versions],
            "undo_bytes": self.weights.undo.nbytes,
            **({} if self._peers is None else self._peers.status()),
        }

    def close(self) -> None:
        """Drop the staged update, and end the thread. The weights keep their layout and their version."""
        self._staging.close()

    @property
    def staged(self) -> int | None:
        """The commit to which an update is staged. None if there is none."""
        staged = self._staging.staged
        return None if staged is None else staged.hop.target.seq

    @property
    def staging_error(self) -> str | None:
        """The reason why staging failed. None if it did not."""
        return self._unstaged or self._staging.error

    def _learn(self, table: TensorTable) -> str | None:
        """Learn the layout in this worker. Returns why its weights cannot be updated, or None."""
        self._digest = None
        try:
            self.weights.learn(table, alone=False)
            return self.weights.why_not
        except EngineModelDiffers as error:
            self.misfit = error.message
            return self.misfit
        except Exception as error:
            logger.exception("deltawire: the layout of the weights cannot be learnt")
            return f"{type(error).__name__}: {error}"

    def _own(self, held: Sequence[Blocks], rank: int, needed: Sequence[Collection[str]]) -> str | None:
        """Find out what this worker owns. Returns why its weights cannot be updated, or None."""
        try:
            self.weights.own(held, rank, needed)
            return self.weights.why_not
        except Exception as error:
            logger.exception("deltawire: the layout of the weights cannot be used")
            return f"{type(error).__name__}: {error}"

    def _find_digest(self) -> str | None:
        """Digest what this worker owns. Returns why that is impossible, or None."""
        try:
            found = self.weights.digest()
            self._digest, self._replicated = found.owned, found.replicated
            return None
        except BaseMismatch:  # they can be updated, but they are those of no version
            logger.exception("deltawire: the weights have no digest")
            self._digest, self._replicated = Digest(), {}
            return None
        except Exception as error:
            logger.exception("deltawire: the weights cannot be digested")
            return f"{type(error).__name__}: {error}"

    def _confirm(self) -> None:
        try:
            self.weights.check_direct()
        except Exception:  # weights that cannot be checked are as unknown as wrong ones
            logger.exception("deltawire: the weights were not confirmed after a swap")
            self.weights.quarantine()


def modules_of(layout: Layout | None) -> dict[str, Any]:
    """Return how many modules follow updates in each way, and the names of some of them, with the reasons.

    `loaded_anew` names modules that an update loads anew, each by itself. `whole_model` names modules whose change makes the sidecar load
    the whole model.

    Parameters
    ----------
    layout
        The layout. None if it is not known.
    """
    rules = [] if layout is None else sorted(layout.modules.values(), key=lambda rule: rule.name)
    return {
        "counts": dict(Counter(rule.how for rule in rules)),
        "loaded_anew": {rule.name: rule.reason for rule in [each for each in rules if each.how == "load_anew"][:_MOST_NAMED]},
        "whole_model": {rule.name: rule.reason for rule in [each for each in rules if each.how == "refuse"][:_MOST_NAMED]},
    }
