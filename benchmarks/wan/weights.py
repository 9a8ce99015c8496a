"""Weights of many gigabytes that need little memory: one block of weights, mapped many times under different names.

The tensors have different addresses and the same memory. All methods here treat each block by itself, so a repeated block takes the same
bytes and the same work as others would. Deltas of deltawire hold absolute values and are decoded before the first of them is applied, so
they may be applied to repeated blocks, too.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from workloads import BF16, update_size

BLOCK = 1 << 27
"""The weights of a block: 256 MiB, which are one segment of a delta."""
BLOCK_BYTES = 2 * BLOCK
DENSITY = 0.0108
"""The share of weights that the recorded step changed."""

_TENSORS = 8
_SLAB = 1 << 20


def copies_for(weights: float) -> int:
    """Return how many blocks make at least this many weights."""
    return max(1, math.ceil(weights / BLOCK))


class Block:
    """Memory for one block, which can be mapped many times, also by other processes.

    Parameters
    ----------
    path
        The file of a block of another process, whose contents are copied. None: the contents are zeros.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._descriptor = os.memfd_create("deltawire-block")
        os.ftruncate(self._descriptor, BLOCK_BYTES)
        self.weights = self._map()
        """The weights, as one flat array."""
        if path is not None:
            self.load(path)

    @property
    def path(self) -> Path:
        """A path by which other processes can read the block, while this one lives."""
        return Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")

    def load(self, path: Path) -> None:
        """Copy the block of another process."""
        self.weights.view(np.uint16)[:] = np.memmap(path, np.uint16, "r", shape=(BLOCK,))

    def equals(self, path: Path) -> bool:
        """Tell whether the block of another process has the same bits."""
        return bool(np.array_equal(self.weights.view(np.uint16), np.memmap(path, np.uint16, "r", shape=(BLOCK,))))

    def model(self, copies: int) -> dict[str, npt.NDArray[Any]]:
        """Return tensors that repeat the block this many times. Those of the first copy are `first_names`."""
        side = int((BLOCK // _TENSORS) ** 0.5)
        tensors: dict[str, npt.NDArray[Any]] = {}
        for copy in range(copies):
            parts = self._map().reshape(_TENSORS, side, -1)
            tensors |= {_name(copy, tensor): parts[tensor] for tensor in range(_TENSORS)}
        return tensors

    def _map(self) -> npt.NDArray[Any]:
        return np.frombuffer(mmap.mmap(self._descriptor, BLOCK_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), BF16)


def _name(copy: int, tensor: int) -> str:
    return f"model.layers.{copy:03d}.weight{tensor}"


def training(block: Block, seed: int = 0) -> Iterator[None]:
    """Put weights into a block, and change them as a training step does whenever the next item is asked for.

    The master weights are fp32, as in training. The size of the steps gives the recorded density (see `workloads.synthetic_update`).
    """
    random = np.random.Generator(np.random.SFC64(seed))
    masters = random.standard_normal(BLOCK, dtype=np.float32)
    masters *= np.float32(0.02)
    size = np.float32(update_size(DENSITY, BF16))
    while True:
        block.weights[:] = masters
        yield
        for start in range(0, BLOCK, _SLAB):
            update = random.standard_normal(_SLAB, dtype=np.float32)
            update *= size
            masters[start : start + _SLAB] += update


def publish_from(baseline: Block, copies: int) -> None:
    """Let publishers of this process keep their copy of the weights in a block that is mapped many times, too.

    A publisher copies all weights after each version. Here it copies the first block, which is all of them.
    """
    from deltawire.publish import append
    from deltawire.publish import baseline as baseline_module

    first = {_name(0, tensor) for tensor in range(_TENSORS)}

    def copy_first(source: Mapping[str, Any], target: Mapping[str, Any], *, wait: bool = True) -> None:
        for name in source:
            if name in first:
                np.copyto(target[name], source[name])

    modules: tuple[Any, Any] = (append, baseline_module)
    for module in modules:
        module.copy_tensors = copy_first
    modules[0].new_arrays = lambda *_: baseline.model(copies)
