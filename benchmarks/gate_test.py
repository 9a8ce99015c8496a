"""Measure the gate's sequential test by simulation: how often it is wrong when it is read after every answer,
and how many answers it needs.

Peers: a z-test for one look at a planned number of answers, which is the floor for these error probabilities; the same z-test, looked at
all the time; and the mixture sequential probability ratio test (mSPRT) with a normal mixture, as experiment platforms use it.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from report import Table

from deltawire.live.sequential_test import Sample, log_wealth, make_blocks

ALPHA = 0.05
POWER = 0.8
_SPREAD = 0.1
"""The standard deviation of effects that mSPRT expects."""

Blocks = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]
"""The differences of all blocks, and the number of answers at the end of each."""


def measure(runs: int = 1000, longest: int = 4000) -> Table:
    """Return the table. All draws are seeded, so the numbers are the same on every machine.

    Parameters
    ----------
    runs
        The number of simulated canaries for each row.
    longest
        The number of answers after which a canary without a difference is given up.
    """
    table = Table(
        "gate-test",
        f"The gate's test, alpha {ALPHA:.0%}: {runs} simulated canaries for each row, looked at after each block",
        [
            "canary",
            "stable",
            "share",
            "proved",
            "median answers",
            "planned z-test",
            "ratio",
            "z-test, peeked: proved",
            "mSPRT: proved",
            "mSPRT: median",
        ],
    )
    random = np.random.default_rng(1)
    for share in (0.5, 0.1):
        for canary, stable in ((0.5, 0.5), (0.05, 0.05), (0.55, 0.5), (0.6, 0.5), (0.7, 0.5), (0.9, 0.5)):
            planned = _planned(canary, stable, share)
            answers = longest if planned is None else min(8 * planned, 20 * longest)
            samples = [_simulate(random, answers, canary, stable, share) for _ in range(runs)]
            ours = [_first(each, lambda part: log_wealth(part, 0.0, 2.0) >= math.log(1 / ALPHA)) for each in samples]
            peeked = [_first(each, _z_test) for each in samples]
            msprt = [_first(each, _msprt) for each in samples]
            proved = _share(ours)
            if planned is None:
                table.check(f"no more than {ALPHA:.0%} of equal canaries ({canary}, share {share:.0%}) are called better", proved <= ALPHA)
            ratio = f"{float(_median(ours)) / planned:.1f}×" if planned else ""
            medians = [_median(found) if planned else "" for found in (ours, msprt)]
            shares = [f"{_share(found):.1%}" for found in (peeked, msprt)]
            groups = [f"{canary:.2f}", f"{stable:.2f}", f"{share:.0%}"]
            table.rows.append([*groups, f"{proved:.1%}", medians[0], str(planned or ""), ratio, *shares, medians[1]])
    table.notes.append(
        f"The values are right or wrong answers. The planned z-test must know the effect before, looks once, and finds it in {POWER:.0%}"
        " of the runs. In rows with equal canaries every proof is an error. A run ends after eight times the planned answers."
    )
    return table


def _simulate(random: np.random.Generator, answers: int, canary: float, stable: float, share: float) -> Blocks:
    groups = random.random(answers) < share
    values = random.random(answers) < np.where(groups, canary, stable)
    differences = make_blocks(Sample(bool(group), float(value)) for group, value in zip(groups, values, strict=True)).differences
    ends, seen = [], set()
    for number, group in enumerate(groups.tolist(), 1):
        seen.add(group)
        if len(seen) == 2:
            ends.append(number)
            seen.clear()
    return differences, np.asarray(ends)


def _first(blocks: Blocks, reaches: object) -> float:
    """Return the number of answers at the first look that proves the canary better, or infinity. Looks are 1% apart, or one block."""
    assert callable(reaches)
    differences, ends = blocks
    count = 10
    while count <= len(differences):
        if reaches(differences[:count]):
            return float(ends[count - 1])
        count += max(1, count // 100)
    return math.inf


def _z_test(differences: npt.NDArray[np.float64]) -> bool:
    error = differences.std(ddof=1) / math.sqrt(len(differences))
    return bool(differences.mean() > NormalDist().inv_cdf(1 - ALPHA) * error)


def _msprt(differences: npt.NDArray[np.float64]) -> bool:
    """Test by the likelihood ratio of a normal mixture of effects against no effect, one-sided, with the estimated variance."""
    count, mean, variance = len(differences), float(differences.mean()), float(differences.var(ddof=1))
    if mean <= 0 or variance == 0:
        return False
    spread = _SPREAD**2
    ratio = 0.5 * math.log(variance / (variance + count * spread)) + count**2 * spread * mean**2 / (
        2 * variance * (variance + count * spread)
    )
    return ratio >= math.log(1 / (2 * ALPHA))


def _planned(canary: float, stable: float, share: float) -> int | None:
    """Return the answers that a z-test for one look needs for this effect."""
    if canary == stable:
        return None
    needed = NormalDist().inv_cdf(1 - ALPHA) + NormalDist().inv_cdf(POWER)
    variance = canary * (1 - canary) / share + stable * (1 - stable) / (1 - share)
    return math.ceil(needed**2 * variance / (canary - stable) ** 2)


def _share(found: list[float]) -> float:
    return sum(map(math.isfinite, found)) / len(found)


def _median(found: list[float]) -> str:
    middle = sorted(found)[len(found) // 2]
    return f"{middle:.0f}" if math.isfinite(middle) else "inf"
