"""Sticky scales: they never clip what fresh ones do not, are never more than twice as wide, and do not depend on how the work is cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_weights import DTYPES, MOVES, walk
from single_weights import quantise_weight, width_ratio

from deltawire.dtypes import dtype_of_numpy
from deltawire.quantise import Recipe
from deltawire.quantise.dequantise import decode_codes
from deltawire.quantise.quantise import quantise_state
from deltawire.quantise.recipe import SPELLINGS
from deltawire.quantise.reference import block_maxima, encode_codes
from deltawire.quantise.scales import Scales, choose_scales, numbers_of

FRESH = {spelling: Recipe.parse(spelling, sticky=False) for spelling in SPELLINGS}


cases = given(
    spelling=st.sampled_from(SPELLINGS),
    dtype=st.sampled_from(sorted(DTYPES)),
    rows=st.integers(1, 150),
    blocks=st.integers(1, 2),
    moves=st.lists(st.tuples(st.sampled_from(MOVES), st.floats(1, 6)), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)


def same(one: Scales, other: Scales) -> bool:
    pairs = itertools.zip_longest(one, other)
    return all(a is b is None or (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()) for a, b in pairs)


@cases
@settings(max_examples=60, deadline=None)
def test_sticky_scales_fit_and_are_at_most_twice_as_wide(spelling, dtype, rows, blocks, moves, seed):
    recipe, previous = Recipe.parse(spelling), None
    for weight in walk((rows, 128 * blocks), dtype, moves, seed):
        source, maxima = dtype_of_numpy(weight.dtype), block_maxima(recipe, weight)
        codes, scales = quantise_weight(recipe, weight, previous)
        fresh = choose_scales(FRESH[spelling], source, maxima)
        if previous is None:
            assert same(scales, fresh)
        ratio = width_ratio(recipe, source, maxima, scales).reshape(maxima.shape)
        assert ratio.max() <= 2
        is_fresh = ratio == 1
        if scales.global_scale is not None:
            assert fresh.global_scale / 2 <= scales.global_scale or not maxima.any()
            ours = numbers_of(recipe, scales.scale) / scales.global_scale
        else:
            ours = numbers_of(recipe, scales.scale)
        fits = maxima <= ours.reshape(maxima.shape) * recipe.fits_up_to * (1 + 2.0**-8)  # quotients are rounded to bfloat16
        assert fits[~is_fresh].all()
        assert np.isfinite(ours).all()
        assert (ours > 0).all()
        # The same weights again change nothing, and the same call gives the same bytes.
        again, same_scales = quantise_weight(recipe, weight, scales)
        assert again.tobytes() == codes.tobytes()
        assert same(same_scales, scales)
        previous = scales


@cases
@settings(max_examples=60, deadline=None)
def test_shards_give_the_bytes_of_the_whole(spelling, dtype, rows, blocks, moves, seed):
    recipe = Recipe.parse(spelling)
    before, *_, weight = walk((rows, 128 * blocks), dtype, moves, seed)
    _, previous = quantise_weight(recipe, before)
    codes, scales = quantise_weight(recipe, weight, previous)
    source = dtype_of_numpy(weight.dtype)
    cuts = sorted({0, rows, *np.random.default_rng(seed).integers(0, rows + 1, 3).tolist()})
    grid = np.zeros(recipe.block.grid(*weight.shape), np.float32)
    ranges = [(start, stop, slice(*recipe.block.rows_of_grid(start, stop))) for start, stop in itertools.pairwise(cuts)]
    for start, stop, part in ranges:  # each rank takes the maxima of its rows, and they reduce to the maximum
        grid[part] = np.maximum(grid[part], block_maxima(recipe, weight[start:stop], start))
    pieces = []
    for start, stop, part in ranges:
        if recipe.name == "fp8-tensor":
            own = choose_scales(recipe, source, grid[part], previous, float(grid.max()))
        else:
            own = choose_scales(recipe, source, grid[part], previous._replace(scale=previous.scale[part]), float(grid.max()))
            assert own.scale.tobytes() == scales.scale[part].tobytes()
        pieces.append(encode_codes(recipe, weight[start:stop], own, start))
    assert np.concatenate(pieces).tobytes() == codes.tobytes()


@cases
@settings(max_examples=60, deadline=None)
def test_the_error_is_within_its_bound(spelling, dtype, rows, blocks, moves, seed):
    """docs/quantise.md states the bound: it is that of the chosen scale, which is at most twice a fresh one."""
    recipe, previous = Recipe.parse(spelling), None
    for weight in walk((rows, 128 * blocks), dtype, moves, seed):
        if weight.dtype == np.float16:
            return  # scales of float16 are often below its normal numbers, where they are rounded coarsely
        codes, previous = quantise_weight(recipe, weight, previous)
        exact = weight.astype(np.float64)
        error = np.abs(decode_codes(recipe, codes, previous) - exact)
        scale = numbers_of(recipe, previous.scale) / (1 if previous.global_scale is None else previous.global_scale)
        height, width = recipe.block
        scale = scale.reshape(1, -1) if recipe.name == "fp8-tensor" else scale
        scale = np.repeat(scale, height or rows, axis=0)[:rows] if height != 1 else scale
        scale = np.repeat(scale, width or 128 * blocks, axis=1)[:, : 128 * blocks]
        assert scale.shape == weight.shape
        if recipe.element == "e4m3":
            bound = np.maximum(np.abs(exact) / 16, scale / 1024)
        else:
            is_largest = np.abs(exact) > 7.49 * scale  # only the largest integers are further off than half a step
            bound = scale * np.where((recipe.element == "int4") & ~is_largest, 0.5, 1.0)
        if recipe.name == "nvfp4":  # a scale below the normal numbers of e4m3 is rounded coarsely
            is_coarse = np.repeat(numbers_of(recipe, previous.scale) < 2.0**-6, 16, axis=1)
            bound = np.where(is_coarse, np.maximum(bound, np.abs(exact)), bound)
        assert (error <= bound + np.abs(exact) / 256).all()  # quotients and scales are rounded to the type of the weight


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0, 0.0])
def test_a_previous_scale_that_is_no_positive_number_never_stays(spelling, bad):
    recipe = Recipe.parse(spelling)
    for weight in (np.zeros((4, 128), np.float32), np.full((4, 128), 0.3, np.float32)):
        codes, fresh = quantise_weight(recipe, weight)
        damaged = np.full(fresh.scale.shape, 255 if recipe.name == "mxfp4" else bad).astype(fresh.scale.dtype)
        for previous in (Scales(damaged, fresh.global_scale), Scales(fresh.scale, fresh.global_scale and np.full(1, bad, np.float32))):
            again, scales = quantise_weight(recipe, weight, previous)
            assert again.tobytes() == codes.tobytes()
            assert same(scales, fresh)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("value", [0.0, 1e-30, 6e4])
def test_a_tiny_previous_global_scale_does_not_stay_because_zeros_would_become_nan(dtype, value):
    recipe, weight = Recipe.parse("nvfp4"), np.full((4, 128), value, DTYPES[dtype])
    _, fresh = quantise_weight(recipe, weight)
    for tiny in (2.0**-149, 2.0**-126, 2.0**-120):
        previous = Scales(np.full_like(fresh.scale, 448), np.full(1, tiny, np.float32))
        again, scales = quantise_weight(recipe, weight, previous)
        assert same(scales, fresh)
        assert np.isfinite(decode_codes(recipe, again, scales)).all()
    largest = np.full((1, 16), 3e38, np.float32)
    _, lowest = quantise_weight(recipe, largest)
    assert same(quantise_weight(recipe, np.zeros_like(largest), lowest)[1], lowest)  # the smallest fresh scale may stay


@pytest.mark.parametrize("spelling", [spelling for spelling in SPELLINGS if spelling not in ("mxfp4", "fp8-block-ue8m0")])
def test_one_grown_weight_does_not_move_its_block_until_it_no_longer_fits(spelling):
    weight = np.full((4, 128), 0.01, np.float32)
    weight[0, 0] = 1.0
    recipe = Recipe.parse(spelling)
    _, first = quantise_weight(recipe, weight)
    weight[0, 0] = 0.7  # fresh scales would be smaller
    _, second = quantise_weight(recipe, weight, first)
    assert same(second, first)
    assert not same(quantise_weight(FRESH[spelling], weight, first)[1], first)
    weight[0, 0] = 0.45  # the scale would be more than twice as wide as needed
    _, third = quantise_weight(recipe, weight, second)
    assert same(third, quantise_weight(FRESH[spelling], weight)[1])
    weight[0, 0] = 0.46
    _, fourth = quantise_weight(recipe, weight, third)  # the nearest code is still the largest one
    assert same(fourth, third)
    weight[0, 0] = 0.6
    _, fifth = quantise_weight(recipe, weight, fourth)  # it no longer fits
    assert same(fifth, quantise_weight(FRESH[spelling], weight)[1])


def test_scales_of_blocks_follow_the_rule_under_the_same_global_scale():
    recipe = Recipe.parse("nvfp4")
    weight = np.full((2, 16), 8.0, np.float32)

    def step(value, previous):
        weight[1] = value
        return quantise_weight(recipe, weight, previous)[1]

    first = step(1.0, None)
    expected = [(0.7, 1.0), (0.4, 0.4), (0.44, 0.4), (0.6, 0.6), (0.32, 0.6), (0.25, 0.25)]  # the largest weight, and the one of its scale
    scales = first
    for value, kept in expected:
        scales = step(value, scales)
        assert scales.global_scale == first.global_scale
        assert scales.scale[1] == step(kept, None).scale[1], value


def test_a_block_that_became_zero_keeps_its_scale():
    weight = np.full((4, 128), 0.3, np.float32)
    for spelling in SPELLINGS:
        recipe = Recipe.parse(spelling)
        _, first = quantise_weight(recipe, weight)
        codes, second = quantise_weight(recipe, np.zeros_like(weight), first)
        assert same(first, second)
        assert not decode_codes(recipe, codes, second).any()


def test_weights_of_a_group_keep_their_scale_only_if_all_of_them_have_it():
    names = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    state = {name: np.full((4, 64), 0.5 + number, np.float32) for number, name in enumerate(names)}
    for spelling, scale in (("nvfp4", "_global_scale"), ("fp8-tensor", "_scale")):
        first = quantise_state(state, spelling)
        assert len({first[name + scale].tobytes() for name in names}) == 1
        smaller = {name: tensor * np.float32(0.7) for name, tensor in state.items()}
        kept = quantise_state(smaller, spelling, first)
        assert kept[names[0] + scale].tobytes() == first[names[0] + scale].tobytes()
        odd = {**first, names[1] + scale: first[names[1] + scale] * np.float32(1.1)}
        assert (
            quantise_state(smaller, spelling, odd)[names[0] + scale].tobytes()
            == quantise_state(smaller, spelling)[names[0] + scale].tobytes()
        )


def test_previous_tensors_of_another_form_are_not_used():
    weight = np.full((4, 128), 1.0, np.float32)
    first = quantise_state({"a.weight": weight}, "fp8-block")
    smaller = {"a.weight": weight * np.float32(0.9)}
    fresh = quantise_state(smaller, "fp8-block")["a.weight_scale_inv"]
    assert quantise_state(smaller, "fp8-block", first)["a.weight_scale_inv"] != fresh
    scale = first["a.weight_scale_inv"]
    for other in ({}, {"a.weight_scale_inv": scale.astype(np.float64)}, {"a.weight_scale_inv": np.repeat(scale, 2, axis=1)}):
        assert quantise_state(smaller, "fp8-block", other)["a.weight_scale_inv"] == fresh
