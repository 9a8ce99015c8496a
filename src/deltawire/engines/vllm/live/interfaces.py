"""Interfaces that an update of live weights uses: a layout, a source of other tensors, and modules that are loaded anew."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from ....delta.patch import TensorPatch
from ....errors import EngineRefused
from ....format.records.record_parts import CommitRef
from ....subscribe.tensor_table import TensorTable
from ....tensors.torch_types import to_torch, torch_dtype
from ..layout.types import ModuleRule, Nest, Scatter, TensorLayout


class Layout(Protocol):
    """The way in which a worker holds the tensors of a chain. `layout.model_layout.ModelLayout` is one."""

    @property
    def tensors(self) -> Mapping[str, TensorLayout]: ...

    @property
    def modules(self) -> Mapping[str, ModuleRule]: ...

    @property
    def owned(self) -> dict[str, frozenset[int]]: ...

    def blocks(self) -> Mapping[str, Sequence[tuple[Nest, ...]]]: ...

    def is_valid_for(self, model: Any) -> bool: ...

    def gather(self, name: str, *, owned_only: bool = False) -> torch.Tensor: ...

    def locate(self, name: str, indices: torch.Tensor, values: torch.Tensor) -> list[Scatter]: ...

    def raw(self, module: str, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]: ...

    def load_anew(self, name: str, reason: str) -> None: ...

    def refuse(self, name: str, reason: str) -> None: ...


class BaseSource(Protocol):
    """Has the tensors that a worker cannot read from its own memory."""

    def hold(self, wanted: TensorTable, absent: TensorTable | None = None, near: Collection[str] = ()) -> str | None:
        """Get hold of these tensors, and of no others. Returns why that is impossible, or None.

        The worker needs new values of `wanted`. It holds nothing of `absent`, and should read only those of them that are in `near`.
        """
        ...

    def writes(self, name: str) -> bool:
        """Return whether `settled` needs the changes of this tensor. If workers share the tensors, one of them changes each."""
        ...

    def base(self, name: str) -> torch.Tensor | NDArray[Any]:
        """Return the whole tensor of the live version in checkpoint layout.

        An array is memory that the source keeps. A tensor is new memory on the device of the model, and belongs to the caller.
        """
        ...

    def settled(self, ref: CommitRef, changes: Mapping[str, Sequence[TensorPatch]]) -> None:
        """Note that a swap to a version is confirmed, and what it changed. It must return at once: the server waits."""
        ...


class ModuleLoad(Protocol):
    """A module that is loaded anew. `modules.load_module.ModuleLoad` is one."""

    nbytes: int
    unfit: str | None

    def apply(self) -> None: ...

    def revert(self) -> None: ...

    def check_reverted(self) -> None: ...


def base_of(layout: TensorLayout, name: str, source: BaseSource | None, *, device: torch.device | None = None) -> torch.Tensor:
    """Return a tensor that the worker cannot read from its own memory, as new memory if there is a device.

    Raises `EngineRefused` if there is no source for it.
    """
    if 0 in layout.spec.shape:
        return torch.empty(layout.spec.shape, dtype=torch_dtype(layout.spec.dtype), device=device)
    if source is None:
        raise EngineRefused(f"the worker cannot read tensor {name!r} from its memory: {layout.reason or layout.kind}")
    found = source.base(name)
    if isinstance(found, torch.Tensor):
        return found
    return to_torch(found) if device is None else to_torch(found).to(device, copy=True)


def inputs_of(rules: Iterable[ModuleRule]) -> frozenset[str]:
    """Return the tensors of the chain that modules with these rules depend on."""
    return frozenset(name for rule in rules for name in rule.inputs)


def some_memory(tensors: Mapping[str, TensorLayout]) -> dict[str, torch.Tensor]:
    """Return memory of the model, which tells the device to work on."""
    for name, layout in tensors.items():
        if layout.direct is not None:
            return {name: layout.direct}
        for placement in layout.placements:
            return {name: placement.memory}
    return {}
