"""Progress bars on stderr. They show nothing where stderr is not a terminal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column

from .terminal import NARROW, error_console


class ByteBar:
    """A bar that counts bytes. Call it, from any thread, with the number of bytes since the last call."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def __call__(self, done: int) -> None:
        self._progress.advance(self._task, done)

    def close(self) -> None:
        """Remove the bar, so that a result can be printed."""
        self._progress.stop()

    def expect(self, more: int) -> None:
        """Set the bar's end to this many bytes from now."""
        self._progress.update(self._task, total=self._progress.tasks[0].completed + more)


@contextmanager
def progress_bar(title: str, total_bytes: int | None, *, quiet: bool) -> Iterator[ByteBar]:
    """Show a bar that counts bytes.

    Parameters
    ----------
    title
        The text before the bar.
    total_bytes
        The number of bytes at the bar's end; None while it is unknown.
    quiet
        Show nothing.
    """
    with _byte_progress(quiet) as progress:
        yield ByteBar(progress, progress.add_task(escape(title), total=total_bytes))


class TransferBars:
    """Two bars that count bytes: one for data that are read back, one for uploads. Each appears with its first byte.

    All methods may be called from several threads.
    """

    def __init__(self, progress: Progress, upload: str) -> None:
        self._progress = progress
        self._titles = {"read": "read back", "upload": upload}
        self._tasks: dict[str, TaskID] = {}
        self._totals: dict[str, int] = {}
        self._announced = 0
        self._lock = threading.Lock()

    def close(self) -> None:
        """Remove the bars, so that a result can be printed."""
        self._progress.stop()

    def read(self, done: int) -> None:
        """Count this many more bytes as read."""
        self._advance("read", done)

    def uploaded(self, done: int) -> None:
        """Count this many more bytes as written."""
        self._advance("upload", done)

    def expect_read(self, title: str, total: int) -> None:
        """Set the title and the end of the bar for reading."""
        with self._lock:
            self._titles["read"], self._totals["read"] = title, total
            if "read" in self._tasks:
                self._progress.update(self._tasks["read"], description=escape(title), total=total)

    def announce_upload(self, total: int) -> None:
        """Set the end of the bar for uploads to an estimate."""
        with self._lock:
            self._totals["upload"] = total

    def expect_upload(self, more: int) -> None:
        """Announce that this many more bytes will be written. The estimate may include them already."""
        with self._lock:
            self._announced += more
            self._totals["upload"] = max(self._totals.get("upload", 0), self._announced)
            if "upload" in self._tasks:
                self._progress.update(self._tasks["upload"], total=self._totals["upload"])

    def _advance(self, which: str, done: int) -> None:
        with self._lock:
            if which not in self._tasks:
                self._tasks[which] = self._progress.add_task(escape(self._titles[which]), total=self._totals.get(which))
            self._progress.advance(self._tasks[which], done)


@contextmanager
def transfer_bars(upload: str, *, quiet: bool) -> Iterator[TransferBars]:
    """Show bars for reading and for uploads. `upload` is the title of the latter; `quiet` shows nothing."""
    with _byte_progress(quiet) as progress:
        yield TransferBars(progress, upload)


@contextmanager
def count_bar(title: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar that counts things. Yields a function that takes how many are done, and of how many. `quiet` shows nothing."""
    console = error_console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(escape(title), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _byte_progress(quiet: bool) -> Progress:
    console = error_console()
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
        BarColumn(),
        DownloadColumn(),
    ]
    if console.width >= NARROW:
        columns += [TransferSpeedColumn(), TimeRemainingColumn()]
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
