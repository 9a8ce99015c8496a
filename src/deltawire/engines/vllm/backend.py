"""The weight-transfer backend `deltawire`: one object in each worker of a vLLM server.

    POST /init_weight_transfer_engine {"init_info": {"mirror": DIR, "spool": DIR, "url": URL, …}}
    POST /collective_rpc {"method": "deltawire_learn", "args": [FILE]}           once: learns the layout of the model
    POST /collective_rpc {"method": "deltawire_adopt", "args": [COMMIT]}         if the loaded weights are those of a version
    POST /collective_rpc {"method": "deltawire_prepare", "args": [SEQ]}          at any time: stages in the background
    POST /collective_rpc {"method": "deltawire_swap", …}                         all in one call (engine_core.py); or these:
    POST /pause, /start_weight_update
    POST /update_weights {"update_info": {"seq": SEQ}}
    POST /finish_weight_update {"weight_version": "SEQ"}, /resume

**Updates of live memory.** If there is a spool, the layout was learnt and the version of the weights is known, deltas are decoded against
the weights where they are (live_updates.py). Nothing is loaded, and a failed write is undone. The status says whether updates are made
this way (`live`), and if not, `why_not`. All other updates come from the mirror, or from the store if there is none.

**Loading from the store.** With a spool and a URL, but without a mirror, workers fetch deltas themselves. An update that must load
everything streams a full checkpoint from the store, shard by shard, and continues with deltas (cold_start.py).

**Updates from the mirror.** mirror_updates.py describes what they write and what they confirm. An update that was not prepared is staged
within the pause, which takes longer.

**What happens on failures.** All workers stage an update before any of them writes, so a failure up to then changes nothing. If an update
of live memory fails later, all workers write the old values back. If that fails, or an update from the mirror or the store fails, all
workers become *quarantined*: their weights are in an unknown state. The call fails, and the server stays paused until a client resumes it.
Quarantined workers accept only an update that loads everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.logger import init_logger

from ...chain.reader_options import ReaderOptions
from ...codec.gpu.device import let_others_go_first
from ...errors import CorruptRecord, EngineError, EngineQuarantined, EngineRefused
from ...format.records.canonical import Fields
from ...format.records.record_parts import CommitRef
from ...subscribe.delta_spool import DeltaSpool
from ...subscribe.fetching_spool import FetchingSpool
from . import OLDEST_VLLM, lost_wakeups
from .draft import tell_drafts
from .live.cold_start import ColdStart
from .live.kept_bases import KeptBases
from .live.live_updates import LiveUpdates
from .live.live_weights import Confirm, LiveWeights
from .live.peers import PeerBases
from .live.update_types import Outcome, SwapOutcome
from .mirror.mirror_updates import MirrorUpdates
from .mirror.staging import Stager
from .ranks import failed_ranks, raises_for_all
from .worker_model import WorkerModel

logger = init_logger("vllm.deltawire")


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where versions come from.

    Parameters
    ----------
    mirror
        The directory of the mirror, which all workers of a host share. None if versions come only from the spool.
    spool
        The directory of the spool, which all workers of a host share. None if versions come only from the mirror.
    url
        The location of the chain. The workers then bring the mirror to the requested versions themselves. If there is only a spool, they
        fetch deltas into it, and load full checkpoints from the store. Without a URL, another process does this, such as `deltawire
        sidecar`.
    run
        The name that the run must have.
    trusted_keys
        Public keys. Records that none of them signed are refused.
    confirm
        What is read back after each update. "auto" reads the elements that were written, and digests the tensors in checkpoint layout,
        within the swap if that is quick. "written" digests them after the swap. "everything" reads all tensors within the swap.
    threads
        Number of threads for decoding and comparing. None means one per core; for decoding in the memory of a CPU server, it means one.
    """

    mirror: str | None = None
    spool: str | None = None
    url: str | None = None
    run: str | None = None
    trusted_keys: list[str] = field(default_factory=list)
    confirm: str = "auto"
    threads: int | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """An update.

    Parameters
    ----------
    seq
        The number of the version's commit.
    anew
        True to load all weights, even if the worker's version is known.
    """

    seq: int
    anew: bool = False


