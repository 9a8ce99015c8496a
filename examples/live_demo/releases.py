"""Runs the live demo: starts its processes, releases versions to the canary, and stops when everything was seen."""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))

from processes import Child
from users import Crowd

from deltawire import ReaderOptions
from deltawire.chain.channels import ChannelReader
from deltawire.chain.find import find_step, newest_version
from deltawire.chain.log import ChainLog
from deltawire.errors import ChannelMoved
from deltawire.publish.channels import ChannelWriter, Reason
from deltawire.store import Store

FOLDER = Path(__file__).resolve().parent
ENGINES = ["stable", "canary", "canary", "open"]
"""The channel of each engine. The channel `open` stays at the first version: there the loop is open."""
CANARY, OPEN = 450_000, 100_000
"""The shares of users who get the canary, and who stay with the first version, in parts per million."""
AHEAD = 4
"""A version becomes a canary if it is this many training steps ahead of stable."""
_PATIENCE = 600.0
_LOOK = 0.2


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    Parameters
    ----------
    store
        The folder of the store.
    logs
        The folder for what the processes print to stderr, and for the journal of the gateway.
    seconds
        How long users ask, at least. The demo also waits until the damaged version was rolled back and a later one promoted.
    longest
        How long users ask at most.
    damaged
        The training step whose version is damaged.
    alpha
        The error probability of the gate.
    learning_rate
        The learning rate of the trainer.
    """

    store: Path
    logs: Path
    seconds: float = 170.0
    longest: float = 230.0
    damaged: int = 14
    alpha: float = 0.05
    learning_rate: float = 6e-4


@dataclass
class Story:
    """The events of a run. Times are those of the machine's clock, which all processes share."""

    began: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)
    crowd: Crowd | None = None
    damaged_seq: int | None = None
    """The commit of the damaged version, once it was released."""
    failures: list[str] = field(default_factory=list)

    def moves(self, channel: str, kind: str) -> list[dict[str, Any]]:
        """Return the moves of a channel that the gate made."""
        return [each for each in self.events if each["event"] == "channel-moved" and (each["channel"], each["kind"]) == (channel, kind)]

    @property
    def was_rolled_back(self) -> bool:
        """Whether the gate took the damaged version back."""
        decided = [each for each in self.events if each["event"] == "gate-decided" and each["seq"] == self.damaged_seq]
        return [each["outcome"] for each in decided] == ["rollback"]

    @property
    def is_complete(self) -> bool:
        """Whether a version was promoted before and after the damaged one was rolled back."""
        rollbacks = [each["at"] for each in self.events if each["event"] == "gate-decided" and each["seq"] == self.damaged_seq]
        promotions = [each["at"] for each in self.moves("stable", "promote")]
        return self.was_rolled_back and min(promotions, default=rollbacks[0]) < rollbacks[0] < max(promotions, default=rollbacks[0])


