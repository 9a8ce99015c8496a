"""`deltawire pull` fetches one version, and `deltawire follow` keeps a mirror at the newest one."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from chain_commands import data_of, flip_a_bit, load_checkpoint, start_following, state
from forked_python import ForkedPopen
from test_cli import FIRST, INDEX, SECOND, assert_same, environment, fail, run, succeed


def test_a_pulled_checkpoint_is_the_published_one(chain: Path, checkpoints: list[Path], tmp_path: Path) -> None:
    pulled = succeed("pull", chain, tmp_path / "out")
    assert (pulled["version"], pulled["step"]) == (3, 20)
    assert_same(load_checkpoint(tmp_path / "out"), state(2))
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == sorted(["config.json", FIRST, SECOND, INDEX, "tokenizer.json"])
    assert (tmp_path / "out" / "config.json").read_text() == '{"model_type": "toy"}'


def test_an_older_version_can_be_pulled(chain: Path, tmp_path: Path) -> None:
    for number, (how, which) in enumerate((("--at", 1), ("--step", 10))):
        assert succeed("pull", chain, tmp_path / f"out{how}", how, which)["version"] == number + 1
        assert_same(load_checkpoint(tmp_path / f"out{how}"), state(number))
    assert "versions 1 to 3" in fail("pull", chain, tmp_path / "out-9", "--at", 9, kind="VersionUnknown")
    assert "step 11" in fail("pull", chain, tmp_path / "out-9", "--step", 11, kind="VersionUnknown")
    assert not (tmp_path / "out-9").exists()


def test_a_pull_replaces_only_by_force(chain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("mine")
    assert "--force" in fail("pull", chain, out, kind="CheckpointError")
    assert (out / "precious").read_text() == "mine"
    assert "not a checkpoint" in fail("pull", chain, out, "--force", kind="CheckpointError")
    (out / "precious").unlink()
    for version, number in ((1, 0), (3, 2)):
        succeed("pull", chain, out, "--at", version, "--force")
        assert_same(load_checkpoint(out), state(number))


def test_damaged_data_are_never_pulled(chain: Path, tmp_path: Path) -> None:
    flip_a_bit(data_of(chain, 1)[0])
    fail("pull", chain, tmp_path / "out", kind="DataDamaged")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["pull", "follow"])
def test_a_reader_reports_that_it_waits_for_data_and_continues_when_they_arrive(command: str, chain: Path, tmp_path: Path) -> None:
    late = data_of(chain, 3)[0]
    content = late.read_bytes()
    late.unlink()
    arguments = [command, str(chain), str(tmp_path / "out"), *(["--once"] if command == "follow" else [])]
    process = ForkedPopen("light", ["-m", "deltawire.cli", *arguments], stderr=subprocess.PIPE, text=True, env=environment())
    with process:
        assert process.stderr is not None
        notice = process.stderr.readline()
        late.write_bytes(content)
        _, rest = process.communicate(timeout=300)
    assert re.fullmatch(rf"waiting for data/.*{late.name}, which is not in the store yet\n", notice), notice
    assert (process.returncode, rest) == (0, "")


def test_follow_updates_a_mirror_and_reports_each_version(chain: Path, checkpoints: list[Path], tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    first = succeed("follow", chain, mirror, "--once")
    assert (first["event"], first["version"], first["step"], first["lag"]) == ("version", 3, 20, 0)
    assert_same(load_checkpoint(mirror / "current"), state(2))
    assert (mirror / "current" / "config.json").exists()
    succeed("publish", checkpoints[1], chain, "--step", 30)
    second = succeed("follow", chain, mirror, "--once")
    assert second["version"] == 4
    assert 0 < second["bytes"] < first["bytes"]
    assert_same(load_checkpoint(mirror / "current"), state(1))
    done = run("follow", chain, mirror, "--once")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.match(r"version 4 +step 30 ", done.stdout), done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_following_continues_until_it_is_stopped(chain: Path, checkpoints: list[Path], tmp_path: Path, number: signal.Signals) -> None:
    with start_following(chain, tmp_path / "mirror") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["version"] == 3
        succeed("publish", checkpoints[0], chain)
        assert json.loads(process.stdout.readline())["version"] == 4
        process.send_signal(number)
        rest, errors = process.communicate(timeout=300)
    assert (process.returncode, rest, errors) == (0, "", "")
    assert list(chain.glob("pin/*")) == []
    assert_same(load_checkpoint(tmp_path / "mirror" / "current"), state(0))


def test_a_follower_waits_for_a_chain_to_begin(checkpoints: list[Path], tmp_path: Path) -> None:
    with start_following(tmp_path / "chain", tmp_path / "mirror") as process:
        assert process.stdout is not None
        waiting = json.loads(process.stdout.readline())
        assert (waiting["event"], waiting["error"]) == ("sync-failed", "NoChain")
        succeed("publish", checkpoints[0], tmp_path / "chain")
        events = iter(lambda: json.loads(process.stdout.readline()), None)
        assert next(event for event in events if event["event"] == "version")["version"] == 1
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
    assert process.returncode == 0


def test_a_chain_that_is_silent_for_too_long_is_reported(chain: Path, tmp_path: Path) -> None:
    fail("follow", chain, tmp_path / "mirror", "--once", "--max-silence", 1e-9, kind="ChainStale")


def test_a_store_that_goes_back_is_noticed(chain: Path, tmp_path: Path) -> None:
    succeed("follow", chain, tmp_path / "mirror", "--once")
    for seq in (4, 5):
        (chain / f"commit/{seq:020}.json").unlink()
    fail("follow", chain, tmp_path / "mirror", "--once", kind="RollbackDetected")
    assert_same(load_checkpoint(tmp_path / "mirror" / "current"), state(2))


HANGING_PULL = """
import threading
from deltawire.cli import main
from deltawire.cli.commands import pull
from deltawire.store.local import LocalStore

def read_into(*_, **__):
    print("reading", flush=True)
    threading.Event().wait()

LocalStore.read_into = read_into
pull._LONGEST_ENDING = 0.1
main()
"""


def test_a_pull_that_waits_for_its_store_or_rate_ends_after_a_signal(chain: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HANGING_PULL, "pull", str(chain), str(tmp_path / "out")]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) in (-signal.SIGALRM, 128 + signal.SIGTERM)
    assert not (tmp_path / "out").exists()
