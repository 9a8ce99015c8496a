"""Native quantising gives the bytes of the reference, for each instruction set."""

from __future__ import annotations

import contextlib
import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_weights import DTYPES, KINDS, make_weight
from single_weights import quantise_weight

from deltawire.codec import using_codec
from deltawire.codec.native import instruction_sets
from deltawire.dtypes import dtype_of_numpy
from deltawire.errors import NonFiniteWeights
from deltawire.quantise import QuantisedLayout, Recipe, reference
from deltawire.quantise.dequantise import decode_codes
from deltawire.quantise.native import NativeQuantiser
from deltawire.quantise.quantise import quantise_state
from deltawire.quantise.recipe import SPELLINGS
from deltawire.quantise.scales import Scales, choose_scales
from deltawire.quantise.weight_table import WeightTable, source_number

GROUPED = ("nvfp4", "mxfp4", "int4", "int4-128")


def address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


def quantise(recipe, weights, previous, groups, quantiser) -> list[tuple[np.ndarray, Scales]]:
    """Quantise many weights in one call. It raises `AssertionError` if one of them is not finite."""
    made = [empty_outputs(recipe, weight) for weight in weights]
    old = [before or Scales(None) for before in previous]
    columns = [
        ([address(weight) for weight in weights], np.uint64),
        ([weight.strides[0] for weight in weights], np.int64),
        ([weight.shape[0] for weight in weights], np.int64),
        ([weight.shape[1] for weight in weights], np.int64),
        ([source_number(dtype_of_numpy(weight.dtype)) for weight in weights], np.uint8),
        ([address(codes) for codes, _ in made], np.uint64),
        ([address(scales.scale) for _, scales in made], np.uint64),
        ([address(scales.global_scale) for _, scales in made], np.uint64),
        ([address(scales.scale) for scales in old], np.uint64),
        ([address(scales.global_scale) for scales in old], np.uint64),
        (groups, np.int64),
    ]
    table = WeightTable(*(np.array(numbers, dtype) for numbers, dtype in columns))
    assert quantiser.quantise_weights(recipe, table) is None
    return made


def empty_outputs(recipe, weight) -> tuple[np.ndarray, Scales]:
    """Return arrays of the form of the outputs, filled with bytes that would be wrong."""
    layout = QuantisedLayout.of(recipe, {"a.weight": (dtype_of_numpy(weight.dtype), weight.shape)})
    (quantised,) = layout.weights
    forms = {role: layout.outputs[name] for role, name in quantised.outputs.items()}
    made = {role: np.full(form.shape, 0xAB, np.uint8).astype(form.dtype.numpy) for role, form in forms.items()}
    return made["codes"], Scales(made["scale"], made.get("global_scale"))


def assert_same(found: tuple[np.ndarray, Scales], expected: tuple[np.ndarray, Scales]) -> None:
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
            assert one.dtype == other.dtype


def check_steps(recipe, weight, quantiser, first_row) -> None:
    """Compare the two functions of a `Quantiser`, with the rows as a shard that begins at `first_row`."""
    maxima = quantiser.block_maxima(recipe, weight, first_row)
    np.testing.assert_array_equal(maxima, reference.block_maxima(recipe, weight, first_row))
    scales = choose_scales(recipe, dtype_of_numpy(weight.dtype), maxima)
    codes, expected = quantiser.encode_codes(recipe, weight, scales, first_row), reference.encode_codes(recipe, weight, scales, first_row)
    np.testing.assert_array_equal(codes.view(np.uint8), expected.view(np.uint8))
    assert (codes.dtype, codes.shape) == (expected.dtype, expected.shape)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_kind_of_weight(spelling: str, isa: str) -> None:
    recipe, quantiser = Recipe.parse(spelling), NativeQuantiser(2, isa)
    for dtype in DTYPES:
        weights = [make_weight(kind, (130, 256 if spelling in GROUPED else 261), dtype) for kind in KINDS]
        numbers = list(range(len(weights)))
        fresh = [quantise_weight(recipe, weight) for weight in weights]
        for found, expected in zip(quantise(recipe, weights, [None] * len(weights), numbers, quantiser), fresh, strict=True):
            assert_same(found, expected)
        # The scales of the weight before it: some are too wide, some too narrow, some stay.
        before = [fresh[number - 1][1] for number in numbers]
        sticky = [quantise_weight(recipe, weight, scales) for weight, scales in zip(weights, before, strict=True)]
        for found, expected in zip(quantise(recipe, weights, before, numbers, quantiser), sticky, strict=True):
            assert_same(found, expected)
        for weight in weights:
            check_steps(recipe, weight, quantiser, first_row=77)


