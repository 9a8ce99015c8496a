"""Test the options that every reader of a chain takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_chain import ToyChain, first_state

import deltawire
from deltawire import ReaderOptions
from deltawire.errors import ChainStale, RunMismatch
from deltawire.store import keys
from deltawire.store.memory import MemoryStore
from deltawire.testing import FaultyStore


def test_one_key_instead_of_a_list_of_keys_is_refused():
    with pytest.raises(TypeError, match=r"pass \[key\]"):
        ReaderOptions(trusted_keys="ab" * 32)


@pytest.mark.parametrize("key", ["zz", "ab" * 31, "AB" * 32, "ab" * 32 + "\n", "trusted.keys"])
def test_a_key_that_is_none_is_refused_before_the_chain_is_read(key):
    with pytest.raises(ValueError, match="is not a public key: that has 64 hexadecimal digits"):
        ReaderOptions(trusted_keys=["ab" * 32, key])


def test_pull_honours_every_option(tmp_path: Path):
    chain = ToyChain(MemoryStore())
    chain.anchor(first_state())
    chain.grow(1)
    with pytest.raises(RunMismatch):
        deltawire.pull(chain.store, tmp_path / "out", options=ReaderOptions(run="another"))
    with pytest.raises(ChainStale):
        deltawire.pull(chain.store, tmp_path / "out", options=ReaderOptions(max_silence=0.0, pin=False))
    assert not (tmp_path / "out").exists()
    store = FaultyStore(chain.store)
    deltawire.pull(store, tmp_path / "out", options=ReaderOptions(reader="me"))
    assert keys.pin_key("me") in {call.key for call in store.calls if call.op == "put"}


def test_keys_of_an_iterator_are_kept():
    keys = ["aa" * 32, "bb" * 32]
    assert ReaderOptions(trusted_keys=iter(keys)).trusted_keys == set(keys)
