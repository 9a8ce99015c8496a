"""One accepted call of `publish`, which will become a version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..tensors.bits import State
from .upload.segments import TensorTable


@dataclass(frozen=True, slots=True)
class Publication:
    """The weights of one version, and everything that goes with them."""

    weights: State
    table: TensorTable
    """Names, types and shapes as they are published. The weights of the caller may have other types."""
    step: int | None
    meta: Mapping[str, str]
    attachments: Mapping[str, bytes] | None
    """The files of the version, by name. None: the version keeps the files of the one before."""
    is_owned: bool = False
    """Whether `weights` are a copy in the publisher's own memory, which may become the baseline. Otherwise they are the caller's."""
