"""Reads weights back from a model through its own loaders.

A model's `load_weights` knows where each element of a checkpoint belongs: in which rows of a fused QKV, in which shard, in which expert.
`read_back` runs it with every write turned into a comparison. This shows whether the model holds the weights of a checkpoint, and changes
nothing. A tensor that reads back equal right after the server has loaded it is *in place*: the kernels read it where a loader writes it.
Other tensors were transformed after loading (packed, transposed, quantised). They can only be loaded anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .element_map import MappedBlock

_PIECE = 4 << 20
"""Elements that are compared at a time."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Readings:
    """The results of reading tensors back, by their names in the checkpoint."""

    equal: set[str] = field(default_factory=set)
    """Tensors that this worker holds and that are equal, bit for bit."""
    different: set[str] = field(default_factory=set)
    """Tensors that are not equal, or cannot be compared."""
    mostly_different: set[str] = field(default_factory=set)
    """Different tensors with less than half of their elements equal. This is not another version, but another layout."""
    absent: set[str] = field(default_factory=set)
    """Tensors that this worker does not hold: they belong to another shard, or the model does not load them."""
    untouched: set[str] = field(default_factory=set)
    """Parameters of the model, by its own names, into which no tensor was loaded."""
    blocks: dict[str, list[MappedBlock]] = field(default_factory=dict)
    """The positions of equal tensors in the model, if strides can describe them."""


def read_back(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Readings:
    """Compare a model with tensors of a checkpoint. Changes nothing."""
    comparison = _Comparison(model)
    remaining = iter(weights)
    while True:
        try:
            with comparison:
                model.load_weights(comparison.watch(remaining))
        except Exception:  # the loader cannot handle this layout: the tensor is not in place, but others may be
            if comparison.current is None:
                raise
            comparison.refused.add(comparison.current)
            comparison.current = None
            continue
        return comparison.readings()


@dataclass(frozen=True, slots=True)
class _Source:
    """Memory that holds a tensor of the checkpoint, or values that a loader computed from such tensors."""

    storage: weakref.ref[torch.UntypedStorage]
    names: frozenset[str]
    tensor: weakref.ref[torch.Tensor] | None
    """None if it was computed."""


class _Comparison(TorchDispatchMode):  # type: ignore[misc]
    """While this mode is active, writes to the model's tensors are compared with their contents instead."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        tensors = [*model.parameters(), *model.buffers()]
        self._owned = {_memory(tensor) for tensor in tensors} - {0}
        self._parameters = {name: _memory(tensor) for name, tensor in model.named_parameters() if tensor.numel()}
        self._touched: set[int] = set()
        self._sources: dict[int, _Source] = {}
        self._verdicts: dict[str, list[tuple[torch.Tensor, int]]] = {}
        """By name: the number of equal elements, and of all elements."""
        self._seen: list[str] = []
        self._blocks: dict[str, list[MappedBlock]] = {}
        self._unmapped: set[str] = set()
        """Tensors of which a loader did more than copy elements."""
        self.refused: set[str] = set()
        self.current: str | None = None

    def watch(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, and record which one is being loaded."""
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
        refused = self.refused | self._unmapped - self._verdicts.keys()  # a tensor that was used, but not compared, is not absent
        for name in self._seen:
            if name in refused or (name in equal and equal[name] < totals[name]):
                readings.different.add(name)
                if name in refused or 2 * equal[name] < totals[name]:
                    readings.mostly_different.add(name)
            elif name in equal:
                readings.equal.add(name)
                if name not in self._unmapped and name in self._blocks:
                    readings.blocks[name] = self._blocks[name]
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
        if len(names) > 1:  # none of them can be loaded alone
            self.refused |= names
            return written
        for name in names:
            equal: torch.Tensor | None = None
            if func is torch.ops.aten.copy_.default:
                equal = self._compare(written, args[1])
                self._record_block(name, args[1], written)
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
        """Return the tensors whose elements are written. A loader may read several tensors before it writes the first."""
        names = self._origins(values)
        last = self.current or (self._seen[-1] if self._seen else None)
        return names or frozenset(() if last is None else (last,))

    def _origins(self, values: Any) -> frozenset[str]:
        sources = [self._source(tensor) for tensor in _tensors(values)]
        return frozenset().union(*(source.names for source in sources if source is not None))

    def _follow(self, inputs: Any, outputs: Any, *, is_view: bool) -> None:
        """Record which tensors a result was computed from. A view of a tensor counts as that tensor."""
        names = self._origins(inputs)
        if not names:
            return
        viewed = {_memory(tensor) for tensor in _tensors(inputs)} if is_view else set()
        results = _tensors(outputs)
        computed = [tensor for tensor in results if _memory(tensor) not in viewed]
        for tensor in computed:
            self._sources[_memory(tensor)] = _Source(weakref.ref(tensor.untyped_storage()), names, None)
        if computed or not results:
            self._unmapped |= names

    def _record_block(self, name: str, source: torch.Tensor, target: torch.Tensor) -> None:
        found = self._source(source)
        tensor = None if found is None or found.tensor is None else found.tensor()
        block = None if tensor is None else MappedBlock.of(tensor, source, target)
        if block is None:
            self._unmapped.add(name)
        else:
            self._blocks.setdefault(name, []).append(block)

    def _compare(self, held: torch.Tensor, source: torch.Tensor) -> torch.Tensor | None:
        """Return the number of elements with the same bits, or None if the shapes do not fit.

        The number is a tensor, so that the caller need not wait for the device yet.
        """
        try:
            source = source.expand_as(held)
        except RuntimeError:
            return None
        return _count_equal(held, source)


def _count_equal(held: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return the number of elements with the same bits in two tensors of one shape.

    Large tensors are compared in pieces: on a GPU each element takes a copy, a byte, and eight bytes for counting.
    """
    if held.numel() > _PIECE:
        longest = max(range(held.dim()), key=lambda dimension: held.shape[dimension])
        half = held.shape[longest] // 2
        parts = [half, held.shape[longest] - half]
        return sum(map(_count_equal, held.split(parts, longest), source.split(parts, longest)), torch.zeros((), device=held.device).long())
    integers = _BITS[held.element_size()]
    copy = source.to(dtype=held.dtype, device=held.device)
    return (held.view(integers) == copy.view(integers)).sum()


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Return the tensor that an operation writes to. None if it writes to none."""
    schema = func._schema
    if not schema.is_mutable:
        return None
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if isinstance(value, torch.Tensor):
                return value
    return None
