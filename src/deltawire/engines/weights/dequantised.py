"""Live weights that are numbers where the chain has codes and scales: each version is dequantised into the module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...chain.memory_state import MemoryState, Update
from ...delta.patch import ResolvedPatch
from ...delta.resolve import resolve_file
from ...dtypes import DType
from ...errors import BaseMismatch, CorruptDelta, EngineRefused, ResultMismatch
from ...format import delta_file
from ...format.delta_file import DeltaBytes
from ...format.digest import Digest
from ...format.records.record_parts import FileEntry
from ...format.records.version_records import Commit
from ...quantise.dequantise import dequantised_source
from ...quantise.layout import QuantisedLayout
from ...quantise.published_recipe import NUMBERS, published_recipe
from ...quantise.recipe import Recipe
from ...subscribe.prepared_swap import PreparedSwap
from ...subscribe.sync_context import SyncContext
from ...tensors.bits import tensor_bits
from ...tensors.module_tensors import tied_names
from ...tensors.state import state_digest
from ...tensors.torch_types import to_torch
from .fit import OTHER_MODEL
from .host_copy import StagedPatch, digest_on_host, host_copy, overwritten
from .live_tensors import LiveTensors, as_bits, check_digest, check_none_removed

if TYPE_CHECKING:
    import torch

    from ...format.records.record_parts import RecipeRecord

Arrays = dict[str, NDArray[Any]]

_CODES = ("_packed", "_blocks")
"""How the names of codes end, if they do not have the name of the weight itself."""
_PARTS = ("_scale", "_scale_inv", "_global_scale", "_shape")
"""How the names of tensors end that belong to the codes of a weight."""


class DequantisedWeights:
    """A module whose weights are floating-point numbers, and a chain whose versions a recipe has quantised.

    The published tensors are kept on the host, where deltas are decoded against them. The module gets their values: a code times
    its scale, rounded once to the type of the module's tensor. For bfloat16 these are the bits that transformers computes when
    it loads the checkpoint on a CPU. Only elements that change are written.

    Parameters
    ----------
    tensors
        The module's tensors.
    threads
        Number of threads for decoding and digests. None means one per core.
    """

    def __init__(self, tensors: LiveTensors, *, threads: int | None = None) -> None:
        self.state = MemoryState(threads=threads)
        """The published tensors."""
        self._tensors = tensors
        self._threads = threads
        self._form: ModuleForm | None = None
        self._memory: dict[str, int] = {}
        """The addresses of the module's tensors at the last look."""

    def inspect(self, target: Commit, context: SyncContext) -> bool:
        before, self._memory = self._memory, {name: tensor.data_ptr() for name, tensor in self._tensors.now().items()}
        return before == self._memory  # kept steps write to the tensors that they were made for

    def new_update(self) -> Update:
        assert self._form is not None
        return DequantisedUpdate(self._form, self.state, self._threads)

    def still_hold(self, digests: Mapping[FileEntry, Digest]) -> bool:
        """Return True: only the replica writes to the copy that deltas are decoded against."""
        return True

    def check_written(self, update: Update) -> None:
        """Read the written elements back."""
        assert isinstance(update, DequantisedUpdate)
        update.check()

    def check_all(self, commit: Commit) -> None:
        """Read every published tensor and every weight of the module, and compare their digests."""
        assert self._form is not None
        check_digest(state_digest(self.state.writable, threads=self._threads), commit)
        self._form.check(self._threads)

    def replacement(self, state: MemoryState, target: Commit) -> PreparedSwap:
        assert target.recipe is not None
        return _Load(self, ModuleForm(self._tensors, target.recipe, state.writable), state, target)

    def forget(self) -> None:
        self.state = MemoryState(threads=self._threads)


