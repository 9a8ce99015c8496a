"""Gateways that answer users with versions of the chain, and users who react late, twice, again, or not at all."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np

from ...fleet.rules.staleness import KnownVersion
from ...format.content_hash import content_hash
from ...format.feedback import Feedback, FeedbackFile, Value
from ...format.interactions import AnswerFacts, Interaction, Interactions
from ...format.records.live_records import Metric
from ...format.rollouts import ClaimedVersion, Completion, Rollouts, TokenSpan
from ...store.live_keys import LiveKey, feedback_key, interactions_key
from ...store.requests import Put
from ..fleet_simulation.world import World

WINDOW, LONG_WINDOW = 40, 70
METRICS = (
    Metric("thumbs", window=WINDOW, default=0.5),
    Metric("rating", "episode", "float", window=LONG_WINDOW, weight=0.25, low=0.0, high=4.0),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """An interaction as the gateway made it, and the store's time of its file."""

    id: str
    token: int
    version: KnownVersion
    train: bool
    episode: str | None
    caller: str | None
    stored: float


@dataclass(frozen=True, slots=True)
class Reaction:
    """Feedback as it was stored: the store's time and the key of its file come first."""

    stored: float
    key: str
    feedback: Feedback


@dataclass(slots=True)
class Traffic:
    """All gateways of a run, and everything that they have stored.

    Parameters
    ----------
    world
        The simulation.
    random
        The source of all random numbers.
    """

    world: World
    random: Random
    answers: dict[str, Answer] = field(default_factory=dict)
    reactions: list[Reaction] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    stops: float = float("inf")
    """The time after which nobody asks anything more."""
    _numbers: dict[tuple[str, str], int] = field(default_factory=dict)
    _count: int = 0

    def start(self, gateways: int) -> None:
        """Start gateways, each of which answers again and again."""
        for number in range(gateways):
            self.sessions.append(f"gateway{number}.{self.random.getrandbits(64):016x}")
            self.world.kernel.later(self.random.uniform(0, 10), self._answer, number)

    def _answer(self, number: int) -> None:
        """Answer some requests in one file, and let their users react."""
        world, random = self.world, self.random
        if world.kernel.now > self.stops or world.finished:
            return
        world.kernel.later(random.uniform(8, 40), self._answer, number)
        if random.random() < 0.1:
            self.sessions[number] = f"gateway{number}.{random.getrandbits(64):016x}"  # it was started again
        served = world.chain.live()[-3:]
        if not served:
            return
        version = random.choice(served)
        session = self.sessions[number]
        ids = [self._id() for _ in range(random.randint(1, 3))]
        abouts = [
            Interaction(
                id=each,
                time=random.randrange(10**12),
                route="chat",
                model="demo",
                finish="stop",
                train=random.random() < 0.8,
                temperature=1.0,
                top_p=1.0,
                facts=AnswerFacts(2),
                episode=random.choice([None, self._episode(1), self._episode(2)]),
                caller=random.choice([None, "app"]),
            )
            for each in ids
        ]
        tokens = [random.randrange(1000) for _ in ids]
        rollouts = Rollouts(
            run=world.plan.run,
            round=0,
            task=0,
            attempt=0,
            member=session,
            nonce=world.draw_nonce(),
            prompts=tuple(np.array([1], np.int32) for _ in ids),
            completions=tuple(
                Completion(
                    prompt,
                    np.array([token, 5], np.int32),
                    np.array([-1.0, -0.5], np.float32),
                    np.ones(2, np.uint8),
                    (),
                    (TokenSpan(0, 2, version.seq),),
                    True,
                )
                for prompt, token in enumerate(tokens)
            ),
            reward_names=(),
            versions={version.seq: ClaimedVersion(version.step, version.digest)},
        )
        data = Interactions(self._next(session, "interactions"), tuple(abouts), rollouts).to_bytes()
        key = interactions_key(LiveKey(session, self._numbers[session, "interactions"] - 1, content_hash(data)))
        stored = self._put(key, data)
        for about, token in zip(abouts, tokens, strict=True):
            self.answers[about.id] = Answer(about.id, token, version, about.train, about.episode, about.caller, stored)
            for _ in range(random.choice([0, 1, 1, 2, 3])):
                world.kernel.later(random.expovariate(1 / 30), self._react, self._feedback(about))

    def _feedback(self, about: Interaction) -> Feedback:
        random = self.random
        on_episode = about.episode is not None and random.random() < 0.4
        values: list[Value] = [1.0, 3.0, 9.0, True] if on_episode else [True, False, True, False, 1.0, "fine"]
        value = random.choice(values)
        return Feedback(
            id=self._id(),
            metric=random.choice(["rating", "rating", "thumbs"]) if on_episode else random.choice(["thumbs", "thumbs", "other"]),
            value=value,
            inference=None if on_episode else about.id if random.random() < 0.95 else self._id(),
            episode=about.episode if on_episode else None,
            revision=random.randrange(3),
            time=random.randrange(3),
            caller=random.choice([None, "app", "other"]),
        )

    def _react(self, feedback: Feedback) -> None:
        """Store feedback through any gateway. Some callers repeat it, or use its id again for something else."""
        random = self.random
        session = random.choice(self.sessions)
        data = FeedbackFile(self.world.plan.run, session, self._next(session, "feedback"), (feedback,)).to_bytes()
        key = feedback_key(LiveKey(session, self._numbers[session, "feedback"] - 1, content_hash(data)))
        self.reactions.append(Reaction(self._put(key, data), key, feedback))
        if random.random() < 0.15:
            again = feedback
            if random.random() < 0.3 and isinstance(feedback.value, bool):
                again = Feedback(feedback.id, feedback.metric, not feedback.value, inference=feedback.inference, episode=feedback.episode)
            self.world.kernel.later(random.expovariate(1 / 20), self._react, again)

    def _put(self, key: str, data: bytes) -> float:
        self.world.store.objects.perform(Put(key, data))
        return self.world.store.objects.time().timestamp()

    def _next(self, session: str, kind: str) -> int:
        number = self._numbers.get((session, kind), 0)
        self._numbers[session, kind] = number + 1
        return number

    def _id(self) -> str:
        self._count += 1
        return f"0190a0b0-c0d0-7000-8000-{self._count:012x}"

    def _episode(self, number: int) -> str:
        return f"0190a0b0-c0d0-4000-9000-{number + 10 * (self._count // 12):012x}"
