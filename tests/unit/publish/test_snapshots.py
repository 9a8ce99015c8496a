"""Test the publisher's copies of states."""

from __future__ import annotations

import weakref

import ml_dtypes
import numpy as np

from deltawire.publish.snapshots import ScratchMemory, copy_tensors
from deltawire.tensors import casting
from deltawire.tensors.bits import TensorPart, tensor_bits


def test_master_weights_are_rounded_one_tensor_at_a_time(monkeypatch):
    """Rounding all of them at once would need one more copy of the model."""
    rounded, live = casting._rounded, []

    def counted(bits):
        assert not any(made() is not None for made in live), "the previous rounded tensor is still in memory"
        made = rounded(bits)
        live.append(weakref.ref(made))
        return made

    monkeypatch.setattr(casting, "_rounded", counted)
    state = {name: np.random.default_rng(seed).standard_normal(500, np.float32) for seed, name in enumerate("abc")}
    copies = {name: np.empty(500, ml_dtypes.bfloat16) for name in state}
    copy_tensors(state, copies)
    assert len(live) == len(state)
    assert all(np.array_equal(copies[name], state[name].astype(ml_dtypes.bfloat16)) for name in state)


def test_scratch_memory_holds_a_copy_of_one_segment_after_the_other():
    random = np.random.default_rng(4)
    segments = [
        {"a": random.standard_normal((3, 5)).astype(ml_dtypes.bfloat16), "b": np.array(2.5, np.float32), "none": np.empty((0, 4), np.int8)},
        {"c": TensorPart(random.standard_normal(64).astype(np.float32), (9, 64), 128), "d": np.arange(3, dtype=np.int64)},
        {"e": np.array([np.nan, -0.0], np.float32)},
    ]
    scratch = ScratchMemory()
    scratch.copy(segments[1])
    addresses = set()
    for segment in segments:
        found = scratch.copy(segment)
        assert list(found) == list(segment)
        assert all(tensor_bits(name, found[name]).address != tensor_bits(name, segment[name]).address for name in found)
        for name, tensor in segment.items():
            own, copied = tensor_bits(name, tensor), tensor_bits(name, found[name])
            assert (own.dtype, own.shape, own.whole, own.start) == (copied.dtype, copied.shape, copied.whole, copied.start)
            assert own.bits.tobytes() == copied.bits.tobytes()
        addresses.add(tensor_bits("x", next(iter(found.values()))).address)
    assert len(addresses) == 1  # all in the same memory
