"""`deltawire verify` finds damage, and `deltawire gc` deletes what no reader needs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from chain_commands import data_of, flip_a_bit, save_checkpoint, state
from test_cli import fail, run, succeed


@pytest.mark.parametrize("deep", [[], ["--deep"]])
def test_a_sound_chain_passes(chain: Path, deep: list[str]) -> None:
    report = succeed("verify", chain, *deep)
    assert (report["ok"], report["commits"], report["versions"], report["problems"]) == (True, 6, 3, [])
    assert report["rebuilt"] == (3 if deep else None)
    assert "no damage found" in run("verify", chain, *deep).stdout


def test_a_flipped_bit_is_found_and_named(chain: Path) -> None:
    damaged = data_of(chain, 3)[0]
    flip_a_bit(damaged)
    assert run("verify", chain).returncode == 0  # without reading the data, only the sizes are checked
    for arguments in (["--deep"], ["--deep", "--json"]):
        done = run("verify", chain, *arguments)
        assert (done.returncode, done.stderr) == (3, "")
        assert damaged.name in done.stdout
    problems = json.loads(done.stdout)["problems"]
    assert problems[0]["where"] == "version 2 (commit 3)"


@pytest.mark.parametrize("version", [2, 3])
def test_a_chain_that_was_repaired_as_documented_passes_again(chain: Path, checkpoints: list[Path], version: int) -> None:
    damaged = data_of(chain, 2 * version - 1)[0]
    flip_a_bit(damaged)
    done = run("verify", chain, "--deep")
    assert done.returncode == 3
    assert f"deltawire publish CKPT {chain.as_uri()} --full" in " ".join(done.stdout.split())
    succeed("publish", checkpoints[2], chain, "--full")
    done = run("verify", chain, "--deep")
    assert (done.returncode, done.stderr) == (0, "")
    assert "superseded" in done.stdout
    assert "no damage that affects" in done.stdout
    assert damaged.name in "".join(done.stdout.split())
    report = json.loads(run("verify", chain, "--json").stdout)
    assert "superseded" in report
    assert (report["remedy"], report["reachable"]) == (None, True)


def test_a_missing_commit_is_named_once(chain: Path) -> None:
    (chain / "commit" / f"{2:020}.json").unlink()
    done = run("verify", chain, "--json")
    assert done.returncode == 3
    report = json.loads(done.stdout)
    assert [problem["what"] for problem in report["problems"]] == ["commit 2 is missing, but 3 later commits exist: no reader gets past it"]
    assert "backup" in report["remedy"]


def test_lost_data_are_found_and_named(chain: Path) -> None:
    lost = data_of(chain, 5)[0]
    lost.unlink()
    done = run("verify", chain)
    assert (done.returncode, done.stderr) == (3, "")
    assert f"{lost.name} is missing" in done.stdout
    assert "version 3 (commit 5)" in done.stdout
    assert re.search("new readers +cannot reach the newest version", done.stdout)


def test_collection_says_what_it_would_do_and_does_it(chain: Path, checkpoints: list[Path], tmp_path: Path) -> None:
    assert succeed("gc", chain)["outcome"] == "nothing"
    for number in range(2):  # each publication has different tensors, so it is a full checkpoint
        tensors = {name: array for name, array in state(0).items() if number or name != "scale"}
        succeed("publish", save_checkpoint(tmp_path / f"other-{number}", tensors), chain)
    before = {path for path in chain.rglob("*") if path.is_file()}
    dry = succeed("gc", chain, "--dry-run")
    assert (dry["outcome"], dry["floor"], dry["dry_run"]) == ("collected", 7, True)
    assert dry["deleted"] > 0 < dry["bytes"]
    assert {path for path in chain.rglob("*") if path.is_file()} == before
    assert "would be deleted" in run("gc", chain, "--dry-run").stdout
    waiting = succeed("gc", chain)
    assert waiting["outcome"] == "waiting"
    assert 0 < waiting["wait"] <= 3600
    assert re.search(r"deletion +in \d+ min", run("gc", chain).stdout)
    swept = succeed("gc", chain, "--grace", 0)
    assert (swept["outcome"], swept["deleted"], swept["bytes"]) == ("collected", dry["deleted"], dry["bytes"])
    assert not data_of(chain, 1)
    listed = succeed("log", chain)
    assert listed["floor"] == 7
    assert [(version["version"], version["collected"]) for version in listed["versions"]] == [
        (5, False),
        (4, False),  # the floor is its full checkpoint, which stays
        (3, True),
        (2, True),
        (1, True),
    ]
    printed = run("log", chain, columns=200).stdout
    assert printed.count("collected") == 3
    assert "floor version 4: data that only versions before this one need were deleted" in printed
    succeed("pull", chain, tmp_path / "kept", "--at", 4)
    assert succeed("verify", chain, "--deep")["ok"]
    gone = fail("pull", chain, tmp_path / "out", "--at", 2, kind="VersionGone")
    assert "version 2 was deleted by garbage collection: " in " ".join(gone.split())
    assert "were deleted by garbage collection" in run("show", chain, 2).stdout


def test_a_pin_holds_collection_back(chain: Path, tmp_path: Path) -> None:
    run_id = succeed("log", chain)["id"]
    pin = {"deltawire": "pin", "version": 1, "id": run_id, "reader": "slow", "seq": 3, "ttl": 3600}
    (chain / "pin").mkdir(exist_ok=True)
    (chain / "pin" / "slow.json").write_text(json.dumps(pin, sort_keys=True, separators=(",", ":")))
    for number in range(2):
        tensors = {name: array for name, array in state(0).items() if number or name != "scale"}
        succeed("publish", save_checkpoint(tmp_path / f"other-{number}", tensors), chain)
    dry = succeed("gc", chain, "--dry-run")
    assert dry["floor"] == 3
    assert dry["pins"] == [{"reader": "slow", "seq": 3, "ttl": 3600}]
    assert "pin of slow" in run("gc", chain, "--dry-run").stdout
