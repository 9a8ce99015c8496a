"""`--host-cache`: commands on one machine fetch each file once."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from chain_commands import load_checkpoint, state
from forked_python import ForkedPopen
from test_cli import assert_same, environment, run, succeed
from typer.testing import CliRunner

from deltawire.cli import app


def test_followers_with_mirrors_of_their_own_fetch_each_file_once(chain: Path, tmp_path: Path) -> None:
    commands = [
        ["follow", str(chain), str(tmp_path / f"mirror-{number}"), "--once", "--json", "--host-cache", str(tmp_path / "cache")]
        for number in range(3)
    ]
    more: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "env": environment()}
    running = [ForkedPopen("light", ["-m", "deltawire.cli", *command], **more) for command in commands]
    lines = [json.loads(process.communicate()[0].splitlines()[-1]) for process in running]
    assert len({line["bytes"] for line in lines}) == 1
    assert sum(line["bytes"] - line["shared_bytes"] for line in lines) == lines[0]["bytes"] > 0
    for number in range(3):
        assert_same(load_checkpoint(tmp_path / f"mirror-{number}" / "current"), state(2))


def test_a_pull_needs_no_data_that_another_one_has_fetched(chain: Path, tmp_path: Path) -> None:
    succeed("pull", chain, tmp_path / "first", "--host-cache", tmp_path / "cache")
    for path in (chain / "data").rglob("*"):
        if path.is_file():
            path.unlink()
    succeed("pull", chain, tmp_path / "second", "--host-cache", tmp_path / "cache")
    assert_same(load_checkpoint(tmp_path / "second"), state(2))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["1"], None),
        (["2"], "auto"),
        (["2", "--host-cache", "off"], None),
        (["1", "--host-cache", "there"], "there"),
        (["2", "--engine", "vllm=http://127.0.0.1:8000"], None),
        (["2", "--engine", "vllm=http://127.0.0.1:8000", "--host-cache", "auto"], "auto"),
    ],
    ids=str,
)
def test_members_that_one_command_starts_share_files_by_default(
    arguments: Sequence[str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    class Supervisor:
        def __init__(self, names: Sequence[str], start: Callable[[str], object], **_: Any) -> None:
            self.run = lambda _: bool([start(name) for name in names])

    monkeypatch.setattr("deltawire.fleet.supervision.Supervisor", Supervisor)
    monkeypatch.setattr("deltawire.fleet.local_members.LocalMember", lambda arguments, _: started.append(arguments))
    done = CliRunner().invoke(app, ["fleet", *arguments, "--from", "chain", "--env", "m:f"])
    assert done.exit_code == 0, done.output
    given = [each[each.index("--host-cache") + 1] if "--host-cache" in each else None for each in started]
    assert given == int(arguments[0]) * [expected]


@pytest.mark.parametrize("command", ["pull", "follow"])
def test_a_directory_that_cannot_be_used_is_named_and_the_version_is_fetched(command: str, chain: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    result = run(command, chain, tmp_path / "out", "--host-cache", shared, *(["--once"] if command == "follow" else []))
    assert result.returncode == 0
    notice = " ".join(result.stderr.split())
    assert notice.count("not shared through the host cache") == 1
    assert "only this user can write to" in notice
    assert list(shared.iterdir()) == []
    assert_same(load_checkpoint(tmp_path / "out" / ("current" if command == "follow" else "")), state(2))
