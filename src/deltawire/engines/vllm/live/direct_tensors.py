"""The tensors that a worker holds as the checkpoint has them, in a form that updates use without looking at each of them again.

Facts about many tensors take long to find out in Python, and a server generates with the same Python process. So they are found out once,
when the layout has been learnt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import torch

from ....format.digest import Digest, TensorKeys
from ....tensors.bits import State
from ....tensors.columns import ColumnState, in_columns
from ..layout.types import TensorLayout


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
        places = {name: set(_memory_of(tensors[name])) for pair in self.tied.items() for name in pair}
        self.repeated = frozenset(name for name, first in self.tied.items() if places[name] <= places[first])
        """Tied tensors that have no other memory than the earlier one. What is written for that one is enough."""
        held = self.state.columns.layout.names if isinstance(self.state, ColumnState) else []
        self._numbers = {name: number for number, name in enumerate(held)}
        self._names = held
        keys = ((name, tensors[name].spec.dtype, tensors[name].spec.shape) for name in self.by_name)
        self._tags = dict(zip(self.by_name, TensorKeys.of(keys).tags, strict=True))

    def tag(self, names: Collection[str]) -> Digest:
        """Return the contribution of some of the tensors to a digest that does not depend on their elements.

        Parameters
        ----------
        names
            Their names.
        """
        return Digest.sum(np.array([self._tags[name] for name in names], np.uint32).reshape(-1, 4))

    def part(self, names: Sequence[str]) -> State | None:
        """Return some of the tensors in columns. None if one of them is not direct, or if they are not in columns.

        Parameters
        ----------
        names
            Their names, ascending. They must follow one another in the chain.
        """
        first = self._numbers.get(names[0]) if names else None
        if first is None or not isinstance(self.state, ColumnState) or self._names[first : first + len(names)] != list(names):
            return None
        return self.state.part(first, len(names))


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
    """Yield a value for each place of a tensor. It is the same for another tensor with this place, even if only one of them is direct."""
    if layout.kind in ("direct", "mapped", "partial"):
        for placement in layout.placements:
            yield placement.memory.data_ptr(), placement.nests
    if layout.direct is not None and not layout.placements:
        yield layout.direct.data_ptr(), layout.direct.nbytes
