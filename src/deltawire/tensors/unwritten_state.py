"""States that are written only if they are read. They can be encoded without that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from .bits import State, Tensor
from .columns import Columns, ColumnState

if TYPE_CHECKING:
    from .._native import Preparation


class PendingState(ColumnState):
    """A state with arrays that are not written yet. They are written before one of them is returned.

    A codec that makes elements right before it encodes them uses `unwritten` and `preparation` instead, and its caller calls `check` then.

    Parameters
    ----------
    columns
        The columns of all arrays.
    pending
        The names of those that are not written yet.
    preparation
        Makes their elements.
    finish
        Writes all that are not written yet. Raises as `check` does; then their contents are undefined. It may be called again.
    check
        Raises if elements that were encoded could not be made.
    """

    def __init__(
        self,
        columns: Columns,
        pending: Collection[str],
        preparation: Preparation,
        *,
        finish: Callable[[], None],
        check: Callable[[], None],
    ) -> None:
        super().__init__(columns)
        self.preparation = preparation
        self.finish = finish
        self.check = check
        self._pending = frozenset(pending)

    @property
    def columns(self) -> Columns:
        self.finish()
        return self._columns

    @property
    def unwritten(self) -> Columns:
        """The columns of all arrays, which need not be written yet."""
        return self._columns

    def __getitem__(self, name: str) -> Tensor:
        if name in self._pending:
            self.finish()
        return super().__getitem__(name)

    def of(self, names: Sequence[str]) -> State:
        """Return some of the arrays. They stay unwritten if these are all."""
        return self if list(names) == self.unwritten.layout.names else {name: self[name] for name in names}


class UnwrittenState(Mapping[str, Tensor]):
    """A state on a GPU with tensors that are in no memory (`UnwrittenTensor`). All of its columns are known.

    Parameters
    ----------
    columns
        The columns of all tensors. Those that are not written have the addresses of what their elements are made from.
    check
        Raises if elements that were encoded could not be made.
    """

    def __init__(self, columns: Columns, check: Callable[[], None]) -> None:
        self.unwritten = columns
        self.check = check

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.unwritten.layout.names)}

    def __getitem__(self, name: str) -> Tensor:
        return self.unwritten.tensors[self._places[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.unwritten.layout.names)

    def __len__(self) -> int:
        return len(self.unwritten)

    def of(self, names: Sequence[str]) -> State:
        """Return some of the tensors, with their columns if they follow each other."""
        first = self._places[names[0]] if names else 0
        if self.unwritten.layout.names[first : first + len(names)] == list(names):
            return UnwrittenState(self.unwritten.part(first, len(names)), self.check)
        return {name: self[name] for name in names}
