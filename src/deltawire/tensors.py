"""Tensors of any library as bits that the codec can work on, without a copy. torch is used only if the caller has imported it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .codec.base import Bits
from .dtypes import DType, dtype_named, dtype_of_numpy
from .errors import BadTensorName, UnsupportedDtype, UnsupportedTensor
from .format.digest import TensorKey

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = NDArray[Any] | torch.Tensor
else:
    Tensor: TypeAlias = Any

State: TypeAlias = Mapping[str, Tensor]

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
class TensorBits:
    """A named tensor, seen as unsigned integers. `bits` shares memory with the tensor."""

    name: str
    dtype: DType
    bits: Bits

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape

    @property
    def key(self) -> TensorKey:
        return TensorKey.of(self.name, self.dtype, self.shape)

    @property
    def memory(self) -> tuple[int, DType, tuple[int, ...], tuple[int, ...]] | None:
        """Equal for two tensors that are the same memory seen in the same way; None where there are no elements."""
        return (self.bits.ctypes.data, self.dtype, self.shape, self.bits.strides) if self.bits.size else None


def tensor_bits(name: object, tensor: object) -> TensorBits:
    """See a tensor as bits. Raises `BadTensorName`, `UnsupportedTensor` or `UnsupportedDtype`."""
    checked = check_name(name)
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


def byte_bounds(bits: Bits) -> tuple[int, int]:
    """The first address of an array's elements, and the first after them."""
    low = high = bits.ctypes.data
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
    if tensor.device.type != "cpu":
        raise UnsupportedTensor(f"tensor {name!r} is on device {tensor.device}.")
    dtype = _torch_dtypes(torch).get(tensor.dtype)
    if dtype is None:
        raise UnsupportedDtype(str(tensor.dtype))
    try:
        signed = tensor.detach().view(getattr(torch, f"int{dtype.width}")).numpy()
    except RuntimeError:  # nested, or computed when it is read (lazily negated, all zeros): there is no memory that is these bits
        raise UnsupportedTensor(f"tensor {name!r} is not plain memory.") from None
    return TensorBits(name, dtype, signed.view(dtype.bits))


@functools.lru_cache(maxsize=1)
def _torch_dtypes(torch: Any) -> dict[Any, DType]:
    return {getattr(torch, ours): dtype_named(theirs) for ours, theirs in _TORCH_NAMES.items() if hasattr(torch, ours)}


def _signed(width: int) -> np.dtype[Any]:
    return np.dtype(f"int{width}")
