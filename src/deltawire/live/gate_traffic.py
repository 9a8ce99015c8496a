"""The answers of a canary and of the channel that it is compared with, and the feedback to them. Pure: the caller reads the files.

An answer counts for a metric once the metric's window is over for it, and only with the feedback that was stored within the window. If an
answer counted as soon as its feedback came, answers with quick feedback would count more. So no value ever changes after it has counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from ..errors import UnusableGate
from ..format.feedback import Feedback, FeedbackFile
from ..format.interactions import Interaction, Interactions
from ..format.records.gate_records import ChannelPlace
from ..format.records.live_records import Metric
from .gate_rules import Range
from .sequential_test import Sample

LENGTH, REFUSAL, BAD_TOOL_CALLS = "length", "refusal", "bad_tool_calls"
FACTS = {LENGTH: Range(0.0, 2048.0), REFUSAL: Range(0.0, 1.0), BAD_TOOL_CALLS: Range(0.0, 1.0)}
"""The facts about an answer that need no feedback, and their ranges."""
MOST_ANSWERS = 200_000
"""The most answers of one canary, and as many of stable, that are kept. Later ones do not count."""
MOST_FEEDBACK = 1_000_000
_GRANULARITY = timedelta(seconds=1)
"""Stores round the times of objects down to this at most. So an object with the time t was written before t plus this."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the values of a limit come from: a fact about answers, or a metric.

    Parameters
    ----------
    name
        The name of the fact or metric.
    values
        The range of its values.
    metric
        The declaration of the metric. None for a fact.
    wait
        Feedback counts that is stored at most this long after an answer.
    """

    name: str
    values: Range
    metric: Metric | None = None
    wait: timedelta = timedelta(0)

    @classmethod
    def find(cls, name: str, metrics: Iterable[Metric], *, values: Range | None = None, wait: float | None = None) -> Source:
        """Return the source with this name. Raises `UnusableGate` if there is none, or if its range is not known.

        Parameters
        ----------
        name
            The name of a fact or of a metric that is declared.
        metrics
            The metrics that are declared.
        values
            The range of the values. None takes that of the declaration.
        wait
            Seconds that feedback may take. None, or more than the window of the metric, means the window.
        """
        metric = next((each for each in metrics if each.name == name), None)
        if metric is None:
            if name not in FACTS:
                known = ", ".join(sorted({*FACTS, *(each.name for each in metrics)}))
                raise UnusableGate(f"the metric {name!r} is not declared.", hint=f"Declare it, or use one of: {known}.")
            return cls(name, values or FACTS[name])
        if values is None and metric.type == "float" and (metric.low is None or metric.high is None):
            raise UnusableGate(f"the metric {name!r} has no range.", hint="Declare low and high, or give the gate a range.")
        seconds = metric.window if wait is None else min(wait, metric.window)
        return cls(name, values or Range(metric.lowest, metric.highest), metric, timedelta(seconds=seconds))


@dataclass(frozen=True, slots=True)
class _Answer:
    """One completion that counts, in the order of the store."""

    is_canary: bool
    interaction: Interaction
    stored: datetime
    place: tuple[str, int, int]
    """The session, the number of the file and the index in it, which order answers that were stored at the same time."""


@dataclass(frozen=True, slots=True)
class _Opinion:
    """Feedback, and when it was stored."""

    feedback: Feedback
    stored: datetime


class CanaryTraffic:
    """The answers of both channels since a canary began. Answers of other versions or channels are left out.

    Parameters
    ----------
    canary
        Where the canary stands.
    stable
        Where the other channel stands.
    by_user
        Whether only the first answer of each user counts, because the answers of one user resemble each other.
    """

    def __init__(self, canary: ChannelPlace, stable: ChannelPlace, *, by_user: bool = False) -> None:
        self._groups = {canary.channel: (True, canary), stable.channel: (False, stable)}
        self._by_user = by_user
        self._answers: list[_Answer] = []
        self._counts = {True: 0, False: 0}
        self._opinions: dict[tuple[str, str], dict[str, _Opinion]] = {}
        self._opinion_count = 0

    @property
    def canary_answers(self) -> int:
        """The number of answers of the canary."""
        return self._counts[True]

    def add_interactions(self, file: Interactions, stored: datetime) -> None:
        """Add the answers of a file.

        Parameters
        ----------
        file
            The file.
        stored
            When it was stored, by the store's clock.
        """
        for index, (interaction, completion) in enumerate(zip(file.interactions, file.rollouts.completions, strict=True)):
            is_canary, place = self._groups.get(interaction.channel or "", (False, None))
            if place is None or self._counts[is_canary] >= MOST_ANSWERS:
                continue
            claimed = file.rollouts.versions.get(place.target.seq)
            if {span.seq for span in completion.spans} != {place.target.seq} or claimed is None or claimed.digest != place.target.digest:
                continue
            self._counts[is_canary] += 1
            self._answers.append(_Answer(is_canary, interaction, stored, (file.gateway, file.number, index)))

    def add_feedback(self, file: FeedbackFile, stored: datetime) -> None:
        """Add the feedback of a file. Of feedback with the same id, the first that was added counts.

        Parameters
        ----------
        file
            The file.
        stored
            When it was stored, by the store's clock.
        """
        for feedback in file.feedback:
            opinions = self._opinions.setdefault((feedback.inference or feedback.episode or "", feedback.metric), {})
            if feedback.id not in opinions and self._opinion_count < MOST_FEEDBACK:
                opinions[feedback.id] = _Opinion(feedback, stored)
                self._opinion_count += 1

    def samples(self, source: Source, now: datetime) -> list[Sample]:
        """Return the values of all answers that count, in an order that does not depend on the values.

        Parameters
        ----------
        source
            Where the values come from.
        now
            A time of the store. All feedback that was stored before must have been added. Answers whose window is not over count later.
        """
        found = []
        for answer, settled in self._settled(source):
            if source.metric is None or settled + _GRANULARITY <= now:
                value = self._value(answer, source, settled)
                if value is not None:
                    found.append((settled, answer, value))
        found.sort(key=lambda each: (each[0], each[1].place))
        users, samples = set(), []
        for _, answer, value in found:
            user = answer.interaction.user if self._by_user else None
            if user is None or user not in users:
                users.add(user)
                samples.append(Sample(answer.is_canary, value))
        return samples

    def _settled(self, source: Source) -> Iterator[tuple[_Answer, datetime]]:
        """Yield each answer that the source has a value for, and when its value is final. An episode counts as its first answer."""
        if source.metric is None:
            yield from ((answer, answer.stored) for answer in self._answers)
        elif source.metric.level == "inference":
            yield from ((answer, answer.stored + source.wait) for answer in self._answers if answer.interaction.choice == 0)
        else:
            episodes: dict[str, tuple[_Answer, datetime]] = {}
            for answer in self._answers:
                episode = answer.interaction.episode
                if episode is not None:
                    first, settled = episodes.get(episode, (answer, answer.stored))
                    episodes[episode] = (min(first, answer, key=lambda each: (each.stored, each.place)), max(settled, answer.stored))
            yield from ((first, last + source.wait) for first, last in episodes.values())

    def _value(self, answer: _Answer, source: Source, settled: datetime) -> float | None:
        interaction, facts = answer.interaction, answer.interaction.facts
        if source.metric is None:
            calls = facts.tool_calls + facts.bad_tool_calls
            if source.name == BAD_TOOL_CALLS:
                return facts.bad_tool_calls / calls if calls else None
            return float(facts.length if source.name == LENGTH else facts.refusal)
        target = interaction.id if source.metric.level == "inference" else interaction.episode or ""
        best: Feedback | None = None
        for opinion in self._opinions.get((target, source.name), {}).values():
            feedback = opinion.feedback
            counts = opinion.stored <= settled and feedback.caller in (None, interaction.caller)
            if counts and source.metric.number(feedback.value) is not None and (best is None or _rank(feedback) > _rank(best)):
                best = feedback
        return source.metric.default if best is None else source.metric.number(best.value)


def _rank(feedback: Feedback) -> tuple[int, int, str]:
    return feedback.revision, feedback.time, feedback.id
