"""Tensors of the chain that a worker cannot read from its memory, as arrays in host memory.

Usually these are few and small, such as the shapes of packed weights, which kernels do not need. Decoding needs them, because a delta codes
many tensors together. They come from the checkpoint that the weights were loaded from. The digest of the version proves them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from ...delta.patch import TensorPatch
from ...errors import DeltawireError
from ...format.checkpoints.checkpoint import Checkpoint
from ...format.records.record_parts import CommitRef
from ...subscribe.tensor_table import TensorTable
from ...tensors.torch_types import torch_dtype

_MOST_BYTES = 256 << 20
"""The most memory for these tensors in each worker."""


class HeldBases:
    """A `BaseSource` in host memory.

    Parameters
    ----------
    checkpoint
        Opens the checkpoint that the weights were loaded from.
    most_bytes
        The most memory for the tensors.
    """

    def __init__(self, checkpoint: Callable[[], Checkpoint], *, most_bytes: int = _MOST_BYTES) -> None:
        self._checkpoint = checkpoint
        self._most_bytes = most_bytes
        self._wanted: TensorTable = {}
        self._arrays: dict[str, NDArray[Any]] = {}

    @property
    def nbytes(self) -> int:
        """The memory that the tensors occupy."""
        return sum(array.nbytes for array in self._arrays.values())

    def hold(self, wanted: TensorTable) -> str | None:
        """Read these tensors from the checkpoint that the weights were loaded from. Returns why that is impossible, or None.

        Parameters
        ----------
        wanted
            The tensors that the worker cannot read from its memory.
        """
        self._wanted, self._arrays = wanted, {}
        if not wanted:
            return None
        try:
            return self.take(self._checkpoint())
        except (DeltawireError, OSError) as error:
            return f"{type(error).__name__}: {error}"

    def take(self, weights: Checkpoint) -> str | None:
        """Read the tensors from a checkpoint that was loaded into the model. Returns why that is impossible, or None.

        Parameters
        ----------
        weights
            The checkpoint.
        """
        self._arrays = {}
        for name, spec in self._wanted.items():
            if name not in weights or (weights.entry(name).dtype, weights.entry(name).shape) != (spec.dtype, spec.shape):
                return f"tensor {name!r} is not in the checkpoint that the weights were loaded from"
        nbytes = sum(weights.entry(name).nbytes for name in self._wanted)
        if nbytes > self._most_bytes:
            return f"{len(self._wanted)} tensors, such as {min(self._wanted)!r}, have {nbytes:,} bytes that cannot be read from the model"
        self._arrays = {name: weights[name].copy() for name in self._wanted}
        return None

    def base(self, name: str) -> NDArray[Any]:
        return self._arrays[name]

    def settled(self, ref: CommitRef, changes: Mapping[str, Sequence[TensorPatch]]) -> None:
        for name, patches in changes.items():
            dtype = self._wanted[name].dtype
            flat = self._arrays[name].reshape(-1).view(dtype.bits)
            for patch in patches:
                values = torch.as_tensor(patch.values).view(torch_dtype(dtype, bits=True))
                flat[torch.as_tensor(patch.indices).cpu().numpy()] = values.cpu().numpy().view(dtype.bits)