class LiveDemo:
    """One run of the demo.

    Parameters
    ----------
    plan
        What to do.
    tell
        Called with a line for people.
    """

    def __init__(self, plan: Plan, tell: Callable[[str], object]) -> None:
        self._plan = plan
        self._tell = tell
        self._inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        self._children: dict[str, Child] = {}
        self._served: dict[str, int] = {}
        """The commit that each engine serves."""
        self.story = Story()

    def run(self) -> Story:
        """Run the demo, and end all its processes."""
        plan = self._plan
        try:
            training = ("--damaged-step", str(plan.damaged), "--learning-rate", str(plan.learning_rate))
            self._start("trainer", "live_trainer.py", str(plan.store), *training)
            self._start("engines", "live_engines.py", str(plan.store), *ENGINES)
            first = self._wait("trainer", "ready")["seq"]
            with ReaderOptions().open_store(str(plan.store)) as store:
                self._release_first(store, first)
                engines = [self._wait("engines", "serving") for _ in ENGINES]
                addresses = [
                    f"{each['channel']}={each['url']}" for each in sorted(engines, key=lambda each: ENGINES.index(each["channel"]))
                ]
                self._start("gateway", "live_gateway.py", str(plan.store), str(plan.logs / "journal"), *addresses)
                self.story.crowd = crowd = Crowd(self._wait("gateway", "serving")["url"])
                self._start("gate", "live_gate.py", str(plan.store), "--alpha", str(plan.alpha))
                self._wait("gate", "watching")
                self.story.began = time.monotonic()
                crowd.start()
                self._tell("users ask; feedback arrives up to 2 seconds later")
                try:
                    self._watch(store)
                finally:
                    crowd.leave()
                self.story.failures += crowd.failures
        finally:
            self._end()
        return self.story

    def _watch(self, store: Store) -> None:
        """Release versions until the end. The gate decides about them."""
        log = ReaderOptions().open_log(store)
        plan, began = self._plan, self.story.began
        while not self.story.failures and time.monotonic() - began < plan.longest:
            self._listen(_LOOK)
            if time.monotonic() - began >= plan.seconds and self.story.is_complete:
                return
            self._release_next(log)

    def _release_first(self, store: Store, seq: int) -> None:
        log = ReaderOptions().open_log(store)
        commit = log.ancestor(newest_version(log), seq)
        for channel, share in (("stable", None), ("canary", CANARY), ("open", OPEN)):
            ChannelWriter(log, channel).promote(commit, share=share, reason=Reason("the first version", "demo"))

    def _release_next(self, log: ChainLog) -> None:
        """Put the newest version on the canary channel, if there is no canary and the version is far enough ahead of stable."""
        canary, stable = (ChannelReader(log, name).newest() for name in ("canary", "stable"))
        served_by = [seq for engine, seq in self._served.items() if engine.startswith("canary")]
        if canary.target != stable.target or any(seq != canary.target.seq for seq in served_by):
            return  # the gate has not decided yet, or an engine does not follow its decision yet
        head = newest_version(log)
        served = log.ancestor(head, stable.target.seq).step or 0
        newest, damaged = head.step or 0, self._plan.damaged
        if newest >= damaged and self.story.damaged_seq is None and served > 0:
            version, what = find_step(log, damaged), "a damaged version"
        elif newest >= served + AHEAD and newest != damaged:
            version, what = head, "the newest version"
        else:
            return
        try:
            ChannelWriter(log, "canary").promote(version, reason=Reason(what, "demo"), expect=canary.move)
        except ChannelMoved:
            return
        if version.step == damaged:
            self.story.damaged_seq = version.seq
        self.story.events.append({"event": "released", "at": time.monotonic(), "seq": version.seq, "step": version.step})
        self._tell(f"canary    {what} (step {version.step}) goes to 45% of the users")

    def _start(self, who: str, script: str, *arguments: str) -> None:
        self._children[who] = Child(who, str(FOLDER / script), arguments, self._inbox, self._plan.logs / f"{who}.log")

    def _wait(self, who: str, name: str) -> dict[str, Any]:
        """Return the next event of this name from a process."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline and not self.story.failures:
            event = self._listen(1.0)
            if event is not None and (event["from"], event["event"]) == (who, name):
                return event
        raise RuntimeError(f"{who} did not say {name!r}: {'; '.join(self.story.failures) or 'it is too slow'}")

    def _listen(self, seconds: float) -> dict[str, Any] | None:
        """Note the next event, if one comes within some seconds."""
        try:
            event = self._inbox.get(timeout=seconds)
        except queue.Empty:
            return None
        story = self.story
        story.events.append(event)
        if event["event"] == "process-ended" and event["code"] != 0:
            story.failures.append(f"{event['who']} ended with code {event['code']}")
        elif event["event"] == "swapped":
            self._served[event["engine"]] = event["seq"]
        elif event["event"] == "gate-decided":
            self._tell(f"{event['outcome']:9} {event['why']}")
        return event

    def _end(self) -> None:
        for who, child in reversed(self._children.items()):  # the gateway ends before its engines
            child.leave()
            if not child.join(120.0):
                self.story.failures.append(f"{who} did not end by itself")
                child.kill()
                child.join(120.0)
        while not self._inbox.empty():
            self._listen(0.0)
