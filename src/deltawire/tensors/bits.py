"""Tensors of NumPy or torch as bits that the codec can work on, without a copy."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..codec.bits import Bits, DeviceBits, HostBits, on_gpu
from ..dtypes import DType, dtype_of_numpy
from ..errors import ShapeMismatch, UnsupportedDtype, UnsupportedTensor
from ..format.digest import PART_ALIGNMENT, TensorKeys
from . import torch_types
from .names import check_name, check_names

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = NDArray[Any] | torch.Tensor
else:
    Tensor: TypeAlias = Any

State: TypeAlias = Mapping[str, Tensor]
"""Names to tensors. In a process that holds only parts of tensors, the values are `TensorPart`s."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A range of a tensor's elements in row-major order, for a process that does not hold the rest of it (docs/format.md §6).

    Such a part takes the place of its tensor in a state. States of parts are encoded, digested and changed like other states.

    Parameters
    ----------
    elements
        The elements: a NumPy array or a torch tensor of one dimension, or an `UnwrittenTensor`.
    shape
        The shape of the whole tensor.
    start
        The index of the first element in the whole tensor. It must be at a multiple of 512 bytes.
    """

    elements: Any
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        size = self.elements.size
        return self.start + int(self.elements.numel() if callable(size) else size)

    @property
    def nbytes(self) -> int:
        return int(self.elements.nbytes)

    def copy(self) -> TensorPart:
        """Return a copy on the same device."""
        elements = self.elements
        return dataclasses.replace(self, elements=elements.detach().clone() if hasattr(elements, "detach") else elements.copy())


@dataclass(frozen=True, slots=True)
class UnwrittenTensor:
    """A tensor that is in no memory: the kernels of a GPU make its elements when they read other tensors. It can only be encoded.

    Parameters
    ----------
    bits
        What the elements are made from.
    dtype
        The type of the elements.
    check
        Raises if the elements cannot be made from `bits`. It is called when they are encoded, because it waits for the GPU.
    """

    bits: DeviceBits
    dtype: DType
    check: Callable[[], None]

    @property
    def size(self) -> int:
        return self.bits.size

    @property
    def nbytes(self) -> int:
        """The bytes that the elements would have in memory."""
        return self.size * self.dtype.itemsize


@dataclass(slots=True)  # a frozen dataclass would take three times as long to make
class TensorBits:
    """A named tensor as integers of its element width, in the tensor's own memory.

    If the tensor is a part, `whole` is the shape of the tensor that it belongs to, and `start` its first element there.
    """

    name: str
    dtype: DType
    source: Bits | torch.Tensor
    """The bits; or a torch tensor in host memory, from which `bits` makes an array at each call."""
    whole: tuple[int, ...] | None = None
    start: int = 0
    unsigned: torch.dtype | None = None
    """If `source` is a torch tensor: torch's unsigned integer type of the same width."""

    @property
    def bits(self) -> Bits:
        if self.unsigned is None:
            return self.source
        tensor: torch.Tensor = self.source
        found: HostBits = (tensor.detach() if tensor.requires_grad else tensor).view(self.unsigned).numpy()
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.source.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        if self.unsigned is None:
            return int(self.source.size)
        tensor: torch.Tensor = self.source
        return int(tensor.numel())

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def can_follow(self, other: TensorBits) -> bool:
        """Tell whether a delta can lead from the other tensor to this one."""
        alike = self.dtype.code == other.dtype.code and self.source.shape == other.source.shape
        return bool(alike and self.whole == other.whole and self.start == other.start)

    def cut(self, start: int, stop: int) -> TensorBits:
        """Return the elements from `start` to `stop` in row-major order. Raise `ShapeMismatch` if the tensor does not have them.

        They are the tensor's own memory if the tensor is contiguous or the range consists of whole rows. Otherwise they are a read-only
        copy.
        """
        if self.whole is not None:
            if (start, stop) != (self.start, self.start + self.size):
                raise ShapeMismatch(
                    f"the state holds elements {self.start} to {self.start + self.size} of tensor {self.name!r}, not {start} to {stop}."
                )
            return self
        if not 0 <= start <= stop <= self.size:
            raise ShapeMismatch(f"tensor {self.name!r} has {self.size} elements; it does not have elements {start} to {stop}.")
        return TensorBits(self.name, self.dtype, _range_of(self.bits, start, stop), self.shape, start)

    @property
    def memory(self) -> tuple[int, ...] | None:
        """A key that is equal for two tensors with the same memory, type, shape and strides; None if there are no elements."""
        return (self.address, self.dtype.code, *self.shape, *self.strides) if self.size else None

    @property
    def address(self) -> int:
        """The address of the first element, in host memory or on a GPU."""
        if self.unsigned is None:
            return self.source.address if on_gpu(self.source) else int(self.source.ctypes.data)
        tensor: torch.Tensor = self.source
        return int(tensor.data_ptr())

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides in bytes."""
        if self.unsigned is None:
            return tuple(self.source.strides)
        tensor: torch.Tensor = self.source
        return tuple(stride * self.dtype.itemsize for stride in tensor.stride())

    @property
    def byte_bounds(self) -> tuple[int, int]:
        """The first address of the elements, and the first address after them. Meaningless if there are no elements."""
        low = high = self.address
        if self.is_contiguous:
            return low, low + self.nbytes
        for size, stride in zip(self.shape, self.strides, strict=True):
            if stride < 0:
                low += (size - 1) * stride
            else:
                high += (size - 1) * stride
        return low, high + self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        if self.unsigned is None:
            return self.source.is_contiguous if on_gpu(self.source) else bool(self.source.flags.c_contiguous)
        tensor: torch.Tensor = self.source
        return bool(tensor.is_contiguous())

    @property
    def is_read_only(self) -> bool:
        return self.unsigned is None and not on_gpu(self.source) and not self.source.flags.writeable


def tensor_bits(name: object, tensor: object) -> TensorBits:
    """Return a tensor as bits. Raise `BadTensorName`, `UnsupportedTensor` or `UnsupportedDtype` if the codec cannot work on it."""
    return named_bits(check_name(name), tensor)


def state_bits(state: State) -> list[TensorBits]:
    """Return all tensors of a state as bits. Raise as `tensor_bits` does."""
    check_names(state)
    return [named_bits(name, tensor) for name, tensor in state.items()]


def named_bits(checked: str, tensor: object) -> TensorBits:
    """Like `tensor_bits`, for a name that was checked already."""
    if isinstance(tensor, TensorPart):
        part = named_bits(checked, tensor.elements)
        count = math.prod(tensor.shape)
        if len(part.shape) != 1 or not 0 <= tensor.start <= tensor.stop <= count or tensor.start * part.dtype.itemsize % PART_ALIGNMENT:
            raise UnsupportedTensor(
                f"tensor {checked!r} has an invalid part: elements {tensor.start} to {tensor.stop} of {count}, "
                f"in {len(part.shape)} dimensions. A part has one dimension and starts at a multiple of {PART_ALIGNMENT} bytes."
            )
        return dataclasses.replace(part, whole=tensor.shape, start=tensor.start)
    if isinstance(tensor, np.generic):
        tensor = np.asarray(tensor)
        tensor.flags.writeable = False  # it is a copy, so that a write to it would be lost
    if isinstance(tensor, np.ndarray):
        dtype = dtype_of_numpy(tensor.dtype)
        if not tensor.flags.c_contiguous and any(
            stride % dtype.itemsize and size > 1 for size, stride in zip(tensor.shape, tensor.strides, strict=True)
        ):
            raise UnsupportedTensor(f"tensor {checked!r} has strides that are not multiples of its element size.")
        return TensorBits(checked, dtype, np.asarray(tensor).view(dtype.bits))
    if torch_types.is_torch(tensor):
        return _torch_bits(checked, tensor, torch_types.torch_types(sys.modules["torch"]))
    if isinstance(tensor, UnwrittenTensor):
        return TensorBits(checked, tensor.dtype, tensor.bits)
    raise UnsupportedTensor(f"tensor {checked!r} is a {type(tensor).__module__}.{type(tensor).__qualname__}.")


def keys_of(tensors: Sequence[TensorBits]) -> TensorKeys:
    """Return the digest keys of tensors or of parts of tensors."""
    keys = TensorKeys.of((tensor.name, tensor.dtype, tensor.shape if tensor.whole is None else tensor.whole) for tensor in tensors)
    if all(tensor.whole is None for tensor in tensors):
        return keys
    return keys.of_parts([None if tensor.whole is None else tensor.start * tensor.dtype.itemsize for tensor in tensors])


def typed(flat: Bits, dtype: DType, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return integers as elements of their own type: a NumPy array, or a torch tensor on the GPU."""
    own: Tensor = flat.tensor.view(torch_types.torch_dtype(dtype)) if on_gpu(flat) else flat.view(dtype.numpy)
    return own if shape is None else own.reshape(shape)


