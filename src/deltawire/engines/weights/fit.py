"""Checks whether a module can hold the weights of a chain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...codec.bits import HostBits, in_host_memory
from ...errors import EngineDtypeDiffers, EngineRefused
from ...tensors.bits import tensor_bits
from ...tensors.module_tensors import tied_names
from ...tensors.torch_types import to_torch

if TYPE_CHECKING:
    import torch

_SCALES = (".weight_scale",)
"""How the names of scales end that have the type of the weights that were quantised."""

OTHER_MODEL = "Check that the chain holds this model. The engine's `names` maps tensor names."
"""The remedy if names or shapes of the module and the chain differ."""


def check_fits(live: Mapping[str, torch.Tensor], arrays: Mapping[str, NDArray[Any]], *, keep_others: bool) -> None:
    """Raise `EngineRefused` unless the module can hold these weights and they set all of its tensors.

    Parameters
    ----------
    live
        The module's tensors by the names of the chain.
    arrays
        The weights of the chain.
    keep_others
        True to allow tensors in the chain that the module does not have.
    """
    check_memory(live)
    tied = tied_names(live)
    for name, tensor in live.items():
        owner = tied.get(name, name)
        if name not in arrays and not ({owner, *(other for other in tied if tied[other] == owner)} & arrays.keys()):
            raise EngineRefused(f"the module has a tensor {name!r}, which the chain does not have.", hint=OTHER_MODEL)
        if name in tied and name in arrays and owner in arrays and not _same_bits(arrays[name], arrays[owner]):
            raise EngineRefused(f"{name!r} and {owner!r} are tied in the module, but differ in the chain.", hint=OTHER_MODEL)
        if name in arrays:
            _check_kind(name, tensor, arrays[name])
    others = arrays.keys() - live.keys()
    if others and not keep_others:
        raise EngineRefused(
            f"the chain has a tensor {min(others)!r}, which the module does not have ({len(others)} such tensors in all).", hint=OTHER_MODEL
        )


def check_memory(live: Mapping[str, torch.Tensor]) -> None:
    """Raise `EngineRefused` if elements of one tensor share memory: they cannot get different values.

    Parameters
    ----------
    live
        The module's tensors by the names of the chain.
    """
    for name, tensor in live.items():
        if _overlaps_itself(tensor):
            raise EngineRefused(
                f"elements of {name!r} share memory with each other, as `expand` makes it.", hint="Give the module a copy of it: `clone()`."
            )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1):
        if stride <= reach:
            return bool(tensor.numel())
        reach += stride * (size - 1)
    return False


def _check_kind(name: str, tensor: torch.Tensor, array: NDArray[Any]) -> None:
    if tuple(tensor.shape) != array.shape:
        raise EngineRefused(
            f"the shapes of {name!r} differ: {list(tensor.shape)} in the module, {list(array.shape)} in the chain.", hint=OTHER_MODEL
        )
    dtype = to_torch(np.empty(0, array.dtype)).dtype
    if tensor.dtype != dtype:
        remedy = (
            f"The trainer published from {_plain(dtype)} weights, and the model was loaded as {_plain(tensor.dtype)}. Run one forward pass "
            "before the first sync: the model then holds weights instead of codes, and can follow this chain. Or publish from "
            f"{_plain(tensor.dtype)} weights."
            if name.endswith(_SCALES)
            else f"Load the model with dtype={_plain(dtype)!r}, or cast it before you make the engine: model.to({dtype})."
        )
        raise EngineDtypeDiffers(f"{name!r} is {_plain(tensor.dtype)} in the module, {_plain(dtype)} in the chain. {remedy}")


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(_bits(a), _bits(b))


def _bits(array: NDArray[Any]) -> HostBits:
    return in_host_memory(tensor_bits("array", array).bits)
