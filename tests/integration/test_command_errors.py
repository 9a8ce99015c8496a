"""Commands that work on a chain print clear errors and help texts."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
from forked_python import ForkedPopen
from support import run_python as run_fresh
from test_cli import environment, fail, run


@pytest.mark.parametrize("command", [["log"], ["show"], ["verify"], ["gc"], ["gc", "--dry-run"]])
def test_a_location_without_a_chain_is_named_and_not_changed(command: list[str], tmp_path: Path) -> None:
    assert "nowhere" in fail(command[0], tmp_path / "nowhere", *command[1:], kind="NoChain")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("command", ["pull", "follow"])
def test_readers_of_a_location_without_a_chain_leave_nothing_behind(command: str, tmp_path: Path) -> None:
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
        ["follow", "a", "b", "--host-cache", ""],
        ["pull", "a", "b", "--host-cache", "on"],
        ["fleet", "2", "--from", "a", "--env", "m:f", "--host-cache", os.devnull],
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
        ["sidecar", "--from", "a", "--engine", "nonsense"],
        ["sidecar", "--from", "a", "--engine", "http://"],
        ["sidecar", "--from", "a", "--engine", "http://127.0.0.1:port"],
        ["sidecar", "--from", "a", "--engine", "http://127.0.0.1:1", "--name", "a/b"],
        ["sidecar", "--from", "a", "--engine", "http://127.0.0.1:1", "--ready", "8001", "--spool", "SPOOL"],
        ["member", "--from", "a", "--env", "m:f", "--engine", "vllm=http://"],
        ["events", "--from", "a", "--metrics", "9464"],
        ["plan", "--params", "8B", "--run", "name"],
        ["plan", "--params", "8B", "--plot", "plan.png"],
        ["dashboard", "--from", "a", "--name", "host:7700"],
    ],
)
def test_wrong_usage_exits_with_two(arguments: list[str], tmp_path: Path) -> None:
    done = run(*(tmp_path / "spool" if argument == "SPOOL" else argument for argument in arguments))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr


def test_a_sidecar_checks_its_directories_before_it_waits_for_a_chain(chain: Path, tmp_path: Path) -> None:
    start = ["sidecar", "--engine", "http://127.0.0.1:1", "--from", tmp_path / "nowhere"]
    (tmp_path / "notes").write_text("not a directory")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    refused = fail(*start, "--spool", tmp_path / "notes", kind="SpoolError")
    assert "notes is not a directory" in refused
    assert "Name a directory that does not exist yet" in refused
    for mirror, message in ((tmp_path / "notes", "is a file"), (tmp_path / "full", "holds other files"), (chain, "is a chain of versions")):
        refused = fail(*start, "--spool", tmp_path / "spool", "--mirror", mirror, kind="MirrorError")
        assert message in refused
        assert "deltawire follow" not in refused


def test_swapped_arguments_are_noticed(chain: Path, checkpoints: list[Path], tmp_path: Path) -> None:
    before = sorted(checkpoints[0].rglob("*")), sorted(chain.rglob("*"))
    assert "checkpoint comes first" in fail("publish", chain, checkpoints[0], kind="CheckpointError")
    assert "publish CKPT URL" in fail("publish", checkpoints[0], checkpoints[1], kind="LocationOccupied")
    assert "relay SRC DST" in fail("relay", chain, checkpoints[0], "--once", kind="LocationOccupied")
    assert "to itself" in fail("relay", chain, f"file://{chain}/", "--once", kind="BadUrl")
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


def test_a_file_where_a_directory_should_be_gives_a_one_line_error(chain: Path, checkpoints: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert "Errno" not in fail("follow", chain, tmp_path / "file", "--once", kind="MirrorError")
    assert "Errno" not in fail("pull", chain, tmp_path / "file", kind="CheckpointError")
    assert "it is a file. Name a directory." in fail("publish", checkpoints[0], tmp_path / "file", kind="StoreError")
    assert "it is a file. Name a directory." in fail("relay", chain, tmp_path / "file", "--once", kind="StoreError")
    assert "is a file" in fail("relay", chain, tmp_path / "copy", "--once", "--spool", tmp_path / "file", kind="SpoolError")
    assert not (tmp_path / "copy").exists()
    assert "not a directory" in fail("report", chain, "-o", tmp_path / "file" / "run.html", kind="NotADirectoryError")
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_report_replaces_only_files(chain: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    refused = fail("report", chain, "-o", tmp_path / "folder", kind="IsADirectoryError")
    assert f"{tmp_path}/folder: it is a directory. Name a file." in refused
    assert "it is a directory" in fail("report", chain, "-o", "", kind="IsADirectoryError")
    (tmp_path / "link").symlink_to(tmp_path / "page.html")
    assert run("report", chain, "-o", tmp_path / "link").returncode == 0
    assert (tmp_path / "link").is_symlink()
    page = (tmp_path / "page.html").read_bytes()
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 1 << 20)
        assert run("report", chain, "-o", tmp_path / "pipe").returncode == 0
        assert os.read(pipe, 1 << 20)[:100] == page[:100]
    finally:
        os.close(pipe)
    assert (tmp_path / "pipe").is_fifo()


def test_a_dashboard_without_its_run_says_so_and_tries_again(tmp_path: Path) -> None:
    command = ["-m", "deltawire.cli", "dashboard", "--from", tmp_path / "nowhere", "--port", "0"]
    with ForkedPopen("light", command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stderr is not None
        assert "will try again: nothing is published at" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        process.wait(300)


def test_a_directory_that_may_not_be_read_is_one_line(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # every user may enter it
        Path(folder).chmod(0o755)
        copy = shutil.copytree(chain, Path(folder) / "chain")
        if os.geteuid() == 0:  # root may read everything, so another user owns the copy and runs the commands
            for path in (copy, *copy.rglob("*")):
                os.chown(path, 65534, 65534)
            monkeypatch.setenv("DELTAWIRE_TEST_USER", "65534")
        assert run("log", copy).returncode == 0
        copy.chmod(0)
        try:
            fail("log", copy, kind="StoreDenied")
        finally:
            copy.chmod(0o755)


_CHAIN_COMMANDS = ("publish", "pull", "follow", "sidecar", "log", "show", "verify", "dashboard", "report", "gc", "keygen")
_COMMANDS = (*_CHAIN_COMMANDS, "member", "fleet", "members", "rollouts", "plan", "relay", "events", "top", "diff", "apply", "inspect")


def test_help_names_every_command_and_exit_code() -> None:
    text = run("--help", columns=200).stdout
    for word in _COMMANDS:
        assert re.search(rf"\b{word}\b", text)
        done = run(word, "--help", columns=80)
        assert done.returncode == 0
        assert "…" not in done.stdout, "a word is too wide for its column"
    for code in ("0 success", "1 an error", "2 wrong usage", "3 verify found damage", "130 interrupted"):
        assert code in text


def test_the_command_line_starts_without_the_libraries_of_its_commands() -> None:
    loaded = run_fresh("import deltawire.cli, sys; print(*sys.modules)").split()
    assert not {"obstore", "cryptography", "torch", "deltawire.chain", "deltawire.publish.publisher", "deltawire.store"} & set(loaded)
