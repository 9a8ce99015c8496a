"""Run `deltawire member` and `deltawire fleet` as users call them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from member_nursery import HERE, wait_until
from small_run import SmallRun
from typer.testing import CliRunner

from deltawire.cli import app
from deltawire.store import open_store

COMMAND = [sys.executable, "-m", "deltawire.cli"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def events(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    with open_store(tmp_path / "store") as store:
        made = SmallRun(tmp_path, store)
        yield made
        made.close()


def test_a_fleet_is_kept_running_and_ends_with_the_run(tmp_path: Path, run: SmallRun) -> None:
    log = tmp_path / "fleet.log"
    command = [*COMMAND, "fleet", "2", "--from", str(tmp_path / "store"), "--env", "rewards_for_tests:length", "--name", "local"]
    with log.open("wb") as output:
        fleet = subprocess.Popen([*command, "--poll", "0.05", "--json"], env=ENVIRONMENT, stdout=output, stderr=output)
    try:
        run.train()
        wait_until(lambda: (run.open(run.step + 1), run.fleet.poll(), set(run.members()) == {"local-0", "local-1"})[2], log.read_text)
        victim = _member_process(fleet.pid, "local-0")
        os.kill(victim, signal.SIGKILL)  # the fleet starts another process for it
        wait_until(lambda: _died(log) and _member_process(fleet.pid, "local-0") not in (0, victim), log.read_text)
        run.train()
        run.check()
        run.fleet.stop()
        assert fleet.wait(120) == 0, log.read_text()
    finally:
        fleet.kill()
        fleet.wait()
    assert {event["member"] for event in events(log)} == {"local-0", "local-1"}
    assert all(event["time"] for event in events(log))
    assert {"swapped", "generated", "left"} <= {event["event"] for event in events(log)}
    assert [event["member"] for event in _died(log)] == ["local-0"]
    assert sorted(event["member"] for event in events(log) if event["event"] == "member-left") == ["local-0", "local-1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["member", "--from", "PLACE", "--env", "reward"], "MODULE:FUNCTION"),
        (["member", "--from", "PLACE", "--env", "m:f", "--engine", "sglang"], "is not an engine"),
        (["member", "--from", "PLACE", "--env", "m:f", "--name", "a/b"], "a name has at most 64 letters"),
        (["member", "--from", "s3:bucket", "--env", "m:f"], "Did you mean s3://bucket?"),
        (["fleet", "--from", "PLACE", "--env", "m:f"], "give the number of members"),
        (["fleet", "2", "--ray", "2", "--from", "PLACE", "--env", "m:f"], "give the number of members"),
    ],
)
def test_wrong_usage_is_explained(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, [str(tmp_path / "store") if each == "PLACE" else each for each in arguments])
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())


def test_a_reward_that_is_not_there_is_told_kindly(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["member", "--from", str(tmp_path / "store"), "--env", "no_such_module:reward"])
    assert done.exit_code == 1
    assert "no_such_module" in done.stderr
    assert "Traceback" not in done.stderr


def _died(log: Path) -> list[dict[str, Any]]:
    return [event for event in events(log) if event["event"] == "member-died"]


def _member_process(parent: int, name: str) -> int:
    """Return the id of the child process that is the member of this name, or 0 if there is none."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if f"--name\0{name}\0" in Path(f"/proc/{child}/cmdline").read_text():
            return int(child)
    return 0
