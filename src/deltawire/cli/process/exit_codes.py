"""Exit codes: how errors and signals end the process of a command."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import typer

from ...errors import DeltawireError
from ..output.terminal import print_error, print_json, print_json_line

_FAILURES = {
    errno.ENOENT: "no such file or directory. Check the path",
    errno.EACCES: "permission denied. Check who owns it",
    errno.EPERM: "permission denied. Check who owns it",
    errno.EROFS: "the file system is read-only. Choose another path",
    errno.ENOTDIR: "a part of the path is not a directory. Check the path",
    errno.EISDIR: "it is a directory. Name a file",
    errno.EEXIST: "it exists already. Name another one",
    errno.ENOSPC: "the disk is full. Free some space and try again; nothing was left behind",
    errno.EDQUOT: "the disk quota is used up. Free some space and try again; nothing was left behind",
    errno.EFBIG: "the file would exceed the size limit of this process or file system. Raise it (ulimit -f) or choose another path",
    errno.EMFILE: "too many open files. Raise the limit (ulimit -n)",
    errno.ENOMEM: "the system refused more memory or mappings. Free some memory, or raise the limit (ulimit -v, ulimit -d)",
}


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived. Unwinds the stack as Ctrl-C does, so that temporary files are removed."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


def interrupt_on_termination() -> None:
    """Make SIGTERM and SIGHUP raise `Terminated` instead of ending the process at once. A running native call finishes first."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated(number)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores SIGHUP, and so do we
            signal.signal(number, stop)


@contextmanager
def exit_codes(as_json: bool, *, one_line: bool = False, codes: Mapping[type[Exception], int] | None = None) -> Iterator[None]:
    """Turn expected errors into a message on stderr and an exit code. Any other exception is a bug, and keeps its traceback.

    Parameters
    ----------
    as_json
        Also print the error as a JSON object on stdout.
    one_line
        Print that object on one line, for commands that print one JSON object per line.
    codes
        Exit codes of errors that do not end with 1.
    """
    fail = partial(_fail, print_document=None if not as_json else print_json_line if one_line else print_json)
    try:
        yield
    except DeltawireError as error:
        fail(type(error).__name__, str(error), code=(codes or {}).get(type(error), 1))
    except BrokenPipeError:
        raise  # the process that read our output has ended; typer ends this one without a message
    except OSError as error:
        fail(type(error).__name__, _os_failure(error))
    except ImportError as error:
        if error.name is not None:
            raise  # a broken installation: only our errors about extras that are not installed come without the name of a module
        fail(type(error).__name__, f"{error}.")
    except MemoryError:
        fail("MemoryError", "not enough memory. Free some, or use fewer --threads.")
    except KeyboardInterrupt as error:
        with suppress(OSError):  # the terminal may be closed
            print_error("interrupted")
        raise typer.Exit(error.exit_code if isinstance(error, Terminated) else 130) from None


def _os_failure(error: OSError) -> str:
    reason = _FAILURES.get(error.errno or 0, error.strerror or str(error))
    return f"{error.filename}: {reason}." if error.filename else f"{reason}."


def _fail(kind: str, message: str, *, print_document: Callable[[dict[str, Any]], None] | None, code: int = 1) -> NoReturn:
    with suppress(OSError):  # the terminal may be closed
        print_error(f"error: {message}")
        if print_document is not None:
            print_document({"error": {"type": kind, "message": message}})
    raise typer.Exit(code) from None
