"""Remember how many streams a link could use, so that the next store of this process at the same location need not find it out again."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

_MOST_LINKS = 64
_FRESH_SECONDS = 3600.0
"""Networks change, so what is older is not used."""


class KnownLinks:
    """The widths of links, by name. May be used from several threads.

    Parameters
    ----------
    clock
        Returns the current time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._widths: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def note(self, name: str, width: int) -> None:
        """Note the width that a link had when its store was closed. Only the newest links are kept."""
        with self._lock:
            self._widths[name] = width, self._clock()
            self._widths.move_to_end(name)
            while len(self._widths) > _MOST_LINKS:
                self._widths.popitem(last=False)

    def width(self, name: str, otherwise: int) -> int:
        """Return the width with which a new store should begin, or `otherwise` if nothing new is known."""
        with self._lock:
            width, at = self._widths.get(name, (otherwise, self._clock()))
            return width if self._clock() - at <= _FRESH_SECONDS else otherwise


KNOWN = KnownLinks()
"""The links of this process."""
