"""Each row of the tables in docs/failures.md names tests, and each of these tests is in a row."""

from __future__ import annotations

import re
from pathlib import Path

import deltawire.errors

_TESTS = Path(__file__).resolve().parent
_TABLE = (_TESTS.parent.parent / "docs" / "failures.md").read_text()
_HEADER = {"what fails", "---"}


def rows() -> list[list[str]]:
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in _TABLE.splitlines() if line.startswith("|")]
    return [row for row in found if row[0] not in _HEADER]


def names_in(files: list[Path]) -> set[str]:
    return {name for path in files for name in re.findall(r"^ *def (test_\w+)", path.read_text(), re.MULTILINE)}


def test_every_row_names_a_test_and_every_test_has_a_row() -> None:
    named = set()
    for row in rows():
        assert len(row) == 4, row
        names = re.findall(r"`(test_\w+)`", row[3])
        assert len(names) == 1, row
        named.add(names[0])
    assert named <= names_in(list(_TESTS.parent.rglob("test_*.py")))
    assert names_in([path for path in _TESTS.glob("test_*.py") if path != Path(__file__).resolve()]) <= named
    assert len(rows()) > 60


def test_every_error_that_a_row_names_exists() -> None:
    for row in rows():
        for name in re.findall(r"`([A-Z]\w+)`", row[2]):
            assert hasattr(deltawire.errors, name), row
