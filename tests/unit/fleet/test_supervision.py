"""Test which members are restarted, when, and how often. The test sets the clock, and decides how members end."""

from __future__ import annotations

import threading

from deltawire.events import Event
from deltawire.fleet.supervision import PermanentFailure, Supervisor


class Fake:
    """A member that ends when and how the test says."""

    def __init__(self) -> None:
        self.how: str | None = None
        self.was_asked = self.was_killed = False

    def ending(self) -> str | None:
        return self.how

    def leave(self) -> None:
        self.was_asked = True

    def kill(self) -> None:
        self.was_killed = True


class World:
    def __init__(self, names: list[str], restarts: int = 2, grace: float = 0.0) -> None:
        self.now = 0.0
        self.started: dict[str, list[Fake]] = {name: [] for name in names}
        self.events: list[Event] = []
        self.refuses = False
        self.supervisor = Supervisor(
            names,
            self.start,
            restarts=restarts,
            within=100.0,
            pause=1.0,
            grace=grace,
            on_event=self.events.append,
            clock=lambda: self.now,
        )

    def start(self, name: str) -> Fake:
        if self.refuses:
            raise OSError("no more processes")
        self.started[name].append(Fake())
        return self.started[name][-1]

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]


def test_all_are_started_and_left_alone_while_they_run() -> None:
    world = World(["a", "b"])
    assert world.supervisor.look()
    assert world.supervisor.look()
    assert [len(members) for members in world.started.values()] == [1, 1]


def test_a_dead_member_is_started_again_after_a_growing_pause() -> None:
    world = World(["a"])
    world.supervisor.look()
    for number, pause in enumerate((1.0, 2.0), 1):
        world.started["a"][-1].how = "killed by SIGKILL"
        world.supervisor.look()
        world.now += pause - 0.01
        world.supervisor.look()
        assert len(world.started["a"]) == number
        world.now += 0.02
        world.supervisor.look()
        assert len(world.started["a"]) == number + 1
    assert [event.fields["reason"] for event in world.named("member-died")] == ["killed by SIGKILL"] * 2


def test_a_member_that_dies_too_often_is_given_up() -> None:
    world = World(["a"])
    world.supervisor.look()
    for _ in range(3):
        world.started["a"][-1].how = "it ended with code 1"
        world.supervisor.look()
        world.now += 10
        world.supervisor.look()
    world.now += 1000
    assert not world.supervisor.look()
    assert len(world.started["a"]) == 3
    assert len(world.named("member-given-up")) == 1
    assert not world.supervisor.run(threading.Event())


def test_a_member_with_a_permanent_failure_is_given_up_at_once() -> None:
    world = World(["a"])
    assert world.supervisor.look()
    world.started["a"][-1].how = PermanentFailure("no such column")
    assert not world.supervisor.look()
    (event,) = world.named("member-given-up")
    assert event.fields["permanent"]


def test_deaths_long_ago_are_forgotten() -> None:
    world = World(["a"])
    for _ in range(10):
        world.now += 60
        assert world.supervisor.look()
        world.started["a"][-1].how = "killed by SIGKILL"
        world.supervisor.look()
    assert not world.named("member-given-up")


def test_a_member_that_left_is_not_started_again() -> None:
    world = World(["a", "b"])
    world.supervisor.look()
    world.started["a"][0].how = ""
    assert world.supervisor.look()
    world.started["b"][0].how = ""
    assert not world.supervisor.look()
    world.now += 1000
    assert not world.supervisor.look()
    assert [len(members) for members in world.started.values()] == [1, 1]
    assert world.supervisor.run(threading.Event())


def test_a_member_that_cannot_be_started_counts_as_dead() -> None:
    world = World(["a"])
    world.refuses = True
    for _ in range(3):
        world.supervisor.look()
        world.now += 10
    assert len(world.named("member-died")) == 3
    assert len(world.named("member-given-up")) == 1


def test_at_the_end_members_are_asked_to_leave_and_killed_if_they_do_not() -> None:
    world = World(["a", "b"])
    world.supervisor.look()
    world.started["a"][0].how = ""
    stop = threading.Event()
    stop.set()
    world.supervisor.run(stop)
    a, b = world.started["a"][0], world.started["b"][0]
    assert (a.was_asked, b.was_asked) == (True, True)
    assert (a.was_killed, b.was_killed) == (False, True)
