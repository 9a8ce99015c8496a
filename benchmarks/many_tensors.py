"""Measure states of many small tensors, such as the experts of a large model, where work for each tensor counts more than its elements.

python benchmarks/many_tensors.py        # only the sizes, which do not depend on what else the machine does
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from report import Table, keep, show
from workloads import (
    BF16,
    FP8_E4M3,
    State,
    code_bound_bits,
    codes_of,
    order0_bound_bits,
    synthetic_masters,
    synthetic_update,
    update_size,
)

import deltawire
from deltawire import Publisher, Subscriber
from deltawire.quantise import quantise_state

ELEMENTS = 2048
DENSITY = 0.01
STEPS = 5
"""The versions of which the median counts."""
RARE = 5e-5
"""The share of the weights that changes in larger tensors."""
LARGER_BYTES = 200_000
LARGER = (512, 768)
"""The shape of a matrix with 0.2 MB of 4-bit codes."""
MADE = 128
"""The different matrices of a quantised state, which has copies of them."""


def measure(tensors: int) -> list[Table]:
    """Measure many tensors, and a tenth as many that are larger."""
    return [_measure_times(tensors), measure_sizes(tensors // 10)]


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


def measure_sizes(tensors: int) -> Table:
    """Measure the bytes of a delta for each tensor that changes, if few elements of large tensors do."""
    table = Table(
        "many-tensors-sizes",
        f"{tensors:,} tensors of bf16, fp8 and nvfp4, 0.005% of the elements of a tensor changed",
        ["each tensor", "tensors that change", "changes in each", "bytes of the file for each", "order-0 bound", "beyond it"],
    )
    for form, dtype in (("bf16", BF16), ("fp8", FP8_E4M3)):
        elements = LARGER_BYTES // dtype.itemsize
        _add_size(table, f"{form}, 0.2 MB", f"{elements:,} weights", tensors, _plain_tensors(elements, dtype))
    rows, columns = LARGER
    for shape, share in (((rows, columns), 1), ((rows, columns), 10), ((rows // 2, columns), 1)):
        codes = shape[0] * shape[1]
        made = [_quantised_matrix(shape, seed) for seed in range(MADE)]
        _add_size(table, f"nvfp4, {codes / 2e6:.1f} MB", f"{codes:,} codes", tensors, made, share)
    table.notes.append(
        "The order-0 bound of its changes is that of the tables of sizes, by tensor. Where the bound alone is above 24 bytes, no file "
        "can have 24 bytes for each tensor. Tensors that do not change take no bytes of their own; the gaps between changes become longer."
    )
    return table


@dataclass(frozen=True)
class _Made:
    """A tensor before and after an update, with its scales, if it has any. Its name begins with "down_proj"."""

    old: State
    new: State
    bound: float
    """The order-0 bound of its changes in bytes."""
    changed: int


def _add_size(table: Table, name: str, elements: str, tensors: int, made: list[_Made], share: int = 1) -> None:
    """Measure a delta in which every `share`-th tensor changes. Add a row, and the goals for the bytes of each tensor that changes."""
    base: State = {}
    new: State = {}
    for number in range(tensors):
        layer = f"model.layers.{number // 256}.mlp.experts.{number % 256}.down_proj"
        each = made[number % len(made)]
        kept = {name.replace("down_proj", layer, 1): tensor.copy() for name, tensor in each.old.items()}  # copies: equal memory is tied
        base |= kept
        new |= kept if number % share else {name.replace("down_proj", layer, 1): tensor for name, tensor in each.new.items()}
    changing = [each for each in (made[number % len(made)] for number in range(0, tensors, share)) if each.changed]
    mentioned = len(changing)
    size, bound = len(deltawire.encode_delta(base, new)) / mentioned, sum(each.bound for each in changing) / mentioned
    changes = sum(each.changed for each in changing) / mentioned
    table.rows.append([f"{name}, {elements}", f"{mentioned:,}", f"{changes:.1f}", f"{size:.1f}", f"{bound:.1f}", f"{size - bound:.1f}"])
    what = f"{mentioned:,} tensors of {name} change"
    table.check(f"{what}: at most 24 bytes for each, with its changes (is {size:.1f})", size <= 24)
    table.check(f"{what}: at most 24 bytes for each beyond its changes (is {size - bound:.1f})", size - bound <= 24)


def _plain_tensors(elements: int, dtype: np.dtype[Any]) -> list[_Made]:
    """Return tensors without scales, of bf16 or fp8."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    made = []
    for old, new in zip(*(state.reshape(MADE, elements) for state in synthetic_update(MADE * elements, RARE, dtype)), strict=True):
        before, after = old.view(unsigned), new.view(unsigned)
        bound = order0_bound_bits(old, new) if dtype == BF16 else code_bound_bits(before, after, "e4m3")
        name = "down_proj.weight"
        made.append(_Made({name: old}, {name: new}, bound / 8, int(np.count_nonzero(before != after))))
    return made


def _quantised_matrix(shape: tuple[int, int], seed: int) -> _Made:
    """Return a matrix before and after an update that changes as many bf16 weights as a recorded one. Its scales do not change."""
    size = shape[0] * shape[1]
    old, new = (
        {"down_proj.weight": masters.astype(BF16).reshape(shape)} for masters in synthetic_masters(size, update_size(0.0108, BF16), 1, seed)
    )
    before = {name: np.asarray(tensor) for name, tensor in quantise_state(old, "nvfp4").items()}
    after = {name: np.asarray(tensor) for name, tensor in quantise_state(new, "nvfp4", before).items()}
    assert all(np.array_equal(before[name], after[name]) for name in before if not name.endswith("weight_packed"))
    was, now = (codes_of(state["down_proj.weight_packed"]) for state in (before, after))
    return _Made(before, after, code_bound_bits(was, now, "e2m1") / 8, int(np.count_nonzero(was != now)))


def _updates(tensors: int) -> Iterator[NDArray[Any]]:
    """Yield the states before and after an update in turn, each time as rows of a new array."""
    for state in itertools.cycle(synthetic_update(tensors * ELEMENTS, DENSITY)):
        yield state.reshape(tensors, ELEMENTS).copy()


def _clocked(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that a call takes, by the clock and of processors."""
    start, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - busy


if __name__ == "__main__":
    sizes = measure_sizes(10_000)
    show(sizes)
    keep(sizes)
