"""Where a live model holds the tensors of its checkpoints.

transformers 5 does not load every checkpoint tensor into a parameter of its own: it fuses the experts of a layer, for example, and
`save_pretrained` splits them again. Chains hold what checkpoints hold, so live models are read and written through this layout.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedLayout
from .bits import TensorPart
from .module_tensors import NameMap, named_weights, wire_names

if TYPE_CHECKING:
    import torch

_WRAPPED = "_orig_mod"
"""The attribute in which `torch.compile` keeps the module that it wraps."""


class CheckpointLayout:
    """The tensors of a module under the names, and in the shapes, that they have in its checkpoints.

    For a transformers model these are the tensors that `save_pretrained` writes. For any other module they are its parameters and
    persistent buffers. `names` maps the checkpoint's names to those of the chain, and `bundle` is put before them.

    The layout is learned from the conversion that transformers itself runs when it saves the model. It runs here on tensors without
    memory, and copies are left out, so a checkpoint tensor that is a part of a parameter comes out as a view of that parameter.
    A checkpoint tensor that consists of several parameters, one after the other, can be had as one tensor if they get one memory.
    """

    def __init__(self, module: torch.nn.Module, names: NameMap | None = None, *, bundle: str = "") -> None:
        self._module = module
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
        own, plan = self._look()
        found: dict[str, torch.Tensor] = {}
        for owner, views in plan.views.items():
            found |= self._views_of(owner, own[owner], views)
        if in_place:
            found |= {name: self._as_one(name, owners, own) for name, owners in plan.joined.items()}
        elif plan.copied:
            found |= self._copies({name: own[name] for name in plan.uncovered}, plan.copied)
        return wire_names(found.items(), self._names, bundle=self._bundle)

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return other tensors of the module's own names and shapes as `weights` returns the module's. Names it does not have stay."""
        _, plan = self._look()
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
        own, plan = self._look()
        found = [(name, own[owner]) for owner, views in plan.views.items() for name in views]
        return found + [(name, own[owner]) for name, owners in plan.joined.items() for owner in owners]

    def split(self, held: Mapping[str, TensorPart]) -> dict[str, TensorPart]:
        """Return the same elements by the names of the checkpoint's tensors. `held` is what a process has, by the module's own names.

        Nothing is copied. Every process that has a part of the module gets a part, if an empty one, of every tensor. Names that the
        module does not have stay as they are. Raises `UnsupportedLayout` where a tensor is not one run of a parameter's elements.
        """
        self.check_in_place()
        _, plan = self._look()
        if plan.joined:
            raise UnsupportedLayout(f"{min(plan.joined)!r} consists of several parameters, whose shards are not one run of it.")
        found: dict[str, TensorPart] = {}
        for own, part in held.items():
            for name, view in plan.views.get(own, {own: None}).items():
                found[name] = part if view is None else _run_of(name, part, view)
        return found

    @property
    def accepts_own_names(self) -> bool:
        """Tell whether a chain may also use the module's own names: they differ, and no name has two meanings."""
        own, plan = self._look()
        as_they_are = {name for owner, views in plan.views.items() for name, view in views.items() if view is None and name == owner}
        saved = {name for views in plan.views.values() for name in views} | plan.copied
        return saved != own.keys() and saved & own.keys() <= as_they_are

    def check_in_place(self) -> None:
        """Raise `UnsupportedLayout` unless writing to `weights(in_place=True)` can set every element of the module."""
        _, plan = self._look()
        problems = plan.copied - plan.joined.keys() or plan.uncovered.difference(*plan.joined.values())
        if problems:
            raise UnsupportedLayout(
                f"{type(self._unwrapped).__name__} computes {min(problems)!r} from several places of its weights when it is saved, "
                f"so it cannot be updated in place ({len(problems)} such tensors)."
            )

    @property
    def _unwrapped(self) -> torch.nn.Module:
        module: torch.nn.Module = getattr(self._module, _WRAPPED, self._module)
        return module

    def _look(self) -> tuple[dict[str, torch.Tensor], _Plan]:
        """The module's tensors by its own names, and the plan for them. The plan is made again if the module has changed its form."""
        own = named_weights(self._module)
        conversions = getattr(self._unwrapped, "_weight_conversions", None)
        form = (id(conversions), [(name, tensor.dtype, tensor.shape, tensor.stride()) for name, tensor in own.items()])
        if self._learned is None or self._learned[0] != form:
            self._learned = (form, _learn(self._unwrapped, own))
            self._views.clear()
            self._joined.clear()
        return own, self._learned[1]

    def _as_one(self, name: str, owners: tuple[str, ...], own: dict[str, torch.Tensor]) -> torch.Tensor:
        """Several parameters as one tensor of their own memory. They get one memory if they do not lie behind each other yet."""
        tensors = [own[owner] for owner in owners]
        if not _follow_each_other(tensors):
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
        made = _as_saved(self._unwrapped, {name: tensor.detach() for name, tensor in own.items()})
        return {name: made[name] for name in sorted(wanted)}


