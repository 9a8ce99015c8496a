"""All tests, in lanes that run side by side: most of them wait for something most of the time.

    python tests/lanes.py [LANE …]

Each lane is a process of pytest. What it prints is shown as it comes, behind the name of the lane. When one fails, or on Ctrl-C, the others
are ended, and at the end of everything stands what the one that failed had to say.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests"
SYSTEMS = [f"{TESTS}/{name}" for name in ("demo", "faults", "fleet", "integration")]
"""Many processes, or servers of stores, or much waiting."""
VLLM = [
    f"{TESTS}/vllm",
    *(
        f"{TESTS}/{name}.py"
        for name in ("trainers/test_trl_samples", "rl/test_trl_worker", "fleet/test_trl_rollouts", "docs/test_parameters")
    ),
]
"""A real vLLM, or a real TRL. Where these are not installed, most of it is skipped."""
RAY = [f"{TESTS}/fleet/test_ray.py"]
"""A real Ray cluster of two nodes. These tests skip themselves where Ray is not installed."""


def _ignoring(paths: list[str]) -> list[str]:
    return [f"--ignore={path}" for path in paths]


LANES: dict[str, list[str]] = {
    "vllm": ["-vv", *VLLM],
    "ray": [*RAY],
    "systems": [*SYSTEMS, *_ignoring([*VLLM, *RAY])],
    "parts": [TESTS, *_ignoring([*SYSTEMS, *VLLM])],
}

GRACE = 60.0
"""Seconds that a lane has to stop what it has started, once it was interrupted."""
REPEATED = 200
"""Lines of a lane that failed, shown again at the end."""


class Lane:
    """One process of pytest, in a session of its own: it is interrupted by us alone."""

    def __init__(self, name: str, arguments: list[str], printing: threading.Lock) -> None:
        self.name = name
        self.last: collections.deque[str] = collections.deque(maxlen=REPEATED)
        self.seconds: float | None = None
        self._printing = printing
        self._began = time.monotonic()
        options = ["-o", f"cache_dir=.pytest_cache/{name}", "--durations=8", "-rs"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *arguments],
            cwd=ROOT,
            # One thread of OpenMP each: more of them than cores would spin for each other.
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
        """Let it stop what it has started, and end. What it has started is not told: pytest would find it gone, and not know why."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """Return when it has ended after an interruption, or by itself; kill it if it does not."""
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._reader.join(5)  # what it left behind may hold the pipe

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.last.append(line.rstrip())
            self.say(line.rstrip())
        self.seconds = time.monotonic() - self._began


def run(names: list[str]) -> int:
    """Run these lanes; returns the exit status."""
    printing = threading.Lock()
    lanes: list[Lane] = []
    try:
        for name in names:
            lanes.append(Lane(name, LANES[name], printing))  # one by one, so that those that run are known if another cannot be started
        running = list(lanes)
        while running:
            for lane in list(running):
                status = lane.process.poll()
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
        other.say("is ended, since another lane has failed")
    _end(others)
    print(f"\n{lane.name} failed:\n" + "\n".join(lane.last), flush=True)
    return 1


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # who ends us means the lanes, too; and a shell may have had Ctrl-C ignored
        signal.signal(number, signal.default_int_handler)
    names = sys.argv[1:] or list(LANES)
    if unknown := [name for name in names if name not in LANES]:
        sys.exit(f"There is no lane {unknown[0]!r}: there are {', '.join(LANES)}.")
    try:
        sys.exit(run(names))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
