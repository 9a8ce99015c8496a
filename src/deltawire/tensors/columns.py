"""States of many tensors in columns, so that Python does little for each tensor.

Models have up to 100,000 tensors. Facts that follow from names, types and shapes are worked out once and kept (`Layout`). A state of plain
arrays, or of plain torch tensors on one device, is then read in a few passes over all of them (`Columns`). `ColumnState` is a state whose
columns are known, so that a series of calls reads it only once.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from ..codec import memory_of
from ..codec.bits import Bits, BitsColumn, DeviceBits
from ..dtypes import PAYLOAD_TYPES, DType, PayloadType, dtype_of_numpy, first_nonfinite, payload_type
from ..format.digest import Digest, TensorKeys
from . import torch_types
from .bits import State, Tensor, TensorBits, named_bits
from .names import check_names

if TYPE_CHECKING:
    import torch

_MOST_KEPT = 1 << 19
"""Layouts are kept for this many tensors in total."""

_MOST_STATES = 512
"""Layouts are kept for states of this many different names or types. Each new one is compared with all that are kept."""

_MOST_SHAPES = 4
"""The most layouts that are kept of states with the same names and types, but other shapes."""

_shape = operator.attrgetter("shape")


@dataclass(frozen=True, eq=False)
class Layout:
    """Facts about the names, types and shapes of tensors, in the order of names. Equal layouts are the same object while kept."""

    names: list[str]
    dtypes: list[DType]
    shapes: list[tuple[int, ...]]
    _whole: tuple[Layout, slice] | None = None
    """The layout that this is a part of, and which part."""
    _parts: dict[tuple[int, int], Layout] = field(default_factory=dict)

    @cached_property
    def keys(self) -> TensorKeys:
        """The contribution of names, types and shapes to digests."""
        if self._whole is None:
            return TensorKeys.of(zip(self.names, self.dtypes, self.shapes, strict=True))
        whole, some = self._whole
        return TensorKeys(whole.keys.tags[some], whole.keys.seeds[some])

    @cached_property
    def tag(self) -> Digest:
        """The contribution of the tensors to digests that does not depend on their elements."""
        return self.keys.tag()

    def part(self, first: int, count: int) -> Layout:
        """Return the layout of `count` tensors from number `first` on."""
        if (first, count) == (0, len(self.names)):
            return self
        found = self._parts.get((first, count))
        if found is None:
            some = slice(first, first + count)
            part = Layout(self.names[some], self.dtypes[some], self.shapes[some], (self, some))
            found = self._parts.setdefault((first, count), part)
        return found

    def is_like(self, other: Layout) -> bool:
        """Tell whether both have the same names, types and shapes."""
        return self is other or (self.names == other.names and self.dtypes == other.dtypes and self.shapes == other.shapes)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """The number of elements of each tensor."""
        return np.array([_size(shape) for shape in self.shapes], np.int64)

    @cached_property
    def itemsizes(self) -> NDArray[np.int64]:
        return np.array([dtype.itemsize for dtype in self.dtypes], np.int64)

    @cached_property
    def nbytes(self) -> NDArray[np.int64]:
        """The bytes of each tensor."""
        return self.sizes * self.itemsizes

    @cached_property
    def weight_bytes(self) -> int:
        """The bytes of all tensors."""
        return int(self.nbytes.sum())

    @cached_property
    def elements(self) -> int:
        """The elements of all tensors, as their payload types count them."""
        return sum(kind.per_element * int(self.sizes[numbers].sum()) for kind, numbers in self.groups)

    @cached_property
    def seeds(self) -> list[NDArray[np.uint64]]:
        """The seeds of the tensors in each of `groups`."""
        return [self.keys.seeds[numbers] for _, numbers in self.groups]

    @cached_property
    def magnitudes(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """For each tensor: the mask that leaves out the sign, and the first magnitude that is not finite; 0 for integers."""
        each = {dtype: magnitude_limit(dtype) for dtype in set(self.dtypes)}
        masks, limits = np.array([each[dtype] for dtype in self.dtypes], np.uint64).reshape(-1, 2).T
        return np.ascontiguousarray(masks), np.ascontiguousarray(limits)

    @cached_property
    def groups(self) -> list[tuple[PayloadType, NDArray[np.int64]]]:
        """The tensors of each payload type, by their numbers."""
        codes = np.array([payload_type(name, dtype).code for name, dtype in zip(self.names, self.dtypes, strict=True)], np.int64)
        return [(PAYLOAD_TYPES[code], np.flatnonzero(codes == code)) for code in np.unique(codes).tolist()]


class Columns(Sequence[TensorBits]):
    """The tensors of a state in the order of names.

    Parameters
    ----------
    layout
        Names, types and shapes.
    tensors
        The tensors: arrays, or torch tensors.
    bits
        Their bits.
    are_writable
        Whether each tensor is not read-only. One that is not contiguous may still share memory between its elements.
    """

    def __init__(self, layout: Layout, tensors: Sequence[Tensor], bits: BitsColumn, are_writable: NDArray[np.bool_]) -> None:
        self.layout = layout
        self.tensors = tensors
        self.bits = bits
        self.are_writable = are_writable
        self._groups: dict[int, tuple[NDArray[np.int64], tuple[BitsColumn, NDArray[np.int64], NDArray[np.uint64]]]] = {}
        """By the code of a payload type: its tensors, and what `group` returns for them."""

    @classmethod
    def of(cls, state: State) -> Columns | None:
        """Return a state in columns; None if it is not all plain arrays, or all plain torch tensors on one device.

        Raises `BadTensorName`, `UnsupportedTensor` or `UnsupportedDtype`, as `named_bits` does.
        """
        if isinstance(state, ColumnState):
            return state.columns
        values = list(state.values())
        classes = set(map(type, values))
        if classes <= {np.ndarray}:
            return _columns_of_arrays(state, values)
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "Tensor"):
            return None
        known = torch_types.torch_types(torch)
        return _columns_of_torch(state, values, known) if classes <= known.tensors and not known.is_hip else None

    def __len__(self) -> int:
        return len(self.tensors)

    @overload
    def __getitem__(self, number: int) -> TensorBits: ...
    @overload
    def __getitem__(self, number: slice) -> list[TensorBits]: ...
    def __getitem__(self, number: int | slice) -> TensorBits | list[TensorBits]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        return named_bits(self.layout.names[number], self.tensors[number])

    def part(self, first: int, count: int) -> Columns:
        """Return the columns of `count` tensors from number `first` on."""
        some = slice(first, first + count)
        tensors = self.tensors[some]
        return Columns(self.layout.part(first, count), tensors, self.bits.part(some), self.are_writable[some])

    @property
    def is_on_gpu(self) -> bool:
        return self.bits.device is not None

    @property
    def addresses(self) -> NDArray[np.uint64]:
        return self.bits.addresses

    @property
    def are_contiguous(self) -> NDArray[np.bool_]:
        return self.bits.are_contiguous

    @cached_property
    def sharing_addresses(self) -> NDArray[np.int64]:
        """The numbers of tensors that begin at the same address as another one.

        Tensors without elements do not count, nor do those whose elements are made of weights.
        """
        quantised = self.bits.quantised
        filled = np.flatnonzero((self.layout.sizes > 0) & (True if quantised is None else quantised["columns"] == 0))
        ordered = np.sort(self.addresses[filled])
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        return filled[np.isin(self.addresses[filled], twice)] if twice.size else filled[:0]

    @cached_property
    def are_separate(self) -> bool:
        """Whether no two tensors overlap in memory. False if that would take a closer look."""
        filled = self.layout.sizes > 0
        if not self.are_contiguous[filled].all():
            return False
        starts = self.addresses[filled]
        order = np.argsort(starts)
        ends = starts[order] + self.layout.nbytes[filled][order].astype(np.uint64)
        return bool((starts[order][1:] >= ends[:-1]).all())

    def group(self, code: int, numbers: NDArray[np.int64]) -> tuple[BitsColumn, NDArray[np.int64], NDArray[np.uint64]]:
        """Return the bits, sizes and seeds of some tensors. If they are those of a payload type in `layout.groups`, they are kept.

        Parameters
        ----------
        code
            The code of their payload type.
        numbers
            Their numbers.
        """
        kept = self._groups.get(code)
        if kept is not None and kept[0] is numbers:
            return kept[1]
        found = self.take(numbers), self.layout.sizes[numbers], self.layout.keys.seeds[numbers]
        if any(numbers is members for _, members in self.layout.groups):
            self._groups[code] = numbers, found
        return found

    def take(self, numbers: NDArray[np.int64]) -> BitsColumn:
        """Return the bits of some tensors."""
        return self.bits.take(numbers)


class ColumnState(Mapping[str, Tensor]):
    """A state whose columns are known. The tensors of the state must neither move nor be replaced while this is in use.

    Parameters
    ----------
    columns
        The columns.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    @property
    def columns(self) -> Columns:
        return self._columns

    @cached_property
    def _by_name(self) -> dict[str, Tensor]:
        return dict(zip(self._columns.layout.names, self._columns.tensors, strict=True))

    def __getitem__(self, name: str) -> Tensor:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns.layout.names)

    def __len__(self) -> int:
        return len(self._columns)

    def part(self, first: int, count: int) -> ColumnState:
        """Return the state of `count` tensors from number `first` on, in the order of names."""
        return ColumnState(self.columns.part(first, count))


