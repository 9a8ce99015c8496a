"""Creating a record when nobody can say for sure whether it worked: create if absent, and look (docs/protocol.md §4, "Create rule")."""

from __future__ import annotations

from ...errors import DataDamaged, ObjectExists, OutcomeUnknown, StoreError, StoreUnavailable
from ...format.records.chain_records import MAX_RECORD_BYTES
from .requests import Create, Get, Sleep, Steps

_TRIES = 5
_FIRST_PAUSE = 0.2


def create_and_look(key: str, data: bytes) -> Steps[bytes]:
    """Create the object if there is none, and return what its name holds then: `data`, or what somebody else put there first.

    The same bytes are tried a bounded number of times. Then `OutcomeUnknown`: they may be there, or may appear yet. Any other error means
    that they are not, and will not be.
    """
    doubt = False
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
