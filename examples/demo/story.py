"""Collects the events of the demo's processes into the story of a run, which the view shows. Pure.

Every event is a dict: "event" is its name, "from" is the process that reported it, and "at" is its time in seconds since the demo started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Told = Mapping[str, Any]
TRAINER, CONDUCTOR = "trainer", "demo"
"""The two processes that report events and are not members. The conductor starts all others."""


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One step of the trainer, and the bytes of its version."""

    at: float
    step: int
    reward: float
    tokens: int
    lag: float
    changed: int
    bytes: int
    state_bytes: int
    mismatch_kl: float | None = None


@dataclass(slots=True)
class Work:
    """The work of one member on one task. `end` is None while it works; `outcome` is the result."""

    round: int
    task: int
    attempt: int
    start: float
    end: float | None = None
    tokens: int = 0
    outcome: str = "working"


@dataclass(frozen=True, slots=True)
class Swap:
    """A swap of weights in a member, and the time in which the member could not generate."""

    at: float
    step: int
    pause_seconds: float


@dataclass(slots=True)
class MemberStory:
    """One member. `lag` holds (time, steps behind the newest policy) at every change."""

    name: str
    part: str
    started: float
    is_late: bool = False
    ended: float | None = None
    ending: str = "starting"
    step: int | None = None
    lag: list[tuple[float, int]] = field(default_factory=list)
    swaps: list[Swap] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    fetched_bytes: int = 0
    syncs: int = 0
    digest: str | None = None

    @property
    def is_living(self) -> bool:
        return self.ended is None

    @property
    def tokens(self) -> int:
        """The number of tokens in all uploaded results."""
        return sum(work.tokens for work in self.works if work.outcome == "uploaded")

    def tokens_per_second(self, until: float) -> float:
        """Return the tokens per second since its first lease, including waiting."""
        if not self.works:
            return 0.0
        last = until if self.ended is None else self.ended
        return self.tokens / max(1e-9, last - self.works[0].start)


@dataclass(frozen=True, slots=True)
class Proof:
    """The digests of all processes at the end, each computed from the weights themselves. The proof holds if all are equal."""

    step: int
    trainer: str
    published: str
    members: Mapping[str, str | None]

    @property
    def holds(self) -> bool:
        return bool(self.members) and {self.trainer, self.published, *self.members.values()} == {self.trainer}

    def line(self) -> str:
        """Describe the proof. Name the processes that differ."""
        if self.holds:
            count = len(self.members)
            return f"{'every member is' if count > 1 else 'the member is'} bit-identical to the trainer: {count} × digest {self.trainer}"
        if not self.members:
            return "NOT PROVEN: no member was left to compare with the trainer"
        if self.published != self.trainer:
            return f"NOT BIT-IDENTICAL: the trainer has {self.trainer}, but published {self.published}"
        wrong = [f"{name} has {digest or 'not reported its digest'}" for name, digest in self.members.items() if digest != self.trainer]
        return f"NOT BIT-IDENTICAL: the trainer has {self.trainer}; {'; '.join(wrong)}"


