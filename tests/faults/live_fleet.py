"""A fleet with live traffic in one thread: gateways that write files, and trainers that join them (small_fleet.py)."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from live_samples import ID
from publications import repeated, state_at
from small_fleet import SAMPLING, Fleet, Trainer, live_versions, rows_for

from deltawire.fleet import Batch, FleetOptions, StalenessBudget
from deltawire.fleet.chain_versions import ChainVersions
from deltawire.fleet.rules.live_tasks import LIVE_MEMBER, LiveRow
from deltawire.fleet.rules.staleness import KnownVersion
from deltawire.format.content_hash import content_hash
from deltawire.format.feedback import Feedback, FeedbackFile
from deltawire.format.interactions import AnswerFacts, ConversationText, Interaction, Interactions, Message
from deltawire.format.records.live_records import Metric
from deltawire.format.rollouts import ClaimedVersion, Completion, Rollouts, TokenSpan
from deltawire.live.steps.joiner_steps import JoinerOptions, JoinerSteps
from deltawire.live.steps.live_rounds import LiveRounds
from deltawire.store import Store
from deltawire.store.live_keys import LiveKey, feedback_key, interactions_key

WINDOW = 100
THUMBS = Metric("thumbs", window=WINDOW, default=0.25)


@dataclass
class Answers:
    """A gateway that the test drives. It writes each file at once."""

    fleet: Fleet
    session: str = "west.0123456789abcdef"
    answered: int = 0
    files: Counter[str] = field(default_factory=Counter)
    time: int = 0
    """The gateway's own clock."""

    def answer(self, *first: int, version: KnownVersion | None = None, **about: Any) -> list[str]:
        """Answer requests, whose prompts are these tokens, and record them in one file. Return the ids of the interactions."""
        version = version or ChainVersions(self.fleet.log).newest()
        ids = [ID(1000 * (1 + int(self.session[-1], 16)) + self.answered + number) for number in range(len(first))]
        self.answered += len(first)
        facts = {"route": "chat", "model": "demo", "finish": "stop", "train": True, "temperature": 1.0, "top_p": 1.0} | about
        entries = tuple(Interaction(id=each, time=self.time, facts=AnswerFacts(2), **facts) for each in ids)
        made = tuple(
            Completion(
                prompt=number,
                tokens=np.array([token, 7], np.int32),
                logprobs=np.array([-0.5, -0.25], np.float32),
                mask=np.ones(2, np.uint8),
                rewards=(),
                spans=(TokenSpan(0, 2, version.seq),),
                finished=True,
            )
            for number, token in enumerate(first)
        )
        rollouts = Rollouts(
            run=self.fleet.log.run.id,
            round=0,
            task=0,
            attempt=0,
            member=self.session,
            nonce="ab" * 16,
            prompts=tuple(np.array([1, token], np.int32) for token in first),
            completions=made,
            reward_names=(),
            versions={version.seq: ClaimedVersion(version.step, version.digest)},
        )
        data = Interactions(self.files["interactions"], entries, rollouts).to_bytes()
        self.fleet.store.put(interactions_key(LiveKey(self.session, self.files["interactions"], content_hash(data))), data)
        self.files["interactions"] += 1
        return ids

    def says(self, *feedback: Feedback) -> None:
        """Write feedback to one file."""
        data = FeedbackFile(self.fleet.log.run.id, self.session, self.files["feedback"], feedback).to_bytes()
        self.fleet.store.put(feedback_key(LiveKey(self.session, self.files["feedback"], content_hash(data))), data)
        self.files["feedback"] += 1


def text(*messages: str, answer: str) -> ConversationText:
    roles = ("user", "assistant")
    return ConversationText(tuple(Message(roles[number % 2], each) for number, each in enumerate(messages)), answer)


def live_fleet(staleness: int = 4, **options: Any) -> Fleet:
    return Fleet(budget=StalenessBudget(staleness), options=FleetOptions(60, **({"keep_steps": 1} | options)))


class LiveTrainer(Trainer):
    """A trainer that learns from live traffic. It takes as many interactions for a step as there are, up to `most`."""

    def __init__(
        self,
        fleet: Fleet,
        publisher: Any,
        store: Store,
        *,
        metrics: tuple[Metric, ...] = (THUMBS,),
        most: int = 3,
        tasks: int = 0,
        **given: Any,
    ) -> None:
        super().__init__(fleet, publisher, store)
        self.most, self.tasks = most, tasks
        options = given.pop("options", None) or JoinerOptions()
        self.joiner = JoinerSteps(fleet.log.run.id, metrics, options, lambda: fleet.time, on_event=fleet.events.append, **given)
        self.rounds = LiveRounds(self.joiner)

    def open_live(self, step: int, least: int = 1) -> Any:
        def others(live: int) -> Any:
            return rows_for(step, self.tasks) if self.tasks else []

        return self.go(self.rounds.open(self.steps, others, for_step=step, sampling=SAMPLING, most=self.most, least=least))

    def train(self, batch: Batch) -> Any:
        """Publish a step together with the interactions that it was trained on, and their rewards."""
        meta = {"trained": json.dumps(trained_on(batch))}
        version = self.publisher.publish(state_at(batch.step), step=batch.step, meta=meta)
        self.steps.published(KnownVersion(version.seq, batch.step, version.digest))
        return version

    def run_live(self, last: int, *, tries: int = 1) -> None:
        """Train up to a step. Time passes while too few interactions have their rewards."""
        repeated(lambda: self.go(self.steps.resume()), tries)
        while (step := self.steps.newest.step + 1) <= last:
            for _ in range(10):
                if repeated(lambda step=step: self.open_live(step), tries) is not None:
                    break
                self.fleet.sleep(WINDOW / 2)
            self.train(repeated(lambda step=step: self.collect(step), tries))
            repeated(lambda: self.go(self.steps.poll()), tries)


def trained_on(batch: Batch) -> list[list[Any]]:
    """Return [id, reward, first token of the answer, version] of each live result of a batch."""
    found = []
    for rows, rollouts in zip(batch.rows, batch.rollouts, strict=True):
        if rollouts.member == LIVE_MEMBER:
            row = LiveRow.of(rows[0])
            assert row is not None
            [one] = rollouts.completions
            found.append([row.id, sum(each or 0.0 for each in one.rewards), int(one.tokens[0]), one.spans[0].seq])
    return found


def all_trained(store: Store) -> list[list[Any]]:
    """Return what the versions of the one line of history were trained on."""
    versions = live_versions(store)
    assert [version.step for version in versions] == list(range(len(versions)))
    return [each for version in versions[1:] for each in json.loads(version.meta["trained"])]
