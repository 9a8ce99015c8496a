"""Every codec, instruction set and number of threads gives the same bytes and the exact result."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_tensors import tensor_pairs
from support import CODECS, NATIVE, bits_of, copied, split_delta, varint
from thorough import examples

import deltawire
from deltawire.codec import using_codec
from deltawire.dtypes import DTYPES, dtype_named

SLOW_ABOVE = 4000  # changed elements; the reference codec is slow because it decodes one code at a time


def check_encoders(base, new, threads=(1, 2, 3)) -> bytes:
    """Return the bytes that all encoders write."""
    with using_codec("reference"):
        delta = deltawire.encode_delta(base, new)
    for codec in NATIVE:
        with using_codec(codec):
            for count in threads:
                assert deltawire.encode_delta(base, new, threads=count) == delta
    return delta


def check_decoders(base, new, delta, codecs=CODECS, threads=(1, 2, 3)) -> None:
    expected = bits_of(new)
    for codec in codecs:
        with using_codec(codec):
            for count in threads if codec != "reference" else (1,):
                state = copied(base)
                patch = deltawire.resolve_delta(state, delta, threads=count)
                assert bits_of(state) == bits_of(base)
                deltawire.apply_delta(state, delta, threads=count)
                assert bits_of(state) == expected
            check_patch(base, new, delta, patch)


def check_patch(base, new, delta, patch) -> None:
    split = split_delta(delta)
    before, after = deltawire.state_digest(base), deltawire.state_digest(new)
    assert (patch.before, patch.after) == (before, after)
    assert (split.before.hex(), split.after.hex()) == (before.hex(), after.hex())
    assert before + (patch.after - patch.before) == after
    assert patch.changed.keys() == {name for name in base.keys() & new.keys() if base[name].tobytes() != new[name].tobytes()}
    for name, tensor in patch.changed.items():
        old, now = (state[name].reshape(-1).view(f"u{state[name].itemsize}") for state in (base, new))
        np.testing.assert_array_equal(tensor.indices, np.flatnonzero(old != now))
        np.testing.assert_array_equal(tensor.values.view(now.dtype), now[tensor.indices])
        assert tensor.shape == base[name].shape
    state = copied(base)
    for _ in range(2):
        patch.apply(state)
        assert bits_of(state) == bits_of(new)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@examples(20)
@given(data=st.data())
def test_codecs_agree(dtype, data):
    old, now = data.draw(tensor_pairs(dtype))
    base, new = {"weight": old}, {"weight": now}
    delta = check_encoders(base, new)
    changed = np.count_nonzero(old.view(dtype.bits) != now.view(dtype.bits))
    check_decoders(base, new, delta, CODECS if changed <= SLOW_ABOVE else NATIVE, (1, 3))


@pytest.mark.parametrize(("dtype", "name"), [("U8", "x.weight_packed"), ("U8", "x_blocks"), ("I32", "x.weight_packed")])
@examples(20)
@given(data=st.data())
def test_codecs_agree_on_packed_codes(dtype, name, data):
    old, now = data.draw(tensor_pairs(dtype_named(dtype)))
    more = np.arange(7, dtype=old.dtype)
    base, new = {name: old, f"a.{name}": more}, {name: now, f"a.{name}": more + 16, f"added.{name}": now[:50].copy()}
    delta = check_encoders(base, new)
    check_decoders(base, new, delta, CODECS if np.count_nonzero(old != now) <= SLOW_ABOVE // 2 else NATIVE, (1, 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@examples(10)
@given(data=st.data())
def test_codecs_agree_on_added_tensors(dtype, data):
    _, now = data.draw(tensor_pairs(dtype))
    base, new = {"other": np.zeros(3)}, {"other": np.zeros(3), "weight": now}
    delta = check_encoders(base, new)
    check_decoders(base, new, delta, CODECS if now.size <= SLOW_ABOVE else NATIVE, (2,))


@examples(25)
@given(data=st.data())
def test_codecs_agree_on_states_of_many_tensors(data):
    base, new = {}, {}
    for index in range(data.draw(st.integers(0, 6))):
        base[f"t{index}"], new[f"t{index}"] = data.draw(tensor_pairs(data.draw(st.sampled_from(DTYPES))))
    delta = check_encoders(base, new)
    check_decoders(base, new, delta, NATIVE, (1, 2, 3))


@pytest.mark.parametrize(
    ("name", "dtype", "tiles"), [("", np.uint16, 1 << 10), ("", np.uint8, 1 << 11), ("weight_packed", np.uint8, 1 << 12)]
)
def test_blocks_of_many_tiny_tensors_are_cut_alike(name, dtype, tiles):
    """Only the second and the fourth block change, so the payload has unchanged chunks between changed ones, and none at its end."""
    base = {f"{number:05}.{name}": np.zeros(3, dtype) for number in range(4 * tiles + 9)}
    new = copied(base)
    changing = [f"{number:05}.{name}" for number in (tiles, 3 * tiles, 3 * tiles + 1)]
    for key in changing:
        new[key][1] = 5
    delta = check_encoders(base, new, (2,))
    (payload,) = split_delta(delta).groups.values()
    assert payload.startswith(varint(tiles << 2) + b"\0" + varint(tiles << 2 | 1))
    check_decoders(base, new, delta, NATIVE, (2,))
    assert deltawire.resolve_delta(base, delta).changed.keys() == set(changing)


@examples(30)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_digests_agree(data, dtype):
    old, now = data.draw(tensor_pairs(dtype))
    digests = set()
    for codec in CODECS:
        with using_codec(codec):
            digests |= {deltawire.state_digest({"x": old, "y": now}, threads=threads) for threads in (1, 2, 3)}
    assert len(digests) == 1
    assert digests == {deltawire.state_digest({"x": old}) + deltawire.state_digest({"y": now})}


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.uint8, np.float32])
def test_blocks_of_2_to_the_24_elements_are_cut_alike(dtype):
    rng = np.random.default_rng(9)
    size = (1 << 24) + 70_000
    numbers = rng.integers(0, 256, size, np.uint8) if dtype == np.uint8 else rng.standard_normal(size, np.float32)
    base = numbers.astype(dtype)
    new = base.copy()
    bits = new.view(f"u{base.itemsize}")
    bits[rng.integers(0, size, 40_000)] += 1
    bits[(1 << 24) - 3 : (1 << 24) + 3] ^= 5
    bits[-40_000:] += 1
    deltas = set()
    for codec in NATIVE:
        with using_codec(codec):
            for threads in (1, 2, 3):
                deltas.add(deltawire.encode_delta({"x": base}, {"x": new}, threads=threads))
            state = {"x": base.copy()}
            deltawire.apply_delta(state, next(iter(deltas)), threads=2)
            assert np.array_equal(state["x"].view(bits.dtype), bits)
    assert len(deltas) == 1
    patch = deltawire.resolve_delta({"x": base}, deltas.pop())
    np.testing.assert_array_equal(patch.changed["x"].indices, np.flatnonzero(base.view(bits.dtype) != bits))


def test_positions_have_64_bits():
    size = (1 << 31) + (1 << 20)
    base, new = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    places = [0, (1 << 24) - 1, (1 << 31) - 1, 1 << 31, (1 << 31) + 12_345, size - 1]
    new[places] = range(1, 7)
    delta = deltawire.encode_delta({"x": base}, {"x": new})
    assert len(delta) < 10_000
    patch = deltawire.resolve_delta({"x": base}, delta)
    assert patch.changed["x"].indices.tolist() == places
    assert patch.changed["x"].values.tolist() == list(range(1, 7))
    deltawire.apply_delta({"x": base}, delta)
    assert base[places].tolist() == list(range(1, 7))
    assert deltawire.state_digest({"x": base}) == patch.after == deltawire.state_digest({"x": new})
    patch.apply({"x": base})
    assert np.count_nonzero(base[1 << 31 :]) == 3
