"""pytest can run all tests in one process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_no_two_test_files_have_one_name():
    """pytest refuses to import two of them in one process, because the folders of tests are no packages."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert names
    assert [name for name, count in names.items() if count > 1] == []
