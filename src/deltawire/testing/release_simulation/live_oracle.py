"""Judges live traffic and channels. The judge sees everything, and uses none of the code that it judges, except parsers of files."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...format.feedback import Feedback, FeedbackFile
from ...format.interactions import Interactions
from ...format.records.channel_records import ChannelMove
from ...format.records.gate_records import GateRecord
from ...format.records.live_records import Metric
from ...format.records.record_parts import record_hash
from ...format.rollouts import Rollouts
from ...store import keys, live_keys
from ..fleet_simulation.oracle import History, Oracle, Violation
from ..fleet_simulation.store_model import Objects
from .live_chain import LiveChain

LIVE = "live"
GATE = "deltawire gate"
_MOST_CASES = 4096
_SECOND = 1.0
"""Stores may round times down to a second."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The truth about an answer, as its engine gave it.

    Parameters
    ----------
    id
        Its id.
    train
        Whether the user agreed to training.
    prompt
        The token ids of the prompt.
    tokens
        The token ids of the answer.
    spans
        (start, end, number of the commit) of the versions that made its tokens.
    caller
        The name of the caller.
    episode
        The id of its episode.
    """

    id: str
    train: bool
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    spans: tuple[tuple[int, int, int], ...]
    caller: str | None
    episode: str | None


@dataclass(slots=True)
class LiveHistory(History):
    """A line of history that also knows which interactions were trained on, by their ids."""

    interactions: dict[str, int] = field(default_factory=dict)

    def copy(self) -> LiveHistory:
        return LiveHistory(self.step, dict(self.trained), dict(self.interactions))


@dataclass(frozen=True, slots=True)
class _Stored:
    """Feedback in the store, and where: the key of its file, and its index there."""

    feedback: Feedback
    index: tuple[str, int]


class LiveOracle:
    """Watches the store, the gateways, the trainers and the followers. Raises `Violation` when a rule is broken.

    Parameters
    ----------
    run
        The run's id.
    chain
        The chain.
    objects
        The content of the store.
    fleet
        Judges what holds for all fleets.
    metrics
        The metrics of the run.
    """

    def __init__(self, run: str, chain: LiveChain, objects: Objects, fleet: Oracle, metrics: Sequence[Metric]) -> None:
        self._run = run
        self._chain = chain
        self._objects = objects
        self.fleet = fleet
        self._metrics = tuple(metrics)
        self.answers: dict[str, Answer] = {}
        self._recorded: dict[str, float] = {}
        """When each answer was recorded in a journal, by virtual time, as long as it is not in the store."""
        self.stored: dict[str, str] = {}
        """The key of the file of each interaction."""
        self.times: dict[str, list[float]] = {}
        """The store's times of each file. A file that is put again, because no answer came, gets a new time."""
        self.feedback: dict[tuple[str, str], list[_Stored]] = {}
        """The feedback about each interaction or episode."""
        self._contents: set[tuple[Any, ...]] = set()
        self.moves: dict[str, list[ChannelMove]] = {}
        self.decisions: dict[int, GateRecord] = {}
        """The decision of gates about each move of the canary."""
        self.bad: set[str] = set()
        """The digests of versions that users dislike."""
        self.counts: Counter[str] = Counter()
        self._created_before = objects.created
        objects.created = self._created
        objects.overwritten = self._overwritten

    # The store

    def _created(self, key: str, data: bytes) -> None:
        self._created_before(key, data)
        if (parts := live_keys.parse_interactions_key(key)) is not None:
            self._note_interactions(key, parts, data)
        elif (parts := live_keys.parse_feedback_key(key)) is not None:
            self._note_feedback(key, parts, data)
        elif (channel := keys.parse_channel_key(key)) is not None:
            self._judge_move(channel[0], channel[1], ChannelMove.parse(data))
        elif (gate := live_keys.parse_gate_key(key)) is not None:
            record = GateRecord.parse(data)
            if record.outcome != "continue":
                if gate[1] in self.decisions:
                    raise Violation(f"gates decide twice about move {gate[1]} of the canary.")
                self.decisions[gate[1]] = record

    def _overwritten(self, key: str, data: bytes) -> None:
        if keys.parse_channel_key(key) is not None:
            raise Violation(f"{key}, a move of a channel, is overwritten.")
        if key in self.times:
            self._note_time(key)

    def _note_time(self, key: str) -> None:
        self.times.setdefault(key, []).append(self._objects.time().timestamp())

    def _note_interactions(self, key: str, parts: live_keys.LiveKey, data: bytes) -> None:
        try:
            file = Interactions.parse(data)
        except Exception:  # somebody else's garbage
            return
        if (file.run, file.gateway, file.number) != (self._run, parts.gateway, parts.number):
            return
        self._note_time(key)
        for about, made in zip(file.interactions, file.rollouts.completions, strict=True):
            truth = self.answers.get(about.id)
            if truth is None:
                raise Violation(f"interaction {about.id} is in the store, but was never answered.")
            if about.id in self.stored:
                raise Violation(f"interaction {about.id} is in the store twice.")
            told = (
                about.train,
                about.caller,
                about.episode,
                tuple(file.rollouts.prompts[made.prompt].tolist()),
                tuple(made.tokens.tolist()),
            )
            spans = tuple((span.start, span.end, span.seq) for span in made.spans)
            if told != (truth.train, truth.caller, truth.episode, truth.prompt, truth.tokens) or spans != truth.spans:
                raise Violation(f"interaction {about.id} is not in the store as it was answered.")
            self.stored[about.id] = key
            self._recorded.pop(about.id, None)
            self.counts["interactions"] += 1

    def _note_feedback(self, key: str, parts: live_keys.LiveKey, data: bytes) -> None:
        try:
            file = FeedbackFile.parse(data)
        except Exception:  # somebody else's garbage
            return
        if (file.run, file.gateway, file.number) != (self._run, parts.gateway, parts.number):
            return
        self._note_time(key)
        for index, one in enumerate(file.feedback):
            self.feedback.setdefault(one.target, []).append(_Stored(one, (key, index)))
            self._contents.add(_content(one))
            self.counts["feedback"] += 1

    # Gateways

    def acknowledges(self, feedback: Feedback) -> None:
        """Judge that a gateway tells a user that feedback is stored.

        Parameters
        ----------
        feedback
            The feedback.
        """
        self.counts["acknowledged"] += 1
        if _content(feedback) not in self._contents:
            raise Violation(f"feedback {feedback.id} is acknowledged, but is not in the store.")
        if feedback.target[0] == "inference" and feedback.inference not in self.answers:
            raise Violation(f"feedback {feedback.id} on an interaction that does not exist is acknowledged.")
        if feedback.caller is not None and feedback.inference is not None and self.answers[feedback.inference].caller != feedback.caller:
            raise Violation(f"feedback {feedback.id} on an interaction of another caller is acknowledged.")

    def records(self, inference: str, now: float) -> None:
        """Note that an answer is in a journal, so that the store must get it.

        Parameters
        ----------
        inference
            Its id.
        now
            The virtual time.
        """
        if inference not in self.stored:
            self._recorded[inference] = now

    def waiting_since(self) -> tuple[str, float] | None:
        """Return the id of the answer that waits longest for the store, and when it was recorded. None if none waits."""
        return min(self._recorded.items(), key=lambda each: each[1], default=None)

    # Trainers

    def trains(self, history: LiveHistory, epoch: int, step: int, rows: Sequence[Sequence[Any]], rollouts: Sequence[Rollouts]) -> None:
        """Judge what a trainer is about to train on.

        Parameters
        ----------
        history
            The line of history of the trainer.
        epoch
            Its epoch.
        step
            The training step.
        rows
            The rows of each result's task.
        rollouts
            The results.
        """
        what = f"step {step} of epoch {epoch}"
        for task, made in zip(rows, rollouts, strict=True):
            if made.member != LIVE:
                continue
            row = task[0]
            which = f"{what} trains on interaction {row['live']}"
            truth = self.answers.get(row["live"])
            if truth is None:
                raise Violation(f"{which}, which does not exist.")
            if not truth.train:
                raise Violation(f"{which}, whose user did not agree.")
            if truth.id in history.interactions:
                raise Violation(f"{which}, as step {history.interactions[truth.id]} of the same line of history did.")
            [one] = made.completions
            spans = tuple((span.start, span.end, span.seq) for span in one.spans)
            if (tuple(made.prompts[0].tolist()), tuple(one.tokens.tolist()), spans) != (truth.prompt, truth.tokens, truth.spans):
                raise Violation(f"{which}, but with another answer or version.")
            self._judge_rewards(truth, dict(zip(made.reward_names, one.rewards, strict=True)), which)
            history.interactions[truth.id] = step
            self.counts["trained"] += 1
        self.fleet.trains(history, epoch, step, rollouts)

    def _judge_rewards(self, truth: Answer, given: dict[str, float | None], which: str) -> None:
        for metric in self._metrics:
            allowed = self._values(truth, metric)
            if allowed is None:
                self.counts["unclear"] += 1
                continue
            found = given.get(metric.name)
            expected = sorted({None if value is None else value * metric.weight for value in allowed}, key=str)
            if found not in expected:
                raise Violation(f"{which} with {metric.name} {found}, but feedback gives it {expected}.")
        if unknown := given.keys() - {metric.name for metric in self._metrics}:
            raise Violation(f"{which} with the unknown metrics {sorted(unknown)}.")

    def _values(self, truth: Answer, metric: Metric) -> list[float | None] | None:
        """Return the values that the metric can have. Return None if there are too many cases to tell.

        Usually there is one. There are several if a value was final before later feedback came, or if files were put again, so that their
        times depend on when a trainer looked.
        """
        target = ("inference", truth.id) if metric.level == "inference" else ("episode", truth.episode or "")
        of_metric = [one for one in self.feedback.get(target, []) if one.feedback.metric == metric.name]
        about = [one for one in of_metric if _number(metric, one.feedback.value) is not None]
        choices = [self.times[key] for key in (self.stored[truth.id], *(one.index[0] for one in about))]
        if math.prod(map(len, choices)) > _MOST_CASES:
            return None
        allowed: list[float | None] = []
        for stored, *times in itertools.product(*choices):
            first: dict[tuple[str | None, str], tuple[float, tuple[str, int], Feedback]] = {}  # the first with an id counts
            for time, one in zip(times, about, strict=True):
                new = (time, one.index, one.feedback)
                name = (one.feedback.caller, one.feedback.id)
                first[name] = min(first.get(name, new), new, key=lambda each: each[:2])
            given = sorted(
                (time, (one.revision, time, index), value)
                for time, index, one in first.values()
                if one.caller in (None, truth.caller)
                and time <= stored + metric.window
                and (value := _number(metric, one.value)) is not None
            )
            allowed += _possible(metric, stored, given)
        return allowed

    # Channels

    def _judge_move(self, name: str, number: int, move: ChannelMove) -> None:
        history = self.moves.setdefault(name, [])
        before = record_hash(history[-1].to_bytes()) if history else None
        if (number, move.move, move.before) != (len(history), len(history), before):
            raise Violation(f"move {number} of channel {name} does not follow move {len(history) - 1}.")
        if move.target != self._chain.ref(move.target.seq):
            raise Violation(f"move {number} of channel {name} names no version of the chain.")
        history.append(move)
        self.counts[f"{name}-{move.kind}"] += 1
        if move.by == GATE:
            self._judge_gate(name, move)

    def _judge_gate(self, name: str, move: ChannelMove) -> None:
        stood = next((one for one in reversed(self.moves[name][:-1]) if one.kind != "share"), None)
        if stood is None or not any(self._is_evidence(decision, name, stood, move) for decision in self.decisions.values()):
            raise Violation(f"the gate moves {name} to commit {move.target.seq} without evidence.")
        self.counts[f"gate-{move.kind}"] += 1
        before = self.moves[name][-2].target.digest if len(self.moves[name]) > 1 else None
        if move.kind == "promote" and str(move.target.digest) in self.bad and str(before) not in self.bad:
            raise Violation(f"the gate promotes the bad version of commit {move.target.seq}.")
        for one in [each for each in self.moves[name][:-1] if each.by == GATE]:
            if (one.kind, one.why, one.target) == (move.kind, move.why, move.target) and name == "stable":
                raise Violation(f"the gate moves {name} twice for one decision.")

    @staticmethod
    def _is_evidence(decision: GateRecord, name: str, stood: ChannelMove, move: ChannelMove) -> bool:
        """Tell whether a decision allows a move of the gate: it was made about the move that stood, and names the target of a promotion.

        A promoter may move the canary after the gate has read it and before the gate moves stable. Two channels cannot be compared and
        moved at once. So the canary of the decision need not be current, but stable must go to exactly the version that was judged.
        """
        if decision.outcome != move.kind:
            return False
        if name == "canary":
            return decision.canary.move == stood.move
        return decision.stable.move == stood.move and decision.canary.target == move.target

    def is_settled(self, serving: Iterable[tuple[str, int | None]]) -> bool:
        """Tell whether no canary waits for a decision or its move, and all followers serve what their channels name.

        A gate does not promote a canary if somebody else has moved stable since its decision.

        Parameters
        ----------
        serving
            The channel of each follower, and the number of the commit that it serves.
        """
        if not {"stable", "canary"} <= self.moves.keys():
            return False
        stable, canary = (next(move for move in reversed(self.moves[name]) if move.kind != "share") for name in ("stable", "canary"))
        decision = self.decisions.get(canary.move)
        is_passed = decision is not None and decision.outcome == "promote" and decision.stable.move != stable.move
        is_decided = canary.kind == "rollback" or canary.target == stable.target or is_passed
        return is_decided and all(seq == self.moves[channel][-1].target.seq for channel, seq in serving)

    def serves(self, follower: str, channel: str, seq: int) -> None:
        """Judge the version that a follower begins to serve.

        Parameters
        ----------
        follower
            The name of the follower.
        channel
            The channel that it follows.
        seq
            The number of the version's commit.
        """
        if seq not in {move.target.seq for move in self.moves.get(channel, [])}:
            raise Violation(f"{follower} serves commit {seq}, which was never on channel {channel}.")