def _range_of(bits: Bits, start: int, stop: int) -> Bits:
    """Return a range of elements in row-major order as a view, or else as a read-only copy. Raise if a GPU would have to copy."""
    row = math.prod(bits.shape[1:])
    is_rows = row > 0 and start % row == stop % row == 0
    if on_gpu(bits):
        if bits.is_contiguous:
            return DeviceBits(bits.tensor.reshape(-1)[start:stop])
        if is_rows:
            return DeviceBits(bits.tensor[start // row : stop // row])
        raise UnsupportedTensor("a part of a tensor that is not contiguous can be read on the CPU only.")
    if is_rows and not bits.flags.c_contiguous:
        return bits[start // row : stop // row]
    elements = bits.reshape(-1)[start:stop]
    if not bits.flags.c_contiguous:
        elements.flags.writeable = False
    return elements


def _torch_bits(name: str, tensor: torch.Tensor, known: torch_types.TorchTypes) -> TensorBits:
    if type(tensor) not in known.tensors:
        more = " deltawire.trainers.FSDPPublisher publishes DTensors." if type(tensor).__name__ == "DTensor" else ""
        raise UnsupportedTensor(f"tensor {name!r} is a {type(tensor).__name__}.{more}")
    if tensor.layout != known.dense or tensor.is_quantized:
        raise UnsupportedTensor(f"tensor {name!r} is not dense.")
    gpu = torch_types.gpu_of(tensor)
    if not (tensor.is_cpu or gpu) or known.is_hip:
        raise UnsupportedTensor(f"tensor {name!r} is on device {tensor.device}.")
    if tensor.dtype not in known.elements:
        raise UnsupportedDtype(str(tensor.dtype))
    dtype, signed, unsigned = known.elements[tensor.dtype]
    if gpu is not None:
        return TensorBits(name, dtype, _device_bits(name, tensor.detach() if tensor.requires_grad else tensor, signed))
    try:
        found = TensorBits(name, dtype, tensor, None, 0, unsigned)
        if tensor.is_contiguous() and tensor.data_ptr() and not (tensor.is_neg() or tensor.is_nested):
            return found
        if not _is_freed(tensor):
            return TensorBits(name, dtype, found.bits)
    except RuntimeError:  # the tensor is nested, or lazily negated: no memory holds these bits
        pass
    raise UnsupportedTensor(f"tensor {name!r} is not plain memory.")


def _is_freed(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has elements but no memory.

    Some trainers free the memory of weights that they do not need. Torch's internal zero tensors never have memory.
    """
    return not tensor.data_ptr() and tensor.numel() > 0


def _device_bits(name: str, tensor: torch.Tensor, integer: torch.dtype) -> DeviceBits:
    if tensor.is_neg() or tensor.is_conj() or _is_freed(tensor):
        raise UnsupportedTensor(f"tensor {name!r} is not plain memory.")
    return DeviceBits(tensor.view(integer))
