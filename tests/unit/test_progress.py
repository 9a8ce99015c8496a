"""Progress is reported while native code works, and adds up to the total."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from deltawire.codec import using_codec
from deltawire.delta import progress
from deltawire.delta.encode import write_delta
from deltawire.delta.resolve import apply_delta


def test_work_is_reported_as_it_proceeds(monkeypatch):
    done, calls, called = [500], [], threading.Event()

    def report(count):
        calls.append(count)
        called.set()

    monkeypatch.setattr(progress, "bytes_done", lambda: done[0])
    with progress.reporting(report, 100):
        done[0] += 40
        assert called.wait(60)
        assert sum(calls) == 40
    assert calls[-1] == 60
    assert sum(calls) == 100
    done[0] += 1000  # the work of another thread does not count beyond the total
    calls.clear()
    with pytest.raises(KeyError), progress.reporting(report, 100):
        raise KeyError
    assert sum(calls) <= 100


def test_native_code_counts_the_bytes_of_weights(tmp_path):
    rng = np.random.default_rng(0)
    base = {"a.weight": rng.standard_normal((300, 70)).astype(np.float32), "b.weight_packed": rng.integers(0, 256, (40, 33), np.uint8)}
    new = {name: array.copy() for name, array in base.items()}
    new["a.weight"][7] += 1
    size = sum(array.nbytes for array in base.values())
    for work in (
        lambda calls: write_delta(base, new, tmp_path / "delta", progress=calls.append),
        lambda calls: apply_delta(base, (tmp_path / "delta").read_bytes(), progress=calls.append),
    ):
        calls, before = [], progress.bytes_done()
        with using_codec("scalar"):
            work(calls)
        assert (progress.bytes_done() - before, sum(calls)) == (size, size)
