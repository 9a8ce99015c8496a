"""Reads and writes tensors of a checkpoint where placements say that they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from ....dtypes import DType
from ....subscribe.tensor_table import TensorSpec
from ....tensors.torch_types import torch_dtype
from .loader_copies import reach
from .nested_strides import is_contiguous, positions_of
from .types import Nest, Placement, Scatter
from .unit_values import halves

PIECE = 1 << 22
"""The number of units whose positions are computed in one operation."""
_ALIGNMENT = 16
"""The GPU codec reads tensors at addresses that are multiples of this."""


def distinct(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    """Return placements without those that say the same as an earlier one, as tied weights do."""
    found = {(each.memory.data_ptr(), each.nests, each.unit_bits): each for each in reversed(list(placements))}
    return tuple(reversed(list(found.values())))


def numel(spec: TensorSpec) -> int:
    """Return the number of elements of a tensor."""
    return math.prod(spec.shape)


def unit_count(spec: TensorSpec, placement: Placement) -> int:
    """Return the number of units of a whole tensor."""
    return numel(spec) * (1 if placement.widened is not None else spec.dtype.width // placement.unit_bits)


def coverage(spec: TensorSpec, placements: Sequence[Placement]) -> str:
    """Return whether placements have all units of a tensor: "whole", "part" or "none"."""
    if not placements:
        return "none"
    counts = [each.nests[0].numel if len(each.nests) == 1 else 0 for each in placements]
    total = unit_count(spec, placements[0])
    if total in counts:
        return "whole"
    if all(len(each.nests) == 1 for each in placements) and sum(counts) < total:
        return "part"
    has = torch.zeros(total, dtype=torch.bool)
    for each in placements:
        if len(each.nests) == 1:
            source_view(each.nests[0], has).fill_(True)
        else:
            for start in range(0, total, PIECE):
                end = min(total, start + PIECE)
                has[start:end] |= positions_of(each.nests, start, end, has.device) >= 0
    return "whole" if bool(has.all()) else "part" if bool(has.any()) else "none"


def direct_view(spec: TensorSpec, placements: Sequence[Placement]) -> torch.Tensor | None:
    """Return the memory of a tensor in checkpoint shape and type. None if it is not one range with the same bits."""
    if len(placements) != 1:
        return None
    (placement,) = placements
    nest = placement.nests[0]
    is_range = len(placement.nests) == 1 and is_contiguous(nest) and placement.widened is None and placement.table is None
    if not is_range or nest.target_start * placement.unit_bits % spec.dtype.width:
        return None
    memory, start, count = placement.memory, nest.target_start, nest.numel
    if placement.unit_bits == 4:
        start, count = start // 2, count // 2
    flat = memory[start : start + count]
    if flat.data_ptr() % _ALIGNMENT:
        return None
    return flat.view(torch_dtype(spec.dtype)).view(spec.shape)


def gather(spec: TensorSpec, placements: Sequence[Placement], device: torch.device) -> torch.Tensor:
    """Return a tensor in checkpoint layout, as new memory on a device. Elements that no placement has are zero bits."""
    whole = torch.zeros(numel(spec), dtype=torch_dtype(spec.dtype, bits=True), device=device)
    is_packed = bool(placements) and placements[0].unit_bits == 4
    units = torch.zeros(unit_count(spec, placements[0]), dtype=torch.int8, device=device) if is_packed else whole
    for placement in placements:
        if len(placement.nests) == 1:
            (nest,) = placement.nests
            source_view(nest, units).copy_(_read(placement, nest, spec.dtype))
            continue
        for start in range(0, units.numel(), PIECE):
            end = min(units.numel(), start + PIECE)
            positions = positions_of(placement.nests, start, end, device)
            here = positions >= 0
            units[start:end][here] = _read_at(placement, positions[here], spec.dtype)
    if is_packed:
        pairs = units.view(-1, 2)
        whole = (pairs[:, 0] | (pairs[:, 1] << 4)).view(whole.dtype)
    return whole.view(torch_dtype(spec.dtype)).view(spec.shape)


def copies_differ(spec: TensorSpec, placements: Sequence[Placement]) -> bool:
    """Return whether elements that several placements have are not the same in all of them. `gather` returns only one of them.

    Parameters
    ----------
    spec
        The tensor.
    placements
        Where its elements are.
    """
    if len(placements) < 2 or any(len(each.nests) > 1 for each in placements):  # it would take long to compare the latter
        return False
    if sum(each.nests[0].numel for each in placements) <= unit_count(spec, placements[0]):  # each element has one position
        return False
    device = placements[0].memory.device
    whole = gather(spec, placements, device).view(torch.int8)
    turns = ([*placements[:number], *placements[number + 1 :], placements[number]] for number in range(len(placements) - 1))
    return not all(torch.equal(gather(spec, turn, device).view(torch.int8), whole) for turn in turns)


def flat_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor, flat, in its own type."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (storage.nbytes() // tensor.element_size(),))


def source_view(nest: Nest, units: torch.Tensor) -> torch.Tensor:
    """Return the units of a nest in the tensor that it comes from."""
    return units.as_strided(nest.sizes, nest.sources, nest.source_start)


def _read(placement: Placement, nest: Nest, dtype: DType) -> torch.Tensor:
    """Return the units of a nest, as the checkpoint has them."""
    if placement.unit_bits != 4:
        return _narrowed(placement, nest.view(placement.memory), dtype)
    first = nest.target_start // 2
    last = (nest.target_start + reach(nest)) // 2
    some = placement.memory[first : last + 1]
    units = halves(some)
    return _from_table(placement, Nest(nest.sizes, nest.sources, nest.targets, 0, nest.target_start - 2 * first).view(units))


def _read_at(placement: Placement, positions: torch.Tensor, dtype: DType) -> torch.Tensor:
    if placement.unit_bits != 4:
        return _narrowed(placement, placement.memory[positions], dtype)
    some = placement.memory[positions >> 1]
    return _from_table(placement, torch.where(positions % 2 == 1, (some >> 4) & 15, some & 15))


def _narrowed(placement: Placement, values: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Return elements as the checkpoint has them. An element in memory that is no widened one gives other bits than any right one.

    Some NaNs of types other than bfloat16 count as such elements, because conversions change their bits.
    """
    if placement.widened is None:
        return values
    if (dtype.name, placement.widened.name) == ("BF16", "F32"):
        bits = (values >> 16).to(torch.int16)
        return torch.where(values & 0xFFFF == 0, bits, ~bits)
    wide = values.contiguous().view(torch_dtype(placement.widened))
    narrow = wide.to(torch_dtype(dtype))
    is_exact = narrow.to(wide.dtype).view(values.dtype) == values
    bits = narrow.view(torch_dtype(dtype, bits=True))
    return torch.where(is_exact, bits, ~bits)


