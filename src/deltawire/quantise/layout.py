"""Layouts: which tensors of a state are quantised, and the names, types and shapes of the tensors that are published for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from ..dtypes import DType, dtype_named
from ..errors import DtypeMismatch, ShapeMismatch, TensorMissing, UnquantisableWeight
from ..format.bundle_names import MAIN, split_name
from ..tensors.bits import State, Tensor, TensorBits, state_bits
from ..tensors.casting import DTypeLike, wire_dtype
from . import experts
from .config import quantization_config
from .modules import ModulePatterns, fused_group, split_groups
from .recipe import Recipe, RecipeLike

if TYPE_CHECKING:
    from .scales import Scales

Role: TypeAlias = Literal["codes", "scale", "global_scale", "shape"]
"""The role of a published tensor for its weight."""

KeptDType: TypeAlias = "DTypeLike | Callable[[str, TensorSpec], DTypeLike | None] | None"
"""The type of tensors that are not quantised: one type for all, or a function of a tensor's name and its type and shape."""

_SOURCES = {dtype_named(name).code for name in ("F16", "BF16", "F32")}
_FLOATS = {*_SOURCES, dtype_named("F64").code}
"""Codes of types, because an integer is hashed faster than a type."""
_FP8 = {dtype_named(name).code for name in ("F8_E4M3", "F8_E5M2")}
_BF16, _F32, _I32, _I64, _U8, _E4M3 = (dtype_named(name) for name in ("BF16", "F32", "I32", "I64", "U8", "F8_E4M3"))


class TensorSpec(NamedTuple):
    """The type and shape of a tensor."""

    dtype: DType
    shape: tuple[int, ...]


class QuantisedWeight(NamedTuple):
    """A weight of two dimensions that becomes codes and scales.

    It lies in `source`, which is seen as rows: all dimensions but the last one are joined, after its last two were swapped if
    `is_transposed`. So an expert of a fused weight is a range of rows.
    """

    module: str
    """The name of the layer, such as "model.layers.0.mlp.up_proj"."""
    source: str
    """The name of the tensor that holds the weight."""
    dtype: DType
    """The type of the source."""
    first_row: int
    """The first row of the source that belongs to this weight."""
    rows: int
    columns: int
    is_transposed: bool
    group: str
    """Weights with an equal `group` share the scale that is one number per weight, if the recipe has one."""
    outputs: dict[Role, str]
    """The names of the published tensors."""


class Output(NamedTuple):
    """A published tensor."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    weight: QuantisedWeight | None
    """The weight that it belongs to; None for a tensor that is not quantised."""
    role: Role | None
    """Its role for its weight; None for a tensor that is not quantised."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def check(self, target: TensorBits) -> None:
        """Raise `DtypeMismatch` or `ShapeMismatch` if a tensor cannot hold this one.

        Parameters
        ----------
        target
            The tensor that is to be written.
        """
        if target.dtype != self.dtype:
            raise DtypeMismatch(f"tensor {self.name!r} has type {target.dtype.name}, but it is published as {self.dtype.name}.")
        if target.shape != self.shape:
            raise ShapeMismatch(f"tensor {self.name!r} has shape {target.shape}, but it is published with shape {self.shape}.")


