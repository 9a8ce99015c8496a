"""Relays that are published in a run: where copies of the chain are, for readers that want to know."""

from __future__ import annotations

import itertools
from urllib.parse import parse_qs, urlsplit

from ...errors import BadUrl, CorruptRecord, LimitExceeded, ObjectMissing, UnsupportedVersion
from ...format.records.canonical import MAX_RECORD_BYTES
from ...format.records.relay_records import PublishedRelay
from ...format.records.run_records import Run
from ...store import keys
from ...store.base import Store
from ...store.urls import check_url

MOST = 64
"""Most published relays that a reader looks at."""

_REMOTE = ("s3", "gs", "az", "hf")


def publish_relay(store: Store, run: Run, name: str, url: str) -> None:
    """Say where a copy of the chain is. Replaces what was published under this name. Raises `BadUrl` if readers would not use it."""
    if not may_use(url, store.url):
        raise BadUrl(f"{url!r} cannot be published: readers use only s3://, gs://, az:// and hf:// without an endpoint.")
    store.put(keys.relay_key(name), PublishedRelay(run.id, name, url).to_bytes(), durable=False)


def remove_relay(store: Store, name: str) -> None:
    """Publish no longer what was published under this name."""
    store.delete([keys.relay_key(name)])


def published_relays(store: Store) -> list[str]:
    """Return the locations of copies that are published in a run and that a reader may use. Other objects in that folder are ignored.

    Raises the errors of the store, and nothing because of what anybody has put there.
    """
    found: list[str] = []
    run = Run.parse(store.get(keys.RUN, limit=MAX_RECORD_BYTES))
    for info in itertools.islice(store.list(keys.RELAYS), MOST):
        name = keys.parse_relay_key(info.key)
        if name is None:
            continue
        try:
            record = PublishedRelay.parse(store.get(info.key, limit=MAX_RECORD_BYTES))
        except (ObjectMissing, CorruptRecord, UnsupportedVersion, LimitExceeded):
            continue
        if record.id == run.id and record.name == name and may_use(record.url, store.url):
            found.append(record.url)
    return list(dict.fromkeys(found))


def may_use(url: str, origin: str) -> bool:
    """Return whether a reader may open a published location.

    Anybody who can write to the origin can publish one. So a location must not name a server, which would get the reader's requests, or a
    directory of the reader's machine, unless the origin is a directory, too.
    """
    try:
        check_url(url)
        parts = urlsplit(url)
    except (BadUrl, ValueError):
        return False
    if parts.scheme == "file":
        return urlsplit(origin).scheme == "file"
    return parts.scheme in _REMOTE and "endpoint" not in parse_qs(parts.query)
