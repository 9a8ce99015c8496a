"""The questions of deltawire to torch about a tensor. torch is used only if the caller has imported it."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..dtypes import DType, dtype_named, dtype_of_numpy

if TYPE_CHECKING:
    import torch

TORCH_NAMES = {
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
"""The names of element types in torch, and in safetensors."""


def torch_tensor() -> type | None:
    """Return the class `torch.Tensor`; None if torch is not fully imported, so that no tensor can exist."""
    return getattr(sys.modules.get("torch"), "Tensor", None)


def is_torch(tensor: object) -> bool:
    """Tell whether this is a torch tensor, of any class."""
    known = torch_tensor()
    return known is not None and isinstance(tensor, known)


def is_module(model: object) -> bool:
    """Tell whether this is a `torch.nn.Module`."""
    known = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None)
    return known is not None and isinstance(model, known)


def gpu_of(tensor: torch.Tensor) -> torch.device | None:
    """Return the GPU that holds a torch tensor; None if the tensor is in host memory. Its bits are `DeviceBits` if there is a GPU."""
    return tensor.device if tensor.is_cuda else None


def gpu_holding(value: object) -> torch.device | None:
    """Return the GPU that holds a tensor; None if it is in host memory, or is not a torch tensor."""
    return gpu_of(value) if is_torch(value) else None


def to_torch(array: NDArray[Any]) -> torch.Tensor:
    """Return a torch tensor that shares an array's memory."""
    import torch

    dtype = dtype_of_numpy(array.dtype)
    return torch.from_numpy(array.view(f"int{dtype.width}")).view(torch_types(torch).dtypes[dtype.name])


def dtype_of(values: NDArray[Any] | torch.Tensor) -> DType:
    """Return the element type of an array or of a torch tensor."""
    if isinstance(values, np.ndarray):
        return dtype_of_numpy(values.dtype)
    return torch_types(sys.modules["torch"]).elements[values.dtype][0]


def torch_dtype(dtype: DType, *, bits: bool = False) -> torch.dtype:
    """Return torch's element type; with `bits`, its signed integer type of the same width."""
    import torch

    return getattr(torch, f"int{dtype.width}") if bits else torch_types(torch).dtypes[dtype.name]


def torch_name(dtype: DType) -> str:
    """Return torch's name of an element type, such as "bfloat16"."""
    return next(torch_name for torch_name, name in TORCH_NAMES.items() if name == dtype.name)


def named_dtype(name: str) -> DType | None:
    """Return the element type that has this name in torch, such as "bfloat16"; None if the format does not have it."""
    return dtype_named(TORCH_NAMES[name]) if name in TORCH_NAMES else None


class TorchTypes(NamedTuple):
    """The objects of torch that are needed for every tensor, looked up once."""

    tensor: type[torch.Tensor]
    tensors: frozenset[type]
    """Classes of tensors whose elements are plain memory."""
    dense: torch.layout
    is_hip: bool
    """Whether this is torch for AMD GPUs, which torch calls "cuda" too."""
    elements: dict[torch.dtype, tuple[DType, torch.dtype, torch.dtype]]
    """For each element type of torch: ours, and torch's signed and unsigned integers of the same width."""
    dtypes: dict[str, torch.dtype]
    """Element types of torch by our names."""


@functools.lru_cache(maxsize=1)
def torch_types(torch: Any) -> TorchTypes:
    """Look up the types of torch, which is given as a module."""
    dtypes = {name: getattr(torch, torch_name) for torch_name, name in TORCH_NAMES.items() if hasattr(torch, torch_name)}
    elements = {}
    for name, dtype in dtypes.items():
        width = dtype_named(name).width
        elements[dtype] = dtype_named(name), getattr(torch, f"int{width}"), getattr(torch, f"uint{width}")
    classes = [torch.Tensor, torch.nn.Parameter, *([torch.nn.Buffer] if hasattr(torch.nn, "Buffer") else [])]
    return TorchTypes(torch.Tensor, frozenset(classes), torch.strided, bool(torch.version.hip), elements, dtypes)
