"""The code blocks of our Markdown pages.

Every block names its language. Tests run the blocks in `python` and `sh`, parse those in `json`, and leave those in `text` alone (pictures,
output). A comment right above a block changes what happens to it:

    <!-- not run: REASON -->            nothing here can run it; `REASONS` lists the valid reasons
    <!-- run until: TEXT -->            its last command never ends, and is interrupted when it has printed TEXT
    <!-- run by: TEST FILE -->          a test in another lane runs it
    <!-- excerpt of: FILE -->           its lines are lines of a program that the tests run
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = ("python", "sh", "json", "javascript", "text")
REASONS = {
    "it installs packages": "tests do not change the environment that they run in",
    "it needs a CUDA GPU": "CI has none",
    "it runs for minutes": "CI would take too long",
}
"""The reasons for which a block may not be run, and what each means."""

_BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>[^\n`]*)\n(?P<text>.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: the page and line where its text begins, its language, its text, and what the comment above it says."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None = None
    run_until: str | None = None
    run_by: str | None = None
    excerpt_of: str | None = None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_run(self) -> bool:
        """Return whether the tests of the pages run it."""
        return self.language in ("python", "sh") and self.not_run is self.run_by is self.excerpt_of is None


def blocks(page: Path) -> list[Block]:
    """Return all fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [_block(page, text.count("\n", 0, found.start("text")) + 1, found) for found in _BLOCK.finditer(text)]


def blocks_run_by(test: str, page: str) -> list[Block]:
    """Return the blocks of a page that a test file runs. Both are paths from the root of the repository."""
    return [block for block in blocks(ROOT / page) if block.run_by == test]


def _block(page: Path, line: int, found: re.Match[str]) -> Block:
    kind, _, value = (found["mark"] or "").partition(": ")
    return Block(
        page,
        line,
        found["language"].strip(),
        found["text"],
        not_run=value if kind == "not run" else None,
        run_until=value if kind == "run until" else None,
        run_by=value if kind == "run by" else None,
        excerpt_of=value if kind == "excerpt of" else None,
    )
