"""Tensors of any library as bits that the codec can work on, without a copy. torch is used only if the caller has imported it."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from ..codec.base import Bits
from ..dtypes import DType, dtype_named, dtype_of_numpy
from ..errors import BadTensorName, ShapeMismatch, UnsupportedDtype, UnsupportedTensor
from ..format.digest import PART_ALIGNMENT, TensorKeys

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


@dataclass(slots=True)  # frozen, it would take three times as long to make
class TensorBits:
    """A named tensor, seen as unsigned integers. `bits` shares memory with the tensor.

    Of a part, `whole` is the shape of the tensor that it is a part of, and `start` its first element there.
    """

    name: str
    dtype: DType
    source: Any
    """The bits, as `Bits`; or a torch tensor on the host, in plain memory, of which they are made each time that they are asked for."""
    whole: tuple[int, ...] | None = None
    start: int = 0
    seen_as: Any = None
    """Of a torch tensor: torch's unsigned integer of the same width."""

    @property
    def bits(self) -> Bits:
        found: Bits = self.source
        if self.seen_as is not None:
            tensor = self.source.detach() if self.source.requires_grad else self.source
            found = tensor.view(self.seen_as).numpy()
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.source.shape)

    @property
    def size(self) -> int:
        """The number of its elements."""
        return int(self.source.size if self.seen_as is None else self.source.numel())

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def can_follow(self, other: TensorBits) -> bool:
        """Whether a delta can lead from the other one to this."""
        alike = self.dtype.code == other.dtype.code and self.source.shape == other.source.shape
        return bool(alike and self.whole == other.whole and self.start == other.start)

    def cut(self, start: int, stop: int) -> TensorBits:
        """Its elements from `start` to `stop`, in row-major order. `ShapeMismatch` if it has not got them.

        They are the same memory where the tensor is contiguous, or the part is one of whole rows; else a copy that cannot be written to.
        """
        if self.whole is not None:
            if (start, stop) != (self.start, self.start + self.size):
                raise ShapeMismatch(f"of tensor {self.name!r} there are not exactly the elements from {start} to {stop}.")
            return self
        if not 0 <= start <= stop <= self.size:
            raise ShapeMismatch(f"tensor {self.name!r} has no elements from {start} to {stop}.")
        return TensorBits(self.name, self.dtype, _run(self.bits, start, stop), self.shape, start)

    @property
    def memory(self) -> tuple[int, ...] | None:
        """Equal for two tensors that are the same memory seen in the same way; None where there are no elements."""
        return (self.address, self.dtype.code, *self.shape, *self.strides) if self.size else None

    @property
    def address(self) -> int:
        """Of the first element, on whatever device."""
        return address(self.source) if self.seen_as is None else int(self.source.data_ptr())

    @property
    def strides(self) -> tuple[int, ...]:
        """In bytes."""
        if self.seen_as is None:
            strides: tuple[int, ...] = self.source.strides
            return strides
        return tuple(stride * self.dtype.itemsize for stride in self.source.stride())

    @property
    def byte_bounds(self) -> tuple[int, int]:
        """The first address of its elements, and the first after them. Of no meaning where there are none."""
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
        if isinstance(self.source, np.ndarray):
            return self.source.flags.c_contiguous
        return bool((self.source.tensor if self.seen_as is None else self.source).is_contiguous())

    @property
    def is_read_only(self) -> bool:
        return isinstance(self.source, np.ndarray) and not self.source.flags.writeable

    @property
    def on_host(self) -> bool:
        """Whether `bits` are an array. Those of a CUDA tensor only have the attributes of one that whole states are handled with."""
        return self.seen_as is not None or isinstance(self.source, np.ndarray)


def tensor_bits(name: object, tensor: object) -> TensorBits:
    """See a tensor as bits. Raises `BadTensorName`, `UnsupportedTensor` or `UnsupportedDtype`."""
    return named_bits(check_name(name), tensor)


