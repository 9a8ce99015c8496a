"""The results of the live demo follow from what its processes report."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "live_demo"
pytest.importorskip("httpx", reason="users need httpx")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Import modules of the demo, and forget them afterwards: their names are common."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    path = list(sys.path)
    yield importlib.import_module
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(FOLDER.parent) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def story_of(releases: ModuleType, *, slow: float) -> object:
    """Return a run in which commit 3 was promoted, and commit 5 was damaged."""
    told = [
        {"event": "gate-decided", "at": 10.0, "seq": 3, "outcome": "promote"},
        {"event": "channel-moved", "at": 10.1, "channel": "stable", "kind": "promote", "seq": 3},
        {"event": "swapped", "at": 20.0, "channel": "canary", "engine": "canary-1", "seq": 5},
        {"event": "gate-decided", "at": 30.0, "seq": 5, "outcome": "rollback"},
        {"event": "swapped", "at": 30.2, "channel": "canary", "engine": "canary-1", "seq": 3},
        {"event": "channel-moved", "at": 30.1, "channel": "canary", "kind": "rollback", "seq": 3},
        {"event": "swapped", "at": slow, "channel": "canary", "engine": "canary-2", "seq": 3},
    ]
    return releases.Story(began=0.0, events=told, damaged_seq=5)


def test_the_slowest_engine_ends_the_rollback(load) -> None:  # type: ignore[no-untyped-def]
    releases, measure = load("releases"), load("measure")
    story = story_of(releases, slow=30.5)
    assert measure.rollback_seconds(story) == 0.5
    assert story.was_rolled_back
    assert not story.is_complete  # nothing was promoted afterwards
    assert measure.rollback_seconds(story_of(releases, slow=29.0)) is None  # one engine never followed


def test_ratings_are_averaged_by_loop(load) -> None:  # type: ignore[no-untyped-def]
    users, measure = load("users"), load("measure")
    given = [("stable", 1.0, 0.2), ("canary", 2.0, 0.4), ("open", 3.0, 0.9), ("stable", 7.0, 0.5)]
    reactions = [users.Reaction(100.0 + at, channel, "1", rating) for channel, at, rating in given]
    assert measure.curve(reactions, 100.0, {"stable", "canary"}) == [(2.5, pytest.approx(0.3)), (7.5, 0.5)]
    assert measure.curve(reactions, 100.0, {"open"}) == [(2.5, 0.9)]


def test_half_minutes_have_their_ratings_and_decisions(load) -> None:  # type: ignore[no-untyped-def]
    releases, users, measure = load("releases"), load("users"), load("measure")
    story = story_of(releases, slow=30.5)
    story.crowd = users.Crowd("http://127.0.0.1")
    given = [("stable", 1.0, 0.2), ("canary", 29.0, 0.4), ("open", 3.0, 0.1), ("stable", 61.0, 0.5)]
    story.crowd.reactions += [users.Reaction(at, channel, "1", rating) for channel, at, rating in given]
    assert measure.parts(story) == [
        {"from_seconds": 0.0, "answers": 3, "closed": pytest.approx(0.3), "open": 0.1, "decided": ["promote"]},
        {"from_seconds": 30.0, "answers": 0, "closed": None, "open": None, "decided": ["rollback"]},
        {"from_seconds": 60.0, "answers": 1, "closed": 0.5, "open": None, "decided": []},
    ]


def test_results_become_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER.parents[1] / "benchmarks"))
    tables_of = importlib.import_module("live_demo_table").tables_of
    parts = [
        {"from_seconds": 0.0, "answers": 1200, "closed": 0.5, "open": 0.4, "decided": ["promote", "rollback", "promote"]},
        {"from_seconds": 30.0, "answers": 0, "closed": None, "open": None, "decided": []},
    ]
    results = {"answers": 1200, "failed": 0, "promoted": 2, "rolled_back": 1, "damaged_rolled_back": True, "parts": parts}
    results |= {"reward": {"closed": 0.5, "open": 0.4}, "asked_seconds": 31.0, "last_seconds": 20.0}
    results |= {"feedback_to_release_seconds": 12.34, "rollback_seconds": None}
    figures, curve = tables_of(results)
    assert [row[1] for row in figures.rows] == ["1,200", "0", "2", "1", "0.50", "0.40", "12.3 s", "–"]
    assert [met for _, met in figures.checks] == [True, True, True]
    assert curve.rows == [["0 s", "1,200", "0.50", "0.40", "2 promoted, 1 rolled back"], ["30 s", "0", "–", "–", ""]]
    for change in ({"failed": 1}, {"damaged_rolled_back": False}, {"reward": {"closed": 0.4, "open": 0.4}}):
        assert [met for _, met in tables_of(results | change)[0].checks].count(False) == 1


def test_a_chart_is_well_formed(load) -> None:  # type: ignore[no-untyped-def]
    plots = load("plots")
    page = plots.Page("A <title>")
    page.add_chart(plots.Chart("x & y", {"a": [(0.0, 0.1), (5.0, 0.9)], "nothing": []}, 1.0, [(2.0, "promote")]))
    page.add_table("decisions", ["why"], [["1 < 2"]])
    text = page.html()
    picture = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    lines = picture.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines[0].attrib["points"].split()) == 2
    assert "A &lt;title&gt;" in text
    assert "1 &lt; 2" in text
