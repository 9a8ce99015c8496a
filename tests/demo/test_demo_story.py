"""The screen and the lines of the demo show what its processes reported, and its proof can fail."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

import pytest
from demo_events import DIGEST, STATE_BYTES, run
from rich.console import Console

DEMO = Path(__file__).parents[2] / "examples" / "demo"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of the demo by name."""
    monkeypatch.syspath_prepend(DEMO)
    return importlib.import_module


def told(demo: Any, events: list[dict[str, Any]]) -> Any:
    story = demo("story").Story()
    for event in events:
        story.tell(event)
    return story


def test_a_killed_members_task_counts_as_taken_over_once_anothers_result_is_accepted(demo: Any) -> None:
    events = run(20)
    story = told(demo, events)
    assert [(name, work.round, work.task, work.outcome, by) for name, work, by in story.takeovers] == [("unlucky", 10, 1, "lost", "slow")]
    before = next(index for index, event in enumerate(events) if event["event"] == "process-ended")
    assert told(demo, events[: before + 1]).takeovers == []


def test_the_summary_has_the_reported_bytes_densities_and_lags(demo: Any) -> None:
    story = told(demo, run(20))
    assert story.reduction == pytest.approx(20 * STATE_BYTES / sum(10_000 + step for step in range(1, 21)))
    assert story.densities == [0.01] * 20
    fetched, instead = story.fetched
    assert fetched == sum(member.fetched_bytes for member in story.members.values())
    assert instead == STATE_BYTES * sum(member.syncs for member in story.members.values())
    assert story.members["newcomer"].lag[-1][1] == 0
    assert max(lag for _, lag in story.members["slow"].lag) == 2
    assert dict(story.rejected) == {"duplicate": 1}


def test_the_proof_holds_only_if_all_digests_are_one(demo: Any) -> None:
    assert told(demo, run()).proof.holds
    assert "bit-identical to the trainer: 3 ×" in told(demo, run()).proof.line()
    other = DIGEST[::-1]
    for wrong, named in (({"slow": other}, "slow has"), ({"newcomer": None}, "newcomer has not reported")):
        proof = told(demo, run(digests=wrong)).proof
        assert not proof.holds
        assert proof.line().startswith("NOT BIT-IDENTICAL")
        assert named in proof.line()
    proof = told(demo, run(published=other)).proof
    assert not proof.holds
    assert "published" in proof.line()


def test_a_member_that_failed_or_was_never_there_is_no_proof(demo: Any) -> None:
    failed = [{**event, "code": 1} if event["event"] == "process-ended" and event["who"] == "slow" else event for event in run()]
    without = [event for event in failed if not (event["event"] == "weights" and event["from"] == "slow")]
    assert not told(demo, without).proof.holds
    assert not demo("story").Proof(1, DIGEST, DIGEST, {}).holds
    unfinished = [event for event in run() if event["event"] != "finished"]
    assert told(demo, unfinished).proof is None


def test_every_moment_fits_on_80_columns_and_24_lines(demo: Any) -> None:
    story = demo("story").Story()
    for number, event in enumerate(events := run(90)):
        story.tell(event)
        if number % 25 and number < len(events) - 5:
            continue
        console = Console(width=80, file=io.StringIO(), force_terminal=False)
        lines = console.render_lines(demo("view").screen(story, 80), console.options)
        assert len(lines) <= 24
    text = io.StringIO()
    Console(width=80, file=text).print(demo("view").screen(story, 80))
    for words in ("known_words", "steady", "killed", "step 90 of 90", "1 duplicate", "% changed", "took over"):
        assert words in text.getvalue()


def test_plain_lines_say_what_a_spectator_should_notice(demo: Any) -> None:
    text = io.StringIO()
    view = demo("view").LineView(Console(file=text, width=200))
    story = demo("story").Story()
    for event in run(20):
        story.tell(event)
        view(event, story)
    for words in (
        "step 20: reward 0.300",
        "unlucky was killed (SIGKILL)",
        "newcomer has joined, at step 9",
        "slow took over task 1 of round 10",
    ):
        assert text.getvalue().count(words) == 1


def test_a_problem_is_reported_once(demo: Any) -> None:
    trouble = {"event": "fleet-retrying", "from": "trainer", "at": 1.0, "error": "the store is away."}
    assert told(demo, [trouble, trouble]).marks == [(1.0, "trainer: the store is away.")]


def test_a_plot_of_blocks_rises_with_its_values(demo: Any) -> None:
    rows = demo("view").text_plot([0.0, 0.5, 1.0], 5, 2)
    assert rows == [" ▁█  ", "▁██  "]
    assert demo("view").text_plot([], 3, 2) == ["   ", "   "]
    assert demo("view").text_plot([float(value) for value in range(100)], 10, 1)[0][-1] == "█"
