"""A process with everything imported forks children in milliseconds, for tests that kill them. This file also defines what the children do.

    nursery = Nursery(log)
    child = nursery.start("publish", url, acknowledged)
    nursery.kill(child)

Run as a script, this file is the nursery process. It reads one command per line, and answers with one line. Only this process starts and
reaps the children, so the id of a child stays valid until it is killed. When the test process ends for any reason, the children end too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from journal import Journal
from safetensors.numpy import load_file
from support import PACKAGE, bits_of

from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import MirrorError, NoChain
from deltawire.events import Event
from deltawire.publish import AnchorPolicy, Publisher
from deltawire.publish.writer_options import WriterOptions
from deltawire.subscribe import Subscriber, reading_mirror

MOST_SECONDS = 900.0
"""A child ends by itself after this many seconds."""

_BLOCKS, _BLOCK = 16, 64


def state_of(step: int, *, restructure: bool = False) -> dict[str, Any]:
    """Return a state of about 200 kB that any process can recompute. Successive steps differ in one block of each tensor.

    With `restructure`, some ranges of steps have one more tensor, so that the chain needs full checkpoints in between.
    """
    rng = np.random.default_rng(7)
    state = {f"layer.{i}.weight": rng.integers(0, 1 << 16, (160, 200), np.uint16) for i in range(3)}
    state["norm"] = rng.integers(0, 1 << 16, 2048, np.uint16)
    changed_at = step - (step - np.arange(_BLOCKS)) % _BLOCKS
    for array in state.values():
        array.reshape(-1)[: _BLOCKS * _BLOCK] ^= np.repeat(changed_at, _BLOCK).astype(np.uint16)
    if restructure and step // 40 % 2:
        state["extra"] = np.full((3, 5), step, np.uint16)
    return {name: array.view(np.float16) for name, array in state.items()}


class Nursery:
    """The test's connection to the nursery process."""

    def __init__(self, log: Path, environment: Mapping[str, str] | None = None) -> None:
        path = os.pathsep.join(filter(None, [str(PACKAGE), str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")]))
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, "PYTHONPATH": path, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )

    def start(self, work: str, *arguments: object) -> int:
        """Start a child, and return its id."""
        return self._ask("start", work, *map(str, arguments))

    def kill(self, child: int) -> None:
        """Kill a child that must still be running, and return when it has ended."""
        ended = self._ask("kill", child)
        assert ended == -signal.SIGKILL, f"the child had ended by itself, with {ended}:\n{self._log.read_text()[-8000:]}"

    def is_running(self, child: int) -> bool:
        return bool(self._ask("running", child))

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:  # closes the nursery's input, so that the nursery kills its children and ends
            pass

    def _ask(self, *command: object) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the nursery has ended:\n{self._log.read_text()[-8000:]}"
        return int(answer)


# The work of children


def publish(url: str, journal: str) -> None:
    """Take the run over and publish version after version."""
    acknowledged = Journal(journal)
    policy = AnchorPolicy(min_versions=3, max_versions=6)
    publisher = Publisher(url, options=WriterOptions(segment_bytes=60_000, anchor_policy=policy, auto_collect=0.5))
    step = 0
    if publisher.version is not None:
        assert publisher.version.step is not None
        step = publisher.version.step + 1
    while True:
        version = publisher.publish(state_of(step, restructure=True), step=step)
        acknowledged.write(version.seq, step)
        step += 1


def mirror(url: str, directory: str, journal: str) -> None:
    """Keep a mirror at the newest version."""
    events = Journal(journal)

    def note(event: Event) -> None:
        if event.name in ("synced", "resynced"):
            events.write(event.name, event.fields["seq"], event.fields["bytes"])

    subscriber = Subscriber(url, directory, options=ReaderOptions(reader="mirror"), on_event=note)
    events.write("opened", -1 if subscriber.version is None else subscriber.version.seq, 0)
    while True:
        with contextlib.suppress(NoChain):
            subscriber.sync()


def load(directory: str, journal: str) -> None:
    """Load the mirror repeatedly as an engine would, and compare all of its weights with the version that it claims to be."""
    loaded = Journal(journal)
    last = None
    while True:
        try:
            with reading_mirror(directory) as path:
                record = json.loads(json.loads((path / "deltawire.json").read_text())["record"])
                state = load_file(path / "model.safetensors")
                assert state.keys() == load_file(Path(directory) / "current" / "model.safetensors").keys()
            assert bits_of(state) == bits_of(state_of(record["step"])), record["seq"]
        except MirrorError:
            assert last is None  # a mirror that has served a version always serves one
            continue
        if record["seq"] != last:
            last = record["seq"]
            loaded.write("loaded", last)


# The nursery process

WORK: dict[str, Callable[..., None]] = {"publish": publish, "mirror": mirror, "load": load}


def _child(work: str, arguments: list[str]) -> None:
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)  # SIGALRM ends the child
    os.close(0)
    os.dup2(2, 1)
    WORK[work](*arguments)


def _start(work: str, arguments: list[str]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        _child(work, arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _serve() -> None:
    children: set[int] = set()
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "start":
            answer = _start(arguments[0], arguments[1:])
            children.add(answer)
        elif command == "running":
            answer = int(os.waitid(os.P_PID, arguments[0], os.WEXITED | os.WNOHANG | os.WNOWAIT) is None)
        else:
            os.kill(arguments[0], signal.SIGKILL)
            answer = os.waitstatus_to_exitcode(os.waitpid(arguments[0], 0)[1])
            children.discard(arguments[0])
        print(answer, flush=True)
    for child in children:
        os.kill(child, signal.SIGKILL)  # it is not reaped yet, so its id is still valid
        os.waitpid(child, 0)


if __name__ == "__main__":
    _serve()
