"""Modules whose tensors are computed from weights hold, after an update, what a fresh load computes, in the memory that they had."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulated_kernels import nvfp4_on_cpu, requantise_on_cpu
from loaded_models import LoadedModel, import_vllm, load_model, publish, read_checkpoint
from model_memory import addresses, difference, memory
from tiny_checkpoints import FP8_PER_TENSOR, State, TinyMla, TinyModel, fp8_per_tensor

from deltawire.errors import EngineQuarantined, EngineRefused

pytestmark = pytest.mark.slow


@pytest.fixture
def raw(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, dict[str, Any]]]:
    """Record the raw tensors of each module that is loaded, before vLLM processes them."""
    import_vllm()
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsLinearMethod
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

    recorded: dict[int, dict[str, Any]] = {}
    for kind in (CompressedTensorsLinearMethod, Fp8LinearMethod):
        monkeypatch.setattr(kind, "process_weights_after_loading", _recording(kind.process_weights_after_loading, recorded))
    return recorded


def _recording(process: Any, recorded: dict[int, dict[str, Any]]) -> Any:
    def record(method: Any, layer: Any) -> None:
        held = {**layer._parameters, **layer._buffers}
        recorded[id(layer)] = {name: tensor.data.clone() for name, tensor in held.items() if tensor is not None}
        process(method, layer)

    return record


def two_versions(model: TinyModel) -> list[State]:
    """Return two versions whose scales differ, also between weights that vLLM fuses."""
    first, second, rng = model.state(), model.state(), np.random.default_rng(5)
    for name in second:
        second[name] = (second[name] * rng.uniform(0.3, 3) + 0.01).astype(ml_dtypes.bfloat16)
    return [first, second]


def modules_with(loaded: LoadedModel, recorded: dict[int, dict[str, Any]]) -> dict[str, Any]:
    return {name: module for name, module in loaded.model.named_modules() if id(module) in recorded}


def check_reprocessing(live: LoadedModel, fresh: LoadedModel, raw: dict[int, dict[str, Any]], *only: str) -> None:
    """Process the raw tensors of the fresh model on copies of the live modules, and write the results into those."""
    from deltawire.engines.vllm.modules.reachable import tensors_of
    from deltawire.engines.vllm.modules.recompute import reprocess

    places, before = addresses(live.model), memory(live.model)
    for name, module in modules_with(live, raw).items():
        new = raw[id(fresh.model.get_submodule(name))]
        results = reprocess(module, {key: tensor for key, tensor in new.items() if not only or key in only}, live.vllm_config)
        assert memory(live.model) == before, f"{name} changed while a copy of it was processed"
        for path, tensor in tensors_of(module).items():
            if not only or path in only:
                tensor.data.copy_(results[path])
        before = memory(live.model)
    assert addresses(live.model) == places


def test_fused_fp8_weights_with_one_scale_are_requantised_as_in_a_fresh_load(
    tmp_path: Path, raw: dict[int, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    requantise_on_cpu(monkeypatch)
    model = TinyModel("tensor", scale=4, layers=1)
    states = [fp8_per_tensor(state) for state in two_versions(model)]
    live, fresh = (load_model(model.save(tmp_path / str(number), state, FP8_PER_TENSOR)) for number, state in enumerate(states))
    fused = raw[id(fresh.model.model.layers[0].self_attn.qkv_proj)]
    assert fused["weight_scale"].unique().numel() == 3
    assert not torch.equal(fused["weight"].T.float(), fresh.model.model.layers[0].self_attn.qkv_proj.weight.float())
    check_reprocessing(live, fresh, raw)
    differing = {line.partition(":")[0] for line in difference(memory(live.model), memory(fresh.model))}
    assert not any("_proj" in name for name in differing), differing
    assert "lm_head.weight" in differing  # it was not processed, so it is still that of the first version


def test_a_learnt_layout_says_what_is_reprocessed_and_gives_its_raw_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requantise_on_cpu(monkeypatch)
    from deltawire.engines.vllm.layout.learn_layout import learn_layout
    from deltawire.engines.vllm.modules.reachable import tensors_of
    from deltawire.engines.vllm.modules.recompute import reprocess
    from deltawire.subscribe.tensor_table import TensorSpec
    from deltawire.tensors.torch_types import dtype_of

    model = TinyModel("tensor", scale=4, layers=1)
    states = [fp8_per_tensor(state) for state in two_versions(model)]
    checkpoints = [model.save(tmp_path / str(number), state, FP8_PER_TENSOR) for number, state in enumerate(states)]
    live, fresh = (load_model(checkpoint) for checkpoint in checkpoints)
    new = read_checkpoint(checkpoints[1])
    table = {name: TensorSpec(dtype_of(tensor), tuple(tensor.shape)) for name, tensor in sorted(new.items())}
    layout = learn_layout(live.model, live.vllm_config, table)
    name = "model.layers.0.self_attn.qkv_proj"
    parts = {f"model.layers.0.self_attn.{part}_proj.weight{suffix}" for part in "qkv" for suffix in ("", "_scale")}
    assert set(layout.modules[name].inputs) == parts
    assert layout.modules[name].how == "reprocess"
    assert {layout.tensors[part].kind for part in parts} == {"module"}
    assert layout.tensors["lm_head.weight"].kind == "direct"
    module = live.model.get_submodule(name)
    results = reprocess(module, layout.raw(name, lambda part: new[part]), live.vllm_config)
    for path, tensor in tensors_of(fresh.model.get_submodule(name)).items():
        assert results[path].contiguous().view(-1).view(torch_bytes()).equal(tensor.contiguous().view(-1).view(torch_bytes())), path


def torch_bytes() -> Any:
    import torch

    return torch.uint8


def test_the_installed_vllm_says_where_experts_are_moved() -> None:
    import_vllm()
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig

    assert "moe_parallel_config" in FusedMoEConfig.__annotations__
    assert "enable_eplb" in FusedMoEParallelConfig.__annotations__


def test_making_a_shell_leaves_the_record_of_loaders_alone(tmp_path: Path) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    from deltawire.engines.vllm.modules.module_shell import make_shell

    model = TinyModel("moe", experts=4, layers=1)
    live = load_model(model.save(tmp_path / "start", model.state()))
    for module in (live.model.model.layers[0].self_attn.qkv_proj, live.model.model.layers[0].mlp.experts.routed_experts):
        recorded = [vars(meta).get("weight_loader") for meta in LAYERWISE_INFO[module].restore_metadata[0].values()]
        shell = make_shell(module)
        assert [vars(meta).get("weight_loader") for meta in LAYERWISE_INFO[module].restore_metadata[0].values()] == recorded
        assert not any(getattr(loader, "__self__", None) is shell for loader in recorded)
        assert shell.quant_method is not module.quant_method, "processing keeps results in the method"


def test_the_derived_projections_of_mla_are_recomputed_in_place(tmp_path: Path) -> None:
    from deltawire.engines.vllm.modules.recompute import derived_from, recompute, rule_for

    model = TinyMla("mla", scale=4, layers=2)
    _, (first, second) = publish(tmp_path, model, two_versions(model), "fp8-block")
    live, fresh = load_model(first), load_model(second)
    with_projections = {name: module for name, module in live.model.named_modules() if derived_from(module)}
    assert len(with_projections) == 2
    rules = [rule_for(module, name, {}) for name, module in with_projections.items()]
    assert {rule.how for rule in rules} == {"recompute"}
    places = addresses(live.model)
    for name, parameter in live.model.named_parameters():
        if "W_U" not in name:
            parameter.data.copy_(fresh.model.get_parameter(name))  # as an update writes it
    stale = difference(memory(live.model), memory(fresh.model))
    assert len(stale) == 4
    assert all(".W_U" in line for line in stale), stale
    with live.active():
        recompute(live.model, live.vllm_config.model_config, rules[:1])
        assert len(difference(memory(live.model), memory(fresh.model))) == 2
        recompute(live.model, live.vllm_config.model_config, rules)
    assert difference(memory(live.model), memory(fresh.model)) == []
    assert addresses(live.model) == places


def test_mla_without_quantisation_has_nothing_to_recompute(tmp_path: Path) -> None:
    from deltawire.engines.vllm.modules.recompute import derived_from

    model = TinyMla("mla", layers=1)
    live = load_model(model.save(tmp_path / "start", model.state()))
    assert not any(derived_from(module) for module in live.model.modules())


def test_derived_tensors_stay_in_their_memory_or_the_worker_is_quarantined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltawire.engines.vllm.modules.recompute import derived_from, recompute, rule_for

    model = TinyMla("mla", scale=4, layers=1)
    _, (first,) = publish(tmp_path, model, [model.state()], "fp8-block")
    live = load_model(first)
    ((name, module),) = [(name, module) for name, module in live.model.named_modules() if derived_from(module)]
    kind, rules, places = type(module.W_UV), [rule_for(module, name, {})], addresses(live.model)

    def renew(_: Any) -> None:
        module.W_UV = kind(module.W_UV.data.clone() + 1, requires_grad=False)

    before = module.W_UV.data.clone()
    monkeypatch.setattr(module, "process_weights_after_loading", renew)
    recompute(live.model, live.vllm_config.model_config, rules)
    assert addresses(live.model) == places
    assert module.W_UV.equal(before + 1)

    def transpose(_: Any) -> None:
        module.W_UV = kind(module.W_UV.data.mT, requires_grad=False)

    monkeypatch.setattr(module, "process_weights_after_loading", transpose)
    with pytest.raises(EngineQuarantined, match="shape or type of 'W_UV'"):
        recompute(live.model, live.vllm_config.model_config, rules)


def test_the_global_scales_of_nvfp4_are_computed_without_its_weights(
    tmp_path: Path, raw: dict[int, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    nvfp4_on_cpu(monkeypatch)
    model = TinyModel("nvfp4", scale=4, layers=1)
    _, (first, second) = publish(tmp_path, model, two_versions(model), "nvfp4")
    live, fresh = load_model(first), load_model(second)
    check_reprocessing(live, fresh, raw, "weight_global_scale")
    for name, module in modules_with(live, raw).items():
        assert torch.equal(module.weight_global_scale, fresh.model.get_submodule(name).weight_global_scale)
        assert not torch.equal(module.weight, fresh.model.get_submodule(name).weight)


@pytest.mark.parametrize("recipe", ["int4", "fp8-channel", "fp8-block"])
def test_one_module_is_loaded_anew_in_place_and_the_others_stay(recipe: str, tmp_path: Path) -> None:
    from deltawire.engines.vllm.modules.load_module import load_modules

    model = TinyModel("module", scale=4, layers=1)
    _, (first, second) = publish(tmp_path, model, two_versions(model), recipe)
    live, fresh = load_model(first), load_model(second)
    before, places = memory(live.model), addresses(live.model)
    name = "model.layers.0.self_attn.qkv_proj"
    parts = tuple(f"model.layers.0.self_attn.{part}_proj." for part in "qkv")
    new = read_checkpoint(second)
    with live.active():
        load_modules(
            live.model, live.vllm_config.model_config, [name], [(key, tensor) for key, tensor in new.items() if key.startswith(parts)]
        )
    after, wanted = memory(live.model), memory(fresh.model)
    assert addresses(live.model) == places
    assert {path: value for path, value in after.items() if name in path} == {path: value for path, value in wanted.items() if name in path}
    changed = {path for path in after if after[path] != before[path]}
    assert changed
    assert all(path.startswith(name) for path in changed)


def test_results_that_do_not_fit_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

    from deltawire.engines.vllm.modules.recompute import reprocess

    model = TinyModel("block", scale=4, layers=1)
    _, (checkpoint,) = publish(tmp_path, model, [model.state()], "fp8-block")
    live = load_model(checkpoint)
    module = live.model.model.layers[0].mlp.down_proj
    before = memory(live.model)
    process = Fp8LinearMethod.process_weights_after_loading

    def with_number(method: Any, layer: Any) -> None:
        process(method, layer)
        layer.some_scale = 2.0

    monkeypatch.setattr(Fp8LinearMethod, "process_weights_after_loading", with_number)
    with pytest.raises(EngineRefused, match="the number 'some_scale'"):
        reprocess(module, {}, live.vllm_config)

    def dequantised(method: Any, layer: Any) -> None:
        process(method, layer)
        layer.weight = type(layer.weight)(layer.weight.data.float(), requires_grad=False)

    monkeypatch.setattr(Fp8LinearMethod, "process_weights_after_loading", dequantised)
    with pytest.raises(EngineRefused, match="another shape or type"):
        reprocess(module, {}, live.vllm_config)
    assert memory(live.model) == before


def test_changes_of_a_module_are_found_in_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from deltawire.engines.vllm.modules import recompute

    monkeypatch.setattr(recompute, "PIECE", 100)
    generator, module = torch.Generator().manual_seed(1), torch.nn.Module()
    room = torch.randn(1000, generator=generator).bfloat16()
    live = {
        "whole": torch.randn(30, 20, generator=generator).bfloat16(),
        "turned": torch.randn(40, 15, generator=generator).t(),
        "part": room[7:907].view(30, 30).t(),  # the rest of its storage is not its own
        "scalar": torch.tensor(1.5),
    }
    vars(module).update({name: tensor.clone() if name == "scalar" else tensor for name, tensor in live.items()})
    new = {name: tensor.clone() for name, tensor in live.items()}
    new["turned"] = new["turned"].contiguous()  # other strides than the live tensor
    for tensor in new.values():
        tensor[torch.rand(tensor.shape, generator=generator) < 0.3] += 1
    new["scalar"] += 1
    scatters = recompute.changed_units(module, new)
    assert len(scatters) == 4
    assert {scatter.indices.dtype for scatter in scatters} == {torch.int32}
    for scatter in scatters:
        assert (scatter.memory[scatter.indices] != scatter.new).all()
        scatter.memory[scatter.indices] = scatter.new
    assert all(torch.equal(getattr(module, name), tensor) for name, tensor in new.items())


class _Method:
    """Takes the place of a quantisation method of vLLM."""


class BaseKVCacheMethod(_Method):
    """Has the name of vLLM's class for the scales of a KV cache."""


