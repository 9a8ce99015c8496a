"""Tensors of any library as bits that the codec can work on, without a copy. torch is used only if the caller has imported it."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from .codec.base import Bits
from .dtypes import DType, dtype_named, dtype_of_numpy
from .errors import BadTensorName, ShapeMismatch, UnsupportedDtype, UnsupportedTensor
from .format.digest import PART_ALIGNMENT, TensorKey

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = NDArray[Any] | torch.Tensor
else:
    Tensor: TypeAlias = Any

State: TypeAlias = Mapping[str, Tensor]
"""Where a process holds only parts of tensors, `TensorPart`s take their place."""

_TORCH_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
}


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A run of a tensor's elements in row-major order, held without the rest of it (docs/format.md §6).

    In the state of a process that has only its own shards it stands for the tensor: `elements`, of one dimension, are those from `start` on
    of a tensor of `shape`. `start` must be a multiple of 512 bytes. States of parts are encoded, digested and changed like others.
    """

    elements: NDArray[Any]
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.elements.size

    @property
    def nbytes(self) -> int:
        return self.elements.nbytes

    def copy(self) -> TensorPart:
        return dataclasses.replace(self, elements=self.elements.copy())


@dataclass(frozen=True, slots=True)
class TensorBits:
    """A named tensor, seen as unsigned integers. `bits` shares memory with the tensor.

    Of a part, `whole` is the shape of the tensor that it is a part of, and `start` its first element there.
    """

    name: str
    dtype: DType
    bits: Bits
    whole: tuple[int, ...] | None = None
    start: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape

    @property
    def key(self) -> TensorKey:
        if self.whole is None:
            return TensorKey.of(self.name, self.dtype, self.shape)
        return TensorKey.of(self.name, self.dtype, self.whole).part(self.start * self.dtype.itemsize)

    @property
    def identity(self) -> tuple[DType, tuple[int, ...], tuple[int, ...] | None, int]:
        """What must be the same for one tensor to follow another by a delta."""
        return self.dtype, self.shape, self.whole, self.start

    def cut(self, start: int, stop: int) -> TensorBits:
        """Its elements from `start` to `stop`, in row-major order. `ShapeMismatch` if it has not got them.

        They are the same memory where the tensor is contiguous, or the part is one of whole rows; else a copy that cannot be written to.
        """
        if self.whole is not None:
            if (start, stop) != (self.start, self.start + self.bits.size):
                raise ShapeMismatch(f"of tensor {self.name!r} there are not exactly the elements from {start} to {stop}.")
            return self
        if not 0 <= start <= stop <= self.bits.size:
            raise ShapeMismatch(f"tensor {self.name!r} has no elements from {start} to {stop}.")
        return TensorBits(self.name, self.dtype, _run(self.bits, start, stop), self.shape, start)

    @property
    def memory(self) -> tuple[int, DType, tuple[int, ...], tuple[int, ...]] | None:
        """Equal for two tensors that are the same memory seen in the same way; None where there are no elements."""
        return (address(self.bits), self.dtype, self.shape, self.bits.strides) if self.bits.size else None

    @property
    def on_host(self) -> bool:
        """Whether `bits` are an array. Those of a CUDA tensor only have the attributes of one that whole states are handled with."""
        return isinstance(self.bits, np.ndarray)


def tensor_bits(name: object, tensor: object) -> TensorBits:
    """See a tensor as bits. Raises `BadTensorName`, `UnsupportedTensor` or `UnsupportedDtype`."""
    checked = check_name(name)
    if isinstance(tensor, TensorPart):
        part = tensor_bits(checked, tensor.elements)
        room = math.prod(tensor.shape)
        if part.bits.ndim != 1 or not 0 <= tensor.start <= tensor.stop <= room or tensor.start * part.dtype.itemsize % PART_ALIGNMENT:
            raise UnsupportedTensor(f"tensor {checked!r} has a part that cannot be: elements {tensor.start} to {tensor.stop} of {room}.")
        return dataclasses.replace(part, whole=tensor.shape, start=tensor.start)
    if isinstance(tensor, np.generic):
        tensor = np.asarray(tensor)
        tensor.flags.writeable = False  # a copy: writing to it would be lost
    if isinstance(tensor, np.ndarray):
        dtype = dtype_of_numpy(tensor.dtype)
        if any(stride % dtype.itemsize and size > 1 for size, stride in zip(tensor.shape, tensor.strides, strict=True)):
            raise UnsupportedTensor(f"tensor {checked!r} has strides that are no multiple of its element size.")
        return TensorBits(checked, dtype, np.asarray(tensor).view(dtype.bits))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _torch_bits(checked, tensor, torch)
    raise UnsupportedTensor(f"tensor {checked!r} is a {type(tensor).__module__}.{type(tensor).__qualname__}.")