class ModuleForm:
    """How each tensor of a module follows from published tensors. Raises `EngineRefused` if the module cannot hold them.

    The published tensors themselves tell which weights are quantised (`published_recipe`).

    Parameters
    ----------
    tensors
        The module's tensors.
    recipe
        How the chain says that the version was quantised.
    arrays
        The published tensors.
    """

    def __init__(self, tensors: LiveTensors, recipe: RecipeRecord, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._tensors = tensors
        stems = {stem for name in arrays for stem in (name, *(name.removesuffix(end) for end in _CODES))}
        tensors.choose_names(stems)
        live = tensors.now()
        self._tied = tied_names(live)
        self._parts = {name for name in live if name in arrays and _weight_of(name) in live}
        """Scales that the module holds, too: compressed-tensors quantises activations, and weights once more, with them."""
        sources = {name: tensor for name, tensor in live.items() if name not in self._parts}
        own = _recipe(recipe, sources, arrays)
        absent = {name for name in self._tied if not _is_published(name, arrays)}
        specs = {name: (tensor_bits(name, tensor).dtype, tuple(tensor.shape)) for name, tensor in sources.items() if name not in absent}
        self._layout = QuantisedLayout.of(own, specs)
        self.names = [*specs, *self._parts]
        """The module's tensors that are written. Tied ones that the chain has once are written once."""
        self.digest = Digest()
        """The digest that these tensors of the module must have. Loads and updates set it when they have computed the weights."""
        self._check_fits(arrays)

    def live(self) -> dict[str, torch.Tensor]:
        """Return the module's tensors as they are now. Raises `EngineRefused` if other code has removed one of them."""
        found = self._tensors.now()
        check_none_removed(self.names, found)
        return found

    def affected(self, published: Iterable[str]) -> list[str]:
        """Return the module's tensors that follow from these published ones."""
        found: dict[str, None] = {}
        for name in published:
            output = self._layout.outputs.get(name)
            if output is not None:
                found[name if output.weight is None else output.weight.source] = None
            if name in self._parts:
                found[name] = None
        return list(found)

    def inputs(self, name: str) -> list[str]:
        """Return the published tensors that a tensor of the module follows from."""
        weights = self._layout.weights_of_source.get(name)
        return [name] if weights is None else [output for weight in weights for output in weight.outputs.values()]

    def value(self, name: str, tensor: torch.Tensor, arrays: Mapping[str, NDArray[Any]]) -> torch.Tensor:
        """Return what a tensor of the module must hold, on the host, in its type."""
        dtype = tensor_bits(name, tensor).dtype
        if name in self._parts:
            return to_torch(_part_as(arrays[name], dtype))
        return to_torch(np.ascontiguousarray(dequantised_source(arrays, self._layout, name, dtype.numpy)))

    def check(self, threads: int | None) -> None:
        """Raise `ResultMismatch` unless the whole module holds the values of the published tensors."""
        live = self.live()
        if digest_on_host({name: live[name] for name in self.names}, threads) != self.digest:
            raise ResultMismatch("the live weights are not the values of the published tensors.")

    def _check_fits(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        live = self.live()
        missing = next((output for name in self.names for output in self.inputs(name) if output not in arrays), None)
        if missing is not None:
            raise EngineRefused(
                f"recipe {self._layout.recipe} makes a tensor {missing!r} of this module, which the chain does not have.", hint=OTHER_MODEL
            )
        others = [name for name in arrays if name not in self._layout.outputs and name not in self._parts]
        if others and not self._tensors.keeps_others:
            raise EngineRefused(
                f"the chain has a tensor {min(others)!r}, which recipe {self._layout.recipe} does not make of this module.",
                hint=OTHER_MODEL,
            )
        for output in self._layout.outputs.values():
            array, found = arrays[output.name], tensor_bits(output.name, arrays[output.name]).dtype
            is_right = found == output.dtype if output.role in ("codes", "shape") else found in NUMBERS or found == output.dtype
            if array.shape != output.shape or not is_right:
                raise EngineRefused(
                    f"{output.name!r} is {found.name} {list(array.shape)} in the chain, but recipe {self._layout.recipe} makes "
                    f"{output.dtype.name} {list(output.shape)} of this module.",
                    hint=OTHER_MODEL,
                )
        for name, owner in self._tied.items():
            if name in self.names and owner in self.names and not _same(*(self.value(each, live[each], arrays) for each in (name, owner))):
                raise EngineRefused(f"{name!r} and {owner!r} are tied in the module, but differ in the chain.", hint=OTHER_MODEL)


class _Load:
    """Dequantises a full checkpoint into the module. The old weights are kept on the host until the new ones are confirmed."""

    def __init__(self, weights: DequantisedWeights, form: ModuleForm, state: MemoryState, target: Commit) -> None:
        self._weights = weights
        self._form, self._state, self._target = form, state, target
        self._old_form, self._old_state = weights._form, weights.state
        live = form.live()
        self._old = {name: to_torch(host_copy(live[name])) for name in form.names}

    def apply(self) -> None:
        live = self._form.live()
        digest = Digest()
        for name in self._form.names:
            value = self._form.value(name, live[name], self._state.writable)
            digest += digest_on_host({name: value})
            as_bits(live[name]).copy_(as_bits(value))
        self._form.digest = digest
        self._weights._form, self._weights.state = self._form, self._state

    def confirm(self, *, full: bool) -> None:
        """Read every weight, always: a module of unknown weights cannot be confirmed with less."""
        self._weights.check_all(self._target)

    def revert(self) -> None:
        self._weights._form, self._weights.state = self._old_form, self._old_state
        live = self._form.live()
        for name, old in self._old.items():
            as_bits(live[name]).copy_(as_bits(old))
        if not all(_same(live[name], old) for name, old in self._old.items()):
            raise BaseMismatch("the live weights are not what they were before the swap.")


class DequantisedUpdate:
    """An update of the published tensors on the host, and of the module's tensors that follow from them.

    Parameters
    ----------
    form
        How the module's tensors follow from the published ones.
    whole
        The published tensors.
    threads
        Number of threads for decoding. None means one per core.
    """

    def __init__(self, form: ModuleForm, whole: MemoryState, threads: int | None) -> None:
        self._form = form
        self._whole = whole
        self._threads = threads
        self._host: list[tuple[Arrays, ResolvedPatch, ResolvedPatch]] = []
        self._staged: dict[str, StagedPatch] = {}
        self._differences: dict[str, Digest] = {}
        """The numbers that the update adds to the digest of each of the module's tensors."""
        self.nbytes = 0
        self.is_applied = False

    def add(self, state: Arrays, delta: DeltaBytes) -> tuple[Digest, Digest]:
        """Decode a delta against a part of the published tensors, and dequantise what it changes. Changes nothing."""
        patch = resolve_file(state, delta_file.parse(delta, names=state), threads=self._threads)
        if patch.added or patch.removed:
            raise CorruptDelta("the delta adds or removes tensors, but an update of live weights can only change values.")
        old = {name: overwritten(state[name], change) for name, change in patch.changed.items()}
        self._host.append((state, patch, ResolvedPatch(patch.after, patch.before, old, {}, ())))
        live = self._form.live()
        for name in self._form.affected(patch.changed):  # again, if another file has changed a part of it: the codes, for example
            self._staged[name] = self._stage(name, live[name])
        patches = [change for _, new, old in self._host for each in (new, old) for change in each.changed.values()]
        self.nbytes = sum(change.indices.nbytes + change.values.nbytes for change in patches)
        self.nbytes += sum(staged.indices.nbytes + staged.new.nbytes + staged.old.nbytes for staged in self._staged.values())
        return patch.before, patch.after

    def apply(self) -> None:
        """Write the new values, even if `revert` failed half-way."""
        for state, patch, _ in self._host:
            patch.apply(state, threads=self._threads)
        for staged in self._staged.values():
            staged.write(staged.new)
        if not self.is_applied:
            self._form.digest += sum(self._differences.values(), Digest())
        self.is_applied = True

    def revert(self) -> None:
        """Write the old values back, even if `apply` failed half-way."""
        for state, _, patch in self._host:
            patch.apply(state, threads=self._threads)
        for staged in self._staged.values():
            staged.write(staged.old)
        if self.is_applied:
            self._form.digest -= sum(self._differences.values(), Digest())
        self.is_applied = False

    def check(self) -> None:
        """Raise `ResultMismatch` unless the module holds what was written last."""
        for staged in self._staged.values():
            if not staged.holds(staged.new if self.is_applied else staged.old):
                raise ResultMismatch("a weight of the module differs from what was written to it.")

    def _stage(self, name: str, tensor: torch.Tensor) -> StagedPatch:
        value = self._form.value(name, tensor, {each: self._new(each) for each in self._form.inputs(name)})
        self._differences[name] = digest_on_host({name: value}, self._threads) - digest_on_host({name: tensor}, self._threads)
        new, target = as_bits(value).to(tensor.device), as_bits(tensor)
        indices = (new != target).reshape(-1).nonzero()[:, 0]
        return StagedPatch(target, indices, new.reshape(-1)[indices], target.reshape(-1)[indices])

    def _new(self, name: str) -> NDArray[Any]:
        """Return a published tensor with all of its changes."""
        array = self._whole.writable[name]
        changes = [patch.changed[name] for _, patch, _ in self._host if name in patch.changed]
        if changes:
            array = array.copy()
            for change in changes:
                array.reshape(-1)[change.indices] = change.values
        return array


def holds_codes(live: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether a module holds codes itself, as the chain has them: 8-bit floating-point weights or packed ones."""
    return any(name.endswith(_CODES) or (tensor.is_floating_point() and tensor.element_size() == 1) for name, tensor in live.items())


def _recipe(record: RecipeRecord, sources: Iterable[str], arrays: Mapping[str, NDArray[Any]]) -> Recipe:
    try:
        return published_recipe(record, sources, arrays)
    except ValueError as error:
        raise EngineRefused(
            f"the chain's weights were quantised by recipe {record}, which this release does not know: {error}.", hint="Upgrade deltawire."
        ) from None


def _weight_of(name: str) -> str | None:
    return next((name.removesuffix(end) for end in sorted(_PARTS, key=len, reverse=True) if name.endswith(end)), None)


def _is_published(name: str, arrays: Mapping[str, NDArray[Any]]) -> bool:
    return any(name + end in arrays for end in ("", *_CODES))


def _part_as(array: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Return scales or shapes in the type that a module holds them in. Scales of 8 bits without a sign are exponents."""
    if tensor_bits("tensor", array).dtype == dtype:
        return np.ascontiguousarray(array)
    if array.dtype == np.uint8:
        array = np.ldexp(np.float32(1), array.astype(np.int32) - 127)
    return np.ascontiguousarray(array.astype(np.float32).astype(dtype.numpy))


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    import torch

    return first.dtype == second.dtype and bool(torch.equal(as_bits(first), as_bits(second).to(first.device)))
