"""What the operating system refuses, as errors of the mirror."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from ...errors import MirrorError

_HEALS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO})
"""Conditions that go by, or that somebody can end while a subscriber goes on trying."""


@contextlib.contextmanager
def as_mirror_errors(path: Path) -> Iterator[None]:
    """Raise `MirrorError` for any `OSError`; a retryable one where it may succeed later."""
    try:
        yield
    except OSError as error:
        message = f"{error.filename or path}: {error.strerror or error}."
        raise (retryable_error(message) if error.errno in _HEALS else MirrorError(message)) from error


def retryable_error(message: str) -> MirrorError:
    """A `MirrorError` that may go by."""
    error = MirrorError(message)
    error.retryable = True
    return error