def check_name(name: object) -> str:
    """The name, if it can stand in a safetensors file."""
    if not isinstance(name, str):
        raise BadTensorName(f"{name!r} is not a string.")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise BadTensorName(f"{name!r} is not valid Unicode.") from None
    if name in ("", "__metadata__"):
        raise BadTensorName(f"{name!r} cannot be the name of a tensor.")
    return name


def address(bits: Bits) -> int:
    """Of the first element, on whatever device."""
    return bits.ctypes.data if isinstance(bits, np.ndarray) else bits.address


def _run(bits: Any, start: int, stop: int) -> Bits:
    """Elements in row-major order: a view where they are one, else a read-only copy; on a device, which has no such thing, refused."""
    row = math.prod(bits.shape[1:])
    memory: Any = bits if isinstance(bits, np.ndarray) else bits.tensor
    if memory.flags.c_contiguous if memory is bits else memory.is_contiguous():
        run = memory.reshape(-1)[start:stop]
    elif start % row == stop % row == 0:
        run = memory[start // row : stop // row]
    elif memory is bits:
        run = memory.reshape(-1)[start:stop]
        run.flags.writeable = False
    else:
        raise UnsupportedTensor("a part of a tensor that is not contiguous can be had on the CPU only.")
    return cast("Bits", run if memory is bits else type(bits)(run))


def byte_bounds(bits: Bits) -> tuple[int, int]:
    """The first address of an array's elements, and the first after them."""
    low = high = address(bits)
    for size, stride in zip(bits.shape, bits.strides, strict=True):
        if stride < 0:
            low += (size - 1) * stride
        else:
            high += (size - 1) * stride
    return low, high + bits.itemsize


def is_torch(tensor: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def to_torch(array: NDArray[Any]) -> torch.Tensor:
    """A torch tensor of an array's memory; for states that hold torch tensors."""
    import torch

    dtype = dtype_of_numpy(array.dtype)
    name = next(torch_name for torch_name, known in _TORCH_NAMES.items() if known == dtype.name)
    return torch.from_numpy(array.view(_signed(dtype.width))).view(getattr(torch, name))


def _torch_bits(name: str, tensor: torch.Tensor, torch: Any) -> TensorBits:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer if hasattr(torch.nn, "Buffer") else torch.Tensor):
        raise UnsupportedTensor(f"tensor {name!r} is a {type(tensor).__name__}.")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnsupportedTensor(f"tensor {name!r} is not dense.")
    if tensor.device.type not in ("cpu", "cuda") or torch.version.hip:
        raise UnsupportedTensor(f"tensor {name!r} is on device {tensor.device}.")
    dtype = _torch_dtypes(torch).get(tensor.dtype)
    if dtype is None:
        raise UnsupportedDtype(str(tensor.dtype))
    if _is_on_gpu(tensor):
        return TensorBits(name, dtype, _cuda_bits(name, tensor.detach(), getattr(torch, f"int{dtype.width}")))
    try:
        signed = tensor.detach().view(getattr(torch, f"int{dtype.width}")).numpy()
    except RuntimeError:  # nested, or computed when it is read (lazily negated, all zeros): there is no memory that is these bits
        raise UnsupportedTensor(f"tensor {name!r} is not plain memory.") from None
    return TensorBits(name, dtype, signed.view(dtype.bits))


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return bool(tensor.device.type == "cuda")


def _cuda_bits(name: str, tensor: torch.Tensor, integer: torch.dtype) -> Bits:
    from .codec.gpu.device_bits import DeviceBits

    if tensor.is_neg() or tensor.is_conj():
        raise UnsupportedTensor(f"tensor {name!r} is not plain memory.")
    return cast("Bits", DeviceBits(tensor.view(integer)))


def typed(flat: Any, dtype: DType, shape: tuple[int, ...] | None = None) -> Any:
    """Elements given as integers, an array or a torch tensor, in their own type."""
    own = flat.view(dtype.numpy) if isinstance(flat, np.ndarray) else flat.view(_torch_dtype(dtype))
    return own if shape is None else own.reshape(shape)


def dtype_of(values: Any) -> DType:
    """The type of an array or of a torch tensor."""
    if isinstance(values, np.ndarray):
        return dtype_of_numpy(values.dtype)
    return _torch_dtypes(sys.modules["torch"])[values.dtype]


def _torch_dtype(dtype: DType) -> Any:
    import torch

    return next(ours for ours, known in _torch_dtypes(torch).items() if known == dtype)


@functools.lru_cache(maxsize=1)
def _torch_dtypes(torch: Any) -> dict[Any, DType]:
    return {getattr(torch, ours): dtype_named(theirs) for ours, theirs in _TORCH_NAMES.items() if hasattr(torch, ours)}


def _signed(width: int) -> np.dtype[Any]:
    return np.dtype(f"int{width}")
