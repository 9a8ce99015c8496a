"""Find out what a location holds before it is used: a chain, other files, or nothing."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

from ..errors import LocationOccupied, ObjectMissing
from . import keys
from .base import Store
from .fleet_keys import FLEET

_LOOKED_AT = 1000
"""Most objects that are looked at."""
_MAX_RUN_BYTES = 1 << 16
_CHAIN = (keys.EPOCHS, keys.COMMITS, keys.ANCHORS, keys.SKIPS, keys.DATA, keys.MARKS)
_OWN = (*_CHAIN, keys.PINS, keys.PROBES, keys.REPORTS, keys.RELAYS, keys.CHANNELS, FLEET)


def refuse_occupied(store: Store) -> None:
    """Raise `LocationOccupied` if the store holds objects but no chain. Call it before the first write.

    It protects against swapped arguments, which would put a chain into a directory of weights or source code.
    """
    try:
        store.head(keys.RUN)
        return
    except ObjectMissing:
        pass
    strangers = [info.key for info in itertools.islice(store.list(""), _LOOKED_AT) if not _is_own(info.key)]
    if strangers:
        raise LocationOccupied(f"{store.url} holds files that are not a chain, such as {strangers[0]}.")


def is_chain_directory(path: Path) -> bool:
    """Return whether a directory holds a chain of versions. Returns False if it cannot be read."""
    try:
        if not (path / keys.RUN).is_file():  # reading a pipe would block
            return False
        with (path / keys.RUN).open("rb") as file:
            record = json.loads(file.read(_MAX_RUN_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and record.get("deltawire") == "run"


def misplaced(path: Path) -> str | None:
    """Return why a checkpoint or a mirror must not be written to a path, as the end of a sentence. Returns None if it may.

    Users swap arguments easily, and `pathlib` accepts a URL as a relative path.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        return "is a URL, where a directory of this machine must be named"
    return "is a chain of versions" if is_chain_directory(path) else None


def _is_own(key: str) -> bool:
    return key in (keys.RUN, keys.HEAD, keys.COMING, keys.COPY) or key.startswith(_OWN)
