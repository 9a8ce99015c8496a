"""The demo with a few steps does what `make demo` promises, and leaves no process behind, however it ends."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_python import forked_run

from deltawire import Publisher

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

DEMO = Path(__file__).parents[2] / "examples" / "demo"
WITH_FORKED_PROCESSES = '''
import runpy, subprocess, sys
from types import SimpleNamespace

from forked_python import ForkedPopen

del sys.argv[0]
sys.path.insert(0, sys.argv[0])
import processes

smaller = """
import os, runpy, sys

del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
import policy, task

policy.WIDTH, policy.LAYERS = 128, 2
task.vocabulary = lambda: frozenset("abcdefghijklmnopqrstuvwxyz")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(command, **options):
    return ForkedPopen("torch", ["-c", smaller, *command[1:]], **options)


processes.subprocess = SimpleNamespace(PIPE=subprocess.PIPE, Popen=start)
runpy.run_path(sys.argv[0], run_name="__main__")
'''
"""The demo as it is, except that its processes have torch imported when they start, and that its model is a fifth as large.

Each letter is a known word, so that a model that has learned little gets rewards, and its weights change."""


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def events_of(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def test_a_short_demo_ends_with_members_that_are_bit_identical_to_the_trainer(tmp_path: Path) -> None:
    """The policy is quantised here. Without a recipe the demo does the same, except for the two digests of the next test."""
    command = [
        "-c",
        WITH_FORKED_PROCESSES,
        DEMO,
        "--json",
        "--steps",
        "6",
        "--pretraining",
        "0.5",
        "--out",
        "out",
        "--quantise",
        "fp8-block",
    ]
    done = forked_run("torch", command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    *told, summary = events_of(done.stdout)

    started = {event["who"]: event["pid"] for event in told if event["event"] == "process-started"}
    ended = {event["who"]: event["code"] for event in told if event["event"] == "process-ended"}
    assert ended == {"trainer": 0, "steady": 0, "slow": 0, "newcomer": 0, "unlucky": -signal.SIGKILL}
    assert not any(is_there(pid) for pid in started.values())

    assert summary["bit_identical"], summary["proof"]
    digests = {event["from"]: event["digest"] for event in told if event["event"] in ("weights", "finished")}
    assert digests.keys() == {"trainer", "steady", "slow", "newcomer"}
    assert len(set(digests.values())) == 1

    assert [event["step"] for event in told if event["event"] == "trained"] == [1, 2, 3, 4, 5, 6]
    assert all(0 <= event["reward"] <= 1 for event in told if event["event"] == "trained")
    assert all(event["changed"] > 0 for event in told if event["event"] == "trained")
    assert [each["from"] for each in summary["takeovers"]] == ["unlucky"]
    assert all(each["by"] in ("steady", "slow", "newcomer") for each in summary["takeovers"])

    assert summary["recipe"] == "fp8-block"
    sizes = {event["state_bytes"] for event in told if event["event"] == "trained"}
    assert len(sizes) == 1
    (weights,) = [event["weights"] for event in told if event["event"] == "model"]
    assert min(sizes) < 1.1 * weights
    assert all(event["mismatch_kl"] > 1e-4 for event in told if event["event"] == "trained")

    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {"demo", "logs", "report.html", "store"}
    report = _embedded(out / "report.html")
    assert "bit-identical to the trainer: 3 ×" in report["notes"][0]
    assert report["chain"]["version"] == 7
    assert {one["name"] for one in report["members"]["shown"]} == {"steady", "slow", "unlucky", "newcomer"}
    assert [entry["metrics"]["reward"] for entry in report["chain"]["entries"] if entry["step"]] == [
        event["reward"] for event in told if event["event"] == "trained"
    ]


def _embedded(report: Path) -> dict[str, Any]:
    """Return the data in a report."""
    _, _, rest = report.read_text().partition('<script type="application/json" id="data">')
    found: dict[str, Any] = json.loads(rest.partition("</script>")[0])
    return found


@pytest.mark.parametrize("recipe", [None, "int4"])
def test_the_digests_of_trainer_and_store_are_equal_only_if_their_weights_are(
    recipe: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(DEMO)
    digests = importlib.import_module("trainer_process")._digests
    model = importlib.import_module("policy").new_model()
    with Publisher(tmp_path, dtype="bfloat16", quantise=recipe) as publisher:
        for _ in range(2):  # the second version has scales of the first one
            publisher.publish(model)
            weight = model.model.layers[1].mlp.up_proj.weight
            weight.data[0, 0] += 0.1
    own, published = digests(model, str(tmp_path), recipe)
    assert own != published
    weight.data[0, 0] -= 0.1
    own, published = digests(model, str(tmp_path), recipe)
    assert own == published


def test_after_ctrl_c_no_process_of_the_demo_is_left(tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO), "--json", "--steps", "6", "--out", "out"]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert demo.stdout is not None
    pids = []
    for line in demo.stdout:
        event = json.loads(line)
        if event["event"] == "process-started":
            pids.append(event["pid"])
        if len(pids) == 4:
            break
    demo.send_signal(signal.SIGINT)
    _, words = demo.communicate(timeout=120)
    assert demo.returncode == 130
    assert "interrupted" in words
    assert not any(is_there(pid) for pid in pids)


def test_a_folder_that_is_not_the_demos_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    command = [sys.executable, str(DEMO), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "is not empty" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(("wrong", "words"), [(["--store", "gibberish://x"], "unknown scheme"), (["--steps", "1"], "at least 2")])
def test_a_wrong_argument_is_reported_before_any_work(tmp_path: Path, wrong: list[str], words: str) -> None:
    done = subprocess.run(
        [sys.executable, str(DEMO), "--out", str(tmp_path / "out"), *wrong], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode != 0
    assert words in done.stderr
    assert not (tmp_path / "out").exists()
