"""The weight-transfer backend `deltawire`: one object in each worker of a vLLM server.

    POST /init_weight_transfer_engine {"init_info": {"mirror": DIR, "url": URL, …}}
    POST /collective_rpc {"method": "deltawire_prepare", "args": [SEQ]}          at any time: stages in the background
    POST /pause, /start_weight_update
    POST /update_weights {"update_info": {"seq": SEQ}}
    POST /finish_weight_update {"weight_version": "SEQ"}, /resume

**What an update writes.** Usually it writes only the elements that changed, at the positions where the model's loaders have put them
(element_map.py). It loads everything in these cases: it is the first update after the start, because the version that the server loaded is
unknown; it says `"anew": true`; it changes a tensor that is not in place (read_back.py); or the model holds tensors that were computed from
its weights, such as the absorbed projections of MLA. An update that was not prepared is staged within the pause, which takes longer.

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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.logger import init_logger

from ...chain.reader_options import ReaderOptions
from ...errors import EngineError, EngineQuarantined, EngineRefused
from . import OLDEST_VLLM, loading
from .element_map import ElementMap, MappedChanges
from .read_back import read_back
from .staging import Change, HeldVersion, StagedUpdate, Stager

logger = init_logger("vllm.deltawire")


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where versions come from.

    Parameters
    ----------
    mirror
        The directory of the mirror, which all workers of a host share.
    url
        The location of the chain. The workers then bring the mirror to the requested versions themselves. Without it, another process does,
        such as `deltawire sidecar`.
    run
        The name that the run must have.
    trusted_keys
        Public keys. Records that none of them signed are refused.
    confirm
        What is read back after each update: "written" or "everything".
    threads
        Number of threads for decoding and comparing. None means one per core.
    """

    mirror: str
    url: str | None = None
    run: str | None = None
    trusted_keys: list[str] = field(default_factory=list)
    confirm: str = "written"
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
        self._in_place: set[str] = set()
        self._element_map: ElementMap | None = None
        self._transformed: set[str] = set()
        self._derived = _computed_tensors(self.model)
        self._learn_layout()
        self._is_quarantined = False
        self._error: str | None = None
        self._last: dict[str, float] = {}
        _add_rpc_methods()

    # Methods that vLLM calls

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Set where versions come from. The same settings again change nothing. Other settings make the next update load everything."""
        if init_info.confirm not in ("written", "everything"):
            self._raise(EngineRefused, f'confirm must be "written" or "everything", not {init_info.confirm!r}')
            return
        if init_info == self._info:
            return
        self.shutdown()
        options = ReaderOptions(run=init_info.run, trusted_keys=tuple(init_info.trusted_keys))
        self._stager = Stager(Path(init_info.mirror), init_info.url, options, init_info.threads, self._map_changes)
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
        try:
            staged = self._take(update_info)
        except Exception as error:
            self._record(error)
        if failed := _failed_ranks(staged is None):
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
        if failed := _failed_ranks(self._error is not None):
            self._quarantine(staged)
            self._raise(EngineQuarantined, f"workers {failed} failed to take commit {update_info.seq}")
            return
        before, self._live, self._is_quarantined = self._live, staged.target, False
        if before is not None and self._stager is not None:
            self._stager.release(before)  # not here: the server waits, and unmapping gigabytes takes longer than the write

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
        self._info = None

    # /collective_rpc calls the next two methods. They never raise, because that would confuse vLLM's executor (see `_raises_for_all`)

    def prepare(self, seq: int) -> dict[str, Any]:
        """Begin to stage a version. Returns the status."""
        if self._stager is not None:
            self._stager.prepare(int(seq), self._live)
        return self.status()

    def status(self) -> dict[str, Any]:
        """Return the state of this worker, in JSON's types."""
        stager = self._stager
        return {
            "initialised": stager is not None,
            "seq": None if self._live is None else self._live.seq,
            "staged": None if stager is None else stager.staged,
            "staging_error": None if stager is None else stager.error,
            "quarantined": self._is_quarantined,
            "error": self._error,
            "transformed": len(self._transformed),
            "derived": len(self._derived),
            "last": dict(self._last),
        }

    # An update

    def _take(self, info: UpdateInfo) -> StagedUpdate:
        if self._stager is None:
            raise EngineError("the weight transfer was not initialised: POST /init_weight_transfer_engine first.")
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

    def _record(self, error: Exception) -> None:
        logger.exception("deltawire: an update failed")
        self._error = f"{type(error).__name__}: {error}"

    def _raise(self, kind: type[EngineError], message: str) -> None:
        if _raises_for_all():
            raise kind(f"{message}. {self._error or ''}".rstrip())


def _computed_tensors(model: Any) -> set[str]:
    """Return the tensors that modules hold as plain attributes, except scalars. They were computed from weights, and updates miss them."""
    return {
        f"{module_name}.{name}"
        for module_name, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1
    }


def _failed_ranks(failed: bool) -> list[int]:
    """Tell the other workers whether this one failed. Returns the ranks of all workers that did.

    Every worker of the server must call it, because each call waits for all of them.
    """
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return [0] if failed else []
    flags = torch.zeros(group.world_size, dtype=torch.int32)
    flags[group.rank_in_group] = int(failed)
    torch.distributed.all_reduce(flags, group=group.cpu_group)
    return [int(rank) for rank in flags.nonzero().flatten()]


def _raises_for_all() -> bool:
    """Return whether this worker raises an error that all workers have agreed on. It is the last worker.

    vLLM's executor reads the answers of its workers in order and stops at the first failure. It would take the answers that it left unread
    for answers to the next call. If only the last worker fails, no answer is left.
    """
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    return bool(group.rank_in_group == group.world_size - 1)


def _add_rpc_methods() -> None:
    """Add methods for /collective_rpc, because vLLM has no routes to prepare an update, to get its status, or to abandon it."""
    from vllm.v1.worker.gpu_worker import Worker

    def deltawire_status(worker: Any) -> dict[str, Any]:
        return dict(worker.weight_transfer_engine.status())

    def deltawire_prepare(worker: Any, seq: int) -> dict[str, Any]:
        return dict(worker.weight_transfer_engine.prepare(seq))

    def deltawire_settle(worker: Any) -> dict[str, Any]:
        worker._weight_update_active = False
        return deltawire_status(worker)

    Worker.deltawire_status = deltawire_status
    Worker.deltawire_prepare = deltawire_prepare
    Worker.deltawire_settle = deltawire_settle
