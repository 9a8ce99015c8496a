"""A worker's model, as updates of its live memory need it: its layout, and vLLM's functions that compute parts of it again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...codec.gpu.device import compile_kernels
from ...dtypes import payload_type
from ...errors import CheckpointError, CodecUnavailable, EngineModelDiffers, EngineRefused
from ...format.bundle_names import MAIN
from ...format.checkpoints.checkpoint import Checkpoint
from ...subscribe.tensor_table import TensorSpec, TensorTable
from . import loading
from .draft import Draft, Modules, draft_of, load_both, main_bundle
from .layout.lacking_tensors import find_lacking
from .layout.learn_layout import DRAFT_PREFIX, learn_layout
from .layout.model_layout import ModelLayout
from .layout.types import ModuleRule, Scatter
from .model_fit import describe_lacking, find_misfit
from .modules.load_module import ModuleLoad
from .modules.recompute import process_again, recompute


class WorkerModel:
    """The model of one worker.

    Parameters
    ----------
    model
        The model.
    vllm_config
        vLLM's configuration.
    """

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self.model = model
        self._vllm_config = vllm_config
        self._learnt: tuple[TensorTable, ModelLayout] | None = None
        """The layout that was learnt last, and the tensors that it is for."""
        self._processable: set[str] = set()
        """Modules that were processed again, and then had the weights that they should have."""
        self._loadable: set[str] = set()
        """Modules that were loaded anew, and then had the weights that they should have."""
        self.draft: Draft | None = None
        """The draft model. None if there is none."""
        self._table: TensorTable = {}
        """The tensors of the chain, as far as they are known."""

    def take_draft(self, draft: Any) -> None:
        """Set the draft model. Its layout is learnt with that of the model if its weights are in the chain.

        Parameters
        ----------
        draft
            The draft model. None if there is none.
        """
        before = None if self.draft is None else self.draft.model
        self.draft = draft_of(draft, self._vllm_config)
        if before is not (None if self.draft is None else self.draft.model):
            self._learnt = None

    def checkpoint(self) -> Checkpoint:
        """Open the checkpoint that the server has loaded. Raises `CheckpointError` if it is not a directory of safetensors."""
        return Checkpoint(Path(self._vllm_config.model_config.model))

    def learn_layout(self, table: TensorTable) -> ModelLayout:
        """Return where the model keeps each element of these tensors. Call it on the worker's main thread.

        Raises `EngineModelDiffers` if the model cannot load them, or if it would keep values of other tensors.

        Parameters
        ----------
        table
            The tensors of the chain.
        """
        before, self._table = self._table, table
        if self._learnt is not None and self._learnt[0] == table and self._learnt[1].is_valid_for(self.model):
            return self._learnt[1]
        draft = self._following
        bundle = None if draft is None else draft.bundle(table)
        layout = learn_layout(
            self.model, self._vllm_config, table, draft=None if draft is None else draft.model, draft_bundle=bundle or MAIN
        )
        if misfit := self._misfit(table, layout.rejected, before):
            self._table = before
            raise EngineModelDiffers(misfit)
        is_useful = any(tensor.kind != "module" for tensor in layout.tensors.values())
        self._learnt = (table, layout) if is_useful else None
        return layout

    def learn_early(self) -> None:
        """Learn the layout of the checkpoint that the server has loaded, and compile the kernels that decode its updates.

        Later, the KV cache occupies the memory that learning needs, and requests would wait for the compiler.
        """
        table = self._loaded_table()
        if table is None:  # the layout is learnt later
            return
        self.learn_layout(table)
        widths = {width for name, spec in table.items() for width in (spec.dtype.width, payload_type(name, spec.dtype).width)}
        with contextlib.suppress(CodecUnavailable):  # the first update reports it
            compile_kernels(next(self.model.parameters()).device, widths)

    def recompute(self, rules: Sequence[ModuleRule]) -> None:
        """Compute the derived tensors of modules again, in place.

        Parameters
        ----------
        rules
            The rules of modules whose inputs have changed.
        """
        recompute(self._modules(), self._vllm_config.model_config, rules)

    def reprocess(self, rule: ModuleRule, read: Callable[[str], torch.Tensor], read_old: Callable[[str], torch.Tensor]) -> list[Scatter]:
        """Process a module again that is computed from changed weights, without any effect on it. Returns what changes in its memory.

        Parameters
        ----------
        rule
            The rule of the module.
        read
            Returns a new tensor of the chain, in checkpoint layout.
        read_old
            Returns a tensor of the version that the model has.
        """
        assert self._learnt is not None
        old = None if rule.name in self._processable else read_old
        found = process_again(self._modules(), self._vllm_config, self._learnt[1], rule, read, old)
        self._processable.add(rule.name)
        return found

    def load(self, tensors: loading.Tensors) -> None:
        """Load everything as at the start, into the model and into a draft that follows the chain. The layout must have been learnt.

        Parameters
        ----------
        tensors
            All tensors of a version. Those of a module should follow each other.
        """
        draft = self._following
        if draft is None:
            loading.load_tensors(self.model, self._vllm_config.model_config, main_bundle(tensors))
        else:
            load_both(self.model, self._vllm_config, draft, self._table, tensors)

    def load_module(self, rule: ModuleRule, read: Callable[[str], torch.Tensor], read_old: Callable[[str], torch.Tensor]) -> ModuleLoad:
        """Prepare to load a module anew. Changes nothing. Raises `EngineRefused` if it shares tensors with a module of the draft model.

        Parameters
        ----------
        rule
            The rule of the module.
        read
            Returns a new tensor of the chain, in checkpoint layout.
        read_old
            Returns a tensor of the version that the model has.
        """
        assert self._learnt is not None
        modules, tensors = self._learnt[1].loaded_with(rule.name)
        if any(name.startswith(DRAFT_PREFIX) for name in modules):
            raise EngineRefused(f"module {rule.name!r} must be loaded anew, which is not possible for a part of a draft model.")
        old = None if rule.name in self._loadable else {name: read_old(name) for name in tensors}
        note = functools.partial(self._loadable.add, rule.name)
        return ModuleLoad(self.model, self._vllm_config.model_config, modules, {name: read(name) for name in tensors}, old, note)

    def draft_status(self) -> dict[str, Any] | None:
        """Return what the status says about the draft model. None if there is none."""
        return None if self.draft is None else self.draft.status(self._table)

    @property
    def loaded_types(self) -> str:
        """A few words about the loaded weights: the kind of quantisation, or the type of the weights."""
        config = self._vllm_config.model_config
        return str(getattr(config, "quantization", None) or getattr(config, "dtype", "unknown")).removeprefix("torch.")

    def _loaded_table(self) -> TensorTable | None:
        """Return the tensors of the checkpoint that the server has loaded. None if it is not a directory of safetensors."""
        try:
            checkpoint = self.checkpoint()
        except (CheckpointError, OSError):
            return None
        entries = {name: checkpoint.entry(name) for name in sorted(checkpoint)}
        return {name: TensorSpec(entry.dtype, entry.shape) for name, entry in entries.items()}

    def _misfit(self, table: TensorTable, rejected: Mapping[str, str], before: TensorTable) -> str | None:
        """Return why the model cannot hold the tensors of the chain. `before` has those that it had until now, if they are known."""
        loaded = self._loaded_table()
        wrong = find_misfit(table, loaded, rejected)
        return wrong or describe_lacking(find_lacking(self.model, self._vllm_config, table, before if loaded is None else loaded))

    @property
    def _following(self) -> Draft | None:
        """The draft model if it follows the chain. None otherwise."""
        return None if self.draft is None or self.draft.bundle(self._table) is None else self.draft

    def _modules(self) -> Modules:
        return Modules(self.model, None if self._following is None else self._following.model)
