"""A prepared update changes nothing until it is applied. Then it changes everything, and can be reverted bit for bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import CODECS, bits_of, copied
from thorough import examples

import deltawire
from deltawire.codec import using_codec
from deltawire.delta.prepared import PreparedUpdate
from deltawire.errors import BaseMismatch, CorruptDelta, DeltawireError, StateNotWritable

DTYPES = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32, np.float64, np.int16, np.uint8]


def states(seed: int, share: float):
    """Return two states with tensors of several types. A share of all elements differs, and all elements of one tensor."""
    rng = np.random.default_rng(seed)
    base = {f"t{i}": np.frombuffer(rng.bytes(3000 * np.dtype(dtype).itemsize), dtype).reshape(60, 50) for i, dtype in enumerate(DTYPES)}
    base["dense"] = rng.standard_normal(70_000).astype(ml_dtypes.bfloat16)
    base["empty"], base["scalar"] = np.empty((0, 3), np.float32), np.array(1.5)
    base = copied(base)
    new = copied(base)
    for name in [name for name in base if name.startswith("t")]:
        bits = new[name].reshape(-1).view(np.uint8)
        bits[rng.random(bits.size) < share] ^= np.uint8(rng.integers(1, 256))
    new["dense"].view(np.uint16)[:] = rng.integers(0, 1 << 16, 70_000, np.uint16)
    return base, new


def elements(array):
    return array.reshape(-1).view(np.dtype(f"u{array.itemsize}"))


@pytest.mark.parametrize("codec", CODECS)
@examples(15)
@given(seed=st.integers(0, 2**32), share=st.sampled_from([0.0, 0.01, 0.5]), threads=st.integers(1, 3))
def test_apply_and_revert_are_exact(codec, seed, share, threads):
    base, new = states(seed, share)
    with using_codec(codec):
        delta = deltawire.encode_delta(base, new)
        state = copied(base)
        update = PreparedUpdate(threads=threads)
        assert update.add(state, delta) == (deltawire.state_digest(base), deltawire.state_digest(new))
        assert bits_of(state) == bits_of(base)
        for _ in range(2):
            update.apply()
            update.apply()
            assert bits_of(state) == bits_of(new)
            update.revert()
            update.revert()
            assert bits_of(state) == bits_of(base)
    changed = sum(int(np.count_nonzero(elements(base[name]) != elements(new[name]))) for name in base)
    assert update.changed == changed
    assert update.nbytes >= 5 * changed


def test_parts_are_applied_together():
    base, new = states(1, 0.1)
    state = copied(base)
    update = PreparedUpdate()
    for name in base:
        update.add({name: state[name]}, deltawire.encode_delta({name: base[name]}, {name: new[name]}))
    assert bits_of(state) == bits_of(base)
    update.apply()
    assert bits_of(state) == bits_of(new)
    with pytest.raises(ValueError, match="applied"):
        update.add(state, deltawire.encode_delta(new, new))


def test_tied_and_strided_tensors_are_written_once():
    rng = np.random.default_rng(3)
    memory = rng.standard_normal((40, 50)).astype(np.float32)
    base = {"a": memory.copy().T[::2], "tied": memory, "again": memory}
    now = memory.copy()
    now[3, 4], now[9, 9] = 7, -0.0
    new = {"a": base["a"] + 1, "tied": now, "again": now}
    update = PreparedUpdate()
    update.add(base, deltawire.encode_delta(base, new))
    before = bits_of(base)
    update.apply()
    assert bits_of(base) == bits_of(new)
    update.revert()
    assert bits_of(base) == before


@pytest.mark.parametrize("codec", CODECS)
def test_deltas_that_do_not_fit_are_refused_and_change_nothing(codec):
    base, new = states(2, 0.1)
    with using_codec(codec):
        delta = deltawire.encode_delta(base, new)
        other = copied(base)
        other["t0"].reshape(-1).view(np.uint16)[0] ^= 1
        structural = deltawire.encode_delta(base, {**new, "more": np.zeros(3)})
        read_only = copied(base)
        read_only["t0"].flags.writeable = False
        damaged = bytearray(delta)
        damaged[-5] ^= 4
        for state, bad, error in [
            (other, delta, BaseMismatch),
            (copied(base), structural, CorruptDelta),
            (read_only, delta, StateNotWritable),
            (copied(base), bytes(damaged), DeltawireError),
        ]:
            before = bits_of(state)
            with pytest.raises(error):
                PreparedUpdate().add(state, bad)
            assert bits_of(state) == before