_BALANCED = types.SimpleNamespace(moe_parallel_config=types.SimpleNamespace(enable_eplb=True))
"""The part of vLLM's configuration of experts that says whether they are moved."""


@pytest.mark.parametrize(
    ("method", "attributes", "classes", "how", "reason"),
    [
        (_Method(), {}, {("scale", "scale"): "arithmetic", ("weight", "weight"): "permutation"}, "reprocess", "computes scale"),
        (_Method(), {}, {("weight", "weight"): "unknown"}, "reprocess", "computes"),
        (_Method(), {}, {("weight", "weight"): "failed", ("scale", "scale"): "arithmetic"}, "load_anew", "fails on a copy"),
        (_Method(), {}, {("weight", "weight"): "unsafe"}, "load_anew", "changes the live module"),
        (_Method(), {}, {("weight", "weight"): "lost", ("scale", "scale"): "arithmetic"}, "load_anew", "does not keep weight"),
        (_Method(), {"moe_config": _BALANCED}, {}, "refuse", "EPLB"),
        (_Method(), {"dnnl_handler": object()}, {}, "load_anew", "in dnnl_handler"),
        (BaseKVCacheMethod(), {}, {("k_scale", "k_scale"): "arithmetic"}, "load_anew", "scales as numbers"),
    ],
)
def test_a_rule_says_how_a_module_is_updated_and_why(
    method: Any, attributes: dict[str, Any], classes: dict[tuple[str, str], str], how: str, reason: str
) -> None:
    from deltawire.engines.vllm.modules.recompute import rule_for

    module = types.SimpleNamespace(_parameters={}, _buffers={}, quant_method=method, **attributes)
    rule = rule_for(module, "model.layer", classes, inputs=["a", "b"])
    assert (rule.name, rule.how, rule.inputs) == ("model.layer", how, ("a", "b"))
    assert reason in rule.reason
