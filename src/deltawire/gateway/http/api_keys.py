"""The API keys of callers. A file has their hashes only, and every comparison takes the same time."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

from ...errors import KeyRefused
from ...format.records.record_parts import READER
from .bodies import Headers

_MOST_KEYS = 10_000
_NO_KEY = hashlib.sha256(b"").digest()
"""A line with the hash of nothing would let in everybody who sends no key."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller of the gateway.

    Parameters
    ----------
    name
        Its name in the file of keys. None if the gateway has no keys.
    only_feedback
        Whether it may send only feedback.
    feedback_on_all
        Whether it may send feedback on the interactions of other callers as well.
    """

    name: str | None = None
    only_feedback: bool = False
    feedback_on_all: bool = True


class ApiKeys:
    """Knows the callers of a gateway by their keys.

    Parameters
    ----------
    callers
        The callers by the SHA-256 of their keys. Without any, everybody may call.
    """

    def __init__(self, callers: dict[bytes, Caller] | None = None) -> None:
        self._callers = callers or {}

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """Read a file of keys. Raises `ValueError` if it cannot be used.

        Each line has a name, the SHA-256 of the key in hexadecimal digits, and possibly "feedback" (this caller sends only feedback) and
        "all" (it may send feedback on interactions of other callers). Empty lines and lines that begin with # are ignored.
        """
        callers: dict[bytes, Caller] = {}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            rights = set(words[2:])
            try:
                digest = bytes.fromhex(words[1])
            except (IndexError, ValueError):
                digest = b""
            if not READER.fullmatch(words[0]) or len(digest) != 32 or not rights <= {"feedback", "all"} or digest in (*callers, _NO_KEY):
                raise ValueError(
                    f"line {number} of {path} is not: NAME SHA256 [feedback] [all], with a key that is not empty and that no other line has"
                )
            callers[digest] = Caller(words[0], "feedback" in rights, "all" in rights)
        if not 1 <= len(callers) <= _MOST_KEYS:
            raise ValueError(f"{path} has {len(callers):,} keys instead of 1 to {_MOST_KEYS:,}")
        return cls(callers)

    def caller(self, headers: Headers) -> Caller:
        """Return the caller of a request. Raises `KeyRefused` if it has no known key. All keys are compared, whatever is found."""
        if not self._callers:
            return Caller()
        given = hashlib.sha256(headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1", "replace")).digest()
        found = None
        for digest, caller in self._callers.items():
            if hmac.compare_digest(digest, given):
                found = caller
        if found is None:
            raise KeyRefused("the request has no API key that this gateway knows.")
        return found
