"""Quantising on a GPU gives the bytes of the reference. Machines without an NVIDIA GPU run the same kernels on an emulated one."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from emulator.build import compiler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltawire.codec import using_codec
from deltawire.codec.base import EncodeGroup
from deltawire.codec.bits import DeviceBits
from deltawire.delta.encode import encode_many
from deltawire.dtypes import payload_type
from deltawire.errors import NonFiniteWeights
from deltawire.publish.publication import Publication
from deltawire.publish.quantising import Quantising, quantise_segments
from deltawire.quantise import QuantisedLayout, Recipe
from deltawire.quantise.quantise import quantise_outputs, quantise_state, quantise_to_encode
from deltawire.quantise.recipe import SPELLINGS
from deltawire.tensors.bits import UnwrittenTensor
from deltawire.tensors.columns import in_columns
from deltawire.tensors.unwritten_state import UnwrittenState

torch = pytest.importorskip("torch", reason="weights on a GPU are torch tensors")
REAL = torch.cuda.is_available()
if not REAL and compiler() is None:
    pytest.skip("needs an NVIDIA GPU, or a C++ compiler to emulate one", allow_module_level=True)

from emulator.gpu import EmulatedGpu, emulated  # noqa: E402

from deltawire.codec.gpu.codec import GpuCodec  # noqa: E402
from deltawire.tensors.torch_types import to_torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "quantise"))
from sample_weights import DTYPES, KINDS, MOVES, make_weight, walk  # noqa: E402

DEVICE = torch.device("cuda", 0) if REAL else torch.device("cpu")
GROUPED = ("nvfp4", "mxfp4", "int4", "int4-128")


@pytest.fixture
def on_gpu():
    return contextlib.nullcontext if REAL else lambda: emulated(EmulatedGpu())


def to_gpu(state):
    return {name: to_torch(array.copy()).to(DEVICE) for name, array in state.items()}


def check(found, expected) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        bits = found[name].cpu().contiguous().view(torch.uint8).numpy() if found[name].dim() else found[name].cpu().numpy()
        assert tuple(found[name].shape) == array.shape, name
        np.testing.assert_array_equal(bits.reshape(-1), np.ascontiguousarray(array).view(np.uint8).reshape(-1), err_msg=name)
        assert found[name].device == DEVICE


def expected_of(state, spelling, previous=None):
    with using_codec("reference"):
        return quantise_state(state, spelling, previous)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_kind_of_weight(spelling: str, on_gpu) -> None:
    for dtype in DTYPES:
        shape = (9, 256) if spelling in GROUPED else (130 if "block" in spelling else 9, 133 if dtype == "float16" else 136)
        state = {f"{kind.replace(' ', '_')}.weight": make_weight(kind, shape, dtype) for kind in KINDS}
        fresh = expected_of(state, spelling)
        # The scales of the weight before it: some are too wide, some too narrow, some stay.
        names = list(state)
        previous = {}
        for before, name in zip([*names[1:], names[0]], names, strict=True):
            previous |= {key.replace(before, name): value for key, value in fresh.items() if key.startswith(before)}
        with on_gpu():
            check(quantise_state(to_gpu(state), spelling), fresh)
        sticky = expected_of(state, spelling, previous)
        with on_gpu():
            check(quantise_state(to_gpu(state), spelling, to_gpu(previous)), sticky)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_whole_states(spelling: str, on_gpu) -> None:
    """Fused weights that share a scale, experts, rows with gaps, tensors that stay, parts of a group, and memory of the caller."""
    rng = np.random.default_rng(3)
    shapes = {"q_proj.weight": (32, 256), "k_proj.weight": (8, 256), "norm.weight": (256,)}
    shapes |= {"experts.gate_up_proj": (2, 256, 128), "experts.down_proj": (2, 128, 128)}
    state = {f"model.layers.0.{name}": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    state = {name: array.astype(ml_dtypes.bfloat16) if "experts" in name else array for name, array in state.items()}
    previous = None
    for step in range(3):
        state["model.layers.0.k_proj.weight"] *= np.float32([1, 1.01, 5][step])
        expected = expected_of(state, spelling, previous)
        with on_gpu():
            weights = to_gpu(state)
            gaps = torch.zeros(32, 260, device=DEVICE)
            gaps[:, :256] = weights["model.layers.0.q_proj.weight"]
            weights["model.layers.0.q_proj.weight"] = gaps[:, :256]
            out = to_gpu({name: np.zeros_like(array) for name, array in expected.items() if "q_proj" in name})
            found = quantise_state(weights, spelling, previous and to_gpu(previous), out=out)
            check(found, expected)
            assert all(found[name] is tensor for name, tensor in out.items())
            names = [name for name in expected if "k_proj" in name]
            layout = QuantisedLayout.of_state(spelling, weights)
            check(layout.quantise(names, weights, previous and to_gpu(previous)), {name: expected[name] for name in names})
        previous = expected
    # A tiny global scale of zeros does not stay.
    if spelling == "nvfp4":
        zeros = {"a.weight": np.zeros((1, 16), np.float32)}
        tiny = expected_of(zeros, spelling) | {"a.weight_global_scale": np.full(1, 2.0**-120, np.float32)}
        with on_gpu():
            check(quantise_state(to_gpu(zeros), spelling, to_gpu(tiny)), expected_of(zeros, spelling))
    # The previous scales of a group differ, so its scale is fresh.
    if spelling in ("nvfp4", "fp8-tensor"):
        name = "model.layers.0.q_proj.weight_global_scale" if spelling == "nvfp4" else "model.layers.0.q_proj.weight_scale"
        previous = previous | {name: previous[name] * np.float32(1.5)}
        expected = expected_of(state, spelling, previous)
        with on_gpu():
            check(quantise_state(to_gpu(state), spelling, to_gpu(previous)), expected)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    spelling=st.sampled_from(SPELLINGS),
    dtype=st.sampled_from(sorted(DTYPES)),
    rows=st.integers(1, 140),
    groups=st.integers(1, 9),
    moves=st.lists(st.tuples(st.sampled_from(MOVES), st.floats(1, 6)), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_any_steps_give_the_bytes_of_the_reference(spelling: str, dtype: str, rows: int, groups: int, moves, seed: int, on_gpu) -> None:
    """From one version to the next, codes and scales are those of the reference, and so is the delta between them."""
    width = Recipe.parse(spelling).group_size
    columns = groups * width if width else 16 * groups - seed % 3
    previous = None
    for weight in walk((rows, columns), dtype, moves, seed):
        state = {"a.weight": weight}
        expected = expected_of(state, spelling, previous)
        with on_gpu():
            found = quantise_state(to_gpu(state), spelling, previous and to_gpu(previous))
            check(found, expected)
            if previous is not None:
                with using_codec("reference"):
                    delta = encode_many([(previous, expected)])
                assert encode_many([(to_gpu(previous), found)]) == delta
        previous = expected


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_weights_that_are_not_finite_are_refused(spelling: str, on_gpu) -> None:
    for dtype, value in zip(DTYPES, (np.nan, np.inf, -np.inf), strict=True):
        state = {"a.weight": make_weight("plain", (6, 128), dtype), "b.weight": make_weight("plain", (6, 128), dtype)}
        state["b.weight"][5, 127] = value
        with on_gpu(), pytest.raises(NonFiniteWeights, match=r"'b.weight' cannot be quantised: 1 element is"):
            quantise_state(to_gpu(state), spelling)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_weights_are_quantised_as_they_are_encoded(spelling: str, on_gpu) -> None:
    """Kernels that read weights find the same changes as those that read the codes and scales. So do chunks that are not coded.

    Scales of one byte are not written either, whether all of them change, some, or none.
    """
    recipe = Recipe.parse(spelling)
    shape = (66, 256) if spelling in GROUPED else (130, 136)
    rng = np.random.default_rng(7)
    for dtype in DTYPES:
        old = (rng.standard_normal(shape) * 0.02).astype(DTYPES[dtype])
        some = (rng.random(shape) < 0.02) & (np.arange(shape[0])[:, None] < 30)
        near = (old.astype(np.float32) * np.where(some, 1.2, 1.0)).astype(DTYPES[dtype])
        near[5, :32] = np.float32(0.0001)  # the scale becomes smaller
        every_code = (rng.integers(0, 127, shape) | rng.choice([0, 128], shape)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
        far = (every_code.astype(np.float32) * 2.0**-12).astype(DTYPES[dtype])
        with on_gpu():
            layout = QuantisedLayout.of_state(recipe, to_gpu({"a.weight": old}))
            (weight,) = layout.weights
            before = layout.quantise(layout.outputs, to_gpu({"a.weight": old}))
            unwritten = {role: [] for role in (("codes", "scale") if spelling in ("nvfp4", "mxfp4") else ("codes",))}
            for new, previous in ((far, before), (near, before), (old, before), (old, None)):
                masters = to_gpu({"a.weight": new})
                made = layout.quantise(layout.outputs, masters, previous)
                quantised = quantise_to_encode(layout, layout.outputs, masters, previous)
                for role, name in weight.outputs.items():
                    if role in unwritten:
                        unwritten[role].append((before[name], quantised[name].bits, made[name]))
                    else:
                        assert torch.equal(integers(quantised[name]), integers(made[name]))
            for role, cases in unwritten.items():
                payload = payload_type(weight.outputs[role], layout.outputs[weight.outputs[role]].dtype)
                bases = [DeviceBits(integers(base)) for base, _, _ in cases]
                bases[0] = DeviceBits(torch.randint_like(bases[0].tensor, -128, 128))  # so different that elements are not coded
                bases[3] = None
                news = [new for _, new, _ in cases]
                written = [DeviceBits(integers(new)) for _, _, new in cases]
                seeds = np.arange(len(cases), dtype=np.uint64)
                codec = GpuCodec(DEVICE)
                (found,) = codec.encode_groups([EncodeGroup(payload, bases, news, seeds)], 1)
                (expected,) = codec.encode_groups([EncodeGroup(payload, bases, written, seeds)], 1)
                assert found.changed.tolist() == expected.changed.tolist()
                assert (found.before, found.after) == (expected.before, expected.after)
                assert b"".join(found.pieces) == b"".join(expected.pieces)
                assert 0 < found.changed[1] < found.changed[0]
                assert not found.changed[2]
                # Deltas back: the weights take the place of the elements of the base.
                bases[3] = bases[1]
                (found,) = codec.encode_groups(
                    [EncodeGroup(payload, [*news, written[1]], [*bases, bases[1]], np.arange(5, dtype=np.uint64))], 1
                )
                (expected,) = codec.encode_groups(
                    [EncodeGroup(payload, [*written, written[1]], [*bases, bases[1]], np.arange(5, dtype=np.uint64))], 1
                )
                assert found.changed.tolist() == expected.changed.tolist()
                assert (found.before, found.after) == (expected.before, expected.after)
                assert b"".join(found.pieces) == b"".join(expected.pieces)


@pytest.mark.parametrize("spelling", ["fp8-block", "nvfp4", "int4", "fp8-tensor"])
def test_segments_of_an_unwritten_state_are_encoded_from_its_columns(spelling: str, on_gpu) -> None:
    """They have tensors that are not quantised, and the deltas in both directions are those of tensors that are written."""
    rng = np.random.default_rng(5)
    shapes = {f"layers.{i}.{name}": shape for i in range(3) for name, shape in (("up_proj.weight", (64, 128)), ("norm.weight", (64,)))}
    old = {name: (rng.standard_normal(shape) * 0.02).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    new = {name: (array.astype(np.float32) * 1.01).astype(ml_dtypes.bfloat16) for name, array in old.items()}
    with on_gpu():
        layout = QuantisedLayout.of_state(spelling, old)
        names = sorted(layout.outputs)
        before = layout.quantise(names, to_gpu(old))
        written = layout.quantise(names, to_gpu(new), before)
        unwritten = quantise_segments(layout, names, to_gpu(new), in_columns(before))
        assert isinstance(unwritten, UnwrittenState)
        assert list(unwritten) == names
        assert {type(tensor) for tensor in unwritten.values()} == {torch.Tensor, UnwrittenTensor}
        for some in (names, names[:4], names[4:], names[::2]):
            base, expected, found = ({name: state[name] for name in some} for state in (before, written, unwritten))
            for state in (found, unwritten.of(some)):
                assert encode_many([(base, state), (state, base)]) == encode_many([(base, expected), (expected, base)])


def integers(tensor):
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


class _Read(Mapping):
    """A state that makes its tensors at each access, and counts how often."""

    def __init__(self, state) -> None:
        self._state = state
        self.reads: Counter[str] = Counter()

    def __getitem__(self, name):
        self.reads[name] += 1
        return self._state[name]

    def __iter__(self):
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


@pytest.mark.parametrize("spelling", ["fp8-block", "nvfp4"])
@pytest.mark.parametrize("is_on_gpu", [True, False])
def test_tensors_of_many_experts_are_not_read_for_each_expert(spelling: str, is_on_gpu: bool, on_gpu) -> None:
    reads = []
    for experts in (3, 6):
        shapes = {"mlp.experts.gate_up_proj": (experts, 64, 32), "mlp.experts.down_proj": (experts, 32, 32)}
        state = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
        with on_gpu():
            given = _Read(to_gpu(state) if is_on_gpu else state)
            layout = QuantisedLayout.of_state(spelling, state)
            assert len(layout.weights) >= 2 * experts
            publication = Publication(given, Quantising(spelling, None).table_of(layout), None, {}, None, layout=layout)
            assert len(publication.located) == len(layout.outputs)
            quantise_outputs(layout, layout.outputs, given)
            quantise_to_encode(layout, layout.outputs, given)
        reads.append(given.reads)
    assert reads[0] == reads[1]
