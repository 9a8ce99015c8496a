"""Put weights into a model by its own loaders.

In order of cost: single elements (`write_elements`), whole tensors in place (`write_tensors`), everything anew (`load_all`). The first two
are right only for tensors that are *in place* (see `read_back`). None can be taken back: after a failure the model holds a mix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...format.checkpoint import Checkpoint
from .staging import Change, bits

_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_SPARSE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


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


def has_sparse_loading() -> bool:
    """Whether this vLLM (0.28 or later) can write single elements."""
    try:
        from vllm.model_executor.model_loader import checkpoint_weight_patch  # noqa: F401
    except ImportError:
        return False
    return True


def is_sparse(dtype: torch.dtype, change: Change) -> bool:
    """Whether vLLM can write these elements alone. It marks what stays by NaN, so a new NaN, or a type without, takes the whole tensor."""
    return dtype in _SPARSE and not bool(torch.isnan(as_tensor(change.values, dtype)).any())


def write_elements(model: Any, weights: Checkpoint, changes: Sequence[tuple[str, Change]], device: torch.device) -> None:
    """Write the elements that changed, of tensors that are in place."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import CheckpointWeightPatch, load_checkpoint_weight_patches

    patches = []
    for name, change in changes:
        dtype = torch_dtype(weights, name)
        values = as_tensor(change.values, dtype).to(device, non_blocking=True)
        indices = torch.from_numpy(change.indices).to(device, non_blocking=True)
        patches.append(CheckpointWeightPatch(name, tuple(weights.entry(name).shape), dtype, values, indices))
    load_checkpoint_weight_patches(model, patches, validate_unique_indices=False)


def masked_tensors(weights: Checkpoint, changes: Iterable[tuple[str, Change]], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that hold only the elements that changed; all others are NaN. One after the other."""
    for name, change in changes:
        shape, dtype = weights.entry(name).shape, torch_dtype(weights, name)
        flat = torch.full((math.prod(shape),), torch.nan, dtype=dtype, device=device)
        flat[torch.from_numpy(change.indices).to(device).long()] = as_tensor(change.values, dtype).to(device)
        yield name, flat.view(shape)


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
