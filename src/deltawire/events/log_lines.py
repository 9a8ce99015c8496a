"""Events as lines of the logger "deltawire". The library installs no handler: that is up to the program that uses it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .kinds.kind import Level
from .printable import printable
from .registry import REGISTRY

if TYPE_CHECKING:
    from .event import Event

_LOGGER = logging.getLogger("deltawire")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_LEVEL_OF = {kind.name: 0 if kind.is_warned else _LEVELS[kind.level] for kind in REGISTRY.values()}
_LONGEST = 500
_threshold: float = logging.WARNING


def log_events(level: Level | None = "warning") -> None:
    """Choose which events become lines of the logger "deltawire" in this process. At first these are warnings and errors.

    Each record has the event as its attribute `event`. The settings of the logger hold as well: it passes on nothing below its own
    level, and without any handler Python prints warnings and errors on stderr. Python's `warnings` show some warnings already, and these
    are not logged.

    Parameters
    ----------
    level
        The lowest level that is logged: "debug", "info", "warning" or "error". With None no event is logged.
    """
    global _threshold
    if level is not None and level not in _LEVELS:
        raise ValueError(f"the level must be one of {', '.join(_LEVELS)}, or None, not {level!r}")
    _threshold = float("inf") if level is None else _LEVELS[level]


def is_logged(name: str) -> bool:
    """Return whether an event of this name becomes a line."""
    level = _LEVEL_OF.get(name, 0)
    return level >= _threshold and _LOGGER.isEnabledFor(level)


def log(event: Event) -> None:
    """Log an event. Call it if `is_logged`."""
    _LOGGER.log(_LEVEL_OF[event.name], "%s", _Line(event), extra={"event": event})


class _Line:
    """The text of an event, which is made only if a handler needs it."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def __str__(self) -> str:
        fields = (f"{name}={printable(_shortened(value))}" for name, value in self._event.fields.items() if value is not None)
        return " ".join([self._event.name, *fields])


def _shortened(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
