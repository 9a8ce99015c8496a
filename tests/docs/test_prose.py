"""Our pages are plain English, as far as patterns can check it.

`python tests/docs/prose.py PAGE` puts each sentence on a separate line.
"""

from __future__ import annotations

import re

import pytest
from markdown_blocks import PAGES, ROOT
from prose import STUMBLING_BLOCKS, comments, messages, one_sentence_per_line, prose, remarks, sentences

NATIVE = {".hpp", ".cpp", ".cuh", ".js"}
"""Endings of files with comments in the style of C++."""


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


def files_of(endings, *folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.*")) if path.suffix in endings]


def stumbling_blocks(path, texts):
    """Return what a reader of these texts of a file would stumble over."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {advice}: {text}"
        for number, text in texts(path.read_text(encoding="utf-8"))
        for pattern, advice in STUMBLING_BLOCKS.items()
        if re.search(pattern, text)
    ]


def test_no_docstring_or_comment_of_python_makes_readers_stumble():
    files = files_of({".py", ".pyi"}, "src", "tests", "benchmarks", "examples")
    assert [found for path in files for found in stumbling_blocks(path, remarks)] == []


def test_no_comment_of_the_native_code_and_of_pages_makes_readers_stumble():
    files = files_of(NATIVE, "src", "native", "tests", "examples")
    assert {path.suffix for path in files} == NATIVE
    assert [found for path in files for found in stumbling_blocks(path, comments)] == []


def test_no_error_help_or_event_makes_readers_stumble():
    """The strings of the package: messages of errors, texts of `--help`, and texts of events."""
    assert [found for path in files_of({".py"}, "src") for found in stumbling_blocks(path, messages)] == []


@pytest.mark.parametrize(
    "text",
    [
        "the publisher is fenced off.",
        "before it fences anyone off",
        "Go on until Ctrl-C.",
        "The bytes stay, also if nobody reads them.",
        "The engine does not have it any more.",
        "its sender waits no more.",
        "The most probability of a wrong rollback.",
        "unless the test errs.",
        "The name is no number.",
        "Stands for the module.",
        "It was written all the same.",
        "They have the same names time and again.",
    ],
)
def test_sentences_that_readers_stumbled_over_are_found(text):
    assert any(re.search(pattern, text) for pattern in STUMBLING_BLOCKS)


def test_messages_and_comments_are_found():
    program = '"""A docstring of a module."""\nraise ValueError(f"the {one} has " "no such part")\nkey = "a b"\n'
    assert list(messages(program)) == [(2, "the … has no such part")]
    page = "// One comment\n// in two lines.\nconst url = 'http://host/a b';  // and one\n/** A block\n * of lines. */\nrun(); /* end */\n"
    assert list(comments(page)) == [(1, "One comment in two lines."), (3, "and one"), (4, "A block of lines."), (6, "end")]


def test_no_comment_begins_like_a_question():
    """Comments and docstrings begin with a verb or a noun: "The bytes of …", not "What … takes"."""
    opening = re.compile(r'(?:^|\s)(?:"""|#|//|/\*\*) ?(?:What|Who|Whoever|Whom|So many|So much|That it|Of)\b')
    sources = [ROOT / "Makefile", ROOT / ".ci" / "run"]
    for folder in ("src", "native", "tests", "benchmarks", "examples"):
        sources += files_of({".py", ".pyi", *NATIVE}, folder)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources
        if path.exists()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if opening.search(line)
    ]
    assert found == []


def test_the_glossary_has_the_words_of_the_code_in_order():
    tables = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").split("| word | meaning |")[1:]
    twenty, more = (re.findall(r"^\| ([a-z][^|]*) \| ", table, re.MULTILINE) for table in tables)
    words = twenty + more
    assert len(set(twenty)) == len(twenty) == 20
    assert {"anchor", "skip", "epoch", "pin", "mirror", "slot", "segment", "round", "lease", "board"} <= set(twenty)
    assert (twenty, more) == (sorted(twenty), sorted(more))
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    unused = [word for word in words if not re.search(re.sub("[ -]", "[ _-]?", word), code, re.IGNORECASE)]
    assert unused == []


def test_sentences_are_told_apart():
    text = "- One `a. B` sentence. And e.g. another (see §1.2). **Bold.** Done?\n| a. B. | C. D. |\n"
    assert one_sentence_per_line(text) == (
        "- One `a. B` sentence.\n  And e.g. another (see §1.2).\n  **Bold.**\n  Done?\n| a. B. | C. D. |\n"
    )
