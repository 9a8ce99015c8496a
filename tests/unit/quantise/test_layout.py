"""Layouts: the names, types, shapes and config of what each recipe publishes, and what it refuses."""

from __future__ import annotations

import pytest
from single_weights import source_names

from deltawire.dtypes import dtype_named
from deltawire.errors import TensorMissing, UnquantisableWeight
from deltawire.quantise import QuantisedLayout, Recipe
from deltawire.quantise.recipe import SPELLINGS

BF16, F32, F16 = (dtype_named(name) for name in ("BF16", "F32", "F16"))

LAYER = {
    "model.embed_tokens.weight": (BF16, (1000, 256)),
    "model.layers.0.input_layernorm.weight": (BF16, (256,)),
    "model.layers.0.self_attn.q_proj.weight": (BF16, (256, 256)),
    "model.layers.0.self_attn.q_proj.bias": (BF16, (256,)),
    "model.layers.0.self_attn.k_proj.weight": (BF16, (128, 256)),
    "model.layers.0.self_attn.v_proj.weight": (BF16, (128, 256)),
    "model.layers.0.mlp.down_proj.weight": (BF16, (256, 384)),
    "lm_head.weight": (BF16, (1000, 256)),
}
DOWN = "model.layers.0.mlp.down_proj"
MADE = {
    "fp8-block": {"weight": ("F8_E4M3", (256, 384)), "weight_scale_inv": ("F32", (2, 3))},
    "fp8-block-ue8m0": {"weight": ("F8_E4M3", (256, 384)), "weight_scale_inv": ("F32", (2, 3))},
    "fp8-channel": {"weight": ("F8_E4M3", (256, 384)), "weight_scale": ("BF16", (256, 1))},
    "fp8-tensor": {"weight": ("F8_E4M3", (256, 384)), "weight_scale": ("BF16", (1,))},
    "nvfp4": {"weight_packed": ("U8", (256, 192)), "weight_scale": ("F8_E4M3", (256, 24)), "weight_global_scale": ("F32", (1,))},
    "mxfp4": {"weight_packed": ("U8", (256, 192)), "weight_scale": ("U8", (256, 12))},
    "int4": {"weight_packed": ("I32", (256, 48)), "weight_scale": ("BF16", (256, 12)), "weight_shape": ("I64", (2,))},
    "int4-128": {"weight_packed": ("I32", (256, 48)), "weight_scale": ("BF16", (256, 3)), "weight_shape": ("I64", (2,))},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_layer_becomes_the_tensors_that_engines_load(spelling):
    layout = QuantisedLayout.of(spelling, LAYER)
    made = {output.name: (output.dtype.name, output.shape) for output in layout.outputs.values()}
    assert {name.removeprefix(f"{DOWN}."): form for name, form in made.items() if name.startswith(DOWN)} == MADE[spelling]
    assert all(made[name] == ("BF16", LAYER[name][1]) for name in LAYER if "proj.weight" not in name)
    assert layout.kept_modules == ["model.embed_tokens", "lm_head"]
    assert sorted(name for unit in layout.units for name in unit) == sorted(made)


def test_a_layout_is_made_once():
    assert QuantisedLayout.of("nvfp4", LAYER) is QuantisedLayout.of(Recipe.parse("nvfp4"), dict(LAYER))
    assert QuantisedLayout.of("nvfp4", LAYER, "float16") is not QuantisedLayout.of("nvfp4", LAYER)


def test_layers_that_engines_join_share_a_scale_that_is_one_number():
    q, k, v = (f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
    for spelling in ("nvfp4", "fp8-tensor"):
        layout = QuantisedLayout.of(spelling, LAYER)
        assert [[weight.module for weight in group] for group in layout.groups.values()] == [[q, k, v], [DOWN]]
        assert source_names(layout, [f"{k}.weight_scale"]) == {f"{name}.weight" for name in (q, k, v)}
        assert any({f"{name}.weight_scale" for name in (q, k, v)} <= set(unit) for unit in layout.units)
    layout = QuantisedLayout.of("fp8-block", LAYER)
    assert not layout.groups
    assert source_names(layout, [f"{k}.weight_scale_inv", "lm_head.weight"]) == {f"{k}.weight", "lm_head.weight"}


def test_scales_have_the_type_of_the_weights_where_compressed_tensors_does_so():
    specs = {name: (F32, shape) for name, (_, shape) in LAYER.items()}
    for spelling in SPELLINGS:
        layout = QuantisedLayout.of(spelling, specs)
        scale = next(output for output in layout.outputs.values() if output.role == "scale")
        assert scale.dtype.name == MADE[spelling]["weight_scale_inv" if "block" in spelling else "weight_scale"][0].replace("BF16", "F32")
        assert layout.outputs["lm_head.weight"].dtype == BF16  # what is not quantised is rounded to what engines serve


def test_the_type_of_other_tensors_is_an_option():
    specs = {**LAYER, "model.layers.0.mlp.gate.e_score_correction_bias": (F32, (8,)), "draft:x.weight": (F32, (4, 4)), "n": (F32, ())}
    assert QuantisedLayout.of("mxfp4", specs, "float32").outputs["lm_head.weight"].dtype == F32
    assert QuantisedLayout.of("mxfp4", specs).outputs["draft:x.weight"].dtype == F32  # other bundles stay as they are
    chosen = QuantisedLayout.of("mxfp4", specs, lambda name, spec: None if name.endswith("_bias") else "float16").outputs
    assert chosen["model.layers.0.mlp.gate.e_score_correction_bias"].dtype == F32
    assert chosen["n"].dtype == F16


def test_experts_in_one_tensor_become_a_weight_for_each_expert():
    base = "model.layers.0.mlp.experts"
    plain = {f"{base}.gate_up_proj": (BF16, (2, 128, 96)), f"{base}.down_proj": (BF16, (2, 96, 64))}
    turned = {f"{base}.gate_up_proj": (BF16, (2, 96, 128)), f"{base}.down_proj": (BF16, (2, 64, 96))}
    for specs in (plain, turned):
        layout = QuantisedLayout.of("nvfp4", specs)
        found = {weight.module: (weight.first_row, weight.rows, weight.columns, weight.is_transposed) for weight in layout.weights}
        is_turned = specs is turned
        assert found == {
            f"{base}.0.gate_proj": (0, 64, 96, is_turned),
            f"{base}.0.up_proj": (64, 64, 96, is_turned),
            f"{base}.1.gate_proj": (128, 64, 96, is_turned),
            f"{base}.1.up_proj": (192, 64, 96, is_turned),
            f"{base}.0.down_proj": (0, 96, 64, is_turned),
            f"{base}.1.down_proj": (96, 96, 64, is_turned),
        }
        assert [len(group) for group in layout.groups.values()] == [2, 2, 1, 1]
    with pytest.raises(UnquantisableWeight, match="do not tell where"):
        QuantisedLayout.of("nvfp4", {f"{base}.gate_up_proj": (BF16, (2, 128, 96))})
    for ignore in ("re:.*experts$", r"re:.*experts\."):
        kept = QuantisedLayout.of(Recipe.parse("nvfp4", ignore=[ignore]), plain)
        assert kept.outputs.keys() == plain.keys()
        assert base in kept.quantization_config()["ignore"]


@pytest.mark.parametrize("ignore", [r"re:.*experts\.1\.", r"re:.*\.up_proj"])
def test_patterns_that_match_only_some_experts_of_a_tensor_are_refused(ignore):
    base = "model.layers.0.mlp.experts"
    specs = {f"{base}.gate_up_proj": (BF16, (2, 128, 96)), f"{base}.down_proj": (BF16, (2, 96, 64))}
    with pytest.raises(UnquantisableWeight, match=r"gate_up_proj' holds all experts .* only some of them, such as") as error:
        QuantisedLayout.of(Recipe.parse("nvfp4", ignore=[ignore]), specs)
    assert "all experts of the layer or none" in error.value.hint


GPT_OSS = {
    "model.layers.0.self_attn.q_proj.weight": (BF16, (64, 64)),
    "model.layers.0.mlp.router.weight": (BF16, (4, 64)),
    "model.layers.0.mlp.experts.gate_up_proj": (BF16, (4, 64, 256)),
    "model.layers.0.mlp.experts.gate_up_proj_bias": (BF16, (4, 256)),
    "model.layers.0.mlp.experts.down_proj": (BF16, (4, 128, 64)),
    "model.layers.0.mlp.experts.down_proj_bias": (BF16, (4, 64)),
}


def test_gpt_oss_has_its_own_names():
    layout = QuantisedLayout.of("mxfp4", GPT_OSS)
    base = "model.layers.0.mlp.experts"
    made = {output.name: (output.dtype.name, output.shape) for output in layout.outputs.values() if output.weight}
    assert made == {
        f"{base}.gate_up_proj_blocks": ("U8", (4, 256, 2, 16)),
        f"{base}.gate_up_proj_scales": ("U8", (4, 256, 2)),
        f"{base}.down_proj_blocks": ("U8", (4, 64, 4, 16)),
        f"{base}.down_proj_scales": ("U8", (4, 64, 4)),
    }
    assert layout.quantization_config()["quant_method"] == "mxfp4"


def test_other_recipes_refuse_the_interleaved_experts_of_gpt_oss():
    with pytest.raises(UnquantisableWeight, match="gpt-oss"):
        QuantisedLayout.of("int4", GPT_OSS)
    assert QuantisedLayout.of(Recipe.parse("int4", ignore=["re:.*experts$"]), GPT_OSS).weights


@pytest.mark.parametrize(("spelling", "columns"), [("nvfp4", 24), ("mxfp4", 48), ("int4", 16), ("int4-128", 64)])
def test_rows_that_are_not_whole_groups_are_refused(spelling, columns):
    with pytest.raises(UnquantisableWeight, match=f"'a.weight' has {columns} columns, which is not a multiple"):
        QuantisedLayout.of(spelling, {"a.weight": (BF16, (8, columns))})
    assert QuantisedLayout.of(Recipe.parse(spelling, ignore=["a"]), {"a.weight": (BF16, (8, columns))}).kept_modules == ["a"]


def test_what_cannot_be_quantised_is_refused_by_name():
    with pytest.raises(UnquantisableWeight, match="type F64"):
        QuantisedLayout.of("fp8-block", {"a.weight": (dtype_named("F64"), (8, 8))})
    with pytest.raises(UnquantisableWeight, match="no elements"):
        QuantisedLayout.of("fp8-block", {"a.weight": (BF16, (0, 8))})
    with pytest.raises(UnquantisableWeight, match=r"'x.weight_scale'"):
        QuantisedLayout.of("fp8-channel", {"x.weight": (BF16, (8, 8)), "x.weight_scale": (BF16, (8, 1))})
    with pytest.raises(UnquantisableWeight, match=r"v_proj.* would be quantised, but .*k_proj"):
        QuantisedLayout.of(Recipe.parse("fp8-block", ignore=["re:.*k_proj"]), {name: LAYER[name] for name in LAYER if "attn" in name})
    with pytest.raises(TensorMissing, match="does not make"):
        QuantisedLayout.of("fp8-block", LAYER).output("nothing")


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("a.weight", "F8_E4M3", (128, 128)),
        ("a.weight", "I8", (128, 128)),
        ("a.weight_packed", "U8", (128, 64)),
        ("a.weight_packed", "I32", (128, 16)),
        ("a.experts.down_proj_blocks", "U8", (4, 64, 2, 16)),
        ("a.experts.gate_up_proj", "F8_E4M3", (4, 64, 64)),
    ],
)
@pytest.mark.parametrize("ignore", [[], ["re:a"]])
def test_a_model_that_is_quantised_already_is_refused_because_its_scales_would_be_rounded(name, dtype, shape, ignore):
    specs = {name: (dtype_named(dtype), shape), "b.weight": (BF16, (128, 128)), "a.weight_scale": (F32, (128, 1))}
    with pytest.raises(UnquantisableWeight, match=f"'{name}' has type {dtype}: this model is quantised already.*without a recipe"):
        QuantisedLayout.of(Recipe.parse("fp8-block", ignore=ignore), specs)


