"""A simulated training run for the benchmarks of the chain: a state that changes a little with every step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from workloads import BF16, State, update_size

_DISTINCT = 1 << 25
"""The number of elements that are drawn. Larger models repeat them, because drawing takes long, and deltawire does not use repetitions."""


def training_run(elements: int, density: float, tensors: int = 32, seed: int = 0) -> Iterator[State]:
    """Yield the bf16 weights of a model after each optimizer step, without end. The next step changes the yielded arrays in place.

    The master weights are fp32, as in training, so weights that just changed are likely to change again.

    Parameters
    ----------
    elements
        The number of weights.
    density
        The share of weights that each step changes.
    tensors
        The number of tensors.
    seed
        The seed of the random numbers.
    """
    random = np.random.Generator(np.random.SFC64(seed))
    distinct = min(elements, _DISTINCT)
    masters: npt.NDArray[np.float32] = random.standard_normal(distinct, dtype=np.float32) * np.float32(0.02)
    size = np.float32(update_size(density, BF16))
    weights = masters.astype(BF16)
    each = elements // tensors
    state: State = {f"model.layers.{index}.weight": np.empty(each, BF16) for index in range(tensors)}
    while True:
        for index, tensor in enumerate(state.values()):
            _tile(tensor, weights, index * each % distinct)
        yield state
        for start in range(0, distinct, 1 << 20):
            part = masters[start : start + (1 << 20)]
            part += random.standard_normal(part.size, dtype=np.float32) * size
        weights[:] = masters


def _tile(tensor: npt.NDArray[np.generic], weights: npt.NDArray[np.generic], start: int) -> None:
    """Fill a tensor with the weights from `start` on, and repeat them as needed."""
    done = 0
    while done < tensor.size:
        part = weights[start : start + tensor.size - done]
        tensor[done : done + part.size] = part
        done += part.size
        start = 0
