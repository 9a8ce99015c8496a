"""Run commands in a pseudo terminal of some width, or with output in some encoding.

One process runs many commands, since each start takes seconds.
Run as a script, this file is that process. Its argument is a list of command lines as JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support import PACKAGE

_MARK = "== deltawire-test =="
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Shown:
    """The output of a command, including stderr, and its exit code."""

    text: str
    code: int

    @property
    def lines(self) -> list[str]:
        """Return the lines that the terminal received, without colours. Each redraw of a progress bar counts as another line."""
        return [line.rstrip() for line in re.split(r"[\r\n]+", _ESCAPES.sub("", self.text)) if line.strip()]


def in_terminal(columns: int, *commands: Sequence[object]) -> list[Shown]:
    """Run the commands one after the other in a terminal with this many columns."""
    argv, environment = _process(commands)
    child, terminal = pty.fork()
    if not child:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        os.execve(argv[0], argv, {**environment, "TERM": "xterm-256color", "PYTHONUTF8": "1"})
    printed = b""
    with contextlib.suppress(OSError):  # reading raises it when the other end is closed
        while piece := os.read(terminal, 1 << 16):
            printed += piece
    os.close(terminal)
    os.waitpid(child, 0)
    return _taken_apart(printed.decode(), len(commands))


def in_pipe(encoding: str, *commands: Sequence[object]) -> list[Shown]:
    """Run the commands one after the other with output to a pipe in this encoding."""
    argv, environment = _process(commands)
    environment |= {"PYTHONIOENCODING": encoding, "LANG": "C"}
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, timeout=300, check=False)
    return _taken_apart(done.stdout.decode(encoding), len(commands))


def _process(commands: Sequence[Sequence[object]]) -> tuple[list[str], dict[str, str]]:
    clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TERM")}
    path = os.pathsep.join(filter(None, [str(PACKAGE), str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")]))
    return [sys.executable, __file__, json.dumps([[str(part) for part in command] for command in commands])], {**clean, "PYTHONPATH": path}


def _taken_apart(printed: str, count: int) -> list[Shown]:
    parts = re.split(rf"{re.escape(_MARK)} (-?\d+)\r?\n", printed)
    assert len(parts) == 2 * count + 1, printed
    return [Shown(parts[2 * number], int(parts[2 * number + 1])) for number in range(count)]


def _run(commands: list[list[str]]) -> None:
    from deltawire import cli

    for command in commands:
        sys.argv = ["deltawire", *command]
        code: object = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        sys.stderr.flush()
        print(f"{_MARK} {code}", flush=True)


if __name__ == "__main__":
    _run(json.loads(sys.argv[1]))
