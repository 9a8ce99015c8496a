"""Names of tensors when several sets of weights share one version.

`draft:model.norm.weight` is tensor `model.norm.weight` of bundle `draft`. A name without a prefix belongs to the main bundle, whose name is
the empty string. So a chain with one model has the names of its checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

SEPARATOR = ":"
MAIN = ""

_Tensor = TypeVar("_Tensor")


def join_name(bundle: str, tensor: str) -> str:
    """Return the tensor's name in the chain. Raises `ValueError` if it could not be split again."""
    if SEPARATOR in bundle:
        raise ValueError(f"the name of a bundle must not contain {SEPARATOR!r}: {bundle!r}")
    if bundle == MAIN:
        if SEPARATOR in tensor:
            raise ValueError(f"tensor {tensor!r} would be taken for one of bundle {tensor.split(SEPARATOR, 1)[0]!r}")
        return tensor
    return f"{bundle}{SEPARATOR}{tensor}"


def split_name(name: str) -> tuple[str, str]:
    """Return bundle and tensor of a name in the chain."""
    bundle, separator, tensor = name.partition(SEPARATOR)
    return (bundle, tensor) if separator else (MAIN, name)


class BundleView(Mapping[str, _Tensor]):
    """The tensors of one bundle under their own names. It reads from the given state: make a new view for a new state."""

    def __init__(self, state: Mapping[str, _Tensor], bundle: str = MAIN) -> None:
        self._state = state
        self._names = {tensor: name for name in state for prefix, tensor in [split_name(name)] if prefix == bundle}

    def __getitem__(self, name: str) -> _Tensor:
        return self._state[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def bundle_names(state: Mapping[str, object]) -> list[str]:
    """Return the bundles of a state, the main one first."""
    return sorted({split_name(name)[0] for name in state})
