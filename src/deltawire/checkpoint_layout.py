"""Where a live model holds the tensors of its checkpoints.

transformers 5 does not load every checkpoint tensor into a parameter of its own: it fuses the experts of a layer, for example, and
`save_pretrained` splits them again. Chains hold what checkpoints hold, so live models are read and written through this layout.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import UnsupportedLayout
from .module_tensors import NameMap, named_weights, wire_names
from .tensors import TensorPart

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
    """

    def __init__(self, module: torch.nn.Module, names: NameMap | None = None, *, bundle: str = "") -> None:
        self._module = module
        self._names = names
        self._bundle = bundle
        self._learned: tuple[object, _Plan] | None = None
        self._views: dict[str, tuple[torch.Tensor, int, dict[str, torch.Tensor]]] = {}

    def weights(self) -> dict[str, torch.Tensor]:
        """Return all tensors by their names in the chain. A tied tensor appears under each of its names.

        Each tensor is the module's own memory and the same object in every call, unless the module's parameter was replaced. Tensors
        that `check_views` would complain about are copies, which are made anew in every call.
        """
        own, plan = self._look()
        found: dict[str, torch.Tensor] = {}
        for owner, views in plan.views.items():
            found |= self._views_of(owner, own[owner], views)
        if plan.copied:
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

    def owners(self) -> dict[str, torch.Tensor]:
        """Return for each name in the chain the parameter or buffer of the module that holds that tensor."""
        own, plan = self._look()
        pairs = [(name, own[owner]) for owner, views in plan.views.items() for name in views]
        return wire_names(pairs, self._names, bundle=self._bundle)

    def split(self, held: Mapping[str, TensorPart]) -> dict[str, TensorPart]:
        """Return the same elements by the names of the checkpoint's tensors. `held` is what a process has, by the module's own names.

        Nothing is copied. Every process that has a part of the module gets a part, if an empty one, of every tensor. Names that the
        module does not have stay as they are. Raises `UnsupportedLayout` where a tensor is not one run of a parameter's elements.
        """
        self.check_views()
        _, plan = self._look()
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

    def check_views(self) -> None:
        """Raise `UnsupportedLayout` unless writing the tensors of a checkpoint through `weights` sets every element of the module."""
        _, plan = self._look()
        problem = min(plan.copied) if plan.copied else min(plan.uncovered, default=None)
        if problem is not None:
            raise UnsupportedLayout(
                f"{type(self._unwrapped).__name__} computes {problem!r} from several places of its weights when it is saved, "
                f"so it cannot be updated in place ({len(plan.copied) or len(plan.uncovered)} such tensors)."
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
        return own, self._learned[1]

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
    of views entirely.
    """

    views: dict[str, dict[str, _View | None]]
    copied: frozenset[str]
    uncovered: frozenset[str]


def _learn(module: torch.nn.Module, own: dict[str, torch.Tensor]) -> _Plan:
    import torch

    if not _is_converted(module):
        return _Plan({name: {name: None} for name in own}, frozenset(), frozenset())
    stand_ins = {
        name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta") for name, tensor in own.items()
    }
    owner_of = {_memory(stand_in): name for name, stand_in in stand_ins.items()}
    with _without_copies():
        saved = _as_saved(module, stand_ins)
    views: dict[str, dict[str, _View | None]] = {name: {} for name in own}  # in the module's order: the first of tied names counts
    copied = set()
    covered: Counter[str] = Counter()
    for name, tensor in saved.items():
        owner = owner_of.get(_memory(tensor))
        if owner is None:
            copied.add(name)
            continue
        covered[owner] += tensor.numel()
        own_one = stand_ins[owner]
        if tensor.shape == own_one.shape and tensor.stride() == own_one.stride():
            views[owner][name] = None
        else:
            is_run = tensor.is_contiguous() and own_one.is_contiguous()
            views[owner][name] = _View(tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), is_run)
    uncovered = frozenset(name for name, tensor in own.items() if covered[name] != tensor.numel())
    return _Plan(views, frozenset(copied), uncovered)


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
    """A context in which `contiguous` and `clone` return the tensor itself, so that views stay views."""
    import torch
    from torch.overrides import TorchFunctionMode

    class WithoutCopies(TorchFunctionMode):  # type: ignore[misc]  # torch is not type-checked here
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in (torch.Tensor.contiguous, torch.Tensor.clone):
                return args[0]
            return function(*args, **(kwargs or {}))

    return WithoutCopies()


def _memory(tensor: torch.Tensor) -> int:
    """The same for all views of one tensor. Tensors on the meta device have no address."""
    found: int = tensor.untyped_storage()._cdata
    return found


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
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise UnsupportedLayout(f"{owner!r} holds several tensors of a checkpoint, but is a {type(tensor).__name__}.")
    return tensor.detach().as_strided(view.shape, view.stride, tensor.storage_offset() + view.offset)
