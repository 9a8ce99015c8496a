"""Whether a fleet has left because of errors, so that waiting for it is in vain. Pure."""

from __future__ import annotations

from collections import OrderedDict

from ...errors import FleetDeserted
from ...events import printable
from ...format.records.member_records import Heartbeat

_MOST = 1000
"""Largest number of departures that are remembered."""
_NAMED = 3
"""Largest number of different reasons that an error names."""
_BEFORE = 10.0
"""Members that left so many seconds before this trainer first looked still count: they may have waited for it to publish."""


class Desertion:
    """Counts how long nobody is alive after members left because of errors. Waiting for members that never came is not counted.

    Members that could not even begin count too, as they are the usual case of a run that can never go on. So whoever may write a heartbeat
    can end a trainer that waits while no member is alive. Nothing is lost by that; `patience=math.inf` rules it out.

    `patience` is in seconds, counted by the pauses that the trainer itself makes between two looks. An accepted result begins anew.
    """

    def __init__(self, patience: float, started: float) -> None:
        self._patience = patience
        self._started = started
        self._known: OrderedDict[str, None] = OrderedDict()
        self._reasons: OrderedDict[str, str] = OrderedDict()
        self._waited = 0.0

    def left(self, member: str, beat: Heartbeat, since: float) -> str | None:
        """Note that a member says why it has left; `since` is when it said so, by the fleet clock.

        Returns the reason if that is news, harmless to a terminal: anybody may have written it.
        """
        if beat.state != "left" or beat.reason is None or beat.session in self._known:
            return None
        reason = printable(beat.reason)
        self._known[beat.session] = None
        while len(self._known) > _MOST:
            self._known.popitem(last=False)
        if since >= self._started - _BEFORE:
            self._reasons[member] = reason
            while len(self._reasons) > _MOST:
                self._reasons.popitem(last=False)
        return reason

    def accepted(self) -> None:
        """Note that a result was accepted: the fleet works."""
        self._reasons.clear()
        self._waited = 0.0

    def waited(self, pause: float, *, is_anybody_alive: bool) -> None:
        """Note a pause. Raises `FleetDeserted` if members left because of errors and nobody has been alive for too long since."""
        if is_anybody_alive or not self._reasons:
            return
        self._waited += pause
        if self._waited < self._patience:
            return
        self._waited = 0.0  # a caller that goes on waits as long again
        by_reason: dict[str, str] = {}
        for member, reason in self._reasons.items():
            by_reason.setdefault(reason, member)
        told = "; ".join(f"{member}: {reason}" for reason, member in list(by_reason.items())[-_NAMED:])
        raise FleetDeserted(f"{len(self._reasons)} members have left because of errors, and nobody is there any more. {told}")
