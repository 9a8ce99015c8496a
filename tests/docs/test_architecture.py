"""The pages describe the source correctly."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest
from markdown_blocks import PAGES, ROOT

sys.path.insert(0, str(ROOT / "tests" / "unit"))

from test_layers import LAYERS

from deltawire.engines.vllm import OLDEST_VLLM

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src" / "deltawire"


def test_the_line_of_layers_is_the_one_that_is_checked() -> None:
    (line,) = re.findall(r"^`(errors ←.*)`$", PAGE, re.MULTILINE)
    assert [set(layer.split(", ")) for layer in line.split(" ← ")] == [layer for layer in LAYERS if layer != {"__main__"}]


def test_every_file_that_it_names_exists() -> None:
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`|`(tests/\w+)`", PAGE))
    paths = {path for found in named for path in found if path}
    assert [path for path in sorted(paths) if not ((ROOT / path).exists() or (SOURCE / path).exists())] == []
    assert len(paths) > 10


PACKAGES = sorted(path.parent for path in SOURCE.rglob("__init__.py"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.relative_to(SOURCE.parent).as_posix())
def test_the_map_of_a_package_names_every_module_once(package: Path) -> None:
    """The map is the part of the docstring with lines such as `name.py  what it does`, where the suffix may be missing."""
    modules = [path.stem for path in package.glob("*.py") if path.stem not in ("__init__", "__main__")]
    modules += [path.parent.name for path in package.glob("*/__init__.py")]
    data = [path.name for path in package.iterdir() if path.is_dir() and not [*path.glob("*.py")]]
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    named = re.findall(r"^ *(\w+)(?:\.py|/)? {2,}(?=\S)", text, re.MULTILINE)
    assert sorted(name for name in named if name not in data) == sorted(modules)


def test_there_is_one_oldest_release_of_vllm() -> None:
    texts = [*PAGES, ROOT / "pyproject.toml", ROOT / "Makefile", *SOURCE.rglob("*.py")]
    pattern = re.compile(r"vllm(?:-cpu)?[=>]=(\d+\.\d+)|vLLM (?:≥ )?(\d+\.\d+) or later|vLLM ≥ (\d+\.\d+)")
    named = {next(filter(None, found)) for path in texts for found in pattern.findall(path.read_text(encoding="utf-8"))}
    assert named == {OLDEST_VLLM}


def test_every_type_of_a_version_is_where_the_page_says() -> None:
    table = re.findall(r"^\| `(\w+)` \| `(deltawire[\w.]*)` \|", (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [name for name, module in table if not hasattr(importlib.import_module(module), name)] == []
    assert len(table) > 4
