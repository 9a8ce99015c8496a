"""Attributes every second of every member to what the member does in it, or waits for. Virtual time makes the answer exact."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ...fleet.steps.requests import Generate, Sync, Wait, Watch
from ...store.requests import Sleep
from .kernel import VirtualThread
from .store_model import folder_of
from .world import World

GENERATING = "generating"
NO_OFFER = "no offer, though tasks are open"
LAST_TASKS = "the last tasks of all open rounds run"
TRAINER = "no round: the trainer collects, trains, publishes"
_BY_FOLDER = {
    "board": "reading the board",
    "round": "reading the round and its rows",
    "tasks": "reading the round and its rows",
    "lease": "creating the lease",
    "rollout": "uploading the result",
    "member": "writing the heartbeat",
    "epoch": "reading the board",
}
CATEGORIES = (GENERATING, *dict.fromkeys(_BY_FOLDER.values()), "getting the version", NO_OFFER, LAST_TASKS, TRAINER)

_BESIDE = ("heartbeat_steps", "upload_steps")
"""Threads that a member's work never waits for."""


class Profile:
    """Watches the members of a world from its start on.

    A member that generates is at work, whatever its other threads do. Otherwise its time belongs to what its other threads ask for.

    Parameters
    ----------
    world
        The world, before it runs.
    begin
        Seconds of virtual time before this are not counted.
    """

    def __init__(self, world: World, *, begin: float = 0.0) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds of all members by category."""
        self._world = world
        self._begin = begin
        self._doing: dict[str, dict[int, str]] = {}
        self._since: dict[str, float] = {}
        world.watch = self._watch

    def shares(self) -> dict[str, float]:
        """Return the part of the members' time that each category has, until now."""
        for name in self._doing:
            self._count(name)
        total = sum(self.seconds.values()) or 1.0
        return {category: self.seconds[category] / total for category in CATEGORIES}

    def _watch(self, thread: VirtualThread, request: Any) -> None:
        name = thread.process.name
        if name in self._world.members and thread.title not in _BESIDE:
            self._count(name)
            self._doing.setdefault(name, {})[id(thread)] = self._category(request)

    def _count(self, name: str) -> None:
        now = max(self._begin, self._world.kernel.now)
        passed = now - self._since.get(name, self._begin)
        doing = list(self._doing.get(name, {}).values())
        if doing:
            self.seconds[GENERATING if GENERATING in doing else next((one for one in doing if one), TRAINER)] += passed
        self._since[name] = now

    def _category(self, request: Any) -> str:
        if isinstance(request, Generate):
            return GENERATING
        if isinstance(request, Sync):
            return "getting the version"
        if isinstance(request, Wait):
            return ""
        if isinstance(request, Sleep) or (isinstance(request, Watch) and request.seconds > 0):
            return self._reason_to_wait()
        return _BY_FOLDER[folder_of(request)]

    def _reason_to_wait(self) -> str:
        coordinator = self._world.trainers[-1].model.coordinator if self._world.trainers else None
        if coordinator is None:
            return TRAINER
        tasks = [task for state in coordinator.rounds.values() if state.is_accepting for task in state.tasks if task.accepted is None]
        if any(not task.leases for task in tasks):
            return NO_OFFER
        return LAST_TASKS if tasks else TRAINER
