"""One slot of a mirror: a directory with a complete Hugging Face checkpoint, and a record of its version.

Only the record (`deltawire.json`) says whether a slot can be used. It says "not clean" from before the first byte is changed until after
the last byte was checked. A slot without a readable record is garbage.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from ...errors import ChainError, CheckpointError, UnsupportedVersion
from ...format.checkpoints.checkpoint import MIRROR_RECORD_FILE, Checkpoint
from ...format.digest import Digest
from ...format.records.record_parts import CommitRef, record_hash
from ...format.records.version_records import Commit
from .checkpoint_in_place import checkpoint_digest
from .durable_json import read_json, write_json
from .hops_on_disk import is_complete, stray_files

RECORD_FILE = MIRROR_RECORD_FILE
_COPY_BYTES = 8 << 20


CLEAN, CHANGING, FETCHING = "clean", "changing", "fetching"
"""Phases of a slot: complete and checked; being changed, or interrupted while it was changed; an anchor that is being fetched."""


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str | None:
    """Return a name that changes with every boot of the operating system, or None if the system gives none.

    It tells whether the page cache still holds what was written. None counts as another boot.
    """
    try:
        return _BOOT_ID.read_text().strip() or None
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """The contents of a slot: the version that `commit` made, if it is clean, as last checked in the boot `boot_id`.

    The commit is kept with all its bytes, so that a mirror can describe its version without the store.
    """

    commit: Commit
    phase: str
    boot_id: str | None

    @property
    def clean(self) -> bool:
        return self.phase == CLEAN

    @property
    def seq(self) -> int:
        return self.commit.seq

    @property
    def digest(self) -> Digest:
        assert self.commit.digest is not None  # only versions are put into slots
        return self.commit.digest

    @property
    def ref(self) -> CommitRef:
        return self.commit.ref(record_hash(self.commit.to_bytes()))


class Slot:
    """The slot in the directory `path`. Code that changes it must hold its lock exclusively, code that reads it must share it (see
    `Mirror`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return self.path.name

    def record(self) -> SlotRecord | None:
        """Return what the slot holds, or None if its record cannot be read. Then the slot is useless."""
        document = read_json(self.path / RECORD_FILE)
        if document is None:
            return None
        record, phase, boot = document.get("record"), document.get("phase"), document.get("boot_id")
        if not isinstance(record, str) or phase not in (CLEAN, CHANGING, FETCHING) or not isinstance(boot, str | None):
            return None
        try:
            commit = Commit.parse(record.encode())
        except (ChainError, UnsupportedVersion):
            return None
        return None if commit.digest is None else SlotRecord(commit, phase, boot)

    def write_record(self, record: SlotRecord) -> None:
        """Replace the record durably. `seq` and `digest` are added to it for people and scripts."""
        data = record.commit.to_bytes()
        write_json(
            self.path / RECORD_FILE,
            {
                "seq": record.seq,
                "digest": record.digest.hex(),
                "commit": record_hash(data),
                "clean": record.clean,
                "phase": record.phase,
                "boot_id": record.boot_id,
                "record": data.decode(),
            },
        )

    def is_intact(self, record: SlotRecord, *, threads: int | None = None) -> bool:
        """Return whether every weight and attachment is what the record says, by reading all of them."""
        try:
            return self.has_attachments(record.commit) and checkpoint_digest(Checkpoint(self.path), threads=threads) == record.digest
        except (CheckpointError, OSError):
            return False

    def has_attachments(self, commit: Commit) -> bool:
        """Return whether the attachments are exactly those of a version, by reading them. Return True if its commit names none."""
        if commit.attachments is None:
            return True
        wanted = [entry for entry in commit.attachments if entry.name != RECORD_FILE]
        names = {str(entry.name) for entry in wanted} | {RECORD_FILE}
        return all(is_complete(self.path / str(entry.name), entry) for entry in wanted) and not stray_files(self.path, names)

    def copy_files_from(self, other: Slot) -> None:
        """Copy another slot's files, except its record.

        The bytes go through a buffer and blocks are not shared. Soon every page is changed through a map, and on a full disk a page without
        its own block causes a SIGBUS.
        """
        for source in sorted(other.path.iterdir()):
            if source.is_file() and source.name != RECORD_FILE and not source.name.startswith("."):
                with source.open("rb", buffering=0) as origin, (self.path / source.name).open("xb") as target:
                    shutil.copyfileobj(origin, target, _COPY_BYTES)

    def is_linked(self) -> bool:
        """Return whether a file of the slot has another name, as after `cp --link`. A change here would change it there too."""
        with os.scandir(self.path) as entries:
            return any(entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_nlink > 1 for entry in entries)

    def delete(self) -> None:
        """Remove the slot. The record goes first, so that an incomplete slot is never used."""
        (self.path / RECORD_FILE).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def file_names(self) -> list[str]:
        return sorted(os.listdir(self.path)) if self.path.is_dir() else []
