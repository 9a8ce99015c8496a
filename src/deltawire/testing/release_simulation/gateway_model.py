"""A gateway without HTTP: the real journal, uploads, known ids and intake of feedback, in virtual time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...chain.log import ChainLog
from ...errors import DeltawireError
from ...events import Event
from ...format.feedback import Feedback
from ...gateway.channel_watch import ChannelWatch
from ...gateway.feedback import FeedbackIntake, read_feedback
from ...gateway.http.api_keys import Caller
from ...gateway.metrics_watch import MetricsWatch
from ...gateway.recording.answers import Unusable, row_of
from ...gateway.recording.id_log import IdLog
from ...gateway.recording.journal import Journal, ended_sessions
from ...gateway.recording.journal_log import JournalDisk
from ...gateway.recording.known_ids import KnownIds
from ...gateway.recording.uploads import Uploads
from ..fleet_simulation.kernel import Kernel, Process
from .blocking import VirtualStore, blocking_steps, sleep
from .virtual_loop import VirtualLoop

_KNOWN = 10_000
_MOST_ROWS = 2
"""The most rows of a row log, so that more answers wait than one file holds whenever the store is away for a while."""


def quiet(event: Event) -> None:
    """Ignore an event."""


class UnsyncedDisk(JournalDisk):
    """A disk whose power never fails, so that nothing needs to be synced."""

    def sync(self, descriptor: int) -> None:
        """Do nothing."""

    def sync_folder(self, folder: Path) -> None:
        """Do nothing."""


class GatewayModel:
    """A machine with a gateway. Its journal stays when the process is killed.

    Parameters
    ----------
    name
        The name of the gateway.
    folder
        The directory of its journal.
    kernel
        Virtual time.
    run
        The run's id.
    drawn
        What engines drew for each request, as long as they keep it.
    recorded
        Called with the id of each answer that is in the journal.
    flush
        Seconds between uploads.
    offset
        How wrong its clock is, in seconds.
    entered
        Called with `offset` before the process runs.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        kernel: Kernel,
        run: str,
        drawn: Mapping[str, Any],
        recorded: Callable[[str], None],
        *,
        flush: float,
        offset: float,
        entered: Callable[[float], None],
    ) -> None:
        self.name, self.offset = name, offset
        self._folder, self._kernel, self._run = folder, kernel, run
        self._drawn, self._recorded, self._flush, self._entered = drawn, recorded, flush, entered
        self.process: Process | None = None
        self._loop: Any = None
        self._journals: list[Journal] = []

    @property
    def is_up(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.alive and not self.process.frozen

    def start(self, process: Process, session: str, failed: Callable[[Any, Exception | None], None]) -> None:
        """Start the gateway in a process.

        Parameters
        ----------
        process
            The process.
        session
            The name of the session.
        failed
            Called if one of its threads ends.
        """
        self.process = process
        store = VirtualStore()
        ended = list(ended_sessions(self._folder, disk=UnsyncedDisk(), most_rows=_MOST_ROWS)) if self._folder.is_dir() else []
        self.journal = Journal(self._folder, session, disk=UnsyncedDisk(), most_rows=_MOST_ROWS)
        self._journals = [self.journal, *ended]
        self._ids = IdLog(self._folder, session, most=_KNOWN)
        self.known = KnownIds(store, self._run, session, most=_KNOWN, log=self._ids, on_event=quiet)

        def log() -> ChainLog:
            return ChainLog(store, clock=lambda: self._kernel.now)

        self._uploads = Uploads(log(), self._journals, flush=self._flush, on_event=quiet)
        self.watch = ChannelWatch(log(), ("stable", "canary"), "stable", on_event=quiet)
        metrics = self._metrics = MetricsWatch(log())
        self._loop = VirtualLoop(process, lambda: self._entered(self.offset))
        self._intake = FeedbackIntake(store, self._run, session, self.known, metrics, on_event=quiet)
        self._loop.call_soon(self._intake.start)
        process.start(blocking_steps(lambda: self._upload(ended)), failed)
        process.start(blocking_steps(self._look), failed)

    def kill(self) -> None:
        """Kill the process. The system releases the locks of its journals."""
        if self.process is not None and self.process.alive:
            self.process.kill()
            self._loop.kill()
            for journal in self._journals:
                if not journal.is_closed:
                    journal.close()
            self._ids.close()

    def begins(self, intent: dict[str, Any]) -> None:
        """Note an answer before its first byte.

        Parameters
        ----------
        intent
            What the gateway knows about it.
        """
        self.journal.add_intent(intent["id"], intent)
        self.known.keep(intent["id"], intent["episode"], intent["caller"])
        self.known.add(intent["id"], intent["episode"], intent["caller"])

    def records(self, intent: dict[str, Any]) -> None:
        """Record an answer that is complete.

        Parameters
        ----------
        intent
            What the gateway knows about it.
        """
        self._record(self.journal, intent)

    def clock(self) -> int:
        """Return the time of its clock in milliseconds."""
        return int((1_600_000_000 + self._kernel.now + self.offset) * 1000)

    def receive(self, body: dict[str, Any], caller: Caller, ended: Callable[[Any, BaseException | None], None]) -> None:
        """Take feedback. Call `ended` with it when it is acknowledged, or with the error that the sender gets.

        Parameters
        ----------
        body
            The body of the request.
        caller
            The sender.
        ended
            Called with the answer.
        """
        self._loop.run(self._receive(body, caller), ended)

    async def _receive(self, body: dict[str, Any], caller: Caller) -> Feedback:
        feedback = await self._intake.check(read_feedback(body, caller))
        await self._intake.store(feedback)
        return feedback

    def _record(self, journal: Journal, intent: dict[str, Any]) -> None:
        found = self._drawn.get(intent["id"])
        try:
            row = row_of(intent, found, logprobs="processed_logprobs", oldest=None)
        except Unusable:
            journal.drop_intent(intent["id"])
        else:
            journal.add_row(intent["id"], row)
            self._recorded(intent["id"])

    def _upload(self, ended: list[Journal]) -> None:
        """Record what ended sessions answered, and bring everything into the store again and again, as `Uploads` does in its thread."""
        for journal in ended:
            for data in list(journal.open_intents.values()):
                self._record(journal, json.loads(data))
        while True:
            sleep(self._flush)
            try:
                self._uploads.step()
            except (DeltawireError, OSError):
                sleep(1.0)

    def _look(self) -> None:
        while True:
            self._metrics.look()
            self.watch.look()
            sleep(6.0)
