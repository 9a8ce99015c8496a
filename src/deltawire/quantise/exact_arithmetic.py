"""NumPy arithmetic that gives the same bits whatever the program has set, as native code does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import numpy as np

_P = ParamSpec("_P")
_Result = TypeVar("_Result")


def exactly(function: Callable[_P, _Result]) -> Callable[_P, _Result]:
    """Let a function round to nearest and keep subnormal numbers, even after `torch.set_flush_denormal(True)`. Ignore NumPy's warnings.

    Without native code, it computes as the program has set.
    """

    @functools.wraps(function)
    def exact(*args: _P.args, **kwargs: _P.kwargs) -> _Result:
        with np.errstate(all="ignore"), _arithmetic()():
            return function(*args, **kwargs)

    return exact


@functools.cache
def _arithmetic() -> Callable[[], AbstractContextManager[None]]:
    try:
        from .. import _native
    except ImportError:  # the reference quantises
        return nullcontext
    return getattr(_native, "ExactArithmetic", nullcontext)  # an extension that was built before does not have it
