"""How the processes of one training job talk while they publish together: small messages in JSON, and bytes. Nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ... import errors
from ...errors import DeltawireError, PublishError
from ...store.base import Buffer

Work = Callable[[], Any]
"""Gives something that JSON can hold."""


class Ranks(Protocol):
    """The processes, numbered from 0. Every method is called by all of them, in the same order; it returns when all have called it."""

    rank: int
    """The number of this one."""
    size: int

    def exchange(self, message: bytes) -> list[bytes]:
        """Every process's message, by rank."""
        ...

    def deliver(self, pieces: Sequence[Buffer]) -> list[memoryview]:
        """Send piece i to rank i; returns what came from each."""
        ...


def together(ranks: Ranks, work: Work) -> list[Any]:
    """Do something in every process, and return what each got. Where it fails in one it fails in all, with the same kind of error.

    Only what every process can also survive alone may raise inside: a process that dies, or is interrupted, is noticed by the others only
    as a failure of `Ranks` itself.
    """
    own: Exception | None = None
    try:
        message = {"done": work()}
    except Exception as error:
        own = error
        message = {"failed": type(error).__name__, "why": _bare(error)}
    answers = [json.loads(answer) for answer in ranks.exchange(json.dumps(message).encode())]
    if own is not None:
        raise own
    for rank, answer in enumerate(answers):
        if "failed" in answer:
            raise _error_named(answer["failed"])(f"rank {rank}: {answer['why']}")
    return [answer["done"] for answer in answers]


def lead(ranks: Ranks, work: Work) -> Any:
    """Do something in the first process only; all return what it got, or raise what it raised."""
    return together(ranks, work if ranks.rank == 0 else _nothing)[0]


def _nothing() -> None:
    return None


def _bare(error: Exception) -> str:
    hint = error.hint if isinstance(error, DeltawireError) else ""
    return str(error).removesuffix(hint).rstrip() or type(error).__name__


def _error_named(name: str) -> type[DeltawireError]:
    kind = getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, DeltawireError) else PublishError
