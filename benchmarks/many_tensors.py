"""Measure states of many small tensors, such as the experts of a large model, where work for each tensor counts more than its elements."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from report import Table
from workloads import synthetic_update

import deltawire
from deltawire import Publisher, Subscriber

ELEMENTS = 2048
DENSITY = 0.01
STEPS = 5
"""The versions of which the median counts."""


def measure(tensors: int) -> Table:
    table = Table(
        "many-tensors",
        f"{tensors:,} tensors of {ELEMENTS:,} bf16 weights, {DENSITY:.0%} changed: seconds, medians of {STEPS} versions",
        ["", "seconds", "processor seconds", "µs per tensor"],
    )
    names = [f"model.layers.{number // 256}.mlp.experts.{number % 256}.weight" for number in range(tensors)]
    updates = _updates(tensors)
    kinds: list[tuple[str, Callable[[NDArray[Any]], list[Any]]]] = [("NumPy arrays", list)]
    try:
        import torch

        kinds.append(("torch tensors", lambda rows: list(torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16))))
    except ImportError:
        pass
    size = changed = 0
    for kind, split in kinds:
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in ("publish", "sync", "encode_delta", "apply_delta")}
        with tempfile.TemporaryDirectory() as folder, Publisher(folder, attachments={}) as publisher, Subscriber(folder) as subscriber:
            old, state = None, dict(zip(names, split(next(updates)), strict=True))
            publisher.publish(state)
            subscriber.sync()
            for _ in range(STEPS):
                old, state = state, dict(zip(names, split(next(updates)), strict=True))
                took["publish"].append(_clocked(lambda state=state: publisher.publish(state)))
                publisher.flush()
                took["sync"].append(_clocked(subscriber.sync))
                took["encode_delta"].append(_clocked(lambda old=old, state=state: deltawire.encode_delta(old, state)))
                delta = deltawire.encode_delta(old, state)
                took["apply_delta"].append(_clocked(lambda old=old, delta=delta: deltawire.apply_delta(old, delta)))
            version = publisher.version
            assert version is not None
            size, changed = version.bytes, version.changed
        for call, times in took.items():
            wall, work = (statistics.median(column) for column in zip(*times, strict=True))
            table.rows.append([f"`{call}`, {kind}", f"{wall:.2f}", f"{work:.2f}", f"{wall / tensors * 1e6:.1f}"])
            if kind == "NumPy arrays" and call in ("publish", "sync") and tensors == 100_000:
                goal = {"publish": 1.0, "sync": 0.6}[call]
                table.check(f"`{call}` takes at most {goal} s", wall <= goal)
    table.notes.append(
        f"A version is {size / tensors:.1f} bytes per tensor, {8 * size / changed:.2f} bits per changed weight. "
        "`sync` fetches, checks and writes it. A subscriber's weights are NumPy arrays in both cases."
    )
    table.check("a version has at most 24 bytes per tensor", size <= 24 * tensors)
    return table


def _updates(tensors: int) -> Iterator[NDArray[Any]]:
    """Yield the states before and after an update in turn, each time as rows of a new array."""
    for state in itertools.cycle(synthetic_update(tensors * ELEMENTS, DENSITY)):
        yield state.reshape(tensors, ELEMENTS).copy()


def _clocked(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that a call takes, by the clock and of processors."""
    start, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - busy
