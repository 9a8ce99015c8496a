"""Our pages are plain English, as far as patterns can check it.

`python tests/docs/prose.py PAGE` puts each sentence on a separate line.
"""

from __future__ import annotations

import re

import pytest
from markdown_blocks import PAGES, ROOT
from prose import STUMBLING_BLOCKS, one_sentence_per_line, prose, sentences


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_sentence_has_a_line(page):
    crowded = [f"{number}: {line}" for number, line in prose(page.read_text(encoding="utf-8")) if len(sentences(line)) > 1]
    assert crowded == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_sentence_makes_readers_stumble(page):
    lines = list(enumerate(page.read_text(encoding="utf-8").splitlines(), 1))
    found = [
        f"{number}: {advice}: {line}" for number, line in lines for pattern, advice in STUMBLING_BLOCKS.items() if re.search(pattern, line)
    ]
    assert found == []


def test_sentences_are_told_apart():
    text = "- One `a. B` sentence. And e.g. another (see §1.2). **Bold.** Done?\n| a. B. | C. D. |\n"
    assert one_sentence_per_line(text) == (
        "- One `a. B` sentence.\n  And e.g. another (see §1.2).\n  **Bold.**\n  Done?\n| a. B. | C. D. |\n"
    )
