"""Quantising many whole weights with one call of native code, or with a few kernels on a GPU. A table says where everything is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..codec import memory_of
from ..codec.bits import DeviceBits, copied_to_host, copy_bits, in_host_memory, on_gpu
from ..dtypes import DType
from ..tensors import torch_types
from ..tensors.bits import State, Tensor, TensorBits, tensor_bits
from .layout import Output, QuantisedLayout, QuantisedWeight, Role
from .recipe import Recipe
from .reference import nonfinite_weight
from .weight_table import WeightTable, kind_number, source_number

if TYPE_CHECKING:
    import torch

SourceOf = Callable[[str], TensorBits]
"""Returns a source tensor of the right type and shape, by its name."""

Array = Any
"""A NumPy array, or a torch tensor on the GPU."""


_SCALES: tuple[Role, Role] = ("scale", "global_scale")
_ROLES: tuple[Role, Role, Role] = ("codes", *_SCALES)

_BYTE_SCALES = ("nvfp4", "mxfp4")
"""Recipes whose scales have one byte each."""

_LARGE = 1 << 15
"""The least bytes of a large output."""

_ITEMSIZES = np.array([4, 2, 2], np.int64)
"""The bytes of a weight, by `source_number`."""


class TableQuantiser(Protocol):
    """Quantises a table of weights: `NativeQuantiser` or `GpuQuantiser`."""

    def quantise_weights(self, recipe: Recipe, weights: WeightTable) -> int | None: ...


class WholeWeights:
    """Weights of a layout, and all weights that share a scale with them. All their outputs are made.

    Parameters
    ----------
    layout
        The layout.
    weights
        The weights.
    """

    def __init__(self, layout: QuantisedLayout, weights: list[QuantisedWeight]) -> None:
        self.layout = layout
        self.weights = weights
        roles: list[Role] = [role for role in weights[0].outputs if role != "shape"] if weights else []
        self._forms: dict[Role, list[Output]] = {role: [layout.outputs[weight.outputs[role]] for weight in weights] for role in roles}
        self._sources = {weight.source: weight.is_transposed for weight in weights}
        numbers = {name: number for number, name in enumerate(self._sources)}
        self._source_of = np.array([numbers[weight.source] for weight in weights], np.int64)
        self._first_rows = np.array([weight.first_row for weight in weights], np.int64)
        self._rows = np.array([weight.rows for weight in weights], np.int64)
        self.columns = np.array([weight.columns for weight in weights], np.int64)
        self._types: NDArray[np.uint8] = np.array([source_number(weight.dtype) for weight in weights], np.uint8)
        self._strides: NDArray[np.int64] = self.columns * _ITEMSIZES[self._types]
        """The bytes of a row."""
        groups: dict[str, int] = {}
        self.groups = np.array([groups.setdefault(weight.group, len(groups)) for weight in weights], np.int64)

    def quantise(
        self,
        quantiser: TableQuantiser,
        source_of: SourceOf,
        previous: State | None,
        out: Mapping[str, Tensor],
        device: torch.device | None = None,
    ) -> dict[str, Any]:
        """Return all outputs: the tensors of `out`, where it has them. Raise as `QuantisedLayout.quantise` does.

        Parameters
        ----------
        quantiser
            What quantises them.
        source_of
            Returns the sources.
        previous
            The tensors that were published last, for their scales.
        out
            Tensors to write into.
        device
            The GPU to work on; None for the host.
        """
        if not self.weights:
            return {}
        memory = _HostMemory() if device is None else _DeviceMemory(device)
        rows = [memory.rows(source_of(name), is_transposed) for name, is_transposed in self._sources.items()]
        strides = np.array([memory.row_stride(array) for array in rows], np.int64)[self._source_of]
        data = np.array([memory.address(array) for array in rows], np.int64)[self._source_of] + self._first_rows * strides
        found: dict[str, Any] = {}
        targets = {role: [memory.target(form, out, found) for form in forms] for role, forms in self._forms.items()}
        before = self._previous(memory, previous)

        def column(arrays: list[Array] | None) -> NDArray[np.uint64]:
            if arrays is None:
                return np.zeros(len(self.weights), np.uint64)
            return np.array([0 if array is None else memory.address(array) for array in arrays], np.uint64)

        table = WeightTable(
            data.astype(np.uint64),
            strides,
            self._rows,
            self.columns,
            self._types,
            column(targets.get("codes")),
            column(targets.get("scale")),
            column(targets.get("global_scale")),
            column(before.get("scale")),
            column(before.get("global_scale")),
            self.groups,
        )

        bad = quantiser.quantise_weights(self.layout.recipe, table)
        if bad is not None:
            weight = self.weights[bad]
            part = rows[self._source_of[bad]][weight.first_row : weight.first_row + weight.rows]
            raise nonfinite_weight(weight.source, memory.count_nonfinite(part, weight))
        self._add_shapes(memory, out, found)
        for role, arrays in targets.items():
            for form, array in zip(self._forms[role], arrays, strict=True):
                if form.name not in found:  # the tensor of `out` cannot be written in place
                    self._write(memory, form, array, out, found)
        return found

    def quantise_arrays(
        self, quantiser: TableQuantiser, state: State, previous: State | None, out: Mapping[str, Tensor]
    ) -> dict[str, Tensor] | None:
        """Do what `quantise` does, if everything is in plain NumPy arrays in host memory; else return None.

        Python does little for each weight, because models have up to 100,000 of them.
        """
        if not self.weights or any(self._sources.values()):
            return None  # there is nothing to do, or a source to transpose
        plain = self._plain
        sources = plain["source"].read(state)
        old = None
        if previous is not None and self.layout.recipe.sticky:
            old = {role: plain[role].read(previous) for role in _SCALES if role in plain}
        made: dict[Role, list[Any]] = {}
        for role in self._forms:
            forms = plain[role]
            made[role] = [out.get(name) for name in forms.names] if out else [None] * len(forms.names)
            if any(array is None for array in made[role]):
                new = zip(made[role], forms.shapes, forms.types, strict=True)
                made[role] = [np.empty(shape, dtype) if array is None else array for array, shape, dtype in new]
        targets = {role: plain[role].memory(arrays, is_written=True) for role, arrays in made.items()}
        if sources is None or None in targets.values() or (old is not None and None in old.values()):
            return None
        fresh = np.zeros(len(self.weights), np.bool_)
        if old is not None and self.layout.recipe.shares_scales:
            shared = old["global_scale" if "global_scale" in old else "scale"]
            assert shared is not None
            values = np.array([array[0] for array in shared.bits])
            _, first = np.unique(self.groups, return_index=True)
            of_group = np.zeros(len(self.weights), np.int64)
            of_group[self.groups[first]] = first
            differs = values != values[of_group[self.groups]]
            fresh = np.isin(self.groups, self.groups[differs])

        made_at = {role: memory.addresses for role, memory in targets.items() if memory is not None}
        kept_at = {role: np.where(fresh, np.uint64(0), memory.addresses) for role, memory in (old or {}).items() if memory is not None}
        table = self.table(sources.addresses[self._source_of] + self.starts, made_at, kept_at)
        if quantiser.quantise_weights(self.layout.recipe, table) is not None:
            return None  # the other method says which weight is not finite
        found: dict[str, Tensor] = {}
        for role, arrays in made.items():
            found.update(zip(plain[role].names, arrays, strict=True))
        self._add_shapes(_HostMemory(), out, found)
        return found

    def table(
        self, data: NDArray[np.uint64], outputs: Mapping[Role, NDArray[np.uint64]], previous: Mapping[Role, NDArray[np.uint64]]
    ) -> WeightTable:
        """Return the table of weights whose sources are contiguous, from their addresses.

        By role, `outputs` has the addresses of what is written, and `previous` those of the scales of the version before; 0 for fresh ones.
        """
        nowhere = np.zeros(len(self.weights), np.uint64)
        codes, scales, globals = (outputs.get(role, nowhere) for role in _ROLES)
        old_scales, old_globals = (previous.get(role, nowhere) for role in _SCALES)
        made = codes, scales, globals, old_scales, old_globals
        return WeightTable(data, self._strides, self._rows, self.columns, self._types, *made, self.groups)

    @cached_property
    def starts(self) -> NDArray[np.uint64]:
        """Where each weight begins in its source, if that is contiguous."""
        return (self._first_rows * self._strides).astype(np.uint64)

    @cached_property
    def shapes(self) -> NDArray[np.int64]:
        """The rows and columns of each weight."""
        return np.stack([self._rows, self.columns], axis=1)

    @property
    def recipe(self) -> Recipe:
        return self.layout.recipe

    @cached_property
    def large_outputs(self) -> list[Output]:
        """The outputs for which the system's memory is slower than memory that is used again."""
        return [form for forms in self._forms.values() for form in forms if form.nbytes >= _LARGE]

    @cached_property
    def _plain(self) -> dict[Role | Literal["source"], _Forms]:
        specs = self.layout.specs
        found: dict[Role | Literal["source"], _Forms] = {
            "source": _Forms(list(self._sources), [(specs[name].dtype, specs[name].shape) for name in self._sources])
        }
        for role, forms in self._forms.items():
            found[role] = _Forms([form.name for form in forms], [(form.dtype, form.shape) for form in forms])
        return found

    def facts(self, weight: QuantisedWeight) -> tuple[int, int, int]:
        """Return the numbers of the recipe and of the type of a weight, and the size of a group, as kernels know them."""
        recipe = self.layout.recipe
        return kind_number(recipe), source_number(weight.dtype), recipe.group_size or 0

    def _add_shapes(self, memory: _Memory, out: Mapping[str, Tensor], found: dict[str, Tensor]) -> None:
        """Put the outputs that are shapes into `found`, if the recipe has them."""
        if "shape" in self.weights[0].outputs:
            shapes = memory.upload(self.shapes)
            for weight, shape in zip(self.weights, shapes, strict=True):
                self._write(memory, self.layout.outputs[weight.outputs["shape"]], shape, out, found)

    def _write(self, memory: _Memory, form: Output, array: Array, out: Mapping[str, Tensor], found: dict[str, Tensor]) -> None:
        given = out.get(form.name)
        if given is not None:
            target = tensor_bits(form.name, given)
            form.check(target)
            memory.copy(array, target, form)
        found[form.name] = array if given is None else given

    def _previous(self, memory: _Memory, previous: State | None) -> dict[str, list[Array | None]]:
        """Return the previous scales by role; None for those of a weight that must have fresh ones."""
        if previous is None or not self.layout.recipe.sticky:
            return {}
        roles: list[Role] = [role for role in ("scale", "global_scale") if role in self._forms]
        found = {role: [memory.published(form, previous) for form in self._forms[role]] for role in roles}
        fresh = np.array([any(one is None for one in arrays) for arrays in zip(*found.values(), strict=True)])
        if self.layout.recipe.shares_scales:
            fresh = np.isin(self.groups, self.groups[fresh | memory.disagree(found[roles[-1]], self.groups)])
        return {role: [None if no else array for no, array in zip(fresh.tolist(), arrays, strict=True)] for role, arrays in found.items()}


