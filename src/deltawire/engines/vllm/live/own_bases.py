"""Tensors of which a worker holds nothing, but whose elements share blocks with tensors that it holds, in the worker's own memory.

A worker decodes whole blocks of a file, so it needs the other elements of these blocks. A worker that cannot read them from its peers keeps
the tensors that can share a block with one of its own (`windows.near_tensors`), and none of the others. It decodes only some blocks of
such a tensor, and only their elements follow the updates. So no other worker may read this copy. It would also be wrong in other blocks,
which are read only if a publisher begins to cut files elsewhere. The digests of that update are wrong then, and the next full load
replaces the copy.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....errors import EngineRefused
from ....subscribe.tensor_table import TensorSpec, TensorTable


class OwnBases:
    """Keeps tensors in the memory of this process."""

    def __init__(self) -> None:
        self._absent: TensorTable = {}
        self._arrays: dict[str, NDArray[Any]] = {}
        """The kept tensors, as unsigned integers."""
        self._keeps_all = False
        """True if an update needed a tensor that was left out. From the next full load on, all are kept."""

    @property
    def nbytes(self) -> int:
        """The size of the kept tensors."""
        return sum(array.nbytes for array in self._arrays.values())

    def choose(self, absent: TensorTable, near: Collection[str]) -> TensorTable:
        """Forget all tensors. Return those that are to be kept, each of which `put` must be called for.

        Parameters
        ----------
        absent
            The tensors of which the worker holds nothing, and that it cannot read from other workers.
        near
            Those that can share a block with a tensor that the worker decodes.
        """
        self._absent, self._arrays = absent, {}
        return {name: spec for name, spec in absent.items() if self._keeps_all or name in near}

    def takes(self, name: str) -> bool:
        """Return whether a tensor of a checkpoint that is loaded is to be put here.

        Parameters
        ----------
        name
            The name of the tensor.
        """
        return name in self._arrays or (self._keeps_all and name in self._absent)

    def put(self, name: str, flat: NDArray[Any]) -> None:
        """Keep a copy of a tensor.

        Parameters
        ----------
        name
            The name of the tensor.
        flat
            Its elements as unsigned integers.
        """
        self._arrays[name] = np.array(flat)

    def spec(self, name: str) -> TensorSpec:
        """Return the type and shape of an absent tensor."""
        return self._absent[name]

    def knows(self, name: str) -> bool:
        """Return whether a tensor is absent in this worker. It may have been left out."""
        return name in self._absent

    def writes(self, name: str) -> bool:
        """Return whether a tensor is kept."""
        return name in self._arrays

    def base(self, name: str) -> NDArray[Any]:
        """Return a tensor. Raises `EngineRefused` if it was left out, and keeps it from the next full load on.

        Parameters
        ----------
        name
            The name of an absent tensor.
        """
        if name not in self._arrays:
            self._keeps_all = True
            raise EngineRefused(
                f"the update needs tensor {name!r}, which this worker does not keep. It had expected that no block of a file has "
                "elements both of this tensor and of one that the worker holds.",
                hint="Load the version in full, as the sidecar does. From then on the worker keeps all tensors.",
            )
        spec = self._absent[name]
        return self._arrays[name].view(spec.dtype.numpy).reshape(spec.shape)

    def flat(self, name: str) -> NDArray[Any]:
        """Return the memory of a kept tensor, as unsigned integers."""
        return self._arrays[name]
