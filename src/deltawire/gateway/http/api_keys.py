"""The API keys of callers. A file has their hashes only, and every comparison takes the same time."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import KeyRefused, UnusableKeys
from ...format.records.record_parts import READER
from .bodies import Headers

_MOST_KEYS = 10_000
_RIGHTS = ("feedback", "all")
_NO_KEY = hashlib.sha256(b"").digest()
"""A line with the hash of an empty text would admit callers that send no key."""


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
    has_answers
        Whether a key of this name may ask for answers. Otherwise no answer of this gateway belongs to the caller.
    """

    name: str | None = None
    only_feedback: bool = False
    feedback_on_all: bool = True
    has_answers: bool = True

    @property
    def can_rate_nothing(self) -> bool:
        """Whether there is nothing on which this caller may give feedback: no answer belongs to it, and it may rate no others."""
        return not self.has_answers and not self.feedback_on_all


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
        """Read a file of keys. Raises `UnusableKeys` if it cannot be used, and `OSError`.

        Each line has a name, the SHA-256 of the key in hexadecimal digits, and possibly "feedback" (with this key the caller sends only
        feedback) and "all" (it may send feedback on interactions of other callers). A caller may have several lines, each with a key of its
        own. Empty lines and lines that begin with # are ignored.
        """
        callers: dict[bytes, Caller] = {}
        lines: dict[bytes, int] = {}
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UnusableKeys(f"{path} is not a text in UTF-8: its byte {error.start:,} is wrong.") from None
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if problem := _problem(words):
                raise UnusableKeys(f"line {number} of {path}: {problem}.")
            digest = bytes.fromhex(words[1])
            if digest in callers:
                raise UnusableKeys(
                    f"line {number} of {path} has the key of line {lines[digest]}.", hint="Give every line a key of its own."
                )
            if len(callers) == _MOST_KEYS:
                raise UnusableKeys(f"{path} has more than {_MOST_KEYS:,} keys.", hint="Remove those that nobody uses.")
            callers[digest], lines[digest] = Caller(words[0], "feedback" in words[2:], "all" in words[2:]), number
        if not callers:
            raise UnusableKeys(f"{path} has no keys, so the gateway would refuse everybody.")
        owners = {caller.name for caller in callers.values() if not caller.only_feedback}
        return cls({digest: replace(caller, has_answers=caller.name in owners) for digest, caller in callers.items()})

    @property
    def can_rate_nothing(self) -> list[str]:
        """The names of the callers none of whose keys can give any answer feedback, although all are for feedback."""
        useful = {caller.name for caller in self._callers.values() if not caller.can_rate_nothing}
        return sorted({str(caller.name) for caller in self._callers.values() if caller.name not in useful})

    def caller(self, headers: Headers) -> Caller:
        """Return the caller of a request. Raises `KeyRefused` if it has no known key. All keys are compared, whatever is found."""
        if not self._callers:
            return Caller()
        given = hashlib.sha256(_key_of(headers.get("authorization", "")).encode("latin-1", "replace")).digest()
        found = None
        for digest, caller in self._callers.items():
            if hmac.compare_digest(digest, given):
                found = caller
        if found is None:
            raise KeyRefused("the request has no API key that this gateway knows.")
        return found


def _key_of(header: str) -> str:
    """Return the key in the header Authorization. The name of the scheme may have any case, as HTTP says."""
    scheme, _, key = header.partition(" ")
    return key if scheme.lower() == "bearer" else header


def _problem(words: list[str]) -> str:
    """Say which word of a line is wrong, or return an empty text. The second word is not repeated, because it may be a key."""
    if _is_hash(words[0]):
        return "word 1 must be the name of the caller, and it is a hash"
    if not READER.fullmatch(words[0]):
        return f"word 1 must be a name of 1 to 64 letters, digits, '.', '_' and '-', and it is {words[0][:40]!r}"
    if len(words) == 1:
        return "word 2, the SHA-256 of the key, is missing"
    if not _is_hash(words[1]):
        return f"word 2 must be the SHA-256 of the key, which has 64 hexadecimal digits; this word has {len(words[1])} characters"
    if bytes.fromhex(words[1]) == _NO_KEY:
        return "word 2 is the SHA-256 of an empty key, so everybody who sends no key would be this caller"
    for number, word in enumerate(words[2:], 3):
        if word not in _RIGHTS:
            return f"word {number} must be 'feedback' or 'all', and it is {word[:20]!r}"
    return ""


def _is_hash(word: str) -> bool:
    return len(word) == 64 and all(each in "0123456789abcdefABCDEF" for each in word)
