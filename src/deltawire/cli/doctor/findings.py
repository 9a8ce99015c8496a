"""Findings of the doctor, and how errors become findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from ...errors import DeltawireError

Level = Literal["ok", "note", "warning", "wrong"]
"""A "note" needs no action now. A "warning" may become a problem. Something that is "wrong" stops somebody from working."""
_MOST_NAMES = 4
"""The most names that a finding lists."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check.

    Parameters
    ----------
    check
        The name of the check.
    level
        How bad it is.
    what
        What was found.
    remedy
        What to do about it.
    """

    check: str
    level: Level
    what: str
    remedy: str = ""


@dataclass(slots=True)
class Examination:
    """The findings so far, and what was measured."""

    findings: list[Finding] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong. There may be warnings."""
        return all(finding.level != "wrong" for finding in self.findings)

    def add(self, check: str, level: Level, what: str, remedy: str = "") -> None:
        """Add a finding."""
        self.findings.append(Finding(check, level, what, remedy))

    @contextmanager
    def checking(self, check: str, *, level: Level = "wrong") -> Iterator[None]:
        """Turn an error of the block into a finding, with the error's hint as its remedy."""
        try:
            yield
        except DeltawireError as error:
            self.add(check, level, error.message, error.hint)


def count_of(number: int, what: str) -> str:
    """Return a number and a word, in the plural if need be."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def names_of(names: Sequence[str]) -> str:
    """Return the first of these names, and how many there are besides."""
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES:,} more"
