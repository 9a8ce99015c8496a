"""Find out where a worker keeps each tensor of a chain: compose both stages of learning.

    checkpoint  →  raw parameter      loader_copies.py
                →  memory             processing_map.py

If the composition is one contiguous range with the same bits, the tensor is *direct*: its memory is the tensor of the checkpoint.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ....format.bundle_names import MAIN
from ....subscribe.tensor_table import TensorSpec, TensorTable
from ....tensors.torch_types import gpu_of
from ..modules.reachable import Path
from ..modules.recompute import FAILED, LOST, UNKNOWN, derived_from, moves_experts, rule_for
from . import loader_copies, processing_map
from .loader_copies import LoaderCopies, LoaderCopy, RawParameter, reach, record_copies
from .model_layout import LearningFacts, ModelLayout, tensor_at
from .nested_strides import compose, fit, nest_of, positions_of
from .placements import coverage, direct_view, distinct, numel
from .position_decoder import UnitMap
from .processing_map import ModuleMap, NotLearnt, learn_module
from .processing_views import learn_views
from .types import ModuleRule, Nest, Placement, TensorLayout
from .unit_values import storage_units

_MOST_FITTED = 1 << 26
"""A tensor with more units keeps the nests of both stages, if no single nest is found by composition."""
DRAFT_PREFIX = "draft."
"""The names of a draft model's modules begin with this."""
_SHAPE = ".weight_shape"
"""The names of tensors that hold the shape of a packed weight end with this. Updates do not change them: tensors keep their shapes."""
OFF = "DELTAWIRE_LEARN"
"""If this variable is "0", no layout is learnt, so every update loads whole modules."""


def learn_layout(
    model: Any, vllm_config: Any, table: TensorTable, *, draft: Any = None, draft_bundle: str = MAIN, most_bytes: int | None = None
) -> ModelLayout:
    """Find where a model keeps each element of the chain's tensors. Changes nothing. Call it on the worker's main thread.

    It never fails. A tensor whose position is not found has the kind "module", with the reason.

    Parameters
    ----------
    model
        The model of this worker.
    vllm_config
        vLLM's configuration.
    table
        The tensors of the chain.
    draft
        A draft model that takes tensors of the same chain.
    draft_bundle
        The bundle that the draft model takes. The model takes the main one, and tensors of all others are held by nobody.
    most_bytes
        The most memory that may be used on the device. By default, nearly all that is free on a GPU.
    """
    began = time.perf_counter()
    if os.environ.get(OFF) == "0":
        return _unknown(table, f"{OFF} is 0")
    if missing := [*loader_copies.missing_parts(), *processing_map.missing_parts()]:
        return _unknown(table, f"this vLLM does not have {missing[0]}")
    for each in (model, draft):
        if hasattr(each, "process_weights_after_loading"):
            return _unknown(table, f"{type(each).__name__} processes its weights as a whole")
    try:
        learner = _Learner(vllm_config, table, most_bytes)
        copies = record_copies(model, vllm_config, table)
        if not any(copies.copies.values()):  # updates would write nothing, and all tensors would seem to be those of other workers
            return _unknown(table, f"the loader of {type(model).__name__} copies no tensor of the chain", copies.rejected)
        learner.add(model, copies)
        if draft is not None:
            learner.add(draft, record_copies(draft, vllm_config, table, bundle=draft_bundle, prefix=DRAFT_PREFIX))
        layout = learner.layout(model)
        layout.rejected = copies.rejected
        _give_back_memory(model)
    except Exception as error:
        return _unknown(table, f"its layout cannot be learnt: {type(error).__name__}: {error}")
    layout.facts.seconds = time.perf_counter() - began
    return layout


def _give_back_memory(model: Any) -> None:
    """Return the memory that learning has used to the GPU, because vLLM divides what is free."""
    if any(gpu_of(parameter) for parameter in model.parameters()):
        torch.cuda.empty_cache()


def _unknown(table: TensorTable, reason: str, rejected: Mapping[str, str] | None = None) -> ModelLayout:
    tensors = {name: TensorLayout(spec, "module", reason=reason) for name, spec in sorted(table.items())}
    layout = ModelLayout(tensors, {}, (), LearningFacts(unlearnt={"": reason}))
    layout.rejected = rejected or {}
    return layout


@dataclass(slots=True)
class _Found:
    """The facts about one tensor while layouts are composed."""

    placements: list[Placement] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)
    is_copied: bool = False


