"""Every reader gives right weights or a named error for changed chains with correct hashes (tests/chain_fuzz.py, docs/fuzzing.md)."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from pathlib import Path

import chain_fuzz
import pytest
from chain_drafts import handmade_chain
from chain_readers import check_weights
from toy_chain import ToyChain, first_state

from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import DataMissing
from deltawire.store import Store, keys
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber

SEEDS = [*range(1, 17), 28, 69, 217, 428]
"""The last two seeds once found a mirror that looped forever, and a history that contained a loop."""


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    """End the process with a traceback if a reader neither ends nor calls the store."""
    faulthandler.dump_traceback_later(chain_fuzz.SECONDS * 2, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def test_everything_reads_the_sound_chain(tmp_path: Path) -> None:
    outcomes: dict[str, int] = {}
    assert chain_fuzz.try_seed(0, tmp_path, outcomes) == []
    assert outcomes == {"succeeded": len(chain_fuzz.READERS)}


def test_everything_reads_a_sound_chain_with_file_lists(tmp_path: Path) -> None:
    objects, _ = handmade_chain(listed=True)
    assert sum(b'"list":{' in data for data in objects.values()) == 4
    for number, read in enumerate(chain_fuzz.READERS):
        store = MemoryStore()
        for key, data in objects.items():
            store.put(key, data)
        folder = tmp_path / str(number)
        folder.mkdir()
        read(store, folder)


def test_every_reader_of_a_hostile_chain_has_right_weights_or_a_named_error(tmp_path: Path) -> None:
    outcomes: dict[str, int] = {}
    findings = [str(finding) for seed in SEEDS for finding in chain_fuzz.try_seed(seed, tmp_path, outcomes)]
    assert not findings, "\n".join(findings)
    assert min(outcomes.get(each, 0) for each in ("succeeded", "CorruptRecord", "ChainBroken", "DataMissing")) > 0


def forever(store: Store, folder: Path) -> None:
    while True:
        store.get(keys.RUN, limit=1 << 16)


def clumsy(store: Store, folder: Path) -> None:
    raise KeyError("kind")


def greedy(store: Store, folder: Path) -> None:
    bytearray(chain_fuzz.MEMORY * 2)


def mistaken(store: Store, folder: Path) -> None:
    with Subscriber(store, options=ReaderOptions(pin=False)) as subscriber:
        version = subscriber.sync()
        state = {name: array.copy() for name, array in subscriber.state.items()}
        state["d.norm"].reshape(-1)[3] ^= 1
        check_weights(state, version.digest)


def stopped(store: Store, folder: Path) -> None:
    raise DataMissing("an error with a name is no finding")


def test_readers_that_hang_break_take_memory_or_have_wrong_weights_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_fuzz, "READERS", [forever, clumsy, greedy, mistaken, stopped])
    found = {finding.reader: finding.trace.splitlines()[-1] for finding in chain_fuzz.try_seed(0, tmp_path)}
    assert list(found) == ["forever", "clumsy", "greedy", "mistaken"]
    kinds = ["TooManyCalls", "KeyError", "MemoryError", "WrongWeights"]
    assert all(kind in last for kind, last in zip(kinds, found.values(), strict=True))


def test_a_skip_that_leads_back_is_passed_over() -> None:
    """All readers that look for shortcuts see it, because they list the names."""
    chain = ToyChain(MemoryStore())
    chain.anchor(first_state())
    chain.grow(20)
    chain.store.put(f"{keys.SKIPS}{7:020}-{17:020}.json", b"{}")
    with Subscriber(chain.store, options=ReaderOptions(pin=False)) as subscriber:
        subscriber.sync(seq=1)
        assert subscriber.sync().seq == 21
    assert keys.parse_skip_key(keys.skip_key(7, 17)) is None
    assert keys.parse_skip_key(keys.skip_key(17, 7)) == (17, 7)
