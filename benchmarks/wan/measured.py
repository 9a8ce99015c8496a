"""Measured updates, and figures that are computed from them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .generation import Loop, ideal, replay

FULL, XOR, DELTAWIRE = "full weights", "XOR + zstd-1", "deltawire"
BOUND = "full weights, at the rate of the link"
METHODS = (FULL, BOUND, XOR, DELTAWIRE)

SPEED = 2_500.0
"""Tokens per second of a region."""
TRAINING_SHARE = 0.5
"""Seconds of training for each second of generation."""

_REPLAYED = 20

_GPU_WEIGHTS = 8.2e9
_GPU_SWAP = 0.0051 + 0.0047
"""Seconds in which an H200 writes so many weights and digests them (docs/gpu-measurements.md)."""


@dataclass(frozen=True, slots=True)
class Codec:
    """Seconds of work that overlaps with transfers, and was not done while they were measured.

    Parameters
    ----------
    encode, decode
        The seconds of encoding a version during its upload, and of decoding it during its fetch.
    swap
        The seconds of writing it to the weights.
    """

    encode: float = 0.0
    decode: float = 0.0
    swap: float = 0.0

    @classmethod
    def measured(cls, block: Mapping[str, float], copies: int, weights: float, method: str) -> Codec:
        """Return the times for a model of so many blocks, from those of one block. The weights are on a GPU, which writes them.

        Parameters
        ----------
        block
            The seconds of one block (`Trainer.codecs`).
        copies
            The number of blocks.
        weights
            The number of weights.
        method
            The method.
        """
        prefix = {XOR: "xor_", DELTAWIRE: ""}[method]
        return cls(copies * block[f"{prefix}encode"], copies * block[f"{prefix}decode"], weights / _GPU_WEIGHTS * _GPU_SWAP)


@dataclass(frozen=True, slots=True)
class Update:
    """An update of all regions by one method.

    Parameters
    ----------
    method
        The method.
    weights
        The number of weights.
    rate
        The rate of each link, in bits per second.
    nbytes
        The bytes of the update.
    link_bytes
        The bytes that each region received over its link.
    publish
        Seconds from the call of publish until regions can begin to fetch.
    transfers
        Seconds in which each region then fetches and decodes it.
    decode
        The part of `transfers` in which each region only decoded.
    pauses
        Seconds in which each region writes the weights.
    is_computed
        Whether it was computed from another measurement.
    """

    method: str
    weights: float
    rate: float
    nbytes: float
    link_bytes: Sequence[float]
    publish: float
    transfers: Sequence[float]
    decode: Sequence[float]
    pauses: Sequence[float]
    is_computed: bool = False

    @property
    def serves(self) -> list[float]:
        """Seconds until each region serves."""
        return [self.publish + transfer + pause for transfer, pause in zip(self.transfers, self.pauses, strict=True)]

    @property
    def links(self) -> list[float]:
        """Seconds in which each region waited for its link."""
        return [transfer - decode for transfer, decode in zip(self.transfers, self.decode, strict=True)]

    def goodputs(self) -> list[float]:
        """Return the bits per second that each region received."""
        return [8 * self.nbytes / link for link in self.links]

    def tokens(self, generation: float, staleness: int = 1) -> float:
        """Return the tokens per second of a loop with these times, as a share of those over a network that costs nothing."""
        loop = Loop(len(self.transfers), SPEED, generation, TRAINING_SHARE * generation, staleness)
        return replay(loop, self.publish, self.transfers, self.pauses, _REPLAYED) / ideal(loop, _REPLAYED)


def mean(updates: Sequence[Update]) -> Update:
    """Return the mean of updates of the same kind."""
    first = updates[0]

    def columns(values: Sequence[Sequence[float]]) -> list[float]:
        return [statistics.mean(column) for column in zip(*values, strict=True)]

    return Update(
        first.method,
        first.weights,
        first.rate,
        statistics.mean(update.nbytes for update in updates),
        columns([update.link_bytes for update in updates]),
        statistics.mean(update.publish for update in updates),
        columns([update.transfers for update in updates]),
        columns([update.decode for update in updates]),
        columns([update.pauses for update in updates]),
    )


def scaled(measured: Update, weights: float, nbytes: float) -> Update:
    """Return a transfer of other full weights over the same links, at the goodput that was measured."""
    factor = nbytes / measured.nbytes
    return Update(
        measured.method,
        weights,
        measured.rate,
        nbytes,
        [factor * each for each in measured.link_bytes],
        factor * measured.publish,
        [factor * each for each in measured.transfers],
        [factor * each for each in measured.decode],
        [factor * each for each in measured.pauses],
        is_computed=True,
    )


def bound(weights: float, nbytes: float, rate: float, regions: int) -> Update:
    """Return a transfer of full weights that uses the whole rate of each link and nothing else. No system is faster."""
    zeros = [0.0] * regions
    return Update(BOUND, weights, rate, nbytes, [nbytes] * regions, 0.0, [8 * nbytes / rate] * regions, zeros, zeros, is_computed=True)


@dataclass(frozen=True, slots=True)
class Ablation:
    """An update with and without one thing."""

    name: str
    without: Update
    with_it: Update
