"""How the processes of one training job communicate while they publish together: small JSON messages, and bytes. Nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

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

    def broadcast(self, message: bytes) -> bytes:
        """Return the message of the first process, in all processes. The messages of the others are ignored."""
        ...

    def maximum(self, values: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the largest value of all processes at each position. All give the same number of values."""
        ...

    def another_channel(self) -> Ranks:
        """Return the same processes, for use by another thread at the same time. All processes call it at the same time."""
        ...

    def deliver(self, pieces: Sequence[Buffer]) -> list[memoryview]:
        """Send `pieces[i]` to rank i, and return the piece that each rank sent to this one."""
        ...


def together(ranks: Ranks, work: Work) -> list[Any]:
    """Do something in every process, and return all results. If it fails in one process, it raises the same type of error in all.

    Other processes notice a process that dies or is interrupted only because a method of `Ranks` fails.
    """
    own, message = _attempt(work)
    answers = ranks.exchange(json.dumps(message).encode())
    parsed = {answer: json.loads(answer) for answer in set(answers)}  # with many processes, most answers are the same
    return _results(own, [parsed[answer] for answer in answers])


def by_first_rank(ranks: Ranks, work: Work) -> Any:
    """Do something in the first process only. All processes return its result, or raise its error."""
    own: Exception | None = None
    message: dict[str, Any] = {}
    if ranks.rank == 0:
        own, message = _attempt(work)
    return _results(own, [json.loads(ranks.broadcast(json.dumps(message).encode()))])[0]


def collect_at_first(ranks: Ranks, value: Any) -> list[Any]:
    """Send a value, which JSON can represent, to the first process. Returns the values of all processes there, and [] in the others.

    Use it instead of `together` for values that only the first process needs: with many processes, `together` sends far more.
    """
    own = json.dumps(value).encode()
    arrived = ranks.deliver([own, *[b""] * (ranks.size - 1)])
    return [json.loads(bytes(piece)) for piece in arrived] if ranks.rank == 0 else []


def _attempt(work: Work) -> tuple[Exception | None, dict[str, Any]]:
    try:
        return None, {"done": work()}
    except Exception as error:
        return error, {"failed": type(error).__name__, "why": without_hint(error)}


def _results(own: Exception | None, answers: list[dict[str, Any]]) -> list[Any]:
    if own is not None:
        raise own
    for rank, answer in enumerate(answers):
        if "failed" in answer:
            raise error_named(answer["failed"])(f"rank {rank}: {answer['why']}")
    return [answer["done"] for answer in answers]


def without_hint(error: Exception) -> str:
    """Return the message of an error without its hint, which is added again where the error is raised."""
    hint = error.hint if isinstance(error, DeltawireError) else ""
    return str(error).removesuffix(hint).rstrip() or type(error).__name__


def error_named(name: str) -> type[DeltawireError]:
    """Return a class of `deltawire.errors` by its name, or `PublishError` if there is no such class."""
    kind = getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, DeltawireError) else PublishError
