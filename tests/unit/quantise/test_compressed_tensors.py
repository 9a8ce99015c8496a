"""With fresh scales, every recipe of compressed-tensors makes exactly the bytes and the config that compressed-tensors makes."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
from sample_weights import DTYPES, KINDS, make_weight

from deltawire.quantise import QuantisedLayout
from deltawire.quantise.dequantise import dequantise_state
from deltawire.quantise.quantise import quantise_state
from deltawire.tensors.bits import tensor_bits
from deltawire.tensors.torch_types import to_torch

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import compress_module, decompress_module
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle import initialize_module_for_quantization
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

SPELLINGS = ("fp8-channel", "fp8-tensor", "nvfp4", "mxfp4", "int4", "int4-128")
RAGGED = {"fp8-channel": (33, 77), "fp8-tensor": (33, 77), "nvfp4": (7, 48), "mxfp4": (7, 96), "int4": (9, 96), "int4-128": (9, 384)}


@pytest.fixture(autouse=True)
def _uncompiled():
    """compressed-tensors compiles its rounding to e2m1, which takes longer than all tests."""
    with torch.compiler.set_stance("force_eager"):
        yield


def scheme_of(spelling: str) -> QuantizationScheme:
    config = QuantisedLayout.of(spelling, {}).quantization_config()
    return QuantizationConfig(**config).config_groups["group_0"]


def compressed(spelling: str, weight: torch.Tensor, largest: torch.Tensor | None = None) -> torch.nn.Linear:
    """Return a layer that compressed-tensors has quantised. `largest` is the largest value of weights that share a global scale."""
    scheme = scheme_of(spelling)
    layer = torch.nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
    layer.weight.data.copy_(weight)
    initialize_module_for_quantization(layer, scheme)
    args, global_scale = scheme.weights, None
    if spelling == "nvfp4":
        global_scale = generate_gparam(*torch.aminmax(weight if largest is None else largest))
        layer.weight_global_scale.data.copy_(global_scale)
    if args.strategy == "tensor":
        low, high = torch.aminmax(weight if largest is None else largest)
    else:
        grouped = weight.unflatten(-1, (-1, args.group_size or weight.shape[1]))
        low, high = grouped.amin(-1), grouped.amax(-1)
    scale, zero_point = calculate_qparams(low, high, args, global_scale=global_scale)
    layer.weight_scale.data.copy_(scale)
    layer.weight_zero_point.data.copy_(zero_point)
    compress_module(layer)
    return layer


def assert_same(made: dict[str, np.ndarray], layer: torch.nn.Linear, module: str) -> None:
    theirs = {f"{module}.{name}": tensor for name, tensor in layer.state_dict().items()}
    assert {name for name in made if name.startswith(f"{module}.")} == theirs.keys()
    for name, tensor in theirs.items():
        ours, other = tensor_bits(name, made[name]), tensor_bits(name, tensor)
        assert (ours.dtype, ours.shape) == (other.dtype, other.shape), name
        np.testing.assert_array_equal(ours.bits, other.bits, err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_fresh_scales_give_the_bytes_of_compressed_tensors(spelling, dtype):
    for kind in KINDS:
        for shape in ((40, 256), RAGGED[spelling]):
            weight = make_weight(kind, shape, dtype)
            made = quantise_state({"a.weight": weight}, spelling)
            assert_same(made, compressed(spelling, to_torch(weight.copy())), "a")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_bfloat16_is_rounded_like_compressed_tensors_does(spelling):
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(ml_dtypes.bfloat16)
    finite = every[np.abs(every.astype(np.float32)) < 1.7 * 2.0**127]  # beyond that, the scales of compressed-tensors for mxfp4 overflow
    weight = np.resize(finite, (512, 128))
    weight = np.concatenate([weight, np.random.default_rng(1).permutation(weight.ravel()).reshape(weight.shape)])
    assert_same(quantise_state({"a.weight": weight}, spelling), compressed(spelling, to_torch(weight.copy())), "a")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spelling", ["nvfp4", "fp8-tensor"])
def test_layers_that_engines_join_get_the_scale_of_all_of_them(spelling, dtype):
    names = [f"self_attn.{name}_proj" for name in "qkv"]
    state = {f"{name}.weight": make_weight("plain", (16 + 16 * number, 64), dtype, number) for number, name in enumerate(names)}
    state["self_attn.k_proj.weight"][3, 3] = 5
    state["self_attn.o_proj.weight"] = make_weight("plain", (64, 64), dtype)
    made = quantise_state(state, spelling)
    together = torch.cat([to_torch(state[f"{name}.weight"]) for name in names])
    for name in names:
        assert_same(made, compressed(spelling, to_torch(state[f"{name}.weight"]), together), name)
    assert_same(made, compressed(spelling, to_torch(state["self_attn.o_proj.weight"])), "self_attn.o_proj")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_dequantising_gives_the_weights_that_compressed_tensors_computes_with(spelling):
    weight = make_weight("plain", (40, 256), "bfloat16")
    state = {"a.weight": weight}
    layer = compressed(spelling, to_torch(weight.copy()))
    decompress_module(layer)
    ours = dequantise_state(quantise_state(state, spelling), QuantisedLayout.of_state(spelling, state), "bfloat16")["a.weight"]
    np.testing.assert_array_equal(ours.view(np.uint16), tensor_bits("a", layer.weight.detach().to(torch.bfloat16)).bits)


def test_configs_are_those_of_the_presets_of_compressed_tensors():
    presets = {"fp8-channel": "FP8_DYNAMIC", "nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16", "int4-128": "W4A16"}
    for spelling, preset in presets.items():
        ours, theirs = scheme_of(spelling), preset_name_to_scheme(preset, ["Linear"])
        assert ours.weights.model_dump() == theirs.weights.model_dump()
        assert (ours.input_activations is None) == (theirs.input_activations is None)
        if theirs.input_activations is not None:
            assert ours.input_activations.model_dump() == theirs.input_activations.model_dump()
