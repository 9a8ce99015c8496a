"""Stage 1 of learning a layout: runs a model's loaders on meta tensors, and records what they copy where.

vLLM keeps the parameters of each module as they were before processing, as meta tensors with their loaders. They are called *raw* here.
`record_copies` puts them into the model for a moment, calls the model's `load_weights` with meta tensors of the chain's names, shapes and
types, and records every copy. This needs no memory and reads no data. Fused matrices, shards and experts come out by themselves, because
loaders copy views.

This file, processing_map.py and processing_views.py are the only ones that use private parts of vLLM for layouts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ....dtypes import DType
from ....format.bundle_names import MAIN, BundleView, join_name
from ....subscribe.tensor_table import TensorTable
from ....tensors.torch_types import dtype_of, torch_dtype
from .nested_strides import Dimension, compose, fit, inverse, nest_of
from .types import Nest

_Value = TypeVar("_Value")

WIDENING = {("BF16", "F32"), ("F16", "F32"), ("F8_E8M0", "F32"), ("F8_E4M3", "F32"), ("F8_E5M2", "F32"), ("F8_E4M3", "BF16")}
"""Casts that keep every number, so that they can be undone exactly."""
_MOST_REPEATS = 64
"""One element that a loader copies to more positions than this is not mapped."""
_MOST_LISTED = 1 << 20
"""If a loader repeats elements, the positions of a copy with more elements than this are not looked at one by one."""
_TINY = 16
"""Tensors with at most this many elements describe others, such as shapes. If two of them go to one position, the last one is held."""


@dataclass(frozen=True, slots=True, eq=False)
class RawParameter:
    """A parameter or buffer of a module as it was before vLLM processed it.

    Parameters
    ----------
    module
        The module.
    module_name
        The name of the module in the model.
    name
        The name of the parameter in the module.
    meta
        The raw parameter, as a meta tensor.
    """

    module: Any
    module_name: str
    name: str
    meta: torch.Tensor


@dataclass(frozen=True, slots=True)
class LoaderCopy:
    """A block of a checkpoint tensor that a loader copies to a raw parameter.

    Parameters
    ----------
    parameter
        The raw parameter.
    nest
        From elements of the checkpoint tensor to elements of the raw parameter's storage.
    widened
        The type of the raw parameter, if the loader widens elements.
    """

    parameter: RawParameter
    nest: Nest
    widened: DType | None


@dataclass(slots=True)
class LoaderCopies:
    """The copies that a model's loaders make of the tensors of a chain."""

    copies: dict[str, list[LoaderCopy]] = field(default_factory=dict)
    """The copies of each tensor that is only copied. A tensor that this worker does not hold has none."""
    refused: dict[str, str] = field(default_factory=dict)
    """The reasons why positions of tensors are unknown."""
    touched: dict[str, list[RawParameter]] = field(default_factory=dict)
    """The raw parameters that the loaders of refused tensors write to, as far as that is known."""
    parameters: list[RawParameter] = field(default_factory=list)
    """All raw parameters of the model."""
    rejected: dict[str, str] = field(default_factory=dict)
    """The tensors for which a loader raised an error, and the error."""

    def in_bundle(self, bundle: str) -> LoaderCopies:
        """Return the same with names of the chain, if these are names in a bundle.

        Parameters
        ----------
        bundle
            The name of the bundle.
        """

        def named(found: Mapping[str, _Value]) -> dict[str, _Value]:
            return {join_name(bundle, name): value for name, value in found.items()}

        return LoaderCopies(named(self.copies), named(self.refused), named(self.touched), self.parameters, named(self.rejected))


def missing_parts() -> list[str]:
    """Return the parts of vLLM that stage 1 needs and that the installed vLLM does not have."""
    missing: list[str] = []
    for module, names in {
        "reload.layerwise": ["LAYERWISE_INFO", "_get_original_loader"],
        "reload.meta": ["SKIP_TENSORS", "to_meta_tensor"],
        "reload.sanitize": ["restore_layer_refs"],
        "reload.types": ["LayerReloadingInfo"],
    }.items():
        path = f"vllm.model_executor.model_loader.{module}"
        try:
            found = __import__(path, fromlist=names)
        except ImportError:
            missing.append(path)
            continue
        missing += [f"{path}.{name}" for name in names if not hasattr(found, name)]
        if module == "reload.types" and hasattr(found, names[0]):
            fields = found.LayerReloadingInfo.__annotations__
            missing += [f"{path}.LayerReloadingInfo.{name}" for name in ("restore_metadata", "restore_device") if name not in fields]
    return missing