@dataclass(frozen=True, slots=True)
class _View:
    """A part of a parameter, as `torch.as_strided` takes it. `offset` counts from the parameter's first element.

    `is_run` says that the elements follow each other without gaps, both in the parameter and in row-major order.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_run: bool


@dataclass(frozen=True, slots=True)
class _Plan:
    """`views` says for each own name which checkpoint tensors lie in that tensor; None stands for all of it, as it is.

    `copied` are the checkpoint tensors that are not part of one parameter. `uncovered` are the own names of tensors that are not made up
    of views entirely. `joined` are those of `copied` that are whole parameters in a row, with the own names of these.
    """

    views: dict[str, dict[str, _View | None]]
    copied: frozenset[str]
    uncovered: frozenset[str]
    joined: dict[str, tuple[str, ...]]


def _learn(module: torch.nn.Module, own: dict[str, torch.Tensor]) -> _Plan:
    import torch

    if not _is_converted(module):
        return _Plan({name: {name: None} for name in own}, frozenset(), frozenset(), {})
    stand_ins = {
        name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta") for name, tensor in own.items()
    }
    owner_of = {_memory(stand_in): name for name, stand_in in stand_ins.items()}
    with _without_copies() as seen:
        saved = _as_saved(module, stand_ins)
    views: dict[str, dict[str, _View | None]] = {name: {} for name in own}  # in the module's order: the first of tied names counts
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
            is_run = tensor.is_contiguous() and stand_ins[owner].is_contiguous()
            views[owner][name] = _View(tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), is_run)
    uncovered = frozenset(name for name, tensor in own.items() if covered[name] != tensor.numel())
    return _Plan(views, frozenset(copied), uncovered, joined)


def _is_converted(module: torch.nn.Module) -> bool:
    """Whether transformers may convert the module's weights when it saves them. Nothing is imported to find out."""
    models = sys.modules.get("transformers.modeling_utils")
    if models is None or not isinstance(module, models.PreTrainedModel) or getattr(module, "_hf_peft_config_loaded", False):
        return False
    return "transformers.core_model_loading" in sys.modules  # transformers 4 converts nothing


def _as_saved(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `save_pretrained` would write of these tensors, which have the module's own names."""
    from transformers.core_model_loading import revert_weight_conversion

    try:
        return dict(revert_weight_conversion(module, dict(tensors)))
    except Exception as error:  # whatever a conversion fails with, there is no layout
        raise UnsupportedLayout(
            f"transformers cannot convert the weights of {type(module).__name__} as for saving: {error!r:.300}."
        ) from error


def _without_copies() -> Any:
    """A context in which `contiguous` and `clone` return the tensor itself, so that views stay views.

    `joined` of the context has what was joined by rows, by the id of the result.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class WithoutCopies(TorchFunctionMode):  # type: ignore[misc]  # torch is not type-checked here
        def __init__(self) -> None:
            super().__init__()
            self.joined: dict[int, list[torch.Tensor]] = {}
            self._results: list[torch.Tensor] = []  # they must not go, or others would get their ids

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function in (torch.Tensor.contiguous, torch.Tensor.clone):
                return args[0]
            result = function(*args, **kwargs)
            if function is torch.cat and (args[1] if len(args) > 1 else kwargs.get("dim", 0)) == 0:
                self.joined[id(result)] = list(args[0] if args else kwargs["tensors"])
                self._results.append(result)
            return result

    return WithoutCopies()


def _memory(tensor: torch.Tensor) -> int:
    """The same for all views of one tensor. Tensors on the meta device have no address."""
    found: int = tensor.untyped_storage()._cdata
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is no tensor of another kind, such as a shard of one."""
    import torch

    return type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _is_all_of(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a view of a tensor is that tensor, as it is."""
    return bool(view.shape == tensor.shape and view.stride() == tensor.stride())


def _follow_each_other(tensors: list[torch.Tensor]) -> bool:
    """Whether tensors lie behind each other in one memory."""
    if not all(_is_plain(tensor) and tensor.is_contiguous() and tensor.dtype == tensors[0].dtype for tensor in tensors):
        return False
    one_memory = all(_memory(tensor) == _memory(tensors[0]) for tensor in tensors)
    return one_memory and all(after.data_ptr() == before.data_ptr() + before.nbytes for before, after in itertools.pairwise(tensors))


def _give_one_memory(name: str, tensors: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Move tensors behind each other into new memory, bit for bit. `others` are the module's other tensors."""
    import torch

    if not all(_is_plain(tensor) and tensor.dtype == tensors[0].dtype and tensor.device == tensors[0].device for tensor in tensors):
        raise UnsupportedLayout(f"{name!r} is several tensors of the module, which differ in type or device.")
    taken = [(tensor.device, tensor.data_ptr()) for tensor in (*others, *tensors) if _is_plain(tensor)]
    if any(
        (tensor.device.type == "cpu" and tensor.is_shared()) or taken.count((tensor.device, tensor.data_ptr())) > 1 for tensor in tensors
    ):
        raise UnsupportedLayout(f"{name!r} is several tensors of the module, whose memory something else uses, too.")
    bits = getattr(torch, f"int{8 * tensors[0].element_size()}")
    memory = torch.cat([tensor.detach().contiguous().view(bits) for tensor in tensors]).view(tensors[0].dtype)
    for tensor, piece in zip(tensors, memory.split([len(tensor) for tensor in tensors]), strict=True):
        tensor.data = piece


def _run_of(name: str, part: TensorPart, view: _View) -> TensorPart:
    """What a part of a parameter has of a view of that parameter."""
    size = math.prod(view.shape)
    if not view.is_run:
        raise UnsupportedLayout(f"the elements of {name!r} are not one run of the parameter that holds them.")
    start = min(max(part.start - view.offset, 0), size)
    stop = min(max(part.stop - view.offset, start), size)
    first = start + view.offset - part.start
    return TensorPart(part.elements[first : first + stop - start] if stop > start else part.elements[:0], view.shape, start)


def _view(owner: str, tensor: torch.Tensor, view: _View) -> torch.Tensor:
    if not _is_plain(tensor):
        raise UnsupportedLayout(f"{owner!r} holds several tensors of a checkpoint, but is a {type(tensor).__name__}.")
    return tensor.detach().as_strided(view.shape, view.stride, tensor.storage_offset() + view.offset)
