"""The shared types of learnt layouts.

A layout is described in *units*. A unit is one element of a checkpoint tensor, or one 4-bit half of a byte for packed 4-bit weights. A
packed tensor of 32-bit integers has 8 units in each element; the unit with the lowest bits is the first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from ....dtypes import DType
from ....subscribe.tensor_table import TensorSpec


@dataclass(frozen=True, slots=True)
class Nest:
    """Positions as nested strides.

    The unit `source_start + Σ d·sources` of the source is the unit `target_start + Σ d·targets` of the target, for all numbers d with
    0 ≤ d < size in each dimension. Source strides descend, and each is larger than what the dimensions after it reach together. So each
    unit of the source is in the nest at most once.

    Parameters
    ----------
    sizes
        The number of steps in each dimension.
    sources
        The stride of each dimension in the source.
    targets
        The stride of each dimension in the target.
    source_start
        The first unit of the source.
    target_start
        The unit of the target that the first unit of the source goes to.
    """

    sizes: tuple[int, ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    source_start: int = 0
    target_start: int = 0

    @property
    def numel(self) -> int:
        """The number of units in the nest."""
        return math.prod(self.sizes)

    def find(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which of these units of the source are in the nest (bool), and the targets of those (int64).

        Parameters
        ----------
        indices
            Units of the source, as integers, in any order. The results are on the same device.
        """
        rest = indices.to(torch.int64) - self.source_start
        here = rest >= 0
        targets = torch.full_like(rest, self.target_start)
        for size, source, target in zip(self.sizes, self.sources, self.targets, strict=True):
            number = torch.div(rest, source, rounding_mode="floor")
            here &= number < size
            rest = rest - number * source
            targets += number * target
        here &= rest == 0
        return here, targets[here]

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the units in the order of the source, as a view of the target.

        Parameters
        ----------
        memory
            The target, flat, with one element for each unit.
        """
        return memory.as_strided(self.sizes, self.targets, memory.storage_offset() + self.target_start)


@dataclass(frozen=True, slots=True)
class Placement:
    """The positions of some units of a checkpoint tensor in the model's memory.

    Parameters
    ----------
    nests
        One or more nests, applied in order: the target of each is the source of the next.
    memory
        The whole storage that holds the units, flat, as signed integers: of `unit_bits`, or int8 for 4-bit units.
    unit_bits
        The width of a unit in memory: 4, 8, 16, 32 or 64.
    widened
        The type in memory, if a loader widens elements. Widening can be undone exactly.
    table
        For each 4- or 8-bit value of the checkpoint, the value in memory. None if they are the same.
    """

    nests: tuple[Nest, ...]
    memory: torch.Tensor
    unit_bits: int
    widened: DType | None = None
    table: tuple[int, ...] | None = None


Kind = Literal["direct", "mapped", "partial", "module", "absent"]
"""The way in which a worker holds a tensor of the chain.

direct
    Its memory is the tensor of the checkpoint: one contiguous range with the same bits.
mapped
    All its elements are in memory, at other positions, or with another width.
partial
    This worker holds only some of its elements.
module
    Its elements cannot be read back from memory. A change needs a module to be recomputed or to be loaded anew.
absent
    This worker holds nothing of it.
"""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The way in which this worker holds a tensor of the chain.

    Parameters
    ----------
    spec
        Its type and shape in the checkpoint.
    kind
        How it is held.
    placements
        Where its units are. A unit may be in several of them, such as in tied weights or in a draft model: all of them must be written.
    direct
        The live memory as a contiguous tensor in checkpoint shape and type, if `kind` is "direct".
    modules
        The names of modules to recompute or to load anew if it changes.
    reason
        Why it is neither direct nor mapped.
    """

    spec: TensorSpec
    kind: Kind
    placements: tuple[Placement, ...] = ()
    direct: torch.Tensor | None = None
    modules: tuple[str, ...] = ()
    reason: str = ""


@dataclass(slots=True)
class Scatter:
    """New values for some units of one storage.

    Parameters
    ----------
    memory
        The storage, flat, as signed integers.
    indices
        Distinct positions in `memory`. For 4-bit units they are positions of bytes.
    new
        The new values, in the type of `memory`. For 4-bit units they are from 0 to 15.
    old
        The values before the first exchange, which sets them.
    half
        For 4-bit units: 0 if they are the low halves of these bytes, 1 if they are the high halves. None for wider units.
    """

    memory: torch.Tensor
    indices: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor | None = None
    half: Literal[0, 1] | None = None


@dataclass(frozen=True, slots=True)
class ModuleRule:
    """The steps that a module needs after some of its inputs have changed.

    Parameters
    ----------
    name
        The name of the module in the model.
    how
        "recompute": vLLM's own function computes its derived tensors again, in place. "reprocess": its raw tensors are processed again.
        "load_anew": all its tensors are loaded again. "refuse": an update that changes an input is refused.
    inputs
        The tensors of the chain that it depends on.
    reason
        Why it cannot be written element by element.
    """

    name: str
    how: Literal["recompute", "reprocess", "load_anew", "refuse"]
    inputs: tuple[str, ...]
    reason: str
