"""Ranks publish shards that are on a GPU: they are encoded there, and copies are kept where the publisher was told."""

from __future__ import annotations

import contextlib
import math
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from emulator.build import compiler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import deltawire
from deltawire.codec import using_codec
from deltawire.codec.bits import on_gpu
from deltawire.dtypes import dtype_of_numpy
from deltawire.errors import NonFiniteWeights
from deltawire.publish.sharded import ShardedPublisher, agreed_scales
from deltawire.publish.shortcuts.cadence import AnchorPolicy
from deltawire.publish.writer_options import WriterOptions
from deltawire.quantise import Recipe, reference
from deltawire.quantise.recipe import SPELLINGS
from deltawire.quantise.row_shards import GroupShard, RowShard
from deltawire.quantise.scales import Scales, choose_scales
from deltawire.store.memory import MemoryStore
from deltawire.tensors import torch_types
from deltawire.tensors.bits import TensorPart, tensor_bits
from deltawire.tensors.torch_types import to_torch

torch = pytest.importorskip("torch", reason="the GPU codec works on torch tensors")
REAL = torch.cuda.is_available()
if not REAL and compiler() is None:
    pytest.skip("needs an NVIDIA GPU, or a C++ compiler to emulate one", allow_module_level=True)

from emulator.gpu import EmulatedGpu, emulated  # noqa: E402
from threads_as_ranks import run_ranks  # noqa: E402

from deltawire.quantise.gpu.quantiser import GpuQuantiser  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "quantise"))
from sample_weights import DTYPES, KINDS, make_weight  # noqa: E402

DEVICE = torch.device("cuda", 0) if REAL else torch.device("cpu")
SIZE = 2


@pytest.fixture(autouse=True)
def gpu():
    with using_codec("reference"), contextlib.nullcontext() if REAL else emulated(EmulatedGpu()):
        yield


def weights():
    random = torch.Generator().manual_seed(3)
    shapes = {"model.a.weight": (31, 64), "model.b.weight": (7, 128), "model.norm.weight": (90,)}
    state = {name: torch.randn(*shape, generator=random) for name, shape in shapes.items()}
    state["model.a.weight"] = state["model.a.weight"].bfloat16()
    return {name: tensor.to(DEVICE) for name, tensor in state.items()}


def held_by(state, rank):
    """Return half of the rows of each tensor, in its own memory. Edges are not at multiples of 512 bytes."""
    held = {}
    for name, tensor in state.items():
        cut = len(tensor) // 2 * math.prod(tensor.shape[1:])
        flat = tensor.reshape(-1)
        held[name] = TensorPart(flat[:cut] if rank == 0 else flat[cut:], tuple(tensor.shape), 0 if rank == 0 else cut)
    return held


def bits(tensor):
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def check(store, seq, expected, dtypes=None):
    with deltawire.Subscriber(store, options=deltawire.ReaderOptions(pin=False), threads=1) as reader:
        reader.sync(seq=seq)
        assert {name: np.ascontiguousarray(array).tobytes() for name, array in reader.state.items()} == expected


