"""Hashes of all memory of a model: what vLLM's own checker covers, and everything else that a forward pass may read.

    memory(model)                  {path of a tensor: its type, shape, strides and place, and a hash of its whole storage}
    difference(memory, fresh)      what differs, in words; empty if nothing does
    addresses(model)               {path of a tensor: its address}

vLLM's /weight_checker hashes parameters only. This also covers buffers, tensors in plain attributes (the projections of MLA), and those of
`quant_method`, of kernels and of functions. As a vLLM plugin, it lets workers answer /collective_rpc `deltawire_test_memory`.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

_LEFT_OUT = (
    "_deltawire_results",
    "kv_cache",
    "compilation_config",
    "vllm_config",
    "_vllm_config",
    "model_config",
    "hf_config",
    "quant_config",
)
"""Attributes that hold no weights, or that lead to the whole engine."""


def register() -> None:
    """Add the call to vLLM's workers. vLLM calls it in each process of a server."""
    from vllm.v1.worker.worker_base import WorkerBase

    def deltawire_test_memory(worker: Any) -> dict[str, str]:
        draft = worker.get_draft_model()
        return memory(worker.get_model() if draft is None else {"model": worker.get_model(), "draft": draft})

    WorkerBase.deltawire_test_memory = deltawire_test_memory


def memory(model: Any) -> dict[str, str]:
    """Return a description of each tensor that can be reached from a model, with a hash of all bytes of its storage.

    Tensors that share a storage say so, because an update of one of them changes the others.
    """
    hashes: dict[int, str] = {}
    found: dict[str, str] = {}
    for path, tensor in tensors(model):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in hashes:
            hashes[storage.data_ptr()] = f"{_hash(storage)} of {path}"
        place = f"{tuple(tensor.shape)} by {tensor.stride()} from {tensor.storage_offset()}"
        found[path] = f"{tensor.dtype} {place}: {hashes[storage.data_ptr()]}"
    return found


def addresses(model: Any) -> dict[str, tuple[int, int]]:
    """Return the address of each tensor, and the size of its storage."""
    return {path: (tensor.data_ptr(), tensor.untyped_storage().nbytes()) for path, tensor in tensors(model)}


def difference(memory: Mapping[str, str], fresh: Mapping[str, str]) -> list[str]:
    """Return what differs between the memory of two models, a line for each tensor."""
    lines = [f"{path}: {memory.get(path)} and not {fresh.get(path)}" for path in sorted({*memory, *fresh})]
    return [line for line, path in zip(lines, sorted({*memory, *fresh}), strict=True) if memory.get(path) != fresh.get(path)]


def tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and the tensor of each tensor with elements that can be reached from a model, in an order that does not change."""
    return _walk(model, "", {})


def _walk(value: Any, path: str, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(value, torch.Tensor):
        if value.numel() and value.device.type != "meta":
            yield path, value
        return
    if isinstance(value, (str, bytes, int, float, type, types.ModuleType)) or value is None or id(value) in seen:
        return
    seen[id(value)] = value  # so that no other object gets this id
    for name, part in _parts(value):
        if name not in _LEFT_OUT:
            yield from _walk(part, f"{path}.{name}" if path else name, seen)


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return what an object holds, by names. Objects of other packages than vLLM are not opened, except containers and functions."""
    import torch

    if isinstance(value, Mapping):
        return sorted(((key, part) for key, part in value.items()), key=_name) if all(isinstance(key, str) for key in value) else []
    if isinstance(value, (list, tuple)):
        return [(str(number), part) for number, part in enumerate(value)]
    if isinstance(value, functools.partial):
        return [("function", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__), ("function", value.__func__)]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [(name, cell.cell_contents) for name, cell in cells if cell != types.CellType()]
    attributes = dict(getattr(value, "__dict__", {}))
    if isinstance(value, torch.nn.Module):
        for part in ("_parameters", "_buffers", "_modules"):
            attributes |= attributes.pop(part)
        return sorted(((name, part) for name, part in attributes.items() if not name.endswith("_hooks")), key=_name)
    return sorted(attributes.items(), key=_name) if type(value).__module__.startswith("vllm") else []


def _hash(storage: Any) -> str:
    import torch

    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return hashlib.sha256(flat.cpu().numpy()).hexdigest()[:16]


def _name(item: tuple[str, Any]) -> str:
    return item[0]
