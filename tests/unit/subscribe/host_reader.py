"""A reader in a process of its own, which shares a host cache with others, writes a log of what it reads from the store, and can be halted.

    python host_reader.py STORE CACHE LOG '{"window": 512, "patience": 600, "hold": 3}'

It syncs once for each line "sync" on stdin, and prints a line of JSON about it. Before the data read number `hold` it prints "reading" and
waits for a line on stdin. When it waits for another process, it prints "waiting" once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from blake3 import blake3
from support import PACKAGE, bits_of

from deltawire.chain import fetch
from deltawire.chain.reader_options import ReaderOptions
from deltawire.events import Event
from deltawire.store.local import LocalStore
from deltawire.store.wrapped import WrappedStore
from deltawire.subscribe.cache import host_cache
from deltawire.subscribe.subscriber import Subscriber


class LoggedStore(WrappedStore):
    """Appends a line for each read of a data object to a file, which several processes may share: process, key, offset, size."""

    def __init__(self, root: str | Path, log: str | Path, hold: int = 0) -> None:
        super().__init__(LocalStore(root))
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._hold = hold
        self._count = 0
        self._lock = threading.Lock()

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Any = None) -> None:
        if key.startswith("data/"):
            with self._lock:
                self._count += 1
                is_held = self._count == self._hold
            if is_held:
                os.write(1, b"reading\n")
                sys.stdin.readline()
            os.write(self._log, f"{os.getpid()} {key} {offset} {len(buffer)}\n".encode())
        super().read_into(key, buffer, offset=offset, progress=progress)


def reads(log: Path) -> list[tuple[int, str, int, int]]:
    """Return the lines of a log."""
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [(int(process), key, int(offset), int(size)) for process, key, offset, size in lines]


def state_hash(state: Any) -> str:
    """Return a hash over all bits of a state."""
    return blake3(repr(sorted(bits_of(state).items())).encode()).hexdigest()


class ReaderProcess:
    """Controls a process of this script. Use it as a context, which kills the process in the end."""

    def __init__(
        self, store: Path, cache: Path | str, log: Path, *, environment: dict[str, str] | None = None, **settings: float | str
    ) -> None:
        tests = Path(__file__).resolve().parents[2]
        paths = os.pathsep.join(map(str, [PACKAGE, tests]))
        command = [sys.executable, "-W", "error", __file__, str(store), str(cache), str(log), json.dumps(settings)]
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": paths} | (environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, line: str) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def next_line(self) -> str:
        """Wait for a line and return it. It is empty when the process has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def wait_for(self, line: str) -> None:
        """Wait for this line."""
        found = self.next_line()
        assert found == line, found

    def result(self) -> dict[str, Any]:
        """Wait for the result of a sync, and return it."""
        while (line := self.next_line()) in ("waiting",):
            pass
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    def end(self) -> int:
        """Let the process end, and return its code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait()

    def __enter__(self) -> ReaderProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def _main() -> None:
    store, cache, log, text = sys.argv[1:]
    settings = json.loads(text)
    fetch._WINDOW = int(settings.get("window", fetch._WINDOW))
    host_cache.MEMORY = settings.get("memory", host_cache.MEMORY)
    host_cache.PATIENCE = settings.get("patience", 600.0)
    has_told = threading.Event()
    sleep = time.sleep

    def tell_and_sleep(seconds: float) -> None:
        if not has_told.is_set():
            has_told.set()
            os.write(1, b"waiting\n")
        sleep(seconds)

    if host_cache.HostCache.__init__.__kwdefaults__:
        host_cache.HostCache.__init__.__kwdefaults__["sleep"] = tell_and_sleep
    events: list[Event] = []
    options = ReaderOptions(pin=False, host_cache=cache)
    with Subscriber(LoggedStore(store, log, int(settings.get("hold", 0))), options=options, on_event=events.append) as subscriber:
        for _ in sys.stdin:
            events.clear()
            version = subscriber.sync()
            synced = [event.fields for event in events if event.name == "synced"]
            unshared = [event.fields["reason"] for event in events if event.name == "not-shared"]
            shared = synced[0]["shared_bytes"] if synced else 0
            told = {"seq": version.seq, "state": state_hash(subscriber.state), "shared": shared, "not_shared": unshared}
            os.write(1, f"{json.dumps(told)}\n".encode())


if __name__ == "__main__":
    _main()
