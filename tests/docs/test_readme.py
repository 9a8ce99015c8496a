"""Run the README from top to bottom as it is written, in an empty directory and in a terminal of 80 columns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_blocks import ROOT, blocks
from running_blocks import folder_with_models, run_block
from terminal import COLUMNS, misprints
from tiny_models import bits, torch

import deltawire

README = ROOT / "README.md"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with folder_with_models() as folder:
        yield folder


def test_every_block_works_as_written(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    trained, served = [names for block in blocks(README) if block.is_run and (names := run_block(block, folder))]
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed[:10] if len(line) > COLUMNS] == []

    # This is what the page says about the output.
    assert printed[0].startswith("step 0: anchor of ")
    assert [line.split(" of ")[0] for line in printed[1:10]] == [f"step {step}: delta" for step in range(1, 10)]
    assert [line.split("]")[0] for line in printed[10:]] == ["[9"]  # the trainer has ended, so one completion is enough
    assert {parameter.dtype for parameter in trained["model"].parameters()} == {torch.float32}
    assert bits(served["model"].state_dict()) == bits({name: tensor.bfloat16() for name, tensor in trained["model"].state_dict().items()})
    deltawire.pull("bucket/run-7", "last")
    assert (folder / "last" / "tokenizer.json").read_bytes() == (folder / "tiny-model" / "tokenizer.json").read_bytes()
    assert json.loads((folder / "last" / "config.json").read_bytes())["dtype"] == "bfloat16"
    assert (folder / "policy" / "current" / "model.safetensors").exists()


def test_its_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", README.read_text(encoding="utf-8"))
    assert [target for target in targets if not (ROOT / target).exists()] == []
    assert len(targets) > 10


def test_it_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_lines_that_do_not_fit_are_seen() -> None:
    assert misprints("\x1b[1m" + "x" * 80 + "\x1b[0m\r\n  fits\r\n" + "words and " * 8 + "\r\nmore") == []
    assert misprints("x" * 81) == ["81 columns: " + "x" * 81]
    assert misprints("wide: " + "中" * 38) == ["82 columns: wide: " + "中" * 38]
    assert misprints("a" * 80 + "\r\nbc")[0].startswith("broken word: aaa")
