"""Loads one module anew through vLLM's own loaders, into the memory that the kernels use.

It is for modules whose tensors can be neither written element by element nor computed again (recompute.py). The other modules keep their
weights and are not touched.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .recompute import kept_memory


def load_module(model: Any, model_config: Any, name: str, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load all tensors of one module, and process them as at the start.

    All tensors stay in the memory that they had. Raises `EngineQuarantined` if that is impossible, and the errors of the model's loaders.
    After a failure, the module may hold a mix of old and new weights.

    Parameters
    ----------
    model
        The model.
    model_config
        vLLM's configuration of the model.
    name
        The name of the module in the model.
    weights
        All tensors of the chain that this module holds elements of, and no others.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    module = model.get_submodule(name)
    with kept_memory(name, module), torch.no_grad():
        initialize_layerwise_reload(module)
        try:
            model.load_weights(weights)
        finally:  # also after a failure, or the next attempt would find a half-loaded module
            finalize_layerwise_reload(module, model_config)
