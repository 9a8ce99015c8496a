"""Decides whether a canary is promoted or rolled back. Pure rules without I/O.

A limit compares the canary with stable, for one metric. The test of `sequential_test` says whether the limit holds, is broken, or is open.

- A *metric* is a limit that must hold before the canary is promoted.
- A *monitor* is a limit that need not be proved.
- The canary is rolled back if any limit is broken.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import UnusableGate
from ..format.records.gate_records import MOST_LIMITS, EvaluationResult, GroupMean, LimitFinding
from .sequential_test import Group, Sample, confidence_interval, make_blocks

Outcome = Literal["promote", "rollback", "continue"]

LEAST_FEEDBACK = 3
"""A limit of a metric with a default holds only if this many answers of each channel have feedback."""

_NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
_LIMIT = re.compile(rf"(.{{1,100}}?)(?::([+-])({_NUMBER})(%?))?")
_UNSIGNED = re.compile(rf"([ -~]{{1,100}}?):({_NUMBER}%?)")
_SCORE = re.compile(rf"(.{{1,100}}):([+-]?{_NUMBER})")


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit for the mean of a metric among canary answers, relative to its mean among stable answers.

    Parameters
    ----------
    text
        The limit as people write it, such as "length:+20%".
    name
        The name of the metric.
    is_upper
        Whether the canary must stay below the limit. Otherwise it must stay above it.
    factor
        The limit is this multiple of the mean of stable, …
    offset
        … plus this value.
    must_hold
        Whether the limit must be proved before a promotion.
    """

    text: str
    name: str
    is_upper: bool
    factor: float
    offset: float
    must_hold: bool

    @classmethod
    def parse(cls, text: str, *, must_hold: bool) -> Limit:
        """Return the limit that a text describes. Raises `UnusableGate`.

        Parameters
        ----------
        text
            NAME:+20% (at most 20% above stable), NAME:-0.01 (at most 0.01 below stable), and so on. NAME alone means NAME:-0, above stable.
        must_hold
            Whether the limit must be proved before a promotion.
        """
        form = _LIMIT.fullmatch(text)
        if (unsigned := _UNSIGNED.fullmatch(text)) is not None:
            name, size = unsigned[1], unsigned[2]
            raise UnusableGate(
                f"the limit {text!r} has no sign.",
                hint=f"Write {name}:+{size} (at most that much above stable) or {name}:-{size} (at most that much below it).",
            )
        if form is not None and form[2] is None and not must_hold and text.isprintable():
            raise UnusableGate(f"{text!r} is not a limit.", hint=f"For --monitor, write NAME:+20%, such as {text}:+20%.")
        if form is None or not text.isprintable():
            raise UnusableGate(f"{text!r} is not a limit.", hint="Write NAME:+20%, NAME:-20%, NAME:+0.05 or NAME:-0.05.")
        name, sign, digits, percent = form[1], form[2] or "-", form[3] or "0", form[4] or ""
        size = float(digits) if sign == "+" else -float(digits)
        if percent and not -100.0 < size <= 10_000.0:
            raise UnusableGate(f"the limit {text!r} can never be broken.", hint="Use more than -100% and at most +10000%.")
        factor, offset = (1.0 + size / 100.0, 0.0) if percent else (1.0, size)
        return cls(f"{name}:{sign}{digits}{percent}", name, sign == "+", factor, offset, must_hold)


