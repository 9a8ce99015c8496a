"""Real ranks (gloo, `fully_shard`) publish, and plain readers get the full state dict bit for bit."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import free_port
from support import PACKAGE, bits_of

from deltawire import Subscriber
from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.verify import verify
from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import CloseTimeout, StoreUnavailable
from deltawire.publish.closing import Closing
from deltawire.publish.writer_options import WriterOptions
from deltawire.quantise.quantise import quantise_state
from deltawire.store import open_store
from deltawire.store.memory import MemoryStore
from deltawire.testing import Before, FaultyStore, call

pytest.importorskip("torch.distributed.fsdp", reason="needs torch with FSDP2")

HERE = Path(__file__).resolve().parent
LONGEST = 240


@pytest.fixture(scope="module")
def job():
    """Return a function that runs a job of `size` ranks to its end, and returns their exit codes.

    Processes are forked from one that has imported torch.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(PACKAGE), str(HERE)]))
        patch.syspath_prepend(str(HERE))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "fsdp_worker"])
        import fsdp_worker

        def run(size, task):
            port = free_port()
            ranks = [context.Process(target=fsdp_worker.run, args=(rank, size, port, task)) for rank in range(size)]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join(LONGEST)
                rank.kill()
            return [rank.exitcode for rank in ranks]

        yield run


@pytest.fixture
def train(job):
    def run(size, url, out, steps, **more):
        out.mkdir(exist_ok=True)
        codes = job(size, {"url": str(url), "out": str(out), "mesh": [size], "steps": steps, **more})
        assert codes == [0] * size, [path.read_text() for path in out.glob("error-*.txt")]
        return {int(path.stem): dict(np.load(path)) for path in out.glob("*.npz")}

    return run


def compare(url, states):
    """Read every version into memory, and compare it bit for bit."""
    assert states
    with Subscriber(url, options=ReaderOptions(pin=False), threads=1) as subscriber:
        for seq, state in sorted(states.items()):
            subscriber.sync(seq=seq)
            assert subscriber.state.keys() == state.keys()
            for name, array in state.items():
                ours = subscriber.state[name]
                theirs = array.astype(ours.dtype)
                assert ours.shape == theirs.shape
                assert ours.tobytes() == theirs.tobytes(), (seq, name)
    assert verify(open_store(url), deep=True).problems == []


def kinds(url):
    log = ChainLog(open_store(url))
    return [commit.kind for seq in range(100) if (commit := log.read(seq)) is not None]


@pytest.mark.parametrize("size", [2, 4])
def test_a_reader_has_the_full_state_dict_after_every_step(train, tmp_path, size):
    states = train(size, tmp_path / "run", tmp_path / "out", [0, 4])
    assert kinds(tmp_path / "run") == ["fence", "anchor", "delta", "delta", "delta"]
    compare(tmp_path / "run", states)
    events = [json.loads((tmp_path / "out" / f"events-{rank}.json").read_text()) for rank in range(size)]
    sent = [event["bytes"] for rank in events for event in rank if event["event"] == "rank-published" and event["seq"] > 1]
    assert max(sent) < 2 * min(sent)


def test_masters_are_cast_shard_by_shard(train, tmp_path):
    states = train(2, tmp_path / "run", tmp_path / "out", [0, 3], bf16=True)
    assert all(array.dtype == np.float32 for name, array in states[1].items() if name != "steps")
    compare(tmp_path / "run", states)
    with Subscriber(tmp_path / "run", options=ReaderOptions(pin=False)) as subscriber:
        subscriber.sync()
        assert str(subscriber.state["norm.weight"].dtype) == "bfloat16"


def test_ranks_quantise_their_shards_as_one_process_would(train, tmp_path):
    states = train(4, tmp_path / "run", tmp_path / "out", [0, 3], mesh=[2, 2], quantise="fp8-block", background=True)
    before = None
    with Subscriber(tmp_path / "run", options=ReaderOptions(pin=False), threads=1) as subscriber:
        for seq, masters in sorted(states.items()):
            before = quantise_state(masters, "fp8-block", before)
            subscriber.sync(seq=seq)
            assert bits_of(subscriber.state) == bits_of(before)
        assert subscriber.state["blocks.0.0.weight_scale_inv"].shape == (2, 1)


