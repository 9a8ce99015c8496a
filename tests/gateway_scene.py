"""A gateway and engines in this process, each on a thread with its own event loop and a real port."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deltawire.events import Event
from deltawire.format.feedback import FeedbackFile
from deltawire.format.interactions import Interactions
from deltawire.gateway import GatewayOptions, serve_gateway
from deltawire.gateway.options import EngineAddress
from deltawire.gateway.recording.journal import Journal
from deltawire.store import Store
from deltawire.store.live_keys import FEEDBACK, INTERACTIONS
from deltawire.testing.faulty_store import Before, FaultyStore


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, f"the wait timed out: {what}"
        time.sleep(0.005)


@contextlib.contextmanager
def serving(serve: Callable[..., None], *arguments: Any, **options: Any) -> Iterator[str]:
    """Run a server on a thread, and yield its address."""
    ready, stop = threading.Event(), threading.Event()
    found: list[Any] = []

    def on_ready(address: str) -> None:
        found.append(address)
        ready.set()

    def run() -> None:
        try:
            serve(*arguments, stop=stop, on_ready=on_ready, **options)
        except BaseException as error:
            found.append(error)
            if ready.is_set():
                raise
            ready.set()

    thread = threading.Thread(target=run, name="server of a test")
    thread.start()
    ready.wait()
    try:
        if isinstance(found[0], BaseException):
            raise found[0]
        yield found[0]
    finally:
        stop.set()
        thread.join()


class Scene:
    """A gateway that is being tested."""

    def __init__(self, store: Store, url: str, events: list[Event]) -> None:
        self.store, self.url, self.events = store, url, events

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any, dict[str, str]]:
        """Return status, body and headers of the answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json", **(headers or {})})
        return ask(request)

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any, dict[str, str]]:
        return ask(urllib.request.Request(self.url + path, headers=headers or {}))

    def chat(self, content: str = "w1 w2", headers: dict[str, str] | None = None, **fields: Any) -> tuple[int, Any, dict[str, str]]:
        body = {"model": "policy", "messages": [{"role": "user", "content": content}], "max_tokens": 6, **fields}
        return self.post("/v1/chat/completions", body, headers)

    def interactions(self) -> list[Interactions]:
        return stored_interactions(self.store)

    def ids(self) -> list[str]:
        return [one.id for file in self.interactions() for one in file.interactions]

    def wait_for(self, *ids: str) -> None:
        """Return when these interactions are in the store."""
        wait_until(lambda: set(ids) <= set(self.ids()), f"interactions {ids}")

    def names(self) -> list[str]:
        return [event.name for event in self.events]


def ask(request: urllib.request.Request) -> tuple[int, Any, dict[str, str]]:
    try:
        with urllib.request.urlopen(request) as response:
            status, data, headers = response.status, response.read(), response.headers
    except urllib.error.HTTPError as error:
        with error:
            status, data, headers = error.code, error.read(), error.headers
    is_json = str(headers.get("content-type", "")).startswith("application/json")
    return status, json.loads(data) if is_json else data, {name.lower(): value for name, value in headers.items()}


def rows_of(journal: Journal, row_log: int) -> list[dict[str, Any]]:
    """Return the rows of a row log."""
    return [row for part in journal.parts(row_log) for row in part]


def stored_interactions(store: Store) -> list[Interactions]:
    return [Interactions.parse(store.get(info.key, limit=1 << 26)) for info in sorted(store.list(INTERACTIONS), key=lambda info: info.key)]


def stored_feedback(store: Store) -> list[FeedbackFile]:
    return [FeedbackFile.parse(store.get(info.key, limit=1 << 20)) for info in sorted(store.list(FEEDBACK), key=lambda info: info.key)]


class AwayStore(FaultyStore):
    """A store whose puts of some keys fail while `is_away` is true."""

    def __init__(self, inner: Store, prefix: str) -> None:
        self.is_away = True
        super().__init__(
            inner, [Before(lambda call: self.is_away and call.op == "put" and call.key.startswith(prefix), "unavailable", None)]
        )


@contextlib.contextmanager
def gateway(store: Store, folder: Path, *engines: str, **options: Any) -> Iterator[Scene]:
    """Run a gateway in front of engines."""
    events: list[Event] = []
    settings = {"journal": folder / "journal", "probe": 0.02, "flush": 0.02, "patience": 120.0, **options}
    made = GatewayOptions([EngineAddress.parse(engine) for engine in engines], **settings)
    with serving(serve_gateway, store, made, on_event=events.append) as url:
        yield Scene(store, url, events)
