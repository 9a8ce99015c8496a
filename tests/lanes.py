"""Run all tests in lanes that run in parallel.

    python tests/lanes.py [LANE …]

Each lane is a process of pytest. Its lines are printed at once, after the name of the lane. If a lane fails, or on Ctrl-C, the others are
stopped, and the last lines of the failed lane are printed again at the end. There are more lanes than cores: many tests wait most of the
time, and short lanes leave no core idle at the end. A lane that prints nothing for a long time counts as failed; by then, pytest has
printed where its threads are. A few lanes run at a time, and the others begin as these end. One process imports torch and transformers for
all lanes and forks them, and the lanes fork their own processes from it. Temporary files are in memory if there is room: stores and
journals sync their files, and on a disk most tests would wait for that.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from forked_python import ForkedPopen

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests"
FAULTS = [f"{TESTS}/{name}" for name in ("malformed", "faults")]
"""Hostile input, and stores of which every call fails in turn."""
SYSTEMS = [f"{TESTS}/integration"]
"""Tests with many processes, with servers of stores, or with long waits."""
FLEET = [f"{TESTS}/fleet"]
"""Members of fleets as processes."""
SEARCHES = [f"{TESTS}/{name}" for name in ("gpu", "property")]
"""Random examples, and kernels on an emulated GPU: tests that compute all the time."""
VLLM = [f"{TESTS}/vllm", f"{TESTS}/docs/test_parameters.py"]
"""Tests with a real vLLM. Most of them skip themselves where it is not installed."""
TRL = [
    f"{TESTS}/{name}.py"
    for name in ("vllm/test_trl", "trainers/test_trl_samples", "rl/test_trl_worker", "rl/test_trl_replay", "fleet/test_trl_rollouts")
]
"""Tests with a real TRL, some also with a real vLLM. They skip themselves where these are not installed."""
RAY = [f"{TESTS}/fleet/test_ray.py"]
"""A real Ray cluster of two nodes. These tests skip themselves where Ray is not installed."""
LONG = [f"{TESTS}/{name}" for name in ("demo", "integration/stores/test_server_conformance.py", "fleet/test_cut_off.py")]
"""Tests that start many processes or servers and mostly wait for them."""
UNITS = [f"{TESTS}/{name}" for name in ("gateway", "dashboard", "unit")]
"""Tests of single modules and of web servers. Those that wait most come first."""


def _ignoring(paths: list[str]) -> list[str]:
    return [f"--ignore={path}" for path in paths]


LANES: dict[str, list[str]] = {
    "vllm": ["-vv", *VLLM, *_ignoring(TRL)],
    "trl": ["-vv", *TRL, *LONG],
    "systems": [*SYSTEMS, *_ignoring(LONG)],
    "units": UNITS,
    "searches": SEARCHES,
    "faults": FAULTS,
    "parts": [TESTS, *_ignoring([*FAULTS, *SYSTEMS, *FLEET, *SEARCHES, *VLLM, *TRL, *UNITS, *LONG])],
    "ray": ["-vv", *RAY, *FLEET, *_ignoring([*TRL, *LONG])],
}
"""The lanes in the order in which they begin: those that take longest come first."""

AT_ONCE = 5
"""The number of lanes that run at a time. If all ran at once, the longest lane would still run when the others have ended."""

GRACE = 60.0
"""Seconds that an interrupted lane has to stop the processes that it started."""
SILENCE = 1200.0
"""A lane that prints nothing for this many seconds waits for something that will not happen."""
MEMORY = Path("/dev/shm")
ROOM = 8 << 30
"""The free bytes of a file system in memory that is used for temporary files. A whole run takes about 2 GiB at a time."""
REPEATED = 200
"""The number of lines of a failed lane that are printed again at the end."""


class Lane:
    """One process of pytest. It has its own session, so that only this program interrupts it."""

    def __init__(self, name: str, arguments: list[str], printing: threading.Lock) -> None:
        self.name = name
        self.last: collections.deque[str] = collections.deque(maxlen=REPEATED)
        self.seconds: float | None = None
        self._printing = printing
        self._began = self.heard = time.monotonic()
        options = ["-o", f"cache_dir=.pytest_cache/{name}", "--durations=8", "-rs"]
        # pytest warns that it cannot rewrite the assertions of modules that are already imported. Those are modules of libraries.
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        self.process = ForkedPopen(
            "torch" if all(map(importlib.util.find_spec, ["torch", "transformers"])) else "light",
            ["-m", "pytest", *options, *arguments],
            cwd=ROOT,
            # One OpenMP thread per process: more threads than cores would wait for each other in busy loops.
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def say(self, line: str) -> None:
        with self._printing:
            print(f"{self.name:>8} | {line}", flush=True)

    def interrupt(self) -> None:
        """Ask the lane to stop its processes and to end. Only pytest gets the signal, so that it does not find its processes gone."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """Wait until the lane has ended. Kill it if it does not end in time."""
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._reader.join(5)  # a process that it left running may hold the pipe

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.heard = time.monotonic()
            self.last.append(line.rstrip())
            self.say(line.rstrip())
        self.seconds = time.monotonic() - self._began


@contextlib.contextmanager
def files_in_memory() -> Iterator[None]:
    """Let all lanes make their temporary files in memory if it has room, and delete them at the end."""
    if "TMPDIR" in os.environ or not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < ROOM:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="dw-", dir=MEMORY, ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = folder
        yield


def run(names: list[str]) -> int:
    """Run these lanes. Return the exit status."""
    printing = threading.Lock()
    lanes: list[Lane] = []
    try:
        waiting = collections.deque(names)
        running: list[Lane] = []
        while running or waiting:
            while waiting and len(running) < AT_ONCE:
                name = waiting.popleft()
                lanes.append(Lane(name, LANES[name], printing))  # one by one, so that `finally` knows the started ones
                running.append(lanes[-1])
            for lane in list(running):
                status = lane.process.poll()
                if status is None and time.monotonic() - lane.heard > SILENCE:
                    lane.say(f"has printed nothing for {SILENCE:.0f} s and is stopped")
                    lane.interrupt()
                    running.remove(lane)
                    lane.end()
                    return _failed(lane, running)
                if status is None:
                    continue
                running.remove(lane)
                lane.end()
                lane.say(f"{'passed' if status == 0 else f'FAILED with status {status}'} after {lane.seconds or 0.0:.0f} s")
                if status != 0:
                    return _failed(lane, running)
            time.sleep(0.1)
        return 0
    finally:
        _end(lanes)


def _end(lanes: list[Lane]) -> None:
    for lane in lanes:
        lane.interrupt()
    for lane in lanes:
        lane.end()


def _failed(lane: Lane, others: list[Lane]) -> int:
    for other in others:
        other.say("is stopped, because another lane failed")
    _end(others)
    print(f"\n{lane.name} failed:\n" + "\n".join(lane.last), flush=True)
    return 1


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # these signals end the lanes too; a shell may have set Ctrl-C to be ignored
        signal.signal(number, signal.default_int_handler)
    # Without bytecode, every process would compile deltawire, and every run would compile the tests.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    names = sys.argv[1:] or list(LANES)
    if unknown := [name for name in names if name not in LANES]:
        sys.exit(f"There is no lane {unknown[0]!r}: there are {', '.join(LANES)}.")
    try:
        with files_in_memory():
            sys.exit(run(names))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
