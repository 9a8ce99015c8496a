"""The code blocks of our Markdown pages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block: the page and line where its text begins, its language ("" if it names none), and its text."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```([^\n`]*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [Block(page, text.count("\n", 0, match.start(2)) + 1, match[1].strip(), match[2]) for match in found]
