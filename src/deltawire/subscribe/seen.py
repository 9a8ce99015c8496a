"""Remember the newest commit that a mirror has seen, to notice a store that was set back to an earlier state."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import MirrorError
from ..format.records.record_parts import CommitRef
from .mirror.durable_json import read_sound_json, remove_leftovers, write_json
from .mirror.locks import FileLock
from .mirror.mirror_errors import as_mirror_errors

_HASH = re.compile(r"[0-9a-f]{64}")


class SeenFile:
    """The file `seen.json` of a mirror, shared by all processes that use the mirror. The commit in it never goes down."""

    def __init__(self, mirror: Path) -> None:
        self._path = mirror / "seen.json"
        self._lock_path = mirror / "locks" / "seen"

    def read(self) -> CommitRef | None:
        """Return the newest commit seen, or None. Raises `MirrorError` for a file that cannot be read, because an attacker would want it
        ignored.
        """
        try:
            with as_mirror_errors(self._path):
                document = read_sound_json(self._path)
        except ValueError:
            raise MirrorError(f"{self._path} is damaged. Remove it to accept whatever the store shows.") from None
        if document is None:
            return None
        seq, commit = document.get("seq"), document.get("commit")
        if type(seq) is not int or seq < 0 or not isinstance(commit, str) or not _HASH.fullmatch(commit):
            raise MirrorError(f"{self._path} is damaged. Remove it to accept whatever the store shows.")
        return CommitRef(seq, commit, None)

    def remember(self, ref: CommitRef) -> None:
        """Note a commit, unless a newer one is noted. Does nothing if there is no mirror yet."""
        if not self._lock_path.parent.is_dir():
            return
        with as_mirror_errors(self._path), FileLock.wait_exclusive(self._lock_path):
            known = self.read()
            if known is None or known.seq < ref.seq:
                remove_leftovers(self._path)
                write_json(self._path, {"seq": ref.seq, "commit": ref.commit})
