"""Parts of the tests themselves: models that vLLM loads in this process, with kernels that only tests have."""

from __future__ import annotations

from pathlib import Path

import pytest
import unpacked_experts
from loaded_models import load_model, publish, read_checkpoint
from tiny_checkpoints import TinyMla, TinyModel

pytestmark = pytest.mark.slow


def test_a_block_fp8_model_is_in_memory_as_in_its_checkpoint_and_computes_with_its_scales(tmp_path: Path) -> None:
    import torch

    model = TinyModel("block", scale=4, layers=1)
    _, (checkpoint,) = publish(tmp_path, model, [model.state()], "fp8-block")
    layer = load_model(checkpoint).model.model.layers[0].mlp.down_proj
    weights = read_checkpoint(checkpoint)
    weight = weights["model.layers.0.mlp.down_proj.weight"]
    scales = weights["model.layers.0.mlp.down_proj.weight_scale_inv"]
    assert layer.weight.dtype == torch.float8_e4m3fn
    assert torch.equal(layer.weight.view(torch.uint8), weight.view(torch.uint8))
    assert torch.equal(layer.weight_scale_inv, scales.float())
    assert scales.unique().numel() > 1
    whole = weight.float() * scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    inputs = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    outputs, _ = layer(inputs)
    assert torch.equal(outputs, (inputs.float() @ whole.T).bfloat16())


@pytest.mark.parametrize("query_rank", [None, 128])
def test_the_projections_of_mla_in_bf16_are_views_of_one_weight(query_rank: int | None, tmp_path: Path) -> None:
    model = TinyMla("mla", layers=1, query_rank=query_rank)
    checkpoint = model.save(tmp_path / "start", model.state())
    attention = load_model(checkpoint).model.model.layers[0].self_attn
    inner = attention.mla_attn.mla_attn
    storage = attention.kv_b_proj.weight.untyped_storage().data_ptr()
    assert inner.W_UV.untyped_storage().data_ptr() == inner.W_UK_T.untyped_storage().data_ptr() == storage


def test_the_projections_of_mla_in_fp8_have_their_own_memory(tmp_path: Path) -> None:
    model = TinyMla("mla", scale=4, layers=1)
    _, (checkpoint,) = publish(tmp_path, model, [model.state()], "fp8-block")
    attention = load_model(checkpoint).model.model.layers[0].self_attn
    inner = attention.mla_attn.mla_attn
    assert attention.kv_b_proj.weight.element_size() == 1
    assert inner.W_UV.untyped_storage().data_ptr() != attention.kv_b_proj.weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("is_packed", [True, False])
def test_experts_are_packed_unless_the_plugin_keeps_them(is_packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    model = TinyModel("moe", experts=4, layers=1)
    checkpoint = model.save(tmp_path / "start", model.state())
    if not is_packed:
        load_model(TinyModel("d", layers=1).save(tmp_path / "other", TinyModel("d", layers=1).state()))  # imports vLLM
        unpacked_experts.install(monkeypatch.setattr)
    experts = load_model(checkpoint).model.model.layers[0].mlp.experts.routed_experts
    down = torch.stack([read_checkpoint(checkpoint)[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"] for expert in range(4)])
    assert torch.equal(experts.w2_weight, down) is not is_packed
