"""Long-running commands end when a signal arrives, even while they wait, and when their output is closed."""

from __future__ import annotations

import errno
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from deltawire import Publisher
from deltawire.cli.process.ending import Ending, on_another_thread

LONG = 10_000
HANGING_TOP = """
import sys, threading
from deltawire.cli import main, top
from deltawire.fleet.overview import FleetReader

def hang(reader, rounds=4):
    print("looking", file=sys.stderr, flush=True)
    reader._pool.submit(threading.Event().wait).result()

FleetReader.fleet = hang
top._LONGEST_ENDING = 0.2
main()
"""
FLEET = "import sys; sys.executable = sys.argv.pop(1)\nfrom deltawire.cli import main\nmain()\n"


def test_top_ends_on_a_signal_while_a_thread_hangs(tmp_path: Path) -> None:
    with Publisher(tmp_path / "store") as publisher:
        publisher.publish({"weight": np.zeros(8, np.float32)}, step=0)
    command = [sys.executable, "-c", HANGING_TOP, "top", str(tmp_path / "store")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as top:
        try:
            assert top.stderr is not None
            assert top.stderr.readline() == "looking\n"
            top.send_signal(signal.SIGTERM)  # not SIGHUP, which everything that `nohup` starts ignores
            top.wait(300)
        finally:
            top.kill()


def test_a_fleet_ends_when_its_terminal_is_closed(tmp_path: Path) -> None:
    member = tmp_path / "member.sh"
    member.write_text("#!/bin/sh\nexec cat > /dev/null\n")
    member.chmod(0o755)
    main, terminal = pty.openpty()
    os.close(main)
    command = [sys.executable, "-c", FLEET, str(member), "fleet", "1", "--from", str(tmp_path / "store"), "--env", "m:f", "--name", "a"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal) as fleet:
        os.close(terminal)
        try:
            fleet.wait(300)
        finally:
            fleet.kill()


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "x"), OSError(errno.EIO, "x"), SystemExit(1)])
def test_lost_output_asks_for_the_end_once(error: BaseException) -> None:
    asked = threading.Event()
    signals: list[int] = []

    def record(number: int, frame: object) -> None:
        signals.append(number)
        asked.set()

    def fail(text: str) -> None:
        raise error

    before = signal.signal(signal.SIGTERM, record)
    try:
        with Ending(LONG) as ending:
            printing = ending.with_output(fail)
            threads = [threading.Thread(target=printing, args=("text",)) for _ in range(3)]
            for thread in threads:
                thread.start()
            assert asked.wait(300)
            for thread in threads:
                thread.join()
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 0  # the timer is set, and would end this process
        assert signals == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is record
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, before)


def test_other_errors_of_printing_are_raised() -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    with Ending(LONG) as ending, pytest.raises(OSError, match="full"):
        ending.with_output(fail)()


def test_a_call_on_another_thread_answers_as_if_it_were_on_this_one() -> None:
    assert on_another_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        on_another_thread(lambda: 1 / 0)


def test_no_wait_of_the_main_thread_is_unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes just before a wait begins is handled when the wait ends. So a wait without a bound might never end."""
    waits: list[float | None] = []
    join = threading.Thread.join

    def record(thread: threading.Thread, timeout: float | None = None) -> None:
        waits.append(timeout)
        join(thread, timeout)

    started = threading.Event()
    go_on = threading.Event()
    monkeypatch.setattr(threading.Thread, "join", record)

    def call() -> int:
        started.set()
        go_on.wait(300)
        return 7

    threading.Thread(target=lambda: (started.wait(300), go_on.set()), daemon=True).start()
    assert on_another_thread(call) == 7
    assert None not in waits
