"""Test casting weights to the type that the engines serve."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from support import bits_of

import deltawire
from deltawire.chain.reader_options import ReaderOptions
from deltawire.dtypes import dtype_named
from deltawire.publish import Publisher
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber
from deltawire.tensors.bits import tensor_bits
from deltawire.tensors.casting import Casting, Casts, wire_dtype

BF16 = dtype_named("BF16").numpy


def published(base, masters):
    state = {name: array.copy() for name, array in base.items()}
    deltawire.apply_delta(state, deltawire.encode_delta(base, masters, dtype="bfloat16"))
    return state


def test_scalars_are_rounded_separately():
    """Each scalar becomes a temporary array, and the next array may get the same address."""
    names = "abcdef"
    state = published({name: np.zeros((), BF16) for name in names}, {name: np.float32(i + 1) for i, name in enumerate(names)})
    assert [float(state[name]) for name in names] == [1, 2, 3, 4, 5, 6]


def test_tensors_without_elements_keep_their_shapes():
    shapes = {"a": (0, 5), "b": (0, 3)}
    base, masters = ({name: np.zeros(shape, dtype) for name, shape in shapes.items()} for dtype in (BF16, np.float32))
    assert {name: array.shape for name, array in published(base, masters).items()} == shapes


def test_the_same_memory_is_rounded_once():
    wide, casts = np.ones(3, np.float32), Casts()
    assert casts.cast(tensor_bits("v", wide), dtype_named("BF16")).bits is casts.cast(tensor_bits("w", wide), dtype_named("BF16")).bits


def test_float32_is_rounded_to_the_nearest_bfloat16_and_all_nans_are_one():
    """All signs, exponents and leading bits are rounded, with rests below, at and above one half."""
    rests = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint64)
    wide = ((np.arange(1 << 16, dtype=np.uint64) << np.uint64(16))[:, None] | rests).reshape(-1)
    expected = (wide + 0x7FFF + (wide >> 16 & 1)) >> 16
    expected[(wide & 0x7FFFFFFF) > 0x7F800000] = 0x7FC0
    found = Casts().cast(tensor_bits("w", wide.astype(np.uint32).view(np.float32)), dtype_named("BF16"))
    np.testing.assert_array_equal(found.bits, expected.astype(np.uint16))


@pytest.mark.parametrize("kind", ["arrays", "torch"])
def test_a_delta_of_masters_is_that_of_weights_that_were_cast_before(kind, monkeypatch):
    """Plain tensors are read in columns, as without `dtype`; tied tensors stay tied."""
    random = np.random.default_rng(4)
    before = {f"w{i}": random.standard_normal((5, 40 + i)).astype(np.float32) for i in range(4)} | {"ids": np.arange(9)}
    before["half"] = random.standard_normal(7).astype(np.float16)
    before["tied"] = before["w1"]
    after = {name: array if array.dtype == np.int64 else array * array.dtype.type(1.01) for name, array in before.items()}
    after["w2"] = after["w2"].T.copy().T  # it is not contiguous
    after["tied"] = after["w1"]
    base, expected = (
        {name: array if array.dtype == np.int64 else array.astype(BF16) for name, array in state.items()} for state in (before, after)
    )
    base["tied"], expected["tied"] = base["w1"], expected["w1"]
    delta = deltawire.encode_delta(base, expected)
    if kind == "torch":
        torch = pytest.importorskip("torch")
        after = {name: torch.from_numpy(array) for name, array in after.items() if name != "tied"}
        after["tied"] = after["w1"]
    monkeypatch.setattr("deltawire.delta.encode._pairs", None)
    assert deltawire.encode_delta(base, after, dtype="bfloat16") == delta


def test_a_dtype_may_be_given_as_a_type_or_a_name():
    for dtype in (BF16, ml_dtypes.bfloat16, "bfloat16", "torch.bfloat16"):
        assert wire_dtype(dtype) == dtype_named("BF16")
    assert wire_dtype(np.float32) == wire_dtype("float32") == dtype_named("F32")
    for dtype in ("int8", "float8_e4m3fn", np.int32, "bf17", 3, None, object()):
        with pytest.raises(ValueError, match="dtype is the type that the engines serve"):
            wire_dtype(dtype)
    for dtype in ("torch.float8_e4m3fn", ml_dtypes.float8_e4m3fn):
        with pytest.raises(ValueError, match="pass a recipe, such as quantise="):
            wire_dtype(dtype)


def test_all_wide_floats_are_cast_and_nothing_else():
    random = np.random.default_rng(3)
    wide = {name: (random.standard_normal(300) * 100).astype(name) for name in ("float16", "float32", "float64")}
    wide["bfloat16"] = wide["float32"].astype(BF16)
    state = {**wide, "ids": np.arange(5), "fp8": np.ones(4, ml_dtypes.float8_e4m3fn)}
    for to in (np.float16, BF16, np.float32, np.float64):
        with Publisher(store := MemoryStore(), dtype=to, attachments={}) as publisher:
            publisher.publish(state)
        with Subscriber(store, options=ReaderOptions(pin=False)) as subscriber:
            subscriber.sync()
            expected = {name: array.astype(to) for name, array in wide.items()} | {name: state[name] for name in ("ids", "fp8")}
            assert bits_of(subscriber.state) == bits_of(expected)


def test_a_function_may_choose_for_each_tensor():
    state = {"router": np.ones(3, np.float32), "up": np.ones(3, np.float32), "ids": np.arange(3)}
    casting = Casting(lambda name, tensor: None if name == "router" else "bfloat16")
    found = {name: casting.dtype_of(tensor_bits(name, array), array).name for name, array in state.items()}
    assert found == {"router": "F32", "up": "BF16", "ids": "I64"}


@pytest.mark.parametrize("background", [False, True])
def test_published_weights_are_cast_at_every_step_and_the_trainers_own_do_not_change(background):
    state = {"w": np.random.default_rng(0).standard_normal((40, 50)).astype(np.float32)}
    state["tied"] = state["w"]
    store = MemoryStore()
    with Publisher(store, dtype="bfloat16", background=background, attachments={}) as publisher:
        for step in range(3):
            publisher.publish(state, step=step)
            publisher.flush()
            kept = state["w"].copy()
            with Subscriber(store, options=ReaderOptions(pin=False)) as subscriber:
                subscriber.sync()
                assert bits_of(subscriber.state) == bits_of({name: state["w"].astype(BF16) for name in state})
            assert np.array_equal(state["w"], kept)
            state["w"] *= np.float32(1.001)
