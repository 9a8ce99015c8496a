"""Run a gateway that kills itself with SIGKILL at one of its steps: what changes the journal's files, and puts into the store.

    python killed_gateway.py STORE JOURNAL ENGINE STEP [before|after]

It prints its address. With step −1 it runs on. Otherwise it is killed right before or after that step, counted from 0 when it is ready.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from deltawire.gateway import GatewayOptions, serve_gateway
from deltawire.gateway.options import EngineAddress
from deltawire.gateway.recording.journal_log import JournalDisk
from deltawire.store import open_store
from deltawire.store.live_keys import LIVE
from deltawire.store.wrapped import StoreCall, WrappedStore

STORE, JOURNAL, ENGINE, STEP, WHEN = [*sys.argv[1:5], sys.argv[5]]
_numbers = itertools.count()
_is_ready = False


def number() -> int:
    """Return the number of a step."""
    return next(_numbers) if _is_ready else -2


class Step:
    """One step. The process may be killed when it begins, or when it has ended."""

    def __init__(self) -> None:
        self._is_last = number() == int(STEP)

    def __enter__(self) -> None:
        if self._is_last and WHEN == "before":
            os.kill(os.getpid(), signal.SIGKILL)

    def __exit__(self, *_: object) -> None:
        if self._is_last:
            os.kill(os.getpid(), signal.SIGKILL)


class CountedStore(WrappedStore):
    def watch(self, call: StoreCall) -> Any:
        return Step() if call.operation == "put" and call.key.startswith(LIVE) else super().watch(call)


def counted(name: str) -> None:
    method = getattr(JournalDisk, name)

    def call(*arguments: Any, **options: Any) -> Any:
        with Step():
            return method(*arguments, **options)

    setattr(JournalDisk, name, call)


def torn_write(self: JournalDisk, descriptor: int, data: Any) -> int:
    """Write. Before the step ends, only a part of the data is there."""
    if number() != int(STEP):
        return write(self, descriptor, data)
    write(self, descriptor, data[: len(data) // 2] if WHEN == "before" else data)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


write = JournalDisk.write
JournalDisk.write = torn_write  # type: ignore[method-assign]
for each in ("rename", "unlink", "truncate"):
    counted(each)


def ready(address: str) -> None:
    """Begin to count."""
    global _is_ready
    _is_ready = True
    print(address, flush=True)


with open_store(STORE) as store:
    options = GatewayOptions([EngineAddress.parse(ENGINE)], journal=Path(JOURNAL), probe=0.02, flush=0.02)
    serve_gateway(CountedStore(store), options, stop=threading.Event(), on_ready=ready)
