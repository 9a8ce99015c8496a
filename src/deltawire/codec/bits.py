"""The bits of one tensor, in host memory or on a GPU: what every codec works on.

This module does not import torch: `DeviceBits` can only be made from a CUDA tensor, and then torch is already imported.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeIs

HostBits: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""A tensor in host memory as unsigned integers of its element width, of any shape and strides."""

_ALIGNMENT = 16
"""Kernels read this many bytes at a time."""


class DeviceBits:
    """A tensor on a GPU as integers of its element width. It has the attributes of an array that code for whole states uses.

    Parameters
    ----------
    tensor
        A CUDA tensor of signed integers. The bits share its memory.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(self.tensor.numel())

    @property
    def itemsize(self) -> int:
        return int(self.tensor.element_size())

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides in bytes."""
        return tuple(stride * self.itemsize for stride in self.tensor.stride())

    @property
    def address(self) -> int:
        return int(self.tensor.data_ptr())

    @property
    def is_contiguous(self) -> bool:
        return bool(self.tensor.is_contiguous())

    @property
    def is_kernel_readable(self) -> bool:
        """Whether kernels can read the tensor where it is: it is contiguous and aligned."""
        return self.is_contiguous and self.address % _ALIGNMENT == 0

    def elements(self) -> torch.Tensor:
        """Return the integers as a tensor of the same shape."""
        return self.tensor

    def flat(self) -> torch.Tensor:
        """Return the elements in row-major order where kernels can read them: in the tensor's own memory, or else in a copy."""
        import torch

        return self.tensor.view(-1) if self.is_kernel_readable else self.tensor.clone(memory_format=torch.contiguous_format).view(-1)


class MasterWeightBits(DeviceBits):
    """A float32 tensor that is published as bfloat16 values, rounded to nearest, ties to even. Kernels round as they read."""

    __slots__ = ()

    @property
    def itemsize(self) -> int:
        return 2

    def elements(self) -> torch.Tensor:
        return self.rounded().tensor

    def rounded(self) -> DeviceBits:
        """Return the rounded values as a new tensor."""
        import torch

        numbers = self.tensor.view(torch.float32)
        halves = numbers.to(torch.bfloat16).view(torch.int16)
        # The fill value is a Python number: the host would wait for the stream to copy it from a tensor.
        return DeviceBits(halves.masked_fill_(numbers.isnan(), 0x7FC0))


class ScalesOnDevice(NamedTuple):
    """Where kernels find the scales of weights that they quantise. The names are those of `Quantised` in `codec/gpu/kernels/common.cuh`.

    Scales of one byte need not be written. Then `scales` is None, and kernels choose those that are not the previous ones again.
    """

    scales: torch.Tensor | None
    """The scales, as they are published. No weight is larger than its scale allows."""
    global_scale: torch.Tensor | None = None
    """The global scale of nvfp4."""
    previous: torch.Tensor | None = None
    """The scales of the version before."""
    changed: torch.Tensor | None = None
    """For each 16,384 weights a 16-bit number: which of its 16 units of 1,024 weights have a scale that is not the previous one."""
    fresh: torch.Tensor | None = None
    """A number that is not 0 if previous scales do not count."""


class QuantisedBits(DeviceBits):
    """Weights on a GPU that are published as codes, or as the scales of these codes. Kernels quantise as they read.

    Parameters
    ----------
    tensor
        The weights as signed integers: rows and columns, contiguous, at an address that is a multiple of 16. The number of columns is a
        multiple of 8.
    shape
        The shape of the codes or scales, as they are published.
    itemsize
        The bytes of one of them.
    facts
        How they are quantised: the numbers of the recipe and of the type of the weights, and the size of a group, as
        `codec/gpu/kernels/numbers.cuh` has them.
    scales
        Where the scales are.
    makes_scales
        Whether the weights are published as scales. These must have one byte each, and are not written.
    """

    __slots__ = ("_itemsize", "_shape", "facts", "makes_scales", "scales")

    def __init__(
        self,
        tensor: torch.Tensor,
        shape: tuple[int, ...],
        itemsize: int,
        facts: tuple[int, int, int],
        scales: ScalesOnDevice,
        *,
        makes_scales: bool = False,
    ) -> None:
        super().__init__(tensor)
        self._shape, self._itemsize = shape, itemsize
        self.facts, self.scales, self.makes_scales = facts, scales, makes_scales

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def size(self) -> int:
        return math.prod(self._shape)

    @property
    def itemsize(self) -> int:
        return self._itemsize

    def elements(self) -> torch.Tensor:
        raise TypeError("weights that are quantised as they are read cannot be used as a tensor")

    flat = elements


