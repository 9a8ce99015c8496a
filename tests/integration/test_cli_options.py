"""Commands that work on a chain accept many options. They run in this process, because starting one takes longer than its work."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_cli import assert_same, environment, halves, load, model, run_python, save_sharded, updated
from typer.testing import CliRunner

from deltawire.cli import app
from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.format.checkpoints.shard_layout import LAYOUT_FILE, describe_layout, parse_layout, restore_layout
from deltawire.format.safetensors_header import MalformedHeader


def call(*arguments: object, code: int = 0) -> str:
    """Run a command, and return what it printed on stdout and stderr."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


def ask(*arguments: object, code: int = 0) -> dict[str, Any]:
    """Run a command with --json, and return the object on stdout."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def save(directory: Path, tensors: dict[str, Any], config: str = "{}") -> Path:
    save_sharded(directory, halves(tensors))
    (directory / "config.json").write_text(config)
    return directory


def loaded(directory: Path) -> dict[str, Any]:
    return {name: array for path in directory.glob("*.safetensors") for name, array in load(path).items()}


def files_below(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the checkpoints `old` and `new`, and a `chain` that has both, as steps 1 and 2."""
    place = tmp_path_factory.mktemp("made")
    save(place / "old", model())
    save(place / "new", updated(model()))
    for step, name in enumerate(("old", "new"), 1):
        call("publish", place / name, place / "chain", "--step", step)
    return place


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "place")


def test_errors_about_common_mistakes_name_the_right_command_or_option(place: Path) -> None:
    delta = place / "step.delta"
    call("diff", place / "old", place / "new", "-o", delta)
    swapped = ask("apply", delta, place / "old", "-o", place / "out", code=1)["error"]
    assert (swapped["type"], "The checkpoint comes first" in swapped["message"]) == ("CheckpointError", True)
    assert "`deltawire show`" in ask("inspect", place / "chain", code=1)["error"]["message"]
    assert "--at" in ask("pull", place / "chain", place / "out", "--version", "1", code=2)["error"]["message"]
    assert "--verbose" in ask("follow", place / "chain", place / "out", "--verbos", code=2)["error"]["message"]
    assert "replace=True in Python" in ask("pull", place / "chain", place / "old", code=1)["error"]["message"]


# publish


def test_a_dry_run_publishes_nothing_and_predicts_the_version(place: Path) -> None:
    before = files_below(place)
    first = ask("publish", place / "old", place / "elsewhere", "--dry-run")
    assert (first["published"], first["version"], first["kind"], first["base"]) == (False, 1, "anchor", None)
    again = ask("publish", place / "old", place / "chain", "--dry-run")
    assert (again["version"], again["kind"], again["base"], again["same"]) == (3, "delta", 2, False)
    same = ask("publish", place / "new", place / "chain", "--dry-run")
    assert (same["changed"], same["files_changed"], same["same"]) == (0, [], True)
    back = ask("publish", place / "new", place / "chain", "--dry-run", "--resume-from", 1)
    assert (back["version"], back["base"], back["changed"]) == (4, 1, again["changed"])
    assert "version 3 would be published, nothing was written" in call("publish", place / "old", place / "chain", "--dry-run")
    other = save(place / "other", {name: array for name, array in model().items() if name != "scale"}, config='{"a": 1}')
    before = files_below(place)
    changed = ask("publish", other, place / "chain", "--dry-run")
    assert (changed["kind"], changed["files_changed"]) == ("anchor", ["config.json", LAYOUT_FILE])
    assert [again["warnings"], [text.split(":")[0] for text in changed["warnings"]]] == [
        [],
        ["this state has other tensors than the version before"],
    ]
    assert ask("publish", other, place / "chain", "--dry-run", "--full")["warnings"] == changed["warnings"]
    for options in ((), ("--full",)):
        back = ask("publish", place / "old", place / "chain", "--dry-run", "--step", 0, *options)
        assert [text.split(",")[0] for text in back["warnings"]] == ["step 0 is published after step 2"]
    assert files_below(place) == before
    assert ask("publish", place / "old", place / "new", "--dry-run", code=1)["error"]["type"] == "LocationOccupied"
    back = ask("publish", other, place / "chain", "--dry-run", "--resume-from", 1)
    full = ask("publish", place / "old", place / "chain", "--dry-run", "--full")
    assert (full["version"], full["kind"]) == (3, "anchor")
    copy = shutil.copytree(place / "chain", place / "copy")
    done = ask("publish", other, copy, "--resume-from", 1)
    assert (done["version"], done["kind"]) == (back["version"], back["kind"])
    # The prediction was right.
    done = ask("publish", place / "old", place / "chain")
    assert (done["version"], done["kind"], done["changed"]) == (again["version"], again["kind"], again["changed"])
    assert abs(done["bytes"] - again["bytes"]) < 1000


