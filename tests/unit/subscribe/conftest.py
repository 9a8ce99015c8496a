from __future__ import annotations

from pathlib import Path

import pytest
from shared_host import Host
from spooled_chain import directory_chain


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Readers of a chain in a directory, which share a cache."""
    return Host(tmp_path, directory_chain(tmp_path / "store"))