class BitsColumn(Sequence["Bits"]):
    """The bits of many tensors of one device, of which codecs read only addresses and sizes. Bits of a single tensor are made on request.

    Parameters
    ----------
    tensors
        The tensors, which are kept alive.
    make
        Returns the bits of one of them.
    addresses
        Where each tensor begins.
    sizes
        The number of elements of each tensor.
    itemsizes
        The bytes of an element of each tensor.
    are_contiguous
        Whether each tensor is contiguous.
    device
        The GPU that holds the tensors; None if they are in host memory.
    quantised
        For each tensor: how kernels make its elements of the weights that are at its address (`QUANTISED` of `codec/gpu/kernel_table.py`),
        with 0 columns if they do not. None: kernels make no elements.
    """

    __slots__ = ("_make", "_tensors", "addresses", "are_contiguous", "device", "itemsizes", "quantised", "sizes")

    def __init__(
        self,
        tensors: Sequence[Any],
        make: Callable[[Any], Bits],
        addresses: NDArray[np.uint64],
        sizes: NDArray[np.int64],
        itemsizes: NDArray[np.uint8],
        are_contiguous: NDArray[np.bool_],
        device: torch.device | None = None,
        quantised: NDArray[np.void] | None = None,
    ) -> None:
        self._tensors, self._make = tensors, make
        self.addresses, self.sizes, self.itemsizes, self.are_contiguous = addresses, sizes, itemsizes, are_contiguous
        self.device = device
        self.quantised = quantised

    def __len__(self) -> int:
        return len(self._tensors)

    @overload
    def __getitem__(self, number: int) -> Bits: ...
    @overload
    def __getitem__(self, number: slice) -> list[Bits]: ...
    def __getitem__(self, number: int | slice) -> Bits | list[Bits]:
        if isinstance(number, slice):
            return [self._make(tensor) for tensor in self._tensors[number]]
        return self._make(self._tensors[number])

    def take(self, numbers: NDArray[np.int64]) -> BitsColumn:
        """Return some of the tensors as a column of their own."""
        if len(numbers) == len(self):
            return self
        tensors = [self._tensors[number] for number in numbers.tolist()]
        return self._new(tensors, numbers)

    def part(self, some: slice) -> BitsColumn:
        """Return tensors that follow each other as a column of their own."""
        return self._new(self._tensors[some], some)

    def can_be_followed_by(self, others: Sequence[BitsColumn]) -> bool:
        """Tell whether `followed_by` takes these columns."""
        is_quantised = self.quantised is not None
        return all(
            other.device == self.device and other._make == self._make and (other.quantised is not None) == is_quantised for other in others
        )

    def followed_by(self, others: Sequence[BitsColumn]) -> BitsColumn:
        """Return these tensors and those of other columns of the same device, whose bits are made in the same way."""
        if not others:
            return self
        each = (self, *others)
        quantised = None
        if self.quantised is not None:  # NumPy joins bytes many times as fast as records
            rows = [column.quantised.view(np.uint8) for column in each if column.quantised is not None]
            quantised = np.concatenate(rows).view(self.quantised.dtype)
        return BitsColumn(
            list(itertools.chain.from_iterable(column._tensors for column in each)),
            self._make,
            np.concatenate([column.addresses for column in each]),
            np.concatenate([column.sizes for column in each]),
            np.concatenate([column.itemsizes for column in each]),
            np.concatenate([column.are_contiguous for column in each]),
            self.device,
            quantised,
        )

    def _new(self, tensors: Sequence[Any], which: Any) -> BitsColumn:
        columns = self.addresses[which], self.sizes[which], self.itemsizes[which], self.are_contiguous[which]
        return BitsColumn(tensors, self._make, *columns, self.device, None if self.quantised is None else self.quantised[which])

    @property
    def are_each_plain(self) -> NDArray[np.bool_]:
        """Whether each tensor is contiguous with aligned elements, or has no elements."""
        plain: NDArray[np.bool_] = self.are_contiguous & (self.addresses % self.itemsizes == 0) | (self.sizes == 0)
        return plain

    @property
    def are_plain(self) -> bool:
        """Whether every tensor is contiguous with aligned elements, or has no elements."""
        return bool(self.are_each_plain.all())


Bits: TypeAlias = "HostBits | DeviceBits"
"""A tensor as integers of its element width, in host memory or on a GPU."""

if TYPE_CHECKING:
    Indices: TypeAlias = NDArray[np.int64] | torch.Tensor
else:
    Indices: TypeAlias = Any
"""Flat indices of elements, in host memory or on a GPU."""


def on_gpu(bits: object) -> TypeIs[DeviceBits]:
    """Tell whether bits are on a GPU. `False` means that they are a NumPy array, or None.

    For a tensor, ask `torch_types.gpu_of` or `gpu_holding`; for all tensors of a state, `Columns.is_on_gpu` or `are_on_gpu`.
    """
    return isinstance(bits, DeviceBits)


def in_host_memory(bits: Bits) -> HostBits:
    """Return bits that must be in host memory. Raise `TypeError` if they are on a GPU, where the codecs of the host cannot read them."""
    if on_gpu(bits):
        raise TypeError(f"bits are on {bits.device}, but must be in host memory")
    return bits


def in_gpu_memory(bits: Bits) -> DeviceBits:
    """Return bits that must be on a GPU. Raise `TypeError` if they are in host memory."""
    if not on_gpu(bits):
        raise TypeError("bits are in host memory, but must be on a GPU")
    return bits


def copied_to_host(bits: Bits) -> HostBits:
    """Return bits in host memory: NumPy arrays as they are, bits on a GPU as a copy. It waits for the calling thread's current stream."""
    if not on_gpu(bits):
        return bits
    found: HostBits = bits.elements().cpu().numpy().view(f"u{bits.itemsize}")
    return found


def copy_bits(bits: Bits, into: Bits) -> None:
    """Copy bits to others of the same type and shape. Both may be in host memory or on a GPU."""
    if not on_gpu(into):
        np.copyto(into, copied_to_host(bits))
    elif on_gpu(bits):
        into.tensor.copy_(bits.tensor)
    else:
        import torch

        into.tensor.copy_(torch.from_numpy(np.ascontiguousarray(bits).view(f"i{bits.itemsize}")))
