"""Test the publisher's copies of states."""

from __future__ import annotations

import weakref

import ml_dtypes
import numpy as np

from deltawire.publish.snapshots import copy_tensors
from deltawire.tensors import casting


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
