"""Weights that are quantised while they are encoded give the bytes of weights that are quantised before."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_weights import DTYPES, KINDS, make_weight

from deltawire.codec import using_codec
from deltawire.codec.native import instruction_sets
from deltawire.delta.encode import encode_with_summary
from deltawire.errors import NonFiniteWeights
from deltawire.quantise import QuantisedLayout, Recipe, encode_with_codes
from deltawire.quantise.encode_with_codes import ReusedMemory
from deltawire.quantise.quantise import quantise_to_encode
from deltawire.quantise.recipe import SPELLINGS
from deltawire.quantise.whole_weights import WholeWeights
from deltawire.tensors.unwritten_state import PendingState

NAMES = frozenset(Recipe.parse(spelling).name for spelling in SPELLINGS)


@pytest.fixture(autouse=True)
def _every_recipe_may_leave_codes_unwritten(monkeypatch):
    """A publisher writes the codes of most recipes, because that is faster. The bytes are the same if it does not."""
    monkeypatch.setattr(encode_with_codes, "_UNWRITTEN", NAMES)


STEPS = {"nothing": 0.0, "little": 1e-4, "much": 0.5}
"""The distance by which an update moves the weights, relative to their size. With the last one, chunks are stored raw."""


def layer(number: int) -> str:
    return f"model.layers.{number}.self_attn.o_proj.weight"


def masters(shapes, dtype="float32", kind="plain", seed=0) -> dict[str, np.ndarray]:
    made = {layer(number): make_weight(kind, shape, dtype, seed + number) for number, shape in enumerate(shapes)}
    return made | {"model.norm.weight": np.ones(7, DTYPES[dtype])}


def moved(state: dict[str, np.ndarray], step: float, seed: int = 9) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: (array.astype(np.float32) * (1 + step * rng.standard_normal(array.shape))).astype(array.dtype)
        for name, array in state.items()
    }


def assert_same_state(found, expected) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes(), name


def check(spelling, before, after, *, threads=1, keeps=False) -> None:
    """Encode `after` in both ways, and compare the deltas, what they say, and the tensors."""
    layout = QuantisedLayout.of_state(spelling, before)
    published = layout.quantise(layout.outputs, before)
    expected = layout.quantise(layout.outputs, after, published)
    pending = quantise_to_encode(layout, layout.outputs, after, published, ReusedMemory(), threads, keeps_codes=keeps)
    assert isinstance(pending, PendingState)
    assert encode_with_summary(published, pending, threads=threads) == encode_with_summary(published, expected, threads=threads)
    assert_same_state(pending, expected)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_delta_is_the_same_as_if_weights_were_quantised_first(spelling, step) -> None:
    before = masters([(300, 384), (1, 128), (129, 1280), (700, 256)])
    after = moved(before, STEPS[step])
    for threads, keeps in ((1, False), (3, False), (1, True), (3, True)):
        check(spelling, before, after, threads=threads, keeps=keeps)


@pytest.mark.parametrize("spelling", ["fp8-block", "fp8-channel", "fp8-tensor"])
@pytest.mark.parametrize("step", ["little", "much"])
def test_rows_that_do_not_fit_tiles_are_made_for_both_tiles(spelling, step) -> None:
    before = masters([(515, 333), (130, 129)])
    check(spelling, before, moved(before, STEPS[step]), threads=2)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_types_and_instruction_sets(isa, dtype) -> None:
    before = masters([(140, 256), (9, 128)], dtype)
    with using_codec(isa):
        for spelling in SPELLINGS:
            check(spelling, before, moved(before, 0.01), threads=2)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("spelling", ["fp8-tensor", "nvfp4"])
def test_codes_are_made_again_if_a_shared_scale_does_not_stay(spelling, keeps) -> None:
    """All weights are encoded with the previous scale first. The last one shows that it is too small."""
    before = masters([(300, 256), (300, 256)])
    after = moved(before, 1e-4)
    after[layer(1)][299, 255] = 4.0
    check(spelling, before, after, threads=2, keeps=keeps)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_fresh_scales(spelling) -> None:
    before = masters([(140, 256)])
    after = moved(before, 0.01)
    layout = QuantisedLayout.of_state(spelling, before)
    published, expected = layout.quantise(layout.outputs, before), layout.quantise(layout.outputs, after)
    pending = quantise_to_encode(layout, layout.outputs, after)
    assert encode_with_summary(published, pending) == encode_with_summary(published, expected)
    assert_same_state(pending, expected)


@given(
    spelling=st.sampled_from(SPELLINGS),
    rows=st.integers(1, 300),
    columns=st.integers(1, 6),
    kind=st.sampled_from([kind for kind in KINDS if kind != "one huge"]),
    dtype=st.sampled_from(sorted(DTYPES)),
    step=st.sampled_from([0.0, 1e-5, 0.03, 1.0]),
    threads=st.integers(1, 3),
    keeps=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_any_weights(spelling, rows, columns, kind, dtype, step, threads, keeps) -> None:
    before = masters([(max(rows, 8), 128 * columns), (8, 128)], dtype, kind)
    check(spelling, before, moved(before, step), threads=threads, keeps=keeps)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("keeps", [False, True])
def test_weights_that_are_not_finite_are_refused_when_they_are_encoded_or_read(spelling, keeps) -> None:
    before = masters([(140, 256), (140, 256)])
    after = moved(before, 1e-4)
    after[layer(1)][139, 255] = np.nan
    layout = QuantisedLayout.of_state(spelling, before)
    published = layout.quantise(layout.outputs, before)
    with pytest.raises(NonFiniteWeights) as expected:
        layout.quantise(layout.outputs, after, published)
    for use in (lambda state: encode_with_summary(published, state), dict):
        pending = quantise_to_encode(layout, layout.outputs, after, published, threads=2, keeps_codes=keeps)
        assert pending["model.norm.weight"].tobytes() == published["model.norm.weight"].tobytes()  # it is not quantised
        for _ in range(2):
            with pytest.raises(NonFiniteWeights) as found:
                use(pending)
            assert str(found.value) == str(expected.value)


def test_whoever_reads_a_tensor_before_it_is_encoded_gets_it_written() -> None:
    before = masters([(140, 256), (140, 256)])
    after = moved(before, 0.01)
    layout = QuantisedLayout.of_state("fp8-block", before)
    published = layout.quantise(layout.outputs, before)
    expected = layout.quantise(layout.outputs, after, published)
    assert_same_state(dict(quantise_to_encode(layout, layout.outputs, after, published)), expected)
    pending = quantise_to_encode(layout, layout.outputs, after, published)
    assert_same_state(pending.of(list(expected)[:2]), {name: expected[name] for name in list(expected)[:2]})
    assert encode_with_summary(published, pending) == encode_with_summary(published, expected)
    # Encoding against another set of tensors, or by a codec that cannot make elements, reads the tensors first.
    pending = quantise_to_encode(layout, layout.outputs, after, published)
    assert encode_with_summary({}, pending) == encode_with_summary({}, expected)
    pending = quantise_to_encode(layout, layout.outputs, after, published)
    with using_codec("reference"):
        assert encode_with_summary(published, pending) == encode_with_summary(published, expected)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(("recipes", "is_written"), [(NAMES, False), (frozenset(), True)])
def test_codes_are_not_written_unless_the_recipe_or_the_caller_wants_it(keeps, recipes, is_written, monkeypatch) -> None:
    monkeypatch.setattr(encode_with_codes, "_UNWRITTEN", recipes)
    before = masters([(128, 1 << 14)])
    layout = QuantisedLayout.of_state("fp8-block", before)
    published = layout.quantise(layout.outputs, before)
    codes = layout.weights[0].outputs["codes"]
    pending = quantise_to_encode(layout, layout.outputs, before, published, keeps_codes=keeps)
    assert isinstance(pending, PendingState)
    array = pending.unwritten.tensors[pending.unwritten.layout.names.index(codes)]
    array.view(np.uint8).fill(0xAB)
    encode_with_summary(published, pending)
    assert (array.tobytes() == published[codes].tobytes()) == (keeps or is_written)
    assert pending[codes].tobytes() == published[codes].tobytes()


def test_memory_is_used_again_for_large_arrays() -> None:
    before = masters([(128, 1 << 14), (128, 128)])
    layout = QuantisedLayout.of_state("fp8-block", before)
    memory = ReusedMemory()
    large = [output.name for output in WholeWeights(layout, layout.weights).large_outputs]
    assert large == [layout.weights[0].outputs["codes"]]
    arrays = []
    for _ in range(2):
        pending = quantise_to_encode(layout, layout.outputs, before, None, memory)
        assert isinstance(pending, PendingState)
        arrays.append(dict(zip(pending.unwritten.layout.names, pending.unwritten.tensors, strict=True)))
    assert [name for name in large if np.shares_memory(arrays[0][name], arrays[1][name])] == large


def test_sources_in_torch_tensors_are_quantised_while_they_are_encoded() -> None:
    torch = pytest.importorskip("torch")
    before = masters([(140, 256)])
    after = moved(before, 0.01)
    layout = QuantisedLayout.of_state("fp8-block", before)
    published = layout.quantise(layout.outputs, before)
    pending = quantise_to_encode(layout, layout.outputs, {name: torch.from_numpy(array) for name, array in after.items()}, published)
    assert isinstance(pending, PendingState)
    assert_same_state(pending, layout.quantise(layout.outputs, after, published))


@pytest.mark.parametrize("keeps", [False, True])
def test_many_threads_that_need_the_same_rows(keeps) -> None:
    """One thread writes the codes, and the others wait. If codes are not written, each thread makes them for itself."""
    before = masters([(128, 1 << 12)])
    check("fp8-block", before, moved(before, 0.01), threads=8, keeps=keeps)


@pytest.mark.parametrize("spelling", ["fp8-block", "nvfp4"])
def test_very_wide_weights(spelling) -> None:
    before = masters([(8, 1 << 17), (8, 128)])
    check(spelling, before, moved(before, 0.01), threads=2)


class NewArrays(Mapping):
    """Makes a new array at each access, as a state may that is larger than memory. The memory of an array is overwritten if it dies."""

    def __init__(self, state) -> None:
        self._state = state

    def __getitem__(self, name):
        copy = self._state[name].copy()
        memory = (ctypes.c_ubyte * copy.nbytes).from_buffer(copy.reshape(-1).view(np.uint8))
        weakref.finalize(memory, copy.fill, np.nan)
        return np.frombuffer(memory, copy.dtype).reshape(copy.shape)

    def __iter__(self):
        return iter(self._state)

    def __len__(self):
        return len(self._state)


@pytest.mark.parametrize("keeps", [False, True])
def test_arrays_that_a_state_makes_at_each_access_live_until_they_are_encoded(keeps) -> None:
    before = masters([(140, 256), (9, 128)])
    after = moved(before, 0.01)
    layout = QuantisedLayout.of_state("fp8-block", before)
    published = layout.quantise(layout.outputs, before)
    expected = layout.quantise(layout.outputs, after, published)
    pending = quantise_to_encode(layout, layout.outputs, NewArrays(after), published, keeps_codes=keeps)
    assert isinstance(pending, PendingState)
    assert encode_with_summary(published, pending) == encode_with_summary(published, expected)
    assert_same_state(pending, expected)
    after[layer(0)][3, 5] = np.nan
    pending = quantise_to_encode(layout, layout.outputs, NewArrays(after), published, keeps_codes=keeps)
    with pytest.raises(NonFiniteWeights, match="1 element is NaN or infinite"):
        encode_with_summary(published, pending)
