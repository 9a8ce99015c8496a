"""Quantising whole states, or some of the tensors that are published for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..codec import default_codec
from ..codec.bits import copy_bits, in_host_memory
from ..errors import DtypeMismatch, ShapeMismatch, TensorMissing
from ..tensors import torch_types
from ..tensors.bits import State, Tensor, TensorBits, tensor_bits, typed
from ..tensors.casting import Casts
from ..tensors.columns import Columns
from ..tensors.state import thread_count
from ..tensors.unwritten_state import PendingState
from . import reference
from .exact_arithmetic import exactly
from .layout import KeptDType, Output, QuantisedLayout, QuantisedWeight
from .recipe import Recipe, RecipeLike
from .scales import Grid, Scales, choose_scales

if TYPE_CHECKING:
    import torch

    from ..tensors.unwritten_state import UnwrittenState
    from .encode_with_codes import ReusedMemory
    from .gpu.unwritten import UnwrittenForm
    from .whole_weights import WholeWeights

_MOST_KEPT = 1 << 20
"""Plans are kept for about this many names."""


class Quantiser(Protocol):
    """The two steps of quantising that read every weight. The reference, native code and GPU code have the same functions."""

    def block_maxima(self, recipe: Recipe, weight: NDArray[Any], first_row: int = 0, name: str = "") -> Grid: ...
    def encode_codes(self, recipe: Recipe, weight: NDArray[Any], scales: Scales, first_row: int = 0) -> NDArray[Any]: ...


def quantise_state(
    state: State,
    recipe: RecipeLike,
    previous: State | None = None,
    *,
    dtype: KeptDType = None,
    out: Mapping[str, Tensor] | None = None,
    threads: int | None = None,
) -> dict[str, Tensor]:
    """Return the tensors that a recipe publishes for a state.

    The same weights and the same previous tensors always give the same bytes. Raise `UnquantisableWeight` if the recipe cannot quantise a
    weight, and `NonFiniteWeights` if a weight is NaN or infinite.

    Parameters
    ----------
    state
        Names to NumPy arrays or torch tensors.
    recipe
        The recipe, or its spelling, such as "fp8-block".
    previous
        The tensors that were published last. Their scales stay where the sticky rule allows it. If it is None, all scales are fresh.
    dtype
        The type of floating-point tensors that are not quantised; bfloat16 by default.
    out
        Tensors to write into, by name. Other tensors are new. Their contents are undefined after an error.
    threads
        The number of threads to use; by default, as many as there are processors that this process may use.
    """
    layout = QuantisedLayout.of_state(recipe, state, dtype)
    return quantise_outputs(layout, layout.outputs, state, previous, out, threads)


def quantise_outputs(
    layout: QuantisedLayout,
    names: Iterable[str],
    state: State,
    previous: State | None = None,
    out: Mapping[str, Tensor] | None = None,
    threads: int | None = None,
) -> dict[str, Tensor]:
    """Return some of the tensors that are published for a state (`QuantisedLayout.quantise`).

    Native code quantises with the instruction set of the codec in use. If that is the reference codec, the reference quantises.
    """
    names = tuple(names)
    plan = _plan_of(layout, names)
    given = {} if out is None else {name: tensor for name in names if (tensor := out.get(name)) is not None}
    on_host, on_gpus = _by_device(layout, plan.weights, state)
    codec = default_codec()
    work = _Work(layout, state, previous)
    found: dict[str, Tensor] = {}
    for device, weights in on_gpus.items():
        from .gpu.quantiser import GpuQuantiser
        from .whole_weights import WholeWeights, with_groups

        are_all = len(weights) == len(plan.weights)
        if are_all and plan.on_gpu is not None:
            whole = plan.on_gpu
        else:
            whole = WholeWeights(layout, with_groups(layout, weights))
            plan.on_gpu = whole if are_all else None
        found |= whole.quantise(GpuQuantiser(device), work.source, previous, given, device)
    if on_host and codec.name != "reference":
        from .native import NativeQuantiser
        from .whole_weights import WholeWeights, whole_weights

        quantiser = NativeQuantiser(thread_count(threads), codec.name)
        work = _Work(layout, state, previous, quantiser)
        is_known = on_host is plan.weights
        whole = plan.whole if is_known and plan.whole else WholeWeights(layout, whole_weights(layout, on_host, set(names)))
        if is_known:
            plan.whole = whole
        made = whole.quantise_arrays(quantiser, state, previous, given)
        found |= whole.quantise(quantiser, work.source, previous, given) if made is None else made
    casts = Casts()
    for name in names:
        if name in found:
            continue
        output = layout.output(name)
        tensor = work.tensor(output) if output.weight is not None else _kept(output, work.source(name), casts)
        found[name] = tensor if name not in given else _written(output, tensor, given[name])
    return {name: found[name] for name in names}


def quantise_to_encode(
    layout: QuantisedLayout,
    names: Iterable[str],
    state: State,
    previous: State | None = None,
    memory: ReusedMemory | None = None,
    threads: int | None = None,
    *,
    ready: Mapping[str, Tensor] | None = None,
    keeps_codes: bool = False,
) -> State:
    """Return what `quantise_outputs` returns, for a caller that encodes it.

    Weights are quantised while their codes are encoded, in host memory (`PendingState`) and on a GPU (`UnwrittenState`), which then raises
    `NonFiniteWeights`. The weights and `previous` must not change until then.

    `ready` has tensors that are made already. `memory` receives large arrays in host memory. `keeps_codes` is for a caller that reads codes
    after it has encoded them: encoding writes them then. Otherwise weights are quantised again if their codes are read.
    """
    from .encode_with_codes import PendingWeights
    from .native import NativeQuantiser
    from .whole_weights import WholeWeights, whole_weights

    done = {} if ready is None else dict(ready)
    wanted = tuple(name for name in names if name not in done)
    plan, codec = _plan_of(layout, wanted), default_codec()
    unwritten = _unwritten_state(layout, plan, wanted, state, previous, done)
    if unwritten is not None:
        return unwritten
    if codec.name == "reference" or _by_device(layout, plan.weights, state)[1]:
        return done | quantise_outputs(layout, wanted, state, previous, None, threads)
    if plan.whole is None:
        plan.whole = WholeWeights(layout, whole_weights(layout, plan.weights, set(wanted)))
    out = {} if memory is None else memory.arrays(plan.whole.large_outputs)
    pending = PendingWeights(NativeQuantiser(thread_count(threads), codec.name), plan.whole, state)
    made = pending.start(previous, out, keeps_codes=keeps_codes)
    if made is None or pending.preparation is None:
        return done | quantise_outputs(layout, wanted, state, previous, out, threads)
    found = done | made | quantise_outputs(layout, [name for name in wanted if name not in made], state, previous, None, threads)
    columns = Columns.of(found)
    if columns is None:
        pending.finish()
        return found
    return PendingState(columns, made, pending.preparation, finish=pending.finish, check=pending.check)


def _unwritten_state(
    layout: QuantisedLayout, plan: _Plan, names: tuple[str, ...], state: State, previous: State | None, ready: Mapping[str, Tensor]
) -> UnwrittenState | None:
    """Return the state of these names and of those that are ready, if all weights are on one GPU, and kernels can quantise them there."""
    if not plan.weights or torch_types.torch_tensor() is None:
        return None
    device = torch_types.gpu_holding(state.get(plan.weights[0].source))
    if device is None:
        return None
    from .gpu.unwritten import UnwrittenForm, start_unwritten
    from .whole_weights import WholeWeights, unwritten_roles, with_groups

    if plan.unwritten is None:
        if plan.on_gpu is None:
            plan.on_gpu = WholeWeights(layout, with_groups(layout, plan.weights))
        outputs = [layout.output(name) for name in (*ready, *names)]
        plan.unwritten = UnwrittenForm(outputs, plan.on_gpu, unwritten_roles(layout.recipe))
    return start_unwritten(plan.unwritten, state, previous, ready, device)


@dataclass
class _Plan:
    """A plan to quantise the outputs of some names."""

    weights: list[QuantisedWeight]
    whole: WholeWeights | None = None
    on_gpu: WholeWeights | None = None
    """The weights, and all that share a scale with them."""
    unwritten: UnwrittenForm | None = None


def _plan_of(layout: QuantisedLayout, names: tuple[str, ...]) -> _Plan:
    """Return the plan for these outputs. It is kept with the layout, because a publisher asks for the same outputs at each version."""
    found = layout.plans.get(names)
    if found is None:
        if sum(map(len, layout.plans)) > _MOST_KEPT:
            layout.plans.clear()
        found = layout.plans[names] = _Plan(named_weights(layout, names))
    return found


def named_weights(layout: QuantisedLayout, names: Iterable[str]) -> list[QuantisedWeight]:
    """Return the weights that have one of these outputs."""
    return list({weight.module: weight for name in names if (weight := layout.output(name).weight) is not None}.values())


def _by_device(
    layout: QuantisedLayout, weights: list[QuantisedWeight], state: State
) -> tuple[list[QuantisedWeight], dict[torch.device, list[QuantisedWeight]]]:
    """Return the weights that the host quantises, and those that each GPU does.

    A GPU also quantises weights in host memory that share a scale with weights on a GPU.
    """
    if torch_types.torch_tensor() is None:
        return weights, {}
    shares = layout.recipe.shares_scales
    sources = {other.source for weight in weights for other in (layout.groups[weight.group] if shares else [weight])}
    devices = {name: torch_types.gpu_holding(state.get(name)) for name in sources}  # reads each once: a state may make them at each access
    if all(device is None for device in devices.values()):
        return weights, {}
    host: list[QuantisedWeight] = []
    gpus: dict[torch.device, list[QuantisedWeight]] = {}
    for weight in weights:
        device = devices[weight.source]
        if device is None and shares:
            device = next((found for other in layout.groups[weight.group] if (found := devices[other.source]) is not None), None)
        (host if device is None else gpus.setdefault(device, [])).append(weight)
    return host, gpus


class _Work:
    """Quantises the weights of one state. It keeps the largest values and scales of each weight, because several tensors need them."""

    def __init__(self, layout: QuantisedLayout, state: State, previous: State | None, quantiser: Quantiser = reference) -> None:
        self._layout = layout
        self._state = state
        self._previous = previous
        self._quantiser = quantiser
        self._maxima: dict[str, Grid] = {}
        self._scales: dict[str, Scales] = {}

    def source(self, name: str) -> TensorBits:
        if name not in self._state:
            raise TensorMissing(f"tensor {name!r} is missing in the state that is to be quantised.")
        tensor = tensor_bits(name, self._state[name])
        spec = self._layout.specs[name]
        if tensor.dtype != spec.dtype:
            raise DtypeMismatch(f"tensor {name!r} has type {tensor.dtype.name}, but the layout was made for {spec.dtype.name}.")
        if tensor.whole is not None or tensor.shape != spec.shape:
            raise ShapeMismatch(f"tensor {name!r} has shape {tensor.shape}, but the layout was made for {spec.shape}.")
        return tensor

    def tensor(self, output: Output) -> Tensor:
        weight = output.weight
        assert weight is not None
        if output.role == "shape":
            return np.array([weight.rows, weight.columns], np.int64)
        scales = self.scales(weight)
        if output.role == "codes":
            return self._quantiser.encode_codes(self._layout.recipe, self._rows(weight), scales).reshape(output.shape)
        if output.role == "scale":
            return scales.scale.reshape(output.shape)
        assert scales.global_scale is not None
        return scales.global_scale

    @exactly
    def scales(self, weight: QuantisedWeight) -> Scales:
        if weight.module not in self._scales:
            layout = self._layout
            previous = self._layout.previous_scales(weight, self._previous)
            shared = None
            if layout.recipe.shares_scales:
                group = layout.groups[weight.group]
                shared = max(float(self.maxima(other).max()) for other in group)
                previous = agreed(previous, [layout.previous_scales(other, self._previous) for other in group])
            self._scales[weight.module] = choose_scales(layout.recipe, weight.dtype, self.maxima(weight), previous, shared)
        return self._scales[weight.module]

    def maxima(self, weight: QuantisedWeight) -> Grid:
        if weight.module not in self._maxima:
            self._maxima[weight.module] = self._quantiser.block_maxima(self._layout.recipe, self._rows(weight), name=weight.source)
        return self._maxima[weight.module]

    def _rows(self, weight: QuantisedWeight) -> NDArray[Any]:
        return rows_of(weight, typed(in_host_memory(self.source(weight.source).bits), weight.dtype))


def rows_of(weight: QuantisedWeight, source: NDArray[Any]) -> NDArray[Any]:
    """Return a weight as rows and columns, from its source tensor."""
    rows = source.swapaxes(-1, -2) if weight.is_transposed else source
    return rows.reshape(-1, weight.columns)[weight.first_row : weight.first_row + weight.rows]


def agreed(own: Scales | None, group: list[Scales | None]) -> Scales | None:
    """Return the previous scales of a weight, or None if the weights of its group do not all have the same scale that is one number."""
    if own is None:
        return None
    mine = own.scale if own.global_scale is None else own.global_scale
    for other in group:
        theirs = None if other is None else other.scale if other.global_scale is None else other.global_scale
        if theirs is None or theirs.dtype != mine.dtype or theirs.tobytes() != mine.tobytes():
            return None
    return own


def _kept(output: Output, source: TensorBits, casts: Casts) -> Tensor:
    return typed(casts.cast(source, output.dtype).bits, output.dtype)


def _written(output: Output, made: Tensor, into: Tensor) -> Tensor:
    target = tensor_bits(output.name, into)
    output.check(target)
    copy_bits(tensor_bits(output.name, made).bits, target.bits)
    return into
