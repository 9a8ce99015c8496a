"""Quantises what is published: the layout, the published tensors, and the record of the recipe (docs/quantise.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..dtypes import DType, dtype_named
from ..errors import LimitExceeded, NonFiniteWeights
from ..format.records.record_parts import RecipeRecord
from ..quantise import QuantisedLayout, Recipe, TensorSpec
from ..quantise.encode_with_codes import ReusedMemory
from ..quantise.quantise import quantise_to_encode
from ..quantise.recipe import RecipeLike
from ..quantise.reference import NONFINITE_HINT
from ..tensors import torch_types
from ..tensors.bits import State
from ..tensors.casting import Casting, DTypeLike, WireDType
from ..tensors.finite import count_nonfinite
from .attachments.quantised_config import CONFIG, with_quantization, without_quantization
from .publish_warnings import describe_nonfinite
from .snapshots import Arrays, copy_tensors
from .take_over import TakeOver
from .upload.segments import SEGMENT_BYTES, TensorTable

_MOST_RECORD_BYTES = 8192
"""Most bytes that a recipe takes in a commit."""


class Quantising:
    """Quantises the states of one publisher.

    Parameters
    ----------
    recipe
        The recipe, or its spelling.
    dtype
        The type of floating-point tensors that are not quantised. None: bfloat16.
    """

    def __init__(self, recipe: RecipeLike, dtype: WireDType | None) -> None:
        self.recipe = Recipe.of(recipe)
        self.record = record_of(self.recipe)
        self._dtype = dtype
        self._tables: tuple[QuantisedLayout, TensorTable] | None = None

    @property
    def kept_dtype(self) -> DType | None:
        """The one type of all floating-point tensors that are not quantised; None if there is no such type."""
        return dtype_named("BF16") if self._dtype is None else Casting(self._dtype).dtype

    def layout_of(self, state: State) -> QuantisedLayout:
        """Return which tensors are published for a state. Raises a `TensorError` or `PublishError` if they cannot be published."""
        table, dtype = TensorTable.of(state), self._dtype
        if callable(dtype) and not isinstance(dtype, type):
            dtype = _ChosenTypes(tuple((name, dtype(name, tensor)) for name, tensor in state.items()))
        return self.layout_for(table, dtype)

    def layout_for(self, table: TensorTable, dtype: WireDType | None = None) -> QuantisedLayout:
        """Return which tensors are published for source tensors of these names, types and shapes.

        `dtype` is the type of those that are not quantised, if it is not that of the publisher.
        """
        specs = {name: (own, shape) for name, own, shape in zip(table.names, table.dtypes, table.shapes, strict=True)}
        return QuantisedLayout.of(self.recipe, specs, self._dtype if dtype is None else dtype)

    def table_of(self, layout: QuantisedLayout) -> TensorTable:
        """Return the names, types and shapes of the published tensors."""
        if self._tables is None or self._tables[0] is not layout:
            outputs = sorted(layout.outputs.values(), key=lambda output: output.name)
            names, dtypes = tuple(output.name for output in outputs), tuple(output.dtype for output in outputs)
            self._tables = layout, TensorTable(names, dtypes, tuple(output.shape for output in outputs))
        return self._tables[1]


class QuantisedConfig:
    """Keeps config.json in step with how the weights of a publisher are quantised.

    Parameters
    ----------
    quantising
        How they are quantised; None if they are not.
    chain
        The chain whose version before leaves its config.json to the next one, if the user does not give one. None: it does not.
    """

    def __init__(self, quantising: Quantising | None, chain: TakeOver | None) -> None:
        self._quantising = quantising
        self._stored: bytes | None = None
        """The config.json that stays unless the user gives another, and that does not fit how these weights are quantised."""
        before = None if chain is None or chain.start is None else chain.start.recipe
        if chain is not None and not (quantising is None and before is None):
            self._stored = chain.read_file(CONFIG)

    def written_into(self, files: dict[str, bytes], layout: QuantisedLayout | None) -> dict[str, bytes]:
        """Return the files of a version, with a config.json that says how its weights are quantised, if there is one."""
        config = files.get(CONFIG, self._stored)
        if config is None:
            return files
        if self._quantising is not None and layout is not None:
            return files | {CONFIG: with_quantization(config, layout.quantization_config(), self._quantising.kept_dtype)}
        return files if CONFIG in files else files | {CONFIG: without_quantization(config)}


@dataclass(frozen=True)
class _ChosenTypes:
    """The types that the user's function chose for the tensors of a state. Equal choices are equal, so that layouts are made once."""

    chosen: tuple[tuple[str, DTypeLike | None], ...]

    @cached_property
    def _by_name(self) -> dict[str, DTypeLike | None]:
        return dict(self.chosen)

    def __call__(self, name: str, spec: TensorSpec) -> DTypeLike | None:
        return self._by_name[name]


