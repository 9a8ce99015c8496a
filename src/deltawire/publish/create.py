"""Creating a record when nobody can say for sure whether it worked: create if absent, and look (docs/protocol.md §4, "Create rule")."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from ..errors import DataDamaged, ObjectExists, OutcomeUnknown, StoreError, StoreUnavailable
from ..format.records.chain_records import MAX_RECORD_BYTES
from ..store.base import Store

Sleep = Callable[[float], None]

_TRIES = 5
_FIRST_PAUSE = 0.2


def create_and_look(store: Store, key: str, data: bytes, *, doubt: bool = False, sleep: Sleep = time.sleep) -> bytes:
    """Create the object if there is none, and return what its name holds then: `data`, or what somebody else put there first.

    The same bytes are tried a bounded number of times. Then `OutcomeUnknown`: they may be there, or may appear yet. Any other error means
    that they are not, and will not be. `doubt` says that an earlier call with these bytes had no clear outcome: then this one cannot fail
    for sure.
    """
    for attempt in range(_TRIES):
        if attempt:
            sleep(_FIRST_PAUSE * 2**attempt * random.uniform(0.5, 1.0))
        try:
            store.put_if_absent(key, data)
            return data
        except (ObjectExists, OutcomeUnknown, StoreUnavailable) as error:
            last: StoreError = error
            doubt = True
        except StoreError as error:
            last = error
        found = _look(store, key)
        if found is not None:
            return found
        if not doubt:
            raise last
    raise OutcomeUnknown(f"creation of {key!r} in {store.url} had no clear outcome after {_TRIES} tries ({last}).") from last


def _look(store: Store, key: str) -> bytes | None:
    """What is there; None if nothing is, or the store does not say."""
    try:
        return store.get(key, limit=MAX_RECORD_BYTES)
    except (StoreError, DataDamaged):
        return None
