"""Lists of elements to write: how they are made, joined, read and written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ....codec.bits import Bits, Indices, on_gpu
from ..layout.types import Scatter

Changes = tuple[torch.Tensor, torch.Tensor]
"""Flat indices of changed elements (int64), and their new bits as signed integers."""


def as_changes(indices: Indices, bits: Bits, start: int) -> Changes:
    """Return what a codec found as changes. `start` is the position of the codec's first element in its tensor."""
    at = torch.from_numpy(indices) if isinstance(indices, np.ndarray) else indices
    values = bits.tensor if on_gpu(bits) else torch.from_numpy(bits.view(f"i{bits.itemsize}"))
    return (at + start if start else at), values


def are_same(one: Sequence[Changes], other: Sequence[Changes]) -> bool:
    """Return whether two lists change the same elements to the same values."""
    if not one or not other:
        return not one and not other
    (a, b), (c, d) = (tuple(torch.cat([each[side] for each in found]) for side in (0, 1)) for found in (one, other))
    return bool(torch.equal(a, c) and torch.equal(b, d))


def read_values(scatter: Scatter) -> torch.Tensor:
    """Return the values that the elements of a list have in memory."""
    values = scatter.memory[scatter.indices]
    return values if scatter.half is None else (values >> 4 * scatter.half) & 15


def write_values(scatter: Scatter, values: torch.Tensor) -> None:
    """Write values to the elements of a list. Halves of bytes that the list does not name stay."""
    if scatter.half is not None:
        keeps = 0x0F if scatter.half else -16  # the bits of the other half, in a signed byte
        values = scatter.memory[scatter.indices] & keeps | values << 4 * scatter.half
    scatter.memory[scatter.indices] = values


def merged(scatters: Sequence[Scatter]) -> list[Scatter]:
    """Return one list for each storage, because a swap takes time for every list. Thousands of experts may be in a few storages."""
    groups: dict[object, list[Scatter]] = {}
    for scatter in scatters:
        key = scatter.memory.data_ptr(), scatter.memory.dtype, scatter.indices.dtype, scatter.half
        groups.setdefault(key, []).append(scatter)
    found = []
    for group in groups.values():
        first, old = group[0], [scatter.old for scatter in group if scatter.old is not None]
        if len(group) > 1:
            first.memory = max((scatter.memory for scatter in group), key=torch.Tensor.numel)  # the others are only the first part of it
            first.indices = torch.cat([scatter.indices for scatter in group])
            first.new, first.old = torch.cat([scatter.new for scatter in group]), torch.cat(old)
        found.append(first)
        group.clear()
    return found


def narrow(indices: torch.Tensor, count: int) -> torch.Tensor:
    """Return indices below `count` in the narrowest type."""
    return indices.to(torch.int32) if count < 2**31 else indices
