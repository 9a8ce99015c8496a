"""`deltawire gate`: evaluation commands, decisions, and its ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gated_chain import Answered, GatedChain
from test_cli import environment
from typer.testing import CliRunner

from deltawire.chain.version import Version
from deltawire.cli import app
from deltawire.cli.process.evaluation_command import EvaluationCommand
from deltawire.format.interactions import AnswerFacts
from deltawire.store import open_store


@pytest.fixture
def chain(tmp_path: Path) -> GatedChain:
    return GatedChain(store=open_store(str(tmp_path / "chain")))


def gate(chain: GatedChain, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    """Run the command once, and return what it prints."""
    result = CliRunner().invoke(app, ["gate", chain.store.url, "--json", "--once", *arguments])
    assert result.exit_code == code, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_an_evaluation_that_passes_promotes(chain: GatedChain) -> None:
    command = 'echo noise; echo "{\\"accuracy\\": 0.$DELTAWIRE_SEQ}"; echo "from $DELTAWIRE_STABLE_VERSION to $DELTAWIRE_VERSION"'
    events = gate(chain, "--evaluate", command, "--score", "accuracy:0.3")
    assert [event["event"] for event in events] == ["gate-watching", "gate-evaluated", "gate-decided", "channel-moved", "gate"]
    record = events[-1]["record"]
    assert (record["outcome"], record["evaluation"]["scores"]) == ("promote", [{"name": "accuracy", "value": "0.3"}])
    assert events[-1]["moved"] == {"channel": "stable", "move": 1, "kind": "promote"}
    assert chain.target("stable") == 3
    assert gate(chain, "--evaluate", command)[-1]["state"] == "idle"


def test_the_evaluation_of_another_command_or_another_score_is_not_used(chain: GatedChain, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    command = f"echo A >> {journal}; echo '{{\"accuracy\": 0.9}}'"
    options = ("--evaluate", command, "--min-seconds", "1000")
    for score in ("accuracy:0.8", "accuracy:0.8", "accuracy:0.85"):
        look = gate(chain, *options, "--score", score)[-1]
        assert look["record"]["evaluation"]["passed"] == 1
        assert look["record"]["why"].endswith("of 1000 seconds old")
    assert journal.read_text() == "A\nA\n"
    record = gate(chain, "--evaluate", f"echo B >> {journal}; exit 1")[-1]["record"]
    assert record["why"] == "the evaluation refused it: the command exited with code 1"
    assert journal.read_text() == "A\nA\nB\n"


def test_the_score_that_decided_is_in_the_reason(chain: GatedChain) -> None:
    record = gate(chain, "--evaluate", "echo '{\"accuracy\": 0.9}'", "--score", "accuracy:0.8")[-1]["record"]
    assert record["why"] == "the evaluation passed: the command exited with code 0; accuracy is 0.9, at least 0.8"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("exit 3", "exited with code 3"),
        ("echo '{\"accuracy\": 0.7}'", "accuracy is 0.7, below 0.8"),
        ("echo '{\"accuracy\": NaN}'", "accuracy is missing, below 0.8"),
    ],
)
def test_an_evaluation_that_fails_rolls_back(chain: GatedChain, command: str, why: str) -> None:
    record = gate(chain, "--evaluate", command, "--score", "accuracy:0.8")[-1]["record"]
    assert record["outcome"] == "rollback"
    assert why in record["why"]
    assert chain.target("canary") == 2


def test_an_evaluation_that_cannot_finish_is_tried_again(chain: GatedChain, tmp_path: Path) -> None:
    journal = tmp_path / "attempts"
    command = f'echo "$DELTAWIRE_ATTEMPT" >> {journal}; exit 75'
    record = gate(chain, "--evaluate", command, "--attempts", "2")[-1]["record"]
    assert "did not finish in 2 attempts" in record["why"]
    assert journal.read_text() == "1\n2\n"


def test_a_monitor_and_a_dry_run(chain: GatedChain) -> None:
    chain.answer([Answered("canary", 3, None, AnswerFacts(90)), Answered("stable", 2, None, AnswerFacts(30))] * 60)
    options = ("--metric", "solved", "--monitor", "length:+20%", "--range", "length=0:100", "--min-answers", "20")
    result = CliRunner().invoke(app, ["gate", chain.store.url, "--dry-run", *options])
    assert result.stdout.startswith("rollback: length:+20% is broken")
    assert chain.records() == []
    assert gate(chain, *options)[-1]["moved"]["kind"] == "rollback"


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        ((), 1, "nothing to prove"),
        (("--monitor", "length:+20%"), 1, "Give it --evaluate CMD or --metric LIMIT. A limit of --monitor need not be proved."),
        (("--monitor", "length"), 1, "For --monitor, write NAME:+20%, such as length:+20%."),
        (("--metric", "sloved"), 1, "not declared"),
        (("--score", "a:1"), 2, "--score needs --evaluate"),
        (("--metric", "solved", "--score", "a:1"), 2, "--evaluate"),
        (("--metric", "solved", "--range", "length=5"), 2, "NAME=LOW:HIGH"),
        (("--metric", "solved", "--alpha", "2"), 1, "0.5"),
        (("--metric", "solved", "--from", "cannary"), 1, "has no channel 'cannary'. It has canary, stable."),
    ],
)
def test_wrong_usage_is_named(chain: GatedChain, arguments: tuple[str, ...], code: int, word: str) -> None:
    (line,) = gate(chain, *arguments, code=code)
    assert word in json.dumps(line)


def test_a_monitor_needs_answers_although_the_evaluation_passed(chain: GatedChain) -> None:
    chain.answer([Answered("canary", 3, None, AnswerFacts(30)), Answered("stable", 2, None, AnswerFacts(30))] * 5)
    options = ("--evaluate", "true", "--monitor", "length:+20%")
    result = CliRunner().invoke(app, ["gate", chain.store.url, "--once", *options])
    assert result.stdout.endswith("continue: the canary has given 5 of 100 answers\n")
    assert gate(chain, *options, "--min-answers", "5")[-1]["moved"]["kind"] == "promote"


@pytest.mark.parametrize("once", [("--once",), ()])
def test_a_metric_that_is_not_declared_is_an_error_without_a_canary_too(chain: GatedChain, once: tuple[str, ...]) -> None:
    chain.promote(3, "stable")
    result = CliRunner().invoke(app, ["gate", chain.store.url, "--metric", "sloved", *once])
    assert result.exit_code == 1
    assert "the metric 'sloved' is not declared" in result.output
    assert gate(chain, "--metric", "solved")[-1]["state"] == "idle"


def test_a_promotion_that_is_no_longer_made_is_told(chain: GatedChain) -> None:
    assert gate(chain, "--evaluate", "true")[-1]["moved"]["kind"] == "promote"
    chain.promote(4, "stable")
    result = CliRunner().invoke(app, ["gate", chain.store.url, "--once", "--evaluate", "true"])
    assert result.stdout.startswith("nothing to do: this canary was promoted before (move 1), and stable was moved since (move 2 by ")


def test_a_gate_waits_for_channels_only_if_it_is_told_to(chain: GatedChain) -> None:
    arguments = ["gate", chain.store.url, "--metric", "solved", "--to", "stabel", "--once"]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 1
    assert "--wait-for-channels" in refused.output
    waiting = CliRunner().invoke(app, [*arguments, "--wait-for-channels"])
    assert waiting.exit_code == 0
    assert "will wait: the chain at" in waiting.output
    assert "has no channel 'stabel'. It has canary, stable." in waiting.output


def test_an_evaluation_ends_with_the_gate(chain: GatedChain, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = f"exec 3>{fifo}; sleep 1000 & echo begun >&3; wait"
    arguments = [sys.executable, "-m", "deltawire", "gate", chain.store.url, "--evaluate", command]
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, env=environment()) as process, fifo.open() as output:
        assert output.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        assert output.read() == ""  # returns when no process of the command is left
    assert process.returncode == 143


def test_a_command_that_takes_too_long_is_ended_with_its_processes(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    ticks = [0.0]
    version = Version.of(GatedChain().chain.chain.commits[3])
    evaluation = EvaluationCommand(f"exec 3>{fifo}; sleep 1000 & echo begun >&3; wait", "here", timeout=60.0, ticks=lambda: ticks[0])
    assert evaluation.poll() is None
    evaluation.start(version, version, 2)
    with fifo.open() as output:
        assert output.readline() == "begun\n"
        assert evaluation.poll() is None
        ticks[0] = 60.0
        result = evaluation.poll()
        assert output.read() == ""
    assert result is not None
    assert (result.passed, result.attempts, result.why) == (None, 2, "the command took more than 60 seconds")
    assert evaluation.poll() is None


@pytest.mark.parametrize("ends", [False, True])
def test_processes_that_a_command_leaves_behind_are_ended(tmp_path: Path, ends: bool) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    ticks = [0.0]
    version = Version.of(GatedChain().chain.chain.commits[3])
    stubborn = f"exec 3>{fifo}; (trap '' TERM; echo begun >&3; while :; do sleep 1000; done) & {'true' if ends else 'wait'}"
    evaluation = EvaluationCommand(stubborn, "here", timeout=60.0, ticks=lambda: ticks[0])
    evaluation.start(version, version, 1)
    with fifo.open() as output:
        assert output.readline() == "begun\n"
        ticks[0] = 0.0 if ends else 60.0
        while (result := evaluation.poll()) is None:
            time.sleep(0.01)
        assert output.read() == ""  # nobody has it open for writing
    assert result.passed is (True if ends else None)


def test_only_the_end_of_a_long_output_is_kept(tmp_path: Path) -> None:
    version = Version.of(GatedChain().chain.chain.commits[3])
    evaluation = EvaluationCommand(
        """yes '{"a": 1}' | head -c 3000000; echo; echo '{"b": 2, "c": true, "d": "x"}'""", "here", timeout=600.0
    )
    evaluation.start(version, version, 1)
    assert evaluation._running is not None
    evaluation._running.process.wait()
    result = evaluation.poll()
    assert result is not None
    assert result.passed
    assert result.scores == {"b": 2.0}
