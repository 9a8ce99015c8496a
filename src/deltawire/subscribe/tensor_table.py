"""The types and shapes of all tensors of a chain, by their names. Deltas of format version 3 do not contain names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ..dtypes import DType


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Type and shape of a tensor of the chain."""

    dtype: DType
    shape: tuple[int, ...]


TensorTable: TypeAlias = Mapping[str, TensorSpec]
"""All tensors of the chain, in ascending order of their names."""
