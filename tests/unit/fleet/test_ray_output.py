"""A driver gets a member's output through Ray. These tests replace the cluster by calls; `tests/fleet/test_ray.py` uses a real one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltawire.events import Event
from deltawire.rl.ray_members import RayMember, _EventForwarder, _MemberActor


class RayError(Exception):
    """A replacement for Ray's class of this name."""


class Unavailable(RayError):
    """A replacement for Ray's `ActorUnavailableError`."""


class Calls:
    """A replacement for Ray that makes a call when its answer is fetched. `lose` decides by an answer's number whether it is lost."""

    exceptions = SimpleNamespace(RayError=RayError, ActorUnavailableError=Unavailable)

    def __init__(self, lose: Callable[[int], bool]) -> None:
        self.lost = 0
        self._lose = lose
        self._count = 0

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return references, []

    def get(self, reference: Callable[[], Any]) -> Any:
        answer = reference()
        self._count += 1
        if self._lose(self._count):
            self.lost += 1
            raise Unavailable("the socket was closed")
        return answer


class Handle:
    """A replacement for an actor's handle."""

    def __init__(self, actor: _MemberActor) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: lambda: getattr(self._actor, name)(*arguments))


def start(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> _MemberActor:
    """Start an actor whose member is a shell script, and wait until the member has ended."""
    path = folder / "member.sh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    actor = _MemberActor([])
    actor._member._process.wait(60)
    for reader in actor._member._readers:
        reader.join(60)
    return actor


def test_an_answer_that_is_lost_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = start(tmp_path, monkeypatch, "seq 1 50000")
    events: list[Event] = []
    ray = Calls(lambda number: number % 3 != 0)
    member = RayMember(ray, Handle(actor), _EventForwarder("m", events.append), "1 CPU")
    looks = 0
    while member.ending() is None:
        looks += 1
        assert looks < 1000
    assert member.ending() == ""
    assert ray.lost > 5
    assert [event.fields["line"] for event in events] == [str(number) for number in range(1, 50_001)]


def test_output_that_was_not_fetched_in_time_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long_lines = "for i in $(seq 1 60); do printf '%0100000d\\n' $i; done; exit 3"  # 6 MB
    actor = start(tmp_path, monkeypatch, long_lines)
    events: list[Event] = []
    member = RayMember(Calls(lambda number: False), Handle(actor), _EventForwarder("m", events.append), "1 CPU")
    assert member.ending() == "it ended with code 3"
    first, *rest = events
    assert (first.name, first.fields["member"], first.fields["lines"]) == ("output-dropped", "m", 60 - len(rest))
    assert [int(str(event.fields["line"])[-4:]) for event in rest] == list(range(61 - len(rest), 61))
    assert 30 < len(rest) < 50


def test_a_listener_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def listen(event: Event) -> None:
        raise RuntimeError("the listener broke")

    actor = start(tmp_path, monkeypatch, "echo one; echo two")
    member = RayMember(Calls(lambda number: False), Handle(actor), _EventForwarder("m", listen), "1 CPU")
    assert member.ending() == ""
    assert caplog.text.count("RuntimeError: the listener broke") == 2
