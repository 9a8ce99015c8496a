"""Updates from a mirror: a worker writes the elements in which two versions in the mirror differ, or loads everything.

Usually an update writes only the elements that changed, at the positions where the model's loaders have put them (element_map.py). It loads
everything in these cases: the version of the weights is unknown; the caller asks for it; the update changes a tensor that is not in place
(read_back.py); or the model holds tensors that were computed from its weights, such as the absorbed projections of MLA.

When the server starts, the loaded weights are read back, to learn which tensors are in place. After everything was loaded anew, each tensor
in place is read back through the model's own loaders and compared, bit for bit, with the mirror, whose digest was checked against the
chain. Its position in the model is recorded for later updates. After an update, every written element is read and compared. Tensors that
vLLM transforms after loading cannot be read back. Their values rely on vLLM's own reloading: this only checks that they were transformed
again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from ....errors import EngineQuarantined
from .. import loading
from ..live.update_types import SwapOutcome
from ..ranks import failed_ranks
from .element_map import ElementMap, MappedChanges
from .read_back import read_back
from .staging import Change, HeldVersion, StagedUpdate, Stager

logger = logging.getLogger("vllm.deltawire")


class MirrorUpdates:
    """The updates of one worker from a mirror. Make it right after the model was loaded.

    Parameters
    ----------
    model
        The model.
    vllm_config
        vLLM's configuration.
    """

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._model_config = vllm_config.model_config
        self.stager: Stager | None = None
        """Stages updates. None if there is no mirror."""
        self.live: HeldVersion | None = None
        """The version in the mirror that the weights have. None if they have another one."""
        self.confirms_everything = False
        """True if every tensor in place is read back after each update."""
        self._in_place: set[str] = set()
        self._element_map: ElementMap | None = None
        self.transformed: set[str] = set()
        """Tensors that vLLM transforms after loading."""
        self.derived = _computed_tensors(model)
        """Tensors that were computed from others."""
        self._times: dict[str, float] = {}
        self._learn()

    def prepare(self, seq: int) -> None:
        """Begin to stage the update to a commit.

        Parameters
        ----------
        seq
            The number of the commit.
        """
        if self.stager is not None:
            self.stager.prepare(seq, self.live)

    def bring(self, seq: int, *, anew: bool) -> SwapOutcome:
        """Bring the weights to a commit, together with all other workers. Never raises. Changes nothing unless all workers are ready.

        Parameters
        ----------
        seq
            The number of the commit.
        anew
            True to load all weights, even if their version is known.
        """
        began = time.perf_counter()
        staged, error = None, None
        try:
            assert self.stager is not None
            staged = self.stager.take(seq, self.live)
        except Exception as failure:
            error = _note(failure)
        if failed := failed_ranks(staged is None):
            if staged is not None:
                staged.target.release()
            return SwapOutcome("refused", error or f"workers {failed} do not have commit {seq}")
        assert staged is not None
        taken = time.perf_counter()
        self._times = {}
        try:
            self._change(staged, anew=anew)
        except Exception as failure:
            error = _note(failure)
        self._times["stage_ms"] = (taken - began) * 1e3
        self._times["total_ms"] = (time.perf_counter() - began) * 1e3
        if failed := failed_ranks(error is not None):
            staged.target.release()
            self.forget()
            return SwapOutcome("quarantined", error or f"workers {failed} failed to take commit {seq}", self._times)
        self.forget()
        self.live = staged.target
        return SwapOutcome("made", None, self._times)

    def forget(self) -> None:
        """Forget the version, because the weights are about to have another one."""
        if self.live is not None and self.stager is not None:
            self.stager.release(self.live)  # not here: the server waits, and unmapping gigabytes takes longer than the write
        self.live = None

    def close(self) -> None:
        """Release the mirror. The weights stay, but their version is forgotten."""
        if self.stager is not None:
            self.stager.close()
            self.stager = None
        if self.live is not None:
            self.live.release()
            self.live = None

    def map_changes(self, changes: Mapping[str, Change]) -> MappedChanges | None:
        """Return the changes by their positions, or None if they are not all in place. The staging thread calls it.

        Parameters
        ----------
        changes
            The changes, by names of tensors.
        """
        known = self._element_map
        return known.map_changes(changes) if known is not None and changes.keys() <= self._in_place else None

    def _change(self, staged: StagedUpdate, *, anew: bool) -> None:
        weights, changes = staged.target.weights, staged.changes
        if anew or changes is None or self.derived or not changes.keys() <= self._in_place:
            self._load_all(staged)
            return
        mapped = self._if_still_valid(staged.mapped)
        tensors = sorted(changes if mapped is None else changes.keys() - mapped.tensors)
        start = time.perf_counter()
        if mapped is not None:
            mapped.write()
        loading.write_tensors(self._model, weights, tensors)
        written = time.perf_counter()
        if mapped is not None and not mapped.are_written():
            raise EngineQuarantined("after the update, some written elements have wrong values.")
        to_read = sorted(self._in_place) if self.confirms_everything else tensors
        with torch.no_grad():
            different = read_back(self._model, loading.whole_tensors(weights, to_read)).different if to_read else set()
        if different:
            raise EngineQuarantined(f"after the update, {len(different)} tensors have wrong values, such as {min(different)!r}.")
        self._times = {
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
        loading.load_all(self._model, self._model_config, weights)
        loaded = time.perf_counter()
        with torch.no_grad():
            readings = read_back(self._model, loading.whole_tensors(weights, weights))
        if lost := readings.different & self._in_place:
            raise EngineQuarantined(f"after loading everything, {len(lost)} tensors have wrong values, such as {min(lost)!r}.")
        if raw := readings.equal & self.transformed:
            raise EngineQuarantined(f"this vLLM version transforms {len(raw)} tensors only when it starts, such as {min(raw)!r}.")
        self._in_place = readings.equal | readings.absent
        self._element_map = ElementMap(self._model, {**dict.fromkeys(readings.absent, ()), **readings.blocks})
        self.transformed |= readings.different
        self._times = {"write_ms": (loaded - start) * 1e3, "confirm_ms": (time.perf_counter() - loaded) * 1e3, "loaded_anew": 1}

    def _if_still_valid(self, mapped: MappedChanges | None) -> MappedChanges | None:
        """Return None if the model's tensors have other memory than when the positions were recorded."""
        is_good = mapped is not None and mapped.element_map is self._element_map and mapped.element_map.is_valid_for(self._model)
        return mapped if is_good else None

    def _learn(self) -> None:
        """Read back what vLLM has just loaded. vLLM has transformed tensors that differ, and computed those that were not loaded.

        This learns nothing about a server that started without a checkpoint (`--load-format dummy`), or whose loader works only once.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model_loader

        loader = get_model_loader(self._vllm_config.load_config)
        if not hasattr(loader, "get_all_weights"):
            return
        with torch.no_grad(), set_current_vllm_config(self._vllm_config):
            readings = read_back(self._model, loader.get_all_weights(self._model_config, self._model))
        self.transformed = readings.mostly_different
        self.derived |= readings.untouched
        if self.transformed or self.derived:
            logger.info("%d tensors are transformed after loading, %d derived from others", len(self.transformed), len(self.derived))


def _computed_tensors(model: Any) -> set[str]:
    """Return the tensors that modules hold as plain attributes, except scalars. They were computed from weights, and updates miss them."""
    return {
        f"{module_name}.{name}"
        for module_name, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1
    }


def _note(error: Exception) -> str:
    logger.exception("deltawire: an update failed")
    return f"{type(error).__name__}: {error}"
