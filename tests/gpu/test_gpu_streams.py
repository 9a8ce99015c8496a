"""Work during training, or while an engine generates, does not use their streams, and is in order with the work on them.

The tests use an emulated GPU, which records the work of each stream and what it waits for. The last test needs a real GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading

import numpy as np
import pytest
from emulator.build import compiler

import deltawire
from deltawire.chain.reader_options import ReaderOptions
from deltawire.codec import using_codec
from deltawire.engines import HotSwap, ModuleEngine
from deltawire.format.records.record_parts import CommitRef
from deltawire.publish.background import BackgroundQueue
from deltawire.publish.baseline import Baseline
from deltawire.publish.publication import Publication
from deltawire.publish.snapshots import SnapshotMemory
from deltawire.publish.upload.segments import TensorTable

torch = pytest.importorskip("torch", reason="the GPU codec works on torch tensors")
REAL = torch.cuda.is_available()
if not REAL and compiler() is None:
    pytest.skip("needs an NVIDIA GPU, or a C++ compiler to emulate one", allow_module_level=True)

from emulator.gpu import EmulatedGpu, Event, Stream, emulated  # noqa: E402

emulates = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler to emulate a GPU")


class KnowingStream(Stream):
    """A stream that records the streams and events that it waits for, and when a thread waits for it."""

    def __init__(self):
        self.waited_for = []
        self.on_synchronize = lambda: None

    def wait_stream(self, other):
        self.waited_for.append(other)

    def wait_event(self, event):
        self.waited_for.append(event)

    def synchronize(self):
        self.on_synchronize()


class StreamingGpu(EmulatedGpu):
    """A GPU that records the stream of each thread, and the threads that have used the default stream."""

    def __init__(self):
        super().__init__()
        self.default = KnowingStream()
        self.streams = {}
        self.own = threading.local()
        self.on_default = set()
        self.finished = 0

    def stream(self, purpose):
        return self.streams.setdefault(purpose, KnowingStream())

    def current(self):
        found = getattr(self.own, "stream", self.default)
        if found is self.default:
            self.on_default.add(threading.current_thread().name)
        return found

    @contextlib.contextmanager
    def using(self, stream):
        before, self.own.stream = getattr(self.own, "stream", self.default), stream
        yield
        self.own.stream = before

    def synchronize(self):
        self.finished += 1


@pytest.fixture
def gpu():
    with using_codec("reference"), emulated(StreamingGpu()) as gpu:
        yield gpu


def bits(size, seed=1):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 2**15, size, np.int16))


def ref(seq, state):
    return CommitRef(seq, f"{seq:064x}", deltawire.state_digest(state))


@emulates
def test_a_background_publisher_does_not_use_the_stream_of_training(tmp_path, gpu, monkeypatch):
    """This also holds when it makes skips and anchors of published versions, and for the threads that upload them."""

    def watched(operation):
        return lambda *arguments, **options: (gpu.current(), operation(*arguments, **options))[1]

    for name in ("clone", "copy_", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, watched(getattr(torch.Tensor, name)))
    events, state = [], {"v": bits(700), "w": bits(3000)}
    policy = deltawire.AnchorPolicy(min_versions=2, max_versions=2)
    with deltawire.Publisher(
        tmp_path,
        background=True,
        snapshot="device",
        options=deltawire.WriterOptions(anchor_policy=policy, shard_bytes=2000),
        on_event=lambda event: events.append(event.name),
    ) as publisher:
        for _ in range(6):
            publisher.publish(state)
            publisher.flush(60)
            state["w"][::10] += 1
    assert {"skip-made", "anchored"} <= set(events)
    assert gpu.on_default == {threading.current_thread().name}
    with deltawire.Subscriber(tmp_path) as subscriber:
        subscriber.sync()
        state["w"][::10] -= 1
        assert np.array_equal(subscriber.state["w"], state["w"].numpy())


@emulates
def test_a_held_version_is_copied_before_it_can_change(gpu, monkeypatch):
    """The device copies later. The next owner of the lock may give the memory to another stream, which does not wait."""
    late, started = [], []
    gpu.stream("background").on_synchronize = lambda: [late.pop(0)() for _ in tuple(late)]

    def clone(tensor):
        copy = torch.zeros_like(tensor)
        late.append(lambda: copy.copy_(tensor))
        started.append(copy)
        return copy

    state = {"w": bits(3000)}
    before = state["w"].numpy().copy()
    baseline = Baseline(state, ref(0, state), deltawire.state_digest(state))
    baseline.hold()

    class Lock:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            if started:
                state["w"].fill_(7)

    baseline._lock = Lock()
    monkeypatch.setattr(torch.Tensor, "clone", clone)
    assert np.array_equal(baseline.segment_at(0, 0)["w"].numpy(), before)


@emulates
def test_a_copy_into_the_memory_of_a_superseded_one_starts_after_it(gpu, monkeypatch):
    """This holds even if they are on different streams. Otherwise the newer version would contain the older state."""
    begun, may_end, marks = threading.Event(), threading.Event(), []

    def mark():
        marks.append((gpu.current(), Event()))
        return marks[-1][1]

    def write(publication):
        begun.set()
        assert may_end.wait(60)

    monkeypatch.setattr(gpu, "mark", mark)
    publisher = BackgroundQueue(write, lambda: None, SnapshotMemory("device", keeps_spare=True))
    state, streams = {"w": bits(100)}, [KnowingStream() for _ in range(3)]
    try:
        for stream in streams:
            with gpu.using(stream):
                publisher.submit(Publication(state, TensorTable.of(state), None, {}, None))
            assert begun.wait(60)
    finally:
        may_end.set()
        publisher.close()
    (copied,) = (event for stream, event in marks if stream is streams[1])
    assert streams[2].waited_for == [copied]


@emulates
def test_an_engine_generates_while_an_update_is_decoded(tmp_path, gpu):
    """Its stream waits for nothing before the pause. In the pause, all streams that it has used are done."""

    class Engine(ModuleEngine):
        def pause(self, kv_cache):
            waits.append(len(gpu.default.waited_for) - seen)
            before = gpu.finished
            super().pause(kv_cache)
            assert gpu.finished == before + 1

    trainer, served = (torch.nn.Linear(40, 50, dtype=torch.bfloat16) for _ in range(2))
    waits = []
    with (
        deltawire.Publisher(tmp_path, snapshot="device") as publisher,
        contextlib.closing(HotSwap(tmp_path, Engine(served), options=ReaderOptions(pin=False))) as swap,
    ):
        for _ in range(3):
            publisher.publish(trainer.state_dict())
            seen = len(gpu.default.waited_for)
            swap.sync()
            assert torch.equal(trainer.weight, served.weight)
            with torch.no_grad():
                trainer.weight[::3] += 1
    assert waits == [0, 0, 0]


class HeldUp:
    """Work that blocks the default stream until `release` is called or a minute has passed, as a long training step would."""

    SOURCE = 'extern "C" __global__ void spin(volatile int *flag) { while (!*flag) __nanosleep(10000); }'

    def __init__(self):
        from deltawire.codec.gpu import compiler

        major, minor = torch.cuda.get_device_capability()
        cubin = compiler._compile(compiler._nvrtc(), self.SOURCE, [f"--gpu-architecture=sm_{major}{minor}"])
        driver, module, spin = compiler._driver(), ctypes.c_void_p(), ctypes.c_void_p()
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._end = torch.cuda.Event()
        torch.cuda.synchronize()
        compiler._check(driver.cuModuleLoadData(ctypes.byref(module), cubin))
        compiler._check(driver.cuModuleGetFunction(ctypes.byref(spin), module, b"spin"))
        address = ctypes.c_void_p(self._flag.data_ptr())
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(address))
        stream = ctypes.c_void_p(torch.cuda.default_stream().cuda_stream)
        compiler._check(driver.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, arguments, None))
        self._end.record(torch.cuda.default_stream())
        self._timer = threading.Timer(60, self._flag.fill_, [1])
        self._timer.start()

    def is_held_up(self):
        return not self._end.query()

    def release(self):
        self._timer.cancel()
        self._flag.fill_(1)
        self._end.synchronize()


@pytest.mark.skipif(not REAL, reason="needs an NVIDIA GPU")
def test_versions_and_anchors_are_published_while_the_stream_of_training_is_busy(tmp_path):
    """The test publishes from another stream, because threads use the default stream by default, which is busy here."""
    anchors, stream = threading.Semaphore(0), torch.cuda.Stream()
    state = {"w": bits(1 << 22).cuda()}
    policy = deltawire.AnchorPolicy(min_versions=1, max_versions=1)
    with deltawire.Publisher(
        tmp_path,
        background=True,
        snapshot="device",
        options=deltawire.WriterOptions(anchor_policy=policy),
        on_event=lambda event: anchors.release() if event.name == "anchored" else None,
    ) as publisher:
        for version in range(6):
            state["w"][::10] += 1
            torch.cuda.synchronize()
            held = HeldUp() if version == 5 else None  # earlier versions allocate memory and load kernels, and all streams wait for that
            with torch.cuda.stream(stream):
                publisher.publish(state)
            publisher.flush(60)
            if version:
                assert anchors.acquire(timeout=60)
            if held is not None:
                was_held_up = held.is_held_up()
                held.release()
                assert was_held_up, "the publisher waited for the stream of training"
