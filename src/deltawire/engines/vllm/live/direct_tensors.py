"""The tensors that a worker holds as the checkpoint has them, in a form that updates use without looking at each of them again.

Facts about many tensors take long to find out in Python, and a server generates with the same Python process. So they are found out once,
when the layout has been learnt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ....format.digest import Digest, TensorKeys
from ....tensors.bits import State, TensorBits
from ....tensors.columns import Columns, ColumnState, Layout, in_columns
from ..layout.types import TensorLayout

_MOST_PARTS = 4096
"""The most parts that are kept. A version has at most 128 files, and most versions of a chain are cut at the same tensors."""


class DirectTensors:
    """The direct tensors of a layout. They must neither move nor be replaced while this is in use.

    Parameters
    ----------
    tensors
        The layout of each tensor of the chain, in the order of names.
    """

    def __init__(self, tensors: Mapping[str, TensorLayout]) -> None:
        self.by_name: Mapping[str, torch.Tensor] = {name: layout.direct for name, layout in tensors.items() if layout.direct is not None}
        self.state: State = in_columns(dict(self.by_name)) if self.by_name else {}
        """The same tensors, in columns if possible."""
        self.tied = tied_tensors(tensors)
        """The names of tensors that have the same memory as an earlier one, each with the name of that one."""
        memory = {name: set(_memory_of(tensors[name])) for pair in self.tied.items() for name in pair}
        self.repeated = frozenset(name for name, first in self.tied.items() if memory[name] <= memory[first])
        """Tied tensors that have no other memory than the earlier one. Writing that one is enough."""
        self.sizes = np.array([tensor.numel() for tensor in self.by_name.values()], np.int64)
        """The number of elements of each tensor."""
        self.at_one_position = frozenset(name for name in self.by_name if len(tensors[name].placements) <= 1)
        """The tensors that the model holds only once."""
        self._names = list(self.by_name)
        self._numbers = {name: number for number, name in enumerate(self.by_name)}
        keys = ((name, tensors[name].spec.dtype, tensors[name].spec.shape) for name in self.by_name)
        self._tags = TensorKeys.of(keys).tags
        self._last_chosen: tuple[bytes, State] = b"", {}
        self._parts: dict[tuple[int, int], ColumnState] = {}
        """The parts that files of earlier updates covered, by the number of the first tensor, and the number of tensors."""
        self._firsts: dict[Layout, int] = {}
        """The number of the first tensor of each part."""

    def numbers(self, tensors: Sequence[TensorBits]) -> NDArray[np.int64]:
        """Return the numbers of tensors in `by_name`, and −1 for those that are not there.

        Parameters
        ----------
        tensors
            The tensors. Those of a `part` are not looked at one by one.
        """
        first = self._firsts.get(tensors.layout) if isinstance(tensors, Columns) else None
        if first is not None:
            return np.arange(first, first + len(tensors))
        return np.fromiter((self._numbers.get(tensor.name, -1) for tensor in tensors), np.int64, len(tensors))

    def chosen(self, chosen: NDArray[np.bool_]) -> State:
        """Return some of the tensors, in columns if possible.

        Parameters
        ----------
        chosen
            Whether each tensor is one of them.
        """
        if chosen.all():
            return self.state
        key = chosen.tobytes()
        if key != self._last_chosen[0]:  # updates that leave tensors as they are usually leave the same ones
            names = [self._names[number] for number in np.flatnonzero(chosen).tolist()]
            self._last_chosen = key, in_columns({name: self.by_name[name] for name in names})
        return self._last_chosen[1]

    def tag(self, chosen: NDArray[np.bool_]) -> Digest:
        """Return the contribution of some of the tensors to a digest that does not depend on their elements.

        Parameters
        ----------
        chosen
            Whether each tensor is one of them.
        """
        return Digest.sum(self._tags[chosen])

    def part(self, names: Sequence[str]) -> ColumnState | None:
        """Return some of the tensors in columns. None if one of them is not direct, or if they are not in columns.

        Parameters
        ----------
        names
            Their names, ascending. They must follow one another in the chain.
        """
        first = self._numbers.get(names[0]) if names else None
        if first is None or not isinstance(self.state, ColumnState) or self._names[first : first + len(names)] != list(names):
            return None
        found = self._parts.get((first, len(names)))
        if found is None:
            if len(self._parts) == _MOST_PARTS:
                self._parts.clear()
                self._firsts.clear()
            found = self._parts[first, len(names)] = self.state.part(first, len(names))
            self._firsts[found.columns.layout] = first
        return found


def tied_tensors(tensors: Mapping[str, TensorLayout]) -> dict[str, str]:
    """Return the names of tensors that have the same memory as an earlier one, each with the name of that one."""
    first_at: dict[object, str] = {}
    found: dict[str, str] = {}
    for name, layout in tensors.items():
        for memory in _memory_of(layout):
            first = first_at.setdefault(memory, name)
            if first != name:
                found.setdefault(name, first)
    return found


def _memory_of(layout: TensorLayout) -> Iterator[object]:
    """Yield a value for each position of a tensor. Another tensor with this position has the same value, even if only one is direct."""
    if layout.kind in ("direct", "mapped", "partial"):
        for placement in layout.placements:
            yield placement.memory.data_ptr(), placement.nests
    if layout.direct is not None and not layout.placements:
        yield layout.direct.data_ptr(), layout.direct.nbytes
