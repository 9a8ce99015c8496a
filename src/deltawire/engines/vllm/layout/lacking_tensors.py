"""Finds tensors that a model was loaded with and that a chain lacks. The model would keep their old values, labelled as new versions."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ....format.bundle_names import MAIN, BundleView
from ....subscribe.tensor_table import TensorTable
from ..model_fit import is_about_names_or_shapes
from .loader_copies import LoaderCopies, LoaderCopy, RawParameter, extent, missing_parts, record_copies
from .model_layout import tensor_at


def find_lacking(model: Any, vllm_config: Any, table: TensorTable, known: TensorTable) -> list[str]:
    """Return the tensors that the model takes from a checkpoint and that a chain lacks. Call it on the worker's main thread.

    It changes nothing. A tensor that the model's loader skips is not needed. The same is true of one whose memory is written from other
    tensors of the chain, because it is tied or has another name there. Nothing is found in a vLLM whose loaders cannot be recorded.

    Parameters
    ----------
    model
        The model of this worker.
    vllm_config
        vLLM's configuration.
    table
        The tensors of the chain.
    known
        The tensors of the checkpoint that the model was loaded from.
    """
    missing = BundleView(known, MAIN).keys() - BundleView(table, MAIN).keys()
    if not missing or missing_parts():
        return []
    covered = _Covered(record_copies(model, vllm_config, table), known)
    return covered.find_needed(missing, record_copies(model, vllm_config, known))


class _Covered:
    """Knows what the tensors of a chain write in the memory of a model.

    Parameters
    ----------
    copies
        What the model's loader does with the tensors of the chain.
    known
        The tensors of the checkpoint that the model was loaded from.
    """

    def __init__(self, copies: LoaderCopies, known: TensorTable) -> None:
        self._copies: dict[Hashable, list[LoaderCopy]] = {}
        for copy in [copy for found in copies.copies.values() for copy in found]:
            self._copies.setdefault(_memory_of(copy.parameter), []).append(copy)
        # A tensor that both have is no replacement for one that the chain lacks, if the loader computes something from them.
        new_copies = {_memory_of(copy.parameter) for name, found in copies.copies.items() if name not in known for copy in found}
        self._computed = {_memory_of(parameter) for name, found in copies.touched.items() if name not in known for parameter in found}
        self._renamed = new_copies | self._computed
        self._masks: dict[Hashable, torch.Tensor] = {}

    def find_needed(self, missing: set[str], copies: LoaderCopies) -> list[str]:
        """Return those of the missing tensors that write to memory which the chain does not write to.

        Parameters
        ----------
        missing
            The tensors that the chain lacks.
        copies
            What the model's loader does with the tensors of the checkpoint that the model was loaded from.
        """
        return sorted(name for name in missing if self._needs(name, copies))

    def _needs(self, name: str, copies: LoaderCopies) -> bool:
        if name in copies.rejected:
            return not is_about_names_or_shapes(copies.rejected[name])
        if name in copies.refused:
            return not self._renamed.issuperset(map(_memory_of, copies.touched.get(name, ())))
        return any(not self._writes(copy) for copy in copies.copies.get(name, ()))

    def _writes(self, copy: LoaderCopy) -> bool:
        """Return whether the chain writes all elements that this copy does."""
        memory = _memory_of(copy.parameter)
        if memory in self._computed:
            return True
        others = self._copies.get(memory, [])
        if not others or any(other.nest == copy.nest for other in others):
            return bool(others)
        if memory not in self._masks:
            mask = self._masks[memory] = torch.zeros(extent(copy.parameter.meta), dtype=torch.bool)
            for other in others:
                other.nest.view(mask).fill_(True)
        return bool(copy.nest.view(self._masks[memory]).all())


def _memory_of(parameter: RawParameter) -> Hashable:
    """Return what identifies the memory of a parameter. Parameters that are tied have the same memory."""
    live = tensor_at(parameter.module, (parameter.name,))
    if live is None or live.is_meta or not live.data_ptr():
        return parameter.module_name, parameter.name
    return live.data_ptr(), tuple(live.shape)
