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

**What an update from the mirror writes.** Usually it writes only the elements that changed, at the positions where the model's loaders
have put them (element_map.py). It loads everything in these cases: it is the first update after the start, because the version that the
server loaded is unknown; it says `"anew": true`; it changes a tensor that is not in place (read_back.py); or the model holds tensors that
were computed from its weights, such as the absorbed projections of MLA. An update that was not prepared is staged within the pause, which
takes longer.

**What is confirmed.** When the server starts, the backend reads the loaded weights back, to learn which tensors are in place. After
everything was loaded anew, each tensor in place is read back through the model's own loaders and compared, bit for bit, with the mirror,
whose digest was checked against the chain. Its position in the model is recorded for later updates. After an update, every written
element is read and compared. With `confirm="everything"`, every tensor in place is read back through the loaders. Tensors that vLLM
transforms after loading (`transformed` in the status) cannot be read back. Their values rely on vLLM's own reloading; the backend only
checks that they were transformed again.

**What happens on failures.** All workers stage an update before any of them writes, so a failure up to then changes nothing. If writing
fails, or a weight that is read back differs, all workers become *quarantined*: their weights are in an unknown state. The call fails, and
the server stays paused until a client resumes it. Quarantined workers accept only an update that loads everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.logger import init_logger

from ...chain.reader_options import ReaderOptions
from ...codec.gpu.device import let_others_go_first
from ...errors import CheckpointError, CorruptRecord, EngineError, EngineQuarantined, EngineRefused
from ...format.checkpoints.checkpoint import Checkpoint
from ...format.records.canonical import Fields
from ...format.records.record_parts import CommitRef
from ...subscribe.delta_spool import DeltaSpool
from ...subscribe.fetching_spool import FetchingSpool
from ...subscribe.tensor_table import TensorSpec, TensorTable
from . import OLDEST_VLLM, loading
from .cold_start import ColdStart
from .element_map import ElementMap, MappedChanges
from .kept_bases import KeptBases
from .layout.types import ModuleRule, Scatter
from .layout_update import Layout
from .live_updates import LiveUpdates
from .live_weights import Confirm, LiveWeights
from .ranks import failed_ranks, raises_for_all
from .read_back import read_back
from .recompute import process_again, recompute
from .staging import Change, HeldVersion, StagedUpdate, Stager
from .update_types import Outcome, SwapOutcome

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
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not hasattr(self, "model"):
            raise EngineRefused(f"this vLLM is too old for the weight-transfer backend deltawire, which needs vLLM {OLDEST_VLLM} or later.")
        self._info: InitInfo | None = None
        self._stager: Stager | None = None
        self._live: HeldVersion | None = None
        self._weights: LiveWeights | None = None
        self._updates: LiveUpdates | None = None
        self._cold_start: ColdStart | None = None
        """Loads versions from the store. None if they come from a mirror, or only from the spool."""
        self._is_staging_live = False
        """Whether the last update that was prepared is decoded against live memory."""
        self._bases: KeptBases | None = None
        self._in_place: set[str] = set()
        self._element_map: ElementMap | None = None
        self._transformed: set[str] = set()
        self._derived = _computed_tensors(self.model)
        self._learn_layout()
        self._learnt: tuple[TensorTable, Layout] | None = None
        """The layout that was learnt last, and the tensors that it is for."""
        if self.device.type != "cpu":
            let_others_go_first()
            self._learn_early()
        self._is_quarantined = False
        self._error: str | None = None
        self._last: dict[str, float] = {}
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
            self._stager = Stager(Path(init_info.mirror), init_info.url, options, init_info.threads, self._map_changes)
        if init_info.spool is not None:
            self._start_live_updates(init_info, Path(init_info.spool), options)
        self._info = init_info

    def start_weight_update(self) -> None:
        """Do nothing: `update_weights` does all the work."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Bring this worker to a version, together with all other workers. Raises, in the last worker, if any worker failed."""
        began = time.perf_counter()
        staged, self._error = None, None
        if self._updates is not None and not failed_ranks(update_info.anew or not self._is_live(update_info.seq)):
            self._finish_swap(self._updates.swap(update_info.seq), update_info.seq)
            return
        if self._cold_start is not None:
            self._finish_swap(self._cold_start.bring(update_info.seq, anew=update_info.anew), update_info.seq)
            return
        try:
            staged = self._take(update_info)
        except Exception as error:
            self._record(error)
        if failed := failed_ranks(staged is None):
            if staged is not None:
                staged.target.release()
            self._raise(EngineRefused, f"workers {failed} do not have commit {update_info.seq}: nothing was changed")
            return
        assert staged is not None
        taken = time.perf_counter()
        try:
            self._change(staged, anew=update_info.anew)
        except Exception as error:
            self._record(error)
        self._last["stage_ms"] = (taken - began) * 1e3
        self._last["total_ms"] = (time.perf_counter() - began) * 1e3
        if failed := failed_ranks(self._error is not None):
            self._quarantine(staged)
            self._raise(EngineQuarantined, f"workers {failed} failed to take commit {update_info.seq}")
            return
        before, self._live, self._is_quarantined = self._live, staged.target, False
        if before is not None and self._stager is not None:
            self._stager.release(before)  # not here: the server waits, and unmapping gigabytes takes longer than the write
        if self._updates is not None:
            self._updates.forget()
            if self._bases is not None and not failed_ranks(self._bases.take(staged.target.weights) is not None):
                self._updates.adopt(staged.target.ref)

    def finish_weight_update(self) -> None:
        """Raise, in the last worker, if the weights are in an unknown state."""
        if self._is_quarantined:
            self._raise(EngineQuarantined, "the last update failed")

    def shutdown(self) -> None:
        """Release the mirror and the store. The weights stay, but their version is forgotten."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None
        if self._live is not None:
            self._live.release()
            self._live = None
        if self._updates is not None:
            self._updates.close()
            self._updates = None
        if self._cold_start is not None:
            self._cold_start.close()
            self._cold_start = None
        self._info = None

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
        elif self._stager is not None:
            self._stager.prepare(int(seq), self._live)
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
        if self._live is not None and self._stager is not None:
            self._stager.release(self._live)
        self._live = None

    def status(self) -> dict[str, Any]:
        """Return the state of this worker, in JSON's types."""
        stager, updates = self._stager, self._updates
        version = None if self._weights is None else self._weights.version
        live = updates if self._is_staging_live else None
        return {
            "initialised": self._info is not None,
            "seq": self._live.seq if self._live is not None else None if version is None else version.ref.seq,
            "staged": live.staged if live is not None else None if stager is None else stager.staged,
            "staging_error": live.staging_error if live is not None else None if stager is None else stager.error,
            "quarantined": self._is_quarantined or (self._weights is not None and self._weights.is_quarantined),
            "error": self._error,
            "transformed": len(self._transformed),
            "derived": len(self._derived),
            "last": dict(self._last),
            "kept_bytes": 0 if self._bases is None else self._bases.nbytes,
            **({"live": False} if updates is None else updates.status()),
        }

    # Updates of live memory

    def _start_live_updates(self, info: InitInfo, folder: Path, options: ReaderOptions) -> None:
        self._weights = self._live_weights(info)
        if info.url is None or info.mirror is not None:
            self._updates = LiveUpdates(self._weights, DeltaSpool(folder))
            return
        spool = FetchingSpool(folder, info.url, options=options)
        self._updates = LiveUpdates(self._weights, spool)
        assert self._bases is not None
        self._cold_start = ColdStart(self._updates, spool, self._bases, partial(loading.load_tensors, self.model, self.model_config))

    def _live_weights(self, info: InitInfo) -> LiveWeights:
        """Return the weights with new settings. Their layout and version stay."""
        threads = 1 if info.threads is None and self.device.type == "cpu" else info.threads
        if self._weights is None:
            assert info.spool is not None
            folder = Path(info.spool) / "kept" / str(self.vllm_config.instance_id)
            self._bases = KeptBases(folder, lambda: Checkpoint(Path(self.model_config.model)))
            return LiveWeights(
                self.model,
                self._learn_model_layout,
                source=self._bases,
                recompute=self._recompute,
                reprocess=self._reprocess,
                confirm=_confirm(info),
                threads=threads,
            )
        self._weights.set(confirm=_confirm(info), threads=threads)
        return self._weights

    def _learn_model_layout(self, table: TensorTable) -> Layout:
        from .layout.model_layout import learn_layout

        if self._learnt is not None and self._learnt[0] == table and self._learnt[1].is_valid_for(self.model):
            return self._learnt[1]
        layout = learn_layout(self.model, self.vllm_config, table)
        is_useful = any(tensor.kind != "module" for tensor in layout.tensors.values())
        self._learnt = (table, layout) if is_useful else None
        return layout

    def _learn_early(self) -> None:
        """Learn the layout of the checkpoint that the server has loaded. Later, the KV cache occupies the memory that learning needs."""
        try:
            checkpoint = Checkpoint(Path(self.model_config.model))
        except (CheckpointError, OSError):  # it is not a directory of safetensors; the layout is learnt later
            return
        entries = {name: checkpoint.entry(name) for name in sorted(checkpoint)}
        self._learn_model_layout({name: TensorSpec(entry.dtype, entry.shape) for name, entry in entries.items()})

    def _recompute(self, rules: Sequence[ModuleRule]) -> None:
        recompute(self.model, self.model_config, rules)

    def _reprocess(self, rule: ModuleRule, read: Callable[[str], torch.Tensor]) -> list[Scatter]:
        assert self._weights is not None
        assert self._weights.layout is not None
        return process_again(self.model, self.vllm_config, self._weights.layout, rule, read)

    def _is_ready(self) -> bool:
        """Return whether an update can be decoded against live memory, if there is one."""
        return self._updates is not None and self._updates.is_ready and not self._is_quarantined

    def _is_live(self, seq: int) -> bool:
        """Return whether this worker decodes an update against live memory. If only the mirror has the version, it does not."""
        if self._updates is None or not self._is_ready():
            return False
        return (self._stager is None and self._cold_start is None) or self._updates.offers(seq)

    def _finish_swap(self, found: SwapOutcome, seq: int) -> None:
        """Note what became of an update that did not come from the mirror. Raises, in the last worker, if it was not made."""
        self._error, self._last = found.error, {"loaded_anew": 0, **found.times}
        if found.outcome != "refused":
            self._is_quarantined = found.outcome == "quarantined"
            if self._live is not None and self._stager is not None:
                self._stager.release(self._live)  # the mirror's version is no longer that of the weights
                self._live = None
        if found.outcome != "made":
            kind = EngineQuarantined if found.outcome == "quarantined" else EngineRefused
            self._raise(kind, f"the workers did not take commit {seq}")

    # An update from the mirror

    def _take(self, info: UpdateInfo) -> StagedUpdate:
        if self._info is None:
            raise EngineError("the weight transfer was not initialised: POST /init_weight_transfer_engine first.")
        if self._stager is None:
            raise EngineRefused(
                "the version of the weights is unknown, and there is no mirror to load it from.",
                hint="Name a mirror as well as the spool, or start the server from a version of the chain.",
            )
        if self._is_quarantined and not info.anew:
            raise EngineQuarantined("the last update failed, so only an update that loads everything (`anew`) is accepted.")
        return self._stager.take(info.seq, self._live)

    def _change(self, staged: StagedUpdate, *, anew: bool) -> None:
        weights, changes = staged.target.weights, staged.changes
        self._last = {}
        if anew or changes is None or self._derived or not changes.keys() <= self._in_place:
            self._load_all(staged)
            return
        mapped = self._if_still_valid(staged.mapped)
        tensors = sorted(changes if mapped is None else changes.keys() - mapped.tensors)
        start = time.perf_counter()
        if mapped is not None:
            mapped.write()
        loading.write_tensors(self.model, weights, tensors)
        written = time.perf_counter()
        assert self._info is not None
        if mapped is not None and not mapped.are_written():
            raise EngineQuarantined("after the update, some written elements have wrong values.")
        to_read = sorted(self._in_place) if self._info.confirm == "everything" else tensors
        with torch.no_grad():
            different = read_back(self.model, loading.whole_tensors(weights, to_read)).different if to_read else set()
        if different:
            raise EngineQuarantined(f"after the update, {len(different)} tensors have wrong values, such as {min(different)!r}.")
        self._last = {
            "write_ms": (written - start) * 1e3,
            "confirm_ms": (time.perf_counter() - written) * 1e3,
            "elements": 0 if mapped is None else mapped.elements,
            "patched_tensors": len(changes) - len(tensors),
            "whole_tensors": len(tensors),
            "loaded_anew": 0,
        }

    def _load_all(self, staged: StagedUpdate) -> None:
        weights = staged.target.weights
        start = time.perf_counter()
        loading.load_all(self.model, self.model_config, weights)
        loaded = time.perf_counter()
        with torch.no_grad():
            readings = read_back(self.model, loading.whole_tensors(weights, weights))
        if lost := readings.different & self._in_place:
            raise EngineQuarantined(f"after loading everything, {len(lost)} tensors have wrong values, such as {min(lost)!r}.")
        if raw := readings.equal & self._transformed:
            raise EngineQuarantined(f"this vLLM version transforms {len(raw)} tensors only when it starts, such as {min(raw)!r}.")
        self._in_place = readings.equal | readings.absent
        self._element_map = ElementMap(self.model, {**dict.fromkeys(readings.absent, ()), **readings.blocks})
        self._transformed |= readings.different
        self._last = {"write_ms": (loaded - start) * 1e3, "confirm_ms": (time.perf_counter() - loaded) * 1e3, "loaded_anew": 1}

    def _map_changes(self, changes: Mapping[str, Change]) -> MappedChanges | None:
        """Return the changes by their positions, or None if they are not all in place. The staging thread calls it."""
        known = self._element_map
        return known.map_changes(changes) if known is not None and changes.keys() <= self._in_place else None

    def _if_still_valid(self, mapped: MappedChanges | None) -> MappedChanges | None:
        """Return None if the model's tensors have other memory than when the positions were recorded."""
        is_good = mapped is not None and mapped.element_map is self._element_map and mapped.element_map.is_valid_for(self.model)
        return mapped if is_good else None

    def _learn_layout(self) -> None:
        """Read back what vLLM has just loaded. vLLM has transformed tensors that differ, and computed those that were not loaded.

        This learns nothing about a server that started without a checkpoint (`--load-format dummy`), or whose loader works only once.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model_loader

        loader = get_model_loader(self.vllm_config.load_config)
        if not hasattr(loader, "get_all_weights"):
            return
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            readings = read_back(self.model, loader.get_all_weights(self.model_config, self.model))
        self._transformed = readings.mostly_different
        self._derived |= readings.untouched
        if self._transformed or self._derived:
            logger.info("%d tensors are transformed after loading, %d derived from others", len(self._transformed), len(self._derived))

    def _quarantine(self, staged: StagedUpdate) -> None:
        staged.target.release()
        if self._live is not None:
            self._live.release()
        self._live, self._is_quarantined = None, True
        if self._updates is not None:
            self._updates.forget()

    def _record(self, error: Exception) -> None:
        logger.exception("deltawire: an update failed")
        self._error = f"{type(error).__name__}: {error}"

    def _raise(self, kind: type[EngineError], message: str) -> None:
        if raises_for_all():
            raise kind(f"{message}. {self._error or ''}".rstrip())


def _computed_tensors(model: Any) -> set[str]:
    """Return the tensors that modules hold as plain attributes, except scalars. They were computed from weights, and updates miss them."""
    return {
        f"{module_name}.{name}"
        for module_name, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1
    }


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

    def deltawire_swap(worker: Any, seq: int, anew: bool = False) -> dict[str, Any]:
        worker._weight_update_active = False  # an update by vLLM's routes may have been begun and abandoned
        with set_current_vllm_config(worker.vllm_config):
            answer = dict(worker.weight_transfer_engine.swap(seq, anew))
        if answer["outcome"] == "made":
            worker.model_runner.reset_lora_state()
        return answer

    Worker.deltawire_status = deltawire_status
    Worker.deltawire_learn = deltawire_learn
    Worker.deltawire_adopt = deltawire_adopt
    Worker.deltawire_swap = deltawire_swap
    Worker.deltawire_prepare = deltawire_prepare
    Worker.deltawire_settle = deltawire_settle
