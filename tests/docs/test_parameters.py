"""Every public parameter is documented, in a section Parameters in NumPy's style, or by a docstring below a field."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator

import pytest

pytest.importorskip("trl", reason="some public names need TRL")

from public_parameters import documented, load, missing, public_names


def test_every_public_parameter_is_documented() -> None:
    assert [line for name in public_names() for line in missing(name)] == []


NUMBERS_OF_VERSIONS = {"at", "base", "loaded", "resume_from", "target", "version"}
"""Names that would not say whether a number counts commits or versions."""


def public_signatures() -> Iterator[tuple[str, inspect.Signature]]:
    """Yield what users call: functions, methods, and classes that are not records."""
    for name in public_names():
        value = load(name)
        functions = {name: value.__init__ if inspect.isclass(value) and not dataclasses.is_dataclass(value) else value}
        if inspect.isclass(value):
            methods = {attribute: getattr(method, "__func__", method) for attribute, method in vars(value).items()}
            functions |= {
                f"{name}.{attribute}": method for attribute, method in methods.items() if not attribute.startswith(("_", "test_"))
            }
        yield from ((full_name, inspect.signature(each)) for full_name, each in functions.items() if inspect.isfunction(each))


def test_a_commit_number_is_called_seq_and_passed_by_name() -> None:
    numbers = set()
    for name, signature in public_signatures():
        for parameter in signature.parameters.values():
            takes_number = str(parameter.annotation) in ("int", "int | None")
            assert not (takes_number and parameter.name in NUMBERS_OF_VERSIONS), f"{name}: is {parameter.name} a seq?"
            is_seq = parameter.name == "seq" or parameter.name.endswith("_seq")
            if takes_number and is_seq:
                assert parameter.kind is parameter.KEYWORD_ONLY, f"{name}: {parameter.name}"
                numbers.add(name)
    assert {"deltawire.Publisher", "deltawire.Subscriber.sync", "deltawire.pull"} <= numbers


def test_sections_are_read_as_numpy_writes_them() -> None:
    docstring = """Do something.

    Parameters
    ----------
    first, second : int
        Both are numbers: and this line is not a name.
    *others
        The rest.

    Returns
    -------
    result
        Not a parameter.
    """
    assert documented(docstring) == {"first", "second", "others"}
