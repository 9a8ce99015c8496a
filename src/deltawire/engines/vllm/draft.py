"""The draft model of a worker: it proposes tokens that the model then checks (speculative decoding).

A draft whose weights are in the checkpoint of the model, such as an MTP layer, *follows* the chain: the same swap writes both, so the model
of one version is never served with the draft of another. A draft with a checkpoint of its own is not in the chain, and stays as it is. Its
proposals are then accepted less often as training goes on, but each token is still one of the model. Modules that it shares with the model,
such as the embedding, are modules of the model, and are written with it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...subscribe.tensor_table import TensorTable
from .layout.loader_copies import record_copies
from .layout.model_layout import DRAFT_PREFIX
from .loading import load_tensors

Tensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft model of a worker.

    Parameters
    ----------
    model
        The draft model.
    model_config
        vLLM's configuration of it.
    why_not
        The reason why it does not follow the chain. None if it does.
    """

    model: Any
    model_config: Any
    why_not: str | None

    def status(self) -> dict[str, Any]:
        """Return what the status of a worker says about its draft model, in JSON's types."""
        return {"model": type(self.model).__name__, "follows": self.why_not is None, "why_not": self.why_not}


def draft_of(model: Any, vllm_config: Any) -> Draft | None:
    """Return a worker's draft model, and whether it follows the chain. None if there is none.

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
    own = (_real(config.model), config.revision)
    if own in ((_real(place), target.revision) for place in (target.model, target.model_weights) if place):
        return Draft(model, config, None)
    return Draft(model, config, f"it was loaded from a checkpoint of its own, {config.model}, which is not in the chain")


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
        The draft model.
    table
        The tensors of the checkpoint.
    tensors
        All tensors of the checkpoint. Those of a module should follow each other.
    """
    found = record_copies(draft.model, vllm_config, table)
    wanted = {name for name, copies in found.copies.items() if copies} | found.refused.keys()
    kept: dict[str, torch.Tensor] = {}

    def keep() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            if name in wanted:
                kept[name] = tensor
            yield name, tensor

    load_tensors(model, vllm_config.model_config, keep())
    load_tensors(draft.model, draft.model_config, kept.items())


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


def _real(place: str) -> str:
    """Return the path of a directory without links. Names in a hub stay as they are."""
    return os.path.realpath(place) if os.path.isdir(place) else place