def _from_table(placement: Placement, values: torch.Tensor) -> torch.Tensor:
    if placement.table is None:
        return values
    back = [placement.table.index(value) for value in range(16)]
    return torch.tensor(back, dtype=torch.int8, device=values.device)[values.long()]


def as_bits(values: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Return elements as signed integers."""
    return values.contiguous().view(torch_dtype(dtype, bits=True))


def scatters(placement: Placement, dtype: DType, indices: torch.Tensor, values: torch.Tensor) -> Iterator[Scatter]:
    """Yield where these elements go by one placement."""
    if placement.unit_bits == 4:
        per_element = dtype.width // 4
        indices = (indices[:, None] * per_element + torch.arange(per_element, device=indices.device)).view(-1)
        values = halves(values.view(torch.int8))
        if placement.table is not None:
            values = torch.tensor(placement.table, dtype=torch.int8, device=values.device)[values.long()]
    elif placement.widened is not None:
        wide = torch_dtype(placement.widened)
        values = values.view(torch_dtype(dtype)).to(wide).view(torch_dtype(placement.widened, bits=True))
    for nest in placement.nests:
        here, indices = nest.find(indices)
        values = values[here]
    narrow = torch.int32 if placement.memory.numel() < 2**31 else torch.int64
    if placement.unit_bits != 4:
        if indices.numel():
            yield Scatter(placement.memory, indices.to(narrow), values)
        return
    for half in (0, 1):
        chosen = indices % 2 == half
        if bool(chosen.any()):
            yield Scatter(placement.memory, (indices[chosen] >> 1).to(narrow), values[chosen], half=half)
