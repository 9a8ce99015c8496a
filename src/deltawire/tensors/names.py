"""Names of tensors: which of them can stand in a safetensors file."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from ..errors import BadTensorName


def check_name(name: object) -> str:
    """Return the name. Raise `BadTensorName` if it cannot stand in a safetensors file."""
    if not isinstance(name, str):
        raise BadTensorName(f"{name!r} is not a string.")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise BadTensorName(f"{name!r} is not valid Unicode.") from None
    if name in ("", "__metadata__"):
        raise BadTensorName(f"{name!r} cannot be the name of a tensor.")
    return name


def check_names(names: Collection[object]) -> None:
    """Raise `BadTensorName` unless `check_name` accepts every name. All names are checked at once, which is faster."""
    try:
        "".join(cast("Collection[str]", names)).encode()
        all_valid = "" not in names and "__metadata__" not in names
    except (TypeError, UnicodeEncodeError):
        all_valid = False
    if not all_valid:
        for name in names:
            check_name(name)
