"""Runs the processes of the demo: one trainer and three members. Half-way, one member is killed and another joins."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import Child
from story import CONDUCTOR, TRAINER, Story

SLOWDOWN = 4
PARTS = {
    "steady": "an ordinary member",
    "slow": f"throttled: {SLOWDOWN}× slower",
    "unlucky": "killed half-way",
    "newcomer": "joins half-way",
}
GRACE = 20.0
"""Seconds that processes have to leave after Ctrl-C."""
PATIENCE = 120.0
"""Seconds that members have to leave once the trainer has told them that the run is over."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a run. `pretraining` is in seconds, and `quantise` is a recipe."""

    store: str
    logs: Path
    steps: int
    pretraining: float
    quantise: str | None = None

    @property
    def half(self) -> int:
        return self.steps // 2


class Conductor:
    """Runs a plan. Adds every event to the story, and then passes it to `listener`."""

    def __init__(self, plan: Plan, listener: Callable[[dict[str, Any], Story], None]) -> None:
        self.story = Story()
        self._plan = plan
        self._listener = listener
        self._start = time.monotonic()
        self._inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        self._children: dict[str, Child] = {}

    def run(self) -> Story:
        """Run until all processes have ended. No process is left running, even after an error or Ctrl-C."""
        try:
            self._tell("demo", store=self._plan.store, steps=self._plan.steps, recipe=self._plan.quantise)
            for name in ("steady", "slow", "unlucky"):
                self._enter(name)
            arguments = ["--steps", str(self._plan.steps), "--pretraining", str(self._plan.pretraining), "--members", "3"]
            arguments += ["--quantise", self._plan.quantise] if self._plan.quantise else []
            self._start_child(TRAINER, "trainer_process.py", [self._plan.store, *arguments])
            while self._children[TRAINER].code is None:
                self._take(0.1)
            self._wait_for_the_end()
        finally:
            self._end_all()
        self._tell("ended")
        return self.story

    def failures(self) -> dict[str, str]:
        """Return the end of the output of processes that failed, by name."""
        found = {}
        for who, child in self._children.items():
            output = child.log.read_text(errors="replace").strip()
            if child.code and output and not child.is_sacrificed:
                found[who] = "\n".join(output.splitlines()[-12:])
        return found

    def _enter(self, name: str, *, late: bool = False) -> None:
        pace = {"slow": ["--slowdown", str(SLOWDOWN)], "unlucky": ["--halt-at", str(self._plan.half)]}.get(name, [])
        self._start_child(name, "member_process.py", [self._plan.store, name, *pace], part=PARTS[name], late=late)

    def _start_child(self, who: str, script: str, arguments: list[str], *, part: str = "", late: bool = False) -> None:
        child = Child(who, script, arguments, self._inbox, self._plan.logs / f"{who}.log")
        self._children[who] = child
        self._tell("process-started", who=who, part=part, late=late, pid=child.pid)

    def _take(self, timeout: float) -> None:
        """Wait a short time for the next event, and react to it."""
        try:
            event = self._inbox.get(timeout=timeout)
        except queue.Empty:
            self._note({"event": "tick", "from": CONDUCTOR, "at": time.monotonic()})
            return
        self._note(event)
        if event["event"] == "halted":
            self._children[event["from"]].sacrifice()
            self._enter("newcomer", late=True)

    def _wait_for_the_end(self) -> None:
        """Wait until the members have left. The trainer has told them that the run is over."""
        deadline = time.monotonic() + PATIENCE
        while any(child.code is None for child in self._children.values()) and time.monotonic() < deadline:
            self._take(0.1)

    def _end_all(self) -> None:
        running = [child for child in self._children.values() if child.code is None]
        for child in running:
            child.leave()
        deadline = time.monotonic() + GRACE
        for child in running:
            if not child.join(max(0.1, deadline - time.monotonic())):
                child.kill()
        for child in self._children.values():
            child.join(GRACE)
        while not self._inbox.empty():
            self._note(self._inbox.get())

    def _tell(self, name: str, **fields: Any) -> None:
        self._note({"event": name, "from": CONDUCTOR, "at": time.monotonic(), **fields})

    def _note(self, event: dict[str, Any]) -> None:
        event["at"] -= self._start
        self.story.tell(event)
        self._listener(event, self.story)
