"""Finds modules whose processing only makes views of raw parameters, without any memory for their weights.

vLLM's processing runs on a copy of the module whose raw parameters are meta tensors, and every operation is looked at. If all of them make
views, no element moves: each result has the storage of a raw parameter. Most linear layers and embeddings on a GPU are like this. Others
are learnt from values (processing_map.py), which needs memory for a copy of the module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..modules.module_shell import make_shell, process, raw_of
from ..modules.reachable import Path
from ..modules.recompute import hidden_state
from .loader_copies import makes_view
from .position_decoder import UnitMap, whole_nest
from .processing_map import LiveModuleChanged, ModuleMap, fingerprint, geometry, tensors_of, unit_bits_of


def learn_views(module: Any, vllm_config: Any, names: Sequence[str]) -> ModuleMap | None:
    """Return the map of a module whose processing only makes views of its raw parameters. None if it does more.

    Raises `LiveModuleChanged` if processing a copy has changed the live module.

    Parameters
    ----------
    module
        A module with a quantisation method. It is not changed.
    vllm_config
        vLLM's configuration.
    names
        The raw parameters to look at.
    """
    live = {path: tensor for path, tensor in tensors_of(module).items() if tensor.device.type != "meta"}
    if hidden_state(module) is not None:
        return None
    before = fingerprint(module)
    try:
        shell = make_shell(module, torch.device("meta"))
        raw = {name: tensor for name, tensor in raw_of(shell).items() if name in names}
        with _OnlyViews():
            process(shell, vllm_config)
        found = tensors_of(shell)
    except Exception:  # it reads or computes values, which meta tensors do not have
        return None
    finally:
        if fingerprint(module) != before:
            raise LiveModuleChanged("its processing changes the live module")
    if {path: geometry(tensor) for path, tensor in found.items()} != {path: geometry(tensor) for path, tensor in live.items()}:
        return None
    storages = {(_storage(found[path]), live[path].untyped_storage().data_ptr()) for path in found if live[path].numel()}
    if len({first for first, _ in storages}) != len(storages) or len({second for _, second in storages}) != len(storages):
        return None  # results share storages in another way than the live tensors do
    paths: dict[int, Path] = {}
    for path, tensor in found.items():
        paths.setdefault(_storage(tensor), path)
    if len(raw) < len(set(names)) or any(_storage(tensor) not in paths for tensor in raw.values()):
        return None
    result = ModuleMap(runs=1)
    for name, tensor in raw.items():
        bits = unit_bits_of(name, tensor)
        count = tensor.untyped_storage().nbytes() * 8 // bits
        result.maps[name] = [UnitMap(paths[_storage(tensor)], bits, (whole_nest(count),))] if count else []
    moved = {_storage(tensor) for tensor in raw.values()}
    result.constant = {path for path, tensor in found.items() if _storage(tensor) not in moved}
    return result


class _OnlyViews(TorchDispatchMode):  # type: ignore[misc]
    """While this mode is active, operations that do more than to make views fail."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not makes_view(func):
            raise TypeError(f"{func} makes more than views")
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    """Return what identifies the storage of a tensor. Meta tensors have no address."""
    return int(tensor.untyped_storage()._cdata)
