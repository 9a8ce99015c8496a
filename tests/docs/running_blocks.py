"""Run the blocks of our pages as they are written. A directory replaces the bucket, and tiny models replace those of the Hub."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from markdown_blocks import Block
from terminal import commands_in, misprints, run_in_terminal
from tiny_models import moe, qwen, save_tokenizer, torch

from deltawire.warnings import DeltawireWarning

SUBSTITUTES = {
    "s3://bucket/": "./bucket/",  # a directory replaces the bucket
    "Qwen/Qwen3-0.6B": "./tiny-model",  # a small local model replaces the one of the Hub
    "/dev/shm/": "./",
    '"cuda"': '"cpu"',  # the same functions accept tensors of both devices
}


@contextmanager
def folder_with_models() -> Iterator[Path]:
    """Make a directory with a short name, because paths are printed. It holds only the models that blocks download or read."""
    with tempfile.TemporaryDirectory(prefix="dw-", dir="/tmp") as name:
        for place, model in (("tiny-model", qwen(0, dtype=torch.float32)), ("tiny-moe", moe(0, dtype=torch.float32))):
            model.save_pretrained(Path(name, place))
            save_tokenizer(Path(name, place))
        qwen(0).save_pretrained(Path(name, "checkpoint"))
        qwen(1).save_pretrained(Path(name, "next-checkpoint"))
        yield Path(name)


def as_run(text: str, substitutes: Mapping[str, str] = SUBSTITUTES) -> str:
    """Replace what a block names by what exists here. Each text to be replaced must be in the block, except those of `SUBSTITUTES`."""
    for written, meant in substitutes.items():
        assert written in text or written in SUBSTITUTES, f"the block does not say {written!r} any more"
        text = text.replace(written, meant)
    return text


def run_block(block: Block, folder: Path, substitutes: Mapping[str, str] = SUBSTITUTES) -> dict[str, Any]:
    """Run a program, or the commands of a block, in this folder. Return the names that a program defined."""
    if block.language == "python":
        return run_python(block, substitutes)
    run_shell(block, folder, substitutes)
    return {}


def run_python(block: Block, substitutes: Mapping[str, str] = SUBSTITUTES) -> dict[str, Any]:
    """Run a block as a separate program, in which our warnings are errors. Return the names that it defined."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeltawireWarning)
        exec(compile("\n" * (block.line - 1) + as_run(block.text, substitutes), str(block.page), "exec"), names)
    return names


def run_shell(block: Block, folder: Path, substitutes: Mapping[str, str] = SUBSTITUTES, warm_up: str = "light") -> None:
    """Run the commands of a block in a terminal. All of them must succeed, and fit the terminal. `warm_up` is as in `forked_python`."""
    commands = commands_in(as_run(block.text, substitutes))
    results = run_in_terminal(commands, folder, until=block.run_until, warm_up=warm_up)
    for command, (code, written) in zip(commands, results, strict=True):
        expected = 3 if "# exits with 3" in command else 0
        assert code == expected, f"{block}: {command} ended with code {code}\n{written}"
        wrong = misprints(written) if command.startswith("deltawire ") else []
        assert wrong == [], f"{block}: {command}\n{wrong}"
