"""Users can rely on the exported names, the tree of errors, and the modules that an import loads."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from support import run_python

import deltawire
from deltawire import errors


def test_exported_names_are_exactly_those_listed():
    for name in deltawire.__all__:  # some names are imported only when they are used
        getattr(deltawire, name)
    public = {name for name, value in vars(deltawire).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public == set(deltawire.__all__)
    assert set(deltawire.__all__) <= set(dir(deltawire))
    assert deltawire.__all__ == sorted(deltawire.__all__)
    star: dict[str, object] = {}
    exec("from deltawire import *", star)
    assert star.keys() - {"__builtins__"} == set(deltawire.__all__)


def test_everything_exported_is_documented():
    assert deltawire.__doc__
    for name in deltawire.__all__:
        exported = getattr(deltawire, name)
        assert (exported.__doc__ or "").strip(), name
        assert not exported.__doc__.startswith(f"{name}("), f"{name} has only the docstring that dataclasses make"
        for method, value in vars(exported).items() if inspect.isclass(exported) else ():
            if not method.startswith("_") and (inspect.isfunction(value) or isinstance(value, classmethod)):
                assert value.__doc__, f"{name}.{method}"


def test_every_signature_is_annotated():
    for name in deltawire.__all__:
        exported = getattr(deltawire, name)
        if inspect.isfunction(exported):
            signature = inspect.signature(exported)
            assert signature.return_annotation is not inspect.Signature.empty
            assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


def error_classes():
    return [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]


def test_the_documented_tree_of_errors_is_the_tree():
    parents: list[str] = []
    documented = {}
    for line in errors.__doc__.splitlines():
        found = re.fullmatch(r"    ((?:│   |├── |└── |    )*)([A-Z]\w+)(?:  +\S.*)?", line)
        if found:
            depth = len(found[1]) // 4
            parents[depth:] = [found[2]]
            documented[found[2]] = parents[depth - 1] if depth else "Exception"
    assert documented == {error.__name__: error.__bases__[0].__name__ for error in error_classes()}
    assert len(documented) == len(error_classes()) > 10


def test_every_error_says_what_to_do():
    for error in error_classes():
        assert error.__doc__
        assert len(error.__bases__) == 1
        leaf = not error.__subclasses__()
        if leaf and error not in (errors.CheckpointError, errors.MirrorError):  # their messages contain the remedies, which differ
            assert error.hint.endswith((".", "?")), error
            assert str(error("It is so.")).endswith(error.hint)
        assert issubclass(error, deltawire.DeltawireError)


HEAVY = {"obstore", "cryptography", "httpx", "anyio", "typer", "click", "rich", "torch", "zstandard", "safetensors", "hypothesis", "pytest"}


def imported_by(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has after it runs this code."""
    return set(run_python(f"{code}\nimport sys\nprint(*(name.split('.')[0] for name in sys.modules))").split())


def test_importing_the_package_imports_nothing_heavy():
    assert not imported_by("import deltawire, deltawire.engines") & HEAVY


def test_working_on_numpy_states_imports_nothing_heavy():
    code = """
import deltawire, numpy as np
from deltawire.delta.inspect import inspect_delta
base, new = {"x": np.zeros(100)}, {"x": np.ones(100), "y": np.ones(3)}
delta = deltawire.encode_delta(base, new)
inspect_delta(delta)
deltawire.resolve_delta(base, delta).apply({"x": np.zeros(100)})
deltawire.apply_delta(base, delta)
assert deltawire.state_digest(base) == deltawire.state_digest(new)
"""
    assert not imported_by(code) & HEAVY


def test_the_package_is_typed():
    assert Path(deltawire.__file__).with_name("py.typed").exists()
