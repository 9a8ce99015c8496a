"""Find the parameters of the public API that no docstring describes.

`python tests/docs/public_parameters.py [PREFIX]` prints them.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from markdown_blocks import ROOT

sys.path.insert(0, str(ROOT / "docs" / "_site"))

import api_reference

_SECTION = re.compile(r"^(\w+(?: \w+)*)\n-{3,}\n(.*?)(?=^\w+(?: \w+)*\n-{3,}\n|\Z)", re.MULTILINE | re.DOTALL)
_NAMES = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: *:.*)?$", re.MULTILINE)


def public_names() -> list[str]:
    """Return the full name of everything on the pages of the API reference."""
    return [name for page in api_reference.PAGES.values() for name in page.names()]


def load(name: str) -> Any:
    """Return the object of this full name."""
    module, _, attribute = name.rpartition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL warns when it is imported
        return getattr(importlib.import_module(module), attribute)


def documented(docstring: str | None) -> set[str]:
    """Return the names in the sections Parameters and Attributes of a docstring in NumPy's style."""
    found = _SECTION.finditer(inspect.cleandoc(docstring or ""))
    texts = [section[2] for section in found if section[1] in ("Parameters", "Other Parameters", "Attributes")]
    return {name.lstrip("*") for text in texts for names in _NAMES.findall(text) for name in names.split(", ")}


def texts(docstring: str | None) -> dict[str, str]:
    """Return what the section Parameters of a docstring says about each parameter, as one line."""
    found: dict[str, str] = {}
    for section in _SECTION.finditer(inspect.cleandoc(docstring or "")):
        if section[1] == "Parameters":
            begun = [*_NAMES.finditer(section[2])]
            ends = [match.start() for match in begun[1:]] + [len(section[2])]
            for match, end in zip(begun, ends, strict=True):
                text = " ".join(section[2][match.end() : end].split())
                found |= {name.lstrip("*"): text for name in match[1].split(", ")}
    return found


def missing(name: str) -> Iterator[str]:
    """Yield "NAME: PARAMETER" for each parameter of a public class, method or function that no docstring describes."""
    value = load(name)
    if inspect.isclass(value):
        yield from _missing_of_class(name, value)
    elif inspect.isroutine(value):
        yield from _missing_of_function(name, value, set())


def _missing_of_class(name: str, value: type) -> Iterator[str]:
    known = documented(value.__doc__) | documented(value.__init__.__doc__) | _described_fields(value)
    if dataclasses.is_dataclass(value):
        yield from (f"{name}: {field.name}" for field in dataclasses.fields(value) if field.init and field.name not in known)
    elif "__init__" in vars(value) and not issubclass(value, BaseException) and not getattr(value, "_is_protocol", False):
        yield from _missing_of_function(name, value.__init__, known)
    for attribute, method in vars(value).items():
        function = method.__func__ if isinstance(method, (classmethod, staticmethod)) else method
        if not attribute.startswith(("_", "test_")) and inspect.isfunction(function) and not _is_inherited(value, attribute):
            yield from _missing_of_function(f"{name}.{attribute}", function, set())


def _is_inherited(value: type, attribute: str) -> bool:
    """Return whether a base class has that method too. In that case the base documents it."""
    return any(hasattr(base, attribute) for base in value.__mro__[1:])


def _missing_of_function(name: str, function: Callable[..., Any], known: set[str]) -> Iterator[str]:
    known = known | documented(function.__doc__)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in ("self", "cls") and not parameter.name.startswith("_") and parameter.name not in known:
            yield f"{name}: {parameter.name}"


def _described_fields(value: type) -> set[str]:
    """Return the fields of a class and of its bases that have a docstring below them."""
    found: set[str] = set()
    for base in value.__mro__:
        if base.__module__.startswith("deltawire"):
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(tree, ast.ClassDef)
            for field, below in zip(tree.body, tree.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _is_text(below):
                    found.add(field.target.id)
    return found


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)


if __name__ == "__main__":
    wanted = [name for name in public_names() if name.startswith(tuple(sys.argv[1:]) or "")]
    print("\n".join(line for name in wanted for line in missing(name)))