def record_copies(model: Any, vllm_config: Any, table: TensorTable, *, bundle: str = MAIN, prefix: str = "") -> LoaderCopies:
    """Record where a model's loaders copy the tensors of one bundle of a chain. Changes nothing.

    No forward pass may run meanwhile, because the model has no real parameters for a moment.

    Parameters
    ----------
    model
        The model.
    vllm_config
        vLLM's configuration.
    table
        The tensors of the chain.
    bundle
        The bundle. Loaders get its tensors without the prefix of their names.
    prefix
        What the names of modules begin with in the result.
    """
    from vllm.config import set_current_vllm_config

    table = BundleView(table, bundle)
    with _raw_parameters(model, prefix) as parameters:
        recorder = _Recorder(parameters)
        remaining = iter(table.items())
        while not recorder.is_exhausted:
            try:
                with recorder, torch.no_grad(), set_current_vllm_config(vllm_config):
                    model.load_weights(recorder.tensors(remaining))
            except Exception as error:
                if recorder.current is None:  # the loader failed before the first tensor, or after the last
                    if not recorder.is_exhausted:
                        recorder.refuse(table, f"its loader failed: {error!r}", is_traced=False)
                    break
                recorder.rejected[recorder.current] = _brief(error)
                recorder.refuse([recorder.current], f"its loader failed: {_brief(error)}", is_traced=False)
            else:
                if not recorder.is_exhausted:
                    recorder.refuse((name for name, _ in remaining), "the model's loader stopped before it")
        recorder.refuse_replaced()
    return recorder.result().in_bundle(bundle)


@contextlib.contextmanager
def _raw_parameters(model: Any, prefix: str) -> Iterator[list[RawParameter]]:
    """Put raw parameters into the modules, and put everything back afterwards."""
    saved = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield [
            RawParameter(module, prefix + name, key, tensor) for name, module in model.named_modules() for key, tensor in _put_raw(module)
        ]
    finally:
        for module, attributes in saved:  # only what differs, because other threads may read attributes of the model meanwhile
            now = vars(module)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update({name: value for name, value in attributes.items() if now.get(name, saved) is not value})