class _Memories(NamedTuple):
    """Arrays, as integers, and their addresses."""

    bits: list[Any]
    addresses: NDArray[np.uint64]


class _Forms:
    """Names, types and shapes of arrays."""

    def __init__(self, names: list[str], forms: list[tuple[DType, tuple[int, ...]]]) -> None:
        self.names = names
        self.types = [dtype.numpy for dtype, _ in forms]
        self.shapes = [shape for _, shape in forms]
        self._integers = [dtype.bits for dtype, _ in forms]
        self._itemsizes = np.array([dtype.itemsize for dtype, _ in forms], np.uint64)

    def read(self, state: State) -> _Memories | None:
        """Return the arrays of a state; None if one is missing, or as `memory` does."""
        arrays = [state.get(name) for name in self.names]
        return self.memory(arrays)

    def memory(self, arrays: list[Any], *, is_written: bool = False) -> _Memories | None:
        """Return where arrays are; None if one of them is not a plain contiguous array with the right type and shape, or is read-only."""
        if not set(map(type, arrays)) <= {np.ndarray}:
            return None
        if [array.dtype for array in arrays] != self.types or [array.shape for array in arrays] != self.shapes:
            return None
        bits = [array.view(integer) for array, integer in zip(arrays, self._integers, strict=True)]
        addresses, flags = memory_of(bits)
        if not (flags & 1).all() or (is_written and not (flags & 2).all()) or (addresses % self._itemsizes).any():
            return None
        return _Memories(bits, addresses)