def state_bits(state: State) -> list[TensorBits]:
    """See all tensors of a state as bits. Raises as `tensor_bits` does."""
    check_names(state)
    return [named_bits(name, tensor) for name, tensor in state.items()]


def named_bits(checked: str, tensor: object) -> TensorBits:
    """Like `tensor_bits`, for a name that was checked."""
    if isinstance(tensor, TensorPart):
        part = named_bits(checked, tensor.elements)
        room = math.prod(tensor.shape)
        if len(part.shape) != 1 or not 0 <= tensor.start <= tensor.stop <= room or tensor.start * part.dtype.itemsize % PART_ALIGNMENT:
            raise UnsupportedTensor(f"tensor {checked!r} has a part that cannot be: elements {tensor.start} to {tensor.stop} of {room}.")
        return dataclasses.replace(part, whole=tensor.shape, start=tensor.start)
    if isinstance(tensor, np.generic):
        tensor = np.asarray(tensor)
        tensor.flags.writeable = False  # a copy: writing to it would be lost
    if isinstance(tensor, np.ndarray):
        dtype = dtype_of_numpy(tensor.dtype)
        if not tensor.flags.c_contiguous and any(
            stride % dtype.itemsize and size > 1 for size, stride in zip(tensor.shape, tensor.strides, strict=True)
        ):
            raise UnsupportedTensor(f"tensor {checked!r} has strides that are no multiple of its element size.")
        return TensorBits(checked, dtype, np.asarray(tensor).view(dtype.bits))
    if is_torch(tensor):
        return _torch_bits(checked, cast(Any, tensor), _torch_types(sys.modules["torch"]))
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


def check_names(names: Collection[object]) -> None:
    """`check_name` of many."""
    try:
        "".join(cast("Collection[str]", names)).encode()
        sound = "" not in names and "__metadata__" not in names
    except (TypeError, UnicodeEncodeError):
        sound = False
    if not sound:
        for name in names:
            check_name(name)


def keys_of(tensors: Sequence[TensorBits]) -> TensorKeys:
    keys = TensorKeys.of((tensor.name, tensor.dtype, tensor.shape if tensor.whole is None else tensor.whole) for tensor in tensors)
    if all(tensor.whole is None for tensor in tensors):
        return keys
    return keys.of_parts([None if tensor.whole is None else tensor.start * tensor.dtype.itemsize for tensor in tensors])


def address(bits: Bits) -> int:
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


def is_torch(tensor: object) -> bool:
    known = torch_tensor()
    return known is not None and isinstance(tensor, known)


def is_module(model: object) -> bool:
    """Whether this is a `torch.nn.Module`."""
    known = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None)
    return known is not None and isinstance(model, known)


def torch_tensor() -> type | None:
    """The class of torch's tensors; None where nobody has imported torch, or somebody is at it: then there are none."""
    return getattr(sys.modules.get("torch"), "Tensor", None)


def to_torch(array: NDArray[Any]) -> torch.Tensor:
    """A torch tensor of an array's memory; for states that hold torch tensors."""
    import torch

    dtype = dtype_of_numpy(array.dtype)
    return torch.from_numpy(array.view(_signed(dtype.width))).view(_torch_types(torch).dtypes[dtype.name])


def _torch_bits(name: str, tensor: torch.Tensor, known: _TorchTypes) -> TensorBits:
    if type(tensor) not in known.tensors:
        more = " deltawire.trainers.FSDPPublisher publishes such." if type(tensor).__name__ == "DTensor" else ""
        raise UnsupportedTensor(f"tensor {name!r} is a {type(tensor).__name__}.{more}")
    if tensor.layout != known.dense or tensor.is_quantized:
        raise UnsupportedTensor(f"tensor {name!r} is not dense.")
    if not (tensor.is_cpu or tensor.is_cuda) or known.is_hip:
        raise UnsupportedTensor(f"tensor {name!r} is on device {tensor.device}.")
    if tensor.dtype not in known.elements:
        raise UnsupportedDtype(str(tensor.dtype))
    dtype, signed, unsigned = known.elements[tensor.dtype]
    if is_on_gpu(tensor):
        return TensorBits(name, dtype, _cuda_bits(name, tensor.detach() if tensor.requires_grad else tensor, signed))
    try:
        found = TensorBits(name, dtype, tensor, None, 0, unsigned)
        if tensor.is_contiguous() and tensor.data_ptr() and not (tensor.is_neg() or tensor.is_nested):
            return found
        if not _is_freed(tensor):
            return TensorBits(name, dtype, found.bits)
    except RuntimeError:  # nested, or computed when it is read (lazily negated): there is no memory that is these bits
        pass
    raise UnsupportedTensor(f"tensor {name!r} is not plain memory.")


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether it is the GPU codec's to work on."""
    return bool(tensor.is_cuda)


