"""Casting weights to what the fleet serves: a trainer that holds float32 publishes the bfloat16 that it rounds to.

Nothing is cast unless somebody asks for it, by `dtype`. Only float16, bfloat16, float32 and float64 are cast, and only to one of these:
integers are no weights, and 8-bit floats mean nothing without their scales.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np

from ..codec.base import Bits
from ..dtypes import DType, dtype_named, dtype_of_numpy
from ..errors import UnsupportedDtype
from .bits import TensorBits, named_dtype, torch_dtype

DTypeLike: TypeAlias = Any
"""A torch or NumPy type, or its name: `torch.bfloat16`, `ml_dtypes.bfloat16`, `"bfloat16"`."""

WireDType: TypeAlias = DTypeLike | Callable[[str, Any], "DTypeLike | None"]
"""One type for all weights, or a function of a tensor's name and the tensor; where that returns None, the tensor stays as it is."""

_BF16, _F32 = dtype_named("BF16"), dtype_named("F32")
_CASTABLE = {dtype_named(name) for name in ("F16", "BF16", "F32", "F64")}


class Casting:
    """Says for each tensor what type it has on the wire. `dtype` is what a user asked for; None casts nothing."""

    def __init__(self, dtype: WireDType | None) -> None:
        self._choose: Callable[[str, Any], DTypeLike | None] | None = None
        self._dtype: DType | None = None
        if callable(dtype) and not isinstance(dtype, type):
            self._choose = dtype
        elif dtype is not None:
            self._dtype = wire_dtype(dtype)

    @property
    def is_given(self) -> bool:
        """Whether the user said what the fleet serves."""
        return self._dtype is not None or self._choose is not None

    @property
    def dtype(self) -> DType | None:
        """The one type that all weights are cast to, if there is one."""
        return self._dtype

    def dtype_of(self, tensor: TensorBits, original: Any) -> DType:
        """The type of a tensor on the wire. `original` is what the caller passed for it."""
        if tensor.dtype not in _CASTABLE:
            return tensor.dtype
        if self._choose is not None:
            chosen = self._choose(tensor.name, original)
            return tensor.dtype if chosen is None else wire_dtype(chosen)
        return self._dtype or tensor.dtype


class Casts:
    """Casts tensors of one state, each memory once: tied tensors stay tied."""

    def __init__(self) -> None:
        self._made: dict[object, tuple[TensorBits, Bits]] = {}
        """By memory and type. What was cast is held too: nothing else may come to lie where it was."""

    def cast(self, tensor: TensorBits, to: DType, base: TensorBits | None = None) -> TensorBits:
        """Return the tensor as `to`, rounded to nearest and to even in between; the tensor itself if it is of that type.

        On a GPU, float32 that is to be compared with a bfloat16 `base` is not copied: elements are rounded as they are read. NaNs of
        float32 all become one bfloat16.
        """
        if tensor.dtype == to:
            return tensor
        if tensor.on_host:
            key = (tensor.memory or tensor.name, to.code)
            if key not in self._made:
                self._made[key] = tensor, _cast(tensor, to)
            bits = self._made[key][1]
        else:
            bits = _cast_on_gpu(tensor, to, base)
        return TensorBits(tensor.name, to, bits, tensor.whole, tensor.start)


def wire_dtype(dtype: DTypeLike) -> DType:
    """Read a type that weights may be cast to. Raises `ValueError` for any other."""
    found: DType | None = None
    with contextlib.suppress(TypeError, UnsupportedDtype):
        found = named_dtype(str(dtype).removeprefix("torch.")) or dtype_of_numpy(np.dtype(dtype))
    if dtype is None or found not in _CASTABLE:  # NumPy takes None for float64
        raise ValueError(f"dtype is what the fleet serves: float16, bfloat16, float32 or float64, not {dtype!r}")
    return found


def _cast(tensor: TensorBits, to: DType) -> Bits:
    if tensor.seen_as is not None:
        return _cast_by_torch(tensor, to)
    if (tensor.dtype, to) == (_F32, _BF16):
        return _rounded(tensor.bits)
    with np.errstate(over="ignore"):  # beyond the range is infinite; the publisher looks for that
        return tensor.bits.view(tensor.dtype.numpy).astype(to.numpy).view(to.bits)


def _rounded(bits: Bits) -> Bits:
    wide = bits.astype(np.uint32)
    halves = (wide + np.uint32(0x7FFF) + (wide >> 16 & 1)) >> 16
    return np.where((wide & 0x7FFFFFFF) > 0x7F800000, np.uint32(0x7FC0), halves).astype(np.uint16)


def _cast_by_torch(tensor: TensorBits, to: DType) -> Bits:
    """The same bits as without torch, several times as fast. What torch makes of a NaN depends on where in the tensor it is."""
    made = tensor.source.detach().to(torch_dtype(to))
    bits = made.view(torch_dtype(to, bits=True))
    if (tensor.dtype, to) == (_F32, _BF16) and bool((is_nan := made.isnan()).any()):
        bits.masked_fill_(is_nan, 0x7FC0)
    return cast("Bits", bits.numpy().view(to.bits))


def _cast_on_gpu(tensor: TensorBits, to: DType, base: TensorBits | None) -> Bits:
    from ..codec.gpu.device_bits import DeviceBits, MasterBits

    there: Any = cast(Any, tensor.bits).tensor
    if (tensor.dtype, to) == (_F32, _BF16):
        masters = MasterBits(there)
        return cast("Bits", masters if base is not None and base.dtype == to and base.shape == tensor.shape else masters.rounded())
    return cast("Bits", DeviceBits(there.view(torch_dtype(tensor.dtype)).to(torch_dtype(to)).view(torch_dtype(to, bits=True))))
