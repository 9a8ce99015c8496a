"""Turn errors of the operating system into errors of the mirror."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from ...errors import MirrorError

_HEALS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO})
"""Conditions that may end while a subscriber tries again."""


@contextlib.contextmanager
def as_mirror_errors(path: Path) -> Iterator[None]:
    """Raise `MirrorError` for any `OSError`. It is retryable if a later attempt may succeed."""
    try:
        yield
    except OSError as error:
        message = f"{error.filename or path}: {error.strerror or error}."
        raise (retryable_error(message) if error.errno in _HEALS else MirrorError(message)) from error


def retryable_error(message: str) -> MirrorError:
    """Return a `MirrorError` that is retryable."""
    error = MirrorError(message)
    error.retryable = True
    return error
