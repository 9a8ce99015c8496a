"""Where a live model holds the tensors of its checkpoints.

transformers 5 does not load every checkpoint tensor into a parameter of its own: it fuses the experts of a layer, for example, and
`save_pretrained` splits them again. Chains hold what checkpoints hold, so live models are read and written through this layout.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedLayout
from .bits import TensorPart
from .module_tensors import NameMap, named_weights, wire_names

if TYPE_CHECKING:
    import torch

_WRAPPED = "_orig_mod"
"""The attribute in which `torch.compile` keeps the module that it wraps."""

_CONVERSIONS = "_weight_conversions"
"""The attribute in which transformers keeps the conversions with which it loaded a model."""


class CheckpointLayout:
    """The tensors of a module under the names, and in the shapes, that they have in its checkpoints.

    For a transformers model these are the tensors that `save_pretrained` writes. For any other module they are its parameters and
    persistent buffers.

    The layout is learned from the conversion that transformers itself runs when it saves the model. It runs here on tensors without
    memory, and copies are left out, so a checkpoint tensor that is a part of a parameter becomes a view of that parameter.
    A checkpoint tensor that consists of several parameters, one after the other, can be one tensor if these parameters get one memory.

    Parameters
    ----------
    module
        The live model.
    names
        Maps names in the checkpoint to names in the chain; by default they are the same.
    bundle
        The name of the bundle that the weights belong to.
    keeps_dequantised
        Return weights that transformers dequantised when it loaded them as the module holds them. By default they are quantised again, as
        `save_pretrained` does, so they are copies.
    """

    def __init__(self, module: torch.nn.Module, names: NameMap | None = None, *, bundle: str = "", keeps_dequantised: bool = False) -> None:
        self._module = module
        self._keeps_dequantised = keeps_dequantised
        self._names = names
        self._bundle = bundle
        self._learned: tuple[object, _Plan] | None = None
        self._views: dict[str, tuple[torch.Tensor, int, dict[str, torch.Tensor]]] = {}
        self._joined: dict[str, torch.Tensor] = {}

    def weights(self, *, in_place: bool = False) -> dict[str, torch.Tensor]:
        """Return all tensors by their names in the chain. A tied tensor appears under each of its names.

        Each tensor is the module's own memory and the same object in every call, unless the module's parameter was replaced. A tensor
        that consists of several parameters is a copy, which is made anew in every call. With `in_place` such parameters get one memory
        instead (`parameter.data` changes, the parameter and its values stay), and `UnsupportedLayout` is raised where there are still
        copies.
        """
        if in_place:
            self.check_in_place()
        own, plan = self._tensors_and_plan()
        found: dict[str, torch.Tensor] = {}
        for owner, views in plan.views.items():
            found |= self._views_of(owner, own[owner], views)
        if in_place:
            found |= {name: self._as_one(name, owners, own) for name, owners in plan.joined.items()}
        elif plan.copied:
            found |= self._copies({name: own[name] for name in plan.uncovered}, plan.copied)
        return wire_names(found.items(), self._names, bundle=self._bundle)

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert other tensors that have the module's own names and shapes as `weights` does. Unknown names do not change."""
        _, plan = self._tensors_and_plan()
        found: dict[str, torch.Tensor] = {}
        for own, tensor in tensors.items():
            views = plan.views.get(own, {own: None})
            found |= {name: tensor if view is None else _view(own, tensor.contiguous(), view) for name, view in views.items()}
        if plan.copied:
            found |= self._copies({name: tensors[name] for name in plan.uncovered if name in tensors}, plan.copied)
        return wire_names(found.items(), self._names, bundle=self._bundle)

    def own_weights(self) -> dict[str, torch.Tensor]:
        """Return the module's parameters and persistent buffers as they are, by the module's own names."""
        return named_weights(self._module, self._names, bundle=self._bundle)

    def owners(self) -> list[tuple[str, torch.Tensor]]:
        """Return each name of the checkpoint with each parameter or buffer of the module that holds something of that tensor."""
        own, plan = self._tensors_and_plan()
        found = [(name, own[owner]) for owner, views in plan.views.items() for name in views]
        return found + [(name, own[owner]) for name, owners in plan.joined.items() for owner in owners]

    def split(self, held: Mapping[str, TensorPart]) -> dict[str, TensorPart]:
        """Return the same elements by the names of the checkpoint's tensors. `held` is what a process has, by the module's own names.

        Nothing is copied. Every process that has a part of the module gets a part of every tensor, which may be empty. Names that the
        module does not have do not change. Raises `UnsupportedLayout` if a tensor is not one range of a parameter's elements.
        """
        self.check_in_place()
        _, plan = self._tensors_and_plan()
        if plan.joined:
            raise UnsupportedLayout(f"{min(plan.joined)!r} consists of several parameters, so a shard is not one range of it.")
        found: dict[str, TensorPart] = {}
        for own, part in held.items():
            for name, view in plan.views.get(own, {own: None}).items():
                found[name] = part if view is None else _range_of(name, part, view)
        return found

    @property
    def accepts_own_names(self) -> bool:
        """Tell whether a chain may also use the module's own names: they differ, and no name has two meanings."""
        own, plan = self._tensors_and_plan()
        as_they_are = {name for owner, views in plan.views.items() for name, view in views.items() if view is None and name == owner}
        saved = {name for views in plan.views.values() for name in views} | plan.copied
        return saved != own.keys() and saved & own.keys() <= as_they_are

    def check_in_place(self) -> None:
        """Raise `UnsupportedLayout` unless writing to `weights(in_place=True)` can set every element of the module."""
        _, plan = self._tensors_and_plan()
        problems = plan.copied - plan.joined.keys() or plan.uncovered.difference(*plan.joined.values())
        if problems and _was_dequantised(self._unwrapped) and not self._keeps_dequantised:
            raise UnsupportedLayout(
                f"{type(self._unwrapped).__name__} was loaded from a quantised checkpoint, and transformers quantises {min(problems)!r} "
                "again when it is saved.",
                hint="Load the model from a checkpoint that is not quantised.",
            )
        if problems:
            raise UnsupportedLayout(
                f"{type(self._unwrapped).__name__} computes {min(problems)!r} from several parts of its weights when it is saved, "
                f"so it cannot be updated in place ({len(problems)} such tensors)."
            )

    @property
    def _unwrapped(self) -> torch.nn.Module:
        module: torch.nn.Module = getattr(self._module, _WRAPPED, self._module)
        return module

    def _tensors_and_plan(self) -> tuple[dict[str, torch.Tensor], _Plan]:
        """Return the module's tensors by its own names, and the plan for them. It is made again if names, types or shapes change."""
        own = named_weights(self._module)
        conversions = getattr(self._unwrapped, _CONVERSIONS, None)
        form = (id(conversions), [(name, tensor.dtype, tensor.shape, tensor.stride()) for name, tensor in own.items()])
        if self._learned is None or self._learned[0] != form:
            self._learned = (form, _learn(self._unwrapped, own, self._keeps_dequantised))
            self._views.clear()
            self._joined.clear()
        return own, self._learned[1]

    def _as_one(self, name: str, owners: tuple[str, ...], own: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return several parameters as one tensor that shares their memory. They are moved to one memory if they are not adjacent yet."""
        tensors = [own[owner] for owner in owners]
        if not _are_adjacent(tensors):
            others = {id(tensor): tensor for tensor in own.values()}
            _give_one_memory(name, tensors, [other for key, other in others.items() if key not in set(map(id, tensors))])
        known = self._joined.get(name)
        if known is None or known.data_ptr() != tensors[0].data_ptr():
            rows = sum(len(tensor) for tensor in tensors)
            first = tensors[0].detach()
            known = first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
            self._joined[name] = known
        return known

    def _views_of(self, owner: str, tensor: torch.Tensor, views: dict[str, _View | None]) -> dict[str, torch.Tensor]:
        if all(view is None for view in views.values()):
            return dict.fromkeys(views, tensor)
        known = self._views.get(owner)
        if known is None or known[0] is not tensor or known[1] != tensor.data_ptr():
            made = {name: tensor if view is None else _view(owner, tensor, view) for name, view in views.items()}
            known = self._views[owner] = (tensor, tensor.data_ptr(), made)
        return known[2]

    def _copies(self, own: dict[str, torch.Tensor], wanted: frozenset[str]) -> dict[str, torch.Tensor]:
        made = _as_saved(self._unwrapped, {name: tensor.detach() for name, tensor in own.items()}, self._keeps_dequantised)
        return {name: made[name] for name in sorted(wanted)}


@dataclass(frozen=True, slots=True)
class _View:
    """A part of a parameter, in the terms of `torch.as_strided`. `offset` counts from the parameter's first element.

    `is_range` says that the elements follow each other without gaps, both in the parameter and in row-major order.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_range: bool


@dataclass(frozen=True, slots=True)
class _Plan:
    """`views` lists, for each own name, the checkpoint tensors that are views of that tensor; None means the whole tensor.

    `copied` are the checkpoint tensors that are not a part of one parameter. `uncovered` are the own names of tensors that have elements
    outside all views. `joined` are those of `copied` that consist of whole parameters, with the own names of these parameters.
    """

    views: dict[str, dict[str, _View | None]]
    copied: frozenset[str]
    uncovered: frozenset[str]
    joined: dict[str, tuple[str, ...]]


def _learn(module: torch.nn.Module, own: dict[str, torch.Tensor], keeps_dequantised: bool) -> _Plan:
    import torch

    if not _is_converted(module):
        return _Plan({name: {name: None} for name in own}, frozenset(), frozenset(), {})
    stand_ins = {
        name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta") for name, tensor in own.items()
    }
    owner_of = {_memory(stand_in): name for name, stand_in in stand_ins.items()}
    with _without_copies() as seen:
        saved = _as_saved(module, stand_ins, keeps_dequantised)
    views: dict[str, dict[str, _View | None]] = {name: {} for name in own}  # in the module's order, so that the first of tied names counts
    copied = set()
    joined: dict[str, tuple[str, ...]] = {}
    covered: Counter[str] = Counter()
    for name, tensor in saved.items():
        owner = owner_of.get(_memory(tensor))
        if owner is None:
            copied.add(name)
            owners = tuple(owner_of.get(_memory(part), "") for part in seen.joined.get(id(tensor), ()))
            if owners and all(one and _is_all_of(part, stand_ins[one]) for one, part in zip(owners, seen.joined[id(tensor)], strict=True)):
                joined[name] = owners
            continue
        covered[owner] += tensor.numel()
        if _is_all_of(tensor, stand_ins[owner]):
            views[owner][name] = None
        else:
            is_range = tensor.is_contiguous() and stand_ins[owner].is_contiguous()
            views[owner][name] = _View(tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), is_range)
    uncovered = frozenset(name for name, tensor in own.items() if covered[name] != tensor.numel())
    return _Plan(views, frozenset(copied), uncovered, joined)


