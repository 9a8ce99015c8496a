"""What every command shares: where text goes, progress bars, and how failures end the process.

Results go to stdout, everything else to stderr. With `--json` stdout carries one JSON object and nothing else, also on failure.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Annotated, Any, NoReturn, TextIO, TypeAlias

import typer
from rich.cells import cell_len
from rich.console import Console
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
from rich.text import Text

from ...errors import DeltawireError
from .figures import printable, wrap_words

JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
ThreadsOption: TypeAlias = Annotated[
    int | None, typer.Option("--threads", min=1, metavar="N", help="Threads to use; all cores if not given.", show_default=False)
]
ForceOption: TypeAlias = Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")]

_TITLE = 20
"""The width of titles."""

_SHORTEST = 20
"""Columns that the text of a line has at least, however narrow the terminal is."""

_NARROW = 60
"""On a terminal with fewer columns, long texts stand below their titles instead of beside them."""

_FAILURES = {
    errno.ENOENT: "no such file or directory. Check the path",
    errno.EACCES: "permission denied. Check who owns it",
    errno.EPERM: "permission denied. Check who owns it",
    errno.EROFS: "the file system is read-only. Choose another place",
    errno.ENOTDIR: "a part of the path is not a directory. Check the path",
    errno.EISDIR: "it is a directory. Name a file",
    errno.EEXIST: "it exists already. Name another one",
    errno.ENOSPC: "the disk is full. Free some space and try again; nothing was left behind",
    errno.EDQUOT: "the disk quota is used up. Free some space and try again; nothing was left behind",
    errno.EFBIG: "the file would exceed the size limit of this process or file system. Raise it (ulimit -f) or choose another place",
    errno.EMFILE: "too many open files. Raise the limit (ulimit -n)",
    errno.ENOMEM: "the system refused more memory or mappings. Free some memory, or raise the limit (ulimit -v, ulimit -d)",
}


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived; unwinds like Ctrl-C, so that temporary files are removed."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


def interrupt_on_termination() -> None:
    """Let SIGTERM and SIGHUP unwind the process instead of ending it on the spot. They wait for the native call that is running."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated(number)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores SIGHUP; so do we then
            signal.signal(number, stop)


@contextmanager
def exit_codes(as_json: bool, *, one_line: bool = False, codes: Mapping[type[Exception], int] | None = None) -> Iterator[None]:
    """Turn foreseen failures into one line on stderr and an exit code. Anything else is a bug, and keeps its traceback.

    With `one_line` the JSON object that says so stands on one line, like others before it. `codes` are exit codes of errors that end with
    another one than 1.
    """
    fail = partial(_fail, print_document=None if not as_json else print_json_line if one_line else print_json)
    try:
        yield
    except DeltawireError as error:
        fail(type(error).__name__, str(error), code=(codes or {}).get(type(error), 1))
    except BrokenPipeError:
        raise  # the reader of our output has gone; typer ends quietly
    except OSError as error:
        fail(type(error).__name__, _os_failure(error))
    except ImportError as error:
        if error.name is not None:
            raise  # a broken installation; only an extra that is not installed is reported without naming a module
        fail(type(error).__name__, f"{error}.")
    except MemoryError:
        fail("MemoryError", "not enough memory. Free some, or use fewer --threads.")
    except KeyboardInterrupt as error:
        with suppress(OSError):  # the terminal may be what is gone
            _standard_error().print(Text("interrupted", style="red"))
        raise typer.Exit(error.exit_code if isinstance(error, Terminated) else 130) from None


def print_json(document: dict[str, Any]) -> None:
    """One JSON object on stdout. Paths and names may hold anything, so text is ASCII with escapes."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def print_json_line(document: dict[str, Any], to: TextIO | None = None) -> None:
    """Print one JSON object on a line of its own, for commands that report as they go. `to` is stdout if not given."""
    stream = to or sys.stdout
    stream.write(json.dumps(document, allow_nan=False) + "\n")
    stream.flush()


def print_rows(heading: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print a result as a heading and titled lines; those without text are left out. Long texts go on below their own beginning."""
    console = result_console()
    print_wrapped(console, heading, style="bold")
    for title, text in rows:
        if text:
            _print_row(console, printable(title), printable(text))


def print_line(text: str) -> None:
    """Print a line of a result as it comes about."""
    print_wrapped(result_console(), text, indent=4)


def print_labelled(label: str, text: str, *, is_notice: bool, to: TextIO | None = None) -> None:
    """Print a line of a log: notices on stderr, others on stdout. `label`, if not empty, stands at the beginning of every line.

    `to` takes the place of stdout.

    Lines break between words in a terminal. In a file or a pipe they do not break, so that each can be searched for.
    """
    console = Console(stderr=is_notice, file=None if is_notice else to, highlight=False)
    start = printable(f"{label}  ") if label else ""
    width = max(_SHORTEST, console.width - cell_len(start)) if console.is_terminal else sys.maxsize
    for line in wrap_words(printable(text), width, indent=4):
        console.print(Text(start + line, style="yellow" if is_notice else ""), soft_wrap=True)


