"""A change of vLLM for tests: the experts of an MoE stay on the CPU as they were loaded.

Experts have this layout on GPUs with vLLM's Triton kernels, and never on a CPU. The kernel is a few lines of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def install(replace: Callable[[type, str, Any], None] = setattr) -> None:
    """Change vLLM's experts for CPUs. `replace` sets an attribute of a class: `monkeypatch.setattr` undoes it after a test."""
    import torch
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    def keep(experts: Any, layer: Any) -> None:
        experts._use_zentorch = False

    def apply(
        experts: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, *_: Any, **__: Any
    ) -> None:
        total = torch.zeros(hidden_states.shape, dtype=torch.float32)
        for expert in range(w1.shape[0]):
            tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = (hidden_states[tokens].float() @ w1[expert].float().T).chunk(2, dim=-1)
            down = (torch.nn.functional.silu(gate) * up) @ w2[expert].float().T
            total.index_add_(0, tokens, down * topk_weights[tokens, slots, None].float())
        output.copy_(total)

    for kind in (CPUUnquantizedExperts, *CPUUnquantizedExperts.__subclasses__()):
        replace(kind, "process_weights_after_loading", keep)
        replace(kind, "apply", apply)
