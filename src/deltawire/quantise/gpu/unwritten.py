"""States whose codes are not written: what is published for weights on one GPU, in columns, so that Python does little for each weight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np
import torch
from numpy.typing import NDArray

from ...codec.bits import Bits, BitsColumn, QuantisedBits, ScalesOnDevice, on_gpu
from ...codec.gpu import device as devices
from ...codec.gpu.kernel_table import MAKES_SCALES, QUANTISED
from ...tensors.bits import State, Tensor, UnwrittenTensor, named_bits
from ...tensors.columns import Columns, ColumnState, Layout
from ...tensors.torch_types import torch_dtype
from ...tensors.unwritten_state import UnwrittenState
from ..layout import Output, Role
from ..reference import nonfinite_weight
from .quantised_codes import ScaleQuantiser

if TYPE_CHECKING:
    from ..whole_weights import WholeWeights

_ALIGNMENT = 16
_VECTOR = 8
"""The number of columns is a multiple of this."""


class UnwrittenForm:
    """The form of such a state, which is the same for every version.

    Parameters
    ----------
    outputs
        All tensors of the state, also those that are not quantised.
    whole
        The weights that are quantised, and all that share a scale with them.
    unwritten
        The roles of tensors that are not written.
    """

    def __init__(self, outputs: Collection[Output], whole: WholeWeights, unwritten: Collection[Role]) -> None:
        ordered = sorted(outputs, key=lambda output: output.name)
        self.layout = Layout([out.name for out in ordered], [out.dtype for out in ordered], [out.shape for out in ordered])
        self.whole = whole
        self.unwritten = unwritten
        self.sources = sorted({weight.source for weight in whole.weights})
        number_of = {name: number for number, name in enumerate(self.sources)}
        self.source_of = np.array([number_of[weight.source] for weight in whole.weights], np.int64)
        self.kept = np.array([number for number, output in enumerate(ordered) if output.weight is None], np.int64)
        """The indices of tensors that are not quantised."""
        index = {output.name: number for number, output in enumerate(ordered)}
        self.made: dict[Role, list[Output]] = {
            role: [whole.layout.outputs[weight.outputs[role]] for weight in whole.weights] for role in whole.weights[0].outputs
        }
        """The outputs of all weights by role."""
        self.indices = {role: np.array([index.get(form.name, -1) for form in forms], np.int64) for role, forms in self.made.items()}
        """The index of each of them in the state; -1 if it is not in the state."""
        sizes = [(role, [form.nbytes for form in forms]) for role, forms in self.made.items() if role not in (*unwritten, "shape")]
        self.offsets: dict[Role, NDArray[np.uint64]] = {}
        """Where each output that is written begins in one piece of memory."""
        self.written_bytes = 0
        for role, each in sizes:
            ends = np.cumsum(-(-np.array(each, np.int64) // _ALIGNMENT) * _ALIGNMENT)
            self.offsets[role] = (self.written_bytes + np.append(0, ends[:-1])).astype(np.uint64)
            self.written_bytes += int(ends[-1])
        self.is_readable = not any(weight.is_transposed or weight.columns % _VECTOR for weight in whole.weights)
        """Whether kernels can quantise the weights as they read them, wherever they are."""
        self._source_layout: Layout | None = None
        self._previous: tuple[Layout, dict[Role, NDArray[np.int64]]] | None = None
        self.facts = np.array([whole.facts(weight) for weight in whole.weights], np.uint32)
        """The numbers of the recipe and the type of each weight, and the size of a group."""
        self.of_index = {
            index: (role, number) for role, indices in self.indices.items() for number, index in enumerate(indices.tolist()) if index >= 0
        }
        """The role of each tensor of the state, and the number of its weight."""

    def fits(self, sources: Columns, device: torch.device) -> bool:
        """Tell whether kernels of a GPU can quantise weights as they read these sources."""
        layout, bits = sources.layout, sources.bits
        if layout is not self._source_layout:
            specs = [self.whole.layout.specs[name] for name in layout.names]
            if layout.dtypes != [spec.dtype for spec in specs] or layout.shapes != [spec.shape for spec in specs]:
                return False
            self._source_layout = layout
        starts = bits.addresses[self.source_of] + self.whole.starts
        return bits.device == device and bool(bits.are_contiguous.all()) and not (starts % _ALIGNMENT).any()

    def previous_indices(self, layout: Layout) -> dict[Role, NDArray[np.int64]]:
        """Return where a layout has the scales of each weight, by role; -1 for weights that must have fresh ones."""
        if self._previous is None or self._previous[0] is not layout:
            index = {form: number for number, form in enumerate(zip(layout.names, layout.dtypes, layout.shapes, strict=True))}
            found: dict[Role, NDArray[np.int64]] = {}
            for role in ("scale", "global_scale"):
                if role in self.made:
                    forms = [(output.name, output.dtype, output.shape) for output in self.made[role]]
                    found[role] = np.array([index.get(form, -1) for form in forms], np.int64)
            fresh = np.any([indices < 0 for indices in found.values()], axis=0)
            if self.whole.layout.recipe.shares_scales:
                fresh = np.isin(self.whole.groups, self.whole.groups[fresh])
            self._previous = layout, {role: np.where(fresh, -1, indices) for role, indices in found.items()}
        return self._previous[1]


def start_unwritten(
    form: UnwrittenForm, state: State, previous: State | None, ready: Mapping[str, Tensor], device: torch.device
) -> UnwrittenState | None:
    """Start to choose the scales of weights, and return what is published for them.

    Return None if kernels cannot quantise the weights as they read them, or if a tensor is not plain memory of the GPU.

    Parameters
    ----------
    form
        What is published.
    state
        The sources of the weights.
    previous
        The tensors that were published last, for their scales.
    ready
        The tensors that are not quantised.
    device
        The GPU.
    """
    sources = Columns.of({name: found for name in form.sources if (found := state.get(name)) is not None})
    if not form.is_readable or sources is None or len(sources) < len(form.sources) or not form.fits(sources, device):
        return None
    kept = Columns.of(dict(ready)) if ready else None
    if len(ready) != form.kept.size or (ready and (kept is None or kept.bits.device != device)):
        return None
    old = None
    if previous is not None and form.whole.layout.recipe.sticky:
        old = Columns.of(previous) if isinstance(previous, (dict, ColumnState)) else None
        if old is None or old.bits.device != device or not old.are_contiguous.all():
            return None
    work = _Work(form, sources, old, kept, device)
    return UnwrittenState(work.columns(), work.check)


class _Work:
    """Weights whose scales are being chosen, and where everything is that kernels read."""

    def __init__(self, form: UnwrittenForm, sources: Columns, old: Columns | None, kept: Columns | None, device: torch.device) -> None:
        self._form, self._sources, self._old, self._kept = form, sources, old, kept
        self._data = sources.addresses[form.source_of] + form.whole.starts
        gpu = devices.gpu_at(device)
        self._written = gpu.empty(form.written_bytes, torch.uint8)
        self._made = {role: self._written.data_ptr() + offsets for role, offsets in form.offsets.items()}
        self._previous_indices = {} if old is None else form.previous_indices(old.layout)
        self._previous = {
            role: np.where(indices < 0, np.uint64(0), old.addresses[indices])
            for role, indices in self._previous_indices.items()
            if old is not None
        }
        self._quantiser = ScaleQuantiser(device)
        self._quantiser.quantise_weights(form.whole.layout.recipe, form.whole.table(self._data, self._made, self._previous))
        self._shapes = gpu.upload(form.whole.shapes).view(torch.int64).view(-1, 2) if "shape" in form.made else None
        if self._shapes is not None:
            self._made["shape"] = self._shapes.data_ptr() + 16 * np.arange(len(self._shapes), dtype=np.uint64)

    def check(self) -> None:
        """Raise `NonFiniteWeights` if a weight has an element that is NaN or infinite. It waits for the GPU."""
        bad = self._quantiser.first_nonfinite()
        if bad is not None:
            weight = self._form.whole.weights[bad]
            raise nonfinite_weight(weight.source, int((~self._rows(bad).view(torch_dtype(weight.dtype)).isfinite()).sum()))

    def columns(self) -> Columns:
        """Return the columns of all tensors of the state."""
        form, layout = self._form, self._form.layout
        count = len(layout.names)
        addresses, contiguous = np.zeros(count, np.uint64), np.ones(count, np.bool_)
        rows = np.zeros(count, QUANTISED)
        if self._kept is not None:
            addresses[form.kept], contiguous[form.kept] = self._kept.addresses, self._kept.are_contiguous
        described = self._described()
        for role, indices in form.indices.items():
            inside = np.flatnonzero(indices >= 0)
            if role in form.unwritten:
                described["flags"] = MAKES_SCALES if role == "scale" else 0
                rows[indices[inside]] = described[inside]
            addresses[indices[inside]] = (self._data if role in form.unwritten else self._made[role])[inside]
        device, itemsizes = self._sources.bits.device, layout.itemsizes.astype(np.uint8)
        bits = BitsColumn(range(count), self._bits, addresses, layout.sizes, itemsizes, contiguous, device, rows)
        return Columns(layout, _Tensors(range(count), self.tensor), bits, np.zeros(count, np.bool_))

    def tensor(self, index: int) -> Tensor:
        """Return a tensor of the state: an `UnwrittenTensor` if it is not written."""
        form = self._form
        if index not in form.of_index:
            assert self._kept is not None
            return self._kept.tensors[int(np.searchsorted(form.kept, index))]
        role, number = form.of_index[index]
        output = form.made[role][number]
        if role in form.unwritten:
            weight, rows = form.whole.weights[number], self._rows(number)
            facts = form.whole.facts(weight)
            bits = QuantisedBits(rows, output.shape, output.dtype.itemsize, facts, self._scales(number), makes_scales=role == "scale")
            return UnwrittenTensor(bits, output.dtype, self.check)
        if role == "shape":
            assert self._shapes is not None
            return self._shapes[number]
        return self._written_tensor(role, number)

    def _bits(self, index: int) -> Bits:
        return named_bits(self._form.layout.names[index], self.tensor(index)).bits

    def _rows(self, number: int) -> torch.Tensor:
        weight, source = self._form.whole.weights[number], self._sources.bits[int(self._form.source_of[number])]
        assert on_gpu(source)
        return source.tensor.view(-1, weight.columns)[weight.first_row : weight.first_row + weight.rows]

    def _written_tensor(self, role: Role, number: int) -> torch.Tensor:
        output, start = self._form.made[role][number], int(self._form.offsets[role][number])
        return self._written[start : start + output.nbytes].view(torch_dtype(output.dtype)).view(output.shape)

    def _scales(self, number: int) -> ScalesOnDevice:
        global_scale = self._written_tensor("global_scale", number) if "global_scale" in self._made else None
        if "scale" not in self._form.unwritten:
            return ScalesOnDevice(self._written_tensor("scale", number), global_scale)
        index = int(self._previous_indices["scale"][number]) if self._previous_indices else -1
        previous = None if index < 0 or self._old is None else self._old.bits[index]
        return self._quantiser.unwritten_scales(number, global_scale, previous.tensor if on_gpu(previous) else None)

    def _described(self) -> NDArray[np.void]:
        """Describe the weights as kernels read it."""
        form, whole = self._form, self._form.whole
        found = np.zeros(len(whole.weights), QUANTISED)
        found["global_scale"] = self._made.get("global_scale", 0)
        if "scale" in form.unwritten:
            found["previous"] = self._previous.get("scale", 0)
            found["changed"], found["fresh"] = self._quantiser.addresses()
        else:
            found["scales"] = self._made["scale"]
        found["kind"], found["source"], found["group"] = form.facts.T
        found["columns"], found["width"] = whole.columns, -(-whole.columns // 128)
        return found


class _Tensors(Sequence[Tensor]):
    """Tensors that are made on request, by their indices in a state."""

    def __init__(self, indices: range, make: Callable[[int], Tensor]) -> None:
        self._indices, self._make = indices, make

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, number: int) -> Tensor: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, number: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(number, slice):
            return _Tensors(self._indices[number], self._make)
        return self._make(self._indices[number])