def in_columns(state: State) -> State:
    """Return the state as a `ColumnState` if it is a dict that has columns, or else as it is. Raise as `Columns.of` does.

    Other mappings may make their tensors anew at each access, and all of them together may not fit into memory.
    """
    columns = Columns.of(state) if isinstance(state, dict) else None
    return state if columns is None else ColumnState(columns)


class _Key:
    """Names and types of a state. The hash is computed only once."""

    __slots__ = ("_hash", "parts")

    def __init__(self, *parts: tuple[object, ...]) -> None:
        self.parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.parts == other.parts


class _Kept(NamedTuple):
    """A layout that is kept, and the shapes of a state that has it, in the order of the state."""

    shapes: list[tuple[int, ...]]
    layout: Layout
    order: list[int] | None
    """The index of each tensor in the state; None if the names of the state are in order."""


_kept: OrderedDict[_Key, list[_Kept]] = OrderedDict()
_lock = threading.Lock()


def _layout_of(
    names: tuple[str, ...], types: tuple[Any, ...], read_shapes: Callable[[], Iterable[tuple[int, ...]]], elements: Any
) -> tuple[Layout, list[int] | None]:
    """Return the layout of a state, and the indices of its tensors. `elements` returns our element type for one of `types`.

    Shapes are compared while they are read. A list of them would be 100,000 objects for Python's garbage collector.
    """
    key = _Key(names, types)
    with _lock:
        candidates = list(_kept.get(key, ()))
        if candidates:
            _kept.move_to_end(key)
    for kept in candidates:
        if all(map(operator.eq, read_shapes(), kept.shapes)):
            return kept.layout, kept.order
    check_names(names)
    shapes = list(map(tuple, read_shapes()))
    order = sorted(range(len(names)), key=names.__getitem__)
    ordered = [names[number] for number in order]
    dtypes = [elements(types[number]) for number in order]
    in_order = [shapes[number] for number in order]
    layout = Layout(ordered, dtypes, in_order)
    indices = None if order == list(range(len(order))) else order
    with _lock:
        alike = (each.layout for entries in _kept.values() for each in entries if len(each.shapes) == len(shapes))
        layout = next((known for known in alike if known.is_like(layout)), layout)
        _kept.setdefault(key, []).append(_Kept(shapes, layout, indices))
        _kept.move_to_end(key)
        while len(_kept) > _MOST_STATES or (_kept_tensors() > _MOST_KEPT and len(_kept) > 1):
            _kept.popitem(last=False)
        while len(_kept[key]) > _MOST_SHAPES:
            _kept[key].pop(0)
    return layout, indices


