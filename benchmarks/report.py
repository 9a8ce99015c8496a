"""Prints tables of results, and writes them to JSON files and into the documentation."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("benchmarks.md", "quantise.md", "scale.md")
"""The pages of docs/ that have tables of results."""
_END_OF_SENTENCE = re.compile(r"(?<=[a-z0-9`)%])\. (?=[A-Z`])")


@dataclass
class Table:
    """One table of results. `name` names its file and its markers in the documentation. `checks` are the goals and their results."""

    name: str
    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checks: list[tuple[str, bool]] = field(default_factory=list)

    def check(self, goal: str, met: bool) -> None:
        self.checks.append((goal, bool(met)))

    def markdown(self) -> str:
        lines = [f"**{self.title}**", "", "| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        lines += ["", *(_END_OF_SENTENCE.sub(".\n", note) for note in self.notes)] if self.notes else []
        lines += ["", *(f"- {'met' if met else '**not met**'}: {goal}" for goal, met in self.checks)] if self.checks else []
        return "\n".join(lines)


def machine() -> str:
    """Return the names of the processor, the codec and the Python version."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists() and (found := re.search(r"model name\s*:\s*(.+)", info.read_text())):
        cpu = found[1]
    from deltawire.codec import default_codec

    return f"{cpu}, {default_codec().name} codec, Python {platform.python_version()}"


def commit() -> str:
    """Return the commit of this working tree, or "unknown" without git. Changes that are not committed are marked with a plus."""
    try:
        told = [
            subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return told[0] + ("+" if told[1] else "")


def show(table: Table) -> None:
    """Print a table."""
    print("\n" + table.markdown() + "\n", flush=True)


def keep(table: Table) -> None:
    """Write a table to benchmarks/results/ and between its markers on the pages that have them."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{table.name}.json").write_text(json.dumps({"machine": machine()} | asdict(table), indent=1, ensure_ascii=False) + "\n")
    begin, end = f"<!-- {table.name} -->", f"<!-- end of {table.name} -->"
    for page in (ROOT / "docs" / name for name in PAGES):
        text = page.read_text()
        if begin in text and end in text:
            head, rest = text.split(begin, 1)
            page.write_text(head + begin + block(table, machine()) + end + rest.split(end, 1)[1])


def block(table: Table, where: str) -> str:
    """Return what a page has between the markers of a table that was measured on the machine `where`."""
    return f"\n{table.markdown()}\n\n*{where}*\n"


def kept(name: str) -> str:
    """Return what a page has between the markers of a table, from its file in benchmarks/results/."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    where = found.pop("machine")
    return block(Table(**found), where)
