"""Decides by names which modules are quantised, and which of them share a scale."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Layers of one parent that engines join into a single layer. They must have the same precision, and the same scale if it is one number."""

_FUSED_WITH = {name: names for names in FUSED for name in names}


def fused_group(module: str) -> str:
    """Return the same text for all modules that an engine joins into one layer with this module; its own name if there are none."""
    parent, _, last = module.rpartition(".")
    names = _FUSED_WITH.get(last)
    return module if names is None else f"{parent}.{'+'.join(names)}"


class ModulePatterns:
    """Patterns of names of modules: names, or "re:" and a regular expression that matches from the start.

    Parameters
    ----------
    patterns
        The patterns.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._names = frozenset(pattern for pattern in patterns if not pattern.startswith("re:"))
        self._expressions = [re.compile(pattern.removeprefix("re:")) for pattern in patterns if pattern.startswith("re:")]

    def first(self, module: str) -> str | None:
        """Return the first pattern that matches the name of a module. None if no pattern does."""
        if module in self._names:
            return module
        return next((f"re:{expression.pattern}" for expression in self._expressions if expression.match(module)), None)

    def match(self, module: str) -> bool:
        """Tell whether one of the patterns matches the name of a module."""
        return module in self._names or any(expression.match(module) for expression in self._expressions)


def split_groups(quantised: Iterable[str], kept: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of a quantised and a kept module that engines join into one layer, which is impossible."""
    of_group = {fused_group(module): module for module in quantised}
    return [(of_group[group], module) for module in kept if (group := fused_group(module)) in of_group]
