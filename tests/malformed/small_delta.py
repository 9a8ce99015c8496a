"""Provide a small delta that uses every feature, and functions that check that readers refuse a variation of it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from old_deltas import encode_old
from support import bits_of, copied

import deltawire
from deltawire import DeltawireError


def make_states():
    rng = np.random.default_rng(1)
    base = {
        "a": rng.standard_normal(60).astype(ml_dtypes.bfloat16),
        "b": rng.standard_normal((3, 5)).astype(np.float32),
        "gone": np.arange(4, dtype=np.int16),
        "kept": rng.standard_normal(3),
        "retyped": np.arange(6, dtype=np.float16),
        "tied": rng.integers(0, 255, 40, np.uint8),
    }
    new = copied(base)
    new["a"].view(np.uint16)[[3, 17, 50]] += np.array([1, 1, 700], np.uint16)
    new["b"].view(np.uint32)[1] ^= 0x80000001
    new["tied"][[5, 30]] += 1
    del new["gone"]
    new["retyped"] = np.arange(6, dtype=np.int32)
    new["fresh"] = np.arange(7, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    base["tied_too"], new["tied_too"] = base["tied"], new["tied"]
    return base, new


BASE, NEW = make_states()
DELTA = deltawire.encode_delta(BASE, NEW)
OLD_DELTA = encode_old(BASE, NEW)
"""The same as a file of version 1."""
OLD_HEADER_BYTES = 8 + int.from_bytes(OLD_DELTA[:8], "little")


def base_state():
    state = copied(BASE)
    state["tied_too"] = state["tied"]
    return state


def refused(delta, error=DeltawireError, make=base_state):
    """Check that both ways of reading raise, and that neither changes anything."""
    state = make()
    before = bits_of(state)
    for read in (deltawire.resolve_delta, deltawire.apply_delta):
        with pytest.raises(error) as caught:
            read(state, delta, threads=1)
        assert isinstance(caught.value, DeltawireError)
        assert bits_of(state) == before
    return caught.value


def never_wrong(delta):
    """Check that the file is refused and nothing changes, or that it gives the right state, because a code may have two spellings.

    Return whether it was refused.
    """
    state = base_state()
    before = bits_of(state)
    try:
        deltawire.apply_delta(state, delta, threads=1)
    except DeltawireError:
        assert bits_of(state) == before
        with pytest.raises(DeltawireError):
            deltawire.resolve_delta(state, delta, threads=1)
        assert bits_of(state) == before
        return True
    assert bits_of(state) == bits_of(NEW)
    return False


def flipped(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)
