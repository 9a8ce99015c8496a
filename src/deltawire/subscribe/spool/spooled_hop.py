"""A hop in a spool, and its manifest: both commits, and the files that lead from one to the other."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import CorruptRecord
from ...format.records.canonical import Fields, dump
from ...format.records.record_parts import CommitRef, FileEntry, record_hash
from ...format.records.record_rules import check_delta_files
from ...format.records.version_records import Commit

MOST_MANIFEST_BYTES = 32 << 20
"""Larger than the manifest of a hop with as many files as a file list may name."""


@dataclass(frozen=True, slots=True)
class SpooledHop:
    """A hop whose files are in the spool, checked.

    Parameters
    ----------
    base
        The commit whose state the files lead from.
    target
        The commit whose state they lead to.
    files
        The delta files. Empty if both commits have the same state.
    source
        "commit", "skip", "rewind" or "fence", as in `chain.routes.plan.Edge`.
    base_hash, target_hash
        The hashes of the commits. None means that they are computed when they are needed.
    """

    base: Commit
    target: Commit
    files: tuple[FileEntry, ...]
    source: str
    base_hash: str | None = field(default=None, compare=False, repr=False)
    target_hash: str | None = field(default=None, compare=False, repr=False)

    @property
    def base_ref(self) -> CommitRef:
        """The reference to the commit whose state the files lead from."""
        return self.base.ref(self.base_hash or record_hash(self.base.to_bytes()))

    @property
    def target_ref(self) -> CommitRef:
        """The reference to the commit whose state they lead to."""
        return self.target.ref(self.target_hash or record_hash(self.target.to_bytes()))

    @property
    def nbytes(self) -> int:
        """The size of all files."""
        return sum(entry.size for entry in self.files)


def manifest_bytes(hop: SpooledHop) -> bytes:
    """Return the manifest of a hop."""
    return dump(
        {
            "deltawire": "spooled-hop",
            "version": 1,
            "base": hop.base.to_bytes().decode(),
            "target": hop.target.to_bytes().decode(),
            "source": hop.source,
            "files": [entry.plain() for entry in hop.files],
        }
    )


def read_manifest(path: Path) -> SpooledHop | None:
    """Return the hop of a manifest, or None if there is no file that can be read as one. Raises `UnsupportedVersion`."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        return None
    try:
        return _parse_manifest(data)
    except CorruptRecord:
        return None


def _parse_manifest(data: bytes) -> SpooledHop:
    fields = Fields.parse(data, "spooled-hop", limit=MOST_MANIFEST_BYTES)
    (base, base_hash), (target, target_hash) = _commit(fields.text("base")), _commit(fields.text("target"))
    listed = fields.items("files")
    if dump({"files": listed}) == dump({"files": [entry.plain() for entry in target.files]}):
        files = target.files  # they were checked with the commit
    else:
        files = tuple(FileEntry.of(inner) for inner in Fields({"files": listed}, "spooled-hop").objects("files"))
    hop = SpooledHop(base, target, files, fields.text("source"), base_hash, target_hash)
    fields.done()
    if hop.base.id != hop.target.id or hop.base.digest is None or hop.target.digest is None:
        fields.refuse("its commits are not versions of one chain")
    if hop.source in ("fence", "rewind"):
        if hop.files or hop.base.digest != hop.target.digest:
            fields.refuse(f"a {hop.source} changes nothing")
    elif hop.source in ("commit", "skip"):
        check_delta_files(hop.target.tensors, hop.target.state_bytes, hop.files, fields)
        if not hop.files and hop.base.digest != hop.target.digest:
            fields.refuse("no file leads from one commit to the other")
        if hop.source == "commit" and hop.target.file_list is None and hop.files != hop.target.files:
            fields.refuse("its files are not those of its commit")
    else:
        fields.refuse(f"it has the unknown source {hop.source!r}")
    return hop


@functools.lru_cache(maxsize=4)  # the target of a hop is the base of the next one
def _commit(text: str) -> tuple[Commit, str]:
    """Return a commit and its hash. `Commit.parse` accepts nothing but the commit's own bytes."""
    data = text.encode()
    return Commit.parse(data), record_hash(data)
