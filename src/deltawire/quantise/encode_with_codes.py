"""Quantising weights in host memory while their codes are encoded: codes are then in the processor's cache, and need no other memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ..codec.bits import on_gpu
from ..tensors.bits import State, Tensor, tensor_bits, typed
from .layout import Output, QuantisedWeight
from .native import NativeQuantiser, nonfinite_elements
from .recipe import Recipe
from .reference import nonfinite_weight
from .weight_table import WeightTable
from .whole_weights import WholeWeights

if TYPE_CHECKING:
    from .. import _native

_ALIGNMENT = 1 << 12

_UNWRITTEN = frozenset({"fp8-block"})
"""The recipes whose codes need not be written. The others are not limited by the speed of memory, and it takes less processor time to write
codes where they are kept than to a thread's own memory."""

_WIDE = 1 << 16
"""If a weight has more columns, codes are written. A thread's own memory for 128 rows would be too large."""


class ReusedMemory:
    """Memory for large arrays. The system clears new memory page by page, so memory that is used again is faster."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def arrays(self, outputs: Sequence[Output]) -> dict[str, NDArray[Any]]:
        """Return arrays for these outputs. They are valid until the next call, and their contents are undefined."""
        ends = np.cumsum([output.nbytes + -output.nbytes % _ALIGNMENT for output in outputs], dtype=np.int64).tolist()
        if outputs and self._memory.size < ends[-1]:
            self._memory = np.empty(0, np.uint8)  # frees it before more is allocated
            self._memory = np.empty(ends[-1], np.uint8)
        starts = [0, *ends]
        return {
            output.name: self._memory[start : start + output.nbytes].view(output.dtype.numpy).reshape(output.shape)
            for output, start in zip(outputs, starts, strict=False)
        }


class PendingWeights:
    """Quantises weights later: a `TableQuantiser` that only notes what is to be done.

    Parameters
    ----------
    quantiser
        Quantises them.
    whole
        The weights.
    state
        Their sources, which must not change until they are quantised.
    """

    def __init__(self, quantiser: NativeQuantiser, whole: WholeWeights, state: State) -> None:
        self._quantiser = quantiser
        self._whole = whole
        self._state = state
        self._sources: dict[str, Tensor] = {}
        """The sources as arrays. This keeps them alive, because a state may make new arrays at each access."""
        self._kept_alive: tuple[object, ...] = ()
        self._keeps_codes = False
        self.preparation: _native.Quantisation | None = None
        """The native object that quantises them; None until `start` has succeeded."""

    def start(self, previous: State | None, out: dict[str, NDArray[Any]], *, keeps_codes: bool) -> dict[str, Tensor] | None:
        """Return all outputs of the weights, which are not written yet. Return None if something is not a plain array in host memory.

        `previous` and `out` are as for `WholeWeights.quantise_arrays`. They must not change either until the weights are quantised. With
        `keeps_codes`, codes are written when they are encoded.
        """
        is_wide = any(weight.columns > _WIDE for weight in self._whole.weights)
        self._keeps_codes = keeps_codes or is_wide or self._whole.recipe.name not in _UNWRITTEN
        sources = _as_arrays(self._whole.weights, self._state)
        if sources is None:
            return None
        made = self._whole.quantise_arrays(self, sources, previous, out)
        self._sources = sources
        self._kept_alive = (previous, made)
        return made

    def quantise_weights(self, recipe: Recipe, weights: WeightTable) -> int | None:
        self.preparation = self._quantiser.start(recipe, weights, keeps_codes=self._keeps_codes)
        return None

    def finish(self) -> None:
        """Write what is not written yet. Raise as `check` does; then outputs are undefined."""
        assert self.preparation is not None
        self.preparation.finish(self._quantiser.threads)
        self.check()

    def check(self) -> None:
        """Raise `NonFiniteWeights` if a weight was quantised that is NaN or infinite."""
        assert self.preparation is not None
        bad = self.preparation.first_nonfinite()
        if bad is not None:
            weight = self._whole.weights[bad]
            source = typed(tensor_bits(weight.source, self._sources[weight.source]).bits, weight.dtype)
            rows = source.reshape(-1, weight.columns)[weight.first_row : weight.first_row + weight.rows]
            raise nonfinite_weight(weight.source, nonfinite_elements(rows))


def _as_arrays(weights: Iterable[QuantisedWeight], state: State) -> dict[str, Tensor] | None:
    """Return the sources of weights as arrays that share their memory; None if one is missing, or on a GPU."""
    sources = {name: state.get(name) for name in dict.fromkeys(weight.source for weight in weights)}
    if set(map(type, sources.values())) <= {np.ndarray}:
        return cast("dict[str, Tensor]", sources)
    arrays: dict[str, Tensor] = {}
    for name, source in sources.items():
        tensor = None if source is None else tensor_bits(name, source)
        if tensor is None or tensor.whole is not None or on_gpu(tensor.bits):
            return None
        arrays[name] = typed(tensor.bits, tensor.dtype)
    return arrays
