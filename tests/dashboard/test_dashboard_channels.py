"""Channels are labels in the chain, with their moves; one that cannot be followed is shown as such, and reading them is bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_browser import Browser
from shown_run import MARKUP, ShownRun

from deltawire.chain.find import find_version
from deltawire.chain.log import ChainLog
from deltawire.dashboard import Observer
from deltawire.dashboard import channels_scan as scan_module
from deltawire.dashboard.server import DashboardServer
from deltawire.publish.channels import ChannelWriter, Reason
from deltawire.store import keys


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ShownRun]:
    shown = ShownRun(tmp_path / "run")
    for _ in range(5):
        shown.publish()
    yield shown
    shown.close()


def promote(run: ShownRun, channel: str, version: int, why: str = "", share: int | None = None) -> None:
    log = ChainLog(run.store)
    ChannelWriter(log, channel).promote(find_version(log, version), share=share, reason=Reason(why, "a person"))


def rollback(run: ShownRun, channel: str, why: str) -> None:
    ChannelWriter(ChainLog(run.store), channel).rollback(reason=Reason(why, "a person"))


def test_a_channel_has_its_moves_the_newest_first(run: ShownRun) -> None:
    promote(run, "stable", 2)
    promote(run, "canary", 3, share=50_000)
    with Observer(run.store) as observer:
        observer.look()
        assert [(one["name"], one["moves"][0]["version"]) for one in observer.sections()["channels"]] == [("canary", 3), ("stable", 2)]
        assert observer.sections()["channels"][0]["moves"][0]["share"] == 0.05
        promote(run, "stable", 4, MARKUP)
        rollback(run, "stable", "worse answers")
        observer.look()
        sections = observer.sections()
    stable = sections["channels"][1]
    assert [(move["kind"], move["version"]) for move in stable["moves"]] == [("rollback", 2), ("promote", 4), ("promote", 2)]
    assert stable["moves"][1]["why"] == MARKUP
    assert stable["problem"] is None
    assert [fault["text"] for fault in sections["faults"]] == ["The channel stable was rolled back to version 2: worse answers"]


def test_a_corrupt_move_is_a_fault_until_it_is_repaired(run: ShownRun) -> None:
    promote(run, "stable", 2)
    promote(run, "stable", 3)
    key = keys.channel_key("stable", 1)
    good = run.store.get(key, limit=1 << 16)
    run.store.put(key, b'{"why": "' + b"x" * 1000 + b'"}')
    run.store.put(keys.CHANNELS + "no-channel", b"")
    with Observer(run.store) as observer:
        observer.look()
        sections = observer.sections()
        assert [one["name"] for one in sections["channels"]] == ["stable"]
        assert "cannot be followed" in sections["faults"][0]["text"]
        assert sections["chain"]["version"] == 6, "everything else is shown as usual"
        run.store.put(key, good)
        for _ in range(scan_module._AGAIN_LOOKS):
            observer.look()
        assert observer.sections()["channels"][0]["moves"][0]["version"] == 3
        assert observer.sections()["faults"] == []


def test_a_target_of_another_history_is_a_fault(run: ShownRun) -> None:
    promote(run, "stable", 2)
    key = keys.channel_key("stable", 0)
    run.store.put(key, run.store.get(key, limit=1 << 16).replace(f'"seq":{run.seqs[1]}'.encode(), f'"seq":{run.seqs[2]}'.encode()))
    with Observer(run.store) as observer:
        observer.look()
        assert "which is another one" in observer.sections()["channels"][0]["problem"]


def test_channels_and_moves_are_read_up_to_a_limit(run: ShownRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "MOST_CHANNELS", 3)
    monkeypatch.setattr(scan_module, "MOST_MOVES", 2)
    for number in range(4):
        promote(run, f"c{number}", 1)
    for version in (2, 3, 4):
        promote(run, "c0", version)
    with Observer(run.store) as observer:
        observer.look()
        found = observer.sections()["channels"]
        assert [one["name"] for one in found] == ["c0", "c1", "c2"]
        assert [move["version"] for move in found[0]["moves"]] == [4, 3]
        before = observer.requests
        observer.look()
        assert observer.requests - before < 30


def test_the_page_shows_channels_as_labels_and_follows_them(run: ShownRun, browser: Browser) -> None:
    promote(run, "stable", 2, MARKUP)
    promote(run, "canary", 4, share=50_000)
    with Observer(run.store) as observer:
        observer.look()
        server = DashboardServer(observer)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            browser.open(server.url, width=390, dark=True)
            labels = "return [...document.querySelectorAll('svg text.channel')].map((one) => one.firstChild.textContent).join()"
            browser.until(f"{labels} === 'stable,canary'")
            assert MARKUP in browser.text("channels")
            assert browser.run("return window.harmed") is None
            promote(run, "stable", 4)
            promote(run, "canary", 6)
            observer.look()
            browser.until("return document.querySelectorAll('#channels tbody tr').length === 4")
            assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
            browser.shoot("channels-phone-dark")
            browser.run("document.querySelectorAll('#channels tbody button')[1].click()")
            browser.until(f"return document.querySelector('.column.chosen')?.dataset.seq === '{run.seqs[3]}'")
        finally:
            server.close()
            thread.join()
