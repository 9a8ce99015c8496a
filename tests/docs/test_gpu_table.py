"""The table of docs/gpu-measurements.md about a vLLM server has the values that the benchmark's script prints for the recorded run."""

from __future__ import annotations

import json
import sys

from markdown_blocks import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_engine_table import table_of


def rows_of(page: str) -> dict[str, list[str]]:
    """Return the rows of the tables in the section about a vLLM server, by the first cell."""
    section = page.split("## A vLLM server\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| ")]
    return {name: values for name, *values in cells}


def test_the_page_has_the_values_of_the_recorded_run() -> None:
    models = json.loads((ROOT / "benchmarks" / "results" / "gpu-engine.json").read_text(encoding="utf-8"))
    shown = rows_of((ROOT / "docs" / "gpu-measurements.md").read_text(encoding="utf-8"))
    not_shown = {"… recompute", "different from hashes made without vLLM, and from vLLM's own reload"}
    of_another_run = {"the same, KV cache dropped"}
    rows = {name: values for name, *values in table_of(list(models.values())).rows if name not in not_shown | of_another_run}
    assert rows.keys() <= shown.keys()
    for name, values in rows.items():
        for value, cell in zip(values, shown[name], strict=True):
            assert cell == value or cell.startswith(f"{value} ("), name
