"""Find out whether a store keeps the promises that the protocol needs, before anything is published."""

from __future__ import annotations

import contextlib
import secrets

from ..errors import DataDamaged, LimitExceeded, ObjectExists, ObjectMissing, OutcomeUnknown, StoreError, StoreUnavailable, StoreUnsuitable
from .base import Store
from .keys import PROBES, probe_key

_SIZE = 4096


def probe(store: Store) -> None:
    """Create an object twice under a new key, read it completely and in part, list it, and delete it (docs/protocol.md §8).

    Raises `StoreUnsuitable` if the second creation succeeds or changes anything, or if ranges or listings are wrong. (Some S3 servers
    accept `If-None-Match` and ignore it, so that two publishers would overwrite each other's commits.) Any other `StoreError` means that
    the check could not be made. The probe leaves nothing behind unless the deletion fails.

    Parameters
    ----------
    store
        The store to check.
    """
    key = probe_key(secrets.token_hex(16))
    first, second = secrets.token_bytes(_SIZE), secrets.token_bytes(_SIZE)
    try:
        _check_creation(store, key, first, second)
        _check_reading(store, key, first)
        _check_listing(store, key)
    finally:
        with contextlib.suppress(StoreError):  # a leftover is harmless, and not every writer may delete
            store.delete([key])


def _check_creation(store: Store, key: str, first: bytes, second: bytes) -> None:
    doubt: OutcomeUnknown | None = None
    try:
        store.put_if_absent(key, first)
    except ObjectExists:
        pass  # the key is new, so this is our own object after a retry; the read below decides
    except OutcomeUnknown as error:
        doubt = error
    try:
        store.put_if_absent(key, second)
    except ObjectExists:
        pass
    except OutcomeUnknown as error:
        raise StoreUnavailable(f"probe of {store.url} failed: the second creation of {key!r} had no clear outcome.") from error
    else:
        if doubt is not None:  # the first creation may not have happened
            raise StoreUnavailable(f"probe of {store.url} failed: the creation of {key!r} had no clear outcome.") from doubt
        raise StoreUnsuitable(f"{store.url} created {key!r} twice: it ignores the condition that the name be new.")
    try:
        found = store.get(key, limit=_SIZE)
    except (ObjectMissing, LimitExceeded) as error:
        raise StoreUnsuitable(f"{store.url} does not give back {key!r} right after it was created.") from error
    if found != first:
        raise StoreUnsuitable(f"{store.url} reported that {key!r} exists, but overwrote it.")


def _check_reading(store: Store, key: str, first: bytes) -> None:
    start, part = _SIZE // 3, bytearray(_SIZE // 3)
    try:
        store.read_into(key, memoryview(part), offset=start)
    except StoreUnavailable:
        raise
    except (StoreError, DataDamaged) as error:
        raise StoreUnsuitable(f"{store.url} cannot read a range of {key!r}: {error}") from error
    if part != first[start : start + len(part)]:
        raise StoreUnsuitable(f"{store.url} returns wrong bytes for a range of {key!r}.")


def _check_listing(store: Store, key: str) -> None:
    if not any(info.key == key and info.size == _SIZE for info in store.list(PROBES, after=key[:-1])):
        raise StoreUnsuitable(f"{store.url} does not list {key!r} right after it was created.")