def unwritten_roles(recipe: Recipe) -> tuple[Role, ...]:
    """Return the roles of the tensors that a GPU need not write before it encodes them: codes, and scales if they have one byte each."""
    return ("codes", "scale") if recipe.name in _BYTE_SCALES else ("codes",)


def whole_weights(layout: QuantisedLayout, weights: Iterable[QuantisedWeight], wanted: Collection[str]) -> list[QuantisedWeight]:
    """Return the weights all of whose outputs are wanted, together with those of all weights that share a scale with them."""
    found = [weight for weight in weights if all(name in wanted for name in weight.outputs.values())]
    if not layout.recipe.shares_scales:
        return found
    modules = {weight.module for weight in found}
    whole = {weight.group for weight in found if all(other.module in modules for other in layout.groups[weight.group])}
    return [weight for weight in found if weight.group in whole]


def with_groups(layout: QuantisedLayout, weights: Iterable[QuantisedWeight]) -> list[QuantisedWeight]:
    """Return weights, and all weights that share a scale with them."""
    if not layout.recipe.shares_scales:
        return list(weights)
    return list({other.module: other for weight in weights for other in layout.groups[weight.group]}.values())


class _HostMemory:
    """Arrays in host memory."""

    def rows(self, source: TensorBits, is_transposed: bool) -> Array:
        """Return a source as rows whose elements follow each other: its own memory if possible, else a copy."""
        bits = in_host_memory(source.bits)
        bits = bits.swapaxes(-1, -2) if is_transposed else bits
        rows = bits.reshape(-1, bits.shape[-1])
        return rows if rows.strides[1] == rows.itemsize and rows.flags.aligned else np.ascontiguousarray(rows)

    def address(self, array: Array) -> int:
        address: int = array.__array_interface__["data"][0]
        return address

    def row_stride(self, array: Array) -> int:
        stride: int = array.strides[0]
        return stride

    def target(self, form: Output, out: Mapping[str, Tensor], found: dict[str, Tensor]) -> Array:
        """Return the array that an output is written into. Put it into `found`, unless it must be copied afterwards."""
        given = out.get(form.name)
        if given is None:
            found[form.name] = new = np.empty(form.shape, form.dtype.numpy)
            return new
        target = tensor_bits(form.name, given)
        form.check(target)
        bits = target.bits
        if not on_gpu(bits) and bits.flags.c_contiguous and bits.flags.aligned and bits.flags.writeable:
            found[form.name] = given
            return bits.view(form.dtype.numpy)
        return np.empty(form.shape, form.dtype.numpy)

    def published(self, form: Output, previous: State) -> Array | None:
        """Return a tensor of the version before; None if it is missing or has another form."""
        given = previous.get(form.name)
        if given is None:
            return None
        tensor = tensor_bits(form.name, given)
        return np.ascontiguousarray(copied_to_host(tensor.bits)) if (tensor.dtype, tensor.shape) == (form.dtype, form.shape) else None

    def disagree(self, shared: list[Array | None], groups: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell which weights have another previous scale than the first weight of their group."""
        own = [b"" if array is None else array.tobytes() for array in shared]
        numbers = groups.tolist()
        first = dict(zip(reversed(numbers), reversed(own), strict=True))
        return np.array([one != first[group] for one, group in zip(own, numbers, strict=True)])

    def count_nonfinite(self, rows: Array, weight: QuantisedWeight) -> int:
        return int(np.count_nonzero(~np.isfinite(rows.view(weight.dtype.numpy).astype(np.float32))))

    def upload(self, array: NDArray[np.int64]) -> Array:
        return array

    def copy(self, array: Array, target: TensorBits, form: Output) -> None:
        copy_bits(array.view(form.dtype.bits), target.bits)


class _DeviceMemory:
    """Tensors on a GPU. The torch type of a tensor matters only for outputs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def rows(self, source: TensorBits, is_transposed: bool) -> Array:
        tensor = _on(self._device, source)
        tensor = tensor.transpose(-1, -2) if is_transposed else tensor
        if tensor.dim() == 2 and tensor.stride(1) == 1:
            return tensor
        return tensor.contiguous().view(-1, tensor.shape[-1])

    def address(self, array: Array) -> int:
        address: int = array.data_ptr()
        return address

    def row_stride(self, array: Array) -> int:
        stride: int = array.stride(0) * array.element_size()
        return stride

    def target(self, form: Output, out: Mapping[str, Tensor], found: dict[str, Tensor]) -> Array:
        given = out.get(form.name)
        if given is None:
            found[form.name] = new = self._empty(form)
            return new
        target = tensor_bits(form.name, given)
        form.check(target)
        if on_gpu(target.bits) and target.bits.is_contiguous and target.bits.device == self._device:
            found[form.name] = given
            return target.bits.tensor
        return self._empty(form)

    def _empty(self, form: Output) -> Array:
        import torch

        return torch.empty(form.shape, dtype=torch_types.torch_dtype(form.dtype), device=self._device)

    def published(self, form: Output, previous: State) -> Array | None:
        given = previous.get(form.name)
        if given is None:
            return None
        tensor = tensor_bits(form.name, given)
        return _on(self._device, tensor).contiguous() if (tensor.dtype, tensor.shape) == (form.dtype, form.shape) else None

    def disagree(self, shared: list[Array | None], groups: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.zeros(groups.size, np.bool_)  # a kernel finds out

    def count_nonfinite(self, rows: Array, weight: QuantisedWeight) -> int:
        return int((~rows.view(torch_types.torch_dtype(weight.dtype)).isfinite()).sum())

    def upload(self, array: NDArray[np.int64]) -> Array:
        import torch

        return torch.from_numpy(array).to(self._device)

    def copy(self, array: Array, target: TensorBits, form: Output) -> None:
        import torch

        integers = array.contiguous().view(getattr(torch, f"int{form.dtype.width}"))
        copy_bits(DeviceBits(integers.view(form.shape)), target.bits)


_Memory = _HostMemory | _DeviceMemory


def _on(device: torch.device, tensor: TensorBits) -> torch.Tensor:
    """Return a tensor's bits on a device."""
    bits = tensor.bits
    if on_gpu(bits):
        return bits.tensor if bits.device == device else bits.tensor.to(device)
    import torch

    return torch.from_numpy(np.ascontiguousarray(bits).view(f"i{bits.itemsize}")).to(device)