def record_of(recipe: Recipe) -> RecipeRecord:
    """Return the recipe as commits name it. Raises `ValueError` or `LimitExceeded` if a commit cannot hold it."""
    for pattern in recipe.ignore:
        if not pattern.isprintable():
            raise ValueError(f"the pattern {pattern!r} has characters that cannot be printed, and a version cannot record it")
    values = recipe.to_json()
    record = RecipeRecord(values.pop("name"), values.pop("release"), values)
    size = len(json.dumps(record.plain()))
    if size > _MOST_RECORD_BYTES:
        raise LimitExceeded(
            f"the recipe has {size:,} bytes with its patterns; a version has room for {_MOST_RECORD_BYTES:,}.",
            hint="Use fewer or shorter patterns.",
        )
    return record


def quantise(
    layout: QuantisedLayout,
    names: Iterable[str],
    state: State,
    previous: State | None,
    out: Mapping[str, Any] | None = None,
    *,
    threads: int | None = None,
) -> Arrays:
    """Return published tensors of a state. Raises `NonFiniteWeights` if one of their weights is NaN or infinite.

    `previous` are the tensors of the version before, whose scales stay where that is possible. `out` has the memory to write into.
    """
    chosen = list(names)
    kept = [name for name in chosen if layout.outputs[name].weight is None]
    weights = [name for name in chosen if layout.outputs[name].weight is not None]
    found: Arrays = {}
    for some in (kept, weights):  # kept ones first: their check waits for a GPU, and should not wait for kernels that quantise
        if not some:
            continue
        if out is not None and _is_on_gpu_for_host(layout, some, state, out):
            for part in _parts(layout, some):
                copy_tensors(layout.quantise(part, state, previous, threads=threads), out)
                found.update({name: out[name] for name in part})
        else:
            found |= layout.quantise(some, state, previous, out, threads=threads)
        if some is kept:
            refuse_nonfinite({name: found[name] for name in kept}, threads=threads)
    return {name: found[name] for name in chosen}


def quantise_segments(
    layout: QuantisedLayout,
    names: Iterable[str],
    state: State,
    previous: State | None,
    *,
    memory: ReusedMemory | None = None,
    threads: int | None = None,
    keeps_codes: bool = False,
) -> State:
    """Return what `quantise` returns, for a caller that encodes it (`quantise_to_encode`).

    If a weight that is quantised is NaN or infinite, encoding raises `NonFiniteWeights`. `keeps_codes` is for a caller that reads the
    tensors after it has encoded them.
    """
    chosen = list(names)
    kept = quantise(layout, [name for name in chosen if layout.outputs[name].weight is None], state, previous, threads=threads)
    return quantise_to_encode(layout, chosen, state, previous, memory, threads, ready=kept, keeps_codes=keeps_codes)


def _is_on_gpu_for_host(layout: QuantisedLayout, names: Iterable[str], state: State, out: Mapping[str, Any]) -> bool:
    """Tell whether weights on a GPU are to be written to host memory. They are quantised on the GPU then, and copied."""
    if torch_types.torch_tensor() is None:
        return False
    for name in names:
        weight = layout.outputs[name].weight
        source = state[name if weight is None else weight.source]
        if torch_types.gpu_holding(source) is not None and isinstance(out[name], np.ndarray):
            return True
    return False


def _parts(layout: QuantisedLayout, names: Iterable[str]) -> Iterator[list[str]]:
    """Yield names of tensors that together have about the size of a segment, so that little memory of a GPU is needed."""
    part: list[str] = []
    size = 0
    for name in names:
        output = layout.outputs[name]
        part.append(name)
        size += math.prod(output.shape) * output.dtype.itemsize
        if size >= SEGMENT_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def refuse_nonfinite(state: State, *, threads: int | None = None) -> None:
    """Raise `NonFiniteWeights` if a weight is NaN or infinite. Quantised models never publish such weights."""
    bad = count_nonfinite(state, threads=threads)
    if bad:
        raise NonFiniteWeights(f"{describe_nonfinite(bad)}. Nothing is published.", hint=NONFINITE_HINT)


def refuse_nonfinite_sources(layout: QuantisedLayout, state: State, *, threads: int | None = None) -> None:
    """Raise as `quantise` would for all tensors, but write nothing."""
    refuse_nonfinite({name: state[name] for name in layout.weights_of_source}, threads=threads)
    kept = [output.name for output in layout.outputs.values() if output.weight is None]
    for name in kept:  # one by one, because each may need a copy in another type, and large numbers may become infinite in it
        quantise(layout, [name], state, None, threads=threads)


SegmentsOf = Callable[[Sequence[int]], State]
"""Returns the tensors of segments as they are published, by the indices of the segments."""
