"""Small JSON files that are replaced as a whole. A reader sees the old or the new file, even after a crash."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 20


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Replace the file durably. A crash can leave a hidden file behind, whose name no file of a checkpoint can have."""
    temporary = path.with_name(f"{_leftover(path)}{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(json.dumps(document, indent=1, sort_keys=True).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_leftovers(path: Path) -> None:
    """Remove the files that crashes left of `path`. No other process may be writing it."""
    for leftover in path.parent.glob(f"{_leftover(path)}*"):
        leftover.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the document, or None if there is none that can be read."""
    try:
        return read_sound_json(path)
    except ValueError:
        return None


def read_sound_json(path: Path) -> dict[str, Any] | None:
    """Return the document, or None if there is no file. Raise `ValueError` if the file is damaged."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        document = json.loads(data)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError("the JSON is not an object")
    return document


def _leftover(path: Path) -> str:
    """Return the beginning of the names of temporary files."""
    return f".{path.name}.tmp-"
