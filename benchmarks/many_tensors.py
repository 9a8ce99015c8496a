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
from workloads import BF16, State, code_bound_bits, codes_of, synthetic_masters, synthetic_update, update_size

import deltawire
from deltawire import Publisher, Subscriber
from deltawire.quantise import quantise_state

ELEMENTS = 2048
DENSITY = 0.01
STEPS = 5
"""The versions of which the median counts."""
LARGER = (512, 768)
"""The shape of a matrix with 0.2 MB of 4-bit codes."""
MADE = 128
"""The different matrices of a quantised state, which has copies of them."""


def measure(tensors: int) -> list[Table]:
    """Measure many tensors, and a tenth as many that are larger and quantised."""
    return [_measure_times(tensors), _measure_quantised(tensors // 10)]


def _measure_times(tensors: int) -> Table:
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


def _measure_quantised(tensors: int) -> Table:
    table = Table(
        "many-tensors-quantised",
        f"{tensors:,} tensors of 4-bit codes (nvfp4), 0.005% of the codes of a tensor changed",
        ["each tensor", "tensors that change", "changes in each", "bytes of the file for each", "order-0 bound", "beyond it"],
    )
    rows, columns = LARGER
    for shape, share in (((rows, columns), 1), ((rows, columns), 10), ((rows // 2, columns), 1)):
        size, bound, changed = _quantised_update(tensors, shape, share)
        mentioned = len(range(0, tensors, share))
        codes = shape[0] * shape[1]
        table.rows.append(
            [
                f"{codes:,} codes, {codes / 2e6:.1f} MB",
                f"{mentioned:,}",
                f"{changed / mentioned:.1f}",
                f"{size / mentioned:.1f}",
                f"{bound / mentioned:.1f}",
                f"{(size - bound) / mentioned:.1f}",
            ]
        )
        name = f"{mentioned:,} tensors of {codes / 2e6:.1f} MB change"
        table.check(f"{name}: at most 24 bytes for each, with its changes (is {size / mentioned:.1f})", size <= 24 * mentioned)
        beyond = size - bound
        table.check(f"{name}: at most 24 bytes for each beyond its changes (is {beyond / mentioned:.1f})", beyond <= 24 * mentioned)
    table.notes.append(
        "The order-0 bound of its changes is that of the quantised updates, by tensor. Where the bound alone is above 24 bytes, no file "
        "can have 24 bytes for each tensor. Tensors that do not change take no bytes of their own; the gaps between changes become longer."
    )
    return table


def _quantised_update(tensors: int, shape: tuple[int, int], share: int) -> tuple[int, float, int]:
    """Return the bytes of a delta in which every `share`-th tensor changes, the order-0 bound of its changes in bytes, and their number."""
    made = [_quantised_matrix(shape, seed) for seed in range(MADE)]
    base: State = {}
    new: State = {}
    bound, changed = 0.0, 0
    facts = [_codes_changed(old, now) for old, now in made]
    for number in range(tensors):
        layer = f"model.layers.{number // 256}.mlp.experts.{number % 256}.down_proj"
        old, now = made[number % MADE]
        kept = {name.replace("down_proj", layer, 1): tensor.copy() for name, tensor in old.items()}  # copies, because equal memory is tied
        base |= kept
        if number % share:
            new |= kept
            continue
        new |= {name.replace("down_proj", layer, 1): tensor for name, tensor in now.items()}
        bound += facts[number % MADE][0]
        changed += facts[number % MADE][1]
    return len(deltawire.encode_delta(base, new)), bound, changed


def _quantised_matrix(shape: tuple[int, int], seed: int) -> tuple[State, State]:
    """Return a matrix before and after an update that changes as many bf16 weights as a recorded one."""
    size = shape[0] * shape[1]
    old, new = (
        {"down_proj.weight": masters.astype(BF16).reshape(shape)} for masters in synthetic_masters(size, update_size(0.0108, BF16), 1, seed)
    )
    before = {name: np.asarray(tensor) for name, tensor in quantise_state(old, "nvfp4").items()}
    return before, {name: np.asarray(tensor) for name, tensor in quantise_state(new, "nvfp4", before).items()}


def _codes_changed(before: State, after: State) -> tuple[float, int]:
    """Return the order-0 bound of the changed codes of a matrix in bytes, and their number. Its scales must not change."""
    assert all(np.array_equal(before[name], after[name]) for name in before if not name.endswith("weight_packed"))
    old, new = (codes_of(state["down_proj.weight_packed"]) for state in (before, after))
    return code_bound_bits(old, new, "e2m1") / 8, int(np.count_nonzero(old != new))


def _updates(tensors: int) -> Iterator[NDArray[Any]]:
    """Yield the states before and after an update in turn, each time as rows of a new array."""
    for state in itertools.cycle(synthetic_update(tensors * ELEMENTS, DENSITY)):
        yield state.reshape(tensors, ELEMENTS).copy()


def _clocked(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that a call takes, by the clock and of processors."""
    start, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - busy
