"""One accepted call of `publish`, which will become a version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..format.records.record_parts import RecipeRecord
from ..quantise import QuantisedLayout
from ..tensors.bits import State
from .upload.segments import TensorTable


@dataclass(frozen=True, slots=True)
class Publication:
    """The weights of one version, and everything that goes with them."""

    weights: State
    table: TensorTable
    """Names, types and shapes as they are published. The weights of the caller may have other types, or are still to be quantised."""
    step: int | None
    meta: Mapping[str, str]
    attachments: Mapping[str, bytes] | None
    """The files of the version, by name. None: the version keeps the files of the one before."""
    is_owned: bool = False
    """Whether `weights` are a copy in the publisher's own memory, which may become the baseline. Otherwise they are the caller's."""
    recipe: RecipeRecord | None = None
    """How the published weights are quantised. None: not at all."""
    layout: QuantisedLayout | None = None
    """The tensors that are published for `weights`, if they are still to be quantised."""

    @property
    def located(self) -> State:
        """Published names with tensors that are on the devices where the published tensors are to be made."""
        if self.layout is None:
            return self.weights
        sources = {output.name: output.name if output.weight is None else output.weight.source for output in self.layout.outputs.values()}
        tensors = {source: self.weights[source] for source in set(sources.values())}  # each is read once: it may be made at each access
        return {name: tensors[source] for name, source in sources.items()}
