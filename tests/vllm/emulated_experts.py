"""Lets vLLM load quantised experts (MoE) on a CPU that it loads only on GPUs, or only on CPUs with AMX. Nothing is fast.

Loaders, raw parameters and processing after loading are vLLM's own, apart from the CUDA function that repacks weights for Marlin kernels.
Replaced are the checks of the device, and what multiplies.
"""

from __future__ import annotations

from typing import Any

import pytest
from loaded_models import import_vllm


def packed_experts_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM use its experts for CPUs in fp8 and int4 on a CPU without AMX.

    Only the check for AMX is replaced: the functions that permute and multiply are vLLM's own, and also run with AVX-512.
    """
    import_vllm()
    import torch
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8, CPUExpertsInt4

    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's functions for packed experts need AVX-512")

    for kind in (CPUExpertsFp8, CPUExpertsInt4):
        monkeypatch.setattr(kind, "_supports_current_device", staticmethod(lambda: True))


def fp8_experts_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM use its experts in fp8 with Triton kernels, its default for blocks on Hopper. They keep weights and scales as loaded.

    CUTLASS kernels, the default for channels, keep them, too. A few lines of torch multiply instead of the Triton kernel. Activations are
    not quantised.
    """
    import_vllm()
    import torch
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    def dequantise(weights: Any, scales: Any, block: tuple[int, int]) -> Any:
        for dim, size in enumerate(block, 1):
            scales = scales.repeat_interleave(size, dim)
        return weights.float() * scales[:, : weights.shape[1], : weights.shape[2]]

    def apply(
        experts: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, *_: Any, **__: Any
    ) -> None:
        block = experts.block_shape or (1, w1.shape[2])
        both = dequantise(w1, experts.w1_scale, block), dequantise(w2, experts.w2_scale, experts.block_shape or (1, w2.shape[2]))
        multiply(output, hidden_states, *both, topk_weights, topk_ids)

    monkeypatch.setattr(TritonExperts, "_supports_current_device", staticmethod(lambda: True))
    monkeypatch.setattr(TritonExperts, "_supports_quant_scheme", staticmethod(lambda weights, _: weights.dtype == torch.float8_e4m3fn))
    monkeypatch.setattr(TritonExperts, "expects_unquantized_inputs", True)
    monkeypatch.setattr(TritonExperts, "workspace_shapes", CPUUnquantizedExperts.workspace_shapes)
    monkeypatch.setattr(TritonExperts, "apply", apply)


