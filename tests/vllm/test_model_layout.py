"""Learnt layouts, on models that vLLM loads in this process: reading through a layout gives the checkpoint, and writing equals loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loaded_models import LoadedModel, import_vllm, load_model, publish, read_checkpoint
from model_memory import addresses, difference, memory
from tiny_checkpoints import State, TinyMla, TinyModel, train

from deltawire.errors import BaseMismatch
from deltawire.subscribe.tensor_table import TensorSpec, TensorTable

pytestmark = pytest.mark.slow

# test_layout_matrix.py has more layouts. These have two equal layers, widened scales, 4-bit units, or derived tensors.
CASES: dict[str, tuple[TinyModel, str | None]] = {
    "dense": (TinyModel("dense"), None),
    "moe": (TinyModel("moe", experts=4), None),
    "fp8-channel": (TinyModel("q", scale=4, layers=1), "fp8-channel"),
    "int4": (TinyModel("q", scale=4), "int4"),
    "mla-fp8": (TinyMla("mla", scale=4, layers=1), "fp8-block"),
}


def table_of(tensors: Any) -> TensorTable:
    from deltawire.tensors.torch_types import dtype_of

    return {name: TensorSpec(dtype_of(tensor), tuple(tensor.shape)) for name, tensor in sorted(tensors.items())}


def bits(tensor: Any) -> Any:
    import torch

    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def write(scatter: Any) -> None:
    """Write the values of a scatter list."""
    indices = scatter.indices.long()
    assert indices.unique().numel() == indices.numel()
    if scatter.half is None:
        scatter.memory[indices] = scatter.new
    else:
        shift = 4 * scatter.half
        scatter.memory[indices] = (scatter.memory[indices] & (15 << (4 - shift))) | (scatter.new << shift)


def versions(folder: Path, model: TinyModel, recipe: str | None) -> list[Path]:
    first = model.state()
    second: State = {name: tensor.copy() for name, tensor in first.items()}
    train(second, np.random.default_rng(3), 0.05)
    if recipe is None:
        return [model.save(folder / name, state) for name, state in (("first", first), ("second", second))]
    return publish(folder, model, [first, second], recipe)[1]


@pytest.mark.parametrize("case", CASES)
def test_reading_gives_the_checkpoint_and_writing_equals_loading(case: str, tmp_path: Path) -> None:
    import torch

    from deltawire.engines.vllm.layout.learn_layout import learn_layout

    model, recipe = CASES[case]
    first, second = versions(tmp_path, model, recipe)
    loaded = load_model(first)
    held, places = memory(loaded.model), addresses(loaded.model)
    weights, changed = read_checkpoint(first), read_checkpoint(second)
    layout = learn_layout(loaded.model, loaded.vllm_config, table_of(weights))
    assert not difference(memory(loaded.model), held), "learning changed the model"
    assert addresses(loaded.model) == places
    assert not layout.facts.unlearnt

    kinds = {name: tensor.kind for name, tensor in layout.tensors.items()}
    overwritten = {name for name in weights if name.endswith("weight_shape") and not any(part in name for part in ("down", "o_proj"))}
    assert set(kinds.values()) <= {"direct", "mapped", "module"}
    assert {name for name, kind in kinds.items() if kind == "module"} <= overwritten
    for name, tensor in weights.items():
        if kinds[name] != "module":
            assert torch.equal(bits(layout.gather(name)), bits(tensor)), name
        if kinds[name] == "direct":
            assert torch.equal(bits(layout.tensors[name].direct), bits(tensor)), name

    for name, tensor in changed.items():
        flat = tensor.view(-1).view(getattr(torch, f"int{8 * tensor.element_size()}"))
        indices = torch.nonzero(flat != weights[name].view(-1).view(flat.dtype)).flatten()
        if indices.numel():
            for scatter in layout.locate(name, indices, flat[indices]):
                write(scatter)
    for rule in layout.modules.values():
        assert rule.how == "recompute"
        with loaded.active():
            loaded.model.get_submodule(rule.name).process_weights_after_loading(torch.bfloat16)
    assert layout.is_valid_for(loaded.model)
    assert not difference(memory(loaded.model), memory(load_model(second).model))
    assert bool(layout.modules) is (case == "mla-fp8")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, dict[str, Any]]:
    model = TinyModel("dense", layers=1)
    checkpoint = model.save(tmp_path_factory.mktemp("dense") / "start", model.state())
    return load_model(checkpoint), dict(read_checkpoint(checkpoint))


def test_dense_weights_are_direct_and_equal_modules_are_learnt_once(dense: tuple[LoadedModel, dict[str, Any]]) -> None:
    from deltawire.engines.vllm.layout.learn_layout import learn_layout
    from deltawire.engines.vllm.layout.model_layout import summary

    loaded, weights = dense
    layout = learn_layout(loaded.model, loaded.vllm_config, table_of(weights))
    assert summary(layout) == {"direct": len(weights)}
    fused = loaded.model.model.layers[0].self_attn.qkv_proj.weight
    part = layout.tensors["model.layers.0.self_attn.k_proj.weight"].direct
    assert part is not None
    assert part.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
    assert part.shape == weights["model.layers.0.self_attn.k_proj.weight"].shape
    assert layout.facts.learnt < len({id(module) for module in loaded.model.modules() if module._parameters})


def test_a_tensor_that_no_loader_takes_is_absent_and_one_that_fails_has_a_reason(dense: tuple[LoadedModel, dict[str, Any]]) -> None:
    import torch

    from deltawire.engines.vllm.layout.learn_layout import learn_layout

    loaded, weights = dense
    odd = {
        "model.layers.7.mlp.up_proj.weight": torch.zeros(4, 4),
        "model.norm.weight": torch.zeros(3),
        "rotary_emb.inv_freq": torch.zeros(4),
    }
    layout = learn_layout(loaded.model, loaded.vllm_config, table_of({**weights, **odd}))
    assert layout.tensors["model.norm.weight"].kind == "module"
    assert "loader failed" in layout.tensors["model.norm.weight"].reason
    assert layout.tensors["rotary_emb.inv_freq"].kind in ("absent", "module")
    assert layout.tensors["model.layers.7.mlp.up_proj.weight"].kind in ("absent", "module")
    assert layout.tensors["model.embed_tokens.weight"].kind == "direct"


def test_slots_of_lora_adapters_do_not_depend_on_weights_but_other_tensors_may(
    dense: tuple[LoadedModel, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from deltawire.engines.vllm.layout.learn_layout import learn_layout

    loaded, weights = dense
    module = loaded.model.logits_processor
    for name, is_derived in (("lora_a_stacked", False), ("w13_lora_b_stacked", False), ("doubled", True)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, torch.ones(2, 8), raising=False)
            layout = learn_layout(loaded.model, loaded.vllm_config, table_of(weights))
        assert bool(layout.modules) == is_derived


def test_the_layout_is_invalid_once_a_tensor_has_moved(dense: tuple[LoadedModel, dict[str, Any]]) -> None:
    from deltawire.engines.vllm.layout.learn_layout import learn_layout

    loaded, weights = dense
    layout = learn_layout(loaded.model, loaded.vllm_config, table_of(weights))
    qkv = type(loaded.model.model.layers[0].self_attn.qkv_proj.weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qkv, "__torch_function__", None)  # it takes long for all parameters of a model, and swaps wait for this
        assert layout.is_valid_for(loaded.model)
    norm = loaded.model.model.norm.weight
    held = norm.data
    norm.data = held.clone()
    assert not layout.is_valid_for(loaded.model)
    norm.data = held
    assert layout.is_valid_for(loaded.model)


def test_only_owned_placements_are_gathered_on_request(dense: tuple[LoadedModel, dict[str, Any]]) -> None:
    from deltawire.engines.vllm.layout.learn_layout import learn_layout

    loaded, weights = dense
    layout = learn_layout(loaded.model, loaded.vllm_config, table_of(weights))
    layout.owned["model.norm.weight"] = frozenset()
    assert not layout.gather("model.norm.weight", owned_only=True).any()
    assert layout.gather("model.norm.weight").all()
    assert layout.gather("lm_head.weight", owned_only=True).any()
    assert len(layout.blocks()["model.norm.weight"]) == 1


def test_a_head_that_vllm_ties_to_the_embedding_has_the_same_memory(tmp_path: Path) -> None:
    from deltawire.engines.vllm.layout.learn_layout import learn_layout

    model = TinyModel("tied", tied=True, layers=1)
    state = model.state()
    state["lm_head.weight"] = state["model.embed_tokens.weight"].copy()  # vLLM finds that they are equal, and keeps one
    checkpoint = model.save(tmp_path / "start", state)
    loaded = load_model(checkpoint)
    layout = learn_layout(loaded.model, loaded.vllm_config, table_of(read_checkpoint(checkpoint)))
    head, embedding = (layout.tensors[name].direct for name in ("lm_head.weight", "model.embed_tokens.weight"))
    assert head is not None
    assert embedding is not None
    assert head.data_ptr() == embedding.data_ptr() == loaded.model.lm_head.weight.data_ptr()


def test_a_draft_model_is_a_second_place_of_the_same_tensors(dense: tuple[LoadedModel, dict[str, Any]], tmp_path: Path) -> None:
    import torch

    from deltawire.engines.vllm.layout.learn_layout import learn_layout

    loaded, weights = dense
    draft = load_model(TinyModel("draft", layers=1).save(tmp_path / "draft", TinyModel("draft", layers=1).state()))
    layout = learn_layout(loaded.model, loaded.vllm_config, table_of(weights), draft=draft.model)
    norm = layout.tensors["model.norm.weight"]
    assert (norm.kind, len(norm.placements), norm.direct) == ("mapped", 2, None)
    held = draft.model.model.norm.weight.untyped_storage().data_ptr()
    assert [scatter.memory.data_ptr() for scatter in layout.locate("model.norm.weight", torch.tensor([0]), torch.ones(1).bfloat16())][
        1
    ] == held
    ours, theirs = loaded.model.model.norm.weight.data, draft.model.model.norm.weight.data
    theirs.copy_(ours)
    assert torch.equal(layout.gather("model.norm.weight"), ours)
    for copy in (ours, theirs):  # the digest of a version must prove both
        copy.view(torch.int16)[3] ^= 1
        with pytest.raises(BaseMismatch, match=r"the copies of tensor 'model.norm.weight' in memory differ"):
            layout.gather("model.norm.weight")
        copy.view(torch.int16)[3] ^= 1
    draft.model.model.norm.weight.data = draft.model.model.norm.weight.data.clone()
    assert not layout.is_valid_for(loaded.model)


@pytest.mark.parametrize("part", ["loader_copies", "processing_map"])
def test_without_a_part_of_vllm_nothing_is_mapped(
    part: str, dense: tuple[LoadedModel, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltawire.engines.vllm.layout import loader_copies, processing_map
    from deltawire.engines.vllm.layout.learn_layout import learn_layout

    loaded, weights = dense
    monkeypatch.setattr({"loader_copies": loader_copies, "processing_map": processing_map}[part], "missing_parts", lambda: ["vllm.x"])
    layout = learn_layout(loaded.model, loaded.vllm_config, table_of(weights))
    assert {tensor.kind for tensor in layout.tensors.values()} == {"module"}
    assert "does not have vllm.x" in layout.tensors["lm_head.weight"].reason


def test_the_installed_vllm_has_all_parts_that_learning_uses() -> None:
    import_vllm()
    from deltawire.engines.vllm.layout import loader_copies, processing_map

    assert loader_copies.missing_parts() == []
    assert processing_map.missing_parts() == []


def test_a_vllm_without_these_parts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import_vllm()
    from vllm.model_executor.layers import attention
    from vllm.model_executor.model_loader.reload import layerwise

    from deltawire.engines.vllm.layout import loader_copies, processing_map

    monkeypatch.delattr(layerwise, "LAYERWISE_INFO")
    monkeypatch.delattr(attention, "is_deferred_attention_layer")
    assert loader_copies.missing_parts() == ["vllm.model_executor.model_loader.reload.layerwise.LAYERWISE_INFO"]
    assert processing_map.missing_parts() == ["vllm.model_executor.layers.attention.is_deferred_attention_layer"]


def test_one_module_that_cannot_be_learnt_does_not_cost_the_others(
    dense: tuple[LoadedModel, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltawire.engines.vllm.layout import learn_layout as learning
    from deltawire.engines.vllm.layout import processing_map
    from deltawire.engines.vllm.layout.learn_layout import learn_layout

    loaded, weights = dense
    known = processing_map.same_processing
    monkeypatch.setattr(learning, "learn_views", lambda *_: None)

    def fail(module: Any) -> Any:
        if module is loaded.model.lm_head:
            raise TypeError("an object without attributes")
        return known(module)

    monkeypatch.setattr(processing_map, "same_processing", fail)
    layout = learn_layout(loaded.model, loaded.vllm_config, table_of(weights))
    assert [name for name, tensor in layout.tensors.items() if tensor.kind == "module"] == ["lm_head.weight"]
    assert layout.modules["lm_head"].how == "reprocess"
    assert layout.modules["lm_head"].inputs == ("lm_head.weight",)
    assert "without attributes" in layout.facts.unlearnt["lm_head"]


def test_learning_can_be_switched_off(dense: tuple[LoadedModel, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    from deltawire.engines.vllm.layout.learn_layout import learn_layout

    loaded, weights = dense
    monkeypatch.setenv("DELTAWIRE_LEARN", "0")
    layout = learn_layout(loaded.model, loaded.vllm_config, table_of(weights))
    assert {tensor.kind for tensor in layout.tensors.values()} == {"module"}


def test_modules_that_do_not_fit_into_memory_are_not_learnt(
    dense: tuple[LoadedModel, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltawire.engines.vllm.layout import learn_layout as learning
    from deltawire.engines.vllm.layout.learn_layout import learn_layout

    monkeypatch.setattr(learning, "learn_views", lambda *_: None)
    loaded, weights = dense
    layout = learn_layout(loaded.model, loaded.vllm_config, table_of(weights), most_bytes=1000)
    assert layout.tensors["lm_head.weight"].kind == "module"
    assert "GB are free" in layout.tensors["lm_head.weight"].reason
    assert layout.tensors["model.norm.weight"].kind == "direct"


@pytest.mark.parametrize(("recipe", "scale"), [(None, 1), ("fp8-block", 4), ("fp8-channel", 4)])
def test_weights_that_only_get_other_views_are_learnt_without_memory_for_them(
    recipe: str | None, scale: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltawire.engines.vllm.layout import processing_map, processing_views
    from deltawire.engines.vllm.layout.learn_layout import learn_layout
    from deltawire.engines.vllm.modules.module_shell import make_shell, raw_of

    model = TinyModel("views", scale=scale, layers=1)
    _, (checkpoint,) = publish(tmp_path, model, [model.state()], recipe)
    loaded, made = load_model(checkpoint), []

    def make_and_count(*arguments: Any) -> Any:
        shell = make_shell(*arguments)
        made.append(sum(tensor.nbytes for tensor in raw_of(shell).values() if tensor.device.type != "meta"))
        return shell

    monkeypatch.setattr(processing_map, "make_shell", make_and_count)
    monkeypatch.setattr(processing_views, "make_shell", make_and_count)
    layout = learn_layout(loaded.model, loaded.vllm_config, table_of(read_checkpoint(checkpoint)))
    assert made == [0] * 6, "a copy of each linear layer and embedding, without any weights"
    assert {tensor.kind for name, tensor in layout.tensors.items() if "_scale" not in name} == {"direct"}