def raw_tensors(module: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the raw parameters and buffers of a module, as meta tensors that are bound to it."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    info = LAYERWISE_INFO.get(module)
    recorded = ({}, {}) if info is None else info.restore_metadata
    both: list[dict[str, torch.Tensor]] = []
    for live, raw in zip((module._parameters, module._buffers), recorded, strict=True):
        kept = {name: tensor for name, tensor in live.items() if tensor is not None and (info is None or name in SKIP_TENSORS)}
        both.append({name: restore_layer_refs(_unwrapped(to_meta_tensor(tensor)), module) for name, tensor in {**kept, **raw}.items()})
    return both[0], both[1]


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Give a raw parameter its own loader back. After vLLM has loaded a model anew, it has one that does nothing until the next time."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader

    if hasattr(tensor, "weight_loader"):
        tensor.weight_loader = _get_original_loader(tensor)
    return tensor


def _put_raw(module: Any) -> Iterable[tuple[str, torch.Tensor]]:
    parameters, buffers = raw_tensors(module)
    absent = [{name: None for name, tensor in held.items() if tensor is None} for held in (module._parameters, module._buffers)]
    for name in (*parameters, *buffers):
        vars(module).pop(name, None)  # processing may have left a plain attribute of the same name
    module._parameters, module._buffers = {**absent[0], **parameters}, {**absent[1], **buffers}
    return [*parameters.items(), *buffers.items()]


@dataclass(frozen=True, slots=True)
class _Origin:
    """The contents of a storage: elements of a checkpoint tensor, or values that were computed from some."""

    names: frozenset[str]
    """The checkpoint tensors. Empty if a loader has written zeros over one."""
    nest: Nest | None
    """From elements of the storage to elements of the checkpoint tensor, which may be repeated. None if the values were computed."""
    dtype: torch.dtype
    """The type of the elements in this storage."""
    cast_from: DType
    kept: torch.Tensor
    """Keeps the storage alive, so that its address is not used again."""


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """While this mode is active, copies from tensors of the chain to raw parameters are recorded."""

    def __init__(self, parameters: Sequence[RawParameter]) -> None:
        super().__init__()
        self._parameters = parameters
        self._storages = [parameter.meta.untyped_storage() for parameter in parameters]
        self._owners = {_storage(parameter.meta): parameter for parameter in parameters}
        self._origins: dict[int, _Origin] = {}
        self._copies: dict[str, list[LoaderCopy]] = {}
        self._order: list[tuple[str, LoaderCopy]] = []
        self._seen: list[str] = []
        self._refused: dict[str, str] = {}
        self._touched: dict[str, dict[RawParameter, None]] = {}
        self._untraced: set[str] = set()
        self._scalars: dict[float, torch.Tensor] = {}
        self.rejected: dict[str, str] = {}
        self.current: str | None = None
        self.is_exhausted = False

    def tensors(self, remaining: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield meta tensors of the chain, and record which one is being loaded."""
        for name, spec in remaining:
            self.current = name
            self._seen.append(name)
            tensor = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
            nest = nest_of([(tensor.numel(), 1, 1)]) if tensor.numel() else None
            self._origins[_storage(tensor)] = _Origin(frozenset([name]), nest, tensor.dtype, spec.dtype, tensor)
            yield name, tensor
        self.current, self.is_exhausted = None, True

    def refuse(self, names: Iterable[str], reason: str, *, is_traced: bool = True) -> None:
        """Note that the positions of these tensors are unknown. If they are not traced, their modules are unknown too."""
        for name in names:
            self._refused.setdefault(name, reason)
            if not is_traced:
                self._untraced.add(name)

    def refuse_replaced(self) -> None:
        """Refuse tensors that were copied to a parameter which the loader has then replaced by another one."""
        for parameter, storage in zip(self._parameters, self._storages, strict=True):
            held = {**parameter.module._parameters, **parameter.module._buffers}.get(parameter.name)
            if held is None or _storage(held) != storage._cdata:
                names = [name for name, copy in self._order if copy.parameter is parameter]
                self.refuse(names or self._seen, f"the loader replaces {parameter.module_name}.{parameter.name}", is_traced=False)

    def result(self) -> LoaderCopies:
        """Return what was recorded."""
        self._refuse_overwritten()
        copies = {name: self._copies.get(name, []) for name in self._seen if name not in self._refused}
        touched = {name: list(found) for name, found in self._touched.items() if name in self._refused.keys() - self._untraced}
        return LoaderCopies(copies, dict(self._refused), touched, list(self._parameters), self.rejected)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if makes_view(func):  # most operations of loaders; a view has the storage of what it views
            return func(*args, **kwargs)
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default and _storage(args[0]) in self._origins:
            mark = 2.0**-20 * (len(self._scalars) + 1) + 1.0  # a number that no loader uses
            self._scalars[mark] = args[0]
            return mark
        if func._schema.is_mutable:
            self._written(func, args, kwargs)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        self._follow(func, args, kwargs, result)
        return result

    def _written(self, func: Any, args: Any, kwargs: Any) -> None:
        aten = torch.ops.aten
        target = args[0] if args and isinstance(args[0], torch.Tensor) else kwargs.get("out")
        if target is None:
            self.refuse(self._names((args, kwargs)), f"its loader uses {func}")
            return
        source: torch.Tensor | None = None
        if func in (aten.copy_.default, aten.fill_.Tensor):
            source = args[1]
        elif func is aten.fill_.Scalar:
            source = self._scalars.get(args[1])
        owner = self._owners.get(_storage(target))
        if owner is not None and source is None and func in (aten.fill_.Scalar, aten.zero_.default):
            return  # a constant, such as the padding of a vocabulary
        names = self._names((args[1:], kwargs)) if source is None else self._names(source)
        if owner is None:  # a temporary, or a tensor of the chain itself
            names |= self._names(target)
            if names and func is aten.zero_.default and target.nbytes == target.untyped_storage().nbytes():
                self._origins[_storage(target)] = _computed((), target)  # gpt-oss: all ranks but one add zeros instead of a bias
            elif names:
                self._origins[_storage(target)] = _computed(names, target)
            return
        origin = None if source is None else self._origins.get(_storage(source))
        if origin is not None and not origin.names:
            return  # a constant, too
        if source is None:
            names |= {name for name, copy in self._order if copy.parameter is owner}
        self._touch(names or self._latest(), owner)
        if source is None:
            self.refuse(names or self._latest(), f"its loader uses {func}")
        elif not names:
            self.refuse(self._latest(), "its loader copies values that do not come from the chain")
        else:
            self._record(owner, target, source, names)

    def _touch(self, names: Iterable[str], owner: RawParameter) -> None:
        for name in names:
            self._touched.setdefault(name, {})[owner] = None

    def _record(self, owner: RawParameter, target: torch.Tensor, source: torch.Tensor, names: frozenset[str]) -> None:
        origin = self._origins.get(_storage(source))
        if origin is None or origin.nest is None or source.dtype != origin.dtype or target.dtype != owner.meta.dtype:
            self.refuse(names, f"its loader computes what it copies to {owner.module_name}.{owner.name}")
            return
        (name,) = names
        held = dtype_of(target)
        if held != origin.cast_from and (origin.cast_from.name, held.name) not in WIDENING:
            self.refuse(names, f"its loader casts {origin.cast_from.name} to {held.name}")
            return
        nests = _copy_nests(source, target, origin.nest)
        if nests is None:
            self.refuse(names, f"strides cannot describe what its loader copies to {owner.module_name}.{owner.name}")
            return
        for nest in nests:
            copy = LoaderCopy(owner, nest, None if held == origin.cast_from else held)
            self._copies.setdefault(name, []).append(copy)
            self._order.append((name, copy))

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record what the results of an operation hold. Nothing is to be done for results that share the storage of an input."""
        names = self._names((args, kwargs))
        if not names:
            return
        inputs = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            if _storage(tensor) in inputs:
                continue
            self._origins[_storage(tensor)] = self._copied(func, args, tensor) or _computed(names, tensor)

    def _copied(self, func: Any, args: Any, result: torch.Tensor) -> _Origin | None:
        """Return what a copy in new memory holds. None if it is not just a copy."""
        if func not in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            return None
        origin = self._origins.get(_storage(args[0]))
        if origin is None or origin.nest is None or args[0].dtype != origin.dtype:
            return None
        if result.dtype != origin.dtype and (dtype_of(args[0]).name, dtype_of(result).name) not in WIDENING:
            return None
        dimensions = zip(result.shape, result.stride(), args[0].stride(), strict=True)
        moved = nest_of(dimensions, result.storage_offset(), args[0].storage_offset())
        nest = None if moved is None else compose(moved, origin.nest)
        return None if nest is None else _Origin(origin.names, nest, result.dtype, origin.cast_from, result)

    def _names(self, values: Any) -> frozenset[str]:
        found = [self._origins.get(_storage(tensor)) for tensor in _tensors(values)]
        return frozenset().union(*(origin.names for origin in found if origin is not None))

    def _latest(self) -> list[str]:
        return [self.current] if self.current is not None else self._seen[-1:]

    def _refuse_overwritten(self) -> None:
        """Refuse tensors that another tensor overwrites. Large tensors that go to exactly the same positions are tied instead."""
        by_parameter: dict[RawParameter, list[tuple[str, LoaderCopy]]] = {}
        for name, copy in self._order:
            by_parameter.setdefault(copy.parameter, []).append((name, copy))
        for parameter, copies in by_parameter.items():
            if not _may_overlap([copy.nest for _, copy in copies]):
                continue
            last = torch.full((extent(parameter.meta),), -1, dtype=torch.int32)
            for number, (_, copy) in enumerate(copies):
                copy.nest.view(last).fill_(number)
            for name, copy in copies:
                winners = {copies[each][0] for each in copy.nest.view(last).unique().tolist()}
                others = [other for other_name, other in copies if other_name in winners - {name}]
                is_tied = copy.nest.numel > _TINY and all(other.nest == copy.nest for other in others)
                if winners != {name} and not is_tied:
                    is_traced = copy.nest.numel > _TINY  # a change of a tiny one has no effect on the model, which holds the last one
                    self.refuse([name], f"the loader writes {min(winners - {name})} to the same memory", is_traced=is_traced)


def _copy_nests(source: torch.Tensor, target: torch.Tensor, origin: Nest) -> list[Nest] | None:
    """Return the nests from the checkpoint tensor to the storage of `target` that a copy makes. None if strides cannot describe it."""
    if source.numel() == 0 or target.numel() == 0:
        return []
    dimensions = list(zip(target.shape, target.stride(), source.expand_as(target).stride(), strict=True))
    if 0 in origin.targets:
        found = _repeated_nests(tuple(dimensions), source.storage_offset(), origin)
        moved = target.storage_offset()
        return None if found is None else [dataclasses.replace(nest, target_start=nest.target_start + moved) for nest in found]
    repeated = [(size, stride) for size, stride, from_source in dimensions if from_source == 0 and size > 1]
    starts = [0]
    for size, stride in repeated:
        if len(starts) * size > _MOST_REPEATS:
            return None
        starts = [start + number * stride for start in starts for number in range(size)]
    once = [dimension for dimension in dimensions if dimension[2] != 0]
    nests: list[Nest] = []
    for start in starts:
        back = nest_of(once, target.storage_offset() + start, source.storage_offset())
        whole = None if back is None else compose(back, origin)
        nest = None if whole is None else inverse(whole)
        if nest is None:
            return None
        nests.append(nest)
    return nests


@functools.lru_cache(maxsize=64)
def _repeated_nests(dimensions: tuple[Dimension, ...], source_start: int, origin: Nest) -> tuple[Nest, ...] | None:
    """Return the nests of a copy from a temporary in which a loader has repeated elements. None if strides cannot describe it.

    Each nest has one of the repetitions. Elements at the edges of a rank's part, of which other ranks have the other repetitions, have
    nests of their own: parts of two ranks are equal or have no element in common (see live/ownership.py).

    The experts of a model have the same ones, apart from where they start.

    Parameters
    ----------
    dimensions
        The dimensions of the copy: size, stride in the target, stride in the temporary.
    source_start
        The first element of the temporary.
    origin
        From elements of the temporary to elements of the checkpoint tensor.
    """
    if math.prod(size for size, _, _ in dimensions) > _MOST_LISTED:
        return None
    targets, sources = torch.zeros(1, dtype=torch.int64), torch.full((1,), source_start, dtype=torch.int64)
    for size, to_target, from_source in dimensions:
        steps = torch.arange(size)
        targets = (targets[:, None] + steps * to_target).flatten()
        sources = (sources[:, None] + steps * from_source).flatten()
    here, elements = origin.find(sources)
    if not bool(here.all()):
        return None
    rest, repeats = sources - origin.source_start, torch.zeros_like(sources)
    for size, step, stride in zip(origin.sizes, origin.sources, origin.targets, strict=True):
        number, rest = rest // step, rest % step
        if stride == 0:
            repeats = repeats * size + number
    if int(repeats.max()) >= _MOST_REPEATS:
        return None
    # which repetitions of each element there are, as the bits of a number
    all_of = torch.zeros(int(elements.max()) + 1, dtype=torch.int64).index_add_(0, elements, 1 << repeats)[elements]
    found: list[Nest] = []
    for mark, repeat in torch.stack([all_of, repeats], 1).unique(dim=0).tolist():
        chosen = (all_of == mark) & (repeats == repeat)
        positions = torch.full((int(elements.max()) + 1,), -1)
        positions[elements[chosen]] = targets[chosen]
        nests = fit(positions)
        if nests is None or int((positions >= 0).sum()) < int(chosen.sum()):
            return None
        found += nests
    return tuple(found) if len(found) <= _MOST_REPEATS else None


@functools.cache
def makes_view(func: Any) -> bool:
    """Return whether all results of an operation are views of its inputs."""
    schema = func._schema
    return not schema.is_mutable and bool(schema.returns) and all(result.alias_info is not None for result in schema.returns)


def _computed(names: Iterable[str], tensor: torch.Tensor) -> _Origin:
    return _Origin(frozenset(names), None, tensor.dtype, dtype_of(tensor), tensor)


def _may_overlap(nests: Sequence[Nest]) -> bool:
    ranges = sorted((nest.target_start, nest.target_start + reach(nest)) for nest in nests)
    return any(after[0] <= before[1] for before, after in itertools.pairwise(ranges))


def reach(nest: Nest) -> int:
    """Return the distance from the first target of a nest to its last one."""
    return sum((size - 1) * target for size, target in zip(nest.sizes, nest.targets, strict=True))


def extent(tensor: torch.Tensor) -> int:
    """Return the number of elements of the storage that a tensor reaches."""
    if tensor.numel() == 0:
        return 0
    return (
        int(tensor.storage_offset())
        + sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        + 1
    )


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _storage(tensor: torch.Tensor) -> int:
    """Return what identifies the storage of a tensor. Meta tensors have no address."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors in arguments of an operation. It is called for each operation of each loader, so it is quick."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return []
    return [tensor for value in values for tensor in _tensors(value)]
