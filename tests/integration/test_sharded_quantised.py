"""Many processes publish a quantised model: the bytes are those that one process would publish."""

from __future__ import annotations

import json
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_reader import read_commits, read_states
from small_training import NEVER
from support import bits_of, copied, publisher_arguments
from threads_as_ranks import run_ranks, shards_of

from deltawire import Publisher
from deltawire.chain.maintenance.verify import verify
from deltawire.errors import NonFiniteWeights, UnquantisableWeight
from deltawire.publish.sharded import ShardedPublisher
from deltawire.quantise import Recipe
from deltawire.quantise.recipe import SPELLINGS
from deltawire.store.memory import MemoryStore
from deltawire.tensors.bits import TensorPart
from deltawire.warnings import NothingQuantised, RecipeChanged

CONFIG = {"config.json": b'{"model_type": "tiny", "torch_dtype": "float32"}'}
SHAPES = {
    "model.layers.0.self_attn.q_proj.weight": (300, 256),
    "model.layers.0.self_attn.k_proj.weight": (130, 256),
    "model.layers.0.self_attn.v_proj.weight": (5, 256),
    "model.layers.0.mlp.down_proj.weight": (257, 128),
    "model.embed_tokens.weight": (20, 64),
    "model.norm.weight": (70,),
}


def states_of(count, shapes=SHAPES, dtype=np.float32, seed=3):
    random = np.random.default_rng(seed)
    found = [{name: (random.standard_normal(shape) * 0.02).astype(dtype) for name, shape in shapes.items()}]
    for number in range(1, count):
        found.append(copied(found[-1]))
        for array in found[-1].values():
            wide = array.astype(np.float32)
            moved = random.random(array.shape) < 0.02
            array[...] = np.where(moved, wide * random.choice([0.2, 1.01, 3.0], array.shape), wide).astype(dtype)
        if number == 2:
            found[-1]["model.norm.weight"][:] = 0
    return found


def rows_by(cuts):
    """Return a sharding by rows: `cuts` are the shares at which every tensor is cut, from 0 to 1."""

    def shard(state, rank, size):
        held = {}
        for name, array in state.items():
            edges = [0, *(int(cut * len(array)) for cut in cuts), len(array)]
            row = math.prod(array.shape[1:])
            start, stop = edges[rank] * row, edges[rank + 1] * row
            held[name] = TensorPart(array.reshape(-1)[start:stop], array.shape, start)
        return held

    return shard


def publish_parts(store, size, versions, shard=shards_of, **given):
    arguments = publisher_arguments(**({"threads": 1, "attachments": CONFIG, "anchor_policy": NEVER} | given))

    def work(ranks):
        with ShardedPublisher(ranks, store, **arguments) as publisher:
            return [publisher.publish(shard(state, ranks.rank, size), step=step) for step, state in enumerate(versions)]

    found = run_ranks(size, work)
    for answer in found:
        if isinstance(answer, BaseException):
            raise answer
    return found[0]


def publish_whole(store, versions, **given):
    with Publisher(store, **publisher_arguments(**({"threads": 1, "attachments": CONFIG, "anchor_policy": NEVER} | given))) as publisher:
        return [publisher.publish(state, step=step) for step, state in enumerate(versions)]


def bits_of_versions(store):
    return [bits_of(state) for _, state in sorted(read_states(store).items())]


@pytest.mark.parametrize("recipe", SPELLINGS)
def test_ranks_publish_the_bytes_of_one_process(recipe):
    versions = states_of(3, dtype=ml_dtypes.bfloat16 if recipe in ("int4", "nvfp4") else np.float32)
    whole, parts = MemoryStore(), MemoryStore()
    one = publish_whole(whole, versions, quantise=recipe)
    many = publish_parts(parts, 3, versions, quantise=recipe)
    assert [version.digest for version in many] == [version.digest for version in one]
    assert [version.recipe for version in many] == [version.recipe for version in one]
    assert [version.kind for version in many] == ["anchor", "delta", "delta"]
    assert bits_of_versions(parts) == bits_of_versions(whole)
    assert [commit["attachments"][0]["size"] for commit in read_commits(parts)[1:]] == [
        commit["attachments"][0]["size"] for commit in read_commits(whole)[1:]
    ]
    assert verify(parts, deep=True).problems == []


@pytest.mark.parametrize("recipe", SPELLINGS)
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    cuts=st.lists(st.floats(0, 1), min_size=1, max_size=5),
    seed=st.integers(0, 100),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16]),
)
def test_any_cut_through_blocks_gives_the_same_bytes(recipe, cuts, seed, dtype):
    versions = states_of(3, dtype=dtype, seed=seed)
    whole, parts = MemoryStore(), MemoryStore()
    one = publish_whole(whole, versions, quantise=recipe)
    many = publish_parts(parts, len(cuts) + 1, versions, rows_by(sorted(cuts)), quantise=recipe)
    assert [version.digest for version in many] == [version.digest for version in one]


