"""Attachments: the files of a version other than its weights, such as config.json, the tokenizer and a chat template."""

from __future__ import annotations

from collections.abc import Sequence

from ..format.records.record_parts import FileEntry, holds_weights
from ..format.records.version_records import Commit
from .fetch import Fetcher
from .log import ChainLog
from .routes.remaining_routes import Routes, was_collected
from .routes.restore import Hop


def attachments_of(commit: Commit, first_hop: Hop) -> tuple[FileEntry, ...]:
    """Return the attachments of a version.

    A commit of version 1 does not name them. Then they are the other files of the checkpoint `first_hop` that the rebuild starts from.
    """
    if commit.attachments is not None:
        return commit.attachments
    return tuple(entry for entry in first_hop.files if entry.name is not None and not holds_weights(entry.name))


def changed_names(before: Sequence[FileEntry] | None, after: Sequence[FileEntry]) -> list[str]:
    """Return the names of the files that differ. Removed ones have a minus sign."""
    old = {entry.name: entry.blake3 for entry in before or ()}
    new = {entry.name: entry.blake3 for entry in after}
    changed = sorted(str(name) for name in new if old.get(name) != new[name])
    return changed + sorted(f"-{name}" for name in old.keys() - new.keys())


def attachments_hop(commit: Commit) -> Hop:
    """Return the hop that fetches a version's attachments. Readers wait for missing ones as they do for a commit's own files."""
    return Hop(commit, None, commit.files, "attachments")


def read_attachments_of(log: ChainLog, commit: Commit, fetcher: Fetcher) -> dict[str, bytes]:
    """Fetch the attachments of a version, by name. Raises the errors of `Fetcher.fetch`."""
    hop = attachments_hop(commit) if commit.attachments is not None else Routes(log, fetcher=fetcher).find(None, commit)[0]
    return fetch_attachments(log, attachments_of(commit, hop), hop, fetcher)


def fetch_attachments(log: ChainLog, entries: Sequence[FileEntry], hop: Hop, fetcher: Fetcher) -> dict[str, bytes]:
    """Fetch the attachments that a hop leads to, by name. Raises the errors of `Fetcher.fetch`."""
    return {str(entry.name): bytes(data) for entry, data in fetcher.prefetch(entries, collected=was_collected(log, hop))}
