"""One slot of a mirror: a directory with a complete Hugging Face checkpoint, and a record of what version it is.

The record (`deltawire.json`) is the only thing that says a slot can be used. It says "not clean" from before the first byte is changed
until after the last was checked; a slot without a readable record is garbage.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from ...errors import ChainError, CheckpointError, UnsupportedVersion
from ...format.checkpoints.checkpoint import MIRROR_RECORD_FILE, Checkpoint
from ...format.digest import Digest
from ...format.records.chain_records import Commit, CommitRef, record_hash
from .checkpoint_in_place import checkpoint_digest
from .durable_json import read_json, write_json
from .hops_on_disk import is_complete, stray_files

RECORD_FILE = MIRROR_RECORD_FILE
_COPY_BYTES = 8 << 20


CLEAN, CHANGING, FETCHING = "clean", "changing", "fetching"
"""What a slot can be: whole and checked; on its way to another version, or cut off there; an anchor of which some files have arrived."""


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str | None:
    """Which boot of the operating system this is, and so whether the page cache still holds what was written: a name that changes with
    every boot; None where the system gives none, which must be taken as "another boot"."""
    try:
        return _BOOT_ID.read_text().strip() or None
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """What a slot holds: the version that `commit` made, if it is clean, as last checked in the boot `boot_id`.

    The commit is kept with all its bytes, so that a mirror can say everything about its version without the store.
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
    """The slot in the directory `path`. Who changes it must hold its lock alone, who reads it must share it (see `Mirror`)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return self.path.name

    def record(self) -> SlotRecord | None:
        """What it holds; None if nobody can tell, in which case it is of no use."""
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
        """Replace the record, durably. `seq` and `digest` stand beside it for people and scripts."""
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
        """Whether every weight and every attachment is what the record says, by reading all of them."""
        try:
            return self.has_attachments(record.commit) and checkpoint_digest(Checkpoint(self.path), threads=threads) == record.digest
        except (CheckpointError, OSError):
            return False

    def has_attachments(self, commit: Commit) -> bool:
        """Tell whether the files beside the weights are exactly those of a version, by reading them. True where its commit names none."""
        if commit.attachments is None:
            return True
        wanted = [entry for entry in commit.attachments if entry.name != RECORD_FILE]
        names = {str(entry.name) for entry in wanted} | {RECORD_FILE}
        return all(is_complete(self.path / str(entry.name), entry) for entry in wanted) and not stray_files(self.path, names)

    def copy_files_from(self, other: Slot) -> None:
        """Take over another slot's files, record excluded.

        By way of a buffer, not by sharing blocks: soon every page will be changed through a map, and on a full disk a page without a block
        of its own is a SIGBUS.
        """
        for source in sorted(other.path.iterdir()):
            if source.is_file() and source.name != RECORD_FILE and not source.name.startswith("."):
                with source.open("rb", buffering=0) as origin, (self.path / source.name).open("xb") as target:
                    shutil.copyfileobj(origin, target, _COPY_BYTES)

    def is_linked(self) -> bool:
        """Whether a file of it has another name somewhere, as after `cp --link`: what is changed here would change there too."""
        with os.scandir(self.path) as entries:
            return any(entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_nlink > 1 for entry in entries)

    def delete(self) -> None:
        """Remove it; the record first, so that half a slot is not taken for a whole one."""
        (self.path / RECORD_FILE).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def file_names(self) -> list[str]:
        return sorted(os.listdir(self.path)) if self.path.is_dir() else []