class _Learner:
    """Composes what both stages found, for a model and its draft."""

    def __init__(self, vllm_config: Any, table: TensorTable, most_bytes: int | None) -> None:
        self._config = vllm_config
        self._table = table
        self._most_bytes = most_bytes
        self._found = {name: _Found() for name in sorted(table)}
        self._rules: dict[str, ModuleRule] = {}
        self._copies: dict[str, list[tuple[str, LoaderCopy]]] = {}
        self._parts: dict[str, set[str]] = {}
        self._constant: dict[str, set[Path]] = {}
        self._maps: dict[tuple[Any, ...], ModuleMap] = {}
        self._held: dict[tuple[int, Path], tuple[Any, Path]] = {}
        self._composed: dict[tuple[Nest, Nest], list[tuple[Nest, ...]]] = {}
        self.facts = LearningFacts()

    def add(self, model: Any, copies: LoaderCopies) -> None:
        """Learn the processing of a model's modules, and place the tensors that are loaded into it."""
        for name, reason in copies.refused.items():
            self._found[name].reasons.append(reason)
        by_module: dict[int, list[tuple[str, LoaderCopy]]] = {}
        for name, found in copies.copies.items():
            for each in found:
                by_module.setdefault(id(each.parameter.module), []).append((name, each))
                self._parts.setdefault(each.parameter.module_name, set()).add(name)
        for name, touched in copies.touched.items():
            for parameter in touched:
                self._add_loaded(name, parameter, copies.refused[name])
        known: set[int] = set()
        for module_copies in by_module.values():
            parameter = module_copies[0][1].parameter
            names = sorted({each.parameter.name for _, each in module_copies})
            learnt = self._learn(parameter, names)
            if learnt.arithmetic:
                self._copies[parameter.module_name] = module_copies
                self._constant[parameter.module_name] = learnt.constant
            live = _live_tensors(parameter.module)
            known |= {live[path].untyped_storage().data_ptr() for path in learnt.constant if path in live}
            for name, each in module_copies:
                self._place(name, each, learnt)
        for parameter in copies.parameters:  # what a module had before it was loaded is not computed from weights
            tensor = tensor_at(parameter.module, (parameter.name,))
            if tensor is not None:
                known.add(tensor.untyped_storage().data_ptr())
        self._find_derived(model, copies.parameters, by_module, known)

    def layout(self, model: Any) -> ModelLayout:
        """Return the layout of all tensors."""
        tensors = {name: self._tensor(name, spec) for name, spec in sorted(self._table.items())}
        inputs: dict[str, list[str]] = {name: [] for name in self._rules}
        for name, layout in tensors.items():
            for module in layout.modules:
                inputs[module].append(name)
        rules = {name: ModuleRule(name, rule.how, tuple(inputs[name]), rule.reason) for name, rule in self._rules.items() if inputs[name]}
        copies = {name: found for name, found in self._copies.items() if name in rules}
        return ModelLayout(tensors, rules, list(self._held.values()), self.facts, copies, self._parts, self._constant, model)

    def _add_loaded(self, name: str, parameter: RawParameter, reason: str) -> None:
        """Let a module be loaded anew if a tensor changes whose loader does more than to copy it. If a shape changes, everything is.

        vLLM casts the shapes of experts. A rule for them would be the rule of the whole module, which then would never be processed again.
        """
        module = parameter.module_name
        self._parts.setdefault(module, set()).add(name)
        if name.endswith(_SHAPE):
            return
        self._found[name].modules.add(module)
        how: Literal["load_anew", "refuse"] = "refuse" if moves_experts(parameter.module) else "load_anew"
        self._rules[module] = ModuleRule(module, how, (), reason)

    def _learn(self, parameter: RawParameter, names: Sequence[str]) -> ModuleMap:
        """Return what processing does with these raw parameters."""
        module = parameter.module
        if processing_map.is_attention(module):
            return ModuleMap(arithmetic=dict.fromkeys(names, "vLLM computes the scales of the KV cache from it"))
        if moves_experts(module):
            return ModuleMap(arithmetic=dict.fromkeys(names, "expert load balancing (EPLB) moves its experts while the server runs"))
        if not processing_map.is_processed(module):
            return _identity(module, names)
        try:
            return self._learn_processing(module, names)
        except Exception as error:  # one module that is unlike all others must not cost the layout of the others
            reason = str(error) if isinstance(error, NotLearnt) else f"its processing cannot be learnt: {type(error).__name__}: {error}"
            self.facts.unlearnt[parameter.module_name] = reason
            kind = error.kind if isinstance(error, NotLearnt) else UNKNOWN
            return ModuleMap(arithmetic=dict.fromkeys(names, reason), classes={(name, name): kind for name in names})

    def _learn_processing(self, module: Any, names: Sequence[str]) -> ModuleMap:
        if (views := learn_views(module, self._config, names)) is not None:
            self.facts.runs += views.runs
            self.facts.viewed += 1
            return views
        key = (*processing_map.same_processing(module), tuple(names))
        found = self._maps.get(key)
        if found is not None and processing_map.holds_for(module, self._config, found):
            self.facts.reused += 1
            self.facts.runs += 1
            return found
        found = learn_module(module, self._config, names, most_bytes=self._most_bytes)
        self.facts.learnt += 1
        self.facts.runs += found.runs
        self._maps[key] = found
        return found

    def _place(self, name: str, each: LoaderCopy, learnt: ModuleMap) -> None:
        """Add the placements that one copy of a loader leads to."""
        found, parameter = self._found[name], each.parameter
        found.is_copied = True
        raw_name = parameter.name
        maps = learnt.maps.get(raw_name, [])
        reason = learnt.arithmetic.get(raw_name) or (None if maps else f"vLLM does not keep {raw_name} in a tensor")
        if reason is not None:
            found.reasons.append(f"{parameter.module_name}: {reason}")
            found.modules.add(parameter.module_name)
            classes = dict(learnt.classes)
            if not any(name == raw_name for name, _ in classes):
                classes[raw_name, raw_name] = FAILED if raw_name in learnt.arithmetic else LOST
            rule = rule_for(parameter.module, parameter.module_name, classes)
            known = self._rules.get(rule.name)
            if known is None or known.how == "reprocess":  # one parameter may need more than another
                self._rules[rule.name] = ModuleRule(rule.name, rule.how, (), reason if rule.how == "reprocess" else rule.reason)
        for unit_map in maps:
            live = tensor_at(parameter.module, unit_map.path)
            if live is None:
                continue
            self._held.setdefault((id(parameter.module), unit_map.path), (parameter.module, unit_map.path))
            memory = storage_units(live, unit_map.unit_bits)
            first = _in_units(each.nest, parameter.meta.element_size() * 8 // unit_map.unit_bits)
            for nests in self._compose(first, unit_map):
                found.placements.append(Placement(nests, memory, unit_map.unit_bits, each.widened, unit_map.table))

    def _compose(self, first: Nest, unit_map: UnitMap) -> list[tuple[Nest, ...]]:
        """Return the nests of both stages as one nest each, if possible."""
        found: list[tuple[Nest, ...]] = []
        for second in unit_map.nests:
            low, high = first.target_start, first.target_start + reach(first)
            if high < second.source_start or low > second.source_start + _source_reach(second):
                continue
            both = compose(first, second)
            if both is not None:
                found.append((both,))
                continue
            key = (first, second)
            if key not in self._composed:
                self._composed[key] = _fitted(first, second)
            found += self._composed[key]
        return found

    def _find_derived(
        self, model: Any, parameters: Iterable[RawParameter], by_module: Mapping[int, Sequence[tuple[str, LoaderCopy]]], known: set[int]
    ) -> None:
        """Find tensors that were computed from weights and that no placement covers. Their inputs need a rule."""
        known = known | {placement.memory.data_ptr() for found in self._found.values() for placement in found.placements}
        names = {id(parameter.module): parameter.module_name for parameter in parameters}
        for name, module in model.named_modules():
            ones = {("weight",)} if getattr(module, "has_weight", True) is False else set()  # a norm without a weight multiplies by them
            derived = [path for path, tensor in _live_tensors(module).items() if path not in ones and _is_derived(path, tensor, known)]
            if not derived:
                continue
            name = names.get(id(module), name)
            known_rule = self._rules.get(name)
            if known_rule is not None and not derived_from(module):
                continue  # its processing computes them, which the rule says already
            reason = f"vLLM computes {'.'.join(derived[0])} of {name} from it"
            if known_rule is None:  # a module that is loaded anew is computed again, too
                self._rules[name] = ModuleRule(name, "recompute" if derived_from(module) else "refuse", (), reason)
            for source in _inputs(model, name, module):
                for tensor_name, _ in by_module.get(id(source), ()):
                    self._found[tensor_name].modules.add(name)
                    self._found[tensor_name].is_copied = True

    def _tensor(self, name: str, spec: TensorSpec) -> TensorLayout:
        found = self._found[name]
        placements = distinct(found.placements)
        modules = tuple(sorted(found.modules))
        reason = found.reasons[0] if found.reasons else ""
        if numel(spec) == 0 or not (found.is_copied or found.reasons):
            return TensorLayout(spec, "absent", reason="no loader of this worker copies it")
        held = coverage(spec, placements)
        if found.reasons and (held != "whole" or not modules):
            return TensorLayout(spec, "module", modules=modules, reason=reason)
        if held == "none":
            return TensorLayout(spec, "absent", modules=modules, reason="this worker holds none of its elements")
        if held == "part":
            return TensorLayout(spec, "partial", placements, None, modules, "this worker holds only some of its elements")
        direct = direct_view(spec, placements)
        return TensorLayout(spec, "mapped" if direct is None else "direct", placements, direct, modules, reason)


def _identity(module: Any, names: Sequence[str]) -> ModuleMap:
    """Return the map of a module that vLLM does not process: raw parameters are where they were loaded."""
    found = ModuleMap()
    raw = {name: tensor for each in loader_copies.raw_tensors(module) for name, tensor in each.items()}
    for name in names:
        live, meta = tensor_at(module, (name,)), raw[name]
        if live is None or live.dtype != meta.dtype or live.shape != meta.shape:
            found.arithmetic[name] = f"the model has replaced {name}"
            continue
        dimensions = zip(meta.shape, meta.stride(), live.stride(), strict=True)
        nest = nest_of(dimensions, 0, live.storage_offset()) if meta.numel() else None
        if nest is None:
            found.arithmetic[name] = f"the model has replaced {name}"
        else:
            found.maps[name] = [UnitMap((name,), live.element_size() * 8, (nest,))]
    return found


def _fitted(first: Nest, second: Nest) -> list[tuple[Nest, ...]]:
    """Return nests for both moves, found from all positions. If there are too many units, the moves stay apart."""
    span = _source_reach(first) + 1
    if span <= _MOST_FITTED:
        positions = positions_of([first, second], first.source_start, first.source_start + span, torch.device("cpu"))
        if not bool((positions >= 0).any()):
            return []
        fitted = fit(positions)
        if fitted is not None:
            shifted = [Nest(n.sizes, n.sources, n.targets, n.source_start + first.source_start, n.target_start) for n in fitted]
            return [(nest,) for nest in shifted]
    return [(first, second)]


def _in_units(nest: Nest, per_element: int) -> Nest:
    """Return a nest of elements as a nest of units, of which each element has several."""
    if per_element == 1:
        return nest
    dimensions = [(n, s * per_element, t * per_element) for n, s, t in zip(nest.sizes, nest.sources, nest.targets, strict=True)]
    made = nest_of([*dimensions, (per_element, 1, 1)], nest.source_start * per_element, nest.target_start * per_element)
    assert made is not None
    return made


def _source_reach(nest: Nest) -> int:
    return sum((size - 1) * source for size, source in zip(nest.sizes, nest.sources, strict=True))


def _live_tensors(module: Any) -> dict[Path, torch.Tensor]:
    return {path: tensor for path, tensor in processing_map.tensors_of(module).items() if tensor.device.type != "meta"}


_HARMLESS = frozenset(
    {"kv_cache", "cos_sin_cache", "inv_freq", "_k_scale", "_v_scale", "_q_scale", "_prob_scale"}
    | {f"{part}lora_{side}_stacked" for part in ("", "w13_", "w2_") for side in "ab"}
    | {"lora_a_stacked_2d", "full_weight_stacked", "full_bias_stacked"}
)
"""Attributes whose tensors do not depend on weights of the chain: caches, default scales, and the slots of LoRA adapters, which are never
merged into weights. Scales that do come from the chain have loaders (see `_learn`).
"""


def _is_derived(path: Path, tensor: torch.Tensor, known: set[int]) -> bool:
    if not tensor.is_floating_point() or tensor.numel() <= 1 or any(name in _HARMLESS for name in path):
        return False
    return tensor.untyped_storage().data_ptr() not in known


def _inputs(model: Any, name: str, module: Any) -> Iterator[Any]:
    """Yield the modules from which a module may compute something: its own parts, or those of its parent if it has no weights."""
    parts = list(module.modules())
    referred = [value for value in vars(module).values() if isinstance(value, torch.nn.Module)]
    if not any(part._parameters for part in parts) and not referred:
        parent = name.removeprefix(DRAFT_PREFIX).rpartition(".")[0]
        parts = list(model.get_submodule(parent).modules())
    yield from dict.fromkeys([*parts, *(part for each in referred for part in each.modules())])
