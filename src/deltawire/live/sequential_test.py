"""Compares the means of two groups of answers while they arrive. The error bound holds at every moment, however often the gate looks.

The test is a betting confidence sequence. Answers are read in a fixed order and are cut into blocks: a block ends as soon as it has an
answer of each group. A block gives one difference: the mean of its canary answers minus `factor` times the mean of its stable answers.

Take any candidate for the expected difference. A player begins with the wealth 1 and bets on differences above the candidate. If the
expected difference is at most the candidate in every block, the wealth is a supermartingale. Then the probability that it ever reaches
1/alpha is at most alpha (Ville's inequality). So a wealth of 1/alpha refutes the candidate. The candidates that players on either side have
not refuted form the interval.

The assumptions, which docs/gate.md explains:

1. The values lie in a range that was declared before.
2. In each block, given everything before it, all answers of one group have the same expected value. It may change from block to block,
   for example over the day.
3. Neither the order of the answers nor their group depends on the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_BETS = 8
"""The wealth is spread evenly over this many bets, each half as large as the one before."""
_LARGEST_BET = 0.99
"""A player stakes at most this share of the wealth, so that no difference ruins the player."""
_STEPS = 30
"""The number of times the interval is halved when its bounds are searched."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The value of one answer, for one metric.

    Parameters
    ----------
    is_canary
        Whether the answer came through the canary.
    value
        The value.
    is_default
        Whether nobody gave the value: it is the default of its metric.
    """

    is_canary: bool
    value: float
    is_default: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """The number of answers of one group, and the sum of their values."""

    count: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float:
        """The mean value, or 0 for an empty group."""
        return self.total / self.count if self.count else 0.0

    def plus(self, value: float) -> Group:
        """Return the group with another answer."""
        return Group(self.count + 1, self.total + value)


@dataclass(frozen=True, slots=True)
class Blocks:
    """All answers, and one difference for each block of them."""

    canary: Group
    stable: Group
    differences: npt.NDArray[np.float64]


def make_blocks(samples: Iterable[Sample], factor: float = 1.0) -> Blocks:
    """Cut answers into blocks.

    Parameters
    ----------
    samples
        The answers in their order.
    factor
        The factor of the stable answers in a difference.
    """
    everything = {True: Group(), False: Group()}
    block = {True: Group(), False: Group()}
    differences = []
    for sample in samples:
        everything[sample.is_canary] = everything[sample.is_canary].plus(sample.value)
        block[sample.is_canary] = block[sample.is_canary].plus(sample.value)
        if block[True].count and block[False].count:
            differences.append(block[True].mean - factor * block[False].mean)
            block = {True: Group(), False: Group()}
    return Blocks(everything[True], everything[False], np.asarray(differences, np.float64))


@dataclass(frozen=True, slots=True)
class Interval:
    """The values of the expected difference that the blocks do not refute."""

    low: float
    high: float


def confidence_interval(differences: npt.NDArray[np.float64], lowest: float, highest: float, alpha: float) -> Interval:
    """Return the interval. Each bound is wrong, at any time of the whole sequence, with a probability of at most `alpha`.

    Parameters
    ----------
    differences
        One difference for each block.
    lowest
        The lowest difference that is possible.
    highest
        The highest difference that is possible.
    alpha
        The probability of an error of each bound.
    """
    low = _bound(differences, lowest, highest, alpha)
    high = -_bound(-differences, -highest, -lowest, alpha)
    return Interval(low, high)


def _bound(differences: npt.NDArray[np.float64], lowest: float, highest: float, alpha: float) -> float:
    """Return the largest candidate that is refuted by large differences, or `lowest`. The wealth falls as the candidate rises."""
    refuted, possible = lowest, highest
    for _ in range(_STEPS):
        candidate = (refuted + possible) / 2
        if log_wealth(differences, candidate, highest - lowest) >= math.log(1.0 / alpha):
            refuted = candidate
        else:
            possible = candidate
    return refuted


def log_wealth(differences: npt.NDArray[np.float64], candidate: float, span: float) -> float:
    """Return the logarithm of the wealth of a player who bets on differences above a candidate.

    The wealth is spread evenly over several bets. Each multiplies its part by 1 + bet · (difference − candidate) for each block.

    Parameters
    ----------
    differences
        One difference for each block.
    candidate
        The candidate for the expected difference.
    span
        The highest difference that is possible, minus the lowest.
    """
    values, counts = np.unique(differences, return_counts=True)  # the product does not depend on the order
    bets = _LARGEST_BET / span * 2.0 ** -np.arange(_BETS)
    logs = np.log1p(bets[:, None] * (values - candidate)[None, :]) @ counts
    largest = float(logs.max())
    return largest + math.log(float(np.exp(logs - largest).mean()))
