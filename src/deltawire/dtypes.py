"""The element types that a checkpoint can hold: their names in safetensors, and their layout for the codec.

The codec never interprets numbers. It works on unsigned integers, and for floating-point types it knows the position of the exponent.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from .errors import UnsupportedDtype


@dataclass(frozen=True, slots=True)
class DType:
    """One element type: its safetensors `name`, its `code` in payloads, and its layout (docs/format.md §3)."""

    name: str
    code: int
    width: int
    exponent_shift: int
    exponent_bits: int
    numpy: np.dtype[np.generic]

    @property
    def itemsize(self) -> int:
        return self.width // 8

    @property
    def bits(self) -> np.dtype[np.generic]:
        """The unsigned integer type of the same width, which is used for all comparisons."""
        return _BITS[self.width]


_BITS: dict[int, np.dtype[np.generic]] = {w: np.dtype(f"uint{w}") for w in (8, 16, 32, 64)}

DTYPES: tuple[DType, ...] = tuple(
    DType(name, code, width, shift, bits, np.dtype(numpy))
    for code, (name, width, shift, bits, numpy) in enumerate(
        [
            ("BOOL", 8, 0, 0, np.bool_),
            ("U8", 8, 0, 0, np.uint8),
            ("I8", 8, 0, 0, np.int8),
            ("F8_E5M2", 8, 2, 5, ml_dtypes.float8_e5m2),
            ("F8_E4M3", 8, 3, 4, ml_dtypes.float8_e4m3fn),
            ("F8_E8M0", 8, 0, 0, ml_dtypes.float8_e8m0fnu),
            ("I16", 16, 0, 0, np.int16),
            ("U16", 16, 0, 0, np.uint16),
            ("F16", 16, 10, 5, np.float16),
            ("BF16", 16, 7, 8, ml_dtypes.bfloat16),
            ("I32", 32, 0, 0, np.int32),
            ("U32", 32, 0, 0, np.uint32),
            ("F32", 32, 23, 8, np.float32),
            ("I64", 64, 0, 0, np.int64),
            ("U64", 64, 0, 0, np.uint64),
            ("F64", 64, 52, 11, np.float64),
        ]
    )
)


@dataclass(frozen=True, slots=True)
class PayloadType:
    """The elements of a group of tensors as a delta codes them (docs/format.md §3): whole elements, or the 4-bit codes packed in them."""

    name: str
    code: int
    width: int
    exponent_shift: int
    exponent_bits: int
    dtype: DType
    """The tensors' own element type."""

    @property
    def bits(self) -> np.dtype[np.generic]:
        """The unsigned integer type that can hold one element."""
        return _BITS[max(self.width, 8)]

    @property
    def is_packed(self) -> bool:
        """Whether several of these elements share one element of the tensor."""
        return self.width < 8

    @property
    def per_element(self) -> int:
        """The number of these elements in one element of the tensor."""
        return self.dtype.width // self.width


_BY_NAME = {d.name: d for d in DTYPES}

F4_E2M1 = PayloadType("F4_E2M1", 16, 4, 0, 3, _BY_NAME["U8"])
"""Two 4-bit floats in each byte. Their whole magnitude counts as the exponent, because each magnitude changes at its own rate."""
U4 = PayloadType("U4", 17, 4, 0, 0, _BY_NAME["I32"])
"""Eight 4-bit integers in each 32-bit integer."""

PAYLOAD_TYPES: tuple[PayloadType, ...] = (
    *(PayloadType(d.name, d.code, d.width, d.exponent_shift, d.exponent_bits, d) for d in DTYPES),
    F4_E2M1,
    U4,
)

_BY_NUMPY = {d.numpy: d for d in DTYPES}


def payload_type(name: str, dtype: DType) -> PayloadType:
    """Return how a delta codes the elements of a tensor with this name and type."""
    if dtype is F4_E2M1.dtype and name.endswith(("weight_packed", "_blocks")):
        return F4_E2M1
    if dtype is U4.dtype and name.endswith("weight_packed"):
        return U4
    return PAYLOAD_TYPES[dtype.code]


def dtype_named(name: str) -> DType:
    """Return the type with the name `name` in safetensors. Raise `UnsupportedDtype` if the codec does not have it."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise UnsupportedDtype(name) from None


def dtype_of_numpy(dtype: np.dtype[np.generic]) -> DType:
    """Return the type of a NumPy array (bf16 and fp8 as `ml_dtypes`). Raise `UnsupportedDtype` if the codec does not have it."""
    try:
        return _BY_NUMPY[dtype]
    except KeyError:
        raise UnsupportedDtype(str(dtype)) from None


def first_nonfinite(dtype: DType) -> tuple[int, int] | None:
    """Return the first nonfinite bit patterns with a clear and with a set sign bit; None for integer types.

    Infinities and NaNs have the largest magnitudes of all bit patterns. Type e4m3fn has no infinity and one NaN. Type e8m0 has no sign and
    no infinity.
    """
    sign = 1 << (dtype.width - 1)
    if dtype.name == "F8_E4M3":
        return 0x7F, 0xFF
    if dtype.name == "F8_E8M0":
        return sign, 0xFF
    if dtype.exponent_bits:
        first = ((1 << dtype.exponent_bits) - 1) << dtype.exponent_shift
        return first, sign | first
    return None
