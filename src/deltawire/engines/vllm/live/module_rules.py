"""The modules of a worker's model that must be brought up to date by themselves when tensors that they are computed from change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from ....errors import EngineRefused
from ....tensors.gpu_handover import on_side_stream
from ..layout.types import ModuleRule, Scatter
from .interfaces import Layout, ModuleLoad, inputs_of
from .layout_update import LayoutUpdate

logger = logging.getLogger("vllm.deltawire")

Tensor: TypeAlias = Callable[[str], torch.Tensor]
"""Returns a tensor of the chain, by its name."""
Recompute: TypeAlias = Callable[[Sequence[ModuleRule]], None]
"""Computes tensors of modules that depend on changed weights, in place."""
Reprocess: TypeAlias = Callable[[ModuleRule, Tensor, Tensor], Sequence[Scatter]]
"""Processes a module again that is computed from changed weights, without any effect on it. Returns what changes in its memory.

It gets the module's rule, a function that returns new tensors, and one that returns tensors of the live version.
"""
Load: TypeAlias = Callable[[ModuleRule, Tensor, Tensor], ModuleLoad]
"""Prepares to load a module anew within a swap. It gets the same arguments."""


class ModuleRules:
    """Brings modules up to date.

    Parameters
    ----------
    recompute
        See `Recompute`. None if no module can be recomputed.
    reprocess
        See `Reprocess`. None if no module can be processed again.
    load
        See `Load`. None if no module can be loaded anew.
    """

    def __init__(self, recompute: Recompute | None, reprocess: Reprocess | None, load: Load | None) -> None:
        self._recompute = recompute
        self._reprocess = reprocess
        self._load = load

    def of(self, layout: Layout, update: LayoutUpdate) -> list[ModuleRule]:
        """Return the rules of modules that depend on changed tensors. Raises `EngineRefused` if the whole model must be loaded anew."""
        tensors = layout.tensors
        inputs = inputs_of(layout.modules.values())
        apart = sorted(name for name in update.touched if name in inputs or tensors[name].kind == "module")
        for name in apart:
            if self.is_lost(layout, name):
                raise EngineRefused(f"all weights must be loaded anew, because of tensor {name!r}: {tensors[name].reason}")
        names = {module for name in apart for module in tensors[name].modules}
        rules = [layout.modules[name] for name in sorted(names)]
        for rule in rules:
            if not self._can_follow(rule):
                raise EngineRefused(f"all weights must be loaded anew, because of module {rule.name!r}: {rule.reason}")
        return rules

    def _can_follow(self, rule: ModuleRule) -> bool:
        """Return whether a module can be brought up to date by itself."""
        ways = {"recompute": self._recompute, "reprocess": self._reprocess, "load_anew": self._load}
        return ways.get(rule.how) is not None

    def is_lost(self, layout: Layout, name: str) -> bool:
        """Return whether a change of a tensor needs all weights to be loaded anew, because no module can take it by itself."""
        tensor = layout.tensors[name]
        if tensor.kind != "module":
            return False
        return not tensor.modules or not all(self._can_follow(layout.modules[module]) for module in tensor.modules)

    def process(self, layout: Layout, update: LayoutUpdate, direct: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Process modules again that are computed from changed tensors, and add what changes in their memory to the update.

        Modules that are loaded anew are added too, and the rules of those that `run` recomputes. Returns the modules whose processing
        failed, with the error.
        """
        failed: dict[str, str] = {}
        rules = self.of(layout, update)
        update.recomputes = [rule for rule in rules if rule.how == "recompute"]
        with on_side_stream(direct) as wait:
            for rule in rules:
                if rule.how == "load_anew" and self._load is not None:
                    update.add_load(rule.name, self._load(rule, update.new_tensor, update.old_tensor))
                elif rule.how == "reprocess" and self._reprocess is not None:
                    try:
                        update.add_scatters(self._reprocess(rule, update.new_tensor, update.old_tensor))
                    except Exception as error:
                        if self._load is None:
                            raise
                        logger.exception("deltawire: module %s cannot be processed while the server runs", rule.name)
                        failed[rule.name] = f"{type(error).__name__}: {error}"
            wait()
        update.forget_inputs()
        return failed

    def run(self, update: LayoutUpdate) -> None:
        """Recompute the modules that the update names."""
        if update.recomputes and self._recompute is not None:
            self._recompute(update.recomputes)
