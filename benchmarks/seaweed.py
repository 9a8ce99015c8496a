"""A SeaweedFS server on loopback, for as long as a benchmark needs it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from servers import find_program, seaweedfs_server


def is_installed() -> bool:
    return find_program("weed") is not None


@contextmanager
def bucket() -> Iterator[str]:
    """The URL of an empty place in a bucket; the environment leads there meanwhile."""
    program = find_program("weed")
    assert program is not None
    with (
        tempfile.TemporaryDirectory() as folder,
        seaweedfs_server(program, Path(folder)) as server,
        mock.patch.dict(os.environ, server.environment),
    ):
        yield server.fresh_url()
