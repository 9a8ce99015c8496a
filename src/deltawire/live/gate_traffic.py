"""The answers of a canary and of the channel that it is compared with, and the feedback to them. Pure: the caller reads the files.

An answer counts for a metric once the metric's window is over for it, and only with the feedback that was stored within the window. If an
answer counted as soon as its feedback came, answers with quick feedback would count more. So no value ever changes after it has counted.

A request counts once, as its first completion, because its completions resemble each other.

Feedback for metrics that the gate does not compare, or with values that they cannot have, takes no place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..errors import UnusableGate
from ..format.feedback import FeedbackFile
from ..format.interactions import Interaction, Interactions
from ..format.records.gate_records import ChannelPosition
from ..format.records.live_records import Metric
from .gate_rules import Range
from .rules.join import GRANULARITY, StoredFeedback
from .rules.revisions import FEWEST_REVISIONS, MOST_REVISIONS, least_needed
from .sequential_test import Sample

LENGTH, REFUSAL, BAD_TOOL_CALLS, DIVERTED = "length", "refusal", "bad_tool_calls", "diverted"
FACTS = {LENGTH: Range(0.0, 2048.0), REFUSAL: Range(0.0, 1.0), BAD_TOOL_CALLS: Range(0.0, 1.0), DIVERTED: Range(0.0, 1.0)}
"""The facts about an answer that need no feedback, and their ranges."""
MOST_ANSWERS = 200_000
"""The most answers of one canary, and as many of stable, that are kept. Later ones do not count."""
MOST_FEEDBACK = 1_000_000
"""The most feedback that is kept. Above that, revisions are dropped where there are most."""
_GREED = 8
"""A caller may rate further answers while it has rated less than this multiple of what may still be rated. So one caller alone gets 8/9 of
the room, and leaves some to each further one. Nothing is dropped to make room later, because values that have counted must stay."""


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
        Feedback counts that is stored at most this many seconds after an answer.
    """

    name: str
    values: Range
    metric: Metric | None = None
    wait: float = 0.0

    @property
    def may_stay_empty(self) -> bool:
        """Whether there may be channels whose answers never have a value, such as those without tool calls."""
        return self.metric is None and self.name == BAD_TOOL_CALLS

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
        return cls(
            name, values or Range(metric.lowest, metric.highest), metric, metric.window if wait is None else min(wait, metric.window)
        )


@dataclass(frozen=True, slots=True)
class _Answer:
    """The first completion of a request that counts, in the order of the store."""

    is_canary: bool
    interaction: Interaction
    stored: float
    index: tuple[str, int, int]
    """The session, the number of the file and the index in the file, which order answers that were stored at the same time."""

    @property
    def order(self) -> tuple[float, tuple[str, int, int]]:
        """Answers were stored in this order."""
        return self.stored, self.index


