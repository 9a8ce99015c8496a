"""Lets vLLM process weights on a CPU that it processes only on GPUs, so that tests can compare results. Nothing is fast."""

from __future__ import annotations

from typing import Any

import pytest
from loaded_models import import_vllm


def requantise_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM quantise with a given scale, as it does with fused fp8 weights that have one scale each."""
    import_vllm()
    import torch
    from vllm import _custom_ops

    def scaled_fp8_quant(weights: Any, scale: Any) -> tuple[Any, Any]:
        most = torch.finfo(torch.float8_e4m3fn).max
        return (weights.float() / scale).clamp(-most, most).to(torch.float8_e4m3fn), scale

    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", scaled_fp8_quant)


def nvfp4_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM load nvfp4 weights, with the kernel that emulates them. It does not quantise activations: checkpoints lack their scales."""
    import_vllm()
    import torch
    from vllm.model_executor.kernels.linear.nvfp4 import emulation
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4 as scheme
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

    class Kernel(emulation.EmulationNvFp4LinearKernel):  # type: ignore[misc]
        def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
            weight = layer.weight.data.view(torch.uint8)
            return x @ dequantize_to_dtype(weight, layer.weight_scale.data, layer.weight_global_scale, x.dtype, 16, swizzle=False).T

    config = type("Config", (), {})()
    monkeypatch.setattr(scheme, "init_nvfp4_linear_kernel", lambda **_: Kernel(config))


def mxfp4_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM load mxfp4 weights, with the kernel that emulates them. What it dequantises with is a package for AMD GPUs, so not that."""
    import_vllm()
    import torch
    from vllm.model_executor.kernels.linear.mxfp4 import emulation
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_mxfp4 as scheme

    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])

    class Kernel(emulation.EmulationMxfp4LinearKernel):  # type: ignore[misc]
        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            return True, None

        def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
            codes = torch.stack([layer.weight & 15, layer.weight >> 4], -1).flatten(-2)
            scales = torch.exp2(layer.weight_scale.float() - 127).repeat_interleave(32, -1)
            return x @ (values[codes.long()] * scales).to(x.dtype).T

    config = type("Config", (), {"activation_quant_key": None})()
    monkeypatch.setattr(scheme, "init_mxfp4_linear_kernel", lambda **_: Kernel(config))
