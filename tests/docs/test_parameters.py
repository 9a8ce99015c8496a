"""Every public parameter is documented, in a section Parameters in NumPy's style, or by a docstring below a field."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("trl", reason="some public names need TRL")

from public_parameters import documented, missing, public_names


def test_every_public_parameter_is_documented() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL warns when it is imported
        assert [line for name in public_names() for line in missing(name)] == []


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