def marlin_experts_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM use its experts in int4, mxfp4 and nvfp4 with Marlin kernels, its default on Hopper.

    Torch repacks each weight as vLLM's tests of Marlin do, instead of a CUDA kernel, and vLLM permutes the scales. To multiply, a few lines
    of torch undo both and dequantise.
    """
    import_vllm()
    import torch
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.fused_moe.oracle import int_wna16
    from vllm.model_executor.layers.quantization.utils.marlin_utils import get_scale_perms
    from vllm.model_executor.layers.quantization.utils.marlin_utils_test import get_weight_perm, marlin_weights

    order, shifts = get_weight_perm(4), torch.arange(0, 32, 4)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = {"int4": torch.arange(-8.0, 8.0), "fp4": torch.cat([numbers, -numbers])}

    def repack(b_q_weight: Any, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False) -> Any:
        assert (num_bits, is_a_8bit) == (4, False)
        codes = (b_q_weight[:, None, :] >> shifts[None, :, None]) & 15
        return marlin_weights(codes.reshape(size_k, size_n), size_k, size_n, 4, order)

    def repack_all(weights: Any, *arguments: Any, **options: Any) -> Any:
        return torch.stack([repack(each, *arguments, **options) for each in weights])

    def codes_of(packed: Any) -> Any:
        mixed = ((packed[..., None] >> shifts) & 15).reshape(-1, len(order))
        codes = torch.empty_like(mixed)
        codes[:, order] = mixed
        tiles = codes.reshape(packed.shape[0], -1, 16, 16)
        return tiles.transpose(1, 2).reshape(packed.shape[0] * 16, -1)

    def scales_of(permuted: Any) -> Any:
        mixed = permuted.float()
        if permuted.dtype == torch.float8_e4m3fn:  # nvfp4: the upper bits of 128 times the scale in float16, without its sign
            mixed = (permuted.view(torch.uint8).to(torch.int16) << 7).view(torch.float16).float() / 128
        if permuted.dtype != torch.bfloat16:
            mixed = mixed.reshape(-1, 4)[:, [0, 2, 1, 3]]
        mixed = mixed.reshape(-1, 64)
        scales = torch.empty_like(mixed)
        scales[:, get_scale_perms()[0]] = mixed
        return scales.reshape(permuted.shape)

    def bias_of(permuted: Any) -> Any:
        mixed = permuted.float().reshape(-1, 32)
        bias = torch.empty_like(mixed)
        bias[:, get_scale_perms()[1]] = mixed
        return bias.reshape(permuted.shape)

    def dequantise(packed: Any, permuted: Any, shared: Any) -> Any:
        codes, scales = codes_of(packed).long(), scales_of(permuted)
        if shared is not None:  # nvfp4: the expert's own scale, in the range of Marlin's arithmetic
            scales = scales * (shared.float() * 2.0**-119)
        assert scales.shape[0] > 1, "one group for each column has another permutation"
        return (
            values["int4" if permuted.dtype == torch.bfloat16 else "fp4"][codes] * scales.repeat_interleave(len(codes) // len(scales), 0)
        ).T

    def apply(
        experts: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, *_: Any, **__: Any
    ) -> None:
        both = [
            torch.stack(
                [dequantise(*each) for each in zip(packed, scales, [None] * len(packed) if shared is None else shared, strict=True)]
            )
            for packed, scales, shared in ((w1, experts.w1_scale, experts.g1_alphas), (w2, experts.w2_scale, experts.g2_alphas))
        ]
        biases = [each if each is None else bias_of(each) for each in (experts.w1_bias, experts.w2_bias)]
        multiply(output, hidden_states, *both, topk_weights, topk_ids, *biases)

    monkeypatch.setattr(_custom_ops, "gptq_marlin_repack", repack)
    monkeypatch.setattr(_custom_ops, "gptq_marlin_moe_repack", repack_all)
    monkeypatch.setattr(int_wna16, "_get_priority_backends", lambda: [int_wna16.WNA16MoEBackend.MARLIN])
    monkeypatch.setattr(MarlinExperts, "_supports_current_device", staticmethod(lambda: True))
    monkeypatch.setattr(MarlinExperts, "workspace_shapes", CPUUnquantizedExperts.workspace_shapes)
    monkeypatch.setattr(MarlinExperts, "apply", apply)


def nvfp4_experts_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM use its experts in nvfp4 with Marlin kernels, as for the other formats.

    Checkpoints do not have the scales of activations, and Marlin kernels do not use them. vLLM leaves their memory undefined, so here it
    has a value, which updates must not change.
    """
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as method,
    )

    marlin_experts_on_cpu(monkeypatch)
    create_weights = method.CompressedTensorsW4A4Nvfp4MoEMethod.create_weights

    def create_with_scales(self: Any, layer: Any, *arguments: Any, **options: Any) -> None:
        create_weights(self, layer, *arguments, **options)
        layer.w13_input_global_scale.data.fill_(3)
        layer.w2_input_global_scale.data.fill_(3)

    monkeypatch.setattr(method.CompressedTensorsW4A4Nvfp4MoEMethod, "create_weights", create_with_scales)


def multiply(output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, b1: Any = None, b2: Any = None) -> None:
    """Write to `output` what experts compute in float32: with SwiGLU, or with that of gpt-oss if there are biases.

    Parameters
    ----------
    output
        The results of all tokens.
    hidden_states
        The tokens.
    w1, w2
        The weights of all experts in float32: gate and up one below the other, or in turns if there are biases, and down.
    topk_weights, topk_ids
        The experts of each token, and how much they count.
    b1, b2
        The biases, if there are any.
    """
    import torch

    total = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in range(w1.shape[0]):
        tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
        both = hidden_states[tokens].float() @ w1[expert].T
        if b1 is None:
            gate, up = both.chunk(2, dim=-1)
            down = (torch.nn.functional.silu(gate) * up) @ w2[expert].T
        else:
            gate, up = (both + b1[expert]).unflatten(-1, (-1, 2)).unbind(-1)
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            down = (gate * torch.sigmoid(1.702 * gate) * (up + 1)) @ w2[expert].T + b2[expert]
        total.index_add_(0, tokens, down * topk_weights[tokens, slots, None].float())
    output.copy_(total)