@pytest.mark.parametrize(
    ("module", "is_kept"),
    [
        ("lm_head", True),
        ("model.embed_tokens", True),
        ("transformer.wte", True),
        ("model.layers.3.mlp.gate", True),
        ("model.layers.3.block_sparse_moe.gate", True),
        ("model.layers.3.mlp.shared_expert_gate", True),
        ("model.layers.3.mlp.router", True),
        ("model.visual.blocks.0.attn.qkv", True),
        ("model.layers.3.self_attn.q_norm", True),
        ("base_model.model.layers.3.self_attn.q_proj.lora_A", True),
        ("model.layers.3.mlp.gate_proj", False),
        ("model.layers.3.mlp.experts.7.gate_proj", False),
        ("model.layers.3.self_attn.o_proj", False),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa", False),
        ("model.layers.3.mlp.shared_expert.up_proj", False),
    ],
)
def test_default_patterns_keep_what_users_of_these_recipes_keep(module, is_kept):
    layout = QuantisedLayout.of("fp8-block", {f"{module}.weight": (BF16, (128, 128))})
    assert bool(layout.kept_modules) is is_kept


def test_integers_and_buffers_stay():
    specs = {"a.weight": (dtype_named("I8"), (8, 8)), "b.conv1d.weight": (BF16, (8, 1, 4)), "c.table": (BF16, (8, 8))}
    assert QuantisedLayout.of("fp8-block", specs).outputs.keys() == specs.keys()


