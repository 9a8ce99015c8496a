"""Take hops of a route on the files of a checkpoint that no reader uses, for slots of a mirror and for `pull`."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from ...chain.attachments import attachments_hop
from ...chain.routes.restore import Hop
from ...chain.routes.walk_route import taking
from ...errors import DataDamaged, ResultMismatch
from ...format.checkpoints.checkpoint import Checkpoint, check_can_be_written
from ...format.checkpoints.staged_output import sync_file
from ...format.digest import Digest
from ...format.records.record_parts import FileEntry, holds_weights
from ...format.records.version_records import Commit
from ..cache.delta_cache import DeltaCache
from ..sync_report import SyncReport
from .checkpoint_in_place import CheckpointInPlace, checkpoint_digest

_PIECE = 8 << 20
_ARRIVING = ".part"
"""A hidden name, which no file of a checkpoint has."""


class Source(Protocol):
    """Fetches and checks the files of hops. Raises `DataDamaged`, `DataMissing` or `VersionGone`."""

    def to_file(self, hop: Hop, entry: FileEntry, path: Path) -> None: ...

    def to_memory(self, hop: Hop, entries: Sequence[FileEntry]) -> Iterator[tuple[FileEntry, memoryview]]: ...

    def abandon(self) -> None: ...


class HopsOnDisk:
    """Takes hops on disk. Every failure that concerns a hop, or the state that it starts from, is a `HopFailed`."""

    def __init__(
        self, source: Source, deltas: DeltaCache, report: SyncReport, *, threads: int | None, step: Callable[[str], None] = lambda _: None
    ) -> None:
        self._source = source
        self._deltas = deltas
        self._report = report
        self._threads = threads
        self._step = step

    def fetch_checkpoint(self, hop: Hop, folder: Path, *, leave_out: Collection[str] = ()) -> None:
        """Fetch a full checkpoint into a directory, durably, and check its digest. Correct files that already exist are kept.

        Files with a name in `leave_out` are not fetched.
        """
        for entry in hop.files:
            check_can_be_written(str(entry.name))
        with taking(hop):
            for entry in hop.files:
                assert entry.name is not None
                if entry.name not in leave_out and not is_complete(folder / entry.name, entry):
                    arriving = folder / f"{_ARRIVING}-{entry.blake3[:16]}"
                    for other in folder.glob(f"{_ARRIVING}*"):  # of another checkpoint
                        if other != arriving:
                            other.unlink()
                    self._source.to_file(hop, entry, arriving)
                    os.replace(arriving, folder / entry.name)
                    self._report.fetched([entry])
                    self._step("anchor-file-fetched")
            sync_file(folder)
            with self._report.watch.phase("verify"):
                found = checkpoint_digest(Checkpoint(folder), threads=self._threads)
            if found != hop.target.digest:
                raise DataDamaged(f"the checkpoint of {hop.target.describe()} has digest {found}, not {hop.target.digest}.")

    def fetch_deltas(self, hop: Hop) -> None:
        """Fetch the delta files of a hop that are not in the cache."""
        with taking(hop):
            fetched = self._deltas.ensure(hop.files, lambda entries: self._source.to_memory(hop, entries))
        self._report.fetched(fetched, of=hop.files)

    def fetch_attachments(self, target: Commit, folder: Path) -> None:
        """Fetch the attachments of a version that a directory lacks. Raises their errors directly, because no other route leads to them.

        Raises `CheckpointError` if their names cannot be written. Then nothing was changed.
        """
        for entry in target.attachments or ():
            check_can_be_written(str(entry.name))
        lacking = [entry for entry in target.attachments or () if not is_complete(folder / str(entry.name), entry)]
        fetched = self._deltas.ensure(lacking, lambda entries: self._source.to_memory(attachments_hop(target), entries))
        self._report.fetched(fetched)

    def place_attachments(self, target: Commit, folder: Path, *, own_names: Collection[str] = ()) -> None:
        """Make the attachments in a directory exactly those of a version, from the files that `fetch_attachments` fetched.

        Files in `own_names` are not touched. If the version's commit names no attachments (record version 1), the directory stays as it is.
        """
        if target.attachments is None:
            return
        wanted = {str(entry.name): entry for entry in target.attachments if entry.name not in own_names}
        for path in stray_files(folder, wanted.keys() | set(own_names)):
            path.unlink()
        for name, entry in wanted.items():
            if not is_complete(folder / name, entry):
                arriving = folder / _ARRIVING
                with arriving.open("wb") as file:
                    file.write(self._deltas.open(entry))
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(arriving, folder / name)
                self._step("attachment-placed")
        sync_file(folder)

    def apply_deltas(self, hop: Hop, folder: Path, before: Digest) -> None:
        """Apply the delta files of a hop to the checkpoint in a directory, whose digest is `before`, and check the result.

        After a failure the directory holds a mix of versions.
        """
        digest = before
        with taking(hop):
            with self._report.watch.phase("apply"):
                files = CheckpointInPlace(folder, threads=self._threads) if hop.files else None
                for entry in hop.files:
                    assert files is not None
                    digest += files.apply(self._deltas.open(entry), entry.first or 0, entry.count or 0)
                    self._step("file-applied")
            if digest != hop.target.digest:
                raise ResultMismatch(f"{hop.target.describe()} has digest {hop.target.digest}, but this leads to {digest}.")
        self._step("digest-checked")


def stray_files(folder: Path, names: Collection[str]) -> list[Path]:
    """Return the files that are neither weights, nor hidden, nor have one of these names."""
    found = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
    return [path for path in found if path.name not in names and not holds_weights(path.name)]


def is_complete(path: Path, entry: FileEntry) -> bool:
    """Return whether a file exists with the content that its record says."""
    if not path.is_file() or path.stat().st_size != entry.size:
        return False
    hasher = blake3()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            hasher.update(piece)
    return hasher.hexdigest() == entry.blake3
