"""Quantising many whole weights in host memory with one call of native code, whose table says where everything is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codec.bits import HostBits, in_host_memory, on_gpu
from ..tensors.bits import State, Tensor, TensorBits, tensor_bits, typed
from .layout import Output, QuantisedLayout, QuantisedWeight
from .native import NativeQuantiser, WeightTable, nonfinite_elements, source_number
from .reference import nonfinite_weight

SourceOf = Callable[[str], TensorBits]
"""Returns a source tensor of the right type and shape, by its name."""

_Column = NDArray[np.uint64]


class WholeWeights:
    """The weights of a layout all of whose outputs are wanted, together with those of all weights that share a scale with them.

    Parameters
    ----------
    layout
        The layout.
    names
        The names of the outputs that are wanted.
    """

    def __init__(self, layout: QuantisedLayout, names: Iterable[str]) -> None:
        self._layout = layout
        self._weights = _whole(layout, dict.fromkeys(names))
        self.outputs = {name for weight in self._weights for name in weight.outputs.values()}
        """The names of their outputs."""
        self._forms = {role: [layout.outputs[weight.outputs[role]] for weight in self._weights] for role in _roles(self._weights)}
        self._sources = list(dict.fromkeys(weight.source for weight in self._weights))
        numbers = {name: number for number, name in enumerate(self._sources)}
        self._source_of = np.array([numbers[weight.source] for weight in self._weights], np.int64)
        self._first_rows = np.array([weight.first_row for weight in self._weights], np.int64)
        self._rows = np.array([weight.rows for weight in self._weights], np.int64)
        self._columns = np.array([weight.columns for weight in self._weights], np.int64)
        self._types = np.array([source_number(weight.dtype.name) for weight in self._weights], np.uint8)
        groups: dict[str, int] = {}
        self._groups = np.array([groups.setdefault(weight.group, len(groups)) for weight in self._weights], np.int64)

    def quantise(
        self, quantiser: NativeQuantiser, source_of: SourceOf, previous: State | None, out: Mapping[str, Tensor], found: dict[str, Tensor]
    ) -> None:
        """Put all outputs into `found`: the tensors of `out`, where it has them. Raise as `QuantisedLayout.quantise` does."""
        if not self._weights:
            return
        rows = [_rows(source_of(name)) for name in self._sources]
        strides = np.array([array.strides[0] for array in rows], np.int64)[self._source_of]
        data = np.array([_address(array) for array in rows], np.int64)[self._source_of] + self._first_rows * strides
        targets = {role: [_target(form, out, found) for form in forms] for role, forms in self._forms.items()}
        before = self._previous(previous)
        table = WeightTable(
            data.astype(np.uint64),
            strides,
            self._rows,
            self._columns,
            self._types,
            self._column(targets["codes"]),
            self._column(targets["scale"]),
            self._column(targets.get("global_scale")),
            self._column(before.get("scale")),
            self._column(before.get("global_scale")),
            self._groups,
        )
        bad = quantiser.quantise_weights(self._layout.recipe, table)
        if bad is not None:
            weight = self._weights[bad]
            values = typed(rows[self._source_of[bad]], weight.dtype)[weight.first_row : weight.first_row + weight.rows]
            raise nonfinite_weight(weight.source, nonfinite_elements(values))
        for role, arrays in targets.items():
            for form, array in zip(self._forms[role], arrays, strict=True):
                if role == "shape":
                    array[:] = (form.weight.rows, form.weight.columns) if form.weight is not None else 0
                if form.name not in found:  # the tensor of `out` cannot be written in place
                    np.copyto(in_host_memory(tensor_bits(form.name, out[form.name]).bits), array.view(form.dtype.bits))
                    found[form.name] = out[form.name]

    def _previous(self, previous: State | None) -> dict[str, list[NDArray[Any] | None]]:
        """Return the previous scales by role; None for those of a weight that must have fresh ones."""
        if previous is None or not self._layout.recipe.sticky:
            return {}
        roles = [role for role in ("scale", "global_scale") if role in self._forms]
        found = {role: [_published(form, previous) for form in self._forms[role]] for role in roles}
        fresh = np.array([any(one is None for one in arrays) for arrays in zip(*found.values(), strict=True)])
        if self._layout.recipe.shares_scales:
            shared = [b"" if array is None else array.tobytes() for array in found[roles[-1]]]
            first = dict(zip(reversed(self._groups.tolist()), reversed(shared), strict=True))
            differs = np.array([own != first[group] for own, group in zip(shared, self._groups.tolist(), strict=True)])
            fresh = np.isin(self._groups, self._groups[fresh | differs])
        return {role: [None if no else array for no, array in zip(fresh.tolist(), arrays, strict=True)] for role, arrays in found.items()}

    def _column(self, arrays: list[NDArray[Any] | None] | list[NDArray[Any]] | None) -> _Column:
        if arrays is None:
            return np.zeros(len(self._weights), np.uint64)
        return np.array([0 if array is None else _address(array) for array in arrays], np.uint64)


def _whole(layout: QuantisedLayout, wanted: dict[str, None]) -> list[QuantisedWeight]:
    outputs = [layout.output(name) for name in wanted]
    weights = {weight.module: weight for output in outputs if (weight := output.weight) is not None}
    found = [weight for weight in weights.values() if not weight.is_transposed and all(name in wanted for name in weight.outputs.values())]
    if not layout.recipe.shares_scales:
        return found
    modules = {weight.module for weight in found}
    whole = {weight.group for weight in found if all(other.module in modules for other in layout.groups[weight.group])}
    return [weight for weight in found if weight.group in whole]


def _roles(weights: list[QuantisedWeight]) -> list[Any]:
    return list(weights[0].outputs) if weights else []


def _rows(source: TensorBits) -> HostBits:
    """Return a source as rows whose elements follow each other: its own memory if possible, else a copy."""
    bits = in_host_memory(source.bits)
    rows = bits.reshape(-1, bits.shape[-1])
    return rows if rows.strides[1] == rows.itemsize and rows.flags.aligned else np.ascontiguousarray(rows)


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _target(form: Output, out: Mapping[str, Tensor], found: dict[str, Tensor]) -> NDArray[Any]:
    """Return the array that native code writes an output into. Put it into `found`, unless it must be copied afterwards."""
    given = out.get(form.name)
    if given is None:
        new = np.empty(form.shape, form.dtype.numpy)
        found[form.name] = new
        return new
    target = tensor_bits(form.name, given)
    form.check(target)
    bits = in_host_memory(target.bits)
    if bits.flags.c_contiguous and bits.flags.aligned and bits.flags.writeable:
        found[form.name] = given
        return bits.view(form.dtype.numpy)
    return np.empty(form.shape, form.dtype.numpy)


def _published(form: Output, previous: State) -> NDArray[Any] | None:
    given = previous.get(form.name)
    if given is None:
        return None
    tensor = tensor_bits(form.name, given)
    if tensor.dtype != form.dtype or tensor.shape != form.shape or on_gpu(tensor.bits):
        return None
    return np.ascontiguousarray(in_host_memory(tensor.bits))
