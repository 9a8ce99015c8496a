"""Finds what a module and its helpers hold: tensors, numbers, its quantisation method, and kernels."""

from __future__ import annotations

import enum
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

Path = tuple[str, ...]
"""The way to a tensor from its module: names of attributes, keys or positions."""

_DEPTH = 4
"""Kernels may hold other kernels. No vLLM version nests them deeper."""
_MOST_ITEMS = 64
"""The number of items of a list that are looked at."""


def tensors_of(module: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a module, of its quantisation method and of the kernels of that, by paths such as `quant_method.kernel.scale`.

    Tensors of other child modules are not included.
    """
    found = {".".join(path): value for path, value in reachable(module) if isinstance(value, torch.Tensor)}
    return {name: tensor for name, tensor in found.items() if tensor.device.type != "meta"}


def states_of(module: Any) -> list[Any]:
    """Return a module, its quantisation method, its kernels, and similar objects that hold tensors or what leads to tensors."""
    return [
        module,
        *(value for path, value in reachable(module) if _has_parts(path, value) and not isinstance(value, (Mapping, list, tuple))),
    ]


def reachable(module: Any) -> Iterator[tuple[Path, Any]]:
    """Yield what a module and its helpers hold, with its path: tensors, numbers, and the helpers themselves.

    Each object is found by its shortest path. Tensors and numbers are found by all paths.
    """
    for held in (module._parameters, module._buffers):
        yield from (((name,), tensor) for name, tensor in held.items() if tensor is not None)
    seen = {id(module)}
    attributes = {**vars(module), "quant_method": getattr(module, "quant_method", None)}
    level: list[tuple[Path, Any]] = [
        ((name,), value)
        for name, value in attributes.items()
        if name not in ("_parameters", "_buffers", "_modules") and not (name.startswith("_") and isinstance(value, (dict, set)))
    ]
    for depth in range(_DEPTH + 1):
        inner: list[tuple[Path, Any]] = []
        for path, value in level:
            if isinstance(value, (torch.Tensor, float)):
                yield path, value
            elif depth < _DEPTH and _has_parts(path, value) and id(value) not in seen:
                seen.add(id(value))
                yield path, value
                inner += [((*path, name), part) for name, part in _parts(value)]
        level = inner


def at(module: Any, path: Path) -> Any:
    """Return what a path of `reachable` leads to. None if there is nothing."""
    value = module
    for name in path:
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, (list, tuple)):
            value = value[int(name)] if int(name) < len(value) else None
        else:
            value = getattr(value, name, None)
    return value


def put(module: Any, path: Path, value: Any) -> None:
    """Set what a path leads to. Raises `TypeError` if its owner cannot be changed."""
    owner = at(module, path[:-1])
    if isinstance(owner, dict):
        owner[path[-1]] = value
    elif isinstance(owner, list):
        owner[int(path[-1])] = value
    elif isinstance(owner, (Mapping, tuple)):
        raise TypeError(f"{'.'.join(path[:-1])} cannot be changed")
    elif isinstance(owner, torch.nn.Module):
        setattr(owner, path[-1], value)
    else:
        object.__setattr__(owner, path[-1], value)  # even if it is frozen


def numbers_of(module: Any) -> dict[str, float]:
    """Return the numbers that a module holds as plain attributes."""
    return {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float))}


def is_state(value: Any) -> bool:
    """Return whether a value is a method, a kernel, or a similar object.

    Groups of ranks are none, and objects that free something at their end are none: the end of a copy would free what the live module uses.
    """
    is_object = hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType, torch.nn.Module, enum.Enum))
    is_foreign = type(value).__module__.startswith(("torch.", "builtins", "vllm.config", "vllm.distributed", "transformers."))
    return is_object and not inspect.isroutine(value) and not is_foreign and not hasattr(value, "__del__")


def _has_parts(path: Path, value: Any) -> bool:
    """Return whether a value may lead to tensors."""
    return (
        isinstance(value, (Mapping, list, tuple)) or is_state(value) or (path == ("quant_method",) and isinstance(value, torch.nn.Module))
    )


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(str(key), each) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [(str(number), each) for number, each in enumerate(value[:_MOST_ITEMS])]
    return [(name, each) for name, each in vars(value).items() if not name.startswith("_forward")]
