"""Run commands in a terminal of 80 columns, as a user sees them."""

from __future__ import annotations

import fcntl
import itertools
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

from forked_python import ForkedPopen
from rich.cells import cell_len

COLUMNS = 80
_KEY = re.compile(r"data/\d{10}/\d{20}/[0-9a-f]{64}\.\w+")
_BEGIN = "deltawire-test-begin-of-command"
_END = "deltawire-test-end-of-command"

# This script imports the command line once. It then runs every command in its own process, with its own exit code. Bash runs the commands
# of other programs, and those with pipes or redirections.
# Members that a fleet starts are forked too.
_SHELL = f"""
import os, re, shlex, subprocess, sys, types
import deltawire.cli
import deltawire.fleet.local_members
import forked_python
forked = lambda command, **options: forked_python.ForkedPopen("torch", command[1:], **options)
deltawire.fleet.local_members.subprocess = types.SimpleNamespace(PIPE=subprocess.PIPE, Popen=forked)
for line in sys.argv[1:]:
    words = shlex.split(line, comments=True)
    child = os.fork()
    if child == 0:
        print("{_BEGIN}", os.getpid(), flush=True)
        if words[0] != "deltawire" or set(words) & set("|><") or {{">>", "2>"}} & set(words) or "$(" in line:
            os.execvp("bash", ["bash", "-euo", "pipefail", "-c", line])
        sys.argv = words
        deltawire.cli.main()
    _, status = os.waitpid(child, 0)
    print("{_END}", os.waitstatus_to_exitcode(status), flush=True)
"""


def run_in_terminal(commands: Sequence[str], folder: Path, *, until: str | None = None, warm_up: str = "light") -> list[tuple[int, str]]:
    """Run commands one after the other, and return the exit code and the terminal output of each. `warm_up` is as in `forked_python`.

    With `until`, the last command gets Ctrl-C as soon as it has written this text.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CI")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    shell = ForkedPopen(
        warm_up,
        ["-c", _SHELL, *commands],
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
            begun = list(re.finditer(rf"{_BEGIN} (\d+)\r\n".encode(), written))
            if until is not None and len(begun) == len(commands) and until.encode() in written[begun[-1].end() :]:
                os.kill(int(begun[-1][1]), signal.SIGINT)
                until = None
    except OSError:  # Linux raises this error when the last process has closed the other end
        pass
    finally:
        os.close(ours)
    text = re.sub(rf"{_BEGIN} \d+\r\n", "", written.decode())
    assert shell.wait() == 0, text
    assert until is None, f"the last command ended without {until!r}:\n{text}"
    parts = re.split(rf"{_END} (-?\d+)\r\n", text)
    return [(int(code), text) for text, code in zip(parts[::2], parts[1::2], strict=False)]


def commands_in(text: str) -> list[str]:
    """Return the commands of a block, without comments. Each line is a command unless it continues the line before."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def lines_on_screen(written: str) -> list[str]:
    """Return the written lines, without colours and cursor movements. Text that a progress bar overwrites counts as a separate line."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[()][A-Z0-9]", "", written)
    return re.split(r"[\r\n]+", plain)


def misprints(written: str) -> list[str]:
    """Return lines that do not fit the terminal, and lines that end in the middle of a word.

    Progress bars may fill all columns. The key of an object may be longer than a line if it is on a separate line.
    """
    lines = lines_on_screen(written)
    wide = [f"{cell_len(line)} columns: {line}" for line in lines if cell_len(line) > COLUMNS and not _KEY.fullmatch(line.strip())]
    cut = [
        f"broken word: {line} | {following}"
        for line, following in itertools.pairwise(lines)
        if cell_len(line) == COLUMNS and "━" not in line and re.search(r"[\w/.-]$", line) and re.match(r"[\w/.-]", following)
    ]
    return wide + cut
