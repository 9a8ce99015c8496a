"""Older commits are read a page at a time: checked like the newest ones, a bounded number of them, and again after the store changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from real_browser import Browser
from toy_chain import ToyChain, first_state

from deltawire.dashboard import Observer, ObserverOptions
from deltawire.dashboard.chain_pages import PAGE
from deltawire.dashboard.server import DashboardServer
from deltawire.errors import StoreUnavailable
from deltawire.store import keys
from deltawire.store.memory import MemoryStore
from deltawire.store.wrapped import StoreCall, WrappedStore

LENGTH = 700
REWOUND = (300, 310)
"""A rewind in the commit of the second number goes back to the first."""


class Watched(WrappedStore):
    """Notes which commits are read, and fails every call while `down` is set."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.read: list[int] = []
        self.down = False

    def watch(self, call: StoreCall) -> Any:
        if self.down:
            raise StoreUnavailable(f"{call.operation} of {call.key} failed.")
        seq = keys.parse_commit_key(call.key)
        if seq is not None and call.operation == "get":
            self.read.append(seq)
        return super().watch(call)


@pytest.fixture(scope="module")
def objects() -> dict[str, bytes]:
    """The objects of a chain of 700 commits, with a rewind and a few shortcuts."""
    store = MemoryStore()
    chain = ToyChain(store)
    chain.anchor(first_state())
    chain.grow(REWOUND[1] - 2)
    chain.rewind(REWOUND[0])
    chain.grow(LENGTH - 1 - REWOUND[1])
    chain.add_anchor(200)
    chain.add_skip(130, 120)
    chain.add_skip(260, 250)
    return {info.key: store.get(info.key, limit=1 << 20) for info in store.list("")}


