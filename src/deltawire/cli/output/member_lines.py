"""Lines of text about the work of a member, for `deltawire member` and `deltawire fleet`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from . import figures
from .event_notices import notice_of

if TYPE_CHECKING:
    from ...events import Event, Value

Say = Callable[[str, bool], object]
"""Called with each line, and whether it is a notice about a problem."""


class MemberLines:
    """Makes a line of each important event of one member, and of each notice once.

    Parameters
    ----------
    say
        Called with each line.
    """

    def __init__(self, say: Say) -> None:
        self._say = say
        self._reported: str | None = None
        self._reported_failure: str | None = None
        self._has_left = False
        self._version, self._work = "no version yet", "waiting for work"
        self._results = self._tokens = 0
        self._seconds = 0.0
        self._time = 0.0

    @property
    def state(self) -> str:
        """The member's version and work now, in a few words."""
        rate = f"{self._tokens / self._seconds:,.0f} tokens/s" if self._seconds else ""
        return "  ".join(filter(None, [self._version, self._work, f"{self._results} results", rate]))

    def __call__(self, event: Event) -> None:
        """Say what an event tells.

        Parameters
        ----------
        event
            The event.
        """
        fields = event.fields
        self._time = event.time
        if self._has_left:
            return  # the engine may still report the end of its last work
        if event.name == "joined":
            self._line(f"joined as {fields['member']}")
        elif event.name == "swapped":
            self._reported = None
            step = "" if fields["step"] is None else f" (step {fields['step']})"
            self._version = f"version {fields['updates']}{step}"
            self._line(f"{self._version}  paused {1e3 * float(fields['pause_seconds'] or 0):.0f} ms")
        elif event.name == "generating":
            self._work = f"round {fields['round']} task {fields['task']}"
        elif event.name == "generated":
            self._tokens += int(fields["tokens"] or 0)
            self._seconds += (seconds := float(fields["seconds"] or 0))
            self._line(f"round {fields['round']} task {fields['task']}  {fields['tokens']} tokens  in {figures.duration(seconds)}")
        elif event.name == "rollout-uploaded":
            self._reported = self._reported_failure = None
            self._work = "waiting for work"
            self._results += 1
        elif event.name == "left":
            self._has_left = True
            self._line(f"left after {self._results} results")
        elif event.name == "run-over":
            self._line(f"the trainer ended the run at step {fields['step']}, so this member leaves")
        elif event.name == "work-failed":
            self._report_failure(fields)
        elif event.name in ("waiting", "sync-failed", "swap-failed", "engine-lost"):
            self._notice(f"will try again: {fields['reason']}")
        elif event.name == "adapter-loaded":
            self._line(f"adapter {fields['adapter']}")
        elif event.name == "adapter-failed":
            self._notice(f"the adapter {fields['adapter']} is not at its newest version; will try again: {fields['reason']}")
        elif event.name == "output-dropped":
            self._notice(str(fields["reason"]))
        elif event.name == "board-refused":
            self._notice(f"this member takes no work: {fields['reason']}")
        elif event.name == "member-retrying":
            self._notice(f"will try again: {fields['error']}")
        elif event.name == "engine-quarantined":
            self._notice(f"this member generates nothing until it has loaded a full checkpoint: {fields['reason']}")
        elif (notice := notice_of(event)) is not None:
            self._notice(notice)

    def _line(self, text: str) -> None:
        self._say(f"{figures.clock_time(self._time)}  {text}", False)

    def _report_failure(self, fields: Mapping[str, Value]) -> None:
        """Say why a task failed, once until a task succeeds. After the final failure the command prints its error itself."""
        reason = str(fields["reason"])
        if reason == self._reported_failure or (fields.get("final") and not fields.get("traceback")):
            return
        self._reported_failure = reason
        self._say_notice(f"{'failed' if fields.get('final') else 'will try again'}: {reason}", str(fields.get("traceback") or ""))

    def _notice(self, text: str) -> None:
        """Say a notice, unless it is the one that was said last."""
        if text != self._reported:
            self._reported = text
            self._say_notice(text)

    def _say_notice(self, text: str, details: str = "") -> None:
        for line in [f"{figures.clock_time(self._time)}  {text}", *(f"    {line}" for line in details.splitlines())]:
            self._say(line, True)
