"""`deltawire log` lists the versions of a chain, and `deltawire show` describes one of them."""

from __future__ import annotations

import re
from pathlib import Path

from test_cli import fail, run, succeed


def test_the_log_lists_versions_newest_first(chain: Path) -> None:
    found = succeed("log", chain)
    assert (found["run"], found["head"], found["version"], found["floor"]) == ("chain", 5, 3, None)
    listed = [(version["version"], version["seq"], version["kind"], version["step"]) for version in found["versions"]]
    assert listed == [(3, 5, "delta", 20), (2, 3, "delta", 10), (1, 1, "anchor", 0)]
    delta = found["versions"][0]
    assert delta["times_smaller"] == delta["state_bytes"] / delta["bytes"] > 10
    assert [version["version"] for version in succeed("log", chain, "-n", 2)["versions"]] == [3, 2]
    commits = succeed("log", chain, "-n", 2, "--all", "--commits")["commits"]
    assert [(commit["seq"], commit["version"]) for commit in commits] == [(5, 3), (4, None), (3, 2), (2, None), (1, 1), (0, None)]


def test_the_log_is_drawn_for_people(chain: Path) -> None:
    done = run("log", chain, columns=80)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("chain  version 3 is the newest, ")
    assert lines[2] == "  1 ■··"
    assert re.match(r"· +3 +delta +20 +[\d.]+ (?:s|min|h) +[\d.]+ k?B +[\d.]+× +[\d.]+k +[\d.]+$", lines[5]), lines
    text = run("log", chain, "--commits", columns=80).stdout
    assert "  0 ╪■╪·╪·" in text
    assert "publisher 3 takes over" in text


def test_strings_of_a_version_cannot_command_the_terminal(checkpoints: list[Path], tmp_path: Path) -> None:
    succeed("publish", checkpoints[0], tmp_path / "chain", "--meta", "a\x1b[31m=[bold]b\x1b]0;\x07")
    for command in ("log", "show"):
        text = run(command, tmp_path / "chain").stdout
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "[bold]b" in text


def test_one_version_is_shown_in_full(chain: Path) -> None:
    newest, first = succeed("show", chain), succeed("show", chain, 1)
    assert (newest["version"], newest["seq"], newest["kind"], newest["step"], newest["base"]["seq"]) == (3, 5, "delta", 20, 4)
    assert succeed("show", chain, "--step", 20) == succeed("show", chain, "--seq", 5) == newest
    assert newest["signature"] == {"is": "none", "key": None}
    assert [file["name"] for file in first["files"]] == ["model.safetensors"]
    assert [file["name"] for file in newest["attachments"]] == ["config.json", "deltawire-layout.json", "tokenizer.json"]
    assert [(hop["by"], hop["to"]) for hop in first["route"]] == [("anchor", 1)]
    assert [hop["to"] for hop in newest["route"]] == [1, 2, 3, 4, 5]
    for arguments, expected in (
        (["--seq", 0], "no version yet"),
        ([1], "config.json"),
        (["--seq", 2], "newest version then +version 1"),
        ([3], r"from nothing +version 1 \(full checkpoint.* → 2 \(delta.* → 3 \(delta"),
    ):
        done = run("show", chain, *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert re.search(expected, done.stdout)
    assert "versions 1 to 3" in fail("show", chain, 6, kind="VersionUnknown")
    assert "only commits 0 to 5" in fail("show", chain, "--seq", 6, kind="VersionUnknown")
