"""A CUDA tensor as bits: what `codec.base.Bits` is for memory of the host."""

from __future__ import annotations

from typing import Any

import torch

_ALIGNMENT = 16


class DeviceBits:
    """A view of a CUDA tensor as integers of its element width. Has those attributes of an array that whole states are handled with."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def size(self) -> int:
        return int(self.tensor.numel())

    @property
    def itemsize(self) -> int:
        return int(self.tensor.element_size())

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(stride * self.itemsize for stride in self.tensor.stride())

    @property
    def address(self) -> int:
        return int(self.tensor.data_ptr())

    @property
    def plain(self) -> bool:
        """Whether the kernels can work on it in place."""
        return bool(self.tensor.is_contiguous()) and self.address % _ALIGNMENT == 0

    def elements(self) -> torch.Tensor:
        """The integers, as a tensor of this shape."""
        return self.tensor

    def flat(self) -> torch.Tensor:
        """The elements in row-major order where kernels can read them: this memory, or else a copy."""
        return self.tensor.view(-1) if self.plain else self.tensor.clone(memory_format=torch.contiguous_format).view(-1)


class MasterBits(DeviceBits):
    """A float32 tensor that counts as the bfloat16 it rounds to (to nearest, to even in between), element by element as it is read."""

    __slots__ = ()

    @property
    def itemsize(self) -> int:
        return 2

    def elements(self) -> torch.Tensor:
        return self.rounded().tensor

    def rounded(self) -> DeviceBits:
        """The same as a tensor of its own."""
        numbers = self.tensor.view(torch.float32)
        halves = numbers.to(torch.bfloat16).view(torch.int16)
        return DeviceBits(halves.masked_fill_(numbers.isnan(), 0x7FC0))  # a tensor of this number would have the host wait for the stream


def is_device(bits: Any) -> bool:
    return isinstance(bits, DeviceBits)