@pytest.fixture
def store(objects: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Watched:
    """A copy of the chain, of which few samples are read, so that pages lie far from everything in memory."""
    monkeypatch.setattr("deltawire.dashboard.chain_scan.SAMPLES", 2)
    made = Watched()
    for key, data in objects.items():
        made.inner.put(key, data)
    return made


@pytest.fixture
def observer(store: Watched) -> Iterator[Observer]:
    with Observer(store, ObserverOptions(window=16)) as made:
        assert made.look()
        store.read.clear()
        yield made


def test_every_commit_is_on_a_page(observer: Observer) -> None:
    pages = [observer.commits(number)["entries"] for number in range(LENGTH // PAGE + 2)]
    assert [entry["seq"] for entries in pages for entry in entries] == list(range(LENGTH))
    assert all(entry["problem"] is None for entries in pages for entry in entries)
    assert [entry["version"] for entry in pages[1]] == list(range(PAGE, 2 * PAGE))
    assert pages[-1] == []
    assert observer.commits(10**18)["entries"] == []


def test_a_page_takes_a_bounded_number_of_reads_and_is_kept(observer: Observer, store: Watched) -> None:
    observer.commits(1)
    assert len(store.read) <= PAGE + 10
    store.read.clear()
    observer.commits(1)
    assert store.read == []


def test_a_page_shows_what_the_newest_commits_show(observer: Observer) -> None:
    found = observer.commits(1)
    assert [entry["seq"] for entry in found["entries"] if "anchored" in entry["flags"]] == [200]
    assert found["skips"] == [[130, 120]]
    abandoned = [entry["seq"] for entry in observer.commits(2)["entries"] if "abandoned" in entry["flags"]]
    assert abandoned == list(range(REWOUND[0] + 1, REWOUND[1]))


@pytest.mark.parametrize("seq", [PAGE, 200, 2 * PAGE - 1])
def test_a_commit_that_was_exchanged_is_found_on_every_place_of_a_page(observer: Observer, store: Watched, seq: int) -> None:
    data = store.inner.get(keys.commit_key(seq), limit=1 << 16)
    store.inner.put(keys.commit_key(seq), data.replace(f'"time":{1000 * seq},'.encode(), f'"time":{1000 * seq + 1},'.encode()))
    entries = observer.commits(1)["entries"]
    assert [entry["seq"] for entry in entries if entry["problem"] is not None] == [seq]
    assert "another than the one that later commits link to" in entries[seq - PAGE]["problem"]


def test_corrupt_and_missing_commits_are_entries_with_a_reason(observer: Observer, store: Watched) -> None:
    store.inner.put(keys.commit_key(140), b"x" * 100_000)
    store.inner.delete([keys.commit_key(150)])
    entries = observer.commits(1)["entries"]
    assert [entry["seq"] for entry in entries if entry["kind"] == "corrupt"] == [140, 150]


def test_a_store_that_goes_away_is_an_error_and_the_page_is_read_later(observer: Observer, store: Watched) -> None:
    store.down = True
    with pytest.raises(StoreUnavailable):
        observer.commits(0)
    with pytest.raises(StoreUnavailable):
        observer.commit_of(77)
    store.down = False
    assert len(observer.commits(0)["entries"]) == PAGE


def test_pages_of_a_store_that_was_set_back_are_read_again(observer: Observer, store: Watched) -> None:
    observer.commits(0)
    store.inner.delete([*(keys.commit_key(seq) for seq in range(400, LENGTH)), keys.HEAD])
    for _ in range(15):
        observer.look()
    store.read.clear()
    assert len(observer.commits(0)["entries"]) == PAGE
    assert len(store.read) >= PAGE - 20
    assert [entry["seq"] for entry in observer.commits(3)["entries"]] == list(range(384, 400))


def test_the_commit_of_a_version_is_found_by_few_reads(observer: Observer, store: Watched) -> None:
    assert observer.commit_of(77) == 77
    assert observer.commit_of(0) == 0
    assert observer.commit_of(10**18) == LENGTH - 1
    assert len(store.read) <= 3 * 10
    for seq in (349, 350):
        store.inner.put(keys.commit_key(seq), b"{}")
    assert observer.commit_of(500) == 500, "commits that cannot be read do not stop the search"


def click(element: str) -> str:
    return f"document.querySelector('{element}').dispatchEvent(new MouseEvent('click', {{bubbles: true, clientX: 300}}))"


def test_every_version_can_be_reached_in_the_page(observer: Observer, browser: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    server = DashboardServer(observer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        browser.open(server.url)
        shown = _shown(browser)
        assert shown()[-1] == LENGTH - 1
        browser.press(Keys.HOME)
        browser.until("return document.querySelector('.column.chosen')?.dataset.seq === '0' && !document.querySelector('.k-unread')")
        assert shown()[0] == 0
        browser.press(Keys.ARROW_RIGHT)
        browser.press(Keys.ENTER)
        browser.until("return document.getElementById('details-title').textContent === 'Version 1'")
        browser.press(Keys.ESCAPE)
        browser.press("g")
        browser.press("305" + Keys.ENTER)
        browser.until("return document.querySelector('.column.chosen')?.dataset.seq === '305' && !document.querySelector('.k-unread')")
        assert browser.run("return document.querySelectorAll('.column .faded').length") > 0, "abandoned versions are faint"
        assert browser.run("return document.querySelectorAll('.back').length") == 1
        browser.run(click("#chain-older"))
        browser.until("return !document.querySelector('.k-unread')")
        assert shown()[-1] < 305
        browser.run(click("#chain-newest"))
        browser.until(f"return [...document.querySelectorAll('.column')].pop().dataset.seq === '{LENGTH - 1}'")
        browser.run(click("#overview svg"))
        browser.until("return !document.querySelector('.k-unread') && Number(document.querySelector('.column.chosen').dataset.seq) < 300")
    finally:
        server.close()
        thread.join()


def _shown(browser: Browser) -> Callable[[], list[int]]:
    return lambda: [int(seq) for seq in browser.run("return [...document.querySelectorAll('.column')].map((one) => one.dataset.seq)")]


def test_the_page_says_that_older_versions_cannot_be_read_and_reads_them_later(
    observer: Observer, store: Watched, browser: Browser
) -> None:
    from selenium.webdriver.common.keys import Keys

    server = DashboardServer(observer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        browser.open(server.url)
        store.down = True
        browser.press(Keys.HOME)
        browser.until("return document.getElementById('chain-words').textContent.includes('could not be read')")
        assert browser.run("return document.querySelectorAll('.k-unread').length") > 0
        store.down = False
        browser.until("return !document.querySelector('.k-unread')")
        assert "could not be read" not in browser.text("chain-words")
    finally:
        server.close()
        thread.join()
    assert all("503" in line for line in browser.complaints()), "only the requests that failed are logged"