def _kept_tensors() -> int:
    return sum(len(each.shapes) for entries in _kept.values() for each in entries)


def _columns_of_arrays(state: State, values: list[NDArray[Any]]) -> Columns:
    types, given = tuple([value.dtype for value in values]), values
    layout, order = _layout_of(tuple(state), types, lambda: map(_shape, given), dtype_of_numpy)
    if order is not None:
        values = [values[number] for number in order]
    addresses, flags = memory_of(values)
    contiguous = (flags & 1).astype(np.bool_)
    for number in np.flatnonzero(~contiguous).tolist():
        named_bits(layout.names[number], values[number])  # raises if the strides cannot be used
    bits = BitsColumn(values, _bits_of_array, addresses, layout.sizes, layout.itemsizes.astype(np.uint8), contiguous)
    return Columns(layout, values, bits, (flags & 2).astype(np.bool_))


def _columns_of_torch(state: State, values: list[torch.Tensor], known: torch_types.TorchTypes) -> Columns | None:
    """Return the columns of torch tensors; None if one of them is not plain memory, or they are on several devices."""
    types = tuple([value.dtype for value in values])
    if {value.device for value in values} != {values[0].device} or not known.elements.keys() >= set(types):
        return None
    gpu = torch_types.gpu_of(values[0])
    if gpu is None and not values[0].is_cpu:
        return None
    try:
        if {value.layout for value in values} != {known.dense} or True in map(known.tensor.is_neg, values):
            return None
        given = values
        layout, order = _layout_of(tuple(state), types, lambda: map(known.tensor.size, given), lambda dtype: known.elements[dtype][0])
        if order is not None:
            values = [values[number] for number in order]
        addresses = np.fromiter(map(known.tensor.data_ptr, values), np.uint64, len(values))
        contiguous = np.fromiter(map(known.tensor.is_contiguous, values), np.bool_, len(values))
    except RuntimeError:  # one of them is a nested tensor
        return None
    if ((addresses == 0) & (layout.sizes > 0)).any():
        return None  # the memory of a tensor was freed
    make = _bits_of_torch if gpu is None else _bits_on_gpu
    bits = BitsColumn(values, make, addresses, layout.sizes, layout.itemsizes.astype(np.uint8), contiguous, gpu)
    return Columns(layout, values, bits, np.ones(len(values), np.bool_))


def _bits_of_array(array: NDArray[Any]) -> Bits:
    return array.view(f"u{array.itemsize}")


def _bits_of_torch(tensor: torch.Tensor) -> Bits:
    return named_bits("", tensor).bits


def _bits_on_gpu(tensor: torch.Tensor) -> Bits:
    return DeviceBits((tensor.detach() if tensor.requires_grad else tensor).view(_integers(tensor.element_size())))


@functools.cache
def _integers(itemsize: int) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, f"int{8 * itemsize}")
    return found


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def magnitude_limit(dtype: DType) -> tuple[int, int]:
    """Return the mask that leaves out the sign of an element, and the first magnitude that is not finite; 0 for integers."""
    limits = first_nonfinite(dtype)
    if limits is None:
        return 0, 0
    mask = (1 << (dtype.width - 1)) - 1
    return (mask, limits[0]) if limits[0] <= mask else (2 * mask + 1, limits[1])  # e8m0 has no sign
