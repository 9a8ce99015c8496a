"""Checks what clients give to the workers of a vLLM server, before anything is done with it.

A worker must not raise an error that the other workers do not raise: vLLM's executor would take the answers that it left unread for
answers to the next call (ranks.py).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ...format.records.signing import public_keys

_MOST_DIGITS = 18

Check = Callable[[Any], bool]
"""Returns whether a value may be used."""


def is_number(value: Any) -> bool:
    """Return whether a value is a whole number from 0 on. Digits in a text are one too."""
    if isinstance(value, str):
        return len(value) < _MOST_DIGITS and value.isascii() and value.isdecimal()
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**_MOST_DIGITS


def is_text(value: Any) -> bool:
    """Return whether a value is a text that may be a path."""
    return isinstance(value, str) and "\0" not in value


def is_flag(value: Any) -> bool:
    """Return whether a value is True or False."""
    return value in (True, False)


def is_mapping(value: Any) -> bool:
    """Return whether a value is an object of JSON."""
    return isinstance(value, Mapping)


def is_list_of_text(value: Any) -> bool:
    """Return whether a value is a list of texts."""
    return isinstance(value, (list, tuple)) and all(map(is_text, value))


def _is_text_or_none(value: Any) -> bool:
    return value is None or is_text(value)


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_SETTINGS: dict[str, tuple[Check, str]] = {
    **dict.fromkeys(("mirror", "spool", "url", "run"), (_is_text_or_none, "a text or null")),
    "trusted_keys": (is_list_of_text, "a list of texts"),
    "relays": (is_list_of_text, "a list of texts"),
    "confirm": (lambda value: value in ("auto", "written", "everything"), '"auto", "written" or "everything"'),
    "threads": (lambda value: value is None or (_is_size(value) and value > 0), "a whole number above 0, or null"),
    "gpu_share": (_is_share, "above 0 and at most 1"),
    "undo_bytes": (_is_size, "a whole number from 0 on"),
}


def find_wrong_setting(settings: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the settings of the backend. None if nothing is.

    Parameters
    ----------
    settings
        The fields of `InitInfo`.
    """
    for name, (check, what) in _SETTINGS.items():
        if not check(settings[name]):
            return f"{name} must be {what}, not {settings[name]!r:.80}"
    if all(settings[name] is None for name in ("mirror", "spool", "url")):
        return "name a spool, a URL or a mirror, where versions come from"
    try:
        public_keys(settings["trusted_keys"])
    except ValueError as error:
        return str(error)
    return None


def checked(method: Callable[..., Any], refuse: Callable[[Any, str], Any], **checks: Check) -> Callable[..., Any]:
    """Return a method that is only called with arguments that pass these checks.

    Parameters
    ----------
    method
        The method. Its first argument is not checked.
    refuse
        Is called instead with the first argument and with what is wrong, and makes the answer.
    checks
        The checks of the other arguments, by name.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(first, *args, **kwargs).arguments
        except TypeError as error:
            return refuse(first, f"{method.__name__}: {error}")
        for name, check in checks.items():
            if name in given and not check(given[name]):
                return refuse(first, f"{method.__name__}: {name} must not be {given[name]!r:.80}")
        return method(first, *args, **kwargs)

    return call
