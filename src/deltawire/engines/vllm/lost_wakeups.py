"""Limits the time that a lost wake-up between vLLM's processes costs.

EngineCore and its workers exchange calls and answers through shared memory. A reader that has been idle for a second sleeps until a message
on a socket wakes it up. vLLM's socket drops messages that come too fast, so a wake-up can be lost. vLLM therefore lets each reader look at
the memory after five seconds in any case (`SHM_READER_RECHECK_INTERVAL_MS`). Calls of an idle server, such as those that stage a version,
then took five seconds once in a while. A swap would delay generation by the same time.
"""

from __future__ import annotations

MOST_MILLISECONDS = 100
"""A reader that waits looks at the memory this often. Ten looks in a second need no noticeable time."""


def look_often() -> None:
    """Let the readers of this process look at the memory more often. Does nothing for a vLLM without this setting."""
    from vllm.distributed.device_communicators import shm_broadcast

    interval = getattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS", None)
    if interval is not None:
        shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = min(interval, MOST_MILLISECONDS)