def test_another_number_of_ranks_and_another_wrapping_go_on_with_the_chain(train, tmp_path):
    url = tmp_path / "run"
    states = train(2, url, tmp_path / "first", [0, 2])
    states |= train(4, url, tmp_path / "second", [2, 4], load=str(tmp_path / "first" / f"{max(states)}.npz"), wrapping="whole")
    states |= train(4, url, tmp_path / "third", [4, 5], load=str(tmp_path / "second" / f"{max(states)}.npz"), mesh=[2, 2])
    assert kinds(url) == ["fence", "anchor", "delta", "fence", "delta", "delta", "fence", "delta"]
    compare(url, states)


def test_tensors_may_be_sharded_over_the_mesh_in_any_layout(train, tmp_path):
    states = train(4, tmp_path / "run", tmp_path / "out", [0, 3], mesh="all placements")
    compare(tmp_path / "run", states)


@pytest.mark.parametrize("mesh", [[2], "all placements"])
def test_in_the_background_weights_are_published_as_they_were_at_the_call(train, tmp_path, mesh):
    size = 2 if mesh == [2] else 4
    states = train(size, tmp_path / "run", tmp_path / "out", [0, 3], mesh=mesh, background=True)
    assert len(states) == 3
    compare(tmp_path / "run", states)


def test_a_late_joiner_reads_few_objects_and_has_the_full_state_dict(train, tmp_path):
    url = tmp_path / "run"
    states = train(2, url, tmp_path / "out", [0, 38], anchors=False)
    compare(url, {seq: states[seq] for seq in (5, 17, 33, 38)})
    store = FaultyStore(open_store(url))
    with Subscriber(store, options=ReaderOptions(pin=False), threads=1) as joiner:
        joiner.sync()
        assert {name: array.tobytes() for name, array in joiner.state.items()} == {
            name: array.tobytes() for name, array in states[38].items()
        }
    read = {each.key for each in store.calls if each.op == "read_into" and each.key.startswith("data/")}
    checkpoint = ChainLog(open_store(url)).read(1).files
    assert len(read - {file.key for file in checkpoint}) == 2 * 4  # both ranks' files, for hops over 16, 16, 4 and 1 versions


def test_an_older_version_is_taken_up_by_another_number_of_ranks(train, tmp_path):
    url = tmp_path / "run"
    states = train(2, url, tmp_path / "first", [0, 3])
    older = sorted(states)[1]
    states |= train(4, url, tmp_path / "second", [2, 4], load=str(tmp_path / "first" / f"{older}.npz"), resume_from_seq=older)
    assert kinds(url) == ["fence", "anchor", "delta", "delta", "fence", "rewind", "delta", "delta"]
    compare(url, states)


@pytest.mark.parametrize(("rank", "background"), [(0, False), (1, True)])
def test_a_rank_that_is_killed_in_the_middle_leaves_nothing_behind_and_a_new_job_continues(job, train, tmp_path, rank, background):
    url, out = tmp_path / "run", tmp_path / "out"
    out.mkdir()
    codes = job(2, {"url": str(url), "out": str(out), "mesh": [2], "steps": [0, 3], "die": rank, "background": background})
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] > 0
    assert "PublishError" in (out / f"error-{1 - rank}.txt").read_text()
    before = kinds(url)
    assert set(before) <= {"fence", "anchor"}
    states = {int(path.stem): dict(np.load(path)) for path in out.glob("*.npz")}
    states |= train(2, url, out, [3, 5])
    assert kinds(url)[: len(before)] == before
    compare(url, states)


