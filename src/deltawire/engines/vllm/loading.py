"""Put weights into a model by its own loaders: whole tensors, or everything anew.

The first is right only for tensors that are *in place* (see `read_back`). Neither can be taken back: after a failure the model holds a mix.
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
    """The type of a tensor of a checkpoint, as torch calls it."""
    numpy = weights.entry(name).dtype.numpy
    return getattr(torch, np.dtype(numpy).name)


def as_tensor(flat: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """Bits in writable memory as a tensor, which shares it."""
    return torch.from_numpy(flat.view(_SIGNED[flat.dtype.itemsize])).view(dtype)


def whole_tensors(weights: Checkpoint, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a checkpoint, one after the other, each in memory of its own."""
    for name in names:
        flat = as_tensor(bits(weights[name]).copy(), torch_dtype(weights, name))
        yield name, flat.view(weights.entry(name).shape)


def write_tensors(model: Any, weights: Checkpoint, names: Sequence[str]) -> None:
    """Write whole tensors that are in place."""
    if names:
        with torch.no_grad():
            model.load_weights(whole_tensors(weights, names))


def load_all(model: Any, model_config: Any, weights: Checkpoint) -> None:
    """Load everything as at the start, with all that vLLM does to weights after loading, into the memory that the kernels use."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(model)
    try:
        with torch.no_grad():
            model.load_weights(whole_tensors(weights, weights))
    finally:  # also after a failure, or the next attempt would find layers that are half-way
        finalize_layerwise_reload(model, model_config)