@pytest.mark.parametrize("snapshot", ["host", "device"])
def test_ranks_encode_their_shards_on_the_gpu_and_readers_get_them(snapshot):
    store, state, expected = MemoryStore(), weights(), {}
    barrier_steps = range(6)

    def work(ranks):
        options = WriterOptions(threads=1, anchor_policy=AnchorPolicy(min_versions=3, max_versions=3))
        for part in (barrier_steps[:3], barrier_steps[3:]):  # the second job resumes from the store
            with ShardedPublisher(ranks, store, snapshot=snapshot, options=options, attachments={}) as publisher:
                for _ in part:
                    version = publisher.publish(held_by(state, ranks.rank))
                    kept = publisher._appender.baseline.parts
                    assert all(on_gpu(tensor_bits(name, each.elements).bits) == (snapshot == "device") for name, each in kept.items())
                    ranks.exchange(b"published")
                    if ranks.rank == 0:
                        expected[version.seq] = {name: bits(tensor) for name, tensor in state.items()}
                        for tensor in state.values():
                            tensor[: len(tensor) // 2 + 1].mul_(1 + 1e-2)
                    ranks.exchange(b"trained")

    for answer in run_ranks(SIZE, work):
        if isinstance(answer, BaseException):
            raise answer
    for seq, each in expected.items():
        check(store, seq, each)


@pytest.mark.parametrize(("recipe", "snapshot"), [("fp8-block", "host"), *((recipe, "device") for recipe in SPELLINGS)])
def test_shards_are_quantised_where_they_are_to_the_bytes_of_a_whole_model(recipe, snapshot, monkeypatch):
    """The cut between the ranks goes through a block, and parts of codes begin at edges that the ranks exchange."""
    monkeypatch.setattr(agreed_scales, "HostShardQuantiser", None)  # nothing is quantised on the host
    shapes = {"self_attn.q_proj": (131 if "block" in recipe else 13, 32), "self_attn.k_proj": (5, 32), "mlp.down_proj": (12, 128)}
    random = torch.Generator().manual_seed(5)
    state = {f"model.layers.0.{name}.weight": torch.randn(*shape, generator=random) * 0.02 for name, shape in shapes.items()}
    for name, shape in {"gate_up_proj": (2, 32, 64), "down_proj": (2, 32, 32)}.items():  # the columns of a weight are its second axis
        state[f"model.layers.0.mlp.experts.{name}"] = torch.randn(shape, generator=random)
    state |= {"model.norm.weight": torch.randn(300, generator=random)}
    if recipe in ("int4", "fp8-channel"):
        state = {name: tensor.bfloat16() for name, tensor in state.items()}
    if recipe == "int4-128":
        state = {name: tensor for name, tensor in state.items() if tensor.shape[-1] % 128 == 0 or tensor.dim() == 1}
    versions = [{name: tensor.to(DEVICE) for name, tensor in state.items()}]
    for factor in (1.01, 3.0):
        versions.append({name: tensor.clone() for name, tensor in versions[-1].items()})
        for tensor in versions[-1].values():
            tensor[:: max(1, len(tensor) // 3)].mul_(factor)
    whole, parts = MemoryStore(), MemoryStore()
    given = {"quantise": recipe, "attachments": {"config.json": b"{}"}, "options": WriterOptions(threads=1)}
    with deltawire.Publisher(whole, **given) as publisher:
        expected = [publisher.publish({name: array_of(tensor) for name, tensor in each.items()}) for each in versions]

    def work(ranks):
        found = []
        for part in (versions[:2], versions[2:]):  # the second job reads the scales back from the store
            with ShardedPublisher(ranks, parts, snapshot=snapshot, **given) as publisher:
                found += [publisher.publish(held_by(each, ranks.rank)) for each in part]
                kept = publisher._appender.baseline.parts
                assert {on_gpu(tensor_bits(name, each.elements).bits) for name, each in kept.items()} == {snapshot == "device"}
        return found

    for found in run_ranks(SIZE, work):
        if isinstance(found, BaseException):
            raise found
        assert [version.digest for version in found] == [version.digest for version in expected]
        assert [version.kind for version in found] == ["anchor", "delta", "delta"]
    assert read(parts) == read(whole)


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    cuts=st.lists(st.floats(0, 1), min_size=1, max_size=2).map(sorted),
    seed=st.integers(0, 100),
    spelling=st.sampled_from(SPELLINGS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    snapshot=st.sampled_from(["host", "device"]),
)
def test_any_cut_of_shards_on_a_gpu_gives_the_bytes_of_one_process_on_the_host(cuts, seed, spelling, dtype, snapshot):
    random = torch.Generator().manual_seed(seed)
    shapes = {"self_attn.q_proj": (140, 128), "self_attn.k_proj": (9, 128), "mlp.down_proj": (5, 256)}
    state = {f"model.layers.0.{name}.weight": torch.randn(*shape, generator=random) * 0.02 for name, shape in shapes.items()}
    state["model.norm.weight"] = torch.randn(300, generator=random)
    versions = [{name: tensor.to(DEVICE, dtype) for name, tensor in state.items()}]
    for factors in ([0.3, 1.01], [1.01, 3.0]):
        versions.append({name: tensor.clone() for name, tensor in versions[-1].items()})
        for tensor in versions[-1].values():
            moved = torch.rand(tensor.shape, generator=random) < 0.02
            factor = torch.tensor(factors)[torch.randint(0, 2, tensor.shape, generator=random)]
            tensor.mul_(torch.where(moved, factor, 1.0).to(DEVICE))
    whole, parts = MemoryStore(), MemoryStore()
    given = {"quantise": spelling, "attachments": {"config.json": b"{}"}, "options": WriterOptions(threads=1)}
    with deltawire.Publisher(whole, **given) as publisher:
        expected = [publisher.publish({name: array_of(tensor) for name, tensor in each.items()}).digest for each in versions]

    def held(state, rank):
        found = {}
        for name, tensor in state.items():
            edges = [0, *(int(cut * len(tensor)) for cut in cuts), len(tensor)]
            start, stop = (edge * math.prod(tensor.shape[1:]) for edge in edges[rank : rank + 2])
            found[name] = TensorPart(tensor.reshape(-1)[start:stop], tuple(tensor.shape), start)
        return found

    def work(ranks):
        with ShardedPublisher(ranks, parts, snapshot=snapshot, **given) as publisher:
            return [publisher.publish(held(each, ranks.rank)).digest for each in versions]

    for found in run_ranks(len(cuts) + 1, work):
        if isinstance(found, BaseException):
            raise found
        assert found == expected
    assert read(parts) == read(whole)


def array_of(tensor):
    return tensor.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16) if tensor.dtype == torch.bfloat16 else tensor.cpu().numpy()


def read(store):
    with deltawire.Subscriber(store, options=deltawire.ReaderOptions(pin=False), threads=1) as reader:
        reader.sync()
        return {name: np.ascontiguousarray(array).tobytes() for name, array in reader.state.items()}


@pytest.mark.parametrize(("recipe", "snapshot"), [("nvfp4", "device"), ("mxfp4", "host"), ("int4", "device")])
def test_ranks_choose_the_scales_of_groups_on_the_gpu_except_at_edges(recipe, snapshot, monkeypatch):
    """The first step keeps nearly all scales, and the second one none, not even the global scale of nvfp4."""
    random = torch.Generator().manual_seed(8)
    shapes = {"self_attn.q_proj": (430, 128), "self_attn.k_proj": (3, 128), "mlp.down_proj": (256, 256)}
    versions = [
        {f"model.layers.0.{name}.weight": (torch.randn(*shape, generator=random) * 0.02).to(DEVICE) for name, shape in shapes.items()}
    ]
    for factor in (1.001, 5.0):
        versions.append({name: tensor * factor for name, tensor in versions[-1].items()})
    whole, parts = MemoryStore(), MemoryStore()
    given = {"quantise": recipe, "attachments": {"config.json": b"{}"}, "options": WriterOptions(threads=1)}
    with deltawire.Publisher(whole, **given) as publisher:
        expected = [publisher.publish({name: array_of(tensor) for name, tensor in each.items()}).digest for each in versions]
    on_host, on_gpu = [], []
    choose, choose_groups = agreed_scales.choose_scales, GpuQuantiser.choose_group_scales
    monkeypatch.setattr(agreed_scales, "choose_scales", lambda *all: on_host.append(all[2].size) or choose(*all))
    monkeypatch.setattr(
        GpuQuantiser,
        "choose_group_scales",
        lambda self, recipe, all: on_gpu.append(sum(len(each.shard.rows) for each in all)) or choose_groups(self, recipe, all),
    )

    def work(ranks):
        with ShardedPublisher(ranks, parts, snapshot=snapshot, **given) as publisher:
            return [publisher.publish(held_by_third(each, ranks.rank)).digest for each in versions]

    for found in run_ranks(3, work):
        if isinstance(found, BaseException):
            raise found
        assert found == expected
    assert read(parts) == read(whole)
    scales = sum(rows * columns for rows, columns in shapes.values()) // Recipe.parse(recipe).group_size
    assert sum(on_gpu) > len(versions) * scales / 2
    assert sum(on_gpu) + sum(size for size in on_host if size > 1) <= len(versions) * scales
    assert max(on_host) <= 512
    assert len(on_gpu) == 3 * len(versions)  # all ranks choose some


@pytest.mark.parametrize(("recipe", "snapshot"), [("fp8-block", "device"), ("nvfp4", "host"), ("int4", "device")])
def test_ranks_do_not_write_codes_of_rows_that_begin_where_blocks_and_parts_do(recipe, snapshot, monkeypatch):
    """The deltas back, of which a skip is made, come from codes that are not written, too."""
    random = torch.Generator().manual_seed(4)
    shapes = {"self_attn.q_proj": (256, 64), "mlp.down_proj": (256, 32)}
    versions = [
        {f"model.layers.0.{name}.weight": (torch.randn(*shape, generator=random) * 0.02).to(DEVICE) for name, shape in shapes.items()}
    ]
    versions[0]["model.norm.weight"] = torch.ones(512, device=DEVICE)
    for _ in range(4):
        versions.append({name: tensor * 1.02 for name, tensor in versions[-1].items()})
    whole, parts = MemoryStore(), MemoryStore()
    given = {"quantise": recipe, "attachments": {"config.json": b"{}"}, "options": WriterOptions(threads=1, segment_bytes=4000)}
    with deltawire.Publisher(whole, **given) as publisher:
        expected = [publisher.publish({name: array_of(tensor) for name, tensor in each.items()}).digest for each in versions]

    def work(ranks):
        with ShardedPublisher(ranks, parts, snapshot=snapshot, **given) as publisher:
            found = [publisher.publish(held_by(versions[0], ranks.rank)).digest]
            ranks.exchange(b"published")
            if ranks.rank == 0:
                monkeypatch.setattr(
                    GpuQuantiser, "codes_of", lambda self, recipe, shards, scales: [pytest.fail("codes are written") for _ in shards]
                )
            ranks.exchange(b"watched")
            found += [publisher.publish(held_by(each, ranks.rank)).digest for each in versions[1:]]
            publisher.flush()
            return found

    for found in run_ranks(SIZE, work):
        if isinstance(found, BaseException):
            raise found
        assert found == expected
    assert any(entry.key.startswith("skip/") for entry in parts.list(""))
    assert read(parts) == read(whole)
    with deltawire.Subscriber(parts, options=deltawire.ReaderOptions(pin=False), threads=1) as reader:
        reader.sync(seq=1)
        reader.sync()  # by the skip
        assert reader.version.digest == expected[-1]


PLACES = {
    "host": lambda name, rank: False,
    "GPU": lambda name, rank: True,
    "rank 0 on the GPU": lambda name, rank: rank == 0,
    "rank 1 on the GPU": lambda name, rank: rank == 1,
    "crosswise": lambda name, rank: ("q_proj" in name) == (rank == 0),
}
"""Which tensors a rank holds on the GPU."""


@pytest.mark.parametrize("recipe", [None, "fp8-block", "nvfp4"])
@pytest.mark.parametrize("snapshot", ["host", "device"])
def test_shards_may_move_between_host_and_gpu(recipe, snapshot):
    """From one version to the next, on both ranks or on one of them. Versions are those of a model that stays on the host."""
    random = np.random.default_rng(4)
    shapes = {f"self_attn.{each}_proj": (13, 32) for each in "kqv"} | {"mlp.down_proj": (131, 32)}
    state = {f"model.layers.0.{name}.weight": random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    state["model.norm.weight"] = random.standard_normal(300).astype(np.float32)
    places = ["GPU", "host", "rank 0 on the GPU", "rank 1 on the GPU", "crosswise", "host", "GPU"]
    versions = [state]
    for _ in places[1:]:
        versions.append({name: array * np.float32(1.01) for name, array in versions[-1].items()})
    versions[4] = {name: array.copy() for name, array in versions[3].items()}  # nothing changes, but everything moves
    whole, parts = MemoryStore(), MemoryStore()
    given = {"quantise": recipe, "attachments": {"config.json": b"{}"}, "options": WriterOptions(threads=1, segment_bytes=4000)}
    with deltawire.Publisher(whole, **given) as publisher:
        expected = [publisher.publish(each).digest for each in versions]

    def work(ranks):
        found = []
        for job in (range(5), range(5, len(places))):  # copies of the second job are on the host first
            with ShardedPublisher(ranks, parts, snapshot=snapshot, **given) as publisher:
                for number in job:
                    held = held_by(versions[number], ranks.rank)
                    for name, part in held.items():
                        if PLACES[places[number]](name, ranks.rank):
                            held[name] = TensorPart(to_torch(part.elements.copy()).to(DEVICE), part.shape, part.start)
                    found.append(publisher.publish(held).digest)
                publisher.flush()
        return found

    with using_codec("auto"):
        answers = run_ranks(SIZE, work)
    for found in answers:
        if isinstance(found, BaseException):
            raise found
        assert found == expected
    assert read(parts) == read(whole)


def held_by_third(state, rank):
    """Return some rows of each tensor. The edges of scales are not at multiples of 512 bytes."""
    held = {}
    for name, tensor in state.items():
        cuts = [0, len(tensor) // 3 * tensor[0].numel(), len(tensor) * 3 // 4 * tensor[0].numel(), tensor.numel()]
        held[name] = TensorPart(tensor.view(-1)[cuts[rank] : cuts[rank + 1]], tuple(tensor.shape), cuts[rank])
    return held


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spelling", ["nvfp4", "mxfp4", "int4", "int4-128"])
def test_scales_of_groups_are_those_of_the_reference(spelling, dtype):
    recipe = Recipe.parse(spelling)
    kinds = [make_weight(kind, (40, 256), dtype) for kind in KINDS]
    source = dtype_of_numpy(kinds[0].dtype)
    quantiser = GpuQuantiser(DEVICE)
    shards = [RowShard(kind, source, to_torch(weight.copy()).to(DEVICE), 0) for kind, weight in zip(KINDS, kinds, strict=True)]
    maxima = [reference.block_maxima(recipe, weight) for weight in kinds]
    np.testing.assert_array_equal(quantiser.largest_of(recipe, shards), [grid.max() for grid in maxima])
    before = [choose_scales(recipe, source, grid * np.float32(0.7)) for grid in maxima]
    jobs, expected = [], []
    for shard, grid, old in zip(shards, maxima, before, strict=True):
        for previous in (old, None):
            chosen = choose_scales(recipe, source, grid, previous)
            stays = previous is not None and (chosen.global_scale is None or chosen.global_scale == previous.global_scale)
            kept = to_torch(previous.scale.reshape(-1)[9:60].copy()).to(DEVICE) if stays else None
            memory = torch.empty(51, dtype=to_torch(old.scale.copy()).dtype, device=DEVICE)
            number = 1.0 if chosen.global_scale is None else float(chosen.global_scale[0])
            jobs.append(GroupShard(shard.groups(recipe, 9, 60), memory, kept, number))
            expected.append(chosen.scale.reshape(-1)[9:60])
    quantiser.choose_group_scales(recipe, jobs)
    for job, scale in zip(jobs, expected, strict=True):
        assert job.scales.cpu().view(torch.uint8).numpy().tobytes() == scale.tobytes(), job.shard.name
    jobs[0].shard.rows.view(-1)[5] = float("inf")
    for refused in (lambda: quantiser.choose_group_scales(recipe, jobs), lambda: quantiser.largest_of(recipe, shards)):
        with pytest.raises(NonFiniteWeights, match=f"'{KINDS[0]}' cannot be quantised: 1 element"):
            refused()


@pytest.mark.parametrize(
    ("value", "recipe"), [(float("nan"), "fp8-block"), (float("inf"), "fp8-block"), (float("-inf"), "nvfp4"), (float("nan"), "int4")]
)
def test_a_shard_that_is_not_finite_stops_all_ranks(value, recipe):
    state = {"model.layers.0.mlp.down_proj.weight": torch.ones(140, 64), "model.norm.weight": torch.ones(300)}
    state = {name: tensor.to(DEVICE) for name, tensor in state.items()}
    store = MemoryStore()

    def work(ranks):
        with ShardedPublisher(ranks, store, quantise=recipe, attachments={"config.json": b"{}"}) as publisher:
            publisher.publish(held_by(state, ranks.rank))
            for name, tensor in state.items():
                ranks.exchange(b"published")
                if ranks.rank == 0:
                    tensor.view(-1)[-1] = value
                ranks.exchange(b"trained")
                with pytest.raises(NonFiniteWeights, match=name.replace(".", r"\.")):
                    publisher.publish(held_by(state, ranks.rank))
                ranks.exchange(b"refused")
                if ranks.rank == 0:
                    tensor.view(-1)[-1] = 1
            return publisher.version.seq

    assert run_ranks(SIZE, work) == [1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rows_of_a_weight_have_the_maxima_and_codes_of_the_reference(spelling, dtype):
    recipe = Recipe.parse(spelling)
    weight = make_weight("plain", (300, 136 if recipe.group_size is None else 256), dtype)
    source = dtype_of_numpy(weight.dtype)
    whole = choose_scales(recipe, source, reference.block_maxima(recipe, weight))
    shards, scales = [], []
    for start, stop in [(0, 300), (100, 130), (127, 129), (128, 256), (299, 300)]:
        first, last = recipe.block.rows_of_grid(start, stop)
        scales.append(Scales(whole.scale[first:last] if recipe.name != "fp8-tensor" else whole.scale, whole.global_scale))
        shards.append(RowShard("a", source, to_torch(weight[start:stop].copy()).to(DEVICE), start))
    quantiser = GpuQuantiser(DEVICE)
    maxima, codes = quantiser.maxima_of(recipe, shards), quantiser.codes_of(recipe, shards, scales)
    for shard, grid, found, own in zip(shards, maxima, codes, scales, strict=True):
        rows = weight[shard.first_row : shard.first_row + len(shard.rows)]
        np.testing.assert_array_equal(grid, reference.block_maxima(recipe, rows, shard.first_row))
        expected = reference.encode_codes(recipe, rows, own, shard.first_row)
        assert found.cpu().reshape(-1).view(torch.uint8).numpy().tobytes() == expected.tobytes()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Make this process the only rank of a job."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('ranks') / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def copies_in(parts, own):
    """Return the bytes of parts on the GPU and on the host, without those that are memory of the model itself."""
    found = {"gpu": 0, "host": 0}
    for name, part in parts.items():
        tensor = tensor_bits(name, part.elements)
        if tensor.size and not any(start <= tensor.address < stop for start, stop in own):
            found["gpu" if on_gpu(tensor.bits) else "host"] += tensor.nbytes
    return found


TABLE = {  # mode: copies of a shard while a version is published (baseline, and what is published), on the GPU and on the host
    "foreground, host": ({}, (0, 1)),
    "foreground, device": ({"snapshot": "device"}, (1, 0)),
    "foreground, cast, host": ({"dtype": torch.bfloat16}, (0, 2)),
    "foreground, cast, device": ({"dtype": torch.bfloat16, "snapshot": "device"}, (2, 0)),
    "background, host": ({"background": True}, (0, 2)),
    "background, device": ({"background": True, "snapshot": "device"}, (2, 0)),
    "quantised": ({"quantise": "fp8-block"}, (0, 1)),
    "quantised, device": ({"quantise": "fp8-block", "snapshot": "device"}, (1, 0)),
    "quantised, nvfp4": ({"quantise": "nvfp4"}, (0, 1)),
    "quantised, nvfp4, device": ({"quantise": "nvfp4", "snapshot": "device"}, (1, 0)),
    "shards on the host": ({}, (0, 1)),
    "shards on the host, cast": ({"dtype": torch.bfloat16}, (0, 2)),
    "shards on the host, background": ({"background": True}, (0, 2)),
    "shards on the host, quantised": ({"quantise": "fp8-block"}, (0, 1)),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mode", TABLE)
def test_a_rank_holds_as_many_copies_of_its_shard_as_the_table_says(mode, monkeypatch):
    """docs/train.md has the table."""
    from deltawire.publish.sharded import append
    from deltawire.trainers import FSDPPublisher

    given, (on_the_gpu, on_the_host) = TABLE[mode]
    is_on_host = mode.startswith("shards on the host")
    device = torch.device("cpu") if is_on_host else DEVICE
    if is_on_host and not REAL:  # otherwise all tensors count as tensors on the emulated GPU
        monkeypatch.setattr(torch_types, "gpu_of", lambda tensor: None)
    model = {
        "model.layers.0.mlp.down_proj.weight": torch.randn(128, 256, device=device),
        "model.norm.weight": torch.ones(64, device=device),
    }
    own = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in model.values()]
    seen = []
    upload = append.upload_update
    made, raw = [], []

    def watched(location, baseline, parts, *more, segments_of, **options):
        kept, sent = copies_in(baseline.parts, own), copies_in(parts, own)
        size = sum(part.nbytes for part in baseline.parts.values())
        seen.append([round((kept[where] + sent[where]) / size, 2) for where in ("gpu", "host")])

        def segments(indices):
            found = segments_of(indices)
            made.append(copies_in(found, own))
            assert sum(part.nbytes for part in found.values()) == sum(baseline.segments[index].raw for index in indices)
            raw.extend(baseline.segments[index].raw for index in indices)
            return found

        return upload(location, baseline, parts, *more, segments_of=segments_of and segments, **options)

    monkeypatch.setattr(append, "upload_update", watched)
    config = {"config.json": b"{}"}
    with FSDPPublisher(MemoryStore(), attachments=config, options=WriterOptions(threads=1, segment_bytes=1024), **given) as publisher:
        for _ in range(2):
            publisher.publish(model)
            publisher.flush()
            model["model.norm.weight"].mul_(2)
    assert seen == [[on_the_gpu, on_the_host]]
    if "quantise" in given and is_on_host:  # codes are written, one segment after the other
        assert len(made) == len(raw) > 1
        assert [each["host"] for each in made] == raw
    elif "quantise" in given:  # scales, and the norm in bfloat16, are made on the GPU; codes are not written
        segments, scales = {"fp8-block": (2, 2 * 4), "nvfp4": (3, 128 * 256 // 16 + 4)}[given["quantise"]]
        assert len(made) == (1 if "snapshot" in given else segments)
        assert sum(each["gpu"] for each in made) == scales + 64 * 2
        assert {each["host"] for each in made} == {0}


@pytest.mark.usefixtures("alone")
def test_empty_messages_reach_other_ranks():
    from deltawire.trainers.fsdp import TorchRanks

    for ranks in (TorchRanks(), TorchRanks().another_channel()):
        assert (ranks.broadcast(b""), ranks.exchange(b""), [bytes(piece) for piece in ranks.deliver([b""])]) == (b"", [b""], [b""])
        assert ranks.maximum(np.empty(0, np.int32)).size == 0
        assert (ranks.broadcast(b"a"), ranks.exchange(b"b")) == (b"a", [b"b"])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("snapshot", "expected"), [("host", [0, 1]), ("device", [1, 0])])
def test_in_the_background_a_copy_of_the_masters_is_quantised(snapshot, expected, monkeypatch):
    from deltawire.publish.sharded import quantised_parts
    from deltawire.trainers import FSDPPublisher

    masters = {"model.layers.0.mlp.down_proj.weight": torch.ones(128, 256, device=DEVICE)}
    [(start, size)] = [(tensor.data_ptr(), tensor.nbytes) for tensor in masters.values()]
    seen = []
    quantise = quantised_parts.QuantisedParts.quantise

    def watched(self, held, *more):
        found = copies_in(held, [(start, start + size)])
        seen.append([found["gpu"] / size, found["host"] / size])
        return quantise(self, held, *more)

    monkeypatch.setattr(quantised_parts.QuantisedParts, "quantise", watched)
    for background in (False, True):
        with FSDPPublisher(
            MemoryStore(), attachments={"config.json": b"{}"}, quantise="fp8-block", background=background, snapshot=snapshot
        ) as publisher:
            publisher.publish(masters)
    assert seen == [[0, 0], expected]
