"""Create a record although the store's answer may be lost: create if absent, then read back (docs/protocol.md §4, "Create rule")."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator
from typing import Any

from ..errors import DataDamaged, ObjectExists, OutcomeUnknown, StoreError, StoreUnavailable
from ..format.records.canonical import MAX_RECORD_BYTES
from .base import Store
from .requests import Create, Get, Sleep, ask_store, drive

_TRIES = 5
_FIRST_PAUSE = 0.2


def create_steps(key: str, data: bytes, *, doubt: bool = False) -> Generator[Create | Get | Sleep, Any, bytes]:
    """Create an object if its key is free. Return the bytes that the key then holds: `data`, or those of another writer who was first.

    Tries the same bytes a bounded number of times, then raises `OutcomeUnknown`: the object may exist, or may still appear. Every other
    error means that the object does not exist and will not appear.

    Parameters
    ----------
    key
        The key of the object.
    data
        The bytes of the object. They must be unique to this writer, because a writer recognises its object by comparing bytes.
    doubt
        Whether an earlier call with the same bytes raised `OutcomeUnknown`. Then this call raises no other error: the bytes of the earlier
        call may still appear.
    """
    last: StoreError | None = None
    for attempt in range(_TRIES):
        if attempt:
            yield Sleep(_FIRST_PAUSE * 2**attempt)
        try:
            yield Create(key, data)
            return data
        except (ObjectExists, OutcomeUnknown, StoreUnavailable) as error:
            last, doubt = error, True
        except StoreError as error:
            last = error
        try:
            found: bytes = yield Get(key, MAX_RECORD_BYTES)
            return found
        except (StoreError, DataDamaged):
            if not doubt:
                raise last from None
    raise OutcomeUnknown(f"creation of {key!r} had no clear outcome after {_TRIES} tries ({last}).") from last


def create_and_look(store: Store, key: str, data: bytes, *, doubt: bool = False, sleep: Callable[[float], object] = time.sleep) -> bytes:
    """Create an object by the rule of `create_steps` in a store. Pauses between tries are random, so that writers do not stay in step."""

    def answer(request: Create | Get | Sleep) -> Any:
        if isinstance(request, Sleep):
            return sleep(request.seconds * random.uniform(0.5, 1.0))
        return ask_store(store, request)

    return drive(create_steps(key, data, doubt=doubt), answer)
