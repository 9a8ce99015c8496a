"""States of many tensors in columns, so that Python does little for each tensor.

Models have up to 100,000 tensors. Facts that follow from names, types and shapes are worked out once and kept (`Layout`). A state of plain
arrays, or of plain torch tensors on a GPU, is then read in a few passes over all of them (`Columns`).
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from ..codec import memory_of
from ..codec.bits import Bits, DeviceBits, on_gpu
from ..dtypes import PAYLOAD_TYPES, DType, PayloadType, dtype_of_numpy, first_nonfinite, payload_type
from ..format.digest import TensorKeys
from . import torch_types
from .bits import State, TensorBits, named_bits
from .names import check_names

if TYPE_CHECKING:
    import torch

_MOST_KEPT = 1 << 19
"""Layouts are kept for this many tensors in total."""


@dataclass(frozen=True)
class Layout:
    """Facts about the names, types and shapes of tensors, in the order of names. Equal layouts are the same object while kept."""

    names: list[str]
    dtypes: list[DType]
    shapes: list[tuple[int, ...]]
    keys: TensorKeys
    order: list[int] | None
    """The place of each tensor in the state that the layout was made from; None if its names are in order."""

    def is_like(self, other: Layout) -> bool:
        """Tell whether both have the same names, types and shapes."""
        return self is other or (self.names == other.names and self.dtypes == other.dtypes and self.shapes == other.shapes)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """The number of elements of each tensor."""
        return np.array([_size(shape) for shape in self.shapes], np.int64)

    @cached_property
    def integers(self) -> list[np.dtype[Any]]:
        """NumPy's type of each tensor's bits."""
        return [dtype.bits for dtype in self.dtypes]

    @cached_property
    def itemsizes(self) -> NDArray[np.int64]:
        return np.array([dtype.itemsize for dtype in self.dtypes], np.int64)

    @cached_property
    def nbytes(self) -> NDArray[np.int64]:
        """The bytes of each tensor."""
        return self.sizes * self.itemsizes

    @cached_property
    def magnitudes(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """For each tensor: the mask that leaves out the sign, and the first magnitude that is not finite; 0 for integers."""
        each = {dtype: _magnitude(dtype) for dtype in set(self.dtypes)}
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
    bits
        The bits of the tensors.
    """

    def __init__(self, layout: Layout, bits: list[Bits]) -> None:
        self.layout = layout
        self.bits = bits

    @classmethod
    def of(cls, state: State) -> Columns | None:
        """Return a state in columns; None if it is not all plain arrays, or all plain torch tensors on GPUs.

        Raises `BadTensorName`, `UnsupportedTensor` or `UnsupportedDtype`, as `named_bits` does.
        """
        values = list(state.values())
        classes = set(map(type, values))
        if classes <= {np.ndarray}:
            return _columns_of_arrays(state, values)
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "Tensor"):
            return None
        known = torch_types.torch_types(torch)
        return _columns_of_gpu_tensors(state, values, known) if classes <= known.tensors and not known.is_hip else None

    def __len__(self) -> int:
        return len(self.bits)

    @overload
    def __getitem__(self, number: int) -> TensorBits: ...
    @overload
    def __getitem__(self, number: slice) -> list[TensorBits]: ...
    def __getitem__(self, number: int | slice) -> TensorBits | list[TensorBits]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        return TensorBits(self.layout.names[number], self.layout.dtypes[number], self.bits[number])

    @cached_property
    def _memory(self) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        """The address of each tensor, and flags: 1 if it is contiguous, 2 if it is writable."""
        if self.is_on_gpu:
            tensors: list[Any] = [bits.tensor for bits in self.bits]  # type: ignore[union-attr]
            flags = [3 if tensor.is_contiguous() else 2 for tensor in tensors]
            return np.array([tensor.data_ptr() for tensor in tensors], np.uint64), np.array(flags, np.uint8)
        return memory_of(self.bits)

    @property
    def is_on_gpu(self) -> bool:
        return bool(self.bits) and on_gpu(self.bits[0])

    @property
    def addresses(self) -> NDArray[np.uint64]:
        return self._memory[0]

    @property
    def are_contiguous(self) -> NDArray[np.bool_]:
        return (self._memory[1] & 1).astype(np.bool_)

    @property
    def are_writable(self) -> NDArray[np.bool_]:
        """Whether each tensor is not read-only. One that is not contiguous may still share memory between its elements."""
        return (self._memory[1] & 2).astype(np.bool_)

    @property
    def have_addresses_of_their_own(self) -> bool:
        """Whether no two tensors begin at the same address. Tensors without elements do not count."""
        filled = self.addresses[self.layout.sizes > 0]
        return bool(np.unique(filled).size == filled.size)

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

    def take(self, numbers: NDArray[np.int64]) -> list[Bits]:
        """Return the bits of some tensors."""
        return self.bits if len(numbers) == len(self.bits) else [self.bits[number] for number in numbers.tolist()]


