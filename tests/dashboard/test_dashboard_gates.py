"""The evidence of gates on the page, live traffic beside it, and both in a real browser."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gated_chain import POLICY, Answered, GatedChain
from real_browser import Browser
from shown_run import MARKUP

from deltawire import ReaderOptions, SigningKey
from deltawire.dashboard import Observer, ObserverOptions, write_report
from deltawire.dashboard import gates_scan as scan_module
from deltawire.dashboard.server import DashboardServer
from deltawire.format.feedback import Feedback
from deltawire.format.records.gate_records import EvaluationResult
from deltawire.live.gate_rules import GatePolicy, Limit
from deltawire.store import live_keys

KEY = SigningKey.generate()
LIMITS = (Limit.parse("solved:-0.01", must_hold=True), Limit.parse("length:+20%", must_hold=False))


@pytest.fixture
def chain() -> GatedChain:
    return GatedChain()


def seen(chain: GatedChain) -> dict[str, Any]:
    with Observer(chain.store) as observer:
        observer.look(raising=True)
        return observer.sections()


def test_the_evidence_of_a_gate_is_shown_with_its_test_and_its_decision(chain: GatedChain) -> None:
    policy = dataclasses.replace(POLICY, limits=LIMITS)
    chain.gate(policy).look()
    with Observer(chain.store) as observer:
        observer.look()
        (found,) = observer.sections()["gates"]
        assert (found["channel"], found["move"], found["version"], found["stable"], found["stable_version"]) == (
            "canary",
            0,
            3,
            "stable",
            2,
        )
        assert (found["outcome"], found["number"], found["problem"]) == ("continue", 0, None)
        chain.traffic(0.9, 0.4)
        chain.gate(policy).look()
        observer.look()
        sections = observer.sections()
    (found,) = sections["gates"]
    assert (found["outcome"], found["number"], found["alpha"]) == ("promote", 1, 0.05)
    assert found["answers"] > 100
    solved, length = found["limits"]
    assert (solved["limit"], solved["must_hold"], solved["verdict"], solved["threshold"], solved["is_upper"]) == (
        "solved:-0.01",
        True,
        "holds",
        -0.01,
        False,
    )
    assert solved["low"] > solved["threshold"]
    assert solved["canary"][1] > solved["stable"][1]
    assert (length["threshold"], length["is_upper"], length["must_hold"]) == (0.0, True, False)
    stable = next(one for one in sections["channels"] if one["name"] == "stable")
    assert [move["kind"] for move in stable["moves"]] == ["promote", "promote"], "its promotion is shown with the channels"


def test_a_rollback_and_its_evaluation_are_shown(chain: GatedChain) -> None:
    class Failing:
        terms = None

        def start(self, *_: object) -> None: ...

        def stop(self) -> None: ...

        def poll(self) -> EvaluationResult:
            return EvaluationResult(False, 1, "too low", {"accuracy": 0.5})

    gate = chain.gate(GatePolicy(evaluate=True), evaluator=Failing())
    gate.look()
    gate.look()
    sections = seen(chain)
    (found,) = sections["gates"]
    assert found["outcome"] == "rollback"
    assert found["evaluation"] == {"passed": False, "attempts": 1, "why": "too low", "scores": [["accuracy", 0.5]]}
    assert any("The channel canary was rolled back to version 2" in fault["text"] for fault in sections["faults"])


def test_evidence_that_cannot_be_used_is_a_fault_until_it_is_repaired(chain: GatedChain) -> None:
    chain.gate().look()
    key = live_keys.gate_key("canary", 0, 0)
    good = chain.store.get(key, limit=1 << 16)
    other = chain.records()[0]
    forged = dataclasses.replace(other, canary=dataclasses.replace(other.canary, target=other.stable.target))
    with Observer(chain.store) as observer:
        for bad in (b"{", b'{"why": "' + b"x" * 1000 + b'"}', forged.to_bytes(), dataclasses.replace(other, number=7).to_bytes()):
            chain.store.put(key, bad)
            observer.look(raising=True)
            (found,) = observer.sections()["gates"]
            assert found["problem"], bad
            assert any("evidence about move 0 of the channel canary" in fault["text"] for fault in observer.sections()["faults"])
        chain.store.put(key, good)
        observer.look()
        assert observer.sections()["gates"][0]["outcome"] == "continue"
        assert observer.sections()["faults"] == []


def test_evidence_that_no_trusted_key_signed_is_a_fault() -> None:
    chain = GatedChain(key=KEY)
    chain.gate().look()
    reading = ReaderOptions(trusted_keys=[KEY.public])
    with Observer(chain.store, ObserverOptions(reading)) as observer:
        observer.look()
        assert observer.sections()["gates"][0]["problem"] is None
        forged = dataclasses.replace(chain.records()[0], number=1, outcome="promote", signature=None)
        chain.store.put(live_keys.gate_key("canary", 0, 1), forged.to_bytes())
        observer.look()
        assert "is not signed" in observer.sections()["gates"][0]["problem"]


def test_canaries_are_read_up_to_a_limit_and_a_look_without_news_reads_little(chain: GatedChain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "MOST_CANARIES", 2)
    for version in (4, 5, 6):
        chain.gate().look()
        chain.promote(version, "canary")
    chain.gate().look()
    with Observer(chain.store) as observer:
        observer.look()
        assert [(one["move"], one["version"]) for one in observer.sections()["gates"]] == [(3, 6), (2, 5)]
        before = len(chain.store.calls)
        observer.look()
        asked = [call.op for call in chain.store.calls[before:] if call.key.startswith(live_keys.GATES)]
        assert asked == ["list"] * 3


def test_a_limit_that_nobody_can_parse_is_shown_without_its_threshold(chain: GatedChain) -> None:
    chain.gate().look()
    record = chain.records()[0]
    odd = dataclasses.replace(record, limits=(dataclasses.replace(record.limits[0], limit="x:+-", low=-1e308, high=1e308),))
    chain.store.put(live_keys.gate_key("canary", 0, 0), odd.to_bytes())
    (found,) = seen(chain)["gates"]
    assert (found["problem"], found["limits"][0]["high"]) == (None, 1e308)


@pytest.fixture
def served(chain: GatedChain) -> Iterator[DashboardServer]:
    """Serve the run. Tests call `look` themselves."""
    with Observer(chain.store) as observer:
        observer.look()
        server = DashboardServer(observer)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.close()
        thread.join()


HIDDEN = "return document.getElementById('{0}').hidden"
FITS = "return document.documentElement.scrollWidth <= window.innerWidth"


def busy(chain: GatedChain) -> None:
    """Let the run have traffic of several minutes, feedback, and evidence with markup."""
    chain.gate(dataclasses.replace(POLICY, limits=LIMITS)).look()
    record = chain.records()[0]
    limits = tuple(dataclasses.replace(each, low=-0.5, high=0.25) for each in record.limits)
    odd = dataclasses.replace(limits[0], limit=MARKUP, low=-1e308, high=1e308)
    marked = dataclasses.replace(
        record, number=1, why=MARKUP, limits=(*limits, odd), evaluation=EvaluationResult(None, 2, MARKUP, {"a": 1.0})
    )
    chain.store.put_if_absent(live_keys.gate_key("canary", 0, 1), marked.to_bytes())
    for number in range(14):
        chain.pass_time(60)
        chain.answer([Answered("canary", 3, True), Answered("stable", 2, False), Answered(f"channel-{number}", 2)])
    (first,) = chain.answer([Answered(None, 2)])
    chain.put_feedback(
        [Feedback(chain.new_id(), MARKUP, "fine", inference=first), Feedback(chain.new_id(), "solved", 1.0, inference=first)]
    )


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_shows_traffic_and_gates_and_follows_them(
    chain: GatedChain, served: DashboardServer, browser: Browser, width: int, dark: bool
) -> None:
    browser.open(served.url, width=width, dark=dark)
    assert browser.run(HIDDEN.format("traffic-card"))
    assert browser.run(HIDDEN.format("gates-card"))
    busy(chain)
    for _ in range(2):
        assert served.observer.look()
    browser.until("return document.querySelectorAll('#traffic tbody tr').length === 12")
    browser.run("document.querySelector('#traffic button.more').click()")
    assert browser.run("return document.querySelectorAll('#traffic tbody tr').length") == 17
    assert "version 3" in browser.text("traffic")
    assert browser.run("return document.querySelectorAll('#traffic-times rect').length") > 20
    assert MARKUP in browser.text("feedback")
    assert "solved" in browser.text("feedback")
    assert MARKUP in browser.text("gates")
    assert "not decided yet" in browser.text("gates")
    assert browser.run("return document.querySelectorAll('#gates svg.interval .limit').length") == 2
    assert browser.run("return window.harmed") is None
    assert browser.run(FITS)
    browser.shoot(f"live-{width}")
    chain.traffic(0.9, 0.4)
    chain.gate(dataclasses.replace(POLICY, limits=LIMITS)).look()
    for _ in range(16):
        served.observer.look()
    browser.until("return document.getElementById('gates').textContent.includes('promoted')")
    assert browser.complaints() == []


def test_a_report_shows_traffic_and_gates_too(chain: GatedChain, browser: Browser, tmp_path: Path) -> None:
    busy(chain)
    with Observer(chain.store) as observer:
        observer.look()
        write_report(observer, tmp_path / "run.html")
    browser.open(f"file://{tmp_path}/run.html")
    assert "version 3" in browser.text("traffic")
    assert MARKUP in browser.text("gates")
    assert browser.run("return window.harmed") is None
