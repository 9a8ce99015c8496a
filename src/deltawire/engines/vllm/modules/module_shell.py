"""Copies of modules on which vLLM's processing can run without any effect on the live model.

A *shell* has the attributes of a module, and new memory for its raw tensors, which are those before processing. Its quantisation method and
the kernels of that are copies too, because processing keeps results in them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from .reachable import is_state

_FORGOTTEN = ("moe_kernel", "moe_quant_config")
"""Attributes of a method that processing sets. If they are set, vLLM takes the call for a reload, and leaves some processing out."""
_CALLED = "_already_called_process_weights_after_loading"
_DEPTH = 4
"""Kernels may hold other kernels. No vLLM version nests them deeper."""


def make_shell(module: Any, device: torch.device | None = None) -> Any:
    """Return a copy of a module with new memory for its raw tensors, whose values are undefined. The module does not change.

    Tensors that loaders never write, such as biases, keep their values.

    Parameters
    ----------
    module
        A module with a quantisation method, from a model that vLLM has loaded.
    device
        The device of the new memory. None means the one that the module was loaded on.
    """
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    copies: dict[int, Any] = {}
    shell = copy.copy(module)
    copies[id(module)] = shell
    shell.__dict__ = {name: _copied(value, copies, _DEPTH) for name, value in vars(module).items()}
    info = LAYERWISE_INFO[module]
    kept = [{name: value for name, value in held.items() if name not in raw and _is_kept(name, value)} for held, raw in _both(module, info)]
    shell._parameters, shell._buffers = ({name: _clone(value) for name, value in held.items()} for held in kept)
    shell._modules = {
        name: _copied_state(part, copies, _DEPTH) if name == "quant_method" else part for name, part in module._modules.items()
    }
    shell._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    shell.__dict__.pop(_CALLED, None)
    with info.restore_device if device is None else device:
        for registered, raw in zip((shell._parameters, shell._buffers), info.restore_metadata, strict=True):
            for name, meta in raw.items():
                shell.__dict__.pop(name, None)
                # a copy of the record gets the shell, because loaders of the live module are made from the record too
                registered[name] = materialize_meta_tensor(restore_layer_refs(to_meta_tensor(meta), shell))
    return shell


def raw_of(shell: Any) -> dict[str, torch.Tensor]:
    """Return the raw tensors of a shell that was not processed yet, by name."""
    return {name: tensor for held in (shell._parameters, shell._buffers) for name, tensor in held.items() if tensor is not None}


def process(shell: Any, vllm_config: Any) -> None:
    """Run vLLM's processing after loading on a shell.

    Parameters
    ----------
    shell
        The shell, whose raw tensors have their values.
    vllm_config
        vLLM's configuration.
    """
    from vllm.config import set_current_vllm_config

    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(getattr(vllm_config.model_config, "dtype", default))  # as vLLM's loader does
        with set_current_vllm_config(vllm_config), torch.no_grad():
            shell.quant_method.process_weights_after_loading(shell)
    finally:
        torch.set_default_dtype(default)


def _both(module: Any, info: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    return zip((module._parameters, module._buffers), info.restore_metadata, strict=True)


def _is_kept(name: str, value: Any) -> bool:
    """Return whether a tensor that is not raw exists before processing. Processing has added the others."""
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    return value is None or name in SKIP_TENSORS


def _clone(value: Any) -> Any:
    if value is None:
        return None
    found = value.data.clone()
    found.__class__ = value.__class__
    found.__dict__ = dict(vars(value))
    return found


def _copied(value: Any, copies: dict[int, Any], depth: int) -> Any:
    """Return a copy of a tensor, of a container, or of an object and of what it holds. Modules, functions and all else are shared."""
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, torch.Tensor):
        found = copies[id(value)] = _clone(value)
        return found
    if type(value) in (dict, list, set):
        return copy.copy(value)
    return _copied_state(value, copies, depth) if depth and is_state(value) else value


def _copied_state(value: Any, copies: dict[int, Any], depth: int) -> Any:
    """Return a copy of a method, which may be a module too, or of a kernel."""
    found = copy.copy(value)
    copies[id(value)] = found
    parts = {name: None if name in _FORGOTTEN else _copied(part, copies, depth - 1) for name, part in vars(value).items()}
    object.__setattr__(found, "__dict__", parts)  # even if it is frozen
    return found
