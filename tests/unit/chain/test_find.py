"""Users find versions by their number (1, 2, 3, …) and by their step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from toy_chain import ToyChain, first_state

from deltawire.chain.find import find_step, find_version, version_number
from deltawire.chain.log import ChainLog
from deltawire.errors import ChainBroken, NoChain, VersionUnknown
from deltawire.store import keys, open_store


@pytest.fixture
def chain(tmp_path: Path) -> ToyChain:
    """Return a chain as the command line writes it, with a fence before each version, a rewind, and a void commit at the end."""
    chain = ToyChain(open_store(tmp_path))
    chain.anchor(first_state())
    for epoch in range(2, 5):
        chain.claim(epoch)
        chain.grow(1)
    chain.grow(2)
    chain.claim(5)
    chain.rewind(5)
    chain.grow(1)
    chain.epoch = 3
    chain.delta()
    del chain.commits[-1], chain.states[-1]
    return chain


def test_numbers_count_versions_alone(chain: ToyChain) -> None:
    log = ChainLog(chain.store)
    versions = [commit for commit in chain.commits if commit.kind != "fence"]
    assert [find_version(log, number).seq for number in range(1, 9)] == [commit.seq for commit in versions]
    assert [version_number(log, commit.seq) for commit in versions] == list(range(1, 9))
    assert len({commit.seq for commit in versions}) < versions[-1].seq  # there are gaps between their seqs
    for number in (0, 9):
        with pytest.raises(VersionUnknown, match="versions 1 to 8"):
            find_version(log, number)


def test_a_long_chain_is_searched_with_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = ToyChain(open_store(tmp_path))
    chain.anchor(first_state())
    for epoch in range(2, 9):
        chain.grow(20)
        chain.claim(epoch)
    read: list[str] = []
    get = chain.store.get
    monkeypatch.setattr(chain.store, "get", lambda key, **more: read.append(key) or get(key, **more))
    assert find_version(ChainLog(chain.store), 50).updates == 50
    assert len(set(read)) < 60


def test_steps_are_those_of_the_history_in_force(tmp_path: Path) -> None:
    chain = ToyChain(open_store(tmp_path))
    chain.anchor(first_state())
    chain.grow(4)  # the rewind below abandons all versions after the second
    steps = {commit.step: commit for commit in chain.commits if commit.step is not None}
    assert len(steps) >= 4
    log = ChainLog(chain.store)
    for step, commit in steps.items():
        assert find_step(log, step).seq == commit.seq
    kept, lost = chain.commits[2], chain.commits[4]
    chain.claim(2)
    chain.rewind(kept.seq)
    assert find_step(ChainLog(chain.store), kept.step).digest == kept.digest
    with pytest.raises(VersionUnknown, match=f"step {lost.step}"):
        find_step(ChainLog(chain.store), lost.step)


def test_a_chain_that_counts_wrongly_is_refused(tmp_path: Path) -> None:
    chain = ToyChain(open_store(tmp_path))
    chain.anchor(first_state())
    chain.claim(2)
    last = chain.delta()
    chain.store.put(keys.commit_key(last.seq), dataclasses.replace(last, updates=3).to_bytes())
    with pytest.raises(ChainBroken, match="is counted as version 3, where version 2"):
        find_version(ChainLog(chain.store), 2)


def test_where_nothing_is_published_nothing_is_found(tmp_path: Path) -> None:
    chain = ToyChain(open_store(tmp_path))
    for find in (find_version, find_step):
        with pytest.raises(NoChain):
            find(ChainLog(chain.store), 1)
