"""Only two modules build the keys of a store."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import deltawire

SOURCE = Path(deltawire.__file__).parent
OF_A_STORE = re.compile(r"(epoch|commit|anchor|skip|data|gc|pin|report|probe|fleet/[a-z]+)/|fleet/\(|fleet/board\.json")
NAMES_KEYS = {
    "store/keys.py",
    "store/fleet_keys.py",
    "format/records/record_parts.py",  # it has patterns of the keys that records may name
    "format/records/fleet_parts.py",
}


def strings_in(path: Path) -> Iterator[str]:
    """Yield all strings of a module except docstrings and other strings that stand alone."""
    tree = ast.parse(path.read_text())
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


def test_keys_are_built_in_one_module_only():
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        found = [text for text in strings_in(path) if OF_A_STORE.match(text)]
        if name in NAMES_KEYS:
            assert found, f"{name} no longer names keys: remove it from NAMES_KEYS"
        else:
            assert not found, f"{name} builds a key from {found}: use store/keys.py or store/fleet_keys.py"