@pytest.fixture
def alone():
    """Run a job of one rank in this process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("seen", [True, False])
def test_an_error_in_the_background_is_raised_once(seen):
    import torch

    from deltawire.trainers import FSDPPublisher

    weights = {"x": torch.arange(300.0)}
    store = FaultyStore(MemoryStore(), [Before(call("put", "data/"), "unavailable")])
    with FSDPPublisher(store, background=True, options=WriterOptions(threads=1)) as publisher:
        pending = publisher.publish(weights, step=0)
        with pytest.raises(StoreUnavailable):
            pending.result(60) if seen else publisher.publish(weights, step=0)
        assert publisher.publish(weights, step=1).result(60).step == 1
        publisher.publish(weights, step=2)
    assert publisher.version.step == 2


@pytest.mark.usefixtures("alone")
def test_close_says_that_a_part_is_not_published_if_the_store_never_answers():
    import torch

    from deltawire.trainers import FSDPPublisher

    reached, free = threading.Event(), threading.Event()

    class Stuck(MemoryStore):
        def put(self, key, data, **options):
            reached.set()
            assert free.wait(LONGEST)
            super().put(key, data, **options)

    publisher = FSDPPublisher(Stuck(), background=True, options=WriterOptions(threads=1, close_timeout=0.01))
    pending = publisher.publish({"x": torch.arange(300.0, dtype=torch.bfloat16)})
    assert reached.wait(LONGEST)
    thread = publisher._thread
    with pytest.raises(CloseTimeout, match=r"within 0\.01 seconds, so rank 0's part of a version is not published"):
        publisher.close()
    publisher.close()
    with pytest.raises(CloseTimeout):
        pending.result()  # it does not wait for ever
    free.set()
    thread.join(LONGEST)  # its thread ends before the process group does


@pytest.mark.usefixtures("alone")
def test_closing_has_one_time_limit_and_a_flush_may_have_none(monkeypatch):
    """The time in which the version is finished counts, so that little is left for skips and anchors."""
    import torch

    from deltawire.publish import time_limit
    from deltawire.trainers import FSDPPublisher

    now, left = [100.0], []
    monkeypatch.setattr(time_limit, "monotonic", lambda: now[0])
    publisher = FSDPPublisher(MemoryStore(), background=True, options=WriterOptions(threads=1, close_timeout=50.0))
    publisher.publish({"x": torch.arange(300.0, dtype=torch.bfloat16)})
    publisher.flush(math.inf)

    def finish(self, limit=None):
        now[0] += 30.0

    monkeypatch.setattr(FSDPPublisher, "_wait_for_version", finish)
    monkeypatch.setattr(Closing, "end_threads", lambda self, *_: left.append(self.left))
    publisher.close()
    assert left == [20.0]


@pytest.mark.usefixtures("alone")
def test_fused_experts_are_published_as_checkpoints_have_them(tmp_path):
    from safetensors.numpy import load_file
    from tiny_models import moe
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from deltawire.trainers import FSDPPublisher

    model = moe()
    model.save_pretrained(tmp_path)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert any(isinstance(weight, DTensor) for weight in model.parameters())
    store = MemoryStore()
    with FSDPPublisher(store, options=WriterOptions(threads=1)) as publisher:
        publisher.publish(model)
    with Subscriber(store, options=ReaderOptions(pin=False)) as subscriber:
        subscriber.sync()
        expected = load_file(tmp_path / "model.safetensors")
        assert {name: array.tobytes() for name, array in subscriber.state.items()} == {
            name: array.tobytes() for name, array in expected.items()
        }


def test_leaving_by_an_error_publishes_the_version_that_all_ranks_have_begun(tmp_path: Path) -> None:
    """The job has one rank, in this process. Its thread waits at the commit until the body has raised."""
    import torch
    import torch.distributed as dist

    from deltawire.trainers import FSDPPublisher

    gate = threading.Event()

    class Slow(MemoryStore):
        def put_if_absent(self, key: str, data: Any) -> None:
            if key.startswith("commit/") and threading.current_thread().name == "deltawire-fsdp":
                assert gate.wait(60)
            super().put_if_absent(key, data)

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        store, model = Slow(), torch.nn.Linear(4, 3).bfloat16()

        def train() -> None:
            with FSDPPublisher(store, background=True, attachments={}) as publisher:
                publisher.publish(model, step=5)
                threading.Timer(0.05, gate.set).start()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            train()
        with Subscriber(store, options=ReaderOptions(pin=False)) as subscriber:
            assert subscriber.sync().step == 5
    finally:
        dist.destroy_process_group()
