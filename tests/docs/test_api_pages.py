"""The API reference has every name that our pages teach, and its overview has every page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from markdown_blocks import PAGES, ROOT, Block, blocks
from public_parameters import api_reference, public_names

IN_FULL = ("deltawire.errors.", "deltawire.warnings.")
"""Modules of which the page "Errors and warnings" has every name."""
BLOCKS = [block for page in PAGES for block in blocks(page) if block.language == "python" and "deltawire" in block.text]


def taught(program: str) -> Iterator[str]:
    """Yield the full name of all of deltawire that a program imports, or reaches through `import deltawire`."""
    tree = ast.parse(program)
    outer = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and re.match(r"deltawire\b", node.module or ""):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and id(node) not in outer and re.match(r"deltawire\.", text := ast.unparse(node)):
            yield text


def is_public(name: str, public: set[str]) -> bool:
    """Return whether a page of the reference has a name, or the class that it is an attribute of."""
    return name in public or name.rpartition(".")[0] in public or name.startswith(IN_FULL)


def test_names_are_found_however_a_program_reaches_them() -> None:
    program = (
        "import deltawire\nfrom deltawire.live import gate as g, send\ndeltawire.Publisher.open(deltawire.pull('a'))\nother.deltawire.x\n"
    )
    assert set(taught(program)) == {"deltawire.live.gate", "deltawire.live.send", "deltawire.Publisher.open", "deltawire.pull"}
    assert is_public("deltawire.Publisher.open", {"deltawire.Publisher"})
    assert not is_public("deltawire.live.send", {"deltawire.Publisher"})


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_name_that_a_page_teaches_is_in_the_reference(block: Block) -> None:
    public = set(public_names())
    assert [name for name in taught(block.text) if not is_public(name, public)] == []


def test_the_overview_and_the_menu_have_every_page_of_the_reference() -> None:
    expected = sorted([*(f"{name}.md" for name in api_reference.PAGES), "errors.md"])
    overview = (ROOT / "docs" / "api" / "index.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[[^]]+\]\(([a-z_]+\.md)\)", overview, re.MULTILINE)) == expected
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert sorted(re.findall(r": api/([a-z_]+\.md)$", menu, re.MULTILINE)) == expected
