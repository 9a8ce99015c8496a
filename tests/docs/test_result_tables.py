"""Tables of results in the documentation are those in benchmarks/results, as the benchmarks write them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import report  # noqa: E402

_BLOCK = re.compile(r"<!-- end of ([\w-]+) -->")
BLOCKS = [(page.name, name) for page in sorted((ROOT / "docs").glob("*.md")) for name in _BLOCK.findall(page.read_text())]


def test_the_pages_with_tables_are_those_that_benchmarks_write_to() -> None:
    assert {page for page, _ in BLOCKS} == set(report.PAGES)


@pytest.mark.parametrize(("page", "name"), BLOCKS, ids=[name for _, name in BLOCKS])
def test_a_table_of_results_is_what_its_benchmark_wrote(page: str, name: str) -> None:
    """If it fails, run the benchmark again, or write the block again with `report.keep`. Do not edit tables by hand."""
    text = (ROOT / "docs" / page).read_text()
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    assert text.count(begin) == text.count(end) == 1
    assert (report.RESULTS / f"{name}.json").exists(), f"{name} was never measured: run it, or remove its block from docs/{page}"
    assert text.split(begin)[1].split(end)[0] == report.kept(name)