def print_wrapped(console: Console, text: str, *, style: str = "", indent: int = 0) -> None:
    """Print text that breaks between words only. All lines but the first are indented. Longer words are left to the terminal."""
    for line in wrap_words(printable(text), console.width, indent=indent):
        console.print(Text(line, style=style), soft_wrap=True)


def _print_row(console: Console, title: str, text: str) -> None:
    start = f"  {title:<{_TITLE}}"
    room = console.width - cell_len(start)
    longest = max(map(cell_len, text.split(" ")))
    if longest <= room and (console.width >= _NARROW or cell_len(text) <= room):
        first, *rest = wrap_words(text, room)
        console.print(Text.assemble((start, "dim"), first), soft_wrap=True)
        indent = cell_len(start)
    else:  # below its title there is more room
        console.print(Text(start.rstrip(), style="dim"), soft_wrap=True)
        indent, rest = 4, wrap_words(text, console.width - 4)
    for line in rest:
        console.print(Text(" " * indent + line), soft_wrap=True)


def result_console() -> Console:
    """Stdout. As wide as the terminal, or without bounds where it is a file or a pipe (unless COLUMNS says otherwise)."""
    return _unbounded(Console(highlight=False))


def _unbounded(console: Console) -> Console:
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 10_000
    return console


class ByteBar:
    """A bar that is fed with bytes done since the last call, from any thread."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def __call__(self, done: int) -> None:
        self._progress.advance(self._task, done)

    def close(self) -> None:
        """Remove the bar, so that a result can be printed."""
        self._progress.stop()

    def expect(self, more: int) -> None:
        """So many bytes are still to come."""
        self._progress.update(self._task, total=self._progress.tasks[0].completed + more)


@contextmanager
def progress_bar(title: str, total_bytes: int | None, *, quiet: bool) -> Iterator[ByteBar]:
    """A bar on stderr; without an end while `total_bytes` is None. Shows nothing with `quiet` or where stderr is not a terminal."""
    with _byte_progress(quiet) as progress:
        yield ByteBar(progress, progress.add_task(escape(title), total=total_bytes))


class TransferBars:
    """Two bars: what is read back, and what is uploaded. Each appears with its first byte. May be fed from several threads."""

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
        """Announce how many bytes will be read, and what they are."""
        with self._lock:
            self._titles["read"], self._totals["read"] = title, total
            if "read" in self._tasks:
                self._progress.update(self._tasks["read"], description=escape(title), total=total)

    def announce_upload(self, total: int) -> None:
        """About so many bytes will be written in all."""
        with self._lock:
            self._totals["upload"] = total

    def expect_upload(self, more: int) -> None:
        """Announce that this many more bytes will be written. They may be among those that were announced before."""
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
    """Bars on stderr, shown as `progress_bar` is. `upload` is the title of what is written."""
    with _byte_progress(quiet) as progress:
        yield TransferBars(progress, upload)


def _byte_progress(quiet: bool) -> Progress:
    console = _standard_error()
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
        BarColumn(),
        DownloadColumn(),
    ]
    if console.width >= _NARROW:
        columns += [TransferSpeedColumn(), TimeRemainingColumn()]
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)


@contextmanager
def count_bar(title: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, fed with how many things are done, and of how many. Shown as `progress_bar` is."""
    console = _standard_error()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(escape(title), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def print_notice(message: str) -> None:
    """A line on stderr about something that is being dealt with."""
    print_wrapped(_standard_error(), message, style="yellow", indent=2)


def print_trace(message: str) -> None:
    """Print a line on stderr with the time, for users who want to see everything."""
    print_wrapped(_standard_error(), f"{time.strftime('%H:%M:%S')} {message}", style="dim", indent=9)


_stderr: tuple[object, Console] | None = None


def _standard_error() -> Console:
    """Return the one console of the current stderr: it prints lines above a progress bar instead of into it."""
    global _stderr
    stream = getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # rich replaces it while a bar is shown
    if _stderr is None or _stderr[0] is not stream:
        _stderr = (stream, _unbounded(Console(stderr=True, highlight=False)))
    return _stderr[1]


def _os_failure(error: OSError) -> str:
    reason = _FAILURES.get(error.errno or 0, error.strerror or str(error))
    return f"{error.filename}: {reason}." if error.filename else f"{reason}."


def _fail(kind: str, message: str, *, print_document: Callable[[dict[str, Any]], None] | None, code: int = 1) -> NoReturn:
    with suppress(OSError):  # the terminal may be what is gone
        print_wrapped(_standard_error(), f"error: {message}", style="red", indent=2)
        if print_document is not None:
            print_document({"error": {"type": kind, "message": message}})
    raise typer.Exit(code) from None
