"""Run a gateway that kills itself with SIGKILL at one of its steps: writes into the journal, files there, and puts into the store.

    python killed_gateway.py STORE JOURNAL ENGINE STEP [before|after]

It prints its address. With step −1 it runs on. Otherwise it is killed right before or after that step, counted from 0.
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
from deltawire.gateway.journal import Journal
from deltawire.gateway.options import EngineAddress
from deltawire.store import open_store
from deltawire.store.live_keys import LIVE
from deltawire.store.wrapped import StoreCall, WrappedStore

STORE, JOURNAL, ENGINE, STEP, WHEN = [*sys.argv[1:5], sys.argv[5]]
_numbers = itertools.count()


class Step:
    """One step. The process may be killed when it begins, or when it has ended."""

    def __init__(self) -> None:
        self._is_last = next(_numbers) == int(STEP)

    def __enter__(self) -> None:
        if self._is_last and WHEN == "before":
            os.kill(os.getpid(), signal.SIGKILL)

    def __exit__(self, *_: object) -> None:
        if self._is_last:
            os.kill(os.getpid(), signal.SIGKILL)


class CountedStore(WrappedStore):
    def watch(self, call: StoreCall) -> Any:
        return Step() if call.operation == "put" and call.key.startswith(LIVE) else super().watch(call)


def counted(method: Any, *, is_static: bool = False) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        with Step():
            return method(*arguments, **options)

    return staticmethod(call) if is_static else call


def torn_write(descriptor: int, kind: bytes, data: bytes) -> None:
    """Write a row. Before the step ends, only a part of it is there."""
    if next(_numbers) == int(STEP):
        if WHEN == "before":
            real = os.write
            os.write = lambda to, row: real(to, row[: len(row) // 2]) and os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,return-value]
        write(descriptor, kind, data)
        os.kill(os.getpid(), signal.SIGKILL)
    write(descriptor, kind, data)


write = Journal._write
Journal._write = staticmethod(torn_write)
Journal.seal = counted(Journal.seal)
Journal.forget = counted(Journal.forget)

with open_store(STORE) as store:
    options = GatewayOptions([EngineAddress.parse(ENGINE)], journal=Path(JOURNAL), probe=0.02, flush=0.02)
    serve_gateway(CountedStore(store), options, stop=threading.Event(), on_ready=lambda address: print(address, flush=True))
