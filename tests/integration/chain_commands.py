"""Checkpoints and helpers for tests of the commands that work on a chain."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from forked_python import ForkedPopen
from test_cli import Tensors, environment, halves, load, model, save_sharded, updated

VERSIONS = 3


def state(number: int) -> Tensors:
    tensors = model()
    for seed in range(number):
        tensors = updated(tensors, seed + 1)
    return tensors


def save_checkpoint(directory: Path, tensors: Tensors) -> Path:
    """Write a sharded checkpoint with the files that Hugging Face adds, and with other files that must not be published."""
    save_sharded(directory, halves(tensors))
    (directory / "config.json").write_text('{"model_type": "toy"}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "optimizer.pt").write_text("not of this model alone")
    (directory / ".cache").mkdir()
    return directory


def load_checkpoint(directory: Path) -> Tensors:
    """Return all tensors of the directory, as the safetensors library reads them."""
    found: Tensors = {}
    for path in directory.glob("*.safetensors"):
        found |= load(path)
    return found


@contextlib.contextmanager
def start_following(chain: Path, mirror: Path) -> Iterator[subprocess.Popen[str]]:
    """Start `deltawire follow`, and stop it at the end of the test."""
    command = ["-m", "deltawire.cli", "follow", chain, mirror, "--poll", "0.05", "--json"]
    with ForkedPopen("light", command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            yield process
        finally:
            process.kill()


def data_of(chain: Path, seq: int) -> list[Path]:
    """Return the data objects of a version, largest first."""
    return sorted(chain.glob(f"data/*/{seq:020}/*"), key=lambda path: -path.stat().st_size)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
