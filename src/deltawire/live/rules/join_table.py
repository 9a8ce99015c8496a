"""Keeps interactions that wait for feedback, and feedback that waits for interactions. Both are bounded.

Feedback that can give no reward takes no place: its metric is not declared, or has no weight, or cannot have that value.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

from ...fleet.rules.live_tasks import LiveItem
from ...format.records.live_records import Metric
from .join import Joined, Pending, StoredFeedback, Waiting, join
from .revisions import FEWEST_REVISIONS, MOST_REVISIONS, fair_share, least_needed

_Name: TypeAlias = tuple[str | None, str]
"""The caller and the id of feedback. Each caller has its own ids, so that nobody can use up those of others."""
_Voice: TypeAlias = tuple[str | None, str]
"""The caller and the metric of feedback. The revisions of each are bounded on their own."""


class JoinTable:
    """Interactions without a reward, and feedback. The order in which they are added makes no difference to rewards.

    Parameters
    ----------
    metrics
        The declared metrics.
    most_pending
        The most interactions that wait at the same time. `is_full` says that there are as many.
    most_feedback
        The most feedback that is kept. Above that, the callers with the most feedback lose some of theirs.
    """

    def __init__(self, metrics: Sequence[Metric], *, most_pending: int = 200_000, most_feedback: int = 500_000) -> None:
        self.metrics = tuple(metrics)
        self._rewarding = {metric.name: metric for metric in self.metrics if metric.weight != 0}
        self._most_pending, self._most_feedback = most_pending, most_feedback
        self._pending: dict[LiveItem, Pending] = {}
        self._first: dict[tuple[str, int], Pending] = {}
        self._targets: dict[tuple[str, str], set[LiveItem]] = {}
        self._feedback: dict[_Name, StoredFeedback] = {}
        self._given: dict[tuple[str, str], dict[_Voice, set[_Name]]] = {}
        self._due: list[tuple[float, LiveItem]] = []
        self._ripe: dict[LiveItem, Joined] = {}
        self.counts: Counter[str] = Counter()
        """Counts what happened so far: "conflicting", "dropped" and "unused" feedback, "repeated" and "unrewarded" interactions."""

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, item: LiveItem) -> bool:
        return item in self._pending

    @property
    def is_full(self) -> bool:
        """True if no more interactions should be added."""
        return len(self._pending) >= self._most_pending

    @property
    def feedback(self) -> int:
        """The number of pieces of feedback that are kept."""
        return len(self._feedback)

    def add_interaction(self, pending: Pending) -> None:
        """Let an interaction wait for feedback. If several have the same id and choice, the first that was stored counts.

        Parameters
        ----------
        pending
            The interaction.
        """
        name = (pending.id, pending.choice)
        before = self._first.get(name)
        if before is not None and before.item != pending.item:
            self.counts["repeated"] += 1
            if before.order <= pending.order:
                return
        self._pending[pending.item] = pending
        for target in _targets(pending):
            self._targets.setdefault(target, set()).add(pending.item)
        if before is not None and before.item != pending.item:
            self.drop(before.item)  # only now, because feedback is forgotten with the last interaction that it is about
        self._first[name] = pending
        heapq.heappush(self._due, (pending.stored, pending.item))

    def add_feedback(self, given: StoredFeedback) -> None:
        """Keep feedback. Feedback with an id that its caller used before counts once; with other content, the first that was stored does.

        Parameters
        ----------
        given
            The feedback.
        """
        feedback = given.feedback
        metric = self._rewarding.get(feedback.metric)
        if metric is None or metric.level != feedback.target[0] or metric.number(feedback.value) is None:
            self.counts["unused"] += 1
            return
        name = _name(given)
        before = self._feedback.get(name)
        if before is not None:
            self.counts["conflicting"] += before.feedback != feedback
            if before.order <= given.order:
                return
            self._forget(name)
        names = self._given.setdefault(feedback.target, {}).setdefault(_voice(given), set())
        self._feedback[name] = given
        names.add(name)
        self._thin(names, MOST_REVISIONS)
        for item in self._targets.get(feedback.target, ()):
            self._ripe.pop(item, None)
            heapq.heappush(self._due, (self._pending[item].stored, item))

    def ripe(self, now: float) -> list[Joined]:
        """Return the interactions that have their rewards, in the order in which they were stored. They stay until they are dropped.

        Interactions that no metric gives a reward are dropped.

        Parameters
        ----------
        now
            A time of the store. All feedback that was stored before must have been added.
        """
        again: dict[LiveItem, float] = {}
        while self._due and self._due[0][0] <= now:
            _, item = heapq.heappop(self._due)
            pending = self._pending.get(item)
            if pending is None or item in self._ripe or item in again:
                continue
            found = join(pending, self.metrics, self.given_to(pending), now)
            if found is None:
                self.counts["unrewarded"] += 1
                self.drop(item)
            elif isinstance(found, Waiting):
                again[item] = found.until
            else:
                self._ripe[item] = found
        for item, until in again.items():
            heapq.heappush(self._due, (until, item))
        self._shrink()
        return sorted(self._ripe.values(), key=lambda one: one.pending.order)

    def given_to(self, pending: Pending) -> list[StoredFeedback]:
        """Return all feedback for an interaction or its episode, also that of other callers, which does not count.

        Parameters
        ----------
        pending
            The interaction.
        """
        found = [names for target in _targets(pending) for names in self._given.get(target, {}).values()]
        return [self._feedback[each] for names in found for each in names]

    def of_episode(self, episode: str) -> list[Pending]:
        """Return the interactions of an episode that wait, in the order in which they were stored.

        Parameters
        ----------
        episode
            The id of the episode.
        """
        return sorted((self._pending[item] for item in self._targets.get(("episode", episode), ())), key=lambda one: one.order)

    def drop(self, item: LiveItem) -> None:
        """Forget an interaction: it is joined, or can never be.

        Parameters
        ----------
        item
            The interaction.
        """
        pending = self._pending.pop(item, None)
        if pending is None:
            return
        self._ripe.pop(item, None)
        self._first.pop((pending.id, pending.choice), None)
        for target in _targets(pending):
            waiting = self._targets[target]
            waiting.discard(item)
            if not waiting:
                del self._targets[target]
                if target[0] == "inference":
                    for each in [name for names in self._given.get(target, {}).values() for name in names]:
                        self._forget(each)

    def oldest(self) -> float:
        """Return when the oldest interaction that waits was stored; infinity if none waits."""
        return min((pending.stored for pending in self._pending.values()), default=float("inf"))

    def lowest(self) -> dict[str, int]:
        """Return, for each session, the lowest number of a file with an interaction that waits."""
        lowest: dict[str, int] = {}
        for item in self._pending:
            lowest[item.gateway] = min(item.number, lowest.get(item.gateway, item.number))
        return lowest

    def _forget(self, name: _Name) -> None:
        given = self._feedback.pop(name, None)
        if given is not None:
            voices = self._given[given.feedback.target]
            voices[_voice(given)].discard(name)
            if not voices[_voice(given)]:
                del voices[_voice(given)]
            if not voices:
                del self._given[given.feedback.target]

    def _thin(self, names: set[_Name], most: int) -> None:
        """Drop revisions of one caller for one metric of one target, until there are at most so many."""
        while len(names) > most:
            self._forget(_name(least_needed(self._feedback[each] for each in names)))
            self.counts["dropped"] += 1

    def _shrink(self) -> None:
        """Drop feedback above the limit, of the callers that have the most.

        They lose revisions where there are most, then the oldest feedback without an interaction, then the oldest.
        """
        if len(self._feedback) <= self._most_feedback:
            return
        counts = Counter(caller for caller, _ in self._feedback)
        share = fair_share(counts.values(), self._most_feedback)
        most = MOST_REVISIONS
        while len(self._feedback) > self._most_feedback and most > FEWEST_REVISIONS:
            most //= 2
            every = [(caller, names) for voices in self._given.values() for (caller, _), names in voices.items()]
            for names in [names for caller, names in every if counts[caller] > share and len(names) > most]:
                self._thin(names, most)
        excess = len(self._feedback) - self._most_feedback
        if excess > 0:
            found = sorted(self._feedback.values(), key=lambda one: (one.feedback.target in self._targets, one.order), reverse=True)
            better: Counter[str | None] = Counter()
            places = []
            for one in found:
                places.append((better[one.feedback.caller], one))  # how many pieces of its caller are better
                better[one.feedback.caller] += 1
            places.reverse()
            places.sort(key=lambda each: each[0], reverse=True)
            for _, one in places[:excess]:
                self._forget(_name(one))
            self.counts["dropped"] += excess


def _name(given: StoredFeedback) -> _Name:
    return given.feedback.caller, given.feedback.id


def _voice(given: StoredFeedback) -> _Voice:
    return given.feedback.caller, given.feedback.metric


def _targets(pending: Pending) -> list[tuple[str, str]]:
    return [("inference", pending.id), *([] if pending.episode is None else [("episode", pending.episode)])]