@dataclass(frozen=True, slots=True)
class Range:
    """The lowest and the highest value that a metric can have. Values outside of it count as the nearest value inside.

    Parameters
    ----------
    low
        The lowest value.
    high
        The highest value. It must be above `low`.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise UnusableGate(f"{self.low:g} to {self.high:g} is not a range.", hint="Give two finite numbers, the lower one first.")

    def clip(self, value: float) -> float:
        """Return the nearest value inside the range.

        Parameters
        ----------
        value
            The value of one answer.
        """
        return min(max(value, self.low), self.high)


@dataclass(frozen=True, slots=True)
class GatePolicy:
    """The proofs that a canary has to give, and the bounds of the test.

    Parameters
    ----------
    limits
        The limits, which are metrics and monitors.
    alpha
        The largest allowed probability of a wrong promotion, and of a wrong rollback because of a limit.
    min_answers
        No limit is judged before the canary has given this many answers that count. Nothing is promoted before each limit, also a monitor,
        has this many values of each channel. Only limits that may stay empty need none.
    min_seconds
        A canary is not promoted before it has been on its channel for this many seconds.
    max_seconds
        The canary is rolled back if there is no decision after this time.
    evaluate
        Whether an evaluation must pass before a promotion.
    attempts
        How many times the evaluation command is started at most, if it does not finish.
    """

    limits: tuple[Limit, ...] = ()
    alpha: float = 0.05
    min_answers: int = 100
    min_seconds: float = 0.0
    max_seconds: float = 24 * 3600.0
    evaluate: bool = False
    attempts: int = 3

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha <= 0.5:
            raise UnusableGate(f"an error probability of {self.alpha:g} is not useful.", hint="Use a number above 0 and at most 0.5.")
        if self.min_answers < 1 or self.attempts < 1 or not 0.0 <= self.min_seconds <= self.max_seconds < math.inf:
            raise UnusableGate("min_answers and attempts must be at least 1, and min_seconds from 0 to max_seconds.")
        if not self.evaluate and not any(limit.must_hold for limit in self.limits):
            raise UnusableGate(
                "the gate has nothing to prove.", hint="Give it --evaluate CMD or --metric LIMIT. A limit of --monitor need not be proved."
            )
        if len({limit.text for limit in self.limits}) != len(self.limits) or len(self.limits) > MOST_LIMITS:
            raise UnusableGate(f"a limit is given twice, or there are more than {MOST_LIMITS}.")


@dataclass(frozen=True, slots=True)
class Decision:
    """The next step for a canary, and the reason for it."""

    outcome: Outcome
    why: str


def judge(limit: Limit, samples: Sequence[Sample], values: Range, policy: GatePolicy) -> LimitFinding:
    """Judge one limit.

    It is open as long as every value is the default of the metric. It does not hold either while one of the channels is silent.

    Parameters
    ----------
    limit
        The limit.
    samples
        The answers of both groups, in an order that does not depend on their values.
    values
        The range of the metric.
    policy
        What the canary has to show. If a limit is broken wrongly, the canary is rolled back wrongly, so all limits share `alpha` for that.
        A promotion needs the proof of all metrics, so each proof has `alpha` alone.
    """
    if limit.factor != 1.0 and values.low < 0.0:
        raise UnusableGate(f"{limit.name} can be negative, so {limit.text!r} cannot be its limit.", hint="Use a limit without %.")
    clipped = (Sample(each.is_canary, values.clip(each.value)) for each in samples)
    blocks = make_blocks(clipped, limit.factor)
    lowest, highest = values.low - limit.factor * values.high, values.high - limit.factor * values.low
    shared = policy.alpha / len(policy.limits)
    proof, disproof = (confidence_interval(blocks.differences, lowest, highest, alpha) for alpha in (policy.alpha, shared))
    if limit.is_upper:
        holds, broken, low, high = proof.high < limit.offset, disproof.low > limit.offset, disproof.low, proof.high
    else:
        holds, broken, low, high = proof.low > limit.offset, disproof.high < limit.offset, proof.low, disproof.high
    if blocks.canary.count < policy.min_answers or all(each.is_default for each in samples):
        verdict = "open"
    else:
        verdict = "holds" if holds and not silent_channels(samples) else "broken" if broken else "open"
    canary, stable = _mean(blocks.canary), _mean(blocks.stable)
    return LimitFinding(limit.text, limit.must_hold, canary, stable, len(blocks.differences), low, high, verdict)


def silent_channels(samples: Sequence[Sample]) -> list[str]:
    """Return which of "the canary" and "stable" have defaults and hardly any feedback, so that defaults would prove a limit.

    Parameters
    ----------
    samples
        The answers of both groups.
    """
    found = Counter((each.is_canary, each.is_default) for each in samples)
    return [
        name
        for name, is_canary in (("the canary", True), ("stable", False))
        if found[is_canary, True] and found[is_canary, False] < LEAST_FEEDBACK
    ]


def _mean(group: Group) -> GroupMean:
    return GroupMean(group.count, group.mean)


def decide(
    policy: GatePolicy,
    findings: Sequence[LimitFinding],
    evaluation: EvaluationResult | None,
    canary_answers: int,
    age: float,
    *,
    silent: Mapping[str, str] | None = None,
    may_stay_empty: Collection[str] = (),
) -> Decision:
    """Decide what happens to a canary.

    Parameters
    ----------
    policy
        What the canary has to show.
    findings
        The states of all limits.
    evaluation
        The result of the evaluation command, or None if there is none yet.
    canary_answers
        The number of answers that the canary has given.
    age
        Seconds since the canary began to serve.
    silent
        For the limits, as text, whose metrics have too little feedback: the channels that lack it. None means no limit.
    may_stay_empty
        The limits whose metric may have no values, as text. No promotion waits for their values.
    """
    if policy.evaluate and evaluation is not None:
        if evaluation.passed is False:
            return Decision("rollback", f"the evaluation refused it: {evaluation.why}")
        if evaluation.passed is None and evaluation.attempts >= policy.attempts:
            return Decision("rollback", f"the evaluation did not finish in {evaluation.attempts} attempts: {evaluation.why}")
    broken = [finding for finding in findings if finding.verdict == "broken"]
    if broken:
        return Decision("rollback", "; ".join(_describe(finding) for finding in broken))
    missing = _missing(policy, findings, evaluation, canary_answers, age, silent or {}, may_stay_empty)
    if not missing:
        proofs = [_describe(finding) for finding in findings if finding.verdict == "holds"]
        if policy.evaluate and evaluation is not None:
            proofs.insert(0, f"the evaluation passed: {evaluation.why}")
        return Decision("promote", "; ".join(proofs))
    if age >= policy.max_seconds:
        return Decision("rollback", f"there is no decision after {age:.0f} seconds: {missing}")
    return Decision("continue", missing)


def _missing(
    policy: GatePolicy,
    findings: Sequence[LimitFinding],
    evaluation: EvaluationResult | None,
    canary_answers: int,
    age: float,
    silent: Mapping[str, str],
    may_stay_empty: Collection[str],
) -> str:
    """Return what a promotion still needs, or an empty text."""
    needs = []
    if policy.evaluate and (evaluation is None or not evaluation.passed):
        needs.append("the evaluation has not passed yet")
    for finding in findings:
        if finding.must_hold and finding.verdict == "open":
            because = f", because there is too little feedback on {silent[finding.limit]}" if finding.limit in silent else ""
            needs.append(f"{finding.limit} is not proved{because}")
    if findings and canary_answers < policy.min_answers:  # even if all limits are monitors, which would see no answers
        needs.append(f"the canary has given {canary_answers} of {policy.min_answers} answers")
    else:
        judged = [finding for finding in findings if finding.limit not in may_stay_empty]
        needs += [few for finding in judged if (few := _too_few(finding, policy.min_answers))]
    if age < policy.min_seconds:
        needs.append(f"it is {age:.0f} of {policy.min_seconds:.0f} seconds old")
    return "; ".join(needs)


def _too_few(finding: LimitFinding, least: int) -> str:
    """Say that a limit has too few values of a channel. Return an empty text if it has enough."""
    canary, stable = finding.canary.count, finding.stable.count
    enough = min(canary, stable) >= least
    return "" if enough else f"{finding.limit} needs {least} answers of each channel, and has {canary} of the canary and {stable} of stable"


def _describe(finding: LimitFinding) -> str:
    canary, stable = finding.canary, finding.stable
    return (
        f"{finding.limit} {'is broken' if finding.verdict == 'broken' else 'holds'}: "
        f"canary mean {canary.mean:.4g} ({canary.count} answers), stable mean {stable.mean:.4g} ({stable.count} answers)"
    )


def parse_score(text: str) -> tuple[str, float]:
    """Return the name and the smallest value of a score, from NAME:VALUE. Raises `UnusableGate`.

    Parameters
    ----------
    text
        The text.
    """
    form = _SCORE.fullmatch(text)
    if form is None or not text.isprintable():
        raise UnusableGate(f"{text!r} does not say the smallest value of a score.", hint="Write NAME:VALUE, such as accuracy:0.8.")
    return form[1], float(form[2])