class DeltaWireBackend(WeightTransferEngine):  # type: ignore[misc]
    """Brings the weights of a worker to versions of a chain."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = True
    """True: a draft that follows the chain is updated together with the model, so an update of the draft alone has nothing left to do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not hasattr(self, "model"):
            raise EngineRefused(f"this vLLM is too old for the weight-transfer backend deltawire, which needs vLLM {OLDEST_VLLM} or later.")
        self._info: InitInfo | None = None
        self._mirror = MirrorUpdates(self.model, self.vllm_config)
        self._model = WorkerModel(self.model, self.vllm_config)
        self._weights: LiveWeights | None = None
        self._updates: LiveUpdates | None = None
        self._bases: KeptBases | None = None
        self._peers: PeerBases | None = None
        self._cold_start: ColdStart | None = None
        """Loads versions from the store. None if they come from a mirror, or only from the spool."""
        self._is_staging_live = False
        """True if the last update that was prepared is decoded against live memory."""
        self._is_for_draft = False
        """True during an update of the draft model alone."""
        if self.device.type != "cpu":
            let_others_go_first()
            if getattr(self.vllm_config, "speculative_config", None) is None:  # otherwise the worker has not told the draft yet
                self._model.learn_early()
        self._is_quarantined = False
        self._error: str | None = None
        self._last: dict[str, float] = {}
        lost_wakeups.look_often()
        _add_rpc_methods()

    # Methods that vLLM calls

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Set where versions come from. The same settings again change nothing. Other settings make the next update load everything."""
        if init_info.confirm not in ("auto", "written", "everything"):
            self._raise(EngineRefused, f'confirm must be "auto", "written" or "everything", not {init_info.confirm!r}')
            return
        if init_info.mirror is None and init_info.spool is None:
            self._raise(EngineRefused, "name a mirror or a spool, where versions come from")
            return
        if init_info == self._info:
            return
        self.shutdown()
        options = ReaderOptions(run=init_info.run, trusted_keys=tuple(init_info.trusted_keys))
        if init_info.mirror is not None:
            mirror = Path(init_info.mirror)
            self._mirror.stager = Stager(mirror, init_info.url, options, init_info.threads, self._mirror.map_changes)
            self._mirror.confirms_everything = init_info.confirm == "everything"
        if init_info.spool is not None:
            self._start_live_updates(init_info, Path(init_info.spool), options)
        self._info = init_info

    def start_weight_update(self) -> None:
        """Do nothing: `update_weights` does all the work."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def set_weight_update_target(self, model: Any, model_config: Any) -> None:
        """Begin an update of the draft model alone: vLLM calls it for /start_draft_weight_update."""
        self._is_for_draft = True

    def reset_weight_update_target(self) -> None:
        """End an update of the draft model alone."""
        self._is_for_draft = False

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Bring this worker to a version, together with all other workers. Raises, in the last worker, if any worker failed.

        An update of the draft model alone changes nothing: a draft that follows the chain has the version of the model already.
        """
        if self._is_for_draft:
            self._check_draft(update_info.seq)
            return
        found = self._bring(update_info.seq, anew=update_info.anew)
        self._error, self._last = found.error, {"loaded_anew": 0, **found.times}
        if found.outcome != "refused":
            self._is_quarantined = found.outcome == "quarantined"
        if found.outcome == "refused":
            self._raise(EngineRefused, f"the workers did not take commit {update_info.seq}: nothing was changed")
        elif found.outcome == "quarantined":
            self._raise(EngineQuarantined, f"the workers failed to take commit {update_info.seq}")

    def finish_weight_update(self) -> None:
        """Raise, in the last worker, if the weights are in an unknown state."""
        if self._is_quarantined:
            self._raise(EngineQuarantined, "the last update failed")

    def shutdown(self) -> None:
        """Release the mirror and the store. The weights stay, but their version is forgotten."""
        self._mirror.close()
        if self._updates is not None:
            self._updates.close()
            self._updates = None
        if self._cold_start is not None:
            self._cold_start.close()
            self._cold_start = None
        self._info = None

    def take_draft(self, draft: Any, *, is_early: bool = False) -> None:
        """Set the draft model, before anything is learnt.

        Parameters
        ----------
        draft
            The draft model. None if there is none.
        is_early
            True if the KV cache is not allocated yet, so that there is memory to learn layouts.
        """
        self._model.take_draft(draft)
        if is_early and getattr(self.vllm_config, "speculative_config", None) is not None:
            self._model.learn_early()

    # /collective_rpc calls the next methods. They never raise, because that would confuse vLLM's executor (see `raises_for_all`)

    def learn(self, table: str) -> dict[str, Any]:
        """Learn where the model keeps the tensors of a chain, and digest them. Returns the status.

        Parameters
        ----------
        table
            The file with the names, types and shapes of the chain's tensors (`DeltaSpool.table_path`).
        """
        if self._updates is not None:
            self._updates.learn(Path(table))
        return self.status()

    def adopt(self, ref: Mapping[str, Any]) -> dict[str, Any]:
        """Take the weights for those of a version, if their digest is that of the version. Returns the status, whose `seq` tells.

        Parameters
        ----------
        ref
            The commit of the version, as `CommitRef.plain` returns it.
        """
        if self._updates is not None:
            try:
                self._updates.adopt(CommitRef.of(Fields(dict(ref), "commit reference")))
            except CorruptRecord as error:
                self._record(error)
            self._is_quarantined = self._is_quarantined and self._updates.weights.version is None
        return self.status()

    def prepare(self, seq: int) -> dict[str, Any]:
        """Begin to stage a version. Returns the status.

        Parameters
        ----------
        seq
            The number of the version's commit.
        """
        self._is_staging_live = self._is_ready() if self._cold_start is not None else self._is_live(int(seq))  # the staging thread fetches
        if self._updates is not None and self._is_staging_live:
            self._updates.prepare(int(seq))
        else:
            self._mirror.prepare(int(seq))
        return self.status()

    def swap(self, seq: int, anew: bool = False) -> dict[str, Any]:
        """Bring this worker to a version, together with all other workers. Returns the status, and the `outcome`.

        Parameters
        ----------
        seq
            The number of the version's commit.
        anew
            True to load all weights, even if the worker's version is known.
        """
        try:
            self.receive_weights(UpdateInfo(int(seq), bool(anew)))
        except EngineError as error:  # only the last worker raises, but all know of the failure
            self._error = self._error or str(error)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        status = self.status()
        outcome: Outcome = "quarantined" if status["quarantined"] else "made" if status["seq"] == int(seq) else "refused"
        return {**status, "outcome": outcome}

    def forget(self) -> None:
        """Forget the version, because the weights were discarded or changed by other code."""
        if self._updates is not None:
            self._updates.forget()
        elif self._weights is not None:
            self._weights.forget()
        self._mirror.forget()

    def quarantine(self, reason: str) -> dict[str, Any]:
        """Take the weights for unknown, because they or their results are wrong. Only an update that loads everything is accepted then.

        Returns the status.

        Parameters
        ----------
        reason
            What is wrong.
        """
        self.forget()
        self._is_quarantined, self._error = True, reason
        return self.status()

    def status(self) -> dict[str, Any]:
        """Return the state of this worker, in JSON's types."""
        stager, held, updates = self._mirror.stager, self._mirror.live, self._updates
        version = None if self._weights is None else self._weights.version
        live = updates if self._is_staging_live else None
        return {
            "initialised": self._info is not None,
            "seq": held.seq if held is not None else None if version is None else version.ref.seq,
            "staged": live.staged if live is not None else None if stager is None else stager.staged,
            "staging_error": live.staging_error if live is not None else None if stager is None else stager.error,
            "quarantined": self._is_quarantined or (self._weights is not None and self._weights.is_quarantined),
            "error": self._error,
            "unconfirmed": self._weights is not None and self._weights.is_unconfirmed,
            "transformed": len(self._mirror.transformed),
            "derived": len(self._mirror.derived),
            "last": dict(self._last),
            "draft": None if self._model.draft is None else self._model.draft.status(),
            "kept_bytes": 0 if self._bases is None else self._bases.nbytes,
            **({"live": False} if updates is None else updates.status()),
        }

    # The ways of an update. All workers take the same way

    def _bring(self, seq: int, *, anew: bool) -> SwapOutcome:
        if self._info is None:
            return SwapOutcome("refused", "the weight transfer was not initialised: POST /init_weight_transfer_engine first")
        if self._updates is not None and not failed_ranks(anew or not self._is_live(seq)):
            found = self._updates.swap(seq)
            if found.outcome != "refused":
                self._mirror.forget()  # the version that the mirror holds is no longer that of the weights
            return found
        if self._updates is not None:
            self._updates.wait()
        if self._cold_start is not None:
            return self._cold_start.bring(seq, anew=anew)
        if self._mirror.stager is None:
            return SwapOutcome("refused", "the version of the weights is unknown, and there is no mirror to load it from")
        if self._is_quarantined and not anew:
            return SwapOutcome("refused", "the last update failed, so only an update that loads everything (`anew`) is accepted")
        found = self._mirror.bring(seq, anew=anew)
        if found.outcome != "refused":
            self._follow_mirror()
        return found

    def _is_ready(self) -> bool:
        """Return whether an update can be decoded against live memory, if there is one."""
        return self._updates is not None and self._updates.is_ready and not self._is_quarantined

    def _is_live(self, seq: int) -> bool:
        """Return whether this worker decodes an update against live memory. If only the mirror has the version, it does not."""
        if self._updates is None or not self._is_ready():
            return False
        return (self._mirror.stager is None and self._cold_start is None) or self._updates.offers(seq)

    def _follow_mirror(self) -> None:
        """Take the weights for those of the version that was loaded from the mirror, so that the next update can be one of live memory."""
        held, updates, bases = self._mirror.live, self._updates, self._bases
        if updates is None or bases is None:
            return
        updates.forget()
        if held is not None and not failed_ranks(bases.take(held.weights) is not None):
            updates.adopt(held.ref)

    def _start_live_updates(self, info: InitInfo, folder: Path, options: ReaderOptions) -> None:
        self._weights = self._live_weights(info)
        if info.url is None or info.mirror is not None:
            self._updates = LiveUpdates(self._weights, DeltaSpool(folder), self._peers)
            return
        spool = FetchingSpool(folder, info.url, options=options)
        self._updates = LiveUpdates(self._weights, spool, self._peers)
        assert self._bases is not None
        self._cold_start = ColdStart(self._updates, spool, self._bases, self._model.load)

    def _live_weights(self, info: InitInfo) -> LiveWeights:
        """Return the weights with new settings. Their layout and version stay."""
        threads = 1 if info.threads is None and self.device.type == "cpu" else info.threads
        if self._weights is not None:
            self._weights.set(confirm=_confirm(info), threads=threads)
            return self._weights
        assert info.spool is not None
        model = self._model
        self._bases = KeptBases(Path(info.spool) / "kept" / str(self.vllm_config.instance_id), model.checkpoint)
        asleep = "the server has sleep mode, whose memory cannot be shared" if self.model_config.enable_sleep_mode else None
        self._peers = PeerBases(self._bases, refusal=asleep)
        return LiveWeights(
            self.model,
            model.learn_layout,
            source=self._peers,
            recompute=model.recompute,
            reprocess=model.reprocess,
            load=model.load_module,
            confirm=_confirm(info),
            threads=threads,
        )

    def _check_draft(self, seq: int) -> None:
        """Raise, in the last worker, unless the draft model of all workers has a version."""
        draft, has = self._model.draft, self.status()["seq"]
        self._error = None
        if draft is None or draft.why_not is not None:
            self._error = "it has none" if draft is None else draft.why_not
        elif has != seq:
            self._error = f"the draft model is updated together with the model, which has commit {has}: POST /start_weight_update instead"
        if failed_ranks(self._error is not None):
            self._raise(EngineRefused, f"the draft model of the workers was not brought to commit {seq}")

    def _record(self, error: Exception) -> None:
        logger.exception("deltawire: an update failed")
        self._error = f"{type(error).__name__}: {error}"

    def _raise(self, kind: type[EngineError], message: str) -> None:
        if raises_for_all():
            raise kind(f"{message}. {self._error or ''}".rstrip())