_kept: OrderedDict[object, Layout] = OrderedDict()
_lock = threading.Lock()


def _layout_of(names: tuple[str, ...], types: tuple[Any, ...], shapes: tuple[tuple[int, ...], ...], elements: Any) -> Layout:
    """Return the layout of a state; `elements` returns our element type for one of `types`."""
    key = (names, types, shapes)
    with _lock:
        found = _kept.get(key)
        if found is not None:
            _kept.move_to_end(key)
            return found
    check_names(names)
    order = sorted(range(len(names)), key=names.__getitem__)
    ordered = [names[number] for number in order]
    dtypes = [elements(types[number]) for number in order]
    in_order = [tuple(shapes[number]) for number in order]
    is_sorted = order == list(range(len(order)))
    keys = TensorKeys.of(zip(ordered, dtypes, in_order, strict=True))
    layout = Layout(ordered, dtypes, in_order, keys, None if is_sorted else order)
    with _lock:
        _kept[key] = layout
        while sum(len(each.names) for each in _kept.values()) > _MOST_KEPT and len(_kept) > 1:
            _kept.popitem(last=False)
    return layout


def _columns_of_arrays(state: State, values: list[NDArray[Any]]) -> Columns | None:
    types, shapes = tuple([value.dtype for value in values]), tuple([value.shape for value in values])
    layout = _layout_of(tuple(state), types, shapes, dtype_of_numpy)
    if layout.order is not None:
        values = [values[number] for number in layout.order]
    bits: list[Bits] = [value.view(integers) for value, integers in zip(values, layout.integers, strict=True)]
    found = Columns(layout, bits)
    for number in np.flatnonzero(~found.are_contiguous).tolist():
        named_bits(layout.names[number], values[number])  # raises if the strides cannot be used
    return found


def _columns_of_gpu_tensors(state: State, values: list[torch.Tensor], known: torch_types.TorchTypes) -> Columns | None:
    if not all(torch_types.gpu_of(value) for value in values):
        return None
    types, shapes = tuple([value.dtype for value in values]), tuple([value.shape for value in values])
    names = tuple(state)
    layout = _layout_of(names, types, shapes, lambda dtype: known.elements[dtype][0]) if known.elements.keys() >= set(types) else None
    if layout is None:
        return None
    if layout.order is not None:
        values = [values[number] for number in layout.order]
    for number, value in enumerate(values):
        if value.layout is not known.dense or value.is_quantized or value.is_neg() or value.is_conj() or not value.data_ptr():
            named_bits(layout.names[number], value)  # raises unless there are no elements
    signed = {dtype: integer for dtype, integer, _ in known.elements.values()}
    bits: list[Bits] = [
        DeviceBits((value.detach() if value.requires_grad else value).view(signed[dtype]))
        for value, dtype in zip(values, layout.dtypes, strict=True)
    ]
    return Columns(layout, bits)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def _magnitude(dtype: DType) -> tuple[int, int]:
    limits = first_nonfinite(dtype)
    if limits is None:
        return 0, 0
    mask = (1 << (dtype.width - 1)) - 1
    return (mask, limits[0]) if limits[0] <= mask else (2 * mask + 1, limits[1])  # e8m0 has no sign
