"""Test the picture that `deltawire log` draws, and which commits it marks as void or abandoned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy_chain import ToyChain, first_state

from deltawire.chain.log import ChainLog
from deltawire.cli.chain_history import read_history
from deltawire.cli.output import figures
from deltawire.cli.output.chain_picture import draw, glyph
from deltawire.errors import ChainBroken
from deltawire.store import keys, open_store


@pytest.fixture
def chain(tmp_path: Path) -> ToyChain:
    """Return a chain of a fence, a checkpoint and eight deltas. A second writer rewinds to version 7 and adds two deltas."""
    chain = ToyChain(open_store(tmp_path))
    chain.anchor(first_state())
    chain.grow(8)
    chain.add_skip(5, 1)
    chain.add_skip(9, 5)
    chain.add_anchor(5)
    chain.claim(2)
    chain.rewind(7)
    chain.grow(2)
    return chain


def test_every_kind_of_commit_has_a_glyph_of_its_own() -> None:
    glyphs = [glyph(kind) for kind in ("fence", "anchor", "delta", "rewind")]
    assert len({*glyphs, glyph("delta", void=True), glyph("delta", anchored=True)}) == 6


def test_skips_are_drawn_under_what_they_bridge() -> None:
    assert draw(0, "╪■·······", [(5, 1), (9, 5)], 20) == [
        "0 ╪■·······",
        "   ╰───┴───",
    ]


def test_a_long_chain_is_broken_into_labelled_lines() -> None:
    assert draw(7, "··········", [(11, 7), (15, 11), (15, 3)], 6) == [
        " 7 ······",
        "   ╰───┴─",
        "   ──────",
        "13 ····",
        "   ──╯",
        "   ──╯",
    ]


def test_skips_that_overlap_are_drawn_on_lines_of_their_own() -> None:
    lines = draw(0, "·" * 9, [(4, 0), (6, 2), (8, 4)], 20)
    assert lines[1:] == ["  ╰───┴───╯", "    ╰───╯"]


def test_abandoned_versions_and_shortcuts_are_found(chain: ToyChain) -> None:
    history = read_history(ChainLog(chain.store), None, by_commits=True)
    assert [entry.commit.seq for entry in history.entries] == list(range(14))
    assert [entry.commit.seq for entry in history.entries if entry.abandoned] == [8, 9]
    assert [entry.commit.seq for entry in history.entries if entry.anchored] == [5]
    assert history.skips == [(5, 1), (9, 5)]
    assert not any(entry.void or entry.collected for entry in history.entries)


def test_versions_are_counted_without_what_makes_none(chain: ToyChain) -> None:
    history = read_history(ChainLog(chain.store), None)
    assert [entry.commit.kind for entry in history.entries] == ["anchor", *["delta"] * 8, "rewind", *["delta"] * 2]
    assert [history.label(entry.commit.seq) for entry in history.entries] == list(range(1, 13))
    assert history.skips == [(5, 1), (9, 5)]


@pytest.mark.parametrize("by_commits", [False, True])
@pytest.mark.parametrize("count", [1, 3, 13, 14, 100])
def test_the_last_ones_look_the_same_as_in_the_whole(chain: ToyChain, count: int, by_commits: bool) -> None:
    log = ChainLog(chain.store)
    whole = read_history(log, None, by_commits=by_commits)
    assert read_history(log, count, by_commits=by_commits).entries == whole.entries[-count:]


def test_a_writer_that_was_fenced_off_leaves_void_commits(chain: ToyChain) -> None:
    chain.epoch = 1
    zombie = chain.delta()
    del chain.commits[-1], chain.states[-1]  # the new writer ignores it
    assert [entry.void for entry in read_history(ChainLog(chain.store), 1, by_commits=True).entries] == [True]
    assert [entry.commit.seq for entry in read_history(ChainLog(chain.store), None, by_commits=True).entries if entry.void] == [zombie.seq]


def test_few_records_are_read_of_a_long_chain(chain: ToyChain, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    get = chain.store.get
    monkeypatch.setattr(chain.store, "get", lambda key, **more: read.append(key) or get(key, **more))
    read_history(ChainLog(chain.store), 2, by_commits=True)
    assert sorted(set(read) & {keys.commit_key(seq) for seq in range(14)}) == [keys.commit_key(seq) for seq in (11, 12, 13)]


def test_a_commit_that_was_replaced_is_noticed(chain: ToyChain) -> None:
    record = json.loads(chain.commits[12].to_bytes()) | {"step": 7}
    chain.store.put(keys.commit_key(12), json.dumps(record, sort_keys=True, separators=(",", ":")).encode())
    with pytest.raises(ChainBroken):
        read_history(ChainLog(chain.store), 5, by_commits=True)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0.0 s"), (0.44, "0.4 s"), (59, "59 s"), (60, "1 min"), (3_599, "60 min"), (15_000, "4.2 h"), (86_400, "1.0 d"), (10**6, "12 d")],
)
def test_durations_have_two_digits_or_so(seconds: float, text: str) -> None:
    assert figures.duration(seconds) == text