def test_if_changed_publishes_nothing_if_nothing_changed(place: Path) -> None:
    before = files_below(place / "chain")
    same = ask("publish", place / "new", place / "chain", "--if-changed")
    assert (same["published"], same["version"]) == (False, 2)
    assert "nothing to publish: version 2" in call("publish", place / "new", place / "chain", "--if-changed")
    assert files_below(place / "chain") == before  # no publisher was fenced
    (place / "new" / "config.json").write_text('{"changed": 1}')
    assert ask("publish", place / "new", place / "chain", "--if-changed")["published"]
    assert ask("publish", place / "old", place / "chain", "--if-changed")["version"] == 4
    assert ask("publish", place / "old", place / "fresh", "--if-changed")["version"] == 1


# all


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["log", "s3:/bucket"], "Did you mean s3://bucket"),
        (["pull", "chain", "out", "--at", "1", "--step", "1"], "--at or --step"),
        (["pull", "chain", "out", "--no-such-option"], "--no-such-option"),
        (["no-such-command"], "no-such-command"),
    ],
)
def test_wrong_usage_is_reported_as_json_too(arguments: list[str], said: str) -> None:
    error = ask(*arguments, code=2)["error"]
    assert error["type"] == "UsageError"
    assert said in error["message"]


# pull


def test_a_pull_names_the_chain_as_others_do_and_counts_only_what_it_fetches(place: Path) -> None:
    pulled = ask("pull", place / "chain", place / "out")
    assert pulled["url"] == ask("log", place / "chain")["url"] == (place / "chain").as_uri()
    assert pulled["hops"] == 2  # the fence of the second publisher is between the two, and has no data
    assert "a full checkpoint and one delta\n" in call("pull", place / "chain", place / "out", "--force")


def test_a_pull_can_be_tried_first(place: Path) -> None:
    before = files_below(place)
    plan = ask("pull", place / "chain", place / "out", "--step", 1, "--dry-run")
    assert (plan["version"], plan["hops"], plan["dry_run"]) == (1, 1, True)
    assert "config.json" in plan["files"]
    assert "nothing was fetched" in call("pull", place / "chain", place / "out", "--dry-run")
    assert ask("pull", place / "chain", place / "old", "--dry-run", code=1)["error"]["type"] == "CheckpointError"
    assert files_below(place) == before
    assert ask("pull", place / "chain", place / "out", "--step", 1)["bytes"] == plan["bytes"]


def test_shards_come_back_as_they_were_published(place: Path) -> None:
    for version, name in enumerate(("old", "new"), 1):
        call("pull", place / "chain", place / "out", "--at", version, "--force")
        assert {path.name: path.read_bytes() for path in (place / "out").iterdir()} == {
            path.name: path.read_bytes() for path in (place / name).iterdir()
        }


@pytest.mark.parametrize(
    "wrong",
    [
        "{}",
        "[",
        '{"deltawire":"layout","version":2}',
        "of other tensors",
        "outside",
        "an index that does not fit",
        "bomb",
        "bomb in index",
        "bomb in file",
    ],
)
def test_a_layout_that_cannot_be_used_is_passed_over(place: Path, wrong: str) -> None:
    checkpoint = Checkpoint(place / "old")
    good = json.loads(describe_layout(checkpoint) or b"")
    assert parse_layout(json.dumps(good).encode(), len(checkpoint)).headers.keys() == good["files"].keys()
    if wrong == "of other tensors":
        good["files"].popitem()
        good["index"] = json.dumps({"weight_map": {name: file for file, text in good["files"].items() for name in json.loads(text)}})
    elif wrong == "outside":
        good["files"] = {f"../{name}": text for name, text in good["files"].items()}
    elif wrong.startswith("bomb"):  # this pattern takes 25 times its size in memory
        bomb = '{"weight_map":{},"x":[' + "[]," * 100_000 + "[]]}"
        places = {"bomb in index": {"index": bomb}, "bomb in file": {"files": dict.fromkeys(good["files"], bomb)}}
        good |= places.get(wrong, {"x": json.loads(bomb)})
        with pytest.raises(MalformedHeader, match="too many"):
            parse_layout(json.dumps(good).encode(), len(checkpoint))
    elif wrong == "an index that does not fit":
        good["index"] = '{"weight_map": {}}'
    folder = shutil.copytree(place / "new", place / "folder")
    (folder / LAYOUT_FILE).write_text(wrong if wrong.startswith(("{", "[")) else json.dumps(good))
    assert not restore_layout(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in (place / "new").iterdir()
    }


def test_a_pull_by_force_deletes_nothing_of_others(place: Path) -> None:
    out = place / "out"
    call("pull", place / "chain", out, "--at", 1)
    for stranger in ("notes.txt", "logs/today.txt", ".git/HEAD"):
        (out / stranger).parent.mkdir(exist_ok=True)
        (out / stranger).write_text("mine")
        refused = ask("pull", place / "chain", out, "--force", "--dry-run", code=1)["error"]
        assert refused == ask("pull", place / "chain", out, "--force", code=1)["error"]
        assert refused["type"] == "CheckpointError"
        assert f"holds {stranger}, which would be lost" in refused["message"]
        assert (out / stranger).read_text() == "mine"
        assert_same(loaded(out), model())
        (out / stranger).unlink()
        if (out / stranger).parent != out:
            (out / stranger).parent.rmdir()
    call("pull", place / "chain", out, "--force")
    assert_same(loaded(out), updated(model()))


