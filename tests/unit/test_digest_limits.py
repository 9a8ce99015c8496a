"""The state digest does not detect some changes, as docs/format.md §2 says, but the hash detects them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import CODECS, bits_of
from support import DIGEST_NEUTRAL as DIFFERENCE
from toy_chain import ToyChain, first_state

import deltawire
from deltawire.chain.reader_options import ReaderOptions
from deltawire.codec import using_codec
from deltawire.errors import DataDamaged
from deltawire.format.records.signing import SigningKey
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber

BLOCK = 256


def changed(array: Any, block: int, difference: Any) -> Any:
    """Return an array with a difference added to the first words of one block of 512 bytes."""
    new = array.copy()
    words = new.reshape(-1).view(np.int16)
    words[block * BLOCK : block * BLOCK + len(difference)] += np.array(difference, np.int16)
    return new


@pytest.mark.parametrize("codec", CODECS)
def test_a_difference_made_with_the_fixed_factors_does_not_change_the_digest(codec: str) -> None:
    """This works in any block of any tensor of any type, by two units in the last place or by thousands."""
    rng = np.random.default_rng(0)
    with using_codec(codec):
        for dtype in (ml_dtypes.bfloat16, np.float16, np.float32):
            weights, zeros = rng.normal(size=1200).astype(dtype), np.zeros(1200, dtype)
            for name, array, block, times in (("a", weights, 0, 1), ("a", weights, 1, 1), ("b", zeros, 3, 500), ("c.d", zeros, 2, -16_000)):
                new = changed(array, block, times * np.array(DIFFERENCE))
                assert new.tobytes() != array.tobytes()
                assert deltawire.state_digest({name: new}) == deltawire.state_digest({name: array})


def test_differences_made_without_the_factors_are_detected() -> None:
    """The test makes the same differences in another order."""
    state = {"a.weight": np.zeros(1024, ml_dtypes.bfloat16)}
    digest = deltawire.state_digest(state)
    rng = np.random.default_rng(1)
    others = [DIFFERENCE[::-1], DIFFERENCE[:-2], [0, *DIFFERENCE]]
    others += [rng.permutation(DIFFERENCE) for _ in range(300)]
    for other in others:
        assert deltawire.state_digest({"a.weight": changed(state["a.weight"], 1, other)}) != digest


def test_a_file_that_was_changed_without_changing_the_digest_is_refused_by_its_hash() -> None:
    """An attacker cannot make a file that fits the hashes in a signed commit."""
    key = SigningKey.generate()
    chain = ToyChain(MemoryStore(), sign=key.sign, shards=1)
    chain.anchor({"a.weight": first_state()["b.weight"]})
    file = chain.commits[1].files[0]
    data = bytearray(chain.store.get(file.key, limit=1 << 20))
    begin = len(data) - file.raw
    words = np.frombuffer(data, np.int16, offset=begin)
    words[: len(DIFFERENCE)] += np.array(DIFFERENCE, np.int16)
    tampered = np.frombuffer(data, ml_dtypes.bfloat16, offset=begin)
    assert deltawire.state_digest({"a.weight": tampered}) == chain.commits[1].digest
    assert bits_of({"a.weight": tampered}) != bits_of(chain.state)
    chain.store.put(file.key, bytes(data))
    with (
        Subscriber(chain.store, options=ReaderOptions(trusted_keys=[key.public], patience=0.0), threads=1) as reader,
        pytest.raises(DataDamaged),
    ):
        reader.sync()