def _confirm(info: InitInfo) -> Confirm:
    return "everything" if info.confirm == "everything" else "written" if info.confirm == "written" else "auto"


def _add_rpc_methods() -> None:
    """Add methods for /collective_rpc, because vLLM has no routes to prepare an update, to get its status, or to abandon it."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.gpu_worker import Worker

    def deltawire_status(worker: Any) -> dict[str, Any]:
        return dict(worker.weight_transfer_engine.status())

    def deltawire_prepare(worker: Any, seq: int) -> dict[str, Any]:
        return dict(worker.weight_transfer_engine.prepare(seq))

    def deltawire_settle(worker: Any) -> dict[str, Any]:
        worker._weight_update_active = False
        return deltawire_status(worker)

    def deltawire_learn(worker: Any, table: str) -> dict[str, Any]:
        with set_current_vllm_config(worker.vllm_config):
            return dict(worker.weight_transfer_engine.learn(table))

    def deltawire_adopt(worker: Any, ref: Mapping[str, Any]) -> dict[str, Any]:
        return dict(worker.weight_transfer_engine.adopt(ref))

    def deltawire_quarantine(worker: Any, reason: str) -> dict[str, Any]:
        return dict(worker.weight_transfer_engine.quarantine(reason))

    def deltawire_swap(worker: Any, seq: int, anew: bool = False) -> dict[str, Any]:
        worker._weight_update_active = False  # an update by vLLM's routes may have been begun and abandoned
        with set_current_vllm_config(worker.vllm_config):
            answer = dict(worker.weight_transfer_engine.swap(seq, anew))
        if answer["outcome"] == "made":
            worker.model_runner.reset_lora_state()
        return answer

    if not hasattr(Worker, "deltawire_status"):
        tell_drafts(Worker)
    Worker.deltawire_status = deltawire_status
    Worker.deltawire_learn = deltawire_learn
    Worker.deltawire_adopt = deltawire_adopt
    Worker.deltawire_quarantine = deltawire_quarantine
    Worker.deltawire_swap = deltawire_swap
    Worker.deltawire_prepare = deltawire_prepare
    Worker.deltawire_settle = deltawire_settle
