"""How the processes of one training job communicate while they publish together: small JSON messages, and bytes. Nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ... import errors
from ...errors import DeltawireError, PublishError
from ...store.base import Buffer

Work = Callable[[], Any]
"""Returns something that JSON can represent."""


class Ranks(Protocol):
    """The processes, numbered from 0. All processes call each method in the same order; it returns when all have called it."""

    rank: int
    """The number of this process."""
    size: int
    """The number of processes."""

    def exchange(self, message: bytes) -> list[bytes]:
        """Send a message to all processes, and return the messages of all, by rank."""
        ...

    def deliver(self, pieces: Sequence[Buffer]) -> list[memoryview]:
        """Send `pieces[i]` to rank i, and return the piece that each rank sent to this one."""
        ...


def together(ranks: Ranks, work: Work) -> list[Any]:
    """Do something in every process, and return all results. If it fails in one process, it raises the same type of error in all.

    Other processes notice a process that dies or is interrupted only because a method of `Ranks` fails.
    """
    own: Exception | None = None
    try:
        message = {"done": work()}
    except Exception as error:
        own = error
        message = {"failed": type(error).__name__, "why": without_hint(error)}
    answers = [json.loads(answer) for answer in ranks.exchange(json.dumps(message).encode())]
    if own is not None:
        raise own
    for rank, answer in enumerate(answers):
        if "failed" in answer:
            raise error_named(answer["failed"])(f"rank {rank}: {answer['why']}")
    return [answer["done"] for answer in answers]


def by_first_rank(ranks: Ranks, work: Work) -> Any:
    """Do something in the first process only. All processes return its result, or raise its error."""
    return together(ranks, work if ranks.rank == 0 else _nothing)[0]


def _nothing() -> None:
    return None


def without_hint(error: Exception) -> str:
    """Return the message of an error without its hint, which is added again where the error is raised."""
    hint = error.hint if isinstance(error, DeltawireError) else ""
    return str(error).removesuffix(hint).rstrip() or type(error).__name__


def error_named(name: str) -> type[DeltawireError]:
    """Return a class of `deltawire.errors` by its name, or `PublishError` if there is no such class."""
    kind = getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, DeltawireError) else PublishError
