"""Events: what happened, as plain values for logs and metrics. A failing listener never disturbs the data path.

event.py      `Event`, `emit`, and functions that make one listener from another
log_lines.py  events as lines of the logger "deltawire"
printable.py  text that is safe to print
stopwatch.py  the seconds of phases
registry.py   `REGISTRY`: every kind of event, and the check of an event against it
kinds/        the kinds: one file for each part of the library, and the fields that several kinds share
"""

from .event import Event, Listeners, OnEvent, emit, tell_all, with_fields
from .kinds.kind import Value
from .log_lines import log_events
from .printable import printable
from .stopwatch import Stopwatch

__all__ = ["Event", "Listeners", "OnEvent", "Stopwatch", "Value", "emit", "log_events", "printable", "tell_all", "with_fields"]
