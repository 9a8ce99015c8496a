"""A model that any process can recompute from the number of a training step."""

from __future__ import annotations

from typing import Any

import numpy as np

_BLOCKS, _BLOCK = 16, 32


def state_of(step: int) -> dict[str, Any]:
    """Return a state of about 20 kB. Successive steps differ in one block of each tensor.

    Some ranges of steps have one more tensor, so that a chain needs full checkpoints in between.
    """
    rng = np.random.default_rng(11)
    state = {f"layer.{i}.weight": rng.integers(0, 1 << 16, (48, 64), np.uint16) for i in range(3)}
    state["norm"] = rng.integers(0, 1 << 16, 1024, np.uint16)
    changed_at = step - (step - np.arange(_BLOCKS)) % _BLOCKS
    for array in state.values():
        array.reshape(-1)[: _BLOCKS * _BLOCK] ^= np.repeat(changed_at, _BLOCK).astype(np.uint16)
    if step // 30 % 2:
        state["extra"] = np.full((3, 5), step, np.uint16)
    return {name: array.view(np.float16) for name, array in state.items()}


def bits(state: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (str(array.dtype), tuple(array.shape), np.asarray(array).tobytes()) for name, array in state.items()}
