"""Measure quantising on the CPU, alone and with diff and encoding, in GB of master weights per second, next to only reading them."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from report import Table

import deltawire
from deltawire.publish.upload.segments import SEGMENT_BYTES
from deltawire.quantise import QuantisedLayout, Recipe
from deltawire.quantise.encode_with_codes import ReusedMemory
from deltawire.quantise.native import NativeQuantiser
from deltawire.quantise.quantise import quantise_to_encode
from deltawire.quantise.recipe import SPELLINGS

ROWS, COLUMNS = 2048, 4096
THREADS = 2
SEGMENT = SEGMENT_BYTES // (ROWS * COLUMNS)
"""The number of weights that are quantised and encoded at a time: as many as a publisher takes if their codes have one byte."""
LEAST = 4
"""The least number of weights. With fewer, one thread codes all changes."""


@dataclass
class Best:
    """The shortest time of several runs, and the least processor time of all threads together. Other processes disturb these least."""

    wall: float = math.inf
    longest: float = 0.0
    processor: float = math.inf
    last: float = math.inf
    """The time of the last run."""

    def run(self, work: Callable[[], object]) -> None:
        start, before = time.perf_counter(), time.process_time()
        work()
        self.last = time.perf_counter() - start
        self.wall, self.longest = min(self.wall, self.last), max(self.longest, self.last)
        self.processor = min(self.processor, time.process_time() - before)


class Beside:
    """Runs some work in turns with only reading the master weights.

    The speed of reading differs from second to second, so each run is compared with reading right before and right after it.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self.best, self._work = Best(), work
        self._shares: list[float] = []

    def run(self, read: Callable[[], object], reading: Best) -> None:
        reading.run(read)
        before = reading.last
        self.best.run(self._work)
        reading.run(read)
        self._shares.append((before + reading.last) / 2 / self.best.last)

    @property
    def share(self) -> float:
        """The speed, as a multiple of reading: the median of all runs."""
        return statistics.median(self._shares)


class Workload:
    """A trained model: master weights after an update, and what was published for those before it."""

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
        self.reused = ReusedMemory()

    def quantise(self) -> None:
        """Quantise one segment after the other into the same memory."""
        for names in self.segments:
            out = dict(zip(names, self.memory.values(), strict=True))
            self.layout.quantise(names, self.masters, self.published, out, threads=THREADS)

    def publish(self, *, keeps_codes: bool = True) -> list[bytes]:
        """Quantise and encode one segment after the other, as a publisher does. By default it makes skips, so it keeps codes."""
        deltas = []
        for names in self.segments:
            base = {name: self.published[name] for name in names}
            state = quantise_to_encode(self.layout, names, self.masters, self.published, self.reused, THREADS, keeps_codes=keeps_codes)
            deltas.append(deltawire.encode_delta(base, state, threads=THREADS))
        return deltas


def measure(elements: int, rounds: int) -> Table:
    rng = np.random.default_rng(1)
    wanted = max(LEAST, elements // (ROWS * COLUMNS))
    count = wanted // SEGMENT * SEGMENT or wanted
    names = [f"model.layers.{i}.self_attn.o_proj.weight" for i in range(count)]
    before = {name: rng.standard_normal((ROWS, COLUMNS), np.float32) * np.float32(0.02) for name in names}
    work = {spelling: Workload(before, spelling) for spelling in SPELLINGS}
    for array in before.values():  # the master weights after an update, in the same memory
        array += rng.standard_normal(array.shape, np.float32) * np.float32(6e-7)
    nbytes = sum(array.nbytes for array in before.values())
    reader, whole = NativeQuantiser(THREADS), Recipe.parse("fp8-tensor")

    def read() -> None:
        for array in before.values():
            reader.block_maxima(whole, array)  # one number for each weight: the largest magnitude

    reading = Best()
    quantising = {spelling: Beside(load.quantise) for spelling, load in work.items()}
    publishing = {spelling: Beside(load.publish) for spelling, load in work.items()}
    without = Beside(functools.partial(work["fp8-block"].publish, keeps_codes=False))
    sizes = {spelling: sum(map(len, load.publish())) for spelling, load in work.items()}  # also warms memory up
    for _ in range(2 * rounds):
        for each in (*quantising.values(), *publishing.values(), without):
            each.run(read, reading)
    floor = f"{nbytes / reading.wall / 1e9:.1f}"
    table = Table(
        "quantise-speed",
        f"Quantising {nbytes / 2**30:.2g} GiB of float32 master weights, {THREADS} threads: "
        f"GB of master weights per second, best of {2 * rounds} runs; "
        "shares of reading are medians",
        [
            "recipe",
            "quantise",
            "× reading",
            "quantise, diff and encode",
            "× reading",
            "processor time, × reading",
            "delta, bytes per million weights",
        ],
        [["only reading the master weights", floor, "1.00", floor, "1.00", "1.00", ""]],
    )

    def row(name: str, spelling: str, both: Beside) -> list[str]:
        alone = quantising[spelling]
        speeds = [text for each in (alone, both) for text in (f"{nbytes / each.best.wall / 1e9:.2f}", f"{each.share:.2f}")]
        more = f"{both.best.processor / reading.processor:.2f}"
        return [name, *speeds, more, f"{sizes[spelling] / (nbytes / 4e6):.0f}"]

    table.rows += [row(spelling, spelling, publishing[spelling]) for spelling in SPELLINGS]
    table.rows.append(row("fp8-block, without skips", "fp8-block", without))
    goal = "quantise, diff and encode at 0.5 × the speed of reading the master weights"
    for name, each in (("fp8-block", publishing["fp8-block"]), ("fp8-block, without skips", without)):
        table.check(f"{name}: {goal}, the median of runs beside readings (is {each.share:.2f})", each.share >= 0.5)
        best = reading.wall / each.best.wall  # the quotient of the table's columns
        table.check(f"{name}: the same, the best of its runs beside the best reading (is {best:.2f})", best >= 0.5)
    table.notes.append(
        f"Weights are normal with standard deviation 0.02, in matrices of {ROWS} × {COLUMNS}. The update is noise of 6e-7. "
        f"Scales are sticky. {min(SEGMENT, count)} matrices at a time are encoded against the version before, and quantised on the way: "
        "codes are in the cache then. They are also written to memory, which is used again. fp8-block writes them only for a publisher "
        "that makes skips, as publishers do by default; the last row is one that makes none. "
        "Each run is compared with reading right before and after it. "
        f"Reading varied from {nbytes / reading.longest / 1e9:.0f} to {floor} GB/s."
    )
    return table
