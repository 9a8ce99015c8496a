"""Valid deltas are refused with a named error if the state is not their base or cannot be changed, and nothing changes."""

from __future__ import annotations

import itertools
import types
from collections.abc import MutableMapping

import ml_dtypes
import numpy as np
import pytest
from small_delta import BASE, DELTA, NEW, OLD_DELTA, base_state, refused
from support import CODECS, bits_of, copied

import deltawire
from deltawire.codec import using_codec
from deltawire.errors import (
    BadTensorName,
    BaseMismatch,
    CorruptDelta,
    DtypeMismatch,
    ShapeMismatch,
    StateNotWritable,
    TensorMissing,
    TensorUnexpected,
    UnsupportedDtype,
    UnsupportedTensor,
)


def with_tensors(**changes):
    """Return the base of the small delta with some tensors replaced, or left out if they are None."""

    def make():
        state = base_state() | changes
        return {name: array for name, array in state.items() if array is not None}

    return make


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", sorted(BASE))
def test_a_state_with_one_different_bit_is_another_base(codec, name):
    with using_codec(codec):
        for bit in range(0, 8 * BASE[name].nbytes, 7 if codec == "reference" else 1):
            state = base_state()
            state[name].view(np.uint8).reshape(-1)[bit // 8] ^= 1 << bit % 8
            before = bits_of(state)
            with pytest.raises(BaseMismatch):
                deltawire.apply_delta(state, DELTA, threads=1)
            assert bits_of(state) == before


def chain(count):
    rng = np.random.default_rng(3)
    states = [{"x": rng.standard_normal(5000).astype(ml_dtypes.bfloat16), "y": rng.standard_normal(70), "z": rng.standard_normal(70)}]
    for _ in range(count):
        state = copied(states[-1])
        state["x"].view(np.uint16)[rng.integers(0, 5000, 300)] += 1
        state["y"][rng.integers(0, 70, 9)] *= -1.5
        states.append(state)
    return states, [deltawire.encode_delta(a, b) for a, b in itertools.pairwise(states)]


@pytest.mark.parametrize("codec", CODECS)
def test_deltas_apply_only_in_order_and_only_once(codec):
    states, deltas = chain(3)
    with using_codec(codec):
        for step, delta in enumerate(deltas):
            for other, state in enumerate(states):
                if other != step:
                    refused(delta, BaseMismatch, lambda state=state: copied(state))
        state = copied(states[0])
        for delta, expected in zip(deltas, states[1:], strict=True):
            deltawire.apply_delta(state, delta)
            assert bits_of(state) == bits_of(expected)
            refused(delta, BaseMismatch, lambda state=state: state)


@pytest.mark.parametrize("codec", CODECS)
def test_swapped_tensors_are_another_base(codec):
    states, deltas = chain(1)
    x, y, z = states[0].values()
    with using_codec(codec):
        refused(deltas[0], BaseMismatch, lambda: {"x": x.copy(), "y": z.copy(), "z": y.copy()})
        refused(deltas[0], BaseMismatch, lambda: {"x": x.copy(), "y": y[::-1].copy(), "z": z.copy()})
        refused(deltas[0], BaseMismatch, lambda: {"x": np.roll(x, 1), "y": y.copy(), "z": z.copy()})
        refused(deltas[0], BaseMismatch, lambda: {"x": x.reshape(50, 100).copy(), "y": y.copy(), "z": z.copy()})


def test_a_small_delta_applied_twice_is_refused():
    state = base_state()
    deltawire.apply_delta(state, DELTA)
    refused(DELTA, TensorMissing, lambda: state)


def test_other_types_are_refused():
    for name, other, error in [
        ("a", BASE["a"].view(np.float16), DtypeMismatch),
        ("b", BASE["b"].astype(np.float64), DtypeMismatch),
        ("tied", BASE["tied"].view(np.int8), (DtypeMismatch, CorruptDelta)),
        ("kept", BASE["kept"].view(np.int64), BaseMismatch),
        ("gone", BASE["gone"].view(np.uint16), BaseMismatch),
    ]:
        refused(DELTA, (BaseMismatch, CorruptDelta) if name == "tied" else BaseMismatch, with_tensors(**{name: other}))
        refused(OLD_DELTA, error, with_tensors(**{name: other}))


def test_other_counts_are_refused():
    for name, other, error in [
        ("a", BASE["a"][:-1], ShapeMismatch),
        ("a", np.concatenate([BASE["a"], BASE["a"]]), ShapeMismatch),
        ("a", BASE["a"][:0], ShapeMismatch),
        ("b", BASE["b"].reshape(5, 3), BaseMismatch),
        ("kept", BASE["kept"][:-1], BaseMismatch),
    ]:
        refused(DELTA, BaseMismatch, with_tensors(**{name: other}))
        refused(OLD_DELTA, error, with_tensors(**{name: other}))


@pytest.mark.parametrize("name", ["a", "b", "gone", "tied", "tied_too"])
def test_missing_tensors_are_named(name):
    assert repr(name) in str(refused(OLD_DELTA, TensorMissing, with_tensors(**{name: None})))
    error = refused(DELTA, (TensorMissing, BaseMismatch), with_tensors(**{name: None}))
    assert (repr(name) if name in ("gone", "tied", "tied_too") else "7 tensors") in str(error)


@pytest.mark.parametrize("name", ["kept", "retyped"])
def test_a_state_without_an_unchanged_tensor_is_another_base(name):
    refused(DELTA, (BaseMismatch, TensorMissing), with_tensors(**{name: None}))


def test_more_tensors_are_named():
    refused(DELTA, BaseMismatch, with_tensors(more=np.zeros(0)))
    refused(DELTA, BaseMismatch, with_tensors(more=np.zeros(1)))
    assert "'fresh'" in str(refused(DELTA, TensorUnexpected, with_tensors(fresh=np.zeros(7, np.uint8))))
    refused(DELTA, TensorMissing, dict)


def test_objects_that_are_not_tensors_are_named():
    for wrong in ([1.0], 1.0, "text", None, object()):
        state = base_state() | {"kept": wrong}
        for read in (deltawire.resolve_delta, deltawire.apply_delta):
            with pytest.raises(UnsupportedTensor, match="kept"):
                read(state, DELTA)
        with pytest.raises(UnsupportedTensor, match="kept"):
            deltawire.encode_delta(state, NEW)
    for dtype in ("complex64", "object", "S3", "U3", "M8[s]", ">f4", "V2", "i4,f4"):
        state = base_state() | {"kept": np.zeros(3, dtype)}
        with pytest.raises(UnsupportedDtype):
            deltawire.apply_delta(state, DELTA)
        with pytest.raises(UnsupportedDtype):
            deltawire.encode_delta(BASE, state)
        with pytest.raises(UnsupportedDtype):
            deltawire.state_digest(state)


@pytest.mark.parametrize("name", ["", "__metadata__", "\ud800", 1, None, b"a", ("a",)], ids=ascii)
def test_impossible_names_are_named(name):
    state = base_state() | {name: np.zeros(1)}
    for call in (
        lambda: deltawire.encode_delta(BASE, state),
        lambda: deltawire.encode_delta(state, NEW),
        lambda: deltawire.state_digest(state),
        lambda: deltawire.apply_delta(state, DELTA),
        lambda: deltawire.resolve_delta(state, DELTA),
    ):
        with pytest.raises(BadTensorName):
            call()


# States that cannot be written


def unwritable(delta, make):
    """Check that `apply_delta` refuses with every codec, and that `resolve_delta`, which does not write, works."""
    for codec in CODECS:
        with using_codec(codec):
            state = make()
            before = bits_of(state)
            with pytest.raises(StateNotWritable):
                deltawire.apply_delta(state, delta)
            assert bits_of(state) == before
            patch = deltawire.resolve_delta(state, delta)
            assert bits_of(state) == before
    return state, patch


def test_read_only_tensors_are_refused():
    def make():
        state = base_state()
        state["b"].flags.writeable = False
        return state

    state, patch = unwritable(DELTA, make)
    with pytest.raises(StateNotWritable, match="read-only"):
        patch.apply(state)
    assert bits_of(state) == bits_of(BASE)


def test_read_only_tensors_that_do_not_change_are_fine():
    state = base_state()
    for name in ("kept", "gone", "retyped"):
        state[name].flags.writeable = False
    deltawire.apply_delta(state, DELTA)
    assert bits_of(state) == bits_of(NEW)


def test_scalars_are_refused():
    delta = deltawire.encode_delta({"s": np.float32(1), "t": np.zeros(3)}, {"s": np.float32(2), "t": np.zeros(3)})
    unwritable(delta, lambda: {"s": np.float32(1), "t": np.zeros(3)})


def test_expanded_views_are_refused():
    base, new = {"x": np.zeros((4, 5), np.int16)}, {"x": np.ones((4, 5), np.int16)}
    delta = deltawire.encode_delta(base, new)

    def expanded():
        return {"x": np.lib.stride_tricks.as_strided(np.zeros(5, np.int16), (4, 5), (0, 2), writeable=True)}

    state, patch = unwritable(delta, expanded)
    with pytest.raises(StateNotWritable, match="several of its elements"):
        patch.apply(state)


def test_tensors_that_overlap_themselves_are_refused():
    window = {"x": np.lib.stride_tricks.as_strided(np.zeros(8, np.int16), (4, 5), (2, 2), writeable=True)}
    new = window["x"].copy()
    new[0, 1] = 7
    unwritable(deltawire.encode_delta(window, {"x": new}), lambda: window)


def test_elements_at_odd_distances_are_named():
    fields = np.zeros(9, "u1,u2")
    for odd in (fields["f1"], np.lib.stride_tricks.as_strided(np.zeros(8, np.uint16), (4,), (1,))):
        for call in (lambda odd=odd: deltawire.encode_delta({"x": odd}, {"x": odd}), lambda odd=odd: deltawire.state_digest({"x": odd})):
            with pytest.raises(UnsupportedTensor, match="strides"):
                call()
    assert deltawire.state_digest({"x": fields["f1"][:1]}) == deltawire.state_digest({"x": np.zeros(1, np.uint16)})


def test_expanded_views_that_do_not_change_are_fine():
    base = {"x": np.broadcast_to(np.arange(5.0), (4, 5)), "y": np.zeros(3)}
    state = {"x": np.broadcast_to(np.arange(5.0), (4, 5)), "y": np.zeros(3)}
    deltawire.apply_delta(state, deltawire.encode_delta(base, {"x": base["x"], "y": np.ones(3)}))
    assert bits_of(state) == bits_of({"x": base["x"], "y": np.ones(3)})


def overlapping(*slices):
    """Return the views x0, x1, … of one buffer."""

    def make():
        memory = np.arange(100, dtype=np.uint16)
        return {f"x{i}": memory[part] for i, part in enumerate(slices)}

    return make


@pytest.mark.parametrize(
    "slices",
    [
        (slice(0, 60), slice(40, 100)),
        (slice(40, 100), slice(0, 60)),
        (slice(0, 100), slice(40, 60)),
        (slice(40, 60), slice(0, 100)),
        (slice(0, 50), slice(0, 51)),
        (slice(0, 60), slice(59, None, -1)),
        (slice(99, None, -1), slice(0, 1)),
        (slice(0, 100, 2), slice(0, 100, 3)),
        (slice(1, 21, 2), slice(3, 23, 2), slice(0, 100, 2)),
        (slice(0, 100, 2), slice(1, 100, 4), slice(1, 60, 2)),
        (slice(0, 100, 3), slice(1, 100, 3), slice(2, 100, 3), slice(2, 40, 3)),
    ],
    ids=str,
)
def test_views_that_overlap_and_do_not_change_together_are_refused(slices):
    make = overlapping(*slices)
    base = copied(make())
    refusals = 0
    for changing in base:
        new = copied(base)
        new[changing][0] += 1
        delta = deltawire.encode_delta(base, new)
        state = make()
        try:
            deltawire.apply_delta(state, delta)
        except StateNotWritable:
            assert bits_of(state) == bits_of(base)
            refusals += 1
        else:  # this tensor shares no memory with the others
            assert bits_of(state) == bits_of(new)
    assert refusals >= 2


def test_interleaved_views_that_share_nothing_are_fine():
    make = overlapping(slice(0, 100, 3), slice(1, 100, 3), slice(2, 100, 3))
    base = copied(make())
    new = {name: array + 1 for name, array in base.items()}
    state = make()
    deltawire.apply_delta(state, deltawire.encode_delta(base, new))
    assert bits_of(state) == bits_of(new)


class Stubborn(MutableMapping):
    """A mapping that refuses one change, after a given number of changes."""

    def __init__(self, items, patience):
        self.items_, self.patience = dict(items), patience

    def _lose_patience(self):
        self.patience -= 1
        if self.patience == -1:
            raise RuntimeError("no more")

    def __getitem__(self, name):
        return self.items_[name]

    def __iter__(self):
        return iter(list(self.items_))

    def __len__(self):
        return len(self.items_)

    def __setitem__(self, name, value):
        self._lose_patience()
        self.items_[name] = value

    def __delitem__(self, name):
        self._lose_patience()
        del self.items_[name]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("patience", range(4))
def test_a_mapping_that_refuses_some_values_is_restored(codec, patience):
    with using_codec(codec):
        state = Stubborn(base_state(), patience)
        arrays = dict(state)
        with pytest.raises(StateNotWritable, match="no more"):
            deltawire.apply_delta(state, DELTA)
        assert bits_of(state) == bits_of(BASE)
        assert all(state[name] is array for name, array in arrays.items())
        patch = deltawire.resolve_delta(state, DELTA)
        state.patience = patience
        with pytest.raises(StateNotWritable, match="no more"):
            patch.apply(state)
        assert bits_of(state) == bits_of(BASE)
        patch.apply(state)
        assert bits_of(state) == bits_of(NEW)


def test_an_immutable_mapping_is_refused_only_if_tensors_are_added_or_removed():
    state, patch = unwritable(DELTA, lambda: types.MappingProxyType(base_state()))
    with pytest.raises(StateNotWritable):
        patch.apply(state)
    assert bits_of(state) == bits_of(BASE)
    states, deltas = chain(1)
    fixed = types.MappingProxyType(copied(states[0]))
    deltawire.apply_delta(fixed, deltas[0])
    assert bits_of(fixed) == bits_of(states[1])


@pytest.mark.parametrize("threads", [0, -1])
def test_there_is_at_least_one_thread(threads):
    for call in (
        lambda: deltawire.encode_delta(BASE, NEW, threads=threads),
        lambda: deltawire.apply_delta(base_state(), DELTA, threads=threads),
        lambda: deltawire.state_digest(BASE, threads=threads),
    ):
        with pytest.raises(ValueError, match="at least 1"):
            call()
