"""Find members whose own mismatch stands out: a broken engine shows there first."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from .mismatch import TokenMismatch

Sums = dict[tuple[str, int], tuple[int, float]]
"""The number of tokens and the sum of their KL estimates, by member and lag."""


@dataclass(frozen=True, slots=True)
class AlarmRule:
    """When a member's mismatch stands out.

    A member is compared with the others on tokens of the same lag, because older policies differ more. The KL that the others would
    have is the median of theirs at each lag. A member that few others can be compared with never stands out.

    Parameters
    ----------
    factor
        The member's KL must be this many times as large as that of the others.
    least_kl
        The member's KL must be at least this large, in nats per token.
    least_tokens
        The smallest number of tokens of a member at a lag that counts.
    least_others
        The smallest number of other members to compare with.
    steps
        The number of last steps whose tokens count.
    exclude
        Take a member that stands out out of the fleet: it gets no more tasks, and its results are refused.
    """

    factor: float = 10.0
    least_kl: float = 0.01
    least_tokens: int = 256
    least_others: int = 2
    steps: int = 8
    exclude: bool = False

    def __post_init__(self) -> None:
        if not self.factor > 1 or not self.least_kl >= 0:
            raise ValueError("factor must be above 1, and least_kl at least 0")
        if min(self.least_tokens, self.least_others, self.steps) < 1:
            raise ValueError("least_tokens, least_others and steps must be at least 1")


@dataclass(frozen=True, slots=True)
class StandingOut:
    """A member whose mismatch stands out: its KL, that of the others on tokens of the same lags, and the number of its tokens."""

    member: str
    kl: float
    others: float
    tokens: int


@dataclass(slots=True)
class MismatchAlarm:
    """Remembers the mismatch of the last steps, and tells each member that begins to stand out once."""

    rule: AlarmRule = field(default_factory=AlarmRule)
    _steps: deque[Sums] = field(default_factory=deque)
    _told: set[str] = field(default_factory=set)

    def note(self, tokens: TokenMismatch, members: tuple[str, ...]) -> list[StandingOut]:
        """Note the tokens of a step, with the member of each completion. Return the members that stand out now and did not before."""
        self._steps.append(_sums(tokens, members))
        while len(self._steps) > self.rule.steps:
            self._steps.popleft()
        found = standing_out(_total(self._steps), self.rule)
        new = [each for each in found if each.member not in self._told]
        self._told = {each.member for each in found}
        return new

    def forget(self, member: str) -> None:
        """Forget the tokens of a member."""
        for sums in self._steps:
            for key in [key for key in sums if key[0] == member]:
                del sums[key]


def standing_out(sums: Mapping[tuple[str, int], tuple[int, float]], rule: AlarmRule) -> list[StandingOut]:
    """Return the members whose mismatch stands out, by name."""
    at: dict[int, dict[str, float]] = defaultdict(dict)
    for (member, lag), (tokens, total) in sums.items():
        if tokens >= rule.least_tokens:
            at[lag][member] = total / tokens
    found = []
    for member in sorted({member for member, _ in sums}):
        own = others = 0.0
        count = 0
        for lag, kls in at.items():
            rest = [kl for other, kl in kls.items() if other != member]
            if member in kls and len(rest) >= rule.least_others:
                tokens, total = sums[member, lag]
                own, others, count = own + total, others + tokens * median(rest), count + tokens
        if count and own / count >= rule.least_kl and own > rule.factor * others:
            found.append(StandingOut(member, own / count, others / count, count))
    return found


def _sums(tokens: TokenMismatch, members: tuple[str, ...]) -> Sums:
    estimates = np.expm1(tokens.drift) - tokens.drift
    names = np.array(members, object)[tokens.row]
    found: Sums = {}
    for member in sorted(set(members)):
        own = names == member
        for lag in np.unique(tokens.lag[own]):
            here = own & (tokens.lag == lag)
            found[member, int(lag)] = (int(here.sum()), float(estimates[here].sum()))
    return found


def _total(steps: deque[Sums]) -> Sums:
    total: Sums = {}
    for sums in steps:
        for key, (tokens, kl) in sums.items():
            before = total.get(key, (0, 0.0))
            total[key] = (before[0] + tokens, before[1] + kl)
    return total
