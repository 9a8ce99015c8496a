"""Measure quantising on the CPU, alone and with diff and encoding, in GB of masters per second, next to only reading the masters."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from report import Table

import deltawire
from deltawire.quantise import QuantisedLayout, Recipe
from deltawire.quantise.native import NativeQuantiser
from deltawire.quantise.recipe import SPELLINGS
from deltawire.tensors.bits import State

ROWS, COLUMNS = 2048, 4096
THREADS = 2
SEGMENT = 2
"""Weights that are quantised and encoded at a time: 16 M elements, so that their codes are still in the cache when they are encoded."""


def seconds(work: Callable[[], object], rounds: int) -> float:
    """Return the median time. The first run, in which caches and the allocator are not warm, does not count."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


class Workload:
    """A trained model: masters after an update, and what was published for the masters before it."""

    def __init__(self, masters: dict[str, NDArray[np.float32]], spelling: str) -> None:
        self.masters = masters
        self.layout = QuantisedLayout.of_state(spelling, masters)
        self.published = self.layout.quantise(self.layout.outputs, masters, threads=THREADS)
        units = [
            [name for unit in self.layout.units[at : at + SEGMENT] for name in unit] for at in range(0, len(self.layout.units), SEGMENT)
        ]
        self.segments = units
        self.memory = {name: np.empty_like(self.published[name]) for name in units[0]}
        """Memory for one segment. The other segments have the same forms."""

    def quantised(self) -> Iterator[State]:
        """Quantise one segment after the other into the same memory."""
        for names in self.segments:
            out = dict(zip(names, self.memory.values(), strict=True))
            yield self.layout.quantise(names, self.masters, self.published, out, threads=THREADS)

    def quantise(self) -> None:
        for _ in self.quantised():
            pass

    def publish(self) -> list[bytes]:
        base = self.published
        return [deltawire.encode_delta({name: base[name] for name in state}, state, threads=THREADS) for state in self.quantised()]


def measure(elements: int, rounds: int) -> Table:
    rng = np.random.default_rng(1)
    count = max(SEGMENT, elements // (ROWS * COLUMNS) // SEGMENT * SEGMENT)
    names = [f"model.layers.{i}.self_attn.o_proj.weight" for i in range(count)]
    before = {name: rng.standard_normal((ROWS, COLUMNS), np.float32) * np.float32(0.02) for name in names}
    work = {spelling: Workload(before, spelling) for spelling in SPELLINGS}
    for array in before.values():  # the masters after an update, in the same memory
        array += rng.standard_normal(array.shape, np.float32) * np.float32(6e-7)
    nbytes = sum(array.nbytes for array in before.values())
    reader, whole = NativeQuantiser(THREADS), Recipe.parse("fp8-tensor")

    def read() -> None:
        for array in before.values():
            reader.block_maxima(whole, array)  # one number for each weight: the largest magnitude

    reads: list[float] = []
    alone: dict[str, list[float]] = {spelling: [] for spelling in SPELLINGS}
    all_of_it: dict[str, list[float]] = {spelling: [] for spelling in SPELLINGS}
    sizes: dict[str, int] = {}
    for _ in range(rounds):  # in turns, so that all of them see the same noise
        reads.append(seconds(read, 3))
        for spelling, load in work.items():
            alone[spelling].append(seconds(load.quantise, 1))
            all_of_it[spelling].append(seconds(load.publish, 1))
            sizes[spelling] = sum(map(len, load.publish()))
    floor = statistics.median(reads)
    table = Table(
        "quantise-speed",
        f"Quantising {nbytes / 2**30:.2g} GiB of float32 masters, {THREADS} threads; medians of {rounds} rounds, GB of masters per second",
        ["recipe", "quantise", "× reading", "quantise, diff and encode", "× reading", "delta, bytes per million weights"],
        [["only reading the masters", f"{nbytes / floor / 1e9:.1f}", "1.00", f"{nbytes / floor / 1e9:.1f}", "1.00", ""]],
    )
    for spelling in SPELLINGS:
        once, both = statistics.median(alone[spelling]), statistics.median(all_of_it[spelling])
        speeds = [text for took in (once, both) for text in (f"{nbytes / took / 1e9:.2f}", f"{floor / took:.2f}")]
        table.rows.append([spelling, *speeds, f"{sizes[spelling] / (nbytes / 4e6):.0f}"])
    share = floor / statistics.median(all_of_it["fp8-block"])
    table.check(f"fp8-block: quantise, diff and encode at 0.5 × the speed of reading the masters (is {share:.2f})", share >= 0.5)
    table.notes.append(
        f"Weights are normal with standard deviation 0.02, in matrices of {ROWS} × {COLUMNS}. The update is noise of 6e-7. "
        f"Scales are sticky. {SEGMENT} matrices are quantised at a time, into the same memory, and encoded against the version before."
    )
    return table
