"""The weight-transfer backend `deltawire`: one object in each worker of a vLLM server.

    POST /init_weight_transfer_engine {"init_info": {"spool": DIR, "url": URL, "mirror": DIR, …}}
    POST /collective_rpc {"method": "deltawire_learn", "args": [FILE]}           once: learns the layout of the model
    POST /collective_rpc {"method": "deltawire_adopt", "args": [COMMIT]}         if the loaded weights are those of a version
    POST /collective_rpc {"method": "deltawire_prepare", "args": [SEQ]}          at any time: stages in the background
    POST /collective_rpc {"method": "deltawire_swap", …}                         all in one call (engine_core.py); or these:
    POST /pause, /start_weight_update
    POST /update_weights {"update_info": {"seq": SEQ}}
    POST /finish_weight_update {"weight_version": "SEQ"}, /resume

**Updates.** A delta is decoded against the weights where they are (live/live_updates.py). Nothing is loaded, and a failed write is undone.
This needs a layout that was learnt, and weights whose version is known. The status says whether updates are made this way (`live`), and if
not, `why_not`. An update that was not prepared is staged within the pause, which takes longer.

**Full loads.** All other updates load everything (live/cold_start.py): from the mirror, if it holds the version, or from the store, shard
by shard. This is how a server gets its first version, unless it was started with one, and how it is repaired.

**What happens on failures.** All workers stage an update before any of them writes, so a failure up to then changes nothing. If it fails
later, all workers write the old values back. If that fails, or loading fails, all workers become *quarantined*: their weights are in an
unknown state. The call fails, and the server stays paused until a client resumes it. The next update of quarantined workers loads
everything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.logger import init_logger

from ...chain.reader_options import ReaderOptions
from ...codec.gpu.device import let_others_go_first
from ...errors import CorruptRecord, EngineError, EngineQuarantined, EngineRefused, SpoolError
from ...format.records.canonical import Fields
from ...format.records.record_parts import CommitRef
from ...subscribe.mirror.locks import FileLock
from ...subscribe.spool.delta_spool import DeltaSpool, default_spool
from ...subscribe.spool.fetching_spool import FetchingSpool
from . import OLDEST_VLLM, lost_wakeups
from .checked_arguments import checked, find_wrong_setting, is_flag, is_list_of_text, is_mapping, is_number, is_text
from .draft import tell_drafts
from .expert_capture import capture_experts, take_experts
from .live.cold_start import ColdStart
from .live.kept_bases import KeptBases
from .live.live_updates import NOT_LEARNT, LiveUpdates
from .live.live_weights import Confirm, LiveWeights
from .live.peers import PeerBases
from .live.staging_pace import DEFAULT_SHARE, StagingPace, memory_bandwidth
from .live.update_types import Outcome, SwapOutcome
from .ranks import failed_ranks, raises_for_all, share
from .worker_model import WorkerModel

logger = init_logger("vllm.deltawire")


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The sources of versions. At least one of `spool`, `url` and `mirror` is needed.

    Parameters
    ----------
    mirror
        The directory of a mirror, which all workers of a host share and another process keeps up to date. Full checkpoints are loaded from
        it. None if there is none.
    spool
        The directory from which all workers of a host take deltas. None means the usual one (`default_spool`).
    url
        The location of the chain. The workers then fetch what is in neither the spool nor the mirror. Without a URL, another process must
        do this, such as `deltawire sidecar`.
    run
        The name that the run must have.
    trusted_keys
        Public keys. Records that none of them signed are refused.
    confirm
        What is checked after each update. "auto" reads the scattered elements back, and digests the tensors in checkpoint layout, within
        the swap if that is quick. A GPU digests what it writes to them in the same pass, and does not read it back. "written" digests them
        after the swap. "everything" reads all tensors back within the swap.
    threads
        Number of threads for decoding and digests. None means one per core; for decoding in the memory of a CPU server, it means one.
    gpu_share
        The share of a GPU's time that staging an update may take while the server generates. 1 means as much as it can get.
    relays
        Copies of the chain that relays keep. The workers read from them if they are nearer than `url`.
    undo_bytes
        The most memory that the last updates may take in each worker, in addition to its weights. The worker then goes back to the versions
        before them at once. 0 keeps none.
    """

    mirror: str | None = None
    spool: str | None = None
    url: str | None = None
    run: str | None = None
    trusted_keys: list[str] = field(default_factory=list)
    confirm: str = "auto"
    threads: int | None = None
    gpu_share: float = DEFAULT_SHARE
    relays: list[str] = field(default_factory=list)
    undo_bytes: int = 0


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
        self._model = WorkerModel(self.model, self.vllm_config)
        self._weights: LiveWeights | None = None
        self._updates: LiveUpdates | None = None
        self._bases: KeptBases | None = None
        self._peers: PeerBases | None = None
        self._cold_start: ColdStart | None = None
        self._spool: DeltaSpool | None = None
        self._held_spools: dict[Path, FileLock] = {}
        """Spools that stay until this process ends: tensors that the workers share stay in the first one."""
        self._why_not: str | None = NOT_LEARNT
        """The reason why updates could not be written to live memory with the settings before these."""
        self._is_for_draft = False
        """True during an update of the draft model alone."""
        if self.device.type != "cpu":
            let_others_go_first()
            if getattr(self.vllm_config, "speculative_config", None) is None:  # otherwise the worker has not told the draft yet
                self._model.learn_early()
        self._error: str | None = None
        self._wrong: str | None = None
        """The error in the settings that vLLM has just parsed. None if there is none."""
        self._last: dict[str, float] = {}
        lost_wakeups.look_often()
        _add_rpc_methods()

    # Methods that vLLM calls

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Set where versions come from. The same settings again change nothing. The version of the weights stays."""
        if wrong := self._wrong or find_wrong_setting(vars(init_info)):
            self._wrong, self._error = None, wrong
            self._raise(EngineRefused, "the settings were refused, and the earlier ones remain in force")
            return
        if init_info == self._info:
            return
        before = self._info
        if failed_ranks(not self._restart(init_info)):
            error = self._error or "another worker has failed"
            if before is not None:
                self._restart(before)
            else:
                self.shutdown()
            self._error = error
            self._raise(EngineRefused, "the settings cannot be used")

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        """Return settings. An error is kept for `init_transfer_engine`, because here every worker would raise it."""
        try:
            info: InitInfo = super().parse_init_info(init_dict)
        except (TypeError, ValueError) as error:
            self._wrong, info = str(error), InitInfo()
        return info

    def start_weight_update(self) -> None:
        """Do nothing: `update_weights` does all the work."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            info = self.parse_update_info(update_info)
            is_right = is_number(info.seq) and is_flag(info.anew)
            self._error = None if is_right else f"seq must be the number of a commit, and anew true or false: {update_info!r:.80}"
        except (TypeError, ValueError) as error:
            self._error = str(error)
        if self._error is not None:
            self._raise(EngineRefused, "the update was refused: nothing was changed")
            return
        self.receive_weights(UpdateInfo(int(info.seq), bool(info.anew)))
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
        outcome = self._take(update_info)
        if outcome == "refused":
            self._raise(EngineRefused, f"the workers did not take commit {update_info.seq}: nothing was changed")
        elif outcome == "quarantined":
            self._raise(EngineQuarantined, f"the workers failed to take commit {update_info.seq}")

    def finish_weight_update(self) -> None:
        """Raise, in the last worker, if the weights are in an unknown state."""
        if self._weights is not None and self._weights.is_quarantined:
            self._raise(EngineQuarantined, "the last update failed")

    def shutdown(self) -> None:
        """Release the spool and the store. The weights stay, and so do their layout and their version."""
        if self._updates is not None:
            self._updates.close()
            self._why_not = self._updates.why_not
        if isinstance(self._spool, FetchingSpool):
            self._spool.close()
        self._updates = self._cold_start = self._spool = self._info = None

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
        return self.status()

    def prepare(self, seq: int) -> dict[str, Any]:
        """Begin to stage a version. Returns the status.

        Parameters
        ----------
        seq
            The number of the version's commit.
        """
        if self._updates is not None:
            self._updates.prepare(int(seq))
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
        outcome = self._take(UpdateInfo(int(seq), bool(anew)))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        status = self.status()
        return {**status, "outcome": "quarantined" if status["quarantined"] else outcome}

    def forget(self) -> None:
        """Forget the version, because the weights were discarded or changed by other code."""
        if self._updates is not None:
            self._updates.forget()
        elif self._weights is not None:
            self._weights.forget()

    def stop_staging(self) -> None:
        """Drop the staged update, and return when this worker has stopped reading its weights."""
        if self._updates is not None:
            self._updates.stop_staging()

    def quarantine(self, reason: str) -> dict[str, Any]:
        """Take the weights for unknown, because they or their results are wrong. The next update loads everything.

        Returns the status.

        Parameters
        ----------
        reason
            What is wrong.
        """
        if self._updates is not None:
            self._updates.quarantine()
        self._error = str(reason)
        return self.status()

    def refuse(self, reason: str) -> dict[str, Any]:
        """Do nothing, because the arguments of a call were wrong. Returns the status, and the `outcome`.

        Parameters
        ----------
        reason
            What is wrong.
        """
        logger.error("deltawire: a call was refused: %s", reason)
        self._error = reason
        return {**self.status(), "outcome": "refused"}

    def status(self) -> dict[str, Any]:
        """Return the state of this worker, in JSON's types."""
        updates, version = self._updates, None if self._weights is None else self._weights.version
        return {
            "initialised": self._info is not None,
            "seq": None if version is None else version.ref.seq,
            "staged": None if updates is None else updates.staged,
            "staging_error": None if updates is None else updates.staging_error,
            "quarantined": self._weights is not None and self._weights.is_quarantined,
            "error": self._error,
            "unconfirmed": self._weights is not None and self._weights.is_unconfirmed,
            "last": dict(self._last),
            "draft": self._model.draft_status(),
            "loaded_types": self._model.loaded_types,
            "kept_bytes": 0 if self._bases is None else self._bases.nbytes,
            **({"live": False} if updates is None else updates.status()),
        }

    def _take(self, update_info: UpdateInfo) -> Outcome:
        """Bring this worker to a version, and note what became of it for the status."""
        found = self._bring(update_info.seq, anew=update_info.anew)
        self._error, self._last = found.error, {"loaded_anew": 0, **found.times}
        if found.outcome == "quarantined" and self._updates is not None:
            self._updates.quarantine()
        return found.outcome

    def _bring(self, seq: int, *, anew: bool) -> SwapOutcome:
        """Bring this worker to a version. All workers take the same way."""
        updates, cold_start = self._updates, self._cold_start
        if updates is None or cold_start is None:
            return SwapOutcome("refused", "the weight transfer was not initialised: POST /init_weight_transfer_engine first")
        takes_delta = not anew and updates.is_ready and updates.offers(seq)
        if not failed_ranks(not takes_delta):
            return updates.swap(seq)
        updates.wait()
        return cold_start.bring(seq, anew=anew)

    def _restart(self, info: InitInfo) -> bool:
        """Use these settings from now on, together with all other workers. Returns whether this worker can use them. Never raises."""
        self.shutdown()
        try:
            self._start(info)
        except Exception as error:
            self._record(error)
            return False
        self._info = info
        return True

    def _start(self, info: InitInfo) -> None:
        folders, _ = share(info.spool or str(default_spool(info.url or info.mirror or "")))
        folder = Path(folders[0])  # all workers of a host must have the same one
        options = ReaderOptions(run=info.run, trusted_keys=tuple(info.trusted_keys))
        self._weights = self._live_weights(info, folder)
        assert self._bases is not None
        self._spool = DeltaSpool(folder) if info.url is None else FetchingSpool(folder, [info.url, *info.relays], options=options)
        if folder not in self._held_spools:
            with contextlib.suppress(SpoolError):  # `prepare` and `swap` say what is wrong with it
                self._held_spools[folder] = self._spool.hold()
        self._updates = LiveUpdates(self._weights, self._spool, self._peers, why_not=self._why_not)
        mirror = None if info.mirror is None else Path(info.mirror)
        self._cold_start = ColdStart(self._updates, self._spool, self._bases, self._model.load, mirror=mirror, threads=info.threads)

    def _live_weights(self, info: InitInfo, spool: Path) -> LiveWeights:
        """Return the weights with new settings. Their layout and version stay."""
        threads = 1 if info.threads is None and self.device.type == "cpu" else info.threads
        pace = StagingPace(info.gpu_share, memory_bandwidth(self.device))
        if self._weights is not None:
            self._weights.set(confirm=_confirm(info), threads=threads, pace=pace, undo_bytes=info.undo_bytes)
            return self._weights
        model = self._model
        self._bases = KeptBases(spool / "kept" / str(self.vllm_config.instance_id), model.checkpoint)
        asleep = "the server has sleep mode, whose memory cannot be shared" if self.model_config.enable_sleep_mode else None
        self._peers = PeerBases(self._bases, refusal=asleep)
        weights = LiveWeights(
            self.model,
            model.learn_layout,
            source=self._peers,
            recompute=model.recompute,
            reprocess=model.reprocess,
            load=model.load_module,
        )
        weights.set(confirm=_confirm(info), threads=threads, pace=pace, undo_bytes=info.undo_bytes)
        return weights

    def _check_draft(self, seq: int) -> None:
        """Raise, in the last worker, unless the draft model of all workers has a version."""
        draft, has = self._model.draft_status(), self.status()["seq"]
        self._error = None
        if draft is None or not draft["follows"]:
            self._error = "it has none" if draft is None else draft["why_not"]
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

    def abandon_update(worker: Any) -> None:
        """End an update by vLLM's routes that a client has begun and abandoned, also one of the draft model alone."""
        worker._weight_update_active = False
        worker.weight_transfer_engine.reset_weight_update_target()

    def deltawire_settle(worker: Any) -> dict[str, Any]:
        abandon_update(worker)
        return deltawire_status(worker)

    def deltawire_learn(worker: Any, table: str) -> dict[str, Any]:
        with set_current_vllm_config(worker.vllm_config):
            return dict(worker.weight_transfer_engine.learn(table))

    def deltawire_adopt(worker: Any, ref: Mapping[str, Any]) -> dict[str, Any]:
        return dict(worker.weight_transfer_engine.adopt(ref))

    def deltawire_quarantine(worker: Any, reason: str) -> dict[str, Any]:
        return dict(worker.weight_transfer_engine.quarantine(reason))

    def deltawire_swap(worker: Any, seq: int, anew: bool = False) -> dict[str, Any]:
        abandon_update(worker)
        with set_current_vllm_config(worker.vllm_config):
            answer = dict(worker.weight_transfer_engine.swap(seq, anew))
        if answer["outcome"] == "made":
            worker.model_runner.reset_lora_state()
        return answer

    def deltawire_capture_experts(worker: Any) -> dict[str, Any]:
        try:
            return {"why_not": capture_experts(worker)}
        except Exception as error:  # an internal of vLLM may have changed
            logger.exception("deltawire: experts cannot be recorded")
            return {"why_not": f"{type(error).__name__}: {error}"}

    def deltawire_take_experts(worker: Any, names: list[str]) -> dict[str, Any]:
        return take_experts(worker, names)

    def refuse(worker: Any, reason: str) -> dict[str, Any]:
        return dict(worker.weight_transfer_engine.refuse(reason))

    if not hasattr(Worker, "deltawire_status"):
        tell_drafts(Worker)
    Worker.deltawire_status = checked(deltawire_status, refuse)
    Worker.deltawire_capture_experts = checked(deltawire_capture_experts, refuse)
    Worker.deltawire_take_experts = checked(deltawire_take_experts, refuse, names=is_list_of_text)
    Worker.deltawire_learn = checked(deltawire_learn, refuse, table=is_text)
    Worker.deltawire_adopt = checked(deltawire_adopt, refuse, ref=is_mapping)
    Worker.deltawire_quarantine = checked(deltawire_quarantine, refuse)
    Worker.deltawire_swap = checked(deltawire_swap, refuse, seq=is_number, anew=is_flag)
    Worker.deltawire_prepare = checked(deltawire_prepare, refuse, seq=is_number)
    Worker.deltawire_settle = checked(deltawire_settle, refuse)
