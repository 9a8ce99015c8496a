"""An output that exists completely or not at all. It is built under a temporary name in the same directory and renamed on commit.

A process that dies leaves at most `NAME.tmp-…` behind, never an incomplete `NAME`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path

from ...errors import CheckpointError
from .checkpoint import INDEX_FILE, SINGLE_FILE


class StagedOutput:
    """The future file or directory `out`. Build it at `path`, then call `commit`. `discard` removes an output that was not committed.

    With `replace`, a file is replaced atomically. A directory is first moved aside, so for an instant there is none. A directory is
    replaced only if it looks like a checkpoint and holds nothing but weights and files that the new one also has, because it is then
    deleted.
    """

    def __init__(self, out: Path, *, directory: bool, replace: bool) -> None:
        self.out = Path(os.path.abspath(out))
        self.path = self._sibling("tmp")
        self._directory = directory
        self._replace = replace
        refuse_output(self.out, directory=directory, replace=replace)
        if directory:
            self.path.mkdir()

    def commit(self) -> None:
        """Rename the finished output. Its files must already be on disk; this makes the names durable too."""
        refuse_output(self.out, directory=self._directory, replace=self._replace)
        if self._directory and self.out.exists():
            self.refuse_losses(files_below(self.path))
        if self._directory:
            for folder, _, _ in os.walk(self.path):
                _sync_directory(Path(folder))
        if self._directory and self.out.exists():
            aside = self._sibling("old")
            os.rename(self.out, aside)
            try:
                os.rename(self.path, self.out)
            except BaseException:
                os.rename(aside, self.out)
                raise
            shutil.rmtree(aside)
        else:
            os.replace(self.path, self.out)
        _sync_directory(self.out.parent)

    def discard(self) -> None:
        """Remove the temporary output, if it still exists."""
        if self.path.is_dir():
            shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)

    def _sibling(self, kind: str) -> Path:
        return self.out.with_name(f"{self.out.name}.{kind}-{secrets.token_hex(4)}")

    def refuse_losses(self, names: Collection[str]) -> None:
        """Raise `CheckpointError` if replacing the directory by one with these files would delete other files; see the function
        `refuse_losses`.
        """
        if self._directory:
            refuse_losses(self.out, names)


def refuse_losses(out: Path, names: Collection[str]) -> None:
    """Raise `CheckpointError` if replacing a directory by one with these files would delete files that belong to neither.

    Old weights are meant to be deleted. Any other file that the new directory lacks may belong to the user.
    """
    out = Path(os.path.abspath(out))
    if not out.is_dir():
        return
    lost = sorted(files_below(out) - {*names, SINGLE_FILE, INDEX_FILE, *_indexed(out)})
    if lost:
        others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise CheckpointError(f"{out} holds {lost[0]}{others}, which would be lost. Move it away, or name another output.")


def refuse_output(out: Path, *, directory: bool, replace: bool) -> None:
    """Raise `CheckpointError` if an output cannot be written there, and `OSError` if its parent directory is missing. Writes nothing."""
    out = Path(os.path.abspath(out))
    os.stat(out.parent)  # so that an error names the missing directory, not the temporary file in it
    if not os.path.lexists(out):
        return
    if not replace:
        raise CheckpointError(
            f"{out} exists already. Name another output. To replace it, pass --force on the command line, or replace=True in Python."
        )
    if out.is_symlink():
        raise CheckpointError(f"{out} is a link. Name the path that it leads to.")
    if out.is_dir() != directory:
        raise CheckpointError(f"{out} is a {'directory' if out.is_dir() else 'file'}, unlike the base. Name another output.")
    if not directory:
        return
    entries = list(out.iterdir())
    if entries and not any(entry.name in (SINGLE_FILE, INDEX_FILE) for entry in entries):
        raise CheckpointError(f"{out} is not a checkpoint, so it is not replaced. Name another output, or remove it yourself.")


def files_below(directory: Path) -> set[str]:
    """Return the relative paths of all files, links and empty directories below a directory."""
    found: set[str] = set()
    for folder, subfolders, files in os.walk(directory):
        links = [name for name in subfolders if os.path.islink(os.path.join(folder, name))]
        found.update(os.path.relpath(os.path.join(folder, name), directory) for name in (*files, *links))
        if not subfolders and not files and folder != str(directory):
            found.add(os.path.relpath(folder, directory))
    return found


def _indexed(directory: Path) -> set[str]:
    """Return the files that the index of a directory lists as weights, or nothing if it cannot be read."""
    try:
        weight_map = json.loads((directory / INDEX_FILE).read_bytes())["weight_map"]
        return {name for name in weight_map.values() if isinstance(name, str)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return set()


def refuse_overlap(base: Path, out: Path) -> None:
    """Raise `CheckpointError` if writing `out` could change or delete `base`, or put the result inside it."""
    source = base.resolve()
    target = Path(os.path.abspath(out)).parent.resolve() / Path(os.path.abspath(out)).name
    same = target == source or (target.exists() and target.samefile(source))
    if same or source in target.parents:
        raise CheckpointError(f"the output {out} is {'the same as' if same else 'inside'} {base}. Name an output elsewhere.")
    if target in source.parents:
        raise CheckpointError(f"{base} is inside the output {out}. Name an output elsewhere.")


def sync_file(path: Path) -> None:
    """Flush a file to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    if os.name == "posix":  # elsewhere directories cannot be opened
        sync_file(path)
