"""Casting weights to the element type that the engines serve: a trainer that holds float32 publishes the bfloat16 that it rounds to.

Weights are cast only if the caller passes `dtype`. Only float16, bfloat16, float32 and float64 are cast, and only to one of these:
integers are not weights, and 8-bit floats mean nothing without their scales.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..codec.bits import Bits, DeviceBits, HostBits, MasterWeightBits, in_host_memory, on_gpu
from ..dtypes import DType, dtype_named, dtype_of_numpy
from ..errors import UnsupportedDtype
from .bits import State, Tensor, TensorBits, typed
from .columns import Columns
from .torch_types import named_dtype, torch_dtype

if TYPE_CHECKING:
    import torch

DTypeLike: TypeAlias = Any
"""A torch or NumPy type, or its name: `torch.bfloat16`, `ml_dtypes.bfloat16`, `"bfloat16"`."""

WireDType: TypeAlias = DTypeLike | Callable[[str, Any], "DTypeLike | None"]
"""One type for all weights, or a function of a tensor's name and the tensor. If the function returns None, the tensor is not cast."""

_BF16, _F32 = dtype_named("BF16"), dtype_named("F32")
_CASTABLE = {dtype_named(name) for name in ("F16", "BF16", "F32", "F64")}


class Casting:
    """Decides which element type each tensor has on the wire.

    Parameters
    ----------
    dtype
        The type that the user asked for, or a function that returns it; None casts nothing.
    """

    def __init__(self, dtype: WireDType | None) -> None:
        self._choose: Callable[[str, Any], DTypeLike | None] | None = None
        self._dtype: DType | None = None
        if callable(dtype) and not isinstance(dtype, type):
            self._choose = dtype
        elif dtype is not None:
            self._dtype = wire_dtype(dtype)

    @property
    def is_given(self) -> bool:
        """Whether the user said what the engines serve."""
        return self._dtype is not None or self._choose is not None

    @property
    def dtype(self) -> DType | None:
        """The one type that all weights are cast to; None if there is no such type."""
        return self._dtype

    def dtype_of(self, tensor: TensorBits, original: Any) -> DType:
        """Return the type of a tensor on the wire. `original` is the tensor that the caller passed."""
        if self._choose is not None and tensor.dtype in _CASTABLE:
            chosen = self._choose(tensor.name, original)
            return tensor.dtype if chosen is None else wire_dtype(chosen)
        return self.cast_of(tensor.dtype)

    def cast_of(self, dtype: DType) -> DType:
        """Return the type on the wire of all tensors of a type, if one type was given for all weights."""
        return self._dtype or dtype if dtype in _CASTABLE else dtype


class Casts:
    """Casts the tensors of one state. Each memory is cast once, so tied tensors stay tied."""

    def __init__(self) -> None:
        self._made: dict[object, tuple[TensorBits, HostBits]] = {}
        """Casts by memory and type. The originals are kept too, so that no other tensor can get their memory."""

    def cast(self, tensor: TensorBits, to: DType, base: TensorBits | None = None) -> TensorBits:
        """Return the tensor as `to`, rounded to nearest, ties to even; or the tensor itself if it has that type already.

        A GPU does not copy float32 that is to be compared with a bfloat16 `base`: its kernels round elements as they read them. All NaNs
        of float32 become the same bfloat16.
        """
        if tensor.dtype == to:
            return tensor
        bits: Bits
        if on_gpu(tensor.source):
            bits = _cast_on_gpu(tensor.source, tensor, to, base)
        else:
            key = (tensor.memory or tensor.name, to.code)
            if key not in self._made:
                self._made[key] = tensor, _cast_on_host(tensor, to)
            bits = self._made[key][1]
        return TensorBits(tensor.name, to, bits, tensor.whole, tensor.start)


def cast_on_host(state: State, casting: Casting) -> State | None:
    """Return a state whose weights are cast to the one type that was given.

    Returns None if there is no such type, or if the state is not all plain arrays, or all plain torch tensors in host memory.
    """
    columns = None if casting.dtype is None else Columns.of(state)
    if columns is None or columns.is_on_gpu:
        return None
    layout, casts = columns.layout, Casts()
    types = {dtype: casting.cast_of(dtype) for dtype in set(layout.dtypes)}
    sharing = set(columns.sharing_addresses.tolist())
    made: dict[str, Tensor] = {}
    for number, name in enumerate(layout.names):
        tensor, to = columns[number], types[layout.dtypes[number]]
        bits = tensor.bits
        if tensor.dtype != to:
            bits = casts.cast(tensor, to).bits if number in sharing else _cast_on_host(tensor, to)
        made[name] = typed(bits, to)
    return made


def wire_dtype(dtype: DTypeLike) -> DType:
    """Return a type that weights may be cast to. Raise `ValueError` for any other."""
    found: DType | None = None
    with contextlib.suppress(TypeError, UnsupportedDtype):
        found = named_dtype(str(dtype).removeprefix("torch.")) or dtype_of_numpy(np.dtype(dtype))
    if dtype is None or found not in _CASTABLE:  # NumPy reads None as float64
        message = f"dtype is the type that the engines serve: float16, bfloat16, float32 or float64, not {dtype!r}"
        if "float8" in str(dtype) or "float4" in str(dtype) or (found is not None and found.name.startswith("F8")):
            message += '; for fp8 or 4 bits, pass a recipe, such as quantise="fp8-block"'
        raise ValueError(message)
    return found


def _cast_on_host(tensor: TensorBits, to: DType) -> HostBits:
    if tensor.unsigned is not None:
        return _cast_by_torch(tensor, to)
    bits = in_host_memory(tensor.bits)
    if (tensor.dtype, to) == (_F32, _BF16):
        return _rounded(bits)
    with np.errstate(over="ignore"):  # values beyond the range become infinite, and the publisher looks for infinities
        return bits.view(tensor.dtype.numpy).astype(to.numpy).view(to.bits)


def _rounded(bits: HostBits) -> HostBits:
    with np.errstate(over="ignore", invalid="ignore"):
        made = np.asarray(bits.view(np.float32).astype(_BF16.numpy))
    rounded: HostBits = made.view(np.uint16)
    is_nan = np.isnan(made)
    if is_nan.any():
        rounded[is_nan] = 0x7FC0
    return rounded


def _cast_by_torch(tensor: TensorBits, to: DType) -> HostBits:
    """Return the same bits as NumPy would, several times as fast. NaNs are replaced: torch's depend on their position in the tensor."""
    source: torch.Tensor = tensor.source
    made = source.detach().to(torch_dtype(to))
    bits = made.view(torch_dtype(to, bits=True))
    if (tensor.dtype, to) == (_F32, _BF16) and bool((is_nan := made.isnan()).any()):
        bits.masked_fill_(is_nan, 0x7FC0)
    found: HostBits = bits.numpy().view(to.bits)
    return found


def _cast_on_gpu(bits: DeviceBits, tensor: TensorBits, to: DType, base: TensorBits | None) -> DeviceBits:
    if (tensor.dtype, to) == (_F32, _BF16):
        masters = MasterWeightBits(bits.tensor)
        return masters if base is not None and base.dtype == to and base.shape == tensor.shape else masters.rounded()
    return DeviceBits(bits.tensor.view(torch_dtype(tensor.dtype)).to(torch_dtype(to)).view(torch_dtype(to, bits=True)))
