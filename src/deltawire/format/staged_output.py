"""An output that exists completely or not at all: it is built under a temporary name beside its place, and renamed on commit.

A process that dies on the way leaves at most `NAME.tmp-…` behind, never a half-written `NAME`.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from ..errors import CheckpointError
from .checkpoint import INDEX_FILE, SINGLE_FILE


class StagedOutput:
    """The future file or directory `out`; build it at `path`, then `commit`. `discard` takes back whatever is not committed.

    With `replace`, a file is replaced atomically; a directory is first moved aside, so that for an instant there is none. Only a directory
    that looks like a checkpoint is ever replaced, and none that holds hidden directories such as `.git`: what is replaced is deleted.
    """

    def __init__(self, out: Path, *, directory: bool, replace: bool) -> None:
        self.out = Path(os.path.abspath(out))
        self.path = self._sibling("tmp")
        self._directory = directory
        self._replace = replace
        os.stat(self.out.parent)  # an error here names the directory that is missing, not the temporary in it
        self._refuse_occupied()
        if directory:
            self.path.mkdir()

    def commit(self) -> None:
        """Move the finished output into place. Its files must be on disk already; this makes the names durable too."""
        self._refuse_occupied()
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
        """Remove the temporary, if it is still there."""
        if self.path.is_dir():
            shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)

    def _sibling(self, kind: str) -> Path:
        return self.out.with_name(f"{self.out.name}.{kind}-{secrets.token_hex(4)}")

    def _refuse_occupied(self) -> None:
        out = self.out
        if not os.path.lexists(out):
            return
        if not self._replace:
            raise CheckpointError(f"{out} exists already. Name another output, or pass --force to replace it.")
        if out.is_symlink():
            raise CheckpointError(f"{out} is a link. Name the place that it leads to.")
        if out.is_dir() != self._directory:
            raise CheckpointError(f"{out} is a {'directory' if out.is_dir() else 'file'}, unlike the base. Name another output.")
        if not self._directory:
            return
        entries = list(out.iterdir())
        if entries and not any(entry.name in (SINGLE_FILE, INDEX_FILE) for entry in entries):
            raise CheckpointError(f"{out} is not a checkpoint, so it is not replaced. Name another output, or remove it yourself.")
        for entry in entries:
            if entry.name.startswith(".") and entry.is_dir():
                raise CheckpointError(f"{out} holds {entry.name}, which would be lost. Name another output, or move it away.")


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
    """Return only when the file's bytes are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    if os.name == "posix":  # elsewhere directories cannot be opened
        sync_file(path)
