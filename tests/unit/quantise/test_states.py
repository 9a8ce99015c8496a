"""Whole states: which tensors come out, in which form, and what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from sample_weights import make_weight
from single_weights import source_names

from deltawire.errors import DtypeMismatch, NonFiniteWeights, ShapeMismatch, TensorMissing
from deltawire.quantise import QuantisedLayout, Recipe, dequantise_state, quantisation_error, quantise_state
from deltawire.quantise.recipe import SPELLINGS

BF16 = ml_dtypes.bfloat16


def a_model(dtype="bfloat16", seed=0):
    def weight(rows, columns, number):
        return make_weight("plain", (rows, columns), dtype, seed + number)

    return {
        "model.embed_tokens.weight": weight(20, 128, 1),
        "model.layers.0.self_attn.q_proj.weight": weight(160, 128, 2),
        "model.layers.0.self_attn.k_proj.weight": weight(32, 128, 3),
        "model.layers.0.self_attn.v_proj.weight": weight(32, 128, 4) * 3,
        "model.layers.0.self_attn.q_norm.weight": np.ones(32, BF16),
        "model.layers.0.mlp.gate.weight": weight(4, 128, 5),
        "model.layers.0.mlp.experts.gate_up_proj": weight(4 * 256, 128, 6).reshape(4, 256, 128),
        "model.layers.0.mlp.experts.down_proj": weight(4 * 128, 128, 7).reshape(4, 128, 128),
        "counter": np.arange(3),
    }


def equal(one, other):
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_tensors_have_the_form_that_the_layout_says(spelling):
    state = a_model()
    layout = QuantisedLayout.of_state(spelling, state)
    made = quantise_state(state, spelling)
    assert list(made) == list(layout.outputs)
    for name, tensor in made.items():
        assert (tensor.dtype, tensor.shape) == (layout.outputs[name].dtype.numpy, layout.outputs[name].shape), name
    assert equal(made["counter"], state["counter"])
    assert equal(made["model.layers.0.mlp.gate.weight"], state["model.layers.0.mlp.gate.weight"])


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_parts_of_a_state_are_made_as_the_whole(spelling):
    old, state = a_model(), a_model(seed=10)
    layout = QuantisedLayout.of_state(spelling, state)
    before = quantise_state(old, spelling)
    whole = quantise_state(state, spelling, before)
    for unit in layout.units:
        needed = {name: state[name] for name in source_names(layout, unit)}
        scales = {name: tensor for name, tensor in before.items() if "scale" in name}
        made = layout.quantise(unit, needed, scales)
        assert list(made) == unit
        assert all(equal(made[name], whole[name]) for name in unit)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_dequantised_weights_are_near_the_weights(spelling):
    state = a_model("float32")
    layout = QuantisedLayout.of_state(spelling, state)
    weights = dequantise_state(quantise_state(state, spelling), layout)
    assert weights.keys() == state.keys()
    for name, tensor in state.items():
        assert weights[name].shape == tensor.shape
        error = np.linalg.norm((weights[name] - tensor.astype(np.float32)).ravel()) / np.linalg.norm(tensor.astype(np.float32).ravel())
        assert error < (0.05 if "fp8" in spelling else 0.25), name


@pytest.mark.parametrize("spelling", ["nvfp4", "fp8-block"])
def test_transposed_experts_are_quantised_as_those_that_are_not(spelling):
    state = a_model()
    turned = {name: tensor.swapaxes(1, 2) if tensor.ndim == 3 else tensor for name, tensor in state.items()}
    one, other = quantise_state(state, spelling), quantise_state(turned, spelling)
    assert one.keys() == other.keys()
    assert all(equal(one[name], other[name]) for name in one)
    again = dequantise_state(other, QuantisedLayout.of_state(spelling, turned))
    assert all(again[name].shape == turned[name].shape for name in turned)


def test_experts_of_gpt_oss_keep_their_axes_in_blocks_and_scales():
    rng = np.random.default_rng(0)
    experts = "model.layers.0.mlp.experts"
    state = {
        f"{experts}.gate_up_proj": rng.standard_normal((2, 64, 96)).astype(BF16),
        f"{experts}.gate_up_proj_bias": np.zeros((2, 96), BF16),
        f"{experts}.down_proj": rng.standard_normal((2, 48, 64)).astype(BF16),
        f"{experts}.down_proj_bias": np.zeros((2, 64), BF16),
    }
    with pytest.raises(Exception, match="48 columns"):
        quantise_state(state, "mxfp4")
    state[f"{experts}.gate_up_proj"] = rng.standard_normal((2, 64, 128)).astype(BF16)
    state[f"{experts}.gate_up_proj_bias"] = np.zeros((2, 128), BF16)
    state[f"{experts}.down_proj"] = rng.standard_normal((2, 64, 64)).astype(BF16)
    made = quantise_state(state, "mxfp4")
    alone = quantise_state({"a.weight": np.ascontiguousarray(state[f"{experts}.gate_up_proj"][1].T)}, "mxfp4")
    assert made[f"{experts}.gate_up_proj_blocks"][1].tobytes() == alone["a.weight_packed"].tobytes()
    assert made[f"{experts}.gate_up_proj_scales"][1].tobytes() == alone["a.weight_scale"].tobytes()
    again = quantise_state(state, "mxfp4", made)
    assert all(equal(made[name], again[name]) for name in made)


def test_given_memory_is_written():
    state = a_model()
    made = quantise_state(state, "int4")
    into = {name: np.zeros_like(tensor) for name, tensor in made.items()}
    got = quantise_state(state, "int4", out=into)
    assert all(got[name] is into[name] and equal(into[name], made[name]) for name in made)
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    with pytest.raises(DtypeMismatch, match="published as BF16"):
        quantise_state(state, "int4", out={name: into[name].astype(np.float32)})
    with pytest.raises(ShapeMismatch, match="published with shape"):
        quantise_state(state, "int4", out={name: into[name][1:]})


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_by_name(spelling, bad):
    weight = make_weight("plain", (8, 128), "bfloat16")
    weight[3, 100] = bad
    with pytest.raises(NonFiniteWeights, match=r"weight 'a.weight' cannot be quantised: 1 element is NaN or infinite"):
        quantise_state({"a.weight": weight}, Recipe.parse(spelling))


def test_a_state_that_the_layout_was_not_made_for_is_refused():
    state = a_model()
    layout = QuantisedLayout.of_state("fp8-block", state)
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(TensorMissing, match="q_proj"):
        layout.quantise([name], {})
    with pytest.raises(DtypeMismatch, match="F32"):
        layout.quantise([name], {name: state[name].astype(np.float32)})
    with pytest.raises(ShapeMismatch, match="q_proj"):
        layout.quantise([name], {name: state[name][1:]})
    with pytest.raises(TensorMissing, match="missing in the published"):
        dequantise_state({}, layout)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_error_of_scales_that_stayed_is_measured(spelling):
    state = a_model("float32")
    layout = QuantisedLayout.of_state(spelling, state)
    first = quantise_state(state, spelling)
    fresh = quantisation_error(layout, state, first)
    assert fresh.relative_error == fresh.fresh_relative_error > 0
    assert (fresh.wider_scales, fresh.widest) == (0, 1.0)
    assert fresh.scales == sum(tensor.size for name, tensor in first.items() if name.endswith(("weight_scale", "_scale_inv")))
    smaller = {name: tensor * tensor.dtype.type(0.7) for name, tensor in state.items()}
    kept = quantisation_error(layout, smaller, quantise_state(smaller, spelling, first))
    assert kept.wider_scales > 0
    assert 1 < kept.widest <= 2.3
    assert kept.relative_error < 2 * kept.fresh_relative_error
    with pytest.raises(TensorMissing):
        quantisation_error(layout, state, {})


def test_torch_tensors_give_the_same_bytes():
    torch = pytest.importorskip("torch")
    from deltawire.tensors.torch_types import to_torch

    state = a_model()
    made = quantise_state(state, "nvfp4")
    got = quantise_state({name: torch.nn.Parameter(to_torch(array), False) for name, array in state.items()}, "nvfp4", made)
    assert all(equal(got[name], made[name]) for name in made)
