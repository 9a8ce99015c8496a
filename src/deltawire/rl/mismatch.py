"""How far the policy that drew the tokens is from the trainer's own: overall, by lag, by member and by engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The mismatch of some tokens. The ratio of a token is its probability in the trainer's policy, divided by that when it was drawn.

    Parameters
    ----------
    tokens
        The number of tokens.
    kl
        The mean of r − log r − 1 over the ratios r, an estimate of KL(behaviour ‖ trainer) in nats ("k3").
    logp_difference_mean
        The mean of the absolute differences of log-probs.
    logp_difference_max
        The largest of them.
    ratio_min
        The smallest ratio, before any bound.
    ratio_mean
        The mean of the ratios.
    ratio_max
        The largest ratio.
    truncated_ratio
        The share of tokens whose importance weight was out of bounds.
    ess
        The effective sample size as a share of the tokens: (Σr)² / (n Σr²).
    lag
        The mean number of steps that the policy was behind when it drew a token (staleness).
    """

    tokens: int
    kl: float
    logp_difference_mean: float
    logp_difference_max: float
    ratio_min: float
    ratio_mean: float
    ratio_max: float
    truncated_ratio: float
    ess: float
    lag: float

    @property
    def fields(self) -> dict[str, float]:
        """The numbers by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True, slots=True, eq=False)
class TokenMismatch:
    """Values of single tokens, in arrays of the same length.

    Parameters
    ----------
    drift
        The log of the ratio.
    truncated
        Whether its importance weight was out of bounds.
    lag
        The number of steps that the policy was behind.
    row
        The completion that it belongs to.
    """

    drift: NDArray[np.float64]
    truncated: NDArray[np.bool_]
    lag: NDArray[np.int64]
    row: NDArray[np.int64]

    @classmethod
    def join(cls, parts: Sequence[TokenMismatch]) -> TokenMismatch:
        """Return all tokens of several parts."""
        return cls(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(cls)))

    def only(self, which: NDArray[np.bool_]) -> TokenMismatch:
        """Return some of the tokens."""
        return TokenMismatch(self.drift[which], self.truncated[which], self.lag[which], self.row[which])

    def measure(self) -> Mismatch | None:
        """Return the mismatch of these tokens, or None if there are none."""
        if not len(self.drift):
            return None
        ratio, difference = np.exp(self.drift), np.abs(self.drift)
        scaled = np.exp(self.drift - self.drift.max())  # the factor cancels out of `ess`, and the squares of tiny ratios would be 0
        return Mismatch(
            tokens=len(ratio),
            kl=float((np.expm1(self.drift) - self.drift).mean()),
            logp_difference_mean=float(difference.mean()),
            logp_difference_max=float(difference.max()),
            ratio_min=float(ratio.min()),
            ratio_mean=float(ratio.mean()),
            ratio_max=float(ratio.max()),
            truncated_ratio=float(self.truncated.mean()),
            ess=float(scaled.sum() ** 2 / (len(scaled) * np.square(scaled).sum())),
            lag=float(self.lag.mean()),
        )


@dataclass(frozen=True, slots=True)
class Group:
    """The mismatch of the tokens that have something in common.

    Parameters
    ----------
    by
        What they have in common: "all", "lag", "member" or "engine".
    name
        Its value. It is None for "all".
    mismatch
        Their mismatch.
    """

    by: str
    name: str | None
    mismatch: Mismatch


def mismatch_groups(tokens: TokenMismatch, members: Sequence[str], engines: Mapping[str, str]) -> Iterator[Group]:
    """Yield the mismatch of all tokens, then by lag, by member and by engine.

    `members` has the member of each completion, and `engines` the engine of each member that has told it.
    """
    every = tokens.measure()
    if every is None:
        return
    yield Group("all", None, every)
    names = np.array(members)[tokens.row]
    kinds = np.array([engines.get(member, "") for member in members])[tokens.row]
    for by, labels in (("lag", tokens.lag), ("member", names), ("engine", kinds)):
        for label in np.unique(labels):
            some = tokens.only(labels == label).measure()
            if some is not None and str(label):
                yield Group(by, str(label), some)
