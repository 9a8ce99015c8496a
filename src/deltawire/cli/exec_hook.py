"""`deltawire follow --exec CMD`: a command that runs after each new version."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from ..subscribe.durable_json import read_json, write_json

if TYPE_CHECKING:
    from ..chain.version import Version

_DONE = ".exec.json"
_STDERR = 2
_PATIENCE = 10.0
"""Seconds that a command has to end in after SIGTERM."""


class ExecHook:
    """Runs a shell command for the version at hand, unless it has already succeeded for this version.

    That it succeeded is remembered in the mirror. So a command that failed, or a process that died in between, runs it again: by the next
    call of `follow`, or for the next version. While it runs, the files of its version stay as they are.
    """

    def __init__(self, command: str, mirror: Path, url: str, *, stdout_to_stderr: bool) -> None:
        self._command = command
        self._record = mirror / _DONE
        self._url = url
        self._stdout = _STDERR if stdout_to_stderr else None

    def run(self, version: Version, path: Path) -> int | None:
        """Return the exit status of the command, negative for a signal; None if it did not have to run."""
        done = {"seq": version.seq, "digest": version.digest.hex(), "command": self._command}
        if read_json(self._record) == done:
            return None
        status = self._wait(version, path)
        if status == 0:
            write_json(self._record, done)
        return status

    def _wait(self, version: Version, path: Path) -> int:
        environment = {
            **os.environ,
            "DELTAWIRE_PATH": str(path.resolve()),
            "DELTAWIRE_VERSION": str(version.updates),
            "DELTAWIRE_SEQ": str(version.seq),
            "DELTAWIRE_STEP": "" if version.step is None else str(version.step),
            "DELTAWIRE_DIGEST": version.digest.hex(),
            "DELTAWIRE_URL": self._url,
        }
        with subprocess.Popen(self._command, shell=True, env=environment, stdin=subprocess.DEVNULL, stdout=self._stdout) as process:
            try:
                return process.wait()
            except BaseException:
                process.terminate()
                try:
                    process.wait(_PATIENCE)
                except subprocess.TimeoutExpired:
                    process.kill()
                raise


def describe_status(status: int) -> str:
    """How a command ended, in words."""
    if status < 0:
        try:
            return f"was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"was ended by signal {-status}"
    return f"exited with code {status}"