@given(
    spelling=st.sampled_from(SPELLINGS),
    dtype=st.sampled_from(sorted(DTYPES)),
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    first_row=st.integers(0, 300),
    exponent=st.integers(-140, 120),
    spread=st.integers(0, 30),
    shrink=st.sampled_from([1.0, 1.02, 0.97, 1.9, 0.5, 0.4]),
    isa=st.sampled_from(instruction_sets()),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=150, deadline=None)
def test_native_is_the_reference(spelling, dtype, rows, columns, first_row, exponent, spread, shrink, isa, threads, seed) -> None:
    recipe, quantiser = Recipe.parse(spelling), NativeQuantiser(threads, isa)
    if recipe.group_size:
        columns = -(-columns // recipe.group_size) * recipe.group_size
    rng = np.random.default_rng(seed)
    if dtype == "float16":
        exponent = max(-24, min(exponent, 8))
    # Multiples of a power of two, so that many quotients are halfway between codes.
    steps = rng.integers(-(2 ** rng.integers(1, 12)), 2**11, (rows, columns + 8)) * rng.choice([1.0, 1 / 448, 1 / 7.5], (1, columns + 8))
    wide = np.ldexp(steps, exponent - 11 - rng.integers(0, spread + 1, (rows, columns + 8)))
    with np.errstate(all="ignore"):
        weight = wide.astype(np.float32).astype(DTYPES[dtype])
        weight = np.where(np.isfinite(weight.astype(np.float32)), weight, np.zeros(1, weight.dtype))[:, 3 : columns + 3]  # rows with gaps
        old = (weight.astype(np.float32) * np.float32(shrink)).astype(weight.dtype)
        old = np.where(np.isfinite(old.astype(np.float32)), old, np.zeros(1, old.dtype))
    _, before = quantise_weight(recipe, old)
    check_steps(recipe, weight, quantiser, first_row)
    for previous in (None, before):
        assert_same(quantise(recipe, [weight], [previous], [0], quantiser)[0], quantise_weight(recipe, weight, previous))


@pytest.mark.parametrize("isa", instruction_sets())
def test_weights_next_to_a_boundary(isa: str) -> None:
    """Weights that are a few units away from the point between two codes, for scales all over the range."""
    quantiser, rng = NativeQuantiser(1, isa), np.random.default_rng(5)
    for spelling, largest, low in (("fp8-block", 448.0, np.arange(1, 16) * 2.0**-10), ("int4", 7.5, np.arange(15) / 2)):
        recipe = Recipe.parse(spelling)
        bounds = np.concatenate([low, np.outer(np.exp2(np.arange(-6, 9)), 1 + np.arange(1, 16, 2) / 16).ravel()])
        bounds = bounds[(bounds > 0) & (bounds < largest)].astype(np.float32)
        for _ in range(20):
            scale = np.float32((rng.random() + 0.5) * 2.0 ** rng.integers(-30, 0))
            near = (bounds * scale).view(np.int32)[:, None] + np.arange(-3, 4, dtype=np.int32)
            values = np.resize(near.view(np.float32).ravel() * rng.choice([-1, 1], near.size).astype(np.float32), 32 * 128)
            weight = np.ascontiguousarray(values.reshape(32, 128))
            scales = Scales(np.full(recipe.block.grid(32, 128), scale, np.float32))
            found, expected = quantiser.encode_codes(recipe, weight, scales), reference.encode_codes(recipe, weight, scales)
            np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("spelling", ["fp8-block", "fp8-block-ue8m0"])
def test_blocks_whose_scales_stay(spelling: str, isa: str) -> None:
    """Whole blocks with weights next to every boundary, zeros of both signs and tiny weights, up to and above the limit of the scale."""
    recipe, quantiser, rng = Recipe.parse(spelling), NativeQuantiser(1, isa), np.random.default_rng(7)
    bounds = np.concatenate([np.arange(1, 16) * 2.0**-10, np.outer(np.exp2(np.arange(-6, 9)), 1 + np.arange(1, 16, 2) / 16).ravel()])
    bounds = bounds[bounds <= 464].astype(np.float32)
    for round_, exponent in enumerate((-30, -9, -1)):
        scale = np.float32(2.0**exponent * (1.0 if spelling.endswith("ue8m0") else rng.uniform(1, 1.99)))
        near = ((bounds * scale).view(np.int32)[:, None] + np.arange(-3, 4, dtype=np.int32)).view(np.float32).ravel()
        near = near[near <= 464 * scale]
        values = np.concatenate([near, -near, np.float32([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38]), np.float32([464, -464]) * scale])
        weight = rng.permuted(np.resize(values, 128 * 512)).reshape(128, 512)
        weight[5, 300] = np.float32((465, 1e9, -600)[round_]) * scale  # the scale of the third block does not stay
        weight[:, 384:] *= np.float32(2.0**-12)  # nor does that of the last one
        before = Scales(np.full((1, 4), scale, np.float32))
        expected = quantise_weight(recipe, weight, before)
        assert [bool(stays) for stays in expected[1].scale.view(np.float32)[0] == scale] == [True, True, False, False]
        assert_same(quantise(recipe, [weight], [before], [0], quantiser)[0], expected)


PATTERNS = (0x00, 0x7F, 0x80, 0xFF, 0x40, 0x01)
"""Bytes of hostile scales. 0x01 makes a tiny number of type F32."""


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_scales_that_are_not_positive_numbers_do_not_stay(spelling: str) -> None:
    recipe, quantiser = Recipe.parse(spelling), NativeQuantiser()
    for weight, pattern in itertools.product((make_weight("plain", (64, 256), "float32"), np.zeros((64, 256), np.float32)), PATTERNS):
        _, fresh = quantise_weight(recipe, weight)
        hostile = Scales(*(None if array is None else np.full_like(array.view(np.uint8), pattern).view(array.dtype) for array in fresh))
        for previous in (hostile, fresh._replace(scale=hostile.scale)):
            assert_same(quantise(recipe, [weight], [previous], [0], quantiser)[0], quantise_weight(recipe, weight, previous))


@pytest.mark.parametrize("spelling", ["nvfp4", "fp8-tensor"])
@pytest.mark.parametrize("isa", instruction_sets())
def test_weights_that_share_a_scale(spelling: str, isa: str) -> None:
    recipe, quantiser = Recipe.parse(spelling), NativeQuantiser(2, isa)
    weights = [make_weight(kind, (40, 64), "bfloat16", seed) for seed, kind in enumerate(["plain", "small", "one huge", "zeros", "plain"])]
    groups = [1, 1, 0, 0, 4]
    source = dtype_of_numpy(weights[0].dtype)
    maxima = [reference.block_maxima(recipe, weight) for weight in weights]
    previous: list[Scales | None] = [None] * 5
    for factor in (1.0, 1.01, 3.0, 3.0):
        weights[1] = (weights[1].astype(np.float32) * np.float32(factor)).astype(ml_dtypes.bfloat16)
        maxima[1] = reference.block_maxima(recipe, weights[1])
        expected = []
        for number, weight in enumerate(weights):
            shared = max(float(maxima[other].max()) for other in range(5) if groups[other] == groups[number])
            scales = choose_scales(recipe, source, maxima[number], previous[number], shared)
            expected.append((reference.encode_codes(recipe, weight, scales), scales))
        found = quantise(recipe, weights, previous, groups, quantiser)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
        previous = [scales for _, scales in found]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_weights_that_are_not_finite_are_refused(spelling: str) -> None:
    recipe = Recipe.parse(spelling)
    for isa in instruction_sets():
        quantiser = NativeQuantiser(1, isa)
        for dtype, value in zip(DTYPES, (np.nan, np.inf, -np.inf), strict=True):
            weight = make_weight("plain", (130, 256), dtype)
            weight[129, 255] = value
            with pytest.raises(NonFiniteWeights, match="'here' cannot be quantised: 1 element is"):
                quantiser.block_maxima(recipe, weight, name="here")
            plain = make_weight("plain", (130, 256), dtype)
            with pytest.raises(AssertionError):
                quantise(recipe, [plain, weight], [None, None], [0, 0], quantiser)


@pytest.fixture
def flushing():
    """Return a context in which this thread flushes subnormal numbers to zero."""
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers to zero")
    torch.set_flush_denormal(False)

    @contextlib.contextmanager
    def flush():
        torch.set_flush_denormal(True)
        try:
            assert np.full(1, 1e-40, np.float32) * np.float32(0.5) == 0
            yield
        finally:
            torch.set_flush_denormal(False)

    return flush


def test_subnormal_numbers_are_kept_whatever_the_process_has_set(flushing) -> None:
    weight, recipe = make_weight("subnormal", (64, 128), "float32"), Recipe.parse("fp8-block")
    expected = quantise_weight(recipe, weight)
    with flushing():
        found = quantise(recipe, [weight], [None], [0], NativeQuantiser(2))
    assert_same(found[0], expected)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_scales_that_numpy_chooses_are_the_same_whatever_the_process_has_set(spelling, flushing) -> None:
    """The second weight is in the normal range, but its scales are not."""
    recipe = Recipe.parse(spelling)
    for weight in (make_weight("subnormal", (64, 128), "float32"), make_weight("small", (64, 128), "float32") * np.float32(1e-31)):
        first = quantise_weight(recipe, weight)
        then = quantise_weight(recipe, weight * np.float32(0.6), first[1])
        numbers = decode_codes(recipe, *first)
        with flushing():
            assert_same(quantise_weight(recipe, weight), first)
            found = decode_codes(recipe, *first)
        small = weight * np.float32(0.6)
        with flushing():
            assert_same(quantise_weight(recipe, small, first[1]), then)
        assert found.tobytes() == numbers.tobytes()


@pytest.mark.parametrize("has_gaps", [False, True])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_whole_states_are_those_of_the_reference(spelling: str, has_gaps: bool) -> None:
    """Fused weights that share a scale, experts, rows with gaps, tensors that stay, and outputs in memory of the caller."""
    rng = np.random.default_rng(3)
    shapes = {"q_proj.weight": (128, 256), "k_proj.weight": (32, 256), "norm.weight": (256,)}
    shapes |= {"experts.gate_up_proj": (3, 256, 256), "experts.down_proj": (3, 256, 128)}
    state = {f"model.layers.0.{name}": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    if has_gaps:
        state["model.layers.0.q_proj.weight"] = np.pad(state["model.layers.0.q_proj.weight"], ((0, 0), (0, 64)))[:, :256]
    previous: dict[str, np.ndarray] | None = None
    for step in range(3):
        state["model.layers.0.k_proj.weight"] *= np.float32([1, 1.01, 5][step])
        with using_codec("reference"):
            expected = quantise_state(state, spelling, previous)
        out = {name: np.zeros_like(array) for name, array in expected.items() if "q_proj" in name}
        strided = {name: np.zeros((*array.shape, 2), array.dtype)[..., 0] for name, array in expected.items() if "down_proj" in name}
        strided = strided if has_gaps else {}
        found = quantise_state(state, spelling, previous, out=out | strided, threads=2)
        assert list(found) == list(expected)
        for name, array in expected.items():
            assert (found[name].dtype, found[name].shape, found[name].tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert all(found[name] is array for name, array in (out | strided).items())
        previous = found
    if Recipe.parse(spelling).shares_scales:  # the previous scales of a group differ, so its scale is fresh
        suffix = "global_scale" if spelling == "nvfp4" else "scale"
        previous = previous | {(name := f"model.layers.0.k_proj.weight_{suffix}"): previous[name] * np.float32(1.5)}
        with using_codec("reference"):
            expected = quantise_state(state, spelling, previous)
        found = quantise_state(state, spelling, previous)
        assert all(found[name].tobytes() == array.tobytes() for name, array in expected.items())
    names = [name for name in found if name.endswith(("k_proj.weight_scale", "k_proj.weight_scale_inv"))]
    layout = QuantisedLayout.of_state(spelling, state)
    assert layout.quantise(names, state, previous)[names[0]].tobytes() == found[names[0]].tobytes()


def test_memory_that_cannot_be_written_is_not_written() -> None:
    state = {"a.weight": make_weight("plain", (128, 128), "float32")}
    out = {"a.weight": np.zeros((128, 128), ml_dtypes.float8_e4m3fn)}
    out["a.weight"].flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        quantise_state(state, "fp8-block", out=out)
    assert not out["a.weight"].view(np.uint8).any()
