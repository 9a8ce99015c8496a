"""`deltawire promote`, `rollback`, `channels`, and `--channel` of the commands that read."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from channelled_chain import ChannelledChain
from forked_cli import run_forked
from support import bits_of

from deltawire import SigningKey
from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.store.local import LocalStore


class Cli:
    """A chain in a directory, and commands about it."""

    def __init__(self, folder: Path, key: SigningKey | None = None) -> None:
        self.folder = folder
        self.url = str(folder / "toy")
        self.chain = ChannelledChain(5, key=key, store=LocalStore(folder / "toy"))

    def run(self, command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        return run_forked([command, self.url, *map(str, arguments)], dict(os.environ))

    def __call__(self, command: str, *arguments: object) -> dict[str, Any]:
        done = self.run(command, *arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1] if command == "follow" else done.stdout)  # type: ignore[no-any-return]

    def fail(self, command: str, *arguments: object) -> str:
        done = self.run(command, *arguments, "--json")
        assert done.returncode == 1, done.stdout
        return str(json.loads(done.stdout)["error"]["type"])


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def test_a_channel_is_promoted_shared_and_rolled_back(cli: Cli) -> None:
    assert cli("channels")["channels"] == []
    assert cli.fail("channels", "stable") == cli.fail("rollback", "stable") == "NoChannel"
    first = cli("promote", "stable", "--version", 2, "--why", "it works", "--by", "me")
    assert {name: first[name] for name in ("channel", "move", "kind", "version", "seq", "step", "share", "why", "by", "signed_by")} == {
        "channel": "stable",
        "move": 0,
        "kind": "promote",
        "version": 2,
        "seq": 2,
        "step": 20,
        "share": None,
        "why": "it works",
        "by": "me",
        "signed_by": None,
    }
    assert cli("promote", "canary", "--step", 40, "--share", "0.25%")["share"] == 0.0025
    shared = cli("promote", "canary", "--share", "100%")
    assert (shared["kind"], shared["share"], shared["version"]) == ("share", 1.0, 4)
    assert cli("promote", "stable", "--from", "canary")["version"] == 4
    assert cli.fail("promote", "stable", "--version", 3, "--expect", 0) == "ChannelMoved"
    assert cli.fail("promote", "stable", "--version", 3, "--expect", 7) == "ChannelMoved"
    assert cli("rollback", "stable", "--why", "worse")["version"] == 2
    assert cli("rollback", "stable", "--to", 5)["version"] == 5
    assert {each["channel"]: each["version"] for each in cli("channels")["channels"]} == {"canary": 4, "stable": 5}
    moves = cli("channels", "stable", "-n", 2)["moves"]
    assert [(move["move"], move["kind"], move["version"], move["why"]) for move in moves] == [
        (3, "rollback", 5, ""),
        (2, "rollback", 2, "worse"),
    ]
    assert [version["channels"] for version in cli("log")["versions"]] == [["stable"], ["canary"], [], [], []]
    assert "on stable" in cli.run("log").stdout
    text = cli.run("channels").stdout
    assert "stable" in text
    assert "rollback" in text
    assert cli.fail("promote", "stable", "--version", 9) == "VersionUnknown"


@pytest.mark.parametrize(
    "arguments",
    [
        ("promote", "stable"),
        ("promote", "stable", "--version", 1, "--step", 10),
        ("promote", "a/b", "--version", 1),
        ("promote", ".a", "--version", 1),
        ("promote", "stable", "--version", 1, "--share", "5"),
        ("promote", "stable", "--version", 1, "--share", "101%"),
        ("promote", "stable", "--version", 0),
        ("follow", "mirror", "--channel", "a b"),
        ("pull", "out", "--channel", "stable", "--at", 1),
    ],
)
def test_wrong_usage_changes_nothing(cli: Cli, arguments: tuple[Any, ...]) -> None:
    assert cli.run(*arguments).returncode == 2
    assert cli("channels")["channels"] == []


def test_readers_take_the_version_of_their_channel(cli: Cli) -> None:
    mirror, out = cli.folder / "mirror", cli.folder / "out"
    assert cli.fail("follow", mirror, "--channel", "stable", "--once") == "NoChannel"
    cli("promote", "stable", "--version", 2)
    assert cli("follow", mirror, "--channel", "stable", "--once")["version"] == 2
    assert bits_of(Checkpoint(mirror / "current")) == bits_of(cli.chain.state(2))
    cli("promote", "stable", "--version", 5)
    cli("rollback", "stable", "--to", 3)
    assert cli("follow", mirror, "--channel", "stable", "--once")["version"] == 3
    assert cli("pull", out, "--channel", "stable", "--dry-run")["version"] == 3
    assert cli("pull", out, "--channel", "stable")["version"] == 3
    assert bits_of(Checkpoint(out)) == bits_of(cli.chain.state(3))
    assert cli.fail("follow", mirror, "--once") == "MirrorError"


def test_moves_of_a_signed_chain_need_the_key(tmp_path: Path) -> None:
    key = SigningKey.generate()
    key.save(tmp_path / "key")
    SigningKey.generate().save(tmp_path / "other")
    cli = Cli(tmp_path, key)
    assert cli.fail("promote", "stable", "--version", 2) == "SignatureInvalid"
    assert cli.fail("promote", "stable", "--version", 2, "--sign", tmp_path / "other") == "SignatureInvalid"
    assert cli("promote", "stable", "--version", 2, "--sign", tmp_path / "key")["signed_by"] == key.public
    assert cli("channels", "--trust", key.public)["channels"][0]["version"] == 2
    assert cli("pull", tmp_path / "out", "--channel", "stable", "--trust", key.public)["version"] == 2