def _is_converted(module: torch.nn.Module) -> bool:
    """Tell whether transformers may convert the module's weights when it saves them. This imports nothing."""
    models = sys.modules.get("transformers.modeling_utils")
    if models is None or not isinstance(module, models.PreTrainedModel) or getattr(module, "_hf_peft_config_loaded", False):
        return False
    return "transformers.core_model_loading" in sys.modules  # transformers 4 converts nothing


def _as_saved(module: torch.nn.Module, tensors: dict[str, torch.Tensor], keeps_dequantised: bool) -> dict[str, torch.Tensor]:
    """Return what `save_pretrained` would write for these tensors, which have the module's own names.

    With `keeps_dequantised`, this is what it would write if the module had not been loaded from a quantised checkpoint.
    """
    from transformers.core_model_loading import revert_weight_conversion

    try:
        with _with_default_conversions(module) if keeps_dequantised and _was_dequantised(module) else contextlib.nullcontext():
            return dict(revert_weight_conversion(module, dict(tensors)))
    except Exception as error:  # there is no layout, whatever the error is
        raise UnsupportedLayout(
            f"transformers cannot convert the weights of {type(module).__name__} as for saving: {error!r:.300}."
        ) from error


def _was_dequantised(module: torch.nn.Module) -> bool:
    """Tell whether transformers dequantised the module's weights when it loaded them."""
    operations = (
        each for conversion in getattr(module, _CONVERSIONS, None) or () for each in getattr(conversion, "operations", None) or ()
    )
    return any(type(each).__name__.endswith("Dequantize") for each in operations)