# keys


def test_keys_may_be_in_files(place: Path) -> None:
    keys = [ask("keygen", place / name)["public"] for name in ("ours", "theirs")]
    assert call("keygen", "--public", place / "ours") == f"{keys[0]}\n"
    assert ask("keygen", place / "ours", "--public")["public"] == keys[0]
    call("publish", place / "old", place / "signed", "--sign", place / "ours")
    trusted = place / "trusted.keys"
    trusted.write_text(f"# readers trust these\n\n{keys[1]}  # theirs\n{keys[0]}\n")
    assert ask("pull", place / "signed", place / "out", "--trust", trusted)["version"] == 1
    trusted.write_text(keys[1])
    assert ask("pull", place / "signed", place / "never", "--trust", trusted, code=1)["error"]["type"] == "SignatureInvalid"
    for wrong, word in (("", "holds no public key"), ("abc\n", "not a public key"), ((place / "ours").read_text(), "secret key")):
        trusted.write_text(wrong)
        assert word in " ".join(call("log", place / "signed", "--trust", trusted, code=2).replace("│", " ").split())
    call("log", place / "signed", "--trust", place / "nowhere", code=2)
    call("keygen", "--public", place / "nowhere", code=1)
    call("keygen", "--public", trusted, code=2)


# follow --exec


def test_a_command_runs_once_for_each_version(place: Path) -> None:
    mirror, journal = place / "mirror", place / "journal"
    write = f'echo "$DELTAWIRE_VERSION $DELTAWIRE_SEQ $DELTAWIRE_STEP $(ls "$DELTAWIRE_PATH" | grep -c config.json)" >> {journal}'
    for _ in range(2):  # the second call finds nothing new
        call("follow", place / "chain", mirror, "--once", "--exec", write)
    assert journal.read_text() == "2 3 2 1\n"
    call("publish", place / "old", place / "chain")
    failing = f"{write}; exit 7"
    assert "exited with code 7" in call("follow", place / "chain", mirror, "--once", "--exec", failing, code=1)
    assert_same(loaded(mirror / "current"), model())  # the mirror has the version although the command failed
    call("follow", place / "chain", mirror, "--once", "--exec", failing, code=1)  # the command runs again, because it failed
    assert journal.read_text().splitlines()[1:] == ["3 5  1"] * 2


def test_the_output_of_a_command_does_not_disturb_json(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(
        app, ["follow", str(place / "chain"), str(place / "mirror"), "--once", "--json", "--exec", "echo noise; exit 3"]
    )
    assert result.exit_code == 1
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(event["event"], event["version"]) for event in events] == [("version", 2), ("exec-failed", 2)]
    assert events[1]["status"] == 3
    captured = capfd.readouterr()
    assert (captured.out, "noise" in captured.err) == ("", True)


def test_a_command_ends_with_the_follower(place: Path) -> None:
    command = "sleep 1000 & echo $!; wait"
    arguments = [sys.executable, "-m", "deltawire", "follow", str(place / "chain"), str(place / "mirror"), "--exec", command]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("version 2")
        sleeper = int(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=120)  # returns only when the last process has closed the pipe
        except subprocess.TimeoutExpired:
            os.kill(sleeper, signal.SIGKILL)
            raise
    assert process.returncode == 0
    assert not (place / "mirror" / ".exec.json").exists()


# All commands


def test_verbose_reports_events_and_requests(place: Path) -> None:
    for command in (["log"], ["show"], ["verify"], ["gc"], ["pull", place / "out"], ["follow", place / "mirror", "--once"]):
        result = CliRunner().invoke(app, [command[0], str(place / "chain"), *map(str, command[1:]), "-v", "--json"])
        assert result.exit_code == 0, result.output
        json.loads(result.stdout)
        assert "get run.json: " in result.stderr, result.stderr
    result = CliRunner().invoke(app, ["publish", str(place / "old"), str(place / "chain"), "--verbose"])
    assert "planned seq=3 updates=2" in result.stderr
    assert "create commit/" in result.stderr


def test_help_is_short_to_ask_for_and_the_package_is_a_program() -> None:
    for command in ([], ["publish"], ["member"], ["inspect"]):
        assert call(*command, "-h") == call(*command, "--help")
    done = run_python(["-m", "deltawire"], "--version")
    assert (done.returncode, done.stdout[:10]) == (0, "deltawire ")


@pytest.mark.parametrize("command", ["serve", "gateway", "events", "dashboard", "member"])
def test_a_command_that_misses_its_chain_says_how_to_give_it(command: str) -> None:
    assert "Missing option '--from'. Give the chain as --from URL." in ask(command, "/tmp/chain", code=2)["error"]["message"]
