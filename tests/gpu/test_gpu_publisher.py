"""Readers get the bits that a publisher has on a GPU, with copies on the GPU or the host, in the foreground and the background."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
from emulator.build import compiler

import deltawire
from deltawire.codec import using_codec
from deltawire.delta import resolve
from deltawire.delta.resolve import apply_many
from deltawire.dtypes import DTYPES, first_nonfinite
from deltawire.errors import BaseMismatch, CorruptDelta, NonFiniteWeights
from deltawire.publish import baseline, snapshots
from deltawire.publish.baseline import Baseline
from deltawire.quantise import QuantisedLayout
from deltawire.quantise.measure import quantisation_error
from deltawire.quantise.quantise import quantise_state
from deltawire.tensors.finite import count_nonfinite
from deltawire.tensors.gpu_handover import GpuHandover
from deltawire.tensors.torch_types import to_torch, torch_dtype

torch = pytest.importorskip("torch", reason="the GPU codec works on torch tensors")
REAL = torch.cuda.is_available()
if not REAL and compiler() is None:
    pytest.skip("needs an NVIDIA GPU, or a C++ compiler to emulate one", allow_module_level=True)

from emulator.gpu import EmulatedGpu, emulated  # noqa: E402

from deltawire.codec.gpu import find_large_elements, resolution  # noqa: E402
from deltawire.codec.gpu.resolve import resolve_table  # noqa: E402
from deltawire.quantise.gpu.quantiser import GpuQuantiser  # noqa: E402

DEVICE = torch.device("cuda", 0) if REAL else torch.device("cpu")


@pytest.fixture(autouse=True)
def gpu():
    with using_codec("reference"), contextlib.nullcontext() if REAL else emulated(EmulatedGpu()):
        yield


def weights():
    random = torch.Generator().manual_seed(3)
    state = {
        "a": torch.randn(60, 80, generator=random).bfloat16(),
        "b": torch.randn(3000, generator=random),
        "flag": torch.ones((), dtype=torch.bool),
    }
    return {name: tensor.to(DEVICE) for name, tensor in state.items()}


def step(state):
    """Change weights in place, as training does."""
    for tensor in state.values():
        if tensor.is_floating_point():
            tensor.mul_(1 + 1e-3)


def bits(tensor):
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy().copy()


def read(place, expected):
    with deltawire.Subscriber(place) as subscriber:
        subscriber.sync()
        state = subscriber.state
        assert state.keys() == expected.keys()
        for name in expected:
            assert np.array_equal(np.ascontiguousarray(state[name]).reshape(-1).view(np.uint8), expected[name]), name


@pytest.mark.parametrize("snapshot", ["host", "device"])
@pytest.mark.parametrize("background", [False, True])
def test_readers_get_the_weights_of_the_gpu(tmp_path, snapshot, background):
    state = weights()
    with deltawire.Publisher(tmp_path, snapshot=snapshot, background=background) as publisher:
        for version in range(3):
            publisher.publish(state, step=version)
            expected = {name: bits(tensor) for name, tensor in state.items()}
            step(state)  # this changes them immediately, but the version must have the weights from the time of the call
            publisher.flush()
            read(tmp_path, expected)


def test_a_publisher_that_resumes_keeps_its_copy_on_the_gpu(tmp_path):
    state = weights()
    with deltawire.Publisher(tmp_path, snapshot="device") as publisher:
        publisher.publish(state, step=0)
    step(state)
    with deltawire.Publisher(tmp_path, snapshot="device") as publisher:
        version = publisher.publish(state, step=1)
        assert version.kind == "delta"
        step(state)
        publisher.publish(state, step=2)
        assert all(isinstance(array, torch.Tensor) for array in publisher._appender.baseline.arrays.values())
    read(tmp_path, {name: bits(tensor) for name, tensor in state.items()})


@pytest.mark.parametrize("snapshot", ["host", "device"])
@pytest.mark.parametrize("background", [False, True])
def test_master_weights_are_published_rounded(tmp_path, snapshot, background):
    """The weights are float32 on the GPU and in arrays. Tensors of other types are published as they are."""
    state = weights() | {"ids": torch.arange(9, device=DEVICE)}
    state["b"][:3] = torch.tensor([float("inf"), 1 + 2**-8, 1 + 3 * 2**-8])  # the last two are halfway cases
    state["c"] = np.linspace(-1, 1, 70, dtype=np.float32)
    with deltawire.Publisher(tmp_path, snapshot=snapshot, background=background, dtype="bfloat16") as publisher:
        for version in range(3):
            publisher.publish(state, step=version)
            publisher.flush()
            assert publisher.version.kind == ("delta" if version else "anchor")
            rounded = {"b": state["b"].bfloat16(), "c": torch.from_numpy(state["c"]).bfloat16()}
            read(tmp_path, {name: bits(rounded.get(name, tensor)) for name, tensor in state.items()})
            state["b"].mul_(1.02)
            state["c"] = state["c"] * np.float32(1.02)
    with deltawire.Publisher(tmp_path, snapshot=snapshot, dtype="bfloat16") as publisher:  # a publisher that resumes continues with a delta
        assert publisher.publish(state, step=3).kind == "delta"


@pytest.mark.parametrize("masters", [False, True])
def test_weights_of_a_module_are_published_from_the_gpu(tmp_path, masters):
    from deltawire.trainers import WeightSource

    module = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Linear(48, 8)).to(DEVICE, torch.float32 if masters else torch.bfloat16)
    source = WeightSource(module)
    with deltawire.Publisher(tmp_path, snapshot="device", background=True, dtype="bfloat16" if masters else None) as publisher:
        for version in range(3):
            given = source.snapshot()
            assert all(given[name].data_ptr() == parameter.data_ptr() for name, parameter in module.named_parameters())
            source.publish(publisher, step=version)
            expected = {name: bits(parameter.detach().bfloat16()) for name, parameter in module.named_parameters()}
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(1 + 2**-6)
            publisher.flush()
            assert publisher.version.kind == ("delta" if version else "anchor")
            read(tmp_path, expected)
        assert all(isinstance(array, torch.Tensor) for array in publisher._appender.baseline.arrays.values())


@pytest.mark.parametrize("background", [False, True])
def test_weights_that_are_not_finite_are_found_on_the_gpu(tmp_path, background):
    state = weights() | {name: torch.ones(70, device=DEVICE).to(getattr(torch, name)) for name in ("float16", "float64", "float8_e5m2")}
    state["float8_e4m3fn"] = torch.ones(70, device=DEVICE).to(torch.float8_e4m3fn)
    assert count_nonfinite(state) == {}
    state["a"].view(-1)[[3, 900]] = torch.tensor([float("-inf"), float("nan")], device=DEVICE).bfloat16()
    state["b"][7] = float("nan")
    for name, word in {"float16": 0xFC00, "float64": 0x7FF0 << 48, "float8_e5m2": 0xFD, "float8_e4m3fn": 0xFF}.items():
        width = state[name].element_size() * 8
        state[name].view(getattr(torch, f"int{width}"))[9] = word - (1 << width) if word >> (width - 1) else word
    assert count_nonfinite(state) == {"a": 2, "b": 1, "float16": 1, "float64": 1, "float8_e5m2": 1, "float8_e4m3fn": 1}
    publisher = deltawire.Publisher(tmp_path, snapshot="device", background=background, refuse_nonfinite=True)
    with pytest.raises(NonFiniteWeights, match=r"7 weights .* 'a' \(2\)"):
        publisher.publish(state) if not background else publisher.publish(state).result(60)
    publisher.close()


def test_every_nonfinite_bit_pattern_is_found_wherever_it_is():
    """The largest finite numbers are not. Tensors begin anywhere, have any strides, and end anywhere."""
    for dtype in DTYPES:
        limits = first_nonfinite(dtype)
        if limits is None:
            continue
        sign, integer = 1 << (dtype.width - 1), getattr(torch, f"int{dtype.width}")
        largest = [limits[0] - 1, limits[1] - 1]
        nonfinite = [limits[1], limits[1] | ((1 << dtype.exponent_shift) - 1), 2 * sign - 1]
        if limits[0] < sign:  # e8m0 has no sign
            nonfinite += [limits[0], sign - 1]
        finite = torch.tensor([_signed(value, dtype.width) for value in largest], dtype=integer)
        state, expected = {}, {}
        for value in set(nonfinite):
            for size, place in ((1, 0), (37, 36), (70001, 40000)):
                bits = finite.repeat(-(-size // 2))[:size].clone()
                name = f"{dtype.name}.{value}.{size}.{place}"
                state[f"{name}.finite"] = typed(bits.clone(), dtype)
                bits[place] = _signed(value, dtype.width)
                state[name], expected[name] = typed(bits, dtype), 1
        turned = finite.repeat(60).view(30, 4)
        turned[7, 3] = _signed(nonfinite[-1], dtype.width)
        state["turned"], state["shifted"] = typed(turned.t(), dtype), typed(turned.view(-1)[3:], dtype)
        assert count_nonfinite(state) == expected | {"turned": 1, "shifted": 1}
        mixed = {**state, "on the host": np.array([1, np.nan], np.float32)}
        assert count_nonfinite(mixed) == expected | {"turned": 1, "shifted": 1, "on the host": 1}


def typed(bits, dtype):
    return bits.to(DEVICE).view(torch_dtype(dtype))


def _signed(value, width):
    return value - (1 << width) if value >> (width - 1) else value


@pytest.mark.parametrize("bad", [False, True])
def test_one_pass_looks_for_nonfinite_weights_in_all_tensors(bad, monkeypatch):
    """The host waits for the GPU once, or a second time to count. Before, several kernels looked at each tensor."""
    state = {f"{n}": torch.randn(5, n + 1, device=DEVICE).to([torch.float32, torch.bfloat16, torch.float16][n % 3]) for n in range(60)}
    state |= {"ids": torch.arange(9, device=DEVICE), "codes": torch.ones(33, device=DEVICE).to(torch.float8_e4m3fn)}
    if bad:
        state["7"][3, 3] = float("nan")
        state["8"][2, :] = float("-inf")
    events = []
    start = find_large_elements.start_reaching
    monkeypatch.setattr(find_large_elements, "start_reaching", lambda *all: events.append("pass") or start(*all))
    for method in ("cpu", "tolist", "item", "__bool__", "__int__"):
        original = getattr(torch.Tensor, method)
        monkeypatch.setattr(torch.Tensor, method, lambda *all, method=method, original=original: events.append("wait") or original(*all))
    found = count_nonfinite(state)
    monkeypatch.undo()
    assert found == ({"7": 1, "8": 9} if bad else {})
    assert events == ["pass", "wait", *["wait"] * bad]


@pytest.mark.parametrize("recipe", ["fp8-block", "nvfp4", "int4"])
def test_codes_that_are_never_written_are_published_as_the_cpu_publishes_them(tmp_path, recipe, monkeypatch):
    """Every file has the same bytes: deltas of several segments, deltas back and the skips that are made of them.

    The copy of the publisher follows all segments at once: elements of each width are decoded by one call.
    """
    moves, here = [], threading.get_ident()
    move = Baseline.move_by_deltas

    def moved(self, deltas, *arguments):
        moves.append([len(deltas)])
        move(self, deltas, *arguments)

    def resolved(table, *arguments, **how):
        if threading.get_ident() == here:  # another thread makes skips
            moves[-1].append(table.width)
        return resolve_table(table, *arguments, **how)

    monkeypatch.setattr(resolution, "resolve_table", resolved)
    monkeypatch.setattr(Baseline, "move_by_deltas", moved)
    random = torch.Generator().manual_seed(6)
    shapes = {"a.q_proj.weight": (24, 128), "a.k_proj.weight": (8, 128), "b.up_proj.weight": (16, 128), "norm.weight": (128,)}
    state = {name: torch.randn(shape, generator=random).to(DEVICE) for name, shape in shapes.items()}
    options, config = deltawire.WriterOptions(segment_bytes=1500), {"config.json": b"{}"}
    written = []
    start = GpuQuantiser.start

    def watched(*arguments, makes_codes=True, makes_scales=True):
        written.append((makes_codes, makes_scales))
        return start(*arguments, makes_codes=makes_codes, makes_scales=makes_scales)

    monkeypatch.setattr(GpuQuantiser, "start", watched)
    places = tmp_path / "gpu", tmp_path / "cpu"
    with (
        deltawire.Publisher(places[0], "run", quantise=recipe, snapshot="device", attachments=config, options=options) as on_gpu,
        deltawire.Publisher(places[1], "run", quantise=recipe, attachments=config, options=options) as on_cpu,
    ):
        for version in range(6):
            kinds = {chain.publish(weights).kind for chain, weights in ((on_gpu, state), (on_cpu, on_host(state)))}
            assert kinds == {"delta" if version else "anchor"}
            if not version:
                written.clear()
            step(state)
    assert set(written) == {(False, recipe != "nvfp4")}
    assert len(moves) == 10  # of both publishers
    on_gpu = [(segments, widths) for segments, *widths in moves if widths]
    assert len(on_gpu) == 5
    for segments, widths in on_gpu:
        assert segments > 1
        assert len(set(widths)) == len(widths)
    files = [{path.relative_to(place): path.read_bytes() for path in place.glob("data/**/*") if path.is_file()} for place in places]
    assert len(files[0]) > 12
    assert list(places[0].glob("skip/*.json"))
    assert files[0] == files[1]


@pytest.mark.parametrize("snapshot", ["host", "device"])
def test_the_host_waits_once_for_the_copy_of_all_segments(tmp_path, snapshot, monkeypatch):
    waits = []
    synchronize = GpuHandover.synchronize
    move = Baseline.move_by_copy

    def moved(*arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(GpuHandover, "synchronize", lambda self: waits.append(self) or synchronize(self))
            move(*arguments, **options)

    monkeypatch.setattr(Baseline, "move_by_copy", moved)
    state = weights()
    options = deltawire.WriterOptions(segment_bytes=1, skips=False)
    with deltawire.Publisher(tmp_path, snapshot=snapshot, options=options) as publisher:
        for version in range(3):
            publisher.publish(state, step=version)
            read(tmp_path, {name: bits(tensor) for name, tensor in state.items()})
            assert deltawire.state_digest(publisher._appender.baseline.arrays) == publisher.version.digest
            step(state)
        assert publisher.version.kind == "delta"
    assert len(waits) == 2


@pytest.mark.parametrize("least", [1, 1 << 20])
def test_few_bytes_of_deltas_are_applied_at_once(tmp_path, least, monkeypatch):
    """Then decoded changes take little memory, however many there are."""
    sizes = []
    apply = baseline.apply_many
    monkeypatch.setattr(baseline, "_LEAST_APPLIED", least)
    monkeypatch.setattr(
        baseline, "apply_many", lambda pairs, **how: sizes.append([len(delta) for _, delta in pairs]) or apply(pairs, **how)
    )
    state = {f"{name}.up_proj.weight": torch.randn(64, 64).to(DEVICE) for name in "abcd"}
    options = deltawire.WriterOptions(segment_bytes=1500)
    with deltawire.Publisher(
        tmp_path, quantise="fp8-block", snapshot="device", attachments={"config.json": b"{}"}, options=options
    ) as publisher:
        for version in range(3):
            publisher.publish(state, step=version)
            step(state)
        assert publisher.version.kind == "delta"
        arrays, digest = publisher._appender.baseline.arrays, publisher._appender.baseline.digest
        assert deltawire.state_digest(arrays) == digest
    assert [len(batch) for batch in sizes] == ([1] * 8 if least == 1 else [4] * 2)


def test_many_deltas_are_applied_together_or_not_at_all():
    old = [{name: tensor.clone() for name, tensor in weights().items()} for _ in range(3)]
    new = [{name: tensor.clone() for name, tensor in state.items()} for state in old]
    for number, state in enumerate(new):
        state["b"][number : 60 * number + 5] += 1
    new[2]["a"][3, 3:7] = 5
    deltas = [deltawire.encode_delta(one, other) for one, other in zip(old, new, strict=True)]
    for wrong in (0, 2):
        before = [{name: bits(tensor) for name, tensor in state.items()} for state in old]
        for delta, error in ((deltawire.encode_delta(new[0], old[0]), BaseMismatch), (deltas[wrong][:-9], CorruptDelta)):
            pairs = [(state, delta if number == wrong else deltas[number]) for number, state in enumerate(old)]
            with pytest.raises(error):
                apply_many(pairs)
            assert all(np.array_equal(bits(state[name]), was[name]) for state, was in zip(old, before, strict=True) for name in was)
    grown = deltawire.encode_delta(old[1], {**old[1], "more": torch.ones(3, device=DEVICE)})
    with pytest.raises(CorruptDelta, match="adds or removes"):
        apply_many([(old[0], deltas[0]), (old[1], grown)])
    apply_many(list(zip(old, deltas, strict=True)))
    assert all(np.array_equal(bits(state[name]), bits(there[name])) for state, there in zip(old, new, strict=True) for name in there)
    apply_many([])


def test_the_host_plans_each_delta_once(monkeypatch):
    old = [{"a": np.arange(400, dtype=np.float32), "b": np.arange(3000, dtype=np.int16)} for _ in range(3)]
    new = [{name: array.copy() for name, array in state.items()} for state in old]
    for number, state in enumerate(new):
        state["b"][number : 60 * number + 5] += 1
    deltas = [deltawire.encode_delta(one, other) for one, other in zip(old, new, strict=True)]
    planned, plan_delta = [], resolve.plan_delta
    monkeypatch.setattr(resolve, "plan_delta", lambda state, file: planned.append(file) or plan_delta(state, file))
    apply_many(list(zip(old, deltas, strict=True)))
    assert len(planned) == 3
    assert all(state[name].tobytes() == there[name].tobytes() for state, there in zip(old, new, strict=True) for name in there)
    with pytest.raises(BaseMismatch):  # those before it stay applied
        apply_many([(new[0], deltawire.encode_delta(new[0], old[1])), (old[2], deltas[2])])
    assert new[0]["b"].tobytes() == old[1]["b"].tobytes()


def on_host(state):
    return {name: tensor.cpu().numpy().copy() for name, tensor in state.items()}


@pytest.mark.parametrize("to", ["float16", "float32", "float64"])
def test_weights_are_cast_on_the_gpu_to_any_wide_float(tmp_path, to):
    state = weights()
    with deltawire.Publisher(tmp_path, snapshot="device", dtype=to) as publisher:
        for version in range(2):
            publisher.publish(state, step=version)
            read(tmp_path, {name: bits(tensor.to(getattr(torch, to)) if name != "flag" else tensor) for name, tensor in state.items()})
            step(state)
        assert publisher.version.kind == "delta"


@pytest.mark.parametrize("snapshot", ["host", "device"])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("recipe", ["fp8-block", "nvfp4"])
def test_what_is_quantised_on_the_gpu_is_what_the_cpu_makes_of_it(tmp_path, snapshot, background, recipe):
    random = torch.Generator().manual_seed(5)
    shapes = {"a.q_proj.weight": (40, 64), "a.k_proj.weight": (40, 64), "a.v_proj.weight": (8, 64), "norm.weight": (64,)}
    state = {name: torch.randn(shape, generator=random).to(DEVICE) for name, shape in shapes.items()}
    options = deltawire.WriterOptions(segment_bytes=2000)
    previous = None
    for steps in (3, 2):  # the second publisher resumes: its copy is on the host first
        with deltawire.Publisher(
            tmp_path, quantise=recipe, snapshot=snapshot, background=background, attachments={"config.json": b"{}"}, options=options
        ) as publisher:
            for _ in range(steps):
                publisher.publish(state)
                previous = quantise_state({name: tensor.cpu().numpy().copy() for name, tensor in state.items()}, recipe, previous)
                step(state)
                publisher.flush()
                read(tmp_path, {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for name, array in previous.items()})
            state["a.v_proj.weight"][1, 2] = float("nan")
            with pytest.raises(NonFiniteWeights, match="v_proj"):
                publisher.publish(state)
            state["a.v_proj.weight"][1, 2] = 0.5


@pytest.mark.parametrize("wait", [False, True])
def test_plain_states_are_copied_together(wait, monkeypatch):
    monkeypatch.setattr(snapshots, "_copy", lambda *_: pytest.fail("tensors are copied one by one"))
    state = {name: tensor.to(DEVICE) for name, tensor in weights().items()}
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    snapshots.copy_tensors(state, target, wait=wait)
    GpuHandover(target).synchronize()
    assert all(torch.equal(target[name].view(torch.uint8), state[name].view(torch.uint8)) for name in state if state[name].ndim)
    assert target["flag"]


@pytest.mark.parametrize("recipe", ["fp8-tensor", "nvfp4"])
@pytest.mark.parametrize(("snapshot", "background"), [("host", False), ("device", False), ("device", True)])
def test_weights_that_share_a_scale_may_be_on_a_gpu_and_on_the_host(tmp_path, recipe, snapshot, background):
    random = np.random.default_rng(4)
    names = [f"model.layers.0.self_attn.{each}_proj.weight" for each in "kqv"]
    state = {name: random.standard_normal((8, 32)).astype(np.float32) for name in names}
    expected = None
    with deltawire.Publisher(
        tmp_path, snapshot=snapshot, background=background, quantise=recipe, attachments={"config.json": b"{}"}
    ) as chain:
        for factor in (1.0, 1.01, 3.0):
            state = {name: array * np.float32(factor) for name, array in state.items()}
            expected = quantise_state(state, recipe, expected)
            chain.publish(state | {names[1]: torch.from_numpy(state[names[1]]).to(DEVICE)})
            chain.flush()
            read(tmp_path, {name: array.reshape(-1).view(np.uint8) for name, array in expected.items()})


MOVES = {
    "host": lambda name: False,
    "gpu": lambda name: True,
    "q on the GPU": lambda name: "q_proj" in name or "norm" in name,
    "q on the host": lambda name: "q_proj" not in name,
}
"""Which tensors of a state are on the GPU."""


@pytest.mark.parametrize("recipe", [None, "fp8-block", "nvfp4"])
@pytest.mark.parametrize(
    ("codec", "snapshot", "background"),
    [("auto", "host", False), ("auto", "device", False), ("reference", "device", True), ("auto", "host", True)],
)
def test_tensors_may_move_between_host_and_gpu(tmp_path, recipe, codec, snapshot, background):
    """From one version to the next, and from arrays to torch tensors. Versions are those of a model that stays on the host."""
    random = np.random.default_rng(4)
    names = [f"model.layers.0.self_attn.{each}_proj.weight" for each in "kqv"]
    state = {name: random.standard_normal((6, 32)).astype(np.float32) for name in names}
    state["model.norm.weight"] = random.standard_normal(40).astype(np.float32)
    given = {"quantise": recipe, "attachments": {"config.json": b"{}"}, "options": deltawire.WriterOptions(segment_bytes=500)}
    grown = "model.layers.1.mlp.down_proj.weight"
    with (
        using_codec(codec),
        deltawire.Publisher(tmp_path / "moves", snapshot=snapshot, background=background, **given) as moving,
        deltawire.Publisher(tmp_path / "stays", **given) as staying,
    ):
        for version, place in enumerate(["gpu", "host", "q on the GPU", "q on the host", "host", "gpu", "host"]):
            state = {name: array * np.float32(1.01) for name, array in state.items()}
            if version == 4:  # a tensor is added, so this is a full checkpoint
                state[grown] = random.standard_normal((4, 32)).astype(np.float32)
            expected = staying.publish(state)
            moving.publish({name: torch.from_numpy(array).to(DEVICE) if MOVES[place](name) else array for name, array in state.items()})
            moving.flush()
            found = moving.version
            assert (found.kind, found.digest, found.state_bytes) == (expected.kind, expected.digest, expected.state_bytes)


def test_published_tensors_may_be_on_another_device_than_the_weights():
    """This holds for previous tensors, for memory to write into, and for what is measured and dequantised."""
    random = np.random.default_rng(4)
    state = {"a.q_proj.weight": random.standard_normal((6, 32)).astype(np.float32), "norm.weight": np.ones(5, np.float32)}
    layout = QuantisedLayout.of_state("nvfp4", state)
    before = quantise_state(state, "nvfp4")
    grown = {name: array * np.float32(1.3) for name, array in state.items()}
    expected = quantise_state(grown, "nvfp4", before)
    for codec in ("reference", "auto"):
        with using_codec(codec):
            there = {name: to_torch(array.copy()).to(DEVICE) for name, array in before.items()}
            out = {name: torch.zeros_like(tensor) for name, tensor in there.items()}
            made = quantise_state(grown, "nvfp4", there, out=out)
            assert all(made[name] is out[name] for name in out)
            for name, array in expected.items():
                assert np.array_equal(bits(out[name]), array.reshape(-1).view(np.uint8)), name
            assert quantisation_error(layout, grown, out) == quantisation_error(layout, grown, expected)
