"""Print lines of the logger "deltawire", except for events."""

from __future__ import annotations

import logging


class _WithoutEvents(logging.Handler):
    """Prints as Python would without any handler, except for events: commands report these themselves."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.lastResort is not None and not hasattr(record, "event"):
            logging.lastResort.handle(record)


def print_no_events() -> None:
    """Keep events from being printed twice. Call it once, when the process starts."""
    logging.getLogger("deltawire").addHandler(_WithoutEvents(logging.WARNING))