class CanaryTraffic:
    """The answers of both channels since a canary began. Answers of other versions or channels are left out.

    An answer that a user got from another channel, because no engine of the user's own could answer, counts for neither channel, except for
    the fact "diverted" of the user's own. There it counts from the first answer of that channel on: before, its engines were fetching the
    version.

    Parameters
    ----------
    canary
        The current move of the canary's channel.
    stable
        The current move of the other channel.
    metrics
        The metrics that are compared.
    wait
        Seconds that feedback may take. None, or more than the window of a metric, means its window. No source may wait longer.
    by_user
        Whether only the first answer of each user counts, because the answers of one user resemble each other.
    most_feedback
        The most feedback that is kept. No caller may take more than 8/9 of it.
    """

    def __init__(
        self,
        canary: ChannelPosition,
        stable: ChannelPosition,
        metrics: Iterable[Metric] = (),
        *,
        wait: float | None = None,
        by_user: bool = False,
        most_feedback: int = MOST_FEEDBACK,
    ) -> None:
        self._groups = {canary.channel: (True, canary), stable.channel: (False, stable)}
        self._by_user = by_user
        self._answers: list[_Answer] = []
        self._diverted: list[_Answer] = []
        self._counts = {True: 0, False: 0}
        self._stored: dict[str, float] = {}
        """When each answer was stored, by its id."""
        self._metrics = {metric.name: metric for metric in metrics}
        self._wait = wait
        self._opinions: dict[tuple[str, str], dict[str | None, dict[str, StoredFeedback]]] = {}
        """By the id of the answer or episode and the metric; then by the caller; then by the id of the feedback."""
        self._opinion_count = 0
        self._rated: Counter[str | None] = Counter()
        """How many pairs of an answer or episode and a metric each caller has given feedback for."""
        self._most_feedback, self._most_revisions = most_feedback, MOST_REVISIONS

    @property
    def canary_answers(self) -> int:
        """The number of answers of the canary, one for each request."""
        return self._counts[True]

    def add_interactions(self, file: Interactions, stored: float) -> None:
        """Add the answers of a file.

        Parameters
        ----------
        file
            The file.
        stored
            The store's time of the file, in seconds.
        """
        for index, (interaction, completion) in enumerate(zip(file.interactions, file.rollouts.completions, strict=True)):
            if interaction.choice != 0:
                continue
            diverted_from = interaction.diverted_from
            is_canary, position = self._groups.get(diverted_from or interaction.channel or "", (False, None))
            if position is None or self._counts[is_canary] >= MOST_ANSWERS:
                continue
            place = (file.gateway, file.number, index)
            if diverted_from is not None:
                if len(self._diverted) < MOST_ANSWERS:
                    self._diverted.append(_Answer(is_canary, interaction, stored, place))
                continue
            target = position.target
            claimed = file.rollouts.versions.get(target.seq)
            if {span.seq for span in completion.spans} != {target.seq} or claimed is None or claimed.digest != target.digest:
                continue
            self._counts[is_canary] += 1
            self._answers.append(_Answer(is_canary, interaction, stored, place))
            self._stored[interaction.id] = max(stored, self._stored.get(interaction.id, stored))

    def add_feedback(self, file: FeedbackFile, stored: float) -> None:
        """Add the feedback of a file. If a caller sends several with one id, the first that was stored counts.

        Parameters
        ----------
        file
            The file.
        stored
            The store's time of the file, in seconds.
        """
        for index, feedback in enumerate(file.feedback):
            metric = self._metrics.get(feedback.metric)
            if metric is None or metric.level != feedback.target[0] or metric.number(feedback.value) is None:
                continue
            if self._is_late(feedback.target[1], metric, stored):
                continue  # otherwise it would take the place of feedback that has counted
            given = StoredFeedback(feedback, stored, (file.gateway, file.number, index))
            callers = self._opinions.get((feedback.target[1], metric.name), {})
            revisions = callers.get(feedback.caller, {})
            before = revisions.get(feedback.id)
            if before is not None:
                revisions[feedback.id] = min(before, given, key=lambda one: one.order)
            elif revisions or self._may_rate(feedback.caller):
                self._rated[feedback.caller] += not revisions
                revisions[feedback.id] = given
                self._opinions.setdefault((feedback.target[1], metric.name), callers)[feedback.caller] = revisions
                self._opinion_count += 1
                self._thin(revisions)
                self._shrink()

    def _is_late(self, target: str, metric: Metric, stored: float) -> bool:
        """Return whether feedback came after the value of its answer was final. An episode may get further answers, so its value is not."""
        answered = self._stored.get(target) if metric.level == "inference" else None
        return answered is not None and stored > answered + (metric.window if self._wait is None else min(self._wait, metric.window))

    def _may_rate(self, caller: str | None) -> bool:
        """Return whether there is room for the feedback of a caller on a further answer."""
        return self._rated[caller] < _GREED * (self._most_feedback - self._rated.total())

    def _thin(self, revisions: dict[str, StoredFeedback]) -> None:
        while len(revisions) > self._most_revisions:
            del revisions[least_needed(revisions.values()).feedback.id]
            self._opinion_count -= 1

    def _shrink(self) -> None:
        """Keep fewer revisions, for good, if there is too much feedback."""
        while self._opinion_count >= self._most_feedback and self._most_revisions > FEWEST_REVISIONS:
            self._most_revisions //= 2
            for callers in self._opinions.values():
                for revisions in callers.values():
                    self._thin(revisions)

    def samples(self, source: Source, now: float) -> list[Sample]:
        """Return the values of all answers that count, in an order that does not depend on the values.

        Parameters
        ----------
        source
            Where the values come from.
        now
            A time of the store, in seconds. All feedback that was stored before must have been added. Answers whose window is not
            over count later.
        """
        found = []
        for answer, settled in self._settled(source):
            if source.metric is None or settled + GRANULARITY <= now:
                sample = self._sample(answer, source, settled)
                if sample is not None:
                    found.append((settled, answer, sample))
        found.sort(key=lambda each: (each[0], each[1].index))
        users, samples = set(), []
        for _, answer, sample in found:
            user = answer.interaction.user if self._by_user else None
            if user is None or user not in users:
                users.add(user)
                samples.append(sample)
        return samples

    def _settled(self, source: Source) -> Iterator[tuple[_Answer, float]]:
        """Yield each answer that the source has a value for, and when its value is final. An episode counts as its first answer."""
        if source.metric is None and source.name == DIVERTED:
            yield from ((answer, answer.stored) for answer in self._requests())
        elif source.metric is None:
            yield from ((answer, answer.stored) for answer in self._answers)
        elif source.metric.level == "inference":
            yield from ((answer, answer.stored + source.wait) for answer in self._answers)
        else:
            episodes: dict[tuple[str | None, str], tuple[_Answer, float]] = {}
            for answer in self._answers:
                if answer.interaction.episode is not None:
                    episode = (answer.interaction.caller, answer.interaction.episode)
                    first, settled = episodes.get(episode, (answer, answer.stored))
                    episodes[episode] = (min(first, answer, key=lambda each: each.order), max(settled, answer.stored))
            yield from ((first, last + source.wait) for first, last in episodes.values())

    def _requests(self) -> Iterator[_Answer]:
        """Yield one answer to each request, also diverted ones: those that came after an answer of the user's own channel."""
        first = {group: min((each.order for each in self._answers if each.is_canary is group), default=None) for group in (True, False)}
        yield from self._answers
        for answer in self._diverted:
            begun = first[answer.is_canary]
            if begun is not None and answer.order > begun:
                yield answer

    def _sample(self, answer: _Answer, source: Source, settled: float) -> Sample | None:
        """Return the value of an answer. Return None if it has none."""
        given = None if source.metric is None else self._given(answer.interaction, source.metric, settled)
        if source.metric is None:
            value = _fact(source.name, answer.interaction)
        else:
            value = source.metric.default if given is None else source.metric.number(given.feedback.value)
        return None if value is None else Sample(answer.is_canary, value, is_default=source.metric is not None and given is None)

    def _given(self, interaction: Interaction, metric: Metric, settled: float) -> StoredFeedback | None:
        """Return the feedback that counts for a metric of an interaction, among that which was stored until then."""
        target = interaction.id if metric.level == "inference" else interaction.episode or ""
        callers = self._opinions.get((target, metric.name), {})
        given = [each for caller in {None, interaction.caller} for each in callers.get(caller, {}).values() if each.stored <= settled]
        return max(given, key=lambda each: each.rank, default=None)


def _fact(name: str, interaction: Interaction) -> float | None:
    """Return a fact about an answer. Return None if it does not apply, or if the gateway did not have the text."""
    facts = interaction.facts
    if name == DIVERTED:
        return float(interaction.diverted_from is not None)
    if not facts.has_text and name != LENGTH:
        return None
    calls = facts.tool_calls + facts.bad_tool_calls
    if name == BAD_TOOL_CALLS:
        return facts.bad_tool_calls / calls if calls else None
    return float(facts.length if name == LENGTH else facts.refusal)
