"""Only three modules build the keys of a store."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import deltawire

SOURCE = Path(deltawire.__file__).parent
OF_A_STORE = re.compile(
    r"(epoch|commit|anchor|skip|data|gc|pin|report|relay|canary|channel|probe|fleet/[a-z]+|live/[a-z-]+)/"
    r"|fleet/\(|fleet/board\.json|live/clock\.json"
)
NUMBER_OF_A_KEY = re.compile(r"0(10|20|\{.*\})d?")
NAMES_KEYS = {
    "store/keys.py",
    "store/fleet_keys.py",
    "store/live_keys.py",
    "format/records/record_parts.py",  # it has patterns of the keys that records may name
    "format/records/fleet_parts.py",
}
NUMBERS_OTHER_NAMES = {
    "gateway/recording/journal.py",  # files on the gateway's own disk
    "rl/checkpoints.py",  # files in a trainer's directory
}


@functools.cache
def texts_in(path: Path) -> tuple[list[str], list[str]]:
    """Return all strings of a module except docstrings and other strings that stand alone, and the formats of its f-strings, such as `020`.

    That is the format of `{number:020}`. A width that is computed reads `{}`.
    """
    strings, formats = [], []
    nodes = list(ast.walk(ast.parse(path.read_text())))
    alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            strings.append(node.value)
        elif isinstance(node, ast.FormattedValue) and isinstance(node.format_spec, ast.JoinedStr):
            formats.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.format_spec.values))
    return strings, formats


def test_keys_are_built_in_one_module_only():
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        found = [text for text in texts_in(path)[0] if OF_A_STORE.match(text)]
        if name in NAMES_KEYS:
            assert found, f"{name} no longer names keys: remove it from NAMES_KEYS"
        else:
            assert not found, f"{name} builds a key from {found}: use store/keys.py, store/fleet_keys.py or store/live_keys.py"


def test_keys_are_numbered_in_the_store_only():
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        found = [text for text in texts_in(path)[1] if NUMBER_OF_A_KEY.fullmatch(text)]
        if name in NUMBERS_OTHER_NAMES:
            assert found, f"{name} no longer numbers names: remove it from NUMBERS_OTHER_NAMES"
        elif not name.startswith("store/"):
            assert not found, f"{name} writes the number of a key as {found}: use store/keys.py, store/fleet_keys.py or store/live_keys.py"
