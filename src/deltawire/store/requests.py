"""Requests to a store as values, so that the same logic runs on a real store and in a simulation.

Such logic is a generator: it yields requests and is sent the answers. If a request fails, its error is raised at the `yield`. The generator
itself reads no clock, draws no random number and starts no thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, TypeAlias, TypeVar

from .base import ObjectInfo, Store

_Request = TypeVar("_Request")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Get:
    """Read an object. The answer is its bytes. Fails with `ObjectMissing` or `LimitExceeded`."""

    key: str
    limit: int


@dataclass(frozen=True, slots=True)
class Head:
    """Ask for size and time of an object. The answer is an `ObjectInfo`. Fails with `ObjectMissing`."""

    key: str


@dataclass(frozen=True, slots=True)
class Create:
    """Create an object if the key is free. The answer is None. Fails with `ObjectExists` or `OutcomeUnknown`."""

    key: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Put:
    """Write an object, and replace an existing one. The answer is None."""

    key: str
    data: bytes
    durable: bool = True


@dataclass(frozen=True, slots=True)
class List:
    """List the objects above `after` and below `before`, at most `most`. The answer is a list of `ObjectInfo`, ascending by key."""

    prefix: str
    after: str | None = None
    before: str | None = None
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete objects. The answer is None."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait. The answer is None."""

    seconds: float


StoreRequest: TypeAlias = Get | Head | Create | Put | List | Delete


def ask_store(store: Store, request: StoreRequest) -> Any:
    """Return the store's answer to one request. Raises the errors of the store."""
    match request:
        case Get(key, limit):
            return store.get(key, limit=limit)
        case Head(key):
            return store.head(key)
        case Create(key, data):
            return store.put_if_absent(key, data)
        case Put(key, data, durable):
            return store.put(key, data, durable=durable)
        case Delete(keys):
            return store.delete(keys)
        case List(prefix, after, before, most):
            return _listed(store, prefix, after, before, most)


def _listed(store: Store, prefix: str, after: str | None, before: str | None, most: int | None) -> list[ObjectInfo]:
    found = store.list(prefix, after=after)
    return list(islice(found if before is None else takewhile(lambda info: info.key < before, found), most))


def drive(steps: Generator[_Request, Any, _Result], answer: Callable[[_Request], Any]) -> _Result:
    """Answer the requests of a generator until it returns. Return its result.

    An exception of `answer` is raised inside the generator. A `BaseException` that is not an `Exception` (Ctrl-C, a simulated crash) ends
    the generator at once instead, and it does not see it.
    """
    try:
        request = next(steps)
        while True:
            try:
                result = answer(request)
            except Exception as error:
                request = steps.throw(error)
            else:
                request = steps.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    finally:
        steps.close()
