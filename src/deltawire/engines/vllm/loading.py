"""Loads weights into a model through its own loaders: single tensors, or everything anew.

Single tensors can be loaded only if they are *in place* (see read_back.py). Neither can be reverted: after a failure the model holds a mix
of two versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...format.checkpoints.checkpoint import Checkpoint
from .staging import bits

_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def torch_dtype(weights: Checkpoint, name: str) -> torch.dtype:
    """Return the torch type of a tensor of a checkpoint."""
    numpy = weights.entry(name).dtype.numpy
    return getattr(torch, np.dtype(numpy).name)


def as_tensor(flat: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """Return bits in writable memory as a tensor that shares the memory."""
    return torch.from_numpy(flat.view(_SIGNED[flat.dtype.itemsize])).view(dtype)


def whole_tensors(weights: Checkpoint, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of a checkpoint, each in new memory."""
    for name in names:
        flat = as_tensor(bits(weights[name]).copy(), torch_dtype(weights, name))
        yield name, flat.view(weights.entry(name).shape)


def write_tensors(model: Any, weights: Checkpoint, names: Sequence[str]) -> None:
    """Write complete tensors that are in place."""
    if names:
        with torch.no_grad():
            model.load_weights(whole_tensors(weights, names))


def load_all(model: Any, model_config: Any, weights: Checkpoint) -> None:
    """Load everything as at the start, including vLLM's processing after loading, into the memory that the kernels use."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(model)
    try:
        with torch.no_grad():
            model.load_weights(whole_tensors(weights, weights))
    finally:  # also after a failure, or the next attempt would find half-loaded layers
        finalize_layerwise_reload(model, model_config)
