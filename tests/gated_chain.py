"""A chain with the channels stable and canary, live traffic on both, and a clock of the store that a test sets."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np
from channelled_chain import ChannelledChain

from deltawire import SigningKey
from deltawire.events import Event
from deltawire.format.content_hash import content_hash
from deltawire.format.feedback import Feedback, FeedbackFile
from deltawire.format.interactions import AnswerFacts, Interaction, Interactions
from deltawire.format.records.gate_records import GateRecord
from deltawire.format.records.live_records import Metric, Metrics
from deltawire.format.rollouts import ClaimedVersion, Completion, Rollouts, TokenSpan
from deltawire.live.gate import Gate, GateOptions
from deltawire.live.gate_rules import GatePolicy, Limit
from deltawire.store import Store, live_keys
from deltawire.store.live_keys import LiveKey
from deltawire.store.memory import MemoryStore
from deltawire.testing.faulty_store import FaultyStore

SOLVED = Metric("solved", window=60, default=0.0)
POLICY = GatePolicy((Limit.parse("solved", must_hold=True),), min_answers=20, max_seconds=1000.0)
_UUID = "0190a0b0-c0d0-7000-8000-{:012x}".format


@dataclass(frozen=True)
class Answered:
    """One answer that a test wants in the store, and the feedback to it."""

    channel: str | None
    version: int
    solved: bool | None = None
    facts: AnswerFacts = field(default_factory=lambda: AnswerFacts(3))
    user: str | None = None
    episode: str | None = None
    caller: str | None = None
    diverted_from: str | None = None
    choice: int = 0


class GatedChain:
    """Version 2 is on stable and version 3 on canary. Channels, traffic and records get their times from `now`.

    Parameters
    ----------
    metrics
        The metrics that are declared.
    key
        Signs everything. None leaves the chain unsigned.
    store
        Keeps the objects. None means a new store in memory.
    """

    def __init__(self, metrics: Sequence[Metric] = (SOLVED,), *, key: SigningKey | None = None, store: Store | None = None) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=timezone.utc)
        self.store = FaultyStore(store or MemoryStore(), clock=lambda: self.now)
        self.chain = ChannelledChain(store=self.store, key=key)
        self.run = self.chain.chain.run.id
        self.session = "west.0123456789abcdef"
        self.ids = 0
        self.events: list[Event] = []
        self._numbers = {"interactions": 0, "feedback": 0}
        declared = Metrics(self.run, 0, "cd" * 16, tuple(metrics), 0)
        self.store.put_if_absent(live_keys.metrics_key(0), (declared if key is None else key.sign(declared)).to_bytes())
        self.promote(2, "stable")
        self.promote(3, "canary")

    def copy(self) -> GatedChain:
        """Return a chain with the same objects in a store of its own, for tests that repeat what follows a long beginning."""
        new = copy.copy(self)
        new.store = FaultyStore(MemoryStore(), clock=lambda: new.now)
        for info in self.store.list(""):
            new.now = info.modified
            new.store.put(info.key, self.store.get(info.key, limit=info.size))
        new.now = self.now
        new.store.calls.clear()
        new.chain = self.chain.with_store(new.store)
        new.events, new._numbers = list(self.events), dict(self._numbers)
        return new

    def promote(self, version: int, channel: str) -> None:
        self.chain.promote(version, channel, 500_000 if channel == "canary" else None)
        self.pass_time(1)

    def pass_time(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def new_id(self) -> str:
        self.ids += 1
        return _UUID(self.ids)

    def answer(self, answers: Iterable[Answered], metric: str = "solved") -> list[str]:
        """Store answers in one file, and feedback to them in another. Returns the ids of the answers."""
        listed = list(answers)
        ids = [self.new_id() for _ in listed]
        self.put_interactions(listed, ids)
        given = [
            Feedback(self.new_id(), metric, each.solved, inference=identifier, caller=each.caller)
            for each, identifier in zip(listed, ids, strict=True)
            if each.solved is not None
        ]
        if given:
            self.put_feedback(given)
        return ids

    def put_interactions(self, answers: Sequence[Answered], ids: Sequence[str]) -> None:
        versions = sorted({each.version for each in answers})
        commits = self.chain.chain.commits
        rollouts = Rollouts(
            run=self.run,
            round=0,
            task=0,
            attempt=0,
            member=self.session,
            nonce="cd" * 16,
            prompts=(np.array([1, 2], np.int32),),
            completions=tuple(_completion(each.version) for each in answers),
            reward_names=(),
            versions={seq: ClaimedVersion(commits[seq].step or 0, commits[seq].digest) for seq in versions},  # type: ignore[arg-type]
        )
        told = tuple(
            Interaction(
                identifier,
                0,
                "chat",
                "m",
                "stop",
                True,
                1.0,
                1.0,
                each.facts,
                each.episode,
                each.choice,
                each.user,
                each.channel,
                each.caller,
                diverted_from=each.diverted_from,
            )
            for each, identifier in zip(answers, ids, strict=True)
        )
        data = Interactions(self._number("interactions"), told, rollouts).to_bytes()
        key = LiveKey(self.session, self._numbers["interactions"] - 1, content_hash(data))
        self.store.put(live_keys.interactions_key(key), data)

    def put_feedback(self, feedback: Sequence[Feedback], run: str | None = None) -> None:
        data = FeedbackFile(run or self.run, self.session, self._number("feedback"), tuple(feedback)).to_bytes()
        key = LiveKey(self.session, self._numbers["feedback"] - 1, content_hash(data))
        self.store.put(live_keys.feedback_key(key), data)

    def traffic(self, canary: float, stable: float, count: int = 300, *, seed: int = 0, version: int = 3, **more: Any) -> None:
        """Store answers of both channels, half of each, of which these shares are solved. Their windows end. `version` is the canary's."""
        draw = random.Random(seed)
        answers = []
        for _ in range(count):
            is_canary = draw.random() < 0.5
            chance = canary if is_canary else stable
            answers.append(Answered("canary" if is_canary else "stable", version if is_canary else 2, draw.random() < chance, **more))
        self.answer(answers)
        self.pass_time(61)
        self.tick()

    def tick(self) -> None:
        """Store an answer that does not count, so that a reader sees the time."""
        self.put_interactions([Answered(None, 2)], [self.new_id()])

    def gate(self, policy: GatePolicy = POLICY, *, store: Store | None = None, **more: Any) -> Gate:
        from deltawire.live.declared_metrics import declared_metrics

        log = self.chain.log(store or self.store)
        options = GateOptions(**{name: more.pop(name) for name in list(more) if name in GateOptions.__dataclass_fields__})
        own = {"key": self.chain.key, "on_event": self.events.append, "sleep": lambda seconds: None, **more}
        return Gate(log, policy, lambda: declared_metrics(log), options=options, **own)

    def target(self, channel: str) -> int:
        """Return the version of a channel."""
        return self.chain.reader(channel).newest().target.seq

    def moves(self, channel: str) -> list[tuple[str, int]]:
        """Return the kinds and versions of all moves of a channel, the oldest first."""
        return [(move.kind, move.target.seq) for move in self.chain.reader(channel).history()][::-1]

    def records(self, channel: str = "canary", move: int = 0) -> list[GateRecord]:
        found = self.store.list(live_keys.gate_folder(channel, move))
        return [GateRecord.parse(self.store.get(info.key, limit=1 << 20)) for info in found]

    def _number(self, kind: str) -> int:
        self._numbers[kind] += 1
        return self._numbers[kind] - 1


def _completion(version: int) -> Completion:
    return Completion(
        prompt=0,
        tokens=np.array([7, 8, 9], np.int32),
        logprobs=np.zeros(3, np.float32),
        mask=np.ones(3, np.uint8),
        rewards=(),
        spans=(TokenSpan(0, 3, version),),
        finished=True,
    )
