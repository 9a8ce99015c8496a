"""Parts that the records of trainers and of members share."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from .canonical import Fields
from .record_parts import HASH, Signature, read_signature

MOST_TASKS, MOST_ATTEMPTS = 10**5, 10**3
"""A round has at most this many tasks, and a task at most this many attempts: their numbers have 5 and 3 digits in keys."""

MAX_WHY = 500
"""Most characters of a reason that a record gives."""

SIGNABLE = (1, 2)
"""Versions of the records that a trainer writes. Since version 2 they can be signed, and boards are numbered."""

_OBJECT_KEY = re.compile(r"fleet/(tasks|accepted)/([0-9]{10})/([0-9a-f]{64})\.json")


class AttemptId(NamedTuple):
    """Names one attempt at a task. An attempt has at most one lease, and should have one result."""

    round: int
    task: int
    attempt: int


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """A reference to a file of the trainer, whose key contains the hash of its content."""

    key: str
    size: int
    blake3: str

    def plain(self) -> dict[str, Any]:
        return {"key": self.key, "size": self.size, "blake3": self.blake3}

    @classmethod
    def of(cls, fields: Fields) -> ObjectRef:
        reference = cls(fields.text("key"), fields.integer("size"), fields.matching("blake3", HASH))
        fields.done()
        form = _OBJECT_KEY.fullmatch(reference.key)
        if form is None or form[3] != reference.blake3:
            fields.refuse(f"{reference.key!r} is not the key of an object with that hash")
        return reference

    def is_of(self, folder: str, number: int) -> bool:
        """Tell whether the key is in the folder "tasks" or "accepted" of this round."""
        form = _OBJECT_KEY.fullmatch(self.key)
        return form is not None and (form[1], int(form[2])) == (folder, number)


def plain_signature(signature: Signature | None) -> dict[str, Any]:
    return {"signature": None if signature is None else signature.plain()}


def read_later_signature(fields: Fields) -> Signature | None:
    """Return the signature, which records have since their version 2. Returns None for version 1."""
    return None if fields.version == 1 else read_signature(fields)


def read_number(fields: Fields, name: str) -> float:
    """Return a finite number that is written as text."""
    text = fields.text(name)
    try:
        number = float(text)
    except ValueError:
        fields.refuse(f"{name} is not a number")
    if not math.isfinite(number) or repr(number) != text:
        fields.refuse(f"{name} is not the shortest text of a finite number")
    return number


def read_attempt(fields: Fields) -> AttemptId:
    """Return the attempt that the fields round, task and attempt name."""
    attempt = AttemptId(fields.integer("round"), fields.integer("task"), fields.integer("attempt"))
    _check_attempt(fields, attempt)
    return attempt


def read_attempts(fields: Fields, name: str, values: Any) -> tuple[AttemptId, ...]:
    if not isinstance(values, list):
        fields.refuse(f"{name} must be a list of attempts")
    attempts = []
    for value in values:
        if not isinstance(value, list) or len(value) != 3 or any(type(number) is not int or number < 0 for number in value):
            fields.refuse(f"{name} must hold [round, task, attempt]")
        attempt = AttemptId(*value)
        _check_attempt(fields, attempt)
        attempts.append(attempt)
    return tuple(attempts)


def _check_attempt(fields: Fields, attempt: AttemptId) -> None:
    if attempt.round >= 10**10 - 1 or attempt.task >= MOST_TASKS or attempt.attempt >= MOST_ATTEMPTS:
        fields.refuse(f"attempt {attempt.attempt} at task {attempt.task} of round {attempt.round} has no key")