@contextlib.contextmanager
def _with_default_conversions(module: torch.nn.Module) -> Iterator[None]:
    """Let transformers find the conversions of the module's class, instead of those with which the module was loaded."""
    conversions = getattr(module, _CONVERSIONS)
    setattr(module, _CONVERSIONS, None)
    try:
        yield
    finally:
        setattr(module, _CONVERSIONS, conversions)


def _without_copies() -> Any:
    """Return a context in which `contiguous` and `clone` return the tensor itself, so that views stay views.

    `squeeze` without an argument removes only the first dimension of size 1.

    The attribute `joined` of the context lists tensors that were concatenated by rows, by the id of the result.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class WithoutCopies(TorchFunctionMode):  # type: ignore[misc]  # torch is not type-checked here
        def __init__(self) -> None:
            super().__init__()
            self.joined: dict[int, list[torch.Tensor]] = {}
            self._results: list[torch.Tensor] = []  # kept alive, because other objects could get their ids

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function in (torch.Tensor.contiguous, torch.Tensor.clone):
                return args[0]
            if function is torch.Tensor.squeeze and len(args) == 1 and not kwargs and 1 in args[0].shape:
                # transformers means the dimension of the experts, which it has split. Others of size 1 belong to the checkpoint tensor.
                return args[0].squeeze(list(args[0].shape).index(1))
            result = function(*args, **kwargs)
            if function is torch.cat and (args[1] if len(args) > 1 else kwargs.get("dim", 0)) == 0:
                self.joined[id(result)] = list(args[0] if args else kwargs["tensors"])
                self._results.append(result)
            return result

    return WithoutCopies()


def _memory(tensor: torch.Tensor) -> int:
    """Return a key that is the same for all views of one tensor. Tensors on the meta device have no address."""
    found: int = tensor.untyped_storage()._cdata
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether this is an ordinary tensor, not another class such as a DTensor."""
    import torch

    return type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _is_all_of(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Tell whether a view of a tensor is the whole tensor, with the same shape and strides."""
    return bool(view.shape == tensor.shape and view.stride() == tensor.stride())


def _are_adjacent(tensors: list[torch.Tensor]) -> bool:
    """Tell whether tensors are adjacent in one memory."""
    if not all(_is_plain(tensor) and tensor.is_contiguous() and tensor.dtype == tensors[0].dtype for tensor in tensors):
        return False
    one_memory = all(_memory(tensor) == _memory(tensors[0]) for tensor in tensors)
    return one_memory and all(after.data_ptr() == before.data_ptr() + before.nbytes for before, after in itertools.pairwise(tensors))


def _give_one_memory(name: str, tensors: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Move tensors into one new memory, bit for bit. `others` are the module's other tensors."""
    import torch

    if not all(_is_plain(tensor) and tensor.dtype == tensors[0].dtype and tensor.device == tensors[0].device for tensor in tensors):
        raise UnsupportedLayout(f"{name!r} consists of several tensors of the module, which differ in type or device.")
    taken = [(tensor.device, tensor.data_ptr()) for tensor in (*others, *tensors) if _is_plain(tensor)]
    if any(
        (tensor.device.type == "cpu" and tensor.is_shared()) or taken.count((tensor.device, tensor.data_ptr())) > 1 for tensor in tensors
    ):
        raise UnsupportedLayout(f"{name!r} consists of several tensors of the module, whose memory is also used by others.")
    bits = getattr(torch, f"int{8 * tensors[0].element_size()}")
    memory = torch.cat([tensor.detach().contiguous().view(bits) for tensor in tensors]).view(tensors[0].dtype)
    for tensor, piece in zip(tensors, memory.split([len(tensor) for tensor in tensors]), strict=True):
        tensor.data = piece


def _range_of(name: str, part: TensorPart, view: _View) -> TensorPart:
    """Return the elements that a part of a parameter has of a view of that parameter."""
    size = math.prod(view.shape)
    if not view.is_range:
        raise UnsupportedLayout(f"the elements of {name!r} are not one range of the parameter that holds them.")
    start = min(max(part.start - view.offset, 0), size)
    stop = min(max(part.stop - view.offset, start), size)
    first = start + view.offset - part.start
    return TensorPart(part.elements[first : first + stop - start] if stop > start else part.elements[:0], view.shape, start)


def _view(owner: str, tensor: torch.Tensor, view: _View) -> torch.Tensor:
    if not _is_plain(tensor):
        raise UnsupportedLayout(f"{owner!r} holds several tensors of a checkpoint, but is a {type(tensor).__name__}.")
    return tensor.detach().as_strided(view.shape, view.stride, tensor.storage_offset() + view.offset)
