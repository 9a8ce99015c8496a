"""Finds tensors of a state that share memory, so that a write to one of them changes another."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ..codec.bits import on_gpu
from ..errors import TensorsTied
from ..tensors.bits import TensorBits


def are_separate(tensors: Sequence[TensorBits]) -> bool:
    """Tell whether no two tensors overlap in memory. In nearly all states this is so, and no other check is needed."""
    bounds = np.array([tensor.byte_bounds for tensor in tensors if tensor.size], np.int64).reshape(-1, 2)
    ordered = bounds[np.argsort(bounds[:, 0])]
    return bool((ordered[1:, 0] >= ordered[:-1, 1]).all())


def check_overlap(targets: Sequence[TensorBits], others: Sequence[TensorBits], changing: Collection[str]) -> None:
    """Raise `TensorsTied` if a write to a target would change another tensor. `others` does not include tensors that change together."""
    tensors = [tensor for tensor in [*targets, *others] if tensor.size]
    bounds = sorted((*tensor.byte_bounds, index) for index, tensor in enumerate(tensors))
    open_: list[tuple[int, int]] = []  # the ends and indices of tensors that extend beyond the start of the next one
    for start, end, index in bounds:
        open_ = [(earlier_end, earlier) for earlier_end, earlier in open_ if earlier_end > start]
        for _, earlier in open_:
            if min(index, earlier) < len(targets) and share_memory(tensors[index], tensors[earlier]):
                a, b = sorted([tensors[index].name, tensors[earlier].name])
                raise TensorsTied.of(a, b, changed=[name for name in (a, b) if name in changing])
        open_.append((end, index))


def share_memory(a: TensorBits, b: TensorBits) -> bool:
    """Tell whether two tensors have an element in common, or may have one."""
    one, other = a.bits, b.bits
    if on_gpu(one) or on_gpu(other):
        return True  # on a GPU, overlapping ranges of addresses are enough
    shares_memory: Any = np.shares_memory  # releases of NumPy declare its arguments differently
    try:
        return bool(shares_memory(one, other, max_work=10_000))
    except np.exceptions.TooHardError:
        return True