def _content(one: Feedback) -> tuple[Any, ...]:
    """Return what feedback says, without the time at which a gateway received it."""
    return (one.id, one.target, one.metric, type(one.value), one.value, one.revision, tuple(sorted(one.tags.items())), one.caller)


def _possible(metric: Metric, stored: float, given: list[tuple[float, tuple[int, float, tuple[str, int]], float]]) -> list[float | None]:
    """Return the values of a metric, if these values were given in this order. There are several if a trainer may have looked earlier."""
    if metric.settle is None:
        return [max((rank, value) for _, rank, value in given)[1] if given else metric.default]
    allowed: list[float | None] = []
    for count in range(len(given) + 1):
        final = stored + metric.window + _SECOND
        if count:
            final = min(final, given[count - 1][0] + metric.settle + _SECOND)
        if count == len(given) or given[count][0] + _SECOND >= final:
            allowed.append(max((rank, value) for _, rank, value in given[:count])[1] if count else metric.default)
    return allowed


def _number(metric: Metric, value: bool | float | str) -> float | None:
    """Return the value as a number if the metric can have it."""
    if isinstance(value, str) or isinstance(value, bool) is not (metric.type == "boolean"):
        return None
    low = 0.0 if metric.low is None else metric.low
    high = 1.0 if metric.high is None else metric.high
    return float(value) if low <= value <= high else None