def _is_freed(tensor: torch.Tensor) -> bool:
    """Whether it has elements, but no memory: trainers give that back while they do without; zeros of torch's own have never had any."""
    return not tensor.data_ptr() and tensor.numel() > 0


def _cuda_bits(name: str, tensor: torch.Tensor, integer: torch.dtype) -> Bits:
    if tensor.is_neg() or tensor.is_conj() or _is_freed(tensor):
        raise UnsupportedTensor(f"tensor {name!r} is not plain memory.")
    bits: Bits = _device_bits()(tensor.view(integer))
    return bits


@functools.cache
def _device_bits() -> Any:
    from ..codec.gpu.device_bits import DeviceBits

    return DeviceBits


def typed(flat: Any, dtype: DType, shape: tuple[int, ...] | None = None) -> Any:
    """Elements given as integers, an array or a torch tensor, in their own type."""
    own = flat.view(dtype.numpy) if isinstance(flat, np.ndarray) else flat.view(torch_dtype(dtype))
    return own if shape is None else own.reshape(shape)


def dtype_of(values: Any) -> DType:
    """The type of an array or of a torch tensor."""
    if isinstance(values, np.ndarray):
        return dtype_of_numpy(values.dtype)
    return _torch_types(sys.modules["torch"]).elements[values.dtype][0]


def torch_dtype(dtype: DType, *, bits: bool = False) -> Any:
    """Torch's element type; with `bits`, its signed integer of the same width."""
    import torch

    return getattr(torch, f"int{dtype.width}") if bits else _torch_types(torch).dtypes[dtype.name]


def torch_name(dtype: DType) -> str:
    """What torch calls the type, such as "bfloat16"."""
    return next(ours for ours, theirs in _TORCH_NAMES.items() if theirs == dtype.name)


def named_dtype(name: str) -> DType | None:
    """The type that torch calls so, such as "bfloat16"; None if the format does not know it."""
    return dtype_named(_TORCH_NAMES[name]) if name in _TORCH_NAMES else None


class _TorchTypes(NamedTuple):
    """What of torch is asked for with every tensor."""

    tensors: frozenset[type]
    """Classes that are plain memory."""
    dense: Any
    is_hip: bool
    """It calls AMD's GPUs cuda."""
    elements: dict[Any, tuple[DType, Any, Any]]
    """Of torch's element types: ours, and the integers of the same width, signed and unsigned."""
    dtypes: dict[str, Any]
    """Torch's element types by our names."""


@functools.lru_cache(maxsize=1)
def _torch_types(torch: Any) -> _TorchTypes:
    dtypes = {theirs: getattr(torch, ours) for ours, theirs in _TORCH_NAMES.items() if hasattr(torch, ours)}
    elements = {}
    for name, dtype in dtypes.items():
        width = dtype_named(name).width
        elements[dtype] = dtype_named(name), getattr(torch, f"int{width}"), getattr(torch, f"uint{width}")
    classes = [torch.Tensor, torch.nn.Parameter, *([torch.nn.Buffer] if hasattr(torch.nn, "Buffer") else [])]
    return _TorchTypes(frozenset(classes), torch.strided, bool(torch.version.hip), elements, dtypes)


def _signed(width: int) -> np.dtype[Any]:
    return np.dtype(f"int{width}")
