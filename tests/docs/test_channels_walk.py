"""The walk through channels and a gate: two engines, a gateway, a program that asks and rates, and a gate that promotes the canary."""

from __future__ import annotations

import json
import shlex
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from markdown_blocks import ROOT, Block, blocks, blocks_run_by
from running_blocks import as_run, run_python, run_shell
from servers import serving_command
from terminal import commands_in, run_in_terminal

from deltawire import ReaderOptions
from deltawire.chain.channels import ChannelReader

httpx = pytest.importorskip("httpx")
pytest.importorskip("aiohttp", reason="a gateway needs aiohttp")
pytest.importorskip("openai", reason="the program of the page needs openai")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make an empty directory with a short name, because paths are printed, and work in it."""
    with tempfile.TemporaryDirectory(prefix="dw-", dir="/tmp") as name, monkeypatch.context() as inside:
        inside.chdir(name)
        yield Path(name)


def one_in_language(language: str, found: list[Block]) -> Block:
    (block,) = [block for block in found if block.language == language]
    return block


def test_the_gate_promotes_the_canary_of_the_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = blocks_run_by("tests/docs/test_channels_walk.py", "docs/live.md")
    (gate,) = blocks_run_by("tests/docs/test_channels_walk.py", "docs/gate.md")
    (look,) = blocks_run_by("tests/docs/test_channels_walk.py", "docs/train.md")
    first = [block for block in blocks(ROOT / "docs/live.md") if "Qwen3Config(" in block.text or block.text.startswith("deltawire publish")]
    run_python(first[0])
    run_shell(first[1], folder)

    walk, asking = (one_in_language(language, live) for language in ("sh", "python"))
    commands = commands_in(as_run(walk.text))
    moving, servers = ([each for each in commands if each.endswith(" &") == ends] for ends in (False, True))
    assert [code for code, _ in run_in_terminal(moving, folder)] == [0] * len(moving)
    stable, canary, gateway = (each.removesuffix(" &") for each in servers)
    with ExitStack() as running:
        for port, command in (("8000", stable), ("8001", canary)):
            address = running.enter_context(serving_command(*shlex.split(as_run(command, {f"--port {port}": "--port 0"}))[1:]))
            gateway = as_run(gateway, {f"http://127.0.0.1:{port}": address})
        address = running.enter_context(serving_command(*shlex.split(f"{gateway} --port 0 --journal journal")[1:]))
        while json.loads(httpx.get(f"{address}/healthz", trust_env=False).content)["up"] < 2:
            time.sleep(0.05)
        asked = run_python(asking, {"http://127.0.0.1:7800": address})
    assert set(asked["answers"]) == {"stable", "canary"}
    assert asked["answers"].total() == 100

    capsys.readouterr()
    run_python(look, {"s3://bucket/run-7": "runs/tiny"})
    assert "'read': 100" in capsys.readouterr().out
    (command,) = commands_in(as_run(gate.text))
    for _ in range(30):  # single looks, because a gate that never decides would never end
        ((code, written),) = run_in_terminal([f"{command} --once"], folder)
        assert code == 0, written
        if not written.startswith("continue: "):
            break
        time.sleep(0.2)
    assert "promote commit 3  solved:-0 holds: canary mean 1 (" in written
    with ReaderOptions().open_store("runs/tiny") as store:
        moves = [(move.kind, move.target.seq) for move in ChannelReader(ReaderOptions().open_log(store), "stable").history()]
    assert moves == [("promote", 3), ("promote", 1)]