def test_configs():
    block = QuantisedLayout.of("fp8-block", LAYER).quantization_config()
    assert block == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.embed_tokens", "lm_head"],
    }
    assert QuantisedLayout.of("fp8-block-ue8m0", LAYER).quantization_config() == {**block, "scale_fmt": "ue8m0"}
    tied = {name: spec for name, spec in LAYER.items() if name != "lm_head.weight"}
    assert "lm_head" in QuantisedLayout.of("int4", tied).quantization_config()["ignore"]
    both = {**LAYER, "model.layers.0.mlp.gate.weight": (BF16, (8, 256))}
    assert QuantisedLayout.of("nvfp4", both).quantization_config()["ignore"] == [
        "model.embed_tokens",
        "lm_head",
        "model.layers.0.mlp.gate",
    ]


def test_a_layout_of_many_experts_knows_each_of_them():
    specs = {
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight": (BF16, (64, 64))
        for layer in range(4)
        for expert in range(64)
        for kind in ("gate", "up", "down")
    }
    layout = QuantisedLayout.of("nvfp4", specs)
    assert len(layout.weights) == len(specs)
    assert len(layout.outputs) == 3 * len(specs)
    assert sum(len(group) == 2 for group in layout.groups.values()) == 4 * 64
    assert layout.quantization_config()["ignore"] == ["lm_head"]
