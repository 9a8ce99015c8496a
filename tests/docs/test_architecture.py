"""What docs/architecture.md says of the source is so."""

from __future__ import annotations

import re
import sys

from markdown_blocks import ROOT

sys.path.insert(0, str(ROOT / "tests" / "unit"))

from test_layers import LAYERS

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