def test_a_job_with_other_ranks_keeps_the_scales_and_another_recipe_starts_anew():
    versions = states_of(4)
    whole, parts = MemoryStore(), MemoryStore()
    one = publish_whole(whole, versions, quantise="fp8-block")
    many = publish_parts(parts, 2, versions[:2], quantise="fp8-block")
    many += publish_parts(parts, 5, versions[2:3], quantise="fp8-block", attachments=None)
    many += publish_whole(parts, versions[3:], quantise="fp8-block", attachments=None)
    assert [version.digest for version in many] == [version.digest for version in one]
    assert [version.kind for version in many] == ["anchor", "delta", "delta", "delta"]
    fresh = Recipe.parse("fp8-block", sticky=False)
    other = MemoryStore()
    assert publish_parts(parts, 3, versions[:1], quantise=fresh, attachments=None)[0].kind == "delta"
    assert bits_of_versions(parts)[-1] == (publish_whole(other, versions[:1], quantise=fresh), bits_of_versions(other)[-1])[1]
    with pytest.warns(RecipeChanged):
        changed = publish_parts(parts, 3, versions[:1], quantise="int4", attachments=None)
    assert (changed[0].kind, changed[0].recipe.name) == ("anchor", "int4")
    with pytest.warns(RecipeChanged):
        plain = publish_parts(parts, 2, versions[:1], attachments=None)
    assert (plain[0].kind, plain[0].recipe) == ("anchor", None)
    assert bits_of_versions(parts)[-1] == bits_of(versions[0])
    newest = read_commits(parts)[-1]["attachments"][0]
    assert "quantization_config" not in json.loads(parts.get(newest["key"], limit=1 << 20))


def test_ranks_say_once_that_a_recipe_quantises_nothing():
    with pytest.warns(NothingQuantised, match=r"because the pattern 're:\.\*' matches") as caught:
        publish_parts(MemoryStore(), 2, states_of(2), quantise=Recipe.parse("fp8-block", ignore=["re:.*"]))
    assert len(caught) == 1


def test_weights_that_are_not_finite_stop_all_ranks_before_anything_is_published():
    versions = states_of(2)
    versions[1]["model.layers.0.mlp.down_proj.weight"][200, 3] = np.nan
    store = MemoryStore()
    with pytest.raises(NonFiniteWeights, match="down_proj"):
        publish_parts(store, 3, versions, quantise="fp8-block")
    assert len(read_states(store)) == 1
    versions[1] = copied(versions[0])
    versions[1]["model.norm.weight"][69] = np.inf
    with pytest.raises(NonFiniteWeights, match=r"model\.norm"):
        publish_parts(store, 3, versions[1:], quantise="fp8-block")
    assert len(read_states(store)) == 1


def test_a_shard_that_ends_within_a_row_is_refused_by_name():
    def shard(state, rank, size):
        held = {}
        for name, array in state.items():
            cut = array.size // 2 + 1
            elements = array.reshape(-1)
            held[name] = TensorPart(elements[:cut] if rank == 0 else elements[cut:], array.shape, 0 if rank == 0 else cut)
        return held

    with pytest.raises(UnquantisableWeight, match="whole rows"):
        publish_parts(MemoryStore(), 2, states_of(1), shard, quantise="fp8-block")


@pytest.mark.parametrize("recipe", ["fp8-block", "nvfp4"])
def test_ranks_that_hold_the_same_rows_share_the_work(recipe):
    versions = states_of(2)
    whole, parts = MemoryStore(), MemoryStore()
    one = publish_whole(whole, versions, quantise=recipe)
    many = publish_parts(parts, 4, versions, lambda state, rank, size: shards_of(state, rank // 2, size // 2), quantise=recipe)
    assert [version.digest for version in many] == [version.digest for version in one]


def test_experts_in_one_tensor_are_quantised_by_the_ranks_that_hold_them():
    shapes = {"model.layers.0.mlp.experts.gate_up_proj": (6, 64, 32), "model.layers.0.mlp.experts.down_proj": (6, 32, 32)}
    transposed = {name: (shape[0], shape[2], shape[1]) for name, shape in shapes.items()}
    for each in (shapes, transposed):
        random = np.random.default_rng(1)
        versions = [{name: random.standard_normal(shape).astype(np.float32) for name, shape in each.items()} for _ in range(2)]
        whole, parts = MemoryStore(), MemoryStore()
        one = publish_whole(whole, versions, quantise="fp8-block")
        many = publish_parts(parts, 4, versions, quantise="fp8-block")
        assert [version.digest for version in many] == [version.digest for version in one]


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-tensor", "int4"])
def test_ranks_and_segments_do_not_depend_on_how_the_process_treats_subnormal_numbers(recipe):
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers to zero")
    torch.set_flush_denormal(False)
    shapes = {"model.layers.0.self_attn.q_proj.weight": (131, 128), "model.layers.0.self_attn.k_proj.weight": (5, 128)}
    versions = [
        {name: array * np.float32(scale) for name, array in state.items()} for state in states_of(2, shapes) for scale in (1e-34, 1e-37)
    ]
    expected, split, parts = MemoryStore(), MemoryStore(), MemoryStore()
    publish_whole(expected, versions, quantise=recipe)

    def shard(state, rank, size):
        torch.set_flush_denormal(True)  # each rank is a thread
        return rows_by([0.4])(state, rank, size)

    torch.set_flush_denormal(True)
    try:
        publish_whole(split, versions, quantise=recipe, segment_bytes=1)  # a weight and its scales are in different segments
        publish_parts(parts, 2, versions, shard, quantise=recipe)
    finally:
        torch.set_flush_denormal(False)
    assert bits_of_versions(split) == bits_of_versions(expected)
    assert bits_of_versions(parts) == bits_of_versions(expected)
