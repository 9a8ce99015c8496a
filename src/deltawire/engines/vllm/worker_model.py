"""A worker's model, as updates of its live memory need it: its layout, and vLLM's functions that compute parts of it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...format.checkpoints.checkpoint import Checkpoint
from ...subscribe.tensor_table import TensorSpec, TensorTable
from .layout.model_layout import ModelLayout, learn_layout
from .layout.types import ModuleRule, Scatter
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

    def checkpoint(self) -> Checkpoint:
        """Open the checkpoint that the server has loaded. Raises `CheckpointError` if it is not a directory of safetensors."""
        return Checkpoint(Path(self._vllm_config.model_config.model))

    def learn_layout(self, table: TensorTable) -> ModelLayout:
        """Return where the model keeps each element of these tensors. Call it on the worker's main thread.

        Parameters
        ----------
        table
            The tensors of the chain.
        """
        if self._learnt is not None and self._learnt[0] == table and self._learnt[1].is_valid_for(self.model):
            return self._learnt[1]
        layout = learn_layout(self.model, self._vllm_config, table)
        is_useful = any(tensor.kind != "module" for tensor in layout.tensors.values())
        self._learnt = (table, layout) if is_useful else None
        return layout

    def learn_early(self) -> None:
        """Learn the layout of the checkpoint that the server has loaded. Later, the KV cache occupies the memory that learning needs."""
        try:
            checkpoint = self.checkpoint()
        except (CheckpointError, OSError):  # the layout is learnt later
            return
        entries = {name: checkpoint.entry(name) for name in sorted(checkpoint)}
        self.learn_layout({name: TensorSpec(entry.dtype, entry.shape) for name, entry in entries.items()})

    def recompute(self, rules: Sequence[ModuleRule]) -> None:
        """Compute the derived tensors of modules again, in place.

        Parameters
        ----------
        rules
            The rules of modules whose inputs have changed.
        """
        recompute(self.model, self._vllm_config.model_config, rules)

    def reprocess(self, rule: ModuleRule, read: Callable[[str], torch.Tensor]) -> list[Scatter]:
        """Process a module again that is computed from changed weights, without any effect on it. Returns what changes in its memory.

        Parameters
        ----------
        rule
            The rule of the module.
        read
            Returns a new tensor of the chain, in checkpoint layout.
        """
        assert self._learnt is not None
        return process_again(self.model, self._vllm_config, self._learnt[1], rule, read)
