"""Run the Python blocks of our pages as they are written. A directory stands for the bucket, and tiny models for those of the Hub."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from markdown_blocks import Block
from tiny_models import moe, qwen, save_tokenizer, torch

from deltawire.warnings import DeltawireWarning

SUBSTITUTES = {
    "s3://bucket/": "./bucket/",  # a directory in place of a bucket
    "Qwen/Qwen3-0.6B": "./tiny-model",  # a model that is here, and small
}


@contextmanager
def folder_with_models() -> Iterator[Path]:
    """A directory of a short name, as paths are printed, with the models that blocks download and nothing else."""
    with tempfile.TemporaryDirectory(prefix="dw-", dir="/tmp") as name:
        for place, model in (("tiny-model", qwen(0, dtype=torch.float32)), ("tiny-moe", moe(0, dtype=torch.float32))):
            model.save_pretrained(Path(name, place))
            save_tokenizer(Path(name, place))
        yield Path(name)


def as_run(text: str, substitutes: Mapping[str, str] = SUBSTITUTES) -> str:
    """Put what is here in place of what a block names. Each text to be replaced must be there, except those of `SUBSTITUTES`."""
    for written, meant in substitutes.items():
        assert written in text or written in SUBSTITUTES, f"the block does not say {written!r} any more"
        text = text.replace(written, meant)
    return text


def run_python(block: Block, substitutes: Mapping[str, str] = SUBSTITUTES) -> dict[str, Any]:
    """Run a block as a program of its own, in which our warnings are errors. Returns its names."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeltawireWarning)
        exec(compile("\n" * (block.line - 1) + as_run(block.text, substitutes), str(block.page), "exec"), names)
    return names
