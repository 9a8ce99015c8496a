"""Changes how vLLM packs weights after loading on CPUs, for servers that use the deltawire backend and no others.

- Linear layers keep their weights unpacked. Otherwise vLLM empties the tensor that they were loaded into, and weights that are loaded later
  have no effect. Unpacked layers are somewhat slower.
- Experts of an MoE are packed again when they are loaded again. vLLM 0.32 packs them only the first time, and then computes wrong results.

Nothing changes on GPUs.
"""

from __future__ import annotations

from typing import Any


def prepare_for_updates(backend: str) -> None:
    """Change vLLM's packing, for servers with this weight-transfer backend, so that their layers can take new weights."""
    _keep_linear_weights(backend)
    _pack_experts_each_time(backend)


def _is_used(backend: str) -> bool:
    from vllm.config import get_current_vllm_config_or_none

    transfer = getattr(get_current_vllm_config_or_none(), "weight_transfer_config", None)
    return transfer is not None and transfer.backend == backend


def _keep_linear_weights(backend: str) -> None:
    import torch
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm

    def dispatch_unpacked(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2 and _is_used(backend):
            layer.cpu_linear = torch.nn.functional.linear
        else:
            dispatch(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch_unpacked


def _pack_experts_each_time(backend: str) -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    set_up = getattr(UnquantizedFusedMoEMethod, "_setup_kernel", None)
    if set_up is None:  # another vLLM version; if it does not pack them again, the worker notices it (backend.py)
        return

    def set_up_and_pack(method: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_again = method.moe_kernel is not None
        set_up(method, layer=layer, w13=w13, w2=w2)
        if is_again and _is_used(backend):
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = set_up_and_pack
