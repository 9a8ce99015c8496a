"""Master weights: the float32 that an optimizer works on, seen as the bfloat16 that the model computes with."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from .codec.base import Bits
from .dtypes import dtype_named
from .tensors import TensorBits

_BF16, _F32 = dtype_named("BF16"), dtype_named("F32")


class Rounding:
    """Tensors of one state rounded, each memory once: tied ones stay tied."""

    def __init__(self) -> None:
        self._made: dict[object, tuple[TensorBits, Bits]] = {}
        """By memory. What was rounded is held too: nothing else may come to lie where it was."""

    def follow(self, old: TensorBits | None, new: TensorBits) -> TensorBits:
        """`new` as the successor of `old`: rounded, to nearest and to even in between, if it is the float32 of a bfloat16; else as it is.

        On a GPU nothing is made: elements are rounded as they are compared. NaNs all become one.
        """
        if old is None or (old.dtype, new.dtype) != (_BF16, _F32) or (old.shape, old.whole, old.start) != (new.shape, new.whole, new.start):
            return new
        if new.on_host:
            key = new.memory or new.name
            if key not in self._made:
                self._made[key] = new, _rounded(new.bits)
            bits = self._made[key][1]
        else:
            from .codec.gpu.device_bits import MasterBits

            bits = cast("Bits", MasterBits(cast(Any, new.bits).tensor))
        return TensorBits(new.name, _BF16, bits, new.whole, new.start)


def _rounded(bits: Bits) -> Bits:
    wide = bits.astype(np.uint32)
    halves = (wide + np.uint32(0x7FFF) + (wide >> 16 & 1)) >> 16
    return np.where((wide & 0x7FFFFFFF) > 0x7F800000, np.uint32(0x7FC0), halves).astype(np.uint16)
