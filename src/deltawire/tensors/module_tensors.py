"""The weights of an `nn.Module` under the names that they have on the wire. Callers have imported torch already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..format.bundle_names import join_name

if TYPE_CHECKING:
    import torch

NameMap = Mapping[str, str] | Callable[[str], "str | None"]
"""Maps a module's names to those on the wire. A mapping renames the names that it lists. A function returns the wire name, or None to leave
the tensor out."""

_WRAPPER = "_orig_mod."
"""The prefix that `torch.compile` adds to names."""


def named_weights(module: torch.nn.Module, names: NameMap | None = None, *, bundle: str = "") -> dict[str, torch.Tensor]:
    """Return the module's parameters and persistent buffers by their names on the wire. A tied tensor appears under each of its names.

    Raises `ValueError` if two tensors would have the same name.

    Parameters
    ----------
    module
        The module.
    names
        How names change on the wire; by default they do not.
    bundle
        The name of the bundle that the weights belong to.
    """
    found: list[tuple[str, Any]] = []
    for prefix, part in module.named_modules(remove_duplicate=False):
        own = {**part._parameters, **{name: part._buffers[name] for name in part._buffers if name not in part._non_persistent_buffers_set}}
        for name, tensor in own.items():
            if tensor is not None:
                found.append(((f"{prefix}.{name}" if prefix else name).replace(_WRAPPER, ""), tensor))
    return wire_names(found, names, bundle=bundle)


def wire_names(tensors: Iterable[tuple[str, torch.Tensor]], names: NameMap | None = None, *, bundle: str = "") -> dict[str, torch.Tensor]:
    """Return tensors by their names on the wire. Raise `ValueError` if two different tensors would have the same name."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        wire = _wire_name(name, names)
        if wire is None:
            continue
        wire = join_name(bundle, wire)
        if wire in found and found[wire] is not tensor:
            raise ValueError(f"two tensors of the module have the wire name {wire!r}, one of them {name!r}")
        found[wire] = tensor
    return found


def tied_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the names of tensors that share their memory with an earlier tensor, and the name of the earlier one.

    Two views of one memory count as tied only if type, shape and strides are the same.
    """
    first: dict[object, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() and (owner := first.setdefault(memory, name)) != name:
            tied[name] = owner
    return tied


def _wire_name(name: str, names: NameMap | None) -> str | None:
    if names is None:
        return name
    if isinstance(names, Mapping):
        return names.get(name, name)
    return names(name)
