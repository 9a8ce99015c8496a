"""The code blocks of our Markdown pages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block: the page and line where its text begins, its language ("" if it names none), and its text.

    Tests run the Python blocks of some pages. A block that is marked ("```python compile-only") is not run: it needs vLLM, TRL or a GPU.
    """

    page: Path
    line: int
    language: str
    is_compile_only: bool
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```([^\n`]*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [_block(page, text.count("\n", 0, match.start(2)) + 1, match[1], match[2]) for match in found]


def _block(page: Path, line: int, heading: str, text: str) -> Block:
    language, _, mark = heading.strip().partition(" ")
    assert mark in ("", "compile-only"), f"{page.relative_to(ROOT)}:{line}: nobody knows the mark {mark!r}"
    return Block(page, line, language, mark == "compile-only", text)
