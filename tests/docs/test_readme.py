"""The user's path: the README from top to bottom, as it is written, in an empty directory and in a terminal of 80 columns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markdown_blocks import PAGES, ROOT, blocks
from running_blocks import as_run, folder_with_models, run_python
from terminal import COLUMNS, misprints, run_in_terminal
from tiny_models import torch

from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.tensors.state import state_digest

README = blocks(ROOT / "README.md")

NOT_RUN = ("pip install ",)  # the environment of the tests is installed already


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with folder_with_models() as folder:
        yield folder


def test_every_block_works_as_written(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    printed: list[str] = []
    names: list[dict[str, Any]] = []
    for block in README:
        if block.language == "python":
            names.append(run_python(block))
            printed += capsys.readouterr().out.splitlines()
        elif block.language == "sh":
            commands = [line for line in as_run(block.text).splitlines() if not line.startswith(NOT_RUN)]
            for command, (code, written) in zip(commands, run_in_terminal(commands, folder), strict=True):
                assert code == 0, f"{command}\n{written}"
                assert misprints(written) == [], command
        else:
            assert block.language == "", f"{block} is run by nobody"
    assert [line for line in printed if len(line) > COLUMNS] == []

    # What the page says of it.
    trained, served = names[0], names[1]
    assert printed[0].startswith("step 0: anchor of ")
    assert [line.split(" of ")[0] for line in printed[1:10]] == [f"step {step}: delta" for step in range(1, 10)]
    assert printed[10] == "serving step 9 in torch.bfloat16"
    assert {parameter.dtype for parameter in trained["model"].parameters()} == {torch.float32}
    ours, theirs = dict(trained["model"].named_parameters()), dict(served["engine"].named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].bfloat16().view(torch.int16), theirs[name].view(torch.int16)) for name in ours)
    assert (folder / "last" / "tokenizer.json").read_bytes() == (folder / "tiny-model" / "tokenizer.json").read_bytes()
    assert json.loads((folder / "last" / "config.json").read_bytes())["dtype"] == "bfloat16"
    assert state_digest(Checkpoint(folder / "again")) == state_digest(Checkpoint(folder / "last"))
    assert state_digest(Checkpoint(folder / "first")) != state_digest(Checkpoint(folder / "last"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_is_python(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, str(block), "exec")


def test_lines_that_do_not_fit_are_seen() -> None:
    assert misprints("\x1b[1m" + "x" * 80 + "\x1b[0m\r\n  fits\r\n" + "words and " * 8 + "\r\nmore") == []
    assert misprints("x" * 81) == ["81 columns: " + "x" * 81]
    assert misprints("wide: " + "中" * 38) == ["82 columns: wide: " + "中" * 38]
    assert misprints("a" * 80 + "\r\nbc")[0].startswith("broken word: aaa")
