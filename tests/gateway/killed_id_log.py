"""Open a log of ids, add ids, and kill this process with SIGKILL at one of its steps: writes, renames and deletions.

    python killed_id_log.py JOURNAL SESSION MOST COUNT STEP

It prints each id once it is kept. A write that is killed is there by half.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

from deltawire.gateway.recording.id_log import IdLog, OwnId

JOURNAL, SESSION, MOST, COUNT, STEP = sys.argv[1:]
_numbers = itertools.count()
_real_write = os.write


def is_last() -> bool:
    return next(_numbers) == int(STEP)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write(descriptor: int, data: bytes) -> int:
    if is_last():
        _real_write(descriptor, data[: len(data) // 2])
        kill()
    return _real_write(descriptor, data)


def killing(method: Any) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        if is_last():
            kill()
        return method(*arguments, **options)

    return call


os.write = write
Path.rename = killing(Path.rename)  # type: ignore[method-assign]
Path.unlink = killing(Path.unlink)  # type: ignore[method-assign]
log = IdLog(Path(JOURNAL), SESSION, most=int(MOST))
for number in range(int(COUNT)):
    name = f"{SESSION}-{number}"
    log.add(OwnId(name, None, "app"))
    _real_write(1, f"{name}\n".encode())
_real_write(1, b"done\n")
kill()
