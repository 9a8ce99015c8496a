"""Tiny MoE models of the real classes, for tests of routing."""

from __future__ import annotations

from typing import Any

from tiny_models import SIZES, torch, transformers

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 3}
DEEPSEEK = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "routed_scaling_factor": 2.5,
    "num_hidden_layers": 3,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {**SIZES, **EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe, not normalised": ("qwen3_moe", {**SIZES, **EXPERTS, "norm_topk_prob": False}),
    "mixtral": ("mixtral", {**SIZES, **LOCAL}),
    "deepseek_v3": ("deepseek_v3", {**SIZES, **DEEPSEEK}),
    "deepseek_v3, not normalised": ("deepseek_v3", {**SIZES, **DEEPSEEK, "norm_topk_prob": False}),
    "gpt_oss": ("gpt_oss", {**SIZES, **LOCAL}),
    "olmoe": ("olmoe", {**SIZES, **EXPERTS}),
    "qwen2_moe": ("qwen2_moe", {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "glm4_moe": ("glm4_moe", {**SIZES, **DEEPSEEK}),
    "deepseek_v2": ("deepseek_v2", {**SIZES, **DEEPSEEK, "topk_method": "greedy"}),
    "minimax_m2": ("minimax_m2", {**SIZES, **LOCAL}),
    "ernie4_5_moe": ("ernie4_5_moe", {**SIZES, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 16}),
}
NAMED = [name for name in CONFIGS if name.partition(",")[0] in ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")]
"""The models whose weighting the tests write down by hand."""


def moe_model(name: str, seed: int = 0, dtype: Any = torch.float32) -> Any:
    """Make a model whose routers have random weights and biases."""
    kind, sizes = CONFIGS[name]
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **sizes, pad_token_id=None, eos_token_id=0, bos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if key.endswith(("gate.weight", "router.weight", "router.bias", "e_score_correction_bias")):
                tensor.copy_(torch.randn(tensor.shape) * (0.1 if "bias" in key else 1.0))
    return model.train()


def tokens(rows: int, columns: int, seed: int = 0) -> Any:
    return torch.randint(1, SIZES["vocab_size"], (rows, columns), generator=torch.Generator().manual_seed(seed))


def bits(tensor: Any) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def gradients(model: Any) -> dict[str, bytes]:
    """Return the bits of all gradients, and forget them."""
    found = {name: bits(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


def another_routing(shape: tuple[int, ...], experts: int, seed: int = 1) -> Any:
    """Return random experts [tokens, layers, top k], all different within a row."""
    chance = torch.Generator().manual_seed(seed)
    return torch.rand((*shape[:-1], experts), generator=chance).argsort(-1)[..., : shape[-1]].int()
