"""Wait for files that a subscriber fetches before their commit exists, and announce without waiting for the clock."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from typing import Any

import pytest

from deltawire.publish.upload import announcer
from deltawire.publish.upload.announcer import Announcer
from deltawire.store import keys
from deltawire.store.wrapped import WrappedStore
from deltawire.subscribe import Subscriber


def look_and_arrive(subscriber: Subscriber) -> bool:
    """Let a subscriber look once, as `follow` does. Wait until what it fetches ahead has arrived, and let it be used."""
    has_news = subscriber._look()
    if subscriber._ahead._looking is not None:
        subscriber._ahead._looking.result()
    while subscriber._ahead.is_arriving:  # each fetch starts the next one before it counts as done
        wait(list(subscriber._ahead._files.values()))
    subscriber._use_ahead()
    return has_news


class Inline(Executor):
    """Runs each task at once, on the thread that submits it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def announce_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let publishers announce every file as soon as it is uploaded, before the upload counts as done, and upload one file after the other.

    So the calls of the store are the same every time.
    """
    from deltawire.publish import publisher

    begin = Announcer.__init__

    def init(self: Announcer, store: Any, pool: Any, *others: Any) -> None:
        begin(self, store, Inline(), *others)

    monkeypatch.setattr(announcer, "INTERVAL", 0.0)
    monkeypatch.setattr(publisher, "_STREAMS", 1)
    monkeypatch.setattr(Announcer, "__init__", init)


class BeforeCommits(WrappedStore):
    """A store that calls `action` before each commit is created."""

    action: Callable[[], object] | None = None

    def put_if_absent(self, key: str, data: bytes) -> None:
        if self.action is not None and keys.parse_commit_key(key) is not None:
            self.action()
        super().put_if_absent(key, data)
