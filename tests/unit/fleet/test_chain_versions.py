"""Test the history of versions on chains that contradict themselves."""

from __future__ import annotations

import pytest
from toy_chain import ToyChain, first_state

from deltawire.chain.log import ChainLog
from deltawire.errors import ChainBroken
from deltawire.fleet.chain_versions import ChainVersions
from deltawire.format.records.run_records import Epoch
from deltawire.store import keys
from deltawire.store.memory import MemoryStore


@pytest.mark.parametrize("resumed_from", [1, 2])
def test_an_epoch_that_resumed_itself_is_refused_and_not_walked_in_a_circle(resumed_from: int) -> None:
    chain = ToyChain(MemoryStore())
    chain.anchor(first_state())
    chain.delta()
    chain.store.put(keys.epoch_key(1), Epoch(chain.run.id, 1, "0" * 32, 0, resumed_from).to_bytes())
    with pytest.raises(ChainBroken):
        ChainVersions(ChainLog(chain.store)).find(0)
