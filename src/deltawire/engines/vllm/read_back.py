"""Read weights back from a model through its own loaders.

A model's `load_weights` knows where each element of a checkpoint belongs: which rows of a fused QKV, which shard, which expert. Run with
every write turned into a comparison, it tells whether the model holds what a checkpoint says, without changing it. A tensor that reads
back equal right after the server has loaded it is *in place*: what a loader writes later is where the kernels look for it. One that does
not was transformed after loading (packed, transposed, quantised); such tensors can only be loaded anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .element_map import Piece

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Readings:
    """What came of reading tensors back, by their names in the checkpoint."""

    equal: set[str] = field(default_factory=set)
    """Held by this worker, and equal, bit for bit."""
    different: set[str] = field(default_factory=set)
    """Not equal, or not comparable."""
    unlike: set[str] = field(default_factory=set)
    """Those of the different ones of which not even half of the elements are equal: no other version, but another layout."""
    absent: set[str] = field(default_factory=set)
    """Not held by this worker: another shard's, or a tensor that the model does not load."""
    untouched: set[str] = field(default_factory=set)
    """Parameters of the model, by its own names, that none of the tensors was loaded into."""
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    """Where the equal ones are, if that is all a matter of strides."""


def read_back(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Readings:
    """Compare a model with tensors of a checkpoint. Nothing is changed."""
    comparison = _Comparison(model)
    remaining = iter(weights)
    while True:
        try:
            with comparison:
                model.load_weights(comparison.watch(remaining))
        except Exception:  # by a loader that this layout confuses: the tensor is not in place, the others may be
            if comparison.current is None:
                raise
            comparison.refused.add(comparison.current)
            comparison.current = None
            continue
        return comparison.readings()


@dataclass(frozen=True, slots=True)
class _Source:
    """Memory that holds a tensor of the checkpoint, or what a loader computed from some."""

    storage: weakref.ref[torch.UntypedStorage]
    names: frozenset[str]
    tensor: weakref.ref[torch.Tensor] | None
    """None if it was computed."""


class _Comparison(TorchDispatchMode):  # type: ignore[misc]
    """While it is active, nothing is written to the model's tensors: writes are compared instead."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        tensors = [*model.parameters(), *model.buffers()]
        self._owned = {_memory(tensor) for tensor in tensors} - {0}
        self._parameters = {name: _memory(tensor) for name, tensor in model.named_parameters() if tensor.numel()}
        self._touched: set[int] = set()
        self._sources: dict[int, _Source] = {}
        self._verdicts: dict[str, list[tuple[torch.Tensor, int]]] = {}
        """By name: how many elements are equal, and of how many."""
        self._seen: list[str] = []
        self._pieces: dict[str, list[Piece]] = {}
        self._unplaced: set[str] = set()
        """Used for more than copies of their elements."""
        self.refused: set[str] = set()
        self.current: str | None = None

    def watch(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Hand the tensors on, knowing which one is being loaded."""
        for name, tensor in weights:
            self.current = name
            self._seen.append(name)
            self._sources[_memory(tensor)] = _Source(weakref.ref(tensor.untyped_storage()), frozenset([name]), weakref.ref(tensor))
            yield name, tensor
        self.current = None

    def readings(self) -> Readings:
        counts = [count for verdicts in self._verdicts.values() for count, _ in verdicts]
        equal_counts = iter(torch.stack(counts).tolist() if counts else [])  # one wait for the device, not thousands
        equal = {name: sum(next(equal_counts) for _ in verdicts) for name, verdicts in self._verdicts.items()}
        totals = {name: sum(total for _, total in verdicts) for name, verdicts in self._verdicts.items()}
        readings = Readings(untouched={name for name, memory in self._parameters.items() if memory not in self._touched})
        refused = self.refused | self._unplaced - self._verdicts.keys()  # also what went where nobody looked: it is not absent
        for name in self._seen:
            if name in refused or (name in equal and equal[name] < totals[name]):
                readings.different.add(name)
                if name in refused or 2 * equal[name] < totals[name]:
                    readings.unlike.add(name)
            elif name in equal:
                readings.equal.add(name)
                if name not in self._unplaced and name in self._pieces:
                    readings.pieces[name] = self._pieces[name]
            else:
                readings.absent.add(name)
        return readings

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        if written is None or _memory(written) not in self._owned:
            result = func(*args, **kwargs)
            self._follow((args, kwargs), result, is_view=written is None)
            return result
        self._touched.add(_memory(written))
        names = self._names((args[1:], kwargs))
        if len(names) > 1:  # each of them alone cannot be loaded
            self.refused |= names
            return written
        for name in names:
            equal: torch.Tensor | None = None
            if func is torch.ops.aten.copy_.default:
                equal = self._compare(written, args[1])
                self._place(name, args[1], written)
            elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):  # the padding of a vocabulary
                equal = (written == (args[1] if len(args) > 1 else 0)).sum()
            if equal is None:
                self.refused.add(name)
            else:
                self._verdicts.setdefault(name, []).append((equal, written.numel()))
        return written

    def _source(self, tensor: torch.Tensor) -> _Source | None:
        found = self._sources.get(_memory(tensor))
        return found if found is not None and found.storage() is not None else None

    def _names(self, values: Any) -> frozenset[str]:
        """Whose elements are written: a loader may look at several tensors before it writes the first."""
        names = self._origins(values)
        last = self.current or (self._seen[-1] if self._seen else None)
        return names or frozenset(() if last is None else (last,))

    def _origins(self, values: Any) -> frozenset[str]:
        sources = [self._source(tensor) for tensor in _tensors(values)]
        return frozenset().union(*(source.names for source in sources if source is not None))

    def _follow(self, inputs: Any, outputs: Any, *, is_view: bool) -> None:
        """Remember what was computed from which tensors; a view of one is still that tensor."""
        names = self._origins(inputs)
        if not names:
            return
        viewed = {_memory(tensor) for tensor in _tensors(inputs)} if is_view else set()
        results = _tensors(outputs)
        computed = [tensor for tensor in results if _memory(tensor) not in viewed]
        for tensor in computed:
            self._sources[_memory(tensor)] = _Source(weakref.ref(tensor.untyped_storage()), names, None)
        if computed or not results:
            self._unplaced |= names

    def _place(self, name: str, source: torch.Tensor, target: torch.Tensor) -> None:
        found = self._source(source)
        tensor = None if found is None or found.tensor is None else found.tensor()
        piece = None if tensor is None else Piece.of(tensor, source, target)
        if piece is None:
            self._unplaced.add(name)
        else:
            self._pieces.setdefault(name, []).append(piece)

    def _compare(self, held: torch.Tensor, source: torch.Tensor) -> torch.Tensor | None:
        """How many elements have the same bits, as a tensor, for nobody waits for the device here; None if the shapes do not fit."""
        source = source.to(dtype=held.dtype, device=held.device)
        try:
            source = source.expand_as(held)
        except RuntimeError:
            return None
        integers = _BITS[held.element_size()]
        return (held.view(integers) == source.view(integers)).sum()


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The tensor that an operation writes to, if any."""
    schema = func._schema
    if not schema.is_mutable:
        return None
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if isinstance(value, torch.Tensor):
                return value
    return None
