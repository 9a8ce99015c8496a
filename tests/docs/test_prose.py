"""Our pages are plain English, as far as patterns can check it.

`python tests/docs/prose.py PAGE` puts each sentence on a separate line.
"""

from __future__ import annotations

import re

import pytest
from markdown_blocks import PAGES, ROOT
from prose import STUMBLING_BLOCKS, one_sentence_per_line, prose, remarks, sentences


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_sentence_has_a_line(page):
    crowded = [f"{number}: {line}" for number, line in prose(page.read_text(encoding="utf-8")) if len(sentences(line)) > 1]
    assert crowded == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_sentence_makes_readers_stumble(page):
    lines = list(enumerate(page.read_text(encoding="utf-8").splitlines(), 1))
    found = [
        f"{number}: {advice}: {line}"
        for number, line in lines
        if not line.startswith("#")
        for pattern, advice in STUMBLING_BLOCKS.items()
        if re.search(pattern, line)
    ]
    assert found == []


def test_no_sentence_in_the_code_makes_readers_stumble():
    """Docstrings and comments of Python."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {advice}: {text}"
        for folder in ("src", "tests", "benchmarks", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, text in remarks(path.read_text(encoding="utf-8"))
        for pattern, advice in STUMBLING_BLOCKS.items()
        if re.search(pattern, text)
    ]
    assert found == []


def test_no_comment_begins_like_a_question():
    """Comments and docstrings begin with a verb or a noun: "The bytes of …", not "What … takes"."""
    opening = re.compile(r'(?:^|\s)(?:"""|#|//) ?(?:What|Who|Whoever|Whom|So many|So much|That it|Of)\b')
    sources = [ROOT / "Makefile", ROOT / ".ci" / "run"]
    for folder in ("src", "native", "tests", "benchmarks", "examples"):
        sources += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".pyi", ".hpp", ".cpp")]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources
        if path.exists()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if opening.search(line)
    ]
    assert found == []


def test_the_glossary_has_the_words_of_the_code_in_order():
    words = re.findall(r"^\| ([^|]+) \| ", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)[1:]
    assert words == sorted(words)
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    unused = [word for word in words if not re.search(re.sub("[ -]", "[ _-]?", word), code, re.IGNORECASE)]
    assert unused == []


def test_sentences_are_told_apart():
    text = "- One `a. B` sentence. And e.g. another (see §1.2). **Bold.** Done?\n| a. B. | C. D. |\n"
    assert one_sentence_per_line(text) == (
        "- One `a. B` sentence.\n  And e.g. another (see §1.2).\n  **Bold.**\n  Done?\n| a. B. | C. D. |\n"
    )
