"""Find the events that the source emits, by its syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path


def emitted(source: Path) -> dict[str, set[str]]:
    """Return the name of every event that the modules below `source` emit, with its keyword fields."""
    found: dict[str, set[str]] = {}
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name, fields in _events(node):
                found.setdefault(name, set()).update(fields)
    return found


def _events(node: ast.AST) -> list[tuple[str, set[str]]]:
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called.lstrip("_") in ("emit", "Event", "notice"):
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant) and isinstance(argument.value, str)]
            return [(text, {keyword.arg for keyword in node.keywords if keyword.arg}) for text in texts[:1]]
    if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == "event" for target in node.targets):
        value = node.value  # a category of `deltawire.warnings`
        return [(value.value, {"message"})] if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value else []
    return []
