"""If a run can never continue, members say why they leave, and the trainer reports it and stops."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from learning_run import FLEET, SETTINGS, members, open_generator, trainer

from deltawire.errors import FleetDeserted, RewardError, UnusableReward
from deltawire.events import Event
from deltawire.fleet.member import Member
from deltawire.rl.member import MemberOptions, RewardScorer, serve
from deltawire.rl.report import StepReporter
from deltawire.store.memory import MemoryStore

IMPATIENT = replace(FLEET, patience_seconds=0.1)
"""The trainer reads the store ten times in this time."""
FOUR_TASKS = replace(SETTINGS, tasks=4)
"""A member gives up after three failed tasks."""


def wants_an_answer(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [0.0 for _ in completions]


def returns_too_much(completions: list[str], **_: Any) -> list[float]:
    return [1e39 for _ in completions]


@contextlib.contextmanager
def failing_member(work: Callable[[threading.Event], None], expected: type[Exception]) -> Iterator[None]:
    """Run a member on a thread, and check that it ends with this error."""
    stop, errors = threading.Event(), []

    def run() -> None:
        try:
            work(stop)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
        thread.join()
    finally:
        stop.set()
        thread.join()
    assert [type(error) for error in errors] == [expected]


@pytest.mark.parametrize(
    ("reward", "error", "told"),
    [
        (wants_an_answer, UnusableReward, "needs the column 'answer', which the dataset does not have"),
        (returns_too_much, RewardError, r"returned 1e\+39; rewards must be"),
    ],
)
def test_a_reward_that_always_fails_ends_the_run_by_name_and_a_right_one_continues(
    reward: Any, error: type[Exception], told: str, tmp_path: Path
):
    store = MemoryStore()

    def work(stop: threading.Event) -> None:
        generator = open_generator(store, "m", stop)
        assert generator is not None
        with contextlib.closing(generator):
            Member(store, generator, RewardScorer([reward]), name="m", poll=0.01).run(stop)

    lines: list[str] = []
    with (
        failing_member(work, error),
        trainer(store, tmp_path, settings=FOUR_TASKS, fleet=IMPATIENT, on_event=StepReporter(lines.append)) as learning,
        pytest.raises(FleetDeserted, match=f"m: {error.__name__}: .*{told}"),
    ):
        learning.train(until=1)
    assert any(line.startswith(f"member m left: {error.__name__}") for line in lines)
    with members(store), trainer(store, tmp_path, settings=FOUR_TASKS) as again:
        again.train(until=1)


def test_a_member_that_cannot_begin_says_why(tmp_path: Path):
    """The member has no engine and no heartbeat yet, but the trainer still learns why it failed."""
    store = tmp_path / "store"
    events: list[Event] = []
    with trainer(store, None, fleet=IMPATIENT, on_event=events.append) as learning:
        options = MemberOptions(str(store), "transformers", ("no_such_module:reward",), name="m")
        with pytest.raises(RewardError, match="does not exist"):
            serve(options, stop=threading.Event())
        with pytest.raises(FleetDeserted, match="m: UnusableReward: the module 'no_such_module' of"):
            learning.train(until=1)
    (left,) = [event.fields for event in events if event.name == "member-left"]
    assert left["member"] == "m"


def test_a_member_that_cannot_start_without_a_run_only_raises(tmp_path: Path):
    with pytest.raises(RewardError, match="does not exist"):
        serve(MemberOptions(str(tmp_path), "transformers", ("no_such_module:reward",), name="m"), stop=threading.Event())
    assert not list(tmp_path.iterdir())