@dataclass(slots=True)
class Story:
    """The story so far. `tell` adds the next event, and ignores events that it does not know."""

    location: str = ""
    goal: int = 0
    recipe: str | None = None
    """How the policy is quantised."""
    now: float = 0.0
    stage: str = "starting"
    weights: int = 0
    state_bytes: int = 0
    reward_name: str = "reward"
    pretraining: tuple[float, float] = (0.0, 0.0)
    """The share that is done, and the loss in nats per token."""
    steps: list[TrainedStep] = field(default_factory=list)
    newest_step: int = 0
    members: dict[str, MemberStory] = field(default_factory=dict)
    accepted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    accepted_by: dict[tuple[int, int], str] = field(default_factory=dict)
    """The members whose results were accepted, by round and task."""
    marks: list[tuple[float, str]] = field(default_factory=list)
    """The times and texts of important events."""
    proof: Proof | None = None
    _end: Told | None = None
    _troubles: set[str] = field(default_factory=set)

    def tell(self, event: Told) -> None:
        self.now = max(self.now, float(event["at"]))
        take = getattr(self, "_on_" + event["event"].replace("-", "_"), None)
        if take is not None:
            take(event)

    @property
    def first_reward(self) -> float:
        """The mean reward of the first tenth of the steps, because single steps are noisy."""
        return _mean([step.reward for step in self.steps[: max(1, len(self.steps) // 10)]])

    @property
    def last_reward(self) -> float:
        return _mean([step.reward for step in self.steps[-max(1, len(self.steps) // 10) :]])

    @property
    def densities(self) -> list[float]:
        """The share of changed weights in each step."""
        return [step.changed / self.weights for step in self.steps] if self.weights else []

    @property
    def mismatches(self) -> list[float]:
        """How far the policy that drew the tokens is from the trainer's own, in nats per token, in each step."""
        return [step.mismatch_kl for step in self.steps if step.mismatch_kl is not None]

    @property
    def reduction(self) -> float:
        """The size of full weights at each step, divided by the size of the deltas of all steps."""
        return sum(step.state_bytes for step in self.steps) / max(1, sum(step.bytes for step in self.steps))

    @property
    def fetched(self) -> tuple[int, int]:
        """The bytes that members fetched, including full checkpoints when they joined, and the bytes of full weights at each sync."""
        syncs = sum(member.syncs for member in self.members.values())
        return sum(member.fetched_bytes for member in self.members.values()), syncs * self.state_bytes

    @property
    def pauses(self) -> list[float]:
        return [swap.pause_seconds for member in self.members.values() for swap in member.swaps]

    @property
    def takeovers(self) -> list[tuple[str, Work, str]]:
        """Tasks of a killed member that others have done: (killed member, its work, member that took over)."""
        lost = [(member.name, work) for member in self.members.values() for work in member.works if work.outcome == "lost"]
        done = [(name, work, self.accepted_by.get((work.round, work.task))) for name, work in lost]
        return [(name, work, by) for name, work, by in done if by is not None and by != name]

    def _on_demo(self, event: Told) -> None:
        self.location, self.goal, self.recipe = event["store"], event["steps"], event.get("recipe")

    def _on_process_started(self, event: Told) -> None:
        if event["who"] != TRAINER:
            self.members[event["who"]] = MemberStory(event["who"], event["part"], event["at"], event["late"])
            if event["late"]:
                self._mark(event, f"{event['who']} was started, to join half-way")

    def _on_process_ended(self, event: Told) -> None:
        member = self.members.get(event["who"])
        if event["who"] == TRAINER and event["code"]:
            self._mark(event, f"the trainer failed with code {event['code']}")
        if member is None or not member.is_living:
            return
        member.ended = event["at"]
        member.ending = "left" if event["code"] == 0 else "killed" if event["killed"] else f"failed ({event['code']})"
        for work in member.works:
            if work.outcome == "working":
                work.end, work.outcome = event["at"], "lost"
                how = "was killed (SIGKILL)" if event["killed"] else "ended"
                self._mark(event, f"{member.name} {how} while it worked on task {work.task} of round {work.round}")

    def _on_pretraining(self, event: Told) -> None:
        self.stage = "pre-training"
        self.pretraining = event["share"], event["loss"]

    def _on_model(self, event: Told) -> None:
        self.weights, self.state_bytes, self.reward_name = event["weights"], event["state_bytes"], event["reward"]

    def _on_published(self, event: Told) -> None:
        self.stage = "training"
        self.state_bytes = event["state_bytes"]
        self.newest_step = max(self.newest_step, event["step"] or 0)
        for member in self.members.values():
            self._note_lag(member, event["at"])

    def _on_trained(self, event: Told) -> None:
        self.steps.append(TrainedStep(**{name: event.get(name) for name in TrainedStep.__slots__}))

    def _on_rollout_accepted(self, event: Told) -> None:
        self.accepted += 1
        task, by = (event["round"], event["task"]), event["member"]
        self.accepted_by[task] = by
        for name, work, taker in self.takeovers:
            if (work.round, work.task) == task:
                self._mark(event, f"{taker} took over task {work.task} of round {work.round}, which {name} had not finished")

    def _on_rollout_rejected(self, event: Told) -> None:
        self.rejected[event["reason"]] += 1

    def _on_trouble(self, event: Told) -> None:
        """Mark an error that is tried again or was given up, once."""
        words = f"{event['from']}: {event.get('reason') or event.get('error')}"
        if words not in self._troubles:
            self._troubles.add(words)
            self._mark(event, words)

    _on_fleet_retrying = _on_member_retrying = _on_work_failed = _on_sync_failed = _on_swap_failed = _on_follow_failed = _on_trouble

    def _on_joined(self, event: Told) -> None:
        self.members[event["from"]].ending = "in the fleet"

    def _on_synced(self, event: Told) -> None:
        member = self.members[event["from"]]
        member.fetched_bytes += event["bytes"]
        member.syncs += 1

    def _on_swapped(self, event: Told) -> None:
        member = self.members[event["from"]]
        if member.step is None and member.is_late:
            self._mark(event, f"{member.name} has joined, at step {event['step']}")
        member.step = event["step"]
        member.swaps.append(Swap(event["at"], event["step"], event["pause_seconds"]))
        self._note_lag(member, event["at"])

    def _on_generating(self, event: Told) -> None:
        works = self.members[event["from"]].works
        works.append(Work(event["round"], event["task"], event["attempt"], event["at"]))

    def _on_generated(self, event: Told) -> None:
        work = self._work(event)
        if work is not None:
            work.tokens, work.end = event["tokens"], event["at"]

    def _on_rollout_uploaded(self, event: Told) -> None:
        work = self._work(event)
        if work is not None:
            work.end, work.outcome = event["at"], "uploaded"

    def _on_left(self, event: Told) -> None:
        member = self.members[event["from"]]
        for work in member.works:
            if work.outcome == "working":
                work.end, work.outcome = event["at"], "given up"

    def _on_weights(self, event: Told) -> None:
        self.members[event["from"]].digest = event["digest"]

    def _on_finished(self, event: Told) -> None:
        self.stage = "proving"
        self._end = event

    def _on_ended(self, event: Told) -> None:
        """All processes have ended. Only now it is known which members were there at the end, and should have the last weights."""
        self.stage = "over"
        if self._end is not None:
            living = {member.name: member.digest for member in self.members.values() if member.ending != "killed"}
            self.proof = Proof(self._end["step"], self._end["digest"], self._end["published"], living)

    def _work(self, event: Told) -> Work | None:
        works = self.members[event["from"]].works
        return next((work for work in reversed(works) if (work.round, work.task) == (event["round"], event["task"])), None)

    def _note_lag(self, member: MemberStory, at: float) -> None:
        if member.step is not None and member.is_living:
            member.lag.append((at, max(0, self.newest_step - member.step)))

    def _mark(self, event: Told, text: str) -> None:
        self.marks.append((event["at"], text))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
