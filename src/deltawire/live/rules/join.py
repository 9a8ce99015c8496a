"""Gives an interaction the rewards that feedback says (docs/protocol.md §13, "Joining").

All times are the store's: an interaction or feedback is as old as the object that holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...fleet.rules.live_tasks import LiveItem
from ...format.feedback import Feedback
from ...format.records.live_records import Metric

GRANULARITY = 1.0
"""Stores round the times of objects down to this many seconds at most. So an object with the time t was written before t plus this."""


@dataclass(frozen=True, slots=True)
class StoredFeedback:
    """Feedback, and when and where it was stored.

    Parameters
    ----------
    feedback
        The feedback.
    stored
        The store's time of its file, in seconds.
    index
        The session of the gateway that stored it, the number of its file, and its index in the file.
    """

    feedback: Feedback
    stored: float
    index: tuple[str, int, int]

    @property
    def order(self) -> tuple[float, tuple[str, int, int]]:
        """Feedback was stored in this order."""
        return self.stored, self.index

    @property
    def rank(self) -> tuple[int, float, tuple[str, int, int]]:
        """The feedback with the highest rank counts for its metric. No clock of a gateway decides it."""
        return self.feedback.revision, self.stored, self.index


@dataclass(frozen=True, slots=True)
class Pending:
    """An interaction that waits for feedback, without its tokens.

    Parameters
    ----------
    item
        Names it.
    key
        The key of its file.
    id
        Its id, which feedback names.
    choice
        Which completion of its request it is.
    stored
        The store's time of its file, in seconds.
    steps
        The training steps of the oldest and of the newest version that made tokens of it.
    prompt_tokens
        The number of tokens of its prompt.
    tokens
        The number of tokens of the completion.
    temperature
        The sampling temperature.
    top_p
        Tokens were drawn from the most probable ones whose probabilities sum to this.
    episode
        The id of its episode; None if it has none.
    caller
        The name of the caller's API key; None if there are no keys.
    channel
        The channel whose version answered; None if there are no channels.
    """

    item: LiveItem
    key: str
    id: str
    choice: int
    stored: float
    steps: tuple[int, int]
    prompt_tokens: int
    tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    episode: str | None = None
    caller: str | None = None
    channel: str | None = None

    @property
    def order(self) -> tuple[float, LiveItem]:
        """Interactions are joined in this order."""
        return self.stored, self.item


@dataclass(frozen=True, slots=True)
class Joined:
    """An interaction and its rewards.

    Parameters
    ----------
    pending
        The interaction.
    values
        The value of each metric that has one.
    rewards
        The reward of each metric: its value times its weight.
    """

    pending: Pending
    values: dict[str, float]
    rewards: dict[str, float]

    @property
    def reward(self) -> float:
        """The sum of the rewards."""
        return sum(self.rewards.values())


@dataclass(frozen=True, slots=True)
class Waiting:
    """An interaction that cannot be joined yet.

    Parameters
    ----------
    until
        The store's time at which to look again. Feedback may make it earlier.
    """

    until: float


def counts(metric: Metric, pending: Pending, given: StoredFeedback) -> bool:
    """Tell whether feedback counts for a metric of an interaction: its target, its caller, its value and its time fit.

    Parameters
    ----------
    metric
        The metric.
    pending
        The interaction.
    given
        The feedback.
    """
    feedback = given.feedback
    target = feedback.inference == pending.id if metric.level == "inference" else _is_same(feedback.episode, pending.episode)
    return (
        target
        and feedback.metric == metric.name
        and feedback.caller in (None, pending.caller)
        and metric.number(feedback.value) is not None
        and given.stored <= pending.stored + metric.window
    )


def join(pending: Pending, metrics: Iterable[Metric], given: Sequence[StoredFeedback], now: float) -> Joined | Waiting | None:
    """Return an interaction with its rewards, or until when it waits, or None if no metric gives it a reward.

    Parameters
    ----------
    pending
        The interaction.
    metrics
        The declared metrics. Those of weight 0 are left out.
    given
        All feedback for it or its episode that was stored up to `now`, each id once.
    now
        A time of the store.
    """
    values: dict[str, float] = {}
    rewards: dict[str, float] = {}
    waits: list[float] = []
    for metric in metrics:
        if metric.weight == 0:
            continue
        counted = [one for one in given if counts(metric, pending, one)]
        final = pending.stored + metric.window + GRANULARITY
        if metric.settle is not None and counted:
            final = min(final, max(one.stored for one in counted) + metric.settle + GRANULARITY)
        if now < final:
            waits.append(final)
            continue
        best = max(counted, key=lambda one: one.rank, default=None)
        value = metric.default if best is None else metric.number(best.feedback.value)
        if value is not None:
            values[metric.name] = value
            rewards[metric.name] = value * metric.weight
    if waits:
        return Waiting(max(waits))
    return Joined(pending, values, rewards) if values else None


def _is_same(one: str | None, other: str | None) -> bool:
    return one is not None and one == other
