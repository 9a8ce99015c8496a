"""The chain on the command line: real processes, a directory as the store, and tiny Hugging Face checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from forked_python import ForkedPopen
from safetensors.numpy import save_file
from support import run_python as run_fresh
from test_cli import FIRST, INDEX, SECOND, Tensors, assert_same, environment, fail, halves, load, model, run, save_sharded, succeed, updated

from deltawire.errors import LimitExceeded
from deltawire.format.records.chain_records import Limits
from deltawire.publish import Publisher
from deltawire.publish.writer_options import WriterOptions

VERSIONS = 3


def state(number: int) -> Tensors:
    tensors = model()
    for seed in range(number):
        tensors = updated(tensors, seed + 1)
    return tensors


def save_checkpoint(directory: Path, tensors: Tensors) -> Path:
    """A sharded checkpoint with what Hugging Face puts beside it, and some that should not travel."""
    save_sharded(directory, halves(tensors))
    (directory / "config.json").write_text('{"model_type": "toy"}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "optimizer.pt").write_text("not of this model alone")
    (directory / ".cache").mkdir()
    return directory


def load_checkpoint(directory: Path) -> Tensors:
    """All tensors of the directory, as the safetensors library reads them."""
    found: Tensors = {}
    for path in directory.glob("*.safetensors"):
        found |= load(path)
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return [save_checkpoint(folder / f"step-{number}", state(number)) for number in range(VERSIONS)]


@pytest.fixture(scope="module")
def published(checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    url = tmp_path_factory.mktemp("published") / "chain"
    for number, checkpoint in enumerate(checkpoints):
        succeed("publish", checkpoint, url, "--step", 10 * number)
    return url


@pytest.fixture
def chain(published: Path, tmp_path: Path) -> Path:
    """Versions 1, 2 and 3, which are commits 1, 3 and 5, for every publication begins with a fence; a copy that a test may change."""
    return shutil.copytree(published, tmp_path / "chain")


@contextlib.contextmanager
def start_following(chain: Path, mirror: Path) -> Iterator[subprocess.Popen[str]]:
    """A follower, which does not outlive its test."""
    command = ["-m", "deltawire.cli", "follow", chain, mirror, "--poll", "0.05", "--json"]
    with ForkedPopen("light", command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            yield process
        finally:
            process.kill()


def data_of(chain: Path, seq: int) -> list[Path]:
    """The data objects of a version, largest first."""
    return sorted(chain.glob(f"data/*/{seq:020}/*"), key=lambda path: -path.stat().st_size)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


# publish


def test_the_first_version_is_a_checkpoint_and_the_next_a_small_delta(checkpoints: list[Path], tmp_path: Path) -> None:
    first = succeed("publish", checkpoints[0], tmp_path / "chain", "--step", 7, "--run", "toy", "--meta", "lr=1e-6", "--meta", "note=a=b")
    second = succeed("publish", checkpoints[1], tmp_path / "chain", "--run", "toy")
    assert (first["version"], first["seq"], first["kind"], first["step"]) == (1, 1, "anchor", 7)
    assert first["meta"] == {"lr": "1e-6", "note": "a=b"}
    assert first["left_out"] == ["optimizer.pt"]
    assert (second["version"], second["seq"], second["kind"], second["step"]) == (2, 3, "delta", None)
    assert second["bytes"] * 10 < second["weight_bytes"] == sum(array.nbytes for array in model().values())
    assert second["elements"] == sum(array.size for array in model().values())
    assert second["density"] == second["changed"] / second["elements"] > 0


def test_publishing_the_same_again_is_next_to_nothing(chain: Path, checkpoints: list[Path]) -> None:
    again = succeed("publish", checkpoints[-1], chain)
    assert (again["kind"], again["changed"]) == ("delta", 0)
    assert again["bytes"] < 1000
    done = run("publish", checkpoints[-1], chain)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "0 of " in done.stdout


def test_a_single_file_can_be_published(checkpoints: list[Path], tmp_path: Path) -> None:
    published = succeed("publish", checkpoints[0] / FIRST, tmp_path / "chain")
    assert published["left_out"] == []
    succeed("pull", tmp_path / "chain", tmp_path / "out")
    assert_same(load_checkpoint(tmp_path / "out"), load(checkpoints[0] / FIRST))


def test_changed_attachments_go_with_a_delta_and_full_forces_a_checkpoint(chain: Path, checkpoints: list[Path], tmp_path: Path) -> None:
    changed = shutil.copytree(checkpoints[-1], tmp_path / "changed")
    (changed / "tokenizer.json").unlink()
    (changed / "chat_template.jinja").write_text("{{ messages }}")
    names = ["chat_template.jinja", "-tokenizer.json"]
    done = succeed("publish", changed, chain)
    assert (done["kind"], done["changed"], done["files_changed"]) == ("delta", 0, names)
    assert [version["files_changed"] for version in succeed("log", chain)["versions"]] == [names, [], [], []]
    assert "changed files: chat_template.jinja" in " ".join(run("log", chain).stdout.split())
    (changed / "chat_template.jinja").write_text("{{ messages[0] }}")
    for options in (["--dry-run"], []):
        told = run("publish", changed, chain, *options).stdout
        assert re.search("changed files +chat_template.jinja\n", told)
        assert re.search("size +files only, no weights changed\n", told)
    succeed("pull", chain, tmp_path / "out")
    beside = {path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".safetensors"}
    assert beside == {"model.safetensors.index.json", "config.json", "chat_template.jinja"}
    for path in chain.rglob("data/*/*/*.safetensors"):
        path.unlink()
    assert succeed("publish", checkpoints[-1], chain, "--full")["kind"] == "anchor"
    succeed("pull", chain, tmp_path / "again")
    assert_same(load_checkpoint(tmp_path / "again"), state(2))
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (checkpoints[-1] / "tokenizer.json").read_bytes()


def test_resuming_from_an_older_version_abandons_the_newer(chain: Path, checkpoints: list[Path]) -> None:
    published = succeed("publish", checkpoints[2], chain, "--resume-from", 2)
    assert published["kind"] == "delta"
    commits = {commit["seq"]: commit for commit in succeed("log", chain, "--commits")["commits"]}
    assert [commits[seq]["kind"] for seq in (6, 7, 8)] == ["fence", "rewind", "delta"]
    assert commits[7]["base"] == 3
    assert [seq for seq, commit in commits.items() if commit["abandoned"]] == [5]
    text = run("log", chain).stdout
    assert "back to version 2" in text
    assert re.search(r"^· +3 .*abandoned$", text, re.M)
    assert "no version 99" in fail("publish", checkpoints[2], chain, "--resume-from", 99, kind="VersionUnknown")


def test_weights_that_are_not_finite_are_refused_before_anybody_is_fenced_off(chain: Path, tmp_path: Path) -> None:
    bad = {"fine": np.ones(9, np.float32), "w": np.array([1, np.nan, np.inf], np.float32)}
    save_file(bad, tmp_path / "bad.safetensors")
    before = sorted(path.name for path in (chain / "commit").iterdir())
    assert "2 weights are NaN or infinite, in 'w' (2)" in fail("publish", tmp_path / "bad.safetensors", chain, kind="NonFiniteWeights")
    assert sorted(path.name for path in (chain / "commit").iterdir()) == before
    done = succeed("publish", tmp_path / "bad.safetensors", chain, "--allow-nonfinite")
    assert ["NaN" in warning for warning in done["warnings"]] == [False, True]  # that it is float32 is worth a warning, too


def test_what_the_run_does_not_allow_is_refused_before_anybody_is_fenced_off(tmp_path: Path) -> None:
    small = {"w": np.zeros(99, np.float16)}
    limits = Limits(state_bytes=1000, tensors=1, file_bytes=1000)
    with Publisher(tmp_path / "chain", attachments={}, options=WriterOptions(limits=limits)) as trainer:
        trainer.publish(small)
        save_file({"w": np.zeros(501, np.float16)}, tmp_path / "large.safetensors")
        assert "1,002 bytes of weights; this run allows 1,000" in fail(
            "publish", tmp_path / "large.safetensors", tmp_path / "chain", kind="LimitExceeded"
        )
        with pytest.raises(LimitExceeded, match=r"attachment 'vocab.txt' has 1,001 bytes"):
            Publisher(tmp_path / "chain", attachments={"vocab.txt": bytes(1001)})
        assert trainer.publish(small)


def test_a_publication_that_must_fail_does_not_fence_off_the_trainer(checkpoints: list[Path], tmp_path: Path) -> None:
    chain, weights = tmp_path / "chain", state(0)
    with Publisher(chain, attachments={}) as trainer:
        trainer.publish(weights)
        flip_a_bit(data_of(chain, 1)[0])
        before = sorted(chain.rglob("*"))
        fail("publish", checkpoints[1], chain, kind="DataDamaged")
        assert sorted(chain.rglob("*")) == before  # no epoch is claimed, and there is no fence
        assert trainer.publish(updated(weights)).seq == 2


def test_publishing_needs_the_right_run_and_a_checkpoint(chain: Path, checkpoints: list[Path], tmp_path: Path) -> None:
    before = succeed("log", chain)["head"]
    assert "'chain', not 'other'" in fail("publish", checkpoints[0], chain, "--run", "other", kind="RunMismatch")
    fail("publish", tmp_path / "nowhere", chain, kind="FileNotFoundError")
    fail("publish", tmp_path, chain, kind="CheckpointError")
    assert succeed("log", chain)["head"] == before  # nobody was fenced off for it


# log and show


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


# pull


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
def test_who_waits_for_data_says_so_and_goes_on_when_they_arrive(command: str, chain: Path, tmp_path: Path) -> None:
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


# follow


def test_a_mirror_is_brought_up_to_date_and_told_so(chain: Path, checkpoints: list[Path], tmp_path: Path) -> None:
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
def test_following_goes_on_until_it_is_told_to_end(chain: Path, checkpoints: list[Path], tmp_path: Path, number: signal.Signals) -> None:
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


# verify and gc


@pytest.mark.parametrize("deep", [[], ["--deep"]])
def test_a_sound_chain_passes(chain: Path, deep: list[str]) -> None:
    report = succeed("verify", chain, *deep)
    assert (report["ok"], report["commits"], report["versions"], report["problems"]) == (True, 6, 3, [])
    assert report["rebuilt"] == (3 if deep else None)
    assert "no damage found" in run("verify", chain, *deep).stdout


def test_a_flipped_bit_is_found_and_named(chain: Path) -> None:
    damaged = data_of(chain, 3)[0]
    flip_a_bit(damaged)
    assert run("verify", chain).returncode == 0  # sizes are right
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
    for number in range(2):  # other tensors each time, so that whole checkpoints are published
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
    assert succeed("log", chain)["floor"] == 7
    assert succeed("verify", chain, "--deep")["ok"]
    fail("pull", chain, tmp_path / "out", "--at", 2, kind="VersionGone")
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


# keys


def test_only_what_a_trusted_key_signed_is_taken(checkpoints: list[Path], tmp_path: Path) -> None:
    keys = [succeed("keygen", tmp_path / name)["public"] for name in ("ours", "theirs")]
    assert stat.S_IMODE((tmp_path / "ours").stat().st_mode) == 0o600
    chain = tmp_path / "chain"
    succeed("publish", checkpoints[0], chain, "--sign", tmp_path / "ours")
    succeed("pull", chain, tmp_path / "trusted", "--trust", keys[1], "--trust", keys[0])
    assert_same(load_checkpoint(tmp_path / "trusted"), state(0))
    fail("pull", chain, tmp_path / "untrusted", "--trust", keys[1], kind="SignatureInvalid")
    fail("follow", chain, tmp_path / "mirror", "--once", "--trust", keys[1], kind="SignatureInvalid")
    assert succeed("show", chain)["signature"] == {"is": "right", "key": keys[0]}
    assert succeed("verify", chain, "--trust", keys[0])["ok"]
    assert run("verify", chain, "--trust", keys[1]).returncode == 3
    assert not (tmp_path / "untrusted").exists()
    moved = chain.rename(tmp_path / "elsewhere")
    assert "--run" in fail("pull", moved, tmp_path / "moved", "--trust", keys[0], kind="WrongRun")
    succeed("pull", moved, tmp_path / "moved", "--trust", keys[0], "--run", chain.name)
    succeed("gc", moved, "--trust", keys[0], "--run", chain.name)
    succeed("verify", moved)
    assert "--run" in fail("verify", moved, "--trust", keys[0], kind="WrongRun")
    assert "of its own" not in fail("verify", moved, "--run", "other", kind="RunMismatch")  # which is for publishers


def test_publishers_go_on_only_with_a_chain_that_is_signed_as_they_sign(checkpoints: list[Path], tmp_path: Path) -> None:
    old, new = (succeed("keygen", tmp_path / name)["public"] for name in ("old", "new"))
    chain = tmp_path / "chain"
    succeed("publish", checkpoints[0], chain, "--sign", tmp_path / "old")
    for options in ([], ["--sign", tmp_path / "new"]):
        refused = fail("publish", checkpoints[1], chain, *options, kind="SignatureInvalid")
        assert "`--sign KEYFILE`" in refused
        assert "Trust the key that the publisher signs with" not in refused  # which is for readers
    not_a_key = checkpoints[0] / "config.json"
    for command in (["publish", checkpoints[1], chain, "--sign", not_a_key], ["keygen", "--public", not_a_key]):
        done = run(*command)
        assert done.returncode == 2
        assert "is not a deltawire signing key" in " ".join(done.stderr.replace("│", " ").split())
    assert "it is not a safetensors file" in fail("publish", not_a_key, chain, kind="CheckpointError")
    assert run("publish", checkpoints[1], chain, "--trust", old).returncode == 2
    succeed("publish", checkpoints[1], chain, "--sign", tmp_path / "new", "--trust", old)
    assert succeed("verify", chain, "--trust", old, "--trust", new)["notes"] == []
    succeed("publish", checkpoints[0], tmp_path / "unsigned")
    fail("pull", tmp_path / "unsigned", tmp_path / "pulled", "--trust", old, kind="SignatureInvalid")


def test_a_key_is_never_overwritten_nor_used_if_others_can_read_it(checkpoints: list[Path], tmp_path: Path) -> None:
    done = run("keygen", tmp_path / "key")
    assert re.search(r"public key +[0-9a-f]{64}\n", done.stdout)
    content = (tmp_path / "key").read_bytes()
    assert "exists already" in fail("keygen", tmp_path / "key", kind="FileExistsError")
    assert (tmp_path / "key").read_bytes() == content
    (tmp_path / "key").chmod(0o644)
    done = run("publish", checkpoints[0], tmp_path / "chain", "--sign", tmp_path / "key")
    assert done.returncode == 2
    assert "chmod 600" in done.stderr
    assert not (tmp_path / "chain").exists()


# What goes wrong


@pytest.mark.parametrize("command", [["log"], ["show"], ["verify"], ["gc"], ["gc", "--dry-run"]])
def test_a_place_without_a_chain_is_named_and_left_alone(command: list[str], tmp_path: Path) -> None:
    assert "nowhere" in fail(command[0], tmp_path / "nowhere", *command[1:], kind="NoChain")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("command", ["pull", "follow"])
def test_readers_of_a_place_without_a_chain_leave_nothing(command: str, tmp_path: Path) -> None:
    more = ["--once"] if command == "follow" else []
    fail(command, tmp_path / "nowhere", tmp_path / "out", *more, kind="NoChain")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["publish", "a"],
        ["publish", "a", "b", "--meta", "novalue"],
        ["publish", "a", "b", "--meta", "x=1", "--meta", "x=2"],
        ["publish", "a", "b", "--step", "-1"],
        ["publish", "a", "b", "--step", str(2**63)],
        ["publish", "a", "b", "--meta", f"x={'y' * 20_000}"],
        ["publish", "a", "b", "--run", ""],
        ["publish", "a", "b", "--run", "x" * 201],
        ["publish", "a", "memory://x"],
        ["pull", "a"],
        ["pull", "a", "b", "--trust", "abc"],
        ["follow", "a", "b", "--poll", "-1"],
        ["log", ""],
        ["log", "s3:/bucket/prefix"],
        ["log", "ftp://host/x"],
        ["log", "s3://user:secret@bucket/x"],
        ["log", "a", "-n", "0"],
        ["show", "a", "first"],
        ["show", "a", "1", "--step", "1"],
        ["pull", "a", "b", "--at", "1", "--step", "1"],
        ["pull", "a", "b", "--at", "0"],
        ["gc", "a", "--grace", "-5"],
        ["gc", "a", "--grace", "inf"],
        ["gc", "a", "--keep-anchors", "0"],
        ["keygen"],
    ],
)
def test_wrong_usage_exits_with_two(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr


def test_swapped_arguments_are_noticed(chain: Path, checkpoints: list[Path], tmp_path: Path) -> None:
    before = sorted(checkpoints[0].rglob("*")), sorted(chain.rglob("*"))
    assert "checkpoint comes first" in fail("publish", chain, checkpoints[0], kind="CheckpointError")
    assert "checkpoint comes first" in fail("publish", checkpoints[0], checkpoints[1], kind="LocationOccupied")
    assert "pull URL DIR" in fail("pull", tmp_path / "out", chain, "--force", kind="CheckpointError")
    assert "follow URL DIR" in fail("follow", tmp_path / "mirror", chain, kind="MirrorError")
    assert (sorted(checkpoints[0].rglob("*")), sorted(chain.rglob("*"))) == before


def test_a_store_that_cannot_be_reached_is_reported_while_it_is_tried_again_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    done = run("log", "s3://bucket/chain")
    assert done.returncode == 1
    *notices, error = done.stderr.splitlines()
    assert re.fullmatch(r"error: .+ in s3://bucket/chain failed: .+", error), done.stderr
    assert all(re.fullmatch(r"the store did not answer; trying again \(\d of \d\)", notice) for notice in notices), done.stderr
    assert "hidden" not in done.stderr


@pytest.mark.parametrize("name", ["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"])
def test_a_store_without_credentials_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    for variable in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_USE_EMULATOR"):
        monkeypatch.delenv(variable, raising=False)
    if name == "AZURE_STORAGE_ACCOUNT_KEY":
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "name")
        monkeypatch.setenv(name, "not base64")
    assert "az://container/chain" in fail("log", "az://container/chain", kind="StoreDenied")


def test_a_file_in_the_place_of_a_directory_is_one_line(chain: Path, checkpoints: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert "Errno" not in fail("follow", chain, tmp_path / "file", "--once", kind="MirrorError")
    assert "Errno" not in fail("pull", chain, tmp_path / "file", kind="CheckpointError")
    assert "Errno" not in fail("publish", checkpoints[0], tmp_path / "file", kind="StoreError")
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_directory_that_may_not_be_read_is_one_line(chain: Path) -> None:
    chain.chmod(0)
    try:
        fail("log", chain, kind="StoreDenied")
    finally:
        chain.chmod(0o755)


# Help

_CHAIN_COMMANDS = ("publish", "pull", "follow", "sidecar", "log", "show", "verify", "gc", "keygen")
_COMMANDS = (*_CHAIN_COMMANDS, "member", "fleet", "members", "rollouts", "top", "diff", "apply", "inspect")


def test_help_names_every_command_and_exit_code() -> None:
    text = run("--help", columns=200).stdout
    for word in _COMMANDS:
        assert re.search(rf"\b{word}\b", text)
        done = run(word, "--help", columns=80)
        assert done.returncode == 0
        assert "…" not in done.stdout, "a word is too wide for its column"
    for code in ("0 success", "1 an error", "2 wrong usage", "3 verify found damage", "130 interrupted"):
        assert code in text


def test_the_command_line_starts_without_what_commands_work_with() -> None:
    loaded = run_fresh("import deltawire.cli, sys; print(*sys.modules)").split()
    assert not {"obstore", "cryptography", "torch", "deltawire.chain", "deltawire.publish.publisher", "deltawire.store"} & set(loaded)
