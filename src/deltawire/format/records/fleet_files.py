"""The trainer's larger files in a fleet: the rows of a round's tasks, and the accepted results (docs/protocol.md §10).

Their keys contain the hash of their content, and records refer to them by that hash.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...errors import CorruptRecord, LimitExceeded, UnsupportedVersion
from ..safetensors_header import MalformedHeader, parse_json_object
from .canonical import Fields, dump
from .record_parts import HASH, READER

MAX_TASKS_BYTES = 256 << 20
MAX_ACCEPTED_BYTES = 32 << 20

Row: TypeAlias = Mapping[str, Any]
"""A row of a dataset: strings, numbers, lists and objects, as in JSON."""


@dataclass(frozen=True, slots=True)
class Tasks:
    """The rows of each task of a round. Unlike records, rows may hold fractions and any text."""

    rows: tuple[tuple[Row, ...], ...]

    def to_bytes(self) -> bytes:
        """Return the rows as UTF-8 JSON. Raises ValueError for rows that JSON cannot hold or a task without rows, and `LimitExceeded`."""
        if not self.rows or not all(self.rows):
            raise ValueError("a round has at least one task, and each at least one row")
        plain = {"deltawire": "tasks", "version": 1, "tasks": [[dict(row) for row in rows] for rows in self.rows]}
        try:
            data = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        except TypeError as error:
            raise ValueError(f"a row holds what JSON cannot ({error})") from None
        if len(data) > MAX_TASKS_BYTES:
            raise LimitExceeded(f"the rows of a round have {len(data):,} bytes; {MAX_TASKS_BYTES:,} are allowed.")
        return data

    @classmethod
    def parse(cls, data: bytes) -> Tasks:
        """Return the rows in these bytes. Raises `CorruptRecord` or `UnsupportedVersion`."""
        if len(data) > MAX_TASKS_BYTES:
            raise CorruptRecord(f"a file of tasks has {len(data):,} bytes; {MAX_TASKS_BYTES:,} are allowed.")
        try:
            plain = parse_json_object(data)
        except MalformedHeader as error:
            raise CorruptRecord(f"a file of tasks cannot be read: {error}") from None
        if plain.keys() != {"deltawire", "version", "tasks"} or plain["deltawire"] != "tasks":
            raise CorruptRecord("a file of tasks has other fields than it should.")
        if plain["version"] != 1:
            raise UnsupportedVersion(f"a file of tasks is of version {plain['version']!r}; this release reads 1.")
        tasks = plain["tasks"]
        if not isinstance(tasks, list) or not tasks or not all(isinstance(rows, list) and rows for rows in tasks):
            raise CorruptRecord("a file of tasks must list tasks, each of which lists rows.")
        if not all(isinstance(row, dict) and _is_finite(row) for rows in tasks for row in rows):
            raise CorruptRecord("a file of tasks must hold rows that are objects of finite numbers.")
        return cls(tuple(tuple(rows) for rows in tasks))


@dataclass(frozen=True, slots=True)
class AcceptedResult:
    """One result of a batch. Its key follows from the round and these fields."""

    task: int
    attempt: int
    blake3: str
    size: int
    member: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """The results of a round that a training step uses, ascending by task."""

    round: int
    results: tuple[AcceptedResult, ...]

    def to_bytes(self) -> bytes:
        """Return the canonical bytes, whatever the order of the results."""
        ordered = sorted(self.results, key=lambda one: one.task)
        plain = [[one.task, one.attempt, one.blake3, one.size, one.member] for one in ordered]
        data = dump({"deltawire": "accepted", "version": 1, "round": self.round, "results": plain})
        self.parse(data)
        return data

    @classmethod
    def parse(cls, data: bytes) -> Accepted:
        """Return the results in these bytes. Raises `CorruptRecord`, for example if a task occurs twice, or `UnsupportedVersion`."""
        fields = Fields.parse(data, "accepted", limit=MAX_ACCEPTED_BYTES)
        number = fields.integer("round")
        results: list[AcceptedResult] = []
        for value in fields.items("results"):
            if not isinstance(value, list) or [type(part) for part in value] != [int, int, str, int, str]:
                fields.refuse("a result is [task, attempt, blake3, size, member]")
            result = AcceptedResult(*value)
            if (
                min(result.task, result.attempt, result.size) < 0
                or not HASH.fullmatch(result.blake3)
                or not READER.fullmatch(result.member)
            ):
                fields.refuse("a result has a negative number, or a hash or a name that is not valid")
            if results and result.task <= results[-1].task:
                fields.refuse("its tasks are not in ascending order")
            results.append(result)
        fields.done()
        return cls(number, tuple(results))


def _is_finite(value: Any) -> bool:
    """Return whether all numbers are finite. Numbers in JSON may be larger than any double, such as 1e999."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(_is_finite(each) for each in value.values())
    return all(_is_finite(each) for each in value) if isinstance(value, Sequence) and not isinstance(value, str) else True
