"""Ranks publish shards that are on a GPU: they are encoded there, and copies are kept where the publisher was told."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from emulator.build import compiler

import deltawire
from deltawire.codec import using_codec
from deltawire.codec.bits import on_gpu
from deltawire.publish.sharded import ShardedPublisher
from deltawire.publish.shortcuts.cadence import AnchorPolicy
from deltawire.publish.writer_options import WriterOptions
from deltawire.store.memory import MemoryStore
from deltawire.tensors.bits import TensorPart, tensor_bits

torch = pytest.importorskip("torch", reason="the GPU codec works on torch tensors")
REAL = torch.cuda.is_available()
if not REAL and compiler() is None:
    pytest.skip("needs an NVIDIA GPU, or a C++ compiler to emulate one", allow_module_level=True)

from emulator.gpu import EmulatedGpu, emulated  # noqa: E402
from threads_as_ranks import run_ranks  # noqa: E402

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
        cut = len(tensor) // 2 * tensor[0].numel()
        flat = tensor.view(-1)
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


def test_shards_on_a_gpu_are_quantised_to_the_bytes_of_a_whole_model():
    state = {name: tensor.float() for name, tensor in weights().items()}
    whole, parts = MemoryStore(), MemoryStore()
    config = {"config.json": b"{}"}
    with deltawire.Publisher(whole, quantise="fp8-block", attachments=config) as publisher:
        one = publisher.publish({name: tensor.cpu().numpy() for name, tensor in state.items()})

    def work(ranks):
        with ShardedPublisher(ranks, parts, quantise="fp8-block", attachments=config) as publisher:
            return publisher.publish(held_by(state, ranks.rank))

    assert [version.digest for version in run_ranks(SIZE, work)] == [one.digest] * SIZE


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
    "quantised": ({"quantise": "fp8-block"}, (0, 2)),
    "quantised, device": ({"quantise": "fp8-block", "snapshot": "device"}, (0, 2)),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mode", TABLE)
def test_a_rank_holds_as_many_copies_of_its_shard_as_the_table_says(mode, monkeypatch):
    """docs/train.md has the table."""
    from deltawire.publish.sharded import append
    from deltawire.trainers import FSDPPublisher

    given, (on_the_gpu, on_the_host) = TABLE[mode]
    model = {
        "model.layers.0.mlp.down_proj.weight": torch.randn(128, 256, device=DEVICE),
        "model.norm.weight": torch.ones(64, device=DEVICE),
    }
    own = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in model.values()]
    seen = []
    upload = append.upload_update

    def watched(location, baseline, parts, *more, **options):
        kept, sent = copies_in(baseline.parts, own), copies_in(parts, own)
        size = sum(part.nbytes for part in baseline.parts.values())
        seen.append([round((kept[where] + sent[where]) / size, 2) for where in ("gpu", "host")])
        return upload(location, baseline, parts, *more, **options)

    monkeypatch.setattr(append, "upload_update", watched)
    config = {"config.json": b"{}"}
    with FSDPPublisher(MemoryStore(), attachments=config, options=WriterOptions(threads=1), **given) as publisher:
        for _ in range(2):
            publisher.publish(model)
            publisher.flush()
            model["model.norm.weight"].mul_(2)
    assert seen == [[on_the_gpu, on_the_host]]


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
