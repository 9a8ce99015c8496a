"""How the fields of one record must fit together (docs/protocol.md §2, §3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .canonical import Fields
from .record_parts import FileEntry, holds_weights, link_targets

if TYPE_CHECKING:
    from .version_records import Commit, Shortcut

KINDS = ("fence", "delta", "anchor", "rewind")


def check_shortcut(shortcut: Shortcut, fields: Fields) -> None:
    """Refuse a shortcut that no correct writer makes."""
    if (fields.kind == "anchor") != (shortcut.base is None):
        fields.refuse("an anchor has no base, a skip has one")
    if shortcut.target.digest is None:
        fields.refuse("its target has no state")
    if shortcut.base is not None and (shortcut.base.seq >= shortcut.target.seq or shortcut.base.digest is None):
        fields.refuse("its base is no earlier version")
    _check_own_files(shortcut, fields)


def check_commit(commit: Commit, fields: Fields) -> None:
    """Refuse a commit that no correct writer makes."""
    if commit.kind not in KINDS:
        fields.refuse(f"it is of the unknown kind {commit.kind!r}")
    if (commit.parent is None) != (commit.seq == 0) or [m for m, _ in commit.links] != link_targets(commit.seq):
        fields.refuse("its parent or links do not fit its seq")
    if commit.seq == 0 and commit.kind != "fence":
        fields.refuse("commit 0 is a fence, and nothing else")
    if commit.updates > commit.seq:
        fields.refuse(f"it counts {commit.updates} updates")
    if commit.base is not None and commit.base.seq >= commit.seq:
        fields.refuse("its base is not before it")
    if commit.digest is None:
        empty = commit.base is None and commit.state_seq is None
        if commit.kind != "fence" or not empty or commit.updates or commit.state_bytes or commit.tensors:
            fields.refuse("only the fence of an empty chain leaves no state, and then nothing of one")
    if commit.kind == "fence":
        _check_fence(commit, fields)
    elif commit.state_seq != commit.seq or not commit.updates:
        fields.refuse("it makes a version, but does not count as one")
    if commit.kind == "anchor":
        if commit.base is not None:
            fields.refuse("an anchor has no base")
    elif commit.kind in ("delta", "rewind") and (commit.base is None or commit.base.digest is None):
        fields.refuse(f"a {commit.kind} needs a base that has a state")
    if commit.attachments and commit.kind == "fence":
        fields.refuse("a fence has no attachments: those of the version that it leaves in force stay as they are")
    if commit.kind == "fence" and commit.recipe is not None:
        fields.refuse("a fence has no recipe: it makes no version")
    if commit.changed and commit.kind != "delta":
        fields.refuse(f"a {commit.kind} counts no changed weights")
    if commit.kind in ("delta", "anchor"):
        _check_own_files(commit, fields)
    else:
        if commit.files or commit.file_list is not None:
            fields.refuse(f"a {commit.kind} has no files")
        if commit.base is not None and commit.base.digest != commit.digest:
            fields.refuse(f"a {commit.kind} leaves the state of its base in force")


def _check_fence(commit: Commit, fields: Fields) -> None:
    if (commit.base is None) != (commit.state_seq is None) or (commit.base is None) != (commit.digest is None):
        fields.refuse("a fence names its base, the version in force and its digest, or none of them")
    if commit.base is not None and (commit.state_seq or 0) > commit.base.seq:
        fields.refuse("a fence cannot leave a version in force that is newer than its base")


def _check_own_files(record: Commit | Shortcut, fields: Fields) -> None:
    """Check the files that a record names itself. Those of a file list are checked when the list is read."""
    if record.file_list is None:
        check_files(record, record.files, fields)
    elif record.files:
        fields.refuse("it has a file list, and names files itself")


def check_files(record: Commit | Shortcut, files: Sequence[FileEntry], fields: Fields) -> None:
    """Refuse files that do not fit their record, which names them itself or has a list of them."""
    if record.base is None:
        _check_checkpoint_files(record, files, fields)
    else:
        _check_delta_files(record, files, fields)


def _check_checkpoint_files(record: Commit | Shortcut, files: Sequence[FileEntry], fields: Fields) -> None:
    names = [entry.name.casefold() for entry in files if entry.name is not None]
    if not files or len(names) != len(files) or len(set(names)) != len(names):
        fields.refuse("the files of a checkpoint have names, each another")
    if any(entry.first is not None or entry.count is not None for entry in files):
        fields.refuse("only the files of a delta cover a run of tensors")
    if sum(entry.raw for entry in files) != record.state_bytes:
        fields.refuse("its files do not add up to the state")
    if not record.may_have_other_files and not all(holds_weights(entry.name or "") for entry in files):
        fields.refuse("files without weights belong among the attachments")


def _check_delta_files(record: Commit | Shortcut, files: Sequence[FileEntry], fields: Fields) -> None:
    check_delta_files(record.tensors, record.state_bytes, files, fields)
    if record.base is not None and record.result != record.base.digest and not files:
        fields.refuse("its digest differs from that of its base, but no file leads there")


def check_delta_files(tensors: int, state_bytes: int, files: Sequence[FileEntry], fields: Fields) -> None:
    """Refuse files that are no delta of a state with this many tensors and bytes."""
    start = end = 0
    for entry in files:
        if entry.name is not None or entry.first is None or not entry.count:
            fields.refuse("the files of a delta have no name, and cover a run of tensors")
        if entry.first < end and (entry.first, entry.first + entry.count) != (start, end):  # else they cover parts of the same tensors
            fields.refuse("its files overlap, or are out of order")
        start, end = entry.first, entry.first + entry.count
    if end > tensors or sum(entry.raw for entry in files) > state_bytes:
        fields.refuse("its files cover more than the state")
