"""Run `deltawire member` and `deltawire fleet` as users call them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_python import ForkedPopen
from member_nursery import HERE, wait_until
from small_run import SmallRun
from typer.testing import CliRunner

from deltawire.cli import app
from deltawire.store import open_store

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
WITH_FORKED_MEMBERS = """
import subprocess, sys
from types import SimpleNamespace

from forked_python import ForkedPopen

from deltawire.cli import main
from deltawire.fleet import local_members


def start(command, **options):
    process = ForkedPopen("torch", command[1:], **options)
    with open(processes, "a") as file:
        print(command[command.index("--name") + 1], process.pid, file=file, flush=True)
    return process


processes = sys.argv.pop(1)
local_members.subprocess = SimpleNamespace(PIPE=subprocess.PIPE, Popen=start)
main()
"""
"""The command as it is, except that its members have torch imported when they start, and that a file gets their process ids."""


def events(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    with open_store(tmp_path / "store") as store:
        made = SmallRun(tmp_path, store)
        yield made
        made.close()


def test_a_fleet_is_kept_running_and_ends_with_the_run(tmp_path: Path, run: SmallRun) -> None:
    log, processes = tmp_path / "fleet.log", tmp_path / "processes"
    processes.touch()
    command = ["-c", WITH_FORKED_MEMBERS, str(processes), "fleet", "2", "--name", "local"]
    command += ["--from", str(tmp_path / "store"), "--env", "rewards_for_tests:length"]
    with log.open("wb") as output:
        fleet = ForkedPopen("torch", [*command, "--poll", "0.05", "--json"], env=ENVIRONMENT, stdout=output, stderr=output)
    try:
        run.train()
        wait_until(lambda: (run.open(run.step + 1), run.fleet.poll(), set(run.members()) == {"local-0", "local-1"})[2], log.read_text)
        victim = _member_process(processes, "local-0")
        os.kill(victim, signal.SIGKILL)  # the fleet starts another process for it
        wait_until(lambda: _died(log) and _member_process(processes, "local-0") != victim, log.read_text)
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
    assert any(event["shared_bytes"] for event in events(log) if event["event"] == "synced")  # members of one command share files
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


def test_a_missing_reward_gives_a_helpful_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["member", "--from", str(tmp_path / "store"), "--env", "no_such_module:reward"])
    assert done.exit_code == 1
    assert "no_such_module" in done.stderr
    assert "Traceback" not in done.stderr


def _died(log: Path) -> list[dict[str, Any]]:
    return [event for event in events(log) if event["event"] == "member-died"]


def _member_process(processes: Path, name: str) -> int:
    """Return the id of the newest process of the member with this name."""
    started = [line.split() for line in processes.read_text().splitlines()]
    return [int(process) for member, process in started if member == name][-1]
