"""The shell command by which `deltawire gate --evaluate CMD` evaluates a canary."""

from __future__ import annotations

import json
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, TYPE_CHECKING

from ...format.content_hash import content_hash
from ...format.records.gate_records import MOST_SCORE_NAME, MOST_SCORES, MOST_TEXT, EvaluationResult
from .exec_hook import describe_status, end_group, poll_group, signals_deferred

if TYPE_CHECKING:
    from ...chain.version import Version

_TAIL = 1 << 16
"""The last bytes of the output that are kept."""
_NOT_FINISHED = (75, 126, 127)
"""Exit codes by which a command says that it could not evaluate: a temporary failure, or the shell could not start it."""
_LAST_OUTPUT = 10.0
"""Seconds that the output of a command that has ended is awaited. A process that it left behind may keep the output open."""


class EvaluationCommand:
    """Runs a shell command that evaluates a version. It passes with exit code 0, unless a score is too low.

    The last line of the output that is a JSON object of numbers has the scores. A command that takes too long, that a signal ends, or that
    exits with 75, 126 or 127 did not finish. Any other exit code means that the version is refused. The command runs in its own process
    group, and the whole group is ended with it.

    Parameters
    ----------
    command
        The shell command.
    url
        The location of the chain, which the command gets in its environment.
    timeout
        Seconds that the command may take.
    least
        The least values of scores, by name. A score that is missing is too low.
    ticks
        Returns seconds that never run backwards.
    """

    def __init__(
        self,
        command: str,
        url: str,
        *,
        timeout: float,
        least: Mapping[str, float] | None = None,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = command
        self._url = url
        self._timeout = timeout
        self._least = dict(least or {})
        self._terms = content_hash(json.dumps([command, sorted(self._least.items())]).encode())
        self._ticks = ticks
        self._running: _Running | None = None

    @property
    def terms(self) -> str:
        """The hash of the command and of the least scores."""
        return self._terms

    def start(self, canary: Version, stable: Version, attempt: int) -> None:
        """Start the command for a version, and return at once.

        Parameters
        ----------
        canary
            The version to evaluate.
        stable
            The version that it would replace.
        attempt
            The number of this attempt, from 1.
        """
        self.stop()
        environment = {
            **os.environ,
            "DELTAWIRE_URL": self._url,
            "DELTAWIRE_VERSION": str(canary.updates),
            "DELTAWIRE_SEQ": str(canary.seq),
            "DELTAWIRE_STEP": "" if canary.step is None else str(canary.step),
            "DELTAWIRE_DIGEST": canary.digest.hex(),
            "DELTAWIRE_STABLE_VERSION": str(stable.updates),
            "DELTAWIRE_STABLE_SEQ": str(stable.seq),
            "DELTAWIRE_ATTEMPT": str(attempt),
        }
        with signals_deferred():
            process = subprocess.Popen(
                self._command,
                shell=True,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                start_new_session=True,  # so that the processes that it starts can be ended with it
            )
            self._running = _Running(process, attempt, self._ticks() + self._timeout)

    def poll(self) -> EvaluationResult | None:
        """Return the result, or None while the command runs. Ends a command that takes too long."""
        running = self._running
        if running is None:
            return None
        status = poll_group(running.process)
        if status is None and self._ticks() < running.deadline:
            return None
        if status is None:
            self.stop()
            return EvaluationResult(None, running.attempt, f"the command took more than {self._timeout:g} seconds")
        self._running = None
        return self._judge(status, running.attempt, running.scores())

    def stop(self) -> None:
        """End the command and the processes that it has started, if it runs."""
        if self._running is not None:
            end_group(self._running.process)
            self._running = None

    def _judge(self, status: int, attempt: int, scores: Mapping[str, float]) -> EvaluationResult:
        how = f"the command {describe_status(status)}"
        if status < 0 or status in _NOT_FINISHED:
            return EvaluationResult(None, attempt, how, scores)
        if status != 0:
            return EvaluationResult(False, attempt, how, scores)
        low = [
            f"{name} is {scores.get(name, 'missing')}, below {least:g}"
            for name, least in self._least.items()
            if not _reaches(scores, name, least)
        ]
        reached = [f"{name} is {scores[name]:g}, at least {least:g}" for name, least in self._least.items() if not low]
        return EvaluationResult(not low, attempt, "; ".join(low or [how, *reached])[:MOST_TEXT], scores)


class _Running:
    """A command that was started, and the end of its output."""

    def __init__(self, process: subprocess.Popen[bytes], attempt: int, deadline: float) -> None:
        self.process = process
        self.attempt = attempt
        self.deadline = deadline
        self._tail = b""
        assert process.stdout is not None
        self._thread = threading.Thread(target=self._read, args=(process.stdout,), name="deltawire-evaluation", daemon=True)
        self._thread.start()

    def scores(self) -> dict[str, float]:
        """Return the scores in the last line that has some."""
        self._thread.join(_LAST_OUTPUT)
        for line in reversed(self._tail.decode(errors="replace").splitlines()):
            if found := _scores(line):
                return found
        return {}

    def _read(self, output: IO[bytes]) -> None:
        with output:
            while piece := output.read1(_TAIL):  # type: ignore[attr-defined]
                self._tail = (self._tail + piece)[-_TAIL:]


def _scores(line: str) -> dict[str, float]:
    """Return the finite numbers of a JSON object, or nothing if the line is none."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(values, dict):
        return {}
    numbers = {name: value for name, value in values.items() if isinstance(value, (int, float)) and not isinstance(value, bool)}
    named = {
        name: float(value)
        for name, value in numbers.items()
        if 1 <= len(name) <= MOST_SCORE_NAME and name.isprintable() and abs(value) < 1e300
    }
    return {name: value for name, value in list(named.items())[:MOST_SCORES] if math.isfinite(value)}


def _reaches(scores: Mapping[str, float], name: str, least: float) -> bool:
    return name in scores and scores[name] >= least
