"""Commands in a terminal of 80 columns, as a user sees them."""

from __future__ import annotations

import fcntl
import itertools
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len

COLUMNS = 80
_END = "deltawire-test-end-of-command"

# Imports the command line once; every command then is a process of its own, with an exit code of its own.
_SHELL = f"""
import os, shlex, sys
import deltawire.cli
for line in sys.argv[1:]:
    words = shlex.split(line, comments=True)
    child = os.fork()
    if child == 0:
        sys.argv = words
        deltawire.cli.main()
    _, status = os.waitpid(child, 0)
    print("{_END}", os.waitstatus_to_exitcode(status), flush=True)
"""


def run_in_terminal(commands: Sequence[str], folder: Path) -> list[tuple[int, str]]:
    """Run `deltawire` commands one after the other. Returns the exit code of each, and what it wrote to the terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CI")}
    shell = subprocess.Popen(
        [sys.executable, "-c", _SHELL, *commands],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment | {"TERM": "xterm-256color", "PYTHONUTF8": "1"},
    )
    os.close(theirs)
    written = bytearray()
    try:
        while piece := os.read(ours, 1 << 16):
            written += piece
    except OSError:  # how Linux says that nobody has the other end any more
        pass
    finally:
        os.close(ours)
    assert shell.wait() == 0, written.decode()
    parts = re.split(rf"{_END} (-?\d+)\r\n", written.decode())
    return [(int(code), text) for text, code in zip(parts[::2], parts[1::2], strict=False)]


def lines_on_screen(written: str) -> list[str]:
    """What was written, line by line, without colours and cursor movements. What a bar overwrites counts as a line of its own."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[()][A-Z0-9]", "", written)
    return re.split(r"[\r\n]+", plain)


def misprints(written: str) -> list[str]:
    """Lines that do not fit the terminal, and lines that end in the middle of a word. Progress bars may fill all columns."""
    lines = lines_on_screen(written)
    wide = [f"{cell_len(line)} columns: {line}" for line in lines if cell_len(line) > COLUMNS]
    cut = [
        f"broken word: {line} | {following}"
        for line, following in itertools.pairwise(lines)
        if cell_len(line) == COLUMNS and "━" not in line and re.search(r"[\w/.-]$", line) and re.match(r"[\w/.-]", following)
    ]
    return wide + cut
