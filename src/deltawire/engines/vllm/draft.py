"""The draft model of a worker: it proposes tokens that the model then checks (speculative decoding).

A draft whose weights are in the checkpoint of the model, such as an MTP layer, *follows* the chain: the same swap writes both, so the model
of one version is never served with the draft of another. A draft with a checkpoint of its own, such as an EAGLE head, follows it too if the
chain has a bundle `draft`, which holds the tensors of that checkpoint. Otherwise it stays as it is. Its proposals are then accepted less
often as training continues, but each token is still one of the model. Modules that it shares with the model, such as the embedding, are
modules of the model, and are written with it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...format.bundle_names import MAIN, bundle_names, split_name
from ...subscribe.tensor_table import TensorTable
from . import loading
from .layout.learn_layout import DRAFT_PREFIX
from .layout.loader_copies import record_copies

Tensors = Iterable[tuple[str, torch.Tensor]]


BUNDLE = "draft"
"""The bundle of a chain that holds the weights of a draft with a checkpoint of its own."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft model of a worker.

    Parameters
    ----------
    model
        The draft model.
    model_config
        vLLM's configuration of it.
    checkpoint
        The checkpoint that it was loaded from, if that is not the one of the model.
    """

    model: Any
    model_config: Any
    checkpoint: str | None

    def bundle(self, table: TensorTable) -> str | None:
        """Return the bundle of a chain that has the weights of this draft model. None if the chain does not have them.

        Parameters
        ----------
        table
            The tensors of the chain.
        """
        if self.checkpoint is None:
            return MAIN
        return BUNDLE if BUNDLE in bundle_names(table) else None

    def status(self, table: TensorTable) -> dict[str, Any]:
        """Return what the status of a worker says about its draft model, in JSON's types.

        Parameters
        ----------
        table
            The tensors of the chain. Empty if they are not known.
        """
        follows = self.bundle(table) is not None
        why_not = f"it was loaded from a checkpoint of its own, {self.checkpoint}, which is not in the chain"
        return {"model": type(self.model).__name__, "follows": follows, "why_not": None if follows else why_not}


def draft_of(model: Any, vllm_config: Any) -> Draft | None:
    """Return a worker's draft model, and where it comes from. None if there is none.

    Parameters
    ----------
    model
        The draft model, as vLLM's worker returns it, or None.
    vllm_config
        vLLM's configuration.
    """
    config = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if not isinstance(model, torch.nn.Module) or config is None:  # drafts by n-grams have no weights
        return None
    target = vllm_config.model_config
    checkpoints = [(_real(name), target.revision) for name in (target.model, target.model_weights) if name]
    return Draft(model, config, None if (_real(config.model), config.revision) in checkpoints else str(config.model))


class Modules:
    """Finds modules of a model and of its draft by their names in a layout.

    Parameters
    ----------
    model
        The model.
    draft
        The draft model. None if there is none that follows the chain.
    """

    def __init__(self, model: Any, draft: Any = None) -> None:
        self._model = model
        self._draft = draft

    def get_submodule(self, name: str) -> Any:
        """Return a module. It has the name of the method of models, so that it can be used in their place."""
        if self._draft is not None and name.startswith(DRAFT_PREFIX):
            return self._draft.get_submodule(name.removeprefix(DRAFT_PREFIX))
        return self._model.get_submodule(name)


def load_both(model: Any, vllm_config: Any, draft: Draft, table: TensorTable, tensors: Tensors) -> None:
    """Load everything anew into a model and its draft, from tensors that arrive once, one after the other.

    The tensors that the draft takes are kept until the model is loaded: its own layer and, for some drafts, the embedding.

    Parameters
    ----------
    model
        The model.
    vllm_config
        vLLM's configuration.
    draft
        The draft model. It must follow the chain.
    table
        The tensors of the checkpoint.
    tensors
        All tensors of the checkpoint. Those of a module should follow each other.
    """
    found = record_copies(draft.model, vllm_config, table, bundle=draft.bundle(table) or MAIN)
    wanted = {name for name, copies in found.copies.items() if copies} | found.refused.keys()
    kept: dict[str, torch.Tensor] = {}

    def keep() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            if name in wanted:
                kept[split_name(name)[1]] = tensor
            yield name, tensor

    loading.load_tensors(model, vllm_config.model_config, main_bundle(keep()))
    loading.load_tensors(draft.model, draft.model_config, kept.items())


def main_bundle(tensors: Tensors) -> Tensors:
    """Yield the tensors that are weights of the model itself.

    Parameters
    ----------
    tensors
        Tensors of a chain.
    """
    return ((name, tensor) for name, tensor in tensors if split_name(name)[0] == MAIN)


def tell_drafts(worker_class: Any) -> None:
    """Let workers tell the backend their draft model, because vLLM makes the backend with the model only.

    Parameters
    ----------
    worker_class
        vLLM's class `Worker`. On GPUs, `determine_available_memory` runs before the KV cache takes the memory that learning needs.
    """
    init, measure = worker_class.init_weight_transfer_engine, worker_class.determine_available_memory

    def take_draft(worker: Any, *, is_early: bool = False) -> None:
        take = getattr(worker.weight_transfer_engine, "take_draft", None)  # a server may have another backend
        get = getattr(worker.model_runner, "get_draft_model", None)
        if take is not None:
            take(None if get is None else get(), is_early=is_early)

    @functools.wraps(init)
    def init_with_draft(worker: Any, init_info: Any) -> Any:
        take_draft(worker)
        return init(worker, init_info)

    @functools.wraps(measure)
    def learn_and_measure(worker: Any) -> Any:
        take_draft(worker, is_early=worker.device.type != "cpu")
        return measure(worker)

    worker_class.init_weight_transfer_engine, worker_class.determine_available_memory = init_with_draft, learn_and_measure


def _real(name: str) -> str:
    """Return the path of a directory without links. Names in a hub stay as they are."""
    return os.path.realpath(name) if os.path.isdir(name) else name
