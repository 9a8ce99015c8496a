"""Addresses at which kernels can read tensors: those of the tensors themselves, or of copies that are made for the kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ..bits import Bits, BitsColumn, DeviceBits, MasterWeightBits, QuantisedBits, on_gpu
from .kernel_table import Numbers

_T = TypeVar("_T")

_MOST_COPIED = 256 << 20
"""The most bytes of tensors that are copied at a time."""

_ALIGNMENT = 16
"""Kernels read this many bytes at a time."""

_ON_DEVICE = {DeviceBits, MasterWeightBits, QuantisedBits, type(None)}

_NOT_READABLE = 1
"""Takes the place of the address of a tensor that kernels cannot read where it is. It is not aligned, like others that they cannot read."""


@dataclass(slots=True)
class Column:
    """Tensors, and the addresses at which kernels of one device can read them as they are: 0 if there is nothing to read."""

    bits: Sequence[Bits | None]
    addresses: NDArray[np.uint64]
    missing: Numbers
    """The numbers of tensors that kernels can only read as copies."""

    @classmethod
    def of(cls, bits: Sequence[Bits | None], device: torch.device) -> Column:
        """Look at each tensor once: models have a hundred thousand of them."""
        if isinstance(bits, BitsColumn) and bits.device == device:
            wrong = ~bits.are_contiguous | (bits.addresses % _ALIGNMENT != 0)
            return cls(bits, np.where(wrong, np.uint64(0), bits.addresses), np.flatnonzero(wrong & (bits.sizes > 0)))
        if _ON_DEVICE.issuperset(map(type, bits)):
            index = -1 if device.index is None else device.index
            found = [
                0
                if one is None
                else tensor.data_ptr()
                if (tensor := one.tensor).is_contiguous() and tensor.get_device() == index  # type: ignore[union-attr]
                else _NOT_READABLE
                for one in bits
            ]
        else:
            found = [_address(one, device) for one in bits]
        addresses = np.array(found, np.uint64)
        wrong = addresses % _ALIGNMENT != 0
        return cls(bits, np.where(wrong, np.uint64(0), addresses), np.flatnonzero(wrong))

    def copied_bytes(self) -> Numbers:
        """Return the bytes of the copy of each tensor, 0 if it needs none."""
        sizes = np.zeros(len(self.bits), np.int64)
        for number in self.missing.tolist():
            bits = self.bits[number]
            assert bits is not None
            sizes[number] = bits.tensor.nbytes if on_gpu(bits) else bits.nbytes  # master weights are copied as float32
        return sizes

    def copied(self, numbers: Numbers, device: torch.device) -> tuple[NDArray[np.uint64], list[torch.Tensor]]:
        """Copy some tensors. Return the addresses of all tensors, and the copies, which must live as long as kernels read them."""
        addresses, copies = self.addresses.copy(), []
        for number in numbers.tolist():
            bits = self.bits[number]
            assert bits is not None
            copies.append(flat_on(device, bits))
            addresses[number] = copies[-1].data_ptr()
        return addresses, copies


def joined(columns: Sequence[Sequence[_T]]) -> Sequence[_T]:
    """Return the tensors of several columns one after the other."""
    if len(columns) == 1:
        return columns[0]
    known = [column for column in columns if isinstance(column, BitsColumn)]
    if len(known) == len(columns) and known[0].can_be_followed_by(known[1:]):
        return cast("Sequence[_T]", known[0].followed_by(known[1:]))
    return [bits for column in columns for bits in column]


def _address(bits: Bits | None, device: torch.device) -> int:
    if bits is None or not bits.size:
        return 0
    return bits.address if on_gpu(bits) and bits.is_contiguous and bits.device == device else _NOT_READABLE


def flat_on(device: torch.device, bits: Bits) -> torch.Tensor:
    """Return the elements in row-major order on a device, as a copy unless the tensor can be read as it is."""
    if on_gpu(bits):
        return bits.flat() if bits.device == device else bits.tensor.to(device).contiguous().view(-1)
    flat = np.ascontiguousarray(bits).reshape(-1).view(f"i{bits.itemsize}")
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy()).to(device, non_blocking=True)


def readable(
    columns: Sequence[Column], first: Numbers, end: Numbers, device: torch.device
) -> Iterator[tuple[slice, list[NDArray[np.uint64]]]]:
    """Yield parts of a job, and the addresses of the tensors in each column. The part i of the job is about tensors `first[i]` … `end[i]`.

    At most `_MOST_COPIED` bytes are copied at a time, unless a single part of the job needs more. Copies live until the next parts are
    requested.
    """
    if not any(column.missing.size for column in columns):
        if first.size:
            yield slice(0, first.size), [column.addresses for column in columns]
        return
    upto = np.append(0, np.cumsum(sum(column.copied_bytes() for column in columns)))
    begin = 0
    while begin < first.size:
        needed = upto[end[begin:]] - upto[first[begin]]
        stop = begin + int(np.searchsorted(needed, max(_MOST_COPIED, int(needed[0])), "right"))
        addresses, copies = [], []
        for column in columns:
            inside = column.missing[(column.missing >= first[begin]) & (column.missing < end[stop - 1])]
            found, made = column.copied(inside, device)
            addresses.append(found)
            copies += made
        yield slice(begin, stop), addresses
        copies.clear()
        del made
        begin = stop
