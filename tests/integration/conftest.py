"""A chain in a directory that the command line published from tiny Hugging Face checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from chain_commands import VERSIONS, save_checkpoint, state
from test_cli import succeed


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return [save_checkpoint(folder / f"step-{number}", state(number)) for number in range(VERSIONS)]


@pytest.fixture(scope="session")
def published(checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    url = tmp_path_factory.mktemp("published") / "chain"
    for number, checkpoint in enumerate(checkpoints):
        succeed("publish", checkpoint, url, "--step", 10 * number)
    return url


@pytest.fixture
def chain(published: Path, tmp_path: Path) -> Path:
    """Return a chain that a test may change.

    Every publication begins with a fence, so its versions 1, 2 and 3 are the commits 1, 3 and 5.
    """
    return shutil.copytree(published, tmp_path / "chain")
