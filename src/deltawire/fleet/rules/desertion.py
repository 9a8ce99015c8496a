"""Decides whether all members have left because of errors, so that no member will do the work that the trainer waits for."""

from __future__ import annotations

from collections import OrderedDict

from ...errors import FleetDeserted
from ...events import printable
from ...format.records.member_records import Heartbeat

_MOST_REMEMBERED = 1000
"""Largest number of departures that are remembered."""
_MOST_NAMED = 3
"""Largest number of different reasons that an error names."""
_SECONDS_BEFORE = 10.0
"""Members that left at most this many seconds before this trainer first looked still count: they may have waited for it to publish."""


class Desertion:
    """Counts how long no member has been alive after members left because of errors. Waiting for a first member is not counted.

    Members that could not even begin count too, because they are the usual case of a run that can never continue. So any process that may
    write a heartbeat can end a trainer that waits while no member is alive. Nothing is lost by that; `patience=math.inf` rules it out.

    Parameters
    ----------
    patience
        After this many seconds without a living member, `waited` raises `FleetDeserted`. The seconds are those of the trainer's own
        pauses. An accepted result starts the count again.
    started
        When the trainer first looked, by the fleet clock.
    """

    def __init__(self, patience: float, started: float) -> None:
        self._patience = patience
        self._started = started
        self._known: OrderedDict[str, None] = OrderedDict()
        self._reasons: OrderedDict[str, str] = OrderedDict()
        self._waited = 0.0

    def left(self, member: str, beat: Heartbeat, since: float) -> str | None:
        """Note a heartbeat, which may say why the member has left. `since` is when it was written, by the fleet clock.

        Returns the reason if it is news. The text is safe to print, because any process may have written it.
        """
        if beat.state != "left" or beat.reason is None or beat.session in self._known:
            return None
        reason = printable(beat.reason)
        self._known[beat.session] = None
        while len(self._known) > _MOST_REMEMBERED:
            self._known.popitem(last=False)
        if since >= self._started - _SECONDS_BEFORE:
            self._reasons[member] = reason
            while len(self._reasons) > _MOST_REMEMBERED:
                self._reasons.popitem(last=False)
        return reason

    def accepted(self) -> None:
        """Note that a result was accepted: the fleet works."""
        self._reasons.clear()
        self._waited = 0.0

    def waited(self, pause: float, *, is_any_alive: bool) -> None:
        """Note a pause of the trainer. Raise `FleetDeserted` if members left because of errors and none has been alive for too long."""
        if is_any_alive or not self._reasons:
            return
        self._waited += pause
        if self._waited < self._patience:
            return
        self._waited = 0.0  # a caller that tries again waits as long again
        by_reason: dict[str, str] = {}
        for member, reason in self._reasons.items():
            by_reason.setdefault(reason, member)
        named = "; ".join(f"{member}: {reason}" for reason, member in list(by_reason.items())[-_MOST_NAMED:])
        raise FleetDeserted(f"{len(self._reasons)} members have left because of errors, and no other member is alive. {named}")