class QuantisedLayout:
    """The tensors that a recipe makes of a model: pure names, types and shapes.

    Make one with `QuantisedLayout.of` or `QuantisedLayout.of_state`, which return the same object for equal arguments.

    Parameters
    ----------
    recipe
        The recipe.
    specs
        The type and shape of each tensor, by name.
    dtype
        The type of floating-point tensors that are not quantised, as for `of`.
    """

    def __init__(self, recipe: Recipe, specs: Mapping[str, TensorSpec], dtype: KeptDType = None) -> None:
        self.recipe = recipe
        self.specs: dict[str, TensorSpec] = dict(specs)
        """The types and shapes of the source tensors."""
        self.weights: list[QuantisedWeight] = []
        """The quantised weights, in the order of their sources."""
        self.outputs: dict[str, Output] = {}
        """The published tensors by name: those of each source tensor, in the order of the sources."""
        self.kept_modules: list[str] = []
        """The modules whose weights have two or more dimensions and are not quantised."""
        self.is_gpt_oss = recipe.name == "mxfp4" and any(experts.has_biases(name, specs) for name in specs)
        """Whether the tensors have the names of gpt-oss: `*_blocks` and `*_scales`. Only its experts are quantised."""
        self._dtype = dtype
        self._suffixes = _suffixes(recipe, self.is_gpt_oss)
        self._forms: dict[tuple[int, int, int, int], dict[Role, TensorSpec]] = {}
        """The types and shapes of outputs, by type, rows, columns and number of experts: most weights of a model are alike."""
        self.plans: dict[tuple[str, ...], Any] = {}
        """The plans of `quantise` for names of outputs."""
        self._plan()

    @classmethod
    def of(cls, recipe: RecipeLike, specs: Mapping[str, tuple[DType, tuple[int, ...]]], dtype: KeptDType = None) -> QuantisedLayout:
        """Return what a recipe makes of tensors of these types and shapes.

        Raise `UnquantisableWeight` if it cannot quantise one of them.

        Parameters
        ----------
        recipe
            The recipe, or its spelling.
        specs
            The type and shape of each tensor, by name.
        dtype
            The type of floating-point tensors that are not quantised. By default, those of the main bundle become bfloat16, and those of
            other bundles stay as they are.
        """
        checked = Recipe.of(recipe)
        key = (checked, _hashable(dtype), tuple((name, spec[0].code, tuple(spec[1])) for name, spec in specs.items()))
        found = _CACHE.get(key)
        if found is None:
            found = cls(checked, {name: TensorSpec(spec[0], tuple(spec[1])) for name, spec in specs.items()}, dtype)
            while len(_CACHE) >= _CACHED:
                _CACHE.pop(next(iter(_CACHE)), None)
            _CACHE[key] = found
        return found

    @classmethod
    def of_state(cls, recipe: RecipeLike, state: State, dtype: KeptDType = None) -> QuantisedLayout:
        """Return what a recipe makes of the tensors of a state. Raise `UnquantisableWeight` if it cannot quantise one of them.

        Parameters
        ----------
        recipe
            The recipe, or its spelling.
        state
            Names to tensors. A part of a tensor is enough: it says what the whole tensor is.
        dtype
            The type of floating-point tensors that are not quantised, as for `of`.
        """
        return cls.of(recipe, {tensor.name: (tensor.dtype, tensor.whole or tensor.shape) for tensor in state_bits(state)}, dtype)

    @cached_property
    def groups(self) -> dict[str, list[QuantisedWeight]]:
        """The weights that share a scale, by the text of their group. Empty if the recipe has no scale that is one number per weight."""
        found: dict[str, list[QuantisedWeight]] = {}
        if self.recipe.shares_scales:
            for weight in self.weights:
                found.setdefault(weight.group, []).append(weight)
        return found

    @cached_property
    def weights_of_source(self) -> dict[str, list[QuantisedWeight]]:
        """The weights that lie in each source tensor."""
        found: dict[str, list[QuantisedWeight]] = {}
        for weight in self.weights:
            found.setdefault(weight.source, []).append(weight)
        return found

    @cached_property
    def units(self) -> list[list[str]]:
        """The names of the outputs, in lists that can be quantised without reading a weight twice: one list for each group of weights
        that share a scale, for each other weight, and for each tensor that is not quantised."""
        of_unit: dict[str, list[str]] = {}
        for output in self.outputs.values():
            weight = output.weight
            key = f"={output.name}" if weight is None else weight.group if self.recipe.shares_scales else weight.module
            of_unit.setdefault(key, []).append(output.name)
        return list(of_unit.values())

    def quantization_config(self) -> dict[str, Any]:
        """Return the value of `quantization_config` for the model's config.json."""
        return quantization_config(self.recipe, self.kept_modules, [weight.module for weight in self.weights], self.is_gpt_oss)

    def quantise(
        self,
        names: Iterable[str],
        state: State,
        previous: State | None = None,
        out: Mapping[str, Tensor] | None = None,
        *,
        threads: int | None = None,
    ) -> dict[str, Tensor]:
        """Return published tensors, from a state that holds their sources.

        Raise `NonFiniteWeights` if a weight that is quantised is NaN or infinite, and `TensorMissing` if a source is missing. The contents
        of `out` are undefined after an error.

        Parameters
        ----------
        names
            The names of the published tensors to make.
        state
            The source tensors: at least those of the outputs, and of all weights that share a scale with them.
        previous
            The tensors that were published last, for their scales. If it is None, all scales are fresh.
        out
            Tensors to write into, by name. Other tensors are new.
        threads
            The number of threads to use; by default, as many as there are processors that this process may use.
        """
        from .quantise import quantise_outputs

        return quantise_outputs(self, names, state, previous, out, threads)

    def previous_scales(self, weight: QuantisedWeight, previous: State | None) -> Scales | None:
        """Return the scales of a weight that may stay, as arrays; None if they are missing or have another form, or if all are fresh.

        Parameters
        ----------
        weight
            The weight.
        previous
            The tensors that were published last, or None.
        """
        from .scales import previous_scales

        return previous_scales(self, weight, previous)

    def _plan(self) -> None:
        patterns = ModulePatterns(self.recipe.ignore)
        for name, spec in self.specs.items():
            if _is_quantised(name, self.specs):
                raise UnquantisableWeight(
                    f"tensor {name!r} has type {spec.dtype.name}: this model is quantised already.",
                    hint="Publish it without a recipe, or pass the weights that it was made from.",
                )
            weights = self._weights_in(name, spec, patterns)
            for weight in weights:
                self.weights.append(weight)
                for output in self._outputs_of(weight, spec):
                    self._add(output)
            if not weights:
                self._add(Output(name, self._kept_dtype(name, spec), spec.shape, None, None))
        for quantised, kept in split_groups((weight.module for weight in self.weights), self.kept_modules):
            raise UnquantisableWeight(
                f"layer {quantised!r} would be quantised, but {kept!r} would not, and engines join the two into one layer.",
                hint="Change the patterns (`ignore`, or --ignore on the command line), so that they match both layers or neither.",
            )

    def _add(self, output: Output) -> None:
        if output.name in self.outputs:
            raise UnquantisableWeight(f"two tensors would be published under the name {output.name!r}.")
        self.outputs[output.name] = output

    def _kept_dtype(self, name: str, spec: TensorSpec) -> DType:
        if spec.dtype.code not in _FLOATS:
            return spec.dtype
        if self._dtype is None:
            return _BF16 if split_name(name)[0] == MAIN else spec.dtype
        if callable(self._dtype) and not isinstance(self._dtype, type):
            chosen = self._dtype(name, spec)
            return spec.dtype if chosen is None else wire_dtype(chosen)
        return wire_dtype(self._dtype)

    def _weights_in(self, name: str, spec: TensorSpec, patterns: ModulePatterns) -> list[QuantisedWeight]:
        """Return the weights of a source tensor that are quantised. Note a module that is not."""
        if split_name(name)[0] != MAIN or spec.dtype.code not in _FLOATS:
            return []
        if len(spec.shape) == 2 and name.endswith(".weight"):
            module = name.removesuffix(".weight")
            if self.is_gpt_oss or patterns.match(module):
                self.kept_modules.append(module)
                return []
            return [self._weight(module, name, spec, (0, spec.shape[0], spec.shape[1]))]
        if len(spec.shape) == 3 and experts.is_fused(name):
            module = name.rpartition(".")[0]
            if patterns.match(module) or patterns.match(name):
                self.kept_modules.append(module)
                return []
            fused = experts.FusedExperts.of(name, self.specs)
            if experts.has_biases(name, self.specs) and not self.is_gpt_oss:
                raise UnquantisableWeight(f"weight {name!r} holds experts in the form of gpt-oss, which only recipe mxfp4 quantises.")
            found = [(name, 0, spec.shape[0] * fused.rows)] if self.is_gpt_oss else list(fused.parts())
            if not self.is_gpt_oss and _ignores_experts(name, [part for part, _, _ in found], patterns):
                self.kept_modules.append(module)
                return []
            return [self._weight(part, name, spec, (first, rows, fused.columns), fused.is_transposed) for part, first, rows in found]
        return []

    def _weight(
        self, module: str, name: str, spec: TensorSpec, where: tuple[int, int, int], is_transposed: bool = False
    ) -> QuantisedWeight:
        first, rows, columns = where
        size = self.recipe.group_size
        if spec.dtype.code not in _SOURCES:
            raise UnquantisableWeight(
                f"weight {name!r} has elements of type {spec.dtype.name}; recipes quantise F32, BF16 and F16.",
                hint="Convert the weight to F32, or add its layer to the recipe's patterns: `ignore`, or --ignore on the command line.",
            )
        if not rows * columns:
            raise UnquantisableWeight(f"weight {name!r} has no elements.")
        if size is not None and columns % size:
            raise UnquantisableWeight(
                f"weight {name!r} has {columns} columns, which is not a multiple of {size}, the group size of recipe {self.recipe}."
            )
        base = module if self.is_gpt_oss else f"{module}.weight"
        outputs: dict[Role, str] = {role: base + suffix for role, suffix in self._suffixes.items()}
        return QuantisedWeight(module, name, spec.dtype, first, rows, columns, is_transposed, fused_group(module), outputs)

    def _outputs_of(self, weight: QuantisedWeight, spec: TensorSpec) -> Iterable[Output]:
        forms = self._forms_of(weight.dtype, weight.rows, weight.columns, spec.shape[0] if self.is_gpt_oss else 0)
        return [Output(name, *forms[role], weight, role) for role, name in weight.outputs.items()]

    def _forms_of(self, dtype: DType, rows: int, columns: int, experts: int) -> dict[Role, TensorSpec]:
        found = self._forms.get(key := (dtype.code, rows, columns, experts))
        if found is None:
            recipe = self.recipe
            codes = {"e4m3": (_E4M3, columns), "e2m1": (_U8, columns // 2), "int4": (_I32, columns // 8)}[recipe.element]
            grid = (1,) if recipe.name == "fp8-tensor" else recipe.block.grid(rows, columns)
            found = self._forms[key] = {
                "codes": TensorSpec(codes[0], (rows, codes[1])),
                "scale": TensorSpec(recipe.scale_dtype(dtype), grid),
                "global_scale": TensorSpec(_F32, (1,)),
                "shape": TensorSpec(_I64, (2,)),
            }
            if experts:
                found["codes"] = TensorSpec(_U8, (experts, rows // experts, columns // 32, 16))
                found["scale"] = TensorSpec(_U8, (experts, rows // experts, columns // 32))
        return found

    def output(self, name: str) -> Output:
        """Return a published tensor. Raise `TensorMissing` if there is none with this name.

        Parameters
        ----------
        name
            Its name.
        """
        try:
            return self.outputs[name]
        except KeyError:
            raise TensorMissing(f"recipe {self.recipe} does not make a tensor {name!r} from this model.") from None


def _is_quantised(name: str, specs: Mapping[str, TensorSpec]) -> bool:
    """Tell whether a tensor holds codes. Its scales would be rounded to the type of kept tensors, so no pattern excepts it."""
    code = specs[name].dtype.code
    if code in _FLOATS or split_name(name)[0] != MAIN:
        return False
    if name.endswith(".weight") or experts.is_fused(name):
        return code in _FP8 or f"{name}_scale" in specs or f"{name}_scale_inv" in specs
    return name.endswith(".weight_packed") or experts.is_fused(name.removesuffix("_blocks"))


def _ignores_experts(name: str, parts: list[str], patterns: ModulePatterns) -> bool:
    """Tell whether patterns match the weights of all experts of a layer. Raise `UnquantisableWeight` if they match only some."""
    ignored = [part for part in parts if patterns.match(part)]
    if ignored and len(ignored) < len(parts):
        raise UnquantisableWeight(
            f"tensor {name!r} holds all experts of a layer, but the patterns in `ignore` match only some of them, such as {ignored[0]!r}.",
            hint="Change the patterns (`ignore`, or --ignore on the command line), so that they match all experts of the layer or none.",
        )
    return bool(ignored)


def _suffixes(recipe: Recipe, is_gpt_oss: bool) -> dict[Role, str]:
    if is_gpt_oss:
        return {"codes": "_blocks", "scale": "_scales"}
    if recipe.name == "fp8-block":
        return {"codes": "", "scale": "_scale_inv"}
    if recipe.element == "e4m3":
        return {"codes": "", "scale": "_scale"}
    found: dict[Role, str] = {"codes": "_packed", "scale": "_scale"}
    if recipe.has_global_scale:
        found["global_scale"] = "_global_scale"
    if recipe.element == "int4":
        found["shape"] = "_shape"
    return found


def _hashable(dtype: KeptDType) -> object:
    return dtype if dtype is None or callable(dtype) else wire_dtype(dtype).code


_CACHED = 4
_CACHE: dict[object, QuantisedLayout] = {}
"""The layouts that were used last. A publisher asks for the same one at each version."""

__all__ = ["KeptDType", "Output", "QuantisedLayout", "QuantisedWeight", "Role", "TensorSpec"]
