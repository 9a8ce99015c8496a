"""Run the `deltawire` command as a separate process without half a second of imports.

    done = run_forked(["log", url], environment)

Each command is a real process with its own environment, output and exit code. It is forked after the imports (tests/forked_python.py).
Tests of the imports, of start-up and of signals start an interpreter instead. Run as a script, this file is the command.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence


def run_forked(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `deltawire` with these arguments in this environment, and wait for it."""
    from forked_python import forked_run

    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return forked_run("light", [__file__, *arguments], env=environment, **pipes)


if __name__ == "__main__":
    from deltawire.cli import main

    if user := os.environ.pop("DELTAWIRE_TEST_USER", None):  # the modules are imported already, so this user need not read them
        os.setgroups([])
        os.setgid(int(user))
        os.setuid(int(user))
    sys.argv[0] = "deltawire"
    main()
