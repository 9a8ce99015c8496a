"""A trainer without an event listener prints whole lines without control characters, and breaks them between words in a terminal."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from deltawire.events import Event
from deltawire.rl.report import StepReporter


def printed(*events: tuple[str, dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    report = StepReporter(lines.append)
    for name, fields in events:
        report(Event(name, fields))
    return lines


def test_a_step_is_one_line() -> None:
    fields = {"step": 7, "reward": 0.43217, "loss": -1.5e-4, "entropy": 2.25, "completions/mean_length": 118.5, "bytes": 1_234_567}
    assert printed(("trained", fields)) == ["step 7  reward 0.432  loss -0.00015  entropy 2.25  length 118  1.23 MB"]
    assert printed(("trained", {**fields, "mismatch_kl": 0.00123}))[0].endswith("  length 118  kl 0.001  1.23 MB")
    assert printed(("trained", {**fields, "reward": None, "rejected": 3})) == [
        "step 7  loss -0.00015  entropy 2.25  length 118  1.23 MB  3 rejected"
    ]
    assert printed(("trained", {"step": 8, "bytes": 0})) == ["step 8  0 MB"]  # a step that was skipped


def test_the_first_rejection_of_each_kind_in_a_step_is_printed() -> None:
    def rejected(step: int, reason: str) -> tuple[str, dict[str, Any]]:
        return "rollout-rejected", {"step": step, "reason": reason, "member": "m", "why": "the loss is nan"}

    lines = printed(*(rejected(step, reason) for step in (1, 2) for reason in ("untrainable", "untrainable", "late", "malformed")))
    assert lines == [
        f"step {step}  result of m rejected, {reason}: the loss is nan" for step in (1, 2) for reason in ("untrainable", "malformed")
    ]


def test_long_texts_are_whole_and_hostile_ones_are_cleaned() -> None:
    (line,) = printed(("member-left", {"member": "m", "why": "\x1b[2J" + "x" * 200}))
    assert line.startswith("member m left: \N{REPLACEMENT CHARACTER}[2Jxxx")
    assert line.endswith("x" * 200)
    assert printed(("member-left", {"member": "m", "why": None}), ("rollout-accepted", {"step": 1})) == []


def test_events_that_need_attention_are_printed() -> None:
    assert printed(("waiting-for-members", {"step": 1}), ("step-skipped", {"step": 2, "why": "the loss is nan"})) == [
        "step 1  waiting for members: none is running",
        "step 2  skipped, weights unchanged: the loss is nan",
    ]
    assert printed(("evaluated", {"step": 3, "accuracy": 0.51234})) == ["step 3  evaluated: accuracy 0.5123"]
    assert printed(
        ("mismatch-alarm", {"step": 4, "member": "m", "kl": 0.5012, "others": 0.00123, "tokens": 999}),
        ("member-excluded", {"member": "m", "why": "its mismatch stands out"}),
    ) == ["step 4  member m stands out: kl 0.5, others 0.0012", "member m is excluded: its mismatch stands out"]
    assert printed(("fleet-retrying", {"error": "the store is away."})) == ["fleet-retrying: the store is away."]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_nothing_is_cut_and_only_a_terminal_breaks_lines(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", stream)
    why = "UnusableReward: the reward 'missing' needs the column 'solution', which the dataset does not have. It has: answer, prompts."
    StepReporter()(Event("member-left", {"member": "f-0", "why": why}))
    lines = stream.getvalue().splitlines()
    assert " ".join(" ".join(lines).split()) == f"member f-0 left: {why}"
    assert all(len(line) <= 80 for line in lines) if stream.isatty() else len(lines) == 1


def test_results_of_an_abandoned_history_are_one_line() -> None:
    rejected = [("rollout-rejected", {"step": step, "reason": "abandoned", "member": "b"}) for step in range(17, 22)]
    lines = printed(*rejected, ("rollout-accepted", {"step": 17}), ("trained", {"step": 17, "bytes": 0}), ("trained", {"step": 18}))
    assert lines == [
        "5 results are not used, because the trainer went back to its checkpoint and abandoned their versions",
        "step 17  0 MB",
        "step 18  0 MB",
    ]
